"""Copies of the scripts that an experimenter, or the study of symptoms, has changed. `pytest
--script` runs tests against a copy."""

import importlib
import re
import shutil
import signal
import subprocess
import sys

import fork_tools
import options
import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS, parse
from run_tools import assert_same_metrics, read_lines
from safetensors.torch import load_file

from benchmark.studies.symptoms import run as symptoms


@pytest.mark.parametrize("symptom", symptoms.SYMPTOMS, ids=lambda symptom: symptom.seen)
def test_what_makes_a_symptom_applies(symptom, tmp_path):
    """Changes are of lines that the script has once, flags are its own."""
    runs = {symptom.ill, symptom.cured, symptom.healthy, symptoms.Run()} - {None}
    assert len(runs) > 1 or symptom.cured is not None
    for one in runs:
        path = symptoms.copy_of(one, tmp_path / "copy.py")
        compile(path.read_text(), path, "exec")
        parse(importlib.import_module(one.script[:-3]), one.flags.split())


# --- pytest --script ------------------------------------------------------------------------------
# A train_reward.py with a new flag, another default, another file, and something of its own in
# tf_adam.py. At a value of the flag that is not the default, a state is not in run.state.
START = "        start = update * args.batch_size\n"
MINE = """
        if args.mine == "more":
            seen.append(update)
            optimizer.param_groups[0]["weight_decay"] = of_my_own * len(seen)
        (run.folder / "notes.txt").touch()
"""
FIELD = "    track: bool = False"
SEED = "seed: conint(ge=0, lt=4_000_000_000) = "
CHANGES = (
    ("from tf_adam import AdamTF\n", "from tf_adam import AdamTF, of_my_own\n"),
    (FIELD, f'    mine: Literal["less", "more"] = "less"  # Mine\n{FIELD}'),
    (f"{SEED}1 ", f"{SEED}7 "),
    ("    run.start()\n", "    run.start()\n    seen = []\n"),
    (START, MINE[1:] + START),
)


def pytest_with(script, *words):
    """Status and output of pytest on a copy of a script, called from the project's folder."""
    command = "-m pytest -n 0 -p no:cacheprovider --tb=short --script".split()
    command = [sys.executable, *command, str(script), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_pytest_runs_tests_against_a_copy_and_names_its_fault(tmp_path):
    """In the place of the script that it was made from, with tf_adam.py from beside it. -k may have
    an `or`. What is new is no fault."""
    folder = tmp_path / "it's mine"
    folder.mkdir()
    script = fork_tools.changed_copy(REWARD, folder, *CHANGES, name="my.py")
    with (folder / "tf_adam.py").open("a") as file:
        file.write("\n\nof_my_own = 0.1\n")
    kinds = "kills or leaves_these_files or on_resume or out_of_range"
    # The last of these names is in another file than those that are run.
    names = f"not reward.py-2 and ({kinds}) or every_argument_is_read or bf16_file_is_trained"
    files = ("run_folder", "end_to_end", "hostile_input", "consistency")
    words = [f"tests/test_{name}.py" for name in files]
    words += ["-k", names, "--script_flags=--mine more"]
    status, printed = pytest_with(script, *words)
    assert f"{script} in the place of {REWARD}" in printed
    assert status == 1, printed
    failed = re.findall(r"^FAILED tests/test_run_folder.py::(\w+)\[train_reward.py", printed, re.M)
    assert failed == ["test_kills_and_interruptions_change_no_bit"]
    assert "1 failed, 4 passed" in printed
    assert "The resumed run differs from one left alone. What the loop carries" in printed
    assert re.search(r"and update: train/\w+ of update \d is [\d.]+, not [\d.]+", printed)


@pytest.mark.long
def test_a_test_that_cannot_call_a_changed_function_has_not_failed(tmp_path):
    """But a mask that is forgotten has."""
    given = "def inverse_cdf(probs: Tensor, noise: Tensor)"
    changes = [
        (given, given.replace("noise: Tensor", "noise: Tensor, least: float")),
        ("noise[rows, t].unsqueeze(1))", "noise[rows, t].unsqueeze(1), 0.0)"),
        ("-batch.sum_tokens(batch.logprobs)", "-batch.logprobs.sum(1)"),
    ]
    copy = fork_tools.changed_copy(PPO, tmp_path, *changes, name="my.py")
    files = [f"tests/test_{name}.py" for name in ("rollout", "own_changes")]
    status, printed = pytest_with(copy, *files, "-k", "after_the_end or of_a_large_vocabulary")
    assert status == 1, printed
    left_out = "^LEFT OUT .*of_a_large_vocabulary.*: it calls inverse_cdf as the original has it"
    assert re.search(left_out, printed, re.M), printed
    failed = re.findall(r"^FAILED tests/test_(\w+).py::(\w+)", printed, re.M)
    assert failed == [("own_changes", "test_tokens_after_the_end_change_nothing")]
    assert "turn it on by --script_flags" in printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_s_original_is_found(script, tmp_path):
    copy = shutil.copy(ROOT / script, tmp_path / "my.py")
    copy.write_text(copy.read_text().replace("args.", "settings."))
    assert options.original_of(copy) == script


@pytest.mark.parametrize("name", options.TESTS_OF_COPIES)
def test_the_tests_of_copies_are_there(name):
    assert (ROOT / "tests" / name.split("::")[0]).exists()


def test_a_copy_that_is_not_there_is_one_line(tmp_path):
    status, printed = pytest_with(tmp_path / "none.py", "tests")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert printed.strip() == f"ERROR: --script {tmp_path / 'none.py'}: there is no such file"


# --- docs/changes.md ------------------------------------------------------------------------------
PAGE = (ROOT / "docs/changes.md").read_text()
DIFFS = dict(re.findall(r"<!-- change: (\w+).*? -->\n((?:```diff\n.*?```\n)+)", PAGE, re.S))
FLAGS = {"second_model": ["--safety_model", "judge"]}


def changes_of(*names):
    """Texts of the script and what these changes of the page put in their place."""
    found = []
    for block in re.findall(r"```diff\n(.*?)```", "".join(DIFFS[name] for name in names), re.S):
        lines = block.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        found.append((old, new))
    return found


def run_copy(changes, folder, *flags, world=1):
    """The metrics of a run of a copy of ppo_rlhf.py."""
    copy = fork_tools.changed_copy(PPO, folder, *changes, name="my_copy.py")
    fork_tools.succeed(copy, [*WORDS[PPO], *flags], folder, world=world)
    return read_lines(folder / "out/metrics.jsonl")


def test_the_page_has_these_changes():
    names = (
        "entropy setting token_rewards moments second_model ema baselines drop_groups draw_again "
        "replay"
    )
    assert list(DIFFS) == names.split()


ALONE = ["entropy", "token_rewards", "second_model", "ema", "draw_again", "replay"]


@pytest.mark.parametrize("name", ALONE)
def test_a_change_of_the_page_runs_and_acts(name, folder):
    changes = changes_of(name)
    if name == "entropy":  # a large one, so that it shows
        changes = [(old, new.replace("0.01", "50")) for old, new in changes]
    rows = run_copy(changes, folder, *FLAGS.get(name, []))
    plain_rows = read_lines(fork_tools.plain(PPO, 1) / "out/metrics.jsonl")
    first = {key: rows[0][key] - plain_rows[0][key] for key in ("loss/total", "objective/scores")}
    total = rows[0]["objective/score_total"] - plain_rows[0]["objective/score_total"]
    if name == "entropy":
        assert first["loss/total"] == pytest.approx(-50 * rows[0]["policy/entropy"], rel=0.1)
        assert rows[-1]["policy/entropy"] > plain_rows[-1]["policy/entropy"] + 0.05
    if name == "token_rewards":
        assert first["objective/scores"] == 0
        assert total < -0.05
    if name == "second_model":  # the same model with half the weight; a missing end is no score
        plain_samples = read_lines(fork_tools.plain(PPO, 1) / "out/samples.jsonl")
        pairs = zip(read_lines(folder / "out/samples.jsonl"), plain_samples, strict=True)
        assert any(abs(mine["score"] - other["score"]) > 1e-3 for mine, other in pairs)
    if name == "ema":
        assert rows[-1]["objective/scores"] == plain_rows[-1]["objective/scores"]
        averages = load_file(folder / "out/ema/policy/model.safetensors")
        policy = load_file(folder / "out/policy/model.safetensors")
        start = load_file(folder / "model/model.safetensors")
        moved = [sum((x[key] - start[key]).norm() for key in start) for x in (averages, policy)]
        assert 0 < moved[0] < 0.1 * moved[1]
    if name == "draw_again":
        assert rows[0]["objective/found_end"] >= plain_rows[0]["objective/found_end"]
    if name == "replay":  # the second update is the first that trains on older responses
        keys = ("objective/kl", "loss/total")
        same = [
            [mine[key] == other[key] for key in keys]
            for mine, other in zip(rows, plain_rows, strict=True)
        ]
        assert same[:2] == [[True, True], [True, True]]
        assert same[2:] == [[False, False]] * (len(rows) - 2)
        assert all(row["first_ratio_error"] < 1e-5 for row in rows)


def test_all_changes_of_the_page_go_together(folder):
    changes = changes_of(*[name for name in DIFFS if name != "drop_groups"])
    rows = run_copy(changes, folder, *FLAGS["second_model"])
    assert len(rows) == len(read_lines(fork_tools.plain(PPO, 1) / "out/metrics.jsonl"))


def test_normalisation_over_all_processes_is_that_of_one(folder, tmp_path):
    """With the change two processes give what one gives; without it each whitens its own share."""
    metrics = {}
    for name, changes in (("plain", []), ("changed", changes_of("moments"))):
        for world in (1, 2):
            here = fork_tools.copy(folder, tmp_path / f"{name}-{world}")
            metrics[name, world] = run_copy(changes, here, "--batch_size", "8", world=world)
    losses = {key: [row["loss/value"] for row in rows] for key, rows in metrics.items()}
    assert losses["changed", 2] == pytest.approx(losses["changed", 1], rel=1e-4)
    assert losses["plain", 2] != pytest.approx(losses["plain", 1], rel=1e-2)


@pytest.mark.parametrize(
    ("name", "tensor"), [("baselines", "baselines"), ("replay", "old.logprobs")]
)
def test_tensors_of_the_page_are_in_checkpoints_of_each_process(name, tensor, folder, tmp_path):
    """A run that stops after its first update ends as one left alone."""
    whole, stopped = (fork_tools.copy(folder, tmp_path / name) for name in ("whole", "stopped"))
    run_copy(changes_of(name), whole, world=2)
    copy = fork_tools.changed_copy(PPO, stopped, *changes_of(name), name="my_copy.py")
    words = [*WORDS[PPO], "--resume"]
    stop = (fork_tools.strike, "open out/metrics.jsonl", 2, signal.SIGTERM)
    code, _, errors = fork_tools.run(copy, words, stopped, stop, world=2)
    assert code == 130, errors
    files = [stopped / f"out/checkpoints/0000001/tensors-{rank}.safetensors" for rank in (0, 1)]
    tensors = [load_file(file)[tensor] for file in files]
    assert all(x.any() for x in tensors)
    assert not torch.equal(*tensors)
    fork_tools.succeed(copy, words, stopped, world=2)
    assert_same_metrics(stopped / "out", whole / "out", "the tensors are lost")


# All responses to some of the queries get the same reward.
FUNCTION = """
def f(prompts, completions, **_):
    return [0.5 if len(p) % 3 == 0 else sum(map(ord, c)) % 17 for p, c in zip(prompts, completions)]
"""


def test_processes_may_keep_unequal_numbers_of_groups(folder, tmp_path):
    """What two processes give is what one gives."""
    line = "        means = rloo_update("
    shown = (line, f"        print('kept', epochs.shape[2], flush=True)\n{line}")
    words = "--reward_model none --reward_fn mine:f --truncate_token none --kl_coef 0"
    words += " --batch_size 24 --micro_batch_size 2 --total_episodes 72"
    words = [*WORDS[RLOO], *words.split()]
    kept = {}
    for world in (1, 2):
        here = fork_tools.copy(folder, tmp_path / str(world))
        (here / "mine.py").write_text(FUNCTION)
        changes = [*changes_of("drop_groups"), shown]
        copy = fork_tools.changed_copy(RLOO, here, *changes, name="my_copy.py")
        run = fork_tools.run_two if world == 2 else lambda *values: [fork_tools.run(*values)]
        for rank, (code, printed, errors) in enumerate(run(copy, words, here)):
            assert code == 0, errors
            kept[world, rank] = [int(x) for x in re.findall("^kept (.*)$", printed, re.M)]
    together = [x + y for x, y in zip(kept[2, 0], kept[2, 1], strict=True)]
    assert together == kept[1, 0]
    assert kept[2, 0] != kept[2, 1]
    assert max(together) < 24
    one, two = (tmp_path / f"{world}/folder/out" for world in (1, 2))
    assert_same_metrics(two, one, "unequal numbers", rel=1e-4, abs=1e-5)
