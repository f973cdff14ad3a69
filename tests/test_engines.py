"""FSDP2 and DeepSpeed: the same scripts on two processes that share the weights give what DDP gives."""

import functools
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS
from rank_tools import LENGTH, early_end, on_ranks, whole
from run_tools import read_lines
from safetensors.torch import load_file
from tiny_models import VOCABULARY, save_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

SETTINGS = ROOT / "benchmark" / "accelerate"
ENGINES = ["ddp", "fsdp2", "zero2", "zero3"]
MODEL = {PPO: "policy", RLOO: "policy", REWARD: "reward_model"}
MORE = {script: ["--kl_target", "0.5", "--kl_horizon", "40", "--total_episodes", "12"] for script in SCRIPTS}
MORE[RLOO] += ["--rloo_k", "2", "--truncate_token", "w7", "--truncate_after", "1", "--mask_truncated"]
MORE[REWARD] = ["--num_labels", "15"]  # the last batch is left out; five labels, an odd number, are held out
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")


def environment(engine: str) -> dict[str, str]:
    """What `accelerate launch --config_file <engine>.yaml --num_processes 2` says to its processes."""
    words = ["--config_file", str(SETTINGS / f"{engine}.yaml"), "--num_processes", "2", "script.py"]
    args = launch_command_parser().parse_args(words)
    args.deepspeed_fields_from_accelerate_config = ""  # the launcher's own note
    args, _, _ = _validate_launch_command(args)
    env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fork_tools.fill(tmp_path_factory.mktemp("kit"))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=64, max_position_embeddings=64, num_labels=1)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "encoder")
    save_tokenizer(folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def runs(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whole runs on two processes: what main() did on each, and the folder of the run."""

    def run(script: str, engine: str, *words: str, folder: Path | None = None) -> SimpleNamespace:
        folder = folder or Path(shutil.copytree(kit, tmp_path_factory.mktemp(engine) / "folder"))
        words = [*WORDS[script], *MORE[script], *(["--checkpoint_every", "0"] if "zero" in engine else []), *words]
        ranks = on_ranks(2, folder.parent, whole, script, words, [str(folder)], **environment(engine))
        return SimpleNamespace(ranks=ranks, out=folder / "out")

    return functools.cache(run)


def assert_same(one: SimpleNamespace, other: SimpleNamespace, script: str, tolerance: float = 1e-4) -> None:
    """Metrics, KL coefficients on both ranks, files, and the model that is left."""
    rows, others = (read_lines(made.out / "metrics.jsonl") for made in (one, other))
    assert len(rows) == len(others) == 3
    for mine, theirs in zip(rows, others, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    for rank in other.ranks:
        assert rank["betas"] == other.ranks[0]["betas"] == pytest.approx(one.ranks[0]["betas"], rel=1e-5)
    names = [sorted(path.name for path in (made.out / MODEL[script]).iterdir()) for made in (one, other)]
    assert names[0] == names[1]
    for name in [name for name in names[0] if name.endswith("safetensors")]:
        mine, theirs = (load_file(made.out / MODEL[script] / name) for made in (one, other))
        assert set(mine) == set(theirs)
        for key, x in mine.items():
            assert (x - theirs[key]).abs().max() < tolerance, key


def assert_shares(made: SimpleNamespace, frozen: float, trained: float) -> None:
    """The part of a model's weights that each of two ranks holds, about; norms of DeepSpeed are on both."""
    for rank in made.ranks:
        for is_trained, share in rank["shares"]:
            assert share == pytest.approx(trained if is_trained else frozen, abs=0.06)
        assert len(rank["shares"]) >= 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_fsdp2_gives_what_ddp_gives(script: str, runs: Any) -> None:
    one, other = (runs(script, engine) for engine in ("ddp", "fsdp2"))
    assert_same(one, other, script)
    assert_shares(one, 1.0, 1.0)
    assert_shares(other, 0.5, 0.5)  # the reference and the reward model too
    auto = AutoModelForSequenceClassification if script == REWARD else AutoModelForCausalLM
    model = auto.from_pretrained(other.out / MODEL[script])
    assert all(x.isfinite().all() for x in model.parameters())
    for made in (one, other):
        names = [sorted(file.name for file in path.iterdir()) for path in (made.out / "checkpoints").iterdir()]
        assert len(names) == 2 and names[0] == names[1]
    saved = [load_file(made.out / "checkpoints/0000003/optimizer.safetensors") for made in (one, other)]
    assert {key: x.shape for key, x in saved[0].items()} == {key: x.shape for key, x in saved[1].items()}


def test_fsdp2_goes_on_from_a_checkpoint_to_the_same_bits(runs: Any, tmp_path: Path) -> None:
    made = runs(PPO, "fsdp2")
    folder = Path(shutil.copytree(made.out.parent, tmp_path / "folder"))
    for name in ("policy", "checkpoints/0000003"):
        shutil.rmtree(folder / "out" / name)
    again = runs(PPO, "fsdp2", "--resume", folder=folder)
    for name in ("metrics.jsonl", "policy/model.safetensors", "policy/value_head.safetensors"):
        assert (again.out / name).read_bytes() == (made.out / name).read_bytes(), name


def test_fsdp2_under_autocast_and_with_an_encoder_gives_what_ddp_gives(runs: Any) -> None:
    """With bf16 frozen matrices are stored rounded, next to fp32 ones in one shard."""
    words = ("--dtype", "bf16", "--reward_model", "encoder", "--gradient_checkpointing", "--lr", "1e-4")
    one, other = (runs(PPO, engine, *words) for engine in ("ddp", "fsdp2"))
    assert_same(one, other, PPO, 2e-3)
    assert_shares(other, 0.5, 0.5)


def test_a_response_that_ends_on_one_rank_waits_for_the_others(tmp_path: Path) -> None:
    """Every forward pass of a sharded model needs all ranks."""
    ranks = on_ranks(2, tmp_path, early_end, **environment("fsdp2"))
    end = ranks[0]["whole"][0][0]
    lengths = [(rank["whole"][0] + [end]).index(end) + 1 for rank in ranks]
    assert lengths[0] == 1 < lengths[1]
    for rank, length in zip(ranks, lengths, strict=True):
        assert rank["calls"] == [LENGTH, min(LENGTH, lengths[1])]
        assert rank["cut"][0][:length] == rank["whole"][0][:length]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_settings_ask_for_their_engine_and_leave_the_numbers_to_the_flags(engine: str) -> None:
    env = environment(engine)
    assert (env.get("ACCELERATE_USE_FSDP"), env.get("FSDP_VERSION")) == (
        ("true", "2") if engine == "fsdp2" else (None,) * 2
    )
    assert env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == {"zero2": "2", "zero3": "3"}.get(engine)
    assert ("ACCELERATE_USE_DEEPSPEED" in env) == ("zero" in engine)
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"  # --dtype decides


@needs_deepspeed
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_deepspeed_gives_what_ddp_gives(script: str, engine: str, runs: Any) -> None:
    one, other = (runs(script, name) for name in ("ddp", engine))
    assert_same(one, other, script)
    if engine == "zero3":
        assert_shares(other, 0.5, 0.5)
    assert not (other.out / "checkpoints").exists()


@needs_deepspeed
def test_deepspeed_refuses_checkpoints(kit: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kit, tmp_path / "folder"))
    with pytest.raises(AssertionError, match="--checkpoint_every 1: .* DeepSpeed; 0, without --resume, would do"):
        on_ranks(2, tmp_path, whole, PPO, WORDS[PPO], [str(folder)], **environment("zero2"))
    assert not (folder / "out").exists()
