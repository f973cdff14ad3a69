"""A run that is killed or interrupted goes on with --resume to the bits of one left alone, or says
why not."""

import contextlib
import dataclasses
import importlib
import json
import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import fork_tools
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import (
    PPO,
    REWARD,
    RLOO,
    SCRIPTS,
    UPDATES,
    WORDS,
    Evil,
    begin,
    copy,
    end,
    kit,
    plain,
    run,
    run_on,
)
from run_tools import call, read_lines, start
from safetensors.torch import load_file

import ppo_rlhf
from tf_adam import make_optimizer

# Moments inside the writing of something: part of a line in the log of fork_tools.strike, which of
# such lines, signal. A run's first update is the second time that metrics.jsonl is opened; what
# comes then lets the update end.
KILL = signal.SIGKILL
INTERRUPT = ("open out/metrics.jsonl", 2, signal.SIGINT)
TERMINATE = ("open out/metrics.jsonl", 2, signal.SIGTERM)
CHAINS = {
    (PPO, 1): [
        ("os.rename out/args.tmp", 1, KILL),
        ("open out/metrics.jsonl", 2, KILL),
        ("half of out/checkpoints/0000001/model", 1, KILL),
        ("half of out/checkpoints/0000001/model_1", 1, KILL),
        ("half of out/checkpoints/0000001/optimizer", 1, KILL),
        ("sync", 1, KILL),
        INTERRUPT,
        ("os.rename out/checkpoints/0000003/state.tmp", 1, KILL),
        ("os.remove out/checkpoints/0000002", 2, KILL),
        ("half of out/policy", 1, KILL),
        ("half of out/ema", 1, KILL),
        ("half of out/critic", 1, KILL),
        ("open out/samples", 1, KILL),
    ],
    (RLOO, 1): [TERMINATE, ("save out/checkpoints/0000003/optimizer", 1, KILL), ("sync", 2, KILL)],
    (REWARD, 1): [
        INTERRUPT,
        ("open out/checkpoints/0000004/state.tmp", 1, KILL),
        ("open out/results.json", 1, KILL),
    ],
    (PPO, 2): [TERMINATE, ("half of out/checkpoints/0000003/optimizer", 1, KILL)],
    (RLOO, 2): [("os.rename out/checkpoints/0000002/state.tmp", 1, KILL)],
    (REWARD, 2): [("half of out/checkpoints/0000003/model", 1, KILL)],
}
RESUME = ["--output_dir", "out", "--resume"]


def results(folder: Path) -> dict[str, bytes]:
    """All that a finished run leaves in `folder`/out, but for args.json and its checkpoints."""
    found = {}
    for file in (folder / "out").rglob("*"):
        name = file.relative_to(folder / "out").as_posix()
        if file.is_file() and not name.startswith(("args.json", "checkpoints")):
            found[name] = file.read_bytes()
    return found


def contents(folder: Path) -> dict[str, Any]:
    """Times and bytes of all files."""
    found = {}
    for file in folder.rglob("*"):
        found[str(file)] = (file.stat().st_mtime_ns, file.is_file() and file.read_bytes())
    return found


def checkpoints(folder: Path) -> list[str]:
    """Those that are complete."""
    return sorted(path.parent.name for path in folder.glob("out/checkpoints/*/state.json"))


@pytest.mark.parametrize(("script", "world"), CHAINS)
def test_kills_and_interruptions_change_no_bit(script: str, world: int, tmp_path: Path) -> None:
    """The same command every time, whatever there is; after every kill half a line stands in
    metrics.jsonl too."""
    folder = copy(kit(), tmp_path)
    words = [*WORDS[script], "--resume"]
    log = folder / "out/metrics.jsonl"
    for pattern, count, number in CHAINS[script, world]:
        every = [] if number == KILL else ["--checkpoint_every", "0"]
        change = (fork_tools.strike, pattern, count, number)
        code, _, errors = run_on(world, script, [*words, *every], folder, change)
        assert code == (-KILL if number == KILL else 130), (pattern, errors)
        assert not (folder / "out/samples.jsonl").exists()
        if number != KILL:
            assert errors.endswith(f"{script}: stopped by a signal\n")
            assert "Traceback" not in errors
            made = len(read_lines(log))
            assert checkpoints(folder) == [f"{made:07d}"]
        if log.exists():
            with log.open("a") as file:
                file.write('{"half of a li')
    unpickled = tmp_path / "unpickled"
    change = (fork_tools.log_unpickling, str(unpickled))
    assert run_on(world, script, words, folder, change)[0] == 0
    assert results(folder) == results(plain(script, world))
    assert checkpoints(folder)[-2:] == checkpoints(plain(script, world)) == ["0000003", "0000004"]
    assert not unpickled.exists(), unpickled.read_text()


def test_a_checkpoint_gets_its_last_file_when_all_else_is_on_the_disk() -> None:
    """So that a power failure is no worse than a kill; and old checkpoints go last of all."""
    for script in SCRIPTS:
        log = (plain(script, 1) / "log").read_text().splitlines()
        for update in range(1, UPDATES + 1):
            path = f"out/checkpoints/{update:07d}"
            last = max(i for i, line in enumerate(log) if f"half of {path}" in line)
            synced = log.index("sync out", last)
            finished = [f"open {path}/state.tmp", f"os.rename {path}/state.tmp"]
            assert log[synced + 1 : synced + 3] == finished
        third = log.index("os.rename out/checkpoints/0000003/state.tmp")
        assert third < log.index("os.rmdir out/checkpoints/0000001")
        assert "out/samples" in log[-1], "the file that marks a finished run"


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    process = start([str(ROOT / PPO)], tmp_path)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (-signal.SIGINT, "", "")


HANGS = """
import time
calls = []
def f(queries, responses):
    calls.append(1)
    if len(calls) == 2:  # the first is that of the evaluation
        open("hangs", "w").close()
        while True:
            time.sleep(0.1)
    return [0.0] * len(responses)
"""
BY_FUNCTION = "--reward_model none --critic shared --reward_fn".split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_hangs_at_once(number: int, tmp_path: Path) -> None:
    folder = copy(kit(), tmp_path)
    (folder / "hanging.py").write_text(HANGS)
    process = begin(PPO, [*WORDS[PPO], *BY_FUNCTION, "hanging:f"], folder)
    while process.is_alive() and not (folder / "hangs").exists():
        time.sleep(0.02)
    process.join(0.2)
    for _ in range(2):
        assert process.is_alive(), "the first one waits for the update's end"
        os.kill(process.pid, number)
        process.join(0.5)
    assert end(process, folder)[0] == -number


def test_a_run_of_a_billion_episodes_starts_at_once(tmp_path: Path) -> None:
    """Nothing is drawn before it is needed, and nothing has an entry for every episode."""
    for script in (PPO, RLOO):
        folder = copy(kit(), tmp_path / script)
        begun = time.monotonic()
        words = [*WORDS[script], "--total_episodes", "2000000000"]
        code, _, errors = run(script, words, folder, (fork_tools.strike, *TERMINATE))
        assert (code, checkpoints(folder)) == (130, ["0000001"]), errors
        assert time.monotonic() - begun < 30


# --- what a folder has ----------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_left_as_it_is(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(plain(script, 1), tmp_path)
    before = contents(folder)
    code, _, errors = run(script, [*WORDS[script], "--resume"], folder)
    assert (code, "is finished" in errors) == (0, True)
    shutil.rmtree(folder / "out/checkpoints")
    without = contents(folder)
    code, _, errors = run(script, [*WORDS[script], "--resume"], folder)
    assert (code, "is finished" in errors) == (0, True)
    assert contents(folder) == without
    for name, file in without.items():
        assert before[name] == file or name.endswith("out"), name
    other = RLOO if script == PPO else PPO
    for program, words, says in (
        (script, WORDS[script], "--output_dir .*out: has a run: --resume, or another folder"),
        (script, ["--resume"], "--resume needs an --output_dir"),
        (other, RESUME, f"--output_dir out: has a run of {script}"),
    ):
        with pytest.raises(ValueError, match=f"^{says}$"):
            call(program, words, folder, monkeypatch)
    assert contents(folder) == without


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_that_another_run_has_used_while_the_models_loaded_is_left_as_it_is(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at the folder is before that: no checkpoint of the other run is adopted."""
    folder = copy(kit(), tmp_path)
    module = importlib.import_module(script[:-3])
    found = {}

    def set_seed(seed: int) -> None:
        shutil.copytree(plain(script, 1) / "out", folder / "out")
        found.update(contents(folder / "out"))

    monkeypatch.setattr(module, "set_seed", set_seed)
    with pytest.raises(module.UserError, match="^--output_dir .*has a run: --resume, or another"):
        call(script, [*WORDS[script], "--lr", "0.5"], folder, monkeypatch)
    now = contents(folder / "out")
    for files in (found, now):
        del files[str(folder / "out/lock")]
    assert now == found


def test_a_finished_run_is_left_as_it_is_with_fewer_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in (PPO, RLOO):
        folder = copy(plain(script, 1), tmp_path / script)
        before = contents(folder)
        call(script, [*RESUME, "--total_episodes", "8"], folder, monkeypatch)
        assert contents(folder) == before


MODELS = "policy ema critic reward_model"
OTHERS = "checkpoints metrics.jsonl samples.jsonl results.json"


@pytest.mark.parametrize("name", [*MODELS.split(), *OTHERS.split()])
def test_files_that_a_run_would_overwrite_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in SCRIPTS:
        folder = copy(kit(), tmp_path / script)
        path = folder / "out" / name
        path.parent.mkdir()
        if "." in name:
            path.write_text("not ours")
        else:
            path.mkdir()
        before = contents(folder)
        for words in (WORDS[script], [*WORDS[script], "--resume"]):
            with pytest.raises(ValueError, match="^--output_dir .*has files of a run, but no"):
                call(script, words, folder, monkeypatch)
        assert contents(folder) == before


def record(**changes: Any) -> str:
    """An args.json of a run of ppo_rlhf.py, with changes to its settings."""
    args = vars(ppo_rlhf.Args()) | changes
    return json.dumps({"script": "ppo_rlhf", "preset": "tiny", "args": args})


RECORDS = {
    "empty": ("", "."),
    "cut": (record()[:-9], "."),
    "a list": ("[]", "."),
    "of nothing": ("{}", "script"),
    "no settings": ('{"script": "ppo_rlhf", "preset": "tiny"}', "args"),
    "a field too many": (record(beam_width=3), "--beam_width 3"),
    "a wrong type": (record(lr="fast"), "--lr fast"),
    "out of range": (record(ema=1), "--ema 1"),
    "another script": (record().replace("ppo_rlhf", "rloo_rlhf"), "has a run of rloo_rlhf.py"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_an_args_json_that_is_none_is_named_in_a_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, says = RECORDS[kind]
    folder = copy(kit(), tmp_path)
    (folder / "out").mkdir()
    (folder / "out/args.json").write_text(text)
    before = contents(folder)
    with pytest.raises(ValueError, match=f"^--output_dir .*out: .*{says}") as caught:
        call(PPO, [*WORDS[PPO], "--resume"], folder, monkeypatch)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def test_a_function_in_args_json_is_not_imported_unless_it_is_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(kit(), tmp_path)
    (folder / "out").mkdir()
    (folder / "evil.py").write_text("import os\nos.mkdir('marker')\ndef f(a, b): return [0.0]\n")
    (folder / "out/args.json").write_text(record(reward_fn="evil:f"))
    before = contents(folder)
    with pytest.raises(ValueError, match="was started with --reward_fn evil:f, not None"):
        call(PPO, RESUME, folder, monkeypatch)
    assert contents(folder) == before


# --- settings -------------------------------------------------------------------------------------
# A resumed run goes on with these as they are given; all others are refused. A new field of Args
# has to be put into one of the two.
TAKES_EFFECT = "resume output_dir track checkpoint_every micro_batch_size lr"
TAKES_EFFECT_RL = f"{TAKES_EFFECT} eval_every max_kl total_episodes critic_lr"
REFUSED = """
    seed base_model dtype lora_rank lora_alpha query_dataset token_ids_of query_length long_queries
    query_prefix query_suffix start_text end_text response_length temperature truncate_token
    batch_size lr_schedule lr_warmup adam adam_eps adam_betas weight_decay max_grad_norm
"""
REFUSED_REWARD = f"{REFUSED} label_dataset num_labels eval_labels normalization_samples"
REFUSED_RL = f"""{REFUSED}
    eval_queries reward_model reward_fn unfrozen_layers top_p truncate_after penalty_reward_value
    penalty_mode mask_truncated num_minibatches num_epochs ema ptx_coef ptx_dataset score_norm
    score_clip kl_estimator kl_coef kl_target kl_horizon cliprange target_kl
"""
REFUSED_PPO = f"""{REFUSED_RL}
    cliprange_value vf_coef gamma lam whiten_rewards whiten_advantages whiten
    value_after_end critic critic_warmup
"""


FIELDS = {
    PPO: (TAKES_EFFECT_RL, REFUSED_PPO),
    RLOO: (TAKES_EFFECT_RL, f"{REFUSED_RL} rloo_k token_level normalize_advantages"),
    REWARD: (TAKES_EFFECT, REFUSED_REWARD),
}
FIELDS[RLOO] = (TAKES_EFFECT_RL.replace(" critic_lr", ""), FIELDS[RLOO][1])
WORDS_OF_TYPES = "another bf16 drop constant torch add whiten k2 global policy".split()
VALUES = (3, 0.25, False, True, (0.5, 0.5), *WORDS_OF_TYPES)


def another(script: Any, name: str) -> Any:
    """Settings with a valid value of the field that is not its default."""
    for value in VALUES:
        with contextlib.suppress(script.UserError):
            args = script.validated({name: value})
            if getattr(args, name) != getattr(script.Args(), name):
                return args
    raise AssertionError(f"no value of {name} is known")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_setting_is_refused_on_resume_or_takes_effect(
    script: str, tmp_path: Path, caplog: Any
) -> None:
    Accelerator(cpu=True)
    module = importlib.import_module(script[:-3])
    may_change, refused = (names.split() for names in FIELDS[script])
    fields = [field.name for field in dataclasses.fields(module.Args)]
    assert sorted([*may_change, *refused]) == sorted(fields)
    args = module.Args(output_dir=str(tmp_path))
    file = tmp_path / "args.json"
    for name in set(fields) - {"resume", "output_dir"}:
        changed = another(module, name)
        changed = dataclasses.replace(changed, resume=True, output_dir=str(tmp_path))
        file.write_text(json.dumps({"script": script[:-3], "preset": "", "args": vars(args)}))
        if name in may_change:
            assert vars(module.resolve_args("tiny", changed)) == vars(changed)
            assert f"{name} {getattr(changed, name)} (was {getattr(args, name)})" in caplog.text
        else:
            says = f"^--output_dir {tmp_path}: was started with --{name} "
            with pytest.raises(module.UserError, match=says):
                module.resolve_args("tiny", changed)


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_finished_run_goes_on_with_more_episodes_as_if_it_had_had_them(
    script: str, tmp_path: Path
) -> None:
    """To the bit, if the rate does not depend on them."""
    words = [*WORDS[script], "--lr_schedule", "constant", "--resume"]
    longer = copy(kit(), tmp_path / "longer")
    assert run(script, words, longer)[0] == 0
    folder = copy(kit(), tmp_path)
    for episodes in ("8", "16"):
        assert run(script, [*words, "--total_episodes", episodes], folder)[0] == 0
    assert results(folder) == results(longer)
    shutil.rmtree(folder / "out/checkpoints")
    before = contents(folder / "out/policy")
    code, _, errors = run(script, [*words, "--total_episodes", "24"], folder)
    assert (code, "has no checkpoint to go on from" in errors) == (2, True)
    assert contents(folder / "out/policy") == before


def test_what_may_change_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(plain(PPO, 1), tmp_path)
    sizes = set()
    forward = ppo_rlhf.forward_response

    def noted(policy: Any, batch: Any, rows: Any, temperature: float) -> Any:
        sizes.add(len(rows))
        return forward(policy, batch, rows, temperature)

    monkeypatch.setattr(ppo_rlhf, "forward_response", noted)
    words = "--total_episodes 24 --lr 0 --critic_lr 0.5 --eval_every 1 --checkpoint_every 0"
    call(PPO, [*RESUME, *words.split(), "--micro_batch_size", "1"], folder, monkeypatch)
    assert sizes == {1}
    assert checkpoints(folder) == ["0000004", "0000006"]
    rows = read_lines(folder / "out/metrics.jsonl")
    assert [row["ppo/lr"] for row in rows[4:]] == [0, 0]
    assert ["eval/score" in row for row in rows] == 4 * [False] + 2 * [True]
    was = load_file(folder / "out/checkpoints/0000004/model.safetensors")
    now = load_file(folder / "out/checkpoints/0000006/model.safetensors")
    for name in was:
        assert torch.equal(was[name], now[name]) == name.startswith("lm."), name
    record = json.loads((folder / "out/args.json").read_text())["args"]
    assert (record["total_episodes"], record["lr"], record["critic_lr"]) == (24, 0, 0.5)
    with pytest.raises(ppo_rlhf.UserError, match="^the KL is .* --max_kl 1e-09"):
        words = "--total_episodes 28 --max_kl 1e-9".split()
        call(PPO, [*RESUME, *words], folder, monkeypatch)


def test_settings_come_from_the_run_and_flags_given_beside_it_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plain(PPO, 1)
    old = json.loads((folder / "out/args.json").read_text())["args"]
    old |= {"adam_betas": (0.9, 0.999), "resume": True, "output_dir": "out"}
    for words, changes in (
        ([], {}),
        (["--kl_target", "none", "--lr", "0.5"], {"kl_target": None, "lr": 0.5}),
        (["--seed", "1"], {}),
    ):
        preset, args = call(PPO, [*RESUME, *words], folder, monkeypatch, "parse_args")
        assert (preset, vars(args)) == ("tiny", old | {"output_dir": args.output_dir} | changes)
    call(PPO, [*RESUME, "--lr", "0.5"], folder, monkeypatch)
    named = re.findall("--resume: (.*)", caplog.text)
    assert named == ["lr 0.5 (was 0.01)"]


def test_a_run_of_another_preset_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    for script in SCRIPTS:
        args = vars(importlib.import_module(script[:-3]).Args())
        old = {"script": script[:-3], "preset": "sentiment", "args": args}
        (tmp_path / "out/args.json").write_text(json.dumps(old))
        for words in ([], ["sentiment"]):
            preset, _ = call(script, [*words, *RESUME], tmp_path, monkeypatch, "parse_args")
            assert preset == "sentiment"
        with pytest.raises(Exception, match="^--output_dir out has a run of the preset sentiment$"):
            call(script, ["cnndm", *RESUME], tmp_path, monkeypatch, "parse_args")


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.fixture
def small(tmp_path: Path) -> Any:
    """Opens the run in tmp_path/out, of three updates on four weights with two checkpoints, or a
    copy of it."""
    accelerator = Accelerator(cpu=True)
    args = ppo_rlhf.Args(adam_eps=1e-3, resume=True)
    net = torch.nn.Linear(3, 1)
    optimizer = make_optimizer([net], [], args)
    net, optimizer = accelerator.prepare(net, optimizer)

    def go_on(folder: Path) -> dict[str, Any]:
        args.output_dir = str(folder)
        state = {"update": 0, "kl_coef": 0.1}
        with ppo_rlhf.lock_and_signals(args):
            ppo_rlhf.open_run(accelerator, "tiny", args, state)
        return state

    folder = tmp_path / "out"
    state = go_on(folder)
    for update in (1, 2, 3):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        ppo_rlhf.save_checkpoint(accelerator, state | {"update": update}, args)
    return go_on


@pytest.mark.parametrize("kind", ["cut", "empty", "evil", "missing", "other"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "state.json"])
def test_a_newest_checkpoint_that_does_not_load_stops_and_stays(
    kind: str, name: str, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it advised: it may be sound, and of another model. One that has no state.json is none:
    a kill can leave it."""
    monkeypatch.chdir(tmp_path)
    folder = copy(tmp_path / "out", tmp_path)
    file = folder / "checkpoints/0000003" / name
    others = {"model.safetensors": safetensors.torch.save({"weight": torch.ones(3, 2)})}
    evil = pickle.dumps(Evil(), 2)
    damaged = {"cut": file.read_bytes()[:-9], "evil": evil}
    file.write_bytes((damaged | {"other": others.get(name, b"{}")}).get(kind, b""))
    if kind == "missing":
        file.unlink()
        (file.parent / "pytorch_model.bin").write_bytes(evil)  # what accelerate turns to
    (file.parent / "random_states_0.pkl").write_bytes(evil)
    before = contents(folder)
    if (kind, name) != ("missing", "state.json"):
        with pytest.raises(ppo_rlhf.UserError, match=f"^--output_dir {folder}: .") as caught:
            small(folder)
        reason = str(caught.value).removeprefix(f"--output_dir {folder}: ")
        assert not re.search("(?i)damaged|delete|remove|\n", reason)
        del before[str(folder / "lock")]
        after = contents(folder)
        assert {name: after[name] for name in before} == before
    assert not (tmp_path / "marker").exists()
    shutil.rmtree(folder / "checkpoints/0000003")
    assert small(copy(folder, tmp_path / "again"))["update"] == 2


def test_two_checkpoints_are_kept_and_a_folder_has_one_run_of_as_many_processes(
    small: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["0000002", "0000003"]
    assert small(copy(folder, tmp_path))["update"] == 3
    says = f"^--output_dir {folder}: .*lock.* could not be acquired"
    with ppo_rlhf.lock_and_signals(ppo_rlhf.Args(output_dir=str(folder))):
        with pytest.raises(ppo_rlhf.UserError, match=says):
            small(folder)
    assert small(folder)["update"] == 3
    two = copy(folder, tmp_path / "two")
    state = two / "checkpoints/0000003/state.json"
    state.write_text(state.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ppo_rlhf.UserError, match=f"{two}: is a run of 2 processes: use as many$"):
        small(two)


def test_a_users_copies_of_checkpoints_are_no_checkpoints(tmp_path: Path) -> None:
    """Neither taken for the newest, nor deleted."""
    folder = copy(plain(RLOO, 1), tmp_path)
    own = folder / "out/checkpoints"
    copies = ["0000001_good", "best", "00000099", "9", "0000002.bak"]
    for name in copies:
        shutil.copytree(own / "0000003", own / name)
    words = [*WORDS[RLOO], "--resume", "--total_episodes", "24"]
    assert run(RLOO, words, folder)[0] == 0
    assert checkpoints(folder) == sorted([*copies, "0000005", "0000006"])
    assert len(read_lines(folder / "out/metrics.jsonl")) == 6
