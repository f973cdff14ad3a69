"""True score and reward on the way from the starting model, as Gao et al. 2022 (arXiv:2210.10760)
plot them.

    run=benchmark/studies/overoptimisation/run.py
    python $run
    python $run --labels 4000 --kl_coefs 0 0.05 0.15 0.5 --tag frontier
    python $run --labels 4000 --lr 5e-5 --pool 0 --tag slow
    python $run --labels 128 512 4000:0.5 --kl_coefs 0 0.15 --kl_target 6 --pool 0 --tag penalty

Policies of the default task are trained against reward models of several numbers of labels, by PPO
and by RLOO, without a KL penalty (--kl_coefs: with fixed ones, which --kl_target adapts as the
default does). A reward model makes as many optimizer steps with few labels as with many, which come
in turn until there are 4,000; `4000:0.5` are 4,000 labels of which a half is replaced by a random
choice. In every update VADER, which labelled the data, reads the very responses that the reward
model scores. Best-of-n from the starting model is the curve to beat: of n responses the one that
the reward model likes best, with KL log n - (n - 1) / n; means over all choices of n among --pool
responses to each of 128 queries. Penalties for responses without an end are not in the scores.

Finished runs of the same scripts are used again. Writes <tag>.json.
"""

import json
import math
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
from benchmark.differences import at_levels, interval, smooth
from benchmark.judge import Judge, best_of_n
from benchmark.runs import Choice, begin, make_parser, run, slug

SCRIPTS = {"PPO": ppo_rlhf, "RLOO": rloo_rlhf}
WINDOW = 5  # updates whose means make a point of a curve
FINE_WINDOW = 2  # where runs are compared that go at different speeds
SETTLED = 5  # points of two updates that are a run's end
BATCH_SIZE = 64
NUM_LABELS = 4_000  # that a reward model reads, one after the other
KINDS = ("true_score", "kl", "reward")
LAST = 5  # updates whose mean is the end of a run
NEAR = 3.5  # nats that best-of-n reaches, too
LEVELS = (1, 2, 4, 8, 12)  # nats at which runs with different coefficients are compared
SOURCES = ["128", "512", "1024", "2048", "4000", "4000:0.5"]


# --- reward models --------------------------------------------------------------------------------
def labels_folder(source: str, seed: int, folder: Path) -> Path:
    """A data set whose training split repeats so many labels, of which a share has a random best
    response; the test split is tiny's."""
    size, _, noise = source.partition(":")
    out = folder / slug(f"labels {source} {seed}")
    splits = datasets.load_dataset(str(common.ROOT / "tiny" / "labels"))
    random = np.random.default_rng([seed, int(size)])
    order = random.permutation(len(splits["train"]))
    rows = splits["train"].select(order[: int(size)]).to_list()
    for row in rows:
        if noise and random.random() < float(noise):
            row["best"] = int(random.integers(4))
    repeated = [rows[i % len(rows)] for i in range(NUM_LABELS)]
    out.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(repeated).to_parquet(out / "train.parquet")
    splits["test"].to_parquet(out / "test.parquet")
    return out


def reward_folder(source: str, seed: int, folder: Path) -> Path:
    """Of the run of a reward model."""
    return folder / slug(f"reward {source} {seed}")


def reward_model(task: tuple[str, int, Path]) -> dict[str, Any]:
    """Trains one, and says how often it names the best of four held-out responses, beside the
    share of the best constant answer."""
    source, seed, _ = task
    out = reward_folder(*task)
    if not (out / "samples.jsonl").exists():
        labels = labels_folder(*task)
        flags = ["--seed", str(seed), "--label_dataset", str(labels)]
        status = run(Choice(train_reward.__file__), out, flags)
        if status:
            raise SystemExit(f"train_reward.py failed: see {out}.log")
    results = json.loads((out / "results.json").read_text())
    return {
        "labels": source,
        "seed": seed,
        "accuracy": results["test/accuracy"],
        "constant": common.best_constant(),
    }


# --- curves ---------------------------------------------------------------------------------------
def train(
    task: tuple[str, str, float, float | None, int, int, list[str], Path],
) -> dict[str, Any]:
    """A run in which VADER reads the responses of every update: KL, reward and true score on its
    way, and of fresh responses to held-out queries after it."""
    algorithm, source, kl_coef, kl_target, seed, episodes, rate, folder = task
    penalty = f"{kl_coef} {kl_target}"
    out = folder / slug(f"{algorithm} {source} {penalty} {seed} {episodes} {' '.join(rate)}")
    reward = reward_folder(source, seed, folder) / "reward_model"
    target = kl_target if kl_coef else None  # a coefficient of 0 stays 0
    flags = f"--adaptive_kl_target {target} --kl_coef {kl_coef}"
    flags += f" --seed {seed} --total_episodes {episodes}"
    flags += f" --eval_queries 1 --batch_size {BATCH_SIZE} --checkpoint_every 0 --max_kl 1e4"
    choice = Choice(SCRIPTS[algorithm].__file__)
    if run(choice, out, [*flags.split(), *rate, "--reward_model", str(reward)]):
        raise SystemExit(f"{algorithm} failed: see {out}.log")
    row = {
        "algorithm": algorithm,
        "labels": source,
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
    source, seed, _ = task
    judge = Judge(seed, reward_folder(*task) / "reward_model")
    return {"labels": source, "seed": seed, "held_out": means(judge(judge.ref))}


def best_of_seed(task: tuple[int, list[str], int, Path]) -> list[dict[str, Any]]:
    """Reward and true score of the best of n = 1, 2, 4, .. of the starting model's responses, by
    each of a seed's reward models."""
    seed, sources, pool, folder = task
    judges = {}
    for source in sources:
        reward = reward_folder(source, seed, folder) / "reward_model"
        judges[source] = Judge(seed, reward, num_queries=128)
    return [row | {"seed": seed} for row in best_of_n(judges, pool)]


# --- results --------------------------------------------------------------------------------------
def top_and_end(curves: dict[str, Any]) -> dict[str, float]:
    """True score, KL and reward where the true score is highest, and where the curves end."""
    top = int(np.argmax(curves["true_score"]))
    found = {f"{kind}_top": float(curves[kind][top]) for kind in KINDS}
    return found | {f"{kind}_end": float(curves[kind][-1]) for kind in KINDS}


def curves_of(runs: list[dict], best: list[dict]) -> dict[tuple[str, str, Any], list[dict]]:
    """The curves of each group of runs that differ by their seeds."""
    groups: dict[tuple[str, str, Any], list[dict]] = {}
    for row in runs:
        group = (row["labels"], row["algorithm"], row["kl_coef"])
        curve = {kind: smooth(row[kind], WINDOW) for kind in KINDS}
        curve["fine"] = {kind: smooth(row[kind], FINE_WINDOW) for kind in KINDS}
        curve["seed"] = row["seed"]
        groups.setdefault(group, []).append(curve)
    for row in best:
        group = (row["labels"], "best of n", None)
        groups.setdefault(group, []).append(row)
    return groups


def mean_true_score_at(curves: list[dict], level: float) -> float | None:
    """The mean true score where curves first pass a KL; None if one of them never does."""
    found = float(np.mean([at_levels(curve, level) for curve in curves]))
    return None if math.isnan(found) else found


def settled_gains(curves: list[dict], free: list[dict]) -> list[float]:
    """How far true scores at the end of runs are above those of the run of the same seed without a
    KL penalty, where that first passes the same KL."""
    of_seed = {curve["seed"]: curve["fine"] for curve in free}
    gains = []
    for curve in curves:
        kl = float(curve["fine"]["kl"][-SETTLED:].mean())
        settled = float(curve["fine"]["true_score"][-SETTLED:].mean())
        gains.append(settled - float(at_levels(of_seed[curve["seed"]], kl)))
    return [gain for gain in gains if not math.isnan(gain)]


def summarise(groups: dict[tuple[str, str, Any], list[dict]]) -> list[dict]:
    """Per group: the true score near the starting model, where it is highest, where it ends, what a
    KL penalty gains there, as means over seeds; the lowest and highest at the end."""
    table = []
    for (labels, algorithm, kl_coef), curves in groups.items():
        line = {"labels": labels, "algorithm": algorithm, "kl_coef": kl_coef}
        ends = [top_and_end(curve) for curve in curves]
        for name in ends[0]:
            values = [end[name] for end in ends]
            line[name] = float(np.mean(values))
        line["true_score_near"] = mean_true_score_at(curves, NEAR)
        # The curves of best-of-n have a point for each n, and no finer ones.
        fine_curves = [curve.get("fine", curve) for curve in curves]
        for level in LEVELS:
            line[f"true_score_at_{level}"] = mean_true_score_at(fine_curves, level)
        gains = []
        if kl_coef and (labels, algorithm, 0.0) in groups:
            gains = settled_gains(curves, groups[labels, algorithm, 0.0])
        line["settled_gain"] = float(np.mean(gains)) if gains else None
        line["settled_interval"] = interval(gains)
        true_scores = [end["true_score_end"] for end in ends]
        line["lowest_end"] = min(true_scores)
        line["highest_end"] = max(true_scores)
        table.append(line)
    return table


def main() -> None:
    defaults = {"tag": "tiny", "episodes": 5_120, "folder": "runs/overoptimisation"}
    parser = make_parser(__doc__, __file__, **defaults)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--labels", nargs="+", default=SOURCES, help="of a reward model; `4000:0.5`: half random")
    add("--kl_coefs", type=float, nargs="+", default=[0.0], help="fixed ones")
    add("--kl_target", type=float, help="adapt those above 0 to this KL, like the default")
    add("--pool", type=int, default=256, help="responses per query for best-of-n (0: none)")
    add("--lr", help="of the policies (their default: 2e-4)")
    args = parser.parse_args()
    folder = begin(args)
    rate = [] if args.lr is None else ["--lr", args.lr]
    tasks = []
    named = []
    for seed in args.seeds:
        for source in args.labels:
            named.append((source, seed, folder))
            for coef in args.kl_coefs:
                for name in SCRIPTS:
                    penalty = (coef, args.kl_target)
                    task = (name, source, *penalty, seed, args.episodes, rate, folder)
                    tasks.append(task)
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
        asked = []
        if args.pool:
            asked = [(seed, args.labels, args.pool, folder) for seed in args.seeds]
        best = [row for rows in pool.imap(best_of_seed, asked, 1) for row in rows]
    accuracies = {(model["labels"], model["seed"]): model["accuracy"] for model in models}
    for row in runs:
        row["accuracy"] = accuracies[row["labels"], row["seed"]]
        row["start"] = {kind: float(np.mean(row[kind][:LAST])) for kind in KINDS}
        row["end"] = {kind: float(np.mean(row[kind][-LAST:])) for kind in KINDS}
    start = float(np.mean([row["true_score"][0] for row in best or runs]))  # before training
    table = summarise(curves_of(runs, best))
    for line in table:
        of_labels = [model["accuracy"] for model in models if model["labels"] == line["labels"]]
        line["accuracy"] = float(np.mean(of_labels))
    more = {
        "best_of_n": best,
        "reward_models": models,
        "starting_models": starting,
        "true_score_before": start,
        "table": table,
    }
    common.write(args, runs, **more)
    common.show_rows(table)


if __name__ == "__main__":
    main()
