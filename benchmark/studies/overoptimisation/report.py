"""Rows and pictures of this study: `python benchmark/report.py overoptimisation`."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.differences import smooth
from benchmark.report import ALGORITHMS, TRUE_SCORE, Record, Row

HELD_OUT = 512  # labels, on which accuracies are measured
HELD_OUT_KINDS = ("repetitive", "likelihood", "true_score", "kl")
NONE, DEFAULT = COEFS = (0.0, 0.15)  # of the KL penalty
PENALTIES = {NONE: "none", DEFAULT: "default"}
FRESH = range(61, 73)  # seeds of the sets of 128 labels
SEEDS = range(61, 64)  # of the larger ones
SHADES = {"128": "#E69F00", "4000": "#56B4E9"}  # of numbers of labels
WINDOW = 5  # updates whose means make a point of a curve
NATS = (0, 4, 16, 36, 64, 100, 144)  # which the pictures name
TITLE = (
    "Without a KL penalty the reward rises in every run; with few labels the true score need not"
)


# --- tables ---------------------------------------------------------------------------------------
def constant(record: Record) -> Row:
    """How often a constant answer is right, with its interval over the held-out labels."""
    share = record["reward_models"][0]["constant"]
    return {"share": share} | differences.wilson(share, HELD_OUT)


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


def penalties(*records: Record) -> list[Row]:
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
            for coef in COEFS:
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


def by_penalty(*records: Record) -> list[Row]:
    """The same by the number of labels."""
    rows = []
    for size in ("128", "4000"):
        found = penalties(*of_size(size, records))
        rows += [row | {"labels": int(size)} for row in found]
    return rows


def of_size(size: str, records: tuple[Record, ...]) -> list[Record]:
    """The records of this number of labels."""
    return [record for record in records if record["rows"][0]["labels"] == size]


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


def by_labels(*records: Record) -> list[Row]:
    """For each number of labels: how good the reward models of three seeds are, and what policies
    are after training with the penalty, beside the starting model."""
    found: dict[str, Row] = {}
    for record in records:
        for model, start in zip(
            record["reward_models"],
            record["starting_models"],
            strict=True,
        ):
            row = found.setdefault(model["labels"], {"accuracy": [], "start": []})
            row["accuracy"].append(model["accuracy"])
            row["start"].append(start["held_out"]["true_score"])
        for run in record["rows"]:
            if run["kl_coef"] == DEFAULT:
                ends = found[run["labels"]].setdefault(run["algorithm"], [])
                ends.append(run["held_out"])
    rows = []
    for labels in sorted(found, key=int):
        row = {"labels": int(labels)}
        for name in ("accuracy", "start"):
            row[name] = differences.with_interval(found[labels][name])
        for algorithm in ALGORITHMS:
            ends = found[labels][algorithm]
            row[algorithm] = differences.with_interval([end["true_score"] for end in ends])
            row[algorithm]["kl"] = np.mean([end["kl"] for end in ends])
            row[algorithm]["repetitive"] = np.mean([end["repetitive"] for end in ends])
        rows.append(row)
    return rows


def responses(*records: Record) -> list[Row]:
    """The response to the first held-out query after each run, with what all held-out ones are."""
    rows = []
    for run in [run for record in records for run in record["rows"]]:
        text = " ".join(run["samples"][0]["response"].split())
        more = {"response": text, "size": int(run["labels"])}
        rows.append(run | more | {"penalty": PENALTIES[run["kl_coef"]]})
    return rows


# --- pictures -------------------------------------------------------------------------------------
def draw_runs(panels: Any, records: list[Record]) -> None:
    """True score above and reward below, over the square root of the KL: runs without a penalty."""
    for axes, kind in zip(panels, ("true_score", "reward"), strict=True):
        report.line_at(axes, 0)
        for run in [run for record in records for run in record["rows"]]:
            if run["kl_coef"] == NONE:
                name = run["algorithm"]
                x = np.sqrt(smooth(run["kl"], WINDOW).clip(min=0))
                style = {"color": ALGORITHMS[name], "linewidth": 1.4}
                label = f"{name}, a line for each of 3 seeds"
                axes.plot(x, smooth(run[kind], WINDOW), **style, label=label)


def over_root_kl(*records: Record) -> Figure:
    """A column for each number of labels, as Gao et al. 2022 plot it."""
    figure, panels = report.new(TITLE, 2, 2, 5, sharex=True, sharey="row")
    for column, size in zip(panels.T, ("128", "4000"), strict=True):
        found = of_size(size, records)
        draw_runs(column, found)
        accuracy = np.mean([record["reward_models"][0]["accuracy"] for record in found])
        column[0].set_title(f"{int(size):,} labels (accuracy {accuracy:.2f})")
        column[1].set_xticks([value**0.5 for value in NATS], NATS)
        column[1].set_xlabel(f"{report.SHORT_KL}, on a square-root scale")
    panels[0, 0].set_ylabel(TRUE_SCORE)
    panels[1, 0].set_ylabel("reward (reward model)")
    report.legend_below(figure, panels[0, 0], 2)
    return figure


def draw_repeats(*records: Record) -> Figure:
    """The share of repetitive responses without and with the penalty, a line for each set."""
    text = "Without a KL penalty many more responses repeat phrases"
    figure, (panels,) = report.new(text, 1, 2, 3.4, sharey=True)
    lines = dict(zip(ALGORITHMS, panels, strict=True))
    for size, colour in SHADES.items():
        sets = of_size(size, records)
        for algorithm, axes in lines.items():
            columns = [held_out(sets, [algorithm], coef) for coef in COEFS]
            for without, with_it in zip(*columns, strict=True):
                shares = (without["repetitive"], with_it["repetitive"])
                axes.plot(shares, "o-", color=colour, label=f"{int(size):,} labels")
            axes.set_title(algorithm)
            axes.set_xticks((0, 1), ("no KL penalty", "default KL penalty"))
            axes.set_xlim(-0.4, 1.4)
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter("{x:.0%}")
    start = start_of_sets(*records)["repetitive"]
    for axes in panels:
        report.line_at(axes, start, "starting model", "--", report.START)
    report.label(panels[0], y="repetitive responses")
    report.legend_below(figure, panels[0], 3)
    return figure


SETS = [f"set-{seed}.json" for seed in FRESH]
GOOD = [f"good-{seed}.json" for seed in SEEDS]
PICTURES = {
    "repeats.png": (draw_repeats, *SETS, *GOOD),
    "curves.png": (over_root_kl, *SETS[:3], *GOOD),
}
