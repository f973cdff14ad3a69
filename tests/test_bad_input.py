"""Wrong arguments, files and models end with status 2 and one line that says what would do; nothing is written."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import fork_tools
import pytest
from conftest import ROOT
from run_tools import PPO, REWARD, run_script, start, to_lines
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

import ppo_rlhf

QUERIES = [f"It was a warm day {i}. The baker opened the gate. She waved." for i in range(24)]
LABEL = {"query": [5, 6, 7], "sample0": [8, 9, 10], "sample1": [11, 12, 13], "best": 0}
PAIR = {"prompt": "The baker smiled.", "chosen": " She was happy.", "rejected": " She was sad."}
FUNCTIONS = """
def nan(queries, responses):
    return [float("nan")] * len(responses)
def few(queries, responses):
    return [0.5] * (len(responses) - 1)
def words(queries, responses):
    return ["good"] * len(responses)
def fine(queries, responses):
    return [float(len(response)) for response in responses]
"""
PROGRESS = re.compile(r"[^\r\n]*(it|examples|update)/s\]")  # the bars of datasets, transformers and the script


def labels(**changes: Any) -> str:
    """Ten labels, of which row 3 has `changes`."""
    return to_lines(*[LABEL] * 3, LABEL | changes, *[LABEL] * 6)


def pairs(**changes: Any) -> str:
    """Ten preference pairs, of which row 3 has `changes`."""
    return to_lines(*[PAIR] * 3, PAIR | changes, *[PAIR] * 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders that have something wrong with them, by name."""
    root, model = tmp_path_factory.mktemp("models"), ROOT / "tiny" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128, "vocab_size": len(tokenizer)}
    small |= {"bos_token_id": 0, "eos_token_id": 0}
    for name, changes in (("short", {"n_positions": 16, "num_labels": 1}), ("two_labels", {"num_labels": 2})):
        config = GPT2Config(**small | changes)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name in ("no_weights", "no_lm_head", "no_layer", "no_eos", "no_tokenizer"):
        shutil.copytree(model, root / name)
    (root / "no_weights" / "model.safetensors").unlink()
    for file in (root / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    config_file = root / "no_lm_head" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"tie_word_embeddings": False}))
    weights = load_file(model / "model.safetensors")
    assert not any("lm_head" in name for name in weights)
    weights.pop("transformer.h.2.mlp.c_fc.weight")
    save_file(weights, root / "no_layer" / "model.safetensors", metadata={"format": "pt"})
    backend = AutoTokenizer.from_pretrained(model).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(root / "no_eos")
    return root


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def case(name: str, script: str, words: str | list[str], *says: str, **files: str) -> Any:
    """One bad call: its words, what the line must contain, and the files (name__ending) in the current folder."""
    words = words.split() if isinstance(words, str) else words
    return pytest.param(script, words, says, {key.replace("__", "."): text for key, text in files.items()}, id=name)


ON_QUERIES = "--query_dataset queries.jsonl --eval_queries 4 --total_episodes 8 --batch_size 8 --micro_batch_size 8"
FUNCTION = f"{ON_QUERIES} --reward_fn functions:fine"
OWN_LABELS = "--label_dataset l.jsonl --num_labels 8"
ON_LABELS = "--query_dataset queries.jsonl --label_dataset labels.jsonl --num_labels 8 --normalization_samples 8"
GIVEN = {"queries__jsonl": to_lines(*({"text": text} for text in QUERIES)), "functions__py": FUNCTIONS}

# As ON_QUERIES and FUNCTION say it
HERE = {
    "query_dataset": "queries.jsonl",
    "eval_queries": 4,
    "total_episodes": 8,
    "batch_size": 8,
    "micro_batch_size": 8,
}
HERE |= {"reward_fn": "functions:fine"}


def record(script: str = "ppo_rlhf", preset: str = "tiny", processes: int = 1, **changes: Any) -> dict[str, str]:
    """A folder `run` that such a command left."""
    args = vars(ppo_rlhf.Args()) | HERE | changes
    left = {"script": script, "preset": preset, "processes": processes, "args": args}
    return {"run/args__json": json.dumps(left), "run/metrics__jsonl": ""}


CASES = [
    # the command line
    case("unknown preset", PPO, "sentimant", "sentimant", "'sentiment'", "tldr"),
    case("unknown preset of the reward model", REWARD, "cnn_dm", "cnn_dm", "'cnndm'"),
    case("unknown flag", PPO, "--learning 0.1", "--learning", "--help"),
    case("nearly a flag", PPO, "--kl_coeff 0.1", "--kl_coeff", "--kl-coef"),
    case("flag of the other script", REWARD, "--kl_coef 0.1", "--kl_coef", "--help"),
    case("flag without value", PPO, ["--lr"], "--lr", "Expected 1"),
    case("value without flag", PPO, ["--lr", "0.1", "sentiment"], "sentiment", "--help"),
    case("text for a number", PPO, "--lr fast", "--lr", "'fast'", "FLOAT"),
    case("fraction of a count", REWARD, "--batch_size 1.5", "--batch-size", "'1.5'", "INT"),
    case("not a choice", PPO, "--adam sgd", "--adam", "'sgd'", "'tf', 'torch'"),
    case("not a number", PPO, "--lr nan", "--lr", "nan", "must be a finite number"),
    case("infinite", REWARD, "--temperature inf", "--temperature", "inf", "must be a finite number"),
    case("negative", PPO, "--kl_coef -0.1", "--kl_coef", "-0.1", "0 or more"),
    case("negative reward lr", REWARD, "--lr -1", "--lr", "-1.0", "0 or more"),
    case("zero batch", PPO, "--batch_size 0", "--batch_size", "0", "greater than 0"),
    case("zero micro-batch", REWARD, "--micro_batch_size 0", "--micro_batch_size", "0", "greater than 0"),
    case("zero temperature", PPO, "--temperature 0", "--temperature", "0.0", "greater than 0"),
    case("zero horizon", PPO, "--kl_horizon 0", "--kl_horizon", "0.0", "greater than 0"),
    case("zero target", PPO, "--kl_target 0", "--kl_target", "0.0", "greater than 0"),
    case("seed beyond 32 bits", PPO, f"{FUNCTION} --seed 5000000000", "--seed 5000000000", "less than", **GIVEN),
    case("unequal minibatches", PPO, "--batch_size 100 --num_minibatches 3", "--batch_size 100", "99", "102"),
    case("more minibatches than rows", PPO, "--batch_size 2 --num_minibatches 4", "--batch_size 2", "4 would do"),
    case("nothing to evaluate", PPO, f"{FUNCTION} --eval_queries 0", "--eval_queries", "0", "greater than 0", **GIVEN),
    case("one sample to normalise on", REWARD, f"{ON_LABELS} --normalization_samples 1", "--normalization_samples 1",
         "would do", labels__jsonl=labels(), **GIVEN),
    # tables
    case("no such dataset", PPO, "--query_dataset no/such", "--query_dataset no/such", "cannot be read", "jsonl"),
    case("no such labels", REWARD, "--label_dataset no/such", "--label_dataset no/such", "cannot be read", "jsonl"),
    case("no such file", PPO, "--query_dataset nowhere.jsonl", "--query_dataset nowhere.jsonl", "cannot be read"),
    case("no table", PPO, "--query_dataset queries.doc", "--query_dataset queries.doc", "jsonl", queries__doc="x"),
    case("empty folder", PPO, ["--query_dataset", "."], "--query_dataset .", "jsonl"),
    case("empty labels", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "jsonl", l__jsonl=""),
    case("empty queries", PPO, "--query_dataset q.jsonl", "--query_dataset q.jsonl", "jsonl", q__jsonl=""),
    case("truncated json", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "cannot be read", "JSON",
         l__jsonl=labels()[:-20]),
    case("truncated json of queries", PPO, "--query_dataset q.jsonl", "--query_dataset q.jsonl", "cannot be read",
         "JSON", q__jsonl='{"text": "One. Two."}\n{"text": "One. Tw'),
    case("columns of queries", PPO, "--query_dataset q.jsonl", "--query_dataset q.jsonl", "'words', 'tone'", "text",
         q__jsonl=to_lines({"words": "One.", "tone": 1})),
    case("columns of labels", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "'question', 'sample0'",
         "query, sample0, sample1, best", l__jsonl=to_lines(*[{"question": [1], "sample0": [2]}] * 10)),
    case("one sample", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "'sample0', 'best'", "sample1",
         l__jsonl=to_lines(*[{"query": [1], "sample0": [2], "best": 0}] * 10)),
    case("best out of range", REWARD, OWN_LABELS, "row 3", "best = 2", "0 to 1",
         l__jsonl=labels(best=2)),
    case("best missing", REWARD, OWN_LABELS, "row 3", "best = None", "0 to 1",
         l__jsonl=labels(best=None)),
    case("best as text", REWARD, OWN_LABELS, "row 0", "best = 0", "0 to 1",
         l__jsonl=to_lines(*[LABEL | {"best": "0"}] * 10)),
    case("query missing", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3", "empty", "one token",
         l__jsonl=labels(query=None)),
    case("token beyond vocabulary", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3",
         "token 2816", "--label_pad", l__jsonl=labels(sample1=[1, 2816, 3])),
    case("negative token", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3", "token -1",
         "--label_pad", l__jsonl=labels(query=[1, -1, 3])),
    case("other padding", REWARD, f"{OWN_LABELS} --label_pad 7000", "--label_dataset l.jsonl", "row 3",
         "token 50259", "--label_pad", "7000", l__jsonl=labels(sample1=[1, 2, 50259])),
    case("unequal samples", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3", "[2, 3]",
         "one length", l__jsonl=labels(sample1=[1, 2])),
    case("sample of padding", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3", "empty",
         "one token", l__jsonl=labels(sample0=[50259] * 3)),
    case("text for tokens", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "token",
         l__jsonl=to_lines(*[{"query": "a b", "sample0": "c d", "sample1": "e f", "best": 0}] * 10)),
    case("empty text", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3", "empty text", "chosen",
         l__jsonl=pairs(rejected=" ")),
    case("no text", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "row 3", "chosen",
         l__jsonl=pairs(chosen=None)),
    case("no chat template", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "tiny/model",
         "chat template", "text would do",
         l__jsonl=to_lines(*[{name: [{"role": "user", "content": PAIR[name]}] for name in PAIR}] * 10)),
    case("num_labels too large", REWARD, "--num_labels 5000", "--num_labels 5000", "tiny/labels", "4000"),
    case("fewer labels than a batch", REWARD, "--label_dataset l.jsonl --batch_size 16", "--batch_size 16", "10",
         l__jsonl=labels()),
    case("no start token", PPO, "--query_dataset q.jsonl", "--query_dataset q.jsonl", "'text'", "--start_text '.'",
         "none for both", q__jsonl=to_lines(*[{"text": "a day without an end"}] * 300)),
    case("fewer queries than evaluated", PPO, "--query_dataset queries.jsonl --eval_queries 24", "--eval_queries 24",
         "24", **GIVEN),
    # tokens and lengths
    case("two tokens", PPO, "--truncate_token eo", "--truncate_token 'eo'", "one token"),
    case("two tokens to start", REWARD, ["--start_text", ". The", *ON_LABELS.split()], "--start_text '. The'",
         "one token", labels__jsonl=labels(), **GIVEN),
    case("no eos", PPO, "--truncate_token eos --base_model @no_eos", "--truncate_token 'eos'", "one token"),
    case("beyond the context window", PPO, f"{FUNCTION} --response_length 120", "--response_length 120", "128",
         "tiny/model", **GIVEN),
    case("normalisation beyond the context window", REWARD, f"{ON_LABELS} --response_length 120",
         "--response_length 120", "128", "tiny/model", labels__jsonl=labels(), **GIVEN),
    case("labels beyond the context window", REWARD, OWN_LABELS, "--label_dataset l.jsonl", "128",
         "tiny/model", l__jsonl=labels(query=[5] * 126)),
    # models
    case("no such model", PPO, "--base_model no/such", "--base_model no/such", "cannot be loaded", "local folder"),
    case("no tokenizer", PPO, f"{FUNCTION} --base_model @no_tokenizer", "--base_model", "no_tokenizer",
         "tokenizer would do", **GIVEN),
    case("no weights", PPO, f"{FUNCTION} --base_model @no_weights", "--base_model", "no_weights", "cannot be loaded",
         "model.safetensors", **GIVEN),
    case("no weights of the reward model", REWARD, f"{ON_LABELS} --base_model @no_weights", "--base_model",
         "no_weights", "cannot be loaded", "model.safetensors", labels__jsonl=labels(), **GIVEN),
    case("head neither stored nor tied", PPO, f"{FUNCTION} --base_model @no_lm_head", "--base_model", "no_lm_head",
         "lacks lm_head.weight", "all weights", **GIVEN),
    case("a layer lacks a matrix", PPO, f"{FUNCTION} --base_model @no_layer", "--base_model", "no_layer",
         "lacks transformer.h.2.mlp.c_fc.weight", "all weights", **GIVEN),
    case("a layer of the reward model lacks a matrix", REWARD, f"{ON_LABELS} --base_model @no_layer", "--base_model",
         "no_layer", "lacks", "h.2.mlp.c_fc.weight", "all weights", labels__jsonl=labels(), **GIVEN),
    case("no reward model yet", PPO, ON_QUERIES, "--reward_model", "runs/", "python train_reward.py tiny", **GIVEN),
    case("reward model without head", PPO, f"{ON_QUERIES} --reward_model tiny/model", "--reward_model tiny/model",
         "lacks score.weight", "all weights", **GIVEN),
    case("reward model with two labels", PPO, f"{ON_QUERIES} --reward_model @two_labels", "--reward_model",
         "two_labels", "2 labels", "one label would do", **GIVEN),
    case("no such reward model", PPO, f"{ON_QUERIES} --reward_model no/such", "--reward_model no/such",
         "cannot be loaded", "local folder", **GIVEN),
    case("reward model with a short context window", PPO, f"{ON_QUERIES} --reward_model @short", "--reward_model",
         "short", "16", **GIVEN),
    case("no such module", PPO, f"{ON_QUERIES} --reward_fn nowhere:f", "--reward_fn nowhere:f", "nowhere",
         "module:function", **GIVEN),
    case("no such function", PPO, f"{ON_QUERIES} --reward_fn functions:g", "--reward_fn functions:g", "'g'",
         "module:function", **GIVEN),
    case("no function named", PPO, f"{ON_QUERIES} --reward_fn functions", "--reward_fn functions", "module:function",
         **GIVEN),
    case("module that is no Python", PPO, f"{ON_QUERIES} --reward_fn broken:f", "--reward_fn broken:f",
         "module:function", broken__py="def f(:", **GIVEN),
    case("reward_fn gives nan", PPO, f"{ON_QUERIES} --reward_fn functions:nan", "--reward_fn functions:nan", "nan",
         "finite", **GIVEN),
    case("reward_fn gives too few", PPO, f"{ON_QUERIES} --reward_fn functions:few", "--reward_fn functions:few", "3",
         "4", **GIVEN),
    case("reward_fn gives text", PPO, f"{ON_QUERIES} --reward_fn functions:words", "--reward_fn functions:words",
         "good", "float", **GIVEN),
    # the output folder
    case("output is a file", PPO, f"{FUNCTION} --output_dir out.txt", "--output_dir out.txt", "would do",
         out__txt="keep", **GIVEN),
    case("output is below a file", PPO, f"{FUNCTION} --output_dir out.txt/run", "--output_dir out.txt/run",
         "would do", out__txt="keep", **GIVEN),
    case("output is not empty", PPO, f"{FUNCTION} --output_dir out", "--output_dir out", "not empty", "would do",
         **{"out/metrics__jsonl": "keep", **GIVEN}),
    case("no write permission", PPO, f"{FUNCTION} --output_dir /proc/run", "--output_dir /proc/run", "cannot be",
         "written", "permission would do", **GIVEN),
    case("another run without resume", PPO, f"{FUNCTION} --output_dir run", "--output_dir run", "not empty",
         "--resume, would do", **record(), **GIVEN),
    # resuming
    case("no checkpoint kept", PPO, "--keep_checkpoints 0", "--keep_checkpoints 0", "greater than 0"),
    case("checkpoints in the past", REWARD, "--checkpoint_every -1", "--checkpoint_every -1", "0 or more"),
    case("no KL allowed", PPO, "--max_kl 0", "--max_kl 0.0", "greater than 0"),
    case("nothing to resume", PPO, f"{FUNCTION} --resume nowhere", "--resume nowhere", "is no folder", "would do",
         **GIVEN),
    case("no checkpoint of that number", PPO, f"{FUNCTION} --resume run/checkpoints/0000009",
         "--resume run/checkpoints/0000009", "is no folder", "would do", **record(), **GIVEN),
    case("resume from a file", PPO, f"{FUNCTION} --resume run/args.json", "--resume run/args.json", "is no folder",
         "would do", **record(), **GIVEN),
    case("resume from another folder", PPO, f"{FUNCTION} --resume run", "--resume run", "holds no run", "args.json",
         "would do", **{"run/notes__txt": "keep", **GIVEN}),
    case("resume in another folder", REWARD, f"{ON_LABELS} --resume --output_dir run", "--resume run", "holds no run",
         "args.json would do", labels__jsonl=labels(), **{"run/notes__txt": "keep", **GIVEN}),
    case("resume from damaged arguments", PPO, f"{FUNCTION} --resume run", "--resume run", "holds no run", "would do",
         **record() | {"run/args__json": "[{"}, **GIVEN),
    case("resume from a list", PPO, f"{FUNCTION} --resume run", "--resume run", "holds no run", "would do",
         **record() | {"run/args__json": "[1]"}, **GIVEN),
    case("resume one run in the folder of another", PPO, f"{FUNCTION} --resume run --output_dir other",
         "--output_dir other", "--resume run", "would do", **{"other/args__json": "{}", **record(), **GIVEN}),
    case("resume with other flags", PPO, f"{FUNCTION} --resume run --lr 0.5 --kl_target none", "--resume run",
         "lr 0.0002 (now 0.5), kl_target 6.0 (now None); the same would do", "max_kl", "may change", **record(),
         **GIVEN),
    case("another run with resume", PPO, f"{FUNCTION} --resume --output_dir run", "--resume run", "seed 2 (now 1);",
         "the same would do", **record(seed=2), **GIVEN),
    case("resume another preset", PPO, f"tiny {FUNCTION} --resume run", "--resume run", "preset 'tldr' (now 'tiny');",
         **record(preset="tldr"), **GIVEN),
    case("resume with fewer processes", PPO, f"{FUNCTION} --resume run", "--resume run", "processes 2 (now 1);",
         "the same would do", **record(processes=2), **GIVEN),
    case("resume a reward model as a policy", PPO, f"{FUNCTION} --resume run", "--resume run",
         "script 'train_reward' (now 'ppo_rlhf');", "the same would do", **record("train_reward"), **GIVEN),
    case("resume a policy as a reward model", REWARD, f"{ON_LABELS} --resume run", "--resume run",
         "script 'ppo_rlhf' (now 'train_reward');", labels__jsonl=labels(), **record(), **GIVEN),
    case("resume RLOO as PPO", PPO, f"{FUNCTION} --resume --output_dir run", "--resume run",
         "script 'rloo_rlhf' (now 'ppo_rlhf');", **record("rloo_rlhf"), **GIVEN),
    case("output of the reward model is not empty", REWARD, f"{ON_LABELS} --output_dir out", "--output_dir out",
         "not empty", "would do", labels__jsonl=labels(), **{"out/metrics__jsonl": "keep", **GIVEN}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "words", "says", "files"), CASES)
def test_bad_input_ends_with_one_line_and_writes_nothing(
    script: str,
    words: list[str],
    says: tuple[str, ...],
    files: dict[str, str],
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    words = [str(folders / word[1:]) if word.startswith("@") else word for word in words]
    with pytest.raises(SystemExit) as exit_:
        run_script(script, words, tmp_path, monkeypatch)
    written = re.split(r"[\r\n]+", PROGRESS.sub("", capsys.readouterr().err).strip())
    assert exit_.value.code == 2
    assert written[-1].startswith(f"{script}: error: ")
    for part in says:
        assert part in written[-1]
    assert len(written) == 1
    assert contents(tmp_path) == before


def test_a_user_sees_the_line_and_no_other(tmp_path: Path) -> None:
    """In a process of its own, where all is seen that libraries print, and where tyro draws its box in Unicode."""
    cases = (
        (REWARD, "--batch_siz 1.5", "--batch_siz", "1.5", "--batch-size INT", "--help"),
        (PPO, "--reward_model tiny/model", "--reward_model tiny/model", "lacks score.weight", "would do"),
    )
    processes = [
        start([str(ROOT / script), *words.split()], tmp_path, PYTHONIOENCODING="utf-8") for script, words, *_ in cases
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    for (script, _, *says), process, (printed, errors) in zip(cases, processes, outputs, strict=True):
        (line,) = re.split(r"[\r\n]+", PROGRESS.sub("", errors).strip())
        assert (process.returncode, printed) == (2, "")
        assert line.startswith(f"{script}: error: ")
        assert all(part in line for part in says), line
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("flag", "name"), [("--base_model", "some/model"), ("--query_dataset", "some/texts")])
def test_a_hub_that_is_not_reached_is_one_line(flag: str, name: str, tmp_path: Path) -> None:
    """Which is not the same to the libraries as HF_HUB_OFFLINE."""
    folder = fork_tools.fill(tmp_path / "folder")
    outcome = fork_tools.run(PPO, [*fork_tools.WORDS[PPO], flag, name], folder, (fork_tools.lose_hub,))
    code, _, errors = outcome
    (line,) = errors.splitlines()
    assert code == 2
    assert line.startswith(f"{PPO}: error: {flag} {name}: cannot be ") and "would do" in line
    assert not (folder / "out").exists()
