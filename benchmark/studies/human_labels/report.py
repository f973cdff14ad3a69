"""Rows and the picture of this study: `python benchmark/report.py human_labels`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import CRITIC, OTHER, Record, Row
from benchmark.studies.films import report as films

RECORDS = tuple(f"seed-{seed}.json" for seed in (1, 2, 3))
RULES = {
    "the reward model": ("reward", 1),
    "the longer answer": ("length", 1),
    "the shorter answer": ("length", -1),
    "the likelier answer": ("likelihood", 1),
    "the likelier answer, per token": ("token_likelihood", 1),
}
DRAWS = 2_000
TIE = 0.1  # of gold reward
MEANS = ("judge", "reward", "kl", "words", "repeats", "likelihood")
agreement = films.agreement  # the correlation of proxy and gold over the starting model's responses
SHIFT = 0.12  # between the marks of two seeds
SHARE = "share of 512 held-out pairs in which people chose this answer,\n"
SHARE += "with each of three seeds (lines: 95% intervals over pairs)"
TITLE = "A reward model of human labels is right in six of ten pairs, simple rules less often"


def right(record: Record, rule: str) -> np.ndarray:
    """For each held-out pair (512,) whether a rule names the answer that people chose; a tie is a
    half."""
    name, sign = RULES[rule]
    margins = sign * np.array(record["margins"][name])
    return (np.sign(margins) + 1) / 2


def both_intervals(parts: list[np.ndarray]) -> Row:
    """The mean of a list (seeds) of numbers (pairs,), its interval by Student's t over the means of
    the seeds, and that of the protocol: the middle 95 % of the means of draws of both, with
    replacement."""
    values = np.array(parts)
    num_seeds, num_pairs = values.shape
    random = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        seeds = random.integers(num_seeds, size=(num_seeds, 1))
        pairs = random.integers(num_pairs, size=values.shape)
        means.append(values[seeds, pairs].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    drawn = {"low": low, "high": high}
    return differences.with_interval(values.mean(1)) | {"drawn": drawn}


def rules(*records: Record) -> list[Row]:
    """A row for each rule: how often it is right with each seed, and with all together."""
    rows = []
    for rule in RULES:
        found = [right(record, rule) for record in records]
        row = {"rule": rule, "seeds": [values.mean() for values in found]}
        rows.append(row | both_intervals(found))
    return rows


def ahead(*records: Record) -> list[Row]:
    """How much more often the reward model is right than each other rule, on the same pairs."""
    model, *others = RULES
    rows = []
    for rule in others:
        found = [right(record, model) - right(record, rule) for record in records]
        rows.append({"rule": rule} | both_intervals(found))
    return rows


# --- policies -------------------------------------------------------------------------------------
def gains(record: Record) -> list[Row]:
    """How far each algorithm raises the gold reward, with wins, ties and losses by it."""
    return films.claims(record, tie=TIE)


def models(record: Record) -> list[Row]:
    """A row for each model: means over its responses."""
    return films.models(record, means=MEANS, tie=TIE)


# --- the picture ----------------------------------------------------------------------------------
def draw(*records: Record) -> Figure:
    """How often each rule is right, with each seed."""
    figure, panels = report.new(TITLE, 1, 1, 3.2)
    axes = panels[0, 0]
    for y, rule in enumerate(RULES):
        colour = CRITIC if y == 0 else OTHER
        for i, record in enumerate(records):
            values = right(record, rule)
            found = differences.wilson(values.mean(), len(values))
            at = y + SHIFT * (i - 1)
            axes.plot([found["low"], found["high"]], [at, at], color=colour)
            axes.plot(found["mean"], at, "o", color=colour)
    axes.axvline(0.5, color="black", linewidth=1)
    axes.set_yticks(range(len(RULES)), list(RULES))
    axes.invert_yaxis()
    report.label(axes, SHARE)
    axes.grid(visible=False, axis="y")
    return figure


PICTURES = {"right.png": (draw, *RECORDS)}
