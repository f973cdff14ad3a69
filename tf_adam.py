"""Adam as TensorFlow 1.x computes it, the optimizer behind OpenAI's lm-human-preferences. The rest
of this file is what else the scripts share, because it is not about RLHF: errors, processes and
settings of torch, layers and adapters, learning rates, sums over processes, and the run's folder.

PyTorch implements Algorithm 1 of Kingma & Ba (2015, arXiv:1412.6980), TensorFlow the reordering in
the paragraph before its section 2.1. With m, v the moving averages and t the step, counted from 1:

    PyTorch      p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    TensorFlow   p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

Multiplied out, they differ in epsilon alone: TensorFlow's is PyTorch's with
eps / sqrt(1 - beta2^t), 32 times larger at the first step for beta2 = 0.999. At eps = 1e-5 and the
small gradients of a language model that damps the first updates a lot: Huang et al. 2024 ("The N
Implementation Details of RLHF with PPO") measured an approxkl of 3.7e-4 with TensorFlow's Adam
against 2.4e-3 with PyTorch's on the same rollouts.
"""

import contextlib
import ctypes
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce
from filelock import FileLock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionMaskInterface, Conv1D, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput


# --- Adam -----------------------------------------------------------------------------------------
class AdamTF(torch.optim.Adam):
    """TensorFlow-style Adam with the kernels, state and options of `torch.optim.Adam`.

    Args:
        params: parameters, named ones, or groups; a group may set its own lr, betas and eps.
        lr: learning rate, >= 0.
        fused: use PyTorch's fused kernel, which CPUs and GPUs have for floats.
        options: those of torch.optim.Adam. `eps` is TensorFlow's "epsilon hat", added to sqrt(v)
            before any bias correction. `weight_decay` is decoupled, as in AdamW:
            p -= lr * weight_decay * p before the step.

    Raises:
        ValueError: lr, betas or eps out of range (from torch.optim.Adam).
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, fused: bool = True, **options: Any
    ) -> None:
        super().__init__(params, lr, decoupled_weight_decay=True, fused=fused, **options)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> float | None:
        """One update. It replaces each group's epsilon only while it runs, so state_dict holds the
        given eps.

        Epsilon's step count is a plain int per group, so nothing waits for the GPU. PyTorch counts
        steps per parameter. The two agree, as in TensorFlow, if every parameter has a gradient at
        every step.
        """
        epsilons = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            beta2 = group["betas"][1]
            group["eps"] /= math.sqrt(1 - beta2 ** group["t"])
        try:
            return super().step(closure)
        finally:
            for group, eps in zip(self.param_groups, epsilons, strict=True):
                group["eps"] = eps


# --- errors ---------------------------------------------------------------------------------------
class UserError(Exception):
    """An error that the user can fix. A script prints its text, like that of an OSError, as one
    line, and ends. With RLHF_DEBUG=1 in the environment it shows the traceback."""


@contextlib.contextmanager
def explained(what: str, kind: type = Exception) -> Iterator[None]:
    """Turns an error of this kind in the block into a UserError: `what`, then the cause. Around
    calls of a library, and of a model, leave `kind` as it is. Around the scripts' own functions
    name the kind that is expected, so that their bugs keep their traceback."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except kind as error:
        # The cause of a library's error often says more than the error; some have no text.
        cause = error.__cause__ or str(error) or repr(error)
        raise UserError(f"{what}: {cause} (RLHF_DEBUG=1 shows more)") from error


# --- processes and settings of torch --------------------------------------------------------------
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
    with explained("launch"):
        accelerator = Accelerator(
            # a Mac's GPU has no fp64
            cpu=not torch.accelerator.is_available() or torch.backends.mps.is_available(),
            log_with="wandb",
            mixed_precision="no",
            dynamo_backend="no",
            # The others may wait long for one that writes a checkpoint or has a slow --reward_fn.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
        )
    # The scripts micro-batch by hand; ignore the launcher's setting.
    accelerator.gradient_accumulation_steps = 1
    check_launch(accelerator)
    accelerator.wait_for_everyone()  # one that ends early would break the start of the others
    accelerator.print(f"{accelerator.num_processes} x {accelerator.device}, {dtype}")
    return accelerator


def check_launch(accelerator: Accelerator) -> None:
    """UserError for an engine that would train wrongly. DeepSpeed, for example, steps after every
    micro-batch. FSDP1 holds weights in a form that cannot be sampled from."""
    kind = accelerator.distributed_type.value
    if not kind.startswith(("NO", "MULTI")) and not accelerator.is_fsdp2:
        raise UserError(
            f"launch: {kind} is not supported: use DDP or FSDP2, see benchmark/accelerate/"
        )


# --- models ---------------------------------------------------------------------------------------
def patch_layers(model: PreTrainedModel, args: Any) -> None:
    """Changes how the model computes: soft-capped attention is eager, the embedding of padding is
    trained like any other, and GELU is one kernel. With args.dtype "bf16" the trunk computes in
    bf16, but the heads do not. With args.gradient_checkpointing activations are computed again in
    the backward pass.

    UserError if the model's layers are not made for checkpointing.
    """
    # Up to version 5.20 transformers has sdpa attention for Gemma 2, which leaves out the cap.
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    layers = list(model.modules())
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # else a pad that is also the eos gets no gradient
        if type(getattr(layer, "act", None)).__name__ == "NewGELUActivation":
            layer.act = nn.GELU(approximate="tanh")  # the same as one kernel, not eight
    if args.gradient_checkpointing:
        # transformers' own checkpointing needs train mode, in which dropout acts.
        blocks = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
        if not blocks:
            raise UserError("--gradient_checkpointing: the model does not support it")
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if args.dtype == "bf16":
        trunk = model.get_decoder()  # not base_model: OPT calls only the decoder in it
        trunk.forward = partial(run_in_bf16, trunk.forward)
    # If the states for a frozen head are not contiguous, torch copies the head's weights for each
    # row of them, and takes 2 to 50 times as long.
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())


def run_in_bf16(forward: Callable, *inputs: Any, **named: Any) -> ModelOutput:
    """A trunk's output by autocast, but its states in fp32: bf16 would round a logit of about 100
    by up to 0.25."""
    with torch.autocast(PartialState().device.type, torch.bfloat16):
        output = forward(*inputs, **named)
    output.last_hidden_state = output.last_hidden_state.float()
    return output


class Cache(DynamicCache):
    """The keys and values of all tokens that a model has read. Under autocast they are kept in
    bf16. Rotary embeddings make keys fp32, and values would follow them: the cache would be twice
    as large, and attention would round all of it again for every sampled token."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds these to a layer's (b, heads, tokens, size), and returns all."""
        if torch.is_autocast_enabled(key_states.device.type):
            key_states = key_states.bfloat16()
            value_states = value_states.bfloat16()
        return super().update(key_states, value_states, *args, **named)


def add_adapters(model: PreTrainedModel, args: Any) -> None:
    """With args.lora_rank the weights are frozen, and LoRA adapters (Hu et al. 2021,
    arXiv:2106.09685) on all linear layers but the head are trained. UserError without peft."""
    if not args.lora_rank:
        return
    with explained("--lora_rank"):
        from peft import LoraConfig

    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model.add_adapter(config)
    hold_in_bf16(model, args)


def hold_in_bf16(model: PreTrainedModel, args: Any) -> None:
    """With args.dtype "bf16" frozen linear layers are held in bf16, in half the memory; autocast
    would round them anyway. Biases, the head, embeddings and norms stay in fp32."""
    if args.dtype != "bf16":
        return
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not module.weight.requires_grad:
            module.weight.data = module.weight.bfloat16()  # not the bias: Falcon adds it in fp32


# --- optimizer and learning rates -----------------------------------------------------------------
CRITIC_PARTS = ("value_head.", "critic.")


def make_optimizer(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    """AdamTF or AdamW (args.adam) over all weights of the model that are trained.

    Up to four parameter groups: matrices and other weights, then the same of `value_head` and
    `critic` (`is_critic`), if the model has parts of these names. Only matrices have
    args.weight_decay. set_learning_rates sets the learning rate of each group.
    """
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            is_critic = name.startswith(CRITIC_PARTS)
            decay = args.weight_decay if p.dim() > 1 else 0.0
            new = {"params": [], "weight_decay": decay, "is_critic": is_critic}
            groups.setdefault((is_critic, p.dim() > 1), new)["params"].append(p)
    optimizer = {"tf": AdamTF, "torch": torch.optim.AdamW}[args.adam]
    with explained("optimizer"):
        return optimizer(
            groups.values(),
            args.lr,
            betas=tuple(args.adam_betas),
            eps=args.adam_eps,
        )


def set_learning_rates(
    optimizer: torch.optim.Optimizer, update: int, progress: float, args: Any
) -> None:
    """Sets the rates for all optimizer steps of this update (updates count from 0); `progress`, in
    [0, 1), is the share of the run that is over.

    Warm-up (args.lr_warmup updates) and the decay to 0, linear or by a cosine, multiply. Value head
    and critic have args.critic_lr, if it is given. In the first args.critic_warmup updates the
    policy's rate is 0: its weights do not move, but Adam's averages and the gradient norm include
    its gradients.
    """
    factor = min(1.0, (update + 1) / (args.lr_warmup + 1))
    if args.lr_schedule == "linear":
        factor *= 1 - progress
    if args.lr_schedule == "cosine":
        factor *= (1 + math.cos(math.pi * progress)) / 2
    for group in optimizer.param_groups:
        group["lr"] = factor * args.lr
        if group["is_critic"] and args.critic_lr is not None:
            group["lr"] = factor * args.critic_lr
        if not group["is_critic"] and update < getattr(args, "critic_warmup", 0):
            group["lr"] = 0.0


# --- sums and means over processes ----------------------------------------------------------------
def averaging(
    accelerator: Accelerator, model: nn.Module, is_last: bool
) -> contextlib.AbstractContextManager:
    """A context for the backward pass of a micro-batch. Processes average their gradients at the
    last micro-batch of a step. With FSDP (whose modules have `reshard`) they do it at each: until
    then every process would hold whole gradients."""
    if is_last or hasattr(model, "reshard"):
        return contextlib.nullcontext()
    return accelerator.no_sync(model)


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scales the gradients down to max_norm, if it is given. Returns their norm before that."""
    return whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf))


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor that FSDP may have sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of all elements of x on all processes."""
    return reduce(x.sum(), "sum")


def sums_over(mask: Tensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """A record: for each term a tensor (2,), its sum over mask and the size of mask. reduce_means
    adds such records and divides. So a mask (b, R) gives a mean over tokens, and a mask of one
    element a mean over records and processes. Records are added in fp64, so that many lose little.
    """
    count = mask.sum()
    return {
        name: torch.stack([(term.detach().expand_as(mask) * mask).sum(), count]).double()
        for name, term in terms.items()
    }


def reduce_means(records: list[dict]) -> dict:
    """Sum / count of every metric over all records and processes, in one collective. All processes
    need the same metrics, in the same order."""
    totals = Counter()
    for record in records:
        totals.update(record)  # a Counter adds what has the same name, here tensors
    reduced = reduce(torch.stack(list(totals.values())), "sum").tolist()
    return {name: x / count for name, (x, count) in zip(totals, reduced, strict=True)}


# --- the run's folder -----------------------------------------------------------------------------
# What a resumed run of any of the scripts may change: where, how fast and how long it runs, and its
# learning rates. Anything else would turn one run into two experiments.
CHANGEABLE = """resume output_dir track checkpoint_every total_episodes lr
critic_lr max_kl micro_batch_size gradient_checkpointing""".split()


def choose_folder(script: Path, preset: str, args: Any) -> None:
    """Sets args.output_dir. UserError if it has other files than those of a run to be resumed, or
    if that run had other settings."""
    default = f"runs/{script.stem}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    # All processes take the first one's: their clocks differ.
    (name,) = broadcast_object_list([args.output_dir or default])
    folder = Path(name).expanduser().absolute()
    args.output_dir = str(folder)
    files = {path.name for path in folder.glob("*")} - {"lock", "args.tmp"}  # of an early kill
    has_checkpoints = any(folder.glob("checkpoints/*/state.json"))
    would_start_anew = "samples.jsonl" in files and not has_checkpoints
    if files and ("args.json" not in files or would_start_anew or not args.resume):
        raise UserError(
            f"--output_dir {folder} is not empty: choose another, or --resume if it has checkpoints"
        )
    if files:
        before = vars(type(args)()) | json.loads((folder / "args.json").read_text())["args"]
        for name, value_before in before.items():
            value = getattr(args, name, None)  # a copy may have lost a setting
            # --reward_model None: load_reward chooses the newest later, and Run.start compares it.
            is_open = name in CHANGEABLE or (name == "reward_model" and value is None)
            if not is_open and json.dumps(value) != json.dumps(value_before):
                raise UserError(f"--{name} {value}: {folder} was started with {value_before}")


SEVEN_DIGITS = "[0-9]" * 7  # a checkpoint's folder, and not a user's copy with another name


@dataclass
class Run:
    """The folder of a run: args.json, copies of the script and of tf_adam.py, metrics.jsonl,
    checkpoints/, and at the end samples.jsonl.

    SIGINT and SIGTERM are noted: the run stops at the end of the update, with a checkpoint (if the
    launcher waits that long: see docs/running.md). After the last update a signal changes nothing.
    Press Ctrl-C twice to stop at once."""

    accelerator: Accelerator
    script: Path
    args: Any
    num_updates: int
    # What the loop carries to the next update. It must be equal on all processes, and survive JSON
    # (texts as keys, no tensors). A resumed run takes it from its newest checkpoint. The run is
    # refused if "data", the checksum of its queries or labels, has changed.
    state: dict
    stopped_at: float = 0.0  # when the first signal came

    def start(self) -> None:
        """Starts the run, or continues it at its newest checkpoint. The order matters: the folder
        is read with the lock held (until this process ends); no process writes before all have
        read; and signals end the process, as usual, until all is ready."""
        accelerator = self.accelerator
        self.folder = Path(self.args.output_dir)
        self.lock = FileLock(self.folder / "lock", is_singleton=True)
        (run_id,) = broadcast_object_list([secrets.token_hex(4)])  # of Weights & Biases
        self.state |= {"update": 0, "processes": accelerator.num_processes, "run_id": run_id}
        self.state_as_json()  # fails now, if it would fail after the first update
        if accelerator.is_main_process:
            self.lock.acquire(blocking=False)  # makes the folder; an OSError if a run has the lock
        choose_folder(self.script, "", self.args)  # again, with the lock: a run may have used it
        # What the first process sees: another node may see an older state of the folder, or none.
        (checkpoints,) = broadcast_object_list([self.checkpoints()])
        if checkpoints:
            newest = checkpoints[-1]
            saved = json.loads((newest / "state.json").read_text())
            for name in ("data", "processes"):  # shuffles are per process
                if saved[name] != self.state[name]:
                    raise UserError(f"--resume with other {name} than the run began with: {newest}")
            self.state |= saved  # a key that a copy has added since then keeps its first value
            accelerator.load_state(str(newest))
        if self.args.track:
            wandb = {"id": self.state["run_id"], "name": self.folder.name, "resume": "allow"}
            accelerator.init_trackers("rlhf", vars(self.args), {"wandb": wandb})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self.write_records()
        # from here on signals stop the run between updates
        signal.signal(signal.SIGINT, self.note_signal)
        signal.signal(signal.SIGTERM, self.note_signal)
        self.last_log = time.monotonic()

    def write_records(self) -> None:
        """args.json and the scripts, as they were when the run began; metrics.jsonl without the
        updates after the checkpoint. A resumed run says if a script has changed since."""
        is_new = self.state["update"] == 0
        if is_new:  # first args.json: a folder that has other files, but not this one, is refused
            record = {"script": self.script.stem, "torch": torch.__version__}
            record["args"] = vars(self.args)
            write(self.folder / "args.json", json.dumps(record, indent=2))
        for path in (self.script, Path(__file__)):
            copy = self.folder / path.name
            if is_new or not copy.exists():  # the script may have another name now
                write(copy, path.read_text())
            elif copy.read_bytes() != path.read_bytes():
                print(f"{path.name} is no longer as it was when the run began, see {copy}")
        (self.folder / "samples.jsonl").unlink(missing_ok=True)
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

    def log(self, metrics: dict) -> None:
        """Adds the seconds since the last call (with checkpoints) and the peak memory of the GPU.
        Writes a line of metrics.jsonl, and logs where --track asks for it."""
        now = time.monotonic()
        metrics["seconds"] = now - self.last_log
        self.last_log = now
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if self.accelerator.is_main_process:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(f"{json.dumps(metrics)}\n")
        # not as W&B's step, which cannot go back when a run is resumed at a checkpoint
        self.accelerator.log(metrics | {"update": self.state["update"] + 1})

    def checkpoints(self) -> list[Path]:
        """The folders of complete checkpoints, checkpoints/<updates made>, the newest last."""
        found = self.folder.glob(f"checkpoints/{SEVEN_DIGITS}/state.json")
        return sorted(path.parent for path in found)

    def end_update(self) -> None:
        """Counts the update. Leaves a checkpoint if one is due, and stops the run after a signal to
        any process. No random state is needed: uniforms and shuffles follow from seed, update and
        row."""
        self.state["update"] += 1
        made = self.state["update"]
        state = self.state_as_json()
        stops, states = zip(*gather_object([(self.stopped_at, state)]), strict=True)
        if len(set(states)) > 1:
            raise UserError(f"run.state differs between processes, gather it first: {state}")
        every = self.args.checkpoint_every or self.num_updates
        if any(stops) or made % every == 0 or made == self.num_updates:
            self.save_checkpoint(self.folder / f"checkpoints/{made:07d}", state)
        if any(stops):  # a signal may reach one process only
            words = f"{shlex.join(sys.argv)} --resume --output_dir {shlex.quote(str(self.folder))}"
            self.accelerator.print(f"stopped by a signal; to go on (behind python):\n{words}")
            raise SystemExit(130)

    def state_as_json(self) -> str:
        """The state in JSON. UserError if a resumed run would not read the same from it."""
        text = json.dumps(self.state)
        if json.loads(text) != self.state:
            raise UserError("run.state must survive JSON: texts as keys, lists instead of tuples")
        return text

    def save_checkpoint(self, path: Path, state: str) -> None:
        """Writes a checkpoint, and removes all but the newest two, also what kills have left."""
        self.accelerator.save_state(str(path))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write(path / "state.json", state)  # last: from now on it is a checkpoint
            kept = self.checkpoints()[-2:]
            for old in set(path.parent.glob(SEVEN_DIGITS)) - set(kept):
                (old / "state.json").unlink(missing_ok=True)  # first: from now on it is none
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()  # no process goes on before it is written


def write(path: Path, text: str) -> None:
    """Writes the file so that a kill leaves the old text or the new one, but no part of it."""
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)  # a link would be followed
    unfinished.write_text(text)
    unfinished.rename(path)
