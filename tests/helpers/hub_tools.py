"""A hub cache with a stand-in for every file that a preset names: models and tables."""

import json
import random
from pathlib import Path
from typing import Any

from tiny_models import values
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config
from transformers import PreTrainedTokenizerFast as Fast

LABELS = "datasets--vwxyzjn--lm-human-preferences"
PAD = 50259
ROWS = 12  # of every table
EOS = "<|endoftext|>"
GPT2 = "models--gpt2"
SMALL = values("n_embd=8 n_layer=1 n_head=2 n_positions=1024")


def make_tokenizer() -> Any:
    """A byte-level tokenizer of GPT-2's size, of bytes and " w256", " w257", ..; EOS is last."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [*(f"\u0120w{i}" for i in range(256, 50_256)), EOS]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Fast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, unk_token=EOS)


def snapshot(cache: Path, name: str) -> Path:
    """The folder of a repository's files in the cache."""
    folder = cache / name / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (cache / name / "refs").mkdir()
    (cache / name / "refs" / "main").write_text("abc")
    return folder


def make_label(rng: random.Random, length: int, response: int) -> dict[str, Any]:
    """A label as OpenAI's: a padded query of up to `length` tokens, four samples and the best."""
    query = rng.sample(range(256, 50_256), rng.randrange(length // 4, length + 1))
    label = {"query": query + [PAD] * (length - len(query)), "best": rng.randrange(4)}
    for i in range(4):
        label[f"sample{i}"] = rng.sample(range(50_257), response)
    return label


def fill(cache: Path) -> Path:
    """The files of all presets of all scripts."""
    rng = random.Random(0)
    folder = snapshot(cache, GPT2)
    AutoModelForCausalLM.from_config(GPT2Config(**SMALL)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)

    folder = snapshot(cache, LABELS)
    for task, name, length, response in (
        ("sentiment", "5k", 64, 24),
        ("descriptiveness", "5k", 64, 24),
        ("cnndm", "60k", 500, 75),
        ("tldr", "60k", 500, 75),
    ):
        (folder / task).mkdir()
        labels = [make_label(rng, length, response) for _ in range(ROWS)]
        (folder / task / f"offline_{name}.json").write_text(json.dumps(labels))
    return cache
