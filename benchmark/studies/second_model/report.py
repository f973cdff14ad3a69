"""Rows of this study: `python benchmark/report.py second_model`."""

from benchmark.report import ALGORITHMS, Record, Row
from benchmark.studies.four_seeds import report as four_seeds

seeds = four_seeds.seeds
measures = four_seeds.measures
BATCH_SIZE = 64


def cost(mine: Record, other: Record) -> list[Row]:
    """Memory of a run, and its seconds for each update (with loading and evaluations), beside those
    of SmolLM2."""
    rows = []
    for run in ALGORITHMS:
        row = {"run": run}
        for name, record in (("gemma", mine), ("smollm2", other)):
            found = four_seeds.row_of(record, run)
            words = record["flags"].split()
            episodes = int(words[words.index("--total_episodes") + 1])
            row[name] = {
                "gib": found["memory"] / 2**30,
                "seconds": found["seconds"] * BATCH_SIZE / episodes,
            }
        rows.append(row)
    return rows
