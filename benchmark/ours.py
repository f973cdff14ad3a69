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


class TwoTrunks(nn.Module):
    """Policy and value function with a model each, the usual alternative to ppo_rlhf.ActorCritic."""

    def __init__(self, lm: Any, value_lm: Any) -> None:
        super().__init__()
        self.lm, self.value_lm = lm, value_lm
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Logits (n, V) and values (n,) at n cells; no values at the last ones, as sampling needs none."""
        logits, hidden = ppo_rlhf.logits_at(self.lm, at, *inputs)
        if at is None:
            return logits, hidden.new_zeros(len(logits))
        hidden = ppo_rlhf.last_hidden(self.value_lm, *inputs).flatten(0, 1).index_select(0, at)
        with torch.autocast(hidden.device.type, enabled=False):
            return logits, self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1).float()


class Frozen:
    """Reference and reward model, which contenders share. Without a tokenizer, the reward model reads tokens."""

    def __init__(self, folder: str, args: Any, device: torch.device) -> None:
        lm = ppo_rlhf.load(AutoModelForCausalLM, folder, "--model", args)
        self.ref = rloo_rlhf.Actor(ppo_rlhf.freeze(lm, args.dtype)).to(device)
        torch.manual_seed(1)
        classifier = ppo_rlhf.load(AutoModelForSequenceClassification, folder, "--model", args, num_labels=1)
        # each script's `score` asks for a RewardModel of its own
        model = ppo_rlhf.freeze(classifier, args.dtype)
        self.rewards = {script: script.RewardModel(model).to(device) for script in (ppo_rlhf, rloo_rlhf)}


class Ours:
    """A policy, its optimizer and an Accelerator; `update` does one update on given contexts."""

    def __init__(
        self, algorithm: str, folder: str, device: torch.device, value_trunk: bool = False, **args: Any
    ) -> None:
        self.script = ppo_rlhf if algorithm == "ppo" else rloo_rlhf
        self.args = self.script.Args(kl_target=None, **args)
        self.copies = getattr(self.args, "rloo_k", 1)
        self.rows = self.args.batch_size // self.copies
        self.micro = math.ceil(self.args.micro_batch_size / self.copies)
        self.steps = math.ceil(self.rows / self.args.num_minibatches / self.micro)
        lm = self.script.load(AutoModelForCausalLM, folder, "--model", self.args)
        if value_trunk:
            policy = TwoTrunks(lm, self.script.load(AutoModelForCausalLM, folder, "--model", self.args).base_model)
        else:
            policy = (self.script.ActorCritic if algorithm == "ppo" else self.script.Actor)(lm)
        policy = policy.to(device)
        self.accelerator = common.new_accelerator(self.args.dtype, self.steps, reset=False)
        optimizer = self.script.AdamTF(policy.parameters(), lr=self.args.lr, eps=self.args.adam_eps)
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.actor, self.device = self.accelerator.unwrap_model(self.policy), device
        self.shuffle, self.updates = np.random.RandomState(1), 0

    def update(self, contexts: list[list[int]], frozen: Frozen) -> Clock:
        """One update; contexts: one per query, so that there are batch_size / rloo_k of them."""
        script, args, clock = self.script, self.args, Clock()
        self.accelerator.gradient_accumulation_steps = self.steps  # accelerators of one process share this number
        script.fast_math(self.device, args.dtype)
        with clock("total"):
            self.updates += 1
            u = script.uniforms(1, self.updates, args.batch_size, args.response_length, self.device)
            shuffles = [self.shuffle.permutation(self.rows) for _ in range(args.num_epochs)]
            epochs = torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)
            with clock("sample"), torch.no_grad(), self.accelerator.autocast():
                batch = script.respond(self.actor, contexts, u, END, args)
            with clock("score"):
                scores = self.look(batch, contexts, epochs, frozen)
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

    def look(self, batch: dict[str, Any], contexts: list[list[int]], epochs: Tensor, frozen: Frozen) -> Tensor:
        """Log-probabilities of policy and reference (and values) into the batch; scores of the reward model."""
        script, args = self.script, self.args
        if script is rloo_rlhf:
            shape = (self.rows, self.copies, -1)
            batch |= {name: batch[name].view(shape) for name in ("responses", "kept")}
        parts = [
            part for minibatch in epochs[0] for part in script.micro_batches(minibatch, batch["lengths"], self.micro)
        ]
        script.look(self.accelerator, self.policy, frozen.ref, batch, parts, args.temperature)
        with self.accelerator.autocast():
            return script.score(frozen.rewards[script], contexts, batch["truncated"], None, args).to(self.device)
