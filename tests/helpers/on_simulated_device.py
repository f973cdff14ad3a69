"""Runs a script's main() on the simulated device, and lists where the host waits for it.

    python tests/helpers/on_simulated_device.py ppo_rlhf.py --total_episodes 256

Options of this program come before the script: --tf32 rounds as that does, --report FILE writes
the list as JSON, as it was after each update, --cpu is the same run without the device.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import simulated_device
import torch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--report", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args()


def reduce_on_device_alone(module: ModuleType) -> None:
    """From now on `reduce` refuses a tensor on the CPU, as NCCL does with several
    processes; with one it would do nothing."""
    function = module.reduce

    def checked(x: torch.Tensor, how: str) -> torch.Tensor:
        if x.device.type == "cpu":
            raise simulated_device.MixedDevices("reduce of a tensor on the CPU")
        return function(x, how)

    module.reduce = checked


def note_updates(ledger: simulated_device.Ledger) -> list[Any]:
    """A list that gets the ledger's rows whenever metrics.jsonl is opened, as after each update."""
    found = []

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and str(values[0]).endswith("metrics.jsonl"):
            found.append(ledger.rows())

    sys.addaudithook(watch)
    return found


def main() -> None:
    options = parse()
    script = options.script.resolve()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *options.words]
    if options.cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        ledger = simulated_device.install(tf32=options.tf32)
        simulated_device.OWN_FILES.append(__file__)
    module = importlib.import_module(script.stem)
    if not options.cpu:
        updates = note_updates(ledger)
        reduce_on_device_alone(importlib.import_module("tf_adam"))
    module.main(*module.parse_args())
    if options.cpu:
        return
    if options.report:
        report = {"launches": ledger.launches, "updates": updates}
        options.report.write_text(json.dumps(report))
        return
    for row in ledger.rows():
        sys.stdout.write("\t".join(map(str, row)) + "\n")
    sys.stdout.write(f"{ledger.launches} operations\n")


if __name__ == "__main__":
    main()
