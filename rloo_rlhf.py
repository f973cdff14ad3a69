"""RLOO from human preferences for language models, in one file.

A policy continues every query K times, a reward model (train_reward.py) scores the continuations, and RLOO
(REINFORCE leave-one-out, Ahmadian et al. 2024, arXiv:2402.14740) compares each with the mean of its K - 1 siblings. A
response is one action, its KL penalty is part of its reward, and there is no value function. All else is as in PPO.

The tasks are those of OpenAI's lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593), "the original" below. The
tests replay arrays recorded from its code, and README.md says which line here holds which of "The N Implementation
Details of RLHF with PPO" (Huang et al. 2024).

    python rloo_rlhf.py                                             # embedded default, two CPU cores
    python rloo_rlhf.py sentiment --dtype bf16 --track              # OpenAI's sentiment task on one GPU
    accelerate launch --num_processes 8 rloo_rlhf.py sentiment      # the same on eight: batch sizes are global

Unlike the original, queries are padded on the left to sample, and packed without padding after that (equal results:
positions count real tokens); padding is a mask and no token, so that no tokenizer's pad or eos is taken for it; the
order of queries comes from --seed; any number of devices draws the same responses.

Shapes: B sequences (K per query, next to each other; K = 1 in PPO), P context tokens (padded on the left), R response
tokens, V vocabulary, d hidden size.
"""

import contextlib
import ctypes
import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import accelerate
import datasets
import huggingface_hub
import numpy as np
import torch
import transformers
import tyro
import wandb
from accelerate.utils import broadcast_object_list, fsdp2_prepare_model
from datasets.exceptions import DatasetsError
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from tf_adam import AdamTF

Pairs = dict[str, tuple[Tensor, Tensor]]  # a metric's name -> its sum and count


@dataclasses.dataclass
class Args:
    """Settings of a run. The name of a preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    # the run
    seed: int = 1  # Seed of query order, sampling and shuffles (rank r shuffles with seed + 100003 r)
    output_dir: str | None = None  # Folder for all that this run makes (None: runs/<script>-<preset>-<seed>-<time>)
    resume: str | None = None  # Go on with the newest run, or with the run or checkpoint in this folder; none: start
    checkpoint_every: int = 25  # Updates between checkpoints (0: only when the run is interrupted)
    keep_checkpoints: int = 2  # Newest checkpoints that are kept
    max_kl: float | None = None  # Stop when the KL to the reference, in nats per response, exceeds this (None: never)
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)
    eval_queries: int = 64  # Held-out queries, sampled before the first and after the last update
    # models
    base_model: str = "tiny/model"  # Policy and reference start from this causal LM: a folder or a hub id
    reward_model: str | None = None  # Classifier with one label: folder or hub id (None: the preset's newest in runs/)
    reward_fn: str | None = None  # Instead of a reward model, `module:function` of (queries, responses) -> floats
    trust_remote_code: bool = False  # Run Python code that comes with a hub model: only if you have read it
    dtype: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast with fp32 master weights, fp32 logits and values
    compile: bool = False  # Compile the sampler's step, on a GPU to one CUDA graph: sampling is bound by launches there
    gradient_checkpointing: bool = False  # Recompute activations in the backward pass: less memory, more compute
    # the task
    query_dataset: str = "tiny/queries"  # A json, jsonl, parquet or csv file or URL, a folder, or owner/name[:config]
    query_length: int = 32  # Longest query, in tokens
    query_prefix: str = ""  # Text before every query that the policy reads (the reward model does not)
    query_suffix: str = ""  # Text after every query that the policy reads (the reward model does not)
    start_text: str | None = "."  # One token: a query begins after its first occurrence in the text (None: at once)
    end_text: str | None = "."  # One token: a query is cut back to its last occurrence (None: it is not)
    response_length: int = 24  # Tokens sampled per response
    temperature: float = 0.7  # Divides the logits for sampling, log-probabilities and entropies
    truncate_token: str | None = "."  # A response ends with this token; `eos`: the tokenizer's; None: it never ends
    truncate_after: int = 16  # A truncate token counts from this index on
    penalty_reward_value: float = -1.0  # Penalty for a response without a truncate token
    penalty_mode: Literal["replace", "add"] = "replace"  # The penalty replaces the score (original) or is added to it
    mask_truncated: bool = False  # What follows the truncate token is left out of KL and loss (original: stays in)
    # the algorithm
    total_episodes: int = 12_800  # Responses sampled in the whole run
    batch_size: int = 128  # Episodes per update, over all devices
    micro_batch_size: int = 128  # Rows per forward and backward pass on one device; gradients accumulate
    num_minibatches: int = 1  # Optimizer steps per epoch; whitening is per minibatch and rank
    num_epochs: int = 4  # Passes over the batch in each update
    lr: float = 2e-4  # Learning rate of the first update; it decays linearly to 0
    adam: Literal["tf", "torch"] = "tf"  # Adam as TensorFlow computes it (original), or torch.optim.Adam
    adam_eps: float = 1e-5  # Adam's epsilon
    kl_coef: float = 0.15  # Coefficient of the KL penalty at the start
    kl_target: float | None = 6.0  # KL, in nats per response, that the coefficient adapts to (None: it stays fixed)
    kl_horizon: float = 2_000.0  # Horizon of that adaptation, in episodes
    cliprange: float = 0.2  # The probability ratio is clipped to 1 +- this
    rloo_k: int = 4  # Responses per query
    token_level: bool = False  # Clip the ratio of each token instead of the response's (long ones leave 1 +- 0.2 soon)


# OpenAI's launch.py: what the task is, for all scripts (`tiny` is what Args says), then how each of them trains.
LABELS = "hf://datasets/vwxyzjn/lm-human-preferences"
BOOKS = {"base_model": "gpt2", "query_dataset": "rojagtap/bookcorpus", "query_length": 64}
SUMMARY = {"base_model": "gpt2", "query_length": 500, "query_suffix": "\n\nTL;DR:", "response_length": 75}
CUT = {"start_text": None, "end_text": None, "truncate_token": "\n", "truncate_after": 55}
CNNDM = {"query_dataset": "abisee/cnn_dailymail:3.0.0", "query_prefix": "Article:\n\n", "temperature": 0.5}
TLDR = {"query_dataset": f"{LABELS}/tldr/train-subset.json", "label_dataset": f"{LABELS}/tldr/offline_60k.json"}
TASKS = {
    "tiny": {},
    "sentiment": BOOKS | {"label_dataset": f"{LABELS}/sentiment/offline_5k.json"},
    "descriptiveness": BOOKS | {"label_dataset": f"{LABELS}/descriptiveness/offline_5k.json"},
    "cnndm": SUMMARY | CUT | CNNDM | {"end_text": "\n", "label_dataset": f"{LABELS}/cnndm/offline_60k.json"},
    "tldr": SUMMARY | CUT | TLDR,
}
REWARD_BOOKS = {"num_labels": 4_992, "batch_size": 32, "micro_batch_size": 64, "lr": 5e-5}
REWARD_SUMMARY = {"num_labels": 46_000, "batch_size": 16, "micro_batch_size": 4, "lr": 2.5e-5}
RL_BOOKS = {"total_episodes": 1_000_000, "batch_size": 512, "micro_batch_size": 64, "lr": 1e-5, "kl_horizon": 10_000.0}
RL_SUMMARY = {"total_episodes": 1_000_000, "batch_size": 32, "micro_batch_size": 4, "lr": 2e-6, "kl_target": None}
RL_CNNDM = RL_SUMMARY | {"kl_coef": 0.01, "whiten_rewards": False}
RL_TLDR = RL_SUMMARY | {"kl_coef": 0.03, "whiten_rewards": False}
PYTHIA = "cleanrl/EleutherAI_pythia-1b-deduped"  # TRL's RLOO on TL;DR: responses end with EOS
EOS = {"truncate_token": "eos", "truncate_after": 0, "mask_truncated": True, "penalty_mode": "add", "query_suffix": ""}
TRL_RUN = {"num_epochs": 2, "rloo_k": 2, "response_length": 53, "batch_size": 512, "lr": 3e-6, "query_length": 512}
TRL = {"base_model": f"{PYTHIA}__sft__tldr", "reward_model": f"{PYTHIA}__reward__tldr", "query_dataset": "trl-lib/tldr"}
MAY_CHANGE = ("output_dir", "resume", "track", "checkpoint_every", "keep_checkpoints", "max_kl", "trust_remote_code")
CHECKPOINT = "checkpoints/" + 7 * "[0-9]"  # its folder: the number of updates made
RUNS = {
    "reward": dict(zip(TASKS, ({}, REWARD_BOOKS, REWARD_BOOKS, REWARD_SUMMARY, REWARD_SUMMARY), strict=True)),
    "ppo": dict(zip(TASKS, ({}, RL_BOOKS, RL_BOOKS, RL_CNNDM, RL_TLDR), strict=True)),
    "rloo": dict(zip(TASKS, ({}, RL_BOOKS, RL_BOOKS, RL_CNNDM, RL_TLDR | EOS | TRL_RUN | TRL), strict=True)),
}


# --- command line and messages ----------------------------------------------------------------------------------------


def stop(message: str, status: int = 2) -> NoReturn:
    """End with this exit status and one line. Of several processes only the first speaks, unless one names its rank."""
    if os.environ.get("RANK", "0") == "0" or message.startswith("rank "):
        kind = "error: " if status == 2 else ""
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {kind}{' '.join(message.split())}\n")
    raise SystemExit(status)


def warn(message: str) -> None:
    """One line on stderr, from the first process only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: {message}\n")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Stop with one line if what this block writes to the folder of the run finds no space or no permission."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        stop(f"--output_dir {folder}: cannot be written: {error}; free space and write permission would do")


def attempt(what: str, hint: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), or stop with the first line of its error between `what` and `hint`."""
    try:
        return function(*args, **kwargs)
    except (ArithmeticError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError, StopIteration,
            SyntaxError, TypeError, ValueError, SafetensorError, DatasetsError) as error:  # fmt: skip
        reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
        stop(f"{what}: {reason[:200]}; {hint}")


def parse_args(run: str) -> tuple[str, Args]:
    """Name of the preset (`tiny` if the first argument is a flag), and Args: defaults < TASKS < RUNS[run] < flags."""
    argv = ["None" if word == "none" else word for word in sys.argv[1:]]
    for i in [i for i, word in enumerate(argv) if word == "--resume" and (argv[i + 1 :] or ["-"])[0][:1] == "-"]:
        argv.insert(i + 1, "newest")
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else "tiny"
    if preset not in TASKS:
        nearest = difflib.get_close_matches(preset, TASKS, n=1, cutoff=0.0)[0]
        stop(f"preset {preset!r}: does not exist; {nearest!r} is the nearest of {', '.join(TASKS)}")
    values, errors = TASKS[preset] | RUNS[run][preset], io.StringIO()
    default = Args(**{field.name: values[field.name] for field in dataclasses.fields(Args) if field.name in values})
    try:
        with contextlib.redirect_stderr(errors):
            args = tyro.cli(Args, default=default, args=argv)
    except SystemExit as exit_:
        if not exit_.code:
            raise
        box = re.sub(r"[╭╮╰╯│─|+\s]+|-{3,}", " ", errors.getvalue().partition("\n")[2]).partition(" For full")[0]
        stop(f"{box.strip()}; --help lists all flags")
    for name, value in vars(args).items():
        needed = name.startswith(("total", "num", "eval", "temp", "kl_t", "kl_h", "keep", "max"))
        needed |= name.endswith(("size", "length"))
        if isinstance(value, int | float) and name != "penalty_reward_value" and (value < 0 or needed and not value):
            stop(f"--{name} {value}: must be {'greater than 0' if needed else '0 or more'}")
        if isinstance(value, float) and not math.isfinite(value):
            stop(f"--{name} {value}: must be a finite number")
    if args.seed >= 2**31:
        stop(f"--seed {args.seed}: must be less than {2**31}")
    if args.trust_remote_code:
        warn("--trust_remote_code runs the Python code that comes with a model; Ctrl-C now unless you have read it")
    return preset, args


# --- models and data --------------------------------------------------------------------------------------------------


def local_path(name: str) -> Path | None:
    """The file or folder `name`, looked for here and beside this script; None if there is none: then it is a hub id."""
    return next((path for path in (Path(name).expanduser(), Path(__file__).parent / name) if path.exists()), None)


def load_table(name: str, flag: str) -> datasets.DatasetDict:
    """The splits of a json, jsonl, parquet or csv file or URL, of a folder, or of owner/name[:config]."""
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}.get(Path(name).suffix)
    path = local_path(name)
    where = (kind, None, None, str(path or name)) if kind else (str(path),) if path else name.split(":")
    return attempt(f"{flag} {name}: cannot be read", "a local jsonl file would do", datasets.load_dataset, *where)


def check_shards(where: str) -> None:
    """ValueError if the list of weight files of a model names others than safetensors: transformers would take them."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    if index := cached_file(where, "model.safetensors.index.json", **quiet):
        for shard in json.loads(Path(index).read_text())["weight_map"].values():
            if not shard.endswith(".safetensors"):
                raise ValueError(f"model.safetensors.index.json names {shard}, which is no safetensors file")


def load(auto_class: Any, name: str, flag: str, args: Args, **kwargs: Any) -> Any:
    """A tokenizer, or a model in fp32 with all its weights (safetensors only) and, as the original, without dropout.

    Attention is eager on the CPU, where it is 3 to 4 times faster than the fused kernel after fast_math.
    """
    hint = "a local folder with config.json, model.safetensors and tokenizer would do"
    if is_model := auto_class is not AutoTokenizer:
        kwargs |= {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        kwargs |= {"attn_implementation": "sdpa" if torch.cuda.is_available() else "eager"}
    kwargs["trust_remote_code"] = args.trust_remote_code
    what, where = f"{flag} {name}: cannot be loaded", str(local_path(name) or name)
    if is_model:
        attempt(what, hint, check_shards, where)
    model = attempt(what, hint, auto_class.from_pretrained, where, **kwargs)
    if not is_model and not model("a", add_special_tokens=False)["input_ids"]:
        stop(f"{flag} {name}: has no tokenizer; {hint}")
    if is_model:
        model, info = model
        if info["missing_keys"] and "num_labels" not in kwargs:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            stop(f"{flag} {name}: lacks {missing}; a folder with all weights of a {type(model).__name__} would do")
        for module in [*model.modules(), model.config]:
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # a pad that is also the eos gets its gradient
            for key, value in vars(module).items():
                if "dropout" in key and isinstance(value, float):
                    setattr(module, key, 0.0)
            if type(getattr(module, "act", None)).__name__ == "NewGELUActivation":
                module.act = nn.GELU(approximate="tanh")  # the same function as one kernel instead of eight
    return model


def token_id(tokenizer: Any, text: str | None, flag: str) -> int | None:
    """The one token that `text` is (`eos`: the tokenizer's end-of-sequence token); None for None."""
    if text is None:
        return None
    ids = [tokenizer.eos_token_id] if text == "eos" else tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or ids[0] is None:
        stop(f"{flag} {text!r}: is not one token of this tokenizer but {ids}; text of one token, or none, would do")
    return ids[0]


def cut_query(tokens: Sequence[int], length: int, start: int | None, end: int | None) -> list[int]:
    """The query in the tokens of a text; empty if it holds none. Source: lm_human_preferences/lm_tasks.py.

    What comes up to and including the first `start` goes, unless it is the last token; the rest is truncated to
    `length`, then cut back to its last `end`, which stays.
    """
    tokens = list(tokens)
    if start is not None and (start not in tokens or tokens.index(start) < len(tokens) - 1):
        tokens = tokens[tokens.index(start) + 1 :] if start in tokens else []
    tokens = tokens[:length]
    if end is not None:
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)] if end in tokens else []
    return tokens


def load_queries(tokenizer: Any, args: Args, train: int, test: int) -> tuple[list[list[int]], list[list[int]]]:
    """Up to `train` queries to train on and `test` to evaluate, as token ids, in an order drawn from --seed.

    The latter come from the split `test` or `validation`; what is missing there is kept apart from the training split.
    """
    splits = load_table(args.query_dataset, "--query_dataset")
    table = splits["train"] if "train" in splits else next(iter(splits.values()))
    held_out = next((splits[name] for name in ("test", "validation") if name in splits), table.select([]))
    wanted = ("text", "query", "prompt", "article", "content")
    column = next((name for name in wanted if name in table.column_names), None)
    if column is None:
        stop(f"--query_dataset {args.query_dataset}: has columns {table.column_names}; {' or '.join(wanted)} would do")
    start, end = token_id(tokenizer, args.start_text, "--start_text"), token_id(tokenizer, args.end_text, "--end_text")
    queries: list[list[int]] = []
    for part, need in ((held_out, test), (table, test + train)):
        order = np.random.default_rng([args.seed, 2]).permutation(len(part))
        for chunk in np.split(order, range(10_000, len(order), 10_000)):  # not 70 million texts for a million queries
            if len(queries) < need and len(chunk):
                texts = [text if isinstance(text, str) else "" for text in part[chunk.tolist()][column]]
                rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
                queries += filter(None, (cut_query(row, args.query_length, start, end) for row in rows))
        queries = queries[:need]
    if 0 < len(queries) <= test:
        stop(f"--eval_queries {test}: {args.query_dataset} gave {len(queries)} queries in all; fewer would do")
    if not queries:
        stop(f"--query_dataset {args.query_dataset}: column {column!r} gave no query between "
             f"--start_text {args.start_text!r} and --end_text {args.end_text!r}; none for both would do")  # fmt: skip
    return queries[test:], queries[:test]


def check_window(what: str, model: Any, longest: int) -> None:
    """Stop, naming the flag `what`, if a text of `longest` tokens is longer than the context window of `model`."""
    window = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if longest > window:
        stop(f"{what}: makes {longest} tokens with the query, the context window of {model.name_or_path} is {window}")


def freeze(model: Any, dtype: str) -> Any:
    """No gradients. With bf16, the matrices that autocast rounds at every use are stored rounded: equal results."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))  # these run in fp32
    for module in model.requires_grad_(False).eval().modules():
        if dtype == "bf16" and isinstance(module, nn.Linear | Conv1D) and module not in heads:
            module.weight.data = module.weight.data.to(torch.bfloat16)
    return model


def fast_math(device: torch.device, dtype: str = "fp32") -> None:
    """On a CPU take oneDNN's fp32 matrix product, twice as fast as the default, if it is as exact: that is checked. And
    let glibc keep memory once it has it: clearing fresh pages for each large tensor takes a tenth of an update. On a
    GPU, with bf16, what stays in fp32 (the head) is computed in TF32.
    """
    if device.type == "cuda" and dtype == "bf16":
        torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_float32_matmul_precision("medium")
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        if ((x @ x).double() - x.double() @ x.double()).abs().max() > 1e-4:  # a CPU where "medium" means bf16
            torch.set_float32_matmul_precision("highest")
        if platform.libc_ver()[0] == "glibc":
            for parameter, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
                ctypes.CDLL(None).mallopt(parameter, value)


def start_accelerator(args: Args, accumulate: int) -> Any:
    """The engine that the launcher asks for, DDP, FSDP2 (CPUs too) or DeepSpeed; `accumulate` micro-batches a gradient.

    Weights, gradients and what is sent are fp32 in each of them, bf16 is autocast; nothing clips a gradient.
    """
    on_cpu, fsdp, deepspeed = not torch.accelerator.is_available(), None, None
    handlers = [accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)]
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        if os.environ.get("FSDP_VERSION") != "2":
            stop("fsdp_version 1: is not supported; `fsdp_version: 2` in the yaml, or --fsdp_version 2, would do")
        policy = torch.distributed.fsdp.MixedPrecisionPolicy()
        fsdp = accelerate.FullyShardedDataParallelPlugin(mixed_precision_policy=policy, cpu_ram_efficient_loading=False)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        if args.checkpoint_every or args.resume:
            stop(f"--checkpoint_every {args.checkpoint_every}: is none with DeepSpeed; 0, without --resume, would do")
        deepspeed = accelerate.DeepSpeedPlugin(zero3_init_flag=False, zero3_save_16bit_model=True)
        config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": "auto", "gradient_clipping": 0.0}
        deepspeed.deepspeed_config |= config | {"gradient_accumulation_steps": accumulate}
        deepspeed.deepspeed_config["zero_optimization"]["sub_group_size"] = 10**12  # AdamTF counts its steps
        handlers += [accelerate.InitProcessGroupKwargs(backend="gloo")] if on_cpu else []
    if args.compile and (fsdp or deepspeed):
        stop("--compile: is not available where FSDP2 or DeepSpeed shards the model; --no-compile would do")
    settings = {"fsdp_plugin": fsdp, "deepspeed_plugin": deepspeed, "log_with": "wandb" if args.track else None}
    settings["mixed_precision"] = "bf16" if args.dtype == "bf16" and not (fsdp or deepspeed) else "no"
    accelerator = accelerate.Accelerator(cpu=on_cpu and not deepspeed, kwargs_handlers=handlers, **settings)
    if fsdp and on_cpu:  # accelerate would fall back to DDP
        accelerator.state.fsdp_plugin = fsdp
        for state in (accelerator.state, accelerate.PartialState()):
            state.distributed_type = accelerate.DistributedType.FSDP
    if deepspeed:  # from_pretrained would shard what it loads
        transformers.integrations.unset_hf_deepspeed_config()
    accelerator.gradient_accumulation_steps = accumulate  # a launcher may have set another number
    return accelerator


def prepare(accelerator: Any, args: Args, model: Any, *optimizer: Any) -> Any:
    """The model, and its optimizer, under the engine, which shards a frozen model too if it shards weights at all."""
    zero = accelerator.distributed_type == accelerate.DistributedType.DEEPSPEED
    if args.dtype == "bf16" and (zero or accelerator.is_fsdp2):  # with DDP accelerate does it
        model.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
    model.is_sharded = accelerator.is_fsdp2 or zero and accelerator.state.deepspeed_plugin.zero_stage == 3
    if accelerator.is_fsdp2:
        names = {type(module).__name__ for module in model.modules()}
        layers = sorted(names & set(next(model.children())._no_split_modules or ()))  # each is a unit to gather
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = layers
    if optimizer:
        return accelerator.prepare(model, *optimizer)
    if accelerator.is_fsdp2:
        fsdp2_prepare_model(accelerator, model)
    elif model.is_sharded:
        import deepspeed  # no other engine needs it

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        deepspeed.initialize(model=model, config=config)
    return model


def everywhere(model: Any, x: Tensor) -> bool:
    """Whether x is True; for a sharded model, whether it is on every rank, since all must run the model as often."""
    if getattr(model, "is_sharded", False):
        torch.distributed.all_reduce(x := x.int(), torch.distributed.ReduceOp.MIN)
    return bool(x)


# --- forward passes ---------------------------------------------------------------------------------------------------


def last_hidden(model: Any, ids: Tensor, mask: Tensor, positions: Tensor | None = None, cache: Any = None) -> Tensor:
    """Last hidden states (B, t, d) of ids (B, t). mask: (B, past + t), False at padding, or (B, t, t), who sees whom.

    Positions count real tokens only, as in the original, so that padding on either side changes nothing.
    """
    if positions is None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
        if model.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
    if "position_ids" in inspect.signature(model.base_model.forward).parameters:
        inputs["position_ids"] = positions
    return model.base_model(**inputs).last_hidden_state


class Fp32Logits(torch.autograd.Function):
    """hidden (n, d) @ weight (V, d).T. The backward pass multiplies in bf16, as that of every layer under autocast, in
    blocks of the vocabulary that fit a cache: optimizer steps in bf16 are 1.1 times faster.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits (n, V)."""
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """grad @ weight and grad.T @ hidden."""
        hidden, weight = ctx.saved_tensors
        grad_hidden, grad_weight, x = torch.zeros_like(hidden), torch.empty_like(weight), hidden.bfloat16()
        for block, w, out in zip(*(y.split(8192) for y in (grad.T, weight, grad_weight)), strict=True):
            block = block.bfloat16()
            grad_hidden += block.T @ w.bfloat16()
            out.copy_(block @ x)
        return grad_hidden, grad_weight


def logits_at(lm: Any, at: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Logits (n, V) and hidden states (n, d) at the n cells `at` of the flattened (B, t), or at the B last ones (None);
    inputs are those of last_hidden. The head runs in fp32 under autocast too: logits of 100 in bf16 are off by 0.25.
    """
    hidden, head = last_hidden(lm, *inputs), lm.get_output_embeddings()
    hidden = hidden[:, -1].contiguous() if at is None else hidden.flatten(0, 1).index_select(0, at)
    is_mixed = torch.is_autocast_enabled(hidden.device.type)
    with torch.autocast(hidden.device.type, enabled=False):
        x = hidden.to(head.weight.dtype)
        if is_mixed and head.bias is None and len(head.weight):  # ZeRO-3 gathers weights for a call of the module only
            return Fp32Logits.apply(x, head.weight), hidden
        return head(x).float(), hidden


class TokenLogprobs(torch.autograd.Function):
    """Log-probabilities (n,) of tokens (n,) and entropies (n,), without gradient, under softmax(logits / temperature).

    logits (n, V) is the only tensor of its size: in place it turns into log-probabilities and, in the backward pass,
    into its own gradient, in blocks that fit a cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """log_softmax, read at the tokens."""
        ctx.temperature, ctx.size, tokens = temperature, max(1, 2**20 // logits.shape[1]), tokens.unsqueeze(1)
        blocks = [torch.log_softmax(block.div_(temperature), -1, out=block) for block in logits.split(ctx.size)]
        entropy = torch.cat([-(block.exp() * block).sum(-1) for block in blocks])
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(logits, tokens)
        return logits.gather(1, tokens).squeeze(1), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """grad / temperature * (one_hot(token) - softmax)."""
        logits, tokens = ctx.saved_tensors
        parts = (x.split(ctx.size) for x in (logits, tokens, (grad / ctx.temperature).unsqueeze(1)))
        for block, token, scale in zip(*parts, strict=True):
            block.exp_().mul_(-scale).scatter_add_(1, token, scale)
        return logits, None, None


def first_fit(lengths: np.ndarray, width: int) -> tuple[int, int, np.ndarray]:
    """Cells in all, `width`, and where each item begins, for items put in rows of `width` cells: the longest first,
    each in the first row that has room for it.
    """
    free, begin = np.full(len(lengths), width), np.zeros(len(lengths), int)
    for i in np.argsort(-lengths, kind="stable"):
        row = (free >= lengths[i]).argmax()
        begin[i], free[row] = (row + 1) * width - free[row], free[row] - lengths[i]
    return (free < width).sum() * width, width, begin


def pack(trees: Sequence[Sequence[Sequence[int]]], device: Any) -> tuple[Any, ...]:
    """The inputs of last_hidden for n trees [context, branch 1, .., branch K]: ids, who sees whom and positions.

    A context is fed once; its branches see it and themselves. A row takes as many trees as fit, and is once, one and a
    half times or twice as wide as the longest, whichever pads least. Before the inputs come two arrays (n, 1 + K): the
    first and the last cell of every context and branch, counted through all rows.
    """
    lengths = np.array([[len(branch) for branch in tree] for tree in trees])
    total, flat = lengths.sum(1), lengths.ravel()
    size, width, begin = min((first_fit(total, total.max() * n // 2) for n in (2, 3, 4)), key=lambda fit: fit[0])
    first = begin[:, None] + lengths.cumsum(1) - lengths
    owner = np.repeat(np.arange(len(flat)), flat)  # of every token, in the order of `trees`
    t = np.arange(len(owner)) - np.repeat(flat.cumsum() - flat, flat)
    tree, branch = np.divmod(owner, lengths.shape[1])
    tokens = np.fromiter(itertools.chain.from_iterable(itertools.chain.from_iterable(trees)), int)
    cells = np.zeros((4, size), int)
    cells[:, first.ravel()[owner] + t] = tokens, t + (branch > 0) * lengths[tree, 0], tree + 1, branch
    ids, positions, tree, branch = torch.from_numpy(cells.reshape(4, -1, width)).to(device)
    sees = (branch == 0).unsqueeze(1) | (branch.unsqueeze(1) == branch.unsqueeze(2))
    sees &= tree.unsqueeze(1) == tree.unsqueeze(2)
    return first, first + lengths - 1, ids, sees.tril(), positions


@torch.no_grad()
def check_packing(flag: str, model: Any, length: int) -> None:
    """Stop unless packed texts of up to `length` tokens give what the model by itself does. With logits scaled after
    the head, a sliding window, alibi or a recurrent state it would be another model; no later check could see that.
    """
    is_lm, hint = model.get_output_embeddings() is not None, "a plain causal language model would do"
    head = model.get_output_embeddings() if is_lm else model.score
    text = [i % model.config.get_text_config().vocab_size for i in range(length - 2)]
    trees = [[text, text[:2]], [text[:1], text[1:3]], [text[1:2], text[:2]]]  # the last two share a row
    _, last, *inputs = pack(trees, head.weight.device)
    what = f"{flag} {model.name_or_path}: cannot be run on packed rows"
    ours = head(attempt(what, hint, last_hidden, model, *inputs).flatten(0, 1)[last[:, 1]])
    for mine, tree in zip(ours, trees, strict=True):
        ids = torch.tensor([sum(tree, [])], device=mine.device)
        plain = model(ids).logits[0, -1] if is_lm else head(model.base_model(ids)[0][0, -1])
        if (off := (mine - plain).abs().max().item()) > 1e-2:
            stop(f"{flag} {model.name_or_path}: its outputs are off by {off:.2g} on packed rows; {hint}")


class Actor(nn.Module):
    """A language model as a policy."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor]:
        """Logits (n, V) at n cells: see logits_at."""
        return logits_at(self.lm, at, *inputs)[:1]


class RewardModel(nn.Module):
    """reward = gain * head(last real token) + bias, around any sequence classifier with one label.

    gain and bias stand in the classifier's config.json as `reward_gain` and `reward_bias`. Plain transformers passes
    over them: its logit is the reward before that increasing map. `tokenizer`: None if it is the policy's.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.gain = nn.Parameter(torch.tensor([float(getattr(model.config, "reward_gain", 1.0))]))
        self.bias = nn.Parameter(torch.tensor([float(getattr(model.config, "reward_bias", 0.0))]))

    def forward(self, at: Tensor | None, *inputs: Any) -> Tensor:
        """Rewards (n,) in fp32 of the texts whose last tokens are in the n cells `at`; the inputs are those of pack."""
        if at is None:
            return self.encode(*inputs)
        hidden = last_hidden(self.model, *inputs).flatten(0, 1).index_select(0, at)
        with torch.autocast(hidden.device.type, enabled=False):
            reward = self.model.score(hidden.to(self.model.score.weight.dtype)).squeeze(-1)
            return self.gain * reward.float() + self.bias

    def encode(self, rows: list[list[int]]) -> Tensor:
        """Rewards (n,) by an encoder: it has no `score` but pools by itself, and wants padding on the right."""
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row, device=self.gain.device) for row in rows], batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
        logits = self.model(ids, attention_mask=mask.to(ids.device)).logits
        return self.gain * logits.squeeze(-1).float() + self.bias


def reward_trees(reward: Any, trees: Sequence[Sequence[Sequence[int]]], device: Any) -> Tensor:
    """Rewards (n, K) of the branches of n trees: see pack."""
    _, last, *inputs = pack(trees, device)
    return reward(torch.from_numpy(last[:, 1:]).to(device).flatten(), *inputs).view(len(trees), -1)


def load_reward(args: Args, preset: str, tokenizer: Any, device: torch.device) -> Any:
    """--reward_fn, or the RewardModel in --reward_model, or the newest that train_reward.py finished for the preset."""
    if args.reward_fn is not None:
        module, _, name = args.reward_fn.partition(":")
        sys.path.insert(0, os.getcwd())
        what, hint = f"--reward_fn {args.reward_fn}: cannot be imported", "module:function from this folder would do"
        return attempt(what, hint, lambda: getattr(importlib.import_module(module), name))
    made = sorted(Path("runs").glob(f"train_reward-{preset}-*/reward_model"), key=lambda folder: folder.stat().st_mtime)
    if args.reward_model is None and not made:
        stop(f"--reward_model: none given, none in runs/; `python train_reward.py {preset}` would make one")
    name = args.reward_model = args.reward_model or str(made[-1])  # for args.json and --resume
    model = load(AutoModelForSequenceClassification, name, "--reward_model", args).to(device)
    if model.config.num_labels != 1:
        stop(f"--reward_model {name}: has {model.config.num_labels} labels; a classifier with one label would do")
    own = load(AutoTokenizer, name, "--reward_model", args)
    if hasattr(model, "score"):
        check_packing("--reward_model", model, 16)
    return RewardModel(freeze(model, args.dtype), None if own.get_vocab() == tokenizer.get_vocab() else own).to(device)


# --- rollout ----------------------------------------------------------------------------------------------------------


def left_pad(rows: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both (B, longest row). Padding is token 0 under a False mask."""
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, True
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def batch_indices(size: int, start: int, count: int, seed: int) -> list[int]:
    """Positions start .. start + count - 1 of an endless stream of permutations of range(size), one per epoch."""
    epochs = range(start // size, (start + count - 1) // size + 1)
    stream = np.concatenate([np.random.default_rng([seed, 0, epoch]).permutation(size) for epoch in epochs])
    return stream[start - epochs.start * size :][:count].tolist()


def uniforms(seed: int, update: int, batch: int, length: int, device: Any) -> Tensor:
    """Uniform numbers (batch, length) to sample with, from seed and update; ranks take their rows of one array."""
    rng = np.random.default_rng([seed, 1, update])
    return torch.from_numpy(rng.random((batch, length), dtype=np.float32)).to(device)


@functools.lru_cache(maxsize=4)
def decoder(policy: Any, rows: int, width: int) -> tuple[Any, Any]:
    """A cache of fixed size and the compiled step that fills it, a CUDA graph on a GPU, for samples of this shape."""
    return StaticCache(config=policy.lm.config, max_cache_len=width), torch.compile(policy, mode="reduce-overhead")


@torch.no_grad()
def sample(
    policy: Any, ids: Tensor, mask: Tensor, u: Tensor, temperature: float, end: Any, after: int, compiled: bool = False
) -> Tensor:
    """Responses (B, R) ~ softmax(logits / temperature), one forward per token: no top-k, no top-p.

    ids, mask: contexts, padded on the left, (B / K, P): each is read once for K responses, which come next to each
    other. u: (B, R) uniform numbers; token t is where the cumulative distribution passes u[:, t] (torch.multinomial
    draws B * V exponentials instead). Unless `end` is None, sampling is over when every row has had that token at index
    `after` or later, which is asked at every eighth token, since a GPU waits for the question; columns not reached are
    filled with it.
    """
    cache, step, width, training = DynamicCache(config=policy.lm.config), policy, ids.shape[1], policy.lm.training
    policy.lm.eval()  # under gradient checkpointing transformers keeps no cache in training mode
    logits = policy(None, ids, mask, None, cache)[0].repeat_interleave(len(u) // len(ids), 0)
    cache.batch_repeat_interleave(len(u) // len(ids))
    total = width + u.shape[1]
    if compiled:
        total = math.ceil(total / 64) * 64  # few shapes to compile for
        fixed, step = decoder(policy, len(u), total)
        fixed.reset()
        for i, layer in enumerate(cache.layers):
            fixed.update(layer.keys, layer.values, i)
        cache = fixed
    mask = nn.functional.pad(mask.repeat_interleave(len(u) // len(ids), 0), (0, total - width))
    responses = torch.full(u.shape, end or 0, device=u.device)
    for t in range(u.shape[1]):
        cdf = (logits / temperature).softmax(-1).cumsum(-1)
        ids = torch.searchsorted(cdf, u[:, t : t + 1] * cdf[:, -1:], right=True).clamp_(max=cdf.shape[1] - 1)
        responses[:, t : t + 1] = ids
        over = end is not None and t % 8 == 7 and everywhere(policy, (responses[:, after : t + 1] == end).any(1).all())
        if over or t + 1 == u.shape[1]:
            policy.lm.train(training)
            return responses
        mask[:, width + t] = True
        seen = mask if compiled else mask[:, : width + t + 1]
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits = step(None, ids, seen, mask.sum(1, keepdim=True) - 1, cache)[0]


def truncate(responses: Tensor, token: int | None, after: int) -> tuple[Tensor, Tensor]:
    """Which tokens of responses (B, R) stay, (B, R), and whether the truncate token was found, (B,).

    What follows the first `token` at index `after` or later goes, the token itself stays. None: all stay, all found.
    """
    index = torch.arange(responses.shape[1], device=responses.device)
    hit = (responses == (-1 if token is None else token)) & (index >= after)
    return hit.cumsum(1) - hit.long() == 0, hit.any(1) | (token is None)


def grow(contexts: list[list[int]], branches: list[list[int]]) -> list[list[list[int]]]:
    """Trees [context, branch 1, .., branch K] of n contexts and their n * K branches, which come next to each other."""
    k = len(branches) // len(contexts)
    return [[context, *branches[i * k : i * k + k]] for i, context in enumerate(contexts)]


def respond(policy: Any, contexts: list[list[int]], u: Tensor, end: int | None, args: Args) -> dict[str, Any]:
    """A batch: responses (B, R), which of their tokens count in KL and loss (kept, B, R), whether the truncate token
    was found (B,), truncated responses as lists; per context, what forward_response feeds (trees), and its length.
    """
    may_end = end if args.mask_truncated else None  # the original's KL and loss want all R tokens
    ids, mask = left_pad(contexts, u.device)
    responses = sample(policy, ids, mask, u, args.temperature, may_end, args.truncate_after, args.compile)
    stays, found = truncate(responses, end, args.truncate_after)
    kept, rows = stays if args.mask_truncated else torch.ones_like(stays), responses.tolist()
    truncated = [row[:length] for row, length in zip(rows, stays.sum(1).tolist(), strict=True)]
    trees = grow(contexts, [row[: length - 1] for row, length in zip(rows, kept.sum(1).tolist(), strict=True)])
    lengths = torch.tensor([sum(map(len, tree)) for tree in trees])
    batch = {"responses": responses, "kept": kept, "found": found, "truncated": truncated}
    return batch | {"trees": trees, "lengths": lengths}


def micro_batches(rows: Tensor, lengths: Tensor, size: int) -> tuple[Tensor, ...]:
    """`rows` in groups of `size` of similar length, so that little is padded; a sum over rows does not depend on it."""
    return rows[lengths[rows].argsort(stable=True)].split(size)


def forward_response(policy: Any, batch: dict[str, Any], rows: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies, (b, R) or (b, K, R), of the responses in `rows`, and what else the policy gives.
    Where `kept` is False they mean nothing.

    Rollout and update come here with the same rows, so that the first ratio is 1 in any precision. The last token of a
    response is never an input.
    """
    responses = batch["responses"][rows]
    first, last, *inputs = pack([batch["trees"][i] for i in rows.tolist()], responses.device)
    # the cell that predicts a token: the one before it, which for a first token is the last of the context
    at = np.minimum(first[:, 1:, None] + np.arange(-1, responses.shape[-1] - 1), last[:, 1:, None])
    at[:, :, 0] = last[:, :1]
    logits, *others = policy(torch.from_numpy(at).to(responses.device).flatten(), *inputs)
    logprobs = TokenLogprobs.apply(logits, responses.flatten(), temperature)
    return tuple(x.view_as(responses) for x in (*logprobs, *others))


def look(accelerator: Any, policy: Any, ref: Any, batch: dict[str, Any], parts: Any, temperature: float) -> None:
    """Add to the batch what policy and reference think of the responses: logprobs, ref_logprobs and, if the policy has
    a value head, values. `parts`: the rows of each micro-batch. If there is one, the policy's pass is that of the first
    optimizer step as well: as batch["first"], with its graph, it is kept for it. That saves 6 % of an update.
    """
    for part in parts:
        if len(parts) == 1:
            outputs = batch["first"] = forward_response(policy, batch, part, temperature)
        with torch.no_grad(), accelerator.autocast():
            if len(parts) > 1:
                outputs = forward_response(accelerator.unwrap_model(policy), batch, part, temperature)
            ref_logprobs = forward_response(ref, batch, part, temperature)[0]
        logprobs, _, *values = outputs
        for name, x in zip(("logprobs", "ref_logprobs", "values"), (logprobs, ref_logprobs, *values), strict=False):
            batch.setdefault(name, torch.zeros(batch["responses"].shape, device=x.device))[part] = x.detach()


@torch.no_grad()
def score(reward: Any, queries: list[list[int]], responses: list[list[int]], tokenizer: Any, args: Args) -> Tensor:
    """Rewards (B,), on the CPU, of K responses per query. A function, or a model with another tokenizer, reads text."""
    asked = [query for query, *branches in grow(queries, responses) for _ in branches]
    if not isinstance(reward, RewardModel):
        texts = tokenizer.batch_decode(asked), tokenizer.batch_decode(responses)
        who = f"rank {os.environ.get('RANK', '0')}: --reward_fn {args.reward_fn}"  # other ranks may have no fault
        hint = "one finite float per response would do"
        values = attempt(f"{who}: gave no rewards", hint, lambda: [*map(float, reward(*texts))])
        if len(values) != len(asked):
            stop(f"{who}: gave {len(values)} values for {len(asked)}, as {values[:1]}; {hint}")
        return torch.tensor(values)
    trees, is_encoder, device = grow(queries, responses), not hasattr(reward.model, "score"), reward.gain.device
    if is_encoder or reward.tokenizer is not None:
        rows = [query + response for query, response in zip(asked, responses, strict=True)]
        if reward.tokenizer is not None:
            rows = reward.tokenizer(tokenizer.batch_decode(rows))["input_ids"]
        trees = [[[], row] for row in rows]
    scores, lengths = torch.empty(len(trees), len(trees[0]) - 1), torch.tensor([sum(map(len, tree)) for tree in trees])
    for group in micro_batches(torch.arange(len(trees)), lengths, math.ceil(args.micro_batch_size / scores.shape[1])):
        part = [trees[i] for i in group.tolist()]
        rewards = reward(None, [row for _, row in part]) if is_encoder else reward_trees(reward, part, device)
        scores[group] = rewards.view(len(part), -1).cpu()
    return scores.flatten()


# --- the algorithm ----------------------------------------------------------------------------------------------------


def penalize(scores: Tensor, found: Tensor, value: float, mode: str) -> Tensor:
    """Scores (B,); where no truncate token was found, `value` replaces the score or is added to it."""
    return torch.where(found, scores, scores + value if mode == "add" else torch.full_like(scores, value))


def adapt_kl_coef(kl_coef: float, kl: float, target: float, share: float) -> float:
    """The KL coefficient after a batch of mean KL `kl` that is `share` of the horizon (Ziegler et al. 2019, 2.2)."""
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * share)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Rewards (n, K), a row per query, minus the mean of the other K - 1 in their row (Ahmadian et al., equation 8)."""
    return rewards - (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def rloo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float, token_level: bool
) -> tuple[Tensor, Pairs]:
    """Clipped policy loss, SUMMED over responses, so that micro-batches add up. Advantages (n, K), the rest (n, K, R).

    The ratio is that of responses or, token_level, of tokens; at 1 the gradient of either is REINFORCE's, -advantage *
    grad log pi(response). Returns the loss and (sum, count) pairs for the metrics.
    """
    log_ratio = (logprobs - old_logprobs) * mask
    if not token_level:
        log_ratio, mask = log_ratio.sum(-1, keepdim=True), torch.ones_like(mask[..., :1])
    ratio = log_ratio.clamp(-40, 40).exp()  # so that neither it nor its square overflows
    advantages = advantages.unsqueeze(-1)
    policy_loss, policy_loss_clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    terms = {
        "ppo/loss/policy": torch.maximum(policy_loss, policy_loss_clipped),
        "ppo/policy/approxkl": 0.5 * log_ratio**2,
        "ppo/policy/clipfrac": policy_loss_clipped > policy_loss,
        "ppo/val/ratio": ratio,
        "ratio_squared": ratio**2,
    }
    sums = {name: (term * mask).sum() for name, term in terms.items()}
    return sums["ppo/loss/policy"], {name: (total.detach(), mask.sum()) for name, total in sums.items()}


def gradient_norm(model: Any) -> Tensor:
    """L2 norm of all gradients; those of a sharded model are put together."""
    if hasattr(model, "was_step_applied"):  # DeepSpeed has made its step, unless a gradient was not finite
        norm = model.get_global_grad_norm() if model.was_step_applied() else math.nan
        return torch.as_tensor(norm, device=model.device).float()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def check_finite(accelerator: Any, tensors: dict[str, Tensor]) -> None:
    """FloatingPointError, on all ranks, that names the first rank and tensor with a NaN or an infinity in it."""
    bad = torch.stack([(~x.isfinite()).any().float() for x in tensors.values()])
    if places := accelerator.gather(bad.unsqueeze(0)).nonzero().tolist():
        rank, which = places[0]
        raise FloatingPointError(f"rank {rank}: {list(tensors)[which]} is not finite")


def rloo_update(accelerator: Any, policy: Any, optimizer: Any, batch: Any, epochs: Tensor, args: Args) -> list[Pairs]:
    """All optimizer steps on one batch of rollouts; `epochs` (num_epochs, num_minibatches, rows) holds the shuffles.

    The gradient is that of a mean over all ranks, in however many micro-batches. Returns (sum, count) pairs for the
    metrics.
    """
    records, one = [], torch.ones((), device=batch["kept"].device)
    for minibatch in epochs.flatten(0, 1):
        scale = accelerator.gradient_accumulation_steps / batch["advantages"][minibatch].numel()
        for rows in micro_batches(minibatch, batch["lengths"], math.ceil(args.micro_batch_size / args.rloo_k)):
            with accelerator.accumulate(policy):
                outputs = batch.pop("first", None) or forward_response(policy, batch, rows, args.temperature)
                logprobs, entropy = outputs
                old = [batch[name][rows] for name in ("logprobs", "advantages", "kept")]
                loss, pairs = rloo_loss(logprobs, *old, args.cliprange, args.token_level)
                accelerator.backward(loss * scale)  # it averages over processes and micro-batches, the loss is a sum
                if accelerator.sync_gradients:
                    norm = gradient_norm(policy)
                    check_finite(accelerator, {"the loss": loss, "the gradient": norm})
                    records.append({"ppo/policy/gradient_norm": (norm, one)})
                optimizer.step()
                optimizer.zero_grad()
            records.append(pairs | {"ppo/policy/entropy": ((entropy * old[-1]).sum(), old[-1].sum())})
            if "first_ratio_error" not in records[0]:  # before any step
                records[0]["first_ratio_error"] = (((logprobs - old[0]).exp() - 1).abs().max().detach(), one)
    return records


# --- metrics and evaluation -------------------------------------------------------------------------------------------


def reduce_means(accelerator: Any, records: list[Pairs]) -> dict[str, float]:
    """Means of all (sum, count) pairs over records and ranks: one collective and one transfer per update."""
    names = list(dict.fromkeys(name for record in records for name in record))
    pairs = ([torch.stack(record[name]) for record in records if name in record] for name in names)
    totals = accelerator.reduce(torch.stack([torch.stack(pair).double().sum(0) for pair in pairs])).tolist()
    return {name: total / count for name, (total, count) in zip(names, totals, strict=True)}


@torch.no_grad()
def evaluate(
    policy: Any, ref: Any, reward: Any, queries: Any, contexts: Any, end: Any, tokenizer: Any, args: Args
) -> Any:
    """Rows (query, response, score, KL) of the evaluation queries, drawn with the same random numbers at each call."""
    u = uniforms(args.seed, 0, len(queries), args.response_length, next(policy.parameters()).device)
    batch, rows = respond(policy, contexts, u, end, args), torch.arange(len(queries))
    logprobs, ref_logprobs = (forward_response(model, batch, rows, args.temperature)[0] for model in (policy, ref))
    kl = ((logprobs - ref_logprobs) * batch["kept"]).sum(1).tolist()
    scores = score(reward, queries, batch["truncated"], tokenizer, args).tolist()
    texts = tokenizer.batch_decode(queries), tokenizer.batch_decode(batch["truncated"])
    return list(zip(*texts, scores, kl, strict=True))


def self_check(metrics: dict[str, float], update: int, args: Args) -> None:
    """Stop a run that cannot be right: a first ratio that is not 1, a first KL that is not 0."""
    tolerance, off, kl = {"fp32": 1e-3, "bf16": 2e-2}[args.dtype], metrics["first_ratio_error"], metrics["objective/kl"]
    if off > tolerance:
        stop(f"update {update + 1}: the first ratio is off 1 by {off:.2g}; rollout and update compute differently")
    if update == 0 and abs(kl) > tolerance * args.response_length:
        stop(f"update 1: the KL to the reference is {kl:.2g}, not 0, though the policy still is the reference")


class Interrupt:
    """Notes Ctrl-C, so that a run ends after its update. A launcher repeats what its processes have already got: only
    after three seconds another one ends the run at once.
    """

    def __init__(self) -> None:
        self.time = math.inf
        signal.signal(signal.SIGINT, self)

    def __call__(self, *_: Any) -> None:
        """The signal's handler."""
        if time.monotonic() > self.time + 3:
            stop("interrupted at once; the same command with --resume goes on from the newest checkpoint", 130)
        self.time = min(self.time, time.monotonic())


def new_bar(total: int, done: int, disable: bool) -> Any:
    """A progress bar of episodes; where there is no terminal nothing is drawn, show_progress writes lines."""
    there = {} if sys.stderr.isatty() else {"file": io.StringIO(), "mininterval": 60, "miniters": 1}
    return tqdm(total=total, initial=done, unit=" episodes", disable=disable, dynamic_ncols=True, **there)


def show_progress(bar: Any, episodes: int, figures: dict[str, float]) -> None:
    """Episodes done, episodes per second and time left; where there is no terminal, one plain line per minute."""
    bar.set_postfix({name: f"{x:.3g}" for name, x in figures.items()}, refresh=False)
    if (bar.update(episodes) or bar.n >= bar.total) and not bar.disable and not sys.stderr.isatty():
        sys.stderr.write(f"{bar}\n")


def append(folder: Path, metrics: dict[str, float]) -> None:
    """One line more in metrics.jsonl."""
    with writing(folder), (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


# --- the folder of a run: checkpoints, logs, models -------------------------------------------------------------------


def sync(*paths: Path) -> None:
    """Wait until these files and folders are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def publish(new: Path, path: Path) -> Path:
    """Rename the folder `new` to `path` when all of it is on the disk: what bears that name is complete."""
    sync(*new.rglob("*"), new)
    new.rename(path)
    sync(path.parent)
    return path


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of the files of a checkpoint."""
    found = {}
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        with (path / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What state.json of a checkpoint says; ValueError or OSError unless all files and no others are there, whole."""
    found = digests(path)
    if odd := {file.name for file in path.iterdir()} - {*found, "sha256.json"}:
        raise ValueError(f"{', '.join(sorted(odd))} is no part of a checkpoint")
    if json.loads((path / "sha256.json").read_text()) != found:
        raise ValueError("a file is damaged")
    state = json.loads((path / "state.json").read_text())
    if (lines := (path.parent.parent / "metrics.jsonl").read_bytes().count(b"\n")) < state["update"]:
        raise ValueError(f"metrics.jsonl has {lines} lines for {state['update']} updates")
    return state


def find_checkpoint(args: Args, preset: str) -> tuple[Args, Path, Path | None, dict[str, Any]]:
    """Args, the folder of the run and, with --resume, the newest complete checkpoint in it and what that one says.

    Stops unless the folder is new or, with --resume, made by the same command, but for MAY_CHANGE; stops with status 0
    if that run is finished.
    """
    script, path = Path(sys.argv[0]).stem, Path(args.resume or "newest")
    folder = Path(args.output_dir or f"runs/{script}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume == "newest" and args.output_dir is None:
        made = Path("runs").glob(f"{script}-{preset}-{args.seed}-*/metrics.jsonl")
        folder = max(made, key=lambda path: path.stat().st_mtime, default=folder / "metrics.jsonl").parent
    elif args.resume not in (None, "newest"):
        if not path.is_dir():
            stop(f"--resume {path}: is no folder; the folder of a run or of one of its checkpoints would do")
        folder = path.parent.parent if path.parent.name == "checkpoints" else path
        if args.output_dir is not None and Path(args.output_dir).resolve() != folder.resolve():
            stop(f"--output_dir {args.output_dir}: is not the folder of --resume {path}; one of the two would do")
    parent = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        stop(f"--output_dir {folder}: cannot be made or written in {parent}; a folder with write permission would do")
    is_used = folder.exists() and any(file.suffix != ".tmp" for file in folder.iterdir())
    if is_used and args.resume is None:
        stop(f"--output_dir {folder}: is not empty; a new or empty folder, or --resume, would do")
    if is_used:
        what, hint = f"--resume {folder}: holds no run", "a folder with args.json would do"
        old = attempt(what, hint, lambda: (record := json.loads((folder / "args.json").read_text())) | record["args"])
        if vars(args).get("reward_model", "") is None:
            args = dataclasses.replace(args, reward_model=old.get("reward_model"))
        new = {"script": script, "preset": preset, "processes": int(os.environ.get("WORLD_SIZE", "1"))} | vars(args)
        changed = [name for name, x in new.items() if old.get(name) != x and name not in MAY_CHANGE]
        if changed:
            changed = changed[: 1 if changed[0] == "script" else None]  # another script has other flags
            was = ", ".join(f"{name} {old.get(name)!r} (now {new[name]!r})" for name in changed)
            stop(f"--resume {folder}: was made with {was}; the same would do, only {', '.join(MAY_CHANGE)} may change")
        if made := [folder / name for name in ("policy", "reward_model") if (folder / name).exists()]:
            stop(f"--resume {folder}: this run is finished, its model is in {made[0]}", 0)
    last = path.name if path.parent.name == "checkpoints" else "~"
    for path in sorted(folder.glob(CHECKPOINT), reverse=True) if args.resume else ():
        if path.name <= last:
            try:
                return args, folder, path, read_checkpoint(path)
            except (OSError, ValueError) as error:
                warn(f"checkpoint {path} is passed over: {error}")
    if args.resume:
        warn(f"--resume: there is no complete checkpoint in {folder}; the run starts from the beginning")
    return args, folder, None, {}


def prune(folder: Path, updates: int, keep: int) -> None:
    """Remove all checkpoints, finished or not, but the last `keep` of up to `updates` updates."""
    kept = sorted(path for path in folder.glob(CHECKPOINT) if path.name <= f"{updates:07d}")[-keep:]
    for path in {*folder.glob(CHECKPOINT), *folder.glob(f"{CHECKPOINT}.tmp")}.difference(kept):
        shutil.rmtree(path)


def save_checkpoint(folder: Path, accelerator: Any, model: Any, optimizer: Any, state: Any, keep: int) -> Path | None:
    """checkpoints/<update> with weights, optimizer and state.json; it appears when complete and on the disk.

    Queries, sampling and shuffles are functions of --seed, update and rank: no random state has to be kept. Weights
    with a NaN are not written, and nothing over an older checkpoint of the same update. Returns the newest one.
    """
    if hasattr(model, "was_step_applied"):
        return warn("DeepSpeed's optimizer state is not kept: this run cannot be resumed")
    options, moments = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True), {"state": {}, "param_groups": []}
    weights = dcp.get_model_state_dict(model, options=options)
    if optimizer.state:  # or else torch would make one, by a step
        moments = dcp.get_optimizer_state_dict(model, optimizer.optimizer, options=options)
    path = folder / "checkpoints" / f"{state['update']:07d}"
    if accelerator.is_main_process and not path.exists() and all(x.isfinite().all() for x in weights.values()):
        new = path.with_suffix(".tmp")
        flat = {f"{name}:{key}": x for name, entry in moments["state"].items() for key, x in entry.items()}
        with writing(folder):
            new.mkdir(parents=True)
            for name, tensors in (("model", weights), ("optimizer", flat)):
                tensors = {key: x.clone() for key, x in tensors.items()}  # tied weights are written twice
                save_file(tensors, new / f"{name}.safetensors")
            (new / "state.json").write_text(json.dumps(state | {"param_groups": moments["param_groups"]}))
            (new / "sha256.json").write_text(json.dumps(digests(new)))
            sync(folder / "metrics.jsonl")
            publish(new, path)
            prune(folder, state["update"], keep)
    return max(folder.glob(CHECKPOINT), default=None)


def load_checkpoint(path: Path, state: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Weights and optimizer as they were."""
    moments: dict[str, Any] = {"state": {}, "param_groups": state["param_groups"]}
    for name, x in load_file(path / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition(":")
        moments["state"].setdefault(parameter, {})[key] = x
    if hasattr(model, "reshard"):  # FSDP2: the last forward pass has left some weights whole
        model.reshard()
    options = dcp.StateDictOptions(full_state_dict=True)
    dcp.set_model_state_dict(model, load_file(path / "model.safetensors"), options=options)
    if moments["state"]:
        dcp.set_optimizer_state_dict(model, optimizer.optimizer, moments, options=options)


def open_output_dir(folder: Path, args: Args, preset: str, updates: int) -> None:
    """The folder of the run with args.json (arguments, versions, git commit) and `updates` lines of metrics.jsonl."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False).stdout if shutil.which("git") else ""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, accelerate, datasets)}
    record = {"script": Path(sys.argv[0]).stem, "preset": preset, "processes": int(os.environ.get("WORLD_SIZE", "1"))}
    record |= {"id": os.urandom(4).hex(), "commit": found.strip(), "versions": versions, "args": vars(args)}
    metrics = folder / "metrics.jsonl"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder, updates, args.keep_checkpoints)
        if not (folder / "args.json").exists():
            (folder / "args.tmp").write_text(json.dumps(record, indent=2))
            (folder / "args.tmp").rename(folder / "args.json")
        lines = metrics.read_text().splitlines(keepends=True)[:updates] if metrics.exists() else []
        metrics.with_suffix(".tmp").write_text("".join(lines))
        metrics.with_suffix(".tmp").replace(metrics)


def start_tracking(accelerator: Any, folder: Path, args: Args, preset: str) -> None:
    """With --track a run in W&B. It gets arguments and metrics, but nothing about machine, code or environment."""
    private = {"x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True, "console": "off"}
    private |= {"disable_git": True, "disable_code": True, "disable_job_creation": True, "x_save_requirements": False}
    private["host"] = ""  # None would be the name of this machine
    if args.track and accelerator.is_main_process:
        run = {"id": json.loads((folder / "args.json").read_text())["id"], "resume": "allow", "name": folder.name}
        settings = {"wandb": run | {"dir": str(folder), "settings": wandb.Settings(**private)}}
        accelerator.init_trackers("rlhf", config=vars(args) | {"preset": preset}, init_kwargs=settings)


def save_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, Tensor]) -> Path:
    """A Hugging Face folder with tokenizer, and value_head.safetensors if there is one; it appears when complete.
    `weights` are those of the module around `model`, which by itself may hold no more than a shard of them.
    """
    new, parts = folder.with_name(f"{folder.name}.tmp"), {}
    for name, x in weights.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = x
    shutil.rmtree(new, ignore_errors=True)
    names = dict([*model.named_parameters(), *model.named_buffers()])  # of tied weights the first
    shared = parts.get("lm") or parts["model"]
    model.save_pretrained(new, state_dict={name: x for name, x in shared.items() if name in names})
    tokenizer.save_pretrained(new)
    if "value_head" in parts:
        save_file(parts["value_head"], new / "value_head.safetensors")
    return publish(new, folder)


def plot_curves(folder: Path, x: str, panels: tuple[str, ...]) -> None:
    """curves.png from metrics.jsonl: every metric in `panels` over the metric `x`."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(3.4 * len(panels), 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.plot([row[x] for row in rows], [row[name] for row in rows])
        axes.set(title=name, xlabel=x)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    figure.savefig(folder / "curves.png", dpi=150)


def show_samples(folder: Path, before: list[Any], after: list[Any]) -> None:
    """Before and after of the same queries: all to samples.jsonl, a few and the means to the terminal."""
    table, names = Table("query", "before", "score", "after", "score", show_lines=True), ("response", "score", "kl")
    with (folder / "samples.jsonl").open("w") as file:
        for i, ((query, *old), (_, *new)) in enumerate(zip(before, after, strict=True)):
            pair = {"before": dict(zip(names, old, strict=True)), "after": dict(zip(names, new, strict=True))}
            file.write(json.dumps({"query": query} | pair) + "\n")
            if i < 6:
                table.add_row(*map(escape, (query, old[0], f"{old[1]:.2f}", new[0], f"{new[1]:.2f}")))
    means = [sum(row[2] for row in rows) / len(rows) for rows in (before, after)]
    Console().print(table)
    Console().print(f"mean score {means[0]:.2f} before, {means[1]:.2f} after; {folder} has everything", soft_wrap=True)


# --- main -------------------------------------------------------------------------------------------------------------


def main(preset: str, args: Args) -> None:
    """Set-up, then a loop of updates: rollout, score, reward, advantage, update, log; at the end evaluate and save."""
    transformers.logging.set_verbosity_error()  # what is wrong, the one line of `stop` says
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if args.rloo_k < 2:
        stop(f"--rloo_k {args.rloo_k}: leaves no sibling to compare with; 2 or more would do")
    divisor, micro = world * args.num_minibatches * args.rloo_k, math.ceil(args.micro_batch_size / args.rloo_k)
    if args.batch_size % divisor:
        nearest = args.batch_size // divisor * divisor
        stop(f"--batch_size {args.batch_size}: is not a multiple of {divisor} (processes x minibatches x responses per "
             f"query); {nearest or 2 * divisor} or {nearest + divisor} would do")  # fmt: skip
    rows, episodes = args.batch_size // world // args.rloo_k, args.batch_size // world  # on this rank, in each update
    accelerator = start_accelerator(args, math.ceil(rows / args.num_minibatches / micro))
    device, num_updates = accelerator.device, math.ceil(args.total_episodes / args.batch_size)
    args, folder, checkpoint, state = broadcast_object_list([*find_checkpoint(args, preset)])
    fast_math(device, args.dtype)
    tokenizer = load(AutoTokenizer, args.base_model, "--base_model", args)
    end = token_id(tokenizer, args.truncate_token, "--truncate_token")
    if end is not None and args.truncate_after >= args.response_length:
        stop(f"--truncate_after {args.truncate_after}: is beyond the response; {args.response_length - 1} would do")
    queries, eval_queries = load_queries(tokenizer, args, num_updates * args.batch_size, args.eval_queries)
    affixes = args.query_prefix, args.query_suffix
    prefix, suffix = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in affixes)
    contexts, eval_contexts = ([prefix + query + suffix for query in part] for part in (queries, eval_queries))
    reward = load_reward(args, preset, tokenizer, device)
    lm, ref_lm = (load(AutoModelForCausalLM, args.base_model, "--base_model", args) for _ in range(2))
    policy, ref = Actor(lm).to(device), Actor(freeze(ref_lm, args.dtype)).to(device)
    longest = max(map(len, contexts + eval_contexts)) + args.response_length
    check_window(f"--response_length {args.response_length}", lm, longest)
    if isinstance(reward, RewardModel) and reward.tokenizer is None:
        check_window(f"--reward_model {args.reward_model}", reward.model, longest - len(prefix + suffix))
    check_packing("--base_model", lm, longest)
    if args.gradient_checkpointing:
        policy.train().lm.gradient_checkpointing_enable()
    optimizer = {"tf": AdamTF, "torch": torch.optim.Adam}[args.adam](policy.parameters(), lr=args.lr, eps=args.adam_eps)
    policy, optimizer = prepare(accelerator, args, policy, optimizer)
    ref, reward = (prepare(accelerator, args, x) if isinstance(x, nn.Module) else x for x in (ref, reward))
    actor = accelerator.unwrap_model(policy)  # the same module, for forward passes without gradients
    shuffle = np.random.RandomState(args.seed + 100_003 * rank)
    with accelerator.autocast():
        before = evaluate(actor, ref, reward, eval_queries, eval_contexts, end, tokenizer, args)
    if bad := [score for *_, score, _ in before if not math.isfinite(score)]:
        name = "reward_fn" if args.reward_fn is not None else "reward_model"
        stop(f"--{name} {getattr(args, name)}: gave {bad[0]} for a held-out query; finite numbers would do")
    if checkpoint is not None:
        what, hint = f"--resume {checkpoint}: cannot be loaded", "a checkpoint of this run would do"
        attempt(what, hint, load_checkpoint, checkpoint, state, policy, optimizer)
    first, kl_coef = state.get("update", 0), state.get("kl_coef", args.kl_coef)
    for _ in range(first * args.num_epochs):
        shuffle.permutation(rows)
    if rank == 0:
        open_output_dir(folder, args, preset, first)
    start_tracking(accelerator, folder, args, preset)

    interrupt, bar = Interrupt(), new_bar(args.total_episodes, first * args.batch_size, rank > 0)
    for update in range(first, num_updates):
        # 1. rollout: responses to the queries, and what policy and reference think of their tokens
        picks = batch_indices(len(queries), (update * world + rank) * rows, rows, args.seed)
        u = uniforms(args.seed, update + 1, args.batch_size, args.response_length, device)[rank * episodes :][:episodes]
        shuffles = [shuffle.permutation(rows) for _ in range(args.num_epochs)]
        epochs = torch.from_numpy(np.stack(shuffles)).view(args.num_epochs, args.num_minibatches, -1)
        with torch.no_grad(), accelerator.autocast():
            batch = respond(actor, [contexts[i] for i in picks], u, end, args)
            batch |= {name: batch[name].view(rows, args.rloo_k, -1) for name in ("responses", "kept")}  # (n, K, R)
        parts = [part for minibatch in epochs[0] for part in micro_batches(minibatch, batch["lengths"], micro)]
        look(accelerator, policy, ref, batch, parts, args.temperature)

        # 2. score: the reward of the truncated response, or a penalty where it never ends
        with accelerator.autocast():
            scores = score(reward, [queries[i] for i in picks], batch["truncated"], tokenizer, args).to(device)
        scores = penalize(scores, batch["found"], args.penalty_reward_value, args.penalty_mode)

        # 3. reward: the score minus the KL penalty
        log_ratio = (batch["logprobs"] - batch["ref_logprobs"]) * batch["kept"]
        batch["rewards"] = scores.view(rows, -1) - kl_coef * log_ratio.sum(2)

        # 4. advantage and 5. update
        batch["advantages"] = rloo_advantages(batch["rewards"])
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - update / num_updates)
        try:
            check_finite(accelerator, {"the score": scores} | {x: batch[x] for x in ("logprobs", "ref_logprobs")})
            records = rloo_update(accelerator, policy, optimizer, batch, epochs, args)
        except FloatingPointError as error:
            state = {"update": update, "kl_coef": kl_coef}
            good = save_checkpoint(folder, accelerator, policy, optimizer, state, args.keep_checkpoints)
            stop(f"update {update + 1}, {error}; the last good state is in {good or 'no checkpoint'}")

        # 6. log; then the KL coefficient adapts to the KL of all ranks
        totals = {
            "objective/kl": log_ratio,
            "objective/kl_k3": (-log_ratio).clamp(max=40).exp() - 1 + log_ratio,
            "objective/entropy": -batch["logprobs"] * batch["kept"],
            "objective/scores": scores,
            "objective/non_score_reward": -kl_coef * log_ratio,
            "objective/score_total": batch["rewards"],
            "objective/found_end": batch["found"].float(),
            "interrupted": torch.tensor(float(interrupt.time < math.inf), device=device),
        }
        count = torch.tensor(float(episodes), device=device)
        records.append({name: (x.sum(), count) for name, x in totals.items()})
        metrics = {"ppo/episode": (update + 1) * args.batch_size, "ppo/lr": optimizer.param_groups[0]["lr"]}
        metrics |= {"objective/kl_coef": kl_coef} | reduce_means(accelerator, records)
        metrics["ppo/val/ratio_var"] = metrics.pop("ratio_squared") - metrics["ppo/val/ratio"] ** 2
        is_interrupted = metrics.pop("interrupted") > 0
        self_check(metrics, update, args)
        if rank == 0:
            append(folder, metrics)
        accelerator.log(metrics, step=update + 1)
        figures = {name: metrics[f"objective/{name}"] for name in ("scores", "kl", "kl_coef")}
        show_progress(bar, args.batch_size, figures)
        if args.kl_target is not None:
            kl_coef = adapt_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.batch_size / args.kl_horizon)
        reason, kl = None, metrics["objective/kl"]
        if args.max_kl is not None and kl > args.max_kl:
            reason = f"--max_kl {args.max_kl}: the KL of update {update + 1} is {kl:.4g}; a larger --kl_coef would do"
        if is_interrupted:
            reason = f"interrupted after update {update + 1}; the same command with --resume {folder} goes on"
        if reason or (args.checkpoint_every and (update + 1) % args.checkpoint_every == 0):
            state = {"update": update + 1, "kl_coef": kl_coef}
            save_checkpoint(folder, accelerator, policy, optimizer, state, args.keep_checkpoints)
        if reason:
            stop(reason, 130 if is_interrupted else 2)

    # 7. evaluate and save
    with accelerator.autocast():
        after = evaluate(actor, ref, reward, eval_queries, eval_contexts, end, tokenizer, args)
    weights = accelerator.get_state_dict(policy)  # every rank has its part in putting them together
    if rank == 0:
        curves = ("objective/scores", "objective/kl", "objective/kl_coef", "ppo/policy/entropy")
        with writing(folder):
            plot_curves(folder, "ppo/episode", curves)
            show_samples(folder, before, after)
            save_model(folder / "policy", actor.lm, tokenizer, weights)
    policy, optimizer = accelerator.free_memory(policy, optimizer)  # first the model, or gloo can wait for ever
    accelerator.end_training()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: stop("interrupted before training began", 130))
    main(*parse_args("rloo"))
