"""Every program of benchmark/ runs, with its smallest settings, in a process of its own."""

import json
import shlex
from pathlib import Path
from typing import Any

import fork_tools
import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, WORDS, kit, plain
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SMALL = "--batch_size 4 --query_length 8 --response_length 4 --num_epochs 1"
PROGRAMS = {
    "studies/adam/run": "--seeds 1 --batch_size 4",
    "studies/architectures/run": "--models gpt2 mamba",
    "studies/bf16_ratios/run": "--models tiny --algorithms rloo --episodes 4 --lengths 4"
    " --dtypes fp32",
    "studies/optimum/run": "--seeds 1 --updates 2",
    "studies/short_runs/run": "--choices default GRPO --seeds 1 --jobs 1 --episodes 8"
    " --batch_size 8",
    "studies/slow_rate/run": "--choices default --seeds 1 --jobs 1 --episodes 8 --batch_size 8",
    "studies/overoptimisation/run": "--labels 128 --seeds 1 --episodes 64 --pool 2 --jobs 1"
    " --kl_coefs 0.15 --kl_target 6",
    "speed/memory_speed": "--shape 1x32 --variants ppo-value-model rloo-2 --batch_size 4"
    " --repeats 1 --response_length 4 --num_epochs 1 --speed_only",
    "speed/scaling": f"--sweeps batch_size --points_batch_size 4 --model 1x32 --repeats 1 {SMALL}",
}
ESTIMATE = "--reward_fn tiny.rewards:happy --policy tiny/model --queries 4 --samples 4"


def few_judged() -> None:
    """A change of a run: policies are judged by few queries."""
    from benchmark import judge

    init = judge.Judge.__init__

    def changed(self: Any, seed: int, reward_model: Any, num_queries: int = 512) -> None:
        init(self, seed, reward_model, min(num_queries, 8))

    judge.Judge.__init__ = changed


def ready_reward_models(name: str, folder: str) -> None:
    """A change of a run: reward models are there already."""
    from benchmark import common

    for run in ("reward-1", "reward-128-1"):
        out = Path(folder) / common.commit() / run
        model = AutoModelForSequenceClassification.from_pretrained(
            ROOT / "tiny" / "model", num_labels=1
        )
        torch.nn.init.normal_(model.score.weight, std=0.1)
        model.save_pretrained(out / "reward_model")
        AutoTokenizer.from_pretrained(ROOT / "tiny" / "model").save_pretrained(out / "reward_model")
        (out / "samples.jsonl").touch()
        (out / "results.json").write_text(json.dumps({"test/accuracy": 0.5}))


def start(program: str, words: list[str], folder: Path, *changes: Any) -> tuple[int, str, str]:
    """Runs the program in a new folder."""
    folder.mkdir(exist_ok=True)
    return fork_tools.run(f"benchmark/{program}.py", words, folder, *changes)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_writes_its_record(program: str, tmp_path: Path) -> None:
    words = shlex.split(PROGRAMS[program])
    changes = []
    if "--jobs" in words:
        runs = tmp_path / "runs"
        words += ["--folder", str(runs)]
        changes = [(ready_reward_models, program, str(runs)), (few_judged,)]
    out = tmp_path / "out"
    status, _, errors = start(program, [*words, "--tag", "x", "--out", str(out)], out, *changes)
    assert status == 0, errors
    (path,) = out.glob("*x.json")
    record = json.loads(path.read_text())
    assert record["rows"]
    assert not any(row.get("failed") for row in record["rows"])


def test_the_optimum_of_a_reward_function_is_estimated(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*ESTIMATE.split(), "--policy_samples", "4", "--tag", "x", "--out", str(out)]
    status, _, errors = start("studies/optimum/run", words, out)
    assert status == 0, errors
    assert "kl_policy" in json.loads((out / "x.json").read_text())["rows"][0]


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_ours_and_plain_make_the_same_step(algorithm: str, tmp_path: Path) -> None:
    """What throughput.py asks of a process of its own, before it measures."""
    words = [*SMALL.split(), "--check", algorithm, str(ROOT / "tiny" / "model")]
    status, printed, errors = start("speed/throughput", words, tmp_path / "out")
    assert status == 0, errors
    assert float(printed.splitlines()[-1]) < 1e-2


def test_peak_memory_of_a_contender(tmp_path: Path) -> None:
    words = [*SMALL.split(), "--peak", "ours-critic-ppo", str(ROOT / "tiny" / "model")]
    status, printed, errors = start("speed/throughput", words, tmp_path / "out")
    assert status == 0, errors
    assert json.loads(printed.splitlines()[-1])["peak_bytes"] > 0


def test_a_whole_run_is_measured(tmp_path: Path) -> None:
    flags = [word for word in WORDS[PPO] if word not in ("--output_dir", "out")]
    flags = " ".join(flags).replace(" model", f" {kit()}/model").replace("judge", f"{kit()}/judge")
    flags = flags.replace("queries.jsonl", f"{kit()}/queries.jsonl").split()
    words = ["--run", json.dumps([str(ROOT), PPO, flags])]
    status, printed, errors = start("speed/whole_run", words, tmp_path / "out")
    assert status == 0, errors
    assert json.loads(printed.splitlines()[-1])["updates"] == 4


def test_runs_are_drawn_and_compared(tmp_path: Path) -> None:
    run = plain(PPO, 1) / "out"
    out = tmp_path / "runs.png"
    words = [str(run), "--over", "seconds", "--out", str(out)]
    status, _, errors = start("tools/plot", words, tmp_path / "plot")
    assert status == 0, errors
    assert out.stat().st_size > 10_000
    words = [str(run), str(run), "--judge", "benchmark.tools.vader:sentiment"]
    status, _, errors = start("tools/win_rate", words, tmp_path / "win_rate")
    assert status == 0, errors
