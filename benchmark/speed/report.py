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
def memory(*records: Record) -> list[Row]:
    """Memory and speed of an update of each algorithm, as ratios to PPO."""
    return [row | {"args": record["args"]} for record in records for row in record["rows"]]


def work(args: dict[str, Any]) -> str:
    """A name for what a record of throughput.py has measured."""
    if args["shape"] == args["queries"] == "tiny":
        return f"default run, {args['dtype']}"
    length = args["query_length"]
    queries = f"book ({length})" if args["queries"] == "book" else length
    tokens = f"{queries} + {args['response_length']}"
    return f"{args['shape']}, {tokens}, {args['batch_size']}, {args['dtype']}"


def phases(*records: Record) -> list[Row]:
    """Updates against plain PyTorch, as ratios of one run. A record of memory has none."""
    rows = []
    for record in records:
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm, ratios in record.get("ratios", {}).items():
            row = {"work": work(record["args"]), "algorithm": algorithm.upper()}
            rows.append(of_contender[f"ours-{algorithm}"] | ratios | row)
    return rows


def compared(rows: dict[str, Row], algorithm: str) -> dict[str, float]:
    """What one record says of our update of an algorithm, beside other contenders. TRL's PPO trains
    a value model of its own: so do we beside it, if the record has that."""
    ours = rows[f"ours-{algorithm}"]
    values = {}
    for other in ("plain", "plain-fast", "trl", "trl-fast"):
        row = rows.get(f"{other}-{algorithm}", {})
        mine = rows.get(f"ours-critic-{algorithm}", ours) if "trl" in other else ours
        if "seconds" in row:
            values[f"speed {other}"] = row["seconds"]["total"] / mine["seconds"]["total"]
        if "peak_bytes" in row:
            values[f"memory {other}"] = mine["peak_bytes"] / row["peak_bytes"]
    if "seconds" in ours:
        values["floor"] = ours["fraction_of_floor"]["total"]
        if algorithm == "rloo" and "ours-ppo" in rows:
            values["speed ppo"] = rows["ours-ppo"]["seconds"]["total"] / ours["seconds"]["total"]
    return values


def bars(*records: Record) -> list[Row]:
    """The share of the floor, then ours against plain PyTorch, TRL and our PPO, and its memory.
    Records of the same work share a row, with the lowest of their floors."""
    found: dict[tuple[str, str], Row] = {}
    for record in records:
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm in ("ppo", "rloo"):
            if f"ours-{algorithm}" in of_contender:
                values = compared(of_contender, algorithm)
                row = found.setdefault((work(record["args"]), algorithm), {})
                if "floor" in row:
                    values["floor"] = min(row["floor"], values.get("floor", 1.0))
                row |= values | {"args": record["args"], "algorithm": algorithm.upper()}
    return [row | {"work": what} for (what, _), row in found.items()]


def times(*records: Record) -> list[Row]:
    """How many times as long as ours other updates take, in fp32 and in bf16."""
    found: dict[tuple[str, str], Row] = {}
    for row in bars(*records):
        key = (row["args"]["shape"], row["algorithm"])
        both = found.setdefault(
            key,
            {"shape": key[0], "algorithm": key[1]},
        )
        both[row["args"]["dtype"]] = row
    return list(found.values())


def versions(*records: Record) -> list[Row]:
    """Whole runs against those of a former version."""
    rows = []
    for row in [row for record in records for row in record["rows"]]:
        name = row["work"] + (f", with `{row['own']}` here alone" if row.get("own") else "")
        rows.append(row | {"name": name})
    return rows


def scaling(record: Record) -> list[Row]:
    """How the time of an update grows, as ratios to the first point of a sweep."""
    found: dict[str, Row] = {}
    for row in record["rows"]:
        sweep = found.setdefault(
            row["sweep"],
            {"what": SWEEPS[row["sweep"]], "values": {}},
        )
        sweep["values"][str(row["value"])] = True
        sweep.setdefault(row["algorithm"], []).append(row["ratio"]["total"])
    return [row | {"values": list(row["values"])} for row in found.values()]


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
            label="in proportion",
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
    text = "The time of an update grows about in proportion to its size"
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
