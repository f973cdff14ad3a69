"""The READMEs say what the code and the measured results say.

Every row of README.md's table of details names a line and a test. `pytest tests/test_readme.py --faults` puts the row's
fault into the line, in a copy of the project, and runs the row's test there, which has to fail: all rows take several
minutes. Without the option that is done for two.
"""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fork_tools
import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, WORDS
from run_tools import read_lines
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

import ppo_rlhf

sys.path.append(str(ROOT / "benchmark"))
import readme_tables
from readme_tables import DETAILS, Detail

README, BENCHMARK = ((ROOT / name / "README.md").read_text() for name in ("", "benchmark"))
REWARDS = (ROOT / "tiny" / "rewards.py").read_text()
PAGES = {"README.md": README, "benchmark/README.md": BENCHMARK, "tiny/rewards.py": REWARDS}
SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
ALWAYS = (
    "TensorFlow's Adam: eps outside the bias correction",
    "whitening: biased variance, eps 1e-8",
)  # rows whose tests are quick


def test_tables_lines_and_tests_of_details_and_the_size_of_the_diff_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "benchmark" / "readme_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_records_that_no_table_names_change_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = shutil.copytree(readme_tables.RESULTS, tmp_path / "results")
    for file in results.glob("*.json"):
        file.with_stem(f"{file.stem}-mine").write_text("{}")
    monkeypatch.setattr(readme_tables, "RESULTS", results)
    for name, blocks in readme_tables.BLOCKS.items():
        readme_tables.write(ROOT / name, blocks, check=True)


def links(page: str) -> list[tuple[str, str]]:
    """Targets of links, without those on the web, and their parts after #."""
    found = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", PAGES[page])
    return [pair for pair in found if not pair[0].startswith("http")]


@pytest.mark.parametrize("page", ["README.md", "benchmark/README.md"])
def test_every_link_leads_to_a_file_and_to_a_line_of_it(page: str) -> None:
    assert links(page)
    for target, part in links(page):
        path = (ROOT / page).parent / target
        assert path.exists(), target
        if part.startswith("L"):
            assert int(part[1:]) <= len(path.read_text().splitlines()), (target, part)


def commands(page: str) -> list[list[str]]:
    """The words of every command that is shown and runs a script, from its name on."""
    found = []
    for line in PAGES[page].splitlines():
        recipe = re.search(r"\$\(sed 's/#\.\*//' (\S+)\)", line)
        if recipe:
            line = line.replace(recipe[0], " ".join(re.sub("#.*", "", (ROOT / recipe[1]).read_text()).split()))
        for command in line.partition("  #")[0].strip(" `").split(" && "):
            words = command.split()
            if words[:1] in (["python"], ["accelerate"]) or words[1:2] == ["accelerate"]:
                index = next((i for i, word in enumerate(words) if word in SCRIPTS), None)
                found += [] if index is None else [shlex.split(command)[index:]]
    return found


def test_every_command_that_is_shown_is_one_that_the_scripts_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shown = [words for page in PAGES for words in commands(page)]
    shown = [words for words in shown if words[1:] != ["--help"]]
    shown += [shlex.split(words) for words in re.findall(r"`(--[^`]*)`", README) if " " in words]
    assert len(shown) > 10
    for words in shown:
        script, words = (words[0], words[1:]) if words[0] in SCRIPTS else (PPO, words)
        module = importlib.import_module(script[:-3])
        monkeypatch.chdir(tmp_path)  # with no runs
        monkeypatch.setattr(sys, "argv", [script, *words])
        try:
            _, args = module.parse_args()
        except SystemExit:
            pytest.fail(f"{script} {words}: {capsys.readouterr().err}")
        if getattr(args, "reward_fn", None):
            name, _, function = args.reward_fn.partition(":")
            assert name.startswith("my_") or callable(getattr(importlib.import_module(name), function))


def test_every_flag_that_is_shown_exists() -> None:
    fields = {name for script in SCRIPTS for name in vars(importlib.import_module(script[:-3]).Args())}
    others = {"help", "golden", "faults", "num_processes", "multi_gpu", "cpu", "config_file"}  # of other programs
    flags = set(re.findall(r"(?<![\w-])--(?:no-)?([a-z_]+)", README + BENCHMARK)) - others
    assert len(flags) > 20
    programs = "".join(path.read_text() for path in (ROOT / "benchmark").glob("*.py"))
    assert [flag for flag in flags - fields if f'"--{flag}"' not in programs] == []


def test_every_metric_that_a_run_logs_is_listed_and_no_other(tmp_path: Path) -> None:
    table = README.partition("## Metrics")[2].partition("\n## ")[0]
    listed = set()
    for name in re.findall(r"^\| (.*?) \|", table, re.M)[2:]:
        for word in re.findall(r"`([^`]+)`", name):
            first, _, rest = word.partition("{")
            middle, _, last = rest.partition("}")
            listed |= {first + x + last for x in middle.split(",")}
    kit, logged = fork_tools.fill(tmp_path / "kit"), set()
    for script in (PPO, REWARD):
        more = "--ptx_coef 1 --ptx_dataset queries.jsonl --eval_every 1".split() if script == PPO else []
        status, _, errors = fork_tools.run(script, [*WORDS[script], *more, "--output_dir", script[:-3]], kit)
        assert status == 0, errors
        logged |= set(read_lines(kit / script[:-3] / "metrics.jsonl")[0])
    assert logged == listed


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_the_reward_function_that_is_shown_stands_in_tiny() -> None:
    shown = re.search(r"```python\n(.*?)```", README, re.S)[1]
    functions = [node for node in ast.parse(REWARDS).body if isinstance(node, ast.FunctionDef)]
    for node in functions:
        del node.body[0]  # its docstring
    assert ast.dump(ast.parse(shown).body[0]) in map(ast.dump, functions)


def test_reward_functions_of_tiny_score_what_the_scripts_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = importlib.import_module("tiny.rewards")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model", pad_token="<|endoftext|>")
    texts = [("He knelt down.", " He was proud, and full of joy and cheer."), ("She", " wept.")]
    queries = [{"input_ids": tokenizer(query).input_ids} for query, _ in texts]
    responses = [tokenizer(response).input_ids for _, response in texts]
    args = ppo_rlhf.Args(reward_fn="tiny.rewards:happy")
    assert ppo_rlhf.score(rewards.happy, queries, responses, tokenizer, args).sum(1).tolist() == [2.0, 0.0]
    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": len(tokenizer)}
    config = DistilBertConfig(**sizes, pad_token_id=0, id2label={0: "NEGATIVE", 1: "POSITIVE"})
    model = DistilBertForSequenceClassification(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    monkeypatch.setattr(rewards, "MODEL", str(tmp_path))
    rewards.load.cache_clear()
    scores = ppo_rlhf.score(rewards.classifier, queries, responses, tokenizer, args)
    rewards.load.cache_clear()
    logits = [model(torch.tensor([tokenizer(query + response).input_ids])).logits[0, 1] for query, response in texts]
    torch.testing.assert_close(scores.sum(1), torch.stack(logits))


# Faults


def start(details: list[Detail], folder: Path) -> subprocess.Popen:
    """The tests of some rows in a copy of the project with their faults; without a row, the tests of all, no fault."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "wandb", "*.egg-info", "results")
    shutil.copytree(ROOT, folder, ignore=ignored)
    for detail in details:
        path = folder / detail.script
        path.write_text(path.read_text().replace(detail.text, detail.fault))
    nodes = dict.fromkeys(detail.node for detail in details or DETAILS)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *nodes]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_every_fault_can_be_made() -> None:
    for detail in DETAILS:
        source = (ROOT / detail.script).read_text()
        assert source.count(detail.text) == 1 and "\n" not in detail.text, detail.what
        assert (broken := source.replace(detail.text, detail.fault)) != source, detail.what
        ast.parse(broken)


def test_a_fault_in_the_line_of_a_detail_makes_its_test_fail(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("--faults", default=False)
    todo = [detail for detail in DETAILS if every or detail.what in ALWAYS]
    assert len(todo) >= len(ALWAYS)
    passed = []
    if every:
        whole = start([], tmp_path / "whole")
        printed, _ = whole.communicate(timeout=1800)
        assert whole.returncode == 0, printed
    for pair in (todo[i : i + 2] for i in range(0, len(todo), 2)):
        runs = [start([detail], tmp_path / str(todo.index(detail))) for detail in pair]
        for detail, run in zip(pair, runs, strict=True):
            printed, _ = run.communicate(timeout=900)
            if run.returncode != 1 or " error" in printed.splitlines()[-1]:  # 1: a test failed, not 2 to 5
                passed.append(f"{detail.what}: {detail.node} with the fault {detail.fault!r}: {printed[-500:]}")
            shutil.rmtree(tmp_path / str(todo.index(detail)))
    assert not passed, "\n".join(passed)
