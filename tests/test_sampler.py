"""Sampling: the exact distribution, the key-value cache against full forward passes, random streams, early stop."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny_models import CONFIGS, full_logits, make_actor, random_rows
from torch import Tensor

import ppo_rlhf

TEMPERATURE = 0.7
LARGEST = 1 - 2.0**-24  # of the fp32 numbers that a generator draws from [0, 1)
CONTEXTS = random_rows((1, 3, 6, 2, 9), seed=4)
SMALL = [[5], [1, 2, 3], [6, 0, 0, 4, 1, 2]]  # contexts in a vocabulary of 7 tokens


def draw(
    policy: ppo_rlhf.ActorCritic, contexts: list[list[int]], u: Tensor, end: int | None = None, after: int = 0
) -> Tensor:
    return ppo_rlhf.sample(policy, *ppo_rlhf.left_pad(contexts, "cpu"), u, TEMPERATURE, end, after)


def exact_probabilities(policy: ppo_rlhf.ActorCritic, context: list[int], vocabulary: int) -> np.ndarray:
    """p(first, second), all vocabulary^2 of them, in float64 from full forward passes without padding."""
    rows = [context + [first] for first in range(vocabulary)]
    logits = torch.stack(full_logits(policy.lm, rows)).double() / TEMPERATURE
    first, second = logits[0, -2].softmax(-1), logits[:, -1].softmax(-1)
    return (first.unsqueeze(1) * second).flatten().numpy()


def replay(policy: ppo_rlhf.ActorCritic, contexts: list[list[int]], responses: Tensor, u: Tensor) -> Tensor:
    """For given responses, the tokens that the same u draw from the logits of full forward passes: inverse CDF."""
    length, rows = u.shape[1], [c + r for c, r in zip(contexts, responses.tolist(), strict=True)]
    tokens = []
    for logits, uniform in zip(full_logits(policy.lm, rows), u.double(), strict=True):
        cdf = (logits[-length - 1 : -1].double() / TEMPERATURE).softmax(-1).cumsum(-1)
        tokens.append((cdf < uniform.unsqueeze(1)).sum(-1))
    return torch.stack(tokens)


def test_sequences_have_their_exact_probabilities_with_and_without_padding() -> None:
    vocabulary, count = 7, 15_000
    policy = make_actor("gpt2", vocab_size=vocabulary, initializer_range=0.06, tie_word_embeddings=False)
    exact = [exact_probabilities(policy, context, vocabulary) for context in SMALL]
    u = ppo_rlhf.uniforms(1, 1, count * len(SMALL), 2, "cpu")
    padded = draw(policy, SMALL * count, u)
    for i, context in enumerate(SMALL):
        alone = draw(policy, [context] * count, ppo_rlhf.uniforms(1, 2 + i, count, 2, "cpu"))
        for responses in (padded[i :: len(SMALL)], alone):
            observed = np.bincount((responses[:, 0] * vocabulary + responses[:, 1]).numpy(), minlength=vocabulary**2)
            assert exact[i].min() * count >= 5  # as the test wants it
            assert chisquare(observed, exact[i] * count).pvalue > 1e-3
            for other in set(range(len(SMALL))) - {i}:  # and no other context's
                assert chisquare(observed, exact[other] * count).pvalue < 1e-9


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_sampling_draws_what_full_forward_passes_give(name: str, attention: str) -> None:
    policy, u = make_actor(name, attn_implementation=attention), ppo_rlhf.uniforms(3, 1, len(CONTEXTS), 12, "cpu")
    responses = draw(policy, CONTEXTS, u)
    assert torch.equal(replay(policy, CONTEXTS, responses, u), responses)
    assert len(responses.unique()) > 10
    assert not torch.equal(replay(policy, CONTEXTS[::-1], responses, u), responses)  # contexts matter


@pytest.mark.parametrize("name", CONFIGS)
def test_several_responses_to_one_context_are_drawn_as_if_it_stood_there_several_times(name: str) -> None:
    policy, copies = make_actor(name), 3
    u = ppo_rlhf.uniforms(3, 1, len(CONTEXTS) * copies, 6, "cpu")
    responses = draw(policy, CONTEXTS, u)
    assert torch.equal(responses, draw(policy, [context for context in CONTEXTS for _ in range(copies)], u))
    assert len({tuple(row) for row in responses.tolist()}) > len(CONTEXTS)


@pytest.mark.parametrize("name", CONFIGS)
def test_sampling_in_training_mode_with_gradient_checkpointing_draws_the_same(name: str) -> None:
    """As main does with --gradient_checkpointing: policy.train(), checkpointing on, then rollouts."""
    policy, u = make_actor(name), ppo_rlhf.uniforms(3, 1, len(CONTEXTS), 12, "cpu")
    expected = draw(policy, CONTEXTS, u)
    policy.train().lm.gradient_checkpointing_enable()
    assert torch.equal(draw(policy, CONTEXTS, u), expected)
    assert policy.training and policy.lm.training  # as the update needs it


def draw_with_a_fixed_cache(policy: ppo_rlhf.ActorCritic, k: int) -> list[Tensor]:
    """Samples before and after a step of the weights, of one shape and of another."""
    samples = []
    for contexts in (CONTEXTS, CONTEXTS[::-1], CONTEXTS[:2]):
        u = ppo_rlhf.uniforms(3, 1, len(contexts) * k, 12, "cpu")
        inputs = (*ppo_rlhf.left_pad(contexts, "cpu"), u, TEMPERATURE, None, 0)
        samples.append([ppo_rlhf.sample(policy, *inputs, compiled) for compiled in (False, True)])
        with torch.no_grad():
            for parameter in policy.lm.parameters():
                parameter.mul_(0.9)
    return samples


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_of_fixed_size_that_is_used_again_draws_the_same(name: str, k: int) -> None:
    """What --compile compiles, not compiled."""
    with torch.compiler.set_stance("force_eager"):
        samples = draw_with_a_fixed_cache(make_actor(name), k)
    assert all(torch.equal(plain, fixed) for plain, fixed in samples)
    assert len({tuple(row) for plain, _ in samples for row in plain.tolist()}) > len(CONTEXTS)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_compiled_step_draws_the_same() -> None:
    samples = draw_with_a_fixed_cache(make_actor("gpt2"), 1)
    assert all(torch.equal(plain, fixed) for plain, fixed in samples)


def count_forwards(policy: ppo_rlhf.ActorCritic) -> list[int]:
    calls: list[int] = []
    policy.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("end", [0, 3])
@pytest.mark.parametrize("after", [0, 4])
def test_early_stop_changes_no_token_up_to_each_end(end: int, after: int) -> None:
    policy, length = make_actor("gpt2", vocab_size=7, initializer_range=0.06, tie_word_embeddings=False), 48
    u = ppo_rlhf.uniforms(5, 1, len(SMALL), length, "cpu")
    whole = draw(policy, SMALL, u)
    ends = [after + row[after:].index(end) for row in whole.tolist()]
    assert len(set(ends)) > 1 and max(ends) < length - 1  # rows end at different tokens, all before the last
    calls = count_forwards(policy)
    stopped = draw(policy, SMALL, u, end, after)
    reached = (max(ends) // 8 + 1) * 8  # one forward pass per token until the last row has ended at a multiple of 8
    assert len(calls) == reached < length
    assert stopped.shape == whole.shape
    assert torch.equal(stopped[:, :reached], whole[:, :reached])
    assert (stopped[:, reached:] == end).all()
    assert torch.equal(*(ppo_rlhf.truncate(x, end, after)[0] for x in (stopped, whole)))


def test_no_early_stop_while_one_row_has_not_ended() -> None:
    policy, u = make_actor("gpt2"), ppo_rlhf.uniforms(5, 1, len(CONTEXTS), 10, "cpu")
    whole = draw(policy, CONTEXTS, u)
    rare = next(token for token in range(50) if (whole == token).any() and not (whole == token).any(1).all())
    assert torch.equal(draw(policy, CONTEXTS, u, rare, 0), whole)
    first = int(whole[0, 0])
    after = 1 + int((whole == first).nonzero()[:, 1].max())  # beyond every occurrence: none counts
    assert torch.equal(draw(policy, CONTEXTS, u, first, after), whole)


@pytest.mark.parametrize("value", [0.0, LARGEST, 1.0])
def test_extreme_uniforms_draw_no_token_outside_the_vocabulary(value: float) -> None:
    policy = make_actor("gpt2", tie_word_embeddings=False)
    responses = draw(policy, CONTEXTS, torch.full((len(CONTEXTS), 8), value))
    assert responses.min() >= 0 and responses.max() < 50


@pytest.mark.parametrize("value", [0.0, LARGEST])
def test_extreme_uniforms_draw_no_token_of_probability_zero(value: float) -> None:
    policy, contexts = make_actor("gpt2", tie_word_embeddings=False), random_rows([4] * 64, seed=8)
    policy.lm.lm_head.weight.data *= 30  # most tokens underflow to 0, and some cumulative sums end below 1
    responses = draw(policy, contexts, torch.full((len(contexts), 4), value))
    rows = [context + response for context, response in zip(contexts, responses.tolist(), strict=True)]
    probabilities = torch.stack([logits[-5:-1] / TEMPERATURE for logits in full_logits(policy.lm, rows)]).softmax(-1)
    assert ((probabilities == 0).sum(-1) > 10).all() and (probabilities[..., -1] == 0).any()
    assert probabilities.cumsum(-1)[..., -1].min() < LARGEST
    assert (probabilities.gather(2, responses.unsqueeze(2)) > 0).all()


def test_batch_indices_are_an_endless_stream_of_permutations() -> None:
    size, epochs = 7, 5
    stream = ppo_rlhf.batch_indices(size, 0, size * epochs, seed=1)
    parts = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert all(sorted(part) == list(range(size)) for part in parts)
    assert len(set(map(tuple, parts))) == epochs  # every epoch has its own order
    assert stream != ppo_rlhf.batch_indices(size, 0, size * epochs, seed=2)


def test_slices_of_the_stream_of_queries_agree_with_one_large_slice() -> None:
    stream = ppo_rlhf.batch_indices(7, 0, 70, seed=1)
    for start, count in itertools.product((0, 1, 6, 7, 8, 20), (1, 3, 7, 8, 15, 30)):
        assert ppo_rlhf.batch_indices(7, start, count, seed=1) == stream[start : start + count]


def test_uniform_numbers_depend_on_seed_and_update_and_are_uniform() -> None:
    draws = {(seed, update): ppo_rlhf.uniforms(seed, update, 64, 50, "cpu") for seed in (1, 2) for update in (0, 1, 2)}
    for (key, x), (other, y) in itertools.combinations(draws.items(), 2):
        assert (x == y).float().mean() < 0.01, (key, other)
    for (seed, update), x in draws.items():
        assert torch.equal(x, ppo_rlhf.uniforms(seed, update, 64, 50, "cpu"))
        assert x.dtype == torch.float32 and x.min() >= 0 and x.max() < 1
        assert chisquare(np.histogram(x.numpy(), bins=20, range=(0, 1))[0]).pvalue > 1e-3
        assert len(x.unique()) > 0.99 * x.numel()  # rows differ too


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_draws_the_same_global_batch(world: int) -> None:
    """Queries, uniform numbers and responses of the ranks' rows, as main slices them, are those of a single process."""
    policy, batch, update, queries = make_actor("llama"), 8, 3, random_rows((3, 1, 5, 8, 2), seed=6)

    def rollout(rank: int, world: int) -> tuple[list[int], Tensor]:
        rows = batch // world
        picks = ppo_rlhf.batch_indices(len(queries), update * batch + rank * rows, rows, 1)
        u = ppo_rlhf.uniforms(1, update + 1, batch, 6, "cpu")[rank * rows :][:rows]
        return picks, draw(policy, [queries[i] for i in picks], u)

    picks, responses = rollout(0, 1)
    parts = [rollout(rank, world) for rank in range(world)]
    assert [i for part, _ in parts for i in part] == picks
    assert torch.equal(torch.cat([part for _, part in parts]), responses)
    assert len({tuple(row) for row in responses.tolist()}) == batch
