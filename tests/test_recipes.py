"""Recipes: published settings of other systems are command lines that the scripts take, and run."""

import json
import re

import fork_tools
import pytest
from conftest import ROOT
from fork_tools import PPO, RLOO

RECIPES = {path.stem: path for path in sorted((ROOT / "benchmark" / "recipes").glob("*.args"))}
SMALL = "--batch_size 16 --total_episodes 32 --micro_batch_size 16 --ptx_dataset queries.jsonl"


def lines(name: str) -> list[list[str]]:
    """Flag and values of every line; what stands after # is the source."""
    found = [re.sub("#.*", "", line).split() for line in RECIPES[name].read_text().splitlines()]
    return [words for words in found if words]


def test_there_is_a_recipe_of_every_system() -> None:
    systems = ["deepspeed_chat", "instructgpt", "llama2", "qwen", "trl_0.9", "trl_rloo"]
    assert list(RECIPES) == systems
    assert all("arXiv" in path.read_text() or "TRL" in path.read_text() for path in RECIPES.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_for_two_updates_with_its_settings(name: str) -> None:
    script, kit = RLOO if "rloo" in name else PPO, fork_tools.kit()
    words = [*(word for line in lines(name) for word in line), *fork_tools.COMMON.split(), *fork_tools.RL.split()]
    folder = kit.with_name(f"recipe-{name}")
    mine = ["--output_dir", str(folder), *SMALL.split()]
    given = {word.lstrip("-") for word in [*fork_tools.COMMON.split(), *fork_tools.RL.split(), *mine]}
    status, _, errors = fork_tools.run(script, [*words, *mine], kit)
    assert status == 0, errors
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    args = json.loads((folder / "args.json").read_text())["args"]
    for flag, *values in lines(name):
        field = flag[2:].removeprefix("no-")
        if field in given:
            continue  # so that it is small
        if not values:
            assert args[field] is not flag.startswith("--no-"), flag
        else:
            made = args[field] if isinstance(args[field], list) else [args[field]]
            wanted = [None if x == "none" else type(y)(x) for x, y in zip(values, made, strict=True)]
            assert made == wanted, flag
