"""Peak memory and speed of an update: PPO on one trunk, PPO with a value model of its own, RLOO
with K = 2 and 4.

The same number of episodes per update for all. Memory: every variant has a process of its own; on
a CPU it is the largest resident set of an update minus that after the imports, on a GPU what
PyTorch allocated at most. Policy, gradients, Adam's averages, reference and reward model are in
it. Speed: all variants in one process, in turn.

    python benchmark/speed/memory_speed.py --shape tiny
    python benchmark/speed/memory_speed.py --shape gpt2 --num_epochs 1 --dtype bf16
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmark import common
from benchmark.ours import Frozen, Ours

VARIANTS = {
    "ppo": {"algorithm": "ppo"},
    "ppo-value-model": {"algorithm": "ppo", "value_trunk": True},
    "rloo-2": {"algorithm": "rloo", "rloo_k": 2},
    "rloo-4": {"algorithm": "rloo", "rloo_k": 4},
}
PHASES = ("total", "sample", "score", "optimise")


def make(name: str, folder: str, options: argparse.Namespace) -> Ours:
    """A variant, with this benchmark's sizes."""
    names = ("batch_size", "micro_batch_size", "response_length", "num_epochs", "dtype")
    sizes = {name: getattr(options, name) for name in names}
    sizes["query_length"] = options.longest
    return Ours(folder=folder, **VARIANTS[name], **sizes)


def make_contexts(variant: Ours, options: argparse.Namespace) -> list[list[int]]:
    """Queries of 16 to 64 tokens, drawn for every episode; RLOO takes each K-th."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(options.shortest, options.longest + 1, options.batch_size)
    return common.random_contexts(lengths[:: variant.k], variant.actor.lm.config.vocab_size, 0)


def memory(name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Updates of a variant in this process: its peak, and the bytes of weights that it trains.

    Adam has its averages after the first step only, and they are to be there together with
    activations: two steps."""
    before = common.baseline(common.device())
    variant = make(name, folder, options)
    frozen = Frozen(folder, variant.args)
    contexts = make_contexts(variant, options)
    for _ in range(2 if options.num_epochs == 1 else 1):
        variant.update(contexts, frozen)
    trained = sum(p.numel() * p.element_size() for p in variant.policy.parameters())
    return common.used(common.device(), before) | {"trained_bytes": trained}


def speed(folder: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of one update, variants in turn, after one warm-up of each."""
    variants = {name: make(name, folder, options) for name in options.variants}
    some = next(iter(variants.values()))
    frozen = Frozen(folder, some.args)
    runs = {name: [] for name in variants}
    for turn in range(options.repeats + 1):
        for name, variant in variants.items():
            clock = variant.update(make_contexts(variant, options), frozen)
            if turn > 0:
                runs[name].append(clock.seconds)
    rows = []
    for name, seconds in runs.items():
        medians = {phase: statistics.median(run[phase] for run in seconds) for phase in PHASES}
        row = {
            "variant": name,
            "seconds": medians,
            "all_seconds": [run["total"] for run in seconds],
            "episodes_per_second": options.batch_size / medians["total"],
        }
        rows.append(row)
    return rows


def table_row(row: dict[str, Any]) -> list[str]:
    """What is shown of a row; "" is what was not measured."""
    cells = [row["variant"], "", "", "", "", "", "", ""]
    if "peak_bytes" in row:
        cells[1] = f"{row['peak_bytes'] / 1e6:.0f}"
        cells[2] = f"{row['memory_ratio']:.2f}"
    if "seconds" in row:
        cells[3] = f"{row['episodes_per_second']:.2f}"
        cells[4] = f"{row['speed_ratio']:.2f}"
        cells[5:] = [f"{row['seconds'][phase]:.2f} s" for phase in PHASES[1:]]
    return cells


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default=None, help="name of the record (default: shape and dtype)")
    add("--shape", default="tiny", help="tiny, gpt2 (124M, random weights), or a folder")
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    add("--dtype", default="fp32", choices=["fp32", "bf16"])
    add("--batch_size", type=int, default=16, help="episodes per update")
    add("--micro_batch_size", type=int, default=16)
    add("--shortest", type=int, default=16, help="shortest query")
    add("--longest", type=int, default=64, help="longest query")
    add("--response_length", type=int, default=24)
    add("--num_epochs", type=int, default=4)
    add("--repeats", type=int, default=5, help="timed updates of each; 0: memory only")
    add("--speed_only", action="store_true")
    # A variant and a folder: what this file starts itself for.
    add("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    child = vars(options).pop("child")
    if child is not None:
        sys.stdout.write(json.dumps(memory(*child, options)) + "\n")
        return

    options.tag = options.tag or f"{options.shape}-{options.dtype}"
    rows = [{"variant": name} for name in options.variants]
    with common.model_folder(options.shape) as folder:
        if options.repeats > 0:
            rows = speed(folder, options)
        if not options.speed_only:
            for row in rows:
                row |= common.in_child("--child", row["variant"], folder)
    for row in rows:
        if not options.speed_only:
            row["memory_ratio"] = row["peak_bytes"] / rows[0]["peak_bytes"]
        if options.repeats > 0:
            row["speed_ratio"] = row["episodes_per_second"] / rows[0]["episodes_per_second"]
    path = common.write(options, rows, "memory_speed")
    columns = ["variant", "peak MB", "ratio", "episodes/s", "ratio", *PHASES[1:]]
    common.show(columns, [table_row(row) for row in rows], path.name)


if __name__ == "__main__":
    main()
