"""Writes the tables and draws the pictures of the measurements, from the records beside them.

    python benchmark/report.py                    # all of them
    python benchmark/report.py overoptimisation   # those of one folder
    python benchmark/report.py --check            # exit 1 if one is not that of its records
    python benchmark/report.py --record benchmark/studies/choices/mine.json   # draws your own

Prose is in the pages, and numbers are in records. A marker on a page says where its numbers come
from. This one makes a row of each row of `table` in full.json, by Python's format:

    <!-- table full.json table: {choice} | {true_score:.2f} | {kl:.1f} -->
    | choice | true score | KL |
    | --- | --- | --- |
    <!-- /table -->

Where report.py beside the first record has a function of that name, the rows are what it makes of
the records. `<!-- table studies/choices pairs -->` copies a table from that folder's page, and
a number at its end says how many rows. A number in prose stands in a marker, too. `>` goes into a
record: into a field, or to the items of a list that have this value in one of their fields.

    <!-- full.json: table > default > kl .1f -->5.8<!-- / -->
    <!-- set-{61..72}.json: penalties > PPO > sets d -->12<!-- / -->
    <!-- runs.json: gains > PPO {mean:+.2f} ± {width:.2f} -->+0.70 ± 0.05<!-- / -->

The last one is of several fields, with the words between them, as in the cells of a table.
PICTURES in a folder's report.py has the function and the records of each picture. A PNG keeps the
digest of its records.
"""

import argparse
import functools
import hashlib
import importlib
import io
import json
import os
import re
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from benchmark import differences

BENCHMARK = Path(__file__).resolve().parent
TABLE = re.compile(
    r"(<!-- table ([^:\n]*) (\w+):([^\n]*) -->\n(?:\|[^\n]*\n){2}).*?(<!-- /table -->)", re.S
)
COPY = re.compile(r"(<!-- table (\S+) (\w+) ?(\d*) -->\n).*?(<!-- /table -->)", re.S)
NUMBER = re.compile(r"(<!-- (\S+\.json): ([^\n{]*?) (\{[^\n]*?|\S+) -->)[^\n]*?(<!-- / -->)")
# PPO, RLOO, the starting model, best of n and a critic that starts as the reward model have the
# same colours everywhere.
PPO = "#0072B2"
RLOO = "#D55E00"
CRITIC = "#009E73"
START = "#777777"
BEST_OF_N = "black"
OTHER = "#AAAAAA"
ALGORITHMS = {"PPO": PPO, "RLOO": RLOO}
CHOICES = {"default": PPO, "RLOO, K 4": RLOO, "critic from the reward model": CRITIC}
NAMES = {"default": "PPO", "RLOO, K 4": "RLOO"}
TRUE_SCORE = "true score (VADER)"
KL = "KL to the starting model (nats per response)"
SHORT_KL = "KL (nats per response)"  # where three panels share the width
matplotlib.rcParams |= {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "grid.alpha": 0.25,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}
Record = dict[str, Any]
Row = dict[str, Any]


# --- records and numbers --------------------------------------------------------------------------
def load(path: Path) -> Record:
    """A record."""
    return json.loads(path.read_text())


def module_of(folder: Path) -> ModuleType | None:
    """The report.py of a folder, if it has one."""
    if folder == BENCHMARK or not (folder / "report.py").exists():
        return None
    name = ".".join(folder.relative_to(BENCHMARK.parent).parts)
    return importlib.import_module(f"{name}.report")


@functools.cache  # the markers of a page ask for the same parts
def part_of(part: str, paths: tuple[Path, ...]) -> Any:
    """What the function of this name makes of the records, or the field of this name in them. Rows
    of measurements have the arguments of their record."""
    records = [load(path) for path in paths]
    for record in records:
        record["rows"] = [row | {"args": record["args"]} for row in record["rows"]]
    module = module_of(paths[0].resolve().parent)
    if hasattr(module, part):
        return getattr(module, part)(*records)
    return sum([record[part] for record in records], [])


def group(rows: list[Row], *names: str) -> dict[Any, list[Row]]:
    """Rows by their values of these fields."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def short(rate: float) -> str:
    """A learning rate as one types it: 2e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


def look_up(value: Any, path: str) -> Any:
    """What the words of a path, between `>`, lead to."""
    for word in path.split(" > "):
        if isinstance(value, dict):
            value = value[word]
        elif isinstance(value[0], dict):
            found = [item for item in value if word in map(str, item.values())]
            value = found[0] if len(found) == 1 else found
        else:
            value = value[int(word)]
    return value


class Words(string.Formatter):
    """str.format for prose: a list is its items, and 0 has no sign."""

    def format_field(self, value: Any, spec: str) -> str:
        """A value as text."""
        if isinstance(value, list):
            return ", ".join(self.format_field(x, spec) for x in value) or "-"
        if value is None:
            return "-"
        text = format(value, spec)
        is_zero = re.fullmatch(r"[+-][0.]+%?", text)
        return text.lstrip("+-") if is_zero else text


class Cells(Words):
    """The same for cells of a table, where a dash stands for what is missing."""

    def get_field(self, name: str, args: Any, values: Any) -> tuple[Any, str]:
        """The value of a field, or None."""
        try:
            return super().get_field(name, args, values)
        except (KeyError, TypeError):
            return None, name


def row_text(cells: str, row: Row) -> str:
    """A row of a table in Markdown."""
    parts = []
    for cell in cells.split("|"):
        text = Cells().vformat(cell, (), row).strip()
        for missing in (" ± -", " (-)", " (- to -)"):
            text = text.replace(missing, "")
        parts.append(text.replace("|", "/"))
    return f"| {' | '.join(parts)} |".replace("|  |", "| |")


# --- pages ----------------------------------------------------------------------------------------
def origin(paths: tuple[Path, ...], folder: Path) -> str:
    """Which version of the scripts made the records, and on which machine."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        record = load(path)
        machine = record["machine"]
        plural = "s" if machine["threads"] > 1 else ""
        where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{plural}"
        changed = " with changes" if record["scripts_changed_since"] else ""
        version = f"{record['version']} at {record['commit'][:7]}{changed}"
        link = f"[{path.stem}]({os.path.relpath(path, folder)})"
        groups.setdefault(f"{version} ({where})", []).append(link)
    made = [f"{where}: {', '.join(links)}" for where, links in groups.items()]
    return f"Measured: {'; '.join(made)}."


def expand(names: str) -> Iterator[str]:
    """The names in words like those of a shell: a/{b,c}.json is a/b.json and a/c.json, and {1..3}
    is {1,2,3}."""
    for name in names.split():
        head, _, rest = name.partition("{")
        words, _, tail = rest.partition("}")
        parts = words.split(",")
        bounds = re.fullmatch(r"(\d+)\.\.(\d+)", words)
        if bounds:
            parts = range(int(bounds[1]), int(bounds[2]) + 1)
        yield from [f"{head}{part}{tail}" for part in parts]


def table(found: re.Match, folder: Path) -> str:
    """A table with its markers, made anew."""
    head, names, part, cells, end = found.groups()
    paths = tuple(folder / name for name in expand(names))
    text = "\n".join(row_text(cells, row) for row in part_of(part, paths))
    return f"{head}{text}\n\n{origin(paths, folder)}\n{end}"


def copied(found: re.Match, folder: Path) -> str:
    """A table of another page, or its first rows, with a link to that page's folder."""
    head, name, part, count, end = found.groups()
    page = (folder / name / "README.md").read_text()
    of_part = {there[3]: there[0] for there in TABLE.finditer(page)}
    lines = of_part[part].partition("\n\n")[0].splitlines()[1:]
    rows = lines[: int(count) + 2] if count else lines
    return head + "\n".join(rows) + f"\n\nFrom [{Path(name).name}]({name}).\n{end}"


def number(found: re.Match, folder: Path) -> str:
    """A number, or several fields with words between them, with its markers, made anew."""
    head, name, path, spec, end = found.groups()
    part, _, rest = path.partition(" > ")
    paths = tuple(folder / each for each in expand(name))
    value = part_of(part, paths)
    if rest:
        value = look_up(value, rest)
    if spec.startswith("{"):
        return head + Words().vformat(spec, (), value) + end
    return head + Words().format_field(value, spec) + end


def written(page: Path, text: str | None = None) -> str:
    """The text of a page, with its tables and numbers made anew."""
    part_of.cache_clear()  # records may have changed since another page was made
    text = page.read_text() if text is None else text
    makers = {TABLE: table, COPY: copied, NUMBER: number}
    num_closed = sum(len(pattern.findall(text)) for pattern in makers)
    if num_closed != len(re.findall(r"<!-- table |<!-- \S+\.json: ", text)):
        raise SystemExit(f"report.py: {page} has a marker that is not closed")
    for pattern, make in makers.items():
        text = pattern.sub(lambda found, make=make: make(found, page.parent), text)
    return text


# --- what pictures share --------------------------------------------------------------------------
def runs_of(record: Record, choice: str) -> list[Row]:
    """The runs of a choice that have ended."""
    rows = record["rows"]
    return [row for row in rows if row["choice"] == choice and "fine_curve" in row]


def pairs_of(
    choice: str, base: str, record: Record, other: Record | None = None
) -> list[tuple[Row, Row]]:
    """The runs of a choice that have ended, each beside the base's run of its seed, in the same
    record or in another."""
    of_seed = {run["seed"]: run for run in runs_of(other or record, base)}
    return [(run, of_seed[run["seed"]]) for run in runs_of(record, choice)]


def over_episodes(
    record: Record, choice: str, kind: str, curve: str = "fine_curve"
) -> tuple[np.ndarray, np.ndarray]:
    """Episodes at the middle of each point of the curves, and their values, (seeds, points)."""
    values = np.array([row[curve][kind] for row in runs_of(record, choice)])
    points = values.shape[1]
    return (np.arange(points) + 0.5) * record["args"]["episodes"] / points, values


def first_passages(curves: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Levels of KL that all curves pass, and the mean true score where they first do."""
    first = max(curve["kl"][0] for curve in curves)
    last = min(max(curve["kl"]) for curve in curves)
    levels = np.linspace(first, last, 40)
    return levels, np.mean([differences.at_levels(curve, levels) for curve in curves], 0)


def best_of_n(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """KL and mean true score of best of n, for n = 1, 2, 4, .. 128, as the reward model chooses; of
    the record of the default run."""
    rows = record["best_of_n"]
    return np.array(rows[0]["kl"]), np.mean([row["true_score"] for row in rows], 0)


def new(title: str, rows: int, columns: int, height: float, **more: Any) -> tuple[Figure, Any]:
    """A figure as wide as a page, and its panels, (rows, columns). The title says in a sentence
    what it shows."""
    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **more)
    figure.suptitle(title)
    return figure, panels


def label(axes: Axes, x: str = "", y: str = "", legend: str = "", **more: Any) -> None:
    """Names what a panel is over and what it shows, and places its legend."""
    axes.set(xlabel=x, ylabel=y, **more)
    if x.startswith("episodes"):
        axes.xaxis.set_major_formatter("{x:,.0f}")
    if legend:
        axes.legend(loc=legend)


def line_at(axes: Axes, y: float, name: str = "", style: str = "-", colour: str = "black") -> None:
    """A horizontal line, which the legend has if it has a name."""
    axes.axhline(y, color=colour, linestyle=style, linewidth=1, label=name or None)


def note(axes: Axes, text: str, point: Any, shift: tuple[int, int], colour: str) -> Any:
    """Words beside a point, so many points of type away from it."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    place = {"xytext": shift, "textcoords": "offset points", "fontsize": 9}
    return axes.annotate(text, point, **place, color=colour, bbox=box)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """A legend of the figure, with each name of a panel's lines once."""
    handles, names = axes.get_legend_handles_labels()
    shown = dict(zip(names, handles, strict=True))
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside lower center",
        ncols=columns,
    )


def name_colours(axes: Axes, colours: dict[str, str], style: str = "o-", **more: Any) -> None:
    """Adds names of colours to a panel's legend."""
    for name, colour in colours.items():
        axes.plot([], [], style, color=colour, label=name, **more)


# --- pictures -------------------------------------------------------------------------------------
def pictures(folder: Path) -> Iterator[tuple[Path, Callable[..., Figure], list[Path]]]:
    """The pictures of a folder: where each is, the function that draws it, and its records."""
    beside = page_of(folder).parent
    for name, (draw, *records) in getattr(module_of(folder), "PICTURES", {}).items():
        yield beside / name, draw, [(folder / record).resolve() for record in records]


def digest(paths: list[Path]) -> str:
    """What tells these records from others."""
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:16]


def save(figure: Figure, path: Path, records: str = "") -> None:
    """A PNG with a palette, which is a third as large."""
    canvas = io.BytesIO()
    figure.savefig(canvas, dpi=130)
    picture = Image.open(canvas).convert("RGB")
    info = PngImagePlugin.PngInfo()
    info.add_text("records", records)
    picture.quantize(128, dither=Image.Dither.NONE).save(path, pnginfo=info)


# --- the command ----------------------------------------------------------------------------------
def folders() -> list[Path]:
    """Those that have a page of measurements; last the page that copies tables of others."""
    rooms = [path.parent for path in sorted(BENCHMARK.glob("studies/*/report.py"))]
    finished = [room for room in rooms if page_of(room).exists()]
    return [*finished, BENCHMARK / "speed", BENCHMARK]


def page_of(folder: Path) -> Path:
    """The page of a folder: its README.md, or one in docs/."""
    in_docs = BENCHMARK.parent / "docs" / f"{folder.name}.md"
    page = folder / "README.md"
    return page if page.exists() else in_docs


def outdated(folder: Path) -> list[Path]:
    """The page and the pictures of a folder that are not those of their records."""
    page = page_of(folder)
    found = [page] if written(page) != page.read_text() else []
    for path, _, records in pictures(folder):
        if not path.exists() or Image.open(path).info.get("records") != digest(records):
            found.append(path)
    return found


def renew(folder: Path) -> None:
    """Writes the page and the pictures of a folder."""
    page = page_of(folder)
    page.write_text(written(page))
    for path, draw, records in pictures(folder):
        save(draw(*map(load, records)), path, digest(records))
        sys.stdout.write(f"{path}\n")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    known = {folder.name: folder for folder in folders()}
    help_of_names = f"folders (default: all of {', '.join(known)})"
    parser.add_argument("names", nargs="*", metavar="NAME", help=help_of_names)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    parser.add_argument("--record", type=Path, help="a record of your own, in a study's folder")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        raise SystemExit(f"report.py: {', '.join(unknown)}: {help_of_names}")
    chosen = [known[name] for name in args.names or known]
    if args.record is not None:
        draw = getattr(module_of(args.record.resolve().parent), "of_record", None)
        if draw is None:
            raise SystemExit(f"report.py: there is no picture of {args.record}")
        save(draw(load(args.record)), args.record.with_suffix(".png"))
    elif args.check:
        found = [str(path) for folder in chosen for path in outdated(folder)]
        if found:
            raise SystemExit(f"out of date, run benchmark/report.py: {', '.join(found)}")
    else:
        for folder in chosen:
            renew(folder)


if __name__ == "__main__":
    main()
