"""The picture and a number of this study: `python benchmark/report.py symptoms`."""

import math
import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.differences import smooth
from benchmark.report import START, Record

ILL = "#CC3311"
SYMPTOMS = {  # as the record names them: title
    "the KL is negative": "dropout is on: the KL is negative",
    "sampled tokens are too likely": "top-k in the sampler only: samples are likelier than the "
    "policy says",
    "the KL explodes": "rate 30 times too high: the KL explodes",
    "the entropy collapses": "no KL penalty, constant 1e-3: the entropy collapses, the run stops",
    "the reward model only guesses": "128 labels (16 updates): the reward model only guesses",
}
WEAK = "weak reward model: the reward rises, the true score falls"


def largest_difference(record: Record) -> dict[str, float]:
    """About what `first_ratio_error` is today, a difference of log-probabilities: the record is of
    version 0.5.0, where it was |ratio - 1|."""
    row = report.look_up(record, "rows > the first ratio is not 1")
    return {"faulty": math.log1p(row["values"]["ill"])}


def draw(axes: Axes, record: Record, symptom: str, heading: str) -> None:
    """The metric of a healthy and of a faulty run."""
    row = report.look_up(record, f"rows > {symptom}")
    metric = row["metric"].replace("test/", "train/").removeprefix("ppo/")
    width = 16 if metric == "train/accuracy" else 1
    for name, word, colour in (("healthy", "healthy", START), ("ill", "faulty", ILL)):
        values = smooth(row["curves"][name], width)
        style = {"color": colour, "marker": "o" if len(values) < 3 else None}
        axes.plot(
            np.arange(1, len(values) + 1) * width,
            values,
            **style,
            label=f"{word} run",
        )
    axes.set_title(textwrap.fill(heading, 34))
    report.label(axes, "updates", metric)


def symptoms(record: Record, others: Record) -> Figure:
    """Five symptoms, each with a healthy run, and the true score beside the reward."""
    text = "Six faults, and the metric that shows them"
    figure, panels = report.new(text, 2, 3, 5.4)
    for axes, (symptom, heading) in zip(panels.flat, SYMPTOMS.items(), strict=False):
        draw(axes, record, symptom, heading)
    panels[0, 1].set_ylim(0, 1.3)
    panels[1, 0].set_ylim(0, None)
    report.line_at(panels[1, 1], 0.25, style=":")
    panels[1, 1].text(500, 0.17, "chance", ha="right", fontsize=9)
    panels[1, 1].set_ylim(0, 0.8)
    last = panels[1, 2]
    for kind, name, line in (("reward", "reward", "--"), ("true_score", "true score", "-")):
        y = smooth(report.look_up(others, f"rows > 512 > PPO > 3 > {kind}"), 5)
        x = (np.arange(len(y)) + 0.5) * 5
        last.plot(x, y, line, color=ILL, label=name)
    report.line_at(last, 0)
    last.set_title(textwrap.fill(WEAK, 34))
    report.label(last, "updates", "score of the faulty run", legend="best")
    report.legend_below(figure, panels[0, 0], 2)
    return figure


PICTURES = {"symptoms.png": (symptoms, "symptoms.json", "../overoptimisation/tiny.json")}
