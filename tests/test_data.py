"""What the scripts make of queries, labels and preferences: prompts, chats, BOS, EOS, long texts,
reward functions."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

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
EOS = 0
BOS = 1
PAD = 50_259
CHAT = """{% for m in messages %}{{ ('w40 ' if m.role == 'user' else 'w41 ') + m.content +
' <|endoftext|> w42 ' }}{% endfor %}{% if add_generation_prompt %}w41 {% endif %}"""


MARKS = ["<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
MARKS += ["<|eot_id|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"]


def turn(word: str, role: str = "assistant") -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": role, "content": word}]


ASKED = turn("w5", "user")
AGAIN = turn("w8", "user")
YES = turn("w6")
NO = turn("w7")
BEGUN = [BOS, 40, 5, EOS, 42, 41]  # ASKED, up to the answer
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
    rows: list[dict[str, Any]], *chat: str, part: str = "input_ids", **changes: Any
) -> list[list[int]]:
    """What all three scripts make of these rows, in the order of its tokens."""
    found = []
    for script in SCRIPTS:
        tokenizer, args = start(script, *chat, query_dataset=rows, **changes)
        queries = script.load_queries("query_dataset", args, tokenizer, 1_000)
        found.append([vars(query) for query in queries])
    assert found[0] == found[1] == found[2]
    return sorted(query[part] for query in found[0])


def load_labels(*chat: str, **changes: Any) -> Any:
    """Labels to train on, and held-out ones."""
    tokenizer, args = start(train_reward, *chat, **changes)
    return train_reward.load_labels("label_dataset", args, tokenizer)


def read_labels(rows: list[dict[str, Any]], *chat: str, **changes: Any) -> Any:
    """Query, best response and the others of every label. A last row is held out, and read too."""
    given = {"num_labels": len(rows), "label_dataset": [*rows, rows[0]]} | changes
    labels, _ = load_labels(*chat, **given)
    found = []
    for label in labels:
        responses = list(label.responses)
        found.append((label.query, responses.pop(label.best), *responses))
    return found


def refuse(
    read: Any, rows: list[dict[str, Any]], *says: str, chat: Any = None, **changes: Any
) -> None:
    """The rows are refused, with the flag, in words that make one line."""
    with pytest.raises((ppo_rlhf.UserError, train_reward.UserError)) as caught:
        read(rows, chat, **changes)
    text = " ".join(str(caught.value).split())
    flag = "--query_dataset" if read is read_queries else "--label_dataset"
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
    assert read_labels([LABEL | {"sample1": [EOS, PAD]}] * 2) == [([5], [EOS], [6])] * 2


class Sized:
    """A tokenizer that says that it has another size."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def test_the_padding_of_gpt2s_ids_is_a_token_of_larger_models() -> None:
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    cases = {
        50_257: [5],
        50_259: [5],
        50_260: [5, PAD],
        60_000: [5, PAD],
    }
    for size, expected in cases.items():
        for script in SCRIPTS:
            assert script.encode([5, PAD], Sized(tokenizer, size)) == expected


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_chats_go_through_the_template(column: str) -> None:
    """Whoever spoke last: the assistant answers."""
    rows = [
        {column: ASKED},
        {column: ASKED + NO + AGAIN},
    ]
    second = [40, 8, EOS, 42, 41]
    for template in (CHAT, "{{ 'w1 ' }}" + CHAT):  # one that writes BOS itself: it stays one
        found = read_queries(rows, template, base_model="llama", query_length=20)
        assert found == [BEGUN, [*BEGUN, 7, EOS, 42, *second]]
    refuse(read_queries, rows, "chat template: ", "chat_template is not set")
    refuse(read_queries, rows, "roles alternate", chat="{{ raise_exception('roles alternate') }}")
    strangers = [{column: [{"from": "user", "value": "w5"}]}]
    says = "row 0: a message must be a role and a text, and no more: {"
    refuse(read_queries, strangers, says, chat=CHAT)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_chat_that_ends_with_an_answer_is_read_without_it(column: str) -> None:
    for chat, expected in ((ASKED + YES, BEGUN), (ASKED + NO + AGAIN + YES, None)):
        expected = expected or [*BEGUN, 7, EOS, 42, 40, 8, EOS, 42, 41]
        assert read_queries([{column: chat}], CHAT, base_model="llama", query_length=20) == [
            expected
        ]


def test_the_first_query_and_label_are_shown_as_they_are_read(
    capsys: pytest.CaptureFixture,
) -> None:
    """A template that is cut, or a column that is ignored, can be seen."""
    given = {"query_dataset": [{"text": "w5 w6"}], "query_suffix": "w9", "base_model": "llama"}
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
        refuse(read_queries, [row], f"--query_dataset query_dataset.jsonl, row 0: {says}")


def test_a_folder_needs_a_split_to_train_on() -> None:
    Path("set").mkdir()
    Path("set/test.jsonl").write_text(to_lines({"text": "w5"}))
    tokenizer, args = start(ppo_rlhf, query_dataset="set")
    says = r"^--query_dataset set has \['json', 'test'\]: name one, as in data::test$"
    with pytest.raises(ppo_rlhf.UserError, match=says):
        ppo_rlhf.load_queries("query_dataset", args, tokenizer, 1)


def test_no_query_is_held_out_and_trained_on_and_the_seed_orders_them() -> None:
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
    assert found == [([5], [6], [7])] * 2 + [([5], [5, 6], [7]), ([5], [6], [7])]


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
    assert found == [([5], [6], [7])] * 27
    printed = capsys.readouterr().out
    gaps = "'left out, for a prompt or an answer that is empty or too long': 2"
    assert "--label_dataset: 27 of 30 rows {" in printed
    assert gaps in printed
    assert "'left out, for equal answers': 1" in printed
    assert "--label_dataset: 27, first " in printed
    null = PAIR | {"chosen": None}  # as pandas writes an empty cell
    assert read_labels([PAIR] * 27 + [null]) == [([5], [6], [7])] * 27
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
    assert read_labels([four] * 2) == [([5], [7], [6], [6], [7])] * 2


def test_a_label_with_an_empty_prompt_is_left_out_like_an_empty_query() -> None:
    """Given, or where two texts have no common beginning. BOS alone is no prompt."""
    empty = PAIR | {"prompt": ""}
    whole = {"chosen": "w6 w8", "rejected": "w7 w8"}
    for row in (empty, whole):
        for model in ("gpt2", "llama"):
            refuse(read_labels, [row] * 2, "0 of 2 labels are of use", base_model=model)
    assert read_labels([PAIR] * 27 + [empty]) == [([5], [6], [7])] * 27


def test_a_prompt_may_be_called_query_and_best_may_be_a_float() -> None:
    row = {"query": "w5", "chosen": "w6", "rejected": "w7"}
    assert read_labels([row] * 2) == [([5], [6], [7])] * 2
    label = LABEL | {"best": 1.0}
    assert read_labels([label] * 2) == [([5], [7], [6])] * 2


def test_eleven_samples_are_read_in_the_order_of_their_numbers() -> None:
    label = {f"sample{i}": [10 + i] for i in reversed(range(11))}
    label |= {"query": [5], "best": 10}
    others = [[10 + i] for i in range(10)]
    assert read_labels([label] * 2) == [([5], [20], *others)] * 2


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


def test_preferences_as_chats_are_read_as_the_template_writes_them() -> None:
    llama = {"base_model": "llama"}
    pair = {
        "prompt": ASKED,
        "chosen": YES,
        "rejected": NO,
    }
    whole = {
        "chosen": ASKED + YES,
        "rejected": ASKED + NO,
    }
    for row in (whole, pair, whole | {"prompt": ASKED}, pair | {"prompt": "w5"}):
        found = read_labels([row] * 2, CHAT, **llama)
        assert found == [(BEGUN, [6, EOS, 42], [7, EOS, 42])] * 2
        # nothing stands behind it
        eos = {"truncate_token": "eos", "truncate_after": 0}
        found = read_labels([row] * 2, CHAT, **llama, **eos)
        assert found == [(BEGUN, [6, EOS], [7, EOS])] * 2
    # what both answers begin with is not of the prompt
    alike = pair | {"chosen": turn("w6 w8"), "rejected": turn("w6 w9")}
    found = read_labels([alike] * 2, CHAT, **llama)
    assert found == [(BEGUN, [6, 8, EOS, 42], [6, 9, EOS, 42])] * 2
    refuse(read_labels, [pair] * 2, "row 0: chat template: ", "chat_template is not set")
    two = {"chosen": ASKED + YES, "rejected": AGAIN + NO}
    says = "row 0: an answer's chat is 'w40 w8 ", "and does not continue 'w40 w5 "
    refuse(read_labels, [two] * 2, *says, chat=CHAT)


def test_answers_that_are_neither_texts_nor_chats_are_refused() -> None:
    rows = [
        PAIR | {"prompt": ["w5", "w6"]},
        PAIR | {"chosen": ["w6"], "rejected": ["w7"]},
        PAIR | {"rejected": [7]},
        PAIR | {"chosen": 6, "rejected": 7},
        PAIR | {"rejected": NO},  # one of each
        PAIR | {"chosen": YES},
        {"chosen": ["w6"], "rejected": ["w7"]},
    ]
    for row in rows:
        refuse(read_labels, [row] * 2, "row 0: ", chat=CHAT)


def test_several_turns_are_read_once_or_refused() -> None:
    more = {
        "response_length": 20,
        "query_length": 20,
        "base_model": "llama",
    }
    asked = ASKED + YES + AGAIN
    whole = {
        "chosen": asked + YES,
        "rejected": asked + NO,
    }
    begun = [*BEGUN, 6, EOS, 42, 40, 8, EOS, 42, 41]
    for prompt in ({}, {"prompt": asked}, {"prompt": ASKED}, {"prompt": "w5"}, {"prompt": "w8"}):
        found = read_labels([whole | prompt] * 2, CHAT, **more)
        assert found == [(begun, [6, EOS, 42], [7, EOS, 42])] * 2
    # answers of several turns, without the question that `prompt` has
    for rejected in (YES, NO):
        row = {
            "prompt": ASKED,
            "chosen": YES + AGAIN + NO,
            "rejected": rejected + AGAIN + YES,
        }
        for prompt in (ASKED, "w5"):
            refuse(read_labels, [row | {"prompt": prompt}] * 2, "row 0: ", chat=CHAT, **more)


GAPS = [
    {"sample1": []},
    {"sample1": [PAD]},
    {"query": [PAD]},
    {"sample0": None},
]
NO_BEST = [2, -1, None, 0.5]


def test_labels_with_gaps_are_refused_in_a_line() -> None:
    for change in GAPS:
        says = "2 of 3 labels are of use: {'left out, for a prompt or an answer that is empty"
        refuse(read_labels, [LABEL, LABEL, LABEL | change], says)
    for best in NO_BEST:
        rows = [LABEL, LABEL, LABEL | {"best": best}]
        says = "row 2: neither query, sample0, .., best, nor chosen, rejected: {"
        refuse(read_labels, rows, says)
    for bad in ([5, 50], [5, -1], [5, None]):
        refuse(read_labels, [LABEL, LABEL | {"sample1": bad}], f"row 1: {NO_IDS}{bad}")
        refuse(read_labels, [LABEL, LABEL | {"query": bad}], f"row 1: {NO_IDS}{bad}")
        refuse(read_labels, [PAIR | {"chosen": bad}] * 2, "row 0: ")


def test_answers_to_a_chat_may_be_texts_which_are_the_assistants_messages() -> None:
    found = read_labels([PAIR | {"prompt": ASKED}] * 2, CHAT, base_model="llama")
    assert found == [(BEGUN, [6, EOS, 42], [7, EOS, 42])] * 2


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
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "phi4": PHI4}
THINKING = CHATML.replace("assistant\\n", "assistant\\n<think>\\n")  # no chat continues this
BYTES = {"base_model": "bytes", "query_length": 300, "response_length": 300}
FAR = turn("How tall is tower 0?", "user")
TALL = turn("0 metres.")
DUNNO = turn("Dunno.")
TEXTS = {
    "chosen": "0 metres.",
    "rejected": "Dunno.",
}
CHATS = {
    "chosen": FAR + TALL,
    "rejected": FAR + DUNNO,
}
ANSWERS = {
    "chosen": TALL,
    "rejected": DUNNO,
}
BRIEF = turn("Be brief.", "system")
EARLIER = [*turn("How tall is tower A?", "user"), *turn("3 metres."), *turn("And 0?", "user")]
WITH_SYSTEM = {
    "chosen": BRIEF + FAR + TALL,
    "rejected": BRIEF + FAR + DUNNO,
}
SEVERAL = {
    "chosen": EARLIER + TALL,
    "rejected": EARLIER + DUNNO,
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
    (query,) = read_queries([{"prompt": asked}], template, **BYTES)
    assert read_queries([row], template, **BYTES) == [query]
    (label, _) = read_labels([row] * 2, template, **BYTES)
    assert label[0] == query
    assert query.count(BOS) == 1
    tokenizer, _ = start(train_reward, template, **BYTES)
    answers = (BUILT, UNKNOWN) if "chinese" in layout else (TALL, DUNNO)
    for answer, tokens in zip(answers, label[1:], strict=True):
        whole = tokenizer.apply_chat_template(asked + answer, tokenize=False)
        begun = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert [BOS, *tokenizer(whole.removeprefix(MARKS[BOS])).input_ids[1:]] == query + tokens
        assert tokenizer.decode(tokens) == whole.removeprefix(begun)
        assert answer[0]["content"] in tokenizer.decode(tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_template_that_does_not_continue_the_generation_prompt_is_refused(layout: str) -> None:
    says = "--label_dataset label_dataset.jsonl, row 0: an answer's chat is '<|im_start|>"
    rows = [LAYOUTS[layout][0]] * 2
    refuse(read_labels, rows, says, "does not continue", "<think>", chat=THINKING, **BYTES)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_end_of_a_chat_ends_answers(template: str) -> None:
    """What the template writes behind it is cut, and what stands in the prompt stays."""
    mark = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>"
    row = CHATS | {"prompt": FAR}
    cut = {"truncate_token": mark, "truncate_after": 0}
    ((query, *answers), _) = read_labels([row] * 2, template, **BYTES, **cut)
    tokenizer, _ = start(train_reward, **BYTES)
    assert tokenizer.batch_decode(answers) == [f"0 metres.{mark}", f"Dunno.{mark}"]
    assert [query] == read_queries([{"prompt": FAR}], template, **BYTES)


@pytest.mark.parametrize(
    "changes", [{"start_text": "0"}, {"end_text": "0"}, {"end_text": "eos"}, {"start_text": "eos"}]
)
def test_chats_that_would_lose_their_end_are_refused(changes: dict[str, str]) -> None:
    """Token 0 is a token, too."""
    rows = [{"prompt": FAR}]
    says = "row 0: a chat must keep its end: --start_text none --end_text none"
    refuse(read_queries, rows, says, chat=CHATML, **BYTES, **changes)
    refuse(read_queries, rows, says, chat=CHATML, **BYTES, long_queries="keep_start")
    short = BYTES | {"query_length": 12, "long_queries": "keep_end"}
    (query,) = read_queries(rows, CHATML, **short)
    assert query == [BOS, *read_queries(rows, CHATML, **BYTES)[0][-12:]]


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
        (label, _) = read_labels([asked | answers] * 2, **BYTES)
        assert tokenizer.batch_decode(label) == [MARKS[BOS] + text, *answers.values()]
        assert read_queries([asked | answers], **BYTES) == [label[0]]


def test_a_special_token_in_a_text_is_that_token() -> None:
    row = {"prompt": "Say <|eot_id|>", "chosen": "<|eot_id|> ok", "rejected": " no"}
    (label, _) = read_labels([row] * 2, **BYTES)
    mark = MARKS.index("<|eot_id|>")
    assert (label[0][-1], label[1][0]) == (mark, mark)


CALLS = [{"type": "function", "function": {"name": "height", "arguments": {"tower": "A"}}}]
CALL = FAR + [turn("")[0] | {"tool_calls": CALLS}] + turn("3 m", "tool")
TOOLS = [{"type": "function", "function": {"name": "height", "parameters": {"type": "object"}}}]
IMAGE = [{"role": "user", "content": [{"type": "image", "url": "tower.png"}]}]
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
    refuse(read_labels, [row | ANSWERS] * 2, "row 0: ", *says, chat=CHATML, **BYTES)
    refuse(read_queries, [row], "row 0: ", *says, chat=CHATML, **BYTES)
    if "prompt" in row and row["prompt"] != IMAGE:  # a column has one type
        rows = [{"prompt": FAR}, row]
        refuse(read_queries, rows, "row 1: ", *says, chat=CHATML, **BYTES)
        rows = [label | ANSWERS for label in rows]
        refuse(read_labels, rows, "row 1: ", *says, chat=CHATML, **BYTES)


def parts(chat: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The chat with every content in two parts, as models of images have them."""
    found = []
    for message in chat:
        texts = (message["content"][:3], message["content"][3:])
        content = [{"type": "text", "text": text} for text in texts]
        found.append({"role": message["role"], "content": content})
    return found


def test_contents_in_parts_are_joined() -> None:
    row = {"prompt": parts(FAR), "chosen": parts(TALL), "rejected": parts(DUNNO)}
    whole = ANSWERS | {"prompt": FAR}
    assert read_labels([row] * 2, CHATML, **BYTES) == read_labels([whole] * 2, CHATML, **BYTES)
    assert read_queries([row], CHATML, **BYTES) == read_queries([whole], CHATML, **BYTES)


def test_token_ids_beside_a_chat_are_refused() -> None:
    """They could be of another tokenizer, and would be one message too few."""
    row = {"prompt": [5, 6], "chosen": FAR + TALL, "rejected": FAR + DUNNO}
    says = "row 0: prompt must be a text or a chat, like `chosen`: {"
    refuse(read_labels, [row] * 2, says, chat=CHATML, **BYTES)
    refuse(read_queries, [row], says, chat=CHATML, **BYTES)


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
        says = "--label_dataset: 19 of 20 rows {'left out, for a prompt or an answer that is empty"
        assert f"{says} or too long': 1}}\n" in capsys.readouterr().out
        says = says.replace("19 of 20 rows", "0 of 2 labels are of use:")
        refuse(read_labels, [whole[0] | gap] * 2, says, chat=chat, **BYTES)


# --- reward functions -----------------------------------------------------------------------------
def named(completions: list[str], answers: list[str], level: Any, **others: Any) -> list[float]:
    """A float for each completion, of columns that it names."""
    scores = []
    for text, answer, x in zip(completions, answers, level, strict=True):
        scores.append(float(answer in text.split()) + 10 * x)
    return scores


def score(script: Any, function: Any, columns: dict[str, Any] | None = None) -> Any:
    """Scores by a function of two responses, of one token and of two."""
    tokenizer, _ = start(script)
    row = {"query": "w5"} | (columns or {})
    queries = [script.Query([token], [token], row) for token in (5, 6)]
    return script.score_by_function(function, tokenizer, queries, make_responses([[7], [8, 9]]))


NO_FLOATS = [
    {},
    {"w7": 0.0, "w8": 0.0},
    {1.0: "a", 2.0: "b"}.keys(),
    1.0,
    None,
    [1.0],
    [1.0] * 3,
    [1.0, np.nan],
    torch.tensor([1.0, np.inf]),
    [None, None],
    [1.0, None],
    ["yes", "no"],
    [[1.0], [2.0]],
    [[1.0], [0.5, 1.5]],  # of tokens
    [[], [1.0, 2.0]],
    [torch.tensor(1.0), torch.tensor([2.0, 0.0])],
    [np.array([1.0]), np.array([0.5, 1.5])],
]
FLOATS = [
    [1, 2],
    (1.0, 2.0),
    torch.tensor([1.0, 2.0]),
    torch.tensor([1, 2]),
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
def test_a_function_gets_the_columns_that_it_names(script: Any) -> None:
    """Its parameters have TRL's names, whatever the table has under these."""
    rows = []
    for i in (6, 7):
        row = {
            "query": words(5, i),
            "answers": f"w{i}",
            "level": i,
            "completions": "no",
        }
        rows.append(row)
    tokenizer, args = start(script, query_dataset=rows, reward_fn="test_data:named")
    reward = script.load_reward("reward_model", args, "tiny", tokenizer, 14)
    queries = script.load_queries("query_dataset", args, tokenizer, 2)
    queries = sorted(queries, key=lambda query: query.columns["level"])
    assert reward(queries, make_responses([[6], [6]])).tolist() == [61, 70]


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

    rows = [{"messages": ASKED + YES}]
    tokenizer, args = start(script, CHAT, query_dataset=rows, base_model="llama")
    queries = script.load_queries("query_dataset", args, tokenizer, 1)
    script.score_by_function(keep, tokenizer, queries, make_responses([[7, EOS]]))
    assert seen == [[ASKED], [NO], [ASKED + YES]]
    script.score_by_function(
        lambda prompts, **_: seen.append(prompts) or [1.0],
        tokenizer,
        [script.Query([BOS, 5, EOS, 6], [5], {"query": ""})],
        make_responses([[7]]),
    )
    assert seen[-1] == ["w5 w6"]  # without special tokens


# --- none -----------------------------------------------------------------------------------------
def test_none_is_none_with_and_without_an_equals_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, own in zip(
        SCRIPTS, ("adaptive_kl_target", "adaptive_kl_target", "num_labels"), strict=True
    ):
        given = [
            "--start_text=none",
            "--end_text",
            "none",
            "--truncate_token=None",
            f"--{own}=none",
        ]
        monkeypatch.setattr(sys, "argv", [script.__name__, "tiny", *given])
        args = script.parse_args()[1]
        names = "start_text end_text truncate_token".split()
        assert [getattr(args, name) for name in (own, *names)] == [None] * 4
