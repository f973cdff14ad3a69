"""PPO, RLOO and rewards of random models of nine architectures equal plain forward passes; others are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from run_tools import to_lines
from safetensors.torch import load_file
from tiny_models import COMMON, full_logits, make_config, random_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
import rloo_rlhf

ATOL, COMMON = 2e-5, COMMON | {"pad_token_id": 0}
SMALL = COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
GEMMA = LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8}
OPT = SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "init_std": 0.25}
RIGHT = {name: make_config(name) for name in ("gpt_neox", "llama", "qwen3", "falcon")} | {
    "gemma3": transformers.Gemma3TextConfig(**GEMMA, sliding_window=32),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=64),
    "phi3": transformers.Phi3Config(**LLAMA),
    "opt": transformers.OPTConfig(**OPT),
    "olmo2": transformers.Olmo2Config(**LLAMA),
}
REFUSED = {
    "bloom": transformers.BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4),
    "falcon with alibi": transformers.FalconConfig(**SMALL, alibi=True),
    "mpt": transformers.MptConfig(**COMMON, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "mamba": transformers.MambaConfig(**COMMON, hidden_size=32, num_hidden_layers=2, state_size=4),
    "gemma2": transformers.Gemma2Config(**GEMMA | {"initializer_range": 0.005}),  # small logits, hardly capped
    "cohere": transformers.CohereConfig(**LLAMA, logit_scale=0.1),
    "mistral with a short window": transformers.MistralConfig(**LLAMA, sliding_window=8),
    "gemma3 with a short window": transformers.Gemma3TextConfig(**GEMMA, sliding_window=8),
}


def save(folder: Path, config: Any, auto_class: Any = AutoModelForCausalLM) -> Path:
    tiny_models.randomize(model := auto_class.from_config(config))
    model.save_pretrained(folder)
    tiny_models.save_tokenizer(folder)
    return folder


def reward(queries: list[str], responses: list[str]) -> list[float]:
    return [0.3 * len(set(response.split())) for response in responses]


def plain(lm: Any, batch: dict[str, Any], head: Any = None) -> list[Tensor]:
    """Log-probabilities and, with a head, values of a batch of rollouts, from each row alone and without padding."""
    found, k = [], batch["responses"].flatten(0, -2).shape[0] // len(batch["trees"])
    for i, response in enumerate(batch["responses"].flatten(0, -2).tolist()):
        context = batch["trees"][i // k][0]
        with torch.no_grad():
            output = lm(torch.tensor([context + response]), output_hidden_states=True)
            logits, hidden = (x[0, len(context) - 1 : -1] for x in (output.logits, output.hidden_states[-1]))
            logprobs = (logits / 0.7).log_softmax(-1)[range(len(response)), response]
            found.append([logprobs, *([head(hidden).squeeze(1)] if head else [])])
    return [torch.stack(x).view_as(batch["responses"]) for x in zip(*found, strict=True)]


@pytest.mark.parametrize("name", RIGHT)
def test_rollouts_equal_plain_passes_and_every_tensor_is_trained(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    start = AutoModelForCausalLM.from_pretrained(save(tmp_path / "model", RIGHT[name]))
    rows = random_rows((1, 9, 4, 2, 6, 7, 3, 8), seed=1)
    (tmp_path / "queries.jsonl").write_text(to_lines(*({"query": row} for row in rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    given = {"base_model": "model", "query_dataset": "queries.jsonl", "reward_fn": "test_architectures:reward"}
    given |= {"start_text": None, "end_text": None, "truncate_token": None, "query_length": 9, "response_length": 5}
    given |= {"eval_queries": 2, "batch_size": 6, "micro_batch_size": 4, "total_episodes": 12, "num_epochs": 2}
    given |= {"lr": 1e-3, "checkpoint_every": 0}
    for script, changes in ((ppo_rlhf, {}), (rloo_rlhf, {"rloo_k": 2})):
        batches, rollout = [], script.rollout
        monkeypatch.setattr(script, "rollout", lambda *x, f=rollout, b=batches: (b.append(f(*x)), b[-1])[1])
        monkeypatch.setattr(script, "show", lambda *_: None)
        script.main("tiny", script.Args(**given | changes, output_dir=script.__name__))
        trained, head = AutoModelForCausalLM.from_pretrained(f"{script.__name__}/policy"), None
        if script is ppo_rlhf:
            head = nn.Linear(start.config.hidden_size, 1)
            head.load_state_dict(load_file("ppo_rlhf/policy/value_head.safetensors"))
        # evaluation, two updates, evaluation
        for batch, names in zip(batches, 2 * [["logprobs", "ref_logprobs"]] + 2 * [["ref_logprobs"]], strict=True):
            (expected,) = plain(start, batch)
            assert all((batch[x] - expected).abs().max() < ATOL for x in names)
        logprobs, *values = plain(trained, batch, head)
        assert (batch["logprobs"] - logprobs).abs().max() < ATOL < (logprobs - expected).abs().max()
        for x in values:
            assert (batch["values"] - x).abs().max() < ATOL < x.abs().max()
        for (key, old), new in zip(start.named_parameters(), trained.parameters(), strict=True):
            if name != "opt" or not key.endswith("k_proj.bias"):  # which adds the same to all scores
                assert not torch.equal(old, new), key


@pytest.mark.parametrize("name", RIGHT)
def test_rewards_are_those_of_plain_passes(name: str, tmp_path: Path) -> None:
    (config := copy.deepcopy(RIGHT[name])).update({"num_labels": 1})
    folder = save(tmp_path / "model", config, AutoModelForSequenceClassification)
    queries, responses = random_rows((4, 1, 7), seed=1), [row + [9] for row in random_rows((3, 0, 5, 2, 6, 1), seed=2)]
    model, args = tiny_models.load(folder, AutoModelForSequenceClassification), ppo_rlhf.Args(micro_batch_size=4)
    scores = ppo_rlhf.score(model, [{"input_ids": query} for query in queries], responses, None, args)
    judge = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = full_logits(judge, [queries[i // 2] + response for i, response in enumerate(responses)])
    assert (scores - torch.cat(expected)).abs().max() < ATOL < 0.1 < scores.std()


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_be_wrong_are_refused_in_a_line_that_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        tiny_models.load(save(tmp_path / "model", REFUSED[name]))
    text = str(caught.value)
    assert f"--base_model {tmp_path / 'model'}: " in text and "packed rows" in text and "\n" not in text
    assert "unpack" not in text and "size of tensor" not in text
