"""What the scripts make of queries, labels and preferences: prompts, chats, BOS, EOS, long texts, reward functions."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from run_tools import to_lines
from tiny_models import save_model
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo_rlhf
import rloo_rlhf
import train_reward

EOS, BOS, PAD = 0, 1, 50_259
CHAT = """{% for m in messages %}{{ ('w40 ' if m.role == 'user' else 'w41 ') + m.content + ' <|endoftext|> w42 ' }}\
{% endfor %}{% if add_generation_prompt %}{{ 'w41 ' }}{% endif %}"""
ASKED, YES, NO = (
    [{"role": role, "content": x}] for role, x in (("user", "w5"), ("assistant", "w6"), ("assistant", "w7"))
)
HUMAN = "\n\nHuman: Is it far?\n\nAssistant:"
PAIR, LABEL = (
    {"prompt": "w5", "chosen": "w6", "rejected": "w7"},
    {"query": [5], "sample0": [6], "sample1": [7], "best": 1},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose tokenizer begins no text with BOS and pads with EOS, and a Llama, whose tokenizer does neither."""
    folder = tmp_path_factory.mktemp("models")
    for name, special in (("gpt2", {"bos_token": "<|endoftext|>"}), ("llama", {"bos_token": "w1", "pad_token": "w49"})):
        save_model(folder / name, name)
        tokenizer = AutoTokenizer.from_pretrained(folder / name, **special)
        if name == "llama":
            begin = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", BOS)])
            tokenizer.backend_tokenizer.post_processor = begin
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to be in, with the two models, and what the scripts' logger asks for."""
    for folder in models.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    Accelerator(cpu=True)


def words(*tokens: int) -> str:
    return " ".join(f"w{token}" for token in tokens)


def write(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text(to_lines(*rows))
    return name


def make_args(script: Any, **changes: Any) -> Any:
    given = {"base_model": "gpt2", "start_text": None, "end_text": None, "query_length": 8, "response_length": 6}
    given |= {"truncate_token": None} | ({"batch_size": 2} if script is train_reward else {"eval_queries": 1})
    return script.Args(**given | changes)


def read_queries(rows: list[dict[str, Any]], chat: str | None = None, **changes: Any) -> list[dict[str, Any]]:
    """What all three scripts make of a file of these rows, in the order of its tokens."""
    found = []
    for script in (ppo_rlhf, rloo_rlhf, train_reward):
        args = make_args(script, query_dataset=write("rows.jsonl", rows), **changes)
        tokenizer = script.fetch(AutoTokenizer, "base_model", args)
        tokenizer.chat_template = chat
        found.append(script.load_queries(tokenizer, args, 1_000))
    assert found[0] == found[1] == found[2]
    return sorted(found[0], key=lambda query: query["input_ids"])


def read_labels(rows: list[dict[str, Any]], chat: str | None = None, **changes: Any) -> Any:
    """Query, best response and the others of every label in a file of these rows."""
    args = make_args(train_reward, label_dataset=write("rows.jsonl", rows), **changes)
    tokenizer = train_reward.fetch(AutoTokenizer, "base_model", args)
    tokenizer.chat_template = chat
    labels, held_out = train_reward.load_labels(tokenizer, args)
    assert not held_out
    return [(query, responses.pop(best), *responses) for query, responses, best in labels]


def tokens(rows: list[dict[str, Any]], *how: Any, **changes: Any) -> list[list[int]]:
    return [query["input_ids"] for query in read_queries(rows, *how, **changes)]


def refuse(read: Any, rows: list[dict[str, Any]], *says: str, **changes: Any) -> None:
    with pytest.raises(ValueError) as caught:
        read(rows, **changes)
    text = str(caught.value)
    assert "\n" not in text and all(x in text for x in ("_dataset rows.jsonl: ", *says)), text


# --- queries ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "end", "expected"),
    [
        ("drop", None, []),
        (None, None, []),
        ("keep_start", None, [[8, 9, 10, 11]]),
        ("keep_end", None, [[11, 12, 13, 14]]),
        (None, "w10", [[8, 9, 10]]),  # the original's
        ("keep_end", "w13", [[11, 12, 13]]),
        ("drop", "w10", []),
    ],
)
def test_long_texts_are_dropped_or_cut_at_the_same_end_by_all_scripts(
    how: str | None, end: str | None, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    short = [5, *([int(end[1:])] if end else [6])]
    rows, asked = (
        [{"text": words(*row)} for row in (short, short, range(8, 15))],
        {"query_length": 4, "long_queries": how},
    )
    assert tokens(rows, end_text=end, **asked) == [short, short, *expected]
    assert caplog.text.count("left out 1 ") == (0 if expected else 3)
    if end is None:
        pairs = [PAIR | {"prompt": row["text"]} for row in [rows[0]] * 9 + [rows[2]]]
        assert [query for query, *_ in read_labels(pairs, **asked)] == [short] * 9 + expected


@pytest.mark.parametrize(("name", "begin"), [("gpt2", []), ("llama", [BOS])])
def test_a_text_begins_with_bos_where_the_tokenizer_has_it(name: str, begin: list[int]) -> None:
    """Once, before the prefix, for policy and reward model; token ids that are no BOS stay, whatever their number."""
    rows, around = [{"query": "w5 w6"}, {"query": words(*begin, 7)}], {"query_prefix": "w30", "query_suffix": "w31"}
    assert read_queries(rows, base_model=name, **around) == [
        {"input_ids": [*begin, 5, 6], "context": [*begin, 30, 5, 6, 31]},
        {"input_ids": [*begin, 7], "context": [*begin, 30, 7, 31]},
    ]
    rows = [{"query": [EOS, 5, PAD]}, {"query": [6, EOS, 8]}]
    assert tokens(rows, base_model=name) == [[*begin, EOS, 5], [*begin, 6, EOS, 8]]
    assert read_labels([PAIR] * 4, base_model=name) == [([*begin, 5], [6], [7])] * 4
    rows = [LABEL | {"sample1": [EOS, PAD]}] * 2
    assert read_labels(rows, base_model=name) == [([*begin, 5], [EOS], [6])] * 2


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_chats_go_through_the_template(column: str) -> None:
    rows, first = [{column: ASKED}, {column: ASKED + NO + ASKED}], [40, 5, EOS, 42, 41]
    for template in (CHAT, "{{ 'w1 ' }}" + CHAT):  # one that writes BOS itself: it stays one
        found = tokens(rows, template, base_model="llama", query_length=20)
        assert sorted(found) == sorted([[BOS, *first], [BOS, *first, 7, EOS, 42, *first]])
    refuse(read_queries, rows, "chat_template is not set")
    refuse(read_queries, rows, "roles must alternate", chat="{{ raise_exception('roles must alternate') }}")


def test_queries_that_are_none_are_refused_in_a_line() -> None:
    refuse(read_queries, [{"prompt": ["w5", "w6"]}] * 3, "list")
    refuse(read_queries, [{"text": None}] * 3, "0 queries")
    refuse(read_queries, [{"text": "w5"}], "1 queries")
    refuse(read_queries, [{"words": "w5"}] * 3, "words")
    refuse(read_queries, [{"query": [5, 50]}] * 3, "--token_ids_of")
    Path("set").mkdir()
    write("set/test.jsonl", [{"text": "w5"}] * 3)
    with pytest.raises(ValueError, match="--query_dataset set: .*test.*train"):
        ppo_rlhf.load_table("query_dataset", make_args(ppo_rlhf, query_dataset="set"))


# --- labels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"chosen": f"{HUMAN} No, near.", "rejected": f"{HUMAN} Yes."}, [HUMAN, " No, near.", " Yes."]),
        ({"chosen": "It is bread", "rejected": "It is break"}, ["It is", " bread", " break"]),
        ({"chosen": "Q: so?\nA:\nYes", "rejected": "Q: so?\nA:\nNo"}, ["Q: so?\nA:", "\nYes", "\nNo"]),
        ({"chosen": "Yes", "rejected": "Yes, sir"}, ["", "Yes", "Yes, sir"]),
        ({"prompt": "Why", "chosen": "so. Why", "rejected": "so."}, ["Why", "so. Why", "so."]),
    ],
)
def test_the_common_beginning_of_two_texts_up_to_a_word_is_their_prompt(row: dict[str, str], expected: Any) -> None:
    """The raw form of Anthropic's HH: the dialogues stand whole in both columns."""
    assert list(train_reward.preference_texts(row, None)) == expected
    assert list(train_reward.preference_texts({"prompt": None} | row, None)) == expected


def test_useless_pairs_are_counted_and_left_out_and_too_many_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    same = PAIR | {"chosen": words(6, 6, 6, 7), "rejected": words(6, 6, 6, 8)}  # after three tokens
    useless = [same, PAIR | {"chosen": ""}, PAIR | {"prompt": words(*[5] * 9)}]
    assert read_labels([PAIR] * 27 + useless, response_length=3) == [([5], [6], [7])] * 27
    lines = [record.getMessage() for record in caplog.records if record.name == "train_reward"]
    assert len(lines) == 1 and "3 of 30" in lines[0] and "\n" not in lines[0]
    refuse(read_labels, [PAIR] * 26 + [same] * 4, "4 of 30", response_length=3)
    refuse(read_labels, [PAIR] * 19 + [useless[1]], "--batch_size 20", batch_size=20)  # there would be no update


def test_the_better_of_a_pair_comes_first_as_often_as_last() -> None:
    args = make_args(train_reward, label_dataset=write("rows.jsonl", [PAIR] * 100))
    labels = train_reward.load_labels(train_reward.fetch(AutoTokenizer, "base_model", args), args)[0]
    assert 30 < sum(best for *_, best in labels) < 70


def test_preferences_as_chats_are_read_as_the_template_writes_them() -> None:
    pair = {"prompt": ASKED, "chosen": YES, "rejected": NO}
    for row in ({"chosen": ASKED + YES, "rejected": ASKED + NO}, pair):
        found = read_labels([row] * 2, CHAT, base_model="llama")
        assert found == [([BOS, 40, 5, EOS, 42, 41], [6, EOS, 42], [7, EOS, 42])] * 2
        found = read_labels([row] * 2, CHAT, base_model="llama", truncate_token="eos")  # nothing stands behind it
        assert found == [([BOS, 40, 5, EOS, 42, 41], [6, EOS], [7, EOS])] * 2
    refuse(read_labels, [{"chosen": ASKED + YES, "rejected": YES + NO}] * 2, chat=CHAT)  # two prompts
    refuse(
        read_labels, [pair] * 2, chat=CHAT.replace("{{ 'w41 ' }}", "{{ 'w41 w43 ' }}")
    )  # a prompt that no answer has
    refuse(read_labels, [pair] * 2, "chat_template is not set")
    refuse(read_labels, [PAIR | {"prompt": ["w5", "w6"]}] * 2, chat=CHAT)
    refuse(read_labels, [{"prompt": "w5", "chosen": ["w6"], "rejected": ["w7"]}] * 2, chat=CHAT)


def test_with_eos_preferences_end_with_it_once() -> None:
    answers = {"w6": [6, EOS], "w7 <|endoftext|>": [7, EOS], words(*[8] * 9): [8] * 6}
    found = read_labels([PAIR | {"chosen": x, "rejected": "w9 w9"} for x in answers], truncate_token="eos")
    assert found == [([5], x, [9, 9, EOS]) for x in answers.values()]


def test_labels_with_gaps_are_refused_in_a_line() -> None:
    """Two identical samples are none: people saw both, and either is right."""
    for change in ({"sample1": []}, {"sample1": [PAD]}, {"query": [PAD]}, {"best": 2}, {"best": None}, {"best": 0.5}):
        refuse(read_labels, [LABEL | change] * 2, "sample")
    refuse(read_labels, [LABEL, LABEL, LABEL | {"sample0": None}], "sample")
    refuse(read_labels, [LABEL | {"sample3": [9]}] * 2, "sample3")
    assert read_labels([LABEL | {"sample0": [7]}] * 2) == [([5], [7], [7])] * 2
    rewards = torch.tensor([0.5, 0.5, 0.1]).expand(3, 3)
    assert train_reward.hits(rewards, torch.tensor([0, 1, 2])).tolist() == [True, True, False]


# --- rewards ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_policy_and_labels_show_the_reward_model_the_same_ends_and_plain_transformers_reads_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `eos`: whole runs, the second with the reward model that the first has made."""
    pairs = [PAIR | {"chosen": words(7, 8 + i), "rejected": words(*[9] * (i % 9 + 1))} for i in range(16)]
    common = {
        "truncate_token": "eos",
        "query_dataset": write("queries.jsonl", [{"text": "w5 w6"}] * 40),
        "base_model": name,
    }
    common |= {"micro_batch_size": 8, "lr": 1e-3, "temperature": 5.0, "checkpoint_every": 0}
    args = make_args(train_reward, label_dataset=write("labels.jsonl", pairs), output_dir="reward",
                     normalization_samples=8, **common | {"batch_size": 8})  # fmt: skip
    seen, label_rewards = [], train_reward.label_rewards
    monkeypatch.setattr(train_reward, "label_rewards", lambda *x: (seen.extend(x[1]), label_rewards(*x))[1])
    train_reward.main("tiny", args)
    trained = [row for _, responses, _ in seen if len(responses) == 2 for row in responses]
    assert len(trained) == 32 and all(row.index(EOS) == len(row) - 1 for row in trained if len(row) < 6)
    args = make_args(ppo_rlhf, reward_model="reward/reward_model", output_dir="policy", eval_queries=8,
                     total_episodes=32, batch_size=32, truncate_after=0, **common)  # fmt: skip
    scored, score = [], ppo_rlhf.score
    monkeypatch.setattr(ppo_rlhf, "score", lambda *x: (scored.append((x[1:3], score(*x))), scored[-1][1])[1])
    ppo_rlhf.main("tiny", args)
    (queries, responses), scores = scored[1]
    short = [row for row in responses if len(row) < 6]
    assert short and all(row.index(EOS) == len(row) - 1 for row in short)

    tokenizer = AutoTokenizer.from_pretrained("reward/reward_model", padding_side="right")
    plain = AutoModelForSequenceClassification.from_pretrained("reward/reward_model")
    rows = [query["input_ids"] + row for query, row in zip(queries, responses, strict=True)]
    usual = [i for i, row in enumerate(rows) if row[-1] != tokenizer.pad_token_id]  # a word here, but no text ends so
    rows, scores = [rows[i] for i in usual], scores[usual]
    assert len(rows) > 24 and any(row[-1] == EOS for row in rows)
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        alone = torch.stack([plain(torch.tensor([row])).logits[0, 0] for row in rows])
        for logits in (alone, plain(**batch).logits[:, 0], plain(batch.input_ids).logits[:, 0]):
            made = plain.config.reward_gain * logits + plain.config.reward_bias
            assert (made - scores).abs().max() < 1e-4 < scores.std()


FUNCTIONS = """
def named(query, response, *, answers, level=0):
    return [float(a in r.split()) + 10 * l for r, a, l in zip(response, answers, level)]
def table(queries, responses): return dict.fromkeys(responses, 1.0)
def lazy(queries, responses): return (1.0 for _ in responses)
def scalar(queries, responses): return 1.0
def few(queries, responses): return [1.0] * (len(responses) - 1)
def leave(queries, responses): raise SystemExit(0)
"""


@pytest.mark.parametrize(("script", "k"), [(ppo_rlhf, 1), (rloo_rlhf, 2)])
def test_a_function_gets_the_columns_that_it_names(script: Any, k: int) -> None:
    """Its first two parameters, whatever their names, are queries and responses; it must return a float for each."""
    Path("own_rewards.py").write_text(FUNCTIONS)
    rows = [{"query": words(5, i), "answers": f"w{i}", "level": i, "response": "no"} for i in (6, 7)]
    args = make_args(script, query_dataset=write("rows.jsonl", rows), reward_fn="own_rewards:named")
    tokenizer, responses = script.fetch(AutoTokenizer, "base_model", args), [[6], [7], [6], [7]][: 2 * k]
    queries = sorted(script.load_queries(tokenizer, args, 2), key=lambda query: query["level"])
    for name in ("named", "table", "lazy", "scalar", "few", "leave"):
        args.reward_fn = f"own_rewards:{name}"
        given = (
            script.load_reward(args, "tiny", tokenizer, 14, torch.device("cpu")),
            queries,
            responses,
            tokenizer,
            args,
        )
        if name == "named":
            assert script.score(*given).tolist() == ([61, 71] if k == 1 else [61, 60, 70, 71])
        else:
            with pytest.raises(RuntimeError, match=f"--reward_fn own_rewards:{name}: no list of {2 * k} floats"):
                script.score(*given)
    del sys.modules["own_rewards"]


# --- models and flags -------------------------------------------------------------------------------------------------
def test_an_adapter_or_other_layers_than_the_weights_are_refused_in_a_line() -> None:
    """In silence the first would train nothing but a head, the second another model."""
    for name, says in (("adapter", "adapter"), ("fewer", r"\.1\."), ("more", r"\.2\.")):
        shutil.copytree("gpt2", name)
        if name == "adapter":
            Path(name, "adapter_config.json").write_text('{"peft_type": "LORA"}')
        else:
            config = json.loads(Path(name, "config.json").read_text()) | {"n_layer": 1 if name == "fewer" else 3}
            Path(name, "config.json").write_text(json.dumps(config))
        for script in (ppo_rlhf, rloo_rlhf, train_reward):
            args = make_args(script, base_model=name)
            tokenizer = script.fetch(AutoTokenizer, "base_model", args)
            with pytest.raises(ValueError, match=f"^--base_model {name}: [^\n]*{says}"):
                script.load(AutoModelForCausalLM, "base_model", args, tokenizer, 14, torch.device("cpu"))


def test_none_is_none_with_and_without_an_equals_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, own in ((ppo_rlhf, "kl_target"), (rloo_rlhf, "kl_target"), (train_reward, "num_labels")):
        given = ["--start_text=none", "--end_text", "none", "--truncate_token=None", f"--{own}=none"]
        monkeypatch.setattr(sys, "argv", [script.__name__, "tiny", *given])
        args = script.parse_args()[1]
        assert [args.start_text, args.end_text, args.truncate_token, getattr(args, own)] == [None] * 4
