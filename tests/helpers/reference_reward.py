"""Runs of train_reward.py, one response at a time: see reference.py."""

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from reference import (
    EDGE,
    Adam,
    Numbers,
    cut_query,
    first_token,
    load,
    logit,
    mean_of,
    note,
    one_token,
    read_queries,
    read_rows,
    sample,
    scheduled,
    tokens_of,
    uniforms,
    weights_of,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def read_preference(row: dict[str, Any], coin: int, s: Any, tokenizer: Any) -> Any:
    """Query, responses and which is best, of texts; None if it is of no use. A coin says which of
    the two comes first."""
    query = tokens_of(row["prompt"], tokenizer)
    query = cut_query(query, s.query_length, None, None, s.long_queries or "drop")
    responses = []
    for name in ("chosen", "rejected"):
        response = tokens_of(row[name], tokenizer)
        end = one_token(tokenizer, s.truncate_token)
        places = [i for i in range(s.truncate_after, len(response)) if response[i] == end]
        if places:
            response = response[: places[0] + 1]
        elif s.truncate_token == "eos":
            response = [*response, end]
        responses.append(response[: s.response_length])
    if not query or responses[0] == responses[1]:
        return None
    if coin == 1:  # the chosen one is the second
        responses.reverse()
    return query, responses, coin


def read_samples(row: dict[str, Any], tokenizer: Any) -> Any:
    """Query, responses and which is best, of tokens; None if all responses are the same."""
    names = sorted(name for name in row if name.startswith("sample"))
    query = tokens_of(row["query"], tokenizer)
    responses = [tokens_of(row[name], tokenizer) for name in names]
    if all(response == responses[0] for response in responses):
        return None
    return query, responses, row["best"]


def read_labels(rows: list[Any], s: Any, tokenizer: Any) -> list[Any]:
    """Query, responses, which is best, and the row, of every label that is of use."""
    bos = first_token(tokenizer)
    coins = np.random.default_rng([s.seed, 3]).integers(0, 2, len(rows)).tolist()
    labels = []
    for row, coin in zip(rows, coins, strict=True):
        if "chosen" in row:
            label = read_preference(row, coin, s, tokenizer)
        else:
            label = read_samples(row, tokenizer)
        if label is not None:
            query, responses, best = label
            labels.append((bos + query, responses, best, row))
    return labels


def is_hit(rewards: list[float], best: int) -> bool:
    """Whether the best response has the highest reward."""
    others = rewards[:best] + rewards[best + 1 :]
    margin = rewards[best] - max(others)
    assert abs(margin) > EDGE, "a tie, nearly: take another seed"
    return margin > 0


def label_loss(rewards: Tensor, best: int, row: Any, s: Any, means: Numbers) -> Tensor:
    """Minus the log-probability of the best response, by a softmax of the rewards."""
    loss = rewards.logsumexp(0) - rewards[best]
    note(means, "train/loss", loss)
    return loss


def train_reward(
    script: str, settings: dict[str, Any], folder: Path, world: int
) -> SimpleNamespace:
    """A run of train_reward.py: its metrics, samples, results and weights."""
    s = SimpleNamespace(**settings)
    tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    table = folder / s.label_dataset
    if table.is_dir():
        rows = read_rows(table / "train.jsonl")
        labels = read_labels(rows[: s.num_labels], s, tokenizer)
        held_out = read_rows(table / "test.jsonl")
    else:
        rows = read_rows(table)
        labels = read_labels(rows[: s.num_labels], s, tokenizer)
        held_out = rows[s.num_labels :]
    held_out = read_labels(held_out[: s.eval_labels], s, tokenizer)
    queries = read_queries(s, folder / s.query_dataset, tokenizer)
    ref = load(AutoModelForCausalLM, folder / s.base_model)
    model = load(AutoModelForSequenceClassification, folder / s.base_model, num_labels=1)
    torch.manual_seed(s.seed)
    size = model.config.hidden_size
    if not model.config.architectures[0].endswith("ForSequenceClassification"):
        nn.init.zeros_(model.score.weight)
        model.score.weight.data += torch.empty(1, size).normal_(0, 1 / math.sqrt(size + 1))
    gain = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)

    def normalize(step: int) -> None:
        """Sets gain and bias so that the rewards of the reference policy's samples, if there are
        any, have mean 0 and deviation 1."""
        count = s.normalization_samples
        if count == 0:
            return
        logits = []
        for i, u in enumerate(uniforms(s.seed, step, count, s.response_length)):
            query = queries[(step * count + i) % len(queries)]
            response = sample(ref, query.context, u, s)
            logits.append(logit(model, query.ids + response).item())
        mean = float(np.mean(logits))
        std = float(np.std(logits))
        gain.data.fill_(1 / std)
        bias.data.fill_(-mean / std)

    def rewards_of(query: list[int], responses: list[list[int]]) -> Tensor:
        logits = [logit(model, query + response) for response in responses]
        return gain * torch.stack(logits) + bias

    files = {"reward_model/model": model}
    start = weights_of(files)
    normalize(0)
    adam = Adam([*model.parameters(), gain, bias], [], s)
    order = np.random.RandomState(s.seed).permutation(len(labels))
    metrics = []
    for update in range(len(labels) // s.batch_size):
        first = update * s.batch_size
        lr = scheduled(s.lr, 1 - first / len(labels), update, s)
        means = defaultdict(list)
        for i in order[first : first + s.batch_size]:
            query, responses, best, row = labels[i]
            rewards = rewards_of(query, responses)
            loss = label_loss(rewards, best, row, s, means)
            (loss / s.batch_size).backward()
            note(means, "train/accuracy", is_hit(rewards.tolist(), best))
        note(means, "train/gradient_norm", adam.step(lr, 0.0))
        row = {name: mean_of(numbers) for name, numbers in means.items()}
        row["train/lr"] = lr
        metrics.append(row)
    normalize(1)
    results = {"gain": gain.item(), "bias": bias.item()}

    samples = []
    hits = []
    for query, responses, best, _ in held_out:
        with torch.no_grad():
            rewards = rewards_of(query, responses).tolist()
        hits.append(is_hit(rewards, best))
        row = {"query": tokenizer.decode(query), "best": best, "rewards": rewards}
        row["responses"] = [tokenizer.decode(response) for response in responses]
        samples.append(row)
    if held_out:
        results["test/accuracy"] = mean_of(hits)
    return SimpleNamespace(
        metrics=metrics,
        samples=samples,
        results=results,
        start=start,
        weights=weights_of(files),
    )
