"""The default run, end to end: reward model, then PPO and RLOO for several seeds, judged by VADER.

    python benchmark/studies/default_run/run.py --seeds 1 2 3

The policies only ever saw the reward model. VADER, which labelled the data, scores fresh samples of
theirs and of the starting model for the held-out queries. The runs are full ones of choices/, and
are shared with it: that record has their curves. Writes <tag>.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common, runs


def measure(task: tuple[str, int, Path, list[str]]) -> dict[str, Any]:
    """One algorithm with one seed: a row of the record."""
    choice, seed, folder, _ = task
    found = runs.measure(task)
    out = runs.run_folder(*task)
    reward = runs.reward_folder("", seed, folder)
    results = json.loads((reward / "results.json").read_text())
    results["test/constant"] = common.best_constant()
    metrics = common.read_lines(out / "metrics.jsonl")
    return {
        "algorithm": runs.NAMES[choice],
        "seed": seed,
        "true_score_before": found["true_score_before"],
        "true_score_after": found["true_score"],
        "kl": found["kl"],
        "distinct": found["distinct"],
        "accuracy": results["test/accuracy"],
        "reward": float(np.mean([x["objective/scores"] for x in metrics[-10:]])),
        "found_end": float(np.mean([x["objective/found_end"] for x in metrics[-10:]])),
        "reward_model": results,
    }


def main() -> None:
    parser = runs.make_parser(__doc__, __file__, tag="runs", episodes=12_800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    folder = runs.begin(args)
    sizes = ["--total_episodes", str(args.episodes), "--batch_size", "128"]
    tasks = [(choice, seed, folder, sizes) for seed in args.seeds for choice in runs.NAMES]
    for row in runs.run_all(tasks, args.jobs):
        sys.stdout.write(f"{row['choice']} {row['seed']}: {row.get('true_score')}\n")
    rows = [measure(task) for task in tasks]
    common.write(args, rows)
    shown = [{name: x for name, x in row.items() if name != "reward_model"} for row in rows]
    common.show_rows(shown)


if __name__ == "__main__":
    main()
