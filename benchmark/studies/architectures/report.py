"""Rows of this study: `python benchmark/report.py architectures`."""

from benchmark.report import Record, Row


def counts(record: Record) -> list[Row]:
    """How many architectures have each result, the most frequent first."""
    found: dict[str, int] = {}
    for row in record["rows"]:
        result = row["result"]
        found[result] = found.get(result, 0) + 1
    rows = []
    for result, count in found.items():
        rows.append({"result": result, "count": count})
    return sorted(rows, key=lambda row: -row["count"])
