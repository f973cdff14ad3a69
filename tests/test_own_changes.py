"""What a change of the algorithm must not break: what is logged is what is trained, evaluations
have the scores of the training, and tokens that do not count change nothing. `pytest --script` runs
these tests on a copy."""

import pytest
import torch
from accelerate import Accelerator
from fork_tools import PPO, RLOO, WORDS
from run_tools import call, read_metrics
from safetensors.torch import load_file

import ppo_rlhf
import rloo_rlhf

BOTH = pytest.mark.parametrize(("script", "module"), [(PPO, ppo_rlhf), (RLOO, rloo_rlhf)])
LOGGED = "loss/total is not what the backward passes get: means.add has another loss"
SCORED = "objective/scores are not those of score_responses, so evaluations have others"
MASKED = "tokens after a response's end change a run with --mask_truncated: use batch.sum_tokens or"
MASKED += " batch.loss_mask"


@BOTH
def test_the_loss_that_is_logged_is_the_one_that_is_trained(script, module, folder, monkeypatch):
    losses = []
    backward = Accelerator.backward

    def noted(self, loss):
        losses.append(loss.item())
        backward(self, loss)

    monkeypatch.setattr(Accelerator, "backward", noted)
    call(script, [*WORDS[script], "--num_minibatches", "1"], folder, monkeypatch)
    rows = read_metrics(folder / "out")
    passes = len(losses) // len(rows)
    epochs = module.Args().num_epochs
    if "--num_epochs" in WORDS[script]:
        epochs = int(WORDS[script][WORDS[script].index("--num_epochs") + 1])
    for update, row in enumerate(rows):
        mine = losses[update * passes : (update + 1) * passes]
        assert row["loss/total"] == pytest.approx(sum(mine) / epochs, rel=1e-4, abs=1e-6), LOGGED


@BOTH
def test_evaluations_have_the_scores_of_the_training(script, module, folder, monkeypatch):
    given = []
    score = module.score_responses

    def noted(*values):
        given.append(score(*values))
        return given[-1]

    monkeypatch.setattr(module, "score_responses", noted)
    call(script, WORDS[script], folder, monkeypatch)
    rows = read_metrics(folder / "out")
    assert len(given) == len(rows) + 2, "score_responses makes the scores of evaluations, too"
    for row, scores in zip(rows, given[1:-1], strict=True):
        assert row["objective/scores"] == pytest.approx(scores.mean().item(), abs=1e-6), SCORED


@BOTH
def test_tokens_after_the_end_change_nothing(script, module, folder, tmp_path, monkeypatch):
    words = [*WORDS[script], "--mask_truncated"]
    call(script, [*words, "--output_dir", str(tmp_path / "as_sampled")], folder)
    rollout = module.rollout

    def changed(*values):
        batch = rollout(*values)
        is_after = torch.arange(batch.responses.shape[1]) >= batch.lengths.unsqueeze(1)
        batch.responses = torch.where(is_after, (batch.responses + 7) % 50, batch.responses)
        batch.sampled_logprobs = torch.where(is_after, -3.0, batch.sampled_logprobs)
        seen.add(bool(is_after.any()))
        return batch

    seen = set()
    monkeypatch.setattr(module, "rollout", changed)
    call(script, [*words, "--output_dir", str(tmp_path / "changed")], folder)
    assert True in seen
    outs = [tmp_path / name for name in ("as_sampled", "changed")]
    for mine, theirs in zip(*map(read_metrics, outs), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6), MASKED
    weights = [load_file(out / "policy/model.safetensors") for out in outs]
    for name, x in weights[0].items():
        torch.testing.assert_close(x, weights[1][name], msg=f"{name}: {MASKED}")
