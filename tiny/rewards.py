"""Reward functions to start from: `--reward_fn module:function` takes the place of a reward model.

    python ppo_rlhf.py --reward_fn tiny.rewards:happy
    python ppo_rlhf.py --reward_fn tiny.rewards:classifier

A function is called as TRL calls its reward functions, with lists: prompts, completions, and each
column of --query_dataset by its name. Completions end with their truncate token, but have no
special tokens; prompts have theirs. It returns a float for each completion. Each process calls the
function with its share of a batch, and with all held-out queries.
"""

import functools
from typing import Any

MODEL = "lvwerra/distilbert-imdb"  # any text classifier, on the hub or in a folder
LABEL = "POSITIVE"


def happy(completions: list[str], **columns: Any) -> list[float]:
    """How many happy words a completion has."""
    words = ("happy", "glad", "proud", "cheer", "love", "laugh", "smile", "wonderful", "delight")
    return [sum(text.lower().count(word) for word in words) for text in completions]


def classifier(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A classifier's logit of LABEL for prompt and completion, whatever its architecture."""
    texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
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
