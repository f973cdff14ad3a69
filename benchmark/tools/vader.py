"""VADER's sentiment as a reward function: `--reward_fn benchmark.tools.vader:sentiment`."""

from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

ANALYZER = SentimentIntensityAnalyzer()


def sentiment(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """The compound score in [-1, 1] of each completion, read without its prompt (Hutto and Gilbert
    2014)."""
    scores = []
    for completion in completions:
        polarity = ANALYZER.polarity_scores(completion)
        scores.append(polarity["compound"])
    return scores
