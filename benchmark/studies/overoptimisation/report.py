"""Rows and pictures of this study: `python benchmark/report.py overoptimisation`."""

import functools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmark import differences, report
from benchmark.differences import smooth
from benchmark.judge import is_repetitive
from benchmark.report import ALGORITHMS, BEST_OF_N, TRUE_SCORE, Record, Row, group

HELD_OUT = 512  # labels, on which accuracies are measured
KINDS = ("true_score", "reward", "kl")
HELD_OUT_KINDS = ("repetitive", "likelihood", "true_score", "kl")
WORDS = {0.0: "none", 0.15: "default"}  # of coefficients
# Labels, algorithm, KL coefficient and seed of the runs whose responses are shown.
SHOWN = (("128", "PPO", 0.0, 3), ("4000:0.5", "RLOO", 0.0, 2))
SHOWN += (("512", "PPO", 0.0, 1), ("512", "PPO", 0.15, 1))
FRESH = range(61, 73)  # seeds of the fresh sets of labels
SEEDS = {1: "-", 2: "--", 3: ":"}  # lines of runs that differ by their seed
SHADES = {0.0: "#E69F00", 0.05: "#56B4E9", 0.15: "#009E73", 0.5: "#CC79A7"}  # of coefficients


# --- tables ---------------------------------------------------------------------------------------
def labels_of(labels: str) -> str:
    """How many labels a reward model has, and how many of them are random."""
    size, _, noise = labels.partition(":")
    return f"{int(size):,}, {float(noise):.0%} random" if noise else f"{int(size):,}"


def fits(record: Record) -> list[Row]:
    """Runs without a penalty as means over seeds, by their labels; best of n after the policies."""
    rows = [row | {"name": labels_of(row["labels"])} for row in record["table"]]

    def order(row: Row) -> tuple[int, str]:
        count, *_ = row["labels"].split(":")
        return int(count), row["name"]

    return sorted(rows, key=order)


def best_of_128(record: Record) -> Row:
    """The true score of the best of 128 responses, by reward models of 4,000 labels, and its KL."""
    rows = [row for row in record["best_of_n"] if row["labels"] == "4000"]
    scores = [row["true_score"][-1] for row in rows]
    return {
        "mean": float(np.mean(scores)),
        "low": min(scores),
        "high": max(scores),
        "kl": rows[0]["kl"][-1],
    }


def constant(record: Record) -> Row:
    """How often a constant answer is right, with its interval over the held-out labels."""
    share = record["reward_models"][0]["constant"]
    return {"share": share} | differences.wilson(share, HELD_OUT)


def repeats_words(run: Row) -> bool:
    """Whether the one response that is kept of the run is repetitive."""
    return is_repetitive(run["samples"][0]["response"])


def repeats(record: Record) -> list[Row]:
    """In how many responses, one of each run, phrases repeat: by the kind of labels and the
    penalty, and over all."""
    every = [run | {"kind": "all"} for run in record["rows"]]
    runs = [run | {"kind": labels_of(run["labels"])} for run in record["rows"]]
    rows = []
    for (kind, coef), found in group(runs + every, "kind", "kl_coef").items():
        row = {
            "name": f"{kind}, {WORDS[coef]}",
            "kind": kind,
            "penalty": WORDS[coef],
        }
        row["repeat"] = sum(map(repeats_words, found))
        row["runs"] = len(found)
        for name in ("true_score", "kl"):
            ends = [run["end"][name] for run in found]
            row[name] = {"low": min(ends), "high": max(ends)}
        rows.append(row)
    return rows


def sets_of_labels(record: Record) -> Row:
    """In how many sets of labels more of the responses without a penalty repeat than of those with
    it, of the sets that differ; and the exact sign test of it."""
    more = []
    for runs in group(record["rows"], "labels", "seed").values():
        lead = 0
        for run in runs:
            if repeats_words(run):
                lead += -1 if run["kl_coef"] else 1
        if lead:
            more.append(lead > 0)
    p = float(stats.binomtest(sum(more), len(more)).pvalue)
    return {
        "more": sum(more),
        "sets": len(more),
        "p": p,
    }


def held_out(records: tuple[Record, ...], algorithms: list[str], coef: float) -> list[Row]:
    """What the responses to held-out queries are for each set of labels, a record of its own: means
    over the algorithms' runs."""
    found = []
    for record in records:
        runs = []
        for run in record["rows"]:
            if run["kl_coef"] == coef and run["algorithm"] in algorithms:
                runs.append(run["held_out"])
        means = {}
        for kind in HELD_OUT_KINDS:
            means[kind] = np.mean([run[kind] for run in runs])
        found.append(means)
    return found


def fresh_sets(*records: Record) -> list[Row]:
    """By protocol.md, for each algorithm and for both: what 512 responses to held-out queries are
    without and with the penalty, as means over sets of labels; and how much more it is without,
    within sets."""
    names = {
        "PPO": ["PPO"],
        "RLOO": ["RLOO"],
        "both": ["PPO", "RLOO"],
    }
    start = start_of_sets(*records)
    rows = []
    for name, algorithms in names.items():
        row: Row = {"name": name, "sets": len(records)}
        for kind in HELD_OUT_KINDS:
            values = []
            for coef in WORDS:
                found = held_out(records, algorithms, coef)
                values.append([means[kind] for means in found])
            leads = np.subtract(*values)
            row[kind] = differences.with_interval(leads)
            row[kind] |= {
                "none": np.mean(values[0]),
                "default": np.mean(values[1]),
                "more": int((leads > 0).sum()),
                "start": start[kind],
                "lower": -row[kind]["mean"],
            }
        rows.append(row)
    return rows


def start_of_sets(*records: Record) -> Row:
    """The same of the starting model, read with the sets' queries and reward models; and how good
    these are."""
    row: Row = {}
    for kind in HELD_OUT_KINDS:
        values = [record["starting_models"][0]["held_out"][kind] for record in records]
        row[kind] = float(np.mean(values))
    accuracies = [record["reward_models"][0]["accuracy"] for record in records]
    row["least"] = min(accuracies)
    row["most"] = max(accuracies)
    return row


def collapse(record: Record) -> list[Row]:
    """The first response of the last update of runs that collapsed, and of others."""
    of_run = {}
    for row in record["rows"]:
        text = " ".join(row["samples"][0]["response"].split())
        penalty = "penalty" if row["kl_coef"] else "no penalty"
        key = (row["labels"], row["algorithm"], row["kl_coef"], row["seed"])
        of_run[key] = row | {"penalty": penalty, "response": text}
    return [of_run[key] for key in SHOWN]


def frontier(*records: Record) -> list[Row]:
    """Groups of runs with their rate: best of n last, then by coefficient."""
    rows = []
    for record in records:
        rate = record["args"].get("lr")
        words = f", `--lr {rate}`" if rate else ""
        rows += [row | {"rate": words} for row in record["table"]]
    rows.sort(key=lambda row: (row["algorithm"], not row["rate"], row["kl_coef"] or 0.0))
    return sorted(rows, key=lambda row: row["algorithm"] == "best of n")


# --- pictures -------------------------------------------------------------------------------------
def heading(labels: str, record: Record) -> str:
    """Of a column: the labels of its reward models, and their accuracy."""
    size, comma, random = labels_of(labels).partition(", ")
    accuracy = next(row["accuracy"] for row in record["table"] if row["labels"] == labels)
    return f"{size} labels{comma}{random}\n(accuracy {accuracy:.2f})"


def over_root_kl(record: Record, sources: list[str], title: str) -> Figure:
    """True score above and reward below, a column for each kind of reward model, a line for each
    run."""
    figure, panels = report.new(
        title,
        2,
        len(sources),
        5,
        sharex=True,
        sharey="row",
    )
    for column, labels in zip(panels.T, sources, strict=True):
        for axes, kind in zip(column, ("true_score", "reward"), strict=True):
            report.line_at(axes, 0)
            for row in [*record["rows"], *record["best_of_n"]]:
                if row["labels"] == labels:
                    name = row.get("algorithm", "best of n")
                    width = 5 if "algorithm" in row else 1
                    x = np.sqrt(smooth(row["kl"], width).clip(min=0))
                    style = {"color": ALGORITHMS.get(name, BEST_OF_N), "linewidth": 1.4}
                    label = f"{name}, a line for each of 3 seeds"
                    axes.plot(x, smooth(row[kind], width), **style, label=label)
        column[0].set_title(heading(labels, record))
        nats = (0, 4, 16, 36, 64, 100, 144)
        column[1].set_xticks([value**0.5 for value in nats], nats)
    panels[1, len(sources) // 2].set_xlabel(f"{report.KL}, on a square-root scale")
    panels[0, 0].set_ylabel(TRUE_SCORE)
    panels[1, 0].set_ylabel("reward (reward model)")
    report.legend_below(figure, panels[0, 0], 3)
    return figure


def of_record(record: Record) -> Figure:
    """A record of your own."""
    return over_root_kl(record, record["args"]["labels"], "True score and reward")


def draw_run(axes: Axes, row: Row) -> None:
    """The true score of a run; what falls below 0 has the way of its reward beside it."""
    scores = smooth(row["true_score"], 5)
    reward = smooth(row["reward"], 5)
    x = (np.arange(len(scores)) + 0.5) * 5 * 64
    colour = ALGORITHMS[row["algorithm"]]
    is_low = scores[-1] < 0
    axes.plot(
        x,
        scores,
        SEEDS[row["seed"]],
        color=colour,
        linewidth=2.6 if is_low else 1.5,
    )
    if is_low:
        text = f"reward {reward[0]:.1f} \N{RIGHTWARDS ARROW} {reward[-1]:.1f}"
        report.note(axes, text, (x[0], -0.9), (0, 0), colour)


def with_penalty(record: Record) -> Figure:
    """True score over the episodes against weak reward models: without a KL penalty above, with one
    below."""
    sources = record["args"]["labels"]
    text = "Weak reward models: without a KL penalty the true score moves more, up or down"
    size = (2, len(sources), 5.2)
    figure, panels = report.new(text, *size, sharex=True, sharey=True)
    for (coef, labels), rows in group(record["rows"], "kl_coef", "labels").items():
        axes = panels[int(coef > 0), sources.index(labels)]
        report.line_at(axes, 0)
        for row in rows:
            draw_run(axes, row)
        if coef:
            report.label(axes, "episodes", ylim=(-1, 1))
        else:
            axes.set_title(heading(labels, record))
    panels[0, 0].set_ylabel(f"no KL penalty:\n{TRUE_SCORE}")
    panels[1, 0].set_ylabel(f"default KL penalty:\n{TRUE_SCORE}")
    report.name_colours(panels[0, 0], ALGORITHMS, "-")
    for seed, style in SEEDS.items():
        report.name_colours(panels[0, 0], {f"seed {seed}": "black"}, style)
    report.legend_below(figure, panels[0, 0], 5)
    return figure


def of_fresh_sets(*records: Record) -> Figure:
    """The share of repetitive responses without and with the penalty, a line for each set."""
    text = "Without a KL penalty many more responses repeat phrases, with every set of labels"
    figure, (panels,) = report.new(text, 1, 2, 3.2, sharey=True)
    start = start_of_sets(*records)["repetitive"]
    lines = dict(zip(ALGORITHMS, panels, strict=True))
    for algorithm, axes in lines.items():
        columns = [held_out(records, [algorithm], coef) for coef in WORDS]
        for without, with_it in zip(*columns, strict=True):
            shares = (without["repetitive"], with_it["repetitive"])
            axes.plot(shares, "o-", color=ALGORITHMS[algorithm])
        report.line_at(axes, start, "starting model", "--", report.START)
        axes.set_title(algorithm)
        axes.set_xticks((0, 1), ("no KL penalty", "default KL penalty"))
        axes.set_xlim(-0.4, 1.4)
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter("{x:.0%}")
    report.label(panels[0], y="repetitive responses", legend="upper right")
    return figure


def coefficients(fixed: Record, slow: Record, free: Record) -> Figure:
    """True score over the KL and over the episodes, for coefficients of the KL penalty and a lower
    rate; a row for each algorithm."""
    text = "At the same KL, a penalty or a lower rate lifts PPO; RLOO's curves nearly coincide"
    figure, panels = report.new(text, 2, 2, 6, sharex="col", sharey=True)
    lines = dict(zip(ALGORITHMS, panels, strict=True))
    for record, style, more in ((fixed, "-", ""), (slow, "--", ", --lr 5e-5")):
        for (algorithm, coef), rows in group(record["rows"], "algorithm", "kl_coef").items():
            by_kl, by_episodes = lines[algorithm]
            name = f"KL coefficient {coef:g}{more}"
            curves = [{kind: smooth(row[kind], 2) for kind in KINDS} for row in rows]
            x, y = report.first_passages(curves)
            by_kl.plot(x, y, style, color=SHADES[coef], label=name)
            scores = np.mean([smooth(row["true_score"], 5) for row in rows], 0)
            x = (np.arange(len(scores)) + 0.5) * 5 * 64
            by_episodes.plot(x, scores, style, color=SHADES[coef])
    for algorithm, (by_kl, _) in lines.items():
        by_kl.plot(*report.best_of_n(free), ":", color=BEST_OF_N, label="best of n")
        report.label(
            by_kl,
            y=f"{algorithm}: {TRUE_SCORE}",
            xlim=(0, 16),
            ylim=(0, 1),
        )
    panels[1, 0].set_xlabel(report.KL)
    report.label(panels[1, 1], "episodes")
    report.legend_below(figure, panels[0, 0], 3)
    return figure


WEAK = "The reward ends higher in every run; the true score does not"
curves = functools.partial(over_root_kl, sources=["128", "512", "4000"], title=WEAK)
PICTURES = {
    "curves.png": (curves, "tiny.json"),
    "penalty.png": (with_penalty, "penalty.json"),
    "repeats.png": (of_fresh_sets, *(f"set-{seed}.json" for seed in FRESH)),
    "frontier.png": (coefficients, "frontier.json", "slow.json", "tiny.json"),
}
