"""Replays of arrays recorded from OpenAI's lm-human-preferences (TensorFlow, fp32) through the scripts' functions."""

import contextlib
import copy
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from golden_tools import folder_of, load_actor, load_golden, load_reward, named_weights, rows_of, script_args
from golden_tools import weights_from_tf as from_tf
from tiny_models import forward, make_batch, make_queries
from torch import Tensor
from transformers import GPT2Tokenizer

import ppo_rlhf
import train_reward
from tf_adam import AdamTF

LOGPROB_ATOL, WEIGHT_ATOL, RELATIVE_MOVE = 2e-5, 2e-6, 1e-4


def off(ours: Tensor, expected: np.ndarray) -> float:
    return np.abs(ours.detach().numpy() - expected).max()


def assert_moved_alike(module: torch.nn.Module, before: dict, arrays: dict, prefix: str) -> None:
    """Weights equal to WEIGHT_ATOL, and the whole move equal to RELATIVE_MOVE (relative L2)."""
    after, expected = named_weights(module), from_tf(arrays, prefix)
    assert set(before) >= set(expected) and len(expected) >= len(before) - 2
    error = moved = 0.0
    for name, target in expected.items():
        value = after[name].detach().reshape(target.shape)
        assert (value - target).abs().max() < WEIGHT_ATOL, name
        error += ((value - target).double() ** 2).sum().item()
        moved += ((target - before[name].reshape(target.shape)).double() ** 2).sum().item()
    assert moved > 0
    assert math.sqrt(error / moved) < RELATIVE_MOVE


@pytest.mark.parametrize("variant", ["", "t1/", "affix/", "leftpad_patched/"])
def test_logprobs_values_and_entropies_equal_the_original(golden_02: Path, variant: str) -> None:
    arrays, record = load_golden(golden_02)
    policy = load_actor(folder_of(golden_02, "hf_policy"))
    contexts = rows_of(arrays["queries"], policy.lm.config.vocab_size)
    if variant == "affix/":
        prefix, suffix = arrays["affix/prefix_tokens"].tolist(), arrays["affix/suffix_tokens"].tolist()
        contexts = [prefix + row + suffix for row in contexts]
    recorded = {"t1/": 1.0, "affix/": 0.5}
    temperature = recorded.get(variant, record["hparams"]["task"]["policy"]["temperature"])
    logprobs, entropies, values = forward(policy, make_batch(contexts, arrays["responses"]), temperature)
    assert off(logprobs, arrays[f"{variant}logprobs"]) < LOGPROB_ATOL
    assert off(entropies, arrays[f"{variant}entropies"]) < LOGPROB_ATOL
    assert off(values, arrays[f"{variant}values"]) < 5e-6


@pytest.mark.parametrize("variant", ["", "_padded"])
def test_reward_scores_equal_the_original(golden_03a: Path, variant: str) -> None:
    arrays, _ = load_golden(golden_03a)
    classifier = load_reward(folder_of(golden_03a, "hf_reward")).lm
    queries, responses = (rows_of(arrays[x], classifier.config.vocab_size) for x in ("queries", "responses" + variant))
    args = ppo_rlhf.Args(response_length=arrays["responses"].shape[1], micro_batch_size=4)
    scores = ppo_rlhf.score(classifier, make_queries(queries), responses, None, args).sum(1)
    assert off(scores, arrays["scores" + variant]) < 5e-6


def test_truncation_and_penalty_equal_the_original(golden_05: Path) -> None:
    arrays, record = load_golden(golden_05)
    task = record["hparams"]["task"]
    responses, pad = torch.from_numpy(arrays["responses"]).long(), int(arrays["postprocessed"].max())
    for key in arrays:
        if match := re.fullmatch(r"(?:after(\d+)/)?postprocessed", key):
            after = int(match[1] or task["truncate_after"])
            kept, found = ppo_rlhf.truncate(responses, task["truncate_token"], after)
            assert (torch.where(kept, responses, pad).numpy() == arrays[key]).all(), key
            assert (found.numpy() == arrays[key.replace("postprocessed", "filter_valid")]).all(), key
    kept, found = ppo_rlhf.truncate(responses, None, task["truncate_after"])
    assert kept.all() and (found.numpy() == arrays["none/filter_valid"]).all()
    found = ppo_rlhf.truncate(responses, task["truncate_token"], task["truncate_after"])[1]
    penalized = torch.where(found, torch.from_numpy(arrays["unpenalized_scores"]), float(task["penalty_reward_value"]))
    assert np.array_equal(penalized.numpy(), arrays["scores"])


def test_query_cut_equals_the_original(golden_08: Path) -> None:
    record = json.loads(golden_08.with_suffix(".json").read_text())
    pad = max(token for case in record["cases"] for row in case["rows"] for token in row)
    for case in record["cases"]:
        length = case["sequence_length"]
        cut = [ppo_rlhf.cut_query(row, length, case["start_token"], case["end_token"]) for row in record["tokens"]]
        has_end = case["start_token"] is None and case["end_token"] is None
        kept = [i for i, row in enumerate(cut) if row or has_end]
        assert kept == case["kept"], case["name"]
        assert [cut[i] + [pad] * (length - len(cut[i])) for i in kept] == case["rows"], case["name"]


def test_the_tokenizer_equals_the_original(golden_09: Path) -> None:
    tokenizer = GPT2Tokenizer.from_pretrained(folder_of(golden_09, "hf_policy"))
    records = json.loads(golden_09.read_text())
    assert len(records) > 10
    for record in records:
        assert tokenizer.encode(record["text"]) == record["tokens"]
        assert tokenizer.decode(record["tokens"]) == record["decoded"]


class AllRanks:
    """An accelerator of one process that plays all ranks in turn: gradients of all of them, then one optimizer step."""

    def __init__(self, world: int) -> None:
        self.num_processes, self.gradient_accumulation_steps = world, 1
        self.sync_gradients, self.accumulate = False, contextlib.nullcontext  # none is whole before the last rank

    def reduce(self, x: Tensor) -> Tensor:
        return x * self.num_processes  # every rank has as many tokens

    def backward(self, loss: Tensor) -> None:
        (loss / self.num_processes).backward()  # as DistributedDataParallel averages


def update(policy, optimizer, batches, epochs, args, arrays, step: str) -> None:
    """ppo_update with the statistics of every minibatch and their means; of several ranks, minibatch by minibatch."""
    minibatches = list(itertools.product(range(args.num_epochs), range(args.num_minibatches)))
    if len(batches) > 1:
        wait = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
        for (i, j), rank in itertools.product(minibatches, range(len(batches))):
            last, mine = optimizer if rank == len(batches) - 1 else wait, epochs[rank][i : i + 1, j : j + 1]
            ppo_rlhf.ppo_update(AllRanks(len(batches)), policy, last, batches[rank], mine, args)
        return
    device = Accelerator(cpu=True)
    records = ppo_rlhf.ppo_update(device, policy, optimizer, batches[0], epochs[0], args)
    parts, size = {f"{step}/stats/ppo/": records}, len(records) // len(minibatches)
    parts |= {f"{step}/mb{i}/stats/": records[i * size : (i + 1) * size] for i in range(len(minibatches))}
    for prefix, part in parts.items():
        metrics = ppo_rlhf.reduce_means(device, part)
        recorded = {name: arrays[key] for name in metrics if (key := prefix + name.removeprefix("ppo/")) in arrays}
        assert len(recorded) > 10 or not any(key.startswith(prefix) for key in arrays)
        for name, x in recorded.items():
            assert metrics[name] == pytest.approx(float(x), rel=2e-4, abs=2e-6), prefix + name


def test_ppo_steps_equal_the_original(golden_04: Path) -> None:
    """Rewards, shuffles, statistics, weights and KL coefficient after every recorded PPO step, of all ranks."""
    first, record = load_golden(golden_04)
    args, rows = script_args(record["hparams"]), len(first["s0/rollout/scores"])
    names = re.sub(r"(rank|_r)\d+", r"\1*", golden_04.name) if rows < args.batch_size else golden_04.name
    files = sorted(golden_04.parent.glob(names))
    assert len(files) == args.batch_size // rows
    ranks = [load_golden(file)[0] for file in files]
    policy, ref = (load_actor(folder_of(golden_04, name)) for name in ("hf_policy", "hf_ref"))
    optimizer, kl_coef = AdamTF(policy.parameters(), lr=args.lr, eps=1e-5), args.kl_coef
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    assert num_updates == record.get("n_updates_total", num_updates)
    shuffles = [np.random.RandomState(args.seed + 100_003 * rank) for rank in range(len(ranks))]
    for step in sorted({key.split("/")[0] for key in first if re.match(r"s\d+/rollout", key)}):
        before, batches, epochs, kls = copy.deepcopy(named_weights(policy)), [], [], []
        assert float(first[f"{step}/kl_coef_used"]) == pytest.approx(kl_coef, rel=1e-6)
        for arrays, shuffle in zip(ranks, shuffles, strict=True):
            contexts = rows_of(arrays[f"{step}/rollout/queries"], policy.lm.config.vocab_size)
            batch = make_batch(contexts, arrays[f"{step}/rollout/responses"])
            for name in ("logprobs", "values", "ref_logprobs", "scores"):
                batch[name] = torch.from_numpy(arrays[f"{step}/rollout/{name}"])
            if f"{step}/rollout/postprocessed_responses" in arrays:  # a real rollout: everything can be made again
                replay_rollout(golden_04, policy, ref, contexts, batch, arrays, step, args)
            log_ratio = batch["logprobs"] - batch["ref_logprobs"]
            batch["rewards"] = ppo_rlhf.token_rewards(batch["scores"], log_ratio, batch["kept"], kl_coef)
            assert off(batch["rewards"], arrays[f"{step}/rollout/rewards"]) < 1e-5
            perms = np.stack([shuffle.permutation(len(contexts)) for _ in range(args.num_epochs)])
            assert np.array_equal(perms, arrays[f"{step}/perms"])
            epochs.append(torch.from_numpy(perms).reshape(args.num_epochs, args.num_minibatches, -1))
            batches.append(batch)
            kls.append(log_ratio.sum(1).mean().item())
        optimizer.param_groups[0]["lr"] = args.lr * (1 - int(step[1:]) / num_updates)
        update(policy, optimizer, batches, epochs, args, first, step)
        assert_moved_alike(policy, before, first, f"{step}/weights_after/policy/")
        if args.kl_target is not None:  # as in main, whose runs have twins
            kl_coef *= 1 + np.clip(np.mean(kls) / args.kl_target - 1, -0.2, 0.2) * args.batch_size / args.kl_horizon
        assert float(first[f"{step}/kl_coef_after"]) == pytest.approx(kl_coef, rel=1e-6)


def replay_rollout(file: Path, policy, ref, contexts, batch, arrays, step: str, args) -> None:
    """Log-probabilities, values, truncation and penalised reward-model scores of recorded responses."""
    logprobs, _, values = forward(policy, batch, args.temperature)
    assert (logprobs - batch["logprobs"]).abs().max() < LOGPROB_ATOL
    assert (forward(ref, batch, args.temperature)[0] - batch["ref_logprobs"]).abs().max() < LOGPROB_ATOL
    assert (values - batch["values"]).abs().max() < 1e-5
    stays, found = ppo_rlhf.truncate(batch["responses"], args.truncate_token, args.truncate_after)
    truncated = [row[:n] for row, n in zip(batch["responses"].tolist(), stays.sum(1).tolist(), strict=True)]
    assert truncated == rows_of(arrays[f"{step}/rollout/postprocessed_responses"], policy.lm.config.vocab_size)
    classifier = load_reward(folder_of(file, "hf_reward")).lm
    args.response_length = batch["responses"].shape[1]
    scores = ppo_rlhf.score(classifier, make_queries(contexts), truncated, None, args).sum(1)
    scores = torch.where(found, scores, float(args.penalty_reward_value))
    assert (scores - batch["scores"]).abs().max() < 1e-5


@pytest.mark.parametrize("micro_batch_size", [8, 3])
def test_reward_training_equals_the_original(golden_03b: Path, micro_batch_size: int) -> None:
    """Shuffle, learning rate, loss and weights of every step."""
    arrays, record = load_golden(golden_03b)
    reward = load_reward(folder_of(golden_03b, "hf_reward"))
    names = ["labels/query", *sorted(name for name in arrays if name.startswith("labels/sample"))]
    queries, *samples = (rows_of(arrays[name], reward.lm.config.vocab_size) for name in names)
    labels = list(zip(queries, map(list, zip(*samples, strict=True)), arrays["labels/best"].tolist(), strict=True))
    steps = sorted({key.split("/")[0] for key in arrays if key.startswith("step")})
    size, start = len(arrays["step0/indices"]), float(arrays["step0/lr"])
    order = np.random.RandomState(record["hparams"]["run"]["seed"]).permutation(len(labels))
    assert np.array_equal(order, arrays["perm"])
    before, args = copy.deepcopy(named_weights(reward)), train_reward.Args(micro_batch_size=micro_batch_size)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=math.ceil(size / micro_batch_size))
    model, optimizer = accelerator.prepare(reward, AdamTF(reward.parameters(), lr=start, eps=1e-5))
    for i, step in enumerate(steps):
        rows = order[i * size : (i + 1) * size]
        assert np.array_equal(rows, arrays[f"{step}/indices"])
        optimizer.param_groups[0]["lr"] = start * (1 - i * size / len(labels))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(float(arrays[f"{step}/lr"]), rel=1e-6)
        records = train_reward.reward_update(accelerator, model, optimizer, [labels[j] for j in rows], args)
        loss = train_reward.reduce_means(accelerator, records)["train/loss"]
        assert loss == pytest.approx(float(arrays[f"{step}/loss"]), abs=2e-6)
        assert_moved_alike(reward, before, arrays, f"{step}/weights/reward_model/")


def test_reward_normalisation_equals_the_original(golden_07: Path) -> None:
    arrays, _ = load_golden(golden_07)
    for mean, std, target_mean, target_std, gain, bias in arrays["set_reward_norm_cases"]:
        ours = train_reward.gain_and_bias(mean, std, target_mean, target_std)
        assert np.allclose(ours, (gain, bias), rtol=1e-5, atol=1e-6)
    rewards, gain, bias = torch.from_numpy(arrays["stats_rewards"]).flatten(), torch.ones(1), torch.zeros(1)
    found = train_reward.normalize(rewards, gain, bias)  # of three ranks
    assert found == pytest.approx({name: float(arrays[f"stats_{name}"]) for name in ("mean", "std")}, rel=1e-6)
    assert (gain * rewards + bias).mean().abs() < 1e-5
