"""Rows of this study: `python benchmark/report.py bf16_ratios`."""

from benchmark.report import Record, Row


def ratios(*records: Record) -> list[Row]:
    """RLOO's first ratios in bf16; with logits in bf16, those of the sampler alone."""
    rows = []
    for row in [row for record in records for row in record["rows"]]:
        is_shown = row["head"] == "fp32" or row["source"] == "sampler"
        if row["algorithm"] == "rloo" and row["dtype"] == "bf16" and is_shown:
            head = row["head"].replace(
                "autocast",
                "bf16",
            )
            source = f"**{row['source']} (ours)**" if row["scripts"] else row["source"]
            rows.append(row | {"head": head, "source": source})
    return rows
