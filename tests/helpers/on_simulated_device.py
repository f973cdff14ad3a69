"""Runs a script's main() on the simulated device, and lists where the host waits for it.

    python tests/helpers/on_simulated_device.py ppo_rlhf.py --total_episodes 256

Options of this program come before the script: --tf32 rounds as that does, --report FILE writes
the list as JSON, --cpu is the same run without the device.
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
from torch.utils import _pytree as pytree


def parse() -> argparse.Namespace:
    """The options, the script and its words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--report", type=Path)
    help_of_host = "what this function of the script returns comes back on the CPU: a fault"
    parser.add_argument("--host", action="append", default=[], help=help_of_host)
    parser.add_argument("script", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args()


def return_on_host(module: ModuleType, name: str) -> None:
    """From now on what the module's function returns is on the CPU, as if it did not know of a
    device."""
    function = getattr(module, name)

    def to_host(x: Any) -> Any:
        return x.cpu() if isinstance(x, torch.Tensor | torch.nn.Module) else x

    def changed(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(to_host, function(*args, **kwargs))

    setattr(module, name, changed)


def reduce_on_device_alone(module: ModuleType) -> None:
    """From now on the script's `reduce` refuses a tensor on the CPU, as NCCL does with several
    processes; with one it would do nothing."""
    function = module.reduce

    def checked(x: torch.Tensor, how: str) -> torch.Tensor:
        if x.device.type == "cpu":
            raise simulated_device.MixedDevices("reduce of a tensor on the CPU")
        return function(x, how)

    module.reduce = checked


def use_fused_adam(tf_adam: ModuleType) -> None:
    """tf_adam takes torch's fused kernels on CUDA: so it should here."""
    if hasattr(tf_adam, "can_be_fused"):
        tf_adam.can_be_fused = torch.is_floating_point


def main() -> None:
    """Runs the script; its errors are shown as a whole."""
    options = parse()
    script = options.script.resolve()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *options.words]
    if options.cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        ledger = simulated_device.install(tf32=options.tf32)
        simulated_device.OWN_FILES.append(__file__)
        use_fused_adam(importlib.import_module("tf_adam"))
    module = importlib.import_module(script.stem)
    for name in options.host:
        return_on_host(module, name)
    if not options.cpu and hasattr(module, "reduce"):
        reduce_on_device_alone(module)
    module.main(*module.parse_args())
    if options.cpu:
        return
    if options.report:
        report = {"launches": ledger.launches, "syncs": ledger.rows()}
        options.report.write_text(json.dumps(report))
        return
    for row in ledger.rows():
        sys.stdout.write("\t".join(map(str, row)) + "\n")
    sys.stdout.write(f"{ledger.launches} operations\n")


if __name__ == "__main__":
    main()
