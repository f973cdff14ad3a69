"""What the scripts make of queries, labels, preferences and chats; tables; reward functions."""

import colorsys
import gzip
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from run_tools import to_lines, turn
from tiny_models import begin_with, rows_of, save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import ppo_rlhf
import train_reward
from plumbing import data as data_module
from plumbing import labels as labels_module
from plumbing import models as models_module
from plumbing.launch import UserError

EOS = 0
BOS = 1
PAD = 50_259

MARKS = ["<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
MARKS += ["<|eot_id|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"]
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
def folders(tmp_path_factory):
    """Tokenizers: GPT-2's, without BOS; Llama's, with BOS and a pad; one of bytes and MARKS."""
    folder = tmp_path_factory.mktemp("models")
    gpt2 = save_tokenizer(folder / "gpt2")
    gpt2.bos_token = MARKS[EOS]
    llama = save_tokenizer(folder / "llama")
    llama.pad_token = "w49"
    begin_with(llama, "w1")
    texts = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {text: i for i, text in enumerate(texts)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    of_bytes = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=MARKS[EOS])
    begin_with(of_bytes, MARKS[BOS])
    for name, tokenizer in (("gpt2", gpt2), ("llama", llama), ("bytes", of_bytes)):
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(folders, tmp_path, monkeypatch):
    """A folder to be in, with the tokenizers."""
    for folder in folders.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # to which --reward_fn adds


def words(*tokens):
    return " ".join(f"w{token}" for token in tokens)


def start(script, chat=None, **changes):
    """Tokenizer and Args: BYTES, if there is a template of chats. A list of rows becomes a file."""
    given = dict.fromkeys(("start_text", "end_text", "truncate_token"))
    given |= {"base_model": "gpt2", "query_length": 8, "response_length": 6, "batch_size": 2}
    if chat:
        given |= BYTES
    for name, x in changes.items():
        given[name] = x
        if isinstance(x, list):
            given[name] = f"{name}.jsonl"
            Path(given[name]).write_text(to_lines(*x))
    args = script.Args(**given)
    tokenizer = models_module.load_tokenizer("base_model", args.base_model)
    tokenizer.chat_template = chat
    return tokenizer, args


def read_queries(rows, chat=None, part="for_reward", **changes):
    """What is made of these rows, in the order of its tokens."""
    tokenizer, args = start(ppo_rlhf, chat, query_dataset=rows, **changes)
    _, queries = data_module.load_queries(args, tokenizer, 0, 1_000)
    return sorted(getattr(query, part) for query in queries)


def read_query(row, *chat, **changes):
    (query,) = read_queries([row], *chat, **changes)
    return query


def load_labels(rows, *chat, **changes):
    """Labels to train on, and held-out ones, of a list of rows or a folder."""
    tokenizer, args = start(train_reward, *chat, label_dataset=rows, **changes)
    return labels_module.load_labels(args, tokenizer)


def read_labels(rows, *chat, **changes):
    """Query, best response and the others of every label. A last row is held out, and read too."""
    table = [*rows, rows[0]]
    labels, _ = load_labels(table, *chat, num_labels=len(rows), **changes)
    found = []
    for label in labels:
        responses = list(label.responses)
        found.append((label.query, responses.pop(label.best), *responses))
    return found


def read_label(row, *chat, **changes):
    label, same = read_labels([row, row], *chat, **changes)
    assert label == same
    return label


def refuse(read, rows, *says, chat=None, **changes):
    """The rows, or labels like this one, are refused, with the flag, in a line of these words."""
    flag = "--query_dataset" if read is read_queries else "--label_dataset"
    if isinstance(rows, dict):
        rows = [rows] if read is read_queries else [rows, rows]
    with pytest.raises(UserError) as caught:
        read(rows, chat, **changes)
    text = " ".join(str(caught.value).split())
    assert text.startswith(flag), text
    assert all(x in text for x in says), text


# --- tokens ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("around", ["$A", "<s> $A", "$A </s>", "<s> $A </s>", "<s> . $A"])
@pytest.mark.parametrize("bos_token", ["<s>", "?", None])
def test_what_stands_before_a_text_is_bos_and_what_stands_behind_is_left_out(bos_token, around):
    """Whatever the tokenizer calls BOS: an unknown word may have that name, as GPT-2's end."""
    numbers = {word: i for i, word in enumerate("? <s> </s> a b . eos".split())}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pairs = [(word, numbers[word]) for word in around.split() if word != "$A"]
    backend.post_processor = TemplateProcessing(single=around, special_tokens=pairs)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.bos_token = bos_token
    begin = [numbers[word] for word in around.partition("$A")[0].split()]
    assert data_module.bos(tokenizer) == begin
    assert data_module.encode("a b", tokenizer) == [3, 4]
    assert data_module.encode("new b", tokenizer) == [0, 4]
    assert data_module.encode([*begin, 3, 1], tokenizer) == [3, 1]
    assert data_module.encode([*begin, *begin, 3], tokenizer) == [*begin, 3]

    def token_of(text):
        return data_module.token_id("truncate_token", text, tokenizer)

    for text in (".", "</s>", "a"):
        assert token_of(text) == numbers[text]
    assert token_of("eos") == 2
    assert token_of(" a") == 3, "it is no word of the vocabulary"
    with pytest.raises(UserError, match="^--truncate_token 'a b' must be one .*3, 4"):
        token_of("a b")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="^--truncate_token 'eos' must be one token"):
        token_of("eos")


def test_one_token_is_the_one_of_that_name_before_what_a_text_alone_begins_with():
    """Llama 2's tokenizer puts a space before a text: `.` alone is not the one in a sentence."""
    texts = "</s> ▁ a . ▁a ▁. <0x0A> eos".split()
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges = [("▁", "a"), ("▁", ".")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("a.").input_ids == [4, 3]
    assert tokenizer("\n").input_ids == [1, 6]
    assert tokenizer(".").input_ids == [5]
    for text, token in {".": 3, "\n": 6, "eos": 0, "</s>": 0, "a": 2}.items():
        assert data_module.token_id("truncate_token", text, tokenizer) == token
    tokenizer, args = start(ppo_rlhf, base_model="bytes", truncate_token="Ġ")
    with pytest.raises(UserError, match="^--truncate_token 'Ġ' must be one token"):
        # its vocabulary's word for a space
        data_module.token_id("truncate_token", args.truncate_token, tokenizer)


@pytest.mark.parametrize("size", [50_257, 50_259, 50_260, 60_000])
def test_the_padding_of_gpt2s_ids_is_a_token_of_larger_models(size):
    names = {"a": 0} | {f"w{i}": i for i in range(1, size)}
    backend = Tokenizer(models.WordLevel(names, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    expected = [5, PAD] if size > PAD else [5]
    assert data_module.encode([5, PAD], tokenizer) == expected


def test_ids_of_tokens_that_were_added_are_known():
    tokenizer, _ = start(train_reward)
    tokenizer.add_tokens("new")
    ids = [5, tokenizer.get_vocab()["new"]]
    assert data_module.encode(ids, tokenizer) == ids


def test_a_text_begins_with_bos_once_and_token_ids_that_are_none_stay():
    llama = {"base_model": "llama"}
    rows = [{"query": "w5 w6"}, {"query": "w1 w7"}]
    assert read_queries(rows, **llama) == rows_of("1 5 6 / 1 7")
    around = {"query_prefix": "w30", "query_suffix": "w31"}
    found = read_queries(rows, part="for_policy", **llama, **around)
    assert found == rows_of("1 30 5 6 31 / 1 30 7 31")
    rows = [{"query": ids} for ids in rows_of(f"0 5 {PAD} / 6 0 8 / 1 7 {PAD}")]
    assert read_queries(rows, **llama) == rows_of("1 0 5 / 1 6 0 8 / 1 7")
    assert read_label(LABEL | {"sample1": [EOS, PAD]}) == ([5], [EOS], [6])


@pytest.mark.parametrize(
    "text", '["w5", "w6"]; 3; 0.5; [[5]]; [5, 50]; [5, -1]; [5, null]; [5.0]; [true]'.split("; ")
)
def test_what_is_neither_text_nor_ids_is_refused_in_a_line(text):
    bad = json.loads(text)
    says = f"_dataset.jsonl, row 0: neither text, nor chat, nor ids of this tokenizer: {bad}"
    refuse(read_queries, {"query": bad}, says)
    for row in (LABEL | {"query": bad}, LABEL | {"sample1": bad}, PAIR | {"prompt": bad}):
        refuse(read_labels, row, says)


# --- tables ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", ["", "part"])
@pytest.mark.parametrize("split", ["", "train", "test"])
@pytest.mark.parametrize("before", ["", "hf://datasets/"])
def test_config_and_split_of_a_table_on_the_hub_are_passed_on(config, split, before):
    table = datasets.Dataset.from_list([{"text": "w1"}, {"text": "w2"}])
    tables = {"train": table.select([0]), "test": table}
    args = ppo_rlhf.Args(query_dataset=f"{before}an/owner:{config}:{split}".rstrip(":"))
    with mock.patch.object(datasets, "load_dataset", return_value=tables) as load:
        splits = data_module.load_table("query_dataset", args.query_dataset)
    load.assert_called_once_with(path="an/owner", name=config or None)
    assert splits == ({"train": tables[split]} if split else tables)


def test_a_table_is_a_split_that_is_named_or_train():
    """A folder has files of one kind. One that exists is no name with a split."""
    names = "set/test set/validation set/train a:b/train mixed/train no/test only/test"
    for name in names.split():
        Path(name).parent.mkdir(exist_ok=True)
        Path(f"{name}.jsonl").write_text(to_lines({"text": name}))
    Path("mixed/a.csv").write_text("text\nw5\n")

    def load(name):
        return data_module.load_table("query_dataset", name)

    (found,) = load("tiny/queries::test").values()  # beside the script
    assert len(found) > 0
    Path("no/below").mkdir()
    Path("no/below/a.csv").write_text("text\nw5\n")
    Path("of_csv").mkdir()
    Path("of_csv/train.csv").write_text("text\nw5\n")
    Path("of_csv/dataset_info.json").write_text("{}")
    assert load("of_csv")["train"]["text"][:] == ["w5"]
    Path("packed").mkdir()
    Path("packed/a.csv").write_text("text\nw5\n")
    Path("packed/b.json.gz").write_bytes(gzip.compress(to_lines({"text": "w6"}).encode()))
    for name, text in (("set", "set/train"), ("set::test", "set/test"), ("a:b", "a:b/train")):
        splits = load(name)
        assert splits["train"]["text"][:] == [text]
        assert ("test" in splits) == (name == "set"), "a split that is named is the only one"
    for name in ("no", "mixed", "packed"):
        says = rf"^--query_dataset \S*{name} has files of several kinds, .*'csv'.*: name one of th"
        with pytest.raises(UserError, match=says):
            load(name)
    for name, has in {"only": "'test'", "set::no": "'train', .*"}.items():
        says = rf"^--query_dataset \S*{name} has the splits \[{has}\]: name one, as in DATA::split$"
        with pytest.raises(UserError, match=says):
            load(name)


# --- queries --------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", range(4))
def test_queries_are_the_first_column_that_there_is_of(first):
    names = "prompt messages query text".split()
    row = {"other": "w40"}
    for i in reversed(range(first, len(names))):
        row[names[i]] = words(i + 1)
        if names[i] == "messages":
            row[names[i]] = turn(words(i + 1), "user")
    contents = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert read_query(row, contents, base_model="gpt2") == [first + 1]
    named = read_query(row, contents, base_model="gpt2", prompt_column="other")
    assert named == [40]


def test_a_column_of_prompts_that_is_not_there_is_refused_with_those_that_are():
    says = "row 0: --prompt_column must name the column of prompts, one of ['text', 'b']"
    refuse(read_queries, {"text": "w5", "b": 1}, says, prompt_column="question")


def test_columns_that_may_belong_to_the_prompt_are_left_out_if_it_is_named():
    row = {"prompt": "w5", "context": "w6", "system": "w7"}
    refuse(read_queries, row, "row 0: ['system', 'context'] are not read: put them into the prompt")
    assert read_query(row, prompt_column="prompt") == [5]
    assert read_query(row | {"context": "", "system": None}) == [5]


def test_texts_of_files_arrive_as_they_stand_there():
    """In csv files, datasets would make an empty cell of None, and 18.0 of 18 beside an empty one;
    in JSON, a time of a date."""
    cells = ["None", "NA", "null", "18", "1e3", "2020-01-01", "True"]
    Path("a.csv").write_text("text,answer\n" + "".join(f"w5 {x},{x}\n" for x in cells) + "w6,\n")
    read = data_module.load_table("query_dataset", "a.csv")["train"]
    assert read["answer"][:] == [*cells, ""]
    assert read["text"][:] == [f"w5 {x}" for x in cells] + ["w6"]
    Path("of_csv").mkdir()
    Path("a.csv").rename("of_csv/train.csv")
    assert data_module.load_table("query_dataset", "of_csv")["train"]["answer"][:] == [*cells, ""]
    assert read_query({"prompt": "\ufeffw5"}) == [5]  # the mark at the start of a text file
    Path("a.csv").write_text("text,__index_level_0__\nw5,1\nw6,2\n")
    assert data_module.load_table("query_dataset", "a.csv")["train"]["text"][:] == ["w5", "w6"]
    for line in ("w5, w6,1", "w5,1,"):
        Path("a.csv").write_text(f"text,answer\n{line}\n")
        with pytest.raises(UserError, match="more cells than the first line"):
            data_module.load_table("query_dataset", "a.csv")
    row = {"text": "2020-01-01", "when": "2020-01-01T10:00:00Z", "number": 3, "none": None}
    row["messages"] = turn("2021-02-03", "user")
    Path("a.jsonl").write_text(to_lines(row, row))
    read = data_module.load_table("query_dataset", "a.jsonl")["train"]
    assert read[0] == read[1] == row
    # datasets would take these columns for an agent's log, and read other rows
    log = {"id": "1", "source": "a", "model": "b", "system_prompt": "c"}
    log["messages"] = turn("w5", "user")
    Path("a.jsonl").write_text(to_lines(log, log))
    read = data_module.load_table("query_dataset", "a.jsonl")["train"]
    assert read[0] == read[1] == log


def test_a_folder_may_be_named_like_a_file_and_a_file_of_another_kind_is_refused():
    """Spark and others write folders of this form. datasets would not find either."""
    Path("a.parquet").mkdir()
    Path("a.parquet/_SUCCESS").touch()
    datasets.Dataset.from_list([{"text": "w5"}]).to_parquet("a.parquet/part-0000.snappy.parquet")
    assert data_module.load_table("query_dataset", "a.parquet")["train"]["text"][:] == ["w5"]
    Path("a.jsonl").write_text(to_lines({"text": "w5"}))
    for name in ("a.tsv", "a.JSONL", "a.jsonl.zst"):
        Path(name).write_text(to_lines({"text": "w5"}))
    for name in ("a.tsv", "a.JSONL", "a.jsonl.zst", "a.jsonl::train"):
        with pytest.raises(UserError, match=f"^--query_dataset .*{name}: a file must end in"):
            data_module.load_table("query_dataset", name)


@pytest.mark.parametrize("name", ["a*", "a?", "a[b]"])
def test_names_of_files_and_folders_are_no_patterns(name):
    """A folder's would match others, so it is refused."""
    for folder in (name, "ab"):
        Path(folder).mkdir(exist_ok=True)
        for file in (Path(folder, "train.jsonl"), Path(f"{folder}.jsonl")):
            file.write_text(to_lines({"text": folder}))
    with pytest.raises(UserError, match=r"must not have \*, \? or \[$"):
        data_module.load_table("query_dataset", name)
    for file in (f"{name}/train.jsonl", f"{name}.jsonl"):
        assert data_module.load_table("query_dataset", file)["train"]["text"][:] == [name]


def test_a_query_is_cut_at_the_first_start_and_the_last_end():
    """What the recordings of OpenAI's code do not have."""
    tokens = [1, 2, 3, 4, 3, 5]
    for start_token, length, long, query in (
        (None, 6, "drop", tokens),
        (None, 5, "drop", []),
        (None, 4, "keep_end", [3, 4, 3, 5]),
        (3, 3, "drop", [4, 3, 5]),
    ):
        cause = "" if query else "longer than --query_length"
        assert data_module.cut_query(tokens, length, start_token, None, long) == (query, cause)
    # the first cause is named
    assert data_module.cut_query([], 2, 9, None, "drop") == ([], "empty")
    assert data_module.cut_query(tokens, 2, 9, None, "drop") == ([], "without --start_text")


def test_longer_queries_are_kept_only_if_there_is_an_end_text():
    row = {"text": words(3, 5, 6, 7)}
    query = read_query(row, end_text="w5", query_length=3)
    assert query == [3, 5]
    refuse(read_queries, row, "no query is left", start_text="w3", query_length=2)


def test_the_seed_orders_queries_and_more_than_are_needed_are_not_read():
    """One is read even if none is needed."""
    rows = [{"text": words(5 + i)} for i in range(40)]
    orders = {}
    for seed, need in itertools.product((1, 2), (40, 25, 0)):
        tokenizer, args = start(ppo_rlhf, query_dataset=rows, seed=seed)
        _, queries = data_module.load_queries(args, tokenizer, 0, need)
        tokens = [query.for_reward[0] for query in queries]
        assert tokens == orders.setdefault(seed, tokens)[: max(need, 1)]
    assert set(orders[1]) == set(orders[2]) == set(range(5, 45))
    assert orders[1] != orders[2] != sorted(orders[2])


def test_no_query_is_held_out_and_trained_on():
    """Held-out queries are all different. Others take the places of those that are like them."""
    rows = [{"text": f"w{i}"} for i in (5, 5, 5, 5, 6, 6, 6, 7, 8, 9)]
    tokenizer, args = start(ppo_rlhf, query_dataset=rows)
    texts = []
    for need in (2, 3):
        both = data_module.load_queries(args, tokenizer, 2, need)
        held_out, others = [[query.prompt for query in queries] for queries in both]
        assert len(set(held_out)) == 2
        assert len(others) == need
        assert not set(held_out) & set(others)
        texts.append(held_out + others)
    assert texts[0] == texts[1][:4]  # a longer run reads the same, and more


def test_a_table_without_a_query_is_refused():
    says = "row 0: --prompt_column must name the column of prompts, one of ['words']"
    refuse(read_queries, {"words": "w5"}, says)
    says = "--query_dataset: no query is left of 1 rows: "
    for text in (None, ""):
        refuse(read_queries, {"text": text}, says + "{'empty': 1, 'held out': 0}")
    refuse(read_queries, {"text": words(*[5] * 9)}, says + "{'longer than --query_length': 1, ")


def test_dropped_rows_are_counted_by_cause(capsys):
    """And there is a warning if they are most of those that were read."""
    rows = [{"text": x} for x in ("w5 w9", "w3 w5 w9", "w3 w5", "w3 w5 w5 w5 w9")]
    flags = {"start_text": "w3", "end_text": "w9", "long_queries": "drop", "query_length": 3}
    assert read_queries(rows, **flags) == [[5, 9]]
    printed = capsys.readouterr().out
    assert "--query_dataset: 4 rows, 4 read, 1 used, dropped {" in printed
    causes = ("without --start_text", "without --end_text", "longer than --query_length")
    assert all(f"'{cause}': 1" in printed for cause in causes)
    assert printed.count("WARNING: more than half of the rows that were read are dropped") == 1
    read_queries(rows[:1])
    printed = capsys.readouterr().out
    assert "1 rows, 1 read, 1 used, dropped {}, first" in printed
    assert "WARNING" not in printed


def test_the_first_query_and_label_are_shown_as_they_are_read(capsys):
    """A template that is cut, or a column that is ignored, can be seen."""
    read_query({"text": "w5 w6"}, query_suffix="w9", base_model="llama")
    assert "dropped {}, first 'w1 w5 w6 w9'\n" in capsys.readouterr().out
    labels, _ = load_labels([PAIR] * 4, base_model="llama")
    answers = [words(*row) for row in labels[0].responses]
    assert sorted(answers) == ["w6", "w7"]
    says = f"--label_dataset: 4, first {['w1 w5', *answers]}, best is {labels[0].best}\n"
    assert says in capsys.readouterr().out


# --- labels ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("begin", "chosen", "rejected"),
    [
        ("\n\nHuman: Is it far?\n\nAssistant:", " No, near.", " Yes."),
        ("It is", " bread", " break"),
        ("Q?\nA:", "\nYes", "\nNo"),
        ("", "Yes", "Yes, sir"),
    ],
)
def test_the_common_beginning_of_two_texts_up_to_a_word_is_their_prompt(begin, chosen, rejected):
    """As in Anthropic's HH. A given prompt stays whole, and is read once if both repeat it. Without
    a prompt a label is of no use."""
    long = {"query_length": 99, "response_length": 99}
    tokenizer, args = start(train_reward, base_model="bytes", **long)

    def assert_read(row, *expected):
        label = labels_module.read_label(row, 0, None, Counter(), tokenizer, args)
        assert tokenizer.batch_decode([label.query, *label.responses]) == [*expected]

    answers = [begin + chosen, begin + rejected]
    row = {"chosen": answers[0], "rejected": answers[1]}
    if begin:
        assert_read(row, begin, chosen, rejected)
    else:
        assert_read(row, "", "", "")
    for prompt in ("", None):
        assert_read(row | {"prompt": prompt}, "", "", "")
    first = begin[:2] or "Y"
    rest = [answer.removeprefix(first) for answer in answers]
    assert_read(row | {"prompt": first}, first, *rest)
    assert_read(row | {"prompt": "How? "}, "How? ", *answers)
    chance = "How? " + chosen
    assert_read(row | {"prompt": "How? ", "chosen": chance}, "How? ", chance, answers[1])


def test_prompts_that_both_answers_repeat_are_taken_off_and_counted(capsys):
    repeated = {"prompt": "w5", "chosen": "w5 w6", "rejected": "w5 w7"}
    read = read_labels([repeated, PAIR, repeated | {"rejected": "w7"}])
    assert read == [READ, READ, ([5], [5, 6], [7])]
    counted = "{'with a prompt that both answers began with': 1}"
    assert f"--label_dataset: 3 of 3 rows {counted}\n" in capsys.readouterr().out


def test_answers_without_an_end_are_counted_after_they_are_cut(capsys):
    """With `eos` those to which it was added have one."""
    row = PAIR | {"chosen": words(6, 7, 9)}
    row["rejected"] = words(7, 9)
    cases = (
        (3, "w9", 0),
        (2, "w9", 2),
        (1, "w9", 4),
        (4, "eos", 0),
    )
    for length, end, count in cases:
        given = {"truncate_token": end, "response_length": length}
        read_labels([row] * 2, **given, truncate_after=0)
        counted = f"{{'answers without --truncate_token': {count}}}" if count else "{}"
        assert f"--label_dataset: 2 of 2 rows {counted}" in capsys.readouterr().out


def test_labels_have_other_columns_and_numbers():
    """Two of four samples may be equal."""
    assert read_label({"query": "w5", "chosen": "w6", "rejected": "w7"}) == READ
    assert read_label(LABEL | {"best": 1.0}) == ([5], [7], [6])
    four = LABEL | {"sample2": [6], "sample3": [7]}
    assert read_label(four) == tuple(rows_of("5 / 7 / 6 / 6 / 7"))
    eleven = LABEL | {f"sample{i}": [10 + i] for i in reversed(range(11))}
    others = [[10 + i] for i in range(10)]
    assert read_label(eleven | {"best": 10}) == ([5], [20], *others)


def test_all_rows_of_a_file_can_be_trained_on():
    """Then none is held out."""
    for num_labels in (None, 8):
        labels, held_out = load_labels([LABEL] * 8, num_labels=num_labels, batch_size=8)
        assert (len(labels), held_out) == (8, [])


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
HOW = "How tall is tower 0?"
FAR = turn(HOW, "user")
TALL = turn("0 metres.")
YARDS = turn("0 yards.")  # what both answers begin with is not of the prompt
TEXTS = {"chosen": "0 metres.", "rejected": "0 yards."}
CHATS = {"chosen": FAR + TALL, "rejected": FAR + YARDS}
ANSWERS = {"chosen": TALL, "rejected": YARDS}
ASKED = ANSWERS | {"prompt": FAR}
TOOL = turn("0 m", "tool")
BRIEF = turn("Be brief.", "system")
EARLIER = [*turn("How tall is tower A?", "user"), *turn("3 metres."), *turn("And 0?", "user")]
WITH_SYSTEM = {"chosen": BRIEF + FAR + TALL, "rejected": BRIEF + FAR + YARDS}
SEVERAL = {"chosen": EARLIER + TALL, "rejected": EARLIER + YARDS}
# Rows of labels, the chat that they ask, and both answers
LAYOUTS = {
    "ultrafeedback": (CHATS | {"prompt": HOW, "messages": FAR + TALL}, FAR),
    "whole chats": (CHATS, FAR),
    "prompt and whole chats": (CHATS | {"prompt": FAR}, FAR),
    "prompt and answers": (ASKED, FAR),
    "empty prompt": (CHATS | {"prompt": ""}, FAR),
    "one whole chat": (ASKED | {"rejected": FAR + YARDS}, FAR),
    "prompt as a text": (ANSWERS | {"prompt": HOW}, FAR),
    "answers as texts": (TEXTS | {"prompt": FAR}, FAR),
    "system": (WITH_SYSTEM | {"prompt": HOW}, BRIEF + FAR),
    "several turns, the first as prompt": (SEVERAL | {"prompt": EARLIER[:1]}, EARLIER),
    "tool's message": (ANSWERS | {"prompt": FAR + TOOL}, FAR + TOOL),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_label_asks_what_ppo_asks_and_answers_are_what_the_whole_chat_adds(layout, template):
    """To the token, also where PPO reads the same rows as queries."""
    row, asked = LAYOUTS[layout]
    query = read_query({"prompt": asked}, template)
    assert read_query(row, template) == query
    label = read_label(row, template)
    assert label[0] == query
    assert query.count(BOS) == 1
    tokenizer, _ = start(train_reward, template)
    for answer, tokens in zip((TALL, YARDS), label[1:], strict=True):
        whole = tokenizer.apply_chat_template(asked + answer, tokenize=False)
        begun = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert [BOS, *tokenizer(whole.removeprefix(MARKS[BOS])).input_ids[1:]] == query + tokens
        assert tokenizer.decode(tokens) == whole.removeprefix(begun)
        assert answer[0]["content"] in tokenizer.decode(tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_template_that_does_not_continue_the_generation_prompt_is_refused(layout):
    says = "--label_dataset label_dataset.jsonl, row 0: an answer's chat does not continue '"
    row, _ = LAYOUTS[layout]
    refuse(read_labels, row, says, "<think>", chat=THINKING)


def test_an_end_of_a_chat_ends_answers():
    """What the template writes behind it is cut, and what stands in the prompt stays."""
    cut = {"truncate_token": "<|im_end|>", "truncate_after": 0}
    query, *answers = read_label(CHATS, CHATML, **cut)
    tokenizer, _ = start(train_reward, **BYTES)
    assert tokenizer.batch_decode(answers) == ["0 metres.<|im_end|>", "0 yards.<|im_end|>"]
    assert query == read_query({"prompt": FAR}, CHATML)


def test_chats_that_would_lose_their_end_are_refused():
    """Token 0, the eos, is a token, too."""
    row = {"prompt": FAR}
    says = "row 0: a chat must keep its end: "
    for cut in ({"start_text": "eos"}, {"end_text": "eos"}, {"long_queries": "keep_start"}):
        refuse(read_queries, row, f"{says}--start_text none --end_text none", chat=CHATML, **cut)
    refuse(read_labels, CHATS, says, chat=CHATML, long_queries="keep_start")
    short = {"query_length": 12, "long_queries": "keep_end"}
    assert read_query(row, CHATML, **short) == [BOS, *read_query(row, CHATML)[-12:]]


LEAVES_OUT = CHATML.replace("{{ '<|im_start|>'", "{% if m.role != 'developer' %}{{ '<|im_start|>'")
LEAVES_OUT = LEAVES_OUT.replace("'<|im_end|>\\n' }}", "'<|im_end|>\\n' }}{% endif %}", 1)


def test_a_message_that_the_template_leaves_out_is_refused():
    """As Qwen's templates do with a role that they do not know."""
    brief = turn("Be brief.", "developer")
    assert read_query({"prompt": brief + FAR}, CHATML) != read_query({"prompt": FAR}, CHATML)
    says = "row 0: the chat template leaves out {'role': 'developer', 'content': 'Be brief.'}"
    refuse(read_queries, {"prompt": brief + FAR}, says, chat=LEAVES_OUT)
    refuse(read_labels, ANSWERS | {"prompt": brief + FAR}, says, chat=LEAVES_OUT)


def test_thoughts_that_a_template_cuts_are_left_out():
    cuts = CHATML.replace("m.content +", "m.content.split('</think>')[-1] +")
    answer = turn("<think>\\nHm.\\n</think>\\n3 metres.")
    chat = EARLIER[:1] + answer + EARLIER[2:]
    assert "Hm." not in data_module.render(chat, start(train_reward, cuts)[0])


def test_an_answer_under_another_name_is_not_asked():
    for role in ("gpt", "chatbot", "Assistant"):
        says = "row 0: the last message must be by one of ('user', "
        refuse(read_queries, {"prompt": FAR + turn("0 m", role)}, says, role, chat=CHATML)


def test_a_template_that_can_think_writes_the_same_in_labels_and_queries():
    """Qwen 3's writes an empty thought before the last answer, and, if it is asked not to think, at
    the end of the generation prompt."""
    empty = "<think></think>"
    last = "{% if loop.last and m.role == 'assistant' %}" + empty + "{% endif %}"
    thinking = CHATML.replace(
        "{{ '<|im_start|>' + m.role + '\\n' + m.content",
        "{{ '<|im_start|>' + m.role + '\\n' }}" + last + "{{ m.content",
    )
    asks = "{% if enable_thinking is defined and not enable_thinking %}" + empty + "{% endif %}"
    thinking = thinking.removesuffix("{% endif %}") + asks + "{% endif %}"
    query = read_query({"prompt": FAR}, thinking)
    tokenizer, _ = start(train_reward, thinking)
    assert tokenizer.decode(query).endswith(f"assistant\n{empty}")
    label = read_label(ASKED, thinking)
    assert label[0] == query
    assert tokenizer.decode(label[1]) == "0 metres.<|im_end|>\n"


@pytest.mark.parametrize("name", ["strftime_now('%d %B %Y')", "strftime_now(format='%Y')"])
def test_a_date_in_a_template_is_the_same_on_every_day(name):
    """So that labels of yesterday fit, and a run can be resumed tomorrow."""
    dated = f"{{%- set today = {name} -%}}{{{{ today }}}}|{CHATML}"
    tokenizer, _ = start(train_reward, **BYTES)
    query = read_query({"prompt": FAR}, dated)
    text = tokenizer.decode(query[1:])
    assert text.startswith("26 Jul 2024|<|im_start|>user")
    assert read_label(CHATS, dated)[0] == query


@pytest.mark.parametrize("begins", ["", "\n", "  ", "  {% set a = 1 %}", "{# a #}\n\n"])
def test_the_fixed_date_changes_nothing_else_of_a_template(begins):
    tokenizer, _ = start(train_reward, begins + CHATML)
    expected = tokenizer.apply_chat_template(FAR, tokenize=False, add_generation_prompt=True)
    assert data_module.render(FAR, tokenizer, add_generation_prompt=True) == expected


def test_a_template_that_lacks_or_refuses_is_an_error_of_its_row():
    rows = [{"prompt": FAR}]
    says = "row 0: chat template: "
    refuse(read_queries, rows, says, "chat_template is not set")
    refuse(read_labels, CHATS, says, "chat_template is not set")
    refuse(read_queries, rows, says, "no roles", chat="{{ raise_exception('no roles') }}")


NEITHER = "row 0: neither query, sample0, .., best, nor chosen, rejected: {"
TWO = "row 0: chosen and rejected must be two texts or two chats: ["
REST = EARLIER[2:] + TALL
NOT_TWO = """
{"prompt": "w5", "chosen": "w6", "rejected": [7]}
{"prompt": "w5", "chosen": 6, "rejected": 7}
{"prompt": "w5", "chosen": [{"role": "assistant", "content": "w6"}], "rejected": "w7"}
{"chosen": ["w6"], "rejected": ["w7"]}
"""
SAMPLES = {"query": HOW, "sample0": "0 m", "sample1": "0 yards", "best": 1}
SAME = {"chosen": TALL + REST, "rejected": TALL + REST}
BAD_LABELS = [
    *((LABEL | {"best": best}, NEITHER) for best in (2, -1, None, 0.5)),
    *((json.loads(line), TWO) for line in NOT_TWO.strip().splitlines()),
    # chats about other questions, and answers of several turns without their question
    (SAME | {"prompt": FAR}, "row 0: "),
    (SAME | {"query": "How?"}, "row 0: "),
    (ASKED | {"chosen": [TALL[0] | {"content": "", "tool_calls": [{}]}]}, "a role and a text, and"),
    # a column that may be the prompt, and samples that are no answers
    (TEXTS | {"riddle": "How tall is it?"}, "row 0: --prompt_column must name the column of"),
    (ANSWERS | {"riddle": "How tall is it?"}, "row 0: --prompt_column must name the column of"),
    (SAMPLES | {"sample0": TALL}, "row 0: samples must be texts or token ids, not chats: {"),
    (TEXTS | {"trajectory": EARLIER}, "row 0: --prompt_column must name the column of"),
    (SAMPLES | {"system": "Be brief."}, "['system'] are not read: put them into the prompt"),
    # ids could be of another tokenizer
    (CHATS | {"prompt": [5, 6]}, "row 0: prompt must be a text or a chat, like `chosen`: {"),
]


@pytest.mark.parametrize(("row", "says"), BAD_LABELS)
def test_labels_that_are_none_are_refused_in_a_line(row, says):
    refuse(read_labels, row, says, chat=CHATML)


def test_the_number_of_a_bad_row_is_named():
    refuse(read_labels, [LABEL, LABEL, LABEL | {"best": 2}], NEITHER.replace("0", "2", 1))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"question": HOW}, HOW),
        ({"question": "How tall is it?", "prompt": "tower 0"}, "How tall is it?"),
        ({"question": "Tower \U0001f469\u200d\U0001f467"}, "Tower \U0001f469\u200d\U0001f467"),
    ],
)
def test_a_column_that_is_named_has_the_prompts_of_labels_and_queries(asked, text):
    odd = {"chosen": " \U0001f389 caf\u00e9 \u0646\u0639\u0645", "rejected": " \u5426"}
    tokenizer, _ = start(train_reward, **BYTES)
    for answers in (TEXTS, odd):
        label = read_label(asked | answers, **BYTES, prompt_column="question")
        assert tokenizer.batch_decode(label) == [MARKS[BOS] + text, *answers.values()]
        assert read_query(asked | answers, **BYTES, prompt_column="question") == label[0]


@pytest.mark.parametrize(
    "line",
    """\
'height' {"prompt": [{"role": "user", "content": "", "tool_calls": [{"function": "height"}]}]}
'height' {"prompt": [{"role": "user", "content": "How?"}], "tools": [{"name": "height"}]}
brief {"prompt": [{"role": "user", "content": "How?"}], "system": "Be brief."}
brief {"prompt": [{"role": "user", "content": "How?"}], "system_prompt": "Be brief."}
brief {"prompt": [{"role": "user", "content": "How?"}], "history": ["Be brief."]}
brief {"prompt": [{"role": "user", "content": "How?"}], "context": "Be brief."}
brief {"prompt": [{"role": "user", "content": "How?"}], "passage": "Be brief."}
tower {"prompt": [{"role": "user", "content": "How?"}], "image": "tower.png"}
tower {"prompt": [{"role": "user", "content": "How?"}], "images": ["tower.png"]}
'image' {"prompt": [{"role": "user", "content": [{"text": "How?"}, {"type": "image"}]}]}
How? {"messages": [{"from": "human", "value": "How?"}]}
""".splitlines(),
)
def test_what_would_change_a_chat_in_silence_is_refused_with_its_row(line):
    """A word that the message must show, and a row."""
    word, text = line.split(" ", 1)
    row = json.loads(text)
    says = ("a message must be a role and a text, and no more: {", word)
    if len(row) > 1:
        says = ("'] are not read: put them into the prompt, and name its column",)
    refuse(read_labels, row | ANSWERS, "row 0: ", *says, chat=CHATML)
    refuse(read_queries, row, "row 0: ", *says, chat=CHATML)
    if "prompt" in row and word != "'image'":  # a column has one type
        refuse(read_queries, [{"prompt": FAR}, row], "row 1: ", *says, chat=CHATML)


def test_rows_that_ask_the_same():
    """Contents in parts, as models of images have them, are joined. A key without a value is left
    out: a template that asks whether a message has calls would write them. A query of best of n is
    what PPO asks. Of prompt and chosen the longer one is asked: a system's message may stand in
    one of them only."""
    content = [{"type": "text", "text": HOW[:3]}, {"type": "text", "text": HOW[3:]}]
    in_parts = ASKED | {"prompt": [FAR[0] | {"content": content}]}
    assert read_label(in_parts, CHATML) == read_label(ASKED, CHATML)
    assert read_query(in_parts, CHATML) == read_query(ASKED, CHATML)
    template = "{% for m in messages %}{{ m.tool_calls is defined or m.content }}{% endfor %}"
    row = {"messages": [FAR[0] | {"tool_calls": [], "thinking": None}]}
    assert read_query(row, template) == read_query({"prompt": HOW}, **BYTES)
    for role in ("model", "bot"):
        assert read_query({"prompt": FAR + turn("0 m", role)}, CHATML) == read_query(ASKED, CHATML)
    row = SAMPLES | {"query": FAR + TALL}
    assert read_label(row, CHATML)[0] == read_query(row, CHATML) == read_query(ASKED, CHATML)
    row = {"prompt": BRIEF + FAR}
    assert read_query(row | {"chosen": FAR + TALL}, CHATML) == read_query(row, CHATML)


def test_a_row_whose_chat_is_missing_is_left_out():
    """Its prompt alone would be a text among chats."""
    row = CHATS | {"prompt": HOW}
    missing = row | {"chosen": None}
    assert read_queries([row, missing], CHATML) == [read_query(row, CHATML)]
    without = CHATS | {"chosen": None}
    assert read_queries([CHATS, without], CHATML) == [read_query(CHATS, CHATML)]


def test_an_empty_list_is_no_query_and_no_text():
    rows = [{"query": [5]}, {"query": []}]
    assert read_queries(rows) == [[5]]
    assert read_label(PAIR | {"tags": []}) == READ


@pytest.mark.parametrize(
    ("row", "is_from_chat"),
    [
        (ASKED, True),
        (CHATS, True),
        (TEXTS | {"prompt": FAR}, True),
        (SAMPLES | {"query": FAR}, True),
        (SAMPLES, False),
        (TEXTS | {"prompt": HOW}, False),
        (TEXTS, False),
    ],
)
def test_a_label_says_if_it_is_from_a_chat(row, is_from_chat):
    (label, _), _ = load_labels([row, row], CHATML)
    assert label.is_from_chat == is_from_chat


def test_a_file_in_another_encoding_is_an_error_of_its_row():
    Path("latin.jsonl").write_bytes(b'{"text": "w5 caf\xe9"}\n' * 2)
    for read, flag in ((read_queries, "query_dataset"), (load_labels, "label_dataset")):
        with pytest.raises(UserError, match=rf"^--{flag} latin.jsonl, row [01]: .*utf-8"):
            read("latin.jsonl")


def test_a_bug_that_a_row_brings_out_keeps_its_traceback():
    text = {"text": "w5"}
    for read, row in ((read_queries, text), (load_labels, LABEL)):
        module = data_module if read is read_queries else labels_module
        with mock.patch.object(module, "prompt_of", side_effect=ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                read([row])


# --- labels of no use -----------------------------------------------------------------------------
EMPTY = "left out, for an empty or long prompt, an empty answer, or unlike chats"
EQUAL = "left out, for equal answers"
OF_NO_ANSWER = """
{"prompt": "w5", "chosen": "", "rejected": "w7"}
{"prompt": "w5", "chosen": "w6", "rejected": null}
{"prompt": "w5 w5 w5 w5 w5 w5 w5 w5 w5", "chosen": "w6", "rejected": "w7"}
{"prompt": "", "chosen": "w6", "rejected": "w7"}
{"chosen": "w6 w8", "rejected": "w7 w8"}
{"chosen": "w5 w6 w7", "rejected": "w5 w6"}
{"query": [5], "sample0": [6], "sample1": [], "best": 1}
{"query": [5], "sample0": [6], "sample1": [50259], "best": 1}
{"query": [5], "sample0": null, "sample1": [7], "best": 1}
{"query": [50259], "sample0": [6], "sample1": [7], "best": 1}
"""
USELESS = [
    *((json.loads(line), EMPTY) for line in OF_NO_ANSWER.strip().splitlines()),
    (PAIR | {"chosen": "w6 w6 w6 w7", "rejected": "w6 w6 w6 w8"}, EQUAL),
    (LABEL | {"sample0": [7]}, EQUAL),
    (ASKED | {"rejected": turn("")}, EMPTY),
    (ASKED | {"prompt": ""}, EMPTY),
    (ASKED | {"prompt": []}, EMPTY),
    (ASKED | {"chosen": turn(""), "rejected": turn("")}, EMPTY),
    (ASKED | {"rejected": []}, EMPTY),
    (ASKED | {"chosen": [TALL[0] | {"content": None}]}, EMPTY),
    (CHATS | {"rejected": FAR + YARDS + REST}, EMPTY),
    (CHATS | {"rejected": EARLIER[:1] + YARDS}, EMPTY),
    (SAME | {"prompt": FAR, "rejected": YARDS + REST}, EMPTY),
]


@pytest.mark.parametrize(("row", "reason"), USELESS)
def test_labels_of_no_use_are_left_out_and_counted_and_a_tenth_may_be(row, reason, capsys):
    """Of answers that are cut to three tokens. BOS alone is no prompt."""
    given = {"base_model": "llama", "response_length": 3}
    good = LABEL if "best" in row else PAIR
    if isinstance(row.get("rejected"), list):
        given = {"chat": CHATML, "response_length": 3}
        good = ASKED
    label = read_label(good, **given)
    assert read_labels([good] * 9 + [row], **given) == [label] * 9
    assert f"--label_dataset: 9 of 10 rows {{'{reason}': 1}}\n" in capsys.readouterr().out
    refuse(read_labels, [good] * 8 + [row], "8 of 9 labels are of use: {", **given)
    refuse(read_labels, row, f"0 of 2 labels are of use: {{'{reason}': 2}}", **given)
    given["batch_size"] = 10
    refuse(read_labels, [good] * 9 + [row], " has 9 labels for --batch_size 10", **given)


def test_an_answer_that_is_the_prompt_alone_is_empty_and_gets_no_end():
    row = {"prompt": "w5", "chosen": "w5 w6", "rejected": "w5"}
    given = {"truncate_token": "eos", "truncate_after": 0}
    refuse(read_labels, row, f"0 of 2 labels are of use: {{'{EMPTY}': 2}}", **given)


# --- reward functions -----------------------------------------------------------------------------
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
    [[1.0], [2.0]],
]
FLOATS = [
    [1, 2],
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 2.0], requires_grad=True),
]


def score(function, **columns):
    """Scores by a function of two responses, of one token and of two."""
    tokenizer, args = start(ppo_rlhf, reward_fn="colorsys:mine")
    row = {"query": "w5"} | columns
    queries = [data_module.Query([token], [token], row) for token in (5, 6)]
    with mock.patch.object(colorsys, "mine", function, create=True):
        reward = labels_module.load_reward_fn(args.reward_fn, tokenizer)
    return reward(queries, [[7], [8, 9]])


def test_a_function_returns_a_finite_float_for_each_response():
    for returned in FLOATS:
        scores = score(lambda x=returned, **_: x)
        assert scores.tolist() == [1.0, 2.0]
        assert scores.dtype == torch.float32
        assert not scores.requires_grad
    for returned in NO_FLOATS:
        with pytest.raises(UserError, match="^--reward_fn must return "):
            score(lambda x=returned, **_: x)


def test_a_function_may_switch_gradients_off_for_itself(monkeypatch):
    Path("off.py").write_text("import torch\ntorch.set_grad_enabled(False)\nmine = print\n")
    monkeypatch.syspath_prepend(".")
    labels_module.load_reward_fn("off:mine", None)
    score(lambda **_: [torch.set_grad_enabled(False) and 1.0 or 1.0, 2.0])
    assert torch.is_grad_enabled()


def test_a_function_gets_copies_of_all_columns_and_its_own_faults_are_not_explained():
    seen = {}

    def everything(**named):
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
        score(everything, **columns)
        assert {*seen, "prompt"} == {*columns, "prompts", "completions"}
        assert "prompt" not in seen
        assert seen["completions"] == ["w7", "w8 w9"]
        assert (seen["input_ids"], seen["queries"]) == (["column"] * 2, [3, 3])
        assert not seen["tags"][0]
        assert columns["tags"] == ["a"]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        score(lambda prompts, completions: [0.0, 0.0], **columns)
    with pytest.raises(ZeroDivisionError):
        score(lambda **_: 1 / 0)


def test_a_function_gets_chats_where_the_table_has_chats():
    seen = []

    def keep(prompts, completions, messages):
        seen.extend((prompts, completions, messages))
        return [1.0]

    rows = [{"messages": FAR + TALL}]
    tokenizer, args = start(ppo_rlhf, CHATML, query_dataset=rows)
    _, queries = data_module.load_queries(args, tokenizer, 0, 1)
    text = tokenizer(YARDS[0]["content"], add_special_tokens=False).input_ids
    labels_module.call_reward_fn(keep, tokenizer, queries, [[*text, EOS]])
    assert seen == [[FAR], [YARDS], [FAR + TALL]]


def test_a_function_gets_prompts_without_bos_and_whole_numbers_as_they_are():
    def keep(prompts, number, **_):
        assert prompts == ["w5 <|endoftext|> w6", "w7"]
        assert repr(number) == "[1, None]"
        return [1.0, 2.0]

    tokenizer, _ = start(ppo_rlhf, base_model="llama")
    queries = [
        data_module.Query([BOS, 5, EOS, 6], [5], {"query": "", "number": 1}),
        data_module.Query([BOS, 7], [7], {"query": "", "number": None}),
    ]
    scores = labels_module.call_reward_fn(keep, tokenizer, queries, [[7], [8]])
    assert scores.tolist() == [1, 2]
