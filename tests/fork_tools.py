"""Tiny runs of the scripts in processes that a test can kill, forked from one that has imported the libraries.

A run then takes about a second. Every process imports this module, so at the top it imports no library.
"""

import atexit
import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT

PPO, RLOO, REWARD = SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
MODEL = {PPO: "policy", RLOO: "policy", REWARD: "reward_model"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fork_warm"])
Change = tuple[Callable[..., None], Any]
COMMON = "--query_dataset queries.jsonl --response_length 5 --query_length 6 --start_text none --end_text none "
COMMON += "--output_dir out --checkpoint_every 1 --base_model model --batch_size 4 --micro_batch_size 2"
RL = "--reward_model judge --eval_queries 2 --num_epochs 2 --total_episodes 16 --truncate_token none --lr 1e-2"
WORDS = dict.fromkeys(SCRIPTS, [*COMMON.split(), *RL.split()])
WORDS[PPO] = [*WORDS[PPO], *"--ema 0.9 --critic reward".split()]  # all that a run can leave
WORDS[RLOO] = [*WORDS[RLOO], "--rloo_k", "2"]
WORDS[REWARD] = [*COMMON.split(), *"--label_dataset labels.jsonl --num_labels 16 --normalization_samples 4".split()]
UPDATES = 4


def fill(folder: Path) -> Path:
    """A random model of 50 words, a reward model, queries and labels, under the names that WORDS has."""
    import torch
    from tiny_models import VOCABULARY, save_classifier, save_model

    rng, _ = random.Random(0), torch.manual_seed(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(count)]

    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", "gpt2")
    save_classifier(folder / "judge", "gpt2")
    queries = [{"text": " ".join(f"w{token}" for token in tokens(rng.randrange(3, 7)))} for _ in range(16)]
    samples = [{f"sample{i}": tokens(5) for i in range(2)} for _ in range(20)]
    labels = [pair | {"query": tokens(4), "best": rng.randrange(2)} for pair in samples]
    for name, rows in (("queries", queries), ("labels", labels)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_here(script: str, words: Sequence[str], folder: Path, name: str, changes: Sequence[Change], env: Any) -> None:
    """In the forked process: what the script prints goes to `name`.out and `name`.err next to the folder."""
    for stream, ending in ((1, "out"), (2, "err")):
        handle = os.open(f"{folder}-{name}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, stream)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(stream, "wb"), line_buffering=True) for stream in (1, 2))
    for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(key, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env
    os.chdir(folder)
    sys.argv, sys.dont_write_bytecode = [str(ROOT / script), *words], True
    sys.path.insert(0, str(ROOT))
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(f"{folder}-cache")
    if "ACCELERATE_USE_FSDP" in env:
        shard_on_cpus()
    for change, *values in changes:
        change(*values)
    runpy.run_path(str(ROOT / script), run_name="__main__")


def begin(script: str, words: Sequence[str], folder: Path, *changes: Change, name: str = "run", **env: str) -> Any:
    """Start `python script words` in `folder` with changes: functions of this module, each with its values."""
    process = FORKS.Process(target=run_here, args=(script, words, folder, name, changes, env))
    with contextlib.chdir(Path(__file__).parent):  # where the server, which the first process starts, finds fork_warm
        process.start()
    return process


def end(process: Any, folder: Path, name: str = "run") -> tuple[int, str, str]:
    """Exit status (minus the signal; 124 after two minutes), stdout, stderr."""
    process.join(120)
    if hangs := process.exitcode is None:
        process.kill()
        process.join()
    files = [Path(f"{folder}-{name}.{ending}") for ending in ("out", "err")]
    return 124 if hangs else process.exitcode, *(file.read_text() if file.exists() else "" for file in files)


def run(script: str, words: Sequence[str], folder: Path, *changes: Change, **env: str) -> tuple[int, str, str]:
    return end(begin(script, words, folder, *changes, **env), folder)


def run_two(
    script: str, words: Sequence[str], folder: Path, *changes: Change, **env: str
) -> list[tuple[int, str, str]]:
    """The same by two processes of one group, as a launcher starts them; the changes are made in the first one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    names = ("rank0", "rank1")
    processes = [
        begin(script, words, folder, *([] if i else changes), name=name, RANK=str(i), LOCAL_RANK=str(i), **env)
        for i, name in enumerate(names)
    ]
    return [end(process, folder, name) for process, name in zip(processes, names, strict=True)]


def run_on(world: int, *values: Any, **env: str) -> tuple[int, str, str]:
    """The first process of one or two, which have ended together: with one status, unless the first was killed."""
    first, *others = [run(*values, **env)] if world == 1 else run_two(*values, **env)
    assert all(other[0] == first[0] or first[0] < 0 and other[0] != 124 for other in others), [first, *others]
    return first


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "folder"))


@functools.cache
def kit() -> Path:
    """The folder of `fill`, made once."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fill(folder / "kit")


@functools.cache
def plain(script: str, world: int) -> Path:
    """A folder in which the script has run and nothing stopped it, on one process or two; `log` lists what it wrote."""
    folder = copy(kit(), kit().with_name(f"{script}-{world}"))
    code, _, errors = run_on(world, script, WORDS[script], folder, (strike, "", 0, 0, f"{folder}/log"))
    assert code == 0, errors
    return folder


class Evil:
    """Whoever unpickles this makes the folder `marker`."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("marker",)


# Changes to a run


def strike(pattern: str, count: int, number: int = signal.SIGKILL, log: str | None = None) -> None:
    """A signal before the `count`-th operation on the run's files that has `pattern` in its line: "open out/args.tmp".

    Weights and optimizer states are written in two halves, so that "half of out/policy" is the moment between them, and
    "sync" is that before os.sync. With `log` all lines are written to that file.
    """
    import accelerate.utils.other
    import safetensors.torch
    import torch
    import transformers.modeling_utils

    seen, folder, sync = 0, os.path.realpath("out"), os.sync

    def note(what: str, path: Any) -> None:
        nonlocal seen
        line = f"{what} {os.path.relpath(path)}"
        seen += pattern in line
        if log:
            with open(log, "a") as file:
                file.write(f"{line}\n")
        if pattern in line and seen == count:
            os.kill(os.getpid(), number)

    def watch(event: str, values: tuple[Any, ...]) -> None:
        watched = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if event in watched and isinstance(values[0], str | os.PathLike):
            path, is_read = os.fspath(values[0]), event == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR)
            if event in ("os.remove", "os.rmdir") and values[1] >= 0:  # within the open folder of shutil.rmtree
                path = os.path.join(os.readlink(f"/proc/self/fd/{values[1]}"), path)
            if not is_read and os.path.abspath(path).startswith(folder):
                note(event, path)

    def in_two(save: Callable[..., None]) -> Callable[..., None]:
        def changed(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            note("save", path)
            save(tensors, path, *args, **kwargs)
            whole = Path(path).read_bytes()
            os.truncate(path, len(whole) // 2)
            note("half of", path)
            Path(path).write_bytes(whole)

        return changed

    for module, name in (
        (accelerate.utils.other, "safe_save_file"),
        (transformers.modeling_utils, "safe_save_file"),
        (safetensors.torch, "save_file"),
        (torch, "save"),
    ):
        setattr(module, name, in_two(getattr(module, name)))
    os.sync = lambda: (note("sync", "out"), sync())
    sys.addaudithook(watch)


def give_nan(call: int) -> None:
    """The `call`-th loss of a micro-batch is no number."""
    import accelerate

    backward, calls = accelerate.Accelerator.backward, itertools.count(1)

    def changed(self: Any, loss: Any) -> None:
        backward(self, loss * (float("nan") if next(calls) == call else 1))

    accelerate.Accelerator.backward = changed


def log_unpickling(log: str) -> None:
    """Every name that a pickle looks up is written to that file: to be safe there must be none."""

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            with open(log, "a") as file:
                file.write(f"{values}\n")

    sys.addaudithook(watch)


def log_shares(log: str) -> None:
    """The part of the trained model's weights that this process holds is written to that file."""
    import accelerate

    prepare = accelerate.Accelerator.prepare

    def noted(self: Any, *args: Any) -> Any:
        made = prepare(self, *args)
        weights = list(made[0].parameters())
        here = sum(x.to_local().numel() if hasattr(x, "to_local") else x.numel() for x in weights)
        Path(log).write_text(str(here / sum(x.numel() for x in weights)))
        return made

    accelerate.Accelerator.prepare = noted


def close_stdout() -> None:
    """Nobody reads what is printed, as in `python script | true`."""
    read, write = os.pipe()
    sys.stdout = io.TextIOWrapper(os.fdopen(write, "wb"), line_buffering=True)
    os.close(read)


def shard_on_cpus() -> None:
    """accelerate takes FSDP on GPUs only; here it takes it on CPUs too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def changed(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = changed
