"""What the benchmarks share: the way to the scripts, models of a shape, and the record of a measurement."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py", "tf_adam.py")
sys.path.insert(0, str(ROOT))
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # a new reward head is what is wanted here


def git(*words: str) -> str:
    """What git prints about this repository, without touching it."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, threads that it does use, and the GPU if there is one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": models[0] if models else "", "cores": cores, "threads": torch.get_num_threads(), "gpu": gpu}


def write(name: str, tag: str, args: argparse.Namespace, rows: list[dict[str, Any]], **more: Any) -> Path:
    """results/<name>-<tag>.json with commit, versions, machine and arguments, so that a figure can be made again."""
    record = {
        "commit": git("rev-parse", "HEAD"),
        "scripts_changed_since": git("diff", "--name-only", "HEAD", "--", *SCRIPTS).split(),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, accelerate)},
        "machine": machine(),
        "args": vars(args),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{tag}.json"
    path.write_text(json.dumps(record | more | {"rows": rows}, indent=1) + "\n")
    return path


def new_accelerator(dtype: str = "fp32", steps: int = 1, reset: bool = True) -> accelerate.Accelerator:
    """An Accelerator as the scripts make it. `reset` ends those made before; without it, all share one precision."""
    if reset:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    precision = {"fp32": "no"}.get(dtype, dtype)
    cpu = not torch.accelerator.is_available()
    return accelerate.Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps, cpu=cpu)


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """A folder to load: tiny/model, a folder of the caller's, or for gpt2 the 124M shape with random weights."""
    if name != "gpt2":
        yield str(ROOT / "tiny" / "model") if name == "tiny" else name
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
        yield folder


def random_contexts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens: what they are changes neither time nor memory."""
    rng = np.random.default_rng([seed, 4])
    return [rng.integers(1, vocabulary, length).tolist() for length in lengths]
