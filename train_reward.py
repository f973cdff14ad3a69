"""A reward model from human comparisons.

A language model with a scalar head learns which of N responses to a query people like best. It is
trained for one epoch on the loss -log softmax(reward_1, ..., reward_N)[best], which for a pair is
-log sigmoid(chosen - rejected). The reward is gain * logit + bias. Gain and bias are set so that
the rewards of the reference policy's samples have mean 0 and deviation 1: before the training, to
begin at a sensible scale, and after it, because training shifts rewards. "The original" is OpenAI's
lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593). The tests replay recordings of it.

    python train_reward.py                                         # tiny model and data
    accelerate launch --num_processes 8 train_reward.py sentiment  # eight GPUs share --batch_size

A table of labels has the columns query, sample0, sample1, ... (token ids or texts) and best, the
number of the sample that people liked best, from 0; or chosen, rejected (texts or messages) and
perhaps a prompt. The result, reward_model/, is a Hugging Face folder of a classifier, which gives
the logit; gain and bias are reward_gain and reward_bias of its config.json.

tf_adam.py has the optimizer, and plumbing/ what is not about RLHF: the command line, the run's
folder, models and tables. All else is here. A function (except main) that stands in two of the
scripts is identical in both, so some of its branches may be unused here.

Shapes: b labels in a micro-batch, N responses in each (b N rows, label by label), B rows of any
kind, R tokens in a response, T in a row, V in the vocabulary, d hidden units.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.8,<2.14", "transformers>=5.23,<5.24", "datasets>=5.2", "accelerate>=1.13",
#     "tyro>=1.0", "wandb>=0.23.1", "numpy>=2", "safetensors>=0.8", "pandas>=2.2.2",
#     "pydantic>=2.6", "filelock>=3.16",
# ]
# ///

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather, reduce, set_seed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, confloat, conint
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import cross_entropy, pad
from torch.optim import AdamW, Optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from plumbing.data import Query, is_chat, load_queries
from plumbing.labels import Comparison, end_token_id, load_labels
from plumbing.launch import UserError, make_accelerator, prepare, run_main, say, write, writing
from plumbing.models import (
    Cache,
    TokenRows,
    forward,
    freeze,
    full_tensor,
    load_model,
    load_tokenizer,
    pad_rows,
    read_queries,
    save_model,
)
from plumbing.run import Run, choose_folder, write_rows
from tf_adam import AdamTF

FILE = Path(__file__).resolve()
Beta = confloat(ge=0, lt=1)  # of Adam


@dataclass
class Args:
    """Settings of a run. A preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    # --help shows the comment beside a field, or else the lines right above it, up to a blank one.

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
    # Recompute activations in the backward pass: less memory, at least a third more time
    gradient_checkpointing: bool = False

    # the task

    # A file (json, jsonl, csv, parquet, txt), a folder or a hub id, perhaps with :config:split
    label_dataset: str = "tiny/labels"
    # Train on this many first rows of `train` (None: all); `test`, or else the rest, is held out
    num_labels: PositiveInt | None = None
    eval_labels: PositiveInt = 512  # Evaluate at most this many held-out labels
    # Queries whose samples set gain and bias; forms as for --label_dataset
    query_dataset: str = "tiny/queries"
    # The column of prompts (None: the first that exists of prompt, messages, query, text)
    prompt_column: str | None = None
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
    temperature: PositiveFloat = 0.7  # Divides logits, wherever probabilities are computed
    # Chosen and rejected responses end after this token (`eos`: the tokenizer's, which is added if
    # it is missing; None: no token ends them). A special token ends what is sampled, too
    truncate_token: str | None = "."
    truncate_after: NonNegativeInt = 16  # The token ends a response only at this index or later
    # Samples that set gain and bias, before and after training (0: gain starts at 1, bias at 0)
    normalization_samples: NonNegativeInt = 512

    # updates and optimizer
    batch_size: PositiveInt = 8  # Labels per update, over all devices
    # Labels (of N rows each), or sampled rows, per pass on a device; gradients accumulate
    micro_batch_size: PositiveInt = 128
    lr: NonNegativeFloat = 2e-3  # The highest learning rate, see --lr_schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # --lr decays to 0, or stays
    # Number n of warm-up updates: update i < n (from 0) has (i + 1) / (n + 1) of its scheduled rate
    lr_warmup: NonNegativeInt = 0
    # Adam as TensorFlow has it (original), or torch.optim.AdamW
    adam: Literal["tf", "torch"] = "tf"
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)  # Decay rates of Adam's two averages
    weight_decay: NonNegativeFloat = 0.0  # Decoupled, as in AdamW; for matrices only
    max_grad_norm: PositiveFloat | None = None  # Gradients of a larger norm are scaled down to it


# Settings of OpenAI's launch.py, or of the scripts it starts (RLOO has PPO's). Queries in the label
# files are cut already: no start_text, no end_text.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
OPENAI = Args(base_model="gpt2", start_text=None, end_text=None)
BOOKS = replace(  # BookCorpus
    OPENAI, query_length=64, num_labels=4992, batch_size=32, micro_batch_size=64, lr=5e-5
)
POSTS = replace(  # Reddit
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
NEWS = replace(POSTS, query_prefix="Article:\n\n", temperature=0.5)  # CNN/DM


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


def main(preset: str, args: Args) -> None:
    """Sets up and normalizes; trains and logs in a loop; normalizes again, evaluates and saves."""
    accelerator = make_accelerator(args.dtype)
    num_processes = accelerator.num_processes
    rank = accelerator.process_index
    if args.batch_size % num_processes or args.normalization_samples % num_processes:
        raise UserError(
            f"--batch_size {args.batch_size} and --normalization_samples "
            f"{args.normalization_samples} must be multiples of {num_processes} (processes)"
        )
    args.output_dir = choose_folder(FILE, preset, args)

    # data and models; most of what cannot run fails here, before anything is written
    tokenizer = load_tokenizer("base_model", args.base_model)
    labels, held_out = load_labels(args, tokenizer)
    num_updates = len(labels) // args.batch_size
    # The first half sets gain and bias before the training, the second half after it.
    _, queries = load_queries(args, tokenizer, 0, 2 * args.normalization_samples)
    if args.normalization_samples and labels[0].is_from_chat != is_chat(queries[0].prompt):
        raise UserError("--label_dataset and --query_dataset must be of one kind, chats or texts")
    longest = max(len(query.for_policy) for query in queries) + args.response_length
    for label in labels + held_out:
        longest = max(longest, len(label.query) + max(map(len, label.responses)))
    load_base = partial(load_model, "base_model", args.base_model)
    ref_lm = freeze(load_base(AutoModelForCausalLM, tokenizer, longest, args), args.dtype)
    model = load_base(AutoModelForSequenceClassification, tokenizer, longest, args)
    set_seed(args.seed)
    if "SequenceClassification" not in str(model.config.architectures):  # its file had no head
        std = 1 / math.sqrt(model.score.in_features + 1)  # of a new head, as in the original
        nn.init.normal_(model.score.weight, std=std)
    reward = RewardModel(model, args).to(accelerator.device)

    # 1. normalize on samples of the reference policy. A resumed run takes gain and bias from its
    # checkpoint. Only a special --truncate_token, like an eos, ends a sample (original: none does).
    end = end_token_id(args, tokenizer)
    if end is not None and tokenizer.decode([end], skip_special_tokens=True):
        end = None  # an ordinary token: `decode` would skip a special one
    if args.normalization_samples:
        rewards = reference_rewards(accelerator, reward, ref_lm, queries, 0, end, args)
        normalize(reward, rewards)
    # `wrapped` is what is trained: it averages gradients over processes. `reward` is inside.
    wrapped, reward, optimizer = prepare(accelerator, reward, make_optimizer(reward, args))

    data = [[query.for_policy for query in queries]]
    data += [[label.query, label.responses, label.best] for label in labels]
    run = Run(accelerator, FILE, args, num_updates, data, state={})
    run.start()
    order = np.random.RandomState(args.seed).permutation(len(labels))
    for update in run.updates():
        # 2. train for one epoch, in the original's order; of n processes each takes every n-th
        # label of a batch. An incomplete last batch is skipped, but counts in the schedule.
        start = update * args.batch_size
        set_learning_rates(optimizer, update, start / len(labels), args)
        rows = order[start : start + args.batch_size][rank::num_processes]
        my_labels = [labels[i] for i in rows]
        means = reward_update(accelerator, wrapped, optimizer, my_labels, args)

        # 3. log; leave a checkpoint if one is due
        metrics = means.reduce()
        metrics["train/lr"] = optimizer.param_groups[0]["lr"]
        run.log(metrics)
        if update % 25 == 0:
            say(f"update {update + 1} of {num_updates}: loss {metrics['train/loss']:.3f}")
        if not math.isfinite(metrics["train/gradient_norm"]):
            raise UserError("the gradient is not finite: a smaller --lr may help")
        run.end_update()

    # 4. normalize again
    if args.normalization_samples:
        rewards = reference_rewards(accelerator, reward, ref_lm, queries, 1, end, args)
        normalize(reward, rewards)

    # 5. evaluate and save
    samples = evaluate_labels(reward, held_out, tokenizer)
    statistics = {
        "gain": full_tensor(reward.gain).item(),
        "bias": full_tensor(reward.bias).item(),
    }
    if held_out:
        statistics["test/accuracy"] = samples.pop("is_hit").mean().item()  # not in samples.jsonl
    accelerator.log(statistics)
    # Only now: this may discard FSDP's gathered weights, and with them the new gain and bias.
    weights = accelerator.get_state_dict(wrapped)
    if rank == 0:
        with writing(args.output_dir):
            save_reward_model(model, weights, statistics, tokenizer, args.output_dir)
        write_rows(samples, run.folder)  # the last file, which marks a finished run
    say(f"{statistics}, see {args.output_dir}")
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)  # ends DDP, else gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def label_rewards(reward: Module, labels: list[Comparison]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (b, N) of the N responses to each query, each read at its last token; the index of
    the one that people liked best, (b,); and whether that one has the highest reward, (b,)."""
    ids, mask = pad_rows([label.query for label in labels])
    # To pad responses on the right: reverse them, pad on the left, reverse back.
    reversed_rows = [response[::-1] for label in labels for response in label.responses]
    reversed_ids, reversed_mask = pad_rows(reversed_rows)
    rewards = reward(ids, mask, reversed_ids.flip(1), reversed_mask.flip(1))  # (b N,)
    rewards = rewards.view(len(labels), -1)
    best = torch.tensor([label.best for label in labels], device=ids.device)
    return rewards, best, rewards.argmax(1) == best


def reward_update(
    accelerator: Accelerator,
    wrapped: Module,
    optimizer: Optimizer,
    labels: list[Comparison],
    args: Args,
) -> "Metrics":
    """One optimizer step on the mean cross entropy of a batch. `labels` are this process's share of
    the batch, and all shares are equally large. Returns what is logged."""
    means = Metrics()
    groups = torch.arange(len(labels)).split(args.micro_batch_size)
    for i, rows in enumerate(groups, 1):
        is_last = i == len(groups)
        with defer_averaging(accelerator, wrapped, is_last):
            rewards, best, is_hit = label_rewards(wrapped, [labels[row] for row in rows])
            # -log softmax(rewards) at the best of N; for a pair -log sigmoid(chosen - rejected)
            losses = cross_entropy(rewards, best, reduction="none")  # (b,)
            accelerator.backward(losses.sum() / len(labels))
        means.add({"train/loss": losses, "train/accuracy": is_hit})
    gradient_norm = clip_gradients(wrapped, args.max_grad_norm)
    means.add({"train/gradient_norm": gradient_norm})
    optimizer.step()
    optimizer.zero_grad()
    return means


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
    ref_lm: PreTrainedModel,
    queries: list[Query],
    draw: int,
    end: int | None,
    args: Args,
) -> Tensor:
    """Rewards of --normalization_samples samples of the reference, gathered from all processes. A
    sample is scored at the first `end` at index --truncate_after or later, or at its last token.
    Draw 0 is before the training, and draw 1 after it. They use different uniforms, and different
    queries if there are enough."""
    total = args.normalization_samples
    my_rows = torch.arange(total).chunk(accelerator.num_processes)[accelerator.process_index]
    noise = uniforms(args.seed, draw, total, args.response_length)
    rewards = []
    for rows in my_rows.split(args.micro_batch_size):
        my_queries = [queries[(draw * total + i) % len(queries)] for i in rows]
        contexts = [query.for_policy for query in my_queries]
        cache = Cache(config=ref_lm.config)
        policy = partial(forward, ref_lm, last=1)
        responses, _ = sample(policy, cache, contexts, noise[rows], args.temperature)
        until_end, _ = find_end(responses, end, args.truncate_after)
        ids, mask = pad_rows([query.for_reward for query in my_queries])
        rewards.append(reward(ids, mask, responses, until_end))
    return gather(torch.cat(rewards))


@torch.no_grad()
def evaluate_labels(
    reward: Module, labels: list[Comparison], tokenizer: PreTrainedTokenizerBase
) -> pd.DataFrame:
    """A row for each held-out label: its texts, which response is best, all rewards, and whether
    the best one has the highest. Every process evaluates all labels, since weights may be sharded,
    and one at a time, so that no query is padded."""
    rows = []
    for label in labels:
        rewards, _, is_hit = label_rewards(reward, [label])
        row = {
            "query": tokenizer.decode(label.query),
            "responses": tokenizer.batch_decode(label.responses),
            "best": label.best,
            "rewards": rewards[0].tolist(),
            "is_hit": is_hit.item(),
        }
        rows.append(row)
    return pd.DataFrame(rows)


# --- optimizer, and sums over processes -----------------------------------------------------------
def make_optimizer(model: Module, args: Args) -> Optimizer:
    """AdamTF or AdamW (--adam) over all weights that are trained. Each part of the model, like
    `lm`, has a parameter group of matrices, which alone have --weight_decay, and one of others."""
    weights = defaultdict(list)
    for name, p in model.named_parameters():
        if p.requires_grad:
            part = name.partition(".")[0]
            is_matrix = p.dim() > 1
            weights[part, is_matrix].append(p)
    groups = []
    for (part, is_matrix), params in weights.items():
        decay = args.weight_decay if is_matrix else 0.0
        groups.append({"params": params, "part": part, "weight_decay": decay})
    optimizer = AdamTF if args.adam == "tf" else AdamW
    return optimizer(groups, args.lr, betas=args.adam_betas, eps=args.adam_eps)


def set_learning_rates(
    optimizer: Optimizer, update: int, progress: float, args: Args, **max_lrs: float
) -> None:
    """Sets the rates for all optimizer steps of this update (updates count from 0): the highest
    rate, times warm-up and linear decay (if any). `progress`, in [0, 1), is the share of the
    run that is over. `max_lrs` has the highest rates of those parts where it is not --lr."""
    factor = min(1.0, (update + 1) / (args.lr_warmup + 1))
    if args.lr_schedule == "linear":
        factor *= 1 - progress
    for group in optimizer.param_groups:
        group["lr"] = factor * max_lrs.get(group["part"], args.lr)


def defer_averaging(
    accelerator: Accelerator, model: Module, is_last: bool
) -> contextlib.AbstractContextManager:
    """A context for the forward and backward pass of a micro-batch. Processes average gradients at
    the last one of a step only. If weights are sharded (modules then have `reshard`) they do it at
    each one: otherwise every process would hold whole gradients until then."""
    if is_last or hasattr(model, "reshard"):
        return contextlib.nullcontext()
    return accelerator.no_sync(model)


def clip_gradients(model: Module, max_norm: float | None) -> Tensor:
    """Scales the gradients down to max_norm, if it is given. Returns their norm before that."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    return full_tensor(norm)


class Metrics:
    """Means, over all processes, of what one update logs. Every process must add the same names in
    the same order."""

    def __init__(self) -> None:
        self.sums = defaultdict(float)
        self.counts = defaultdict(float)

    def add(self, terms: dict[str, Tensor], mask: Tensor | None = None) -> None:
        """Adds the elements of each term; with a mask of the same shape only those where it is 1.
        Totals are kept in fp64, since fp32 would lose digits over many calls."""
        device = PartialState().device  # an offloaded gradient norm is on the CPU
        for name, term in terms.items():
            weights = torch.ones_like(term) if mask is None else mask
            if term.shape != weights.shape:
                raise ValueError(f"{name} {list(term.shape)} must be {list(weights.shape)}")
            self.sums[name] += (term.detach() * weights).sum().double().to(device)
            self.counts[name] += weights.sum().double().to(device)

    def reduce(self) -> dict[str, float]:
        """The means, in one collective."""
        totals = torch.stack([*self.sums.values(), *self.counts.values()])
        sums, counts = reduce(totals, "sum").view(2, -1).tolist()
        return {name: x / count for name, x, count in zip(self.sums, sums, counts, strict=True)}


# --- sampling -------------------------------------------------------------------------------------
# Each use of random numbers has its own stream, default_rng([seed, stream, ..]): in one script none
# repeats the numbers of another. plumbing/data.py has streams 2 and 3; 5 and more are free.
STREAM_SAMPLES = 1


def uniforms(seed: int, draw: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, different ones for each `draw`: 0 for
    evaluations, 1, 2, ... for updates (train_reward.py: 0 before the training, 1 after). Processes
    take their rows of one array, so these numbers do not depend on how many processes there are."""
    generator = np.random.default_rng([seed, STREAM_SAMPLES, draw])
    numbers = generator.random((batch, length), np.float32)
    return torch.from_numpy(numbers).to(PartialState().device)


@torch.no_grad()
def sample(
    policy: Callable,
    cache: Cache,
    contexts: TokenRows,
    noise: Tensor,
    temperature: float,
    end: int | None = None,
    after: int = 0,
) -> tuple[Tensor, Tensor]:
    """Samples responses (B, R) ~ softmax(logits / temperature) to B contexts, from uniform noise
    (B, R). Returns them and the log-probabilities of their tokens. The cache must be empty. Without
    `end` all responses have R tokens, and find_end cuts them later. With `end`, a response may stop
    after that token, at index `after` or later. Tokens that were not sampled are 0."""
    ids, mask = pad_rows(contexts)
    responses = torch.zeros_like(noise, dtype=torch.long)
    logprobs = torch.zeros_like(noise)
    rows = torch.arange(len(noise), device=noise.device)  # the responses that have not ended
    for t in range(noise.shape[1]):
        logits = policy(ids, mask, cache=cache)["logits"][:, -1]
        probs = (logits / temperature).softmax(-1)  # (B, V)
        # From now on the model reads only the newest token: the cache has all before it.
        ids = inverse_cdf(probs, noise[rows, t].unsqueeze(1))
        mask = pad(mask, (0, 1), value=True)
        responses[rows, t] = ids.squeeze(1)
        logprobs[rows, t] = probs.gather(1, ids).log().squeeze(1)

        # Every few tokens, so that a GPU seldom waits, ended responses leave the batch. Processes
        # stop together: they need each other's weights if these are sharded.
        if end is not None and t % 8 == 7:
            _, has_ended = find_end(responses[rows, : t + 1], end, after)
            is_open = ~has_ended
            if reduce(is_open.sum(), "sum") == 0:
                break
            # A process that waits for others keeps one row. (An `if` would wait for the GPU.)
            is_open[0] |= ~is_open.any()
            kept = is_open.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            ids = ids[kept]
            mask = mask[kept]
            rows = rows[kept]
    return responses, logprobs


def inverse_cdf(probs: Tensor, noise: Tensor) -> Tensor:
    """Tokens (B, 1): where the cumulative distribution of probs (B, V) passes noise (B, 1), which
    is uniform. The sum is in fp64: fp32 would round away rare tokens. (Noise has 24 bits: a token
    far rarer than 6e-8 is drawn never or with 6e-8.) NaN gives the last token: a check finds it."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, noise * cdf[:, -1:], right=True)
    return tokens.clamp(max=probs.shape[1] - 1)


def find_end(responses: Tensor, token: int | None, after: int) -> tuple[Tensor, Tensor]:
    """A mask (B, R) of the tokens up to and including the first `token` at index `after` or later,
    or of all if there is none; and whether there is one, (B,). With token None all is True."""
    if token is None:
        everything = torch.ones_like(responses, dtype=torch.bool)
        return everything, everything.all(1)
    is_end = responses == token
    is_end[:, :after] = False
    ends_before = is_end.cumsum(1) - is_end.long()
    return ends_before == 0, is_end.any(1)


# --- forward passes -------------------------------------------------------------------------------
class RewardModel(Module):
    """reward = gain * logit + bias, with the logit of a classifier. normalize sets gain and bias;
    the gain is also trained with the weights, while the loss does not depend on the bias."""

    def __init__(self, lm: PreTrainedModel, args: Args) -> None:
        super().__init__()
        self.lm = lm
        self.reads_once = not args.gradient_checkpointing  # else recomputing fills the cache twice
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor, mask: Tensor, responses: Tensor, is_real: Tensor) -> Tensor:
        """Rewards (b N,), in fp32, read at the last token of each response. Queries (b, T) are
        padded on the left, responses (b N, R) on the right."""
        n = len(responses) // len(ids)  # responses per query
        if self.reads_once:
            cache = read_queries(self.lm, ids, mask, n)
            ids = responses
        else:
            cache = None
            ids = torch.cat([ids.repeat_interleave(n, 0), responses], 1)
        mask = torch.cat([mask.repeat_interleave(n, 0), is_real], 1)
        states = forward(self.lm.base_model, ids, mask, cache).last_hidden_state
        rows = torch.arange(len(ids), device=ids.device)
        last = is_real.sum(1) - is_real.shape[1] - 1  # -1 without padding, -2 before one pad, ..
        return self.gain * self.lm.score(states[rows, last]).squeeze(1) + self.bias


# --- results --------------------------------------------------------------------------------------
def save_reward_model(
    model: PreTrainedModel,
    weights: dict,
    statistics: dict,
    tokenizer: PreTrainedTokenizerBase,
    parent: str,
) -> None:
    """Writes reward_model/, a Hugging Face folder, and results.json."""
    # transformers scores a text at its last token that is not padding. If eos is the padding, that
    # skips an eos at the end. So the folder then names no padding: score one text at a time.
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = None
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.reward_gain = statistics["gain"]
    model.config.reward_bias = statistics["bias"]
    own = {name: weights[f"lm.{name}"] for name in model.state_dict()}
    save_model(model, tokenizer, f"{parent}/reward_model", own)
    write(Path(f"{parent}/results.json"), json.dumps(statistics, indent=2))


# --- entry point ----------------------------------------------------------------------------------
if __name__ == "__main__":
    run_main(main, Args, PRESETS)
