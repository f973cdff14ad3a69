"""Rows and the picture of this study: `python benchmark/report.py optimum`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import ALGORITHMS, Record, Row


def seeds(record: Record) -> list[Row]:
    """Both algorithms of each seed side by side."""
    groups = report.group(record["rows"], "seed")
    return [{row["algorithm"]: row for row in rows} for rows in groups.values()]


def closed(record: Record) -> Row:
    """The smallest share of the gap that a run closes."""
    return {"least": min(1 - row["gap"] for row in record["rows"])}


def of_record(record: Record) -> Figure:
    """The share of the way from the starting model to the optimum that every run has left."""
    text = "Both close at least 98.5% of the gap to the optimum where it can be computed"
    figure, panels = report.new(text, 1, 1, 3.4)
    axes = panels[0, 0]
    for row in record["rows"]:
        x, y = np.array(row["curve"]).T
        missing = (row["j_star"] - y) / (row["j_star"] - row["j_start"])
        axes.plot(x, missing, color=ALGORITHMS[row["algorithm"].upper()])
    names = {f"{name}, a line for each of 3 seeds": colour for name, colour in ALGORITHMS.items()}
    report.name_colours(axes, names, "-")
    shown = "gap left between\nstarting model and optimum"
    axes.set_yscale("log")
    report.label(
        axes,
        "episodes",
        shown,
        ylim=(0.003, 1),
        legend="upper right",
    )
    axes.yaxis.set_major_formatter("{x:.0%}")
    return figure


PICTURES = {"curves.png": (of_record, "enumerated.json")}
