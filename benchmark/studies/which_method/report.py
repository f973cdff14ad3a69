"""Rows and the picture of this study: `python benchmark/report.py which_method`."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.differences import at_equal_kl, at_levels, mean
from benchmark.report import CRITIC, OTHER, PPO, RLOO, Record, Row

LEVELS = (1, 2, 3)
BASE = "RLOO, K 4"
NAMES = {
    "default": "PPO",
    "critic from the reward model, warmed up": "PPO, critic from the reward model, warmed up",
    "RLOO, K 4": "RLOO",
    "RLOO of tokens": "Dr. GRPO, our KL penalty",
}
PUBLISHED = ", published"
# Of numbers from their dots, in points, where the usual place is taken.
SHIFTS = {
    "critic from the reward model, warmed up": (-14, -9),
    BASE: (-14, -16),
    "GSPO": (-14, -4),
}


def name_of(choice: str) -> str:
    """The method, as its paper calls it."""
    return NAMES.get(choice, choice.removesuffix(PUBLISHED))


def line_of(choice: str, record: Record) -> Row:
    """A method: means over seeds, and its differences from RLOO's runs of the same seeds."""
    pairs = report.pairs_of(choice, BASE, record)
    ended = [run for run, _ in pairs]
    worse = [run for run, base in pairs if run["true_score"] < base["true_score_before"]]
    seeds = sum(row["choice"] == choice for row in record["rows"])
    line = {"method": name_of(choice), "choice": choice, "seeds": seeds}
    line["pair"] = (choice, BASE)
    line["failed"] = seeds - len(ended) + len(worse)
    for kind in ("true_score", "kl", "distinct"):
        line[kind] = mean([row[kind] for row in ended])
    levels = np.array([at_levels(row["fine_curve"], LEVELS) for row in ended])  # (seeds, levels)
    line["levels"] = [mean(column) for column in levels.T]
    at_same_kl = [mean(at_equal_kl(run, base, LEVELS)) for run, base in pairs]
    at_the_end = [run["true_score"] - base["true_score"] for run, base in pairs]
    is_base = choice == BASE
    for kind, found in (("equal_kl", at_same_kl), ("end", at_the_end)):
        differences_of_seeds = [x for x in found if x is not None and not is_base]
        line[f"{kind}_differences"] = differences_of_seeds
        line[kind] = mean(differences_of_seeds)
    return line


def lines(record: Record) -> list[Row]:
    """All methods, tested as one family."""
    choices = dict.fromkeys(row["choice"] for row in record["rows"])
    found = [line_of(choice, record) for choice in choices]
    for kind in ("equal_kl", "end"):
        differences.add_tests(found, kind, differences.freedom_of(found, kind))
        for line in found:
            line[f"bold_{kind}"] = "**" if line[f"{kind}_pooled_holds"] else ""
    return sorted(found, key=lambda line: -(line["equal_kl"] or 0))


def methods(record: Record) -> list[Row]:
    """The methods with the default's settings."""
    return [line for line in lines(record) if not line["choice"].endswith(PUBLISHED)]


def published(record: Record) -> list[Row]:
    """The methods with the settings of their papers."""
    return [line for line in lines(record) if line["choice"].endswith(PUBLISHED)]


# --- the picture ----------------------------------------------------------------------------------
def colour_of(line: Row) -> str:
    """PPO, RLOO and the critic as in all pictures; what came later is grey."""
    colours = {"default": PPO, BASE: RLOO, "critic from the reward model, warmed up": CRITIC}
    return colours.get(line["choice"], OTHER)


def draw_differences(axes: Axes, rows: list[Row]) -> None:
    """Differences from RLOO at the same KL, with intervals."""
    for y, line in enumerate(rows):
        colour = colour_of(line)
        x = line["equal_kl"]
        width = line["equal_kl_pooled_interval"]
        axes.errorbar(x, y, xerr=width, fmt="o", color=colour, capsize=2)
    names = [f"{line['method']} ({line['number']})" for line in rows]
    axes.set_yticks(range(len(rows)), names)
    for line, name in zip(rows, axes.get_yticklabels(), strict=True):
        name.set_fontweight("bold" if line["bold_equal_kl"] else "normal")
    axes.axvline(0, color="black", linewidth=1)
    report.label(axes, "true score minus RLOO's (better \N{RIGHTWARDS ARROW})")


def draw_ends(axes: Axes, record: Record, rows: list[Row]) -> None:
    """Where the runs end: a small dot for each, and a large one with the method's number at their
    mean."""
    for line in rows:
        colour = colour_of(line)
        for run in report.runs_of(record, line["choice"]):
            axes.plot(
                run["kl"],
                run["true_score"],
                ".",
                color=colour,
                alpha=0.35,
                markersize=4,
            )
        axes.plot(line["kl"], line["true_score"], "o", color=colour)
        axes.annotate(
            line.get("number", "RLOO"),
            (line["kl"], line["true_score"]),
            xytext=SHIFTS.get(line["choice"], (7, -4)),
            textcoords="offset points",
            fontweight="bold",
        )
    report.label(axes, report.SHORT_KL, report.TRUE_SCORE)


def picture(record: Record) -> Figure:
    """The methods with the default's settings: at the same KL, and at the end."""
    rows = methods(record)
    compared = [line for line in rows if line["choice"] != BASE]
    for number, line in enumerate(compared, 1):
        line["number"] = str(number)
    figure, panels = report.new(TITLE, 1, 2, 4.2)
    draw_differences(panels[0, 0], compared[::-1])
    panels[0, 0].set_title("At the same KL (1, 2, 3 nats)")
    draw_ends(panels[0, 1], record, rows)
    panels[0, 1].set_title("At the end (large: means)")
    return figure


TITLE = "Default settings: at the same KL only DAPO (bold) differs significantly from RLOO"
PICTURES = {"methods.png": (picture, "methods.json")}
