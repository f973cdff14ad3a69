"""How near PPO and RLOO come to the best policy that there is, in a problem small enough to enumerate.

The objective J(pi) = E_pi[r] - beta KL(pi || rho) has one maximum, at pi* = rho exp(r / beta) / Z, of height
J* = beta log E_rho[exp(r / beta)]. Eight tokens and responses of three make 512 responses: forward passes over all of
them give J of the policy exactly, at any time of its training. "Gap" is (J* - J) / (J* - J(rho)): 1 is the reference,
0 the optimum.

    python benchmark/optimum.py                                       # curves of both algorithms against J*
    python benchmark/optimum.py --reward_model FOLDER                 # J* of tiny/model, from samples of it
    python benchmark/optimum.py --reward_model FOLDER --policy FOLDER # and how near a trained policy comes

The second is an estimate: per query, the logarithm of a mean of exp(r / beta) over samples. Where few samples carry
that mean (a small effective sample size), it is too low: the record says by how much to second order, and warns.
"""

import argparse
import math
import time
from typing import Any

import common
import numpy as np
import torch
from matplotlib.figure import Figure
from ours import load
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import ppo_rlhf
import rloo_rlhf
from tf_adam import make_optimizer

VOCABULARY, LENGTH, CONTEXT, BETA = 8, 3, [0], 1.0
SHAPE = (VOCABULARY,) * LENGTH
SCRIPTS = {"ppo": ppo_rlhf, "rloo": rloo_rlhf}
UPDATES = 250  # of 512 episodes
# a fixed coefficient, no truncation, and nothing that changes the objective: whitened rewards would rescale r
SETTINGS = {
    "response_length": LENGTH, "temperature": 1.0, "truncate_token": None, "kl_coef": BETA, "kl_target": None,
    "batch_size": 512, "micro_batch_size": 512, "num_minibatches": 1, "num_epochs": 4, "lr": 2e-3,
}  # fmt: skip
OWN = {"ppo": {"whiten_rewards": False, "gamma": 1.0, "lam": 0.95}, "rloo": {"rloo_k": 4}}


def make_lm(seed: int) -> GPT2LMHeadModel:
    """A random GPT-2 whose distribution is far from uniform; eager attention, as `load` takes on a CPU."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=32, n_layer=1, n_head=4, initializer_range=0.1, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, activation_function="gelu_pytorch_tanh",
        attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_rewards(seed: int) -> Tensor:
    """r(y) ~ N(0, 1) for every response, (8, 8, 8)."""
    return torch.from_numpy(np.random.default_rng([seed, 3]).standard_normal(SHAPE)).float()


@torch.no_grad()
def enumerate_logprobs(policy: Any) -> Tensor:
    """log pi of all responses, (8, 8, 8), in double precision, through the function that training uses."""
    responses = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
    batch = {"trees": [[CONTEXT, fed] for fed in responses[:, :-1].tolist()], "responses": responses}
    logprobs = ppo_rlhf.forward_response(policy, batch, torch.arange(len(responses)), 1.0)[0]
    return logprobs.double().sum(1).view(SHAPE)


def objective(logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, beta: float) -> float:
    """J(pi), exactly."""
    return (logprobs.exp() * (rewards - beta * (logprobs - ref_logprobs))).sum().item()


def optimum(ref_logprobs: Tensor, rewards: Tensor, beta: float) -> float:
    """J* = beta log E_rho[exp(r / beta)]."""
    return beta * (ref_logprobs + rewards / beta).flatten().logsumexp(0).item()


def rollout(script: Any, policy: Any, ref: Any, rewards: Tensor, u: Tensor, args: Any) -> dict[str, Tensor]:
    """A batch with rewards and advantages, as the scripts' main makes it; the reward of a response is looked up."""
    rows = len(u) // getattr(args, "rloo_k", 1)
    queries = [{"context": CONTEXT}] * rows
    batch = script.rollout(policy, ref, queries, u, torch.arange(rows).view(1, -1), None, args)
    scores, log_ratio = rewards[batch["responses"].unbind(-1)], batch["logprobs"] - batch["ref_logprobs"]
    if script is rloo_rlhf:
        batch["rewards"] = scores - args.kl_coef * log_ratio.sum(2)
        return batch | {"advantages": script.rloo_advantages(batch["rewards"])}
    return batch | {"rewards": script.token_rewards(scores, log_ratio, batch["kept"], args.kl_coef)}


def train(algorithm: str, seed: int, updates: int = UPDATES, points: int = 25, **changes: Any) -> dict[str, Any]:
    """One run of an algorithm: (episodes, J) along the way, J* and J of the reference."""
    script = SCRIPTS[algorithm]
    args = script.Args(seed=seed, **SETTINGS | OWN[algorithm] | changes)
    rows = args.batch_size // getattr(args, "rloo_k", 1)
    steps = math.ceil(args.batch_size / args.num_minibatches / args.micro_batch_size)
    accelerator = common.new_accelerator(steps)
    policy_class = script.ActorCritic if script is ppo_rlhf else script.Actor
    policy, ref = policy_class(make_lm(seed)), policy_class(make_lm(seed).requires_grad_(False))
    optimizer = make_optimizer(policy, args)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    update_policy = script.ppo_update if script is ppo_rlhf else script.rloo_update
    rewards, shuffle, curve, seconds = make_rewards(seed), np.random.RandomState(seed), [], 0.0
    ref_logprobs = enumerate_logprobs(ref)
    for update in range(updates + 1):
        if update % max(1, updates // points) == 0 or update == updates:
            now = objective(enumerate_logprobs(policy), ref_logprobs, rewards, args.kl_coef)
            curve.append((update * args.batch_size, now))
        if update < updates:
            start = time.perf_counter()
            u = script.uniforms(seed, update + 1, args.batch_size, LENGTH)
            batch = rollout(script, policy, ref, rewards, u, args)
            shuffles = [shuffle.permutation(rows) for _ in range(args.num_epochs)]
            epochs = torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * (1 - update / updates)
            update_policy(accelerator, policy, optimizer, batch, epochs, args)
            seconds += time.perf_counter() - start
    best, first, last = optimum(ref_logprobs, rewards, args.kl_coef), curve[0][1], curve[-1][1]
    row = {"algorithm": algorithm, "seed": seed, "j_star": best, "j_ref": first, "j": last}
    return row | {"gap": (best - last) / (best - first), "seconds": seconds, "curve": curve}


def plot(rows: list[dict[str, Any]], path: Any) -> None:
    """Every run's J, scaled so that the reference is 0 and the optimum 1, over episodes."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="J*")
    for algorithm, colour in zip(SCRIPTS, ("tab:blue", "tab:orange"), strict=True):
        runs = [row for row in rows if row["algorithm"] == algorithm]
        for i, row in enumerate(runs):
            x, y = zip(*row["curve"], strict=True)
            scaled = [(j - row["j_ref"]) / (row["j_star"] - row["j_ref"]) for j in y]
            label = f"{algorithm.upper()}, {len(runs)} seeds" if i == 0 else None
            axes.plot(x, scaled, color=colour, linewidth=1, label=label)
    axes.set(xlabel="episodes", ylabel="(J - J(reference)) / (J* - J(reference))")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def enumerable(options: argparse.Namespace) -> None:
    """Train both algorithms with several seeds; a table, the curves, and the record."""
    rows = []
    for seed in range(1, options.seeds + 1):
        rows += [train(algorithm, seed, options.updates, kl_coef=options.beta or BETA) for algorithm in SCRIPTS]
    table = []
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("j_ref", "j", "j_star")]
        table.append([row["algorithm"], row["seed"], *numbers, f"{row['gap']:.2%}", f"{row['seconds']:.1f}"])
    settings = {"settings": SETTINGS, "own": OWN, "updates": options.updates}
    path = common.write("optimum", options.tag, options, rows, **settings)
    plot(rows, path.with_name(f"{path.stem.removesuffix('-enumerated')}.png"))
    columns = ["algorithm", "seed", "J(ref)", "J", "J*", "gap", "seconds"]
    common.show(columns, table, f"worst gap {max(row['gap'] for row in rows):.2%}; {path.name}")


def log_mean_exp(rewards: Tensor, beta: float) -> Tensor:
    """beta log mean exp(r / beta) over the last axis."""
    return beta * ((rewards / beta).logsumexp(-1) - math.log(rewards.shape[-1]))


def estimate_optimum(rewards: Tensor, beta: float) -> dict[str, Any]:
    """J* from rewards (queries, samples) of the reference, its error and its bias.

    The estimates of the queries are independent, so that their spread gives the standard error of the mean, over the
    choice of queries and of samples both. Bias of the logarithm to second order: -beta / 2 (1 / ess - 1 / samples).
    """
    weights = (rewards / beta).softmax(-1)
    ess, per_query, samples = 1 / (weights**2).sum(-1), log_mean_exp(rewards, beta), rewards.shape[-1]
    error = per_query.std().item() / len(rewards) ** 0.5
    bias = (-beta / 2 * (1 / ess - 1 / samples)).mean().item()
    fractions = {str(samples // part): log_mean_exp(rewards[:, : samples // part], beta).mean() for part in (4, 2, 1)}
    unreliable = bool(ess.median() < 20 or abs(bias) > error)
    return {
        "beta": beta, "j_star": per_query.mean().item(), "standard_error": error, "bias_second_order": bias,
        "biased": unreliable, "ess_median": ess.median().item(), "ess_min": ess.min().item(), "queries": len(rewards),
        "samples_per_query": samples, "reference_reward": rewards.mean().item(),
        "j_star_by_samples": {name: value.item() for name, value in fractions.items()},
    }  # fmt: skip


def draw(policy: Any, ref: Any, reward: Any, queries: Any, tokenizer: Any, copies: int, args: Any) -> list[Tensor]:
    """Rewards (the scripts' penalty included) and log pi - log rho of `copies` responses per query, (queries, copies).

    What counts is how each token was drawn, so that KL covers all of a response, as in the scripts' rewards.
    """
    end, rewards, log_ratios = ppo_rlhf.token_id(tokenizer, args.truncate_token), [], []
    numbers = ppo_rlhf.uniforms(args.seed, 1, len(queries) * copies, args.response_length).split(8 * copies)
    for i, u in enumerate(numbers):
        part = queries[8 * i : 8 * i + 8]
        minibatches = [torch.arange(len(part))] if policy is not ref else []  # no passes: all ratios are 1
        batch = rloo_rlhf.rollout(policy, ref, part, u, minibatches, end, args)
        scores = ppo_rlhf.score(reward, part, batch["truncated"], tokenizer, args).sum(1)
        scores = torch.where(batch["found"], scores, args.penalty_reward_value)
        log_ratio = torch.zeros(len(part), copies)
        if policy is not ref:
            log_ratio = ((batch["logprobs"] - batch["ref_logprobs"]) * batch["kept"]).sum(-1)
        rewards.append(scores.view(len(part), copies))
        log_ratios.append(log_ratio)
    return [torch.cat(rewards), torch.cat(log_ratios)]


def estimated(options: argparse.Namespace) -> None:
    """J* of the scripts' default task and a reward; with --policy also its J on the same queries."""
    args = ppo_rlhf.Args(reward_model=options.reward_model, reward_fn=options.reward_fn)
    args.query_dataset, beta = "tiny/queries/test.jsonl", options.beta or args.kl_coef
    tokenizer, device, longest = common.tokenizer(), torch.device("cpu"), args.query_length + args.response_length
    ppo_rlhf.fast_math(device, args.dtype)
    queries = ppo_rlhf.load_queries(tokenizer, args, options.queries)
    reward = ppo_rlhf.load_reward(args, "tiny", tokenizer, longest, device)
    folders = [args.base_model] + ([options.policy] if options.policy else [])
    ref, *others = (rloo_rlhf.Actor(load(name, args, device)) for name in folders)
    row = estimate_optimum(draw(ref, ref, reward, queries, tokenizer, options.samples, args)[0].double(), beta)
    for policy in others:
        rewards, kl = draw(policy, ref, reward, queries, tokenizer, options.policy_samples, args)
        per_query = (rewards - beta * kl).mean(1)
        error = per_query.std().item() / len(queries) ** 0.5
        row |= {"j_policy": per_query.mean().item(), "j_policy_standard_error": error}
        row |= {"reward_policy": rewards.mean().item(), "kl_policy": kl.mean().item()}
        row["gap"] = (row["j_star"] - row["j_policy"]) / (row["j_star"] - row["reference_reward"])
    path = common.write("optimum", options.tag, options, [row])
    table = [[name, f"{value:.4g}" if isinstance(value, float) else str(value)] for name, value in row.items()]
    warning = (
        "few samples carry the mean: J* is a lower bound, take a larger --samples or --beta" if row["biased"] else ""
    )
    common.show(["figure", "value"], table, warning, path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=None, help="name of the record (default: enumerated or estimated)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of 512 episodes")
    parser.add_argument(
        "--beta", type=float, default=None, help=f"KL coefficient (default: {BETA}; tiny: Args.kl_coef)"
    )
    parser.add_argument("--reward_model", default=None, help="estimate J* of tiny/model with this reward model")
    parser.add_argument("--reward_fn", default=None, help="or with this module:function")
    parser.add_argument("--policy", default=None, help="then also estimate J of this policy")
    parser.add_argument("--queries", type=int, default=64, help="queries of that estimate")
    parser.add_argument("--samples", type=int, default=128, help="samples of the reference for each of them")
    parser.add_argument("--policy_samples", type=int, default=16, help="samples of the policy for each of them")
    options = parser.parse_args()
    sampled = options.reward_model is not None or options.reward_fn is not None
    options.tag = options.tag or ("estimated" if sampled else "enumerated")
    (estimated if sampled else enumerable)(options)


if __name__ == "__main__":
    main()
