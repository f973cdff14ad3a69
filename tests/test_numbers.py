"""Numbers gone wrong stop a run with one line that says when, where and which, and leave a good state to go on from."""

import shutil
from pathlib import Path
from typing import Any

import fork_tools
import pytest
import torch
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS, run, run_two
from run_tools import read_lines
from safetensors.torch import load_file, save_file
from torch import Tensor

import ppo_rlhf
import rloo_rlhf

RL = [PPO, RLOO]
# Call 1 is the evaluation before training, call n + 1 is update n
FUNCTION = """
import os
CALLS = [0]
def score(queries, responses):
    CALLS[0] += 1
    values = [len(set(response.split())) / 5 for response in responses]
    if os.path.exists("broken") and CALLS[0] == 4 and os.environ.get("RANK", "0") == os.environ.get("BROKEN", "0"):
        values[-1] = float("nan")
    return values
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fork_tools.fill(tmp_path_factory.mktemp("kit"))
    (folder / "function.py").write_text(FUNCTION)
    return folder


@pytest.fixture
def folder(kit: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kit, tmp_path / "folder"))


def with_function(script: str, *more: str) -> list[str]:
    words = WORDS[script]
    at = words.index("--reward_model")
    return [*words[:at], *words[at + 2 :], "--reward_fn", "function:score", *more]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def spoil(folder: Path) -> None:
    """One weight of the model in this folder is no number."""
    tensors = weights(folder)
    next(x for name, x in tensors.items() if name.endswith("h.0.mlp.c_fc.weight"))[0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def last_line(script: str, outcome: tuple[int, str, str]) -> str:
    """What the run that stopped with status 2 said at last."""
    code, _, errors = outcome
    assert (code, "Traceback" in errors) == (2, False), errors
    start, line = f"{script}: error: ", errors.splitlines()[-1]
    assert line.startswith(start)
    return line.removeprefix(start)


# Scores


@pytest.mark.parametrize("script", RL)
def test_a_score_that_is_no_number_stops_and_the_run_goes_on_to_the_bit(
    script: str, folder: Path, tmp_path: Path
) -> None:
    other, words = Path(shutil.copytree(folder, tmp_path / "other")), with_function(script, "--checkpoint_every", "0")
    (folder / "broken").touch()
    line = last_line(script, run(script, words, folder))
    assert line == "update 3, rank 0: the score is not finite; the last good state is in out/checkpoints/0000002"
    assert len(read_lines(folder / "out/metrics.jsonl")) == 2
    assert not (folder / "out/policy").exists()
    (folder / "broken").unlink()
    assert run(script, [*words, "--resume"], folder)[0] == run(script, words, other)[0] == 0
    for name in ("metrics.jsonl", "samples.jsonl", "policy/model.safetensors"):
        assert (folder / "out" / name).read_bytes() == (other / "out" / name).read_bytes()


def test_the_rank_of_a_score_that_is_no_number_is_named(folder: Path) -> None:
    (folder / "broken").touch()
    first, second = run_two(PPO, with_function(PPO), folder, BROKEN="1")
    assert last_line(PPO, first).startswith("update 3, rank 1: the score is not finite; the last good")
    assert (second[0], PPO + ":" in second[2]) == (2, False)
    assert (folder / "out/checkpoints/0000002").is_dir()


@pytest.mark.parametrize("script", RL)
def test_a_reward_model_that_gives_no_numbers_is_refused_before_training(script: str, folder: Path) -> None:
    spoil(folder / "judge")
    line = last_line(script, run(script, WORDS[script], folder))
    assert line == "--reward_model judge: gave nan for a held-out query; finite numbers would do"
    assert not (folder / "out").exists()


# Weights, losses and gradients


@pytest.mark.parametrize("script", RL)
def test_a_policy_that_gives_no_numbers_stops_without_a_checkpoint_of_it(script: str, folder: Path) -> None:
    spoil(folder / "model")
    line = last_line(script, run(script, WORDS[script], folder))
    assert line == "update 1, rank 0: logprobs is not finite; the last good state is in no checkpoint"
    assert not list(folder.glob("out/checkpoints/*"))


def test_a_model_that_gives_no_rewards_is_not_normalised(folder: Path) -> None:
    spoil(folder / "model")
    line = last_line(REWARD, run(REWARD, WORDS[REWARD], folder))
    assert line.startswith("--normalization_samples 4: the rewards of samples have mean nan and deviation nan")
    assert not (folder / "out").exists()
    words = [*WORDS[REWARD], "--normalization_samples", "0"]
    line = last_line(REWARD, run(REWARD, words, folder))
    assert line == "update 1, rank 0: the loss is not finite; the last good state is in no checkpoint"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_no_number_stops_before_the_step(script: str, name: str, folder: Path) -> None:
    calls = {PPO: 10, RLOO: 10, REWARD: 6}[script] if name == "loss" else {PPO: 5, RLOO: 5, REWARD: 3}[script]
    line = last_line(script, run(script, WORDS[script], folder, (fork_tools.give_nan, name, calls)))
    assert line == f"update 3, rank 0: the {name} is not finite; the last good state is in out/checkpoints/0000002"
    assert len(read_lines(folder / "out/metrics.jsonl")) == 2
    assert not (folder / "out/policy").exists() and not (folder / "out/reward_model").exists()
    for file in (folder / "out/checkpoints/0000002").glob("*.safetensors"):
        assert all(x.isfinite().all() for x in load_file(file).values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_enormous_learning_rate_stops_with_finite_checkpoints_only(script: str, folder: Path) -> None:
    line = last_line(script, run(script, [*WORDS[script], "--lr", "1e38"], folder))
    assert "rank 0: " in line and " is not finite; the last good state is in " in line
    for file in folder.glob("out/checkpoints/*/*.safetensors"):
        assert all(x.isfinite().all() for x in load_file(file).values())
    assert not list(folder.glob("out/checkpoints/*.tmp"))
    for row in read_lines(folder / "out/metrics.jsonl"):
        assert all(abs(x) < float("inf") for x in row.values())


# A run away


@pytest.mark.parametrize("script", RL)
def test_max_kl_stops_a_run_away_that_may_go_on_with_another(script: str, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    words = [*WORDS[script], "--checkpoint_every", "0"]
    assert run(script, words, other)[0] == 0
    kls = [row["objective/kl"] for row in read_lines(other / "out/metrics.jsonl")]
    worst = kls.index(max(kls))
    limit = (max(kls[:worst]) + kls[worst]) / 2
    assert kls[worst] > limit > kls[0] == 0
    line = last_line(script, run(script, [*words, "--max_kl", str(limit)], folder))
    assert line == f"--max_kl {limit}: the KL of update {worst + 1} is {kls[worst]:.4g}; a larger --kl_coef would do"
    assert [path.name for path in (folder / "out/checkpoints").iterdir()] == [f"{worst + 1:07d}"]
    assert run(script, [*words, "--resume"], folder)[0] == 0
    assert (folder / "out/metrics.jsonl").read_bytes() == (other / "out/metrics.jsonl").read_bytes()


# Exponentials


FAR = torch.tensor([[200.0, -200.0, 90.0, -90.0, 0.0], [-1e4, 1e4, 41.0, -41.0, 1e-3]])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_ppo_loss_and_gradient_are_finite_where_policies_are_far_apart(sign: float) -> None:
    logprobs = (sign * FAR).requires_grad_()
    values = torch.zeros_like(FAR).requires_grad_()
    fixed = torch.zeros_like(FAR), torch.zeros_like(FAR), torch.tensor([[3.0], [-3.0]]).expand(2, 5)
    mask = torch.ones_like(FAR, dtype=torch.bool)
    loss, pairs = ppo_rlhf.ppo_loss(logprobs, values, *fixed, torch.ones_like(FAR), mask, 0.2, 0.2, 0.1)
    loss.backward()
    assert_all_finite(loss, logprobs.grad, values.grad, *(total for total, _ in pairs.values()))
    assert logprobs.grad[:, -1].abs().min() > 0  # near tokens still learn


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_rloo_loss_and_gradient_are_finite_where_policies_are_far_apart(token_level: bool, sign: float) -> None:
    logprobs = (sign * torch.stack([FAR, FAR.flip(0) * 0.001])).requires_grad_()  # (n, K, R)
    old, advantages = torch.zeros_like(logprobs), torch.tensor([[3.0, -3.0], [3.0, -3.0]])
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    loss, pairs = rloo_rlhf.rloo_loss(logprobs, old, advantages, mask, 0.2, token_level)
    loss.backward()
    assert_all_finite(loss, logprobs.grad, *(total for total, _ in pairs.values()))


def assert_all_finite(*tensors: Any) -> None:
    assert all(x.isfinite().all() for x in tensors)


@pytest.mark.parametrize("script", RL)
def test_metrics_are_finite_where_policy_and_reference_are_far_apart(script: str, folder: Path) -> None:
    """A policy of steep logits that is made to say what it finds most unlikely."""
    words = [*WORDS[script], "--lr", "3", "--num_epochs", "4", "--cliprange", "10"]
    code, _, errors = run(script, words, folder, (fork_tools.sample_anything,))
    assert code == 0, errors
    rows = read_lines(folder / "out/metrics.jsonl")
    assert min(row["objective/kl"] for row in rows) < -500  # exp(100) per token would be an infinity
    assert all(abs(x) < float("inf") for row in rows for x in row.values())
