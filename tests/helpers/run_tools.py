"""Running the scripts in this process; metrics and tables of the tests."""

import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import fork_tools
import pytest

from plumbing import launch as launch_module

# What metrics.jsonl says of a machine: it differs from run to run.
OF_MACHINE = ("seconds", "_memory_gb")


def call(
    script: str,
    words: Sequence[str],
    folder: Path,
    patch: pytest.MonkeyPatch | None = None,
) -> None:
    """The script's main with these words in `folder`, in this process, on the CPU. With a patch the
    process stays in the folder."""
    with pytest.MonkeyPatch.context() as own:
        patch = patch or own
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *fork_tools.complete(script, words)])
        patch.setattr(sys, "path", sys.path[:])  # to which --reward_fn adds
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(f"{folder}-cache"))
        patch.setenv("ACCELERATE_USE_CPU", "true")
        module = importlib.import_module(script[:-3])
        module.main(*launch_module.parse_args(module.Args, module.PRESETS))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of the run in `folder`, but for those of the machine."""
    rows = read_lines(folder / "metrics.jsonl")
    return [{name: row[name] for name in row if not name.endswith(OF_MACHINE)} for row in rows]


def assert_same_metrics(
    out: Path, expected: Path, says: str, but: Iterable[str] = (), **limits: float
) -> None:
    """The metrics of two runs are equal, or within pytest.approx's limits, `but` for these names.
    If they are not, `says` stands before the first that differs."""
    found = read_metrics(out)
    both = zip(found, read_metrics(expected), strict=False)
    for update, (mine, theirs) in enumerate(both, start=1):
        assert mine.keys() == theirs.keys(), f"{says}: other metrics in update {update}"
        for name in [name for name in theirs if name not in but]:
            x = theirs[name]
            right = pytest.approx(x, **limits) if limits else x
            differs = f"{name} of update {update} is {mine[name]}, not {x}"
            assert mine[name] == right, f"{says}: {differs}"
    assert len(found) == len(read_metrics(expected)), f"{says}: it has {len(found)} updates"


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def to_lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def turn(text: str, role: str = "assistant") -> list[Any]:
    return [{"role": role, "content": text}]
