"""The scripts are copies on purpose: what they share is the same to the letter, and their diff is the algorithm."""

import ast
import dataclasses
import importlib
import itertools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py"]
FREE = {"Args", "main", "PRESETS", "HUB", "BOOK", "POST", "NEWS"}  # these differ, under the rules below
PAIRS = list(itertools.combinations(SCRIPTS, 2))
MAX_LINES = {"ppo_rlhf.py": 880, "rloo_rlhf.py": 820, "train_reward.py": 700}  # with every option of the literature
MAX_DEFINITIONS, MAX_FUNCTION, MAX_MAIN, MAX_DIFF = 52, 60, 130, 150
ALLOWED = {  # fields of one name that differ between train_reward.py and the others, and why
    "base_model": "one starts a policy from it, the other a reward model",
    "batch_size": "counts episodes here, comparisons there",
    "lr": "supervised learning of a new head takes larger steps",
}


def definitions(script: str) -> dict[str, str]:
    """Source of every top-level function, class and constant, with decorators and the comments right above it."""
    text = (ROOT / script).read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, start = node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, start = node.targets[0].id, node.lineno
        else:
            continue
        while lines[start - 2].startswith("#"):
            start -= 1
        assert name not in found, f"{script} defines {name} twice"
        found[name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_shared_names_are_identical_to_the_letter(one: str, other: str) -> None:
    mine, theirs = definitions(one), definitions(other)
    shared = sorted((set(mine) & set(theirs)) - FREE)
    assert len(shared) > 20
    assert [name for name in shared if mine[name] != theirs[name]] == []


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_args_of_one_name_agree_in_type_default_and_help(one: str, other: str) -> None:
    helps, fields = {}, {}
    for script in (one, other):
        module = importlib.import_module(script[:-3])
        fields[script] = {field.name: (str(field.type), field.default) for field in dataclasses.fields(module.Args)}
        helps[script] = dict(re.findall(r"^    (\w+): .*?  # (.*)$", definitions(script)["Args"], re.M))
        assert set(helps[script]) == set(fields[script]), "every field has its help in a comment"
    for name in set(fields[one]) & set(fields[other]):
        same = (fields[one][name], helps[one][name]) == (fields[other][name], helps[other][name])
        assert same != (other == "train_reward.py" and name in ALLOWED), f"{name} differs, or is to leave ALLOWED"


def test_the_banners_come_in_the_same_order() -> None:
    ppo, rloo, reward = (re.findall(r"^ +# (\d\. \w+)", definitions(script)["main"], re.M) for script in SCRIPTS)
    assert [banner[0] for banner in ppo] == ["1", "2", "3", "4", "6", "7"] and ppo == rloo
    assert reward == sorted(reward)


def test_the_diff_of_ppo_and_rloo_is_small() -> None:
    done = subprocess.run(["diff", *SCRIPTS[:2]], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = [line for line in done.stdout.splitlines() if line[:1] in ("<", ">")]
    assert 50 < len(changed) <= MAX_DIFF


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_read(script: str) -> None:
    text = (ROOT / script).read_text() + (ROOT / "tf_adam.py").read_text()
    for name in re.findall(r"^    (\w+): .*?  # ", definitions(script)["Args"], re.M):
        assert re.search(rf"args\.{name}\b|\"{name}\"[,)]", text), f"nothing reads --{name}"


@pytest.mark.parametrize("script", [*SCRIPTS, "tf_adam.py"])
def test_files_and_functions_stay_short_and_have_docstrings(script: str) -> None:
    text = (ROOT / script).read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES.get(script, 100)
    assert sum(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body) <= MAX_DEFINITIONS
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert ast.get_docstring(node) or node.name.startswith("__"), node.name
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < (MAX_MAIN if node.name == "main" else MAX_FUNCTION), node.name


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loop_is_on_the_second_page_and_the_algorithm_after_it(script: str) -> None:
    lines = (ROOT / script).read_text().splitlines()
    main = next(i for i, line in enumerate(lines, 1) if line.startswith("def main("))
    algorithm, rollout = (next(i for i, x in enumerate(lines, 1) if x.startswith(f"# --- {name}"))
                          for name in ("the algorithm", "rollout"))  # fmt: skip
    assert main < 150 and algorithm < 260 and rollout < 380
    sections = [line.strip("- #") for line in lines if line.startswith("# --- ")]
    assert sections == ["the algorithm", "rollout", "forward passes", "models and data", "the run's folder"]


def test_presets_of_one_name_agree_on_the_task() -> None:
    modules = [importlib.import_module(script[:-3]) for script in SCRIPTS]
    for one, other in itertools.combinations(modules, 2):
        assert list(one.PRESETS) == list(other.PRESETS)
        for name in one.PRESETS:
            mine, theirs = vars(one.PRESETS[name]), vars(other.PRESETS[name])
            task = {"query_dataset", "query_length", "query_prefix", "query_suffix", "start_text", "end_text"}
            task |= {"response_length", "temperature", "truncate_token", "token_ids_of", "base_model"}
            if "train_reward" not in (one.__name__, other.__name__):  # all but what the algorithm has of its own
                task = (mine.keys() & theirs.keys()) - {"whiten_rewards"}
            assert {x: mine[x] for x in task} == {x: theirs[x] for x in task}, name


def test_nothing_but_tf_adam_is_imported_between_the_scripts() -> None:
    for script in SCRIPTS:
        imported = set(re.findall(r"^ *(?:from|import) (\w+)", (ROOT / script).read_text(), re.M))
        assert imported & {path.stem for path in ROOT.glob("*.py")} == {"tf_adam"}
