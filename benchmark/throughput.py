"""Seconds per update, phase by phase: the scripts against plain PyTorch (plain.py), and against the machine's floor.

All contenders are in one process and take turns, one update each; medians count. Before that, each pair of them updates
on the same responses, which warms them up; in fp32 both must then have the same parameters.

    sample     responses
    score      log-probabilities of policy and reference, values, rewards
    optimise   all optimizer steps
    other      the rest of `total`

The floor is the arithmetic that no implementation of the update can leave out, at the speed of this machine's matrix
product for these weights and numbers of rows, measured in the same run: each real token once through policy (sampling
already yields its log-probability), reference and reward model, three times that per epoch of training, logits at
response tokens only, attention, and in RLOO a query once for its K responses.

Contenders that are not in by default: `plain-fp32-...`, the plain version in fp32 whatever --dtype says, and `trl-...`,
TRL's trainers in processes of their own (trl_peer.py), which take turns like the others. With --memory, every contender
has a process of its own for two updates: peak memory instead of seconds, defined as in memory_speed.py.

    python benchmark/throughput.py --shape tiny --queries book
    python benchmark/throughput.py --shape gpt2 --batch_size 16 --num_epochs 1 --repeats 2
    python benchmark/throughput.py --contenders ours-ppo plain-ppo trl-ppo
    python benchmark/throughput.py --memory
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from ours import Frozen, Ours
from plain import Plain, PlainFrozen
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D
from trl_peer import FOLDER, Peer

import ppo_rlhf
import rloo_rlhf

PHASES = ("sample", "score", "optimise", "other", "total")
ALGORITHMS, OTHERS = ("ppo", "rloo"), ("plain", "plain-fp32", "trl")
CONTENDERS = {f"{impl}-{algorithm}": (impl, algorithm) for algorithm in ALGORITHMS for impl in ("ours", *OTHERS)}
DEFAULT = [name for name, (impl, _) in CONTENDERS.items() if impl in ("ours", "plain")]


class Setting:
    """What all contenders of a run share: the model's folder, sizes, queries and frozen models."""

    def __init__(self, options: argparse.Namespace, folder: str, device: torch.device) -> None:
        names = ("batch_size", "micro_batch_size", "response_length", "num_epochs", "num_minibatches", "dtype")
        self.sizes = {name: getattr(options, name) for name in names} | {"query_length": options.query_length}
        self.sizes |= {"penalty_mode": "add"}  # random models seldom end: replaced, all rewards would be equal
        self.options, self.folder, self.device, self.frozen = options, folder, device, {}
        self.vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        rng, longest, count = np.random.default_rng(0), options.query_length, options.batch_size
        book = rng.geometric(1 / 16, count).clip(1, longest)
        self.lengths = book if options.queries == "book" else np.full(count, longest)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Frozen models, made once."""
        if name not in self.frozen:
            self.frozen[name] = make()
        return self.frozen[name]

    def contexts(self, copies: int) -> list[list[int]]:
        """One query per `copies` episodes, so that every contender has the same number of episodes."""
        return common.random_contexts(self.lengths[::copies], self.vocabulary, 0)

    def make(self, name: str) -> "Contender | Peer":
        """A contender, by name."""
        impl, algorithm = CONTENDERS[name]
        sizes = self.sizes | ({"rloo_k": self.options.rloo_k} if algorithm == "rloo" else {})
        if impl == "plain-fp32":
            sizes["dtype"] = "fp32"
        if impl != "trl":
            return Contender(impl, algorithm, self, sizes)
        args = (ppo_rlhf if algorithm == "ppo" else rloo_rlhf).Args(kl_target=None, **sizes)
        trl_dir = Path(self.options.trl_dir or FOLDER)
        return Peer(algorithm, self.folder, self.contexts(sizes.get("rloo_k", 1)), args, trl_dir)


class Contender:
    """Something that updates: `update` returns its Clock; `run` may take responses to work on, as Plain's does."""

    def __init__(self, impl: str, algorithm: str, setting: Setting, sizes: dict[str, Any]) -> None:
        folder, device = setting.folder, setting.device
        self.algorithm, self.copies = algorithm, sizes.get("rloo_k", 1)
        if impl == "ours":
            self.run = Ours(algorithm, folder, device, **sizes)
            self.module, self.args = self.run.actor, self.run.args
            self.frozen = setting.shared(impl, lambda: Frozen(folder, self.args, device))
        else:
            self.args = (ppo_rlhf if algorithm == "ppo" else rloo_rlhf).Args(kl_target=None, **sizes)
            fast = setting.options.plain_matmul == "fast"
            self.run = Plain(algorithm, folder, device, setting.options.query_length, self.args, fast)
            self.module = self.run.model
            self.frozen = setting.shared("plain", lambda: PlainFrozen(folder, device))  # fp32 weights in any dtype
        self.lm = getattr(self.module, "lm", self.module)
        self.contexts = setting.contexts(self.copies)

    def update(self, **more: Any) -> dict[str, float]:
        """Seconds of one update, by phase."""
        seconds = dict(self.run.update(self.contexts, self.frozen, **more).seconds)
        return seconds | {"other": 2 * seconds["total"] - sum(seconds.values())}

    def weights(self) -> Tensor:
        """All parameters of the language model in a row."""
        return torch.cat([p.detach().flatten() for p in self.lm.parameters()])


def same_work(ours: Contender, plain: Contender) -> float:
    """One update of both on the responses of the first: how far the steps are apart, relative to their length."""
    start = ours.weights()
    ours.update()
    responses = ours.run.batch["responses"]
    plain.update(responses=responses.reshape(-1, responses.shape[-1]))
    plain.run.sample(*plain.run.pad(plain.contexts))  # it had nothing to sample yet
    step, other = ours.weights() - start, plain.weights() - start
    return ((step - other).norm() / step.norm()).item()


def products(lm: Any, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Weights (in, out) of all matrix products below the head, and the head's."""
    head = lm.get_output_embeddings()
    layers = [m for m in lm.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    trunk = [m.weight.detach() if isinstance(m, Conv1D) else m.weight.detach().T for m in layers]
    return [w.to(dtype) for w in trunk], head.weight.detach().T.to(dtype)


def rate(weights: list[Tensor], rows: int, dtype: torch.dtype, budget: float = 0.6) -> float:
    """Operations per second of x @ w for x of `rows` rows and every w in turn, the best of several rounds."""
    inputs = {w.shape[0]: torch.randn(rows, w.shape[0], device=w.device).to(dtype) for w in weights}
    best, spent = float("inf"), 0.0
    while spent < budget:
        start = time.perf_counter()
        for w in weights:
            inputs[w.shape[0]] @ w
        if weights[0].is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + max(seconds, 1e-5)
    return sum(2 * rows * w.numel() for w in weights) / best


def floor(contender: Contender, setting: Setting) -> dict[str, Any]:
    """Operations that the update cannot avoid, and the seconds that they take here, by phase."""
    args, lm = contender.args, contender.lm
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    ppo_rlhf.fast_math(setting.device, setting.options.dtype)
    (trunk, head), k, length = products(lm, dtype), contender.copies, args.response_length
    config, inner = lm.config, sum(w.numel() for w in trunk)
    queries = np.array([len(context) for context in contender.contexts])
    episodes, fed = len(queries) * k, len(queries) * k * (length - 1)
    pairs = queries * (queries + 1) / 2 + k * ((length - 1) * queries + (length - 1) * length / 2)
    attention = 4 * config.num_hidden_layers * config.hidden_size * pairs.sum()
    body, logits = 2 * inner * (queries.sum() + fed) + attention, 2 * head.numel() * episodes * length
    share = args.micro_batch_size / args.batch_size
    rates = {
        "trunk": rate(trunk, max(1, round((queries.sum() + fed) * share)), dtype),
        "head": rate([head], max(1, round(episodes * length * share)), dtype),
        "prompt": rate(trunk, int(queries.sum()), dtype),
        "step": rate([*trunk, head], episodes, dtype),
    }
    prompt = (
        2 * inner * queries.sum()
        + 4 * config.num_hidden_layers * config.hidden_size * (queries * (queries + 1) / 2).sum()
    )
    through = body / rates["trunk"] + logits / rates["head"]  # seconds of a pass over everything
    reward = prompt + (body - prompt) * min(1.0, contender.run.scored / fed)
    operations = {
        "sample": body + logits,
        "score": body + logits + reward,
        "optimise": 3 * args.num_epochs * (body + logits),
    }
    seconds = {
        "sample": prompt / rates["prompt"] + (body + logits - prompt) / rates["step"],
        "score": through + reward / rates["trunk"],
        "optimise": 3 * args.num_epochs * through,
    }
    for table in (operations, seconds):
        table["total"] = sum(table.values())
    return {
        "gflop": {phase: x / 1e9 for phase, x in operations.items()},
        "seconds": seconds,
        "policy_pass_seconds": through,
        "gflop_per_second": {name: x / 1e9 for name, x in rates.items()},
    }


def lower(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The lower of two measurements of the floor."""
    return min(first, second, key=lambda measured: measured["seconds"]["total"])


def memory(name: str, folder: str, options: argparse.Namespace) -> dict[str, int]:
    """Peak of two updates of one contender in this process, or in the worker of one that has its own."""
    before = common.baseline(common.device())
    contender = Setting(options, folder, common.device()).make(name)
    for _ in range(2):  # Adam has its averages after a step only, and they are to be there together with activations
        contender.update()
    if isinstance(contender, Peer):
        contender.close()
        return contender.memory
    return common.used(common.device(), before)


def measure_memory(options: argparse.Namespace) -> None:
    """Peak memory of every contender, each in a process of its own."""
    with common.model_folder(options.shape) as folder:
        peaks = {name: common.in_child("--child", name, folder) for name in options.contenders}
    rows, table = [], Table("contender", "peak MB", "of plain")
    for name, row in peaks.items():
        row, plain = {"contender": name} | row, peaks.get(f"plain-{CONTENDERS[name][1]}")
        if plain:
            row["memory_ratio"] = row["peak_bytes"] / plain["peak_bytes"]
        rows.append(row)
        table.add_row(name, f"{row['peak_bytes'] / 1e6:.0f}", f"{row['memory_ratio']:.2f}" if plain else "")
    path = common.write("throughput", options.tag, options, rows)
    Console(width=140).print(table, path.name, sep="\n")


def warm_up(contenders: dict[str, Contender | Peer], dtype: str) -> dict[str, float]:
    """One update of each; where ours and plain are both there, how far their steps are apart."""
    apart, warm = {}, set()
    for algorithm in ALGORITHMS:
        pair = {name: contenders[name] for name in (f"ours-{algorithm}", f"plain-{algorithm}") if name in contenders}
        if len(pair) == 2:
            apart[algorithm] = same_work(*pair.values())
            warm |= set(pair)
            if dtype == "fp32" and not apart[algorithm] < 0.01:
                raise SystemExit(f"{algorithm}: the steps of ours and plain are {apart[algorithm]:.2g} apart")
    for name, contender in contenders.items():
        if name not in warm:
            contender.update()
    return apart


def measure_speed(options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """Seconds of every contender, in turns."""
    with common.model_folder(options.shape) as folder:
        setting = Setting(options, folder, common.device())
        contenders = {name: setting.make(name) for name in options.contenders}
    for contender in contenders.values():
        if isinstance(contender, Peer):
            stack.callback(contender.close)
    apart = warm_up(contenders, options.dtype)
    names = {
        a: next(f"{impl}-{a}" for impl in ("ours", "plain") if f"{impl}-{a}" in contenders) for a in measured(options)
    }
    floors = {algorithm: floor(contenders[name], setting) for algorithm, name in names.items()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(options.repeats):
        for name, contender in contenders.items():
            runs[name].append(contender.update())
    floors = {
        algorithm: lower(floors[algorithm], floor(contenders[name], setting)) for algorithm, name in names.items()
    }
    rows, table = [], Table("contender", "episodes/s", *(f"{phase} s" for phase in PHASES), "floor s", "of the floor")
    for name, contender in contenders.items():
        least = floors[contender.algorithm]
        seconds = {phase: statistics.median(run[phase] for run in runs[name]) for phase in PHASES}
        row = {"contender": name, "seconds": seconds, "all_seconds": [run["total"] for run in runs[name]]}
        row |= {"episodes_per_second": options.batch_size / seconds["total"], "floor": least}
        row |= {"fraction_of_floor": {phase: least["seconds"][phase] / seconds[phase] for phase in least["seconds"]}}
        rows.append(row)
        cells = [f"{seconds[phase]:.3f}" for phase in PHASES] + [f"{least['seconds']['total']:.3f}"]
        table.add_row(name, f"{row['episodes_per_second']:.2f}", *cells, f"{row['fraction_of_floor']['total']:.0%}")
    medians = {row["contender"]: row["seconds"] for row in rows}
    ratios: dict[str, dict[str, dict[str, float]]] = {impl: {} for impl in OTHERS}
    for name, ours in medians.items():
        impl, algorithm = CONTENDERS[name]
        for other in OTHERS if impl == "ours" else ():
            if seconds := medians.get(f"{other}-{algorithm}"):
                ratio = ratios[other][algorithm] = {phase: seconds[phase] / ours[phase] for phase in PHASES}
                cells = [f"{ratio[phase]:.2f}x" for phase in PHASES]
                table.add_row(f"{other} / ours, {algorithm}", f"{1 / ratio['total']:.2f}x", *cells)
    more = {"ratios": ratios.pop("plain"), "other_ratios": ratios, "steps_apart": apart}
    path = common.write("throughput", options.tag, options, rows, **more)
    Console(width=140).print(table, path.name, sep="\n")


def measured(options: argparse.Namespace) -> list[str]:
    """Algorithms of the contenders."""
    return list(dict.fromkeys(CONTENDERS[name][1] for name in options.contenders))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=None, help="name of the record (default: shape, queries and dtype)")
    parser.add_argument("--contenders", nargs="+", default=DEFAULT, choices=CONTENDERS)
    parser.add_argument("--shape", default="tiny", help="tiny, gpt2 (124M, random weights), or a folder")
    parser.add_argument("--queries", default="book", choices=["full", "book"], help="64 tokens each, or a mean of 16")
    parser.add_argument("--query_length", type=int, default=64)
    parser.add_argument("--response_length", type=int, default=24)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch_size", type=int, default=64, help="episodes per update")
    parser.add_argument("--micro_batch_size", type=int, default=64)
    parser.add_argument("--num_minibatches", type=int, default=1)
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--rloo_k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain_matmul", default="default", choices=["default", "fast"],
                        help="plain code leaves PyTorch's matrix product as it is, or sets the scripts'")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="peak memory instead of seconds")
    parser.add_argument("--trl_dir", default=None, help="where TRL's releases are installed (default: benchmark/.trl)")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)  # contender and folder, for memory
    options = parser.parse_args()
    child = vars(options).pop("child")
    if child is not None:
        sys.stdout.write(json.dumps(memory(*child, options)) + "\n")
        return
    options.tag = options.tag or f"{options.shape}-{options.queries}-{options.dtype}"
    if options.memory:
        options.tag += "-memory"
        measure_memory(options)
        return
    for algorithm in measured(options):
        if not {f"ours-{algorithm}", f"plain-{algorithm}"} & set(options.contenders):
            parser.error(f"--contenders: the floor of {algorithm} needs ours-{algorithm} or plain-{algorithm}")
    with contextlib.ExitStack() as stack:
        measure_speed(options, stack)


if __name__ == "__main__":
    main()
