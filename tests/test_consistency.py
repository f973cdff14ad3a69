"""The scripts are copies on purpose: what they share is the same to the letter."""

import ast
import functools
import itertools
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from density import measure
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PPO, RLOO, REWARD = SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
PAIRS = list(itertools.combinations(SCRIPTS, 2))
MAX_TOKENS = {PPO: 5_985, RLOO: 5_260, REWARD: 3_620}
MAX_LINES = {PPO: 931, RLOO: 829, REWARD: 590}
MAX_PLUMBING = 320  # lines of a file of plumbing/
MAX_PLUMBING_LINES, MAX_PLUMBING_TOKENS = 1_450, 9_370  # of all its files
MAX_DIFF = 190  # changed lines between PPO and RLOO
MAX_MAIN = 100
# Names that stand for something else in each script. The rules for Args and PRESETS are below.
OWN = {"Args", "Batch", "main", "forward", "PRESETS", "OPENAI", "BOOKS", "POSTS", "NEWS"}
DIFFERENT_FIELDS = {  # between train_reward.py and the others, and why
    "base_model": "a policy starts from it, or a reward model",
    "batch_size": "counts episodes, or comparisons",
    "long_queries": "labels have prompts, too",
    "lr": "supervised learning of a new head takes larger steps",
    "micro_batch_size": "counts rows, or labels",
    "query_dataset": "is for training, or sets gain and bias",
    "response_length": "labels are cut to it, too",
    "truncate_token": "ends what is sampled, or what people compared",
}
SECTIONS = """the algorithm, optimizer, and sums over processes, checks, rollout and scoring,
forward passes, models""".replace("\n", " ")


def read(script):
    return (ROOT / script).read_text()


@functools.cache
def definitions(script):
    """Source of every top-level function, class and constant by its name, with decorators and the
    comment right above."""
    text = read(script)
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        start = node.lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
            start = min([start, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        else:
            continue
        while re.match("# (?!---)", lines[start - 2]):
            start -= 1
        source = "\n".join(lines[start - 1 : node.end_lineno])
        assert name not in found, f"{script} defines {name} twice"
        found[name] = source
    return found


@functools.cache
def arguments(script):
    """Source of every field of Args, with its type, default and help."""
    text = definitions(script)["Args"] + "\n"
    pattern = r"((?:    # .*\n)*    (\w+): .*\n(?:    [ )\]].*\n)*)"  # also of several lines
    return {name: field for field, name in re.findall(pattern, text)}


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_shared_names_are_identical_to_the_letter(one, other):
    mine = definitions(one)
    theirs = definitions(other)
    shared = sorted((set(mine) & set(theirs)) - OWN)
    assert len(shared) > (10 if other == REWARD else 25)
    assert [name for name in shared if mine[name] != theirs[name]] == []


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_args_of_one_name_agree_in_type_default_and_help(one, other):
    mine = arguments(one)
    theirs = arguments(other)
    differ = {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
    assert differ == (set(DIFFERENT_FIELDS) if other == REWARD else set())
    for field in [*mine.values(), *theirs.values()]:
        assert "  # " in field, "every field has its help in a comment"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_read(script):
    shared = [path.read_text() for path in ROOT.glob("plumbing/*.py")]
    text = "".join([read(script), *shared])
    for name in arguments(script):
        is_read = rf"args\.{name}\b|[\"']{name}[\"'][,)]|\b{name}\b.*\.split\(\)|\(\"{name}\""
        assert re.search(is_read, text), f"nothing reads --{name}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_size_and_density_of_the_scripts(script):
    assert len(read(script).splitlines()) <= MAX_LINES[script]
    assert len(definitions(script)["main"].splitlines()) <= MAX_MAIN
    density = measure(read(script))
    assert density.tokens <= MAX_TOKENS[script]
    assert density.mean <= 10.5
    assert density.p90 <= 20
    assert density.longest <= 40
    assert density.long_statements <= 0.05


@pytest.mark.parametrize("path", sorted(ROOT.glob("plumbing/*.py")), ids=lambda path: path.name)
def test_size_of_the_plumbing(path):
    assert len(path.read_text().splitlines()) <= MAX_PLUMBING


def test_size_of_all_the_plumbing():
    texts = [path.read_text() for path in ROOT.glob("plumbing/*.py")]
    assert sum(len(text.splitlines()) for text in texts) <= MAX_PLUMBING_LINES
    assert sum(measure(text).tokens for text in texts if len(text) > 100) <= MAX_PLUMBING_TOKENS


OTHERS = [ROOT / "tf_adam.py", *ROOT.glob("plumbing/[a-z]*.py"), *ROOT.glob("tests/**/*.py")]
# throughput.py installs releases of TRL in benchmark/speed/.trl
OTHERS += [path for path in ROOT.glob("benchmark/**/*.py") if ".trl" not in path.parts]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_density_of_all_other_files(path):
    assert measure(path.read_text()).mean <= 11


@pytest.mark.parametrize("script", SCRIPTS)
def test_order_of_a_script(script):
    lines = read(script).splitlines()
    sections = [line.strip("# -") for line in lines if line.startswith("# --- ")]
    expected = SECTIONS
    if script == REWARD:
        expected = SECTIONS.replace("checks, rollout and scoring", "sampling")
        expected = expected.replace("models", "results")
    assert ", ".join(sections) == f"{expected}, entry point"


def test_the_steps_of_main_are_the_same():
    ppo, rloo, reward = (
        re.findall(r"^ +# (\d\. .*)", definitions(script)["main"], re.M) for script in SCRIPTS
    )
    assert [step[0] for step in ppo] == ["1", "2", "3", "4", "5", "6", "7"]
    assert ppo == rloo
    assert len(reward) > 2
    assert reward == sorted(reward)


def test_the_diff_of_ppo_and_rloo_is_small():
    command = ["diff", ROOT / PPO, ROOT / RLOO]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    changed = [line for line in printed.splitlines() if line[:1] in "<>"]
    assert 50 < len(changed) <= MAX_DIFF


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_header_of_a_script_asks_for_what_the_project_asks_for(script):
    """PEP 723: `uv run` reads it."""
    (block,) = re.findall(r"^# /// script\n(.*?)^# ///$", read(script), re.M | re.S)
    header = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header["requires-python"] == project["requires-python"]
    assert sorted(header["dependencies"]) == sorted(project["dependencies"])


def test_what_is_installed_is_within_the_bounds_that_the_project_names():
    """So these tests have run with the lowest version of what has narrow bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        assert requirement.specifier.contains(version(requirement.name)), requirement


def test_scripts_stand_on_tf_adam_and_plumbing_which_imports_no_script():
    modules = {path.stem for path in ROOT.glob("*.py")} | {"plumbing"}
    for script in SCRIPTS:
        imported = set(re.findall(r"^ *(?:from|import) (\w+)", read(script), re.M))
        assert imported & modules == {"tf_adam", "plumbing"}
    for path in ROOT.glob("plumbing/*.py"):
        imported = set(re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M))
        assert imported & modules <= {"plumbing"}
