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
BETWEEN = "RLOO against PPO"
MEANS = ("judge", "vader", "reward", "kl", "likelihood", "gemma", "repeats")
TITLE = "Film reviews: the reward rises with every seed, judge B's probability hardly"


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
    """The mean of judge B's probability over more draws of the starting model's responses, and the
    smallest gain of a run over it, in standard errors over the openings."""
    again = record["start_again"]
    errors = []
    for run in record["rows"][1:]:
        gain = np.subtract(run["judge"], again["judge"])
        error = gain.std(ddof=1) / len(gain) ** 0.5
        errors.append(float(gain.mean() / error))
    return {
        "mean": float(np.mean(again["judge"])),
        "least_in_errors": min(errors),
    }


def over_more_draws(*records: Record) -> list[Row]:
    """The gains of the runs over those draws."""
    start = start_again(records[0])["mean"]
    rows = []
    for (algorithm, rate), runs in report.group(runs_of(records), "run", "lr").items():
        gains = [float(np.mean(run["judge"])) - start for run in runs]
        row = {
            "name": f"{algorithm}, {short(rate)}",
            "each": ", ".join(f"{gain:+.3f}" for gain in gains),
            "gain": interval(gains),
        }
        rows.append(row)
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


def between(record: Record) -> list[Row]:
    """RLOO minus PPO within seeds, by judge B: at levels of KL that both reach, and at the end."""
    runs = report.group(record["rows"][1:], "run", "lr")
    rows = []
    for rate in dict.fromkeys(rate for _, rate in runs):
        ppo = runs.get(("PPO", rate), [])
        rloo = runs.get(("RLOO", rate), [])
        found = []
        for one, other in zip(ppo, rloo, strict=False):
            found.append(judged_at(other) - judged_at(one))
        places = [f"KL {level:g}" for level in LEVELS] + ["the end"]
        for where, column in zip(places, np.transpose(found), strict=False):
            leads = column[~np.isnan(column)].tolist()
            if leads:
                row = {"rate": short(rate), "where": where}
                row["seeds"] = ", ".join(f"{lead:+.3f}" for lead in leads)
                rows.append(row | {"difference": interval(leads)})
    return rows


def on_labels(*records: Record) -> list[Row]:
    """What learns from the labels directly, minus PPO and minus RLOO, within seeds: judge B's mean
    after training."""
    means = {}
    for (method,), runs in report.group(runs_of(records), "run").items():
        means[method] = {run["seed"]: float(np.mean(run["judge"])) for run in runs}
    rows = []
    for method in ON_LABELS:
        for algorithm in ALGORITHMS:
            others = means[algorithm]
            leads = [mean - others[seed] for seed, mean in means[method].items()]
            row = {"name": f"{method} minus {algorithm}"}
            row["seeds"] = ", ".join(f"{lead:+.3f}" for lead in leads)
            rows.append(row | {"difference": interval(leads)})
    return rows


def judges(record: Record) -> list[Row]:
    """How often each judge gives a positive text the higher score of two."""
    rows = []
    for name, share in record["judges"].items():
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
        rows.append({key: in_a_cell(text) for key, text in row.items()})
    return rows


def in_a_cell(text: str) -> str:
    """A text as a cell of a table shows it."""
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;")


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
