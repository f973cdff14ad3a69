"""Options and fixtures of the tests: the scripts are imported, never copied."""

import contextlib
import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before any import of the libraries. Models here are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is tested on a GPU is in benchmark/speed/gpu.sh
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a network
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]
GOLDEN = ROOT / "tests" / "golden"
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
# What holds for any copy: not what an algorithm computes, and not the documents.
TESTS_OF_COPIES = (
    "test_consistency.py::test_every_argument_is_read",
    "test_end_to_end.py",
    "test_resume.py",
    "test_bad_input.py",
    "test_safety.py",
    "test_sampler.py",
    "test_models.py",
    "test_data.py",
    "test_engines.py",
    "test_simulated_device.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--golden, --script and --faults."""
    for name, text in (
        ("--golden", "folder with recorded arrays to replay"),
        ("--script", "a copy of a script: run the tests that hold for it, or those that are named"),
    ):
        with contextlib.suppress(ValueError):  # where the project is installed, its plugin has it
            parser.addoption(name, help=text)
    help_of_faults = "break every line that the table of details names"
    parser.addoption("--faults", action="store_true", help=help_of_faults)


def original_of(copy: Path) -> str:
    """Which of the scripts a copy was made from: the one with most lines in common."""
    lines = copy.read_text().splitlines()
    alike = {}
    for script in SCRIPTS:
        theirs = (ROOT / script).read_text().splitlines()
        alike[script] = difflib.SequenceMatcher(None, lines, theirs, autojunk=False).ratio()
    return max(alike, key=alike.get)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With --script, pytest runs in a copy of the project that has that script in the place of its
    original, and tf_adam.py from beside it."""
    if not config.getoption("--script"):
        return None
    copy = config.invocation_params.dir / config.getoption("--script")
    if not copy.is_file():
        raise pytest.UsageError(f"--script {copy}: there is no such file")
    original = original_of(copy)
    words = [*config.invocation_params.args, "--script", "", "-p", "no:cacheprovider"]
    others = [f"not {script}" for script in SCRIPTS if script != original]
    chosen = f"({config.option.keyword}) and " if config.option.keyword else ""
    words += ["-k", chosen + " and ".join(others)]
    if not config.option.file_or_dir:
        words += [f"tests/{name}" for name in TESTS_OF_COPIES]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tests", "benchmark", "tiny"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=ignored)
        for pattern in ("*.py", "*.toml", "*.md"):
            for file in ROOT.glob(pattern):
                shutil.copy(file, folder)
        shutil.copy(copy, f"{folder}/{original}")
        if copy.with_name("tf_adam.py").exists():
            shutil.copy(copy.with_name("tf_adam.py"), folder)
        sys.stderr.write(f"{copy} in the place of {original}\n")
        return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=folder).returncode


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


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Every test has its own Accelerator and the same random numbers, and leaves no setting."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    torch.set_float32_matmul_precision("highest")
    for number, handler in handlers.items():
        signal.signal(number, handler)
