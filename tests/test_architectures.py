"""Architectures that docs/deviations.md names, small and with random weights: log-probabilities
from sampling and from the update are those that transformers gives for each text alone. Those of
tiny_models.CONFIGS are tested more closely in test_models.py."""

import re

import pytest
import tiny_models as tiny
import torch
from conftest import ROOT
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ppo_rlhf
import rloo_rlhf
from plumbing import models as models_module

NAMES = """gemma gemma3_text glm4 gpt_neo gpt_oss gptj mixtral olmo olmo3 qwen2 smollm3 stablelm
starcoder2""".split()
K = 2
LENGTH = 6
CONTEXTS = [row for row in tiny.random_rows((3, 7, 5), seed=1) for _ in range(K)]
SMALL = {  # a name in a config that has one of these words gets this number; the first counts
    r"token_id": 0,
    r"vocab": tiny.VOCABULARY,
    r"position|n_ctx": 64,
    r"key_value_heads": 2,
    r"heads|n_head": 4,
    r"head_dim|rotary_dim": 8,
    r"experts": 2,
    r"layers|n_layer": 2,
    r"intermediate|n_inner": 64,
    r"hidden_size|n_embd": 32,
    r"window": 4,
}


def small(name):
    """A config of this kind, shrunk by the names of its numbers."""
    config_class = CONFIG_MAPPING[name]
    values = {"pad_token_id": None, "dtype": "float32"}
    if name == "gpt_neo":
        values["attention_types"] = [[["global", "local"], 1]]
    for key, value in config_class().to_dict().items():
        matches = [number for words, number in SMALL.items() if re.search(words, key)]
        if matches and type(value) is int:
            values[key] = matches[0]
    return config_class(**values)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_passes_of_the_scripts_are_those_of_transformers(name, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small(name), attn_implementation="eager")
    tiny.randomize(model)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    u = torch.rand(len(CONTEXTS), LENGTH)
    for script in (ppo_rlhf, rloo_rlhf):
        args = script.Args(base_model=str(tmp_path))
        load = tiny.loader(tiny.ANY_TOKENIZER, tiny.LONGEST, args)
        lm = load("base_model", args.base_model, AutoModelForCausalLM)
        policy = tiny.make_policy(lm, 1 if script is ppo_rlhf else K)
        cache = models_module.Cache(config=lm.config)
        responses, sampled = script.sample(policy, cache, CONTEXTS, u, args.temperature)
        batch = tiny.make_batch(CONTEXTS, responses.tolist())
        trained = script.forward_response(policy, batch, args.temperature)[1]["logprobs"]
        for i, context in enumerate(CONTEXTS):
            ids = torch.tensor(context + responses[i].tolist())[None]
            logits = plain(ids, use_cache=False).logits[0, len(context) - 1 : -1]
            logprobs = (logits / args.temperature).log_softmax(-1)
            alone = logprobs.gather(1, responses[i][:, None]).squeeze(1)
            assert (sampled[i] - alone).abs().max() < 1e-3
            assert (trained[i] - alone).abs().max() < 1e-3


# What the page calls these, and those of CONFIGS, without what stands in brackets.
ON_THE_PAGE = {
    "GPT-2": "gpt2",
    "GPT-NeoX": "gpt_neox",
    "OPT": "opt",
    "Bloom": "bloom",
    "Falcon": "falcon",
    "Llama": "llama",
    "SmolLM3": "smollm3",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen 2": "qwen2",
    "Qwen 3": "qwen3",
    "Gemma 1 to 3": "gemma gemma2 gemma3",
    "Phi-3": "phi3",
    "OLMo 1 to 3": "olmo olmo2 olmo3",
    "GLM-4": "glm4",
    "Cohere": "cohere",
    "Granite": "granite",
    "StarCoder 2": "starcoder2",
    "StableLM": "stablelm",
    "DeepSeek-V3": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "GPT-Neo": "gpt_neo",
    "GPT-J": "gptj",
}


def test_what_the_page_calls_supported_is_tested():
    page = (ROOT / "docs/deviations.md").read_text()
    rows = re.findall(r"^\| (.*) \| work \|", page, re.M)
    named = re.sub(r" \(.*?\)", "", ", ".join(rows)).split(", ")
    assert named == [*ON_THE_PAGE]
    assert set(" ".join(ON_THE_PAGE.values()).split()) <= {*NAMES, *tiny.CONFIGS}
