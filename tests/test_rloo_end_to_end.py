"""rloo_rlhf.py as a user runs it: responses that end at their first full stop, masks after it, one process and two."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from run_tools import LAUNCH, finish, read_lines, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RLOO, UPDATES, EPISODES = "rloo_rlhf.py", 3, 32
WORDS = ["--reward_fn", "taste:length", "--batch_size", str(EPISODES), "--micro_batch_size", "8", "--eval_queries", "8"]
WORDS += ["--total_episodes", str(UPDATES * EPISODES), "--rloo_k", "4", "--num_epochs", "2"]
WORDS += ["--response_length", "8", "--truncate_token", ".", "--truncate_after", "0", "--mask_truncated"]
WORDS += ["--penalty_mode", "add", "--penalty_reward_value", "-50"]
TASTE = "def length(queries, responses):\n    return [len(response) for response in responses]\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same run on one process and on two."""
    folder = tmp_path_factory.mktemp("rloo")
    (folder / "taste.py").write_text(TASTE)
    script = str(ROOT / RLOO)
    one = start([script, *WORDS, "--output_dir", "one"], folder)
    two = start([*LAUNCH, script, *WORDS, "--output_dir", "two"], folder, ACCELERATE_USE_CPU="true")
    finish(one, two)
    return SimpleNamespace(one=folder / "one", two=folder / "two")


def test_metrics_are_ppos_without_a_value_function(runs: SimpleNamespace) -> None:
    rows = read_lines(runs.one / "metrics.jsonl")
    assert [row["ppo/episode"] for row in rows] == [EPISODES, 2 * EPISODES, 3 * EPISODES]
    expected = {
        f"objective/{name}" for name in ("kl", "kl_coef", "entropy", "scores", "score_total", "non_score_reward")
    }
    expected |= {
        f"ppo/{name}" for name in ("loss/policy", "policy/entropy", "policy/approxkl", "policy/clipfrac", "lr")
    }
    for row in rows:
        assert expected <= set(row)
        assert not [name for name in row if "returns" in name or "vpred" in name]
        assert row["first_ratio_error"] == 0
        total = row["objective/scores"] + row["objective/non_score_reward"]
        assert row["objective/score_total"] == pytest.approx(total, abs=1e-4)
    assert rows[0]["objective/kl"] == 0 and rows[-1]["objective/kl"] != 0


def test_one_process_and_two_are_the_same_run(runs: SimpleNamespace) -> None:
    """RLOO has no statistics per rank: the whole update is the same, not the rollout alone."""
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (runs.one, runs.two))
    assert json.loads((runs.two / "args.json").read_text())["processes"] == 2
    assert len(two) == UPDATES
    for name in (
        "objective/scores",
        "objective/entropy",
        "objective/found_end",
        "ppo/policy/approxkl",
        "ppo/loss/policy",
    ):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-4), name
        assert two[1][name] == pytest.approx(one[1][name], abs=1e-3), name
    both = (read_lines(folder / "samples.jsonl") for folder in (runs.one, runs.two))
    samples = [[row["before"]["response"] for row in rows] for rows in both]
    assert samples[0] == samples[1]


def test_responses_end_at_their_first_full_stop_and_are_scored_there(runs: SimpleNamespace) -> None:
    rows = [row[when] for row in read_lines(runs.one / "samples.jsonl") for when in ("before", "after")]
    assert len(rows) == 16 and any(row["response"].endswith(".") for row in rows)
    for row in rows:
        assert "." not in row["response"][:-1]
        assert row["score"] == len(row["response"])


def test_the_penalty_is_added_where_no_end_was_found(runs: SimpleNamespace) -> None:
    row = read_lines(runs.one / "metrics.jsonl")[0]
    missing = 1 - row["objective/found_end"]
    assert 0 < missing < 1
    letters = row["objective/scores"] + 50 * missing  # what the function gave, on average, for up to eight tokens
    assert 15 < letters < 70


def test_the_policy_loads_with_plain_transformers_and_has_moved(runs: SimpleNamespace) -> None:
    assert not (runs.one / "policy" / "value_head.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(runs.one / "policy")
    tokenizer = AutoTokenizer.from_pretrained(runs.one / "policy")
    inputs = tokenizer("The rain had stopped.", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=5, do_sample=False).shape[1] == inputs["input_ids"].shape[1] + 5
    start_weights = load_file(ROOT / "tiny" / "model" / "model.safetensors")
    weights = load_file(runs.one / "policy" / "model.safetensors")
    assert max((weights[name] - start_weights[name]).abs().max() for name in weights) > 1e-4
    both = [load_file(Path(folder) / "policy" / "model.safetensors") for folder in (runs.one, runs.two)]
    assert all(torch.isfinite(x).all() for weights in both for x in weights.values())
