"""A reward model from human comparisons, in one file.

A language model with a scalar head learns which of N responses to a query people like best: cross entropy, one epoch.
Before and after, gain and bias are set so that rewards of the reference policy's samples have mean 0 and deviation 1.
"The original" is OpenAI's lm-human-preferences (Ziegler et al. 2019, arXiv:1909.08593); the tests replay its arrays.

    python train_reward.py                                              # embedded default, two CPU cores
    python train_reward.py sentiment --dtype bf16 --track               # OpenAI's sentiment labels on one GPU
    accelerate launch --num_processes 8 train_reward.py sentiment       # the same on eight: batch sizes are global
Labels: columns query, sample0, sample1, .., best of token ids, or prompt, chosen, rejected of texts or messages. The
result is a Hugging Face folder, reward_model/. Shapes: B comparisons, N responses in each, V vocabulary, d hidden size.
"""

import signal

if __name__ == "__main__":  # Ctrl-C during the imports, which take seconds, ends without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import ctypes
import dataclasses
import fcntl
import importlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from huggingface_hub import hf_hub_download
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.utils.peft_utils import find_adapter_config_file

from tf_adam import make_optimizer

Label = tuple[list[int], list[list[int]], int]  # query, N responses, which is best


@dataclasses.dataclass
class Args:
    """A reward model from labels. The name of a preset may come first: sentiment, descriptiveness, cnndm, tldr."""

    # the run
    seed: int = 1  # Seed of query order, sampling and shuffles (rank r shuffles with seed + 100003 r)
    output_dir: str | None = None  # Folder for all that this run makes (None: runs/<script>-<preset>-<seed>-<time>)
    resume: bool = False  # Go on with the run in --output_dir, whose settings hold where no flag is given; or start it
    checkpoint_every: int = 25  # Updates between checkpoints (0: only when the run is interrupted)
    track: bool = False  # Also log to Weights & Biases (WANDB_MODE=offline works)
    # models
    base_model: str = "tiny/model"  # Reward model and reference policy start from this causal LM: a folder or a hub id
    dtype: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast with fp32 master weights, fp32 logits and values
    lora_rank: int = 0  # Train only LoRA adapters of this rank on frozen weights, which bf16 holds in bf16 (0: all)
    lora_alpha: float = 16.0  # They are scaled by this over the rank
    # the task
    label_dataset: str = "tiny/labels"  # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config]
    num_labels: int | None = None  # Labels to train on (None: the training split); the rest, or `test`, is held out
    query_dataset: str = "tiny/queries"  # A file (json, jsonl, csv, parquet, txt), a folder, or owner/name[:config]
    token_ids_of: str | None = None  # The model whose token ids stand in columns of them (None: --base_model)
    query_length: int = 32  # Longest query, in tokens
    long_queries: Literal["drop", "keep_start", "keep_end"] | None = None  # None: drop, or with --end_text keep_start
    query_prefix: str = ""  # Text before every query that the policy reads (the reward model does not)
    query_suffix: str = ""  # Text after every query that the policy reads (the reward model does not)
    start_text: str | None = "."  # One token: a query begins after its first occurrence in the text (None: at once)
    end_text: str | None = "."  # One token: a query is cut back to its last occurrence (None: it is not)
    response_length: int = 24  # Tokens sampled per response
    temperature: float = 0.7  # Divides the logits for sampling, log-probabilities and entropies
    truncate_token: str | None = "."  # A response ends with this token; `eos`: the tokenizer's; None: it never ends
    normalization_samples: int = 512  # Samples that set gain and bias, before and after (0: leave them at 1 and 0)
    # the algorithm
    batch_size: int = 8  # Comparisons per update, over all devices
    micro_batch_size: int = 128  # Rows per forward and backward pass on one device; gradients accumulate
    lr: float = 2e-3  # Learning rate, see the schedule
    lr_schedule: Literal["linear", "constant"] = "linear"  # It decays to 0, or stays
    lr_warmup: int = 0  # Updates n in which it rises: the first has lr / (n + 1)
    adam: Literal["tf", "torch"] = "tf"  # Adam as TensorFlow computes it (original), or torch.optim.Adam
    adam_eps: float = 1e-5  # Adam's epsilon
    adam_betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.999])  # Decay rates of its averages
    weight_decay: float = 0.0  # Of matrices, decoupled as in AdamW
    max_grad_norm: float | None = None  # Gradients of a larger norm are scaled down to it


FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
HUB = {"base_model": "gpt2", "token_ids_of": "gpt2", "start_text": None, "end_text": None}
BOOK = HUB | {"query_length": 64, "num_labels": 4_992, "batch_size": 32, "micro_batch_size": 64, "lr": 5e-5}
POST = HUB | {"query_length": 500, "num_labels": 46_000, "batch_size": 16, "micro_batch_size": 4, "lr": 2.5e-5}
POST |= {"query_suffix": "\n\nTL;DR:", "response_length": 75, "truncate_token": "\n", "long_queries": "keep_start"}
NEWS = {"query_prefix": "Article:\n\n", "temperature": 0.5}
PRESETS = {"tiny": Args()}  # OpenAI's launch.py
for name, task in {"sentiment": BOOK, "descriptiveness": BOOK, "cnndm": POST | NEWS, "tldr": POST}.items():
    file = f"{FILES}/{name}/{'offline_5k' if task is BOOK else 'offline_60k'}.json"
    PRESETS[name] = Args(**task, label_dataset=file, query_dataset=file)


def main(preset: str, args: Args) -> None:
    """Set-up and first normalisation, then one loop over updates: train, log; at the end normalise, evaluate, save."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), log_with="wandb" if args.track else None)
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    if args.batch_size % world or args.normalization_samples % world or args.normalization_samples == 1:
        raise ValueError(f"--batch_size, --normalization_samples: multiples of {world} processes, not 1, would do")
    accelerator.gradient_accumulation_steps = math.ceil(args.batch_size // world / args.micro_batch_size)
    tokenizer = fetch(AutoTokenizer, "base_model", args)
    labels, held_out = load_labels(tokenizer, args)
    queries = load_queries(tokenizer, args, max(1, 2 * args.normalization_samples))
    longest = max(len(query) + len(response) for query, responses, _ in labels + held_out for response in responses)
    longest = max(longest, *(len(query["context"]) + args.response_length for query in queries))
    ref = Actor(load("base_model", args, tokenizer, longest, device).requires_grad_(False))
    model = load("base_model", args, tokenizer, longest, device, num_labels=1)
    torch.manual_seed(args.seed)
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    pads = tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer("\0", add_special_tokens=False).input_ids, 0, 1
    model.config.pad_token_id = pad = next(x for x in pads if x not in (None, tokenizer.eos_token_id))
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)  # it ends no text: transformers reads the last token too
    fast_math(device, args.dtype)

    # 1. normalise on samples of the reference policy
    wrapped, statistics = RewardModel(freeze(model, args)), {}
    if args.normalization_samples:
        rewards = reference_rewards(accelerator, wrapped, ref, queries, 0, args)
        statistics["before"] = normalize(rewards, wrapped.gain.data, wrapped.bias.data)
    wrapped, optimizer = accelerator.prepare(wrapped, make_optimizer(wrapped, args))
    reward = accelerator.unwrap_model(wrapped)  # the same module, for forward passes without gradients
    folder, state = open_run(accelerator, args, preset, {"update": 0})
    first, signals = state["update"], []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))

    # 2. train: one epoch over the labels, in the order that rank 0 draws
    order, num_updates = np.random.RandomState(args.seed).permutation(len(labels)), len(labels) // args.batch_size
    for update in (bar := tqdm(range(first, num_updates), initial=first, total=num_updates, disable=rank > 0)):
        start = update * args.batch_size
        decay = 1 - start / len(labels) if args.lr_schedule == "linear" else 1
        for group in optimizer.param_groups:
            group["lr"] = decay * min(1, (update + 1) / (args.lr_warmup + 1)) * group["initial_lr"]
        mine = [labels[i] for i in order[start : start + args.batch_size][rank::world]]
        records = reward_update(accelerator, wrapped, optimizer, mine, args)
        # 3. log
        records.append({"signals": tuple(torch.tensor([len(signals), 1.0], device=device))})
        metrics = {"train/labels": start + args.batch_size, "train/lr": optimizer.param_groups[0]["lr"]}
        metrics |= reduce_means(accelerator, records)
        stopping = metrics.pop("signals") > 0
        if rank == 0:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        accelerator.log(metrics, step=update + 1)
        bar.set_postfix({name: f"{metrics[f'train/{name}']:.3g}" for name in ("loss", "accuracy")})
        if stopping or args.checkpoint_every and (update + 1) % args.checkpoint_every == 0:
            save_checkpoint(accelerator, folder, state | {"update": update + 1})
        if stopping:
            raise KeyboardInterrupt

    # 4. normalise again, 5. evaluate and save
    sampled = reference_rewards(accelerator, reward, ref, queries, 1, args) if args.normalization_samples else None
    parts = [held_out[i : i + args.micro_batch_size] for i in range(0, len(held_out), args.micro_batch_size)]
    with torch.no_grad():
        rewards = [label_rewards(reward, part, device)[0].cpu() for part in parts] or [torch.zeros(0, 1)]
    weights = accelerator.get_state_dict(wrapped)  # every rank has its part in putting them together
    if rank == 0:
        gain, bias = weights["gain"].cpu(), weights["bias"].cpu()
        best, rewards = torch.tensor([x for *_, x in held_out], dtype=torch.long), (torch.cat(rewards) - bias) / gain
        if sampled is not None:
            statistics["after"] = normalize(sampled.cpu(), gain, bias)
        rewards = gain * rewards + bias
        statistics |= {"gain": gain.item(), "bias": bias.item()}
        if held_out:
            statistics["test/accuracy"] = hits(rewards, best).double().mean().item()
            statistics["test/constant"] = best.bincount().max().item() / len(best)  # the most frequent answer
        model.config.reward_gain, model.config.reward_bias = gain.item(), bias.item()
        save_model(folder / "reward_model", model, tokenizer, weights)
        (folder / "results.json").write_text(json.dumps(statistics, indent=2))
        accelerator.log({"test/accuracy": statistics.get("test/accuracy", math.nan)})
        texts = [(tokenizer.decode(query), tokenizer.batch_decode(responses), x) for query, responses, x in held_out]
        names = ("query", "responses", "best", "rewards")
        rows = [dict(zip(names, (*x, y), strict=True)) for x, y in zip(texts, rewards.tolist(), strict=True)]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tqdm.write(f"{folder}: {statistics}")
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)  # first the model, or gloo can wait for ever
    accelerator.end_training()


# --- the algorithm ----------------------------------------------------------------------------------------------------
def label_rewards(model: Any, labels: list[Label], device: Any) -> tuple[Tensor, Tensor]:
    """Rewards (B, N) of every response to its query, and which is best (B,)."""
    _, last, *inputs = pack([[query, *responses] for query, responses, _ in labels], device)
    rewards = model(last[:, 1:].flatten(), *inputs).view(len(labels), -1)
    return rewards, torch.tensor([best for *_, best in labels], device=device)


def hits(rewards: Tensor, best: Tensor) -> Tensor:
    """Whether the best of N (B,) has the highest of the rewards (B, N); equals count too."""
    return rewards.gather(1, best.unsqueeze(1)).squeeze(1) > rewards.amax(1) - 1e-5


def reward_update(accelerator: Any, model: Any, optimizer: Any, labels: list[Label], args: Args) -> list[Any]:
    """One optimizer step on this rank's share of a batch: mean cross entropy over all ranks. Returns metrics' pairs."""
    records = []
    for part in torch.arange(len(labels)).split(args.micro_batch_size):
        with accelerator.accumulate(model):
            rewards, best = label_rewards(model, [labels[i] for i in part.tolist()], accelerator.device)
            loss = nn.functional.cross_entropy(rewards, best, reduction="sum")
            accelerator.backward(loss * accelerator.gradient_accumulation_steps / len(labels))
            if accelerator.sync_gradients:
                norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of weights in shards
                if not norm.isfinite():  # on all ranks, whose gradients are averaged
                    raise FloatingPointError("the gradient is not finite")
                records.append({"train/gradient_norm": (norm, torch.ones_like(norm))})
            optimizer.step()
            optimizer.zero_grad()
        count = torch.tensor(float(len(best)), device=best.device)
        records.append({"train/loss": (loss.detach(), count), "train/accuracy": (hits(rewards, best).sum(), count)})
    return records


def gain_and_bias(mean: Any, std: Any, target_mean: float = 0.0, target_std: float = 1.0) -> tuple[Any, Any]:
    """The affine map that takes rewards with `mean` and `std` to the target's. Source: the original's rewards.py."""
    return target_std / std, target_mean - target_std / std * mean


@torch.no_grad()
def reference_rewards(accelerator: Any, reward: Any, ref: Any, queries: list[Any], step: int, args: Args) -> Tensor:
    """Rewards (--normalization_samples,) of untruncated samples of the reference, on all ranks; step moves queries."""
    total, rows = args.normalization_samples, args.normalization_samples // accelerator.num_processes
    mine, rewards = range(accelerator.process_index * rows, (accelerator.process_index + 1) * rows), []
    u = uniforms(args.seed, step, total, args.response_length)
    for part in torch.tensor(mine).split(args.micro_batch_size):
        asked = [queries[(step * total + i) % len(queries)] for i in part.tolist()]
        numbers = u[part].to(accelerator.device)
        responses = sample(ref, [query["context"] for query in asked], numbers, args.temperature).tolist()
        labels = [(query["input_ids"], [response], 0) for query, response in zip(asked, responses, strict=True)]
        rewards.append(label_rewards(reward, labels, accelerator.device)[0].flatten())
    return accelerator.gather(torch.cat(rewards))


def normalize(rewards: Tensor, gain: Tensor, bias: Tensor) -> dict[str, float]:
    """Set gain and bias, which made these rewards, for mean 0 and (biased) std 1; returns both as they are without."""
    raw = (rewards - bias) / gain
    mean, std = raw.mean(), raw.std(correction=0)
    for old, new in zip((gain, bias), gain_and_bias(mean, std), strict=True):
        if not old.copy_(new).isfinite():
            raise ValueError(f"--normalization_samples {len(raw)}: rewards of mean {mean:.3g} and deviation {std:.3g}")
    return {"mean": mean.item(), "std": std.item()}


# --- rollout ----------------------------------------------------------------------------------------------------------
def uniforms(seed: int, update: int, batch: int, length: int) -> Tensor:
    """Uniform numbers (batch, length) to sample with, from seed and update; ranks take their rows of one array."""
    return torch.from_numpy(np.random.default_rng([seed, 1, update]).random((batch, length), dtype=np.float32))


@torch.no_grad()
def sample(policy: Any, contexts: list[list[int]], u: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Responses (B, R) ~ softmax(logits / temperature), one forward per token, without an end. The B / K contexts are
    read once for their K responses. Token t is where the cumulative distribution passes u[:, t], (B, R)."""
    cache, k, width = DynamicCache(config=policy.lm.config), len(u) // len(contexts), max(map(len, contexts))
    ids = torch.tensor([[0] * (width - len(x)) + x for x in contexts], device=u.device)
    mask = torch.tensor([[False] * (width - len(x)) + [True] * len(x) for x in contexts], device=u.device)
    logits = policy(None, ids, mask, None, cache)[0].repeat_interleave(k, 0)
    cache.batch_repeat_interleave(k)
    mask = nn.functional.pad(mask.repeat_interleave(k, 0), (0, u.shape[1]), value=True)
    responses = torch.empty(u.shape, dtype=torch.long, device=u.device)
    for t in range(u.shape[1]):
        if t > 0:
            logits = policy(None, responses[:, t - 1 : t], mask[:, : width + t], None, cache)[0]
        probs = (logits / temperature).softmax(-1)
        if top_p < 1:  # to the least likely that is needed
            high = probs.sort(descending=True).values
            probs = probs * (probs >= high.gather(1, (high.cumsum(1) - high < top_p).sum(1, keepdim=True) - 1))
        cdf = probs.cumsum(-1)
        tokens = torch.searchsorted(cdf, u[:, t : t + 1] * cdf[:, -1:], right=True)
        responses[:, t : t + 1] = tokens.clamp(max=cdf.shape[1] - 1)
    return responses


# --- forward passes ---------------------------------------------------------------------------------------------------
def hidden_at(model: Any, at: Any, ids: Tensor, mask: Tensor, positions: Any = None, cache: Any = None) -> Tensor:
    """Last hidden states (n, d) in fp32 at the n cells `at` of the flattened ids (B, t), or at the B last ones (None).
    mask: (B, past + t), False at padding, or (B, t, t), who sees whom. Positions count real tokens: the original's."""
    if positions is None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if mask.dim() == 3:
        mask = torch.where(mask.unsqueeze(1), 0.0, torch.finfo(torch.float32).min)
    inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=getattr(model.base_model, "autocast", False)):
        hidden = model.base_model(ids, use_cache=cache is not None, **inputs).last_hidden_state
    return (hidden[:, -1].contiguous() if at is None else hidden.flatten(0, 1).index_select(0, at)).float()


class Actor(nn.Module):
    """A language model as a policy."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self._no_split_modules = lm._no_split_modules  # for engines that spread weights over processes

    def forward(self, at: Tensor | None, *inputs: Any) -> tuple[Tensor]:
        """Logits (n, V) in fp32 at the n cells `at`: see hidden_at."""
        return (self.lm.get_output_embeddings()(hidden_at(self.lm, at, *inputs)),)


class RewardModel(nn.Module):
    """reward = gain * logit + bias, around a classifier; its config.json has them as `reward_gain`, `reward_bias`."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm, self._no_split_modules = lm, lm._no_split_modules  # for engines that spread weights over processes
        self.gain, self.bias = (nn.Parameter(torch.tensor([x], device=lm.device)) for x in (1.0, 0.0))

    def forward(self, at: Tensor, *inputs: Any) -> Tensor:
        """Rewards (n,) in fp32 of the texts whose last tokens are in the n cells `at`; the inputs are those of pack."""
        return self.gain * self.lm.score(hidden_at(self.lm, at, *inputs)).sum(-1) + self.bias


def pack(trees: list[list[list[int]]], device: Any) -> tuple[Tensor, ...]:
    """The inputs of hidden_at for n trees [context, branch 1, .., branch K]: ids, who sees whom and positions.
    A context is fed once; its branches see it and themselves. Trees share rows, as wide as the largest: [[a b], [c],
    [d e]], [[f], [g], [h]] and [[i], [j], []] become
        ids   a b c d e    tree  1 1 1 1 1    branch  0 0 1 2 2    positions  0 1 2 2 3
              f g h i j          2 2 2 3 3            0 1 2 0 1               0 1 1 0 1
    Before the inputs come the first and the last cell of every context and branch, (n, 1 + K), counted through all
    rows: [[0, 2, 3], [5, 6, 7], [8, 9, 10]] and [[1, 2, 4], [5, 6, 7], [8, 9, 9]]."""
    lengths = np.array([[len(part) for part in tree] for tree in trees])
    sizes, width = lengths.sum(1), lengths.sum(1).max()
    room, begin = np.full(len(sizes), width), np.zeros_like(sizes)
    for i in np.argsort(-sizes, kind="stable"):  # first fit, the largest first
        row = (room >= sizes[i]).argmax()
        begin[i], room[row] = (row + 1) * width - room[row], room[row] - sizes[i]
    first, cells = begin[:, None] + lengths.cumsum(1) - lengths, np.zeros((4, (room < width).sum() * width), int)
    for i, tree in enumerate(trees):
        at, branch = slice(begin[i], begin[i] + sizes[i]), np.repeat(np.arange(len(tree)), lengths[i])
        positions = np.arange(sizes[i]) - (first[i] - begin[i] - len(tree[0]))[branch] * (branch > 0)
        cells[:, at] = [x for part in tree for x in part], positions, np.full(sizes[i], i + 1), branch
    ids, positions, tree, branch = torch.from_numpy(cells).view(4, -1, width).to(device)
    sees = (branch == 0).unsqueeze(1) | (branch.unsqueeze(1) == branch.unsqueeze(2))
    sees &= tree.unsqueeze(1) == tree.unsqueeze(2)
    first = torch.from_numpy(first).to(device)
    return first, first + torch.from_numpy(lengths).to(device) - 1, ids, sees.tril(), positions


# --- models and data --------------------------------------------------------------------------------------------------
def fast_math(device: torch.device, dtype: str) -> None:
    """TF32 for fp32 heads under bf16; on a CPU oneDNN's product, unless that is bf16; glibc keeps its memory (10 %)."""
    for option in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        getattr(ctypes.CDLL(None), "mallopt", max)(*option)  # other libraries have none
    if device.type == "cpu" or dtype == "bf16":
        torch.set_float32_matmul_precision("medium" if device.type == "cpu" else "high")
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    if ((x @ x).double() - x.double() @ x.double()).abs().max() > 1e-4:
        torch.set_float32_matmul_precision("highest")


def find(name: str) -> str:
    """The path of what is there, here or beside this script, or of hf://datasets/owner/name/file; or else a hub id."""
    if match := re.fullmatch("hf://datasets/([^/]+/[^/]+)/(.+)", name):
        return hf_hub_download(*match.groups(), repo_type="dataset")
    path = next((x for x in (Path(name).expanduser(), Path(__file__).parent / name) if x.exists()), None)
    if path is None and re.search(r"^[./~]|\.(jsonl?|csv|parquet|txt|gz)$", name, re.IGNORECASE):
        raise FileNotFoundError(f"{name}: there is no such file or folder")
    return str(path or name)


@contextlib.contextmanager
def blame(flag: str, args: Any, why: str = "") -> Any:
    """What goes wrong in here becomes a ValueError of one line: the flag, its value, and why."""
    try:
        yield
    except Exception as error:
        reason = why or str(error if isinstance(error, ValueError) else error.__cause__ or error) or repr(error)
        raise ValueError(f"--{flag} {getattr(args, flag)}: {' '.join(reason.split())[:300]}") from error


def fetch(auto_class: Any, flag: str, args: Any, **kwargs: Any) -> Any:
    """auto_class.from_pretrained of the folder or hub id that the flag names."""
    with blame(flag, args):
        made = auto_class.from_pretrained(find(getattr(args, flag)), trust_remote_code=False, **kwargs)
        if auto_class is AutoTokenizer and len(made) < 2:  # transformers makes one up
            raise ValueError("has no tokenizer")
        return made


@torch.no_grad()
def load(flag: str, args: Any, tokenizer: Any, longest: int, device: Any, **kwargs: Any) -> Any:
    """A model in fp32, with all its weights and a LoRA adapter's, without dropout as the original. With bf16 its trunk
    is autocast, but no head: logits of 100 in bf16 are off by 0.25. ValueError for what would be wrong in silence."""
    name, own = f"--{flag} {getattr(args, flag)}", args
    if adapter := find_adapter_config_file(find(getattr(args, flag))):
        if args.lora_rank and flag == "base_model":  # what is saved would name the base of its base
            raise ValueError(f"{name}: is an adapter; --lora_rank 0, or the merged model, would do")
        args = dataclasses.replace(args, **{flag: json.loads(Path(adapter).read_text())["base_model_name_or_path"]})
        own = own if Path(adapter).with_name("config.json").exists() else args
    text = (config := fetch(AutoConfig, flag, own, **kwargs)).get_text_config()
    auto_class = AutoModelForSequenceClassification if kwargs or flag == "reward_model" else AutoModelForCausalLM
    how = {"attn_implementation": "eager" if device.type == "cpu" else "sdpa"}  # there 3 to 4 times faster
    how |= {"config": config, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = fetch(auto_class, flag, args, **how)
    odd = [x for x in info["unexpected_keys"] if re.search(r"\.\d+\..*weight$", x)]
    if odd := odd + [x for x in info["missing_keys"] if not kwargs and not adapter]:
        raise ValueError(f"{name}: {min(odd)} is not both in its weights and in a {type(model).__name__} of its config")
    if adapter:
        peft = importlib.import_module("peft")
        model = peft.PeftModel.from_pretrained(model, os.path.dirname(adapter)).merge_and_unload().requires_grad_(True)
    for module in model.to(device).modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a pad that is also the eos gets its gradient
        if type(getattr(module, "act", None)).__name__ == "NewGELUActivation":
            module.act = nn.GELU(approximate="tanh")  # the same function as one kernel instead of eight
    window, top = getattr(text, "max_position_embeddings", longest), max(tokenizer.get_vocab().values())
    if top >= (size := model.get_input_embeddings().num_embeddings) or longest > window:
        raise ValueError(f"{name}: has {size} embeddings for token {top}, a window of {window} for {longest} tokens")
    lm_head, x = model.get_output_embeddings(), [i % size for i in range(longest)]
    trees = [[x[5:] or x, x[:2], x[2:7], x[:1]], [x[:1], x[1:3], x[:2], x[:3]]]
    texts = [torch.tensor([tree[0] + branch], device=device) for tree in trees for branch in tree[1:]]
    with blame(flag, args, f"a {text.model_type} cannot be run on packed rows (alibi? recurrence?); another would do"):
        _, last, *inputs = pack(trees, device)
        packed = (lm_head or model.score)(hidden_at(model, last[:, 1:].flatten(), *inputs))
        plain = [model(x).logits[0, -1] if lm_head else model.score(model.base_model(x)[0][0, -1]) for x in texts]
        off = (packed - torch.stack(plain)).abs().max() / (packed.max() - packed.min())
    if off > 1e-3 or getattr(text, "final_logit_softcapping", None):
        raise ValueError(f"{name}: is off by {off:.1%} on packed rows (alibi? a short sliding window? capped logits?)")
    model.base_model.autocast = args.dtype == "bf16"
    return model


def freeze(model: Any, args: Args) -> Any:
    """The model, where only LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on linear layers but the head or, as in
    trlX's hydra, the --unfrozen_layers and what is above them are to be trained."""
    if args.lora_rank:
        head, task = (["score"], "SEQ_CLS") if hasattr(model, "score") else (None, "CAUSAL_LM")
        how = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "modules_to_save": head, "task_type": task}
        model.add_adapter(importlib.import_module("peft").LoraConfig(target_modules="all-linear", **how))
    if layers := getattr(args, "unfrozen_layers", 0):
        with blame("unfrozen_layers", args):
            top = next(next(x for x in model.modules() if isinstance(x, nn.ModuleList))[-layers].parameters())
        for p in itertools.takewhile(lambda p: p is not top, model.parameters()):
            p.requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("base_layer.weight") and args.dtype == "bf16":
            p.data = p.data.bfloat16()
    return model


def token_id(tokenizer: Any, text: str | None) -> int | None:
    """The one token that `text` is (`eos`: the tokenizer's end-of-sequence token); None for None."""
    ids = [tokenizer.eos_token_id] if text == "eos" else tokenizer.encode(text or "", add_special_tokens=False)
    if text is not None and (len(ids) != 1 or ids[0] is None):
        raise ValueError(f"--start_text, --end_text or --truncate_token {text!r}: is tokens {ids}; one would do")
    return ids[0] if ids else None


def cut_query(tokens: list[int], length: int, start: Any, end: Any, long: str = "keep_start") -> list[int]:
    """The query in these tokens, or [] (lm_human_preferences/lm_tasks.py): what comes after the first `start`, unless
    that is the last token, truncated to `length` (or as `long` says), then cut back to the last `end`, which stays."""
    if start is not None and (start not in tokens or tokens.index(start) < len(tokens) - 1):
        tokens = tokens[tokens.index(start) + 1 :] if start in tokens else []
    if len(tokens) > length:
        tokens = {"keep_start": tokens[:length], "keep_end": tokens[-length:], "drop": []}[long]
    if end is not None:
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)] if end in tokens else []
    return tokens


def bos(tokenizer: Any) -> list[int]:
    """The token that a text begins with, as Llama's and Gemma's tokenizers have it, or [] for those that do not."""
    return [token for token in tokenizer("").input_ids[:1] if token == tokenizer.bos_token_id]


def encode(values: list[Any], tokenizer: Any, args: Args) -> list[list[int]]:
    """Token ids, without BOS, of texts, chats (lists of messages) or padded rows of token ids; [] for anything else."""
    reader = tokenizer if args.token_ids_of in (None, args.base_model) else fetch(AutoTokenizer, "token_ids_of", args)
    own, begin, rows = reader.get_vocab() == tokenizer.get_vocab(), bos(tokenizer), []
    for value in values:
        kind, row = type(value[0]) if isinstance(value, list) and value else None, []
        if kind is dict:
            value = tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True)
        if kind is int:
            row = [token for token in value if token != 50259]  # the label files' padding
            value = None if own else reader.decode(row)
        row = tokenizer(value, add_special_tokens=False).input_ids if isinstance(value, str) else row
        if max(row, default=0) >= len(tokenizer):
            raise ValueError(f"there is token {max(row)} of {len(tokenizer)}; another --token_ids_of would do")
        rows.append(row[1:] if begin and row[:1] == begin else row)
    return rows


def load_table(flag: str, args: Any) -> Any:
    """The splits of the file, the folder, or the hub's owner/name[:config] that the flag names; one is `train`."""
    with blame(flag, args):
        path = Path(name := find(getattr(args, flag))).absolute()  # the hub's cache has links
        where = [str(path.parent), None, None, path.name] if path.is_file() else name.split(":")
        splits = datasets.load_dataset(*where)
        if "train" not in splits:
            raise ValueError(f"has splits {list(splits)}; train would do")
        return splits


def load_queries(tokenizer: Any, args: Args, need: int, flag: str = "query_dataset") -> list[dict[str, Any]]:
    """Up to `need` queries in an order drawn from --seed: dicts with what the reward model reads (input_ids), what the
    policy reads (context) and, for a --reward_fn, the columns of the table."""
    table = load_table(flag, args)["train"].shuffle(generator=np.random.default_rng([args.seed, 2]))
    found = [x for x in ("text", "query", "prompt", "messages", "article", "content") if x in table.column_names][:1]
    columns, queries, lost = table.column_names if getattr(args, "reward_fn", None) else [], [], 0
    start, end, begin = token_id(tokenizer, args.start_text), token_id(tokenizer, args.end_text), bos(tokenizer)
    prefix, suffix = encode([args.query_prefix, args.query_suffix], tokenizer, args)
    with blame(flag, args):
        for rows in table.select_columns(columns or found).iter(10_000):  # no more of millions than are needed
            for i, tokens in enumerate(encode(rows[found[0]], tokenizer, args) if found else ()):
                long = args.long_queries or ("drop" if end is None else "keep_start")
                if query := cut_query(tokens, args.query_length, start, end, long):
                    inputs = {"input_ids": begin + query, "context": begin + prefix + query + suffix}
                    queries.append({name: rows[name][i] for name in columns} | inputs)
                lost += not query
            if len(queries) >= need:
                break
        if len(queries) <= getattr(args, "eval_queries", 0):
            raise ValueError(f"{len(queries)} queries in {found} of {table.column_names}; more, or `text`, would do")
    if lost and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"--{flag} {getattr(args, flag)}: left out {lost} rows without text or fitting query\n")
    return queries[:need]


def preference_texts(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """Prompt (or else the common beginning, to a word's end), chosen and rejected; chats as the template has them."""
    prompt, answers = row.get("prompt"), [row["chosen"], row["rejected"]]
    if isinstance(answers[0], list):
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        prompt = tokenizer.apply_chat_template(asked or answers[0][:-1], tokenize=False, add_generation_prompt=True)
        answers = [[*asked, *x[-1:]] if asked else x for x in answers]
        answers = [tokenizer.apply_chat_template(x, tokenize=False) for x in answers]
    elif prompt is None:
        prompt = re.sub(r"\s?\S*\Z", "", os.path.commonprefix(answers))
    else:
        answers = [prompt + answer for answer in answers]
    if not all(answer.startswith(prompt) for answer in answers):
        raise ValueError("an answer does not go on from the prompt")
    return [prompt, *(answer[len(prompt) :] for answer in answers)]


def read_preferences(table: Any, tokenizer: Any, args: Args) -> list[Label]:
    """Labels of a table of preferences. A coin says which of a pair comes first, so that no constant answer is right.
    With --truncate_token eos responses end with it, as those of the policy do."""
    labels, coins = [], np.random.default_rng([args.seed, 3]).integers(0, 2, len(table)).tolist()
    end = [tokenizer.eos_token_id] if args.truncate_token == "eos" else []
    rows = iter(encode([text for row in table for text in preference_texts(row, tokenizer)], tokenizer, args))
    for query, *both, coin in zip(rows, rows, rows, coins, strict=True):
        cut = cut_query(query, args.query_length, None, None, args.long_queries or "drop")
        both = [answer[: (answer + end).index(*end)] + end if end else answer for answer in both]
        both = [answer[: args.response_length] for answer in both]
        if bool(cut) == bool(query) and all(both) and both[0] != both[1]:
            labels.append((bos(tokenizer) + cut, both[::-1] if coin else both, coin))
    if lost := len(table) - len(labels):
        sys.stderr.write(f"left out {lost} of {len(table)} pairs: a text empty, a prompt too long, or both the same\n")
    if lost > 0.1 * len(table):
        raise ValueError(f"{lost} of {len(table)} pairs are of no use; other limits would do")
    return labels


def read_labels(table: Any, tokenizer: Any, args: Args) -> list[Label]:
    """Labels of a table in either format."""
    count = len([x for x in table.column_names if re.fullmatch(r"sample\d+", x)])
    names = ["query", *(f"sample{i}" for i in range(count))]
    if {"chosen", "rejected"} <= set(table.column_names):
        return read_preferences(table, tokenizer, args)
    if count < 2 or not {"best", *names} <= set(table.column_names):
        raise ValueError(f"has columns {table.column_names}; query, sample0, .., best or chosen, rejected would do")
    queries, *samples = (encode(table[name], tokenizer, args) for name in names)
    if not all(type(x) is int and 0 <= x < count for x in table["best"]) or not all(map(all, (queries, *samples))):
        raise ValueError("a query or sample is empty, or best is none of the samples")
    rows = zip(queries, zip(*samples, strict=True), table["best"], strict=True)
    return [(bos(tokenizer) + query, list(responses), best) for query, responses, best in rows]


def load_labels(tokenizer: Any, args: Args) -> tuple[list[Label], list[Label]]:
    """Labels to train on, and held-out ones: the split `test` or `validation`, or what --num_labels leaves."""
    splits = load_table("label_dataset", args)
    table, count = splits["train"], args.num_labels or len(splits["train"])
    with blame("label_dataset", args):
        held_out = splits.get("test", splits.get("validation", table.select([*range(count, len(table))])))
        labels = read_labels(table.select(range(min(count, len(table)))), tokenizer, args)
        if len(labels) < args.batch_size or count > len(table):
            raise ValueError(f"{len(labels)} labels for --num_labels {args.num_labels}, --batch_size {args.batch_size}")
        return labels, read_labels(held_out, tokenizer, args)


# --- the run's folder -------------------------------------------------------------------------------------------------
def open_run(accelerator: Any, args: Args, preset: str, state: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The run's folder, locked, and where the run stands: `state`, or that of the newest checkpoint, now loaded."""
    name = f"runs/{Path(__file__).stem}-{preset}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, world = Path(broadcast_object_list([args.output_dir or name])[0]).expanduser(), accelerator.num_processes
    args.output_dir = str(folder)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        with blame("output_dir", args, "another run is at work there; another folder would do"):
            fcntl.flock(os.open(folder / "lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "metrics.jsonl").open("a" if args.resume else "x").close()
    accelerator.wait_for_everyone()
    state |= {"processes": world, "id": os.urandom(4).hex()}
    if done := max(folder.glob("checkpoints/*/state.json"), default=None):
        with blame("resume", args, f"{done.parent} is damaged; without it the one before would do"):
            accelerator.load_state(str(done.parent))
            state = json.loads(done.read_text())
    if state["processes"] != world:  # shuffles and whitening are per rank
        raise ValueError(f"--resume: {folder} is a run of {state['processes']} processes; as many would do")
    if accelerator.is_main_process:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[: state["update"]]
        os.truncate(folder / "metrics.jsonl", sum(map(len, lines)))
        record = {"script": Path(__file__).stem, "preset": preset, "torch": torch.__version__, "args": vars(args)}
        (folder / "args.tmp").write_text(json.dumps(record, indent=2))
        (folder / "args.tmp").rename(folder / "args.json")
    if args.track:
        run = {"id": state["id"], "name": folder.name, "resume": "allow"}
        accelerator.init_trackers("rlhf", vars(args), {"wandb": run})
    return folder, state


def reduce_means(accelerator: Any, records: list[Any]) -> dict[str, float]:
    """Means of all (sum, count) pairs over records and ranks: one collective and one transfer per update."""
    names = list(dict.fromkeys(name for record in records for name in record))
    pairs = ([torch.stack(record[name]) for record in records if name in record] for name in names)
    totals = accelerator.reduce(torch.stack([torch.stack(pair).double().sum(0) for pair in pairs])).tolist()
    return {name: total / count for name, (total, count) in zip(names, totals, strict=True)}


def save_checkpoint(accelerator: Any, folder: Path, state: dict[str, Any]) -> None:
    """checkpoints/<updates made>; its last file is state.json; two stay. Randomness follows from seed, update, row."""
    path = folder / "checkpoints" / f"{state['update']:07d}"
    accelerator.save_state(str(path))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.sync()
        (path / "state.tmp").write_text(json.dumps(state))
        (path / "state.tmp").rename(path / "state.json")
        for old in sorted(path.parent.glob("*/state.json"))[:-2]:
            shutil.rmtree(old.parent)


def save_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, Tensor], prefix: str = "lm.") -> None:
    """A Hugging Face folder, and value_head.safetensors, of the `weights` of `model`; nothing, if there are none."""
    names = {prefix + name for name, _ in model.named_parameters()} if weights else {}  # tied ones once
    if mine := {name.removeprefix(prefix): x for name, x in weights.items() if name in names}:
        model.save_pretrained(folder, state_dict=mine)
        model.config.save_pretrained(folder), tokenizer.save_pretrained(folder)  # an adapter comes without
        head = {name.split(".")[1]: x for name, x in weights.items() if name.startswith("value_head.")}
        if head and (prefix == "critic." or not any(name.startswith("critic.") for name in weights)):
            save_file(head, folder / "value_head.safetensors")


def parse_args() -> tuple[str, Args]:
    """Name of the preset (`tiny` if a flag comes first) and Args: preset < args.json with --resume < flags."""
    argv = [re.sub("^(--[^=]+=)?none$", r"\1None", word) for word in sys.argv[1:]]
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else "tiny"
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r}: does not exist; one of {', '.join(PRESETS)} would do")
    args = tyro.cli(Args, default=PRESETS[preset], args=argv)
    record = Path(args.output_dir or os.devnull).expanduser() / "args.json"
    if args.resume and args.output_dir is None or not args.resume and record.exists():
        raise ValueError(f"--output_dir {args.output_dir}, --resume {args.resume}: a new folder, or both, would do")
    if record.exists():
        old = json.loads(record.read_text())
        with blame("output_dir", args, f"is a run of {old['script']}.py"):
            preset, args = old["preset"], tyro.cli(Args, default=Args(**old["args"]), args=argv)
        changed = [f"{name} {x} (was {old['args'][name]})" for name, x in vars(args).items() if x != old["args"][name]]
        sys.stderr.write(f"--resume: {', '.join(changed)}\n")
    for name, x in vars(args).items():
        needs = re.match("total|num|eval_q|temp|top|target|score|kl_[th]|max|micro|batch|rloo|(query|response)_l", name)
        if isinstance(x, int | float) and "penalty" not in name and not (0 <= x < math.inf and (x or not needs)):
            raise ValueError(f"--{name} {x}: {'more than 0' if needs else '0 or more'}, and finite, would do")
    return preset, args


if __name__ == "__main__":
    try:
        main(*(run := parse_args()))
    except (KeyboardInterrupt, ArithmeticError, ImportError, OSError, ValueError) as error:
        if os.environ.get("RLHF_DEBUG"):
            raise
        time.sleep(2 * (os.environ.get("RANK", "0") != "0"))  # so that the first process speaks for all
        text = " ".join((str(error) or "stopped by a signal").split())
        if isinstance(error, KeyboardInterrupt | FloatingPointError):
            newest = max(Path(run[1].output_dir).glob("checkpoints/*/state.json"), default="none")
            text += f"; the newest checkpoint: {newest}"
        sys.stderr.write(f"{Path(__file__).name}: {text}\n")
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 2) from None
