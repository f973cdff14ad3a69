"""Runs of ppo_rlhf.py and rloo_rlhf.py, one response at a time: see reference.py."""

import math
import pkgutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from reference import (
    Adam,
    Numbers,
    load,
    logit,
    mean_of,
    note,
    one_token,
    read,
    read_queries,
    sample,
    scheduled,
    uniforms,
    weights_of,
)
from reference_ppo import ppo_step
from reference_rloo import rloo_step, set_leave_one_out
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

# Settings that rloo_rlhf.py does not have.
OFF = {"critic": "shared", "critic_lr": None, "critic_warmup": 0}


class Judge:
    """What scores responses: a classifier, or a function of texts."""

    def __init__(self, s: Any, folder: Path, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.model = None
        if s.reward_fn is None:
            self.model = load(AutoModelForSequenceClassification, folder / s.reward_model)
        else:
            self.function = pkgutil.resolve_name(s.reward_fn)

    def __call__(self, query: Any, response: list[int]) -> float:
        if self.model is not None:
            config = self.model.config
            reward = logit(self.model, query.ids + response).item()
            return config.reward_gain * reward + config.reward_bias
        prompt = self.tokenizer.decode(query.ids, skip_special_tokens=True)
        answer = self.tokenizer.decode(response, skip_special_tokens=True)
        columns = {name: [x] for name, x in query.columns.items()}
        (reward,) = self.function(prompts=[prompt], completions=[answer], **columns)
        return float(reward)


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

    ours = read(policy, row, s.temperature)
    theirs = read(ref, row, s.temperature)
    row.logprobs = ours.logprobs
    row.values = ours.values
    row.log_ratio = ours.logprobs - theirs.logprobs
    row.score = judge(query, row.truncated)
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
        texts = {"query": tokenizer.decode(query.ids), "response": tokenizer.decode(row.truncated)}
        kl = row.log_ratio.sum().item()
        found.append(texts | {"score": row.score, "kl": kl, "found_end": row.found_end})
    return found


def note_rollout(rows: list[Any], kl_coef: float, means: Numbers) -> None:
    for row in rows:
        note(means, "objective/kl", row.log_ratio.sum())
        note(means, "objective/entropy", -row.logprobs.sum())
        note(means, "objective/scores", row.score)
        note(means, "objective/non_score_reward", -kl_coef * row.log_ratio.sum())
        note(means, "objective/score_total", row.score - kl_coef * row.log_ratio.sum())
        note(means, "objective/found_end", row.found_end)
        note(means, "objective/length", len(row.truncated))


def draw_steps(update: int, world: int, rows: list[Any], k: int, s: Any) -> list[list[list[Any]]]:
    """Of every optimizer step each rank's rows: a fresh permutation in every epoch, of its groups
    of k rows."""
    num_groups = len(rows) // world // k
    steps = [[] for _ in range(s.num_epochs * s.num_minibatches)]
    for rank in range(world):
        generator = np.random.default_rng([s.seed, 4, rank, update])
        orders = [generator.permutation(num_groups) for _ in range(s.num_epochs)]
        minibatches = np.concatenate(orders).reshape(len(steps), -1)
        for step, minibatch in zip(steps, minibatches, strict=True):
            mine = []
            for i in minibatch:
                first = (rank * num_groups + i) * k
                mine += rows[first : first + k]
            step.append(mine)
    return steps


def make_policies(s: Any, folder: Path, is_rloo: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Policy and reference with their value heads, and which model each file of the run has."""
    lm, ref_lm = (load(AutoModelForCausalLM, folder / s.base_model) for _ in range(2))
    head = nn.Linear(lm.config.hidden_size, 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    policy, ref = (SimpleNamespace(lm=x, head=head, critic=None) for x in (lm, ref_lm))
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
    critic = [] if is_rloo else [*policy.head.parameters()]
    if policy.critic is not None:
        critic += policy.critic.parameters()
    return Adam([*policy.lm.parameters()], critic, s)


def adapt(kl_coef: float, kl: float, s: Any) -> float:
    """Ziegler et al. 2019, section 2.2."""
    if s.adaptive_kl_target is None:
        return kl_coef
    error = min(max(kl / s.adaptive_kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * s.batch_size / s.kl_horizon)


def reinforce(script: str, settings: dict[str, Any], folder: Path, world: int) -> SimpleNamespace:
    """A run of ppo_rlhf.py or rloo_rlhf.py: its metrics, samples, and weights
    (`start`: those at the start)."""
    s = SimpleNamespace(**OFF | settings)
    is_rloo = script == "rloo_rlhf.py"
    k = s.rloo_k if is_rloo else 1
    tokenizer = AutoTokenizer.from_pretrained(folder / s.base_model)
    end = one_token(tokenizer, s.truncate_token)
    queries = read_queries(s, folder / s.query_dataset, tokenizer)
    held_out = [query for query in queries[: s.eval_queries] for _ in range(k)]
    others = [query.context for query in queries[: s.eval_queries]]
    queries = [query for query in queries if query.context not in others]
    judge = Judge(s, folder, tokenizer)
    policy, ref, files = make_policies(s, folder, is_rloo)
    adam = make_optimizer(policy, is_rloo, s)
    start = weights_of(files)
    before = evaluate(policy, ref, judge, held_out, tokenizer, end, s)

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

        rows = []
        numbers = uniforms(s.seed, update + 1, s.batch_size, s.response_length)
        for i, u in enumerate(numbers):
            episode = update * s.batch_size + i
            query = queries[episode // k % len(queries)]
            rows.append(make_row(policy, ref, judge, query, u, end, s))
        note_rollout(rows, kl_coef, means)
        if is_rloo:
            set_leave_one_out(rows, k, kl_coef)

        for parts in draw_steps(update, world, rows, k, s):
            if is_rloo:
                rloo_step(policy, parts, s, means)
            else:
                ppo_step(policy, parts, kl_coef, s, means)
            note(means, "gradient_norm", adam.step(lr, critic_lr))

        row = {name: mean_of(numbers) for name, numbers in means.items()}
        row["objective/kl_coef"] = kl_coef
        row["episode"] = (update + 1) * s.batch_size
        row["lr"] = lr
        if not is_rloo:
            row["loss/total"] = row["loss/policy"] + s.vf_coef * row["loss/value"]
            variance = row["returns/var"] + 1e-8
            row["val/var_explained"] = 1 - row["val/error"] / variance
        metrics.append(row)
        kl_coef = adapt(kl_coef, row["objective/kl"], s)

    after = evaluate(policy, ref, judge, held_out, tokenizer, end, s)
    samples = []
    for old, new in zip(before, after, strict=True):
        renamed = {f"{name}_after": x for name, x in new.items() if name != "query"}
        samples.append(old | renamed)
    return SimpleNamespace(
        metrics=metrics, samples=samples, results={}, start=start, weights=weights_of(files)
    )
