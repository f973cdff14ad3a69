"""The commands of docs/own_model.md run, with a small random Qwen2 and a file of the data's form.
Its numbers are those of the table of memory and of a record."""

import json
import re
from pathlib import Path

import fork_tools
import pytest
import tiny_models
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO
from run_tools import read_lines, to_lines, turn
from test_readme import commands
from transformers import AutoTokenizer

from benchmark.speed import memory_table

PAGE = "docs/own_model.md"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
DATA = "trl-lib/hh-rlhf-helpful-base"
MARKS = ["<|im_start|>", "<|im_end|>"]
# As Qwen2.5's: a system message where the chat has none
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Last words of a command, which count: everything is small.
SMALL = "--response_length 8 --micro_batch_size 4 --batch_size 8 --dtype fp32 --query_length 64"
SMALLER = {
    REWARD: f"{SMALL} --num_labels 24 --normalization_samples 8",
    PPO: f"{SMALL} --total_episodes 16 --eval_queries 2 --num_epochs 1",
}
SMALLER[RLOO] = SMALLER[PPO]


def save_model(folder):
    """A random Qwen2 and a tokenizer whose end of sequence ends a turn, as Qwen2.5's does."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny/model")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "eos_token": MARKS[1]})
    tokenizer.bos_token = None
    tokenizer.chat_template = SYSTEM + TURNS + ASK
    size = len(tokenizer) + 7  # more embeddings than tokens, as Qwen2.5 has
    changes = {"vocab_size": size, "max_position_embeddings": 128, "tie_word_embeddings": True}
    tiny_models.save_model(folder, "qwen2", **changes)
    tokenizer.save_pretrained(folder)


def save_data(folder):
    """Pairs in the columns of the data set, in its two splits."""
    folder.mkdir(parents=True)
    for split, count in (("train", 32), ("test", 8)):
        rows = []
        for i in range(count):
            asked = turn(f"Is the lamp {i} lit?", "user")
            row = {"prompt": asked, "chosen": turn("Yes, it is.")}
            row["rejected"] = turn(f"{i} is a number.")
            rows.append(row)
        (folder / f"{split}.jsonl").write_text(to_lines(*rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page's names of model and data are folders, and all its commands have run."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("own") / "own"
    save_model(place / MODEL)
    save_data(place / DATA)
    found = commands(PAGE)
    assert [words[0] for words in found] == [REWARD, PPO, RLOO, PPO, RLOO]
    for script, *words in found:
        printed = fork_tools.succeed(script, words + SMALLER[script].split(), place)
        name = words[words.index("--output_dir") + 1]
        (place / f"{Path(name).name}.txt").write_text(printed)
    return place


def test_every_run_of_the_page_ends(folder):
    for name in ("qwen_ppo", "qwen_rloo", "qwen_lora"):
        lines = read_lines(folder / f"runs/{name}/metrics.jsonl")
        assert len(lines) == 2
        assert abs(lines[0]["objective/kl"]) < 1e-3
        assert (folder / f"runs/{name}/samples.jsonl").exists()
    results = json.loads((folder / "runs/qwen_reward/results.json").read_text())
    assert 0 <= results["test/accuracy"] <= 1


def test_the_best_of_each_four_responses_is_kept(folder, monkeypatch):
    """By the page's code, from responses of the starting model."""
    monkeypatch.chdir(folder)
    page = (ROOT / PAGE).read_text()
    (code,) = re.findall(r"```python\n(import json\n\nbest .*?)```", page, re.S)
    exec(compile(code, PAGE, "exec"), {})
    responses = read_lines(folder / "runs/qwen_best/samples.jsonl")
    assert all(row["response"] == row["response_after"] for row in responses)
    kept = read_lines(folder / "best.jsonl")
    assert len(kept) == 2
    for row in kept:
        scores = [other["score"] for other in responses if other["query"] == row["query"]]
        assert len(scores) == 4
        assert row["score"] == max(scores)


def test_prompts_of_three_texts_become_chats(tmp_path, monkeypatch):
    """By the page's code. The answers stay texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = {"prompt": "Is it lit?", "chosen": "Yes.", "rejected": "No."}
    Path("my_pairs.jsonl").write_text(to_lines(texts, texts))
    (code,) = re.findall(r"```python\n(from datasets .*?)```", (ROOT / PAGE).read_text(), re.S)
    exec(compile(code, PAGE, "exec"), {})
    row, _ = read_lines(Path("my_labels.jsonl"))
    assert row == texts | {"prompt": turn("Is it lit?", "user")}


def test_what_is_printed_is_what_the_page_says_to_look_for(folder):
    printed = (folder / "qwen_reward.txt").read_text()
    assert "24 of 24 rows" in printed
    (label,) = re.findall(r"^--label_dataset: 24, first (\[.*\])", printed, re.M)
    assert label.count("<|im_start|>assistant\\n'") == 1
    assert label.count("<|im_end|>'") == 2
    for name in ("qwen_reward", "qwen_ppo"):
        text = (folder / f"{name}.txt").read_text()
        (first,) = re.findall(r"^--query_dataset: .*first '(.*)'$", text, re.M)
        assert first.startswith("<|im_start|>system\\n")
        assert first.endswith("<|im_start|>assistant\\n")


def test_every_metric_of_the_page_is_logged(folder):
    (line, _) = read_lines(folder / "runs/qwen_ppo/metrics.jsonl")
    page = (ROOT / PAGE).read_text()
    names = re.findall(r"^\| `([a-z_/]+)`", page, re.M)
    assert len(names) == 10
    assert [name for name in names if name not in line] == []


def test_the_memory_is_that_of_the_table():
    page = (ROOT / PAGE).read_text()
    full, checkpointing, _, lora, _ = memory_table.SETTINGS
    shown = []
    for setting, rows in ((full, 4), (checkpointing, 4), (lora, 4), (full, 8)):
        own = memory_table.replace(setting, micro_batch=rows, query=512)
        peak = memory_table.memory(memory_table.MODELS["0.5B"], own)["peak"]
        shown.append(f"{peak:.1f}")
    *table, eight = shown
    assert re.findall(r"^\| .* \| (\d+\.\d) \|$", page, re.M) == table
    assert f"would need {eight} GB" in page


@pytest.mark.long
def test_the_memory_on_other_pages_is_that_of_the_program():
    """On running.md a column for each model, and on gpu.md some of them."""
    running = (ROOT / "docs/running.md").read_text()
    settings = {setting.name: setting for setting in memory_table.SETTINGS}
    order = ("full, one GPU", "full, one GPU, checkpointing", "LoRA 16, one GPU")
    order += ("LoRA 16, one GPU, checkpointing", "full, FSDP2 on 8, checkpointing")
    peaks = []
    for name in order:
        parts = [memory_table.memory(x, settings[name]) for x in memory_table.MODELS.values()]
        peaks.append([f"{part['peak']:.1f}" for part in parts])
    hosts = [f"{part['host']:.1f}" for part in parts]  # of one GPU or several
    rows = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", running, re.M)
    assert [list(row) for row in rows] == peaks
    assert f"needs {', '.join(hosts[:-1])} or {hosts[-1]} GB of the host's memory" in running
    known = set(sum(peaks, []))
    table = (ROOT / "docs/gpu.md").read_text().partition("| card |")[2].partition("\n\n")[0]
    shown = re.findall(r"\((\d+\.\d)(?: GB)?\)", table)
    assert len(shown) == 8
    assert set(shown) <= known


def test_the_measured_runs_are_those_of_the_records():
    page = (ROOT / PAGE).read_text().replace("\n", " ")
    moved = []
    gained = []
    for path in (ROOT / "benchmark/studies/films").glob("four_seeds-PPO-*.jsonl"):
        first, *_, last = read_lines(path)[:10]
        assert first["objective/kl"] == 0
        moved.append(last["objective/kl"])
        gained.append(last["objective/scores"] - first["objective/scores"])
    assert len(moved) == 4
    assert f"KL rose from 0 to between {min(moved):.1f} and {max(moved):.1f} nats" in page
    assert f"score by between {min(gained):.2f} and {max(gained):.2f}" in page
