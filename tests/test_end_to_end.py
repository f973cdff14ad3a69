"""Whole runs on tiny models, on one process and on two: the files, metrics and models that they leave."""

import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from fork_tools import MODEL, PPO, REWARD, RLOO, SCRIPTS, UPDATES, kit, plain
from run_tools import LAUNCH, read_lines, start
from safetensors.torch import load_file
from tiny_models import save_classifier
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo_rlhf

OBJECTIVE = [f"objective/{name}" for name in "kl kl_coef entropy scores score_total non_score_reward".split()]
NAMES = [*OBJECTIVE, *(f"ppo/{x}" for x in "loss/policy policy/entropy policy/approxkl policy/clipfrac lr".split())]
VALUES = ["ppo/loss/value", "ppo/loss/total", "ppo/returns/mean", "ppo/returns/var"]
VALUES += [f"ppo/val/{name}" for name in "vpred error clipfrac mean var var_explained ratio ratio_var".split()]
METRICS = {PPO: [*NAMES, *VALUES], RLOO: NAMES, REWARD: ["train/loss", "train/accuracy", "train/lr"]}
BOTH = [(script, world) for script in SCRIPTS for world in (1, 2)]


def metrics(script: str, world: int) -> list[dict[str, float]]:
    return read_lines(plain(script, world) / "out/metrics.jsonl")


@pytest.mark.parametrize(("script", "world"), BOTH)
def test_a_run_leaves_these_files(script: str, world: int) -> None:
    out, model = plain(script, world) / "out", {"config.json", "model.safetensors"}
    model |= {"tokenizer.json", "tokenizer_config.json"} | ({"generation_config.json"} if script != REWARD else set())
    model |= {"value_head.safetensors"} if script == PPO else set()
    state = {"model.safetensors", "optimizer.bin", "state.json", *(f"random_states_{i}.pkl" for i in range(world))}
    files = {"args.json", "metrics.jsonl", "samples.jsonl", "lock", *(f"{MODEL[script]}/{x}" for x in model)}
    files |= {f"checkpoints/000000{i}/{x}" for i in (3, 4) for x in state}
    files |= {"results.json" if script == REWARD else "curves.png"}
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} == files
    record = json.loads((out / "args.json").read_text())
    assert (record["script"], record["preset"], record["torch"]) == (script[:-3], "tiny", torch.__version__)
    assert (record["args"]["batch_size"], record["args"]["seed"], record["args"]["start_text"]) == (4, 1, None)
    if script != REWARD:
        data = (out / "curves.png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert 600 <= width <= 4000 and 250 <= height <= 2000 and data[-8:-4] == b"IEND"


@pytest.mark.parametrize(("script", "world"), BOTH)
def test_metrics_hold_a_line_per_update_with_every_name_and_begin_at_the_reference(script: str, world: int) -> None:
    rows = metrics(script, world)
    assert len(rows) == UPDATES
    for i, row in enumerate(rows):
        assert set(METRICS[script]) <= set(row) and all(math.isfinite(x) for x in row.values())
        assert row["train/labels" if script == REWARD else "ppo/episode"] == 4 * (i + 1)
        if script == RLOO:
            assert not [name for name in row if "returns" in name or "vpred" in name]
        if script != REWARD:
            assert row["first_ratio_error"] == 0 and (row["objective/kl"] == 0) == (i == 0)
    if script == PPO:
        assert rows[0]["ppo/val/mean"] == rows[0]["ppo/val/var"] == 0, "the value head begins at zero"


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_samples_show_every_evaluation_query_before_and_after(script: str) -> None:
    rows = read_lines(plain(script, 1) / "out/samples.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert list(row) == "query response score kl response_after score_after kl_after".split()
        assert row["kl"] == 0 != row["kl_after"] and row["response"] != row["response_after"]
    assert {row["query"] for row in rows} <= {row["text"] for row in read_lines(kit() / "queries.jsonl")}


def test_samples_of_a_reward_model_are_the_labels_held_out_and_its_results_count_them() -> None:
    out, given = plain(REWARD, 1) / "out", read_lines(kit() / "labels.jsonl")[16:]
    rows, results = read_lines(out / "samples.jsonl"), json.loads((out / "results.json").read_text())
    model = AutoModelForSequenceClassification.from_pretrained(out / "reward_model")
    assert (model.config.num_labels, model.config.reward_gain) == (1, pytest.approx(results["gain"]))
    for label, row in zip(given, rows, strict=True):
        tokens = [label["query"] + label[f"sample{i}"] for i in range(2)]
        with torch.no_grad():
            rewards = [results["gain"] * model(torch.tensor([x])).logits.item() + results["bias"] for x in tokens]
        assert row["rewards"] == pytest.approx(rewards, abs=1e-4) and row["best"] == label["best"]
        assert row["responses"] == [" ".join(f"w{x}" for x in label[f"sample{i}"]) for i in range(2)]
    right = [row["rewards"][row["best"]] == max(row["rewards"]) for row in rows]
    assert results["test/accuracy"] == sum(right) / 4
    assert results["test/constant"] == max(sum(x["best"] == i for x in given) for i in range(2)) / 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_models_load_with_plain_transformers_and_have_moved(script: str) -> None:
    folder = plain(script, 1) / "out" / MODEL[script]
    auto_class = AutoModelForSequenceClassification if script == REWARD else AutoModelForCausalLM
    model, info = auto_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    begin = load_file(kit() / "model/model.safetensors")
    for name, x in model.named_parameters():
        assert x.isfinite().all() and (name not in begin or not torch.equal(x, begin[name])), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(kit() / "model").get_vocab()
    if script != REWARD:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        inputs = tokenizer("w1 w2 w3", return_tensors="pt")
        assert model.generate(**inputs, min_new_tokens=5, max_new_tokens=5, pad_token_id=0).shape == (1, 8)
    if script == PPO:
        head = load_file(folder / "value_head.safetensors")
        assert {name: tuple(x.shape) for name, x in head.items()} == {"weight": (1, model.config.n_embd), "bias": (1,)}
        assert all(x.abs().max() > 0 for x in head.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_draw_the_same_and_without_statistics_per_rank_end_with_the_same_weights(script: str) -> None:
    one, two = metrics(script, 1), metrics(script, 2)
    names = [name for name in one[0] if name.startswith("objective/")] if script == PPO else one[0]
    for name in names:
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-5, abs=1e-5), name
    folders = [plain(script, world) / "out" for world in (1, 2)]
    if script != REWARD:
        before = [[row["response"] for row in read_lines(folder / "samples.jsonl")] for folder in folders]
        assert before[0] == before[1]
    if script != PPO:  # which whitens per rank
        weights = [load_file(folder / MODEL[script] / "model.safetensors") for folder in folders]
        assert all((x - weights[1][name]).abs().max() < 1e-4 for name, x in weights[0].items())


def test_accelerates_launcher_starts_the_embedded_default_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "taste.py").write_text("def length(queries, responses):\n    return [len(x) for x in responses]\n")
    words = "--reward_fn taste:length --total_episodes 32 --batch_size 16 --eval_queries 4 --num_epochs 1"
    process = start([*LAUNCH, str(ROOT / PPO), *words.split(), "--checkpoint_every", "2"], tmp_path)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (out,) = tmp_path.glob("runs/ppo_rlhf-tiny-1-*")
    assert f"see {out.relative_to(tmp_path)}" in printed
    assert json.loads((out / "checkpoints/0000002/state.json").read_text())["processes"] == 2
    rows = read_lines(out / "samples.jsonl")
    assert [row["score"] for row in rows] == [len(row["response"]) for row in rows]
    assert (out / "policy/model.safetensors").exists() and len(read_lines(out / "metrics.jsonl")) == 2


def test_the_newest_reward_model_of_the_preset_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    for i, name in enumerate(("tiny-2-b", "tiny-1-a", "sentiment-1-c")):  # newer and newer, by time and not by name
        folder = tmp_path / "runs" / f"train_reward-{name}" / "reward_model"
        save_classifier(folder, "gpt2", reward_bias=float(i))
        os.utime(folder, (1_000_000 + i, 1_000_000 + i))
    (tmp_path / "runs" / "train_reward-tiny-3-d").mkdir()  # a run that is not finished
    for preset, given, bias in (
        ("tiny", None, 1.0),
        ("sentiment", None, 2.0),
        ("tiny", "runs/train_reward-tiny-2-b/reward_model", 0.0),
    ):
        args = ppo_rlhf.Args(reward_model=given)
        reward = ppo_rlhf.load_reward(args, preset, tokenizer, 24, torch.device("cpu"))
        assert (reward.config.reward_bias, args.reward_model is None) == (bias, False)
