"""What a policy of the embedded default is worth: VADER, which labelled its data, reads fresh samples."""

from pathlib import Path
from typing import Any

import common
import torch
from ours import load
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

import rloo_rlhf

CPU = torch.device("cpu")


class Judge:
    """For one seed and its reward model: responses to all held-out queries, drawn with the same uniform numbers."""

    def __init__(self, seed: int, reward_model: Path | str, queries: int = 512) -> None:
        self.args = rloo_rlhf.Args(seed=seed, query_dataset="tiny/queries/test.jsonl", reward_model=str(reward_model))
        self.tokenizer, self.seed, self.vader = common.tokenizer(), seed, SentimentIntensityAnalyzer()
        self.queries = rloo_rlhf.load_queries(self.tokenizer, self.args, queries)
        self.end = rloo_rlhf.token_id(self.tokenizer, self.args.truncate_token)
        self.ref = self.actor("tiny/model")
        longest = self.args.query_length + self.args.response_length
        self.reward = rloo_rlhf.load_reward(self.args, "tiny", self.tokenizer, longest, CPU)

    def actor(self, folder: Path | str) -> Any:
        """The policy in `folder`, or the reference."""
        return rloo_rlhf.Actor(load(str(folder), self.args, CPU))

    @torch.no_grad()
    def responses(self, policy: Any, draw: int) -> list[list[int]]:
        """A truncated response to each query."""
        args = self.args
        u = rloo_rlhf.uniforms(self.seed, draw, len(self.queries), args.response_length)
        contexts = [query["context"] for query in self.queries]
        responses = rloo_rlhf.sample(policy, contexts, u, args.temperature)
        kept = rloo_rlhf.truncate(responses, self.end, args.truncate_after)[0].sum(1).tolist()
        return [row[:n] for row, n in zip(responses.tolist(), kept, strict=True)]

    def gold(self, responses: list[list[int]]) -> list[float]:
        """VADER's scores in [-1, 1]."""
        return [self.vader.polarity_scores(text)["compound"] for text in self.tokenizer.batch_decode(responses)]

    def proxy(self, queries: list[Any], responses: list[list[int]]) -> list[float]:
        """The reward model's scores, without a penalty."""
        return rloo_rlhf.score(self.reward, queries, responses, self.tokenizer, self.args).sum(1).tolist()

    @torch.no_grad()
    def __call__(self, policy: Any, draw: int = 10**6) -> dict[str, Any]:
        """Scores of truncated responses, KL to the reference per response in nats, as lists; share of distinct ones."""
        queries, args = self.queries, self.args
        u = rloo_rlhf.uniforms(self.seed, draw, len(queries), args.response_length)
        rows = torch.arange(len(queries)).view(1, -1)
        batch = rloo_rlhf.rollout(policy, self.ref, queries, u, rows, self.end, args)
        truncated = batch["truncated"]
        kl = (batch["logprobs"] - batch["ref_logprobs"]).sum(-1).flatten().tolist()
        distinct = len(set(self.tokenizer.batch_decode(truncated))) / len(truncated)
        scores = {"gold": self.gold(truncated), "proxy": self.proxy(queries, truncated)}
        return scores | {"kl": kl, "distinct": distinct}
