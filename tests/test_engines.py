"""FSDP2 on two processes that share the weights gives what DDP gives; what the settings of all engines ask for."""

import json
import signal
from pathlib import Path
from typing import Any

import fork_tools
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from conftest import ROOT
from fork_tools import SCRIPTS, WORDS, copy, kit, plain, run_on
from run_tools import read_lines
from safetensors.torch import load_file


def environment(engine: str) -> dict[str, str]:
    """What `accelerate launch --config_file <engine>.yaml --num_processes 2` says to its processes."""
    settings = ROOT / "benchmark" / "accelerate" / f"{engine}.yaml"
    words = ["--config_file", str(settings), "--num_processes", "2", "script.py"]
    args = launch_command_parser().parse_args(words)
    args.deepspeed_fields_from_accelerate_config = ""  # the launcher's own note
    args, _, _ = _validate_launch_command(args)
    env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def sharded(script: str, folder: Path, *changes: Any, status: int = 0, more: tuple[str, ...] = ()) -> Path:
    """The folder, in which the script has run under FSDP2 on two processes."""
    shares = folder.with_name("shares")
    changes = (fork_tools.log_shares, str(shares)), *changes
    code, _, errors = run_on(2, script, [*WORDS[script], *more], folder, *changes, **environment("fsdp2"))
    assert code == status, errors
    assert float(shares.read_text()) == pytest.approx(0.5, abs=0.06), "the part of the weights on one process"
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_fsdp2_gives_what_ddp_gives_and_goes_on(script: str, tmp_path: Path) -> None:
    """Interrupted after the second of four updates, too; PPO with a critic and an average of weights."""
    folder, change = copy(kit(), tmp_path), (fork_tools.strike, "open out/metrics.jsonl", 2, signal.SIGINT)
    every = ("--checkpoint_every", "0")
    assert len(read_lines(sharded(script, folder, change, status=130, more=every) / "out/metrics.jsonl")) == 2
    log = tmp_path / "unpickled"
    sharded(script, folder, (fork_tools.log_unpickling, str(log)), more=("--resume",))
    assert not log.exists(), log.read_text()
    one, other = plain(script, 2) / "out", folder / "out"
    for mine, theirs in zip(*(read_lines(x / "metrics.jsonl") for x in (one, other)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    models = [{file.relative_to(x) for file in x.glob("[pcr]*/*.*")} for x in (one, other)]
    assert models[0] == models[1] and len(models[0]) > 3
    for name in [name for name in models[0] if name.suffix == ".safetensors"]:
        mine, theirs = (load_file(x / name) for x in (one, other))
        assert set(mine) == set(theirs)
        assert all((x - theirs[key]).abs().max() < 1e-4 for key, x in mine.items()), name


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_settings_ask_for_their_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    env = environment(engine)
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"  # --dtype decides
    assert (env.get("FSDP_VERSION") == "2", "ACCELERATE_USE_DEEPSPEED" in env) == (engine == "fsdp2", "zero" in engine)
    if "zero" in engine:
        settings = json.loads(Path(env["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
        assert settings["zero_optimization"]["stage"] == int(engine[-1])
        # the scripts' own Adam, and as many micro-batches per step as they say
        assert settings["zero_allow_untested_optimizer"] and settings["gradient_accumulation_steps"] == "auto"
        assert settings["train_micro_batch_size_per_gpu"] == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_engines_are_named_in_settings_alone(script: str) -> None:
    text = (ROOT / script).read_text().lower()
    assert not [word for word in ("fsdp", "deepspeed", "distributeddataparallel") if word in text]
