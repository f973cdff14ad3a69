"""Models of five architectures through the scripts' loading code: packing, padding, heads, dropout, precision."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EOS, forward, load, load_actor, make_batch, make_queries, random_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.activations import NewGELUActivation

import ppo_rlhf

ATOL = 2e-5  # fp32 sums in another order, of logits and values of magnitude 5
LENGTH, GAIN, BIAS = 6, 1.75, -0.5
CONTEXTS = [[7], *random_rows((9, 4, 6), seed=1), [4, EOS, EOS, 5, EOS]]  # the eos is also the pad: a real token
ARGS = SimpleNamespace(micro_batch_size=4)


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


def ragged_responses(k: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Responses (n, K, R), for K = 1 (n, R), of 1 to R tokens that count, one with eos inside and at its end."""
    shape = (len(CONTEXTS), length) if k == 1 else (len(CONTEXTS), k, length)
    responses = torch.tensor(random_rows((length,) * len(CONTEXTS) * k, seed=2)).view(shape)
    responses.view(-1, length)[2] = torch.tensor([3, EOS, 7, EOS, EOS, EOS])[:length]
    counts = (torch.arange(len(CONTEXTS) * k) * 5 + 1) % length + 1
    counts[2] = length
    return responses, (torch.arange(length) < counts.unsqueeze(1)).view(shape)


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
    first, last, ids, sees, positions = ppo_rlhf.pack([[[1, 2], [3, 4], [5]], [[6], [7], [8]]], "cpu")
    assert ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert positions[0].tolist() == [0, 1, 2, 3, 2] and positions[1, :3].tolist() == [0, 1, 1]
    assert (first.tolist(), last.tolist()) == ([[0, 2, 4], [5, 6, 7]], [[1, 3, 4], [5, 6, 7]])
    seen = [[x.nonzero().flatten().tolist() for x in row] for row in sees]
    assert seen[0] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4]]
    assert seen[1][:3] == [[0], [0, 1], [0, 2]]


@pytest.mark.parametrize("k", [1, 4])
def test_reward_is_gain_times_logit_plus_bias_whatever_stands_beside(folder: Path, attention: str, k: int) -> None:
    """Of responses of other lengths, to one query or to others, and with eos, which is the pad, at the end."""
    reward = load(folder / "judge", AutoModelForSequenceClassification)
    reward.set_attn_implementation(attention)
    responses, kept = (x.view(-1, LENGTH) for x in ragged_responses(k))
    rows = [row[:n] for row, n in zip(responses.tolist(), kept.sum(1).tolist(), strict=True)]
    rewards = ppo_rlhf.score(reward, make_queries(CONTEXTS), rows, None, ARGS)
    assert rewards.shape == (len(rows),) and rewards.dtype == torch.float32 and rewards.std() > 0.1
    for i, row in enumerate(rows):
        with torch.no_grad():
            hidden = reward.base_model(torch.tensor([CONTEXTS[i // k] + row])).last_hidden_state[0, -1]
            assert (rewards[i] - GAIN * reward.score(hidden)[0] - BIAS).abs() < ATOL
    unlike = ppo_rlhf.score(reward, make_queries([[5, 6]]), [[3, 7], [3, 7, EOS], [3, 7, EOS, EOS]], None, ARGS)
    assert ((unlike - unlike.unsqueeze(1)).abs() + torch.eye(3)).min() > 1e-3  # each eos is a token
    if attention == "eager":  # transformers' own classifier, for texts that end with another token
        plain = AutoModelForSequenceClassification.from_pretrained(folder / "judge").eval()
        ours = ppo_rlhf.score(reward, make_queries([[5, 6]]), [[3, EOS, 7]], None, ARGS)
        with torch.no_grad():
            assert (ours - GAIN * plain(torch.tensor([[5, 6, 3, EOS, 7]])).logits[0, 0] - BIAS).abs() < ATOL


def test_dropout_is_off_in_training_mode_although_the_config_has_it(folder: Path) -> None:
    rows = torch.tensor(random_rows((12,) * 4, seed=5))
    for auto_class, where in ((AutoModelForCausalLM, folder), (AutoModelForSequenceClassification, folder / "judge")):
        plain = auto_class.from_pretrained(where, attn_implementation="eager").train()
        model = load(where, auto_class).train()
        with torch.no_grad():
            assert not torch.equal(plain(rows)[0], plain(rows)[0])  # there is dropout to turn off
            assert torch.equal(model(rows)[0], model(rows)[0])
            assert (model(rows)[0] - plain.eval()(rows)[0]).abs().max() < ATOL


def test_the_row_of_a_pad_that_is_also_the_eos_learns(folder: Path) -> None:
    lm = load(folder)
    hidden = ppo_rlhf.hidden_at(lm, None, torch.tensor([[3, EOS, 5]]), torch.ones(1, 3, dtype=torch.bool))
    gradient = torch.autograd.grad(hidden[:, 0].sum(), lm.get_input_embeddings().weight)[0]
    assert gradient[[3, EOS, 5]].abs().amax(1).min() > 1e-4


def test_the_fused_gelu_is_the_same_function_and_is_used(tmp_path: Path) -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    assert (NewGELUActivation()(x) - nn.GELU(approximate="tanh")(x)).abs().max() < 1e-12
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
        assert torch.equal(logits, hidden @ full.lm.get_output_embeddings().weight.T)
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
        load(made, auto_class)
        weights = {key: x for key, x in load_file(made / "model.safetensors").items() if drop not in key}
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"--base_model .*: .*{drop}"):
            load(made, auto_class)
    load(tiny.save_model(tmp_path / "lm", "gpt2"), judge, num_labels=1)  # a new head, for train_reward.py, is no fault
