"""Copies of the scripts with a patch of benchmark/systems applied, for tests."""

import atexit
import functools
import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from conftest import ROOT

from benchmark.common import copy_shared

SYSTEMS = ROOT / "benchmark" / "systems"
PATCHES = {path.stem: path for path in sorted(SYSTEMS.glob("*.patch"))}
ARGS = {path.stem: path for path in sorted(SYSTEMS.glob("*.args"))}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


make = load(SYSTEMS / "make.py")


@functools.cache
def folder() -> Path:
    """Of all copies, with tf_adam.py and plumbing/ beside them."""
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    copy_shared(made)
    return made


@functools.cache
def script(name: str) -> Path:
    """A copy of the system's script with its patch, which has to apply as it is."""
    return make.patched(name, folder() / f"{name}.py")


def copy_of(base: str, name: str, to: Path) -> Path:
    """A copy of any script with this patch in a new folder, for patches of more than one script."""
    copy_shared(to)
    return make.patched(name, to / f"{name}_copy.py", script=base)


@functools.cache
def module(name: str) -> ModuleType:
    return load(script(name))


def flags(name: str) -> list[str]:
    return re.sub("#.*", "", ARGS[name].read_text()).split()


def batch(name: str, **parts: Any) -> Any:
    """A micro-batch for a loss, of these parts alone."""
    needed = "contexts responses lengths found_end loss_mask sampled_logprobs".split()
    return module(name).Batch(**dict.fromkeys(needed) | {"num_tokens": []} | parts)
