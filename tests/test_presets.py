"""Every preset's command line runs from the files that it names, offline; its values are those of OpenAI's table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_tools
import huggingface_hub.constants
import pytest
from hub_tools import GPT2, LABELS
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
TASK = {"query_length": (64, 500, 500), "response_length": (24, 75, 75), "temperature": (0.7, 0.5, 0.7)}
TASK |= {"query_prefix": ("", "Article:\n\n", ""), "query_suffix": ("", "\n\nTL;DR:", "\n\nTL;DR:")}
TASK |= {"truncate_token": (".", "\n", "\n"), "long_queries": (None, "keep_start", "keep_start")}
RL = {"lr": (1e-5, 2e-6, 2e-6), "batch_size": (512, 32, 32), "truncate_after": (16, 55, 55)}
RL |= {"kl_coef": (0.15, 0.01, 0.03), "kl_target": (6.0, None, None), "kl_horizon": (1e4, 2e3, 2e3)}
REWARD = {"num_labels": (4_992, 46_000, 46_000), "batch_size": (32, 16, 16), "lr": (5e-5, 2.5e-5, 2.5e-5)}
ALL = {"base_model": "gpt2", "start_text": None, "end_text": None, "adam": "tf", "adam_eps": 1e-5}
ALL_RL = {"total_episodes": 1_000_000, "num_epochs": 4, "num_minibatches": 1, "cliprange": 0.2, "mask_truncated": False}
ALL_RL |= {"penalty_reward_value": -1.0, "penalty_mode": "replace"}
ALL_PPO = {"vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder: what HF_HOME does to a process that starts with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        yield hub_tools.fill(folder)


@pytest.mark.parametrize("task", TASKS)
def test_values_are_those_of_openais_launch_file(task: str) -> None:
    file = f"hf://datasets/vwxyzjn/lm-human-preferences/{task}/offline_{'60k' if TASKS[task] else '5k'}.json"
    task_values, rl, reward = ({name: row[TASKS[task]] for name, row in table.items()} for table in (TASK, RL, REWARD))
    shared = ALL | task_values | {"query_dataset": file, "token_ids_of": "gpt2"}
    reward |= {"label_dataset": file, "normalization_samples": 512}  # the original takes 512 when asked for 256
    for script, expected in (
        (train_reward, shared | reward),
        (ppo_rlhf, shared | ALL_RL | rl | ALL_PPO | {"whiten_rewards": TASKS[task] == 0}),
        (rloo_rlhf, shared | ALL_RL | rl),
    ):
        args = vars(script.PRESETS[task])
        assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize("task", TASKS)
def test_every_command_line_runs_offline(task: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for script, small in SMALL.items():
        call(script, [task, *small.split()], tmp_path, monkeypatch)
        (folder,) = tmp_path.glob(f"runs/{script[:-3]}-{task}-*")
        assert len(read_lines(folder / "metrics.jsonl")) == 1
        assert (folder / ("reward_model" if script == "train_reward.py" else "policy") / "config.json").exists()
    assert "left out" not in capsys.readouterr().err  # no query, no label


@pytest.mark.parametrize(
    ("file", "command", "says"),
    [
        (f"{LABELS}/snapshots/*/sentiment/*", "train_reward.py sentiment", "sentiment/offline_5k.json"),
        (f"{LABELS}/snapshots/*/cnndm/*", "ppo_rlhf.py cnndm", "cnndm/offline_60k.json"),
        (f"{LABELS}/snapshots/*/tldr/*", "rloo_rlhf.py tldr", "tldr/offline_60k.json"),
        (f"{GPT2}/snapshots/*/model.safetensors", "train_reward.py sentiment", "model.safetensors"),
        (f"{GPT2}/refs/main", "train_reward.py tldr", "--base_model gpt2"),
    ],
)
def test_a_missing_file_is_named_in_one_line(
    file: str, command: str, says: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,), (script, task) = cache.glob(file), command.split()
    path.rename(away := path.with_name("away"))
    try:
        with pytest.raises((ValueError, OSError), match=f"^[^\n]*{says}") as caught:
            call(script, [task, *SMALL[script].split()], tmp_path, monkeypatch)
    finally:
        away.rename(path)
    assert "\n" not in str(caught.value).strip() and str(caught.value).startswith("--")
    assert not (tmp_path / "runs").exists()
