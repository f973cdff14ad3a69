"""Whether several reward models prevent the gamble, by the protocol in README.md.

    python benchmark/studies/overoptimisation/ensembles.py        # two and a half hours on one core

A set of labels has four reward models, which start from the same head and read the labels in
different orders. Policies are trained, without a KL penalty, against the first of them, the mean or
the minimum of all four (benchmark/systems/rm_ensemble.patch), or one model of their averaged
weights. As in run.py VADER reads the responses of every update. Finished runs of the same scripts
are used again. Writes ensembles.json.
"""

import itertools
import math
import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification as AutoClassifier

import train_reward
from benchmark import common, ours
from benchmark.judge import Judge
from benchmark.runs import BINS, Choice, begin, curve, make_parser, run, slug
from benchmark.studies.overoptimisation.run import KINDS, LAST, SCRIPTS, labels_folder

SETS = (("128", 1), ("128", 3), ("4000:0.5", 2))  # labels and seeds, of models near chance
MEMBERS = 4
REWARDS = ("one", "mean", "minimum", "averaged weights")
FLAGS = "--kl_coef 0 --adaptive_kl_target none --max_kl 1e4 --batch_size 64 --eval_queries 1"
FLAGS += " --checkpoint_every 0"


# --- reward models --------------------------------------------------------------------------------
def start_folder(seed: int, folder: Path) -> Path:
    """The starting model with a reward head, which is normal, as the original's."""
    out = folder / f"start-{seed}"
    torch.manual_seed(seed)
    model = AutoClassifier.from_pretrained(common.ROOT / "tiny" / "model", num_labels=1)
    width = model.score.in_features
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(width + 1))
    model.save_pretrained(out)
    common.tokenizer().save_pretrained(out)
    return out


def member_folder(source: str, seed: int, number: int, folder: Path) -> Path:
    """Of the run of one of the reward models of a set of labels."""
    return folder / slug(f"reward {source} {seed} {number}")


def average_folder(source: str, seed: int, folder: Path) -> Path:
    """Of the model of averaged weights."""
    return folder / slug(f"averaged {source} {seed}")


def train_members(task: tuple[str, int, Path]) -> None:
    """All reward models of a set of labels."""
    source, seed, folder = task
    labels = labels_folder(*task)
    start = start_folder(seed, folder)
    for number in range(MEMBERS):
        out = member_folder(source, seed, number, folder)
        flags = ["--label_dataset", str(labels), "--base_model", str(start)]
        flags += ["--seed", str(10 * seed + number)]
        if run(Choice(train_reward.__file__), out, flags):
            raise SystemExit(f"train_reward.py failed: see {out}.log")
    average_members(source, seed, folder)


@torch.no_grad()
def average_members(source: str, seed: int, folder: Path) -> None:
    """Writes the model of averaged weights (WARM: Rame et al. 2024, arXiv:2401.12187), whose
    rewards have mean 0 and deviation 1 on responses of the starting model, and its rewards of the
    held-out labels."""
    out = average_folder(source, seed, folder)
    reward_model = out / "reward_model"
    runs = [member_folder(source, seed, number, folder) for number in range(MEMBERS)]
    models = [AutoClassifier.from_pretrained(member / "reward_model") for member in runs]
    model = models[0]
    for weights in zip(*[one.parameters() for one in models], strict=True):
        weights[0].copy_(torch.stack(weights).mean(0))
    model.config.reward_gain = 1.0
    model.config.reward_bias = 0.0
    tokenizer = common.tokenizer()
    tokenizer.save_pretrained(reward_model)
    model.save_pretrained(reward_model)
    judge = Judge(seed, reward_model)
    rewards = np.array(judge.rewards(judge.responses(judge.ref, 10**6 + 1)))
    model.config.reward_gain = 1 / float(rewards.std())
    model.config.reward_bias = -float(rewards.mean() / rewards.std())
    model.save_pretrained(reward_model)
    args = train_reward.Args()
    _, held_out = train_reward.load_labels(args, tokenizer)
    classifier = ours.load(AutoClassifier, str(reward_model), args)
    reward = train_reward.RewardModel(classifier, args)
    samples = train_reward.evaluate_labels(reward, held_out, tokenizer)
    samples.to_json(out / "samples.jsonl", orient="records", lines=True)


def quality(source: str, seed: int, folder: Path) -> dict[str, Any]:
    """How often each kind of reward names the best of four held-out responses; and how alike the
    members' rewards are, as the mean correlation of two of them."""
    rewards = []
    for number in range(MEMBERS):
        member = member_folder(source, seed, number, folder)
        rows = common.read_lines(member / "samples.jsonl")
        rewards.append([row["rewards"] for row in rows])
    rewards = np.array(rewards)  # (members, labels, 4)
    averaged = common.read_lines(average_folder(source, seed, folder) / "samples.jsonl")
    best = np.array([row["best"] for row in averaged])
    of_kind = {
        "one": rewards[0],
        "mean": rewards.mean(0),
        "minimum": rewards.min(0),
        "averaged weights": np.array([row["rewards"] for row in averaged]),
    }
    accuracy = {}
    for name, values in of_kind.items():
        is_hit = values.argmax(1) == best
        accuracy[name] = float(is_hit.mean())
    alike = np.corrcoef(rewards.reshape(MEMBERS, -1))
    pairs = np.triu_indices(MEMBERS, 1)
    return {
        "labels": source,
        "seed": seed,
        "accuracy": accuracy,
        "members": (rewards.argmax(2) == best).mean(1).tolist(),
        "correlation": float(alike[pairs].mean()),
        "constant": common.best_constant(),
    }


# --- policies -------------------------------------------------------------------------------------
def train(task: tuple[int, str, tuple[str, int], str, int, Path]) -> dict[str, Any]:
    """A run against one kind of reward: KL, reward and true score on its way and at its end."""
    policy_seed, kind, (source, seed), algorithm, episodes, folder = task
    out = folder / slug(f"{algorithm} {kind} {source} {seed} {policy_seed} {episodes}")
    members = [member_folder(source, seed, number, folder) for number in range(MEMBERS)]
    first, *more = [str(member / "reward_model") for member in members]
    flags = f"{FLAGS} --seed {policy_seed} --total_episodes {episodes}".split()
    if kind == "averaged weights":
        first = str(average_folder(source, seed, folder) / "reward_model")
    flags += ["--reward_model", first]
    if kind in ("mean", "minimum"):
        flags += ["--ensemble", kind, "--more_reward_models", *more]
    choice = Choice(SCRIPTS[algorithm].__file__, system="rm_ensemble")
    if run(choice, out, flags):
        raise SystemExit(f"{algorithm} failed: see {out}.log")
    metrics = common.read_lines(out / "metrics.jsonl")
    points = curve(metrics, BINS)
    row = {
        "rewards": kind,
        "algorithm": algorithm,
        "labels": source,
        "labels_seed": seed,
        "seed": policy_seed,
        "end": {},
    }
    for name in KINDS:
        row[name] = points[name]
        at_end = [line[name] for line in metrics[-LAST:]]
        row["end"][name] = float(np.mean(at_end))
    return row


def main() -> None:
    defaults = {"tag": "ensembles", "episodes": 5_120, "folder": "runs/ensembles"}
    parser = make_parser(__doc__, __file__, **defaults)
    words = "of each run, with other seeds of the policy"
    parser.add_argument("--repeats", type=int, default=2, help=words)
    args = parser.parse_args()
    folder = begin(args).absolute()
    named = [(source, seed, folder) for source, seed in SETS]
    tasks = []
    repeats = range(args.repeats)
    for repeat, kind, labels, name in itertools.product(repeats, REWARDS, SETS, SCRIPTS):
        _, seed = labels
        tasks.append((seed + 100 * repeat, kind, labels, name, args.episodes, folder))
    del args.folder  # a path of this machine
    rows = []
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        pool.map(train_members, named, 1)
        found = [quality(*labels) for labels in named]
        for row in pool.imap(train, tasks, 1):
            rows.append(row)
            common.write(args, rows, reward_models=found)


if __name__ == "__main__":
    main()
