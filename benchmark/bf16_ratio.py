"""The probability ratio of the first minibatch, before any optimizer step: it should be 1.

PPO and RLOO divide what the policy thinks of a response now by what it thought when it sampled it. Before the first
step the two are the same policy, so that every deviation of the ratio from 1 is rounding, and every clipped ratio is a
gradient lost to it. Where the old log-probabilities come from decides how much:

    sampler      logits of the sampling loop, one token at a time with a key-value cache (several public trainers)
    other rows   a forward pass over the same responses in micro-batches of another size
    same rows    the scripts: rollout and update call forward_response with the same rows

and so does the head: in fp32 (the scripts), or under autocast like all other layers (most public code). `error` is the
mean distance of the training forward's log-probabilities from those of fp32 weights and activations.

    python benchmark/bf16_ratio.py --models tiny gpt2

gpt2 is its 124M shape with random weights, whose logits are small; give a folder for a trained model. fp16 is slow on
CPUs that have to emulate it. Exit status 1 if a ratio of the scripts is clipped or off 1 by more than they allow.
"""

import argparse
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import common
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import ppo_rlhf
import rloo_rlhf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIPRANGE, TEMPERATURE, COPIES = 0.2, 0.7, {"ppo": 1, "rloo": 4}
SOURCES = ("sampler", "other rows", "same rows")


class AutocastHead(torch.nn.Module):
    """The policy with its head under autocast, as model(...).logits has it: logits are rounded to 8 or 11 bits."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor]:
        hidden = rloo_rlhf.last_hidden(self.lm, *inputs)
        hidden = hidden[:, -1].contiguous() if at is None else hidden.flatten(0, 1).index_select(0, at)
        return (self.lm.get_output_embeddings()(hidden).float(),)


def autocast(device: torch.device, dtype: str) -> Any:
    """What the scripts' accelerator does for bf16, here for fp16 too, which accelerate refuses on a CPU."""
    return contextlib.nullcontext() if dtype == "fp32" else torch.autocast(device.type, DTYPES[dtype])


@torch.no_grad()
def sampler_logprobs(policy: Any, batch: dict[str, Tensor], copies: int, length: int) -> Tensor:
    """Log-probabilities (B, R) of the responses, as the sampling loop saw them token by token."""
    responses = batch["responses"].view(-1, length)
    ids, mask = rloo_rlhf.left_pad([context for context, *_ in batch["trees"]], responses.device)
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


def tiny_queries(count: int) -> list[list[int]]:
    """Queries of the embedded default, as the scripts cut them."""
    args = rloo_rlhf.Args()
    tokenizer = rloo_rlhf.load(AutoTokenizer, args.base_model, "--base_model", args)
    return rloo_rlhf.load_queries(tokenizer, args, 1, count)[1]


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


def through_update(algorithm: str, lm: Any, batch: dict[str, Tensor], dtype: str, micro: int) -> dict[str, float]:
    """The scripts' own update after a rollout with the same rows: its first ratio error and clipped share, at lr 0."""
    script, copies, rows = (ppo_rlhf if algorithm == "ppo" else rloo_rlhf), COPIES[algorithm], len(batch["trees"])
    size = micro // copies
    accelerator = common.new_accelerator(dtype, steps=-(-rows // size))
    policy = (ppo_rlhf.ActorCritic if algorithm == "ppo" else rloo_rlhf.Actor)(lm).to(batch["responses"].device)
    policy, optimizer = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    actor, batch = accelerator.unwrap_model(policy), dict(batch)
    batch["logprobs"] = torch.empty(batch["responses"].shape, device=batch["responses"].device)
    batch["values"] = torch.zeros_like(batch["logprobs"])
    with torch.no_grad(), accelerator.autocast():
        for part in rloo_rlhf.micro_batches(torch.arange(rows), batch["lengths"], size):
            batch["logprobs"][part] = script.forward_response(actor, batch, part, TEMPERATURE)[0]
    noise = torch.randn(batch["logprobs"].shape, generator=torch.Generator().manual_seed(0))
    noise = noise.to(batch["responses"].device)
    batch |= {"rewards": noise, "advantages": noise.sum(-1)}
    args = SimpleNamespace(
        temperature=TEMPERATURE, micro_batch_size=micro, rloo_k=copies, cliprange=CLIPRANGE, cliprange_value=0.2,
        vf_coef=0.1, gamma=1.0, lam=0.95, whiten_rewards=True, token_level=False,
    )  # fmt: skip
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
    contexts = common.random_contexts(lengths, lm.config.vocab_size, 0) if queries is None else queries[:rows]
    policies = {"fp32": rloo_rlhf.Actor(lm), "autocast": AutocastHead(lm)}
    args = SimpleNamespace(temperature=TEMPERATURE, mask_truncated=False, compile=False, truncate_after=0)
    u = rloo_rlhf.uniforms(1, 1, episodes, length, device)
    table, sequence = [], algorithm == "rloo"
    for dtype in options.dtypes:
        with torch.no_grad(), autocast(device, dtype):
            batch = rloo_rlhf.respond(policies["fp32"], contexts, u, None, args)
        shape = (rows, copies, length) if copies > 1 else (rows, length)
        batch |= {name: batch[name].view(shape) for name in ("responses", "kept")}
        everyone, sizes = torch.arange(rows), (micro // copies, max(1, micro // copies // 2))
        parts, other = (rloo_rlhf.micro_batches(everyone, batch["lengths"], size) for size in sizes)
        with torch.no_grad():
            exact = in_parts(policies["fp32"], batch, parts)
        for head, policy in policies.items():
            if dtype == "fp32" and head == "autocast":
                continue  # no autocast: the same as the other
            with autocast(device, dtype):
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
                if row["scripts"] and (dtype != "fp16" or device.type == "cuda"):
                    row |= through_update(algorithm, lm, batch, dtype, micro)
                table.append(row)
    return table


def make_table(rows: list[dict[str, Any]]) -> Table:
    """A line per model, algorithm, length, type and head: largest |ratio - 1| and clipped share for every source."""
    names, lines = ("model", "algorithm", "length", "dtype", "head"), {}
    for row in rows:
        cell = f"{row['ratio_max_error']:.1e}  {row['clipped']:.0%}"
        lines.setdefault(tuple(str(row[name]) for name in names), [f"{row['error']:.0e}"]).append(cell)
    table = Table(
        "model", "algorithm", "R", "dtype", "head", "error", *SOURCES, title="largest |ratio - 1|, clipped share"
    )
    for words, cells in lines.items():
        table.add_row(*words, *cells, style="bold" if words[-1] == "fp32" else None)
    return table


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
    device, rows = torch.device("cuda" if torch.cuda.is_available() else "cpu"), []
    ppo_rlhf.fast_math(device)
    loading = SimpleNamespace(trust_remote_code=False, dtype="fp32")
    for model in options.models:
        with common.model_folder(model) as folder:
            lm = ppo_rlhf.load(AutoModelForCausalLM, folder, "--models", loading).to(device)
        queries = tiny_queries(options.episodes) if model == "tiny" else None
        for algorithm in options.algorithms:
            for length in options.lengths:
                rows += measure(model, lm, algorithm, length, queries, options)
    path = common.write("bf16_ratio", options.tag, options, rows)
    Console(width=120).print(make_table(rows), path.name, sep="\n")
    limits = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # of self_check in the scripts
    bad = [row for row in rows if row["scripts"] and (row["clipped"] or row["ratio_max_error"] > limits[row["dtype"]])]
    bad += [row for row in rows if row.get("update_clipfrac") or row.get("update_first_ratio_error", 0) > 2e-2]
    if bad:
        raise SystemExit(f"the first ratio of the scripts is not 1: {json.dumps(bad)}")


if __name__ == "__main__":
    main()
