"""The arithmetic of PPO: cases computed by hand, a plain float64 loop, and updates that must not depend on layout."""

import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tiny_models import make_actor, random_rows
from torch import Tensor

import ppo_rlhf
from tf_adam import AdamTF

SETTINGS = {"gamma": 0.98, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "temperature": 0.7}
SETTINGS |= {"whiten_rewards": True, "truncate_after": 1, "mask_truncated": False, "compile": False, "num_epochs": 2}
ROWS, LENGTH, VOCABULARY, END = 16, 6, 12, 5


# --- by hand -------------------------------------------------------------------------------------------------------


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


def test_gae_ends_at_the_last_kept_token() -> None:
    # the same with the last token masked: its value and reward count as 0
    #   A2 = 0;  delta1 = -1 + 0 - 2 = -3;  A1 = -3;  A0 = 1.3 + 0.72 * -3 = -0.86
    values, rewards = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 2.0]])
    advantages, returns = ppo_rlhf.gae(values, rewards, torch.tensor([[True, True, False]]), 0.9, 0.8)
    assert_close(advantages, [[-0.86, -3.0, 0.0]])
    assert_close(returns, [[0.14, -1.0, 0.0]])


def test_gae_with_lambda_one_is_the_return_minus_the_value_and_with_zero_the_error_of_one_step() -> None:
    # gamma 0.5: return 0 = 1 + 0.5 * 2 + 0.25 * 4 = 3, return 1 = 2 + 0.5 * 4 = 4, return 2 = 4
    values, rewards = torch.tensor([[10.0, 20.0, 30.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    advantages, returns = ppo_rlhf.gae(values, rewards, every(values), 0.5, 1.0)
    assert_close(returns, [[3.0, 4.0, 4.0]])
    assert_close(advantages, [[-7.0, -16.0, -26.0]])
    # 1 + 0.5 * 20 - 10 = 1, 2 + 0.5 * 30 - 20 = -3, 4 - 30 = -26
    assert_close(ppo_rlhf.gae(values, rewards, every(values), 0.5, 0.0)[0], [[1.0, -3.0, -26.0]])


def test_whiten_gives_the_table_of_the_n_implementation_details() -> None:
    # Huang et al. 2024, detail 9 of policy training: TensorFlow's numbers, mean 1.6, biased variance 0.6 / 9
    rewards = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    published = [
        [0.05080712, 0.4381051, 0.8254035],
        [1.2127019, 1.6000004, 1.9872988],
        [2.3745968, 2.7618952, 3.1491938],
    ]
    assert_close(ppo_rlhf.whiten(rewards, every(rewards), shift_mean=False), published, atol=2e-6)
    shifted = (np.array(published) - 1.6).tolist()
    assert_close(ppo_rlhf.whiten(rewards, every(rewards)), shifted, atol=2e-6)


def test_whiten_divides_by_the_biased_deviation_with_and_without_shift() -> None:
    # 1 2 3 4: mean 2.5, variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25, deviation 1.118034
    # -1.5 / 1.118034 = -1.341641, -0.5 / 1.118034 = -0.447214; without shift 2.5 is added again
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert_close(ppo_rlhf.whiten(x, every(x)), [[-1.341641, -0.447214, 0.447214, 1.341641]])
    assert_close(ppo_rlhf.whiten(x, every(x), shift_mean=False), [[1.158359, 2.052786, 2.947214, 3.841641]])


def test_whiten_adds_1e_8_to_the_variance() -> None:
    # 0 and 2e-4: mean 1e-4, variance 1e-8; 1e-4 / sqrt(1e-8 + 1e-8) = 0.707107; equal numbers give 0
    x = torch.tensor([[0.0, 2e-4]])
    assert_close(ppo_rlhf.whiten(x, every(x)), [[-0.707107, 0.707107]], atol=1e-5)
    assert_close(ppo_rlhf.whiten(torch.full((2, 2), 3.0), every(torch.zeros(2, 2))), [[0.0, 0.0], [0.0, 0.0]])


def test_whiten_leaves_out_what_the_mask_does_and_puts_zeros_there() -> None:
    # of 1, 3 and 5: mean 3, variance (4 + 0 + 4) / 3 = 2.666667, 2 / 1.632993 = 1.224745
    x, mask = torch.tensor([[1.0, 100.0, 3.0], [5.0, -7.0, 9.0]]), torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    assert_close(ppo_rlhf.whiten(x, mask), [[-1.224745, 0.0, 0.0], [1.224745, 0.0, 0.0]])
    assert_close(ppo_rlhf.whiten(x, mask, shift_mean=False), [[1.775255, 0.0, 3.0], [4.224745, 0.0, 0.0]])
    mean, variance = ppo_rlhf.moments(x, mask)
    assert (mean.item(), variance.item()) == pytest.approx((3.0, 8 / 3))


@pytest.mark.parametrize(
    ("response", "token", "after", "stays", "found"),
    [
        ([9, 1, 2, 3, 4], 9, 0, [1, 0, 0, 0, 0], True),  # at index 0
        ([9, 1, 2, 3, 4], 9, 1, [1, 1, 1, 1, 1], False),  # before `after` only: it does not count
        ([9, 1, 9, 3, 9], 9, 1, [1, 1, 1, 0, 0], True),  # before and after: the first that counts
        ([1, 2, 9, 3, 4], 9, 2, [1, 1, 1, 0, 0], True),  # exactly at `after`
        ([1, 9, 2, 3, 4], 9, 2, [1, 1, 1, 1, 1], False),  # one too early
        ([1, 2, 3, 4, 9], 9, 2, [1, 1, 1, 1, 1], True),  # the last token: found, nothing goes
        ([1, 2, 3, 4, 5], 9, 0, [1, 1, 1, 1, 1], False),  # never
        ([1, 9, 9, 9, 1], 9, 0, [1, 1, 0, 0, 0], True),  # several in a row
        ([0, 1, 0, 0, 0], 0, 0, [1, 0, 0, 0, 0], True),  # token 0 is a token
        ([9, 9, 9, 9, 9], None, 0, [1, 1, 1, 1, 1], True),  # no truncation: all stay, all found
        ([1, 2, 3, 4, 9], 9, 5, [1, 1, 1, 1, 1], False),  # `after` beyond the response
    ],
)
def test_truncate_keeps_up_to_the_first_token_from_after_on(
    response: list[int], token: int | None, after: int, stays: list[int], found: bool
) -> None:
    others = [1, 2, 3, 4, 5]
    kept, hit = ppo_rlhf.truncate(torch.tensor([response, others]), token, after)
    assert kept.int().tolist() == [stays, [1] * 5]
    assert hit.tolist() == [found, token is None]


def test_token_rewards_are_the_kl_penalty_plus_the_score_at_the_last_kept_token() -> None:
    # kl_coef 0.5: -0.5 * 0.2 = -0.1, -0.5 * -0.4 = 0.2, -0.5 * 0.6 = -0.3
    log_ratio, scores = torch.tensor([[0.2, -0.4, 0.6]] * 3), torch.tensor([3.0, -1.0, 2.0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    # row 0: all count, 3 - 0.3 = 2.7 at the last; row 1: -1 + 0.2 = -0.8 at index 1; row 2: 2 - 0.1 = 1.9 at index 0
    expected = [[-0.1, 0.2, 2.7], [-0.1, -0.8, 0.0], [1.9, 0.0, 0.0]]
    assert_close(ppo_rlhf.token_rewards(scores, log_ratio, mask, 0.5), expected)


def test_penalty_replaces_the_score_or_is_added_to_it() -> None:
    scores, found = torch.tensor([0.5, 2.0, -3.0]), torch.tensor([True, False, False])
    assert ppo_rlhf.penalize(scores, found, -1.0, "replace").tolist() == [0.5, -1.0, -1.0]
    assert ppo_rlhf.penalize(scores, found, -1.0, "add").tolist() == [0.5, 1.0, -4.0]


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.15),  # at the target nothing changes
        (6.6, 0.15 * (1 + 0.1 * 0.0512)),  # 6.6 / 6 - 1 = 0.1
        (5.4, 0.15 * (1 - 0.1 * 0.0512)),
        (7.2, 0.15 * (1 + 0.2 * 0.0512)),  # 7.2 / 6 - 1 = 0.2, where the clip begins
        (60.0, 0.15 * (1 + 0.2 * 0.0512)),  # clipped
        (0.0, 0.15 * (1 - 0.2 * 0.0512)),  # 0 / 6 - 1 = -1, clipped
        (-3.0, 0.15 * (1 - 0.2 * 0.0512)),
    ],
)
def test_kl_coefficient_moves_by_the_clipped_error_times_the_share_of_the_horizon(kl: float, expected: float) -> None:
    # 512 episodes of a horizon of 10 000 are a share of 0.0512
    assert ppo_rlhf.adapt_kl_coef(0.15, kl, 6.0, 512 / 10_000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "length", "start", "end", "expected"),
    [
        ([5, 1, 2, 5, 3, 5], 9, 5, 5, [1, 2, 5, 3, 5]),  # from behind the first start to the last end, which stays
        ([5, 1, 2, 5, 3, 4], 9, 5, 5, [1, 2, 5]),  # what follows the last end goes
        ([8, 5, 1, 2, 5, 3, 5], 4, 5, 5, [1, 2, 5]),  # truncated to 4 tokens, then cut back to the last end in them
        ([5, 1, 2, 3, 5], 3, 5, 5, []),  # no end within the length
        ([1, 2, 3, 4], 9, 5, 5, []),  # no start
        ([1, 2, 3, 5], 9, 5, 5, [1, 2, 3, 5]),  # a start as the last token counts for none, and nothing goes
        ([1, 2, 3, 5], 3, 5, None, [1, 2, 3]),
        ([1, 2, 3, 4], 3, None, None, [1, 2, 3]),  # neither: only truncated
        ([1, 5, 3, 4], 3, None, 5, [1, 5]),
        ([1, 5, 3, 4], 1, 5, None, [3]),
        ([], 3, None, None, []),
        ([], 3, 5, 5, []),
        ([0, 1, 0, 2], 9, 0, 0, [1, 0]),  # token 0 is a token
    ],
)
def test_cut_query(tokens: list[int], length: int, start: int | None, end: int | None, expected: list[int]) -> None:
    assert ppo_rlhf.cut_query(tokens, length, start, end) == expected


def test_positions_are_the_exclusive_count_of_real_tokens() -> None:
    """Original: position = number of real tokens before, whatever padding stands where."""
    actor, seen = make_actor("gpt2"), []
    actor.lm.transformer.wpe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].tolist()))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [0, 1, 1, 1, 0]]).bool()
    ppo_rlhf.last_hidden(actor.lm, torch.ones_like(mask, dtype=torch.long), mask)
    real = [
        [p for p, is_real in zip(*rows, strict=True) if is_real] for rows in zip(seen[0], mask.tolist(), strict=True)
    ]
    assert real == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2]]


def test_positions_of_responses_go_on_from_their_contexts_in_sampling_and_in_scoring() -> None:
    actor, seen = make_actor("gpt2"), []
    contexts, u = [[3], [4, 5, 6]], ppo_rlhf.uniforms(1, 1, 2, 4, "cpu")
    actor.lm.transformer.wpe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].tolist()))
    args = SimpleNamespace(temperature=0.7, mask_truncated=False, compile=False, truncate_after=0)
    batch = ppo_rlhf.respond(actor, contexts, u, None, args)
    assert [row[-1] for row in seen[0]] == [0, 2]  # the contexts
    assert seen[0][1] == [0, 1, 2]
    assert seen[1:] == [[[1], [3]], [[2], [4]], [[3], [5]]]  # each sampled token that is an input
    seen.clear()
    ppo_rlhf.forward_response(actor, batch, torch.arange(2), 0.7)
    assert seen == [[[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 0]]]  # the longest first


# --- the loss ------------------------------------------------------------------------------------------------------


def plain_loss(arrays: dict[str, np.ndarray], mask: np.ndarray, clip: float, clip_value: float, vf_coef: float) -> Any:
    """Loss, its gradients and the sums of the metrics, token by token in float64.

    Schulman et al. 2017, equation 7: minus min(r A, clip(r) A). The value loss is half the larger of the squared errors
    of value and clipped value, times vf_coef.
    """
    gradients = {name: np.zeros(mask.shape) for name in ("logprobs", "values")}
    names = (
        "loss/policy",
        "loss/value",
        "policy/approxkl",
        "policy/clipfrac",
        "val/error",
        "val/clipfrac",
        "val/ratio",
    )
    sums = dict.fromkeys(names, 0.0) | {"val/vpred": 0.0, "squared": 0.0}
    for i, j in np.argwhere(mask):
        new, old, value, old_value, advantage, target = (
            float(arrays[name][i, j])
            for name in ("logprobs", "old_logprobs", "values", "old_values", "advantages", "returns")
        )
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        sums["loss/policy"] -= min(ratio * advantage, clipped * advantage)
        if ratio * advantage <= clipped * advantage:
            gradients["logprobs"][i, j] = -advantage * ratio
        near = min(max(value, old_value - clip_value), old_value + clip_value)
        sums["loss/value"] += 0.5 * max((value - target) ** 2, (near - target) ** 2)
        if (value - target) ** 2 >= (near - target) ** 2:
            gradients["values"][i, j] = vf_coef * (value - target)
        sums["policy/approxkl"] += 0.5 * (new - old) ** 2
        sums["policy/clipfrac"] += ratio * advantage > clipped * advantage
        sums["val/error"] += (value - target) ** 2
        sums["val/clipfrac"] += (near - target) ** 2 > (value - target) ** 2
        sums["val/ratio"] += ratio
        sums["val/vpred"] += value
        sums["squared"] += ratio**2
    return sums["loss/policy"] + vf_coef * sums["loss/value"], gradients, sums


def loss_inputs(shape: tuple[int, int] = (6, 9)) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    arrays = {"old_logprobs": -normal().abs(), "old_values": normal(), "advantages": normal(), "returns": normal()}
    arrays["logprobs"] = arrays["old_logprobs"] + 0.3 * normal()
    arrays["values"] = arrays["old_values"] + 0.3 * normal()
    return arrays, torch.rand(shape, generator=generator) < 0.7


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
    arrays, mask = loss_inputs()
    loss, gradients, sums = run_loss(arrays, mask, clip, clip_value, vf_coef)
    plain = {name: x.numpy() for name, x in arrays.items()}
    expected, expected_gradients, expected_sums = plain_loss(plain, mask.numpy(), clip, clip_value, vf_coef)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert sums["ppo/loss/total"].item() == pytest.approx(expected, rel=1e-12)
    assert sums["ratio_squared"].item() == pytest.approx(expected_sums.pop("squared"), rel=1e-12)
    for name, value in expected_sums.items():
        assert sums[f"ppo/{name}"].item() == pytest.approx(value, rel=1e-12), name
    for name, gradient in gradients.items():
        assert np.allclose(gradient.numpy(), expected_gradients[name], rtol=1e-12, atol=0), name
    assert 5 < expected_sums["policy/clipfrac"] < 30 and 1 < expected_sums["val/clipfrac"] < 30


def test_clipped_tokens_have_exactly_no_gradient() -> None:
    # ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 1, -1, 1, -1, 1; the clip is 0.2. The objective is the smaller of
    #   1.5 and 1.2: clipped; -1.5 and -1.2: not; 0.5 and 0.8: not; -0.5 and -0.8: clipped; 1.1 and 1.1: not
    # and an unclipped token has the gradient -advantage * ratio. Loss: -(1.2 - 1.5 + 0.5 - 0.8 + 1.1) = -0.5
    ratios, advantages = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]]), torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    zeros = torch.zeros_like(ratios)
    arrays = {"logprobs": ratios.log(), "old_logprobs": zeros, "advantages": advantages}
    arrays |= {"values": zeros, "old_values": zeros, "returns": zeros}
    loss, gradients, sums = run_loss(arrays, every(ratios), 0.2, 0.2, 0.1)
    assert gradients["logprobs"][0, [0, 3]].tolist() == [0.0, 0.0]
    assert_close(gradients["logprobs"], [[0.0, 1.5, -0.5, 0.0, -1.1]])
    assert loss.item() == pytest.approx(-0.5, abs=1e-6)
    assert sums["ppo/policy/clipfrac"].item() == 2


def test_values_clipped_away_from_their_return_have_exactly_no_gradient() -> None:
    # old value 0, clip 0.2, vf_coef 0.5. value -> clipped, return: squared errors; the larger one counts, halved
    #   0.5 -> 0.2, 1:   0.25 and 0.64: clipped, no gradient;  0.5 -> 0.2, 0: 0.25 and 0.04: 0.5 * (0.5 - 0) = 0.25
    #   0.1 -> 0.1, 1:   0.81 twice: 0.5 * (0.1 - 1) = -0.45;  -0.5 -> -0.2, -1: 0.25 and 0.64: clipped, no gradient
    # and the loss is 0.5 * 0.5 * (0.64 + 0.25 + 0.81 + 0.64), which is 0.585
    values, returns = torch.tensor([[0.5, 0.5, 0.1, -0.5]]), torch.tensor([[1.0, 0.0, 1.0, -1.0]])
    zeros = torch.zeros_like(values)
    arrays = {"logprobs": zeros, "old_logprobs": zeros, "advantages": zeros}
    arrays |= {"values": values, "old_values": zeros, "returns": returns}
    loss, gradients, sums = run_loss(arrays, every(values), 0.2, 0.2, 0.5)
    assert gradients["values"][0, [0, 3]].tolist() == [0.0, 0.0]
    assert_close(gradients["values"], [[0.0, 0.25, -0.45, 0.0]])
    assert loss.item() == pytest.approx(0.585, rel=1e-6)
    assert sums["ppo/val/clipfrac"].item() == 2


def test_masked_tokens_count_nowhere_in_the_loss() -> None:
    arrays, mask = loss_inputs()
    loss, gradients, sums = run_loss(arrays, mask, 0.2, 0.2, 0.1)
    assert all((gradient[~mask] == 0).all() for gradient in gradients.values())
    changed = {name: torch.where(mask, x, x * 1.5 + 0.2) for name, x in arrays.items()}
    other, _, other_sums = run_loss(changed, mask, 0.2, 0.2, 0.1)
    assert torch.equal(loss, other)
    assert all(torch.equal(total, other_sums[name]) for name, total in sums.items())


# --- the update ----------------------------------------------------------------------------------------------------


def make_args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**SETTINGS | {"micro_batch_size": ROWS, "num_minibatches": 1} | changes)


def make_accelerator(args: SimpleNamespace, precision: str = "no") -> Accelerator:
    """As main makes it, from a fresh state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    steps = math.ceil(ROWS / args.num_minibatches / args.micro_batch_size)
    return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)


def make_epochs(args: SimpleNamespace) -> Tensor:
    shuffle = np.random.RandomState(1)
    rows = np.stack([shuffle.permutation(ROWS) for _ in range(args.num_epochs)])
    return torch.from_numpy(rows).view(args.num_epochs, args.num_minibatches, -1)


@torch.no_grad()
def rollout(accelerator: Accelerator, actor: Any, epochs: Tensor, args: SimpleNamespace) -> dict[str, Any]:
    """A batch as main makes it: respond, forward in the first epoch's micro-batches, token rewards of random scores."""
    u = ppo_rlhf.uniforms(1, 1, ROWS, LENGTH, "cpu")
    with accelerator.autocast():
        batch = ppo_rlhf.respond(actor, random_rows([1, 14, 40, 23] * (ROWS // 4), 5, VOCABULARY), u, END, args)
        batch |= {name: torch.empty_like(u) for name in ("logprobs", "values")}
        for rows in epochs[0]:
            for part in ppo_rlhf.micro_batches(rows, batch["lengths"], args.micro_batch_size):
                batch["logprobs"][part], _, batch["values"][part] = ppo_rlhf.forward_response(actor, batch, part, 0.7)
    generator = torch.Generator().manual_seed(2)
    log_ratio = 0.3 * torch.randn(u.shape, generator=generator)
    batch["rewards"] = ppo_rlhf.token_rewards(torch.randn(ROWS, generator=generator), log_ratio, batch["kept"], 0.15)
    return batch


def make_policy() -> ppo_rlhf.ActorCritic:
    """A policy that ends most of its responses early, so that `kept` is ragged with mask_truncated."""
    return make_actor("gpt2", vocab_size=VOCABULARY, initializer_range=0.1, tie_word_embeddings=False)


def ragged(kept: Tensor) -> bool:
    return len(kept.sum(1).unique()) > 3


def update(
    policy: ppo_rlhf.ActorCritic, batch: dict[str, Any], epochs: Tensor, args: SimpleNamespace, optimizer: str = "tf"
) -> tuple[Tensor, dict[str, float]]:
    """All weights after ppo_update from a copy of the policy, as one vector, and the metrics."""
    accelerator, model = make_accelerator(args), copy.deepcopy(policy)
    if optimizer == "tf":
        made: torch.optim.Optimizer = AdamTF(model.parameters(), lr=3e-3, eps=1e-5)
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.3)
    prepared, made = accelerator.prepare(model, made)
    records = ppo_rlhf.ppo_update(accelerator, prepared, made, batch, epochs, args)
    return vector(model), ppo_rlhf.reduce_means(accelerator, records)


def vector(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def assert_same_update(ours: Tensor, expected: Tensor, start: Tensor, relative: float = 1e-5) -> None:
    """The moves of all weights agree (relative L2), and there are moves."""
    moved = (expected - start).norm()
    assert moved > 0.05
    assert (ours - expected).norm() < relative * moved


@pytest.fixture(params=[False, True], ids=["all", "mask_truncated"])
def mask_truncated(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("size", [ROWS, 5])
def test_a_pass_that_the_rollout_keeps_for_the_first_step_changes_no_bit(size: int, precision: str) -> None:
    """It is kept where one micro-batch has all rows, and saves a forward pass; weights and metrics are the same."""
    args = make_args(micro_batch_size=size, num_epochs=3)
    policy, epochs = make_policy(), make_epochs(args)
    shared, found = rollout(make_accelerator(args), policy, epochs, args), {}
    for is_kept in (True, False):
        accelerator, model, calls = make_accelerator(args, precision), copy.deepcopy(policy), []
        prepared, optimizer = accelerator.prepare(model, AdamTF(model.parameters(), lr=3e-3, eps=1e-5))
        batch = {name: x for name, x in shared.items() if name not in ("logprobs", "values")}
        parts = [part for rows in epochs[0] for part in ppo_rlhf.micro_batches(rows, batch["lengths"], size)]
        ppo_rlhf.look(accelerator, prepared, copy.deepcopy(policy), batch, parts, args.temperature)
        assert ("first" in batch) is (size == ROWS)
        assert not any(batch[name].requires_grad for name in ("logprobs", "values", "ref_logprobs"))
        assert torch.equal(batch["logprobs"], batch["ref_logprobs"]) or precision == "bf16"
        if not is_kept:
            batch.pop("first", None)
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        records = ppo_rlhf.ppo_update(accelerator, prepared, optimizer, batch, epochs, args)
        assert len(calls) == args.num_epochs * len(parts) - (is_kept and size == ROWS)
        found[is_kept] = vector(model), ppo_rlhf.reduce_means(accelerator, records), batch["logprobs"]
    (kept, kept_metrics, kept_logprobs), (made, metrics, logprobs) = found[True], found[False]
    assert torch.equal(kept, made) and torch.equal(kept_logprobs, logprobs) and kept_metrics == metrics
    assert metrics["first_ratio_error"] == 0 and (made - vector(policy)).norm() > 0.05


@pytest.mark.parametrize("optimizer", ["tf", "sgd"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_gradient_accumulation_equals_the_large_batch(
    mask_truncated: bool, num_minibatches: int, optimizer: str
) -> None:
    whole = make_args(num_minibatches=num_minibatches, mask_truncated=mask_truncated)
    policy, epochs = make_policy(), make_epochs(whole)
    batch = rollout(make_accelerator(whole), policy, epochs, whole)
    assert ragged(batch["kept"]) is mask_truncated
    expected, metrics = update(policy, batch, epochs, whole, optimizer)
    for size in (2, 3):  # 8 and 16 rows are no multiples of 3
        args = make_args(**vars(whole) | {"micro_batch_size": size})
        weights, others = update(policy, batch, epochs, args, optimizer)
        assert_same_update(weights, expected, vector(policy))
        for name in set(metrics) - {"first_ratio_error"}:
            assert others[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_update_equals_a_plain_loop_over_minibatches(mask_truncated: bool, num_minibatches: int) -> None:
    """Without accelerate: per minibatch whiten, estimate advantages, whiten, and a step on the mean loss per token."""
    args = make_args(num_minibatches=num_minibatches, mask_truncated=mask_truncated, micro_batch_size=5)
    policy, epochs = make_policy(), make_epochs(args)
    batch = rollout(make_accelerator(args), policy, epochs, args)
    plain = copy.deepcopy(policy)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.3), []
    for rows in epochs.flatten(0, 1):
        mask, values = batch["kept"][rows], batch["values"][rows]
        rewards = ppo_rlhf.whiten(batch["rewards"][rows], mask, shift_mean=False)
        advantages, returns = ppo_rlhf.gae(values, rewards, mask, args.gamma, args.lam)
        logprobs, _, predicted = ppo_rlhf.forward_response(plain, batch, rows, 0.7)
        old = batch["logprobs"][rows], values, ppo_rlhf.whiten(advantages, mask), returns, mask
        loss = ppo_rlhf.ppo_loss(logprobs, predicted, *old, 0.2, 0.2, 0.1)[0] / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item() * mask.sum().item(), mask.sum().item()))
    weights, metrics = update(policy, batch, epochs, args, "sgd")
    assert_same_update(weights, vector(plain), vector(policy))
    total, count = map(sum, zip(*losses, strict=True))
    assert metrics["ppo/loss/total"] == pytest.approx(total / count, rel=1e-4)


def test_spread_of_rewards_matters_only_without_whitening(mask_truncated: bool) -> None:
    weights = {}
    for whiten_rewards in (True, False):
        args = make_args(whiten_rewards=whiten_rewards, mask_truncated=mask_truncated)
        policy, epochs = make_policy(), make_epochs(args)
        batch = rollout(make_accelerator(args), policy, epochs, args)
        mean, _ = ppo_rlhf.moments(batch["rewards"], batch["kept"])
        wide = batch | {"rewards": mean + 10 * (batch["rewards"] - mean)}
        weights[whiten_rewards] = [update(policy, x, epochs, args, "sgd")[0] for x in (batch, wide)]
    assert_same_update(*weights[True], vector(policy))
    assert (weights[False][0] - weights[False][1]).norm() > 0.05


def test_order_of_rows_does_not_matter(mask_truncated: bool) -> None:
    args = make_args(num_minibatches=2, micro_batch_size=3, mask_truncated=mask_truncated)
    policy, epochs = make_policy(), make_epochs(args)
    batch = rollout(make_accelerator(args), policy, epochs, args)
    expected, _ = update(policy, batch, epochs, args)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(8))
    moved = {name: x[order] for name, x in batch.items() if isinstance(x, Tensor)}
    moved["trees"] = [batch["trees"][i] for i in order.tolist()]
    weights, _ = update(
        policy, moved, order.argsort()[epochs], args
    )  # the same minibatches of rows that stand elsewhere
    assert_same_update(weights, expected, vector(policy))
    weights, _ = update(policy, batch, epochs.flip(2), args)  # the same minibatches in another order
    assert_same_update(weights, expected, vector(policy))
    weights, _ = update(policy, batch, epochs.flip(1), args)  # other minibatches first: that is another update
    assert (weights - expected).norm() > 1e-3 * (expected - vector(policy)).norm()


@pytest.fixture
def fast_cpu() -> Iterator[None]:
    """The matrix products that main chooses, for one test."""
    before = torch.get_float32_matmul_precision()
    ppo_rlhf.fast_math(torch.device("cpu"))
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_first_ratio_is_exactly_one(fast_cpu: None, mask_truncated: bool, num_minibatches: int, precision: str) -> None:
    args = make_args(num_minibatches=num_minibatches, micro_batch_size=3, mask_truncated=mask_truncated)
    accelerator, policy, epochs = make_accelerator(args, precision), make_policy(), make_epochs(args)
    prepared, optimizer = accelerator.prepare(policy, AdamTF(policy.parameters(), lr=1e-3, eps=1e-5))
    batch = rollout(accelerator, accelerator.unwrap_model(prepared), epochs, args)
    shifted = batch | {"logprobs": batch["logprobs"] + 0.01}
    metrics = ppo_rlhf.reduce_means(
        accelerator, ppo_rlhf.ppo_update(accelerator, prepared, optimizer, batch, epochs, args)
    )
    assert metrics["first_ratio_error"] == 0.0
    assert metrics["ppo/policy/approxkl"] > 0  # later ratios are not
    args.num_epochs, args.lr = 1, 0.0
    again = ppo_rlhf.ppo_update(accelerator, prepared, optimizer, shifted, epochs[:1], args)
    assert ppo_rlhf.reduce_means(accelerator, again)["first_ratio_error"] > 5e-3  # it measures something


def test_reduce_means_weights_each_record_by_its_count() -> None:
    # a: (2 + 9) / (1 + 4) = 2.2; b stands in one record only: 6 / 3 = 2
    one = {"a": (torch.tensor(2.0), torch.tensor(1)), "b": (torch.tensor(6.0), torch.tensor(3))}
    records = [one, {"a": (torch.tensor(9.0), torch.tensor(4))}]
    means = ppo_rlhf.reduce_means(make_accelerator(make_args()), records)
    assert means == pytest.approx({"a": 2.2, "b": 2.0})
