"""What options do that whole runs against the reference do not show: bits that stay, files that
load, what is refused."""

import functools
import itertools
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
from run_tools import call, read_lines, read_metrics
from safetensors.torch import load_file
from tiny_models import LONGEST, full_logits, make_responses, random_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_rlhf
import rloo_rlhf

BARE = {PPO: ["--critic", "shared"], RLOO: [], REWARD: []}
MODULE = {PPO: ppo_rlhf, RLOO: rloo_rlhf}
UPDATE = {PPO: "ppo_update", RLOO: "rloo_update"}
PLAIN = "--adaptive_kl_target none --kl_coef 0 --total_episodes 8"


@dataclass
class Run:
    """A run that has ended."""

    out: Path
    models: list = field(default_factory=list)  # policy and reference after every rollout
    truncated: list = field(default_factory=list)  # responses of every rollout
    batches: list = field(default_factory=list)  # of every update
    metrics: list = field(default_factory=list)


def spy(made: Run, script: str, patch: pytest.MonkeyPatch) -> None:
    """Notes what goes into the script's rollouts and updates, and what comes out."""
    module = MODULE[script]
    set_logprobs = module.set_logprobs
    update = getattr(module, UPDATE[script])

    @functools.wraps(set_logprobs)
    def spied_logprobs(batch: Any, *args: Any) -> None:
        made.models.append(args[:2])
        made.truncated.append(module.truncated(batch))
        set_logprobs(batch, *args)

    @functools.wraps(update)
    def spied_update(*args: Any) -> Any:
        made.batches.append(args[3])
        return update(*args)

    patch.setattr(module, "set_logprobs", spied_logprobs)
    patch.setattr(module, UPDATE[script], spied_update)


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
            if script in MODULE:
                spy(made, script, patch)
            call(script, words, folder, patch)
        made.metrics = read_metrics(made.out)
        return made

    return begin


def weights(folder: Path) -> dict[str, Tensor]:
    """Those of a model."""
    return load_file(folder / "model.safetensors")


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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lora_starts_at_the_reference_and_trains_adapters_alone(dtype: str, train: Any) -> None:
    """What is frozen is shared with the reference, and held in bf16 with --dtype bf16."""
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
            assert p is policy.lm.get_parameter(name), name
            x = base[name.replace("base_layer.", "")]
            if dtype == "bf16" and name.endswith("base_layer.weight"):
                x = x.bfloat16()
            assert p.dtype == x.dtype, name
            assert torch.equal(p, x), name


def test_the_folder_of_a_lora_run_is_the_trained_policy(train: Any) -> None:
    """For transformers, for peft; and merged, as --base_model of a run that trains all weights."""
    peft = pytest.importorskip("peft")
    made = train(PPO, "--lora_rank 4 --lora_alpha 6 --lr 2e-2")
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
    with pytest.raises(ppo_rlhf.UserError, match="policy is an adapter: merge it first"):
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


def test_a_reward_model_gives_runs_the_scores_of_its_samples(train: Any) -> None:
    """With the gain and bias of its config."""
    made = train(REWARD, "--lr 1e-2")
    folder = made.out / "reward_model"
    assert weights(folder).keys() == weights(kit() / "judge").keys()
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    args = ppo_rlhf.Args(reward_model=str(folder), response_length=5)
    score = ppo_rlhf.load_reward("reward_model", args, "tiny", tokenizer, LONGEST)
    queries = []
    responses = []
    rewards = []
    for row in read_lines(made.out / "samples.jsonl"):
        query = tokenizer(row["query"]).input_ids
        queries += [ppo_rlhf.Query(query, query, {})] * len(row["responses"])
        responses += [tokenizer(response).input_ids for response in row["responses"]]
        rewards += row["rewards"]
    scores = score(queries, make_responses(responses))
    assert scores.tolist() == pytest.approx(rewards, abs=1e-4)
    assert scores.std() > 0.1


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_empty_responses_count_as_their_end(
    script: str, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses that are only the end, or have it in the fourth place, or nowhere."""
    module = MODULE[script]
    draw = module.inverse_cdf
    ends = torch.tensor([0, 5, 0, 3])
    is_end = torch.arange(5) == ends.unsqueeze(1)
    steps = itertools.cycle(range(5))

    def changed(probs: Tensor, u: Tensor) -> Tensor:
        step = next(steps)
        return draw(probs, u).clamp(min=1) * ~is_end[: len(probs), step : step + 1]

    monkeypatch.setattr(module, "inverse_cdf", changed)
    made = train(script, f"{PLAIN} --truncate_token eos --truncate_after 0 --mask_truncated")
    truncated = made.truncated[1:-1]  # the first and the last are of evaluations
    for batch, responses, row in zip(made.batches, truncated, made.metrics, strict=True):
        assert batch.loss_mask.sum(1).tolist() == [1, 5, 1, 4]
        assert [len(response) for response in responses] == [1, 5, 1, 4]
        assert row["objective/length"] == 11 / 4
        assert row["objective/found_end"] == 3 / 4
        log_ratio = (batch.logprobs - batch.ref_logprobs)[batch.loss_mask]
        total = pytest.approx(log_ratio.sum().item(), abs=1e-5)  # five steps of fp32 at 17
        assert row["objective/kl"] * 4 == total
        assert row["first_ratio_error"] == 0


def test_defaults_give_the_recorded_metrics(tmp_path: Path) -> None:
    """Three updates of each script, from tiny/."""
    recorded = json.loads((GOLDEN / "defaults.json").read_text())
    few = f"--reward_model {REWARD}/reward_model --eval_queries 2"
    few += " --batch_size 32 --total_episodes 96"
    flags = {
        REWARD: "--num_labels 24 --normalization_samples 64 --seed 40",
        PPO: f"{few} --seed 38",
        RLOO: f"{few} --seed 15",
    }
    far = (fork_tools.refuse_near_draws, 5e-6)
    for script in flags:
        words = ["--output_dir", script]
        words += flags[script].split()
        status, _, errors = fork_tools.run(script, words, tmp_path, far)
        assert status == 0, errors
        made = read_metrics(tmp_path / script)
        assert len(made) == 3
        for mine, theirs in zip(made, recorded[script], strict=True):
            assert mine.pop("sampling_error", 0) < 1e-4
            # RLOO's ratio has the rounding of 24 log-probabilities, of 5e-7 each.
            assert mine == pytest.approx(theirs, rel=3e-5, abs=1e-5)
