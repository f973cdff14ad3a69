"""VADER's sentiment as a reward function: `--reward_fn benchmark.tools.vader:sentiment`."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

ANALYZER = SentimentIntensityAnalyzer()


def sentiment(queries: list[str], responses: list[str]) -> list[float]:
    """The compound score in [-1, 1] of each response, read without its query (Hutto and Gilbert
    2014)."""
    scores = []
    for response in responses:
        polarity = ANALYZER.polarity_scores(response)
        scores.append(polarity["compound"])
    return scores
