"""What the benchmarks share: the way to the scripts, models of a shape, records of measurements."""

import argparse
import contextlib
import functools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import accelerate
import numpy as np
import pandas as pd
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py", "tf_adam.py", "plumbing")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # a new reward head is what is wanted here


# --- records --------------------------------------------------------------------------------------
@functools.cache
def git(*words: str) -> str:
    """What git prints about this repository, without touching it. It is asked once: if a process is
    started while a pool forks its workers, they can wait for each other forever."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def commit() -> str:
    """The last commit that changed what is measured, in short; with a + if it was changed since."""
    short = git("log", "-1", "--format=%h", "--", *SCRIPTS, "tiny")
    return f"{short}+" if git("diff", "--name-only", "HEAD", "--", *SCRIPTS, "tiny") else short


def source() -> dict[str, Any]:
    """Which commit of the scripts is measured, and what has changed since."""
    return {
        "commit": git("log", "-1", "--format=%H", "--", *SCRIPTS, "tiny"),
        "scripts_changed_since": git("diff", "--name-only", "HEAD", "--", *SCRIPTS).split(),
    }


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, its threads, the load of the last minute, the GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return {
        "cpu": models[0] if models else "",
        "cores": cores,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write(
    args: argparse.Namespace, rows: list[dict[str, Any]], kind: str = "", **more: Any
) -> Path:
    """Writes <tag>.json, or <kind>-<tag>.json, into the folder --out. The record says who measured
    it (version, commit, machine, load) and with which arguments, so that it can be made again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = (torch, transformers, accelerate)
    record = {
        "version": project["version"],
        **source(),
        "versions": {module.__name__: module.__version__ for module in modules},
        "machine": machine(),
        "args": {name: x for name, x in vars(args).items() if name not in ("trl_dir", "out")},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{kind}-{args.tag}.json".removeprefix("-")
    path.write_text(to_json(record | more | {"rows": rows}))
    return path


def six_digits(value: Any) -> Any:
    """The same with six significant digits of every float in it."""
    if isinstance(value, dict):
        return {name: six_digits(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [six_digits(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def to_json(record: dict[str, Any]) -> str:
    """A record as text, with each list of numbers in one line."""
    text = json.dumps(six_digits(record), indent=1)
    return re.sub(r"\[[-+.\w\s,]+\]", on_one_line, text) + "\n"


def on_one_line(numbers: re.Match) -> str:
    """A list of numbers without line breaks."""
    return f"[{' '.join(numbers[0][1:-1].split())}]"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def show(columns: Sequence[str], rows: Sequence[Sequence[Any]], *lines: Any) -> None:
    """Prints a table of words and numbers, and lines under it."""
    table = pd.DataFrame(rows, columns=columns).to_string(index=False)
    sys.stdout.write("\n".join([table, "", *map(str, lines), ""]))


def show_rows(rows: list[dict[str, Any]], *lines: Any) -> None:
    """Prints rows of equal keys as a table, floats with three digits, and lines under it."""
    cells = [[f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    show(list(rows[0]), cells, *lines)


def make_parser(text: str, program: str) -> argparse.ArgumentParser:
    """A parser whose help is the text as it stands, for a file that writes a record."""
    source()  # asks git now
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=style)
    folder = Path(program).resolve().parent
    parser.add_argument("--out", type=Path, default=folder, help="of the record (default: here)")
    return parser


# --- models and data ------------------------------------------------------------------------------
def new_accelerator(reset: bool = True) -> accelerate.Accelerator:
    """An Accelerator as the scripts make it. `reset` ends those made before; without it, all share
    one state."""
    if reset:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return accelerate.Accelerator(cpu=not torch.accelerator.is_available())


def tokenizer() -> Any:
    """That of tiny/model, whose tokens are among those of every shape."""
    return transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """A folder to load: tiny/model, a folder of the caller's, or random weights of the 124M shape
    (gpt2) or another.

    That other is named layers x width: 4x128 is tiny's shape, with its vocabulary and a longer
    window."""
    layers_and_width = re.fullmatch(r"(\d+)x(\d+)", name)
    if name != "gpt2" and not layers_and_width:
        yield str(ROOT / "tiny" / "model") if name == "tiny" else name
        return
    config = transformers.GPT2Config()
    if layers_and_width:
        layers, width = map(int, layers_and_width.groups())
        width_of_head = 64 if width >= 512 else 32
        config = transformers.GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=max(1, width // width_of_head),
            vocab_size=2816,
            bos_token_id=0,
            eos_token_id=0,
        )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        yield folder


def best_constant() -> float:
    """The accuracy on tiny's held-out labels of the best answer that is always the same."""
    labels = pd.read_parquet(ROOT / "tiny" / "labels" / "test.parquet")
    return float(labels["best"].value_counts(normalize=True).max())


def random_contexts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens: what they are changes neither time nor memory."""
    rng = np.random.default_rng([seed, 4])
    return [rng.integers(1, vocabulary, length).tolist() for length in lengths]


# --- memory ---------------------------------------------------------------------------------------
def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak(device: torch.device) -> int:
    """Bytes: the most that this process has had so far. On a GPU, what PyTorch allocated; else its
    resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    # Unlike ru_maxrss, VmHWM does not begin at the peak of the process that started this one.
    if status.exists():
        high = re.search(r"VmHWM:\s+(\d+)", status.read_text())
        return int(high[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def baseline(device: torch.device) -> int:
    """The peak after the imports, with those that transformers puts off until a first model
    generates."""
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=8,
        n_head=1,
        vocab_size=8,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    lm = transformers.GPT2LMHeadModel(config)
    ids = torch.ones(1, 2, dtype=torch.long)
    lm.generate(ids, max_new_tokens=2, pad_token_id=0).sum()
    return peak(device)


def used(device: torch.device, before: int) -> dict[str, int]:
    """Bytes that this process took at most beyond `before`, its baseline."""
    return {"peak_bytes": peak(device) - before, "baseline_bytes": before}


# --- processes ------------------------------------------------------------------------------------
def in_child(*words: str) -> Any:
    """The JSON value that this very command, given more words, prints as its last line."""
    command = [sys.executable, *sys.argv, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process that answers each line of JSON with one: its other output goes to a file, for the
    error message."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | (environment or {}),
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; its last words where there is none."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise SystemExit(f"{self.name} has ended:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the worker."""
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def private_stdout() -> Iterator[TextIO]:
    """In a worker, the real stdout for answers; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def copy_shared(folder: Path) -> None:
    """What a copy of a script needs beside it: tf_adam.py and plumbing/."""
    shutil.copy(ROOT / "tf_adam.py", folder)
    shutil.copytree(ROOT / "plumbing", folder / "plumbing", dirs_exist_ok=True)
