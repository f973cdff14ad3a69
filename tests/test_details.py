"""Every row of docs/details.md names code and a test, and the test sees a fault in the code.

`pytest tests/test_details.py --faults` puts the fault of every row into its script, in a copy of
the project, and runs the row's test there, which has to fail: that takes several minutes. Without
the option it is done for two rows.
"""

import ast
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import details
import pytest
from conftest import ROOT
from details import DETAILS, Detail

QUICK = (
    "The optimizer is Adam as TensorFlow computes it, with eps outside the bias correction.",
    "Whitening uses the biased variance, and adds 1e-8 to it.",
)


def test_the_tables_are_up_to_date() -> None:
    for path, tables in details.pages().items():
        page = path.read_text()
        assert page == details.with_tables(page, tables), "run `python tests/helpers/details.py`"


@pytest.mark.parametrize("detail", DETAILS, ids=lambda detail: detail.what[:40])
def test_every_fault_can_be_made(detail: Detail) -> None:
    assert detail.place()
    assert ast.dump(details.parse(detail.code)) != ast.dump(details.Fault(detail).fault)


def test_code_is_found_by_its_syntax_alone() -> None:
    assert details.is_same(
        details.parse("f(a,  b)  # text"), details.parse("f(\n    a,\n    b,\n)")
    )
    assert not details.is_same(details.parse("f(a, b)"), details.parse("f(b, a)"))
    with pytest.raises(ValueError, match=r"in \[\]"):
        Detail("", details.PPO, "no_such_name", "1", "").place()


def copy_of_project(folder: Path) -> Path:
    ignored = (".*", "__pycache__", "runs", "wandb", "*.egg-info", "*.png")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored))
    return folder


def run_tests(nodes: list[str], folder: Path) -> tuple[int, str]:
    """pytest's status and output for these tests of a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout


def test_a_fault_in_the_code_of_a_detail_makes_its_test_fail(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    chosen = DETAILS
    if request.config.getoption("--faults", default=False):
        nodes = list(dict.fromkeys(detail.node for detail in DETAILS))
        status, printed = run_tests(nodes, copy_of_project(tmp_path / "whole"))
        assert status == 0, printed
    else:
        chosen = [detail for detail in DETAILS if detail.what in QUICK]
        assert len(chosen) == len(QUICK)

    def survives(detail: Detail) -> str:
        """What the detail's test prints in spite of the fault; nothing if it fails."""
        folder = copy_of_project(tmp_path / str(DETAILS.index(detail)))
        (folder / detail.script).write_text(detail.broken())
        status, printed = run_tests([detail.node], folder)
        shutil.rmtree(folder)
        if status != 1 or " error" in printed.splitlines()[-1]:  # 1: tests have failed
            return f"{detail.what}: {detail.node}\n{printed[-500:]}"
        return ""

    with ThreadPoolExecutor(2) as pool:
        survived = list(filter(None, pool.map(survives, chosen)))
    assert not survived, "\n".join(survived)
