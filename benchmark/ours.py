"""An update of ppo_rlhf.py or rloo_rlhf.py with their own functions, phase by phase, as in main."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
import rloo_rlhf
from benchmark import common
from plumbing import data as data_module
from plumbing import labels as labels_module
from plumbing import models as models_module
from plumbing.launch import set_up_torch
from plumbing.models import freeze
from ppo_rlhf import make_optimizer

SCRIPTS = {"ppo": ppo_rlhf, "rloo": rloo_rlhf}
END = 13  # a truncate token, `.` in GPT-2's vocabulary: the text is random anyway


class Clock:
    """Seconds per phase. A GPU is waited for, so that no phase is charged for another's kernels."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start


# --- what main does between the functions ---------------------------------------------------------
def responses_per_query(args: Any) -> int:
    """RLOO's K; 1 for PPO."""
    return getattr(args, "rloo_k", 1)


def load_queries(tokenizer: Any, args: Any, count: int) -> list[Any]:
    """Up to `count` of --query_dataset, in the order of args.seed."""
    _, queries = data_module.load_queries(args, tokenizer, 0, count)
    return queries


def loader(tokenizer: Any, longest: int, args: Any) -> Callable:
    """What main calls `load`, for texts of up to so many tokens."""
    return partial(models_module.load_model, tokenizer=tokenizer, longest=longest, args=args)


def load_score_fn(tokenizer: Any, longest: int, args: Any) -> Callable:
    """What main calls `score_fn`: of the reward function or else of the reward model."""
    if args.reward_fn:
        return labels_module.load_reward_fn(args.reward_fn, tokenizer)
    load = loader(tokenizer, longest, args)
    return rloo_rlhf.load_reward_model(load, args.reward_model, args)


def load(auto_class: type, folder: str, args: Any) -> Any:
    """A model as the scripts have it, for texts as long as `args` say."""
    args.base_model = folder
    longest = args.query_length + args.response_length
    load_model = loader(common.tokenizer(), longest, args)
    return load_model("base_model", folder, auto_class).to(PartialState().device)


def load_lm(folder: str, args: Any) -> Any:
    """A language model."""
    return load(AutoModelForCausalLM, folder, args)


def make_actor(script: Any, lm: Any, args: Any, critic: Any = None) -> Any:
    """The policy, or the reference, of a script."""
    if script is ppo_rlhf:
        return ppo_rlhf.ActorCritic(lm, critic)
    return rloo_rlhf.Actor(lm, args)


def query(context: list[int]) -> data_module.Query:
    """A query that policy and reward model read alike."""
    return data_module.Query(context, context, {"prompt": ""})


def make_batch(script: Any, contexts: list[list[int]], responses: Tensor) -> Any:
    """A script's Batch of responses (B, R), all of whose tokens count, before any forward pass."""
    mask = torch.ones_like(responses, dtype=torch.bool)
    zeros = torch.zeros(responses.shape)
    values = {"values": zeros.clone()} if hasattr(script.Batch, "values") else {}  # PPO's
    return script.Batch(
        contexts=contexts,
        responses=responses,
        lengths=mask.sum(1),
        found_end=mask.all(1),
        loss_mask=mask,
        num_tokens=mask.sum(1).tolist(),
        sampled_logprobs=zeros.clone(),
        logprobs=zeros.clone(),
        ref_logprobs=zeros.clone(),
        **values,
    )


def shuffle(args: Any, update: int) -> Tensor:
    """The rows of an update's minibatches, as on a single process."""
    rows = np.arange(args.batch_size).reshape(-1, responses_per_query(args))
    return ppo_rlhf.shuffle(rows, 0, update, args)


def rollout(
    policy: Any, ref: Any, queries: list[Any], u: Tensor, epochs: Tensor, end: int | None, args: Any
) -> Any:
    """Responses with their log-probabilities, as main has them; epochs are those of `shuffle`."""
    script = SCRIPTS["rloo" if hasattr(args, "rloo_k") else "ppo"]
    batch = script.rollout(policy, queries, u, end, args)
    script.set_logprobs(batch, policy, ref, epochs[0], args)
    return batch


def set_rewards(batch: Any, scores: Tensor, args: Any) -> Tensor:
    """Puts into the batch what the update needs of scores (B,): rewards, or RLOO's advantages.
    Returns the rewards (B, R)."""
    log_ratio = (batch.logprobs - batch.ref_logprobs) * batch.loss_mask
    rewards = ppo_rlhf.at_last_token(scores, batch.loss_mask) - args.kl_coef * log_ratio
    if isinstance(batch, ppo_rlhf.Batch):
        batch.rewards = rewards
    else:
        of_queries = rewards.sum(1).view(-1, args.rloo_k)
        batch.advantages = rloo_rlhf.rloo_advantages(of_queries).flatten()
    return rewards


def update_policy(
    accelerator: Any, policy: Any, optimizer: Any, batch: Any, epochs: Tensor, args: Any
) -> Any:
    """The optimizer steps of one update, by the function of the batch's script."""
    if isinstance(batch, ppo_rlhf.Batch):
        update = ppo_rlhf.ppo_update
    else:
        update = rloo_rlhf.rloo_update
    return update(accelerator, policy, optimizer, batch, epochs, args)


# --- a contender ----------------------------------------------------------------------------------
class Frozen:
    """Reference and reward model, which contenders share."""

    def __init__(self, folder: str, args: Any) -> None:
        self.lm = freeze(load_lm(folder, args), args.dtype)
        torch.manual_seed(1)
        reward = load(AutoModelForSequenceClassification, folder, args)
        self.reward = freeze(reward, args.dtype)
        self.head = ppo_rlhf.reward_head(self.reward)


class Ours:
    """A policy, its optimizer and an Accelerator; `update` does one update on given contexts."""

    def __init__(
        self, algorithm: str, folder: str, value_trunk: bool = False, **settings: Any
    ) -> None:
        self.script = SCRIPTS[algorithm]
        self.args = self.script.Args(adaptive_kl_target=None, **settings)
        self.k = responses_per_query(self.args)
        self.args.micro_batch_size = max(self.k, self.args.micro_batch_size // self.k * self.k)
        self.accelerator = common.new_accelerator(reset=False)
        lm = load_lm(folder, self.args)
        critic = load_lm(folder, self.args) if value_trunk else None
        policy = make_actor(self.script, lm, self.args, critic)
        optimizer = make_optimizer(policy, self.args)
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.actor = self.accelerator.unwrap_model(self.policy)
        self.num_updates = 0
        self.end = 0 if self.args.truncate_token == "eos" else END  # 0: the eos of every shape

    def update(self, contexts: list[list[int]], frozen: Frozen) -> Clock:
        """One update; contexts: one per query, so that there are batch_size / rloo_k of them."""
        script = self.script
        args = self.args
        ref = make_actor(script, frozen.lm, args)
        asked = [query(context) for context in contexts for _ in range(self.k)]
        set_up_torch(args.dtype)  # which others in this process may have changed
        clock = Clock()
        with clock("total"):
            epochs = shuffle(args, self.num_updates)
            self.num_updates += 1
            u = script.uniforms(1, self.num_updates, args.batch_size, args.response_length)
            with clock("score"), timed_sampling(script, clock):
                batch = rollout(self.actor, ref, asked, u, epochs, self.end, args)
                raw_scores = script.score_by_model(
                    frozen.reward,
                    frozen.head,
                    args.micro_batch_size,
                    asked,
                    script.truncated(batch),
                )
            scores = script.penalize_missing_end(raw_scores, batch.found_end, args)
            set_rewards(batch, scores, args)
            with clock("optimise"):
                means = update_policy(
                    self.accelerator, self.policy, self.optimizer, batch, epochs, args
                )
            self.metrics = means.reduce()
        clock.seconds["score"] -= clock.seconds["sample"]
        self.batch = batch
        self.scored = batch.lengths.sum().item()
        return clock


@contextlib.contextmanager
def timed_sampling(script: Any, clock: Clock) -> Iterator[None]:
    """The time that `rollout` spends in `sample` goes to a phase of its own."""
    sample = script.sample

    def timed(*args: Any) -> tuple[Tensor, Tensor]:
        with clock("sample"):
            return sample(*args)

    script.sample = timed
    try:
        yield
    finally:
        script.sample = sample
