"""RLOO on VADER's own score, with one change at a time, by the protocol in README.md.

    python benchmark/studies/own_score/run.py --seeds 11        # about 45 minutes on one core

Model, openings and held-out openings are those of four_seeds, and so are the seeds. Writes
seed-<seed>.json.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common
from benchmark.studies.four_seeds import run as four_seeds
from benchmark.studies.real_model import run as real_model

SEEDS = (11, 12)
VADER = "benchmark.tools.vader:sentiment"
TIMES_3 = "benchmark.studies.own_score.rewards:three_times"
ARMS = {
    "VADER": f"--reward_fn {VADER}",
    "VADER, three times": f"--reward_fn {TIMES_3}",
    "VADER, no penalty": f"--reward_fn {VADER} --penalty_mode add --penalty_reward_value 0",
}


def equal_groups(found: four_seeds.Responses) -> dict[str, float]:
    """Shares of openings whose four responses score alike, so that RLOO learns nothing from them:
    by VADER, and with -1 in place of the score of a response that does not end."""
    penalised = np.where(found.found_end.astype(bool), found.rewards, -1)
    shares = {}
    for name, scores in (("alone", found.rewards), ("with_penalty", penalised)):
        groups = scores.reshape(-1, four_seeds.SAMPLES)
        shares[name] = float((groups.max(1) == groups.min(1)).mean())
    return shares


def measure(seed: int, base_model: str, args: Any) -> None:
    """All arms of a seed, and its record."""
    openings, held_out = four_seeds.split(seed, args.folder)
    task = f"--base_model {base_model} --query_dataset {openings} {four_seeds.TASK}"
    task += f" --total_episodes 1024 --seed {seed}"
    judged = (base_model, VADER, seed, held_out)
    start = four_seeds.respond(base_model, *judged)
    row = {"run": "starting model", "seed": seed} | four_seeds.summary(start)
    rows = [row | {"equal_groups": equal_groups(start)}]
    for name, flags in ARMS.items():
        words = f"{task} {flags}"
        run = real_model.folder_of("rloo_rlhf.py", words, args.folder)
        real_model.run("rloo_rlhf.py", words, run)
        found = four_seeds.respond(str(run / "policy"), *judged)
        spent = json.loads(run.with_suffix(".json").read_text())
        row = {"run": name, "seed": seed} | four_seeds.summary(found) | spent
        row["equal_groups"] = equal_groups(found)
        rows.append(row | {"duel": four_seeds.duel(held_out, found.texts, start.texts)})
        record = argparse.Namespace(tag=f"seed-{seed}", out=args.out)
        common.write(
            record, rows, flags=four_seeds.TASK, arms=ARMS, shown=held_out[: four_seeds.SHOWN]
        )


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--base_model", default=None, help="a folder or hub id (None: the package on PyPI)")
    add("--folder", type=Path, default="runs/own_score", help="where model and runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    base_model = args.base_model or str(real_model.fetch(args.folder))
    for seed in args.seeds:
        measure(seed, base_model, args)


if __name__ == "__main__":
    main()
