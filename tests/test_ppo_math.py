"""The arithmetic of PPO: cases computed by hand, a plain float64 loop, and updates that must not depend on layout."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tiny_models import load_actor, make_actor, make_queries, random_rows
from torch import Tensor

import ppo_rlhf
from tf_adam import AdamTF

SETTINGS = {"gamma": 0.98, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "temperature": 0.7}
SETTINGS |= {"whiten_rewards": True, "truncate_after": 1, "mask_truncated": False, "num_epochs": 2}
ROWS, LENGTH, VOCABULARY, END = 16, 6, 12, 5


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


def test_penalty_replaces_the_score_or_is_added_to_it() -> None:
    scores, found = torch.tensor([0.5, 2.0, -3.0]), torch.tensor([True, False, False])
    assert ppo_rlhf.penalize(scores, found, -1.0, "replace").tolist() == [0.5, -1.0, -1.0]
    assert ppo_rlhf.penalize(scores, found, -1.0, "add").tolist() == [0.5, 1.0, -4.0]


def test_kl_coefficient_moves_by_the_clipped_error_times_the_share_of_the_horizon() -> None:
    # 512 episodes of a horizon of 10 000 are a share of 0.0512; the error kl / 6 - 1 is clipped to 0.2 on either side
    for kl, error in ((6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)):
        expected = 0.15 * (1 + error * 0.0512)
        assert ppo_rlhf.adapt_kl_coef(0.15, kl, 6.0, 512 / 10_000) == pytest.approx(expected, rel=1e-12)


def test_long_queries_keep_their_start_or_end_or_are_dropped() -> None:
    """All else that cut_query does is in the recordings 08."""
    cut = [ppo_rlhf.cut_query([1, 2, 3, 4], 3, None, None, long) for long in ("keep_start", "keep_end", "drop")]
    assert cut == [[1, 2, 3], [2, 3, 4], []]


def plain_loss(arrays: dict[str, np.ndarray], mask: np.ndarray, clip: float, clip_value: float, vf_coef: float) -> Any:
    """Loss, its gradients and the sums of the metrics, token by token in float64.

    Schulman et al. 2017, equation 7: minus min(r A, clip(r) A). The value loss is half the larger of the squared errors
    of value and clipped value, times vf_coef.
    """
    gradients, sums = {name: np.zeros(mask.shape) for name in ("logprobs", "values")}, {}

    def add(name: str, x: float) -> None:
        sums[name] = sums.get(name, 0.0) + x

    for i, j in np.argwhere(mask):
        new, old, value, old_value, advantage, target = (float(x[i, j]) for x in arrays.values())
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        add("ppo/loss/policy", -min(ratio * advantage, clipped * advantage))
        if ratio * advantage <= clipped * advantage:
            gradients["logprobs"][i, j] = -advantage * ratio
        near = min(max(value, old_value - clip_value), old_value + clip_value)
        add("ppo/loss/value", 0.5 * max((value - target) ** 2, (near - target) ** 2))
        if (value - target) ** 2 >= (near - target) ** 2:
            gradients["values"][i, j] = vf_coef * (value - target)
        add("ppo/policy/approxkl", 0.5 * (new - old) ** 2)
        add("ppo/policy/clipfrac", ratio * advantage > clipped * advantage)
        add("ppo/val/error", (value - target) ** 2)
        add("ppo/val/clipfrac", (near - target) ** 2 > (value - target) ** 2)
        add("ppo/val/ratio", ratio)
        add("ppo/val/vpred", value)
        add("ratio_squared", ratio**2)
    sums["ppo/loss/total"] = sums["ppo/loss/policy"] + vf_coef * sums["ppo/loss/value"]
    return sums["ppo/loss/total"], gradients, sums


def loss_inputs(shape: tuple[int, int] = (6, 9)) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of ppo_loss in their order, and the mask."""
    generator = torch.Generator().manual_seed(1)
    old, value, advantages, returns, one, other = torch.randn(6, *shape, generator=generator, dtype=torch.float64)
    arrays = {"logprobs": -old.abs() + 0.3 * one, "old_logprobs": -old.abs(), "values": value + 0.3 * other}
    arrays |= {"old_values": value, "advantages": advantages, "returns": returns}
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
    """Exactly no gradient where a token or value is clipped or masked."""
    arrays, mask = loss_inputs()
    loss, gradients, sums = run_loss(arrays, mask, clip, clip_value, vf_coef)
    plain = {name: x.numpy() for name, x in arrays.items()}
    expected, expected_gradients, expected_sums = plain_loss(plain, mask.numpy(), clip, clip_value, vf_coef)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name: x.item() for name, x in sums.items()} == pytest.approx(expected_sums, rel=1e-12)
    for name, gradient in gradients.items():
        assert np.allclose(gradient.numpy(), expected_gradients[name], rtol=1e-12, atol=0), name
    assert 5 < expected_sums["ppo/policy/clipfrac"] < 30 and 1 < expected_sums["ppo/val/clipfrac"] < 30


def test_a_value_within_the_clip_range_never_counts_as_clipped() -> None:
    """As in the original. Rounded, as old + clamp(new - old) is, about a quarter of the values would count."""
    generator = torch.Generator().manual_seed(4)
    old, distance, u = (
        torch.randn(20, 50, generator=generator),
        *torch.randn(2, 20, 50, generator=generator).clamp(-1, 1),
    )
    zeros, returns = torch.zeros_like(old), old + distance.sign() * (0.6 + distance.abs())
    arrays = {"logprobs": zeros, "old_logprobs": zeros, "advantages": zeros, "values": old + 0.19 * u}
    arrays |= {"old_values": old, "returns": returns}
    _, gradients, sums = run_loss(arrays, every(old), 0.2, 0.2, 1.0)
    assert sums["ppo/val/clipfrac"].item() == 0
    assert torch.equal(gradients["values"], arrays["values"] - returns)
    arrays["values"][:7] = (old + 0.3 * distance.sign())[:7]  # nearer to the return than the clip allows
    assert run_loss(arrays, every(old), 0.2, 0.2, 1.0)[2]["ppo/val/clipfrac"] == 7 * 50


def make_args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**SETTINGS | {"micro_batch_size": ROWS, "num_minibatches": 1} | changes)


def make_accelerator(args: SimpleNamespace) -> Accelerator:
    """As main makes it, from a fresh state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    steps = math.ceil(ROWS / args.num_minibatches / args.micro_batch_size)
    return Accelerator(cpu=True, gradient_accumulation_steps=steps)


def make_epochs(args: SimpleNamespace) -> Tensor:
    shuffle = np.random.RandomState(1)
    rows = np.stack([shuffle.permutation(ROWS) for _ in range(args.num_epochs)])
    return torch.from_numpy(rows).view(args.num_epochs, args.num_minibatches, -1)


def make_rollout(policy: Any, epochs: Tensor, args: SimpleNamespace) -> dict[str, Any]:
    """A batch as main makes it, with token rewards of random scores; responses end early, so masks are ragged."""
    queries = make_queries(random_rows([1, 14, 10, 7] * (ROWS // 4), 5, VOCABULARY))
    u = ppo_rlhf.uniforms(1, 1, ROWS, LENGTH)
    batch = ppo_rlhf.rollout(policy, policy, queries, u, epochs[0], END, args)
    generator = torch.Generator().manual_seed(2)
    log_ratio = 0.3 * torch.randn(u.shape, generator=generator)
    batch["rewards"] = ppo_rlhf.token_rewards(torch.randn(ROWS, generator=generator), log_ratio, batch["kept"], 0.15)
    assert (len(batch["kept"].sum(1).unique()) > 3) is args.mask_truncated
    return batch


def make_policy() -> ppo_rlhf.ActorCritic:
    return make_actor("gpt2", vocab_size=VOCABULARY, initializer_range=0.1, tie_word_embeddings=False)


def vector(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


@pytest.fixture(params=[False, True], ids=["all", "mask_truncated"])
def mask_truncated(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("whiten_rewards", [True, False])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_accumulation_equals_the_large_batch_and_a_plain_loop(
    mask_truncated: bool, num_minibatches: int, whiten_rewards: bool
) -> None:
    """Without accelerate: per minibatch whiten, estimate advantages, whiten, and a step on the mean loss per token."""
    args = make_args(num_minibatches=num_minibatches, mask_truncated=mask_truncated, whiten_rewards=whiten_rewards)
    policy, epochs, losses = make_policy(), make_epochs(args), []
    batch, plain = make_rollout(policy, epochs, args), copy.deepcopy(policy)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for rows in epochs.flatten(0, 1):
        mask, values, rewards = (batch[name][rows] for name in ("kept", "values", "rewards"))
        if whiten_rewards:
            rewards = ppo_rlhf.whiten(rewards, mask, shift_mean=False)
        advantages, returns = ppo_rlhf.gae(values, rewards, mask, args.gamma, args.lam)
        logprobs, _, predicted = ppo_rlhf.forward_response(plain, batch, rows, 0.7)
        old = batch["logprobs"][rows], values, ppo_rlhf.whiten(advantages, mask), returns, mask
        loss = ppo_rlhf.ppo_loss(logprobs, predicted, *old, 0.2, 0.2, 0.1)[0]
        optimizer.zero_grad()
        (loss / mask.sum()).backward()
        optimizer.step()
        losses.append((loss.item(), mask.sum().item()))
    moved = (vector(plain) - vector(policy)).norm()
    total, count = map(sum, zip(*losses, strict=True))
    expected = {"ppo/loss/total": total / count}
    for size in (ROWS, 5, 2):  # 8 and 16 rows are no multiples of 5
        args.micro_batch_size = size
        accelerator, model = make_accelerator(args), copy.deepcopy(policy)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
        records = ppo_rlhf.ppo_update(accelerator, prepared, optimizer, batch, epochs, args)
        metrics = ppo_rlhf.reduce_means(accelerator, records)
        assert moved > 0.05 and (vector(model) - vector(plain)).norm() < 1e-5 * moved
        for name in set(expected) - {"first_ratio_error"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        expected = metrics | expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_first_ratio_is_exactly_one(mask_truncated: bool, num_minibatches: int, dtype: str, tmp_path: Path) -> None:
    """All ratios of the first epoch are, where no step moves the weights, since its passes are those of the rollout."""
    ppo_rlhf.fast_math(torch.device("cpu"), dtype)
    args = make_args(num_minibatches=num_minibatches, micro_batch_size=3, mask_truncated=mask_truncated)
    make_policy().lm.save_pretrained(tmp_path)
    policy, epochs = load_actor(tmp_path, dtype), make_epochs(args)
    batch, metrics = make_rollout(policy, epochs, args), []
    for lr, shift, count in ((0.0, 0.0, 1), (0.0, 0.01, 1), (1e-3, 0.0, 2)):
        accelerator = make_accelerator(args)
        prepared, optimizer = accelerator.prepare(policy, AdamTF(policy.parameters(), lr=lr, eps=1e-5))
        shifted = batch | {"logprobs": batch["logprobs"] + shift}
        records = ppo_rlhf.ppo_update(accelerator, prepared, optimizer, shifted, epochs[:count], args)
        metrics.append(ppo_rlhf.reduce_means(accelerator, records))
    assert metrics[0]["first_ratio_error"] == metrics[0]["ppo/policy/approxkl"] == 0
    assert metrics[0]["ppo/val/ratio"] == metrics[0]["ratio_squared"] == 1
    assert metrics[1]["first_ratio_error"] > 5e-3  # it measures something
    assert metrics[2]["first_ratio_error"] == 0 < metrics[2]["ppo/policy/approxkl"]  # later ratios are not 1


def test_reduce_means_weights_each_record_by_its_count() -> None:
    # a: (2 + 9) / (1 + 4) = 2.2; b stands in one record only: 6 / 3 = 2
    one = {"a": (torch.tensor(2.0), torch.tensor(1)), "b": (torch.tensor(6.0), torch.tensor(3))}
    records = [one, {"a": (torch.tensor(9.0), torch.tensor(4))}]
    means = ppo_rlhf.reduce_means(make_accelerator(make_args()), records)
    assert means == pytest.approx({"a": 2.2, "b": 2.0})
