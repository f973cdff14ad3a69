"""A reward function of this study."""

from typing import Any

from benchmark.tools.vader import sentiment


def three_times(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """VADER's compound score times 3, which has about the deviation of a reward model's."""
    scores = []
    for score in sentiment(prompts, completions):
        scores.append(3 * score)
    return scores
