"""PPO and RLOO in plain PyTorch and transformers, written the way public reference implementations
are.

Queries are padded to the longest of the batch, `generate` samples, log-probabilities come from the
logits of all positions and the whole vocabulary, the reward model computes a reward at every
position, RLOO repeats its queries K times, TensorFlow's Adam is a loop over parameters, and
statistics are fetched with `.item()`. It computes the same numbers as the scripts; throughput.py
checks that before it compares speeds. The same precision flags, hyperparameters and random weights
as the contender that it stands against; nothing here is tuned against either.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmark.ours import END, Clock, responses_per_query
from plumbing.launch import set_up_torch

PAD = 0  # any token: the attention mask hides it


def load_plain(auto_class: Any, folder: str, device: torch.device, **kwargs: Any) -> Any:
    """A model as from_pretrained gives it, without dropout."""
    model = auto_class.from_pretrained(folder, dtype=torch.float32, **kwargs)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device)


class PolicyAndValue(nn.Module):
    """A language model and a linear value head on its last hidden state."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.scalar_head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.scalar_head.weight)
        nn.init.zeros_(self.scalar_head.bias)


class TensorFlowAdam:
    """Adam with TensorFlow's epsilon, one tensor at a time."""

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        self.params = list(params)
        self.lr = lr
        self.eps = eps
        self.t = 0
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]

    def zero_grad(self) -> None:
        """No gradients."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter."""
        self.t += 1
        rate = self.lr * (1 - 0.999**self.t) ** 0.5 / (1 - 0.9**self.t)
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            if p.grad is not None:
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.addcdiv_(m, v.sqrt().add_(self.eps), value=-rate)


class PlainFrozen:
    """Reference and reward model, which the plain contenders share."""

    def __init__(self, folder: str, device: torch.device, **kwargs: Any) -> None:
        self.ref = load_plain(AutoModelForCausalLM, folder, device, **kwargs)
        self.ref.eval().requires_grad_(False)
        torch.manual_seed(1)  # the head that the scripts' contenders have
        kwargs["num_labels"] = 1
        self.reward = load_plain(AutoModelForSequenceClassification, folder, device, **kwargs)
        self.reward.eval().requires_grad_(False)


def whiten(x: Tensor, shift_mean: bool = True) -> Tensor:
    """Unit variance and, unless shift_mean is False, zero mean."""
    mean = x.mean()
    whitened = (x - mean) * torch.rsqrt(x.var(unbiased=False) + 1e-8)
    if not shift_mean:
        whitened += mean
    return whitened


class Plain:
    """A policy and its optimizer; `update` does one update on given contexts. `fast`: with the
    scripts' set_up_torch, and eager attention on a CPU."""

    def __init__(
        self, algorithm: str, folder: str, device: torch.device, args: Any, fast: bool
    ) -> None:
        self.algorithm = algorithm
        self.args = args
        self.device = device
        self.copies = responses_per_query(args)
        self.fast = fast
        self.attention = {}
        if fast and device.type == "cpu":
            self.attention["attn_implementation"] = "eager"
        self.lm = load_plain(AutoModelForCausalLM, folder, device, **self.attention)
        self.model = self.lm
        if algorithm == "ppo":
            self.model = PolicyAndValue(self.lm).to(device)
        self.optimizer = TensorFlowAdam(self.model.parameters(), args.lr, args.adam_eps)
        self.shuffle = np.random.RandomState(1)

    # --- forward passes ---------------------------------------------------------------------------
    def autocast(self) -> Any:
        """Autocast around whole passes, the head included."""
        if self.args.dtype == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def forward(self, model: Any, tokens: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        """A forward pass over everything; positions count real tokens."""
        return model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            **kwargs,
        )

    def pass_of_policy(self, tokens: Tensor, mask: Tensor) -> Any:
        """PPO's value head needs hidden states; nobody else does."""
        return self.forward(self.lm, tokens, mask, output_hidden_states=self.algorithm == "ppo")

    def logprobs(self, logits: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and scaled logits at the response, from logits (B, T, V) of all
        positions."""
        length = responses.shape[1]
        logits = logits[:, -length - 1 : -1] / self.args.temperature
        logprobs = logits.log_softmax(-1).gather(2, responses.unsqueeze(-1))
        return logprobs.squeeze(-1), logits

    def values(self, hidden: Tensor, length: int) -> Tensor:
        """Values where the response's tokens are predicted."""
        return self.model.scalar_head(hidden[:, -length - 1 : -1]).squeeze(-1).float()

    # --- rollout ----------------------------------------------------------------------------------
    def pad(self, contexts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Queries and mask, padded on the left to the longest, every query K times."""
        queries = torch.full((len(contexts), max(map(len, contexts))), PAD)
        mask = torch.zeros_like(queries)
        for i, context in enumerate(contexts):
            queries[i, -len(context) :] = torch.tensor(context)
            mask[i, -len(context) :] = 1
        queries = queries.repeat_interleave(self.copies, 0)
        mask = mask.repeat_interleave(self.copies, 0)
        return queries.to(self.device), mask.to(self.device)

    @torch.no_grad()
    def sample(self, queries: Tensor, mask: Tensor) -> Tensor:
        """Responses of the full length, by transformers."""
        length = self.args.response_length
        tokens = self.lm.generate(
            input_ids=queries,
            attention_mask=mask,
            do_sample=True,
            temperature=self.args.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=PAD,
        )
        return tokens[:, queries.shape[1] :]

    @torch.no_grad()
    def think(self, frozen: PlainFrozen, tokens: Tensor, mask: Tensor, responses: Tensor) -> tuple:
        """Log-probabilities of policy and reference, and PPO's values, of all responses."""
        logprobs = []
        ref_logprobs = []
        values = []
        for rows in torch.arange(len(tokens)).split(self.args.micro_batch_size):
            output = self.pass_of_policy(tokens[rows], mask[rows])
            logprobs.append(self.logprobs(output.logits, responses[rows])[0])
            if self.algorithm == "ppo":
                values.append(self.values(output.hidden_states[-1], responses.shape[1]))
            output = self.forward(frozen.ref, tokens[rows], mask[rows])
            ref_logprobs.append(self.logprobs(output.logits, responses[rows])[0])
        values = torch.cat(values) if values else None
        return torch.cat(logprobs), torch.cat(ref_logprobs), values

    @torch.no_grad()
    def rewards_of(self, reward: Any, queries: Tensor, mask: Tensor, responses: Tensor) -> Tensor:
        """Rewards of the truncated responses, or the penalty; a reward at every position, of which
        one is read."""
        args = self.args
        index = torch.arange(responses.shape[1], device=self.device)
        is_end = (responses == END) & (index >= args.truncate_after)
        kept = is_end.cumsum(1) - is_end.long() == 0
        tokens = torch.cat([queries, torch.where(kept, responses, PAD)], 1)
        seen = torch.cat([mask, kept.long()], 1)
        last = queries.shape[1] + kept.sum(1) - 1
        self.scored = int(kept.sum())
        scores = []
        for rows in torch.arange(len(tokens)).split(args.micro_batch_size):
            output = self.forward(reward.base_model, tokens[rows], seen[rows])
            every = reward.score(output.last_hidden_state).squeeze(-1).float()
            of_last = every.gather(1, last[rows].unsqueeze(1))
            scores.append(of_last.squeeze(1))
        scores = torch.cat(scores)
        never = ~is_end.any(1)
        if args.penalty_mode == "add":
            return scores + never * args.penalty_reward_value
        return torch.where(never, args.penalty_reward_value, scores)

    # --- update -----------------------------------------------------------------------------------
    def update(
        self, contexts: list[list[int]], frozen: PlainFrozen, responses: Tensor | None = None
    ) -> Clock:
        """One update; with `responses`, on these instead of samples."""
        if self.fast:
            set_up_torch(self.args.dtype)
        else:
            torch.set_float32_matmul_precision("highest")
        clock = Clock()
        with clock("total"):
            queries, mask = self.pad(contexts)
            with clock("sample"), self.autocast():
                if responses is None:
                    responses = self.sample(queries, mask)
            tokens = torch.cat([queries, responses], 1)
            seen = torch.cat([mask, torch.ones_like(responses)], 1)
            with clock("score"), self.autocast():
                logprobs, ref_logprobs, values = self.think(frozen, tokens, seen, responses)
                scores = self.rewards_of(frozen.reward, queries, mask, responses)
            rewards = -self.args.kl_coef * (logprobs - ref_logprobs)
            rewards[:, -1] += scores
            batch = {
                "tokens": tokens,
                "seen": seen,
                "responses": responses,
                "logprobs": logprobs,
                "rewards": rewards,
                "values": values,
            }
            if self.algorithm == "rloo":
                of_queries = rewards.sum(1).view(-1, self.copies)
                others = (of_queries.sum(1, keepdim=True) - of_queries) / (self.copies - 1)
                batch["advantages"] = (of_queries - others).flatten()
            with clock("optimise"):
                self.optimise(batch)
        return clock

    def optimise(self, batch: dict[str, Tensor]) -> None:
        """All optimizer steps on a batch."""
        args = self.args
        num_queries = len(batch["tokens"]) // self.copies
        self.stats = []
        for _ in range(args.num_epochs):
            order = torch.from_numpy(self.shuffle.permutation(num_queries))
            first = order.unsqueeze(1) * self.copies
            order = first + torch.arange(self.copies)  # those of a query stay together
            order = order.flatten()
            for minibatch in order.split(len(order) // args.num_minibatches):
                if self.algorithm == "ppo":
                    self.set_advantages(batch, minibatch)
                self.optimizer.zero_grad()
                for part in minibatch.split(args.micro_batch_size):
                    share = len(part) / len(minibatch)
                    loss = self.loss(batch, part) * share
                    loss.backward()
                self.optimizer.step()

    def set_advantages(self, batch: dict[str, Tensor], minibatch: Tensor) -> None:
        """Whitened advantages, and returns, of a minibatch, into the batch."""
        args = self.args
        rewards = whiten(batch["rewards"][minibatch], shift_mean=False)
        values = batch["values"][minibatch]
        advantages = torch.zeros_like(values)
        last = 0
        following = 0
        for t in reversed(range(values.shape[1])):
            error = rewards[:, t] + args.gamma * following - values[:, t]
            last = error + args.gamma * args.lam * last
            advantages[:, t] = last
            following = values[:, t]
        for name in ("advantages", "returns"):
            batch.setdefault(name, torch.zeros_like(batch["values"]))
        batch["returns"][minibatch] = advantages + values
        batch["advantages"][minibatch] = whiten(advantages)

    def loss(self, batch: dict[str, Tensor], part: Tensor) -> Tensor:
        """Mean loss of a micro-batch; its statistics to self.stats."""
        args = self.args
        responses = batch["responses"][part]
        advantages = batch["advantages"][part]
        with self.autocast():
            output = self.pass_of_policy(batch["tokens"][part], batch["seen"][part])
            logprobs, logits = self.logprobs(output.logits.float(), responses)
            if self.algorithm == "ppo":
                values = self.values(output.hidden_states[-1], responses.shape[1])
        log_ratio = logprobs - batch["logprobs"][part]
        if self.algorithm == "rloo":
            log_ratio = log_ratio.sum(1)
        ratio = log_ratio.exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
        loss = torch.max(unclipped, clipped).mean()
        with torch.no_grad():
            mean_logit = (logits.softmax(-1) * logits).sum(-1)
            entropy = logits.logsumexp(-1) - mean_logit
            approxkl = 0.5 * (log_ratio**2).mean()
            stats = {
                "loss": loss.item(),
                "entropy": entropy.mean().item(),
                "approxkl": approxkl.item(),
                "clipfrac": (clipped > unclipped).float().mean().item(),
                "ratio": ratio.mean().item(),
            }
        if self.algorithm == "ppo":
            before = batch["values"][part]
            returns = batch["returns"][part]
            change = (values - before).clamp(-args.cliprange_value, args.cliprange_value)
            error = (values - returns) ** 2
            clipped_error = (before + change - returns) ** 2
            value_loss = 0.5 * torch.max(error, clipped_error).mean()
            stats["value_loss"] = value_loss.item()
            stats["value"] = values.mean().item()
            loss = loss + args.vf_coef * value_loss
        self.stats.append(stats)
        return loss
