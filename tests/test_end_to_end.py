"""Whole runs on tiny models, on one process and on two: the files, metrics and models that they leave."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from fork_tools import MODEL, PPO, REWARD, SCRIPTS, kit, plain
from run_tools import LAUNCH, read_lines, start
from safetensors.torch import load_file
from tiny_models import save_classifier
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo_rlhf


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_leaves_these_files(script: str, world: int) -> None:
    out, model = plain(script, world) / "out", {"config.json", "model.safetensors"}
    model |= {"tokenizer.json", "tokenizer_config.json"} | ({"generation_config.json"} if script != REWARD else set())
    state = {"model.safetensors", "optimizer.bin", "state.json", *(f"random_states_{i}.pkl" for i in range(world))}
    state |= {"model_1.safetensors"} if script == PPO else set()  # --ema
    files = {"args.json", "metrics.jsonl", "samples.jsonl", "lock", *(f"{MODEL[script]}/{x}" for x in model)}
    files |= {f"checkpoints/000000{i}/{x}" for i in (3, 4) for x in state}
    files |= {"results.json"} if script == REWARD else set()
    if script == PPO:
        files |= {f"policy_ema/{x}" for x in model} | {f"critic/{x}" for x in model | {"value_head.safetensors"}}
        files -= {"critic/generation_config.json"}
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} == files
    record = json.loads((out / "args.json").read_text())
    assert (record["script"], record["preset"], record["torch"]) == (script[:-3], "tiny", torch.__version__)
    assert (record["args"]["batch_size"], record["args"]["seed"], record["args"]["start_text"]) == (4, 1, None)


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
    if script == REWARD:  # its pad ends no text: it reads rows of any lengths
        rows = [[5, 6, 7, 8, 0], [9, 0], [4, 4, 7]]
        batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            alone = torch.cat([model(torch.tensor([row])).logits for row in rows])
            for padded in (model(**batch).logits, model(batch.input_ids).logits):
                assert (padded - alone).abs().max() < 1e-4 < alone.std()
    else:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        inputs = tokenizer("w1 w2 w3", return_tensors="pt")
        assert model.generate(**inputs, min_new_tokens=5, max_new_tokens=5, pad_token_id=0).shape == (1, 8)


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
    for preset, given, bias in (("tiny", None, 1.0), ("sentiment", None, 2.0), ("tiny", "train_reward-tiny-2-b", 0.0)):
        args = ppo_rlhf.Args(reward_model=given and f"runs/{given}/reward_model")
        reward = ppo_rlhf.load_reward(args, preset, tokenizer, 24, torch.device("cpu"))
        assert (reward.config.reward_bias, args.reward_model is None) == (bias, False)
