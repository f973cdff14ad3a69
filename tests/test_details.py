"""Every row of docs/details.md names code and a test, and the test sees a fault in the code.

`pytest tests/test_details.py --faults` puts the fault of every row into its script, in a copy of
the project, and runs the row's test there, which has to fail: that takes several minutes. Without
the option it is done for two rows.
"""

import ast
import dataclasses
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from benchmark.tools import details
from benchmark.tools.details import DETAILS

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


def test_code_that_stands_twice_is_no_place():
    twice = dataclasses.replace(DETAILS[0], script="ppo_rlhf.py", code="args.temperature")
    with pytest.raises(ValueError, match="^ppo_rlhf.py has `args.temperature` in "):
        twice.place()


def start(nodes, folder, detail=None):
    """Starts pytest on these tests in a copy of the project, with a fault in a detail's code."""
    ignored = (".*", "__pycache__", "runs", "wandb", "*.egg-info", "*.png")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored))
    if detail is not None:
        (folder / detail.script).write_text(detail.broken())
    flags = "-m pytest -x -n0 -p no:cacheprovider".split()
    command = [sys.executable, *flags, *nodes]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_fault_in_the_code_of_a_detail_makes_its_test_fail(tmp_path, request):
    """Two at a time."""
    chosen = [detail for detail in DETAILS if detail.what in QUICK]
    assert len(chosen) == len(QUICK)
    if request.config.getoption("--faults", default=False):
        chosen = DETAILS
        nodes = list(dict.fromkeys(detail.node for detail in DETAILS))
        process = start(nodes, tmp_path / "whole")
        printed, _ = process.communicate(timeout=900)
        assert process.returncode == 0, printed

    survived = []
    folder = tmp_path / "faults"
    for i in range(0, len(chosen), 2):
        pair = chosen[i : i + 2]
        running = [start([x.node], folder / str(DETAILS.index(x)), x) for x in pair]
        for detail, process in zip(pair, running, strict=True):
            printed, _ = process.communicate(timeout=900)
            # 1: tests have failed
            if process.returncode != 1 or " error" in printed.splitlines()[-1]:
                survived.append(f"{detail.what}: {detail.node}\n{printed[-500:]}")
        shutil.rmtree(folder)
    assert not survived, "\n".join(survived)
