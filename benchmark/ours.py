"""One update of ppo_rlhf.py or rloo_rlhf.py with their own functions, phase by phase, as their main does it."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
import torch
from torch import Tensor

import ppo_rlhf
import rloo_rlhf
from tf_adam import make_optimizer

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


def load(folder: str, args: Any, device: torch.device, **kwargs: Any) -> Any:
    """A model as the scripts have it, for texts as long as `args` say."""
    args.base_model = folder
    longest = args.query_length + args.response_length
    return ppo_rlhf.load("base_model", args, common.tokenizer(), longest, device, **kwargs)


class Frozen:
    """Reference and reward model, which contenders share."""

    def __init__(self, folder: str, args: Any, device: torch.device) -> None:
        self.ref = rloo_rlhf.Actor(load(folder, args, device).requires_grad_(False))
        torch.manual_seed(1)
        self.reward = load(folder, args, device, num_labels=1)
        self.reward.requires_grad_(False)


class Ours:
    """A policy, its optimizer and an Accelerator; `update` does one update on given contexts."""

    def __init__(
        self, algorithm: str, folder: str, device: torch.device, value_trunk: bool = False, **args: Any
    ) -> None:
        self.script = ppo_rlhf if algorithm == "ppo" else rloo_rlhf
        self.args = self.script.Args(kl_target=None, **args)
        self.copies = getattr(self.args, "rloo_k", 1)
        self.rows = self.args.batch_size // self.copies
        micro = max(1, self.args.micro_batch_size // self.copies)
        self.steps = math.ceil(self.rows / self.args.num_minibatches / micro)
        lm = load(folder, self.args, device)
        policy = rloo_rlhf.Actor(lm)
        if algorithm == "ppo":
            policy = ppo_rlhf.ActorCritic(lm, load(folder, self.args, device) if value_trunk else None)
        self.accelerator = common.new_accelerator(self.steps, reset=False)
        optimizer = make_optimizer(policy, self.args)
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.actor, self.device = self.accelerator.unwrap_model(self.policy), device
        self.shuffle, self.updates = np.random.RandomState(1), 0

    def update(self, contexts: list[list[int]], frozen: Frozen) -> Clock:
        """One update; contexts: one per query, so that there are batch_size / rloo_k of them."""
        script, args, clock = self.script, self.args, Clock()
        self.accelerator.gradient_accumulation_steps = self.steps  # accelerators of one process share this number
        script.fast_math(self.device, args.dtype)
        asked = [{"context": context, "input_ids": context} for context in contexts]
        with clock("total"):
            self.updates += 1
            u = script.uniforms(1, self.updates, args.batch_size, args.response_length).to(self.device)
            shuffles = [self.shuffle.permutation(self.rows) for _ in range(args.num_epochs)]
            epochs = torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)
            with clock("score"), timed_sampling(script, clock):
                batch = script.rollout(self.actor, frozen.ref, asked, u, epochs[0], END, args)
                scores = script.score(frozen.reward, asked, batch["truncated"], None, args).sum(1).to(self.device)
            clock.seconds["score"] -= clock.seconds["sample"]
            endless = args.penalty_reward_value + (args.penalty_mode == "add") * scores
            scores = torch.where(batch["found"], scores, endless)
            log_ratio = (batch["logprobs"] - batch["ref_logprobs"]) * batch["kept"]
            if script is ppo_rlhf:
                batch["rewards"] = script.token_rewards(scores, log_ratio, batch["kept"], args.kl_coef)
            else:
                batch["rewards"] = scores.view(self.rows, -1) - args.kl_coef * log_ratio.sum(2)
                batch["advantages"] = script.rloo_advantages(batch["rewards"])
            update = script.ppo_update if script is ppo_rlhf else script.rloo_update
            with clock("optimise"):
                records = update(self.accelerator, self.policy, self.optimizer, batch, epochs, args)
            self.metrics = script.reduce_means(self.accelerator, records)
        self.batch, self.scored = batch, sum(map(len, batch["truncated"]))
        return clock


@contextlib.contextmanager
def timed_sampling(script: Any, clock: Clock) -> Iterator[None]:
    """The time that `rollout` spends in `sample` goes to a phase of its own."""
    sample = script.sample

    def timed(*args: Any) -> Tensor:
        with clock("sample"):
            return sample(*args)

    script.sample = timed
    try:
        yield
    finally:
        script.sample = sample
