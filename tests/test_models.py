"""Models of many architectures, as the scripts load and run them, give what plain transformers
gives for each text alone; what would be wrong is refused."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from run_tools import call, to_lines
from safetensors.torch import load_file, save_file
from tiny_models import (
    ANY_TOKENIZER,
    CONFIGS,
    EOS,
    LONGEST,
    RECURRENT,
    full_logits,
    full_states,
    load,
    make_batch,
    random_rows,
)
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Conv1D,
    GPT2Model,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import ppo_rlhf
import rloo_rlhf
import train_reward
from tf_adam import patch_layers

ATOL = 2e-5  # of two passes in fp32, each up to 1e-5 off one in float64
TEMPERATURE = 0.7
LENGTH = 6
GAIN = 1.75
BIAS = -0.5
CONTEXTS = [
    [7],
    *random_rows((9, 4, 12), seed=1),
    [4, EOS, EOS, 5, EOS],  # the eos is also the pad: a real token
]
ENDING = [3, EOS, 7, EOS, EOS, EOS]  # of a response
WITH_CLASSIFIER = [name for name in CONFIGS if tiny.has_classifier(name)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a causal LM of an architecture; in `judge` it has a classifier, where
    transformers has one."""

    @functools.cache
    def make(name: str) -> Path:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("models") / name
        tiny.save_model(folder, name, pad_token_id=EOS)
        if tiny.has_classifier(name):
            gains = {"reward_gain": GAIN, "reward_bias": BIAS, "pad_token_id": EOS}
            tiny.save_classifier(folder / "judge", name, **gains)
        return folder

    return make


def make_policy(lm: nn.Module, k: int) -> nn.Module:
    """PPO's policy for one response to a query, RLOO's for more."""
    if k == 1:
        return tiny.fill_value_head(ppo_rlhf.ActorCritic(lm, tiny.VOCABULARY))
    return rloo_rlhf.Actor(lm, tiny.VOCABULARY, rloo_rlhf.Args(rloo_k=k))


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Equal but for the order of fp32 sums, and not because all of it is the same."""
    assert ours.shape == expected.shape
    assert ours.dtype == torch.float32
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() < ATOL


def assert_as_alone(
    policy: nn.Module, plain: nn.Module, contexts: list[list[int]], responses: list[list[int]]
) -> None:
    """Log-probabilities, entropies and values of the policy, whatever stands beside a text, are
    those that the plain model gives for the text alone."""
    batch = make_batch(contexts, responses)
    with torch.no_grad():
        all_logprobs, values = ppo_rlhf.forward_response(policy, batch, TEMPERATURE)
    length = len(responses[0])
    before = slice(-length - 1, -1)  # the tokens that predict the response
    texts = [context + row for context, row in zip(contexts, responses, strict=True)]
    logits = torch.stack([x[before] for x in full_logits(plain, texts)])
    expected = (logits.double() / TEMPERATURE).log_softmax(-1)
    tokens = batch.responses.unsqueeze(2)
    assert_close(
        ppo_rlhf.selected_logprobs(all_logprobs, batch.responses),
        expected.gather(2, tokens).squeeze(2),
    )
    assert_close(ppo_rlhf.entropy(all_logprobs), -(expected.exp() * expected).sum(-1))
    if not hasattr(policy, "value_head"):
        assert values == 0
        return
    states = torch.stack([x[before] for x in full_states(plain, texts)])
    assert_close(values, policy.value_head(states).squeeze(-1).detach())


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(CONFIGS))
def test_padding_and_shared_contexts_change_nothing(
    name: str, attention: str, folder_of: Callable[[str], Path]
) -> None:
    """PPO's rows, and RLOO's, where three responses share what the model has read of a query."""
    folder = folder_of(name)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    lm = load(folder, attention=attention)
    assert lm.config._attn_implementation == attention
    for k in (1, 3):
        contexts = [context for context in CONTEXTS for _ in range(k)]
        responses = random_rows([LENGTH] * len(contexts), seed=2)
        responses[2] = ENDING
        assert_as_alone(make_policy(lm, k), plain, contexts, responses)


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf, train_reward])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_loads_as_on_a_gpu(
    name: str, script: Any, folder_of: Callable[[str], Path]
) -> None:
    """With the attention that transformers chooses; train_reward.py's new reward head included."""
    _, attention = tiny.with_attention([name])[-1]
    args = script.Args(base_model=str(folder_of(name)))
    classes = [AutoModelForCausalLM]
    if tiny.has_classifier(name):
        classes.append(AutoModelForSequenceClassification)
    with tiny.as_on_a_gpu(script):
        for auto_class in classes:
            model = script.load_model("base_model", args, auto_class, ANY_TOKENIZER, LONGEST)
            assert model.config._attn_implementation == attention
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert not model.training


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    ("context_lengths", "length"), [((5, 9, 2, 7, 3, 8), 1), ((1,) * 6, 4), ((1,) * 6, 1)]
)
def test_texts_may_have_contexts_and_responses_of_one_token(
    context_lengths: tuple[int, ...], length: int, k: int
) -> None:
    lm = tiny.make_lm("gpt2")
    contexts = random_rows(context_lengths, seed=5)
    contexts = [context for context in contexts for _ in range(k)]
    assert_as_alone(make_policy(lm, k), lm, contexts, random_rows([length] * len(contexts), seed=6))


def plain_rewards(judge: nn.Module, texts: list[list[int]]) -> list[Tensor]:
    """gain * logit + bias after each token of each text alone, in plain transformers."""
    states = full_states(judge, texts)
    return [(GAIN * judge.score(x) + BIAS).squeeze(1).detach() for x in states]


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(WITH_CLASSIFIER))
def test_rewards_are_gain_times_logit_plus_bias_whatever_stands_beside(
    name: str, attention: str, folder_of: Callable[[str], Path]
) -> None:
    """In PPO and RLOO, for a critic that starts from the reward model, and in train_reward.py, with
    one and three responses of different lengths per query, one ending with eos, the pad."""
    folder = folder_of(name) / "judge"
    auto_class = AutoModelForSequenceClassification
    plain = auto_class.from_pretrained(folder, attn_implementation=attention)
    model = load(folder, "reward_model", attention)
    trained = train_reward.RewardModel(model, train_reward.Args())
    trained.gain.data.fill_(GAIN)
    trained.bias.data.fill_(BIAS)
    for n in (1, 3):
        lengths = [i * 5 % LENGTH + 1 for i in range(len(CONTEXTS) * n)]
        responses = random_rows(lengths, seed=2)
        responses[2] = ENDING
        contexts = [context for context in CONTEXTS for _ in range(n)]
        texts = [context + row for context, row in zip(contexts, responses, strict=True)]
        expected = torch.stack([x[-1] for x in plain_rewards(plain, texts)])

        args = ppo_rlhf.Args(micro_batch_size=4)
        queries = tiny.make_queries(contexts)
        head = ppo_rlhf.reward_head(model)
        batch = tiny.make_responses(responses)
        assert_close(ppo_rlhf.score_by_model(model, head, args, queries, batch), expected)

        labels = []
        for i, context in enumerate(CONTEXTS):
            labels.append(train_reward.Comparison(context, responses[i * n : i * n + n], i % n))
        with torch.no_grad():
            rewards, best, is_hit = train_reward.label_rewards(trained, labels)
        assert_close(rewards, expected.view(-1, n))
        assert best.tolist() == [label.best for label in labels]
        assert torch.equal(is_hit, expected.view(-1, n).argmax(1) == best)

    lm = tiny.make_lm("gpt2")
    policy = ppo_rlhf.ActorCritic(lm, tiny.VOCABULARY, model)
    responses = random_rows([LENGTH] * len(CONTEXTS), seed=3)
    with torch.no_grad():
        batch = make_batch(CONTEXTS, responses)
        _, values = ppo_rlhf.forward_response(policy, batch, 1.0)
    texts = [context + row for context, row in zip(CONTEXTS, responses, strict=True)]
    assert_close(values, torch.stack([x[-LENGTH - 1 : -1] for x in plain_rewards(plain, texts)]))


def test_labels_that_fit_the_window_fit_it_together(folder_of: Callable[[str], Path]) -> None:
    """A long query's response is padded to the length of a short one's: padding has no position."""
    model = load(folder_of("gpt2") / "judge", "reward_model")
    window = model.config.max_position_embeddings
    contexts = random_rows((window - 3, 4), seed=1)
    responses = random_rows((2, 3, window - 5, window - 4), seed=2)
    labels = [
        train_reward.Comparison(contexts[i], responses[2 * i : 2 * i + 2], 0) for i in range(2)
    ]
    with torch.no_grad():
        trained = train_reward.RewardModel(model, train_reward.Args())
        together, _, _ = train_reward.label_rewards(trained, labels)
        alone = [train_reward.label_rewards(trained, [label])[0] for label in labels]
    assert_close(together, torch.cat(alone))


def words(completions: list[str], **columns: list) -> list[float]:
    """A --reward_fn."""
    return [0.3 * len(set(text.split())) for text in completions]


FLAGS = "--query_dataset queries.jsonl --reward_fn test_models:words --start_text none"
FLAGS += " --end_text none --truncate_token none --query_length 9 --response_length 5"
FLAGS += " --eval_queries 2 --batch_size 6 --micro_batch_size 4 --total_episodes 12"
FLAGS += " --num_epochs 2 --lr 1e-3 --checkpoint_every 0 --output_dir out"


def assert_same_buffers(one: nn.Module, other: nn.Module) -> None:
    buffers = dict(other.named_buffers())
    for key, buffer in one.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_trained_and_plain_transformers_loads_it(
    name: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows((1, 9, 4, 2, 6, 7, 3, 8), seed=1)
    (tmp_path / "queries.jsonl").write_text(to_lines(*({"query": row} for row in rows)))
    folder = folder_of(name)
    flags = [*FLAGS.split(), "--base_model", str(folder)]
    call("ppo_rlhf.py", flags, tmp_path, monkeypatch)
    start = AutoModelForCausalLM.from_pretrained(folder)
    trained, info = AutoModelForCausalLM.from_pretrained("out/policy", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for (key, old), new in zip(start.named_parameters(), trained.parameters(), strict=True):
        # A bias of OPT's keys adds the same to all scores.
        if name != "opt" or not key.endswith("k_proj.bias"):
            assert not torch.equal(old, new), key
    assert_same_buffers(start, trained)
    # A pad that is also the eos is trained too.
    embeddings = [model.get_input_embeddings().weight[EOS] for model in (start, trained)]
    assert not torch.equal(*embeddings)


def test_a_reward_model_and_a_critic_keep_their_buffers(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("deepseek_v3")
    rows = random_rows((6,) * 8, seed=1)
    (tmp_path / "queries.jsonl").write_text(to_lines(*({"query": row} for row in rows)))
    labels = [
        {"query": row[:2], "sample0": row[2:4], "sample1": row[4:], "best": 1} for row in rows
    ]
    (tmp_path / "labels.jsonl").write_text(to_lines(*labels))
    start = AutoModelForCausalLM.from_pretrained(folder)
    common = (
        f"--base_model {folder} --query_dataset queries.jsonl --start_text none --end_text none"
    )
    common += " --query_length 6 --response_length 2 --checkpoint_every 0"
    flags = f"{common} --label_dataset labels.jsonl --num_labels 4 --normalization_samples 4"
    flags += " --batch_size 2 --output_dir reward"
    call("train_reward.py", flags.split(), tmp_path, monkeypatch)
    auto_class = AutoModelForSequenceClassification
    judge, info = auto_class.from_pretrained("reward/reward_model", output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_buffers(start.base_model, judge.base_model)
    flags = f"{FLAGS} {common} --reward_model reward/reward_model --critic reward"
    flags = flags.replace("--reward_fn test_models:words ", "")
    call("ppo_rlhf.py", flags.split(), tmp_path, monkeypatch)
    weights = load_file("out/critic/model.safetensors")
    name = next(name for name in weights if "e_score_correction_bias" in name)
    assert weights[name].abs().max() > 0.05
    assert torch.equal(weights[name], start.state_dict()[f"model.{name.removeprefix('model.')}"])


def dtypes_of(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Of the matrices of linear layers, and of all other weights but these layers' biases."""
    found = {"linear": set(), "other": set()}
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear | Conv1D)
        for p in module.parameters(recurse=False):
            if not is_linear:
                found["other"].add(p.dtype)
            elif p.dim() > 1:
                found["linear"].add(p.dtype)
    return found


HELD = {"linear": {torch.bfloat16}, "other": {torch.float32}}


@pytest.mark.parametrize("name", CONFIGS)
def test_under_bf16_the_trained_are_fp32_with_autocast_and_the_frozen_are_bf16(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """The heads are fp32 anyway. What is held in bf16 gives the same bits: a first KL of 0."""
    folder = folder_of(name)
    args = ppo_rlhf.Args(dtype="bf16", base_model=str(folder))
    lm, ref_lm = ppo_rlhf.load_policy_and_reference(args, ANY_TOKENIZER, LONGEST)
    actor = tiny.fill_value_head(ppo_rlhf.ActorCritic(lm, tiny.VOCABULARY))
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in lm.parameters())
    assert dtypes_of(ref_lm.base_model) == HELD
    assert not any(p.requires_grad for p in ref_lm.parameters())
    assert ref_lm.get_output_embeddings().weight.dtype == torch.float32

    full = ppo_rlhf.ActorCritic(load(folder), tiny.VOCABULARY)
    ids, mask = ppo_rlhf.pad_rows(random_rows((9, 9), seed=3))
    heads = []
    for head in (lm.get_output_embeddings(), actor.value_head):
        head.register_forward_hook(lambda head, given, made: heads.append((head, given[0], made)))
    trunk = lm.base_model
    with torch.no_grad():
        logits, values = actor(ids, mask)
        with torch.autocast("cpu", torch.bfloat16):
            states = type(trunk).forward(trunk, ids).last_hidden_state[:, -1:].float()
        assert len(heads) == 2
        for head, given, made in heads:
            assert torch.equal(given, states)
            assert torch.equal(made, nn.functional.linear(given, head.weight, head.bias))
        error = (logits - full(ids, mask)[0]).abs().mean()
    assert logits.dtype == values.dtype == torch.float32
    assert 1e-4 < error < 0.1 * logits.std()  # bf16 it was

    ids, mask = ppo_rlhf.pad_rows(CONTEXTS)
    with torch.no_grad():
        trained = ppo_rlhf.read(lm.base_model, ids, mask).last_hidden_state
        held = ppo_rlhf.read(ref_lm.base_model, ids, mask).last_hidden_state
    assert torch.equal(trained, held)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_under_bf16_adapters_are_fp32_on_weights_in_bf16(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    pytest.importorskip("peft")
    args = ppo_rlhf.Args(dtype="bf16", base_model=str(folder_of(name)), lora_rank=2)
    lm, _ = ppo_rlhf.load_policy_and_reference(args, ANY_TOKENIZER, LONGEST)
    names = []
    for key, p in lm.named_parameters():
        is_held = key.endswith("base_layer.weight")
        assert p.requires_grad == ("lora_" in key), key
        assert p.dtype == (torch.bfloat16 if is_held else torch.float32) or "bias" in key, key
        names += [key] * is_held
    assert len(names) > 6


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_under_bf16_the_reward_model_is_held_in_bf16_and_scores_as_with_autocast(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(name)
    args = ppo_rlhf.Args(dtype="bf16", reward_model=str(folder / "judge"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    score = ppo_rlhf.load_reward("reward_model", args, "tiny", tokenizer, LONGEST)
    held = score.args[0]
    assert dtypes_of(held.base_model) == HELD
    assert not any(p.requires_grad for p in held.parameters())
    assert held.score.weight.dtype == torch.float32
    queries = tiny.make_queries(CONTEXTS)
    batch = tiny.make_responses(random_rows([LENGTH] * len(CONTEXTS), seed=2))
    scores = score(queries, batch)
    unheld = load(folder / "judge", "reward_model", dtype="bf16")
    head = ppo_rlhf.reward_head(unheld)
    expected = ppo_rlhf.score_by_model(unheld, head, args, queries, batch)  # autocast
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
    unheld = load(folder / "judge", "reward_model")
    expected = ppo_rlhf.score_by_model(unheld, head, args, queries, batch)
    assert 1e-4 < (scores - expected).abs().mean() < 0.1 * scores.std()


def test_a_head_gets_states_without_gaps() -> None:
    """Else torch copies a frozen head's weights for each row."""
    lm = tiny.make_lm("gpt2")
    policy = make_policy(lm, 1)
    given = []
    is_patched = False
    for is_patched in (False, True):
        if is_patched:
            patch_layers(lm, ppo_rlhf.Args())
        lm.lm_head.register_forward_hook(lambda _, inputs, __: given.append(inputs[0]))
        policy(*ppo_rlhf.pad_rows(CONTEXTS), last=2)
        assert given[-1].is_contiguous() == is_patched


@pytest.mark.parametrize("name", RECURRENT)
def test_models_that_a_cache_cannot_hold_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    """Sampling would give other tokens than the log-probabilities are of, and no error."""
    folder = tiny.save_model(tmp_path / "model", name)
    with pytest.raises(ppo_rlhf.UserError, match=f"^--base_model {folder}: [^\n]+$"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attention_mask", torch.ones_like),
        ("position_ids", lambda x: None),
        ("position_ids", lambda x: x + 1 if x.shape[1] == 1 else x),
    ],
)
def test_models_that_padding_or_a_cache_confuses_are_refused(
    name: str, change: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ignore the mask, count positions from the first pad, or read a token that follows a
    cache at another position: then only sampling would be wrong."""
    folder = tiny.save_model(tmp_path, "gpt2")
    load(folder)
    forward = GPT2Model.forward

    def changed(self: GPT2Model, *args: object, **kwargs: object) -> object:
        if kwargs.get(name) is not None:
            kwargs[name] = change(kwargs[name])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Model, "forward", changed)
    line = "gives other results with padding and a cache: not supported"
    with pytest.raises(ppo_rlhf.UserError, match=line):
        load(folder)


def calls_of_a_layer(model: nn.Module) -> list[int]:
    """Grows by one whenever the second block's first linear layer is called."""
    blocks = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    layer = next(x for x in blocks[1].modules() if isinstance(x, nn.Linear | Conv1D))
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointing_has_no_dropout_and_changes_nothing(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """These models' configs have dropout. Outputs and gradients of PPO's and RLOO's policies are
    those without checkpoints, and the backward pass computes activations again."""
    args = {"base_model": str(folder_of(name))}
    rows = random_rows([LENGTH] * 6, seed=2)
    twice = make_batch([row for row in CONTEXTS[:2] for _ in range(3)], rows)
    found = []
    for checkpoints in (False, True):
        args["gradient_checkpointing"] = checkpoints
        ppo_args = ppo_rlhf.Args(**args)
        auto_class = AutoModelForCausalLM
        lm = ppo_rlhf.load_model("base_model", ppo_args, auto_class, ANY_TOKENIZER, LONGEST)
        calls = calls_of_a_layer(lm)
        rloo_args = rloo_rlhf.Args(rloo_k=3, **args)
        for policy in (
            ppo_rlhf.ActorCritic(lm, tiny.VOCABULARY),
            rloo_rlhf.Actor(lm, tiny.VOCABULARY, rloo_args),
        ):
            policy.zero_grad()
            calls.clear()
            all_logprobs, _ = ppo_rlhf.forward_response(policy, twice, TEMPERATURE)
            before = len(calls)
            ppo_rlhf.selected_logprobs(all_logprobs, twice.responses).sum().backward()
            assert len(calls) == before * (1 + checkpoints)
            found.append((all_logprobs.detach(), lm.get_input_embeddings().weight.grad.clone()))
    for logprobs, gradient in found[1:]:
        assert_close(logprobs, found[0][0])
        assert (gradient - found[0][1]).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_a_reward_model_with_checkpointing_gives_the_same_rewards(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """It reads each text as a whole, where otherwise it reads a query once."""
    folder = folder_of(name) / "judge"
    args = train_reward.Args(base_model=str(folder))
    auto_class = AutoModelForSequenceClassification
    rows = random_rows((3, 5, 6, 1), seed=2)
    labels = [train_reward.Comparison(CONTEXTS[i], rows[2 * i : 2 * i + 2], 0) for i in range(2)]
    found = []
    for checkpoints in (False, True):
        args.gradient_checkpointing = checkpoints
        model = train_reward.load_model("base_model", args, auto_class, ANY_TOKENIZER, LONGEST)
        reward = train_reward.RewardModel(model, args)
        calls = calls_of_a_layer(model)
        rewards, _, _ = train_reward.label_rewards(reward, labels)
        assert len(calls) == 2 - checkpoints  # queries, then responses; or texts
        rewards[:, 0].sum().backward()
        assert len(calls) == 2
        found.append((rewards.detach(), model.get_input_embeddings().weight.grad))
    assert_close(found[1][0], found[0][0])
    assert (found[1][1] - found[0][1]).norm() < 1e-4 * found[0][1].norm()


def test_the_fused_gelu_is_used(tmp_path: Path) -> None:
    lm = load(tiny.save_model(tmp_path, "gpt2"))
    assert [type(block.mlp.act) for block in lm.transformer.h] == [nn.GELU] * 2


def without(folder: Path, part: str) -> Path:
    """The folder, whose weights have no more names with this part."""
    weights = load_file(folder / "model.safetensors")
    left = {name: x for name, x in weights.items() if part not in name}
    assert len(left) < len(weights)
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("part", "flag", "config"),
    [
        ("lm_head", "base_model", {"tie_word_embeddings": False}),
        ("score", "reward_model", {}),
        ("h.1.", "reward_model", {}),
    ],
)
def test_missing_heads_and_layers_are_refused(
    part: str, flag: str, config: dict[str, object], tmp_path: Path
) -> None:
    """transformers would only warn, and make up random weights."""
    save = tiny.save_classifier if flag == "reward_model" else tiny.save_model
    folder = save(tmp_path, "gpt2", **config)
    load(folder, flag)
    with pytest.raises(ppo_rlhf.UserError, match=f"^--{flag} .*: .*{part}[^\n]*$"):
        load(without(folder, part), flag)


def test_a_new_head_is_no_fault_but_layers_too_many_are(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path, "gpt2")
    load(folder, classifier=True)  # as train_reward.py does
    tiny.make_config("gpt2", num_hidden_layers=1).save_pretrained(folder)
    with pytest.raises(ppo_rlhf.UserError, match=r"^--base_model [^\n]*\.1\."):
        load(folder)
    with pytest.raises(ppo_rlhf.UserError, match=r"^--base_model [^\n]*\.1\."):
        load(folder, classifier=True)
