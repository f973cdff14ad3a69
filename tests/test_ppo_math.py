"""The arithmetic of PPO and RLOO: cases computed by hand."""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_tools import make_batch
from torch import Tensor

import ppo_rlhf
import rloo_rlhf

BOTH = pytest.mark.parametrize("module", [ppo_rlhf, rloo_rlhf])


def every(x: Tensor) -> Tensor:
    """A mask in which all count."""
    return torch.ones_like(x, dtype=torch.bool)


def numbers(text: str) -> Tensor:
    """(rows, columns) of numbers; a slash begins a new row."""
    return torch.tensor([[float(word) for word in row.split()] for row in text.split("/")])


def mask_of(text: str) -> Tensor:
    """Which of the digits are 1."""
    return numbers(text).bool()


def assert_close(ours: Tensor, expected: Any, atol: float = 1e-6) -> None:
    """Equal shapes and numbers, which may be given as text."""
    if isinstance(expected, str):
        expected = numbers(expected)
    expected = torch.as_tensor(expected).double()
    assert ours.shape == expected.shape
    assert (ours.double() - expected).abs().max() <= atol


def olds(like: Tensor, **fields: Tensor) -> Any:
    """A micro-batch in which all tokens count and all else is 0, but for these fields."""
    zeros = dict.fromkeys(("logprobs", "values", "advantages", "returns"), torch.zeros_like(like))
    return SimpleNamespace(**zeros | {"loss_mask": every(like)} | fields)


# --- rewards ---


@BOTH
def test_a_missing_end_replaces_the_score_or_is_added_to_it(module: ModuleType) -> None:
    scores = torch.tensor([0.5, 2.0, -3.0])
    found_end = torch.tensor([True, False, False])
    args = module.Args(penalty_reward_value=-1.5)
    assert module.penalize_missing_end(scores, found_end, args).tolist() == [0.5, -1.5, -1.5]
    args.penalty_mode = "add"
    assert module.penalize_missing_end(scores, found_end, args).tolist() == [0.5, 0.5, -4.5]
    assert scores.tolist() == [0.5, 2.0, -3.0]


@BOTH
def test_a_score_that_is_no_number_is_paid_for_unless_a_penalty_replaces_it(
    module: ModuleType,
) -> None:
    """A NaN then stops the run, as the gradient is no number: it is not hidden."""
    scores = torch.tensor([float("nan"), float("nan")])
    found_end = torch.tensor([True, False])
    paid = module.penalize_missing_end(scores, found_end, module.Args(penalty_reward_value=-2.0))
    assert paid[0].isnan()
    assert paid[1] == -2
    added = module.penalize_missing_end(scores, found_end, module.Args(penalty_mode="add"))
    assert added.isnan().all()


def test_the_score_stands_at_the_last_token_that_counts() -> None:
    mask = mask_of("1 1 1 / 1 1 0 / 1 0 0")
    scores = torch.tensor([10.0, -20.0, 30.0])
    assert_close(ppo_rlhf.at_last_token(scores, mask), "0 0 10 / 0 -20 0 / 30 0 0")


# --- advantages ---


def test_gae_discounts_future_errors_by_gamma_times_lambda() -> None:
    # gamma 0.9, lambda 0.8, gamma * lambda = 0.72; the value after the response is 0
    #   delta2 =  2   + 0.9 * 0 - 3 = -1      A2 = -1                      return2 = -1 + 3
    #   delta1 = -1   + 0.9 * 3 - 2 = -0.3    A1 = -0.3 - 0.72 * 1         return1 = -1.02 + 2
    #   delta0 =  0.5 + 0.9 * 2 - 1 =  1.3    A0 =  1.3 - 0.72 * 1.02      return0 = 0.5656 + 1
    values = numbers("1 2 3")
    rewards = numbers("0.5 -1 2")
    advantages, returns = ppo_rlhf.gae(values, rewards, every(values), 0.9, 0.8)
    assert_close(advantages, "0.5656 -1.02 -1")
    assert_close(returns, "1.5656 0.98 2")
    # the same with the last token masked: its value and reward count as 0
    #   A2 = 0;  delta1 = -1 + 0 - 2 = -3;  A1 = -3;  A0 = 1.3 + 0.72 * -3 = -0.86
    mask = mask_of("1 1 0")
    advantages, returns = ppo_rlhf.gae(values, rewards, mask, 0.9, 0.8)
    assert_close(advantages, "-0.86 -3 0")
    assert_close(returns, "0.14 -1 0")


def test_moments_are_of_what_the_mask_has() -> None:
    # 1, 2, 6: mean 3, squares of the differences 4 + 1 + 9 = 14
    x = numbers("1 2 100 / 6 -100 100")
    mask = mask_of("1 1 0 / 1 0 0")
    mean, variance = ppo_rlhf.moments(x, mask)
    assert mean == 3
    assert variance.item() == pytest.approx(14 / 3)


def test_whiten_gives_the_table_of_the_n_implementation_details() -> None:
    # Huang et al. 2024, detail 9 of policy training: TensorFlow's numbers, mean 1.6, biased
    # variance 0.6 / 9
    rewards = numbers("1.2 1.3 1.4 / 1.5 1.6 1.7 / 1.8 1.9 2.0")
    published = numbers(
        "0.05080712 0.4381051 0.8254035 /"
        "1.2127019 1.6000004 1.9872988 /"
        "2.3745968 2.7618952 3.1491938"
    )
    whitened = ppo_rlhf.whiten(rewards, every(rewards), shift_mean=False)
    assert_close(whitened, published, atol=2e-6)
    shifted = ppo_rlhf.whiten(rewards, every(rewards), shift_mean=True)
    assert_close(shifted, published - 1.6, atol=2e-6)
    # 1e-8 is added to the variance: 0 and 2e-4, mean 1e-4, variance 1e-8:
    # 1e-4 / sqrt(1e-8 + 1e-8) = 0.707107
    x = numbers("0 2e-4")
    small = ppo_rlhf.whiten(x, every(x), shift_mean=True)
    assert_close(small, "-0.707107 0.707107", atol=1e-5)
    # what the mask leaves out is 0, and counts in no mean: 1, 2, 6 have variance 14 / 3
    mask = mask_of("1 1 1 0")
    masked = ppo_rlhf.whiten(numbers("1 2 6 9"), mask, shift_mean=True)
    assert_close(masked, numbers("-2 -1 3 0") / (14 / 3) ** 0.5)
    kept = ppo_rlhf.whiten(numbers("1 2 6 9"), mask, shift_mean=False)
    assert_close(kept, (numbers("-2 -1 3 0") / (14 / 3) ** 0.5 + 3) * mask)


def test_rewards_are_whitened_before_and_advantages_after_they_are_summed() -> None:
    batch = make_batch([[1]] * 2, np.zeros((2, 4)))
    batch.loss_mask = mask_of("1 1 1 0 / 1 1 0 0")
    batch.rewards = numbers("0 0 6 0 / 0 -4 0 0")
    batch.values = numbers("1 2 3 9 / 1 5 9 9")
    args = ppo_rlhf.Args(gamma=1.0, lam=1.0, whiten_rewards=False, whiten_advantages=False)
    ppo_rlhf.set_advantages(batch, args)
    assert_close(batch.returns, "6 6 6 0 / -4 -4 0 0")
    assert_close(batch.advantages, "5 4 3 0 / -5 -9 0 0")
    # 5, 4, 3, -5, -9: mean -0.4, variance (25 + 16 + 9 + 25 + 81) / 5 - 0.16
    args.whiten_advantages = True
    ppo_rlhf.set_advantages(batch, args)
    assert_close(batch.advantages, "5 4 3 0 / -5 -9 0 0")  # those that are set stay
    batch.advantages = None
    ppo_rlhf.set_advantages(batch, args)
    deviation = (156 / 5 - 0.16) ** 0.5
    assert_close(batch.advantages, numbers("5.4 4.4 3.4 0 / -4.6 -8.6 0 0") / deviation)
    assert_close(batch.returns, "6 6 6 0 / -4 -4 0 0")
    # rewards 0, 0, 6, 0, -4: mean 0.4, variance (36 + 16) / 5 - 0.16; the mean is kept
    args = ppo_rlhf.Args(gamma=1.0, lam=1.0, whiten_advantages=False)
    batch.advantages = None
    ppo_rlhf.set_advantages(batch, args)
    whitened = (batch.rewards - 0.4) / (52 / 5 - 0.16) ** 0.5 + 0.4
    totals = (whitened * batch.loss_mask).flip(1).cumsum(1).flip(1)
    assert_close(batch.returns, totals * batch.loss_mask)
    assert_close(batch.advantages, (totals - batch.values) * batch.loss_mask)
    assert batch.rewards[0, 2] == 6  # as they were


def test_leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries() -> None:
    # rewards of four responses to each of three queries; of the first: 1 - (2 + 3 + 6) / 3 = -8 / 3
    rewards = numbers("1 2 3 6 / 0 0 0 4 / -1 1 -1 1")
    expected = numbers("-8 -4 0 12 / -4 -4 -4 12 / -4 4 -4 4") / 3
    assert_close(rloo_rlhf.rloo_advantages(rewards), expected)
    of_two = rloo_rlhf.rloo_advantages(numbers("3 1"))  # the difference
    assert of_two.tolist() == [[2, -2]]
    equal = numbers("0.1 0.1 0.1 / -0.7 -0.7 -0.7")
    assert not rloo_rlhf.rloo_advantages(equal).any()


# --- losses ---


def test_a_value_within_the_clip_range_never_counts_as_clipped() -> None:
    """As in the original. Rounded, as old + clamp(new - old) is, one in a hundred of these would
    count."""
    old, values, distance = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(4))
    old = 0.09 * old.tanh()
    values = 0.09 * values.tanh()
    values[:7] = (old + 0.3 * distance.sign())[:7]  # nearer to the return than the clip allows
    returns = old + distance.sign() * (0.6 + distance.abs())
    values.requires_grad_()
    before = olds(old, values=old, returns=returns)
    args = ppo_rlhf.Args(cliprange_value=0.2)
    _, loss, metrics = ppo_rlhf.ppo_loss(before.logprobs, values, before, args)
    loss.sum().backward()
    assert metrics["ppo/val/clipfrac"][:7].all()
    assert not metrics["ppo/val/clipfrac"][7:].any()
    assert torch.equal(values.grad[7:], (values - returns)[7:])
    assert not values.grad[:7].any()


def test_the_value_loss_is_half_the_larger_squared_error() -> None:
    # clipped to 0.2 around 0: 0.2, 0.1, -0.2; errors from the returns 1, 1, 0
    values = numbers("0.5 0.1 -0.6").requires_grad_()
    before = olds(values, returns=numbers("1 1 0"))
    args = ppo_rlhf.Args(cliprange_value=0.2)
    _, loss, metrics = ppo_rlhf.ppo_loss(before.logprobs, values, before, args)
    assert_close(loss, "0.32 0.405 0.18")  # 0.8 ** 2 / 2, 0.9 ** 2 / 2, 0.6 ** 2 / 2
    assert torch.equal(metrics["ppo/loss/value"], loss)
    assert_close(metrics["ppo/val/error"], "0.25 0.81 0.36")
    loss.sum().backward()
    assert_close(values.grad, "0 -0.9 -0.6")


def test_ratios_are_clipped_where_that_makes_the_loss_larger() -> None:
    # advantages 1 and -1, ratios 1.5, 1.1, 0.5: -min(ratio, clipped) and max(ratio, clipped)
    logprobs = numbers("1.5 1.1 0.5 / 1.5 1.1 0.5").log().requires_grad_()
    advantages = numbers("1 1 1 / -1 -1 -1")
    before = olds(logprobs, advantages=advantages)
    losses = numbers("-1.2 -1.1 -0.5 / 1.5 1.1 0.8")
    gradient = "0 -1.1 -0.5 / 1.5 1.1 0"
    is_clipped = mask_of("1 0 0 / 0 0 1")

    args = ppo_rlhf.Args(cliprange=0.2)
    loss, _, metrics = ppo_rlhf.ppo_loss(logprobs, before.values, before, args)
    loss.sum().backward()
    assert_close(loss, losses)
    assert_close(logprobs.grad, gradient)
    assert torch.equal(metrics["ppo/policy/clipfrac"], is_clipped)

    # the same of six responses of one token
    logprobs = logprobs.detach().view(6, 1).requires_grad_()
    args = rloo_rlhf.Args(cliprange=0.2)
    before = olds(logprobs, advantages=advantages.flatten())
    loss, metrics = rloo_rlhf.rloo_loss(logprobs, before, args)
    loss.sum().backward()
    assert_close(loss, losses.flatten())
    assert_close(logprobs.grad, numbers(gradient).view(6, 1))
    assert torch.equal(metrics["rloo/clipfrac"], is_clipped.flatten())


def test_the_ratio_of_a_response_is_the_product_of_those_of_its_tokens() -> None:
    # 1.1 * 1.05 = 1.155, of a third token that does not count; 1.5 * 1.5 = 2.25, clipped to 1.2
    logprobs = numbers("1.1 1.05 9 / 1.5 1.5 1").log().requires_grad_()
    mask = mask_of("1 1 0 / 1 1 1")
    args = rloo_rlhf.Args(cliprange=0.2)
    before = olds(logprobs, advantages=torch.tensor([-2.0, 3.0]), loss_mask=mask)
    loss, metrics = rloo_rlhf.rloo_loss(logprobs, before, args)
    loss.sum().backward()
    assert_close(loss, [2 * 1.155, -3 * 1.2])
    assert_close(logprobs.grad, "2.31 2.31 0 / 0 0 0")
    assert metrics["rloo/clipfrac"].tolist() == [False, True]
    assert_close(metrics["rloo/ratio"], [1.155, 2.25])
    assert_close(metrics["rloo/approxkl"], [np.log(1.155) ** 2 / 2, np.log(2.25) ** 2 / 2])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@BOTH
def test_loss_and_gradient_are_finite_where_policies_are_far_apart(
    module: ModuleType, sign: float
) -> None:
    far = numbers("200 -200 90 -90 0 / -1e4 1e4 41 -41 1e-3")
    logprobs = (sign * far).requires_grad_()
    before = olds(far, advantages=numbers("3 / -3"))
    if module is ppo_rlhf:
        loss, _, metrics = ppo_rlhf.ppo_loss(logprobs, before.values, before, ppo_rlhf.Args())
    else:
        before.advantages = before.advantages.flatten()
        loss, metrics = rloo_rlhf.rloo_loss(logprobs, before, rloo_rlhf.Args())
    loss.sum().backward()
    for x in (loss, logprobs.grad, *metrics.values()):
        assert x.isfinite().all()
    assert logprobs.grad[:, -1].abs().min() > 0 or module is rloo_rlhf  # near tokens still learn


# --- what is made of the metrics ---


@pytest.mark.parametrize(
    ("kl", "coefficient"),
    [
        (0.0, 0.468),
        (6.0, 0.5),
        (6.6, 0.516),
        (9.0, 0.532),
    ],
)
@BOTH
def test_the_kl_coefficient_moves_by_a_fifth_of_batch_over_horizon_at_most(
    module: ModuleType, kl: float, coefficient: float
) -> None:
    # batch / horizon is 0.32; the errors are -0.2, 0, 0.1 and 0.2
    args = module.Args(batch_size=64, kl_horizon=200.0, adaptive_kl_target=6.0)
    assert module.adapt_kl_coef(0.5, kl, args) == pytest.approx(coefficient)
    args.adaptive_kl_target = None
    assert module.adapt_kl_coef(0.5, kl, args) == 0.5


@BOTH
def test_a_horizon_that_could_make_the_kl_coefficient_0_or_less_is_refused(
    module: ModuleType,
) -> None:
    # a fifth of the batch is 12.8: the coefficient would be times 1 - 0.2 * 64 / 12.8 = 0
    args = module.Args(batch_size=64, kl_horizon=12.8, adaptive_kl_target=6.0)
    with pytest.raises(module.UserError, match="^--kl_horizon 12.8 must be above a fifth of "):
        module.check_settings(args, 9, 1)
    args.kl_horizon = 12.9
    module.check_settings(args, 9, 1)
    assert 0 < module.adapt_kl_coef(0.5, 0.0, args) < 0.01
    module.check_settings(module.Args(kl_horizon=1.0, adaptive_kl_target=None), 9, 1)


CHECKS = [  # dtype, update; the metrics that are not 0, their size as a part of the limit
    ("fp32", 0, "first_ratio_error", 1e-3),
    ("fp32", 1, "first_ratio_error", 1e-3),
    ("tf32", 1, "first_ratio_error", 0.01),
    ("bf16", 0, "first_ratio_error", 0.02),
    ("fp32", 0, "sampling_error", 0.01),
    ("fp32", 1, "sampling_error", 0.01),
    ("tf32", 1, "sampling_error", 0.2),
    ("bf16", 1, "sampling_error", 1.0),
    ("fp32", 0, "objective/kl", 0.025),  # 25 tokens
    ("tf32", 0, "objective/kl", 0.25),
    ("bf16", 0, "objective/kl", 0.5),
    ("fp32", 1, "objective/kl", 20.0),
    ("bf16", 1, "objective/kl", 20.0),
]


@pytest.mark.parametrize(("dtype", "update", "name", "limit"), CHECKS)
@BOTH
def test_first_passes_that_differ_and_a_far_policy_stop_a_run(
    module: ModuleType, dtype: str, update: int, name: str, limit: float
) -> None:
    args = module.Args(dtype=dtype, max_kl=20.0, response_length=25)
    names = ("gradient_norm", "first_ratio_error", "sampling_error", "objective/kl")
    fine = dict.fromkeys(names, 0.0)
    for sign in (-1, 1):
        module.check_update(update, fine | {name: 0.99 * sign * limit}, args)
        with pytest.raises(module.UserError, match=f"^{name} is .*, its limit .*: .*; see docs/"):
            module.check_update(update, fine | {name: 1.01 * sign * limit}, args)
    for bad in ("nan", "inf"):
        for wrong in (name, "gradient_norm"):
            with pytest.raises(module.UserError, match=f"^{wrong} is {bad}"):
                module.check_update(update, fine | {wrong: float(bad)}, args)


def test_a_metric_is_the_sum_over_the_count_of_all_records() -> None:
    """No mean of means, and nothing that the mask leaves out."""
    records = [
        ppo_rlhf.sums_over(mask_of("1 1 0 / 1 0 0"), {"a": numbers("1 2 9 / 3 9 9")}),
        ppo_rlhf.sums_over(mask_of("1 0"), {"a": numbers("2 9"), "c": mask_of("1 1")}),
        ppo_rlhf.sums_over(torch.ones(()), {"b": torch.tensor(2.5)}),
    ]
    assert ppo_rlhf.reduce_means(records) == {"a": 2.0, "b": 2.5, "c": 1.0}


def test_a_sum_of_many_tokens_is_not_rounded_away() -> None:
    """A thousand small records beside a large one add up, in fp64."""
    third = {"a": torch.tensor([1 / 3, 1.0], dtype=torch.float64)}
    large = ppo_rlhf.sums_over(torch.ones(1), {"a": torch.tensor([2.0**24])})
    metrics = ppo_rlhf.reduce_means([large, *[third] * 999])
    assert metrics["a"] == pytest.approx((2.0**24 + 333) / 1000, rel=1e-12)
