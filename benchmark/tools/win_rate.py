"""How often one run's responses beat another's, by a judge, on the same held-out queries.

    python benchmark/tools/win_rate.py A/samples.jsonl B/samples.jsonl \
        --judge benchmark.tools.vader:sentiment

The judge is a function, as for --reward_fn: of prompts and completions it returns a score for each
completion, and the higher one wins, or nobody if they are within --tie. Or it is a function with a
third parameter, other_completions, a model that compares, and returns 1, 0 or something between for
each pair; it is asked in both orders, whose mean counts (Zheng et al. 2023, arXiv:2306.05685).

Ties are half a win. All pairs of responses to a query are compared, and queries count alike.
Intervals are those in which the middle 95 % of the rates lie when queries are drawn anew, with
replacement (the bootstrap of Efron 1979).

Judges like length. So a second rate is controlled for it, as in AlpacaEval 2 (Dubois et al. 2024,
arXiv:2404.04475): log-odds of a win = a + b tanh(d / deviation of d), where d is A's length minus
B's in characters; the rate is that of d = 0, 1 / (1 + exp(-a)). AlpacaEval's term for the
difficulty of a query is left out: it needs many models. A third counts only the pairs whose lengths
differ by at most a tenth. All three are printed, and with --out written as JSON.
"""

import argparse
import functools
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

RIDGE = 1e-6  # keeps the log-odds finite where one side wins all
RESAMPLES = 1000  # of the bootstrap
Texts = dict[str, list[str]]


@dataclass
class Pairs:
    """All comparisons, a number for each in every array."""

    query: np.ndarray  # the number of its query
    wins: np.ndarray  # of A: 1, 0, or between
    lengths: np.ndarray  # of A's response, in characters
    other_lengths: np.ndarray

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """How much each pair counts (.., pairs), if queries count so often (.., queries)."""
        pairs_of_query = np.bincount(self.query, minlength=counts.shape[-1])
        return counts[..., self.query] / pairs_of_query[self.query]


def read_samples(path: Path, column: str) -> Texts:
    """The responses to each query in a samples.jsonl; RLOO has several."""
    if path.is_dir():
        path = path / "samples.jsonl"
    if not path.is_file():
        raise SystemExit(f"win_rate.py: {path}: there is no such file")
    texts: Texts = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            texts.setdefault(row["query"], []).append(row[column])
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"win_rate.py: {path}, line {number}: {error!r}") from None
    return texts


def preferences(
    judge: Callable, queries: list[str], ones: list[str], others: list[str], tie: float
) -> np.ndarray:
    """For each pair 1 if the judge prefers the first response, 0 for the other, 0.5 for a tie."""
    judge = functools.partial(judge, prompts=queries)
    if "other_completions" in inspect.signature(judge).parameters:
        forward = np.array(judge(completions=ones, other_completions=others), dtype=float)
        backward = np.array(judge(completions=others, other_completions=ones), dtype=float)
        return (forward + 1 - backward) / 2
    scores = np.array(judge(completions=ones), dtype=float)
    difference = scores - np.array(judge(completions=others), dtype=float)
    return 0.5 + 0.5 * np.sign(difference) * (abs(difference) > tie)


def compare(ours: Texts, theirs: Texts, judge: Callable, tie: float = 0.0) -> Pairs:
    """Judges all pairs of responses to the queries that both have."""
    common = [query for query in ours if query in theirs]
    if len(common) < 2:
        raise SystemExit(f"win_rate.py: {len(common)} queries are in both files")
    left_out = len(ours) + len(theirs) - 2 * len(common)
    if left_out > 0:
        sys.stderr.write(f"win_rate.py: {left_out} queries are in one file only: left out\n")
    numbers = []
    ones = []
    others = []
    for number, query in enumerate(common):
        for one in ours[query]:
            for other in theirs[query]:
                numbers.append(number)
                ones.append(one)
                others.append(other)
    queries = [common[number] for number in numbers]
    wins = preferences(judge, queries, ones, others, tie)
    if wins.shape != (len(ones),) or not ((wins >= 0) & (wins <= 1)).all():
        raise SystemExit(f"win_rate.py: --judge did not return {len(ones)} numbers, as it should")
    lengths = np.array([len(text) for text in ones])
    other_lengths = np.array([len(text) for text in others])
    return Pairs(np.array(numbers), wins, lengths, other_lengths)


def win_rate(pairs: Pairs, counts: np.ndarray) -> np.ndarray:
    """Mean wins (..,), if queries count so often (.., queries)."""
    weights = pairs.weights(counts)
    return (weights * pairs.wins).sum(-1) / weights.sum(-1)


def similar(pairs: Pairs) -> np.ndarray:
    """Which pairs have lengths that differ by at most a tenth of the longer one."""
    longer = np.maximum(pairs.lengths, pairs.other_lengths)
    return abs(pairs.lengths - pairs.other_lengths) <= 0.1 * longer


def matched_rate(pairs: Pairs, counts: np.ndarray) -> np.ndarray:
    """The same, of pairs of similar length. NaN where there are none."""
    weights = pairs.weights(counts) * similar(pairs)
    total = weights.sum(-1)
    wins = (weights * pairs.wins).sum(-1)
    return np.divide(wins, total, out=np.full_like(wins, np.nan), where=total > 0)


def controlled_rate(pairs: Pairs, counts: np.ndarray) -> np.ndarray:
    """The same for equal lengths, by a logistic regression of wins on the difference in length."""
    difference = pairs.lengths - pairs.other_lengths
    x = np.tanh(difference / max(difference.std(), 1e-9))
    features = np.stack([np.ones_like(x), x])  # (2, pairs)
    weights = np.atleast_2d(pairs.weights(counts))
    coefficients = np.zeros((len(weights), 2))  # a and b
    for _ in range(100):  # Newton's method, in steps of at most 1
        p = 1 / (1 + np.exp(-coefficients @ features))
        gradient = (weights * (pairs.wins - p)) @ features.T - RIDGE * coefficients
        outer = features[:, None] * features[None]  # (2, 2, pairs)
        curvature = np.einsum("sp,ijp->sij", weights * p * (1 - p), outer) + RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0].clip(-1, 1)
        coefficients += step
        if abs(step).max() < 1e-9:
            break
    rates = 1 / (1 + np.exp(-coefficients[:, 0]))
    return rates.reshape(counts.shape[:-1])


@dataclass
class Estimate:
    """A rate, and the ends of its 95 % interval."""

    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rate:.1%} ({self.low:.1%} to {self.high:.1%})"


def estimate(rate: Callable, pairs: Pairs) -> Estimate:
    """A rate with its bootstrap interval over queries."""
    num_queries = int(pairs.query.max()) + 1
    even = np.full(num_queries, 1 / num_queries)
    drawn = np.random.default_rng(0).multinomial(num_queries, even, RESAMPLES)
    rates = rate(pairs, drawn)
    rates = rates[np.isfinite(rates)]  # some may have no pairs of similar length
    if len(rates) == 0:
        return Estimate(np.nan, np.nan, np.nan)
    low, high = np.quantile(rates, [0.025, 0.975])
    middle = rate(pairs, np.ones(num_queries))
    return Estimate(float(middle), float(low), float(high))


def results(pairs: Pairs) -> dict[str, float]:
    """All three rates with their intervals, ties, and how long the responses are."""
    found = {
        "queries": int(pairs.query.max()) + 1,
        "pairs": len(pairs.wins),
        "ties": float((pairs.wins == 0.5).mean()),
        "characters": float(pairs.lengths.mean()),
        "other_characters": float(pairs.other_lengths.mean()),
        "matched_pairs": int(similar(pairs).sum()),
    }
    for rate in (win_rate, controlled_rate, matched_rate):
        found[rate.__name__] = asdict(estimate(rate, pairs))
    return found


def report(found: dict[str, float]) -> str:
    """The results as text."""
    rows = {
        "queries": found["queries"],
        "pairs": found["pairs"],
        "ties": f"{found['ties']:.1%}",
        "characters": f"{found['characters']:.0f}, {found['other_characters']:.0f}",
        "win rate": Estimate(**found["win_rate"]),
        "controlled for length": Estimate(**found["controlled_rate"]),
        f"of {found['matched_pairs']} similar pairs": Estimate(**found["matched_rate"]),
    }
    return "".join(f"{name:<24} {value}\n" for name, value in rows.items())


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("files", nargs=2, type=Path, metavar="SAMPLES", help="samples.jsonl of two runs")
    add("--judge", required=True, help="module:function")
    add("--column", default="response_after", help="that has the responses")
    add("--other_column", help="that of the second file (None: the same)")
    add("--tie", type=float, default=0.0, help="scores that differ by so much are a tie")
    add("--out", type=Path, help="a file for the results, as JSON")
    args = parser.parse_args()
    sys.path[:0] = [os.getcwd(), str(Path(__file__).resolve().parents[2])]
    try:
        judge = pkgutil.resolve_name(args.judge)
        inspect.signature(judge)  # fails, if it is no function
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SystemExit(f"win_rate.py: --judge {args.judge}: {error}") from None
    ours = read_samples(args.files[0], args.column)
    theirs = read_samples(args.files[1], args.other_column or args.column)
    found = results(compare(ours, theirs, judge, args.tie))
    sys.stdout.write(report(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
