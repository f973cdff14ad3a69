"""benchmark/tools/plot.py draws what metrics.jsonl has, of finished runs and of running ones."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fork_tools import PPO, REWARD, RLOO, plain
from run_tools import read_lines, to_lines

from benchmark.tools import plot

LINE = '{"train/loss": 1}\n'


def main(patch: pytest.MonkeyPatch, *words: str | Path) -> None:
    patch.setattr(sys, "argv", ["plot.py", *map(str, words)])
    plot.main()


def make_run(folder: Path, scores: list[float]) -> Path:
    """A run that has logged these scores so far."""
    folder.mkdir(parents=True)
    rows = [{"objective/scores": score} for score in scores]
    (folder / "metrics.jsonl").write_text(to_lines(*rows))
    return folder


def test_curves_of_real_runs_are_their_metrics() -> None:
    runs = {}
    for name, script in (("policy", PPO), ("reward model", REWARD)):
        folder = plain(script, 1) / "out"
        runs[name] = plot.read_metrics(folder)
    figure = plot.plot(runs, window=1)
    panels = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_ylabel() for panel in panels] == list(plot.PANELS.values())
    for panel, metric in zip(panels, plot.PANELS, strict=True):
        of_reward = metric.startswith("train/")
        rows = read_lines(plain(REWARD if of_reward else PPO, 1) / "out/metrics.jsonl")
        drawn = panel.get_lines()[-1]
        assert drawn.get_label() == ("reward model" if of_reward else "policy")
        steps = [row.get("episode", number) for number, row in enumerate(rows, 1)]
        assert of_reward == (steps[0] == 1)
        np.testing.assert_allclose(drawn.get_xdata(), steps)
        np.testing.assert_allclose(drawn.get_ydata(), [row[metric] for row in rows])


def test_rloo_is_drawn_beside_ppo_over_its_episodes() -> None:
    runs = {}
    for script in (PPO, RLOO):
        folder = plain(script, 1) / "out"
        runs[script] = plot.read_metrics(folder)
    shared = [
        "objective/scores",
        "objective/kl",
        "policy/entropy",
        "objective/length",
    ]
    for panel in plot.plot(runs, window=1).axes:
        if panel.get_ylabel() in [plot.PANELS[metric] for metric in shared]:
            xs = [line.get_xdata().tolist() for line in panel.get_lines()]
            assert xs == [[4, 8, 12, 16]] * 4


def test_the_mean_of_neighbours_is_not_shifted_at_the_ends() -> None:
    means = plot.smooth(np.array([0.0, 3.0, 6.0, 0.0]), window=3)
    assert means.tolist() == [1.5, 3.0, 3.0, 3.0]


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"objective/scores": 3')
    assert [row["objective/scores"] for row in plot.read_metrics(folder)] == [1.0, 2.0]


def test_a_picture_of_two_runs_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    one = make_run(tmp_path / "a" / "run", [1.0])
    other = make_run(tmp_path / "b" / "run", [2.0, 3.0])
    begun = make_run(tmp_path / "c" / "run", [])
    assert plot.names_of([one, other]) == [str(one), str(other)]
    assert plot.names_of([one]) == ["run"]
    refused = tmp_path / "d"
    refused.mkdir()
    (refused / "lock").touch()
    main(monkeypatch, one, other, begun, refused, "--out", tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'two.png'}\n"
    lines = [f"plot.py: {folder} has made no update yet\n" for folder in (begun, refused)]
    assert printed.err == "".join(lines)


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
def test_what_cannot_be_drawn_is_one_line(
    line: str | None, words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    if line is not None:
        Path("empty/metrics.jsonl").write_text(line)
    with pytest.raises(SystemExit) as error:
        main(monkeypatch, *words.split())
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
