"""The three scripts once more, in the plainest PyTorch, so that whole runs can be compared: see
test_twin.py.

One row at a time, in float64: no padding, no cache, no masks (rows are as long as their tokens
count), no micro-batches; every rank in turn. Written from the papers and the original's
description, importing nothing from the scripts; transformers gives the models and the tokenizer.
"""

import json
import math
import pkgutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Numbers = dict[str, list[float]]
EDGE = 1e-6  # nearer than this to where a decision falls, fp32 could decide the other way
PAD = 50259  # pads the rows of tokens in label files
# What settings that do not name an option mean:
OFF = {
    "adam_betas": (0.9, 0.999),
    "critic": "shared",
    "critic_lr": None,
    "critic_warmup": 0,
    "ema": 0.0,
    "eval_every": 0,
    "kl_estimator": "k1",
    "lr_schedule": "linear",
    "lr_warmup": 0,
    "max_grad_norm": None,
    "normalize_advantages": False,
    "ptx_coef": 0.0,
    "ptx_dataset": None,
    "reward_fn": None,
    "score_clip": None,
    "score_norm": None,
    "target_kl": None,
    "top_p": 1.0,
    "unfrozen_layers": 0,
    "value_after_end": False,
    "weight_decay": 0.0,
    "whiten": "rank",
    "whiten_advantages": True,
}


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
        clip = 1.0
        if s.max_grad_norm is not None:
            clip = s.max_grad_norm / (norm + 1e-6)
            clip = min(1.0, clip)

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
    decay = left if s.lr_schedule == "linear" else 1.0
    return lr * rise * decay


# --- models ---


def load(auto_class: Any, folder: Path, **kwargs: Any) -> Any:
    """A model in float64, without dropout; every token that it reads is a real one, the pad too."""
    model = auto_class.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", **kwargs
    )
    for module in model.eval().modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def train_upper(lm: Any, layers: int) -> None:
    """Only the upper layers, the norm behind them and a head that is not the embedding get
    gradients (0: all)."""
    if layers == 0:
        return
    trunk = lm.base_model
    if hasattr(trunk, "h"):  # GPT-2
        trained = [*trunk.h[len(trunk.h) - layers :], trunk.ln_f]
    else:
        trained = [*trunk.layers[len(trunk.layers) - layers :], trunk.norm]
    if lm.lm_head.weight is not lm.get_input_embeddings().weight:
        trained.append(lm.lm_head)
    lm.requires_grad_(False)
    for part in trained:
        part.requires_grad_(True)


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
        if long == "drop":
            return []
        elif long == "keep_start":
            tokens = tokens[:length]
        else:
            tokens = tokens[len(tokens) - length :]
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
    names = ("text", "query", "prompt", "messages", "article", "content")
    column = [name for name in names if name in rows[0]][0]
    start = one_token(tokenizer, s.start_text)
    end = one_token(tokenizer, s.end_text)
    long = s.long_queries
    if long is None:
        long = "drop" if end is None else "keep_start"
    bos = first_token(tokenizer)
    prefix = tokens_of(s.query_prefix, tokenizer)
    suffix = tokens_of(s.query_suffix, tokenizer)
    queries = []
    for i in np.random.default_rng([s.seed, 2]).permutation(len(rows)):
        tokens = tokens_of(rows[i][column], tokenizer)
        cut = cut_query(tokens, s.query_length, start, end, long)
        if cut:
            query = SimpleNamespace(ids=bos + cut, columns=rows[i])
            query.context = bos + prefix + cut + suffix
            queries.append(query)
    return queries


def read_texts(s: Any, folder: Path, tokenizer: Any) -> list[list[int]]:
    """The pretraining texts, as far as they are read, in the order of the seed."""
    if s.ptx_dataset is None:
        return []
    whole = {"start_text": None, "end_text": None, "long_queries": "keep_start"}
    settings = SimpleNamespace(**vars(s) | whole)
    return [text.ids for text in read_queries(settings, folder / s.ptx_dataset, tokenizer)]


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
        if s.top_p < 1:
            probs = nucleus(probs, s.top_p)
        cdf = probs.cumsum(0)[:-1]
        assert (cdf - number).abs().min() > EDGE, "between two tokens: take another seed"
        response.append(int((cdf <= number).sum()))
    return response


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The fewest tokens that have this probability together (Holtzman et al. 2020, section 3.1)."""
    kept = torch.zeros_like(probs)
    mass = 0.0
    for token in probs.argsort(descending=True).tolist():
        assert abs(mass - top_p) > EDGE, "as many tokens or one more: take another seed"
        if mass < top_p:
            kept[token] = probs[token]
        mass += probs[token].item()
    return kept / kept.sum()


def logit(model: Any, tokens: list[int]) -> Tensor:
    """The logit of a classifier, at the last token."""
    states = model.base_model(torch.tensor([tokens])).last_hidden_state
    return model.score(states[0, -1])[0]


def read(policy: Any, row: Any, temperature: float) -> SimpleNamespace:
    """Of the tokens that count, each from the state before it: log-probability, entropy, value, and
    the log-probabilities of all tokens in its place."""
    ids = torch.tensor([row.query.context + row.response])
    first = len(row.query.context) - 1
    output = policy.lm(ids, output_hidden_states=True)
    states = output.hidden_states[-1]
    if policy.critic is not None:
        states = policy.critic(ids).last_hidden_state
    states = states[0, first : first + row.value_count]
    seen = SimpleNamespace(values=states @ policy.head.weight[0] + policy.head.bias)
    logits = output.logits[0, first : first + row.count]
    seen.distributions = (logits / temperature).log_softmax(1)
    seen.logprobs = seen.distributions[range(row.count), row.response[: row.count]]
    seen.entropies = -(seen.distributions.exp() * seen.distributions).sum(1)
    return seen


def kl_penalty(log_ratio: Tensor, policy: Tensor, ref: Tensor, kind: str) -> Tensor:
    """What stands for the KL to the reference at every token: an estimate from the sampled one, or
    all of it."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    if kind == "k3":
        return (-log_ratio).exp() - 1 + log_ratio
    if kind == "abs":
        return log_ratio.abs()
    return (policy.exp() * (policy - ref)).sum(1)


class Judge:
    """What scores responses: a classifier, or a function of texts."""

    def __init__(self, s: Any, folder: Path, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.model = None
        if s.reward_fn is None:
            self.model = load(AutoModelForSequenceClassification, folder / s.reward_model)
        else:
            self.function = pkgutil.resolve_name(s.reward_fn)

    def __call__(self, query: Any, response: list[int]) -> tuple[float, list[float]]:
        """The score of a response, and the part of it that each token has."""
        if self.model is not None:
            config = self.model.config
            reward = logit(self.model, query.ids + response).item()
            return config.reward_gain * reward + config.reward_bias, [0.0] * len(response)
        prompt = self.tokenizer.decode(query.ids, skip_special_tokens=True)
        answer = self.tokenizer.decode(response, skip_special_tokens=True)
        weight = query.columns["weight"]
        rewards = self.function([prompt], [answer], response_ids=[response], weight=[weight])
        (reward,) = rewards
        if isinstance(reward, float):
            return reward, [0.0] * len(response)
        parts = [float(x) for x in reward]
        return sum(parts), parts


@torch.no_grad()
def make_row(
    policy: Any, ref: Any, judge: Judge, query: Any, u: list[float], end: int | None, s: Any
) -> SimpleNamespace:
    """One response to one query, with everything that is thought of it."""
    row = SimpleNamespace(query=query, response=sample(policy.lm, query.context, u, s))
    length = len(row.response)
    ends = [i for i in range(s.truncate_after, length) if row.response[i] == end]
    row.found_end = end is None or ends != []
    if ends:
        length = ends[0] + 1
    row.truncated = row.response[:length]
    row.count = length if s.mask_truncated else len(row.response)
    row.value_count = row.count
    if s.value_after_end:
        row.value_count = min(row.count + 1, len(row.response))

    ours = read(policy, row, s.temperature)
    theirs = read(ref, row, s.temperature)
    row.logprobs = ours.logprobs
    row.values = ours.values
    row.log_ratio = ours.logprobs - theirs.logprobs
    row.kl = kl_penalty(row.log_ratio, ours.distributions, theirs.distributions, s.kl_estimator)
    row.score, row.token_scores = judge(query, row.truncated)
    if not row.found_end:
        if s.penalty_mode == "replace":
            row.score = 0.0
        row.score += s.penalty_reward_value
    return row


def evaluate(
    policy: Any, ref: Any, judge: Judge, queries: list[Any], tokenizer: Any, end: Any, s: Any
) -> list[dict[str, Any]]:
    """What is said of each of the evaluation queries."""
    found = []
    numbers = uniforms(s.seed, 0, len(queries), s.response_length)
    for query, u in zip(queries, numbers, strict=True):
        row = make_row(policy, ref, judge, query, u, end, s)
        found.append(
            {
                "query": tokenizer.decode(query.ids),
                "response": tokenizer.decode(row.truncated),
                "score": row.score,
                "kl": row.log_ratio.sum().item(),
                "found_end": row.found_end,
                "length": len(row.truncated),
            }
        )
    return found


# --- PPO and RLOO ---


def set_scores(rows: list[Any], s: Any) -> None:
    """`scaled`, the score that is paid for: after normalisation over all rows, and a clip."""
    scores = [row.score for row in rows]
    for row in rows:
        row.scaled = row.score
        if s.score_norm == "whiten":
            row.scaled -= np.mean(scores)
        if s.score_norm is not None:
            row.scaled /= math.sqrt(np.var(scores) + 1e-8)
        if s.score_clip is not None:
            row.scaled = min(max(row.scaled, -s.score_clip), s.score_clip)


def note_rollout(rows: list[Any], kl_coef: float, means: Numbers) -> None:
    """The metrics of responses."""
    for row in rows:
        note(means, "objective/kl", row.log_ratio.sum())
        note(means, "objective/entropy", -row.logprobs.sum())
        note(means, "objective/scores", row.score)
        note(means, "objective/scores_scaled", row.scaled)
        note(means, "objective/non_score_reward", -kl_coef * row.kl.sum())
        note(means, "objective/score_total", row.scaled - kl_coef * row.kl.sum())
        note(means, "objective/found_end", row.found_end)
        note(means, "objective/length", len(row.truncated))


def draw_steps(shuffles: list[Any], rows: list[Any], k: int, s: Any) -> list[list[list[Any]]]:
    """Of every optimizer step each rank's rows: a fresh permutation in every epoch, of its groups
    of k rows."""
    num_groups = len(rows) // len(shuffles) // k
    steps = [[] for _ in range(s.num_epochs * s.num_minibatches)]
    for rank, shuffle in enumerate(shuffles):
        orders = [shuffle.permutation(num_groups) for _ in range(s.num_epochs)]
        minibatches = np.concatenate(orders).reshape(len(steps), -1)
        for step, minibatch in zip(steps, minibatches, strict=True):
            mine = []
            for i in minibatch:
                first = (rank * num_groups + i) * k
                mine += rows[first : first + k]
            step.append(mine)
    return steps


def whiten(rows: list[Tensor], shift_mean: bool, correction: int) -> list[Tensor]:
    """Rows of numbers, scaled so that all of them together have variance 1 and, with shift_mean,
    mean 0."""
    every = torch.cat(rows)
    mean = every.mean()
    deviation = (every.var(correction=correction) + 1e-8).sqrt()
    whitened = [(x - mean) / deviation for x in rows]
    return whitened if shift_mean else [x + mean for x in whitened]


def gae(values: Tensor, rewards: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of one response (Schulman et al. 2016, equation 16)."""
    next_values = [*values[1:], 0.0]
    deltas = []
    for reward, value, next_value in zip(rewards, values, next_values, strict=True):
        deltas.append(reward + gamma * next_value - value)
    advantages = []
    for t in range(len(deltas)):
        later = range(t, len(deltas))
        advantages.append(sum((gamma * lam) ** (i - t) * deltas[i] for i in later))
    return torch.stack(advantages)


def token_rewards(row: Any, kl_coef: float) -> Tensor:
    """Of each token that is valued: what it has of the score, less the KL; the last one has the
    rest of the score."""
    rewards = torch.zeros(row.value_count, dtype=torch.float64)
    rewards[: row.count] = -kl_coef * row.kl
    for t, score in enumerate(row.token_scores):
        rewards[t] += score
    rewards[-1] += row.scaled - sum(row.token_scores)
    return rewards


def set_advantages(rows: list[Any], kl_coef: float, s: Any) -> None:
    """Advantages and returns of PPO; these rows are whitened together."""
    correction = 1 if s.whiten == "batch" else 0
    rewards = [token_rewards(row, kl_coef) for row in rows]
    if s.whiten_rewards:
        rewards = whiten(rewards, False, correction)
    for row, x in zip(rows, rewards, strict=True):
        advantages = gae(row.values, x, s.gamma, s.lam)
        row.returns = advantages + row.values
        row.advantages = advantages[: row.count]
    if s.whiten_advantages:
        whitened = whiten([row.advantages for row in rows], True, correction)
        for row, x in zip(rows, whitened, strict=True):
            row.advantages = x


def set_leave_one_out(rows: list[Any], k: int, kl_coef: float, s: Any) -> None:
    """Advantages of RLOO: the reward less the mean of the others' (Ahmadian et al. 2024, equation
    8)."""
    totals = [(row.scaled - kl_coef * row.kl.sum()).item() for row in rows]
    for i, row in enumerate(rows):
        first = i // k * k
        others = totals[first:i] + totals[i + 1 : first + k]
        row.advantages = totals[i] - mean_of(others)
        if all(total == totals[i] for total in others):
            row.advantages = 0.0
        else:
            assert abs(row.advantages) > EDGE, "a tie, nearly: take another seed"
    if s.normalize_advantages:
        every = [row.advantages for row in rows]
        for row in rows:
            row.advantages -= np.mean(every)
            row.advantages /= np.std(every, ddof=1) + 1e-4


def clipped_loss(
    log_ratio: Tensor, advantages: Any, cliprange: float, means: Numbers, where: str
) -> Tensor:
    """Minus the objective of Schulman et al. 2017, equation 7, of every ratio."""
    ratio = log_ratio.exp()
    near = ratio.clamp(1 - cliprange, 1 + cliprange)
    loss = -advantages * ratio
    near_loss = -advantages * near
    note(means, "ppo/loss/policy", torch.maximum(loss, near_loss))
    note(means, "ppo/val/ratio", ratio)
    note(means, f"{where}/approxkl", log_ratio**2 / 2)
    note(means, f"{where}/clipfrac", near_loss > loss)
    return torch.maximum(loss, near_loss)


def value_loss(values: Tensor, row: Any, cliprange: float, means: Numbers) -> Tensor:
    """Half the squared error of every value, or of what is left of it after a clip around the old
    one, whichever is larger."""
    lowest = row.values - cliprange
    highest = row.values + cliprange
    near = torch.minimum(torch.maximum(values, lowest), highest)
    error = (values - row.returns) ** 2
    near_error = (near - row.returns) ** 2
    loss = torch.maximum(error, near_error) / 2
    note(means, "ppo/loss/value", loss)
    note(means, "ppo/val/vpred", values)
    note(means, "ppo/val/error", error)
    note(means, "ppo/val/clipfrac", near_error > error)
    return loss


def ppo_step(policy: Any, parts: list[list[Any]], kl_coef: float, s: Any, means: Numbers) -> None:
    """The gradient of the mean losses over the tokens of a minibatch; `parts` has each rank's
    rows."""
    every = [row for rows in parts for row in rows]
    if s.whiten == "global":
        set_advantages(every, kl_coef, s)
    if s.whiten == "rank":
        for rows in parts:
            set_advantages(rows, kl_coef, s)
    for rows in parts:
        returns = torch.cat([row.returns for row in rows])
        values = torch.cat([row.values for row in rows])
        note(means, "ppo/returns/mean", returns.mean())
        note(means, "ppo/returns/var", returns.var(correction=0))
        note(means, "ppo/val/mean", values.mean())
        note(means, "ppo/val/var", values.var(correction=0))
    num_tokens = sum(row.count for row in every)
    num_values = sum(row.value_count for row in every)
    for row in every:
        now = read(policy, row, s.temperature)
        log_ratio = now.logprobs - row.logprobs
        loss = clipped_loss(log_ratio, row.advantages, s.cliprange, means, "ppo/policy")
        error = value_loss(now.values, row, s.cliprange_value, means)
        note(means, "ppo/policy/entropy", now.entropies)
        (loss.sum() / num_tokens + s.vf_coef * error.sum() / num_values).backward()


def rloo_step(policy: Any, parts: list[list[Any]], s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the responses of a minibatch."""
    every = [row for rows in parts for row in rows]
    for row in every:
        now = read(policy, row, s.temperature)
        log_ratio = now.logprobs - row.logprobs
        if not s.token_level:
            log_ratio = log_ratio.sum()
        loss = clipped_loss(log_ratio, row.advantages, s.cliprange, means, "rloo")
        note(means, "ppo/policy/entropy", now.entropies)
        (loss.sum() / len(every)).backward()


def ptx_step(policy: Any, parts: list[list[Any]], s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the tokens of a minibatch's texts (Ouyang et al. 2022,
    equation 2)."""
    if s.ptx_coef == 0:
        return
    texts = [row.text for rows in parts for row in rows]
    num_tokens = sum(len(text) - 1 for text in texts)
    note(means, "ppo/loss/ptx", [])
    for text in texts:
        if len(text) > 1:  # nothing comes before the first token
            logits = policy.lm(torch.tensor([text])).logits[0, :-1]
            loss = -logits.log_softmax(1)[range(len(text) - 1), text[1:]]
            note(means, "ppo/loss/ptx", loss)
            (s.ptx_coef * loss.sum() / num_tokens).backward()


def make_policies(s: Any, folder: Path, is_rloo: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Policy and reference with their value heads, and which model each file of the run has."""
    lm = load(AutoModelForCausalLM, folder / s.base_model)
    ref_lm = load(AutoModelForCausalLM, folder / s.base_model)
    train_upper(lm, s.unfrozen_layers)
    head = nn.Linear(lm.config.hidden_size, 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    policy = SimpleNamespace(lm=lm, head=head, critic=None)
    ref = SimpleNamespace(lm=ref_lm, head=head, critic=None)
    if s.critic == "policy":
        policy.critic = load(AutoModelForCausalLM, folder / s.base_model).base_model
    if s.critic == "reward":
        reward = load(AutoModelForSequenceClassification, folder / s.reward_model)
        policy.critic = reward.base_model
        head.weight.data.copy_(reward.config.reward_gain * reward.score.weight)
        head.bias.data.fill_(reward.config.reward_bias)

    files = {"policy/model": lm}
    if policy.critic is not None:
        files["critic/model"] = policy.critic
        files["critic/value_head"] = head
    elif not is_rloo:
        files["policy/value_head"] = head
    return policy, ref, files


def make_optimizer(policy: Any, is_rloo: bool, s: Any) -> Adam:
    """Adam over what is trained."""
    trained = [p for p in policy.lm.parameters() if p.requires_grad]
    critic = []
    if not is_rloo:
        critic += policy.head.parameters()
    if policy.critic is not None:
        critic += policy.critic.parameters()
    return Adam(trained, critic, s)


def ema_files(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, under the names of the averages' files."""
    return {f"ema/{name}": x for name, x in weights.items()}


def adapt(kl_coef: float, kl: float, s: Any) -> float:
    """Ziegler et al. 2019, section 2.2."""
    if s.kl_target is None:
        return kl_coef
    error = min(max(kl / s.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * s.batch_size / s.kl_horizon)


def reinforce(script: str, settings: dict[str, Any], folder: Path, world: int) -> SimpleNamespace:
    """A run of ppo_rlhf.py or rloo_rlhf.py: its metrics, samples and weights (`start`: those at the
    start)."""
    s = SimpleNamespace(**OFF | settings)
    is_rloo = script == "rloo_rlhf.py"
    k = s.rloo_k if is_rloo else 1
    tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    end = one_token(tokenizer, s.truncate_token)
    queries = read_queries(s, folder / s.query_dataset, tokenizer)
    held_out = [query for query in queries[: s.eval_queries] for _ in range(k)]
    queries = queries[s.eval_queries :]
    texts = read_texts(s, folder, tokenizer)
    judge = Judge(s, folder, tokenizer)
    policy, ref, files = make_policies(s, folder, is_rloo)
    adam = make_optimizer(policy, is_rloo, s)
    start = weights_of(files)
    average = start
    before = evaluate(policy, ref, judge, held_out, tokenizer, end, s)

    kl_coef = s.kl_coef
    shuffles = [np.random.RandomState(s.seed + 100_003 * rank) for rank in range(world)]
    num_updates = math.ceil(s.total_episodes / s.batch_size)
    metrics = []
    for update in range(num_updates):
        means = defaultdict(list)
        left = 1 - update / num_updates
        lr = scheduled(s.lr, left, update, s)
        critic_lr = lr
        if s.critic_lr is not None:
            critic_lr = scheduled(s.critic_lr, left, update, s)
        if update < s.critic_warmup:
            lr = 0.0

        rows = []
        numbers = uniforms(s.seed, update + 1, s.batch_size, s.response_length)
        for i, u in enumerate(numbers):
            episode = update * s.batch_size + i
            query = queries[episode // k % len(queries)]
            row = make_row(policy, ref, judge, query, u, end, s)
            if texts:
                row.text = texts[episode % len(texts)]
            rows.append(row)
        set_scores(rows, s)
        note_rollout(rows, kl_coef, means)
        if is_rloo:
            set_leave_one_out(rows, k, kl_coef, s)
        elif s.whiten == "batch":
            share = len(rows) // world
            for rank in range(world):
                set_advantages(rows[rank * share : (rank + 1) * share], kl_coef, s)

        for parts in draw_steps(shuffles, rows, k, s):
            found = defaultdict(list)
            if is_rloo:
                rloo_step(policy, parts, s, found)
            else:
                ppo_step(policy, parts, kl_coef, s, found)
            ptx_step(policy, parts, s, found)
            note(found, "ppo/policy/gradient_norm", adam.step(lr, critic_lr))
            for name, numbers in found.items():
                means[name] += numbers
            approxkl = mean_of(found["rloo/approxkl" if is_rloo else "ppo/policy/approxkl"])
            if s.target_kl is not None and approxkl > s.target_kl:
                break
        for name, x in weights_of(files).items():
            average = average | {name: s.ema * average[name] + (1 - s.ema) * x}

        row = {name: mean_of(numbers) for name, numbers in means.items()}
        row["first_ratio_error"] = 0.0  # the policy has not moved
        row["objective/kl_coef"] = kl_coef
        row["ppo/episode"] = (update + 1) * s.batch_size
        row["ppo/lr"] = lr
        if not is_rloo:
            row["ppo/loss/total"] = row["ppo/loss/policy"] + s.vf_coef * row["ppo/loss/value"]
            variance = row["ppo/returns/var"] + 1e-8
            bias = row["ppo/val/vpred"] - row["ppo/returns/mean"]
            row["ppo/val/var_explained"] = 1 - row["ppo/val/error"] / variance
            centred = row["ppo/val/error"] - bias**2
            row["ppo/val/var_explained_centred"] = 1 - centred / variance
        if s.eval_every and (update + 1) % s.eval_every == 0:
            now = evaluate(policy, ref, judge, held_out, tokenizer, end, s)
            for name in ("score", "kl", "found_end", "length"):
                row[f"eval/{name}"] = float(np.mean([sample[name] for sample in now]))
        metrics.append(row)
        kl_coef = adapt(kl_coef, row["objective/kl"], s)

    after = evaluate(policy, ref, judge, held_out, tokenizer, end, s)
    samples = []
    for old, new in zip(before, after, strict=True):
        renamed = {f"{name}_after": x for name, x in new.items() if name != "query"}
        samples.append(old | renamed)
    weights = weights_of(files)
    if s.ema > 0:
        start = start | ema_files(start)
        weights = weights | ema_files(average)
    return SimpleNamespace(
        metrics=metrics, samples=samples, results={}, start=start, weights=weights
    )


# --- the reward model ---


def read_preference(row: dict[str, Any], coin: int, s: Any, tokenizer: Any) -> Any:
    """Query, responses and which is best, of texts; None if it is of no use. A coin says which of
    the two comes first."""
    query = tokens_of(row["prompt"], tokenizer)
    query = cut_query(query, s.query_length, None, None, s.long_queries or "drop")
    responses = []
    for name in ("chosen", "rejected"):
        response = tokens_of(row[name], tokenizer)
        if s.truncate_token == "eos":
            end = tokenizer.eos_token_id
            if end in response:
                response = response[: response.index(end)]
            response = [*response, end]
        responses.append(response[: s.response_length])
    if not query or responses[0] == responses[1]:
        return None
    if coin == 1:  # the chosen one is the second
        responses.reverse()
    return query, responses, coin


def read_samples(row: dict[str, Any], tokenizer: Any) -> Any:
    """Query, responses and which is best, of tokens; None if all responses are the same."""
    num_samples = len(row) - 2
    query = tokens_of(row["query"], tokenizer)
    responses = [tokens_of(row[f"sample{i}"], tokenizer) for i in range(num_samples)]
    if all(response == responses[0] for response in responses):
        return None
    return query, responses, row["best"]


def read_labels(rows: list[Any], s: Any, tokenizer: Any) -> list[Any]:
    """Query, responses and which is best, of every label that is of use."""
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
            labels.append((bos + query, responses, best))
    return labels


def hit(rewards: list[float], best: int) -> float:
    """1 if no response has a higher reward than the best one, or its part if some have the same."""
    highest = [i for i, reward in enumerate(rewards) if max(rewards) - reward < 1e-5]
    return (best in highest) / len(highest)


def train_reward(
    script: str, settings: dict[str, Any], folder: Path, world: int
) -> SimpleNamespace:
    """A run of train_reward.py: its metrics, samples, results and weights."""
    s = SimpleNamespace(**OFF | settings)
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
    nn.init.zeros_(model.score.weight)
    model.score.weight.data += torch.empty(1, size).normal_(0, 1 / math.sqrt(size + 1))
    gain = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)

    def normalize(step: int) -> dict[str, float]:
        """Sets gain and bias so that the rewards of the reference policy's samples have mean 0 and
        deviation 1."""
        count = s.normalization_samples
        logits = []
        for i, u in enumerate(uniforms(s.seed, step, count, s.response_length)):
            query = queries[(step * count + i) % len(queries)]
            response = sample(ref, query.context, u, s)
            logits.append(logit(model, query.ids + response).item())
        mean = float(np.mean(logits))
        std = float(np.std(logits))
        gain.data.fill_(1 / std)
        bias.data.fill_(-mean / std)
        return {"mean": mean, "std": std}

    def rewards_of(query: list[int], responses: list[list[int]]) -> Tensor:
        """The reward of each response."""
        logits = [logit(model, query + response) for response in responses]
        return gain * torch.stack(logits) + bias

    files = {"reward_model/model": model}
    start = weights_of(files)
    results = {"before": normalize(0)}
    adam = Adam([*model.parameters(), gain, bias], [], s)
    order = np.random.RandomState(s.seed).permutation(len(labels))
    metrics = []
    for update in range(len(labels) // s.batch_size):
        first = update * s.batch_size
        lr = scheduled(s.lr, 1 - first / len(labels), update, s)
        means = defaultdict(list)
        for i in order[first : first + s.batch_size]:
            query, responses, best = labels[i]
            rewards = rewards_of(query, responses)
            loss = rewards.logsumexp(0) - rewards[best]
            (loss / s.batch_size).backward()
            note(means, "train/loss", loss)
            note(means, "train/accuracy", hit(rewards.tolist(), best))
        note(means, "train/gradient_norm", adam.step(lr, 0.0))
        row = {name: mean_of(numbers) for name, numbers in means.items()}
        row["train/labels"] = first + s.batch_size
        row["train/lr"] = lr
        metrics.append(row)
    results["after"] = normalize(1)
    results["gain"] = gain.item()
    results["bias"] = bias.item()

    samples = []
    hits = []
    for query, responses, best in held_out:
        with torch.no_grad():
            rewards = rewards_of(query, responses).tolist()
        hits.append(hit(rewards, best))
        row = {"query": tokenizer.decode(query), "best": best, "rewards": rewards}
        row["responses"] = [tokenizer.decode(response) for response in responses]
        samples.append(row)
    answers = [best for _, _, best in held_out]
    results["test/accuracy"] = mean_of(hits)
    results["test/constant"] = max(answers.count(best) for best in answers) / len(answers)
    return SimpleNamespace(
        metrics=metrics, samples=samples, results=results, start=start, weights=weights_of(files)
    )
