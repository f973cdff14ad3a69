"""Numbers gone wrong stop a run before they do harm; a model is on the disk before anything is printed."""

import json
from pathlib import Path

import fork_tools
import pytest
from fork_tools import MODEL, PPO, REWARD, RLOO, WORDS, copy, kit, plain, run, run_on
from run_tools import read_lines
from safetensors.torch import load_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Processes; the micro-batch whose loss is no number, on the first process; the updates and the steps before it
@pytest.mark.parametrize(
    ("script", "world", "call", "updates", "steps"),
    [(PPO, 1, 11, 2, 5), (PPO, 2, 4, 1, 3), (RLOO, 1, 2, 0, 0), (RLOO, 1, 10, 2, 4), (REWARD, 1, 6, 2, 2)],
)
def test_a_gradient_that_is_no_number_stops_before_the_step(
    script: str, world: int, call: int, updates: int, steps: int, tmp_path: Path
) -> None:
    folder, log = copy(kit(), tmp_path), tmp_path / "steps"
    changes = (fork_tools.give_nan, "loss", call), (fork_tools.log_steps, str(log))
    code, _, errors = run_on(world, script, WORDS[script], folder, *changes)
    newest = f"out/checkpoints/{updates:07d}" if updates else "none"
    assert errors.endswith(f"\n{script}: the gradient is not finite; the newest checkpoint: {newest}\n")
    assert (code, "Traceback" in errors) == (2, False)
    assert len(log.read_text() if log.exists() else "") == steps
    assert len(read_lines(folder / "out/metrics.jsonl")) == updates
    made = names(folder / "out/checkpoints") if updates else []
    assert made == [f"{i + 1:07d}" for i in range(updates)]
    assert not (folder / "out" / MODEL[script]).exists()


@pytest.mark.parametrize(("script", "way"), [(PPO, "closed"), (PPO, "ascii"), (REWARD, "closed")])
def test_the_model_is_on_the_disk_before_anything_is_printed(script: str, way: str, tmp_path: Path) -> None:
    """`python script | true`, and a terminal without the characters of a sample."""
    folder, changes, env = copy(kit(), tmp_path), [(fork_tools.close_stdout,)], {}
    if way == "ascii":
        changes, env = [], {"PYTHONIOENCODING": "ascii"}
        for name in ("model", "judge"):
            file = folder / name / "tokenizer.json"
            tokenizer = json.loads(file.read_text())
            vocabulary = tokenizer["model"]["vocab"]
            tokenizer["model"]["vocab"] = {word.replace("w", "🙂"): i for word, i in vocabulary.items()}
            file.write_text(json.dumps(tokenizer))
        for name in ("queries", "labels"):
            file = folder / f"{name}.jsonl"
            file.write_text(file.read_text().replace(" w", " 🙂").replace('"w', '"🙂'))
    code, printed, errors = run(script, WORDS[script], folder, *changes, **env)
    made, expected = (load_file(x / "out" / MODEL[script] / "model.safetensors") for x in (folder, plain(script, 1)))
    assert all((x == expected[name]).all() for name, x in made.items())
    assert names(folder / "out" / MODEL[script]) == names(plain(script, 1) / "out" / MODEL[script])
    assert way == "ascii" or f"{script}: [Errno 32] Broken pipe" in errors
    if way == "ascii":
        assert (code, "?1" in printed, "🙂" in printed) == (0, True, False)
        assert "🙂" in json.dumps(read_lines(folder / "out/samples.jsonl")[0], ensure_ascii=False)


def test_weights_and_biases_gets_every_metric(tmp_path: Path) -> None:
    """Offline; the record is in the run's folder or beside it."""
    folder = copy(kit(), tmp_path)
    code, _, errors = run(REWARD, [*WORDS[REWARD], "--track"], folder, WANDB_MODE="offline", WANDB_SILENT="true")
    assert code == 0, errors
    (record,) = folder.rglob("*.wandb")
    data = record.read_bytes()
    assert all(name.encode() in data for row in read_lines(folder / "out/metrics.jsonl") for name in row)
