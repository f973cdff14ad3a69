"""The first update under TensorFlow's Adam and PyTorch's, on the same rollouts: how far each epoch
goes.

    python benchmark/studies/adam/run.py

Huang et al. 2024 (the N implementation details) saw, in the first two epochs of gpt2 on fixed
rollouts, an approxkl of 3.72e-4 with TensorFlow's Adam, 2.37e-3 with PyTorch's and 3.75e-4 with a
copy of the first: TensorFlow adds epsilon before the bias correction, which makes it some thirty
times larger in the first steps.

Here: the recorded model of tests/golden with a rollout of OpenAI's own code, whose run in
TensorFlow is recorded too, and the default run with its own lr and with that of the sentiment
preset, means over seeds. The reward is tiny.rewards:happy. An epoch is a single step on all rows,
so that the first has the ratio 1. Writes <tag>.json.
"""

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch

import ppo_rlhf
from benchmark import common, ours
from plumbing import data as data_module
from plumbing.labels import call_reward_fn
from plumbing.launch import set_up_torch
from ppo_rlhf import make_optimizer
from tiny.rewards import happy

sys.path.append(str(common.ROOT / "tests" / "helpers"))
import golden_tools

KINDS = ("approxkl", "clipfrac")


def epochs_of(
    policy: Any, batch: ppo_rlhf.Batch, epochs: torch.Tensor, args: Any
) -> dict[str, list[float]]:
    """approxkl and clipfrac of each epoch of one update with ppo_update, epoch by epoch."""
    accelerator = common.new_accelerator()
    policy, optimizer = accelerator.prepare(policy, make_optimizer(policy, args))
    found = {kind: [] for kind in KINDS}
    # The second epoch's ratios are not 1, which is no fault here: only main checks them.
    for epoch in epochs.split(1):
        log = ppo_rlhf.ppo_update(accelerator, policy, optimizer, batch, epoch, args)
        metrics = log.reduce()
        for kind in KINDS:
            found[kind].append(metrics[f"policy/{kind}"])
    return found


def recorded(adam: str) -> dict[str, Any]:
    """On a rollout of the original's; adam `original`: what it logged, in TensorFlow."""
    arrays, record = golden_tools.load_golden(golden_tools.HERE / "04c_ppo_3steps_real.npz")
    args = golden_tools.script_args(record["hparams"])
    row = {
        "work": "recorded model",
        "adam": adam,
        "lr": args.lr,
        "seeds": 1,
    }
    if adam == "original":
        for kind in KINDS:
            names = [f"s0/mb{i}/stats/policy/{kind}" for i in range(args.num_epochs)]
            row[kind] = [float(arrays[name]) for name in names]
        return row
    args.adam = adam
    policy = golden_tools.load_actor(golden_tools.HERE / "hf_policy")
    contexts = golden_tools.rows_of(arrays["s0/rollout/queries"], policy.lm.config.vocab_size)
    responses = torch.from_numpy(arrays["s0/rollout/responses"]).long()
    batch = ours.make_batch(ppo_rlhf, contexts, responses)
    batch.logprobs = torch.from_numpy(arrays["s0/rollout/logprobs"])
    batch.values = torch.from_numpy(arrays["s0/rollout/values"])
    batch.rewards = torch.from_numpy(arrays["s0/rollout/rewards"])
    epochs = torch.from_numpy(arrays["s0/perms"]).long()
    epochs = epochs.view(args.num_epochs, args.num_minibatches, -1)
    return row | epochs_of(policy, batch, epochs, args)


def of_default_run(adam: str, lr: float, seeds: list[int], batch_size: int) -> dict[str, Any]:
    """On the first rollout of the default run, means over seeds."""
    tokenizer = common.tokenizer()
    found = []
    for seed in seeds:
        args = ppo_rlhf.Args(seed=seed, adam=adam, lr=lr, batch_size=batch_size)
        num_queries = args.eval_queries + args.batch_size
        queries = ours.load_queries(tokenizer, args, num_queries)
        queries = queries[args.eval_queries :]
        score = functools.partial(call_reward_fn, happy, tokenizer)
        policy = ours.make_actor(ppo_rlhf, ours.load_lm("tiny/model", args), args)
        ref = ours.make_actor(ppo_rlhf, ours.load_lm("tiny/model", args), args)
        end = data_module.token_id("truncate_token", args.truncate_token, tokenizer)
        epochs = ours.shuffle(args, 0)
        u = ppo_rlhf.uniforms(seed, 1, args.batch_size, args.response_length)
        batch = ours.rollout(policy, ref, queries, u, epochs, end, args)
        scores = score(queries, ppo_rlhf.truncated(batch))
        scores = ppo_rlhf.penalize_missing_end(scores, batch.found_end, args)
        ours.set_rewards(batch, scores, args)
        found.append(epochs_of(policy, batch, epochs, args))
    row = {
        "work": "default run",
        "adam": adam,
        "lr": lr,
        "seeds": len(seeds),
    }
    return row | {kind: np.mean([x[kind] for x in found], 0).tolist() for kind in KINDS}


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    parser.add_argument("--tag", default="first_update", help="name of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--batch_size", type=int, default=128, help="rows of the default run")
    args = parser.parse_args()
    set_up_torch("fp32")
    rows = [recorded(adam) for adam in ("original", "tf", "torch")]
    for lr in (2e-4, 1e-5):
        rows += [of_default_run(adam, lr, args.seeds, args.batch_size) for adam in ("tf", "torch")]
    path = common.write(args, rows)
    table = []
    for row in rows:
        line = {name: row[name] for name in ("work", "adam", "lr")}
        for kind in KINDS:
            line |= {f"{kind} {i}": x for i, x in enumerate(row[kind], 1)}
        table.append(line)
    common.show_rows(table, path.name)


if __name__ == "__main__":
    main()
