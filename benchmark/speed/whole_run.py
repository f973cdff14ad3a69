"""Whole runs of a script, as a user starts them: seconds per update and in all, and peak memory.

    python benchmark/speed/whole_run.py --tag tiny -- ppo_rlhf.py --reward_fn tiny.rewards:happy
    python benchmark/speed/whole_run.py --tag 7b --shape llama-7b -- ppo_rlhf.py --lora_rank 16 ..
    python benchmark/speed/whole_run.py --tag x --other ../old        # all the works of BARS
    python benchmark/speed/whole_run.py --tag x --other ../old --shape gpt2 --queries book -- ..
    python benchmark/speed/whole_run.py --tag chat --other ../old --bars chat-ppo chat-rloo

With --other every run is compared with the same of another checkout, whose flags have to be the
same, but for those of --own, which only the runs of this checkout have. Each run is a process of
its own; those of the two checkouts take turns, --rounds times, each round in the other order, and
the least seconds count, beside their range.

Seconds per update are those between the first and the last line of metrics.jsonl, so that the first
update warms up. `whole` has the script's imports, loading, evaluation and saving too. Peak memory
is that of the whole run beyond common.baseline; "before saving" is the peak up to the last line of
metrics.jsonl.

--shape names a model of random weights that --base_model then is: see common.model_folder, or
llama-7b, whose 6.5 billion weights (tiny's vocabulary) are made in bf16, or chat: tiny's shape,
whose every token ends a response with the same probability. --queries book: random tokens, a mean
of 16 and up to 64; chat: 40 to 300. Writes whole_run-<tag>.json.
"""

import argparse
import contextlib
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers

from benchmark import common

LLAMA_7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
}
QUERY_LENGTH = 64
NUM_QUERIES = 512
TINY = "--reward_fn tiny.rewards:happy --checkpoint_every 0 --total_episodes 1280"
GPT2 = "--reward_fn whole_run:letters --checkpoint_every 0 --penalty_mode add --lr 1e-6"
GPT2 += " --eval_queries 16 --micro_batch_size 16"
SHORT = f"{GPT2} --batch_size 16 --total_episodes 48"
LONG = f"{GPT2} --batch_size 64 --total_episodes 128"
# Answers of hh-rlhf (harmless, test) have a mean of 35 words, about 46 tokens, and nearly the
# quantiles of a geometric distribution: 5, 50 and 95 % have 4, 24 and 101 words.
CHAT_MEAN = 46
TEMPERATURE = 0.7
CHAT = "--reward_fn whole_run:letters --checkpoint_every 0 --lr 1e-6 --eval_queries 8"
CHAT += f" --response_length 512 --mask_truncated --truncate_token eos --temperature {TEMPERATURE}"
CHAT += " --truncate_after 0 --batch_size 32 --micro_batch_size 8 --total_episodes 96"
MEMORY_BAR = 1.15
# What a new version may take of an old one's time: shape, queries, script, flags, and the ratio.
BARS = {
    "tiny-ppo-fp32": (None, None, f"ppo_rlhf.py {TINY}", 1.10),
    "tiny-rloo-fp32": (None, None, f"rloo_rlhf.py {TINY}", 1.10),
    "tiny-ppo-bf16": (None, None, f"ppo_rlhf.py {TINY} --dtype bf16", 1.10),
    "tiny-rloo-bf16": (None, None, f"rloo_rlhf.py {TINY} --dtype bf16", 1.10),
    "gpt2-rloo-16": ("gpt2", "book", f"rloo_rlhf.py {SHORT}", 1.10),
    "gpt2-ppo-16": ("gpt2", "book", f"ppo_rlhf.py {SHORT}", 1.25),
    "gpt2-ppo-64": ("gpt2", "book", f"ppo_rlhf.py {LONG}", 1.10),
    "chat-ppo": ("chat", "chat", f"ppo_rlhf.py {CHAT}", 1.10),
    "chat-rloo": ("chat", "chat", f"rloo_rlhf.py {CHAT}", 1.10),
}


def letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that tells the responses of a random model apart."""
    return [len(text) / 10 for text in completions]


def let_all_tokens_end(folder: str) -> None:
    """Gives the token 0, which is the eos, the same probability everywhere: one in CHAT_MEAN, up to
    rounding of the other tokens' share. What a layer norm gives has no mean, so only its bias meets
    a row of equal weights."""
    lm = transformers.GPT2LMHeadModel.from_pretrained(folder)
    size, width = lm.lm_head.weight.shape
    with torch.no_grad():
        others = (lm.lm_head.weight[1:].std() * width**0.5 / TEMPERATURE).square() / 2
        logit = TEMPERATURE * (math.log((size - 1) / (CHAT_MEAN - 1)) + others)
        lm.transformer.ln_f.bias.fill_(1 / width**0.5)
        lm.lm_head.weight[0] = logit / width**0.5
    lm.save_pretrained(folder)


# --- one run --------------------------------------------------------------------------------------
@contextlib.contextmanager
def base_model(shape: str | None) -> Iterator[list[str]]:
    """The flag that names a model of this shape, which comes with tiny's tokenizer."""
    if shape is None:
        yield []
    elif shape == "chat":
        with common.model_folder("4x128") as folder:
            let_all_tokens_end(folder)
            common.tokenizer().save_pretrained(folder)
            yield ["--base_model", folder]
    elif shape != "llama-7b":
        with common.model_folder(shape) as folder:
            common.tokenizer().save_pretrained(folder)
            yield ["--base_model", folder]
    else:
        tokenizer = common.tokenizer()
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **LLAMA_7B
        )
        with tempfile.TemporaryDirectory() as folder:
            with torch.device(common.device()):
                lm = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
            lm.save_pretrained(folder)
            del lm
            torch.cuda.empty_cache()  # the run, another process, is to have it
            tokenizer.save_pretrained(folder)
            yield ["--base_model", folder]


@contextlib.contextmanager
def query_dataset(kind: str | None) -> Iterator[list[str]]:
    """Flags that name a file of random queries with the lengths of a book's sentences, or of a
    chat; without a kind, none."""
    if kind is None:
        yield []
        return
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 16, NUM_QUERIES).clip(1, QUERY_LENGTH)
    if kind == "chat":
        lengths = rng.integers(40, 301, NUM_QUERIES)
    contexts = common.random_contexts(lengths, len(common.tokenizer()), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queries.jsonl"
        lines = [json.dumps({"query": context}) + "\n" for context in contexts]
        path.write_text("".join(lines))
        flags = ["--query_dataset", str(path), "--query_length", str(max(lengths))]
        yield [*flags, "--start_text", "None", "--end_text", "None"]


def run_here(checkout: str, script: str, flags: list[str]) -> dict[str, Any]:
    """Runs a checkout's script in this process, which is to have run nothing else."""
    device = common.device()
    before = common.baseline(device)
    os.chdir(checkout)
    sys.path.remove(str(common.ROOT))
    sys.path.insert(0, checkout)
    times = []
    peaks = []
    dump = json.dumps

    def timed(x: Any, *args: Any, **kwargs: Any) -> str:
        """The scripts write a line of metrics per update."""
        if isinstance(x, dict) and common.episode(x):
            times.append(time.perf_counter())
            peaks.append(common.used(device, before)["peak_bytes"])
        return dump(x, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        json.dumps = timed
        sys.argv = [script, *flags, "--output_dir", str(out)]
        start = time.perf_counter()
        runpy.run_path(str(Path(checkout) / script), run_name="__main__")
        whole = time.perf_counter() - start
        json.dumps = dump
        metrics = common.read_lines(out / "metrics.jsonl")
    last = metrics[-1]
    row = {
        "updates": len(metrics),
        "episodes": common.episode(last),
        "whole_seconds": whole,
        "loop_peak_bytes": peaks[-1],
        "scores": last["objective/scores"],
        "kl": last["objective/kl"],
        "first_ratio_error": max(x["first_ratio_error"] for x in metrics),
    }
    row |= common.used(device, before)
    if len(times) > 1:
        row["seconds_per_update"] = (times[-1] - times[0]) / (len(times) - 1)
        row["episodes_per_second"] = common.episode(metrics[0]) / row["seconds_per_update"]
    return row


def run(checkout: Path, script: str, flags: list[str]) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--run", json.dumps([str(checkout), script, flags])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} of {checkout} has failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- several runs ---------------------------------------------------------------------------------
def spread(runs: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Least, median and largest of a figure of several runs."""
    values = [row[name] for row in runs]
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def measure(
    checkouts: dict[str, Path],
    shape: str | None,
    queries: str | None,
    command: list[str],
    rounds: int,
    own: str = "",
) -> dict[str, list[dict[str, Any]]]:
    """The runs of each checkout, which take turns; those of `ours` have the flags `own`, too."""
    script, *flags = command
    runs = {name: [] for name in checkouts}
    with base_model(shape) as model_flags, query_dataset(queries) as query_flags:
        for i in range(rounds):
            order = list(checkouts)
            if i % 2 == 1:
                order.reverse()
            for name in order:
                given = [*model_flags, *query_flags, *flags]
                if name == "ours":
                    given += own.split()
                runs[name].append(run(checkouts[name], script, given))
    return runs


def compare(name: str, runs: dict[str, list[dict[str, Any]]], bar: float | None) -> dict[str, Any]:
    """The row of a work: ratios, ours to the other's, of the least seconds and bytes."""
    row = {"work": name, "bar": bar}
    measured = {"seconds": "seconds_per_update", "whole": "whole_seconds"}
    measured |= {"memory": "peak_bytes", "loop_memory": "loop_peak_bytes"}
    for short, figure in measured.items():
        found = {checkout: spread(rows, figure) for checkout, rows in runs.items()}
        row[short] = found
        row[f"{short}_ratio"] = found["ours"]["least"] / found["other"]["least"]
    row["is_met"] = row["memory_ratio"] <= MEMORY_BAR
    if bar is not None:
        row["is_met"] = row["is_met"] and row["seconds_ratio"] <= bar
    return row | {"runs": runs}


def table_row(row: dict[str, Any]) -> list[str]:
    """What is shown of a comparison."""
    cells = [row["work"]]
    for checkout in ("ours", "other"):
        seconds = row["seconds"][checkout]
        cells.append(f"{seconds['least']:.2f} ({seconds['median']:.2f}, {seconds['most']:.2f})")
    cells.append(f"{row['seconds_ratio']:.2f}")
    cells.append("" if row["bar"] is None else f"{row['bar']:.2f}")
    for name in ("whole", "memory", "loop_memory"):
        cells.append(f"{row[f'{name}_ratio']:.2f}")
    return [*cells, "yes" if row["is_met"] else "NO"]


def describe(checkout: Path) -> dict[str, str]:
    """Version and commit of another checkout."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    command = ["git", "--no-optional-locks", "-C", str(checkout), "log", "-1", "--format=%H"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"version": project["version"], "commit": done.stdout.strip()}


def compare_all(other: Path, options: argparse.Namespace) -> None:
    """Runs of this checkout and the other in turn; exit status 1 if a bar is not met."""
    checkouts = {"ours": common.ROOT, "other": other}
    works = {}
    for name in options.bars:
        shape, queries, command, bar = BARS[name]
        works[name] = (shape, queries, [*command.split(), *options.more.split()], bar)
    if options.command:
        works = {options.tag: (options.shape, options.queries, options.command, None)}
    rows = []
    for name, (shape, queries, command, bar) in works.items():
        sys.stderr.write(f"{time.strftime('%X')} {name}\n")
        runs = measure(checkouts, shape, queries, command, options.rounds, options.own)
        row = {"command": " ".join(command), "shape": shape, "queries": queries}
        row["own"] = options.own
        rows.append(row | compare(name, runs, bar))
        path = common.write(options, rows, "whole_run", other=describe(other))
    columns = ["work", "ours: least s (median, most)", "other", "ratio", "bar"]
    columns += ["whole run", "peak memory", "before saving", f"met, memory <= {MEMORY_BAR}"]
    common.show(columns, [table_row(row) for row in rows], path.name)
    missed = [row["work"] for row in rows if not row["is_met"]]
    if missed:
        raise SystemExit(f"not met: {', '.join(missed)}")


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", help="name of the record")
    add("--other", type=Path, default=None, help="the folder of another checkout")
    add("--bars", nargs="+", default=list(BARS), choices=BARS, help="with --other and no command")
    add("--more", default="", help="more flags for all works of --bars, in one word")
    add("--own", default="", help="more flags for this checkout, but not for --other, in one word")
    add("--rounds", type=int, default=None, help="runs of each (default: 1; with --other 3)")
    add("--shape", default=None, help="a model of random weights (default: what the flags say)")
    add("--queries", default=None, choices=["book", "chat"], help="(default: what the flags say)")
    # A checkout, a script and its flags: what this file starts itself for.
    add("--run", type=json.loads, default=None, help=argparse.SUPPRESS)
    add("command", nargs="*", metavar="script flags", help="after --")
    options = parser.parse_args()
    given = vars(options).pop("run")
    if given is not None:
        with common.private_stdout() as answers:
            answers.write(json.dumps(run_here(*given)) + "\n")
        return
    other = vars(options).pop("other")  # its place says nothing to others
    if options.tag is None:
        parser.error("--tag is needed")
    if other is None and not options.command:
        parser.error("give a script and its flags after --, or --other")
    if other is not None:
        options.rounds = options.rounds or 3
        compare_all(other.resolve(), options)
        return

    options.rounds = options.rounds or 1
    checkouts = {"ours": common.ROOT}
    runs = measure(checkouts, options.shape, options.queries, options.command, options.rounds)
    rows = [{"script": options.command[0]} | row for row in runs["ours"]]
    path = common.write(options, rows, "whole_run")
    common.show_rows(rows, path.name)


if __name__ == "__main__":
    main()
