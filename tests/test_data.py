"""What the scripts make of queries, labels and preferences: prompts, chats, BOS, EOS, long texts, reward functions."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from run_tools import to_lines
from tiny_models import save_model
from tokenizers import models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ppo_rlhf
import rloo_rlhf
import train_reward

SCRIPTS, EOS, BOS, PAD = (ppo_rlhf, rloo_rlhf, train_reward), 0, 1, 50_259
CHAT = """{% for m in messages %}{{ ('w40 ' if m.role == 'user' else 'w41 ') + m.content + ' <|endoftext|> w42 ' }}\
{% endfor %}{% if add_generation_prompt %}w41 {% endif %}"""
ASKED, YES, NO = ([{"role": "assistant" if x != "w5" else "user", "content": x}] for x in ("w5", "w6", "w7"))
HUMAN = "\n\nHuman: Is it far?\n\nAssistant:"
PAIR = {"prompt": "w5", "chosen": "w6", "rejected": "w7"}
LABEL = {"query": [5], "sample0": [6], "sample1": [7], "best": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose tokenizer begins no text with BOS and pads with EOS, and a Llama, whose tokenizer does neither."""
    folder = tmp_path_factory.mktemp("models")
    for name, special in (("gpt2", {"bos_token": "<|endoftext|>"}), ("llama", {"bos_token": "w1", "pad_token": "w49"})):
        tokenizer = AutoTokenizer.from_pretrained(save_model(folder / name, name), **special)
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
    return " ".join(f"w{token}" for token in tokens)


def start(script: Any, chat: str | None = None, **changes: Any) -> tuple[Any, Any]:
    """Tokenizer and Args; a list of rows in their place becomes a file."""
    given = {"base_model": "gpt2", "start_text": None, "end_text": None, "query_length": 8, "response_length": 6}
    given |= {"truncate_token": None} | ({"batch_size": 2} if script is train_reward else {"eval_queries": 1})
    for name, x in (given := given | changes).items():
        if isinstance(x, list):
            Path(f"{name}.jsonl").write_text(to_lines(*x))
            given[name] = f"{name}.jsonl"
    tokenizer = script.fetch(AutoTokenizer, "base_model", args := script.Args(**given))
    tokenizer.chat_template = chat
    return tokenizer, args


def read_queries(rows: list[dict[str, Any]], *chat: str, part: str = "input_ids", **changes: Any) -> list[list[int]]:
    """What all three scripts make of these rows, in the order of its tokens."""
    found = [x.load_queries(*start(x, *chat, query_dataset=rows, **changes), 1_000) for x in SCRIPTS]
    assert found[0] == found[1] == found[2]
    return sorted(query[part] for query in found[0])


def read_labels(rows: list[dict[str, Any]], *chat: str, **changes: Any) -> Any:
    """Query, best response and the others of every label."""
    labels, held_out = train_reward.load_labels(*start(train_reward, *chat, label_dataset=rows, **changes))
    assert not held_out
    return [(query, responses.pop(best), *responses) for query, responses, best in labels]


def refuse(read: Any, rows: list[dict[str, Any]], *says: str, chat: Any = None, **changes: Any) -> None:
    with pytest.raises(ValueError) as caught:
        read(rows, chat, **changes)
    text = str(caught.value)
    assert "\n" not in text and all(x in text for x in ("_dataset.jsonl: ", *says)), text


def test_a_text_begins_with_bos_once_and_token_ids_that_are_none_stay() -> None:
    """All else about it is in the twins' runs."""
    rows = [{"query": "w5 w6"}, {"query": "w1 w7"}]
    assert read_queries(rows, base_model="llama") == [[BOS, 5, 6], [BOS, 7]]
    found = read_queries(rows, base_model="llama", part="context", query_prefix="w30", query_suffix="w31")
    assert found == [[BOS, 30, 5, 6, 31], [BOS, 30, 7, 31]]
    found = read_queries([{"query": [EOS, 5, PAD]}, {"query": [6, EOS, 8]}], base_model="llama")
    assert found == [[BOS, EOS, 5], [BOS, 6, EOS, 8]]
    assert read_labels([LABEL | {"sample1": [EOS, PAD]}] * 2) == [([5], [EOS], [6])] * 2


def test_another_models_tokenizer_gets_token_ids_as_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(shutil.copytree("gpt2", "moved"))
    vocabulary = {word: (i + 7) % 50 for word, i in tokenizer.get_vocab().items()}
    tokenizer.backend_tokenizer.model = models.WordLevel(vocabulary, unk_token="<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained("moved")
    rows = [{"query": [5, 6, PAD]}, {"query": [48, 20]}]
    assert read_queries(rows, base_model="moved", token_ids_of="gpt2") == [[5, 27], [12, 13]]


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_chats_go_through_the_template(column: str) -> None:
    rows, first = [{column: ASKED}, {column: ASKED + NO + ASKED}], [40, 5, EOS, 42, 41]
    for template in (CHAT, "{{ 'w1 ' }}" + CHAT):  # one that writes BOS itself: it stays one
        found = read_queries(rows, template, base_model="llama", query_length=20)
        assert found == [[BOS, *first], [BOS, *first, 7, EOS, 42, *first]]
    refuse(read_queries, rows, "chat_template is not set")
    refuse(read_queries, rows, "roles alternate", chat="{{ raise_exception('roles alternate') }}")


def test_queries_that_are_none_are_refused_in_a_line() -> None:
    for row, says in (({"prompt": ["w5", "w6"]}, "prompt"), ({"text": None}, "text"), ({"words": "w5"}, "words")):
        refuse(read_queries, [row] * 3, "0 queries", says)
    refuse(read_queries, [{"text": "w5"}], "1 queries")
    refuse(read_queries, [{"query": [5, 50]}] * 3, "--token_ids_of")
    Path("set").mkdir()
    Path("set/test.jsonl").write_text(to_lines({"text": "w5"}))
    with pytest.raises(ValueError, match="--query_dataset set: .*test.*train"):
        ppo_rlhf.load_table("query_dataset", start(ppo_rlhf, query_dataset="set")[1])


BEGINS = [(HUMAN, " No, near.", " Yes."), ("It is", " bread", " break"), ("Q?\nA:", "\nYes", "\nNo")]


@pytest.mark.parametrize(("begin", "chosen", "rejected"), [*BEGINS, ("", "Yes", "Yes, sir")])
def test_the_common_beginning_of_two_texts_up_to_a_word_is_their_prompt(begin: str, chosen: str, rejected: str) -> None:
    """The raw form of Anthropic's HH: the dialogues stand whole in both columns. A prompt that is given stays whole."""
    for row in ({}, {"prompt": None}):
        row |= {"chosen": begin + chosen, "rejected": begin + rejected}
        assert list(train_reward.preference_texts(row, None)) == [begin, chosen, rejected]
        row["prompt"] = begin[:2]
        assert list(train_reward.preference_texts(row, None)) == [begin[:2], begin + chosen, begin + rejected]


def test_useless_pairs_are_counted_and_left_out_and_too_many_stop_the_run(capsys: pytest.CaptureFixture) -> None:
    same = PAIR | {"chosen": words(6, 6, 6, 7), "rejected": words(6, 6, 6, 8)}  # after three tokens
    useless = [same, PAIR | {"chosen": ""}, PAIR | {"prompt": words(*[5] * 9)}]
    assert read_labels([PAIR] * 27 + useless, response_length=3) == [([5], [6], [7])] * 27
    assert len([line for line in capsys.readouterr().err.splitlines() if "left out 3 of 30 pairs" in line]) == 1
    refuse(read_labels, [PAIR] * 26 + [same] * 4, "4 of 30", response_length=3)
    refuse(read_labels, [PAIR] * 19 + [useless[1]], "--batch_size 20", batch_size=20)  # there would be no update


def test_preferences_as_chats_are_read_as_the_template_writes_them() -> None:
    pair = {"prompt": ASKED, "chosen": YES, "rejected": NO}
    for row in ({"chosen": ASKED + YES, "rejected": ASKED + NO}, pair):
        found = read_labels([row] * 2, CHAT, base_model="llama")
        assert found == [([BOS, 40, 5, EOS, 42, 41], [6, EOS, 42], [7, EOS, 42])] * 2
        found = read_labels([row] * 2, CHAT, base_model="llama", truncate_token="eos")  # nothing stands behind it
        assert found == [([BOS, 40, 5, EOS, 42, 41], [6, EOS], [7, EOS])] * 2
    refuse(read_labels, [{"chosen": ASKED + YES, "rejected": YES + NO}] * 2, chat=CHAT)  # two prompts
    refuse(read_labels, [pair] * 2, chat=CHAT.replace("%}w41", "%}w41 w43"))  # a prompt that no answer has
    refuse(read_labels, [PAIR | {"prompt": ["w5", "w6"]}] * 2, chat=CHAT)
    refuse(read_labels, [{"prompt": "w5", "chosen": ["w6"], "rejected": ["w7"]}] * 2, chat=CHAT)
    refuse(read_labels, [pair] * 2, "chat_template is not set")


def test_labels_with_gaps_are_refused_in_a_line() -> None:
    """Two identical samples are none: people saw both, and either is right."""
    bad = [{"best": x} for x in (2, -1, None, 0.5, True)]
    for change in ({"sample1": []}, {"sample1": [PAD]}, {"query": [PAD]}, *bad):
        refuse(read_labels, [LABEL | change] * 2, "sample")
    refuse(read_labels, [LABEL, LABEL, LABEL | {"sample0": None}], "sample")
    refuse(read_labels, [LABEL | {"sample3": [9]}] * 2, "sample3")
    assert read_labels([LABEL | {"sample0": [7]}] * 2) == [([5], [7], [7])] * 2


def named(query: list[str], response: list[str], *, answers: list[str], level: Any = ()) -> list[float]:
    return [float(a in r.split()) + 10 * x for r, a, x in zip(response, answers, level, strict=True)]


NO_FLOATS = [lambda _, x: dict.fromkeys(x, 1.0), lambda _, x: (1.0 for _ in x), lambda *_: 1.0, lambda _, x: [1.0] * 3]
NO_FLOATS += [lambda *_: sys.exit(0)]


@pytest.mark.parametrize(("script", "expected"), [(ppo_rlhf, [61, 71]), (rloo_rlhf, [61, 60, 70, 71])])
def test_a_function_gets_the_columns_that_it_names(script: Any, expected: list[float]) -> None:
    """Its first two parameters, whatever their names, are queries and responses; it must return a float for each."""
    rows = [{"query": words(5, i), "answers": f"w{i}", "level": i, "response": "no"} for i in (6, 7)]
    tokenizer, args = start(script, query_dataset=rows, reward_fn="test_data:named")
    reward = script.load_reward(args, "tiny", tokenizer, 14, torch.device("cpu"))
    queries = sorted(script.load_queries(tokenizer, args, 2), key=lambda query: query["level"])
    given = queries, [[6], [7], [6], [7]][: len(expected)], tokenizer, args
    assert script.score(reward, *given).tolist() == [[0.0] * 6 + [x] for x in expected]
    for wrong in NO_FLOATS:
        with pytest.raises(RuntimeError, match=f"--reward_fn test_data:named: no {len(expected)} floats, or lists"):
            script.score(wrong, *given)


def test_none_is_none_with_and_without_an_equals_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, own in zip(SCRIPTS, ("kl_target", "kl_target", "num_labels"), strict=True):
        given = ["--start_text=none", "--end_text", "none", "--truncate_token=None", f"--{own}=none"]
        monkeypatch.setattr(sys, "argv", [script.__name__, "tiny", *given])
        args = script.parse_args()[1]
        assert [args.start_text, args.end_text, args.truncate_token, getattr(args, own)] == [None] * 4
