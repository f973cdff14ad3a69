"""Options and fixtures of the tests: the scripts are imported, never copied."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny: more threads only wait for each other
os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of the libraries: no test may reach a network
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GOLDEN = ROOT / "tests" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # where the project is installed, pyproject.toml has registered it
        parser.addoption("--golden", help="folder with recorded arrays to replay")
    parser.addoption("--faults", action="store_true", help="break every line that README.md's table of details names")


def golden_files(config: pytest.Config, pattern: str) -> list[Path]:
    return sorted(Path(config.getoption("--golden") or GOLDEN).glob(pattern))


def pytest_configure(config: pytest.Config) -> None:
    """A --golden without recordings is an error: tests without parameters would only be skipped."""
    if not golden_files(config, "0[2-9]*.npz") + golden_files(config, "0[89]*.json"):
        raise pytest.UsageError(f"--golden {config.getoption('--golden')}: has no recordings, 02*.npz to 09*.npz")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `golden_04` runs for every file 04*.npz in the golden folder, and so on."""
    for name in metafunc.fixturenames:
        if name.startswith("golden_") and name[7:9].isdigit():
            found = (golden_files(metafunc.config, f"{name[7:]}*.{ending}") for ending in ("npz", "json"))
            files = next(filter(None, found), [])
            metafunc.parametrize(name, files, ids=[file.stem for file in files])


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Every test has its own Accelerator and the same random numbers, and leaves no setting behind."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    torch.set_float32_matmul_precision("highest")
    for number, handler in handlers.items():
        signal.signal(number, handler)
