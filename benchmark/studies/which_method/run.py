"""Methods newer than RLOO, in short runs: what choices/run.py measures, with the settings of
this study.

    python benchmark/studies/which_method/run.py        # a minute and a half a run on one core

Writes methods.json. All flags of choices/run.py are here, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark import runs
from benchmark.studies.choices import run

OLDER = (*runs.NAMES, "critic from the reward model, warmed up", "RLOO of tokens", "GRPO")

if __name__ == "__main__":
    run.main(
        __file__,
        tag="methods",
        choices=[*OLDER, *run.NEWER],
        seeds=[1, 2, 3, 4, 5],
    )
