"""Models and tokenizers from Hugging Face folders: loading and checking, precision, adapters, and
one forward pass for all scripts. Nothing here knows an algorithm."""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Conv1D,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from plumbing.run import ROOT, UserError, blame

TokenRows = list[list[int]]


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
    with blame("--lora_rank"):
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


def forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Cache | None = None, **options: int
) -> ModelOutput:
    """The output of a model, or of its trunk, for ids (B, T). With a cache, ids follow what is in
    it, and mask covers both. Positions count real tokens, as the original's do."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding has position 0, but is masked
    return model(
        ids,
        attention_mask=mask,
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    )


def pad_rows(rows: TokenRows) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on the left, and a mask, which is False at padding."""
    # At least 2 tokens: RLOO reads all but the last in a pass of its own. With FSDP either every
    # process makes this pass, or none.
    longest = max(2, *map(len, rows))
    padded = [[-1] * (longest - len(row)) + row for row in rows]
    ids = torch.tensor(padded, device=PartialState().device)
    return ids.clamp(min=0), ids >= 0


def read_queries(
    model: PreTrainedModel, queries: Tensor, mask: Tensor, k: int, cache: Cache | None = None
) -> Cache:
    """A cache of queries (b, T) for the k texts that follow each: a query is read once, and its
    entries are repeated k times. Gradients flow through the cache."""
    if cache is None:
        cache = Cache(config=model.config)
    unused = forward(model.base_model, queries, mask, cache).last_hidden_state
    # With sharded weights every output needs a gradient: add the unused states, times zero.
    cache.layers[0].keys = cache.layers[0].keys + 0 * unused.sum()
    cache.batch_repeat_interleave(k)
    return cache


def load_tokenizer(flag: str, args: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that the flag names."""
    name = local_path(getattr(args, flag))
    with blame(f"--{flag} {name}"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


@torch.no_grad()
def load_model(
    flag: str, args: Any, auto_class: type, tokenizer: PreTrainedTokenizerBase, longest: int
) -> PreTrainedModel:
    """The model that the flag names: on the CPU, in fp32, and in eval mode, so without dropout, as
    the original. If --base_model has no reward head, train_reward.py gives it a new one."""
    name = local_path(getattr(args, flag))
    what = f"--{flag} {name}"
    if flag != "base_model" and load_tokenizer(flag, args).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{what} has another tokenizer than --base_model: use a --reward_fn")
    head = "lm_head"
    options = {}
    if auto_class is AutoModelForSequenceClassification:
        head = "score"
        options["num_labels"] = 1
    if PartialState().device.type == "cpu":
        options["attn_implementation"] = "eager"  # the faster one; on a GPU transformers chooses
    with blame(what):
        model, info = auto_class.from_pretrained(
            name,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,  # None would ask
            ignore_mismatched_sizes=True,  # they are refused below
            output_loading_info=True,
            **options,
        )
    if getattr(model.config, "quantization_config", None):
        raise UserError(f"{what} is quantized: save a copy in fp32 or bf16 first (`dequantize()`)")
    if hasattr(model, "peft_config"):
        raise UserError(f"{what} is an adapter: merge it first (peft's merge_and_unload)")

    # transformers only warns about weights that are missing, left over or of another size. What is
    # left over may belong to another head, or be the attention mask of an old file (attn.bias), but
    # nothing else of a layer (`h.3.`) or of this head (a bias).
    left_over = rf"\.\d+\.(?!.*\b(attn|attention)\.(masked_)?bias$)|^{head}\."
    wrong = {key for key in info["unexpected_keys"] if re.search(left_over, key)}
    wrong |= info["missing_keys"]
    if flag == "base_model":
        wrong.discard("score.weight")
    wrong |= {str(key) for key in info["mismatched_keys"]}
    if wrong:
        raise UserError(f"{what}: the weights do not fit a {type(model).__name__}: {min(wrong)}")
    with blame(what):
        check_model(model, tokenizer, longest)
    patch_layers(model, args)
    return model


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """UserError for too few embeddings, or too short a window; and for a model whose trunk gives
    other states for a padded text, read through a cache, than for the text alone. This is a first
    test, on tokens of no meaning; check_update of PPO and RLOO tests the run's own texts."""
    size = model.get_input_embeddings().num_embeddings
    top = max(tokenizer.get_vocab().values())
    window = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if top >= size or longest > window:
        raise UserError(
            f"token ids go up to {top}, with {size} embeddings; texts to {longest} tokens, in a "
            f"window of {window}"
        )
    # Ours: the first token as padding, the others but the last into a cache, and the last one
    # through it. Plain: all but the first token, at once.
    numbers = torch.arange(min(longest, 64))[None]
    ids = numbers % top
    mask = numbers > 0
    cache = Cache(config=model.config)
    forward(model.base_model, ids[:, :-1], mask[:, :-1], cache)
    cache.batch_repeat_interleave(1)  # changes nothing, but raises for recurrent models
    ours = forward(model.base_model, ids[:, -1:], mask, cache).last_hidden_state
    plain = model.base_model(ids[:, 1:]).last_hidden_state[:, -1:]
    if not (ours - plain).abs().max() < 1e-3 * plain.std():
        raise UserError("is not supported: padding or a cache changes its results")


def save_policy(
    policy: nn.Module, weights: dict, tokenizer: PreTrainedTokenizerBase, parent: str
) -> None:
    """Writes policy/ and, if there is a critic, critic/, which are Hugging Face folders. A head is
    a file in critic/ if there is one, and else in policy/. So is any module of your own."""
    for part, module in policy.named_children():
        own = {
            name: weights[f"{part}.{name}"]
            for name in module.state_dict()
            if name not in getattr(module, "all_tied_weights_keys", ())  # tied: saved once
        }
        if hasattr(module, "save_pretrained"):
            folder = f"{parent}/{part.replace('lm', 'policy')}"  # lm is saved as policy/
            module.save_pretrained(folder, state_dict=own)
            tokenizer.save_pretrained(folder)
        else:
            reads = "critic" if getattr(policy, "critic", None) else "policy"
            save_file(own, f"{parent}/{reads}/{part}.safetensors")


def local_path(name: str) -> str:
    """The path of a file or folder, or else of one beside the scripts, or else a name on the hub,
    which is returned as it is."""
    places = (os.path.expanduser(name), f"{ROOT}/{name}")
    return next((os.path.abspath(path) for path in places if os.path.exists(path)), name)
