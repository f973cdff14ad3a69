"""What the scripts make of queries, labels and preferences: prompts, chats, BOS, EOS, long texts,
reward functions."""

import colorsys
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hub_tools import byte_words
from run_tools import to_lines
from tiny_models import make_responses, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ppo_rlhf
import rloo_rlhf
import train_reward

SCRIPTS = (ppo_rlhf, rloo_rlhf, train_reward)
Row = dict[str, Any]
Rows = list[Row]
Chat = list[dict[str, str]]
EOS = 0
BOS = 1
PAD = 50_259

MARKS = ["<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
MARKS += ["<|eot_id|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"]


def turn(word: str, role: str = "assistant") -> Chat:
    """A chat of one message."""
    return [{"role": role, "content": word}]


HUMAN = "\n\nHuman: Is it far?\n\nAssistant:"
PAIR = {
    "prompt": "w5",
    "chosen": "w6",
    "rejected": "w7",
}
LABEL = {
    "query": [5],
    "sample0": [6],
    "sample1": [7],
    "best": 1,
}
READ = ([5], [6], [7])  # PAIR, by read_labels


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose tokenizer begins no text with BOS and pads with EOS, and a Llama, whose
    tokenizer does neither; and a tokenizer of bytes and MARKS, which begins texts with BOS."""
    folder = tmp_path_factory.mktemp("models")
    specials = {
        "gpt2": {"bos_token": "<|endoftext|>"},
        "llama": {"bos_token": "w1", "pad_token": "w49"},
    }
    for name, special in specials.items():
        path = save_model(folder / name, name)
        tokenizer = AutoTokenizer.from_pretrained(path, **special)
        if name == "llama":
            begin = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", BOS)])
            tokenizer.backend_tokenizer.post_processor = begin
        tokenizer.save_pretrained(folder / name)
    vocabulary = {word: i for i, word in enumerate([*MARKS, *byte_words()])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    begin = [(MARKS[BOS], BOS)]
    backend.post_processor = processors.TemplateProcessing(f"{MARKS[BOS]} $A", special_tokens=begin)
    special = {"eos_token": MARKS[EOS], "bos_token": MARKS[BOS]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder / "bytes")
    return folder


@pytest.fixture(autouse=True)
def here(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to be in, with the models."""
    for folder in folders.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # to which --reward_fn adds
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    Accelerator(cpu=True)


def words(*tokens: int) -> str:
    """The text of these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def start(script: Any, chat: str | None = None, **changes: Any) -> tuple[Any, Any]:
    """Tokenizer and Args; a list of rows in their place becomes a file."""
    given = {
        "base_model": "gpt2",
        "start_text": None,
        "end_text": None,
        "truncate_token": None,
        "query_length": 8,
        "response_length": 6,
    }
    given |= {"batch_size": 2} if script is train_reward else {"eval_queries": 1}
    given |= changes
    for name, x in given.items():
        if isinstance(x, list):
            Path(f"{name}.jsonl").write_text(to_lines(*x))
            given[name] = f"{name}.jsonl"
    args = script.Args(**given)
    tokenizer = script.load_tokenizer("base_model", args)
    tokenizer.chat_template = chat
    return tokenizer, args


def read_queries(
    rows: Rows, chat: str | None = None, part: str = "input_ids", **changes: Any
) -> list[list[int]]:
    """What all three scripts make of these rows, in the order of its tokens."""
    found = []
    for script in SCRIPTS:
        tokenizer, args = start(script, chat, query_dataset=rows, **changes)
        queries = script.load_queries("query_dataset", args, tokenizer, 1_000)
        found.append([vars(query) for query in queries])
    assert found[0] == found[1] == found[2]
    return sorted(query[part] for query in found[0])


def read_query(row: Row, chat: str | None = None, **changes: Any) -> list[int]:
    """The same of one row."""
    (query,) = read_queries([row], chat, **changes)
    return query


def load_labels(chat: str | None = None, **changes: Any) -> Any:
    """Labels to train on, and held-out ones."""
    tokenizer, args = start(train_reward, chat, **changes)
    return train_reward.load_labels("label_dataset", args, tokenizer)


def read_labels(rows: Rows, chat: str | None = None, **changes: Any) -> Any:
    """Query, best response and the others of every label. A last row is held out, and read too."""
    given = {"num_labels": len(rows), "label_dataset": [*rows, rows[0]]} | changes
    labels, _ = load_labels(chat, **given)
    found = []
    for label in labels:
        responses = list(label.responses)
        found.append((label.query, responses.pop(label.best), *responses))
    return found


def read_label(row: Row, chat: str | None = None, **changes: Any) -> Any:
    """The same of one row, in a batch of two."""
    label, same = read_labels([row, row], chat, **changes)
    assert label == same
    return label


def refuse(read: Any, rows: Row | Rows, *says: str, chat: Any = None, **changes: Any) -> None:
    """The rows, or labels like this one, are refused, with the flag, in a line of these words."""
    flag = "--query_dataset" if read is read_queries else "--label_dataset"
    if isinstance(rows, dict):
        rows = [rows] if read is read_queries else [rows, rows]
    with pytest.raises(ppo_rlhf.UserError) as caught:
        read(rows, chat, **changes)
    text = " ".join(str(caught.value).split())
    assert text.startswith(flag), text
    assert all(x in text for x in says), text


# --- queries --------------------------------------------------------------------------------------
def test_a_text_begins_with_bos_once_and_token_ids_that_are_none_stay() -> None:
    """All else about it is in the twins' runs."""
    llama = {"base_model": "llama"}
    rows = [
        {"query": "w5 w6"},
        {"query": "w1 w7"},
    ]
    assert read_queries(rows, **llama) == [[BOS, 5, 6], [BOS, 7]]
    around = {"query_prefix": "w30", "query_suffix": "w31"}
    found = read_queries(rows, part="context", **llama, **around)
    assert found == [[BOS, 30, 5, 6, 31], [BOS, 30, 7, 31]]
    rows = [
        {"query": [EOS, 5, PAD]},
        {"query": [6, EOS, 8]},
        {"query": [BOS, 7, PAD]},
    ]
    found = read_queries(rows, **llama)
    assert found == [[BOS, EOS, 5], [BOS, 6, EOS, 8], [BOS, 7]]
    assert read_label(LABEL | {"sample1": [EOS, PAD]}) == ([5], [EOS], [6])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (50_257, [5]),
        (50_259, [5]),
        (50_260, [5, PAD]),
        (60_000, [5, PAD]),
    ],
)
def test_the_padding_of_gpt2s_ids_is_a_token_of_larger_models(
    size: int, expected: list[int]
) -> None:
    words = {"a": 0} | {f"w{i}": i for i in range(1, size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for script in SCRIPTS:
        assert script.encode([5, PAD], tokenizer) == expected


def test_a_template_that_lacks_or_refuses_is_an_error_of_its_row() -> None:
    rows = [{"prompt": FAR}]
    says = "row 0: chat template: "
    refuse(read_queries, rows, says, "chat_template is not set")
    refuse(read_labels, CHATS, says, "chat_template is not set")
    refuse(read_queries, rows, says, "no roles", chat="{{ raise_exception('no roles') }}", **BYTES)


def test_the_first_query_and_label_are_shown_as_they_are_read(
    capsys: pytest.CaptureFixture,
) -> None:
    """A template that is cut, or a column that is ignored, can be seen."""
    given = {
        "query_dataset": [{"text": "w5 w6"}],
        "query_suffix": "w9",
        "base_model": "llama",
    }
    tokenizer, args = start(ppo_rlhf, **given)
    ppo_rlhf.load_queries("query_dataset", args, tokenizer, 1)
    assert "--query_dataset: 1 of 1 rows, first 'w1 w5 w6 w9'\n" in capsys.readouterr().out
    rows = [{"question": "w5", "chosen": "w6", "rejected": "w7"}] * 4
    labels, _ = load_labels(label_dataset=rows, base_model="llama")
    texts = ["w1 w5", *[words(*row) for row in labels[0].responses]]
    assert sorted(texts[1:]) == ["w6", "w7"]
    says = f"--label_dataset: 4, first {texts}, best is {labels[0].best}\n"
    assert says in capsys.readouterr().out


NONE_LEFT = "--query_dataset: no query is left: see --query_length, --start_text, --end_text"
EMPTY = "'left out, for an empty or too long prompt, or an empty answer'"
NO_IDS = "neither text, nor chat, nor ids of this tokenizer: "
BAD_QUERIES = [
    ({"prompt": ["w5", "w6"]}, NO_IDS),
    ({"text": 3}, NO_IDS),
    ({"text": 0.5}, NO_IDS),
    ({"query": [[5]]}, NO_IDS),
    ({"query": [5, 50]}, NO_IDS),
    ({"query": [5, -1]}, NO_IDS),
    ({"query": [5, None]}, NO_IDS),
    ({"words": "w5"}, "a row needs one of the columns ['query', "),
    ({"text": None}, NONE_LEFT),
    ({"text": ""}, NONE_LEFT),
    ({"text": words(*[5] * 9)}, NONE_LEFT),
]


@pytest.mark.parametrize(("row", "says"), BAD_QUERIES)
def test_queries_that_are_none_are_refused_in_a_line(row: Any, says: str) -> None:
    refuse(read_queries, [row] * 3, says)
    if says != NONE_LEFT:
        refuse(read_queries, row, f"--query_dataset query_dataset.jsonl, row 0: {says}")


def test_a_table_is_a_split_that_is_named_or_train() -> None:
    """A folder has files of one kind."""
    for folder, names in (("set", ["test.jsonl", "validation.jsonl"]), ("mixed", ["a.csv"])):
        Path(folder).mkdir()
        for i, name in enumerate([*names, "train.jsonl"]):
            Path(folder, name).write_text(to_lines({"text": f"w{i + 5}"}))
    for name, word in (("set", "w7"), ("set::test", "w5"), ("set::validation", "w6")):
        splits = ppo_rlhf.load_table("query_dataset", ppo_rlhf.Args(query_dataset=name))
        assert splits["train"]["text"][:] == [word]
        assert ("test" in splits) == (name == "set"), "a split that is named is the only one"
    Path("set").rename("a:b")
    splits = ppo_rlhf.load_table("query_dataset", ppo_rlhf.Args(query_dataset="a:b"))
    assert splits["train"]["text"][:] == ["w7"], "a folder that exists is no name with a split"
    Path("a:b").rename("set")
    Path("set/train.jsonl").unlink()
    for name, has in (("set", "'json', .*'test'"), ("set::no", "'json', "), ("mixed", "'csv'.*")):
        says = rf"^--query_dataset \S*{name} has \[.*{has}.*\]: name one, as in data::test$"
        with pytest.raises(ppo_rlhf.UserError, match=says):
            ppo_rlhf.load_table("query_dataset", ppo_rlhf.Args(query_dataset=name))


# Start, end, length, what happens to longer ones, and the query, of 1 2 3 4 5
CUTS = """
- - 5 drop        1 2 3 4 5
- - 4 drop
- - 4 keep_start  1 2 3 4
- - 4 keep_end    2 3 4 5
2 - 3 drop        3 4 5
2 - 2 keep_start  3 4
5 - 5 drop        1 2 3 4 5
6 - 5 drop
- 3 5 drop        1 2 3
- 3 2 keep_start
2 4 5 drop        3 4
2 2 5 drop
"""


@pytest.mark.parametrize("cut", CUTS.strip().splitlines())
def test_a_query_is_cut_at_start_and_end(cut: str) -> None:
    """All, where nothing is behind the start; nothing, where there is no start or end."""
    start, end, length, long, *query = cut.split()
    known = {"-": None} | {str(i): i for i in range(9)}
    found = ppo_rlhf.cut_query([1, 2, 3, 4, 5], int(length), known[start], known[end], long)
    assert found == [int(token) for token in query]


def test_starts_are_the_first_and_ends_the_last() -> None:
    assert ppo_rlhf.cut_query([9, 1, 2, 9, 3, 9, 4], 9, 9, 9, "drop") == [1, 2, 9, 3, 9]


def test_the_seed_orders_queries_and_more_are_not_read() -> None:
    rows = [{"text": words(5 + i)} for i in range(40)]
    orders = []
    for seed in (1, 2):
        tokenizer, args = start(ppo_rlhf, query_dataset=rows, seed=seed)
        for need in (40, 25, 10):
            queries = ppo_rlhf.load_queries("query_dataset", args, tokenizer, need)
            orders.append([query.input_ids[0] for query in queries])
        assert orders[-3][:25] == orders[-2]
        assert orders[-3][:10] == orders[-1]
        assert len(set(orders[-3])) == 40
    assert orders[0] != orders[3] != sorted(orders[3])


def test_without_samples_one_query_is_read() -> None:
    tokenizer, args = start(train_reward, query_dataset=[{"text": "w5"}, {"text": "w6"}])
    assert len(train_reward.load_queries("query_dataset", args, tokenizer, 0)) == 1


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_no_query_is_held_out_and_trained_on(script: Any) -> None:
    queries = [script.Query([i], [i], {}) for i in (5, 6, 7, 5, 8, 6)]
    held_out, others = script.hold_out(queries, 2)
    assert [query.context for query in held_out] == [[5], [6]]
    assert [query.context for query in others] == [[7], [8]]


# --- labels ---------------------------------------------------------------------------------------
BEGINS = [
    (HUMAN, " No, near.", " Yes."),
    ("It is", " bread", " break"),
    ("Q?\nA:", "\nYes", "\nNo"),
    ("", "Yes", "Yes, sir"),
]


def split_of(row: dict[str, Any]) -> list[str]:
    """Texts of prompt, chosen and rejected."""
    tokenizer, args = start(train_reward, base_model="bytes", query_length=99, response_length=99)
    end = train_reward.token_id("truncate_token", tokenizer, args)
    read = train_reward.read_preference(row, end, Counter(), tokenizer, args)
    return tokenizer.batch_decode(list(read))


@pytest.mark.parametrize(("begin", "chosen", "rejected"), BEGINS)
def test_the_common_beginning_of_two_texts_up_to_a_word_is_their_prompt(
    begin: str, chosen: str, rejected: str
) -> None:
    """The raw form of Anthropic's HH: the dialogues stand whole in both columns. A prompt that is
    given stays whole; if both answers repeat it, it is read once."""
    answers = [begin + chosen, begin + rejected]
    row = {"chosen": answers[0], "rejected": answers[1]}
    assert split_of(row) == [begin, chosen, rejected]
    for prompt in ("", None):
        assert split_of(row | {"prompt": prompt}) == ["", *answers]
    rest = [answer[len(begin[:2]) :] for answer in answers]
    assert split_of(row | {"prompt": begin[:2]}) == [begin[:2], *rest]
    row["prompt"] = "How? "
    assert split_of(row) == ["How? ", *answers]
    row["chosen"] = "How? " + chosen
    assert split_of(row) == ["How? ", row["chosen"], answers[1]]


def test_each_row_says_whether_both_answers_repeat_its_prompt() -> None:
    """An answer that begins like the prompt by chance, beside one that does not, stays whole."""
    repeated = PAIR | {"chosen": "w5 w6", "rejected": "w5 w7"}
    chance = PAIR | {"chosen": "w5 w6"}
    found = read_labels([repeated, PAIR, chance, PAIR])
    assert found == [READ] * 2 + [([5], [5, 6], [7]), READ]


def test_useless_pairs_are_left_out_and_too_many_stop_the_run(
    capsys: pytest.CaptureFixture,
) -> None:
    # these differ after three tokens
    same = PAIR | {
        "chosen": words(6, 6, 6, 7),
        "rejected": words(6, 6, 6, 8),
    }
    useless = [
        same,
        PAIR | {"chosen": ""},
        PAIR | {"prompt": words(*[5] * 9)},
    ]
    found = read_labels([PAIR] * 27 + useless, response_length=3)
    assert found == [READ] * 27
    printed = capsys.readouterr().out
    assert "--label_dataset: 27 of 30 rows {" in printed
    assert f"{EMPTY}: 2" in printed
    assert "'left out, for equal answers': 1" in printed
    assert "--label_dataset: 27, first " in printed
    null = PAIR | {"chosen": None}  # as pandas writes an empty cell
    assert read_labels([PAIR] * 27 + [null]) == [READ] * 27
    says = "26 of 30 labels are of use: {'left out, for equal answers': 4}"
    refuse(read_labels, [PAIR] * 26 + [same] * 4, says, response_length=3)
    # there would be no update
    refuse(read_labels, [PAIR] * 19 + [useless[1]], "19 labels for --batch_size 20", batch_size=20)


def test_labels_whose_samples_are_all_the_same_teach_nothing() -> None:
    """Two of four may be: people saw all."""
    equal = LABEL | {"sample0": [7]}
    assert read_labels([LABEL] * 19 + [equal]) == [([5], [7], [6])] * 19
    says = "--label_dataset: 5 of 6 labels are of use: {'left out, for equal answers': 1}"
    refuse(read_labels, [LABEL] * 5 + [equal], says)
    refuse(read_labels, [PAIR | {"chosen": "w7"}] * 3, "0 of 3 labels are of use")
    four = LABEL | {"sample2": [6], "sample3": [7]}
    assert read_label(four) == ([5], [7], [6], [6], [7])


def test_a_label_with_an_empty_prompt_is_left_out_like_an_empty_query() -> None:
    """Given, or where two texts have no common beginning. BOS alone is no prompt."""
    empty = PAIR | {"prompt": ""}
    whole = {"chosen": "w6 w8", "rejected": "w7 w8"}
    for row in (empty, whole):
        for model in ("gpt2", "llama"):
            refuse(read_labels, row, "0 of 2 labels are of use", base_model=model)
    assert read_labels([PAIR] * 27 + [empty]) == [READ] * 27


def test_a_prompt_may_be_called_query_and_best_may_be_a_float() -> None:
    row = {
        "query": "w5",
        "chosen": "w6",
        "rejected": "w7",
    }
    assert read_label(row) == READ
    label = LABEL | {"best": 1.0}
    assert read_label(label) == ([5], [7], [6])


def test_eleven_samples_are_read_in_the_order_of_their_numbers() -> None:
    label = {f"sample{i}": [10 + i] for i in reversed(range(11))}
    label |= {"query": [5], "best": 10}
    others = [[10 + i] for i in range(10)]
    assert read_label(label) == ([5], [20], *others)


def test_one_token_is_the_one_of_that_name_before_what_a_text_alone_begins_with() -> None:
    """Llama 2's tokenizer puts a space before every text: `.` alone is another token than in a
    sentence."""
    vocabulary = {text: i for i, text in enumerate(("</s>", "▁", "a", ".", "▁a", "▁.", "<0x0A>"))}
    merges = [("▁", "a"), ("▁", ".")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("a.").input_ids == [4, 3]
    assert tokenizer(".").input_ids == [5]
    for text, token in ((".", 3), ("<0x0A>", 6), ("eos", 0), ("</s>", 0), ("▁a", 4)):
        for script in SCRIPTS:
            args = script.Args(truncate_token=text)
            assert script.token_id("truncate_token", tokenizer, args) == token


@pytest.mark.parametrize(
    ("after", "answer"), [(0, [6, 9]), (1, [6, 9]), (2, [6, 9, 8, 9]), (4, [6, 9, 8, 9, 8])]
)
def test_an_answer_ends_at_the_first_end_that_counts(after: int, answer: list[int]) -> None:
    row = PAIR | {"chosen": words(6, 9, 8, 9, 8)}
    assert read_label(row, truncate_token="w9", truncate_after=after) == ([5], answer, [7])
    whole = read_label(row, truncate_token="eos", truncate_after=after)
    assert whole == ([5], [6, 9, 8, 9, 8, EOS], [7, EOS])


def test_an_end_that_the_tokenizer_lacks_is_refused() -> None:
    tokenizer, args = start(train_reward, truncate_token="eos", label_dataset=[PAIR] * 3)
    tokenizer.eos_token = None
    with pytest.raises(train_reward.UserError, match="--truncate_token 'eos' must be one token"):
        train_reward.load_labels("label_dataset", args, tokenizer)


def test_a_coin_says_which_of_a_pair_comes_first() -> None:
    rows = [PAIR | {"prompt": words(5, i % 40 + 8)} for i in range(60)]
    labels, _ = load_labels(label_dataset=rows, num_labels=59)
    first = np.mean([label.best == 0 for label in labels])
    assert 0.3 < first < 0.7
    assert all(label.responses[label.best] == [6] for label in labels)


@pytest.mark.parametrize(
    "change", [{"sample1": []}, {"sample1": [PAD]}, {"query": [PAD]}, {"sample0": None}]
)
def test_labels_with_gaps_are_counted(change: Row) -> None:
    says = f"2 of 3 labels are of use: {{{EMPTY}: 1}}"
    refuse(read_labels, [LABEL, LABEL, LABEL | change], says)


def test_more_labels_than_rows_are_refused_by_their_flag() -> None:
    with pytest.raises(train_reward.UserError, match="^--num_labels 9: --label_dataset has 8 "):
        load_labels(label_dataset=[LABEL] * 8, num_labels=9)


@pytest.mark.parametrize("num_labels", [None, 8])
def test_all_rows_of_a_file_can_be_trained_on(num_labels: int | None) -> None:
    """Then none is held out."""
    labels, held_out = load_labels(label_dataset=[LABEL] * 8, num_labels=num_labels)
    assert (len(labels), held_out) == (8, [])


def test_held_out_labels_are_those_of_a_test_split_or_what_is_left() -> None:
    other = LABEL | {"sample1": [9]}
    rows = [LABEL] * 6 + [other] * 4
    labels, held_out = load_labels(label_dataset=rows, num_labels=6, eval_labels=3)
    assert (len(labels), len(held_out)) == (6, 3)
    assert all(label.responses[1] == [9] for label in held_out)
    Path("set").mkdir()
    for split, sample in (("train", 7), ("validation", 8), ("test", 9)):
        label = LABEL | {"sample1": [sample]}
        Path(f"set/{split}.jsonl").write_text(to_lines(*[label] * 10))
    for count, sample in ((10, 9), (4, 7)):
        labels, held_out = load_labels(label_dataset="set", num_labels=6)
        assert (len(labels), len(held_out)) == (6, count)
        assert all(label.responses[1] == [sample] for label in held_out)
        Path("set/test.jsonl").unlink(missing_ok=True)


# --- chats ----------------------------------------------------------------------------------------
BEGIN = "{% for m in messages %}"
ENDING = "{% endfor %}{% if add_generation_prompt %}"
CHATML = BEGIN + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}" + ENDING
CHATML += "{{ '<|im_start|>assistant\\n' }}{% endif %}"
LLAMA3 = "{{ bos_token }}" + BEGIN
LLAMA3 += "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
LLAMA3 += "{{ m.content | trim + '<|eot_id|>' }}" + ENDING
LLAMA3 += "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
PHI4 = BEGIN + "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>" + ENDING
PHI4 += "<|im_start|>assistant<|im_sep|>{% endif %}"
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "phi4": PHI4,
}
THINKING = CHATML.replace("assistant\\n", "assistant\\n<think>\\n")  # no chat continues this
BYTES = {
    "base_model": "bytes",
    "query_length": 300,
    "response_length": 300,
}
ASK = BYTES | {"chat": CHATML}
FAR = turn("How tall is tower 0?", "user")
TALL = turn("0 metres.")
YARDS = turn("0 yards.")  # what both answers begin with is not of the prompt
TEXTS = {
    "chosen": "0 metres.",
    "rejected": "0 yards.",
}
CHATS = {
    "chosen": FAR + TALL,
    "rejected": FAR + YARDS,
}
ANSWERS = {
    "chosen": TALL,
    "rejected": YARDS,
}
BRIEF = turn("Be brief.", "system")
EARLIER = [*turn("How tall is tower A?", "user"), *turn("3 metres."), *turn("And 0?", "user")]
WITH_SYSTEM = {"chosen": BRIEF + FAR + TALL, "rejected": BRIEF + FAR + YARDS}
SEVERAL = {
    "chosen": EARLIER + TALL,
    "rejected": EARLIER + YARDS,
}
CHINESE = turn("\u957f\u6c5f\u5927\u6865\u7684\u5386\u53f2\u7f16\u53f70", "user")
BUILT = turn("\u5efa\u6210\u4e8e\u4e00\u4e5d\u4e94\u4e03\u5e740")
UNKNOWN = turn("\u4e0d\u77e5\u90530")
# Rows of labels, the chat that they ask, and both answers
LAYOUTS = {
    "ultrafeedback": (CHATS | {"prompt": FAR[0]["content"], "messages": FAR + TALL}, FAR),
    "whole chats": (CHATS, FAR),
    "prompt and whole chats": (CHATS | {"prompt": FAR}, FAR),
    "prompt and answers": (ANSWERS | {"prompt": FAR}, FAR),
    "prompt as a text": (ANSWERS | {"prompt": FAR[0]["content"]}, FAR),
    "answers as texts": (TEXTS | {"prompt": FAR}, FAR),
    "messages": (ANSWERS | {"messages": FAR}, FAR),
    "messages with an answer": (ANSWERS | {"messages": FAR + TALL}, FAR),
    "messages of several turns": (ANSWERS | {"messages": EARLIER + TALL}, EARLIER),
    "question": (ANSWERS | {"question": FAR[0]["content"]}, FAR),
    "system": (WITH_SYSTEM | {"prompt": FAR[0]["content"]}, BRIEF + FAR),
    "system in the prompt": (ANSWERS | {"prompt": BRIEF + FAR}, BRIEF + FAR),
    "several turns": (SEVERAL | {"prompt": "And 0?"}, EARLIER),
    "several turns, the first as prompt": (SEVERAL | {"prompt": EARLIER[:1]}, EARLIER),
    "several turns in the prompt": (ANSWERS | {"prompt": EARLIER}, EARLIER),
    "chinese": ({"prompt": CHINESE, "chosen": BUILT, "rejected": UNKNOWN}, CHINESE),
    "chinese, whole": ({"chosen": CHINESE + BUILT, "rejected": CHINESE + UNKNOWN}, CHINESE),
    "tool's message": (ANSWERS | {"prompt": FAR + turn("0 m", "tool")}, FAR + turn("0 m", "tool")),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_label_asks_what_ppo_asks_and_answers_are_what_the_whole_chat_adds(
    layout: str, template: str
) -> None:
    """To the token, also where PPO reads the same rows as queries."""
    row, asked = LAYOUTS[layout]
    query = read_query({"prompt": asked}, template, **BYTES)
    assert read_query(row, template, **BYTES) == query
    label = read_label(row, template, **BYTES)
    assert label[0] == query
    assert query.count(BOS) == 1
    tokenizer, _ = start(train_reward, template, **BYTES)
    answers = (BUILT, UNKNOWN) if "chinese" in layout else (TALL, YARDS)
    for answer, tokens in zip(answers, label[1:], strict=True):
        whole = tokenizer.apply_chat_template(asked + answer, tokenize=False)
        begun = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert [BOS, *tokenizer(whole.removeprefix(MARKS[BOS])).input_ids[1:]] == query + tokens
        assert tokenizer.decode(tokens) == whole.removeprefix(begun)
        assert answer[0]["content"] in tokenizer.decode(tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_template_that_does_not_continue_the_generation_prompt_is_refused(layout: str) -> None:
    says = "--label_dataset label_dataset.jsonl, row 0: an answer's chat is '<|im_start|>"
    row, _ = LAYOUTS[layout]
    refuse(read_labels, row, says, "does not continue", "<think>", chat=THINKING, **BYTES)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_end_of_a_chat_ends_answers(template: str) -> None:
    """What the template writes behind it is cut, and what stands in the prompt stays."""
    mark = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>"
    row = CHATS | {"prompt": FAR}
    cut = {"truncate_token": mark, "truncate_after": 0}
    query, *answers = read_label(row, template, **BYTES, **cut)
    tokenizer, _ = start(train_reward, **BYTES)
    assert tokenizer.batch_decode(answers) == [f"0 metres.{mark}", f"0 yards.{mark}"]
    assert query == read_query({"prompt": FAR}, template, **BYTES)


@pytest.mark.parametrize(
    "changes",
    [
        {"start_text": "0"},
        {"end_text": "0"},
        {"end_text": "eos"},
        {"start_text": "eos"},
    ],
)
def test_chats_that_would_lose_their_end_are_refused(changes: dict[str, str]) -> None:
    """Token 0 is a token, too."""
    rows = [{"prompt": FAR}]
    says = "row 0: a chat must keep its end: --start_text none --end_text none"
    refuse(read_queries, rows, says, **ASK, **changes)
    refuse(read_queries, rows, says, **ASK, long_queries="keep_start")
    short = BYTES | {"query_length": 12, "long_queries": "keep_end"}
    (query,) = read_queries(rows, CHATML, **short)
    assert query == [BOS, *read_queries(rows, **ASK)[0][-12:]]


NEITHER = "row 0: neither query, sample0, .., best, nor chosen, rejected: {"
TWO = "row 0: chosen and rejected must be two texts or two chats: ["
NOT_ITS = "and does not continue "
REST = EARLIER[2:] + TALL
BAD_LABELS = [
    (LABEL | {"best": 2}, NEITHER),
    (LABEL | {"best": -1}, NEITHER),
    (LABEL | {"best": None}, NEITHER),
    (LABEL | {"best": 0.5}, NEITHER),
    (LABEL | {"query": [5, 50]}, f"row 0: {NO_IDS}[5, 50]"),
    (LABEL | {"sample1": [5, -1]}, f"row 0: {NO_IDS}[5, -1]"),
    (LABEL | {"sample1": [5, None]}, f"row 0: {NO_IDS}[5, None]"),
    (PAIR | {"prompt": ["w5", "w6"]}, f"row 0: {NO_IDS}['w5', 'w6']"),
    (PAIR | {"chosen": [5, 6]}, TWO),
    (PAIR | {"rejected": [7]}, TWO),
    (PAIR | {"chosen": 6, "rejected": 7}, TWO),
    (PAIR | {"rejected": YARDS}, TWO),  # one of each
    (PAIR | {"chosen": TALL}, TWO),
    ({"chosen": ["w6"], "rejected": ["w7"]}, TWO),
    # chats about other questions, and answers of several turns without their question
    ({"chosen": FAR + TALL, "rejected": EARLIER[:1] + YARDS}, NOT_ITS),
    ({"prompt": FAR, "chosen": TALL + REST, "rejected": TALL + REST}, "row 0: "),
    ({"prompt": FAR, "chosen": TALL + REST, "rejected": YARDS + REST}, "row 0: "),
    ({"question": "How?", "chosen": TALL + REST, "rejected": TALL + REST}, "row 0: "),
    # ids could be of another tokenizer
    (CHATS | {"prompt": [5, 6]}, "row 0: prompt must be a text or a chat, like `chosen`: {"),
]


@pytest.mark.parametrize(("row", "says"), BAD_LABELS)
def test_labels_that_are_none_are_refused_in_a_line(row: Row, says: str) -> None:
    refuse(read_labels, row, says, chat=CHATML)


def test_the_number_of_a_bad_row_is_named() -> None:
    refuse(read_labels, [LABEL, LABEL, LABEL | {"best": 2}], NEITHER.replace("0", "2", 1))
    refuse(read_queries, CHATS | {"prompt": [5, 6]}, "row 0: prompt must be a text or a chat")


TOWER = {"question": "How tall is tower 0?"}
OF_TEXTS = [
    (TOWER, "How tall is tower 0?"),
    ({"instruction": "How tall is it?", "input": ""}, "How tall is it?"),
    ({"instruction": "How tall is it?", "input": "tower 0"}, "How tall is it?\ntower 0"),
    ({"prompt": "Tower \U0001f469\u200d\U0001f467"}, "Tower \U0001f469\u200d\U0001f467"),
]


@pytest.mark.parametrize(("asked", "text"), OF_TEXTS)
def test_questions_and_instructions_are_prompts(asked: dict[str, str], text: str) -> None:
    odd = {"chosen": " \U0001f389 caf\u00e9 \u0646\u0639\u0645", "rejected": " \u5426"}
    tokenizer, _ = start(train_reward, **BYTES)
    for answers in (TEXTS, odd):
        label = read_label(asked | answers, **BYTES)
        assert tokenizer.batch_decode(label) == [MARKS[BOS] + text, *answers.values()]
        assert read_query(asked | answers, **BYTES) == label[0]


def test_a_special_token_in_a_text_is_that_token() -> None:
    row = {
        "prompt": "Say <|eot_id|>",
        "chosen": "<|eot_id|> ok",
        "rejected": " no",
    }
    label = read_label(row, **BYTES)
    mark = MARKS.index("<|eot_id|>")
    assert (label[0][-1], label[1][0]) == (mark, mark)


CALLS = [{"type": "function", "function": {"name": "height", "arguments": {"tower": "A"}}}]
CALL = FAR + [turn("")[0] | {"tool_calls": CALLS}] + turn("3 m", "tool")
TOOLS = [{"type": "function", "function": {"name": "height", "parameters": {"type": "object"}}}]
TEXT = {
    "type": "text",
    "text": "How tall is this?",
}
IMAGE = [{"role": "user", "content": [TEXT, {"type": "image", "url": "tower.png"}]}]
NO_MORE = "a message must be a role and a text, and no more: {"
NOT_READ = "`system` and `tools` are not read, put them into messages: {"
REFUSED = [
    ({"prompt": CALL}, NO_MORE, "'height'"),
    ({"prompt": FAR, "tools": TOOLS}, NOT_READ, "'height'"),
    ({"prompt": FAR, "system": "Be brief."}, NOT_READ, "brief"),
    ({"prompt": IMAGE}, NO_MORE, "'image'"),
    ({"conversations": [{"from": "human", "value": "How tall?"}]}, NO_MORE, "How tall?"),
]


@pytest.mark.parametrize(("row", "says"), [(row, says) for row, *says in REFUSED])
def test_what_would_change_a_chat_in_silence_is_refused_with_its_row(row: Any, says: Any) -> None:
    refuse(read_labels, row | ANSWERS, "row 0: ", *says, **ASK)
    refuse(read_queries, row, "row 0: ", *says, **ASK)
    if "prompt" in row and row["prompt"] != IMAGE:  # a column has one type
        rows = [{"prompt": FAR}, row]
        refuse(read_queries, rows, "row 1: ", *says, **ASK)
        rows = [label | ANSWERS for label in rows]
        refuse(read_labels, rows, "row 1: ", *says, **ASK)


def parts(chat: Chat) -> Rows:
    """The chat with every content in two parts, as models of images have them."""
    found = []
    for message in chat:
        texts = (message["content"][:3], message["content"][3:])
        content = [{"type": "text", "text": text} for text in texts]
        found.append({"role": message["role"], "content": content})
    return found


def test_contents_in_parts_are_joined() -> None:
    row = {
        "prompt": parts(FAR),
        "chosen": parts(TALL),
        "rejected": parts(YARDS),
    }
    whole = ANSWERS | {"prompt": FAR}
    assert read_label(row, **ASK) == read_label(whole, **ASK)
    assert read_query(row, **ASK) == read_query(whole, **ASK)


def test_the_longer_of_prompt_and_chosen_is_asked() -> None:
    """A system's message may stand in one of them only."""
    asked = {"prompt": BRIEF + FAR}
    assert read_query(asked | {"chosen": FAR + TALL}, **ASK) == read_query(asked, **ASK)


def test_an_answer_without_a_text_is_left_out_and_counted(capsys: pytest.CaptureFixture) -> None:
    rows = [ANSWERS | {"prompt": FAR}] * 19
    texts = [TEXTS | TOWER] * 19
    for whole, gap, chat in (
        (rows, {"rejected": turn("")}, CHATML),
        (rows, {"chosen": turn(""), "rejected": turn("")}, CHATML),
        (rows, {"rejected": []}, CHATML),
        (texts, {"rejected": None}, None),
        (texts, {"chosen": ""}, None),
    ):
        assert len(read_labels([*whole, whole[0] | gap], chat, **BYTES)) == 19
        says = f"--label_dataset: 19 of 20 rows {{{EMPTY}: 1}}\n"
        assert says in capsys.readouterr().out
        says = f"0 of 2 labels are of use: {{{EMPTY}: 2}}"
        refuse(read_labels, whole[0] | gap, says, chat=chat, **BYTES)


# --- reward functions -----------------------------------------------------------------------------
def score(script: Any, function: Any, columns: dict[str, Any] | None = None) -> Any:
    """Scores by a function of two responses, of one token and of two."""
    tokenizer, args = start(script, reward_fn="colorsys:mine")
    row = {"query": "w5"} | (columns or {})
    queries = [script.Query([token], [token], row) for token in (5, 6)]
    with mock.patch.object(colorsys, "mine", function, create=True):
        reward = script.load_reward("reward_model", args, "tiny", tokenizer, 14)
    return reward(queries, make_responses([[7], [8, 9]]))


NO_FLOATS = [
    {},
    {"w7": 0.0, "w8": 0.0},
    1.0,
    None,
    [1.0],
    [1.0] * 3,
    [1.0, np.nan],
    torch.tensor([1.0, np.inf]),
    [1.0, None],
    ["yes", "no"],
    [[1.0], [2.0]],
    [[1.0], [0.5, 1.5]],  # of tokens
    [torch.tensor(1.0), torch.tensor([2.0, 0.0])],
]
FLOATS = [
    [1, 2],
    torch.tensor([1.0, 2.0]),
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 2.0], requires_grad=True),
    [torch.tensor(1.0), torch.tensor(2.0)],
    np.array([1.0, 2.0]),
    [np.float32(1), np.int64(2)],
]


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_function_returns_floats_in_a_list_array_or_tensor(script: Any) -> None:
    """No gradient comes with them."""
    for returned in FLOATS:
        scores = score(script, lambda x=returned, **_: x)
        assert scores.tolist() == [1.0, 2.0]
        assert scores.dtype == torch.float32
        assert not scores.requires_grad


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_what_is_no_float_for_each_response_is_an_error(script: Any) -> None:
    for returned in NO_FLOATS:
        with pytest.raises(script.UserError, match="^--reward_fn must return "):
            score(script, lambda x=returned, **_: x)


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_function_gets_copies_of_all_columns_and_its_own_faults_are_not_explained(
    script: Any,
) -> None:
    seen = {}

    def everything(**named: Any) -> Any:
        seen.update(named)
        named["tags"][0].clear()
        return [0.0, 0.0]

    columns = {
        "query": "w5",
        "prompt": "left out, as TRL does",
        "input_ids": "column",
        "completions": "not these",
        "queries": 3,
        "tags": ["a"],
    }
    for _ in range(2):
        score(script, everything, columns)
        assert {*seen, "prompt"} == {*columns, "prompts", "completions"}
        assert "prompt" not in seen
        assert seen["completions"] == ["w7", "w8 w9"]
        assert (seen["input_ids"], seen["queries"]) == (["column"] * 2, [3, 3])
        assert not seen["tags"][0]
        assert columns["tags"] == ["a"]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        score(script, lambda prompts, completions: [0.0, 0.0], columns)
    with pytest.raises(ZeroDivisionError):
        score(script, lambda **_: 1 / 0)


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_function_gets_chats_where_the_table_has_chats(script: Any) -> None:
    seen = []

    def keep(prompts: Any, completions: Any, messages: Any) -> Any:
        seen.extend((prompts, completions, messages))
        return [1.0]

    rows = [{"messages": FAR + TALL}]
    tokenizer, args = start(script, CHATML, query_dataset=rows, **BYTES)
    queries = script.load_queries("query_dataset", args, tokenizer, 1)
    text = tokenizer(YARDS[0]["content"], add_special_tokens=False).input_ids
    script.score_by_function(keep, tokenizer, queries, make_responses([[*text, EOS]]))
    assert seen == [[FAR], [YARDS], [FAR + TALL]]
    tokenizer, _ = start(script, base_model="llama")
    script.score_by_function(
        lambda prompts, **_: seen.append(prompts) or [1.0],
        tokenizer,
        [script.Query([BOS, 5, EOS, 6], [5], {"query": ""})],
        make_responses([[7]]),
    )
    assert seen[-1] == ["w5 w6"]  # without special tokens


# --- none -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_none_is_none_with_and_without_an_equals_sign(script: Any, monkeypatch: Any) -> None:
    own = "num_labels" if script is train_reward else "adaptive_kl_target"
    given = f"tiny --start_text=none --end_text none --truncate_token=None --{own}=none"
    monkeypatch.setattr(sys, "argv", [script.__name__, *given.split()])
    _, args = script.parse_args()
    names = ("start_text", "end_text", "truncate_token", own)
    assert [getattr(args, name) for name in names] == [None] * 4
