"""benchmark/tools/win_rate.py: rates that can be computed by hand."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_tools import to_lines

from benchmark.studies.real_model import report as real_model
from benchmark.tools import win_rate
from benchmark.tools.win_rate import Pairs

COLUMN = "response_after"


def count_a(completions: list[str], **_: Any) -> list[float]:
    """A judge that scores."""
    return [float(text.count("a")) for text in completions]


def prefer_first(
    prompts: list[str], completions: list[str], other_completions: list[str]
) -> list[float]:
    """A judge that compares, and likes what it reads first, unless the other has more of a."""
    preferred = []
    for one, other in zip(completions, other_completions, strict=True):
        preferred.append(float(one.count("a") >= other.count("a")))
    return preferred


def too_few(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0]


def nan(prompts: list[str], completions: list[str]) -> list[float]:
    return [math.nan] * len(completions)


def write(file: Path, *texts: str) -> Path:
    """samples.jsonl of such texts: `query response`."""
    rows = []
    for text in texts:
        query, response = text.split()
        rows.append({"query": query, COLUMN: response})
    file.write_text(to_lines(*rows))
    return file


def make_pairs(wins: list[float], lengths: list[int], others: list[int]) -> Pairs:
    """One pair for each query."""
    return Pairs(
        query=np.arange(len(wins)),
        wins=np.array(wins),
        lengths=np.array(lengths),
        other_lengths=np.array(others),
    )


@pytest.mark.parametrize("judge", [count_a, prefer_first])
def test_ties_are_half_a_win_and_queries_count_alike(judge: object, tmp_path: Path) -> None:
    one = write(tmp_path / "one", "q aa", "q a", "r b", "s aaa")
    other = write(tmp_path / "other", "s aab", "q a", "r c")
    ours = win_rate.read_samples(one, COLUMN)
    theirs = win_rate.read_samples(other, COLUMN)
    pairs = win_rate.compare(ours, theirs, judge)
    assert pairs.wins.tolist() == [1.0, 0.5, 0.5, 1.0]
    assert pairs.query.tolist() == [0, 0, 1, 2]
    once = np.ones(3)
    assert win_rate.win_rate(pairs, once) == pytest.approx(2.25 / 3)
    drawn = np.array([2, 1, 0])
    assert win_rate.win_rate(pairs, drawn) == pytest.approx(2 / 3)


def test_scores_that_are_near_each_other_are_a_tie() -> None:
    ours = {"q": ["aa"], "r": ["aaaa"]}
    theirs = {"q": ["a"], "r": ["a"]}
    strict = win_rate.compare(ours, theirs, count_a)
    assert strict.wins.tolist() == [1.0, 1.0]
    generous = win_rate.compare(ours, theirs, count_a, tie=1)
    assert generous.wins.tolist() == [0.5, 1.0]


def test_the_controlled_rate_is_that_of_the_regression_for_equal_lengths() -> None:
    """A is longer in four pairs and wins three of them; it is shorter in five and wins one. With
    two differences the regression goes through both log-odds, and its middle is their mean."""
    pairs = make_pairs(
        wins=[1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        lengths=[30] * 4 + [20] * 5,
        others=[20] * 4 + [30] * 5,
    )
    odds = math.sqrt(3 / 1 * 1 / 4)
    expected = odds / (1 + odds)
    once = np.ones(9)
    assert win_rate.controlled_rate(pairs, once) == pytest.approx(expected, abs=1e-5)
    assert win_rate.win_rate(pairs, once) == pytest.approx(4 / 9)


def test_wins_that_are_only_length_are_controlled_away() -> None:
    """The judge likes length alone, and A is longer three times out of four."""
    rng = np.random.default_rng(0)
    longer = rng.integers(1, 30, 300)
    shorter = -rng.integers(1, 30, 100)
    difference = np.concatenate([longer, shorter])
    chance = 1 / (1 + np.exp(-difference / 5.0))
    wins = (rng.random(400) < chance).astype(float)
    pairs = make_pairs(wins, 50 + difference, [50] * 400)
    once = np.ones(400)
    assert win_rate.win_rate(pairs, once) > 0.65
    assert abs(win_rate.controlled_rate(pairs, once) - 0.5) < 0.08


@pytest.mark.parametrize("won", [0.0, 1.0])
def test_a_side_that_wins_all_has_finite_rates(won: float) -> None:
    pairs = make_pairs([won] * 20, list(range(20)), [5] * 20)
    found = win_rate.results(pairs)
    assert found["win_rate"] == {"rate": won, "low": won, "high": won}
    assert abs(found["controlled_rate"]["rate"] - won) < 0.01


def test_matched_pairs_differ_by_a_tenth_at_most() -> None:
    pairs = make_pairs(
        [1.0, 0.0, 1.0, 0.0],
        [90, 89, 100, 5],
        [100] * 4,
    )
    similar = win_rate.similar(pairs)
    assert similar.tolist() == [True, False, True, False]
    assert win_rate.matched_rate(pairs, np.ones(4)) == 1.0
    none_of_them = np.array([0, 1, 0, 1])
    assert np.isnan(win_rate.matched_rate(pairs, none_of_them))


def test_the_interval_is_that_of_a_mean_over_queries() -> None:
    """Of 400 independent wins at 1 / 2: 1.96 * 0.5 / 20 on each side. Two pairs of each query that
    agree are no more than one."""
    pairs = make_pairs([0.0, 1.0] * 200, [10] * 400, [10] * 400)
    found = win_rate.estimate(win_rate.win_rate, pairs)
    assert found.rate == 0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1)
    twice = [np.repeat(x, 2) for x in vars(pairs).values()]
    assert win_rate.estimate(win_rate.win_rate, Pairs(*twice)) == found


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs the command in a folder with two files that can be compared."""
    monkeypatch.chdir(tmp_path)
    write(Path("samples.jsonl"), "q aa", "r a")
    write(Path("other"), "q a", "r b", "s a")
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(words: str) -> None:
        command = ["win_rate.py", "--judge", "test_win_rate:count_a", *words.split()]
        monkeypatch.setattr(sys, "argv", command)
        win_rate.main()

    return run


WRONG = "--judge did not return 2 numbers, as it should"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (". none", "none: there is no such file"),
        (". bad", "bad, line 1: KeyError('response_after')"),
        (". foreign", "0 queries are in both files"),
        (". other --judge math:sqrt2", "--judge math:sqrt2: "),
        (". other --judge math:pi", "--judge math:pi: "),
        (". other --judge test_win_rate:too_few", WRONG),
        (". other --judge test_win_rate:nan", WRONG),
    ],
)
def test_what_cannot_be_compared_is_one_line(words: str, message: str, call: object) -> None:
    write(Path("foreign"), "t a", "u b")
    Path("bad").write_text('{"query": "q"}\n')
    with pytest.raises(SystemExit) as error:
        call(words)
    assert str(error.value).startswith(f"win_rate.py: {message}")
    assert "\n" not in str(error.value)


def test_the_command_prints_and_writes_the_results(
    call: object, capsys: pytest.CaptureFixture
) -> None:
    call(". other --out found.json")
    printed = capsys.readouterr()
    assert "win rate                 100.0% (100.0% to 100.0%)\n" in printed.out
    assert printed.err == "win_rate.py: 1 queries are in one file only: left out\n"
    assert '"pairs": 2' in Path("found.json").read_text()


def test_wins_ties_and_losses_stand_apart_in_the_tables() -> None:
    """Of seven comparisons three are won, and two are ties."""
    won = np.array([1, 0.5, 0, 1, 0.5, 0, 1])
    lengths = np.ones(7)
    pairs = Pairs(np.arange(7), won, lengths, lengths)
    assert real_model.shares(win_rate.results(pairs)) == "43 / 29 / 29%"
