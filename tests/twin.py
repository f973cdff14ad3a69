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
EDGE = 1e-6  # a number nearer than this to where a decision falls could be on its other side in fp32
PAD = 50259  # pads the rows of tokens in label files
# What settings that do not name an option mean:
OFF = {"kl_estimator": "k1", "score_norm": "none", "score_clip": None, "target_kl": None, "top_p": 1.0, "ema": 0.0}
OFF |= {"adam_betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": None, "lr_schedule": "linear", "lr_warmup": 0}
OFF |= {"ptx_coef": 0.0, "ptx_dataset": None, "unfrozen_layers": 0, "eval_every": 0, "whiten": "rank"}
OFF |= {"critic": "shared", "critic_lr": None, "critic_warmup": 0, "whiten_advantages": True}


def note(means: Numbers, where: str, **more: Any) -> None:
    """Note numbers, or all numbers of tensors, under where/name: a metric is the mean of all that is noted."""
    for name, x in more.items():
        means[f"{where}/{name}"] += torch.as_tensor(x, dtype=torch.float64).detach().flatten().tolist()


class Adam:
    """Kingma & Ba 2015: Algorithm 1 (`torch`), or as in the paragraph before section 2.1 (`tf`: epsilon hat); with the
    decay of matrices of Loshchilov & Hutter 2019, Algorithm 2."""

    def __init__(self, parameters: list[Tensor], critic: list[Tensor], s: Any) -> None:
        self.parameters, self.critic, self.s, self.t = parameters, critic, s, 0
        self.m, self.v = ([torch.zeros_like(p) for p in [*parameters, *critic]] for _ in range(2))

    @torch.no_grad()
    def step(self, lr: float, critic_lr: float = 0.0) -> float:
        """One step with the gradients that have gathered, whose norm is returned; they are set to zero."""
        s, parameters, self.t = self.s, [*self.parameters, *self.critic], self.t + 1
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients))
        clip = 1.0 if s.max_grad_norm is None else min(1.0, s.max_grad_norm / (norm + 1e-6))
        rates = [lr] * len(self.parameters) + [critic_lr] * len(self.critic)
        one, two = s.adam_betas
        for p, gradient, m, v, rate in zip(parameters, gradients, self.m, self.v, rates, strict=True):
            m.copy_(one * m + (1 - one) * clip * gradient)
            v.copy_(two * v + (1 - two) * (clip * gradient) ** 2)
            if s.adam == "tf":
                move = math.sqrt(1 - two**self.t) / (1 - one**self.t) * m / (v.sqrt() + s.adam_eps)
            else:
                move = (m / (1 - one**self.t)) / ((v / (1 - two**self.t)).sqrt() + s.adam_eps)
            p -= rate * (move + s.weight_decay * p if p.dim() > 1 else move)
            p.grad = None
        return norm


def scheduled(lr: float, left: float, update: int, s: Any) -> float:
    """A learning rate in the update (from 0) before which that part of the run is left: a rise, times the decay."""
    return lr * (left if s.lr_schedule == "linear" else 1) * min(1, (update + 1) / (s.lr_warmup + 1))


# --- models and data ---


def load(auto_class: Any, folder: Path, **kwargs: Any) -> Any:
    """A model in float64, without dropout; every token that it reads is a real one, the pad too."""
    model = auto_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **kwargs).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def train_upper(lm: Any, layers: int) -> None:
    """Only the upper layers, the norm behind them and a head that is not the embedding get gradients (0: all)."""
    trunk = lm.base_model
    head = [] if lm.lm_head.weight is lm.get_input_embeddings().weight else [lm.lm_head]
    blocks, norm = (trunk.h, trunk.ln_f) if hasattr(trunk, "h") else (trunk.layers, trunk.norm)
    for p in lm.parameters() if layers else ():
        p.requires_grad_(False)
    for part in (*blocks[len(blocks) - layers :], norm, *head):
        part.requires_grad_(True)


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


def tokens_of(value: Any, tokenizer: Any) -> list[int]:
    """Tokens of a text, or of a padded row of tokens."""
    if isinstance(value, str):
        return tokenizer(value, add_special_tokens=False).input_ids
    return [token for token in value if token != PAD]


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
    prefix, suffix = (tokens_of(text, tokenizer) for text in (s.query_prefix, s.query_suffix))
    queries = []
    for i in np.random.default_rng([s.seed, 2]).permutation(len(rows)):
        query = cut_query(tokens_of(rows[i][column], tokenizer), s.query_length, start, end, long)
        if query:
            queries.append(SimpleNamespace(ids=bos + query, context=bos + prefix + query + suffix))
    return queries


# --- what a model does with one row ---


def uniforms(seed: int, update: int, rows: int, length: int) -> list[list[float]]:
    """The numbers that the scripts sample with."""
    return np.random.default_rng([seed, 1, update]).random((rows, length), dtype=np.float32).tolist()


@torch.no_grad()
def sample(lm: Any, context: list[int], u: list[float], s: Any) -> list[int]:
    """A response: each token is where the cumulative distribution passes its number."""
    response = []
    for number in u:
        logits = lm(torch.tensor([context + response])).logits[0, -1]
        probs, mass = (logits / s.temperature).softmax(0), 0.0
        for i in probs.argsort(descending=True).tolist() if s.top_p < 1 else ():  # Holtzman et al. 2020, section 3.1
            assert abs(mass - s.top_p) > EDGE, "as many tokens or one more: take another seed"
            mass, probs[i] = mass + probs[i].item(), probs[i] * (mass < s.top_p)
        cdf = (probs / probs.sum()).cumsum(0)
        assert (cdf[:-1] - number).abs().min() > EDGE, "a number at the border of two tokens: take another seed"
        response.append(int((cdf[:-1] <= number).sum()))
    return response


def logit(model: Any, tokens: list[int]) -> Tensor:
    """The logit of a classifier, at the last token."""
    return model.score(model.base_model(torch.tensor([tokens])).last_hidden_state[0, -1])[0]


def read(policy: Any, row: Any, temperature: float) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, values of the tokens that count, each from the state before it; all log p."""
    ids, start = torch.tensor([row.query.context + row.response]), len(row.query.context) - 1
    out, before = policy.lm(ids, output_hidden_states=True), slice(start, start + row.count)
    states = policy.critic(ids).last_hidden_state if policy.critic else out.hidden_states[-1]
    distributions = (out.logits[0, before] / temperature).log_softmax(1)
    logprobs = torch.stack([d[token] for d, token in zip(distributions, row.response, strict=False)])
    entropies = -(distributions.exp() * distributions).sum(1)
    return logprobs, entropies, states[0, before] @ policy.head.weight[0] + policy.head.bias, distributions


def kl_penalty(log_ratio: Tensor, policy: Tensor, ref: Tensor, kind: str) -> Tensor:
    """What stands for the KL to the reference at every token: an estimate from the sampled one, or all of it."""
    kinds = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}
    kinds |= {"abs": log_ratio.abs(), "full": (policy.exp() * (policy - ref)).sum(1)}
    return kinds[kind]


@torch.no_grad()
def make_row(policy: Any, ref: Any, reward: Any, query: Any, u: list[float], end: int | None, s: Any) -> Any:
    """One response to one query, with everything that is thought of it."""
    row = SimpleNamespace(query=query, response=sample(policy.lm, query.context, u, s))
    ends = [i for i, token in enumerate(row.response) if token == end and i >= s.truncate_after]
    row.found = bool(ends) or end is None
    row.truncated = row.response[: ends[0] + 1] if ends else row.response
    row.count = len(row.truncated) if s.mask_truncated else len(row.response)
    row.logprobs, _, row.values, p = read(policy, row, s.temperature)
    ref_logprobs, _, _, q = read(ref, row, s.temperature)
    row.log_ratio = row.logprobs - ref_logprobs
    row.penalty = kl_penalty(row.log_ratio, p, q, s.kl_estimator)
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


def ptx_step(policy: Any, rows: list[Any], s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the tokens of a minibatch's texts (Ouyang et al. 2022, equation 2)."""
    texts = [row.text for row in rows if row.text]
    for text in texts:
        loss = -policy.lm(torch.tensor([text])).logits[0, :-1].log_softmax(1)[range(len(text) - 1), text[1:]]
        note(means, "ppo/loss", ptx=loss)
        (s.ptx_coef * loss.sum() / sum(len(text) - 1 for text in texts)).backward()


def ppo_step(policy: Any, parts: list[list[Any]], kl_coef: float, s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the tokens of a minibatch; `parts` has each rank's rows."""
    every = [row for rows in parts for row in rows]
    for rows in [every] if s.whiten == "global" else parts:
        rewards = [-kl_coef * row.penalty for row in rows]
        for row, reward in zip(rows, rewards, strict=True):
            reward[-1] += row.scaled
        if s.whiten_rewards:
            rewards = whiten(rewards, shift_mean=False)
        advantages = [gae(row.values, reward, s.gamma, s.lam) for row, reward in zip(rows, rewards, strict=True)]
        whitened = whiten(advantages, shift_mean=True) if s.whiten_advantages else advantages
        for row, x, advantage in zip(rows, advantages, whitened, strict=True):
            row.returns, row.advantage = x + row.values, advantage
    for rows in parts:
        for name, x in (("returns", [row.returns for row in rows]), ("val", [row.values for row in rows])):
            note(means, f"ppo/{name}", mean=torch.cat(x).mean(), var=torch.cat(x).var(correction=0))
    for row in every:
        logprobs, entropies, values, _ = read(policy, row, s.temperature)
        policy_loss = clipped_loss(logprobs - row.logprobs, row.advantage, s.cliprange, means)
        near = torch.maximum(torch.minimum(values, row.values + s.cliprange_value), row.values - s.cliprange_value)
        error, near_error = (values - row.returns) ** 2, (near - row.returns) ** 2
        value_loss = torch.maximum(error, near_error) / 2
        loss = policy_loss + s.vf_coef * value_loss
        note(means, "ppo/loss", value=value_loss, total=loss)
        note(means, "ppo/val", vpred=values, error=error, clipfrac=near_error > error)
        note(means, "ppo/policy", entropy=entropies)
        (loss.sum() / sum(row.count for row in every)).backward()


def rloo_step(policy: Any, parts: list[list[Any]], kl_coef: float, s: Any, means: Numbers) -> None:
    """The gradient of the mean loss over the responses of a minibatch."""
    for row in (rows := [row for part in parts for row in part]):
        logprobs, entropies, *_ = read(policy, row, s.temperature)
        log_ratio = logprobs - row.logprobs if s.token_level else (logprobs - row.logprobs).sum().view(1)
        note(means, "ppo/policy", entropy=entropies)
        (clipped_loss(log_ratio, row.advantage, s.cliprange, means).sum() / len(rows)).backward()


def make_policies(s: Any, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Policy and reference with their value heads, and which model each file of the run shall have."""
    lm, ref_lm = (load(AutoModelForCausalLM, folder / s.base_model) for _ in range(2))
    train_upper(lm, s.unfrozen_layers)
    head = torch.nn.Linear(lm.config.hidden_size, 1, dtype=torch.float64)
    head.weight.data.zero_(), head.bias.data.zero_()
    policy, ref = (SimpleNamespace(lm=x, head=head, critic=None) for x in (lm, ref_lm))
    where = "policy" if s.critic == "shared" else "critic"
    files = {"policy/model": lm} | ({} if hasattr(s, "rloo_k") else {f"{where}/value_head": head})
    if s.critic == "policy":
        policy.critic = load(AutoModelForCausalLM, folder / s.base_model).base_model
    if s.critic == "reward":
        reward = load(AutoModelForSequenceClassification, folder / s.reward_model)
        policy.critic = reward.base_model
        head.weight.data.copy_(reward.config.reward_gain * reward.score.weight)
        head.bias.data.fill_(reward.config.reward_bias)
    return policy, ref, files | ({"critic/model": policy.critic} if policy.critic else {})


def reinforce(script: str, settings: dict[str, Any], folder: Path, world: int) -> SimpleNamespace:
    """A run of ppo_rlhf.py or rloo_rlhf.py: its metrics, samples and weights (`start`: those at the start)."""
    s = SimpleNamespace(**OFF | settings)
    tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    end, k = one_token(tokenizer, s.truncate_token), s.rloo_k if script == "rloo_rlhf.py" else 1
    queries = read_queries(s, folder, tokenizer)
    texts = {"query_length": max(len(query.context) for query in queries) + s.response_length, "start_text": None}
    texts |= {"end_text": None, "long_queries": "keep_start", "query_dataset": s.ptx_dataset}
    texts = read_queries(SimpleNamespace(**vars(s) | texts), folder, tokenizer) if s.ptx_coef else []
    held_out, queries = queries[: s.eval_queries], queries[s.eval_queries :]
    reward = load(AutoModelForSequenceClassification, folder / s.reward_model)
    policy, ref, files = make_policies(s, folder)
    critic = [*policy.head.parameters(), *(policy.critic.parameters() if policy.critic else ())] if k == 1 else []
    adam = Adam([p for p in policy.lm.parameters() if p.requires_grad], critic, s)
    start, before = weights_of(files), evaluate(policy, ref, reward, held_out, tokenizer, end, s)
    average = {name: x for name, x in start.items() if name.startswith("policy/")} if s.ema else {}
    start |= {name.replace("/", "_ema/"): x for name, x in average.items()}
    kl_coef, metrics = s.kl_coef, []
    shuffles = [np.random.RandomState(s.seed + 100_003 * rank) for rank in range(world)]
    updates, share = math.ceil(s.total_episodes / s.batch_size), s.batch_size // world // k  # share: a rank's queries
    for update in range(updates):
        u = uniforms(s.seed, update + 1, s.batch_size, s.response_length)
        ranks, means = [], defaultdict(list)
        lr, critic_lr = (
            scheduled(x, 1 - update / updates, update, s)
            for x in (s.lr * (update >= s.critic_warmup), s.lr if s.critic_lr is None else s.critic_lr)
        )
        for rank in range(world):
            groups = []  # K responses to each query
            for i in range((update * world + rank) * share, (update * world + rank + 1) * share):
                query = queries[i % len(queries)]
                groups.append([make_row(policy, ref, reward, query, u.pop(0), end, s) for _ in range(k)])
                for j, row in enumerate(groups[-1]):
                    row.text = texts[i % len(texts)].ids if texts and j == 0 else []  # one for a query
            ranks.append(groups)
        scores = [row.penalized.item() for groups in ranks for group in groups for row in group]
        for group in (group for groups in ranks for group in groups):
            for row in group:
                row.scaled = row.penalized - (np.mean(scores) if s.score_norm == "whiten" else 0)
                row.scaled = row.scaled / (math.sqrt(np.var(scores) + 1e-8) if s.score_norm != "none" else 1)
                clip = math.inf if s.score_clip is None else s.score_clip
                note(means, "objective", score_clipfrac=row.scaled.abs() > clip)
                row.scaled = row.scaled.clamp(-clip, clip)
            totals = [row.scaled - kl_coef * row.penalty.sum() for row in group]
            for i, row in enumerate(group):
                others = totals[:i] + totals[i + 1 :]
                row.advantage = totals[i] - sum(others) / max(len(others), 1)  # RLOO's: Ahmadian et al. 2024, eq. 8
                assert abs(row.advantage) > EDGE, "a tie, which rounding decides: take another seed"
                k3 = ((-row.log_ratio).exp() - 1 + row.log_ratio).sum()
                note(means, "objective", kl=row.log_ratio.sum(), kl_k3=k3, kl_per_token=row.log_ratio)
                note(means, "objective", non_score_reward=-kl_coef * row.penalty.sum(), entropy=-row.logprobs.sum())
                note(means, "objective", scores=row.penalized, scores_scaled=row.scaled, score_total=totals[i])
                note(means, "objective", found_end=row.found, length=len(row.truncated))
        orders = [[shuffle.permutation(share) for _ in range(s.num_epochs)] for shuffle in shuffles]
        orders = [np.concatenate(epochs).reshape(s.num_epochs * s.num_minibatches, -1) for epochs in orders]
        for order in zip(*orders, strict=True):
            parts = [[row for i in mine for row in groups[i]] for mine, groups in zip(order, ranks, strict=True)]
            found = defaultdict(list)
            (ppo_step if k == 1 else rloo_step)(policy, parts, kl_coef, s, found)
            ptx_step(policy, [row for rows in parts for row in rows], s, found)
            note(found, "ppo/policy", gradient_norm=adam.step(lr, critic_lr))
            for name, x in found.items():
                means[name] += x
            if s.target_kl is not None and np.mean(found["ppo/policy/approxkl"]) > s.target_kl:
                break
        now = weights_of(files)
        average = {name: s.ema * x + (1 - s.ema) * now[name] for name, x in average.items()}
        mean = {name: sum(x) / len(x) for name, x in means.items()}
        mean["first_ratio_error"] = 0.0  # the policy has not moved
        mean["ppo/val/ratio_var"] -= mean["ppo/val/ratio"] ** 2
        if k == 1:
            mean["ppo/val/var_explained"] = 1 - mean["ppo/val/error"] / (mean["ppo/returns/var"] + 1e-8)
        if s.eval_every and (update + 1) % s.eval_every == 0:
            *_, found, kls = zip(*evaluate(policy, ref, reward, held_out, tokenizer, end, s), strict=True)
            mean |= {"eval/score": sum(found) / len(found), "eval/kl": sum(kls) / len(kls)}
        metrics.append({"ppo/episode": (update + 1) * s.batch_size, "ppo/lr": lr, "objective/kl_coef": kl_coef} | mean)
        if s.kl_target is not None:  # Ziegler et al. 2019, section 2.2
            error = min(max(mean["objective/kl"] / s.kl_target - 1, -0.2), 0.2)
            kl_coef *= 1 + error * s.batch_size / s.kl_horizon
    after = evaluate(policy, ref, reward, held_out, tokenizer, end, s)
    names = ("query", "response", "score", "kl", "response_after", "score_after", "kl_after")
    samples = [dict(zip(names, old + new[1:], strict=True)) for old, new in zip(before, after, strict=True)]
    weights = weights_of(files) | {name.replace("/", "_ema/"): x for name, x in average.items()}
    return SimpleNamespace(metrics=metrics, samples=samples, results={}, start=start, weights=weights)


# --- the reward model ---


def read_labels(rows: list[Any], s: Any, tokenizer: Any) -> list[tuple[list[int], list[list[int]], int]]:
    """Query, responses and which is best. Of text preferences a coin says which comes first."""
    bos, labels = first_token(tokenizer), []
    coins = np.random.default_rng([s.seed, 3]).integers(0, 2, len(rows)).tolist()
    for row, coin in zip(rows, coins, strict=True):
        is_text = "chosen" in row
        names = ("chosen", "rejected") if is_text else [f"sample{i}" for i in range(len(row) - 2)]
        query = tokens_of(row["prompt" if is_text else "query"], tokenizer)
        responses, best = [tokens_of(row[name], tokenizer) for name in names], row.get("best", coin)
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
    s = SimpleNamespace(**OFF | settings)
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
            logits.append(logit(model, query.ids + sample(ref, query.context, u, s)).item())
        mean, std = float(np.mean(logits)), float(np.std(logits))
        gain.data.fill_(1 / std)
        bias.data.fill_(-mean / std)
        return {"mean": mean, "std": std}

    def rewards(query: list[int], responses: list[list[int]]) -> Tensor:
        """The reward of each response."""
        return torch.stack([gain * logit(model, query + response) + bias for response in responses])

    files = {"reward_model/model": model}
    start, results, metrics = weights_of(files), {"before": normalize(0)}, []
    adam = Adam([*model.parameters(), gain, bias], [], s)
    order = np.random.RandomState(s.seed).permutation(len(labels))
    for first in range(0, len(labels) - s.batch_size + 1, s.batch_size):
        means, lr = defaultdict(list), scheduled(s.lr, 1 - first / len(labels), first // s.batch_size, s)
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
