"""Recordings of TRL's trainers, in this project's settings, names and shapes, (B, R)."""

import ast
import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import patched
import torch
from golden_tools import below
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.utils import vector_to_parameters
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification as AutoClassifier

OWN = Path(__file__).resolve().parent.parent / "golden_trl"
Arrays = dict[str, np.ndarray]
Metrics = dict[str, float]
Settings = dict[str, Any]
Weights = tuple[np.ndarray, np.ndarray, np.ndarray]
Named = list[tuple[str, Tensor]]
COMMON = {  # TRL ends a response with the EOS, masks what follows, and has PyTorch's Adam
    "truncate_after": 0,
    "mask_truncated": True,
    "penalty_mode": "add",
    "adam": "torch",
    "eval_queries": 1,
    "checkpoint_every": 0,
}
SCHEDULES = ("linear", "constant")
# Of transformers' TrainingArguments, in the form of Recording.table.
TRAINING = """
lr_scheduler_type  'linear'  lr_schedule
warmup_steps       0         -            warm-up
warmup_ratio       None      -            warm-up
"""


class Recording:
    """One variant of one of TRL's trainers."""

    system: str
    patch: str  # of benchmark/systems: recordings are replayed on a copy of a script that has it
    prefix: str  # of the arrays of a rollout
    of_responses = "responses"  # the name of the array
    # Settings that act on what is replayed: TRL's name, its default, the flag here that takes the
    # same value, and why a recording with another value than the default is not reproduced.
    table: str

    def __init_subclass__(cls) -> None:
        lines = filter(str.strip, cls.table.splitlines())
        rows = [line.split(maxsplit=3) for line in lines]
        cls.settings = {row[0]: ast.literal_eval(row[1]) for row in rows}
        cls.flags = {row[2]: row[0] for row in rows if row[2] != "-"}
        cls.reasons = {row[0]: row[3] for row in rows if len(row) == 4}

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.record = json.loads((folder / f"{self.system}.json").read_text())
        self.about = self.record["variants"][name]
        self.made = self.about.get("made", {})  # how models and data were made
        self.arrays = dict(np.load(folder / self.system / f"{name}.npz"))
        self.saved = dict(np.load(folder / self.system / "models.npz"))
        self.end_token = self.record["eos"]

        resolved = {name: self.about[name] for name in self.settings if name in self.about}
        self.config = self.settings | self.about["config"] | resolved

        self.rollouts: list[Arrays] = []
        while found := below(self.arrays, f"{self.prefix}{len(self.rollouts)}/"):
            self.rollouts.append(found)

    @property
    def script(self) -> ModuleType:
        return patched.module(self.patch)

    def args(self) -> Settings:
        """This project's settings."""
        args = COMMON | {flag: self.config[name] for flag, name in self.flags.items()}
        if "groups" in self.about:  # TRL resolves settings of the optimizer in its groups
            groups = self.about["groups"]
            args["adam_betas"] = tuple(groups[0]["betas"])
            args["adam_eps"] = groups[0]["eps"]
            args["weight_decay"] = max(group["weight_decay"] for group in groups)
        return args | self.other_args()

    def not_reproduced(self) -> dict[str, bool]:
        """What this project does not reproduce, by name, and whether the variant asks for it."""
        found = self.others_not_reproduced()
        for name, reason in self.reasons.items():
            value = self.config[name]
            is_asked = bool(value) and value != self.settings[name]
            found[reason] = is_asked or found.get(reason, False)
        if "groups" in self.about:
            found["another schedule"] = self.config["lr_scheduler_type"] not in SCHEDULES
            found["another optimizer"] = self.about["optimizer"] != "AdamW"
        return found

    def score(self, args: Any) -> Callable:
        """A function that gives the recorded scores (B,), one rollout after the other."""
        scores = map(self.scores, self.rollouts)
        return lambda *_: next(scores)

    def scores(self, arrays: Arrays) -> Tensor:
        return torch.from_numpy(arrays["scores"])

    def responses(self, arrays: Arrays) -> Tensor:
        """(B, R). What follows the end may be anything."""
        responses = wide(arrays[self.of_responses], self.args()["response_length"])
        return torch.from_numpy(responses).long().clamp(min=0)

    def models(self) -> tuple[Module, Module]:
        """Policy and reference."""
        return self.model("policy"), self.model("reference")

    def shuffles(self, arrays: Arrays) -> Tensor:
        """Row numbers of the minibatches: (num_epochs, num_minibatches, n)."""
        order = torch.from_numpy(arrays["permutations"]).long()
        return order.view(len(order), self.args()["num_minibatches"], -1)

    def replaced(self) -> dict[str, Callable]:
        """Functions of the script in whose place the variant has its own."""
        return {}

    def parts(self, policy: Module) -> dict[str, Named]:
        """The weights of each model, in the recording's order."""
        return {"policy": [*policy.lm.named_parameters()]}


def wide(x: np.ndarray, width: int) -> np.ndarray:
    """(B, width) of an array that is as wide as the longest response."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def build(kind: Any, config: Any, weights: np.ndarray, names: Iterable[str]) -> Module:
    """A model as load_model leaves it, with these weights, which have these names."""
    model = kind.from_config(config, attn_implementation="eager").eval()
    assert [name for name, _ in model.named_parameters()] == [*names]
    vector_to_parameters(torch.tensor(weights), model.parameters())
    return model


def without_bias(reward_head: Callable, model: Module) -> nn.Linear:
    """A head whose bias stays 0: TRL's has none."""
    head = reward_head(model)
    head.bias.requires_grad_(False)
    return head


class PPO09(Recording):
    """PPOTrainer of TRL 0.9.4. Its arrays are (B, T - 1): see at_responses."""

    system = "trl09"
    patch = "trl_0.9"
    prefix = "s"
    table = """
        batch_size                   128       batch_size
        mini_batch_size              128       micro_batch_size
        gradient_accumulation_steps  1         -
        ppo_epochs                   4         num_epochs
        learning_rate                1.41e-5   lr
        adap_kl_ctrl                 True      -
        init_kl_coef                 0.2       kl_coef
        target                       6.0       adaptive_kl_target
        horizon                      10_000.0  kl_horizon
        kl_penalty                   'kl'      kl_estimator
        gamma                        1.0       gamma
        lam                          0.95      lam
        cliprange                    0.2       cliprange
        cliprange_value              0.2       cliprange_value
        vf_coef                      0.1       vf_coef
        max_grad_norm                None      -                 max_grad_norm before 0.12
        early_stopping               False     -                 early_stopping
        ratio_threshold              10.0      -                 ratio_threshold
        use_score_scaling            False     -                 use_score_scaling
        score_clip                   None      score_clip
        whiten_rewards               False     -                 whiten_rewards before 0.12
    """

    def other_args(self) -> Settings:
        config = self.config
        rows_per_step = config["mini_batch_size"] * config["gradient_accumulation_steps"]
        args = {
            "num_minibatches": config["batch_size"] // rows_per_step,
            "total_episodes": len(self.rollouts) * config["batch_size"],
            "lr_schedule": "constant",
            "adam_eps": 1e-8,
            "temperature": 1.0,
            "truncate_token": "eos",
            "penalty_reward_value": 0.0,
            "response_length": self.rollouts[0]["responses"].shape[1],
            "whiten": "batch",
            "whiten_rewards": False,
        }
        return args if config["adap_kl_ctrl"] else args | {"adaptive_kl_target": None}

    def others_not_reproduced(self) -> dict[str, bool]:
        return {
            "response_masks": "response_masks" in self.rollouts[0],
            "positions that count padding": self.made.get("side") == "left",
            "micro-batches of unequal lengths": any(map(self.has_unequal_lengths, self.rollouts)),
            "controller of another kl_penalty": self.controller_needs_penalty(),
        }

    def has_unequal_lengths(self, arrays: Arrays) -> bool:
        """Whether the mean of the micro-batches' means is another one than that over all tokens."""
        lengths = (arrays["responses"] >= 0).sum(1)
        order = arrays["permutations"].reshape(-1, self.config["mini_batch_size"])
        num_tokens = lengths[order].sum(1)
        accumulated = num_tokens.reshape(-1, self.config["gradient_accumulation_steps"])
        return bool(np.ptp(accumulated, 1).any())

    def controller_needs_penalty(self) -> bool:
        """Whether the coefficient is adapted to another KL than k1, and that changes it."""
        if not self.config["adap_kl_ctrl"] or self.config["kl_penalty"] == "kl":
            return False
        for step, arrays in enumerate(self.rollouts):
            log_ratios = (arrays["logprobs"] - arrays["ref_logprobs"]) * arrays["masks"]
            kls = np.array([log_ratios.sum(1).mean(), self.scalar(step, "stats/objective/kl")])
            errors = (kls / self.config["target"] - 1).clip(-0.2, 0.2)
            if np.ptp(errors) > 1e-5:
                return True
        return False

    def scalar(self, step: int, name: str) -> float:
        return self.about["scalars"][f"s{step}/{name}"]

    def queries(self, arrays: Arrays) -> list[list[int]]:
        """Token ids of each, without padding."""
        return [row[row >= 0].tolist() for row in arrays["queries"]]

    def model(self, name: str) -> Module:
        names = [name for name in self.record["weights"] if "value_head" not in name]
        config = AutoConfig.for_model("gpt2", **self.record["model"])
        weights = self.saved[name][: -config.n_embd - 1]  # without the value head's
        return build(AutoModelForCausalLM, config, weights, names)

    def replaced(self) -> dict[str, Callable]:
        return {"ActorCritic": functools.partial(self.with_value_head, self.script.ActorCritic)}

    def with_value_head(self, actor_critic: type, *args: Any) -> Module:
        """TRL draws it; here it would start at zero."""
        policy = actor_critic(*args)
        weights = torch.tensor(self.saved["policy"])[-policy.value_head.in_features - 1 :]
        vector_to_parameters(weights, policy.value_head.parameters())
        return policy

    def parts(self, policy: Module) -> dict[str, Named]:
        return {"policy": [*policy.named_parameters()]}

    def at_responses(self, arrays: Arrays, x: np.ndarray) -> np.ndarray:
        """TRL's (B, T - 1) as (B, R), with 0 after the end."""
        found = np.zeros(arrays["responses"].shape)
        lengths = (arrays["responses"] >= 0).sum(1)
        for i, (query, length) in enumerate(zip(self.queries(arrays), lengths, strict=True)):
            start = len(query) - 1
            found[i, :length] = x[i, start : start + length]
        return found

    def expected(self, step: int) -> Arrays:
        """What TRL made of a rollout, by the names of quantities() in test_trl.py."""
        arrays = self.rollouts[step]
        names = "logprobs ref_logprobs values rewards advantages returns"
        found = {name: self.at_responses(arrays, arrays[name]) for name in names.split()}
        found["mask"] = self.at_responses(arrays, arrays["masks"])
        found["token_kl"] = self.at_responses(arrays, arrays["kls"])
        found["scores"] = arrays["scores_used"]
        found["kl_coef_after"] = self.scalar(step, "kl_coef_after")
        if self.config["kl_penalty"] == "kl":
            found["controlled_kl"] = self.scalar(step, "stats/objective/kl")
        return found

    def expected_steps(self, step: int) -> Arrays:
        """Metrics of the optimizer steps on a rollout, by this project's names."""
        names = "loss/policy loss/value loss/total policy/entropy policy/approxkl policy/clipfrac"
        names += " val/vpred val/error val/clipfrac val/mean returns/mean"
        accumulated = self.config["gradient_accumulation_steps"]
        arrays = self.rollouts[step]
        values = {name: arrays[f"minibatch/{name}"] for name in names.split()}
        return {name: x.reshape(-1, accumulated).mean(1) for name, x in values.items()}

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
        """Of each model: flattened weights at the start, places, and weights there (or all) now."""
        after = self.rollouts[step]["weights"]
        return {"policy": (self.saved["policy"], self.saved["places"], after)}


class PPO112(Recording):
    """PPOTrainer of TRL 1.12 (trl.experimental.ppo), which has a value model of its own."""

    system = "trl112"
    patch = "trl_1.12"
    prefix = "u"
    table = f"""{TRAINING}
        gradient_accumulation_steps  1     -                 gradient accumulation in 1.12
        per_device_train_batch_size  8     micro_batch_size
        num_mini_batches             1     num_minibatches
        num_ppo_epochs               4     num_epochs
        learning_rate                3e-6  lr
        response_length              53    response_length
        stop_token                   None  -
        stop_token_id                None  -
        temperature                  0.7   temperature
        missing_eos_penalty          None  -
        whiten_rewards               False whiten_rewards
        kl_coef                      0.05  kl_coef
        kl_estimator                 'k1'  kl_estimator
        cliprange                    0.2   cliprange
        vf_coef                      0.1   vf_coef
        cliprange_value              0.2   cliprange_value
        gamma                        1.0   gamma
        lam                          0.95  lam
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        if self.config["stop_token"] != "eos":
            self.end_token = self.config["stop_token_id"]

    def other_args(self) -> Settings:
        config = self.config
        num_rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
        return {
            "batch_size": num_rows,
            "total_episodes": len(self.rollouts) * num_rows,
            "adaptive_kl_target": None,
            "truncate_token": None if self.end_token is None else "eos",
            "penalty_reward_value": -(config["missing_eos_penalty"] or 0.0),
            "whiten": "batch",
            "value_after_end": True,
            "critic": "reward",
            "reward_model": "recorded",
        }

    def others_not_reproduced(self) -> dict[str, bool]:
        eos = self.record["eos"]
        has_penalty = self.config["missing_eos_penalty"] is not None
        length = self.config["response_length"]
        return {
            "a pad token that is the EOS": any(eos in x["queries"] for x in self.rollouts),
            "missing_eos_penalty of another stop_token": has_penalty and self.end_token != eos,
            "responses that all end early": any(
                x["responses"].shape[1] < length for x in self.rollouts
            ),
        }

    def queries(self, arrays: Arrays) -> list[list[int]]:
        """Padding is a pad token or, where that is the EOS, the EOS."""
        padding = [self.record["pad"], self.record["eos"]]
        return [row[~np.isin(row, padding)].tolist() for row in arrays["queries"]]

    def model(self, name: str, kind: Any = AutoModelForCausalLM) -> Module:
        sizes = self.record["model"] | {"num_labels": 1, "pad_token_id": self.record["pad"]}
        config = AutoConfig.for_model("gpt2", **sizes)
        return build(kind, config, self.saved[name], self.record["weights"][name])

    def score(self, args: Any) -> Callable:
        model = self.model("reward", AutoClassifier)
        head = self.script.reward_head(model)
        return functools.partial(self.script.score_by_model, model, head, args.micro_batch_size)

    def replaced(self) -> dict[str, Callable]:
        return {
            "load_model": lambda *_, **__: self.model("value", AutoClassifier),
            "reward_head": functools.partial(without_bias, self.script.reward_head),
        }

    def parts(self, policy: Module) -> dict[str, Named]:
        head = ("score.weight", policy.value_head.weight)
        return super().parts(policy) | {"value": [*policy.critic.named_parameters(), head]}

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
        same = ["objective/scores", "objective/non_score_reward", "lr"]
        if self.config["kl_estimator"] == "k1":
            same.append("objective/kl")
        found = {name: metrics[name] for name in same}
        return found | {"objective/score_total": metrics["objective/rlhf_reward"]}

    def expected_weights(self, step: int) -> dict[str, Weights]:
        found = {}
        for model in ("policy", "value"):
            after = self.rollouts[step][f"{model}/weights"]
            found[model] = (self.saved[model], self.saved[f"places_{model}"], after)
        return found


class RLOO116(Recording):
    """RLOOTrainer of TRL 1.16. It counts optimizer steps through the run, from 1."""

    system = "rloo116"
    patch = "trl_rloo"
    prefix = "r"
    of_responses = "completion_ids"
    table = f"""{TRAINING}
        gradient_accumulation_steps  1      -
        per_device_train_batch_size  8      -
        num_generations              2      rloo_k
        max_completion_length        512    response_length
        learning_rate                1e-6   lr
        max_grad_norm                1.0    -
        temperature                  1.0    temperature
        beta                         0.05   kl_coef
        epsilon                      0.2    cliprange
        epsilon_high                 None   -
        num_iterations               1      num_epochs
        steps_per_generation         None   -
        normalize_advantages         False  normalize_advantages
        reward_clip_range            None   -
        reward_weights               None   -
        mask_truncated_completions   False  -       mask_truncated_completions
        sync_ref_model               False  -       sync_ref_model
        top_k                        0      -       other sampling
        min_p                        None   -       other sampling
        repetition_penalty           1.0    -       other sampling
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.kind = self.made.get("kind", "gpt2")
        accumulated = self.config["gradient_accumulation_steps"]
        self.num_minibatches = self.config["steps_per_generation"] // accumulated
        self.num_steps = self.num_minibatches * self.config["num_iterations"]  # on a rollout

    def other_args(self) -> Settings:
        config = self.config
        num_rows = len(self.rollouts[0]["completion_ids"])
        _, score_clip = config["reward_clip_range"] or (None, None)
        k = config["num_generations"]
        return {
            "batch_size": num_rows,
            "micro_batch_size": max(config["per_device_train_batch_size"] // k, 1) * k,
            "num_minibatches": self.num_minibatches,
            "total_episodes": len(self.rollouts) * num_rows,
            "adaptive_kl_target": None,
            "max_grad_norm": config["max_grad_norm"] or None,
            "score_clip": score_clip,
            "truncate_token": "eos",
            "penalty_reward_value": 0.0,
        }

    def others_not_reproduced(self) -> dict[str, bool]:
        config = self.config
        is_linear = config["lr_scheduler_type"] == "linear"
        lowest, highest = config["reward_clip_range"] or (0, 0)
        has_padding = any((arrays["prompt_mask"] == 0).any() for arrays in self.rollouts)
        return {
            "a rate that falls at every optimizer step": is_linear and self.num_steps > 1,
            "minibatches of responses": self.num_minibatches > 1,
            "positions that count padding": self.kind == "gpt2" and has_padding,
            "reward_clip_range that is not symmetric": lowest != -highest,
            "epsilon_high": config["epsilon_high"] not in (None, config["epsilon"]),
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

    def shuffles(self, arrays: Arrays) -> Tensor:
        order = torch.arange(len(arrays["prompt_ids"]))  # the rows of a query are side by side
        return order.view(1, self.num_minibatches, -1).repeat(self.config["num_iterations"], 1, 1)

    def model(self, name: str) -> Module:
        """Its sizes are those of its weights, with two heads."""
        where = self.record["weights"][self.kind]
        shapes = {name: shape for name, (_, shape) in where.items()}
        vocabulary, size = next(iter(shapes.values()))  # of the embeddings
        layers = set(re.findall(r"\.(\d+)\.", " ".join(shapes)))
        sizes = {"hidden_size": size, "num_hidden_layers": len(layers), "num_attention_heads": 2}
        if self.kind == "gpt2":
            sizes["n_positions"] = shapes["transformer.wpe.weight"][0]
        else:
            sizes["intermediate_size"] = shapes["model.layers.0.mlp.up_proj.weight"][0]
        config = AutoConfig.for_model(self.kind, vocab_size=vocabulary, **sizes)
        return build(AutoModelForCausalLM, config, self.saved[f"{self.kind}/{name}"], where)

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
        found = {ours: [row[theirs] for row in rows] for ours, theirs in names.items()}
        found["loss/policy"] = [self.arrays[f"step{x}/losses"].mean() for x in numbers]
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
        after = self.arrays[f"step{self.steps_on(step)[-1]}/weights"]
        start, places = (self.saved[f"{self.kind}/{name}"] for name in ("policy", "places"))
        return {"policy": (start, places, after)}


SYSTEMS = {kind.system: kind for kind in (PPO09, PPO112, RLOO116)}
