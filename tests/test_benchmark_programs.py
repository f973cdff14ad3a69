"""Every program of benchmark/ runs, with its smallest settings, in a process of its own."""

import json
from pathlib import Path

import fork_tools
import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, WORDS, kit, plain
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TINY = ROOT / "tiny/model"
pytestmark = pytest.mark.long
SMALL = "--batch_size 4 --query_length 8 --response_length 4 --num_epochs 1"
PROGRAMS = {
    "studies/optimum/run": "--seeds 1 --updates 2",
    "studies/choices/run": "--choices default GRPO --seeds 1 --jobs 1 --episodes 8 --batch_size 8",
    "studies/rates/run": "--rates 2e-4 --seeds 1 --jobs 1 --episodes 8 --batch_size 8",
    "studies/overoptimisation/run": "--labels 128 --seeds 1 --episodes 64 --jobs 1 --kl_coefs 0.15",
}


def few_judged():
    """A change of a run: policies are judged by few queries."""
    from benchmark import judge

    init = judge.Judge.__init__

    def changed(self, seed, reward_model, num_queries=512):
        init(self, seed, reward_model, min(num_queries, 8))

    judge.Judge.__init__ = changed


def ready_reward_models(folder):
    """A change of a run: reward models are there already."""
    from benchmark import common

    for run in ("reward-1", "reward-128-1"):
        out = Path(folder) / common.commit() / run
        model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1)
        torch.nn.init.normal_(model.score.weight, std=0.1)
        for part in (model, AutoTokenizer.from_pretrained(TINY)):
            part.save_pretrained(out / "reward_model")
        (out / "samples.jsonl").touch()
        (out / "results.json").write_text(json.dumps({"test/accuracy": 0.5}))


def start(program, words, folder, *changes):
    """The lines that the program prints in a new folder."""
    folder.mkdir()
    return fork_tools.succeed(f"benchmark/{program}.py", words, folder, *changes).splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_writes_its_record(name, tmp_path):
    program, *kind = name.split()
    words = PROGRAMS[name].split()
    changes = []
    if "--jobs" in words:
        runs = str(tmp_path / "runs")
        words += ["--folder", runs]
        changes = [(ready_reward_models, runs), (few_judged,)]
    out = tmp_path / "out"
    start(program, [*words, "--tag", "x", "--out", str(out)], out, *changes)
    (path,) = out.glob("*x.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert not any(row.get("failed") for row in rows)
    assert ("kl_policy" in rows[0]) == bool(kind)


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_ours_and_plain_make_the_same_step(algorithm, tmp_path):
    """What throughput.py asks of a process of its own, before it measures."""
    words = f"{SMALL} --check {algorithm} {TINY}"
    *_, distance = start("speed/throughput", words.split(), tmp_path / "out")
    assert float(distance) < 1e-2


def test_peak_memory_of_a_contender_is_all_that_it_prints(tmp_path):
    words = f"{SMALL} --queries tiny --peak ours-critic-ppo {TINY}"
    (record,) = start("speed/throughput", words.split(), tmp_path / "out")
    assert json.loads(record)["peak_bytes"] > 0


def test_a_whole_run_is_measured(tmp_path):
    flags = " ".join(WORDS[PPO]).replace(" --output_dir out", "")
    for name in ("model", "judge", "queries.jsonl"):
        flags = flags.replace(f" {name}", f" {kit()}/{name}")
    words = ["--run", json.dumps([PPO, flags.split()])]
    *_, record = start("speed/whole_run", words, tmp_path / "out")
    assert json.loads(record)["updates"] == 4


def test_runs_are_drawn_and_compared(tmp_path):
    run = str(plain(PPO, 1) / "out")
    out = tmp_path / "runs.png"
    start("tools/plot", [run, "--over", "seconds", "--out", str(out)], tmp_path / "plot")
    assert out.stat().st_size > 10_000
    judge = ["--judge", "benchmark.tools.vader:sentiment"]
    start("tools/win_rate", [run, run, *judge], tmp_path / "win_rate")
