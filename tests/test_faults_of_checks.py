"""The exact borders of what the scripts refuse, and the defaults of all flags."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import VOCABULARY, load, make_config, make_queries, randomize, save_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
import rloo_rlhf
import train_reward

POLICY_SCRIPTS = ["ppo_rlhf", "rloo_rlhf"]
WINDOW = 64
BOTH = {
    "seed": 1,
    "output_dir": None,
    "resume": False,
    "checkpoint_every": 25,
    "track": False,
    "base_model": "tiny/model",
    "dtype": "fp32",
    "gradient_checkpointing": False,
    "query_dataset": "tiny/queries",
    "query_length": 32,
    "long_queries": None,
    "query_prefix": "",
    "query_suffix": "",
    "start_text": ".",
    "end_text": ".",
    "response_length": 24,
    "temperature": 0.7,
    "truncate_token": ".",
    "truncate_after": 16,
    "micro_batch_size": 128,
    "lr_schedule": "linear",
    "lr_warmup": 0,
    "adam": "tf",
    "adam_eps": 1e-5,
    "adam_betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "max_grad_norm": None,
}
POLICY = {
    "eval_queries": 64,
    "reward_model": None,
    "reward_fn": None,
    "lora_rank": 0,
    "lora_alpha": 16.0,
    "penalty_reward_value": -1.0,
    "penalty_mode": "replace",
    "mask_truncated": False,
    "total_episodes": 12_800,
    "batch_size": 128,
    "num_minibatches": 1,
    "num_epochs": 4,
    "lr": 2e-4,
    "kl_coef": 0.15,
    "adaptive_kl_target": 6.0,
    "kl_horizon": 2_000.0,
    "max_kl": 200.0,
    "cliprange": 0.2,
}
DEFAULTS = {
    "ppo_rlhf": BOTH
    | POLICY
    | {
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_rewards": True,
        "whiten_advantages": True,
        "critic": "shared",
        "critic_lr": None,
        "critic_warmup": 0,
    },
    "rloo_rlhf": BOTH | POLICY | {"rloo_k": 4},
    "train_reward": BOTH
    | {
        "label_dataset": "tiny/labels",
        "num_labels": None,
        "eval_labels": 512,
        "normalization_samples": 512,
        "batch_size": 8,
        "lr": 2e-3,
    },
}


class Stop(Exception):
    """Raised in the place of a function, to end main where it is called."""


def stop(*arguments: Any, **named: Any) -> None:
    """Ends main."""
    raise Stop


def make_model(auto_class: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    """A random GPT-2 with this vocabulary and window."""
    torch.manual_seed(0)
    model = auto_class.from_config(make_config("gpt2", **changes), attn_implementation="eager")
    randomize(model)
    return model.eval()


def make_classifier(labels: int = 1) -> Any:
    """The same with a score of each of the labels."""
    return make_model(AutoModelForSequenceClassification, num_labels=labels)


def with_top_token(token: int) -> Any:
    """As much of a tokenizer as check_model reads."""
    return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": token})


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_all_flags(name: str) -> None:
    script = importlib.import_module(name)
    assert {field.name for field in fields(script.Args)} == set(DEFAULTS[name])
    assert vars(script.Args()) == DEFAULTS[name]
    assert vars(script.PRESETS["tiny"]) == DEFAULTS[name]


@pytest.mark.parametrize("make", [make_model, make_classifier])
def test_the_last_embedding_and_the_whole_window_can_be_used(make: Callable) -> None:
    Accelerator(cpu=True)
    model = make()
    with torch.no_grad():
        ppo_rlhf.check_model(model, with_top_token(VOCABULARY - 1), WINDOW)
        message = f"^{VOCABULARY} embeddings for token {VOCABULARY}, a window of {WINDOW} for 64$"
        with pytest.raises(ppo_rlhf.UserError, match=message):
            ppo_rlhf.check_model(model, with_top_token(VOCABULARY), WINDOW)
        message = f"^{VOCABULARY} embeddings for token 1, a window of {WINDOW} for {WINDOW + 1}$"
        with pytest.raises(ppo_rlhf.UserError, match=message):
            ppo_rlhf.check_model(model, with_top_token(1), WINDOW + 1)


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_a_classifier_has_one_label(labels: int, tmp_path: Path) -> None:
    """Also one to train further."""
    save_model(tmp_path, "gpt2", AutoModelForSequenceClassification, num_labels=labels)
    for flag in ("reward_model", "base_model"):
        if labels == 1:
            assert load(tmp_path, flag, classifier=True).score.out_features == 1
        else:
            with pytest.raises(ppo_rlhf.UserError, match=f"^--{flag} {tmp_path}: "):
                load(tmp_path, flag, classifier=True)


@pytest.mark.parametrize("make", [make_model, make_classifier])
@pytest.mark.parametrize(
    ("factor", "passes"),
    [(1.0, True), (1.0001, True), (0.9999, True), (1.01, False), (0.99, False), (torch.nan, False)],
)
def test_a_model_may_differ_from_a_plain_pass_by_rounding_only(
    make: Callable, factor: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Accelerator(cpu=True)
    plain = ppo_rlhf.read

    def scaled(*arguments: Any) -> SimpleNamespace:
        states = plain(*arguments).last_hidden_state
        return SimpleNamespace(last_hidden_state=factor * states)

    monkeypatch.setattr(ppo_rlhf, "read", scaled)
    with torch.no_grad():
        if passes:
            ppo_rlhf.check_model(make(), with_top_token(VOCABULARY - 1), 20)
        else:
            with pytest.raises(ppo_rlhf.UserError, match="other results with padding and a cache"):
                ppo_rlhf.check_model(make(), with_top_token(VOCABULARY - 1), 20)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_a_reward_model_has_the_same_words_under_the_same_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    Accelerator(cpu=True)
    monkeypatch.setattr(script, "load_model", lambda *_: make_classifier())
    args = script.Args(reward_model="judge")
    ours = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    for theirs in ({"a": 1, "b": 0}, {"a": 0, "c": 1}, {"a": 0}):
        other = SimpleNamespace(get_vocab=lambda theirs=theirs: theirs)
        monkeypatch.setattr(script, "load_tokenizer", lambda flag, args, other=other: other)
        with pytest.raises(script.UserError, match="has another tokenizer"):
            script.load_reward("reward_model", args, "tiny", ours, 8)
    monkeypatch.setattr(script, "load_tokenizer", lambda flag, args: ours)
    assert script.load_reward("reward_model", args, "tiny", ours, 8)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("lengths", [[9, 2, 2, 2], [2, 9, 2, 2], [2, 2, 2, 9]])
def test_the_window_holds_every_query_and_its_response(
    name: str, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the four are held out. With a prefix and a suffix the policy's query is the longer."""
    script = importlib.import_module(name)
    queries = [script.Query([1], length * [token], {}) for token, length in enumerate(lengths)]
    monkeypatch.setattr(script, "load_queries", lambda *_: queries)
    seen = []

    def load_both(args: Any, tokenizer: Any, longest: int) -> None:
        seen.append(longest)
        raise Stop

    load_reward = lambda flag, args, preset, tokenizer, longest: seen.append(longest)  # noqa: E731
    monkeypatch.setattr(script, "load_policy_and_reference", load_both)
    monkeypatch.setattr(script, "load_reward", load_reward)
    with pytest.raises(Stop):
        script.main("tiny", script.Args(eval_queries=2, output_dir=str(tmp_path / "out")))
    assert seen == [9 + 24] * 2


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_a_query_must_be_left_to_train_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "load_queries", lambda *_: make_queries([[1], [2], [3]]))
    monkeypatch.setattr(script, "load_reward", stop)
    out = str(tmp_path / "out")
    with pytest.raises(script.UserError, match="^--eval_queries 3: no query is left to "):
        script.main("tiny", script.Args(eval_queries=3, output_dir=out))
    with pytest.raises(Stop):
        script.main("tiny", script.Args(eval_queries=2, output_dir=out))


LABEL_OF_9 = train_reward.Comparison([1, 2], [[3], 7 * [4]], 0)  # 2 + 7 tokens
LABEL_OF_3 = train_reward.Comparison([1, 2], [[3], [4]], 0)


@pytest.mark.parametrize(
    ("labels", "held_out", "query", "longest"),
    [
        ([LABEL_OF_3, LABEL_OF_9], [LABEL_OF_3], 1, 9),
        ([LABEL_OF_9, LABEL_OF_3], [LABEL_OF_3], 1, 9),
        ([LABEL_OF_3], [LABEL_OF_3, LABEL_OF_9], 1, 9),
        ([LABEL_OF_3], [], 8, 13),
    ],
)
def test_the_window_holds_every_label_and_every_sample(
    labels: list[Any],
    held_out: list[Any],
    query: int,
    longest: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = [train_reward.Query([1], [1] * size, {}) for size in (1, query, 1)]
    monkeypatch.setattr(train_reward, "load_queries", lambda *_: queries)
    monkeypatch.setattr(train_reward, "load_labels", lambda *_: (labels, held_out))
    seen = []

    def load(flag: str, args: Any, auto_class: Any, tokenizer: Any, size: int, **_: Any) -> Any:
        seen.append(size)
        if auto_class is not AutoModelForCausalLM:  # the second model, for the rewards
            raise Stop
        return make_model()

    monkeypatch.setattr(train_reward, "load_model", load)
    args = train_reward.Args(response_length=5, output_dir=str(tmp_path / "out"))
    with pytest.raises(Stop):
        train_reward.main("tiny", args)
    assert seen == [longest, longest]


def with_processes(script: Any, count: int, patch: pytest.MonkeyPatch) -> None:
    """The script's main will see this many processes, and end after its checks of settings."""
    accelerator = SimpleNamespace(num_processes=count, process_index=0)
    patch.setattr(script, "make_accelerator", lambda dtype: accelerator)
    patch.setattr(script, "choose_folder", stop)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"batch_size": 4, "normalization_samples": 6}, True),
        ({"batch_size": 4, "normalization_samples": 0}, True),
        ({"batch_size": 4, "normalization_samples": 3}, False),
        ({"batch_size": 3, "normalization_samples": 6}, False),
    ],
)
def test_processes_divide_labels_and_samples_for_normalization(
    settings: dict[str, int], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_processes(train_reward, 2, monkeypatch)
    error = Stop if passes else train_reward.UserError
    with pytest.raises(error):
        train_reward.main("tiny", train_reward.Args(**settings))


@pytest.mark.parametrize(
    ("name", "settings", "passes"),
    [
        ("ppo_rlhf", {"batch_size": 12, "num_minibatches": 3}, True),
        ("ppo_rlhf", {"batch_size": 9, "num_minibatches": 3}, False),
        ("ppo_rlhf", {"batch_size": 8, "num_minibatches": 3}, False),
        ("rloo_rlhf", {"batch_size": 8, "rloo_k": 4}, True),
        ("rloo_rlhf", {"batch_size": 12, "rloo_k": 4}, False),
        ("rloo_rlhf", {"batch_size": 8, "rloo_k": 4, "micro_batch_size": 12}, True),
        ("rloo_rlhf", {"batch_size": 8, "rloo_k": 4, "micro_batch_size": 2}, False),
        ("rloo_rlhf", {"batch_size": 8, "rloo_k": 4, "micro_batch_size": 6}, False),
        ("ppo_rlhf", {"response_length": 17}, True),
        ("ppo_rlhf", {"response_length": 16}, False),
        ("ppo_rlhf", {"response_length": 16, "truncate_token": None}, True),
    ],
)
def test_sizes_that_go_together(
    name: str, settings: dict[str, Any], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two processes."""
    script = importlib.import_module(name)
    with_processes(script, 2, monkeypatch)
    with pytest.raises(Stop if passes else script.UserError):
        script.main("tiny", script.Args(**settings))


GOOD = {"gradient_norm": 1.0, "first_ratio_error": 0.0}
GOOD |= {"sampling_error": 0.0, "objective/kl": 0.0}


@pytest.mark.parametrize(
    ("update", "metric", "limit"),
    [
        (0, "objective/kl", 1e-3 * 24),  # of 24 tokens
        (1, "objective/kl", 5.0),
        (1, "first_ratio_error", 1e-3),
        (1, "sampling_error", 0.01),
        (1, "gradient_norm", sys.float_info.max),
    ],
)
def test_a_run_stops_beyond_these_limits(update: int, metric: str, limit: float) -> None:
    args = rloo_rlhf.Args(max_kl=5.0)
    rloo_rlhf.check_update(update, GOOD | {metric: 0.99 * limit}, args)
    for value in (1.01 * limit, -1.01 * limit, torch.nan):
        with pytest.raises(rloo_rlhf.UserError, match=f"^{metric} is .*, its limit .*; see docs/"):
            rloo_rlhf.check_update(update, GOOD | {metric: value}, args)
