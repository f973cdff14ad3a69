"""The arithmetic of PPO, RLOO and the reward model: cases computed by hand."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models as tiny
import torch
from tiny_models import BOTH, make_queries, random_rows

import ppo_rlhf
import rloo_rlhf
import train_reward
from plumbing import labels as labels_module
from plumbing.launch import UserError

assert_close = functools.partial(torch.testing.assert_close, atol=1e-6, rtol=0)


def numbers(text):
    """(rows, columns) of numbers; a slash begins a new row."""
    rows = [list(map(float, row.split())) for row in text.split("/")]
    return torch.tensor(rows)


EMPTY = ppo_rlhf.Batch(*[None] * 7)


def olds(like, **fields):
    """A micro-batch in which all tokens count and all else is 0, but for these fields."""
    zeros = dict.fromkeys(vars(EMPTY), torch.zeros_like(like))
    return ppo_rlhf.Batch(**zeros | {"loss_mask": torch.ones_like(like)} | fields)


# --- rewards and advantages -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("replace", "0.5 -1.5 -1.5 nan -1.5"), ("add", "0.5 0.5 -4.5 nan nan")],
)
def test_a_missing_end_replaces_the_score_or_is_added_to_it(mode, expected):
    """A NaN that counts stays one: it stops the run, as the gradient is no number."""
    scores = numbers("0.5 2 -3 nan nan").squeeze(0)
    found_end = numbers("1 0 0 1 0").bool().squeeze(0)
    args = ppo_rlhf.Args(penalty_reward_value=-1.5, penalty_mode=mode)
    penalized = ppo_rlhf.penalize_missing_end(scores, found_end, args)
    expected = numbers(expected).squeeze(0)
    torch.testing.assert_close(penalized, expected, equal_nan=True)
    assert scores[:3].tolist() == [0.5, 2.0, -3.0]


def test_gae_discounts_future_errors_by_gamma_times_lambda():
    # gamma 0.9, lambda 0.8, gamma * lambda = 0.72; the value after the response is 0
    #   delta2 =  2   + 0.9 * 0 - 3 = -1      A2 = -1                      return2 = -1 + 3
    #   delta1 = -1   + 0.9 * 3 - 2 = -0.3    A1 = -0.3 - 0.72 * 1         return1 = -1.02 + 2
    #   delta0 =  0.5 + 0.9 * 2 - 1 =  1.3    A0 =  1.3 - 0.72 * 1.02      return0 = 0.5656 + 1
    # and in a row with the last token masked, whose value and reward count as 0
    #   A2 = 0;  delta1 = -1 + 0 - 2 = -3;  A1 = -3;  A0 = 1.3 + 0.72 * -3 = -0.86
    values = numbers("1 2 3 / 1 2 3")
    rewards = numbers("0.5 -1 2 / 0.5 -1 2")
    mask = numbers("1 1 1 / 1 1 0").bool()
    advantages, returns = ppo_rlhf.gae(values, rewards, mask, 0.9, 0.8)
    assert_close(advantages, numbers("0.5656 -1.02 -1 / -0.86 -3 0"))
    assert_close(returns, numbers("1.5656 0.98 2 / 0.14 -1 0"))


def test_whiten_gives_the_table_of_the_n_implementation_details():
    # Huang et al. 2024, detail 9 of policy training: TensorFlow's numbers, mean 1.6, biased
    # variance 0.6 / 9
    rewards = numbers("1.2 1.3 1.4 / 1.5 1.6 1.7 / 1.8 1.9 2.0")
    published = numbers(
        "0.05080712 0.4381051 0.8254035 /"
        "1.2127019 1.6000004 1.9872988 /"
        "2.3745968 2.7618952 3.1491938"
    )
    whitened = ppo_rlhf.whiten(rewards, torch.ones_like(rewards), shift_mean=False)
    assert_close(whitened, published, atol=2e-6)
    # 1e-8 is added to the variance: 0 and 2e-4, mean 1e-4, variance 1e-8:
    # 1e-4 / sqrt(1e-8 + 1e-8) = 0.707107
    x = numbers("0 2e-4")
    small = ppo_rlhf.whiten(x, torch.ones_like(x), shift_mean=True)
    assert_close(small, numbers("-0.707107 0.707107"), atol=1e-5)
    # what the mask leaves out is 0, and counts in no mean: 1, 2, 6 have variance 14 / 3
    x = numbers("1 2 6 9")
    mask = numbers("1 1 1 0").bool()
    masked = ppo_rlhf.whiten(x, mask, shift_mean=True)
    assert_close(masked, numbers("-2 -1 3 0") / (14 / 3) ** 0.5)
    kept = ppo_rlhf.whiten(x, mask, shift_mean=False)
    assert_close(kept, (numbers("-2 -1 3 0") / (14 / 3) ** 0.5 + 3) * mask)


def test_leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries():
    # rewards of four responses to each of three queries; of the first: 1 - (2 + 3 + 6) / 3 = -8 / 3
    rewards = numbers("1 2 3 6 / 0 0 0 4 / -1 1 -1 1")
    expected = numbers("-8 -4 0 12 / -4 -4 -4 12 / -4 4 -4 4") / 3
    assert_close(rloo_rlhf.rloo_advantages(rewards), expected)
    equal = numbers("0.1 0.1 0.1 / -0.7 -0.7 -0.7")
    assert not rloo_rlhf.rloo_advantages(equal).any()


# --- losses ---------------------------------------------------------------------------------------
def test_a_value_within_the_clip_range_never_counts_as_clipped():
    """As in the original. With old + clamp(new - old), one in a hundred of these would count."""
    generator = torch.Generator().manual_seed(4)
    old, values, distance = torch.randn(3, 20, 50, generator=generator)
    old = 0.09 * old.tanh()
    values = 0.09 * values.tanh()
    values[:7] = (old + 0.3 * distance.sign())[:7]  # nearer to the return than the clip allows
    returns = old + distance.sign() * (0.6 + distance.abs())
    values.requires_grad_()
    before = olds(old, values=old, returns=returns)
    args = ppo_rlhf.Args(cliprange_value=0.2)
    _, loss, metrics = ppo_rlhf.ppo_loss(before.logprobs, values, before, args)
    loss.sum().backward()
    assert metrics["val/clipfrac"][:7].all()
    assert not metrics["val/clipfrac"][7:].any()
    assert torch.equal(values.grad[7:], (values - returns)[7:])
    assert not values.grad[:7].any()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@BOTH
def test_loss_and_gradient_are_finite_where_policies_are_far_apart(module, sign):
    far = numbers("200 -200 90 -90 0 / -1e4 1e4 41 -41 1e-3")
    if module is rloo_rlhf:  # whose ratios are those of sums
        far = far.view(-1, 1)
    logprobs = (sign * far).requires_grad_()
    advantages = numbers("3 / -3").repeat_interleave(5, 1)
    before = olds(far, advantages=advantages.view_as(far))
    if module is ppo_rlhf:
        args = ppo_rlhf.Args()
        loss, _, metrics = ppo_rlhf.ppo_loss(logprobs, before.values, before, args)
    else:
        before.advantages = before.advantages.flatten()
        loss, metrics = rloo_rlhf.rloo_loss(logprobs, before, rloo_rlhf.Args())
    loss.sum().backward()
    for x in (loss, logprobs.grad, *metrics.values()):
        assert x.isfinite().all()
    assert logprobs.grad.view(2, 5)[:, -1].all()  # near ones still learn


# --- updates --------------------------------------------------------------------------------------
def fake_process():
    """An accelerator, and whether the gradients of each micro-batch are averaged."""
    averaged = []
    process = SimpleNamespace(num_processes=1, no_sync=lambda model: torch.no_grad())

    def backward(loss):
        averaged.append(torch.is_grad_enabled())
        if loss.requires_grad:
            loss.backward()

    process.backward = backward
    return process, averaged


@BOTH
def test_gradients_are_averaged_once_in_a_step(module, monkeypatch):
    """Four steps of two minibatches, each in three micro-batches. Of errors the largest on any
    process is logged."""
    k = 1 if module is ppo_rlhf else 2
    args = module.Args(response_length=6, micro_batch_size=4)
    policy = tiny.make_policy(tiny.make_lm("gpt2"), k)
    batch = tiny.roll_out(module, policy, args, random_rows([3] * (20 // k), seed=3))
    if module is ppo_rlhf:
        batch.rewards = torch.randn(20, 6)
        update = module.ppo_update
    else:
        batch.advantages = torch.randn(20)
        update = module.rloo_update
    process, averaged = fake_process()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    epochs = torch.arange(20).view(1, 2, 10).repeat(2, 1, 1)
    alive = tiny.watch_log_probabilities(module, monkeypatch)
    # Another process has an error of 7.
    monkeypatch.setattr(module, "gather", lambda x: torch.cat([x.view(1), torch.tensor([7.0])]))
    metrics = update(process, policy, optimizer, batch, epochs, args).reduce()
    assert averaged == [False, False, True] * 4
    assert alive == [0] * 12  # else two of the largest tensors would need memory
    assert module.sampling_error(batch) == metrics["first_ratio_error"] == 7


# --- the reward model -----------------------------------------------------------------------------
def make_reward(gain=1.0, bias=0.0):
    reward = train_reward.RewardModel(tiny.make_classifier(), train_reward.Args())
    reward.gain.data.fill_(gain)
    reward.bias.data.fill_(bias)
    return reward


def make_labels(count):
    labels = []
    for i in range(count):
        query, *responses = random_rows((i % 4 + 1, 1, 2, 3), seed=i)
        labels.append(labels_module.Comparison(query, responses, i % 3))
    return labels


def test_gradients_of_rewards_are_averaged_once_in_a_step():
    process, averaged = fake_process()
    reward = make_reward()
    optimizer = torch.optim.SGD(reward.parameters(), lr=0.0)
    args = train_reward.Args(micro_batch_size=3)
    train_reward.reward_update(process, reward, optimizer, make_labels(8), args)
    assert averaged == [False, False, True]


def test_a_model_that_gives_equal_rewards_is_right_by_chance_alone():
    """It is evaluated without a graph."""
    labels = make_labels(9)
    reward = make_reward(gain=0.0)
    has_graph = []
    reward.register_forward_hook(lambda _, __, made: has_graph.append(made.requires_grad))
    samples = train_reward.evaluate_labels(reward, labels, mock.Mock())
    assert samples.is_hit.sum() == 3
    assert has_graph == [False] * 9


def test_rewards_without_a_deviation_are_refused_and_leave_gain_and_bias():
    reward = make_reward(gain=2.0, bias=0.5)
    for rewards in ([0.5, 0.5], [0.5, torch.nan], [0.5]):
        with pytest.raises(UserError, match="^--normalization_samples: the rewards"):
            train_reward.normalize(reward, torch.tensor(rewards))
    assert reward.gain == 2
    assert reward.bias == 0.5


def test_rewards_for_normalization_come_in_micro_batches_without_a_graph():
    """And are those of samples up to their end, if one is given."""
    reward = make_reward()
    ref = tiny.make_lm("gpt2")
    queries = make_queries(random_rows((1, 4, 2, 3, 5) * 3, seed=9))
    args = train_reward.Args(normalization_samples=10, response_length=3, micro_batch_size=2)
    args.truncate_after = 1
    calls = []
    reward.register_forward_hook(lambda _, given, made: calls.append(given))
    accelerator = SimpleNamespace(num_processes=1, process_index=0, gather=lambda x: x)
    values = (accelerator, reward, ref, queries, 0)
    whole = train_reward.reference_rewards(*values, None, args)
    assert [len(ids) for ids, _, _, _ in calls] == [2] * 5
    assert not whole.requires_grad
    assert all(is_read.all() for _, _, _, is_read in calls)
    end = calls[1][2][0, 1].item()  # ends the third sample at its second token
    cut = train_reward.reference_rewards(*values, end, args)
    assert calls[6][3][0].tolist() == [True, True, False]
    is_equal = cut == whole
    assert not is_equal[2]
    assert is_equal.any()
