"""The folder of a run: lock, records, checkpoints, samples."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import pandas as pd
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from plumbing.launch import ROOT, UserError, blame, say, write, writing
from plumbing.models import save_model

# What a resumed run of any of the scripts may change: where, how fast and how long it runs, and its
# learning rates. Anything else would turn one run into two experiments.
CHANGEABLE = """resume output_dir track checkpoint_every total_episodes lr
critic_lr max_kl micro_batch_size gradient_checkpointing""".split()
SEVEN_DIGITS = "[0-9]" * 7  # a checkpoint's folder, and not a user's copy with another name


def choose_folder(script: Path, preset: str, args: Any) -> str:
    """The folder of the run: --output_dir, or a new one. UserError as in check_folder."""
    default = f"runs/{script.stem}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    (path,) = broadcast_object_list([args.output_dir or default])  # processes' clocks may differ
    folder = Path(os.path.expanduser(path)).absolute()
    check_folder(folder, args)
    return str(folder)


def check_folder(folder: Path, args: Any) -> None:
    """UserError unless the folder is empty, or has a run of the same settings to be resumed."""
    files = {file.name for file in folder.glob("*")} - {"lock", "args.tmp"}  # of an early kill
    if not files and not folder.is_file():  # a file is refused below
        return
    would_start_anew = "samples.jsonl" in files and not complete_checkpoints(folder)
    if not args.resume or "args.json" not in files or would_start_anew:
        raise UserError(
            f"--output_dir {folder} is not empty: choose another, or --resume if it has checkpoints"
        )
    defaults = vars(type(args)())  # of settings that a copy has got since then
    settings = json.loads((folder / "args.json").read_text())["args"]
    for name, before in (defaults | settings).items():
        value = getattr(args, name, None)  # a copy may have lost a setting
        # --reward_model None: the newest is chosen later, and Run.start compares it.
        is_open = name in CHANGEABLE or (name == "reward_model" and value is None)
        new, old = json.loads(json.dumps([value, before], default=str))  # 10000 equals 10000.0
        if not is_open and new != old and not has_moved(value, before, folder, settings):
            raise UserError(f"--{name} {value}: {folder} was started with {before}")


def has_moved(value: Any, before: Any, folder: Path, settings: dict) -> bool:
    """Whether a setting is a path that has moved with the run's folder, like a whole project."""
    if not value or not os.path.isabs(str(before)) or os.path.exists(before):
        return False
    return os.path.relpath(str(value), folder) == os.path.relpath(before, settings["output_dir"])


def complete_checkpoints(folder: Path) -> list[Path]:
    """The folders of a run's complete checkpoints, checkpoints/<updates made>, the newest last."""
    states = folder.glob(f"checkpoints/{SEVEN_DIGITS}/state.json")
    return sorted(path.parent for path in states)


@dataclass
class Run:
    """The folder of a run: args.json, copies of the script, of tf_adam.py and of plumbing/,
    metrics.jsonl, checkpoints/, and at the end samples.jsonl.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are noted: the run stops at the end of the update, with a
    checkpoint (if the launcher waits that long: see docs/clusters.md). After the last update a
    signal changes nothing. Press Ctrl-C again, a second later, to stop at once."""

    accelerator: Accelerator
    script: Path
    args: Any
    num_updates: int
    data: list  # queries or labels; a run is not resumed with others
    # What the loop carries to the next update. It must be equal on all processes, and survive JSON
    # (texts as keys, no tensors). A resumed run takes it from its newest checkpoint.
    state: dict
    # Tensors of this process alone, which checkpoints keep. A resumed run has them on the CPU.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stopped_at: float = 0.0  # when the first signal came (0: none); `start` adds more attributes

    def start(self) -> None:
        """Starts the run, or continues it at its newest checkpoint. The order matters. The lock is
        taken first, and held until this process ends. All processes read the folder before one
        writes to it. Until all is ready, a signal ends the process as usual."""
        accelerator = self.accelerator
        self.folder = Path(self.args.output_dir)
        self.tensor_file = f"tensors-{accelerator.process_index}.safetensors"
        self.lock = FileLock(self.folder / "lock", is_singleton=True)
        (run_id,) = broadcast_object_list([secrets.token_hex(4)])  # of Weights & Biases
        self.state |= {"update": 0, "processes": accelerator.num_processes, "run_id": run_id}
        self.state["data"] = crc32(str(self.data).encode())
        self.state_as_json()  # fails now, if it would fail after the first update
        if accelerator.is_main_process:
            with blame(f"{self.folder} cannot be written, or is used by another run", OSError):
                self.lock.acquire(blocking=False)  # makes the folder
        check_folder(self.folder, self.args)  # again, with the lock: a run may have used it

        # What the first process sees: another node may see an older state of the folder, or none.
        (checkpoints,) = broadcast_object_list([complete_checkpoints(self.folder)])
        if checkpoints:
            self.load_checkpoint(checkpoints[-1])
        elif self.args.resume:
            say(f"--resume: {self.folder} has no checkpoint, so the run begins")

        if self.args.track:
            wandb = {"id": self.state["run_id"], "name": self.folder.name, "resume": "allow"}
            with blame("--track (with WANDB_MODE=offline it needs no network)"):
                accelerator.init_trackers("rlhf", vars(self.args), {"wandb": wandb})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with writing(self.folder):
                self.write_records()
        # from here on signals stop the run between updates, but none that is ignored, as by nohup
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.note_signal)
        # but forked processes, as of a Pool in a --reward_fn, end when they are terminated
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        self.last_log = time.monotonic()

    def load_checkpoint(self, path: Path) -> None:
        """Continues at a checkpoint. UserError if it is of other data, or of other processes."""
        saved = json.loads((path / "state.json").read_text())
        for name in ("data", "processes"):  # shuffles are per process
            if saved[name] != self.state[name]:
                raise UserError(f"--resume with other {name} than the run began with: {path}")
        self.state |= saved  # a key that a copy has added since then keeps its first value
        with blame(f"{path} cannot be read; delete it to go on at the one before"):
            self.accelerator.load_state(path)
            mine = path / self.tensor_file
            if mine.exists():
                self.tensors |= load_file(mine)

    def write_records(self) -> None:
        """args.json and the scripts, as they were when the run began; metrics.jsonl without the
        updates after the checkpoint. A resumed run says if a script has changed since."""
        is_new = self.state["update"] == 0
        if is_new:  # first args.json: a folder that has other files, but not this one, is refused
            info = {"script": self.script.stem, "torch": torch.__version__, "args": vars(self.args)}
            write(self.folder / "args.json", json.dumps(info, indent=2, default=str))
        files = {self.script.name: self.script, "tf_adam.py": ROOT / "tf_adam.py"}
        files |= {f"plumbing/{path.name}": path for path in ROOT.glob("plumbing/*.py")}
        for name, path in files.items():
            copy = self.folder / name
            copy.parent.mkdir(exist_ok=True)
            if is_new or not copy.exists():  # the script may have another name now
                write(copy, path.read_text())
            elif copy.read_bytes() != path.read_bytes():
                say(f"{path.name} is no longer as it was when the run began, see {copy}")
        unfinished = self.folder.rglob(".tmp??????")  # safetensors', after a kill
        for old in (self.folder / "samples.jsonl", *unfinished):
            old.unlink(missing_ok=True)
        log = self.folder / "metrics.jsonl"
        log.touch()
        lines = log.read_text().splitlines(keepends=True)
        write(log, "".join(lines[: self.state["update"]]))

    def note_signal(self, number: int, frame: object) -> None:
        """Notes a signal. Launchers may send a process the same one twice, so only a Ctrl-C that
        comes a second later ends it at once."""
        now = time.monotonic()
        self.stopped_at = self.stopped_at or now
        if number == signal.SIGINT and now > self.stopped_at + 1:
            raise KeyboardInterrupt

    def log(self, metrics: dict, *shown: str) -> None:
        """Writes a line to metrics.jsonl and --track, with seconds since the last one (checkpoints
        too) and the GPU's peak memory. Prints those `shown`. Call it exactly once per update."""
        now = time.monotonic()
        metrics["seconds"] = now - self.last_log
        self.last_log = now
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if self.accelerator.is_main_process:
            with writing(self.folder), open(self.folder / "metrics.jsonl", "a") as file:
                file.write(f"{json.dumps(metrics)}\n")
        # not as W&B's step, which cannot go back when a run is resumed at a checkpoint
        made = self.state["update"] + 1
        self.accelerator.log(metrics | {"update": made})
        if shown:
            words = [f"{name} {metrics[name]:.2f}" for name in (*shown, "seconds")]
            say(f"update {made} of {self.num_updates}: {', '.join(words)}")

    def updates(self) -> range:
        """The numbers of the updates that are left, from 0."""
        return range(self.state["update"], self.num_updates)

    def end_update(self, problem: str = "") -> None:
        """Counts the update. Leaves a checkpoint if one is due. Stops the run, with a checkpoint,
        if there is a problem, or after a signal to any process."""
        self.state["update"] += 1
        made = self.state["update"]
        state = self.state_as_json()
        gathered = gather_object([(self.stopped_at, state)])
        if any(other != state for _, other in gathered):
            raise UserError(f"run.state differs between processes, gather it first: {state}")
        is_stopped = any(stopped_at for stopped_at, _ in gathered)  # a signal may reach one only
        every = self.args.checkpoint_every or self.num_updates
        if problem or is_stopped or made % every == 0 or made == self.num_updates:
            self.save_checkpoint(self.folder / f"checkpoints/{made:07d}", state)
        if problem:
            error = UserError(f"update {made}: {problem}, see docs/metrics.md")
            error.add_note(self.how_to_go_on())
            raise error
        if is_stopped:
            say(f"stopped by a signal; {self.how_to_go_on()}")
            raise SystemExit(130)

    def how_to_go_on(self) -> str:
        """The command that continues this run."""
        words = f"{shlex.join(sys.argv)} --resume --output_dir {shlex.quote(str(self.folder))}"
        return f"to continue, run with python or your launcher:\n{words}"

    @contextlib.contextmanager
    def keeping_updates(self) -> Iterator[None]:
        """Around scoring, where processes do not wait for each other. If it fails on one, all save
        the last complete update as a checkpoint, and the error says how to continue."""
        error = None
        try:
            yield
        except BaseException as failure:  # noqa: BLE001  like some timeouts; raised again below
            error = failure
        if not any(gather_object([error is not None])):
            return
        error = error or UserError("another process failed")
        made = self.state["update"]
        path = self.folder / f"checkpoints/{made:07d}"
        # Without an update there is nothing to save, and FSDP2 would count a step of the optimizer.
        if made and path not in broadcast_object_list([complete_checkpoints(self.folder)])[0]:
            with blame(f"scoring failed ({error!r}), and then"):
                self.save_checkpoint(path, self.state_as_json())
        error.add_note(f"The run is saved with {made} complete updates; {self.how_to_go_on()}")
        raise error

    def state_as_json(self) -> str:
        """The state in JSON. UserError if a resumed run would not read the same from it."""
        text = json.dumps(self.state)
        if json.loads(text) != self.state:
            raise UserError("run.state must survive JSON: texts as keys, lists instead of tuples")
        return text

    def save_checkpoint(self, path: Path, state: str) -> None:
        """Writes a checkpoint, and removes all but the newest two, also what kills have left."""
        with writing(path):
            self.accelerator.save_state(path)
            if self.tensors:  # copies: safetensors refuses tensors that share memory
                mine = {name: x.detach().clone().contiguous() for name, x in self.tensors.items()}
                save_file(mine, path / self.tensor_file)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            with writing(path):
                write(path / "state.json", state)  # last: from now on it is a checkpoint
                newest = complete_checkpoints(self.folder)[-2:]
                for old in set(path.parent.glob(SEVEN_DIGITS)) - set(newest):
                    (old / "state.json").unlink(missing_ok=True)  # first: from now on it is none
                    shutil.rmtree(old)
        self.accelerator.wait_for_everyone()  # no process goes on before it is written


def save_policy(
    accelerator: Accelerator, wrapped: nn.Module, tokenizer: PreTrainedTokenizerBase, parent: str
) -> None:
    """Writes policy/ and, if there is a critic, critic/, which are Hugging Face folders; and for a
    head, or any module of your own, modules/NAME.safetensors."""
    weights = accelerator.get_state_dict(wrapped)  # may gather them, so every process calls it
    if not accelerator.is_main_process:
        return
    for part, module in accelerator.unwrap_model(wrapped).named_children():
        tied = getattr(module, "all_tied_weights_keys", ())  # these are saved once
        own = {name: weights[f"{part}.{name}"] for name in module.state_dict() if name not in tied}
        with writing(parent):
            if hasattr(module, "save_pretrained"):
                folder = "policy" if part == "lm" else part
                save_model(module, tokenizer, f"{parent}/{folder}", own)
            else:
                os.makedirs(f"{parent}/modules", exist_ok=True)
                own = {name: x.clone().contiguous() for name, x in own.items()}  # may share memory
                save_file(own, f"{parent}/modules/{part}.safetensors")


def write_samples(before: dict[str, list], after: dict[str, list], folder: Path) -> None:
    """Writes samples.jsonl, the last file: it marks a finished run. Prints three queries with their
    responses before and after the training, and mean scores."""
    later = {f"{name}_after": values for name, values in after.items() if name != "query"}
    samples = pd.DataFrame(before | later)
    if PartialState().is_main_process:
        write_rows(samples, folder)
    for row in samples.drop_duplicates("query").head(3).itertuples():
        say(f"\nquery: {row.query!r}\nbefore: {row.response!r}\nafter: {row.response_after!r}")
    say(f"\nmean score {samples.score.mean():.2f} before, {samples.score_after.mean():.2f} after")


def write_rows(samples: pd.DataFrame, folder: Path) -> None:
    """Writes samples.jsonl."""
    text = samples.to_json(orient="records", lines=True, double_precision=15)
    with writing(folder):
        write(folder / "samples.jsonl", text)
