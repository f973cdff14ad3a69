"""How near PPO and RLOO come to the best policy that there is, in a problem small enough to enumerate.

The objective J(pi) = E_pi[r] - beta KL(pi || rho) has one maximum, pi* = rho exp(r / beta) / Z, of height
J* = beta log E_rho[exp(r / beta)]. Eight tokens and responses of three make 512 responses: forward passes over all of
them give J of the policy exactly, at any time of its training.

    python benchmark/optimum.py                            # curves of both algorithms against J*
    python benchmark/optimum.py --reward_model FOLDER      # J* of tiny/model, estimated from samples of it
"""

import argparse
import math
import time
from typing import Any

import common
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import ppo_rlhf
import rloo_rlhf

VOCABULARY, LENGTH = 8, 3
SCRIPTS = {"ppo": ppo_rlhf, "rloo": rloo_rlhf}
# a fixed coefficient, no truncation, and nothing that changes the objective: whitened rewards would rescale r
SETTINGS = {
    "response_length": LENGTH, "temperature": 1.0, "truncate_token": None, "kl_target": None, "batch_size": 256,
    "micro_batch_size": 256, "num_epochs": 4,
}  # fmt: skip
OWN = {
    "ppo": {"whiten_rewards": False, "gamma": 1.0, "lam": 0.95, "num_minibatches": 1, "lr": 3e-3},
    "rloo": {"rloo_k": 4, "num_minibatches": 1, "lr": 3e-3},
}


def make_lm(seed: int) -> GPT2LMHeadModel:
    """A random GPT-2 whose distribution is far from uniform; eager attention, as `load` takes on a CPU."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def make_rewards(seed: int) -> Tensor:
    """r(y) ~ N(0, 1) for every response, (8, 8, 8)."""
    return torch.from_numpy(np.random.default_rng([seed, 3]).standard_normal((VOCABULARY,) * LENGTH)).float()


@torch.no_grad()
def enumerate_logprobs(policy: Any, context: list[int]) -> Tensor:
    """log pi of all responses, (8, 8, 8), in double precision, through the function that training uses."""
    every = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
    ids, mask = ppo_rlhf.left_pad([context] * len(every), "cpu")
    batch = {"ids": ids, "mask": mask, "lengths": mask.sum(1), "responses": every}
    logprobs = ppo_rlhf.forward_response(policy, batch, torch.arange(len(every)), 1.0)[0]
    return logprobs.double().sum(1).view(*[VOCABULARY] * LENGTH)


def objective(logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, beta: float) -> float:
    """J(pi), exactly."""
    return (logprobs.exp() * (rewards - beta * (logprobs - ref_logprobs))).sum().item()


def optimum(ref_logprobs: Tensor, rewards: Tensor, beta: float) -> float:
    """J* = beta log E_rho[exp(r / beta)]."""
    return beta * (ref_logprobs + rewards / beta).flatten().logsumexp(0).item()


def train(algorithm: str, seed: int, beta: float, updates: int, every: int, **changes: Any) -> dict[str, Any]:
    """One run of an algorithm: (episodes, J) along the way, J* and J of the reference."""
    script, context = SCRIPTS[algorithm], [0]
    args = script.Args(seed=seed, kl_coef=beta, **SETTINGS | OWN[algorithm] | changes)
    copies = getattr(args, "rloo_k", 1)
    rows = args.batch_size // copies
    accelerator = common.new_accelerator(
        steps=math.ceil(args.batch_size / args.num_minibatches / args.micro_batch_size)
    )
    lm, ref_lm = make_lm(seed), ppo_rlhf.freeze(make_lm(seed), args.dtype)
    wrap = getattr(script, "ActorCritic", None) or script.Actor
    policy, ref = wrap(lm), wrap(ref_lm)
    optimizer = script.AdamTF(policy.parameters(), lr=args.lr, eps=args.adam_eps)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    table, shuffle, curve = make_rewards(seed), np.random.RandomState(seed), []
    ref_logprobs, seconds = enumerate_logprobs(ref, context), 0.0
    for update in range(updates + 1):
        if update % every == 0 or update == updates:
            curve.append(
                (update * args.batch_size, objective(enumerate_logprobs(policy, context), ref_logprobs, table, beta))
            )
        if update == updates:
            break
        start = time.perf_counter()
        u = script.uniforms(seed, update + 1, args.batch_size, LENGTH, "cpu")
        shuffles = [shuffle.permutation(rows) for _ in range(args.num_epochs)]
        epochs = torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)
        with torch.no_grad():
            batch = script.respond(policy, [context] * rows, u, None, args)
            scores = table[tuple(batch["responses"].unbind(1))]
            if copies > 1:
                batch |= {name: batch[name].view(rows, copies, -1) for name in ("responses", "kept")}
            everyone = torch.arange(rows)
            batch["logprobs"], _, *values = script.forward_response(policy, batch, everyone, args.temperature)
            batch["ref_logprobs"] = script.forward_response(ref, batch, everyone, args.temperature)[0]
        log_ratio = batch["logprobs"] - batch["ref_logprobs"]
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - update / updates)
        if algorithm == "ppo":
            batch["values"] = values[0]
            batch["rewards"] = script.token_rewards(scores, log_ratio, batch["kept"], beta)
            script.ppo_update(accelerator, policy, optimizer, batch, epochs, args)
        else:
            batch["rewards"] = scores.view(rows, copies) - beta * log_ratio.sum(2)
            batch["advantages"] = script.rloo_advantages(batch["rewards"])
            script.rloo_update(accelerator, policy, optimizer, batch, epochs, args)
        seconds += time.perf_counter() - start
    best, first, last = optimum(ref_logprobs, table, beta), curve[0][1], curve[-1][1]
    gap = (best - last) / (best - first)
    return {"algorithm": algorithm, "seed": seed, "j_star": best, "j_ref": first, "j": last, "gap": gap,
            "seconds": seconds, "curve": curve}  # fmt: skip
