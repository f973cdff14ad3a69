"""The arithmetic of PPO and RLOO: cases computed by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ppo_rlhf
import rloo_rlhf


def every(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def assert_close(ours: Tensor, expected: list[Any], atol: float = 1e-6) -> None:
    assert ours.shape == torch.tensor(expected).shape
    assert np.abs(ours.double().numpy() - np.array(expected)).max() <= atol


def test_gae_discounts_future_errors_by_gamma_times_lambda() -> None:
    # gamma 0.9, lambda 0.8, gamma * lambda = 0.72; the value after the response is 0
    #   delta2 =  2   + 0.9 * 0 - 3 = -1      A2 = -1                          return 2  = -1     + 3
    #   delta1 = -1   + 0.9 * 3 - 2 = -0.3    A1 = -0.3 + 0.72 * -1   = -1.02  return 1  = -1.02  + 2
    #   delta0 =  0.5 + 0.9 * 2 - 1 =  1.3    A0 =  1.3 + 0.72 * -1.02 = 0.5656  return 0 = 0.5656 + 1
    values, rewards = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 2.0]])
    advantages, returns = ppo_rlhf.gae(values, rewards, every(values), 0.9, 0.8)
    assert_close(advantages, [[0.5656, -1.02, -1.0]])
    assert_close(returns, [[1.5656, 0.98, 2.0]])
    # the same with the last token masked: its value and reward count as 0
    #   A2 = 0;  delta1 = -1 + 0 - 2 = -3;  A1 = -3;  A0 = 1.3 + 0.72 * -3 = -0.86
    advantages, returns = ppo_rlhf.gae(values, rewards, torch.tensor([[True, True, False]]), 0.9, 0.8)
    assert_close(advantages, [[-0.86, -3.0, 0.0]])
    assert_close(returns, [[0.14, -1.0, 0.0]])


def test_whiten_gives_the_table_of_the_n_implementation_details() -> None:
    # Huang et al. 2024, detail 9 of policy training: TensorFlow's numbers, mean 1.6, biased variance 0.6 / 9
    rewards = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    published = [[0.05080712, 0.4381051, 0.8254035], [1.2127019, 1.6000004, 1.9872988]]
    published += [[2.3745968, 2.7618952, 3.1491938]]
    assert_close(ppo_rlhf.whiten(rewards, every(rewards), shift_mean=False), published, atol=2e-6)
    shifted = (np.array(published) - 1.6).tolist()
    assert_close(ppo_rlhf.whiten(rewards, every(rewards)), shifted, atol=2e-6)
    # 1e-8 is added to the variance: 0 and 2e-4, mean 1e-4, variance 1e-8: 1e-4 / sqrt(1e-8 + 1e-8) = 0.707107
    x = torch.tensor([[0.0, 2e-4]])
    assert_close(ppo_rlhf.whiten(x, every(x)), [[-0.707107, 0.707107]], atol=1e-5)


def test_a_value_within_the_clip_range_never_counts_as_clipped() -> None:
    """As in the original. Rounded, as old + clamp(new - old) is, one in a hundred of these would count."""
    old, values, distance = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(4))
    old, values, zeros = 0.09 * old.tanh(), 0.09 * values.tanh(), torch.zeros_like(old)
    values[:7] = (old + 0.3 * distance.sign())[:7]  # nearer to the return than the clip allows
    returns, values = old + distance.sign() * (0.6 + distance.abs()), values.requires_grad_()
    loss, pairs = ppo_rlhf.ppo_loss(zeros, values, zeros, old, zeros, returns, every(old), 0.2, 0.2, 1.0)
    loss.backward()
    assert pairs["ppo/val/clipfrac"][0] == 7 * 50
    assert torch.equal(values.grad[7:], (values - returns)[7:]) and not values.grad[:7].any()


def test_leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries() -> None:
    # rewards of four responses to each of three queries; of the first: 1 - (2 + 3 + 6) / 3 = -8 / 3
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 4.0], [-1.0, 1.0, -1.0, 1.0]])
    expected = [[-8 / 3, -4 / 3, 0.0, 4.0], [-4 / 3, -4 / 3, -4 / 3, 4.0], [-4 / 3, 4 / 3, -4 / 3, 4 / 3]]
    assert_close(rloo_rlhf.rloo_advantages(rewards), expected)
    assert rloo_rlhf.rloo_advantages(torch.tensor([[3.0, 1.0]])).tolist() == [[2.0, -2.0]]  # of two: the difference


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["ppo", "rloo", "rloo of tokens"])
def test_loss_and_gradient_are_finite_where_policies_are_far_apart(name: str, sign: float) -> None:
    far = torch.tensor([[200.0, -200.0, 90.0, -90.0, 0.0], [-1e4, 1e4, 41.0, -41.0, 1e-3]])
    zeros, logprobs, advantages = torch.zeros_like(far), (sign * far).requires_grad_(), torch.tensor([[3.0], [-3.0]])
    if name == "ppo":
        old = (zeros, zeros, zeros, advantages.expand(2, 5), torch.ones_like(far), every(far))
        loss, pairs = ppo_rlhf.ppo_loss(logprobs, *old, 0.2, 0.2, 0.1)
    else:
        inputs = (x.unsqueeze(0) for x in (logprobs, zeros, advantages.squeeze(1), every(far)))
        loss, pairs = rloo_rlhf.rloo_loss(*inputs, 0.2, name == "rloo of tokens")
    loss.backward()
    assert all(x.isfinite().all() for x in (loss, logprobs.grad, *(total for total, _ in pairs.values())))
    assert logprobs.grad[:, -1].abs().min() > 0 or name == "rloo"  # near tokens still learn
