"""What cannot be run ends with one line that names the flag and its value, before anything is written."""

import gzip
import importlib
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import fork_tools
import pytest
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS, Evil, copy, kit, run
from run_tools import call, read_lines, to_lines
from safetensors.torch import load_file, save_file
from tiny_models import save_classifier, save_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

import ppo_rlhf

ERRORS = (ArithmeticError, ImportError, OSError, ValueError)  # those that the scripts turn into a line and status 2
FUNCTIONS = """
def fine(queries, responses):
    return [0.0 for _ in responses]
def broken(queries, responses):
    return [0.0 / len(responses[:0])]
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit, and beside it models and files that have something wrong with them, by name."""
    folder = copy(kit(), tmp_path_factory.mktemp("faults"))
    save_classifier(folder / "short", "gpt2", max_position_embeddings=8)
    save_model(folder / "narrow", "gpt2", vocab_size=40)
    save_model(folder / "two_labels", "gpt2", AutoModelForSequenceClassification, num_labels=2)
    for name in ("no_tokenizer", "no_weights", "pickle", "index", "disguised", "code", "nan"):
        shutil.copytree(folder / "model", folder / name)
    for name in ("evil_judge", "other_words"):
        shutil.copytree(folder / "judge", folder / name)
    for file in (folder / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    for name in ("no_weights", "pickle", "index", "disguised", "evil_judge"):
        (folder / name / "model.safetensors").unlink()
        if name != "no_weights":
            file = "model.safetensors" if name == "disguised" else "pytorch_model.bin"
            (folder / name / file).write_bytes(pickle.dumps({"lm_head.weight": Evil()}, 2))
    weights = {name: x * math.nan for name, x in load_file(folder / "nan/model.safetensors").items()}
    save_file(weights, folder / "nan/model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {"transformer.wte.weight": "pytorch_model.bin"}}
    (folder / "index/model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "code/config.json").read_text()) | {"model_type": "evil"}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "code/config.json").write_text(json.dumps(config))
    (folder / "code/evil.py").write_text("import os\nos.mkdir('marker')\n")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.backend_tokenizer.add_tokens(["another"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(folder / "other_words")
    (folder / "functions.py").write_text(FUNCTIONS)
    lines = (folder / "queries.jsonl").read_text()
    files = {"empty.jsonl": "", "cut.jsonl": lines[:-9], "numbers.jsonl": to_lines({"text": 3}), "queries.doc": lines}
    for name, text in (files | {"queries.JSONL": lines}).items():
        (folder / name).write_text(text)
    (folder / "evil.pkl").write_bytes(pickle.dumps(Evil(), 2))
    return folder


ZERO = "total_episodes eval_queries batch_size micro_batch_size num_minibatches num_epochs temperature kl_target"
ZERO = [f"--{name} 0" for name in f"{ZERO} kl_horizon max_kl query_length response_length".split()]
NUMBERS = [*ZERO, "--lr nan", "--lr -1", "--temperature inf", "--kl_coef -0.1", "--checkpoint_every -1", "--seed -1"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_that_are_no_settings(script: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(ValueError, match="'sentimant': does not exist; one of tiny, sentiment, "):
        call(script, ["sentimant"], tmp_path, monkeypatch, "parse_args")
    for words in NUMBERS:
        flag, value = words.split()
        if hasattr(importlib.import_module(script[:-3]).Args(), flag[2:]):
            with pytest.raises(ValueError, match=f"^{flag} {value}(.0)?: .* would do"):
                call(script, words.split(), tmp_path, monkeypatch, "parse_args")
    other = "--rloo_k 4" if script != RLOO else "--vf_coef 1"
    for words in ("--learning 0.1", "--lr", "--lr fast", "--batch_size 1.5", "--adam sgd", other, "--lr 0.1 sentiment"):
        with pytest.raises(SystemExit, match="^2$"):
            call(script, words.split(), tmp_path, monkeypatch, "parse_args")
        box = capsys.readouterr().err.replace("-", "_")  # tyro's own
        assert words.split()[words.endswith("sentiment") * 2].replace("-", "_") in box


WEIGHTS, NO_FILE = "@(.*model.safetensors|Weights only|.*deserializing)", "@.*no such file"
TABLES = [(PPO, "no/such"), (RLOO, "evil.pkl"), (REWARD, "queries.doc"), (PPO, "queries.JSONL"), (RLOO, "empty.jsonl")]
OWN = "--reward_model none --reward_fn"
CASES = [  # @: the last flag, its value and a colon, at the beginning of the line
    (PPO, "--num_minibatches 4 --batch_size 6", "@a multiple of 4 "),
    (RLOO, "--rloo_k 4 --batch_size 6", "@no multiple of .* --rloo_k 4"),
    (RLOO, "--rloo_k 1", "--rloo_k 1 > 1"),
    (REWARD, "--normalization_samples 1", "--normalization_samples.* not 1"),
    (REWARD, ["--start_text", "w1 w2"], r"--start_text.* 'w1 w2': is tokens \[1, 2\]"),
    # models
    (PPO, "--base_model no/such", "@."),
    (REWARD, "--base_model ./nowhere", NO_FILE),
    (PPO, "--base_model no_tokenizer", "@.*tokenizer"),
    (PPO, "--base_model narrow", "@has 40 embeddings for token 49"),
    *((script, "--response_length 60", "--.*_model .* a window of 64 for 6[0-9] tokens") for script in SCRIPTS),
    *((PPO, f"--base_model {name}", WEIGHTS) for name in ("no_weights", "pickle", "index", "disguised")),
    (REWARD, "--base_model pickle", WEIGHTS),
    (RLOO, "--reward_model evil_judge", WEIGHTS),
    (REWARD, "--base_model nan", "--normalization_samples 4: .* nan"),
    *((script, "--base_model code", "@.*custom code") for script in SCRIPTS),
    # rewards
    (PPO, "--reward_model short", "@.*a window of 8"),
    (PPO, "--reward_model two_labels", "@.*several labels"),
    (RLOO, "--reward_model other_words", "@.*another tokenizer"),
    (PPO, "--reward_model model", "@score.weight"),
    (PPO, "--unfrozen_layers 3", "@."),
    (PPO, "--reward_model none", "--reward_model: none given, none in runs/; `python train_reward.py tiny` would"),
    (PPO, "--reward_fn functions:fine", "@.*without --reward_model"),
    (PPO, f"{OWN} functions:none_such", "@.*module:function"),
    (PPO, f"{OWN} functions", "@.*module:function"),
    (PPO, f"{OWN} nowhere:f", "No module named 'nowhere'"),
    # tables
    *((script, f"--query_dataset {name}", "@.") for script, name in TABLES),
    (PPO, "--query_dataset nowhere.jsonl", NO_FILE),
    (PPO, "--query_dataset cut.jsonl", "@.*JSON"),
    (PPO, "--query_dataset numbers.jsonl", "@.*0 queries"),
    (REWARD, "--label_dataset nowhere.jsonl", NO_FILE),
    (REWARD, "--label_dataset empty.jsonl", "@."),
    (REWARD, "--num_labels 50", "20 labels for --num_labels 50"),
    (REWARD, "--num_labels 3", "3 labels for --num_labels 3, --batch_size 4"),
    # the run's folder
    (PPO, "--output_dir queries.jsonl", "queries.jsonl"),
    (REWARD, "--output_dir queries.jsonl/below", "queries.jsonl/below"),
]


@pytest.mark.parametrize(("script", "words", "says"), CASES, ids=[f"{x} {words}" for x, words, _ in CASES])
def test_bad_input_is_refused_before_anything_is_written(
    script: str, words: Any, says: str, faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, words = sorted(faults.rglob("*")), words.split() if isinstance(words, str) else words
    with pytest.raises(ERRORS, match=says.replace("@", f"^{words[-2]} {words[-1]}: ")) as error:
        call(script, [*WORDS[script], *words], faults, monkeypatch)
    assert "\n" not in str(error.value).strip()
    made = [path for path in sorted(faults.rglob("*")) if path not in before and "__pycache__" not in str(path)]
    assert not made, "neither the run's folder nor the marker of what a pickle or a model's code may do"


@pytest.mark.parametrize("name", ["lines.txt", "lines.jsonl.gz", "lines.csv", "lines.parquet"])
def test_these_files_load_and_rows_that_are_no_query_are_counted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = [*read_lines(kit() / "queries.jsonl"), {"text": None}]
    (tmp_path / "lines.txt").write_text("\n".join(row["text"] or "" for row in rows) + "\n")
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(to_lines(*rows).encode()))
    if name.endswith((".csv", ".parquet")):
        getattr(datasets.Dataset.from_list(rows), f"to_{name[6:]}")(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    args = ppo_rlhf.Args(query_dataset=name, start_text=None, end_text=None, eval_queries=2)
    queries = ppo_rlhf.load_queries(AutoTokenizer.from_pretrained(kit() / "model"), args, 99)
    assert len(queries) == 16
    assert f"--query_dataset {name}: left out 1 rows" in capsys.readouterr().err


def test_a_user_sees_one_line_or_on_demand_and_of_a_reward_function_the_traceback(faults: Path, tmp_path: Path) -> None:
    folder, words = copy(faults, tmp_path), [*WORDS[PPO], "--base_model", "no/such"]
    code, printed, errors = run(PPO, words, folder)
    assert (code, printed, len(errors.splitlines())) == (2, "", 1)
    assert errors.startswith(f"{PPO}: --base_model no/such: ")
    code, _, errors = run(PPO, words, folder, RLHF_DEBUG="1")
    assert code == 1 and "Traceback" in errors and "ValueError: --base_model no/such" in errors
    code, _, errors = run(RLOO, [*WORDS[RLOO], *f"{OWN} functions:broken".split()], folder)
    assert code == 1 and f'{folder}/functions.py", line 5, in broken' in errors and "ZeroDivisionError" in errors
    assert "--reward_fn functions:broken" in errors.splitlines()[-1]


def test_a_tilde_is_the_home_folder(tmp_path: Path) -> None:
    folder, nan = copy(kit(), tmp_path), (fork_tools.give_nan, 5)
    code, _, errors = run(PPO, [*WORDS[PPO], "--output_dir", "~/run"], folder, nan, HOME=str(tmp_path))
    assert code == 2 and errors.splitlines()[-1].endswith("run/checkpoints/0000001/state.json")
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 1 and not (folder / "~").exists()
