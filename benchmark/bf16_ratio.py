"""The probability ratio of the first minibatch, before any optimizer step: it should be 1.

PPO and RLOO divide what the policy thinks of a response now by what it thought when it sampled it. Before the first
step the two are the same policy, so that every deviation of the ratio from 1 is rounding, and every clipped ratio is a
gradient lost to it. Where the old log-probabilities come from decides how much:

    sampler      logits of the sampling loop, one token at a time with a key-value cache (several public trainers)
    other rows   a forward pass over the same responses in micro-batches of another size
    same rows    the scripts: rollout and update call forward_response with the same rows

and so does the head: in fp32 (the scripts, which autocast the trunk only), or under autocast like all other layers
(most public code). `error` is the mean distance of the training forward's log-probabilities from those of fp32 weights
and activations.

    python benchmark/bf16_ratio.py --models tiny gpt2

gpt2 is its 124M shape with random weights, whose logits are small; give a folder for a trained model. fp16 is slow on
CPUs that have to emulate it. Exit status 1 if a ratio of the scripts is clipped or off 1 by more than they allow.
"""

import argparse
import json
from typing import Any

import common
import numpy as np
import torch
from ours import load
from torch import Tensor
from transformers import DynamicCache

import ppo_rlhf
import rloo_rlhf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIPRANGE, TEMPERATURE, COPIES = 0.2, 0.7, {"ppo": 1, "rloo": 4}
SOURCES = ("sampler", "other rows", "same rows")


class AutocastHead(torch.nn.Module):
    """The policy with its head under autocast, as model(...).logits has it: logits are rounded to 8 or 11 bits."""

    def __init__(self, lm: Any, dtype: str) -> None:
        super().__init__()
        self.lm, self.dtype = lm, DTYPES[dtype]

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor]:
        hidden = rloo_rlhf.hidden_at(self.lm, at, *inputs)
        with torch.autocast(hidden.device.type, self.dtype):
            return (self.lm.get_output_embeddings()(hidden).float(),)


def autocast_trunk(lm: Any, dtype: str) -> None:
    """What the scripts' `load` does for bf16, here for fp16 too; fp32 takes it back."""
    vars(lm.base_model).pop("forward", None)
    if dtype != "fp32":
        lm.base_model.forward = torch.autocast(lm.device.type, DTYPES[dtype])(lm.base_model.forward)


@torch.no_grad()
def sampler_logprobs(policy: Any, batch: dict[str, Tensor], copies: int, length: int) -> Tensor:
    """Log-probabilities (B, R) of the responses, as the sampling loop saw them token by token."""
    responses, contexts = batch["responses"].view(-1, length), [context for context, *_ in batch["trees"]]
    width = max(map(len, contexts))
    ids = torch.tensor([[0] * (width - len(context)) + context for context in contexts], device=responses.device)
    mask = torch.tensor([[i >= width - len(context) for i in range(width)] for context in contexts])
    mask = mask.to(responses.device)
    cache, logprobs = DynamicCache(config=policy.lm.config), []
    logits = policy(None, ids, mask, None, cache)[0].repeat_interleave(copies, 0)
    mask = mask.repeat_interleave(copies, 0)
    cache.batch_repeat_interleave(copies)
    for t in range(length):
        token = responses[:, t : t + 1]
        logprobs.append((logits / TEMPERATURE).log_softmax(-1).gather(1, token))
        if t + 1 < length:
            mask = torch.cat([mask, torch.ones_like(token, dtype=torch.bool)], 1)
            logits = policy(None, token, mask, None, cache)[0]
    return torch.cat(logprobs, 1)


def in_parts(policy: Any, batch: dict[str, Tensor], parts: Any) -> Tensor:
    """forward_response over parts of the batch."""
    logprobs = torch.empty(batch["responses"].shape, device=batch["responses"].device)
    for part in parts:
        logprobs[part] = rloo_rlhf.forward_response(policy, batch, part, TEMPERATURE)[0].detach()
    return logprobs


def spread(new: Tensor, old: Tensor, sequence: bool) -> dict[str, float]:
    """What the ratio of tokens, or of whole responses, looks like."""
    log_ratio = new - old
    ratio = (log_ratio.sum(-1) if sequence else log_ratio).double().exp()
    off = (ratio - 1).abs()
    clipped = (off > CLIPRANGE).double().mean().item()
    return {"ratio_std": ratio.std(correction=0).item(), "ratio_max_error": off.max().item(), "clipped": clipped}


def through_update(algorithm: str, lm: Any, batch: dict[str, Tensor], micro: int) -> dict[str, float]:
    """The scripts' own update on their own rollout: its first ratio error and clipped share, at lr 0."""
    script, copies, rows = (ppo_rlhf if algorithm == "ppo" else rloo_rlhf), COPIES[algorithm], len(batch["trees"])
    accelerator = common.new_accelerator(steps=-(-rows // (micro // copies)))
    policy = (ppo_rlhf.ActorCritic if algorithm == "ppo" else rloo_rlhf.Actor)(lm)
    policy, optimizer = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    batch = batch | {"values": torch.zeros_like(batch["logprobs"])}
    noise = torch.randn(batch["logprobs"].shape, generator=torch.Generator().manual_seed(0))
    noise = noise.to(batch["responses"].device)
    batch |= {"rewards": noise, "advantages": noise.sum(-1)}
    args = script.Args(temperature=TEMPERATURE, micro_batch_size=micro, cliprange=CLIPRANGE)
    update = script.ppo_update if algorithm == "ppo" else script.rloo_update
    records = update(accelerator, policy, optimizer, batch, torch.arange(rows).view(1, 1, -1), args)
    metrics = rloo_rlhf.reduce_means(accelerator, records)
    return {"update_first_ratio_error": metrics["first_ratio_error"], "update_clipfrac": metrics["ppo/policy/clipfrac"]}


def measure(model: str, lm: Any, algorithm: str, length: int, queries: Any, options: argparse.Namespace) -> Any:
    """All rows for one model, algorithm and response length; without `queries`, contexts are random tokens."""
    device, copies = next(lm.parameters()).device, COPIES[algorithm]
    episodes = options.episodes if model == "tiny" else options.large_episodes
    rows, micro = episodes // copies, max(copies, episodes // 2)
    lengths = np.random.default_rng(0).integers(8, options.longest + 1, rows)
    if queries is None:
        contexts = common.random_contexts(lengths, lm.config.vocab_size, 0)
        queries = [{"context": context} for context in contexts]
    args = rloo_rlhf.Args(temperature=TEMPERATURE, truncate_after=0, micro_batch_size=micro)
    u, everyone = rloo_rlhf.uniforms(1, 1, episodes, length).to(device), torch.arange(rows)
    table, sequence, actor = [], algorithm == "rloo", rloo_rlhf.Actor(lm)
    for dtype in options.dtypes:
        autocast_trunk(lm, dtype)
        batch = rloo_rlhf.rollout(actor, actor, queries[:rows], u, everyone.view(1, -1), None, args)
        shape = batch["responses"].shape
        parts, other = (rloo_rlhf.micro_batches(everyone, batch["trees"], size) for size in (micro, micro // 2))
        autocast_trunk(lm, "fp32")
        with torch.no_grad():
            exact = in_parts(actor, batch, parts)
        autocast_trunk(lm, dtype)
        heads = {"fp32": actor} | ({"autocast": AutocastHead(lm, dtype)} if dtype != "fp32" else {})
        for head, policy in heads.items():
            new = in_parts(policy, batch, parts)  # with gradients, as in training
            with torch.no_grad():
                old = (
                    sampler_logprobs(policy, batch, copies, length).view(shape),
                    in_parts(policy, batch, other),
                    in_parts(policy, batch, parts),
                )
            for source, logprobs in zip(SOURCES, old, strict=True):
                row = {"model": model, "algorithm": algorithm, "length": length, "dtype": dtype, "head": head}
                row |= {"source": source, "episodes": episodes} | spread(new, logprobs, sequence)
                row["error"] = (new - exact).abs().mean().item()
                row["scripts"] = head == "fp32" and source == "same rows"
                if row["scripts"] and dtype != "fp16":
                    row |= through_update(algorithm, lm, batch, micro)
                table.append(row)
    return table


def show(rows: list[dict[str, Any]], *lines: str) -> None:
    """A line per model, algorithm, length, type and head: largest |ratio - 1| and clipped share for every source."""
    names, table = ("model", "algorithm", "length", "dtype", "head"), {}
    for row in rows:
        cell = f"{row['ratio_max_error']:.1e}  {row['clipped']:.0%}"
        table.setdefault(tuple(str(row[name]) for name in names), [f"{row['error']:.0e}"]).append(cell)
    columns = ["model", "algorithm", "R", "dtype", "head", "error", *SOURCES]
    common.show(columns, [[*words, *cells] for words, cells in table.items()], *lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=None, help="name of the record (default: the models)")
    parser.add_argument("--models", nargs="+", default=["tiny", "gpt2"], help="tiny, gpt2 (random weights), or folders")
    parser.add_argument("--algorithms", nargs="+", default=["rloo", "ppo"], choices=COPIES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[24, 53], help="response lengths")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--episodes", type=int, default=64, help="responses of the tiny model")
    parser.add_argument("--large_episodes", type=int, default=16, help="responses of any other")
    parser.add_argument("--longest", type=int, default=32, help="longest query; the shortest has 8 tokens")
    options = parser.parse_args()
    options.tag = options.tag or "-".join(options.models)
    device, rows = common.device(), []
    args = rloo_rlhf.Args(query_length=options.longest, response_length=max(options.lengths))
    ppo_rlhf.fast_math(device, "fp32")
    for model in options.models:
        with common.model_folder(model) as folder:
            lm = load(folder, args, device)
        queries = None
        if model == "tiny":
            queries = rloo_rlhf.load_queries(common.tokenizer(), rloo_rlhf.Args(eval_queries=1), options.episodes)
        for algorithm in options.algorithms:
            for length in options.lengths:
                rows += measure(model, lm, algorithm, length, queries, options)
    path = common.write("bf16_ratio", options.tag, options, rows)
    show(rows, "largest |ratio - 1|, clipped share", path.name)
    limits = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # those of the scripts' main
    bad = [row for row in rows if row["scripts"] and (row["clipped"] or row["ratio_max_error"] > limits[row["dtype"]])]
    bad += [row for row in rows if row.get("update_clipfrac") or row.get("update_first_ratio_error", 0) > 2e-2]
    if bad:
        raise SystemExit(f"the first ratio of the scripts is not 1: {json.dumps(bad)}")


if __name__ == "__main__":
    main()
