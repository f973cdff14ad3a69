"""What the runs of test_reference.py have in their own processes: reward functions, a signal."""

import itertools
import os
import signal
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

Texts = list[str]
KINDS = (float, np.float32, torch.tensor)


def numbers_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


def reward_of(query: str, response: str, weight: float) -> float:
    """It depends on all that a reward function is given, without special tokens."""
    numbers = numbers_of(response)
    words = len(query.split()) - 2 * len(numbers)
    return weight * sum(numbers) / 50 + words / 20


def of_column(prompts: Texts, completions: Texts, weight: list[float], **_: Any) -> list[Any]:
    """A reward for every response, of several types; it asks for one column."""
    rewards = []
    rows = zip(prompts, completions, weight, strict=True)
    for i, row in enumerate(rows):
        kind = KINDS[i % len(KINDS)]
        rewards.append(kind(reward_of(*row)))
    return rewards


def of_all(**columns: list[Any]) -> np.ndarray:
    """The same, in an array; it gets all columns, which it may change."""
    assert set(columns) == {"prompts", "completions", "query", "content", "weight"}
    prompts = columns.pop("prompts")
    completions = columns.pop("completions")
    rows = zip(prompts, completions, columns.pop("weight"), strict=True)
    return np.array([reward_of(*row) for row in rows])


def stop_in_update(number: int) -> None:
    """The process gets a SIGTERM when it logs this update (from 1)."""
    log = Accelerator.log
    calls = itertools.count(1)

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        log(self, *args, **kwargs)
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    Accelerator.log = changed


def coarse(completions: Texts, **_: Any) -> list[float]:
    """0 or 1, so that the responses to a query often have equal rewards."""
    return [float(sum(numbers_of(text)) % 2) for text in completions]
