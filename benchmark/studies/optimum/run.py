"""How near PPO and RLOO come to the best policy that there is, in a problem small enough to
enumerate.

The objective J(pi) = E_pi[r] - beta KL(pi || rho) has one maximum, at pi* = rho exp(r / beta) / Z,
of height J* = beta log E_rho[exp(r / beta)]. Eight tokens and responses of three make 512
responses: forward passes over all of them give J of the policy exactly, at any time of its
training. "Gap" is (J* - J) / (J* - J(rho)): 1 is the starting model, 0 the optimum.

    python benchmark/studies/optimum/run.py    # curves of both algorithms against J*
"""

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
from benchmark import common, ours
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


def main() -> None:
    """Trains both algorithms with several seeds; a table, the curves, and the record."""
    parser = common.make_parser(__doc__, __file__)
    parser.add_argument("--tag", default="enumerated", help="name of the record")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of 512 episodes")
    options = parser.parse_args()
    rows = []
    for seed in range(1, options.seeds + 1):
        for algorithm in SCRIPTS:
            rows.append(train(algorithm, seed, options.updates))
    settings = {"settings": SETTINGS, "own": OWN, "updates": options.updates}
    path = common.write(options, rows, **settings)
    table = [{name: x for name, x in row.items() if name != "curve"} for row in rows]
    worst = max(row["gap"] for row in rows)
    common.show_rows(table, f"worst gap {worst:.2%}; {path.name}")


if __name__ == "__main__":
    main()
