"""A run that is killed or interrupted goes on with --resume to the bits of one left alone, or says why not."""

import json
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import fork_tools
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import MODEL, PPO, REWARD, RLOO, SCRIPTS, UPDATES, WORDS, Evil, copy, kit, plain, run, run_on
from run_tools import call, read_lines, start

import ppo_rlhf
from tf_adam import AdamTF

# Moments inside the writing of something: part of a line in the log of fork_tools.strike, which of such lines, signal.
# A run's first update is the second time that metrics.jsonl is opened; what comes then lets the next update end.
KILL = signal.SIGKILL
INTERRUPT, TERMINATE = (("open out/metrics.jsonl", 2, x) for x in (signal.SIGINT, signal.SIGTERM))
CHAINS = {
    (PPO, 1): [
        ("os.rename out/args.tmp", 1, KILL),
        ("open out/metrics.jsonl", 2, KILL),
        ("half of out/checkpoints/0000001/model", 1, KILL),
        ("half of out/checkpoints/0000001/model_1", 1, KILL),
        ("half of out/checkpoints/0000001/optimizer", 1, KILL),
        ("sync", 1, KILL),
        INTERRUPT,
        ("os.rename out/checkpoints/0000003/state.tmp", 1, KILL),
        ("os.remove out/checkpoints/0000002", 2, KILL),
        ("half of out/policy", 1, KILL),
        ("half of out/policy_ema", 1, KILL),
        ("half of out/critic", 1, KILL),
        ("open out/samples.jsonl", 1, KILL),
    ],
    (RLOO, 1): [TERMINATE, ("save out/checkpoints/0000003/optimizer", 1, KILL), ("sync", 2, KILL)],
    (REWARD, 1): [INTERRUPT, ("open out/checkpoints/0000004/state.tmp", 1, KILL), ("open out/results.json", 1, KILL)],
    (PPO, 2): [TERMINATE, ("half of out/checkpoints/0000003/optimizer", 1, KILL)],
    (RLOO, 2): [("os.rename out/checkpoints/0000002/state.tmp", 1, KILL)],
    (REWARD, 2): [("half of out/checkpoints/0000003/model", 1, KILL)],
}


def results(folder: Path) -> dict[str, bytes]:
    """All that a finished run leaves in `folder`/out, but for args.json and its checkpoints."""
    files = [file for file in (folder / "out").rglob("*") if file.is_file()]
    named = {str(file.relative_to(folder / "out")): file.read_bytes() for file in files}
    return {name: data for name, data in named.items() if not name.startswith(("args.json", "checkpoints"))}


def contents(folder: Path) -> dict[str, Any]:
    return {str(file): (file.stat().st_mtime_ns, file.is_file() and file.read_bytes()) for file in folder.rglob("*")}


def checkpoints(folder: Path) -> list[str]:
    """Those that are complete."""
    return sorted(path.parent.name for path in folder.glob("out/checkpoints/*/state.json"))


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
            newest = "out/checkpoints/0000002/state.json"
            assert errors.endswith(f"{script}: stopped by a signal; the newest checkpoint: {newest}\n")
            assert "Traceback" not in errors and checkpoints(folder) == ["0000002"]
            assert len(read_lines(folder / "out/metrics.jsonl")) == 2
        with (folder / "out/metrics.jsonl").open("a") as file:
            file.write('{"half of a li')
    log = tmp_path / "unpickled"
    assert run_on(world, script, words, folder, (fork_tools.log_unpickling, str(log)))[0] == 0
    assert results(folder) == results(plain(script, world))
    assert checkpoints(folder)[-2:] == checkpoints(plain(script, world)) == ["0000003", "0000004"]
    assert not log.exists(), log.read_text()


def test_a_checkpoint_gets_its_last_file_when_all_else_is_on_the_disk() -> None:
    """So that a power failure is no worse than a kill; and old checkpoints go last of all."""
    for script in SCRIPTS:
        log = (plain(script, 1) / "log").read_text().splitlines()
        for update in range(1, UPDATES + 1):
            path = f"out/checkpoints/{update:07d}"
            at = log.index("sync out", max(i for i, line in enumerate(log) if f"half of {path}" in line))
            assert log[at + 1 : at + 3] == [f"open {path}/state.tmp", f"os.rename {path}/state.tmp"]
        assert log.index("os.rename out/checkpoints/0000003/state.tmp") < log.index("os.rmdir out/checkpoints/0000001")
        assert log[-1] == "open out/samples.jsonl", "the file that marks a finished run"


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    process = start([str(ROOT / PPO)], tmp_path)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (-signal.SIGINT, "", "")


def parse(script: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return call(script, words, folder, monkeypatch, "parse_args")[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_finished_once_more_by_its_own_script_alone(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(plain(script, 1), tmp_path)
    before, other = contents(folder), RLOO if script == PPO else PPO
    with pytest.raises(ValueError, match="--output_dir out, --resume False: a new folder, or both, would do"):
        parse(script, WORDS[script], folder, monkeypatch)
    with pytest.raises(ValueError, match=f"--output_dir out: is a run of {script}"):
        parse(other, ["--output_dir", "out", "--resume"], folder, monkeypatch)
    with pytest.raises(ValueError, match="--output_dir None, --resume True: .* both, would do"):
        parse(script, ["--resume"], folder, monkeypatch)
    assert contents(folder) == before
    assert run(script, [*WORDS[script], "--resume"], folder)[0] == 0
    assert results(folder) == results(plain(script, 1))


def test_settings_come_from_the_run_and_flags_given_beside_it_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    old = json.loads((plain(PPO, 1) / "out/args.json").read_text())["args"]
    args = parse(PPO, ["--output_dir", "out", "--resume"], plain(PPO, 1), monkeypatch)
    assert vars(args) == old | {"resume": True}
    words = ["--output_dir", "out", "--resume", "--kl_target", "none", "--no-whiten_rewards", "--seed", "1"]
    args = parse(PPO, words, plain(PPO, 1), monkeypatch)
    assert vars(args) == old | {"resume": True, "kl_target": None, "whiten_rewards": False}
    line = capsys.readouterr().err.splitlines()[-1]
    assert "kl_target None (was 6.0), whiten_rewards False (was True)" in line and "seed" not in line


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """Opens the run in tmp_path/out, of three updates on four weights with two checkpoints, or a copy of it."""
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
    return go_on


@pytest.mark.parametrize("kind", ["cut", "empty", "evil", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "state.json"])
def test_a_damaged_newest_checkpoint_stops_and_nothing_is_deleted(
    kind: str, name: str, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no state.json is none: a kill can leave it."""
    monkeypatch.chdir(tmp_path)
    folder = copy(tmp_path / "out", tmp_path)
    file = folder / "checkpoints/0000003" / name
    file.write_bytes({"cut": file.read_bytes()[:-9], "evil": pickle.dumps(Evil(), 2)}.get(kind, b""))
    if kind == "missing":
        file.unlink()
    before = contents(folder / "checkpoints")
    if (kind, name) != ("missing", "state.json"):
        with pytest.raises(ValueError, match=r"^--resume True: .*/0000003 is damaged; without it .* would do$"):
            small(folder)
    assert contents(folder / "checkpoints") == before
    assert not (tmp_path / "marker").exists()
    shutil.rmtree(folder / "checkpoints/0000003")
    assert small(copy(folder, tmp_path / "again"))["update"] == 2


def test_two_checkpoints_are_kept_and_a_folder_has_one_run_of_as_many_processes(small: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["0000002", "0000003"]
    assert small(copy(folder, tmp_path))["update"] == 3
    with pytest.raises(ValueError, match=f"--output_dir {folder}: another run is at work there; .* would do"):
        small(folder)
    state = (two := copy(folder, tmp_path / "two")) / "checkpoints/0000003/state.json"
    state.write_text(state.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ValueError, match=f"^--resume: {two} is a run of 2 processes; as many would do$"):
        small(two)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metrics.jsonl").write_text("not ours")
    with pytest.raises(FileExistsError, match="metrics.jsonl"):
        small(tmp_path / "other", resume=False)
    assert (tmp_path / "other/metrics.jsonl").read_text() == "not ours"
