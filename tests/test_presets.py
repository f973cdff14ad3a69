"""Every preset's command line runs from the files that it names, offline; its values are those of
OpenAI's table."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_tools
import huggingface_hub.constants
import pytest
from hub_tools import GPT2, LABELS
from huggingface_hub import HfFileSystem
from run_tools import call, read_lines

import ppo_rlhf
import rloo_rlhf
import train_reward

SMALL = {  # the reward model comes first: the others take it
    "train_reward.py": "--batch_size 4 --num_labels 4 --normalization_samples 2",
    "ppo_rlhf.py": "--batch_size 2 --total_episodes 2 --eval_queries 1",
    "rloo_rlhf.py": "--batch_size 4 --total_episodes 4 --eval_queries 1",
}
# OpenAI's launch.py; the queries of its label files are cut to start and end text already.
TASKS = {"sentiment": 0, "descriptiveness": 0, "cnndm": 1, "tldr": 2}  # the column in these tables
ARTICLE = "Article:\n\n"
SUMMARY = "\n\nTL;DR:"
TASK = {
    "query_length": (64, 500, 500),
    "response_length": (24, 75, 75),
    "temperature": (0.7, 0.5, 0.7),
    "query_prefix": ("", ARTICLE, ""),
    "query_suffix": ("", SUMMARY, SUMMARY),
    "truncate_token": (".", "\n", "\n"),
    "long_queries": (None, "keep_start", "keep_start"),
}
RL = {
    "lr": (1e-5, 2e-6, 2e-6),
    "batch_size": (512, 32, 32),
    "truncate_after": (16, 55, 55),
    "kl_coef": (0.15, 0.01, 0.03),
    "adaptive_kl_target": (6.0, None, None),
    "kl_horizon": (1e4, 2e3, 2e3),
}
REWARD = {
    "num_labels": (4_992, 46_000, 46_000),
    "batch_size": (32, 16, 16),
    "lr": (5e-5, 2.5e-5, 2.5e-5),
}
WHITEN_REWARDS = (True, False, False)
ALL = {"base_model": "gpt2", "start_text": None, "end_text": None, "adam": "tf", "adam_eps": 1e-5}
ALL_RL = {
    "total_episodes": 1_000_000,
    "num_epochs": 4,
    "num_minibatches": 1,
    "cliprange": 0.2,
    "mask_truncated": False,
    "penalty_reward_value": -1.0,
    "penalty_mode": "replace",
}
ALL_PPO = {"vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder: what HF_HOME does to a process that starts with it. What the hub would say
    of names in hf://, the files of the cache say."""
    folder = tmp_path_factory.mktemp("cache")

    def glob(_: Any, name: str, **options: Any) -> dict[str, dict[str, str]]:
        found = folder.glob(f"{LABELS}/snapshots/*/{name.partition('preferences/')[2]}")
        return {name: {"type": "file"}} if any(found) else {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(HfFileSystem, "glob", glob)
        patch.setattr(HfFileSystem, "_repo_and_revision_exist", lambda *_: (True, None))
        yield hub_tools.fill(folder)


@pytest.mark.parametrize("task", TASKS)
def test_values_are_those_of_openais_launch_file(
    task: str, tmp_path: Path, monkeypatch: Any
) -> None:
    column = TASKS[task]
    size = "60k" if column else "5k"
    file = f"hf://datasets/vwxyzjn/lm-human-preferences/{task}/offline_{size}.json"
    task_values, rl, reward = (
        {name: row[column] for name, row in table.items()} for table in (TASK, RL, REWARD)
    )
    shared = ALL | task_values | {"query_dataset": file}
    # The original takes 512 samples when asked for 256.
    reward |= {"label_dataset": file, "normalization_samples": 512}
    ppo = ALL_PPO | {"whiten_rewards": WHITEN_REWARDS[column]}
    for script, expected in (
        ("train_reward.py", shared | reward),
        ("ppo_rlhf.py", shared | ALL_RL | rl | ppo),
        ("rloo_rlhf.py", shared | ALL_RL | rl),
    ):
        preset, args = call(script, [task], tmp_path, monkeypatch, "parse_args")
        assert preset == task
        assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf, train_reward])
def test_no_preset_is_tiny_and_flags_win(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    file = f"{script.__name__}.py"
    assert call(file, [], tmp_path, monkeypatch, "parse_args") == ("tiny", script.Args())
    words = ["tldr", "--temperature", "0.9"]
    _, args = call(file, words, tmp_path, monkeypatch, "parse_args")
    assert (args.temperature, args.query_length) == (0.9, 500)
    with pytest.raises(script.UserError, match="no preset 'sentimant': choose one of tiny, "):
        call(file, ["sentimant"], tmp_path, monkeypatch, "parse_args")


@pytest.mark.parametrize("task", TASKS)
def test_every_command_line_runs_offline(task: str, tmp_path: Path, monkeypatch: Any) -> None:
    """No query is left out; a label would leave too few."""
    for script, small in SMALL.items():
        call(script, [task, *small.split()], tmp_path, monkeypatch)
        (folder,) = tmp_path.glob(f"runs/{script[:-3]}-{task}-1-*")
        assert len(read_lines(folder / "metrics.jsonl")) == 1
        model = "reward_model" if script == "train_reward.py" else "policy"
        assert (folder / model / "config.json").exists()
        module = importlib.import_module(script[:-3])
        _, args = call(script, [task], tmp_path, monkeypatch, "parse_args")
        tokenizer = module.load_tokenizer("base_model", args)
        queries = module.load_queries("query_dataset", args, tokenizer, 2 * hub_tools.ROWS)
        assert len(queries) == hub_tools.ROWS


MISSING = [
    (f"{LABELS}/snapshots/*/sentiment/*", "train_reward.py sentiment", "sentiment/offline_5k.json"),
    (f"{LABELS}/snapshots/*/cnndm/*", "ppo_rlhf.py cnndm", "cnndm/offline_60k.json"),
    (f"{LABELS}/snapshots/*/tldr/*", "rloo_rlhf.py tldr", "tldr/offline_60k.json"),
    (f"{GPT2}/snapshots/*/model.safetensors", "train_reward.py sentiment", "model.safetensors"),
    (f"{GPT2}/refs/main", "train_reward.py tldr", "base_model gpt2: "),
]


@pytest.mark.parametrize(("file", "command", "says"), MISSING)
def test_a_missing_file_is_named_in_one_line(
    file: str, command: str, says: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = cache.glob(file)
    script, task = command.split()
    away = path.with_name("away")
    path.rename(away)
    try:
        error = importlib.import_module(script[:-3]).UserError
        with pytest.raises(error, match=f"^--[^\n]*{says}[^\n]*$"):
            call(script, [task, *SMALL[script].split()], tmp_path, monkeypatch)
    finally:
        away.rename(path)
    assert not (tmp_path / "runs").exists()
