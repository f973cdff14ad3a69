"""What options do that whole runs against twins do not show: bits that stay, files that load, what
is refused."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_tools
import pytest
import torch
from conftest import GOLDEN
from fork_tools import PPO, REWARD, RLOO, WORDS, kit
from run_tools import call, read_lines
from safetensors.torch import load_file
from tiny_models import full_logits, make_actor, random_rows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

import ppo_rlhf
import rloo_rlhf

BARE = {
    PPO: ["--ema", "0", "--critic", "shared"],
    RLOO: [],
    REWARD: [],
}
MODULE = {PPO: ppo_rlhf, RLOO: rloo_rlhf}
UPDATE = {PPO: "ppo_update", RLOO: "rloo_update"}
PLAIN = "--kl_target none --kl_coef 0 --total_episodes 8"
OWN_REWARD = "--reward_model none --reward_fn test_options"


@dataclass
class Run:
    """A run that has ended."""

    out: Path
    models: list = field(default_factory=list)  # policy and reference of every rollout
    batches: list = field(default_factory=list)  # of every update
    metrics: list = field(default_factory=list)


def spy(function: Callable, taken: list, which: slice | int) -> Callable:
    """The function, which notes these of its arguments."""

    @functools.wraps(function)
    def spied(*args: Any) -> Any:
        taken.append(args[which])
        return function(*args)

    return spied


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Runs a script in this process, with more flags."""
    folder = fork_tools.copy(kit(), tmp_path)

    def begin(script: str, flags: str = "", name: str = "out") -> Run:
        made = Run(folder / name)
        words = WORDS[script] + BARE[script]
        words += ["--output_dir", name]
        words += flags.split()
        with monkeypatch.context() as patch:
            if script in UPDATE:
                module = MODULE[script]
                update = UPDATE[script]
                rollout = spy(module.rollout, made.models, slice(2))
                step = spy(getattr(module, update), made.batches, 3)
                patch.setattr(module, "rollout", rollout)
                patch.setattr(module, update, step)
            call(script, words, folder, patch)
        made.metrics = read_lines(made.out / "metrics.jsonl")
        return made

    return begin


def weights(folder: Path) -> dict[str, Tensor]:
    """Those of a model."""
    return load_file(folder / "model.safetensors")


def test_full_k1_and_k3_have_the_enumerated_kl_as_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all 49 responses of two tokens, weighted with their probabilities."""
    policy = make_actor("gpt2", vocab_size=7)
    ref = make_actor("gpt2", vocab_size=7, num_hidden_layers=1)
    for model in (policy, ref):
        model.lm.base_model.is_autocast = False
    responses = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    monkeypatch.setattr(ppo_rlhf, "sample", lambda *_: responses)
    args = ppo_rlhf.Args(kl_estimator="full", truncate_token=None)
    query = ppo_rlhf.Query([3, 1], [3, 1], {})
    u = torch.zeros(49, 2)
    rows = torch.arange(49).view(1, -1)
    batch = ppo_rlhf.rollout(policy, ref, [query] * 49, u, rows, None, args)
    probability = batch.logprobs.sum(1).exp()
    log_ratio = batch.logprobs - batch.ref_logprobs
    kl = probability.dot(log_ratio.sum(1)).item()
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    assert kl > 0.1
    for kind in ("full", "k1", "k3"):
        penalty = ppo_rlhf.kl_penalty(log_ratio, kind, batch.full_kl)
        mean = probability.dot(penalty.sum(1)).item()
        assert mean == pytest.approx(kl, rel=1e-4), kind
        assert kind == "k1" or penalty.min() > -1e-6


def test_critic_warmup_moves_no_bit_of_the_policy(train: Any) -> None:
    """Nor does weight decay in it; value head and critic learn."""
    flags = "--critic policy --critic_lr 1e-2 --weight_decay 0.1 --max_grad_norm 1"
    made = train(PPO, f"{flags} --total_episodes 12 --critic_warmup 2")
    base = weights(kit() / "model")
    warm = weights(made.out / "checkpoints/0000002")
    after = weights(made.out / "checkpoints/0000003")
    for name, x in base.items():
        assert torch.equal(warm[f"lm.{name}"], x), name
        assert not torch.equal(after[f"lm.{name}"], x), name
    assert warm["value_head.weight"].any()
    assert not torch.equal(warm["critic.wte.weight"], base["transformer.wte.weight"])
    assert [row["objective/kl"] for row in made.metrics] == [0, 0, 0]
    assert [row["ppo/lr"] > 0 for row in made.metrics] == [False, False, True]


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_frozen_layers_are_shared_with_the_reference_and_a_whole_one_gives_the_same(
    script: str, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = train(script, "--unfrozen_layers 1")
    base = weights(kit() / "model")
    policy, ref = made.models[-1]
    trained = []
    theirs = dict(ref.lm.named_parameters())
    for name, p in policy.lm.named_parameters():
        q = theirs[name]
        is_shared = p.data_ptr() == q.data_ptr()
        assert is_shared != p.requires_grad, name
        assert torch.equal(p, base[name]) != p.requires_grad, name
        assert torch.equal(q, base[name]), name
        if p.requires_grad:
            trained.append(name)
    assert len(trained) > 10
    for name in trained:
        assert name.startswith(("transformer.h.1.", "transformer.ln_f.")), name
    deepcopy = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda x, memo=None: deepcopy(x))
    whole = train(script, "--unfrozen_layers 1", "whole")
    for mine, theirs in zip(made.metrics, whole.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lora_starts_at_the_reference_and_trains_adapters_alone(dtype: str, train: Any) -> None:
    """What is frozen is held in bf16, with --dtype bf16."""
    pytest.importorskip("peft")
    made = train(PPO, f"--lora_rank 4 --lr 2e-2 --dtype {dtype}")
    assert made.metrics[0]["objective/kl"] == 0
    assert made.metrics[0]["first_ratio_error"] == 0
    assert made.metrics[-1]["objective/kl"] != 0
    policy, ref = made.models[-1]
    for name, p in policy.lm.named_parameters():
        assert p.requires_grad == ("lora_" in name), name
    base = weights(kit() / "model")
    for model in (policy.lm, ref.lm):
        frozen = [name for name, _ in model.named_parameters() if "lora_" not in name]
        assert len(frozen) == len(base)
        for name in frozen:
            p = model.get_parameter(name)
            x = base[name.replace("base_layer.", "")]
            if dtype == "bf16" and name.endswith("base_layer.weight"):
                x = x.bfloat16()
            assert p.dtype == x.dtype, name
            assert torch.equal(p, x), name


def test_the_folder_of_a_lora_run_is_the_trained_policy(train: Any) -> None:
    """For transformers, for peft; and merged, as --base_model of a run that trains all weights."""
    peft = pytest.importorskip("peft")
    made = train(PPO, "--lora_rank 4 --lora_alpha 6 --ema 0.5 --lr 2e-2")
    config = json.loads((made.out / "policy/adapter_config.json").read_text())
    assert config["r"] == 4
    assert config["lora_alpha"] == 6
    policy, ref = made.models[-1]
    rows = random_rows((9, 4), seed=3)
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(made.out / "policy").merge_and_unload()
    loaded = AutoModelForCausalLM.from_pretrained(made.out / "policy")
    passes = [full_logits(model, rows) for model in (policy.lm, merged, loaded, ref.lm)]
    for ours, theirs, plain, first in zip(*passes, strict=True):
        assert (ours - theirs).abs().max() < 1e-4
        assert (ours - plain).abs().max() < 1e-4
        assert (ours - first).abs().max() > 1e-2
    with pytest.raises(ppo_rlhf.UserError, match="policy: is an adapter: merge it first"):
        train(PPO, f"--base_model {made.out}/policy", "refused")
    merged.save_pretrained(made.out / "merged")
    AutoTokenizer.from_pretrained(made.out / "policy").save_pretrained(made.out / "merged")
    again = train(RLOO, f"--base_model {made.out}/merged --total_episodes 8", "again")
    assert again.metrics[0]["objective/kl"] == 0
    moved = weights(again.out / "policy")
    start = merged.state_dict()
    for name, p in again.models[-1][1].lm.named_parameters():
        assert (p - start[name]).abs().max() < 1e-6, name
        assert (p - moved[name]).abs().max() > 1e-6, name


def test_of_a_model_with_images_the_top_layers_of_text_are_trained() -> None:
    """Gemma 3 from 4B on: its first list of layers is the one of the images."""
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    ppo_rlhf.freeze_lower_layers(model, ppo_rlhf.Args(unfrozen_layers=1))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) > 10
    for name in trained:
        assert name.startswith("model.language_model.layers.1.") or name.endswith(
            "model.norm.weight"
        )


def test_a_reward_model_of_lora_gives_runs_the_scores_of_its_results(train: Any) -> None:
    """It is merged: a folder without adapters."""
    pytest.importorskip("peft")
    made = train(REWARD, "--lora_rank 4 --lr 1e-2")
    folder = made.out / "reward_model"
    classifier = weights(kit() / "judge").keys()
    assert weights(folder).keys() == classifier
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    args = ppo_rlhf.Args(reward_model=str(folder), response_length=5)
    score = ppo_rlhf.load_reward(args, "tiny", tokenizer, 24)
    queries = []
    responses = []
    rewards = []
    for row in read_lines(made.out / "samples.jsonl"):
        query = tokenizer(row["query"]).input_ids
        queries += [ppo_rlhf.Query(query, query, {})] * len(row["responses"])
        responses += [tokenizer(response).input_ids for response in row["responses"]]
        rewards += row["rewards"]
    scores, token_scores = score(queries, responses)
    assert scores.tolist() == pytest.approx(rewards, abs=1e-4)
    assert scores.std() > 0.1
    assert token_scores.shape == (len(scores), 5)
    assert not token_scores.any()


def of_tokens(queries: Any, responses: Any, response_ids: list[list[int]]) -> list[Tensor]:
    """A reward for each token."""
    return [torch.tensor(row) / 10 for row in response_ids]


def too_many(queries: Any, responses: Any, response_ids: list[list[int]]) -> list[list[float]]:
    """One more for the third response."""
    rewards = [[1.0] * len(row) for row in response_ids]
    rewards[2].append(1.0)
    return rewards


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_rewards_of_tokens_stay_in_place_or_are_summed(script: str, train: Any) -> None:
    held_out = 4 if script == PPO else 2  # RLOO has two responses to each
    made = train(script, f"{PLAIN} {OWN_REWARD}:of_tokens")
    assert len(made.batches) == 2
    for batch, row in zip(made.batches, made.metrics, strict=True):
        expected = batch.responses / 10
        total = expected.sum(1)
        assert row["objective/scores"] == pytest.approx(total.mean().item())
        assert row["objective/score_total"] == pytest.approx(total.mean().item())
        if script == PPO:
            assert (batch.rewards - expected).abs().max() < 1e-5
        else:
            pairs = total.view(2, 2)
            difference = pairs - pairs.flip(1)
            assert (batch.advantages.view(2, 2) - difference).abs().max() < 1e-5
    with pytest.raises(RuntimeError, match=":too_many .* 4 floats, or lists of"):
        train(script, f"{PLAIN} {OWN_REWARD}:too_many --eval_queries {held_out}", "refused")


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_empty_responses_count_as_their_end(
    script: str, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses that are only the end, or have it in the fourth place, or nowhere."""
    module = MODULE[script]
    sample = module.sample
    ends = torch.tensor([0, 5, 0, 3])
    is_end = torch.arange(5) == ends.unsqueeze(1)

    def changed(policy: Any, contexts: Any, *args: Any) -> Tensor:
        words = sample(policy, contexts, *args).clamp(min=1)
        return words * ~is_end[: len(contexts)]

    monkeypatch.setattr(module, "sample", changed)
    made = train(script, f"{PLAIN} --truncate_token eos --truncate_after 0 --mask_truncated")
    for batch, row in zip(made.batches, made.metrics, strict=True):
        assert batch.mask.sum(1).tolist() == [1, 5, 1, 4]
        assert [len(response) for response in batch.truncated] == [1, 5, 1, 4]
        assert row["objective/length"] == 11 / 4
        assert row["objective/found_end"] == 3 / 4
        log_ratio = (batch.logprobs - batch.ref_logprobs)[batch.mask]
        assert row["objective/kl"] * 4 == pytest.approx(log_ratio.sum().item(), abs=1e-6)
        assert row["first_ratio_error"] == 0


def test_defaults_give_the_recorded_metrics(tmp_path: Path) -> None:
    """Three updates of each script, from tiny/."""
    recorded = json.loads((GOLDEN / "defaults.json").read_text())
    few = f"--reward_model {REWARD}/reward_model --eval_queries 2"
    few += " --batch_size 32 --total_episodes 96"
    flags = {
        REWARD: "--num_labels 24 --normalization_samples 64",
        PPO: few,
        RLOO: few,
    }
    for script in flags:
        words = ["--output_dir", script]
        words += flags[script].split()
        status, _, errors = fork_tools.run(script, words, tmp_path)
        assert status == 0, errors
        made = read_lines(tmp_path / script / "metrics.jsonl")
        assert len(made) == 3
        for mine, theirs in zip(made, recorded[script], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
