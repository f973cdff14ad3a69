"""Rows and pictures of this study: `python benchmark/report.py rates`."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import ALGORITHMS, NAMES, Record, Row
from benchmark.runs import at_equal_kl, mean

DEFAULT = 2e-4
LEVELS = (2, 4, 6)
TITLE = "Which learning rate? The true score at the end, and at the same KL"
LEFT = "at the end (a small mark for each seed)"
RIGHT = "at the same KL, minus that of 2e-4"


# --- tables ---------------------------------------------------------------------------------------
def runs_of(record: Record) -> dict[tuple[str, float], dict[int, Row]]:
    """The runs by algorithm and rate, the lowest first, and in each by their seed."""
    found: dict[tuple[str, float], dict[int, Row]] = {}
    for row in sorted(record["rows"], key=lambda row: (row["algorithm"], row["lr"])):
        found.setdefault((row["algorithm"], row["lr"]), {})[row["seed"]] = row
    return found


def score_at_end(run: Row) -> float:
    """The true score; of a run that has stopped on an error that of the starting model."""
    return run["true_score_before"] if run["failed"] else run["true_score"]


def gain(run: Row, base: Row) -> float | None:
    """The true score minus that of the run at the default's rate: the mean over the levels of KL
    that both reach."""
    if run["failed"]:
        return None
    return mean(at_equal_kl(run, base, LEVELS))


def of_seeds(values: list[float | None]) -> Any:
    """Their mean and interval, if there are at least three."""
    found = [value for value in values if value is not None]
    return differences.with_interval(found) if len(found) >= differences.LEAST else None


def rates(record: Record) -> list[Row]:
    """A row for each algorithm and rate: means over seeds, and differences from the default's rate
    within seeds."""
    runs = runs_of(record)
    rows = []
    for (algorithm, rate), mine in runs.items():
        base = runs[algorithm, DEFAULT]
        ended = [run for run in mine.values() if not run["failed"]]
        row = {
            "name": f"{algorithm} {rate:g}",
            "algorithm": algorithm,
            "lr": rate,
            "rate": f"{rate:.0e}".replace("e-0", "e-"),
            "seeds": len(mine),
            "failed": len(mine) - len(ended),
            "scores": [score_at_end(run) for run in mine.values()],
        }
        row["true_score"] = float(np.mean(row["scores"]))
        for name in ("kl", "clipfrac", "clipfrac_at_end", "entropy_at_end"):
            row[name] = float(np.mean([run[name] for run in ended]))
        if rate != DEFAULT:
            ends = []
            equal_kl = []
            for seed, run in mine.items():
                ends.append(score_at_end(run) - score_at_end(base[seed]))
                equal_kl.append(gain(run, base[seed]))
            row["higher"] = sum(end > 0 for end in ends)
            row["end"] = of_seeds(ends)
            row["equal_kl"] = of_seeds(equal_kl)
        rows.append(row)
    return rows


def rule(record: Record) -> list[Row]:
    """For each rate with all seeds whether it passes the protocol's rule, and the mean of its six
    gains."""
    rows = []
    others = [row for row in rates(record) if row.get("equal_kl")]
    for both in report.group(others, "lr").values():
        gains = [row["end"]["mean"] for row in both]
        equal = [row["equal_kl"]["mean"] for row in both]
        higher = sum(row["higher"] for row in both)
        passes = min(gains) > 0 and higher >= 5 and min(equal) > -0.02
        row = {
            "rate": both[0]["rate"],
            "gain": float(np.mean(gains)),
            "higher": higher,
            "passes": "yes" if passes else "no",
        }
        rows.append(row)
    return rows


# --- a quarter of the rate, with twice the episodes -----------------------------------------------
def scores(run: Row) -> list[float]:
    """The true score where a run first passes each level of KL, or NaN; and that at its end."""
    curve = run["fine_curve"]
    kl = np.maximum.accumulate(curve["kl"])
    found = np.interp(
        LEVELS,
        kl,
        curve["true_score"],
        left=np.nan,
        right=np.nan,
    )
    return [*found, run["true_score"]]


def levels(*records: Record) -> list[Row]:
    """The true score at the lower rate minus that at the default's, which the last record has,
    within seeds: at each level of KL that at least three seeds reach, and at the end."""
    *slower, full = records
    rows = []
    for record in slower:
        for choice, name in NAMES.items():
            base = {run["seed"]: scores(run) for run in report.runs_of(full, choice)}
            found = []
            for run in report.runs_of(record, choice):
                found.append(np.subtract(scores(run), base[run["seed"]]))
            row = {"method": name, "episodes": record["args"]["episodes"]}
            for where, column in zip((*LEVELS, "end"), np.transpose(found), strict=True):
                reached = column[~np.isnan(column)]
                if len(reached) >= differences.LEAST:
                    row[f"at {where}"] = differences.with_interval(reached)
            rows.append(row)
    return rows


# --- the picture ----------------------------------------------------------------------------------
def draw_ends(axes: Axes, rows: list[Row]) -> None:
    """Mean scores at the end over the rate, joined, and a mark for each seed."""
    for algorithm, colour in ALGORITHMS.items():
        mine = [row for row in rows if row["algorithm"] == algorithm]
        x = [row["lr"] for row in mine]
        axes.plot(x, [row["true_score"] for row in mine], "o-", color=colour, label=algorithm)
        for row in mine:
            places = [row["lr"]] * row["seeds"]
            axes.plot(places, row["scores"], ".", color=colour, alpha=0.5)


def draw_differences(axes: Axes, rows: list[Row]) -> None:
    """Differences from the default's rate, with intervals over seeds."""
    report.line_at(axes, 0)
    for row in rows:
        if row.get("equal_kl"):
            shift = {"PPO": 0.97, "RLOO": 1.03}[row["algorithm"]]
            axes.errorbar(
                row["lr"] * shift,
                row["equal_kl"]["mean"],
                yerr=row["equal_kl"]["width"],
                fmt="o",
                color=ALGORITHMS[row["algorithm"]],
                capsize=3,
            )


def draw(record: Record) -> Figure:
    """Scores at the end, and differences at the same KL, over the learning rate."""
    figure, panels = report.new(TITLE, 1, 2, 3.4, sharex=True)
    ends, equal = panels[0]
    rows = rates(record)
    draw_ends(ends, rows)
    draw_differences(equal, rows)
    for axes, title in ((ends, LEFT), (equal, RIGHT)):
        axes.set_title(title)
        axes.set_xscale("log")
        places = sorted({row["lr"] for row in rows})
        axes.set_xticks(places, [f"{rate:g}" for rate in places])
        axes.set_xticks([], minor=True)
        report.label(axes, "learning rate")
    ends.set_ylabel(report.TRUE_SCORE)
    ends.legend(loc="lower left")
    return figure


PICTURES = {"rates.png": (draw, "rates.json")}
