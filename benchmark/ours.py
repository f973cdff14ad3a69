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
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
import rloo_rlhf

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


def load(auto_class: Any, folder: str, args: Any, device: torch.device, **kwargs: Any) -> Any:
    """A model as the scripts have it, for texts as long as `args` say."""
    args.base_model = folder
    longest = args.query_length + args.response_length
    return ppo_rlhf.load(auto_class, "base_model", args, common.tokenizer(), longest, device, **kwargs)


class TwoTrunks(nn.Module):
    """Policy and value function with a model each, the usual alternative to ppo_rlhf.ActorCritic."""

    def __init__(self, lm: Any, value_lm: Any) -> None:
        super().__init__()
        self.lm, self.value_lm = lm, value_lm
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, device=lm.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Logits (n, V) and values (n,) at n cells; no values at the last ones, as sampling needs none."""
        hidden = ppo_rlhf.hidden_at(self.lm, at, *inputs)
        logits = self.lm.get_output_embeddings()(hidden)
        if at is None:
            return logits, hidden.new_zeros(len(hidden))
        return logits, self.value_head(ppo_rlhf.hidden_at(self.value_lm, at, *inputs)).sum(-1)


class Frozen:
    """Reference and reward model, which contenders share."""

    def __init__(self, folder: str, args: Any, device: torch.device) -> None:
        self.ref = rloo_rlhf.Actor(load(AutoModelForCausalLM, folder, args, device).requires_grad_(False))
        torch.manual_seed(1)
        self.reward = load(AutoModelForSequenceClassification, folder, args, device, num_labels=1)
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
        lm = load(AutoModelForCausalLM, folder, self.args, device)
        if value_trunk:
            policy = TwoTrunks(lm, load(AutoModelForCausalLM, folder, self.args, device).base_model)
        else:
            policy = (self.script.ActorCritic if algorithm == "ppo" else self.script.Actor)(lm)
        self.accelerator = common.new_accelerator(self.steps, reset=False)
        optimizer = self.script.AdamTF(policy.parameters(), lr=self.args.lr, eps=self.args.adam_eps)
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
                scores = script.score(frozen.reward, asked, batch["truncated"], None, args).to(self.device)
            clock.seconds["score"] -= clock.seconds["sample"]
            scores = script.penalize(scores, batch["found"], args.penalty_reward_value, args.penalty_mode)
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
