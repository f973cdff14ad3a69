"""How near PPO and RLOO come to the best policy that there is, in a problem small enough to
enumerate.

The objective J(pi) = E_pi[r] - beta KL(pi || rho) has one maximum, at pi* = rho exp(r / beta) / Z,
of height J* = beta log E_rho[exp(r / beta)]. Eight tokens and responses of three make 512
responses: forward passes over all of them give J of the policy exactly, at any time of its
training. "Gap" is (J* - J) / (J* - J(rho)): 1 is the starting model, 0 the optimum.

    python benchmark/studies/optimum/run.py    # curves of both algorithms against J*
    python benchmark/studies/optimum/run.py --reward_model FOLDER --policy FOLDER

The second command estimates J* of tiny/model from its samples, and J of a trained policy beside it.
Per query that is the logarithm of a mean of exp(r / beta) over samples. Where
few samples carry that mean (a small effective sample size), it is too low: the record says by how
much to second order, and warns.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import ppo_rlhf
import rloo_rlhf
from benchmark import common, ours
from plumbing import data as data_module
from plumbing.launch import set_up_torch
from ppo_rlhf import make_optimizer, set_learning_rates

VOCABULARY = 8
LENGTH = 3
SHAPE = (VOCABULARY,) * LENGTH
CONTEXT = [0]
BETA = 1.0
SCRIPTS = ours.SCRIPTS
UPDATES = 250  # of 512 episodes
# A fixed coefficient, no truncation, and nothing that changes the objective: whitened rewards would
# rescale r.
SETTINGS = {
    "response_length": LENGTH,
    "temperature": 1.0,
    "truncate_token": None,
    "kl_coef": BETA,
    "adaptive_kl_target": None,
    "batch_size": 512,
    "micro_batch_size": 512,
    "num_minibatches": 1,
    "num_epochs": 4,
    "lr": 2e-3,
}
OWN = {
    "ppo": {"whiten_rewards": False, "gamma": 1.0, "lam": 0.95},
    "rloo": {"rloo_k": 4},
}


# --- a problem that can be enumerated -------------------------------------------------------------
def make_lm(seed: int) -> GPT2LMHeadModel:
    """A random GPT-2 whose distribution is far from uniform; eager attention, as the scripts take
    on a CPU."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=8,
        n_embd=32,
        n_layer=1,
        n_head=4,
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        activation_function="gelu_pytorch_tanh",
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def make_rewards(seed: int) -> Tensor:
    """r(y) ~ N(0, 1) for every response, (8, 8, 8)."""
    return torch.from_numpy(np.random.default_rng([seed, 3]).standard_normal(SHAPE)).float()


@torch.no_grad()
def enumerate_logprobs(policy: Any) -> Tensor:
    """log pi of all responses, (8, 8, 8), in double precision, through the function that training
    uses."""
    responses = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
    batch = ours.make_batch(ppo_rlhf, [CONTEXT] * len(responses), responses)
    _, predicted = ppo_rlhf.forward_response(policy, batch, 1.0)
    return predicted["logprobs"].double().sum(1).view(SHAPE)


def objective(logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, beta: float) -> float:
    """J(pi), exactly."""
    return (logprobs.exp() * (rewards - beta * (logprobs - ref_logprobs))).sum().item()


def optimum(ref_logprobs: Tensor, rewards: Tensor, beta: float) -> float:
    """J* = beta log E_rho[exp(r / beta)]."""
    return beta * (ref_logprobs + rewards / beta).flatten().logsumexp(0).item()


def train(
    algorithm: str, seed: int, updates: int = UPDATES, points: int = 25, **changes: Any
) -> dict[str, Any]:
    """One run of an algorithm: (episodes, J) along the way, J* and J of the reference."""
    script = SCRIPTS[algorithm]
    args = script.Args(seed=seed, **SETTINGS | OWN[algorithm] | changes)
    accelerator = common.new_accelerator()
    policy = ours.make_actor(script, make_lm(seed), args)
    ref = ours.make_actor(script, make_lm(seed).requires_grad_(False), args)
    policy, optimizer = accelerator.prepare(policy, make_optimizer(policy, args))
    queries = [ours.query(CONTEXT)] * args.batch_size
    rewards = make_rewards(seed)
    ref_logprobs = enumerate_logprobs(ref)
    curve = []
    seconds = 0.0
    for update in range(updates + 1):
        if update % max(1, updates // points) == 0 or update == updates:
            now = objective(enumerate_logprobs(policy), ref_logprobs, rewards, args.kl_coef)
            curve.append((update * args.batch_size, now))
        if update == updates:
            break
        start = time.perf_counter()
        u = script.uniforms(seed, update + 1, args.batch_size, LENGTH)
        epochs = ours.shuffle(args, update)
        batch = ours.rollout(policy, ref, queries, u, epochs, None, args)
        ours.set_rewards(batch, rewards[batch.responses.unbind(1)], args)
        set_learning_rates(optimizer, update, update / updates, args)
        ours.update_policy(accelerator, policy, optimizer, batch, epochs, args)
        seconds += time.perf_counter() - start
    best = optimum(ref_logprobs, rewards, args.kl_coef)
    first = curve[0][1]
    last = curve[-1][1]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "j_star": best,
        "j_start": first,
        "j": last,
        "gap": (best - last) / (best - first),
        "seconds": seconds,
        "curve": curve,
    }


def enumerable(options: argparse.Namespace) -> None:
    """Trains both algorithms with several seeds; a table, the curves, and the record."""
    beta = options.beta or BETA
    rows = []
    for seed in range(1, options.seeds + 1):
        for algorithm in SCRIPTS:
            rows.append(train(algorithm, seed, options.updates, kl_coef=beta))
    settings = {"settings": SETTINGS, "own": OWN, "updates": options.updates}
    path = common.write(options, rows, **settings)
    table = [{name: x for name, x in row.items() if name != "curve"} for row in rows]
    worst = max(row["gap"] for row in rows)
    common.show_rows(table, f"worst gap {worst:.2%}; {path.name}")


# --- the default run ------------------------------------------------------------------------------
def log_mean_exp(rewards: Tensor, beta: float) -> Tensor:
    """beta log mean exp(r / beta) over the last axis."""
    return beta * ((rewards / beta).logsumexp(-1) - math.log(rewards.shape[-1]))


def estimate_optimum(rewards: Tensor, beta: float) -> dict[str, Any]:
    """J* from rewards (queries, samples) of the reference, its error and its bias.

    The estimates of the queries are independent, so that their spread gives the standard error of
    the mean, over the choice of queries and of samples both. Bias of the logarithm to second order:
    -beta / 2 (1 / ess - 1 / samples)."""
    num_queries, num_samples = rewards.shape
    weights = (rewards / beta).softmax(-1)
    ess = 1 / (weights**2).sum(-1)
    per_query = log_mean_exp(rewards, beta)
    error = standard_error(per_query)
    bias = (-beta / 2 * (1 / ess - 1 / num_samples)).mean().item()
    by_samples = {}
    for part in (4, 2, 1):
        fewer = num_samples // part
        by_samples[str(fewer)] = log_mean_exp(rewards[:, :fewer], beta).mean().item()
    return {
        "beta": beta,
        "j_star": per_query.mean().item(),
        "standard_error": error,
        "bias_second_order": bias,
        "biased": bool(ess.median() < 20 or abs(bias) > error),
        "ess_median": ess.median().item(),
        "ess_min": ess.min().item(),
        "queries": num_queries,
        "samples_per_query": num_samples,
        "start_reward": rewards.mean().item(),
        "j_star_by_samples": by_samples,
    }


def standard_error(values: Tensor) -> float:
    """Of their mean."""
    return values.std().item() / len(values) ** 0.5


def draw(
    policy: Any, ref: Any, score: Any, queries: Any, end: int | None, copies: int, args: Any
) -> tuple[Tensor, Tensor]:
    """Rewards (the scripts' penalty included) and log pi - log rho of `copies` responses per query,
    (queries, copies); log pi - log rho of the reference is 0.

    What counts is how each token was drawn, so that KL covers all of a response, as in the scripts'
    rewards."""
    all_scores = []
    log_ratios = []
    numbers = ppo_rlhf.uniforms(args.seed, 1, len(queries) * copies, args.response_length)
    for i, u in enumerate(numbers.split(8 * copies)):
        part = [query for query in queries[8 * i : 8 * i + 8] for _ in range(copies)]
        batch = rloo_rlhf.rollout(policy, part, u, end, args)
        all_scores.append(rloo_rlhf.score_responses(score, part, batch, args))
        log_ratio = torch.zeros(len(part))
        if policy is not ref:
            rloo_rlhf.set_logprobs(batch, policy, ref, torch.arange(len(part))[None], args)
            log_ratio = (batch.logprobs - batch.ref_logprobs).sum(1)
        log_ratios.append(log_ratio)
    return torch.cat(all_scores).view(-1, copies), torch.cat(log_ratios).view(-1, copies)


def estimated(options: argparse.Namespace) -> None:
    """J* of the scripts' default task and a reward; with --policy also its J on the same
    queries."""
    args = rloo_rlhf.Args(
        rloo_k=1,
        reward_model=options.reward_model,
        reward_fn=options.reward_fn,
        query_dataset="tiny/queries/test.jsonl",
    )
    beta = options.beta or args.kl_coef
    tokenizer = common.tokenizer()
    longest = args.query_length + args.response_length
    set_up_torch(args.dtype)
    end = data_module.token_id("truncate_token", args.truncate_token, tokenizer)
    queries = ours.load_queries(tokenizer, args, options.queries)
    score = ours.load_score_fn(tokenizer, longest, args)
    ref = ours.make_actor(rloo_rlhf, ours.load_lm(args.base_model, args), args)
    rewards, _ = draw(ref, ref, score, queries, end, options.samples, args)
    row = estimate_optimum(rewards.double(), beta)
    if options.policy is not None:
        policy = ours.make_actor(rloo_rlhf, ours.load_lm(options.policy, args), args)
        rewards, kl = draw(policy, ref, score, queries, end, options.policy_samples, args)
        per_query = (rewards - beta * kl).mean(1)
        row["j_policy"] = per_query.mean().item()
        row["j_policy_standard_error"] = standard_error(per_query)
        row["reward_policy"] = rewards.mean().item()
        row["kl_policy"] = kl.mean().item()
        row["gap"] = (row["j_star"] - row["j_policy"]) / (row["j_star"] - row["start_reward"])
    path = common.write(options, [row])
    table = []
    for name, value in row.items():
        table.append([name, f"{value:.4g}" if isinstance(value, float) else str(value)])
    warning = ""
    if row["biased"]:
        warning = "few samples carry the mean: J* is a lower bound, take more --samples or --beta"
    common.show(["figure", "value"], table, warning, path.name)


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default=None, help="name of the record (default: enumerated or estimated)")
    add("--seeds", type=int, default=3, help="seeds 1 to this")
    add("--updates", type=int, default=UPDATES, help="updates of 512 episodes")
    help_of_beta = f"KL coefficient (default: {BETA}; tiny: Args.kl_coef)"
    add("--beta", type=float, default=None, help=help_of_beta)
    add("--reward_model", default=None, help="estimate J* of tiny/model with this reward model")
    add("--reward_fn", default=None, help="or with this module:function")
    add("--policy", default=None, help="then also estimate J of this policy")
    add("--queries", type=int, default=64, help="queries of that estimate")
    add("--samples", type=int, default=128, help="samples of the reference for each of them")
    add("--policy_samples", type=int, default=16, help="samples of the policy for each of them")
    options = parser.parse_args()
    if options.reward_model is None and options.reward_fn is None:
        options.tag = options.tag or "enumerated"
        enumerable(options)
    else:
        options.tag = options.tag or "estimated"
        estimated(options)


if __name__ == "__main__":
    main()
