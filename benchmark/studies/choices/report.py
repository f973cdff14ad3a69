"""Rows and pictures of this study: `python benchmark/report.py choices`."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmark import differences, report
from benchmark.differences import at_equal_kl, mean, scores_of
from benchmark.report import CRITIC, PPO, RLOO, Record, Row

# The choices in chosen.png, and those in the findings.
CHOSEN_FULL = ("RLOO, K 4", "critic from the reward model", "no value function", "GRPO")
CHOSEN_FULL += ("1 epoch (default: 4)", "RLOO of tokens")
CHOSEN_SHORT = ("critic from the reward model, warmed up", "no penalty for a missing end")
CHOSEN_SHORT += ("fixed KL coefficient", "rewards not whitened", "PyTorch's Adam")
CHOSEN_SHORT += ("no ratio clipping", "8 minibatches (default: 1)")
WARMED_UP = "critic from the reward model, warmed up"
MATTERS_SHORT = (WARMED_UP, "8 minibatches (default: 1)")
MATTERS_FULL = ("1 epoch (default: 4)", "critic from the reward model", "GRPO")
NOT_COMPARABLE = ("truncated tokens masked", "temperature 1 (default: 0.7)")
DIFFERENCE = "difference in true score at the same KL (better \N{RIGHTWARDS ARROW})"
PASSES = "bold name: significant after Holm's correction"
FULL = "Full runs: 12,800 episodes, 3 seeds"
SHORT = "Short runs: 2,560 episodes, 4 seeds"
TITLE = "In short runs a warmed-up critic helps PPO at the same KL; eight minibatches hurt"
LEVELS = (2, 4, 6)  # nats, of full runs
SHORT_LEVELS = (1, 2, 3)
STARTS = {
    "default": "value head on the policy",
    "warmed up": "value head on the policy, warmed up",
    "critic from the policy": "critic from the policy",
    "critic from the policy, warmed up": "critic from the policy, warmed up",
    "critic from the reward model": "critic from the reward model",
    WARMED_UP: WARMED_UP,
}
SHARED, SHARED_WARM, POLICY, POLICY_WARM, REWARD, REWARD_WARM = STARTS
PLANNED = {
    "start: reward model, minus head on the policy": ((REWARD, SHARED), (REWARD_WARM, SHARED_WARM)),
    "start: reward model, minus policy": ((REWARD, POLICY), (REWARD_WARM, POLICY_WARM)),
    "warm-up: five updates, minus none": (
        (SHARED_WARM, SHARED),
        (POLICY_WARM, POLICY),
        (REWARD_WARM, REWARD),
    ),
    "reward model: with the warm-up, minus without": ((REWARD_WARM, REWARD),),
}


# --- tables ---------------------------------------------------------------------------------------
def by_effect(row: Row) -> tuple[bool, bool, float]:
    """PPO's choices by their effect, then RLOO's; last what never gets as far as it is compared."""
    choice = row["choice"]
    effect = row["equal_kl"]
    if effect is None:
        effect = 0.0 if choice in ("default", "RLOO, K 4") else -9.0
    return choice.startswith(("RLOO", "GRPO")), choice != "RLOO, K 4", -effect


def base_of(choice: str) -> str:
    """The choice that a choice is compared with."""
    if choice.startswith(("RLOO", "GRPO")) and choice != "RLOO, K 4":
        return "RLOO, K 4"
    return "default"


def tested(record: Record) -> list[Row]:
    """The table of a record without whole recipes, whose KL is not comparable. Intervals take into
    account that rows share runs. `bold` marks what Holm's correction keeps."""
    table = [row for row in record["table"] if not row["choice"].startswith("settings of")]
    rows = [row | {"pair": (row["choice"], base_of(row["choice"]))} for row in table]
    differences.add_tests(rows, "equal_kl", differences.freedom_of(rows, "equal_kl"))
    for row in rows:
        row["name"] = name_of(row)
        row["bold"] = "**" if row["equal_kl_pooled_holds"] else ""
        row["width"] = row["equal_kl_pooled_interval"]
    return rows


def choices(record: Record) -> list[Row]:
    """The choices of a record by their effect."""
    return sorted(tested(record), key=by_effect)


def pooled(record: Record) -> Row:
    """The deviation of the differences at equal KL that all rows share, and its degrees of freedom.
    What Holm's method keeps. The smallest deviation of a row's own seeds, and the largest."""
    rows = compared(record)
    enough = [row["equal_kl_differences"] for row in rows if row["width"]]
    deviations = [float(np.std(values, ddof=1)) for values in enough]
    deviation, _ = differences.pooled_deviation(enough)
    freedom = differences.freedom_of(rows, "equal_kl")
    first = stats.t.isf(differences.LEVEL / len(rows) / 2, freedom)
    return {
        "deviation": deviation,
        "freedom": freedom,
        "comparisons": len(rows),
        "kept": sum(row["equal_kl_pooled_holds"] for row in rows),
        "kept_by_own": sum(row["equal_kl_holds"] for row in rows),
        "least": min(deviations),
        "most": max(deviations),
        "can_miss": first * deviation / max(map(len, enough)) ** 0.5,
    }


def at_once(*records: Record) -> Row:
    """What Holm's method keeps of the differences at equal KL of all records as one family."""
    names: list[str] = []
    found: list[float] = []
    for record in records:
        rows = compared(record)
        deviation = pooled(record)["deviation"]
        freedom = pooled(record)["freedom"]
        for row in rows:
            names.append(row["choice"])
            values = row["equal_kl_differences"]
            has_interval = row["equal_kl_interval"] is not None  # three seeds or more
            p = differences.p_value(values, deviation, freedom) if has_interval else 1.0
            found.append(p)
    is_kept = differences.holm(found)
    kept = [name for name, holds in zip(names, is_kept, strict=True) if holds]
    return {"comparisons": len(names), "words": "; ".join(kept)}


def matters(short: Record, full: Record) -> list[Row]:
    """The choices that most readers ask for, each beside what it is compared with. Short runs come
    before full ones."""
    rows = []
    for record, names in ((short, MATTERS_SHORT), (full, MATTERS_FULL)):
        of_choice = {row["choice"]: row for row in choices(record)}
        for name in names:
            base = of_choice[base_of(name)]
            more = {"episodes": record["args"]["episodes"], "base": base}
            more["base_name"] = report.NAMES[base["choice"]]
            rows.append(of_choice[name] | more)
    return rows


# --- RLOO beside PPO ------------------------------------------------------------------------------
def pairs(*records: Record) -> list[Row]:
    """RLOO beside PPO in each record."""
    rows = []
    settings = []
    for record in records:
        row = {line["choice"]: line for line in record["table"]}
        args = {"lr": "2e-4"} | {name: x for name, x in record["args"].items() if x is not None}
        setting = (args["lr"], args["episodes"])
        again = ", repeated" if setting in settings else ""
        settings.append(setting)
        pair = {
            "args": args,
            "again": again,
            "ppo": row["default"],
            "rloo": row["RLOO, K 4"],
        }
        rows.append(pair)
    return rows


def beside_rloo(record: Record) -> list[Row]:
    """True scores of PPO with the critic and of RLOO, and their differences, at each KL and at the
    end: means over the seeds in which both get there."""
    critic = [scores_of(run, LEVELS) for run in report.runs_of(record, WARMED_UP)]
    rloo = [scores_of(run, LEVELS) for run in report.runs_of(record, "RLOO, K 4")]
    rows = []
    names = [f"at {level} nats" for level in LEVELS] + ["at the end"]
    columns = (names, np.transpose(critic), np.transpose(rloo))
    for name, ours, theirs in zip(*columns, strict=True):
        is_reached = ~np.isnan(ours - theirs)
        ours = ours[is_reached]
        theirs = theirs[is_reached]
        row = {
            "where": name,
            "seeds": len(ours),
            "critic": ours.mean(),
            "rloo": theirs.mean(),
            "mean": (ours - theirs).mean(),
            "width": differences.interval(ours - theirs),
        }
        rows.append(row)
    return rows


# --- the critic's start and its warm-up -----------------------------------------------------------
def planned(record: Record) -> list[Row]:
    """The comparisons of protocol.md: for each seed the mean over pairs of runs of their difference
    at the same KL, and at the end. `holds` is by Holm's method over these four."""
    rows = []
    for name, pairs_of_choices in PLANNED.items():
        leads, ends = leads_of(record, pairs_of_choices)
        row = {"name": name} | differences.of_seeds(leads)
        deviation = float(np.std(leads, ddof=1))
        row["p"] = differences.p_value(leads, deviation, len(leads) - 1)
        rows.append(row | {"end": differences.of_seeds(ends)})
    for row, holds in zip(rows, differences.holm([row["p"] for row in rows]), strict=True):
        row["holds"] = "yes" if holds else "no"
    return rows


def leads_of(
    record: Record, pairs_of_choices: list[tuple[str, str]]
) -> tuple[list[float], list[float]]:
    """For each seed, how far the first of a pair of choices is above the other at the same KL, and
    at the end; means over the pairs."""
    runs = {(row["choice"], row["seed"]): row for row in record["rows"]}
    leads = []
    ends = []
    for seed in record["args"]["seeds"]:
        pairs = [(runs[one, seed], runs[other, seed]) for one, other in pairs_of_choices]
        leads.append(np.mean([mean(at_equal_kl(*pair, SHORT_LEVELS)) for pair in pairs]))
        found = [scores_of(one, ()) - scores_of(other, ()) for one, other in pairs]
        ends.append(np.mean(found))
    return leads, ends


def together(record: Record) -> Row:
    """What the start as the reward model and the warm-up gain together, with the seeds of
    protocol.md, which had not planned this."""
    leads, ends = leads_of(record, [(REWARD_WARM, SHARED)])
    return differences.of_seeds(leads) | {"end": differences.of_seeds(ends)}


def starts(record: Record) -> list[Row]:
    """The kinds of runs of protocol.md: true scores at each level of KL."""
    rows = []
    for line in record["table"]:
        runs = report.runs_of(record, line["choice"])
        scores = np.array([scores_of(run, SHORT_LEVELS) for run in runs])
        at = [mean(column) for column in scores.T[:-1]]
        rows.append(line | {"name": STARTS.get(line["choice"], "RLOO"), "at": at})
    return rows


# --- pictures -------------------------------------------------------------------------------------
def compared(record: Record) -> list[Row]:
    """What has differences at equal KL with two seeds or more, sorted by their mean."""
    found = [row for row in tested(record) if len(row["equal_kl_differences"]) > 1]
    return sorted(found, key=lambda row: row["equal_kl"])


def name_of(row: Row) -> str:
    """The choice, what it is compared with if that is RLOO, and how many of its runs stopped or
    failed."""
    name = row["choice"]
    if base_of(name) != "default":
        name += " (compared with RLOO)"
    if 0 < row["equal_kl_seeds"] < row["seeds"]:
        name += f" ({row['seeds'] - row['equal_kl_seeds']} of {row['seeds']} runs stopped)"
    elif row["num_failed"] > 0:
        name += f" ({row['num_failed']} of {row['seeds']} failed)"
    return name


def draw_forest(axes: Axes, rows: list[Row]) -> None:
    """Differences at equal KL with intervals. What is significant has a bold name."""
    for y, row in enumerate(rows):
        colour = PPO
        if row["choice"].startswith(("RLOO", "GRPO")):
            colour = RLOO
        elif row["choice"].startswith("critic from the reward"):
            colour = CRITIC
        style = {"fmt": "o", "color": colour, "capsize": 2, "markersize": 5, "linewidth": 1.5}
        axes.errorbar(row["equal_kl"], y, xerr=row["width"] or 0, **style)
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=8.5)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if row["bold"] else "normal")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_ylim(-0.7, len(rows) - 0.3)


def forest(title: str, panels_of: dict[str, list[Row]], height: float) -> Figure:
    """A panel of differences below each heading, so many inches high for each of them."""
    counts = [len(rows) for rows in panels_of.values()]
    inches = 1.4 + height * sum(counts)
    shared = {"sharex": True, "height_ratios": counts}
    figure, panels = report.new(title, len(counts), 1, inches, **shared)
    for axes, (heading, rows) in zip(panels[:, 0], panels_of.items(), strict=True):
        draw_forest(axes, rows)
        axes.set_title(heading)
    panels[-1, 0].set_xlabel(DIFFERENCE)
    legend = {"PPO": PPO, "PPO, critic from the reward model": CRITIC, "RLOO and GRPO": RLOO}
    report.name_colours(panels[0, 0], legend)
    panels[0, 0].plot([], [], linestyle="", label=PASSES)
    report.legend_below(figure, panels[0, 0], 2)
    return figure


def of_record(record: Record) -> Figure:
    """A record of your own."""
    return forest("Differences at the same KL", {"": compared(record)}, 0.17)


def of_both(full: Record, short: Record) -> Figure:
    """All choices of full and of short runs that are comparable."""
    rows = [row for row in compared(full) if row["choice"] not in NOT_COMPARABLE]
    panels_of = {f"{FULL}, at 2, 4 and 6 nats": rows}
    panels_of[f"{SHORT}, at 1, 2 and 3 nats"] = compared(short)
    return forest(TITLE, panels_of, 0.17)


def chosen(full: Record, short: Record) -> Figure:
    """The choices that most readers ask for."""
    panels_of = {SHORT: [row for row in compared(short) if row["choice"] in CHOSEN_SHORT]}
    panels_of[FULL] = [row for row in compared(full) if row["choice"] in CHOSEN_FULL]
    return forest(TITLE, panels_of, 0.21)


RECORDS = ("full.json", "short.json")
PICTURES = {"all.png": (of_both, *RECORDS), "chosen.png": (chosen, *RECORDS)}
