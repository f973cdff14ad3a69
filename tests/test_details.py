"""Every row of docs/details.md has code and a test, and the test sees a fault in the code.

`pytest tests/test_details.py --faults` puts the fault of every row into its script, in a copy of
the project, and runs the row's test there, which has to fail: that takes several minutes. Without
the option it is done for two rows.
"""

import ast
import builtins
import dataclasses
import shutil
import subprocess
import symtable
import sys

import details
import pytest
from conftest import ROOT
from details import DETAILS

QUICK = ("AdamTF.step", "whiten")  # functions with one row each


def undefined_names(source):
    """Names that the code reads, and that are neither defined in it nor built in."""
    module = symtable.symtable(source, "script", "exec")
    defined = set(dir(builtins))
    for symbol in module.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            defined.add(symbol.get_name())
    undefined = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.get_name() not in defined:
                undefined.add(symbol.get_name())
    return undefined


def test_the_tables_are_up_to_date():
    for path, tables in details.pages().items():
        page = path.read_text()
        assert page == details.with_tables(page, tables), "run `python tests/helpers/details.py`"


@pytest.mark.parametrize("detail", DETAILS, ids=lambda detail: detail.what[:40])
def test_every_fault_can_be_made(detail):
    detail.check()
    assert ast.dump(details.parse(detail.code)) != ast.dump(details.Fault(detail).fault)
    undefined = undefined_names((ROOT / detail.script).read_text())
    assert undefined_names(detail.broken()) == undefined


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
    chosen = [detail for detail in DETAILS if detail.function in QUICK]
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
