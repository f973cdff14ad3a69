"""Reading the recorded arrays of OpenAI's code into what the scripts take."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tiny_models import no_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
import train_reward
from plumbing import models as models_module

Arrays = dict[str, np.ndarray]
HERE = Path(__file__).resolve().parent.parent / "golden"
NAMES = {
    "wpe": "transformer.wpe.weight",
    "wte": "transformer.wte.weight",
    "ln_f/g": "transformer.ln_f.weight",
    "ln_f/b": "transformer.ln_f.bias",
    "heads/value/w": "value_head.weight",
    "heads/reward/w": "score.weight",
    "reward_norm/gain": "gain",
}
TASK = {
    "policy": {"temperature": 0.7},
    "truncate_token": 13,
    "truncate_after": 4,
    "penalty_reward_value": -1,
}
HPARAMS = {"task": TASK, "run": {"seed": 1}}  # of recordings without a json


def folder_of(file: Path, name: str) -> Path:
    """The model folder beside a golden file, or the committed one."""
    beside = file.parent / name
    return beside if beside.is_dir() else HERE / name


def load_golden(file: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a file and the record (json) that belongs to it, or to all ranks' files."""
    data = dict(np.load(file))
    for name in (file.stem, re.sub(r"_?(rank|r)\d+$", "", file.stem)):
        record = file.with_name(f"{name}.json")
        if record.exists():
            return data, json.loads(record.read_text())
    return data, {"hparams": HPARAMS}


def below(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, by the rest of their names."""
    names = [key for key in arrays if key.startswith(prefix)]
    return {key.removeprefix(prefix): arrays[key] for key in names}


def files_of_ranks(file: Path, count: int) -> list[Path]:
    """The files of this many ranks, of which the given one is the first."""
    if count == 1:
        return [file]
    files = sorted(file.parent.glob(re.sub(r"(rank|_r)\d+", r"\1*", file.name)))
    assert len(files) == count
    return files


def script_args(hparams: dict[str, Any]) -> ppo_rlhf.Args:
    """The original's hyper-parameters as Args of ppo_rlhf.py; the truncate token is an id."""
    ppo = hparams["ppo"]
    rewards = hparams["rewards"]
    task = hparams["task"]
    adaptive = rewards.get("adaptive_kl") or {"target": None, "horizon": 1.0}
    same = "total_episodes batch_size lr vf_coef cliprange cliprange_value gamma lam whiten_rewards"
    of_task = "truncate_token truncate_after penalty_reward_value"
    return ppo_rlhf.Args(
        seed=hparams["run"]["seed"],
        temperature=task["policy"]["temperature"],
        micro_batch_size=ppo["batch_size"],
        num_minibatches=ppo["nminibatches"],
        num_epochs=ppo["noptepochs"],
        kl_coef=rewards["kl_coef"],
        adaptive_kl_target=adaptive["target"],
        kl_horizon=adaptive["horizon"],
        **{name: ppo[name] for name in same.split()},
        **{name: task[name] for name in of_task.split()},
    )


def rows_of(tokens: np.ndarray, vocabulary: int) -> list[list[int]]:
    """Token rows without padding, whose id lies beyond the vocabulary."""
    return [[int(token) for token in row if token < vocabulary] for row in tokens]


def load_lm(auto_class: type, folder: Path) -> Any:
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    args = ppo_rlhf.Args(base_model=str(folder))
    name = args.base_model
    return models_module.load_model("base_model", name, auto_class, no_tokenizer(size), 24, args)


def load_actor(folder: Path) -> ppo_rlhf.ActorCritic:
    lm = load_lm(AutoModelForCausalLM, folder)
    policy = ppo_rlhf.ActorCritic(lm)
    file = folder / "heads.safetensors"
    if file.exists():
        head = {name.split(".")[1]: x for name, x in load_file(file).items()}
        policy.value_head.load_state_dict(head)
    return policy


def load_reward(folder: Path) -> train_reward.RewardModel:
    """The recorded reward model. Its head has a bias b:
    gain * (w h + b) + bias = gain * w h + (gain b + bias)."""
    heads = load_file(folder / "heads.safetensors")
    model = load_lm(AutoModelForSequenceClassification, folder)
    reward = train_reward.RewardModel(model, train_reward.Args())
    gain = heads["reward_gain"]
    bias = gain * heads["scalar_head.bias"][0] + heads["reward_bias"]
    model.score.weight.data.copy_(heads["scalar_head.weight"])
    reward.gain.data.copy_(gain)
    reward.bias.data.copy_(bias)
    model.config.reward_gain = gain.item()
    model.config.reward_bias = bias.item()
    return reward


def weights_from_tf(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    """TensorFlow's arrays by the names of ActorCritic or RewardModel, without heads' biases."""
    found = {}
    for key in [key for key in arrays if key.startswith(prefix)]:
        name = key.removeprefix(prefix).removeprefix("model/")
        if re.match(r"h\d", name):
            layer, *modules, leaf = name.split("/")
            kind = "weight" if leaf in "gw" else "bias"
            name = ".".join(["transformer.h", layer[1:], *modules, kind])
        elif name in NAMES:
            name = NAMES[name]
        else:
            continue
        value = torch.from_numpy(np.asarray(arrays[key]))
        found[name] = value.squeeze(0) if value.dim() == 3 else value
    return found


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters of an ActorCritic or RewardModel by the names of weights_from_tf."""
    return {name.removeprefix("lm."): value for name, value in module.named_parameters()}
