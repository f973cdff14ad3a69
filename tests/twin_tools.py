"""What the runs of test_twin.py have in their own processes: reward functions, and a signal."""

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

KINDS = (list, tuple, np.array, torch.tensor)


def words_in(query: str, response: str) -> int:
    """How many more words the query has than two responses."""
    return len(query.split()) - 2 * len(response.split())


def of_tokens(queries: Any, responses: Any, response_ids: Any, weight: Any) -> list[Any]:
    """A reward for each token of every response, as a list, a tuple, an array or a tensor. It
    depends on all that a reward function is given, with special tokens left out of the texts."""
    made = []
    rows = zip(queries, responses, response_ids, weight, strict=True)
    for query, response, ids, factor in rows:
        words = words_in(query, response)
        rewards = [factor * token / 50 + words / 20 for token in ids]
        kind = KINDS[len(ids) % 4]
        made.append(kind(rewards))
    return made


def of_texts(queries: list[str], responses: list[str], **columns: Any) -> Iterator[float]:
    """A reward for every response, one after the other."""
    rows = zip(queries, responses, columns["response_ids"], columns["weight"], strict=True)
    for query, response, ids, factor in rows:
        words = words_in(query, response)
        yield factor * sum(ids) / 50 + words / 20


def stop_in_update(number: int) -> None:
    """The process gets a SIGTERM when it logs this update (from 1)."""
    log = Accelerator.log
    calls = itertools.count(1)

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        log(self, *args, **kwargs)
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    Accelerator.log = changed
