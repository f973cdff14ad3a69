"""A reward model from human comparisons, in one file.

A language model with a scalar head learns which of N responses to a query people like best. It is
trained for one epoch on the loss -log softmax(reward_1, ..., reward_N)[best], which for a pair is
-log sigmoid(chosen - rejected). The reward is gain * logit + bias. These two are set so that the
rewards of the reference policy's samples have mean 0 and deviation 1: before the training, to begin
at a sensible scale, and after it, because training moves them. "The original" is OpenAI's
lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593). The tests replay recordings of it.

    python train_reward.py                                         # tiny model and data
    accelerate launch --num_processes 8 train_reward.py sentiment  # eight GPUs share --batch_size

A table of labels has the columns query, sample0, sample1, ... (token ids or texts) and best, the
number of the sample that people liked best, from 0; or chosen, rejected and perhaps prompt (texts
or messages). The result, reward_model/, is a Hugging Face folder of a classifier, which gives the
logit; gain and bias are reward_gain and reward_bias of its config.json.

A function (except main) that appears in more than one of ppo_rlhf.py, rloo_rlhf.py and
train_reward.py is identical in all of them: what seems out of place here is needed there.

Shapes: b labels in a micro-batch, N responses in each (b N rows, label by label), B rows of any
kind, R tokens in a response, T in a row, V in the vocabulary, d hidden units.
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
import ctypes
import glob
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
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
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import cross_entropy, pad
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
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "rlhf"  # Name of the W&B project

    # models
    base_model: str = "tiny/model"  # Reward model and reference start from it: a folder or hub id
    # tf32: GPUs multiply matrices in TF32. bf16: autocast, and frozen linear layers held in bf16
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    # Recompute activations in the backward pass: less memory, a third more time
    gradient_checkpointing: bool = False

    # the task

    # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config] on the hub
    label_dataset: str = "tiny/labels"
    # Train on the first so many rows of `train` (None: all). Held out are `test`, or else the rest
    num_labels: PositiveInt | None = None
    eval_labels: PositiveInt = 512  # Evaluate at most this many held-out labels
    # Queries whose samples set gain and bias, loaded in any case; forms as for --label_dataset
    query_dataset: str = "tiny/queries"
    query_length: PositiveInt = 32  # Longest query, in tokens
    # What happens to longer queries (None: keep_start if there is an --end_text, else drop), and to
    # longer prompts of chosen and rejected (None: drop). Labels with sample0, ... are not cut
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None
    query_prefix: str | None = None  # Text before every query, not for the reward model
    query_suffix: str | None = None  # Text after every query, not for the reward model
    # One token: a query begins after its first occurrence; texts without it are dropped (None: off)
    start_text: str | None = "."
    end_text: str | None = "."  # One token: a query is cut back to its last occurrence (None: off)
    # Tokens sampled per response; chosen and rejected responses are cut to it
    response_length: PositiveInt = 24
    temperature: PositiveFloat = 0.7  # Divides logits: for sampling, log-probabilities, entropies
    # Only `eos` matters here: with it chosen and rejected responses end at their first eos
    truncate_token: str | None = "."
    # Samples that set gain and bias, before and after training (0: gain starts at 1, bias at 0)
    normalization_samples: NonNegativeInt = 512

    # updates and optimizer
    batch_size: PositiveInt = 8  # Comparisons per update, over all devices
    # Labels, or sampled rows, per pass on one device; gradients accumulate
    micro_batch_size: PositiveInt = 128
    lr: NonNegativeFloat = 2e-3  # Learning rate, see the schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # --lr decays to 0, or stays
    # Number n of warm-up updates: update i (from 0) uses lr * (i + 1) / (n + 1)
    lr_warmup: NonNegativeInt = 0
    # Adam as TensorFlow has it (original), or torch.optim.AdamW
    adam: Literal["tf", "torch"] = "tf"
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    adam_betas: tuple[float, float] = (0.9, 0.999)  # Decay rates of Adam's two averages
    weight_decay: NonNegativeFloat = 0.0  # Decoupled, as in AdamW; for matrices only
    max_grad_norm: PositiveFloat | None = None  # Gradients of a larger norm are scaled down to it


# Settings of OpenAI's launch.py, or of the scripts it starts. Queries in the label files are cut
# already: no start_text, no end_text.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
OPENAI = Args(base_model="gpt2", start_text=None, end_text=None)
BOOKS = replace(
    OPENAI, query_length=64, num_labels=4992, batch_size=32, micro_batch_size=64, lr=5e-5
)
POSTS = replace(
    OPENAI,
    query_length=500,
    long_queries="keep_start",
    query_suffix="\n\nTL;DR:",
    response_length=75,
    truncate_token="\n",
    num_labels=46_000,
    batch_size=16,
    micro_batch_size=4,
    lr=2.5e-5,
)
NEWS = replace(POSTS, query_prefix="Article:\n\n", temperature=0.5)


def with_files(preset: Args, name: str) -> Args:
    """The preset on one of OpenAI's label files; its queries are those to sample from, too."""
    return replace(preset, label_dataset=f"{FILES}/{name}", query_dataset=f"{FILES}/{name}")


PRESETS = {
    "tiny": Args(),
    "sentiment": with_files(BOOKS, "sentiment/offline_5k.json"),
    "descriptiveness": with_files(BOOKS, "descriptiveness/offline_5k.json"),
    "cnndm": with_files(NEWS, "cnndm/offline_60k.json"),
    "tldr": with_files(POSTS, "tldr/offline_60k.json"),
}


@dataclass
class Query:
    """A query of the table."""

    input_ids: list[int]  # as the reward model reads it
    context: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for PPO's and RLOO's --reward_fn


@dataclass
class Comparison:
    """A label: which of N responses to a query people liked best. A pair has N = 2."""

    query: list[int]
    responses: TokenRows  # N rows of token ids, not padded
    best: int  # index of the one that people liked best


def main(preset: str, args: Args) -> None:
    """Sets up and normalizes; trains and logs in a loop; normalizes again, evaluates and saves."""
    cpu = not torch.accelerator.is_available() or torch.backends.mps.is_available()  # MPS: no fp64
    accelerator = Accelerator(cpu=cpu, log_with="wandb", mixed_precision="no", dynamo_backend="no")
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says, as for the other two
    world = accelerator.num_processes
    rank = accelerator.process_index
    if args.batch_size % world or args.normalization_samples % world:
        raise UserError(
            f"--batch_size and --normalization_samples must be multiples of {world} (processes)"
        )
    choose_folder(preset, args)

    # data and models; most of what cannot run fails here, before anything is written
    tokenizer = load_tokenizer("base_model", args)
    labels, held_out = load_labels("label_dataset", args, tokenizer)
    # The first half is to normalize before the training, the second half after it.
    queries = load_queries("query_dataset", args, tokenizer, 2 * args.normalization_samples)
    # the longest text that a model reads
    longest = max(len(query.context) for query in queries) + args.response_length
    for label in labels + held_out:
        longest = max(longest, len(label.query) + max(map(len, label.responses)))
    ref_lm = load_model("base_model", args, AutoModelForCausalLM, tokenizer, longest)
    hold_in_bf16(ref_lm.requires_grad_(False), args)
    ref = Reference(ref_lm, args.dtype).to(accelerator.device)
    model = load_model("base_model", args, AutoClassifier, tokenizer, longest, num_labels=1)
    # The new head is normal, as the original's, and depends on the seed alone.
    set_seed(args.seed)
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    set_up_backend(args.dtype)  # after the models, which are checked in full fp32
    reward = RewardModel(model, args).to(accelerator.device)

    # 1. normalize on samples of the reference policy; when a run is resumed, its checkpoint's gain
    # and bias take the place of these
    if args.normalization_samples > 0:
        rewards = reference_rewards(accelerator, reward, ref, queries, 0, args)
        normalize(rewards, reward.gain, reward.bias)
    wrapped, optimizer = accelerator.prepare(reward, make_optimizer([reward], [], args))
    reward = accelerator.unwrap_model(wrapped)  # the same module, without DDP around it

    with Run(accelerator, preset, args) as run:
        order = np.random.RandomState(args.seed).permutation(len(labels))
        for update in run.updates(len(labels) // args.batch_size):
            # 2. train: one epoch; a single process has the original's order. Each process takes
            # every world-th label of a batch. An incomplete last batch is left out, but as in the
            # original it counts for the learning rate: tf_adam.py has the schedule.
            start = update * args.batch_size
            set_learning_rates(optimizer, update, start / len(labels), args)
            mine = [labels[i] for i in order[start : start + args.batch_size][rank::world]]
            records = reward_update(accelerator, wrapped, optimizer, mine, args)

            # 3. log; leave a checkpoint
            metrics = reduce_means(records)
            metrics["train/lr"] = optimizer.param_groups[0]["lr"]
            run.log(metrics, labels=args.batch_size)
            if not math.isfinite(metrics["train/gradient_norm"]):
                raise UserError("the gradient is not finite: a smaller --lr may help")
            run.end_update()

        # 4. normalize again
        if args.normalization_samples > 0:
            rewards = reference_rewards(accelerator, reward, ref, queries, 1, args)
            normalize(rewards, reward.gain, reward.bias)

        # 5. evaluate and save; all processes put the weights together
        samples = evaluate_labels(reward, held_out, tokenizer)
        statistics = {}
        for name in ("gain", "bias"):
            x = getattr(reward, name)
            statistics[name] = getattr(x, "full_tensor", x.detach)().item()  # FSDP may shard them
        if held_out:
            statistics["test/accuracy"] = samples.pop("is_hit").mean().item()
        accelerator.log(statistics)
        # After the statistics: FSDP may have normalized a gathered copy, which this discards.
        weights = accelerator.get_state_dict(wrapped)
        if rank == 0:
            save_reward_model(model, weights, statistics, tokenizer, args.output_dir)
        run.log_samples("samples", samples)  # the last file, which marks a finished run
        logger.warning(f"{statistics}, see {args.output_dir}")
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)  # without this gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def label_rewards(reward: Module, labels: list[Comparison]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (b, N) of the N responses to each query; the index of the best one, (b,); and whether
    it has the highest reward, (b,). Responses count up to their last token, not to a truncate token
    as in ppo_rlhf.py."""
    ids, mask = pad_rows([label.query for label in labels])
    responses = [response for label in labels for response in label.responses]
    rewards = reward(ids, mask, *pad_rows(responses, "right")).view(len(labels), -1)
    best = torch.tensor([label.best for label in labels], device=ids.device)
    return rewards, best, rewards.argmax(1) == best


def reward_update(
    accelerator: Accelerator,
    model: Module,
    optimizer: torch.optim.Optimizer,
    labels: list[Comparison],
    args: Args,
) -> list[dict]:
    """One optimizer step on the mean cross entropy of a batch. `labels` are this process's share of
    the batch, and all shares are equally large. Returns what is logged."""
    records = []
    model.train(args.gradient_checkpointing)  # it needs train mode; nothing has dropout
    groups = torch.arange(len(labels)).split(args.micro_batch_size)
    for rows in groups:
        sync = contextlib.nullcontext() if rows is groups[-1] else accelerator.no_sync(model)
        with sync:  # processes average gradients at the last micro-batch only
            rewards, best, is_hit = label_rewards(model, [labels[i] for i in rows])
            # -log softmax(rewards) at the best of N; for a pair -log sigmoid(chosen - rejected)
            losses = cross_entropy(rewards, best, reduction="none")  # (b,)
            accelerator.backward(losses.sum() / len(labels))
        metrics = {"train/loss": losses, "train/accuracy": is_hit}
        records.append(sums_over(torch.ones_like(losses), metrics))
    norm = clip_gradients(model, args.max_grad_norm)
    records.append(sums_over(torch.ones_like(norm), {"train/gradient_norm": norm}))
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return records


@torch.no_grad()
def normalize(rewards: Tensor, gain: Tensor, bias: Tensor) -> None:
    """Sets gain and bias so that these rewards, computed with the old ones, would have mean 0 and
    (biased) standard deviation 1: the original's rewards.py, set_reward_norm."""
    mean = rewards.mean().item()  # numbers, because gain and bias may be sharded tensors
    std = rewards.std(correction=0).item()
    if not std > 0:  # NaN raises, too
        raise UserError(f"--normalization_samples: the rewards have mean {mean}, deviation {std}")
    gain.div_(std)
    bias.sub_(mean).div_(std)


@torch.no_grad()
def reference_rewards(
    accelerator: Accelerator,
    reward: Module,
    ref: Module,
    queries: list[Query],
    draw: int,
    args: Args,
) -> Tensor:
    """One reward for each of --normalization_samples, which the reference samples: in the order of
    the processes. Samples are not truncated, and are scored at their last token. Draw 0 is before
    the training, 1 after: each has its own queries and uniforms."""
    total = args.normalization_samples
    mine = torch.arange(total).chunk(accelerator.num_processes)[accelerator.process_index]
    u = uniforms(args.seed, draw, total, args.response_length)
    rewards = []
    for rows in mine.split(args.micro_batch_size):
        asked = [queries[(draw * total + i) % len(queries)] for i in rows]
        contexts = [query.context for query in asked]
        responses, _ = sample(ref, contexts, u[rows.to(u.device)], args.temperature)
        ids, mask = pad_rows([query.input_ids for query in asked])
        rewards.append(reward(ids, mask, responses, responses >= 0))  # all of their tokens are real
    return accelerator.gather(torch.cat(rewards))


@torch.no_grad()
def evaluate_labels(reward: Module, labels: list[Comparison], tokenizer: Tokenizer) -> pd.DataFrame:
    """A row for each held-out label: its texts, which response is best, all rewards, and whether
    the best one has the highest. Every process evaluates all labels, since weights may be sharded,
    and one at a time, so that no query is padded."""
    rows = []
    for label in labels:
        rewards, _, is_hit = label_rewards(reward, [label])
        rows.append(
            {
                "query": tokenizer.decode(label.query),
                "responses": tokenizer.batch_decode(label.responses),
                "best": label.best,
                "rewards": rewards[0].tolist(),
                "is_hit": is_hit.item(),
            }
        )
    return pd.DataFrame(rows)


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


# --- rollout and scoring --------------------------------------------------------------------------
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


# --- forward passes -------------------------------------------------------------------------------
class Reference(Module):
    """A language model with the interface that sample() expects of a policy."""

    def __init__(self, lm: Model, dtype: str) -> None:
        super().__init__()
        self.lm = lm
        self.dtype = dtype

    def forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, None]:
        """Logits (B, 1, V) after ids, in fp32; and no values."""
        return lm_logits(self.lm, hidden_states(self.lm, ids, mask, 1, self.dtype, cache)), None


class RewardModel(Module):
    """reward = gain * logit + bias, with the logit of a classifier. normalize sets gain and bias;
    the gain is also trained with the weights, while the loss does not depend on the bias."""

    def __init__(self, lm: Model, args: Args) -> None:
        super().__init__()
        self.lm = lm
        self.dtype = args.dtype
        self.reads_once = not args.gradient_checkpointing  # checkpointing goes without caches
        self.gain = nn.Parameter(torch.ones(1, device=lm.device))
        self.bias = nn.Parameter(torch.zeros(1, device=lm.device))

    def forward(self, ids: Tensor, mask: Tensor, responses: Tensor, is_real: Tensor) -> Tensor:
        """Rewards (b N,), in fp32, read at the last token of each response. Queries (b, T) are
        padded on the left, responses (b N, R) on the right. A query is read once, into a cache; its
        N responses continue from there, and gradients flow back through the cache."""
        repeats = len(responses) // len(ids)  # N
        size = responses.shape[1]
        whole_mask = torch.cat([mask.repeat_interleave(repeats, 0), is_real], 1)
        if self.reads_once:
            cache = DynamicCache(config=self.lm.config)
            unused = hidden_states(self.lm, ids, mask, 1, self.dtype, cache).sum()
            cache.batch_repeat_interleave(repeats)
            states = hidden_states(self.lm, responses, whole_mask, size, self.dtype, cache)
            # With sharded weights (FSDP) every output of a forward pass must get a gradient. This
            # gives the query's last state a gradient of zero.
            states = states + 0 * unused
        else:
            whole = torch.cat([ids.repeat_interleave(repeats, 0), responses], 1)
            states = hidden_states(self.lm, whole, whole_mask, size, self.dtype)
        rows = torch.arange(len(responses), device=ids.device)
        last = states[rows, is_real.sum(1) - 1]
        return self.gain * self.lm.score(last).squeeze(1) + self.bias


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


def pad_rows(rows: TokenRows, side: str = "left") -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on one side, and a mask, which is False at padding."""
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    ids = ids.to(PartialState().device)
    return ids.clamp(min=0), ids >= 0


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


@names_flag
def load_labels(
    flag: str, args: Args, tokenizer: Tokenizer
) -> tuple[list[Comparison], list[Comparison]]:
    """Labels to train on, the first --num_labels of `train`, and held-out ones: the first
    --eval_labels of the split `test`, or else of the rest of `train`."""
    splits = load_table(getattr(args, flag))
    table = splits["train"]
    count = args.num_labels or len(table)
    if count > len(table):
        raise ValueError(f"--num_labels {count} is above its size {len(table)}")
    # A list, because select refuses an empty range that starts at the end of the table.
    rest = table.select(list(range(count, len(table))))
    held_out = splits.get("test", rest)
    held_out = held_out.select(range(min(args.eval_labels, len(held_out))))
    labels = read_labels(table.select(range(count)), tokenizer, args)
    if len(labels) < args.batch_size:
        raise ValueError(f"has {len(labels)} labels for --batch_size {args.batch_size}")
    first = tokenizer.batch_decode([labels[0].query, *labels[0].responses])
    logger.warning(f"--{flag}: {len(labels)}, first {first}, best is {labels[0].best}")
    return labels, read_labels(held_out, tokenizer, args)


def read_labels(table: datasets.Dataset, tokenizer: Tokenizer, args: Args) -> list[Comparison]:
    """Labels of a table in either format, but for those with an empty text or all responses equal;
    ValueError if that leaves out more than a tenth. A coin decides whether the chosen response
    comes first: if it always did, a model that gives equal rewards would be right (argmax)."""
    coins = np.random.default_rng([args.seed, 3]).integers(0, 2, len(table)).tolist()
    names = [f"sample{i}" for i in range(100) if f"sample{i}" in table.column_names]
    labels = []
    for row, coin in zip(table, coins, strict=True):
        if "chosen" in row and "rejected" in row:
            label = read_preference(row, coin, tokenizer, args)
        elif "query" in row and row.get("best") in range(len(names)):
            responses = [encode(row[name], tokenizer) for name in names]
            query = bos(tokenizer) + encode(row["query"], tokenizer)
            label = Comparison(query, responses, int(row["best"]))
        else:
            raise ValueError(f"has no query, sample0, .., best, nor chosen, rejected: {row}")
        is_whole = label.query and all(label.responses)
        if is_whole and any(x != label.responses[0] for x in label.responses):
            labels.append(label)
    if len(labels) < 0.9 * len(table):
        why = "a text is empty, the prompt is too long, or responses are equal"
        raise ValueError(f"{len(labels)} of {len(table)} labels are of use; in the others {why}")
    return labels


def read_preference(row: dict, coin: int, tokenizer: Tokenizer, args: Args) -> Comparison:
    """A label with N = 2 of a preference, whose chosen response goes to index `coin`. With
    --truncate_token eos a response ends at its first eos, and gets one if it has none; then it is
    cut to --response_length. A prompt above --query_length is dropped or cut (--long_queries; None:
    dropped); --start_text and --end_text are not used."""
    query, *responses = [encode(text, tokenizer) for text in preference_texts(row, tokenizer)]
    if args.truncate_token == "eos":
        end = token_id("truncate_token", tokenizer, args)
        # [*x, end].index(end) is the place of the first eos, or the length if there is none.
        responses = [x[: [*x, end].index(end)] + [end] for x in responses]
    responses = [x[: args.response_length] for x in responses]
    if coin:
        responses.reverse()
    kept = cut_query(query, args.query_length, None, None, args.long_queries or "drop")
    if query and not kept:
        responses = []  # read_labels leaves out a label without responses
    return Comparison(bos(tokenizer) + kept, responses, coin)


def preference_texts(row: dict, tokenizer: Tokenizer) -> list[str]:
    """Texts of prompt, chosen and rejected. If both answers begin with the prompt, even by chance,
    it is removed from them. Without a prompt column, and in chats, which are rendered by the
    tokenizer's template, the prompt is their common beginning, up to the end of a word. Examples:

        prompt    chosen         rejected      read as
        Hello     , you.         there         Hello | , you. | there
        Why?      Why? Because   Why? So       Why? | _Because | _So  (_: a space)
        None      Why? Because   Why? So       Why? | _Because | _So
    """
    prompt = row.get("prompt", row.get("query"))
    answers = [row["chosen"] or "", row["rejected"] or ""]  # an empty cell is null
    if isinstance(answers[0], list):
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        asked = prompt or []
        whole = [x if x[: len(asked)] == asked else [*asked, *x] for x in answers]
        answers = [tokenizer.apply_chat_template(x, tokenize=False) for x in whole]
        prompt = None
    if prompt is None:
        # The common beginning may end within a word: that piece is left to the answers.
        prompt = re.sub(r"(\s|\A)\S*\Z", "", os.path.commonprefix(answers))
    if not isinstance(prompt, str):
        raise ValueError("has a chat as a prompt, but texts as answers")
    if all(answer.startswith(prompt) for answer in answers):
        answers = [answer.removeprefix(prompt) for answer in answers]
    return [prompt, *answers]


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


def save_reward_model(
    model: Model, weights: dict, statistics: dict, tokenizer: Tokenizer, parent: str
) -> None:
    """Writes reward_model/, a Hugging Face folder, and results.json."""
    # transformers scores a text at its last token that is not padding. If eos were the padding, it
    # would skip an eos at the end. So then the folder names no padding token, and whoever loads it
    # with transformers scores one text at a time.
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = None
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.reward_gain = statistics["gain"]
    model.config.reward_bias = statistics["bias"]
    own = {name: weights[f"lm.{name}"] for name in model.state_dict()}
    model.save_pretrained(f"{parent}/reward_model", state_dict=own)
    tokenizer.save_pretrained(f"{parent}/reward_model")
    write(Path(f"{parent}/results.json"), json.dumps(statistics, indent=2))


# --- entry point ----------------------------------------------------------------------------------
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
