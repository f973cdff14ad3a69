"""Fixtures of the tests: the scripts are imported, never copied. helpers/options.py has pytest's
options."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before any import of the libraries. Models here are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is tested on a GPU is in benchmark/speed/gpu.sh
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a network
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]
GOLDEN = ROOT / "tests" / "golden"
# Tests that are started in the background have SIGINT ignored, and runs would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def golden_files(config: pytest.Config, pattern: str) -> list[Path]:
    """The recordings of this name, in the folder of --golden or in the project's."""
    return sorted(Path(config.getoption("--golden") or GOLDEN).glob(pattern))


def pytest_configure(config: pytest.Config) -> None:
    """A --golden without recordings is an error: tests without parameters are only skipped."""
    patterns = ("0[2-9]*.npz", "0[89]*.json", "trl*.json", "rloo*.json")  # the latter: test_trl.py
    if not any(golden_files(config, pattern) for pattern in patterns):
        folder = config.getoption("--golden")
        raise pytest.UsageError(f"--golden {folder}: has no recordings, 02*.npz to 09*.npz")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `golden_04` runs for every file 04*.npz, or else 04*.json."""
    for name in metafunc.fixturenames:
        if name.startswith("golden_") and name[7:9].isdigit():
            arrays = golden_files(metafunc.config, f"{name[7:]}*.npz")
            files = arrays or golden_files(metafunc.config, f"{name[7:]}*.json")
            metafunc.parametrize(name, files, ids=[file.stem for file in files])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the models and data that fork_tools.WORDS names."""
    import fork_tools

    return fork_tools.copy(fork_tools.kit(), tmp_path)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Every test has its own Accelerator and the same random numbers, and leaves no setting. The
    libraries are imported here: `pytest --script` starts a pytest that needs none."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)  # what the scripts' functions ask for
    torch.manual_seed(0)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    torch.set_float32_matmul_precision("highest")
    for number, handler in handlers.items():
        signal.signal(number, handler)
