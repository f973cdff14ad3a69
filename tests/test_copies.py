"""Copies of the scripts that an experimenter, or the study of symptoms, has changed. `pytest
--script` runs tests against a copy."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from fork_tools import PPO, WORDS, copy, kit, plain, run
from run_tools import read_lines

from benchmark.studies.symptoms import run as symptoms


def test_an_entropy_bonus_is_one_line(tmp_path: Path) -> None:
    """What `ppo_update` gets of `forward_response` keeps its gradient."""
    line = "loss = policy_loss + args.vf_coef * value_loss"
    text = (ROOT / PPO).read_text()
    assert text.count(line) == 1
    script = tmp_path / "bonus.py"
    script.write_text(text.replace(line, f"{line} - 50 * entropy(all_logprobs)"))
    shutil.copy(ROOT / "tf_adam.py", tmp_path)
    folder = copy(kit(), tmp_path)
    status, _, errors = run(str(script), WORDS[PPO], folder)
    assert status == 0, errors
    with_bonus = read_lines(folder / "out" / "metrics.jsonl")
    without = read_lines(plain(PPO, 1) / "out" / "metrics.jsonl")
    gained = with_bonus[-1]["ppo/policy/entropy"] - without[-1]["ppo/policy/entropy"]
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


def pytest_with(script: Path, *words: str) -> tuple[int, str]:
    """Status and output of pytest on a copy of a script, called from the project's folder."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        f"--script={script}",
    ]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_pytest_runs_tests_against_a_copy_of_a_script(tmp_path: Path) -> None:
    """The copy has a fault that one of two tests sees; both are of the scripts' arithmetic."""
    script = tmp_path / "my_ppo.py"
    text = (ROOT / PPO).read_text()
    assert text.count("delta + gamma * lam * advantage") == 1
    script.write_text(text.replace("delta + gamma * lam * advantage", "delta + lam * advantage"))
    names = "gae_discounts_future_errors or leave_one_out_advantage_of_the_worked"
    status, printed = pytest_with(script, "tests/test_ppo_math.py", "-k", names)
    assert status == 1, printed
    assert "1 failed, 1 passed" in printed
    assert "FAILED tests/test_ppo_math.py::test_gae_discounts" in printed


def test_a_copy_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    status, printed = pytest_with(tmp_path / "none.py", "tests")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert printed.strip() == f"ERROR: --script {tmp_path / 'none.py'}: there is no such file"
