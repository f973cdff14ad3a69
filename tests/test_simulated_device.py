"""The scripts on a simulated accelerator (helpers/simulated_device.py): no tensor is left on the
CPU, results are those of the CPU, and the host waits for the device only where it has to."""

import functools
import json
import math
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import simulated_device
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, WORDS, copy, kit, run
from run_tools import read_lines
from safetensors.torch import load_file

HELPERS = ROOT / "tests/helpers"
RUNNER = str(HELPERS / "on_simulated_device.py")
REFUSED = "MixedDevices"

# What CUDA takes, with the kinds of synchronisations that it causes; and what it refuses.
STATEMENTS = {
    # elementwise
    "x + vector": [],
    "x + 1.0": [],
    "x + host_scalar": [],
    "host_scalar * x": [],
    "torch.where(x > 0, x, host_scalar)": [],
    "x.clamp(min=host_scalar)": [],
    "x.add_(host_scalar)": [],
    "x + host_vector": REFUSED,
    "host_vector + x": REFUSED,
    "torch.where(x > 0, x, host_x)": REFUSED,
    "torch.where(host_x > 0, x, x)": REFUSED,
    "x.lerp(x, host_scalar)": REFUSED,
    "x.masked_fill(host_x > 0, 1.0)": REFUSED,
    # in place
    "x.mul_(host_x)": REFUSED,
    "host_x.add_(x)": REFUSED,
    # products
    "x @ x.T": [],
    "x @ host_x.T": REFUSED,
    "host_x @ vector": REFUSED,
    "F.linear(x, x)": [],
    "F.linear(x, host_x)": REFUSED,
    "F.linear(x, x, host_vector)": REFUSED,
    # others
    "torch.cat([x, x])": [],
    "torch.cat([x, host_x])": REFUSED,
    "torch.stack([scalar, host_scalar])": REFUSED,
    "x.gather(1, ids)": [],
    "x.gather(1, host_ids)": REFUSED,
    "x.index_select(0, rows)": [],
    "x.index_select(0, host_rows)": REFUSED,
    "F.embedding(rows, x)": [],
    "F.embedding(host_rows, x)": REFUSED,
    "torch.searchsorted(x, x, right=True)": [],
    "torch.searchsorted(x, host_x)": REFUSED,
    "torch.searchsorted(vector, host_scalar)": REFUSED,
    "assert torch.full((2,), 3, device=device).dtype == torch.int64": [],
    # advanced indices
    "x[rows]": [],
    "x[host_rows]": ["index from the host"],
    "x[host_rows] = 2 * x[:2]": ["index from the host"],
    "x[host_rows] = host_x[:2]": REFUSED,
    "x[rows] = host_scalar": [],
    "host_x[rows]": REFUSED,
    "host_x[host_rows] = x[:2]": REFUSED,
    "x[mask]": ["nonzero"],
    "x[mask] = 0.0": [],
    "x[mask] = 2 * x[:2]": ["nonzero"],
    "x[1:, 0]": [],
    # the host waits
    "x.sum().item()": ["value read"],
    "bool(scalar > 1)": ["value read"],
    "float(scalar)": ["value read"],
    "if (x > 0).all(): pass": ["value read"],
    "x.tolist()": ["copy to the host"],
    "x.cpu()": ["copy to the host"],
    "x.repeat_interleave(2, 0)": [],
    "host_x.to(device)": ["copy from the host"],
    "host_x.to(device, non_blocking=True)": ["copy from the host"],
    "host_x.pin_memory().to(device)": ["copy from the host"],
    "host_x.pin_memory().to(device, non_blocking=True)": [],
    "torch.tensor([1.0], device=device)": ["copy from the host"],
    "torch.tensor([], device=device)": [],
    "x.to(torch.bfloat16)": [],
    # not without a copy
    "x.numpy()": "TypeError",
    # autocast: bf16 for products, and not for what CUDA computes in fp32
    "with bf16: assert F.linear(x, x).dtype == torch.bfloat16": [],
    "with bf16: assert x.bfloat16().exp().dtype == torch.float32": [],
    "with bf16: assert (x + x).dtype == torch.float32": [],
}
# With the rounding of TF32, which only products have, and only those in fp32.
EXACT = "torch.equal((x @ x.T).cpu(), host_x @ host_x.T)"
HIGH = "torch.set_float32_matmul_precision('high')"
TF32_STATEMENTS = {
    f"assert {EXACT}": ["copy to the host"],
    f"{HIGH}; assert not {EXACT}": ["copy to the host"],
    f"{HIGH}; assert torch.allclose((x @ x.T).cpu(), host_x @ host_x.T, 2e-3)": [
        "copy to the host"
    ],
    f"{HIGH}; assert torch.equal((x * x).cpu(), host_x * host_x)": ["copy to the host"],
    f"{HIGH}; y = x.double(); host_y = host_x.double(); "
    "assert torch.equal((y @ y.T).cpu(), host_y @ host_y.T)": ["copy to the host"],
}

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
# What is measured of a run, or is the rounding of the run's own operations.
MEASURED = {"seconds", "peak_memory_gb", "sampling_error"}
MEASURED |= {"first_ratio_error"}
# Where the script passes a device, or moves something to it.
A_DEVICE = re.compile(
    r",? ?\bdevice=[\w.]+(\(\)\.device)?|\.to\((PartialState\(\)|accelerator)\.device\)"
)

# Synchronisations of an update: while tokens are sampled, where none is for a token, and in all the
# rest.
# `pytest -n 0 -sk synchronisations` measures them anew and lists the lines that they come from.
SYNCS = {
    (PPO, "masked"): (1, 24),
    (RLOO, "masked"): (1, 24),
    (REWARD, "plain"): (0, 7),
}


def words_of(script: str, more: str = "", updates: int = 2) -> list[str]:
    """The words of a short run with more settings."""
    flag = "--num_labels" if script == REWARD else "--total_episodes"
    short = [flag, str(4 * updates), "--checkpoint_every", "0"]
    return [*WORDS[script], *short, *more.split()]


def new_folder(parent: Path) -> Path:
    """The folder to run in: fork_tools' kit and a --reward_fn."""
    folder = copy(kit(), parent)
    code = "def count(completions, **_):\n    return [len(x) / 9 for x in completions]\n"
    (folder / "rewards.py").write_text(code)
    return folder


def run_on_device(script: str, words: list[str], folder: Path, *options: str) -> tuple[int, str]:
    """Exit status, and what was printed to stderr."""
    own = [*options, "--report", "report.json", str(ROOT / script)]
    code, _, errors = run(RUNNER, [*own, *words], folder)
    return code, errors


@functools.cache
def finished(script: str, more: str, cpu: bool = False) -> Path:
    """A folder in which the script has run on the device, which left a report, or on the CPU."""
    folder = new_folder(Path(tempfile.mkdtemp(dir=kit().parent)))
    words = words_of(script, more)
    code, errors = run_on_device(script, words, folder, "--cpu" if cpu else "--tf32")
    assert code == 0, errors
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    """Metrics and weights that the two runs left agree."""
    lines, others = (read_lines(path / "out/metrics.jsonl") for path in (folder, other))
    assert len(lines) == len(others)
    for line, expected in zip(lines, others, strict=True):
        assert line.keys() == expected.keys()
        for name in MEASURED & expected.keys():
            del expected[name]
        for name, value in expected.items():
            assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    files = list((other / "out").glob("*/*.safetensors"))
    assert files
    for file in files:
        weights = load_file(folder / file.relative_to(other))
        for name, value in load_file(file).items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-3)


@functools.cache
def outcomes(*options: str) -> dict[str, Any]:
    """What the simulated device makes of the statements."""
    folder = Path(tempfile.mkdtemp(dir=kit().parent))
    statements = list(TF32_STATEMENTS if options else STATEMENTS)
    (folder / "in.json").write_text(json.dumps(statements))
    words = [*options, str(HELPERS / "statements.py"), "in.json", "out.json"]
    code, _, errors = run(RUNNER, words, folder)
    assert code == 0, errors
    found = json.loads((folder / "out.json").read_text())
    return dict(zip(statements, found, strict=True))


# The simulated device itself


@pytest.mark.parametrize("statement", STATEMENTS)
def test_refuses_and_waits_where_cuda_does(statement: str) -> None:
    assert outcomes()[statement] == STATEMENTS[statement]


@pytest.mark.parametrize("statement", TF32_STATEMENTS)
def test_products_of_fp32_round_as_tf32_if_that_is_allowed(statement: str) -> None:
    assert outcomes("--tf32")[statement] == TF32_STATEMENTS[statement]


def test_tf32_has_ten_bits_of_mantissa() -> None:
    unit = 2**-10
    numbers = [1.0, 1 + unit, 1 + 0.49 * unit, 1 + 0.5 * unit, -1 - 0.5 * unit, 3e38, 0.0]
    rounded = [1.0, 1 + unit, 1.0, 1 + unit, -1 - unit, 3e38, 0.0]
    ours = simulated_device.to_tf32(torch.tensor(numbers))
    torch.testing.assert_close(ours, torch.tensor(rounded), rtol=2**-11, atol=0)
    assert ours[:5].tolist() == rounded[:5]


# The scripts on it


@pytest.mark.parametrize(("script", "case"), RUNS)
def test_results_are_those_of_the_cpu(script: str, case: str) -> None:
    more = RUNS[script, case]
    on_cpu = finished(script, more, cpu=True)
    assert_same_run(finished(script, more), on_cpu)


@pytest.mark.parametrize("script", BF16)
def test_the_scripts_run_in_bf16(script: str) -> None:
    """With TF32 in the heads. The scripts themselves check that sampling and training agree."""
    folder = finished(script, f"{BF16[script]} --dtype bf16 --lr 1e-5")
    for line in read_lines(folder / "out/metrics.jsonl"):
        assert all(math.isfinite(value) for value in line.values())


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """From the device's own checkpoint, to the results of a CPU that had no pause."""
    folder = new_folder(tmp_path)
    constant = "--lr_schedule constant"
    for updates in (1, 2):
        words = [*words_of(PPO, constant, updates), "--resume"]
        code, errors = run_on_device(PPO, words, folder)
        assert code == 0, errors
    assert_same_run(folder, finished(PPO, constant, cpu=True))


# Faults put in on purpose


def places_of_device(script: str) -> list[re.Match]:
    """Where the script passes a device."""
    return list(re.finditer(A_DEVICE, (ROOT / script).read_text()))


@pytest.mark.parametrize("number", range(len(places_of_device(PPO))))
def test_a_device_that_is_left_out_is_found(number: int, tmp_path: Path) -> None:
    text = (ROOT / PPO).read_text()
    at = places_of_device(PPO)[number]
    function = re.findall(r"\n *def (\w+)", text[: at.start()])[-1]
    more = f"{FUNCTION} --critic shared" if function == "score_by_function" else MASKED
    (tmp_path / PPO).write_text(text[: at.start()] + text[at.end() :])
    shutil.copy(ROOT / "tf_adam.py", tmp_path)
    script = str(tmp_path / PPO)
    code, errors = run_on_device(script, words_of(PPO, more), new_folder(tmp_path))
    assert (code, REFUSED in errors) == (1, True), (function, errors)


# Synchronisations


def syncs_of_an_update(script: str, more: str) -> Counter:
    """How often the host waits in one update: what a second one adds, by place."""
    report = json.loads((finished(script, more) / "report.json").read_text())
    counts = []
    for rows in report["updates"][-2:]:
        counts.append(Counter())
        for count, *at in rows:
            counts[-1][tuple(at)] += count
    return counts[1] - counts[0]


@pytest.mark.parametrize(("script", "case"), SYNCS)
def test_synchronisations_of_an_update(
    script: str, case: str, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--script") is not None:
        pytest.skip("a copy of a script may wait elsewhere, too")
    found = syncs_of_an_update(script, RUNS[script, case])
    sampling = sum(count for at, count in found.items() if "/sample" in at[1])
    measured = (sampling, found.total() - sampling)
    table = "\n".join(f"{count:4} {' '.join(at)}" for at, count in found.most_common())
    sys.stdout.write(f"{script}: {measured}\n{table}\n")
    assert measured == SYNCS[script, case]
