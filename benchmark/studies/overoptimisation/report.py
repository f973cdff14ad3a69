"""Rows and pictures of this study: `python benchmark/report.py overoptimisation`."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmark import differences, report
from benchmark.report import (
    ALGORITHMS,
    BEST_OF_N,
    OTHER,
    START,
    TRUE_SCORE,
    Record,
    Row,
    group,
    smooth,
)

BOUNDS = {0.3: "below 0.3", 0.45: "0.3 to 0.45", 1.0: "above 0.45"}  # of accuracies
HELD_OUT = 512  # labels, on which accuracies are measured
COLLAPSED = -0.5
LOW = ["low"]  # ends of runs, as counts() names them
FAR = ["low", "high"]
POOR = 0.3  # accuracies below this are shown once more
KINDS = ("true_score", "reward", "kl")
FIRST = "first two"  # series
LATER = "later"
SINGLE = ("one", "averaged weights")  # kinds of rewards that are one model
WORDS = {0.0: "none", 0.15: "default"}  # of coefficients
# Labels, algorithm, KL coefficient and seed of the runs whose responses are shown.
SHOWN = (("128", "PPO", 0.0, 3), ("4000:0.5", "RLOO", 0.0, 2))
SHOWN += (("512", "PPO", 0.0, 1), ("512", "PPO", 0.15, 1))
SEEDS = {1: "-", 2: "--", 3: ":"}  # lines of runs that differ by their seed
SHIFTS = {"PPO": -0.15, "RLOO": 0.15}  # of their lines in the picture of ensembles
SHADES = {0.0: "#E69F00", 0.05: "#56B4E9", 0.15: "#009E73", 0.5: "#CC79A7"}  # of coefficients


# --- tables ---------------------------------------------------------------------------------------
def labels_of(labels: str) -> str:
    """How many labels a reward model has, and how many of them are random."""
    size, _, noise = labels.partition(":")
    return f"{int(size):,}, {float(noise):.0%} random" if noise else f"{int(size):,}"


def set_of(row: Row) -> str:
    """A set of labels in words."""
    return f"{labels_of(row['labels'])}, seed {row['seed']}"


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


def single(record: Record) -> list[Row]:
    """The runs of a record with the accuracy of their reward model and their series. Of
    ensembles.json those whose reward is one model, by the seed of its labels."""
    if "rewards" not in record["rows"][0]:
        return [row | {"series": FIRST, "rewards": "one"} for row in record["rows"]]
    accuracies = {}
    for row in record["reward_models"]:
        accuracies[row["labels"], row["seed"]] = row["accuracy"]
    rows = []
    for row in record["rows"]:
        kind = row["rewards"]
        if kind not in SINGLE:
            continue
        more = {"kl_coef": 0.0, "series": LATER}
        more["seed"] = row["labels_seed"]
        more["accuracy"] = accuracies[row["labels"], row["labels_seed"]][kind]
        rows.append(row | more)
    return rows


def ends(*records: Record) -> list[Row]:
    """All runs by the accuracy of their reward models, those without a penalty first."""
    rows = []
    for row in sum([single(record) for record in records], []):
        bound = next(words for most, words in BOUNDS.items() if row["accuracy"] < most)
        rows.append(row | {"bound": bound})
    bounds = list(BOUNDS.values())

    def order(row: Row) -> tuple[Any, ...]:
        return bounds.index(row["bound"]), row["kl_coef"], row["series"], row["accuracy"]

    return sorted(rows, key=order)


def poorest(*records: Record) -> dict[str, Row]:
    """How runs against the poorest reward models end, by two bounds: without a penalty, with it,
    and those without it of the first series and of the later ones, whose rewards are of two
    kinds."""
    rows = [row for row in ends(*records) if row["accuracy"] < POOR]
    free = [row for row in rows if not row["kl_coef"]]
    groups = {
        "none": free,
        "default": [row for row in rows if row["kl_coef"]],
        "first": [row for row in free if row["series"] == FIRST],
        "later": [row for row in free if row["series"] == LATER],
    }
    for kind in SINGLE:
        groups[kind] = [row for row in groups["later"] if row["rewards"] == kind]
    found = {}
    for name, runs in groups.items():
        scores = [run["end"]["true_score"] for run in runs]
        row = {
            "lowest": min(scores),
            "highest": max(scores),
            "wider": counts(runs, 0.6),
        }
        found[name] = row | counts(runs)
    return found


def price(*records: Record) -> dict[str, Row]:
    """How runs with and without a penalty end, against reward models of the second kind."""
    rows = [row for row in ends(*records) if row["bound"] == "0.3 to 0.45"]
    return {
        "none": counts([row for row in rows if not row["kl_coef"]]),
        "default": counts([row for row in rows if row["kl_coef"]]),
    }


def collapsed(*records: Record) -> Row:
    """How many runs end low, and at which KLs."""
    distances = []
    for row in ends(*records):
        if row["end"]["true_score"] < COLLAPSED:
            distances.append(row["end"]["kl"])
    return {
        "runs": len(distances),
        "nearest": min(distances),
        "farthest": max(distances),
    }


def penalty(record: Record) -> list[Row]:
    """Runs of a kind, in the order of their seeds."""
    groups = group(record["rows"], "labels", "algorithm", "kl_coef")
    rows = []
    for (labels, algorithm, coef), runs in sorted(groups.items()):
        runs.sort(key=lambda run: run["seed"])
        row = {"name": labels_of(labels), "algorithm": algorithm, "penalty": WORDS[coef]}
        row["accuracy"] = [run["accuracy"] for run in runs]
        row["start"] = [run["start"]["reward"] for run in runs]
        rows.append(row | {kind: [run["end"][kind] for run in runs] for kind in KINDS})
    return rows


def counts(runs: list[Row], bound: float = -COLLAPSED) -> Row:
    """How many runs end low, high and in between."""
    scores = np.array([run["end"]["true_score"] for run in runs])
    low = int((scores < -bound).sum())
    high = int((scores > bound).sum())
    return {"runs": len(runs), "low": low, "high": high, "between": len(runs) - low - high}


def gamble(*records: Record) -> list[Row]:
    """How runs end, by the accuracy of their reward models, with and without a penalty."""
    rows = []
    for key, runs in group(ends(*records), "kl_coef", "bound", "series").items():
        coef, bound, series = key
        row = {
            "penalty": WORDS[coef],
            "bound": bound,
            "series": series,
        }
        rows.append(row | counts(runs))
    return rows


def versus(first: Row, second: Row, ways: Sequence[str]) -> float:
    """Fisher's exact test: how likely two groups of runs differ so by chance in how many end in
    these ways, if all runs were independent."""
    table = []
    for row in (first, second):
        count = sum(row[way] for way in ways)
        table.append([count, row["runs"] - count])
    return float(stats.fisher_exact(table).pvalue)


def compare(rows: list[Row], ways: Sequence[str], bound: float = -COLLAPSED) -> float:
    """The same of runs without a penalty and with it."""
    free = [row for row in rows if not row["kl_coef"]]
    held = [row for row in rows if row["kl_coef"]]
    return versus(counts(free, bound), counts(held, bound), ways)


def sign_test(rows: list[Row]) -> float:
    """The exact sign test of twins, which differ only in the penalty. It counts those of which one
    ends far out and the other does not, and how often that is the one without a penalty."""
    split = []
    for twins in group(rows, "labels", "seed", "algorithm").values():
        is_far = {}
        for row in twins:
            is_far[WORDS[row["kl_coef"]]] = abs(row["end"]["true_score"]) > -COLLAPSED
        if is_far["none"] != is_far["default"]:
            split.append(is_far["none"])
    return float(stats.binomtest(sum(split), len(split)).pvalue)


def spreads(*records: Record) -> list[Row]:
    """The deviation of the ends of runs against the poorest reward models, without a penalty and
    with it, and whether they differ by chance (Brown and Forsythe 1974): of the later runs, and of
    all."""
    poor = [row for row in ends(*records) if row["accuracy"] < POOR]
    held = [row["end"]["true_score"] for row in poor if row["kl_coef"]]
    every = [row for row in poor if not row["kl_coef"]]
    later = [row for row in every if row["series"] == LATER]
    rows = []
    for name, runs in (("later", later), ("all", every)):
        free = [row["end"]["true_score"] for row in runs]
        row = {
            "name": name,
            "runs": len(free),
            "none": float(np.std(free, ddof=1)),
            "default": float(np.std(held, ddof=1)),
            "p": float(stats.levene(free, held, center="median").pvalue),
        }
        rows.append(row)
    return rows


def chances(first: Record, second: Record, third: Record) -> list[Row]:
    """Which differences between runs without a penalty and with it may be chance: in the second
    record, which has both; together with the first; and with single models of the third."""
    weak = {row["labels"] for row in second["rows"]}
    every = [row for row in ends(first, second) if row["labels"] in weak]
    poor = [row for row in ends(first, second, third) if row["accuracy"] < POOR]
    one_series = [row for row in ends(second) if row["accuracy"] < POOR]
    two_series = [row for row in poor if row["series"] == FIRST]
    later = [row for row in poor if row["series"] == LATER or row["kl_coef"]]
    with_one = [row for row in poor if row["rewards"] == "one"]
    free = counts([row for row in two_series if not row["kl_coef"]])
    far = free["low"] + free["high"]
    found = {
        "ends": compare(one_series, FAR),
        "ends, both series": compare(two_series, FAR),
        "ends beyond 0.6": compare(two_series, FAR, 0.6),
        "ends, twins": sign_test(one_series),
        "ends, later": compare(later, FAR),
        "ends, with one": compare(with_one, FAR),
        "ends, with all": compare(poor, FAR),
        "collapses": compare(two_series, LOW),
        "collapses, with all": compare(poor, LOW),
        "second series": compare(one_series, LOW),
        "all accuracies": compare(every, LOW),
        "high or low": stats.binomtest(free["high"], far).pvalue,
    }
    return [{"name": name, "p": p} for name, p in found.items()]


def repeats(record: Record) -> dict[str, Row]:
    """In how many responses, one of each run, more than a fifth of the pairs of neighbouring words
    stood in it before; with and without a penalty."""
    rows = {}
    for (coef,), runs in group(record["rows"], "kl_coef").items():
        found = 0
        for run in runs:
            response = run["samples"][0]["response"]
            words = re.findall(r"\w+", response.lower())
            pairs = list(itertools.pairwise(words))
            num_repeated = len(pairs) - len(set(pairs))
            found += num_repeated / len(pairs) > 0.2
        rows[WORDS[coef]] = {"runs": len(runs), "repeat": found}
    return rows


def falls(record: Record) -> list[Row]:
    """The run whose reward falls most on the way, in means of five updates: from where and to
    where; with and without a penalty."""
    rows = []
    for (coef,), runs in group(record["rows"], "kl_coef").items():
        found = []
        for run in runs:
            reward = smooth(run["reward"], 5)
            top = np.maximum.accumulate(reward)
            i = int((top - reward).argmax())
            found.append((top[i] - reward[i], top[i], reward[i]))
        _, before, after = max(found)
        row = {
            "penalty": WORDS[coef],
            "from": before,
            "to": after,
        }
        rows.append(row)
    return rows


def chances_of_kinds(record: Record) -> list[Row]:
    """Whether kinds of rewards differ from one reward model, in collapses and in ends far out."""
    several = {row["rewards"]: row for row in kinds(record)}
    one = several.pop("one")
    joined = {
        "low": sum(row["low"] for row in several.values()),
        "runs": sum(row["runs"] for row in several.values()),
    }
    found = {"collapses": versus(one, joined, LOW)}
    for name, row in several.items():
        found[name] = versus(one, row, FAR)
    return [{"name": name, "p": p} for name, p in found.items()]


def members(record: Record) -> list[Row]:
    """The reward models of a set of labels, and how often each kind of reward is right."""
    return [{"name": set_of(row)} | row for row in record["reward_models"]]


def kinds(record: Record) -> list[Row]:
    """How runs end, by the kind of their reward."""
    rows = []
    for (kind,), runs in group(record["rows"], "rewards").items():
        scores = [run["end"]["true_score"] for run in runs]
        rows.append({"rewards": kind, "mean": np.mean(scores)} | counts(runs))
    return rows


def ensembles(record: Record) -> list[Row]:
    """The ends of runs in the order of their labels, by the kind of their reward and the
    algorithm."""
    rows = []
    for (kind, algorithm), runs in group(record["rows"], "rewards", "algorithm").items():
        row = {"rewards": kind, "algorithm": algorithm}
        for name in KINDS:
            row[name] = [run["end"][name] for run in runs]
        rows.append(row)
    return rows


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
    text = "Weak reward models: some runs collapse without a penalty, and none with it"
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


def draw_end(axes: Axes, x: float, row: Row) -> None:
    """A mark for the true score at the end of a run."""
    mark, style = MARKS[kind_of(row)]
    colour = ALGORITHMS[row["algorithm"]]
    axes.plot(x, row["end"]["true_score"], mark, alpha=0.6, color=colour, **style)


def kind_of(row: Row) -> str:
    """The runs that share a mark."""
    if row["kl_coef"]:
        return "default penalty"
    if row["series"] == FIRST:
        return "no KL penalty"
    return "no KL penalty, later"


def draw_twins(axes: Axes, rows: list[Row]) -> None:
    """The runs of each set of labels, side by side; a line joins the two that differ only by their
    machine."""
    sets = list(group(rows, "labels", "seed"))
    runs = [row | {"kind": kind_of(row)} for row in rows]
    for key, twins in group(runs, "labels", "seed", "algorithm", "kind").items():
        labels, seed, algorithm, kind = key
        x = sets.index((labels, seed)) + PLACES[kind] + SIDES[algorithm]
        for row in twins:
            draw_end(axes, x, row)
        if kind == "no KL penalty":
            scores = [row["end"]["true_score"] for row in twins]
            axes.plot([x] * len(twins), scores, color=ALGORITHMS[algorithm], linewidth=0.8)
    names = []
    for members in group(rows, "labels", "seed").values():
        found = sorted({f"{row['accuracy']:.2f}" for row in members})
        name = set_of(members[0]).replace(", seed", "\nseed")
        accuracies = " to ".join(dict.fromkeys([found[0], found[-1]]))
        names.append(f"{name}\n{accuracies}")
    axes.set_xticks(range(len(sets)), names, fontsize=9)
    places = []
    for x in range(len(sets)):
        places += [x + shift for shift in PLACES.values()]
    axes.xaxis.remove_overlapping_locs = False  # the middle columns stand at the sets' names
    axes.set_xticks(places, COLUMNS * len(sets), minor=True, rotation=90, fontsize=8)
    axes.tick_params(axis="x", which="major", length=0, pad=38)
    axes.set_xlim(-0.5, len(sets) - 0.5)
    axes.grid(visible=False, axis="x")


def over_accuracy(*records: Record) -> Figure:
    """All runs against one reward model, without a KL penalty, in both series and later, and with
    the default's; and once more those of the poorest reward models, by their sets of labels."""
    text = "Without a KL penalty, a reward model near chance makes training a gamble"
    more = {"sharey": True, "width_ratios": (2, 3)}
    figure, panels = report.new(text, 1, 2, 5, **more)
    poor, every = panels[0]
    rows = ends(*records)
    for row in rows:
        draw_end(every, row["accuracy"], row)
    draw_twins(poor, [row for row in rows if row["accuracy"] < POOR])
    for axes in panels[0]:
        report.line_at(axes, 0)
    chance = records[0]["reward_models"][0]["constant"]
    every.axvline(chance, color=OTHER, linestyle="--", linewidth=1)
    poor.set_title("accuracies below 0.3; a line joins\nthe same run on two machines")
    every.set_title("all runs; dashed: always the same answer")
    every.axvspan(
        0.24,
        POOR,
        color=OTHER,
        alpha=0.25,
        linewidth=0,
    )
    poor.set_xlabel(AXIS)
    every.set_xlabel("accuracy of the reward model (best of four)")
    poor.set_ylabel(f"{TRUE_SCORE} at the end")
    poor.set_ylim(-1, 1.05)
    for kind, (mark, style) in MARKS.items():
        count = sum(kind_of(row) == kind for row in rows)
        words = f"{kind} ({count} runs)"
        report.name_colours(every, {words: START}, mark, linestyle="", **style)
    report.name_colours(every, ALGORITHMS, "s")
    every.legend(loc="lower right")
    return figure


def of_ensembles(record: Record) -> Figure:
    """The true score at the end of each run, in a line for each kind of reward, with a mark for
    each set of labels."""
    figure, panels = report.new(ENSEMBLES, 1, 1, 3.4)
    axes = panels[0, 0]
    kinds = list(dict.fromkeys(row["rewards"] for row in record["rows"]))
    marks = {}
    for row, mark in zip(record["reward_models"], "os^", strict=True):
        marks[row["labels"], row["seed"]] = (f"labels: {set_of(row)}", mark)
    for x, name in ((COLLAPSED, None), (-COLLAPSED, "-0.5 and 0.5")):
        axes.axvline(x, color=OTHER, linestyle="--", linewidth=1, label=name)
    for (kind, algorithm), rows in group(record["rows"], "rewards", "algorithm").items():
        y = kinds.index(kind) + SHIFTS[algorithm]
        for row in rows:
            _, mark = marks[row["labels"], row["labels_seed"]]
            axes.plot(
                row["end"]["true_score"],
                y,
                mark,
                color=ALGORITHMS[algorithm],
                alpha=0.6,
                markersize=8,
            )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    report.label(axes, f"{TRUE_SCORE} at the end", xlim=(-1, 1))
    report.name_colours(axes, ALGORITHMS, "D")
    for name, mark in marks.values():
        report.name_colours(axes, {name: START}, mark)
    report.legend_below(figure, axes, 5)
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


# Marks of runs, and where they stand beside the place of their set of labels.
HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 1.6}
MARKS = {
    "no KL penalty": ("o", {}),
    "no KL penalty, later": ("D", {"markersize": 5}),
    "default penalty": ("^", HOLLOW),
}
# Names of these places, below them.
COLUMNS = ("none", "later", "default")
AXIS = "columns: KL penalty (later: none, too)\nlabels, and accuracies of their reward models"
PLACES = {
    "no KL penalty": -0.28,
    "no KL penalty, later": 0.0,
    "default penalty": 0.28,
}
SIDES = {"PPO": -0.06, "RLOO": 0.06}
ENSEMBLES = "Several weak reward models: no run collapses, but ends range from -0.5 to 1.0"
WEAK = "The reward ends higher in every run; the true score does not"
MORE = "With 1,024 labels no run collapses; with half of 4,000 at random one does"
curves = functools.partial(over_root_kl, sources=["128", "512", "4000"], title=WEAK)
more_curves = functools.partial(over_root_kl, sources=["1024", "2048", "4000:0.5"], title=MORE)
PICTURES = {
    "curves.png": (curves, "tiny.json"),
    "more.png": (more_curves, "tiny.json"),
    "penalty.png": (with_penalty, "penalty.json"),
    "gamble.png": (over_accuracy, "tiny.json", "penalty.json", "ensembles.json"),
    "ensembles.png": (of_ensembles, "ensembles.json"),
    "frontier.png": (coefficients, "frontier.json", "slow.json", "tiny.json"),
}
