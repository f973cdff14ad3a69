"""Rows and pictures of this study: `python benchmark/report.py default_run`."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import BEST_OF_N, CHOICES, NAMES, OTHER, SHORT_KL, START, Record, Row


def seeds(record: Record) -> list[Row]:
    """The reward model of each seed, before and after its training."""
    return list({row["seed"]: row["reward_model"] | row for row in record["rows"]}.values())


def draw_bands(axes: Axes, record: Record, kind: str) -> None:
    """The means of PPO and RLOO over seeds, and bands from the lowest to the highest."""
    for choice, name in NAMES.items():
        x, y = report.over_episodes(record, choice, kind)
        style = {"color": CHOICES[choice], "label": f"{name} (mean and range of {len(y)} seeds)"}
        axes.plot(x, y.mean(0), linewidth=2, **style)
        axes.fill_between(x, y.min(0), y.max(0), color=CHOICES[choice], alpha=0.18, linewidth=0)
    axes.set_xlim(0, record["args"]["episodes"])


def draw_true_score(axes: Axes, record: Record, others: Record) -> None:
    """The true score of PPO and RLOO over episodes, beside no training and best of n."""
    draw_bands(axes, record, "true_score")
    best = report.best_of_n(others)[1][-1]
    name = "best of 128, no training (held-out queries)"
    axes.axhline(best, color=BEST_OF_N, linestyle="--", linewidth=1.3, label=name)
    before = [row["true_score_before"] for row in record["rows"] if "true_score_before" in row]
    name = "before training (held-out queries)"
    axes.axhline(np.mean(before), color=START, linestyle=":", linewidth=1.3, label=name)
    report.label(axes, "episodes (responses trained on)", report.TRUE_SCORE, ylim=(0, 1))
    axes.locator_params(axis="x", nbins=6)


def readme(record: Record, others: Record) -> Figure:
    """The true score of PPO and RLOO: the first picture of README.md."""
    text = "The model learns to continue stories cheerfully"
    figure, panels = report.new(text, 1, 1, 3.7)
    axes = panels[0, 0]
    draw_true_score(axes, record, others)
    axes.set_ylabel("true score of training responses")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.08), fontsize=10)
    return figure


def curves(record: Record, others: Record) -> Figure:
    """True score, reward and KL of the default run."""
    text = "Both algorithms raise the true score, and level off as the KL nears its target"
    figure, panels = report.new(text, 1, 3, 3.6)
    first, second, last = panels[0]
    draw_true_score(first, record, others)
    for axes, kind in ((second, "reward"), (last, "kl")):
        draw_bands(axes, record, kind)
    report.label(second, "episodes", "reward (reward model's score)")
    report.label(last, "episodes", SHORT_KL, ylim=(0, None))
    for axes in panels.flat:
        axes.set_xticks([0, 6_000, 12_000])
    style = {"color": OTHER, "linestyle": "--", "linewidth": 1.3}
    target = last.axhline(6, label="target of the KL penalty", **style)
    last.legend(handles=[target], loc="lower right", fontsize=9)
    report.legend_below(figure, first, 2)
    return figure


RECORDS = ("../full_length/full.json", "../overoptimisation/tiny.json")
PICTURES = {"readme.png": (readme, *RECORDS), "curves.png": (curves, *RECORDS)}
