"""Rows and pictures of this study: `python benchmark/report.py real_model`."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import differences, report
from benchmark.report import ALGORITHMS, PPO, RLOO, START, Record, Row, smooth

SIX = (  # arm, rate, seed of the runs in the findings
    ("PPO, reward model", "3e-5", 3),
    ("RLOO, reward model", "3e-5", 3),
    ("PPO, reward model", "3e-5", 1),
    ("PPO, reward model", "1e-4", 1),
    ("RLOO, reward model", "3e-5", 2),
    ("chat", "1e-4", 1),
)
GROUPS = ("Reward model that never saw the openings", "Reward model with labels for the openings")
GROUPS += ("VADER's own score as the reward", "Chat, with VADER's own score")
LAST_LABELS = 512  # over which the accuracy of a reward model is a mean
CURVES = {
    "objective/scores": "reward (reward model)",
    "objective/kl": report.SHORT_KL,
    "objective/length": "tokens up to the end (of 16)",
}


# --- tables ---------------------------------------------------------------------------------------
def shares(judged: Row) -> str:
    """Wins, ties and losses, in percent: a win rate counts a tie as half a win."""
    tied = judged["ties"]
    won = judged["win_rate"]["rate"] - tied / 2
    lost = 1 - won - tied
    return " / ".join(f"{100 * share:.0f}" for share in (won, tied, lost)) + "%"


def runs(*records: Record) -> list[Row]:
    """Every run, with its name."""
    rows = []
    for row in [row for record in records for row in record["rows"]]:
        name = "PPO, VADER" if row["arm"].startswith("rate") else row["arm"]
        more = {"name": name + (", fp32" if "--dtype fp32" in row["flags"] else "")}
        rows.append(row | more | {"shares": shares(row["wins"])})
    return rows


def duels(*records: Record) -> list[Row]:
    """RLOO's responses against PPO's."""
    found = [duel for record in records for duel in record["duels"]]
    return [duel | {"shares": shares(duel)} for duel in found]


def six(*records: Record) -> list[Row]:
    """Six runs that show what the others do, too."""
    of_run = {(row["arm"], row["lr"], row["seed"]): row for row in runs(*records)}
    rows = []
    for arm, rate, seed in SIX:
        name = "RLOO, chat, VADER's own score" if arm == "chat" else f"{arm} {seed}"
        if seed != 3 and "reward model" in arm:
            name += r" \*"  # its labels include the openings of the evaluation
        rows.append(of_run[arm, rate, seed] | {"name": name})
    return rows


def samples(record: Record) -> list[Row]:
    """What the policy of each algorithm makes of the first held-out openings."""
    ppo, rloo = (report.look_up(record, f"rows > {name}, reward model") for name in ALGORITHMS)
    afters = {sample["query"]: sample["response_after"] for sample in rloo["samples"]}
    rows = []
    for sample in ppo["samples"]:
        row = sample | {"rloo": afters[sample["query"]]}
        rows.append({kind: " ".join(text.split()) for kind, text in row.items()})
    return rows


def of_right(record: Record) -> Row:
    """Half the width of the interval of a reward model's accuracy over its last labels, in points
    of a hundred."""
    share = report.look_up(record, "rows > PPO, reward model > reward_accuracy")
    found = differences.wilson(share, LAST_LABELS)
    return {"points": 100 * (found["high"] - found["low"]) / 2}


def memory(record: Record) -> list[Row]:
    """Peak memory in GiB."""
    return [row | {"gib": row["memory"] / 2**30} for row in record["rows"]]


# --- pictures -------------------------------------------------------------------------------------
def run_name(row: Row) -> str:
    """A run in words."""
    algorithm = "PPO" if "ppo_rlhf" in row["folder"] else "RLOO"
    adapter = ", LoRA" if "LoRA" in row["arm"] else ""
    if row["arm"] == "chat":
        adapter = f", {row['episodes']} episodes"
    which = "reward model" if "reward model" in row["arm"] else "seed"
    return f"{algorithm}{adapter}, {row['lr']}, {which} {row['seed']}"


def group_of(row: Row) -> int:
    """The number of the run's group: reward model 3 is the one without labels for the openings."""
    if row["arm"] == "chat":
        return 3
    if "reward model" not in row["arm"]:
        return 2
    return int(row["seed"] != 3)


def draw_row(score: Axes, wins: Axes, row: Row, y: int) -> None:
    """A run's true scores and its win rate, at a height."""
    colour = PPO if "ppo_rlhf" in row["folder"] else RLOO
    both = [row["true_score_before"], row["true_score_after"]]
    score.plot(both, [y, y], color=colour)
    score.plot(both[0], y, "o", color=START, markersize=5)
    score.plot(both[1], y, "o", color=colour, markersize=7)
    share = {name: 100 * value for name, value in row["wins"]["win_rate"].items()}
    interval = [[share["rate"] - share["low"]], [share["high"] - share["rate"]]]
    style = {"fmt": "o", "color": colour, "capsize": 3, "linewidth": 1.5}
    wins.errorbar(share["rate"], y, xerr=interval, **style)


def before_and_after(*records: Record) -> Figure:
    """True score before and after training, and win rates, a line for each run of full length or of
    chats below the heading of its group."""
    rows = [row for row in runs(*records) if row["episodes"] >= 2_560 or row["arm"] == "chat"]
    rows.sort(key=lambda row: -row["wins"]["win_rate"]["rate"])
    lines: list[Row | str] = []
    for number, group in enumerate(GROUPS):
        mine = [row for row in rows if group_of(row) == number]
        lines += [group, *mine] if mine else []
    text = "SmolLM2: most runs improve on the starting model, by very different amounts"
    figure, panels = report.new(
        text,
        1,
        2,
        1.7 + 0.23 * len(lines),
        sharey=True,
    )
    score, wins = panels[0]
    for y, row in enumerate(lines):
        if not isinstance(row, str):
            draw_row(score, wins, row, y)
    names = [row if isinstance(row, str) else run_name(row) for row in lines]
    score.set_yticks(range(len(lines)), names, fontsize=9)
    for row, label in zip(lines, score.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if isinstance(row, str) else "normal")
    limits = {"xlim": (0, 0.8), "ylim": (len(lines) - 0.4, -0.6)}
    report.label(score, "true score, before and after", **limits)
    report.label(wins, "win rate (%), ties as halves", xlim=(20, 100))
    wins.axvline(50, color="black", linewidth=1)
    legend = {"starting model": START, "after PPO": PPO, "after RLOO": RLOO}
    report.name_colours(score, legend, "o")
    report.legend_below(figure, score, 3)
    return figure


def held(record: Record) -> Figure:
    """Reward, KL and length of the held-out runs on the way."""
    text = "SmolLM2 on held-out openings: reward and KL rise, texts get a little shorter"
    figure, panels = report.new(text, 1, 3, 3.4)
    for axes, (metric, name) in zip(panels[0], CURVES.items(), strict=True):
        for row in record["rows"]:
            algorithm = row["arm"].partition(",")[0]
            style = {"color": ALGORITHMS[algorithm], "label": algorithm}
            axes.plot(
                smooth(row["ppo/episode"], 4),
                smooth(row[metric], 4),
                **style,
            )
        report.label(axes, "episodes", name)
    report.line_at(panels[0, 0], 0, colour=START)
    panels[0, 0].legend()
    panels[0, 1].set_ylim(0, None)
    panels[0, 2].set_ylim(0, 16)
    return figure


of_record = before_and_after
PICTURES = {
    "runs.png": (before_and_after, "smollm2.json", "held.json"),
    "held.png": (held, "held.json"),
}
