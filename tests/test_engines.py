"""FSDP2 on two processes that share the weights gives what DDP gives; what the settings of all
engines ask for."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_tools
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from conftest import ROOT
from fork_tools import MODEL, PPO, REWARD, RLOO, SCRIPTS, WORDS, copy, kit, plain, succeed
from run_tools import assert_same_metrics, read_lines, read_metrics
from safetensors.torch import load_file
from torch.testing import assert_close

import ppo_rlhf


def environment(engine):
    """What `accelerate launch --config_file <engine>.yaml --num_processes 2` says to its
    processes."""
    settings = ROOT / "benchmark" / "accelerate" / f"{engine}.yaml"
    words = ["--config_file", str(settings), "--num_processes", "2", "script.py"]
    args = launch_command_parser().parse_args(words)
    args.deepspeed_fields_from_accelerate_config = ""  # the launcher's own note
    args, _, _ = _validate_launch_command(args)
    env = prepare_multi_gpu_env(args)
    own = [name for name in env if name.startswith(("ACCELERATE_", "FSDP_"))]
    return {name: env[name] for name in own}


@pytest.mark.parametrize("script", SCRIPTS)
def test_fsdp2_gives_what_ddp_gives_and_goes_on(script, folder, tmp_path):
    """Interrupted after the second of four updates, too; PPO with a critic. At first with the
    setting that `accelerate config` proposes, for weights that one process alone reads."""
    if torch.__version__ < (2, 9):
        pytest.skip("gloo of torch 2.8 adds gradients of FSDP2 up: see docs/running.md")
    env = environment("fsdp2")
    # The file is opened first when the run's folder is made.
    stop = (fork_tools.strike, "open out/metrics.jsonl", 3, signal.SIGINT)
    words = [*WORDS[script], "--checkpoint_every", "0"]
    proposed = env | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    code, _, errors = fork_tools.run(script, words, folder, stop, world=2, **proposed)
    assert code == 130, errors
    assert len(read_metrics(folder / "out")) == 2
    log = tmp_path / "unpickled"
    change = (fork_tools.log_unpickling, str(log))
    succeed(script, [*WORDS[script], "--resume"], folder, change, world=2, **env)
    assert not log.exists(), log.read_text()
    one = plain(script, 2) / "out"
    other = folder / "out"
    assert_same_metrics(other, one, "FSDP2 gives other metrics than DDP", rel=1e-4, abs=1e-4)
    files, others = ({x.relative_to(out) for x in out.glob("[pcr]*/*.*")} for out in (one, other))
    assert files == others
    assert len(files) > 3
    for name in [name for name in files if name.suffix == ".safetensors"]:
        assert_close(load_file(other / name), load_file(one / name), atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("script", [PPO, RLOO])
def test_adapters_are_trained_in_shards_as_by_ddp(script, tmp_path):
    words = [*WORDS[script], "--lora_rank", "2", "--dtype", "bf16"]
    if script == PPO:
        words += ["--critic", "shared"]
    folders = {}
    for engine in ("fsdp2", "ddp"):
        folder = copy(kit(), tmp_path / engine)
        succeed(script, words, folder, world=2, **environment(engine))
        folders[engine] = folder / "out"
    says = "FSDP2 gives other metrics of adapters than DDP"
    assert_same_metrics(*folders.values(), says, rel=1e-3, abs=1e-3)
    file = "policy/adapter_model.safetensors"
    mine, theirs = (load_file(folder / file) for folder in folders.values())
    assert any(values.any() for name, values in mine.items() if "lora_B" in name)  # 0 at first
    assert_close(mine, theirs, atol=1e-3, rtol=0)


# What makes all responses of the second process end at their first token, and counts its passes.
DRAWN = "        ids = inverse_cdf(probs, noise[rows, t].unsqueeze(1))\n"
FORCED = """        if end is not None and PartialState().process_index == 1:
            ids = torch.full_like(ids, end)
        with open(f"passes-{PartialState().process_index}", "a") as file:
            file.write(f"{t} {len(ids)}\\n")
"""


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_process_whose_responses_have_ended_waits_with_one_row(script, engine, folder):
    """With sharded weights each needs the other's in every pass, so both make as many. The second
    one keeps a single response after its eighth token."""
    changed = fork_tools.changed_copy(script, folder, (DRAWN, DRAWN + FORCED))
    flags = "--mask_truncated --truncate_token w1 --truncate_after 0 --response_length 20"
    words = [*WORDS[script], *flags.split(), "--total_episodes", "8", "--batch_size", "8"]
    for code, _, errors in fork_tools.run_two(changed, words, folder, **environment(engine)):
        assert code == 0, errors
    passes = [(folder / f"passes-{rank}").read_text().splitlines() for rank in (0, 1)]
    steps = [[int(line.split()[0]) for line in lines] for lines in passes]
    assert steps[0] == steps[1]
    assert max(steps[0]) == 19  # the first one's responses have no end
    assert {line.split()[1] for line in passes[1] if int(line.split()[0]) > 8} == {"1"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_with_unequal_micro_batches_give_what_one_gives(script, tmp_path):
    """Of two micro-batches on each of two processes the second is smaller; on one process all are
    equal. Whitening is over a process's share."""
    unequal = "--batch_size 12 --micro_batch_size 4 --num_epochs 1 --total_episodes 24"
    flags = {
        PPO: f"{unequal} --no-whiten_rewards --no-whiten_advantages",
        RLOO: unequal,
        REWARD: "--batch_size 8 --micro_batch_size 3",
    }
    words = [*WORDS[script], *flags[script].split()]
    for world in (1, 2):
        succeed(script, words, copy(kit(), tmp_path / str(world)), world=world)
    one, two = (tmp_path / f"{world}/folder/out" for world in (1, 2))
    says = "Two processes give other metrics than one. A mean or sum over the batch must be over"
    says += " all processes (reduce_means, sum_over_ranks, gather)"
    of_each = {"returns/var", "val/var", "val/var_explained"}
    assert_same_metrics(two, one, says, of_each, rel=1e-4, abs=1e-5)
    mine, theirs = (load_file(out / MODEL[script] / "model.safetensors") for out in (one, two))
    assert_close(theirs, mine, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_in_shards_have_no_whole_gradients_and_no_copies(script, tmp_path):
    """After no micro-batch, and at no sampled token, when of the weights only embeddings, last norm
    and heads are whole; DDP, which has room for it, has all. In train_reward.py the reference
    samples, which is whole anyway: there gain and bias are read all the same."""
    weights = {}
    results = {}
    # Without samples and held-out labels nothing gathers gain and bias after the last update.
    few = "--normalization_samples 0 --num_labels none" if script == REWARD else "--dtype bf16"
    more = ["--batch_size", "8", "--checkpoint_every", "0", *few.split()]
    for engine in ("fsdp2", "ddp"):
        log = tmp_path / engine
        change = (fork_tools.log_whole_tensors, str(log))
        folder = copy(kit(), tmp_path / f"run-{engine}")
        succeed(script, [*WORDS[script], *more], folder, change, world=2, **environment(engine))
        found = read_lines(log)
        weights[engine] = max(row.get("weights", 0) for row in found)
        expected = {engine == "ddp"}
        assert {row["gradients"] > 0 for row in found if "gradients" in row} == expected
        if script != REWARD:
            assert {row["copies"] for row in found if "copies" in row} == expected
        else:
            results[engine] = json.loads((folder / "out/results.json").read_text())
    if script != REWARD:
        assert weights["fsdp2"] < 0.15 * weights["ddp"]
    else:
        assert results["fsdp2"] == pytest.approx(results["ddp"], abs=1e-5)
        assert set(results["ddp"]) == {"gain", "bias"}
        assert results["ddp"]["gain"] != 1


def test_a_launch_of_the_default_that_is_stopped_leaves_a_checkpoint(tmp_path):
    """From any folder. Job managers send SIGTERM to all processes, and the launcher sends it to its
    own once more."""
    code = "def length(completions, **_):\n    return [len(x) for x in completions]\n"
    (tmp_path / "taste.py").write_text(code)
    words = "--reward_fn taste:length --total_episodes 64000 --batch_size 16 --eval_queries 4"
    words += " --num_epochs 1 --checkpoint_every 0 --truncate_token none"
    # `accelerate launch --cpu` starts one process only, whatever --num_processes says: two on a CPU
    # are launched as on GPUs.
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
    launch += " --mixed_precision no --dynamo_backend no --main_process_port 0"
    command = [sys.executable, *launch.split(), ROOT / PPO]
    command += fork_tools.complete(PPO, words.split())
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes)
    pattern = f"runs/ppo_rlhf-tiny-{ppo_rlhf.Args().seed}-*/metrics.jsonl"
    deadline = time.monotonic() + 180  # a machine may be busy
    logs = []
    while not (logs and logs[0].stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
        logs = list(tmp_path.glob(pattern))
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    for pid in (*map(int, workers), process.pid):
        os.kill(pid, signal.SIGTERM)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "\n2 x cpu" in printed
    assert "stopped by a signal; to continue, run with python or your launcher:\n" in printed
    (log,) = logs
    rows = read_lines(log)
    assert rows[0]["objective/scores"] > 1  # letters
    (state,) = log.parent.glob("checkpoints/*/state.json")
    assert state.parent.name == f"{len(rows):07d}", errors
    assert json.loads(state.read_text())["processes"] == 2


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_settings_ask_for_their_engine(engine, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[engine]
    settings = ROOT / f"benchmark/accelerate/{engine}.yaml"
    assert f"\ndistributed_type: {kind}\n" in settings.read_text()
    env = environment(engine)
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"  # --dtype decides
    assert (env.get("FSDP_VERSION") == "2") == (engine == "fsdp2")


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_code_names_an_engine(script):
    """Comments may: they say why something is done for all of them."""
    code = ast.unparse(ast.parse((ROOT / script).read_text())).lower()
    for word in ("fsdp", "deepspeed", "distributeddataparallel"):
        assert word not in code
