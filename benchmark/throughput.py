"""Seconds per update, phase by phase: the scripts against plain PyTorch (plain.py), and against the machine's floor.

Every contender is in a process of its own, so that no setting of one, its allocator's say, is another's. They take
turns, one update each, while the others wait; medians count, after an update that warms up. All are started --rounds
times, since the same code is several per cent faster or slower from one process to the next. Before that, ours and
plain make one update on the same responses; in fp32 both must then have the same parameters.

    sample     responses
    score      log-probabilities of policy and reference, values, rewards
    optimise   all optimizer steps
    other      the rest of `total`

The floor is the arithmetic that no implementation of the update can leave out, at the speed of this machine's matrix
product for these weights and numbers of rows, measured in the same run: each real token once through policy (sampling
already yields its log-probability), reference and reward model, three times that per epoch of training, logits at
response tokens only, attention, and in RLOO a query once for its K responses.

Contenders that are not in by default: `plain-fp32-...`, the plain version in fp32 whatever --dtype says; `trl-...`,
TRL's trainers (trl_peer.py); `plain-fast-...` and `trl-fast-...`, the same with the scripts' matrix product ("medium",
and eager attention on a CPU): two lines, which gain much on one CPU and nothing on another. With --memory, every
contender makes two updates alone: peak memory instead of seconds, defined as in memory_speed.py.

    python benchmark/throughput.py --queries tiny --query_length 32 --batch_size 128      # the embedded default
    python benchmark/throughput.py --shape gpt2 --batch_size 16 --rounds 3 --repeats 1
    python benchmark/throughput.py --contenders ours-ppo plain-ppo trl-ppo
    python benchmark/throughput.py --memory
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from ours import Frozen, Ours, load
from plain import Plain, PlainFrozen
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D
from trl_peer import FOLDER, Peer

import ppo_rlhf
import rloo_rlhf

PHASES = ("sample", "score", "optimise", "other", "total")
ALGORITHMS, OTHERS = ("ppo", "rloo"), ("plain", "plain-fp32", "plain-fast", "trl", "trl-fast")
CONTENDERS = {f"{impl}-{algorithm}": (impl, algorithm) for algorithm in ALGORITHMS for impl in ("ours", *OTHERS)}
DEFAULT = [name for name, (impl, _) in CONTENDERS.items() if impl in ("ours", "plain")]


class Setting:
    """What all contenders of a run share: the model's folder, sizes and queries."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        names = ("batch_size", "micro_batch_size", "response_length", "num_epochs", "num_minibatches", "dtype")
        self.sizes = {name: getattr(options, name) for name in names} | {"query_length": options.query_length}
        self.sizes |= {"penalty_mode": "add"}  # random models seldom end: replaced, all rewards would be equal
        self.options, self.folder = options, folder
        self.vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        rng, longest, count = np.random.default_rng(0), options.query_length, options.batch_size
        if options.queries == "tiny":
            queries = ppo_rlhf.load_queries(common.tokenizer(), ppo_rlhf.Args(), count)
            self.lengths = np.array([len(query["context"]) for query in queries])
        else:
            book = rng.geometric(1 / 16, count).clip(1, longest)
            self.lengths = book if options.queries == "book" else np.full(count, longest)

    def contexts(self, copies: int) -> list[list[int]]:
        """One query per `copies` episodes, so that every contender has the same number of episodes."""
        return common.random_contexts(self.lengths[::copies], self.vocabulary, 0)

    def args(self, name: str) -> Any:
        """Settings of a contender."""
        impl, algorithm = CONTENDERS[name]
        sizes = self.sizes | ({"rloo_k": self.options.rloo_k} if algorithm == "rloo" else {})
        if impl == "plain-fp32":
            sizes["dtype"] = "fp32"
        return (ppo_rlhf if algorithm == "ppo" else rloo_rlhf).Args(kl_target=None, **sizes)

    def start(self, name: str) -> "common.Worker":
        """A contender in a process of its own."""
        if name.startswith("trl"):
            args = self.args(name)
            contexts, trl_dir = self.contexts(getattr(args, "rloo_k", 1)), Path(self.options.trl_dir or FOLDER)
            return Peer(CONTENDERS[name][1], self.folder, contexts, args, trl_dir, "fast" in name)
        worker = common.Worker(name, [*sys.argv, "--worker", name, self.folder])
        worker.ask({})  # it is ready when it has made an update
        return worker


class Contender:
    """Something that updates: `update` returns its Clock; `run` may take responses to work on, as Plain's does."""

    def __init__(self, name: str, setting: Setting) -> None:
        (impl, self.algorithm), folder, device = CONTENDERS[name], setting.folder, common.device()
        self.args = args = setting.args(name)
        if impl == "ours":
            sizes = setting.sizes | ({"rloo_k": args.rloo_k} if self.algorithm == "rloo" else {})
            self.run = Ours(self.algorithm, folder, device, **sizes)
            self.module, self.frozen = self.run.actor, Frozen(folder, args, device)
        else:
            self.run = Plain(self.algorithm, folder, device, args, impl == "plain-fast")
            self.module = self.run.model
            self.frozen = PlainFrozen(folder, device, **self.run.attention)  # fp32 weights in any dtype
        self.lm = getattr(self.module, "lm", self.module)
        self.contexts = setting.contexts(getattr(args, "rloo_k", 1))

    def update(self, **more: Any) -> dict[str, float]:
        """Seconds of one update, by phase."""
        seconds = dict(self.run.update(self.contexts, self.frozen, **more).seconds)
        return seconds | {"other": 2 * seconds["total"] - sum(seconds.values())}

    def weights(self) -> Tensor:
        """All parameters of the language model in a row."""
        return torch.cat([p.detach().flatten() for p in self.lm.parameters()])


def steps_apart(algorithm: str, setting: Setting) -> float:
    """How far the steps of ours and plain are apart, relative to their length, after one update on equal responses."""
    ours, plain = (Contender(f"{impl}-{algorithm}", setting) for impl in ("ours", "plain"))
    start = ours.weights()
    ours.update()
    responses = ours.run.batch["responses"]
    plain.update(responses=responses.reshape(-1, responses.shape[-1]))
    step, other = ours.weights() - start, plain.weights() - start
    return ((step - other).norm() / step.norm()).item()


def work(name: str, setting: Setting) -> None:
    """A worker: one update for each line on stdin."""
    with common.private_stdout() as answers:
        contender = Contender(name, setting)
        for _ in sys.stdin:
            seconds = contender.update()
            answers.write(json.dumps({"seconds": seconds, "scored": contender.run.scored}) + "\n")
            answers.flush()


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


def floor(algorithm: str, setting: Setting, lm: Any, scored: int) -> dict[str, Any]:
    """Operations that the update cannot avoid, and the seconds that they take here, by phase. The reward model reads
    `scored` tokens of responses.
    """
    args = setting.args(f"ours-{algorithm}")
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    (trunk, head), k, length = products(lm, dtype), getattr(args, "rloo_k", 1), args.response_length
    config, inner = lm.config, sum(w.numel() for w in trunk)
    queries = np.array([len(context) for context in setting.contexts(k)])
    episodes, fed = len(queries) * k, len(queries) * k * (length - 1)
    pairs = queries * (queries + 1) / 2 + k * ((length - 1) * queries + (length - 1) * length / 2)
    attention = 4 * config.num_hidden_layers * config.hidden_size * pairs.sum()
    body, logits = 2 * inner * (queries.sum() + fed) + attention, 2 * head.numel() * episodes * length
    share = min(1.0, args.micro_batch_size / args.batch_size)
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
    reward = prompt + (body - prompt) * min(1.0, scored / fed)
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


def memory(name: str, setting: Setting) -> dict[str, int]:
    """Peak of two updates of one contender in this process, or in the worker of one of TRL's."""
    if name.startswith("trl"):
        worker = setting.start(name)
        answers = [worker.ask({}) for _ in range(2)]
        worker.close()
        return answers[-1]["memory"]
    before, contender = common.baseline(common.device()), Contender(name, setting)
    for _ in range(2):  # Adam has its averages after a step only, and they are to be there together with activations
        contender.update()
    return common.used(common.device(), before)


def measure_memory(options: argparse.Namespace, folder: str) -> None:
    """Peak memory of every contender, each in a process of its own."""
    peaks = {name: common.in_child("--peak", name, folder) for name in options.contenders}
    rows, table = [], []
    for name, row in peaks.items():
        row, plain = {"contender": name} | row, peaks.get(f"plain-{CONTENDERS[name][1]}")
        if plain:
            row["memory_ratio"] = row["peak_bytes"] / plain["peak_bytes"]
        rows.append(row)
        table.append([name, f"{row['peak_bytes'] / 1e6:.0f}", f"{row['memory_ratio']:.2f}" if plain else ""])
    path = common.write("throughput", options.tag, options, rows)
    common.show(["contender", "peak MB", "of plain"], table, path.name)


def measure_speed(options: argparse.Namespace, folder: str) -> None:
    """Seconds of every contender, in turns."""
    setting, names, apart = Setting(options, folder), options.contenders, {}
    algorithms = list(dict.fromkeys(CONTENDERS[name][1] for name in names))
    for algorithm in algorithms:
        if {f"ours-{algorithm}", f"plain-{algorithm}"} <= set(names):
            apart[algorithm] = common.in_child("--check", algorithm, folder)
            if options.dtype == "fp32" and not apart[algorithm] < 0.01:
                raise SystemExit(f"{algorithm}: the steps of ours and plain are {apart[algorithm]:.2g} apart")
    lm = load(folder, setting.args(names[0]), common.device())
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    floors: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        with contextlib.ExitStack() as stack:
            workers = {name: setting.start(name) for name in names}
            for worker in workers.values():
                stack.callback(worker.close)
            answers = [{name: worker.ask({}) for name, worker in workers.items()} for _ in range(options.repeats)]
        for name in names:
            runs[name] += [answer[name]["seconds"] for answer in answers]
        ppo_rlhf.fast_math(common.device(), options.dtype)
        for algorithm in algorithms:
            either = (answers[0].get(f"{impl}-{algorithm}") for impl in ("ours", "plain"))
            again = floor(algorithm, setting, lm, next(filter(None, either))["scored"])
            least = floors.setdefault(algorithm, again)
            floors[algorithm] = min(least, again, key=lambda measured: measured["seconds"]["total"])
    rows, table = [], []
    for name in names:
        least = floors[CONTENDERS[name][1]]
        seconds = {phase: statistics.median(run[phase] for run in runs[name]) for phase in PHASES}
        row = {"contender": name, "seconds": seconds, "all_seconds": [run["total"] for run in runs[name]]}
        row |= {"episodes_per_second": options.batch_size / seconds["total"], "floor": least}
        row["tflop_per_second"] = least["gflop"]["total"] / 1e3 / seconds["total"]  # over the chip's peak it is the MFU
        row |= {"fraction_of_floor": {phase: least["seconds"][phase] / seconds[phase] for phase in least["seconds"]}}
        rows.append(row)
        cells = [f"{seconds[phase]:.3f}" for phase in PHASES] + [f"{least['seconds']['total']:.3f}"]
        table.append([name, f"{row['episodes_per_second']:.2f}", *cells, f"{row['fraction_of_floor']['total']:.0%}"])
    medians = {row["contender"]: row["seconds"] for row in rows}
    ratios: dict[str, dict[str, dict[str, float]]] = {impl: {} for impl in OTHERS}
    for name, ours in medians.items():
        impl, algorithm = CONTENDERS[name]
        for other in OTHERS if impl == "ours" else ():
            if seconds := medians.get(f"{other}-{algorithm}"):
                ratio = ratios[other][algorithm] = {phase: seconds[phase] / ours[phase] for phase in PHASES}
                cells = [f"{ratio[phase]:.2f}x" for phase in PHASES]
                table.append([f"{other} / ours, {algorithm}", f"{1 / ratio['total']:.2f}x", *cells, "", ""])
    more = {"ratios": ratios.pop("plain"), "other_ratios": ratios, "steps_apart": apart}
    path = common.write("throughput", options.tag, options, rows, **more)
    columns = ["contender", "episodes/s", *(f"{phase} s" for phase in PHASES), "floor s", "of the floor"]
    common.show(columns, table, path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=None, help="name of the record (default: shape, queries and dtype)")
    parser.add_argument("--contenders", nargs="+", default=DEFAULT, choices=CONTENDERS)
    parser.add_argument("--shape", default="tiny", help="tiny, gpt2 (124M, random weights), or a folder")
    parser.add_argument("--queries", default="book", choices=["full", "book", "tiny"],
                        help="--query_length tokens each, a mean of 16, or those of tiny/")  # fmt: skip
    parser.add_argument("--query_length", type=int, default=64)
    parser.add_argument("--response_length", type=int, default=24)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch_size", type=int, default=64, help="episodes per update")
    parser.add_argument("--micro_batch_size", type=int, default=128)
    parser.add_argument("--num_minibatches", type=int, default=1)
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--rloo_k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="times that all processes are started")
    parser.add_argument("--repeats", type=int, default=2, help="timed updates of each in a round")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of seconds")
    parser.add_argument("--trl_dir", default=None, help="where TRL's releases are installed (default: benchmark/.trl)")
    for part in PARTS:  # a contender or an algorithm, and the model's folder: what this file starts itself for
        parser.add_argument(f"--{part}", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tag = options.tag or f"{options.shape}-{options.queries}-{options.dtype}" + "-memory" * options.memory
    parts = {part: vars(options).pop(part) for part in PARTS}
    for part, words in parts.items():
        if words is not None:
            answer = PARTS[part](words[0], Setting(options, words[1]))
            sys.stdout.write(json.dumps(answer) + "\n")
            return
    for algorithm in {CONTENDERS[name][1] for name in options.contenders}:
        if not {f"ours-{algorithm}", f"plain-{algorithm}"} & set(options.contenders):
            parser.error(f"--contenders: the floor of {algorithm} needs ours-{algorithm} or plain-{algorithm}")
    with common.model_folder(options.shape) as folder:
        (measure_memory if options.memory else measure_speed)(options, folder)


PARTS = {"worker": work, "peak": memory, "check": steps_apart}

if __name__ == "__main__":
    main()
