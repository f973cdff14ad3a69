"""Models of ten architectures through the scripts' loading code equal plain forward passes; others are refused."""

from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from run_tools import to_lines
from safetensors.torch import load_file, save_file
from tiny_models import EOS, forward, load, load_actor, make_batch, make_queries, random_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf

ATOL = 2e-5  # fp32 sums in another order, of logits and values of magnitude 5
LENGTH, GAIN, BIAS = 6, 1.75, -0.5
CONTEXTS = [[7], *random_rows((9, 4, 6), seed=1), [4, EOS, EOS, 5, EOS]]  # the eos is also the pad: a real token
ARGS = ppo_rlhf.Args(micro_batch_size=4, response_length=LENGTH)


@pytest.fixture(params=["eager", "sdpa"])
def attention(request: pytest.FixtureRequest) -> str:
    """`load` takes the first on a CPU, the second with a GPU."""
    return request.param


@pytest.fixture(scope="module", params=tiny.CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal LM of an architecture, and in `judge` a classifier."""
    torch.manual_seed(0)
    made = tiny.save_model(tmp_path_factory.mktemp("models") / request.param, request.param, pad_token_id=EOS)
    gains = {"reward_gain": GAIN, "reward_bias": BIAS, "pad_token_id": EOS}
    tiny.save_classifier(made / "judge", request.param, **gains)
    return made


def plain_forward(actor: ppo_rlhf.ActorCritic, context: list[int], response: list[int]) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and values (R,) of one row from transformers alone."""
    inputs, last = torch.tensor([context + response]), slice(len(context) - 1, -1)
    with torch.no_grad():
        output = actor.lm(inputs, output_hidden_states=True)
        logprobs = (output.logits[0, last].double() / 0.7).log_softmax(-1)
        values = actor.value_head(output.hidden_states[-1][0, last]).squeeze(-1)
    return logprobs[range(len(response)), response], -(logprobs.exp() * logprobs).sum(-1), values


def ragged_responses(k: int) -> tuple[Tensor, Tensor]:
    """Responses (n, K, R), for K = 1 (n, R), of 1 to R tokens that count, one with eos inside and at its end."""
    shape = (len(CONTEXTS), LENGTH) if k == 1 else (len(CONTEXTS), k, LENGTH)
    responses = torch.tensor(random_rows((LENGTH,) * len(CONTEXTS) * k, seed=2)).view(shape)
    responses.view(-1, LENGTH)[2] = torch.tensor([3, EOS, 7, EOS, EOS, EOS])
    counts = (torch.arange(len(CONTEXTS) * k) * 5 + 1) % LENGTH + 1
    counts[2] = LENGTH
    return responses, (torch.arange(LENGTH) < counts.unsqueeze(1)).view(shape)


@pytest.mark.parametrize("k", [1, 4])
def test_packed_rows_of_ragged_branches_give_what_each_text_gives_alone(folder: Path, attention: str, k: int) -> None:
    """Log-probability, entropy and value of every token that counts: no padding and no sibling changes them."""
    actor = load_actor(folder)
    actor.lm.set_attn_implementation(attention)
    responses, kept = ragged_responses(k)
    packed = forward(actor, make_batch(CONTEXTS, responses, kept))
    assert all(x.shape == responses.shape and x.dtype == torch.float32 for x in packed)
    rows = zip(responses.view(-1, LENGTH).tolist(), kept.view(-1, LENGTH).sum(1).tolist(), strict=True)
    for i, (response, count) in enumerate(rows):
        for ours, expected in zip(packed, plain_forward(actor, CONTEXTS[i // k], response[:count]), strict=True):
            assert (ours.view(-1, LENGTH)[i, :count] - expected).abs().max() < ATOL
    assert all(x[kept].std() > 0.1 for x in packed)  # there is something to change
    assert {1, 2, LENGTH} <= set(kept.sum(-1).flatten().tolist())


def test_pack_lays_out_the_example_of_its_docstring() -> None:
    trees = [[[1, 2], [3], [4, 5]], [[6], [7], [8]], [[9], [10], []]]
    first, last, ids, sees, positions = ppo_rlhf.pack(trees, "cpu")
    assert ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert positions.tolist() == [[0, 1, 2, 2, 3], [0, 1, 1, 0, 1]]
    assert first.tolist() == [[0, 2, 3], [5, 6, 7], [8, 9, 10]]
    assert last.tolist() == [[1, 2, 4], [5, 6, 7], [8, 9, 9]]
    seen = [[x.nonzero().flatten().tolist() for x in row] for row in sees]
    assert seen == [[[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4]], [[0], [0, 1], [0, 2], [3], [3, 4]]]


@pytest.mark.parametrize("k", [1, 4])
def test_reward_is_gain_times_logit_plus_bias_whatever_stands_beside(folder: Path, attention: str, k: int) -> None:
    """Of responses of other lengths, to one query or to others, and with eos, which is the pad, at the end."""
    reward = load(folder / "judge", "reward_model")
    reward.set_attn_implementation(attention)
    responses, kept = (x.view(-1, LENGTH) for x in ragged_responses(k))
    rows = [row[:n] for row, n in zip(responses.tolist(), kept.sum(1).tolist(), strict=True)]
    rewards = ppo_rlhf.score(reward, make_queries(CONTEXTS), rows, None, ARGS)
    assert rewards.shape == (len(rows), LENGTH + 1) and rewards.dtype == torch.float32 and not rewards[:, :-1].any()
    assert (rewards := rewards.sum(1)).std() > 0.1
    for i, row in enumerate(rows):
        with torch.no_grad():
            hidden = reward.base_model(torch.tensor([CONTEXTS[i // k] + row])).last_hidden_state[0, -1]
            assert (rewards[i] - GAIN * reward.score(hidden)[0] - BIAS).abs() < ATOL


def words(queries: list[str], responses: list[str]) -> list[float]:
    return [0.3 * len(set(response.split())) for response in responses]


def test_every_tensor_is_trained_and_plain_transformers_loads_it(folder: Path, tmp_path: Path, monkeypatch) -> None:
    rows = random_rows((1, 9, 4, 2, 6, 7, 3, 8), seed=1)
    (tmp_path / "queries.jsonl").write_text(to_lines(*({"query": row} for row in rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    given = {"base_model": str(folder), "query_dataset": "queries.jsonl", "reward_fn": "test_models:words"}
    given |= {"start_text": None, "end_text": None, "truncate_token": None, "query_length": 9, "response_length": 5}
    given |= {"eval_queries": 2, "batch_size": 6, "micro_batch_size": 4, "total_episodes": 12, "num_epochs": 2}
    ppo_rlhf.main("tiny", ppo_rlhf.Args(**given, lr=1e-3, checkpoint_every=0, output_dir="out"))
    start = AutoModelForCausalLM.from_pretrained(folder)
    trained, info = AutoModelForCausalLM.from_pretrained("out/policy", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (key, old), new in zip(start.named_parameters(), trained.parameters(), strict=True):
        if folder.name != "opt" or not key.endswith("k_proj.bias"):  # which adds the same to all scores
            assert not torch.equal(old, new), key


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_models_that_would_be_wrong_are_refused_in_a_line_that_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load(tiny.save_model(tmp_path / "model", name))
    text = str(caught.value)
    assert f"--base_model {tmp_path / 'model'}: " in text and "packed rows" in text and "\n" not in text
    assert "unpack" not in text and "size of tensor" not in text


def test_the_fused_gelu_is_used(tmp_path: Path) -> None:
    lm = load(tiny.save_model(tmp_path, "gpt2"))
    assert [type(block.mlp.act) for block in lm.transformer.h] == [nn.GELU] * 2


def test_under_bf16_the_trunk_is_autocast_and_the_heads_are_fp32(folder: Path) -> None:
    half, full = load_actor(folder, "bf16"), load_actor(folder)
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters())
    ids, mask, at = torch.tensor(random_rows((9, 9), seed=3)), torch.ones(2, 9, dtype=torch.bool), torch.arange(18)
    with torch.no_grad():
        logits, values = half(at, ids, mask)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = full.lm.base_model(ids).last_hidden_state.float().flatten(0, 1)
        assert torch.equal(logits, full.lm.get_output_embeddings()(hidden))
        assert torch.equal(values, full.value_head(hidden).squeeze(-1))
        assert logits.dtype == values.dtype == torch.float32
        error = (logits - full(at, ids, mask)[0]).abs().mean()
    assert 1e-4 < error < 0.1 * logits.std()  # bf16 it was


def test_missing_heads_and_layers_are_refused(tmp_path: Path) -> None:
    """transformers would only warn, and make up random weights."""
    judge, one = AutoModelForSequenceClassification, {"num_labels": 1}
    untied = ("lm_head", AutoModelForCausalLM, {"tie_word_embeddings": False})
    for drop, auto_class, changes in (untied, ("score", judge, one), ("h.1.", judge, one)):
        made = tiny.save_model(tmp_path / drop, "gpt2", auto_class, **changes)
        flag = "reward_model" if auto_class is judge else "base_model"
        load(made, flag)
        weights = {key: x for key, x in load_file(made / "model.safetensors").items() if drop not in key}
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"--{flag} .*: .*{drop}"):
            load(made, flag)
    made = tiny.save_model(tmp_path / "lm", "gpt2")
    load(made, num_labels=1)  # a new head, for train_reward.py, is no fault
    tiny.make_config("gpt2", num_hidden_layers=1).save_pretrained(made)
    with pytest.raises(ValueError, match=r"^--base_model [^\n]*\.1\."):
        load(made)
