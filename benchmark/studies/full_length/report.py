"""Rows and pictures of this study: `python benchmark/report.py full_length`."""

import numpy as np
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import BEST_OF_N, CHOICES, CRITIC, NAMES, PPO, Record, Row
from benchmark.studies.short_runs import report as short_runs

choices = short_runs.choices
pooled = short_runs.pooled

LEVELS = (2, 4, 6)
WARMED_UP = "critic from the reward model, warmed up"
VALUES = {
    "critic from the reward model": ("critic from the reward model", CRITIC, "-"),
    "critic's rate 1e-2": ("value head, rate 1e-2", PPO, ":"),
    "default": ("value head, rate 2e-4 (default)", PPO, "-"),
}


def pairs(*records: Record) -> list[Row]:
    """RLOO beside PPO in each record."""
    rows = []
    settings = []
    for record in records:
        row = {line["choice"]: line for line in record["table"]}
        args = {"lr": "2e-4"} | {name: x for name, x in record["args"].items() if x is not None}
        setting = (args["lr"], args["episodes"])
        again = ", repeated" if setting in settings else ""
        settings.append(setting)
        pair = {
            "args": args,
            "again": again,
            "ppo": row["default"],
            "rloo": row["RLOO, K 4"],
        }
        rows.append(pair)
    return rows


def all_pairs(*records: Record) -> Row:
    """PPO's and RLOO's runs of a seed: how many there are, in how many of them RLOO ends higher,
    and in how many it ends farther from the starting model."""
    found = {"pairs": 0, "higher": 0, "farther": 0}
    for record in records:
        of_seed = {run["seed"]: run for run in report.runs_of(record, "RLOO, K 4")}
        for ppo in report.runs_of(record, "default"):
            rloo = of_seed[ppo["seed"]]
            found["pairs"] += 1
            found["higher"] += rloo["true_score"] > ppo["true_score"]
            found["farther"] += rloo["kl"] > ppo["kl"]
    return found


def jointly(*records: Record) -> Row:
    """RLOO minus PPO at the same KL in all records: within each seed the mean of the records, and
    of these the mean and its interval. The same of the seeds that are in all records."""
    of_seed: dict[int, list[float]] = {}
    for record in records:
        levels = record["table"][0]["levels"]
        ppo = {}
        for run in report.runs_of(record, "default"):
            ppo[run["seed"]] = short_runs.scores_at(run, levels, 1)
        for run in report.runs_of(record, "RLOO, K 4"):
            lead = short_runs.scores_at(run, levels, 1) - ppo[run["seed"]]
            of_seed.setdefault(run["seed"], []).append(float(np.nanmean(lead)))
    means = [float(np.mean(leads)) for leads in of_seed.values()]
    complete = []
    for leads in of_seed.values():
        if len(leads) == len(records):
            complete.append(float(np.mean(leads)))
    return differences.with_interval(means) | {
        "seeds": len(means),
        "complete": differences.with_interval(complete),
    }


def scores_of(run: Row) -> np.ndarray:
    """The true scores of a run where its KL first passes each of LEVELS, and at its end."""
    curve = run["fine_curve"]
    passed = np.maximum.accumulate(curve["kl"])
    at = np.interp(LEVELS, passed, curve["true_score"], right=np.nan)
    return np.append(at, run["true_score"])


def beside_rloo(record: Record) -> list[Row]:
    """True scores of PPO with the critic and of RLOO, and their differences, at each KL and at the
    end: means over the seeds in which both get there."""
    critic = [scores_of(run) for run in report.runs_of(record, WARMED_UP)]
    rloo = [scores_of(run) for run in report.runs_of(record, "RLOO, K 4")]
    rows = []
    names = [f"at {level} nats" for level in LEVELS] + ["at the end"]
    columns = (names, np.transpose(critic), np.transpose(rloo))
    for name, ours, theirs in zip(*columns, strict=True):
        is_reached = ~np.isnan(ours - theirs)
        ours = ours[is_reached]
        theirs = theirs[is_reached]
        row = {
            "where": name,
            "seeds": len(ours),
            "critic": ours.mean(),
            "rloo": theirs.mean(),
            "mean": (ours - theirs).mean(),
            "width": differences.interval(ours - theirs),
        }
        rows.append(row)
    return rows


def across(critic: Record, full: Record) -> Row:
    """PPO with the warmed-up critic minus the default's run of the same seed, which is in the other
    record, at the same KL."""
    base = {run["seed"]: scores_of(run) for run in report.runs_of(full, "default")}
    found = []
    for run in report.runs_of(critic, WARMED_UP):
        lead = scores_of(run) - base[run["seed"]]
        found.append(float(np.nanmean(lead[: len(LEVELS)])))
    return differences.with_interval(found)


def full_length(record: Record, others: Record) -> Figure:
    """True score over KL of three choices, and what three value functions explain."""
    text = "A critic that predicts much better gains a little true score at the same KL"
    figure, panels = report.new(text, 1, 2, 3.6)
    score, values = panels[0]
    for choice, colour in CHOICES.items():
        curves = [row["fine_curve"] for row in report.runs_of(record, choice)]
        name = NAMES.get(choice, f"PPO, {choice}")
        score.plot(*report.first_passages(curves), color=colour, label=name)
    name = "best of n, no training"
    score.plot(*report.best_of_n(others), color=BEST_OF_N, linestyle="--", label=name)
    limits = {"xlim": (0, 6.5), "ylim": (0, 1), "legend": "lower right"}
    report.label(score, report.KL, f"{report.TRUE_SCORE}, mean of 3 seeds", **limits)
    for choice, (name, colour, line) in VALUES.items():
        x, y = report.over_episodes(record, choice, "var_explained", "curve")
        values.plot(
            x,
            y.mean(0),
            color=colour,
            linestyle=line,
            label=name,
        )
    report.line_at(values, 0)
    limits = {"ylim": (-0.2, 1), "legend": "upper left"}
    report.label(values, "episodes", "variance explained by the values", **limits)
    return figure


PICTURES = {"full.png": (full_length, "full.json", "../overoptimisation/tiny.json")}
