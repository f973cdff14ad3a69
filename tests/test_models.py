"""Models of many architectures: loaded, trained, held in bf16, checkpointed, or refused."""

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import fork_tools
import pytest
import tiny_models as tiny
import torch
import transformers
from accelerate import Accelerator
from fork_tools import PPO, REWARD, RLOO, WORDS, copy, kit
from run_tools import call, read_metrics, to_lines
from safetensors.torch import load_file, save_file
from tiny_models import ANY_TOKENIZER, BOTH, CONFIGS, VOCABULARY, folder_of, load, random_rows
from torch import nn
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
from plumbing import models as models_module
from plumbing.launch import UserError
from ppo_rlhf import make_optimizer

MAKERS = pytest.mark.parametrize("make", [tiny.make_lm, tiny.make_classifier])
LENGTH = 6
WINDOW = 64
CONTEXTS = random_rows((1, 9, 4, 12, 5), seed=1)
WITH_CLASSIFIER = [name for name in CONFIGS if tiny.has_classifier(name)]


def assert_same_buffers(one, other):
    torch.testing.assert_close(
        dict(one.named_buffers()), dict(other.named_buffers()), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_trained_and_plain_transformers_loads_it(name, tmp_path):
    """After one step on all log-probabilities. A pad that is also the eos is trained, too."""
    folder = folder_of(name)
    args = ppo_rlhf.Args(base_model=str(folder), lr=1e-2)
    load_model = tiny.loader(ANY_TOKENIZER, tiny.LONGEST, args)
    lm, ref_lm = ppo_rlhf.load_policy_and_reference(load_model, args)
    policy = ppo_rlhf.ActorCritic(lm)
    policy.own_head = nn.Linear(2, 3)  # of a copy
    optimizer = make_optimizer(policy, args)
    batch = tiny.make_batch([[tiny.EOS], *CONTEXTS[1:]], random_rows([LENGTH] * 5, seed=2))
    all_logprobs, predicted = ppo_rlhf.forward_response(policy, batch, 1.0)
    (all_logprobs.square().sum() + predicted["values"].sum()).backward()
    optimizer.step()
    tokenizer = models_module.load_tokenizer("base_model", args.base_model)
    ppo_rlhf.save_policy(Accelerator(cpu=True), policy, tokenizer, str(tmp_path))
    auto_class = AutoModelForCausalLM
    trained, info = auto_class.from_pretrained(tmp_path / "policy", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    parameters = zip(lm.named_parameters(), ref_lm.parameters(), trained.parameters(), strict=True)
    for (key, mine), old, new in parameters:
        assert torch.equal(mine, new), key
        # A bias of OPT's keys adds the same to all scores.
        if name != "opt" or not key.endswith("k_proj.bias"):
            assert not torch.equal(old, new), key
    assert_same_buffers(ref_lm, trained)
    embeddings = [model.get_input_embeddings().weight[tiny.EOS] for model in (ref_lm, trained)]
    assert not torch.equal(*embeddings)
    for part in ("value_head", "own_head"):
        head = load_file(tmp_path / "modules" / f"{part}.safetensors")
        assert torch.equal(head["weight"], policy.get_submodule(part).weight)


def test_a_head_of_ones_own_is_saved_with_rloos_policy(tmp_path):
    """Also if layers share weights, or have transposed ones."""
    args = rloo_rlhf.Args(base_model=str(folder_of("gpt2")))
    policy = rloo_rlhf.Actor(tiny.make_lm("gpt2"), args)
    policy.own_head = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    policy.own_head[1].weight = policy.own_head[0].weight
    policy.own_head[2].weight = nn.Parameter(torch.rand(3, 3).t())
    tokenizer = models_module.load_tokenizer("base_model", args.base_model)
    rloo_rlhf.save_policy(Accelerator(cpu=True), policy, tokenizer, str(tmp_path))
    saved = load_file(tmp_path / "modules/own_head.safetensors")
    assert all(torch.equal(saved[name], x) for name, x in policy.own_head.state_dict().items())
    assert {path.suffix for path in (tmp_path / "policy").iterdir()} <= {".json", ".safetensors"}


def test_a_reward_model_and_a_critic_keep_their_buffers(tmp_path, monkeypatch):
    folder = folder_of("deepseek_v3")
    rows = random_rows((6,) * 8, seed=1)
    (tmp_path / "queries.jsonl").write_text(to_lines(*({"query": row} for row in rows)))
    labels = [
        {"query": row[:2], "sample0": row[2:4], "sample1": row[4:], "best": 1} for row in rows
    ]
    (tmp_path / "labels.jsonl").write_text(to_lines(*labels))
    start = AutoModelForCausalLM.from_pretrained(folder)
    common = f"--base_model {folder} --query_dataset queries.jsonl --start_text none"
    common += " --end_text none --query_length 6 --response_length 2 --truncate_token none"
    flags = f"{common} --label_dataset labels.jsonl --num_labels 4 --normalization_samples 4"
    flags += " --batch_size 2 --output_dir reward"
    call("train_reward.py", flags.split(), tmp_path, monkeypatch)
    auto_class = AutoModelForSequenceClassification
    judge, info = auto_class.from_pretrained("reward/reward_model", output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_buffers(start.base_model, judge.base_model)
    flags = f"{common} --reward_model reward/reward_model --critic reward --output_dir out"
    flags += " --eval_queries 2 --batch_size 6 --total_episodes 12"
    call("ppo_rlhf.py", flags.split(), tmp_path, monkeypatch)
    weights = load_file("out/critic/model.safetensors")
    name = next(name for name in weights if "e_score_correction_bias" in name)
    assert weights[name].abs().max() > 0.05
    assert torch.equal(weights[name], start.state_dict()[f"model.{name.removeprefix('model.')}"])


def assert_held(model):
    """Matrices of linear layers are in bf16, all other weights but these layers' biases in fp32."""
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear | Conv1D)
        for p in module.parameters(recurse=False):
            if not is_linear:
                assert p.dtype == torch.float32
            elif p.dim() > 1:
                assert p.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_under_bf16_the_trained_are_fp32_with_autocast_and_the_frozen_are_bf16(name):
    """The heads are fp32 anyway. What is held in bf16 gives the same bits: a first KL of 0."""
    folder = folder_of(name)
    args = ppo_rlhf.Args(dtype="bf16", base_model=str(folder))
    load_model = tiny.loader(ANY_TOKENIZER, tiny.LONGEST, args)
    lm, ref_lm = ppo_rlhf.load_policy_and_reference(load_model, args)
    actor = tiny.make_policy(lm, 1)
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in lm.parameters())
    assert_held(ref_lm.base_model)
    assert ref_lm.get_output_embeddings().weight.dtype == torch.float32
    assert not any(p.requires_grad for p in ref_lm.parameters())

    full = ppo_rlhf.ActorCritic(load(folder))
    rows = random_rows((9, 9), seed=3)
    ids, mask = models_module.pad_rows(rows)
    heads = []
    for head in (lm.get_output_embeddings(), actor.value_head):
        head.register_forward_hook(lambda head, given, made: heads.append((head, given[0], made)))
    trunk = lm.base_model
    with torch.no_grad():
        predicted = actor(ids, mask)
        with torch.autocast("cpu", torch.bfloat16):
            states = type(trunk).forward(trunk, ids).last_hidden_state[:, -1:].float()
        assert len(heads) == 2
        for head, given, made in heads:
            assert torch.equal(given, states)
            assert torch.equal(made, nn.functional.linear(given, head.weight, head.bias))
        logits = predicted["logits"]
        error = (logits - full(ids, mask)["logits"]).abs().mean()
    assert logits.dtype == predicted["values"].dtype == torch.float32
    assert 1e-4 < error < 0.1 * logits.std()  # bf16 it was

    ids, mask = models_module.pad_rows(CONTEXTS)
    with torch.no_grad():
        trained = models_module.forward(lm.base_model, ids, mask).last_hidden_state
        held = models_module.forward(ref_lm.base_model, ids, mask).last_hidden_state
    assert torch.equal(trained, held)


def test_under_bf16_the_reference_of_a_reward_model_is_held_in_bf16(tmp_path, monkeypatch):
    made = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(train_reward, "reference_rewards", made)
    words = [*WORDS[REWARD], "--dtype", "bf16"]
    with pytest.raises(InterruptedError):
        call(REWARD, words, fork_tools.copy(kit(), tmp_path), monkeypatch)
    lm = made.call_args.args[2]
    assert lm.transformer.h[0].mlp.c_fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_under_bf16_the_reward_model_is_held_in_bf16_and_scores_as_with_autocast(name):
    folder = folder_of(name)
    args = ppo_rlhf.Args(dtype="bf16", reward_model=str(folder / "judge"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    load_model = tiny.loader(tokenizer, tiny.LONGEST, args)
    score = ppo_rlhf.load_reward_model(load_model, args.reward_model, args)
    held = score.args[0]
    assert_held(held.base_model)
    assert held.score.weight.dtype == torch.float32
    assert not any(p.requires_grad for p in held.parameters())
    queries = tiny.make_queries(CONTEXTS)
    responses = random_rows([LENGTH] * len(CONTEXTS), seed=2)
    scores = score(queries, responses)
    size = args.micro_batch_size
    unheld = load(folder / "judge", "reward_model", dtype="bf16")
    head = ppo_rlhf.reward_head(unheld)
    expected = ppo_rlhf.score_by_model(unheld, head, size, queries, responses)  # autocast
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
    unheld = load(folder / "judge", "reward_model")
    expected = ppo_rlhf.score_by_model(unheld, head, size, queries, responses)
    assert 1e-4 < (scores - expected).abs().mean() < 0.1 * scores.std()


@pytest.mark.parametrize("name", tiny.RECURRENT)
def test_models_that_a_cache_cannot_hold_are_refused_in_a_line(name, tmp_path):
    """Sampling would give other tokens than the log-probabilities are of, and no error."""
    folder = tiny.save_model(tmp_path / "model", name)
    with pytest.raises(UserError, match=f"^--base_model {folder}: [^\n]+$"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attention_mask", torch.ones_like),
        ("position_ids", lambda x: None),
        ("position_ids", lambda x: x + 1 if x.shape[1] == 1 else x),
    ],
)
def test_models_that_padding_or_a_cache_confuses_are_refused(name, change, monkeypatch):
    """They ignore the mask, count positions from the first pad, or shift a token behind a cache."""
    forward = GPT2Model.forward

    def changed(self, *args, **kwargs):
        if kwargs.get(name) is not None:
            kwargs[name] = change(kwargs[name])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Model, "forward", changed)
    line = "is not supported: padding or a cache changes its results"
    with pytest.raises(UserError, match=line):
        load(folder_of("gpt2"))


def calls_of_a_layer(model):
    """Grows by one whenever the second block's first linear layer is called."""
    blocks = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    layer = next(x for x in blocks[1].modules() if isinstance(x, nn.Linear | Conv1D))
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointing_has_no_dropout_and_changes_nothing(name):
    """Outputs and gradients are those without it, but activations are computed again."""
    rows = random_rows([LENGTH] * 6, seed=2)
    twice = tiny.make_batch([row for row in CONTEXTS[:2] for _ in range(3)], rows)
    found = []
    for checkpoints in (False, True):
        lm = load(folder_of(name), gradient_checkpointing=checkpoints)
        calls = calls_of_a_layer(lm)
        rloo_args = rloo_rlhf.Args(rloo_k=3, gradient_checkpointing=checkpoints)
        for policy in (
            ppo_rlhf.ActorCritic(lm),
            rloo_rlhf.Actor(lm, rloo_args),
        ):
            policy.zero_grad()
            calls.clear()
            all_logprobs, predicted = ppo_rlhf.forward_response(policy, twice, 0.7)
            before = len(calls)
            predicted["logprobs"].sum().backward()
            assert len(calls) == before * (1 + checkpoints)
            found.append((all_logprobs.detach(), lm.get_input_embeddings().weight.grad.clone()))
    for logprobs, gradient in found[1:]:
        tiny.assert_close(logprobs, found[0][0])
        assert (gradient - found[0][1]).norm() < 1e-4 * gradient.norm()


def test_a_missing_head_is_refused(tmp_path):
    """transformers would only warn, and make up random weights."""
    file = tiny.save_model(tmp_path, "gpt2", tie_word_embeddings=False) / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^--base_model .*: .*lm_head[^\n]*$"):
        load(tmp_path)


def test_a_reward_model_without_its_head_gets_no_new_one(tmp_path):
    """Only a language model does."""
    file = tiny.save_classifier(tmp_path, "gpt2") / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^--base_model .* do not fit a GPT2For.*: score.weight$"):
        load(tmp_path, classifier=True)


def test_a_reward_model_is_no_policy(tmp_path):
    """Its head is its embedding, so nothing is missing."""
    tiny.save_classifier(tmp_path, "gpt2")
    with pytest.raises(UserError, match=r"^--base_model .* do not fit a GPT2LMH.*: score.weight$"):
        load(tmp_path)


def test_experts_whose_config_asks_for_a_loss_of_theirs_can_be_sampled(tmp_path):
    """Models that were trained with one have this in their config. It cannot read a cache."""
    torch.manual_seed(0)
    lm = load(tiny.save_model(tmp_path, "mixtral", output_router_logits=True))
    rows = random_rows((4, 7), seed=1)
    _, logprobs = tiny.sample(tiny.make_policy(lm, 1), rows, torch.full((2, 3), 0.5), 1.0)
    assert logprobs.isfinite().all()


def test_a_new_head_is_no_fault_but_another_number_of_layers_or_labels_is(tmp_path):
    folder = tiny.save_model(tmp_path, "gpt2")
    load(folder, classifier=True)
    for num_layers, classifier in itertools.product((1, 3), (False, True)):
        tiny.make_config("gpt2", num_hidden_layers=num_layers).save_pretrained(folder)
        with pytest.raises(UserError, match=r"^--base_model [^\n]*: [^\n]*h\.[12]\."):
            load(folder, classifier=classifier)
    tiny.save_classifier(tmp_path / "two", "gpt2", num_labels=2)
    says = r"two: the weights do not fit a GPT2ForSequenceClassification: .*score\.weight"
    with pytest.raises(UserError, match=f"^--base_model .*{says}"):
        load(tmp_path / "two", classifier=True)


def test_a_model_is_checked_in_fp32(monkeypatch):
    """In bf16 padding and a cache round differently."""
    forwards = []

    def note(model, *_):
        forwards.append(model.get_decoder().forward)

    monkeypatch.setattr(models_module, "check_model", note)
    model = load(folder_of("gpt2"), dtype="bf16")
    assert forwards == [GPT2Model.forward.__get__(model.get_decoder())]


def test_a_bf16_file_is_trained_in_fp32(tmp_path):
    tiny.make_lm("llama").bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.float32}


FITS = contextlib.nullcontext()


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("gpt2", "transformer.h.10.attn.masked_bias", FITS),
        ("gpt2", "transformer.h.10.attn.attention.bias", FITS),
        ("llama", "model.layers.10.self_attn.bias", pytest.raises(UserError)),
        ("llama", "lm_head.bias", pytest.raises(UserError)),
    ],
)
def test_only_the_attention_masks_of_an_old_file_may_be_left_over(name, key, expected, tmp_path):
    file = tiny.save_model(tmp_path, name) / "model.safetensors"
    weights = load_file(file) | {key: torch.ones(1)}
    save_file(weights, file, metadata={"format": "pt"})
    with expected:
        load(tmp_path)


@MAKERS
def test_the_last_embedding_and_the_whole_window_can_be_used(make):
    model = make("gpt2")
    size = VOCABULARY
    with torch.no_grad():
        models_module.check_model(model, size - 1, WINDOW)
        models_module.check_model(make("gpt2", max_position_embeddings=9), 49, 9)
        with pytest.raises(UserError, match=f"^has {size} embeddings, too few for token {size}$"):
            models_module.check_model(model, size, WINDOW)
        says = f"^has a window of {WINDOW} tokens, too short for texts of {WINDOW + 1}$"
        with pytest.raises(UserError, match=says):
            models_module.check_model(model, 1, WINDOW + 1)


def test_the_window_of_a_model_of_texts_and_images_is_that_of_texts():
    """As of Gemma 3, whose config has it one level deeper."""
    config = transformers.Gemma3Config(text_config=tiny.GEMMA | {"sliding_window": 32})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert not hasattr(config, "max_position_embeddings")
    says = f"window of {WINDOW} tokens, too short for texts of {WINDOW + 1}$"
    with pytest.raises(UserError, match=says):
        models_module.check_model(model, 1, WINDOW + 1)


@MAKERS
@pytest.mark.parametrize("factor", [1.0, 1.0001, 0.9999, 1.01, 0.99, torch.nan])
def test_a_model_may_differ_from_a_plain_pass_by_rounding_only(make, factor, monkeypatch):
    plain = models_module.forward

    def scaled(*arguments):
        states = plain(*arguments).last_hidden_state
        return SimpleNamespace(last_hidden_state=factor * states)

    monkeypatch.setattr(models_module, "forward", scaled)
    expected = contextlib.nullcontext()
    if not abs(factor - 1) < 1e-3:
        expected = pytest.raises(UserError, match="padding or a cache changes its results")
    with torch.no_grad(), expected:
        models_module.check_model(make("gpt2"), 49, 20)


@BOTH
def test_a_reward_model_has_the_same_words_under_the_same_numbers(module):
    args = module.Args(reward_model=str(folder_of("gpt2") / "judge"))

    def load_beside(ours, theirs):
        found = []
        for vocabulary in (ours, theirs):
            found.append(tiny.no_tokenizer(1))
            found[-1].get_vocab = lambda x=vocabulary: x
        mine, other = found
        with mock.patch.object(models_module, "load_tokenizer", lambda flag, args: other):
            return module.load_reward_model(tiny.loader(mine, 8, args), args.reward_model, args)

    ours = {"a": 0, "b": 1}
    assert load_beside(ours, ours)
    for theirs in ({"a": 1, "b": 0}, {"a": 0, "c": 1}, {"a": 0}):
        with pytest.raises(UserError, match="has another tokenizer"):
            load_beside(ours, theirs)


def main_until(module, last, folder, **flags):
    """Runs main up to the call of this function, without queries, and returns what it got."""
    queries = tiny.make_queries([[1], [2], [3]])
    args = module.Args(eval_queries=1, output_dir=str(folder / "out"), **flags)
    with (
        mock.patch.object(module, "load_queries", lambda *_: (queries[:1], queries[1:])),
        mock.patch.object(module, "load_reward_model", lambda *_: None),
        mock.patch.object(module, "load_reward_fn", lambda *_: None),
        mock.patch.object(module, last, side_effect=tiny.Stop) as called,
        pytest.raises(tiny.Stop),
    ):
        module.main("tiny", args)
    return called.call_args.args


def test_a_critic_can_start_from_the_reward_model_that_is_found_in_runs(tmp_path):
    """Without --reward_model."""
    flags = {"base_model": str(folder_of("gpt2")), "critic": "reward"}
    with mock.patch.object(ppo_rlhf, "newest_reward_model", lambda preset: f"of {preset}"):
        _, args = main_until(ppo_rlhf, "load_critic", tmp_path, **flags)
    assert args.reward_model == "of tiny"


def test_a_critic_can_start_from_a_reward_model_beside_a_reward_function(tmp_path):
    judge = str(kit() / "judge")
    flags = {"base_model": str(kit() / "model"), "critic": "reward", "reward_model": judge}
    _, critic = main_until(ppo_rlhf, "ActorCritic", tmp_path, reward_fn="a:function", **flags)
    assert critic.config.num_labels == 1


@BOTH
def test_logits_go_up_to_the_highest_token_of_a_tokenizer_with_gaps(module, tmp_path):
    folder = copy(kit(), tmp_path) / "model"
    file = folder / "tokenizer.json"
    backend = json.loads(file.read_text())
    del backend["model"]["vocab"]["w7"]
    file.write_text(json.dumps(backend))
    actor = "Actor" if module is rloo_rlhf else "ActorCritic"
    flags = {"base_model": str(folder), "truncate_token": "w4", "reward_model": "any"}
    lm, *_ = main_until(module, actor, tmp_path, **flags)
    assert lm(torch.tensor([[1]])).logits.shape[-1] == 50


@pytest.mark.parametrize(("special", "end"), [(["w4"], 4), ([], None)])
def test_a_special_token_ends_the_samples_that_set_gain_and_bias(special, end, tmp_path):
    """Also one that is not the eos."""
    folder = copy(kit(), tmp_path)
    tokenizer = models_module.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    with (
        mock.patch.object(train_reward, "load_tokenizer", lambda *_: tokenizer),
        mock.patch.object(train_reward, "reference_rewards", side_effect=tiny.Stop) as called,
        pytest.raises(tiny.Stop),
    ):
        call(REWARD, WORDS[REWARD], folder)
    assert called.call_args.args[5] == end


# --- LoRA -----------------------------------------------------------------------------------------
@BOTH
def test_lora_adapters_depend_on_the_seed_alone(module, tmp_path):
    pytest.importorskip("peft")
    flags = {"base_model": str(folder_of("gpt2")), "lora_rank": 2, "lora_alpha": 6.0}
    actor = "Actor" if module is rloo_rlhf else "ActorCritic"
    weights = []
    for i, seed in enumerate([1, 1, 2]):
        torch.manual_seed(100 + i)
        lm, *_ = main_until(module, actor, tmp_path, seed=seed, reward_model="any", **flags)
        adapters = [x.flatten() for key, x in lm.state_dict().items() if "lora_A" in key]
        weights.append(torch.cat(adapters))
    assert torch.equal(weights[0], weights[1])
    assert (weights[0] - weights[2]).abs().mean() > 0.01
    scalings = [x.scaling["default"] for x in lm.modules() if hasattr(x, "lora_A")]
    assert set(scalings) == {3.0}  # --lora_alpha / --lora_rank


# Prints bytes of memory that a host needs for policy and reference at most, for each weight.
LOADING = r"""
import re, sys
from unittest import mock
import torch
import ppo_rlhf
from plumbing import models

def peak():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])

def load(name):
    args = ppo_rlhf.Args(base_model=name, lora_rank=int(sys.argv[3]))
    tokenizer = models.load_tokenizer("base_model", name)
    load_model = models.partial(models.load_model, tokenizer=tokenizer, longest=8, args=args)
    return ppo_rlhf.load_policy_and_reference(load_model, args)

small, large = sys.argv[1:3]
load(small)
before = peak()
device = mock.Mock(device=torch.device("meta"))  # as a GPU: it takes none of the host's memory
with mock.patch.object(models, "PartialState", lambda: device):
    lm, ref = load(large)
print((peak() - before) / lm.num_parameters())
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_host_holds_one_model_at_a_time(lora_rank, tmp_path):
    """Beside a GPU. In fp32 a weight has 4 bytes."""
    small = tiny.save_model(tmp_path / "small", "gpt2")
    large = tiny.save_model(tmp_path / "large", "gpt2", hidden_size=1024, num_hidden_layers=6)
    code = [sys.executable, "-c", LOADING, small, large, str(lora_rank)]
    found = subprocess.run(code, capture_output=True, text=True, check=False)
    assert not found.returncode, found.stderr
    assert 3.9 < float(found.stdout) < 1.2 * 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_folder_of_a_lora_run_is_the_trained_policy(dtype, folder, monkeypatch):
    """Adapters alone are trained, from the reference on, with which they share what is frozen: held
    in bf16 with --dtype bf16. The folder is for transformers and for peft."""
    peft = pytest.importorskip("peft")
    set_logprobs = mock.Mock(wraps=ppo_rlhf.set_logprobs)
    monkeypatch.setattr(ppo_rlhf, "set_logprobs", set_logprobs)
    flags = f"--critic shared --lora_rank 4 --lora_alpha 6 --lr 2e-2 --dtype {dtype}"
    call(PPO, [*WORDS[PPO], *flags.split()], folder, monkeypatch)
    first, *_, last = read_metrics(folder / "out")
    assert first["objective/kl"] == first["first_ratio_error"] == 0
    assert last["objective/kl"] != 0
    policy, ref = set_logprobs.call_args.args[1:3]
    base = load_file(folder / "model/model.safetensors")
    frozen = [name for name, p in policy.lm.named_parameters() if not p.requires_grad]
    assert {name for name, _ in policy.lm.named_parameters() if "lora_" not in name} == {*frozen}
    assert len(frozen) == len(base)
    trained = {p.dtype for p in policy.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    assert not [name for name, _ in ref.lm.named_parameters() if "lora_" in name]
    for name in frozen:
        p = policy.lm.get_parameter(name)
        plain_name = name.replace("base_layer.", "")
        assert p is ref.lm.get_parameter(plain_name), name
        x = base[plain_name]
        if dtype == "bf16" and name.endswith("base_layer.weight"):
            x = x.bfloat16()
        assert p.dtype == x.dtype, name
        assert torch.equal(p, x), name
    if dtype == "bf16":
        return

    rows = random_rows((9, 4), seed=3)
    merged = peft.AutoPeftModelForCausalLM.from_pretrained("out/policy").merge_and_unload()
    loaded = AutoModelForCausalLM.from_pretrained("out/policy")
    passes = [tiny.full_logits(model, rows) for model in (policy.lm, merged, loaded, ref.lm)]
    for ours, theirs, plain, start in zip(*passes, strict=True):
        assert (ours - theirs).abs().max() < 1e-4
        assert (ours - plain).abs().max() < 1e-4
        assert (ours - start).abs().max() > 1e-2
    words = [*WORDS[RLOO], "--total_episodes", "8", "--output_dir", "again", "--base_model"]
    with pytest.raises(UserError, match="policy is an adapter: merge it first"):
        call(RLOO, [*words, "out/policy"], folder, monkeypatch)
    merged.save_pretrained("merged")
    tiny.save_tokenizer("merged")
    call(RLOO, [*words, "merged"], folder, monkeypatch)
    start = merged.state_dict()
    for name, p in load_file("again/policy/model.safetensors").items():
        assert (p - start[name]).abs().max() > 1e-6, name


# --- what is refused, and what is saved -----------------------------------------------------------
def load_with(auto_class, change, **named):
    """Loads a model that has been changed behind transformers' back."""
    flag = named.get("flag", "base_model")
    from_pretrained = auto_class.from_pretrained

    def changed(*args, **options):
        model, info = from_pretrained(*args, **options)
        change(model)
        return model, info

    with mock.patch.object(auto_class, "from_pretrained", changed):
        load(folder_of("gpt2") / ("judge" if flag == "reward_model" else ""), **named)


def test_quantized_models_are_refused():
    """Some of their weights would be frozen in silence."""

    def quantize(model):
        model.config.quantization_config = {"quant_method": "any"}

    for auto_class, flag in (
        (AutoModelForCausalLM, "base_model"),
        (AutoModelForSequenceClassification, "reward_model"),
    ):
        with pytest.raises(UserError, match=rf"^--{flag} \S+ is quantized: save a copy in fp32"):
            load_with(auto_class, quantize, flag=flag)


def test_a_classifier_whose_head_has_another_name_is_refused():
    with pytest.raises(UserError, match="^--reward_model .* as it has no `score`$"):
        load_with(
            AutoModelForSequenceClassification,
            lambda model: delattr(model, "score"),
            flag="reward_model",
        )


def test_the_folder_of_a_run_is_no_model(tmp_path):
    shutil.copytree(folder_of("gpt2"), tmp_path / "out/policy")
    says = r"^--base_model \S+/out is a run's folder: name a model in it, of \['\S+/out/policy'\]$"
    with pytest.raises(UserError, match=says):
        models_module.load_tokenizer("base_model", str(tmp_path / "out"))


def test_the_policy_s_folder_asks_to_sample_from_all_tokens(tmp_path):
    """Whatever that of the base model asks for; one that transformers would not save, too."""
    lm = tiny.make_lm("gpt2")
    lm.generation_config.update(top_k=2, top_p=0.1, repetition_penalty=9.0, temperature=0.3)
    lm.generation_config.do_sample = False
    lm.generation_config.eos_token_id = [tiny.EOS, 7]  # as Gemma 2 names the end of a turn
    tokenizer = AutoTokenizer.from_pretrained(folder_of("gpt2"))
    policy = rloo_rlhf.Actor(lm, rloo_rlhf.Args())
    rloo_rlhf.save_policy(Accelerator(cpu=True), policy, tokenizer, str(tmp_path))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert saved.generation_config.eos_token_id == [tiny.EOS, 7]
    torch.manual_seed(0)
    ids = torch.full((2_000, 1), 5)
    drawn = saved.generate(ids, max_new_tokens=1, pad_token_id=0)[:, 1]
    shares = torch.bincount(drawn, minlength=VOCABULARY) / len(drawn)
    expected = lm(ids[:1]).logits[0, -1].softmax(-1)
    assert (shares - expected).abs().sum() / 2 < 0.1  # total variation


def test_a_model_that_cannot_be_saved_is_refused_before_any_training(tmp_path, monkeypatch):
    tiny.save_model(tmp_path, "gpt2")
    load_model = tiny.loader(ANY_TOKENIZER, 9, ppo_rlhf.Args())
    save = mock.Mock(side_effect=NotImplementedError("no way back"))
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "save_pretrained", save)
    with pytest.raises(UserError, match="^--base_model .* cannot be saved: no way back"):
        load_model("base_model", str(tmp_path), AutoModelForCausalLM)


def test_an_added_token_without_an_embedding_is_no_fault_unless_something_has_it(tmp_path):
    """Gemma 3's text models lack that of <image_soft_token>."""
    shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder_of("gpt2"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<soft>"]})
    args = ppo_rlhf.Args(base_model=str(tmp_path / "model"))
    load_model = tiny.loader(tokenizer, 9, args)
    lm = load_model("base_model", args.base_model, AutoModelForCausalLM)
    ids = torch.tensor([[1, VOCABULARY - 1]])
    assert lm(ids).logits.shape[-1] == VOCABULARY
    with pytest.raises(UserError, match=f"a text has token {VOCABULARY}, for which the model has"):
        lm(ids + 1)
    args.truncate_token = "<soft>"  # no response would ever end
    with pytest.raises(UserError, match=f"has 50 embeddings, too few for token {VOCABULARY}$"):
        load_model("base_model", args.base_model, AutoModelForCausalLM)
    args.truncate_token = None
    tokenizer.chat_template = "{{ messages[0].content + '<soft>' }}"
    with pytest.raises(UserError, match=f"has 50 embeddings, too few for token {VOCABULARY}$"):
        load_model("base_model", args.base_model, AutoModelForCausalLM)
