"""The arithmetic of PPO: cases computed by hand, and a plain loop in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ppo_rlhf


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


def test_whiten_leaves_out_what_the_mask_does_and_puts_zeros_there() -> None:
    # of 1, 3 and 5: mean 3, variance (4 + 0 + 4) / 3 = 2.666667, 2 / 1.632993 = 1.224745
    x, mask = torch.tensor([[1.0, 100.0, 3.0], [5.0, -7.0, 9.0]]), torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    assert_close(ppo_rlhf.whiten(x, mask), [[-1.224745, 0.0, 0.0], [1.224745, 0.0, 0.0]])
    assert_close(ppo_rlhf.whiten(x, mask, shift_mean=False), [[1.775255, 0.0, 3.0], [4.224745, 0.0, 0.0]])
    assert [moment.item() for moment in ppo_rlhf.moments(x, mask)] == pytest.approx([3.0, 8 / 3])


def test_truncate_keeps_up_to_the_first_token_from_after_on() -> None:
    for response, token, after, stays, found in (
        ([9, 1, 2, 3, 4], 9, 0, 1, True),  # at index 0
        ([9, 1, 2, 3, 4], 9, 1, 5, False),  # before `after` only: it does not count
        ([9, 1, 9, 3, 9], 9, 1, 3, True),  # before and after: the first that counts
        ([1, 2, 9, 3, 4], 9, 2, 3, True),  # exactly at `after`
        ([1, 2, 3, 4, 9], 9, 2, 5, True),  # the last token: found, nothing goes
        ([0, 1, 0, 0, 0], 0, 0, 1, True),  # token 0 is a token
        ([9, 9, 9, 9, 9], None, 0, 5, True),  # no truncation: all stay, all found
        ([1, 2, 3, 4, 9], 9, 5, 5, False),  # `after` beyond the response
    ):
        kept, hit = ppo_rlhf.truncate(torch.tensor([response, [1, 2, 3, 4, 5]]), token, after)
        assert kept.tolist() == [[True] * stays + [False] * (5 - stays), [True] * 5]
        assert hit.tolist() == [found, token is None]


def test_token_rewards_are_the_kl_penalty_plus_the_score_at_the_last_kept_token() -> None:
    # kl_coef 0.5: -0.5 * 0.2 = -0.1, -0.5 * -0.4 = 0.2, -0.5 * 0.6 = -0.3
    log_ratio, scores = torch.tensor([[0.2, -0.4, 0.6]] * 3), torch.tensor([3.0, -1.0, 2.0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    # row 0: all count, 3 - 0.3 = 2.7 at the last; row 1: -1 + 0.2 = -0.8 at index 1; row 2: 2 - 0.1 = 1.9 at index 0
    expected = [[-0.1, 0.2, 2.7], [-0.1, -0.8, 0.0], [1.9, 0.0, 0.0]]
    assert_close(ppo_rlhf.token_rewards(scores, log_ratio, mask, 0.5), expected)


def test_kl_coefficient_moves_by_the_clipped_error_times_the_share_of_the_horizon() -> None:
    # 512 episodes of a horizon of 10 000 are a share of 0.0512; the error kl / 6 - 1 is clipped to 0.2 on either side
    for kl, error in ((6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)):
        expected = 0.15 * (1 + error * 0.0512)
        assert ppo_rlhf.adapt_kl_coef(0.15, kl, 6.0, 512 / 10_000) == pytest.approx(expected, rel=1e-12)


def test_long_queries_keep_their_start_or_end_or_are_dropped() -> None:
    """All else that cut_query does is in the recordings 08."""
    cut = [ppo_rlhf.cut_query([1, 2, 3, 4], 3, None, None, long) for long in ("keep_start", "keep_end", "drop")]
    assert cut == [[1, 2, 3], [2, 3, 4], []]


def plain_loss(arrays: dict[str, Tensor], mask: Tensor, clip: float, clip_value: float, vf_coef: float) -> Any:
    """Gradients of the loss and the sums of the metrics, token by token in float64.

    Schulman et al. 2017, equation 7: minus min(r A, clip(r) A). The value loss is half the larger of the squared errors
    of value and clipped value, times vf_coef.
    """
    gradients, sums = {name: np.zeros(mask.shape) for name in ("logprobs", "values")}, {}
    for i, j in mask.nonzero().tolist():
        new, old, value, old_value, advantage, target = (float(x[i, j]) for x in arrays.values())
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        if ratio * advantage <= clipped * advantage:
            gradients["logprobs"][i, j] = -advantage * ratio
        near = min(max(value, old_value - clip_value), old_value + clip_value)
        errors = (value - target) ** 2, (near - target) ** 2
        if errors[0] >= errors[1]:
            gradients["values"][i, j] = vf_coef * (value - target)
        terms = {
            "ppo/loss/policy": -min(ratio * advantage, clipped * advantage),
            "ppo/loss/value": 0.5 * max(errors),
            "ppo/loss/total": -min(ratio * advantage, clipped * advantage) + vf_coef * 0.5 * max(errors),
            "ppo/policy/approxkl": 0.5 * (new - old) ** 2,
            "ppo/policy/clipfrac": ratio * advantage > clipped * advantage,
            "ppo/val/error": errors[0],
            "ppo/val/clipfrac": errors[1] > errors[0],
            "ppo/val/vpred": value,
            "ppo/val/ratio": ratio,
            "ratio_squared": ratio**2,
        }
        sums = {name: sums.get(name, 0.0) + x for name, x in terms.items()}
    return gradients, sums


def run_loss(arrays: dict[str, Tensor], mask: Tensor, clip: float, clip_value: float, vf_coef: float) -> Any:
    """ppo_loss, its gradients for new log-probabilities and values, and the sums of its metrics."""
    leaves = {name: arrays[name].clone().requires_grad_() for name in ("logprobs", "values")}
    old = [arrays[name] for name in ("old_logprobs", "old_values", "advantages", "returns")]
    loss, pairs = ppo_rlhf.ppo_loss(leaves["logprobs"], leaves["values"], *old, mask, clip, clip_value, vf_coef)
    loss.backward()
    assert all(count == mask.sum() and not total.requires_grad for total, count in pairs.values())
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return loss.detach(), gradients, {name: total for name, (total, _) in pairs.items()}


@pytest.mark.parametrize(("clip", "clip_value", "vf_coef"), [(0.2, 0.2, 0.1), (0.1, 0.4, 1.0), (0.3, 0.1, 0.0)])
def test_loss_gradients_and_metrics_equal_a_plain_loop(clip: float, clip_value: float, vf_coef: float) -> None:
    """Exactly no gradient where a token or value is clipped or masked."""
    generator = torch.Generator().manual_seed(1)
    old, value, advantages, returns, one, other = torch.randn(6, 6, 9, generator=generator, dtype=torch.float64)
    arrays = {"logprobs": -old.abs() + 0.3 * one, "old_logprobs": -old.abs(), "values": value + 0.3 * other}
    arrays |= {"old_values": value, "advantages": advantages, "returns": returns}
    mask = torch.rand(6, 9, generator=generator) < 0.7
    loss, gradients, sums = run_loss(arrays, mask, clip, clip_value, vf_coef)
    expected_gradients, expected = plain_loss(arrays, mask, clip, clip_value, vf_coef)
    assert loss.item() == pytest.approx(expected["ppo/loss/total"], rel=1e-12)
    assert {name: x.item() for name, x in sums.items()} == pytest.approx(expected, rel=1e-12)
    for name, gradient in gradients.items():
        assert np.allclose(gradient.numpy(), expected_gradients[name], rtol=1e-12, atol=0), name
    assert 5 < expected["ppo/policy/clipfrac"] < 30 and 1 < expected["ppo/val/clipfrac"] < 30


def test_a_value_within_the_clip_range_never_counts_as_clipped() -> None:
    """As in the original. Rounded, as old + clamp(new - old) is, one in a hundred of these would count."""
    old, values, distance = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(4))
    old, values, zeros = 0.09 * old.tanh(), 0.09 * values.tanh(), torch.zeros_like(old)
    returns = old + distance.sign() * (0.6 + distance.abs())
    arrays = {"logprobs": zeros, "old_logprobs": zeros, "advantages": zeros, "values": values}
    arrays |= {"old_values": old, "returns": returns}
    _, gradients, sums = run_loss(arrays, every(old), 0.2, 0.2, 1.0)
    assert sums["ppo/val/clipfrac"] == 0
    assert torch.equal(gradients["values"], values - returns)
    values[:7] = (old + 0.3 * distance.sign())[:7]  # nearer to the return than the clip allows
    assert run_loss(arrays, every(old), 0.2, 0.2, 1.0)[2]["ppo/val/clipfrac"] == 7 * 50
