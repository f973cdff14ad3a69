"""Every row of docs/details.md names code and a test, and the test sees a fault in the code.

`pytest tests/test_details.py --faults` puts the fault of every row into its script, in a copy of
the project, and runs the row's test there, which has to fail: that takes several minutes. Without
the option it is done for two rows.
"""

import ast
import shutil
from pathlib import Path

import fork_tools
import pytest
from conftest import ROOT

from benchmark.tools import details
from benchmark.tools.details import DETAILS, Detail

QUICK = (
    "The optimizer is Adam as TensorFlow computes it, with eps outside the bias correction.",
    "Whitening uses the biased variance, and adds 1e-8 to it.",
)


def test_the_tables_are_up_to_date():
    for path, tables in details.pages().items():
        page = path.read_text()
        assert page == details.with_tables(page, tables), "run `python benchmark/tools/details.py`"


@pytest.mark.parametrize("detail", DETAILS, ids=lambda detail: detail.what[:40])
def test_every_fault_can_be_made(detail):
    assert detail.place()
    assert ast.dump(details.parse(detail.code)) != ast.dump(details.Fault(detail).fault)


def begin(nodes: list[str], folder: Path, detail: Detail | None = None):
    """Starts pytest on these tests in a copy of the project, with a fault in a detail's code."""
    ignored = (".*", "__pycache__", "runs", "wandb", "*.egg-info", "*.png")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored))
    if detail is not None:
        (folder / detail.script).write_text(detail.broken())
    words = ["-x", "-n0", "-p", "no:cacheprovider", *nodes]
    return fork_tools.begin(fork_tools.PYTEST, words, folder, (fork_tools.forget_project,))


def end(process, folder: Path) -> tuple[int, str]:
    """pytest's status and output."""
    process.join(900)
    status, printed, _ = fork_tools.end(process, folder)
    shutil.rmtree(folder)
    return status, printed


def test_a_fault_in_the_code_of_a_detail_makes_its_test_fail(tmp_path, request):
    """Two at a time."""
    chosen = [detail for detail in DETAILS if detail.what in QUICK]
    assert len(chosen) == len(QUICK)
    if request.config.getoption("--faults", default=False):
        chosen = DETAILS
        nodes = list(dict.fromkeys(detail.node for detail in DETAILS))
        folder = tmp_path / "whole"
        status, printed = end(begin(nodes, folder), folder)
        assert status == 0, printed

    survived = []
    for i in range(0, len(chosen), 2):
        running = {}
        for detail in chosen[i : i + 2]:
            folder = tmp_path / str(DETAILS.index(detail))
            running[folder] = begin([detail.node], folder, detail)
        for (folder, process), detail in zip(running.items(), chosen[i : i + 2], strict=True):
            status, printed = end(process, folder)
            if status != 1 or " error" in printed.splitlines()[-1]:  # 1: tests have failed
                survived.append(f"{detail.what}: {detail.node}\n{printed[-500:]}")
    assert not survived, "\n".join(survived)
