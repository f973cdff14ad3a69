"""Rows and the picture of this study: `python benchmark/report.py films`."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import common, differences, report
from benchmark.report import ALGORITHMS, Record, Row, short
from benchmark.studies.alternatives.report import COLOURS as ON_LABELS

TIE = 0.05  # of judge B's probability
LEVELS = (1.0, 2.0, 3.0)  # nats
SHOWN = 20  # openings with their texts
FAST = 3e-5  # learning rates
SLOW = 1e-5
BETWEEN = "RLOO against PPO"
MEANS = ("judge", "vader", "reward", "kl", "likelihood", "gemma", "repeats")
TITLE = "Film reviews: the reward rises with every seed, but judge B sees no clear gain"


# --- tables ---------------------------------------------------------------------------------------
def runs_of(records: tuple[Record, ...]) -> list[Row]:
    """The runs of records of the same starting model, whose row is the first of each."""
    return [row for record in records for row in record["rows"][1:]]


def against_start(row: Row, start: Row, tie: float) -> Row:
    """How the judge compares a policy's response to each query with the starting model's."""
    gains = np.subtract(row["judge"], start["judge"])
    return {
        "gain": float(gains.mean()),
        "won": float((gains > tie).mean()),
        "tied": float((np.abs(gains) <= tie).mean()),
        "lost": float((gains < -tie).mean()),
    }


def models(*records: Record, means: tuple[str, ...] = MEANS, tie: float = TIE) -> list[Row]:
    """A row for each model: means over its responses, and the judge's comparison."""
    start = records[0]["rows"][0]
    rows = []
    for row in (start, *runs_of(records)):
        found = {"name": row["run"], "different": row["different"]}
        for key in means:
            found[key] = float(np.mean(row[key]))
        if row is not start:
            found["name"] = f"{row['run']}, {short(row['lr'])}, seed {row['seed']}"
            found["minutes"] = row["seconds"] / 60
            found |= against_start(row, start, tie)
        rows.append(found)
    return rows


def claims(*records: Record, tie: float = TIE) -> list[Row]:
    """What the judge gives more than to the starting model: the mean over seeds, its interval."""
    start = records[0]["rows"][0]
    rows = []
    for (algorithm, rate), runs in report.group(runs_of(records), "run", "lr").items():
        found = [against_start(run, start, tie) for run in runs]
        row = {"name": f"{algorithm}, {short(rate)}", "seeds": len(runs)}
        for key in ("gain", "won", "tied", "lost"):
            row[key] = interval([each[key] for each in found])
        rows.append(row)
    return rows


def start_again(record: Record) -> Row:
    """The mean of judge B's probability over more draws of the starting model's responses."""
    return {"mean": float(np.mean(record["start_again"]["judge"]))}


def over_more_draws(*records: Record) -> list[Row]:
    """The gains of the runs over those draws."""
    start = start_again(records[0])["mean"]
    rows = []
    for (algorithm, rate), runs in report.group(runs_of(records), "run", "lr").items():
        gains = [float(np.mean(run["judge"])) - start for run in runs]
        rows.append({"name": f"{algorithm}, {short(rate)}"} | with_each_seed(gains))
    return rows


def interval(values: list[float]) -> Any:
    """Mean and interval over seeds; of fewer than three the mean alone."""
    return differences.of_seeds(values) or {"mean": float(np.mean(values))}


def judged_at(run: Row) -> np.ndarray:
    """Judge B's mean over an update's texts where the KL first passes each level, or NaN; and over
    the held-out texts after the run."""
    updates = run["updates"]
    curve = {
        "kl": updates["objective/kl"],
        "judge": updates["judge"],
    }
    at_levels = differences.at_levels(curve, LEVELS, "judge")
    return np.append(at_levels, np.mean(run["judge"]))


def with_each_seed(differences_of_seeds: list[float]) -> Row:
    """Differences as text, with each seed, and their mean."""
    return {
        "seeds": ", ".join(f"{value:+.3f}" for value in differences_of_seeds),
        "difference": interval(differences_of_seeds),
    }


def between(*records: Record) -> list[Row]:
    """RLOO minus PPO within seeds, by judge B: at levels of KL that both reach, and at the end."""
    runs = report.group(runs_of(records), "run", "lr")
    rows = []
    for rate in dict.fromkeys(rate for _, rate in runs):
        found = []
        for one, other in zip(runs["PPO", rate], runs["RLOO", rate], strict=True):
            found.append(judged_at(other) - judged_at(one))
        places = [f"KL {level:g}" for level in LEVELS] + ["the end"]
        for where, column in zip(places, np.transpose(found), strict=False):
            leads = column[~np.isnan(column)].tolist()
            if leads:
                row = {"rate": short(rate), "where": where}
                rows.append(row | with_each_seed(leads))
    return rows


def ahead(one: list[Row], other: list[Row]) -> list[float]:
    """Judge B's mean after some runs minus that after others, within seeds."""
    found = []
    for run, base in zip(one, other, strict=True):
        assert run["seed"] == base["seed"]
        lead = np.mean(run["judge"]) - np.mean(base["judge"])
        found.append(float(lead))
    return found


def on_labels(*records: Record) -> list[Row]:
    """What learns from the labels directly, minus PPO and minus RLOO."""
    runs = report.group(runs_of(records), "run")
    rows = []
    for method in ON_LABELS:
        for algorithm in ALGORITHMS:
            row = {"name": f"{method} minus {algorithm}"}
            found = ahead(runs[method,], runs[algorithm,])
            rows.append(row | with_each_seed(found))
    return rows


def slower(*records: Record) -> list[Row]:
    """The slow rate minus the fast one, and the mean of policy/clipfrac at each."""
    runs = report.group(runs_of(records), "run", "lr")
    rows = []
    for algorithm in ALGORITHMS:
        fast = runs[algorithm, FAST]
        slow = runs[algorithm, SLOW]
        row = {"name": algorithm, "fast": clipfrac(fast), "slow": clipfrac(slow)}
        rows.append(row | with_each_seed(ahead(slow, fast)))
    return rows


def clipfrac(runs: list[Row]) -> float:
    """The mean over all updates of the runs."""
    return float(np.mean([run["updates"]["policy/clipfrac"] for run in runs]))


def judges(record: Record) -> list[Row]:
    """How often each judge gives a positive text the higher score of two."""
    rows = []
    for name, share in sorted(record["judges"].items()):
        rows.append({"judge": name, "share": share})
    return rows


def agreement(record: Record) -> Row:
    """The correlation of reward and judge B's probability over the starting model's responses, with
    Fisher's interval."""
    start = record["rows"][0]
    found = float(np.corrcoef(start["reward"], start["judge"])[0, 1])
    width = 1.96 / (len(start["judge"]) - 3) ** 0.5
    low, high = np.tanh(np.arctanh(found) + np.array([-width, width]))
    return {
        "correlation": found,
        "low": float(low),
        "high": float(high),
    }


def texts(record: Record) -> list[Row]:
    """The first openings with all texts of the first seed and rate."""
    first = record["rows"][1]
    name = f"seed {first['seed']}, {short(first['lr'])}"
    rows = []
    for line in common.read_lines(Path(__file__).with_name("films-texts.jsonl"))[:SHOWN]:
        opening = line["opening"]
        row = {"opening": opening, "start": line["starting model"].removeprefix(opening)}
        for algorithm in ALGORITHMS:
            row[algorithm] = line[f"{algorithm}, {name}"].removeprefix(opening)
        for key, text in row.items():  # as a cell of a table can show it
            row[key] = " ".join(text.split()).replace("|", "&#124;").replace("<", "&lt;")
        rows.append(row)
    return rows


# --- the earlier study of four seeds --------------------------------------------------------------
def duel_of(record: Record, run: str) -> Row:
    """A policy against the starting model, or RLOO against PPO."""
    if run == BETWEEN:
        return record["rloo_over_ppo"]
    return report.look_up(record, f"rows > {run} > duel")


def shares(duel: Row) -> dict[str, float]:
    """The shares of pairs of responses that are won, tied and lost, and the win rate, which counts
    a tie as half a win."""
    pairs = 16 * len(duel["won"])  # of each opening
    won = sum(duel["won"]) / pairs
    tied = sum(duel["tied"]) / pairs
    return {
        "won": won,
        "tied": tied,
        "lost": 1 - won - tied,
        "rate": won + tied / 2,
    }


def gain(record: Record, run: str) -> float:
    """How much a policy's true score is above the starting model's, or RLOO's above PPO's."""
    scores = {row["run"]: row["true_score"] for row in record["rows"]}
    if run == BETWEEN:
        return scores["RLOO"] - scores["PPO"]
    return scores[run] - scores["starting model"]


def four_seeds(*records: Record) -> list[Row]:
    """All seeds in one row for each algorithm, and for RLOO against PPO."""
    rows = []
    for run in (*ALGORITHMS, BETWEEN):
        found = [shares(duel_of(record, run)) for record in records]
        row = {"run": run if run == BETWEEN else f"{run} against the starting model"}
        for name in found[0]:
            row[name] = differences.with_interval([each[name] for each in found])
        row["gain"] = differences.with_interval([gain(record, run) for record in records])
        rows.append(row)
    return rows


# --- the picture ----------------------------------------------------------------------------------
def draw_gains(axes: Axes, start: Row, runs: list[Row], key: str, words: str) -> None:
    """How far each run's mean is above the starting model's; an interval over the openings."""
    colours = ALGORITHMS | ON_LABELS
    for i, row in enumerate(runs):
        found = differences.with_interval(np.subtract(row[key], start[key]))
        axes.errorbar(found["mean"], i, xerr=found["width"], fmt="o", color=colours[row["run"]])
    axes.axvline(0.0, color="black", linewidth=1)
    report.label(axes, words)


def draw(*records: Record) -> Figure:
    """Gains in reward and in judge B's probability, of each run; the runs of a method together."""
    start = records[0]["rows"][0]
    groups = report.group(runs_of(records), "run", "lr").values()
    runs = [run for group in groups for run in group]
    figure, panels = report.new(TITLE, 1, 2, 1.6 + 0.3 * len(runs), sharey=True)
    reward, judge = panels[0]
    draw_gains(reward, start, runs, "reward", "gain in reward (the reward model's)")
    draw_gains(judge, start, runs, "judge", "gain in judge B's probability of positive")
    names = [f"{row['run']}, seed {row['seed']}" for row in runs]
    reward.set_yticks(range(len(names)), names)
    reward.invert_yaxis()
    return figure


PICTURES = {"films.png": (draw, "films.json", "labels.json")}
