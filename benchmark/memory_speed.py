"""Peak memory and speed of an update: PPO on one trunk, PPO with a value model of its own, RLOO with K = 2 and 4.

The same number of episodes per update for all. Memory: every variant has a process of its own; on a CPU it is the
largest resident set of an update minus that after the imports, on a GPU what PyTorch allocated at most. Policy,
gradients, Adam's averages, reference and reward model are in it. Speed: all variants in one process, in turn.

    python benchmark/memory_speed.py --shape tiny
    python benchmark/memory_speed.py --shape gpt2 --num_epochs 1 --dtype bf16
"""

import argparse
import json
import statistics
import sys
from typing import Any

import common
import numpy as np
import torch
from ours import Frozen, Ours

VARIANTS = {
    "ppo": {"algorithm": "ppo"},
    "ppo-value-model": {"algorithm": "ppo", "value_trunk": True},
    "rloo-2": {"algorithm": "rloo", "rloo_k": 2},
    "rloo-4": {"algorithm": "rloo", "rloo_k": 4},
}


def make(name: str, folder: str, options: argparse.Namespace, device: torch.device) -> Ours:
    """A variant, with this benchmark's sizes."""
    names = ("batch_size", "micro_batch_size", "response_length", "num_epochs", "dtype")
    sizes = {name: getattr(options, name) for name in names} | {"query_length": options.longest}
    return Ours(folder=folder, device=device, **VARIANTS[name], **sizes)


def make_contexts(variant: Ours, options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Queries of 16 to 64 tokens, drawn for every episode; RLOO takes each K-th."""
    lengths = np.random.default_rng(0).integers(options.shortest, options.longest + 1, options.batch_size)
    return common.random_contexts(lengths[:: variant.copies], vocabulary, 0)


def memory(name: str, folder: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Updates of a variant in this process: its peak, and the bytes of weights that it trains.

    Adam has its averages after the first step only, and they are to be there together with activations: two steps.
    """
    before = common.baseline(device)
    variant = make(name, folder, options, device)
    frozen = Frozen(folder, variant.args, device)
    contexts = make_contexts(variant, options, variant.actor.lm.config.vocab_size)
    for _ in range(2 if options.num_epochs == 1 else 1):
        variant.update(contexts, frozen)
    trained = sum(p.numel() * p.element_size() for p in variant.policy.parameters())
    return common.used(device, before) | {"trained_bytes": trained}


def speed(folder: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Seconds of one update, variants in turn, after one warm-up of each."""
    variants = {name: make(name, folder, options, device) for name in options.variants}
    some = next(iter(variants.values()))
    frozen, clocks = Frozen(folder, some.args, device), {name: [] for name in variants}
    for turn in range(options.repeats + 1):
        for name, variant in variants.items():
            contexts = make_contexts(variant, options, variant.actor.lm.config.vocab_size)
            clock = variant.update(contexts, frozen)
            clocks[name] += [clock.seconds] * (turn > 0)
    rows = []
    for name, runs in clocks.items():
        phases = {
            phase: statistics.median(run[phase] for run in runs) for phase in ("total", "sample", "score", "optimise")
        }
        row = {"variant": name, "seconds": phases, "all_seconds": [run["total"] for run in runs]}
        rows.append(row | {"episodes_per_second": options.batch_size / phases["total"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=None, help="name of the record (default: shape and dtype)")
    parser.add_argument("--shape", default="tiny", help="tiny, gpt2 (124M, random weights), or a folder")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch_size", type=int, default=16, help="episodes per update")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=16, help="shortest query")
    parser.add_argument("--longest", type=int, default=64, help="longest query")
    parser.add_argument("--response_length", type=int, default=24)
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="timed updates of each variant; 0: memory only")
    parser.add_argument("--speed_only", action="store_true")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)  # variant and folder, for memory
    options = parser.parse_args()
    device = common.device()
    child = vars(options).pop("child")
    if child is not None:
        sys.stdout.write(json.dumps(memory(*child, options, device)) + "\n")
        return
    options.tag = options.tag or f"{options.shape}-{options.dtype}"
    with common.model_folder(options.shape) as folder:
        names = [] if options.speed_only else options.variants
        used = {name: common.in_child("--child", name, folder) for name in names}
        rows = speed(folder, options, device) if options.repeats else [{"variant": name} for name in options.variants]
    for row in rows:
        row |= used.get(row["variant"], {})
        if used:
            row["memory_ratio"] = row["peak_bytes"] / rows[0]["peak_bytes"]
        if options.repeats:
            row["speed_ratio"] = row["episodes_per_second"] / rows[0]["episodes_per_second"]
    columns, table = ["variant", "peak MB", "ratio", "episodes/s", "ratio", "sample", "score", "optimise"], []
    for row in rows:
        cells = [row["variant"]] + ["", ""] * (not used)
        if used:
            cells += [f"{row['peak_bytes'] / 1e6:.0f}", f"{row['memory_ratio']:.2f}"]
        if options.repeats:
            cells += [f"{row['episodes_per_second']:.2f}", f"{row['speed_ratio']:.2f}"]
            cells += [f"{row['seconds'][phase]:.2f} s" for phase in ("sample", "score", "optimise")]
        table.append(cells + [""] * (len(columns) - len(cells)))
    path = common.write("memory_speed", options.tag, options, rows)
    common.show(columns, table, path.name)


if __name__ == "__main__":
    main()
