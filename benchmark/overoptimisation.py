"""Gold and proxy score on the way from the reference, as Gao et al. 2022 (arXiv:2210.10760) plot them.

    python benchmark/overoptimisation.py

Policies of the embedded default are trained against reward models of several numbers of labels, with fixed coefficients
of the KL penalty down to 0, by PPO and by RLOO. In every update VADER, which labelled the data, reads the very
responses that the reward model scores. Best-of-n from the reference is the curve to beat: of n responses the one that
the reward model likes best, with KL log n - (n - 1) / n; means over all choices of n among --pool responses to each of
128 queries. Penalties for responses without an end are not in the scores. Writes results/overoptimisation-<tag>.json
and .png.
"""

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from ablations import output_to, run, slug
from judge import Judge
from matplotlib.figure import Figure
from scipy.special import comb

import ppo_rlhf
import rloo_rlhf
import train_reward

SCRIPTS = {"PPO": ppo_rlhf, "RLOO": rloo_rlhf}
WINDOW = 5  # updates whose means make a point of a curve


def reward_model(task: tuple[int, int, Path]) -> int:
    """Train one on so many labels (0: all that there are)."""
    labels, seed, folder = task
    size = ["--num_labels", str(labels)] if labels else []
    return run(train_reward.__file__, folder / f"reward-{labels}-{seed}", [*size, "--seed", str(seed)])


def train(task: tuple[str, int, float, int, int, Path]) -> dict[str, Any]:
    """A run of a script's main, whose `score` also asks VADER: KL, proxy and gold score of every update."""
    algorithm, labels, kl_coef, seed, episodes, folder = task
    out = folder / slug(f"{algorithm} {labels} {kl_coef} {seed} {episodes}")
    record = out.with_name(f"{out.name}.json")
    if record.exists():
        return json.loads(record.read_text())
    reward, script = folder / f"reward-{labels}-{seed}" / "reward_model", SCRIPTS[algorithm]
    judge, score, seen = Judge(seed, reward, queries=1), script.score, []

    def judged(model: Any, queries: Any, responses: Any, *rest: Any) -> Any:
        scores = score(model, queries, responses, *rest)
        if len(responses) > 1:  # not the evaluation, of one query
            seen.append((scores.sum(1).mean().item(), float(np.mean(judge.gold(responses)))))
        return scores

    script.score = judged
    flags = f"--kl_target none --kl_coef {kl_coef} --seed {seed} --total_episodes {episodes} --eval_queries 1".split()
    flags += ["--batch_size", "64", "--checkpoint_every", "0", "--reward_model", str(reward), "--output_dir", str(out)]
    sys.argv = [script.__file__, *flags]
    with output_to(out.with_name(f"{out.name}.log")):
        script.main(*script.parse_args())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    row: dict[str, Any] = {"algorithm": algorithm, "labels": labels, "kl_coef": kl_coef, "seed": seed}
    row |= {"kl": [x["objective/kl"] for x in metrics], "proxy": [x[0] for x in seen], "gold": [x[1] for x in seen]}
    assert len(row["kl"]) == len(row["gold"])
    record.write_text(json.dumps(row))
    return row


def best_of_n(task: tuple[int, int, int, Path]) -> dict[str, Any]:
    """Proxy and gold score of the best of n = 1, 2, 4, .. of the reference's responses, by the reward model."""
    labels, seed, pool, folder = task
    judge = Judge(seed, folder / f"reward-{labels}-{seed}" / "reward_model", queries=128)
    draws = [judge.responses(judge.ref, 10**6 + i) for i in range(pool)]
    proxy = np.array([judge.proxy(judge.queries, responses) for responses in draws]).T  # (queries, pool)
    gold = np.array([judge.gold(responses) for responses in draws]).T
    order = proxy.argsort(1)
    proxy, gold, rank = np.take_along_axis(proxy, order, 1), np.take_along_axis(gold, order, 1), np.arange(pool)
    row: dict[str, Any] = {"labels": labels, "seed": seed, "n": [2**i for i in range(int(np.log2(pool)))]}
    row["kl"] = [float(np.log(n) - (n - 1) / n) for n in row["n"]]
    shares = [comb(rank, n - 1) / comb(pool, n) for n in row["n"]]  # of the pool's r-th smallest to be the best of n
    row |= {
        kind: [float((x * share).sum(1).mean()) for share in shares] for kind, x in (("proxy", proxy), ("gold", gold))
    }
    return row


def smooth(values: list[float]) -> np.ndarray:
    """Means of WINDOW updates."""
    whole = len(values) // WINDOW * WINDOW
    return np.array(values[:whole]).reshape(-1, WINDOW).mean(1)


def summarise(runs: list[dict[str, Any]], best: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per curve: where the gold score is highest, where it ends, and best-of-n at its highest n."""
    table = []
    for row in runs:
        kl, proxy, gold = (smooth(row[kind]) for kind in ("kl", "proxy", "gold"))
        top = int(gold.argmax())
        names = ("algorithm", "labels", "kl_coef", "seed")
        table.append({name: row[name] for name in names} | {"gold_top": float(gold[top]), "kl_top": float(kl[top])})
        table[-1] |= {"proxy_top": float(proxy[top]), "gold_end": float(gold[-1]), "kl_end": float(kl[-1])}
        table[-1]["proxy_end"] = float(proxy[-1])
    for row in best:
        line = {"algorithm": f"best of {row['n'][-1]}", "labels": row["labels"], "kl_coef": None, "seed": row["seed"]}
        top = int(np.argmax(row["gold"]))
        line |= {f"{kind}_top": row[kind][top] for kind in ("gold", "kl", "proxy")}
        table.append(line | {f"{kind}_end": row[kind][-1] for kind in ("gold", "kl", "proxy")})
    return table


def plot(runs: list[dict[str, Any]], best: list[dict[str, Any]], path: Path) -> None:
    """A column per number of labels; gold score above, proxy below; a line per run, best-of-n black."""
    sizes = sorted({row["labels"] for row in runs}, key=lambda labels: labels or 10**9)
    coefs = sorted({row["kl_coef"] for row in runs})
    colors = dict(zip(coefs, ("tab:red", "tab:orange", "tab:green", "tab:blue", "tab:purple"), strict=False))
    figure = Figure(figsize=(3.4 * len(sizes), 5), layout="constrained")
    panels = figure.subplots(2, len(sizes), sharex=True, sharey="row", squeeze=False)
    for column, labels in enumerate(sizes):
        for axes, kind in zip(panels[:, column], ("gold", "proxy"), strict=True):
            for row in (row for row in runs if row["labels"] == labels):
                style = "-" if row["algorithm"] == "PPO" else "--"
                x = np.sqrt(np.maximum(smooth(row["kl"]), 0))
                label = (
                    f"{row['algorithm']}, coefficient {row['kl_coef']:g}" if row["seed"] == runs[0]["seed"] else None
                )
                axes.plot(x, smooth(row[kind]), style, color=colors[row["kl_coef"]], linewidth=1.2, label=label)
            for row in (row for row in best if row["labels"] == labels):
                label = "best of n" if row["seed"] == runs[0]["seed"] else None
                axes.plot(np.sqrt(row["kl"]), row[kind], "k.-", linewidth=1, markersize=3, label=label)
            axes.grid(alpha=0.3)
        panels[0, column].set_title(f"{labels or 'all'} labels")
        panels[1, column].set_xlabel("square root of the KL to the reference")
    panels[0, 0].set_ylabel("gold score (VADER)")
    panels[1, 0].set_ylabel("proxy (reward model)")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="tiny", help="name of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--labels", type=int, nargs="+", default=[128, 512, 0], help="of a reward model; 0: all")
    parser.add_argument("--kl_coefs", type=float, nargs="+", default=[0.0, 0.05, 0.15], help="fixed ones")
    parser.add_argument("--episodes", type=int, default=5_120, help="of each policy, 64 in an update")
    parser.add_argument("--pool", type=int, default=256, help="responses per query for best-of-n, up to half of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each with one thread")
    parser.add_argument("--folder", default="runs/overoptimisation", help="of the runs; finished ones are used again")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder, runs = Path(args.folder), []
    models = [(labels, seed) for seed in args.seeds for labels in args.labels]
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        if any(pool.map(reward_model, [(*model, folder) for model in models], 1)):
            raise SystemExit(f"train_reward.py failed: see {folder}")
        tasks = [(name, *key, coef) for key in models for coef in args.kl_coefs for name in SCRIPTS]
        tasks = [(name, labels, coef, seed, args.episodes, folder) for name, labels, seed, coef in tasks]
        for row in pool.imap(train, tasks, 1):
            runs.append(row)
            sys.stdout.write(f"{row['algorithm']} {row['labels']} {row['kl_coef']} {row['kl'][-1]:.1f}\n")
            sys.stdout.flush()
        best = pool.map(best_of_n, [(*model, args.pool, folder) for model in models], 1)
    table = summarise(runs, best)
    path = common.write("overoptimisation", args.tag, args, runs, best_of_n=best, table=table)
    plot(runs, best, path.with_suffix(".png"))
    common.show(list(table[0]), [[f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in table])


if __name__ == "__main__":
    main()
