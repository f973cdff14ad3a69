"""Rows and pictures of this study: `python benchmark/report.py default_run`."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.differences import at_levels, scores_of
from benchmark.report import CHOICES, NAMES, Record, Row

DEFAULT = 2e-4  # the learning rate
LEVELS = (2, 4, 6)  # nats


def seeds(record: Record) -> list[Row]:
    """The reward model of each seed, before and after its training."""
    return list({row["seed"]: row["reward_model"] | row for row in record["rows"]}.values())


def gains(record: Record) -> Row:
    """The true score on the held-out queries, before training and after it with each algorithm; and
    what training added to it. Means over seeds, and the interval of what was added."""
    row: Row = {"start": float(np.mean([run["true_score_before"] for run in record["rows"]]))}
    for (algorithm,), runs in report.group(record["rows"], "algorithm").items():
        after = [run["true_score"] for run in runs]
        added = [run["true_score"] - run["true_score_before"] for run in runs]
        row[algorithm] = {"after": np.mean(after)} | differences.with_interval(added)
    return row


def best_of_128(record: Record) -> Row:
    """The true score of the best of 128 responses of the starting model, by the reward models that
    the policies learn from, and its KL. How far each policy ends above that of its seed, and its
    true score in training where it first passes that KL."""
    found = {row["seed"]: row["true_score"][-1] for row in record["best_of_n"]}
    row: Row = {
        "mean": float(np.mean(list(found.values()))),
        "low": min(found.values()),
        "high": max(found.values()),
        "kl": record["best_of_n"][0]["kl"][-1],
    }
    for (algorithm,), group in report.group(record["rows"], "algorithm").items():
        above = [run["true_score"] - found[run["seed"]] for run in group]
        row[algorithm] = differences.with_interval(above)
        there = [at_levels(run["fine_curve"], row["kl"]) for run in group]
        row[algorithm] |= {"there": np.mean(there), "below": -np.mean(above)}
    return row


def pairs(*records: Record) -> list[tuple[Row, Row]]:
    """RLOO's and PPO's full runs of a seed with the default's settings."""
    found = []
    for record in records:
        rows = [row for row in record["rows"] if row.get("lr", DEFAULT) == DEFAULT]
        found += report.pairs_of("RLOO, K 4", "default", record | {"rows": rows})
    return found


def beside(*records: Record) -> list[Row]:
    """True scores of PPO and RLOO where they first pass each level of KL, as the mean of these, and
    at the end; and their difference. Each seed counts once, with the mean of its pairs."""
    of_seed = {}
    for rloo, ppo in pairs(*records):
        scores = np.array([scores_of(ppo, LEVELS), scores_of(rloo, LEVELS)])
        of_seed.setdefault(ppo["seed"], []).append(scores)
    scores = np.array([np.mean(found, 0) for found in of_seed.values()])  # (seeds, 2, levels + 1)
    columns = {f"at {level} nats": scores[..., i] for i, level in enumerate(LEVELS)}
    columns["mean of these"] = scores[..., :-1].mean(2)
    columns["at the end"] = scores[..., -1]
    rows = []
    for where, of_both in columns.items():
        ppo, rloo = of_both.T
        row = {"where": where, "ppo": ppo.mean(), "rloo": rloo.mean(), "seeds": len(of_both)}
        rows.append(row | differences.with_interval(rloo - ppo))
    return rows


def tally(*records: Record) -> Row:
    """How many pairs there are, in how many RLOO ends higher, by how much at least and at most, and
    in how many it ends farther from the starting model."""
    found = pairs(*records)
    leads = [rloo["true_score"] - ppo["true_score"] for rloo, ppo in found]
    return {
        "pairs": len(found),
        "higher": sum(lead > 0 for lead in leads),
        "least": min(leads),
        "most": max(leads),
        "farther": sum(rloo["kl"] > ppo["kl"] for rloo, ppo in found),
    }


def draw_bands(axes: Axes, record: Record, kind: str) -> None:
    """The means of PPO and RLOO over seeds, and bands from the lowest to the highest."""
    for choice, name in NAMES.items():
        x, y = report.over_episodes(record, choice, kind)
        colour = CHOICES[choice]
        words = f"{name} (mean and range of {len(y)} seeds)"
        axes.plot(x, y.mean(0), color=colour, label=words)
        axes.fill_between(
            x,
            y.min(0),
            y.max(0),
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    axes.set_xlim(0, record["args"]["episodes"])


def draw_true_score(axes: Axes, record: Record, what: str) -> None:
    """The true score of PPO and RLOO over episodes, beside no training and best of n."""
    draw_bands(axes, record, "true_score")
    best = report.best_of_n(record)[1][-1]
    report.line_at(axes, best, "best of 128, no training (same reward models)", "--")
    level = gains(record)["start"]
    report.line_at(axes, level, "starting model (held-out queries)", ":", report.START)
    report.label(axes, "episodes (responses trained on)", what, ylim=(0, 1))


def readme(record: Record) -> Figure:
    """The true score of PPO and RLOO beside best of 128 by the same reward models: the first
    picture of README.md."""
    text = "One response of RLOO scores like the best of 128 of the starting model; PPO nearly does"
    figure, panels = report.new(text, 1, 1, 3.7)
    axes = panels[0, 0]
    best = [row["true_score"][-1] for row in record["best_of_n"]]
    axes.axhspan(
        min(best),
        max(best),
        color=report.OTHER,
        alpha=0.3,
        linewidth=0,
    )
    draw_true_score(axes, record, "true score of training responses")
    for choice, shift in (("default", -26), ("RLOO, K 4", 10)):
        x, y = report.over_episodes(record, choice, "true_score")
        point = (x[-6], y.mean(0)[-6])
        report.note(axes, NAMES[choice], point, (0, shift), CHOICES[choice])
    words = "best of 128, starting model (mean and range of 3 seeds)"
    report.note(axes, words, (200, max(best)), (0, 6), "black")
    before = axes.lines[-1].get_ydata()[0]
    report.note(
        axes,
        "starting model",
        (11_200, before),
        (0, 5),
        report.START,
    )
    report.note(
        axes,
        "bands: range of 3 seeds",
        (9_200, 0.4),
        (0, 0),
        "black",
    )
    return figure


def curves(record: Record) -> Figure:
    """True score, reward and KL of the default run."""
    text = "Both algorithms raise the true score, and level off as the KL nears its target"
    figure, panels = report.new(text, 1, 3, 3.6)
    first, second, last = panels[0]
    draw_true_score(first, record, report.TRUE_SCORE)
    draw_bands(second, record, "reward")
    draw_bands(last, record, "kl")
    report.label(second, "episodes", "reward (reward model's score)")
    report.label(last, "episodes", report.SHORT_KL, ylim=(0, None))
    for axes in panels.flat:
        axes.set_xticks([0, 6_000, 12_000])
    report.line_at(last, 6, "target of the KL penalty", "--", report.OTHER)
    last.legend(handles=last.lines[-1:], loc="lower right")
    report.legend_below(figure, first, 2)
    return figure


RECORDS = ("runs.json",)
PICTURES = {"readme.png": (readme, *RECORDS), "curves.png": (curves, *RECORDS)}
