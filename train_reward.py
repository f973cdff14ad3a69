"""A reward model from human comparisons, in one file.

A language model with a scalar head learns which of N responses to a query people like best: cross
entropy, one epoch. The reward is gain * logit + bias; before and after the training these two are
set so that rewards of the reference policy's samples have mean 0 and deviation 1. "The original" is
OpenAI's lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593); the tests replay arrays that
were recorded from it.

    python train_reward.py                                         # tiny model and data
    accelerate launch --num_processes 8 train_reward.py sentiment  # eight GPUs share --batch_size

A table of labels has the columns query, sample0, sample1, ... (token ids or texts) and best, the
number of the sample that people liked best; or chosen, rejected and perhaps prompt (texts or
messages). The result, reward_model/, is a Hugging Face folder of a classifier, which gives the
logit; gain and bias are reward_gain and reward_bias of its config.json.

A function (except main) that appears in more than one of ppo_rlhf.py, rloo_rlhf.py and
train_reward.py is identical in all of them: what seems out of place here is needed there.

Shapes: b comparisons in a micro-batch, N responses in each, B rows of any kind, R tokens in a
response, T in a row, V in the vocabulary, d hidden units.
"""

import signal

if __name__ == "__main__":  # Ctrl-C before the run begins ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import ctypes
import glob
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import cross_entropy, pad
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
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)

    # models
    base_model: Name = "tiny/model"  # Reward model and reference start from it: a folder or hub id
    # bf16: autocast; most frozen linear layers in bf16 (see hold_in_bf16), the rest in fp32
    dtype: Literal["fp32", "bf16"] = "fp32"
    # Train LoRA adapters of this rank in place of the model's weights (0: train all weights)
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveFloat = 16.0  # LoRA adapters are scaled by this / --lora_rank

    # the task

    # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config] on the hub
    label_dataset: Name = "tiny/labels"
    # Labels to train on (None: all of `train`). Held out: split `test`, `validation`, or the rest
    num_labels: PositiveInt | None = None
    eval_labels: PositiveInt = 512  # Evaluate at most this many held-out labels
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
    # `eos`: chosen and rejected responses end at their first eos. Other tokens change nothing here
    truncate_token: Name | None = "."
    # Samples that set gain and bias, before and after the training (0: the gain is only trained)
    normalization_samples: NonNegativeInt = 512

    # updates and optimizer
    batch_size: PositiveInt = 8  # Comparisons per update, over all devices
    micro_batch_size: PositiveInt = 128  # Labels per pass on one device; gradients accumulate
    lr: NonNegativeFloat = 2e-3  # Learning rate, see the schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # --lr decays to 0, or stays
    lr_warmup: NonNegativeInt = 0  # In this many (n) updates --lr rises, first to lr / (n + 1)
    # Adam as TensorFlow has it (original), or torch.optim.AdamW
    adam: Literal["tf", "torch"] = "tf"
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)  # Decay rates of Adam's two averages
    weight_decay: NonNegativeFloat = 0.0  # Decoupled, as in AdamW; for matrices only
    max_grad_norm: PositiveFloat | None = None  # Gradients of a larger norm are scaled down to it


# A preset is a string of flags with the values of OpenAI's launch.py, or of the scripts it starts.
# Later flags win. Queries in the label files are cut already: no --start_text, no --end_text.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
OPENAI = "--base_model gpt2 --token_ids_of gpt2 --start_text None --end_text None"
BOOKS = f"{OPENAI} --query_length 64 --num_labels 4992 --batch_size 32 --micro_batch_size 64"
BOOKS += " --lr 5e-5"
POSTS = f"{OPENAI} --query_length 500 --long_queries keep_start --query_suffix '\n\nTL;DR:'"
POSTS += " --response_length 75 --truncate_token '\n'"
POSTS += " --num_labels 46000 --batch_size 16 --micro_batch_size 4 --lr 2.5e-5"
NEWS = f"{POSTS} --query_prefix 'Article:\n\n' --temperature 0.5"
SENTIMENT = f"{FILES}/sentiment/offline_5k.json"
DESCRIBE = f"{FILES}/descriptiveness/offline_5k.json"
CNNDM = f"{FILES}/cnndm/offline_60k.json"
TLDR = f"{FILES}/tldr/offline_60k.json"
PRESETS = {
    "tiny": "",
    "sentiment": f"{BOOKS} --label_dataset {SENTIMENT} --query_dataset {SENTIMENT}",
    "descriptiveness": f"{BOOKS} --label_dataset {DESCRIBE} --query_dataset {DESCRIBE}",
    "cnndm": f"{NEWS} --label_dataset {CNNDM} --query_dataset {CNNDM}",
    "tldr": f"{POSTS} --label_dataset {TLDR} --query_dataset {TLDR}",
}


@dataclass
class Query:
    """A query as the reward model and as the policy reads it, and its row in the table."""

    input_ids: list[int]  # as the reward model reads it
    context: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for PPO's and RLOO's --reward_fn


@dataclass
class Label:
    """A human comparison of N responses to a query; a pair has N = 2."""

    query: list[int]
    responses: TokenRows  # N rows of token ids, not padded
    best: int  # index of the one that people liked best


Sums = dict[str, Pair]  # (sum, count) of each metric; reduce_means divides them


def main(preset: str, args: Args) -> None:
    """Set-up; normalize; a loop of train, log; at the end normalize again, evaluate and save."""
    cpu = not torch.accelerator.is_available() or torch.backends.mps.is_available()  # MPS: no fp64
    accelerator = Accelerator(cpu=cpu, log_with="wandb", mixed_precision="no", dynamo_backend="no")
    world = accelerator.num_processes
    rank = accelerator.process_index
    args = resolve_args(preset, args)
    if args is None:  # the run is finished
        return
    for name in ("batch_size", "normalization_samples"):
        if getattr(args, name) % world:
            raise UserError(
                f"--{name} {getattr(args, name)} must be a multiple of {world} processes"
            )

    # data and models; what cannot run fails here, before anything is written
    set_up_backend(args.dtype)
    set_seed(args.seed)
    tokenizer = load_tokenizer("base_model", args)
    labels, held_out = load_labels(tokenizer, args)
    # One half to normalize before the training, the other after it. At least 1: 0 would load all.
    queries = load_queries("query_dataset", tokenizer, args, max(1, 2 * args.normalization_samples))
    longest = max(len(query.context) for query in queries) + args.response_length
    for label in labels + held_out:
        longest = max(longest, len(label.query) + max(map(len, label.responses)))
    ref = Reference(load_model(AutoModelForCausalLM, "base_model", args, tokenizer, longest))
    hold_in_bf16(ref.lm.requires_grad_(False), args)
    model = load_model(AutoClassifier, "base_model", args, tokenizer, longest, num_labels=1)
    model.config.pad_token_id = pad_token_but_not_eos(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    torch.manual_seed(args.seed)  # the new head depends on the seed alone
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    add_adapters(model.base_model, args)
    reward = RewardModel(model)

    # 1. normalize on samples of the reference policy; a resumed run loads gain and bias below
    statistics = {}
    if args.normalization_samples > 0:
        rewards = reference_rewards(accelerator, reward, ref, queries, 0, args)
        statistics["before"] = normalize(rewards, reward.gain.data, reward.bias.data)
    wrapped, optimizer = accelerator.prepare(reward, make_optimizer([reward], [], args))
    reward = accelerator.unwrap_model(wrapped)  # the same module, without DDP around it

    with lock_and_signals(args) as signals:
        state = {"update": 0}  # open_run adds two fields, or loads all
        open_run(accelerator, preset, args, state)
        done = state["update"]
        order = np.random.RandomState(args.seed).permutation(len(labels))
        num_updates = len(labels) // args.batch_size
        bar = tqdm(range(done, num_updates), initial=done, total=num_updates, disable=rank > 0)
        for update in bar:
            # 2. train: one epoch; a single process has the original's order. Processes get equally
            # many labels of a batch; labels that do not fill a last batch are left out.
            start = update * args.batch_size
            set_learning_rates(optimizer, update, start / len(labels), args)  # see tf_adam.py
            mine = [labels[i] for i in order[start : start + args.batch_size][rank::world]]
            records = reward_update(accelerator, wrapped, optimizer, mine, args)

            # 3. log; leave a checkpoint
            metrics = reduce_means(records)
            metrics["train/labels"] = start + args.batch_size
            metrics["train/lr"] = optimizer.param_groups[0]["lr"]
            if rank == 0:
                log = f"{args.output_dir}/metrics.jsonl"
                with as_user_error("output_dir", args), open(log, "a") as file:
                    file.write(f"{json.dumps(metrics)}\n")
            accelerator.log(metrics, step=update + 1)
            bar.set_postfix(loss=metrics["train/loss"], accuracy=metrics["train/accuracy"])
            state["update"] = update + 1
            is_due = args.checkpoint_every and (update + 1) % args.checkpoint_every == 0
            received = torch.tensor(len(signals), device=accelerator.device)
            stopping = sum_over_ranks(received) > 0  # a signal to any process stops all
            if is_due or stopping or update + 1 == num_updates:
                save_checkpoint(accelerator, state, args)
            if stopping:
                raise Interrupted("stopped by a signal")

        # 4. normalize again
        if args.normalization_samples > 0:
            rewards = reference_rewards(accelerator, reward, ref, queries, 1, args)
            statistics["after"] = normalize(rewards, reward.gain.data, reward.bias.data)

        # 5. evaluate and save; all processes put the weights together
        statistics |= {"gain": reward.gain.item(), "bias": reward.bias.item()}
        samples = evaluate_labels(reward, held_out, tokenizer)
        if held_out:
            # The baseline, test/constant, always chooses the index that is best most often here.
            statistics["test/accuracy"] = samples.pop("is_hit").mean().item()
            statistics["test/constant"] = samples["best"].value_counts(normalize=True).max().item()
        merge_adapters(model)
        weights = accelerator.get_state_dict(wrapped)
        if rank == 0:
            with as_user_error("output_dir", args):
                save_reward_model(model, weights, statistics, tokenizer, args)
            show_results(accelerator, samples, statistics, args)
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)  # without this gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def label_rewards(reward: Module, labels: list[Label]) -> Pair:
    """Rewards (b, N) of the N responses to each query, and the index of the best one, (b,).
    Responses count up to their last token, not to a truncate token as in ppo_rlhf.py."""
    ids, mask = left_pad([label.query for label in labels])
    rows = [torch.tensor(row) for label in labels for row in label.responses]
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    responses = pad_sequence(rows, batch_first=True).to(ids.device)
    rewards = reward(ids, mask, responses, lengths)
    best = torch.tensor([label.best for label in labels], device=ids.device)
    return rewards.view(len(labels), -1), best


def hits(rewards: Tensor, best: Tensor) -> Tensor:
    """1 for each label whose best of N (b,) has the highest of the rewards (b, N), or 1 / M if M of
    them tie, else 0. The same text may come twice, with rewards that differ by rounding."""
    is_top = rewards >= rewards.amax(1, keepdim=True) - 1e-5
    return is_top.gather(1, best.unsqueeze(1)).squeeze(1) / is_top.sum(1)


def reward_update(
    accelerator: Accelerator,
    model: Module,
    optimizer: torch.optim.Optimizer,
    labels: list[Label],
    args: Args,
) -> list[Sums]:
    """One optimizer step on the mean cross entropy of a batch. `labels` are this process's share of
    the batch, and all shares are equally large. Returns what is logged."""
    records = []
    groups = torch.arange(len(labels)).split(args.micro_batch_size)
    accelerator.gradient_accumulation_steps = len(groups)
    accelerator.step = 0  # accumulate() counts in it, and steps at the last micro-batch
    for rows in groups:
        with accelerator.accumulate(model):
            rewards, best = label_rewards(model, [labels[i] for i in rows])
            # -log softmax(rewards) at the best of N; for a pair -log sigmoid(chosen - rejected)
            loss = cross_entropy(rewards, best, reduction="sum")
            # accelerate divides by the number of micro-batches, which the factor undoes, and
            # averages over processes: sum / len(labels) becomes the mean over the whole batch.
            accelerator.backward(loss * len(groups) / len(labels))
            if accelerator.sync_gradients:
                norm = clip_gradients(model, args.max_grad_norm)
                if not norm.isfinite():  # the same on all processes: none goes on alone
                    raise UserError("the gradient is not finite: a smaller --lr may help")
                records.append({"train/gradient_norm": (norm, torch.ones_like(norm))})
            optimizer.step()
            optimizer.zero_grad()
        count = best.new_tensor(len(best))
        accuracy = (hits(rewards, best).sum(), count)
        records.append({"train/loss": (loss.detach(), count), "train/accuracy": accuracy})
    return records


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of all elements of x on all processes."""
    return reduce(x.sum(), "sum")


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


def gain_and_bias(
    mean: Tensor, std: Tensor, target_mean: float = 0.0, target_std: float = 1.0
) -> Pair:
    """The affine map that takes rewards with `mean` and `std` to the target's: the original's
    rewards.py, set_reward_norm."""
    gain = target_std / std
    return gain, target_mean - gain * mean


def normalize(rewards: Tensor, gain: Tensor, bias: Tensor) -> dict:
    """Sets gain and bias so that these rewards, computed with the old ones, would have mean 0 and
    (biased) standard deviation 1. Returns mean and standard deviation of the logits."""
    raw = (rewards - bias) / gain
    mean = raw.mean()
    std = raw.std(correction=0)
    new_gain, new_bias = gain_and_bias(mean, std)
    if not (new_gain + new_bias).isfinite():
        raise UserError(f"--normalization_samples {len(raw)}: mean {mean:.3g}, deviation {std:.3g}")
    gain.copy_(new_gain)
    bias.copy_(new_bias)
    return {"mean": mean.item(), "std": std.item()}


@torch.no_grad()
def reference_rewards(
    accelerator: Accelerator,
    reward: Module,
    ref: Module,
    queries: list[Query],
    draw: int,
    args: Args,
) -> Tensor:
    """Rewards (--normalization_samples,), gathered from all processes, of the reference's samples,
    read at token --response_length: they are not truncated. Draw 0 is before the training, 1 after:
    each has its own queries and uniforms."""
    total = args.normalization_samples
    share = total // accelerator.num_processes
    first = accelerator.process_index * share
    u = uniforms(args.seed, draw, total, args.response_length)
    rewards = []
    for rows in torch.arange(first, first + share).split(args.micro_batch_size):
        asked = [queries[(draw * total + i) % len(queries)] for i in rows]
        contexts = [query.context for query in asked]
        responses = sample(ref, contexts, u[rows], args.temperature).tolist()
        labels = []
        for query, response in zip(asked, responses, strict=True):
            labels.append(Label(query.input_ids, [response], 0))  # N = 1: `best` is not used
        rewards.append(label_rewards(reward, labels)[0].flatten())
    return accelerator.gather(torch.cat(rewards))


@torch.no_grad()
def evaluate_labels(reward: Module, labels: list[Label], tokenizer: Tokenizer) -> pd.DataFrame:
    """A row for each held-out label: its texts, which response is best, all rewards, and whether
    the best one has the highest. Every process evaluates all labels, one at a time."""
    rows = []
    for label in labels:
        rewards, best = label_rewards(reward, [label])
        responses = tokenizer.batch_decode(label.responses)
        row = {"query": tokenizer.decode(label.query), "responses": responses, "best": label.best}
        row["rewards"] = rewards[0].tolist()
        row["is_hit"] = hits(rewards, best).item()
        rows.append(row)
    return pd.DataFrame(rows)


# --- rollout and scoring --------------------------------------------------------------------------
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


class Reference(Module):
    """A language model with the interface that sample() expects of a policy."""

    def __init__(self, lm: Model) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, None]:
        """Logits (B, 1, V) after ids, in fp32; and no values."""
        return logits_of(self.lm, hidden_states(self.lm, ids, mask, 1, cache)), None


class RewardModel(Module):
    """reward = gain * logit + bias, with the logit of a classifier. normalize sets gain and bias;
    the gain is also trained with the weights, while the loss does not depend on the bias."""

    def __init__(self, lm: Model) -> None:
        super().__init__()
        self.lm = lm
        self.gain = nn.Parameter(torch.ones(1, device=lm.device))
        self.bias = nn.Parameter(torch.zeros(1, device=lm.device))

    def forward(self, ids: Tensor, mask: Tensor, responses: Tensor, lengths: Tensor) -> Tensor:
        """Rewards (b N,), in fp32, read at the last token of each response. Queries (b, T) are
        padded on the left, responses (b N, R) on the right; `lengths` are without padding."""
        repeats = len(responses) // len(ids)  # N
        # A query is read once, into the cache; its N responses continue from there, and gradients
        # flow back through the cache.
        cache = DynamicCache(config=self.lm.config)
        unused = hidden_states(self.lm, ids, mask, 1, cache).sum()
        cache.batch_repeat_interleave(repeats)
        size = responses.shape[1]
        is_real = torch.arange(size, device=ids.device) < lengths.unsqueeze(1)
        mask = torch.cat([mask.repeat_interleave(repeats, 0), is_real], 1)
        # Where weights are in shards, every output needs a gradient: unused gets one of 0.
        states = hidden_states(self.lm, responses, mask, size, cache) + 0 * unused
        last = states[torch.arange(len(responses)), lengths - 1]
        return self.gain * self.lm.score(last).squeeze(1) + self.bias


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


def hold_in_bf16(model: Model, args: Args) -> None:
    """With --dtype bf16 frozen linear layers take half the memory. autocast would round them to
    bf16 anyway. Biases, the head, and what it leaves alone (embeddings, norms) stay in fp32."""
    for module in model.base_model.modules():
        is_frozen = isinstance(module, nn.Linear | Conv1D) and not module.weight.requires_grad
        if is_frozen and args.dtype == "bf16":
            module.weight.data = module.weight.bfloat16()  # the bias is not: Falcon adds it apart


def merge_adapters(model: Model) -> None:
    """Adds LoRA's weights to those that they adapt."""
    for module in model.float().modules():
        if hasattr(module, "merge"):
            module.merge()


def pad_token_but_not_eos(tokenizer: Tokenizer) -> int:
    """A token to pad with that is not eos: transformers scores a text at its last token that is not
    padding, and that may be its eos."""
    pads = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    pads += tokenizer("\0", add_special_tokens=False).input_ids
    pads += [0, 1]
    return next(token for token in pads if token not in (None, tokenizer.eos_token_id))


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


def begins_with_prompt(row: dict) -> bool:
    """Whether there is a prompt, and both answers begin with it; for texts."""
    prompt = row.get("prompt", row.get("query"))
    answers = (row["chosen"], row["rejected"])
    return isinstance(prompt, str) and all(str(x).startswith(prompt) for x in answers)


def preference_texts(row: dict, tokenizer: Tokenizer, is_repeated: bool) -> tuple[str, str, str]:
    """Texts of prompt, chosen and rejected; chats are rendered by the tokenizer's template.
    is_repeated: answers of this table repeat their prompt; it is then read once. Without a prompt
    column the prompt is the common beginning, up to the end of a word. Examples:

        prompt    chosen         rejected      is_repeated    read as
        Hello     Hello, you.    Hello there   False          Hello | Hello, you. | Hello there
        Why?      Why? Because   Why? So       True           Why? | _Because | _So  (_: a space)
        None      Why? Because   Why? So                      Why? | _Because | _So
    """
    prompt = row.get("prompt", row.get("query"))
    answers = [row["chosen"] or "", row["rejected"] or ""]  # an empty cell is null
    if isinstance(answers[0], list):
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if asked:
            # An answer may repeat the prompt's messages, or not.
            whole = [x if x[: len(asked)] == asked else [*asked, *x] for x in answers]
        else:
            asked = answers[0][:-1]
            whole = answers
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        answers = [tokenizer.apply_chat_template(x, tokenize=False) for x in whole]
    elif prompt is None:
        # The common beginning may end within a word: that piece is left to the answers.
        prompt = re.sub(r"(\s|\A)\S*\Z", "", os.path.commonprefix(answers))
    elif not is_repeated or not begins_with_prompt(row):
        answers = [prompt + answer for answer in answers]
    if not all(answer.startswith(prompt) for answer in answers):
        raise ValueError(f"an answer does not go on from the prompt: {row}")
    chosen, rejected = (answer[len(prompt) :] for answer in answers)
    return prompt, chosen, rejected


def read_preferences(table: datasets.Dataset, tokenizer: Tokenizer, args: Args) -> list[Label]:
    """Labels of a table of preferences: N = 2. A coin decides which of a pair comes first, so that
    no constant answer beats chance. With --truncate_token eos a response ends at its first eos, and
    gets one if it has none; then it is cut to --response_length. A prompt above --query_length is
    dropped or cut (--long_queries; None: dropped); --start_text and --end_text are not used."""
    coins = np.random.default_rng([args.seed, 3]).integers(0, 2, len(table)).tolist()
    end = None
    if args.truncate_token == "eos":
        end = token_id("truncate_token", tokenizer, args)
    long = args.long_queries or "drop"
    # An answer to a short prompt may begin like it by chance: most rows decide.
    is_repeated = sum(map(begins_with_prompt, table)) > len(table) / 2
    labels = []
    num_cut = 0
    for row, coin in zip(table, coins, strict=True):
        texts = preference_texts(row, tokenizer, is_repeated)
        query, *responses = [encode(text, tokenizer) for text in texts]
        if end is not None:
            # [*x, end].index(end) is the place of the first eos, or the length if there is none.
            responses = [x[: [*x, end].index(end)] + [end] for x in responses]
        cut = [x[: args.response_length] for x in responses]
        num_cut += cut != responses
        kept, _ = cut_query(query, args.query_length, None, None, long)
        is_dropped = bool(query) and not kept
        context = bos(tokenizer) + kept  # [] of an empty prompt, if texts have no BOS
        if context and not is_dropped and all(cut) and cut[0] != cut[1]:
            # The chosen response goes to index `coin`.
            labels.append(Label(context, cut[::-1] if coin else cut, coin))
    if num_cut > 0:
        logger.warning(f"cut to --response_length {args.response_length}: {num_cut} pairs")
    return labels


def read_labels(table: datasets.Dataset, tokenizer: Tokenizer, args: Args) -> list[Label]:
    """Labels of a table in either format; those whose responses are all the same teach nothing."""
    names = [name for name in table.column_names if re.fullmatch(r"sample\d+", name)]
    columns = ["query", *[f"sample{i}" for i in range(len(names))]]
    if {"chosen", "rejected"} <= set(table.column_names):
        labels = read_preferences(table, tokenizer, args)
    elif len(names) < 2 or not {"best", *columns} <= set(table.column_names):
        wanted = "query, sample0, ..., best; or chosen, rejected"
        raise ValueError(f"has columns {table.column_names}, not {wanted}")
    else:
        ids_tokenizer = load_ids_tokenizer(tokenizer, args)
        labels = []
        for row in table:
            query, *responses = [encode(row[name], tokenizer, ids_tokenizer) for name in columns]
            if not query or not all(responses) or row["best"] not in range(len(names)):
                raise ValueError(f"a text is empty, or best is none of the samples: {row}")
            if any(response != responses[0] for response in responses):
                labels.append(Label(bos(tokenizer) + query, responses, int(row["best"])))
    num_lost = len(table) - len(labels)
    if num_lost > 0:
        why = "a text empty, a prompt above --query_length, responses equal up to --response_length"
        logger.warning(f"left out {num_lost} of {len(table)} labels: {why}")
    if num_lost > 0.1 * len(table):
        raise ValueError(f"{num_lost} of {len(table)} labels are of no use")
    return labels


def load_labels(tokenizer: Tokenizer, args: Args) -> tuple[list[Label], list[Label]]:
    """Labels to train on, the first --num_labels of `train`, and held-out ones: the first
    --eval_labels of the split `test`, or else `validation`, or else the rest of `train`."""
    splits = load_table("label_dataset", args)
    table = splits["train"]
    with as_user_error("label_dataset", args):
        count = args.num_labels or len(table)
        if count > len(table):
            raise ValueError(f"has {len(table)} labels for --num_labels {count}")
        # A list, because select refuses an empty range that starts at the end of the table.
        rest = table.select(list(range(count, len(table))))
        held_out = splits.get("test", splits.get("validation", rest))
        held_out = held_out.select(range(min(args.eval_labels, len(held_out))))
        labels = read_labels(table.select(range(count)), tokenizer, args)
        if len(labels) < args.batch_size:
            raise ValueError(f"has {len(labels)} labels for --batch_size {args.batch_size}")
        first = labels[0]
        texts = tokenizer.batch_decode([first.query, *first.responses])
        logger.warning(f"--label_dataset: {len(labels)}, first {texts}, best is {first.best}")
        return labels, read_labels(held_out, tokenizer, args)


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


def save_reward_model(
    model: Model, weights: dict, statistics: dict, tokenizer: Tokenizer, args: Args
) -> None:
    """reward_model/, a Hugging Face folder, and results.json."""
    folder = f"{args.output_dir}/reward_model"
    own = {}
    for name, _ in model.named_parameters():  # tied ones once
        if "lora_" not in name:  # merged
            own[name.replace(".base_layer", "")] = weights[f"lm.{name}"]
    own |= {name: x for name, x in model.named_buffers() if f"lm.{name}" in weights}
    model.config.reward_gain = statistics["gain"]
    model.config.reward_bias = statistics["bias"]
    model.save_pretrained(folder, state_dict=own)
    tokenizer.save_pretrained(folder)
    Path(f"{args.output_dir}/results.json").write_text(json.dumps(statistics, indent=2))


def show_results(
    accelerator: Accelerator, samples: pd.DataFrame, statistics: dict, args: Args
) -> None:
    """samples.jsonl, a run's last file; the statistics are printed."""
    accelerator.log({"test/accuracy": statistics.get("test/accuracy", math.nan)})
    path = Path(f"{args.output_dir}/samples.jsonl")
    with as_user_error("output_dir", args):
        write(path, samples.to_json(orient="records", lines=True, double_precision=15))
    rich.print(statistics, f"see {path}")


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
