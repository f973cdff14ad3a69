"""What stops a run: limits of its metrics, and passes or sampling that differ from the update's."""

import itertools
import math

import fork_tools
import pytest
import tiny_models as tiny
import torch
from accelerate import Accelerator
from fork_tools import PPO, RLOO, WORDS
from run_tools import read_lines
from tiny_models import BOTH, make_policy, make_queries, random_rows

import ppo_rlhf
import rloo_rlhf
from plumbing import launch as launch_module
from plumbing.launch import UserError

EIGHT = random_rows((1, 9, 4, 6, 2, 7, 5, 3), seed=1)
LENGTH = 12
# dtype, update; limits of the three metrics, for 25 tokens
LIMITS = [
    ("fp32", 0, (1e-3, 1e-3, 0.025)),
    ("fp32", 1, (1e-3, 1e-3, math.inf)),
    ("tf32", 0, (0.01, 0.05, 0.25)),
    ("bf16", 0, (0.02, 0.3, 0.5)),
]


@pytest.mark.parametrize(("dtype", "update", "limits"), LIMITS)
@BOTH
def test_first_passes_that_differ_stop_a_run(module, dtype, update, limits):
    """And any gradient that is not finite."""
    args = module.Args(dtype=dtype, response_length=25)
    names = ("first_ratio_error", "sampling_error", "objective/kl")
    fine = dict.fromkeys(names, 0.0) | {"gradient_norm": 1e30}
    for name, limit in zip(names, limits, strict=True):
        for sign in (-1, 1):
            module.check_update(update, fine | {name: 0.99 * sign * limit}, args)
            if limit == math.inf:  # from the second update on --max_kl is the limit: see Run
                continue
            says = f"^{name} is .*, its limit .*: .*; see docs/"
            with pytest.raises(UserError, match=says):
                module.check_update(update, fine | {name: 1.01 * sign * limit}, args)
    for name, bad in itertools.product(fine, ("nan", "inf")):
        if bad == "inf" and name == "objective/kl" and update > 0:
            continue
        with pytest.raises(UserError, match=f"^{name} is {bad}"):
            module.check_update(update, fine | {name: float(bad)}, args)


def first_epoch(module, policy, batch, epochs, args):
    """Metrics of an update with steps of size 0."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    prepared, optimizer = accelerator.prepare(policy, optimizer)
    update = module.ppo_update if module is ppo_rlhf else module.rloo_update
    means = update(accelerator, prepared, optimizer, batch, epochs, args)
    means.add({"sampling_error": module.sampling_error(batch)})
    return means.reduce()


CASES = [
    ("gpt2", 1, False),
    ("gpt2", 2, True),
    ("gemma2", 2, True),  # scaled and capped logits
    ("bloom", 1, True),  # alibi
    ("mistral_short", 2, False),  # a window shorter than the text
]


@pytest.mark.parametrize(("name", "num_minibatches", "mask_truncated"), CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@BOTH
def test_first_ratio_is_exactly_one(module, dtype, name, num_minibatches, mask_truncated, tmp_path):
    """All of the first epoch, where no step moves the weights. Dropout of the configs is off."""
    launch_module.set_up_torch(dtype)
    tiny.save_model(tmp_path, name)
    k = 1 if module is ppo_rlhf else 4
    policy = make_policy(tiny.load(tmp_path, dtype=dtype), k)
    args = module.Args(truncate_after=1, mask_truncated=mask_truncated, dtype=dtype)
    args.micro_batch_size = 3 * k

    contexts = [context for context in EIGHT for _ in range(k)]
    u = module.uniforms(1, 1, len(contexts), LENGTH)
    whole, _ = tiny.sample(policy, contexts, u, args.temperature)
    end_token = whole[0, 3].item()
    order = torch.arange(len(contexts)).view(-1, k).flip(0)
    epochs = order.view(1, num_minibatches, -1)
    batch = module.rollout(policy, make_queries(contexts), u, end_token, args)
    module.set_logprobs(batch, policy, policy, epochs[0], args)
    if dtype == "fp32":  # where rows have left the batch, bf16 rounds the others in another way
        assert torch.equal(batch.responses * batch.loss_mask, whole * batch.loss_mask)
    assert torch.equal(batch.logprobs, batch.ref_logprobs)
    assert batch.loss_mask.all() != mask_truncated
    if module is rloo_rlhf:
        batch.advantages = torch.randn(len(u))
    else:
        batch.rewards = torch.randn(u.shape)

    metrics = first_epoch(module, policy, batch, epochs, args)
    assert metrics["first_ratio_error"] == 0
    assert metrics["sampling_error"] < module.TOLERANCES[dtype][1]
    assert metrics["policy/ratio"] == 1
    assert metrics["policy/approxkl"] == 0
    assert metrics["policy/clipfrac"] == 0
    if name == "gpt2":
        assert_largest_is_found(module, policy, batch, epochs, args)


def assert_largest_is_found(module, policy, batch, epochs, args):
    """A single shifted log-probability is found, in any micro-batch. That of ratios is of the first
    step, that of sampling a mean over the response's tokens that count, of the whole batch."""
    first = epochs[0, 0].tolist()
    longest = max(first, key=lambda row: len(batch.contexts[row]))  # in the last micro-batch
    last = epochs.flatten()[-1].item()
    rounding = 0.1 if args.dtype == "bf16" else 1e-3
    shifted = {"first_ratio_error": batch.logprobs, "sampling_error": batch.sampled_logprobs}
    for name, logprobs in shifted.items():
        kept = logprobs.clone()
        for row, shift in ((first[0], 4.0), (longest, -4.0), (last, 5.0)):
            logprobs[row, 0] += shift
            metrics = first_epoch(module, policy, batch, epochs, args)
            logprobs.copy_(kept)
            if name == "sampling_error":
                shift /= batch.num_tokens[row]
            elif row not in first:
                shift = 0
            assert metrics[name] == pytest.approx(abs(shift), abs=rounding)


@BOTH
def test_a_loss_of_another_shape_is_an_error(module, monkeypatch):
    """Broadcast, it would train something else, or nothing. A term that a copy adds may repeat the
    mean of rows, but not two losses."""
    name = "ppo_loss" if module is ppo_rlhf else "rloo_loss"
    args = module.Args(response_length=3)
    policy = make_policy(tiny.make_lm("gpt2"), getattr(args, "rloo_k", 1))
    batch = tiny.roll_out(module, policy, args, EIGHT[:2])
    if module is rloo_rlhf:
        batch.advantages = torch.ones(len(batch.responses))
    else:
        batch.rewards = torch.ones(batch.responses.shape)
    found = getattr(module, name)

    def changed(*given):
        *losses, metrics = found(*given)
        return *[torch.stack([x, x]) for x in losses], metrics

    monkeypatch.setattr(module, name, changed)
    epochs = torch.arange(len(batch.responses)).view(1, 1, -1)
    with pytest.raises(ValueError, match=r"^loss/\w+ \[.*\] must be \[.*\]$"):
        first_epoch(module, policy, batch, epochs, args)


# Faults of sampling: what stands in a script, and what a copy of it has instead.
FAULTS = {
    "a cache that is not used": (
        "policy(ids, mask, cache=cache)",
        "policy(ids, mask[:, -ids.shape[1] :], cache=Cache())",
    ),
    "positions off by one": (  # not in the one row that is read at load
        "position_ids=positions[:, -ids.shape[1] :]",
        "position_ids=positions[:, -ids.shape[1] :] + (ids.shape[1] == 1 < len(ids))",
    ),
    "a temperature off by 10 %": (
        "contexts, noise, args.temperature",
        "contexts, noise, 1.1 * args.temperature",
    ),
}


@pytest.mark.parametrize("script", [PPO, RLOO])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_stops_that_samples_from_others(script, fault, folder, tmp_path):
    """Nothing else of it looks wrong."""
    copy = fork_tools.changed_copy(script, tmp_path)
    name = "plumbing/models.py" if "positions" in fault else script
    fork_tools.change_file(tmp_path / name, FAULTS[fault])
    status, _, errors = fork_tools.run(copy, WORDS[script], folder)
    assert status == 1, errors
    assert f"{script}: sampling_error is " in errors
    (metrics,) = read_lines(folder / "out/metrics.jsonl")
    assert metrics["first_ratio_error"] == 0
    assert abs(metrics["objective/kl"]) < 1e-6
