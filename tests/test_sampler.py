"""Sampling and rollouts: the key-value cache against full forward passes, the first ratio, and the
error of sampling, which tells what a run draws from another distribution than it trains."""

import shutil
from pathlib import Path
from typing import Any

import fork_tools
import pytest
import tiny_models as tiny
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import PPO, RLOO, WORDS, kit
from run_tools import call, read_lines
from tiny_models import CONFIGS, full_logits, load, make_queries, random_rows
from torch import Tensor, nn

import ppo_rlhf
import rloo_rlhf
import tf_adam
import train_reward

TEMPERATURE = 0.7
LARGEST = 1 - 2.0**-24  # of the fp32 numbers that a generator draws from [0, 1)
CONTEXTS = random_rows((1, 3, 6, 2, 9), seed=4)
EIGHT = random_rows((1, 9, 4, 6, 2, 7, 5, 3), seed=1)
LENGTH = 12


def probabilities(lm: nn.Module, contexts: list[list[int]], responses: Tensor) -> Tensor:
    """Of all tokens (B, R, V) before each of the given responses, from full forward passes."""
    rows = []
    for context, response in zip(contexts, responses.tolist(), strict=True):
        rows.append(context + response)
    length = responses.shape[1]
    before = slice(-length - 1, -1)
    logits = [x[before] for x in full_logits(lm, rows)]
    return (torch.stack(logits) / TEMPERATURE).softmax(-1)


def inverted(probs: Tensor, u: Tensor) -> Tensor:
    """The tokens (B, R) at which the cumulative distribution passes u."""
    cdf = probs.double().cumsum(-1)
    is_before = cdf < u.double().unsqueeze(2)
    return is_before.sum(-1)


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(CONFIGS))
def test_cached_sampling_draws_what_full_forward_passes_give(name: str, attention: str) -> None:
    """In the policies of all scripts, three responses to each context."""
    lm = tiny.make_lm(name, attention)
    contexts = [context for context in CONTEXTS for _ in range(3)]
    u = ppo_rlhf.uniforms(35, 1, len(contexts), LENGTH)  # all 1e-5 off a border, or more
    policy = make_policy(lm, 1)
    responses, logprobs = ppo_rlhf.sample(policy, contexts, u, TEMPERATURE)
    probs = probabilities(lm, contexts, responses)
    assert torch.equal(inverted(probs, u), responses)
    drawn = probs.gather(2, responses.unsqueeze(2)).squeeze(2)
    assert (logprobs - drawn.log()).abs().max() < 1e-4
    assert len(responses.unique()) > 10
    assert len(responses.unique(dim=0)) == len(contexts)
    others = probabilities(lm, contexts[::-1], responses)
    assert not torch.equal(inverted(others, u), responses)  # contexts matter
    reference = train_reward.Reference(lm, tiny.VOCABULARY)
    for policy in (make_policy(lm, 3), reference):
        others, same = ppo_rlhf.sample(policy, contexts, u, TEMPERATURE)
        assert torch.equal(others, responses)
        assert (same - logprobs).abs().max() < 1e-4


def make_policy(lm: nn.Module, k: int) -> nn.Module:
    """PPO's policy for one response to a query, RLOO's for more."""
    if k == 1:
        return ppo_rlhf.ActorCritic(lm, tiny.VOCABULARY)
    return rloo_rlhf.Actor(lm, tiny.VOCABULARY, rloo_rlhf.Args(rloo_k=k))


def first_epoch(script: Any, policy: nn.Module, batch: Any, epochs: Tensor, args: Any) -> dict:
    """Metrics of an update with steps of size 0."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    prepared, optimizer = accelerator.prepare(policy, optimizer)
    update = script.ppo_update if script is ppo_rlhf else script.rloo_update
    records = update(accelerator, prepared, optimizer, batch, epochs, args)
    return script.reduce_means(records)


CASES = [
    ("gpt2", 1, False),
    ("gpt2", 2, True),
    ("gemma2", 2, True),  # scaled and capped logits
    ("bloom", 1, True),  # alibi
    ("mistral_short", 2, False),  # a window shorter than the text
]


@pytest.mark.parametrize(("name", "num_minibatches", "mask_truncated"), CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_first_ratio_is_exactly_one(
    script: Any,
    dtype: str,
    name: str,
    num_minibatches: int,
    mask_truncated: bool,
    tmp_path: Path,
) -> None:
    """All ratios of the first epoch are, where no step moves the weights: its passes are those of
    the rollout. The models' configs have dropout, which is off."""
    tf_adam.set_up_torch(dtype)
    tiny.save_model(tmp_path, name)
    k = 1 if script is ppo_rlhf else 4
    policy = make_policy(load(tmp_path, dtype=dtype), k)
    exact = make_policy(load(tmp_path), k)
    args = script.Args(truncate_after=1, mask_truncated=mask_truncated, dtype=dtype)
    args.micro_batch_size = 3 * k

    contexts = [context for context in EIGHT for _ in range(k)]
    u = script.uniforms(1, 1, len(contexts), LENGTH)
    whole, _ = script.sample(policy, contexts, u, args.temperature)
    end_token = whole[0, 3].item()
    order = torch.arange(len(contexts)).view(-1, k).flip(0)
    epochs = order.view(1, num_minibatches, -1)
    queries = make_queries(contexts)
    batch = script.rollout(policy, queries, u, end_token, args)
    script.set_logprobs(batch, policy, policy, epochs[0], args)
    assert torch.equal(batch.responses, whole)
    rows = zip(script.truncated(batch), whole.tolist(), batch.lengths, strict=True)
    for row, response, length in rows:
        assert row == response[:length]
    assert torch.equal(batch.logprobs, batch.ref_logprobs)
    assert batch.loss_mask.all() != mask_truncated
    batch.rewards = torch.randn(u.shape)
    if script is rloo_rlhf:
        batch.advantages = torch.randn(len(u))

    metrics = first_epoch(script, policy, batch, epochs, args)
    assert metrics["first_ratio_error"] == 0
    assert metrics["sampling_error"] < script.TOLERANCES[dtype][1]
    prefix = "ppo/policy" if script is ppo_rlhf else "rloo"
    assert metrics["ppo/val/ratio" if script is ppo_rlhf else "rloo/ratio"] == 1
    assert metrics[f"{prefix}/approxkl"] == 0
    assert metrics[f"{prefix}/clipfrac"] == 0
    assert_largest_is_found(script, policy, batch, epochs, args)

    with torch.no_grad():
        logprobs, _ = script.forward_response(exact, batch, args.temperature)
    logprobs = script.selected_logprobs(logprobs, batch.responses)
    off = logprobs - batch.ref_logprobs
    if dtype == "bf16":
        assert off.abs().max() > 1e-3  # bf16 it was
    else:
        assert off.abs().max() < 1e-5


def assert_largest_is_found(
    script: Any, policy: nn.Module, batch: Any, epochs: Tensor, args: Any
) -> None:
    """A single token whose log-probability is shifted, in the rollout or while it was sampled, is
    the error, in any micro-batch, however many tokens there are, and outside the mask, too. That of
    ratios is of the first step, that of sampling of the whole batch."""
    first = epochs[0, 0]
    later = epochs[0, 1:].flatten()
    rounding = 0.1 if args.dtype == "bf16" else 1e-3
    shifted = {
        "first_ratio_error": batch.logprobs,
        "sampling_error": batch.sampled_logprobs,
    }
    for name, logprobs in shifted.items():
        kept = logprobs.clone()
        for row, shift in ((first[0], 4.0), (first[-1], -4.0)):
            logprobs[row, 0] += shift
            metrics = first_epoch(script, policy, batch, epochs, args)
            assert metrics[name] == pytest.approx(4, abs=rounding)
            with pytest.raises(script.UserError, match=f"^{name} is "):
                script.check_update(0, metrics | {"objective/kl": 0.0}, args)
            logprobs.copy_(kept)
        if len(later):
            logprobs[later[-1], -1] += 9.0
            error = first_epoch(script, policy, batch, epochs, args)[name]
            assert error == pytest.approx(9.0 * (name == "sampling_error"), abs=rounding)
            logprobs.copy_(kept)


@pytest.mark.parametrize("value", [0.0, LARGEST])
def test_extreme_uniforms_draw_no_token_of_probability_zero(value: float) -> None:
    lm = tiny.make_lm("gpt2", tie_word_embeddings=False)
    contexts = random_rows([4] * 64, seed=8)
    # Most tokens underflow to 0, and some cumulative sums end below 1.
    lm.lm_head.weight.data *= 30
    policy = make_policy(lm, 1)
    u = torch.full((64, 4), value)
    responses, _ = ppo_rlhf.sample(policy, contexts, u, TEMPERATURE)
    probs = probabilities(lm, contexts, responses)
    num_zeros = (probs == 0).sum(-1)
    assert num_zeros.min() > 10
    assert probs[..., -1].min() == 0
    totals = probs.cumsum(-1)[..., -1]
    assert totals.min() <= LARGEST
    of_drawn = probs.gather(2, responses.unsqueeze(2))
    assert of_drawn.min() > 0
    ones = torch.ones(64, 2)
    beyond, _ = ppo_rlhf.sample(policy, contexts, ones, TEMPERATURE)
    assert beyond.max() < tiny.VOCABULARY


def test_the_distribution_of_a_large_vocabulary_is_drawn_as_it_is() -> None:
    """The part of [0, 1) that draws a token is the token's probability in exact numbers, however
    rare it is and whatever comes before it."""
    size = 150_000
    logits = 4 * torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    logits[0, -1] = logits.max()  # a likely one at the end
    exact = logits.double().softmax(-1).squeeze(0)
    probs = logits.softmax(-1)

    # By bisection: the least number that draws token i or a later one, i from 1.
    tokens = torch.arange(1, size)
    low = torch.zeros(size - 1, dtype=torch.float64)
    high = torch.ones(size - 1, dtype=torch.float64)
    for _ in range(40):
        middle = (low + high) / 2
        is_later = ppo_rlhf.inverse_cdf(probs, middle.unsqueeze(0)).squeeze(0) >= tokens
        high = torch.where(is_later, middle, high)
        low = torch.where(is_later, low, middle)
    ends = nn.functional.pad(high, (0, 1), value=1.0)
    drawn = ends.diff(prepend=torch.zeros(1))
    assert (drawn - exact).abs().sum() / 2 < 1e-5  # total variation

    # Those of about 3e-7 are drawn by a number of fp32, too, as all u are.
    rare = ((exact - 3e-7).abs() < 1e-8).nonzero().squeeze(1)
    assert len(rare) > 100
    assert (drawn[rare] / exact[rare] - 1).abs().max() < 1e-3
    middle = (ends[rare] - exact[rare] / 2).float()
    found = ppo_rlhf.inverse_cdf(probs, middle.unsqueeze(0))
    assert torch.equal(found.squeeze(0), rare)


def roll_out(contexts: list[list[int]], end_token: int | None, **flags: Any) -> Any:
    """A rollout of LENGTH tokens to contexts of seven tokens."""
    policy = tiny.make_actor("gpt2", vocab_size=7)
    args = ppo_rlhf.Args(truncate_after=0, response_length=LENGTH, **flags)
    u = ppo_rlhf.uniforms(2, 1, len(contexts), LENGTH)
    return ppo_rlhf.rollout(policy, make_queries(contexts), u, end_token, args)


SEVEN = random_rows((3, 1, 5, 2, 4), seed=4, vocabulary=7)


def test_masked_responses_are_sampled_to_the_end() -> None:
    """What is sampled is the same with a mask and without, and what counts ends with the token."""
    whole = roll_out(SEVEN, None, mask_truncated=True)
    assert whole.loss_mask.all()
    assert whole.lengths.tolist() == [LENGTH] * 5
    assert ppo_rlhf.truncated(whole) == whole.responses.tolist()
    masked = roll_out(SEVEN, 2, mask_truncated=True)
    assert torch.equal(masked.responses, whole.responses)
    assert torch.equal(masked.sampled_logprobs, whole.sampled_logprobs)
    mask, found_end = ppo_rlhf.truncate(whole.responses, 2, 0)
    assert torch.equal(masked.loss_mask, mask)
    assert torch.equal(masked.found_end, found_end)
    assert found_end.any()
    lists = ppo_rlhf.truncated(masked)
    for row, length, found in zip(lists, masked.lengths, found_end, strict=True):
        assert len(row) == length
        assert (row[-1] == 2) == found
        assert 2 not in row[:-1]


# Faults of sampling: what stands in a script, and what a copy of it has instead.
FAULTS = {
    "a cache that is not used": (
        "policy(ids, mask, cache=cache)",
        "policy(ids, mask[:, -ids.shape[1] :], cache=DynamicCache(config=policy.lm.config))",
    ),
    "positions off by one": (  # not in the one row that is read at load
        "position_ids=positions[:, -ids.shape[1] :]",
        "position_ids=positions[:, -ids.shape[1] :] + (ids.shape[1] == 1 < len(ids))",
    ),
    "a temperature off by 10 %": (
        "contexts, u, args.temperature",
        "contexts, u, 1.1 * args.temperature",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_run_stops_where_it_samples_from_another_distribution(
    script: str, fault: str, tmp_path: Path
) -> None:
    """Nothing else of it looks wrong."""
    right, wrong = FAULTS[fault]
    code = (ROOT / script).read_text()
    assert code.count(right) == 1
    folder = fork_tools.copy(kit(), tmp_path)
    shutil.copy(ROOT / "tf_adam.py", tmp_path)
    (tmp_path / script).write_text(code.replace(right, wrong))
    status, _, errors = fork_tools.run(str(tmp_path / script), WORDS[script], folder)
    assert status == 1, errors
    line = errors.splitlines()[-1]
    assert line.startswith(f"{script}: sampling_error is "), errors
    metrics = read_lines(folder / "out/metrics.jsonl")
    assert len(metrics) == 1
    assert metrics[0]["first_ratio_error"] == 0
    assert abs(metrics[0]["objective/kl"]) < 1e-6


def test_rloo_runs_with_responses_of_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fork_tools.copy(kit(), tmp_path)
    flags = "--response_length 1 --total_episodes 8"
    call(RLOO, WORDS[RLOO] + flags.split(), folder, monkeypatch)
    metrics = read_lines(folder / "out/metrics.jsonl")
    assert len(metrics) == 2
    for row in metrics:
        assert row["objective/length"] == 1
        assert row["first_ratio_error"] == 0
    first, second = (row["objective/kl"] for row in metrics)
    assert abs(first) < 1e-6
    assert abs(second) > 1e-4  # the first update has moved the weights
