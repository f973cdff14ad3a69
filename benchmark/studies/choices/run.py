"""What each choice is worth on the default task, whose true score is known: VADER labelled its
data.

    run=benchmark/studies/choices/run.py
    python $run                                         # short runs, of most choices
    python $run --tag full --episodes 12800 --batch_size 128 --seeds 1 2 3
    python $run --tag mine --choices default "gamma 0.95"

Full runs are those of the choices that matter most, short ones those of the others, beside the
default and RLOO's. A run has failed if it stopped, or if its true score ends below the starting
model's. RLOO's rows compare with K 4, and that with PPO's default.

Two runs of a seed are compared at equal KL: at each of 2, 4 and 6 nats (1, 2 and 3 in short runs)
that both reach, which are then averaged. Whether such a difference is 0 is asked of all choices at
once, twice: with each row's own deviation, and with one that is pooled over the rows
(benchmark/differences.py). Writes <tag>.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common, runs
from benchmark.differences import add_tests, at_equal_kl, mean

SHORT_LEVELS = (1.0, 2.0, 3.0)  # nats, where runs have fewer episodes than the scripts' default
EPISODES = 12_800  # the scripts' default
AT_END = ("true_score", "kl")  # whose differences at the end of runs are tested
STARTS = ("warmed up", "critic from the policy, warmed up")  # only of protocol.md
NAMES = tuple(runs.CHOICES)
NEWER = NAMES[NAMES.index("GRPO, unbiased KL") :]  # those of which_method
LONG = (
    "lambda 1 (default: 0.95)",
    "critic from the reward model",
    "truncated tokens masked",
    "k3 as the KL penalty",
    "temperature 1 (default: 0.7)",
    "advantages not whitened",
    "1 epoch (default: 4)",
    "critic's rate 1e-2",
    "no value function",
    "RLOO of tokens",
    "GRPO",
)


def base_of(name: str) -> str:
    """The choice that a choice is compared with."""
    choice = runs.CHOICES.get(name, runs.CHOICES["default"])  # short.json has some that are gone
    if choice.script != runs.PPO and name != "RLOO, K 4":
        return "RLOO, K 4"
    return "default"


def explained_at_end(row: dict[str, Any]) -> float:
    """The share of variance that values explain at the end of a run; NaN if it has no values."""
    curve = row.get("curve", {}).get("var_explained")
    has_values = curve is not None and "--vf_coef 0" not in row["flags"]
    return curve[-1] if has_values else np.nan


def add_equal_kl(
    table: list[dict[str, Any]],
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    levels: tuple[float, ...],
) -> None:
    """Adds differences at equal KL between the runs of each pair, of which the first is a line's,
    and their tests."""
    for line in table:
        of_seeds = []
        for one, other in pairs:
            if one["choice"] == line["choice"] and "fine_curve" in one and "fine_curve" in other:
                of_seeds.append(at_equal_kl(one, other, levels))
        means = [mean(values) for values in of_seeds]
        found = [value for value in means if value is not None]
        line["equal_kl_levels"] = [mean(values) for values in zip(*of_seeds, strict=True)]
        line["equal_kl"] = mean(found)
        line["equal_kl_seeds"] = len(found)
        line["equal_kl_differences"] = found
    add_tests(table, "equal_kl")


def summarise(rows: list[dict[str, Any]], levels: tuple[float, ...]) -> list[dict[str, Any]]:
    """Means over seeds, and differences of true score and KL to the default, within seeds, with
    95 % intervals."""
    of_run = {(row["choice"], row["seed"]): row for row in rows}
    start = {row["seed"]: row["true_score_before"] for row in rows if "true_score_before" in row}
    table = []
    for name in dict.fromkeys(row["choice"] for row in rows):
        mine = [row for row in rows if row["choice"] == name]
        ended = [row for row in mine if "true_score" in row]
        lost = [row for row in ended if row["true_score"] < start.get(row["seed"], -1)]
        num_failed = len(mine) - len(ended) + len(lost)
        line = {"choice": name, "seeds": len(mine), "num_failed": num_failed, "levels": levels}
        line["explained"] = mean([explained_at_end(row) for row in ended])
        for kind in ("true_score", "reward", "kl", "distinct"):
            line[kind] = float(np.mean([row[kind] for row in ended] or [np.nan]))
        for kind in AT_END:
            differences = []
            for row in ended:
                base = of_run.get((base_of(name), row["seed"]), {})
                if kind in base:
                    differences.append(row[kind] - base[kind])
            found = differences if name != base_of(name) else []
            line[f"{kind}_ahead"] = sum(difference > 0 for difference in found)
            line[f"{kind}_difference"] = mean(found)
            line[f"{kind}_differences"] = found
        table.append(line)
    for kind in AT_END:
        add_tests(table, kind)
    pairs = []
    for (name, seed), row in of_run.items():
        base = of_run.get((base_of(name), seed))
        if base is not None and name != base_of(name):
            pairs.append((row, base))
    add_equal_kl(table, pairs, levels)
    return table


def main(program: str = __file__, **defaults: Any) -> None:
    """Runs of a study: `program` is its file, beside which the record goes."""
    parser = runs.make_parser(__doc__, program, tag="short", episodes=2_560)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    help_of_choices = "default: those of this length"
    add("--choices", nargs="+", choices=runs.CHOICES, metavar="CHOICE", help=help_of_choices)
    add("--batch_size", type=int, default=64, help="of an update (the default's own: 128)")
    add("--lr", help="learning rate of all runs (default: the scripts')")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    folder = runs.begin(args)
    is_long = args.episodes >= EPISODES
    if args.choices is None:
        others = LONG
        if not is_long:
            others = [name for name in runs.CHOICES if name not in (*LONG, *NEWER, *STARTS)]
        args.choices = list(dict.fromkeys((*runs.NAMES, *others)))
    sizes = ["--total_episodes", str(args.episodes), "--batch_size", str(args.batch_size)]
    if args.lr is not None:
        sizes += ["--lr", args.lr]
    tasks = [(name, seed, folder, sizes) for seed in args.seeds for name in args.choices]
    rows = []
    for row in runs.run_all(tasks, args.jobs):
        rows.append(row)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    table = summarise(rows, runs.LEVELS if is_long else SHORT_LEVELS)
    common.write(args, rows, table=table)
    common.show_rows(table)


if __name__ == "__main__":
    main()
