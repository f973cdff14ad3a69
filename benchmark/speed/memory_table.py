"""Computes how much GPU memory a run of ppo_rlhf.py needs, for models of 0.5B to 8B weights.

    python benchmark/speed/memory_table.py            # the table of docs/running.md
    python benchmark/speed/memory_table.py --model 0.5B --query 512
    python benchmark/speed/memory_table.py --check    # a small model, computed and measured

Nothing of this was measured on a GPU. Models are built on torch's meta device, where tensors have
shapes but no data. Autograd says which tensors a forward pass keeps for the backward pass. The rest
is counted by hand: weights, gradients, Adam's averages, frozen models, logits, the cache of
sampling.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)
from transformers import PreTrainedModel as Model

ROOT = Path(__file__).resolve().parents[2]
GB = 1e9


def llama(hidden: int, layers: int, heads: int, intermediate: int, is_tied: bool) -> LlamaConfig:
    """The sizes of a Llama 3."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=intermediate,
        tie_word_embeddings=is_tied,
    )


MODELS = {
    "0.5B": Qwen2Config(  # Qwen2.5-0.5B
        vocab_size=151_936,
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
    ),
    "1B": llama(2048, 16, 32, 8192, is_tied=True),
    "3B": llama(3072, 28, 24, 8192, is_tied=True),
    "8B": llama(4096, 32, 32, 14_336, is_tied=False),
}


@dataclass
class Setting:
    """How a run is set up, on one of `gpus` GPUs; sharded: with FSDP2 over all of them."""

    name: str
    gpus: int = 1
    lora_rank: int = 0
    checkpointing: bool = False
    micro_batch: int = 8  # --micro_batch_size
    batch: int = 128  # --batch_size
    query: int = 256
    response: int = 256
    bytes_per_state: int = 2  # of activations: 2 in bf16, 4 in fp32

    @property
    def sampled(self) -> int:
        """Rows that a process samples at once: its share of the batch."""
        return self.batch // self.gpus


SETTINGS = [
    Setting("full, one GPU"),
    Setting("full, one GPU, checkpointing", checkpointing=True),
    Setting("full, FSDP2 on 8, checkpointing", gpus=8, checkpointing=True),
    Setting("LoRA 16, one GPU", lora_rank=16),
    Setting("LoRA 16, one GPU, checkpointing", lora_rank=16, checkpointing=True),
]


class KeepInputs(torch.autograd.Function):
    """Keeps what GPU kernels of attention keep: queries, keys, values and the output."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output has the shape of the queries; nothing is computed on the meta device."""
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output


def keep_inputs(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention for transformers: (b, heads, T, d) to (b, T, heads, d)."""
    return KeepInputs.apply(query, key, value).transpose(1, 2).contiguous(), None


def build(config: AutoConfig, setting: Setting) -> Model:
    """The model on the meta device, in the number format of its activations."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[setting.bytes_per_state]
    AttentionInterface.register("keep_inputs", keep_inputs)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="keep_inputs")
    return model.to(dtype).eval()


def kept_bytes(model: Model, setting: Setting) -> tuple[int, int]:
    """Bytes that the trunk keeps for the backward pass of a micro-batch, without its weights: for
    all layers, and for a single one."""
    rows = (setting.micro_batch, setting.query + setting.response)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    seen = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes()
        return x

    ids = torch.zeros(rows, dtype=torch.long, device="meta")
    mask = torch.ones((1, 1, rows[1], rows[1]), dtype=torch.bool, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = model.base_model(ids, attention_mask=mask, use_cache=False)
        total = sum(seen.values())
        del output
    return total, total // model.config.num_hidden_layers


def count_weights(model: Model) -> tuple[int, int]:
    """Weights of the linear layers in the trunk, and all the others; tied ones count once."""
    linear = 0
    others = 0
    head = model.get_output_embeddings()
    for module in model.modules():
        for p in module.parameters(recurse=False):
            is_matrix = p.dim() == 2 and not isinstance(module, torch.nn.Embedding)
            if is_matrix and module is not head:
                linear += p.numel()
            elif not (module is head and model.config.tie_word_embeddings):
                others += p.numel()
    return linear, others


def memory(config: AutoConfig, setting: Setting) -> dict[str, float]:
    """Gigabytes on one GPU, by what they are for, at the peak of the update and of sampling; and
    those of the host for each process while it reads its models, one after the other in fp32."""
    model = build(config, setting)
    linear, others = count_weights(model)
    hidden = config.hidden_size
    frozen = setting.bytes_per_state * linear + 4 * others  # as `freeze` has it
    trained = linear + others
    if setting.lora_rank > 0:
        # An adapter of rank r on an n x m layer has r (n + m) weights: at least 2 r sqrt(n m).
        shapes = [p.shape for p in model.base_model.parameters() if p.dim() == 2]
        trained = setting.lora_rank * sum(sum(shape) for shape in shapes[1:])  # not the embedding
    copies = linear * 2 if setting.bytes_per_state == 2 and not setting.lora_rank else 0
    whole = 0
    if setting.gpus > 1:
        # Embedding, head and norms are whole in a pass, and their gradients in a backward pass. Of
        # the layers two are whole (one computes, the next one arrives), with gradients and bf16
        # copies of one. tests/test_engines.py holds that no other tensor is.
        layer = linear / config.num_hidden_layers
        whole = 8 * others + 12 * layer + copies / config.num_hidden_layers
        copies = 0
    policy = 16 * trained / setting.gpus + copies + (frozen if setting.lora_rank else 0)
    reference = 0 if setting.lora_rank else frozen  # LoRA shares the frozen weights
    reward = frozen

    total, per_layer = kept_bytes(model, setting)
    tokens = setting.micro_batch * (setting.query + setting.response)
    if setting.checkpointing:
        inputs = tokens * hidden * 4 * config.num_hidden_layers  # autocast leaves them in fp32
        total = inputs + per_layer
    logits = 5 * 4 * setting.micro_batch * setting.response * config.vocab_size
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = heads * hidden // config.num_attention_heads
    length = setting.query + setting.response
    per_token = 2 * config.num_hidden_layers * width * setting.bytes_per_state
    cache = per_token * length * setting.sampled
    drawing = setting.sampled * config.vocab_size * (4 * 4 + 8)  # logits thrice, a sum in fp64
    update = total + logits + whole
    sampling = cache + drawing + whole / 2
    return {
        "policy": policy / GB,
        "reference": reference / GB,
        "reward model": reward / GB,
        "update": update / GB,
        "sampling": sampling / GB,
        "peak": (policy + reference + reward + max(update, sampling)) / GB,
        "host": 4 * (linear + others) / GB,  # test_models.py measures it for a small model
    }


def table(models: list[str], sizes: dict[str, int]) -> str:
    """The table in Markdown: a row for each model and setting, with other sizes than its own."""
    names = ["policy", "reference", "reward model", "update", "sampling", "peak", "host"]
    lines = [f"| model | setting | {' | '.join(names)} |", "| --- | --- |" + " ---: |" * len(names)]
    for model in models:
        for setting in SETTINGS:
            parts = memory(MODELS[model], replace(setting, **sizes))
            cells = " | ".join(f"{parts[name]:.1f}" for name in names)
            lines.append(f"| {model} | {setting.name} | {cells} |")
    return "\n".join(lines)


def check() -> str:
    """A run of a 12x768 model in fp32, on a GPU if there is one, and the sum for it."""
    config = GPT2Config()
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(ROOT / "tiny/model").save_pretrained(folder)
        flags = "--reward_fn tiny.rewards:happy --batch_size 8 --micro_batch_size 8 --lr 1e-5"
        flags += " --eval_queries 4 --total_episodes 8 --checkpoint_every 0 --num_epochs 1"
        command = [sys.executable, str(ROOT / "ppo_rlhf.py"), "--base_model", folder]
        command += ["--output_dir", f"{folder}/run", *flags.split()]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise SystemExit("ppo_rlhf.py has failed")
        last = Path(folder, "run/metrics.jsonl").read_text().splitlines()[-1]
        on_gpu = json.loads(last)["peak_memory_gb"]
    parts = memory(config, Setting("", query=32, response=24, batch=8, bytes_per_state=4))
    computed = parts["peak"] - parts["reward model"]
    on_cpu = usage.ru_maxrss * 1024 / GB
    measured = f"{on_gpu:.2f} GB" if on_gpu else f"{on_cpu:.2f} GB with Python and its libraries"
    return f"computed {computed:.2f} GB, measured {measured}"


def main() -> None:
    """Prints the table, or the check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", choices=MODELS, action="append")
    for name in ("query", "response", "batch", "micro_batch"):
        default = getattr(SETTINGS[0], name)
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = vars(parser.parse_args())
    is_check = sizes.pop("check")
    models = sizes.pop("model") or list(MODELS)
    text = check() if is_check else table(models, sizes)
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
