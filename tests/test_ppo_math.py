"""The arithmetic of PPO and RLOO: cases computed by hand."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from golden_tools import make_batch
from torch import Tensor

import ppo_rlhf
import rloo_rlhf
import train_reward

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


def batch_of(rows: int, length: int, **tensors: Tensor) -> ppo_rlhf.Batch:
    """A batch in which all is 0 but these."""
    batch = make_batch([[1]] * rows, np.zeros((rows, length)))
    for name, x in tensors.items():
        setattr(batch, name, x)
    return batch


# --- rewards ---


def test_estimators_of_the_kl_at_hand_computed_ratios() -> None:
    # log ratios log 2 and -log 4: 1 / ratio is 1 / 2 and 4
    log_ratio = numbers("2 0.25").log()
    log2 = 0.69314718
    full = numbers("7 8")
    expected = {
        "k1": [[log2, -2 * log2]],
        "k2": [[log2**2 / 2, 2 * log2**2]],
        "k3": [[0.5 - 1 + log2, 4 - 1 - 2 * log2]],
        "abs": [[log2, 2 * log2]],
        "full": "7 8",
    }
    for kind, penalty in expected.items():
        assert_close(ppo_rlhf.kl_penalty(log_ratio, kind, full), penalty)
    far = ppo_rlhf.kl_penalty(numbers("-1000"), "k3")
    assert far.isfinite().all()
    assert far > 1e17


def test_a_missing_end_replaces_the_score_or_is_added_to_it() -> None:
    scores = torch.tensor([0.5, 2.0, -3.0])
    found_end = torch.tensor([True, False, False])
    args = ppo_rlhf.Args(penalty_reward_value=-1.5)
    assert ppo_rlhf.penalize(scores, found_end, args).tolist() == [0.5, -1.5, -1.5]
    args.penalty_mode = "add"
    assert ppo_rlhf.penalize(scores, found_end, args).tolist() == [0.5, 0.5, -4.5]
    assert scores.tolist() == [0.5, 2.0, -3.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers_are_refused(bad: float) -> None:
    """Also where a penalty would stand in their place."""
    args = ppo_rlhf.Args(reward_fn="my:own")
    with pytest.raises(ppo_rlhf.UserError, match="--reward_fn my:own: NaN or infinite rewards"):
        ppo_rlhf.penalize(torch.tensor([1.0, bad]), torch.tensor([True, False]), args)


@pytest.mark.parametrize("mode", ["replace", "add"])
def test_penalties_that_no_float_holds_are_refused(mode: str) -> None:
    args = ppo_rlhf.Args(penalty_reward_value=-1e308, penalty_mode=mode)
    with pytest.raises(ppo_rlhf.UserError, match="--penalty_reward_value is too large"):
        ppo_rlhf.penalize(torch.tensor([1.0, 2.0]), torch.tensor([True, False]), args)


def test_scores_are_scaled_or_whitened_and_then_clipped() -> None:
    # mean 2, biased variance 8 / 3
    scores = torch.tensor([0.0, 2.0, 4.0])
    deviation = (8 / 3) ** 0.5
    scaled = [0.0, 2 / deviation, 4 / deviation]
    args = ppo_rlhf.Args()
    assert ppo_rlhf.normalize_scores(scores, args).tolist() == [0.0, 2.0, 4.0]
    args.score_norm = "scale"
    assert_close(ppo_rlhf.normalize_scores(scores, args), scaled)
    assert ppo_rlhf.normalize_scores(torch.full((3,), -1.0), args).tolist() == [-1.0] * 3
    args.score_norm = "whiten"
    assert_close(ppo_rlhf.normalize_scores(scores, args), [-2 / deviation, 0, 2 / deviation])
    args.score_clip = 1.0
    assert_close(ppo_rlhf.normalize_scores(scores, args), [-1.0, 0.0, 1.0])
    assert_close(ppo_rlhf.normalize_scores(torch.full((3,), 5.0), args), [0.0, 0.0, 0.0])


def test_the_score_stands_at_the_last_token_that_counts() -> None:
    mask = mask_of("1 1 1 / 1 1 0 / 1 0 0")
    token_kl = numbers("1 2 3 / 4 -5 0 / 0 0 0")
    scores = torch.tensor([10.0, 20.0, 30.0])
    rewards = ppo_rlhf.token_rewards(scores, token_kl, mask, 0.1)
    assert_close(rewards, "-0.1 -0.2 9.7 / -0.4 20.5 0 / 30 0 0")


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
    _, unbiased = ppo_rlhf.moments(x, mask, torch.sum, 1)
    assert mean == 3
    assert variance.item() == pytest.approx(14 / 3)
    assert unbiased.item() == pytest.approx(14 / 2)


def test_whiten_gives_the_table_of_the_n_implementation_details() -> None:
    # Huang et al. 2024, detail 9 of policy training: TensorFlow's numbers, mean 1.6, biased
    # variance 0.6 / 9
    rewards = numbers("1.2 1.3 1.4 / 1.5 1.6 1.7 / 1.8 1.9 2.0")
    published = numbers(
        "0.05080712 0.4381051 0.8254035 /"
        "1.2127019 1.6000004 1.9872988 /"
        "2.3745968 2.7618952 3.1491938"
    )
    whitened = ppo_rlhf.whiten(rewards, every(rewards), torch.sum, 0, shift_mean=False)
    assert_close(whitened, published, atol=2e-6)
    shifted = ppo_rlhf.whiten(rewards, every(rewards), torch.sum, 0, shift_mean=True)
    assert_close(shifted, published - 1.6, atol=2e-6)
    # 1e-8 is added to the variance: 0 and 2e-4, mean 1e-4, variance 1e-8:
    # 1e-4 / sqrt(1e-8 + 1e-8) = 0.707107
    x = numbers("0 2e-4")
    small = ppo_rlhf.whiten(x, every(x), torch.sum, 0, shift_mean=True)
    assert_close(small, "-0.707107 0.707107", atol=1e-5)
    # unbiased: 1, 2, 6 have variance 7
    mask = mask_of("1 1 1 0")
    unbiased = ppo_rlhf.whiten(numbers("1 2 6 9"), mask, torch.sum, 1, shift_mean=True)
    assert_close(unbiased, numbers("-2 -1 3 0") / 7**0.5)


def test_the_state_after_the_end_is_valued_but_no_action() -> None:
    """Advantages are whitened over the tokens, rewards over these and the slot after the end."""
    batch = batch_of(2, 4)
    batch.mask = mask_of("1 1 0 0 / 1 0 0 0")
    batch.value_mask = mask_of("1 1 1 0 / 1 1 0 0")
    batch.rewards = numbers("0 0 6 0 / 0 -4 0 0")
    batch.values = numbers("1 2 3 9 / 1 5 9 9")
    args = ppo_rlhf.Args(gamma=1.0, lam=1.0, whiten_rewards=False, whiten_advantages=False)
    ppo_rlhf.set_advantages(batch, torch.arange(2), args)
    assert_close(batch.returns, "6 6 6 0 / -4 -4 0 0")
    assert_close(batch.advantages, "5 4 3 0 / -5 -9 0 0")
    # of the tokens 5, 4, -5: mean 4 / 3, variance (121 + 64 + 361) / 27
    args.whiten_advantages = True
    ppo_rlhf.set_advantages(batch, torch.arange(2), args)
    deviation = (546 / 27) ** 0.5
    assert_close(batch.advantages, numbers("11 8 0 0 / -19 0 0 0") / 3 / deviation)
    assert_close(batch.returns, "6 6 6 0 / -4 -4 0 0")


def test_leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries() -> None:
    # rewards of four responses to each of three queries; of the first: 1 - (2 + 3 + 6) / 3 = -8 / 3
    rewards = numbers("1 2 3 6 / 0 0 0 4 / -1 1 -1 1")
    expected = numbers("-8 -4 0 12 / -4 -4 -4 12 / -4 4 -4 4") / 3
    args = rloo_rlhf.Args()
    assert_close(rloo_rlhf.rloo_advantages(rewards, args), expected)
    of_two = rloo_rlhf.rloo_advantages(numbers("3 1"), args)  # the difference
    assert of_two.tolist() == [[2, -2]]
    equal = numbers("0.1 0.1 0.1 / -0.7 -0.7 -0.7")
    assert not rloo_rlhf.rloo_advantages(equal, args).any()
    # normalised: they have mean 0; the unbiased deviation is that of all rows together
    args.normalize_advantages = True
    deviation = np.std(expected.tolist(), ddof=1) + 1e-4
    assert_close(rloo_rlhf.rloo_advantages(rewards, args), expected / deviation)
    assert not rloo_rlhf.rloo_advantages(equal, args).any()


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
    batch = batch_of(20, 50, values=old, returns=returns)
    rows = torch.arange(20)
    args = ppo_rlhf.Args(cliprange_value=0.2)
    _, loss, sums = ppo_rlhf.ppo_loss(torch.zeros_like(old), values, batch, rows, args)
    loss.backward()
    assert sums["ppo/val/clipfrac"][0] == 7 * 50
    assert torch.equal(values.grad[7:], (values - returns)[7:])
    assert not values.grad[:7].any()


def test_ratios_are_clipped_where_that_makes_the_loss_larger() -> None:
    # advantages 1 and -1, ratios 1.5, 1.1, 0.5: -min(ratio, clipped) and max(ratio, clipped)
    logprobs = numbers("1.5 1.1 0.5 / 1.5 1.1 0.5").log().requires_grad_()
    advantages = numbers("1 1 1 / -1 -1 -1")
    rows = torch.arange(2)
    expected = -1.2 - 1.1 - 0.5 + 1.5 + 1.1 + 0.8
    gradient = "0 -1.1 -0.5 / 1.5 1.1 0"

    batch = batch_of(2, 3, advantages=advantages)
    args = ppo_rlhf.Args(cliprange=0.2)
    loss, _, sums = ppo_rlhf.ppo_loss(logprobs, torch.zeros(2, 3), batch, rows, args)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert_close(logprobs.grad, gradient)
    assert [x.item() for x in sums["ppo/policy/clipfrac"]] == [2, 6]

    batch = batch_of(2, 3, advantages=advantages[:, :1])
    logprobs.grad = None
    args = rloo_rlhf.Args(cliprange=0.2, token_level=True)
    loss, sums = rloo_rlhf.rloo_loss(logprobs, batch, rows, args)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert_close(logprobs.grad, gradient)
    assert [x.item() for x in sums["rloo/clipfrac"]] == [2, 6]


def test_the_ratio_of_a_response_is_the_product_of_those_of_its_tokens() -> None:
    # 1.1 * 1.05 = 1.155, of a third token that does not count; 1.5 * 1.5 = 2.25, clipped to 1.2
    logprobs = numbers("1.1 1.05 9 / 1.5 1.5 1").log().requires_grad_()
    batch = batch_of(2, 3, mask=mask_of("1 1 0 / 1 1 1"), advantages=numbers("-2 / 3"))
    args = rloo_rlhf.Args(cliprange=0.2)
    loss, sums = rloo_rlhf.rloo_loss(logprobs, batch, torch.arange(2), args)
    loss.backward()
    assert loss.item() == pytest.approx(2 * 1.155 - 3 * 1.2)
    assert_close(logprobs.grad, "2.31 2.31 0 / 0 0 0")
    assert [x.item() for x in sums["rloo/clipfrac"]] == [1, 2]
    approxkl = (np.log(1.155) ** 2 + np.log(2.25) ** 2) / 2
    assert sums["rloo/approxkl"][0].item() == pytest.approx(approxkl)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["ppo", "rloo", "rloo of tokens"])
def test_loss_and_gradient_are_finite_where_policies_are_far_apart(name: str, sign: float) -> None:
    far = numbers("200 -200 90 -90 0 / -1e4 1e4 41 -41 1e-3")
    logprobs = (sign * far).requires_grad_()
    batch = batch_of(2, 5, advantages=numbers("3 / -3"))
    rows = torch.arange(2)
    if name == "ppo":
        values = torch.zeros_like(far)
        loss, _, sums = ppo_rlhf.ppo_loss(logprobs, values, batch, rows, ppo_rlhf.Args())
    else:
        args = rloo_rlhf.Args(token_level=name == "rloo of tokens")
        loss, sums = rloo_rlhf.rloo_loss(logprobs, batch, rows, args)
    loss.backward()
    for x in (loss, logprobs.grad, *(total for total, _ in sums.values())):
        assert x.isfinite().all()
    assert logprobs.grad[:, -1].abs().min() > 0 or name == "rloo"  # near tokens still learn


# --- what is made of the metrics ---


@pytest.mark.parametrize(
    ("kl", "coefficient"), [(0.0, 0.468), (6.0, 0.5), (6.6, 0.516), (9.0, 0.532)]
)
@BOTH
def test_the_kl_coefficient_moves_by_a_fifth_of_batch_over_horizon_at_most(
    module: ModuleType, kl: float, coefficient: float
) -> None:
    # batch / horizon is 0.32; the errors are -0.2, 0, 0.1 and 0.2
    args = module.Args(batch_size=64, kl_horizon=200.0, kl_target=6.0)
    assert module.adapt_kl_coef(0.5, kl, args) == pytest.approx(coefficient)
    args.kl_target = None
    assert module.adapt_kl_coef(0.5, kl, args) == 0.5


CHECKS = [  # dtype, update, error of the first ratio, KL; what is wrong
    "fp32 0 9e-4 9e-4 nothing",
    "fp32 0 2e-3 0 passes",
    "fp32 0 0 2e-3 passes",
    "fp32 0 0 -2e-3 passes",
    "fp32 1 2e-3 0 passes",
    "fp32 1 0 2e-3 nothing",
    "fp32 1 nan 0 passes",
    "bf16 0 0.019 -0.019 nothing",
    "bf16 0 0.021 0 passes",
    "fp32 1 0 20 nothing",
    "fp32 1 0 20.1 far",
    "fp32 1 0 -2 nothing",
    "fp32 1 0 -2.1 far",
    "fp32 1 0 nan far",
]
SAYS = {"passes": "the forward passes differ", "far": "the KL is .* with --max_kl 20"}


@pytest.mark.parametrize("case", CHECKS)
@BOTH
def test_first_passes_that_differ_and_a_far_policy_stop_a_run(
    module: ModuleType, case: str
) -> None:
    dtype, update, ratio_error, kl, wrong = case.split()
    args = module.Args(dtype=dtype, max_kl=20.0)
    if wrong == "nothing":
        module.check_policy(int(update), float(ratio_error), float(kl), args)
    else:
        with pytest.raises(module.UserError, match=SAYS[wrong]):
            module.check_policy(int(update), float(ratio_error), float(kl), args)


def test_explained_variance_with_and_without_the_error_of_the_mean() -> None:
    # predictions 1, 3 of returns 2, 6: errors 1, 9, mean 5; variance of the returns 4; means 2, 4
    metrics = {
        "ppo/loss/policy": 0.5,
        "ppo/loss/value": 2.5,
        "ppo/returns/var": 4.0,
        "ppo/returns/mean": 4.0,
        "ppo/val/vpred": 2.0,
        "ppo/val/error": 5.0,
    }
    ppo_rlhf.add_value_metrics(metrics, ppo_rlhf.Args(vf_coef=0.1))
    assert metrics["ppo/loss/total"] == pytest.approx(0.75)
    assert metrics["ppo/val/var_explained"] == pytest.approx(-0.25)
    assert metrics["ppo/val/var_explained_centred"] == pytest.approx(
        0.75
    )  # what is left varies by 1


def test_rewards_that_tie_share_the_hit() -> None:
    """So a model that gives all texts the same reward has the accuracy of chance."""
    best = torch.tensor([0, 3, 1])
    assert train_reward.hits(torch.full((3, 4), 0.3), best).tolist() == [0.25, 0.25, 0.25]
    rewards = torch.tensor([[0.5, 0.1, 0.5, 0.2], [0.7, 0.1, 0.7 + 1e-6, 0.7], [0.1, 0.2, 0.3, 0]])
    assert train_reward.hits(rewards, best).tolist() == pytest.approx([1 / 2, 1 / 3, 0])
    # so large that fp32 does not see the tolerance
    large = 100_000 * rewards[:1]
    half = train_reward.hits(large, best[:1])
    assert half == 0.5


def test_a_metric_is_the_sum_over_the_count_of_all_records() -> None:
    """No mean of means; 0 where nothing counts."""
    one = torch.tensor(1)
    records = [
        {"a": (torch.tensor(6.0), torch.tensor(3)), "b": (torch.tensor(2.5), one)},
        {"a": (torch.tensor(2.0), one), "c": (torch.tensor(0.0), torch.tensor(0))},
    ]
    assert ppo_rlhf.reduce_means(records) == {"a": 2.0, "b": 2.5, "c": 0.0}
