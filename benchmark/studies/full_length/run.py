"""Choices in runs of full length: what short_runs/run.py measures, with the settings of this study.

    python benchmark/studies/full_length/run.py        # five minutes a run on one core

Writes full.json. All flags of short_runs/run.py are here, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.studies.short_runs import run

if __name__ == "__main__":
    run.main(
        __file__,
        tag="full",
        episodes=12_800,
        batch_size=128,
        seeds=[1, 2, 3],
    )
