"""Numbers gone wrong stop a run before they do harm; a model is on the disk before anything is
printed."""

import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import fork_tools
import pytest
from fork_tools import MODEL, PPO, REWARD, RLOO, UPDATES, WORDS, copy, kit, plain, run, run_on
from run_tools import call, read_lines, read_metrics


# Processes; the micro-batch whose loss is no number, on the first process; the updates before it
@pytest.mark.parametrize(
    ("script", "world", "call", "updates"),
    [(PPO, 1, 11, 2), (PPO, 2, 4, 1), (RLOO, 1, 2, 0), (REWARD, 1, 6, 2)],
)
def test_a_gradient_that_is_no_number_stops_before_it_reaches_a_file(
    script: str, world: int, call: int, updates: int, tmp_path: Path
) -> None:
    folder = copy(kit(), tmp_path)
    code, _, errors = run_on(world, script, WORDS[script], folder, (fork_tools.give_nan, call))
    says = "gradient_norm is nan, its limit 1.8e+308: the loss is not finite, or --lr is too high;"
    if script == REWARD:
        says = "the gradient is not finite: a smaller --lr may help"
    assert errors.splitlines()[-1].startswith(f"{script}: {says}")
    assert (code, "Traceback" in errors) == (1, False)
    rows = read_lines(folder / "out/metrics.jsonl")  # with those of the update that went wrong
    norms = [x for row in rows for name, x in row.items() if name.endswith("gradient_norm")]
    assert [math.isfinite(x) for x in norms] == [True] * updates + [False]
    assert len([*folder.glob("out/checkpoints/*")]) == updates
    assert not (folder / "out" / MODEL[script]).exists()


REF = "ref_logprobs"
FAR = "^objective/kl is .*, its limit 200: "
NO_ONE = "^first_ratio_error is 0.002, its limit 0.001: "
NO_ZERO = "^objective/kl is -0.01, its limit 0.005: "
OTHER = "^sampling_error is 0.02, its limit 0.01: "
# What is added to log-probabilities of the evaluation and of every update; the KLs, in thousands,
# of those that are logged.
OFF = {
    REF: [0, 0.002],
    "logprobs": [0, 0.002],
}
PASSES = [
    (PPO, {REF: [0, 0, -200]}, FAR, [0, 1]),
    (PPO, {REF: [0, 0, 200]}, FAR, [0, -1]),
    (RLOO, {REF: [0, 0, -200]}, FAR, [0, 1]),
    (RLOO, {REF: [0, 0, 200]}, FAR, [0, -1]),
    (PPO, OFF, NO_ONE, [0]),
    (RLOO, OFF, NO_ONE, [0]),
    (PPO, {REF: [0, 0.002]}, NO_ZERO, [0]),
    (RLOO, {REF: [0, 0.002]}, NO_ZERO, [0]),
    (PPO, {"sampled_logprobs": [0, 0.02]}, OTHER, [0]),
    (RLOO, {"sampled_logprobs": [0, 0.02]}, OTHER, [0]),
]


@pytest.mark.parametrize(("script", "added", "says", "kls"), PASSES)
def test_far_policies_and_first_passes_that_differ_stop_a_run(
    script: str, added: Any, says: str, kls: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    """All that is logged is finite, and the update gets no checkpoint."""
    module = importlib.import_module(script[:-3])
    folder = copy(kit(), tmp_path)
    set_logprobs = module.set_logprobs
    calls = itertools.count()

    def changed(batch: Any, *args: Any) -> None:
        set_logprobs(batch, *args)
        i = next(calls)
        for name, numbers in added.items():
            setattr(batch, name, getattr(batch, name) + numbers[i])

    monkeypatch.setattr(module, "set_logprobs", changed)
    with pytest.raises(module.UserError, match=says):
        call(script, WORDS[script], folder, monkeypatch)
    rows = read_lines(folder / "out/metrics.jsonl")
    assert [round(row["objective/kl"] / 1000) for row in rows] == kls
    assert all(math.isfinite(x) for row in rows for x in row.values())
    made = sorted(path.name for path in folder.glob("out/checkpoints/*"))
    assert made == [f"{i:07d}" for i in range(1, len(kls))]


# Update, errors of the first ratio and of sampling, KL, dtype; whether the run goes on
LIMITS = [
    (0, 9e-4, 9e-3, 9e-3, "fp32", True),
    (0, 1.1e-3, 0.0, 0.0, "fp32", False),
    (3, 1.1e-3, 0.0, 5.0, "fp32", False),
    (3, 0.0, 0.011, 5.0, "fp32", False),
    (0, 0.0, 0.0, 0.011, "fp32", False),
    (0, 0.0, 0.0, -0.011, "fp32", False),
    (0, 9e-3, 0.19, -0.09, "tf32", True),
    (0, 0.011, 0.0, 0.0, "tf32", False),
    (0, 0.0, 0.21, 0.0, "tf32", False),
    (0, 0.019, 0.9, -0.19, "bf16", True),
    (0, 0.021, 0.0, 0.0, "bf16", False),
    (0, 0.0, 1.1, 0.0, "bf16", False),
    (0, 0.0, 0.0, 0.21, "bf16", False),
    (3, math.nan, 0.0, 0.0, "fp32", False),
    (3, 0.0, math.nan, 0.0, "fp32", False),
    (0, 0.0, 0.0, math.nan, "fp32", False),
    (3, 0.0, 0.0, math.nan, "fp32", False),
    (3, 0.0, 0.0, 50.0, "fp32", True),
    (3, 0.0, 0.0, 50.1, "fp32", False),
    (3, 0.0, 0.0, -50.0, "fp32", True),
    (3, 0.0, 0.0, -50.1, "fp32", False),
]
NORMS = [(1e30, True), (math.inf, False), (math.nan, False)]


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_the_limits_of_gradients_ratios_and_kls(script: str) -> None:
    module = importlib.import_module(script[:-3])
    cases = [(*limits, 1.0) for limits in LIMITS]
    cases += [(0, 0.0, 0.0, 0.0, "fp32", goes_on, norm) for norm, goes_on in NORMS]
    for update, ratio, sampling, kl, dtype, goes_on, norm in cases:
        # The first KL is a sum over ten tokens.
        args = module.Args(dtype=dtype, max_kl=50, response_length=10)
        metrics = {
            "gradient_norm": norm,
            "first_ratio_error": ratio,
            "sampling_error": sampling,
            "objective/kl": kl,
        }
        if goes_on:
            module.check_update(update, metrics, args)
        else:
            with pytest.raises(module.UserError, match=" is .*, its limit "):
                module.check_update(update, metrics, args)


# A function whose call of that number is as it says; the first is the evaluation's, before the run
# has a folder, then come the updates and the last evaluation.
FUNCTIONS = """
import os
calls = []
def late(value, number):
    def f(completions, **_):
        calls.append(1)
        return [value if len(calls) == number + 1 else 0.5] * len(completions)
    return f
nan_0 = late(float("nan"), 0)
nan_2 = late(float("nan"), 2)
inf_2 = late(-float("inf"), 2)
nan_5 = late(float("nan"), 5)
def moves(prompts, completions, text):
    os.chdir("/")
    return [0.5] * len(completions)
"""
BY_FUNCTION = "--reward_model none --critic shared --reward_fn".split()
# Function, its message, checkpoints left
CALLS = [
    ("nan_0", r"^--reward_fn must return [24] finite floats, not \[nan, nan", -1),
    ("nan_2", r"^--reward_fn must return 4 finite floats, not \[nan, nan, nan, nan\]$", 1),
    ("inf_2", r"^--reward_fn must return 4 finite floats, not \[-inf, -inf, ", 1),
    ("nan_5", r"^--reward_fn must return [24] finite floats, not \[nan, nan", UPDATES),
    ("moves", "", UPDATES),
]


@pytest.mark.parametrize(("name", "says", "updates"), CALLS)
def test_reward_functions_that_fail_late_or_move(
    name: str, says: str, updates: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """What is no number stops the run, and nothing is lost. No file moves to another folder."""
    for script in (PPO, RLOO):
        folder = copy(kit(), tmp_path / script)
        (folder / "rewards.py").write_text(FUNCTIONS)
        words = WORDS[script]
        if script == RLOO:
            words = [*words, "--reward_model", "none", "--reward_fn", f"rewards:{name}"]
        else:
            words = [*words, *BY_FUNCTION, f"rewards:{name}"]
        monkeypatch.delitem(fork_tools.sys.modules, "rewards", raising=False)
        if says:
            module = importlib.import_module(script[:-3])
            with pytest.raises(module.UserError, match=says):
                call(script, words, folder, monkeypatch)
        else:
            call(script, words, folder, monkeypatch)
        assert (folder / "out/samples.jsonl").exists() == (not says)
        assert (folder / "out/policy").exists() == (not says)
        if updates < 0:  # the evaluation before the run has a folder
            assert not (folder / "out").exists()
            continue
        assert len(read_lines(folder / "out/metrics.jsonl")) == updates
        newest = max(folder.glob("out/checkpoints/*/state.json")).parent.name
        assert newest == f"{updates:07d}"


# --- the end of a run -----------------------------------------------------------------------------
@pytest.mark.parametrize("script", [PPO, REWARD])
def test_the_model_is_on_the_disk_before_results_are_printed(script: str, tmp_path: Path) -> None:
    """As when the program that reads them has gone; no flag is to blame."""
    folder = copy(kit(), tmp_path)
    refuse = (fork_tools.refuse_to_print, "mean score" if script == PPO else "test/accuracy")
    code, _, errors = run(script, WORDS[script], folder, refuse)
    made = []
    for place in (folder, plain(script, 1)):
        files = (place / "out" / MODEL[script]).iterdir()
        made.append({file.name: file.read_bytes() for file in files})
    assert made[0] == made[1]
    assert (folder / "out/samples.jsonl").exists()
    assert code == 1
    assert errors.splitlines()[-1] == f"{script}: [Errno 32] Broken pipe"


# What is written when the disk is full, and which of these writes fails
FULL = [
    (PPO, "open out/args.tmp"),
    (PPO, "save out/checkpoints/0000002/model"),
    (RLOO, "half of out/checkpoints/0000002/optimizer"),
    (PPO, "save out/policy"),
    (RLOO, "open out/samples"),
    (REWARD, "open out/results.tmp"),
    (PPO, "open out/metrics.jsonl"),
]


@pytest.mark.parametrize(("script", "pattern"), FULL)
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_there(
    script: str, pattern: str, tmp_path: Path
) -> None:
    folder = copy(kit(), tmp_path)
    words = [*WORDS[script], "--resume"]
    count = 2 if "metrics" in pattern else 1
    code, _, errors = run(script, words, folder, (fork_tools.strike, pattern, count, 0))
    last = errors.splitlines()[-1]
    assert (code, "Traceback" in errors) == (1, False), last
    assert last == f"{script}: [Errno 28] No space left on device"
    code, _, errors = run(script, words, folder)
    assert code == 0, errors
    expected = plain(script, 1) / "out"
    assert read_metrics(folder / "out") == read_metrics(expected)
    for name in ("samples.jsonl", f"{MODEL[script]}/model.safetensors"):
        assert (folder / "out" / name).read_bytes() == (expected / name).read_bytes()


def test_weights_and_biases_gets_every_metric(tmp_path: Path) -> None:
    """Offline; the record is in the run's folder or beside it."""
    folder = copy(kit(), tmp_path)
    words = [*WORDS[REWARD], "--track"]
    silent = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    code, _, errors = run(REWARD, words, folder, **silent)
    assert code == 0, errors
    (record,) = folder.rglob("*.wandb")
    data = record.read_bytes()
    for row in read_lines(folder / "out/metrics.jsonl"):
        assert all(name.encode() in data for name in row)


def test_weights_and_biases_without_a_key_leaves_nothing_that_is_in_the_way(tmp_path: Path) -> None:
    folder = copy(kit(), tmp_path)
    online = {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "",
    }
    code, _, errors = run(RLOO, [*WORDS[RLOO], "--track"], folder, **online)
    assert (code, "No API key configured" in errors) == (1, True)
    assert run(RLOO, WORDS[RLOO], folder)[0] == 0


def test_weights_and_biases_goes_on_with_the_run(tmp_path: Path) -> None:
    """Every update once, under one id, and what train_reward.py finds at the end."""
    for script in (PPO, REWARD):
        folder = copy(kit(), tmp_path / script)
        log = tmp_path / f"{script}.log"
        words = [*WORDS[script], "--track", "--resume"]
        track = (fork_tools.log_tracking, str(log))
        stop = (fork_tools.strike, "open out/metrics.jsonl", 2, fork_tools.signal.SIGTERM)
        code, _, errors = run(script, words, folder, track, stop)
        assert code == 130, errors
        code, _, errors = run(script, words, folder, track)
        assert code == 0, errors
        rows = read_lines(log)
        ids = {row[1]["id"] for row in rows if row[0] == "init"}
        assert len(ids) == 1
        metrics = read_lines(folder / "out/metrics.jsonl")
        logged = [row[1:] for row in rows if row[0] == "log" and row[1] is not None]
        assert logged == [[i + 1, row] for i, row in enumerate(metrics)]
        last = [row[2] for row in rows if row[0] == "log" and row[1] is None]
        names = [] if script == PPO else ["gain", "bias", "test/accuracy"]
        assert [name for values in last for name in values] == names
        assert sum(row[0] == "init" for row in rows) == 2
