"""What options do that whole runs against twins do not show: bits that stay, files that load, what is refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import pytest
import torch
from conftest import GOLDEN
from fork_tools import PPO, REWARD, RLOO, WORDS, kit
from run_tools import call, read_lines
from safetensors.torch import load_file
from tiny_models import full_logits, make_actor, random_rows
from transformers import AutoTokenizer

import ppo_rlhf
import rloo_rlhf

BARE = {PPO: ["--ema", "0", "--critic", "shared"], RLOO: [], REWARD: []}
PLAIN = "--kl_target none --kl_coef 0 --total_episodes 8"
TOKENS = "--reward_model none --reward_fn test_options:of_tokens"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Runs a script in this process, with more flags: its metrics, its folder, what it gave to rollout and update."""
    folder = fork_tools.copy(kit(), tmp_path)

    def begin(script: str, flags: str = "", name: str = "out") -> SimpleNamespace:
        made = SimpleNamespace(out=folder / name, pairs=[], batches=[])
        words = [*WORDS[script], *BARE[script], "--output_dir", name, *flags.split()]
        with monkeypatch.context() as patch:
            if script != REWARD:
                module, update = (ppo_rlhf, "ppo_update") if script == PPO else (rloo_rlhf, "rloo_update")
                rollout, step = module.rollout, getattr(module, update)
                patch.setattr(module, "rollout", lambda *x: (made.pairs.append(x[:2]), rollout(*x))[1])
                patch.setattr(module, update, lambda *x: (made.batches.append(x[3]), step(*x))[1])
            call(script, words, folder, patch)
        made.metrics = read_lines(made.out / "metrics.jsonl")
        monkeypatch.chdir(folder)  # where adapters find their base
        return made

    return begin


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def of_tokens(queries: list[str], responses: list[str], response_ids: list[list[int]]) -> list[list[float]]:
    return [[token / 10 for token in row] for row in response_ids]


def too_many(queries: list[str], responses: list[str], response_ids: list[list[int]]) -> list[list[float]]:
    return [[1.0] * (len(row) + (i == 2)) for i, row in enumerate(response_ids)]


def test_full_k1_and_k3_have_the_enumerated_kl_as_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all 49 responses of two tokens, weighted with their probabilities."""
    policy, ref = make_actor("gpt2", vocab_size=7), make_actor("gpt2", vocab_size=7, num_hidden_layers=1)
    responses = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    monkeypatch.setattr(ppo_rlhf, "sample", lambda *_: responses)
    args = ppo_rlhf.Args(kl_estimator="full", truncate_token=None)
    queries = [{"context": [3, 1]}] * len(responses)
    batch = ppo_rlhf.rollout(policy, ref, queries, torch.zeros(49, 2), torch.arange(49).view(1, -1), None, args)
    probability, log_ratio = batch["logprobs"].sum(1).exp(), batch["logprobs"] - batch["ref_logprobs"]
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    kl = (probability * log_ratio.sum(1)).sum().item()
    for kind, x in (("full", batch["full_kl"]), ("k1", log_ratio), ("k3", log_ratio)):
        penalty = ppo_rlhf.kl_penalty(x, kind)
        assert (probability * penalty.sum(1)).sum().item() == pytest.approx(kl, rel=1e-4) and kl > 0.1
    assert batch["full_kl"].min() >= 0 and ppo_rlhf.kl_penalty(log_ratio, "k3").min() > -1e-6


def test_critic_warmup_moves_no_bit_of_the_policy(train: Any) -> None:
    flags = "--critic policy --critic_lr 1e-2 --total_episodes 8 --weight_decay 0.1 --max_grad_norm 1"
    made, base = train(PPO, f"{flags} --critic_warmup 2"), weights(kit() / "model")
    assert all(torch.equal(x, base[name]) for name, x in weights(made.out / "policy").items())
    assert [row["objective/kl"] for row in made.metrics] == [0, 0] == [row["ppo/lr"] for row in made.metrics]
    assert load_file(made.out / "critic/value_head.safetensors")["weight"].any()
    assert train(PPO, f"{flags} --critic_warmup 1", "other").metrics[1]["ppo/lr"] > 0


def test_frozen_layers_are_shared_with_the_reference_and_a_whole_one_gives_the_same(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, base = train(PPO, "--unfrozen_layers 1"), weights(kit() / "model")
    (policy, ref), trained = made.pairs[-1], []
    for (name, p), q in zip(policy.lm.named_parameters(), ref.lm.parameters(), strict=True):
        assert (p.data_ptr() == q.data_ptr()) == (not p.requires_grad) == torch.equal(p, base[name]), name
        trained += [name] * p.requires_grad
    assert trained and all(name.startswith(("transformer.h.1.", "transformer.ln_f.")) for name in trained)
    deepcopy = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda x, memo=None: deepcopy(x))
    whole = train(PPO, "--unfrozen_layers 1", "whole")
    for mine, theirs in zip(made.metrics, whole.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lora_starts_at_the_reference_and_its_folder_is_the_trained_policy(dtype: str, train: Any) -> None:
    """For peft, and as --base_model of a run that trains all weights."""
    peft, base = pytest.importorskip("peft"), weights(kit() / "model")
    made = train(PPO, f"--lora_rank 4 --ema 0.5 --lr 2e-2 --dtype {dtype}")
    assert made.metrics[0]["objective/kl"] == made.metrics[0]["first_ratio_error"] == 0
    policy, ref = made.pairs[-1]
    kept = {name.replace("lm.", "").replace("base_layer.", ""): p for name, p in policy.named_parameters()}
    for name, x in base.items():
        x = x.bfloat16() if dtype == "bf16" and name.endswith(("attn.weight", "proj.weight", "fc.weight")) else x
        assert torch.equal(kept[name], x) and kept[name].dtype == x.dtype, name
    assert all(p.requires_grad == ("lora_" in name or "value_head" in name) for name, p in policy.named_parameters())
    if dtype == "bf16":
        return
    rows = random_rows((9, 4), seed=3)
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(made.out / "policy").merge_and_unload()
    for ours, theirs, first in zip(*(full_logits(x, rows) for x in (policy.lm.eval(), merged, ref.lm)), strict=True):
        assert (ours - theirs).abs().max() < 1e-4 < (ours - first).abs().max()
    again = train(RLOO, f"--base_model {made.out}/policy --total_episodes 8", "again")
    assert again.metrics[0]["objective/kl"] == 0
    begin, moved = merged.state_dict(), weights(again.out / "policy")
    for name, p in again.pairs[-1][1].lm.named_parameters():
        assert (p - begin[name]).abs().max() < 1e-6 < (moved[name] - p).abs().max(), name
    with pytest.raises(ValueError, match="^--base_model .* is an adapter; --lora_rank 0, or"):
        train(PPO, f"--base_model {made.out}/policy --lora_rank 2", "refused")


def test_a_reward_model_of_lora_gives_runs_the_scores_of_its_results(train: Any) -> None:
    pytest.importorskip("peft")
    made = train(REWARD, "--lora_rank 4 --lr 1e-2")
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    args = ppo_rlhf.Args(reward_model=str(made.out / "reward_model"), response_length=5)
    model = ppo_rlhf.load_reward(args, "tiny", tokenizer, 24, torch.device("cpu"))
    rows = read_lines(made.out / "samples.jsonl")
    asked = [{"input_ids": tokenizer(row["query"]).input_ids} for row in rows for _ in row["responses"]]
    responses = [tokenizer(response).input_ids for row in rows for response in row["responses"]]
    scores = ppo_rlhf.score(model, asked, responses, tokenizer, args).sum(1)
    assert (
        scores.tolist() == pytest.approx([x for row in rows for x in row["rewards"]], abs=1e-4) and scores.std() > 0.1
    )


def test_rewards_of_tokens_stay_in_place_or_are_summed(train: Any) -> None:
    for script in (PPO, RLOO):
        made = train(script, f"{PLAIN} {TOKENS}", script)
        for batch, row in zip(made.batches, made.metrics, strict=True):
            expected = batch["responses"] / 10
            expected = expected.sum(2) if script == RLOO else expected
            assert (batch["rewards"] - expected).abs().max() < 1e-5
            assert row["objective/scores"] == pytest.approx(expected.sum().item() / 4)
        with pytest.raises(RuntimeError, match="--reward_fn test_options:too_many: no 4 floats, or lists of tokens'"):
            train(script, f"{PLAIN} {TOKENS} --reward_fn test_options:too_many --eval_queries 4", f"no{script}")


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_empty_responses_count_as_their_end(script: str, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ppo_rlhf if script == PPO else rloo_rlhf
    sample, ends = module.sample, torch.tensor([0, 5, 0, 3])  # where the responses end; all of the first two sample
    is_end = torch.arange(5) == ends.unsqueeze(1)
    monkeypatch.setattr(module, "sample", lambda *x: sample(*x).clamp(min=1) * ~is_end[: len(x[2])])
    made = train(script, f"{PLAIN} --truncate_token eos --truncate_after 0 --mask_truncated")
    for batch, row in zip(made.batches, made.metrics, strict=True):
        assert batch["kept"].view(4, 5).sum(1).tolist() == [1, 5, 1, 4]
        assert row["objective/length"] == 11 / 4 and row["objective/found_end"] == 3 / 4
        assert row["objective/kl"] * 4 == pytest.approx(row["objective/kl_per_token"] * 11)
        assert row["first_ratio_error"] == 0


def test_defaults_give_the_recorded_metrics(tmp_path: Path) -> None:
    """Three updates of each script, from tiny/."""
    recorded = json.loads((GOLDEN / "defaults.json").read_text())
    for script in (REWARD, PPO, RLOO):
        words = f"--reward_model {REWARD}/reward_model --eval_queries 2 --batch_size 32 --total_episodes 96"
        words = "--num_labels 24 --normalization_samples 64" if script == REWARD else words
        code, _, errors = fork_tools.run(script, ["--output_dir", script, *words.split()], tmp_path)
        assert code == 0, errors
        made = read_lines(tmp_path / script / "metrics.jsonl")
        assert len(made) == len(recorded[script]) == 3
        for mine, theirs in zip(made, recorded[script], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
