"""The folder of a run: kills and interruptions, who may use it, its checkpoints and records."""

import contextlib
import importlib
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import time
import typing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fork_tools
import numpy as np
import pydantic
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from conftest import ROOT
from filelock import FileLock
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, UPDATES, WORDS, copy, is_copy, kit, plain, run
from run_tools import assert_same_metrics, call, read_lines, to_lines
from safetensors.torch import load_file

import ppo_rlhf
import train_reward
from plumbing import data as data_module
from plumbing import launch
from plumbing import run as run_module
from plumbing.launch import UserError

# Moments inside the writing of something: what happens; part of a line in the log of
# fork_tools.strike, and which of such lines. metrics.jsonl is opened when it is made and after each
# update. A signal then lets the update end.
NUMBERS = {"kill": signal.SIGKILL, "full": 0, "int": signal.SIGINT, "term": signal.SIGTERM}
STATUS = {"kill": -signal.SIGKILL, "full": 1, "int": 130, "term": 130}
TERMINATE = ("open out/metrics.jsonl", 2, signal.SIGTERM)
CHAINS = {
    (PPO, 1): """
full 1 open out/args.tmp
kill 1 os.rename out/args.tmp
kill 2 open out/metrics.jsonl
full 1 open out/metrics.jsonl
kill 1 half of out/checkpoints/0000001/model
full 1 save out/checkpoints/0000001/model
kill 1 half of out/checkpoints/0000001/optimizer
int 2 open out/metrics.jsonl
kill 1 os.rename out/checkpoints/0000003/state.tmp
kill 2 os.remove out/checkpoints/0000002
kill 1 half of out/policy
full 1 save out/policy
kill 1 half of out/critic
kill 1 open out/samples
""",
    (RLOO, 1): """
term 2 open out/metrics.jsonl
full 1 half of out/checkpoints/0000002/optimizer
kill 1 save out/checkpoints/0000003/optimizer
full 1 open out/samples
""",
    (REWARD, 1): """
int 2 open out/metrics.jsonl
kill 1 open out/checkpoints/0000004/state.tmp
kill 1 open out/results.tmp
full 1 open out/results.tmp
""",
    (PPO, 2): """
term 2 open out/metrics.jsonl
kill 1 half of out/checkpoints/0000003/optimizer
""",
    (RLOO, 2): "kill 1 os.rename out/checkpoints/0000002/state.tmp",
    (REWARD, 2): "kill 1 half of out/checkpoints/0000003/model",
}
HANGS = """
import os
import time
calls = []
def f(completions, **_):
    calls.append(1)
    if len(calls) == 2:  # the first is that of the evaluation
        open("hangs", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.1)
    return [0.0] * len(completions)
"""
BY_FUNCTION = {
    PPO: "--reward_model none --critic shared --reward_fn".split(),
    RLOO: "--reward_model none --reward_fn".split(),
}
# It returns a value in one of its calls, and goes to another folder. Call 0 is the evaluation's,
# before the run has a folder; then come the updates and the last evaluation.
FUNCTION = """
import itertools
import os
calls = itertools.count()
def f(completions, **_):
    os.chdir("/")
    return [float("{value}") if next(calls) == {call} else 0.5] * len(completions)
"""
# It gives up on processes that take long. The pool terminates them at the end of the block.
POOL = """
import contextlib, multiprocessing, time
def f(completions, **_):
    start = time.monotonic()
    late = contextlib.suppress(multiprocessing.TimeoutError)
    with multiprocessing.get_context("fork").Pool(2) as pool, late:
        pool.map_async(time.sleep, [60, 60]).get(timeout=0.1)
    assert time.monotonic() - start < 30
    return [0.5] * len(completions)
"""
# For whoever changes a script
LOST = (
    "The resumed run differs from one left alone. What the loop carries from update to update must "
    "be in run.state, random numbers must follow from seed and update"
)
NOT_EMPTY = "^--output_dir .*out is not empty: choose another, or --resume if it has checkpoints"


@pytest.fixture(autouse=True)
def has_a_folder(request):
    """A copy whose main makes no Run leaves what it likes."""
    callspec = getattr(request.node, "callspec", None)
    script = callspec.params.get("script", "") if callspec else ""
    if is_copy(script) and "Run(" not in (ROOT / script).read_text():
        pytest.skip(f"{script} makes no Run: it has no checkpoints, and cannot be resumed")


@pytest.fixture
def folder(tmp_path):
    """A space in its name needs quotes in the command that goes on."""
    return copy(kit(), tmp_path).rename(tmp_path / "a folder")


def refuse(folder, script, words, says):
    """The script ends with this error, and changes nothing."""
    before = contents(folder)
    with pytest.raises(UserError, match=says):
        call(script, words, folder)
    assert contents(folder) == before


def contents(folder):
    """Times and bytes of all files, but for the lock."""
    found = {}
    for file in folder.rglob("*"):
        if file.name != "lock":
            found[str(file)] = (file.stat().st_mtime_ns, file.is_file() and file.read_bytes())
    return found


def assert_same_results(folder, expected):
    """All that finished runs leave is the same, but args.json, checkpoints, seconds and memory."""
    assert_same_metrics(folder / "out", expected / "out", LOST)

    found, wanted = ({}, {})
    for place, files in ((folder / "out", found), (expected / "out", wanted)):
        for file in place.rglob("*"):
            name = str(file.relative_to(place))
            if file.is_file() and not name.startswith(("args.json", "checkpoints", "metrics")):
                files[name] = file.read_bytes()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == [], LOST


def checkpoints(folder):
    """Those that are complete."""
    return sorted(path.parent.name for path in folder.glob("out/checkpoints/*/state.json"))


# --- kills and signals ----------------------------------------------------------------------------
def test_an_error_of_the_gpu_is_not_called_a_full_disk():
    with pytest.raises(torch.OutOfMemoryError), launch.writing("out"):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("what", ["model.safetensors", "optimizer.bin"])
def test_a_file_that_the_system_cuts_off_is_one_line_and_loses_nothing(what, folder):
    """By a real limit, not a simulated one: safetensors and torch have errors of their own."""
    if what == "optimizer.bin" and torch.__version__ < (2, 10):
        pytest.skip("torch.save of torch 2.8 and 2.9 does not notice it: see docs/running.md")
    expected = plain(PPO, 1)
    size = (expected / "out/checkpoints/0000004" / what).stat().st_size
    words = [*WORDS[PPO], "--resume"]
    limit = (fork_tools.limit_file_sizes, str(size - 1))
    code, _, errors = run(PPO, words, folder, limit)
    says = rf"{PPO}: .*/out/checkpoints/0000001 cannot be written: .* \(is the disk full\?\)"
    assert (code, len(checkpoints(folder))) == (1, 0)
    assert re.fullmatch(says, errors.splitlines()[-1]), errors
    assert "Traceback" not in errors
    fork_tools.succeed(PPO, words, folder)
    assert_same_results(folder, expected)


@pytest.mark.parametrize(("script", "world"), CHAINS)
def test_kills_and_interruptions_change_no_bit(script, world, folder):
    """Nor does a full disk. After every end half a line stands in metrics.jsonl, too."""
    words = [*WORDS[script], "--resume"]
    log = folder / "out/metrics.jsonl"
    for line in CHAINS[script, world].strip().splitlines():
        kind, count, pattern = line.split(maxsplit=2)
        is_signal = STATUS[kind] == 130
        every = ["--checkpoint_every", "0"] if is_signal else []
        change = (fork_tools.strike, pattern, int(count), NUMBERS[kind])
        code, printed, errors = run(script, [*words, *every], folder, change, world=world)
        assert code == STATUS[kind], (line, errors)
        assert not (folder / "out/samples.jsonl").exists()
        if kind == "full":
            says = rf"{script}: .*/out.* cannot be written: .*No space left on device.*"
            assert re.fullmatch(says, errors.splitlines()[-1]), errors
        if is_signal:
            says, command = printed.splitlines()[-2:]
            assert says == "stopped by a signal; to continue, run with python or your launcher:"
            given = [str(ROOT / script), *words, *every, "--resume", "--output_dir", folder / "out"]
            assert command == shlex.join(map(str, given))
            assert "Traceback" not in errors
            made = len(read_lines(log))
            assert checkpoints(folder) == [f"{made:07d}"]
        if log.exists():
            with log.open("a") as file:
                file.write('{"half of a li')
        for place in (folder / "out/checkpoints/0000001", folder / "out/policy"):
            if place.exists():  # what safetensors leaves, which renames its file at the end
                (place / ".tmpA1b2C3").write_text("half of the weights")
    unpickled = folder.with_name("unpickled")
    change = (fork_tools.log_unpickling, str(unpickled))
    fork_tools.succeed(script, words, folder, change, world=world)
    assert_same_results(folder, plain(script, world))
    assert checkpoints(folder)[-2:] == checkpoints(plain(script, world)) == ["0000003", "0000004"]
    assert not unpickled.exists(), unpickled.read_text()


def test_a_ctrl_c_ends_a_run_that_hangs_if_it_is_pressed_again(folder):
    """Launchers and job managers may send each signal twice, at once; SIGTERM always waits."""
    (folder / "hanging.py").write_text(HANGS)
    process = fork_tools.begin(PPO, [*WORDS[PPO], *BY_FUNCTION[PPO], "hanging:f"], folder)
    while process.is_alive() and not (folder / "hangs").exists():
        time.sleep(0.02)
    process.join(0.2)
    signals = [signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    for number, wait in zip(signals, (0.1, 0.5, 0.8, 0.1, 30), strict=True):
        assert process.is_alive(), "the first ones wait for the update's end"
        os.kill(process.pid, number)
        process.join(wait)
    code, _, errors = fork_tools.end(process, folder)
    assert code == 1
    *_, ending, says, command = errors.splitlines()
    assert ending == "KeyboardInterrupt"
    assert says.startswith("The run is saved with 0 complete updates; to continue, run ")
    assert command.startswith(f"{ROOT / PPO} ")


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_run_of_a_billion_episodes_starts_at_once(script, folder):
    """Nothing is drawn before it is needed, and nothing has an entry for every episode."""
    begun = time.monotonic()
    words = [*WORDS[script], "--total_episodes", "2000000000"]
    code, _, errors = run(script, words, folder, (fork_tools.strike, *TERMINATE))
    assert (code, checkpoints(folder)) == (130, ["0000001"]), errors
    assert time.monotonic() - begun < 30


# --- numbers gone wrong ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("script", "world", "micro_batch", "updates"),
    [
        (PPO, 1, 11, 2),
        (PPO, 2, 4, 1),
        (RLOO, 1, 2, 0),
        (REWARD, 1, 6, 2),
    ],
)
def test_a_gradient_that_is_no_number_stops_before_it_reaches_a_file(
    script, world, micro_batch, updates, folder
):
    """That of this micro-batch, on the first process, after so many updates."""
    nan = (fork_tools.give_nan, micro_batch)
    code, _, errors = run(script, WORDS[script], folder, nan, world=world)
    says = "gradient_norm is nan, its limit 1.8e+308: the loss is not finite, or --lr is too high;"
    if script == REWARD:
        says = "the gradient is not finite: a smaller --lr may help"
    assert errors.splitlines()[-1].startswith(f"{script}: {says}")
    assert (code, "Traceback" in errors) == (1, False)
    rows = read_lines(folder / "out/metrics.jsonl")  # with those of the update that went wrong
    norms = [x for row in rows for name, x in row.items() if name.endswith("gradient_norm")]
    assert [math.isfinite(x) for x in norms] == [True] * updates + [False]
    assert checkpoints(folder) == [f"{i:07d}" for i in range(1, updates + 1)]
    assert not (folder / "out" / fork_tools.MODEL[script]).exists()


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_first_kl_that_is_not_rounding_stops_a_run(script, folder, monkeypatch):
    module = importlib.import_module(script[:-3])
    set_logprobs = module.set_logprobs

    def changed(batch, *args):
        set_logprobs(batch, *args)
        batch.ref_logprobs += 0.002

    monkeypatch.setattr(module, "set_logprobs", changed)
    with pytest.raises(UserError, match="^objective/kl is -0.01, its limit 0.005: "):
        call(script, WORDS[script], folder)
    assert len(read_lines(folder / "out/metrics.jsonl")) == 1
    assert checkpoints(folder) == []


@pytest.mark.parametrize(
    ("script", "value", "number", "count", "updates"),
    [
        (PPO, "nan", 0, 2, 0),
        (RLOO, "nan", 2, 4, 1),
        (PPO, "-inf", 2, 4, 1),
        (PPO, "nan", 5, 2, UPDATES),
        (RLOO, "nan", 5, 4, UPDATES),
        (RLOO, "0.5", 0, 4, UPDATES),
    ],
)
def test_a_reward_function_that_fails_late_or_moves(
    script, value, number, count, updates, folder, monkeypatch
):
    """What is no number stops the run, and nothing is lost. No file moves to another folder."""
    (folder / "rewards.py").write_text(FUNCTION.format(value=value, call=number))
    words = [*WORDS[script], *BY_FUNCTION[script], "rewards:f"]
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    expected = contextlib.nullcontext()
    fails = value != "0.5"
    if fails:
        says = re.escape(f"{count} finite floats, not [{', '.join([value] * count)}]")
        expected = pytest.raises(UserError, match=rf"^--reward_fn must return {says}(\n|$)")
    with expected:
        call(script, words, folder)
    assert (folder / "out/samples.jsonl").exists() == (not fails)
    assert (folder / "out/policy").exists() == (updates == UPDATES)
    assert (folder / "out").exists() == (updates > 0), "the first evaluation is before the run"
    assert checkpoints(folder) == [f"{i:07d}" for i in range(1, updates + 1)][-2:]
    if updates:
        assert len(read_lines(folder / "out/metrics.jsonl")) == updates


def test_an_error_of_scoring_is_told_if_its_checkpoint_fails_too(tmp_path):
    """Before the first update is complete there is nothing to save."""
    args = ppo_rlhf.Args(output_dir=str(tmp_path / "out"))
    run_of_args = run_module.Run(Accelerator(cpu=True), ppo_rlhf.FILE, args, 1, [], {})
    run_of_args.start()
    with pytest.raises(ValueError, match="^no answer\n") as error, run_of_args.keeping_updates():
        raise ValueError("no answer")
    assert error.value.__notes__[0].startswith("The run is saved with 0 complete updates; to conti")
    assert checkpoints(tmp_path) == []
    run_of_args.state["update"] = 1
    says = r"^scoring failed \(ValueError\('no answer'\)\), and then: no room$"
    with (
        mock.patch.object(run_of_args, "save_checkpoint", side_effect=UserError("no room")),
        pytest.raises(UserError, match=says),
        run_of_args.keeping_updates(),
    ):
        raise ValueError("no answer")


class TimedOut(BaseException):
    """As func_timeout and asyncio have them: no Exception, so that user code does not catch it."""


def test_a_judge_that_times_out_in_any_way_loses_no_update(tmp_path):
    args = ppo_rlhf.Args(output_dir=str(tmp_path / "out"))
    run_of_args = run_module.Run(Accelerator(cpu=True), ppo_rlhf.FILE, args, 4, [], {})
    run_of_args.start()
    for made, ending in ((1, TimedOut), (2, SystemExit), (3, KeyboardInterrupt)):
        run_of_args.state["update"] = made
        with pytest.raises(ending) as error, run_of_args.keeping_updates():
            raise ending
        assert error.value.__notes__[0].startswith(f"The run is saved with {made} complete updates")
        assert checkpoints(tmp_path)[-1] == f"{made:07d}"


def test_processes_of_a_reward_function_end_when_it_terminates_them(folder):
    """With the run's handler of signals they would go on, and it would wait for them."""
    (folder / "rewards.py").write_text(POOL)
    words = [*WORDS[RLOO], *BY_FUNCTION[RLOO], "rewards:f"]
    fork_tools.succeed(RLOO, words, folder)


def test_sampling_that_fails_on_one_process_ends_the_run(folder):
    """The other one waits for it in the middle of a response, so they do not save together."""
    place = "    for t in range(noise.shape[1]):\n"
    fails = "        if t == 9 and len(noise) == 2 and PartialState().process_index:\n"
    change = (place, f"{place}{fails}            raise MemoryError\n")
    script = fork_tools.changed_copy(PPO, folder, change, name="mine.py")
    words = [*WORDS[PPO], "--mask_truncated", "--response_length", "16", "--eval_queries", "3"]
    statuses = [code for code, *_ in fork_tools.run_two(script, words, folder)]
    assert statuses == [1, 1]
    assert (folder / "out/metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("script", [PPO, REWARD])
def test_a_closed_output_does_not_end_a_run(script, folder):
    """As when the program that reads it has gone. No bar is drawn: it would not bear that."""
    refuse = (fork_tools.refuse_to_print, "mean score" if script == PPO else "test/accuracy")
    code, _, errors = run(script, WORDS[script], folder, refuse)
    assert code == 0, errors
    assert "it/s" not in errors
    assert_same_results(folder, plain(script, 1))


# --- who may use a folder -------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_that_is_resumed_writes_the_same_files(script, world, tmp_path):
    """It makes no update, but evaluates again; also if it is to have fewer episodes than it had."""
    fewer = "--total_episodes 8" if script != REWARD and world == 1 else ""
    folder = copy(plain(script, world), tmp_path)
    before = contents(folder / "out/checkpoints")
    (folder / "out" / Path(script).name).unlink()  # as if the script had another name now
    words = [*WORDS[script], "--resume", *fewer.split()]
    fork_tools.succeed(script, words, folder, world=world)
    assert_same_results(folder, plain(script, world))
    assert contents(folder / "out/checkpoints") == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_not_overwritten(script, tmp_path):
    """Nor by another script that resumes it, nor if its checkpoints are gone."""
    folder = copy(plain(script, 1), tmp_path)
    refuse(folder, script, WORDS[script], NOT_EMPTY)
    for other in {PPO, RLOO, REWARD} - {script}:
        words = [*WORDS[other], "--resume"]
        refuse(folder, other, words, "^--[a-z_]+ .*: .* was started with ")
    shutil.rmtree(folder / "out/checkpoints")
    (folder / "out/checkpoints/0000004").mkdir(parents=True)
    refuse(folder, script, [*WORDS[script], "--resume"], NOT_EMPTY)
    copied = folder / "out/checkpoints/0000004_best"  # a user's copy alone is none to go on from
    copied.mkdir()
    (copied / "state.json").write_text("{}")
    refuse(folder, script, [*WORDS[script], "--resume"], NOT_EMPTY)


def test_what_prints_with_its_address_is_no_other_data(tmp_path, monkeypatch):
    """An image in a table's column, for example."""
    load_queries = train_reward.load_queries
    load_labels = train_reward.load_labels

    def queries_with_objects(*args):
        held_out, queries = load_queries(*args)
        for query in queries:
            query.columns["image"] = object()
        return held_out, queries

    def labels_with_objects(*args):
        labels, held_out = load_labels(*args)
        for label in labels + held_out:
            label.row["image"] = object()
        return labels, held_out

    monkeypatch.setattr(train_reward, "load_queries", queries_with_objects)
    monkeypatch.setattr(train_reward, "load_labels", labels_with_objects)
    call(REWARD, [*WORDS[REWARD], "--resume"], copy(plain(REWARD, 1), tmp_path))


@pytest.mark.parametrize(
    ("script", "name", "count"),
    [(PPO, "queries", 6), (RLOO, "queries", 4), (REWARD, "queries", 8), (REWARD, "labels", 16)],
)
def test_a_run_does_not_go_on_with_other_data(script, name, count, tmp_path):
    """PPO and RLOO compare the queries of the evaluation and of the first update."""
    rows = read_lines(kit() / f"{name}.jsonl")
    order = range(len(rows))
    if name == "queries":
        order = np.random.default_rng([1, data_module.STREAM_QUERIES]).permutation(len(rows))
    for i in (order[count], order[count - 1]):
        folder = copy(plain(script, 1), tmp_path / str(i))
        changed = [*rows]
        changed[i] = rows[i - 1]
        (folder / f"{name}.jsonl").write_text(to_lines(*changed))
        if i == order[count]:
            call(script, [*WORDS[script], "--resume"], folder)
    refuse(folder, script, [*WORDS[script], "--resume"], "^--resume with other data than the run ")


@pytest.mark.parametrize(
    "name", ["notes.txt", "policy/model.safetensors", "metrics.jsonl", "samples.jsonl"]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_with_other_files_is_refused(script, name, folder):
    """Also where --base_model is a folder below it: its policy/ would take that one's place."""
    shutil.copytree(folder / "model", folder / "out/policy")
    (folder / "out" / name).write_text("not ours")
    for words in ([], ["--resume"]):
        words = [*WORDS[script], *words, "--base_model", "out/policy"]
        refuse(folder, script, words, NOT_EMPTY)


def test_of_two_runs_that_start_at_once_in_a_folder_one_is_refused(folder):
    (folder / "hanging.py").write_text(HANGS)
    words = [*WORDS[RLOO], *BY_FUNCTION[RLOO], "hanging:f", "--resume"]
    processes = {name: fork_tools.begin(RLOO, words, folder, name=name) for name in ("one", "two")}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(x.is_alive() for x in processes.values()):
        time.sleep(0.02)
    (folder / "go").touch()
    ends = [fork_tools.end(process, folder, name) for name, process in processes.items()]
    codes = [code for code, _, _ in ends]
    assert sorted(codes) == [0, 1], ends
    refused = ends[codes.index(1)][2].splitlines()[-1]
    assert re.fullmatch(f"{RLOO}: .*out/lock.* could not be acquired.*", refused)
    assert len(read_lines(folder / "out/metrics.jsonl")) == UPDATES
    assert (folder / "out/samples.jsonl").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_that_another_run_has_used_while_the_models_loaded_is_left_as_it_is(
    script, folder, monkeypatch
):
    """The first look at the folder is before that: no checkpoint of the other run is adopted."""
    found = {}

    def set_seed(seed):
        shutil.copytree(plain(script, 1) / "out", folder / "out")
        found.update(contents(folder / "out"))

    monkeypatch.setattr(importlib.import_module(script[:-3]), "set_seed", set_seed)
    with pytest.raises(UserError, match=NOT_EMPTY):
        call(script, [*WORDS[script], "--lr", "0.5"], folder)
    assert contents(folder / "out") == found


def test_a_resumed_run_writes_to_no_other_place(tmp_path):
    """As a link in somebody's folder could ask it to."""
    folder = copy(plain(RLOO, 1), tmp_path)
    other = tmp_path / "other"
    other.write_text("not ours")
    for name in ("metrics.tmp", "args.tmp", "samples.tmp", "checkpoints/0000005"):
        (folder / "out" / name).symlink_to(other)
    run(RLOO, [*WORDS[RLOO], "--resume", "--total_episodes", "20"], folder)
    assert other.read_text() == "not ours"


@pytest.mark.parametrize(("name", "path"), [("~/out", "home/out"), ("link", "link")])
def test_a_tilde_is_the_home_folder_and_a_link_keeps_its_name(name, path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    args = ppo_rlhf.Args(output_dir=name)
    chosen = run_module.choose_folder(ppo_rlhf.FILE, "tiny", args)
    assert chosen == f"{tmp_path}/{path}"
    (tmp_path / "new").mkdir()
    Path(chosen).mkdir(parents=True, exist_ok=True)
    Path(chosen, "notes.txt").touch()
    with pytest.raises(UserError, match=f" {tmp_path}/{path} is not empty"):
        run_module.choose_folder(ppo_rlhf.FILE, "tiny", ppo_rlhf.Args(output_dir=name))
    monkeypatch.setattr(run_module, "broadcast_object_list", lambda _: ["of the first process"])
    args.output_dir = None  # and the clocks of processes differ
    chosen = run_module.choose_folder(ppo_rlhf.FILE, "tiny", args)
    assert chosen == f"{tmp_path}/of the first process"


# --- settings -------------------------------------------------------------------------------------
def values_of(kind):
    found = [3, 0.25, False, True, (0.5, 0.5), "another", *typing.get_args(kind)]
    for inner in typing.get_args(kind):
        found += values_of(inner)
    return found


def another(args, name):
    """A valid value of the field that is not its default; None if none is known."""
    for value in values_of(typing.get_type_hints(args)[name]):
        with contextlib.suppress(pydantic.ValidationError):
            changed = vars(args()) | {name: value}
            found = getattr(pydantic.TypeAdapter(args).validate_python(changed), name)
            if found != getattr(args(), name):
                return found
    return None


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_setting_is_refused_on_resume_or_takes_effect(script, tmp_path):
    """Also one that a copy of a script adds."""
    take_effect = """track checkpoint_every lr critic_lr micro_batch_size gradient_checkpointing
        max_kl total_episodes""".split()
    module = importlib.import_module(script[:-3])
    old = vars(module.Args())
    (tmp_path / "lock").touch()
    (tmp_path / "args.json").write_text(json.dumps({"args": old}))
    for name in old.keys() - {"resume", "output_dir"}:
        value = another(module.Args, name)
        assert value is not None or is_copy(script), f"no value of {name} is known"
        args = module.Args(**{"output_dir": str(tmp_path), "resume": True, name: value})
        if name in take_effect or value is None:
            run_module.choose_folder(module.FILE, "tiny", args)
            assert getattr(args, name) == value
        else:
            says = re.escape(f"--{name} {value}: {tmp_path} was started")
            with pytest.raises(UserError, match=f"^{says} with "):
                run_module.choose_folder(module.FILE, "tiny", args)


def test_what_an_older_run_does_not_record_had_its_default(tmp_path):
    """A copy gets a new flag; or --reward_model was not given, and the newest one is recorded. One
    that has lost a flag does not go on."""
    old = vars(ppo_rlhf.Args(reward_model="newest"))
    before = old.pop("temperature")
    (tmp_path / "lock").touch()
    (tmp_path / "args.json").write_text(json.dumps({"args": old}))
    args = ppo_rlhf.Args(output_dir=str(tmp_path), resume=True)
    run_module.choose_folder(ppo_rlhf.FILE, "tiny", args)
    args.temperature = before + 1
    says = f"^--temperature {before + 1}: {tmp_path} was started with {before}$"
    with pytest.raises(UserError, match=says):
        run_module.choose_folder(ppo_rlhf.FILE, "tiny", args)
    args.temperature = before
    (tmp_path / "args.json").write_text(json.dumps({"args": old | {"ent_coef": 0.5}}))
    with pytest.raises(UserError, match=f"^--ent_coef None: {tmp_path} was started with"):
        run_module.choose_folder(ppo_rlhf.FILE, "tiny", args)


def test_a_number_may_be_written_in_another_way(tmp_path):
    """Presets have whole numbers where the command line gives floats."""
    args = ppo_rlhf.Args(kl_horizon=10_000.0, resume=True, adam_betas=(0, 0.5))
    settings = vars(args) | {"kl_horizon": 10_000, "adam_betas": [0.0, 0.5]}
    (tmp_path / "args.json").write_text(json.dumps({"args": settings}))
    run_module.check_folder(tmp_path, args)
    args.kl_horizon += 0.5
    with pytest.raises(
        UserError, match=f"^--kl_horizon 10000.5: {tmp_path} was started with 10000$"
    ):
        run_module.check_folder(tmp_path, args)


def test_a_setting_may_be_a_path_and_its_file_may_have_moved(tmp_path):
    """Together with the run's folder, as when a project is moved. What is still there, or has not
    moved in the same way, is another file."""
    new = tmp_path / "new/rm/reward_model"
    old = tmp_path / "old/rm/reward_model"

    def has_moved(value, before, folder="new"):
        settings = {"output_dir": str(tmp_path / "old/run")}
        return run_module.has_moved(value, before, tmp_path / folder / "run", settings)

    assert has_moved(new, old)
    assert has_moved(str(new), str(old))
    assert not has_moved(new, old, folder="old")
    assert not has_moved(new, tmp_path / "old/v2/rm/reward_model")
    assert not has_moved(None, old)
    assert not has_moved("", old)
    assert not has_moved("new/model", "old/model")  # may be on the hub
    old.mkdir(parents=True)
    assert not has_moved(new, old)
    args = ppo_rlhf.Args(output_dir=str(tmp_path / "out"))
    args.own = new
    run_module.Run(Accelerator(cpu=True), ppo_rlhf.FILE, args, 1, [], {}).start()
    assert json.loads((tmp_path / "out/args.json").read_text())["args"]["own"] == str(new)
    args.resume = True
    run_module.check_folder(tmp_path / "out", args)
    args.own = str(new)
    run_module.check_folder(tmp_path / "out", args)
    args.own = str(old)
    with pytest.raises(UserError, match="^--own .*/old/rm/reward_model: "):
        run_module.check_folder(tmp_path / "out", args)


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_finished_run_goes_on_with_more_episodes_as_if_it_had_had_them(script, folder, tmp_path):
    """To the bit, if the rate does not depend on them. Old samples go when it starts."""
    words = [*WORDS[script], "--lr_schedule", "constant", "--resume"]
    more = [*words, "--total_episodes", "24"]
    longer = copy(folder, tmp_path / "longer")
    fork_tools.succeed(script, more, longer)
    fork_tools.succeed(script, words, folder)
    kill = (fork_tools.strike, "open out/metrics.jsonl", 1)
    assert run(script, more, folder, kill)[0] == -signal.SIGKILL
    assert not (folder / "out/samples.jsonl").exists()
    assert len(read_lines(folder / "out/metrics.jsonl")) == UPDATES
    fork_tools.succeed(script, more, folder)
    assert_same_results(folder, longer)


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_run_of_one_update_goes_on_with_more(script, folder):
    """It has read fewer queries than RLOO's K updates would."""
    call(script, [*WORDS[script], "--total_episodes", "4"], folder)
    call(script, [*WORDS[script], "--total_episodes", "8", "--resume"], folder)
    assert len(read_lines(folder / "out/metrics.jsonl")) == 2


def test_what_may_change_takes_effect(tmp_path, monkeypatch, capsys):
    folder = copy(plain(PPO, 1), tmp_path)
    forward = mock.Mock(wraps=ppo_rlhf.forward_response)
    monkeypatch.setattr(ppo_rlhf, "forward_response", forward)
    records = {name: (folder / "out" / name).read_bytes() for name in ("args.json", "tf_adam.py")}
    (folder / "out" / PPO).write_text("another version")
    words = "--resume --total_episodes 24 --lr 0 --critic_lr 0.5 --checkpoint_every 0"
    words = [*WORDS[PPO], *words.split(), "--micro_batch_size", "1"]
    call(PPO, words, folder)
    batches = [noted.args[1] for noted in forward.call_args_list]
    assert {len(batch.contexts) for batch in batches} == {1}
    assert checkpoints(folder) == ["0000004", "0000006"]
    rows = read_lines(folder / "out/metrics.jsonl")
    assert [row["lr"] for row in rows[4:]] == [0, 0]
    was = load_file(folder / "out/checkpoints/0000004/model.safetensors")
    now = load_file(folder / "out/checkpoints/0000006/model.safetensors")
    for name in was:
        assert torch.equal(was[name], now[name]) == name.startswith("lm."), name
    # The records are those of the first part, which is said of what has changed since.
    changed = [x for x in capsys.readouterr().out.splitlines() if "no longer as it was" in x]
    record = folder / "out" / PPO
    assert changed == [f"{PPO} is no longer as it was when the run began, see {record}"]
    assert (folder / "out" / PPO).read_text() == "another version"
    for name, record in records.items():
        assert (folder / "out" / name).read_bytes() == record
    # Beyond --max_kl it stops with a checkpoint, so a higher one goes on exactly.
    says = "^update 7: objective/kl is beyond --max_kl 1e-09, see docs/metrics.md"
    with pytest.raises(UserError, match=says) as error:
        call(PPO, [*words, "--total_episodes", "32", "--max_kl", "1e-9"], folder)
    assert error.value.__notes__[0].startswith("to continue, run with python or your launcher:")
    assert checkpoints(folder) == ["0000006", "0000007"]
    call(PPO, [*words, "--total_episodes", "32"], folder)
    assert len(read_lines(folder / "out/metrics.jsonl")) == 8


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.fixture
def small(tmp_path):
    """Opens the run in tmp_path/out, of three updates on four weights, or a copy of it."""
    accelerator = Accelerator(cpu=True)
    args = ppo_rlhf.Args(adam_eps=1e-3, resume=True, checkpoint_every=1)
    net = torch.nn.Linear(3, 1)
    net, optimizer = accelerator.prepare(net, ppo_rlhf.make_optimizer(net, args))

    def go_on(folder, updates=0, **state):
        args.output_dir = str(folder)
        opened = run_module.Run(accelerator, ppo_rlhf.FILE, args, updates, [5], state)
        opened.start()
        for _ in range(opened.state["update"], updates):
            opened.log({})
            opened.end_update()
        opened.lock.release()
        return opened

    go_on(tmp_path / "out", updates=3)
    return go_on


def test_a_signal_that_is_ignored_stays_ignored(small, tmp_path):
    """As nohup leaves SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    opened = small(tmp_path / "out")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == opened.note_signal


@pytest.mark.parametrize("kind", ["cut", "empty", "evil", "missing", "other"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "state.json"])
def test_a_newest_checkpoint_that_does_not_load_stops_and_stays(
    kind, name, small, tmp_path, monkeypatch
):
    """One that has no state.json is none: a kill can leave it."""
    monkeypatch.chdir(tmp_path)
    folder = copy(tmp_path / "out", tmp_path)
    file = folder / "checkpoints/0000003" / name
    others = {"model.safetensors": safetensors.torch.save({"weight": torch.ones(3, 2)})}
    evil = pickle.dumps(fork_tools.Evil(), 2)
    damaged = {"cut": file.read_bytes()[:-9], "evil": evil}
    file.write_bytes((damaged | {"other": others.get(name, b"{}")}).get(kind, b""))
    if kind == "missing":
        file.unlink()
        (file.parent / "pytorch_model.bin").write_bytes(evil)  # what accelerate turns to
    (file.parent / "random_states_0.pkl").write_bytes(evil)
    before = contents(folder)
    if (kind, name) != ("missing", "state.json"):
        says = "^"  # the library's, with its traceback
        if name != "state.json":
            says = f"^{file.parent} cannot be read; delete it to go on at the one before: "
        with pytest.raises(Exception, match=says):
            small(folder)
        after = contents(folder)
        assert {name: after[name] for name in before} == before
    assert not (tmp_path / "marker").exists()
    shutil.rmtree(folder / "checkpoints/0000003")
    assert small(copy(folder, tmp_path / "again")).state["update"] == 2


def test_the_newest_of_two_checkpoints_is_loaded_by_as_many_processes(small, tmp_path):
    """The newest by its number, whatever the clock says of it. What a copy has added is kept."""
    folder = tmp_path / "out"
    for path in (folder / "checkpoints/0000003", folder / "checkpoints/0000003/state.json"):
        os.utime(path, (1_000_000, 1_000_000))
    state = small(copy(folder, tmp_path), added=0.5).state
    assert (state["update"], state["added"]) == (3, 0.5)
    # The first process has seen no newer one.
    seen = [folder / "checkpoints/0000002"]
    broadcast = mock.patch.object(run_module, "broadcast_object_list")
    with broadcast as given, mock.patch.object(run_module, "check_folder"):
        given.side_effect = [["id"], [seen]]
        assert small(folder).state["update"] == 2
    two = copy(folder, tmp_path / "two")
    state = two / "checkpoints/0000003/state.json"
    state.write_text(state.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(UserError, match="^--resume with other processes than the run began with: "):
        small(two)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, [[], [], [3]]),
        (1, [[1], [1, 2], [2, 3]]),
        (2, [[], [2], [2, 3]]),
        (4, [[], [], [3]]),
    ],
)
def test_checkpoints_are_left_after_these_updates(every, expected, small, tmp_path, monkeypatch):
    """The newest two are complete when the deletion of an old one begins, and that one is none."""
    rmtree = shutil.rmtree
    one = small(tmp_path / "new")
    one.num_updates = 3
    one.args.checkpoint_every = every

    def checked(path):
        complete = run_module.complete_checkpoints(one.folder)
        assert len(complete) == 2
        assert path not in complete
        rmtree(path)

    monkeypatch.setattr(run_module.shutil, "rmtree", checked)
    found = []
    for _ in range(3):
        one.end_update()
        complete = run_module.complete_checkpoints(one.folder)
        found.append([int(path.name) for path in complete])
    assert found == expected


def test_processes_wait_until_a_checkpoint_is_written_and_choose_a_folder_with_its_lock(
    small, tmp_path, monkeypatch
):
    def checked(*_):
        assert FileLock(tmp_path / "new/lock", is_singleton=True).is_locked

    monkeypatch.setattr(run_module, "check_folder", checked)
    one = small(tmp_path / "new")
    written = []

    def wait():
        written.append(len(run_module.complete_checkpoints(one.folder)))

    monkeypatch.setattr(one.accelerator, "wait_for_everyone", wait)
    one.end_update()
    assert written == [0, 1]


def test_a_run_that_begins_in_spite_of_resume_says_so(small, tmp_path, capsys):
    """The folder may be relative, and this another place."""
    capsys.readouterr()
    small(tmp_path / "new")
    says = f"--resume: {tmp_path}/new has no checkpoint, so the run begins\n"
    assert capsys.readouterr().out == says
    small(tmp_path / "out")
    assert "--resume" not in capsys.readouterr().out


def test_a_users_copies_of_checkpoints_are_no_checkpoints(small, tmp_path):
    own = tmp_path / "out/checkpoints"
    copies = ["0000001_good", "best", "00000099", "9", "0000002.bak", "my_best"]
    for name in copies:
        shutil.copytree(own / "0000002", own / name)
    (own / "0000099").mkdir()  # what a kill has left
    small(tmp_path / "out", updates=5)
    assert not (own / "0000099").exists()
    assert checkpoints(tmp_path) == sorted([*copies, "0000004", "0000005"])
    assert len(read_lines(tmp_path / "out/metrics.jsonl")) == 5


# --- state of a copy ------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [{"a": {1: 0.5}}, (1, 2), torch.ones(1)], ids=repr)
def test_state_that_json_would_change_is_an_error_at_once(value, small, tmp_path):
    """At the start, or after the update that made it. A tensor, a copy's mistake: a TypeError."""
    says = "^run.state must survive JSON: texts as keys, |is not JSON serializable$"
    with pytest.raises((UserError, TypeError), match=says):
        small(tmp_path / "other", updates=1, mine=value)
    assert not (tmp_path / "other/metrics.jsonl").exists()
    opened = small(tmp_path / "other")
    opened.args.checkpoint_every = 9
    opened.state["mine"] = value
    with pytest.raises((UserError, TypeError), match=says):
        opened.end_update()


def test_state_that_differs_between_processes_stops_after_the_update(folder):
    place = "        start = update * args.batch_size\n"
    change = (place, f'        run.state["mine"] = rank\n{place}')
    script = fork_tools.changed_copy(REWARD, folder, change, name="mine.py")
    for code, _, errors in fork_tools.run_two(script, WORDS[REWARD], folder):
        says = "mine.py: run.state differs between processes, gather it first: {"
        assert (code, errors.splitlines()[-1].startswith(says)) == (1, True), errors
    assert checkpoints(folder) == []


# --- records --------------------------------------------------------------------------------------
def test_seconds_are_of_one_update_and_memory_is_in_gigabytes(small, tmp_path, monkeypatch):
    """The first ones begin when all is ready."""
    clock = itertools.accumulate(itertools.count(1))  # 1, 3, 6, 10
    fake = SimpleNamespace(monotonic=lambda: next(clock), strftime=time.strftime)
    monkeypatch.setattr(run_module, "time", fake)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5_000_000_000)
    monkeypatch.setattr(run_module, "check_folder", lambda *_: next(clock))
    small(tmp_path / "timed", updates=3)
    rows = read_lines(tmp_path / "timed/metrics.jsonl")
    assert rows == [{"seconds": i, "peak_memory_gb": 5} for i in (3, 4, 5)]


# --- Weights & Biases -----------------------------------------------------------------------------
def test_weights_and_biases_gets_every_metric(folder):
    """Offline; the record is in the run's folder or beside it."""
    silent = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    fork_tools.succeed(REWARD, [*WORDS[REWARD], "--track"], folder, **silent)
    (record,) = folder.rglob("*.wandb")
    data = record.read_bytes()
    for row in read_lines(folder / "out/metrics.jsonl"):
        assert all(name.encode() in data for name in row)


def test_weights_and_biases_without_a_key_leaves_nothing_that_is_in_the_way(folder):
    online = {"WANDB_MODE": "online", "WANDB_API_KEY": ""}
    code, _, errors = run(RLOO, [*WORDS[RLOO], "--track"], folder, **online)
    assert (code, "No API key configured" in errors) == (1, True)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_and_biases_goes_on_with_the_run(script, folder):
    """Every update once, under one id, with its settings; and train_reward.py's results."""
    log = folder.with_name("tracked")
    words = [*WORDS[script], "--track", "--resume"]
    track = (fork_tools.log_tracking, str(log))
    code, _, errors = run(script, words, folder, track, (fork_tools.strike, *TERMINATE))
    assert code == 130, errors
    fork_tools.succeed(script, words, folder, track)
    rows = read_lines(log)
    settings = {"project": "rlhf", "id": rows[0][1]["id"], "name": "out", "resume": "allow"}
    assert len(settings["id"]) == 8
    record = json.loads((folder / "out/args.json").read_text())
    begun = [["init", settings], ["config", record["args"]]]
    metrics = read_lines(folder / "out/metrics.jsonl")
    numbered = [row | {"update": i} for i, row in enumerate(metrics, start=1)]
    first, *others = [["log", None, row] for row in numbered]
    results = [json.loads(path.read_text()) for path in folder.glob("out/results.json")]
    last = [["log", None, row] for row in results]
    assert rows == [*begun, first, *begun, *others, *last, ["finish"]]
