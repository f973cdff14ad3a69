"""Rows and the picture of this study: `python benchmark/report.py four_seeds`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import common, differences, report
from benchmark.report import ALGORITHMS, START, Record, Row

RECORDS = tuple(f"seed-{seed}.json" for seed in (11, 12, 13, 14))
DRAWS = 2_000
LEVELS = (1.0, 1.5, 2.0)  # of KL, which all eight runs pass
LABELS_OF_STEP = 32
SMOOTHED = 3  # updates in a moving average
BETWEEN = "RLOO against PPO"
SHIFTS = {"PPO": -0.18, "RLOO": 0.18}  # of their lines in the picture
TITLE = "SmolLM2's true score rises with every seed, by PPO and more so by RLOO"
MEASURES = "true_score afinn reward zero distinct length found_end likelihood kl".split()


# --- numbers of one seed --------------------------------------------------------------------------
def row_of(record: Record, run: str) -> Row:
    """The row of a run."""
    return report.look_up(record, f"rows > {run}")


def duel_of(record: Record, run: str) -> Row:
    """A policy against the starting model, or RLOO against PPO."""
    return record["rloo_over_ppo"] if run == BETWEEN else row_of(record, run)["duel"]


def shares(duel: Row) -> dict[str, np.ndarray]:
    """For each opening (256,) the shares of pairs that are won, tied and lost, and the win rate,
    which counts a tie as half a win."""
    pairs = 16
    won = np.array(duel["won"]) / pairs
    tied = np.array(duel["tied"]) / pairs
    return {"won": won, "tied": tied, "lost": 1 - won - tied, "rate": won + tied / 2}


def gain(record: Record, run: str) -> np.ndarray:
    """For each opening (256,) how much the true score is above the starting model's, or RLOO's
    above PPO's."""
    if run == BETWEEN:
        return gain(record, "RLOO") - gain(record, "PPO")
    after = row_of(record, run)["true_scores"]
    before = row_of(record, "starting model")["true_scores"]
    return np.subtract(after, before)


# --- tables ---------------------------------------------------------------------------------------
def by_seed(parts: list[np.ndarray]) -> Row:
    """The mean of a list (seeds) of numbers (openings,), and its interval by Student's t over the
    means of the seeds."""
    return differences.with_interval([values.mean() for values in parts])


def both_intervals(parts: list[np.ndarray]) -> Row:
    """The same, with the interval of the protocol, too."""
    return by_seed(parts) | {"drawn": interval(parts)}


def interval(parts: list[np.ndarray]) -> Row:
    """The mean of a list (seeds) of numbers (openings,), and the middle 95 % of the means of draws
    of both, with replacement."""
    values = np.array(parts)
    num_seeds, num_openings = values.shape
    random = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        seeds = random.integers(num_seeds, size=(num_seeds, 1))
        openings = random.integers(num_openings, size=values.shape)
        means.append(values[seeds, openings].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": values.mean(), "low": low, "high": high}


def seeds(*records: Record) -> list[Row]:
    """A row for each policy."""
    rows = []
    for record in records:
        start = row_of(record, "starting model")
        for run in ALGORITHMS:
            model = record["reward_model"]
            row = row_of(record, run) | model
            row["right"] = differences.wilson(model["accuracy"], model["decided"])
            for name, share in shares(row["duel"]).items():
                row[name] = share.mean()
            row["before"] = start["true_score"]
            row["minutes"] = row["seconds"] / 60
            row["gib"] = row["memory"] / 2**30
            rows.append(row)
    return rows


def labels(*records: Record) -> Row:
    """How many labels the reward models were trained on, at least and at most, as their steps
    show."""
    found = []
    for record in records:
        seed = record["rows"][0]["seed"]
        steps = common.read_lines(Path(__file__).with_name(f"reward-{seed}.jsonl"))
        found.append(len(steps) * LABELS_OF_STEP)
    return {"fewest": min(found), "most": max(found)}


def together(*records: Record, of_seeds: Callable = by_seed) -> list[Row]:
    """All seeds in one row for each algorithm, and for RLOO against PPO."""
    rows = []
    for run in (*ALGORITHMS, BETWEEN):
        duels = [duel_of(record, run) for record in records]
        found = [shares(duel) for duel in duels]
        row = {"run": run if run == BETWEEN else f"{run} against the starting model"}
        for name in found[0]:
            row[name] = of_seeds([x[name] for x in found])
        row["controlled"] = np.mean([duel["controlled"] for duel in duels])
        row["gain"] = of_seeds([gain(record, run) for record in records])
        rows.append(row)
    return rows


by_protocol = partial(together, of_seeds=both_intervals)


def measures(*records: Record) -> list[Row]:
    """What else changed: means over seeds, and the range of the seeds."""
    rows = []
    for run in ("starting model", *ALGORITHMS):
        row = {"run": run}
        for name in MEASURES:
            values = [row_of(record, run)[name] for record in records]
            row[name] = {
                "mean": np.mean(values),
                "low": min(values),
                "high": max(values),
            }
        rows.append(row)
    return rows


def moved(*records: Record) -> Row:
    """How far each algorithm moves, in nats: the mean over the seeds."""
    found = {}
    for run in ALGORITHMS:
        found[run] = np.mean([row_of(record, run)["kl"] for record in records])
    return found


def reward_at(run: str, seed: int, level: float, width: int) -> float:
    """The reward on a run's training responses, with its penalty, where its KL first passes a
    level; of curves that are moving averages over so many updates."""
    lines = common.read_lines(Path(__file__).with_name(f"{run}-{seed}.jsonl"))
    curve = {
        "kl": [line["objective/kl"] for line in lines],
        "reward": [line["objective/scores"] for line in lines],
    }
    return float(differences.at_levels(curve, level, "reward", width))


def one_seed(record: Record) -> list[Row]:
    """A row for each policy against the starting model, and one for RLOO against PPO. Intervals are
    over the openings."""
    rows = []
    for run in (*ALGORITHMS, BETWEEN):
        duel = duel_of(record, run)
        row = {"run": run if run == BETWEEN else f"{run} against the starting model"}
        for name, share in shares(duel).items():
            row[name] = differences.with_interval(share)
        row["controlled"] = duel["controlled"]
        row["gain"] = differences.with_interval(gain(record, run))
        rows.append(row)
    return rows


def judge(record: Record) -> Row:
    """How often the reward model names VADER's favourite, with Wilson's interval over the openings
    that have one."""
    model = record["reward_model"]
    return differences.wilson(model["accuracy"], model["decided"]) | model


def samples(record: Record) -> list[Row]:
    """Openings and responses, each in one line."""
    names = ("query", "before", *ALGORITHMS)
    return [{name: " ".join(row[name].split()) for name in names} for row in record["rows"]]


def same_kl(*records: Record) -> list[Row]:
    """That reward of RLOO minus PPO's, with each seed, at each level; and with smoothed curves."""
    rows = []
    for level in LEVELS:
        row = {"level": level}
        for name, width in (("single", 1), ("smooth", SMOOTHED)):
            leads = []
            for record in records:
                seed = record["rows"][0]["seed"]
                rewards = {run: reward_at(run, seed, level, width) for run in ALGORITHMS}
                leads.append(rewards["RLOO"] - rewards["PPO"])
            row[name] = differences.with_interval(leads) | {"seeds": leads}
        rows.append(row)
    return rows


# --- the picture ----------------------------------------------------------------------------------
def draw_scores(axes: Axes, records: tuple[Record, ...]) -> None:
    """The true score of each policy of a seed, from the starting model's."""
    for i, record in enumerate(records):
        before = row_of(record, "starting model")["true_score"]
        for run, shift in SHIFTS.items():
            after = row_of(record, run)["true_score"]
            y = i + shift
            colour = ALGORITHMS[run]
            axes.plot([before, after], [y, y], color=colour)
            axes.plot(after, y, "o", color=colour, markersize=7)
            axes.plot(before, y, "o", color=START, markersize=5)
    names = [f"seed {record['rows'][0]['seed']}" for record in records]
    axes.set_yticks(range(len(records)), names)
    axes.invert_yaxis()
    report.label(axes, "true score of 1,024 held-out responses", xlim=(0, 0.6))
    report.name_colours(axes, {"starting model": START} | ALGORITHMS, "o")


def draw_shares(axes: Axes, records: tuple[Record, ...]) -> None:
    """Wins, ties and losses of each policy against the starting model, as bars of 100 %. The
    topmost one has names."""
    for i, record in enumerate(records):
        for run, shift in SHIFTS.items():
            found = shares(row_of(record, run)["duel"])
            y = i + shift
            left = 0.0
            for name, alpha in (("won", 1.0), ("tied", 0.15), ("lost", 0.4)):
                width = 100 * found[name].mean()
                style = {"height": 0.33, "color": ALGORITHMS[run], "alpha": alpha}
                axes.barh(y, width, left=left, **style)
                words = {"ha": "center", "va": "center", "fontsize": 9}
                words["color"] = "white" if name == "won" else "black"
                text = f"{width:.0f}"
                if i == 0 and run == "PPO":
                    text = f"{name} {text}"
                axes.text(left + width / 2, y, text, **words)
                left += width
    report.label(axes, "wins, ties, losses against the starting model (%)", xlim=(0, 100))
    axes.grid(visible=False)


def draw(*records: Record, title: str = TITLE) -> Figure:
    """True scores, and wins, ties and losses, of two or more records."""
    figure, panels = report.new(title, 1, 2, 1.2 + 0.6 * len(records), sharey=True)
    score, share = panels[0]
    draw_scores(score, records)
    draw_shares(share, records)
    report.legend_below(figure, score, 3)
    return figure


PICTURES = {"seeds.png": (draw, *RECORDS)}
