"""Rows and the picture of this study: `python benchmark/report.py films`."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmark import common, differences, report
from benchmark.report import ALGORITHMS, Record, Row

TIE = 0.05  # of judge B's probability
LEVELS = (1.0, 2.0, 3.0)  # nats
SHOWN = 20  # openings with their texts
MEANS = ("judge", "vader", "reward", "kl", "likelihood", "gemma", "repeats")
TITLE = "Film reviews: does the judge who made no labels find them more positive?"


# --- tables ---------------------------------------------------------------------------------------
def short(rate: float) -> str:
    """A learning rate as one types it."""
    return f"{rate:.0e}".replace("e-0", "e-")


def against_start(row: Row, start: Row) -> Row:
    """How judge B compares a policy's text of each opening with the starting model's."""
    gains = np.subtract(row["judge"], start["judge"])
    return {
        "gain": float(gains.mean()),
        "won": float((gains > TIE).mean()),
        "tied": float((np.abs(gains) <= TIE).mean()),
        "lost": float((gains < -TIE).mean()),
    }


def models(record: Record) -> list[Row]:
    """A row for each model: means over its texts, and judge B's comparison."""
    start = record["rows"][0]
    rows = []
    for row in record["rows"]:
        found = {"name": row["run"], "different": row["different"]}
        for key in MEANS:
            found[key] = float(np.mean(row[key]))
        if row is not start:
            found["name"] = f"{row['run']}, {short(row['lr'])}, seed {row['seed']}"
            found["minutes"] = row["seconds"] / 60
            found |= against_start(row, start)
        rows.append(found)
    return rows


def claims(record: Record) -> list[Row]:
    """The gain in judge B's probability: the mean over the seeds, and its interval."""
    start = record["rows"][0]
    rows = []
    for (algorithm, rate), runs in report.group(record["rows"][1:], "run", "lr").items():
        found = [against_start(run, start) for run in runs]
        row = {"name": f"{algorithm}, {short(rate)}", "seeds": len(runs)}
        for key in ("gain", "won", "tied", "lost"):
            row[key] = interval([each[key] for each in found])
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
        places = [f"{level:g} nats" for level in LEVELS] + ["the end"]
        for where, column in zip(places, np.transpose(found), strict=False):
            leads = column[~np.isnan(column)].tolist()
            if leads:
                row = {"rate": short(rate), "where": where}
                row["seeds"] = ", ".join(f"{lead:+.3f}" for lead in leads)
                rows.append(row | {"difference": interval(leads)})
    return rows


def judges(record: Record) -> list[Row]:
    """How often each judge gives a positive text the higher score of two."""
    rows = []
    for name, share in record["judges"].items():
        rows.append({"judge": name, "share": share})
    return rows


def texts(record: Record) -> list[Row]:
    """The first openings with all texts of the first seed and rate."""
    first = record["rows"][1]
    name = f"seed {first['seed']}, {short(first['lr'])}"
    rows = []
    for line in common.read_lines(Path(__file__).with_name("texts.jsonl"))[:SHOWN]:
        opening = line["opening"]
        row = {"opening": opening, "start": line["starting model"].removeprefix(opening)}
        for algorithm in ALGORITHMS:
            row[algorithm] = line[f"{algorithm}, {name}"].removeprefix(opening)
        rows.append({key: in_a_cell(text) for key, text in row.items()})
    return rows


def in_a_cell(text: str) -> str:
    """A text as a cell of a table shows it."""
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;")


# --- the picture ----------------------------------------------------------------------------------
def draw(record: Record) -> Figure:
    """Judge B's mean over the KL: of each update of each run, and of best of n."""
    figure, panels = report.new(TITLE, 1, 1, 4.5)
    axes = panels[0][0]
    for row in record["rows"][1:]:
        curve = row["updates"]
        colour = ALGORITHMS[row["run"]]
        axes.plot(curve["objective/kl"], curve["judge"], ".-", color=colour, alpha=0.5)
    kl = [best["kl"] for best in record["best_of"]]
    scores = [best["judge"] for best in record["best_of"]]
    axes.plot(kl, scores, "*--", color=report.BEST_OF_N)
    start = float(np.mean(record["rows"][0]["judge"]))
    report.line_at(axes, start, "starting model", ":")
    report.name_colours(axes, ALGORITHMS, ".-")
    report.name_colours(axes, {"best of 1, 4, 16": report.BEST_OF_N}, "*--")
    report.label(axes, report.KL, "judge B: probability of positive", "lower right")
    return figure


PICTURES = {"films.png": (draw, "films.json")}
