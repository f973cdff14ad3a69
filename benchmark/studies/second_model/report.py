"""Rows of this study: `python benchmark/report.py second_model`."""

from benchmark.report import Record, Row, look_up
from benchmark.studies.four_seeds import report as four_seeds

seeds = four_seeds.seeds
measures = four_seeds.measures


def cost(mine: Record, other: Record) -> list[Row]:
    """Memory and time of each policy's run, beside those of SmolLM2."""
    rows = []
    for run in ("PPO", "RLOO"):
        row = {"run": run}
        for name, record in (("gemma", mine), ("smollm2", other)):
            found = look_up(record, f"rows > {run}")
            row[name] = {
                "gib": found["memory"] / 2**30,
                "minutes": found["seconds"] / 60,
            }
        rows.append(row)
    return rows
