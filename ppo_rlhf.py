"""PPO from human preferences for language models: a clipped loss, a value head and GAE.

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

tf_adam.py has the optimizer, and plumbing/ what is not about RLHF: the command line, the run's
folder, models and tables. All else is here. A function (except main) that stands in two of the
scripts is identical in both, so some of its branches may be unused here.

Shapes: B responses in a process's share of a batch, b in a minibatch or micro-batch, R tokens per
response, T tokens of query and response together, V tokens in the vocabulary, d hidden units. A
`loss_mask` (B, R) says which tokens of responses count; it is the `mask` of the algorithm's
functions. In forward passes a `mask` is an attention mask (B, T).
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
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather, reduce, set_seed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, confloat, conint
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import pad
from torch.optim import AdamW, Optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from plumbing.data import Query, load_queries
from plumbing.labels import end_token_id, load_reward_fn, newest_reward_model
from plumbing.launch import UserError, make_accelerator, prepare, run_main
from plumbing.models import (
    Cache,
    TokenRows,
    forward,
    freeze,
    full_tensor,
    load_model,
    load_tokenizer,
    pad_rows,
    with_adapters,
)
from plumbing.run import Run, choose_folder, save_policy, write_samples
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
    eval_queries: PositiveInt = 64  # Held-out queries, answered before and after the training
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)

    # models
    base_model: str = "tiny/model"  # Policy and reference start from it: a folder or hub id
    # Classifier with one label: a folder or hub id (None: the newest one that is finished, in
    # runs/train_reward-<preset>-*)
    reward_model: str | None = None
    # Takes the place of --reward_model: `module:function`, called with prompts, completions and the
    # table's columns, as TRL calls reward functions (but without completion_ids)
    reward_fn: str | None = None
    # tf32: GPUs multiply matrices in TF32. bf16: autocast, and frozen linear layers held in bf16
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    # Recompute activations in the backward pass: less memory, at least a third more time
    gradient_checkpointing: bool = False
    # Train LoRA adapters of this rank in place of the policy's weights (0: train all weights)
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveFloat = 16.0  # LoRA adapters are scaled by this / --lora_rank

    # the task

    # A file (json, jsonl, csv, parquet, txt), or a folder or hub id, perhaps with :config:split
    query_dataset: str = "tiny/queries"
    # The column of prompts (None: the first that exists of prompt, messages, query, text)
    prompt_column: str | None = None
    query_length: PositiveInt = 32  # Longest query, in tokens
    # What happens to longer queries (None: keep_start if there is an --end_text, else drop)
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None
    query_prefix: str | None = None  # Text before every query, not for the reward model
    query_suffix: str | None = None  # Text after every query, not for the reward model
    # One token: a query begins after its first occurrence; texts without it are dropped (None: off)
    start_text: str | None = "."
    # One token: a query is cut back to its last occurrence, or dropped without one (None: off)
    end_text: str | None = "."
    response_length: PositiveInt = 24  # Tokens sampled per response (or fewer: --mask_truncated)
    temperature: PositiveFloat = 0.7  # Divides logits, wherever probabilities are computed
    # The token that ends a response (`eos`: the tokenizer's; None: every response is complete)
    truncate_token: str | None = "."
    truncate_after: NonNegativeInt = 16  # The token ends a response only at this index or later
    penalty_reward_value: float = -1.0  # For a response that no truncate token ends
    # --penalty_reward_value replaces the score (original) or is added to it
    penalty_mode: Literal["replace", "add"] = "replace"
    # Tokens after the truncate token are left out of KL and loss (original: they count)
    mask_truncated: bool = False

    # updates and optimizer
    total_episodes: PositiveInt = 12_800  # Responses sampled in the run, in whole batches
    batch_size: PositiveInt = 128  # Responses per update, over all devices
    micro_batch_size: PositiveInt = 128  # Rows per pass on a device; sampling takes all at once
    num_minibatches: PositiveInt = 1  # Optimizer steps per epoch
    num_epochs: PositiveInt = 4  # Passes over the batch in each update
    lr: NonNegativeFloat = 2e-4  # The highest learning rate, see --lr_schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # --lr decays to 0, or stays
    # Number n of warm-up updates: update i < n (from 0) has (i + 1) / (n + 1) of its scheduled rate
    lr_warmup: NonNegativeInt = 0
    # Adam as TensorFlow has it (original), or torch.optim.AdamW
    adam: Literal["tf", "torch"] = "tf"
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)  # Decay rates of Adam's two averages
    weight_decay: NonNegativeFloat = 0.0  # Decoupled, as in AdamW; for matrices only
    max_grad_norm: PositiveFloat | None = None  # Gradients of a larger norm are scaled down to it

    # rewards
    kl_coef: NonNegativeFloat = 0.15  # Coefficient of the KL penalty at the start
    # KL (k1, in nats per response) that the coefficient is adapted to reach (None: fixed)
    adaptive_kl_target: PositiveFloat | None = 6.0
    # An update changes the coefficient by at most 20 % times --batch_size / this
    kl_horizon: PositiveFloat = 2_000.0
    # The run stops when the KL (nats per response) is above this, or below minus this
    max_kl: PositiveFloat = 200.0

    # the algorithm
    cliprange: NonNegativeFloat = 0.2  # The probability ratio is clipped to 1 +- this
    cliprange_value: NonNegativeFloat = 0.2  # The predicted value is clipped to the old one +- this
    vf_coef: NonNegativeFloat = 0.1  # Weight of the value loss
    gamma: NonNegativeFloat = 1.0  # Discount per token
    lam: NonNegativeFloat = 0.95  # Lambda of generalised advantage estimation
    whiten_rewards: bool = True  # Scale rewards of a minibatch to variance 1, but keep their mean
    whiten_advantages: bool = True  # Scale advantages of a minibatch to mean 0 and variance 1
    # What the value head reads: the policy's trunk (shared), or a second trunk, trained whole, that
    # starts as the one of --base_model (policy) or of --reward_model (reward)
    critic: Literal["shared", "policy", "reward"] = "shared"
    critic_lr: NonNegativeFloat | None = None  # Learning rate of value head and critic (None: --lr)
    critic_warmup: NonNegativeInt = 0  # First updates in which only value head and critic learn


# Settings of OpenAI's launch.py, or of the scripts it starts (RLOO has PPO's). Queries in the label
# files are cut already: no start_text, no end_text.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
OPENAI = Args(base_model="gpt2", start_text=None, end_text=None, total_episodes=1_000_000)
BOOKS = replace(OPENAI, query_length=64, batch_size=512, lr=1e-5, kl_horizon=10_000)  # BookCorpus
POSTS = replace(  # Reddit
    OPENAI,
    query_length=500,
    long_queries="keep_start",
    query_suffix="\n\nTL;DR:",
    response_length=75,
    truncate_token="\n",
    truncate_after=55,
    batch_size=32,
    micro_batch_size=16,
    lr=2e-6,
    kl_coef=0.03,
    adaptive_kl_target=None,
    whiten_rewards=False,
)
NEWS = replace(POSTS, query_prefix="Article:\n\n", temperature=0.5, kl_coef=0.01)  # CNN/DM
PRESETS = {
    "tiny": Args(),
    "sentiment": replace(BOOKS, query_dataset=f"{FILES}/sentiment/offline_5k.json"),
    "descriptiveness": replace(BOOKS, query_dataset=f"{FILES}/descriptiveness/offline_5k.json"),
    "cnndm": replace(NEWS, query_dataset=f"{FILES}/cnndm/offline_60k.json"),
    "tldr": replace(POSTS, query_dataset=f"{FILES}/tldr/offline_60k.json"),
}


@dataclass
class Batch:
    """B responses of R tokens, and what follows from them. The fields are set in this order, and
    the last three (RLOO: the last) in each minibatch. `sampled_logprobs` are computed token by
    token with a cache, the other log-probabilities in one pass over whole responses."""

    contexts: TokenRows  # B lists of the tokens before each response
    responses: Tensor  # (B, R), as sampled
    lengths: Tensor  # (B,), of the responses up to their truncate token
    found_end: Tensor  # (B,), whether there is a truncate token, at --truncate_after or later
    loss_mask: Tensor  # (B, R), tokens that count: all, or those within `lengths`
    num_tokens: list[int]  # B, how many tokens count; a list, so that no pass waits for the GPU
    sampled_logprobs: Tensor  # (B, R), for sampling_error
    logprobs: Tensor | None = None  # (B, R), of the policy before the update: the old ones
    ref_logprobs: Tensor | None = None  # (B, R), of the reference
    values: Tensor | None = None  # (B, R), predicted before each token
    scores: Tensor | None = None  # (B,)
    rewards: Tensor | None = None  # (B, R), before whitening
    advantages: Tensor | None = None  # of tokens (B, R), or of responses (B,)
    returns: Tensor | None = None  # (B, R), new in each minibatch
    loss_weights: Tensor | None = None  # 1 where the loss is averaged; shaped like advantages

    def sum_tokens(self, x: Tensor) -> Tensor:
        """Sums (B,) of x (B, R) over each response's tokens that count."""
        return (x * self.loss_mask).sum(1)


def main(preset: str, args: Args) -> None:
    """Set-up; a loop of rollout, score, reward, update, log; at the end save and evaluate."""
    accelerator = make_accelerator(args.dtype)
    rank = accelerator.process_index
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    check_settings(args, accelerator.num_processes, k=1)
    if args.critic_warmup >= num_updates:
        raise UserError(f"--critic_warmup {args.critic_warmup} must be below {num_updates} updates")
    args.output_dir = choose_folder(FILE, preset, args)
    share = args.batch_size // accelerator.num_processes  # responses of this process in an update

    # data and models; most of what cannot run fails here, before anything is written
    set_seed(args.seed)
    tokenizer = load_tokenizer("base_model", args.base_model)
    truncate_id = end_token_id(args, tokenizer)
    num_queries = num_updates * args.batch_size
    held_out, queries = load_queries(args, tokenizer, args.eval_queries, num_queries)
    contexts = [query.for_policy for query in held_out + queries]
    longest = max(map(len, contexts)) + args.response_length
    load = partial(load_model, tokenizer=tokenizer, longest=longest, args=args)
    if args.reward_fn:
        score_fn = load_reward_fn(args.reward_fn, tokenizer)
    else:
        args.reward_model = args.reward_model or newest_reward_model(preset)
        score_fn = load_reward_model(load, args.reward_model, args)
    lm, ref_lm = load_policy_and_reference(load, args)
    policy = ActorCritic(lm, load_critic(load, args))
    ref = ActorCritic(ref_lm)  # its values are not used
    # `wrapped` is what is trained: it averages gradients over processes. `policy` is inside.
    wrapped, policy, optimizer = prepare(accelerator, policy, make_optimizer(policy, args))
    # The reference is the untrained policy, also when a run is resumed.
    before = evaluate(ref, ref, held_out, score_fn, tokenizer, truncate_id, args)
    # --resume compares these: the held-out queries, and those of the first update. Others may
    # be new: a larger --total_episodes reads more of them.
    data = contexts[: args.eval_queries + num_queries // num_updates]
    run = Run(accelerator, FILE, args, num_updates, data, state={"kl_coef": args.kl_coef})
    run.start()
    for update in run.updates():
        kl_coef = run.state["kl_coef"]

        # 1. rollout: responses to the queries; their log-probabilities, by policy and reference
        start = update * args.batch_size + rank * share
        my_queries = [queries[i % len(queries)] for i in range(start, start + share)]
        noise = uniforms(args.seed, update + 1, args.batch_size, args.response_length)
        batch = rollout(policy, my_queries, noise.split(share)[rank], truncate_id, args)
        epochs = shuffle(np.arange(share), rank, update, args)  # (epochs, minibatches, b)
        # set_logprobs reads the first epoch's micro-batches, so padding and rounding are those of
        # the first optimizer step. There every ratio is 1, on a CPU exactly.
        set_logprobs(batch, policy, ref, epochs[0], args)

        # 2. score: of the response up to its truncate token, with a penalty if there is none
        with run.keeping_updates():  # if scoring fails, the last complete update is saved
            batch.scores = score_responses(score_fn, my_queries, batch, args)  # (B,)

        # 3. reward: the score minus a KL penalty
        token_kl = (batch.logprobs - batch.ref_logprobs) * batch.loss_mask  # (B, R), estimator k1
        kl = token_kl.sum(1)  # (B,)
        batch.rewards = at_last_token(batch.scores, batch.loss_mask) - kl_coef * token_kl

        # 4. update: learning rates, and the optimizer steps
        set_learning_rates(optimizer, update, update / num_updates, args, **max_lrs(update, args))
        means = ppo_update(accelerator, wrapped, optimizer, batch, epochs, args)

        # 5. log: means over the responses (B,) of all processes, and what the update has added
        means.add(
            {
                "objective/scores": batch.scores,
                "objective/score_total": batch.rewards.sum(1),
                "objective/found_end": batch.found_end,
                "objective/length": batch.lengths,
                "objective/kl": kl,
                "objective/entropy": -batch.sum_tokens(batch.logprobs),  # estimated from samples
                "objective/non_score_reward": -kl_coef * kl,
                "sampling_error": sampling_error(batch),
            }
        )
        metrics = means.reduce()
        metrics |= {
            "objective/kl_coef": kl_coef,
            "episode": (update + 1) * args.batch_size,
            "lr": optimizer.param_groups[0]["lr"],
            "val/var_explained": 1 - metrics["val/error"] / (metrics["returns/var"] + 1e-8),
        }
        run.log(metrics, "objective/scores", "objective/kl")  # prints these, and adds seconds
        check_update(update, metrics, args)

        # 6. adapt the KL coefficient; leave a checkpoint if one is due
        if update >= args.critic_warmup:  # earlier updates do not move the policy
            run.state["kl_coef"] = adapt_kl_coef(kl_coef, metrics["objective/kl"], args)
        is_beyond = abs(metrics["objective/kl"]) > args.max_kl
        run.end_update(f"objective/kl is beyond --max_kl {args.max_kl:g}" if is_beyond else "")

    # 7. save and evaluate
    save_policy(accelerator, wrapped, tokenizer, args.output_dir)
    after = evaluate(policy, ref, held_out, score_fn, tokenizer, truncate_id, args)
    write_samples(before, after, run.folder)
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)  # ends DDP, else gloo can hang
    accelerator.end_training()


# --- the algorithm --------------------------------------------------------------------------------
def score_responses(score_fn: Callable, queries: list[Query], batch: Batch, args: Args) -> Tensor:
    """Scores (B,) of responses up to their truncate token, with the penalty where there is none."""
    scores = score_fn(queries, truncated(batch))
    return penalize_missing_end(scores, batch.found_end, args)


def penalize_missing_end(scores: Tensor, found_end: Tensor, args: Args) -> Tensor:
    """Scores (B,). Where there is no truncate token, --penalty_reward_value replaces the score or
    is added to it (--penalty_mode)."""
    if args.penalty_mode == "add":
        return torch.where(found_end, scores, scores + args.penalty_reward_value)
    return torch.where(found_end, scores, args.penalty_reward_value)


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
    each: A_t = delta_t + gamma lam A_t+1, delta_t = r_t + gamma V_t+1 - V_t; 0 outside mask."""
    values = values * mask
    rewards = rewards * mask
    advantages = torch.zeros_like(values)
    advantage = 0.0
    next_value = 0.0  # after the last token
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, advantages + values


def set_advantages(batch: Batch, args: Args) -> None:
    """Sets the batch's advantages and returns."""
    rewards = batch.rewards
    mask = batch.loss_mask
    if args.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    batch.advantages, batch.returns = gae(batch.values, rewards, mask, args.gamma, args.lam)
    if args.whiten_advantages:
        batch.advantages = whiten(batch.advantages, mask, shift_mean=True)


def ppo_loss(
    logprobs: Tensor, values: Tensor, old: Batch, args: Args
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Clipped losses of policy and value head at each token, and metrics; all are (b, R). `old` is
    the micro-batch, with log-probabilities and values from before the update. Schulman et al. 2017,
    arXiv:1707.06347, equation 7; for values lm_human_preferences/train_policy.py."""
    log_ratio = logprobs - old.logprobs
    ratio = log_ratio.clamp(-40, 40).exp()  # clamped, so that it does not overflow
    policy_loss = -old.advantages * ratio
    policy_loss_clipped = -old.advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    policy_loss_max = torch.maximum(policy_loss, policy_loss_clipped)

    low = old.values - args.cliprange_value
    high = old.values + args.cliprange_value
    value_loss = (values - old.returns) ** 2
    value_loss_clipped = (values.clamp(low, high) - old.returns) ** 2
    value_loss_max = 0.5 * torch.maximum(value_loss, value_loss_clipped)
    metrics = {
        "loss/policy": policy_loss_max,
        "policy/approxkl": 0.5 * log_ratio**2,
        "policy/clipfrac": policy_loss_clipped > policy_loss,
        "policy/ratio": ratio,
        "loss/value": value_loss_max,
        "val/vpred": values,
        "val/error": value_loss,
        "val/clipfrac": value_loss_clipped > value_loss,
    }
    return policy_loss_max, value_loss_max, metrics


def ppo_update(
    accelerator: Accelerator,
    wrapped: Module,
    optimizer: Optimizer,
    batch: Batch,
    epochs: Tensor,
    args: Args,
) -> "Metrics":
    """Makes all optimizer steps on one batch, and returns what is logged of them. epochs
    (num_epochs, num_minibatches, b) says which rows are in which minibatch."""
    means = Metrics()
    first_errors = []
    for step, minibatch in enumerate(epochs.flatten(0, 1)):
        mini = select(batch, minibatch)
        set_advantages(mini, args)  # whitens each process's minibatch alone, as the original does
        mean, variance = moments(mini.returns, mini.loss_mask)
        means.add({"returns/mean": mean, "returns/var": variance})
        mean, variance = moments(mini.values, mini.loss_mask)
        means.add({"val/mean": mean, "val/var": variance})

        # The loss is a single mean over the minibatches of all processes. Each micro-batch adds its
        # share. DDP and FSDP then average over processes, which num_processes undoes.
        mini.loss_weights = mini.loss_mask  # (b, R)
        loss_scale = accelerator.num_processes / reduce(mini.loss_weights.sum(), "sum")
        groups = micro_batches(torch.arange(len(minibatch)), mini, args.micro_batch_size)
        for i, rows in enumerate(groups, 1):
            micro = select(mini, rows)
            is_last = i == len(groups)
            with defer_averaging(accelerator, wrapped, is_last):
                all_logprobs, predicted = forward_response(wrapped, micro, args.temperature)
                logprobs = predicted["logprobs"]
                values = predicted["values"]
                policy_loss, value_loss, metrics = ppo_loss(logprobs, values, micro, args)
                loss = policy_loss + args.vf_coef * value_loss  # a loss of your own: add it here
                accelerator.backward((loss * micro.loss_weights).sum() * loss_scale)
            # All metrics are from before the step, so at step 0 every ratio is 1.
            means.add(metrics | {"loss/total": loss}, micro.loss_weights)
            means.add({"policy/entropy": entropy(all_logprobs.detach())}, micro.loss_mask)
            del all_logprobs  # makes room for the next ones
            if step == 0:
                first_errors.append((logprobs.detach() - micro.logprobs).abs().max())
        gradient_norm = clip_gradients(wrapped, args.max_grad_norm)
        means.add({"gradient_norm": gradient_norm})
        optimizer.step()
        optimizer.zero_grad()
    means.add({"first_ratio_error": gather(torch.stack(first_errors).max()).max()})
    return means


def adapt_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """Raises the coefficient where the KL is above --adaptive_kl_target, and lowers it where it is
    below. It is multiplied by 1 + c e, with the relative error e clipped to +-0.2 and c =
    batch_size / kl_horizon (Ziegler et al. 2019, section 2.2, has c = 0.1 and calls it K_beta)."""
    if args.adaptive_kl_target is None:
        return kl_coef
    error = min(max(kl / args.adaptive_kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


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


def max_lrs(update: int, args: Args) -> dict[str, float]:
    """The highest learning rates of policy, value head and critic, which are parts of the model."""
    policy_lr = 0.0 if update < args.critic_warmup else args.lr  # Adam's averages still move
    critic_lr = args.lr if args.critic_lr is None else args.critic_lr
    return {"lm": policy_lr, "value_head": critic_lr, "critic": critic_lr}


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


# --- checks ---------------------------------------------------------------------------------------
# Limits of (first_ratio_error, sampling_error), in nats; larger differences are not rounding. The
# first compares set_logprobs with the first optimizer step, token by token. The second compares
# set_logprobs with sampling, which reads a cache, and takes means over responses.
TOLERANCES = {"fp32": (1e-3, 1e-3), "tf32": (0.01, 0.05), "bf16": (0.02, 0.3)}


def sampling_error(batch: Batch) -> Tensor:
    """How much log-probabilities of sampling differ from those of passes over whole responses: the
    largest mean over a response, on all processes. In bf16 one token may differ by chance."""
    errors = batch.sum_tokens((batch.logprobs - batch.sampled_logprobs).abs())
    means = errors / batch.loss_mask.sum(1)  # (B,)
    return gather(means.max()).max()


def check_update(update: int, metrics: dict, args: Args) -> None:
    """UserError if one of these numbers is beyond its limit or NaN. docs/metrics.md has causes."""
    ratio_limit, sampling_limit = TOLERANCES[args.dtype]
    kl_limit = math.inf  # so only NaN is beyond it; main compares the KL with --max_kl
    if update == 0:  # the policy is still the reference: their KL is rounding
        kl_limit = ratio_limit * args.response_length
    limits = {
        "gradient_norm": (np.finfo(float).max, "the loss is not finite, or --lr is too high"),
        "first_ratio_error": (ratio_limit, "the passes of rollout and update differ"),
        "sampling_error": (sampling_limit, "tokens are sampled from other logits"),
        "objective/kl": (kl_limit, "policy and reference differ"),
    }
    for name, (limit, hint) in limits.items():
        value = metrics[name]
        if not abs(value) <= limit:  # also where it is NaN
            raise UserError(
                f"{name} is {value:.3g}, its limit {limit:.3g}: {hint}; see docs/metrics.md"
            )


# --- rollout and scoring --------------------------------------------------------------------------
# Each use of random numbers has its own stream, default_rng([seed, stream, ..]): in one script none
# repeats the numbers of another. plumbing/data.py has streams 2 and 3; 5 and more are free.
STREAM_SAMPLES, STREAM_ROWS = 1, 4


def shuffle(rows: np.ndarray, rank: int, update: int, args: Args) -> Tensor:
    """The row numbers of an update's minibatches, (num_epochs, num_minibatches, b). Each epoch
    permutes `rows`: numbers (B,), or a matrix (B / K, K) whose lines stay together."""
    generator = np.random.default_rng([args.seed, STREAM_ROWS, rank, update])
    epochs = [generator.permutation(rows) for _ in range(args.num_epochs)]
    return torch.tensor(np.array(epochs)).view(args.num_epochs, args.num_minibatches, -1)


def uniforms(seed: int, draw: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, different ones for each `draw`: 0 for
    evaluations, 1, 2, ... for updates (train_reward.py: 0 before the training, 1 after). Processes
    take their rows of one array, so these numbers do not depend on how many processes there are."""
    generator = np.random.default_rng([seed, STREAM_SAMPLES, draw])
    numbers = generator.random((batch, length), np.float32)
    return torch.from_numpy(numbers).to(PartialState().device)


@torch.no_grad()
def rollout(
    policy: Module, queries: list[Query], noise: Tensor, truncate_id: int | None, args: Args
) -> Batch:
    """Responses to the queries, from uniform noise (B, R)."""
    contexts = [query.for_policy for query in queries]
    cache = Cache(config=policy.lm.config)
    after = args.truncate_after
    end = truncate_id if args.mask_truncated else None  # None samples R tokens, as all count
    # autocast discards its bf16 copies of trained weights when the outermost autocast block ends.
    # This disabled block is the outermost one, so weights are cast once and not at every token.
    with torch.autocast(noise.device.type, enabled=False):
        responses, sampled_logprobs = sample(
            policy, cache, contexts, noise, args.temperature, end, after
        )
    until_end, found_end = find_end(responses, truncate_id, after)
    lengths = until_end.sum(1)
    loss_mask = until_end if args.mask_truncated else torch.ones_like(until_end)
    num_tokens = loss_mask.sum(1).tolist()
    return Batch(contexts, responses, lengths, found_end, loss_mask, num_tokens, sampled_logprobs)


@torch.no_grad()
def set_logprobs(
    batch: Batch, policy: Module, ref: Module, minibatches: Tensor, args: Args
) -> None:
    """Sets batch.logprobs, batch.ref_logprobs, and what else the policy predicts, like PPO's
    batch.values. Rows are read in the micro-batches of `minibatches` (num_minibatches, b)."""
    fields = defaultdict(lambda: torch.zeros_like(batch.sampled_logprobs))  # (B, R) each, by name
    for minibatch in minibatches:
        for rows in micro_batches(minibatch, batch, args.micro_batch_size):
            micro = select(batch, rows)
            # [1] drops the (b, R, V) tensor at once, which makes room for the reference's.
            predicted = forward_response(policy, micro, args.temperature)[1]
            of_ref = forward_response(ref, micro, args.temperature)[1]
            predicted["ref_logprobs"] = of_ref["logprobs"]
            index = rows.to(batch.responses.device)
            for name, x in predicted.items():
                fields[name][index, : x.shape[1]] = x  # the rest stays 0: it does not count
    vars(batch).update(fields)  # sets batch.logprobs, batch.ref_logprobs, ..


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


def truncated(batch: Batch) -> TokenRows:
    """The responses as lists, up to and including their truncate token."""
    rows = zip(batch.responses.tolist(), batch.lengths.tolist(), strict=True)  # waits for the GPU
    return [row[:length] for row, length in rows]


def select(batch: Batch, rows: Tensor) -> Batch:
    """A batch of these rows (numbers, on the CPU), in this order. Fields (B, R) are cut after the
    last token that counts in any of the rows."""
    index = rows.to(batch.responses.device)
    longest = max(batch.num_tokens[i] for i in rows)
    fields = {}
    for name, x in vars(batch).items():
        if isinstance(x, list):
            fields[name] = [x[i] for i in rows]
        elif x is not None:
            has_tokens = x.shape[:2] == batch.responses.shape
            fields[name] = x[index, :longest] if has_tokens else x[index]
    return replace(batch, **fields)


@torch.no_grad()
def score_by_model(
    model: PreTrainedModel,
    head: nn.Linear,
    micro_batch_size: int,
    queries: list[Query],
    responses: TokenRows,
) -> Tensor:
    """Scores (B,) of a reward model: its reward_head reads the state at each response's end."""
    texts = [query.for_reward + row for query, row in zip(queries, responses, strict=True)]
    scores = []
    for i in range(0, len(texts), micro_batch_size):
        ids, mask = pad_rows(texts[i : i + micro_batch_size])
        states = forward(model.base_model, ids, mask).last_hidden_state
        scores.append(head(states[:, -1]).flatten())
    return torch.cat(scores)


def evaluate(
    policy: Module,
    ref: Module,
    queries: list[Query],
    score_fn: Callable,
    tokenizer: PreTrainedTokenizerBase,
    truncate_id: int | None,
    args: Args,
) -> dict[str, list]:
    """Columns of samples.jsonl: for each query a response, its score (with the penalty, as in
    training), KL and found_end. Each process answers all queries, from the same noise each time."""
    noise = uniforms(args.seed, 0, len(queries), args.response_length)
    batch = rollout(policy, queries, noise, truncate_id, args)
    set_logprobs(batch, policy, ref, torch.arange(len(queries))[None], args)  # one minibatch
    scores = score_responses(score_fn, queries, batch, args)
    kl = batch.sum_tokens(batch.logprobs - batch.ref_logprobs)
    return {
        "query": tokenizer.batch_decode([query.for_reward for query in queries]),
        "response": tokenizer.batch_decode(truncated(batch)),
        "score": scores.tolist(),
        "kl": kl.tolist(),
        "found_end": batch.found_end.tolist(),
    }


# --- forward passes -------------------------------------------------------------------------------
def forward_response(
    policy: Module, batch: Batch, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the policy predicts at each position of the responses: the log-probabilities of the
    whole vocabulary, (b, R, V), and a dict of tensors (b, R): `logprobs`, of the responses' own
    tokens, and what else the policy returns, like `values`, predicted before each token."""
    ids, mask = pad_rows(batch.contexts)
    inputs = batch.responses[:, :-1]  # what follows the last token is not needed
    ids = torch.cat([ids, inputs], 1)
    mask = pad(mask, (0, inputs.shape[1]), value=True)
    predicted = policy(ids, mask, last=inputs.shape[1] + 1)
    # In place, as V is large: no backward pass needs the undivided logits.
    all_logprobs = predicted.pop("logits").div_(temperature).log_softmax(-1)
    predicted["logprobs"] = all_logprobs.gather(2, batch.responses.unsqueeze(2)).squeeze(2)
    return all_logprobs, predicted


def entropy(all_logprobs: Tensor) -> Tensor:
    """Entropies (b, R) of the distributions with these log-probabilities (b, R, V)."""
    return -(all_logprobs.exp() * all_logprobs).sum(-1)


class ActorCritic(Module):
    """A policy and a value head, which reads the states of the policy's trunk or of a critic's.
    In bf16 runs heads compute in fp32 (GPUs: in TF32), see patch_layers in plumbing/models.py."""

    def __init__(self, lm: PreTrainedModel, critic: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.critic = None if critic is None else critic.base_model
        if hasattr(critic, "score"):  # a reward model, whose head predicts the first values
            self.value_head = reward_head(critic)
            return
        self.value_head = nn.Linear(lm.get_output_embeddings().in_features, 1, device=lm.device)
        for p in self.value_head.parameters():
            nn.init.zeros_(p)  # as in the original

    def forward(
        self, ids: Tensor, mask: Tensor, last: int = 1, cache: Cache | None = None
    ) -> dict[str, Tensor]:
        """Predictions of what follows each of the last tokens of ids (b, T): `logits` (b, last, V),
        in fp32, and in PPO `values` (b, last). With a cache, which is for sampling, no values."""
        output = forward(self.lm, ids, mask, cache, last)
        if cache is not None:  # sampling needs no values
            return {"logits": output.logits}
        states = output.last_hidden_state
        if self.critic is not None:
            states = forward(self.critic, ids, mask).last_hidden_state
        values = self.value_head(states[:, -last:]).squeeze(-1)  # (b, last)
        return {"logits": output.logits, "values": values}


@torch.no_grad()
def reward_head(classifier: PreTrainedModel) -> nn.Linear:
    """A layer from states (..., d) to rewards (..., 1), gain * logit + bias, with the classifier's
    logit and the two numbers that train_reward.py wrote to its config.json."""
    head = nn.Linear(classifier.score.in_features, 1, device=classifier.device)
    head.weight.copy_(getattr(classifier.config, "reward_gain", 1.0) * classifier.score.weight)
    head.bias.fill_(getattr(classifier.config, "reward_bias", 0.0))
    return head


def micro_batches(rows: Tensor, batch: Batch, size: int) -> tuple[Tensor, ...]:
    """Splits row numbers into groups of at most `size`, sorted by length to save padding. Responses
    to one query stay together, as RLOO needs: all are sorted by the length of the longest one, and
    the sort is stable."""
    longest = defaultdict(int)  # by query
    for i in rows:
        query = tuple(batch.contexts[i])
        longest[query] = max(longest[query], len(query) + batch.num_tokens[i])
    lengths = torch.tensor([longest[tuple(batch.contexts[i])] for i in rows])
    return rows[lengths.argsort(stable=True)].split(size)


# --- models ---------------------------------------------------------------------------------------
def load_reward_model(load: Callable, name: str, args: Args) -> Callable:
    """A function from queries and responses, in lists of tokens, to scores (B,). Here and below,
    `load` is load_model of plumbing/models.py, with the tokenizer, length and args of main."""
    model = freeze(load("reward_model", name, AutoModelForSequenceClassification), args.dtype)
    return partial(score_by_model, model, reward_head(model), args.micro_batch_size)


def load_policy_and_reference(
    load: Callable, args: Args
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models from --base_model: the policy, and the reference, which is frozen. With LoRA they
    share all weights but the policy's adapters."""
    ref = load("base_model", args.base_model, AutoModelForCausalLM)
    if args.lora_rank:  # adapters get the dtype of the weights, which `freeze` may hold in bf16
        lm = with_adapters(ref, args.lora_rank, args.lora_alpha)
        return lm, freeze(ref, args.dtype)
    ref = freeze(ref, args.dtype)  # now on its GPU, so the host never holds both
    return load("base_model", args.base_model, AutoModelForCausalLM), ref


def load_critic(load: Callable, args: Args) -> PreTrainedModel | None:
    """The model whose trunk the value head reads, trained whole; None if it reads the policy's."""
    if args.critic == "shared":
        return None
    if args.critic == "policy":
        return load("base_model", args.base_model, AutoModelForCausalLM)
    if args.reward_model is None:
        raise UserError("--critic reward needs --reward_model beside a --reward_fn")
    return load("reward_model", args.reward_model, AutoModelForSequenceClassification)


# --- entry point ----------------------------------------------------------------------------------
def check_settings(args: Args, num_processes: int, k: int) -> None:
    """UserError for settings that do not go together. k responses to a query stay together."""
    divisor = num_processes * args.num_minibatches * k
    if args.batch_size % divisor:
        raise UserError(
            f"--batch_size {args.batch_size} must be a multiple of {divisor} (processes x "
            "minibatches x responses per query)"
        )
    if args.micro_batch_size % k:
        raise UserError(
            f"--micro_batch_size {args.micro_batch_size} must be a multiple of {k} (--rloo_k)"
        )
    # else adapt_kl_coef could make the coefficient 0, or negative
    if args.adaptive_kl_target and args.batch_size >= 5 * args.kl_horizon:
        raise UserError(
            f"--kl_horizon {args.kl_horizon} must be above a fifth of --batch_size "
            f"{args.batch_size}"
        )


if __name__ == "__main__":
    run_main(main, Args, PRESETS)
