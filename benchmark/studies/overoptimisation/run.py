"""Policies against weak and good reward models, without and with a KL penalty, by protocol.md.

    run=benchmark/studies/overoptimisation/run.py
    python $run --labels 128 --seeds 61 --tag set-61        # and 62 to 72
    python $run --labels 4000 --seeds 61 --tag good-61      # and 62, 63
    python $run --labels 512 2048 --seeds 61 --kl_coefs 0.15 --tag sizes-61

Policies of the default task are trained against reward models of several numbers of labels, by PPO
and by RLOO. A reward model makes as many optimizer steps with few labels as with many, which come
in turn until there are 4,000. A coefficient above 0 adapts, as the default's does. In every update
VADER, which labelled the data, reads the very responses that the reward model scores, without
penalties. After a run it reads responses to held-out queries.

Finished runs of the same scripts are used again. Writes <tag>.json.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import datasets
import numpy as np

import ppo_rlhf
import rloo_rlhf
import train_reward
from benchmark import common
from benchmark.judge import Judge
from benchmark.runs import Choice, begin, make_parser, run, slug

SCRIPTS = {"PPO": ppo_rlhf, "RLOO": rloo_rlhf}
BATCH_SIZE = 64
NUM_LABELS = 4_000  # that a reward model reads, one after the other
KL_TARGET = 6.0  # nats, the default's
KINDS = ("true_score", "kl", "reward")


# --- reward models --------------------------------------------------------------------------------
def labels_folder(size: str, seed: int, folder: Path) -> Path:
    """A data set whose training split repeats so many labels; the test split is tiny's."""
    out = folder / slug(f"labels {size} {seed}")
    splits = datasets.load_dataset(str(common.ROOT / "tiny" / "labels"))
    random = np.random.default_rng([seed, int(size)])
    order = random.permutation(len(splits["train"]))
    rows = splits["train"].select(order[: int(size)]).to_list()
    repeated = [rows[i % len(rows)] for i in range(NUM_LABELS)]
    out.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(repeated).to_parquet(out / "train.parquet")
    splits["test"].to_parquet(out / "test.parquet")
    return out


def reward_folder(size: str, seed: int, folder: Path) -> Path:
    """Of the run of a reward model."""
    return folder / slug(f"reward {size} {seed}")


def reward_model(task: tuple[str, int, Path]) -> dict[str, Any]:
    """Trains one, and says how often it names the best of four held-out responses, beside the
    share of the best constant answer."""
    size, seed, _ = task
    out = reward_folder(*task)
    if not (out / "samples.jsonl").exists():
        labels = labels_folder(*task)
        flags = ["--seed", str(seed), "--label_dataset", str(labels)]
        status = run(Choice(train_reward.__file__), out, flags)
        if status:
            raise SystemExit(f"train_reward.py failed: see {out}.log")
    results = json.loads((out / "results.json").read_text())
    return {
        "labels": size,
        "seed": seed,
        "accuracy": results["test/accuracy"],
        "constant": common.best_constant(),
    }


# --- policies -------------------------------------------------------------------------------------
def train(task: tuple[str, str, float, int, int, Path]) -> dict[str, Any]:
    """A run in which VADER reads the responses of every update: KL, reward and true score on its
    way, and of fresh responses to held-out queries after it."""
    algorithm, size, kl_coef, seed, episodes, folder = task
    target = KL_TARGET if kl_coef else None  # a coefficient of 0 stays 0
    out = folder / slug(f"{algorithm} {size} {kl_coef} {seed} {episodes}")
    reward = reward_folder(size, seed, folder) / "reward_model"
    flags = f"--adaptive_kl_target {target} --kl_coef {kl_coef}"
    flags += f" --seed {seed} --total_episodes {episodes}"
    flags += f" --eval_queries 1 --batch_size {BATCH_SIZE} --checkpoint_every 0 --max_kl 1e4"
    choice = Choice(SCRIPTS[algorithm].__file__)
    if run(choice, out, [*flags.split(), "--reward_model", str(reward)]):
        raise SystemExit(f"{algorithm} failed: see {out}.log")
    row = {
        "algorithm": algorithm,
        "labels": size,
        "kl_coef": kl_coef,
        "seed": seed,
    }
    metrics = common.read_lines(out / "metrics.jsonl")
    for kind in KINDS:
        row[kind] = [line[kind] for line in metrics]
    sample, *_ = common.read_lines(out / "samples.jsonl")
    row["samples"] = [{"query": sample["query"], "response": sample["response_after"]}]
    judge = Judge(seed, reward)
    row["held_out"] = means(judge(judge.actor(out / "policy")))
    return row


def means(found: dict[str, np.ndarray]) -> dict[str, float]:
    """Of what a judge finds in responses to held-out queries."""
    return {name: float(np.mean(values)) for name, values in found.items()}


def starting_model(task: tuple[str, int, Path]) -> dict[str, Any]:
    """The starting model's responses to held-out queries, as a judge reads them."""
    size, seed, _ = task
    judge = Judge(seed, reward_folder(*task) / "reward_model")
    return {"labels": size, "seed": seed, "held_out": means(judge(judge.ref))}


# --- results --------------------------------------------------------------------------------------
def main() -> None:
    defaults = {"tag": "mine", "episodes": 5_120, "folder": "runs/overoptimisation"}
    parser = make_parser(__doc__, __file__, **defaults)
    add = parser.add_argument
    add("--labels", nargs="+", default=["128"], help="how many a reward model learns from")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--kl_coefs", type=float, nargs="+", default=[0.0, 0.15], help="of the KL penalty")
    args = parser.parse_args()
    folder = begin(args)
    named = [(size, seed, folder) for seed in args.seeds for size in args.labels]
    tasks = []
    for size, seed, _ in named:
        for coef in args.kl_coefs:
            for name in SCRIPTS:
                tasks.append((name, size, coef, seed, args.episodes, folder))
    runs = []
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        models = pool.map(reward_model, named, 1)
        for row in pool.imap(train, tasks, 1):
            runs.append(row)
            words = f"{row['algorithm']} {row['labels']} {row['kl_coef']}"
            ends = f"KL {row['kl'][-1]:.1f}, true score {row['true_score'][-1]:.2f}"
            sys.stdout.write(f"{words}: {ends}\n")
            sys.stdout.flush()
        starting = pool.map(starting_model, named, 1)
    common.write(args, runs, reward_models=models, starting_models=starting)


if __name__ == "__main__":
    main()
