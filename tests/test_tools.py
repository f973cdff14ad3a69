"""benchmark/tools: pictures of runs, win rates, and the worked example of docs/ppo.md and
docs/rloo.md. Numbers of the pages are compared with a tolerance, since other CPUs round
differently; all else to the letter."""

import math
import re
import sys
from pathlib import Path
from unittest import mock

import fork_tools
import numpy as np
import pytest
import torch
from conftest import ROOT
from fork_tools import REWARD, SCRIPTS, plain
from run_tools import read_lines, to_lines

from benchmark.tools import plot, vader, win_rate, worked_example
from benchmark.tools.win_rate import Pairs

LINE = '{"train/loss": 1}\n'
WRONG = "--judge did not return 2 numbers, as it should"
JUDGE = "--judge test_tools:"
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture(autouse=True)
def new_folder(tmp_path, monkeypatch):
    """The programs write into the folder that they are called in, and add it to sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", [])


def call(tool, words):
    sys.argv = ["program.py", *words.split()]
    tool.main()


def fail(tool, words, message):
    """The same, which ends with one line that begins with this message."""
    with pytest.raises(SystemExit) as error:
        call(tool, words)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# --- pictures of runs -----------------------------------------------------------------------------
def make_run(name, scores):
    folder = Path(name)
    folder.mkdir(parents=True)
    rows = [{"objective/scores": score} for score in scores]
    (folder / "metrics.jsonl").write_text(to_lines(*rows))
    return folder


def test_curves_of_real_runs_are_their_metrics():
    """Over episodes, those of PPO and RLOO side by side, or over the updates of a reward model."""
    runs = {script: plot.read_metrics(plain(script, 1) / "out") for script in SCRIPTS}
    figure = plot.plot(runs, window=1)
    panels = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_ylabel() for panel in panels] == list(plot.PANELS.values())
    for panel, metric in zip(panels, plot.PANELS, strict=True):
        drawn = {line.get_label(): line for line in panel.get_lines()[1::2]}  # others are faint
        assert list(drawn) == [script for script in SCRIPTS if metric in runs[script][0]]
        for script, line in drawn.items():
            rows = read_lines(plain(script, 1) / "out/metrics.jsonl")
            steps = [1, 2, 3, 4] if script == REWARD else [4, 8, 12, 16]
            np.testing.assert_allclose(line.get_xdata(), steps)
            np.testing.assert_allclose(line.get_ydata(), [row[metric] for row in rows])


def test_the_mean_of_neighbours_is_not_shifted_at_the_ends():
    means = plot.smooth(np.array([0.0, 3.0, 6.0, 0.0]), window=3)
    assert means.tolist() == [1.5, 3.0, 3.0, 3.0]


def test_a_line_that_is_being_written_waits():
    folder = make_run("run", [1.0])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"objective/scores": 3')
    assert plot.read_metrics(folder) == [{"objective/scores": 1.0}]


def test_curves_over_seconds_have_a_point_at_the_end_of_each_update():
    """The legend has all runs, also one that is in no other panel; one update alone is a dot."""
    runs = {"reward": ("train/loss", [2.0, 3.0]), "policy": ("objective/scores", [4.0])}
    for name, (metric, seconds) in runs.items():
        rows = [{"seconds": x, metric: 1.0} for x in seconds]
        Path(name).mkdir()
        Path(f"{name}/metrics.jsonl").write_text(to_lines(*rows))
    with mock.patch.object(plot, "plot", wraps=plot.plot) as drawn:
        call(plot, "reward policy --over seconds --window 7")
    assert drawn.call_args.args[1] == 7
    figure = plot.plot(*drawn.call_args.args)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["policy", "reward"]
    found = {}
    for panel in figure.axes:
        for line in panel.get_lines()[1::2]:
            found[line.get_label()] = (line.get_xdata().tolist(), line.get_marker())
    assert found == {"reward": ([2, 5], "None"), "policy": ([4], ".")}


def test_vader_scores_good_texts_above_0_and_bad_ones_below():
    good, bad = vader.sentiment([], ["She was happy.", "She wept and was sad."])
    assert bad < 0 < good


def test_a_picture_of_two_runs_of_one_name(capsys):
    one = make_run("a/run", [1.0])
    other = make_run("b/run", [2.0, 3.0])
    make_run("c/run", [])
    assert plot.names_of([one, other]) == ["a/run", "b/run"]
    assert plot.names_of([one]) == ["run"]
    assert plot.names_of([Path()]) == [Path.cwd().name]
    Path("d").mkdir()
    Path("d/lock").touch()
    call(plot, "a/run b/run c/run d --out two.png")
    assert Path("two.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.out == "two.png\n"
    nothing = "has made no update yet\n"
    assert printed.err == f"plot.py: c/run {nothing}plot.py: d {nothing}"


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        (None, "empty", "plot.py: empty is not a run: it has no metrics.jsonl"),
        ("", "empty", "plot.py: there is nothing to draw yet"),
        ("[1\n", "empty", "plot.py: empty/metrics.jsonl: line 1 is not one of a run"),
        (LINE, "empty --out no/such.png", "plot.py: --out no/such"),
        (LINE, "empty --out a.none", "plot.py: --out a.none: "),
    ],
)
def test_what_cannot_be_drawn_is_one_line(line, words, message):
    Path("empty").mkdir()
    if line is not None:
        Path("empty/metrics.jsonl").write_text(line)
    fail(plot, words, message)


# --- win rates ------------------------------------------------------------------------------------
def count_a(completions, **_):
    return [float(text.count("a")) for text in completions]


def prefer_first(prompts, completions, other_completions):
    """A judge that compares, and likes what it reads first, unless the other has more of a."""
    preferred = []
    for one, other in zip(completions, other_completions, strict=True):
        preferred.append(float(one.count("a") >= other.count("a")))
    return preferred


def too_few(**_):
    return [1.0]


def nan(completions, **_):
    return [math.nan] * len(completions)


def write(name, *texts):
    """samples.jsonl of such texts: `query response`."""
    rows = []
    for text in texts:
        query, response = text.split()
        rows.append({"query": query, "response_after": response})
    Path(name).write_text(to_lines(*rows))
    return Path(name)


def make_pairs(wins, lengths, others):
    query = np.arange(len(wins))
    return Pairs(query, *map(np.array, (wins, lengths, others)))


@pytest.mark.parametrize("judge", [count_a, prefer_first])
def test_ties_are_half_a_win_and_queries_count_alike(judge):
    one = write("one", "q aa", "q a", "r b", "s aaa")
    other = write("other", "s aab", "q a", "r c")
    ours = win_rate.read_samples(one, "response_after")
    theirs = win_rate.read_samples(other, "response_after")
    pairs = win_rate.compare(ours, theirs, judge)
    assert pairs.wins.tolist() == [1.0, 0.5, 0.5, 1.0]
    assert pairs.query.tolist() == [0, 0, 1, 2]
    assert win_rate.win_rate(pairs, np.ones(3)) == pytest.approx(2.25 / 3)
    drawn = np.array([2, 1, 0])
    assert win_rate.win_rate(pairs, drawn) == pytest.approx(2 / 3)


def test_scores_that_are_near_each_other_are_a_tie():
    ours = {"q": ["aa"], "r": ["aaaa"]}
    theirs = {"q": ["a"], "r": ["a"]}
    for tie, wins in ((0, [1.0, 1.0]), (1, [0.5, 1.0])):
        assert win_rate.compare(ours, theirs, count_a, tie).wins.tolist() == wins


def test_the_controlled_rate_is_that_of_the_regression_for_equal_lengths():
    """A is longer in four pairs and wins three of them; it is shorter in five and wins one. With
    two differences the regression goes through both log-odds, and its middle is their mean."""
    pairs = make_pairs(
        wins=[1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        lengths=[30] * 4 + [20] * 5,
        others=[20] * 4 + [30] * 5,
    )
    odds = math.sqrt(3 / 4)  # of odds of 3 / 1 and 1 / 4
    expected = odds / (1 + odds)
    once = np.ones(9)
    assert win_rate.controlled_rate(pairs, once) == pytest.approx(expected, abs=1e-5)
    assert win_rate.win_rate(pairs, once) == pytest.approx(4 / 9)


@pytest.mark.parametrize("won", [0.0, 1.0])
def test_a_side_that_wins_all_has_finite_rates(won):
    pairs = make_pairs([won] * 20, range(20), [5] * 20)
    found = win_rate.results(pairs)
    assert found["win_rate"] == {"rate": won, "low": won, "high": won}
    assert abs(found["controlled_rate"]["rate"] - won) < 0.01


def test_matched_pairs_differ_by_a_tenth_at_most():
    pairs = make_pairs([1.0, 0.0, 1.0, 0.0], [90, 89, 100, 5], [100] * 4)
    assert win_rate.similar(pairs).tolist() == [True, False, True, False]
    assert win_rate.matched_rate(pairs, np.ones(4)) == 1.0
    none_of_them = np.array([0, 1, 0, 1])
    assert np.isnan(win_rate.matched_rate(pairs, none_of_them))


def test_the_interval_is_that_of_a_mean_over_queries():
    """Of 400 independent wins at 1 / 2: 1.96 * 0.5 / 20 on each side. Two pairs of each query that
    agree are no more than one."""
    pairs = make_pairs([0.0, 1.0] * 200, [10] * 400, [10] * 400)
    found = win_rate.estimate(win_rate.win_rate, pairs)
    assert found.rate == 0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1)
    twice = [np.repeat(x, 2) for x in vars(pairs).values()]
    assert win_rate.estimate(win_rate.win_rate, Pairs(*twice)) == found


def write_two():
    write("samples.jsonl", "q aa", "r a")
    write("other", "q a", "r b", "s a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"none {JUDGE}count_a", "none: there is no such file"),
        (f"bad {JUDGE}count_a", "bad, line 1: KeyError('response_after')"),
        (f"foreign {JUDGE}count_a", "0 queries are in both files"),
        ("other --judge math:sqrt2", "--judge math:sqrt2: "),
        ("other --judge math:pi", "--judge math:pi: "),
        (f"other {JUDGE}too_few", WRONG),
        (f"other {JUDGE}nan", WRONG),
    ],
)
def test_what_cannot_be_compared_is_one_line(words, message):
    write_two()
    write("foreign", "t a", "u b")
    Path("bad").write_text('{"query": "q"}\n')
    fail(win_rate, f". {words}", f"win_rate.py: {message}")


def test_the_command_prints_and_writes_the_results(capsys):
    write_two()
    call(win_rate, f". other --out found.json {JUDGE}count_a")
    printed = capsys.readouterr()
    assert "win rate                 100.0% (100.0% to 100.0%)\n" in printed.out
    assert printed.err == "win_rate.py: 1 queries are in one file only: left out\n"
    assert '"pairs": 2' in Path("found.json").read_text()


def test_columns_of_both_files_may_differ(capsys):
    write_two()
    text = Path("other").read_text()
    Path("other").write_text(text.replace("response_after", "mine"))
    judge = "def f(prompts, completions, **_):\n    return [x.count('a') for x in completions]\n"
    Path("here.py").write_text(judge)
    call(win_rate, ". other --other_column mine --judge here:f")
    assert "win rate                 100.0% " in capsys.readouterr().out
    call(win_rate, ". other --other_column mine --judge here:f --tie 1")
    assert "win rate                 50.0% " in capsys.readouterr().out


def test_an_interval_leaves_out_draws_without_a_rate():
    def rate(pairs, drawn):
        return np.where(drawn[..., 0] > 0, 0.7, np.nan)

    found = win_rate.estimate(rate, make_pairs([1, 0, 1], np.ones(3), np.ones(3)))
    assert (found.rate, found.low, found.high) == (0.7, 0.7, 0.7)


# --- the worked example ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def examples():
    """Both examples. No token of theirs may depend on rounding, which is far below 5e-6."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "searchsorted", torch.searchsorted)
        fork_tools.refuse_near_draws(5e-6)
        return worked_example.work_out()


def differences(shown, expected):
    """Where two pages differ, with more than a unit of a number's last digit."""
    assert NUMBER.sub("#", shown) == NUMBER.sub("#", expected)
    found = []
    for text, other in zip(NUMBER.findall(shown), NUMBER.findall(expected), strict=True):
        _, _, decimals = text.partition(".")
        error = abs(float(text) - float(other))
        if error > 1.5 * 10 ** -len(decimals):
            found.append(f"{text} is {other}")
    return found


def test_lines_between_two_are_those_after_the_first(tmp_path, monkeypatch):
    (tmp_path / "f.py").write_text('def f():\n    """F."""\n    b\n    a\n    b\n    c\n')
    monkeypatch.setattr(worked_example, "ROOT", tmp_path)
    assert worked_example.code_of("f.py", "f", "a", "b") == "```python\na\nb\n```"


def test_the_pages_have_the_numbers_and_the_code_of_the_scripts(examples):
    ppo, rloo = examples
    parts = {
        "docs/ppo.md": worked_example.ppo_parts(ppo),
        "docs/rloo.md": worked_example.rloo_parts(rloo),
    }
    for page, own in parts.items():
        shown = (ROOT / page).read_text()
        assert len(NUMBER.findall(shown)) > 20
        assert shown.count("```python") >= 3
        expected = worked_example.written(shown, own)
        assert differences(shown, expected) == []


def test_what_the_sentences_say_of_the_numbers_is_true(examples):
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
    assert ppo.tokens == rloo.tokens[:2]
    advantages = rloo.batch.advantages
    assert advantages.sum().abs() < 1e-4
    is_cut_off = (rloo.after["ratio"] - 1) * advantages.sign() > 0.2
    assert is_cut_off.tolist() == [False, True, True, True]
