"""PPO from human preferences for language models, in one file (its optimizer is in tf_adam.py).

A policy continues queries, and a reward model (train_reward.py) scores the continuations. The
policy moves towards higher scores, while a penalty on the KL divergence keeps it near the
reference, which is the model that it started from. "The original" is OpenAI's lm-human-preferences
(Ziegler et al. 2019, arXiv:1909.08593). The tests replay recordings of it and of TRL's trainers.

    python train_reward.py                                      # first: a reward model
    python ppo_rlhf.py                                          # tiny model and data
    accelerate launch --num_processes 8 ppo_rlhf.py sentiment   # eight GPUs share --batch_size

A run needs a reward model, which train_reward.py makes, or a --reward_fn. This file leaves out
generation engines, several reward models, and what only one published system does (patches for
that are in benchmark/systems/). Read main first: its numbered steps call the functions below it.

A function (except main) that appears in more than one of ppo_rlhf.py, rloo_rlhf.py and
train_reward.py is identical in all of them: what seems out of place here is needed there.

Shapes: B responses in a process's share of a batch, b in a minibatch or micro-batch, R tokens per
response, T tokens of query and response together, V tokens in the vocabulary, d hidden units. A
mask beside ids is an attention mask (B, T); that of a Batch says which tokens count (B, R).
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.8,<2.14", "transformers>=5.17,<5.24", "datasets>=4", "accelerate>=1.10",
#     "tyro>=0.9.10", "wandb>=0.21", "numpy>=2", "huggingface-hub>=1", "safetensors>=0.8",
#     "pandas>=2", "pydantic>=2.6", "filelock>=3.12", "tqdm>=4.66",
# ]
# ///

import contextlib
import copy
import ctypes
import functools
import glob
import inspect
import itertools
import json
import math
import os
import pkgutil
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import accelerate
import datasets
import numpy as np
import pandas as pd
import pydantic
import torch
import transformers
import tyro
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, reduce, set_seed
from filelock import FileLock
from huggingface_hub import hf_hub_download
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, conint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    Conv1D,
    DynamicCache,
)
from transformers import AutoModelForSequenceClassification as AutoClassifier
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.masking_utils import sdpa_mask

from tf_adam import clip_gradients, make_optimizer, set_learning_rates

FILE = Path(__file__).resolve()
TokenRows = list[list[int]]
logger = get_logger(__name__)  # prints on the first process only


class UserError(ValueError):
    """An error that the user can fix. The script prints its text, like that of an OSError, as one
    line, and ends. With RLHF_DEBUG=1 in the environment it shows the traceback."""


@dataclass
class Args:
    """Settings of a run. A preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    # The comment at a field is its help text. A blank line keeps a heading out of it.
    __pydantic_config__ = pydantic.ConfigDict(allow_inf_nan=False, extra="forbid")

    # the run
    seed: conint(ge=0, lt=4_000_000_000) = 1  # Fixes data order, sampling and new weights
    output_dir: str | None = None  # Folder of the run (None: runs/<script>-<preset>-<seed>-<time>)
    # Continue the run in --output_dir, which has to be given; if there is none, start it
    resume: bool = False
    checkpoint_every: NonNegativeInt = 25  # Updates between checkpoints (0: only at the end)
    eval_every: NonNegativeInt = 0  # Updates between evaluations during the training (0: none)
    eval_queries: PositiveInt = 64  # Held-out queries, sampled before, after and at --eval_every
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "rlhf"  # Name of the W&B project

    # models
    base_model: str = "tiny/model"  # Policy and reference start from it: a folder or hub id
    # Classifier with one label: a folder or hub id (None: the preset's newest in runs/)
    reward_model: str | None = None
    # Instead of a reward model: `module:function` (queries, responses, ...), see score_by_function
    reward_fn: str | None = None
    # tf32: GPUs multiply matrices in TF32. bf16: autocast, and frozen linear layers held in bf16
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    # Recompute activations in the backward pass: less memory, a third more time
    gradient_checkpointing: bool = False
    # Train LoRA adapters of this rank in place of the policy's weights (0: train all weights)
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveFloat = 16.0  # LoRA adapters are scaled by this / --lora_rank

    # the task

    # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config] on the hub. Read is
    # the first column of: query, prompt, messages, text, article, content
    query_dataset: str = "tiny/queries"
    query_length: PositiveInt = 32  # Longest query, in tokens
    # What happens to longer queries (None: keep_start if there is an --end_text, else drop)
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None
    query_prefix: str | None = None  # Text before every query, not for the reward model
    query_suffix: str | None = None  # Text after every query, not for the reward model
    # One token: a query begins after its first occurrence; texts without it are dropped (None: off)
    start_text: str | None = "."
    end_text: str | None = "."  # One token: a query is cut back to its last occurrence (None: off)
    response_length: PositiveInt = 24  # Tokens sampled per response
    temperature: PositiveFloat = 0.7  # Divides logits: for sampling, log-probabilities, entropies
    # The token that ends a response (`eos`: the tokenizer's; None: every response is complete)
    truncate_token: str | None = "."
    truncate_after: NonNegativeInt = 16  # The token ends a response only at this index or later
    penalty_reward_value: float = -1.0  # For a response without a truncate token
    # --penalty_reward_value replaces the score (original) or is added to it
    penalty_mode: Literal["replace", "add"] = "replace"
    # Tokens after the truncate token are left out of KL and loss (original: they count)
    mask_truncated: bool = False

    # updates and optimizer
    total_episodes: PositiveInt = 12_800  # Responses sampled in the run, in whole batches
    batch_size: PositiveInt = 128  # Episodes per update, over all devices
    micro_batch_size: PositiveInt = 128  # Rows per forward pass on one device; gradients accumulate
    sample_batch_size: PositiveInt | None = None  # Rows sampled at a time on one device (None: all)
    num_minibatches: PositiveInt = 1  # Optimizer steps per epoch
    num_epochs: PositiveInt = 4  # Passes over the batch in each update
    lr: NonNegativeFloat = 2e-4  # Learning rate, see the schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # --lr decays to 0, or stays
    # Number n of warm-up updates: update i (from 0) uses lr * (i + 1) / (n + 1)
    lr_warmup: NonNegativeInt = 0
    # Adam as TensorFlow has it (original), or torch.optim.AdamW
    adam: Literal["tf", "torch"] = "tf"
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    adam_betas: tuple[float, float] = (0.9, 0.999)  # Decay rates of Adam's two averages
    weight_decay: NonNegativeFloat = 0.0  # Decoupled, as in AdamW; for matrices only
    max_grad_norm: PositiveFloat | None = None  # Gradients of a larger norm are scaled down to it

    # rewards

    kl_coef: NonNegativeFloat = 0.15  # Coefficient of the KL penalty at the start
    # KL (k1, in nats per response) that the coefficient is adapted to reach (None: fixed)
    adaptive_kl_target: PositiveFloat | None = 6.0
    # The coefficient changes by about 20 % at most in this many episodes
    kl_horizon: PositiveFloat = 2_000.0
    # The run stops when the KL (nats per response) leaves the range of +- this, or, in the first
    # update, is not 0
    max_kl: PositiveFloat = 200.0

    # the algorithm
    cliprange: NonNegativeFloat = 0.2  # The probability ratio is clipped to 1 +- this
    cliprange_value: NonNegativeFloat = 0.2  # The predicted value is clipped to the old one +- this
    vf_coef: NonNegativeFloat = 0.1  # Weight of the value loss
    gamma: NonNegativeFloat = 1.0  # Discount per token
    lam: NonNegativeFloat = 0.95  # Lambda of generalised advantage estimation
    whiten_rewards: bool = True  # Scale rewards to variance 1, but keep their mean
    whiten_advantages: bool = True  # Shift and scale advantages to mean 0, variance 1
    # The value head reads the policy (shared), or a model that starts as it or as --reward_model
    critic: Literal["shared", "policy", "reward"] = "shared"
    critic_lr: NonNegativeFloat | None = None  # Learning rate of value head and critic (None: --lr)
    critic_warmup: NonNegativeInt = 0  # First updates in which only value head and critic learn


# Settings of OpenAI's launch.py, or of the scripts it starts. Queries in the label files are cut
# already: no start_text, no end_text.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
OPENAI = Args(base_model="gpt2", start_text=None, end_text=None, total_episodes=1_000_000)
BOOKS = replace(
    OPENAI, query_length=64, batch_size=512, micro_batch_size=64, lr=1e-5, kl_horizon=10_000
)
POSTS = replace(
    OPENAI,
    query_length=500,
    long_queries="keep_start",
    query_suffix="\n\nTL;DR:",
    response_length=75,
    truncate_token="\n",
    truncate_after=55,
    batch_size=32,
    micro_batch_size=4,
    lr=2e-6,
    kl_coef=0.03,
    adaptive_kl_target=None,
    whiten_rewards=False,
)
NEWS = replace(POSTS, query_prefix="Article:\n\n", temperature=0.5, kl_coef=0.01)
PRESETS = {
    "tiny": Args(),
    "sentiment": replace(BOOKS, query_dataset=f"{FILES}/sentiment/offline_5k.json"),
    "descriptiveness": replace(BOOKS, query_dataset=f"{FILES}/descriptiveness/offline_5k.json"),
    "cnndm": replace(NEWS, query_dataset=f"{FILES}/cnndm/offline_60k.json"),
    "tldr": replace(POSTS, query_dataset=f"{FILES}/tldr/offline_60k.json"),
}


@dataclass
class Query:
    """A query of the table."""

    input_ids: list[int]  # as the reward model reads it
    context: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for PPO's and RLOO's --reward_fn


@dataclass
class Batch:
    """B responses of R tokens, and what follows from them."""

    contexts: TokenRows  # B lists of the tokens before each response
    responses: Tensor  # (B, R), as sampled
    lengths: Tensor  # (B,), of the responses up to their truncate token
    found_end: Tensor  # (B,), whether there is a truncate token, at --truncate_after or later
    mask: Tensor  # (B, R), the tokens that count: all, or with --mask_truncated the first `lengths`
    sampled_logprobs: Tensor  # (B, R), from sampling, token by token with a cache: for check_update
    logprobs: Tensor  # (B, R), of the same policy, from a pass over whole responses: the old ones
    ref_logprobs: Tensor  # (B, R), of the reference
    values: Tensor  # (B, R), predicted before each token; 0 in RLOO
    rewards: Tensor | None = None  # (B, R); not in RLOO
    advantages: Tensor | None = None  # (B, R); in RLOO (B,)
    returns: Tensor | None = None  # (B, R); not in RLOO


def main(preset: str, args: Args) -> None:
    """Set-up; a loop of rollout, score, reward, update, log; at the end evaluate and save."""
    cpu = not torch.accelerator.is_available() or torch.backends.mps.is_available()  # MPS: no fp64
    accelerator = Accelerator(cpu=cpu, log_with="wandb", mixed_precision="no", dynamo_backend="no")
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says, as for the other two
    rank = accelerator.process_index
    check_settings(args, accelerator.num_processes * args.num_minibatches)
    choose_folder(preset, args)  # sets args.output_dir
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    share = args.batch_size // accelerator.num_processes  # responses of this process in an update
    my_rows = slice(rank * share, (rank + 1) * share)

    # data and models; most of what cannot run fails here, before anything is written
    set_seed(args.seed)
    tokenizer = load_tokenizer("base_model", args)
    truncate_id = token_id("truncate_token", tokenizer, args)
    num_queries = args.eval_queries + num_updates * args.batch_size
    queries = load_queries("query_dataset", args, tokenizer, num_queries)
    held_out = queries[: args.eval_queries]
    queries = queries[args.eval_queries :]
    if not queries:
        raise UserError(f"--eval_queries {args.eval_queries}: none is left to train on")
    longest = max(len(query.context) for query in held_out + queries) + args.response_length
    score = load_reward(args, preset, tokenizer, longest)
    lm, ref_lm = load_policy_and_reference(args, tokenizer, longest)
    critic = load_critic(args, tokenizer, longest)  # after load_reward: it may set --reward_model
    set_up_backend(args.dtype)  # after the models, which are checked in full fp32
    policy = ActorCritic(lm, args.dtype, critic)
    ref = ActorCritic(ref_lm, args.dtype).to(accelerator.device)  # its values are not used
    optimizer = make_optimizer([policy.lm], [policy.value_head, policy.critic], args)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    unwrapped = accelerator.unwrap_model(policy)  # the same module, without DDP around it

    def assess(model: Module) -> pd.DataFrame:
        return evaluate(model, ref, held_out, score, tokenizer, truncate_id, args)

    before = assess(ref)  # the reference is the untrained policy, also when a run is resumed

    with Run(accelerator, preset, args, kl_coef=args.kl_coef) as run:
        # A resumed run draws the shuffles of the finished updates once more, and discards them.
        shuffles = itertools.islice(draw_epochs(args, rank, share), run.state["update"], None)
        for update in run.updates(num_updates):
            kl_coef = run.state["kl_coef"]

            # 1. rollout: responses to the queries; their log-probabilities, by policy and reference
            episodes = range(update * args.batch_size, (update + 1) * args.batch_size)[my_rows]
            my_queries = [queries[i % len(queries)] for i in episodes]
            u = uniforms(args.seed, update + 1, args.batch_size, args.response_length)[my_rows]
            # The rollout uses the first epoch's micro-batches, so in the first optimizer step
            # padding and rounding match: every ratio is 1, on a CPU exactly.
            epochs = next(shuffles)  # row numbers (num_epochs, num_minibatches, b)
            batch, truncated = rollout(unwrapped, ref, my_queries, u, epochs[0], truncate_id, args)

            # 2. score: that of the truncated response, or a penalty where it never ends
            raw_scores = score(my_queries, truncated)  # (B,)
            scores = penalize_missing_end(raw_scores, batch.found_end, args)  # (B,)

            # 3. reward: the score minus a KL penalty
            kl = (batch.logprobs - batch.ref_logprobs) * batch.mask  # (B, R), the estimator k1
            batch.rewards = at_last_token(scores, batch.mask) - kl_coef * kl

            # 4. update: learning rates (tf_adam.py has the schedule), and the optimizer steps
            set_learning_rates(optimizer, update, update / num_updates, args)
            records = ppo_update(accelerator, policy, optimizer, batch, epochs, args)

            # 5. log; each entry has a number for every response, which reduce_means averages
            per_response = {
                "objective/scores": scores,
                "objective/score_total": batch.rewards.sum(1),
                "objective/found_end": batch.found_end,
                "objective/length": batch.lengths,
                "objective/kl": kl.sum(1),
                "objective/entropy": -(batch.logprobs * batch.mask).sum(1),  # of sampled tokens
                "objective/non_score_reward": -kl_coef * kl.sum(1),
            }
            records.append(sums_over(torch.ones_like(scores), per_response))
            metrics = reduce_means(records)
            metrics["objective/kl_coef"] = kl_coef
            metrics["ppo/episode"] = (update + 1) * args.batch_size
            metrics["ppo/lr"] = optimizer.param_groups[0]["lr"]
            unexplained = metrics["ppo/val/error"] / (metrics["ppo/returns/var"] + 1e-8)
            metrics["ppo/val/var_explained"] = 1 - unexplained
            if args.eval_every and (update + 1) % args.eval_every == 0:
                samples = assess(unwrapped)
                run.log_samples(f"samples/{update + 1:07d}", samples)
                metrics |= samples.mean(numeric_only=True).add_prefix("eval/").to_dict()
            tokens = args.batch_size * args.response_length
            run.log(metrics, episodes=args.batch_size, tokens=tokens)
            check_update(update, metrics, args)

            # 6. adapt the KL coefficient; leave a checkpoint
            run.state["kl_coef"] = adapt_kl_coef(kl_coef, metrics["objective/kl"], args)
            run.end_update()

        # 7. evaluate and save; get_state_dict may gather weights, so every process calls it
        samples = before.join(assess(unwrapped).drop(columns="query").add_suffix("_after"))
        weights = accelerator.get_state_dict(policy)
        if rank == 0:
            save_policy(unwrapped, weights, tokenizer, args.output_dir)
        run.log_samples("samples", samples)  # written last: it marks a finished run
    if rank == 0:
        show_samples(samples, args.output_dir)
    policy, optimizer = accelerator.free_memory(policy, optimizer)  # without this gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def penalize_missing_end(scores: Tensor, found_end: Tensor, args: Args) -> Tensor:
    """Scores (B,). Where there is no truncate token, --penalty_reward_value replaces the score or
    is added to it (--penalty_mode)."""
    kept = scores if args.penalty_mode == "add" else 0.0
    return torch.where(found_end, scores, kept + args.penalty_reward_value)


def at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """(B, R): the score (B,) at the last token of mask, else 0. Without --mask_truncated that is
    the last sampled token, even if the truncate token is far before it."""
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return scores.unsqueeze(1) * is_last


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance over mask, two scalars."""
    count = mask.sum()
    mean = (x * mask).sum() / count
    return mean, ((x - mean) ** 2 * mask).sum() / count


def whiten(x: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), plus the mean unless shift_mean; 0 outside mask."""
    mean, variance = moments(x, mask)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages A (Schulman et al. 2016, arXiv:1506.02438) and returns A + V, (b, R)
    each: A_t = delta_t + gamma lam A_t+1, delta_t = r_t + gamma V_t+1 - V_t. The value after the
    last token is 0. Outside mask all is 0."""
    values = values * mask
    rewards = rewards * mask
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, advantages + values


def set_advantages(batch: Batch, args: Args) -> None:
    """Sets the batch's advantages and returns, from its rewards and values."""
    rewards = batch.rewards
    if args.whiten_rewards:
        rewards = whiten(rewards, batch.mask, shift_mean=False)
    batch.advantages, batch.returns = gae(batch.values, rewards, batch.mask, args.gamma, args.lam)
    if args.whiten_advantages:
        batch.advantages = whiten(batch.advantages, batch.mask, shift_mean=True)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    values: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    args: Args,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Clipped losses of policy and value head at each token, and metrics; all are (b, R). Schulman
    et al. 2017, arXiv:1707.06347, equation 7; for values lm_human_preferences/train_policy.py."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-40, 40).exp()  # clamped, so that it does not overflow
    policy_loss = -advantages * ratio
    policy_loss_clipped = -advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    policy_loss_max = torch.maximum(policy_loss, policy_loss_clipped)

    low, high = old_values - args.cliprange_value, old_values + args.cliprange_value
    value_loss = (values - returns) ** 2
    value_loss_clipped = (values.clamp(low, high) - returns) ** 2
    value_loss_max = 0.5 * torch.maximum(value_loss, value_loss_clipped)
    metrics = {
        "ppo/loss/policy": policy_loss_max,
        "ppo/policy/approxkl": 0.5 * log_ratio**2,
        "ppo/policy/clipfrac": policy_loss_clipped > policy_loss,
        "ppo/val/ratio": ratio,
        "ppo/loss/value": value_loss_max,
        "ppo/val/vpred": values,
        "ppo/val/error": value_loss,
        "ppo/val/clipfrac": value_loss_clipped > value_loss,
    }
    return policy_loss_max, value_loss_max, metrics


def ppo_update(
    accelerator: Accelerator,
    policy: Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    epochs: Tensor,
    args: Args,
) -> list[dict]:
    """Makes all optimizer steps on one batch, and returns what is logged of them. epochs
    (num_epochs, num_minibatches, b) says which rows are in which minibatch."""
    records = []
    one = torch.ones((), device=batch.mask.device)  # the mask of a metric that is one number
    policy.train(args.gradient_checkpointing)  # it needs train mode; nothing has dropout
    for step, minibatch in enumerate(epochs.flatten(0, 1)):
        mini = select(batch, minibatch)
        set_advantages(mini, args)  # whitened over this process's minibatch, so new in each
        for name, x in (("returns", mini.returns), ("val", mini.values)):
            mean, variance = moments(x, mini.mask)
            terms = {f"ppo/{name}/mean": mean, f"ppo/{name}/var": variance}
            records.append(sums_over(one, terms))

        # The loss is the mean over the minibatch's tokens on all processes: each micro-batch adds
        # its sum, divided by the count of all. num_processes undoes the average of gradients.
        per_token = accelerator.num_processes / sum_over_ranks(mini.mask)
        groups = micro_batches(torch.arange(len(minibatch)), mini.contexts, args.micro_batch_size)
        for rows in groups:
            micro = select(mini, rows)
            sync = contextlib.nullcontext() if rows is groups[-1] else accelerator.no_sync(policy)
            with sync:  # processes average gradients at the last micro-batch only
                all_logprobs, values = forward_response(policy, micro, args.temperature)
                logprobs = selected_logprobs(all_logprobs, micro.responses)
                policy_loss, value_loss, metrics = ppo_loss(
                    logprobs,
                    micro.logprobs,
                    values,
                    micro.values,
                    micro.advantages,
                    micro.returns,
                    args,
                )
                loss = policy_loss + args.vf_coef * value_loss  # a loss of your own: add it here
                accelerator.backward((loss * micro.mask).sum() * per_token)
            # All metrics are from before the step, so at step 0 every ratio is 1.
            metrics["ppo/loss/total"] = loss
            metrics["ppo/policy/entropy"] = entropy(all_logprobs.detach())
            records.append(sums_over(micro.mask, metrics))
            if step == 0:
                ratio_error = ((logprobs - micro.logprobs) * micro.mask).abs().max()
                sampling_error = ((logprobs - micro.sampled_logprobs) * micro.mask).abs().max()
                errors = {"first_ratio_error": ratio_error, "sampling_error": sampling_error}
                records.append(sums_over(one, errors))
        norm = clip_gradients(policy, args.max_grad_norm)
        records.append(sums_over(one, {"ppo/policy/gradient_norm": norm}))
        optimizer.step()
        optimizer.zero_grad()
    policy.eval()
    return records


def adapt_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """Raises the coefficient where the KL is above --adaptive_kl_target, and lowers it where it is
    below: times 1 + c e, with the relative error e clipped to +-0.2 and c = batch_size / kl_horizon
    (Ziegler et al. 2019, section 2.2, where c is called K_beta and is 0.1). It never gets negative,
    as it would without the maximum if c were above 5."""
    if args.adaptive_kl_target is None:
        return kl_coef
    error = min(max(kl / args.adaptive_kl_target - 1, -0.2), 0.2)
    return kl_coef * max(1 + error * args.batch_size / args.kl_horizon, 0)


# --- metrics and checks ---------------------------------------------------------------------------
def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of all elements of x on all processes."""
    return reduce(x.sum(), "sum")


def sums_over(mask: Tensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """A record: for each term a tensor (2,), its sum over mask and the count of mask. reduce_means
    adds up all records, and divides. So with a mask (b, R) a metric is a mean over tokens, and with
    a mask of one element over calls and processes. In fp64, so that adding many loses little."""
    count = mask.sum()
    return {
        name: torch.stack([(term.detach() * mask).sum(), count]).double()
        for name, term in terms.items()
    }


def reduce_means(records: list[dict]) -> dict:
    """Sum / count of every metric over all records and processes, in one collective. All processes
    need the same metrics, in the same order."""
    totals = Counter()
    for record in records:
        totals.update(record)  # a Counter adds what has the same name, here tensors
    reduced = reduce(torch.stack(list(totals.values())), "sum").tolist()
    return {name: x / count for name, (x, count) in zip(totals, reduced, strict=True)}


# How much of a difference in log-probabilities rounding explains: between the rollout's pass and
# the same pass in the update (first_ratio_error); and between that and sampling, token by token
# through a cache (sampling_error). Each is the largest one in a micro-batch, averaged over
# micro-batches and processes.
TOLERANCES = {"fp32": (1e-3, 0.01), "tf32": (0.01, 0.2), "bf16": (0.02, 1.0)}


def check_update(update: int, metrics: dict, args: Args) -> None:
    """UserError if one of these numbers is beyond its limit or NaN. docs/metrics.md has causes."""
    ratio_tolerance, sampling_tolerance = TOLERANCES[args.dtype]
    limits = {
        "ppo/policy/gradient_norm": sys.float_info.max,  # finite
        "first_ratio_error": ratio_tolerance,  # the first ratios are 1
        "sampling_error": sampling_tolerance,  # tokens come from the distribution the loss sees
        # in the first update the policy is the reference
        "objective/kl": args.max_kl if update > 0 else ratio_tolerance,
    }
    for name, limit in limits.items():
        # `not` makes NaN raise, too
        if not abs(metrics[name]) <= limit:
            raise UserError(
                f"{name} is {metrics[name]:.3g}, its limit {limit:.3g}: --lr may be too high, a "
                "reward may not be finite, or passes differ (KL: --max_kl): see docs/metrics.md"
            )


# --- rollout and scoring --------------------------------------------------------------------------
def draw_epochs(args: Args, rank: int, size: int) -> Iterator[Tensor]:
    """Yields for each update the row numbers of its minibatches (RLOO: query numbers), a tensor
    (num_epochs, num_minibatches, b). Each epoch is a permutation of range(size)."""
    generator = np.random.RandomState(args.seed + 100_003 * rank)
    while True:
        shuffles = [generator.permutation(size) for _ in range(args.num_epochs)]
        yield torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)


def uniforms(seed: int, draw: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, different ones for each `draw`: 0 for
    evaluations, 1, 2, ... for updates (train_reward.py: 0 before the training, 1 after). Processes
    take their rows of one array, so these numbers do not depend on how many processes there are."""
    # 1 names this stream of random numbers; load_queries has 2, and read_labels 3.
    generator = np.random.default_rng([seed, 1, draw])
    return torch.tensor(
        generator.random((batch, length), dtype=np.float32), device=PartialState().device
    )


@torch.no_grad()
def rollout(
    policy: Module,
    ref: Module,
    queries: list[Query],
    u: Tensor,
    minibatches: Tensor,
    truncate_id: int | None,
    args: Args,
) -> tuple[Batch, TokenRows]:
    """Responses to the queries, from uniforms u (B, R), with log-probabilities and values; and the
    responses as lists that end with their truncate token. Rows go through the models in the
    micro-batches of minibatches (num_minibatches, b)."""
    contexts = [query.context for query in queries]
    size = args.sample_batch_size or len(contexts)
    responses = torch.zeros_like(u, dtype=torch.long)
    sampled_logprobs = torch.zeros_like(u)
    # autocast discards its bf16 copies of trained weights when the outermost autocast block ends.
    # This disabled block is the outermost one, so weights are cast once and not at every token.
    with torch.autocast(u.device.type, enabled=False):
        for start in range(0, len(contexts), size):
            rows = slice(start, start + size)
            responses[rows], sampled_logprobs[rows] = sample(
                policy, contexts[rows], u[rows], args.temperature
            )

    until_end, found_end = truncate(responses, truncate_id, args.truncate_after)
    batch = Batch(
        contexts=contexts,
        responses=responses,
        lengths=until_end.sum(1),
        found_end=found_end,
        mask=until_end if args.mask_truncated else torch.ones_like(until_end),
        sampled_logprobs=sampled_logprobs,
        logprobs=torch.zeros_like(u),
        ref_logprobs=torch.zeros_like(u),
        values=torch.zeros_like(u),
    )
    for minibatch in minibatches:
        for rows in micro_batches(minibatch, contexts, args.micro_batch_size):
            micro = select(batch, rows)
            index = rows.to(u.device)
            all_logprobs, batch.values[index] = forward_response(policy, micro, args.temperature)
            batch.logprobs[index] = selected_logprobs(all_logprobs, micro.responses)
            del all_logprobs  # makes room for the reference's
            all_logprobs, _ = forward_response(ref, micro, args.temperature)
            batch.ref_logprobs[index] = selected_logprobs(all_logprobs, micro.responses)
    truncated = torch.where(until_end, responses, -1).tolist()  # waits for the GPU
    return batch, [[token for token in row if token >= 0] for row in truncated]


@torch.no_grad()
def sample(
    policy: Module, contexts: TokenRows, u: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Responses (B, R) ~ softmax(logits / temperature) to B contexts, from uniforms u (B, R), and
    the log-probabilities of their tokens. All have R tokens; truncate finds their ends later."""
    cache = DynamicCache(config=policy.lm.config)
    ids, mask = pad_rows(contexts)
    responses, logprobs = [], []
    for column in u.split(1, 1):  # (B, 1), one for each token
        logits, _ = policy(ids, mask, cache=cache)
        logits = logits[:, -1] / temperature
        # From now on the model reads only the newest token: the cache has all before it.
        ids = inverse_cdf(logits.softmax(-1), column)
        mask = pad(mask, (0, 1), value=True)
        responses.append(ids)
        logprobs.append(logits.log_softmax(-1).gather(1, ids))
    return torch.cat(responses, 1), torch.cat(logprobs, 1)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (B, 1): where the cumulative distribution of probs (B, V) passes u (B, 1). In fp32 the
    sum over a large vocabulary would round the steps of rare tokens away. With NaN there is no such
    place: clamp gives some token, and check_update stops the run."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp(max=probs.shape[1] - 1)


def truncate(responses: Tensor, token: int | None, after: int) -> tuple[Tensor, Tensor]:
    """A mask (B, R) of the tokens up to and including the first `token` at index `after` or later,
    or of all if there is none; and whether there is one, (B,). With token None all is True."""
    if token is None:
        everything = torch.ones_like(responses, dtype=torch.bool)
        return everything, everything.all(1)
    is_end = responses == token
    is_end[:, :after] = False
    ends_before = is_end.cumsum(1) - is_end.long()
    return ends_before == 0, is_end.any(1)


def select(batch: Batch, rows: Tensor) -> Batch:
    """A batch of these rows (numbers, on the CPU), in this order."""
    index = rows.to(batch.mask.device)
    chosen = {name: x[index] for name, x in vars(batch).items() if isinstance(x, Tensor)}
    return replace(batch, contexts=[batch.contexts[i] for i in rows], **chosen)


@torch.no_grad()
def score_by_model(model: Model, args: Args, queries: list[Query], responses: TokenRows) -> Tensor:
    """Scores (B,) of a classifier with one label: see scalar_head."""
    head = scalar_head(model)  # the classifier's own, with train_reward.py's gain and bias
    texts = [query.input_ids + row for query, row in zip(queries, responses, strict=True)]
    scores = []
    for i in range(0, len(texts), args.micro_batch_size):
        ids, mask = pad_rows(texts[i : i + args.micro_batch_size])
        scores.append(head(hidden_states(model, ids, mask, 1, args.dtype)).flatten())
    return torch.cat(scores)


def score_by_function(
    function: Callable, tokenizer: Tokenizer, queries: list[Query], responses: TokenRows
) -> Tensor:
    """Scores (B,) of a --reward_fn, function(queries, responses, ..), which gets two lists of texts
    and returns exactly one float per response. Further parameters get the columns of these names in
    the queries' table; a parameter **kwargs (it must have this name) gets them all."""
    prompts = [query.input_ids for query in queries]
    texts = [tokenizer.batch_decode(x, skip_special_tokens=True) for x in (prompts, responses)]
    parameters = list(inspect.signature(function).parameters)[2:]
    columns = {}
    for name in queries[0].columns:
        if name in parameters or "kwargs" in parameters:
            columns[name] = [query.columns[name] for query in queries]
    rewards = function(*texts, **columns)
    scores = [float(x) for x, _ in zip(rewards, responses, strict=True)]
    return torch.tensor(scores, device=PartialState().device)


def evaluate(
    policy: Module,
    ref: Module,
    queries: list[Query],
    score: Callable,
    tokenizer: Tokenizer,
    truncate_id: int | None,
    args: Args,
) -> pd.DataFrame:
    """A row for each of the queries, sampled from the same uniforms in all calls and on all
    processes. Scores have their penalty, as in training."""
    u = uniforms(args.seed, 0, len(queries), args.response_length)
    minibatches = torch.arange(len(queries)).view(1, -1)
    batch, responses = rollout(policy, ref, queries, u, minibatches, truncate_id, args)
    scores = score(queries, responses)
    kls = (batch.logprobs - batch.ref_logprobs) * batch.mask
    return pd.DataFrame(
        {
            "query": tokenizer.batch_decode([query.input_ids for query in queries]),
            "response": tokenizer.batch_decode(responses),
            "score": penalize_missing_end(scores, batch.found_end, args).tolist(),
            "kl": kls.sum(1).tolist(),
            "found_end": batch.found_end.tolist(),
        }
    )


# --- forward passes -------------------------------------------------------------------------------
def forward_response(policy: Module, batch: Batch, temperature: float) -> tuple:
    """Log-probabilities (b, R, V) of all tokens at each step of the batch's responses; and the
    policy's values (b, R), or 0 in RLOO."""
    ids, mask = pad_rows(batch.contexts)
    inputs = batch.responses[:, :-1]  # what follows the last token is not needed
    ids = torch.cat([ids, inputs], 1)
    mask = pad(mask, (0, inputs.shape[1]), value=True)
    logits, values = policy(ids, mask, last=inputs.shape[1] + 1)
    # In place, as V is large: no backward pass needs the logits before.
    return logits.div_(temperature).log_softmax(-1), values


def selected_logprobs(all_logprobs: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities (b, R) of tokens (b, R), among those of all (b, R, V)."""
    return all_logprobs.gather(2, tokens.unsqueeze(2)).squeeze(2)


def entropy(all_logprobs: Tensor) -> Tensor:
    """Entropies (b, R) of the distributions with these log-probabilities (b, R, V)."""
    return -(all_logprobs.exp() * all_logprobs).sum(-1)


class ActorCritic(Module):
    """A policy and a value head, on the policy's trunk or on a critic's. Trunk and heads are called
    one by one: values need the trunk's states, heads compute in fp32 where the trunk computes in
    bf16, and only the last tokens need logits. check_model compares them with lm(..).logits."""

    def __init__(self, lm: Model, dtype: str, critic: Model | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.tie_weights = lm.tie_weights  # accelerate calls it where it loads weights anew
        self.dtype = dtype
        self.critic = None if critic is None else critic.base_model
        self.value_head = scalar_head(critic or lm)  # after its model: see save_policy

    def forward(
        self, ids: Tensor, mask: Tensor, last: int = 1, cache: DynamicCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (b, last, V) and values (b, last), in fp32, at the last tokens of ids (b, T): see
        hidden_states. With a cache, which is for sampling, there are no values."""
        states = hidden_states(self.lm, ids, mask, last, self.dtype, cache)
        logits = lm_logits(self.lm, states)
        if cache is not None:
            return logits, None
        if self.critic is not None:
            states = hidden_states(self.critic, ids, mask, last, self.dtype)
        return logits, self.value_head(states).squeeze(-1)


def hidden_states(
    model: Model,
    ids: Tensor,
    mask: Tensor,
    last: int,
    dtype: str,
    cache: DynamicCache | None = None,
) -> Tensor:
    """States (B, last, d), in fp32, of the `last` newest tokens of ids (B, T). With a cache, ids
    follow the tokens in it, and mask covers both. Positions count real tokens, as the original's
    do. dtype is --dtype: bf16 is for the trunk alone, because it would round a logit of about 100
    by up to 0.25."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding has position 0, but is masked
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        output = model.base_model(
            ids,
            attention_mask=mask,
            position_ids=positions[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=cache is not None,
        )
    return output.last_hidden_state[:, -last:].float()


def lm_logits(lm: Model, states: Tensor) -> Tensor:
    """Logits (..., V) of states (..., d). Some models scale logits, here by scaling the states, as
    their heads have no bias; or cap them."""
    config = lm.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    factor /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    # The product is a contiguous copy of states. If they are not contiguous and the head is frozen,
    # torch copies the head's weights for each row of states, and takes 2 to 50 times as long.
    logits = lm.get_output_embeddings()(states * factor)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    if cap:
        logits = cap * (logits / cap).tanh()
    return logits


def scalar_head(model: Model) -> nn.Linear:
    """A linear layer from states (..., d) to (..., 1). Of a classifier it gives the reward, gain *
    logit + bias, with the two numbers that train_reward.py wrote to config.json. Of any other model
    it is a new value head, which starts at 0."""
    # Of any other model only the width d of the weight matters: its gain is 0.
    weight = getattr(model, "score", model.get_output_embeddings()).weight.detach()
    gain = bias = 0.0
    if hasattr(model, "score"):
        gain = getattr(model.config, "reward_gain", 1.0)
        bias = getattr(model.config, "reward_bias", 0.0)
    head = nn.Linear(weight.shape[1], 1, device=model.device)
    head.weight.data.copy_(gain * weight[:1])
    nn.init.constant_(head.bias, bias)
    return head


def pad_rows(rows: TokenRows, side: str = "left") -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on one side, and a mask, which is False at padding."""
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    ids = ids.to(PartialState().device)
    return ids.clamp(min=0), ids >= 0


def micro_batches(rows: Tensor, token_rows: TokenRows, size: int) -> tuple[Tensor, ...]:
    """The row numbers in groups of up to `size` rows of similar length: less padding. The sort is
    stable, so a query's K rows stay together."""
    lengths = torch.tensor([len(token_rows[i]) for i in rows])
    return rows[lengths.argsort(stable=True)].split(size)


# --- models ---------------------------------------------------------------------------------------
def names_flag(load: Callable) -> Callable:
    """Decorator: an error of load(flag, args, ...) becomes a UserError that names the flag, its
    value and the cause. `flag` is what the caller loads it for."""

    def wrapper(flag: str, args: Args, *rest: object, **named: object) -> object:
        try:
            return load(flag, args, *rest, **named)
        except UserError:
            raise
        except Exception as error:
            # The cause of a library's error often says more than the error; some have no text.
            reason = error.__cause__ or str(error) or repr(error)
            raise UserError(f"--{flag} {getattr(args, flag)}: {reason}") from error

    return wrapper


@names_flag
def load_tokenizer(flag: str, args: Args) -> Tokenizer:
    """The tokenizer of the model that the flag names."""
    return AutoTokenizer.from_pretrained(local_path(getattr(args, flag)), trust_remote_code=False)


def load_reward(args: Args, preset: str, tokenizer: Tokenizer, longest: int) -> Callable:
    """A function from (queries, responses) to scores (B,), made of --reward_fn, --reward_model, or
    the newest reward model that train_reward.py made for the preset. Then args gets its name."""
    if args.reward_fn:
        function = load_function("reward_fn", args)
        return functools.partial(score_by_function, function, tokenizer)

    if args.reward_model is None:
        found = Path.cwd().glob(f"runs/train_reward-{preset}-*/reward_model")
        newest = max(found, key=os.path.getmtime, default=None)
        if not newest:
            raise UserError(f"--reward_model None: `python train_reward.py {preset}` makes one")
        args.reward_model = str(newest)  # args.json will name it
    if load_tokenizer("reward_model", args).get_vocab() != tokenizer.get_vocab():
        raise UserError("--reward_model has another tokenizer than --base_model: use a --reward_fn")
    model = load_model("reward_model", args, AutoClassifier, tokenizer, longest)
    hold_in_bf16(model.requires_grad_(False), args)
    return functools.partial(score_by_model, model.to(PartialState().device), args)


@names_flag
def load_function(flag: str, args: Args) -> Callable:
    """The function `module:name` that the flag names, from here or from an installed package."""
    sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(getattr(args, flag))


def load_policy_and_reference(
    args: Args, tokenizer: Tokenizer, longest: int
) -> tuple[Model, Model]:
    """Two models from --base_model: the policy, and the reference, which is frozen. They share the
    weights that are not trained."""
    lm = load_model("base_model", args, AutoModelForCausalLM, tokenizer, longest)
    add_adapters(lm, args)
    shared = {id(p): p for p in lm.parameters() if not p.requires_grad}
    # `shared` is deepcopy's memo. What is in it is not copied, so frozen weights are shared. All
    # else is copied, LoRA adapters too; the reference's stay at their initial values, and add 0.
    ref_lm = copy.deepcopy(lm, shared).requires_grad_(False)
    hold_in_bf16(ref_lm, args)
    return lm, ref_lm


def add_adapters(model: Model, args: Args) -> None:
    """With --lora_rank the weights are frozen, and LoRA adapters (Hu et al. 2021, arXiv:2106.09685)
    on all linear layers but the head are trained."""
    if args.lora_rank:
        from peft import LoraConfig

        model.add_adapter(
            LoraConfig(
                r=args.lora_rank,
                lora_alpha=args.lora_alpha,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
        )
        hold_in_bf16(model, args)


def load_critic(args: Args, tokenizer: Tokenizer, longest: int) -> Model | None:
    """The model whose trunk the value head reads, trained whole; None if it reads the policy's."""
    if args.critic == "policy":
        return load_model("base_model", args, AutoModelForCausalLM, tokenizer, longest)
    if args.critic == "reward":
        return load_model("reward_model", args, AutoClassifier, tokenizer, longest)
    return None


@names_flag
@torch.no_grad()
def load_model(
    flag: str, args: Args, auto_class: type, tokenizer: Tokenizer, longest: int, **config: object
) -> Model:
    """The model that the flag names: on the CPU, in fp32, and in eval mode, so without dropout, as
    the original. `config` replaces values of its config; if there is any, the head may be new."""
    path = local_path(getattr(args, flag))
    if os.path.exists(f"{path}/adapter_config.json"):
        raise ValueError("is an adapter: merge it first (peft's merge_and_unload)")
    model, info = auto_class.from_pretrained(
        path,
        dtype=torch.float32,
        # the faster one of each kind of device
        attn_implementation="eager" if PartialState().device.type == "cpu" else "sdpa",
        use_safetensors=True,
        trust_remote_code=False,  # None would ask
        output_loading_info=True,
        **config,
    )

    # transformers only warns if the files lack weights of the model, or have weights that it has no
    # place for. Such weights of a layer (`h.3.`) are wrong; those of an unused head are not.
    wrong = {key for key in info["unexpected_keys"] if re.search(r"\.\d+\.", key)}
    if not config:  # with config (in train_reward.py) the head may be missing
        wrong |= info["missing_keys"]
    if wrong:
        raise ValueError(f"its config and its weights do not agree on {min(wrong)}")

    change_layers(model, args)
    check_model(model, tokenizer, longest)
    return model


def change_layers(model: Model, args: Args) -> None:
    """What the model's own layers have to do differently, for speed, padding and memory."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # else a pad that is also the eos gets no gradient
        if type(getattr(module, "act", None)).__name__ == "NewGELUActivation":
            module.act = nn.GELU(approximate="tanh")  # the same as one kernel, not eight
    if args.gradient_checkpointing:  # needs train mode, in which dropout would act: it is set to 0
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for part in [*model.modules(), model.config]:  # some layers read it from the config
            for name, value in vars(part).items():
                # the p of a Dropout, or a number like config.attn_pdrop
                if isinstance(value, float) and "drop" in f"{type(part)} {name}":
                    setattr(part, name, 0.0)


def check_model(model: Model, tokenizer: Tokenizer, longest: int) -> None:
    """Raises ValueError for too few embeddings, too short a window, or several labels; and for a
    model whose output for a padded text, read through a cache, is not what transformers gives for
    the text alone. This is a first test, on tokens of no meaning; check_update of PPO and RLOO
    tests the run's own texts."""
    # 1. what it says of itself
    num_embeddings = model.get_input_embeddings().num_embeddings
    top_token = max(tokenizer.get_vocab().values())
    if top_token >= num_embeddings:
        raise ValueError(f"has {num_embeddings} embeddings for token {top_token}")
    window = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if longest > window:
        raise ValueError(f"has a window of {window} for {longest} tokens")
    if hasattr(model, "score") and model.config.num_labels > 1:  # `score`: a classifier's head
        raise ValueError("has several labels: use a --reward_fn")

    # 2. what it computes. Ours: the first token as padding, the others but the last into a cache,
    # and the last one through it. Plain: all but the first token, at once.
    ids = torch.arange(min(longest, 64)).unsqueeze(0) % num_embeddings
    mask = ids.cumsum(1) > 0  # False at the first token alone, which has id 0
    cache = DynamicCache(config=model.config)
    hidden_states(model, ids[:, :-1], mask[:, :-1], 1, "fp32", cache)
    cache.batch_repeat_interleave(1)  # changes nothing, but raises for recurrent models
    ours = hidden_states(model, ids[:, -1:], mask, 1, "fp32", cache)
    plain = model.base_model(ids[:, 1:]).last_hidden_state[:, -1:]
    if not hasattr(model, "score"):
        ours = lm_logits(model, ours)
        plain = model(ids[:, 1:]).logits[:, -1:]
    if not (ours - plain).abs().max() < 1e-3 * plain.std():
        raise ValueError("gives other results with padding and a cache: not supported")


def hold_in_bf16(model: Model, args: Args) -> None:
    """With --dtype bf16 frozen linear layers are held in bf16, in half the memory; autocast would
    round them anyway. Biases, the head, embeddings and norms stay in fp32."""
    if args.dtype != "bf16":
        return
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not module.weight.requires_grad:
            module.weight.data = module.weight.bfloat16()  # not the bias: Falcon adds it in fp32


def local_path(name: str) -> str:
    """The local path of a file or folder, which may be beside this script, or which is downloaded
    for hf://datasets/owner/name/file. Any other name is a hub id, and is returned as it is."""
    if match := re.fullmatch("hf://datasets/([^/]+/[^/]+)/(.+)", name):
        return hf_hub_download(*match.groups(), repo_type="dataset")
    for path in (Path(name).expanduser(), FILE.parent / name):
        if path.exists():
            return str(path.absolute())
    return name


def set_up_backend(dtype: str) -> None:
    """Settings for speed, and no attention of cuDNN. They change results by rounding only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # make glibc keep freed memory: saves 10 % of the time
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: none
    if PartialState().device.type == "cpu":
        # "medium" is faster. But on some CPUs it multiplies in bf16: then it is taken back.
        torch.set_float32_matmul_precision("medium")
        x = torch.randn(256, 256)
        if (x @ x - x.double() @ x.double()).abs().max() > 1e-4:
            torch.set_float32_matmul_precision("highest")
    elif dtype != "fp32":
        torch.set_float32_matmul_precision("high")  # TF32; in bf16 runs for the heads alone
    # Users report NaN and wrong gradients of cuDNN's attention in bf16 with a mask: pytorch#196678.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionMaskInterface.register("sdpa", full_sdpa_mask)


def full_sdpa_mask(**named: object) -> Tensor:
    """transformers' mask for `sdpa` attention. Its own function first checks whether the mask is
    True everywhere and could be left out. That check waits for the GPU at every sampled token."""
    return sdpa_mask(**named | {"allow_is_causal_skip": False})


# --- data -----------------------------------------------------------------------------------------
def load_table(name: str) -> datasets.DatasetDict:
    """The splits of a file, a folder, or owner/name[:config] on the hub."""
    path = Path(local_path(name))
    if path.is_file():  # from its folder: datasets then takes the format from the file's name
        splits = datasets.load_dataset(str(path.parent), data_files=glob.escape(str(path)))
    else:
        where = [str(path)] if path.exists() else name.split(":")
        splits = datasets.load_dataset(*where)
    if "train" not in splits:
        raise ValueError(f"has splits {list(splits)}, but no `train`")
    return splits


@names_flag
def load_queries(flag: str, args: Args, tokenizer: Tokenizer, num_queries: int) -> list[Query]:
    """Up to `num_queries` queries (at least one) of the flag's table, in an order drawn from
    --seed."""
    begin = bos(tokenizer)
    prefix = encode(args.query_prefix, tokenizer)
    suffix = encode(args.query_suffix, tokenizer)
    start = token_id("start_text", tokenizer, args)
    end = token_id("end_text", tokenizer, args)
    long = args.long_queries or ("drop" if end is None else "keep_start")
    table = load_table(getattr(args, flag))["train"]
    table = table.shuffle(generator=np.random.default_rng([args.seed, 2]))
    names = "query prompt messages text article content".split()
    found = [name for name in names if name in table.column_names]
    if not found:
        raise ValueError(f"none of its columns {table.column_names} is one of {names}")
    queries = []
    for row in table:
        tokens = encode(row[found[0]], tokenizer)
        query = cut_query(tokens, args.query_length, start, end, long)
        if query:
            queries.append(Query(begin + query, begin + prefix + query + suffix, row))
            if len(queries) >= num_queries:
                break
    if not queries:
        raise ValueError("no query is left: see --query_length, --start_text and --end_text")
    first = tokenizer.decode(queries[0].context)
    logger.warning(f"--{flag}: {len(queries)} queries of {len(table)} rows, first {first!r}")
    return queries


def cut_query(
    tokens: list[int], length: int, start: int | None, end: int | None, long: str
) -> list[int]:
    """The query in these tokens, or [] if there is none: 1. what comes after the first `start`, or
    all if `start` is the last token; 2. at most `length` of that, cut or dropped as `long` says; 3.
    cut back to the last `end`, which stays. See lm_human_preferences/language/datasets.py."""
    if start is not None:
        if start not in tokens:
            return []
        tokens = tokens[tokens.index(start) + 1 :] or tokens
    if len(tokens) > length:
        if long == "drop":
            return []
        tokens = tokens[:length] if long == "keep_start" else tokens[-length:]
    if end is not None:
        if end not in tokens:
            return []
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)]
    return tokens


def token_id(flag: str, tokenizer: Tokenizer, args: Args) -> int | None:
    """The one token that the flag's text is (`eos`: the tokenizer's end of sequence)."""
    text = getattr(args, flag)
    if text is None:
        return None
    known = tokenizer.get_vocab() | {"eos": tokenizer.eos_token_id}
    # encode alone is not enough: Llama 2's tokenizer puts a space before `.`, another token.
    ids = [known[text]] if text in known else tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or None in ids:
        raise UserError(f"--{flag} {text!r} must be one token, but is tokens {ids}")
    return ids[0]


def bos(tokenizer: Tokenizer) -> list[int]:
    """The token that every text begins with, as Llama's and Gemma's tokenizers have it, or []."""
    first = tokenizer("").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


PADDING = 50259  # pads the rows of token ids in OpenAI's label files; GPT-2 has no such token


def encode(value: object, tokenizer: Tokenizer) -> list[int]:
    """Token ids, without BOS, of a text, a chat (list of messages) or a padded row of token ids; []
    for anything else. ValueError for ids that the tokenizer does not have; ids of another model
    that it does have are not noticed, so read the first query and label, which are printed."""
    tokens = []
    match value:
        case [int(), *_]:  # token ids
            size = len(tokenizer)
            # 50259 is padding, unless this tokenizer has so many tokens.
            tokens = [token for token in value if token != PADDING or PADDING < size]
            if not all(0 <= token < size for token in tokens):
                raise ValueError("has token ids of another model")
        case [dict(), *_]:  # a chat, which becomes a text
            if not {"role", "content"} <= value[0].keys():
                raise ValueError("has messages without `role` and `content`")
            value = tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True)
    if isinstance(value, str):
        tokens = tokenizer(value, add_special_tokens=False).input_ids
    # A chat template may have put BOS there. Where bos() is [], no token is equal to it.
    return tokens[1:] if tokens[:1] == bos(tokenizer) else tokens


# --- the run's folder -----------------------------------------------------------------------------
def choose_folder(preset: str, args: Args) -> None:
    """Sets args.output_dir. UserError if it has a run that is not to be resumed."""
    default = f"runs/{FILE.stem}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    # All processes take the first one's: their clocks differ.
    name = broadcast_object_list([args.output_dir or default])[0]
    args.output_dir = str(Path(name).expanduser().absolute())
    if os.path.exists(f"{args.output_dir}/args.json") and not args.resume:
        raise UserError(f"--output_dir {args.output_dir} has a run: --resume, or another folder")


class Run:
    """The folder of a run: args.json, a record of the script (to run it, put tf_adam.py beside it),
    metrics.jsonl, samples/, checkpoints/.

    As a context it holds the folder's lock, and notes SIGINT and SIGTERM: the run stops at the end
    of the update, with a checkpoint. After the last update a signal is only noted. A second signal
    of the same kind ends the process at once."""

    def __init__(self, accelerator: Accelerator, preset: str, args: Args, **state: object) -> None:
        """Nothing is written yet. `state` is what the loop carries from update to update, at the
        start; `update` (how many were made) and `processes` are added to it. In a resumed run the
        newest checkpoint's state takes its place."""
        self.accelerator = accelerator
        self.preset = preset
        self.args = args
        self.folder = Path(args.output_dir)
        self.state = state | {"update": 0, "processes": accelerator.num_processes}
        self.lock = FileLock(self.folder / "lock")
        self.signals = []

    def __enter__(self) -> "Run":
        """Starts the run, or continues it at its newest checkpoint. The order matters: the folder
        is looked at with the lock held; no process writes before all have read; and signals end the
        process, as usual, until all is ready."""
        accelerator = self.accelerator

        # the folder; until wait_for_everyone all processes only read what is in it
        if accelerator.is_main_process:
            self.lock.acquire(blocking=False)  # makes the folder; an OSError if a run has the lock
        choose_folder(self.preset, self.args)  # again, with the lock: another run may have used it

        # the newest checkpoint, if there is one
        if newest := self.checkpoints()[-1:]:
            saved = json.loads((newest[0] / "state.json").read_text())
            if saved["processes"] != self.state["processes"]:  # shuffles are per process
                raise UserError(f"--resume needs {saved['processes']} processes")
            accelerator.load_state(str(newest[0]))
            self.state = saved
        elif (self.folder / "samples.jsonl").exists():  # a finished run: it must not start anew
            raise UserError(f"--output_dir {self.folder}: no checkpoint to go on from")

        # Weights & Biases
        if self.args.track:
            self.state.setdefault("wandb_id", os.urandom(4).hex())
            wandb = {
                "id": self.state["wandb_id"],
                "name": self.folder.name,
                "resume": "allow",
                "save_code": True,
            }
            accelerator.init_trackers(self.args.wandb_project, vars(self.args), {"wandb": wandb})

        # the files: what the run is, and metrics.jsonl without the updates after the checkpoint
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            about = {
                "script": FILE.stem,
                "preset": self.preset,
                "args": vars(self.args),
                "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
                f"transformers {transformers.__version__}, accelerate {accelerate.__version__}",
                "commit": subprocess.getoutput(
                    f"git -C '{FILE.parent}' log -1 --format=%H 2>/dev/null"
                ),
                "machine": f"{platform.platform()}, {os.cpu_count()} CPUs, "
                f"{accelerator.num_processes} x {accelerator.device.type}",
            }
            write(self.folder / "args.json", json.dumps(about, indent=2))
            write(self.folder / FILE.name, FILE.read_text())
            (self.folder / "samples.jsonl").unlink(missing_ok=True)
            log = self.folder / "metrics.jsonl"
            log.touch()
            lines = log.read_text().splitlines(keepends=True)
            write(log, "".join(lines[: self.state["update"]]))

        # from here on signals stop the run between updates
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)
        self.last_log = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release()

    def note(self, number: int, frame: object) -> None:
        """Notes a signal. The next one of its kind ends the process."""
        self.signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    def updates(self, total: int) -> tqdm:
        """The numbers of the updates that are left, with a progress bar."""
        done = self.state["update"]
        self.total = total
        return tqdm(
            range(done, total),
            initial=done,
            total=total,
            disable=not self.accelerator.is_main_process,
        )

    def log(self, metrics: dict, **counts: int) -> None:
        """Adds the seconds since the last call (with evaluations and checkpoints), for each of
        `counts` the number per second, and the peak memory of the GPU or else of this process. Then
        writes a line of metrics.jsonl, and logs where --track asks for it."""
        seconds = time.monotonic() - self.last_log
        self.last_log += seconds  # now
        metrics["seconds"] = seconds
        for name, count in counts.items():
            metrics[f"{name}_per_second"] = count / seconds
        # Kilobytes on Linux. On a Mac these are bytes, and the number is 1024 times too large.
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        metrics["peak_memory_gb"] = (torch.cuda.max_memory_allocated() or 1024 * kilobytes) / 1e9
        if self.accelerator.is_main_process:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(f"{json.dumps(metrics)}\n")
        self.accelerator.log(metrics, step=self.state["update"] + 1)

    def log_samples(self, name: str, samples: pd.DataFrame) -> None:
        """Writes <name>.jsonl in the folder, and where --track logs a table of that name."""
        if self.accelerator.is_main_process:
            path = self.folder / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            write(path, samples.to_json(orient="records", lines=True, double_precision=15))
        if self.args.track:
            self.accelerator.get_tracker("wandb").log_table(name, dataframe=samples)

    def checkpoints(self) -> list[Path]:
        """The folders of complete checkpoints, checkpoints/<updates made>, the newest last."""
        found = self.folder.glob(f"checkpoints/{7 * '[0-9]'}/state.json")
        return sorted(path.parent for path in found)

    def end_update(self) -> None:
        """Counts the update. Leaves a checkpoint if one is due, and stops the run after a signal to
        any process. Only the newest two are kept. No random state is needed: uniforms follow from
        seed, update and row, and main draws the shuffles again from the start."""
        self.state["update"] += 1
        updates_made = self.state["update"]
        every = self.args.checkpoint_every
        is_due = updates_made == self.total or (every > 0 and updates_made % every == 0)
        # A signal may reach one process only, so all add theirs up.
        count = torch.tensor(len(self.signals), device=self.accelerator.device)
        is_stopping = sum_over_ranks(count) > 0
        if is_due or is_stopping:
            path = self.folder / f"checkpoints/{updates_made:07d}"
            self.accelerator.save_state(str(path))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                write(path / "state.json", json.dumps(self.state))  # last: now it is complete
                for old in self.checkpoints()[:-2]:
                    shutil.rmtree(old)
        if is_stopping:
            logger.warning("stopped by a signal, with a checkpoint: --resume goes on from it")
            raise SystemExit(130)


def write(path: Path, text: str) -> None:
    """Writes the file so that it is there as a whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


def save_policy(policy: Module, weights: dict, tokenizer: Tokenizer, parent: str) -> None:
    """Writes policy/ and, if there is a critic, critic/, which are Hugging Face folders. The value
    head is a file beside the model whose states it reads: named_children yields lm, critic and
    value_head in the order of their assignment."""
    folder = parent
    for part, module in policy.named_children():
        own = {
            name: weights[f"{part}.{name}"]
            for name in module.state_dict()
            if name not in getattr(module, "all_tied_weights_keys", ())  # they are saved once
        }
        if isinstance(module, Model):
            folder = f"{parent}/policy" if part == "lm" else f"{parent}/{part}"
            module.save_pretrained(folder, state_dict=own)
            tokenizer.save_pretrained(folder)
        else:
            save_file(own, f"{folder}/{part}.safetensors")


def show_samples(samples: pd.DataFrame, folder: str) -> None:
    """Prints three queries with their responses before and after the training, and mean scores."""
    for row in samples.drop_duplicates("query").head(3).itertuples():
        sys.stdout.write(
            f"\nquery: {row.query}\nbefore: {row.response}\nafter: {row.response_after}\n"
        )
    scores = f"{samples.score.mean():.2f} before, {samples.score_after.mean():.2f} after"
    sys.stdout.write(f"\nmean score {scores}; see {folder}/samples.jsonl\n")


# --- entry point ----------------------------------------------------------------------------------
def check_settings(args: Args, divisor: int) -> None:
    """UserError for settings that do not go together."""
    if args.batch_size % divisor:
        raise UserError(
            f"--batch_size {args.batch_size} must be a multiple of {divisor} "
            "(processes x minibatches x RLOO's responses per query)"
        )
    if args.truncate_token and args.truncate_after >= args.response_length:
        raise UserError(f"--truncate_after {args.truncate_after} must be below --response_length")


# What a resumed run of any of the scripts may change: where, how fast and how long it runs, and its
# learning rates. Anything else would make two experiments of one run.
CHANGEABLE = """resume output_dir track wandb_project checkpoint_every eval_every total_episodes lr
critic_lr max_kl micro_batch_size sample_batch_size gradient_checkpointing"""


def parse_args() -> tuple[str, Args]:
    """Name of the preset (`tiny` if a flag comes first), and Args. Flags override args.json (with
    --resume), which overrides the preset."""
    # People write `--flag none` or `--flag=none`. tyro reads only None.
    words = [re.sub("^(--[^=]+=)?none$", r"\1None", word) for word in sys.argv[1:]]
    preset = words.pop(0) if words and not words[0].startswith("-") else "tiny"
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}: choose one of {', '.join(PRESETS)}")
    # Parsed once to learn --resume and --output_dir, then again with the old run's as defaults.
    args = tyro.cli(Args, default=PRESETS[preset], args=words)
    if args.resume and not args.output_dir:
        raise UserError("--resume needs --output_dir, the folder of the run")
    path = Path(f"{args.output_dir}/args.json").expanduser()
    if args.resume and path.exists():
        old_run = json.loads(path.read_text())
        writer = f"{old_run['script']}.py {old_run['preset']}"
        if writer != f"{FILE.name} {preset}":
            raise UserError(f"{path} was written by {writer}")
        old_args = validated(old_run["args"])
        default = replace(old_args)  # a copy
        default.reward_fn = None  # args.json must not choose what code is run
        args = tyro.cli(Args, default=default, args=words)
        # A flag may repeat what args.json has. Only CHANGEABLE ones may differ.
        for name, old in vars(old_args).items():
            if name not in CHANGEABLE.split() and getattr(args, name) != old:
                raise UserError(f"--output_dir {args.output_dir} was started with --{name} {old}")
    return preset, validated(vars(args))


def validated(values: dict) -> Args:
    """Args with these values; UserError for one that is not what its type says."""
    try:
        return pydantic.TypeAdapter(Args).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{first['loc'][0]} {first['input']}: {first['msg']}") from error


if __name__ == "__main__":
    try:
        main(*parse_args())
    except Exception as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(2)  # when one process ends, the launcher ends all: let the first print
        if not isinstance(error, UserError | OSError) or os.environ.get("RLHF_DEBUG"):
            raise
        sys.stderr.write(f"{FILE.name}: {' '.join(str(error).split())}\n")
        sys.exit(2)
