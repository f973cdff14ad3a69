"""What the scripts make of queries, labels and preferences: prompts, chats, BOS, EOS, long texts,
reward functions."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from run_tools import to_lines
from tiny_models import make_responses, save_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
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
    tokenizer does neither."""
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
    return folder


@pytest.fixture(autouse=True)
def here(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to be in, with the two models, and what the scripts' logger asks for."""
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
    ]
    found = read_queries(rows, **llama)
    assert found == [[BOS, EOS, 5], [BOS, 6, EOS, 8]]
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
    ({"words": "w5"}, "a prompt is read from ['query', "),
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
    with pytest.raises(ppo_rlhf.UserError, match=r"^--query_dataset set has \['.jsonl', 'test'\]: name one"):
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


@pytest.mark.parametrize(("begin", "chosen", "rejected"), BEGINS)
def test_the_common_beginning_of_two_texts_up_to_a_word_is_their_prompt(
    begin: str, chosen: str, rejected: str
) -> None:
    """The raw form of Anthropic's HH: the dialogues stand whole in both columns. A prompt that is
    given stays whole; if both answers repeat it, it is read once."""
    answers = [begin + chosen, begin + rejected]
    for row in ({}, {"query": ""}):
        row |= dict(zip(("chosen", "rejected"), answers, strict=True))
        if not row.get("query", "none"):
            assert split_of(row) == ["", *answers]
        else:
            assert split_of(row) == [begin, chosen, rejected]
        row["prompt"] = row.pop("query", None) or begin[:2]
        rest = [answer[len(begin[:2]) :] for answer in answers]
        assert split_of(row) == [begin[:2], *rest]
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
    caplog: pytest.LogCaptureFixture,
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
    assert "--label_dataset: 27, first " in caplog.text
    null = PAIR | {"chosen": None}  # as pandas writes an empty cell
    assert read_labels([PAIR] * 27 + [null]) == [([5], [6], [7])] * 27
    says = "26 of 30 labels are of use; in the others a text is empty, the prompt is too long, "
    refuse(read_labels, [PAIR] * 26 + [same] * 4, says, response_length=3)
    # there would be no update
    refuse(read_labels, [PAIR] * 19 + [useless[1]], "19 labels for --batch_size 20", batch_size=20)


def test_labels_whose_samples_are_all_the_same_teach_nothing() -> None:
    """Two of four may be: people saw all."""
    equal = LABEL | {"sample0": [7]}
    assert read_labels([LABEL] * 19 + [equal]) == [([5], [7], [6])] * 19
    refuse(read_labels, [LABEL] * 5 + [equal], "5 of 6 labels are of use")
    refuse(read_labels, [PAIR | {"chosen": "w7"}] * 3, "0 of 3 labels are of use")
    four = LABEL | {"sample2": [6], "sample3": [7]}
    assert read_labels([four] * 2) == [([5], [7], [6], [6], [7])] * 2


def test_an_empty_prompt_needs_a_bos() -> None:
    """Given, or where two texts have no common beginning. A model reads at least one token."""
    empty = PAIR | {"prompt": ""}
    whole = {"chosen": "w6 w8", "rejected": "w7 w8"}
    for row in (empty, whole):
        refuse(read_labels, [row] * 2, "0 of 2 labels are of use")
    assert read_labels([PAIR] * 27 + [empty]) == [([5], [6], [7])] * 27
    assert read_labels([empty] * 2, base_model="llama") == [([BOS], [6], [7])] * 2


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
        found = read_labels([row] * 2, CHAT, truncate_token="eos", **llama)
        assert found == [(BEGUN, [6, EOS], [7, EOS])] * 2
    # what both answers begin with is of the prompt
    alike = pair | {"chosen": turn("w6 w8"), "rejected": turn("w6 w9")}
    found = read_labels([alike] * 2, CHAT, **llama)
    assert found == [([*BEGUN, 6], [8, EOS, 42], [9, EOS, 42])] * 2
    refuse(read_labels, [pair] * 2, "chat_template is not set")
    # two prompts
    two = {"chosen": ASKED + YES, "rejected": YES + NO}
    refuse(read_labels, [two] * 2, "0 of 2 labels are of use", chat=CHAT)
    refuse(read_labels, [PAIR | {"prompt": ["w5", "w6"]}] * 2, chat=CHAT)
    refuse(read_labels, [{"prompt": "w5", "chosen": ["w6"], "rejected": ["w7"]}] * 2, chat=CHAT)


def test_a_prompt_with_answers_of_several_turns_keeps_them_all() -> None:
    more = {
        "response_length": 20,
        "query_length": 20,
        "base_model": "llama",
    }
    row = {
        "prompt": ASKED,
        "chosen": YES + AGAIN + NO,
        "rejected": NO + AGAIN + NO,
    }
    rest = [EOS, 42, 40, 8, EOS, 42, 41, 7, EOS, 42]
    for prompt in (ASKED, "w5"):
        found = read_labels([row | {"prompt": prompt}] * 2, CHAT, **more)
        assert found == [(BEGUN, [6, *rest], [7, *rest])] * 2
    asked = ASKED + YES + AGAIN
    row = {
        "prompt": asked,
        "chosen": asked + YES,
        "rejected": asked + NO,
    }
    found = read_labels([row] * 2, CHAT, **more)
    begun = [*BEGUN, 6, EOS, 42, 40, 8, EOS, 42, 41]
    assert found == [(begun, [6, EOS, 42], [7, EOS, 42])] * 2


GAPS = [
    {"sample1": []},
    {"sample1": [PAD]},
    {"query": [PAD]},
    {"sample0": None},
]
NO_BEST = [2, -1, None, 0.5]


def test_labels_with_gaps_are_refused_in_a_line() -> None:
    for change in GAPS:
        says = "2 of 3 labels are of use; in the others a text is empty"
        refuse(read_labels, [LABEL, LABEL, LABEL | change], says)
    for best in NO_BEST:
        rows = [LABEL, LABEL, LABEL | {"best": best}]
        refuse(read_labels, rows, "has no query, sample0, .., best, nor chosen, rejected: ")
    for bad, says in (([5, 50], "another model"), ([5, -1], "another model"), ([5, None], "")):
        refuse(read_labels, [LABEL, LABEL | {"sample1": bad}], says)
        refuse(read_labels, [LABEL, LABEL | {"query": bad}], says)
        refuse(read_labels, [PAIR | {"chosen": bad}] * 2)


def test_a_chat_as_a_prompt_of_answers_that_are_texts_is_refused() -> None:
    chat = [{"role": "user", "content": "w5"}]
    rows = [{"prompt": chat, "chosen": "w6", "rejected": "w7"}] * 2
    refuse(read_labels, rows, "has a chat as a prompt, but texts as answers")


def test_more_labels_than_rows_are_refused_by_their_flag() -> None:
    with pytest.raises(train_reward.UserError, match="--num_labels 9 is above its size 8"):
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


# --- reward functions -----------------------------------------------------------------------------
def named(
    query: list[str], response: list[str], *, answers: list[str], level: Any = ()
) -> list[float]:
    """A float for each response, of columns that it names."""
    scores = []
    for text, answer, x in zip(response, answers, level, strict=True):
        scores.append(float(answer in text.split()) + 10 * x)
    return scores


def score(script: Any, function: Any, columns: dict[str, Any] | None = None) -> Any:
    """Scores by a function of two responses, of one token and of two."""
    tokenizer, _ = start(script)
    queries = [
        script.Query([5], [5], columns or {}),
        script.Query([6], [6], columns or {}),
    ]
    return script.score_by_function(function, tokenizer, queries, [[7], [8, 9]])


NO_FLOATS = [
    {},
    {"w7": 0.0, "w8": 0.0},
    1.0,
    None,
    [1.0],
    [1.0] * 3,
    [None, None],
    ["yes", "no"],
    [[1.0], [0.5, 1.5]],  # of tokens
    [[], [1.0, 2.0]],
    [torch.tensor(1.0), torch.tensor([2.0, 0.0])],
    [np.array([1.0]), np.array([0.5, 1.5])],
]
FLOATS = [
    [1, 2],
    (1.0, 2.0),
    {1.0: "a", 2.0: "b"}.keys(),
    torch.tensor([1.0, 2.0]),
    torch.tensor([1, 2]),
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 2.0], requires_grad=True),
    np.array([1.0, 2.0]),
    [np.float32(1), np.int64(2)],
]


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_function_returns_floats_in_any_sequence(script: Any) -> None:
    """No gradient comes with them."""
    for returned in FLOATS:
        scores = score(script, lambda *_, x=returned: x)
        assert scores.tolist() == [1.0, 2.0]
        assert not scores.requires_grad


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_what_is_no_float_for_each_response_is_an_error(script: Any) -> None:
    for returned in NO_FLOATS:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            score(script, lambda *_, x=returned: x)


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_function_gets_the_columns_that_it_names(script: Any) -> None:
    """Its first two parameters, whatever their names, are queries and responses."""
    rows = []
    for i in (6, 7):
        row = {
            "query": words(5, i),
            "answers": f"w{i}",
            "level": i,
            "response": "no",
        }
        rows.append(row)
    tokenizer, args = start(script, query_dataset=rows, reward_fn="test_data:named")
    reward = script.load_reward(args, "tiny", tokenizer, 14)
    queries = script.load_queries("query_dataset", args, tokenizer, 2)
    queries = sorted(queries, key=lambda query: query.columns["level"])
    assert reward(queries, [[6], [6]]).tolist() == [61, 70]


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_parameter_named_kwargs_gets_all_columns(script: Any) -> None:
    """And `response_ids` is a column like others."""
    seen = {}

    def one(queries: Any, responses: Any, response_ids: Any) -> Any:
        seen["response_ids"] = response_ids
        queries.clear()
        return [0.0, 0.0]

    def everything(a: Any, b: Any, **kwargs: Any) -> Any:
        seen.update(kwargs)
        seen["names"] = sorted(kwargs)
        seen["texts"] = (list(a), list(b))
        return [0.0, 0.0]

    columns = {
        "input_ids": "column",
        "response_ids": "column",
        "tags": ["a"],
        "queries": 3,
    }
    for function in (one, everything):
        seen.clear()
        score(script, function, columns)
        assert seen["response_ids"] == ["column"] * 2
    assert seen["names"] == sorted(columns)
    assert (seen["tags"], seen["queries"]) == ([["a"], ["a"]], [3, 3])
    assert seen["texts"] == (["w5", "w6"], ["w7", "w8 w9"])


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
            "--query_prefix",
            "none",
            "--query_suffix=none",
        ]
        monkeypatch.setattr(sys, "argv", [script.__name__, "tiny", *given])
        args = script.parse_args()[1]
        names = "start_text end_text truncate_token query_prefix query_suffix".split()
        assert [getattr(args, name) for name in (own, *names)] == [None] * 6
