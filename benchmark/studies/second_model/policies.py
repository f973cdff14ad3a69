"""A reward model, PPO and RLOO on gemma-3-270m, by the protocol in README.md.

    python benchmark/studies/second_model/policies.py        # about 80 minutes on one core

Everything but the model, its rates and the numbers of labels and episodes is that of
four_seeds/run.py, whose seed 11 has the same held-out openings. Needs the package afinn, and for
the weights a package registry, or --base_model. Writes seed-11.json, and the metrics.jsonl of each
run as <run>-11.jsonl.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.studies.four_seeds import run as four_seeds
from benchmark.studies.second_model import run as second_model

# Half of the micro-batch of SmolLM2: logits of 262,144 tokens fill the memory.
SIZES = "--batch_size 64 --micro_batch_size 16 --eval_queries 16 --checkpoint_every 0"
TASK = f"{four_seeds.NO_CUT} {four_seeds.SHAPE} {SIZES} --lr 1e-5 --dtype bf16"
REWARD = "--batch_size 16 --lr 3e-5 --dtype bf16"

if __name__ == "__main__":
    four_seeds.main(
        __doc__,
        __file__,
        second_model.fetch,
        seeds=(11,),
        labels=1_024,
        episodes=512,
        task=TASK,
        reward=REWARD,
    )
