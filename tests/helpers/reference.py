"""The three scripts once more, in the plainest PyTorch, so that whole runs can be compared: see
test_reference.py.

One row at a time, in float64: no padding, no cache, no masks (rows are as long as their tokens
count), no micro-batches; every rank in turn. Written from the papers and the original's
description, importing nothing from the scripts; transformers gives the models and the tokenizer.
"""

import copy
import math
import pkgutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from run_tools import read_lines
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Settings = dict[str, Any]
Numbers = dict[str, list[float]]
Tokens = list[int]
Rows = list[Any]
Parts = list[Rows]  # each rank's rows
# Settings that some scripts do not have.
OFF = {"critic": "shared", "critic_lr": None, "critic_warmup": 0, "cliprange_high": None}
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
        """One step with the gradients that have gathered, and None after it; their norm."""
        s = self.s
        self.steps += 1
        parameters = self.policy + self.critic
        rates = [lr] * len(self.policy) + [critic_lr] * len(self.critic)
        gradients = []
        for p in parameters:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
        every = torch.cat([gradient.flatten() for gradient in gradients])
        norm = every.norm().item()
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
                step = math.sqrt(rest2) / rest1
                move = step * m / (v.sqrt() + s.adam_eps)
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


def read_settings(settings: Settings, folder: Path) -> SimpleNamespace:
    """The settings `s` with the tokenizer, the token that ends responses, and the folder."""
    s = SimpleNamespace(**OFF | settings, folder=folder)
    s.tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    s.end = one_token(s.truncate_token, s)
    return s


def one_token(text: str | None, s: Any) -> int | None:
    """The token that is this text, or the tokenizer's eos."""
    if text is None:
        return None
    if text == "eos":
        return s.tokenizer.eos_token_id
    return tokens_of(text, s)[0]


def cut_query(
    tokens: Tokens,
    length: int,
    start: int | None,
    end: int | None,
    long: str,
) -> Tokens:
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


def tokens_of(value: Any, s: Any) -> Tokens:
    """Tokens of a text, or of a padded row of tokens."""
    if isinstance(value, str):
        return s.tokenizer(value, add_special_tokens=False).input_ids
    return [token for token in value if token != PAD]


def first_token(s: Any) -> Tokens:
    """The BOS that the tokenizer puts before every text, if it does."""
    ids = s.tokenizer("").input_ids
    if ids and ids[0] == s.tokenizer.bos_token_id:
        return ids[:1]
    return []


def read_queries(s: Any) -> Rows:
    """In the order of the seed, with what the reward model reads (ids) and the policy (context)."""
    rows = read_lines(s.folder / s.query_dataset)
    names = "query prompt question instruction messages conversations text article content"
    column = next(name for name in names.split() if name in rows[0])
    start = one_token(s.start_text, s)
    end = one_token(s.end_text, s)
    long = s.long_queries
    if long is None:
        long = "drop" if end is None else "keep_start"
    bos = first_token(s)
    prefix = tokens_of(s.query_prefix or "", s)
    suffix = tokens_of(s.query_suffix or "", s)
    queries = []
    generator = np.random.default_rng([s.seed, 2])
    for i in generator.permutation(len(rows)):
        tokens = tokens_of(rows[i][column], s)
        cut = cut_query(tokens, s.query_length, start, end, long)
        if cut:
            query = SimpleNamespace(ids=bos + cut, columns=rows[i])
            query.context = bos + prefix + cut + suffix
            queries.append(query)
    return queries


# --- what a model does with one row ---


def uniforms(seed: int, update: int, rows: int, length: int) -> list[list[float]]:
    generator = np.random.default_rng([seed, 1, update])
    return generator.random((rows, length), dtype=np.float32).tolist()


@torch.no_grad()
def sample(
    lm: Any,
    contexts: Rows,
    numbers: list[list[float]],
    s: Any,
) -> Rows:
    """Responses: each token is where the cumulative distribution passes its number. Contexts of one
    length are read together."""
    responses = {}
    for length in set(map(len, contexts)):
        rows = [i for i, context in enumerate(contexts) if len(context) == length]
        ids = torch.tensor([contexts[i] for i in rows])
        u = torch.tensor([numbers[i] for i in rows], dtype=torch.float64)
        for t in range(s.response_length):
            logits = lm(ids).logits[:, -1]
            probs = (logits / s.temperature).softmax(1)
            cdf = probs.cumsum(1)[:, :-1]
            number = u[:, t, None]
            assert (cdf - number).abs().min() > EDGE, "between two tokens: take another seed"
            drawn = (cdf <= number).sum(1, keepdim=True)
            ids = torch.cat([ids, drawn], 1)
        responses |= zip(rows, ids[:, length:].tolist(), strict=True)
    return [responses[i] for i in range(len(contexts))]


def length_of(response: Tokens, s: Any) -> int | None:
    """Of a response with its truncate token, if it has one."""
    for i in range(s.truncate_after, len(response)):
        if response[i] == s.end:
            return i + 1
    return None


def logit(model: Any, tokens: Tokens) -> Tensor:
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
    values = states @ policy.head.weight[0] + policy.head.bias
    seen = SimpleNamespace(values=values)
    logits = output.logits[0, first : first + row.count]
    distributions = (logits / temperature).log_softmax(1)
    seen.logprobs = distributions[range(row.count), row.response[: row.count]]
    seen.entropies = -(distributions.exp() * distributions).sum(1)
    return seen


def clipped_loss(log_ratio: Tensor, advantages: Any, s: Any, means: Numbers) -> Tensor:
    """Minus the objective of Schulman et al. 2017, equation 7, of every ratio."""
    ratio = log_ratio.exp()
    least = 1 - s.cliprange
    most = 1 + (s.cliprange_high or s.cliprange)
    for edge in (least, most):
        assert (ratio - edge).abs().min() > CLIP_EDGE, "clipped or not: take another seed"
    loss = -advantages * ratio
    near_loss = -advantages * ratio.clamp(least, most)
    note(means, "loss/policy", torch.maximum(loss, near_loss))
    note(means, "policy/ratio", ratio)
    note(means, "policy/approxkl", log_ratio**2 / 2)
    note(means, "policy/clipfrac", near_loss > loss)
    return torch.maximum(loss, near_loss)


# --- PPO ---


def whiten(rows: list[Tensor], shift_mean: bool) -> list[Tensor]:
    """The numbers of all rows together get the variance 1 and, with shift_mean, the mean 0."""
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


def set_advantages(rows: Rows, kl_coef: float, s: Any) -> None:
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
    """Half the larger of two squared errors, of the value and of one clipped around the old."""
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


def ppo_step(policy: Any, parts: Parts, kl_coef: float, s: Any, means: Numbers) -> None:
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
        loss = clipped_loss(log_ratio, row.advantages, s, means)
        error = value_loss(now.values, row, s.cliprange_value, means)
        note(means, "policy/entropy", now.entropies)
        total = (loss + s.vf_coef * error).sum()
        (total / num_tokens).backward()


# --- RLOO ---


def set_leave_one_out(rows: Rows, k: int, kl_coef: float, s: Any) -> None:
    """The reward less the mean of the others' (Ahmadian et al. 2024, equation 8)."""
    totals = [(row.score - kl_coef * row.kl).item() for row in rows]
    for i, row in enumerate(rows):
        first = i // k * k
        others = totals[first:i] + totals[i + 1 : first + k]
        row.advantages = totals[i] - mean_of(others)
        if all(total == totals[i] for total in others):
            row.advantages = 0.0
        else:
            assert abs(row.advantages) > EDGE, "a tie, nearly: take another seed"


def rloo_loss(row: Any, log_ratio: Tensor, every: Rows, s: Any, means: Numbers) -> Tensor:
    """What a row adds to the mean loss over the responses of a minibatch."""
    return clipped_loss(log_ratio.sum(), row.advantages, s, means) / len(every)


def rloo_step(policy: Any, parts: Parts, s: Any, means: Numbers) -> None:
    every = [row for rows in parts for row in rows]
    for row in every:
        now = read(policy, row, s.temperature)
        note(means, "policy/entropy", now.entropies)
        rloo_loss(row, now.logprobs - row.logprobs, every, s, means).backward()


# --- runs of PPO and RLOO ---


def make_judge(s: Any) -> Callable:
    """What scores a response to a query: a classifier, or a function of texts."""

    def by_model(query: Any, response: Tokens) -> float:
        reward = logit(model, query.ids + response).item()
        return model.config.reward_gain * reward + model.config.reward_bias

    def by_function(query: Any, response: Tokens) -> float:
        begin = len(first_token(s))
        prompt = s.tokenizer.decode(query.ids[begin:])
        answer = s.tokenizer.decode(response, skip_special_tokens=True)
        columns = {name: [x] for name, x in query.columns.items()}
        (reward,) = function(prompts=[prompt], completions=[answer], **columns)
        return float(reward)

    if s.reward_fn is not None:
        function = pkgutil.resolve_name(s.reward_fn)
        return by_function
    model = load(AutoModelForSequenceClassification, s.folder / s.reward_model)
    return by_model


@torch.no_grad()
def make_row(
    policy: Any, ref: Any, judge: Callable, query: Any, response: Tokens, s: Any
) -> SimpleNamespace:
    """One response to one query, with everything that is thought of it."""
    row = SimpleNamespace(query=query, response=response)
    length = length_of(row.response, s)
    row.found_end = s.end is None or length is not None
    row.truncated = row.response[:length]
    row.count = len(row.truncated if s.mask_truncated else row.response)

    ours = read(policy, row, s.temperature)
    theirs = read(ref, row, s.temperature)
    row.logprobs = ours.logprobs
    row.values = ours.values
    row.log_ratio = ours.logprobs - theirs.logprobs
    row.kl = row.log_ratio.sum()
    row.score = judge(query, row.truncated)
    if not row.found_end:
        if s.penalty_mode == "replace":
            row.score = 0.0
        row.score += s.penalty_reward_value
    return row


def make_rows(
    policy: Any,
    ref: Any,
    judge: Callable,
    queries: Rows,
    update: int,
    s: Any,
) -> Rows:
    """A response to each query, with the random numbers of an update."""
    numbers = uniforms(s.seed, update, len(queries), s.response_length)
    responses = sample(policy.lm, [query.context for query in queries], numbers, s)
    asked = zip(queries, responses, strict=True)
    return [make_row(policy, ref, judge, query, response, s) for query, response in asked]


def evaluate(policy: Any, ref: Any, judge: Callable, queries: Rows, s: Any) -> list[Settings]:
    found = []
    rows = make_rows(policy, ref, judge, queries, 0, s)
    for query, row in zip(queries, rows, strict=True):
        said = {"score": row.score, "kl": row.kl.item(), "found_end": row.found_end}
        said["query"] = s.tokenizer.decode(query.ids)
        said["response"] = s.tokenizer.decode(row.truncated)
        found.append(said)
    return found


def note_rollout(rows: Rows, kl_coef: float, means: Numbers) -> None:
    for row in rows:
        note(means, "objective/kl", row.kl)
        note(means, "objective/entropy", -row.logprobs.sum())
        note(means, "objective/scores", row.score)
        note(means, "objective/non_score_reward", -kl_coef * row.kl)
        note(means, "objective/score_total", row.score - kl_coef * row.kl)
        note(means, "objective/found_end", row.found_end)
        note(means, "objective/length", len(row.truncated))


def draw_steps(update: int, world: int, rows: Rows, k: int, s: Any) -> list[Parts]:
    """Of every optimizer step each rank's rows. Each epoch is a permutation of groups of k rows."""
    groups = [rows[i : i + k] for i in range(0, len(rows), k)]
    share = len(groups) // world
    steps = [[] for _ in range(s.num_epochs * s.num_minibatches)]
    for rank in range(world):
        generator = np.random.default_rng([s.seed, 4, rank, update])
        orders = [generator.permutation(share) for _ in range(s.num_epochs)]
        minibatches = np.concatenate(orders).reshape(len(steps), -1)
        for step, minibatch in zip(steps, minibatches, strict=True):
            mine = []
            for i in minibatch:
                mine += groups[rank * share + i]
            step.append(mine)
    return steps


def make_policies(s: Any, is_rloo: bool) -> tuple[Any, Any, Settings, Adam]:
    """Policy and reference with value heads, the models by their files, and the optimizer."""
    lm = load(AutoModelForCausalLM, s.folder / s.base_model)
    head = nn.Linear(lm.config.hidden_size, 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    policy = SimpleNamespace(lm=lm, head=head, critic=None)
    ref = copy.deepcopy(policy)
    if s.critic == "policy":
        policy.critic = copy.deepcopy(lm).base_model
    if s.critic == "reward":
        reward = load(AutoModelForSequenceClassification, s.folder / s.reward_model)
        policy.critic = reward.base_model
        head.weight.data.copy_(reward.config.reward_gain * reward.score.weight)
        head.bias.data.fill_(reward.config.reward_bias)

    others = {}
    if policy.critic is not None:
        others = {"critic/model": policy.critic, "modules/value_head": head}
    elif not is_rloo:
        others = {"modules/value_head": head}
    critic = []
    for model in others.values():
        critic += model.parameters()
    adam = Adam([*lm.parameters()], critic, s)
    return policy, ref, {"policy/model": lm} | others, adam


def adapt(kl_coef: float, kl: float, s: Any) -> float:
    """Ziegler et al. 2019, section 2.2."""
    if s.adaptive_kl_target is None:
        return kl_coef
    error = min(max(kl / s.adaptive_kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * s.batch_size / s.kl_horizon)


def reinforce(script: str, settings: Settings, folder: Path, world: int) -> SimpleNamespace:
    """A run of ppo_rlhf.py or rloo_rlhf.py: its metrics, samples, first and last weights."""
    s = read_settings(settings, folder)
    is_rloo = script == "rloo_rlhf.py"
    k = s.rloo_k if is_rloo else 1
    queries = read_queries(s)
    held_out = queries[: s.eval_queries]
    others = [query.context for query in held_out]
    queries = [query for query in queries if query.context not in others]
    held_out = [query for query in held_out for _ in range(k)]
    judge = make_judge(s)
    policy, ref, files, adam = make_policies(s, is_rloo)
    start = weights_of(files)
    before = evaluate(policy, ref, judge, held_out, s)

    kl_coef = s.kl_coef
    num_updates = math.ceil(s.total_episodes / s.batch_size)
    metrics = []
    for update in range(num_updates):
        means = defaultdict(list)
        left = 1 - update / num_updates
        lr = scheduled(s.lr, left, update, s)
        critic_lr = scheduled(s.critic_lr or s.lr, left, update, s)
        if update < s.critic_warmup:
            lr = 0.0

        episodes = range(update * s.batch_size, (update + 1) * s.batch_size)
        asked = [queries[episode // k % len(queries)] for episode in episodes]
        rows = make_rows(policy, ref, judge, asked, update + 1, s)
        note_rollout(rows, kl_coef, means)
        if is_rloo:
            set_leave_one_out(rows, k, kl_coef, s)

        for parts in draw_steps(update, world, rows, k, s):
            if is_rloo:
                rloo_step(policy, parts, s, means)
            else:
                ppo_step(policy, parts, kl_coef, s, means)
            norm = adam.step(lr, critic_lr)
            note(means, "gradient_norm", norm)

        row = {name: mean_of(numbers) for name, numbers in means.items()}
        row["objective/kl_coef"] = kl_coef
        row["episode"] = (update + 1) * s.batch_size
        row["lr"] = lr
        row.setdefault("loss/total", row["loss/policy"])
        if not is_rloo:
            row["loss/total"] += s.vf_coef * row["loss/value"]
            variance = row["returns/var"] + 1e-8
            row["val/var_explained"] = 1 - row["val/error"] / variance
        metrics.append(row)
        if update >= s.critic_warmup:
            kl_coef = adapt(kl_coef, row["objective/kl"], s)

    after = evaluate(policy, ref, judge, held_out, s)
    samples = []
    for old, new in zip(before, after, strict=True):
        renamed = {f"{name}_after": x for name, x in new.items() if name != "query"}
        samples.append(old | renamed)
    return SimpleNamespace(
        metrics=metrics, samples=samples, results={}, start=start, weights=weights_of(files)
    )


# --- the reward model ---


def read_preference(row: Settings, coin: int, s: Any) -> Any:
    """Query, responses and which is best (the coin says), or None if it is of no use."""
    query = tokens_of(row["prompt"], s)
    query = cut_query(query, s.query_length, None, None, s.long_queries or "drop")
    responses = []
    for name in ("chosen", "rejected"):
        response = tokens_of(row[name], s)
        length = length_of(response, s)
        if length is not None:
            response = response[:length]
        elif s.truncate_token == "eos" and response[-1:] != [s.end]:
            response = [*response, s.end]
        responses.append(response[: s.response_length])
    if not query or responses[0] == responses[1]:
        return None
    if coin == 1:  # the chosen one is the second
        responses.reverse()
    return query, responses, coin


def read_samples(row: Settings, s: Any) -> Any:
    """Query, responses and which is best, of tokens; None if all responses are the same."""
    names = sorted(name for name in row if name.startswith("sample"))
    query = tokens_of(row["query"], s)
    responses = [tokens_of(row[name], s) for name in names]
    if all(response == responses[0] for response in responses):
        return None
    return query, responses, row["best"]


def read_labels(rows: Rows, s: Any) -> Rows:
    """Query, responses, which is best, and the row, of every label that is of use."""
    bos = first_token(s)
    generator = np.random.default_rng([s.seed, 3])
    coins = generator.integers(0, 2, len(rows)).tolist()
    labels = []
    for row, coin in zip(rows, coins, strict=True):
        if "chosen" in row:
            label = read_preference(row, coin, s)
        else:
            label = read_samples(row, s)
        if label is not None:
            query, responses, best = label
            labels.append((bos + query, responses, best, row))
    return labels


def is_hit(rewards: list[float], best: int) -> bool:
    others = rewards[:best] + rewards[best + 1 :]
    margin = rewards[best] - max(others)
    assert abs(margin) > EDGE, "a tie, nearly: take another seed"
    return margin > 0


def label_loss(rewards: Tensor, best: int, row: Any, s: Any, means: Numbers) -> Tensor:
    """Minus the log-probability of the best response, by a softmax of the rewards."""
    loss = rewards.logsumexp(0) - rewards[best]
    note(means, "train/loss", loss)
    return loss


def train_reward(_: str, settings: Settings, folder: Path, world: int) -> SimpleNamespace:
    """A run of train_reward.py: its metrics, samples, results and weights."""
    s = read_settings(settings, folder)
    table = folder / s.label_dataset
    if table.is_dir():
        rows = read_lines(table / "train.jsonl")
        held_out = read_lines(table / "test.jsonl")
    else:
        rows = read_lines(table)
        held_out = rows[s.num_labels :]
    labels = read_labels(rows[: s.num_labels], s)
    held_out = read_labels(held_out[: s.eval_labels], s)
    queries = read_queries(s)
    ref = load(AutoModelForCausalLM, folder / s.base_model)
    model = load(AutoModelForSequenceClassification, folder / s.base_model, num_labels=1)
    torch.manual_seed(s.seed)
    if not model.config.architectures[0].endswith("ForSequenceClassification"):
        size = model.config.hidden_size
        drawn = torch.empty(1, size).normal_(0, 1 / math.sqrt(size + 1))
        model.score.weight.data.copy_(drawn)
    gain = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)

    def normalize(step: int) -> None:
        """Gives rewards of the reference policy's samples, if any, mean 0 and deviation 1."""
        count = s.normalization_samples
        if count == 0:
            return
        logits = []
        numbers = uniforms(s.seed, step, count, s.response_length)
        asked = [queries[(step * count + i) % len(queries)] for i in range(count)]
        responses = sample(ref, [query.context for query in asked], numbers, s)
        for query, response in zip(asked, responses, strict=True):
            if s.truncate_token == "eos":
                response = response[: length_of(response, s)]
            logits.append(logit(model, query.ids + response).item())
        mean = float(np.mean(logits))
        std = float(np.std(logits))
        gain.data.fill_(1 / std)
        bias.data.fill_(-mean / std)

    def rewards_of(query: Tokens, responses: list[Tokens]) -> Tensor:
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
        left = 1 - first / len(labels)
        lr = scheduled(s.lr, left, update, s)
        means = defaultdict(list)
        for i in order[first : first + s.batch_size]:
            query, responses, best, row = labels[i]
            rewards = rewards_of(query, responses)
            loss = label_loss(rewards, best, row, s, means)
            (loss / s.batch_size).backward()
            note(means, "train/accuracy", is_hit(rewards.tolist(), best))
        norm = adam.step(lr, 0.0)
        note(means, "train/gradient_norm", norm)
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
        row = {"query": s.tokenizer.decode(query), "best": best, "rewards": rewards}
        row["responses"] = [s.tokenizer.decode(response) for response in responses]
        samples.append(row)
    if held_out:
        results["test/accuracy"] = mean_of(hits)
    return SimpleNamespace(
        metrics=metrics, samples=samples, results=results, start=start, weights=weights_of(files)
    )
