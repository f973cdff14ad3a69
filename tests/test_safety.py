"""Nothing that is loaded can run code, nothing that is logged names the machine or holds a secret."""

import ast
import json
import os
import pickle
import re
import shutil
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import fork_tools
import pytest
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, SCRIPTS, WORDS, run
from run_tools import read_lines

SECRETS = {
    "WANDB_API_KEY": "5ec4e7" * 6 + "abcd",
    "HF_TOKEN": "hf_s3cr3ts3cr3ts3cr3t",
    "OPENAI_API_KEY": "sk-s3cr3t-0a1b2c",
}

HOST = "a-host-that-nobody-may-know"


class Evil:
    """Whoever unpickles this makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork_tools.fill(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def folder(kit: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kit, tmp_path / "folder"))


def poison(model: Path, form: str, marker: Path) -> None:
    """Put a pickle where the weights of a model folder were."""
    data = pickle.dumps({"lm_head.weight": Evil(marker)})
    (model / "model.safetensors").unlink()
    if form == "index":  # a list of shards that names a pickle
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": "pytorch_model.bin"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    name = "model.safetensors" if form == "disguised" else "pytorch_model.bin"
    (model / name).write_bytes(data)


def assert_refused(script: str, words: list[str], folder: Path, *says: str) -> None:
    """One line, status 2, nothing run, nothing written; and no pickle opened at all."""
    log = folder.with_name("unpickled")
    code, _, errors = run(script, words, folder, (fork_tools.log_unpickling, str(log)))
    assert code == 2, errors
    lines = errors.splitlines()
    assert lines[-1].startswith(f"{script}: error: ") and "Traceback" not in errors
    for part in says:
        assert part in lines[-1]
    assert not folder.with_name("marker").exists()
    assert "mkdir" not in (log.read_text() if log.exists() else "")


def test_the_pickle_of_these_tests_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("form", ["plain", "index", "disguised"])
@pytest.mark.parametrize(
    ("script", "flag", "model"),
    [(PPO, "--base_model", "model"), (PPO, "--reward_model", "judge"), (REWARD, "--base_model", "model")],
)
def test_a_pickle_as_a_model_is_refused(script: str, flag: str, model: str, form: str, folder: Path) -> None:
    poison(folder / model, form, folder.with_name("marker"))
    assert_refused(script, WORDS[script], folder, f"{flag} {model}: ", "model.safetensors")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_pickle_in_a_checkpoint_is_refused(script: str, folder: Path) -> None:
    code, _, errors = run(script, WORDS[script], folder, (fork_tools.strike, "open out/samples.jsonl", 1))
    assert code < 0, errors
    newest = folder / "out/checkpoints/0000004"
    (newest / "optimizer.pt").write_bytes(pickle.dumps(Evil(folder.with_name("marker"))))
    log = folder.with_name("unpickled")
    change = (fork_tools.log_unpickling, str(log))
    code, _, errors = run(script, [*WORDS[script], "--resume", "--checkpoint_every", "0"], folder, change)
    assert (code, "0000004 is passed over: optimizer.pt is no part of a checkpoint" in errors) == (0, True)
    assert not folder.with_name("marker").exists()
    assert not log.exists(), log.read_text()
    # with the digests made to fit
    shutil.rmtree(folder / "out" / {REWARD: "reward_model"}.get(script, "policy"))
    newest = folder / "out/checkpoints/0000003"
    (newest / "optimizer.safetensors").write_bytes(pickle.dumps(Evil(folder.with_name("marker"))))
    (newest / "sha256.json").write_text(json.dumps(fork_tools.import_script(script).digests(newest)))
    words = [*WORDS[script], "--resume", "out/checkpoints/0000003"]
    assert_refused(script, words, folder, "--resume out/checkpoints/0000003: cannot be loaded", "would do")


@pytest.mark.parametrize("name", ["evil.pkl", "folder"])
def test_a_pickle_as_data_is_refused(name: str, folder: Path) -> None:
    (folder / "folder").mkdir()
    for file in (folder / "evil.pkl", folder / "folder/train.pkl"):
        file.write_bytes(pickle.dumps(Evil(folder.with_name("marker"))))
    assert_refused(PPO, [*WORDS[PPO], "--query_dataset", name], folder, f"--query_dataset {name}: cannot be read")
    assert_refused(REWARD, [*WORDS[REWARD], "--label_dataset", name], folder, f"--label_dataset {name}: cannot be read")


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_names_what_can_load_a_pickle(script: str) -> None:
    names = {"pickle", "marshal", "shelve", "joblib", "cloudpickle", "dill", "eval", "exec", "load_state", "save_state"}
    tree = ast.parse((ROOT / script).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}
            assert node.attr not in names - {"eval"}, node.attr  # model.eval() is no eval
        if isinstance(node, ast.Name):
            assert node.id not in names, node.id
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not names & {alias.name.partition(".")[0] for alias in node.names}


# Code from a hub


@pytest.fixture
def with_code(folder: Path) -> Path:
    """A base model that comes with a module; importing that makes `marker`."""
    config = json.loads((folder / "model/config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "model/config.json").write_text(json.dumps(config))
    code = f"import os\nos.makedirs({str(folder.with_name('marker'))!r}, exist_ok=True)\n"
    code += "from transformers import GPT2Config, GPT2LMHeadModel\n"
    code += "class Config(GPT2Config):\n    model_type = 'evil'\n"
    code += "class Model(GPT2LMHeadModel):\n    config_class = Config\n"
    (folder / "model/evil.py").write_text(code)
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_code_that_comes_with_a_model_is_not_run(script: str, with_code: Path) -> None:
    assert_refused(script, WORDS[script], with_code, "--base_model model: cannot be loaded", "custom code", "would do")


def test_code_that_comes_with_a_model_is_run_by_a_flag_that_warns(with_code: Path) -> None:
    words = [*WORDS[PPO], "--trust_remote_code"]
    code, _, errors = run(PPO, words, with_code, HF_MODULES_CACHE=str(with_code / "modules"))
    warning = f"{PPO}: warning: --trust_remote_code runs the Python code that comes with a model"
    assert errors.splitlines()[0].startswith(warning)
    assert with_code.with_name("marker").exists()
    assert code == 0, errors


def test_no_warning_without_that_flag(folder: Path) -> None:
    _, _, errors = run(RLOO, [*WORDS[RLOO], "--query_dataset", "nowhere"], folder)
    assert "warning" not in errors


# Weights & Biases


@pytest.mark.parametrize("script", [PPO, REWARD])
def test_tracking_tells_no_secret_and_nothing_of_the_machine(script: str, folder: Path) -> None:
    (folder / "home").mkdir()
    env = SECRETS | {"WANDB_MODE": "offline", "HOME": str(folder / "home"), "WANDB_DIR": str(folder)}
    code, _, errors = run(script, [*WORDS[script], "--track"], folder, (fork_tools.name_host, HOST), **env)
    assert code == 0, errors
    (record,) = (folder / "out").rglob("*.wandb")
    data = record.read_bytes()
    for row in read_lines(folder / "out/metrics.jsonl"):
        for name, value in row.items():
            assert name.encode() in data
            assert json.dumps(value).encode() in data or isinstance(value, float), (name, value)
    private = [*SECRETS, *SECRETS.values(), HOST, sys.executable, "import torch", "git_commit", "tokenizers=="]
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        for word in private:
            assert word.encode() not in file.read_bytes(), (file, word)
        if "wandb" in file.parts:
            real = re.escape(socket.gethostname().encode())
            assert not re.search(rb"(?<![a-zA-Z0-9])" + real + rb"(?![a-zA-Z0-9])", file.read_bytes()), file
    assert not set(errors) & set("\r\x1b")


# Paths


def test_texts_that_look_like_paths_stay_texts(folder: Path) -> None:
    """No file is made but in the folder of the run, whatever the data say."""
    tokenizer = json.loads((folder / "model/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for i, path in enumerate(("../../up", "/absolute/path", "..\\up", "out/../../x", "\x00", "~/home")):
        vocabulary[path] = vocabulary.pop(f"w{i + 1}")
    for model in ("model", "judge"):
        (folder / model / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [{"text": f"../../up /absolute/path w{i}"} for i in range(9, 30)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = folder.with_name("log")
    before = {file for file in folder.parent.rglob("*") if file.is_file()}
    code, _, errors = run(PPO, WORDS[PPO], folder, (fork_tools.log_writing, str(log)))
    assert code == 0, errors
    assert "../../up" in (folder / "out/samples.jsonl").read_text()
    made = {file for file in folder.parent.rglob("*") if file.is_file()} - before - {log}
    places = (folder / "out", folder.with_name("folder-cache"), folder.with_name("folder-run"))
    assert all(str(file).startswith(tuple(map(str, places))) for file in made)
    written = {Path(line) for line in log.read_text().splitlines()}
    assert (folder / "out/metrics.jsonl") in written
    for path in written:
        allowed = (*map(str, places), "/dev/", "/proc/", os.path.expanduser("~/.cache"))
        assert str(path).startswith(allowed), path


def test_the_header_of_a_safetensors_file_is_no_pickle() -> None:
    """What is loaded is this format: a length, json, and numbers."""
    data = (ROOT / "tiny/model/model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert json.loads(data[8 : 8 + length])
