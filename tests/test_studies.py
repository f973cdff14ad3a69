"""What benchmark/studies compute from their runs, where the answers are known; and the study of the
optimum, whose policy is small enough to enumerate."""

import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import PartialState
from conftest import ROOT
from fork_tools import FORKS
from run_tools import to_lines

import rloo_rlhf
from benchmark import differences, runs
from benchmark.studies.alternatives import run as alternatives
from benchmark.studies.choices import run as choices
from benchmark.studies.films import report as films_report
from benchmark.studies.human_labels import policies
from benchmark.studies.human_labels import report as human_report
from benchmark.studies.optimum import run as optimum
from benchmark.studies.overoptimisation import report as over_report
from benchmark.studies.overoptimisation import run as over

STUDIES = ROOT / "benchmark" / "studies"


# --- runs and choices -----------------------------------------------------------------------------
def test_finer_averages_tell_a_faster_run_from_a_worse_one(tmp_path):
    """Two runs on one curve, true score = sqrt(KL), of which one goes five times as fast."""
    fine_pair = []
    coarse_pair = []
    for step in (0.4, 0.08):
        kls = [step * i for i in range(1, 101)]
        metrics = [{"kl": kl, "true_score": kl**0.5} for kl in kls]
        (tmp_path / "metrics.jsonl").write_text(to_lines(*metrics))
        fine_pair.append(runs.with_curves({"failed": False}, tmp_path))
        coarse_pair.append({"fine_curve": runs.curve(metrics, runs.BINS)})
    fine = differences.at_equal_kl(*fine_pair, runs.LEVELS)
    coarse = differences.at_equal_kl(*coarse_pair, runs.LEVELS)
    assert np.mean(coarse) < 10 * np.mean(fine) < 0
    assert fine == pytest.approx([0.0, 0.0, 0.0], abs=0.01)


def of_choices(record):
    return choices.summarise(record["rows"], tuple(record["table"][0]["levels"]))


@pytest.mark.parametrize("name", ["choices/short", "rates/slow"])
def test_the_table_of_a_record_is_that_of_its_runs(name):
    record = json.loads((STUDIES / f"{name}.json").read_text())
    for mine, recorded in zip(of_choices(record), record["table"], strict=True):
        older = {key for key in recorded if key.startswith("beside")}  # of slow, by 0.5.0
        assert recorded.keys() - mine.keys() <= older
        for key, value in mine.items():
            if key == "levels":  # which the table is made for
                continue
            if isinstance(value, float | list):
                numbers = np.array(value, float)  # of None: NaN
                np.testing.assert_allclose(
                    np.array(recorded[key], float),
                    numbers,
                    rtol=1e-3,
                    atol=1e-4,
                    err_msg=key,
                )
            else:
                assert recorded[key] == value, key


def test_what_no_record_shows():
    """Holm's method stops at the first that does not hold, two seeds have an interval, and of seeds
    that agree p is 0. A curve that is past a level at its start has no score there."""
    assert differences.holm([0.003, 0.03, 0.03]) == [True, False, False]
    assert differences.interval([0.1, 0.2]) == pytest.approx(12.706 * 0.05, abs=1e-4)
    assert differences.p_value([0.5, 0.5], 0.0, 1) == 0.0
    points = {
        "kl": [0.5, 4.5],
        "true_score": [0.0, 0.4],
    }
    assert np.isnan(differences.at_levels(points, 0.2))


def test_two_seeds_are_a_comparison_without_an_interval():
    """They are counted by Holm's method, and have no part in the pooled deviation."""
    three = [0.10, 0.11, 0.12]
    table = [{"x_differences": values} for values in (three, [0.5, 0.9], [0.2])]
    differences.add_tests(table, "x")
    assert table[0]["x_interval"] == pytest.approx(4.3027 * 0.01 / 3**0.5, abs=1e-5)
    assert table[0]["x_pooled_interval"] == pytest.approx(table[0]["x_interval"])
    for line in table[1:]:
        assert line["x_interval"] is None
        assert line["x_pooled_interval"] is None
        assert not line["x_holds"]
    own = differences.p_value(three, 0.01, 2)
    assert table[0]["x_holds"] == (own < 0.05 / 2)


def test_rows_that_share_a_base_have_fewer_degrees_of_freedom():
    """Of k rows of n seeds that share one base, Satterthwaite's are 4k (n - 1) / (k + 3): the
    covariance of their noise is 1 + I. Without shared runs they are k (n - 1)."""
    seeds = range(4)
    own = [[((row, seed), ("base", seed)) for seed in seeds] for row in range(5)]
    assert differences.shared_freedom(own) == pytest.approx(4 * 5 * 3 / 8)
    apart = [[((row, seed), ("base", row, seed)) for seed in seeds] for row in range(5)]
    assert differences.shared_freedom(apart) == pytest.approx(5 * 3)


def test_intervals_of_means_and_of_shares():
    """Student's t of three values, whose quantile is 4.303; Wilson's score interval has its ends
    where the share is 1.96 standard errors away, by the end's own error."""
    found = differences.with_interval([0.1, 0.2, 0.3])
    assert found["mean"] == pytest.approx(0.2)
    assert found["width"] == pytest.approx(4.3027 * 0.1 / 3**0.5, abs=1e-4)
    assert found["high"] - found["low"] == pytest.approx(2 * found["width"])
    share = differences.wilson(0.9, 40)
    for end in (share["low"], share["high"]):
        error = (end * (1 - end) / 40) ** 0.5
        assert abs(0.9 - end) == pytest.approx(1.96 * error, rel=1e-4)


def test_every_run_is_a_copy_that_vader_reads(tmp_path):
    for name, choice in runs.CHOICES.items():
        path = tmp_path / f"{runs.slug(name)}.py"
        assert runs.changed_copy(choice, path) == str(path)
        compile(path.read_text(), path, "exec")


# --- overoptimisation -----------------------------------------------------------------------------
def test_few_labels_come_in_turn(tmp_path):
    made = over.labels_folder("128", 1, tmp_path)
    splits = datasets.load_dataset(str(made), cache_dir=str(tmp_path / "cache"))
    rows = splits["train"].to_list()
    assert len(rows) == over.NUM_LABELS
    assert rows[:128] == rows[128:256]
    assert len(set(map(str, rows))) == 128
    all_of_tiny = datasets.load_dataset(str(ROOT / "tiny/labels"))
    assert splits["test"].to_list() == all_of_tiny["test"].to_list()


def record_of(size, *runs, start=0.0, accuracy=0.5):
    """A record of one set of labels. A run: algorithm, coefficient, share of repetitive responses,
    true score."""
    rows = []
    for algorithm, coef, repetitive, true_score in runs:
        row = {
            "labels": size,
            "algorithm": algorithm,
            "kl_coef": coef,
            "held_out": responses_with(repetitive, true_score),
        }
        rows.append(row)
    model = {
        "labels": size,
        "accuracy": accuracy,
    }
    starting_model = {
        "labels": size,
        "held_out": responses_with(0.0, start),
    }
    return {
        "rows": rows,
        "reward_models": [model],
        "starting_models": [starting_model],
    }


def responses_with(repetitive, true_score):
    return {
        "repetitive": repetitive,
        "true_score": true_score,
        "likelihood": -1.0,
        "kl": 2.0,
    }


def test_penalties_are_compared_within_sets_of_labels():
    """Leads of PPO 0.8 and 0.6, of RLOO 0.4 and -0.2: in one of two sets more for RLOO."""
    first = record_of(
        "128",
        ("PPO", 0.0, 0.9, 0.5),
        ("PPO", 0.15, 0.1, 0.3),
        ("RLOO", 0.0, 0.5, 0.1),
        ("RLOO", 0.15, 0.1, 0.2),
    )
    second = record_of(
        "128",
        ("PPO", 0.0, 0.8, 0.5),
        ("PPO", 0.15, 0.2, 0.1),
        ("RLOO", 0.0, 0.1, 0.1),
        ("RLOO", 0.15, 0.3, 0.4),
    )
    ppo, rloo, both = over_report.penalties(first, second)
    found = ppo["repetitive"]
    assert found["none"] == pytest.approx(0.85)
    assert found["default"] == pytest.approx(0.15)
    assert found["mean"] == pytest.approx(0.7)
    assert found["width"] == pytest.approx(12.706 * 0.1, rel=1e-4)
    assert found["more"] == 2
    assert rloo["repetitive"]["mean"] == pytest.approx(0.1)
    assert rloo["repetitive"]["more"] == 1
    assert both["repetitive"]["mean"] == pytest.approx(0.4)


def test_numbers_of_labels_are_compared_by_runs_with_the_penalty():
    small = record_of(
        "128",
        ("PPO", 0.0, 0.9, 0.9),  # without the penalty
        ("PPO", 0.15, 0.1, 0.2),
        ("RLOO", 0.15, 0.0, 0.1),
        accuracy=0.3,
    )
    large = record_of(
        "4000",
        ("RLOO", 0.15, 0.0, 0.8),
        ("PPO", 0.15, 0.0, 0.6),
        start=0.1,
    )
    rows = over_report.by_labels(large, large, small, small)  # two seeds each
    assert [row["labels"] for row in rows] == [128, 4000]
    assert [row["PPO"]["mean"] for row in rows] == [0.2, 0.6]
    assert [row["RLOO"]["mean"] for row in rows] == [0.1, 0.8]
    assert [row["accuracy"]["mean"] for row in rows] == [0.3, 0.5]
    assert [row["start"]["mean"] for row in rows] == [0.0, 0.1]


# --- human labels ---------------------------------------------------------------------------------
def test_pairs_are_divided_into_parts_that_share_none():
    """A pair whose dialogues differ before the last answer is left out."""
    pairs = [{"chosen": "Why?\n\nAssistant: a", "rejected": "How?\n\nAssistant: b"}]
    for i in range(policies.HELD_OUT + 41):
        prompt = f"Human: {i}?\n\nAssistant:"
        pairs.append({"chosen": f"{prompt} yes", "rejected": f"{prompt} no"})
    parts = policies.divide(pairs)
    assert [len(part) for part in parts] == [policies.HELD_OUT, 20, 21]
    prompts = [row["prompt"] for part in parts for row in part]
    assert set(prompts) == {pair["chosen"].removesuffix(" yes") for pair in pairs[1:]}
    assert parts.half_a[0]["chosen"] == " yes"
    assert parts.half_a[0]["rejected"] == " no"


def test_gains_of_policies_are_means_over_seeds_and_small_ones_are_ties():
    """Four responses a model; a tie is a difference of up to 0.1."""
    start = {"run": "starting model", "judge": [0.0, 0.0, 0.0, 0.0]}
    rows = [start]
    for seed, judge in enumerate(([1.0, 0.05, -0.05, -2.0], [1.0, 1.0, 0.05, -0.2])):
        rows.append({"run": "PPO", "seed": seed, "lr": 3e-5, "judge": judge})
    rows.append({"run": "RLOO", "seed": 0, "lr": 3e-5, "judge": [0.2, 0.2, 0.2, 0.2]})
    ppo, rloo = human_report.gains({"rows": rows})
    assert ppo["name"] == "PPO, 3e-5"
    assert ppo["gain"]["mean"] == pytest.approx((-0.25 + 0.4625) / 2)
    shares = {name: ppo[name]["mean"] for name in ("won", "tied", "lost")}
    assert shares == {"won": 0.375, "tied": 0.375, "lost": 0.25}
    assert rloo["won"] == {"mean": 1.0}  # of one seed there is no interval


def test_what_learns_from_labels_is_compared_within_seeds_with_runs_of_another_record():
    start = {"run": "starting model", "judge": [0.5, 0.5]}
    records = []
    for names, shift in ((("PPO", "RLOO"), 0.0), (("fine-tuning", "DPO"), 0.25)):
        rows = [start]
        for seed in (1, 2, 3):
            for i, name in enumerate(names):
                judge = [shift + i, shift + i + seed]
                rows.append({"run": name, "seed": seed, "lr": 3e-5, "judge": judge})
        records.append({"rows": rows})
    found = {row["name"]: row for row in films_report.on_labels(*records)}
    assert found["DPO minus PPO"]["difference"]["mean"] == pytest.approx(1.25)
    assert found["fine-tuning minus RLOO"]["seeds"] == "-0.750, -0.750, -0.750"
    names = [row["name"] for row in films_report.claims(*records)]
    assert names == ["PPO, 3e-5", "RLOO, 3e-5", "fine-tuning, 3e-5", "DPO, 3e-5"]


def test_the_slow_rate_is_compared_with_the_fast_one_within_seeds():
    start = {"run": "starting model", "judge": [0.5, 0.5]}
    records = []
    for lr, shift in ((3e-5, 0.25), (1e-5, 0.0)):
        rows = [start]
        for seed in (1, 2, 3):
            for name in ("PPO", "RLOO"):
                updates = {"objective/kl": [0.0, 1.5], "judge": [0.0, 3.0]}
                updates["policy/clipfrac"] = [lr * 1e5, seed]
                row = {"run": name, "seed": seed, "lr": lr, "updates": updates}
                rows.append(row | {"judge": [shift * seed, shift]})
        records.append({"rows": rows})
    found = films_report.slower(*records)
    assert [row["name"] for row in found] == ["PPO", "RLOO"]
    assert found[0]["seeds"] == "-0.250, -0.375, -0.500"
    assert found[0]["fast"] == pytest.approx(2.5)
    assert found[1]["slow"] == pytest.approx(1.5)
    rates = [(row["rate"], row["where"]) for row in films_report.between(*records)]
    assert rates == [(lr, where) for lr in ("3e-5", "1e-5") for where in ("KL 1", "the end")]


# --- the exact optimum ----------------------------------------------------------------------------
def train(algorithm):
    """A run of 200 updates, in a process of its own. (A fork of this one would wait forever for its
    OpenMP threads, where there are several.)"""
    torch.set_num_threads(1)  # two such processes on two cores
    return optimum.train(algorithm, 1, updates=200, points=5)


@pytest.mark.long
def test_training_comes_within_two_percent_of_the_exact_optimum(monkeypatch):
    """J(pi) = E_pi[r] - beta KL(pi || rho), over all 8^3 responses, is at most
    J* = beta log E_rho exp(r / beta), with beta 1."""
    policy = optimum.ppo_rlhf.ActorCritic(optimum.make_lm(1))
    probability = optimum.enumerate_logprobs(policy).exp()
    rewards = optimum.make_rewards(1)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-5)
    exact = (probability * rewards.exp()).sum().log()
    mean = (probability * rewards).sum()

    monkeypatch.chdir(ROOT / "tests" / "helpers")  # where the server finds fork_warm
    with FORKS.Pool(2, maxtasksperchild=1) as pool:  # side by side
        rows = pool.map(train, ("ppo", "rloo"), 1)
    for row in rows:
        best = row["j_star"]
        start = row["j_start"]
        assert best == pytest.approx(exact.item(), abs=1e-5)
        assert start == pytest.approx(mean.item(), abs=1e-5)
        assert start < best
        assert max(j for _, j in row["curve"]) < best + 1e-6  # nothing beats the optimum
        assert (best - row["j"]) / (best - start) < 0.02, row["algorithm"]


def test_benchmarks_read_queries_before_an_accelerator_is_made(monkeypatch):
    """The scripts' logger asks for accelerate's state, which they have by then."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    args = optimum.ppo_rlhf.Args()
    assert len(optimum.ours.load_queries(optimum.common.tokenizer(), args, 4)) == 4


# --- alternatives ---------------------------------------------------------------------------------
def test_dpo_compares_how_far_both_responses_of_a_pair_have_moved():
    """Two pairs; only in the first one the chosen response has gained more than the other: 0.6."""
    ref = torch.full((4, 2), -1.5)
    moved = torch.zeros(4, 2)
    moved[0, 0] = 0.5
    moved[1, 0] = -0.1
    moved[2, 0] = 0.2
    moved[3, 1] = 0.2
    loss = alternatives.dpo_loss(ref + moved, ref, beta=2.0)
    first = np.log1p(np.exp(-1.2))
    second = np.log(2)
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-6)


def test_a_pair_has_the_best_response_first_and_another_one():
    """With K = 1 there is the best one alone; both end at the first end at index 16 or later."""
    responses = [[i] * 24 for i in (5, 6, 7, 8)]
    label = SimpleNamespace(
        query=[1, 2],
        responses=responses,
        best=2,
    )
    args = rloo_rlhf.Args(rloo_k=2)
    batch = alternatives.make_batch([label], [2], 13, args)
    assert batch.contexts == [[1, 2]] * 2
    assert batch.responses[:, 0].tolist() == [7, 8]
    args.rloo_k = 1
    batch = alternatives.make_batch([label], [0], 7, args)
    assert batch.responses[:, 0].tolist() == [7]
    assert batch.loss_mask.sum() == 17
