"""The statistics of benchmark/studies/short_runs/run.py, where the answers are known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from benchmark import differences
from benchmark.studies.short_runs import run as ablations
from benchmark.studies.slow_rate import report as slow_rate


def run(choice: str, seed: int, true_score: list[float], kl: list[float]) -> dict[str, Any]:
    """A row of the record with this curve."""
    return {
        "choice": choice,
        "seed": seed,
        "true_score": true_score[-1],
        "reward": 0.0,
        "kl": kl[-1],
        "distinct": 1.0,
        "true_score_before": 0.0,
        "fine_curve": {"true_score": true_score, "kl": kl},
    }


def line(choice: str, seed: int, true_score: float, kl: float) -> dict[str, Any]:
    """A row whose curve is a line from the origin."""
    return run(choice, seed, [0.0, true_score], [0.0, kl])


def test_the_true_score_is_read_where_a_curve_first_passes_a_level() -> None:
    points = {
        "kl": [0.5, 4.5, 3.0, 8.0],
        "true_score": [0.0, 0.4, 0.9, 0.6],
    }
    assert ablations.true_score_at(points, 2.5) == pytest.approx(0.2)
    assert ablations.true_score_at(points, 9.0) is None
    assert ablations.true_score_at(points, 0.2) is None


def test_equal_kl_takes_the_levels_that_both_reach() -> None:
    one = line("a", 1, 0.6, kl=6.0)
    other = line("b", 1, 0.2, kl=4.0)
    near = line("c", 1, 0.1, kl=1.0)
    at_2, at_4, at_6 = ablations.at_equal_kl(one, other)
    assert at_2 == pytest.approx(0.1)
    assert at_4 == pytest.approx(0.2)
    assert at_6 is None
    assert ablations.at_equal_kl(one, near) == [None, None, None]


def test_a_choice_that_only_goes_further_is_no_better_at_equal_kl() -> None:
    rows = []
    for seed in (1, 2, 3):
        slope = 0.1 + 0.001 * seed
        further = 10 * slope + 0.01 * (seed - 2)
        better = 5 * slope + 0.5 + 0.01 * seed
        rows.append(line("default", seed, 5 * slope, kl=5.0))
        rows.append(line("lambda 1 (default: 0.95)", seed, further, kl=10.0))
        rows.append(line("gamma 0.95", seed, better, kl=5.0))
    table = ablations.summarise(rows)
    lines = {x["choice"]: x for x in table}
    longer = lines["lambda 1 (default: 0.95)"]
    higher = lines["gamma 0.95"]
    assert longer["true_score_difference"] == pytest.approx(0.51)
    assert longer["equal_kl"] == pytest.approx(0.0, abs=1e-12)
    assert not longer["equal_kl_holds"]
    # At 2 and 4 nats: the default does not reach 6.
    assert higher["equal_kl"] == pytest.approx(0.52 * 3 / 5)
    at_2, at_4, at_6 = higher["equal_kl_levels"]
    assert at_2 == pytest.approx(0.208)
    assert at_4 == pytest.approx(0.416)
    assert at_6 is None
    assert higher["equal_kl_holds"]
    assert lines["default"]["equal_kl"] is None


def test_finer_averages_tell_a_faster_run_from_a_worse_one(tmp_path: Path) -> None:
    """Two runs on one curve, true score = sqrt(KL), of which one goes five times as fast."""
    rows = {}
    for name, step in (("default", 0.08), ("lambda 1 (default: 0.95)", 0.4)):
        kls = [step * i for i in range(1, 101)]
        metrics = [{"kl": kl, "true_score": kl**0.5} for kl in kls]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
        rows[name] = ablations.with_curves({"failed": False}, tmp_path)
    fine = ablations.at_equal_kl(rows["lambda 1 (default: 0.95)"], rows["default"])
    for row in rows.values():
        row["fine_curve"] = row["curve"]
    coarse = ablations.at_equal_kl(rows["lambda 1 (default: 0.95)"], rows["default"])
    assert np.mean(coarse) < 10 * np.mean(fine) < 0
    assert fine == pytest.approx([0.0, 0.0, 0.0], abs=0.01)


def test_holm_stops_at_the_first_that_does_not_hold() -> None:
    """Three choices with p of 0.003, 0.03 and 0.03: alone each is below 0.05, but 0.05 / 2 is not
    reached by the second."""
    spreads = {
        "lambda 1 (default: 0.95)": 0.1,
        "gamma 0.95": 0.33,
        "1 epoch (default: 4)": 0.33,
    }
    rows = []
    for seed, sign in ((1, -1.0), (2, 0.0), (3, 1.0)):
        rows.append(line("default", seed, 1.0, kl=10.0))
        for choice, spread in spreads.items():
            # Linear curves: at 2, 4 and 6 nats the mean difference is 0.4 of that at 10.
            score = 1.0 + (1.0 + spread * sign) / 0.4
            rows.append(line(choice, seed, score, kl=10.0))
    table = ablations.summarise(rows)
    lines = {x["choice"]: x for x in table}
    assert lines["lambda 1 (default: 0.95)"]["equal_kl"] == pytest.approx(1.0)
    holds = [lines[choice]["equal_kl_holds"] for choice in spreads]
    assert holds == [True, False, False]


def test_the_pooled_deviation_is_that_around_the_mean_of_each_row() -> None:
    """Squares around the means: 2 in the first row and 8 in the second, with 2 + 2 degrees of
    freedom. The third row changes nothing and does not count."""
    rows = [
        [1.0, 2.0, 3.0],
        [10.0, 12.0, 14.0],
        [0.0, 0.0, 0.0],
    ]
    deviation, freedom = differences.pooled_deviation(rows)
    assert deviation == pytest.approx(2.5**0.5)
    assert freedom == 4


def test_a_pooled_deviation_keeps_what_a_row_s_own_does_not() -> None:
    """The first row varies more than the others, so alone its mean of 2 is not far from 0."""
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


@pytest.mark.parametrize("name", ["short_runs/short", "slow_rate/slow"])
def test_the_table_of_a_record_is_that_of_its_runs(name: str) -> None:
    studies = ROOT / "benchmark" / "studies"
    record = json.loads((studies / f"{name}.json").read_text())
    full = json.loads((studies / "full_length" / "full.json").read_text())
    beside = full["rows"] if record["args"].get("beside") else None
    levels = tuple(record["table"][0]["levels"])
    table = ablations.summarise(record["rows"], levels, beside)
    for mine, recorded in zip(table, record["table"], strict=True):
        assert mine.keys() == recorded.keys()
        for key, value in mine.items():
            if isinstance(value, float):
                assert recorded[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
            elif isinstance(value, int | str | None):
                assert recorded[key] == value, key
            elif key.endswith("_differences"):
                assert recorded[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def test_every_run_is_a_copy_that_vader_reads(tmp_path: Any) -> None:
    for name, choice in ablations.CHOICES.items():
        path = tmp_path / f"{ablations.slug(name)}.py"
        assert ablations.changed_copy(choice, path) == str(path)
        compile(path.read_text(), path, "exec")
