"""A run that is killed or interrupted goes on with --resume to the bits of one left alone, or says why not."""

import importlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import MODEL, PPO, REWARD, RLOO, SCRIPTS, UPDATES, WORDS, begin, copy, end, kit, plain, run, run_on
from run_tools import read_lines, start

import ppo_rlhf
from tf_adam import AdamTF

# Moments inside the writing of something: part of a line in the log of fork_tools.strike, which of such lines, signal.
# A run's first update is the third time that metrics.jsonl is opened; what comes then lets the next update end.
KILL, INTERRUPT, TERMINATE = (
    signal.SIGKILL,
    *(("open out/metrics.jsonl", 3, x) for x in (signal.SIGINT, signal.SIGTERM)),
)
CHAINS = {
    (PPO, 1): [
        ("os.rename out/args.tmp", 1, KILL),
        ("open out/metrics.jsonl", 3, KILL),
        ("half of out/checkpoints/0000001.tmp/model", 1, KILL),
        ("half of out/checkpoints/0000001.tmp/optimizer", 1, KILL),
        ("sync", 1, KILL),
        INTERRUPT,
        ("os.rename out/checkpoints/0000003.tmp", 1, KILL),
        ("os.remove out/checkpoints/0000002", 2, KILL),
        ("half of out/MODEL.tmp", 1, KILL),
        ("os.rename out/MODEL.tmp", 1, KILL),
        ("open out/curves.png", 1, KILL),
        ("os.rename out/samples.tmp", 1, KILL),
    ],
    (RLOO, 1): [TERMINATE, ("save out/checkpoints/0000003.tmp/optimizer", 1, KILL), ("sync", 3, KILL)],
    (REWARD, 1): [
        INTERRUPT,
        ("open out/checkpoints/0000004.tmp/state.json", 1, KILL),
        ("open out/results.json", 1, KILL),
    ],
    (PPO, 2): [TERMINATE, ("half of out/checkpoints/0000003.tmp/optimizer", 1, KILL)],
    (RLOO, 2): [("os.rename out/checkpoints/0000002.tmp", 1, KILL)],
    (REWARD, 2): [("half of out/checkpoints/0000003.tmp/model", 1, KILL)],
}


def results(folder: Path) -> dict[str, bytes]:
    """All that a finished run leaves in `folder`/out, but for args.json and its checkpoints."""
    files = [file for file in (folder / "out").rglob("*") if file.is_file()]
    named = {str(file.relative_to(folder / "out")): file.read_bytes() for file in files}
    return {name: data for name, data in named.items() if not name.startswith(("args.json", "checkpoints"))}


def contents(folder: Path) -> dict[str, Any]:
    return {str(file): (file.stat().st_mtime_ns, file.is_file() and file.read_bytes()) for file in folder.rglob("*")}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("out/checkpoints/*") if not path.suffix)


@pytest.mark.parametrize(("script", "world"), CHAINS)
def test_kills_and_interruptions_change_no_bit(script: str, world: int, tmp_path: Path) -> None:
    """The same command every time, whatever there is; after every kill half a line stands in metrics.jsonl too."""
    folder, words = copy(kit(), tmp_path), [*WORDS[script], "--resume"]
    for pattern, count, number in CHAINS[script, world]:
        every = [] if number == KILL else ["--checkpoint_every", "0"]
        change = (fork_tools.strike, pattern.replace("MODEL", MODEL[script]), count, number)
        code, _, errors = run_on(world, script, [*words, *every], folder, change)
        assert code == (-KILL if number == KILL else 130), (pattern, errors)
        assert not (folder / "out/samples.jsonl").exists()
        if number != KILL:
            assert errors.endswith(f"{script}: stopped by a signal; the newest checkpoint: out/checkpoints/0000002\n")
            assert "Traceback" not in errors and checkpoints(folder) == ["0000002"]
            assert len(read_lines(folder / "out/metrics.jsonl")) == 2
        with (folder / "out/metrics.jsonl").open("a") as file:
            file.write('{"half of a li')
    log = tmp_path / "unpickled"
    assert run_on(world, script, words, folder, (fork_tools.log_unpickling, str(log)))[0] == 0
    assert results(folder) == results(plain(script, world))
    assert checkpoints(folder)[-2:] == checkpoints(plain(script, world)) == ["0000003", "0000004"]
    assert not log.exists(), log.read_text()


def test_kills_at_random_moments_change_no_bit(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """By the clock, and at operations on the run's files in turn; `pytest --kills 30` is the long version."""
    rng = random.Random()
    for i in range(pytestconfig.getoption("--kills")):
        script, folder = SCRIPTS[i % 3], copy(kit(), tmp_path / str(i))
        changes = [(fork_tools.strike, "out/", rng.randrange(1, 70))] if i % 2 else []
        process = begin(script, [*WORDS[script], "--resume"], folder, *changes)
        if not changes:
            process.join(rng.uniform(0, 2))
            process.kill()
        assert end(process, folder)[0] in (0, -KILL)
        code, _, errors = run(script, [*WORDS[script], "--resume"], folder)
        assert code == 0, errors
        assert results(folder) == results(plain(script, 1))


def test_what_gets_its_name_is_on_the_disk_before() -> None:
    """So that a power failure is no worse than a kill; and old checkpoints go last of all."""
    for script in SCRIPTS:
        log = (plain(script, 1) / "log").read_text().splitlines()
        for name in [f"checkpoints/{update:07d}" for update in range(1, UPDATES + 1)] + [MODEL[script]]:
            at = log.index(f"os.rename out/{name}.tmp")
            assert log[at - 1] == "sync out" and f"out/{name}.tmp" in log[at - 2]
            assert not [line for line in log[at:] if f"out/{name}.tmp" in line][1:]
        assert log.index("os.rename out/checkpoints/0000003.tmp") < log.index("os.rmdir out/checkpoints/0000001")
        assert log[-1] == "os.rename out/samples.tmp", "the file that marks a finished run"


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    process = start([str(ROOT / PPO)], tmp_path)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (-signal.SIGINT, "", "")


# What may not go on


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """PPO's as if killed right before samples.jsonl was written: checkpoints 3 and 4 of 4 updates are there."""
    folder = copy(plain(PPO, 1), tmp_path)
    (folder / "out/samples.jsonl").unlink()
    return folder


def parse(script: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *words])
    return importlib.import_module(script[:-3]).parse_args()[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_left_alone(script: str, monkeypatch: Any, capsys: Any) -> None:
    folder = plain(script, 1)
    before = contents(folder)
    with pytest.raises(SystemExit, match="^0$"):
        parse(script, [*WORDS[script], "--resume"], folder, monkeypatch)
    assert capsys.readouterr() == ("", "--resume: out is finished\n")
    with pytest.raises(ValueError, match="--output_dir out, --resume False: a new folder, or both, would do"):
        parse(script, WORDS[script], folder, monkeypatch)
    other = RLOO if script == PPO else PPO
    with pytest.raises(ValueError, match=f"--resume: out is a run of {script}; one of this script would do"):
        parse(other, ["--output_dir", "out", "--resume"], folder, monkeypatch)
    with pytest.raises(ValueError, match="--output_dir None, --resume True: .* both, would do"):
        parse(script, ["--resume"], folder, monkeypatch)
    assert contents(folder) == before


def test_settings_come_from_the_run_and_flags_given_beside_it_are_named(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = json.loads((unfinished / "out/args.json").read_text())["args"]
    args = parse(PPO, ["--output_dir", "out", "--resume"], unfinished, monkeypatch)
    assert vars(args) == old | {"resume": True}
    words = ["--output_dir", "out", "--resume", "--kl_target", "none", "--no-whiten_rewards", "--seed", "1"]
    args = parse(PPO, words, unfinished, monkeypatch)
    assert vars(args) == old | {"resume": True, "kl_target": None, "whiten_rewards": False}
    line = capsys.readouterr().err.splitlines()[-1]
    assert "kl_target None (was 6.0), whiten_rewards False (was True)" in line and "seed" not in line


def test_another_number_of_processes_is_refused(unfinished: Path) -> None:
    before = {name: data for name, data in contents(unfinished).items() if "checkpoints" in name}
    code, _, errors = run_on(2, PPO, [*WORDS[PPO], "--resume"], unfinished)
    assert (code, errors.splitlines()[-1]) == (2, f"{PPO}: --resume: out is a run of 1 processes; as many would do")
    assert {name: data for name, data in contents(unfinished).items() if "checkpoints" in name} == before


@pytest.fixture
def small(tmp_path: Path) -> SimpleNamespace:
    """The folder of a run of three updates on four weights, two checkpoints in it; `go_on(folder)` opens a copy."""
    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(3, 1)
    net, optimizer = accelerator.prepare(net, AdamTF(net.parameters(), lr=0.1))

    def go_on(to: Path, **changes: Any) -> dict[str, Any]:
        args = ppo_rlhf.Args(output_dir=str(to), **{"resume": True} | changes)
        return ppo_rlhf.open_run(accelerator, args, "tiny", {"update": 0, "kl_coef": 0.1})[1]

    state, folder = go_on(tmp_path / "out", resume=False), tmp_path / "out"
    for update in (1, 2, 3):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        ppo_rlhf.save_checkpoint(accelerator, folder, state | {"update": update})
    return SimpleNamespace(folder=folder, go_on=go_on, optimizer=optimizer)


class Evil:
    """Whoever unpickles this makes the folder `marker`."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("marker",)


def spoil(kind: str, file: Path) -> None:
    data = {"cut": file.read_bytes()[:-9], "empty": b"", "evil": pickle.dumps(Evil(), 2), "missing": b""}[kind]
    file.write_bytes(data)
    if kind == "missing":
        file.unlink()


@pytest.mark.parametrize("kind", ["cut", "empty", "evil", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "state.json"])
def test_a_damaged_newest_checkpoint_stops_and_nothing_is_deleted(
    kind: str, name: str, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy(small.folder, tmp_path)
    spoil(kind, folder / "checkpoints/0000003" / name)
    before = contents(folder / "checkpoints")
    with pytest.raises(ValueError, match=r"--resume: .*checkpoints/0000003 is damaged; without it .* would do$"):
        small.go_on(folder)
    assert contents(folder / "checkpoints") == before
    assert not (tmp_path / "marker").exists()
    shutil.rmtree(folder / "checkpoints/0000003")
    assert small.go_on(copy(folder, tmp_path / "again"))["update"] == 2


def test_metrics_that_lack_lines_are_refused_and_nothing_is_deleted(small: Any, tmp_path: Path) -> None:
    for i, text in enumerate((None, "", "{}\n{}\n", "{}\n{}\n{}")):
        folder = copy(small.folder, tmp_path / str(i))
        (folder / "metrics.jsonl").unlink() if text is None else (folder / "metrics.jsonl").write_text(text)
        before = contents(folder / "checkpoints")
        with pytest.raises(ValueError, match=r"--resume: .*metrics.jsonl lacks lines; 3 would do"):
            small.go_on(folder)
        assert contents(folder / "checkpoints") == before


def test_two_checkpoints_are_kept_and_a_folder_has_one_run(small: Any, tmp_path: Path) -> None:
    assert sorted(path.name for path in (small.folder / "checkpoints").iterdir()) == ["0000002", "0000003"]
    assert small.go_on(copy(small.folder, tmp_path))["update"] == 3
    with pytest.raises(ValueError, match=f"--output_dir {small.folder}: another run is at work there; .* would do"):
        small.go_on(small.folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metrics.jsonl").write_text("not ours")
    with pytest.raises(FileExistsError, match="metrics.jsonl"):
        small.go_on(tmp_path / "other", resume=False)
    assert (tmp_path / "other/metrics.jsonl").read_text() == "not ours"
