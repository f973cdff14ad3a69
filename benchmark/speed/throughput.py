"""Seconds per update, phase by phase: the scripts against plain PyTorch (plain.py), and against the
machine's floor.

Every contender is in a process of its own, so that no setting of one, its allocator's say, is
another's. They take turns, one update each, while the others wait; the least of each phase counts,
beside the median and the range, after an update of each that warms up. All are started --rounds
times, since the same code is several per cent faster or slower from one process to the next. Before
that, ours and plain make one update on the same responses; in fp32 both must then have the same
parameters.

    sample     responses
    score      log-probabilities of policy and reference, values, rewards
    optimise   all optimizer steps
    other      the rest of `total`

`plain-fast` is the plain version after the scripts' set_up_torch, with eager attention on a CPU.
Look at its ratio first: these settings gain much on one CPU, and nothing on another.

The floor is the arithmetic that no implementation of the update can leave out, at the speed of this
machine's matrix product for these weights and numbers of rows, measured in the same run: each real
token once through policy (sampling already yields its log-probability), reference and reward model,
three times that per epoch of training, logits at response tokens only, attention, and in RLOO a
query once for its K responses.

Contenders that are not in by default: `trl-..`, TRL's trainers (trl_peer.py); `ours-critic-ppo`,
ppo_rlhf.py with --critic policy, a value model of its own as TRL's PPO has, with which that is
compared too. With --memory, every contender makes two updates alone: peak memory instead of
seconds. On a CPU it is the largest resident set minus that after the imports, on a GPU what PyTorch
allocated at most.

--shape chat: responses end as in whole_run.py, and what comes after is not counted. Plain
PyTorch has no such update. The sizes are those of CHAT_SIZES, whatever the flags say. Lengths are
drawn anew in each update, so look at medians; `kept` says how many tokens the responses had.

    program=benchmark/speed/throughput.py
    python $program --queries tiny --query_length 32 --batch_size 128 --tag tiny-fp32  # the default
    python $program --shape gpt2 --batch_size 16 --repeats 1
    python $program --contenders ours-ppo ours-critic-ppo plain-fast-ppo trl-ppo
    python $program --memory
    python $program --shape chat --contenders ours-rloo trl-rloo --tag chat-rloo
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

import ppo_rlhf
from benchmark import common, ours
from benchmark.speed import trl_peer, whole_run
from benchmark.speed.plain import Plain, PlainFrozen
from plumbing.launch import set_up_torch

PHASES = ("sample", "score", "optimise", "other", "total")
OTHERS = ("plain-fast", "plain", "trl")
CONTENDERS = {"ours-critic-ppo": ("ours-critic", "ppo")}
for algorithm in ours.SCRIPTS:
    for implementation in ("ours", *OTHERS):
        CONTENDERS[f"{implementation}-{algorithm}"] = (implementation, algorithm)
DEFAULT = [f"{name}-{x}" for x in ours.SCRIPTS for name in ("ours", "plain-fast", "plain")]
SIZES = ("batch_size", "micro_batch_size", "query_length", "response_length")
SIZES += ("num_epochs", "num_minibatches", "dtype")
CHAT = {"mask_truncated": True, "truncate_token": "eos", "truncate_after": 0}
CHAT |= {"temperature": whole_run.TEMPERATURE}
CHAT_SIZES = {"batch_size": 32, "micro_batch_size": 8, "query_length": 300, "response_length": 512}


# --- contenders -----------------------------------------------------------------------------------
class Setting:
    """What all contenders of a run share: the model's folder, sizes and queries."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        self.folder = folder
        self.vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        rng = np.random.default_rng(0)
        count = options.batch_size
        longest = options.query_length
        if options.queries == "tiny":
            args = ppo_rlhf.Args()
            queries = ours.load_queries(common.tokenizer(), args, count)
            self.lengths = np.array([len(query.for_policy) for query in queries])
        elif options.queries == "book":
            self.lengths = rng.geometric(1 / 16, count).clip(1, longest)
        elif options.queries == "chat":
            self.lengths = rng.integers(40, longest + 1, count)
        else:
            self.lengths = np.full(count, longest)

    def contexts(self, copies: int) -> list[list[int]]:
        """One query per `copies` episodes, so that every contender has the same number of
        episodes."""
        return common.random_contexts(self.lengths[::copies], self.vocabulary, 0)

    def sizes(self, name: str) -> dict[str, Any]:
        """Settings of a contender that are not the scripts' defaults."""
        sizes = {size: getattr(self.options, size) for size in SIZES}
        # Random models seldom end. If the score were replaced, all rewards would be equal.
        sizes["penalty_mode"] = "add"
        if self.options.shape == "chat":
            sizes |= CHAT
        if CONTENDERS[name][1] == "rloo":
            sizes["rloo_k"] = self.options.rloo_k
        return sizes

    def args(self, name: str) -> Any:
        """All settings of a contender."""
        script = ours.SCRIPTS[CONTENDERS[name][1]]
        return script.Args(adaptive_kl_target=None, **self.sizes(name))

    def start(self, name: str) -> common.Worker:
        """A contender in a process of its own, which has made an update to warm up."""
        implementation, algorithm = CONTENDERS[name]
        if implementation.startswith("trl"):
            args = self.args(name)
            contexts = self.contexts(ours.responses_per_query(args))
            trl_dir = trl_folder(self.options)
            worker = trl_peer.Peer(algorithm, self.folder, contexts, args, trl_dir)
        else:
            worker = common.Worker(name, [*sys.argv, "--worker", name, self.folder])
        worker.ask({})
        return worker


def trl_folder(options: argparse.Namespace) -> Path:
    """Where TRL's releases are, or are to be."""
    return Path(options.trl_dir or trl_peer.FOLDER)


class Contender:
    """Something of ours, or plain, that updates."""

    def __init__(self, name: str, setting: Setting) -> None:
        implementation, algorithm = CONTENDERS[name]
        folder = setting.folder
        device = common.device()
        args = setting.args(name)
        if implementation.startswith(("ours", "plain-fast")):
            set_up_torch(args.dtype)  # before the first tensor: the allocator reads it once
        self.contexts = setting.contexts(ours.responses_per_query(args))
        if implementation.startswith("ours"):
            has_critic = implementation == "ours-critic"
            self.run = ours.Ours(algorithm, folder, has_critic, **setting.sizes(name))
            self.lm = self.run.actor.lm
            self.frozen = ours.Frozen(folder, args)
        else:
            is_fast = implementation == "plain-fast"
            self.run = Plain(algorithm, folder, device, args, is_fast)
            self.lm = self.run.lm
            self.frozen = PlainFrozen(folder, device, **self.run.attention)  # fp32 in any dtype

    def update(self, **more: Any) -> dict[str, float]:
        """Seconds of one update, by phase; `responses` may be given, as Plain's update has them."""
        seconds = dict(self.run.update(self.contexts, self.frozen, **more).seconds)
        parts = sum(seconds.values()) - seconds["total"]
        return seconds | {"other": seconds["total"] - parts}

    def weights(self) -> Tensor:
        """All parameters of the language model in a row."""
        return torch.cat([p.detach().flatten() for p in self.lm.parameters()])


def steps_apart(algorithm: str, setting: Setting) -> float:
    """How far the steps of ours and plain are apart, relative to their length, after one update on
    equal responses."""
    mine = Contender(f"ours-{algorithm}", setting)
    plain = Contender(f"plain-{algorithm}", setting)
    start = mine.weights()
    mine.update()
    plain.update(responses=mine.run.batch.responses)
    step = mine.weights() - start
    other_step = plain.weights() - start
    return ((step - other_step).norm() / step.norm()).item()


def work(name: str, setting: Setting) -> None:
    """A worker: one update for each line on stdin."""
    with common.private_stdout() as answers:
        contender = Contender(name, setting)
        for _ in sys.stdin:
            seconds = contender.update()
            torch.cuda.empty_cache()  # for the others, which share the GPU
            answers.write(json.dumps({"seconds": seconds, "scored": contender.run.scored}) + "\n")
            answers.flush()


# --- the floor ------------------------------------------------------------------------------------
def products(lm: Any, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Weights (in, out) of all matrix products below the head, and the head's."""
    head = lm.get_output_embeddings()
    trunk = []
    for module in lm.modules():
        if isinstance(module, Conv1D):
            trunk.append(module.weight.detach().to(dtype))
        elif isinstance(module, nn.Linear) and module is not head:
            trunk.append(module.weight.detach().T.to(dtype))
    return trunk, head.weight.detach().T.to(dtype)


def rate(weights: list[Tensor], rows: int, dtype: torch.dtype, budget: float = 0.6) -> float:
    """Operations per second of x @ w for x of `rows` rows and every w in turn, the best of several
    rounds."""
    rows = max(1, int(rows))
    inputs = {}
    for w in weights:
        inputs[w.shape[0]] = torch.randn(rows, w.shape[0], device=w.device).to(dtype)
    best = float("inf")
    spent = 0.0
    while spent < budget:
        start = time.perf_counter()
        for w in weights:
            inputs[w.shape[0]] @ w
        if weights[0].is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        best = min(best, seconds)
        spent += max(seconds, 1e-5)
    return sum(2 * rows * w.numel() for w in weights) / best


def floor(algorithm: str, setting: Setting, lm: Any, scored: int) -> dict[str, Any]:
    """Operations that the update cannot avoid, and the seconds that they take here, by phase. The
    reward model reads `scored` tokens of responses."""
    args = setting.args(f"ours-{algorithm}")
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    trunk, head = products(lm, dtype)
    k = ours.responses_per_query(args)
    queries = np.array([len(context) for context in setting.contexts(k)])
    episodes = len(queries) * k
    length = scored / episodes if args.mask_truncated else args.response_length
    read = length - 1  # tokens of a response that the model reads: the last predicts nothing

    # operations of everything once: products of the trunk, attention, and the head's product
    inner = 2 * sum(w.numel() for w in trunk)
    per_pair = 4 * lm.config.num_hidden_layers * lm.config.hidden_size
    num_tokens = queries.sum() + episodes * read
    query_pairs = (queries * (queries + 1) / 2).sum()
    pairs = query_pairs + k * (read * queries + read * length / 2).sum()
    body = inner * num_tokens + per_pair * pairs
    logits = 2 * head.numel() * episodes * length
    prompt = inner * queries.sum() + per_pair * query_pairs
    reward = prompt + (body - prompt) * min(1.0, scored / (episodes * read))
    operations = {
        "sample": body + logits,
        "score": body + logits + reward,
        "optimise": 3 * args.num_epochs * (body + logits),
    }

    share = min(1.0, args.micro_batch_size / args.batch_size)
    rates = {
        "trunk": rate(trunk, round(num_tokens * share), dtype),
        "head": rate([head], round(episodes * length * share), dtype),
        "prompt": rate(trunk, queries.sum(), dtype),
        "step": rate([*trunk, head], episodes, dtype),
    }
    one_pass = body / rates["trunk"] + logits / rates["head"]
    seconds = {
        "sample": prompt / rates["prompt"] + (body + logits - prompt) / rates["step"],
        "score": one_pass + reward / rates["trunk"],
        "optimise": 3 * args.num_epochs * one_pass,
    }
    for table in (operations, seconds):
        table["total"] = sum(table.values())
    return {
        "gflop": {phase: x / 1e9 for phase, x in operations.items()},
        "seconds": seconds,
        "policy_pass_seconds": one_pass,
        "gflop_per_second": {name: x / 1e9 for name, x in rates.items()},
    }


# --- memory ---------------------------------------------------------------------------------------
def memory(name: str, setting: Setting) -> dict[str, int]:
    """Peak of two updates of one contender in this process, or in the worker of one of TRL's.

    Adam has its averages after a step only, and they are to be there together with activations."""
    if name.startswith("trl"):
        worker = setting.start(name)
        answer = worker.ask({})
        worker.close()
        return answer["memory"]
    before = common.baseline(common.device())
    contender = Contender(name, setting)
    for _ in range(2):
        contender.update()
    return common.used(common.device(), before)


def measure_memory(options: argparse.Namespace, folder: str) -> None:
    """Peak memory of every contender, each in a process of its own."""
    peaks = {name: common.in_child("--peak", name, folder) for name in options.contenders}
    rows = []
    table = []
    for name, peak in peaks.items():
        row = {"contender": name} | peak
        cells = [name, f"{row['peak_bytes'] / 1e6:.0f}", ""]
        plain = peaks.get(f"plain-{CONTENDERS[name][1]}")
        if plain is not None:
            row["memory_ratio"] = row["peak_bytes"] / plain["peak_bytes"]
            cells[-1] = f"{row['memory_ratio']:.2f}"
        rows.append(row)
        table.append(cells)
    path = common.write(options, rows, "throughput")
    common.show(["contender", "peak MB", "of plain"], table, path.name)


# --- speed ----------------------------------------------------------------------------------------
def check_steps(algorithms: list[str], options: argparse.Namespace, folder: str) -> dict:
    """How far ours and plain are apart; SystemExit if that is more than rounding."""
    apart = {}
    for algorithm in algorithms:
        if {f"ours-{algorithm}", f"plain-{algorithm}"} <= set(options.contenders):
            distance = common.in_child("--check", algorithm, folder)
            if options.dtype == "fp32" and not distance < 0.01:
                raise SystemExit(f"{algorithm}: steps of ours and plain are {distance:.2g} apart")
            apart[algorithm] = distance
    return apart


def one_round(names: list[str], setting: Setting) -> dict[str, list[dict[str, Any]]]:
    """Answers of all contenders, which are started and take turns."""
    answers = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names:
            workers[name] = setting.start(name)
            stack.callback(workers[name].close)
        for _ in range(setting.options.repeats):
            for name, worker in workers.items():
                answers[name].append(worker.ask({}))
    return answers


def summarize(name: str, runs: list[dict[str, float]], least_floor: dict, batch_size: int) -> dict:
    """The row of a contender. `seconds` are the least."""
    totals = [seconds["total"] for seconds in runs]
    least = {phase: min(seconds[phase] for seconds in runs) for phase in PHASES}
    medians = {phase: statistics.median(seconds[phase] for seconds in runs) for phase in PHASES}
    floor_seconds = least_floor["seconds"]
    return {
        "contender": name,
        "seconds": least,
        "median_seconds": medians,
        "all_seconds": totals,
        "episodes_per_second": batch_size / least["total"],
        "floor": least_floor,
        # Over the chip's peak it is the model FLOPs utilisation.
        "tflop_per_second": least_floor["gflop"]["total"] / 1e3 / least["total"],
        "fraction_of_floor": {phase: x / least[phase] for phase, x in floor_seconds.items()},
    }


def compare(rows: list[dict[str, Any]], kind: str) -> dict[str, dict[str, dict[str, float]]]:
    """How many times the seconds of ours the others take, by other, algorithm and phase. That of
    TRL's PPO is also there for ours with a value model of its own."""
    of_contender = {row["contender"]: row[kind] for row in rows}
    ratios = {}
    for name, seconds in of_contender.items():
        implementation, algorithm = CONTENDERS[name]
        mine = {"": f"ours-{algorithm}"}
        if implementation.startswith("trl"):
            mine[", own critic"] = f"ours-critic-{algorithm}"
        for suffix, our_name in mine.items():
            if implementation in OTHERS and our_name in of_contender:
                our = of_contender[our_name]
                found = ratios.setdefault(implementation + suffix, {})
                found[algorithm] = {phase: seconds[phase] / our[phase] for phase in PHASES}
    order = [name + suffix for name in OTHERS for suffix in ("", ", own critic")]
    return {name: ratios[name] for name in order if name in ratios}


def show(rows: list[dict[str, Any]], ratios: dict, median_ratios: dict, name: str) -> None:
    """Prints the contenders, and how many times as long as ours the others take."""
    phases = [f"{phase} s" for phase in PHASES]
    table = []
    for row in rows:
        cells = [row["contender"], f"{row['episodes_per_second']:.2f}"]
        cells += [f"{row['seconds'][phase]:.3f}" for phase in PHASES]
        cells.append(f"{row['median_seconds']['total']:.3f}")
        cells.append(f"{max(row['all_seconds']):.3f}")
        cells.append(f"{row['fraction_of_floor']['total']:.0%}")
        table.append(cells)
    columns = ["contender, least", "episodes/s", *phases, "median", "most", "of the floor"]
    common.show(columns, table)
    table = []
    for other, of_algorithm in ratios.items():
        for algorithm, ratio in of_algorithm.items():
            cells = [f"{other} / ours, {algorithm}"]
            cells += [f"{ratio[phase]:.2f}" for phase in PHASES]
            cells.append(f"{median_ratios[other][algorithm]['total']:.2f}")
            table.append(cells)
    common.show(["ratio of the least", *PHASES, "of medians"], table, name)


def measure_speed(options: argparse.Namespace, folder: str) -> None:
    """Seconds of every contender, in turns."""
    setting = Setting(options, folder)
    names = options.contenders
    algorithms = list(dict.fromkeys(CONTENDERS[name][1] for name in names))
    apart = check_steps(algorithms, options, folder)
    lm = ours.load_lm(folder, setting.args(names[0]))
    runs = {name: [] for name in names}
    kept = {name: [] for name in names}  # tokens of responses up to their ends, in each update
    floors = {algorithm: [] for algorithm in algorithms}
    for _ in range(options.rounds):
        answers = one_round(names, setting)
        for name in names:
            runs[name] += [answer["seconds"] for answer in answers[name]]
            kept[name] += [answer["scored"] for answer in answers[name] if "scored" in answer]
        set_up_torch(options.dtype)
        os.environ.pop("PYTORCH_ALLOC_CONF", None)  # it is not for the next round's workers
        for algorithm in algorithms:
            # TRL's workers do not say how many tokens were scored.
            told = [x for name in names_with_floor(algorithm) for x in answers.get(name, [])]
            floors[algorithm].append(floor(algorithm, setting, lm, told[0]["scored"]))
    rows = []
    for name in names:
        measured = floors[CONTENDERS[name][1]]
        least_floor = min(measured, key=lambda x: x["seconds"]["total"])
        rows.append(summarize(name, runs[name], least_floor, options.batch_size))
    ratios = compare(rows, "seconds")
    median_ratios = compare(rows, "median_seconds")
    more = {
        "ratios": ratios.get("plain", {}),
        "other_ratios": {name: x for name, x in ratios.items() if name != "plain"},
        "median_ratios": median_ratios,
        "steps_apart": apart,
        "kept": kept,
    }
    path = common.write(options, rows, "throughput", **more)
    show(rows, ratios, median_ratios, path.name)


def names_with_floor(algorithm: str) -> list[str]:
    """The contenders that say what the floor of an algorithm needs."""
    return [f"{name}-{algorithm}" for name in ("ours", "plain", "plain-fast")]


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default=None, help="name of the record (default: shape, queries and dtype)")
    add("--contenders", nargs="+", default=DEFAULT, choices=CONTENDERS)
    add("--shape", default="tiny", help="tiny, gpt2 (124M, random weights), chat, or a folder")
    help_of_queries = "--query_length tokens each, a mean of 16, those of tiny/, or 40 and more"
    kinds = ["full", "book", "tiny", "chat"]
    add("--queries", default="book", choices=kinds, help=help_of_queries)
    add("--query_length", type=int, default=64)
    add("--response_length", type=int, default=24)
    add("--dtype", default="fp32", choices=["fp32", "bf16"])
    add("--batch_size", type=int, default=64, help="episodes per update")
    add("--micro_batch_size", type=int, default=128)
    add("--num_minibatches", type=int, default=1)
    add("--num_epochs", type=int, default=4)
    add("--rloo_k", type=int, default=4)
    add("--rounds", type=int, default=3, help="times that all processes are started")
    add("--repeats", type=int, default=2, help="timed updates of each in a round")
    add("--memory", action="store_true", help="peak memory instead of seconds")
    help_of_trl = "where TRL's releases are installed (default: benchmark/speed/.trl)"
    add("--trl_dir", default=None, help=help_of_trl)
    # A contender or an algorithm, and the model's folder: what this file starts itself for.
    for part in PARTS:
        add(f"--{part}", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = {part: vars(options).pop(part) for part in PARTS}
    for part, words in parts.items():
        if words is not None:
            name, folder = words
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
                setting = Setting(options, folder)
            answer = PARTS[part](name, setting)
            sys.stdout.write(json.dumps(answer) + "\n")
            return

    if options.shape == "chat":
        vars(options).update(CHAT_SIZES, queries="chat")
    if options.tag is None:
        options.tag = f"{options.shape}-{options.queries}-{options.dtype}"
        if options.memory:
            options.tag += "-memory"
    for implementation, algorithm in [CONTENDERS[name] for name in options.contenders]:
        needed = names_with_floor(algorithm)
        if not options.memory and not set(needed) & set(options.contenders):
            parser.error(f"--contenders: the floor of {algorithm} needs {' or '.join(needed)}")
        if implementation.startswith("trl"):
            trl_peer.install(algorithm, trl_folder(options))
    with model_of(options.shape) as folder:
        if options.memory:
            measure_memory(options, folder)
        else:
            measure_speed(options, folder)


@contextlib.contextmanager
def model_of(shape: str) -> Iterator[str]:
    """The folder of a model of this shape."""
    if shape == "chat":
        with whole_run.base_model(shape) as (_, folder):
            yield folder
    else:
        with common.model_folder(shape) as folder:
            yield folder


PARTS = {"worker": work, "peak": memory, "check": steps_apart}

if __name__ == "__main__":
    main()
