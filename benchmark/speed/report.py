"""Rows and the picture of this page: `python benchmark/report.py speed`."""

import functools
import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import ALGORITHMS, OTHER, Record, Row

SWEEPS = {
    "batch_size": "episodes of an update",
    "query_length": "query tokens",
    "response_length": "response tokens",
    "rloo_k": "K, same number of episodes",
    "model": "parameters",
    "processes": "processes, same batch",
}


# --- tables ---------------------------------------------------------------------------------------
def phases(*records: Record) -> list[Row]:
    """Updates against plain PyTorch, as ratios of one run."""
    rows = []
    for record in records:
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm, ratios in record["ratios"].items():
            ours = of_contender[f"ours-{algorithm}"]
            rows.append(ours | ratios | {"algorithm": algorithm.upper()})
    return rows


def bars(*records: Record) -> list[Row]:
    """The share of the floor, then ours against plain PyTorch, TRL and our PPO, and its memory.
    Records of the same work share a row, with the lowest of their floors."""
    found: dict[Any, Row] = {}
    for record in records:
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm in ("ppo", "rloo"):
            if f"ours-{algorithm}" in of_contender:
                args = record["args"]
                key = (args["shape"], args["dtype"], algorithm)
                row = found.setdefault(key, {"args": args, "algorithm": algorithm.upper()})
                values = compared(of_contender, algorithm)
                floors = [x["floor"] for x in (row, values) if "floor" in x]
                row |= values | {"floor": min(floors)}
    return list(found.values())


def compared(rows: dict[str, Row], algorithm: str) -> dict[str, float]:
    """What one record says of our update of an algorithm, beside other contenders. TRL's PPO trains
    a value model of its own: so do we beside it, if the record has that."""
    ours = rows[f"ours-{algorithm}"]
    values = {}
    for other in ("plain", "plain-fast", "trl"):
        row = rows.get(f"{other}-{algorithm}", {})
        mine = rows.get(f"ours-critic-{algorithm}", ours) if other == "trl" else ours
        if "seconds" in row:
            values[f"speed {other}"] = row["seconds"]["total"] / mine["seconds"]["total"]
        if "peak_bytes" in row:
            values[f"memory {other}"] = mine["peak_bytes"] / row["peak_bytes"]
    if "seconds" in ours:
        values["floor"] = ours["fraction_of_floor"]["total"]
        if algorithm == "rloo" and "ours-ppo" in rows:
            values["speed ppo"] = rows["ours-ppo"]["seconds"]["total"] / ours["seconds"]["total"]
    return values


def times(*records: Record) -> list[Row]:
    """How many times as long as ours other updates take, in fp32 and in bf16."""
    found: dict[Any, Row] = {}
    for row in bars(*records):
        both = found.setdefault((row["args"]["shape"], row["algorithm"]), {})
        both[row["args"]["dtype"]] = row
    return list(found.values())


def scaling(record: Record) -> list[Row]:
    """How the time of an update grows, as ratios to the first point of a sweep."""
    found = []
    for (sweep,), rows in report.group(record["rows"], "sweep").items():
        values = dict.fromkeys(str(row["value"]) for row in rows)
        ratios = {"ppo": [], "rloo": []}
        for row in rows:
            ratios[row["algorithm"]].append(row["ratio"]["total"])
        found.append({"what": SWEEPS[sweep], "values": list(values)} | ratios)
    return found


# --- pictures -------------------------------------------------------------------------------------
def draw_sweep(axes: Axes, rows: list[Row], name: str) -> None:
    """The time of an update as a multiple of the first point of a sweep."""
    for algorithm, colour in ALGORITHMS.items():
        points = [row for row in rows if row["algorithm"] == algorithm.lower()]
        y = [row["ratio"]["total"] for row in points]
        axes.plot([row["x"] for row in points], y, "o-", color=colour, label=algorithm)
    x = np.array(sorted({row["x"] for row in rows}))
    if name not in ("rloo_k", "processes"):
        axes.plot(
            x,
            x / x[0],
            "--",
            color=OTHER,
            label="if in proportion",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [f"{value / 1e6:.1f}M" if name == "model" else f"{value:g}" for value in x]
    axes.set_xticks(x, ticks, fontsize=9, rotation=30 if name == "model" else 0)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(SWEEPS[name])


def of_record(record: Record, names: tuple[str, ...] = tuple(SWEEPS)) -> Figure:
    """A panel for each sweep of a record of scaling.py that has one of these names."""
    rows = record["rows"]
    shown = [name for name in names if name in {row["sweep"] for row in rows}]
    lines = math.ceil(len(shown) / 3)
    text = "The time of an update grows more slowly than its size"
    figure, panels = report.new(text, lines, 3, 3.4 * lines)
    for axes, name in zip(panels.flat, shown, strict=False):
        draw_sweep(axes, [row for row in rows if row["sweep"] == name], name)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    panels[0, 0].set_ylabel("time of an update\n(first point = 1)")
    panels[0, 0].legend()
    return figure


three = functools.partial(of_record, names=("batch_size", "response_length", "model"))
PICTURES = {"scaling.png": (three, "scaling-cpu-fp32.json")}
