"""What each choice is worth on the embedded default, whose true reward is known: VADER labelled its data.

    python benchmark/ablations.py                          # all choices, five seeds; finished runs are used again
    python benchmark/ablations.py --choices default "torch's Adam" --seeds 1 2

One choice at a time is made the other way. A seed has its own reward model, and its policies start from the same
queries and random numbers: differences to the default are taken within seeds, and their 95 % intervals are Student's t
over the seeds. Gold score (VADER), proxy (the default's reward model), KL and distinct samples are those of fresh
samples for 512 held-out queries. A run has failed if it stopped, or if its gold score ends below the reference's.
RLOO's rows compare with K 4, and that with PPO's default. Writes results/ablations-<tag>.json and .png.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from judge import Judge
from matplotlib.figure import Figure
from scipy import stats

import ppo_rlhf
import rloo_rlhf
import train_reward

PPO, RLOO = ppo_rlhf.__file__, rloo_rlhf.__file__
STEADY = "--lr 2e-4 --kl_coef 0.15 --temperature 0.7"  # a recipe's own are for models of billions
DROPOUT = (("    before = evaluate(", "    policy.train()\n    before = evaluate("), ("abs(kl) * (update == 0)", "0"))
SHIFTED = (("shift_mean=False, total", "total"),)


class Choice(NamedTuple):
    """Flags, a recipe whose flags come first, flags of the reward model, lines of the script to change, processes."""

    script: str
    flags: str = ""
    recipe: str = ""
    reward: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    processes: int = 1


CHOICES = {
    "default": Choice(PPO),
    "torch's Adam": Choice(PPO, "--adam torch"),
    "rewards not whitened": Choice(PPO, "--no-whiten_rewards"),
    "rewards' mean shifted to 0": Choice(PPO, changes=SHIFTED),
    "advantages not whitened": Choice(PPO, "--no-whiten_advantages"),
    "whitening by rank, of 4": Choice(PPO, processes=4),
    "no value clipping": Choice(PPO, "--cliprange_value 1e9"),
    "no ratio clipping": Choice(PPO, "--cliprange 1e9"),
    "critic from the policy": Choice(PPO, "--critic policy"),
    "critic from the reward model": Choice(PPO, "--critic reward"),
    "critic from the reward model, warmed up": Choice(PPO, "--critic reward --critic_warmup 5"),
    "reward model not normalised": Choice(PPO, reward="--normalization_samples 0"),
    "fixed KL coefficient": Choice(PPO, "--kl_target none"),
    "KL by k3": Choice(PPO, "--kl_estimator k3"),
    "KL by abs": Choice(PPO, "--kl_estimator abs"),
    "KL over the vocabulary": Choice(PPO, "--kl_estimator full"),
    "temperature 1": Choice(PPO, "--temperature 1"),
    "penalty added": Choice(PPO, "--penalty_mode add"),
    "no penalty": Choice(PPO, "--penalty_mode add --penalty_reward_value 0"),
    "truncated tokens masked": Choice(PPO, "--mask_truncated"),
    "8 minibatches": Choice(PPO, "--num_minibatches 8"),
    "1 epoch": Choice(PPO, "--num_epochs 1"),
    "lambda 1": Choice(PPO, "--lam 1"),
    "gamma 0.95": Choice(PPO, "--gamma 0.95"),
    "constant learning rate": Choice(PPO, "--lr_schedule constant"),
    "EMA 0.8": Choice(PPO, "--ema 0.8"),
    "PPO-ptx": Choice(PPO, "--ptx_coef 1 --ptx_dataset tiny/queries"),
    "scores clipped to 1": Choice(PPO, "--score_clip 1"),
    "dropout left on": Choice(PPO, changes=DROPOUT),
    "recipe instructgpt": Choice(PPO, f"{STEADY} --critic_lr 2e-4 --ema 0.8 --ptx_dataset tiny/queries", "instructgpt"),
    "recipe llama2": Choice(PPO, STEADY, "llama2"),
    "recipe qwen": Choice(PPO, f"{STEADY} --critic_lr 2e-4 --critic_warmup 5", "qwen"),
    "recipe deepspeed_chat": Choice(PPO, f"{STEADY} --critic_lr 2e-4", "deepspeed_chat"),
    "recipe trl_0.9": Choice(PPO, STEADY, "trl_0.9"),
    "RLOO, K 4": Choice(RLOO),
    "RLOO, K 2": Choice(RLOO, "--rloo_k 2"),
    "RLOO, K 8": Choice(RLOO, "--rloo_k 8"),
    "RLOO of tokens": Choice(RLOO, "--token_level"),
}


def slug(text: str) -> str:
    """As a name of a folder."""
    return re.sub("[^A-Za-z0-9.]+", "-", text).strip("-")


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """All that is printed goes to a file."""
    with path.open("a") as file:
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


def run(script: str, out: Path, flags: list[str], choice: Choice | None = None) -> int:
    """A script as a user would run it, or a copy with other lines, unless `out` is finished: its exit status."""
    if (out / "samples.jsonl").exists() or (out / "results.json").exists():
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    for old, new in choice.changes if choice else ():
        text = Path(script).read_text()
        script = str(out.parent / f"{out.name}.py")
        if text.count(old) != 1:
            raise ValueError(f"{script}: {old!r} stands there {text.count(old)} times")
        Path(script).write_text(text.replace(old, new))
    command = [script, *flags, "--output_dir", str(out), "--resume"]
    with output_to(out.parent / f"{out.name}.log"):
        if choice and choice.processes > 1:
            launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(choice.processes)]
            return subprocess.run([sys.executable, *launch, *command], check=False).returncode
        sys.argv = command
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            return int(error.code or 0)
    return 0


def reward_model(task: tuple[str, int, Path]) -> int:
    """Train one; in a process of its own, forked from one that has the imports."""
    flags, seed, folder = task
    return run(train_reward.__file__, folder / slug(f"reward {flags} {seed}"), [*flags.split(), "--seed", str(seed)])


def measure(task: tuple[str, int, Path, list[str]]) -> dict[str, Any]:
    """Train one choice with one seed, and judge it."""
    name, seed, folder, common_flags = task
    choice, out = CHOICES[name], folder / slug(f"{name} {seed}")
    record = folder / f"{out.name}.json"
    if record.exists():
        return json.loads(record.read_text())
    recipe = common.ROOT / "benchmark" / "recipes" / f"{choice.recipe}.args"
    flags = re.sub("#.*", "", recipe.read_text()).split() if choice.recipe else []
    flags += [*common_flags, *choice.flags.split(), "--seed", str(seed), "--checkpoint_every", "0"]
    reward, default = (folder / slug(f"reward {x} {seed}") / "reward_model" for x in (choice.reward, ""))
    status = run(choice.script, out, [*flags, "--reward_model", str(reward)], choice)
    row: dict[str, Any] = {"choice": name, "seed": seed, "failed": status != 0}
    if status == 0:
        judge, kinds = Judge(seed, default), ("gold", "proxy", "kl")
        found = judge(judge.actor(out / ("policy_ema" if (out / "policy_ema").exists() else "policy")))
        row |= {kind: float(np.mean(found[kind])) for kind in kinds} | {"distinct": found["distinct"]}
        if name in ("default", "RLOO, K 4"):  # the same for all of a seed
            row["gold_reference"] = float(np.mean(judge(judge.ref)["gold"]))
    record.write_text(json.dumps(row))
    return row


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and differences of gold score and KL to the default, within seeds, with 95 % intervals."""
    at = {(row["choice"], row["seed"]): row for row in rows}
    start = {row["seed"]: row["gold_reference"] for row in rows if "gold_reference" in row}
    table = []
    for name in dict.fromkeys(row["choice"] for row in rows):
        mine = [row for row in rows if row["choice"] == name]
        base = "RLOO, K 4" if CHOICES[name].script == RLOO and name != "RLOO, K 4" else "default"
        failed = [row["failed"] or row["gold"] < start.get(row["seed"], -1) for row in mine]
        line = {"choice": name, "seeds": len(mine), "failed": float(np.mean(failed))}
        for kind in ("gold", "proxy", "kl", "distinct"):
            line[kind] = float(np.mean([row[kind] for row in mine if kind in row] or [np.nan]))
        for kind in ("gold", "kl"):
            pairs = [(row, at.get((base, row["seed"]), {})) for row in mine]
            pairs = [a[kind] - b[kind] for a, b in pairs if kind in a and kind in b]
            line[f"{kind}_difference"] = float(np.mean(pairs)) if pairs else None
            spread = np.std(pairs, ddof=1) / len(pairs) ** 0.5 if len(pairs) > 1 and name != base else None
            line[f"{kind}_interval"] = None if spread is None else float(stats.t.ppf(0.975, len(pairs) - 1) * spread)
        table.append(line)
    return table


def plot(table: list[dict[str, Any]], path: Path) -> None:
    """Differences of gold score and KL to the default with their intervals, sorted by the first."""
    rows = sorted((row for row in table if row["gold_interval"] is not None), key=lambda row: row["gold_difference"])
    figure = Figure(figsize=(9, 0.21 * len(rows) + 1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for panel, kind, title in zip(axes, ("gold", "kl"), ("gold score (VADER)", "KL, nats"), strict=True):
        for i, row in enumerate(rows):
            x, spread = row[f"{kind}_difference"], row[f"{kind}_interval"]
            color = "tab:gray" if abs(x) <= spread else "tab:green" if x > 0 else "tab:red"
            panel.errorbar(x, i, xerr=spread, fmt="o", color=color, capsize=2, markersize=4)
        panel.set_xlabel(f"{title}, less the default's")
        panel.axvline(0, color="black", linewidth=0.8)
        panel.grid(alpha=0.3)
    axes[0].set(yticks=range(len(rows)), yticklabels=[row["choice"] for row in rows], ylim=(-1, len(rows)))
    figure.suptitle("means and 95 % intervals over seeds; grey: cannot be told from 0", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="tiny", help="name of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES, metavar="CHOICE")
    parser.add_argument("--episodes", type=int, default=2_560, help="of each policy (the default's own: 12,800)")
    parser.add_argument("--batch_size", type=int, default=64, help="of them in an update (the default's own: 128)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each with one thread")
    parser.add_argument("--folder", default="runs/ablations", help="where the runs go; finished ones are used again")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder, rows = Path(args.folder) / f"{args.episodes}-{args.batch_size}", []
    rewards = dict.fromkeys(CHOICES[name].reward for name in ["default", *args.choices])
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        if any(pool.map(reward_model, [(flags, seed, folder) for seed in args.seeds for flags in rewards], 1)):
            raise SystemExit(f"train_reward.py failed: see {folder}")
        flags = ["--total_episodes", str(args.episodes), "--batch_size", str(args.batch_size)]
        tasks = [(name, seed, folder, flags) for seed in args.seeds for name in args.choices]
        for row in pool.imap(measure, tasks):
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    table = summarise(rows)
    rewards = [{"seed": x} | json.loads((folder / f"reward-{x}" / "results.json").read_text()) for x in args.seeds]
    path = common.write("ablations", args.tag, args, rows, table=table, rewards=rewards)
    plot(table, path.with_suffix(".png"))
    common.show(list(table[0]), [[f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in table])


if __name__ == "__main__":
    main()
