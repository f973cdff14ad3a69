"""Single tokens and columns: BOS, EOS and one-token flags; which column is the query; parts of a
table on the hub."""

from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from accelerate import Accelerator
from tiny_models import save_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import ppo_rlhf
import rloo_rlhf
import train_reward

SCRIPTS = pytest.mark.parametrize("module", [ppo_rlhf, rloo_rlhf, train_reward])
WORDS = {"?": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, ".": 5, "eos": 6}


def make_tokenizer(around: str, **special: str) -> Any:
    """A tokenizer of WORDS, which may put some of them around every text."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pairs = [(word, WORDS[word]) for word in around.split() if word != "$A"]
    tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=pairs)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    ("around", "begin"), [("$A", []), ("<s> $A", [1]), ("$A </s>", []), ("<s> $A </s>", [1])]
)
@pytest.mark.parametrize("bos_token", ["<s>", "?", None])
@SCRIPTS
def test_what_stands_before_a_text_is_bos_and_what_stands_behind_is_left_out(
    module: ModuleType, bos_token: str | None, around: str, begin: list[int]
) -> None:
    """Whatever the tokenizer calls BOS: an unknown word may have that name, as GPT-2's end."""
    tokenizer = make_tokenizer(around, eos_token="</s>")
    if bos_token:
        tokenizer.bos_token = bos_token
    assert module.bos(tokenizer) == begin
    assert module.encode("a b", tokenizer) == [3, 4]
    assert module.encode("new b", tokenizer) == [0, 4]
    assert module.encode([1, 3, 4], tokenizer) == ([3, 4] if begin else [1, 3, 4])
    args = module.Args(truncate_token="eos")
    assert module.token_id("truncate_token", tokenizer, args) == 2
    for text in (".", "</s>", "a"):
        args.truncate_token = text
        assert module.token_id("truncate_token", tokenizer, args) == WORDS[text]
    args.truncate_token = "a b"
    with pytest.raises(
        module.UserError, match=r"^--truncate_token 'a b' must be one token, .*3, 4"
    ):
        module.token_id("truncate_token", tokenizer, args)
    args.truncate_token = " a"  # a text that is no word of the vocabulary
    assert module.token_id("truncate_token", tokenizer, args) == 3


COLUMNS = "query prompt question instruction messages conversations text article content".split()


@pytest.mark.parametrize("first", range(len(COLUMNS)))
def test_queries_are_the_first_column_that_there_is_of(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    row: dict[str, Any] = {"other": "w40"}
    for i in reversed(range(first, len(COLUMNS))):
        row[COLUMNS[i]] = f"w{i + 1}"
    for name in {"messages", "conversations"} & row.keys():
        row[name] = [{"role": "user", "content": row[name]}]
    splits = {"train": datasets.Dataset.from_list([row])}
    monkeypatch.setattr(ppo_rlhf, "load_table", lambda flag, args: splits)
    args = ppo_rlhf.Args(start_text=None, end_text=None)
    Accelerator(cpu=True)
    (query,) = ppo_rlhf.load_queries("query_dataset", args, tokenizer, 9)
    assert query.input_ids == [first + 1]


@pytest.mark.parametrize(
    ("name", "expected", "rows"),
    [
        ("an/owner:part", ("an/owner", "part"), {"train": 1, "test": 2}),
        ("an/owner", ("an/owner", None), {"train": 1, "test": 2}),
        ("an/owner:part:test", ("an/owner", "part"), {"train": 2}),
        ("an/owner::test", ("an/owner", None), {"train": 2}),
        ("an/owner::train", ("an/owner", None), {"train": 1}),
        ("an/owner::other", ("an/owner", None), None),
    ],
)
def test_config_and_split_of_a_table_on_the_hub_are_passed_on(
    name: str, expected: tuple[str, ...], rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load(*names: str) -> dict[str, Any]:
        calls.append(names)
        table = datasets.Dataset.from_list([{"text": "w1"}, {"text": "w2"}])
        return {"train": table.select([0]), "test": table}

    monkeypatch.setattr(ppo_rlhf.datasets, "load_dataset", load)
    args = ppo_rlhf.Args(query_dataset=name)
    if rows is None:
        says = f"^--query_dataset {name} has .'train', 'test'.: name one"
        with pytest.raises(ppo_rlhf.UserError, match=says):
            ppo_rlhf.load_table("query_dataset", args)
    else:
        splits = ppo_rlhf.load_table("query_dataset", args)
        assert {split: len(table) for split, table in splits.items()} == rows
    assert calls == [expected]
