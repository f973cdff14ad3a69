"""Rows and pictures of this study: `python benchmark/report.py full_length`."""

from statistics import mean

from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import BEST_OF_N, CHOICES, CRITIC, NAMES, PPO, Record, Row
from benchmark.studies.short_runs.report import choices

VALUES = {
    "critic from the reward model": ("critic from the reward model", CRITIC, "-"),
    "critic's rate 1e-2": ("value head, rate 1e-2", PPO, ":"),
    "default": ("value head, rate 2e-4 (default)", PPO, "-"),
}


# --- tables ---------------------------------------------------------------------------------------
def explained(record: Record) -> list[Row]:
    """The choices by their effect, with the variance that values explain at the end."""
    ends: dict[str, list[float]] = {}
    for row in record["rows"]:
        found = row.get("curve", {}).get("var_explained", [])[-1:]  # none of a run that stopped
        if "--vf_coef 0" not in row["flags"]:
            ends.setdefault(row["choice"], []).extend(found)
    rows = []
    for row in choices(record):
        found = ends.get(row["choice"])
        rows.append(row | {"explained": mean(found) if found else None})
    return rows


def pairs(*records: Record) -> list[Row]:
    """RLOO beside PPO in each record: at the end of each seed's pair of runs, and at equal KL."""
    rows = []
    for record in records:
        of_run = {(row["choice"], row["seed"]): row for row in record["rows"]}
        of_choice = {row["choice"]: row for row in record["table"]}
        ahead = 0
        for seed in record["args"]["seeds"]:
            ends = [of_run[name, seed]["true_score"] for name in NAMES]
            ahead += ends[1] > ends[0]
        levels = ", ".join(f"{level:g}" for level in of_choice["default"]["levels"])
        row = {"args": record["args"], "lr": record["args"].get("lr") or "2e-4", "ahead": ahead}
        row |= {"pairs": len(record["args"]["seeds"]), "rloo": of_choice["RLOO, K 4"]}
        row |= {"ppo": of_choice["default"]}
        row["where"] = "" if levels == "2, 4, 6" else f" (at {levels})"
        rows.append(row)
    return rows


# --- pictures -------------------------------------------------------------------------------------
def full_length(record: Record, others: Record) -> Figure:
    """True score over KL of three choices, and what three value functions explain."""
    text = "A critic that predicts much better gains a little true score at the same KL"
    figure, panels = report.new(text, 1, 2, 3.6)
    score, values = panels[0]
    for choice, colour in CHOICES.items():
        curves = [row["fine_curve"] for row in report.runs_of(record, choice)]
        name = NAMES.get(choice, f"PPO, {choice}")
        score.plot(*report.first_passages(curves), color=colour, linewidth=2, label=name)
    name = "best of n, no training"
    score.plot(*report.best_of_n(others), color=BEST_OF_N, linestyle="--", label=name)
    limits = {"xlim": (0, 6.5), "ylim": (0, 1), "legend": "lower right"}
    report.label(score, report.KL, f"{report.TRUE_SCORE}, mean of 3 seeds", **limits)
    for choice, (name, colour, line) in VALUES.items():
        x, y = report.over_episodes(record, choice, "var_explained", "curve")
        values.plot(x, y.mean(0), color=colour, linestyle=line, linewidth=2, label=name)
    values.axhline(0, color="black", linewidth=0.8)
    limits = {"ylim": (-0.2, 1), "legend": "upper left"}
    report.label(values, "episodes", "variance explained by the values", **limits)
    return figure


PICTURES = {"full.png": (full_length, "full.json", "../overoptimisation/tiny.json")}
