"""Reading the recorded arrays of OpenAI's code into what the scripts take."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf

HERE = Path(__file__).resolve().parent / "golden"


def folder_of(file: Path, name: str) -> Path:
    """The model folder beside a golden file, or the committed one."""
    return file.parent / name if (file.parent / name).is_dir() else HERE / name


def script_args(hparams: dict[str, Any]) -> SimpleNamespace:
    """The Args of ppo_rlhf.py that hyper-parameters of the original amount to."""
    ppo, rewards, task = hparams["ppo"], hparams["rewards"], hparams["task"]
    adaptive = rewards.get("adaptive_kl")
    return SimpleNamespace(
        **{
            name: ppo[name]
            for name in ("lr", "vf_coef", "cliprange", "cliprange_value", "gamma", "lam", "whiten_rewards")
        },
        **{name: ppo[name] for name in ("batch_size", "total_episodes")},
        num_minibatches=ppo["nminibatches"],
        num_epochs=ppo["noptepochs"],
        micro_batch_size=ppo["batch_size"],
        temperature=task["policy"]["temperature"],
        truncate_token=task["truncate_token"],
        truncate_after=task["truncate_after"],
        penalty_reward_value=task["penalty_reward_value"],
        kl_coef=rewards["kl_coef"],
        kl_target=adaptive and adaptive["target"],
        kl_horizon=adaptive and adaptive["horizon"],
        seed=hparams["run"]["seed"],
        mask_truncated=False,
        compile=False,
    )


def rows_of(tokens: np.ndarray, vocabulary: int) -> list[list[int]]:
    """Token rows without padding, whose id lies beyond the vocabulary."""
    return [[int(token) for token in row if token < vocabulary] for row in tokens]


def load_actor(folder: Path) -> ppo_rlhf.ActorCritic:
    args = SimpleNamespace(trust_remote_code=False)
    policy = ppo_rlhf.ActorCritic(ppo_rlhf.load(AutoModelForCausalLM, str(folder), "--base_model", args))
    if (folder / "heads.safetensors").exists():
        heads = load_file(folder / "heads.safetensors")
        if "reward_gain" not in heads:
            policy.value_head.load_state_dict({name.split(".")[1]: value for name, value in heads.items()})
    return policy


def load_reward(folder: Path) -> ppo_rlhf.RewardModel:
    """The recorded reward model. Its head has a bias b: gain * (w h + b) + bias = gain * w h + (gain b + bias)."""
    args = SimpleNamespace(trust_remote_code=False)
    heads = load_file(folder / "heads.safetensors")
    model = ppo_rlhf.load(AutoModelForSequenceClassification, str(folder), "--base_model", args, num_labels=1)
    model.score.weight.data.copy_(heads["scalar_head.weight"])
    reward = ppo_rlhf.RewardModel(model)
    reward.gain.data.copy_(heads["reward_gain"])
    reward.bias.data.copy_(heads["reward_gain"] * heads["scalar_head.bias"][0] + heads["reward_bias"])
    return reward


def weights_from_tf(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, Tensor]:
    """TensorFlow's arrays below `prefix`, by the names of ActorCritic or RewardModel (without their heads' biases)."""
    names = {}
    for key, array in arrays.items():
        if not key.startswith(prefix) or "/heads/" in key and key.endswith("/b"):
            continue
        name = key[len(prefix) :].removeprefix("model/")
        if name in ("wpe", "wte", "ln_f/g", "ln_f/b"):
            name = (
                "transformer."
                + {"wpe": "wpe.weight", "wte": "wte.weight", "ln_f/g": "ln_f.weight", "ln_f/b": "ln_f.bias"}[name]
            )
        elif name.startswith("h") and name[1].isdigit():
            layer, *module, leaf = name.split("/")
            name = f"transformer.h.{layer[1:]}.{'.'.join(module)}.{'weight' if leaf in 'gw' else 'bias'}"
        else:
            name = {
                "heads/value/w": "value_head.weight",
                "heads/reward/w": "score.weight",
                "reward_norm/gain": "gain",
            }.get(name, "")
        if name:
            value = torch.from_numpy(np.asarray(array))
            names[name] = value.squeeze(0) if value.dim() == 3 else value
    return names


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters of an ActorCritic or RewardModel by the names of weights_from_tf."""
    return {name.removeprefix("lm.").removeprefix("model."): value for name, value in module.named_parameters()}


def load_golden(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with np.load(file) as arrays:
        data = {key: arrays[key] for key in arrays.files}
    names = (file.stem, re.sub(r"_?(rank|r)\d+$", "", file.stem))  # of several ranks, one record may stand for all
    record = next((path for name in names if (path := file.with_name(f"{name}.json")).exists()), None)
    return data, json.loads(record.read_text()) if record else {}
