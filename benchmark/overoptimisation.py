"""Gold and proxy score on the way from the reference, as Gao et al. 2022 (arXiv:2210.10760) plot
them.

    python benchmark/overoptimisation.py

Policies of the embedded default are trained against reward models of several numbers of labels,
with fixed coefficients of the KL penalty down to 0, by PPO and by RLOO. In every update VADER,
which labelled the data, reads the very responses that the reward model scores. Best-of-n from the
reference is the curve to beat: of n responses the one that the reward model likes best, with KL
log n - (n - 1) / n; means over all choices of n among --pool responses to each of 128 queries.
Penalties for responses without an end are not in the scores. Finished runs of the same scripts are
used again. Writes results/overoptimisation-<tag>.json and .png.
"""

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from ablations import Choice, output_to, run, slug
from judge import Judge
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import comb

import ppo_rlhf
import rloo_rlhf
import train_reward

SCRIPTS = {"PPO": ppo_rlhf, "RLOO": rloo_rlhf}
STYLES = {"PPO": "-", "RLOO": "--"}
COLOURS = ("#D55E00", "#E69F00", "#009E73", "#0072B2", "#CC79A7")
WINDOW = 5  # updates whose means make a point of a curve
BATCH_SIZE = 64
KINDS = ("gold", "kl", "proxy")


def reward_folder(labels: int, seed: int, folder: Path) -> Path:
    """Of the run of a reward model."""
    return folder / f"reward-{labels}-{seed}"


def reward_model(task: tuple[int, int, Path]) -> int:
    """Trains one on so many labels (0: all that there are)."""
    labels, seed, _ = task
    flags = ["--seed", str(seed)]
    if labels > 0:
        flags += ["--num_labels", str(labels)]
    return run(Choice(train_reward.__file__), reward_folder(*task), flags)


def train(task: tuple[str, int, float, int, int, Path]) -> dict[str, Any]:
    """A run of a script's main, whose reward model's responses VADER reads too: KL, proxy and gold
    score of every update."""
    algorithm, labels, kl_coef, seed, episodes, folder = task
    out = folder / slug(f"{algorithm} {labels} {kl_coef} {seed} {episodes}")
    record = out.with_name(f"{out.name}.json")
    if record.exists():
        return json.loads(record.read_text())
    shutil.rmtree(out, ignore_errors=True)  # an interrupted run does not know its gold scores
    reward = reward_folder(labels, seed, folder) / "reward_model"
    judge = Judge(seed, reward, num_queries=1)
    script = SCRIPTS[algorithm]
    load_reward = script.load_reward
    proxy = []
    gold = []

    def load_judged_reward(*values: Any) -> Any:
        score = load_reward(*values)

        def judged(queries: list[Any], responses: list[list[int]]) -> Any:
            scores, token_scores = score(queries, responses)
            if len(responses) == BATCH_SIZE:  # not an evaluation
                proxy.append(scores.mean().item())
                gold.append(float(np.mean(judge.gold(responses))))
            return scores, token_scores

        return judged

    script.load_reward = load_judged_reward
    flags = f"--kl_target none --kl_coef {kl_coef} --seed {seed} --total_episodes {episodes}"
    flags += f" --eval_queries 1 --batch_size {BATCH_SIZE} --checkpoint_every 0"
    paths = ["--reward_model", str(reward), "--output_dir", str(out)]
    sys.argv = [script.__file__, *flags.split(), *paths]
    with output_to(out.with_name(f"{out.name}.log")):
        script.main(*script.parse_args())
    row = {
        "algorithm": algorithm,
        "labels": labels,
        "kl_coef": kl_coef,
        "seed": seed,
        "kl": [x["objective/kl"] for x in common.read_lines(out / "metrics.jsonl")],
        "proxy": proxy,
        "gold": gold,
    }
    assert len(row["kl"]) == len(row["gold"])
    record.write_text(json.dumps(row))
    return row


def best_of_n(task: tuple[int, int, int, Path]) -> dict[str, Any]:
    """Proxy and gold score of the best of n = 1, 2, 4, .. of the reference's responses, by the
    reward model."""
    labels, seed, pool, folder = task
    reward = reward_folder(labels, seed, folder) / "reward_model"
    judge = Judge(seed, reward, num_queries=128)
    draws = [judge.responses(judge.ref, 10**6 + i) for i in range(pool)]
    proxy = np.array([judge.proxy(responses) for responses in draws]).T  # (queries, pool)
    gold = np.array([judge.gold(responses) for responses in draws]).T
    order = proxy.argsort(1)
    proxy = np.take_along_axis(proxy, order, 1)
    gold = np.take_along_axis(gold, order, 1)
    curve = []
    n = 1
    while n <= pool // 2:
        # Of the pool's r-th smallest to be the best of n.
        share = comb(np.arange(pool), n - 1) / comb(pool, n)
        point = {
            "n": n,
            "kl": float(np.log(n) - (n - 1) / n),
            "proxy": float((proxy * share).sum(1).mean()),
            "gold": float((gold * share).sum(1).mean()),
        }
        curve.append(point)
        n *= 2
    row = {"labels": labels, "seed": seed}
    return row | {name: [point[name] for point in curve] for name in curve[0]}


def smooth(values: list[float]) -> np.ndarray:
    """Means of WINDOW updates."""
    whole = len(values) // WINDOW * WINDOW
    return np.array(values[:whole]).reshape(-1, WINDOW).mean(1)


def top_and_end(curves: dict[str, Any]) -> dict[str, float]:
    """Gold, KL and proxy where gold is highest, and where the curves end."""
    top = int(np.argmax(curves["gold"]))
    found = {f"{kind}_top": float(curves[kind][top]) for kind in KINDS}
    return found | {f"{kind}_end": float(curves[kind][-1]) for kind in KINDS}


def summarise(runs: list[dict[str, Any]], best: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per curve: where the gold score is highest, where it ends; and those of best-of-n."""
    table = []
    for row in runs:
        line = {name: row[name] for name in ("algorithm", "labels", "kl_coef", "seed")}
        table.append(line | top_and_end({kind: smooth(row[kind]) for kind in KINDS}))
    for row in best:
        line = {
            "algorithm": f"best of {row['n'][-1]}",
            "labels": row["labels"],
            "kl_coef": None,
            "seed": row["seed"],
        }
        table.append(line | top_and_end(row))
    return table


def draw_runs(axes: Axes, kind: str, runs: list[dict[str, Any]], colours: dict) -> None:
    """A line per run; the first of a kind has the label."""
    labels = set()
    for row in runs:
        label = f"{row['algorithm']}, coefficient {row['kl_coef']:g}"
        x = np.sqrt(np.maximum(smooth(row["kl"]), 0))
        axes.plot(
            x,
            smooth(row[kind]),
            STYLES[row["algorithm"]],
            color=colours[row["kl_coef"]],
            linewidth=1.2,
            label=None if label in labels else label,
        )
        labels.add(label)


def plot(runs: list[dict[str, Any]], best: list[dict[str, Any]], path: Path) -> None:
    """A column per number of labels; gold score above, proxy below; a line per run, best-of-n
    black."""
    sizes = sorted({row["labels"] for row in runs}, key=lambda labels: labels or 10**9)
    coefs = sorted({row["kl_coef"] for row in runs})
    colours = dict(zip(coefs, COLOURS, strict=False))
    figure = Figure(figsize=(3.4 * len(sizes), 5), layout="constrained")
    panels = figure.subplots(2, len(sizes), sharex=True, sharey="row", squeeze=False)
    for column, labels in enumerate(sizes):
        for axes, kind in zip(panels[:, column], ("gold", "proxy"), strict=True):
            mine = [row for row in runs if row["labels"] == labels]
            draw_runs(axes, kind, mine, colours)
            label = "best of n"
            for row in best:
                if row["labels"] == labels:
                    axes.plot(np.sqrt(row["kl"]), row[kind], "k.-", lw=1, ms=3, label=label)
                    label = None
            axes.grid(alpha=0.3)
        panels[0, column].set_title(f"{labels or 'all'} labels")
        panels[1, column].set_xlabel("square root of the KL (nats) to the reference")
    panels[0, 0].set_ylabel("gold score (VADER)")
    panels[1, 0].set_ylabel("proxy (reward model)")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = common.make_parser(__doc__)
    add = parser.add_argument
    add("--tag", default="tiny", help="name of the record")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--labels", type=int, nargs="+", default=[128, 512, 0], help="of a reward model; 0: all")
    add("--kl_coefs", type=float, nargs="+", default=[0.0, 0.05, 0.15], help="fixed ones")
    add("--episodes", type=int, default=5_120, help="of each policy, 64 in an update")
    add("--pool", type=int, default=256, help="responses per query for best-of-n, up to half")
    add("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each with one thread")
    add("--folder", default="runs/overoptimisation", help="where the runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder = Path(args.folder) / common.commit()
    models = [(labels, seed) for seed in args.seeds for labels in args.labels]
    tasks = []
    for labels, seed in models:
        for coef in args.kl_coefs:
            for name in SCRIPTS:
                tasks.append((name, labels, coef, seed, args.episodes, folder))
    runs = []
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        if any(pool.map(reward_model, [(*model, folder) for model in models], 1)):
            raise SystemExit(f"train_reward.py failed: see {folder}")
        for row in pool.imap(train, tasks, 1):
            runs.append(row)
            words = f"{row['algorithm']} {row['labels']} {row['kl_coef']} {row['kl'][-1]:.1f}"
            sys.stdout.write(f"{words}\n")
            sys.stdout.flush()
        best = pool.map(best_of_n, [(*model, args.pool, folder) for model in models], 1)
    table = summarise(runs, best)
    path = common.write("overoptimisation", args.tag, args, runs, best_of_n=best, table=table)
    plot(runs, best, path.with_suffix(".png"))
    common.show_rows(table)


if __name__ == "__main__":
    main()
