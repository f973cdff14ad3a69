"""The embedded default, end to end: reward model, then PPO and RLOO for several seeds, judged by
VADER itself.

    python benchmark/embedded.py --seeds 1 2 3

The policies only ever saw the reward model. VADER, which labelled the data, scores fresh samples of
theirs and of the reference policy for the held-out queries. The runs are those of ablations.py at
full length, and are shared with it. Writes results/embedded-<tag>.json and the same as .png.
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
from matplotlib.figure import Figure

NAMES = {"default": "PPO", "RLOO, K 4": "RLOO"}
COLOURS = {"PPO": "#0072B2", "RLOO": "#D55E00"}
PANELS = {
    "objective/scores": "score of the reward model",
    "gold": "gold score (VADER)",
    "objective/kl": "KL (nats per response)",
}


def measure(task: tuple[str, int, Path, list[str]]) -> tuple[dict[str, Any], list]:
    """One algorithm with one seed: a row of the record, and its metrics."""
    choice, seed, folder, _ = task
    found = ablations.measure(task)
    out, _ = ablations.run_folder(*task)
    reward = ablations.reward_folder("", seed, folder)
    results = json.loads((reward / "results.json").read_text())
    metrics = common.read_lines(out / "metrics.jsonl")
    row = {
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
    return row, metrics


def plot(curves: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Mean over seeds, and a band from the lowest to the highest, of three metrics."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for name, runs in curves.items():
            x = [row["ppo/episode"] for row in runs[0]]
            y = np.array([[row[metric] for row in metrics] for metrics in runs])
            axes.plot(x, y.mean(0), color=COLOURS[name], label=f"{name}, {len(runs)} seeds")
            axes.fill_between(x, y.min(0), y.max(0), color=COLOURS[name], alpha=0.2)
        axes.set(ylabel=label, xlabel="episodes")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=130)


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
    rows = []
    curves = {name: [] for name in COLOURS}
    for task in tasks:
        row, metrics = measure(task)
        rows.append(row)
        curves[row["algorithm"]].append(metrics)
    path = common.write("embedded", args.tag, args, rows)
    plot(curves, path.with_suffix(".png"))
    common.show_rows([{name: x for name, x in row.items() if name != "rewards"} for row in rows])


if __name__ == "__main__":
    main()
