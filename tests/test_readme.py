"""The documents say what the code and the measured results say."""

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
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS
from run_tools import read_lines
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

import ppo_rlhf
import train_reward

sys.path.append(str(ROOT / "benchmark"))
import readme_tables

PAGES = ("README.md", "benchmark/README.md", "tests/DETAILS.md", "tiny/rewards.py")
PROGRAMS = {"help", "golden", "faults", "script", "num_processes", "multi_gpu", "cpu"}
PROGRAMS |= {"config_file", "no-deps", "check"}  # flags of other programs


def read(page: str) -> str:
    return (ROOT / page).read_text()


def test_tables_are_made_from_the_records() -> None:
    command = [sys.executable, str(ROOT / "benchmark" / "readme_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_records_that_no_table_names_change_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = shutil.copytree(readme_tables.RESULTS, tmp_path / "results")
    for file in results.glob("*.json"):
        file.with_stem(f"{file.stem}-mine").write_text("{}")
    monkeypatch.setattr(readme_tables, "RESULTS", results)
    for name, blocks in readme_tables.BLOCKS.items():
        readme_tables.write(ROOT / name, blocks, check=True)


def test_a_table_that_is_not_that_of_its_records_is_an_error(tmp_path: Path) -> None:
    blocks = readme_tables.BLOCKS["benchmark/README.md"]
    page = tmp_path / "README.md"
    whole = read("benchmark/README.md")
    page.write_text(whole.replace("| PPO | 1 |", "| PPO | 9 |", 1))
    with pytest.raises(SystemExit, match="out of date"):
        readme_tables.write(page, blocks, check=True)
    readme_tables.write(page, blocks, check=False)
    assert page.read_text() == whole
    page.write_text(whole.replace("<!-- /adam -->", ""))
    with pytest.raises(SystemExit, match="0 places for the table adam"):
        readme_tables.write(page, blocks, check=True)


def test_the_first_command_finds_its_labels() -> None:
    """All of tiny/labels, and those that are held out."""
    Accelerator(cpu=True)  # the scripts' logger asks for it
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    labels, held_out = train_reward.load_labels(tokenizer, train_reward.Args())
    assert len(labels) == 4000
    assert len(held_out) == 512


def anchors(text: str) -> set[str]:
    """The names by which a page's headings are linked to."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES[:3])
def test_every_link_leads_to_a_file_and_to_a_part_of_it(page: str) -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", read(page))
    links = [(target, part) for target, part in links if not target.startswith("http")]
    assert links
    for target, part in links:
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if re.fullmatch(r"L\d+", part):
            assert int(part[1:]) <= len(path.read_text().splitlines()), (target, part)
        elif part:
            assert part in anchors(path.read_text()), (target, part)


def commands(page: str) -> list[list[str]]:
    """The words of every command that is shown and runs a script, from its name on."""
    found = []
    blocks = re.findall(r"```bash\n(.*?)```|^    (python .*)$", read(page), re.S | re.M)
    for line in "\n".join(block or line for block, line in blocks).splitlines():
        recipe = re.search(r"\$\(sed 's/#\.\*//' (\S+)\)", line)
        if recipe:
            settings = re.sub("#.*", "", read(recipe[1]))
            line = line.replace(recipe[0], " ".join(settings.split()))
        for command in line.partition("  #")[0].strip(" `").split(" && "):
            words = shlex.split(command) if re.match("(python|accelerate) ", command) else []
            index = next((i for i, word in enumerate(words) if word in SCRIPTS), None)
            if index is not None:
                found.append(words[index:])
    return found


def test_every_command_that_is_shown_is_one_that_the_scripts_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shown = [words for page in PAGES for words in commands(page)]
    for words in re.findall(r"`(--[^`]*)`", read("README.md") + read("tests/DETAILS.md")):
        if " " in words and not re.search(r"golden|faults|script", words):
            shown.append([PPO, *shlex.split(words)])
    assert len(shown) > 10
    monkeypatch.chdir(tmp_path)
    for script, *words in shown:
        if "--help" in words:
            continue
        module = importlib.import_module(script[:-3])
        monkeypatch.setattr(sys, "argv", [script, *words])
        try:
            _, args = module.parse_args()
        except SystemExit:
            pytest.fail(f"{script} {words}: {capsys.readouterr().err}")
        if getattr(args, "reward_fn", None):
            name, _, function = args.reward_fn.partition(":")
            assert callable(getattr(importlib.import_module(name), function))


def test_every_flag_that_is_shown_exists() -> None:
    modules = [importlib.import_module(script[:-3]) for script in SCRIPTS]
    fields = {name for module in modules for name in vars(module.Args())}
    text = "".join(read(page) for page in PAGES)
    flags = set(re.findall(r"(?<![\w-])--(?:no-)?([a-z_]+)", text)) - PROGRAMS
    assert len(flags) > 20
    programs = "".join(path.read_text() for path in (ROOT / "benchmark").glob("*.py"))
    unknown = flags - fields
    assert [flag for flag in unknown if not re.search(rf"\b{flag}\b", programs)] == []


def listed_metrics() -> set[str]:
    """The names in the table of metrics, with their braces expanded."""
    table = read("tests/DETAILS.md").partition("## Metrics")[2].partition("\n## ")[0]
    listed = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.M):
        for word in re.findall(r"`([^`]+)`", cell):
            first, _, rest = word.partition("{")
            middle, _, last = rest.partition("}")
            if not word.startswith("--"):
                listed |= {first + x + last for x in middle.split(",")}
    return listed


def test_every_metric_that_a_run_logs_is_listed_and_no_other(tmp_path: Path) -> None:
    kit = fork_tools.fill(tmp_path / "kit")
    logged = set()
    for script in SCRIPTS:
        words = [*WORDS[script], "--output_dir", script[:-3]]
        if script != REWARD:
            words += "--ptx_coef 1 --ptx_dataset queries.jsonl --eval_every 1".split()
        status, _, errors = fork_tools.run(script, words, kit)
        assert status == 0, errors
        logged |= set(read_lines(kit / script[:-3] / "metrics.jsonl")[0])
    assert logged == listed_metrics()
    assert any(name.startswith("rloo/") for name in logged), RLOO


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 140


def test_reward_functions_of_tiny_score_what_the_scripts_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = importlib.import_module("tiny.rewards")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model", pad_token="<|endoftext|>")
    texts = [("He knelt down.", " He was proud, and full of joy and cheer."), ("She", " wept.")]
    queries = []
    responses = []
    for query, response in texts:
        ids = tokenizer(query).input_ids
        queries.append(ppo_rlhf.Query(ids, ids, {}))
        responses.append(tokenizer(response).input_ids)
    args = ppo_rlhf.Args(reward_fn="tiny.rewards:happy")
    scores, _ = ppo_rlhf.score_by_function(rewards.happy, tokenizer, args, queries, responses)
    assert scores.tolist() == [2.0, 0.0]

    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": len(tokenizer)}
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    config = DistilBertConfig(**sizes, pad_token_id=0, id2label=labels)
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(rewards, "MODEL", str(tmp_path))
    rewards.load.cache_clear()
    scores, _ = ppo_rlhf.score_by_function(rewards.classifier, tokenizer, args, queries, responses)
    rewards.load.cache_clear()
    logits = []
    for query, response in texts:
        ids = torch.tensor([tokenizer(query + response).input_ids])
        logits.append(model(ids).logits[0, 1])
    torch.testing.assert_close(scores, torch.stack(logits))
