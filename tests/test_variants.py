"""benchmark/variants: each patch applies to its script, runs as its text says, and does what it
names. `pytest --script` runs tests against a copy.

A patch that no longer applies is made again: mend the patched copy, `diff -U1` it with its script,
and put the text of the old patch above.
"""

import importlib
import importlib.util
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, RLOO, UPDATES, WORDS, copy, kit, plain, run
from run_tools import read_lines

import rloo_rlhf

sys.path.append(str(ROOT / "benchmark"))
import symptoms

PATCHES = {path.stem: path for path in sorted((ROOT / "benchmark" / "variants").glob("*.patch"))}
BASE = {"grpo": RLOO, "dr_grpo": RLOO, "length_penalty": PPO}


def patched(name: str, folder: Path, script: str | None = None) -> Path:
    """A copy of the script, with tf_adam.py beside it, to which the patch is applied as it is."""
    path = folder / f"{name}.py"
    shutil.copy(ROOT / (script or BASE[name]), path)
    shutil.copy(ROOT / "tf_adam.py", folder)
    command = ["patch", "--fuzz=0", path.name, str(PATCHES[name])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return path


def module_of(name: str, folder: Path) -> ModuleType:
    """The patched script, imported."""
    spec = importlib.util.spec_from_file_location(name, patched(name, folder))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metrics_of(script: Path, flags: str, folder: Path) -> list[dict[str, float]]:
    """What a short run of the script logs."""
    base = RLOO if "rloo_k" in script.read_text() else PPO
    status, _, errors = run(str(script), [*WORDS[base], *shlex.split(flags)], folder)
    assert status == 0, errors
    return read_lines(folder / "out" / "metrics.jsonl")


def test_every_patch_is_known_and_names_its_script() -> None:
    assert list(PATCHES) == sorted(BASE)
    for name, path in PATCHES.items():
        assert f"--- {BASE[name]}\n+++ {name}.py\n" in path.read_text()


def shown_flags(name: str) -> str:
    """Those of the command in the patch's text, which makes a copy of the same name before."""
    text = PATCHES[name].read_text()
    shown, flags = re.search(r"^    python (\w+\.py) (.*)$", text, re.M).groups()
    assert f"cp {BASE[name]} {shown} && patch {shown} benchmark/variants/{name}.patch" in text
    return flags


@pytest.mark.parametrize("name", BASE)
def test_a_variant_runs_with_the_flags_of_its_text(name: str, tmp_path: Path) -> None:
    script = patched(name, tmp_path)
    metrics = metrics_of(script, shown_flags(name), copy(kit(), tmp_path))
    assert len(metrics) == UPDATES
    for row in metrics:
        assert all(map(math.isfinite, row.values()))
        if name == "grpo":  # no KL is paid for in the reward
            assert row["objective/score_total"] == row["objective/scores_scaled"]


def test_grpo_compares_the_responses_of_a_group(tmp_path: Path) -> None:
    grpo = module_of("grpo", tmp_path)
    args = SimpleNamespace(normalize_advantages=False)
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]])
    deviation = math.sqrt(14 / 3) + 1e-4
    expected = torch.tensor([[-2.0, -1.0, 0.0, 3.0], [0.0] * 4])
    advantages = grpo.rloo_advantages(rewards, args)
    torch.testing.assert_close(advantages, expected / deviation)


def test_loss_of_grpo_is_equation_3_of_deepseekmath(tmp_path: Path) -> None:
    grpo = module_of("grpo", tmp_path)
    lengths = [3, 1]
    logprobs = torch.randn(2, 3) * 0.3 - 1
    old = torch.randn(2, 3) * 0.3 - 1
    ref = torch.randn(2, 3) * 0.3 - 1
    advantages = [0.7, -1.3]
    batch = SimpleNamespace(
        advantages=torch.tensor(advantages).view(2, 1),
        mask=torch.arange(3) < torch.tensor(lengths).view(2, 1),
        logprobs=old,
        ref_logprobs=ref,
        kl_coef=torch.full((2, 3), 0.04),
    )
    expected = 0.0
    for i, length in enumerate(lengths):
        for t in range(length):
            ratio = math.exp(logprobs[i, t] - old[i, t])
            clipped = min(max(ratio, 0.8), 1.2)
            advantage = advantages[i]
            gain = min(ratio * advantage, clipped * advantage)
            log_ratio = float(ref[i, t] - logprobs[i, t])
            kl = math.exp(log_ratio) - log_ratio - 1
            expected -= (gain - 0.04 * kl) / length
    args = SimpleNamespace(cliprange=0.2)
    loss, _ = grpo.rloo_loss(logprobs, batch, torch.arange(2), args)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_the_coefficient_of_the_batch_is_that_of_the_update(tmp_path: Path) -> None:
    """An adaptive coefficient acts in the loss: with a far target it changes what is learned."""
    script = patched("grpo", tmp_path)
    flags = "--kl_coef 5 --kl_horizon 1"
    folders = [copy(kit(), tmp_path / name) for name in ("a", "b")]
    adapted = metrics_of(script, f"{flags} --kl_target 1e-3", folders[0])
    fixed = metrics_of(script, f"{flags} --kl_target none", folders[1])
    assert adapted[1]["objective/kl"] == fixed[1]["objective/kl"]
    assert adapted[1]["objective/kl_coef"] != fixed[1]["objective/kl_coef"]
    assert adapted[2]["objective/kl"] != fixed[2]["objective/kl"]


def test_advantages_of_dr_grpo_are_those_of_rloo_but_for_a_constant(tmp_path: Path) -> None:
    dr_grpo = module_of("dr_grpo", tmp_path)
    args = SimpleNamespace(normalize_advantages=False)
    rewards = torch.randn(5, 4)
    advantages = dr_grpo.rloo_advantages(rewards, args)
    torch.testing.assert_close(advantages, rewards - rewards.mean(1, keepdim=True))
    others_left_out = rloo_rlhf.rloo_advantages(rewards, args)
    torch.testing.assert_close(advantages, 3 / 4 * others_left_out)


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_penalty_on_length_is_taken_from_the_score(script: str, tmp_path: Path) -> None:
    before = read_lines(plain(script, 1) / "out" / "metrics.jsonl")
    path = patched("length_penalty", tmp_path, script)
    assert metrics_of(path, "--length_coef 0", copy(kit(), tmp_path / "off")) == before
    after = metrics_of(path, "--length_coef 0.5", copy(kit(), tmp_path / "on"))
    penalty = 0.5 * before[0]["objective/length"]
    for name in ("objective/scores", "objective/score_total"):
        expected = before[0][name] - penalty
        assert after[0][name] == pytest.approx(expected, abs=1e-5)


def test_an_entropy_bonus_is_one_line(tmp_path: Path) -> None:
    """What `ppo_update` gets of `forward_response` keeps its gradient."""
    line = (
        "                loss = policy_loss * per_token + args.vf_coef * value_loss * per_value\n"
    )
    bonus = "                loss = loss - 50 * entropy(all_logprobs).sum() * per_token\n"
    text = (ROOT / PPO).read_text()
    assert text.count(line) == 1
    script = tmp_path / "bonus.py"
    script.write_text(text.replace(line, line + bonus))
    with_bonus = metrics_of(script, "", copy(kit(), tmp_path))
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
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--script={script}"]
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
