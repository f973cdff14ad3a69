"""Rows and the picture of this study: `python benchmark/report.py own_score`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import RLOO, START, Record, Row
from benchmark.studies.four_seeds.report import row_of, shares

SHOWN = 5  # openings on the page
MODEL = "reward model"  # RLOO's run of four_seeds
ARMS = (MODEL, "VADER", "VADER, no penalty", "VADER, three times")
MEASURES = ("true_score", "found_end", "zero", "afinn", "kl")
SHIFTS = (-0.15, 0.15)  # of the seeds' lines in the picture
TITLE = "Without the penalty for a missing end, RLOO learns more of VADER's score"


def rows_of(records: tuple[Record, ...], arm: str) -> list[Row]:
    """The row of an arm in each seed's record. Records of this study come first, and then those of
    four_seeds, in the same order."""
    own = records[: len(records) // 2]
    others = records[len(records) // 2 :]
    if arm == MODEL:
        return [row_of(record, "RLOO") for record in others]
    return [row_of(record, arm) for record in own]


def arms(*records: Record) -> list[Row]:
    """A row for each arm and seed: its measures, and how much higher its true score is than the
    starting model's, with an interval over openings."""
    starts = rows_of(records, "starting model")
    rows = []
    for arm in ARMS:
        for found, start in zip(rows_of(records, arm), starts, strict=True):
            gain = np.subtract(found["true_scores"], start["true_scores"])
            row = {name: found[name] for name in MEASURES}
            for name, share in shares(found["duel"]).items():
                row[name] = share.mean()
            row |= {"run": arm, "seed": found["seed"], "gain": differences.with_interval(gain)}
            rows.append(row)
    return rows


def equal(own: Record) -> list[Row]:
    """The shares of openings whose four responses score alike, for each run that has them."""
    return [row for row in own["rows"] if "equal_groups" in row]


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


def draw(*records: Record) -> Figure:
    """True score, and the share of responses that end, before and after each arm, with a line for
    each seed."""
    figure, panels = report.new(TITLE, 1, 2, 3.2, sharey=True)
    kinds = {
        "true_score": "true score",
        "found_end": "share of responses that end",
    }
    for axes, (kind, words) in zip(panels[0], kinds.items(), strict=True):
        starts = rows_of(records, "starting model")
        for i, arm in enumerate(ARMS):
            found = rows_of(records, arm)
            for start, row, shift in zip(starts, found, SHIFTS, strict=True):
                ends = [start[kind], row[kind]]
                y = i + shift
                axes.plot(ends, [y, y], color=RLOO)
                axes.plot(row[kind], y, "o", color=RLOO)
                axes.plot(start[kind], y, "o", color=START)
        report.label(axes, words, xlim=(0, 0.75))
    panels[0, 0].set_yticks(range(len(ARMS)), list(ARMS))
    panels[0, 0].invert_yaxis()
    legend = {
        "starting model": START,
        "after RLOO: seed 11 above, seed 12 below": RLOO,
    }
    report.name_colours(panels[0, 0], legend, "o")
    report.legend_below(figure, panels[0, 0], 2)
    return figure


RECORDS = (
    "seed-11.json",
    "seed-12.json",
    "../four_seeds/seed-11.json",
    "../four_seeds/seed-12.json",
)
PICTURES = {"arms.png": (draw, *RECORDS)}
