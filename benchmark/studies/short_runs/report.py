"""Rows and pictures of this study: `python benchmark/report.py short_runs`. The study
full_length uses them, too."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmark import differences, report
from benchmark.report import CRITIC, PPO, RLOO, Record, Row

# The choices in chosen.png, and those in the findings.
CHOSEN_FULL = ("RLOO, K 4", "critic from the reward model", "no value function", "GRPO")
CHOSEN_FULL += ("1 epoch (default: 4)", "RLOO of tokens")
CHOSEN_SHORT = ("critic from the reward model, warmed up", "no penalty for a missing end")
CHOSEN_SHORT += ("fixed KL coefficient", "rewards not whitened", "PyTorch's Adam")
CHOSEN_SHORT += ("no ratio clipping", "8 minibatches (default: 1)")
WARMED_UP = "critic from the reward model, warmed up"
MATTERS_SHORT = (WARMED_UP, "8 minibatches (default: 1)")
MATTERS_SHORT += ("settings of InstructGPT", "dropout left on")
MATTERS_FULL = ("critic from the reward model", "no value function", "GRPO")
MASKED = ("truncated tokens masked", "settings of Qwen", "settings of Llama 2")
MASKED += ("settings of DeepSpeed-Chat", "settings of TRL 0.9", "settings of InstructGPT")
DIFFERENCE = "difference in true score at the same KL (better \N{RIGHTWARDS ARROW})"
PASSES = "bold name: passes by its own interval; *: by the pooled one"
FULL = "Full runs: 12,800 episodes, 3 seeds"
SHORT = "Short runs: 2,560 episodes, 4 seeds"
POOLED = "95% interval, pooled (line: its own)"
TITLE = "In short runs one change clearly helps: a critic that starts as the reward model"
HOLLOW = {"markerfacecolor": "white", "alpha": 0.6}

Runs = dict[str, list[Row]]  # of each choice
Pairs = list[tuple[str, str]]  # of choices: the second is subtracted from the first


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


def ranked(record: Record) -> list[Row]:
    """The choices of a record by their effect."""
    return sorted(tested(record), key=by_effect)


def choices(record: Record) -> list[Row]:
    """The same without whole recipes."""
    return [row for row in ranked(record) if not row["choice"].startswith("settings of")]


def recipes(record: Record) -> list[Row]:
    """The recipes, and the default."""
    return [row for row in ranked(record) if row["choice"].startswith(("settings of", "default"))]


def pooled(record: Record) -> Row:
    """The pooled deviation of the differences at equal KL, its degrees of freedom, and how many it
    would have if no rows shared runs; what Holm's method keeps with either deviation; and the
    p-values by their own."""
    rows = compared(record)
    own, _ = p_values(rows)
    enough = [row["equal_kl_differences"] for row in rows if row["equal_kl_interval"] is not None]
    deviation, independent = differences.pooled_deviation(enough)
    freedom = differences.freedom_of(rows, "equal_kl")
    return {
        "deviation": deviation,
        "freedom": freedom,
        "independent": independent,
        "kept_pooled": sum(row["equal_kl_pooled_holds"] for row in rows),
        "first_must_be": differences.LEVEL / len(rows),
        "p": own,
    } | power(rows, deviation, freedom)


def p_values(rows: list[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Those of a study's differences at equal KL, by the rows' own deviations and by the pooled
    one. A row with fewer than three seeds has 1."""
    enough = [row["equal_kl_differences"] for row in rows if row["equal_kl_interval"] is not None]
    deviation, _ = differences.pooled_deviation(enough)
    freedom = differences.freedom_of(rows, "equal_kl")
    own = {}
    both = {}
    for row in rows:
        name = row["choice"]
        values = row["equal_kl_differences"]
        own[name] = 1.0
        both[name] = 1.0
        if row["equal_kl_interval"] is not None:
            spread = float(np.std(values, ddof=1))
            own[name] = differences.p_value(values, spread, len(values) - 1)
            both[name] = differences.p_value(values, deviation, freedom)
    return own, both


def at_once(short: Record, full: Record) -> Row:
    """What Holm's method keeps of the differences at equal KL of short and of full runs, as one
    family: with own deviations, and with each study's pooled one. Beside it the warmed-up critic's
    p-values, and what the smallest of so many has to be."""
    own: list[float] = []
    both: list[float] = []
    names: list[str] = []
    for record in (short, full):
        of_own, of_both = p_values(compared(record))
        names += of_own
        own += of_own.values()
        both += of_both.values()
    is_kept = dict(zip(names, differences.holm(own), strict=True))
    critic = names.index(WARMED_UP)
    return {
        "comparisons": len(names),
        "kept": sum(is_kept.values()),
        "critic_kept": is_kept[WARMED_UP],
        "critic_kept_pooled": differences.holm(both)[critic],
        "critic_p": own[critic],
        "critic_p_pooled": both[critic],
        "kept_pooled": sum(differences.holm(both)),
        "first_must_be": differences.LEVEL / len(names),
    }


def power(rows: list[Row], deviation: float, freedom: float) -> Row:
    """How far the deviations of the rows are apart, and whether they may be one. How many times its
    half interval the first difference must be to pass Holm's method, and how large that is. What
    planned comparisons could tell. How many intervals exclude 0."""
    found = [row["equal_kl_differences"] for row in rows if row["equal_kl_pooled_interval"]]
    deviations = [float(np.std(values, ddof=1)) for values in found]
    num_seeds = max(map(len, found))
    tail = differences.LEVEL / len(rows) / 2
    half = differences.LEVEL / 2
    own = stats.t.isf(tail, num_seeds - 1)
    both = stats.t.isf(tail, freedom)
    exclude = {}
    for name in ("equal_kl_interval", "equal_kl_pooled_interval"):
        exclude[name] = sum(abs(row["equal_kl"]) > (row[name] or np.inf) for row in rows)
    error = deviation / num_seeds**0.5
    return {
        "least": min(deviations),
        "most": max(deviations),
        "bartlett": float(stats.bartlett(*found).pvalue),
        "own_factor": own / stats.t.isf(half, num_seeds - 1),
        "pooled_factor": both / stats.t.isf(half, freedom),
        "can_miss": own * error,
        "can_miss_pooled": both * error,
        "four_seeds": differences.half_width(deviation, 4, 3),
        "ten_seeds": differences.half_width(deviation, 10, 9),
        "exclude": exclude["equal_kl_interval"],
        "exclude_pooled": exclude["equal_kl_pooled_interval"],
    }


def scores_at(run: Row, levels: list[float], width: int) -> np.ndarray:
    """True scores where the KL first passes each level, or NaN; of moving averages over so many
    points of a run's curves."""
    weights = np.full(width, 1 / width)
    curves = {}
    for name in ("kl", "true_score"):
        curves[name] = np.convolve(run["fine_curve"][name], weights, mode="valid")
    passed = np.maximum.accumulate(curves["kl"])
    return np.interp(levels, passed, curves["true_score"], left=np.nan, right=np.nan)


def smoothed_rows(runs: Runs, pairs: Pairs, levels: list[float], width: int) -> list[Row]:
    """The differences at equal KL of smoothed curves between the two choices of each pair, within
    seeds, tested as one family."""
    scores: dict[str, dict[int, np.ndarray]] = {}
    for choice, its_runs in runs.items():
        scores[choice] = {}
        for run in its_runs:
            scores[choice][run["seed"]] = scores_at(run, levels, width)
    rows = []
    for choice, base in pairs:
        found = []
        for seed, mine in scores[choice].items():
            reached = mine - scores[base][seed]
            if not np.isnan(reached).all():
                found.append(float(np.nanmean(reached)))
        row = {
            "choice": choice,
            "pair": (choice, base),
            "equal_kl_differences": found,
            "equal_kl": float(np.mean(found)),
        }
        rows.append(row)
    differences.add_tests(rows, "equal_kl", differences.freedom_of(rows, "equal_kl"))
    return rows


def smoothings(runs: Runs, pairs: Pairs, levels: list[float]) -> list[Row]:
    """What depends on how the passing of a level is found: a row for each smoothing, which has the
    differences under `of`, by choice."""
    rows = []
    first: dict[str, float] = {}
    for width in (1, 2, 3):
        table = smoothed_rows(runs, pairs, levels, width)
        moved = []
        for line in table:
            unsmoothed = first.setdefault(line["choice"], line["equal_kl"])
            moved.append(abs(line["equal_kl"] - unsmoothed))
        row = {
            "points": width,
            "of": {line["choice"]: line for line in table},
            "moved": max(moved),
            "kept": sum(line["equal_kl_holds"] for line in table),
            "kept_pooled": sum(line["equal_kl_pooled_holds"] for line in table),
        }
        rows.append(row)
    return rows


def smoothed(record: Record) -> list[Row]:
    """Those of the differences in the table of a record."""
    names = dict.fromkeys(row["choice"] for row in record["rows"])
    runs = {name: report.runs_of(record, name) for name in names}
    changes = [line["choice"] for line in compared(record)]
    pairs = [(change, base_of(change)) for change in changes]
    return smoothings(runs, pairs, record["table"][0]["levels"])


def matters(short: Record, full: Record) -> list[Row]:
    """The choices that most readers ask for, each beside what it is compared with. Short runs come
    before full ones."""
    rows = []
    for record, names in ((short, MATTERS_SHORT), (full, MATTERS_FULL)):
        of_choice = {row["choice"]: row for row in ranked(record)}
        for name in names:
            base = of_choice[base_of(name)]
            more = {"episodes": record["args"]["episodes"], "base": base}
            more["base_name"] = report.NAMES[base["choice"]]
            rows.append(of_choice[name] | more)
    return rows


# --- pictures -------------------------------------------------------------------------------------
def compared(record: Record) -> list[Row]:
    """What has differences at equal KL with two seeds or more, sorted by their mean."""
    found = [row for row in tested(record) if len(row["equal_kl_differences"]) > 1]
    return sorted(found, key=lambda row: row["equal_kl"])


def name_of(row: Row) -> str:
    """The choice, what it is compared with if that is RLOO, how many of its runs ended or failed,
    and a star if it passes with the pooled deviation."""
    name = row["choice"]
    if base_of(name) != "default":
        name += " (compared with RLOO)"
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
        axes.errorbar(row["equal_kl"], y, xerr=row["equal_kl_interval"] or 0, **style)
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
    panels[-1, 0].set_xlabel(DIFFERENCE)
    panels[0, 0].plot([], [], color=PPO, alpha=0.22, linewidth=6, label=POOLED)
    legend = {"PPO": PPO, "PPO, critic from the reward model": CRITIC, "RLOO and GRPO": RLOO}
    report.name_colours(panels[0, 0], legend)
    if has_hollow:
        report.name_colours(panels[0, 0], {"not comparable (masks tokens)": PPO}, **HOLLOW)
    panels[0, 0].plot([], [], linestyle="", label=PASSES)
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
    panels_of = {SHORT: [row for row in compared(short) if row["choice"] in CHOSEN_SHORT]}
    panels_of[FULL] = [row for row in compared(full) if row["choice"] in CHOSEN_FULL]
    return forest(TITLE, panels_of, 0.21, has_hollow=False)


RECORDS = ("../full_length/full.json", "short.json")
PICTURES = {"all.png": (of_both, *RECORDS), "chosen.png": (chosen, *RECORDS)}
