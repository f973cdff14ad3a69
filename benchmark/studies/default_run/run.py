"""The default run, end to end: reward model, then PPO and RLOO for several seeds, judged by VADER.

    python benchmark/studies/default_run/run.py --seeds 1 2 3

The policies only ever saw the reward model. VADER, which labelled the data, scores fresh samples of
theirs and of the starting model for the held-out queries. Beside them stands best of n by the very
reward model that they learn from. Writes <tag>.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common, runs
from benchmark.judge import Judge, best_of_n

POOL = 256  # responses to each of 128 queries, for best of n


def measure(task: tuple[str, int, Path, list[str]]) -> dict[str, Any]:
    """One algorithm with one seed: a row of the record."""
    choice, seed, folder, _ = task
    found = runs.measure(task)
    found.pop("curve", None)  # other metrics, of the study of choices
    out = runs.run_folder(*task)
    results = json.loads((runs.reward_folder("", seed, folder) / "results.json").read_text())
    results["test/constant"] = common.best_constant()
    metrics = common.read_lines(out / "metrics.jsonl")
    return found | {
        "algorithm": runs.NAMES[choice],
        "accuracy": results["test/accuracy"],
        "found_end": float(np.mean([x["objective/found_end"] for x in metrics[-10:]])),
        "seconds": sum(x["seconds"] for x in metrics),
        "reward_model": results,
    }


def best_of_seed(task: tuple[int, Path]) -> dict[str, Any]:
    """Best of n by the reward model that the policies of this seed learn from."""
    reward = runs.reward_folder("", *task) / "reward_model"
    return best_of_n(Judge(task[0], reward, num_queries=128), POOL) | {"seed": task[0]}


def main() -> None:
    parser = runs.make_parser(__doc__, __file__, tag="runs", episodes=12_800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    folder = runs.begin(args)
    sizes = ["--total_episodes", str(args.episodes), "--batch_size", "128"]
    tasks = [(choice, seed, folder, sizes) for seed in args.seeds for choice in runs.NAMES]
    for row in runs.run_all(tasks, args.jobs):
        sys.stdout.write(f"{row['choice']} {row['seed']}: {row.get('true_score')}\n")
        sys.stdout.flush()
    rows = [measure(task) for task in tasks]
    best = [best_of_seed((seed, folder)) for seed in args.seeds]
    common.write(args, rows, best_of_n=best)
    for row in rows:
        del row["reward_model"], row["fine_curve"]
    common.show_rows(rows)


if __name__ == "__main__":
    main()
