"""A run that is killed, interrupted or damaged and goes on with --resume ends with the same bits as one left alone."""

import dataclasses
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, UPDATES, WORDS, begin, end, run, run_two, strike
from run_tools import TORCHRUN, read_lines
from torch import nn

import ppo_rlhf
from tf_adam import AdamTF

MODEL = {PPO: "policy", RLOO: "policy", REWARD: "reward_model"}
RUN = {PPO: "ppo", RLOO: "rloo", REWARD: "reward"}
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "sha256.json")
# A moment inside the writing of something: part of a line in the log of fork_tools.strike, which of such lines
MOMENTS = [
    ("os.rename out/args.tmp", 1),
    ("os.rename out/metrics.tmp", 1),
    ("open out/metrics.jsonl", 2),
    ("half of save_file out/checkpoints", 1),
    ("optimizer.safetensors", 2),
    ("fsync out/checkpoints", 3),
    ("os.rename out/checkpoints", 1),
    ("fsync out/checkpoints", 6),  # renamed, the folder above not yet on the disk
    ("os.remove out/checkpoints", 2),
    ("os.rmdir out/checkpoints", 1),
    ("open out/samples.jsonl", 1),
    ("fsync out/MODEL.tmp", 2),
    ("os.rename out/MODEL.tmp", 1),
]
CHOSEN = {PPO: MOMENTS, RLOO: MOMENTS[3:12:4], REWARD: MOMENTS[2:13:5]}


def results(folder: Path) -> dict[str, bytes]:
    """All that a finished run leaves in `folder`/out, but for the time and id in args.json, and its checkpoints."""
    files = {file.relative_to(folder / "out"): file for file in (folder / "out").rglob("*") if file.is_file()}
    return {
        str(name): file.read_bytes()
        for name, file in files.items()
        if name.parts[0] not in ("args.json", "checkpoints")
    }


def contents(folder: Path) -> dict[str, Any]:
    return {str(file): (file.stat().st_mtime_ns, file.is_file() and file.read_bytes()) for file in folder.rglob("*")}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out/checkpoints").iterdir())


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork_tools.fill(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def fresh(kit: Path, tmp_path: Path) -> Path:
    """A folder with models and data, and no run."""
    return Path(shutil.copytree(kit, tmp_path / "fresh"))


@pytest.fixture(scope="module")
def plain(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Runs that nothing stops, each in a folder of its own."""
    made = {}
    run(PPO, ["--help"], tmp_path_factory.mktemp("nothing"))  # so that the first run does not wait for the libraries
    for script in SCRIPTS:
        folder, begun = Path(shutil.copytree(kit, tmp_path_factory.mktemp("plain") / "folder")), time.monotonic()
        code, _, errors = run(script, WORDS[script], folder, (strike, "", 0, signal.SIGKILL, f"{folder}-log"))
        assert code == 0, errors
        made[script] = SimpleNamespace(folder=folder, errors=errors, results=results(folder))
        made[script].seconds = time.monotonic() - begun
        made[script].log = Path(f"{folder}-log").read_text().splitlines()
    return made


@pytest.fixture
def unfinished(plain: dict[str, SimpleNamespace], tmp_path: Path) -> dict[str, Path]:
    """The same as if killed right before their models were written: checkpoints 3 and 4 of 4 updates are there."""
    folders = {script: Path(shutil.copytree(plain[script].folder, tmp_path / script)) for script in SCRIPTS}
    for script, folder in folders.items():
        shutil.rmtree(folder / "out" / MODEL[script])
    return folders


def look(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """What find_checkpoint says in that folder to these words."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *words])
    module = importlib.import_module(script[:-3])
    preset, args = module.parse_args(RUN[script])
    return module.find_checkpoint(args, preset)


# Kills


def go_on(script: str, folder: Path, *changes: Any) -> tuple[int, str]:
    """Start or go on; the exit status, and what went to stderr. Only a finished run has a folder that looks so."""
    code, _, errors = run(script, [*WORDS[script], "--resume"], folder, *changes)
    assert (folder / "out" / MODEL[script]).exists() == (code == 0)
    return code, errors


@pytest.mark.parametrize("script", SCRIPTS)
def test_kills_inside_any_writing_change_no_bit(script: str, plain: dict[str, SimpleNamespace], fresh: Path) -> None:
    for pattern, count in CHOSEN[script]:
        code, errors = go_on(script, fresh, (strike, pattern.replace("MODEL", MODEL[script]), count))
        assert code == -signal.SIGKILL, (pattern, errors)
        assert "passed over" not in errors, "what was not complete had the name of a checkpoint"
    assert go_on(script, fresh)[0] == 0
    assert results(fresh) == plain[script].results
    assert checkpoints(fresh) == ["0000003", "0000004"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_kills_at_random_moments_change_no_bit(
    script: str, plain: dict[str, SimpleNamespace], kit: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """By the clock, and inside the writing of checkpoints in turn; `pytest --kills 10` is the long version."""
    kills, rng, i = 0, random.Random(), 0
    while kills < pytestconfig.getoption("--kills"):
        folder, code, i = Path(shutil.copytree(kit, tmp_path / f"{i}")), None, i + 1
        while code != 0:
            is_more, moment = kills < pytestconfig.getoption("--kills"), rng.randrange(1, 40)
            changes = [(strike, "out/checkpoints/", moment)] if is_more and kills % 2 else []
            process = begin(script, [*WORDS[script], "--resume"], folder, *changes)
            if is_more and not changes:
                process.join(rng.uniform(0, plain[script].seconds))
                process.kill()
            code, _, errors = end(process, folder)
            assert code in (0, -signal.SIGKILL), errors
            assert (folder / "out" / MODEL[script]).exists() or code != 0
            kills += code != 0
        assert results(folder) == plain[script].results
        assert len(read_lines(folder / "out/metrics.jsonl")) == UPDATES


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_gets_its_name_is_on_the_disk_before_and_its_name_after(
    script: str, plain: dict[str, SimpleNamespace]
) -> None:
    """So that a power failure is no worse than a kill; and old checkpoints go last of all."""
    log = plain[script].log
    folders = [f"out/checkpoints/{update:07d}" for update in range(1, UPDATES + 1)] + [f"out/{MODEL[script]}"]
    for folder in folders:
        at = log.index(f"os.rename {folder}.tmp")
        names = (
            {file.name for file in (plain[script].folder / folders[-1]).iterdir()} if folder == folders[-1] else FILES
        )
        for name in names:
            last = max(
                i for i in range(at) if log[i].startswith(("open ", "fsync ")) and f"{folder}.tmp/{name}" in log[i]
            )
            assert log[last] == f"fsync {folder}.tmp/{name}"
        assert f"fsync {folder}.tmp" in log[:at]
        assert log[at + 1] == f"fsync {os.path.dirname(folder)}"
        if folder != folders[-1]:
            written = [line for line in log[:at] if line.endswith("out/metrics.jsonl")]
            assert written[-1] == "fsync out/metrics.jsonl"
    first, third = log.index("os.rmdir out/checkpoints/0000001"), log.index("os.rename out/checkpoints/0000003.tmp")
    assert first > third + 1


def test_resume_without_a_run_starts_one_and_says_so(fresh: Path, plain: dict[str, SimpleNamespace]) -> None:
    code, errors = go_on(PPO, fresh)
    assert code == 0
    assert "no complete checkpoint in out; the run starts from the beginning" in errors
    assert results(fresh) == plain[PPO].results


# Interruptions


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_ends_after_the_update_with_a_checkpoint(
    script: str, fresh: Path, plain: dict[str, SimpleNamespace]
) -> None:
    words = [*WORDS[script], "--checkpoint_every", "0"]
    code, _, errors = run(script, words, fresh, (strike, "open out/metrics.jsonl", 1, signal.SIGINT))
    assert code == 130
    assert errors.splitlines()[-1] == (
        f"{script}: interrupted after update 2; the same command with --resume out goes on"
    )
    assert "Traceback" not in errors
    assert checkpoints(fresh) == ["0000002"]
    assert len(read_lines(fresh / "out/metrics.jsonl")) == 2
    code, _, errors = run(script, [*words, "--resume", "out"], fresh)
    assert (code, "beginning" in errors) == (0, False)
    assert results(fresh) == plain[script].results
    assert checkpoints(fresh) == ["0000002"], "--checkpoint_every 0 writes none"


def test_ctrl_c_ends_two_processes_together_and_they_go_on(fresh: Path, kit: Path, tmp_path: Path) -> None:
    """Only one of them gets the signal, and twice, as a launcher repeats it."""
    other = Path(shutil.copytree(kit, tmp_path / "other"))
    assert [code for code, *_ in run_two(PPO, WORDS[PPO], other)] == [0, 0]
    words, change = [*WORDS[PPO], "--checkpoint_every", "3"], (strike, "open out/metrics.jsonl", 1, signal.SIGINT)
    (code, _, errors), (second, _, silent) = run_two(PPO, words, fresh, change, change)
    assert (code, second) == (130, 130)
    assert "interrupted after update 2; the same command with --resume out goes on" in errors
    assert "interrupted" not in silent and "Traceback" not in errors + silent
    assert checkpoints(fresh) == ["0000002"]
    assert [code for code, *_ in run_two(PPO, [*words, "--resume"], fresh)] == [0, 0]
    assert results(fresh) == results(other)
    assert checkpoints(fresh) == ["0000002", "0000003"]
    before = contents(fresh)
    for status, words in ((0, []), (2, ["--lr", "1"])):  # all stop, one speaks, none waits for another
        (code, _, errors), (second, _, silent) = run_two(PPO, [*WORDS[PPO], "--resume", *words], fresh)
        assert (code, second, len(errors.splitlines()), silent) == (status, status, 1, "")
    assert contents(fresh) == before


def test_ctrl_c_under_torchrun(kit: Path, fresh: Path, pytestconfig: pytest.Config) -> None:
    """To all processes at once, as from a terminal; the launcher has its own exit status. Long: `pytest --kills 10`."""
    if pytestconfig.getoption("--kills") < 10:
        pytest.skip("the long version starts a launcher")
    words = [*WORDS[PPO], "--total_episodes", "4000", "--checkpoint_every", "0"]
    command = [sys.executable, *TORCHRUN, str(ROOT / PPO), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, cwd=fresh, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
    metrics = fresh / "out/metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    (name,) = checkpoints(fresh)
    assert f"interrupted after update {int(name)}; the same command with --resume out goes on" in errors
    assert len(read_lines(metrics)) == int(name)
    states = [json.loads((fresh / "out/checkpoints" / name / "state.json").read_text())]
    assert states[0]["update"] == int(name)


def test_a_second_ctrl_c_ends_at_once_but_not_a_launchers_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    before, clock = signal.getsignal(signal.SIGINT), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    try:
        interrupt = ppo_rlhf.Interrupt()
        for clock[0] in (100.0, 100.5, 102.9):
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.time == 100.0
        clock[0] = 103.1
        with pytest.raises(SystemExit) as exit_:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert exit_.value.code == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_before_training_leaves_nothing(fresh: Path) -> None:
    code, _, errors = run(PPO, WORDS[PPO], fresh, (strike, "os.mkdir out", 1, signal.SIGINT))
    assert code == 130
    assert errors.splitlines()[-1] == f"{PPO}: interrupted before training began"
    assert "Traceback" not in errors
    assert not (fresh / "out").exists()


# A full disk

FULL = {
    PPO: [("open out/metrics.jsonl", 3), ("state.json", 1), ("fsync out/checkpoints", 2), ("os.mkdir out/MODEL", 1)],
    RLOO: [("open out/args.tmp", 1), ("sha256.json", 3), ("open out/samples.jsonl", 1)],
    REWARD: [("half of save_file out/checkpoints", 3), ("open out/results.json", 1), ("open out/curves.png", 1)],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_is_one_line_and_the_run_goes_on(
    script: str, fresh: Path, plain: dict[str, SimpleNamespace]
) -> None:
    for pattern, count in FULL[script]:
        code, errors = go_on(script, fresh, (fork_tools.fill_disk, pattern.replace("MODEL", MODEL[script]), count))
        line = errors.splitlines()[-1]
        assert code == 2, (pattern, errors)
        assert line.startswith(f"{script}: error: --output_dir out: cannot be written: [Errno 28] No space"), line
        assert not {"Traceback", "passed over"} & set(re.split(r"(Traceback|passed over)", errors))
    assert go_on(script, fresh)[0] == 0
    assert results(fresh) == plain[script].results


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_loaded(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("queries.jsonl", "queries.jsonl/below/it", "forbidden/run"):
        (fresh / "forbidden").mkdir(exist_ok=True)
        may = {"forbidden": False}  # root may do anything
        monkeypatch.setattr(os, "access", lambda path, mode, may=may: may.get(Path(path).name, True))
        with pytest.raises(SystemExit, match="2"):
            look(PPO, fresh, monkeypatch, *WORDS[PPO], "--output_dir", name)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{PPO}: error: --output_dir {name}: cannot be ") and "would do" in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_or_model_larger_than_files_may_be_is_one_line(
    script: str, fresh: Path, plain: dict[str, SimpleNamespace]
) -> None:
    """The limit of the system stops what is written outside of Python too: safetensors."""
    model = MODEL[script]
    size = (plain[script].folder / "out" / model / "model.safetensors").stat().st_size - 1
    for words, left in ((WORDS[script], "checkpoints/0000001.tmp"), ([*WORDS[script], "--resume"], f"{model}.tmp")):
        every = [] if "1.tmp" in left else ["--checkpoint_every", "0"]
        code, _, errors = run(script, [*words, *every], fresh, (fork_tools.limit_files, size))
        assert code == 2, errors
        line = errors.splitlines()[-1]
        assert line.startswith(f"{script}: error: --output_dir out: cannot be written: ") and "File too large" in line
        assert (fresh / "out" / left).exists() and not (fresh / "out" / model).exists()
    assert go_on(script, fresh)[0] == 0
    assert results(fresh) == plain[script].results


# Damage


def damage(kind: str, name: str, folder: Path) -> None:
    file = folder / "out/checkpoints/0000004" / name
    if kind == "flipped":
        data = bytearray(file.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        file.write_bytes(data)
    elif kind == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif kind == "missing":
        file.unlink()
    elif kind == "emptied":
        os.truncate(file, 0)
    elif kind == "added":
        file.write_bytes(b"x")
    elif kind == "no lines":
        lines = (folder / "out/metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "out/metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:-1])
    else:
        shutil.rmtree(file)


KINDS = [(kind, name) for name in FILES for kind in ("flipped", "truncated", "missing", "emptied")]


@pytest.mark.parametrize(("kind", "name"), [*KINDS, ("added", "a.bin"), ("no lines", ""), ("no files", "")])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    kind: str,
    name: str,
    unfinished: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, newest = unfinished[PPO], Path("out/checkpoints/0000004")
    for _ in range(20 if kind == "flipped" else 1):
        data = {file.name: file.read_bytes() for file in (folder / newest).iterdir()}
        assert look(PPO, folder, monkeypatch, *WORDS[PPO], "--resume")[2] == newest
        damage(kind, name, folder)
        if kind == "no files":
            newest.mkdir()
        _, run_folder, path, state = look(PPO, folder, monkeypatch, *WORDS[PPO], "--resume")
        assert (run_folder, path, state["update"]) == (Path("out"), newest.with_name("0000003"), 3)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{PPO}: warning: checkpoint {newest} is passed over: ")
        if kind == "flipped":
            (newest / name).write_bytes(data[name])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    script: str, unfinished: dict[str, Path], plain: dict[str, SimpleNamespace]
) -> None:
    """And from the one that is asked for; leftovers of a write and the lines of lost updates go."""
    folder = unfinished[script]
    damage("flipped", "optimizer.safetensors", folder)
    shutil.copytree(folder / "out/checkpoints/0000003", folder / "out/checkpoints/0000002.tmp")
    (folder / f"out/{MODEL[script]}.tmp").mkdir()
    (folder / f"out/{MODEL[script]}.tmp/shard-2.safetensors").touch()
    with (folder / "out/metrics.jsonl").open("a") as file:
        file.write('{"half of a li')
    code, errors = go_on(script, folder)
    assert (code, errors.count("passed over")) == (0, 1)
    assert results(folder) == plain[script].results
    assert checkpoints(folder) == ["0000003", "0000004"]
    shutil.rmtree(folder / "out" / MODEL[script])
    code, _, errors = run(script, [*WORDS[script], "--resume", "out/checkpoints/0000003"], folder)
    assert (code, errors.count("passed over")) == (0, 0)
    assert results(folder) == plain[script].results


def test_the_checkpoint_that_is_asked_for_is_taken(
    unfinished: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unfinished[PPO]
    for name, expected in (("out", 4), ("out/", 4), ("out/checkpoints/0000004", 4), ("out/checkpoints/0000003/", 3)):
        assert look(PPO, folder, monkeypatch, *WORDS[PPO], "--resume", name)[3]["update"] == expected
    damage("missing", "state.json", folder)
    assert look(PPO, folder, monkeypatch, *WORDS[PPO], "--resume", "out/checkpoints/0000004")[3]["update"] == 3
    assert "0000004 is passed over" in capsys.readouterr().err
    (folder / "out/checkpoints/0000003/model.safetensors").unlink()
    *_, path, state = look(PPO, folder, monkeypatch, *WORDS[PPO], "--resume")
    assert (path, state) == (None, {})
    assert "there is no complete checkpoint in out" in capsys.readouterr().err


def test_bare_resume_takes_the_newest_run_of_preset_and_seed(
    unfinished: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, words = unfinished[PPO], [word for word in WORDS[PPO] if word not in ("--output_dir", "out")]
    names = ("ppo_rlhf-tiny-1-20260102", "ppo_rlhf-tiny-1-20260101", "ppo_rlhf-tiny-11-2", "rloo_rlhf-tiny-1-3")
    for i, name in enumerate(names):  # newer and newer by time, not by name; the last two are of others
        shutil.copytree(folder / "out", folder / "runs" / name)
        os.utime(folder / "runs" / name / "metrics.jsonl", (1_000_000 + i, 1_000_000 + i))
    _, run_folder, path, _ = look(PPO, folder, monkeypatch, *words, "--resume")
    assert (run_folder, path) == (Path("runs") / names[1], Path("runs") / names[1] / "checkpoints/0000004")
    _, run_folder, path, _ = look(PPO, folder, monkeypatch, *words, "--seed", "7", "--resume", "--track")
    assert (run_folder.name[:17], path) == ("ppo_rlhf-tiny-7-2", None)


# What may not go on


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_left_alone(script: str, plain: dict[str, SimpleNamespace]) -> None:
    folder = plain[script].folder
    before = contents(folder)
    code, printed, errors = run(script, [*WORDS[script], "--resume"], folder)
    assert (code, printed) == (0, "")
    assert errors == f"{script}: --resume out: this run is finished, its model is in out/{MODEL[script]}\n"
    assert contents(folder) == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_but_those_that_may_change_is_held(
    script: str, unfinished: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, folder = importlib.import_module(script[:-3]), unfinished[script]
    args, *_ = look(script, folder, monkeypatch, *WORDS[script], "--resume")
    may = {"output_dir", "resume", "track", "checkpoint_every", "keep_checkpoints", "max_kl", "trust_remote_code"}
    assert set(module.MAY_CHANGE) == may
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        other = {bool: lambda x: not x, str: lambda x: f"{x}x"}.get(
            type(value), lambda x: 1 if x is None else x * 2 + 3
        )
        changed = dataclasses.replace(args, **{field.name: other(value)})
        if field.name in ("output_dir", "resume"):
            continue
        if field.name in may:
            assert module.find_checkpoint(changed, "tiny")[3]["update"] == UPDATES
            continue
        with pytest.raises(SystemExit, match="2"):
            assert module.find_checkpoint(changed, "tiny") is None, field.name
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{script}: error: --resume out: was made with {field.name} {value!r} (now ")
        assert line.endswith(f"; the same would do, only {', '.join(module.MAY_CHANGE)} may change")


def test_the_reward_model_of_the_first_start_is_kept(
    unfinished: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though by now there may be a newer one in runs/."""
    words = [word for word in WORDS[PPO] if word not in ("--reward_model", "judge")]
    args, *_ = look(PPO, unfinished[PPO], monkeypatch, *words, "--resume")
    assert args.reward_model == "judge"


# One checkpoint


def make_net() -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = AdamTF(net.parameters(), lr=0.1)
    return net, SimpleNamespace(optimizer=optimizer, state=optimizer.state)


def learn(net: Any, optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        (net(torch.randn(5, 3, generator=generator)) ** 2).sum().backward()
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_checkpoint_holds_weights_and_optimizer_to_the_bit(steps: int, tmp_path: Path) -> None:
    """Before any step too, where torch would make up a state."""
    (tmp_path / "metrics.jsonl").write_text("{}\n" * 3)
    net, optimizer = make_net()
    learn(net, optimizer, steps, 1)
    accelerator = SimpleNamespace(is_main_process=True)
    path = ppo_rlhf.save_checkpoint(tmp_path, accelerator, net, optimizer, {"update": steps, "kl_coef": 0.1 + 0.2}, 2)
    other, its = make_net()
    nn.init.normal_(other[0].weight)
    state = ppo_rlhf.read_checkpoint(path)
    assert (state["update"], state["kl_coef"]) == (steps, 0.1 + 0.2)
    ppo_rlhf.load_checkpoint(path, state, other, its)
    for _ in range(2):
        for mine, its_own in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its_own)
        learn(net, optimizer, 2, 2)
        learn(other, its, 2, 2)
    groups = [[group["t"] for group in x.optimizer.param_groups] for x in (optimizer, its)]
    assert groups == [[steps + 4]] * 2


def test_the_newest_checkpoints_are_kept_and_none_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n" * 9)
    net, optimizer = make_net()
    accelerator, made = SimpleNamespace(is_main_process=True), tmp_path / "checkpoints"

    def save(update: int, keep: int) -> str:
        path = ppo_rlhf.save_checkpoint(tmp_path, accelerator, net, optimizer, {"update": update}, keep)
        return path.name

    assert [save(update, 2) for update in (1, 2, 3)] == ["0000001", "0000002", "0000003"]
    assert sorted(path.name for path in made.iterdir()) == ["0000002", "0000003"]
    data = (made / "0000003/model.safetensors").read_bytes()
    learn(net, optimizer, 1, 1)
    assert save(3, 2) == "0000003"
    assert (made / "0000003/model.safetensors").read_bytes() == data
    assert save(4, 1) == "0000004"
    assert [path.name for path in made.iterdir()] == ["0000004"]
    net[1].weight.data[0, 0] = float("nan")
    assert save(5, 1) == "0000004"
    assert [path.name for path in made.iterdir()] == ["0000004"]


# What a run shows


def test_without_a_terminal_progress_is_plain_lines(plain: dict[str, SimpleNamespace]) -> None:
    for script in SCRIPTS:
        errors = plain[script].errors
        assert not set("\r\x1b\x08") & set(errors), script
        (line,) = errors.splitlines()
        assert "16/16" in line and "episodes/s" in line


def test_progress_is_one_line_per_minute_with_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    bar = ppo_rlhf.new_bar(1000, 200, False)
    bar._time, bar.start_t, bar.last_print_t = time.time, 1000.0, 1000.0
    for _ in range(39):
        now[0] += 10.0
        ppo_rlhf.show_progress(bar, 10, {"scores": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert all("1.00 episodes/s" in line and "scores=0.5" in line for line in lines)
    assert "260/1000" in lines[0] and "[01:00<12:20" in lines[0]
    hidden = ppo_rlhf.new_bar(1000, 0, True)
    now[0] += 100.0
    ppo_rlhf.show_progress(hidden, 1000, {})
    assert capsys.readouterr().err == ""
