"""The curves of any runs side by side, also while they run.

    python benchmark/tools/plot.py runs/*
    python benchmark/tools/plot.py runs/mine runs/other --out mine.png
    python benchmark/tools/plot.py runs/* --over seconds

A panel for each of score, KL, entropy, value error and length, and of loss and accuracy of reward
models; panels that none of the runs has are left out. Curves are what metrics.jsonl has, faint, and
means of --window neighbouring updates. --over seconds draws them over the time that the updates
took.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Metrics = list[dict[str, float]]
PANELS = {
    "objective/scores": "score",
    "objective/kl": "KL (nats per response)",
    "policy/entropy": "entropy (nats per token)",
    "val/error": "squared error of values",
    "objective/length": "length (tokens)",
    "train/loss": "loss of the reward model",
    "train/accuracy": "accuracy of the reward model",
}
# Okabe and Ito's colours, which colour-blind people can tell; then the same again, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")


def read_metrics(folder: Path) -> Metrics:
    """The finished lines of a run's metrics.jsonl: the last may be half written."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        if (folder / "lock").exists():  # a run that was refused
            return []
        raise SystemExit(f"plot.py: {folder} is not a run: it has no metrics.jsonl")
    metrics = []
    for number, line in enumerate(file.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            metrics.append(dict(json.loads(line)))
        except ValueError:
            raise SystemExit(f"plot.py: {file}: line {number} is not one of a run") from None
    return metrics


def add_elapsed(metrics: Metrics, folder: Path) -> None:
    """Adds to each row the seconds of all updates up to it."""
    elapsed = 0.0
    for row in metrics:
        if "seconds" not in row:
            raise SystemExit(f"plot.py: {folder} does not say how many seconds its updates took")
        elapsed += row["seconds"]
        row["elapsed"] = elapsed


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and its neighbours, of fewer of them near the ends."""
    reach = max(window, 1) // 2
    means = []
    for i in range(len(values)):
        means.append(np.mean(values[max(i - reach, 0) : i + reach + 1]))
    return np.array(means)


def names_of(folders: list[Path]) -> list[str]:
    """What the legend calls the runs: their folders' names, or paths where two have one name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def steps_of(rows: Metrics, over: str) -> tuple[str, list[float]]:
    """What the rows are drawn over: its name, and its value at each row."""
    if over == "seconds":
        return "seconds of the updates", [row["elapsed"] for row in rows]
    if "episode" in rows[0]:
        return "episodes", [row["episode"] for row in rows]
    return "updates", [*range(1, len(rows) + 1)]


def draw(panel: Axes, metric: str, runs: dict[str, Metrics], window: int, over: str) -> None:
    """A panel: the metric of each run that has it, over its episodes or labels, or over time."""
    xlabels = set()
    for i, (name, metrics) in enumerate(runs.items()):
        rows = [row for row in metrics if metric in row]
        if not rows:
            continue
        xlabel, x = steps_of(rows, over)
        xlabels.add(xlabel)
        y = np.array([row[metric] for row in rows], dtype=float)
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % 4]}
        panel.plot(x, y, alpha=0.25, **style)
        marker = "." if len(rows) == 1 else None
        panel.plot(x, smooth(y, window), label=name, marker=marker, **style)
    panel.set(ylabel=PANELS[metric], xlabel=" or ".join(sorted(xlabels)))
    panel.locator_params(axis="x", nbins=5)
    panel.grid(alpha=0.3)


def plot(runs: dict[str, Metrics], window: int, over: str = "steps") -> Figure:
    """All panels that one of the runs has, and a legend for all of them."""
    logged = {metric for metrics in runs.values() for row in metrics for metric in row}
    shown = [metric for metric in PANELS if metric in logged]
    columns = min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows + 0.3 * len(runs)), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    handles = {}
    for panel, metric in zip(panels, shown, strict=False):
        draw(panel, metric, runs, window, over)
        lines, names = panel.get_legend_handles_labels()
        handles |= dict(zip(names, lines, strict=True))
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    figure.legend(handles.values(), handles.keys(), loc="outside lower center")
    return figure


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add("--out", type=Path, default=Path("runs.png"), help="the picture: .png, .pdf or .svg")
    add("--over", choices=["steps", "seconds"], default="steps", help="what the curves are over")
    add("--window", type=int, default=5, help="updates in a mean")
    args = parser.parse_args()
    runs = {}
    for name, folder in zip(names_of(args.runs), args.runs, strict=True):
        metrics = read_metrics(folder)
        if args.over == "seconds":
            add_elapsed(metrics, folder)
        if metrics:
            runs[name] = metrics
        else:
            sys.stderr.write(f"plot.py: {folder} has made no update yet\n")
    if not runs:
        raise SystemExit("plot.py: there is nothing to draw yet")
    try:
        plot(runs, args.window, args.over).savefig(args.out, dpi=130)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise SystemExit(f"plot.py: --out {args.out}: {error}") from None
    sys.stdout.write(f"{args.out}\n")


if __name__ == "__main__":
    main()
