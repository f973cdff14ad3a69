"""What a policy of the default task is worth: VADER, which labelled its data, reads samples."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import comb
from torch import Tensor
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

import rloo_rlhf
from benchmark import common, ours
from plumbing import data as data_module


def is_repetitive(response: str) -> bool:
    """Whether more than a fifth of its pairs of neighbouring words stood in it before."""
    words = re.findall(r"\w+", response.lower())
    pairs = list(itertools.pairwise(words))
    return len(pairs) - len(set(pairs)) > 0.2 * len(pairs)


class Judge:
    """For one seed and its reward model: responses to all held-out queries, drawn with the same
    uniform numbers."""

    def __init__(self, seed: int, reward_model: Path | str, num_queries: int = 512) -> None:
        self.seed = seed
        self.vader = SentimentIntensityAnalyzer()
        tokenizer = common.tokenizer()
        args = rloo_rlhf.Args(
            seed=seed,
            rloo_k=1,
            query_dataset="tiny/queries/test.jsonl",
            reward_model=str(reward_model),
        )
        longest = args.query_length + args.response_length
        self.queries = ours.load_queries(tokenizer, args, num_queries)
        self.end = data_module.token_id("truncate_token", args.truncate_token, tokenizer)
        self.reward = ours.load_score_fn(tokenizer, longest, args)
        self.tokenizer = tokenizer
        self.args = args
        self.ref = self.actor("tiny/model")

    def uniforms(self, draw: int) -> Tensor:
        """Numbers to sample with; other ones for another draw."""
        length = self.args.response_length
        return rloo_rlhf.uniforms(self.seed, draw, len(self.queries), length)

    def actor(self, folder: Path | str) -> Any:
        """The policy in `folder`, or the starting model; one response per query."""
        return ours.make_actor(rloo_rlhf, ours.load_lm(str(folder), self.args), self.args)

    def responses(self, policy: Any, draw: int) -> rloo_rlhf.Batch:
        """A response to each query."""
        return rloo_rlhf.rollout(policy, self.queries, self.uniforms(draw), self.end, self.args)

    def true_scores(self, responses: list[list[int]]) -> list[float]:
        """VADER's scores in [-1, 1] of truncated responses."""
        texts = self.tokenizer.batch_decode(responses)
        return [self.vader.polarity_scores(text)["compound"] for text in texts]

    def rewards(self, batch: rloo_rlhf.Batch) -> list[float]:
        """The reward model's scores, without a penalty."""
        return self.reward(self.queries, rloo_rlhf.truncated(batch)).tolist()

    @torch.no_grad()
    def __call__(self, policy: Any, draw: int = 10**6) -> dict[str, Any]:
        """Of truncated responses: scores, KL to the reference in nats, mean log-probability of a
        token under the reference, and whether words repeat, as lists; the share of distinct ones.
        """
        rows = torch.arange(len(self.queries)).view(1, -1)
        batch = self.responses(policy, draw)
        rloo_rlhf.set_logprobs(batch, policy, self.ref, rows, self.args)
        responses = rloo_rlhf.truncated(batch)
        texts = self.tokenizer.batch_decode(responses)
        return {
            "true_score": self.true_scores(responses),
            "reward": self.rewards(batch),
            "kl": (batch.logprobs - batch.ref_logprobs).sum(1).tolist(),
            "likelihood": batch.ref_logprobs.mean(1).tolist(),
            "distinct": len(set(texts)) / len(texts),
            "repetitive": [is_repetitive(text) for text in texts],
        }


def best_of_n(judge: Judge, pool: int) -> dict[str, list[float]]:
    """KL, reward and true score of the best of n = 1, 2, 4, .. of the starting model's responses,
    as the judge's reward model chooses. Means over all choices of n among `pool` responses to each
    query."""
    draws = [judge.responses(judge.ref, 10**6 + i) for i in range(pool)]
    texts = [rloo_rlhf.truncated(batch) for batch in draws]
    true_scores = np.array([judge.true_scores(x) for x in texts]).T  # (queries, pool)
    rewards = np.array([judge.rewards(x) for x in draws]).T
    order = rewards.argsort(1)
    sorted_rewards = np.take_along_axis(rewards, order, 1)
    sorted_true_scores = np.take_along_axis(true_scores, order, 1)
    points = []
    n = 1
    while n <= pool // 2:
        # Of the pool's r-th smallest to be the best of n.
        share = comb(np.arange(pool), n - 1) / comb(pool, n)
        best_rewards = sorted_rewards @ share
        best_true_scores = sorted_true_scores @ share
        point = {
            "n": n,
            "kl": float(np.log(n) - (n - 1) / n),
            "reward": float(best_rewards.mean()),
            "true_score": float(best_true_scores.mean()),
        }
        points.append(point)
        n *= 2
    curve = {}
    for name in points[0]:
        curve[name] = [point[name] for point in points]
    return curve
