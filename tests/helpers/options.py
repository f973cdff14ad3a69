"""pytest's options --golden, --faults and --script. pyproject.toml loads this file with -p, so
early that a script is not taken for the path of a test."""

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
# What holds for any copy: not what an algorithm computes, and not the documents.
TESTS_OF_COPIES = """test_consistency.py::test_every_argument_is_read test_end_to_end.py
    test_run_folder.py test_hostile_input.py test_checks.py test_rollout.py test_forward_passes.py
    test_models.py test_data.py test_engines.py test_simulated_device.py""".split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", help="folder with recorded arrays to replay")
    text = "a copy of a script: run the tests that hold for it, or those that are named"
    parser.addoption("--script", help=text)
    text = "flags for every run of the copy, for example '--kl_coef 0.1'"
    parser.addoption("--script_flags", default="", help=text)
    text = "break every line that the table of details names"
    parser.addoption("--faults", action="store_true", help=text)


def original_of(copy: Path) -> str:
    """Which of the scripts a copy was made from: the one with most lines in common."""
    lines = copy.read_text().splitlines()

    def likeness(script: str) -> float:
        theirs = (ROOT / script).read_text().splitlines()
        return difflib.SequenceMatcher(None, lines, theirs, autojunk=False).ratio()

    return max(SCRIPTS, key=likeness)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With --script, pytest runs in a copy of the project that has that script in the place of its
    original, and tf_adam.py and plumbing/ from beside it."""
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
    # fork_tools has what these mean for a run.
    flags = config.getoption("--script_flags")
    env = os.environ | {"COPIED_SCRIPT": original, "SCRIPT_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("tests", "benchmark", "tiny", "docs", "plumbing"):
            shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=ignored)
        for pattern in ("*.py", "*.toml", "*.md"):
            for file in ROOT.glob(pattern):
                shutil.copy(file, folder)
        shutil.copy(copy, f"{folder}/{original}")
        if copy.with_name("tf_adam.py").exists():
            shutil.copy(copy.with_name("tf_adam.py"), folder)
        if copy.with_name("plumbing").is_dir():
            places = (copy.with_name("plumbing"), f"{folder}/plumbing")
            shutil.copytree(*places, ignore=ignored, dirs_exist_ok=True)
        sys.stderr.write(f"{copy} in the place of {original}\n")
        command = [sys.executable, "-m", "pytest", *words]
        return subprocess.run(command, cwd=folder, env=env).returncode
