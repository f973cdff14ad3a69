"""Rows and pictures of this study: `python benchmark/report.py overoptimisation`."""

import functools
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmark import report
from benchmark.report import ALGORITHMS, BEST_OF_N, OTHER, START, TRUE_SCORE, Record, Row, smooth

BOUNDS = {0.3: "below 0.3", 0.45: "0.3 to 0.45", 1.0: "above 0.45"}  # of accuracies
COLLAPSED = -0.5
# Labels, algorithm, KL coefficient and seed of the runs whose responses are shown.
SHOWN = (("128", "PPO", 0.0, 3), ("4000:0.5", "RLOO", 0.0, 2))
SHOWN += (("512", "PPO", 0.0, 1), ("512", "PPO", 0.15, 1))
PENALTIES = {0.0: "no KL penalty", 0.15: "default KL penalty"}
SEEDS = {1: "-", 2: "--", 3: ":"}  # lines of runs that differ by their seed
SHADES = {0.0: "#E69F00", 0.05: "#56B4E9", 0.15: "#009E73", 0.5: "#CC79A7"}  # of coefficients


# --- tables ---------------------------------------------------------------------------------------
def labels_of(labels: str) -> str:
    """How many labels a reward model has, and how many of them are random."""
    size, _, noise = labels.partition(":")
    return f"{int(size):,}, {float(noise):.0%} random" if noise else f"{int(size):,}"


def fits(record: Record) -> list[Row]:
    """Runs without a penalty as means over seeds, by their labels; best of n after the policies."""
    rows = [row | {"name": labels_of(row["labels"])} for row in record["table"]]
    return sorted(rows, key=lambda row: (int(row["labels"].split(":")[0]), row["name"]))


def penalty(record: Record) -> list[Row]:
    """Runs of a kind, in the order of their seeds."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in sorted(record["rows"], key=lambda row: row["seed"]):
        groups.setdefault((row["labels"], row["algorithm"], row["kl_coef"]), []).append(row)
    rows = []
    for (labels, algorithm, coef), runs in sorted(groups.items()):
        row = {"name": labels_of(labels), "algorithm": algorithm}
        row["penalty"] = "the default's" if coef else "none"
        row["accuracy"] = [run["accuracy"] for run in runs]
        row["start"] = [run["start"]["reward"] for run in runs]
        row |= {kind: [run["end"][kind] for run in runs] for kind in runs[0]["end"]}
        rows.append(row)
    return rows


def gamble(*records: Record) -> list[Row]:
    """How runs end, by the accuracy of their reward models, with and without a penalty."""
    found: dict[tuple[bool, float], list[float]] = {}
    for row in [row for record in records for row in record["rows"]]:
        bound = next(bound for bound in BOUNDS if row["accuracy"] < bound)
        found.setdefault((row["kl_coef"] > 0, bound), []).append(row["end"]["true_score"])
    rows = []
    for (has_penalty, bound), scores in sorted(found.items()):
        low = sum(score < COLLAPSED for score in scores)
        high = sum(score > -COLLAPSED for score in scores)
        row = {"bound": BOUNDS[bound], "penalty": "default" if has_penalty else "none"}
        counts = {
            "runs": len(scores),
            "low": low,
            "high": high,
            "between": len(scores) - low - high,
        }
        rows.append(row | counts)
    return rows


def collapse(record: Record) -> list[Row]:
    """The first response of the last update of runs that collapsed, and of others."""
    of_run = {}
    for row in record["rows"]:
        text = " ".join(row["samples"][0]["response"].split())
        penalty = "penalty" if row["kl_coef"] else "no penalty"
        key = (row["labels"], row["algorithm"], row["kl_coef"], row["seed"])
        of_run[key] = row | {"penalty": penalty, "response": text}
    return [of_run[key] for key in SHOWN]


def frontier(*records: Record) -> list[Row]:
    """Groups of runs with their rate: best of n last, then by coefficient."""
    rows = []
    for record in records:
        rate = record["args"].get("lr")
        for row in record["table"]:
            levels = [value for name, value in row.items() if name.startswith("true_score_at_")]
            more = {"rate": f", `--lr {rate}`" if rate else "", "levels": levels}
            rows.append(row | more)
    rows.sort(key=lambda row: (row["algorithm"], not row["rate"], row["kl_coef"] or 0.0))
    return sorted(rows, key=lambda row: row["algorithm"] == "best of n")


# --- pictures -------------------------------------------------------------------------------------
def heading(labels: str, record: Record) -> str:
    """Of a column: the labels of its reward models, and their accuracy."""
    size, comma, random = labels_of(labels).partition(", ")
    accuracy = next(row["accuracy"] for row in record["table"] if row["labels"] == labels)
    return f"{size} labels{comma}{random}\n(accuracy {accuracy:.2f})"


def over_root_kl(record: Record, sources: list[str], title: str) -> Figure:
    """True score above and reward below, a column for each kind of reward model, a line for each
    run."""
    figure, panels = report.new(
        title,
        2,
        len(sources),
        5,
        sharex=True,
        sharey="row",
    )
    for column, labels in zip(panels.T, sources, strict=True):
        for axes, kind in zip(column, ("true_score", "reward"), strict=True):
            report.line_at(axes, 0)
            for row in [*record["rows"], *record["best_of_n"]]:
                if row["labels"] == labels:
                    name = row.get("algorithm", "best of n")
                    width = 5 if "algorithm" in row else 1
                    x = np.sqrt(smooth(row["kl"], width).clip(min=0))
                    style = {"color": ALGORITHMS.get(name, BEST_OF_N), "linewidth": 1.4}
                    label = f"{name}, a line for each of 3 seeds"
                    axes.plot(x, smooth(row[kind], width), **style, label=label)
        column[0].set_title(heading(labels, record))
        nats = (0, 4, 16, 36, 64, 100, 144)
        column[1].set_xticks([value**0.5 for value in nats], nats)
    panels[1, len(sources) // 2].set_xlabel(f"{report.KL}, on a square-root scale")
    panels[0, 0].set_ylabel(TRUE_SCORE)
    panels[1, 0].set_ylabel("reward (reward model)")
    report.legend_below(figure, panels[0, 0], 3)
    return figure


def of_record(record: Record) -> Figure:
    """A record of your own."""
    return over_root_kl(record, record["args"]["labels"], "True score and reward")


def draw_run(axes: Any, row: Row, episodes: int) -> None:
    """The true score of a run; what falls below 0 has the way of its reward beside it."""
    scores = smooth(row["true_score"], 5)
    x = (np.arange(len(scores)) + 0.5) * episodes / len(scores)
    colour = ALGORITHMS[row["algorithm"]]
    width = 2.6 if scores[-1] < 0 else 1.5
    axes.plot(
        x,
        scores,
        SEEDS[row["seed"]],
        color=colour,
        linewidth=width,
    )
    if scores[-1] < 0:
        reward = smooth(row["reward"], 5)
        text = f"reward {reward[0]:.1f} \N{RIGHTWARDS ARROW} {reward[-1]:.1f}"
        place = {
            "xytext": (-2, 12),
            "textcoords": "offset points",
            "ha": "right",
            "fontsize": 9,
        }
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(
            text,
            (x[-1], scores[-1]),
            **place,
            color=colour,
        )


def with_penalty(record: Record) -> Figure:
    """True score over the episodes against weak reward models: without a KL penalty above, with one
    below."""
    sources = record["args"]["labels"]
    text = "Weak reward models: some runs collapse without a penalty, and none with it"
    figure, panels = report.new(
        text,
        2,
        len(sources),
        5.2,
        sharex=True,
        sharey=True,
    )
    for line, (coef, words) in zip(panels, PENALTIES.items(), strict=True):
        for axes, labels in zip(line, sources, strict=True):
            report.line_at(axes, 0)
            for row in record["rows"]:
                if row["labels"] == labels and row["kl_coef"] == coef:
                    draw_run(axes, row, record["args"]["episodes"])
        line[0].set_ylabel(f"{words}:\n{TRUE_SCORE}")
    for column, labels in zip(panels.T, sources, strict=True):
        column[0].set_title(heading(labels, record))
        report.label(column[1], "episodes", ylim=(-1, 1))
    report.name_colours(panels[0, 0], ALGORITHMS, "-")
    for seed, style in SEEDS.items():
        panels[0, 0].plot([], [], style, color="black", linewidth=1.5, label=f"seed {seed}")
    report.legend_below(figure, panels[0, 0], 5)
    return figure


def over_accuracy(*records: Record) -> Figure:
    """The true score at the end of every run over the accuracy of its reward model: without a KL
    penalty, of both series, and with the default's."""
    text = "Without a KL penalty, a reward model near chance makes training a gamble"
    figure, panels = report.new(text, 1, 1, 4)
    axes = panels[0, 0]
    report.line_at(axes, 0)
    rows = [row for record in records for row in record["rows"]]
    marks = {"no KL penalty": "o", "default penalty": "^"}
    hollow = {"markerfacecolor": "white", "markeredgewidth": 1.6}
    for name, mark in marks.items():
        shown = [row for row in rows if (row["kl_coef"] > 0) == (mark == "^")]
        style = hollow if mark == "^" else {}
        for row in shown:
            colour = ALGORITHMS[row["algorithm"]]
            point = (row["accuracy"], row["end"]["true_score"], mark)
            axes.plot(*point, color=colour, markersize=7, alpha=0.6, **style)
        report.name_colours(axes, {f"{name} ({len(shown)} runs)": START}, mark, **style)
    chance = records[0]["reward_models"][0]["constant"]
    axes.axvline(chance, color=OTHER, linestyle="--", linewidth=1)
    place = {
        "xytext": (5, 0),
        "textcoords": "offset points",
        "color": START,
        "fontsize": 9,
    }
    axes.annotate("always the same answer", (chance, -0.35), **place)
    report.name_colours(axes, ALGORITHMS, "s")
    limits = {"ylim": (-1, 1.05), "legend": "lower right"}
    x = "accuracy of the reward model on held-out labels (best of four)"
    report.label(axes, x, f"{TRUE_SCORE} at the end", **limits)
    return figure


def coefficients(fixed: Record, slow: Record, free: Record) -> Figure:
    """True score over the KL and over the episodes, for coefficients of the KL penalty and a lower
    rate; a row for each algorithm."""
    groups: dict[tuple[str, Any, str], list[Row]] = {}
    for record in (fixed, slow):
        for row in record["rows"]:
            key = (
                row["algorithm"],
                row["kl_coef"],
                record["args"].get("lr", "2e-4"),
            )
            groups.setdefault(key, []).append(row)
    text = "At the same KL, a penalty and a lower learning rate score higher"
    figure, panels = report.new(
        text,
        2,
        2,
        6,
        sharex="col",
        sharey=True,
    )
    lines = dict(zip(ALGORITHMS, panels, strict=True))
    for (algorithm, coef, rate), rows in groups.items():
        style = {"color": SHADES[coef], "label": f"KL coefficient {coef:g}"}
        if rate != "2e-4":
            style |= {"linestyle": "--", "label": f"{style['label']}, --lr {rate}"}
        curves = [{kind: smooth(row[kind], 2) for kind in ("kl", "true_score")} for row in rows]
        lines[algorithm][0].plot(*report.first_passages(curves), **style)
        scores = np.mean([smooth(row["true_score"], 5) for row in rows], 0)
        lines[algorithm][1].plot((np.arange(len(scores)) + 0.5) * 5 * 64, scores, **style)
    best = report.best_of_n(free)
    for algorithm, (by_kl, _) in lines.items():
        by_kl.plot(*best, color=BEST_OF_N, linestyle=":", label="best of n")
        limits = {"xlim": (0, 16), "ylim": (0, 1)}
        report.label(by_kl, y=f"{algorithm}: {TRUE_SCORE}", **limits)
    panels[1, 0].set_xlabel(report.KL)
    report.label(panels[1, 1], "episodes")
    report.legend_below(figure, panels[0, 0], 3)
    return figure


WEAK = "The reward rises on every reward model; the true score does not"
MORE = "Half of the labels at random are as bad as few labels"
curves = functools.partial(over_root_kl, sources=["128", "512", "4000"], title=WEAK)
more_curves = functools.partial(over_root_kl, sources=["1024", "2048", "4000:0.5"], title=MORE)
PICTURES = {
    "curves.png": (curves, "tiny.json"),
    "more.png": (more_curves, "tiny.json"),
    "penalty.png": (with_penalty, "penalty.json"),
    "gamble.png": (over_accuracy, "tiny.json", "penalty.json"),
    "frontier.png": (coefficients, "frontier.json", "slow.json", "tiny.json"),
}
