"""Rows and the picture of this study: `python benchmark/report.py own_score`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import RLOO, START, Record, Row
from benchmark.studies.four_seeds.report import interval, row_of, shares

SHOWN = 5  # openings on the page
MODEL = "reward model"  # RLOO's run of four_seeds
ARMS = (MODEL, "VADER", "VADER, no penalty", "VADER, three times")
TITLE = "The penalty for a missing end hides what VADER says"


def run_of(own: Record, other: Record, arm: str) -> Row:
    """The row of an arm, of this record or of that of four_seeds."""
    if arm == MODEL:
        return row_of(other, "RLOO")
    return row_of(own, arm)


def arms(own: Record, other: Record) -> list[Row]:
    """A row for each arm, and how much higher its true score is than the starting model's, with an
    interval over openings."""
    start = row_of(own, "starting model")
    rows = []
    for arm in ARMS:
        row = run_of(own, other, arm) | {"run": arm}
        for name, share in shares(row["duel"]).items():
            row[name] = share.mean()
        gains = np.subtract(row["true_scores"], start["true_scores"])
        rows.append(row | {"gain": interval([gains])})
    return rows


def responses(own: Record) -> list[Row]:
    """The first responses to the openings that the record shows."""
    texts = {}
    for row in own["rows"]:
        texts[row["run"]] = [" ".join(text.split()) for text in row["texts"]]
    rows = []
    for i, opening in enumerate(own["shown"][:SHOWN]):
        row = {
            "opening": opening,
            "start": texts["starting model"][i],
            "penalty": texts["VADER"][i],
            "no_penalty": texts["VADER, no penalty"][i],
        }
        rows.append(row)
    return rows


def draw(own: Record, other: Record) -> Figure:
    """True score, and the share of responses that end, before and after each arm."""
    figure, panels = report.new(TITLE, 1, 2, 2.8, sharey=True)
    kinds = {
        "true_score": "true score",
        "found_end": "share of responses that end",
    }
    for axes, (kind, words) in zip(panels[0], kinds.items(), strict=True):
        before = row_of(own, "starting model")[kind]
        for y, arm in enumerate(ARMS):
            after = run_of(own, other, arm)[kind]
            axes.plot(
                [before, after],
                [y, y],
                color=RLOO,
            )
            axes.plot(after, y, "o", color=RLOO)
            axes.plot(before, y, "o", color=START)
        report.label(axes, words)
    panels[0, 0].set_yticks(range(len(ARMS)), list(ARMS))
    panels[0, 0].invert_yaxis()
    legend = {
        "starting model": START,
        "after RLOO": RLOO,
    }
    report.name_colours(panels[0, 0], legend, "o")
    report.legend_below(figure, panels[0, 0], 2)
    return figure


RECORDS = (
    "seed-11.json",
    "../four_seeds/seed-11.json",
)
PICTURES = {"arms.png": (draw, *RECORDS)}
