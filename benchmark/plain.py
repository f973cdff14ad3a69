"""PPO and RLOO in plain PyTorch and transformers, written the way public reference implementations are.

Queries are padded to the longest of the batch, `generate` samples, log-probabilities come from the logits of all
positions and the whole vocabulary, the reward model computes a reward at every position, RLOO repeats its queries K
times, TensorFlow's Adam is a loop over parameters, and statistics are fetched with `.item()`. It computes the same
numbers as the scripts; throughput.py checks that before it compares speeds. The same precision flags, hyperparameters
and random weights as the contender that it stands against; nothing here is tuned against either.
"""

import contextlib
from typing import Any

import numpy as np
import torch
from ours import END, Clock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

PAD = 0  # any token: the attention mask hides it


def load_plain(auto_class: Any, folder: str, **kwargs: Any) -> Any:
    """A model as from_pretrained gives it, without dropout."""
    model = auto_class.from_pretrained(folder, dtype=torch.float32, **kwargs)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


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
        self.params, self.lr, self.eps, self.t = list(params), lr, eps, 0
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
        self.ref = load_plain(AutoModelForCausalLM, folder, **kwargs).to(device).eval().requires_grad_(False)
        torch.manual_seed(1)  # the head that the scripts' contenders have
        self.reward = load_plain(AutoModelForSequenceClassification, folder, num_labels=1, **kwargs).to(device)
        self.reward.eval().requires_grad_(False)


def whiten(x: Tensor, shift_mean: bool = True) -> Tensor:
    """Unit variance and, unless shift_mean is False, zero mean."""
    mean, variance = x.mean(), x.var(unbiased=False)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


class Plain:
    """A policy and its optimizer; `update` does one update on given contexts. `fast`: with the scripts' product."""

    def __init__(self, algorithm: str, folder: str, device: torch.device, args: Any, fast: bool) -> None:
        self.algorithm, self.args, self.device = algorithm, args, device
        self.copies = args.rloo_k if algorithm == "rloo" else 1
        self.precision = "medium" if fast else "highest"
        self.attention = {"attn_implementation": "eager"} if fast and device.type == "cpu" else {}
        self.lm = load_plain(AutoModelForCausalLM, folder, **self.attention).to(device)
        self.model = PolicyAndValue(self.lm).to(device) if algorithm == "ppo" else self.lm
        self.optimizer = TensorFlowAdam(self.model.parameters(), args.lr, args.adam_eps)
        self.shuffle = np.random.RandomState(1)

    def autocast(self) -> Any:
        """Autocast around whole passes, the head included."""
        bf16 = self.args.dtype == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()

    def forward(self, model: Any, tokens: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        """A forward pass over everything; positions count real tokens."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False, **kwargs)

    def pass_of_policy(self, tokens: Tensor, mask: Tensor) -> Any:
        """PPO's value head needs hidden states; nobody else does."""
        return self.forward(self.lm, tokens, mask, output_hidden_states=self.algorithm == "ppo")

    def logprobs(self, logits: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and scaled logits at the response, from logits (B, T, V) of all positions."""
        logits = logits[:, -responses.shape[1] - 1 : -1] / self.args.temperature
        return logits.log_softmax(-1).gather(2, responses.unsqueeze(-1)).squeeze(-1), logits

    def values(self, hidden: Tensor, length: int) -> Tensor:
        """Values where the response's tokens are predicted."""
        return self.model.scalar_head(hidden[:, -length - 1 : -1]).squeeze(-1).float()

    def pad(self, contexts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Queries and mask, padded on the left to the longest, every query K times."""
        queries = torch.full((len(contexts), max(map(len, contexts))), PAD)
        mask = torch.zeros_like(queries)
        for i, context in enumerate(contexts):
            queries[i, -len(context) :] = torch.tensor(context)
            mask[i, -len(context) :] = 1
        return queries.repeat_interleave(self.copies, 0).to(self.device), mask.repeat_interleave(self.copies, 0).to(
            self.device
        )

    @torch.no_grad()
    def sample(self, queries: Tensor, mask: Tensor) -> Tensor:
        """Responses of the full length, by transformers."""
        length = self.args.response_length
        sampling = {"do_sample": True, "temperature": self.args.temperature, "top_k": 0, "top_p": 1.0}
        sampling |= {"max_new_tokens": length, "min_new_tokens": length, "pad_token_id": PAD}
        tokens = self.lm.generate(input_ids=queries, attention_mask=mask, **sampling)
        return tokens[:, queries.shape[1] :]

    @torch.no_grad()
    def rewards_of(self, reward: Any, queries: Tensor, mask: Tensor, responses: Tensor) -> Tensor:
        """Rewards of the truncated responses, or the penalty; a reward at every position, of which one is read."""
        args, scores = self.args, []
        index = torch.arange(responses.shape[1], device=self.device)
        hit = (responses == END) & (index >= args.truncate_after)
        kept = hit.cumsum(1) - hit.long() == 0
        tokens = torch.cat([queries, torch.where(kept, responses, PAD)], 1)
        seen = torch.cat([mask, kept.long()], 1)
        last, self.scored = queries.shape[1] + kept.sum(1) - 1, int(kept.sum())
        for rows in torch.arange(len(tokens)).split(args.micro_batch_size):
            hidden = self.forward(reward.base_model, tokens[rows], seen[rows]).last_hidden_state
            every = reward.score(hidden).squeeze(-1).float()
            scores.append(every.gather(1, last[rows].unsqueeze(1)).squeeze(1))
        scores, never = torch.cat(scores), ~hit.any(1)
        if args.penalty_mode == "add":
            return scores + never * args.penalty_reward_value
        return torch.where(never, args.penalty_reward_value, scores)

    def update(self, contexts: list[list[int]], frozen: PlainFrozen, responses: Tensor | None = None) -> Clock:
        """One update; with `responses`, on these instead of samples."""
        torch.set_float32_matmul_precision(self.precision)
        clock, args = Clock(), self.args
        with clock("total"):
            queries, mask = self.pad(contexts)
            with clock("sample"), self.autocast():
                responses = self.sample(queries, mask) if responses is None else responses
            tokens, seen = torch.cat([queries, responses], 1), torch.cat([mask, torch.ones_like(responses)], 1)
            length, logprobs, ref_logprobs, values = responses.shape[1], [], [], []
            with clock("score"), self.autocast(), torch.no_grad():
                for rows in torch.arange(len(tokens)).split(args.micro_batch_size):
                    output = self.pass_of_policy(tokens[rows], seen[rows])
                    logprobs.append(self.logprobs(output.logits, responses[rows])[0])
                    if self.algorithm == "ppo":
                        values.append(self.values(output.hidden_states[-1], length))
                    output = self.forward(frozen.ref, tokens[rows], seen[rows])
                    ref_logprobs.append(self.logprobs(output.logits, responses[rows])[0])
                scores = self.rewards_of(frozen.reward, queries, mask, responses)
            logprobs, ref_logprobs = torch.cat(logprobs), torch.cat(ref_logprobs)
            penalty = -args.kl_coef * (logprobs - ref_logprobs)
            batch = {"tokens": tokens, "seen": seen, "responses": responses, "logprobs": logprobs}
            if self.algorithm == "ppo":
                penalty[:, -1] += scores
                batch |= {"rewards": penalty, "values": torch.cat(values)}
            else:
                rewards = (scores + penalty.sum(1)).view(-1, self.copies)
                siblings = (rewards.sum(1, keepdim=True) - rewards) / (self.copies - 1)
                batch["advantages"] = (rewards - siblings).flatten()
            with clock("optimise"):
                self.optimise(batch)
        return clock

    def optimise(self, batch: dict[str, Tensor]) -> None:
        """All optimizer steps on a batch."""
        args, rows, self.stats = self.args, len(batch["tokens"]) // self.copies, []
        for _ in range(args.num_epochs):
            order = torch.from_numpy(self.shuffle.permutation(rows)) * self.copies
            order = (order.unsqueeze(1) + torch.arange(self.copies)).flatten()  # the K of a query stay together
            for minibatch in order.split(len(order) // args.num_minibatches):
                if self.algorithm == "ppo":
                    self.advantages(batch, minibatch)
                self.optimizer.zero_grad()
                for part in minibatch.split(args.micro_batch_size):
                    loss = self.loss(batch, part) * len(part) / len(minibatch)
                    loss.backward()
                self.optimizer.step()

    def advantages(self, batch: dict[str, Tensor], minibatch: Tensor) -> None:
        """Whitened advantages, and returns, of a minibatch, into the batch."""
        args = self.args
        rewards, values = whiten(batch["rewards"][minibatch], shift_mean=False), batch["values"][minibatch]
        last, advantages = 0, torch.zeros_like(values)
        for t in reversed(range(values.shape[1])):
            following = values[:, t + 1] if t + 1 < values.shape[1] else 0
            last = rewards[:, t] + args.gamma * following - values[:, t] + args.gamma * args.lam * last
            advantages[:, t] = last
        for name in ("advantages", "returns"):
            batch.setdefault(name, torch.zeros_like(batch["values"]))
        batch["returns"][minibatch], batch["advantages"][minibatch] = advantages + values, whiten(advantages)

    def loss(self, batch: dict[str, Tensor], part: Tensor) -> Tensor:
        """Mean loss of a micro-batch; its statistics to self.stats."""
        args, responses, old = self.args, batch["responses"][part], batch["logprobs"][part]
        with self.autocast():
            output = self.pass_of_policy(batch["tokens"][part], batch["seen"][part])
            logprobs, logits = self.logprobs(output.logits.float(), responses)
            if self.algorithm == "ppo":
                values = self.values(output.hidden_states[-1], responses.shape[1])
        difference, advantages = logprobs - old, batch["advantages"][part]
        if self.algorithm == "rloo":
            difference = difference.sum(1)
        ratio = difference.exp()
        losses = -advantages * ratio, -advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
        loss = torch.max(*losses).mean()
        with torch.no_grad():
            entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
            stats = {
                "loss": loss.item(),
                "entropy": entropy.mean().item(),
                "approxkl": 0.5 * (difference**2).mean().item(),
            }
            stats |= {"clipfrac": (losses[1] > losses[0]).float().mean().item(), "ratio": ratio.mean().item()}
        if self.algorithm == "ppo":
            before, returns = batch["values"][part], batch["returns"][part]
            near = before + (values - before).clamp(-args.cliprange_value, args.cliprange_value)
            value_loss = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2).mean()
            stats |= {"value_loss": value_loss.item(), "value": values.mean().item()}
            loss = loss + args.vf_coef * value_loss
        self.stats.append(stats)
        return loss
