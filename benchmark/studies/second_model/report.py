"""Rows of this study: `python benchmark/report.py second_model`."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmark import differences
from benchmark.report import ALGORITHMS, Record, Row, look_up
from benchmark.studies.four_seeds import report as four_seeds
from benchmark.studies.four_seeds.report import BETWEEN, duel_of, gain, shares

OTHERS = Path(__file__).resolve().parents[1] / "four_seeds"
TITLE = "gemma-3-270m improves, too, and again RLOO ends higher"


def cost(mine: Record, other: Record) -> list[Row]:
    """Peak memory of a run, and the median of the seconds of its updates, beside SmolLM2."""
    rows = []
    for run in ALGORITHMS:
        found = look_up(mine, f"rows > {run}")
        beside = look_up(other, f"rows > {run}")
        lines = (OTHERS / f"{run}-11.jsonl").read_text().splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines]
        row = {"run": run}
        for name, spent, memory in (
            ("gemma", found["seconds"], found["memory"]),
            ("smollm2", seconds, beside["memory"]),
        ):
            row[name] = {"seconds": np.median(spent), "gib": memory / 2**30}
        rows.append(row)
    return rows


def updates(record: Record) -> list[Row]:
    """What each run logged of its updates."""
    rows = []
    for row in record["rows"]:
        found = {
            "run": row["run"],
            "scores": row["objective/scores"],
            "kl": row["objective/kl"],
            "sampling": max(row["sampling_error"]),
            "ratio": max(row["first_ratio_error"]),
        }
        rows.append(found)
    return rows


def comparisons(record: Record) -> list[Row]:
    """Wins, ties, losses and gains of each policy against the starting model, and of RLOO against
    PPO, with intervals over openings."""
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


def runs(record: Record) -> list[Row]:
    """What each run's responses to the held-out openings are like."""
    return record["rows"]


def reward_models(record: Record) -> list[Row]:
    """How often the reward model names VADER's favourite, with Wilson's interval over the openings
    that have one."""
    model = record["reward_model"]
    right = differences.wilson(model["accuracy"], model["decided"])
    return [{"name": "gemma", "right": right} | model]


def draw(*records: Record) -> Figure:
    """True scores, wins, ties and losses of gemma and of SmolLM2."""
    figure = four_seeds.draw(*records, title=TITLE)
    figure.axes[0].set_yticklabels(["gemma-3-270m", "SmolLM2-135M"])
    return figure


PICTURES = {"models.png": (draw, "seed-11.json", "../four_seeds/seed-11.json")}
