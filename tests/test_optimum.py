"""A policy small enough to enumerate: the best KL-regularised policy is known, and both algorithms
find it."""

from typing import Any

import pytest
import torch
from accelerate import PartialState
from conftest import ROOT
from fork_tools import FORKS

from benchmark.studies.optimum import run as optimum

ALGORITHMS = ("ppo", "rloo")


def train(algorithm: str) -> dict[str, Any]:
    """A run of 200 updates, in a process of its own. (A fork of this one would wait forever for its
    OpenMP threads, where there are several.)"""
    torch.set_num_threads(1)  # two such processes on two cores
    return optimum.train(algorithm, 1, updates=200, points=5)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """What both algorithms reach, side by side."""
    with FORKS.Pool(2, maxtasksperchild=1) as pool:
        return dict(zip(ALGORITHMS, pool.map(train, ALGORITHMS, 1), strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_comes_within_two_percent_of_the_exact_optimum(
    algorithm: str, rows: dict[str, dict[str, Any]]
) -> None:
    """J(pi) = E_pi[r] - beta KL(pi || rho), over all 8^3 responses, is at most
    J* = beta log E_rho exp(r / beta), with beta 1."""
    script = optimum.ppo_rlhf
    policy = script.ActorCritic(optimum.make_lm(1), optimum.VOCABULARY)
    probability = optimum.enumerate_logprobs(policy).exp()
    rewards = optimum.make_rewards(1)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-5)

    row = rows[algorithm]
    best = row["j_star"]
    start = row["j_start"]
    exact = (probability * rewards.exp()).sum().log()
    mean = (probability * rewards).sum()
    assert best == pytest.approx(exact.item(), abs=1e-5)
    assert start == pytest.approx(mean.item(), abs=1e-5)
    assert start < best
    assert max(j for _, j in row["curve"]) < best + 1e-6  # nothing beats the optimum
    assert (best - row["j"]) / (best - start) < 0.02


def test_benchmarks_read_queries_before_an_accelerator_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scripts' logger asks for accelerate's state, which they have by then."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    args = optimum.rloo_rlhf.Args()
    assert len(optimum.ours.load_queries(optimum.common.tokenizer(), args, 4)) == 4
