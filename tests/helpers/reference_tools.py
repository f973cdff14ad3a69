"""Reward functions of the runs of test_reference.py."""

from typing import Any

import numpy as np
import torch

Texts = list[str]
KINDS = (float, np.float32, torch.tensor)


def numbers_of(text: str) -> list[int]:
    words = text.split()
    return [int(word.removeprefix("w")) for word in words]


def reward_of(query: str, response: str, weight: float) -> float:
    """It depends on all that a reward function is given, without special tokens."""
    numbers = numbers_of(response)
    words = len(query.split()) - 2 * len(numbers)
    total = weight * sum(numbers)
    return total / 50 + words / 20


def of_column(prompts: Texts, completions: Texts, weight: list[float], **_: Any) -> list[Any]:
    """A reward for every response, of several types; it asks for one column."""
    rewards = []
    rows = zip(prompts, completions, weight, strict=True)
    for i, row in enumerate(rows):
        kind = KINDS[i % len(KINDS)]
        reward = reward_of(*row)
        rewards.append(kind(reward))
    return rewards


def of_all(**columns: list[Any]) -> np.ndarray:
    """The same, in an array; it gets all columns, which it may change."""
    assert set(columns) == {"prompts", "completions", "query", "content", "weight"}
    prompts = columns.pop("prompts")
    completions = columns.pop("completions")
    weight = columns.pop("weight")
    rows = zip(prompts, completions, weight, strict=True)
    rewards = [reward_of(*row) for row in rows]
    return np.array(rewards)


def coarse(completions: Texts, **_: Any) -> list[float]:
    """0 or 1, so that the responses to a query often have equal rewards."""
    sums = [sum(numbers_of(text)) for text in completions]
    return [float(x % 2) for x in sums]
