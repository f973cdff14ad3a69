"""How a script starts: errors in one line, torch's settings, processes, the command line. Nothing
here knows an algorithm."""

import contextlib
import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import pydantic
import torch
import transformers
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ROOT = Path(__file__).resolve().parent.parent  # the scripts' folder


class UserError(Exception):
    """An error that the user can fix. A script prints its text as one line, and ends. With
    RLHF_DEBUG=1 in the environment it shows the traceback."""


def say(*values: object) -> None:
    """Prints on the first process of all. A closed output does not end a run."""
    try:
        if PartialState().is_main_process:
            print(*values, flush=True)
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")


@contextlib.contextmanager
def blame(what: str, kind: type | tuple = Exception) -> Iterator[None]:
    """Turns an error of this kind in the block into a UserError: `what`, then the cause. A
    UserError, too, gets `what` in front. Around calls of a library or a model leave `kind` as it
    is. Around the scripts' own functions name the expected kind: then bugs keep their traceback."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except kind as error:
        # The cause of a library's error often says more than the error; some have no text.
        cause = error.__cause__ or str(error) or repr(error)
        raise UserError(f"{what}: {cause} (RLHF_DEBUG=1 shows more)") from error


@contextlib.contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Around what is written to a folder: a full disk, for example, becomes one line."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two: of a full disk
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
            raise  # something else, like out of memory
        raise UserError(f"{folder} cannot be written: {error} (is the disk full?)") from error


def write(path: Path, text: str) -> None:
    """Writes the file so that a kill leaves either the old text or the whole new one."""
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)  # a link would be followed
    unfinished.write_text(text)
    unfinished.rename(path)


def set_up_torch(dtype: str) -> None:
    """Settings for speed and memory, made before the first tensor: --dtype is "fp32", "tf32" or
    "bf16". They change results by rounding only."""
    # Each sampled token needs a slightly longer cache. This lets it reuse the shorter one's memory.
    # Torch before 2.10 knows only the older name of the variable. If that is set, it is the user's:
    # torch would prefer the new one.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        has_new_name = torch.__version__ >= (2, 10)
        name = "PYTORCH_ALLOC_CONF" if has_new_name else "PYTORCH_CUDA_ALLOC_CONF"
        os.environ.setdefault(name, "expandable_segments:True")
    # Every process reads its models itself: the reference is not sharded, so it needs all weights.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    libc = ctypes.CDLL(None)
    # On a CPU it saves a tenth of the time if glibc keeps freed memory. On a machine with a GPU it
    # would keep the memory of models that have moved to the GPU.
    if hasattr(libc, "mallopt") and not torch.accelerator.is_available():
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: none
    if dtype != "fp32":
        # In bf16 runs for the heads alone. set_float32_matmul_precision would set it for CPUs, too.
        torch.backends.cuda.matmul.allow_tf32 = True
    # Users report NaN and wrong gradients of cuDNN's attention in bf16 with a mask: pytorch#196678.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionMaskInterface.register("sdpa", full_sdpa_mask)


def full_sdpa_mask(**named: Any) -> Tensor:
    """transformers' mask for `sdpa` attention. Its own function first checks whether the mask is
    True everywhere and could be left out. That check waits for the GPU at every sampled token."""
    return sdpa_mask(**named | {"allow_is_causal_skip": False})


def make_accelerator(dtype: str) -> Accelerator:
    """The processes and their devices: GPUs, or else CPUs. Prints what they are. UserError for a
    launch that cannot work, or would train wrongly."""
    set_up_torch(dtype)
    if os.environ.get("RANK") == "0":  # a variable left over from another launch would wait long
        names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        launch = {name: os.environ.get(name) for name in names}
        with contextlib.suppress(OSError, ValueError):  # `say` cannot be used yet
            print("waiting for all processes of", launch, flush=True)
    logging.getLogger("accelerate.utils.other").setLevel("ERROR")  # it warns of tied weights
    with blame("launch"):
        accelerator = Accelerator(
            # a Mac's GPU has no fp64
            cpu=not torch.accelerator.is_available() or torch.backends.mps.is_available(),
            log_with="wandb",
            mixed_precision="no",
            dynamo_backend="no",
            # The others may wait long for one that writes a checkpoint or has a slow --reward_fn.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
        )
    accelerator.gradient_accumulation_steps = 1  # the scripts' own micro-batches are enough
    check_launch(accelerator)
    accelerator.wait_for_everyone()  # one that ends early would break the start of the others
    say(f"{accelerator.num_processes} x {accelerator.device}, {dtype}")
    return accelerator


def check_launch(accelerator: Accelerator) -> None:
    """UserError for an engine that would train wrongly. DeepSpeed, for example, steps after every
    micro-batch. FSDP1 holds weights in a form that cannot be sampled from."""
    kind = accelerator.distributed_type.value
    if not kind.startswith(("NO", "MULTI")) and not accelerator.is_fsdp2:
        raise UserError(f"launch: {kind} is not supported: use DDP or FSDP2 (benchmark/accelerate)")


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """What is trained: the wrapped model, which averages gradients over processes; the model inside
    it; and the optimizer."""
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    # FSDP's modules have `reshard`: autocast must not keep bf16 copies of their gathered weights.
    torch.set_autocast_cache_enabled(not hasattr(wrapped, "reshard"))
    return wrapped, accelerator.unwrap_model(wrapped), optimizer


def parse_args(args_class: type, presets: dict[str, Any]) -> tuple[str, Any]:
    """Name of the preset (`tiny` if a flag comes first), and the settings."""
    # People write `--flag none` or `--flag=none`. tyro reads only None.
    words = [re.sub("^(--[^=]+=)?none$", r"\1None", word) for word in sys.argv[1:]]
    preset = words.pop(0) if words and not words[0].startswith("-") else "tiny"
    if preset not in presets:
        raise UserError(f"there is no preset {preset!r}: choose one of {', '.join(presets)}")
    args = tyro.cli(args_class, default=presets[preset], args=words, use_underscores=True)
    args_class.__pydantic_config__ = {"allow_inf_nan": False}
    try:
        pydantic.TypeAdapter(args_class).validate_python(vars(args))  # tyro checks no ranges
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{first['loc'][0]} {first['input']}: {first['msg']}") from error
    if args.resume and not args.output_dir:
        raise UserError("--resume needs --output_dir, the folder of the run")
    if args.track and os.environ.get("RANK", "0") == "0":  # a missing key is found now
        with blame("--track (with WANDB_MODE=offline it needs no network)"):
            import wandb

            wandb.login(verify=True)
    return preset, args


def local_path(name: str) -> str:
    """The absolute path of a file or folder, in the current folder or else beside the scripts. Any
    other name is one on the hub, and stays as it is."""
    for path in (os.path.expanduser(name), f"{ROOT}/{name}"):
        if os.path.exists(path):
            return os.path.abspath(path)
    if name.startswith("tiny/") and not os.path.exists(f"{ROOT}/tiny"):
        raise UserError(f"{name} is not there: copy tiny/ beside the scripts, or name your own")
    return name


def run_main(main: Callable[[str, Any], None], args_class: type, presets: dict[str, Any]) -> None:
    """The entry point of a script: runs it, and prints a UserError as one line."""
    if not sys.stderr.isatty():  # a bar would end the run if nobody reads the pipe any more
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a text that the terminal cannot show
    try:
        main(*parse_args(args_class, presets))
    except UserError as error:
        if os.environ.get("RLHF_DEBUG"):
            raise
        line = f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}"
        sys.exit("\n".join([line, *getattr(error, "__notes__", [])]))
