"""PPO's advantages and losses for reference_rl.py, one response at a time."""

from typing import Any

import torch
from reference import CLIP_EDGE, Numbers, clipped_loss, note, read
from reference_rloo import NAMES
from torch import Tensor


def whiten(rows: list[Tensor], shift_mean: bool) -> list[Tensor]:
    """Rows of numbers, scaled so that all of them together have variance 1 and, with shift_mean,
    mean 0."""
    every = torch.cat(rows)
    mean = every.mean()
    variance = every.var(correction=0)
    deviation = (variance + 1e-8).sqrt()
    whitened = [(x - mean) / deviation for x in rows]
    return whitened if shift_mean else [x + mean for x in whitened]


def gae(values: Tensor, rewards: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of one response (Schulman et al. 2016, equation 16)."""
    next_values = torch.cat([values[1:], torch.zeros(1)])
    deltas = rewards + gamma * next_values - values
    advantages = []
    for t in range(len(deltas)):
        later = deltas[t:]
        distances = torch.arange(len(later), dtype=torch.float64)
        discounts = (gamma * lam) ** distances
        advantages.append(discounts @ later)
    return torch.stack(advantages)


def token_rewards(row: Any, kl_coef: float) -> Tensor:
    """Of each token that counts: minus the KL; the last one has the score, too."""
    rewards = -kl_coef * row.log_ratio
    rewards[-1] += row.score
    return rewards


def set_advantages(rows: list[Any], kl_coef: float, s: Any) -> None:
    """Advantages and returns; these rows are whitened together."""
    rewards = [token_rewards(row, kl_coef) for row in rows]
    if s.whiten_rewards:
        rewards = whiten(rewards, False)
    for row, x in zip(rows, rewards, strict=True):
        row.advantages = gae(row.values, x, s.gamma, s.lam)
        row.returns = row.advantages + row.values
    if s.whiten_advantages:
        whitened = whiten([row.advantages for row in rows], True)
        for row, x in zip(rows, whitened, strict=True):
            row.advantages = x


def value_loss(values: Tensor, row: Any, cliprange: float, means: Numbers) -> Tensor:
    """Half the squared error of every value, or of what is left of it after a clip around the old
    one, whichever is larger."""
    beyond = (values - row.values).abs() - cliprange
    assert beyond.abs().min() > CLIP_EDGE, "clipped or not: take another seed"
    near = values.clamp(row.values - cliprange, row.values + cliprange)
    error = (values - row.returns) ** 2
    near_error = (near - row.returns) ** 2
    loss = torch.maximum(error, near_error) / 2
    note(means, "loss/value", loss)
    note(means, "val/vpred", values)
    note(means, "val/error", error)
    note(means, "val/clipfrac", near_error > error)
    return loss


def ppo_step(
    policy: Any,
    parts: list[list[Any]],
    kl_coef: float,
    s: Any,
    means: Numbers,
) -> None:
    """The gradient of the mean losses over a minibatch's tokens; `parts` has each rank's rows."""
    every = [row for rows in parts for row in rows]
    for rows in parts:
        set_advantages(rows, kl_coef, s)
        returns = torch.cat([row.returns for row in rows])
        values = torch.cat([row.values for row in rows])
        note(means, "returns/mean", returns.mean())
        note(means, "returns/var", returns.var(correction=0))
        note(means, "val/mean", values.mean())
        note(means, "val/var", values.var(correction=0))
    num_tokens = sum(row.count for row in every)
    for row in every:
        now = read(policy, row, s.temperature)
        log_ratio = now.logprobs - row.logprobs
        loss = clipped_loss(log_ratio, row.advantages, s.cliprange, means, NAMES)
        error = value_loss(now.values, row, s.cliprange_value, means)
        note(means, "policy/entropy", now.entropies)
        ((loss + s.vf_coef * error).sum() / num_tokens).backward()
