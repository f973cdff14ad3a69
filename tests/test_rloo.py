"""RLOO's advantage, loss and update, against cases worked by hand and against the definition."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import rloo_rlhf

# Three prompts with four completions each; the reward of completion k of prompt i. Leave-one-out by hand: for prompt 0,
# completion 0 the baseline is (2 + 3 + 6) / 3 = 11/3, the advantage 1 - 11/3 = -8/3.
REWARDS = [[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 4.0], [-1.0, 1.0, -1.0, 1.0]]
ADVANTAGES = [[-8 / 3, -4 / 3, 0.0, 4.0], [-4 / 3, -4 / 3, -4 / 3, 4.0], [-4 / 3, 4 / 3, -4 / 3, 4 / 3]]


def tiny_actor(vocabulary: int = 11) -> rloo_rlhf.Actor:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=128, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager"
    )
    return rloo_rlhf.Actor(GPT2LMHeadModel(config).eval())


def ragged_batch(n: int, k: int, length: int, vocabulary: int = 11) -> dict[str, torch.Tensor]:
    """n contexts of different lengths with k responses each, laid out as main lays them out."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, vocabulary, rng.integers(2, 8)).tolist() for _ in range(n)]
    responses = torch.from_numpy(rng.integers(0, vocabulary, (n, k, length)))
    ends = torch.from_numpy(rng.integers(1, length + 1, (n, k, 1)))
    rows = responses.flatten(0, 1).tolist()
    return {
        "trees": rloo_rlhf.grow(contexts, [row[: e - 1] for row, e in zip(rows, ends.flatten().tolist(), strict=True)]),
        "lengths": torch.tensor([len(context) for context in contexts]),
        "responses": responses,
        "kept": torch.arange(length) < ends,
        "advantages": rloo_rlhf.rloo_advantages(torch.from_numpy(rng.normal(size=(n, k))).float()),
    }


def test_leave_one_out_advantage_of_the_worked_example_in_both_layouts() -> None:
    prompt_major = torch.tensor(REWARDS)
    assert torch.allclose(rloo_rlhf.rloo_advantages(prompt_major), torch.tensor(ADVANTAGES))
    k_major = prompt_major.T.flatten()  # prompt 0, 1, 2 of completion 0, then of completion 1, ..
    assert torch.allclose(rloo_rlhf.rloo_advantages(k_major.view(4, 3).T), torch.tensor(ADVANTAGES))
    mixed_up = rloo_rlhf.rloo_advantages(k_major.view(3, 4))  # read as if it were prompt-major: another baseline
    assert not torch.allclose(mixed_up.T.flatten().view(4, 3).T, torch.tensor(ADVANTAGES))


def test_with_two_samples_the_advantage_is_the_difference() -> None:
    assert rloo_rlhf.rloo_advantages(torch.tensor([[3.0, 1.0], [0.5, 0.5]])).tolist() == [[2.0, -2.0], [0.0, 0.0]]


def test_advantages_of_a_query_sum_to_zero_and_ignore_a_shift() -> None:
    rewards = torch.randn(5, 4)
    advantages = rloo_rlhf.rloo_advantages(rewards)
    assert advantages.sum(1).abs().max() < 1e-5
    assert torch.allclose(advantages, rloo_rlhf.rloo_advantages(rewards + torch.randn(5, 1)), atol=1e-5)


def test_responses_of_a_query_lie_next_to_each_other() -> None:
    """Prompt-major: rows i * K .. i * K + K - 1 of a rollout answer context i, which greedy decoding shows."""
    actor, contexts, k = tiny_actor(), [[1, 2, 3], [4], [5, 6, 7, 8]], 3
    args = SimpleNamespace(temperature=1e-4, mask_truncated=False, compile=False, truncate_after=0)
    batch = rloo_rlhf.respond(actor, contexts, torch.full((9, 4), 0.5), None, args)
    alone = [
        rloo_rlhf.respond(actor, [context], torch.full((1, 4), 0.5), None, args)["responses"] for context in contexts
    ]
    assert torch.equal(batch["responses"].view(3, k, 4), torch.stack([row.repeat(k, 1) for row in alone]))
    assert len({tuple(row.flatten().tolist()) for row in alone}) > 1


@pytest.mark.parametrize("token_level", [False, True])
def test_the_gradient_at_ratio_one_is_reinforce(token_level: bool) -> None:
    batch, actor = ragged_batch(3, 4, 5), tiny_actor()
    rows = torch.arange(3)
    logprobs, _ = rloo_rlhf.forward_response(actor, batch, rows, 0.7)
    loss, _ = rloo_rlhf.rloo_loss(logprobs, logprobs.detach(), batch["advantages"], batch["kept"], 0.2, token_level)
    ours = torch.autograd.grad(loss, actor.parameters())
    logprobs, _ = rloo_rlhf.forward_response(actor, batch, rows, 0.7)
    reinforce = -(batch["advantages"] * (logprobs * batch["kept"]).sum(-1)).sum()
    for mine, theirs in zip(ours, torch.autograd.grad(reinforce, actor.parameters()), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_masked_tokens_have_no_gradient_and_responses_may_end_first_last_or_never() -> None:
    """Ends at the first token, at the last and never (as long as the response): only what is kept counts."""
    logprobs = torch.randn(1, 3, 4, requires_grad=True)
    kept = torch.tensor([[[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]], dtype=torch.bool)
    old = logprobs.detach() - 0.01
    loss, pairs = rloo_rlhf.rloo_loss(logprobs, old, torch.tensor([[1.0, -2.0, 1.0]]), kept, 0.2, False)
    ratios = [np.exp(0.01), np.exp(0.03), np.exp(0.04)]
    assert loss.item() == pytest.approx(-(ratios[0] - 2 * ratios[1] + ratios[2]), abs=1e-5)
    loss.backward()
    assert torch.equal(logprobs.grad != 0, kept)
    assert pairs["ppo/val/ratio"][0].item() == pytest.approx(sum(ratios), abs=1e-5)
    assert pairs["ppo/val/ratio"][1].item() == 3


def test_a_ratio_beyond_the_clip_range_has_no_gradient_when_it_would_move_further() -> None:
    old = torch.zeros(1, 2, 2)
    logprobs = torch.tensor([[[0.2, 0.2], [0.2, 0.2]]], requires_grad=True)  # ratio of the response: exp(0.4) > 1.2
    loss, pairs = rloo_rlhf.rloo_loss(
        logprobs, old, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, 2, dtype=torch.bool), 0.2, False
    )
    loss.backward()
    assert logprobs.grad[0, 0].abs().max() == 0  # a good response that is likelier already
    assert logprobs.grad[0, 1].abs().min() > 0  # a bad one that became likelier is pushed back
    assert pairs["ppo/policy/clipfrac"][0].item() == 1
    assert loss.item() == pytest.approx(-1.2 + np.exp(0.4), abs=1e-5)


def test_a_shared_query_gives_the_log_probabilities_and_gradients_of_separate_rows() -> None:
    """[query | r1 .. rK] with a block mask equals K rows [query | rk]: forward 1e-5, every gradient too."""
    shared, actor = ragged_batch(4, 3, 5), tiny_actor()
    logprobs, entropy = rloo_rlhf.forward_response(actor, shared, torch.arange(4), 0.7)
    pairs = [[context, branch] for context, *branches in shared["trees"] for branch in branches]
    separate = {"trees": pairs, "responses": shared["responses"].flatten(0, 1)}
    apart, entropy_apart = rloo_rlhf.forward_response(actor, separate, torch.arange(12), 0.7)
    kept = shared["kept"].flatten(0, 1)
    assert torch.allclose(logprobs.flatten(0, 1)[kept], apart[kept], atol=1e-5)
    assert torch.allclose(entropy.flatten(0, 1)[kept], entropy_apart[kept], atol=1e-5)
    weights = torch.randn(4, 3, 5) * shared["kept"]
    one = torch.autograd.grad((logprobs * weights).sum(), actor.parameters())
    other = torch.autograd.grad((apart * weights.flatten(0, 1)).sum(), actor.parameters())
    for mine, theirs in zip(one, other, strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize("token_level", [False, True])
def test_accumulation_equals_large_batch(token_level: bool) -> None:
    weights = []
    for micro, steps in ((32, 1), (8, 2), (4, 4)):
        actor, batch = tiny_actor(), ragged_batch(4, 4, 5)
        with torch.no_grad():
            batch["logprobs"], _ = rloo_rlhf.forward_response(actor, batch, torch.arange(4), 0.7)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        policy, optimizer = accelerator.prepare(actor, torch.optim.SGD(actor.parameters(), lr=0.5))
        args = SimpleNamespace(
            micro_batch_size=micro, rloo_k=4, temperature=0.7, cliprange=0.2, token_level=token_level
        )
        epochs = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i)) for i in range(3)]).view(
            3, 1, 4
        )
        records = rloo_rlhf.rloo_update(accelerator, policy, optimizer, batch, epochs, args)
        assert rloo_rlhf.reduce_means(accelerator, records)["first_ratio_error"] < 1e-5
        weights.append(torch.cat([p.detach().flatten() for p in actor.parameters()]))
    start = torch.cat([p.detach().flatten() for p in tiny_actor().parameters()])
    assert (weights[0] - start).abs().max() > 1e-3
    assert torch.allclose(weights[0], weights[1], atol=2e-6) and torch.allclose(weights[0], weights[2], atol=2e-6)


def test_a_pass_that_the_rollout_keeps_for_the_first_step_changes_no_bit() -> None:
    found = []
    for is_kept in (True, False):
        actor, calls = tiny_actor(), []
        batch, accelerator = ragged_batch(4, 4, 5), Accelerator(cpu=True)
        policy, optimizer = accelerator.prepare(actor, torch.optim.SGD(actor.parameters(), lr=0.5))
        parts = rloo_rlhf.micro_batches(torch.arange(4), batch["lengths"], 4)
        rloo_rlhf.look(accelerator, policy, tiny_actor(), batch, parts, 0.7)
        assert torch.equal(batch["logprobs"], batch["ref_logprobs"]) and not batch["logprobs"].requires_grad
        assert "first" in batch and "values" not in batch
        if not is_kept:
            del batch["first"]
        actor.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        args = SimpleNamespace(micro_batch_size=16, rloo_k=4, temperature=0.7, cliprange=0.2, token_level=False)
        epochs = torch.arange(4).repeat(3, 1, 1)
        records = rloo_rlhf.rloo_update(accelerator, policy, optimizer, batch, epochs, args)
        assert len(calls) == 3 - is_kept
        found.append((torch.cat([p.detach().flatten() for p in actor.parameters()]), records))
    (kept, kept_records), (made, records) = found
    assert torch.equal(kept, made) and len(kept_records) == len(records)
    assert (made - torch.cat([p.detach().flatten() for p in tiny_actor().parameters()])).abs().max() > 1e-3


def test_one_sample_per_query_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["rloo_rlhf.py", "--rloo_k", "1"])
    with pytest.raises(SystemExit) as stopped:
        rloo_rlhf.main(*rloo_rlhf.parse_args("rloo"))
    assert stopped.value.code == 2
    assert "--rloo_k 1" in capsys.readouterr().err


def test_in_bf16_no_response_is_clipped_before_the_first_step() -> None:
    """Rollout and update share one forward pass, so that the first ratio is 1 in any precision."""
    actor, batch = tiny_actor(vocabulary=50), ragged_batch(4, 4, 24, vocabulary=50)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    policy, optimizer = accelerator.prepare(actor, torch.optim.SGD(actor.parameters(), lr=1e-3))
    with torch.no_grad(), accelerator.autocast():
        batch["logprobs"], _ = rloo_rlhf.forward_response(actor, batch, torch.arange(4), 0.7)
        in_bf16 = rloo_rlhf.forward_response(actor, batch, torch.arange(4), 0.7)[0]
    assert torch.equal(in_bf16, batch["logprobs"])
    args = SimpleNamespace(micro_batch_size=16, rloo_k=4, temperature=0.7, cliprange=0.2, token_level=False)
    records = rloo_rlhf.rloo_update(accelerator, policy, optimizer, batch, torch.arange(4).view(1, 1, 4), args)
    metrics = rloo_rlhf.reduce_means(accelerator, records)
    assert metrics["first_ratio_error"] == 0 and metrics["ppo/policy/clipfrac"] == 0
    with torch.no_grad():
        in_fp32 = rloo_rlhf.forward_response(tiny_actor(vocabulary=50), batch, torch.arange(4), 0.7)[0]
    assert (in_fp32 - batch["logprobs"]).abs().max() > 1e-5  # bf16 it was
