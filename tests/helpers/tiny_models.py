"""Random tiny models of many architectures, and batches of given tokens, for the tests."""

import ast
import atexit
import contextlib
import functools
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import ppo_rlhf
import rloo_rlhf
from plumbing import data as data_module
from plumbing import models as models_module

BOTH = pytest.mark.parametrize("module", [ppo_rlhf, rloo_rlhf])
VOCABULARY = 50
EOS = 0
GAIN = 1.75  # of reward models
BIAS = -0.5
LONGEST = 24  # tokens of a row in these tests


def no_tokenizer(size: int) -> Any:
    """As much of a tokenizer of so many tokens as load_model reads."""
    return SimpleNamespace(
        get_vocab=lambda: {"first": 0, "last": size - 1},
        get_added_vocab=dict,
        chat_template=None,
        eos_token=None,
        bos_token=None,
        save_pretrained=lambda folder: None,
    )


ANY_TOKENIZER = no_tokenizer(VOCABULARY)


def values(text: str) -> dict[str, Any]:
    """Settings, of words with a name and a Python literal."""
    pairs = [word.split("=") for word in text.split()]
    return {name: ast.literal_eval(value) for name, value in pairs}


# GPT-2 has dropout without being told.
COMMON = values("""hidden_size=32 num_hidden_layers=2 num_attention_heads=4 attention_dropout=0.1
vocab_size=50 max_position_embeddings=64 initializer_range=0.25 bos_token_id=0 eos_token_id=0
pad_token_id=None""")
LLAMA = COMMON | values("intermediate_size=64 num_key_value_heads=2")
GEMMA = LLAMA | values("head_dim=8 query_pre_attn_scalar=8 initializer_range=0.15")
NEOX = LLAMA | values("hidden_dropout=0.1 classifier_dropout=0.1")
FALCON = COMMON | values("hidden_dropout=0.1")
OPT = COMMON | values("ffn_dim=64 word_embed_proj_dim=16 init_std=0.25")
MPT = COMMON | values("d_model=32 n_heads=4 n_layers=2 max_seq_len=64")
GRANITE = LLAMA | values("""embedding_multiplier=3.0 attention_multiplier=0.25
residual_multiplier=0.5 logits_scaling=2.0""")
CAPS = values("final_logit_softcapping=5.0 attn_logit_softcapping=3.0")
# Each token takes all experts, so that all are trained.
DEEPSEEK = LLAMA | values("""num_key_value_heads=4 q_lora_rank=16 kv_lora_rank=16 v_head_dim=8
qk_nope_head_dim=8 qk_rope_head_dim=8 moe_intermediate_size=16 n_routed_experts=2 n_group=1
num_experts_per_tok=2 topk_group=1 first_k_dense_replace=1""")
SHORT = {"sliding_window": 8}  # shorter than the texts
MAMBA = COMMON | values("state_size=4")
JAMBA = LLAMA | values("""num_experts=2 attn_layer_period=2 attn_layer_offset=1 mamba_d_state=4
expert_layer_period=2 expert_layer_offset=1 use_mamba_kernels=False""")
GRIFFIN = LLAMA | values("lru_width=32 attention_window_size=32 num_hidden_layers=3")
RWKV = COMMON | values("context_length=64 attention_hidden_size=32")
MINIMAX = LLAMA | values("""head_dim=8 num_local_experts=2 block_size=8
layer_types=['linear_attention','full_attention']""")
CONFIGS = {
    "gpt2": (transformers.GPT2Config, COMMON),
    "gpt_neox": (transformers.GPTNeoXConfig, NEOX),
    "llama": (transformers.LlamaConfig, LLAMA),
    "qwen3": (transformers.Qwen3Config, LLAMA | {"head_dim": 8}),
    "falcon": (transformers.FalconConfig, FALCON | {"alibi": False, "bias": True}),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA | {"sliding_window": 32}),
    "mistral": (transformers.MistralConfig, LLAMA | {"sliding_window": 64}),
    "phi3": (transformers.Phi3Config, LLAMA),
    "opt": (transformers.OPTConfig, OPT),
    "olmo2": (transformers.Olmo2Config, LLAMA),
    "bloom": (transformers.BloomConfig, COMMON),
    "falcon_alibi": (transformers.FalconConfig, FALCON | {"alibi": True}),
    "mpt": (transformers.MptConfig, MPT),
    "gemma2": (transformers.Gemma2Config, GEMMA | CAPS | {"sliding_window": 32}),
    "cohere": (transformers.CohereConfig, LLAMA | {"logit_scale": 0.5}),
    "granite": (transformers.GraniteConfig, GRANITE),
    "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK),
    "mistral_short": (transformers.MistralConfig, LLAMA | SHORT),
    "gemma3_short": (transformers.Gemma3TextConfig, GEMMA | SHORT),
}
NEO = COMMON | values("attention_types=[[['global','local'],1]] window_size=4")
EXPERTS = LLAMA | values("num_local_experts=2 num_experts_per_tok=2 sliding_window=4 head_dim=8")
WORKING = CONFIGS | {  # of these more the passes alone are tested
    "gemma": (transformers.GemmaConfig, GEMMA),
    "glm4": (transformers.Glm4Config, LLAMA | {"head_dim": 8}),
    "gpt_neo": (transformers.GPTNeoConfig, NEO),
    "gpt_oss": (transformers.GptOssConfig, EXPERTS),
    "gptj": (transformers.GPTJConfig, COMMON | {"rotary_dim": 8}),
    "mixtral": (transformers.MixtralConfig, EXPERTS),
    "olmo": (transformers.OlmoConfig, LLAMA),
    "olmo3": (transformers.Olmo3Config, LLAMA | SHORT),
    "qwen2": (transformers.Qwen2Config, LLAMA),
    "smollm3": (transformers.SmolLM3Config, LLAMA),
    "stablelm": (transformers.StableLmConfig, LLAMA),
    "starcoder2": (transformers.Starcoder2Config, LLAMA | SHORT),
}
RECURRENT = {  # whose states a cache of keys and values does not hold
    "mamba": (transformers.MambaConfig, MAMBA),
    "jamba": (transformers.JambaConfig, JAMBA),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig, GRIFFIN),
    "rwkv": (transformers.RwkvConfig, RWKV),
    "minimax": (transformers.MiniMaxConfig, MINIMAX),
}


def make_config(name: str, **changes):
    config_class, values = (WORKING | RECURRENT)[name]
    return config_class(**values | changes)


def randomize(model: nn.Module) -> None:
    """Biases and norms start at 0 and 1, where mistakes in them would not show."""
    for x in model.state_dict().values():
        if x.dim() < 2:
            x += 0.2 * torch.randn_like(x)


def save_tokenizer(folder: Path):
    """A tokenizer of words w1 .. w49 whose pad token is its eos, token 0."""
    words = {"<|endoftext|>": EOS} | {f"w{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def begin_with(tokenizer: Any, first: str) -> None:
    """From now on every text begins with this token, which is the tokenizer's BOS."""
    special = [(first, tokenizer.convert_tokens_to_ids(first))]
    processor = processors.TemplateProcessing(f"{first} $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.bos_token = first


def save_model(folder: Path, name: str, auto_class=AutoModelForCausalLM, **changes):
    """A random model of the architecture, and the tokenizer, in a Hugging Face folder."""
    model = auto_class.from_config(make_config(name, **changes))
    randomize(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_classifier(folder: Path, name: str, **changes) -> Path:
    """The same of a classifier, with one label if `changes` do not say more."""
    changes = {"num_labels": 1} | changes
    return save_model(folder, name, AutoModelForSequenceClassification, **changes)


@functools.cache
def folder_of(name: str) -> Path:
    """The folder, made once, of a causal LM of an architecture whose eos is also the pad; in
    `judge` it has a classifier with GAIN and BIAS, where transformers has one."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_model(folder, name, pad_token_id=EOS)
    if has_classifier(name):
        gains = {"reward_gain": GAIN, "reward_bias": BIAS, "pad_token_id": EOS}
        save_classifier(folder / "judge", name, **gains)
    return folder


def load(folder, flag="base_model", attention="eager", classifier=False, **settings):
    """A model as the scripts load it, for rows of up to LONGEST tokens of any of its embeddings;
    with the attention that they take on a CPU (eager), or what transformers chooses on a GPU; and
    with more settings."""
    auto_class = AutoModelForCausalLM
    if flag == "reward_model" or classifier:
        auto_class = AutoModelForSequenceClassification
    args = ppo_rlhf.Args(**{flag: str(folder)}, **settings)
    device = contextlib.nullcontext()
    if attention != "eager":  # load_model takes its branch for GPUs; weights stay on the CPU
        state = SimpleNamespace(device=torch.device("cuda"))
        device = mock.patch.object(models_module, "PartialState", lambda: state)
    tokenizer = mock.patch.object(models_module, "load_tokenizer", lambda *_: ANY_TOKENIZER)
    with device, tokenizer:
        load = loader(ANY_TOKENIZER, LONGEST, args)
        return load(flag, str(folder), auto_class)


def loader(tokenizer, longest, args):
    """What main calls `load`."""
    return functools.partial(
        models_module.load_model, tokenizer=tokenizer, longest=longest, args=args
    )


def make_lm(name, attention="eager", auto_class=AutoModelForCausalLM, **changes):
    """A language model straight from a config, for tests that are not about loading."""
    torch.manual_seed(0)
    config = make_config(name, **changes)
    model = auto_class.from_config(config, attn_implementation=attention)
    randomize(model)
    return model.eval()


def make_classifier(name="gpt2", **changes):
    auto_class = AutoModelForSequenceClassification
    return make_lm(name, auto_class=auto_class, num_labels=1, **changes)


def make_policy(lm, k: int) -> nn.Module:
    """PPO's policy for one response to a query, with a random value head; RLOO's for more."""
    if k > 1:
        return rloo_rlhf.Actor(lm, rloo_rlhf.Args(rloo_k=k))
    policy = ppo_rlhf.ActorCritic(lm)
    generator = torch.Generator().manual_seed(7)
    nn.init.normal_(policy.value_head.weight, std=0.25, generator=generator)
    return policy


def roll_out(script, policy: nn.Module, args, contexts: list[list[int]], end: int | None = None):
    """A batch of responses to the contexts; RLOO has several for each."""
    contexts = [context for context in contexts for _ in range(getattr(args, "rloo_k", 1))]
    u = script.uniforms(1, 1, len(contexts), args.response_length)
    batch = script.rollout(policy, make_queries(contexts), u, end, args)
    script.set_logprobs(batch, policy, policy, torch.arange(len(u)).view(1, -1), args)
    return batch


def watch_log_probabilities(script, monkeypatch) -> list[int]:
    """How many tensors (b, R, V) of forward_response are there at each of its later calls."""
    alive = []
    forward = script.forward_response

    def watched(*arguments) -> tuple:
        alive.append(sum(ref() is not None for ref in refs))
        all_logprobs, predicted = forward(*arguments)
        refs.append(weakref.ref(all_logprobs))
        return all_logprobs, predicted

    refs = []
    monkeypatch.setattr(script, "forward_response", watched)
    return alive


class Stop(Exception):
    """Raised in the place of a function, to end main where it is called."""


def with_attention(names: Iterable[str]) -> list[tuple[str, str]]:
    """The names, each with eager attention and, where transformers has it, with sdpa; but for
    Gemma 2: see patch_layers."""
    pairs = []
    for name in names:
        pairs.append((name, "eager"))
        model = AutoModelForCausalLM._model_mapping[WORKING[name][0]]
        if model._supports_sdpa and name != "gemma2":
            pairs.append((name, "sdpa"))
    return pairs


def has_classifier(name: str) -> bool:
    return WORKING[name][0] in AutoModelForSequenceClassification._model_mapping


def make_queries(contexts: list[list[int]]) -> list[data_module.Query]:
    """What load_queries returns, without prefixes and suffixes."""
    return [data_module.Query(context, context, {"prompt": ""}) for context in contexts]


def make_batch(contexts: list[list[int]], responses: list[list[int]]) -> SimpleNamespace:
    """As much of a Batch as forward_response reads, for given responses of one length."""
    return SimpleNamespace(contexts=contexts, responses=torch.tensor(responses))


def sample(policy, contexts: list[list[int]], u: Tensor, temperature: float):
    """Responses of a script's policy, and their log-probabilities."""
    cache = models_module.Cache(config=policy.lm.config)
    return ppo_rlhf.sample(policy, cache, contexts, u, temperature)


def new_rows(rows: int, k: int = 1) -> np.ndarray:
    """What main gives to `shuffle`: row numbers, with the k of a query in one row."""
    numbers = np.arange(rows)
    return numbers.reshape(-1, k) if k > 1 else numbers


def random_rows(lengths: Sequence[int], seed: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Rows of random tokens, eos among them, of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    return [row.tolist() for row in rows]


def rows_of(text: str) -> list[list[int]]:
    """Rows of tokens; a slash begins a new row."""
    return [list(map(int, row.split())) for row in text.split("/")]


def full_logits(lm, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (length, V) of each row alone, unpadded, from a plain forward pass of transformers."""
    with torch.no_grad():
        return [lm(torch.tensor([row])).logits[0] for row in rows]


def full_states(model, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The same of the trunk's last hidden states (length, d)."""
    with torch.no_grad():
        return [model.base_model(torch.tensor([row])).last_hidden_state[0] for row in rows]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Equal but for the order of sums in fp32, and not because all of it is the same."""
    assert ours.shape == expected.shape
    assert ours.dtype == torch.float32
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() < 2e-5
