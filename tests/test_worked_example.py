"""docs/ppo.md and docs/rloo.md show what benchmark/tools/worked_example.py computes. Numbers are
compared with a tolerance, since other CPUs round differently; all else to the letter."""

import re
from typing import Any

import pytest
import torch
from conftest import ROOT

from benchmark.tools import worked_example

NUMBER = re.compile(r"-?\d+\.\d+")
MARGIN = 5e-6  # between a number to sample with and the next token: rounding is far below


@pytest.fixture(scope="module")
def examples() -> tuple[Any, Any]:
    """Both examples. No token of theirs may depend on rounding."""
    search = torch.searchsorted

    def checked(cdf: Any, u: Any, **kwargs: Any) -> Any:
        assert (cdf[:, :-1] - u).abs().min() > MARGIN, "between two tokens: take another draw"
        return search(cdf, u, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "searchsorted", checked)
        return worked_example.work_out()


def differences(shown: str, expected: str) -> list[str]:
    """Where two pages differ, with more than a unit of a number's last digit."""
    assert NUMBER.sub("#", shown) == NUMBER.sub("#", expected)
    found = []
    pairs = zip(
        NUMBER.findall(shown),
        NUMBER.findall(expected),
        strict=True,
    )
    for text, other in pairs:
        _, _, decimals = text.partition(".")
        error = abs(float(text) - float(other))
        if error > 1.5 * 10 ** -len(decimals):
            found.append(f"{text} is {other}")
    return found


def expected_pages(examples: tuple[Any, Any]) -> dict[str, str]:
    """What the program would write."""
    ppo, rloo = examples
    parts = {
        "docs/ppo.md": worked_example.ppo_parts(ppo),
        "docs/rloo.md": worked_example.rloo_parts(rloo),
    }
    made = {}
    for page, own in parts.items():
        shown = (ROOT / page).read_text()
        made[page] = worked_example.written(shown, own)
    return made


def test_the_pages_have_the_numbers_and_the_code_of_the_scripts(examples: tuple[Any, Any]) -> None:
    for page, expected in expected_pages(examples).items():
        shown = (ROOT / page).read_text()
        assert len(NUMBER.findall(shown)) > 20
        assert shown.count("```python") >= 3
        assert differences(shown, expected) == []


def test_a_wrong_number_and_a_wrong_line_are_found(examples: tuple[Any, Any]) -> None:
    expected = expected_pages(examples)["docs/ppo.md"]
    parts = worked_example.ppo_parts(examples[0])
    *_, advantage, _ = NUMBER.findall(parts["advantages A"])
    other = f"{float(advantage) + 0.01:.3f}"
    wrong = expected.replace(advantage, other)
    assert differences(wrong, expected)

    wrong = expected.replace("gamma * lam", "gamma + lam")
    with pytest.raises(AssertionError):
        differences(wrong, expected)


def test_each_column_follows_from_those_before(examples: tuple[Any, Any]) -> None:
    """The pages' equations, written out here for the last two tokens of A and for all rewards."""
    ppo, rloo = examples
    batch = ppo.batch
    values = batch.values[0]
    mean = batch.rewards.mean()
    variance = batch.rewards.square().mean() - mean**2
    whitened = (batch.rewards[0] - mean) / variance.sqrt() + mean
    last = whitened[-1] - values[-1]
    surprise = whitened[-2] + values[-1] - values[-2]
    before = surprise + 0.95 * last

    table = worked_example.ppo_parts(ppo)["advantages A"]
    *_, line_before, last_line = table.splitlines()
    for line, advantage in ((line_before, before), (last_line, last)):
        cells = line.split("|")
        shown = float(cells[6])
        assert shown == pytest.approx(float(advantage), abs=2e-3)

    rewards = rloo.batch.rewards
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    torch.testing.assert_close(rloo.batch.advantages, rewards - others)


def test_what_the_sentences_say_of_the_numbers_is_true(examples: tuple[Any, Any]) -> None:
    ppo, rloo = examples
    batch = ppo.batch
    of_a, of_b = batch.advantages
    assert (of_a > 0).all()
    assert (of_b < 0).all()
    assert batch.found_end.tolist() == [True, False]
    probabilities = batch.logprobs[0].exp()
    tokens = ppo.tokens[0]
    assert tokens[1] == " smiled"
    assert probabilities[1] < 0.01
    assert ppo.after["ratio"][0, 1] > 1.2
    assert tokens[4] == " the"
    assert probabilities[4] > 0.99
    assert ppo.tokens == [rloo.tokens[0], rloo.tokens[2]]
    assert rloo.batch.advantages.sum().abs() < 1e-4
