"""Rows of this study: `python benchmark/report.py bf16_ratios`."""

from benchmark.report import Record, Row


def ratios(*records: Record) -> list[Row]:
    """RLOO's first ratios in bf16."""
    rows = []
    for row in [row for record in records for row in record["rows"]]:
        if row["algorithm"] == "rloo" and row["dtype"] == "bf16":
            head = row["head"].replace(
                "autocast",
                "bf16",
            )
            source = f"**{row['source']} (ours)**" if row["scripts"] else row["source"]
            rows.append(row | {"head": head, "source": source})
    return rows
