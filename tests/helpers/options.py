"""pytest's options --golden, --faults and --script, and what a plain `pytest` leaves out.

pyproject.toml loads this file with -p, so early that a script is not taken for the path of a test.
"""

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
# What holds for any copy: not what an algorithm computes, and not the documents.
TESTS_OF_COPIES = """test_consistency.py::test_every_argument_is_read test_end_to_end.py
    test_run_folder.py test_hostile_input.py test_checks.py test_rollout.py test_forward_passes.py
    test_models.py test_data.py test_engines.py test_simulated_device.py
    test_own_changes.py""".split()
LEFT_OUT = "it calls {} as the original has it, and the copy has it in another way"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", help="folder with recorded arrays to replay")
    text = "a copy of a script: run the tests that hold for it, or those that are named"
    parser.addoption("--script", help=text)
    text = "flags for every run of the copy, for example '--kl_coef 0.1'"
    parser.addoption("--script_flags", default="", help=text)
    text = "break every line that the table of details names"
    parser.addoption("--faults", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked as long run with `-m long`, and where their file is named."""
    if config.option.markexpr or config.option.file_or_dir:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


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
    env["COPIED_FROM"] = str(ROOT / original)
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


# --- in the pytest that runs the tests of a copy --------------------------------------------------
def signatures(script: Path) -> dict[str, list[str]]:
    """What each function takes, and what each class has, of those at the top of a script."""
    found = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [ast.unparse(node.args)]
        elif isinstance(node, ast.ClassDef):
            fields = [ast.unparse(x) for x in node.body if isinstance(x, ast.AnnAssign)]
            methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
            found[node.name] = fields + [f"{x.name} {ast.unparse(x.args)}" for x in methods]
    return found


def changed_names() -> list[str]:
    """Functions and classes of the original that the copy has in another way, or not at all."""
    ours = signatures(Path(os.environ["COPIED_FROM"]))
    theirs = signatures(ROOT / os.environ["COPIED_SCRIPT"])
    return [name for name in ours if theirs.get(name) != ours[name]]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """A test that cannot call a function of the copy, whose signature has changed, has not failed.
    The error must come from a line of the tests: in the copy it is the copy's."""
    outcome = yield
    report = outcome.get_result()
    if not os.environ.get("COPIED_SCRIPT") or not report.failed:
        return
    place = Path(str(call.excinfo.traceback[-1].path))
    is_ours = place.is_relative_to(ROOT / "tests") or place.is_relative_to(ROOT / "benchmark")
    if is_ours and isinstance(call.excinfo.value, TypeError | AttributeError):
        for name in changed_names():
            if re.search(rf"\b{name}\b", str(call.excinfo.value)):
                report.outcome = "skipped"
                report.longrepr = (str(item.path), 0, f"Skipped: {LEFT_OUT.format(name)}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests of a copy say nothing about."""
    if not os.environ.get("COPIED_SCRIPT"):
        return
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple) and LEFT_OUT[-20:] in report.longrepr[2]:
            terminalreporter.line(f"LEFT OUT {report.nodeid}: {report.longrepr[2][9:]}")
    if not os.environ.get("SCRIPT_FLAGS"):
        terminalreporter.line("What is off by default was not tested: turn it on by --script_flags")
