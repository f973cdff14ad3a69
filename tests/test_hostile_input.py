"""What cannot be run ends with a message that names the flag, before anything is written.

Other refusals are in the file of their subject: sizes that do not go together in test_settings,
rows in test_data, models in test_models, folders in test_run_folder, limits in test_checks.
"""

import dataclasses
import gzip
import importlib
import json
import pickle
import shutil
import sys
from unittest import mock

import datasets
import fork_tools
import pytest
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS, copy, is_copy, kit, parse, run
from run_tools import call, read_lines, to_lines
from tiny_models import save_classifier
from transformers import AutoTokenizer

import ppo_rlhf
from plumbing import data as data_module
from plumbing import labels as labels_module
from plumbing import launch as launch_module
from plumbing.launch import UserError

# Modules that a --reward_fn may name, most of which go wrong when they are imported; and tables.
FILES = {
    "functions.py": "def broken(**_):\n    1 / 0\n",
    "fails.py": "1 / 0\n",
    "lines.py": "raise ValueError('one\\ntwo')\n",
    "empty.jsonl": "",
    "few.jsonl": to_lines({"text": "w5"}, {"text": "w6"}),
    "code/evil.py": "import os\nos.mkdir('marker')\n",
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The kit, and beside it models and files that have something wrong with them, by name."""
    folder = copy(kit(), tmp_path_factory.mktemp("faults"))
    save_classifier(folder / "short", "gpt2", max_position_embeddings=8)
    for name in ("no_tokenizer", "pickle", "code"):
        shutil.copytree(folder / "model", folder / name)
    for file in (folder / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (folder / "pickle/model.safetensors").unlink()
    evil = pickle.dumps({"lm_head.weight": fork_tools.Evil()}, 2)
    (folder / "pickle/pytorch_model.bin").write_bytes(evil)
    config = json.loads((folder / "model/config.json").read_text())
    own_code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config |= {"model_type": "evil", "auto_map": own_code}
    (folder / "code/config.json").write_text(json.dumps(config))
    lines = (folder / "queries.jsonl").read_text()
    files = {"queries.doc": lines, "a::queries.jsonl": lines}
    for name, text in (FILES | files).items():
        (folder / name).write_text(text)
    (folder / "evil.pkl").write_bytes(pickle.dumps(fork_tools.Evil(), 2))
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_values_out_of_range_name_the_flag(script):
    module = importlib.import_module(script[:-3])
    args = module.Args()
    tried = {"adam_betas": ["0.9 nan", "inf 0.9"]}
    ranges = """
        seed -1 4000000000; eval_queries 0 -1; checkpoint_every -1; lora_rank -1; lora_alpha 0 inf;
        query_length 0; response_length 0; temperature 0 inf nan -1; truncate_after -1;
        penalty_reward_value nan -inf; total_episodes 0; batch_size 0; micro_batch_size 0;
        num_minibatches 0; num_epochs 0; lr nan -1 inf; lr_warmup -1; adam_eps 0 -1e-5;
        weight_decay -0.1; max_grad_norm 0 -1; kl_coef -0.1; adaptive_kl_target 0; kl_horizon 0;
        max_kl 0; cliprange -0.1; cliprange_value -0.1; vf_coef -0.1; gamma -0.1; lam -0.1;
        critic_lr -1; critic_warmup -1; rloo_k 0 1; num_labels 0; eval_labels 0;
        normalization_samples -1
    """
    for text in ranges.split(";"):
        name, *values = text.split()
        if hasattr(args, name):
            tried[name] = values
    for name, values in tried.items():
        for value in values:
            shown = ".*" if " " in value else f"({value}|{float(value)})"
            words = f"--{name}={value}".split()
            with pytest.raises(UserError, match=f"^--{name} {shown}: .") as caught:
                parse(module, words)
            assert "\n" not in str(caught.value)
    for field in dataclasses.fields(args):
        is_number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
        is_new = is_copy(script) and field.name not in tried
        assert not is_number or is_new or field.name in tried, f"--{field.name} has no range here"


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_that_are_no_settings(script, capsys):
    module = importlib.import_module(script[:-3])
    says = "^there is no preset 'sentimant': choose one of tiny, sentiment, "
    with pytest.raises(UserError, match=says):
        parse(module, ["sentimant"])
    of_another_script = "--rloo_k 4" if script != RLOO else "--vf_coef 1"
    words_in_a_box = f"""--learning 0.1; --lr; --lr fast; --batch_size 1.5; --seed 1.5;
        --adam_betas 0.9; --adam_betas 0.9 fast; --adam sgd; --dtype fp16; --lr 0.1 sentiment;
        {of_another_script}"""
    for words in words_in_a_box.split(";"):
        with pytest.raises(SystemExit, match="^2$"):
            parse(module, words.split())
        box = capsys.readouterr().err.replace("-", "_")
        wrong = "sentiment" if "sentiment" in words else words.split()[0]
        assert wrong.replace("-", "_") in box


OWN = "--reward_model none --critic shared --reward_fn"
NO_TABLES = "no/such evil.pkl a::queries.jsonl queries.doc nowhere.jsonl"
CASES = [  # @: the last flag, its value and a colon, at the beginning of the line
    (PPO, "--num_minibatches 4 --batch_size 6", "@must be a multiple of 4 "),
    (RLOO, "--rloo_k 2 --num_minibatches 2 --batch_size 6", "@must be a multiple of 4 "),
    (RLOO, "--rloo_k 4 --batch_size 8 --micro_batch_size 2", "--micro_batch_size 2 must be a mult"),
    *(
        (script, "--truncate_token w1 --truncate_after 5", "@must be below --response_length")
        for script in SCRIPTS
    ),
    (PPO, "--reward_fn functions:broken --reward_model none", "--critic reward needs --re"),
    (PPO, ["--truncate_token", ""], "--truncate_token '' must be one token"),
    (PPO, ["--adam_betas", "1.5", "0.9"], "--adam_betas 1.5: Input should be less than 1$"),
    (PPO, "--critic_warmup 4", "@must be below 4 updates$"),
    *((script, "--resume --output_dir none", "--resume needs --output_dir") for script in SCRIPTS),
    # models
    (PPO, "--base_model no_tokenizer --truncate_token none", "--base_model has a .* tokens$"),
    (RLOO, "--reward_model ~/nowhere", "@."),
    *((PPO, f"--base_model {name}", "@.") for name in ("no/such", "tiny/nothing", "./nowhere")),
    (PPO, "--base_model pickle", "@.*model.safetensors"),
    *((script, "--base_model code", "@.*custom code") for script in SCRIPTS),
    *(
        (script, "--response_length 60", "--.* a window of 64 tokens, too short for texts of 6.$")
        for script in SCRIPTS
    ),
    # rewards
    (RLOO, "--reward_model short", "@.*a window of 8"),
    (PPO, "--reward_model model", "@the weights do not fit a GPT2For.*: score.weight$"),
    (PPO, "--reward_model none", "--reward_model None: `python train_reward.py tiny` makes one"),
    (PPO, f"{OWN} functions:none_such", "@.*none_such"),
    (PPO, f"{OWN} functions", "@is not a function, but <module"),
    (PPO, f"{OWN} fails:f", "@division by zero"),
    # tables; `a::queries.jsonl` is not queries.jsonl
    *((PPO, f"--query_dataset {name}", "@.") for name in NO_TABLES.split()),
    (PPO, "--query_dataset empty.jsonl", "@is empty$"),
    (
        PPO,
        "--query_dataset few.jsonl --eval_queries 2",
        "--query_dataset: no query is left of 2 rows: .*2}",
    ),
    (REWARD, "--num_labels 50", "@--label_dataset has 20 rows$"),
    (REWARD, "--normalization_samples 1", "--normalization_samples: .* mean .* deviation 0"),
    # the run's folder
    (PPO, "--output_dir queries.jsonl", "--output_dir /.*queries.jsonl is not empty: "),
    (RLOO, "--output_dir /proc/run", "/proc/run cannot be written, "),
]


@pytest.mark.parametrize(
    ("script", "words", "says"), CASES, ids=[f"{x} {words}" for x, words, _ in CASES]
)
@mock.patch("builtins.input", lambda *_: "y")  # transformers may ask to run code
def test_bad_input_is_refused(script, words, says, faults):
    """Neither the run's folder is made, nor what a pickle or a model's code would make."""
    before = sorted(faults.rglob("*"))
    words = words.split() if isinstance(words, str) else words
    says = says.replace("@", rf"{words[-2]} (\S*/)?{words[-1]}:? ", 1)
    with pytest.raises(UserError, match=f"^(?s:{says})"):
        call(script, [*WORDS[script], *words], faults)
    made = [path for path in sorted(faults.rglob("*")) if path not in before]
    assert [path for path in made if "__pycache__" not in str(path)] == []


@pytest.mark.parametrize("name", ["lines.txt", "lines.jsonl.gz", "lines.csv", "lines.parquet"])
def test_these_files_load(name, tmp_path, monkeypatch, capsys):
    rows = [*read_lines(kit() / "queries.jsonl"), {"text": None}]
    (tmp_path / "lines.txt").write_text("\n".join(row["text"] or "" for row in rows) + "\n")
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(to_lines(*rows).encode()))
    if name.endswith((".csv", ".parquet")):
        getattr(datasets.Dataset.from_list(rows), f"to_{name[6:]}")(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    args = ppo_rlhf.Args(query_dataset=name, start_text=None, end_text=None)
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    _, queries = data_module.load_queries(args, tokenizer, 0, 99)
    assert len(queries) == 16
    says = "--query_dataset: 17 rows, 17 read, 16 used, dropped {'empty': 1}, first 'w"
    assert says in capsys.readouterr().out


def test_a_path_is_here_or_beside_the_script(tmp_path, monkeypatch):
    """A link stays one: the files that a hub's cache links to have no endings."""
    (tmp_path / "home/model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    beside = str(ppo_rlhf.FILE.parent / "tiny/model")
    for name, path in (
        ("~/model", f"{tmp_path}/home/model"),
        ("~/none", "~/none"),
        ("link/model", f"{tmp_path}/link/model"),
        ("tiny/model", beside),
        ("tiny/model/config.json", f"{beside}/config.json"),
        ("an/owner", "an/owner"),
    ):
        assert launch_module.local_path(name) == path
    (tmp_path / "tiny/model").mkdir(parents=True)
    assert launch_module.local_path("tiny/model") == f"{tmp_path}/tiny/model"


def test_this_folder_comes_before_a_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("def mine(**_): pass\n")
    assert labels_module.load_reward_fn("colorsys:mine", None).args[0].__name__ == "mine"
    del sys.modules["colorsys"]


def test_a_user_sees_one_line_or_on_demand_a_traceback(faults, tmp_path):
    folder = copy(faults, tmp_path)
    words = [*WORDS[PPO], *f"{OWN} lines:f".split()]
    code, printed, errors = run(PPO, words, folder)
    assert (code, printed.splitlines()[0]) == (1, "1 x cpu, fp32")
    last = errors.splitlines()[-1]
    assert last == f"{PPO}: --reward_fn lines:f: one two (RLHF_DEBUG=1 shows more)"
    assert "Traceback" not in errors
    code, _, errors = run(PPO, words, folder, RLHF_DEBUG="1")
    assert code == 1
    assert "Traceback" in errors
    assert "UserError: --reward_fn lines:f: one\ntwo" in errors
    words = [*WORDS[RLOO], "--reward_model", "none", "--reward_fn", "functions:broken"]
    code, _, errors = run(RLOO, words, folder)
    assert code == 1
    assert f'{folder}/functions.py", line 2, in broken' in errors
    says = [
        "ZeroDivisionError: division by zero",
        "This error comes from the function of --reward_fn.",
    ]
    assert errors.splitlines()[-2:] == says


def test_of_two_processes_one_line_is_printed_first(folder):
    one, two = fork_tools.run_two(PPO, [*WORDS[PPO], "--batch_size", "5"], folder)
    waiting, processes = one[1].splitlines()
    assert waiting.startswith("waiting for all processes of {'WORLD_SIZE': '2', 'MASTER_ADDR': ")
    assert (processes, two[1]) == ("2 x cpu:0, fp32", "")
    for code, _, errors in (one, two):
        assert (code, len(errors.splitlines())) == (1, 1)
        assert "RLHF_DEBUG" not in errors  # it would show no more
        assert errors.startswith(f"{PPO}: --batch_size 5 must be a multiple of 2 ")
