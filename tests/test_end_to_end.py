"""Whole runs on tiny models, on one process and on two: the files and models that they leave."""

import importlib
import json
import os
import re
import shutil
from datetime import timedelta
from pathlib import Path
from unittest import mock

import fork_tools
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import MODEL, PPO, REWARD, RLOO, SCRIPTS, UPDATES, WORDS, kit, parse, plain, succeed
from run_tools import assert_same_metrics, read_lines
from tiny_models import begin_with, loader, save_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ppo_rlhf
import train_reward
from plumbing import labels as labels_module
from plumbing import launch as launch_module
from plumbing import run as run_module

FOLDER = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


SHARED = ["tf_adam.py", *(f"plumbing/{path.name}" for path in ROOT.glob("plumbing/*.py"))]


def below(folder, names):
    return {f"{folder}/{name}" for name in names}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_leaves_these_files(script, world, tmp_path):
    out = plain(script, world) / "out"
    files = {"args.json", "metrics.jsonl", "samples.jsonl", "lock", script, *SHARED}
    files |= below(MODEL[script], FOLDER)
    files |= {"results.json"} if script == REWARD else {"policy/generation_config.json"}
    if "reward" in WORDS[script]:  # --critic
        files |= below("critic", FOLDER)
    if script == PPO:
        files |= below("modules", {"value_head.safetensors"})
    state = {"model.safetensors", "optimizer.bin", "state.json"}
    state |= {f"random_states_{i}.pkl" for i in range(world)}
    for number in (3, 4):
        files |= below(f"checkpoints/{number:07d}", state)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    if fork_tools.is_copy(script):
        found &= files  # it may leave more
    assert found == files
    for name in (script, *SHARED):
        assert (out / name).read_text() == (ROOT / name).read_text()
    record = json.loads((out / "args.json").read_text())
    assert (record["script"], record["torch"]) == (script[:-3], torch.__version__)
    _, args = parse(importlib.import_module(script[:-3]), WORDS[script])
    args.output_dir = str(out)
    assert record["args"] == json.loads(json.dumps(vars(args)))
    if world == 2:
        other = Path(f"{out.parent}-rank1.out").read_text()
        assert fork_tools.without_gloo(other) == ""  # the first process prints
    rows = read_lines(out / "metrics.jsonl")
    assert len(rows) == UPDATES
    if script != REWARD:
        columns = ["response", "score", "kl", "found_end"]
        columns = ["query", *columns, *[f"{column}_after" for column in columns]]
        assert list(read_lines(out / "samples.jsonl")[0]) == columns


@pytest.mark.skipif(fork_tools.is_copy(RLOO), reason="a copy may read more")
def test_rloo_reads_a_query_for_k_episodes():
    """Two are held out, and there are 16 episodes."""
    folder = plain(RLOO, 1)
    assert "rloo_k 2" in " ".join(WORDS[RLOO])
    printed = Path(f"{folder}-run.out").read_text()
    assert "--query_dataset: 16 rows, 10 read, 10 used, " in printed


def test_three_samples_are_printed_as_they_are(tmp_path, capsys):
    """Between quotes, so that no text can send commands to a terminal; each query once."""
    rows = []
    for i in range(4):
        texts = {"query": f"[red]q{i}", "response": f"[/x]\x1b]0;{i}"}
        texts["response_after"] = f"{{b}}\n{i}"
        rows += [texts | {"score": i / 7, "score_after": 2 * i / 7}] * 2
    before = {name: [row[name] for row in rows] for name in ("query", "response", "score")}
    after = {name: [row[f"{name}_after"] for row in rows] for name in ("response", "score")}
    run_module.write_samples(before, after | {"query": before["query"]}, tmp_path)
    written = read_lines(tmp_path / "samples.jsonl")
    for mine, row in zip(written, rows, strict=True):
        scores = {name: pytest.approx(row[name], rel=1e-14) for name in ("score", "score_after")}
        assert mine == row | scores
    printed = capsys.readouterr().out
    for i in range(3):
        before = rf"before: '[/x]\x1b]0;{i}'"
        assert printed.count(f"query: '[red]q{i}'\n{before}\nafter: '{{b}}\\n{i}'\n") == 1
    assert "[red]q3" not in printed
    assert printed.endswith("\nmean score 0.21 before, 0.43 after\n")


def test_main_runs_twice_in_a_process(folder, monkeypatch):
    """As in a notebook."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    preset, args = parse(ppo_rlhf, WORDS[PPO])
    for name in ("one", "two"):
        args.output_dir = name
        ppo_rlhf.main(preset, args)
        assert_same_metrics(folder / name, plain(PPO, 1) / "out", "main runs again")


@pytest.mark.parametrize("script", SCRIPTS)
def test_precision_and_compiler_of_a_config_change_no_bit(script, folder):
    """As its launcher hands them on: --dtype alone says what is in bf16, and a compiled model would
    be saved under other names. Nor do its accumulation steps, by which accelerate divides losses.
    """
    chosen = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}
    chosen["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
    succeed(script, WORDS[script], folder, **chosen)
    assert_same_metrics(folder / "out", plain(script, 1) / "out", "accelerate's config is read")
    for name in ("samples.jsonl", f"{MODEL[script]}/model.safetensors"):
        expected = (plain(script, 1) / "out" / name).read_bytes()
        assert (folder / "out" / name).read_bytes() == expected


@pytest.mark.parametrize("has", ["nothing", "accelerator", "accelerator and mps"])
def test_a_mac_uses_its_cpu(has):
    """MPS is an accelerator, but reduce_means needs float64, which it has not."""
    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: "acc" in has),
        mock.patch.object(torch.backends.mps, "is_available", lambda: "mps" in has),
        mock.patch.object(launch_module, "Accelerator", return_value=Accelerator()) as made,
        mock.patch.object(made.return_value, "wait_for_everyone") as wait,
    ):
        launch_module.make_accelerator("fp32")
    wait.assert_called_once()
    assert made.call_args.kwargs["cpu"] == (has != "accelerator")
    (settings,) = made.call_args.kwargs["kwargs_handlers"]
    assert settings.timeout == timedelta(hours=2)  # for slow disks and reward functions


def test_texts_are_scored_in_a_batch_as_the_documents_say():
    (code,) = re.findall(r"```python\n(def score.*?)```", (ROOT / "docs/data.md").read_text(), re.S)
    found = {}
    exec(code, found)
    folder = plain(REWARD, 1) / "out"
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward_model")
    texts = []
    rewards = []
    for row in read_lines(folder / "samples.jsonl"):
        texts += [f"{row['query']} {response}" for response in row["responses"]]
        rewards += row["rewards"]
    with torch.no_grad():
        batch = found["score"](model, tokenizer, [*texts, "w1 w2"])
    assert batch.tolist()[:-1] == pytest.approx(rewards, abs=1e-4)
    text = torch.tensor([[1, 2]])
    logit = model.score(model.base_model(text).last_hidden_state[:, -1]).item()
    expected = model.config.reward_gain * logit + model.config.reward_bias
    assert batch.tolist()[-1] == pytest.approx(expected, abs=1e-4)
    begin_with(tokenizer, "w1")  # samples.jsonl has the BOS in its texts
    with torch.no_grad():
        (reward,) = found["score"](model, tokenizer, ["w1 w2"]).tolist()
    assert reward == pytest.approx(expected, abs=1e-4)


def test_eos_is_not_the_padding_of_a_reward_model(tmp_path):
    """Also if it was that of the model that it started from."""
    folder = save_classifier(tmp_path / "start", "gpt2", pad_token_id=0)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
    weights = {f"lm.{name}": x for name, x in model.state_dict().items()}
    statistics = {"gain": 1.0, "bias": 0.0}
    train_reward.save_reward_model(model, weights, statistics, tokenizer, str(tmp_path))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model")
    assert saved.config.pad_token_id is None
    assert AutoTokenizer.from_pretrained(tmp_path / "reward_model").pad_token is None


def test_the_newest_reward_model_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    # The time is in the name, whatever the clock says of the folder.
    for i, name in enumerate(("tiny-2-20260102-030405", "tiny-1-20260103-030405")):
        folder = tmp_path / f"runs/train_reward-{name}"
        save_classifier(folder / "reward_model", "gpt2", reward_bias=float(i))
        (folder / "samples.jsonl").touch()
        for path in (folder, folder / "samples.jsonl"):
            os.utime(path, (1_000_000 - i, 1_000_000 - i))
    other = shutil.copytree(folder, tmp_path / "runs/train_reward-sentiment-1-20260101-030405")
    for file in (folder / ".DS_Store", folder.parent / ".DS_Store", other / "notes.txt"):
        file.touch()
    for name in ("tiny-mine", "tiny-mine-1-20260105-030405"):  # the second one of another preset
        shutil.copytree(folder, tmp_path / f"runs/train_reward-{name}")
    # A run that is not finished
    (tmp_path / "runs/train_reward-tiny-3-20260104-030405/reward_model").mkdir(parents=True)
    for preset, taken in (
        ("tiny", "tiny-1-20260103-030405"),
        ("sentiment", "sentiment-1-20260101-030405"),
    ):
        args = ppo_rlhf.Args()
        name = labels_module.newest_reward_model(preset)
        # The whole path, so that a run may be resumed from another folder
        assert name == f"{tmp_path}/runs/train_reward-{taken}/reward_model"
        score = ppo_rlhf.load_reward_model(loader(tokenizer, 24, args), name, args)
        assert score.args[0].config.reward_bias == 1
        assert capsys.readouterr().out == f"--reward_model {name}\n"
    # What the first process sees counts.
    seen = tmp_path / "runs/train_reward-tiny-2-20260102-030405/samples.jsonl"
    monkeypatch.setattr(labels_module, "broadcast_object_list", lambda _: [seen])
    assert labels_module.newest_reward_model("tiny") == str(seen.with_name("reward_model"))
