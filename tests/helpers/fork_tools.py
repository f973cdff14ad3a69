"""Tiny runs of the scripts in processes that a test can kill, forked from one that has imported the
libraries.

A run then takes about a second. Every process imports this module, so at the top it imports no
library.
"""

import atexit
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

PPO, RLOO, REWARD = SCRIPTS = ("ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py")
MODEL = {PPO: "policy", RLOO: "policy", REWARD: "reward_model"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fork_warm"])
Change = tuple[Callable[..., None], Any]


def is_copy(script: str) -> bool:
    """Whether `pytest --script` has put a copy in the place of this script."""
    return script == os.environ.get("COPIED_SCRIPT")


def with_flags(words: str, script: str) -> list[str]:
    """The words without flags that a copy of the script no longer has, and with --script_flags."""
    if not is_copy(script):
        return words.split()
    fields = re.findall(r"^    (\w+): ", (ROOT / script).read_text(), re.M)
    found = []
    for flag in words.split("--")[1:]:
        name, *values = flag.split()
        if name in fields:
            found += [f"--{name}", *values]
    return found + shlex.split(os.environ["SCRIPT_FLAGS"])


# The words of a run of four updates, with a checkpoint after each, on the files of `fill`. About
# half of the responses end.
COMMON = "--query_dataset queries.jsonl --response_length 5 --query_length 6 --start_text none"
COMMON += " --end_text none --output_dir out --checkpoint_every 1 --base_model model"
COMMON += " --batch_size 4 --micro_batch_size 2 --truncate_token w4 --truncate_after 1"
RL = f"{COMMON} --reward_model judge --eval_queries 2 --num_epochs 2 --total_episodes 16"
RL += " --lr 1e-2"
LABELS = f"{COMMON} --label_dataset labels.jsonl --num_labels 16 --normalization_samples 4"
WORDS = {
    PPO: with_flags(f"{RL} --critic reward", PPO),  # all that a run can leave
    RLOO: with_flags(f"{RL} --rloo_k 2", RLOO),
    REWARD: with_flags(LABELS, REWARD),
}
UPDATES = 4


def complete(script: str, words: Sequence[str]) -> list[str]:
    """The words with --script_flags, which WORDS has already; a preset stays first."""
    if not is_copy(script) or list(words[: len(WORDS[script])]) == WORDS[script]:
        return [*words]
    first = int(bool(words) and not words[0].startswith("-"))
    return [*words[:first], *shlex.split(os.environ["SCRIPT_FLAGS"]), *words[first:]]


def parse(module: Any, words: Sequence[str]) -> tuple[str, Any]:
    """Preset and settings that a script, which is imported here, makes of these words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *words])
        from plumbing.launch import parse_args

        return parse_args(module.Args, module.PRESETS)


def fill(folder: Path) -> Path:
    """A random model of 50 words, a reward model, queries and labels, under the names that WORDS
    has."""
    import torch
    from run_tools import to_lines
    from tiny_models import VOCABULARY, save_classifier, save_model

    torch.manual_seed(0)
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(count)]

    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", "gpt2")
    save_classifier(folder / "judge", "gpt2")
    queries = []
    for _ in range(16):
        words = [f"w{token}" for token in tokens(rng.randrange(3, 7))]
        queries.append({"text": " ".join(words)})
    labels = [{"sample0": tokens(5), "sample1": tokens(5)} for _ in range(20)]
    for label in labels:
        label |= {"query": tokens(4), "best": rng.randrange(2)}
    (folder / "queries.jsonl").write_text(to_lines(*queries))
    (folder / "labels.jsonl").write_text(to_lines(*labels))
    return folder


def run_here(
    script: str, words: Sequence[str], folder: Path, name: str, changes: Sequence[Change], env: Any
) -> None:
    """In the forked process: what the script prints goes to `name`.out and `name`.err next to the
    folder."""
    # The server says nothing if it cannot import this; every run would take ten times as long.
    assert "fork_warm" in sys.modules
    endings = ("out", "err")
    streams = [open(f"{folder}-{name}.{ending}", "w", buffering=1) for ending in endings]
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = streams
    for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(key, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env
    os.chdir(folder)
    path = ROOT / script  # or, if that is an absolute path, a copy of the script
    sys.argv = [str(path), *words]
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(path.resolve().parent))
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(f"{folder}-cache")
    if "ACCELERATE_USE_FSDP" in env:
        shard_on_cpus()
    for change, *values in changes:
        change(*values)
    runpy.run_path(str(path), run_name="__main__")


def begin(
    script: str, words: Sequence[str], folder: Path, *changes: Change, name: str = "run", **env: str
) -> Any:
    """Starts `python script words` in `folder` with changes: functions of this module, each with
    its values."""
    values = (script, complete(script, words), folder, name, changes, env)
    process = FORKS.Process(target=run_here, args=values)
    # Here the server, which the first process starts, finds fork_warm.
    with contextlib.chdir(Path(__file__).parent):
        process.start()
    return process


def end(process: Any, folder: Path, name: str = "run") -> tuple[int, str, str]:
    """Exit status (minus the signal; 124 after two minutes), stdout, stderr."""
    process.join(120)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
        status = 124
    printed, errors = (Path(f"{folder}-{name}.{ending}").read_text() for ending in ("out", "err"))
    return status, without_gloo(printed), errors


def without_gloo(printed: str) -> str:
    """What a script printed. With some versions of torch, gloo prints a line of its own."""
    return re.sub(r"^\[Gloo\] .*\n", "", printed, flags=re.M)


def run_two(
    script: str, words: Sequence[str], folder: Path, *changes: Change, **env: str
) -> list[tuple[int, str, str]]:
    """`python script words` in `folder` to its end, by two processes of one group, as a launcher
    starts them; the changes are made in the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = {}
    for rank, mine in enumerate((changes, ())):
        name = f"rank{rank}"
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes[name] = begin(script, words, folder, *mine, name=name, **env)
    return [end(process, folder, name) for name, process in processes.items()]


def run(*values: Any, world: int = 1, **env: str) -> tuple[int, str, str]:
    """The same by one process or two, which have ended together: with one status, unless the first
    was killed. Returns what is of the first."""
    if world == 1:
        return end(begin(*values, **env), values[2])
    first, second = run_two(*values, **env)
    was_killed = first[0] < 0 and second[0] != 124
    assert second[0] == first[0] or was_killed, [first, second]
    return first


def run_on_device(script: str, words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """The same on the simulated device, which leaves report.json in the folder."""
    device = str(ROOT / "tests/helpers/on_simulated_device.py")
    return run(device, ["--report", "report.json", str(ROOT / script), *words], folder)


def succeed(*values: Any, world: int = 1, **env: str) -> str:
    """The same, with an exit status of 0: stdout."""
    status, printed, errors = run(*values, world=world, **env)
    assert status == 0, errors
    return printed


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "folder"))


def change_file(file: Path, *changes: tuple[str, str]) -> None:
    """In the place of each first text, which must stand in the file once, puts the second."""
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)


def changed_copy(script: str, folder: Path, *changes: tuple[str, str], name: str = "") -> str:
    """The path of a copy of the script in the folder, of that name or its own, with these changes,
    and with what it needs beside it."""
    from benchmark.common import copy_shared

    copy_shared(folder)
    copy = Path(shutil.copy(ROOT / script, folder / name))
    change_file(copy, *changes)
    return str(copy)


@functools.cache
def kit() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fill(folder / "kit")


@functools.cache
def plain(script: str, world: int) -> Path:
    """A folder in which the script has run and nothing stopped it, on one process or two."""
    folder = copy(kit(), Path(tempfile.mkdtemp(dir=kit().parent)))
    succeed(script, WORDS[script], folder, world=world)
    return folder


class Evil:
    """Whoever unpickles this makes the folder `marker`."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("marker",)


# Changes to a run


def strike(pattern: str, count: int, number: int = signal.SIGKILL) -> None:
    """A signal at the `count`-th operation that writes and has `pattern` in its line: "open
    out/args.tmp", then with an empty file. With 0 in place of a signal the disk is full.

    Weights and optimizer states are written in two halves, so that "half of out/policy" is the
    moment between them.
    """
    import accelerate.utils.other
    import safetensors.torch
    import torch
    import transformers.modeling_utils

    seen = 0

    def note(what: str, path: Any) -> None:
        nonlocal seen
        line = f"{what} {os.path.relpath(path)}"
        seen += pattern in line
        if pattern in line and seen == count:
            seen += 1
            if what == "open":
                open(path, "a").close()
            if number == 0:
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), number)

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove"):
            return
        if not isinstance(values[0], str | os.PathLike):
            return
        path = os.fspath(values[0])
        if event == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR):  # to read
            return
        if event == "os.remove" and values[1] >= 0:  # shutil.rmtree's open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{values[1]}"), path)
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
    sys.addaudithook(watch)


def limit_file_sizes(size: str) -> None:
    """What is written behind this many bytes of a file is an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))


def give_nan(call: int) -> None:
    """The `call`-th loss of a micro-batch is no number."""
    import accelerate

    backward = accelerate.Accelerator.backward
    calls = itertools.count(1)

    def changed(self: Any, loss: Any) -> None:
        is_it = next(calls) == call
        backward(self, loss * (float("nan") if is_it else 1))

    accelerate.Accelerator.backward = changed


def refuse_near_draws(margin: float) -> None:
    """A number to sample with that is nearer than this to another token is an error: with the
    rounding of another CPU it could be that token."""
    import torch

    search = torch.searchsorted

    def checked(cdf: Any, u: Any, **kwargs: Any) -> Any:
        assert (cdf[:, :-1] - u).abs().min() > margin, "between two tokens: take another seed"
        return search(cdf, u, **kwargs)

    torch.searchsorted = checked


def append(log: str, row: Any) -> None:
    with open(log, "a") as file:
        file.write(json.dumps(row, default=str) + "\n")


def log_unpickling(log: str) -> None:
    """Every name that a pickle looks up is written to that file: to be safe there must be none."""

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            append(log, values)

    sys.addaudithook(watch)


def log_whole_tensors(log: str) -> None:
    """Written to that file: after each backward pass the elements of gradients that are not in
    shards; at each sampled token those of trained weights, and whether autocast keeps copies."""
    import gc

    import accelerate
    import torch

    backward = accelerate.Accelerator.backward
    search = torch.searchsorted

    def whole() -> list[Any]:
        weights = [x for x in gc.get_objects() if type(x) is torch.nn.Parameter]
        return [x for x in weights if x.requires_grad and not hasattr(x, "to_local")]

    def counted(self: Any, loss: Any) -> None:
        backward(self, loss)
        grads = [x.grad.numel() for x in whole() if x.grad is not None]
        append(log, {"gradients": sum(grads)})

    def watched(*args: Any, **kwargs: Any) -> Any:
        here = [x for x in whole() if x.untyped_storage().size() > 0]  # others are in shards now
        append(log, {"weights": sum(x.numel() for x in here)})
        append(log, {"copies": torch.is_autocast_cache_enabled()})
        return search(*args, **kwargs)

    accelerate.Accelerator.backward = counted
    torch.searchsorted = watched


def log_tracking(log: str) -> None:
    """What would go to Weights & Biases is written to that file: start, metrics, end."""
    import wandb

    run = SimpleNamespace(
        log=lambda values, step=None, **_: append(log, ["log", step, values]),
        finish=lambda: append(log, ["finish"]),
    )

    def init(**settings: Any) -> SimpleNamespace:
        append(log, ["init", settings])
        return run

    wandb.init = init
    wandb.config = SimpleNamespace(update=lambda *args, **_: append(log, ["config", *args]))


def refuse_to_print(text: str) -> None:
    """Nobody reads a line with this text, as in `python script | head`."""
    write = sys.stdout.write

    def checked(printed: str) -> int:
        if text in printed:
            raise BrokenPipeError(32, "Broken pipe")
        return write(printed)

    sys.stdout.write = checked


def shard_on_cpus() -> None:
    """accelerate takes FSDP on GPUs only; here it takes it on CPUs too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def changed(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = changed
