"""Small faults in a run's folder, in what it prints, and in what it sends to Weights & Biases."""

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.tracking
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from run_tools import call, read_lines, to_lines
from safetensors.torch import load_file
from tiny_models import VOCABULARY, save_model

import ppo_rlhf
import rloo_rlhf

PPO, RLOO, REWARD = SCRIPTS = ("ppo_rlhf", "rloo_rlhf", "train_reward")
BOTH = "--base_model model --query_dataset queries.jsonl --output_dir out --checkpoint_every 2"
BOTH += " --start_text none --end_text none --truncate_token none --query_length 6"
BOTH += " --response_length 5 --batch_size 4 --micro_batch_size 4"
POLICY = f"{BOTH} --reward_fn {__name__}:lengths --eval_queries 4 --num_minibatches 2"
POLICY += " --num_epochs 1 --total_episodes 12"
LABELS = f"{BOTH} --label_dataset labels.jsonl --num_labels 12"
WORDS = {
    PPO: POLICY.split(),
    RLOO: f"{POLICY} --rloo_k 2".split(),
    REWARD: f"{LABELS} --normalization_samples 4".split(),
}
MODEL = {PPO: "policy", RLOO: "policy", REWARD: "reward_model"}
UPDATES = 3


class Stop(Exception):
    """Ends a run as a kill does: without a checkpoint."""


def lengths(queries: list[str], responses: list[str]) -> list[float]:
    """A --reward_fn."""
    return [float(len(response)) for response in responses]


class Tracker(GeneralTracker):
    """Stands in for accelerate's tracker of Weights & Biases, and notes what it is sent."""

    name = "wandb"
    requires_logging_directory = False
    main_process_only = True
    runs: list["Tracker"] = []

    def __init__(self, project: str, **settings: Any) -> None:
        super().__init__()
        self.project = project
        self.settings = settings
        self.config = {}
        self.logged = []
        self.tables = {}
        self.is_finished = False
        self.runs.append(self)

    @property
    def tracker(self) -> "Tracker":
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = dict(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, dict(values)))

    def log_table(self, name: str, dataframe: pd.DataFrame, **_: Any) -> None:
        assert name not in self.tables
        self.tables[name] = dataframe

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model, queries and labels."""
    folder = tmp_path_factory.mktemp("kit")
    torch.manual_seed(0)
    save_model(folder / "model", "gpt2")
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{rng.randrange(1, VOCABULARY)}" for _ in range(count))

    queries = [{"query": text(rng.randint(2, 6))} for _ in range(24)]
    (folder / "queries.jsonl").write_text(to_lines(*queries))
    labels = []
    for _ in range(16):
        samples = {"sample0": text(4), "sample1": text(5)}
        labels.append({"query": text(3), **samples, "best": rng.randrange(2)})
    (folder / "labels.jsonl").write_text(to_lines(*labels))
    return folder


@pytest.fixture
def folder(kit: Path, tmp_path: Path) -> Path:
    """A folder of the test's own, with the same files."""
    own = tmp_path / "work"
    own.mkdir()
    for path in kit.iterdir():
        (own / path.name).symlink_to(path)
    return own


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tracker]]:
    """What runs send, a tracker each."""
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    monkeypatch.setattr(Tracker, "runs", [])
    yield Tracker.runs


def checkpoints(out: Path) -> list[str]:
    """Names of the checkpoints of a run."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_tracked_run_sends_all_and_leaves_its_checkpoints(
    name: str, folder: Path, trackers: list[Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS[name], "--track", "--wandb_project", "birds"]
    if name != REWARD:
        words += ["--eval_every", "2"]
    call(f"{name}.py", words, folder, monkeypatch)
    out = folder / "out"
    assert checkpoints(out) == ["0000002", "0000003"]
    record = json.loads((out / "args.json").read_text())
    (tracker,) = trackers
    assert tracker.project == "birds"
    run_id = tracker.settings.pop("id")
    assert len(run_id) == 8
    assert tracker.settings == {"name": "out", "resume": "allow", "save_code": True}
    assert json.loads(json.dumps(tracker.config)) == record["args"]
    assert tracker.is_finished

    lines = read_lines(out / "metrics.jsonl")
    assert tracker.logged[:UPDATES] == list(enumerate(lines, start=1))
    last = [] if name != REWARD else [(None, json.loads((out / "results.json").read_text()))]
    assert tracker.logged[UPDATES:] == last
    columns = list(read_lines(out / "samples.jsonl")[0])
    tables = {"samples": columns}
    if name == REWARD:
        assert columns == ["query", "responses", "best", "rewards"]
    else:
        sampled = ["response", "score", "kl", "found_end"]
        after = [f"{column}_after" for column in sampled]
        assert columns == ["query", *sampled, *after]
        tables["samples/0000002"] = ["query", *sampled]
    assert {key: list(table.columns) for key, table in tracker.tables.items()} == tables

    # A run that goes on keeps its id.
    call(f"{name}.py", [*words, "--resume"], folder, monkeypatch)
    assert trackers[1].settings["id"] == run_id
    assert trackers[1].settings["resume"] == "allow"


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, [[], [], ["3"]]),
        (1, [["1"], ["1", "2"], ["2", "3"]]),
        (2, [[], ["2"], ["2", "3"]]),
        (3, [[], [], ["3"]]),
        (4, [[], [], ["3"]]),
    ],
)
def test_checkpoints_are_left_after_these_updates(
    name: str, every: int, expected: list[list[str]], tmp_path: Path
) -> None:
    script = importlib.import_module(name)
    args = script.Args(output_dir=str(tmp_path / "out"), checkpoint_every=every)
    found = []
    with script.Run(Accelerator(cpu=True), "tiny", args) as run:
        for _ in run.updates(UPDATES):
            run.end_update()
            found.append([path.name.lstrip("0") for path in run.checkpoints()])
    assert found == expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its third update, after a checkpoint and a line of metrics too much."""
    call(f"{name}.py", WORDS[name], folder, monkeypatch)
    whole = folder / "whole"
    (folder / "out").rename(whole)
    script = importlib.import_module(name)
    plain = script.Run.end_update

    def end(run: Any) -> None:
        if run.state["update"] == 2:
            raise Stop
        plain(run)

    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "end_update", end)
        with pytest.raises(Stop):
            call(f"{name}.py", WORDS[name], folder, monkeypatch)
    out = folder / "out"
    assert len(read_lines(out / "metrics.jsonl")) == 3
    assert checkpoints(out) == ["0000002"]
    with pytest.raises(script.UserError, match="has a run"):
        call(f"{name}.py", WORDS[name], folder, monkeypatch)
    call(f"{name}.py", [*WORDS[name], "--resume"], folder, monkeypatch)
    assert checkpoints(out) == ["0000002", "0000003"]

    expected = read_lines(whole / "metrics.jsonl")
    found = read_lines(out / "metrics.jsonl")
    assert len(found) == UPDATES
    for theirs, ours in zip(expected, found, strict=True):
        for key in ("seconds", "peak_memory_gb", *[k for k in theirs if "per_second" in k]):
            del theirs[key], ours[key]
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    theirs = load_file(whole / MODEL[name] / "model.safetensors")
    ours = load_file(out / MODEL[name] / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.allclose(theirs[key], ours[key], atol=1e-5) for key in theirs)


@pytest.mark.parametrize("name", [PPO, RLOO])
def test_old_samples_go_when_a_finished_run_is_extended(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(f"{name}.py", WORDS[name], folder, monkeypatch)
    script = importlib.import_module(name)
    samples = folder / "out/samples.jsonl"
    assert samples.exists()

    def kill(run: Any, *rest: Any, **named: Any) -> None:
        raise Stop

    monkeypatch.setattr(script.Run, "log", kill)
    words = [*WORDS[name], "--resume", "--total_episodes", "16"]
    with pytest.raises(Stop):
        call(f"{name}.py", words, folder, monkeypatch)
    assert not samples.exists()
    assert len(read_lines(folder / "out/metrics.jsonl")) == UPDATES


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_folder_with_samples_and_no_checkpoint_is_not_written_to(
    name: str, tmp_path: Path
) -> None:
    script = importlib.import_module(name)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    run = script.Run(Accelerator(cpu=True), "tiny", script.Args(output_dir=str(tmp_path)))
    with pytest.raises(script.UserError, match="no checkpoint to go on from"):
        run.__enter__()
    assert (tmp_path / "samples.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_tilde_is_the_home_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    home = tmp_path / "home"
    (home / "model").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    assert script.local_path("~/model") == str(home / "model")
    assert script.local_path("~/none") == "~/none"

    Accelerator(cpu=True)
    args = script.Args(output_dir="~/out")
    script.choose_folder("tiny", args)
    assert args.output_dir == str(home / "out")
    with script.Run(Accelerator(cpu=True), "tiny", args):
        pass
    words = ["--output_dir", "~/out", "--resume"]
    with pytest.raises(script.UserError, match="was started with --seed 1"):
        call(f"{name}.py", [*words, "--seed", "2"], tmp_path, monkeypatch, "parse_args")
    _, resumed = call(f"{name}.py", words, tmp_path, monkeypatch, "parse_args")
    assert resumed.resume
    with pytest.raises(script.UserError, match="has a run"):
        script.choose_folder("tiny", script.Args(output_dir="~/out"))


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_three_samples_are_printed_as_they_are(script: Any, capsys: pytest.CaptureFixture) -> None:
    rows = []
    for i in range(4):
        texts = {"query": f"[red]q{i}", "response": f"[/x] {i}", "response_after": f"{{b}}\\n[ {i}"}
        rows.append(texts | {"score": i, "score_after": 2 * i})
    script.show_samples(pd.DataFrame(rows), "runs/here")
    printed = capsys.readouterr().out
    for i in range(3):
        texts = f"query: [red]q{i}\nbefore: [/x] {i}\nafter: {{b}}\\n[ {i}\n"
        assert texts in printed
    assert "[red]q3" not in printed
    assert "mean score 1.50 before, 3.00 after; see runs/here/samples.jsonl\n" in printed


def test_held_out_labels_are_written_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(f"{REWARD}.py", WORDS[REWARD], folder, monkeypatch)
    rows = read_lines(folder / "out/samples.jsonl")
    labels = read_lines(folder / "labels.jsonl")[12:]
    assert len(rows) == len(labels) == 4
    for row, label in zip(rows, labels, strict=True):
        assert row["query"] == label["query"]
        assert row["responses"] == [label["sample0"], label["sample1"]]
        assert row["best"] == label["best"]
    accuracy = json.loads((folder / "out/results.json").read_text())["test/accuracy"]
    right = [row["rewards"][row["best"]] == max(row["rewards"]) for row in rows]
    assert accuracy == pytest.approx(sum(right) / 4)
