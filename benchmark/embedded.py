"""The embedded default, end to end: reward model, then PPO and RLOO for several seeds, judged by
VADER itself.

    python benchmark/embedded.py --seeds 1 2 3

The policies only ever saw the reward model. VADER, which labelled the data, scores fresh samples of
theirs and of the reference policy for the held-out queries. The runs are those of ablations.py at
full length, and are shared with it: pictures.py draws their curves from the record of those.
Writes results/embedded-<tag>.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ablations
import common
import numpy as np
import torch

NAMES = {"default": "PPO", "RLOO, K 4": "RLOO"}


def measure(task: tuple[str, int, Path, list[str]]) -> dict[str, Any]:
    """One algorithm with one seed: a row of the record."""
    choice, seed, folder, _ = task
    found = ablations.measure(task)
    out, _ = ablations.run_folder(*task)
    reward = ablations.reward_folder("", seed, folder)
    results = json.loads((reward / "results.json").read_text())
    results["test/constant"] = common.best_constant()
    metrics = common.read_lines(out / "metrics.jsonl")
    return {
        "algorithm": NAMES[choice],
        "seed": seed,
        "vader_before": found["gold_reference"],
        "vader_after": found["gold"],
        "kl": found["kl"],
        "distinct": found["distinct"],
        "accuracy": results["test/accuracy"],
        "score": float(np.mean([x["objective/scores"] for x in metrics[-10:]])),
        "found_end": float(np.mean([x["objective/found_end"] for x in metrics[-10:]])),
        "rewards": results,
    }


def main() -> None:
    parser = common.make_parser(__doc__)
    add = parser.add_argument
    add("--tag", default="tiny", help="name of the record")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--episodes", type=int, default=12_800, help="of each policy (that is the default)")
    add("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each with one thread")
    add("--folder", default="runs/ablations", help="where the runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder = Path(args.folder) / common.commit()
    sizes = ["--total_episodes", str(args.episodes), "--batch_size", "128"]
    tasks = [(choice, seed, folder, sizes) for seed in args.seeds for choice in NAMES]
    for row in ablations.run_all(tasks, args.jobs):
        sys.stdout.write(f"{row['choice']} {row['seed']}: {row.get('gold')}\n")
    rows = [measure(task) for task in tasks]
    common.write("embedded", args.tag, args, rows)
    common.show_rows([{name: x for name, x in row.items() if name != "rewards"} for row in rows])


if __name__ == "__main__":
    main()
