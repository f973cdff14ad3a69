"""Whole runs of train_reward.py and ppo_rlhf.py on the embedded default, and what they leave behind."""

import hashlib
import json
import math
import os
import re
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import datasets
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT
from run_tools import LAUNCH, PPO, REWARD, TORCHRUN, finish, read_lines, run_script, start, to_lines
from safetensors.torch import load_file
from tiny_models import save_classifier
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
)

import ppo_rlhf
import train_reward

TINY, DEVICE = ROOT / "tiny" / "model", torch.device("cpu")
REWARD_WORDS = ["--num_labels", "64", "--normalization_samples", "64"]
PPO_WORDS = ["--total_episodes", "112", "--batch_size", "32", "--eval_queries", "16"]
UPDATES = 4  # 112 / 32, rounded up
SMALL = ["--total_episodes", "96", "--batch_size", "32", "--eval_queries", "8", "--num_epochs", "1"]
PPO_NAMES = {
    *(f"objective/{name}" for name in ("kl", "kl_coef", "entropy", "scores", "score_total", "non_score_reward")),
    *(f"ppo/loss/{name}" for name in ("policy", "value", "total")),
    *(f"ppo/policy/{name}" for name in ("entropy", "approxkl", "clipfrac")),
    *(f"ppo/returns/{name}" for name in ("mean", "var")),
    *(
        f"ppo/val/{name}"
        for name in ("vpred", "error", "clipfrac", "mean", "var", "var_explained", "ratio", "ratio_var")
    ),
    *("ppo/lr", "ppo/episode", "first_ratio_error"),
}
WORDS = "the a he she was not good bad happy sad and of to in with had said house day".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A reward model, then policies that find it by themselves: the folder they ran in, and the folder each made."""
    folder = tmp_path_factory.mktemp("runs")
    finish(start([str(ROOT / REWARD), *REWARD_WORDS], folder))
    (reward,) = (folder / "runs").iterdir()
    again = start([str(ROOT / PPO), *PPO_WORDS, "--output_dir", "again"], folder)
    finish(start([str(ROOT / PPO), *PPO_WORDS], folder), again)
    (policy,) = set((folder / "runs").iterdir()) - {reward}
    return SimpleNamespace(folder=folder, reward=reward, ppo=policy, again=folder / "again")


@pytest.fixture(scope="module")
def two(runs: SimpleNamespace) -> SimpleNamespace:
    """The same two runs, each by two processes."""
    for script, words in ((REWARD, REWARD_WORDS), (PPO, PPO_WORDS)):
        words = [*LAUNCH, str(ROOT / script), *words, "--output_dir", f"two/{script}"]
        finish(start(words, runs.folder, ACCELERATE_USE_CPU="true"))
    return SimpleNamespace(
        folder=runs.folder / "two", reward=runs.folder / "two" / REWARD, ppo=runs.folder / "two" / PPO
    )


@pytest.fixture
def one_way() -> Any:
    """The matrix product that the scripts take on a CPU, for as long as a test computes what they computed."""
    precision = torch.get_float32_matmul_precision()
    ppo_rlhf.fast_math(DEVICE)
    yield
    torch.set_float32_matmul_precision(precision)


def ppo_args(**changes: Any) -> ppo_rlhf.Args:
    return ppo_rlhf.Args(total_episodes=112, batch_size=32, eval_queries=16, **changes)


def load_policy(folder: Path) -> ppo_rlhf.ActorCritic:
    policy = ppo_rlhf.ActorCritic(ppo_rlhf.load(AutoModelForCausalLM, str(folder), "--base_model", ppo_args()))
    if (folder / "value_head.safetensors").exists():
        policy.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
    return policy.requires_grad_(False)


def plain_rewards(folder: Path, rows: list[list[int]]) -> list[float]:
    """Rewards of token rows by transformers alone, one unpadded row at a time, with gain and bias of the config."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    gain, bias = model.config.reward_gain, model.config.reward_bias
    with torch.no_grad():
        return [gain * model(torch.tensor([row])).logits.item() + bias for row in rows]


def assert_schedules(rows: list[dict[str, Any]], lr: float, coefficient: float, target: float, share: float) -> None:
    """Learning rates fall linearly, to lr / updates at the last update; the coefficient of KL follows KL."""
    for i, row in enumerate(rows):
        assert row["ppo/lr"] == pytest.approx(lr * (1 - i / len(rows)), rel=1e-12)
        assert row["objective/kl_coef"] == pytest.approx(coefficient, rel=1e-12)
        coefficient *= 1 + float(np.clip(row["objective/kl"] / target - 1, -0.2, 0.2)) * share


# What a run writes


@pytest.mark.parametrize("world", [1, 2])
def test_args_json_says_with_what_a_run_was_made(runs: SimpleNamespace, two: SimpleNamespace, world: int) -> None:
    made, found = {1: runs, 2: two}[world], str(runs.reward.relative_to(runs.folder) / "reward_model")
    for folder, script, expected in (
        (made.ppo, "ppo_rlhf", ppo_args(output_dir=None if world == 1 else f"two/{PPO}", reward_model=found)),
        (made.reward, "train_reward", train_reward.Args(num_labels=64, normalization_samples=64)),
    ):
        record = json.loads((folder / "args.json").read_text())
        if script == "train_reward" and world == 2:
            expected.output_dir = f"two/{REWARD}"
        assert record["args"] == vars(expected)
        assert (record["script"], record["preset"], record["processes"]) == (script, "tiny", world)
        modules = (torch, transformers, accelerate, datasets)
        assert record["versions"] == {module.__name__: module.__version__ for module in modules}
        assert re.fullmatch(r"[0-9a-f]{40}" if (ROOT / ".git").exists() else "", record["commit"])


def test_metrics_hold_one_line_per_update_with_every_name(runs: SimpleNamespace) -> None:
    rows = read_lines(runs.ppo / "metrics.jsonl")
    assert [row["ppo/episode"] for row in rows] == [32, 64, 96, 128]
    for row in rows:
        assert set(row) >= PPO_NAMES
        assert all(math.isfinite(value) for value in row.values())
    assert len({row["ppo/loss/total"] for row in rows}) == UPDATES
    rows = read_lines(runs.reward / "metrics.jsonl")
    assert len(rows) == 64 / 8
    for i, row in enumerate(rows):
        assert set(row) >= {"train/loss", "train/accuracy", "train/lr"}
        assert row["train/loss"] > 0
        assert row["train/accuracy"] * 8 == pytest.approx(round(row["train/accuracy"] * 8))
        assert row["train/lr"] == pytest.approx(2e-3 * (1 - i / len(rows)), rel=1e-12)


def test_first_update_starts_from_the_reference_and_schedules_follow(runs: SimpleNamespace) -> None:
    rows = read_lines(runs.ppo / "metrics.jsonl")
    assert rows[0]["objective/kl"] == 0
    assert rows[0]["ppo/val/mean"] == rows[0]["ppo/val/var"] == 0  # the value head begins at zero
    assert all(row["objective/kl"] != 0 and row["ppo/val/var"] > 0 for row in rows[1:])
    assert [row["first_ratio_error"] for row in rows] == [0] * UPDATES
    assert_schedules(rows, 2e-4, 0.15, 6.0, 32 / 2000)


def test_metrics_agree_with_each_other(runs: SimpleNamespace) -> None:
    for row in read_lines(runs.ppo / "metrics.jsonl"):
        penalty = row["objective/non_score_reward"]
        assert penalty == pytest.approx(-row["objective/kl_coef"] * row["objective/kl"], rel=1e-5)
        assert row["objective/score_total"] == pytest.approx(row["objective/scores"] + penalty, abs=1e-6)
        total = row["ppo/loss/policy"] + 0.1 * row["ppo/loss/value"]
        assert row["ppo/loss/total"] == pytest.approx(total, abs=1e-6)
        explained = 1 - row["ppo/val/error"] / row["ppo/returns/var"]
        assert row["ppo/val/var_explained"] == pytest.approx(explained, rel=1e-6)
        assert row["ppo/val/ratio_var"] > 0
        assert row["ppo/policy/approxkl"] > 0
        assert row["objective/entropy"] > 0


def test_first_update_can_be_computed_again_with_plain_transformers(runs: SimpleNamespace, one_way: None) -> None:
    """Scores and entropy (minus the sum of the tokens' log-probabilities) of the first batch, from seed and weights."""
    args, row = ppo_args(), read_lines(runs.ppo / "metrics.jsonl")[0]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    queries, _ = ppo_rlhf.load_queries(tokenizer, args, UPDATES * 32, 16)
    queries = [queries[i] for i in ppo_rlhf.batch_indices(len(queries), 0, 32, args.seed)]
    u = ppo_rlhf.uniforms(args.seed, 1, 32, args.response_length, DEVICE)
    batch = ppo_rlhf.respond(load_policy(TINY), queries, u, tokenizer.encode(".")[0], args)
    plain, entropies, scores = AutoModelForCausalLM.from_pretrained(TINY).eval(), [], []
    for query, response in zip(queries, batch["responses"], strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([query + response.tolist()])).logits[0, len(query) - 1 : -1]
        logprobs = (logits / args.temperature).log_softmax(-1).gather(1, response.unsqueeze(1))
        entropies.append(-logprobs.sum().item())
    rows = [query + kept for query, kept in zip(queries, batch["truncated"], strict=True)]
    for tokens, value in zip(batch["truncated"], plain_rewards(runs.reward / "reward_model", rows), strict=True):
        ends = tokenizer.decode(tokens[16:]).endswith(".")
        scores.append(value if ends else -1.0)
    assert row["objective/entropy"] == pytest.approx(np.mean(entropies), abs=1e-3)
    assert row["objective/scores"] == pytest.approx(np.mean(scores), abs=1e-4)
    assert row["objective/found_end"] == np.mean([score != -1.0 for score in scores])


def test_samples_show_every_evaluation_query_before_and_after(runs: SimpleNamespace, one_way: None) -> None:
    """They are what the first and the saved policy say with the same random numbers."""
    args, rows = ppo_args(), read_lines(runs.ppo / "samples.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    end = tokenizer.encode(".")[0]
    _, queries = ppo_rlhf.load_queries(tokenizer, args, UPDATES * 32, 16)
    assert [row["query"] for row in rows] == tokenizer.batch_decode(queries)
    u = ppo_rlhf.uniforms(args.seed, 0, 16, args.response_length, DEVICE)
    for name, folder in (("before", TINY), ("after", runs.ppo / "policy")):
        responses = ppo_rlhf.respond(load_policy(folder), queries, u, end, args)["truncated"]
        assert [row[name]["response"] for row in rows] == tokenizer.batch_decode(responses)
        tokens = [query + response for query, response in zip(queries, responses, strict=True)]
        rewards = plain_rewards(runs.reward / "reward_model", tokens)
        assert [row[name]["score"] for row in rows] == pytest.approx(rewards, abs=1e-4)
    assert [row["before"]["kl"] for row in rows] == [0] * 16
    assert all(row["after"]["kl"] != 0 for row in rows)
    assert any(row["before"]["response"] != row["after"]["response"] for row in rows)


@pytest.mark.parametrize("name", ["ppo", "reward"])
def test_curves_are_a_png_of_sensible_size(runs: SimpleNamespace, name: str) -> None:
    data = (getattr(runs, name) / "curves.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert 600 <= width <= 4000 and 250 <= height <= 2000
    assert len(data) > 10_000


def test_a_run_leaves_these_files_and_nothing_pickled(runs: SimpleNamespace, two: SimpleNamespace) -> None:
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    policy = {f"policy/{name}" for name in model | {"generation_config.json", "value_head.safetensors"}}
    both = {"args.json", "metrics.jsonl", "samples.jsonl", "curves.png"}
    reward = {"results.json"} | {f"reward_model/{name}" for name in model}
    for made in (runs, two):
        for folder, expected in ((made.ppo, both | policy), (made.reward, both | reward)):
            files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
            assert files == expected
    assert {file.name for file in runs.folder.iterdir()} <= {"runs", "two", "again", "torchrun", "other"}


# The models it leaves


def test_policy_folder_loads_with_plain_transformers_and_writes(runs: SimpleNamespace) -> None:
    folder = runs.ppo / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start = AutoModelForCausalLM.from_pretrained(TINY)
    for (name, new), (_, old) in zip(model.named_parameters(), start.named_parameters(), strict=True):
        assert new.isfinite().all() and not torch.equal(new, old), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(TINY).get_vocab()
    inputs = tokenizer("She opened the gate.", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.startswith("She opened the gate.")
    assert len(text.split()) > 10
    head = load_file(folder / "value_head.safetensors")
    assert {name: tuple(x.shape) for name, x in head.items()} == {"weight": (1, model.config.n_embd), "bias": (1,)}
    assert all(x.abs().max() > 0 for x in head.values())


def test_reward_folder_loads_with_plain_transformers_up_to_gain_and_bias(runs: SimpleNamespace) -> None:
    folder, results = runs.reward / "reward_model", json.loads((runs.reward / "results.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    reward = ppo_rlhf.load_reward(ppo_args(reward_model=str(folder)), "tiny", tokenizer, DEVICE)
    assert reward.tokenizer is None  # the policy's
    assert (reward.gain.item(), reward.bias.item()) == pytest.approx((results["gain"], results["bias"]))
    rows = [tokenizer.encode(text) for text in ("She smiled.", "He lost his way in the dark and wept.", "A long day")]
    with torch.no_grad():
        ours = ppo_rlhf.reward_trees(reward, [[[], row] for row in rows], DEVICE).flatten()
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
        width = max(map(len, rows))
        ids = torch.tensor([row + [model.config.pad_token_id] * (width - len(row)) for row in rows])
        padded = model(ids, attention_mask=(ids != model.config.pad_token_id).long()).logits[:, 0]
    assert ours.tolist() == pytest.approx(plain_rewards(folder, rows), abs=1e-5)
    assert ours.tolist() == pytest.approx((results["gain"] * padded + results["bias"]).tolist(), abs=1e-5)
    assert len({round(x, 3) for x in ours.tolist()}) == 3


def test_gain_and_bias_come_from_the_last_normalisation(runs: SimpleNamespace) -> None:
    results = json.loads((runs.reward / "results.json").read_text())
    mean, std = results["after"]["mean"], results["after"]["std"]
    assert results["gain"] == pytest.approx(1 / std, rel=1e-5)
    assert results["bias"] == pytest.approx(-mean / std, rel=1e-5)
    assert results["before"]["mean"] != mean


def test_rewards_of_the_reference_are_normalised(runs: SimpleNamespace, one_way: None) -> None:
    """Mean 0 and deviation 1 to rounding on the samples that gain and bias come from, about so on fresh ones."""
    args, tokenizer = train_reward.Args(num_labels=64, normalization_samples=64), AutoTokenizer.from_pretrained(TINY)
    queries, _ = ppo_rlhf.load_queries(tokenizer, args, 128, 0)
    picks = ppo_rlhf.batch_indices(len(queries), 64, 64, args.seed)
    fresh, _ = ppo_rlhf.load_queries(tokenizer, ppo_args(seed=99), 128, 0)
    policy = load_policy(TINY)
    for rows, u, mean, deviation in (
        ([queries[i] for i in picks], ppo_rlhf.uniforms(args.seed, 1, 64, 24, DEVICE), 1e-4, 1e-4),
        (fresh, ppo_rlhf.uniforms(99, 1, 128, 24, DEVICE), 0.4, 0.3),
    ):
        responses = ppo_rlhf.sample(policy, *ppo_rlhf.left_pad(rows, DEVICE), u, 0.7, None, 0).tolist()
        pairs = [query + response for query, response in zip(rows, responses, strict=True)]
        rewards = plain_rewards(runs.reward / "reward_model", pairs)
        assert np.mean(rewards) == pytest.approx(0, abs=mean)
        assert np.std(rewards) == pytest.approx(1, abs=deviation)


def test_accuracy_is_that_of_the_saved_model_on_the_held_out_labels(runs: SimpleNamespace) -> None:
    results, rows = json.loads((runs.reward / "results.json").read_text()), read_lines(runs.reward / "samples.jsonl")
    table = datasets.load_dataset("parquet", data_files=str(ROOT / "tiny/labels/test.parquet"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(rows) == len(table) == 512
    assert results["test/accuracy"] == pytest.approx(np.mean([row["responses"][0]["is_best"] for row in rows]))
    assert results["test/constant"] == pytest.approx(np.bincount(table["best"]).max() / 512)
    for label, row in zip(table.select(range(4)), rows, strict=False):
        query = [token for token in label["query"] if token != 50259]
        samples = [label[f"sample{i}"] for i in range(4)]
        rewards = plain_rewards(runs.reward / "reward_model", [query + sample for sample in samples])
        order = np.argsort(rewards)[::-1]
        assert row["query"] == tokenizer.decode(query)
        assert [x["response"] for x in row["responses"]] == [tokenizer.decode(samples[i]) for i in order]
        assert [x["reward"] for x in row["responses"]] == pytest.approx([rewards[i] for i in order], abs=1e-4)
        assert [x["is_best"] for x in row["responses"]] == [i == label["best"] for i in order]


# Processes and seeds


def test_two_processes_sample_the_same_episodes(runs: SimpleNamespace, two: SimpleNamespace) -> None:
    one, other = (read_lines(made.ppo / "metrics.jsonl") for made in (runs, two))
    assert len(other) == UPDATES  # only one process writes
    for name in ("scores", "kl", "entropy", "found_end", "score_total"):
        assert other[0][f"objective/{name}"] == pytest.approx(one[0][f"objective/{name}"], abs=1e-5), name
    assert [row["first_ratio_error"] for row in other] == [0] * UPDATES
    before = ([row["before"]["response"] for row in read_lines(made.ppo / "samples.jsonl")] for made in (runs, two))
    assert len(set(map(tuple, before))) == 1
    assert_schedules(other, 2e-4, 0.15, 6.0, 32 / 2000)


def test_two_processes_train_the_same_reward_model(runs: SimpleNamespace, two: SimpleNamespace) -> None:
    one, other = (read_lines(made.reward / "metrics.jsonl") for made in (runs, two))
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    one, other = (json.loads((made.reward / "results.json").read_text()) for made in (runs, two))
    assert one.pop("before") == pytest.approx(other.pop("before"), abs=1e-4)
    assert one.pop("after") == pytest.approx(other.pop("after"), abs=1e-2)
    assert one == pytest.approx(other, abs=1e-2)


def test_processes_that_find_no_gpu_train_together(runs: SimpleNamespace) -> None:
    """And not two policies on half of the batch each, of which one is saved."""
    words = [*PPO_WORDS, "--num_epochs", "1", "--output_dir", "torchrun"]
    finish(start([*TORCHRUN, str(ROOT / PPO), *words], runs.folder))
    one, other = (read_lines(folder / "metrics.jsonl") for folder in (runs.ppo, runs.folder / "torchrun"))
    for name in ("scores", "entropy", "found_end"):
        assert other[0][f"objective/{name}"] == pytest.approx(one[0][f"objective/{name}"], abs=1e-5), name


def test_a_seed_decides_the_whole_run(runs: SimpleNamespace) -> None:
    finish(start([str(ROOT / PPO), *PPO_WORDS, "--output_dir", "other", "--seed", "2"], runs.folder))
    folders = (runs.ppo, runs.again, runs.folder / "other")
    files = ("metrics.jsonl", "samples.jsonl", "policy/model.safetensors", "policy/value_head.safetensors")
    digests = [[hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files] for folder in folders]
    assert digests[0] == digests[1]
    assert all(ours != theirs for ours, theirs in zip(digests[0], digests[2], strict=True))
    queries = [{row["query"] for row in read_lines(folder / "samples.jsonl")} for folder in folders]
    assert queries[0] == queries[1] != queries[2]


# Rewards from elsewhere


def test_a_function_in_the_current_folder_is_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting.py").write_text(
        "CALLS = []\n"
        "def count(queries, responses):\n"
        "    values = [query.count('e') + 10 * response.count('he') for query, response in zip(queries, responses)]\n"
        "    CALLS.append((queries, responses, values))\n"
        "    return values\n"
    )
    schedule = ["--kl_target", "0.01", "--kl_horizon", "100", "--kl_coef", "0.1"]
    words = [*SMALL, *schedule, "--reward_fn", "counting:count", "--output_dir", "out"]
    run_script(PPO, words, tmp_path, monkeypatch)
    calls = sys.modules.pop("counting").CALLS
    rows, samples = read_lines(tmp_path / "out/metrics.jsonl"), read_lines(tmp_path / "out/samples.jsonl")
    assert len(calls) == 1 + 3 + 1 and len(rows) == 3  # before, updates, after
    for row, (_, responses, values) in zip(rows, calls[1:-1], strict=True):
        scores = [value if text.endswith(".") else -1 for text, value in zip(responses, values, strict=True)]
        assert row["objective/scores"] == pytest.approx(np.mean(scores), rel=1e-6)
    for name, (queries, responses, values) in (("before", calls[0]), ("after", calls[-1])):
        assert [row["query"] for row in samples] == queries
        assert [row[name]["response"] for row in samples] == responses
        assert [row[name]["score"] for row in samples] == values
        assert values == [q.count("e") + 10 * r.count("he") for q, r in zip(queries, responses, strict=True)]
    assert rows[1]["objective/kl"] > 0.012  # far above the target: the coefficient rises after it fell
    assert_schedules(rows, 2e-4, 0.1, 0.01, 32 / 100)


def test_a_reward_model_with_another_tokenizer_reads_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {word: i for i, word in enumerate(["<s>", "<unk>", *WORDS, *".,"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<s>")
    config = GPT2Config(vocab_size=len(words), n_embd=16, n_layer=1, n_head=2, n_positions=256, num_labels=1)
    config.pad_token_id, config.reward_gain, config.reward_bias = 0, 3.0, 0.25
    config.initializer_range = 0.5
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "judge")
    own.save_pretrained(tmp_path / "judge")
    run_script(PPO, [*SMALL, "--reward_model", "judge", "--output_dir", "out"], tmp_path, monkeypatch)
    samples = read_lines(tmp_path / "out/samples.jsonl")
    for name in ("before", "after"):
        rows = [own(row["query"] + row[name]["response"])["input_ids"] for row in samples]
        scores = [row[name]["score"] for row in samples]
        assert scores == pytest.approx(plain_rewards(tmp_path / "judge", rows), abs=1e-4)
        assert np.std(scores) > 0.1


def test_the_newest_reward_model_of_the_preset_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for i, name in enumerate(("tiny-2-b", "tiny-1-a", "sentiment-1-c")):  # newer and newer, by time and not by name
        folder = tmp_path / "runs" / f"train_reward-{name}" / "reward_model"
        save_classifier(folder, "gpt2", reward_bias=float(i))
        os.utime(folder, (1_000_000 + i, 1_000_000 + i))
    (tmp_path / "runs" / "train_reward-tiny-3-d").mkdir()  # a run that is not finished
    for preset, given, bias in (
        ("tiny", None, 1.0),
        ("sentiment", None, 2.0),
        ("tiny", "runs/train_reward-tiny-2-b", 0.0),
    ):
        args = ppo_args(reward_model=given and f"{given}/reward_model")
        assert ppo_rlhf.load_reward(args, preset, tokenizer, DEVICE).bias.item() == bias


# Labels of other forms


def preferences() -> list[dict[str, str]]:
    """Forty pairs; a happy end is always preferred to a sad one."""
    people, places = ("baker", "sailor", "weaver", "farmer", "doctor"), ("gate", "door", "bridge", "shore")
    ends = ((" She was happy and proud.", " She was sad and tired."), (" It was a good day.", " It was a bad day."))
    prompts = [f"The {person} stood at the {place}." for person in people for place in places]
    return [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt in prompts for good, bad in ends]


def messages(row: dict[str, str], form: str) -> dict[str, Any]:
    """The pair as lists of messages: with a prompt of its own, or with the prompt at the start of both answers."""
    prompt = [{"role": "user", "content": row["prompt"]}]
    answers = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    if form == "explicit":
        return {"prompt": prompt} | answers
    return {name: prompt + answer for name, answer in answers.items()}


TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(TINY, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["text", "implicit", "explicit"])
def test_preferences_train_a_reward_model(
    form: str, tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = preferences() if form == "text" else [messages(row, form) for row in preferences()]
    (tmp_path / "pairs.jsonl").write_text(to_lines(*rows))
    words = [
        "--label_dataset",
        "pairs.jsonl",
        "--num_labels",
        "24",
        "--normalization_samples",
        "16",
        "--batch_size",
        "4",
    ]
    words += ["--output_dir", "out"] + (["--base_model", "chat"] if form != "text" else [])
    run_script(REWARD, words, tmp_path, monkeypatch)
    results, steps = json.loads((tmp_path / "out/results.json").read_text()), read_lines(tmp_path / "out/metrics.jsonl")
    assert len(steps) == 24 / 4
    assert results["test/accuracy"] >= 0.9 > results["test/constant"]  # what is right is drawn, so no constant is
    for row in read_lines(tmp_path / "out/samples.jsonl"):
        best = next(answer for answer in row["responses"] if answer["is_best"])
        assert re.search("happy|good", best["response"]) and "sad" not in best["response"]
        assert row["query"].endswith("." if form == "text" else "[assistant]")


@pytest.mark.parametrize("form", ["text", "implicit", "explicit"])
def test_preferences_keep_prompt_and_answers_as_the_template_writes_them(
    form: str, tmp_path: Path, chat_model: Path
) -> None:
    pairs = preferences()
    rows = pairs if form == "text" else [messages(row, form) for row in pairs]
    table, tokenizer = datasets.Dataset.from_list(rows), AutoTokenizer.from_pretrained(chat_model)
    labels = train_reward.read_labels(table, tokenizer, train_reward.Args(base_model=str(chat_model)))
    assert {best for *_, best in labels} == {0, 1}
    for pair, (query, responses, best) in zip(pairs, labels, strict=True):
        assert tokenizer.decode(query) == (pair["prompt"] if form == "text" else f"[user]{pair['prompt']}[assistant]")
        assert tokenizer.decode(responses[best]) == pair["chosen"]
        assert tokenizer.decode(responses[1 - best]) == pair["rejected"]


def test_columns_that_only_begin_like_samples_are_passed_over() -> None:
    table = datasets.Dataset.from_list([row | {"sampled_by": "a person"} for row in preferences()])
    labels = train_reward.read_labels(table, AutoTokenizer.from_pretrained(TINY), train_reward.Args())
    assert len(labels) == len(table)


def test_a_table_without_held_out_rows_is_trained_on_whole(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(to_lines(*preferences()))
    args = train_reward.Args(label_dataset=str(tmp_path / "pairs.jsonl"))
    labels, held_out = train_reward.load_labels(AutoTokenizer.from_pretrained(TINY), args)
    assert (len(labels), len(held_out)) == (40, 0)


def test_a_run_needs_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ppo_rlhf.open_output_dir(tmp_path / "out", ppo_args(), "tiny", 0)
    assert json.loads((tmp_path / "out/args.json").read_text())["commit"] == ""


# Presets: the values of OpenAI's launch.py

BOOKS = {"query_length": 64, "response_length": 24, "start_text": ".", "end_text": ".", "temperature": 0.7}
CNNDM = {"query_length": 500, "response_length": 75, "start_text": None, "end_text": "\n", "temperature": 0.5}
CNNDM |= {"query_prefix": "Article:\n\n", "query_suffix": "\n\nTL;DR:"}
TLDR = CNNDM | {"query_prefix": "", "end_text": None, "temperature": 0.7}
TASKS = {"sentiment": BOOKS, "descriptiveness": BOOKS, "cnndm": CNNDM, "tldr": TLDR}

ALWAYS = {"total_episodes": 1_000_000, "num_epochs": 4, "num_minibatches": 1, "vf_coef": 0.1, "cliprange": 0.2}
ALWAYS |= {"cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "penalty_reward_value": -1.0, "adam_eps": 1e-5}
ALWAYS |= {"penalty_mode": "replace", "mask_truncated": False, "adam": "tf", "base_model": "gpt2"}
PPO_BOOKS = {"truncate_token": ".", "truncate_after": 16, "lr": 1e-5, "batch_size": 512, "kl_coef": 0.15}
PPO_BOOKS |= {"kl_target": 6.0, "kl_horizon": 1e4, "whiten_rewards": True}
PPO_CNNDM = {"truncate_token": "\n", "truncate_after": 55, "lr": 2e-6, "batch_size": 32, "kl_coef": 0.01}
PPO_CNNDM |= {"kl_target": None, "whiten_rewards": False}
PPO_TASKS = {
    "sentiment": PPO_BOOKS,
    "descriptiveness": PPO_BOOKS,
    "cnndm": PPO_CNNDM,
    "tldr": PPO_CNNDM | {"kl_coef": 0.03},
}

REWARD_BOOKS = {"num_labels": 4992, "batch_size": 32, "lr": 5e-5, "adam": "tf", "adam_eps": 1e-5, "base_model": "gpt2"}
REWARD_SUMMARY = REWARD_BOOKS | {"num_labels": 46_000, "batch_size": 16, "lr": 2.5e-5}
REWARD_TASKS = dict(zip(TASKS, (REWARD_BOOKS, REWARD_BOOKS, REWARD_SUMMARY, REWARD_SUMMARY), strict=True))


@pytest.mark.parametrize("preset", TASKS)
def test_ppo_presets_are_the_originals(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PPO, preset])
    name, args = ppo_rlhf.parse_args("ppo")
    expected = TASKS[preset] | ALWAYS | PPO_TASKS[preset]
    assert name == preset
    assert {key: getattr(args, key) for key in expected} == expected


@pytest.mark.parametrize("preset", TASKS)
def test_reward_presets_are_the_originals(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [REWARD, preset])
    name, args = train_reward.parse_args("reward")
    expected = TASKS[preset] | REWARD_TASKS[preset]
    assert name == preset
    assert {key: getattr(args, key) for key in expected} == expected


def test_without_a_preset_the_arguments_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PPO])
    assert ppo_rlhf.parse_args("ppo") == ("tiny", ppo_rlhf.Args())
    monkeypatch.setattr(sys, "argv", [REWARD])
    assert train_reward.parse_args("reward") == ("tiny", train_reward.Args())


def test_a_flag_after_a_preset_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PPO, "sentiment"])
    _, preset = ppo_rlhf.parse_args("ppo")
    words = ["--lr", "3e-6", "--kl_target", "none", "--truncate_token", "eos", "--no-whiten_rewards", "--adam", "torch"]
    monkeypatch.setattr(sys, "argv", [PPO, "sentiment", *words])
    _, args = ppo_rlhf.parse_args("ppo")
    changed = {"lr": 3e-6, "kl_target": None, "truncate_token": "eos", "whiten_rewards": False, "adam": "torch"}
    assert vars(args) == vars(preset) | changed
    assert all(vars(preset)[name] != value for name, value in changed.items())
