"""Rows and pictures of this study: `python benchmark/report.py short_runs`. full_length/ and
slow_rate/ use them, too."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import CRITIC, PPO, RLOO, Record, Row

# The choices in chosen.png, and those in the findings.
CHOSEN_FULL = ("RLOO, K 4", "critic from the reward model", "1 epoch (default: 4)")
CHOSEN_FULL += ("no value function", "advantages not whitened", "lambda 1 (default: 0.95)")
CHOSEN_FULL += ("temperature 1 (default: 0.7)", "k3 as the KL penalty", "GRPO")
CHOSEN_SHORT = ("critic from the reward model, warmed up", "critic from the policy")
CHOSEN_SHORT += ("no penalty for a missing end", "rewards not whitened", "no ratio clipping")
CHOSEN_SHORT += ("whitening per process, of 4", "reward model not normalised", "PyTorch's Adam")
CHOSEN_SHORT += ("fixed KL coefficient", "constant learning rate", "8 minibatches (default: 1)")
CHOSEN_SHORT += ("settings of InstructGPT", "KL over the vocabulary as the penalty")
MATTERS_FULL = ("default", "critic from the reward model", "no value function", "GRPO")
MATTERS_SHORT = ("default", "critic from the reward model, warmed up")
MATTERS_SHORT += ("8 minibatches (default: 1)", "settings of InstructGPT", "dropout left on")
MASKED = ("truncated tokens masked", "settings of Qwen", "settings of Llama 2")
MASKED += ("settings of DeepSpeed-Chat", "settings of TRL 0.9", "settings of InstructGPT")
DIFFERENCE = "difference in true score at the same KL (better \N{RIGHTWARDS ARROW})"
PASSES = "passes Holm's correction: bold, by its own deviation; *, by the pooled one"
FULL = "Full runs: 12,800 episodes, 3 seeds"
SHORT = "Short runs: 2,560 episodes, 4 seeds"
POOLED = "95% interval by the pooled deviation (line: by its own)"
TITLE = "A critic that starts as the reward model is the one change that passes the strict test"
HOLLOW = {"markerfacecolor": "white", "alpha": 0.6}


# --- tables ---------------------------------------------------------------------------------------
def by_effect(row: Row) -> tuple[bool, bool, float]:
    """PPO's choices by their effect, then RLOO's; last what never gets as far as it is compared."""
    choice = row["choice"]
    effect = row["equal_kl"]
    if effect is None:
        effect = 0.0 if choice in ("default", "RLOO, K 4") else -9.0
    return choice.startswith(("RLOO", "GRPO")), choice != "RLOO, K 4", -effect


def with_bold(row: Row) -> Row:
    """A row in which `bold_..` marks what Holm's correction keeps."""
    kinds = [name.removesuffix("_holds") for name in row if name.endswith("_holds")]
    return row | {f"bold_{kind}": "**" if row[f"{kind}_holds"] else "" for kind in kinds}


def base_of(choice: str) -> str:
    """The choice that a choice is compared with."""
    if choice.startswith(("RLOO", "GRPO")) and choice != "RLOO, K 4":
        return "RLOO, K 4"
    return "default"


def tested(record: Record) -> list[Row]:
    """The table of a record, in which pooled intervals take into account that rows share runs."""
    rows = [row | {"pair": (row["choice"], base_of(row["choice"]))} for row in record["table"]]
    differences.add_tests(rows, "equal_kl", differences.freedom_of(rows, "equal_kl"))
    return [with_bold(row) for row in rows]


def choices(record: Record) -> list[Row]:
    """The choices of a record by their effect."""
    return sorted(tested(record), key=by_effect)


def pooled(record: Record) -> Row:
    """The pooled deviation of the differences at equal KL, its degrees of freedom, and how many it
    would have if no rows shared runs; what Holm's method keeps with either deviation; and the
    p-values by their own."""
    rows = compared(record)
    found = [row["equal_kl_differences"] for row in rows]
    deviation, independent = differences.pooled_deviation(found)
    own = {}
    for row in rows:
        spread = float(np.std(row["equal_kl_differences"], ddof=1))
        freedom = len(row["equal_kl_differences"]) - 1
        own[row["choice"]] = differences.p_value(row["equal_kl_differences"], spread, freedom)
    return {
        "deviation": deviation,
        "freedom": differences.freedom_of(rows, "equal_kl"),
        "independent": independent,
        "rows": len(rows),
        "kept": sum(row["equal_kl_holds"] for row in rows),
        "kept_pooled": sum(row["equal_kl_pooled_holds"] for row in rows),
        "first_must_be": differences.LEVEL / len(rows),
        "p": own,
    }


def matters(short: Record, full: Record) -> list[Row]:
    """The choices that most readers ask for, full runs before short ones."""
    rows = []
    for record, names in ((full, MATTERS_FULL), (short, MATTERS_SHORT)):
        of_choice = {row["choice"]: row for row in choices(record)}
        more = {"episodes": record["args"]["episodes"]}
        rows += [of_choice[name] | more for name in names]
    return rows


# --- pictures -------------------------------------------------------------------------------------
def compared(record: Record) -> list[Row]:
    """What has a difference at equal KL, sorted by it."""
    found = [row for row in tested(record) if row["equal_kl_interval"] is not None]
    return sorted(found, key=lambda row: row["equal_kl"])


def name_of(row: Row) -> str:
    """The choice, how many of its runs ended or failed, and a star if it passes with the pooled
    deviation."""
    name = row["choice"]
    if row["equal_kl_seeds"] < row["seeds"]:
        name += f" ({row['equal_kl_seeds']} of {row['seeds']} runs ended)"
    elif row["num_failed"] > 0:
        name += f" ({row['num_failed']} of {row['seeds']} failed)"
    return name + (" *" if row["equal_kl_pooled_holds"] else "")


def draw_forest(axes: Axes, rows: list[Row]) -> None:
    """Differences at equal KL with intervals, the pooled ones in a lighter shade. What passes with
    its own deviation has a bold name; what is not comparable has a hollow mark."""
    for y, row in enumerate(rows):
        colour = PPO
        if row["choice"].startswith(("RLOO", "GRPO")):
            colour = RLOO
        elif row["choice"].startswith("critic from the reward"):
            colour = CRITIC
        style = {"fmt": "o", "color": colour, "capsize": 2, "markersize": 5, "linewidth": 1.3}
        if row["choice"] in MASKED:
            style |= HOLLOW
        width = row["equal_kl_pooled_interval"] or 0
        axes.plot(
            [row["equal_kl"] - width, row["equal_kl"] + width],
            [y, y],
            color=colour,
            linewidth=6,
            alpha=0.22,
            solid_capstyle="butt",
        )
        axes.errorbar(row["equal_kl"], y, xerr=row["equal_kl_interval"], **style)
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=8.5)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if row["equal_kl_holds"] else "normal")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_ylim(-0.7, len(rows) - 0.3)


def forest(title: str, panels_of: dict[str, list[Row]], height: float, has_hollow: bool) -> Figure:
    """A panel of differences below each heading, so many inches high for each of them."""
    counts = [len(rows) for rows in panels_of.values()]
    inches = 1.4 + height * sum(counts)
    figure, panels = report.new(
        title,
        len(counts),
        1,
        inches,
        sharex=True,
        height_ratios=counts,
    )
    for axes, (heading, rows) in zip(panels[:, 0], panels_of.items(), strict=True):
        draw_forest(axes, rows)
        axes.set_title(heading)
    panels[-1, 0].set_xlabel(f"{DIFFERENCE}\n{PASSES}")
    panels[0, 0].plot([], [], color=PPO, alpha=0.22, linewidth=6, label=POOLED)
    legend = {"PPO": PPO, "PPO, critic from the reward model": CRITIC, "RLOO and GRPO": RLOO}
    report.name_colours(panels[0, 0], legend)
    if has_hollow:
        report.name_colours(panels[0, 0], {"not comparable (masks tokens)": PPO}, **HOLLOW)
    report.legend_below(figure, panels[0, 0], 2)
    return figure


def of_record(record: Record) -> Figure:
    """A record of your own."""
    return forest("Differences at the same KL", {"": compared(record)}, 0.17, has_hollow=True)


def of_both(full: Record, short: Record) -> Figure:
    """All choices of full and of short runs."""
    panels_of = {f"{FULL}, at 2, 4 and 6 nats": compared(full)}
    panels_of[f"{SHORT}, at 1, 2 and 3 nats"] = compared(short)
    return forest(TITLE, panels_of, 0.17, has_hollow=True)


def chosen(full: Record, short: Record) -> Figure:
    """The choices that most readers ask for."""
    panels_of = {FULL: [row for row in compared(full) if row["choice"] in CHOSEN_FULL]}
    panels_of[SHORT] = [row for row in compared(short) if row["choice"] in CHOSEN_SHORT]
    return forest(TITLE, panels_of, 0.21, has_hollow=True)


RECORDS = ("../full_length/full.json", "short.json")
PICTURES = {"all.png": (of_both, *RECORDS), "chosen.png": (chosen, *RECORDS)}
