"""How the time of an update grows: with episodes, lengths, K, the size of the model, and the number of processes.

One size changes, the others stay. Every point is an update of ppo_rlhf.py or rloo_rlhf.py with all queries of the same
length, as a ratio to the first point of its sweep; medians, all points of a sweep in turn. Models are random GPT-2s of
`layers x width`.

Processes share one batch of --batch_size episodes. On a CPU they are joined by gloo and share its cores: each has
--threads threads, or OMP_NUM_THREADS, or cores / processes; more than one needs a machine with nothing else to do. On
GPUs each process has one, joined by nccl. Every measurement starts them anew, and all numbers of processes take turns
in --rounds rounds.

    python benchmark/scaling.py
    python benchmark/scaling.py --sweeps model --points_model 4x128 12x768 --batch_size 16 --num_epochs 1
    python benchmark/scaling.py --sweeps processes --points_processes 1 2 --threads 1
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from typing import Any

import common
import matplotlib
import torch
from ours import Frozen, Ours

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SWEEPS = {  # name: (default points, what it is)
    "batch_size": ([16, 32, 64, 128, 256], "episodes"),
    "query_length": ([16, 32, 64, 128, 256], "query tokens"),
    "response_length": ([12, 24, 48, 96, 192], "response tokens"),
    "rloo_k": ([2, 4, 8, 16], "K, same number of episodes"),
    "model": (["2x64", "4x128", "4x256", "8x256", "8x512"], "parameters"),
    "processes": ([1, 2, 4, 8], "processes, same batch, same machine"),
}
COLOURS = {"ppo": "#1f6fb4", "rloo": "#d9622b"}
SIZES = ("batch_size", "query_length", "response_length", "rloo_k", "model")


class Point:
    """An algorithm at some sizes: `update` does one update."""

    def __init__(self, algorithm: str, sizes: dict[str, Any], folder: str, frozen: dict[str, Frozen]) -> None:
        self.algorithm, device = algorithm, common.device()
        given = {name: x for name, x in sizes.items() if name != "model" and (name != "rloo_k" or algorithm == "rloo")}
        self.run = Ours(algorithm, folder, device, penalty_mode="add", **given)
        if sizes["model"] not in frozen:
            frozen[sizes["model"]] = Frozen(folder, self.run.args, device)
        self.frozen = frozen[sizes["model"]]
        config, rows = self.run.actor.lm.config, sizes["batch_size"] // self.run.copies
        self.parameters = sum(p.numel() for p in self.run.actor.lm.parameters())
        self.contexts = common.random_contexts([sizes["query_length"]] * rows, config.vocab_size, 0)

    def update(self) -> dict[str, float]:
        """Seconds of one update, by phase."""
        return dict(self.run.update(self.contexts, self.frozen).seconds)


def sweep(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one sweep in this process."""
    points, runs, frozen = {}, {}, {}
    for value in getattr(options, "points_" + name):
        sizes = base(options) | {name: value}
        with common.model_folder(sizes["model"]) as folder:
            for algorithm in ("rloo",) if name == "rloo_k" else options.algorithms:
                points[algorithm, value] = Point(algorithm, sizes, folder, frozen)
    for point in points.values():
        point.update()
    for _ in range(options.repeats):
        for key, point in points.items():
            runs.setdefault(key, []).append(point.update())
    xs = {key: point.parameters if name == "model" else key[1] for key, point in points.items()}
    return rows_of(name, runs, xs)


def base(options: argparse.Namespace) -> dict[str, Any]:
    """Sizes that stay unless their sweep is on."""
    names = (*SIZES, "num_epochs", "micro_batch_size", "dtype")
    return {name: getattr(options, name) for name in names}


def rows_of(name: str, runs: dict[tuple[str, Any], list[dict[str, float]]], xs: dict[Any, int]) -> list[dict[str, Any]]:
    """Medians, and ratios to the first point of each algorithm."""
    rows, first = [], {}
    for (algorithm, value), clocks in runs.items():
        seconds = {phase: statistics.median(clock[phase] for clock in clocks) for phase in clocks[0]}
        start = first.setdefault(algorithm, seconds)
        row = {"sweep": name, "algorithm": algorithm, "value": value, "x": xs[algorithm, value], "seconds": seconds}
        row |= {"ratio": {phase: seconds[phase] / start[phase] for phase in seconds}}
        rows.append(row | {"all_seconds": [clock["total"] for clock in clocks]})
    return rows


def allowed_processes(options: argparse.Namespace) -> list[int]:
    """Numbers of processes that divide the batch and that this machine has cores, or GPUs, for."""
    cores, gpus = common.machine()["cores"], torch.cuda.device_count()
    most, what = (gpus, "GPUs") if gpus else (10**9 if options.oversubscribe else cores, "cores")
    allowed = [n for n in options.points_processes if n <= most]
    if len(allowed) < len(options.points_processes):
        left_out = ", ".join(str(n) for n in options.points_processes if n > most)
        sys.stdout.write(f"{left_out} processes: left out, there are {most} {what}\n")
    unit = options.rloo_k if "rloo" in options.algorithms else 1
    return [n for n in allowed if options.batch_size % (n * unit) == 0]


def sweep_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the sweep over processes; torchrun starts them."""
    runs: dict[tuple[str, Any], list[dict[str, float]]] = {}
    counts = allowed_processes(options)
    with common.model_folder(options.model) as folder:
        for _ in range(options.rounds):
            for algorithm in options.algorithms:
                for n in counts:
                    runs.setdefault((algorithm, n), []).extend(launch(algorithm, n, folder, options))
    return rows_of("processes", runs, {key: key[1] for key in runs})


def launch(algorithm: str, n: int, folder: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of the timed updates of n processes."""
    sizes = base(options) | {"batch_size": options.batch_size // n}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n), __file__]
    asked = options.threads or int(os.environ.get("OMP_NUM_THREADS", "0"))
    threads = asked or max(1, common.machine()["cores"] // n)
    given = json.dumps({"algorithm": algorithm, "folder": folder, "sizes": sizes, "repeats": options.repeats})
    done = subprocess.run(
        [sys.executable, *words, "--rank", given],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )
    return json.loads(done.stdout.splitlines()[-1])


def rank(algorithm: str, folder: str, sizes: dict[str, Any], repeats: int) -> None:
    """One of several processes. The first prints the seconds of the slowest."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    point, clocks = Point(algorithm, sizes, folder, {}), []
    together = torch.distributed.is_initialized()
    for _ in range(repeats + 1):
        if together:
            torch.distributed.barrier()
        seconds = point.update()
        slowest = torch.tensor(list(seconds.values()), device=common.device())
        if together:
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        clocks.append(dict(zip(seconds, slowest.tolist(), strict=True)))
    if int(os.environ["RANK"]) == 0:
        sys.stdout.write(json.dumps(clocks[1:]) + "\n")
    sys.stdout.flush()
    if together:
        torch.distributed.destroy_process_group()
        os._exit(0)  # gloo's threads and the destructor of DistributedDataParallel sometimes wait for each other


def draw(rows: list[dict[str, Any]], path: Any) -> None:
    """A panel for each sweep, both axes logarithmic; dashed: proportional to the size, or one over the GPUs."""
    names = list(dict.fromkeys(row["sweep"] for row in rows))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.6 * columns, 3.0 * lines), squeeze=False, dpi=150)
    for axis, name in zip(axes.flat, names, strict=False):
        for algorithm, colour in COLOURS.items():
            mine = [row for row in rows if row["sweep"] == name and row["algorithm"] == algorithm]
            x, y = [row["x"] for row in mine], [row["ratio"]["total"] for row in mine]
            axis.plot(x, y, "o-", color=colour, label=algorithm.upper(), markersize=4)
        some = sorted({(row["x"], str(row["value"])) for row in rows if row["sweep"] == name})
        x = [x for x, _ in some]
        power = {"processes": -1 if torch.cuda.is_available() else 0, "rloo_k": 0}.get(name, 1)
        axis.plot(x, [(each / x[0]) ** power for each in x], "--", color="#999999", linewidth=1, zorder=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ratios = [row["ratio"]["total"] for row in rows if row["sweep"] == name] + [(x[-1] / x[0]) ** power]
        axis.set_ylim(0.93 * 2 ** math.floor(math.log2(min(ratios))), 1.07 * 2 ** math.ceil(math.log2(max(ratios))))
        axis.set_xticks(x, [millions(each) if name == "model" else value for each, value in some])
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axis.minorticks_off()
        axis.set_xlabel(SWEEPS[name][1])
        axis.grid(color="#eeeeee")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("time of an update")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def millions(parameters: int) -> str:
    """1.2M."""
    return f"{parameters / 1e6:.1f}M" if parameters < 1e7 else f"{parameters / 1e6:.0f}M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=None, help="name of the record (default: device and dtype)")
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=SWEEPS)
    parser.add_argument("--algorithms", nargs="+", default=list(COLOURS), choices=COLOURS)
    for name, (points, what) in SWEEPS.items():
        kind = type(points[0])
        parser.add_argument(
            f"--points_{name}", nargs="+", type=kind, default=points, help=f"points of the sweep: {what}"
        )
    parser.add_argument("--batch_size", type=int, default=64, help="episodes per update; so much for sizes that stay")
    parser.add_argument("--query_length", type=int, default=64)
    parser.add_argument("--response_length", type=int, default=24)
    parser.add_argument("--rloo_k", type=int, default=4)
    parser.add_argument("--model", default="4x128", help="layers x width")
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--micro_batch_size", type=int, default=64)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of each point")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each number of processes")
    parser.add_argument("--threads", type=int, default=None, help="threads of each process")
    parser.add_argument("--oversubscribe", action="store_true", help="more processes than cores")
    parser.add_argument("--rank", type=json.loads, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    given = vars(options).pop("rank")
    if given is not None:
        rank(**given)
        return
    options.tag = options.tag or f"{common.device().type}-{options.dtype}"
    rows = []
    for name in options.sweeps:
        rows += sweep_processes(options) if name == "processes" else sweep(name, options)
    table = []
    for row in rows:
        cells = [f"{row['ratio'][phase]:.2f}" for phase in ("total", "sample", "score", "optimise")]
        table.append([row["sweep"], row["value"], row["algorithm"], f"{row['seconds']['total']:.3f}", *cells])
    path = common.write("scaling", options.tag, options, rows)
    draw(rows, path.with_suffix(".png"))
    common.show(["sweep", "", "algorithm", "seconds", "ratio", "sample", "score", "optimise"], table, path.name)


if __name__ == "__main__":
    main()
