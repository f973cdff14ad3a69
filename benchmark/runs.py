"""Runs of the default task in which one choice is made the other way, and VADER reads the responses
of every update. Several studies make them.

A seed has its own reward model, and its policies start from the same queries and random numbers, so
differences are taken within seeds. True score (VADER), reward (of the default's reward model), KL
and distinct samples are those of fresh samples for 512 held-out queries at the end. A run is a
curve of true score over KL, whose points are means of two updates (longer means would put a run
that moves fast below its own curve). Runs of the same scripts and flags are used again.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ppo_rlhf
import rloo_rlhf
import train_reward
from benchmark import common
from benchmark.judge import Judge
from benchmark.systems.make import patched

PPO = ppo_rlhf.__file__
RLOO = rloo_rlhf.__file__
# The script would stop there.
UNCHECKED = ("        check_update(update, metrics, args)\n", "")
DROPOUT = (
    UNCHECKED,
    (
        "    before = evaluate(",
        "    policy.train()\n    before = evaluate(",
    ),
)
# VADER reads the responses of every update, in metrics.jsonl.
JUDGED = (
    ("from plumbing.data import", "from benchmark.tools import vader\nfrom plumbing.data import"),
    (
        "            batch.scores = score_responses(score_fn, my_queries, batch, args)  # (B,)\n",
        "            batch.scores = score_responses(score_fn, my_queries, batch, args)  # (B,)\n"
        "            raw_scores = score_fn(my_queries, truncated(batch))\n"
        "            texts = tokenizer.batch_decode(truncated(batch))\n"
        "            read = torch.tensor(vader.sentiment([], texts), device=raw_scores.device)\n",
    ),
    (
        '                "objective/scores": batch.scores,\n',
        '                "objective/scores": batch.scores,\n'
        '                "true_score": read,\n'
        '                "kl": (batch.logprobs - batch.ref_logprobs).sum(1),\n'  # of all tokens
        '                "reward": raw_scores,\n',
    ),
)
LEVELS = (2.0, 4.0, 6.0)  # nats at which true scores are compared
INTERRUPTED = 130  # a script's exit status: by Ctrl-C or SIGTERM
CURVES = {"true_score": "true_score", "reward": "reward", "kl": "kl"}  # and their metrics
EXPLAINED = {"var_explained": "val/var_explained"}
BINS = 16  # points of a curve in the picture
FINE_WINDOW = 2  # updates whose means make a point of the curves that are compared
SHIFTED = (("mask, shift_mean=False)", "mask, shift_mean=True)"),)
CRITIC = "--critic reward --critic_warmup 5"
FIXED = "--adaptive_kl_target none --mask_truncated"


class Choice(NamedTuple):
    """A script, flags, a system whose patch it gets, flags of the reward model, texts of the script
    to change, processes."""

    script: str
    flags: str = ""
    system: str = ""
    reward: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    processes: int = 1


CHOICES = {
    "default": Choice(PPO),
    "PyTorch's Adam": Choice(PPO, "--adam torch"),
    "rewards not whitened": Choice(PPO, "--no-whiten_rewards"),
    "rewards' mean shifted to 0": Choice(PPO, changes=SHIFTED),
    "advantages not whitened": Choice(PPO, "--no-whiten_advantages"),
    "whitening per process, of 4": Choice(PPO, processes=4),
    "no value clipping": Choice(PPO, "--cliprange_value 1e9"),
    "no ratio clipping": Choice(PPO, "--cliprange 1e9"),
    "warmed up": Choice(PPO, "--critic_warmup 5"),
    "critic from the policy": Choice(PPO, "--critic policy"),
    "critic from the policy, warmed up": Choice(PPO, "--critic policy --critic_warmup 5"),
    "critic from the reward model": Choice(PPO, "--critic reward"),
    "critic from the reward model, warmed up": Choice(PPO, CRITIC),
    "reward model not normalised": Choice(PPO, reward="--normalization_samples 0"),
    "fixed KL coefficient": Choice(PPO, "--adaptive_kl_target none"),
    "k3 as the KL penalty": Choice(PPO, "--kl_estimator k3", "trl_1.12"),
    "abs(k1) as the KL penalty": Choice(PPO, "--kl_estimator abs", "trl_0.9"),
    "KL over the vocabulary as the penalty": Choice(PPO, "--kl_estimator full", "trl_0.9"),
    "temperature 1 (default: 0.7)": Choice(PPO, "--temperature 1"),
    "penalty for a missing end added": Choice(PPO, "--penalty_mode add"),
    "no penalty for a missing end": Choice(PPO, "--penalty_mode add --penalty_reward_value 0"),
    "whitening over the batch": Choice(PPO, "--whiten batch", "trl_0.9"),
    "critic's rate 2e-3": Choice(PPO, "--critic_lr 2e-3"),
    "critic's rate 1e-2": Choice(PPO, "--critic_lr 1e-2"),
    "critic's rate 1e-2, no value clipping": Choice(PPO, "--critic_lr 1e-2 --cliprange_value 1e9"),
    "value loss times 1": Choice(PPO, "--vf_coef 1"),
    "no value function": Choice(PPO, "--vf_coef 0 --lam 1"),
    "truncated tokens masked": Choice(PPO, "--mask_truncated"),
    "8 minibatches (default: 1)": Choice(PPO, "--num_minibatches 8"),
    "1 epoch (default: 4)": Choice(PPO, "--num_epochs 1"),
    "lambda 1 (default: 0.95)": Choice(PPO, "--lam 1"),
    "gamma 0.95": Choice(PPO, "--gamma 0.95"),
    "constant learning rate": Choice(PPO, "--lr_schedule constant"),
    "average of the weights (EMA, 0.8)": Choice(PPO, "--ema 0.8", "instructgpt"),
    "PPO-ptx": Choice(PPO, "--ptx_coef 1 --ptx_dataset tiny/queries", "instructgpt"),
    "scores clipped to 1": Choice(PPO, "--score_clip 1", "deepspeed_chat"),
    "dropout left on": Choice(PPO, changes=DROPOUT),
    "RLOO, K 4": Choice(RLOO),
    "RLOO, K 2": Choice(RLOO, "--rloo_k 2"),
    "RLOO, K 8": Choice(RLOO, "--rloo_k 8"),
    "RLOO of tokens": Choice(RLOO, system="dr_grpo"),
    "RLOO, normalised": Choice(RLOO, "--normalize_advantages", "trl_rloo"),
    "GRPO": Choice(RLOO, system="grpo"),
    # of the study which_method: with the default's settings, then with their own
    "GRPO, unbiased KL": Choice(RLOO, "--unbiased_kl", "grpo"),
    "REINFORCE++": Choice(RLOO, system="reinforce_pp"),
    "DAPO": Choice(RLOO, system="dapo"),
    "GSPO": Choice(RLOO, system="gspo"),
    "VAPO": Choice(PPO, CRITIC, "vapo"),
    "GRPO, published": Choice(RLOO, f"--kl_coef 0.04 {FIXED}", "grpo"),
    "Dr. GRPO, published": Choice(RLOO, f"--kl_coef 0 {FIXED}", "dr_grpo"),
    "REINFORCE++, published": Choice(RLOO, "--mask_truncated", "reinforce_pp"),
    "DAPO, published": Choice(RLOO, f"--kl_coef 0 {FIXED}", "dapo"),
    "GSPO, published": Choice(
        RLOO, f"--kl_coef 0 {FIXED} --num_minibatches 4 --num_epochs 1", "gspo"
    ),
    "VAPO, published": Choice(PPO, f"{CRITIC} --no-whiten_rewards --mask_truncated", "vapo"),
}
NAMES = {"default": "PPO", "RLOO, K 4": "RLOO"}  # what others are compared with


# --- programs -------------------------------------------------------------------------------------
def make_parser(text: str, program: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with what all programs ask for that make several runs at a time."""
    parser = common.make_parser(text, program)
    add = parser.add_argument
    add("--tag", help="name of the record")
    add("--episodes", type=int, help="of each policy (the scripts' default: 12,800)")
    add("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each with one thread")
    add("--folder", default="runs/ablations", help="where the runs go")
    parser.set_defaults(**defaults)
    return parser


def begin(args: argparse.Namespace) -> Path:
    """The folder of runs of these scripts. From here on this process has one thread, and is in the
    project's folder."""
    os.chdir(common.ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    return Path(args.folder) / common.commit()


# --- runs -----------------------------------------------------------------------------------------
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


def changed_copy(choice: Choice, path: Path) -> str:
    """The script, or a copy at `path` that VADER reads too and that has the choice's changes."""
    if choice.script == train_reward.__file__:
        return choice.script
    text = Path(choice.script).read_text()
    if choice.system:
        text = patched(choice.system, path, script=Path(choice.script).name).read_text()
    for old, new in (*JUDGED, *choice.changes):
        if text.count(old) != 1:
            raise ValueError(f"{choice.script}: {old!r} stands there {text.count(old)} times")
        text = text.replace(old, new)
    path.write_text(text)
    common.copy_shared(path.parent)
    return str(path)


def run(choice: Choice, out: Path, flags: list[str]) -> int:
    """Its exit status: a script as a user would run it, or the rest of it; not if it is finished"""
    if (out / "samples.jsonl").exists():
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    script = changed_copy(choice, out.with_name(f"{out.name}.py"))
    command = [script, *flags, "--output_dir", str(out), "--resume"]
    with output_to(out.with_name(f"{out.name}.log")):
        if choice.processes > 1:
            launch = ["-m", "accelerate.commands.launch", "--multi_gpu"]
            launch += ["--num_processes", str(choice.processes)]
            env = os.environ | {"PYTHONPATH": str(common.ROOT)}
            launched = subprocess.run([sys.executable, *launch, *command], check=False, env=env)
            return launched.returncode
        sys.argv = command
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            return int(error.code or 0)
    return 0


def reward_folder(flags: str, seed: int, folder: Path) -> Path:
    """Of the run of a reward model."""
    return folder / slug(f"reward {flags} {seed}")


def reward_model(task: tuple[str, int, Path]) -> int:
    """Trains one; in a process of its own, forked from one that has the imports."""
    flags, seed, folder = task
    choice = Choice(train_reward.__file__)
    return run(choice, reward_folder(*task), [*flags.split(), "--seed", str(seed)])


def flags_of(choice: Choice, seed: int, folder: Path, sizes: list[str]) -> list[str]:
    """All flags of a run; what comes later counts."""
    flags = [*sizes, *choice.flags.split(), "--seed", str(seed), "--checkpoint_every", "0"]
    reward = reward_folder(choice.reward, seed, folder) / "reward_model"
    return [*flags, "--reward_model", str(reward)]


def digest_of(choice: Choice, flags: list[str]) -> str:
    """What tells runs with these flags from others."""
    named = choice._replace(script=Path(choice.script).name)
    words = [Path(word).name if word.endswith("reward_model") else word for word in flags]
    return hashlib.sha256(repr((named, words)).encode()).hexdigest()[:6]


def curve(
    metrics: list[dict[str, Any]], num_points: int, kinds: dict[str, str] = CURVES
) -> dict[str, list[float]]:
    """True score, reward and KL, or other metrics, of a run on its way, in so many points."""
    points = {}
    for kind, metric in kinds.items():
        if metric in metrics[0]:  # RLOO has no values
            values = np.array([row[metric] for row in metrics])
            parts = np.array_split(values, min(num_points, len(values)))
            points[kind] = [float(part.mean()) for part in parts]
    return points


def run_folder(name: str, seed: int, folder: Path, sizes: list[str]) -> Path:
    """Where a choice's run with a seed is."""
    choice = CHOICES[name]
    digest = digest_of(choice, flags_of(choice, seed, folder, sizes))
    return folder / slug(f"{name} {seed} {digest}")


def measure(task: tuple[str, int, Path, list[str]]) -> dict[str, Any]:
    """Trains one choice with one seed, and judges it."""
    name, seed, folder, sizes = task
    choice = CHOICES[name]
    flags = flags_of(choice, seed, folder, sizes)
    out = run_folder(*task)
    record = out.with_name(f"{out.name}.json")
    if record.exists():
        return with_curves(json.loads(record.read_text()), out)
    status = run(choice, out, flags)
    if status == INTERRUPTED:
        raise RuntimeError(f"{out} was interrupted")
    row = {"choice": name, "seed": seed, "failed": status != 0, "flags": " ".join(flags)}
    row["commit"] = common.commit()
    if status == 0:
        judge = Judge(seed, reward_folder("", seed, folder) / "reward_model")
        average = out / "ema" / "policy"
        found = judge(judge.actor(average if average.exists() else out / "policy"))
        for kind in ("true_score", "reward", "kl", "distinct"):
            row[kind] = float(np.mean(found[kind]))
        if name in NAMES:  # the same for all of a seed
            row["true_score_before"] = float(np.mean(judge(judge.ref)["true_score"]))
    record.write_text(json.dumps(row))
    return with_curves(row, out)


def with_curves(row: dict[str, Any], out: Path) -> dict[str, Any]:
    """The row of a run, with its curves unless it has failed."""
    if row["failed"]:
        return row
    metrics = common.read_lines(out / "metrics.jsonl")
    fine = curve(metrics, math.ceil(len(metrics) / FINE_WINDOW))
    return row | {"curve": curve(metrics, BINS, EXPLAINED), "fine_curve": fine}


def run_all(tasks: list[tuple[str, int, Path, list[str]]], jobs: int) -> Iterator[dict[str, Any]]:
    """Rows of the tasks, so many at a time, after the reward models that they need."""
    rewards = []
    for name, seed, folder, _ in tasks:
        rewards += [("", seed, folder), (CHOICES[name].reward, seed, folder)]
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        if any(pool.map(reward_model, list(dict.fromkeys(rewards)), 1)):
            raise SystemExit(f"train_reward.py failed: see {tasks[0][2]}")
        yield from pool.imap(measure, tasks)
