"""Reward functions to start from: `--reward_fn module:function` takes the place of a reward model.

    python ppo_rlhf.py --reward_fn tiny.rewards:happy
    python ppo_rlhf.py --reward_fn tiny.rewards:classifier

A function gets two lists of texts, queries and responses. Responses end with their truncate token
and have no special tokens. It returns a float for each response. A parameter of another name, say
`answer` or `messages`, gets the column of that name of --query_dataset, and `**kwargs` gets them
all. Each process calls the function with its share of a batch, and with all held-out queries.
"""

import functools
from typing import Any

MODEL = "lvwerra/distilbert-imdb"  # any text classifier, on the hub or in a folder
LABEL = "POSITIVE"


def happy(queries: list[str], responses: list[str]) -> list[float]:
    """How many happy words a response has."""
    words = ("happy", "glad", "proud", "cheer", "love", "laugh", "smile", "wonderful", "delight")
    return [sum(response.lower().count(word) for word in words) for response in responses]


def classifier(queries: list[str], responses: list[str]) -> list[float]:
    """A classifier's logit of LABEL for query and response, whatever its architecture."""
    texts = [query + response for query, response in zip(queries, responses, strict=True)]
    rewards = []
    for scores in load()(texts, batch_size=32, truncation=True):
        by_label = {x["label"]: x["score"] for x in scores}
        rewards.append(by_label[LABEL])
    return rewards


@functools.cache
def load() -> Any:
    """The classifier, on this process's device."""
    from accelerate import PartialState
    from transformers import pipeline

    options = {"device": PartialState().device, "top_k": None, "function_to_apply": "none"}
    return pipeline("text-classification", model=MODEL, **options)
