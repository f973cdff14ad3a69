"""The probability ratio of the first minibatch, before any optimizer step: it should be 1.

PPO and RLOO divide what the policy thinks of a response now by what it thought when it sampled it.
Before the first step the two are the same policy, so that every deviation of the ratio from 1 is
rounding, and every clipped ratio is a gradient lost to it. Where the old log-probabilities come
from decides how much:

    sampler      logits of the sampling loop, one token at a time with a key-value cache (several
                 public trainers)
    other rows   a forward pass over the same responses in micro-batches of another size
    same rows    the scripts: rollout and update call forward_response with the same rows

and so does the head: in fp32 (the scripts, which autocast the trunk only), or under autocast like
all other layers (most public code). `error` is the mean distance of the training forward's
log-probabilities from those of fp32 weights and activations.

    python benchmark/studies/bf16_ratios/run.py --models tiny gpt2

gpt2 is its 124M shape with random weights, whose logits are small; give a folder for a trained
model. fp16 is slow on CPUs that have to emulate it. Exit status 1 if a ratio of the scripts is
clipped or off 1 by more than they allow.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import ppo_rlhf
import rloo_rlhf
from benchmark import common, ours
from plumbing.launch import set_up_torch
from plumbing.models import run_in_bf16

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LIMITS = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # the scripts' check_update has these
CLIPRANGE = 0.2
TEMPERATURE = 0.7
COPIES = {"ppo": 1, "rloo": 4}
SOURCES = ("sampler", "other rows", "same rows")


class AutocastHead(torch.nn.Module):
    """A policy with its head under autocast, as model(...).logits has it: logits are rounded to 8
    or 11 bits."""

    def __init__(self, policy: Any, dtype: str) -> None:
        super().__init__()
        self.policy = policy
        self.lm = policy.lm
        self.dtype = DTYPES[dtype]

    def forward(self, ids: Tensor, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        with torch.autocast(ids.device.type, self.dtype):
            predicted = self.policy(ids, *inputs, **named)
        return predicted | {"logits": predicted["logits"].float()}


def autocast_trunk(actor: Any, dtype: str) -> None:
    """What the scripts do for bf16, here for fp16 too; fp32 takes it back."""
    trunk = actor.lm.base_model
    vars(trunk).pop("forward", None)
    if dtype == "bf16":
        trunk.forward = partial(run_in_bf16, trunk.forward)
    if dtype == "fp16":
        trunk.forward = torch.autocast(actor.lm.device.type, torch.float16)(trunk.forward)


@torch.no_grad()
def sampler_logprobs(policy: Any, batch: Any) -> Tensor:
    """Log-probabilities (B, R) of the responses, as the sampling loop saw them token by token."""
    ids, mask = rloo_rlhf.pad_rows(batch.contexts)
    cache = rloo_rlhf.Cache(config=policy.lm.config)
    logprobs = []
    for tokens in batch.responses.split(1, dim=1):
        logits = policy(ids, mask, cache=cache)["logits"]
        all_logprobs = (logits / TEMPERATURE).log_softmax(-1)
        logprobs.append(all_logprobs[:, -1].gather(1, tokens))
        ids = tokens
        mask = pad(mask, (0, 1), value=True)
    return torch.cat(logprobs, 1)


def in_parts(policy: Any, batch: Any, parts: Any) -> Tensor:
    """Log-probabilities (B, R) by forward_response over parts of the batch."""
    logprobs = torch.zeros_like(batch.logprobs)
    for rows in parts:
        part = rloo_rlhf.select(batch, rows)
        _, predicted = rloo_rlhf.forward_response(policy, part, TEMPERATURE)
        logprobs[rows] = predicted["logprobs"].detach()
    return logprobs


def spread(new: Tensor, old: Tensor, of_responses: bool) -> dict[str, float]:
    """What the ratio of tokens, or of whole responses, looks like."""
    log_ratio = new - old
    if of_responses:
        log_ratio = log_ratio.sum(1)
    ratio = log_ratio.double().exp()
    off = (ratio - 1).abs()
    return {
        "ratio_std": ratio.std(correction=0).item(),
        "ratio_max_error": off.max().item(),
        "clipped": (off > CLIPRANGE).double().mean().item(),
    }


def through_update(policy: Any, batch: Any, args: Any) -> dict[str, float]:
    """The scripts' own update on their own rollout: its first ratio error and clipped share, at a
    learning rate of 0."""
    accelerator = common.new_accelerator()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    noise = torch.randn(batch.logprobs.shape, generator=torch.Generator().manual_seed(0))
    noise = noise.to(batch.logprobs.device)
    if isinstance(batch, ppo_rlhf.Batch):
        batch = replace(batch, rewards=noise)
    else:
        batch = replace(batch, advantages=noise.sum(1))
    epochs = torch.arange(len(noise)).view(1, 1, -1)
    metrics = ours.update_policy(accelerator, policy, optimizer, batch, epochs, args).reduce()
    return {
        "update_first_ratio_error": metrics["first_ratio_error"],
        "update_clipfrac": metrics["policy/clipfrac"],
    }


def measure(
    model: str,
    lm: Any,
    algorithm: str,
    length: int,
    queries: list[Any] | None,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """All rows for one model, algorithm and response length; without `queries`, contexts are random
    tokens."""
    script = ours.SCRIPTS[algorithm]
    copies = COPIES[algorithm]
    episodes = options.episodes if model == "tiny" else options.large_episodes
    micro = max(copies, episodes // 2)
    if queries is None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(8, options.longest + 1, episodes // copies)
        contexts = common.random_contexts(lengths, lm.config.vocab_size, 0)
        queries = [ours.query(context) for context in contexts]
    asked = [query for query in queries[: episodes // copies] for _ in range(copies)]
    args = script.Args(
        temperature=TEMPERATURE,
        response_length=length,
        truncate_after=0,
        micro_batch_size=micro,
        cliprange=CLIPRANGE,
    )
    u = script.uniforms(1, 1, episodes, length)
    everyone = torch.arange(episodes)
    actor = ours.make_actor(script, lm, args)
    table = []
    for dtype in options.dtypes:
        autocast_trunk(actor, dtype)
        batch = ours.rollout(actor, actor, asked, u, everyone.view(1, 1, -1), None, args)
        parts = script.micro_batches(everyone, batch, micro)
        fewer = max(copies, micro // 2)
        other_parts = script.micro_batches(everyone, batch, fewer)
        autocast_trunk(actor, "fp32")
        with torch.no_grad():
            exact = in_parts(actor, batch, parts)
        autocast_trunk(actor, dtype)
        heads = {"fp32": actor}
        if dtype != "fp32":
            heads["autocast"] = AutocastHead(actor, dtype)
        for head, policy in heads.items():
            new = in_parts(policy, batch, parts)  # with gradients, as in training
            with torch.no_grad():
                old = {
                    "sampler": sampler_logprobs(policy, batch),
                    "other rows": in_parts(policy, batch, other_parts),
                    "same rows": in_parts(policy, batch, parts),
                }
            for source, logprobs in old.items():
                row = {
                    "model": model,
                    "algorithm": algorithm,
                    "length": length,
                    "dtype": dtype,
                    "head": head,
                    "source": source,
                    "episodes": episodes,
                    "error": (new - exact).abs().mean().item(),
                    "scripts": head == "fp32" and source == "same rows",
                }
                row |= spread(new, logprobs, algorithm == "rloo")
                if row["scripts"] and dtype != "fp16":
                    row |= through_update(actor, batch, args)
                table.append(row)
    return table


def show(rows: list[dict[str, Any]], *lines: str) -> None:
    """A line per model, algorithm, length, type and head: largest |ratio - 1| and clipped share for
    every source."""
    table = {}
    for row in rows:
        names = ("model", "algorithm", "length", "dtype", "head")
        cells = table.setdefault(tuple(row[name] for name in names), [f"{row['error']:.0e}"])
        cells.append(f"{row['ratio_max_error']:.1e}  {row['clipped']:.0%}")
    columns = ["model", "algorithm", "R", "dtype", "head", "error", *SOURCES]
    common.show(columns, [[*words, *cells] for words, cells in table.items()], *lines)


def is_bad(row: dict[str, Any]) -> bool:
    """Whether a ratio of the scripts is not 1."""
    if row["scripts"] and (row["clipped"] or row["ratio_max_error"] > LIMITS[row["dtype"]]):
        return True
    return row.get("update_clipfrac", 0) > 0 or row.get("update_first_ratio_error", 0) > 2e-2


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    models = ["tiny", "gpt2"]
    add("--tag", default=None, help="name of the record (default: the models)")
    add("--models", nargs="+", default=models, help="tiny, gpt2 (random weights), or folders")
    add("--algorithms", nargs="+", default=["rloo", "ppo"], choices=COPIES)
    add("--lengths", type=int, nargs="+", default=[24, 53], help="response lengths")
    add("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    add("--episodes", type=int, default=64, help="responses of the tiny model")
    add("--large_episodes", type=int, default=16, help="responses of any other")
    add("--longest", type=int, default=32, help="longest query; the shortest has 8 tokens")
    options = parser.parse_args()
    options.tag = options.tag or "-".join(options.models)
    args = rloo_rlhf.Args(query_length=options.longest, response_length=max(options.lengths))
    set_up_torch("fp32")
    tokenizer = common.tokenizer()
    rows = []
    for model in options.models:
        with common.model_folder(model) as folder:
            lm = ours.load_lm(folder, args)
        queries = None
        if model == "tiny":
            args.base_model = "tiny/model"
            queries = ours.load_queries(tokenizer, args, options.episodes)
        for algorithm in options.algorithms:
            for length in options.lengths:
                rows += measure(model, lm, algorithm, length, queries, options)
    path = common.write(options, rows)
    show(rows, "largest |ratio - 1|, clipped share", path.name)
    bad = [row for row in rows if is_bad(row)]
    if bad:
        raise SystemExit(f"the first ratio of the scripts is not 1: {json.dumps(bad)}")


if __name__ == "__main__":
    main()
