"""Rows and the picture of this study: `python benchmark/report.py alternatives`."""

from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.differences import at_levels, of_seeds
from benchmark.report import ALGORITHMS, BEST_OF_N, TRUE_SCORE, Record, Row, group

DEFAULT = 2e-4  # the rate of the runs of PPO and RLOO
COLOURS = {
    "DPO": "#CC79A7",
    "fine-tuning": "#56B4E9",
}
KINDS = ("true_score", "kl", "repetitive", "minutes")
TITLE = "Trained on the same labels: true score over the KL"
Groups = dict[str, list[Row]]


# --- tables ---------------------------------------------------------------------------------------
def policies(rates: Record) -> Groups:
    """The runs of PPO and RLOO at the default's rate, by algorithm, in the order of their seeds."""
    found: Groups = {}
    for row in sorted(rates["rows"], key=itemgetter("seed")):
        if row["lr"] == DEFAULT:
            minutes = row["seconds"] * row["updates"] / 60
            runs = found.setdefault(row["algorithm"], [])
            runs.append(row | {"minutes": minutes})
    return found


def name_of(row: Row) -> str:
    """A method with its settings."""
    if row["method"] == "best of n":
        return f"best of {row['n']}"
    words = [row["method"], f"rate {row['lr']:g}"]
    if row["beta"]:
        words.append(f"beta {row['beta']:g}")
    plural = "" if row["epochs"] == 1 else "s"
    words.append(f"{row['epochs']} epoch{plural}")
    return ", ".join(words)


def means(name: str, rows: list[Row]) -> Row:
    """Means over the seeds of a method."""
    found: Row = {"name": name}
    for kind in KINDS:
        values = [row[kind] for row in rows if kind in row]
        found[kind] = float(np.mean(values)) if values else None
    return found


def beside(rows: list[Row], runs: list[Row]) -> dict[str, Any]:
    """True scores of a method minus those of PPO's or RLOO's runs, within seeds: of their ends, and
    where the runs first pass the KL at which the method has ended."""
    ends = []
    equal_kl = []
    for row, run in zip(rows, runs, strict=True):
        score = row["true_score"]
        ends.append(score - run["true_score"])
        passed = at_levels(run["fine_curve"], row["kl"])
        equal_kl.append(score - float(passed))
    return {
        "end": of_seeds(ends),
        "kl": of_seeds(equal_kl),
    }


def methods(record: Record, rates: Record) -> list[Row]:
    """A row for each method; PPO and RLOO last."""
    others = policies(rates)
    groups: Groups = {}
    for row in sorted(record["rows"], key=itemgetter("seed")):
        mine = groups.setdefault(name_of(row), [])
        if "cpu_seconds" in row:
            row["minutes"] = row["cpu_seconds"] / 60
        mine.append(row)
    made = []
    for name, rows in groups.items():
        found = {algorithm: beside(rows, runs) for algorithm, runs in others.items()}
        made.append(means(name, rows) | found)
    return made + [means(name, rows) for name, rows in others.items()]


def named(record: Record, rates: Record) -> dict[str, Row]:
    """The same by the first words of their names. Of DPO, the setting that was chosen."""
    found = {}
    for row in methods(record, rates):
        method, *_ = row["name"].split(",")
        found.setdefault(method, row)
    return found


def tried(record: Record) -> list[Row]:
    """The settings that were tried, in the order of their true scores."""
    rows = [row | {"name": name_of(row)} for row in record["tried"]]
    return sorted(rows, key=lambda row: (row["method"], -row["true_score"]))


# --- the picture ----------------------------------------------------------------------------------
def draw_points(axes: Axes, rows: list[Row], style: str, words: str) -> None:
    """A point for each run of DPO and of fine-tuning."""
    for method, colour in COLOURS.items():
        mine = [row for row in rows if row["method"] == method]
        kl = [row["kl"] for row in mine]
        scores = [row["true_score"] for row in mine]
        axes.plot(kl, scores, style, color=colour, label=f"{method}: {words}")


def draw(record: Record, rates: Record) -> Figure:
    """True score over the KL: mean curves of PPO and RLOO, best of n, and the other methods."""
    figure, panels = report.new(TITLE, 1, 1, 4.2)
    axes = panels[0][0]
    for algorithm, runs in policies(rates).items():
        curves = [run["fine_curve"] for run in runs]
        x, y = report.first_passages(curves)
        axes.plot(x, y, color=ALGORITHMS[algorithm], label=f"{algorithm}, mean of 3 seeds")
    best = [row for row in record["rows"] if row["method"] == "best of n"]
    points = []
    for rows in group(best, "n").values():
        score = np.mean([row["true_score"] for row in rows])
        points.append((rows[0]["kl"], score))
    x, y = zip(*points, strict=True)
    axes.plot(x, y, "*--", color=BEST_OF_N, label="best of 1, 4, 16, 64, 128")
    draw_points(axes, record["tried"], ".", "tried on one seed")
    draw_points(axes, record["rows"], "o", "on three seeds")
    report.label(axes, report.KL, TRUE_SCORE, "lower right", xlim=(0, None))
    return figure


PICTURES = {"alternatives.png": (draw, "alternatives.json", "../rates/rates.json")}
