"""Sampling and rollouts: the key-value cache against full forward passes, and the first ratio."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import CONFIGS, EOS, forward, full_logits, load, make_actor, make_queries, random_rows, save_model
from torch import Tensor

import ppo_rlhf
import rloo_rlhf

TEMPERATURE = 0.7
LARGEST = 1 - 2.0**-24  # of the fp32 numbers that a generator draws from [0, 1)
CONTEXTS = random_rows((1, 3, 6, 2, 9), seed=4)


def replay(policy: ppo_rlhf.ActorCritic, contexts: list[list[int]], responses: Tensor, u: Tensor) -> Tensor:
    """For given responses, the tokens that the same u draw from the logits of full forward passes: inverse CDF."""
    length, rows = u.shape[1], [c + r for c, r in zip(contexts, responses.tolist(), strict=True)]
    tokens = []
    for logits, uniform in zip(full_logits(policy.lm, rows), u.double(), strict=True):
        cdf = (logits[-length - 1 : -1].double() / TEMPERATURE).softmax(-1).cumsum(-1)
        tokens.append((cdf < uniform.unsqueeze(1)).sum(-1))
    return torch.stack(tokens)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_sampling_draws_what_full_forward_passes_give(name: str, attention: str, k: int) -> None:
    """K responses to each context, which is read once, stand next to each other."""
    policy, u = make_actor(name, attn_implementation=attention), ppo_rlhf.uniforms(3, 1, len(CONTEXTS) * k, 8)
    responses = ppo_rlhf.sample(policy, CONTEXTS, u, TEMPERATURE)
    asked = [context for context in CONTEXTS for _ in range(k)]
    assert torch.equal(replay(policy, asked, responses, u), responses)
    assert len(responses.unique()) > 10 and len({tuple(row) for row in responses.tolist()}) == len(asked)
    assert not torch.equal(replay(policy, asked[::-1], responses, u), responses)  # contexts matter


@pytest.mark.parametrize(("num_minibatches", "mask_truncated", "top_p"), [(1, False, 1.0), (2, True, 0.97)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_first_ratio_is_exactly_one(
    script: Any, dtype: str, num_minibatches: int, mask_truncated: bool, top_p: float, tmp_path: Path
) -> None:
    """All ratios of the first epoch are, where no step moves the weights, since its passes are those of the rollout."""
    script.fast_math(torch.device("cpu"), dtype)
    model, k = (script.ActorCritic, 1) if script is ppo_rlhf else (script.Actor, 4)
    save_model(tmp_path, "gpt2")
    policy, full = (model(load(tmp_path, dtype=x)) for x in (dtype, "fp32"))
    args = script.Args(truncate_after=1, mask_truncated=mask_truncated, micro_batch_size=3 * k, top_p=top_p)
    contexts, u = random_rows((1, 9, 4, 6, 2, 7, 5, 3), seed=1), script.uniforms(1, 1, 8 * k, 12)
    epochs = torch.tensor([5, 0, 3, 1, 7, 2, 6, 4]).view(1, num_minibatches, -1)
    batch = script.rollout(policy, policy, make_queries(contexts), u, epochs[0], EOS, args)
    assert torch.equal(batch["logprobs"], batch["ref_logprobs"]) and batch["kept"].all() != mask_truncated
    batch |= {"rewards": torch.randn(batch["kept"].shape), "advantages": torch.randn(8, k), "texts": []}
    for shift in (0.0, 0.01):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=math.ceil(8 / num_minibatches / 3))
        prepared, optimizer = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
        given = accelerator, prepared, optimizer, batch | {"logprobs": batch["logprobs"] - shift}, epochs, args
        records = script.ppo_update(*given) if script is ppo_rlhf else script.rloo_update(*given)
        metrics = script.reduce_means(accelerator, records)
        if shift:
            assert metrics["first_ratio_error"] > 5e-3  # it measures something
        else:
            assert metrics["first_ratio_error"] == metrics["ppo/policy/approxkl"] == metrics["ppo/policy/clipfrac"] == 0
            assert metrics["ppo/val/ratio"] == metrics["ratio_squared"] == 1
    off = ((forward(full, batch, args.temperature)[0] - batch["logprobs"]) * batch["kept"]).abs().max()
    assert off > 1e-3 if dtype == "bf16" else off < 2e-5  # bf16 it was


@pytest.mark.parametrize("value", [0.0, LARGEST])
def test_extreme_uniforms_draw_no_token_of_probability_zero(value: float) -> None:
    policy, contexts = make_actor("gpt2", tie_word_embeddings=False), random_rows([4] * 64, seed=8)
    policy.lm.lm_head.weight.data *= 30  # most tokens underflow to 0, and some cumulative sums end below 1
    responses = ppo_rlhf.sample(policy, contexts, torch.full((len(contexts), 4), value), TEMPERATURE)
    rows = [context + response for context, response in zip(contexts, responses.tolist(), strict=True)]
    probabilities = torch.stack([logits[-5:-1] / TEMPERATURE for logits in full_logits(policy.lm, rows)]).softmax(-1)
    assert ((probabilities == 0).sum(-1) > 10).all() and (probabilities[..., -1] == 0).any()
    assert probabilities.cumsum(-1)[..., -1].min() < LARGEST
    assert (probabilities.gather(2, responses.unsqueeze(2)) > 0).all()
    assert ppo_rlhf.sample(policy, contexts, torch.ones(64, 2), TEMPERATURE).max() < 50  # never outside the vocabulary
