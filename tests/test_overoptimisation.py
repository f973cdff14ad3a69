"""The fits and labels of benchmark/studies/overoptimisation/run.py, where they are known."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from conftest import ROOT

from benchmark.studies.overoptimisation import run as over


def curves(bend: Any) -> list[dict[str, Any]]:
    """Two curves of gold = 0.1 + d (0.5 - 0.2 bend(d)), at other KLs."""
    made = []
    for highest in (20.0, 60.0):
        kl = np.linspace(0.01, highest, 40)
        d = np.sqrt(kl)
        gold = 0.1 + d * (0.5 - 0.2 * bend(d))
        made.append({"kl": kl, "true_score": gold})
    return made


@pytest.mark.parametrize(("is_best_of_n", "bend"), [(False, np.log), (True, lambda d: d)])
def test_a_fit_finds_the_curve_that_it_was_made_of(is_best_of_n: bool, bend: Any) -> None:
    found = over.fit(curves(bend), is_best_of_n, 0.1)
    assert found["alpha"] == pytest.approx(0.5)
    assert found["beta"] == pytest.approx(0.2)
    assert found["explained"] == pytest.approx(1)
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
    different = {str(row) for row in rows}
    assert len(different) == 128
    all_of_tiny = datasets.load_dataset(str(ROOT / "tiny/labels"))
    assert splits["test"].to_list() == all_of_tiny["test"].to_list()


def test_noise_replaces_that_share_of_the_choices(tmp_path: Path) -> None:
    clean = labels_of("4000", tmp_path)["train"]
    noisy = labels_of("4000:0.5", tmp_path)["train"]
    assert clean["sample0"] == noisy["sample0"]
    pairs = zip(clean["best"], noisy["best"], strict=True)
    changed = [one != other for one, other in pairs]
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
    lines = over.summarise(over.curves_of(runs, []), 0.0)
    assert lines[0]["settled_gain"] is None
    assert lines[1]["settled_gain"] == pytest.approx((0.2 + 0.1) / 2)
    assert lines[1]["settled_interval"] == pytest.approx(12.706 * 0.05, abs=1e-4)


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
    other = dict(falling)
    other["true_score"] = np.repeat([0.0, 0.2, 0.1], 5)
    groups = over.curves_of([falling, other], [])
    (line,) = over.summarise(groups, 0.0)
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
    for name, value in expected.items():
        assert line[name] == pytest.approx(value), name


def test_the_table_of_a_record_is_that_of_its_runs() -> None:
    record = json.loads((ROOT / "benchmark/studies/overoptimisation/frontier.json").read_text())
    groups = over.curves_of(record["rows"], record["best_of_n"])
    table = over.summarise(groups, record["true_score_before"])
    for mine, recorded in zip(table, record["table"], strict=True):
        for key, value in mine.items():
            if isinstance(value, float):
                assert recorded[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
            else:
                assert recorded[key] == value, key
