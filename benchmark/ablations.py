"""What each choice is worth on the embedded default, whose true reward is known: VADER labelled its data.

    python benchmark/ablations.py                          # all choices, five seeds; finished runs are used again
    python benchmark/ablations.py --choices default "torch's Adam" --seeds 1 2

One choice at a time is made the other way. A seed has its own reward model, and its policies start from the same
queries and random numbers: differences to the default are taken within seeds, and their 95 % intervals are Student's t
over the seeds. The gold score is VADER's of fresh samples for held-out queries, the proxy that of the reward model on
the last tenth of the updates. A run has failed if it stopped, or if its gold score ends below the reference's. RLOO's
rows compare with RLOO's default. Writes results/ablations-<tag>.json and .png.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
from matplotlib.figure import Figure

# name: script, flags, flags of the reward model
PPO, RLOO, STEADY = "ppo_rlhf.py", "rloo_rlhf.py", "--batch_size 128 --lr 2e-4 --kl_coef 0.15 --temperature 0.7"
CHOICES: dict[str, tuple[str, str, str]] = {
    "default": (PPO, "", ""),
    "torch's Adam": (PPO, "--adam torch", ""),
    "no reward whitening": (PPO, "--no-whiten_rewards", ""),
    "no advantage whitening": (PPO, "--no-whiten_advantages", ""),
    "no value clipping": (PPO, "--cliprange_value 1e9", ""),
    "critic of its own": (PPO, "--critic policy", ""),
    "critic from the reward model": (PPO, "--critic reward", ""),
    "critic warm-up, 5 updates": (PPO, "--critic reward --critic_warmup 5", ""),
    "reward model not normalised": (PPO, "", "--normalization_samples 0"),
    "fixed KL coefficient": (PPO, "--kl_target none", ""),
    "KL by k3": (PPO, "--kl_estimator k3", ""),
    "KL by abs": (PPO, "--kl_estimator abs", ""),
    "KL over the vocabulary": (PPO, "--kl_estimator full", ""),
    "temperature 1": (PPO, "--temperature 1", ""),
    "penalty added": (PPO, "--penalty_mode add", ""),
    "no penalty": (PPO, "--penalty_mode add --penalty_reward_value 0", ""),
    "truncated tokens masked": (PPO, "--mask_truncated", ""),
    "8 minibatches": (PPO, "--num_minibatches 8", ""),
    "1 epoch": (PPO, "--num_epochs 1", ""),
    "lambda 1": (PPO, "--lam 1", ""),
    "gamma 0.95": (PPO, "--gamma 0.95", ""),
    "EMA 0.8": (PPO, "--ema 0.8", ""),
    "PPO-ptx": (PPO, "--ptx_coef 1 --ptx_dataset tiny/queries", ""),
    "scores clipped to 1": (PPO, "--score_clip 1", ""),
    "scores whitened": (PPO, "--score_norm whiten", ""),
    "recipe llama2": (PPO, f"@llama2 {STEADY}", ""),
    "recipe qwen": (PPO, f"@qwen {STEADY} --critic_lr 2e-4 --critic_warmup 5", ""),
    "recipe deepspeed_chat": (PPO, f"@deepspeed_chat {STEADY} --critic_lr 2e-4", ""),
    "RLOO, K 4": (RLOO, "", ""),
    "RLOO, K 2": (RLOO, "--rloo_k 2", ""),
    "RLOO, K 8": (RLOO, "--rloo_k 8", ""),
    "RLOO of tokens": (RLOO, "--token_level", ""),
}
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 97.5 %


def words(flags: str) -> list[str]:
    """The flags of a choice; @name stands for benchmark/recipes/name.args."""
    found = []
    for word in flags.split():
        recipe = common.ROOT / "benchmark" / "recipes" / f"{word[1:]}.args"
        found += re.sub("#.*", "", recipe.read_text()).split() if word.startswith("@") else [word]
    return found


def run(script: str, out: Path, flags: list[str]) -> int:
    """A script as a user would run it, in one thread, unless `out` is finished: the exit status."""
    if (out / "samples.jsonl").exists():
        return 0
    command = [sys.executable, str(common.ROOT / script), *flags, "--output_dir", str(out), "--resume"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, check=False
    ).returncode


def measure(name: str, seed: int, folder: Path, episodes: int) -> dict[str, Any]:
    """Train one choice with one seed, and judge it."""
    from embedded import fresh_samples  # in the process that measures
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    script, flags, of_reward = CHOICES[name]
    reward = folder / f"reward-{re.sub('[^a-z0-9]', '', of_reward)}-{seed}"
    out = folder / f"{re.sub('[^A-Za-z0-9]+', '-', name)}-{seed}"
    more = ["--seed", str(seed), "--total_episodes", str(episodes), "--checkpoint_every", "0"]
    status = run(script, out, [*words(flags), *more, "--reward_model", str(reward / "reward_model")])
    record = folder / f"{out.name}.json"
    if record.exists():
        return json.loads(record.read_text())
    row: dict[str, Any] = {"choice": name, "seed": seed, "failed": status != 0}
    if status == 0:
        policy = out / ("policy_ema" if (out / "policy_ema").exists() else "policy")
        after, before, kl = fresh_samples(policy, seed)
        judge = SentimentIntensityAnalyzer()
        gold, start = ([judge.polarity_scores(text)["compound"] for text in texts] for texts in (after, before))
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        last = metrics[-max(1, len(metrics) // 10) :]
        row |= {"gold": float(np.mean(gold)), "gold_reference": float(np.mean(start)), "kl": kl}
        row |= {
            "proxy": float(np.mean([x["objective/scores"] for x in last])),
            "distinct": len(set(after)) / len(after),
        }
        row["failed"] = row["gold"] < row["gold_reference"]
    record.write_text(json.dumps(row))
    return row


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and the gold score's difference to the default, within seeds, with its 95 % interval."""
    gold = {(row["choice"], row["seed"]): row.get("gold", math.nan) for row in rows}
    table = []
    for name in dict.fromkeys(row["choice"] for row in rows):
        mine = [row for row in rows if row["choice"] == name]
        base = "RLOO, K 4" if CHOICES[name][0] == RLOO else "default"
        pairs = [gold[name, row["seed"]] - gold.get((base, row["seed"]), math.nan) for row in mine]
        pairs = [x for x in pairs if not math.isnan(x)]
        spread = (
            STUDENT.get(len(pairs) - 1, 1.96) * np.std(pairs, ddof=1) / len(pairs) ** 0.5 if len(pairs) > 1 else None
        )
        means = {x: float(np.mean([row[x] for row in mine if x in row])) for x in ("gold", "proxy", "kl", "distinct")}
        table.append({"choice": name, "seeds": len(mine), "failed": float(np.mean([row["failed"] for row in mine]))})
        table[-1] |= means | {
            "difference": float(np.mean(pairs)),
            "interval": None if spread is None else float(spread),
        }
    return table


def plot(table: list[dict[str, Any]], path: Path) -> None:
    """Differences of the gold score to the default with their intervals, sorted."""
    rows = sorted((row for row in table if row["interval"]), key=lambda row: row["difference"])
    figure = Figure(figsize=(7, 0.25 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        told = abs(row["difference"]) > row["interval"]
        color = "tab:gray" if not told else "tab:green" if row["difference"] > 0 else "tab:red"
        axes.errorbar(row["difference"], i, xerr=row["interval"], fmt="o", color=color, capsize=2, markersize=4)
    axes.set(yticks=range(len(rows)), yticklabels=[row["choice"] for row in rows])
    axes.set_xlabel("gold score (VADER) less the default's, 95 % interval over seeds; grey: cannot be told")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="tiny", help="name of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--episodes", type=int, default=12_800, help="of each policy; the default's own number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each with one thread")
    parser.add_argument("--folder", default="runs/ablations", help="where the runs go; finished ones are used again")
    parser.add_argument("--measure", nargs=2, default=None, help=argparse.SUPPRESS)  # one choice and seed, in a process
    args = parser.parse_args()
    folder = Path(args.folder)
    if args.measure:
        sys.stdout.write(json.dumps(measure(args.measure[0], int(args.measure[1]), folder, args.episodes)) + "\n")
        return

    def work(name: str, seed: int) -> dict[str, Any]:
        mine = ["--folder", args.folder, "--episodes", str(args.episodes), "--measure", name, str(seed)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, __file__, *mine], capture_output=True, text=True, env=env, check=True)
        sys.stdout.write(done.stdout)
        return json.loads(done.stdout)

    with ThreadPoolExecutor(args.jobs) as pool:
        for flags in dict.fromkeys(CHOICES[name][2] for name in args.choices):
            made = [folder / f"reward-{re.sub('[^a-z0-9]', '', flags)}-{seed}" for seed in args.seeds]
            each = [[*flags.split(), "--seed", str(seed)] for seed in args.seeds]
            if any(pool.map(run, ["train_reward.py"] * len(made), made, each)):
                raise SystemExit("train_reward.py failed")
        tasks = [(name, seed) for seed in args.seeds for name in args.choices]
        rows = list(pool.map(lambda task: work(*task), tasks))
    table = summarise(rows)
    path = common.write("ablations", args.tag, args, rows, table=table)
    plot(table, path.with_suffix(".png"))
    common.show(list(table[0]), [[f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in table])


if __name__ == "__main__":
    main()
