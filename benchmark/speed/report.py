"""Rows of this page: `python benchmark/report.py speed`."""

from typing import Any

from benchmark.report import Record, Row

# What the pages call the contenders of a record.
CODES = {
    "ours-ppo": "ours, PPO",
    "ours-critic-ppo": "ours, PPO with a value model",
    "ours-rloo": "ours, RLOO",
    "plain-ppo": "plain, PPO",
    "plain-rloo": "plain, RLOO",
    "trl-ppo": "TRL, PPO",
    "trl-rloo": "TRL, RLOO",
}


def phases(*records: Record) -> list[Row]:
    """Updates against plain PyTorch, as ratios of one run."""
    rows = []
    for record in records:
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm, ratios in record["ratios"].items():
            ours = of_contender[f"ours-{algorithm}"]
            rows.append(ours | ratios | {"algorithm": algorithm.upper()})
    return rows


def bars(*records: Record) -> list[Row]:
    """The share of the floor, then ours against plain PyTorch, TRL and our PPO. Records of the same
    work share a row, with the lowest of their floors."""
    found: dict[Any, Row] = {}
    for record in records:
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm in ("ppo", "rloo"):
            if f"ours-{algorithm}" in of_contender:
                args = record["args"]
                key = (args["shape"], args["dtype"], algorithm)
                row = found.setdefault(key, {"args": args, "algorithm": algorithm.upper()})
                values = compared(of_contender, algorithm)
                floors = [x["floor"] for x in (row, values) if "floor" in x]
                row |= values | {"floor": min(floors)}
    return list(found.values())


def extremes(*records: Record) -> Row:
    """The least and the most of each ratio of `bars`."""
    found: Row = {}
    for row in bars(*records):
        for name, value in row.items():
            if isinstance(value, float):
                both = found.setdefault(name, {"least": value, "most": value})
                both["least"] = min(both["least"], value)
                both["most"] = max(both["most"], value)
    return found


def compared(rows: dict[str, Row], algorithm: str) -> dict[str, float]:
    """What one record says of our update of an algorithm, beside other contenders. TRL's PPO trains
    a value model of its own: so do we beside it, if the record has that."""
    ours = rows[f"ours-{algorithm}"]
    values = {}
    for other in ("plain", "plain-fast", "trl"):
        row = rows.get(f"{other}-{algorithm}", {})
        mine = rows.get(f"ours-critic-{algorithm}", ours) if other == "trl" else ours
        if "seconds" in row:
            values[f"speed {other}"] = row["seconds"]["total"] / mine["seconds"]["total"]
    values["floor"] = ours["fraction_of_floor"]["total"]
    if algorithm == "rloo" and "ours-ppo" in rows:
        values["speed ppo"] = rows["ours-ppo"]["seconds"]["total"] / ours["seconds"]["total"]
    return values


def peaks(*records: Record) -> list[Row]:
    """The peak memory of an update of each contender in GiB, by shape, PPO's first."""
    found: dict[str, Row] = {}
    for record in records:
        shape = record["args"]["shape"]
        for row in record["rows"]:
            name = row["contender"]
            both = found.setdefault(name, {"contender": name, "code": CODES[name]})
            both[shape] = row["peak_bytes"] / 2**30
    return sorted(found.values(), key=lambda row: row["contender"].rpartition("-")[2])


def saved(*records: Record) -> Row:
    """The share of the memory of PPO with a value model that RLOO does not need, by shape."""
    of_contender = {row["contender"]: row for row in peaks(*records)}
    ours = of_contender["ours-rloo"]
    critic = of_contender["ours-critic-ppo"]
    shares = {}
    for shape in ("gpt2", "tiny"):
        shares[shape] = 1 - ours[shape] / critic[shape]
    return shares


def chats(*records: Record) -> list[Row]:
    """How many times as long as ours TRL's updates take in the shape of a chat: medians."""
    rows = []
    for record in records:
        of_contender = {}
        for row in record["rows"]:
            kept = record["kept"][row["contender"]]
            of_contender[row["contender"]] = {
                "code": CODES[row["contender"]],
                "seconds": row["median_seconds"],
                "kept": sum(kept) / len(kept) / record["args"]["batch_size"],
            }
        for name, ours in of_contender.items():
            if not name.startswith("trl"):
                trl = of_contender[f"trl-{name.rpartition('-')[2]}"]
                ratio = {x: trl["seconds"][x] / seconds for x, seconds in ours["seconds"].items()}
                rows.append(ours | {"trl": trl, "ratio": ratio})
    return rows


def times(*records: Record) -> list[Row]:
    """How many times as long as ours other updates take, in fp32 and in bf16."""
    found: dict[Any, Row] = {}
    for row in bars(*records):
        args = row["args"]
        shape = args["shape"]
        both = found.setdefault((shape, row["algorithm"]), {})
        both[args["dtype"]] = row
    return list(found.values())
