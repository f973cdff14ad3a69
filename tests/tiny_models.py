"""Random tiny models of several architectures, and batches of given tokens, as the tests put them into the scripts."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import ppo_rlhf

VOCABULARY, EOS = 50, 0
COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.25, "bos_token_id": EOS, "eos_token_id": EOS}
COMMON |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": None}
COMMON |= {"max_position_embeddings": 64, "attention_dropout": 0.1}
LLAMA = COMMON | {"intermediate_size": 64, "num_key_value_heads": 2}
GEMMA = LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8}
CONFIGS = {  # GPT-2 has dropout without being told
    "gpt2": (transformers.GPT2Config, COMMON),
    "gpt_neox": (transformers.GPTNeoXConfig, LLAMA | {"hidden_dropout": 0.1, "classifier_dropout": 0.1}),
    "llama": (transformers.LlamaConfig, LLAMA),
    "qwen3": (transformers.Qwen3Config, LLAMA | {"head_dim": 8}),
    "falcon": (transformers.FalconConfig, COMMON | {"alibi": False, "hidden_dropout": 0.1}),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA | {"sliding_window": 32, "initializer_range": 0.15}),
    "mistral": (transformers.MistralConfig, LLAMA | {"sliding_window": 64}),
    "phi3": (transformers.Phi3Config, LLAMA),
    "opt": (transformers.OPTConfig, COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.25}),
    "olmo2": (transformers.Olmo2Config, LLAMA),
}
REFUSED = {
    "bloom": (transformers.BloomConfig, COMMON),
    "falcon with alibi": (transformers.FalconConfig, COMMON | {"alibi": True}),
    "mpt": (transformers.MptConfig, COMMON | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "mamba": (transformers.MambaConfig, COMMON | {"state_size": 4}),
    "gemma2": (transformers.Gemma2Config, GEMMA | {"initializer_range": 0.005}),  # small logits, hardly capped
    "cohere": (transformers.CohereConfig, LLAMA | {"logit_scale": 0.1}),
    "mistral with a short window": (transformers.MistralConfig, LLAMA | {"sliding_window": 8}),
    "gemma3 with a short window": (transformers.Gemma3TextConfig, GEMMA | {"sliding_window": 8}),
}


def make_config(name: str, **changes: Any) -> Any:
    config_class, values = (CONFIGS | REFUSED)[name]
    return config_class(**values | changes)


def randomize(model: torch.nn.Module) -> None:
    """Biases and norms start at 0 and 1, where mistakes in them would not show."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data += 0.2 * torch.randn_like(parameter)


def save_tokenizer(folder: Path) -> Any:
    """A tokenizer of words w1 .. w49 whose pad token is its eos, token 0."""
    words = {"<|endoftext|>": EOS} | {f"w{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def save_model(folder: Path, name: str, auto_class: Any = AutoModelForCausalLM, **changes: Any) -> Path:
    """A random model of the architecture, and the tokenizer, in a Hugging Face folder."""
    model = auto_class.from_config(make_config(name, **changes))
    randomize(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_classifier(folder: Path, name: str, **changes: Any) -> Path:
    return save_model(folder, name, AutoModelForSequenceClassification, num_labels=1, **changes)


def load(folder: Path, flag: str = "base_model", dtype: str = "fp32", **kwargs: Any) -> Any:
    """A model as the scripts load it, for rows of up to 24 tokens of any of its embeddings."""
    args, tokenizer = ppo_rlhf.Args(dtype=dtype, **{flag: str(folder)}), SimpleNamespace(get_vocab=lambda: {"": 0})
    return ppo_rlhf.load(flag, args, tokenizer, 24, torch.device("cpu"), **kwargs)


def load_actor(folder: Path, dtype: str = "fp32") -> ppo_rlhf.ActorCritic:
    """The policy as ppo_rlhf.py loads it, with a random value head instead of one of zeros."""
    actor = ppo_rlhf.ActorCritic(load(folder, dtype=dtype))
    torch.nn.init.normal_(actor.value_head.weight, std=0.25, generator=torch.Generator().manual_seed(7))
    return actor


def make_actor(name: str, attn_implementation: str = "eager", **changes: Any) -> ppo_rlhf.ActorCritic:
    """A policy straight from a config, for tests that are not about loading."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(make_config(name, **changes), attn_implementation=attn_implementation)
    randomize(lm)
    return ppo_rlhf.ActorCritic(lm.eval())


def make_queries(contexts: list[list[int]]) -> list[dict[str, list[int]]]:
    """What `load_queries` returns, without prefixes and suffixes."""
    return [{"input_ids": context, "context": context} for context in contexts]


def make_batch(contexts: list[list[int]], responses: Any, kept: Tensor | None = None) -> dict[str, Any]:
    """What a rollout has before its passes, for given responses (n, R) or (n, K, R), of which `kept` (all) counts."""
    tokens = torch.as_tensor(responses).long()
    kept = torch.ones_like(tokens, dtype=torch.bool) if kept is None else kept
    counts = kept.flatten(0, -2).sum(1).tolist()
    fed = [row[: n - 1] for row, n in zip(tokens.flatten(0, -2).tolist(), counts, strict=True)]
    k = len(fed) // len(contexts)
    trees = [[context, *fed[i * k : i * k + k]] for i, context in enumerate(contexts)]
    return {"trees": trees, "responses": tokens, "kept": kept}


def forward(policy: Any, batch: dict[str, Any], temperature: float = 0.7) -> list[Tensor]:
    """forward_response of all rows, without gradients."""
    with torch.no_grad():
        return ppo_rlhf.forward_response(policy, batch, torch.arange(len(batch["trees"])), temperature)


def random_rows(lengths: Sequence[int], seed: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Rows of random tokens, eos among them, of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def full_logits(lm: Any, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (length, V) of each row alone, unpadded, from a plain forward pass of transformers."""
    with torch.no_grad():
        return [lm(torch.tensor([row])).logits[0] for row in rows]
