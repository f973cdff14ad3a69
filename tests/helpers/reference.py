"""The three scripts once more, in the plainest PyTorch, so that whole runs can be compared: see
test_reference.py. This file has what they share; reference_rl.py has the loop of PPO and RLOO,
reference_ppo.py and reference_rloo.py the two algorithms, reference_reward.py the reward model.

One row at a time, in float64: no padding, no cache, no masks (rows are as long as their tokens
count), no micro-batches; every rank in turn. Written from the papers and the original's
description, importing nothing from the scripts; transformers gives the models and the tokenizer.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Numbers = dict[str, list[float]]
EDGE = 3e-6  # nearer than this to where a decision falls, fp32 could decide the other way
CLIP_EDGE = 1e-5  # the same for ratios and values, which are those of weights that have moved
PAD = 50259  # pads the rows of tokens in label files


def note(means: Numbers, name: str, x: Any) -> None:
    """Note a number, or all numbers of a tensor: a metric is the mean of all that is noted."""
    numbers = torch.as_tensor(x, dtype=torch.float64)
    means[name] += numbers.detach().flatten().tolist()


def mean_of(numbers: list[float]) -> float:
    """Their mean; 0 of none."""
    return sum(numbers) / max(len(numbers), 1)


class Adam:
    """Kingma & Ba 2015: Algorithm 1 (`torch`), or as in the paragraph before section 2.1 (`tf`:
    epsilon hat); with the decay of matrices of Loshchilov & Hutter 2019, Algorithm 2."""

    def __init__(self, policy: list[Tensor], critic: list[Tensor], s: Any) -> None:
        self.s = s
        self.steps = 0
        self.policy = policy
        self.critic = critic
        self.m = [torch.zeros_like(p) for p in policy + critic]
        self.v = [torch.zeros_like(p) for p in policy + critic]

    @torch.no_grad()
    def step(self, lr: float, critic_lr: float) -> float:
        """One step with the gradients that have gathered, whose norm is returned; they are set to
        zero."""
        s = self.s
        self.steps += 1
        parameters = self.policy + self.critic
        rates = [lr] * len(self.policy) + [critic_lr] * len(self.critic)
        gradients = []
        for p in parameters:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients))
        limit = s.max_grad_norm or math.inf
        clip = min(1.0, limit / (norm + 1e-6))

        beta1, beta2 = s.adam_betas
        rest1 = 1 - beta1**self.steps
        rest2 = 1 - beta2**self.steps
        rows = zip(parameters, gradients, self.m, self.v, rates, strict=True)
        for p, gradient, m, v, rate in rows:
            clipped = clip * gradient
            m.copy_(beta1 * m + (1 - beta1) * clipped)
            v.copy_(beta2 * v + (1 - beta2) * clipped**2)
            if s.adam == "tf":
                move = math.sqrt(rest2) / rest1 * m / (v.sqrt() + s.adam_eps)
            else:
                move = (m / rest1) / ((v / rest2).sqrt() + s.adam_eps)
            if p.dim() > 1:
                move = move + s.weight_decay * p
            p -= rate * move
        return norm


def scheduled(lr: float, left: float, update: int, s: Any) -> float:
    """A learning rate in the update (from 0) before which that part of the run is left."""
    rise = min(1.0, (update + 1) / (s.lr_warmup + 1))
    decay = 1.0
    if s.lr_schedule == "linear":
        decay = left
    if s.lr_schedule == "cosine":
        decay = math.sin(left * math.pi / 2) ** 2
    return lr * rise * decay


# --- models ---


def load(auto_class: Any, folder: Path, **options: Any) -> Any:
    """A model in float64, without dropout; every token that it reads is a real one, the pad too."""
    options |= {"dtype": torch.float64, "attn_implementation": "eager"}
    model = auto_class.from_pretrained(folder, **options)
    for module in model.eval().modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def weights_of(files: dict[str, Any]) -> dict[str, Tensor]:
    """A copy of all weights of the models in these files, as file:name; tied ones once."""
    weights = {}
    for file, model in files.items():
        for name, p in model.named_parameters():
            weights[f"{file}:{name}"] = p.detach().clone()
    return weights


# --- data ---


def one_token(tokenizer: Any, text: str | None) -> int | None:
    """The token that is this text, or the tokenizer's eos."""
    if text is None:
        return None
    if text == "eos":
        return tokenizer.eos_token_id
    return tokenizer(text, add_special_tokens=False).input_ids[0]


def cut_query(
    tokens: list[int], length: int, start: int | None, end: int | None, long: str
) -> list[int]:
    """The query in a text, or nothing."""
    if start is not None:
        if start not in tokens:
            return []
        first = tokens.index(start) + 1
        if first < len(tokens):
            tokens = tokens[first:]
    if len(tokens) > length:
        kept = {"drop": [], "keep_start": tokens[:length], "keep_end": tokens[-length:]}
        tokens = kept[long]
    if end is not None:
        while tokens and tokens[-1] != end:
            tokens = tokens[:-1]
    return tokens


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokens_of(value: Any, tokenizer: Any) -> list[int]:
    """Tokens of a text, or of a padded row of tokens."""
    if isinstance(value, str):
        return tokenizer(value, add_special_tokens=False).input_ids
    return [token for token in value if token != PAD]


def first_token(tokenizer: Any) -> list[int]:
    """The BOS that the tokenizer puts before every text, if it does."""
    ids = tokenizer("").input_ids
    if ids and ids[0] == tokenizer.bos_token_id:
        return ids[:1]
    return []


def read_queries(s: Any, file: Path, tokenizer: Any) -> list[SimpleNamespace]:
    """Queries in the order of the seed: what the reward model reads (ids), what the policy reads
    (context), and what else stands in the table (columns)."""
    rows = read_rows(file)
    names = "query prompt question instruction messages conversations text article content"
    known = [name for name in names.split() if name in rows[0]]
    column = known[0]
    start = one_token(tokenizer, s.start_text)
    end = one_token(tokenizer, s.end_text)
    long = s.long_queries
    if long is None:
        long = "drop" if end is None else "keep_start"
    bos = first_token(tokenizer)
    prefix = tokens_of(s.query_prefix or "", tokenizer)
    suffix = tokens_of(s.query_suffix or "", tokenizer)
    queries = []
    for i in np.random.default_rng([s.seed, 2]).permutation(len(rows)):
        tokens = tokens_of(rows[i][column], tokenizer)
        cut = cut_query(tokens, s.query_length, start, end, long)
        if cut:
            query = SimpleNamespace(ids=bos + cut, columns=rows[i])
            query.context = bos + prefix + cut + suffix
            queries.append(query)
    return queries


# --- what a model does with one row ---


def uniforms(seed: int, update: int, rows: int, length: int) -> list[list[float]]:
    """The numbers that the scripts sample with."""
    generator = np.random.default_rng([seed, 1, update])
    return generator.random((rows, length), dtype=np.float32).tolist()


@torch.no_grad()
def sample(lm: Any, context: list[int], u: list[float], s: Any) -> list[int]:
    """A response: each token is where the cumulative distribution passes its number."""
    response = []
    for number in u:
        logits = lm(torch.tensor([context + response])).logits[0, -1]
        probs = (logits / s.temperature).softmax(0)
        cdf = probs.cumsum(0)[:-1]
        assert (cdf - number).abs().min() > EDGE, "between two tokens: take another seed"
        response.append(int((cdf <= number).sum()))
    return response


def logit(model: Any, tokens: list[int]) -> Tensor:
    """The logit of a classifier, at the last token."""
    states = model.base_model(torch.tensor([tokens])).last_hidden_state
    return model.score(states[0, -1])[0]


def read(policy: Any, row: Any, temperature: float) -> SimpleNamespace:
    """Of the tokens that count, each from the state before it: log-probability, entropy, value."""
    ids = torch.tensor([row.query.context + row.response])
    first = len(row.query.context) - 1
    output = policy.lm(ids, output_hidden_states=True)
    states = output.hidden_states[-1]
    if policy.critic is not None:
        states = policy.critic(ids).last_hidden_state
    states = states[0, first : first + row.count]
    seen = SimpleNamespace(values=states @ policy.head.weight[0] + policy.head.bias)
    logits = output.logits[0, first : first + row.count]
    distributions = (logits / temperature).log_softmax(1)
    seen.logprobs = distributions[range(row.count), row.response[: row.count]]
    seen.entropies = -(distributions.exp() * distributions).sum(1)
    return seen


def clipped_loss(
    log_ratio: Tensor, advantages: Any, cliprange: float, means: Numbers, names: dict[str, str]
) -> Tensor:
    """Minus the objective of Schulman et al. 2017, equation 7, of every ratio. `names` are those of
    the metrics."""
    ratio = log_ratio.exp()
    beyond = (ratio - 1).abs() - cliprange
    assert beyond.abs().min() > CLIP_EDGE, "clipped or not: take another seed"
    near = ratio.clamp(1 - cliprange, 1 + cliprange)
    loss = -advantages * ratio
    near_loss = -advantages * near
    note(means, names["loss"], torch.maximum(loss, near_loss))
    note(means, names["ratio"], ratio)
    note(means, names["approxkl"], log_ratio**2 / 2)
    note(means, names["clipfrac"], near_loss > loss)
    return torch.maximum(loss, near_loss)
