"""Rows and the picture of this study: `python benchmark/report.py slow_rate`."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import CHOICES, NAMES, Record, Row
from benchmark.studies.short_runs import report as short_runs

LEVELS = (2, 4, 6)


# --- tables ---------------------------------------------------------------------------------------
def tested(records: tuple[Record, ...], kind: str) -> list[Row]:
    """The differences of this kind in all records, tested as one family."""
    rows = []
    for record in records:
        episodes = record["args"]["episodes"]
        for row in record["table"]:
            run = (row["choice"], episodes)
            base = (short_runs.base_of(row["choice"]), episodes)
            if kind == "beside":
                base = (row["choice"], "at the default's rate")
            if row[f"{kind}_differences"]:
                rows.append(row | {"episodes": episodes, "pair": (run, base)})
    differences.add_tests(rows, kind, differences.freedom_of(rows, kind))
    return [short_runs.with_bold(row) for row in rows]


def beside(*records: Record) -> list[Row]:
    """Each choice at this rate minus the same at the default's."""
    return tested(records, "beside")


def pooled(*records: Record) -> Row:
    """The pooled deviation of the differences from the default's rate, and its degrees of freedom;
    how many of them Holm's method keeps, and the smallest p-value by their own deviations."""
    rows = beside(*records)
    found = [row["beside_differences"] for row in rows]
    deviation, _ = differences.pooled_deviation(found)
    own = []
    for each in found:
        own.append(differences.p_value(each, float(np.std(each, ddof=1)), len(each) - 1))
    return {
        "deviation": deviation,
        "freedom": differences.freedom_of(rows, "beside"),
        "kept": sum(row["beside_holds"] for row in rows),
        "kept_pooled": sum(row["beside_pooled_holds"] for row in rows),
        "smallest_p": min(own),
        "first_must_be": differences.LEVEL / len(rows),
    }


def bases(*records: Record) -> list[Row]:
    """Each choice minus its base, both at this rate."""
    return tested(records, "equal_kl")


def smoothed(slow: Record, long: Record, full: Record) -> list[Row]:
    """The differences from the default's rate, of smoothed curves."""
    runs = {}
    pairs = []
    for record in (slow, long):
        episodes = record["args"]["episodes"]
        for row in record["table"]:
            choice = row["choice"]
            if row["beside_differences"]:
                name = f"{NAMES.get(choice, choice)}, {episodes:,}"
                runs[name] = report.runs_of(record, choice)
                runs[choice] = report.runs_of(full, choice)
                pairs.append((name, choice))
    return short_runs.smoothings(runs, pairs, list(LEVELS))


# --- the picture ----------------------------------------------------------------------------------
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


def by_level(slow: Record, full: Record) -> list[Row]:
    """The true score at the lower rate minus that at the default's, within seeds: at each level of
    KL that at least three seeds reach, and at the end."""
    rows = []
    for choice, name in NAMES.items():
        base = {run["seed"]: scores(run) for run in report.runs_of(full, choice)}
        found = []
        for run in report.runs_of(slow, choice):
            found.append(np.subtract(scores(run), base[run["seed"]]))
        row = {"method": name, "choice": choice}
        for where, column in zip((*LEVELS, "end"), np.transpose(found), strict=True):
            reached = column[~np.isnan(column)]
            if len(reached) >= 3:
                row[f"at {where}"] = differences.with_interval(reached)
        rows.append(row)
    return rows


def levels(long: Record, slow: Record, full: Record) -> list[Row]:
    """Those of the runs with twice the episodes and of those with as many."""
    rows = []
    for record in (long, slow):
        more = {"episodes": record["args"]["episodes"]}
        rows += [row | more for row in by_level(record, full)]
    return rows


def draw_differences(axes: Axes, slow: Record, full: Record) -> None:
    """Those differences, with 95 % intervals."""
    for row, shift in zip(by_level(slow, full), (-0.12, 0.12), strict=True):
        for y, where in enumerate((*LEVELS, "end")):
            if found := row.get(f"at {where}"):
                axes.errorbar(
                    found["mean"],
                    y + shift,
                    xerr=found["width"],
                    fmt="o",
                    color=CHOICES[row["choice"]],
                    capsize=3,
                )
    axes.axvline(0, color="black", linewidth=1)
    names = [f"at {level} nats" for level in LEVELS]
    axes.set_yticks(range(4), [*names, "at the end"])


def rates(full: Record, slow: Record, long: Record) -> Figure:
    """What a quarter of the rate gains, with twice the episodes and with as many."""
    text = "A quarter of the learning rate is ahead at 2 and 4 nats, but hardly at the end"
    figure, panels = report.new(text, 1, 2, 3.2, sharex=True, sharey=True)
    twice, same = panels[0]
    draw_differences(twice, long, full)
    draw_differences(same, slow, full)
    twice.set_title("with twice the episodes: +0.02 or less at the end")
    same.set_title("with as many episodes: not ahead at the end")
    for axes in panels[0]:
        axes.set_xlabel(short_runs.DIFFERENCE.replace(" at the same KL", ""))
    twice.set_ylim(3.5, -0.5)
    twice.set_xlim(-0.25, 0.35)
    colours = {name: CHOICES[choice] for choice, name in NAMES.items()}
    report.name_colours(same, colours)
    same.legend(loc="lower right")
    return figure


PICTURES = {"rates.png": (rates, "../full_length/full.json", "slow.json", "long.json")}
