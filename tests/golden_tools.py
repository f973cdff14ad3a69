"""Reading the recorded arrays of OpenAI's code into what the scripts take."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tiny_models import load
from torch import Tensor

import ppo_rlhf
import train_reward

HERE = Path(__file__).resolve().parent / "golden"
NAMES = {"wpe": "transformer.wpe.weight", "wte": "transformer.wte.weight", "ln_f/g": "transformer.ln_f.weight"}
NAMES |= {"ln_f/b": "transformer.ln_f.bias", "heads/value/w": "value_head.weight", "heads/reward/w": "score.weight"}
NAMES |= {"reward_norm/gain": "gain"}
TASK = {"policy": {"temperature": 0.7}, "truncate_token": 13, "truncate_after": 4, "penalty_reward_value": -1}
HPARAMS = {"task": TASK, "run": {"seed": 1}}  # of recordings without a json


def folder_of(file: Path, name: str) -> Path:
    """The model folder beside a golden file, or the committed one."""
    return file.parent / name if (file.parent / name).is_dir() else HERE / name


def script_args(hparams: dict[str, Any]) -> ppo_rlhf.Args:
    """The Args of ppo_rlhf.py that hyper-parameters of the original amount to; the truncate token is an id."""
    ppo, rewards, task = hparams["ppo"], hparams["rewards"], hparams["task"]
    same = ("lr", "vf_coef", "cliprange", "cliprange_value", "gamma", "lam", "whiten_rewards", "batch_size")
    args = {name: ppo[name] for name in (*same, "total_episodes")} | {"micro_batch_size": ppo["batch_size"]}
    args |= {name: task[name] for name in ("truncate_token", "truncate_after", "penalty_reward_value")}
    args |= {"num_minibatches": ppo["nminibatches"], "num_epochs": ppo["noptepochs"], "kl_coef": rewards["kl_coef"]}
    adaptive = rewards.get("adaptive_kl") or {"target": None, "horizon": 1.0}
    args |= {"kl_target": adaptive["target"], "kl_horizon": adaptive["horizon"]}
    return ppo_rlhf.Args(temperature=task["policy"]["temperature"], seed=hparams["run"]["seed"], **args)


def rows_of(tokens: np.ndarray, vocabulary: int) -> list[list[int]]:
    """Token rows without padding, whose id lies beyond the vocabulary."""
    return [[int(token) for token in row if token < vocabulary] for row in tokens]


def load_actor(folder: Path) -> ppo_rlhf.ActorCritic:
    policy = ppo_rlhf.ActorCritic(load(folder))
    if (file := folder / "heads.safetensors").exists():
        policy.value_head.load_state_dict({name.split(".")[1]: x for name, x in load_file(file).items()})
    return policy


def load_reward(folder: Path) -> train_reward.RewardModel:
    """The recorded reward model. Its head has a bias b: gain * (w h + b) + bias = gain * w h + (gain b + bias)."""
    heads = load_file(folder / "heads.safetensors")
    reward = train_reward.RewardModel(load(folder, num_labels=1))
    reward.lm.score.weight.data.copy_(heads["scalar_head.weight"])
    reward.gain.data.copy_(heads["reward_gain"])
    reward.bias.data.copy_(heads["reward_gain"] * heads["scalar_head.bias"][0] + heads["reward_bias"])
    reward.lm.config.reward_gain, reward.lm.config.reward_bias = reward.gain.item(), reward.bias.item()
    return reward


def weights_from_tf(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, Tensor]:
    """TensorFlow's arrays below `prefix`, by the names of ActorCritic or RewardModel (without their heads' biases)."""
    found = {}
    for key, array in arrays.items():
        name = key.removeprefix(prefix).removeprefix("model/")
        if not key.startswith(prefix) or "/heads/" in key and key.endswith("/b"):
            continue
        if re.match(r"h\d", name):
            layer, *module, leaf = name.split("/")
            name = f"transformer.h.{layer[1:]}.{'.'.join(module)}.{'weight' if leaf in 'gw' else 'bias'}"
        if name := name if name.startswith("transformer") else NAMES.get(name):
            value = torch.from_numpy(np.asarray(array))
            found[name] = value.squeeze(0) if value.dim() == 3 else value
    return found


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters of an ActorCritic or RewardModel by the names of weights_from_tf."""
    return {name.removeprefix("lm."): value for name, value in module.named_parameters()}


def load_golden(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file and the record (json) that belongs to it."""
    with np.load(file) as arrays:
        data = {key: arrays[key] for key in arrays.files}
    names = (file.stem, re.sub(r"_?(rank|r)\d+$", "", file.stem))  # of several ranks, one record may stand for all
    record = next((path for name in names if (path := file.with_name(f"{name}.json")).exists()), None)
    return data, json.loads(record.read_text()) if record else {"hparams": HPARAMS}
