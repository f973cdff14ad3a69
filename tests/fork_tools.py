"""Tiny runs of the scripts in processes that a test can kill, forked from one that has imported the libraries.

A run then takes about two seconds. Every process imports this module, so at the top it imports no library.
"""

import errno
import importlib
import io
import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT

PPO, RLOO, REWARD = SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
FORKS = multiprocessing.get_context("forkserver")
LIBRARIES = ["accelerate", "datasets", "matplotlib.figure", "matplotlib.backends.backend_agg", "rich.console", "tyro"]
LIBRARIES += ["torch.distributed.checkpoint.state_dict", "torch._inductor.cudagraph_trees", "wandb", "pandas", "tqdm"]
LIBRARIES += ["transformers.models.gpt2.modeling_gpt2", "transformers.models.gpt2.tokenization_gpt2", "rich.table"]
LIBRARIES += ["transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]
LIBRARIES += ["datasets.packaged_modules.json.json", "torch.nn.parallel"]
FORKS.set_forkserver_preload(LIBRARIES)
Change = tuple[Callable[..., None], Any]
COMMON = "--query_dataset queries.jsonl --response_length 5 --query_length 6 --start_text none --end_text none "
COMMON += "--output_dir out --checkpoint_every 1 --base_model model --batch_size 4 --micro_batch_size 2"
RL = "--reward_model judge --eval_queries 2 --num_epochs 2 --total_episodes 16 --truncate_token none --lr 1e-2"
WORDS = dict.fromkeys(SCRIPTS, [*COMMON.split(), *RL.split()])
WORDS[RLOO] = [*WORDS[RLOO], "--rloo_k", "2"]
WORDS[REWARD] = [*COMMON.split(), *"--label_dataset labels.jsonl --num_labels 16 --normalization_samples 4".split()]
UPDATES = 4


def fill(folder: Path) -> Path:
    """A random model of 50 words, a reward model, queries and labels, under the names that WORDS has."""
    from tiny_models import VOCABULARY, save_classifier, save_model

    rng = random.Random(0)

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
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(i, "wb"), line_buffering=True) for i in (1, 2))
    for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(key, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"} | env
    os.chdir(folder)
    sys.argv, sys.dont_write_bytecode = [str(ROOT / script), *words], True
    sys.path.insert(0, str(ROOT))
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(f"{folder}-cache")
    for change, *values in changes:
        change(*values)
    runpy.run_path(str(ROOT / script), run_name="__main__")


def begin(script: str, words: Sequence[str], folder: Path, *changes: Change, name: str = "run", **env: str) -> Any:
    """Start `python script words` in `folder` with changes: functions of this module, each with its values."""
    process = FORKS.Process(target=run_here, args=(script, words, folder, name, changes, env))
    process.start()
    return process


def end(process: Any, folder: Path, name: str = "run") -> tuple[int, str, str]:
    """Exit status (or minus the signal), stdout, stderr."""
    process.join(120)
    assert process.exitcode is not None, "still running"
    files = [Path(f"{folder}-{name}.{ending}") for ending in ("out", "err")]
    return process.exitcode, *(file.read_text() if file.exists() else "" for file in files)


def run(script: str, words: Sequence[str], folder: Path, *changes: Change, **env: str) -> tuple[int, str, str]:
    return end(begin(script, words, folder, *changes, **env), folder)


def run_two(
    script: str, words: Sequence[str], folder: Path, *changes: Change, **env: str
) -> list[tuple[int, str, str]]:
    """The same by two processes of one group, as a launcher starts them; the changes are made in the first one."""
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20_000, 60_000))}
    names = ("rank0", "rank1")
    processes = [
        begin(script, words, folder, *([] if i else changes), name=name, RANK=str(i), LOCAL_RANK=str(i), **env)
        for i, name in enumerate(names)
    ]
    return [end(process, folder, name) for process, name in zip(processes, names, strict=True)]


# Changes to a run


def strike(pattern: str, count: int, number: int = signal.SIGKILL, log: str | None = None) -> None:
    """A signal before the `count`-th operation on the run's files that has `pattern` in its line: "open out/args.tmp".

    The files of a checkpoint are written in two halves, so that "half of save_file" is the moment between them. With
    `log` all lines are written to that file.
    """
    import safetensors.torch

    seen, folder, save_file, fsync = 0, os.path.realpath("out"), safetensors.torch.save_file, os.fsync

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

    def save_in_two(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        note("save_file", path)
        save_file(tensors, path, *args, **kwargs)
        whole = Path(path).read_bytes()
        os.truncate(path, len(whole) // 2)
        note("half of save_file", path)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
            file.write(whole[len(whole) // 2 :])

    def noted_fsync(handle: int) -> None:
        note("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    safetensors.torch.save_file, os.fsync = save_in_two, noted_fsync
    sys.addaudithook(watch)


def give_nan(what: str, call: int) -> None:
    """The `call`-th loss (of a micro-batch) or gradient norm is no number."""
    import torch

    for module, name, kind in (
        (torch, "maximum", "loss"),
        (torch.nn.functional, "cross_entropy", "loss"),
        (torch.nn.utils, "get_total_norm", "gradient"),
    ):
        if kind == what:
            setattr(module, name, nan_at(getattr(module, name), call * (2 if name == "maximum" and is_ppo() else 1)))


def is_ppo() -> bool:
    return Path(sys.argv[0]).name == PPO


def nan_at(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    calls = [0]

    def changed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return function(*args, **kwargs) * (float("nan") if calls[0] == call else 1)

    return changed


def sample_anything() -> None:
    """The sampler takes tokens by their number, not by their probability."""
    import torch

    def searchsorted(cdf: Any, u: Any, **kwargs: Any) -> Any:
        return (u / cdf[:, -1:] * cdf.shape[1]).long()

    torch.searchsorted = searchsorted


def log_unpickling(log: str) -> None:
    """Every name that a pickle looks up is written to that file: to be safe there must be none."""

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            with open(log, "a") as file:
                file.write(f"{values}\n")

    sys.addaudithook(watch)


def log_writing(log: str) -> None:
    """Every file or folder that is opened for writing, made or renamed is written to that file."""

    def watch(event: str, values: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR)
        path = values[1] if event == "os.rename" else values[0] if values else None
        if (is_write or event in ("os.mkdir", "os.rename")) and isinstance(path, str | os.PathLike) and path != log:
            with open(log, "a") as file:
                file.write(f"{os.path.abspath(path)}\n")

    sys.addaudithook(watch)


def import_script(script: str) -> Any:
    return importlib.import_module(script[:-3])


def name_host(name: str) -> None:
    import platform
    import socket

    socket.gethostname = platform.node = lambda: name


def lose_hub() -> None:
    """The machine is not told that it is offline, it just reaches nobody; and nobody waits before the next attempt."""
    import socket
    import time

    import datasets
    import huggingface_hub.constants

    def refuse(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False
    socket.getaddrinfo, time.sleep = refuse, lambda seconds: None


def fill_disk(pattern: str, count: int) -> None:
    """There is no space left for the `count`-th operation with `pattern`, see strike, and any after it."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    signal.signal(signal.SIGUSR1, fail)
    strike(pattern, count, signal.SIGUSR1)


def limit_files(size: int) -> None:
    """No file may be larger than this."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
