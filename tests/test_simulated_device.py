"""The scripts on a simulated accelerator (helpers/simulated_device.py): no tensor is left on the
CPU, results are those of the CPU, and the host waits for the device only where it has to."""

import functools
import json
import math
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, WORDS, changed_copy, copy, kit, run_on_device, succeed
from run_tools import assert_same_metrics, read_lines
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="before, torch had no devices that are written in Python"
)

REFUSED = "MixedDevices"

# Runs in which the device must do what the CPU does.
MASKED = "--mask_truncated --truncate_token w1 --truncate_after 8 --response_length 16"
FUNCTION = "--reward_model none --reward_fn rewards:count"
LORA = "--lora_rank 2"
RUNS = {
    (PPO, "critic"): f"--critic policy {LORA} --num_minibatches 2 --micro_batch_size 1",
    (PPO, "masked"): f"{MASKED} --critic shared --max_grad_norm 0.1",
    (PPO, "function"): f"{FUNCTION} --critic shared --gradient_checkpointing",
    (RLOO, "masked"): f"{MASKED} {LORA}",
    (REWARD, "plain"): "",
}
# Not with results that could be compared: tokens are drawn from rounded probabilities, and another
# token changes all that comes after it.
BF16 = {PPO: f"--critic reward {LORA}", RLOO: "", REWARD: ""}
# The rounding of a run's own operations.
ERRORS = ("sampling_error", "first_ratio_error")
# Where the script passes a device, or moves something to it.
A_DEVICE = r",? ?\bdevice=[\w.]+(\(\)\.device)?|\.to\((PartialState\(\)|accelerator)\.device\)"
FILES = (PPO, "plumbing/models.py", "plumbing/data.py")
PLACES = [(name, at) for name in FILES for at in re.finditer(A_DEVICE, (ROOT / name).read_text())]

# Synchronisations of an update: while tokens are sampled, where two are for every 8 tokens, and in
# all the rest.
# `pytest -n 0 -sk synchronisations` measures them anew and lists the lines that they come from.
SYNCS = {
    (PPO, "masked"): (5, 25),
    (RLOO, "masked"): (5, 25),
    (REWARD, "plain"): (0, 7),
}


def words_of(script, more="", updates=2):
    flag = "--num_labels" if script == REWARD else "--total_episodes"
    short = [flag, str(4 * updates), "--checkpoint_every", "0"]
    return [*WORDS[script], *short, *more.split()]


def new_folder(parent):
    """The folder to run in: fork_tools' kit and a --reward_fn."""
    folder = copy(kit(), parent)
    code = "def count(completions, **_):\n    return [len(x) / 9 for x in completions]\n"
    (folder / "rewards.py").write_text(code)
    return folder


@functools.cache
def finished(script, more, on_cpu=False):
    """A folder in which the script has run on the device, which left a report, or on the CPU."""
    folder = new_folder(Path(tempfile.mkdtemp(dir=kit().parent)))
    words = words_of(script, more)
    if on_cpu:
        succeed(script, words, folder)
    else:
        code, _, errors = run_on_device(script, words, folder)
        assert code == 0, errors
    return folder


def assert_same_run(folder, other):
    out = folder / "out"
    expected = other / "out"
    assert_same_metrics(out, expected, "on the device", ERRORS, rel=1e-4, abs=1e-5)
    files = [file.relative_to(expected) for file in expected.glob("*/*.safetensors")]
    assert files
    for file in files:
        ours = load_file(out / file)
        theirs = load_file(expected / file)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("script", "case"), RUNS)
def test_results_are_those_of_the_cpu(script, case):
    more = RUNS[script, case]
    assert_same_run(finished(script, more), finished(script, more, on_cpu=True))


@pytest.mark.long
@pytest.mark.parametrize("script", BF16)
def test_the_scripts_run_in_bf16(script):
    """The scripts themselves check that sampling and training agree."""
    folder = finished(script, f"{BF16[script]} --dtype bf16 --lr 1e-5")
    for line in read_lines(folder / "out/metrics.jsonl"):
        assert all(math.isfinite(value) for value in line.values())


@pytest.mark.long
def test_a_run_is_resumed(tmp_path):
    """From the device's own checkpoint, to the results of a CPU that had no pause."""
    folder = new_folder(tmp_path)
    constant = "--lr_schedule constant"
    for updates in (1, 2):
        words = [*words_of(PPO, constant, updates), "--resume"]
        code, _, errors = run_on_device(PPO, words, folder)
        assert code == 0, errors
    assert_same_run(folder, finished(PPO, constant, on_cpu=True))


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_a_device_that_is_left_out_is_found(number, tmp_path):
    name, at = PLACES[number]
    text = (ROOT / name).read_text()
    function = re.findall(r"\n *def (\w+)", text[: at.start()])[-1]
    more = f"{FUNCTION} --critic shared" if function == "call_reward_fn" else MASKED
    script = changed_copy(PPO, tmp_path)
    (tmp_path / name).write_text(text[: at.start()] + text[at.end() :])
    code, _, errors = run_on_device(script, words_of(PPO, more), new_folder(tmp_path))
    assert (code, REFUSED in errors) == (1, True), (function, errors)


@pytest.mark.parametrize(("script", "case"), SYNCS)
def test_synchronisations_of_an_update(script, case, request):
    """What a second update adds, by place."""
    if request.config.getoption("--script") is not None:
        pytest.skip("a copy of a script may wait elsewhere, too")
    report = json.loads((finished(script, RUNS[script, case]) / "report.json").read_text())
    counts = [Counter({tuple(at): n for n, *at in rows}) for rows in report["updates"][-2:]]
    found = counts[1] - counts[0]
    sampling = sum(count for at, count in found.items() if "/sample" in at[1])
    measured = (sampling, found.total() - sampling)
    table = "\n".join(f"{count:4} {' '.join(at)}" for at, count in found.most_common())
    sys.stdout.write(f"{script}: {measured}\n{table}\n")
    assert measured == SYNCS[script, case]
