"""A quarter of the learning rate: what short_runs/run.py measures, with the settings of this study.

    python benchmark/studies/slow_rate/run.py          # writes slow.json
    python benchmark/studies/slow_rate/run.py --tag long --episodes 25600 \\
        --choices default "RLOO, K 4"                  # twice the episodes: long.json

All flags of short_runs/run.py are here, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.studies.short_runs import run

FULL = Path(__file__).resolve().parent.parent / "full_length" / "full.json"
CHOICES = ["default", "RLOO, K 4", "critic from the reward model", "GRPO"]

if __name__ == "__main__":
    run.main(
        __file__,
        tag="slow",
        lr="5e-5",
        beside=FULL,
        choices=CHOICES,
        episodes=12_800,
        batch_size=128,
        seeds=[1, 2, 3],
    )
