"""Rows of this study: `python benchmark/report.py architectures`."""

from collections import Counter

from benchmark.report import Record, Row


def counts(record: Record) -> dict[str, int]:
    """How many architectures have each result."""
    return dict(Counter(row["result"] for row in record["rows"]).most_common())


def results(record: Record) -> list[Row]:
    """The same as rows."""
    return [{"result": name, "count": count} for name, count in counts(record).items()]
