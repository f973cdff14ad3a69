"""Runs statements one by one and notes what the simulated device makes of each.

    python on_simulated_device.py statements.py IN OUT

IN is a JSON list of Python statements. OUT gets a JSON list: for each the kinds of synchronisations
that it caused, or the name of its error.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import simulated_device
import torch
from torch.nn import functional


def parse_args() -> tuple[Path, Path]:
    """IN and OUT."""
    return Path(sys.argv[1]), Path(sys.argv[2])


def names() -> dict[str, Any]:
    """What statements can use: `x` and the like are on the device, `host_x` on the CPU."""
    found = {
        "x": torch.arange(12.0).view(4, 3) / 7,
        "vector": torch.ones(3),
        "scalar": torch.tensor(2.0),
        "ids": torch.tensor([[1], [0], [2], [0]]),
        "rows": torch.tensor([2, 0]),
        "mask": torch.tensor([True, False, True, False]),
    }
    on_device = {name: value.to(simulated_device.NAME) for name, value in found.items()}
    on_host = {f"host_{name}": value for name, value in found.items()}
    tools = {"torch": torch, "np": np, "F": functional, "device": simulated_device.NAME}
    tools["bf16"] = torch.autocast(simulated_device.NAME, torch.bfloat16)
    return on_device | on_host | tools


def outcome(statement: str) -> list[str] | str:
    """Kinds of synchronisations, or the name of the error."""
    given = names()
    simulated_device.LEDGER.syncs.clear()
    try:
        exec(statement, given)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        return type(error).__name__
    return [row[1] for row in simulated_device.LEDGER.rows() for _ in range(row[0])]


def main(source: Path, target: Path) -> None:
    """All statements."""
    outcomes = [outcome(statement) for statement in json.loads(source.read_text())]
    target.write_text(json.dumps(outcomes))
