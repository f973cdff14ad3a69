"""The first update under TensorFlow's Adam and PyTorch's, on the same rollouts: how far each epoch goes.

    python benchmark/adam.py

Huang et al. 2024 (the N implementation details) saw, in the first two epochs of gpt2 on fixed rollouts, an approxkl of
3.72e-4 with TensorFlow's Adam, 2.37e-3 with PyTorch's and 3.75e-4 with a copy of the first: TensorFlow adds epsilon
before the bias correction, which makes it some thirty times larger in the first steps.

Here: the recorded model of tests/golden with a rollout of OpenAI's own code, whose run in TensorFlow is recorded too,
and the embedded default with its own lr and with that of the sentiment preset, means over seeds. The reward is
tiny.rewards:happy. An epoch is a single step on all rows, so that the first has the ratio 1. Writes results/adam-<tag>.
"""

import argparse
import sys
from typing import Any

import common
import numpy as np
import torch
from ours import load

import ppo_rlhf
from tf_adam import make_optimizer
from tiny.rewards import happy

sys.path.append(str(common.ROOT / "tests"))
from golden_tools import HERE, load_actor, load_golden, rows_of, script_args
from tiny_models import make_batch

KINDS = {"approxkl": "ppo/policy/approxkl", "clipfrac": "ppo/policy/clipfrac"}


def epochs_of(policy: Any, batch: dict[str, Any], epochs: torch.Tensor, args: Any) -> dict[str, list[float]]:
    """approxkl and clipfrac of each epoch of one update with ppo_update."""
    accelerator = common.new_accelerator()
    policy, optimizer = accelerator.prepare(policy, make_optimizer(policy, args))
    records = ppo_rlhf.ppo_update(accelerator, policy, optimizer, batch, epochs, args)
    pairs = {kind: [record[name] for record in records if name in record] for kind, name in KINDS.items()}
    return {kind: [(total / count).item() for total, count in found] for kind, found in pairs.items()}


def recorded(adam: str) -> dict[str, Any]:
    """On a rollout of the original's; adam `original`: what it logged, in TensorFlow."""
    arrays, record = load_golden(HERE / "04c_ppo_3steps_real.npz")
    args = script_args(record["hparams"])
    row = {"work": "recorded model", "adam": adam, "lr": args.lr, "seeds": 1}
    if adam == "original":
        steps = range(args.num_epochs)
        return row | {kind: [float(arrays[f"s0/mb{i}/stats/policy/{kind}"]) for i in steps] for kind in KINDS}
    args.adam, policy = adam, load_actor(HERE / "hf_policy")
    batch = make_batch(
        rows_of(arrays["s0/rollout/queries"], policy.lm.config.vocab_size), arrays["s0/rollout/responses"]
    )
    for name in ("logprobs", "values", "rewards"):
        batch[name] = torch.from_numpy(arrays[f"s0/rollout/{name}"])
    epochs = torch.from_numpy(arrays["s0/perms"]).long().view(args.num_epochs, args.num_minibatches, -1)
    return row | epochs_of(policy, batch, epochs, args)


def embedded(adam: str, lr: float, seeds: list[int]) -> dict[str, Any]:
    """On the first rollout of the embedded default, means over seeds."""
    found, device, tokenizer = [], torch.device("cpu"), common.tokenizer()
    for seed in seeds:
        args = ppo_rlhf.Args(seed=seed, adam=adam, lr=lr)
        queries = ppo_rlhf.load_queries(tokenizer, args, args.eval_queries + args.batch_size)[args.eval_queries :]
        policy, ref = (ppo_rlhf.ActorCritic(load("tiny/model", args, device)) for _ in range(2))
        end, shuffle = ppo_rlhf.token_id(tokenizer, args.truncate_token), np.random.RandomState(seed)
        epochs = torch.from_numpy(np.stack([shuffle.permutation(args.batch_size) for _ in range(args.num_epochs)]))
        epochs = epochs.view(args.num_epochs, args.num_minibatches, -1)
        u = ppo_rlhf.uniforms(seed, 1, args.batch_size, args.response_length)
        batch = ppo_rlhf.rollout(policy, ref, queries, u, epochs[0], end, args)
        scores = ppo_rlhf.score(happy, queries, batch["truncated"], tokenizer, args).sum(1)
        scores = torch.where(batch["found"], scores, args.penalty_reward_value)
        log_ratio = batch["logprobs"] - batch["ref_logprobs"]
        batch["rewards"] = ppo_rlhf.token_rewards(scores, log_ratio, batch["kept"], args.kl_coef)
        found.append(epochs_of(policy, batch, epochs, args))
    row = {"work": "embedded default", "adam": adam, "lr": lr, "seeds": len(seeds)}
    return row | {kind: np.mean([x[kind] for x in found], 0).tolist() for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="first-update", help="name of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    ppo_rlhf.fast_math(torch.device("cpu"), "fp32")
    rows = [recorded(adam) for adam in ("original", "tf", "torch")]
    rows += [embedded(adam, lr, args.seeds) for lr in (2e-4, 1e-5) for adam in ("tf", "torch")]
    path = common.write("adam", args.tag, args, rows)
    cells = [[f"{x:.3g}" for kind in KINDS for x in row[kind]] for row in rows]
    columns = ["work", "adam", "lr", *(f"{kind} {i + 1}" for kind in KINDS for i in range(len(rows[0][kind])))]
    table = [[row["work"], row["adam"], row["lr"], *cell] for row, cell in zip(rows, cells, strict=True)]
    common.show(columns, table, path.name)


if __name__ == "__main__":
    main()
