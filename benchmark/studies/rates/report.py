"""Rows and pictures of this study: `python benchmark/report.py rates`."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.differences import at_equal_kl, mean, of_seeds, scores_of
from benchmark.report import ALGORITHMS, NAMES, Record, Row, short

DEFAULT = 2e-4
LEVELS = (2, 4, 6)
TITLE = "Which learning rate? The true score at the end, and at the same KL"
LEFT = "at the end (a small mark for each seed)"
RIGHT = "at the same KL, minus that of 2e-4 (bars: 95% intervals)"


# --- tables ---------------------------------------------------------------------------------------
def score_at_end(run: Row) -> float:
    """The true score; of a run that has stopped on an error that of the starting model."""
    return run["true_score_before"] if run["failed"] else run["true_score"]


def gain(run: Row, base: Row) -> float:
    """The true score minus that of the run at the default's rate: the mean over the levels of KL
    that both reach; NaN if there is none."""
    found = None if run["failed"] else mean(at_equal_kl(run, base, LEVELS))
    return np.nan if found is None else found


def rates(record: Record) -> list[Row]:
    """A row for each algorithm and rate: means over seeds, and differences from the default's rate
    within seeds."""
    in_order = sorted(record["rows"], key=lambda run: (run["algorithm"], run["lr"]))
    runs = report.group(in_order, "algorithm", "lr")
    rows = []
    for (algorithm, rate), mine in runs.items():
        base = {run["seed"]: run for run in runs[algorithm, DEFAULT]}
        ended = [run for run in mine if not run["failed"]]
        row = {
            "name": f"{algorithm} {rate:g}",
            "algorithm": algorithm,
            "lr": rate,
            "rate": short(rate),
            "seeds": len(mine),
            "failed": len(mine) - len(ended),
            "scores": [score_at_end(run) for run in mine],
        }
        row["true_score"] = float(np.mean(row["scores"]))
        for name in ("kl", "clipfrac", "clipfrac_at_end", "entropy_at_end"):
            row[name] = float(np.mean([run[name] for run in ended]))
        if rate != DEFAULT:
            ends = []
            equal_kl = []
            for run in mine:
                of_default = base[run["seed"]]
                ends.append(score_at_end(run) - score_at_end(of_default))
                equal_kl.append(gain(run, of_default))
            row["higher"] = sum(end > 0 for end in ends)
            for kind, values in (("end", ends), ("equal_kl", equal_kl)):
                row[kind] = of_seeds(values)
                if row[kind]:
                    row[kind]["lower"] = -row[kind]["mean"]
        rows.append(row)
    return rows


def at_end(record: Record) -> Row:
    """How much lower the other rates end, at least and at most: mean differences."""
    found: Row = {}
    for row in rates(record):
        if row.get("end"):
            found.setdefault(row["algorithm"], []).append(row["end"]["lower"])
    return {name: {"least": min(ends), "most": max(ends)} for name, ends in found.items()}


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
def levels(*records: Record) -> list[Row]:
    """The true score at the lower rate minus that at the default's, which the last record has,
    within seeds: at each level of KL that at least three seeds reach, and at the end."""
    *slower, full = records
    rows = []
    for record in slower:
        for choice, name in NAMES.items():
            found = []
            for run, base in report.pairs_of(choice, choice, record, full):
                found.append(scores_of(run, LEVELS) - scores_of(base, LEVELS))
            row = {"method": name, "episodes": record["args"]["episodes"]}
            for where, column in zip((*LEVELS, "end"), np.transpose(found), strict=True):
                row[f"at {where}"] = of_seeds(column)
            rows.append(row)
    return rows


def score_after(run: Row, share: float) -> float:
    """The true score of training responses after this share of the run's time."""
    scores = run["fine_curve"]["true_score"]
    middles = (np.arange(len(scores)) + 0.5) / len(scores)
    return float(np.interp(share, middles, scores))


def same_time(record: Record) -> list[Row]:
    """PPO and RLOO of a seed at the default's rate, after a quarter, a half and all of the time of
    the RLOO run."""
    return same_cost(record, lambda ppo, rloo: rloo["seconds"] / ppo["seconds"])


def same_operations(record: Record, counted: Record) -> list[Row]:
    """The same for floating-point operations."""
    ppo, rloo = (row["gigaflops"] for row in counted["rows"])
    return same_cost(record, lambda *_: rloo / ppo)


def same_cost(record: Record, cost: Callable[[Row, Row], float]) -> list[Row]:
    """PPO and RLOO of a seed at the same cost. `cost` is that of an update of RLOO, if one of PPO
    costs 1."""
    at_default = [run for run in record["rows"] if run["lr"] == DEFAULT]
    runs = report.group(at_default, "seed")
    rows = []
    for share in (0.25, 0.5, 1.0):
        found = []
        for pair in runs.values():
            ppo, rloo = sorted(pair, key=lambda run: run["algorithm"])
            of_ppo = share * cost(ppo, rloo)  # both make as many updates
            found.append((score_after(ppo, of_ppo), score_after(rloo, share)))
        ppo, rloo = np.mean(found, 0)
        leads = [after - before for before, after in found]
        rows.append({"share": share, "ppo": ppo, "rloo": rloo, "lead": of_seeds(leads)})
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
        axes.set_xticks(places, [short(rate) for rate in places])
        axes.set_xticks([], minor=True)
        report.label(axes, "learning rate")
    ends.set_ylabel(report.TRUE_SCORE)
    ends.legend(loc="lower left")
    return figure


PICTURES = {"rates.png": (draw, "rates.json")}
