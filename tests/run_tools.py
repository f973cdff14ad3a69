"""Running the scripts in the tests: in this process, or as a user does."""

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import ROOT

# `accelerate launch --cpu` starts one process only, whatever --num_processes says: two on a CPU are launched as on GPUs
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


def run_script(script: str, words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python script words` in `folder`, in this process, on the CPU. What libraries log goes where stderr goes now."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *words])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder.with_name(f"{folder.name}-cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name in (None, "transformers", "datasets", "accelerate"):
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:
                monkeypatch.setattr(handler, "stream", sys.stderr)
    precision, handler = torch.get_float32_matmul_precision(), signal.getsignal(signal.SIGINT)
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        torch.set_float32_matmul_precision(precision)
        signal.signal(signal.SIGINT, handler)


def start(words: Sequence[str], folder: Path, **env: str) -> subprocess.Popen:
    """A process `python words` in `folder`: one thread, no GPU, no network, caches of its own."""
    given = {name: value for name, value in os.environ.items() if name not in RANKS}
    given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": f"{folder}-cache"} | env
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=given, text=True, encoding="utf-8", **pipes)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def to_lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
