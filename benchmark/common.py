"""What the benchmarks share: the way to the scripts, models of a shape, and the record of a measurement."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py", "tf_adam.py")
sys.path.insert(0, str(ROOT))

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState


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


def new_accelerator(dtype: str = "fp32", steps: int = 1) -> accelerate.Accelerator:
    """An Accelerator as the scripts make it; one process may want several, of different precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    precision = {"fp32": "no"}.get(dtype, dtype)
    return accelerate.Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
