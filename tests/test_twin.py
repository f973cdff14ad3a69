"""Whole runs of the scripts' `main` equal those of their twins in twin.py: metrics, samples, results and weights.

Settings are such that nothing cancels or stands still, so that one wrong line in a `main` shows.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import pytest
import torch
import twin
from fork_tools import PPO, REWARD, RLOO
from run_tools import read_lines
from safetensors.torch import load_file
from tiny_models import EOS, save_classifier, save_model
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

PAD, BOS = twin.PAD, 49
DATA = {"base_model": "gpt2", "query_dataset": "data/texts.jsonl", "query_length": 7}
DATA |= {"long_queries": None, "query_prefix": "w4 w5", "query_suffix": "w6", "start_text": "w2", "end_text": "w3"}
DATA |= {"response_length": 9, "temperature": 0.8, "seed": 8, "adam": "tf", "adam_eps": 1e-4}
RL = DATA | {"reward_model": "gpt2-judge", "eval_queries": 3, "truncate_token": "w9", "truncate_after": 1}
RL |= {"penalty_reward_value": -0.7, "penalty_mode": "replace", "mask_truncated": False, "total_episodes": 31}
RL |= {"batch_size": 12, "micro_batch_size": 4, "num_minibatches": 2, "num_epochs": 2, "lr": 1e-3, "cliprange": 0.1}
RL |= {"kl_coef": 0.2, "kl_target": 0.4, "kl_horizon": 50.0}
PPO_A = RL | {"cliprange_value": 0.02, "vf_coef": 0.3, "gamma": 0.95, "lam": 0.9, "whiten_rewards": True}
LLAMA = {"base_model": "llama", "query_dataset": "tokens.jsonl", "start_text": None, "end_text": None}
LLAMA |= {"long_queries": "keep_end", "adam": "torch", "adam_eps": 1e-2}
ENDS = {"reward_model": "llama-judge", "truncate_token": "eos", "truncate_after": 0, "penalty_mode": "add"}
ENDS |= LLAMA | {"mask_truncated": True}
MASKED = {"mask_truncated": True, "whiten_rewards": False, "kl_target": None, "long_queries": "drop"}
RLOO_A = RL | {"rloo_k": 3, "token_level": False, "batch_size": 18, "total_episodes": 50, "lr": 4e-4, "kl_target": 0.2}
LABELS = DATA | {"label_dataset": "data/labels.jsonl", "num_labels": 17, "normalization_samples": 7, "batch_size": 5}
LABELS |= {"micro_batch_size": 2, "truncate_token": "w9", "lr": 2e-3}
TEXTS = {"label_dataset": "data/preferences", "num_labels": None, "normalization_samples": 8, "batch_size": 6}
TEXTS |= {"response_length": 6, "long_queries": "keep_end"}
STEPS = {"adam_betas": (0.7, 0.95), "weight_decay": 0.5, "max_grad_norm": 0.5, "lr_warmup": 2}
STEPS |= {"lr_schedule": "constant"}
PTX = {"ptx_coef": 0.3, "ptx_dataset": "data/pretraining.jsonl", "ema": 0.6}
PPO_B = STEPS | {"kl_estimator": "full", "score_norm": "whiten", "score_clip": 0.9, "whiten_advantages": False}
PPO_B |= {"critic": "reward", "critic_lr": 3e-3, "critic_warmup": 1, "unfrozen_layers": 1, "num_epochs": 3}
PPO_B |= {"eval_every": 2}
PPO_C = PTX | {"whiten": "global", "critic": "policy", "kl_estimator": "k3", "target_kl": 5e-3, "critic_lr": 1e-2}
PPO_C |= {"weight_decay": 0.3, "kl_target": 0.13}
RLOO_B = PTX | {"kl_estimator": "k2", "score_norm": "scale", "top_p": 0.9, "eval_every": 2, "unfrozen_layers": 1}
RLOO_B |= {"lr": 1e-3, "kl_coef": 0.5}
RLOO_C = PTX | {"kl_estimator": "abs", "score_norm": "whiten", "score_clip": 0.9, "target_kl": 2e-3, "lr": 1e-3}
RLOO_C |= {"token_level": True, "unfrozen_layers": 1, "batch_size": 36, "total_episodes": 100}
RESULTS = {PPO: twin.reinforce, RLOO: twin.reinforce, REWARD: twin.train_reward}
RUNS = {
    "ppo": (PPO, 1, PPO_A),
    "ppo, eos, two processes": (PPO, 2, PPO_A | ENDS),
    "ppo, words masked": (PPO, 1, PPO_A | MASKED),
    "ppo, critic from the reward model": (PPO, 1, PPO_A | PPO_B),
    "ppo, critic from the policy, two processes": (PPO, 2, PPO_A | ENDS | PPO_C),
    "best of three": (REWARD, 1, LABELS | LLAMA),
    "preferences, eos, two processes": (REWARD, 2, LABELS | TEXTS | {"truncate_token": "eos"}),
    "preferences": (REWARD, 1, LABELS | LLAMA | TEXTS | {"long_queries": "keep_start"}),
    "preferences, other steps": (REWARD, 1, LABELS | TEXTS | STEPS),
    "rloo": (RLOO, 1, RLOO_A),
    "rloo, eos, two processes": (RLOO, 2, RLOO_A | ENDS | {"batch_size": 36, "total_episodes": 100}),
    "rloo of tokens": (RLOO, 1, RLOO_A | {"token_level": True, "lr": 1e-3}),
    "rloo, upper layer": (RLOO, 1, RLOO_A | STEPS | RLOO_B),
    "rloo of tokens, two processes": (RLOO, 2, RLOO_A | ENDS | RLOO_C),
}


def fill(folder: Path) -> Path:
    """Two architectures, the second with a BOS and a pad that is its eos, their reward models, queries and labels."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for name, changes in (("gpt2", {}), ("llama", {"pad_token_id": EOS, "bos_token_id": BOS})):
        save_model(folder / name, name, **changes)
        save_classifier(folder / f"{name}-judge", name, reward_gain=1.3, reward_bias=-0.4, **changes)
    for name in ("gpt2", "gpt2-judge"):  # its bos is its eos, and stands before no text
        AutoTokenizer.from_pretrained(folder / name, bos_token="<|endoftext|>").save_pretrained(folder / name)
    for name, auto_class in (("llama", AutoModelForCausalLM), ("llama-judge", AutoModelForSequenceClassification)):
        model, tokenizer = (x.from_pretrained(folder / name) for x in (auto_class, AutoTokenizer))
        model.model.embed_tokens.weight.data[EOS] = 0.25 * torch.randn(32)  # padding is made with zeros
        if name == "llama":
            model.lm_head.weight.data[[EOS, 36]] = model.lm_head.weight.data[[36, EOS]]  # so that some responses end
        model.save_pretrained(folder / name)
        tokenizer.bos_token = f"w{BOS}"
        begin = processors.TemplateProcessing(single=f"w{BOS} $A", special_tokens=[(f"w{BOS}", BOS)])
        tokenizer.backend_tokenizer.post_processor = begin
        tokenizer.save_pretrained(folder / name)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.choice([EOS, *range(4, BOS)]) for _ in range(rng.randrange(low, high))]

    def text(row: list[int]) -> str:
        return " ".join(f"w{token}" if token != EOS else "<|endoftext|>" for token in row)

    def padded(row: list[int]) -> list[int]:
        return row + [PAD] * (12 - len(row))

    texts = [text([*tokens(0, 4), 2, *tokens(2, 5), 3, *tokens(0, 6)]) for _ in range(14)]
    texts[3], texts[5], texts[7] = "w9 w8 w3", "w8 w3 w2", "w9 w2 w8"  # no start; nothing after it; no end
    pretraining = [text(tokens(1, 12)) for _ in range(11)] + [
        text(tokens(30, 31)),
        "w7",
    ]  # too long; with nothing after
    pairs = [{x: text(tokens(1, 11)) for x in ("prompt", "chosen", "rejected")} for _ in range(32)]
    pairs[7] |= {"chosen": "w4 w5 w6 w7 w8 w9 w10", "rejected": "w4 w5 w6 w7 w8 w9 w11"}  # as far as they are read
    rows = [[padded(tokens(1, 8)) for _ in range(4)] for _ in range(25)]
    rows[4][1] = rows[4][3]  # the same response twice
    names = ("query", "sample0", "sample1", "sample2")
    tables = {
        "data/texts": [{"content": "w8 w2 w9 w3", "query": text} for text in texts],
        "tokens": [{"query": padded(tokens(2, 11))} for _ in range(14)],
        "data/labels": [dict(zip(names, row, strict=True)) | {"best": 2 * (i % 3 == 1)} for i, row in enumerate(rows)],
        "data/pretraining": [{"text": text} for text in pretraining],
        "data/preferences/train": pairs[:20],
        "data/preferences/test": pairs[20:],
    }
    for name, rows in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(settings: dict[str, Any]) -> list[str]:
    """The words of a command line."""
    found = ["--checkpoint_every", "0"]
    for name, x in settings.items():
        if isinstance(x, bool):
            found.append(f"--{name}" if x else f"--no-{name}")
        else:
            found += [f"--{name}", *("none" if y is None else str(y) for y in (x if isinstance(x, tuple) else [x]))]
    return found


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("kit"))


def compare(made: Any, expected: Any, where: str = "") -> list[str]:
    """Where two results differ: fractions by more than 1e-4, relatively, and 4e-6; all else must be equal."""
    if isinstance(expected, dict):
        odd = [f"{where}: {sorted(made.keys() ^ expected.keys())}"] if made.keys() != expected.keys() else []
        both = made.keys() & expected.keys()
        return odd + [x for key in sorted(both) for x in compare(made[key], expected[key], f"{where} {key}")]
    if isinstance(expected, list):
        odd = [f"{where}: {len(made)} for {len(expected)}"] if len(made) != len(expected) else []
        pairs = enumerate(zip(made, expected, strict=False))
        return odd + [x for i, pair in pairs for x in compare(*pair, f"{where}[{i}]")]
    is_equal = pytest.approx(expected, rel=1e-4, abs=4e-6) == made if isinstance(expected, float) else made == expected
    return [] if is_equal else [f"{where}: {made} for {expected}"]


def compare_weights(folder: Path, expected: SimpleNamespace) -> list[str]:
    """Weights that are not moved as in the twin, to 1e-3 of the move or 2e-6."""
    odd, files = [], {str(x.relative_to(folder))[:-12]: load_file(x) for x in folder.rglob("*.safetensors")}
    made = {f"{file}:{name}": x for file, weights in files.items() for name, x in weights.items()}
    if made.keys() != expected.weights.keys():
        return [f"weights: {sorted(made.keys() ^ expected.weights.keys())}"]
    for name, x in made.items():
        off, move = x - expected.weights[name], expected.weights[name] - expected.start[name]
        if off.norm() > 1e-3 * move.norm() and off.abs().max() > 2e-6:
            odd.append(f"{name}: off by {off.abs().max():.2g}, {off.norm() / move.norm():.2g} of the move")
    return odd


def differences(script: str, world: int, settings: dict[str, Any], kit: Path, out: Path) -> list[str]:
    """What is not equal between the run of the script, in `world` processes, and that of its twin; or stands still."""
    begin = fork_tools.run if world == 1 else fork_tools.run_two
    ended = begin(script, ["--output_dir", str(out), *words(settings)], kit)
    for status, _, errors in [ended] if world == 1 else ended:
        assert status == 0, errors
    expected = RESULTS[script](script, settings, kit, world)
    odd = compare(read_lines(out / "metrics.jsonl"), expected.metrics, "metrics")
    odd += compare(read_lines(out / "samples.jsonl"), expected.samples, "samples")
    if script == REWARD:
        made = json.loads((out / "results.json").read_text())
        config = json.loads((out / "reward_model" / "config.json").read_text())
        odd += compare(made, expected.results, "results")
        odd += compare({x: config[f"reward_{x}"] for x in ("gain", "bias")}, {x: made[x] for x in ("gain", "bias")})
    constant = {"first_ratio_error"} | ({"objective/kl_coef"} if settings.get("kl_target") is None else set())
    constant |= {"objective/score_clipfrac"} if settings.get("score_clip") is None else set()
    moving = sorted(expected.metrics[0].keys() - constant)
    odd += [f"{x} stands still" for x in moving if len({row[x] for row in expected.metrics}) == 1]
    return odd + compare_weights(out, expected)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_its_twin(name: str, kit: Path, tmp_path: Path) -> None:
    script, world, settings = RUNS[name]
    assert not differences(script, world, settings, kit, tmp_path / "out")
