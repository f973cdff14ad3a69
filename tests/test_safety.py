"""Numbers gone wrong stop a run before they do harm; a model is on the disk before anything is printed."""

import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import fork_tools
import pytest
from fork_tools import MODEL, PPO, REWARD, RLOO, WORDS, copy, kit, plain, run, run_on
from run_tools import call, read_lines


# Processes; the micro-batch whose loss is no number, on the first process; the updates before it
@pytest.mark.parametrize(
    ("script", "world", "call", "updates"), [(PPO, 1, 11, 2), (PPO, 2, 4, 1), (RLOO, 1, 2, 0), (REWARD, 1, 6, 2)]
)
def test_a_gradient_that_is_no_number_stops_before_it_reaches_a_file(
    script: str, world: int, call: int, updates: int, tmp_path: Path
) -> None:
    folder = copy(kit(), tmp_path)
    code, _, errors = run_on(world, script, WORDS[script], folder, (fork_tools.give_nan, call))
    newest = f"out/checkpoints/{updates:07d}/state.json" if updates else "none"
    assert errors.endswith(f"\n{script}: the gradient is not finite; the newest checkpoint: {newest}\n")
    assert (code, "Traceback" in errors) == (2, False)
    assert len(read_lines(folder / "out/metrics.jsonl")) == updates
    assert len([*folder.glob("out/checkpoints/*")]) == updates and not (folder / "out" / MODEL[script]).exists()


# What is added to log-probabilities of the evaluation and of every update; the KLs, in thousands, of those logged
@pytest.mark.parametrize(
    ("script", "added", "says", "kls"),
    [
        (PPO, {"ref_logprobs": [0, 0, 200, -200]}, "the KL is .*--max_kl 200", [0, -1, 1]),
        (RLOO, {"ref_logprobs": [0, 0, 200, -200]}, "the KL is .*--max_kl 200", [0, -1, 1]),
        (PPO, {"ref_logprobs": [0, 0.002], "logprobs": [0, 0.002]}, "first ratio off 1", []),
        (PPO, {"ref_logprobs": [0, 0.002]}, "first KL -0.01", []),
    ],
)
def test_far_policies_and_first_passes_that_differ_stop_a_run(
    script: str, added: Any, says: str, kls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is logged before is finite."""
    module, folder = importlib.import_module(script[:-3]), copy(kit(), tmp_path)
    rollout, calls = module.rollout, itertools.count()

    def changed(*args: Any) -> Any:
        batch, i = rollout(*args), next(calls)
        return batch | {name: batch[name] + numbers[i] for name, numbers in added.items()}

    monkeypatch.setattr(module, "rollout", changed)
    with pytest.raises(FloatingPointError, match=says):
        call(script, WORDS[script], folder, monkeypatch)
    rows = read_lines(folder / "out/metrics.jsonl")
    assert [round(row["objective/kl"] / 1000) for row in rows] == kls
    assert all(math.isfinite(x) for row in rows for x in row.values())


@pytest.mark.parametrize("script", [PPO, REWARD])
def test_the_model_is_on_the_disk_before_anything_is_printed(script: str, tmp_path: Path) -> None:
    """`python script | true`"""
    folder, expected = copy(kit(), tmp_path), plain(script, 1)
    code, _, errors = run(script, WORDS[script], folder, (fork_tools.close_stdout,))
    assert code != 0 and f"{script}: [Errno 32] Broken pipe" in errors
    made = [{x.name: x.read_bytes() for x in (y / "out" / MODEL[script]).iterdir()} for y in (folder, expected)]
    assert made[0] == made[1] and (folder / "out/samples.jsonl").exists()


def test_weights_and_biases_gets_every_metric(tmp_path: Path) -> None:
    """Offline; the record is in the run's folder or beside it."""
    folder = copy(kit(), tmp_path)
    code, _, errors = run(REWARD, [*WORDS[REWARD], "--track"], folder, WANDB_MODE="offline", WANDB_SILENT="true")
    assert code == 0, errors
    (record,) = folder.rglob("*.wandb")
    data = record.read_bytes()
    assert all(name.encode() in data for row in read_lines(folder / "out/metrics.jsonl") for name in row)
