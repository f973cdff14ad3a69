"""benchmark/systems: published settings of other systems are command lines that the scripts take,
and what a system does beyond the scripts is a patch of one of them."""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import numpy as np
import patched
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, UPDATES, WORDS, copy, kit, plain
from run_tools import call, read_lines, read_metrics
from safetensors.torch import load_file
from tiny_models import VOCABULARY, full_logits, make_lm, random_rows
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from trl_tools import COMMON, PPO09, PPO112

import rloo_rlhf
from benchmark import ours

BASES = {
    "dapo": RLOO,
    "deepspeed_chat": PPO,
    "dr_grpo": RLOO,
    "grpo": RLOO,
    "gspo": RLOO,
    "instructgpt": PPO,
    "length_penalty": PPO,
    "llama2": PPO,
    "margin": REWARD,
    "qwen": PPO,
    "reinforce_pp": RLOO,
    "rm_ensemble": PPO,
    "tis": PPO,
    "trl_0.9": PPO,
    "trl_1.12": PPO,
    "trl_rloo": RLOO,
    "trlx": PPO,
    "vapo": PPO,
}
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
            "adaptive_kl_target": None,
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
            "adaptive_kl_target": None,
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
            "adaptive_kl_target": None,
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
            "adaptive_kl_target": None,
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
            "adaptive_kl_target": 6.0,
            "kl_horizon": 10_000.0,
            "kl_estimator": "kl",
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
            "adaptive_kl_target": None,
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
            "adaptive_kl_target": None,
            "cliprange": 0.2,
            "temperature": 1.0,
        },
    },
    "trlx": {
        "trlx/data/default_configs.py": {
            "unfrozen_layers": 2,
            "response_length": 40,
            "batch_size": 128,
            "num_minibatches": 128 // 32,
            "micro_batch_size": 32,
            "num_epochs": 4,
            "total_episodes": 10_000 // (4 * 128 // 32) * 128,
            "lr": 3e-5,
            "lr_schedule": "constant",
            "adam": "torch",
            "adam_betas": (0.9, 0.95),
            "adam_eps": 1e-8,
            "weight_decay": 1e-6,
            "kl_coef": 0.001,
            "adaptive_kl_target": None,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 1.0,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
        },
        NOT_SAID: {"temperature": 1.0, **UNTIL_EOS},
    },
}
# A tiny run of two updates; its names of files and its sizes come after the system's.
TINY = f"{fork_tools.COMMON} --reward_model judge --eval_queries 2"
TINY += " --batch_size 16 --total_episodes 32 --micro_batch_size 16"
TINY += " --truncate_after 0"
TINY_LABELS = f"{fork_tools.LABELS} --num_labels 8"
OWN_SIZES = {
    "deepspeed_chat": "--lr_warmup 1",  # of two updates
    "instructgpt": "--lr_warmup 1 --ptx_dataset queries.jsonl",
    "qwen": "--critic_warmup 1",
    "rm_ensemble": "--more_reward_models judge",
    "vapo": "--critic_warmup 1",
    "trlx": "--unfrozen_layers 1",  # of two
}


# --- the folder -----------------------------------------------------------------------------------
def commands(name: str) -> list[str]:
    """Those in the head of a patch."""
    return re.findall(
        "^    ((?:python|patch) .*)$", patched.PATCHES[name].read_text().split("\n--- ")[0], re.M
    )


@pytest.mark.parametrize("name", patched.PATCHES)
def test_a_patch_applies_as_it_is_and_ruff_finds_nothing(name: str, tmp_path: Path) -> None:
    """By the command in its head, which names the files as they are called."""
    text = patched.PATCHES[name].read_text()
    assert f"\n--- {BASES[name]}\n+++ {name}.py\n" in text
    patch = f"patch -o {name}.py {BASES[name]} benchmark/systems/{name}.patch"
    assert patch in commands(name)
    words = [*shlex.split(patch), "--fuzz=0"]
    words[2] = str(tmp_path / words[2])
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not re.search("fuzz|offset", done.stdout)
    made = (tmp_path / f"{name}.py").read_text()
    assert made == patched.script(name).read_text()
    assert made != (ROOT / BASES[name]).read_text()
    for command in (["check"], ["format", "--check"]):
        config = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
        ruff = [sys.executable, "-m", "ruff", *command, *config, str(tmp_path / f"{name}.py")]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_system_is_known() -> None:
    assert list(patched.PATCHES) == sorted(BASES)
    assert list(patched.ARGS) == sorted(SOURCES)
    assert SOURCES.keys() < BASES.keys()


def test_patches_are_written_again_as_they_are(tmp_path: Path) -> None:
    """With line numbers of another script, too."""
    make = patched.make
    edited = patched.script("grpo").read_text()
    with pytest.MonkeyPatch.context() as patch:
        systems = tmp_path / "benchmark" / "systems"
        systems.mkdir(parents=True)
        old = patched.PATCHES["grpo"].read_text()
        (systems / "grpo.patch").write_text(old.replace("@@ -", "@@ -1"))
        (tmp_path / RLOO).write_text((ROOT / RLOO).read_text())
        patch.setattr(make, "SYSTEMS", systems)
        patch.setattr(make, "ROOT", tmp_path)
        make.write_patch("grpo", edited)
        assert (systems / "grpo.patch").read_text() == old
        moved = "# a line\n" + (ROOT / RLOO).read_text()
        (tmp_path / RLOO).write_text(moved)
        patch.setattr(sys, "argv", ["make.py"])
        make.main()
        assert (systems / "grpo.patch").read_text() != old
        again = make.patched("grpo", tmp_path / "grpo.py")
        assert again.read_text() == "# a line\n" + edited


def comments(name: str) -> dict[str, str]:
    """What stands behind the # of every line, by the setting."""
    found = {}
    for line in patched.ARGS[name].read_text().splitlines():
        words, _, comment = line.partition("#")
        if words:
            flag = words.split()[0]
            found[re.sub("^--(no-)?", "", flag)] = comment.strip()
    return found


def parse(name: str, words: list[str]) -> dict[str, Any]:
    """All settings that the words amount to, for the patched copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *words])
        _, args = patched.module(name).parse_args()
    return vars(args)


@pytest.mark.parametrize("name", patched.ARGS)
def test_every_value_is_its_source_s(name: str) -> None:
    """And what a source does not give is said there."""
    args = parse(name, patched.flags(name))
    text = patched.ARGS[name].read_text()
    given = {}
    for source, values in SOURCES[name].items():
        assert source in text
        assert not given.keys() & values.keys()
        given |= values
    assert given.keys() == comments(name).keys()
    assert {field: args[field] for field in given} == given
    found = {field for field, comment in comments(name).items() if comment.startswith(NOT_SAID)}
    assert found == SOURCES[name].get(NOT_SAID, {}).keys()


@pytest.mark.parametrize(("name", "kind"), [("trl_0.9", PPO09), ("trl_1.12", PPO112)])
def test_the_settings_of_trl_are_what_is_replayed(name: str, kind: Any) -> None:
    """The defaults of PPOConfig, as test_trl.py puts them into this project's settings."""
    rollout = {"responses": np.zeros((1, 1))}
    about = {"groups": [{"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]}
    recording = SimpleNamespace(config=kind.settings, rollouts=[rollout], about=about, end_token=0)
    replayed = COMMON | kind.args(recording)
    args = parse(name, patched.flags(name))
    shared = replayed.keys() & comments(name).keys() - {"total_episodes"}
    assert len(shared) > 20
    assert {name: args[name] for name in shared} == {name: replayed[name] for name in shared}


@pytest.mark.parametrize("name", BASES)
def test_the_command_of_the_head_runs(name: str) -> None:
    """With sizes of a tiny run behind its flags."""
    flags = commands(name)[-1].removeprefix(f"python {name}.py ")
    from_file = f"$(sed 's/#.*//' benchmark/systems/{name}.args)"
    assert (from_file in flags) == (name in SOURCES)
    words = patched.flags(name) if name in SOURCES else []
    words += shlex.split(flags.replace(from_file, ""))
    folder = kit().with_name(f"system-{name}")
    tiny = TINY_LABELS if BASES[name] == REWARD else TINY
    sizes = [*tiny.split(), "--output_dir", str(folder), *OWN_SIZES.get(name, "").split()]
    status, _, errors = fork_tools.run(str(patched.script(name)), [*words, *sizes], kit())
    assert status == 0, errors
    metrics = read_lines(folder / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(math.isfinite(x) for row in metrics for x in row.values())

    recorded = json.loads((folder / "args.json").read_text())["args"]
    ours = {word.removeprefix("--").removeprefix("no-") for word in sizes}
    args = json.loads(json.dumps(parse(name, words)))  # tuples become lists
    kept = {field for field in args if field not in ours}
    assert len(kept) > 10
    assert {field: recorded[field] for field in kept} == {field: args[field] for field in kept}


# --- what patches do ------------------------------------------------------------------------------
def args_of(name: str, **settings: Any) -> Any:
    return patched.module(name).Args(**settings)


def batch_of(name: str, mask: Tensor, **parts: Any) -> Any:
    """A micro-batch for a loss."""
    batch = patched.module(name).Batch
    about = dict.fromkeys("contexts responses lengths found_end sampled_logprobs".split())
    return batch(**about, loss_mask=mask, **parts)


def metrics_of(name: str, flags: str, folder: Path) -> list[dict[str, float]]:
    """What a short run of the copy logs, but for what differs from run to run."""
    words = [*WORDS[BASES[name]], *shlex.split(flags)]
    status, _, errors = fork_tools.run(str(patched.script(name)), words, folder)
    assert status == 0, errors
    return read_metrics(folder / "out")


FLAGLESS = "instructgpt trlx trl_0.9 trl_1.12 qwen llama2 rm_ensemble".split()


@pytest.mark.parametrize("name", FLAGLESS)
def test_a_copy_without_its_flags_is_the_script(name: str, tmp_path: Path) -> None:
    found = metrics_of(name, "", copy(kit(), tmp_path))
    assert len(found) == UPDATES
    for mine, row in zip(found, read_metrics(plain(PPO, 1) / "out"), strict=True):
        assert {name: mine[name] for name in row} == pytest.approx(row, rel=1e-6)


def test_advantages_of_dr_grpo_are_those_of_rloo_but_for_a_constant() -> None:
    rewards = torch.randn(5, 4)
    advantages = patched.module("dr_grpo").rloo_advantages(rewards)
    torch.testing.assert_close(advantages, rewards - rewards.mean(1, keepdim=True))
    torch.testing.assert_close(advantages, 3 / 4 * rloo_rlhf.rloo_advantages(rewards))


def test_dr_grpo_clips_ratios_of_tokens_and_sums_their_losses() -> None:
    logprobs = torch.tensor([[2.0, 0.5, 9.0], [1.1, 3.0, 0.1]]).log()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    dr_grpo = patched.module("dr_grpo")
    parts = {"logprobs": torch.zeros(2, 3), "advantages": torch.tensor([1.0, -2.0])}
    batch = batch_of("dr_grpo", mask, **parts)
    loss, metrics = dr_grpo.rloo_loss(logprobs, batch, dr_grpo.Args(cliprange=0.2))
    assert loss.tolist() == pytest.approx([-1.2 - 0.5, 2 * (1.1 + 3.0 + 0.8)])
    clipped = [[True, False], [False, False, True]]
    assert [
        row[inside].tolist() for row, inside in zip(metrics["policy/clipfrac"], mask, strict=True)
    ] == clipped


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_penalty_on_length_is_taken_from_the_score(script: str, tmp_path: Path) -> None:
    before = read_metrics(plain(script, 1) / "out")
    path = tmp_path / "length_penalty.py"
    file = str(patched.PATCHES["length_penalty"])
    patch = ["patch", "--fuzz=0", "-o", str(path), str(ROOT / script), file]
    subprocess.run(patch, check=True, capture_output=True)
    (tmp_path / "tf_adam.py").write_text((ROOT / "tf_adam.py").read_text())
    after = {}
    for coef in ("0", "0.5"):
        folder = copy(kit(), tmp_path / coef)
        words = [*WORDS[script], "--length_coef", coef]
        status, _, errors = fork_tools.run(str(path), words, folder)
        assert status == 0, errors
        after[coef] = read_metrics(folder / "out")
    assert after["0"] == before
    penalty = 0.5 * before[0]["objective/length"]
    for name in ("objective/scores", "objective/score_total"):
        expected = before[0][name] - penalty
        assert after["0.5"][0][name] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_scores_are_scaled_or_whitened(name: str) -> None:
    # mean 2, biased variance 8 / 3
    Accelerator(cpu=True)
    normalize = patched.module(name).normalize_scores
    scores = torch.tensor([0.0, 2.0, 4.0])
    deviation = (8 / 3) ** 0.5
    equal = torch.full((3,), -1.0)
    assert normalize(scores, args_of(name)).tolist() == [0.0, 2.0, 4.0]
    scale = args_of(name, score_norm="scale")
    assert normalize(scores, scale).tolist() == pytest.approx([0, 2 / deviation, 4 / deviation])
    assert normalize(equal, scale).tolist() == [-1.0] * 3
    whiten = args_of(name, score_norm="whiten")
    assert normalize(scores, whiten).tolist() == pytest.approx([-2 / deviation, 0, 2 / deviation])
    assert normalize(equal, whiten).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_whitened_scores_are_what_is_paid(name: str, tmp_path: Path) -> None:
    before = read_metrics(plain(PPO, 1) / "out")
    after = metrics_of(name, "--score_norm whiten", copy(kit(), tmp_path))
    assert after[0]["objective/scores"] == pytest.approx(before[0]["objective/scores"], rel=1e-6)
    assert after[0]["objective/scores_scaled"] == pytest.approx(0, abs=1e-6)
    assert after[0]["objective/score_total"] == pytest.approx(0, abs=1e-5)  # the first KL is 0


def test_scores_are_clipped(tmp_path: Path) -> None:
    """Those of TRL are in test_trl.py."""
    found = metrics_of("deepspeed_chat", "--score_clip 1e-3", copy(kit(), tmp_path))
    for row in found:
        assert abs(row["objective/scores"]) > 2e-3
        assert abs(row["objective/scores_scaled"]) < 1.001e-3
    scaled = pytest.approx(found[0]["objective/scores_scaled"], abs=1e-7)
    assert found[0]["objective/score_total"] == scaled


def test_top_p_draws_from_the_fewest_tokens_that_hold_so_much() -> None:
    """Log-probabilities are those of the whole distribution."""
    qwen = patched.module("qwen")
    Accelerator(cpu=True)
    contexts = random_rows((5, 3, 7, 4), seed=1)
    temperature = 0.7
    lm = make_lm("gpt2")
    policy = qwen.ActorCritic(lm, VOCABULARY)
    u = qwen.uniforms(3, 1, 4, 6)
    responses, logprobs = qwen.sample(policy, contexts, u, temperature, 0.6)
    rows = [context + row for context, row in zip(contexts, responses.tolist(), strict=True)]
    left_out = 0
    for i, (logits, context) in enumerate(zip(full_logits(lm, rows), contexts, strict=True)):
        logits = logits[len(context) - 1 : -1] / temperature
        probs = logits.softmax(-1).double()
        likeliest, order = probs.sort(-1, descending=True)
        is_in = likeliest.cumsum(-1) - likeliest < 0.6  # the ones before hold less
        nucleus = torch.zeros_like(probs).scatter_(1, order, likeliest * is_in)
        cdf = nucleus.cumsum(-1) / nucleus.sum(-1, keepdim=True)
        drawn = (cdf <= u[i].unsqueeze(1)).sum(-1)
        assert drawn.tolist() == responses[i].tolist()
        expected = probs.log().gather(1, drawn.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs[i].double(), expected, atol=1e-5, rtol=0)
        from_all = (probs.cumsum(-1) <= u[i].unsqueeze(1)).sum(-1)
        left_out += (from_all != drawn).sum()
    assert left_out > 0


def test_k3_of_a_ratio_that_is_far_off_is_finite() -> None:
    far = patched.module("trl_1.12").kl_penalty(torch.tensor([[-1000.0]]), "k3")
    assert far.isfinite().all()
    assert far > 1e17


REFUSED = [
    ("trl_1.12", "--value_after_end", "--value_after_end needs --mask_truncated"),
    ("instructgpt", "--ptx_coef 1", "--ptx_coef and --ptx_dataset need each other"),
    ("instructgpt", "--ptx_dataset queries.jsonl", "--ptx_coef and --ptx_dataset need each other"),
    ("trlx", "--unfrozen_layers 3", "--unfrozen_layers 3: there are 2 layers"),
]


@pytest.mark.parametrize(("name", "flags", "says"), REFUSED)
def test_flags_that_do_not_fit_are_refused(
    name: str, flags: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = patched.module(name)
    words = [*WORDS[PPO], *flags.split()]
    with pytest.raises(script.UserError, match=f"^{says}$"):
        call(f"{name}.py", words, copy(kit(), tmp_path), monkeypatch)


# --- InstructGPT's pretraining loss, averages of weights ------------------------------------------
def test_the_loss_of_texts_is_what_transformers_computes() -> None:
    script = patched.module("instructgpt")
    Accelerator(cpu=True)
    lm = make_lm("gpt2")
    texts = random_rows((7, 1, 4), seed=2)
    policy = script.ActorCritic(lm, VOCABULARY)
    loss, count = script.text_loss(policy, texts)
    expected = 0.0
    for text in (texts[0], texts[2]):
        ids = torch.tensor([text])
        expected += lm(ids, labels=ids).loss.item() * (len(text) - 1)
    assert count == 6 + 3
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("micro_batch_size", [4, 1])
def test_texts_add_their_mean_loss_per_token_to_the_gradient(micro_batch_size: int) -> None:
    """However the batch is cut. Advantages are 0, and the value loss has no weight."""
    script = patched.module("instructgpt")
    accelerator = Accelerator(cpu=True)
    lm = make_lm("gpt2")
    policy = script.ActorCritic(lm, VOCABULARY)
    texts = random_rows((7, 2, 4, 5), seed=2)
    responses = torch.tensor(random_rows((3, 3, 3, 3), seed=4))
    batch = ours.make_batch(script, random_rows((3, 5, 2, 4), seed=3), responses)
    batch.rewards = torch.zeros(4, 3)
    batch.texts = texts
    settings = {"ptx_coef": 2.0, "ptx_dataset": "any", "vf_coef": 0.0}
    settings["micro_batch_size"] = micro_batch_size
    args = script.Args(whiten_rewards=False, whiten_advantages=False, **settings)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    prepared, optimizer = accelerator.prepare(policy, optimizer)
    epochs = torch.arange(4).view(1, 1, 4)
    records = script.ppo_update(accelerator, prepared, optimizer, batch, epochs, args)
    metrics = script.reduce_means(records)
    steps = {name: p.detach() - before[name] for name, p in lm.named_parameters()}

    plain_lm = make_lm("gpt2")
    plain_lm.load_state_dict(before, strict=False)
    loss = 0.0
    for text in texts:
        ids = torch.tensor([text])
        loss = loss + plain_lm(ids, labels=ids).loss * (len(text) - 1)
    loss = loss / (6 + 1 + 3 + 4)
    assert metrics["loss/ptx"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    for name, p in plain_lm.named_parameters():
        torch.testing.assert_close(steps[name], -2.0 * p.grad, atol=1e-6, rtol=1e-4)


def watch(name: str, function: str, note: Callable, flags: str, folder: Path) -> None:
    """Runs the copy in this process. After each call of its function: note(*its arguments)."""
    script = patched.module(name)
    original = getattr(script, function)

    def noted(*given: Any) -> Any:
        returned = original(*given)
        note(*given)
        return returned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, function, noted)
        call(f"{name}.py", [*WORDS[PPO], *flags.split()], folder, patch)


@pytest.mark.parametrize("name", ["instructgpt", "deepspeed_chat"])
def test_the_average_of_weights_moves_after_each_update(name: str, tmp_path: Path) -> None:
    folder = copy(kit(), tmp_path)
    seen = []

    def note(_: Any, policy: nn.Module, *__: Any) -> None:
        seen.append({key: p.detach().clone() for key, p in policy.lm.named_parameters()})

    watch(name, "ppo_update", note, "--ema 0.75", folder)
    assert len(seen) == UPDATES
    average = load_file(folder / "model/model.safetensors")
    for weights in seen:
        average = {key: 0.75 * average[key] + 0.25 * x for key, x in weights.items()}
    found = load_file(folder / "out/ema/policy/model.safetensors")
    last = load_file(folder / "out/policy/model.safetensors")
    for key in found.keys() - {"lm_head.weight"}:  # tied
        torch.testing.assert_close(found[key], average[key], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(last[key], seen[-1][key], atol=0, rtol=0)
    assert not torch.equal(last["transformer.wte.weight"], found["transformer.wte.weight"])
    saved = [path.relative_to(folder / "out/ema") for path in (folder / "out/ema").rglob("*")]
    for file in saved:
        assert (folder / "out" / file).exists(), file


def test_a_resumed_run_goes_on_with_its_average(tmp_path: Path) -> None:
    script = str(patched.script("instructgpt"))
    words = [*WORDS[PPO], *"--ema 0.75 --ptx_coef 0.1 --ptx_dataset queries.jsonl".split()]
    folder = copy(kit(), tmp_path / "whole")
    assert fork_tools.run(script, words, folder)[0] == 0
    stopped = copy(folder, tmp_path / "stopped")
    (stopped / "out/checkpoints" / f"{UPDATES:07d}" / "state.json").unlink()
    status, _, errors = fork_tools.run(script, [*words, "--resume"], stopped)
    assert status == 0, errors
    for part in ("ema/policy", "policy", "ema/critic"):
        file = f"out/{part}/model.safetensors"
        whole = load_file(folder / file)
        again = load_file(stopped / file)
        assert all(torch.equal(x, again[key]) for key, x in whole.items()), part


# --- trlX's frozen layers, and rewards of tokens --------------------------------------------------
def test_frozen_layers_are_shared_with_the_reference(tmp_path: Path) -> None:
    folder = copy(kit(), tmp_path)
    models = []

    def note(*given: Any) -> None:
        models.append(given[1:3])

    watch("trlx", "set_logprobs", note, "--unfrozen_layers 1", folder)
    base = load_file(folder / "model/model.safetensors")
    policy, ref = models[-1]
    theirs = dict(ref.lm.named_parameters())
    trained = []
    for name, p in policy.lm.named_parameters():
        is_shared = p.data_ptr() == theirs[name].data_ptr()
        assert is_shared != p.requires_grad, name
        assert torch.equal(p, base[name]) != p.requires_grad, name
        assert torch.equal(theirs[name], base[name]), name
        if p.requires_grad:
            trained.append(name)
    assert len(trained) > 10
    for name in trained:
        assert name.startswith(("transformer.h.1.", "transformer.ln_f.")), name


def test_of_a_model_with_images_the_top_layers_of_text_are_trained() -> None:
    """Gemma 3 from 4B on: its first list of layers is the one of the images."""
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    patched.module("trlx").freeze_lower_layers(model, args_of("trlx", unfrozen_layers=1))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) > 10
    for name in trained:
        is_top = name.startswith("model.language_model.layers.1.")
        assert is_top or name.endswith("model.norm.weight")


def of_tokens(completion_ids: list[list[int]], **_: Any) -> list[Tensor]:
    """A reward for each token."""
    return [torch.tensor(row) / 10 for row in completion_ids]


def test_rewards_of_tokens_are_paid_at_their_tokens(tmp_path: Path) -> None:
    folder = copy(kit(), tmp_path)
    batches = []

    def note(*given: Any) -> None:
        batches.append(given[3])

    flags = "--adaptive_kl_target none --kl_coef 0 --reward_fn test_systems:of_tokens"
    flags += " --critic shared --truncate_token none"
    watch("trlx", "ppo_update", note, flags, folder)
    rows = read_lines(folder / "out/metrics.jsonl")
    for batch, row in zip(batches, rows, strict=True):
        expected = batch.responses / 10
        torch.testing.assert_close(batch.rewards, expected, atol=1e-5, rtol=0)
        total = expected.sum(1).mean().item()
        assert row["objective/scores"] == pytest.approx(total)


def test_rewards_of_more_tokens_than_there_are_fail() -> None:
    script = patched.module("trlx")
    Accelerator(cpu=True)
    tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: [str(row) for row in rows])
    queries = [script.Query([1], [1], {"prompt": ""})] * 2
    responses = torch.tensor([[5, 6, 7, 0], [7, 8, 9, 0]])
    batch = batch_of("trlx", torch.ones(2, 4, dtype=torch.bool), token_scores=torch.zeros(2, 4))
    batch.responses = responses

    def of_lists(**_: Any) -> list[list[float]]:
        return [[1.0, 2.0], [1.0, 2.0, 3.0]]

    given = (of_lists, tokenizer, queries, batch)
    batch.lengths = torch.tensor([2, 2])
    with pytest.raises(script.UserError, match="^--reward_fn must return a list, array or tensor"):
        script.score_by_function(*given)
    batch.lengths = torch.tensor([2, 3])
    assert script.score_by_function(*given).tolist() == [3, 6]
    assert batch.token_scores.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
