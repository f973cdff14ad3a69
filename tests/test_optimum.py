"""A policy small enough to enumerate: the best KL-regularised policy is known, and both algorithms
find it."""

import importlib

import pytest
from conftest import ROOT


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_training_comes_within_two_percent_of_the_exact_optimum(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J(pi) = E_pi[r] - beta KL(pi || rho), over all 8^3 responses, is at most
    J* = beta log E_rho exp(r / beta), with beta 1."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    optimum = importlib.import_module("optimum")
    policy = optimum.ppo_rlhf.ActorCritic(optimum.make_lm(1))
    probability = optimum.enumerate_logprobs(policy).exp()
    rewards = optimum.make_rewards(1)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-5)

    row = optimum.train(algorithm, 1, updates=200, points=5)
    best = row["j_star"]
    start = row["j_ref"]
    exact = (probability * rewards.exp()).sum().log()
    mean = (probability * rewards).sum()
    assert best == pytest.approx(exact.item(), abs=1e-5)
    assert start == pytest.approx(mean.item(), abs=1e-5)
    assert start < best
    assert max(j for _, j in row["curve"]) < best + 1e-6  # nothing beats the optimum
    assert (best - row["j"]) / (best - start) < 0.02
