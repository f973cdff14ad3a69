"""PPO from human preferences for language models, in one file.

A policy continues queries, a reward model (train_reward.py) scores the continuations, and PPO moves the policy towards
higher scores while a penalty on the KL divergence holds it near the model that it started from. "The original" is
OpenAI's lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593); the tests replay its arrays.

    python ppo_rlhf.py                                              # embedded default, two CPU cores
    python ppo_rlhf.py sentiment --dtype bf16 --track               # OpenAI's sentiment task on one GPU
    accelerate launch --num_processes 8 ppo_rlhf.py sentiment       # the same on eight: batch sizes are global
Shapes: B sequences (K per query, next to each other; K = 1 in PPO), R response tokens, V vocabulary, d hidden size.
"""

import signal

if __name__ == "__main__":  # Ctrl-C during the imports, which take seconds, ends without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import copy
import ctypes
import dataclasses
import fcntl
import importlib
import inspect
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from huggingface_hub import hf_hub_download
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.utils.peft_utils import find_adapter_config_file

from tf_adam import make_optimizer


@dataclasses.dataclass
class Args:
    """Settings of a run. The name of a preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    # the run
    seed: int = 1  # Seed of query order, sampling and shuffles (rank r shuffles with seed + 100003 r)
    output_dir: str | None = None  # Folder for all that this run makes (None: runs/<script>-<preset>-<seed>-<time>)
    resume: bool = False  # Go on with the run in --output_dir, whose settings hold where no flag is given; or start it
    checkpoint_every: int = 25  # Updates between checkpoints (0: only when the run is interrupted)
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)
    eval_queries: int = 64  # Held-out queries, sampled before the first and after the last update
    # models
    base_model: str = "tiny/model"  # Policy and reference start from this causal LM: a folder or a hub id
    reward_model: str | None = None  # Classifier with one label: folder or hub id (None: the preset's newest in runs/)
    reward_fn: str | None = None  # Instead of it `module:function` of (queries, responses, any columns) -> floats
    dtype: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast with fp32 master weights, fp32 logits and values
    lora_rank: int = 0  # Train only LoRA adapters of this rank on frozen weights, which bf16 holds in bf16 (0: all)
    lora_alpha: float = 16.0  # They are scaled by this over the rank
    unfrozen_layers: int = 0  # Train only so many upper layers; the reference shares the others (0: all)
    # the task
    query_dataset: str = "tiny/queries"  # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config]
    token_ids_of: str | None = None  # The model whose token ids stand in columns of them (None: --base_model)
    query_length: int = 32  # Longest query, in tokens
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None  # None: drop, or with --end_text keep_start
    query_prefix: str = ""  # Text before every query that the policy reads (the reward model does not)
    query_suffix: str = ""  # Text after every query that the policy reads (the reward model does not)
    start_text: str | None = "."  # One token: a query begins after its first occurrence in the text (None: at once)
    end_text: str | None = "."  # One token: a query is cut back to its last occurrence (None: it is not)
    response_length: int = 24  # Tokens sampled per response
    temperature: float = 0.7  # Divides the logits for sampling, log-probabilities and entropies
    top_p: float = 1.0  # Sample among the likeliest tokens of this probability; ratios and KL stay those of all
    truncate_token: str | None = "."  # A response ends with this token; `eos`: the tokenizer's; None: it never ends
    truncate_after: int = 16  # A truncate token counts from this index on (1: an empty response does not end)
    penalty_reward_value: float = -1.0  # Penalty for a response without a truncate token
    penalty_mode: Literal["replace", "add"] = "replace"  # The penalty replaces the score (original) or is added to it
    mask_truncated: bool = False  # What follows the truncate token is left out of KL and loss (original: stays in)
    # the algorithm
    total_episodes: int = 12_800  # Responses sampled in the whole run
    batch_size: int = 128  # Episodes per update, over all devices
    micro_batch_size: int = 128  # Rows per forward and backward pass on one device; gradients accumulate
    num_minibatches: int = 1  # Optimizer steps per epoch
    num_epochs: int = 4  # Passes over the batch in each update
    lr: float = 2e-4  # Learning rate, see the schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # It decays to 0, or stays
    lr_warmup: int = 0  # Updates n in which it rises: the first has lr / (n + 1)
    adam: Literal["tf", "torch"] = "tf"  # Adam as TensorFlow computes it (original), or torch.optim.Adam
    adam_eps: float = 1e-5  # Adam's epsilon
    adam_betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.999])  # Decay rates of its averages
    weight_decay: float = 0.0  # Of matrices, decoupled as in AdamW
    max_grad_norm: float | None = None  # Gradients of a larger norm are scaled down to it
    target_kl: float | None = None  # No more optimizer steps on a batch after one whose approxkl is above this
    ema: float = 0.0  # Decay per update of an average of the policy's weights, saved as policy_ema/ (0: none)
    ptx_coef: float = 0.0  # Weight of the loss per token of pretraining texts in every step (PPO-ptx)
    ptx_dataset: str | None = None  # Those texts: see --query_dataset
    eval_every: int = 0  # Updates between evaluations on the way (0: none)
    score_norm: Literal["none", "scale", "whiten"] = "none"  # Divide scores by their deviation; subtract their mean too
    score_clip: float | None = None  # Then clip them to +- this
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"  # What is paid for, see kl_penalty
    kl_coef: float = 0.15  # Coefficient of the KL penalty at the start
    kl_target: float | None = 6.0  # KL, in nats per response, that the coefficient adapts to (None: it stays fixed)
    kl_horizon: float = 2_000.0  # Horizon of that adaptation, in episodes
    max_kl: float = 200.0  # A KL to the reference, in nats per response, far above any sane one: the run stops
    cliprange: float = 0.2  # The probability ratio is clipped to 1 +- this
    cliprange_value: float = 0.2  # The predicted value is clipped to the old value +- this
    vf_coef: float = 0.1  # Weight of the value loss
    gamma: float = 1.0  # Discount per token
    lam: float = 0.95  # Lambda of generalised advantage estimation
    whiten_rewards: bool = True  # Scale rewards to unit variance, per minibatch
    whiten_advantages: bool = True  # Shift and scale advantages to mean 0 and unit variance, per minibatch
    whiten: Literal["rank", "global"] = "rank"  # Over one rank's share of the minibatch (original), or all of it
    critic: Literal["shared", "policy", "reward"] = "shared"  # Value head on the policy, or on its own copy of a model
    critic_lr: float | None = None  # Learning rate of value head and critic (None: --lr)
    critic_warmup: int = 0  # Updates in which only they are trained


FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
HUB = {"base_model": "gpt2", "token_ids_of": "gpt2", "start_text": None, "end_text": None, "total_episodes": 1_000_000}
BOOK = HUB | {"query_length": 64, "batch_size": 512, "micro_batch_size": 64, "lr": 1e-5, "kl_horizon": 1e4}
POST = HUB | {"query_length": 500, "batch_size": 32, "micro_batch_size": 4, "lr": 2e-6, "kl_target": None}
POST |= {"query_suffix": "\n\nTL;DR:", "response_length": 75, "truncate_token": "\n", "truncate_after": 55}
POST |= {"long_queries": "keep_start", "kl_coef": 0.03}
POST |= {"whiten_rewards": False}
NEWS = {"query_prefix": "Article:\n\n", "temperature": 0.5, "kl_coef": 0.01}
PRESETS = {"tiny": Args()}  # OpenAI's launch.py. The label files hold the very queries that people judged
for name, task in {"sentiment": BOOK, "descriptiveness": BOOK, "cnndm": POST | NEWS, "tldr": POST}.items():
    PRESETS[name] = Args(**task, query_dataset=f"{FILES}/{name}/{'offline_5k' if task is BOOK else 'offline_60k'}.json")


def main(preset: str, args: Args) -> None:
    """Set-up, then a loop of updates: rollout, score, reward, advantage, update, log; at the end evaluate and save."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), log_with="wandb" if args.track else None)
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    if args.batch_size % (divisor := world * args.num_minibatches):
        raise ValueError(f"--batch_size {args.batch_size}: a multiple of {divisor} (processes x minibatches) would do")
    episodes = args.batch_size // world  # responses on this rank, in each update
    n = episodes  # their queries
    num_updates, size = math.ceil(args.total_episodes / args.batch_size), args.micro_batch_size
    accelerator.gradient_accumulation_steps = math.ceil(n / args.num_minibatches / size)
    tokenizer = fetch(AutoTokenizer, "base_model", args)
    end = token_id(tokenizer, args.truncate_token)
    queries = load_queries(tokenizer, args, args.eval_queries + num_updates * args.batch_size)
    longest = max(len(query["context"]) for query in queries) + args.response_length
    eval_queries, queries = queries[: args.eval_queries], queries[args.eval_queries :]
    whole = dataclasses.replace(args, start_text=None, end_text=None, query_length=longest, long_queries="keep_start")
    texts = load_queries(tokenizer, whole, num_updates * args.batch_size, "ptx_dataset") if args.ptx_coef else []
    reward = load_reward(args, preset, tokenizer, longest, device)
    lm = freeze(load("base_model", args, tokenizer, longest, device), args)
    ref_lm = copy.deepcopy(lm, {id(p): p for p in lm.parameters() if not p.requires_grad})  # shares what is not trained
    flag = "base_model" if args.critic == "policy" else "reward_model"
    critic = None if args.critic == "shared" else load(flag, args, tokenizer, longest, device)
    policy, ref = ActorCritic(lm, critic), ActorCritic(ref_lm.requires_grad_(False))
    fast_math(device, args.dtype)
    policy, optimizer = accelerator.prepare(policy, make_optimizer(policy, args))
    actor = accelerator.unwrap_model(policy)  # the same module, for forward passes without gradients
    trained = {name: p for name, p in actor.named_parameters() if p.requires_grad and args.ema}
    average = nn.ParameterList([p.detach().clone() for p in trained.values()]).requires_grad_(False)
    if args.ema:
        accelerator.prepare_model(average, evaluation_mode=True)  # so that checkpoints hold it
    before = evaluate(ref, ref, reward, eval_queries, end, tokenizer, args)
    folder, state = open_run(accelerator, args, preset, {"update": 0, "kl_coef": args.kl_coef})
    first, kl_coef, signals, score_clip = state["update"], state["kl_coef"], [], args.score_clip or math.inf
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    shuffle = np.random.RandomState(args.seed + 100_003 * rank)
    shuffles = np.stack([shuffle.permutation(n) for _ in range(num_updates * args.num_epochs)])
    shuffles = torch.from_numpy(shuffles).view(num_updates, args.num_epochs, args.num_minibatches, -1)

    for update in (bar := tqdm(range(first, num_updates), initial=first, total=num_updates, disable=rank > 0)):
        # 1. rollout: responses to the queries, and what policy and reference think of their tokens
        mine = range((update * world + rank) * n, (update * world + rank + 1) * n)
        asked = [queries[i % len(queries)] for i in mine]
        u = uniforms(args.seed, update + 1, args.batch_size, args.response_length)[rank * episodes :][:episodes]
        batch = rollout(policy, ref, asked, u.to(device), shuffles[update, 0], end, args)
        batch["texts"] = [texts[i % len(texts)]["input_ids"] for i in mine if texts]

        # 2. score: the reward of the truncated response, or a penalty where it never ends
        raw = score(reward, asked, batch["truncated"], tokenizer, args).to(device)  # (B, R + 1)
        endless = args.penalty_reward_value + (args.penalty_mode == "add") * raw.sum(1)
        scores = torch.where(batch["found"], raw.sum(1), endless)
        mean, variance = moments(scores, torch.ones_like(scores), lambda x: accelerator.reduce(x.sum()))
        scaled = (scores - mean * (args.score_norm == "whiten")) * torch.rsqrt(variance + 1e-8)
        scaled = (scaled if args.score_norm != "none" else scores).clamp(-score_clip, score_clip)

        # 3. reward: the score minus the KL penalty
        log_ratio = (batch["logprobs"] - batch["ref_logprobs"]) * batch["kept"]
        penalty = kl_penalty(batch.get("full_kl", log_ratio), args.kl_estimator) * batch["kept"]
        batch["rewards"] = token_rewards(scaled - raw[:, :-1].sum(1), penalty, batch["kept"], kl_coef) + raw[:, :-1]

        # 4. advantage and 5. update
        decay = 1 - update / num_updates if args.lr_schedule == "linear" else 1
        for group in optimizer.param_groups:
            group["lr"] = decay * min(1, (update + 1) / (args.lr_warmup + 1)) * group["initial_lr"]
            group["lr"] *= group["is_critic"] or update >= args.critic_warmup
        records = ppo_update(accelerator, policy, optimizer, batch, shuffles[update], args)
        for mean, p in zip(average, trained.values(), strict=True):
            mean.lerp_(p.detach(), 1 - args.ema)

        # 6. log; then the KL coefficient adapts to the KL of all ranks
        totals = {"kl": log_ratio, "kl_k3": kl_penalty(log_ratio, "k3"), "entropy": -batch["logprobs"] * batch["kept"]}
        totals |= {"scores": scores, "scores_scaled": scaled, "found_end": batch["found"], "length": batch["length"]}
        totals |= {"non_score_reward": -kl_coef * penalty, "score_total": batch["rewards"]}
        totals |= {"score_clipfrac": scaled.abs() >= score_clip, "signals": scores.new_tensor(len(signals))}
        records.append(
            {f"objective/{name}": (x.sum().float(), scores.new_tensor(episodes)) for name, x in totals.items()}
        )
        records.append({"objective/kl_per_token": (log_ratio.sum(), batch["kept"].sum())})
        metrics = {"ppo/episode": (update + 1) * args.batch_size, "ppo/lr": optimizer.param_groups[0]["lr"]}
        metrics |= {"objective/kl_coef": kl_coef} | reduce_means(accelerator, records)
        metrics["ppo/val/var_explained"] = 1 - metrics["ppo/val/error"] / (metrics["ppo/returns/var"] + 1e-8)
        metrics["ppo/val/ratio_var"] = metrics.pop("ratio_squared") - metrics["ppo/val/ratio"] ** 2
        stopping, kl, off = metrics.pop("objective/signals") > 0, metrics["objective/kl"], metrics["first_ratio_error"]
        if max(off, abs(kl) * (update == 0)) > {"fp32": 1e-3, "bf16": 0.02}[args.dtype]:
            raise FloatingPointError(f"first ratio off 1 by {off:.2g}, first KL {kl:.2g}: the forward passes differ")
        if args.eval_every and (update + 1) % args.eval_every == 0:
            rows = evaluate(actor, ref, reward, eval_queries, end, tokenizer, args)
            metrics |= {f"eval/{name}": sum(row[name] for row in rows) / len(rows) for name in ("score", "kl")}
        if rank == 0:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        accelerator.log(metrics, step=update + 1)
        bar.set_postfix({name: f"{metrics[f'objective/{name}']:.3g}" for name in ("scores", "kl", "kl_coef")})
        if kl > args.max_kl:
            raise FloatingPointError(f"the KL is {kl:.4g}, --max_kl {args.max_kl}; a smaller --lr would do")
        if args.kl_target is not None:  # Ziegler et al. 2019, section 2.2
            kl_coef *= 1 + min(max(kl / args.kl_target - 1, -0.2), 0.2) * (args.batch_size / args.kl_horizon)
        if stopping or args.checkpoint_every and (update + 1) % args.checkpoint_every == 0:
            save_checkpoint(accelerator, folder, state | {"update": update + 1, "kl_coef": kl_coef})
        if stopping:
            raise KeyboardInterrupt

    # 7. evaluate and save
    after = evaluate(actor, ref, reward, eval_queries, end, tokenizer, args)
    weights = accelerator.get_state_dict(policy)  # every rank has its part in putting them together
    means = dict(zip(trained, accelerator.get_state_dict(average).values(), strict=rank == 0))
    if rank == 0:
        save_model(folder / "policy", actor.lm, tokenizer, weights)
        save_model(folder / "policy_ema", actor.lm, tokenizer, means and weights | means)
        save_model(folder / "critic", actor.critic, tokenizer, weights if critic else {}, "critic.")
        show(folder, before, after)
    policy, optimizer = accelerator.free_memory(policy, optimizer)  # first the model, or gloo can wait for ever
    accelerator.end_training()


# --- the algorithm ----------------------------------------------------------------------------------------------------
def kl_penalty(log_ratio: Tensor, kind: str) -> Tensor:
    """KL from log pi - log ref of sampled tokens: k1, k2, k3 (Schulman 2020), TRL's abs; `full` is the KL already."""
    kinds = {"k2": log_ratio**2 / 2, "k3": (-log_ratio).clamp(max=40).exp() - 1 + log_ratio, "abs": log_ratio.abs()}
    return kinds.get(kind, log_ratio)


def moments(x: Tensor, mask: Tensor, total: Any = torch.sum) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of x over the True entries of mask, two scalars; `total` sums, here or over ranks."""
    mean = total(x * mask) / total(mask)
    return mean, total((x - mean) ** 2 * mask) / total(mask)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, total: Any = torch.sum) -> Tensor:
    """x scaled to unit variance (biased, eps 1e-8) and, unless shift_mean is False, to zero mean; 0 outside mask."""
    mean, variance = moments(x, mask, total)
    return ((x - mean) * torch.rsqrt(variance + 1e-8) + (0 if shift_mean else mean)) * mask


def token_rewards(scores: Tensor, penalty: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards (B, R): -kl_coef * penalty (B, R) at every token of mask, plus the score (B,) at its last one."""
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return -kl_coef * penalty * mask + scores.unsqueeze(1) * is_last


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, R), Schulman et al. 2016 (arXiv:1506.02438); the value after the response is 0."""
    values, rewards, advantages = values * mask, rewards * mask, torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage
        next_value, advantages[:, t] = values[:, t], advantage
    return advantages, advantages + values


def ppo_loss(
    logprobs: Tensor, values: Tensor, old_logprobs: Tensor, old_values: Tensor, advantages: Tensor, returns: Tensor,
    mask: Tensor, cliprange: float, cliprange_value: float, vf_coef: float,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Clipped policy loss + vf_coef * clipped value loss, SUMMED over mask, so that micro-batches add up. All (b, R).
    Returns the loss and (sum, count) pairs for the metrics. Source: Schulman et al. 2017, arXiv:1707.06347, equation 7;
    lm_human_preferences/train_policy.py, PPOTrainer.loss (value clipping and the factor 0.5)."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-40, 40).exp()  # so that neither it nor its square overflows
    policy_loss, policy_loss_clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    values_clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    value_loss, value_loss_clipped = (values - returns) ** 2, (values_clipped - returns) ** 2
    terms = {
        "ppo/loss/policy": torch.maximum(policy_loss, policy_loss_clipped),
        "ppo/loss/value": 0.5 * torch.maximum(value_loss, value_loss_clipped),
        "ppo/policy/approxkl": 0.5 * log_ratio**2,
        "ppo/policy/clipfrac": policy_loss_clipped > policy_loss,
        "ppo/val/vpred": values,
        "ppo/val/error": value_loss,
        "ppo/val/clipfrac": value_loss_clipped > value_loss,
        "ppo/val/ratio": ratio,
        "ratio_squared": ratio**2,
    }
    sums = {name: (term * mask).sum() for name, term in terms.items()}
    sums["ppo/loss/total"] = sums["ppo/loss/policy"] + vf_coef * sums["ppo/loss/value"]
    return sums["ppo/loss/total"], {name: (total.detach(), mask.sum()) for name, total in sums.items()}


def ppo_update(accelerator: Any, policy: Any, optimizer: Any, batch: Any, epochs: Tensor, args: Args) -> list[Any]:
    """All optimizer steps on one batch; `epochs` (num_epochs, num_minibatches, rows) has shuffles. Returns pairs."""
    records, one = [], torch.ones((), device=batch["kept"].device)
    batch = batch | {name: torch.zeros_like(batch["values"]) for name in ("advantages", "returns")}
    total = torch.sum if args.whiten == "rank" else lambda x: accelerator.reduce(x.sum())
    for minibatch in epochs.flatten(0, 1):
        mask, rewards, old_values = (batch[name][minibatch] for name in ("kept", "rewards", "values"))
        if args.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, total=total)
        advantages, returns = gae(old_values, rewards, mask, args.gamma, args.lam)
        batch["returns"][minibatch] = returns
        batch["advantages"][minibatch] = whiten(advantages, mask, total=total) if args.whiten_advantages else advantages
        for name, x in (("returns", returns), ("val", old_values)):
            mean, variance = moments(x, mask)
            records.append({f"ppo/{name}/mean": (mean, one), f"ppo/{name}/var": (variance, one)})
        start = len(records)
        # the loss is a sum; accelerate divides it by the micro-batches and averages gradients over the processes
        scale = accelerator.gradient_accumulation_steps * accelerator.num_processes / accelerator.reduce(mask.sum())
        if texts := batch.get("texts"):  # theirs is a mean over all tokens of all ranks too
            tokens = accelerator.reduce(one * sum(len(texts[i]) - 1 for i in minibatch.tolist())).clamp(min=1)
            weight = (
                args.ptx_coef * accelerator.gradient_accumulation_steps * accelerator.num_processes / scale / tokens
            )
        for rows in micro_batches(minibatch, batch["trees"], args.micro_batch_size):
            with accelerator.accumulate(policy):
                outputs = batch.pop("pass", {}).get(tuple(rows.tolist()))  # of these rows in this order
                logprobs, entropy, values = outputs or forward_response(policy, batch, rows, args.temperature)
                old = [batch[name][rows] for name in ("logprobs", "values", "advantages", "returns", "kept")]
                loss, pairs = ppo_loss(logprobs, values, *old, args.cliprange, args.cliprange_value, args.vf_coef)
                if texts:
                    ptx, count = ptx_loss(policy, [texts[i] for i in rows.tolist()], one.device)
                    loss, pairs["ppo/loss/ptx"] = loss + weight * ptx, (ptx.detach(), count)
                accelerator.backward(loss * scale)
                if accelerator.sync_gradients:
                    norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of weights in shards
                    if not norm.isfinite():  # on all ranks, whose gradients are averaged
                        raise FloatingPointError("the gradient is not finite")
                    records.append({"ppo/policy/gradient_norm": (norm, one)})
                optimizer.step()
                optimizer.zero_grad()
            records.append(pairs | {"ppo/policy/entropy": ((entropy * old[-1]).sum(), old[-1].sum())})
            if "first_ratio_error" not in records[0]:  # before any step
                records[0]["first_ratio_error"] = (((logprobs - old[0]).exp() - 1).abs().max().detach(), one)
        if args.target_kl and reduce_means(accelerator, records[start:])["ppo/policy/approxkl"] > args.target_kl:
            break
    return records


# --- rollout ----------------------------------------------------------------------------------------------------------
def uniforms(seed: int, update: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, from seed and update; ranks take their rows of one array."""
    return torch.from_numpy(np.random.default_rng([seed, 1, update]).random((batch, length), dtype=np.float32))


@torch.no_grad()
def sample(policy: Any, contexts: list[list[int]], u: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Responses (B, R) ~ softmax(logits / temperature), one forward per token, without an end. The B / K contexts are
    read once for their K responses. Token t is where the cumulative distribution passes u[:, t], (B, R)."""
    cache, k, width = DynamicCache(config=policy.lm.config), len(u) // len(contexts), max(map(len, contexts))
    ids = torch.tensor([[0] * (width - len(x)) + x for x in contexts], device=u.device)
    mask = torch.tensor([[False] * (width - len(x)) + [True] * len(x) for x in contexts], device=u.device)
    logits = policy(None, ids, mask, None, cache)[0].repeat_interleave(k, 0)
    cache.batch_repeat_interleave(k)
    mask = nn.functional.pad(mask.repeat_interleave(k, 0), (0, u.shape[1]), value=True)
    responses = torch.empty(u.shape, dtype=torch.long, device=u.device)
    for t in range(u.shape[1]):
        if t > 0:
            logits = policy(None, responses[:, t - 1 : t], mask[:, : width + t], None, cache)[0]
        probs = (logits / temperature).softmax(-1)
        if top_p < 1:  # to the least likely that is needed
            high = probs.sort(descending=True).values
            probs = probs * (probs >= high.gather(1, (high.cumsum(1) - high < top_p).sum(1, keepdim=True) - 1))
        cdf = probs.cumsum(-1)
        tokens = torch.searchsorted(cdf, u[:, t : t + 1] * cdf[:, -1:], right=True)
        responses[:, t : t + 1] = tokens.clamp(max=cdf.shape[1] - 1)
    return responses


def truncate(responses: Tensor, token: int | None, after: int) -> tuple[Tensor, Tensor]:
    """Which tokens (B, R) stay, up to the first `token` at index `after` or later (None: all); if it is there, (B,)."""
    index = torch.arange(responses.shape[1], device=responses.device)
    hit = (responses == (-1 if token is None else token)) & (index >= after)
    return hit.cumsum(1) - hit.long() == 0, hit.any(1) | (token is None)


def rollout(policy: Any, ref: Any, queries: list[Any], u: Tensor, minibatches: Tensor, end: Any, args: Args) -> Any:
    """A batch: responses (B, R), or (B / K, K, R) for K > 1; which tokens count (kept), who found an end, truncated
    responses as lists, what forward_response feeds (trees), logprobs, ref_logprobs and, if the policy has them, values.
    With the first epoch's minibatches these are the passes of the update: its first ratio is 1. A single one stays."""
    k = len(u) // len(queries)
    with torch.autocast(u.device.type, enabled=False):  # around the trunk's: weights are rounded once, not per token
        responses = sample(
            getattr(policy, "module", policy), [query["context"] for query in queries], u, args.temperature, args.top_p
        )
    stays, found = truncate(responses, end, args.truncate_after)
    kept, rows, length = stays if args.mask_truncated else torch.ones_like(stays), responses.tolist(), stays.sum(1)
    fed = [row[: n - 1] for row, n in zip(rows, kept.sum(1).tolist(), strict=True)]  # the last predicts nothing
    trees = [[query["context"], *fed[i * k : i * k + k]] for i, query in enumerate(queries)]
    shape = u.shape if k == 1 else (len(queries), k, -1)
    batch = {"responses": responses.view(shape), "kept": kept.view(shape), "found": found, "trees": trees}
    batch |= {"length": length, "truncated": [row[:n] for row, n in zip(rows, length.tolist(), strict=True)]}
    groups = [group for minibatch in minibatches for group in micro_batches(minibatch, trees, args.micro_batch_size)]
    for group in groups:
        with torch.set_grad_enabled(torch.is_grad_enabled() and len(groups) == 1):  # for the first optimizer step
            outputs = logprobs, _, *values = forward_response(policy, batch, group, args.temperature)
        batch["pass"] = {tuple(group.tolist()): outputs} if len(groups) == 1 else {}
        ref_logprobs = forward_response(ref, batch, group, args.temperature)[0]
        parts = dict(zip(("logprobs", "ref_logprobs", "values"), (logprobs, ref_logprobs, *values), strict=False))
        if args.kl_estimator == "full":
            with torch.no_grad():
                p, q = (forward_response(x, batch, group, args.temperature, full=True)[0] for x in (policy, ref))
            parts["full_kl"] = (p.exp() * (p - q)).sum(-1)
        for name, x in parts.items():
            batch.setdefault(name, torch.zeros_like(batch["kept"], dtype=x.dtype))[group] = x.detach()
    return batch


@torch.no_grad()
def score(reward: Any, queries: list[Any], responses: list[Any], tokenizer: Any, args: Args) -> Tensor:
    """Rewards (B, R + 1), on the CPU, of tokens of K responses per query and, last, of the whole: gain * logit + bias
    from a classifier, whose config.json has them as `reward_gain` and `reward_bias`; or a function's, of texts and of
    what it has names for: columns of the queries, response_ids."""
    k, scores = len(responses) // len(queries), torch.zeros(len(responses), args.response_length + 1)
    if isinstance(reward, nn.Module):
        trees = [[query["input_ids"], *responses[i * k : i * k + k]] for i, query in enumerate(queries)]
        gain, bias = getattr(reward.config, "reward_gain", 1.0), getattr(reward.config, "reward_bias", 0.0)
        for rows in micro_batches(torch.arange(len(trees)), trees, args.micro_batch_size):
            _, last, *inputs = pack([trees[i] for i in rows.tolist()], reward.device)
            logits = reward.score(hidden_at(reward, last[:, 1:].flatten(), *inputs))
            scores.view(len(trees), k, -1)[rows, :, -1] = gain * logits.view(len(rows), k).cpu() + bias
        return scores
    asked = [queries[i // k] | {"response_ids": response} for i, response in enumerate(responses)]
    columns = {x: [query[x] for query in asked] for x in [*inspect.signature(reward).parameters][2:] if x in asked[0]}
    texts = (tokenizer.batch_decode(x, skip_special_tokens=True) for x in ([x["input_ids"] for x in asked], responses))
    try:
        for row, x, response in zip(scores, reward(*texts, **columns)[:], responses, strict=True):
            part = row[: len(response)] if isinstance(x, list) else row[-1:]
            part.copy_(torch.as_tensor(x).view(len(part)))
        return scores
    except (Exception, SystemExit) as error:  # no ValueError, so that its traceback is shown
        raise RuntimeError(f"--reward_fn {args.reward_fn}: no {len(asked)} floats, or lists of tokens'") from error


@torch.no_grad()
def evaluate(policy: Any, ref: Any, reward: Any, queries: Any, end: Any, tokenizer: Any, args: Args) -> list[Any]:
    """Query, response, score and KL of the evaluation queries, drawn with the same random numbers at each call."""
    u = uniforms(args.seed, 0, len(queries), args.response_length).to(next(ref.parameters()).device)
    batch = rollout(policy, ref, queries, u, torch.arange(len(queries)).view(1, -1), end, args)
    kl = ((batch["logprobs"] - batch["ref_logprobs"]) * batch["kept"]).sum(1).tolist()
    texts = map(tokenizer.batch_decode, ([query["input_ids"] for query in queries], batch["truncated"]))
    rows = zip(*texts, score(reward, queries, batch["truncated"], tokenizer, args).sum(1).tolist(), kl, strict=True)
    return [dict(zip(("query", "response", "score", "kl"), row, strict=True)) for row in rows]


# --- forward passes ---------------------------------------------------------------------------------------------------
def hidden_at(model: Any, at: Any, ids: Tensor, mask: Tensor, positions: Any = None, cache: Any = None) -> Tensor:
    """Last hidden states (n, d) in fp32 at the n cells `at` of the flattened ids (B, t), or at the B last ones (None).
    mask: (B, past + t), False at padding, or (B, t, t), who sees whom. Positions count real tokens: the original's."""
    if positions is None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if mask.dim() == 3:
        mask = torch.where(mask.unsqueeze(1), 0.0, torch.finfo(torch.float32).min)
    inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=getattr(model.base_model, "autocast", False)):
        hidden = model.base_model(ids, use_cache=cache is not None, **inputs).last_hidden_state
    return (hidden[:, -1].contiguous() if at is None else hidden.flatten(0, 1).index_select(0, at)).float()


class ActorCritic(nn.Module):
    """Policy and value head, which is on the policy's trunk and starts at zero, as the original's, or is a critic's."""

    def __init__(self, lm: Any, critic: Any = None) -> None:
        super().__init__()
        self.lm, self.critic, config = lm, critic and critic.base_model, (critic or lm).config
        self.value_head = nn.Linear(config.get_text_config().hidden_size, 1, device=lm.device)
        self._no_split_modules = lm._no_split_modules  # for engines that spread weights over processes
        self.value_head.weight.data.zero_(), self.value_head.bias.data.fill_(getattr(config, "reward_bias", 0.0))
        if hasattr(critic, "score"):
            self.value_head.weight.data.add_(critic.score.weight, alpha=getattr(config, "reward_gain", 1.0))

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Logits (n, V) and values (n,), both fp32, at the n cells `at`: see hidden_at. Sampling takes no values."""
        hidden = hidden_at(self.lm, at, *inputs)
        logits = self.lm.get_output_embeddings()(hidden)
        hidden = hidden_at(self.critic, at, *inputs) if self.critic is not None and at is not None else hidden
        return logits, self.value_head(hidden).sum(-1) if at is not None else None


def pack(trees: list[list[list[int]]], device: Any) -> tuple[Tensor, ...]:
    """The inputs of hidden_at for n trees [context, branch 1, .., branch K]: ids, who sees whom and positions.
    A context is fed once; its branches see it and themselves. Trees share rows, as wide as the largest: [[a b], [c],
    [d e]], [[f], [g], [h]] and [[i], [j], []] become
        ids   a b c d e    tree  1 1 1 1 1    branch  0 0 1 2 2    positions  0 1 2 2 3
              f g h i j          2 2 2 3 3            0 1 2 0 1               0 1 1 0 1
    Before the inputs come the first and the last cell of every context and branch, (n, 1 + K), counted through all
    rows: [[0, 2, 3], [5, 6, 7], [8, 9, 10]] and [[1, 2, 4], [5, 6, 7], [8, 9, 9]]."""
    lengths = np.array([[len(part) for part in tree] for tree in trees])
    sizes, width = lengths.sum(1), lengths.sum(1).max()
    room, begin = np.full(len(sizes), width), np.zeros_like(sizes)
    for i in np.argsort(-sizes, kind="stable"):  # first fit, the largest first
        row = (room >= sizes[i]).argmax()
        begin[i], room[row] = (row + 1) * width - room[row], room[row] - sizes[i]
    first, cells = begin[:, None] + lengths.cumsum(1) - lengths, np.zeros((4, (room < width).sum() * width), int)
    for i, tree in enumerate(trees):
        at, branch = slice(begin[i], begin[i] + sizes[i]), np.repeat(np.arange(len(tree)), lengths[i])
        positions = np.arange(sizes[i]) - (first[i] - begin[i] - len(tree[0]))[branch] * (branch > 0)
        cells[:, at] = [x for part in tree for x in part], positions, np.full(sizes[i], i + 1), branch
    ids, positions, tree, branch = torch.from_numpy(cells).view(4, -1, width).to(device)
    sees = (branch == 0).unsqueeze(1) | (branch.unsqueeze(1) == branch.unsqueeze(2))
    sees &= tree.unsqueeze(1) == tree.unsqueeze(2)
    first = torch.from_numpy(first).to(device)
    return first, first + torch.from_numpy(lengths).to(device) - 1, ids, sees.tril(), positions


def micro_batches(rows: Tensor, trees: list[Any], size: int) -> tuple[Tensor, ...]:
    """`rows`, each with its tree, in groups of up to `size` branches and of similar length: little is padding."""
    lengths = torch.tensor([sum(map(len, trees[i])) for i in rows.tolist()])
    return rows[lengths.argsort(stable=True)].split(max(1, size // (len(trees[0]) - 1)))


def forward_response(policy: Any, batch: Any, rows: Tensor, temperature: float, full: bool = False) -> list[Tensor]:
    """Log-probabilities and entropies, (b, R) or (b, K, R), of the responses in `rows`, and what else the policy gives.
    Where `kept` is False they mean nothing. With `full`, log-probabilities are of the whole vocabulary, (.., V)."""
    responses = batch["responses"][rows]
    first, last, *inputs = pack([batch["trees"][i] for i in rows.tolist()], responses.device)
    # A token is predicted in the cell before it, the first in the context's last. What is not kept reads the last cell.
    steps = torch.arange(-1, responses.shape[-1] - 1, device=first.device)
    at = torch.minimum(first[:, 1:, None] + steps, last[:, 1:, None])
    at[:, :, 0] = last[:, :1]
    logits, *others = policy(at.flatten(), *inputs)
    logprobs = logits.div_(temperature).log_softmax(-1)
    entropy = torch.cat([-(x.exp() * x).sum(-1) for x in logprobs.detach().split(64)])  # in blocks that fit a cache
    logprobs = logprobs if full else logprobs.gather(1, responses.view(-1, 1)).squeeze(1)
    return [x.view(*responses.shape, *x.shape[1:]) for x in (logprobs, entropy, *others)]


def ptx_loss(policy: Any, texts: list[list[int]], device: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy of texts, summed, and the count of their tokens: PPO-ptx (Ouyang et al. 2022, arXiv:2203.02155)."""
    responses = [torch.tensor([*text[1:], 0], device=device) for text in texts]
    batch = {"responses": nn.utils.rnn.pad_sequence(responses, True), "trees": [[x[:1], x[1:-1]] for x in texts]}
    logprobs = forward_response(policy, batch, torch.arange(len(texts)), 1.0)[0]
    logprobs = torch.cat([row[: len(text) - 1] for row, text in zip(logprobs, texts, strict=True)])
    return -logprobs.sum(), torch.ones_like(logprobs).sum()


# --- models and data --------------------------------------------------------------------------------------------------
def fast_math(device: torch.device, dtype: str) -> None:
    """TF32 for fp32 heads under bf16; on a CPU oneDNN's product, unless that is bf16; glibc keeps its memory (10 %)."""
    for option in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        getattr(ctypes.CDLL(None), "mallopt", max)(*option)  # other libraries have none
    if device.type == "cpu" or dtype == "bf16":
        torch.set_float32_matmul_precision("medium" if device.type == "cpu" else "high")
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    if ((x @ x).double() - x.double() @ x.double()).abs().max() > 1e-4:
        torch.set_float32_matmul_precision("highest")


def find(name: str) -> str:
    """The path of what is there, here or beside this script, or of hf://datasets/owner/name/file; or else a hub id."""
    if match := re.fullmatch("hf://datasets/([^/]+/[^/]+)/(.+)", name):
        return hf_hub_download(*match.groups(), repo_type="dataset")
    path = next((x for x in (Path(name).expanduser(), Path(__file__).parent / name) if x.exists()), None)
    if path is None and re.search(r"^[./~]|\.(jsonl?|csv|parquet|txt|gz)$", name, re.IGNORECASE):
        raise FileNotFoundError(f"{name}: there is no such file or folder")
    return str(path or name)


@contextlib.contextmanager
def blame(flag: str, args: Any, why: str = "") -> Any:
    """What goes wrong in here becomes a ValueError of one line: the flag, its value, and why."""
    try:
        yield
    except Exception as error:
        reason = why or str(error if isinstance(error, ValueError) else error.__cause__ or error) or repr(error)
        raise ValueError(f"--{flag} {getattr(args, flag)}: {' '.join(reason.split())[:300]}") from error


def fetch(auto_class: Any, flag: str, args: Any, **kwargs: Any) -> Any:
    """auto_class.from_pretrained of the folder or hub id that the flag names."""
    with blame(flag, args):
        made = auto_class.from_pretrained(find(getattr(args, flag)), trust_remote_code=False, **kwargs)
        if auto_class is AutoTokenizer and len(made) < 2:  # transformers makes one up
            raise ValueError("has no tokenizer")
        return made


@torch.no_grad()
def load(flag: str, args: Any, tokenizer: Any, longest: int, device: Any, **kwargs: Any) -> Any:
    """A model in fp32, with all its weights and a LoRA adapter's, without dropout as the original. With bf16 its trunk
    is autocast, but no head: logits of 100 in bf16 are off by 0.25. ValueError for what would be wrong in silence."""
    name, own = f"--{flag} {getattr(args, flag)}", args
    if adapter := find_adapter_config_file(find(getattr(args, flag))):
        if args.lora_rank and flag == "base_model":  # what is saved would name the base of its base
            raise ValueError(f"{name}: is an adapter; --lora_rank 0, or the merged model, would do")
        args = dataclasses.replace(args, **{flag: json.loads(Path(adapter).read_text())["base_model_name_or_path"]})
        own = own if Path(adapter).with_name("config.json").exists() else args
    text = (config := fetch(AutoConfig, flag, own, **kwargs)).get_text_config()
    auto_class = AutoModelForSequenceClassification if kwargs or flag == "reward_model" else AutoModelForCausalLM
    how = {"attn_implementation": "eager" if device.type == "cpu" else "sdpa"}  # there 3 to 4 times faster
    how |= {"config": config, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = fetch(auto_class, flag, args, **how)
    odd = [x for x in info["unexpected_keys"] if re.search(r"\.\d+\..*weight$", x)]
    if odd := odd + [x for x in info["missing_keys"] if not kwargs and not adapter]:
        raise ValueError(f"{name}: {min(odd)} is not both in its weights and in a {type(model).__name__} of its config")
    if adapter:
        peft = importlib.import_module("peft")
        model = peft.PeftModel.from_pretrained(model, os.path.dirname(adapter)).merge_and_unload().requires_grad_(True)
    for module in model.to(device).modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a pad that is also the eos gets its gradient
        if type(getattr(module, "act", None)).__name__ == "NewGELUActivation":
            module.act = nn.GELU(approximate="tanh")  # the same function as one kernel instead of eight
    window, top = getattr(text, "max_position_embeddings", longest), max(tokenizer.get_vocab().values())
    if top >= (size := model.get_input_embeddings().num_embeddings) or longest > window:
        raise ValueError(f"{name}: has {size} embeddings for token {top}, a window of {window} for {longest} tokens")
    lm_head, x = model.get_output_embeddings(), [i % size for i in range(longest)]
    trees = [[x[5:] or x, x[:2], x[2:7], x[:1]], [x[:1], x[1:3], x[:2], x[:3]]]
    texts = [torch.tensor([tree[0] + branch], device=device) for tree in trees for branch in tree[1:]]
    with blame(flag, args, f"a {text.model_type} cannot be run on packed rows (alibi? recurrence?); another would do"):
        _, last, *inputs = pack(trees, device)
        packed = (lm_head or model.score)(hidden_at(model, last[:, 1:].flatten(), *inputs))
        plain = [model(x).logits[0, -1] if lm_head else model.score(model.base_model(x)[0][0, -1]) for x in texts]
        off = (packed - torch.stack(plain)).abs().max() / (packed.max() - packed.min())
    if off > 1e-3 or getattr(text, "final_logit_softcapping", None):
        raise ValueError(f"{name}: is off by {off:.1%} on packed rows (alibi? a short sliding window? capped logits?)")
    model.base_model.autocast = args.dtype == "bf16"
    return model


def freeze(model: Any, args: Args) -> Any:
    """The model, where only LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on linear layers but the head or, as in
    trlX's hydra, the --unfrozen_layers and what is above them are to be trained."""
    if args.lora_rank:
        head, task = (["score"], "SEQ_CLS") if hasattr(model, "score") else (None, "CAUSAL_LM")
        how = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "modules_to_save": head, "task_type": task}
        model.add_adapter(importlib.import_module("peft").LoraConfig(target_modules="all-linear", **how))
    if layers := getattr(args, "unfrozen_layers", 0):
        with blame("unfrozen_layers", args):
            top = next(next(x for x in model.modules() if isinstance(x, nn.ModuleList))[-layers].parameters())
        for p in itertools.takewhile(lambda p: p is not top, model.parameters()):
            p.requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("base_layer.weight") and args.dtype == "bf16":
            p.data = p.data.bfloat16()
    return model


def load_reward(args: Args, preset: str, tokenizer: Any, longest: int, device: torch.device) -> Any:
    """--reward_fn, or the classifier in --reward_model, or the newest that train_reward.py finished for the preset."""
    if args.reward_fn is not None:
        sys.path.insert(0, os.getcwd())
        module, _, name = args.reward_fn.partition(":")
        if args.reward_model is not None or not hasattr(importlib.import_module(module), name):
            raise ValueError(f"--reward_fn {args.reward_fn}: module:function, without --reward_model, would do")
        return getattr(importlib.import_module(module), name)
    made = sorted(Path("runs").glob(f"train_reward-{preset}-*/reward_model"), key=lambda path: path.stat().st_mtime)
    if args.reward_model is None and not made:
        raise ValueError(f"--reward_model: none given, none in runs/; `python train_reward.py {preset}` would make one")
    name = args.reward_model = args.reward_model or str(made[-1])  # for args.json
    model = load("reward_model", args, tokenizer, longest, device)
    if model.config.num_labels != 1 or fetch(AutoTokenizer, "reward_model", args).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"--reward_model {name}: has several labels or another tokenizer; a --reward_fn would do")
    return model.requires_grad_(False)


def token_id(tokenizer: Any, text: str | None) -> int | None:
    """The one token that `text` is (`eos`: the tokenizer's end-of-sequence token); None for None."""
    ids = [tokenizer.eos_token_id] if text == "eos" else tokenizer.encode(text or "", add_special_tokens=False)
    if text is not None and (len(ids) != 1 or ids[0] is None):
        raise ValueError(f"--start_text, --end_text or --truncate_token {text!r}: is tokens {ids}; one would do")
    return ids[0] if ids else None


def cut_query(tokens: list[int], length: int, start: Any, end: Any, long: str = "keep_start") -> list[int]:
    """The query in these tokens, or [] (lm_human_preferences/lm_tasks.py): what comes after the first `start`, unless
    that is the last token, truncated to `length` (or as `long` says), then cut back to the last `end`, which stays."""
    if start is not None and (start not in tokens or tokens.index(start) < len(tokens) - 1):
        tokens = tokens[tokens.index(start) + 1 :] if start in tokens else []
    if len(tokens) > length:
        tokens = {"keep_start": tokens[:length], "keep_end": tokens[-length:], "drop": []}[long]
    if end is not None:
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)] if end in tokens else []
    return tokens


def bos(tokenizer: Any) -> list[int]:
    """The token that a text begins with, as Llama's and Gemma's tokenizers have it, or [] for those that do not."""
    return [token for token in tokenizer("").input_ids[:1] if token == tokenizer.bos_token_id]


def encode(values: list[Any], tokenizer: Any, args: Args) -> list[list[int]]:
    """Token ids, without BOS, of texts, chats (lists of messages) or padded rows of token ids; [] for anything else."""
    reader = tokenizer if args.token_ids_of in (None, args.base_model) else fetch(AutoTokenizer, "token_ids_of", args)
    own, begin, rows = reader.get_vocab() == tokenizer.get_vocab(), bos(tokenizer), []
    for value in values:
        kind, row = type(value[0]) if isinstance(value, list) and value else None, []
        if kind is dict:
            value = tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True)
        if kind is int:
            row = [token for token in value if token != 50259]  # the label files' padding
            value = None if own else reader.decode(row)
        row = tokenizer(value, add_special_tokens=False).input_ids if isinstance(value, str) else row
        if max(row, default=0) >= len(tokenizer):
            raise ValueError(f"there is token {max(row)} of {len(tokenizer)}; another --token_ids_of would do")
        rows.append(row[1:] if begin and row[:1] == begin else row)
    return rows


def load_table(flag: str, args: Any) -> Any:
    """The splits of the file, the folder, or the hub's owner/name[:config] that the flag names; one is `train`."""
    with blame(flag, args):
        path = Path(name := find(getattr(args, flag))).absolute()  # the hub's cache has links
        where = [str(path.parent), None, None, path.name] if path.is_file() else name.split(":")
        splits = datasets.load_dataset(*where)
        if "train" not in splits:
            raise ValueError(f"has splits {list(splits)}; train would do")
        return splits


def load_queries(tokenizer: Any, args: Args, need: int, flag: str = "query_dataset") -> list[dict[str, Any]]:
    """Up to `need` queries in an order drawn from --seed: dicts with what the reward model reads (input_ids), what the
    policy reads (context) and, for a --reward_fn, the columns of the table."""
    table = load_table(flag, args)["train"].shuffle(generator=np.random.default_rng([args.seed, 2]))
    found = [x for x in ("text", "query", "prompt", "messages", "article", "content") if x in table.column_names][:1]
    columns, queries, lost = table.column_names if getattr(args, "reward_fn", None) else [], [], 0
    start, end, begin = token_id(tokenizer, args.start_text), token_id(tokenizer, args.end_text), bos(tokenizer)
    prefix, suffix = encode([args.query_prefix, args.query_suffix], tokenizer, args)
    with blame(flag, args):
        for rows in table.select_columns(columns or found).iter(10_000):  # no more of millions than are needed
            for i, tokens in enumerate(encode(rows[found[0]], tokenizer, args) if found else ()):
                long = args.long_queries or ("drop" if end is None else "keep_start")
                if query := cut_query(tokens, args.query_length, start, end, long):
                    inputs = {"input_ids": begin + query, "context": begin + prefix + query + suffix}
                    queries.append({name: rows[name][i] for name in columns} | inputs)
                lost += not query
            if len(queries) >= need:
                break
        if len(queries) <= getattr(args, "eval_queries", 0):
            raise ValueError(f"{len(queries)} queries in {found} of {table.column_names}; more, or `text`, would do")
    if lost and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"--{flag} {getattr(args, flag)}: left out {lost} rows without text or fitting query\n")
    return queries[:need]


# --- the run's folder -------------------------------------------------------------------------------------------------
def open_run(accelerator: Any, args: Args, preset: str, state: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The run's folder, locked, and where the run stands: `state`, or that of the newest checkpoint, now loaded."""
    name = f"runs/{Path(__file__).stem}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, world = Path(broadcast_object_list([args.output_dir or name])[0]).expanduser(), accelerator.num_processes
    args.output_dir = str(folder)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        with blame("output_dir", args, "another run is at work there; another folder would do"):
            fcntl.flock(os.open(folder / "lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "metrics.jsonl").open("a" if args.resume else "x").close()
    accelerator.wait_for_everyone()
    state |= {"processes": world, "id": os.urandom(4).hex()}
    if done := max(folder.glob("checkpoints/*/state.json"), default=None):
        with blame("resume", args, f"{done.parent} is damaged; without it the one before would do"):
            accelerator.load_state(str(done.parent))
            state = json.loads(done.read_text())
    if state["processes"] != world:  # shuffles and whitening are per rank
        raise ValueError(f"--resume: {folder} is a run of {state['processes']} processes; as many would do")
    if accelerator.is_main_process:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[: state["update"]]
        os.truncate(folder / "metrics.jsonl", sum(map(len, lines)))
        record = {"script": Path(__file__).stem, "preset": preset, "torch": torch.__version__, "args": vars(args)}
        (folder / "args.tmp").write_text(json.dumps(record, indent=2))
        (folder / "args.tmp").rename(folder / "args.json")
    if args.track:
        run = {"id": state["id"], "name": folder.name, "resume": "allow"}
        accelerator.init_trackers("rlhf", vars(args), {"wandb": run})
    return folder, state


def reduce_means(accelerator: Any, records: list[Any]) -> dict[str, float]:
    """Means of all (sum, count) pairs over records and ranks: one collective and one transfer per update."""
    names = list(dict.fromkeys(name for record in records for name in record))
    pairs = ([torch.stack(record[name]) for record in records if name in record] for name in names)
    totals = accelerator.reduce(torch.stack([torch.stack(pair).double().sum(0) for pair in pairs])).tolist()
    return {name: total / count for name, (total, count) in zip(names, totals, strict=True)}


def save_checkpoint(accelerator: Any, folder: Path, state: dict[str, Any]) -> None:
    """checkpoints/<updates made>; its last file is state.json; two stay. Randomness follows from seed, update, row."""
    path = folder / "checkpoints" / f"{state['update']:07d}"
    accelerator.save_state(str(path))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.sync()
        (path / "state.tmp").write_text(json.dumps(state))
        (path / "state.tmp").rename(path / "state.json")
        for old in sorted(path.parent.glob("*/state.json"))[:-2]:
            shutil.rmtree(old.parent)


def save_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, Tensor], prefix: str = "lm.") -> None:
    """A Hugging Face folder, and value_head.safetensors, of the `weights` of `model`; nothing, if there are none."""
    names = {prefix + name for name, _ in model.named_parameters()} if weights else {}  # tied ones once
    if mine := {name.removeprefix(prefix): x for name, x in weights.items() if name in names}:
        model.save_pretrained(folder, state_dict=mine)
        model.config.save_pretrained(folder), tokenizer.save_pretrained(folder)  # an adapter comes without
        head = {name.split(".")[1]: x for name, x in weights.items() if name.startswith("value_head.")}
        if head and (prefix == "critic." or not any(name.startswith("critic.") for name in weights)):
            save_file(head, folder / "value_head.safetensors")


def show(folder: Path, before: list[Any], after: list[Any]) -> None:
    """samples.jsonl: held-out queries before and after; and the mean scores."""
    rows = [x | {f"{name}_after": y[name] for name in y if name != "query"} for x, y in zip(before, after, strict=True)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    means = [np.mean([row["score"] for row in part]) for part in (before, after)]
    tqdm.write(f"mean score {means[0]:.2f} before, {means[1]:.2f} after, see {folder}")


def parse_args() -> tuple[str, Args]:
    """Name of the preset (`tiny` if a flag comes first) and Args: preset < args.json with --resume < flags."""
    argv = [re.sub("^(--[^=]+=)?none$", r"\1None", word) for word in sys.argv[1:]]
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else "tiny"
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r}: does not exist; one of {', '.join(PRESETS)} would do")
    args = tyro.cli(Args, default=PRESETS[preset], args=argv)
    record = Path(args.output_dir or os.devnull).expanduser() / "args.json"
    if args.resume and args.output_dir is None or not args.resume and record.exists():
        raise ValueError(f"--output_dir {args.output_dir}, --resume {args.resume}: a new folder, or both, would do")
    if record.exists():
        old = json.loads(record.read_text())
        with blame("output_dir", args, f"is a run of {old['script']}.py"):
            preset, args = old["preset"], tyro.cli(Args, default=Args(**old["args"]), args=argv)
        changed = [f"{name} {x} (was {old['args'][name]})" for name, x in vars(args).items() if x != old["args"][name]]
        sys.stderr.write(f"--resume: {', '.join(changed)}\n")
    for name, x in vars(args).items():
        needs = re.match("total|num|eval_q|temp|top|target|score|kl_[th]|max|micro|batch|rloo|(query|response)_l", name)
        if isinstance(x, int | float) and "penalty" not in name and not (0 <= x < math.inf and (x or not needs)):
            raise ValueError(f"--{name} {x}: {'more than 0' if needs else '0 or more'}, and finite, would do")
    return preset, args


if __name__ == "__main__":
    try:
        main(*(run := parse_args()))
    except (KeyboardInterrupt, ArithmeticError, ImportError, OSError, ValueError) as error:
        if os.environ.get("RLHF_DEBUG"):
            raise
        time.sleep(2 * (os.environ.get("RANK", "0") != "0"))  # so that the first process speaks for all
        text = " ".join((str(error) or "stopped by a signal").split())
        if isinstance(error, KeyboardInterrupt | FloatingPointError):
            newest = max(Path(run[1].output_dir).glob("checkpoints/*/state.json"), default="none")
            text += f"; the newest checkpoint: {newest}"
        sys.stderr.write(f"{Path(__file__).name}: {text}\n")
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 2) from None
