"""Recipes: published settings of other systems are command lines that the scripts take, and run."""

import importlib
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import fork_tools
import numpy as np
import pytest
from conftest import ROOT
from fork_tools import PPO, RLOO
from trl_tools import COMMON, PPO09, PPO112

RECIPES = {path.stem: path for path in sorted((ROOT / "benchmark" / "recipes").glob("*.args"))}
NOT_SAID = "not said"
UNTIL_EOS = {  # a response ends with the EOS, and costs nothing where it does not
    "truncate_token": "eos",
    "truncate_after": 0,
    "mask_truncated": True,
    "penalty_mode": "add",
    "penalty_reward_value": 0.0,
}
# What the sources say, typed from them again: of each recipe its sources, and of each its values.
SOURCES = {
    "deepspeed_chat": {
        "run_1.3b.sh": {
            "query_length": 256,
            "response_length": 256,
            "lr": 9.65e-6,
            "critic_lr": 5e-6,
            "lr_warmup": 99,
            "lr_schedule": "linear",
            "num_epochs": 1,
            "num_minibatches": 1,
        },
        "ppo_trainer.py": {
            "kl_coef": 0.1,
            "kl_target": None,
            "score_clip": 5.0,
            "whiten_rewards": False,
            "whiten_advantages": False,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "gamma": 1.0,
            "lam": 0.95,
            "vf_coef": 1.0,
            "temperature": 1.0,
            **UNTIL_EOS,
        },
        "rlhf_engine.py": {
            "adam": "torch",
            "adam_betas": (0.9, 0.95),
            "adam_eps": 1e-8,
            "weight_decay": 0.0,
            "critic": "reward",
        },
        "ds_utils.py": {"max_grad_norm": 1.0},
        "utils/utils.py": {"ema": 0.992},
    },
    "instructgpt": {
        "arXiv:2203.02155v1, appendix C.4": {
            "batch_size": 512,
            "num_minibatches": 512 // 64,
            "num_epochs": 1,
            "total_episodes": 256_000,
            "critic_lr": 9e-6,
            "lr_schedule": "constant",
            "lr_warmup": 9,
            "adam": "torch",
            "adam_betas": (0.9, 0.95),
            "cliprange": 0.2,
            "gamma": 1.0,
            "temperature": 1.0,
            "kl_coef": 0.02,
            "kl_target": None,
            "ema": 0.992,
            "ptx_coef": 27.8,
            "critic": "reward",
        },
        NOT_SAID: {"lr": 9e-6, "adam_eps": 1e-8, "whiten_rewards": False, **UNTIL_EOS},
    },
    "llama2": {
        'arXiv:2307.09288v2, section 3.2.3 "Iterative Fine-Tuning", p. 15': {
            "batch_size": 512,
            "num_minibatches": 512 // 64,
            "num_epochs": 1,
            "total_episodes": 400 * 512,
            "lr": 1e-6,
            "lr_schedule": "constant",
            "adam": "torch",
            "adam_betas": (0.9, 0.95),
            "adam_eps": 1e-5,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "cliprange": 0.2,
            "kl_coef": 0.01,
            "kl_target": None,
            "score_norm": "whiten",
        },
        NOT_SAID: {"whiten_rewards": False, "critic": "reward", **UNTIL_EOS},
    },
    "qwen": {
        'arXiv:2309.16609v1, section 3.2.2 "Reinforcement Learning", p. 11': {
            "critic_warmup": 50,
            "lr": 1e-6,
            "critic_lr": 5e-6,
            "kl_coef": 0.04,
            "kl_target": None,
            "top_p": 0.9,
            "cliprange_value": 0.15,
            "score_norm": "whiten",
        },
        NOT_SAID: {
            "critic": "reward",
            "lr_schedule": "constant",
            "adam": "torch",
            "adam_eps": 1e-8,
            "num_epochs": 1,
            "whiten_rewards": False,
            **UNTIL_EOS,
        },
    },
    "trl_0.9": {
        "trl/trainer/ppo_config.py, 0.9.4": {
            "total_episodes": 20_000,
            "batch_size": 128,
            "micro_batch_size": 128,
            "num_minibatches": 1,
            "num_epochs": 4,
            "lr": 1.41e-5,
            "kl_coef": 0.2,
            "kl_target": 6.0,
            "kl_horizon": 10_000.0,
            "kl_estimator": "k1",
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
        },
        "PPOTrainer": {
            "lr_schedule": "constant",
            "adam": "torch",
            "adam_betas": (0.9, 0.999),
            "adam_eps": 1e-8,
            "whiten": "batch",
            "temperature": 1.0,
            **UNTIL_EOS,
        },
    },
    "trl_1.12": {
        "trl/experimental/ppo/ppo_config.py, 1.12": {
            "response_length": 53,
            "batch_size": 8,
            "micro_batch_size": 8,
            "num_minibatches": 1,
            "num_epochs": 4,
            "lr": 3e-6,
            "kl_coef": 0.05,
            "kl_target": None,
            "kl_estimator": "k1",
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
            "temperature": 0.7,
            **UNTIL_EOS,
        },
        "TrainingArguments": {
            "lr_schedule": "linear",
            "adam": "torch",
            "adam_betas": (0.9, 0.999),
            "adam_eps": 1e-8,
            "weight_decay": 0.0,
        },
        "PPOTrainer": {
            "whiten": "batch",
            "value_after_end": True,
            "critic": "reward",
        },
    },
    "trl_rloo": {
        "examples/scripts/rloo/rloo_tldr.py": {
            "base_model": "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
            "reward_model": "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",
            "query_dataset": "hf://datasets/trl-lib/tldr/data/train-00000-of-00001.parquet",
            "query_length": 512,
            "start_text": None,
            "end_text": None,
            "response_length": 53,
            **UNTIL_EOS,
            "penalty_reward_value": -1.0,
            "total_episodes": 1_000_000,
            "batch_size": 16 * 4 * 8,
            "micro_batch_size": 16,
            "num_minibatches": 1,
            "num_epochs": 1,
            "lr": 3e-6,
        },
        "RLOOConfig and its TrainingArguments": {
            "lr_schedule": "linear",
            "adam": "torch",
            "adam_betas": (0.9, 0.999),
            "adam_eps": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "rloo_k": 2,
            "kl_coef": 0.05,
            "kl_target": None,
            "cliprange": 0.2,
            "temperature": 1.0,
        },
    },
}
# A tiny run of two updates; its names of files and its sizes come after the recipe's.
TINY = f"{fork_tools.COMMON} --reward_model judge --eval_queries 2 --ptx_dataset queries.jsonl"
TINY += " --batch_size 16 --total_episodes 32 --micro_batch_size 16"


def script_of(name: str) -> str:
    return RLOO if "rloo" in name else PPO


def comments(name: str) -> dict[str, str]:
    """What stands behind the # of every line, by the setting."""
    found = {}
    for line in RECIPES[name].read_text().splitlines():
        words, _, comment = line.partition("#")
        if words:
            flag = words.split()[0]
            found[re.sub("^--(no-)?", "", flag)] = comment.strip()
    return found


def parse(name: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All settings that the recipe amounts to."""
    words = re.sub("#.*", "", RECIPES[name].read_text()).split()
    patch.setattr(sys, "argv", [script_of(name), *words])
    _, args = importlib.import_module(script_of(name)[:-3]).parse_args()
    return vars(args)


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_is_its_source_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(name, monkeypatch)
    text = RECIPES[name].read_text()
    given = {}
    for source, values in SOURCES[name].items():
        assert source in text
        assert not given.keys() & values.keys()
        given |= values
    assert given.keys() == comments(name).keys()
    assert {field: args[field] for field in given} == given


def test_there_is_a_recipe_of_every_system() -> None:
    assert list(RECIPES) == list(SOURCES)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_source_does_not_give_is_said_there(name: str) -> None:
    not_said = SOURCES[name].get(NOT_SAID, {})
    found = {field for field, comment in comments(name).items() if comment.startswith(NOT_SAID)}
    assert found == not_said.keys()


@pytest.mark.parametrize(("name", "kind"), [("trl_0.9", PPO09), ("trl_1.12", PPO112)])
def test_the_recipes_of_trl_are_what_is_replayed(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults of PPOConfig, as test_trl.py puts them into this project's settings."""
    rollout = {"responses": np.zeros((1, 1))}
    about = {"groups": [{"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]}
    recording = SimpleNamespace(config=kind.settings, rollouts=[rollout], about=about, end_token=0)
    replayed = COMMON | kind.args(recording)
    args = parse(name, monkeypatch)
    shared = replayed.keys() & comments(name).keys() - {"total_episodes"}
    assert len(shared) > 20
    assert {name: args[name] for name in shared} == {name: replayed[name] for name in shared}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = fork_tools.kit()
    folder = kit.with_name(f"recipe-{name}")
    sizes = [*TINY.split(), "--output_dir", str(folder)]
    if name == "instructgpt":
        sizes += ["--ptx_coef", "27.8"]
    else:
        sizes += ["--ptx_dataset", "none"]
    if name == "qwen":
        sizes += ["--critic_warmup", "1"]  # of two updates
    words = re.sub("#.*", "", RECIPES[name].read_text()).split()
    status, _, errors = fork_tools.run(script_of(name), [*words, *sizes], kit)
    assert status == 0, errors
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2

    recorded = json.loads((folder / "args.json").read_text())["args"]
    kept = comments(name).keys() - {word.removeprefix("--") for word in sizes}
    assert len(kept) > 10
    args = json.loads(json.dumps(parse(name, monkeypatch)))  # tuples become lists
    assert {field: recorded[field] for field in kept} == {field: args[field] for field in kept}
