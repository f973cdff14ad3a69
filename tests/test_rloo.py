"""RLOO's advantage and loss, against cases worked by hand and against the definition."""

import math
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from torch import Tensor

import rloo_rlhf

# Three prompts with four completions each; the reward of completion k of prompt i. Leave-one-out by hand: for prompt 0,
# completion 0 the baseline is (2 + 3 + 6) / 3 = 11/3, the advantage 1 - 11/3 = -8/3.
REWARDS = [[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 4.0], [-1.0, 1.0, -1.0, 1.0]]
ADVANTAGES = [[-8 / 3, -4 / 3, 0.0, 4.0], [-4 / 3, -4 / 3, -4 / 3, 4.0], [-4 / 3, 4 / 3, -4 / 3, 4 / 3]]


def tiny_actor() -> rloo_rlhf.Actor:
    return rloo_rlhf.Actor(tiny.make_actor("gpt2", vocab_size=11).lm)


def ragged_batch(n: int = 4, k: int = 4, length: int = 5) -> dict[str, Any]:
    """n contexts of different lengths with k responses each, of which 1 to `length` tokens count."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 11, rng.integers(2, 8)).tolist() for _ in range(n)]
    kept = torch.arange(length) < torch.from_numpy(rng.integers(1, length + 1, (n, k, 1)))
    batch = tiny.make_batch(contexts, rng.integers(0, 11, (n, k, length)), kept)
    return batch | {"advantages": rloo_rlhf.rloo_advantages(torch.from_numpy(rng.normal(size=(n, k))).float())}


def gradients(total: Tensor, actor: torch.nn.Module) -> Tensor:
    return torch.cat([x.flatten() for x in torch.autograd.grad(total, actor.parameters())])


def test_leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries() -> None:
    prompt_major = torch.tensor(REWARDS)
    advantages = rloo_rlhf.rloo_advantages(prompt_major)
    assert torch.allclose(advantages, torch.tensor(ADVANTAGES)) and advantages.sum(1).abs().max() < 1e-5
    mixed_up = prompt_major.T.reshape(3, 4)  # k-major, read as if it were prompt-major: another baseline
    assert not torch.allclose(rloo_rlhf.rloo_advantages(mixed_up).view(4, 3).T, advantages)
    assert rloo_rlhf.rloo_advantages(torch.tensor([[3.0, 1.0]])).tolist() == [[2.0, -2.0]]  # of two: the difference


@pytest.mark.parametrize("token_level", [False, True])
def test_the_gradient_at_ratio_one_is_reinforce(token_level: bool) -> None:
    batch, actor, rows = ragged_batch(3), tiny_actor(), torch.arange(3)
    logprobs, _ = rloo_rlhf.forward_response(actor, batch, rows, 0.7)
    loss, _ = rloo_rlhf.rloo_loss(logprobs, logprobs.detach(), batch["advantages"], batch["kept"], 0.2, token_level)
    ours = gradients(loss, actor)
    logprobs, _ = rloo_rlhf.forward_response(actor, batch, rows, 0.7)
    reinforce = gradients(-(batch["advantages"] * (logprobs * batch["kept"]).sum(-1)).sum(), actor)
    assert reinforce.abs().max() > 0.1 and (ours - reinforce).norm() < 1e-6 * reinforce.norm()


def test_masked_tokens_have_no_gradient_and_responses_may_end_first_last_or_never() -> None:
    """Ends at the first token, at the third and never: only what is kept counts; metrics are those of responses."""
    logprobs = torch.randn(1, 3, 4, requires_grad=True)
    kept = torch.tensor([[[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]], dtype=torch.bool)
    old = logprobs.detach() - 0.01
    loss, pairs = rloo_rlhf.rloo_loss(logprobs, old, torch.tensor([[1.0, -2.0, 1.0]]), kept, 0.2, False)
    ratios = [math.exp(0.01), math.exp(0.03), math.exp(0.04)]
    assert loss.item() == pytest.approx(-(ratios[0] - 2 * ratios[1] + ratios[2]), abs=1e-5)
    loss.backward()
    assert torch.equal(logprobs.grad != 0, kept)
    assert [x.item() for x in pairs["ppo/val/ratio"]] == pytest.approx([sum(ratios), 3], abs=1e-5)


@pytest.mark.parametrize("token_level", [False, True])
def test_a_ratio_beyond_the_clip_range_has_no_gradient_when_it_would_move_further(token_level: bool) -> None:
    # log ratios 0.15 and 0.1, of the response 0.25: exp(0.25) > 1.2 although exp(0.15) and exp(0.1) are below
    old, every = torch.zeros(1, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool)
    logprobs = torch.tensor([[[0.15, 0.1], [0.15, 0.1]]], requires_grad=True)
    loss, pairs = rloo_rlhf.rloo_loss(logprobs, old, torch.tensor([[1.0, -1.0]]), every, 0.2, token_level)
    loss.backward()
    good, bad = logprobs.grad[0].abs()  # a good response that is likelier already, and a bad one that became likelier
    assert bad.min() > 0.1 and (good.min() > 0.1 if token_level else good.max() == 0)
    assert [x.item() for x in pairs["ppo/policy/clipfrac"]] == ([0, 4] if token_level else [1, 2])
    assert loss.item() == pytest.approx(0.0 if token_level else -1.2 + math.exp(0.25), abs=1e-5)


def test_one_sample_per_query_is_refused() -> None:
    with pytest.raises(ValueError, match="--rloo_k 1"):
        rloo_rlhf.main("tiny", rloo_rlhf.Args(rloo_k=1))
