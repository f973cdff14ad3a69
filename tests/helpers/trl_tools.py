"""Recordings of TRL's trainers: what they were given, what they made of it, and the settings of
this project that they amount to. Arrays come in this project's shapes, (B, R)."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import patched
import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import pad
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

OWN = Path(__file__).resolve().parent.parent / "golden_trl"
Arrays = dict[str, np.ndarray]
Metrics = dict[str, float]
Weights = tuple[dict, np.ndarray, np.ndarray, np.ndarray]
COMMON = {  # TRL ends a response with the EOS, masks what follows, and has PyTorch's Adam
    "truncate_after": 0,
    "mask_truncated": True,
    "penalty_mode": "add",
    "adam": "torch",
    "eval_queries": 1,
    "checkpoint_every": 0,
}
# transformers' TrainingArguments that act on the steps, with their defaults; and others
TRAINING = {
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
SCHEDULES = ("linear", "cosine", "constant")
NO_TRAINING = "output_dir report_to use_cpu bf16 save_strategy gradient_checkpointing disable_tqdm"
NO_TRAINING += " logging_steps num_train_epochs optim per_device_eval_batch_size eval_strategy"
NO_TRAINING += " logging_strategy logging_first_step log_level save_steps save_only_model run_name"
NO_TRAINING += " push_to_hub data_seed dataloader_drop_last dataloader_num_workers do_train do_eval"
NO_TRAINING += (
    " dataloader_pin_memory eval_steps average_tokens_across_devices remove_unused_columns"
)


class Recording:
    """One variant of one of TRL's trainers. `settings` are TRL's defaults of all that acts on what
    is replayed. A setting that is neither among them nor one of `no_effect` is refused."""

    system: str
    patch: str  # of benchmark/systems: recordings are replayed on a copy of a script that has it
    prefix: str  # of the arrays of a rollout
    settings: dict[str, Any]
    no_effect = "seed"

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.record = json.loads((folder / f"{self.system}.json").read_text())
        self.about = self.record["variants"][name]
        self.made = self.about.get("made", {})  # how models and data were made
        self.arrays = dict(np.load(folder / self.system / f"{name}.npz"))
        self.saved = dict(np.load(folder / self.system / "models.npz"))
        self.end_token = self.record["eos"]

        config = self.about["config"]
        unknown = set(config) - set(self.settings) - set(self.no_effect.split())
        if unknown:
            raise ValueError(f"{self.system}: settings that are not known: {sorted(unknown)}")
        resolved = {name: self.about[name] for name in self.settings if name in self.about}
        self.config = self.settings | config | resolved

        self.rollouts: list[Arrays] = []
        while found := self.below(f"{self.prefix}{len(self.rollouts)}/"):
            self.rollouts.append(found)

    @property
    def script(self) -> ModuleType:
        return patched.module(self.patch)

    def below(self, prefix: str) -> Arrays:
        """The arrays whose names begin so, by the rest of their names."""
        found = {}
        for key, array in self.arrays.items():
            if key.startswith(prefix):
                found[key.removeprefix(prefix)] = array
        return found

    def score(self, args: Any, made: list) -> Callable:
        """Gives the recorded scores of the rollout that was made last."""

        def score(*_: Any) -> Tensor:
            return self.scores(self.rollouts[len(made) - 1])

        return score

    def scores(self, arrays: Arrays) -> Tensor:
        """(B,), of the reward model or function."""
        return torch.from_numpy(arrays["scores"])

    def replaced(self) -> dict[str, Callable]:
        """Functions of the script in whose place the variant has its own."""
        return {}


def wide(x: np.ndarray, width: int) -> np.ndarray:
    """(B, width) of an array that is as wide as the longest response."""
    return pad(torch.from_numpy(x), (0, width - x.shape[1])).numpy()


def fill(model: Module, weights: np.ndarray, where: dict) -> None:
    """Copies flattened weights into a model that has all of them and no others."""
    named = dict(model.named_parameters())
    if set(named) != set(where):
        raise ValueError(f"other weights: {set(named) ^ set(where)}")
    for name, (start, shape) in where.items():
        values = torch.from_numpy(weights[start : start + math.prod(shape)])
        named[name].data.copy_(values.view(shape))


def build(kind: type, config: Any, weights: np.ndarray, where: dict) -> Module:
    """A model as load_model leaves it: in eval mode, in fp32."""
    model = kind._from_config(config, attn_implementation="eager").eval()
    fill(model, weights, where)
    return model


def without_bias(reward_head: Callable, model: Module) -> nn.Linear:
    """A head whose bias stays 0: TRL's has none."""
    head = reward_head(model)
    head.bias.requires_grad_(False)
    return head


def of_optimizer(about: dict, config: dict) -> dict[str, Any]:
    """Settings of the optimizer, of which TRL resolves some in its parameter groups."""
    group = about["groups"][0]
    return {
        "lr": config["learning_rate"],
        "lr_schedule": config["lr_scheduler_type"],
        "adam_betas": tuple(group["betas"]),
        "adam_eps": group["eps"],
        "weight_decay": max(group["weight_decay"] for group in about["groups"]),
    }


def not_reproduced_of_training(about: dict, config: dict) -> dict[str, bool]:
    return {
        "warm-up": bool(config["warmup_steps"] or config["warmup_ratio"]),
        "another schedule": config["lr_scheduler_type"] not in SCHEDULES,
        "another optimizer": about["optimizer"] != "AdamW",
    }


class PPO09(Recording):
    """PPOTrainer of TRL 0.9.4. Its arrays are (B, T - 1), where the response of a row begins at
    len(query) - 1."""

    system = "trl09"
    patch = "trl_0.9"
    prefix = "s"
    settings = {
        "batch_size": 128,
        "mini_batch_size": 128,
        "gradient_accumulation_steps": 1,
        "ppo_epochs": 4,
        "learning_rate": 1.41e-5,
        "adap_kl_ctrl": True,
        "init_kl_coef": 0.2,
        "target": 6.0,
        "horizon": 10_000.0,
        "kl_penalty": "kl",
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "max_grad_norm": None,
        "early_stopping": False,
        "target_kl": 1.0,
        "ratio_threshold": 10.0,
        "use_score_scaling": False,
        "use_score_norm": False,
        "score_clip": None,
        "whiten_rewards": False,
    }
    no_effect = "seed steps compare_steps optimize_cuda_cache optimize_device_cache log_with"
    no_effect += " task_name model_name query_dataset reward_model remove_unused_columns exp_name"
    no_effect += " gradient_checkpointing forward_batch_size is_peft_model tracker_project_name"

    def args(self) -> dict[str, Any]:
        """This project's settings, besides COMMON."""
        config = self.config
        rows_per_step = config["mini_batch_size"] * config["gradient_accumulation_steps"]
        same = "batch_size cliprange cliprange_value vf_coef gamma lam score_clip"
        return {name: config[name] for name in same.split()} | {
            "micro_batch_size": config["mini_batch_size"],
            "num_minibatches": config["batch_size"] // rows_per_step,
            "num_epochs": config["ppo_epochs"],
            "total_episodes": len(self.rollouts) * config["batch_size"],
            "lr": config["learning_rate"],
            "lr_schedule": "constant",
            "adam_eps": 1e-8,
            "kl_coef": config["init_kl_coef"],
            "adaptive_kl_target": config["target"] if config["adap_kl_ctrl"] else None,
            "kl_horizon": config["horizon"],
            "kl_estimator": config["kl_penalty"],
            "temperature": 1.0,
            "truncate_token": "eos",
            "penalty_reward_value": 0.0,
            "response_length": self.rollouts[0]["responses"].shape[1],
            "whiten": "batch",
            "whiten_rewards": False,
        }

    def not_reproduced(self) -> dict[str, bool]:
        """What this project does not reproduce, by name, and whether the variant asks for it."""
        config = self.config
        return {
            "early_stopping": config["early_stopping"],
            "use_score_scaling": config["use_score_scaling"],
            "whiten_rewards before 0.12": config["whiten_rewards"],
            "max_grad_norm before 0.12": config["max_grad_norm"] is not None,
            "ratio_threshold": config["ratio_threshold"] != 10,
            "response_masks": "response_masks" in self.rollouts[0],
            "positions that count padding": self.made.get("side") == "left",
            "micro-batches of unequal lengths": not self.has_equal_micro_batches(),
            "controller of another kl_penalty": self.controller_needs_penalty(),
        }

    def has_equal_micro_batches(self) -> bool:
        """Whether the mean of the micro-batches' means is the mean over all tokens."""
        accumulated = self.config["gradient_accumulation_steps"]
        for arrays in self.rollouts:
            lengths = (arrays["responses"] >= 0).sum(1)
            order = arrays["permutations"].reshape(-1, self.config["mini_batch_size"])
            num_tokens = lengths[order].sum(1).reshape(-1, accumulated)
            if (num_tokens != num_tokens[:, :1]).any():
                return False
        return True

    def controller_needs_penalty(self) -> bool:
        """Whether the coefficient is adapted to another KL than k1, and that changes it."""
        if not self.config["adap_kl_ctrl"] or self.config["kl_penalty"] == "kl":
            return False
        for step, arrays in enumerate(self.rollouts):
            log_ratios = (arrays["logprobs"] - arrays["ref_logprobs"]) * arrays["masks"]
            kls = np.array([log_ratios.sum(1).mean(), self.scalar(step, "stats/objective/kl")])
            errors = (kls / self.config["target"] - 1).clip(-0.2, 0.2)
            if abs(errors[0] - errors[1]) > 1e-5:
                return True
        return False

    def scalar(self, step: int, name: str) -> float:
        return self.about["scalars"][f"s{step}/{name}"]

    def queries(self, arrays: Arrays) -> list[list[int]]:
        """Token ids of each, without padding."""
        return [row[row >= 0].tolist() for row in arrays["queries"]]

    def responses(self, arrays: Arrays) -> Tensor:
        """(B, R). What follows the end may be anything."""
        return torch.from_numpy(arrays["responses"]).long().clamp(min=0)

    def shuffles(self, arrays: Arrays) -> Tensor:
        """Row numbers of the minibatches: (num_epochs, num_minibatches, n)."""
        order = torch.from_numpy(arrays["permutations"]).long()
        return order.view(len(order), self.args()["num_minibatches"], -1)

    def models(self) -> tuple[Module, Module]:
        """Policy and reference."""
        where = self.record["weights"]
        where = {name: place for name, place in where.items() if "value_head" not in name}
        config = GPT2Config(**self.record["model"])
        policy = build(GPT2LMHeadModel, config, self.saved["policy"], where)
        return policy, build(GPT2LMHeadModel, config, self.saved["reference"], where)

    def replaced(self) -> dict[str, Callable]:
        return {"ActorCritic": functools.partial(self.with_value_head, self.script.ActorCritic)}

    def with_value_head(self, actor_critic: type, *args: Any) -> Module:
        """TRL draws it; here it would start at zero."""
        policy = actor_critic(*args)
        for name, p in policy.value_head.named_parameters():
            start, _ = self.record["weights"][f"value_head.{name}"]
            values = self.saved["policy"][start : start + p.numel()]
            p.data.copy_(torch.from_numpy(values).view_as(p))
        return policy

    def at_responses(self, arrays: Arrays, x: np.ndarray) -> np.ndarray:
        """TRL's (B, T - 1) as (B, R), with 0 after the end."""
        found = np.zeros(arrays["responses"].shape)
        lengths = (arrays["responses"] >= 0).sum(1)
        for i, (query, length) in enumerate(zip(self.queries(arrays), lengths, strict=True)):
            start = len(query) - 1
            found[i, :length] = x[i, start : start + length]
        return found

    def expected(self, step: int) -> Arrays:
        """What TRL made of a rollout, by the names of Rollout.quantities."""
        arrays = self.rollouts[step]
        names = "logprobs ref_logprobs values rewards advantages returns"
        found = {name: self.at_responses(arrays, arrays[name]) for name in names.split()}
        found["mask"] = self.at_responses(arrays, arrays["masks"])
        found["token_kl"] = self.at_responses(arrays, arrays["kls"])
        found["scores"] = arrays["scores_used"]
        found["kl_coef_after"] = np.array(self.scalar(step, "kl_coef_after"))
        if self.config["kl_penalty"] == "kl":
            found["controlled_kl"] = np.array(self.scalar(step, "stats/objective/kl"))
        return found

    def expected_steps(self, step: int) -> Arrays:
        """Metrics of the optimizer steps on a rollout, by this project's names."""
        arrays = self.rollouts[step]
        names = "loss/policy loss/value loss/total policy/entropy policy/approxkl policy/clipfrac"
        names += " val/vpred val/error val/clipfrac val/mean returns/mean"
        found = {}
        for name in names.split():
            values = arrays[f"minibatch/{name}"]
            values = values.reshape(-1, self.config["gradient_accumulation_steps"])
            found[f"{name}"] = values.mean(1)
        return found

    def expected_metrics(self, step: int) -> Metrics:
        """Metrics of a rollout, by this project's names."""
        mask = self.rollouts[step]["masks"]
        per_token = self.scalar(step, "stats/ppo/mean_non_score_reward")
        found = {
            "objective/non_score_reward": per_token * mask.sum() / len(mask),
            "objective/entropy": self.scalar(step, "stats/objective/entropy"),
            "objective/scores_scaled": self.scalar(step, "stats/ppo/mean_scores"),
            "objective/kl_coef": self.scalar(step, "kl_coef_before"),
            "lr": self.scalar(step, "stats/ppo/learning_rate"),
        }
        if self.config["kl_penalty"] == "kl":
            found["objective/kl"] = self.scalar(step, "stats/objective/kl")
        return found

    def expected_weights(self, step: int) -> dict[str, Weights]:
        """For each model: where its tensors stand in the flattened weights; places among these;
        the weights before the first step; at these places, or all, those after this rollout."""
        where = {}
        for name, place in self.record["weights"].items():
            where[name if "value_head" in name else f"lm.{name}"] = place
        after = self.rollouts[step]["weights"]
        return {"policy": (where, self.saved["places"], self.saved["policy"], after)}


class PPO112(Recording):
    """PPOTrainer of TRL 1.12 (trl.experimental.ppo), which has a value model of its own."""

    system = "trl112"
    patch = "trl_1.12"
    prefix = "u"
    settings = TRAINING | {
        "per_device_train_batch_size": 8,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "total_episodes": None,
        "learning_rate": 3e-6,
        "response_length": 53,
        "stop_token": None,
        "stop_token_id": None,
        "temperature": 0.7,
        "missing_eos_penalty": None,
        "whiten_rewards": False,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "cliprange": 0.2,
        "vf_coef": 0.1,
        "cliprange_value": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
    }
    no_effect = f"{NO_TRAINING} seed local_rollout_forward_batch_size num_sample_generations"
    no_effect += " dataset_num_proc sft_model_path reward_model_path"

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        if self.config["stop_token"] != "eos":
            self.end_token = self.config["stop_token_id"]

    def args(self) -> dict[str, Any]:
        config = self.config
        num_rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
        same = "cliprange cliprange_value vf_coef gamma lam kl_coef kl_estimator temperature"
        same += " whiten_rewards response_length"
        args = {name: config[name] for name in same.split()} | of_optimizer(self.about, config)
        return args | {
            "batch_size": num_rows,
            "micro_batch_size": config["per_device_train_batch_size"],
            "num_minibatches": config["num_mini_batches"],
            "num_epochs": config["num_ppo_epochs"],
            "total_episodes": len(self.rollouts) * num_rows,
            "adaptive_kl_target": None,
            "truncate_token": None if self.end_token is None else "eos",
            "penalty_reward_value": -(config["missing_eos_penalty"] or 0.0),
            "whiten": "batch",
            "value_after_end": True,
            "critic": "reward",
            "reward_model": "recorded",
        }

    def not_reproduced(self) -> dict[str, bool]:
        config = self.config
        eos = self.record["eos"]
        has_penalty = config["missing_eos_penalty"] is not None
        return not_reproduced_of_training(self.about, config) | {
            "gradient accumulation in 1.12": config["gradient_accumulation_steps"] > 1,
            "a pad token that is the EOS": any(eos in x["queries"] for x in self.rollouts),
            "missing_eos_penalty of another stop_token": has_penalty and self.end_token != eos,
            "responses that all end early": any(self.is_narrow(x) for x in self.rollouts),
        }

    def is_narrow(self, arrays: Arrays) -> bool:
        return arrays["responses"].shape[1] < self.config["response_length"]

    def queries(self, arrays: Arrays) -> list[list[int]]:
        """Padding is a pad token or, where that is the EOS, the EOS."""
        padding = [self.record["pad"], self.record["eos"]]
        return [row[~np.isin(row, padding)].tolist() for row in arrays["queries"]]

    def responses(self, arrays: Arrays) -> Tensor:
        responses = wide(arrays["responses"], self.config["response_length"])
        return torch.from_numpy(responses).long()

    def shuffles(self, arrays: Arrays) -> Tensor:
        order = torch.from_numpy(arrays["permutations"]).long()
        return order.view(len(order), self.config["num_mini_batches"], -1)

    def gpt2(self, kind: type, name: str, like: str) -> Module:
        config = GPT2Config(**self.record["model"], num_labels=1, pad_token_id=self.record["pad"])
        return build(kind, config, self.saved[name], self.record["weights"][like])

    def models(self) -> tuple[Module, Module]:
        policy = self.gpt2(GPT2LMHeadModel, "policy", like="policy")
        return policy, self.gpt2(GPT2LMHeadModel, "reference", like="policy")

    def classifier(self, name: str) -> Module:
        """The model of the rewards, or that of the values."""
        return self.gpt2(GPT2ForSequenceClassification, name, like=name)

    def score(self, args: Any, made: list) -> Callable:
        model = self.classifier("reward")
        head = self.script.reward_head(model)
        return functools.partial(self.script.score_by_model, model, head, args)

    def replaced(self) -> dict[str, Callable]:
        return {
            "load_model": lambda *_: self.classifier("value"),
            "reward_head": functools.partial(without_bias, self.script.reward_head),
        }

    def expected(self, step: int) -> Arrays:
        arrays = self.rollouts[step]
        mask = ~arrays["padding_mask"]
        value_mask = ~arrays["padding_mask_p1"]
        found = {"mask": mask, "value_mask": value_mask}
        for name in ("logprobs", "ref_logprobs", "advantages"):
            found[name] = arrays[name] * mask
        for name in ("values", "returns"):
            found[name] = arrays[name] * value_mask
        found["token_kl"] = arrays["kl"]
        found["scores"] = arrays["scores"]
        if not self.config["whiten_rewards"]:  # else these are whitened
            found["rewards"] = arrays["rewards"]
        return found

    def expected_steps(self, step: int) -> Arrays:
        arrays = self.rollouts[step]
        # These are means over all cells: also those after the end, where the ratio is 1.
        is_token = ~arrays["padding_mask"][arrays["micro/micro_batch_inds"]]
        num_tokens = is_token.sum((1, 2))
        num_cells = is_token[0].size
        ratio_sums = arrays["stats/ratio"].ravel() * num_cells - (num_cells - num_tokens)
        return {
            "loss/policy": arrays["micro/pg_loss"],
            "loss/value": arrays["micro/vf_loss"],
            "loss/total": arrays["micro/loss"],
            "policy/clipfrac": arrays["stats/pg_clipfrac"].ravel(),
            "val/clipfrac": arrays["stats/vf_clipfrac"].ravel(),
            "policy/approxkl": arrays["stats/approxkl"].ravel() * num_cells / num_tokens,
            "policy/ratio": ratio_sums / num_tokens,
        }

    def expected_metrics(self, step: int) -> Metrics:
        metrics = self.about["metrics"][step]
        found = {
            "objective/scores": metrics["objective/scores"],
            "objective/non_score_reward": metrics["objective/non_score_reward"],
            "objective/score_total": metrics["objective/rlhf_reward"],
            "lr": metrics["lr"],
        }
        if self.config["kl_estimator"] == "k1":
            found["objective/kl"] = metrics["objective/kl"]
        return found

    def expected_weights(self, step: int) -> dict[str, Weights]:
        found = {}
        for model in ("policy", "value"):
            where = {}
            for name, place in self.record["weights"][model].items():
                if model == "policy":
                    where[f"lm.{name}"] = place
                elif name == "score.weight":
                    where["value_head.weight"] = place
                else:
                    where[name.replace("transformer.", "critic.")] = place
            after = self.rollouts[step][f"{model}/weights"]
            found[model] = (where, self.saved[f"places_{model}"], self.saved[model], after)
        return found


class RLOO116(Recording):
    """RLOOTrainer of TRL 1.16. It counts optimizer steps through the run, from 1."""

    system = "rloo116"
    patch = "trl_rloo"
    prefix = "r"
    settings = TRAINING | {
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 512,
        "learning_rate": 1e-6,
        "max_steps": None,
        "temperature": 1.0,
        "beta": 0.05,
        "epsilon": 0.2,
        "epsilon_high": None,
        "num_iterations": 1,
        "steps_per_generation": None,
        "generation_batch_size": None,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "reward_weights": None,
        "mask_truncated_completions": False,
        "sync_ref_model": False,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    no_effect = f"{NO_TRAINING} seed shuffle_dataset disable_dropout num_generations_eval"
    no_effect += " log_completions num_completions_to_print log_unique_prompts pad_to_multiple_of"
    no_effect += " ref_model_mixup_alpha ref_model_sync_steps"

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.kind = self.made.get("kind", "gpt2")
        accumulated = self.config["gradient_accumulation_steps"]
        self.num_minibatches = self.config["steps_per_generation"] // accumulated
        self.num_steps = self.num_minibatches * self.config["num_iterations"]  # on a rollout

    def args(self) -> dict[str, Any]:
        config = self.config
        num_rows = len(self.rollouts[0]["completion_ids"])
        _, score_clip = config["reward_clip_range"] or (None, None)
        k = config["num_generations"]
        whole_groups = max(config["per_device_train_batch_size"] // k, 1) * k
        return of_optimizer(self.about, config) | {
            "batch_size": num_rows,
            "micro_batch_size": whole_groups,
            "num_minibatches": self.num_minibatches,
            "num_epochs": config["num_iterations"],
            "total_episodes": len(self.rollouts) * num_rows,
            "max_grad_norm": config["max_grad_norm"] or None,
            "rloo_k": k,
            "normalize_advantages": config["normalize_advantages"],
            "kl_coef": config["beta"],
            "adaptive_kl_target": None,
            "cliprange": config["epsilon"],
            "temperature": config["temperature"],
            "score_clip": score_clip,
            "truncate_token": "eos",
            "penalty_reward_value": 0.0,
            "response_length": config["max_completion_length"],
        }

    def not_reproduced(self) -> dict[str, bool]:
        config = self.config
        is_linear = config["lr_scheduler_type"] == "linear"
        lowest, highest = config["reward_clip_range"] or (0, 0)
        has_padding = any((arrays["prompt_mask"] == 0).any() for arrays in self.rollouts)
        top_k, min_p, repetition = (config[x] for x in ("top_k", "min_p", "repetition_penalty"))
        return not_reproduced_of_training(self.about, config) | {
            "a rate that falls at every optimizer step": is_linear and self.num_steps > 1,
            "minibatches of responses": self.num_minibatches > 1,
            "mask_truncated_completions": config["mask_truncated_completions"],
            "positions that count padding": self.kind == "gpt2" and has_padding,
            "reward_clip_range that is not symmetric": lowest != -highest,
            "epsilon_high": config["epsilon_high"] not in (None, config["epsilon"]),
            "sync_ref_model": config["sync_ref_model"],
            "other sampling": bool(top_k or min_p) or repetition != 1,
            "dropout in training": bool(self.made.get("dropout")),
            "equal rewards of a query": any(self.has_noise(arrays) for arrays in self.rollouts),
        }

    def has_noise(self, arrays: Arrays) -> bool:
        """Whether the advantages of a query's responses are 0 but for rounding, yet not 0."""
        advantages = arrays["advantages"].reshape(-1, self.config["num_generations"])
        largest = np.abs(advantages).max(1)
        return bool(((largest > 0) & (largest < 1e-6)).any())

    def queries(self, arrays: Arrays) -> list[list[int]]:
        rows = zip(arrays["prompt_ids"], arrays["prompt_mask"], strict=True)
        found = [row[mask > 0].tolist() for row, mask in rows]
        return found[:: self.config["num_generations"]]

    def responses(self, arrays: Arrays) -> Tensor:
        responses = wide(arrays["completion_ids"], self.config["max_completion_length"])
        return torch.from_numpy(responses).long()

    def shuffles(self, arrays: Arrays) -> Tensor:
        order = torch.arange(len(arrays["prompt_ids"]))  # the rows of a query are side by side
        return order.view(1, self.num_minibatches, -1).repeat(self.config["num_iterations"], 1, 1)

    def models(self) -> tuple[Module, Module]:
        where = self.record["weights"][self.kind]
        config = {"gpt2": gpt2_config, "llama": llama_config}[self.kind](where)
        kind = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}[self.kind]
        policy = build(kind, config, self.saved[f"{self.kind}/policy"], where)
        return policy, build(kind, config, self.saved[f"{self.kind}/reference"], where)

    def scores(self, arrays: Arrays) -> Tensor:
        rewards = arrays["rewards_per_func"]
        weights = self.config["reward_weights"] or np.ones(rewards.shape[1])
        return torch.from_numpy((rewards * np.float32(weights)).sum(1))

    def expected(self, step: int) -> Arrays:
        arrays = self.rollouts[step]
        length = self.config["max_completion_length"]
        mask = wide(arrays["completion_mask"], length)
        found = {"mask": mask, "advantages": arrays["advantages"]}
        found["logprobs"] = wide(arrays["old_per_token_logps"], length) * mask
        if self.config["beta"] > 0:  # else there is no reference
            found["ref_logprobs"] = wide(arrays["ref_per_token_logps"], length) * mask
        return found

    def steps_on(self, step: int) -> range:
        first = step * self.num_steps + 1
        return range(first, first + self.num_steps)

    def expected_steps(self, step: int) -> Arrays:
        numbers = self.steps_on(step)
        rows = [self.about["metrics"][number - 1] for number in numbers]
        names = {"gradient_norm": "grad_norm", "policy/clipfrac": "clip_ratio/region_mean"}
        if self.config["gradient_accumulation_steps"] == 1:  # else it is a mean of means
            names["policy/entropy"] = "entropy"
        found = {ours: np.array([row[theirs] for row in rows]) for ours, theirs in names.items()}
        losses = [self.arrays[f"step{number}/losses"].mean() for number in numbers]
        found["loss/policy"] = np.array(losses)
        return found

    def expected_metrics(self, step: int) -> Metrics:
        first = self.steps_on(step)[0]
        metrics = self.about["metrics"][first - 1]
        found = {
            "objective/length": metrics["completions/mean_length"],
            "lr": float(self.arrays[f"step{first}/lr"]),
        }
        if self.config["beta"] > 0:
            mask = self.rollouts[step]["completion_mask"]
            found["objective/kl"] = metrics["kl"] * mask.sum() / len(mask)
        return found

    def expected_weights(self, step: int) -> dict[str, Weights]:
        where = {f"lm.{name}": place for name, place in self.record["weights"][self.kind].items()}
        places = self.saved[f"{self.kind}/places"]
        after = self.arrays[f"step{self.steps_on(step)[-1]}/weights"]
        return {"policy": (where, places, self.saved[f"{self.kind}/policy"], after)}


def gpt2_config(where: dict) -> GPT2Config:
    """Of a model with these weights, and two heads."""
    vocabulary, size = where["transformer.wte.weight"][1]
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=where["transformer.wpe.weight"][1][0],
        n_embd=size,
        n_layer=sum("ln_1.weight" in name for name in where),
        n_head=2,
    )


def llama_config(where: dict) -> LlamaConfig:
    """Of a model with these weights, and two heads."""
    vocabulary, size = where["model.embed_tokens.weight"][1]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size,
        intermediate_size=where["model.layers.0.mlp.up_proj.weight"][1][0],
        num_hidden_layers=sum("input_layernorm" in name for name in where),
        num_attention_heads=2,
    )


SYSTEMS = {kind.system: kind for kind in (PPO09, PPO112, RLOO116)}
