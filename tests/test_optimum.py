"""A policy small enough to enumerate: the best KL-regularised policy is known, and both algorithms find it.

With reference rho, reward r and coefficient beta, J(pi) = E_pi[r] - beta KL(pi || rho) is largest for
pi* ~ rho exp(r / beta), where it is J* = beta log E_rho exp(r / beta). J is computed exactly, over all 8^3 responses.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import ppo_rlhf
import rloo_rlhf
from tf_adam import AdamTF

VOCABULARY, LENGTH, BETA, CONTEXT = 8, 3, 1.0, [0]
EPISODES, UPDATES, LR = 512, 250, 2e-3
ALL = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # every response


def random_lm(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = {"n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 4, "initializer_range": 0.1}
    config |= {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    return GPT2LMHeadModel(GPT2Config(**config)).eval()


def log_probability(policy: torch.nn.Module) -> Tensor:
    """log pi(y) of every response, by the scripts' own forward pass."""
    batch = {"trees": ppo_rlhf.grow([CONTEXT] * len(ALL), ALL[:, :-1].tolist()), "responses": ALL}
    with torch.no_grad():
        return ppo_rlhf.forward_response(policy, batch, torch.arange(len(ALL)), 1.0)[0].sum(1).double()


def objective(policy: torch.nn.Module, log_rho: Tensor, rewards: Tensor) -> float:
    log_pi = log_probability(policy)
    return (log_pi.exp() * (rewards - BETA * (log_pi - log_rho))).sum().item()


def train(algorithm: str, seed: int) -> tuple[float, float, float]:
    """J before and after training with the functions of the script, and J*."""
    lm = random_lm(seed)
    rewards = torch.from_numpy(np.random.default_rng(seed).normal(size=len(ALL)))
    ref = rloo_rlhf.Actor(copy.deepcopy(lm))
    policy = ppo_rlhf.ActorCritic(lm) if algorithm == "ppo" else rloo_rlhf.Actor(lm)
    log_rho = log_probability(ref)
    assert log_rho.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    best = BETA * torch.logsumexp(log_rho + rewards / BETA, 0).item()
    start = objective(policy, log_rho, rewards)
    n, k = (EPISODES, 1) if algorithm == "ppo" else (EPISODES // 4, 4)
    args = SimpleNamespace(
        temperature=1.0, mask_truncated=False, compile=False, truncate_after=0, micro_batch_size=EPISODES,
        cliprange=0.2, cliprange_value=0.2,
        vf_coef=0.1, gamma=1.0, lam=0.95, whiten_rewards=False, rloo_k=k, token_level=False,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True)
    policy, optimizer = accelerator.prepare(policy, AdamTF(policy.parameters(), eps=1e-5))
    powers = VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)
    for update in range(UPDATES):
        optimizer.param_groups[0]["lr"] = LR * (1 - update / UPDATES)
        u = ppo_rlhf.uniforms(seed, update, n * k, LENGTH, "cpu")
        batch = ppo_rlhf.respond(policy, [CONTEXT] * n, u, None, args)
        scores, rows = rewards[(batch["responses"] * powers).sum(1)].float(), torch.arange(n)
        if algorithm == "rloo":
            batch |= {name: batch[name].view(n, k, -1) for name in ("responses", "kept")}
        with torch.no_grad():
            batch["logprobs"], _, *values = ppo_rlhf.forward_response(policy, batch, rows, 1.0)
            log_ratio = batch["logprobs"] - ppo_rlhf.forward_response(ref, batch, rows, 1.0)[0]
        epochs = torch.stack([torch.randperm(n) for _ in range(4)]).unsqueeze(1)
        if algorithm == "ppo":
            batch["values"], batch["rewards"] = (
                values[0],
                ppo_rlhf.token_rewards(scores, log_ratio, batch["kept"], BETA),
            )
            ppo_rlhf.ppo_update(accelerator, policy, optimizer, batch, epochs, args)
        else:
            batch["advantages"] = rloo_rlhf.rloo_advantages(scores.view(n, k) - BETA * log_ratio.sum(2))
            rloo_rlhf.rloo_update(accelerator, policy, optimizer, batch, epochs, args)
    return start, objective(policy, log_rho, rewards), best


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_training_comes_within_two_percent_of_the_exact_optimum(algorithm: str, seed: int) -> None:
    start, reached, best = train(algorithm, seed)
    assert math.isfinite(reached)
    assert start < best and reached < best + 1e-6  # nothing beats the optimum: the objective is computed right
    assert (best - reached) / (best - start) < 0.02
