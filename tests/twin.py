"""The three scripts once more, in the plainest PyTorch, so that whole runs can be compared: see test_twin.py.

One row at a time, in float64: no padding, no packing, no cache, no masks (rows are as long as their tokens count), no
micro-batches; every rank in turn. Written from the papers and the original's description, importing nothing from the
scripts; transformers gives the models and the tokenizer.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Numbers = dict[str, list[float]]
EDGE = 1e-6  # a uniform number nearer than this to the border of two tokens could fall on the other side in fp32


def note(means: Numbers, where: str, **more: Any) -> None:
    """Note numbers, or all numbers of tensors, under where/name: a metric is the mean of all that is noted."""
    for name, x in more.items():
        means[f"{where}/{name}"] += torch.as_tensor(x, dtype=torch.float64).detach().flatten().tolist()


class Adam:
    """Kingma & Ba 2015: Algorithm 1 (`torch`), or as in the paragraph before section 2.1 (`tf`: epsilon hat)."""

    def __init__(self, parameters: list[Tensor], form: str, eps: float) -> None:
        self.parameters, self.form, self.eps, self.t = parameters, form, eps, 0
        self.m, self.v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """One step with the gradients that have gathered, whose norm is returned; they are set to zero."""
        self.t += 1
        square = 0.0
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            square += (gradient**2).sum().item()
            m.copy_(0.9 * m + 0.1 * gradient)
            v.copy_(0.999 * v + 0.001 * gradient**2)
            if self.form == "tf":
                p -= lr * math.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t) * m / (v.sqrt() + self.eps)
            else:
                p -= lr * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + self.eps)
            p.grad = None
        return math.sqrt(square)


# --- models and data ---


def load(auto_class: Any, folder: Path, **kwargs: Any) -> Any:
    """A model in float64, without dropout; every token that it reads is a real one, the pad too."""
    model = auto_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **kwargs).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def weights_of(files: dict[str, Any]) -> dict[str, Tensor]:
    """A copy of all weights of the models in these files, as file:name; tied ones once."""
    return {f"{file}:{name}": p.detach().clone() for file, x in files.items() for name, p in x.named_parameters()}


def one_token(tokenizer: Any, text: str | None) -> int | None:
    """The token that is this text, or the tokenizer's eos."""
    if text is None:
        return None
    return tokenizer.eos_token_id if text == "eos" else tokenizer(text, add_special_tokens=False).input_ids[0]


def cut_query(tokens: list[int], length: int, start: int | None, end: int | None, long: str) -> list[int]:
    """The query in a text, or nothing."""
    if start is not None:
        if start not in tokens:
            return []
        if tokens.index(start) < len(tokens) - 1:
            tokens = tokens[tokens.index(start) + 1 :]
    if len(tokens) > length:
        tokens = {"keep_start": tokens[:length], "keep_end": tokens[len(tokens) - length :], "drop": []}[long]
    while end is not None and tokens and tokens[-1] != end:
        tokens = tokens[:-1]
    return tokens


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokens_of(value: Any, tokenizer: Any, pad: int) -> list[int]:
    """Tokens of a text, or of a padded row of tokens."""
    if isinstance(value, str):
        return tokenizer(value, add_special_tokens=False).input_ids
    return [token for token in value if token != pad]


def first_token(tokenizer: Any) -> list[int]:
    """The BOS that the tokenizer puts before every text, if it does."""
    ids = tokenizer("").input_ids
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def read_queries(s: Any, folder: Path, tokenizer: Any) -> list[SimpleNamespace]:
    """Queries in the order of the seed: what the reward model reads (ids), and what the policy reads (context)."""
    rows = read_rows(folder / s.query_dataset)
    column = next(x for x in ("text", "query", "prompt", "messages", "article", "content") if x in rows[0])
    start, end = one_token(tokenizer, s.start_text), one_token(tokenizer, s.end_text)
    long = s.long_queries or ("drop" if end is None else "keep_start")
    bos = first_token(tokenizer)
    prefix, suffix = (tokens_of(text, tokenizer, s.label_pad) for text in (s.query_prefix, s.query_suffix))
    queries = []
    for i in np.random.default_rng([s.seed, 2]).permutation(len(rows)):
        query = cut_query(tokens_of(rows[i][column], tokenizer, s.label_pad), s.query_length, start, end, long)
        if query:
            queries.append(SimpleNamespace(ids=bos + query, context=bos + prefix + query + suffix))
    return queries


# --- what a model does with one row ---


def uniforms(seed: int, update: int, rows: int, length: int) -> list[list[float]]:
    """The numbers that the scripts sample with."""
    return np.random.default_rng([seed, 1, update]).random((rows, length), dtype=np.float32).tolist()


@torch.no_grad()
def sample(lm: Any, context: list[int], u: list[float], temperature: float) -> list[int]:
    """A response: each token is where the cumulative distribution passes its number."""
    response = []
    for number in u:
        logits = lm(torch.tensor([context + response])).logits[0, -1]
        cdf = (logits / temperature).softmax(0).cumsum(0)
        assert (cdf[:-1] - number).abs().min() > EDGE, "a number at the border of two tokens: take another seed"
        response.append(int((cdf[:-1] <= number).sum()))
    return response


def logit(model: Any, tokens: list[int]) -> Tensor:
    """The logit of a classifier, at the last token."""
    return model.score(model.base_model(torch.tensor([tokens])).last_hidden_state[0, -1])[0]


def read(policy: Any, row: Any, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, values of the tokens that count, each from the state before it."""
    out = policy.lm(torch.tensor([row.query.context + row.response]), output_hidden_states=True)
    before = slice(len(row.query.context) - 1, len(row.query.context) - 1 + row.count)
    distributions = (out.logits[0, before] / temperature).log_softmax(1)
    logprobs = torch.stack([d[token] for d, token in zip(distributions, row.response, strict=False)])
    entropies = -(distributions.exp() * distributions).sum(1)
    return logprobs, entropies, out.hidden_states[-1][0, before] @ policy.weight[0] + policy.bias


@torch.no_grad()
def make_row(policy: Any, ref: Any, reward: Any, query: Any, u: list[float], end: int | None, s: Any) -> Any:
    """One response to one query, with everything that is thought of it."""
    row = SimpleNamespace(query=query, response=sample(policy.lm, query.context, u, s.temperature))
    ends = [i for i, token in enumerate(row.response) if token == end and i >= s.truncate_after]
    row.found = bool(ends) or end is None
    row.truncated = row.response[: ends[0] + 1] if ends else row.response
    row.count = len(row.truncated) if s.mask_truncated else len(row.response)
    row.logprobs, _, row.values = read(policy, row, s.temperature)
    row.log_ratio = row.logprobs - read(ref, row, s.temperature)[0]
    row.score = reward.config.reward_gain * logit(reward, query.ids + row.truncated) + reward.config.reward_bias
    row.penalized = row.score
    if not row.found:
        row.penalized = s.penalty_reward_value + (row.score if s.penalty_mode == "add" else 0 * row.score)
    return row


def evaluate(policy: Any, ref: Any, reward: Any, queries: list[Any], tokenizer: Any, end: Any, s: Any) -> list[Any]:
    """Query, response, score, kl of the evaluation queries."""
    found = []
    for query, u in zip(queries, uniforms(s.seed, 0, len(queries), s.response_length), strict=True):
        row = make_row(policy, ref, reward, query, u, end, s)
        texts = tokenizer.decode(query.ids), tokenizer.decode(row.truncated)
        found.append((*texts, row.score.item(), row.log_ratio.sum().item()))
    return found


# --- PPO and RLOO ---


def whiten(rows: list[Tensor], shift_mean: bool) -> list[Tensor]:
    """Rows of numbers, scaled so that all of them together have variance 1 and, with shift_mean, mean 0."""
    every = torch.cat(rows)
    mean, std = every.mean(), (every.var(correction=0) + 1e-8).sqrt()
    return [(x - mean) / std + (0 if shift_mean else mean) for x in rows]


def gae(values: Tensor, rewards: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of one response (Schulman et al. 2016, equation 16)."""
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    sums = [sum((gamma * lam) ** (i - t) * deltas[i] for i in range(t, len(deltas))) for t in range(len(deltas))]
    return torch.stack(sums)


def clipped_loss(log_ratio: Tensor, advantages: Tensor, cliprange: float, means: Numbers) -> Tensor:
    """Minus the objective of Schulman et al. 2017, equation 7, of every ratio."""
    ratio = log_ratio.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    loss = torch.maximum(free, clipped)
    note(means, "ppo/loss", policy=loss)
    note(means, "ppo/policy", approxkl=log_ratio**2 / 2, clipfrac=clipped > free)
    note(means, "ppo/val", ratio=ratio, ratio_var=ratio**2)
    return loss


def ppo_step(policy: Any, parts: list[list[Any]], kl_coef: float, s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the tokens of a minibatch; `parts` has each rank's rows."""
    total = sum(row.count for rows in parts for row in rows)
    for rows in parts:
        rewards = [-kl_coef * row.log_ratio for row in rows]
        for row, reward in zip(rows, rewards, strict=True):
            reward[-1] += row.penalized
        if s.whiten_rewards:
            rewards = whiten(rewards, shift_mean=False)
        advantages = [gae(row.values, reward, s.gamma, s.lam) for row, reward in zip(rows, rewards, strict=True)]
        returns = [x + row.values for x, row in zip(advantages, rows, strict=True)]
        for name, x in (("returns", torch.cat(returns)), ("val", torch.cat([row.values for row in rows]))):
            note(means, f"ppo/{name}", mean=x.mean(), var=x.var(correction=0))
        for row, advantage, target in zip(rows, whiten(advantages, shift_mean=True), returns, strict=True):
            logprobs, entropies, values = read(policy, row, s.temperature)
            policy_loss = clipped_loss(logprobs - row.logprobs, advantage, s.cliprange, means)
            near = torch.maximum(torch.minimum(values, row.values + s.cliprange_value), row.values - s.cliprange_value)
            error, near_error = (values - target) ** 2, (near - target) ** 2
            value_loss = torch.maximum(error, near_error) / 2
            loss = policy_loss + s.vf_coef * value_loss
            note(means, "ppo/loss", value=value_loss, total=loss)
            note(means, "ppo/val", vpred=values, error=error, clipfrac=near_error > error)
            note(means, "ppo/policy", entropy=entropies)
            (loss.sum() / total).backward()


def rloo_step(policy: Any, parts: list[list[Any]], kl_coef: float, s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the responses of a minibatch."""
    for row in (rows := [row for part in parts for row in part]):
        logprobs, entropies, _ = read(policy, row, s.temperature)
        log_ratio = logprobs - row.logprobs if s.token_level else (logprobs - row.logprobs).sum().view(1)
        note(means, "ppo/policy", entropy=entropies)
        (clipped_loss(log_ratio, row.advantage, s.cliprange, means).sum() / len(rows)).backward()


def reinforce(script: str, settings: dict[str, Any], folder: Path, world: int) -> SimpleNamespace:
    """A run of ppo_rlhf.py or rloo_rlhf.py: its metrics, samples and weights (`start`: those at the start)."""
    s = SimpleNamespace(**settings)
    tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    end, k = one_token(tokenizer, s.truncate_token), s.rloo_k if script == "rloo_rlhf.py" else 1
    queries = read_queries(s, folder, tokenizer)
    held_out, queries = queries[: s.eval_queries], queries[s.eval_queries :]
    reward = load(AutoModelForSequenceClassification, folder / s.reward_model)
    lm, ref_lm = (load(AutoModelForCausalLM, folder / s.base_model) for _ in range(2))
    head = torch.nn.Linear(lm.config.hidden_size, 1, dtype=torch.float64)
    for p in head.parameters():
        p.data.zero_()
    policy, ref = (SimpleNamespace(lm=x, weight=head.weight, bias=head.bias) for x in (lm, ref_lm))
    files = {"policy/model": lm} | ({"policy/value_head": head} if k == 1 else {})
    adam = Adam([p for x in files.values() for p in x.parameters()], s.adam, s.adam_eps)
    start, before = weights_of(files), evaluate(policy, ref, reward, held_out, tokenizer, end, s)
    kl_coef, metrics = s.kl_coef, []
    shuffles = [np.random.RandomState(s.seed + 100_003 * rank) for rank in range(world)]
    updates, share = math.ceil(s.total_episodes / s.batch_size), s.batch_size // world // k  # share: a rank's queries
    for update in range(updates):
        u = uniforms(s.seed, update + 1, s.batch_size, s.response_length)
        ranks, means, lr = [], defaultdict(list), s.lr * (1 - update / updates)
        for rank in range(world):
            groups = []  # K responses to each query
            for i in range((update * world + rank) * share, (update * world + rank + 1) * share):
                query = queries[i % len(queries)]
                groups.append([make_row(policy, ref, reward, query, u.pop(0), end, s) for _ in range(k)])
            ranks.append(groups)
        for group in (group for groups in ranks for group in groups):
            totals = [row.penalized - kl_coef * row.log_ratio.sum() for row in group]
            for i, row in enumerate(group):
                others = totals[:i] + totals[i + 1 :]
                row.advantage = totals[i] - sum(others) / max(len(others), 1)  # RLOO's: Ahmadian et al. 2024, eq. 8
                assert abs(row.advantage) > EDGE, "a tie, which rounding decides: take another seed"
                kl = row.log_ratio.sum()
                note(means, "objective", kl=kl, kl_k3=((-row.log_ratio).exp() - 1 + row.log_ratio).sum())
                note(means, "objective", non_score_reward=-kl_coef * kl, entropy=-row.logprobs.sum())
                note(means, "objective", scores=row.penalized, score_total=totals[i], found_end=row.found)
        for _ in range(s.num_epochs):
            orders = [shuffle.permutation(share).reshape(s.num_minibatches, -1) for shuffle in shuffles]
            for j in range(s.num_minibatches):
                parts = [[row for i in orders[rank][j] for row in ranks[rank][i]] for rank in range(world)]
                step = ppo_step if k == 1 else rloo_step
                step(policy, parts, kl_coef, s, means)
                note(means, "ppo/policy", gradient_norm=adam.step(lr))
        mean = {name: sum(x) / len(x) for name, x in means.items()}
        mean["first_ratio_error"] = 0.0  # the policy has not moved
        mean["ppo/val/ratio_var"] -= mean["ppo/val/ratio"] ** 2
        if k == 1:
            mean["ppo/val/var_explained"] = 1 - mean["ppo/val/error"] / (mean["ppo/returns/var"] + 1e-8)
        metrics.append({"ppo/episode": (update + 1) * s.batch_size, "ppo/lr": lr, "objective/kl_coef": kl_coef} | mean)
        if s.kl_target is not None:  # Ziegler et al. 2019, section 2.2
            error = min(max(mean["objective/kl"] / s.kl_target - 1, -0.2), 0.2)
            kl_coef *= 1 + error * s.batch_size / s.kl_horizon
    after = evaluate(policy, ref, reward, held_out, tokenizer, end, s)
    names = ("query", "response", "score", "kl", "response_after", "score_after", "kl_after")
    samples = [dict(zip(names, old + new[1:], strict=True)) for old, new in zip(before, after, strict=True)]
    return SimpleNamespace(metrics=metrics, samples=samples, results={}, start=start, weights=weights_of(files))


# --- the reward model ---


def read_labels(rows: list[Any], s: Any, tokenizer: Any) -> list[tuple[list[int], list[list[int]], int]]:
    """Query, responses and which is best. Of text preferences a coin says which comes first."""
    bos, labels = first_token(tokenizer), []
    coins = np.random.default_rng([s.seed, 3]).integers(0, 2, len(rows)).tolist()
    for row, coin in zip(rows, coins, strict=True):
        is_text = "chosen" in row
        names = ("chosen", "rejected") if is_text else [f"sample{i}" for i in range(len(row) - 2)]
        query = tokens_of(row["prompt" if is_text else "query"], tokenizer, s.label_pad)
        responses, best = [tokens_of(row[name], tokenizer, s.label_pad) for name in names], row.get("best", coin)
        if is_text:
            query = cut_query(query, s.query_length, None, None, s.long_queries or "drop")
            if s.truncate_token == "eos":
                end = tokenizer.eos_token_id
                responses = [response[: (response + [end]).index(end)] + [end] for response in responses]
            responses = [response[: s.response_length] for response in responses]
            if not query or responses[0] == responses[1]:
                continue
            if coin == 1:  # the chosen one is the second
                responses = responses[::-1]
        labels.append((bos + query, responses, best))
    return labels


def is_hit(rewards: Any, best: int) -> bool:
    """Whether no response has a higher reward than the best one; two responses of a label may be the same."""
    return bool(rewards[best] > max(rewards) - 1e-6)


def train_reward(script: str, settings: dict[str, Any], folder: Path, world: int) -> SimpleNamespace:
    """A run of train_reward.py: its metrics, samples, results and weights."""
    s = SimpleNamespace(**settings)
    tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    table = folder / s.label_dataset
    parts = [read_rows(table / f"{x}.jsonl") for x in ("train", "test")] if table.is_dir() else [read_rows(table), []]
    parts = [parts[0][: s.num_labels], parts[1] or parts[0][s.num_labels :]]
    labels, held_out = (read_labels(rows, s, tokenizer) for rows in parts)
    queries, ref = read_queries(s, folder, tokenizer), load(AutoModelForCausalLM, folder / s.base_model)
    model = load(AutoModelForSequenceClassification, folder / s.base_model, num_labels=1)
    torch.manual_seed(s.seed)
    size = model.config.hidden_size
    model.score.weight.data.copy_(torch.empty(1, size).normal_(0, 1 / math.sqrt(size + 1)))
    gain, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.0, 0.0))

    def normalize(step: int) -> dict[str, float]:
        """Set gain and bias so that the rewards of the reference policy's samples have mean 0 and deviation 1."""
        logits, count = [], s.normalization_samples
        for i, u in enumerate(uniforms(s.seed, step, count, s.response_length)):
            query = queries[(step * count + i) % len(queries)]
            logits.append(logit(model, query.ids + sample(ref, query.context, u, s.temperature)).item())
        mean, std = float(np.mean(logits)), float(np.std(logits))
        gain.data.fill_(1 / std)
        bias.data.fill_(-mean / std)
        return {"mean": mean, "std": std}

    def rewards(query: list[int], responses: list[list[int]]) -> Tensor:
        """The reward of each response."""
        return torch.stack([gain * logit(model, query + response) + bias for response in responses])

    files = {"reward_model/model": model}
    start, results, metrics = weights_of(files), {"before": normalize(0)}, []
    adam = Adam([*model.parameters(), gain, bias], s.adam, s.adam_eps)
    order = np.random.RandomState(s.seed).permutation(len(labels))
    for first in range(0, len(labels) - s.batch_size + 1, s.batch_size):
        means, lr = defaultdict(list), s.lr * (1 - first / len(labels))
        for i in order[first : first + s.batch_size]:
            query, responses, best = labels[i]
            values = rewards(query, responses)
            loss = values.logsumexp(0) - values[best]
            (loss / s.batch_size).backward()
            note(means, "train", loss=loss, accuracy=is_hit(values, best))
        note(means, "train", gradient_norm=adam.step(lr))
        metrics.append({"train/labels": first + s.batch_size, "train/lr": lr})
        metrics[-1] |= {name: sum(x) / len(x) for name, x in means.items()}
    results |= {"after": normalize(1), "gain": gain.item(), "bias": bias.item()}
    with torch.no_grad():
        found = [rewards(query, responses).tolist() for query, responses, _ in held_out]
    answers, samples = [best for *_, best in held_out], []
    for (query, responses, best), values in zip(held_out, found, strict=True):
        texts = [tokenizer.decode(response) for response in responses]
        samples.append({"query": tokenizer.decode(query), "responses": texts, "best": best, "rewards": values})
    results["test/accuracy"] = float(np.mean([is_hit(x, best) for x, best in zip(found, answers, strict=True)]))
    results["test/constant"] = max(answers.count(best) for best in answers) / len(answers)
    return SimpleNamespace(metrics=metrics, samples=samples, results=results, start=start, weights=weights_of(files))
