"""Models and tokenizers of Hugging Face folders: loading, changes, forward passes."""

import copy
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Conv1D,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from plumbing.launch import UserError, blame, local_path

TokenRows = list[list[int]]


def load_tokenizer(flag: str, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`, a folder or hub id, which is the value of --`flag`."""
    name = local_path(name)
    if name[:1] in "/~." and not os.path.exists(name):
        raise UserError(f"--{flag} {name} does not exist")
    parts = [str(path.parent) for path in Path(name).glob("*/config.json")]
    if parts and not os.path.exists(f"{name}/config.json"):
        raise UserError(f"--{flag} {name} is a run's folder: name a model in it, of {parts}")
    with blame(f"--{flag} {name}"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


@torch.no_grad()
def load_model(
    flag: str,
    name: str,
    auto_class: type,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    args: Any,
) -> PreTrainedModel:
    """The model `name` of --`flag`, checked: on the CPU, in fp32, and without dropout, as OpenAI's.
    It computes as --dtype and --gradient_checkpointing say. --base_model may lack a reward head."""
    name = local_path(name)
    what = f"--{flag} {name}"
    is_base = flag == "base_model"
    vocabulary = tokenizer.get_vocab()
    if not is_base and load_tokenizer(flag, name).get_vocab() != vocabulary:
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
    if is_base:
        if "SequenceClassification" not in str(model.config.architectures):  # it gets a new head
            info["missing_keys"].discard("score.weight")
        if "label_dataset" in vars(args):  # train_reward.py may continue from a reward model
            info["unexpected_keys"].discard("score.weight")
    check_weights(model, info, head, what)
    if hasattr(model.config, "output_router_logits"):  # the experts' extra loss fails with a cache
        model.config.output_router_logits = False
    if is_base:  # a trial: an error in saving after the last update would come too late
        architectures = model.config.architectures
        with blame(f"{what} cannot be saved"), TemporaryDirectory() as folder:
            save_model(model, tokenizer, folder, {})
        model.config.architectures = architectures  # saving replaces it

    # Every token needs an embedding, but for added ones that neither the template nor an end uses,
    # like Gemma 3's for images.
    ends = f"{tokenizer.bos_token}{tokenizer.eos_token}{args.truncate_token}"
    used = f"{tokenizer.chat_template}{ends}"
    added = tokenizer.get_added_vocab()
    with blame(what):
        top = max(i for text, i in vocabulary.items() if text not in added or text in used)
        check_model(model, top, longest)
    patch_layers(model, args.dtype, max(vocabulary.values()) + 1)
    if args.gradient_checkpointing:
        recompute_activations(model)
    return model


def check_weights(model: PreTrainedModel, info: dict, head: str, what: str) -> None:
    """UserError for models that cannot be trained, and for weights that do not fit the model.
    transformers only warns of these: `info` is its report."""
    kind = type(model).__name__
    if getattr(model.config, "quantization_config", None):
        raise UserError(f"{what} is quantized: save a copy in fp32 or bf16 first (`dequantize()`)")
    if hasattr(model, "peft_config"):
        raise UserError(f"{what} is an adapter: merge it first (peft's merge_and_unload)")
    if head == "score" and not hasattr(model, head):
        raise UserError(f"{what}: a {kind} is not supported, as it has no `score`")
    # The file may also have another head, but not a reward model's, and old attention masks
    # (attn.bias). Nothing else of a layer (`h.3.`), or of this head (a bias), may be left unused.
    left_over = rf"\.\d+\.(?!.*\b(attn|attention)\.(masked_)?bias$)|^({head}|score)\."
    wrong = {key for key in info["unexpected_keys"] if re.search(left_over, key)}
    wrong |= info["missing_keys"] | {str(key) for key in info["mismatched_keys"]}
    if wrong:
        raise UserError(f"{what}: the weights do not fit a {kind}: {min(wrong)}")


def check_model(model: PreTrainedModel, top: int, longest: int) -> None:
    """UserError for too few embeddings, too short a window, or a trunk that gives other states for
    a padded text, read through a cache, than for the text alone. The text has no meaning."""
    size = model.get_input_embeddings().num_embeddings
    window = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if top >= size:
        raise UserError(f"has {size} embeddings, too few for token {top}")
    if longest > window:
        raise UserError(f"has a window of {window} tokens, too short for texts of {longest}")
    # `ours`: the first token is masked, as padding; the next ones fill a cache, with which the last
    # one is read. `plain`: the same text, without padding or cache.
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


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str, weights: dict
) -> None:
    """Writes a Hugging Face folder with these weights."""
    # The policy was trained to be sampled from all tokens, whatever --base_model advises. Chat
    # models may name the end of a turn in their generation config alone.
    ends = {}
    for config in (model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            if token is not None:
                ends[name] = token
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, **ends)
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def patch_layers(model: PreTrainedModel, dtype: str, num_tokens: int) -> None:
    """Changes how the model computes. Padding's embedding is trained like any other, tokens without
    an embedding are an error, and logits end at `num_tokens`, as some models have more embeddings
    than tokens. With dtype "bf16" the trunk computes in bf16, but heads do not."""
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # else an eos that is also the padding gets no gradient
        if type(getattr(layer, "act", None)).__name__ == "NewGELUActivation":
            layer.act = nn.GELU(approximate="tanh")  # the same, as one kernel and not eight
    if dtype == "bf16":
        trunk = model.get_decoder()  # not base_model: OPT calls only the decoder in it
        trunk.forward = partial(run_in_bf16, trunk.forward)
    embedding = model.get_input_embeddings()
    if num_tokens > embedding.num_embeddings:  # some added tokens have none: see load_model
        embedding.register_forward_pre_hook(refuse_unknown_tokens)
    head = model.get_output_embeddings()
    if head is None:  # a classifier
        return
    # With a frozen head and states that are not contiguous, torch would copy the head's weights for
    # every row of the batch, and take 2 to 50 times as long.
    head.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())
    if head.out_features > num_tokens:
        head.register_forward_hook(lambda _, inputs, logits: logits[..., :num_tokens])


def refuse_unknown_tokens(embedding: nn.Embedding, inputs: tuple[Tensor]) -> None:
    """UserError for a token without an embedding. A sampled token, which comes alone, has one."""
    (ids,) = inputs
    if ids.shape[1] > 1 and ids.max() >= embedding.num_embeddings:
        raise UserError(f"a text has token {ids.max()}, for which the model has no embedding")


def recompute_activations(model: PreTrainedModel) -> None:
    """For --gradient_checkpointing: the backward pass computes activations again. UserError if the
    model's layers are not made for it."""
    # transformers' own checkpointing needs train mode, in which dropout acts.
    blocks = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError("--gradient_checkpointing: the model does not support it")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def run_in_bf16(forward: Callable, *inputs: Any, **named: Any) -> ModelOutput:
    """A trunk's output by autocast, but its states in fp32: bf16 would round a logit of about 100
    by up to 0.25."""
    with torch.autocast(PartialState().device.type, torch.bfloat16):
        output = forward(*inputs, **named)
    output.last_hidden_state = output.last_hidden_state.float()
    return output


def with_adapters(model: PreTrainedModel, rank: int, alpha: float) -> PreTrainedModel:
    """The same with LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on all linear layers but the
    head. All other weights are the model's own, and frozen. UserError without peft."""
    with blame("--lora_rank"):
        from peft import LoraConfig

        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        weights = {id(p): p for p in model.parameters()}  # deepcopy's memo: it copies none of these
        adapted = copy.deepcopy(model, weights)
        adapted.add_adapter(config)
    return adapted


def freeze(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """The model on its device, not trained. With dtype "bf16" linear layers are held in bf16, in
    half the memory, as autocast would round them anyway. Other weights stay in fp32."""
    model.requires_grad_(False)
    for module in model.base_model.modules():
        if dtype == "bf16" and isinstance(module, nn.Linear | Conv1D):
            module.weight.data = module.weight.bfloat16()  # not the bias: Falcon adds it in fp32
    return model.to(PartialState().device)


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


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    cache: Cache | None = None,
    last: int | None = None,
) -> ModelOutput:
    """The output of a trunk for ids (B, T). With `last`, that of a language model: logits
    (B, last, V) at the last tokens, and as last_hidden_state the states that its head read, which
    are (B, last, d), or in a few models (B, T, d). With a cache, ids follow what is in it, and mask
    covers both. Positions count real tokens, as the original's do."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding has position 0, but is masked
    run = partial(
        model,
        ids,
        attention_mask=mask,
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
    )
    if last is None:
        return run()
    # A hook notes what the head reads: transformers returns hidden states of all layers or of none.
    states = []
    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])):
        output = run(logits_to_keep=last)
    output.last_hidden_state = states[0]
    # A few models give all logits. Others' are not cut: a view takes memory in the backward pass.
    if output.logits.shape[1] > last:
        output.logits = output.logits[:, -last:]
    return output


def pad_rows(rows: TokenRows) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on the left, and a mask, which is False at padding."""
    # At least 2: a pass over all but the last token must not be empty on some processes alone.
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


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a tensor, which may be sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
