"""Rollouts: sampling through a cache against full forward passes, and batches of responses."""

import dataclasses
import functools

import pytest
import tiny_models as tiny
import torch
from tiny_models import BOTH, full_logits, make_policy, make_queries, random_rows, rows_of
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import ppo_rlhf
from plumbing import models as models_module

TEMPERATURE = 0.7
LARGEST = 1 - 2.0**-24  # of the fp32 numbers that a generator draws from [0, 1)
CONTEXTS = random_rows((1, 3, 6, 2, 9), seed=4)
LENGTH = 12


# --- sampling -------------------------------------------------------------------------------------
def probabilities(lm, contexts, responses):
    """Of all tokens (B, R, V) before each of the given responses, from full forward passes."""
    rows = []
    for context, response in zip(contexts, responses.tolist(), strict=True):
        rows.append(context + response)
    length = responses.shape[1]
    before = slice(-length - 1, -1)
    logits = torch.stack([x[before] for x in full_logits(lm, rows)])
    scaled = logits / TEMPERATURE
    return scaled.softmax(-1)


def inverted(probs, u):
    """The tokens (B, R) at which the cumulative distribution passes u."""
    cdf = probs.double().cumsum(-1)
    is_before = cdf < u.double().unsqueeze(2)
    return is_before.sum(-1)


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(tiny.WORKING))
def test_cached_sampling_draws_what_full_forward_passes_give(name, attention):
    """In the policies of all scripts, three responses to each context."""
    lm = tiny.make_lm(name, attention)
    contexts = [context for context in CONTEXTS for _ in range(3)]
    u = ppo_rlhf.uniforms(35, 1, len(contexts), LENGTH)  # all 1e-5 off a border, or more
    responses, logprobs = tiny.sample(make_policy(lm, 1), contexts, u, TEMPERATURE)
    assert not logprobs.requires_grad
    probs = probabilities(lm, contexts, responses)
    assert torch.equal(inverted(probs, u), responses)
    drawn = probs.gather(2, responses.unsqueeze(2)).squeeze(2)
    assert_close(logprobs, drawn.log(), atol=1e-4, rtol=0)
    assert len(responses.unique()) > 10
    assert len(responses.unique(dim=0)) == len(contexts)
    others = inverted(probabilities(lm, contexts[::-1], responses), u)
    assert not torch.equal(others, responses)  # contexts matter
    # train_reward.py's
    reference = functools.partial(models_module.forward, lm, last=1)
    for policy in (make_policy(lm, 3), reference):
        cache = models_module.Cache(config=lm.config)
        others, same = ppo_rlhf.sample(policy, cache, contexts, u, TEMPERATURE)
        assert torch.equal(others, responses)
        assert_close(same, logprobs, atol=1e-4, rtol=0)


def test_no_pass_keeps_hidden_states_of_all_layers():
    """The last ones, which the value head reads, are those that the head of the policy reads."""
    lm = tiny.make_lm("gpt2")
    policy = make_policy(lm, 1)
    contexts = random_rows([4, 2], seed=8)
    made = []
    lm.register_forward_hook(lambda _, __, output: made.append(output))
    tiny.sample(policy, contexts, torch.zeros(2, 3), TEMPERATURE)
    batch = tiny.make_batch(contexts, [[1, 2, 3]] * 2)
    _, predicted = ppo_rlhf.forward_response(policy, batch, TEMPERATURE)
    assert len(made) == 4
    assert all(output.hidden_states is None for output in made)
    assert predicted["values"].requires_grad
    assert not lm.get_output_embeddings()._forward_pre_hooks  # none is left behind


@pytest.mark.parametrize("value", [0.0, LARGEST])
def test_extreme_uniforms_draw_no_token_of_probability_zero(value):
    lm = tiny.make_lm("gpt2", tie_word_embeddings=False)
    contexts = random_rows([4] * 64, seed=8)
    # Most tokens underflow to 0, and some cumulative sums end below 1.
    lm.lm_head.weight.data *= 30
    policy = make_policy(lm, 1)
    u = torch.full((64, 4), value)
    responses, _ = tiny.sample(policy, contexts, u, TEMPERATURE)
    probs = probabilities(lm, contexts, responses)
    num_zeros = (probs == 0).sum(-1)
    assert num_zeros.min() > 10
    assert probs[..., -1].min() == 0
    totals = probs.cumsum(-1)[..., -1]
    assert totals.min() <= LARGEST
    of_drawn = probs.gather(2, responses.unsqueeze(2))
    assert of_drawn.min() > 0
    beyond, _ = tiny.sample(policy, contexts, torch.ones(64, 2), TEMPERATURE)
    assert beyond.max() < tiny.VOCABULARY


def test_the_distribution_of_a_large_vocabulary_is_drawn_as_it_is():
    """The part of [0, 1) that draws a token is its exact probability, however rare it is."""
    size = 150_000
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1, size, generator=generator)
    logits[0, -1] = logits.max()  # a likely one at the end
    exact = logits.double().softmax(-1).squeeze(0)
    probs = logits.softmax(-1)

    # By bisection: the least number that draws token i or a later one, i from 1.
    tokens = torch.arange(1, size)
    low = torch.zeros(size - 1, dtype=torch.float64)
    high = torch.ones(size - 1, dtype=torch.float64)
    for _ in range(40):
        middle = (low + high) / 2
        drawn = ppo_rlhf.inverse_cdf(probs, middle.unsqueeze(0))
        is_later = drawn.squeeze(0) >= tokens
        high = torch.where(is_later, middle, high)
        low = torch.where(is_later, low, middle)
    ends = nn.functional.pad(high, (0, 1), value=1.0)
    drawn = ends.diff(prepend=torch.zeros(1))
    assert (drawn - exact).abs().sum() / 2 < 1e-5  # total variation

    # Those of about 3e-7 are drawn by a number of fp32, too, as all u are.
    is_rare = (exact - 3e-7).abs() < 1e-8
    rare = is_rare.nonzero().squeeze(1)
    assert len(rare) > 100
    ratios = drawn[rare] / exact[rare]
    assert (ratios - 1).abs().max() < 1e-3
    middle = ends[rare] - exact[rare] / 2
    u = middle.float().unsqueeze(0)
    found = ppo_rlhf.inverse_cdf(probs, u)
    assert torch.equal(found.squeeze(0), rare)


class Casts(TorchDispatchMode):
    """Counts the copies of weights in bf16."""

    count = 0

    def __torch_dispatch__(self, func, types, args, named=None):
        named = named or {}
        if named.get("dtype") is torch.bfloat16:
            self.count += isinstance(args[0], nn.Parameter)
        return func(*args, **named)


@BOTH
def test_trained_weights_are_rounded_to_bf16_once_and_not_at_every_token(module, tmp_path):
    folder = tiny.save_model(tmp_path, "gpt2")
    counts = []
    for length in (1, 6):
        lm = tiny.load(folder, dtype="bf16")
        policy = make_policy(lm, 1 if module is ppo_rlhf else 2)
        args = module.Args(response_length=length, dtype="bf16")
        u = module.uniforms(1, 1, 2, length)
        queries = make_queries(rows_of("1 2 / 1 2"))
        with Casts() as casts:
            module.rollout(policy, queries, u, None, args)
        counts.append(casts.count)
    assert counts[0] == counts[1] > 4


# --- rollouts -------------------------------------------------------------------------------------
@BOTH
def test_the_policys_log_probabilities_of_all_tokens_go_before_the_references_come(
    module, monkeypatch
):
    """(b, R, V) is the largest tensor of a rollout: two of them need twice the memory."""
    alive = tiny.watch_log_probabilities(module, monkeypatch)
    args = module.Args(response_length=4)
    policy = make_policy(tiny.make_lm("gpt2"), 1)
    tiny.roll_out(module, policy, args, [[1, 2]] * 2)
    assert alive == [0, 0]


@BOTH
def test_rows_are_selected_from_tensors_and_from_lists(module):
    """Also from what a copy has added to the batch: a list, and more numbers than tokens."""
    bases = (module.Batch,)
    fields = [("texts", list, None), ("features", torch.Tensor, None)]
    own = dataclasses.make_dataclass("Own", fields, bases=bases)
    contexts = [[1], [2], [3]]
    tensors = torch.arange(3).view(1, 3, 1).repeat(5, 1, 1)  # (3, 1) each
    *others, sampled_logprobs = tensors
    batch = own(
        contexts,
        *others,
        [1, 1, 1],
        sampled_logprobs,
        texts=["a", "b", "c"],
        features=torch.arange(12).view(3, 1, 4),
    )
    rows = torch.tensor([2, 0])
    found = module.select(batch, rows)
    assert found.contexts == [[3], [1]]
    assert found.responses.tolist() == [[2], [0]]
    assert found.texts == ["c", "a"]
    assert found.features.tolist() == [[[8, 9, 10, 11]], [[0, 1, 2, 3]]]
    assert found.ref_logprobs is None
