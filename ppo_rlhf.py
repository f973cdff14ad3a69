"""PPO from human preferences for language models, in one file.

A policy continues queries, a reward model (train_reward.py) scores the continuations, and the
policy moves towards higher scores, while a penalty on the KL divergence holds it near the
reference, the model that it started from. "The original" is OpenAI's lm-human-preferences (Ziegler
et al. 2019, arXiv:1909.08593); the tests replay arrays recorded from it and from TRL.

    python train_reward.py                                     # first: a reward model
    python ppo_rlhf.py                                         # tiny model and data
    accelerate launch --num_processes 8 ppo_rlhf.py sentiment  # eight GPUs share --batch_size

A run needs a reward model, which train_reward.py makes, or a --reward_fn. Left out, to stay
readable: generation engines, gradient checkpointing, several reward models.

A function (except main) that appears in more than one of ppo_rlhf.py, rloo_rlhf.py and
train_reward.py is identical in all of them: what seems out of place here is needed there.

Shapes: B responses in a process's share of a batch, n in its share of a minibatch, b in a
micro-batch, R tokens per response, T tokens of query and response together, V tokens in the
vocabulary, d hidden units.
"""

import signal

if __name__ == "__main__":  # Ctrl-C before the run begins ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

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
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import datasets
import numpy as np
import pandas as pd
import pydantic
import rich
import torch
import tyro
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, reduce, set_seed
from filelock import FileLock
from huggingface_hub import hf_hub_download
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Conv1D,
    DynamicCache,
    TopPLogitsWarper,
)
from transformers import AutoModelForSequenceClassification as AutoClassifier
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import set_verbosity_error

from tf_adam import clip_gradients, make_optimizer, set_learning_rates

FILE = Path(__file__).resolve()
Name = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
TokenRows = list[list[int]]
Pair = tuple[Tensor, Tensor]  # docstrings say of what; of (logits, values) values may be None
logger = get_logger(__name__)  # prints on the first process only


class UserError(ValueError):
    """An error that the user can fix: the script ends with its text, one line."""


class Interrupted(UserError):
    """Ended by Ctrl-C or SIGTERM, after a checkpoint."""


@dataclass
class Args:
    """Settings of a run. A preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    __pydantic_config__ = pydantic.ConfigDict(allow_inf_nan=False, extra="forbid")

    # the run
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1  # Of data order, sampling and new weights
    output_dir: Name | None = None  # Folder of the run (None: runs/<script>-<preset>-<seed>-<time>)
    # Continue the run in --output_dir with its settings, of which some may be changed; or start it
    resume: bool = False
    checkpoint_every: NonNegativeInt = 25  # Updates between checkpoints (0: only at the end)
    eval_every: NonNegativeInt = 0  # Updates between evaluations during the training (0: none)
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)
    eval_queries: PositiveInt = 64  # Held-out queries, sampled before, after and at --eval_every

    # models
    base_model: Name = "tiny/model"  # Policy and reference start from it: a folder or hub id
    # Classifier with one label: a folder or hub id (None: the preset's newest in runs/)
    reward_model: Name | None = None
    # Instead of a reward model: `module:function` (queries, responses, ...), see score_by_function
    reward_fn: Name | None = None
    # bf16: autocast; most frozen linear layers in bf16 (see hold_in_bf16), the rest in fp32
    dtype: Literal["fp32", "bf16"] = "fp32"
    # Train LoRA adapters of this rank in place of the model's weights (0: train all weights)
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveFloat = 16.0  # LoRA adapters are scaled by this / --lora_rank
    # Train only this many of the top layers; the reference shares the rest (0: train all)
    unfrozen_layers: NonNegativeInt = 0

    # the task

    # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config] on the hub
    query_dataset: Name = "tiny/queries"
    # For data that is token ids: the model whose tokenizer made them (None: --base_model)
    token_ids_of: Name | None = None
    query_length: PositiveInt = 32  # Longest query, in tokens
    # What happens to longer queries (None: keep_start if there is an --end_text, or else drop)
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None
    query_prefix: Name | None = None  # Text before every query, not for the reward model
    query_suffix: Name | None = None  # Text after every query, not for the reward model
    # One token: a query begins after its first occurrence; texts without it are dropped (None: off)
    start_text: Name | None = "."
    end_text: Name | None = "."  # One token: a query is cut back to its last occurrence (None: off)
    response_length: PositiveInt = 24  # Tokens sampled per response
    temperature: PositiveFloat = 0.7  # Divides logits: for sampling, log-probabilities, entropies
    # Nucleus sampling, from the likeliest tokens of this total probability; the KL is then biased
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # The token that ends a response (`eos`: the tokenizer's; None: every response is complete)
    truncate_token: Name | None = "."
    truncate_after: NonNegativeInt = 16  # The token ends a response only at this index or later
    penalty_reward_value: float = -1.0  # For a response without a truncate token
    # --penalty_reward_value replaces the score (original) or is added to it
    penalty_mode: Literal["replace", "add"] = "replace"
    # Tokens after the truncate token are left out of KL and loss (original: they count)
    mask_truncated: bool = False

    # updates and optimizer
    total_episodes: PositiveInt = 12_800  # Responses sampled in the run, in whole batches
    batch_size: PositiveInt = 128  # Episodes per update, over all devices
    # Rows per forward pass on one device; gradients accumulate. Sampling takes all rows at once
    micro_batch_size: PositiveInt = 128
    num_minibatches: PositiveInt = 1  # Optimizer steps per epoch
    num_epochs: PositiveInt = 4  # Passes over the batch in each update
    lr: NonNegativeFloat = 2e-4  # Learning rate, see the schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # --lr decays to 0, or stays
    lr_warmup: NonNegativeInt = 0  # In this many (n) updates --lr rises, first to lr / (n + 1)
    # Adam as TensorFlow has it (original), or torch.optim.AdamW
    adam: Literal["tf", "torch"] = "tf"
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)  # Decay rates of Adam's two averages
    weight_decay: NonNegativeFloat = 0.0  # Decoupled, as in AdamW; for matrices only
    max_grad_norm: PositiveFloat | None = None  # Gradients of a larger norm are scaled down to it
    ema: Decay = 0.0  # Decay per update of an average of the weights, saved in ema/ (0: none)
    ptx_coef: NonNegativeFloat = 0.0  # Weight of the loss per token of pretraining texts (PPO-ptx)
    # Pretraining texts, as --query_dataset; the first --query_length tokens of each
    ptx_dataset: Name | None = None

    # rewards

    # Divide scores by their standard deviation over the batch (whiten: subtract their mean first)
    score_norm: Literal["scale", "whiten"] | None = None
    score_clip: PositiveFloat | None = None  # Clip scores to +- this, after --score_norm
    # Estimator of the KL penalty in the rewards: see kl_penalty
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    kl_coef: NonNegativeFloat = 0.15  # Coefficient of the KL penalty at the start
    # KL (k1, in nats per response) that the coefficient is adapted to reach (None: fixed)
    kl_target: PositiveFloat | None = 6.0
    kl_horizon: PositiveFloat = 2_000.0  # Episodes, well above --batch_size / 5; larger: slower
    # The run stops at a KL (nats per response) above this, or below -1/10 of it
    max_kl: PositiveFloat = 200.0

    # the algorithm
    cliprange: NonNegativeFloat = 0.2  # The probability ratio is clipped to 1 +- this
    # Skip the rest of a batch's steps after one whose approxkl is above this (None: never)
    target_kl: PositiveFloat | None = None
    cliprange_value: NonNegativeFloat = 0.2  # The predicted value is clipped to the old one +- this
    vf_coef: NonNegativeFloat = 0.1  # Weight of the value loss
    gamma: NonNegativeFloat = 1.0  # Discount per token
    lam: NonNegativeFloat = 0.95  # Lambda of generalised advantage estimation
    whiten_rewards: bool = True  # Scale rewards to variance 1, but keep their mean
    whiten_advantages: bool = True  # Shift and scale advantages to mean 0, variance 1
    # rank: over a process's own minibatch (original); global: over the minibatch of all processes;
    # batch: over a process's whole share of the batch (TRL)
    whiten: Literal["rank", "global", "batch"] = "rank"
    # Needs --mask_truncated: values and score go one step beyond the truncate token (TRL from 0.12)
    value_after_end: bool = False
    # Trunk of the value head: the policy's own; or a copy of it or the reward model's, all trained
    critic: Literal["shared", "policy", "reward"] = "shared"
    critic_lr: NonNegativeFloat | None = None  # Learning rate of value head and critic (None: --lr)
    critic_warmup: NonNegativeInt = 0  # First updates, in which only head and critic learn


# A preset is a string of flags with the values of OpenAI's launch.py, or of the scripts it starts.
# Later flags win. Queries in the label files are cut already: no --start_text, no --end_text.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
OPENAI = "--base_model gpt2 --token_ids_of gpt2 --start_text None --end_text None"
OPENAI += " --total_episodes 1000000"
BOOKS = f"{OPENAI} --query_length 64 --batch_size 512 --micro_batch_size 64 --lr 1e-5"
BOOKS += " --kl_horizon 1e4"
POSTS = f"{OPENAI} --query_length 500 --long_queries keep_start --query_suffix '\n\nTL;DR:'"
POSTS += " --response_length 75 --truncate_token '\n' --truncate_after 55"
POSTS += " --batch_size 32 --micro_batch_size 4 --lr 2e-6 --kl_coef 0.03 --kl_target None"
POSTS += " --no-whiten_rewards"
NEWS = f"{POSTS} --query_prefix 'Article:\n\n' --temperature 0.5 --kl_coef 0.01"
PRESETS = {
    "tiny": "",
    "sentiment": f"{BOOKS} --query_dataset {FILES}/sentiment/offline_5k.json",
    "descriptiveness": f"{BOOKS} --query_dataset {FILES}/descriptiveness/offline_5k.json",
    "cnndm": f"{NEWS} --query_dataset {FILES}/cnndm/offline_60k.json",
    "tldr": f"{POSTS} --query_dataset {FILES}/tldr/offline_60k.json",
}


@dataclass
class Query:
    """A query as the reward model and as the policy reads it, and its row in the table."""

    input_ids: list[int]  # as the reward model reads it
    context: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for PPO's and RLOO's --reward_fn


@dataclass
class Batch:
    """B responses of R tokens, and what follows from them."""

    contexts: TokenRows  # B lists of the tokens before each response
    responses: Tensor  # (B, R), as sampled; 0 where sampling had stopped
    truncated: TokenRows  # B lists: the responses up to their truncate token
    lengths: Tensor  # (B,), of the rows of truncated
    found_end: Tensor  # (B,), whether they have a truncate token, at --truncate_after or later
    mask: Tensor  # (B, R), the tokens that count: all, or with --mask_truncated those of truncated
    logprobs: Tensor  # (B, R), of the policy that sampled them
    ref_logprobs: Tensor  # (B, R), of the reference
    full_kl: Tensor  # (B, R), KL(policy, reference) at each token; 0 unless --kl_estimator full
    values: Tensor  # (B, R), predicted before each token
    # what follows is set after the rollout
    texts: TokenRows  # B pretraining texts, or none
    advantages: Tensor  # (B, R), or (B, 1) in RLOO
    value_mask: Tensor  # (B, R), where values, rewards and returns count: see --value_after_end
    rewards: Tensor  # (B, R)
    returns: Tensor  # (B, R)


Sums = dict[str, Pair]  # (sum, count) of each metric; reduce_means divides them


def main(preset: str, args: Args) -> None:
    """Set-up; a loop of rollout, score, reward, update, log; at the end evaluate and save."""
    cpu = not torch.accelerator.is_available() or torch.backends.mps.is_available()  # MPS: no fp64
    accelerator = Accelerator(cpu=cpu, log_with="wandb", mixed_precision="no", dynamo_backend="no")
    rank = accelerator.process_index
    args = resolve_args(preset, args)
    if args is None:  # the run is finished
        return
    check_settings(args, accelerator.num_processes * args.num_minibatches)
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    check_critic_settings(args, num_updates)
    share = args.batch_size // accelerator.num_processes  # responses of this process in an update
    my_rows = slice(rank * share, (rank + 1) * share)

    # data and models; most errors show in the first evaluation, before anything is written
    set_up_backend(args.dtype)
    set_seed(args.seed)
    tokenizer = load_tokenizer("base_model", args)
    truncate_id = token_id("truncate_token", tokenizer, args)
    num_queries = args.eval_queries + num_updates * args.batch_size
    queries = load_queries("query_dataset", tokenizer, args, num_queries)
    held_out = queries[: args.eval_queries]
    queries = queries[args.eval_queries :]
    if not queries:
        raise UserError(f"--eval_queries {args.eval_queries}: none is left to train on")
    ptx_texts = []
    if args.ptx_dataset:
        ptx_args = replace(args, start_text=None, end_text=None, long_queries="keep_start")
        ptx_texts = load_queries("ptx_dataset", tokenizer, ptx_args, num_queries)
    longest = max(len(x.context) for x in held_out + queries + ptx_texts) + args.response_length
    score = load_reward(args, preset, tokenizer, longest)  # sets args.reward_model if it is None
    lm, ref_lm = load_policy_and_reference(args, tokenizer, longest)
    critic = None
    if args.critic == "policy":
        critic = load_model(AutoModelForCausalLM, "base_model", args, tokenizer, longest)
    if args.critic == "reward":
        critic = load_model(AutoClassifier, "reward_model", args, tokenizer, longest)
    policy = ActorCritic(lm, critic)
    ref = ActorCritic(ref_lm)  # its values are not used
    optimizer = make_optimizer([policy.lm], [policy.value_head, policy.critic], args)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    unwrapped = accelerator.unwrap_model(policy)  # the same module, without DDP around it
    trained = {name: p for name, p in unwrapped.named_parameters() if p.requires_grad}
    ema_weights = nn.ParameterList()  # moving averages of these; none without --ema
    if args.ema:
        ema_weights.extend(p.detach().clone() for p in trained.values())
        ema_weights.requires_grad_(False)
        accelerator.prepare_model(ema_weights, evaluation_mode=True)  # now checkpoints include it
    assess = functools.partial(evaluate, ref, held_out, score, truncate_id, tokenizer, args)
    before = assess(ref)  # the reference is the untrained policy, also when a run is resumed

    with lock_and_signals(args) as signals:
        state = {"update": 0, "kl_coef": args.kl_coef}  # open_run adds to it or loads it
        open_run(accelerator, preset, args, state)
        done = state["update"]
        # A resumed run draws shuffles from the start, and drops those of the updates already made.
        shuffles = itertools.islice(draw_epochs(args, rank, share), done, None)
        bar = tqdm(range(done, num_updates), initial=done, total=num_updates, disable=rank > 0)
        for update in bar:
            updates_made = update + 1  # at the end of this one
            kl_coef = state["kl_coef"]

            # 1. rollout: responses to the queries; their log-probabilities, by policy and reference
            episodes = range(update * args.batch_size, updates_made * args.batch_size)[my_rows]
            batch_queries = [queries[i % len(queries)] for i in episodes]
            u = uniforms(args.seed, updates_made, args.batch_size, args.response_length)[my_rows]
            epochs = next(shuffles)  # row numbers (num_epochs, num_minibatches, n)
            # Log-probabilities come from the first epoch's micro-batches, with padding and
            # rounding of the first optimizer step, whose ratios are therefore 1: see check_policy.
            batch = rollout(unwrapped, ref, batch_queries, u, epochs[0], truncate_id, args)

            # 2. score: the reward of the truncated response, or a penalty where it never ends
            raw_scores, token_scores = score(batch_queries, batch.truncated)  # (B,), (B, R)
            scores = penalize(raw_scores, batch.found_end, args)  # (B,)
            final_scores = normalize_scores(scores, args)

            # 3. reward: a KL penalty at every token, and the score at the last: see token_rewards
            ref_log_ratio = (batch.logprobs - batch.ref_logprobs) * batch.mask  # (B, R)
            token_kl = kl_penalty(ref_log_ratio, args.kl_estimator, batch.full_kl) * batch.mask
            batch.value_mask = batch.mask
            if args.value_after_end:  # one value more than tokens: 1 1 1 0 0 becomes 1 1 1 1 0
                batch.value_mask = pad(batch.mask[:, :-1], (1, 0), value=True)
            rest = final_scores - token_scores.sum(1)  # the two add up to final_scores
            batch.rewards = token_rewards(rest, token_kl, batch.value_mask, kl_coef) + token_scores

            # 4. update: learning rates (tf_adam.py has the schedule), and the optimizer steps
            set_learning_rates(optimizer, update, update / num_updates, args)
            if ptx_texts:
                batch.texts = [ptx_texts[i % len(ptx_texts)].input_ids for i in episodes]
            records = ppo_update(accelerator, policy, optimizer, batch, epochs, args)
            for average, p in zip(ema_weights, trained.values(), strict=False):  # only with --ema
                average.lerp_(p.detach(), 1 - args.ema)

            # 5. log; these are summed over tokens, and averaged over responses
            summed = {
                "objective/scores": scores,
                "objective/scores_scaled": final_scores,
                "objective/score_total": batch.rewards,
                "objective/found_end": batch.found_end,
                "objective/length": batch.lengths,
                "objective/kl": ref_log_ratio,
                "objective/entropy": -batch.logprobs * batch.mask,  # from the sampled tokens alone
                "objective/non_score_reward": -kl_coef * token_kl,
            }
            count = scores.new_tensor(len(scores))
            records.append({name: (x.sum(), count) for name, x in summed.items()})
            metrics = reduce_means(records)
            metrics["objective/kl_coef"] = kl_coef
            metrics["ppo/episode"] = updates_made * args.batch_size
            metrics["ppo/lr"] = optimizer.param_groups[0]["lr"]
            add_value_metrics(metrics, args)
            if args.eval_every and updates_made % args.eval_every == 0:
                metrics |= assess(unwrapped).mean(numeric_only=True).add_prefix("eval/")
            if rank == 0:
                log = f"{args.output_dir}/metrics.jsonl"
                with as_user_error("output_dir", args), open(log, "a") as file:
                    file.write(f"{json.dumps(metrics)}\n")
            accelerator.log(metrics, step=updates_made)
            kl = metrics["objective/kl"]
            bar.set_postfix(score=metrics["objective/scores"], kl=kl)
            # KL of the weights before these steps: if it is bad, the newest checkpoint may be, too.
            check_policy(update, metrics["first_ratio_error"], kl, args)

            # 6. adapt the KL coefficient; leave a checkpoint
            state |= {"update": updates_made, "kl_coef": adapt_kl_coef(kl_coef, kl, args)}
            is_due = args.checkpoint_every and updates_made % args.checkpoint_every == 0
            stopping = sum_over_ranks(scores.new_tensor(len(signals))) > 0  # on any process
            if is_due or stopping or updates_made == num_updates:
                save_checkpoint(accelerator, state, args)
            if stopping:
                raise Interrupted("stopped by a signal")

        # 7. evaluate and save; get_state_dict may gather weights, so every process calls it
        after = assess(unwrapped)
        weights = accelerator.get_state_dict(policy)
        averages = accelerator.get_state_dict(ema_weights).values()
        if rank == 0:
            with as_user_error("output_dir", args):
                save_policy(unwrapped, weights, tokenizer, args.output_dir)
                if args.ema:
                    ema = weights | dict(zip(trained, averages, strict=True))
                    save_policy(unwrapped, ema, tokenizer, f"{args.output_dir}/ema")
            show_samples(accelerator, before, after, args)
    policy, optimizer = accelerator.free_memory(policy, optimizer)  # without this gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def kl_penalty(log_ratio: Tensor, kind: str, full_kl: Tensor | None = None) -> Tensor:
    """Penalties (B, R), before kl_coef, from log pi - log ref of the sampled tokens: k1, k2, k3
    (Schulman 2020: joschu.net/blog/kl-approx.html), abs (TRL); or `full`, over the vocabulary.

    No gradient flows through rewards. In expectation only k1, as a reward, gives the gradient of
    KL(pi, ref). k3, for example, gives grad KL(pi, ref) - grad KL(ref, pi), 0 to first order near
    the reference; `full` leaves out the gradient of each token's own KL. All this for --top_p 1."""
    estimates = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": (-log_ratio).clamp(max=40).exp() - 1 + log_ratio,
        "abs": log_ratio.abs(),
        "full": full_kl,
    }
    return estimates[kind]


def penalize(scores: Tensor, found_end: Tensor, args: Args) -> Tensor:
    """Scores (B,). Where there is no truncate token, --penalty_reward_value replaces the score or
    is added to it (--penalty_mode)."""
    # scores * 0 keeps a NaN, which is to be found below.
    kept = scores if args.penalty_mode == "add" else scores * 0
    scores = torch.where(found_end, scores, kept + args.penalty_reward_value)
    if not scores.isfinite().all():
        raise UserError(
            f"--reward_model {args.reward_model}, --reward_fn {args.reward_fn}: NaN or infinite "
            "rewards, or --penalty_reward_value is too large"
        )
    return scores


def normalize_scores(scores: Tensor, args: Args) -> Tensor:
    """Scores (B,), divided by their deviation over all processes (--score_norm; with `whiten` less
    their mean), then clipped (--score_clip). Scores of single tokens are not normalized:
    ppo_rlhf.py pays the difference at the last token."""
    if args.score_norm:
        mean, variance = moments(scores, torch.ones_like(scores), sum_over_ranks)
        if args.score_norm == "whiten":
            scores = scores - mean
        scores = scores * torch.rsqrt(variance + (variance < 1e-8))  # nearly equal ones stay
    if args.score_clip:
        scores = scores.clamp(-args.score_clip, args.score_clip)
    return scores


def token_rewards(scores: Tensor, token_kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards (B, R): -kl_coef * token_kl, and the score (B,) at the last token of mask. Without
    --mask_truncated that is the last sampled token, even if the truncate token is far before it."""
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return -kl_coef * token_kl + scores.unsqueeze(1) * is_last


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of all elements of x on all processes."""
    return reduce(x.sum(), "sum")


def moments(x: Tensor, mask: Tensor, total: Callable = torch.sum, correction: int = 0) -> Pair:
    """Mean and variance over mask, two scalars. `total` is torch.sum, or sum_over_ranks to count
    all processes; a correction of 1 makes the variance unbiased."""
    count = total(mask)
    mean = total(x * mask) / count
    return mean, total((x - mean) ** 2 * mask) / (count - correction)


def whiten(x: Tensor, mask: Tensor, total: Callable, correction: int, shift_mean: bool) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), plus the mean unless shift_mean; 0 outside mask."""
    mean, variance = moments(x, mask, total, correction)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float) -> Pair:
    """Generalised advantages (arXiv:1506.02438) and returns (B, R); outside mask all is 0."""
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


def set_advantages(batch: Batch, rows: Tensor, args: Args) -> None:
    """Sets advantages and returns of these rows of the batch. Means and variances are over the
    tokens of these rows that count, with --whiten global also over those of other processes."""
    value_mask = batch.value_mask[rows]
    rewards = batch.rewards[rows]
    total = sum_over_ranks if args.whiten == "global" else torch.sum
    correction = 1 if args.whiten == "batch" else 0  # TRL's variance is the unbiased one
    if args.whiten_rewards:
        rewards = whiten(rewards, value_mask, total, correction, shift_mean=False)
    advantages, returns = gae(batch.values[rows], rewards, value_mask, args.gamma, args.lam)
    if args.whiten_advantages:
        advantages = whiten(advantages, batch.mask[rows], total, correction, shift_mean=True)
    batch.advantages[rows] = advantages
    batch.returns[rows] = returns


def ppo_loss(
    logprobs: Tensor, values: Tensor, batch: Batch, rows: Tensor, args: Args
) -> tuple[Tensor, Tensor, Sums]:
    """Clipped losses of policy and value head, SUMMED over the masks, so that micro-batches add up,
    from new logprobs and values (b, R) of rows of the batch; and metrics. Schulman et al. 2017,
    arXiv:1707.06347, equation 7; for values lm_human_preferences/train_policy.py, PPOTrainer."""
    advantages = batch.advantages[rows]
    mask = batch.mask[rows]
    log_ratio = logprobs - batch.logprobs[rows]
    ratio = log_ratio.clamp(-40, 40).exp()  # clamped, so that it does not overflow
    clipped_ratio = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    policy_loss = -advantages * ratio
    policy_loss_clipped = -advantages * clipped_ratio
    policy_loss_max = torch.maximum(policy_loss, policy_loss_clipped)
    policy_terms = {
        "ppo/loss/policy": policy_loss_max,
        "ppo/policy/approxkl": 0.5 * log_ratio**2,
        "ppo/policy/clipfrac": policy_loss_clipped > policy_loss,
        "ppo/val/ratio": ratio,
    }

    returns = batch.returns[rows]
    lowest = batch.values[rows] - args.cliprange_value
    highest = batch.values[rows] + args.cliprange_value
    value_loss = (values - returns) ** 2
    value_loss_clipped = (values.clamp(lowest, highest) - returns) ** 2
    value_loss_max = 0.5 * torch.maximum(value_loss, value_loss_clipped)
    value_terms = {
        "ppo/loss/value": value_loss_max,
        "ppo/val/vpred": values,
        "ppo/val/error": value_loss,
        "ppo/val/clipfrac": value_loss_clipped > value_loss,
    }
    value_mask = batch.value_mask[rows]
    sums = sums_over(mask, policy_terms) | sums_over(value_mask, value_terms)
    return (policy_loss_max * mask).sum(), (value_loss_max * value_mask).sum(), sums


def sums_over(mask: Tensor, terms: dict[str, Tensor]) -> Sums:
    """The sum of each term over mask, and the count of mask."""
    return {name: ((term.detach() * mask).sum(), mask.sum()) for name, term in terms.items()}


def ppo_update(
    accelerator: Accelerator,
    policy: Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    epochs: Tensor,
    args: Args,
) -> list[Sums]:
    """Makes all optimizer steps on one batch, and returns what is logged of them. epochs
    (num_epochs, num_minibatches, n) says which rows are in which minibatch."""
    records = []
    one = torch.ones((), device=batch.mask.device)  # the count for a metric that is a mean already
    for step, minibatch in enumerate(epochs.flatten(0, 1)):
        # Whitening makes advantages depend on the minibatch: so they are set anew for each.
        whitened_rows = torch.arange(len(batch.mask)) if args.whiten == "batch" else minibatch
        set_advantages(batch, whitened_rows, args)
        for name, x in (("returns", batch.returns), ("val", batch.values)):
            mean, variance = moments(x[minibatch], batch.value_mask[minibatch])
            records.append({f"ppo/{name}/mean": (mean, one), f"ppo/{name}/var": (variance, one)})

        # The loss should be a mean over the minibatch on all processes: sum / count. But accelerate
        # divides each loss by the number of micro-batches, and gradients are averaged over the
        # processes. The factor `parts` undoes both.
        groups = micro_batches(minibatch, batch.contexts, args.micro_batch_size)
        accelerator.gradient_accumulation_steps = len(groups)
        accelerator.step = 0  # accumulate() counts in it, and steps at the last micro-batch
        parts = len(groups) * accelerator.num_processes
        per_token = parts / sum_over_ranks(batch.mask[minibatch])
        per_value = parts / sum_over_ranks(batch.value_mask[minibatch])
        # Tokens to predict in the minibatch's pretraining texts; 0 without such texts.
        num_targets = sum(len(batch.texts[i]) - 1 for i in minibatch if batch.texts)
        per_target = parts / sum_over_ranks(num_targets * one).clamp(min=1)

        first_record = len(records)
        for rows in groups:
            with accelerator.accumulate(policy):
                all_logprobs, values = forward_response(policy, batch, rows, args.temperature)
                logprobs = of_tokens(all_logprobs, batch.responses[rows])
                policy_loss, value_loss, sums = ppo_loss(logprobs, values, batch, rows, args)
                # To add a loss of your own: sum it over these rows, and multiply by parts / its
                # count, which is over the minibatch on all processes, as above.
                loss = policy_loss * per_token + args.vf_coef * value_loss * per_value
                if batch.texts:
                    ptx_loss, count = text_loss(policy, [batch.texts[i] for i in rows])
                    loss = loss + args.ptx_coef * ptx_loss * per_target
                    sums["ppo/loss/ptx"] = (ptx_loss.detach(), count)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = clip_gradients(policy, args.max_grad_norm)
                    if not norm.isfinite():  # the same on all processes, so all of them stop
                        raise UserError("the gradient is not finite: a smaller --lr may help")
                    sums["ppo/policy/gradient_norm"] = (norm, one)
                optimizer.step()  # accelerate skips both until the last micro-batch
                optimizer.zero_grad()
            # For the log. All this is from before the step, so that at step 0 every ratio is 1.
            entropies = {"ppo/policy/entropy": entropy(all_logprobs.detach())}
            records.append(sums | sums_over(batch.mask[rows], entropies))
            if step == 0:
                error = ((logprobs.detach() - batch.logprobs[rows]).exp() - 1).abs().max()
                records.append({"first_ratio_error": (error, one)})

        if args.target_kl:  # over all processes, so that all stop at the same step
            approxkl = reduce_means(records[first_record:])["ppo/policy/approxkl"]
            if approxkl > args.target_kl:
                break
    return records


def adapt_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """Higher where the KL is above --kl_target, lower where it is below: times 1 + the relative
    error, clipped to +-0.2, * batch_size / kl_horizon (0.1 in Ziegler et al. 2019, section 2.2)."""
    if args.kl_target is None:
        return kl_coef
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


def check_policy(update: int, ratio_error: float, kl: float, args: Args) -> None:
    """Raises UserError unless, within a tolerance, the ratios of the update's first step were 1 and
    the KL of the first update was 0; and unless this KL is in [-max_kl / 10, max_kl]. ratio_error
    is the largest error of each micro-batch, averaged. `not` makes NaN raise, too."""
    tolerance = {"fp32": 1e-3, "bf16": 0.02}[args.dtype]
    first_kl = kl if update == 0 else 0.0
    if not max(ratio_error, abs(first_kl)) <= tolerance:
        odd = f"first ratio off 1 by {ratio_error:.2g}, first KL {first_kl:.2g}"
        raise UserError(f"{odd}: the forward passes differ")
    if not -args.max_kl / 10 <= kl <= args.max_kl:
        why = "a smaller --lr helps; if it is negative, the policy is not what was sampled from"
        raise UserError(f"the KL is {kl:.4g} with --max_kl {args.max_kl}: {why}")


def add_value_metrics(metrics: dict, args: Args) -> None:
    """Adds what follows from averaged metrics: the total loss, without ptx, and the share of the
    returns' variance that values explain; _centred leaves out (approximately) their mean error."""
    value_loss = args.vf_coef * metrics["ppo/loss/value"]
    metrics["ppo/loss/total"] = metrics["ppo/loss/policy"] + value_loss
    variance = metrics["ppo/returns/var"] + 1e-8
    offset = metrics["ppo/val/vpred"] - metrics["ppo/returns/mean"]
    unexplained = metrics["ppo/val/error"] / variance
    metrics["ppo/val/var_explained"] = 1 - unexplained
    metrics["ppo/val/var_explained_centred"] = 1 - unexplained + offset**2 / variance


def reduce_means(records: list[Sums]) -> dict:
    """Sum / count of every metric over all records and processes, in one collective. All processes
    need the same metrics, in the same order."""
    totals = Counter()  # missing entries are 0
    for record in records:
        for name, pair in record.items():
            totals[name] += torch.stack(pair).double()
    reduced = reduce(torch.stack(list(totals.values())), "sum").tolist()
    pairs = zip(totals, reduced, strict=True)
    return {name: x / max(count, 1) for name, (x, count) in pairs}


# --- rollout and scoring --------------------------------------------------------------------------
def draw_epochs(args: Args, rank: int, size: int) -> Iterator[Tensor]:
    """For each update its minibatches' rows (RLOO: queries), numbers (num_epochs, num_minibatches,
    n): for each epoch a permutation of range(size)."""
    random = np.random.RandomState(args.seed + 100_003 * rank)
    while True:
        shuffles = [random.permutation(size) for _ in range(args.num_epochs)]
        yield torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)


def uniforms(seed: int, draw: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, different ones for each `draw`: 0 for
    evaluations, 1, 2, ... for updates (train_reward.py: 0 before the training, 1 after). Processes
    take their rows of one array, so these numbers do not depend on how many processes there are."""
    generator = np.random.default_rng([seed, 1, draw])  # 1: sampling; 2 and 3 are for data
    u = generator.random((batch, length), dtype=np.float32)
    return torch.tensor(u, device=PartialState().device)


@torch.no_grad()
def sample(
    policy: Module,
    contexts: TokenRows,
    u: Tensor,
    temperature: float,
    top_p: float = 1.0,
    has_ended: Callable | None = None,
) -> Tensor:
    """Responses (B, R) ~ softmax(logits / temperature) to B contexts, from uniforms u (B, R).
    has_ended makes of the responses so far a mask (B,) of those that have ended. When all have, on
    all processes, sampling stops, and the tokens that are left stay 0."""
    cache = DynamicCache(config=policy.lm.config)
    ids, mask = left_pad(contexts)
    responses = torch.zeros_like(u, dtype=torch.long)
    for t in range(u.shape[1]):
        logits, _ = policy(ids, mask, cache=cache)
        logits = logits[:, -1] / temperature
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(None, logits)
        ids = inverse_cdf(logits.softmax(-1), u[:, t : t + 1])  # (B, 1); the cache has the others
        mask = pad(mask, (0, 1), value=True)
        responses[:, t : t + 1] = ids
        # Only every eighth time, because this waits for the GPU. All processes stop together: with
        # sharded weights a forward pass needs them all.
        if has_ended is not None and t % 8 == 7:
            if sum_over_ranks(~has_ended(responses[:, : t + 1])) == 0:
                break
    return responses


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (B, 1): where the cumulative distribution of probs (B, V) passes u (B, 1)."""
    cdf = probs.cumsum(-1)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp(max=probs.shape[1] - 1)


def truncate(responses: Tensor, token: int | None, after: int) -> Pair:
    """A mask (B, R) of the tokens up to and including the first `token` at index `after` or later,
    or of all if there is none; and whether there is one, (B,). With token None all is True."""
    if token is None:
        everything = torch.ones_like(responses, dtype=torch.bool)
        return everything, everything.all(1)
    index = torch.arange(responses.shape[1], device=responses.device)
    is_end = (responses == token) & (index >= after)
    ends_before = is_end.cumsum(1) - is_end.long()
    return ends_before == 0, is_end.any(1)


@torch.no_grad()
def rollout(
    policy: Module,
    ref: Module,
    queries: list[Query],
    u: Tensor,
    minibatches: Tensor,
    truncate_id: int | None,
    args: Args,
) -> Batch:
    """Responses to the queries, from uniforms u (B, R); log-probabilities of their tokens, and
    values. Rows go through the models in the micro-batches of minibatches (num_minibatches, n)."""
    contexts = [query.context for query in queries]
    has_ended = None
    if args.mask_truncated and truncate_id is not None:
        has_ended = lambda x: truncate(x, truncate_id, args.truncate_after)[1]  # noqa: E731
    # autocast keeps its bf16 copies of trained weights until the outermost autocast block ends.
    # This block turns nothing on; it is the outermost, so they are cast once, not at every token.
    with torch.autocast(u.device.type, enabled=False):
        responses = sample(policy, contexts, u, args.temperature, args.top_p, has_ended)

    # Every tensor begins as zeros (B, R): some are set below, the others after the rollout.
    zeros = {field.name: torch.zeros_like(u) for field in fields(Batch) if field.type is Tensor}
    batch = Batch(contexts=contexts, truncated=[], texts=[], **zeros)
    batch.responses = responses
    until_end, batch.found_end = truncate(responses, truncate_id, args.truncate_after)
    batch.lengths = until_end.sum(1)
    for row, length in zip(responses.tolist(), batch.lengths.tolist(), strict=True):
        batch.truncated.append(row[:length])
    batch.mask = until_end if args.mask_truncated else torch.ones_like(until_end)
    for minibatch in minibatches:
        for rows in micro_batches(minibatch, contexts, args.micro_batch_size):
            all_logprobs, values = forward_response(policy, batch, rows, args.temperature)
            all_ref_logprobs, _ = forward_response(ref, batch, rows, args.temperature)
            batch.logprobs[rows] = of_tokens(all_logprobs, responses[rows])
            batch.ref_logprobs[rows] = of_tokens(all_ref_logprobs, responses[rows])
            if args.kl_estimator == "full":
                log_ratios = all_logprobs - all_ref_logprobs
                batch.full_kl[rows] = (all_logprobs.exp() * log_ratios).sum(-1)
            if values is not None:  # RLOO has none
                batch.values[rows] = values
    return batch


@torch.no_grad()
def score_by_model(model: Model, args: Args, queries: list[Query], responses: TokenRows) -> Pair:
    """Scores (B,) of a classifier with one label: see scalar_head. And scores of tokens (B, R),
    which are 0."""
    head = scalar_head(model)
    texts = [query.input_ids + row for query, row in zip(queries, responses, strict=True)]
    scores = torch.zeros(len(texts), device=model.device)
    for rows in micro_batches(torch.arange(len(texts)), texts, args.micro_batch_size):
        ids, mask = left_pad([texts[i] for i in rows])
        scores[rows] = head(hidden_states(model, ids, mask, last=1)).flatten()
    return scores, scores.new_zeros(len(texts), args.response_length)


def score_by_function(
    function: Callable,
    tokenizer: Tokenizer,
    args: Args,
    queries: list[Query],
    responses: TokenRows,
) -> Pair:
    """Scores (B,) and scores of tokens (B, R) from a --reward_fn, which returns for each response a
    float, or one for each of its tokens. It gets two lists of texts. Its parameters of these names
    get response_ids and columns of the queries' table; **kwargs gets them all (then no column may
    have the name of its first two parameters)."""
    prompts = [query.input_ids for query in queries]
    texts = [tokenizer.batch_decode(x, skip_special_tokens=True) for x in (prompts, responses)]
    named = {"response_ids": responses}
    named |= {name: [query.columns[name] for query in queries] for name in queries[0].columns}
    parameters = inspect.signature(function).parameters
    if not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        named = {name: named[name] for name in list(parameters)[2:] if name in named}

    scores = torch.zeros(len(responses), device=PartialState().device)
    token_scores = scores.new_zeros(len(responses), args.response_length)
    try:
        returned = function(*texts, **copy.deepcopy(named))
        for i, (reward, response) in enumerate(zip(returned, responses, strict=True)):
            reward = torch.as_tensor(reward).detach()
            if reward.ndim > 0:
                token_scores[i, : len(response)] = reward.view(len(response))
            scores[i] = reward.sum()
    except (Exception, SystemExit) as error:  # no UserError: the traceback helps the author
        raise RuntimeError(
            f"--reward_fn {args.reward_fn} failed to return {len(responses)} floats, "
            "or lists of a float per token"
        ) from error
    return scores, token_scores


def evaluate(
    ref: Module,
    queries: list[Query],
    score: Callable,
    truncate_id: int | None,
    tokenizer: Tokenizer,
    args: Args,
    policy: Module,
) -> pd.DataFrame:
    """A row for each of the queries. main binds all parameters but the policy. Every process does
    all of it, and gets the same if a --reward_fn gives the same. All calls sample from the same
    uniforms. Scores have their penalty, as in training."""
    u = uniforms(args.seed, 0, len(queries), args.response_length)
    minibatches = torch.arange(len(queries)).view(1, -1)
    batch = rollout(policy, ref, queries, u, minibatches, truncate_id, args)
    scores, _ = score(queries, batch.truncated)
    kls = (batch.logprobs - batch.ref_logprobs) * batch.mask
    return pd.DataFrame(
        {
            "query": tokenizer.batch_decode([query.input_ids for query in queries]),
            "response": tokenizer.batch_decode(batch.truncated),
            "score": penalize(scores, batch.found_end, args).tolist(),
            "kl": kls.sum(1).tolist(),
            "found_end": batch.found_end.tolist(),
            "length": batch.lengths.tolist(),
        }
    )


# --- forward passes -------------------------------------------------------------------------------
def left_pad(rows: TokenRows) -> Pair:
    """Token ids (B, T), padded on the left, and a mask, which is False at padding."""
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side="left")
    ids = ids.to(PartialState().device)
    return ids.clamp(min=0), ids >= 0


def hidden_states(
    model: Model, ids: Tensor, mask: Tensor, last: int, cache: DynamicCache | None = None
) -> Tensor:
    """States (B, last, d), in fp32, of the `last` newest tokens of ids (B, T). With a cache, ids
    follow the tokens in it, and mask covers both. Positions count real tokens, as the original's
    do. is_autocast is our own attribute: load_model sets it to True for --dtype bf16."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=model.base_model.is_autocast):
        output = model.base_model(
            ids,
            attention_mask=mask,
            position_ids=positions[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=cache is not None,
        )
    return output.last_hidden_state[:, -last:].float()


def logits_of(lm: Model, states: Tensor) -> Tensor:
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


class ActorCritic(Module):
    """A policy and a value head, on the policy's trunk or on a critic's."""

    def __init__(self, lm: Model, critic: Model | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.tie_weights = lm.tie_weights  # accelerate calls it where it loads weights anew
        self.critic = None if critic is None else critic.base_model
        self.value_head = scalar_head(critic or lm)

    def forward(
        self, ids: Tensor, mask: Tensor, last: int = 1, cache: DynamicCache | None = None
    ) -> Pair:
        """Logits (b, last, V) and values (b, last), in fp32, at the last tokens of ids (b, T): see
        hidden_states. With a cache, which is for sampling, there are no values."""
        states = hidden_states(self.lm, ids, mask, last, cache)
        logits = logits_of(self.lm, states)
        if cache is not None:
            return logits, None
        if self.critic is not None:
            states = hidden_states(self.critic, ids, mask, last)
        return logits, self.value_head(states).squeeze(-1)


def micro_batches(rows: Tensor, token_rows: TokenRows, size: int) -> tuple:
    """Row numbers, in groups of up to `size` rows of similar length: less padding."""
    lengths = torch.tensor([len(token_rows[i]) for i in rows])
    return rows[lengths.argsort(stable=True)].split(size)


def forward_response(policy: Module, batch: Batch, rows: Tensor, temperature: float) -> Pair:
    """Log-probabilities (b, R, V) of all tokens at each step of the responses in these rows of the
    batch; and the policy's values (b, R)."""
    ids, mask = left_pad([batch.contexts[i] for i in rows])
    responses = batch.responses[rows, :-1]  # the last token predicts nothing
    ids = torch.cat([ids, responses], 1)
    mask = pad(mask, (0, responses.shape[1]), value=True)
    logits, values = policy(ids, mask, last=responses.shape[1] + 1)
    return logits.div_(temperature).log_softmax(-1), values  # in place, as V is large


def of_tokens(all_logprobs: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities (b, R) of tokens (b, R), among those of all (b, R, V)."""
    return all_logprobs.gather(2, tokens.unsqueeze(2)).squeeze(2)


def entropy(all_logprobs: Tensor) -> Tensor:
    """Entropies (b, R) of the distributions with these log-probabilities (b, R, V)."""
    return -(all_logprobs.exp() * all_logprobs).sum(-1)


def text_loss(policy: Module, texts: TokenRows) -> Pair:
    """Cross entropy of texts, summed, and the count of their predicted tokens: PPO-ptx (Ouyang
    et al. 2022, arXiv:2203.02155)."""
    ids, mask = left_pad(texts)
    logits, _ = policy(ids, mask, last=ids.shape[1])
    logprobs = of_tokens(logits[:, :-1].log_softmax(-1), ids[:, 1:])
    has_context = mask[:, :-1]  # else the token is a text's first, or padding
    return -(logprobs * has_context).sum(), has_context.sum()


# --- models ---------------------------------------------------------------------------------------
def set_up_backend(dtype: str) -> None:
    """Settings for speed, which change results only by rounding."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # make glibc keep freed memory: saves 10 % of the time
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: none
    if PartialState().device.type == "cpu":
        torch.set_float32_matmul_precision("medium")  # faster, but oneDNN may use bf16
        x = torch.randn(256, 256)
        exact = x.double() @ x.double()
        if (x @ x - exact).abs().max() > 1e-4:  # too coarse, as on some CPUs
            torch.set_float32_matmul_precision("highest")
    elif dtype == "bf16":
        torch.set_float32_matmul_precision("high")  # TF32 for the heads, which stay in fp32


def find(name: str) -> str:
    """The local path of a file or folder, which may be beside this script, or which is downloaded
    for hf://datasets/owner/name/file. Any other name is a hub id, and is returned as it is."""
    if match := re.fullmatch("hf://datasets/([^/]+/[^/]+)/(.+)", name):
        return hf_hub_download(*match.groups(), repo_type="dataset")
    for path in (Path(name).expanduser(), FILE.parent / name):
        if path.exists():
            return str(path.absolute())
    if re.search(r"(?i)^([./~]|tiny/)|\.(jsonl?|csv|parquet|txt|gz)$", name):
        raise FileNotFoundError(f"there is no such file or folder, here or in {FILE.parent}")
    return name


@contextlib.contextmanager
def as_user_error(flag: str, args: Args) -> Iterator[None]:
    """Makes any error in its block a UserError with the flag, its value, and the cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # The cause of a library's error often says more than the error.
        cause = error if isinstance(error, ValueError) else error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or repr(cause)
        raise UserError(f"--{flag} {getattr(args, flag)}: {reason}") from error


def load_tokenizer(flag: str, args: Args) -> Tokenizer:
    """The tokenizer of the model that the flag names."""
    with as_user_error(flag, args):
        tokenizer = AutoTokenizer.from_pretrained(
            find(getattr(args, flag)), trust_remote_code=False
        )
        if len(tokenizer) < 2:  # if there is none, transformers makes up an empty one
            raise ValueError("has no tokenizer")
        return tokenizer


@torch.no_grad()
def load_model(
    auto_class: type, flag: str, args: Args, tokenizer: Tokenizer, longest: int, **config: object
) -> Model:
    """The model that the flag names, in fp32, and in eval mode: without dropout, as the original.
    `config` replaces values of its config; if there is any, the head may be a new one."""
    device = PartialState().device
    attention = "eager" if device.type == "cpu" else "sdpa"  # the faster ones
    how = {
        "dtype": torch.float32,
        "attn_implementation": attention,
        "use_safetensors": True,
        "trust_remote_code": False,  # None would ask
        "output_loading_info": True,
    } | config
    set_verbosity_error()  # what it warns of is checked here
    with as_user_error(flag, args):
        name = find(getattr(args, flag))
        if os.path.exists(f"{name}/adapter_config.json"):
            raise ValueError("is an adapter: merge it first (peft's merge_and_unload)")
        model, info = auto_class.from_pretrained(name, **how)
        # Unexpected weights of a layer (`h.3.`) are wrong; those of an unused head are not.
        wrong = {key for key in info["unexpected_keys"] if re.search(r"\.\d+\.", key)}
        if not config:
            wrong |= info["missing_keys"]
        if wrong:
            raise ValueError(f"its config and its weights do not agree on {min(wrong)}")
        for module in model.to(device).modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # else a pad that is also the eos gets no gradient
            if type(getattr(module, "act", None)).__name__ == "NewGELUActivation":
                module.act = nn.GELU(approximate="tanh")  # the same as one kernel, not eight
        check_model(model, tokenizer, longest)
    # hidden_states reads this attribute of ours. It is for the trunk alone, because heads stay in
    # fp32: rounding to bf16 moves a logit of about 100 by up to 0.25.
    model.base_model.is_autocast = args.dtype == "bf16"
    return model


def check_model(model: Model, tokenizer: Tokenizer, longest: int) -> None:
    """Raises ValueError for a model with too few embeddings or too short a window, for a classifier
    with several labels, or a model whose output for a padded text, read through a cache as RLOO's
    Actor does, is not what transformers gives for the text alone."""
    num_embeddings = model.get_input_embeddings().num_embeddings
    top_token = max(tokenizer.get_vocab().values())
    if top_token >= num_embeddings:
        raise ValueError(f"has {num_embeddings} embeddings for token {top_token}")
    window = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if longest > window:
        raise ValueError(f"has a window of {window} for {longest} tokens")

    model.base_model.is_autocast = False
    text = [i % num_embeddings for i in range(longest)]
    # Rows 3 and 4 are shorter, so padded. All but the last token are read once for two rows, as for
    # two responses to a query; the result of row 4 should be that of its text alone.
    ids, mask = left_pad(2 * [text] + 2 * [text[1:]])
    alone = ids[-1:, 1:]  # without its padding
    plain = model.base_model(alone).last_hidden_state[:, -1:]
    cache = DynamicCache(config=model.config)
    hidden_states(model, ids[::2, :-1], mask[::2, :-1], 1, cache)
    cache.batch_repeat_interleave(2)  # fails for recurrent layers
    ours = hidden_states(model, ids[:, -1:], mask, 1, cache)[-1:]
    if not hasattr(model, "score"):
        ours = logits_of(model, ours)
        plain = model(alone).logits[:, -1:]
    elif model.config.num_labels > 1:
        raise ValueError("has several labels: use a --reward_fn")
    off = (ours - plain).abs().max() / plain.std()
    if not off < 1e-3:
        raise ValueError(f"is off by {off:.2g} with padding and a cache: not supported")


def scalar_head(model: Model) -> nn.Linear:
    """A new linear layer from states (..., d) to (..., 1). For a classifier it computes the reward,
    gain * logit + bias; train_reward.py wrote both numbers to config.json. With --critic reward it
    is the value head at the start. For any other model it is a value head that starts at 0."""
    old_head = getattr(model, "score", model.get_output_embeddings())
    head = nn.Linear(old_head.in_features, 1, device=model.device)
    for p in head.parameters():
        nn.init.zeros_(p)
    if hasattr(model, "score"):
        head.weight.data.add_(model.score.weight, alpha=getattr(model.config, "reward_gain", 1.0))
        head.bias.data.add_(getattr(model.config, "reward_bias", 0.0))
    return head


def load_policy_and_reference(
    args: Args, tokenizer: Tokenizer, longest: int
) -> tuple[Model, Model]:
    """Two models from --base_model, on this process's device: the policy, and the reference, which
    is frozen. They share the weights that are not trained."""
    lm = load_model(AutoModelForCausalLM, "base_model", args, tokenizer, longest)
    add_adapters(lm, args)
    freeze_lower_layers(lm, args)
    shared = {id(p): p for p in lm.parameters() if not p.requires_grad}
    # `shared` is deepcopy's memo: it takes the weights in it as they are, and copies all others.
    # So are LoRA's adapters, and at the start they add 0.
    ref_lm = copy.deepcopy(lm, shared).requires_grad_(False)
    if args.unfrozen_layers == 0:  # else it shares layers with the policy, which is saved in fp32
        hold_in_bf16(ref_lm, args)
    return lm, ref_lm


def add_adapters(model: Model, args: Args) -> None:
    """With --lora_rank the weights are frozen, and LoRA adapters (Hu et al. 2021, arXiv:2106.09685)
    on all linear layers but the head are trained; in train_reward.py the head, too."""
    if args.lora_rank:
        with as_user_error("lora_rank", args):
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


def freeze_lower_layers(model: Model, args: Args) -> None:
    """With --unfrozen_layers only these layers and the modules after them (the last norm, an untied
    head) are trained, as in trlX's hydra. A head that is tied to the embeddings, as GPT-2's is,
    stays frozen with them."""
    if args.unfrozen_layers:
        trunk = model.get_decoder()  # without the images' part of a model that has one
        layers = next(x for x in trunk.modules() if isinstance(x, nn.ModuleList))
        with as_user_error("unfrozen_layers", args):
            first_trained = next(layers[-args.unfrozen_layers].parameters())
        for p in model.parameters():
            if p is first_trained:
                break
            p.requires_grad_(False)


def hold_in_bf16(model: Model, args: Args) -> None:
    """With --dtype bf16 frozen linear layers take half the memory. autocast would round them to
    bf16 anyway. Biases, the head, and what it leaves alone (embeddings, norms) stay in fp32."""
    for module in model.base_model.modules():
        is_frozen = isinstance(module, nn.Linear | Conv1D) and not module.weight.requires_grad
        if is_frozen and args.dtype == "bf16":
            module.weight.data = module.weight.bfloat16()  # the bias is not: Falcon adds it apart


def load_reward(args: Args, preset: str, tokenizer: Tokenizer, longest: int) -> Callable:
    """A function from (queries, responses) to what score_by_model returns, made of --reward_fn,
    --reward_model, or the newest reward model that train_reward.py made for the preset."""
    if args.reward_fn:
        sys.path.insert(0, os.getcwd())
        with as_user_error("reward_fn", args):
            function = pkgutil.resolve_name(args.reward_fn)
            inspect.signature(function)  # fails, if it is no function
        return functools.partial(score_by_function, function, tokenizer, args)

    if args.reward_model is None:
        found = Path.cwd().glob(f"runs/train_reward-{preset}-*/reward_model")
        newest = max(found, key=os.path.getmtime, default=None)
        if newest is None:
            raise UserError(f"--reward_model None: `python train_reward.py {preset}` makes one")
        args.reward_model = str(newest)  # args.json will name it
        logger.warning(f"--reward_model {newest}, the newest")
    vocabulary = load_tokenizer("reward_model", args).get_vocab()
    with as_user_error("reward_model", args):
        if vocabulary != tokenizer.get_vocab():  # an encoder, for example: DeBERTa
            raise ValueError("has another tokenizer than --base_model: use a --reward_fn")
    model = load_model(AutoClassifier, "reward_model", args, tokenizer, longest)
    hold_in_bf16(model.requires_grad_(False), args)
    return functools.partial(score_by_model, model, args)


# --- data -----------------------------------------------------------------------------------------
PADDING = 50259  # pads the rows of token ids in OpenAI's label files; GPT-2 has no such token


def token_id(flag: str, tokenizer: Tokenizer, args: Args) -> int | None:
    """The one token that the flag's text is (`eos`: the tokenizer's end of sequence)."""
    text = getattr(args, flag)
    if text is None:
        return None
    known = tokenizer.get_vocab() | {"eos": tokenizer.eos_token_id}
    # Not encode alone: Llama 2's tokenizer puts a space before a text, and `.` gives another token.
    ids = [known[text]] if text in known else tokenizer.encode(text, add_special_tokens=False)
    # GPT-2's vocabulary has é as the name of a byte, half of an é: decoded it is no character.
    if len(ids) != 1 or None in ids or "\ufffd" in tokenizer.decode(ids):
        raise UserError(f"--{flag} {text!r} must be one token, but is tokens {ids}")
    return ids[0]


def cut_query(
    tokens: list[int], length: int, start: int | None, end: int | None, long: str
) -> tuple[list[int], str]:
    """The query in these tokens (lm_human_preferences/language/datasets.py): what comes after the
    first `start` (all, if that is the last token), truncated to `length` (or as `long` says), then
    cut back to the last `end`, which stays. Returns the query and, in case it is [], the reason."""
    if start is not None:
        if start not in tokens:
            return [], "without --start_text"
        tokens = tokens[tokens.index(start) + 1 :] or tokens
    if len(tokens) > length:
        if long == "drop":
            return [], "longer than --query_length"
        tokens = tokens[:length] if long == "keep_start" else tokens[-length:]
    if end is not None:
        if end not in tokens:
            return [], "without --end_text"
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)]
    return tokens, "without text"


def bos(tokenizer: Tokenizer) -> list[int]:
    """The token that every text begins with, as Llama's and Gemma's tokenizers have it, or []."""
    first = tokenizer("").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def encode(
    value: object, tokenizer: Tokenizer, ids_tokenizer: Tokenizer | None = None
) -> list[int]:
    """Token ids, without BOS, of a text, a chat (list of messages) or a padded row of token ids; []
    for anything else. A row of ids is ids_tokenizer's, if it is given."""
    kind = type(value[0]) if isinstance(value, list) and value else None
    tokens = []
    if kind is int:
        size = len(ids_tokenizer or tokenizer)
        tokens = [token for token in value if token != PADDING or PADDING < size]
        if not all(type(token) is int and 0 <= token < size for token in tokens):
            raise ValueError("has token ids of another model: use --token_ids_of")
        if ids_tokenizer is not None:
            value = ids_tokenizer.decode(tokens)
    if kind is dict:
        is_begun = value[-1]["role"] == "assistant"
        value = tokenizer.apply_chat_template(
            value,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        )
    if isinstance(value, str):
        tokens = tokenizer(value, add_special_tokens=False).input_ids
    return tokens[1:] if tokens[:1] == bos(tokenizer) else tokens


def load_ids_tokenizer(tokenizer: Tokenizer, args: Args) -> Tokenizer | None:
    """The tokenizer of --token_ids_of, unless it has the same ids as the given one."""
    if args.token_ids_of is None:
        return None
    other = load_tokenizer("token_ids_of", args)
    return other if other.get_vocab() != tokenizer.get_vocab() else None


def load_table(flag: str, args: Args) -> datasets.DatasetDict:
    """The splits of the file, the folder, or the hub's owner/name[:config] that the flag names."""
    with as_user_error(flag, args):
        name = find(getattr(args, flag))
        path = Path(name)
        where = [name] if path.exists() else name.split(":")
        if path.is_file():
            where = [str(path.parent), None, None, glob.escape(name)]  # the last: data_files
        elif glob.has_magic(name):
            raise ValueError("datasets takes this path for a pattern: rename its folders")
        splits = datasets.load_dataset(*where)
        if "train" not in splits:
            raise ValueError(f"has splits {list(splits)}, but no `train`")
        return splits


def load_queries(flag: str, tokenizer: Tokenizer, args: Args, need: int) -> list[Query]:
    """Up to `need` queries of the flag's table, in an order drawn from --seed."""
    ids_tokenizer = load_ids_tokenizer(tokenizer, args)
    begin = bos(tokenizer)
    prefix = encode(args.query_prefix, tokenizer)
    suffix = encode(args.query_suffix, tokenizer)
    start = token_id("start_text", tokenizer, args)
    end = token_id("end_text", tokenizer, args)
    long = args.long_queries or ("drop" if end is None else "keep_start")
    queries = []
    left_out = Counter()
    table = load_table(flag, args)["train"].shuffle(generator=np.random.default_rng([args.seed, 2]))
    with as_user_error(flag, args):
        names = "query prompt messages text article content".split()
        found = [name for name in names if name in table.column_names]
        if not found:
            raise ValueError(f"none of its columns {table.column_names} is one of {names}")
        for row in table:
            tokens = encode(row[found[0]], tokenizer, ids_tokenizer)
            query, why_not = cut_query(tokens, args.query_length, start, end, long)
            if query:
                queries.append(Query(begin + query, begin + prefix + query + suffix, row))
            else:
                left_out[why_not] += 1
            if len(queries) == need:
                break
        if not queries:
            raise ValueError(f"has 0 queries; left out: {dict(left_out)}")
    if left_out:
        logger.warning(f"--{flag} {getattr(args, flag)}: left out {dict(left_out)}")
    logger.warning(f"--{flag}: {len(queries)}, first {tokenizer.decode(queries[0].context)!r}")
    return queries


# --- the run's folder -----------------------------------------------------------------------------
# What a resumed run may change. Anything else would make two experiments of one run.
CHANGEABLE = "resume output_dir track checkpoint_every eval_every max_kl total_episodes"
CHANGEABLE += " micro_batch_size lr critic_lr"
OWN_FILES = "policy ema critic reward_model checkpoints metrics.jsonl samples.jsonl results.json"


def validated(values: dict) -> Args:
    """Args with these values; UserError for one that is not what its type says."""
    try:
        return pydantic.TypeAdapter(Args).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{first['loc'][0]} {first['input']}: {first['msg']}") from error


def read_old_run(args: Args) -> tuple[str, Args] | None:
    """Preset and settings of this script's run in --output_dir, if there is one."""
    path = Path(f"{args.output_dir}/args.json").expanduser()
    if not path.exists():
        return None
    with as_user_error("output_dir", args):
        old_run = json.loads(path.read_text())
        if old_run["script"] != FILE.stem:
            raise ValueError(f"has a run of {old_run['script']}.py")
        return old_run["preset"], validated(old_run["args"])


def resolve_args(preset: str, args: Args) -> Args | None:
    """A checked copy of the settings, with the run's folder. None if the run in it is finished;
    UserError if these settings cannot continue that run."""
    args = validated(vars(args))
    default = f"runs/{FILE.stem}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    # All processes take the first one's folder: their clocks differ.
    folder = Path(broadcast_object_list([args.output_dir or default])[0]).expanduser().absolute()
    args.output_dir = str(folder)
    old_run = read_old_run(args)
    is_finished = (folder / "samples.jsonl").exists()
    with as_user_error("output_dir", args):
        if old_run is None:
            if any((folder / name).exists() for name in OWN_FILES.split()):
                raise ValueError("has files of a run, but no args.json")
            return args
        _, old_args = old_run
        if not args.resume:
            raise ValueError("has a run: --resume, or another folder")
        for name, old in vars(old_args).items():
            new = getattr(args, name)
            if new == old or name == "resume":
                continue
            if name not in CHANGEABLE.split():
                raise ValueError(f"was started with --{name} {old}, not {new}")
            logger.warning(f"--resume: {name} {new} (was {old})")
            is_finished &= name != "total_episodes" or new < old  # with more it goes on
    if is_finished:
        logger.warning(f"the run in {folder} is finished")
        return None
    return args


def check_settings(args: Args, divisor: int) -> None:
    """UserError for settings that do not go together."""
    if args.batch_size % divisor:
        raise UserError(
            f"--batch_size {args.batch_size} must be a multiple of {divisor} "
            "(processes x minibatches x RLOO's responses per query)"
        )
    if args.truncate_token and args.truncate_after >= args.response_length:
        raise UserError(f"--truncate_after {args.truncate_after} is behind the response's end")
    if bool(args.ptx_coef) != bool(args.ptx_dataset):
        raise UserError("--ptx_coef and --ptx_dataset need each other")
    if args.reward_fn and args.reward_model:
        raise UserError("--reward_fn goes without --reward_model")


def check_critic_settings(args: Args, num_updates: int) -> None:
    """UserError for settings of the critic that do not go together."""
    if args.critic_warmup >= num_updates:
        raise UserError(f"--critic_warmup {args.critic_warmup}: there are {num_updates} updates")
    if args.value_after_end and not args.mask_truncated:
        raise UserError("--value_after_end needs --mask_truncated")
    if args.critic == "reward" and args.reward_fn:
        raise UserError("--critic reward needs a --reward_model, not a --reward_fn")


@contextlib.contextmanager
def lock_and_signals(args: Args) -> Iterator[list]:
    """Creates the run's folder and holds its lock. Yields a list that collects SIGINT and SIGTERM:
    the loop stops when it has one. A second signal of the same kind ends the process at once."""
    signals = []
    handlers = {}

    def note(number, frame):
        signals.append(number)
        signal.signal(number, handlers[number])

    lock = FileLock(f"{args.output_dir}/lock")
    if PartialState().is_main_process:
        with as_user_error("output_dir", args):
            lock.acquire(blocking=False)  # makes the folder, too
    with contextlib.suppress(ValueError):  # signal.signal raises it in any thread but the main one
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        lock.release()


def checkpoints(args: Args) -> list[Path]:
    """state.json of every complete checkpoint, checkpoints/<updates made>, the newest last."""
    return sorted(Path(args.output_dir).glob(f"checkpoints/{7 * '[0-9]'}/state.json"))


def open_run(accelerator: Accelerator, preset: str, args: Args, state: dict) -> None:
    """Writes args.json, starts the tracker, and removes samples.jsonl, the mark of a finished run.
    If there is a checkpoint, loads it and its `state`, and cuts the log back to that."""
    resolve_args(preset, args)  # again: another run may have used the folder since
    folder = Path(args.output_dir)
    samples = folder / "samples.jsonl"
    log = folder / "metrics.jsonl"
    state |= {"processes": accelerator.num_processes, "wandb_id": os.urandom(4).hex()}
    with as_user_error("output_dir", args):
        for newest in checkpoints(args)[-1:]:  # one or none
            saved = json.loads(newest.read_text())
            if saved["processes"] != state["processes"]:  # shuffles are per process
                raise ValueError(f"is a run of {saved['processes']} processes: use as many")
            accelerator.load_state(str(newest.parent))
            state |= saved
    if samples.exists() and state["update"] == 0:
        raise UserError(f"--total_episodes: the run in {folder} has no checkpoint to go on from")
    if args.track:
        wandb = {"id": state["wandb_id"], "name": folder.name, "resume": "allow"}
        with as_user_error("track", args):
            accelerator.init_trackers("rlhf", vars(args), {"wandb": wandb})
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with as_user_error("output_dir", args):
            samples.unlink(missing_ok=True)
            about = {"script": FILE.stem, "preset": preset, "args": vars(args)}
            write(folder / "args.json", json.dumps(about, indent=2))
            log.touch()
            lines = log.read_bytes().splitlines(keepends=True)
            os.truncate(log, sum(map(len, lines[: state["update"]])))  # later lines go


def save_checkpoint(accelerator: Accelerator, state: dict, args: Args) -> None:
    """Writes checkpoints/<updates made>: accelerate saves the weights, their averages (--ema) and
    the optimizer; then state.json has `state`. Only the newest two checkpoints are kept. No random
    state is needed: the uniforms follow from seed, update and row, and main draws the shuffles
    again from the start."""
    path = Path(f"{args.output_dir}/checkpoints/{state['update']:07d}")
    with as_user_error("output_dir", args):
        accelerator.save_state(str(path))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.sync()
            write(path / "state.json", json.dumps(state))
            for old in checkpoints(args)[:-2]:
                shutil.rmtree(old.parent)


def write(path: Path, text: str) -> None:
    """Writes the file so that it is there as a whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


def save_policy(policy: Module, weights: dict, tokenizer: Tokenizer, parent: str) -> None:
    """Writes Hugging Face folders of the policy's models, policy/ and critic/; each head is a file
    in the folder of the model before it."""
    folder = parent
    for part, module in policy.named_children():
        own = {name: weights[f"{part}.{name}"] for name, _ in module.named_parameters()}
        # Some models have buffers that are saved: Gemma 4's scales, the router's bias in DeepSeek.
        own |= {name: x for name, x in module.named_buffers() if f"{part}.{name}" in weights}
        if isinstance(module, Model):
            folder = f"{parent}/policy" if part == "lm" else f"{parent}/{part}"
            module.save_pretrained(folder, state_dict=own)
            tokenizer.save_pretrained(folder)
        else:
            save_file(own, f"{folder}/{part}.safetensors")


def show_samples(
    accelerator: Accelerator, before: pd.DataFrame, after: pd.DataFrame, args: Args
) -> None:
    """Writes samples.jsonl, a run's last file; prints three of them, and the mean scores."""
    samples = before.join(after.drop(columns="query").add_suffix("_after"))
    if args.track:
        accelerator.get_tracker("wandb").log_table("samples", dataframe=samples)
    path = Path(f"{args.output_dir}/samples.jsonl")
    with as_user_error("output_dir", args):
        write(path, samples.to_json(orient="records", lines=True, double_precision=15))
    names = ["query", "response", "response_after"]
    table = Table(*names, show_lines=True)
    for texts in samples[names].drop_duplicates("query").head(3).itertuples(index=False):
        table.add_row(*map(Text, texts))
    rich.print(
        table,
        f"mean score {before.score.mean():.2f} before, {after.score.mean():.2f} after; see {path}",
    )


# --- entry point ----------------------------------------------------------------------------------
def parse_args() -> tuple[str, Args]:
    """Name of the preset (`tiny` if a flag comes first) and Args: preset < args.json < flags."""
    # For tyro, which reads None but not none: `--flag none` and `--flag=none` are changed.
    words = [re.sub("^(--[^=]+=)?none$", r"\1None", word) for word in sys.argv[1:]]
    preset = "tiny"
    if words and not words[0].startswith("-"):
        preset = words.pop(0)
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}, but {', '.join(PRESETS)}")
    default = tyro.cli(Args, args=shlex.split(PRESETS[preset]))
    args = tyro.cli(Args, default=default, args=words)
    if not args.resume:
        return preset, args
    if args.output_dir is None:
        raise UserError("--resume needs an --output_dir")
    old_run = read_old_run(args)
    if old_run is None:
        return preset, args
    old_preset, old_args = old_run
    if preset not in ("tiny", old_preset):
        raise UserError(f"--output_dir {args.output_dir} has a run of the preset {old_preset}")
    old_args.reward_fn = None  # code is run only if it is named again
    return old_preset, tyro.cli(Args, default=old_args, args=words)


def one_line(error: Exception) -> str:
    """The line to print for an error, or "" if its traceback should be shown."""
    if isinstance(error, UserError):
        return str(error)
    if re.search("out of memory|can't allocate memory", str(error)):
        return (
            "out of memory: try a smaller --micro_batch_size; "
            "in PPO and RLOO --batch_size and --eval_queries, too"
        )
    if re.search("(closed|reset) by peer", str(error)):
        return "another process has ended"
    return ""


if __name__ == "__main__":
    try:
        main(*parse_args())
    except (UserError, RuntimeError) as error:
        line = one_line(error)
        if not line or os.environ.get("RLHF_DEBUG"):
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(2)  # when one ends, the launcher ends all: let the first print
        sys.stderr.write(f"{FILE.name}: {line}\n")
        raise SystemExit(130 if isinstance(error, Interrupted) else 2) from None
