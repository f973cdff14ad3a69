"""A policy small enough to enumerate: the best KL-regularised policy is known, and both algorithms find it."""

import importlib

import pytest
from conftest import ROOT


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_training_comes_within_two_percent_of_the_exact_optimum(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J(pi) = E_pi[r] - beta KL(pi || rho) over all 8^3 responses is at most J* = beta log E_rho exp(r / beta)."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    optimum = importlib.import_module("optimum")
    ref_logprobs = optimum.enumerate_logprobs(optimum.ppo_rlhf.ActorCritic(optimum.make_lm(1)))
    assert ref_logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    row = optimum.train(algorithm, 1, updates=200, points=5)
    best, rewards = row["j_star"], optimum.make_rewards(1)
    assert best == pytest.approx((ref_logprobs.exp() * rewards.exp()).sum().log().item(), abs=1e-5)  # beta is 1
    assert row["j_ref"] == pytest.approx((ref_logprobs.exp() * rewards).sum().item(), abs=1e-5)
    assert row["j_ref"] < best and max(j for _, j in row["curve"]) < best + 1e-6  # nothing beats the optimum
    assert (best - row["j"]) / (best - row["j_ref"]) < 0.02
