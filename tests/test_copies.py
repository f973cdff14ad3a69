"""Copies of the scripts that an experimenter, or the study of symptoms, has changed. `pytest
--script` runs tests against a copy."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import options
import pytest
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, WORDS, copy, kit, plain, run
from run_tools import read_lines

from benchmark.studies.symptoms import run as symptoms


def change(script: str, folder: Path, *pairs: tuple[str, str]) -> Path:
    """A copy of the script as my.py in the folder, and tf_adam.py, with these replacements."""
    folder.mkdir(exist_ok=True)
    text = (ROOT / script).read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "my.py").write_text(text)
    shutil.copy(ROOT / "tf_adam.py", folder)
    return folder / "my.py"


def test_an_entropy_bonus_is_one_line(tmp_path: Path) -> None:
    """What `ppo_update` gets of `forward_response` keeps its gradient."""
    line = "loss = policy_loss + args.vf_coef * value_loss"
    script = change(PPO, tmp_path, (line, f"{line} - 50 * entropy(all_logprobs)"))
    folder = copy(kit(), tmp_path)
    status, _, errors = run(str(script), WORDS[PPO], folder)
    assert status == 0, errors
    with_bonus = read_lines(folder / "out" / "metrics.jsonl")
    without = read_lines(plain(PPO, 1) / "out" / "metrics.jsonl")
    gained = with_bonus[-1]["policy/entropy"] - without[-1]["policy/entropy"]
    assert gained > 0.05


@pytest.mark.parametrize("symptom", symptoms.SYMPTOMS, ids=lambda symptom: symptom.seen)
def test_what_makes_a_symptom_applies(
    symptom: symptoms.Symptom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes are of lines that the script has once, flags are its own."""
    runs = {symptom.ill, symptom.cured, symptom.healthy, symptoms.Run()} - {None}
    assert len(runs) > 1 or symptom.cured is not None
    for one in runs:
        path = symptoms.copy_of(one, tmp_path / "copy.py")
        compile(path.read_text(), path, "exec")
        module = importlib.import_module(one.script[:-3])
        monkeypatch.setattr(sys, "argv", [one.script, *one.flags.split()])
        module.parse_args()


# --- pytest --script ------------------------------------------------------------------------------
def pytest_with(script: Path, *words: str) -> tuple[int, str]:
    """Status and output of pytest on a copy of a script, called from the project's folder."""
    command = "-m pytest -n 0 -p no:cacheprovider --tb=short --script".split()
    command = [sys.executable, *command, str(script), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_pytest_runs_tests_against_a_copy_of_a_script(tmp_path: Path) -> None:
    """In the place of the script that it was made from, with tf_adam.py from beside it. -k may have
    an `or`. One of two tests sees the copy's fault."""
    imports = ("    sum_over_ranks,\n", "    sum_over_ranks,\n    of_my_own,\n")
    fault = ("(rewards.shape[1] - 1)", "rewards.shape[1] * of_my_own")
    script = change(RLOO, tmp_path / "it's mine", imports, fault)
    with script.with_name("tf_adam.py").open("a") as file:
        file.write("\n\nof_my_own = 1\n")
    tests = ["tests/test_algorithm.py", "tests/test_consistency.py"]
    names = "every_argument_is_read or leave_one_out_advantage"
    status, printed = pytest_with(script, *tests, "-k", names)
    assert f"{script} in the place of {RLOO}" in printed
    assert status == 1, printed
    assert "FAILED tests/test_algorithm.py::test_leave_one_out_advantage" in printed
    assert "1 failed, 1 passed" in printed


def test_a_fault_of_a_copy_is_named(tmp_path: Path) -> None:
    """Its state is not in run.state, at a flag that is off by default. The new flag itself, another
    default and another file are no faults."""
    field = "    track: bool = False"
    start = "        start = update * args.batch_size\n"
    mine = """
        if args.mine == "more":
            seen.append(update)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * len(seen)
        (run.folder / "notes.txt").touch()
"""
    script = change(
        REWARD,
        tmp_path / "copies",
        (field, f'    mine: Literal["less", "more"] = "less"  # Mine\n{field}'),
        ("seed: conint(ge=0, lt=4_000_000_000) = 1 ", "seed: conint(ge=0, lt=4_000_000_000) = 7 "),
        ("    run.start()\n", "    run.start()\n    seen = []\n"),
        (start, mine[1:] + start),
    )
    kinds = "kills or leaves_these_files or on_resume or out_of_range"
    words = ["tests/test_run_folder.py", "tests/test_end_to_end.py", "tests/test_hostile_input.py"]
    words += ["-k", f"({kinds}) and not reward.py-2", "--script_flags=--mine more"]
    status, printed = pytest_with(script, *words)
    assert status == 1
    failed = re.findall(r"^FAILED tests/test_run_folder.py::(\w+)\[train_reward.py", printed, re.M)
    assert failed == ["test_kills_and_interruptions_change_no_bit"]
    assert "1 failed, 3 passed" in printed
    assert "The resumed run differs from one left alone. What the loop carries" in printed
    assert re.search(r"and update: train/\w+ of update \d is [\d.]+, not [\d.]+", printed)


@pytest.mark.parametrize("name", options.TESTS_OF_COPIES)
def test_the_tests_of_copies_are_there(name: str) -> None:
    assert (ROOT / "tests" / name.split("::")[0]).exists()


def test_a_copy_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    status, printed = pytest_with(tmp_path / "none.py", "tests")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert printed.strip() == f"ERROR: --script {tmp_path / 'none.py'}: there is no such file"
