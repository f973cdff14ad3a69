"""Passes over padded rows and through caches give what transformers gives for each text alone."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models as tiny
import torch
from tiny_models import (
    BIAS,
    CONFIGS,
    EOS,
    GAIN,
    assert_close,
    folder_of,
    full_logits,
    full_states,
    load,
    make_batch,
    make_policy,
    random_rows,
    rows_of,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
import rloo_rlhf
import train_reward
from plumbing import data as data_module
from plumbing import labels as labels_module
from plumbing import models as models_module
from plumbing.models import patch_layers

TEMPERATURE = 0.7
LENGTH = 6
CONTEXTS = [
    [7],
    *random_rows((9, 4, 12), seed=1),
    [4, EOS, EOS, 5, EOS],  # the eos is also the pad: a real token
]
ENDING = [3, EOS, 7, EOS, EOS, EOS]  # of a response
WITH_CLASSIFIER = [name for name in CONFIGS if tiny.has_classifier(name)]


def assert_as_alone(policy, plain, contexts, responses):
    """Log-probabilities, entropies and values are those of the plain model for a text alone."""
    batch = make_batch(contexts, responses)
    with torch.no_grad():
        all_logprobs, predicted = ppo_rlhf.forward_response(policy, batch, TEMPERATURE)
    length = len(responses[0])
    before = slice(-length - 1, -1)  # the tokens that predict the response
    texts = [context + row for context, row in zip(contexts, responses, strict=True)]
    logits = torch.stack([x[before] for x in full_logits(plain, texts)])
    expected = (logits.double() / TEMPERATURE).log_softmax(-1)
    tokens = batch.responses.unsqueeze(2)
    assert_close(predicted["logprobs"], expected.gather(2, tokens).squeeze(2))
    assert_close(ppo_rlhf.entropy(all_logprobs), -(expected.exp() * expected).sum(-1))
    if not hasattr(policy, "value_head"):
        assert [*predicted] == ["logprobs"]
        return
    states = torch.stack([x[before] for x in full_states(plain, texts)])
    assert_close(predicted["values"], policy.value_head(states).squeeze(-1).detach())


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(tiny.WORKING))
def test_padding_and_shared_contexts_change_nothing(name, attention):
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


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("lengths", "length"), [("592738", 1), ("111111", 4), ("111111", 1)])
def test_texts_may_have_contexts_and_responses_of_one_token(lengths, length, k):
    lm = tiny.make_lm("gpt2")
    contexts = random_rows([int(digit) for digit in lengths], seed=5)
    contexts = [context for context in contexts for _ in range(k)]
    responses = random_rows([length] * len(contexts), seed=6)
    assert_as_alone(make_policy(lm, k), lm, contexts, responses)


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_that_the_tokenizer_lacks_have_no_logit(k):
    """Logits are divided where they are: a second tensor of all tokens would double the memory."""
    lm = tiny.make_lm("gpt2")
    patch_layers(lm, "fp32", 40)
    policy = make_policy(lm, k)
    batch = make_batch(rows_of("1 2 / 1 2"), rows_of("3 4 / 5 6"))
    ids, mask = models_module.pad_rows(rows_of("1 2 3 / 1 2 5"))
    logits = policy(ids, mask, last=2)["logits"]
    assert logits.shape == (2, 2, 40)
    kept = logits.detach().clone()
    given = {"logits": logits}
    all_logprobs, _ = ppo_rlhf.forward_response(lambda *_, **__: given, batch, 2.0)
    assert torch.equal(all_logprobs, (kept / 2).log_softmax(-1))
    assert torch.equal(logits, kept / 2)


@pytest.mark.parametrize("contexts", ["1 / 1", "1 2 / 1 2", "1 / 2 3"])
def test_every_batch_of_rloo_is_read_in_two_passes(contexts):
    """With one token in a query, too: where weights are sharded, others would wait forever."""
    lm = tiny.make_lm("gpt2")
    calls = []
    lm.transformer.register_forward_hook(lambda *_: calls.append(1))
    contexts = [row for row in rows_of(contexts) for _ in range(2)]
    batch = make_batch(contexts, random_rows([4] * 4, seed=1))
    rloo_rlhf.forward_response(make_policy(lm, 2), batch, 1.0)
    assert len(calls) == 2


def plain_rewards(judge, texts):
    """gain * logit + bias after each token of each text alone, in plain transformers."""
    states = full_states(judge, texts)
    return [(GAIN * judge.score(x) + BIAS).squeeze(1).detach() for x in states]


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(WITH_CLASSIFIER))
def test_rewards_are_gain_times_logit_plus_bias_whatever_stands_beside(name, attention):
    """In PPO and RLOO (without a query's prefix and suffix), in a critic that starts from the
    reward model, and in train_reward.py, where queries are read once, or with every response if
    there is checkpointing. One response ends with eos, the pad."""
    folder = folder_of(name) / "judge"
    auto_class = AutoModelForSequenceClassification
    plain = auto_class.from_pretrained(folder, attn_implementation=attention)
    model = load(folder, "reward_model", attention)
    assert model.config._attn_implementation == attention
    both = []
    for is_checkpointed in (False, True):
        args = train_reward.Args(gradient_checkpointing=is_checkpointed)
        trained = train_reward.RewardModel(model, args)
        trained.gain.data.fill_(GAIN)
        trained.bias.data.fill_(BIAS)
        both.append(trained)
    sizes = []
    model.base_model.register_forward_hook(lambda _, __, made: sizes.append(len(made[0])))
    for n in (1, 3):
        lengths = [i * 5 % LENGTH + 1 for i in range(len(CONTEXTS) * n)]
        responses = random_rows(lengths, seed=2)
        responses[2] = ENDING
        contexts = [context for context in CONTEXTS for _ in range(n)]
        texts = [context + row for context, row in zip(contexts, responses, strict=True)]
        expected = torch.stack([x[-1] for x in plain_rewards(plain, texts)])

        queries = [data_module.Query(context, [9, *context, 9], {}) for context in contexts]
        for module in (ppo_rlhf, rloo_rlhf):
            head = module.reward_head(model)
            sizes.clear()
            scores = module.score_by_model(model, head, 4, queries, responses)
            assert max(sizes) == 4
            assert not scores.requires_grad
            assert_close(scores, expected)

        labels = []
        for i, context in enumerate(CONTEXTS):
            its = responses[i * n :][:n]
            labels.append(labels_module.Comparison(context, its, i % n))
        for trained, num_passes in zip(both, (2, 1), strict=True):
            sizes.clear()
            with torch.no_grad():
                rewards, best, is_hit = train_reward.label_rewards(trained, labels)
            assert len(sizes) == num_passes
            assert_close(rewards, expected.view(-1, n))
            assert best.tolist() == [label.best for label in labels]
            highest = expected.view(-1, n).argmax(1)
            assert torch.equal(is_hit, highest == best)

    policy = ppo_rlhf.ActorCritic(tiny.make_lm("gpt2"), model)
    responses = random_rows([LENGTH] * len(CONTEXTS), seed=3)
    with torch.no_grad():
        batch = make_batch(CONTEXTS, responses)
        values = ppo_rlhf.forward_response(policy, batch, 1.0)[1]["values"]
    texts = [context + row for context, row in zip(CONTEXTS, responses, strict=True)]
    expected = [x[-LENGTH - 1 : -1] for x in plain_rewards(plain, texts)]
    assert_close(values, torch.stack(expected))
    load(folder_of(name), attention=attention, classifier=True)  # a language model gets a new head


@pytest.mark.parametrize("module", [ppo_rlhf, rloo_rlhf])
def test_a_classifier_without_gain_and_bias_scores_by_its_logit(module):
    model = tiny.make_classifier()
    head = module.reward_head(model)
    assert torch.equal(head.weight, model.score.weight)
    assert not head.bias.any()


def test_labels_that_fit_the_window_fit_it_together():
    """A long query's response is padded to the length of a short one's: padding has no position."""
    model = load(folder_of("gpt2") / "judge", "reward_model")
    window = model.config.max_position_embeddings
    contexts = random_rows((window - 3, 4), seed=1)
    responses = random_rows((2, 3, window - 5, window - 4), seed=2)
    labels = [
        labels_module.Comparison(contexts[0], responses[:2], 0),
        labels_module.Comparison(contexts[1], responses[2:], 0),
    ]
    with torch.no_grad():
        trained = train_reward.RewardModel(model, train_reward.Args())
        together, _, _ = train_reward.label_rewards(trained, labels)
        alone = [train_reward.label_rewards(trained, [label])[0] for label in labels]
    assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("name", ["rloo_rlhf", "train_reward"])
def test_a_query_is_read_once_and_its_unused_states_get_a_gradient_of_zero(name, monkeypatch):
    """With sharded weights every output must get a gradient."""
    script = importlib.import_module(name)
    passes = []
    read = models_module.forward

    def watched(*arguments, **named):
        output = read(*arguments, **named)
        made = output.logits if "logits" in output else output.last_hidden_state
        made.retain_grad()
        passes.append((tuple(arguments[1].shape), made))
        return output

    monkeypatch.setattr(script, "forward", watched)
    monkeypatch.setattr(models_module, "forward", watched)
    if script is rloo_rlhf:
        policy = make_policy(tiny.make_lm("gpt2"), 2)
        ids, mask = models_module.pad_rows(rows_of("1 2 3 4 / 1 2 5 6"))
        made = policy(ids, mask, last=2)["logits"]
        shapes = [(1, 2), (2, 2)]
    else:
        label = labels_module.Comparison([5, 6, 7], rows_of("8 9 / 10 11 12"), 1)
        reward = script.RewardModel(tiny.make_classifier(), script.Args())
        made, _, _ = script.label_rewards(reward, [label])
        shapes = [(1, 3), (2, 3)]
    made.square().sum().backward()
    assert [shape for shape, _ in passes] == shapes
    unused, used = (made for _, made in passes)
    assert unused.grad is not None
    assert not unused.grad.any()
    assert used.grad.any()


def test_sampling_reads_a_query_once_with_checkpointing_too(monkeypatch):
    read = mock.Mock(wraps=models_module.forward)
    monkeypatch.setattr(rloo_rlhf, "forward", read)
    monkeypatch.setattr(models_module, "forward", read)
    args = rloo_rlhf.Args(rloo_k=2, gradient_checkpointing=True)
    policy = rloo_rlhf.Actor(tiny.make_lm("gpt2"), args)
    contexts = rows_of("1 2 3 / 1 2 3")
    u = torch.full((2, 2), 0.5)
    tiny.sample(policy, contexts, u, 1.0)
    shapes = [tuple(call.args[1].shape) for call in read.call_args_list]
    assert shapes == [(1, 2), (2, 1), (2, 1)]


def test_a_head_gets_states_without_gaps():
    """Else torch copies a frozen head's weights for each row. Only the last states are given."""
    lm = tiny.make_lm("gpt2")
    args = rloo_rlhf.Args(gradient_checkpointing=True)
    policies = [make_policy(lm, 1), rloo_rlhf.Actor(lm, args)]
    given = []
    for is_patched in (False, True):
        if is_patched:
            patch_layers(lm, "fp32", tiny.VOCABULARY)
        lm.lm_head.register_forward_hook(lambda _, inputs, __: given.append(inputs[0]))
        for policy in policies:
            policy(*models_module.pad_rows(CONTEXTS), last=2)
            assert given[-1].is_contiguous() == is_patched
            assert given[-1].shape[1] == 2
    models_module.forward(lm, *models_module.pad_rows(CONTEXTS), last=1)  # train_reward.py's
    assert given[-1].shape[1] == 1


def test_micro_batches_have_rows_of_similar_length_and_keep_those_of_a_query_together():
    rows = torch.tensor([5, 4, 1, 0, 3, 2, 6])
    contexts = rows_of("1 1 1 / 1 1 1 / 2 / 2 / 1 1 / 1 1 / 1")
    mask = torch.ones(7, 1)
    batch = SimpleNamespace(contexts=contexts, num_tokens=[1] * 7, loss_mask=mask)
    groups = ppo_rlhf.micro_batches(rows, batch, 2)
    found = [group.tolist() for group in groups]
    assert found == rows_of("3 2 / 6 5 / 4 1 / 0")
