"""Runs a script's main() on the simulated device, and reports where the host waits for it.

    python tests/helpers/on_simulated_device.py ppo_rlhf.py --total_episodes 256

The report is JSON. It has the number of operations, and a list of synchronisations after each
update. `--report FILE`, before the script, writes it to a file.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import accelerate.utils
import simulated_device
import torch


def reduce_on_device_alone() -> None:
    """From now on `reduce` refuses a tensor on the CPU, as NCCL does with several processes; with
    one it would do nothing."""
    function = accelerate.utils.reduce

    def checked(x: torch.Tensor, how: str) -> torch.Tensor:
        if x.device.type == "cpu":
            raise simulated_device.MixedDevices("reduce of a tensor on the CPU")
        return function(x, how)

    accelerate.utils.reduce = checked  # before a script imports it


def note_updates(ledger: simulated_device.Ledger) -> list[Any]:
    """A list that gets the ledger's rows whenever metrics.jsonl is opened, as after each update."""
    found = []

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and str(values[0]).endswith("metrics.jsonl"):
            found.append(ledger.rows())

    sys.addaudithook(watch)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", default="/dev/stdout")
    parser.add_argument("script", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    script = options.script.resolve()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *options.words]
    ledger = simulated_device.install()
    updates = note_updates(ledger)
    reduce_on_device_alone()
    module = importlib.import_module(script.stem)
    launch_module = importlib.import_module("plumbing.launch")  # what is beside the script
    module.main(*launch_module.parse_args(module.Args, module.PRESETS))
    report = {"launches": ledger.launches, "updates": updates}
    Path(options.report).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
