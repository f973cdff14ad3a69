"""The picture of this study: `python benchmark/report.py symptoms`."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.differences import smooth
from benchmark.report import START, Record
from benchmark.studies.overoptimisation.report import DEFAULT, NONE, SETS, held_out

ILL = "#CC3311"
SYMPTOMS = {  # as the record names them: title
    "the KL is negative": "dropout is on: the KL is negative",
    "sampled tokens are too likely": "top-k in the sampler only: samples are likelier than the "
    "policy says",
    "the KL explodes": "rate 30 times too high: the KL explodes",
    "the entropy collapses": "no KL penalty, constant 1e-3: the entropy collapses, the run stops",
    "the reward model only guesses": "128 labels (16 updates): the reward model only guesses",
}
REPEATING = "no KL penalty, weak reward model: responses repeat phrases"


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


def symptoms(record: Record, *sets: Record) -> Figure:
    """Five symptoms, each with a healthy run; and the share of repetitive responses, a point for
    each set of labels."""
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
    for place, (coef, colour) in enumerate(((DEFAULT, START), (NONE, ILL))):
        shares = [means["repetitive"] for means in held_out(sets, ["PPO"], coef)]
        last.plot([place] * len(shares), shares, "o", color=colour)
    last.set_xticks((0, 1), ("default penalty", "no penalty"))
    last.set_xlim(-0.5, 1.5)
    last.yaxis.set_major_formatter("{x:.0%}")
    last.set_title(textwrap.fill(REPEATING, 34))
    report.label(last, "a point for each set of labels", "repetitive responses")
    report.legend_below(figure, panels[0, 0], 2)
    return figure


PICTURES = {
    "symptoms.png": (symptoms, "symptoms.json", *(f"../overoptimisation/{name}" for name in SETS)),
}
