"""Draws the pictures of the documents from the records in results/.

    python benchmark/pictures.py                      # all of them
    python benchmark/pictures.py readme slow-rate     # some
    python benchmark/pictures.py --record benchmark/results/ablations-mine.json

Nothing is measured here. PPO, RLOO, the reference, best of n and a critic that starts as the reward
model have the same colours everywhere. With --record a record of your own is drawn by its kind, and
the picture is written beside it.
"""

import argparse
import functools
import io
import json
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from readme_tables import CHOSEN, MASKED, named

RESULTS = Path(__file__).resolve().parent / "results"
Record = dict[str, Any]
Row = dict[str, Any]
PPO = "#0072B2"
RLOO = "#D55E00"
REFERENCE = "#777777"
BEST_OF_N = "black"
CRITIC = "#009E73"  # that starts as the reward model
OTHER = "#AAAAAA"
ALGORITHMS = {"PPO": PPO, "RLOO": RLOO}
CHOICES = {"default": PPO, "RLOO, K 4": RLOO, "critic from the reward model": CRITIC}
NAMES = {"default": "PPO", "RLOO, K 4": "RLOO"}
WIDTH = 9  # inches
DPI = 130
GOLD = "true score (VADER)"
KL = "KL to the reference (nats per response)"
SHORT_KL = "KL (nats per response)"  # where three panels share the width
DIFFERENCE = "difference in true score at the same KL (better \N{RIGHTWARDS ARROW})"


# --- records --------------------------------------------------------------------------------------
def load(name: str) -> Record:
    """A record of results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def runs_of(record: Record, choice: str) -> list[Row]:
    """The runs of a choice that have ended."""
    rows = record["rows"]
    return [row for row in rows if row["choice"] == choice and "fine_curve" in row]


def over_episodes(record: Record, choice: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Episodes at the middle of each point of the curves, and their values, (seeds, points)."""
    values = np.array([row["fine_curve"][kind] for row in runs_of(record, choice)])
    points = values.shape[1]
    episodes = (np.arange(points) + 0.5) * record["args"]["episodes"] / points
    return episodes, values


def first_passages(curves: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Levels of KL that all curves pass, and the mean gold score where they first do."""
    passed = [np.maximum.accumulate(curve["kl"]) for curve in curves]
    first = max(kl[0] for kl in passed)
    last = min(kl[-1] for kl in passed)
    levels = np.linspace(first, last, 40)
    gold = []
    for kl, curve in zip(passed, curves, strict=True):
        gold.append(np.interp(levels, kl, curve["gold"]))
    return levels, np.mean(gold, 0)


def smooth(values: Any, width: int) -> np.ndarray:
    """Means of `width` neighbouring updates."""
    whole = len(values) // width * width
    return np.array(values[:whole]).reshape(-1, width).mean(1)


def best_of_n(labels: str = "4000") -> tuple[np.ndarray, np.ndarray]:
    """KL and mean gold score of best of n, for n = 1, 2, 4, .. 128, as the proxy chooses."""
    record = load("overoptimisation-tiny")
    rows = [row for row in record["best_of_n"] if row["labels"] == labels]
    gold = np.mean([row["gold"] for row in rows], 0)
    return np.array(rows[0]["kl"]), gold


# --- what all pictures share ----------------------------------------------------------------------
def new(rows: int, columns: int, height: float, **more: Any) -> tuple[Figure, np.ndarray]:
    """A figure as wide as a page, and its panels, (rows, columns)."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **more)
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def title(figure: Figure, text: str) -> None:
    """What the picture shows, in a sentence."""
    figure.suptitle(text, fontsize=12, fontweight="bold")


def draw_band(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str) -> None:
    """The mean over seeds, and a band from the lowest to the highest."""
    axes.plot(
        x,
        y.mean(0),
        color=colour,
        label=label,
        linewidth=2,
    )
    axes.fill_between(
        x,
        y.min(0),
        y.max(0),
        color=colour,
        alpha=0.18,
        linewidth=0,
    )


def draw_level(axes: Axes, level: float, colour: str, label: str, style: str = "--") -> None:
    """A horizontal line with its name."""
    axes.axhline(
        level,
        color=colour,
        linestyle=style,
        linewidth=1.3,
        label=label,
    )


def reference_gold(record: Record) -> float:
    """The mean gold score of the reference, on the held-out queries."""
    rows = record["rows"]
    return float(np.mean([row["gold_reference"] for row in rows if "gold_reference" in row]))


def draw_true_score(axes: Axes, record: Record) -> None:
    """The true score of PPO and RLOO over episodes, beside no training and best of n."""
    for choice, name in NAMES.items():
        x, y = over_episodes(record, choice, "gold")
        draw_band(axes, x, y, CHOICES[choice], f"{name} (mean and range of {len(y)} seeds)")
    _, gold = best_of_n()
    draw_level(axes, gold[-1], BEST_OF_N, "best of 128, no training (held-out queries)")
    draw_level(axes, reference_gold(record), REFERENCE, "before training (held-out queries)", ":")
    axes.set(xlabel="episodes (responses trained on)", ylabel=GOLD, ylim=(0, 1))
    axes.set_xlim(0, record["args"]["episodes"])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=6)


# --- the default run ------------------------------------------------------------------------------
def readme() -> Figure:
    """The true score of PPO and RLOO: the first picture of README.md."""
    figure, panels = new(1, 1, 3.7)
    axes = panels[0, 0]
    draw_true_score(axes, load("ablations-full"))
    axes.set_ylabel("true score of training responses")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.08), fontsize=10)
    title(figure, "The model learns to continue stories cheerfully")
    return figure


def embedded() -> Figure:
    """True score, proxy and KL of the default run."""
    record = load("ablations-full")
    figure, panels = new(1, 3, 3.6)
    draw_true_score(panels[0, 0], record)
    labels = {"proxy": "reward (reward model's score)", "kl": SHORT_KL}
    for axes, (kind, label) in zip(panels[0, 1:], labels.items(), strict=True):
        for choice in NAMES:
            x, y = over_episodes(record, choice, kind)
            draw_band(axes, x, y, CHOICES[choice], NAMES[choice])
        axes.set(xlabel="episodes", ylabel=label)
        axes.set_xlim(0, record["args"]["episodes"])
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in panels.flat:
        axes.set_xticks([0, 6_000, 12_000])
    draw_level(panels[0, 2], 6, OTHER, "target of the KL penalty")
    panels[0, 2].set_ylim(0, None)
    target = panels[0, 2].lines[-1:]
    panels[0, 2].legend(handles=target, loc="lower right", fontsize=9)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=9)
    title(figure, "Both algorithms raise the true score, and level off as the KL nears its target")
    return figure


# --- choices --------------------------------------------------------------------------------------
def of_rloo(choice: str) -> bool:
    """Whether a choice is one of RLOO's."""
    return choice.startswith(("RLOO", "GRPO"))


def draw_forest(
    axes: Axes, table: list[Row], heading: str, chosen: dict[str, str] | None = None
) -> None:
    """Differences at equal KL, sorted, with intervals: all, or those of chosen choices, by the
    names given to them. What the correction keeps has a bold name; what is not comparable has a
    hollow mark."""
    compared = [line for line in table if line["equal_kl_interval"] is not None]
    if chosen is not None:
        compared = [line for line in compared if line["choice"] in chosen]
    compared.sort(key=lambda line: line["equal_kl"])
    names = []
    for y, line in enumerate(compared):
        choice = line["choice"]
        colour = PPO
        if of_rloo(choice):
            colour = RLOO
        elif choice.startswith("critic from the reward"):
            colour = CRITIC
        style = {
            "fmt": "o",
            "color": colour,
            "capsize": 2,
            "markersize": 5,
            "linewidth": 1.3,
        }
        if choice in MASKED:
            style |= {"markerfacecolor": "white", "alpha": 0.6}
        axes.errorbar(line["equal_kl"], y, xerr=line["equal_kl_interval"], **style)
        names.append(named(choice) if chosen is None else chosen[choice])
    axes.set_yticks(range(len(compared)), names, fontsize=8.5)
    for line, label in zip(compared, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if line["equal_kl_holds"] else "normal")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_ylim(-0.7, len(compared) - 0.3)
    axes.set_title(heading, fontsize=10)


def forest(records: dict[str, Record]) -> Figure:
    """A panel of differences at equal KL for each record, below its heading."""
    counts = []
    for record in records.values():
        found = [line for line in record["table"] if line["equal_kl_interval"] is not None]
        counts.append(len(found))
    heights = {"height_ratios": counts} if len(counts) > 1 else {}
    height = 1.4 + 0.17 * sum(counts)
    figure, panels = new(len(counts), 1, height, sharex=True, **heights)
    for axes, (heading, record) in zip(panels[:, 0], records.items(), strict=True):
        draw_forest(axes, record["table"], heading)
    panels[-1, 0].set_xlabel(DIFFERENCE)
    legend = {
        "PPO": PPO,
        "RLOO (base: RLOO K 4, where no other is named)": RLOO,
        "critic from the reward model": CRITIC,
    }
    for name, colour in legend.items():
        panels[0, 0].plot([], [], "o-", color=colour, label=name)
    style = {"color": PPO, "markerfacecolor": "white", "alpha": 0.6}
    panels[0, 0].plot([], [], "o-", label="not comparable (KL leaves tokens out)", **style)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


FULL = "Full runs: 12,800 episodes, 3 seeds"
SHORT = "Short runs: 2,560 episodes, 4 seeds"


def details() -> Figure:
    """The choices that most readers ask for."""
    counts = [len(choices) for choices in CHOSEN.values()]
    figure, panels = new(2, 1, 1.3 + 0.21 * sum(counts), sharex=True, height_ratios=counts)
    for axes, heading, name in zip(panels[:, 0], (FULL, SHORT), CHOSEN, strict=True):
        draw_forest(axes, load(name)["table"], heading, CHOSEN[name])
    panels[-1, 0].set_xlabel(DIFFERENCE)
    names = {"PPO": PPO, "PPO, critic from the reward model": CRITIC, "RLOO and GRPO": RLOO}
    for name, colour in names.items():
        panels[0, 0].plot([], [], "o-", color=colour, label=name)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    title(figure, "Only one of these differences (bold) passes the strict test")
    return figure


def ablations() -> Figure:
    """All choices of full and of short runs."""
    records = {
        f"{FULL}, at 2, 4 and 6 nats": load("ablations-full"),
        f"{SHORT}, at 1, 2 and 3 nats": load("ablations-tiny"),
    }
    figure = forest(records)
    title(figure, "One of 45 differences (bold) survives Holm's correction")
    return figure


def full_length() -> Figure:
    """Gold over KL of three choices, and what three value functions explain."""
    record = load("ablations-full")
    figure, panels = new(1, 2, 3.6)
    gold, explained = panels[0]
    for choice, colour in CHOICES.items():
        x, y = first_passages([row["fine_curve"] for row in runs_of(record, choice)])
        label = NAMES.get(choice, f"PPO, {choice}")
        gold.plot(x, y, color=colour, linewidth=2, label=label)
    x, y = best_of_n()
    gold.plot(x, y, color=BEST_OF_N, linestyle="--", label="best of n, no training")
    gold.set(
        xlabel=KL,
        ylabel=f"{GOLD}, mean of 3 seeds",
        xlim=(0, 6.5),
        ylim=(0, 1),
    )
    gold.legend(fontsize=9, loc="lower right")
    values = {
        "critic from the reward model": ("critic from the reward model", CRITIC, "-"),
        "critic's rate 1e-2": ("value head, rate 1e-2", PPO, ":"),
        "default": ("value head, rate 2e-4 (default)", PPO, "-"),
    }
    for choice, (label, colour, line) in values.items():
        curves = [row["curve"]["var_explained"] for row in runs_of(record, choice)]
        points = len(curves[0])
        x = (np.arange(points) + 0.5) * record["args"]["episodes"] / points
        style = {"color": colour, "linestyle": line, "linewidth": 2, "label": label}
        explained.plot(x, np.mean(curves, 0), **style)
    explained.axhline(0, color="black", linewidth=0.8)
    explained.set(xlabel="episodes", ylabel="variance explained by the values")
    explained.set_ylim(-0.2, 1)
    explained.xaxis.set_major_formatter("{x:,.0f}")
    explained.legend(fontsize=9, loc="upper left")
    title(figure, "A critic that predicts much better gains a little true score at the same KL")
    return figure


def slow_rate() -> Figure:
    """PPO and RLOO at two rates, over KL and over episodes."""
    rates = {"2e-4": ("ablations-full", "-"), "5e-5": ("ablations-long", "--")}
    figure, panels = new(1, 2, 3.8, sharey=True)
    for rate, (name, line) in rates.items():
        record = load(name)
        for choice, algorithm in NAMES.items():
            style = {"color": CHOICES[choice], "linestyle": line, "linewidth": 2}
            label = f"{algorithm} at {rate}"
            curves = [row["fine_curve"] for row in runs_of(record, choice)]
            x, y = first_passages(curves)
            panels[0, 0].plot(x, y, **style, label=label)
            levels = [level for level in (2, 4, 6) if level <= x[-1]]
            panels[0, 0].plot(levels, np.interp(levels, x, y), "o", color=CHOICES[choice])
            x, y = over_episodes(record, choice, "gold")
            mean = smooth(y.mean(0), 2)
            panels[0, 1].plot(smooth(x, 2), mean, **style)
    panels[0, 0].set(
        xlabel=KL,
        ylabel=f"{GOLD}, mean of 3 seeds",
        ylim=(0, 1),
        xlim=(0, 6.5),
    )
    panels[0, 1].set(xlabel="episodes")
    panels[0, 1].xaxis.set_major_formatter("{x:,.0f}")
    panels[0, 1].locator_params(axis="x", nbins=6)
    panels[0, 0].set_title("True score against KL (dots: where runs are compared)", fontsize=10)
    panels[0, 1].set_title("True score against episodes", fontsize=10)
    panels[0, 0].legend(fontsize=9, loc="lower right")
    title(figure, "A lower learning rate: ahead at 2 and 4 nats, nearly level at the end")
    return figure


# --- overoptimisation -----------------------------------------------------------------------------
def source_title(labels: str, record: Record) -> str:
    """Of a column: the labels of its reward models, and their accuracy."""
    size, _, noise = labels.partition(":")
    models = [row["accuracy"] for row in record["reward_models"] if row["labels"] == labels]
    noisy = f", {float(noise):.0%} random" if noise else ""
    return f"{int(size):,} labels{noisy}\n(accuracy {np.mean(models):.2f})"


def overoptimisation(sources: list[str], text: str, record: Record | None = None) -> Figure:
    """Gold above and proxy below, a column for each kind of reward model, a line for each run."""
    record = record or load("overoptimisation-tiny")
    shape = {"sharex": True, "sharey": "row"}
    figure, panels = new(2, len(sources), 5, **shape)
    for column, labels in zip(panels.T, sources, strict=True):
        for axes, kind in zip(column, ("gold", "proxy"), strict=True):
            axes.axhline(0, color="black", linewidth=0.8)
            for row in [*record["rows"], *record["best_of_n"]]:
                if row["labels"] != labels:
                    continue
                algorithm = row.get("algorithm", "best of n")
                width = 5 if "algorithm" in row else 1
                x = np.sqrt(smooth(row["kl"], width).clip(min=0))
                style = {"color": ALGORITHMS.get(algorithm, BEST_OF_N), "linewidth": 1.4}
                axes.plot(x, smooth(row[kind], width), **style, label=algorithm)
        column[0].set_title(source_title(labels, record), fontsize=10)
    for axes in panels[1]:
        nats = (0, 4, 16, 36, 64, 100, 144)
        axes.set_xticks([value**0.5 for value in nats], nats)
    panels[1, len(sources) // 2].set_xlabel(f"{KL}, on a square-root scale")
    panels[0, 0].set_ylabel(GOLD)
    panels[1, 0].set_ylabel("reward (reward model)")
    handles, names = panels[0, 0].get_legend_handles_labels()
    shown = dict(zip(names, handles, strict=True))
    words = [f"{name}, a line for each of 3 seeds" for name in shown]
    figure.legend(
        shown.values(),
        words,
        loc="outside lower center",
        ncols=3,
        fontsize=9,
    )
    title(figure, text)
    return figure


PENALTIES = {0.0: "no KL penalty", 0.15: "default KL penalty"}
SEEDS = {1: "-", 2: "--", 3: ":"}  # lines of runs that differ by their seed


def weak_rewards(record: Record | None = None) -> Figure:
    """Gold over the episodes against weak reward models: without a KL penalty above, with one
    below. What falls below 0 has the way of its reward beside it."""
    record = record or load("overoptimisation-penalty")
    sources = record["args"]["labels"]
    figure, panels = new(2, len(sources), 5.2, sharex=True, sharey=True)
    for line, (coef, penalty) in zip(panels, PENALTIES.items(), strict=True):
        for axes, labels in zip(line, sources, strict=True):
            axes.axhline(0, color="black", linewidth=0.8)
            for row in record["rows"]:
                if row["labels"] != labels or row["kl_coef"] != coef:
                    continue
                gold = smooth(row["gold"], 5)
                x = (np.arange(len(gold)) + 0.5) * record["args"]["episodes"] / len(gold)
                colour = ALGORITHMS[row["algorithm"]]
                is_low = gold[-1] < 0
                width = 2.6 if is_low else 1.5
                axes.plot(x, gold, SEEDS[row["seed"]], color=colour, linewidth=width)
                if is_low:
                    reward = smooth(row["proxy"], 5)
                    text = f"reward {reward[0]:.1f} \N{RIGHTWARDS ARROW} {reward[-1]:.1f}"
                    place = {"xytext": (-2, 12), "textcoords": "offset points", "ha": "right"}
                    place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                    axes.annotate(text, (x[-1], gold[-1]), **place, color=colour, fontsize=9)
        line[0].set_ylabel(f"{penalty}:\n{GOLD}")
    for axes, labels in zip(panels[0], sources, strict=True):
        axes.set_title(source_title(labels, record), fontsize=10)
    for axes in panels[1]:
        axes.set_xlabel("episodes")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(-1, 1)
    for name, colour in ALGORITHMS.items():
        panels[0, 0].plot([], [], color=colour, linewidth=2, label=name)
    for seed, style in SEEDS.items():
        panels[0, 0].plot([], [], style, color="black", linewidth=1.5, label=f"seed {seed}")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    title(figure, WEAK_REWARDS)
    return figure


def gamble() -> Figure:
    """The true score at the end of every run over the accuracy of its reward model: without a KL
    penalty, of both series, and with the default's."""
    figure, panels = new(1, 1, 4)
    axes = panels[0, 0]
    axes.axhline(0, color="black", linewidth=0.8)
    counts = {0.0: 0, 0.15: 0}
    for name in ("overoptimisation-tiny", "overoptimisation-penalty"):
        record = load(name)
        accuracy = {(x["labels"], x["seed"]): x["accuracy"] for x in record["reward_models"]}
        for row in record["rows"]:
            coef = row["kl_coef"]
            style = {"color": ALGORITHMS[row["algorithm"]], "markersize": 7, "alpha": 0.6}
            if coef:
                style |= {"markerfacecolor": "white", "markeredgewidth": 1.6}
            x = accuracy[row["labels"], row["seed"]]
            axes.plot(x, smooth(row["gold"], 5)[-1], "^" if coef else "o", **style)
            counts[coef] += 1
    chance = record["reward_models"][0]["constant"]
    axes.axvline(chance, color=OTHER, linestyle="--", linewidth=1.3)
    place = {"xytext": (5, 0), "textcoords": "offset points", "color": REFERENCE, "fontsize": 9}
    axes.annotate("always the same answer", (chance, -0.35), **place)
    for algorithm, colour in ALGORITHMS.items():
        axes.plot([], [], "s", color=colour, label=algorithm)
    axes.plot([], [], "o", color=REFERENCE, label=f"no KL penalty ({counts[0.0]} runs)")
    style = {"color": REFERENCE, "markerfacecolor": "white", "markeredgewidth": 1.6}
    axes.plot([], [], "^", **style, label=f"default penalty ({counts[0.15]} runs)")
    axes.set(
        xlabel="accuracy of the reward model on held-out labels (best of four)", ylim=(-1, 1.05)
    )
    axes.set_ylabel(f"{GOLD} at the end")
    axes.legend(loc="lower right", fontsize=9)
    title(figure, "Without a KL penalty, a reward model near chance makes training a gamble")
    return figure


SHADES = {0.0: "#E69F00", 0.05: "#56B4E9", 0.15: "#009E73", 0.5: "#CC79A7"}  # of coefficients


def frontier() -> Figure:
    """Gold over the KL and over the episodes, for coefficients of the KL penalty and a lower
    rate; a row for each algorithm."""
    groups: dict[tuple[str, Any, str], list[Row]] = {}
    for name in ("overoptimisation-frontier", "overoptimisation-slow"):
        record = load(name)
        rate = record["args"].get("lr", "2e-4")
        for row in record["rows"]:
            key = (row["algorithm"], row["kl_coef"], rate)
            groups.setdefault(key, []).append(row)
    figure, panels = new(2, 2, 6, sharex="col", sharey=True)
    for (algorithm, coef, rate), rows in groups.items():
        by_kl, by_episodes = panels[list(ALGORITHMS).index(algorithm)]
        style = {"color": SHADES[coef], "linewidth": 1.8, "label": f"KL coefficient {coef:g}"}
        if rate != "2e-4":
            style |= {"linestyle": "--", "label": f"{style['label']}, --lr {rate}"}
        curves = []
        for row in rows:
            curves.append({kind: smooth(row[kind], 2) for kind in ("kl", "gold")})
        by_kl.plot(*first_passages(curves), **style)
        gold = np.mean([smooth(row["gold"], 5) for row in rows], 0)
        updates = (np.arange(len(gold)) + 0.5) * 5
        by_episodes.plot(updates * 64, gold, **style)
    for axes, algorithm in zip(panels[:, 0], ALGORITHMS, strict=True):
        x, y = best_of_n()
        axes.plot(
            x,
            y,
            color=BEST_OF_N,
            linestyle=":",
            linewidth=2,
            label="best of n",
        )
        axes.set(
            ylabel=f"{algorithm}: {GOLD}",
            xlim=(0, 16),
            ylim=(0, 1),
        )
    panels[1, 0].set_xlabel(KL)
    panels[1, 1].set_xlabel("episodes")
    panels[1, 1].xaxis.set_major_formatter("{x:,.0f}")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    title(figure, "At the same KL, a penalty and a lower learning rate score higher")
    return figure


# --- the real model -------------------------------------------------------------------------------
GROUPS = (  # of runs on the real model, from above
    "Reward model that never saw the openings",
    "Reward model with labels for the openings",
    "VADER's own score as the reward",
    "Chat, with VADER's own score",
)


def run_name(row: Row) -> str:
    """A run of the real model, in words."""
    algorithm = "PPO" if "ppo_rlhf" in row["folder"] else "RLOO"
    adapter = ", LoRA" if "LoRA" in row["arm"] else ""
    if row["arm"] == "chat":
        adapter = f", {row['episodes']} episodes"
    which = f"reward model {row['seed']}" if "reward model" in row["arm"] else f"seed {row['seed']}"
    return f"{algorithm}{adapter}, {row['lr']}, {which}"


def group_of(row: Row) -> int:
    """The number of the run's group."""
    if row["arm"] == "chat":
        return 3
    if "reward model" not in row["arm"]:
        return 2
    return 0 if "-held" in row["record"] else 1


def real_model(records: dict[str, Record], episodes: int | None = None) -> Figure:
    """Gold before and after training, and win rates, a line for each run below the heading of its
    group: all, or those with so many episodes and the one of chats."""
    rows = []
    for name, record in records.items():
        rows += [row | {"record": name} for row in record["rows"]]
    if episodes is not None:
        rows = [row for row in rows if row["episodes"] >= episodes or row["arm"] == "chat"]
    rows.sort(key=lambda row: (group_of(row), -row["wins"]["win_rate"]["rate"]))
    lines: list[Row | str] = []
    for number, group in enumerate(GROUPS):
        mine = [row for row in rows if group_of(row) == number]
        if mine:
            lines += [group, *mine]
    figure, panels = new(1, 2, 1.7 + 0.23 * len(lines), sharey=True)
    gold, wins = panels[0]
    names = []
    for y, row in enumerate(lines):
        if isinstance(row, str):
            names.append(row)
            continue
        names.append(run_name(row))
        colour = PPO if "ppo_rlhf" in row["folder"] else RLOO
        before = row["gold_before"]
        after = row["gold_after"]
        gold.plot([before, after], [y, y], color=colour, linewidth=2)
        gold.plot(before, y, "o", color=REFERENCE, markersize=5)
        gold.plot(after, y, "o", color=colour, markersize=7)
        share = row["wins"]["win_rate"]
        low = 100 * (share["rate"] - share["low"])
        high = 100 * (share["high"] - share["rate"])
        style = {"fmt": "o", "color": colour, "capsize": 3, "linewidth": 1.5}
        wins.errorbar(100 * share["rate"], y, xerr=[[low], [high]], **style)
    gold.set_yticks(range(len(lines)), names, fontsize=9)
    for line, label in zip(lines, gold.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if isinstance(line, str) else "normal")
    gold.set(xlabel="true score, before and after", xlim=(0, 0.8))
    gold.set_ylim(len(lines) - 0.4, -0.6)
    wins.axvline(50, color="black", linewidth=1)
    wins.set_xlabel("win rate against the starting model (%)")
    wins.set_xlim(20, 100)
    legend = {"before training": REFERENCE, "after PPO": PPO, "after RLOO": RLOO}
    for name, colour in legend.items():
        gold.plot([], [], "o", color=colour, label=name)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    title(figure, "SmolLM2: most runs improve on the starting model, by very different amounts")
    return figure


def real_curves() -> Figure:
    """Score, KL and length of the held-out runs on the way."""
    rows = load("real_model-smollm2-held")["rows"]
    metrics = {
        "objective/scores": "score of the reward model",
        "objective/kl": SHORT_KL,
        "objective/length": "tokens up to the end (of 16)",
    }
    figure, panels = new(1, 3, 3.4)
    for axes, (metric, label) in zip(panels[0], metrics.items(), strict=True):
        for row in rows:
            name = row["arm"].partition(",")[0]
            x = smooth(row["ppo/episode"], 4)
            y = smooth(row[metric], 4)
            axes.plot(
                x,
                y,
                color=ALGORITHMS[name],
                linewidth=2,
                label=name,
            )
        axes.set(xlabel="episodes", ylabel=label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    panels[0, 0].axhline(0, color=REFERENCE, linewidth=0.8)
    panels[0, 1].set_ylim(0, None)
    panels[0, 2].set_ylim(0, 16)
    panels[0, 0].legend(fontsize=10)
    title(figure, "SmolLM2 on reward model 3: score and KL rise, texts get a little shorter")
    return figure


# --- the optimum, scaling, symptoms ---------------------------------------------------------------
def optimum(record: Record | None = None) -> Figure:
    """The share of the way from the reference to the optimum that every run has left."""
    rows = (record or load("optimum-enumerated"))["rows"]
    figure, panels = new(1, 1, 3.4)
    axes = panels[0, 0]
    for name, colour in ALGORITHMS.items():
        runs = [row for row in rows if row["algorithm"] == name.lower()]
        for i, row in enumerate(runs):
            x, y = np.array(row["curve"]).T
            whole = row["j_star"] - row["j_ref"]
            missing = (row["j_star"] - y) / whole
            label = None if i else f"{name}, a line for each of {len(runs)} seeds"
            axes.plot(x, missing, color=colour, linewidth=1.5, label=label)
    axes.set(xlabel="episodes", ylabel="share of the way from\nreference to optimum still missing")
    axes.set_yscale("log")
    axes.set_ylim(0.003, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper right", fontsize=10)
    title(figure, "Both come within 1.5 % of the optimum where it can be computed")
    return figure


SWEEPS = {
    "batch_size": "episodes of an update",
    "query_length": "query tokens",
    "response_length": "response tokens",
    "rloo_k": "K, same number of episodes",
    "model": "parameters",
    "processes": "processes, same batch",
}


def scaling(names: list[str] | None = None, record: Record | None = None) -> Figure:
    """A panel for each sweep: the time of an update as a multiple of its first point."""
    rows = (record or load("scaling-cpu-fp32"))["rows"]
    names = names or list(dict.fromkeys(row["sweep"] for row in rows))
    lines = math.ceil(len(names) / 3)
    figure, panels = new(lines, 3, 3.4 * lines)
    for axes in panels.flat[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(panels.flat, names, strict=False):
        mine = [row for row in rows if row["sweep"] == name]
        for algorithm, colour in ALGORITHMS.items():
            points = [row for row in mine if row["algorithm"] == algorithm.lower()]
            x = [row["x"] for row in points]
            y = [row["ratio"]["total"] for row in points]
            axes.plot(x, y, "o-", color=colour, label=algorithm)
        x = np.array(sorted({row["x"] for row in mine}))
        if name not in ("rloo_k", "processes"):
            axes.plot(
                x,
                x / x[0],
                "--",
                color=OTHER,
                label="in proportion",
            )
        ticks = [f"{value / 1e6:.1f}M" if name == "model" else f"{value:g}" for value in x]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        rotation = 30 if name == "model" else 0
        axes.set_xticks(x, ticks, fontsize=9, rotation=rotation)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(SWEEPS[name])
    panels[0, 0].set_ylabel("time of an update\n(first point = 1)")
    panels[0, 0].legend(fontsize=9)
    title(figure, "The time of an update grows about in proportion to its size")
    return figure


def ill_and_healthy(record: Record, seen: str) -> dict[str, list[float]]:
    """The curves of a symptom; where the ill run is the default, the healthy one is its cure."""
    row = next(row for row in record["rows"] if row["symptom"] == seen)
    curves = row["curves"]
    healthy = curves.get("healthy", curves.get("cured"))
    return {"ill": curves["ill"], "healthy": healthy}


HEALTHY = REFERENCE
ILL = "#CC3311"
SYMPTOMS = {  # as the record names them: title, label of the axis
    "the KL is negative": ("dropout is on: the KL is negative", "objective/kl"),
    "sampled tokens are likelier than the policy's entropy says": (
        "top-k in the sampler only: samples are likelier than the policy says",
        "sampled / mean entropy",
    ),
    "the KL explodes": ("rate 30 times too high: the KL explodes", "objective/kl"),
    "the entropy collapses": (
        "no KL penalty, constant 1e-3: the entropy collapses, the run stops",
        "ppo/policy/entropy",
    ),
    "the reward model is at the best constant answer": (
        "128 labels (16 updates): the reward model only guesses",
        "train/accuracy",
    ),
}


def draw_symptom(axes: Axes, record: Record, seen: str) -> None:
    """The metric of a healthy and of an ill run."""
    heading, label = SYMPTOMS[seen]
    curves = ill_and_healthy(record, seen)
    width = 16 if label == "train/accuracy" else 1
    for name, colour in (("healthy", HEALTHY), ("ill", ILL)):
        values = smooth(curves[name], width)
        marker = "o" if len(values) < 3 else None
        x = np.arange(1, len(values) + 1) * width
        style = {"color": colour, "linewidth": 1.8, "marker": marker}
        axes.plot(x, values, **style, label=f"{name} run")
    axes.set_title(textwrap.fill(heading, 34), fontsize=10)
    axes.set_xlabel("updates")
    axes.set_ylabel(label, fontsize=9)


def symptoms() -> Figure:
    """Five symptoms, each with a healthy run, and the true score beside the proxy."""
    record = load("symptoms")
    figure, panels = new(2, 3, 5.4)
    for axes, seen in zip(panels.flat, SYMPTOMS, strict=False):
        draw_symptom(axes, record, seen)
    panels[0, 1].set_ylim(0, 1.3)
    panels[1, 0].set_ylim(0, None)
    panels[1, 1].axhline(
        0.25,
        color="black",
        linewidth=0.8,
        linestyle=":",
    )
    panels[1, 1].text(
        500,
        0.17,
        "chance",
        ha="right",
        fontsize=9,
    )
    panels[1, 1].set_ylim(0, 0.8)
    last = panels[1, 2]
    rows = load("overoptimisation-tiny")["rows"]
    rows = [row for row in rows if row["algorithm"] == "PPO" and row["labels"] == "512"]
    row = next(row for row in rows if row["seed"] == 3)
    lines = (("proxy", "score", "--"), ("gold", "true score", "-"))
    for kind, name, line in lines:
        y = smooth(row[kind], 5)
        updates = (np.arange(len(y)) + 0.5) * 5
        last.plot(updates, y, line, color=ILL, linewidth=1.8, label=name)
    last.axhline(0, color="black", linewidth=0.8)
    heading = "weak reward model: the score rises, the true score falls"
    last.set_title(textwrap.fill(heading, 34), fontsize=10)
    last.set(xlabel="updates", ylabel="score of the ill run")
    last.legend(fontsize=9)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=10)
    title(figure, "Six faults, and the metric that shows them")
    return figure


# --- what is written ------------------------------------------------------------------------------
def save(figure: Figure, path: Path) -> None:
    """A PNG with a palette, which is a third as large."""
    canvas = io.BytesIO()
    figure.savefig(canvas, dpi=DPI)
    picture = Image.open(canvas).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path)


def both_real_models() -> Figure:
    """All full runs on SmolLM2."""
    names = ("real_model-smollm2", "real_model-smollm2-held")
    return real_model({name: load(name) for name in names}, episodes=2_560)


WEAK_REWARDS = "Weak reward models: some runs collapse without a penalty, and none with it"
WEAK = "The proxy rises on every reward model; the true score does not"
MORE = "Half of the labels at random are as bad as few labels"
PICTURES: dict[str, Callable[[], Figure]] = {
    "readme": readme,
    "embedded-tiny": embedded,
    "details": details,
    "ablations": ablations,
    "ablations-full": full_length,
    "slow-rate": slow_rate,
    "overoptimisation-tiny": functools.partial(overoptimisation, ["128", "512", "4000"], WEAK),
    "overoptimisation-more": functools.partial(
        overoptimisation, ["1024", "2048", "4000:0.5"], MORE
    ),
    "gamble": gamble,
    "weak-rewards": weak_rewards,
    "overoptimisation-frontier": frontier,
    "real_model-smollm2": both_real_models,
    "real_model-smollm2-held": real_curves,
    "optimum": optimum,
    "scaling-cpu-fp32": functools.partial(scaling, ["batch_size", "response_length", "model"]),
    "symptoms": symptoms,
}


def of_record(path: Path) -> Figure:
    """The picture of a record of your own, by the script that made it."""
    record = json.loads(path.read_text())
    kind = path.stem.partition("-")[0]
    if kind == "ablations":
        return forest({path.stem: record})
    if kind == "overoptimisation":
        return overoptimisation(record["args"]["labels"], path.stem, record)
    if kind == "real_model":
        return real_model({path.stem: record})
    if kind == "scaling":
        return scaling(record=record)
    if kind == "optimum" and "curve" in record["rows"][0]:
        return optimum(record)
    raise SystemExit(f"pictures.py: there is no picture of {path}")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    help_of_names = f"default: all of {', '.join(PICTURES)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=help_of_names)
    parser.add_argument("--record", type=Path, help="a record of your own, in place of names")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the pictures")
    args = parser.parse_args()
    if args.record is not None:
        save(of_record(args.record), args.record.with_suffix(".png"))
        return
    for name in args.names or PICTURES:
        if name not in PICTURES:
            raise SystemExit(f"pictures.py: {name} is not one of {', '.join(PICTURES)}")
        path = args.out / f"{name}.png"
        save(PICTURES[name](), path)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
