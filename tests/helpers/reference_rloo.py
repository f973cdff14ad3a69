"""RLOO's advantages and loss for reference_rl.py, one response at a time."""

from typing import Any

from reference import EDGE, Numbers, clipped_loss, mean_of, note, read

NAMES = {
    "loss": "loss/policy",
    "ratio": "policy/ratio",
    "approxkl": "policy/approxkl",
    "clipfrac": "policy/clipfrac",
}


def set_leave_one_out(rows: list[Any], k: int, kl_coef: float) -> None:
    """The reward less the mean of the others' (Ahmadian et al. 2024, equation 8)."""
    totals = [(row.score - kl_coef * row.log_ratio.sum()).item() for row in rows]
    for i, row in enumerate(rows):
        first = i // k * k
        others = totals[first:i] + totals[i + 1 : first + k]
        row.advantages = totals[i] - mean_of(others)
        if all(total == totals[i] for total in others):
            row.advantages = 0.0
        else:
            assert abs(row.advantages) > EDGE, "a tie, nearly: take another seed"


def rloo_step(policy: Any, parts: list[list[Any]], s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the responses of a minibatch."""
    every = [row for rows in parts for row in rows]
    for row in every:
        now = read(policy, row, s.temperature)
        log_ratio = (now.logprobs - row.logprobs).sum()
        loss = clipped_loss(log_ratio, row.advantages, s.cliprange, means, NAMES)
        note(means, "policy/entropy", now.entropies)
        (loss.sum() / len(every)).backward()
