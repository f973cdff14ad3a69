"""The scripts' functions replay recordings of OpenAI's lm-human-preferences (fp32)."""

import contextlib
import copy
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from golden_tools import (
    below,
    files_of_ranks,
    folder_of,
    load_actor,
    load_golden,
    load_reward,
    named_weights,
    rows_of,
    script_args,
    weights_from_tf,
)
from tiny_models import make_queries, new_rows
from transformers import GPT2Tokenizer

import ppo_rlhf
import train_reward
from benchmark.ours import make_batch
from plumbing import data as data_module
from plumbing import labels as labels_module
from ppo_rlhf import make_optimizer, set_learning_rates

LOGPROB_ATOL = 2e-5
WEIGHT_ATOL = 2e-6
RELATIVE_MOVE = 1e-4


def batch_of(contexts, arrays):
    """The batch of the recorded responses, all of whose tokens count."""
    return make_batch(ppo_rlhf, contexts, torch.from_numpy(arrays["responses"]).long())


def steps_of(arrays, pattern):
    names = [key.split("/")[0] for key in arrays if re.match(pattern, key)]
    return sorted(set(names))


def off(ours, expected):
    assert ours.shape == expected.shape
    return np.abs(ours.detach().numpy() - expected).max()


def assert_moved_alike(module, before, arrays, prefix):
    """Weights equal to WEIGHT_ATOL, and the whole move equal to RELATIVE_MOVE (relative L2)."""
    after = named_weights(module)
    expected = weights_from_tf(arrays, prefix)
    assert set(before) >= set(expected)
    assert len(expected) >= len(before) - 2  # heads' biases
    start = torch.cat([before[name].flatten() for name in expected])
    ours = torch.cat([after[name].flatten() for name in expected])
    theirs = torch.cat([x.flatten() for x in expected.values()])
    assert (ours - theirs).abs().max() < WEIGHT_ATOL
    assert (ours - theirs).norm() < RELATIVE_MOVE * (theirs - start).norm()


@pytest.mark.parametrize("variant", ["", "t1/", "affix/", "leftpad_patched/"])
def test_logprobs_values_and_entropies_equal_the_original(golden_02, variant):
    arrays, record = load_golden(golden_02)
    policy = load_actor(folder_of(golden_02, "hf_policy"))
    contexts = rows_of(arrays["queries"], policy.lm.config.vocab_size)
    temperature = record["hparams"]["task"]["policy"]["temperature"]
    if variant == "t1/":
        temperature = 1.0
    if variant == "affix/":
        temperature = 0.5
        prefix = arrays["affix/prefix_tokens"].tolist()
        suffix = arrays["affix/suffix_tokens"].tolist()
        contexts = [prefix + row + suffix for row in contexts]
    batch = batch_of(contexts, arrays)
    with torch.no_grad():
        all_logprobs, found = ppo_rlhf.forward_response(policy, batch, temperature)
    entropies = ppo_rlhf.entropy(all_logprobs)
    assert off(found["logprobs"], arrays[f"{variant}logprobs"]) < LOGPROB_ATOL
    assert off(entropies, arrays[f"{variant}entropies"]) < LOGPROB_ATOL
    assert off(found["values"], arrays[f"{variant}values"]) < 5e-6


@pytest.mark.parametrize("variant", ["", "_padded"])
def test_reward_scores_equal_the_original(golden_03a, variant):
    arrays, _ = load_golden(golden_03a)
    classifier = load_reward(folder_of(golden_03a, "hf_reward")).lm
    size = classifier.config.vocab_size
    contexts = rows_of(arrays["queries"], size)
    responses = rows_of(arrays[f"responses{variant}"], size)
    head = ppo_rlhf.reward_head(classifier)
    scores = ppo_rlhf.score_by_model(classifier, head, 4, make_queries(contexts), responses)
    assert off(scores, arrays[f"scores{variant}"]) < 5e-6


def test_truncation_and_penalty_equal_the_original(golden_05):
    arrays, record = load_golden(golden_05)
    task = record["hparams"]["task"]
    token = task["truncate_token"]
    responses = torch.from_numpy(arrays["responses"]).long()
    padding = int(arrays["postprocessed"].max())
    for key in arrays:
        match = re.fullmatch(r"(?:after(\d+)/)?postprocessed", key)
        if match is not None:
            after = int(match[1] or task["truncate_after"])
            mask, found = ppo_rlhf.find_end(responses, token, after)
            cut = torch.where(mask, responses, padding)
            assert np.array_equal(cut.numpy(), arrays[key]), key
            valid = arrays[key.replace("postprocessed", "filter_valid")]
            assert np.array_equal(found.numpy(), valid), key
    mask, found = ppo_rlhf.find_end(responses, None, task["truncate_after"])
    assert mask.all()
    assert np.array_equal(found.numpy(), arrays["none/filter_valid"])

    _, found = ppo_rlhf.find_end(responses, token, task["truncate_after"])
    args = ppo_rlhf.Args(penalty_reward_value=task["penalty_reward_value"])
    penalized = ppo_rlhf.penalize_missing_end(
        torch.from_numpy(arrays["unpenalized_scores"]), found, args
    )
    assert np.array_equal(penalized.numpy(), arrays["scores"])


def test_query_cut_equals_the_original(golden_08):
    record = json.loads(golden_08.with_suffix(".json").read_text())
    cases = record["cases"]
    padding = max(np.max(case["rows"]) for case in cases if case["rows"])
    for case in cases:
        length = case["sequence_length"]
        start = case["start_token"]
        end = case["end_token"]
        takes_all = start is None and end is None
        kept = []
        rows = []
        for i, tokens in enumerate(record["tokens"]):
            cut, _ = data_module.cut_query(tokens, length, start, end, "keep_start")
            if cut or takes_all:
                kept.append(i)
                rows.append(cut + [padding] * (length - len(cut)))
        assert kept == case["kept"], case["name"]
        assert rows == case["rows"], case["name"]


def test_the_tokenizer_equals_the_original(golden_09):
    tokenizer = GPT2Tokenizer.from_pretrained(folder_of(golden_09, "hf_policy"))
    records = json.loads(golden_09.read_text())
    assert len(records) > 10
    for record in records:
        assert tokenizer.encode(record["text"]) == record["tokens"]
        assert tokenizer.decode(record["tokens"]) == record["decoded"]


def update_all_ranks(policy, optimizer, batches, epochs, args):
    """ppo_update of all ranks in turn, minibatch by minibatch. Returns each minibatch's metrics, of
    the last rank."""
    world = len(batches)
    accelerator = SimpleNamespace(num_processes=world, no_sync=contextlib.nullcontext)
    accelerator.backward = lambda loss: (loss / world).backward()  # as DDP averages
    wait = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    steppers = [wait] * (world - 1) + [optimizer]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_rlhf, "reduce", lambda x, how: x * world)  # ranks have as many tokens
        for i, j in np.ndindex(args.num_epochs, args.num_minibatches):
            ranks = zip(batches, epochs, steppers, strict=True)
            for batch, order, stepper in ranks:
                rows = order[i : i + 1, j : j + 1]
                means = ppo_rlhf.ppo_update(accelerator, policy, stepper, batch, rows, args)
            found.append(means.reduce())
    return found


def assert_metrics(metrics, arrays, prefix):
    """Of these means those that were recorded, if any were."""
    # As main does, which test_reference.py holds to the same.
    unexplained = metrics["val/error"] / (metrics["returns/var"] + 1e-8)
    metrics["val/var_explained"] = 1 - unexplained
    recorded = below(arrays, prefix)
    both = [name for name in recorded if name in metrics]
    assert len(both) > 10 or not recorded
    for name in both:
        ours = metrics[name]
        theirs = recorded[name].item()
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-6), f"{prefix} {name}"


def test_ppo_steps_equal_the_original(golden_04):
    """In every recorded step, of all ranks, in the original's order of rows."""
    first, record = load_golden(golden_04)
    args = script_args(record["hparams"])
    share = len(first["s0/rollout/scores"])
    files = files_of_ranks(golden_04, args.batch_size // share)
    ranks = [load_golden(file)[0] for file in files]
    policy = load_actor(folder_of(golden_04, "hf_policy"))
    optimizer = make_optimizer(policy, args)
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    assert num_updates == record.get("n_updates_total", num_updates)

    kl_coef = args.kl_coef
    for step in steps_of(first, r"s\d+/rollout"):
        number = int(step[1:])
        before = copy.deepcopy(named_weights(policy))
        assert float(first[f"{step}/kl_coef_used"]) == pytest.approx(kl_coef, rel=1e-6)
        batches = []
        epochs = []
        kls = []
        for rank, arrays in enumerate(ranks):
            rollout = below(arrays, f"{step}/rollout/")
            contexts = rows_of(rollout["queries"], policy.lm.config.vocab_size)
            batch = batch_of(contexts, rollout)
            batch.logprobs = torch.from_numpy(rollout["logprobs"])
            batch.ref_logprobs = torch.from_numpy(rollout["ref_logprobs"])
            batch.values = torch.from_numpy(rollout["values"])
            log_ratio = batch.logprobs - batch.ref_logprobs
            scores = torch.from_numpy(rollout["scores"])
            batch.rewards = ppo_rlhf.at_last_token(scores, batch.loss_mask) - kl_coef * log_ratio
            assert off(batch.rewards, rollout["rewards"]) < 1e-5
            recorded = below(arrays, f"{step}/first_mb/")
            if "order" in recorded:
                rows = torch.from_numpy(recorded["order"]).long()
                mini = ppo_rlhf.select(batch, rows)
                ppo_rlhf.set_advantages(mini, args)
                assert off(mini.advantages, recorded["advantages"]) < 1e-5
                assert off(mini.returns, recorded["returns"]) < 1e-5
            ours = ppo_rlhf.shuffle(new_rows(share), rank, number, args)
            order = torch.from_numpy(arrays[f"{step}/perms"]).long()
            assert torch.equal(order.sort().values, ours.flatten(1).sort().values)
            epochs.append(order.view(ours.shape))
            batches.append(batch)
            kls.append(log_ratio.sum(1).mean().item())

        set_learning_rates(optimizer, number, number / num_updates, args)
        steps = update_all_ranks(policy, optimizer, batches, epochs, args)
        if len(ranks) == 1:
            means = {name: float(np.mean([x[name] for x in steps])) for name in steps[0]}
            assert_metrics(means, first, f"{step}/stats/ppo/")
            for i, minibatch in enumerate(steps):
                assert_metrics(minibatch, first, f"{step}/mb{i}/stats/")
        assert_moved_alike(policy, before, first, f"{step}/weights_after/policy/")
        kl_coef = ppo_rlhf.adapt_kl_coef(kl_coef, float(np.mean(kls)), args)
        assert float(first[f"{step}/kl_coef_after"]) == pytest.approx(kl_coef, rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [8, 3])
def test_reward_training_equals_the_original(golden_03b, micro_batch_size):
    """Shuffle, learning rate, loss and weights of every step."""
    arrays, record = load_golden(golden_03b)
    reward = load_reward(folder_of(golden_03b, "hf_reward"))
    size = reward.lm.config.vocab_size
    samples = sorted(name for name in arrays if name.startswith("labels/sample"))
    columns = [rows_of(arrays[name], size) for name in samples]
    queries = rows_of(arrays["labels/query"], size)
    labels = []
    for i, best in enumerate(arrays["labels/best"].tolist()):
        responses = [rows[i] for rows in columns]
        labels.append(labels_module.Comparison(queries[i], responses, best))
    order = np.random.RandomState(record["hparams"]["run"]["seed"]).permutation(len(labels))
    assert np.array_equal(order, arrays["perm"])

    before = copy.deepcopy(named_weights(reward))
    lr = float(arrays["step0/lr"])
    args = train_reward.Args(micro_batch_size=micro_batch_size, lr=lr)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(reward, make_optimizer(reward, args))
    batch_size = len(arrays["step0/indices"])
    for step in steps_of(arrays, "step"):
        update = int(step[4:])
        start = update * batch_size
        rows = order[start : start + batch_size]
        assert np.array_equal(rows, arrays[f"{step}/indices"])
        set_learning_rates(optimizer, update, start / len(labels), args)
        recorded_lr = pytest.approx(float(arrays[f"{step}/lr"]), rel=1e-6)
        assert optimizer.param_groups[0]["lr"] == recorded_lr
        mine = [labels[i] for i in rows]
        means = train_reward.reward_update(accelerator, model, optimizer, mine, args)
        loss = means.reduce()["train/loss"]
        assert loss == pytest.approx(float(arrays[f"{step}/loss"]), abs=2e-6)
        assert_moved_alike(reward, before, arrays, f"{step}/weights/reward_model/")


def normalized(rewards):
    """Gain and bias that give these logits the mean 0 and the deviation 1."""
    model = SimpleNamespace(gain=torch.ones(1), bias=torch.zeros(1))
    train_reward.normalize(model, rewards)
    assert (model.gain * rewards + model.bias).mean().abs() < 1e-5
    return model.gain.item(), model.bias.item()


def test_reward_normalisation_equals_the_original(golden_07):
    """The original's targets may be other than 0 and 1: for them the result is scaled."""
    arrays, _ = load_golden(golden_07)
    for mean, std, target_mean, target_std, *recorded in arrays["set_reward_norm_cases"]:
        gain, bias = normalized(torch.tensor([mean - std, mean + std], dtype=torch.float32))
        ours = [target_std * gain, target_std * bias + target_mean]
        assert np.allclose(ours, recorded, rtol=1e-5, atol=1e-6)
    gain, bias = normalized(torch.from_numpy(arrays["stats_rewards"]).flatten())  # of three ranks
    assert 1 / gain == pytest.approx(float(arrays["stats_std"]), rel=1e-6)
    assert -bias / gain == pytest.approx(float(arrays["stats_mean"]), rel=1e-6)
