"""A reward model from human comparisons.

A language model with a scalar head learns which of N responses to a query people like best. It is
trained for one epoch on the loss -log softmax(reward_1, ..., reward_N)[best], which for a pair is
-log sigmoid(chosen - rejected). The reward is gain * logit + bias. Gain and bias are set so that
the rewards of the reference policy's samples have mean 0 and deviation 1: before the training, to
begin at a sensible scale, and after it, because training moves them. "The original" is OpenAI's
lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593). The tests replay recordings of it.

    python train_reward.py                                         # tiny model and data
    accelerate launch --num_processes 8 train_reward.py sentiment  # eight GPUs share --batch_size

A table of labels has the columns query, sample0, sample1, ... (token ids or texts) and best, the
number of the sample that people liked best, from 0; or chosen, rejected (texts or messages) and
perhaps a prompt. The result, reward_model/, is a Hugging Face folder of a classifier, which gives
the logit; gain and bias are reward_gain and reward_bias of its config.json.

tf_adam.py has what is not about RLHF: the optimizer and its learning rates, LoRA and bf16, the
processes, the run's folder. All else is here. A function (except main) that appears in more than
one of ppo_rlhf.py, rloo_rlhf.py and train_reward.py is identical in all of them, so some of its
branches may be unused here.

Shapes: b labels in a micro-batch, N responses in each (b N rows, label by label), B rows of any
kind, R tokens in a response, T in a row, V in the vocabulary, d hidden units.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.8,<2.14", "transformers>=5.17,<5.24", "datasets>=4", "accelerate>=1.10",
#     "tyro>=0.9.10", "wandb>=0.21", "numpy>=2", "safetensors>=0.8", "pandas>=2.2.2",
#     "pydantic>=2.6", "filelock>=3.13.1",
# ]
# ///

import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Literal
from zlib import crc32

import datasets
import numpy as np
import pandas as pd
import pydantic
import torch
import tyro
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, conint
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as AutoClassifier
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import ModelOutput

from tf_adam import (
    Cache,
    Run,
    UserError,
    averaging,
    choose_folder,
    clip_gradients,
    explained,
    hold_in_bf16,
    make_accelerator,
    make_optimizer,
    patch_layers,
    reduce_means,
    set_learning_rates,
    sums_over,
    whole,
    write,
)

FILE = Path(__file__).resolve()
TokenRows = list[list[int]]


@dataclass
class Args:
    """Settings of a run. A preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    # --help shows the comment beside a field, or else the lines right above it, up to a blank one.
    __pydantic_config__ = pydantic.ConfigDict(allow_inf_nan=False)

    # the run
    seed: conint(ge=0, lt=4_000_000_000) = 1  # Fixes data order, sampling and new weights
    output_dir: str | None = None  # Folder of the run (None: runs/<script>-<preset>-<seed>-<time>)
    # Continue the run in --output_dir (required), or start it if the folder has none
    resume: bool = False
    checkpoint_every: NonNegativeInt = 25  # Updates between checkpoints (0: only at the end)
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)

    # models
    base_model: str = "tiny/model"  # Reward model and reference start from it: a folder or hub id
    # tf32: GPUs multiply matrices in TF32. bf16: autocast, and frozen linear layers held in bf16
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    # Recompute activations in the backward pass: less memory, a third more time (RLOO and
    # train_reward.py: more than that, as each response reads its query again)
    gradient_checkpointing: bool = False

    # the task

    # A file (json, jsonl, csv, parquet, txt), a folder or a hub id, perhaps with :config:split
    label_dataset: str = "tiny/labels"
    # Train on this many first rows of `train` (None: all); `test`, or else the rest, is held out
    num_labels: PositiveInt | None = None
    eval_labels: PositiveInt = 512  # Evaluate at most this many held-out labels
    # Queries whose samples set gain and bias; forms as for --label_dataset
    query_dataset: str = "tiny/queries"
    query_length: PositiveInt = 32  # Longest query, in tokens
    # What happens to longer queries (None: keep_start if there is an --end_text, else drop), and to
    # longer prompts of chosen and rejected (None: drop). Labels with sample0, ... are not cut
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None
    query_prefix: str | None = None  # Text before every query, not for the reward model
    query_suffix: str | None = None  # Text after every query, not for the reward model
    # One token: a query begins after its first occurrence; texts without it are dropped (None: off)
    start_text: str | None = "."
    # One token: a query is cut back to its last occurrence, or dropped without one (None: off)
    end_text: str | None = "."
    # Tokens sampled per response; chosen and rejected responses are cut to it
    response_length: PositiveInt = 24
    temperature: PositiveFloat = 0.7  # Logits of tokens are divided by it
    # Chosen and rejected responses end after this token (`eos`: the tokenizer's, which is added if
    # it is missing; None: no token ends them). A special token ends samples, too
    truncate_token: str | None = "."
    truncate_after: NonNegativeInt = 16  # The token ends a response only at this index or later
    # Samples that set gain and bias, before and after training (0: gain starts at 1, bias at 0)
    normalization_samples: NonNegativeInt = 512

    # updates and optimizer
    batch_size: PositiveInt = 8  # Comparisons per update, over all devices
    # Labels (of N rows each), or sampled rows, per pass on a device; gradients accumulate
    micro_batch_size: PositiveInt = 128
    lr: NonNegativeFloat = 2e-3  # The highest learning rate, see --lr_schedule
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"  # --lr decays to 0, or stays
    # Number n of warm-up updates: update i (from 0) has the scheduled rate times (i + 1) / (n + 1)
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
    truncate_after=55,
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
    """A query in tokens, for its two readers, and its row in the table."""

    input_ids: list[int]  # as the reward model reads it
    context: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for PPO's and RLOO's --reward_fn


@dataclass
class Comparison:
    """A label: which of N responses to a query people liked best. A pair has N = 2."""

    query: list[int]
    responses: TokenRows  # N rows of token ids, not padded
    best: int  # index of the one that people liked best
    is_from_chat: bool = False  # whether a chat template made the query


def main(preset: str, args: Args) -> None:
    """Sets up and normalizes; trains and logs in a loop; normalizes again, evaluates and saves."""
    accelerator = make_accelerator(args.dtype)
    world = accelerator.num_processes
    rank = accelerator.process_index
    if args.batch_size % world or args.normalization_samples % world:
        raise UserError(
            f"--batch_size {args.batch_size} and --normalization_samples "
            f"{args.normalization_samples} must be multiples of {world} (processes)"
        )
    choose_folder(FILE, preset, args)

    # data and models; most of what cannot run fails here, before anything is written
    tokenizer = load_tokenizer("base_model", args)
    labels, held_out = load_labels("label_dataset", args, tokenizer)
    num_updates = len(labels) // args.batch_size
    if args.lr_warmup >= num_updates:
        raise UserError(f"--lr_warmup {args.lr_warmup} must be below {num_updates} updates")
    # The first half sets gain and bias before the training, the second half after it.
    queries = load_queries("query_dataset", args, tokenizer, 2 * args.normalization_samples)
    if args.normalization_samples and labels[0].is_from_chat != has_chat(queries[0].columns):
        # The reward model must learn from what PPO will ask.
        raise UserError("--label_dataset and --query_dataset: both need chats, or both texts")
    # the longest text that a model reads
    longest = max(len(query.context) for query in queries) + args.response_length
    for label in labels + held_out:
        longest = max(longest, len(label.query + max(label.responses, key=len)))
    ref_lm = load_model("base_model", args, AutoModelForCausalLM, tokenizer, longest)
    hold_in_bf16(ref_lm.requires_grad_(False), args)
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    ref = Reference(ref_lm.to(accelerator.device), num_tokens)
    model = load_model("base_model", args, AutoClassifier, tokenizer, longest)
    set_seed(args.seed)
    if "SequenceClassification" not in str(model.config.architectures):
        # --base_model is a language model. The new head is normal, as the original's, and depends
        # on the seed alone.
        nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    reward = RewardModel(model, args).to(accelerator.device)

    # 1. normalize on samples of the reference policy; when a run is resumed, its checkpoint's gain
    # and bias take the place of these. The original's samples are whole. But what follows a special
    # token, like an eos, has no meaning: there samples end.
    end = token_id("truncate_token", tokenizer, args)
    if end is not None and tokenizer.decode([end], skip_special_tokens=True):
        end = None  # an ordinary token
    if args.normalization_samples:
        normalize(reward, reference_rewards(accelerator, reward, ref, queries, 0, end, args))
    optimizer = make_optimizer(reward, args)
    # `wrapped` is what is trained: it averages gradients over processes. `reward` is inside.
    wrapped, optimizer = accelerator.prepare(reward, optimizer)
    reward = accelerator.unwrap_model(wrapped)
    # FSDP's modules have `reshard`: autocast must not keep bf16 copies of their gathered weights.
    torch.set_autocast_cache_enabled(not hasattr(wrapped, "reshard"))

    texts = [labels, [query.context for query in queries]]
    run = Run(accelerator, FILE, args, num_updates, {"data": crc32(str(texts).encode())})
    run.start()
    order = np.random.RandomState(args.seed).permutation(len(labels))
    for update in range(run.state["update"], num_updates):
        # 2. train for one epoch, in the original's order if there is one process. Each process
        # takes every world-th label of the batch. An incomplete last batch is skipped, but counts
        # in the learning-rate schedule (see tf_adam.py), as in the original.
        start = update * args.batch_size
        set_learning_rates(optimizer, update, start / len(labels), args)
        mine = [labels[i] for i in order[start : start + args.batch_size][rank::world]]
        records = reward_update(accelerator, wrapped, optimizer, mine, args)

        # 3. log; leave a checkpoint
        metrics = reduce_means(records)
        metrics["train/lr"] = optimizer.param_groups[0]["lr"]
        run.log(metrics)
        if update % 25 == 0:
            accelerator.print(f"update {update + 1} of {num_updates}: {metrics['train/loss']:.3f}")
        if not math.isfinite(metrics["train/gradient_norm"]):
            raise UserError("the gradient is not finite: a smaller --lr may help")
        run.end_update()

    # 4. normalize again
    if args.normalization_samples:
        normalize(reward, reference_rewards(accelerator, reward, ref, queries, 1, end, args))

    # 5. evaluate and save
    samples = evaluate_labels(reward, held_out, tokenizer)
    statistics = {
        "gain": whole(reward.gain).item(),
        "bias": whole(reward.bias).item(),
    }
    if held_out:
        statistics["test/accuracy"] = samples.pop("is_hit").mean().item()
    accelerator.log(statistics)
    # Only now: this may discard FSDP's gathered weights, and with them the new gain and bias, which
    # are saved from `statistics`. Every process calls it.
    weights = accelerator.get_state_dict(wrapped)
    if rank == 0:
        save_reward_model(model, weights, statistics, tokenizer, args.output_dir)
        text = samples.to_json(orient="records", lines=True, double_precision=15)
        write(run.folder / "samples.jsonl", text)  # the last file, which marks a finished run
    accelerator.print(f"{statistics}, see {args.output_dir}")
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)  # ends DDP, else gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def label_rewards(reward: Module, labels: list[Comparison]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (b, N) of the N responses to each query; the index of the best one, (b,); and whether
    it has the highest reward, (b,). Responses count up to their last token."""
    ids, mask = pad_rows([label.query for label in labels])
    # To pad responses on the right: reverse them, pad on the left, reverse back.
    turned = [response[::-1] for label in labels for response in label.responses]
    responses, is_real = (x.flip(1) for x in pad_rows(turned))
    rewards = reward(ids, mask, responses, is_real).view(len(labels), -1)
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
    groups = torch.arange(len(labels)).split(args.micro_batch_size)
    for rows in groups:
        with averaging(accelerator, model, is_last=rows is groups[-1]):
            rewards, best, is_hit = label_rewards(model, [labels[i] for i in rows])
            # -log softmax(rewards) at the best of N; for a pair -log sigmoid(chosen - rejected)
            losses = cross_entropy(rewards, best, reduction="none")  # (b,)
            accelerator.backward(losses.sum() / len(labels))
        metrics = {"train/loss": losses, "train/accuracy": is_hit}
        records.append(sums_over(torch.ones_like(losses), metrics))
    norm = clip_gradients(model, args.max_grad_norm)
    # With offloaded weights the norm is on the CPU, and the other records are not.
    records.append(sums_over(torch.ones_like(losses[0]), {"train/gradient_norm": norm}))
    optimizer.step()
    optimizer.zero_grad()
    return records


@torch.no_grad()
def normalize(reward: Module, rewards: Tensor) -> None:
    """Sets the model's gain and bias so that these rewards, computed with the old ones, would have
    mean 0 and (biased) standard deviation 1: the original's rewards.py, set_reward_norm."""
    mean = rewards.mean().item()  # numbers, because gain and bias may be sharded tensors
    std = rewards.std(correction=0).item()
    if not std > 0:  # NaN raises, too
        raise UserError(f"--normalization_samples: the rewards have mean {mean}, deviation {std}")
    reward.gain.div_(std)
    reward.bias.sub_(mean).div_(std)


@torch.no_grad()
def reference_rewards(
    accelerator: Accelerator,
    reward: Module,
    ref: "Reference",
    queries: list[Query],
    draw: int,
    end: int | None,
    args: Args,
) -> Tensor:
    """Rewards of --normalization_samples samples of the reference, gathered from all processes. A
    sample is scored where `end` ends it, as --truncate_after says, or else at its last token. Draw
    0 is before the training, 1 after it: with other uniforms, and other queries if there are
    enough."""
    total = args.normalization_samples
    mine = torch.arange(total).chunk(accelerator.num_processes)[accelerator.process_index]
    u = uniforms(args.seed, draw, total, args.response_length)
    rewards = []
    for rows in mine.split(args.micro_batch_size):
        asked = [queries[(draw * total + i) % len(queries)] for i in rows]
        contexts = [query.context for query in asked]
        responses, _ = sample(ref, contexts, u[rows], args.temperature)
        is_read, _ = truncate(responses, end, args.truncate_after)
        ids, mask = pad_rows([query.input_ids for query in asked])
        rewards.append(reward(ids, mask, responses, is_read))
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


# --- sampling -------------------------------------------------------------------------------------
# Each use of random numbers has its own stream, default_rng([seed, stream, ..]). So no use repeats
# the numbers of another.
SAMPLING, QUERIES, LABELS, ROWS = 1, 2, 3, 4


def uniforms(seed: int, draw: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, different ones for each `draw`: 0 for
    evaluations, 1, 2, ... for updates (train_reward.py: 0 before the training, 1 after). Processes
    take their rows of one array, so these numbers do not depend on how many processes there are.
    The same numbers give the same responses: to sample queries again, take another draw, for
    example num_updates + update + 1."""
    numbers = np.random.default_rng([seed, SAMPLING, draw]).random((batch, length), np.float32)
    return torch.from_numpy(numbers).to(PartialState().device)


@torch.no_grad()
def sample(
    policy: Module, contexts: TokenRows, u: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Responses (B, R) ~ softmax(logits / temperature) to B contexts, from uniforms u (B, R), and
    the log-probabilities of their tokens. All have R tokens; truncate finds their ends later."""
    cache = Cache(config=policy.lm.config)
    ids, mask = pad_rows(contexts)
    responses = []
    logprobs = []
    for column in u.split(1, 1):  # (B, 1), one for each token
        logits, _ = policy(ids, mask, cache=cache)
        probs = (logits[:, -1] / temperature).softmax(-1)  # (B, V)
        # From now on the model reads only the newest token: the cache has all before it.
        ids = inverse_cdf(probs, column)
        mask = pad(mask, (0, 1), value=True)
        responses.append(ids)
        logprobs.append(probs.gather(1, ids).log())
    return torch.cat(responses, 1), torch.cat(logprobs, 1)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (B, 1): where the cumulative distribution of probs (B, V) passes u (B, 1). The sum is
    in fp64: in fp32 the steps of rare tokens would be rounded away. (u has 24 bits, so what is far
    rarer than 6e-8 is still rounded.) For NaN, clamp gives the last token, and the run is stopped
    later."""
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
    # How many ends there are up to a token: 0 before the first end, where is_end is 0, and 1 at it.
    return is_end.cumsum(1) == is_end, is_end.any(1)


# --- forward passes -------------------------------------------------------------------------------
@dataclass
class Reference:
    """A language model with the interface that sample() expects of a policy."""

    lm: Model
    num_tokens: int

    def __call__(self, ids: Tensor, mask: Tensor, cache: Cache) -> tuple[Tensor, None]:
        """Logits (B, 1, V) after ids, in fp32; and no values."""
        logits = read(self.lm, ids, mask, cache, logits_to_keep=1).logits
        return logits[:, -1:, : self.num_tokens], None


class RewardModel(Module):
    """reward = gain * logit + bias, with the logit of a classifier. normalize sets gain and bias;
    the gain is also trained with the weights, while the loss does not depend on the bias."""

    def __init__(self, lm: Model, args: Args) -> None:
        super().__init__()
        self.lm = lm
        self.reads_once = not args.gradient_checkpointing  # else a layer would fill the cache twice
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor, mask: Tensor, responses: Tensor, is_real: Tensor) -> Tensor:
        """Rewards (b N,), in fp32, read at the last token of each response. Queries (b, T) are
        padded on the left, responses (b N, R) on the right."""
        n = len(responses) // len(ids)
        cache = None
        if self.reads_once:
            cache = read_queries(self.lm, ids, mask, n)
        else:
            responses = torch.cat([ids.repeat_interleave(n, 0), responses], 1)
        mask = torch.cat([mask.repeat_interleave(n, 0), is_real], 1)
        states = read(self.lm.base_model, responses, mask, cache).last_hidden_state
        rows = torch.arange(len(responses), device=ids.device)
        # negative, so it holds with and without the query
        last = is_real.sum(1) - is_real.shape[1] - 1
        return self.gain * self.lm.score(states[rows, last]).squeeze(1) + self.bias


def read_queries(
    model: Model, queries: Tensor, mask: Tensor, k: int, cache: Cache | None = None
) -> Cache:
    """A cache of queries (b, T) for the k texts that follow each: a query is read once, and its
    entries are repeated k times. Gradients flow through the cache."""
    if cache is None:
        cache = Cache(config=model.config)
    unused = read(model.base_model, queries, mask, cache).last_hidden_state
    # With sharded weights every output needs a gradient: add the unused states, times zero.
    cache.layers[0].keys = cache.layers[0].keys + 0 * unused.sum()
    cache.batch_repeat_interleave(k)
    return cache


def read(
    model: Model, ids: Tensor, mask: Tensor, cache: Cache | None = None, **options: int
) -> ModelOutput:
    """The output of a model, or of its trunk, for ids (B, T). With a cache, ids follow what is in
    it, and mask covers both. Positions count real tokens, as the original's do."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding has position 0, but is masked
    return model(
        ids,
        attention_mask=mask,
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    )


def pad_rows(rows: TokenRows) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on the left, and a mask, which is False at padding."""
    # At least 2 tokens: RLOO reads all but the last in a pass of its own. With FSDP either every
    # process makes this pass, or none.
    longest = max(2, *map(len, rows))
    padded = [[-1] * (longest - len(row)) + row for row in rows]
    ids = torch.tensor(padded, device=PartialState().device)
    return ids.clamp(min=0), ids >= 0


# --- models ---------------------------------------------------------------------------------------
def load_tokenizer(flag: str, args: Args) -> Tokenizer:
    """The tokenizer of the model that the flag names."""
    name = local_path(getattr(args, flag))
    with explained(f"--{flag} {name}"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


@torch.no_grad()
def load_model(
    flag: str, args: Args, auto_class: type, tokenizer: Tokenizer, longest: int
) -> Model:
    """The model that the flag names: on the CPU, in fp32, and in eval mode, so without dropout, as
    the original. If --base_model has no reward head, train_reward.py gives it a new one."""
    name = local_path(getattr(args, flag))
    what = f"--{flag} {name}"
    if flag != "base_model" and load_tokenizer(flag, args).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{what} has another tokenizer than --base_model: use a --reward_fn")
    head = "lm_head"
    options = {}
    if auto_class is AutoClassifier:
        head = "score"
        options["num_labels"] = 1
    if PartialState().device.type == "cpu":
        options["attn_implementation"] = "eager"  # the faster one; on a GPU transformers chooses
    with explained(what):
        model, info = auto_class.from_pretrained(
            name,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,  # None would ask
            ignore_mismatched_sizes=True,  # they are refused below
            output_loading_info=True,
            **options,
        )
    if hasattr(model, "peft_config"):
        raise UserError(f"{what} is an adapter: merge it first (peft's merge_and_unload)")

    # transformers only warns about weights that are missing, left over or of another size. What is
    # left over may belong to another head, or be the attention mask of an old file (attn.bias), but
    # nothing else of a layer (`h.3.`) or of this head (a bias).
    left_over = rf"\.\d+\.(?!.*\b(attn|attention)\.(masked_)?bias$)|^{head}\."
    wrong = {key for key in info["unexpected_keys"] if re.search(left_over, key)}
    wrong |= info["missing_keys"]
    if flag == "base_model":
        wrong.discard("score.weight")
    wrong |= {str(key) for key in info["mismatched_keys"]}
    if wrong:
        raise UserError(f"{what}: the weights do not fit a {type(model).__name__}: {min(wrong)}")
    with explained(what):
        check_model(model, tokenizer, longest)
    patch_layers(model, args)
    return model


def check_model(model: Model, tokenizer: Tokenizer, longest: int) -> None:
    """UserError for too few embeddings, or too short a window; and for a model whose trunk gives
    other states for a padded text, read through a cache, than for the text alone. This is a first
    test, on tokens of no meaning; check_update of PPO and RLOO tests the run's own texts."""
    size = model.get_input_embeddings().num_embeddings
    top = max(tokenizer.get_vocab().values())
    window = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if top >= size or longest > window:
        raise UserError(
            f"token ids go up to {top}, with {size} embeddings; texts to {longest} tokens, in a "
            f"window of {window}"
        )
    # Ours: the first token as padding, the others but the last into a cache, and the last one
    # through it. Plain: all but the first token, at once.
    numbers = torch.arange(min(longest, 64))[None]
    ids = numbers % top
    mask = numbers > 0
    cache = Cache(config=model.config)
    read(model.base_model, ids[:, :-1], mask[:, :-1], cache)
    cache.batch_repeat_interleave(1)  # changes nothing, but raises for recurrent models
    ours = read(model.base_model, ids[:, -1:], mask, cache).last_hidden_state
    plain = model.base_model(ids[:, 1:]).last_hidden_state[:, -1:]
    if not (ours - plain).abs().max() < 1e-3 * plain.std():
        raise UserError("is not supported: padding or a cache changes its results")


def local_path(name: str) -> str:
    """The path of a file or folder, or else of one beside this script, or else a name on the hub,
    which is returned as it is."""
    places = (os.path.expanduser(name), f"{FILE.parent}/{name}")
    return next((os.path.abspath(path) for path in places if os.path.exists(path)), name)


# --- data -----------------------------------------------------------------------------------------
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_table(flag: str, args: Args) -> dict[str, datasets.Dataset]:
    """The splits of a file, a folder or a data set on the hub. A folder or a hub id may end in
    :config, ::split or :config:split. If it names a split, only that is returned, as `train`."""
    name = local_path(getattr(args, flag))
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    path, _, rest = name.partition(":")  # path:config:split
    if os.path.exists(name):  # its name may have a colon
        path = name
        rest = ""
    config, _, split = rest.partition(":")
    path = local_path(path)
    files = [file for file in Path(path).rglob("*.*") if not file.match("dataset_info*")]
    kinds = {KINDS.get(file.suffix) for file in files} - {None}
    with explained(f"--{flag} {name}"):
        if kind:
            return datasets.load_dataset(kind, data_files=escape(name))
        splits = datasets.load_dataset(path, config or None)
    if len(kinds) > 1 or (split or "train") not in splits:
        raise UserError(f"--{flag} {name} has {[*kinds, *splits]}: name a file, or DATA::split")
    return {"train": splits[split]} if split else splits


def load_queries(flag: str, args: Args, tokenizer: Tokenizer, num_queries: int) -> list[Query]:
    """Up to `num_queries` queries (at least one) of the flag's table, in an order drawn from
    --seed."""
    begin = bos(tokenizer)
    prefix = encode(args.query_prefix or "", tokenizer)
    suffix = encode(args.query_suffix or "", tokenizer)
    start = token_id("start_text", tokenizer, args)
    end = token_id("end_text", tokenizer, args)
    long = args.long_queries
    if long is None:
        long = "drop" if end is None else "keep_start"
    table = load_table(flag, args)["train"]
    queries = []
    for i in np.random.default_rng([args.seed, QUERIES]).permutation(len(table)).tolist():
        with explained(f"--{flag} {getattr(args, flag)}, row {i}", UnicodeError):
            row = table[i]
            prompt = prompt_of(row)
            if is_chat(prompt) and (start is not None or end is not None or long == "keep_start"):
                raise UserError(
                    "a chat must keep its end: --start_text none --end_text none, and "
                    "--long_queries drop or keep_end"
                )
            tokens = encode(prompt, tokenizer)
        query = cut_query(tokens, args.query_length, start, end, long)
        if query:
            queries.append(Query(begin + query, begin + prefix + query + suffix, row))
            if len(queries) >= num_queries:
                break
    if not queries:
        raise UserError(f"--{flag}: no query is left: see --query_length, --start_text, --end_text")
    PartialState().print(
        f"--{flag}: {len(queries)} of {len(table)} rows, first "
        f"{tokenizer.decode(queries[0].context)!r}"
    )
    return queries


# The prompt is in the first of these columns that exists: a chat says more than its last question.
PROMPTS = """
    messages query prompt question problem instruction conversations conversation text article
    content
""".split()
# A row with content in one of these is refused: without it the prompt would be another.
NOT_READ = "system system_prompt history context passage image images tools".split()


def prompt_of(row: dict) -> str | list:
    """What is to be answered in this row: a text, token ids, or a chat, which is a list of messages
    without the answer. If `chosen` is a chat, this is the longer of two: the prompt column, or all
    messages of `chosen` but the last."""
    column = next((name for name in PROMPTS if name in row), "chosen")
    chosen = row.get("chosen")
    if column not in row or (column == "chosen" and isinstance(chosen, str)):
        raise UserError(f"a row needs one of the columns {PROMPTS}, or a chat in `chosen`: {row}")
    if any(map(row.get, NOT_READ)):
        raise UserError(f"{NOT_READ} are not read, put them into messages: {row}")
    if "chosen" in row and not chosen:  # an empty cell does not tell if it is a chat
        return ""
    prompt = row[column] or ""
    if column == "instruction" and row.get("input"):
        prompt = f"{prompt}\n{row['input']}"
    if not is_chat(prompt) and not is_chat(chosen):
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    elif not is_chat(prompt):
        raise UserError(f"{column} must be a text or a chat, like `chosen`: {row}")
    elif prompt[-1].get("role") in ("assistant", "model", "bot"):
        prompt = prompt[:-1]
    before = chosen[:-1] if is_chat(chosen) else []
    texts = [message.get("content") for message in before]
    if prompt and before and prompt[-1].get("content") not in texts:
        raise UserError(f"the chat of `chosen` is not about the {column}: {row}")
    return max(prompt, before, key=len)


def is_chat(value: object) -> bool:
    """Whether this is a list of messages."""
    return isinstance(value, list) and value != [] and isinstance(value[0], dict)


# Some templates write today's date. Labels and queries must have the same tokens on every day.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}\n"


def render(chat: list[dict], tokenizer: Tokenizer, **options: bool) -> str:
    """The text of a chat, by the tokenizer's template. A content in parts is joined."""
    messages = []
    for message in chat:
        content = message.get("content")
        if is_chat(content) and all(part.get("text") for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or message.get("tool_calls"):
            raise UserError(f"a message must be a role and a text, and no more: {message}")
        given = {name: value for name, value in message.items() if value}  # a key may be null
        messages.append(given | {"content": content})
    with explained("chat template"):
        template = FIXED_DATE + tokenizer.get_chat_template()
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )


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


def load_labels(
    flag: str, args: Args, tokenizer: Tokenizer
) -> tuple[list[Comparison], list[Comparison]]:
    """Labels to train on, the first --num_labels of `train`, and held-out ones: the first
    --eval_labels of the split `test`, or else of the rest of `train`."""
    splits = load_table(flag, args)
    table = splits["train"]
    count = args.num_labels or len(table)
    if count > len(table):
        raise UserError(f"--num_labels {count}: --{flag} has {len(table)} rows")
    labels = read_labels(flag, table, range(count), tokenizer, args)
    if len(labels) < args.batch_size:
        raise UserError(f"--{flag} has {len(labels)} labels for --batch_size {args.batch_size}")
    held_out = splits.get("test", table)
    rest = range(0 if "test" in splits else count, len(held_out))[: args.eval_labels]
    held_out = read_labels(flag, held_out, rest, tokenizer, args)
    first = tokenizer.batch_decode([labels[0].query, *labels[0].responses])
    PartialState().print(f"--{flag}: {len(labels)}, first {first}, best is {labels[0].best}")
    return labels, held_out


def read_labels(
    flag: str, table: datasets.Dataset, rows: range, tokenizer: Tokenizer, args: Args
) -> list[Comparison]:
    """The labels in these rows, in either format. Those of no use are left out and counted;
    UserError if they are more than a tenth. A coin decides whether the chosen response comes first:
    argmax takes the first of equal rewards, so otherwise a constant model would count as right."""
    coins = np.random.default_rng([args.seed, LABELS]).integers(0, 2, len(rows)).tolist()
    end = token_id("truncate_token", tokenizer, args)
    counts = Counter()
    labels = []
    for i, coin in zip(rows, coins, strict=True):
        with explained(f"--{flag} {getattr(args, flag)}, row {i}", UnicodeError):
            row = table[i]
            samples = [row[f"sample{n}"] or "" for n in range(100) if f"sample{n}" in row]
            if "chosen" in row and "rejected" in row:
                query, *responses = read_preference(row, end, counts, tokenizer, args)
                best = coin
                if coin:  # chosen comes second
                    responses.reverse()
            elif "query" in row and row.get("best") in range(len(samples)):
                if any(map(is_chat, samples)):
                    raise UserError(f"samples must be texts or token ids, not chats: {row}")
                query, *responses = [encode(x, tokenizer) for x in (prompt_of(row), *samples)]
                best = int(row["best"])
            else:
                raise UserError(f"neither query, sample0, .., best, nor chosen, rejected: {row}")
        if not query or not all(responses):
            counts["left out, for an empty or long prompt, an empty answer, or unlike chats"] += 1
        elif all(response == responses[0] for response in responses):
            counts["left out, for equal answers"] += 1
        else:
            labels.append(Comparison(bos(tokenizer) + query, responses, best, has_chat(row)))
    if rows:
        PartialState().print(f"--{flag}: {len(labels)} of {len(rows)} rows", dict(counts))
    if len(labels) < 0.9 * len(rows):
        raise UserError(f"--{flag}: {len(labels)} of {len(rows)} labels are of use: {dict(counts)}")
    return labels


def read_preference(
    row: dict, end: int | None, counts: Counter, tokenizer: Tokenizer, args: Args
) -> tuple[list[int], list[int], list[int]]:
    """Token ids of prompt, chosen and rejected; a dropped prompt is []. As in PPO, an answer ends
    after its first truncate token at index --truncate_after or later; with `eos`, one is added if
    there is none. Then it is cut to --response_length. A prompt longer than --query_length is
    dropped or cut, as --long_queries says (None: dropped); --start_text and --end_text are not
    used. In a chat, an answer is what the template adds to the prompt. Examples of texts, where _
    is a space:

        prompt    chosen         rejected      read as
        Hello     , you.         there         Hello | , you. | there
        Why?      Why? Because   Why? So       Why? | _Because | _So
        none      Why? Because   Why? So       Why? | _Because | _So
    """
    answers = [row["chosen"], row["rejected"]]
    if not all(answers):  # an empty cell is null
        return [], [], []
    if not (all(isinstance(x, str) for x in answers) or all(is_chat(x) for x in answers)):
        raise UserError(f"chosen and rejected must be two texts or two chats: {answers}")
    if is_chat(answers[0]):
        *before, chosen = contents(answers[0])
        *before_rejected, rejected = contents(answers[1])
        if not chosen or not rejected:
            return [], [], []
        if before and before_rejected and before != before_rejected:  # they answer different turns
            return [], [], []
    texts = [value for value in row.values() if isinstance(value, str) or is_chat(value)]
    if set(PROMPTS) & set(row) or is_chat(answers[0]) or len(texts) > 2:
        # Texts in unknown columns are an error: one of them may be the prompt.
        prompt = prompt_of(row)
    else:
        # The common beginning may end within a word: that piece is left to the answers.
        prompt = re.sub(r"(\s|\A)\S*\Z", "", os.path.commonprefix(answers))
    if is_chat(prompt):
        begin = render(prompt, tokenizer, add_generation_prompt=True)
        chats = [x if is_chat(x) else [{"role": "assistant", "content": x}] for x in answers]
        answers = []
        for chat in chats:
            if len(chat) == 1:  # the answer alone
                chat = prompt + chat
            whole = render(chat, tokenizer)
            if not whole.startswith(begin):
                raise UserError(f"an answer's chat is {whole!r}, and does not continue {begin!r}")
            answers.append(whole.removeprefix(begin))
    elif isinstance(prompt, str) and all(answer.startswith(prompt) for answer in answers):
        answers = [answer.removeprefix(prompt) for answer in answers]

    if is_chat(prompt) and args.long_queries == "keep_start":
        raise UserError("a chat must keep its end: --long_queries drop or keep_end")
    query = encode(prompt, tokenizer)
    parts = [cut_query(query, args.query_length, None, None, args.long_queries or "drop")]
    for answer in answers:
        tokens = encode(answer, tokenizer)
        ends = [i for i, x in enumerate(tokens) if x == end and i >= args.truncate_after]
        if ends:
            tokens = tokens[: ends[0] + 1]
        elif tokens and end is not None:
            counts["answers without --truncate_token"] += 1
            if args.truncate_token == "eos" and tokens[-1] != end:
                tokens.append(end)
        parts.append(tokens[: args.response_length])
    return tuple(parts)


def has_chat(row: dict) -> bool:
    """Whether what is asked in this row is a chat, not a text."""
    return any(is_chat(row.get(name)) for name in ["chosen", *PROMPTS])


def contents(chat: list[dict]) -> list:
    """What its messages say: texts, lists of parts, or calls of tools."""
    return [message.get("content") or message.get("tool_calls") for message in chat]


def token_id(flag: str, tokenizer: Tokenizer, args: Args) -> int | None:
    """The id of the flag's text, which must be one token (`eos`: the tokenizer's end)."""
    text = getattr(args, flag)
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Llama 2's tokenizer encodes `.` with a space before it, which is another token.
    named = tokenizer.get_vocab().get(text)
    if text == "eos":
        ids = [tokenizer.eos_token_id]
    elif named is not None and tokenizer.decode([named]) == text:
        ids = [named]
    elif tokenizer.decode(ids[-1:]) == text:  # a line feed has a space before it, too
        ids = ids[-1:]
    if len(ids) != 1 or ids[0] is None:
        raise UserError(f"--{flag} {text!r} must be one token, but is tokens {ids}")
    return ids[0]


def bos(tokenizer: Tokenizer) -> list[int]:
    """The tokens put before every text: one for Llama and Gemma, for others none."""
    first = tokenizer("a", add_special_tokens=False).input_ids[:1]
    if not first:
        raise UserError("--base_model has a tokenizer without tokens")
    tokens = tokenizer("a").input_ids  # not of "": then an EOS at the end would look like it
    return tokens[: tokens.index(first[0])]


PADDING = 50259  # pads the rows of token ids in OpenAI's label files; GPT-2 has no such token


def encode(value: str | list, tokenizer: Tokenizer) -> list[int]:
    """Token ids, without BOS, of a text, a chat that is to be answered, or a padded row of token
    ids. UserError for anything else, and for ids that the tokenizer does not have. Ids of another
    model that this tokenizer has, too, are not noticed, so read the first query and label, which
    are printed."""
    if is_chat(value):
        value = render(value, tokenizer, add_generation_prompt=True)
    known = range(len(tokenizer))
    if isinstance(value, str):
        tokens = tokenizer(value, add_special_tokens=False).input_ids
    elif isinstance(value, list) and all(x in known or x == PADDING for x in value):
        # 50259 is padding, unless this tokenizer has so many tokens.
        tokens = [token for token in value if token in known]
    else:
        raise UserError(f"neither text, nor chat, nor ids of this tokenizer: {value}")
    begin = bos(tokenizer)  # a chat template may have put it there
    return tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens


# --- results --------------------------------------------------------------------------------------
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
def parse_args() -> tuple[str, Args]:
    """Name of the preset (`tiny` if a flag comes first), and Args."""
    # People write `--flag none` or `--flag=none`. tyro reads only None.
    words = [re.sub("^(--[^=]+=)?none$", r"\1None", word) for word in sys.argv[1:]]
    preset = words.pop(0) if words and not words[0].startswith("-") else "tiny"
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}: choose one of {', '.join(PRESETS)}")
    args = tyro.cli(Args, default=PRESETS[preset], args=words, use_underscores=True)
    try:
        pydantic.TypeAdapter(Args).validate_python(vars(args))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{first['loc'][0]} {first['input']}: {first['msg']}") from error
    if args.resume and not args.output_dir:
        raise UserError("--resume needs --output_dir, the folder of the run")
    return preset, args


if __name__ == "__main__":
    try:
        main(*parse_args())
    except (UserError, OSError) as error:
        if os.environ.get("RLHF_DEBUG"):
            raise
        sys.exit(f"{FILE.name}: {' '.join(str(error).split())}")
