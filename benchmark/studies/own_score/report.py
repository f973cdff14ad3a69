"""Rows and the picture of this study: `python benchmark/report.py own_score`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import RLOO, START, Record, Row
from benchmark.studies.four_seeds.report import interval, row_of, shares

MODEL = "reward model"  # RLOO's run of four_seeds
ARMS = (MODEL, "VADER", "VADER, no penalty", "VADER, three times")
TITLE = "TITLE"


def pairs(*records: Record) -> list[tuple[Record, Record]]:
    """The records of this study, each with that of four_seeds of its seed."""
    half = len(records) // 2
    return list(zip(records[:half], records[half:], strict=True))


def run_of(own: Record, other: Record, arm: str) -> Row:
    """The row of an arm."""
    return row_of(other, "RLOO") if arm == MODEL else row_of(own, arm)


def arms(*records: Record) -> list[Row]:
    """A row for each arm and seed."""
    rows = []
    for arm in ARMS:
        for own, other in pairs(*records):
            row = run_of(own, other, arm) | {"run": arm}
            for name, share in shares(row["duel"]).items():
                row[name] = share.mean()
            row["before"] = row_of(own, "starting model")["true_score"]
            rows.append(row)
    return rows


def gains(*records: Record) -> list[Row]:
    """How much higher the true score of each arm is than that of VADER with its penalty."""
    rows = []
    for arm in ARMS:
        found = []
        for own, other in pairs(*records):
            after = np.array(run_of(own, other, arm)["true_scores"])
            found.append(after - row_of(own, "VADER")["true_scores"])
        rows.append({"run": arm} | interval(found))
    return rows


def draw(*records: Record) -> Figure:
    """True score, and the share of responses that end, before and after each arm."""
    figure, panels = report.new(TITLE, 1, 2, 3.2, sharey=True)
    kinds = {"true_score": "true score", "found_end": "share of responses that end"}
    for axes, (kind, words) in zip(panels[0], kinds.items(), strict=True):
        for y, arm in enumerate(ARMS):
            for own, other in pairs(*records):
                before = row_of(own, "starting model")[kind]
                after = run_of(own, other, arm)[kind]
                axes.plot([before, after], [y, y], color=RLOO, alpha=0.4)
                axes.plot(after, y, "o", color=RLOO)
                axes.plot(before, y, "o", color=START)
        report.label(axes, f"{words}, of held-out openings")
    panels[0, 0].set_yticks(range(len(ARMS)), list(ARMS))
    panels[0, 0].invert_yaxis()
    report.name_colours(panels[0, 0], {"starting model": START, "after RLOO": RLOO}, "o")
    report.legend_below(figure, panels[0, 0], 2)
    return figure


RECORDS = (
    "seed-11.json",
    "seed-12.json",
    "../four_seeds/seed-11.json",
    "../four_seeds/seed-12.json",
)
PICTURES = {"arms.png": (draw, *RECORDS)}
