"""What benchmark/studies compute from their runs, where the answers are known; and the study of the
optimum, whose policy is small enough to enumerate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import PartialState
from conftest import ROOT
from fork_tools import FORKS

from benchmark import differences
from benchmark.studies.optimum import run as optimum
from benchmark.studies.overoptimisation import run as over
from benchmark.studies.short_runs import run as ablations
from benchmark.studies.slow_rate import report as slow_rate

Record = dict[str, Any]
STUDIES = ROOT / "benchmark" / "studies"
LAMBDA = "lambda 1 (default: 0.95)"
GAMMA = "gamma 0.95"


# --- short runs -----------------------------------------------------------------------------------
def run(choice: str, seed: int, true_score: float, kl: float) -> Record:
    """A row of the record whose curve is a line from the origin."""
    return {
        "choice": choice,
        "seed": seed,
        "true_score": true_score,
        "reward": 0.0,
        "kl": kl,
        "distinct": 1.0,
        "true_score_before": 0.0,
        "fine_curve": {"true_score": [0.0, true_score], "kl": [0.0, kl]},
    }


def lines_of(rows: list[Record]) -> dict[str, Record]:
    """The lines of the table of these runs, by their choice."""
    return {line["choice"]: line for line in ablations.summarise(rows)}


def test_the_true_score_is_read_where_a_curve_first_passes_a_level() -> None:
    points = {
        "kl": [0.5, 4.5, 3.0, 8.0],
        "true_score": [0.0, 0.4, 0.9, 0.6],
    }
    assert ablations.true_score_at(points, 2.5) == pytest.approx(0.2)
    assert ablations.true_score_at(points, 9.0) is None
    assert ablations.true_score_at(points, 0.2) is None


def test_a_choice_that_only_goes_further_is_no_better_at_equal_kl() -> None:
    rows = []
    for seed in (1, 2, 3):
        slope = 0.1 + 0.001 * seed
        further = 10 * slope + 0.01 * (seed - 2)
        better = 5 * slope + 0.5 + 0.01 * seed
        rows.append(run("default", seed, 5 * slope, kl=5.0))
        rows.append(run(LAMBDA, seed, further, kl=10.0))
        rows.append(run(GAMMA, seed, better, kl=5.0))
    lines = lines_of(rows)
    longer = lines[LAMBDA]
    higher = lines[GAMMA]
    assert longer["true_score_difference"] == pytest.approx(0.51)
    assert longer["equal_kl"] == pytest.approx(0.0, abs=1e-12)
    assert not longer["equal_kl_holds"]
    # At 2 and 4 nats: the default does not reach 6.
    assert higher["equal_kl"] == pytest.approx(0.52 * 3 / 5)
    assert higher["equal_kl_levels"] == pytest.approx([0.208, 0.416, None])
    assert higher["equal_kl_holds"]
    assert lines["default"]["equal_kl"] is None
    near = run("near", 1, 0.1, kl=1.0)
    assert ablations.at_equal_kl(rows[0], near) == [None] * 3


def test_finer_averages_tell_a_faster_run_from_a_worse_one(tmp_path: Path) -> None:
    """Two runs on one curve, true score = sqrt(KL), of which one goes five times as fast."""
    pair = []
    for step in (0.4, 0.08):
        kls = [step * i for i in range(1, 101)]
        metrics = [{"kl": kl, "true_score": kl**0.5} for kl in kls]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
        pair.append(ablations.with_curves({"failed": False}, tmp_path))
    fine = ablations.at_equal_kl(*pair)
    coarse = ablations.at_equal_kl(*[{"fine_curve": row["curve"]} for row in pair])
    assert np.mean(coarse) < 10 * np.mean(fine) < 0
    assert fine == pytest.approx([0.0, 0.0, 0.0], abs=0.01)


def test_holm_stops_at_the_first_that_does_not_hold() -> None:
    """Three choices with p of 0.003, 0.03 and 0.03: alone each is below 0.05, but 0.05 / 2 is not
    reached by the second."""
    spreads = {LAMBDA: 0.1, GAMMA: 0.33, "1 epoch (default: 4)": 0.33}
    rows = []
    for seed, sign in ((1, -1.0), (2, 0.0), (3, 1.0)):
        rows.append(run("default", seed, 1.0, kl=10.0))
        for choice, spread in spreads.items():
            # Linear curves: at 2, 4 and 6 nats the mean difference is 0.4 of that at 10.
            score = 1.0 + (1.0 + spread * sign) / 0.4
            rows.append(run(choice, seed, score, kl=10.0))
    lines = lines_of(rows)
    assert lines[LAMBDA]["equal_kl"] == pytest.approx(1.0)
    holds = [lines[choice]["equal_kl_holds"] for choice in spreads]
    assert holds == [True, False, False]


def test_a_pooled_deviation_keeps_what_a_row_s_own_does_not() -> None:
    """The first row varies more than the others, so alone its mean of 2 is not far from 0. The
    pooled deviation is around the mean of each row. The third row changes nothing and does not
    count."""
    table = [
        {"x_differences": [1.0, 2.0, 3.0]},
        {"x_differences": [-0.1, 0.0, 0.1]},
        {"x_differences": [0.0, 0.0, 0.0]},
        {"x_differences": [5.0]},
    ]
    differences.add_tests(table, "x")
    wide, narrow, nothing, single = table
    # The pooled deviation is (2.02 / 4) ** 0.5 = 0.7106; t is 4.303 with 2 degrees of freedom and
    # 2.776 with 4.
    assert wide["x_interval"] == pytest.approx(4.303 * 1.0 / 3**0.5, rel=1e-3)
    assert wide["x_pooled_interval"] == pytest.approx(2.776 * 0.7106 / 3**0.5, rel=1e-3)
    # p is 0.074 alone and 0.0082 with the pooled deviation, and the bound is 0.05 / 3.
    assert not wide["x_holds"]
    assert wide["x_pooled_holds"]
    assert not narrow["x_pooled_holds"]
    assert nothing["x_interval"] == 0.0
    assert nothing["x_pooled_interval"] is None
    assert single["x_interval"] is None
    assert not single["x_holds"]


def test_differences_of_two_records_are_one_family() -> None:
    """Each record alone keeps its difference, whose p is 0.045, and both together keep none."""
    records = []
    for episodes in (100, 200):
        line = {"choice": "default", "beside_differences": [0.11, 0.08, 0.17]}
        other = {"choice": "RLOO, K 4", "beside_differences": []}
        records.append({"args": {"episodes": episodes}, "table": [line, other]})
    (alone,) = slow_rate.beside(records[0])
    assert alone["bold_beside"] == "**"
    both = slow_rate.beside(*records)
    assert [row["bold_beside"] for row in both] == ["", ""]
    assert [row["bold_beside_pooled"] for row in both] == ["**", "**"]
    assert [row["episodes"] for row in both] == [100, 200]


def short_table(record: Record) -> list[Record]:
    full = json.loads((STUDIES / "full_length/full.json").read_text())
    beside = full["rows"] if record["args"].get("beside") else None
    levels = tuple(record["table"][0]["levels"])
    return ablations.summarise(record["rows"], levels, beside)


def frontier(record: Record) -> list[Record]:
    groups = over.curves_of(record["rows"], record["best_of_n"])
    return over.summarise(groups, record["true_score_before"])


TABLES = [
    ("short_runs/short", short_table),
    ("slow_rate/slow", short_table),
    ("overoptimisation/frontier", frontier),
]


@pytest.mark.parametrize(("name", "summarise"), TABLES)
def test_the_table_of_a_record_is_that_of_its_runs(name: str, summarise: Callable) -> None:
    record = json.loads((STUDIES / f"{name}.json").read_text())
    for mine, recorded in zip(summarise(record), record["table"], strict=True):
        assert recorded.keys() - mine.keys() <= {"accuracy"}  # which the table gets later
        for key, value in mine.items():
            if isinstance(value, float) or key.endswith("_differences"):
                value = pytest.approx(value, rel=1e-3, abs=1e-4)
            assert key.endswith("levels") or recorded[key] == value, key


def test_every_run_is_a_copy_that_vader_reads(tmp_path: Path) -> None:
    for name, choice in ablations.CHOICES.items():
        path = tmp_path / f"{ablations.slug(name)}.py"
        assert ablations.changed_copy(choice, path) == str(path)
        compile(path.read_text(), path, "exec")


# --- overoptimisation -----------------------------------------------------------------------------
def curves(bend: Callable) -> list[Record]:
    """Two curves of gold = 0.1 + d (0.5 - 0.2 bend(d)), at other KLs."""
    made = []
    for highest in (20.0, 60.0):
        kl = np.linspace(0.01, highest, 40)
        d = np.sqrt(kl)
        gold = 0.1 + d * (0.5 - 0.2 * bend(d))
        made.append({"kl": kl, "true_score": gold})
    return made


@pytest.mark.parametrize(("is_best_of_n", "bend"), [(False, np.log), (True, lambda d: d)])
def test_a_fit_finds_the_curve_that_it_was_made_of(is_best_of_n: bool, bend: Callable) -> None:
    found = over.fit(curves(bend), is_best_of_n, 0.1)
    assert found == pytest.approx({"alpha": 0.5, "beta": 0.2, "explained": 1})
    other = over.fit(curves(bend), not is_best_of_n, 0.1)
    assert other["explained"] < 0.999


def labels_of(source: str, folder: Path) -> datasets.DatasetDict:
    """The splits that a reward model is trained on."""
    made = over.labels_folder(source, 1, folder)
    return datasets.load_dataset(str(made), cache_dir=str(folder / "cache"))


def test_few_labels_come_in_turn(tmp_path: Path) -> None:
    splits = labels_of("128", tmp_path)
    rows = splits["train"].to_list()
    assert len(rows) == over.NUM_LABELS
    assert rows[:128] == rows[128:256]
    assert len(set(map(str, rows))) == 128
    all_of_tiny = datasets.load_dataset(str(ROOT / "tiny/labels"))
    assert splits["test"].to_list() == all_of_tiny["test"].to_list()


def test_noise_replaces_that_share_of_the_choices(tmp_path: Path) -> None:
    clean = labels_of("4000", tmp_path)["train"]
    noisy = labels_of("4000:0.5", tmp_path)["train"]
    assert clean["sample0"] == noisy["sample0"]
    changed = np.not_equal(clean["best"], noisy["best"])
    assert np.mean(changed) == pytest.approx(0.5 * 0.75, abs=0.03)


def test_what_a_penalty_gains_is_taken_at_the_kl_where_runs_settle() -> None:
    """Without a penalty gold is a tenth of the KL. With one, runs stay at a KL of 4 and 6."""
    runs = []
    for seed, level, gold in ((1, 4.0, 0.6), (2, 6.0, 0.7)):
        row = {"algorithm": "PPO", "labels": "128", "seed": seed, "reward": np.zeros(40)}
        kl = np.arange(40.0)
        runs.append(row | {"kl_coef": 0.0, "kl": kl, "true_score": kl / 10})
        settled = {"kl": np.minimum(kl, level), "true_score": np.minimum(kl / 10, gold)}
        runs.append(row | {"kl_coef": 0.5} | settled)
    free, held = over.summarise(over.curves_of(runs, []), 0.0)
    assert free["settled_gain"] is None
    assert held["settled_gain"] == pytest.approx((0.2 + 0.1) / 2)
    assert held["settled_interval"] == pytest.approx(12.706 * 0.05, abs=1e-4)


def test_a_summary_names_the_top_and_the_end() -> None:
    falling = {
        "algorithm": "PPO",
        "labels": "128",
        "kl_coef": 0.0,
        "seed": 1,
        "kl": np.arange(15.0),
        "true_score": np.repeat([0.0, 0.4, -0.2], 5),
        "reward": np.repeat([0.0, 1.0, 2.0], 5),
    }
    other = falling | {"true_score": np.repeat([0.0, 0.2, 0.1], 5)}
    (line,) = over.summarise(over.curves_of([falling, other], []), 0.0)
    expected = {
        "true_score_near": 0.09,
        "true_score_at_4": 0.1125,  # in means of two updates
        "true_score_top": 0.3,
        "kl_top": 7.0,
        "true_score_end": -0.05,
        "lowest_end": -0.2,
        "highest_end": 0.1,
        "reward_end": 2.0,
    }
    assert {name: line[name] for name in expected} == pytest.approx(expected)


# --- the exact optimum ----------------------------------------------------------------------------
ALGORITHMS = ("ppo", "rloo")


def train(algorithm: str) -> Record:
    """A run of 200 updates, in a process of its own. (A fork of this one would wait forever for its
    OpenMP threads, where there are several.)"""
    torch.set_num_threads(1)  # two such processes on two cores
    return optimum.train(algorithm, 1, updates=200, points=5)


def test_training_comes_within_two_percent_of_the_exact_optimum() -> None:
    """J(pi) = E_pi[r] - beta KL(pi || rho), over all 8^3 responses, is at most
    J* = beta log E_rho exp(r / beta), with beta 1."""
    policy = optimum.ppo_rlhf.ActorCritic(optimum.make_lm(1), optimum.VOCABULARY)
    probability = optimum.enumerate_logprobs(policy).exp()
    rewards = optimum.make_rewards(1)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-5)
    exact = (probability * rewards.exp()).sum().log()
    mean = (probability * rewards).sum()

    with FORKS.Pool(2, maxtasksperchild=1) as pool:  # side by side
        rows = pool.map(train, ALGORITHMS, 1)
    for row in rows:
        best = row["j_star"]
        start = row["j_start"]
        assert best == pytest.approx(exact.item(), abs=1e-5)
        assert start == pytest.approx(mean.item(), abs=1e-5)
        assert start < best
        assert max(j for _, j in row["curve"]) < best + 1e-6  # nothing beats the optimum
        assert (best - row["j"]) / (best - start) < 0.02, row["algorithm"]


def test_benchmarks_read_queries_before_an_accelerator_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scripts' logger asks for accelerate's state, which they have by then."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    args = optimum.rloo_rlhf.Args()
    assert len(optimum.ours.load_queries(optimum.common.tokenizer(), args, 4)) == 4
