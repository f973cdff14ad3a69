"""Differences between runs of a seed: at the same KL, their intervals, and which are not 0.

Every page has one rule. An interval of a mean over seeds is Student's t over the seeds' means, with
at least three of them. Of one seed the interval is over its held-out items: Student's t again, or
Wilson's for a share of items that are right.

A row of a table is one change, with a difference for each seed. Its interval has one of two
deviations: that of the row's own three to five seeds, or one that is pooled over all rows. Few
seeds estimate their own deviation badly. The pooled one is better known, but it is right only if
the differences of all rows vary alike. With either deviation, Holm's method (1979) corrects for the
number of rows.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.05
LEAST = 3  # seeds, for an interval


# --- curves of runs -------------------------------------------------------------------------------
def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Means of `width` neighbouring updates, or of all in a shorter run."""
    width = min(width, len(values))
    whole = len(values) // width * width
    return np.array(values[:whole]).reshape(-1, width).mean(1)


def at_levels(
    curve: dict[str, Any],
    levels: Sequence[float] | float,
    name: str = "true_score",
) -> np.ndarray:
    """The values of a run's curve where its KL first passes each level, or NaN."""
    passed = np.maximum.accumulate(curve["kl"])
    return np.interp(levels, passed, curve[name], left=np.nan, right=np.nan)


def at_equal_kl(one: dict[str, Any], other: dict[str, Any], levels: Sequence[float]) -> np.ndarray:
    """True score of a run less that of another, at each level of KL; NaN where one has none."""
    mine = at_levels(one["fine_curve"], levels)
    return mine - at_levels(other["fine_curve"], levels)


def scores_of(run: dict[str, Any], levels: Sequence[float]) -> np.ndarray:
    """True scores of a run where it first passes each level of KL, or NaN, and at its end."""
    return np.append(at_levels(run["fine_curve"], levels), run["true_score"])


def mean(values: Sequence[float]) -> float | None:
    """Of those that are not NaN; None if nothing is left."""
    found = [value for value in values if not np.isnan(value)]
    return float(np.mean(found)) if found else None


# --- intervals and tests --------------------------------------------------------------------------
def half_width(deviation: float, num_seeds: int, freedom: float) -> float:
    """Half the width of the 95 % interval of a mean over seeds."""
    error = deviation / num_seeds**0.5
    return float(stats.t.ppf(1 - LEVEL / 2, freedom) * error)


def p_value(differences: Sequence[float], deviation: float, freedom: float) -> float:
    """How likely a mean as far from 0 is by chance: two-sided, by Student's t."""
    if not any(differences):
        return 1.0  # the change changes nothing
    error = deviation / len(differences) ** 0.5
    distance = abs(float(np.mean(differences)))
    if error == 0:
        return 0.0
    return float(2 * stats.t.sf(distance / error, freedom))


def interval(differences: Sequence[float]) -> float | None:
    """Half the width of the interval of their mean, by their own deviation."""
    if len(differences) < 2:
        return None
    deviation = float(np.std(differences, ddof=1))
    return half_width(deviation, len(differences), len(differences) - 1)


def with_interval(values: Sequence[float]) -> dict[str, float]:
    """The mean of values, of seeds or of the items of one seed, and its interval."""
    middle = float(np.mean(values))
    width = interval(values)
    return {
        "mean": middle,
        "low": middle - width,
        "high": middle + width,
        "width": width,
    }


def of_seeds(values: Sequence[float]) -> dict[str, float] | None:
    """The same of those that are not NaN; None if they are of fewer than three seeds."""
    found = [value for value in values if not np.isnan(value)]
    return with_interval(found) if len(found) >= LEAST else None


def wilson(share: float, num_items: int) -> dict[str, float]:
    """A share of independent items, and its 95 % interval (Wilson 1927)."""
    found = stats.norm.ppf(1 - LEVEL / 2) ** 2 / num_items
    middle = (share + found / 2) / (1 + found)
    variance = found * share * (1 - share) + found**2 / 4
    width = variance**0.5 / (1 + found)
    return {
        "mean": share,
        "low": middle - width,
        "high": middle + width,
    }


def pooled_deviation(rows: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The deviation of differences around the mean of their row, and its degrees of freedom. Rows
    without any difference do not count: their change changes nothing."""
    squares = 0.0
    freedom = 0
    for differences in rows:
        if any(differences):
            squares += float(np.var(differences) * len(differences))
            freedom += len(differences) - 1
    return (squares / max(freedom, 1)) ** 0.5, freedom


def shared_freedom(rows: Sequence[Sequence[tuple[Hashable, Hashable]]]) -> float:
    """The degrees of freedom of a pooled deviation whose rows share runs, by Satterthwaite's
    approximation (1946). A row has a pair of names for each seed: of its run, and of the run that
    is subtracted. All runs are taken to vary alike, independently of each other."""
    names = list(dict.fromkeys(run for row in rows for pair in row for run in pair))
    parts = []
    for row in rows:
        signs = np.zeros((len(row), len(names)))
        for i, (run, base) in enumerate(row):
            signs[i, names.index(run)] = 1
            signs[i, names.index(base)] = -1
        parts.append(signs - signs.mean(0))
    weights = np.concatenate(parts)
    covariance = weights @ weights.T
    return float(np.trace(covariance) ** 2 / (covariance**2).sum())


def freedom_of(table: list[dict[str, Any]], kind: str) -> float:
    """That of a table's `<kind>_differences`. `pair` of a line has the names of its runs and of
    those that are subtracted."""
    rows = []
    for line in table:
        found = line[f"{kind}_differences"]
        run, base = line["pair"]
        if len(found) >= LEAST and any(found):
            rows.append([((run, seed), (base, seed)) for seed in range(len(found))])
    return shared_freedom(rows)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Which of these tests hold by Holm's method, at 5 % over all of them."""
    holds = [False] * len(p_values)
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[i] > LEVEL / (len(p_values) - rank):
            break
        holds[i] = True
    return holds


def add_tests(table: list[dict[str, Any]], kind: str, freedom: float | None = None) -> None:
    """Adds to each line of a table, which has `<kind>_differences`, their intervals by their own
    deviation and by the pooled one, and whether Holm's method keeps them. A line with one seed is
    not compared. One with two counts as a comparison that does not hold: it has no interval, and no
    part in the pooled deviation. Pages give the `freedom` of the pooled deviation. Tables of
    records have that of independent rows, which is too many."""
    for line in table:
        line[f"{kind}_interval"] = None
        line[f"{kind}_holds"] = False
        line[f"{kind}_pooled_interval"] = None
        line[f"{kind}_pooled_holds"] = False
    tested = [line for line in table if len(line[f"{kind}_differences"]) > 1]
    rows = [line[f"{kind}_differences"] for line in tested]
    enough = [differences for differences in rows if len(differences) >= LEAST]
    deviation, of_independent_rows = pooled_deviation(enough)
    freedom = freedom or of_independent_rows
    own = []
    pooled = []
    for line, differences in zip(tested, rows, strict=True):
        if len(differences) < LEAST:
            own.append(1.0)
            pooled.append(1.0)
            continue
        own_deviation = float(np.std(differences, ddof=1))
        own.append(p_value(differences, own_deviation, len(differences) - 1))
        pooled.append(p_value(differences, deviation, freedom))
        line[f"{kind}_interval"] = interval(differences)
        if any(differences):
            width = half_width(deviation, len(differences), freedom)
            line[f"{kind}_pooled_interval"] = width
    for line, alone, together in zip(tested, holm(own), holm(pooled), strict=True):
        line[f"{kind}_holds"] = alone
        line[f"{kind}_pooled_holds"] = together
