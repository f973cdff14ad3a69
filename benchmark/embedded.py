"""The embedded default, end to end: reward model, then PPO and RLOO for several seeds, judged by VADER itself.

    python benchmark/embedded.py --seeds 1 2 3

The policies only ever saw the reward model. VADER, which labelled the data, scores fresh samples of theirs and of the
reference policy for the held-out queries. Writes results/embedded-<tag>.json and the same as .png.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
from judge import Judge
from matplotlib.figure import Figure


def run(script: str, out: Path, *flags: str) -> None:
    """Run a script as a user would, unless `out` is there from an earlier call."""
    if not out.exists():
        command = [sys.executable, str(common.ROOT / script), "--output_dir", str(out), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def plot(curves: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Mean over seeds, and a band from the lowest to the highest, of three metrics."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = ("objective/scores", "objective/kl", "objective/kl_coef")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for (name, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
            x = [row["ppo/episode"] for row in runs[0]]
            y = np.array([[row[panel] for row in metrics] for metrics in runs])
            axes.plot(x, y.mean(0), color=color, label=f"{name}, {len(runs)} seeds")
            axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.2)
        axes.set(title=panel, xlabel="episodes")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", default="tiny", help="name of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", default="runs/embedded", help="where the runs go; finished ones are used again")
    args = parser.parse_args()
    folder = Path(args.folder)
    rows: list[dict[str, Any]] = []
    curves: dict[str, list[list[dict[str, float]]]] = {"PPO": [], "RLOO": []}
    for seed in args.seeds:
        reward = folder / f"reward-{seed}"
        run("train_reward.py", reward, "--seed", str(seed))
        accuracy = json.loads((reward / "results.json").read_text())["test/accuracy"]
        judge = Judge(seed, reward / "reward_model")
        reference = judge(judge.ref)
        for name, script in (("PPO", "ppo_rlhf.py"), ("RLOO", "rloo_rlhf.py")):
            out = folder / f"{name}-{seed}"
            run(script, out, "--seed", str(seed), "--reward_model", str(reward / "reward_model"))
            found = judge(judge.actor(out / "policy"))
            metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            rows.append(
                {
                    "algorithm": name,
                    "seed": seed,
                    "vader_before": float(np.mean(reference["gold"])),
                    "vader_after": float(np.mean(found["gold"])),
                    "kl": float(np.mean(found["kl"])),
                    "distinct": found["distinct"],
                    "accuracy": accuracy,
                    "score": sum(row["objective/scores"] for row in metrics[-10:]) / 10,
                }
            )
            curves[name].append(metrics)
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
        plot(curves, common.write("embedded", args.tag, args, rows).with_suffix(".png"))


if __name__ == "__main__":
    main()
