"""The picture of this study: `python benchmark/report.py slow_rate`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import CHOICES, NAMES, Record, smooth
from benchmark.studies.short_runs import report as short_runs

choices = short_runs.choices


def rates(full: Record, long: Record) -> Figure:
    """PPO and RLOO at two rates, over KL and over episodes."""
    text = "A lower learning rate: ahead at 2 and 4 nats, nearly level at the end"
    figure, panels = report.new(text, 1, 2, 3.8, sharey=True)
    by_kl, by_episodes = panels[0]
    for rate, record, line in (("2e-4", full, "-"), ("5e-5", long, "--")):
        for choice, algorithm in NAMES.items():
            style = {"color": CHOICES[choice], "linestyle": line}
            curves = [row["fine_curve"] for row in report.runs_of(record, choice)]
            x, y = report.first_passages(curves)
            by_kl.plot(x, y, **style, label=f"{algorithm} at {rate}")
            levels = [level for level in (2, 4, 6) if level <= x[-1]]
            by_kl.plot(
                levels,
                np.interp(levels, x, y),
                "o",
                color=CHOICES[choice],
            )
            x, y = report.over_episodes(record, choice, "true_score")
            by_episodes.plot(
                smooth(x, 2),
                smooth(y.mean(0), 2),
                **style,
            )
    limits = {"xlim": (0, 6.5), "ylim": (0, 1), "legend": "lower right"}
    report.label(by_kl, report.KL, f"{report.TRUE_SCORE}, mean of 3 seeds", **limits)
    report.label(by_episodes, "episodes")
    by_episodes.locator_params(axis="x", nbins=6)
    by_kl.set_title("True score against KL (dots: where runs are compared)")
    by_episodes.set_title("True score against episodes")
    return figure


PICTURES = {"rates.png": (rates, "../full_length/full.json", "long.json")}
