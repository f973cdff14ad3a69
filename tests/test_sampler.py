"""Sampling and rollouts: the key-value cache against full forward passes, the first ratio, and when
sampling stops."""

from pathlib import Path
from typing import Any

import fork_tools
import pytest
import tiny_models as tiny
import torch
from accelerate import Accelerator
from fork_tools import RLOO, WORDS, kit
from run_tools import call, read_lines
from tiny_models import CONFIGS, full_logits, load, make_queries, random_rows
from torch import Tensor, nn

import ppo_rlhf
import rloo_rlhf
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
    u = ppo_rlhf.uniforms(3, 1, len(contexts), LENGTH)
    policy = ppo_rlhf.ActorCritic(lm)
    responses = ppo_rlhf.sample(policy, contexts, u, TEMPERATURE)
    probs = probabilities(lm, contexts, responses)
    assert torch.equal(inverted(probs, u), responses)
    assert len(responses.unique()) > 10
    assert len(responses.unique(dim=0)) == len(contexts)
    others = probabilities(lm, contexts[::-1], responses)
    assert not torch.equal(inverted(others, u), responses)  # contexts matter
    for policy in (rloo_rlhf.Actor(lm, 3), train_reward.Reference(lm)):
        drawn = ppo_rlhf.sample(policy, contexts, u, TEMPERATURE)
        assert torch.equal(drawn, responses)


def test_top_p_draws_from_the_fewest_tokens_that_hold_so_much() -> None:
    lm = tiny.make_lm("gpt2")
    u = ppo_rlhf.uniforms(3, 1, len(CONTEXTS), LENGTH)
    policy = ppo_rlhf.ActorCritic(lm)
    responses = ppo_rlhf.sample(policy, CONTEXTS, u, TEMPERATURE, top_p=0.6)
    probs = probabilities(lm, CONTEXTS, responses)
    likeliest, order = probs.sort(-1, descending=True)
    is_in = likeliest.cumsum(-1) - likeliest < 0.6  # the ones before hold less
    nucleus = torch.zeros_like(probs)
    nucleus.scatter_(2, order, likeliest * is_in)
    nucleus /= nucleus.sum(-1, keepdim=True)
    expected = inverted(nucleus, u)
    assert torch.equal(expected, responses)
    assert not torch.equal(inverted(probs, u), responses)


def make_policy(lm: nn.Module, k: int) -> nn.Module:
    """PPO's policy for one response to a query, RLOO's for more."""
    if k == 1:
        return ppo_rlhf.ActorCritic(lm)
    return rloo_rlhf.Actor(lm, k)


def first_epoch(script: Any, policy: nn.Module, batch: Any, epochs: Tensor, args: Any) -> dict:
    """Metrics of an update with steps of size 0."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    prepared, optimizer = accelerator.prepare(policy, optimizer)
    update = script.ppo_update if script is ppo_rlhf else script.rloo_update
    records = update(accelerator, prepared, optimizer, batch, epochs, args)
    return script.reduce_means(records)


CASES = [
    ("gpt2", 1, False, 1.0),
    ("gpt2", 2, True, 0.97),
    ("gemma2", 2, True, 0.9),  # scaled and capped logits
    ("bloom", 1, True, 1.0),  # alibi
    ("mistral_short", 2, False, 1.0),  # a window shorter than the text
]


@pytest.mark.parametrize(("name", "num_minibatches", "mask_truncated", "top_p"), CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_first_ratio_is_exactly_one(
    script: Any,
    dtype: str,
    name: str,
    num_minibatches: int,
    mask_truncated: bool,
    top_p: float,
    tmp_path: Path,
) -> None:
    """All ratios of the first epoch are, where no step moves the weights: its passes are those of
    the rollout. The models' configs have dropout, which is off."""
    script.set_up_backend(dtype)
    tiny.save_model(tmp_path, name)
    k = 1 if script is ppo_rlhf else 4
    policy = make_policy(load(tmp_path, dtype=dtype), k)
    exact = make_policy(load(tmp_path), k)
    args = script.Args(truncate_after=1, mask_truncated=mask_truncated, top_p=top_p)
    args.micro_batch_size = 3 * k

    contexts = [context for context in EIGHT for _ in range(k)]
    u = script.uniforms(1, 1, len(contexts), LENGTH)
    whole = script.sample(policy, contexts, u, args.temperature, top_p)
    end_token = whole[0, 3].item()
    order = torch.arange(len(contexts)).view(-1, k).flip(0)
    epochs = order.view(1, num_minibatches, -1)
    queries = make_queries(contexts)
    batch = script.rollout(policy, policy, queries, u, epochs[0], end_token, args)
    assert torch.equal(batch.logprobs, batch.ref_logprobs)
    assert batch.mask.all() != mask_truncated
    batch.rewards = torch.randn(u.shape)
    batch.value_mask = batch.mask
    batch.advantages = torch.randn(u.shape)
    if script is rloo_rlhf:
        batch.advantages = batch.advantages[:, :1]  # of responses

    metrics = first_epoch(script, policy, batch, epochs, args)
    assert metrics["first_ratio_error"] == 0
    assert metrics["ppo/val/ratio"] == 1
    prefix = "ppo/policy" if script is ppo_rlhf else "rloo"
    assert metrics[f"{prefix}/approxkl"] == 0
    assert metrics[f"{prefix}/clipfrac"] == 0
    batch.logprobs -= 0.01
    metrics = first_epoch(script, policy, batch, epochs, args)
    assert metrics["first_ratio_error"] > 5e-3  # it measures something

    rows = epochs.flatten()
    with torch.no_grad():
        logprobs, _ = script.forward_response(exact, batch, rows, args.temperature)
    logprobs = script.of_tokens(logprobs, batch.responses[rows])
    off = logprobs - batch.ref_logprobs[rows]
    if dtype == "bf16":
        assert off.abs().max() > 1e-3  # bf16 it was
    else:
        assert off.abs().max() < 1e-5


@pytest.mark.parametrize("value", [0.0, LARGEST])
def test_extreme_uniforms_draw_no_token_of_probability_zero(value: float) -> None:
    lm = tiny.make_lm("gpt2", tie_word_embeddings=False)
    contexts = random_rows([4] * 64, seed=8)
    # Most tokens underflow to 0, and some cumulative sums end below 1.
    lm.lm_head.weight.data *= 30
    policy = ppo_rlhf.ActorCritic(lm)
    u = torch.full((64, 4), value)
    responses = ppo_rlhf.sample(policy, contexts, u, TEMPERATURE)
    probs = probabilities(lm, contexts, responses)
    num_zeros = (probs == 0).sum(-1)
    assert num_zeros.min() > 10
    assert probs[..., -1].min() == 0
    totals = probs.cumsum(-1)[..., -1]
    assert totals.min() < LARGEST
    of_drawn = probs.gather(2, responses.unsqueeze(2))
    assert of_drawn.min() > 0
    ones = torch.ones(64, 2)
    beyond = ppo_rlhf.sample(policy, contexts, ones, TEMPERATURE)
    assert beyond.max() < tiny.VOCABULARY


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A policy of seven tokens, whose `steps` counts its passes with a cache."""
    policy = tiny.make_actor("gpt2", vocab_size=7)
    policy.steps = 0
    forward = policy.forward

    def noted(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        policy.steps += cache is not None
        return forward(*args, cache=cache, **kwargs)

    monkeypatch.setattr(policy, "forward", noted)
    return policy


def roll_out(policy: Any, end_token: int | None, **flags: Any) -> Any:
    """A rollout of LENGTH tokens to three contexts of the policy's seven tokens."""
    contexts = random_rows((3, 1, 5), seed=4, vocabulary=7)
    queries = make_queries(contexts)
    args = ppo_rlhf.Args(truncate_after=0, response_length=LENGTH, **flags)
    u = ppo_rlhf.uniforms(2, 1, 3, LENGTH)
    rows = torch.tensor([[0, 1, 2]])
    return ppo_rlhf.rollout(policy, policy, queries, u, rows, end_token, args)


def test_without_a_truncate_token_masked_responses_are_sampled_to_the_end(counted: Any) -> None:
    whole = roll_out(counted, None)
    masked = roll_out(counted, None, mask_truncated=True)
    assert counted.steps == 2 * LENGTH
    assert torch.equal(masked.responses, whole.responses)
    assert torch.equal(masked.logprobs, whole.logprobs)
    last = masked.responses[:, 8:]
    assert last.any(1).all()  # no zeros in place of tokens
    assert masked.mask.all()
    assert masked.lengths.tolist() == [LENGTH] * 3


def test_sampling_stops_when_all_masked_responses_have_ended(counted: Any) -> None:
    """Not before, and what counts of them stays the same."""
    whole = roll_out(counted, None)
    drawn = [set(row) for row in whole.responses[:, :8].tolist()]
    in_all = set.intersection(*drawn)
    end_token = min(in_all)
    counted.steps = 0
    masked = roll_out(counted, end_token, mask_truncated=True)
    assert counted.steps == 8
    assert masked.found_end.all()
    mask, _ = ppo_rlhf.truncate(whole.responses, end_token, 0)
    assert torch.equal(masked.mask, mask)
    assert torch.equal(masked.responses * mask, whole.responses * mask)
    off = masked.logprobs - whole.logprobs
    assert (off * mask).abs().max() < 1e-6

    counted.steps = 0
    unmasked = roll_out(counted, end_token)
    assert torch.equal(unmasked.responses, whole.responses)
    assert counted.steps == LENGTH
    in_some = set.union(*drawn) - in_all
    counted.steps = 0
    roll_out(counted, min(in_some), mask_truncated=True)
    assert counted.steps == LENGTH


def test_sampling_goes_on_while_another_process_has_rows_that_go_on(
    counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sharded weights a forward pass needs all processes."""
    monkeypatch.setattr(ppo_rlhf, "sum_over_ranks", lambda x: x.sum() + 1)
    u = ppo_rlhf.uniforms(2, 1, 3, LENGTH)
    contexts = random_rows((3, 1, 5), seed=4, vocabulary=7)
    all_have = lambda x: torch.ones(len(x), dtype=torch.bool)  # noqa: E731
    ppo_rlhf.sample(counted, contexts, u, TEMPERATURE, has_ended=all_have)
    assert counted.steps == LENGTH


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
