"""Models of five architectures through the scripts' loading code: padding, heads, dropout, precision, checkpointing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    ARGS,
    CONFIGS,
    EOS,
    full_logits,
    load_actor,
    make_batch,
    random_rows,
    save_classifier,
    save_model,
    save_tokenizer,
)
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedConfig,
    RobertaConfig,
)

import ppo_rlhf

ATOL = 2e-5  # fp32 sums in another order, of logits and values of magnitude 5
CONTEXTS, RESPONSES = random_rows((1, 9, 4, 2, 6), seed=1), random_rows((5,) * 5, seed=2)
RAGGED = random_rows((5, 1, 3, 2, 4), seed=3)  # responses after truncation
GAIN, BIAS = 1.75, -0.5
ENCODERS = (BertConfig, RobertaConfig)


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["eager", "sdpa"])
def attention(request: pytest.FixtureRequest) -> str:
    """`load` takes the first on a CPU, the second with a GPU."""
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save_model(tmp_path_factory.mktemp("models") / name, name)


@pytest.fixture(scope="module")
def reward_folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    gains = {"reward_gain": GAIN, "reward_bias": BIAS, "pad_token_id": EOS}
    return save_classifier(tmp_path_factory.mktemp("rewards") / name, name, **gains)


def load_reward(folder: Path, dtype: str = "fp32") -> ppo_rlhf.RewardModel:
    """The reward model as a run gets it with --reward_model."""
    tokenizer = ppo_rlhf.load(AutoTokenizer, str(folder), "--base_model", ARGS)
    args = SimpleNamespace(**vars(ARGS) | {"reward_fn": None, "reward_model": str(folder), "dtype": dtype})
    reward = ppo_rlhf.load_reward(args, "tiny", tokenizer, torch.device("cpu"))
    assert reward.tokenizer is None  # the same vocabulary: no way through text
    return reward


def forward(policy: Any, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return ppo_rlhf.forward_response(policy, batch, torch.arange(len(batch["trees"])), 0.7)


def plain_forward(actor: ppo_rlhf.ActorCritic, context: list[int], response: list[int]) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and values (R,) of one row from transformers alone."""
    inputs, last = torch.tensor([context + response]), slice(len(context) - 1, -1)
    with torch.no_grad():
        output = actor.lm(inputs, output_hidden_states=True)
        logprobs = (output.logits[0, last].double() / 0.7).log_softmax(-1)
        values = actor.value_head(output.hidden_states[-1][0, last]).squeeze(-1)
    return logprobs[range(len(response)), response], -(logprobs.exp() * logprobs).sum(-1), values


def test_left_padding_changes_no_logprob_entropy_or_value(folder: Path, attention: str) -> None:
    actor = load_actor(folder)
    actor.lm.set_attn_implementation(attention)
    together = forward(actor, make_batch(CONTEXTS, RESPONSES))
    for i, (context, response) in enumerate(zip(CONTEXTS, RESPONSES, strict=True)):
        alone = forward(actor, make_batch([context], [response]))
        plain = plain_forward(actor, context, response)
        for ours, single, expected in zip(together, alone, plain, strict=True):
            assert (ours[i] - single[0]).abs().max() < ATOL
            assert (ours[i] - expected).abs().max() < ATOL
    assert all(x.std() > 0.1 for x in together)  # there is something to change


def test_several_responses_behind_one_context_are_computed_as_if_alone(folder: Path, attention: str) -> None:
    actor, copies = load_actor(folder), 3
    actor.lm.set_attn_implementation(attention)
    responses = torch.tensor(random_rows((5,) * 5 * copies, seed=4))
    packed = forward(actor, make_batch(CONTEXTS, responses.view(5, copies, 5).tolist()))
    alone = forward(actor, make_batch([context for context in CONTEXTS for _ in range(copies)], responses.tolist()))
    for ours, expected in zip(packed, alone, strict=True):
        assert ours.shape == (5, copies, 5)
        assert (ours.flatten(0, 1) - expected).abs().max() < ATOL


@pytest.mark.parametrize("copies", [1, 3])
def test_responses_of_one_token(copies: int, folder: Path) -> None:
    actor, tokens = load_actor(folder), torch.tensor(random_rows((copies,) * 5, seed=4))
    ours = forward(actor, make_batch(CONTEXTS, tokens.unsqueeze(2).tolist() if copies > 1 else tokens.tolist()))
    for i, context in enumerate(CONTEXTS):
        for j, token in enumerate(tokens[i].tolist()):
            for x, expected in zip(ours, plain_forward(actor, context, [token]), strict=True):
                assert (x.view(5, copies)[i, j] - expected[0]).abs() < ATOL


@pytest.mark.parametrize("k", [1, 3])
def test_a_token_sees_its_context_and_its_own_branch_up_to_itself_and_nothing_else(k: int) -> None:
    """Every token of every tree is in one cell, at the position that it has in the text of its context and branch."""
    branches = random_rows([(3 * i) % 7 for i in range(len(CONTEXTS) * k)], seed=6)
    trees = ppo_rlhf.grow(CONTEXTS, branches)
    first, last, ids, sees, positions = ppo_rlhf.pack(trees, "cpu")
    width, used = ids.shape[1], set()
    for (context, *rows), begins, ends in zip(trees, first.tolist(), last.tolist(), strict=True):
        for row, begin, end in zip([[], *rows], begins, ends, strict=True):
            cells = [*range(begins[0], begins[0] + len(context))] + ([*range(begin, begin + len(row))] if row else [])
            assert end == begin + (len(row) if row else -1 if begin != begins[0] else len(context)) - (
                begin == begins[0] or bool(row)
            )
            assert ids.flatten()[cells].tolist() == context + row
            assert positions.flatten()[cells].tolist() == list(range(len(cells)))
            for i, cell in enumerate(cells):
                seen = sees[cell // width, cell % width].nonzero().flatten() + cell // width * width
                assert seen.tolist() == cells[: i + 1]
            used |= set(cells)
    assert len(used) == sum(len(branch) for tree in trees for branch in tree)


@pytest.mark.parametrize(("k", "full"), [(1, 0.94), (4, 0.86)])
def test_packing_leaves_hardly_a_cell_empty(k: int, full: float) -> None:
    rng = np.random.default_rng(0)
    trees = [[[1] * int(length), *[[2] * 23] * k] for length in rng.geometric(1 / 16, 256).clip(1, 64)]
    ids = ppo_rlhf.pack(trees, "cpu")[2]
    longest = max(len(context) for context, *_ in trees) + 23 * k
    assert (ids > 0).double().mean() > full > 1.2 * np.mean([sum(map(len, tree)) / longest for tree in trees])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_entropies_and_gradients_are_those_of_log_softmax(temperature: float) -> None:
    logits = torch.randn(40, 5_000, generator=torch.Generator().manual_seed(0)) * 5
    tokens, weights = torch.arange(40) * 7, torch.linspace(-1, 1, 40)
    plain = logits.clone().double().requires_grad_()
    every = (plain / temperature).log_softmax(-1)
    expected = every[torch.arange(40), tokens]
    (expected * weights).sum().backward()
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = ppo_rlhf.TokenLogprobs.apply(leaf * 1, tokens, temperature)
    (logprobs * weights).sum().backward()
    assert (logprobs - expected).abs().max() < 2e-5 and not entropies.requires_grad
    assert (entropies + (every.exp() * every).sum(-1)).abs().max() < 1e-5
    assert (leaf.grad - plain.grad).abs().max() < 1e-6


def test_mixed_precision_has_logits_in_fp32_and_their_gradients_as_exact_as_those_of_a_bf16_layer() -> None:
    n, d, vocabulary = 60, 64, 20_000  # three blocks, the last of them smaller
    hidden, weight, grad = (torch.randn(shape) for shape in ((n, d), (vocabulary, d), (n, vocabulary)))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    logits = ppo_rlhf.Fp32Logits.apply(*leaves)
    assert torch.equal(logits, hidden @ weight.T) and logits.dtype == torch.float32
    ours = torch.autograd.grad(logits, leaves, grad)
    exact = grad.double() @ weight.double(), grad.double().T @ hidden.double()
    bf16 = torch.autograd.grad(torch.nn.functional.linear(*(x.bfloat16() for x in leaves)), leaves, grad.bfloat16())
    for mine, layers, wanted in zip(ours, bf16, exact, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == wanted.shape
        error, usual = ((x - wanted).norm() / wanted.norm() for x in (mine, layers))
        assert 1e-4 < error < 1.05 * usual < 0.01


def test_under_autocast_logits_equal_those_of_the_head_in_fp32_and_gradients_nearly(folder: Path) -> None:
    """The passes below the head are the same in both: what differs is the head's backward pass."""
    actor, cells = load_actor(folder), torch.arange(9)
    ids, mask = ppo_rlhf.left_pad(random_rows((9,), seed=3), "cpu")
    found = []
    for is_mixed in (True, False):
        actor.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if is_mixed:
                logits = ppo_rlhf.logits_at(actor.lm, cells, ids, mask)[0]
            else:
                hidden = ppo_rlhf.last_hidden(actor.lm, ids, mask)[0]
                with torch.autocast("cpu", enabled=False):
                    logits = actor.lm.get_output_embeddings()(hidden.float())
        logits.log_softmax(-1)[:, 1].sum().backward()
        grads = {key: p.grad for key, p in actor.lm.named_parameters() if p.grad is not None}
        found.append((logits.detach(), grads))
    (ours, ours_grads), (plain, plain_grads) = found
    assert torch.equal(ours, plain) and ours_grads.keys() == plain_grads.keys()
    for key, grad in plain_grads.items():
        assert (ours_grads[key] - grad).norm() <= 0.03 * grad.norm() + 1e-6, key
    assert any(not torch.equal(ours_grads[key], grad) for key, grad in plain_grads.items())


def test_a_second_backward_pass_is_refused_as_the_first_has_overwritten_what_it_needs() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    total = ppo_rlhf.TokenLogprobs.apply(logits * 1, torch.tensor([0, 1, 2]), 1.0)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_padding_changes_no_reward(reward_folder: Path, attention: str) -> None:
    reward = load_reward(reward_folder)
    reward.model.set_attn_implementation(attention)
    rewards = ppo_rlhf.score(reward, CONTEXTS, RAGGED, None, ARGS)
    for i, (query, response) in enumerate(zip(CONTEXTS, RAGGED, strict=True)):
        assert (rewards[i] - ppo_rlhf.score(reward, [query], [response], None, ARGS)[0]).abs() < ATOL
    rows = [query + response for query, response in zip(CONTEXTS, RAGGED, strict=True)]
    width = max(map(len, rows))
    right = torch.tensor([row + [EOS] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    with torch.no_grad():
        hidden = reward.model.base_model(right, attention_mask=mask).last_hidden_state
        plain = reward.model.score(hidden)[range(len(rows)), [len(row) - 1 for row in rows], 0]
    assert (GAIN * plain + BIAS - rewards).abs().max() < ATOL
    assert rewards.std() > 0.1


@pytest.mark.parametrize("encoder", ENCODERS)
def test_padding_changes_no_reward_of_an_encoder(encoder: type[PreTrainedConfig], tmp_path: Path) -> None:
    """Encoders pool their first token, and count positions from it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = encoder(vocab_size=50, max_position_embeddings=40, initializer_range=0.25, num_labels=1, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    reward = load_reward(tmp_path)
    rewards = ppo_rlhf.score(reward, CONTEXTS, RAGGED, None, ARGS)
    for i, (query, response) in enumerate(zip(CONTEXTS, RAGGED, strict=True)):
        with torch.no_grad():
            logit = reward.model(torch.tensor([query + response])).logits[0, 0]
        assert (rewards[i] - logit).abs() < ATOL


def test_reward_is_gain_times_the_plain_classifiers_logit_plus_bias(reward_folder: Path) -> None:
    reward = load_reward(reward_folder)
    plain = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    ended = [response[:-1] + [1] for response in RAGGED]  # plain transformers takes an eos at the end for padding
    rewards = ppo_rlhf.score(reward, CONTEXTS, ended, None, ARGS)
    for ours, query, response in zip(rewards, CONTEXTS, ended, strict=True):
        with torch.no_grad():
            logit = plain(torch.tensor([query + response])).logits[0, 0]
        assert (ours - GAIN * logit - BIAS).abs() < ATOL
    assert rewards.dtype == torch.float32 and rewards.shape == (len(CONTEXTS),)


def test_logits_at_cells_are_the_models_own_logits(folder: Path) -> None:
    actor, keep = load_actor(folder), 3
    rows = [context + response for context, response in zip(CONTEXTS, RESPONSES, strict=True)]
    ids, mask = ppo_rlhf.left_pad(rows, "cpu")
    cells = torch.arange(ids.numel()).view(ids.shape)[:, -keep:]
    with torch.no_grad():
        logits, hidden = ppo_rlhf.logits_at(actor.lm, cells.flatten(), ids, mask)
    assert logits.shape == (cells.numel(), 50) and logits.dtype == torch.float32
    assert hidden.shape == (cells.numel(), 32)
    for ours, expected in zip(logits.view(*cells.shape, -1), full_logits(actor.lm, rows), strict=True):
        assert (ours - expected[-keep:]).abs().max() < ATOL


def test_dropout_is_off_in_training_mode_although_the_config_has_it(folder: Path, reward_folder: Path) -> None:
    rows = torch.tensor(random_rows((12,) * 4, seed=5))
    cases = (
        (AutoModelForCausalLM, folder, {}),
        (AutoModelForSequenceClassification, reward_folder, {"num_labels": 1}),
    )
    for auto_class, where, kwargs in cases:
        plain = auto_class.from_pretrained(where, attn_implementation="eager").train()
        model = ppo_rlhf.load(auto_class, str(where), "--base_model", ARGS, **kwargs).train()
        with torch.no_grad():
            assert not torch.equal(plain(rows).logits, plain(rows).logits)  # there is dropout to turn off
            first, second = model(rows).logits, model(rows).logits
            assert torch.equal(first, second)
            assert torch.equal(first, model.eval()(rows).logits)
            assert (first - plain.eval()(rows).logits).abs().max() < ATOL


def stored_as_bf16(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}


def test_frozen_policy_stores_bf16_and_computes_the_same_bits(folder: Path) -> None:
    actor, frozen = load_actor(folder), load_actor(folder)
    ppo_rlhf.freeze(frozen.lm, "bf16")
    matrices = {name for name, parameter in actor.lm.named_parameters() if parameter.dim() == 2}
    outside = {name for name in matrices if any(word in name for word in ("embed", "wte", "wpe", "lm_head"))}
    assert {name.removesuffix(".weight") for name in matrices - outside} == {
        name.removesuffix(".weight") for name in stored_as_bf16(frozen.lm) if name.endswith(".weight")
    }
    assert not any(parameter.requires_grad for parameter in frozen.lm.parameters())
    batch = make_batch(CONTEXTS, RESPONSES)
    with torch.autocast("cpu", torch.bfloat16):
        for ours, expected in zip(forward(frozen, batch), forward(actor, batch), strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, expected)
        half = forward(actor, batch)
    assert not any(
        torch.equal(x, exact) for x, exact in zip(half, forward(actor, batch), strict=True)
    )  # it was autocast


def test_frozen_reward_model_stores_bf16_and_computes_the_same_bits(reward_folder: Path) -> None:
    full, frozen = load_reward(reward_folder), load_reward(reward_folder, "bf16")
    assert stored_as_bf16(frozen) and not any("score" in name for name in stored_as_bf16(frozen))
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = (ppo_rlhf.score(reward, CONTEXTS, RAGGED, None, ARGS) for reward in (frozen, full))
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, ppo_rlhf.score(full, CONTEXTS, RAGGED, None, ARGS))  # it was autocast


def test_freeze_in_fp32_changes_nothing(folder: Path) -> None:
    actor = load_actor(folder)
    before, batch = {name: x.clone() for name, x in actor.lm.state_dict().items()}, make_batch(CONTEXTS, RESPONSES)
    expected = forward(actor, batch)
    ppo_rlhf.freeze(actor.lm.train(), "fp32")
    for name, x in actor.lm.state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, before[name])
    assert not actor.lm.training and not any(parameter.requires_grad for parameter in actor.lm.parameters())
    assert all(torch.equal(ours, x) for ours, x in zip(forward(actor, batch), expected, strict=True))


def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(folder: Path) -> None:
    batch, weights, gradients, calls = make_batch(CONTEXTS, RESPONSES), torch.randn(5, 5), [], []
    for checkpointing in (False, True):
        actor = load_actor(folder).train()
        if checkpointing:
            actor.lm.gradient_checkpointing_enable()
        count: list[int] = []
        mlp = next(module for path, module in actor.named_modules() if path.endswith(".mlp"))
        mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        logprobs, _, values = ppo_rlhf.forward_response(actor, batch, torch.arange(5), 0.7)
        (weights * (logprobs + values)).sum().backward()
        gradients.append({path: parameter.grad for path, parameter in actor.named_parameters()})
        calls.append(len(count))
    assert calls == [1, 2]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients[0].values())
    for path, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][path], gradient, rtol=1e-5, atol=1e-5), path


def test_an_eos_that_is_also_the_pad_is_a_real_token_of_a_response(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save_model(tmp_path / "model", name, pad_token_id=EOS)
    tokenizer = ppo_rlhf.load(AutoTokenizer, str(folder), "--base_model", ARGS)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    actor = load_actor(folder)
    with_eos, without = [3, EOS, 7, EOS, EOS], [3, 8, 7, 9, 9]
    contexts = [[4, EOS, 5], [6, EOS, EOS, EOS, 8]]
    ours = forward(actor, make_batch(contexts, [with_eos, with_eos]))
    for i, context in enumerate(contexts):
        for x, expected in zip(ours, plain_forward(actor, context, with_eos), strict=True):
            assert (x[i] - expected).abs().max() < ATOL
    other = forward(actor, make_batch(contexts, [without, without]))
    assert torch.equal(ours[0][:, :1], other[0][:, :1])
    assert ((ours[0] - other[0]).abs()[:, 1:] > 1e-3).all()  # each is an eos, or comes after one
    assert ((ours[2] - other[2]).abs()[:, 2:] > 1e-3).all()


def test_an_eos_that_is_also_the_pad_is_a_real_token_for_the_reward(reward_folder: Path) -> None:
    reward = load_reward(reward_folder)
    assert reward.model.config.pad_token_id == EOS
    responses = [[3, 7], [3, 7, EOS], [3, 7, EOS, EOS], [EOS, 7], [3]]
    rewards = ppo_rlhf.score(reward, [[5, 6]] * 5, responses, None, ARGS)
    for i, response in enumerate(responses):
        ids = torch.tensor([[5, 6, *response]])
        with torch.no_grad():
            hidden = reward.model.base_model(ids).last_hidden_state[0, -1]
            assert (rewards[i] - GAIN * reward.model.score(hidden)[0] - BIAS).abs() < ATOL
    gaps = (rewards - rewards.unsqueeze(1)).abs() + torch.eye(5)
    assert gaps.min() > 1e-3
