"""How the time of an update grows: with episodes, lengths, K, the size of the model, and the number
of processes.

One size changes, the others stay. Every point is an update of ppo_rlhf.py or rloo_rlhf.py with all
queries of the same length, as a ratio to the first point of its sweep; the least seconds of each
phase count, beside the median and the range, after an update that warms up; all points of a sweep
in turn. Models are random GPT-2s of `layers x width`.

Processes share one batch of --batch_size episodes. On a CPU they are joined by gloo and share its
cores: each has --threads threads, or OMP_NUM_THREADS, or cores / processes; more than one needs a
machine with nothing else to do. On GPUs each process has one, joined by nccl. Every measurement
starts them anew, and all numbers of processes take turns in --rounds rounds.

    python benchmark/speed/scaling.py
    python benchmark/speed/scaling.py --sweeps model --points_model 4x128 12x768 --batch_size 16
    python benchmark/speed/scaling.py --sweeps processes --points_processes 1 2 --threads 1
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmark import common
from benchmark.ours import Frozen, Ours

SWEEPS = {  # name: (default points, what it is)
    "batch_size": ([16, 32, 64, 128, 256], "episodes"),
    "query_length": ([16, 32, 64, 128, 256], "query tokens"),
    "response_length": ([12, 24, 48, 96, 192], "response tokens"),
    "rloo_k": ([2, 4, 8, 16], "K, same number of episodes"),
    "model": (["2x64", "4x128", "4x256", "8x256", "8x512"], "parameters"),
    "processes": ([1, 2, 4, 8], "processes, same batch, same machine"),
}
ALGORITHMS = ("ppo", "rloo")
SIZES = ("batch_size", "query_length", "response_length", "rloo_k", "model")
SIZES += ("num_epochs", "micro_batch_size", "dtype")
PHASES = ("total", "sample", "score", "optimise")
Key = tuple[str, Any]  # an algorithm and the value of the size that changes
Runs = dict[Key, list[dict[str, float]]]


# --- in one process -------------------------------------------------------------------------------
class Point:
    """An algorithm at some sizes: `update` does one update."""

    def __init__(
        self, algorithm: str, sizes: dict[str, Any], folder: str, frozen: dict[str, Frozen]
    ) -> None:
        given = dict(sizes)
        model = given.pop("model")
        if algorithm == "ppo":
            del given["rloo_k"]
        self.run = Ours(algorithm, folder, penalty_mode="add", **given)
        if model not in frozen:
            frozen[model] = Frozen(folder, self.run.args)
        self.frozen = frozen[model]
        lm = self.run.actor.lm
        self.parameters = sum(p.numel() for p in lm.parameters())
        lengths = [sizes["query_length"]] * (sizes["batch_size"] // self.run.k)
        self.contexts = common.random_contexts(lengths, lm.config.vocab_size, 0)

    def update(self) -> dict[str, float]:
        """Seconds of one update, by phase."""
        return dict(self.run.update(self.contexts, self.frozen).seconds)


def base(options: argparse.Namespace) -> dict[str, Any]:
    """Sizes that stay unless their sweep is on."""
    return {name: getattr(options, name) for name in SIZES}


def sweep(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one sweep in this process."""
    algorithms = options.algorithms
    if name == "rloo_k":
        algorithms = ["rloo"]
    points = {}
    frozen = {}
    for value in getattr(options, f"points_{name}"):
        sizes = base(options) | {name: value}
        with common.model_folder(sizes["model"]) as folder:
            for algorithm in algorithms:
                points[algorithm, value] = Point(algorithm, sizes, folder, frozen)
    runs = {key: [] for key in points}
    for turn in range(options.repeats + 1):
        for key, point in points.items():
            seconds = point.update()
            if turn > 0:
                runs[key].append(seconds)
    xs = {key: key[1] for key in points}
    if name == "model":
        xs = {key: point.parameters for key, point in points.items()}
    return rows_of(name, runs, xs)


def rows_of(name: str, runs: Runs, xs: dict[Key, int]) -> list[dict[str, Any]]:
    """The least seconds, and ratios to the first point of each algorithm."""
    rows = []
    first = {}
    for key, clocks in runs.items():
        algorithm, value = key
        totals = [clock["total"] for clock in clocks]
        seconds = {phase: min(clock[phase] for clock in clocks) for phase in PHASES}
        start = first.setdefault(algorithm, seconds)
        row = {
            "sweep": name,
            "algorithm": algorithm,
            "value": value,
            "x": xs[key],
            "seconds": seconds,
            "ratio": {phase: seconds[phase] / start[phase] for phase in PHASES},
            "median_seconds": statistics.median(totals),
            "all_seconds": totals,
        }
        rows.append(row)
    return rows


# --- in several -----------------------------------------------------------------------------------
def allowed_processes(options: argparse.Namespace) -> list[int]:
    """Numbers of processes that divide the batch and that this machine has cores, or GPUs, for."""
    most = common.machine()["cores"]
    what = "cores"
    if torch.cuda.is_available():
        most = torch.cuda.device_count()
        what = "GPUs"
    elif options.oversubscribe:
        most = math.inf
    allowed = [n for n in options.points_processes if n <= most]
    left_out = [str(n) for n in options.points_processes if n > most]
    if left_out:
        names = ", ".join(left_out)
        sys.stdout.write(f"{names} processes: left out, there are {most} {what}\n")
    unit = options.rloo_k if "rloo" in options.algorithms else 1
    return [n for n in allowed if options.batch_size % (n * unit) == 0]


def sweep_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the sweep over processes; torchrun starts them."""
    counts = allowed_processes(options)
    runs = {(algorithm, n): [] for algorithm in options.algorithms for n in counts}
    with common.model_folder(options.model) as folder:
        for _ in range(options.rounds):
            for algorithm, n in runs:
                runs[algorithm, n] += launch(algorithm, n, folder, options)
    return rows_of("processes", runs, {key: key[1] for key in runs})


def launch(
    algorithm: str, n: int, folder: str, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Seconds of the timed updates of n processes."""
    asked = options.threads or int(os.environ.get("OMP_NUM_THREADS", "0"))
    threads = asked or max(1, common.machine()["cores"] // n)
    sizes = base(options)
    sizes["batch_size"] = options.batch_size // n
    given = {
        "algorithm": algorithm,
        "folder": folder,
        "sizes": sizes,
        "repeats": options.repeats,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(n), __file__, "--rank", json.dumps(given)]
    done = subprocess.run(
        command,
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
    point = Point(algorithm, sizes, folder, {})
    clocks = []
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
        # gloo's threads and DistributedDataParallel's destructor can wait for each other.
        os._exit(0)


# --- what is shown --------------------------------------------------------------------------------
def table_row(row: dict[str, Any]) -> list[Any]:
    """What is shown of a point."""
    cells = [row["sweep"], row["value"], row["algorithm"]]
    least = min(row["all_seconds"])
    most = max(row["all_seconds"])
    cells.append(f"{least:.3f} ({row['median_seconds']:.3f}, {most:.3f})")
    return cells + [f"{row['ratio'][phase]:.2f}" for phase in PHASES]


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default=None, help="name of the record (default: device and dtype)")
    add("--sweeps", nargs="+", default=list(SWEEPS), choices=SWEEPS)
    add("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    for name, (points, what) in SWEEPS.items():
        kind = type(points[0])
        add(f"--points_{name}", nargs="+", type=kind, default=points, help=f"of the sweep: {what}")
    add("--batch_size", type=int, default=64, help="episodes per update, if they stay")
    add("--query_length", type=int, default=64)
    add("--response_length", type=int, default=24)
    add("--rloo_k", type=int, default=4)
    add("--model", default="4x128", help="layers x width")
    add("--num_epochs", type=int, default=4)
    add("--micro_batch_size", type=int, default=64)
    add("--dtype", default="fp32", choices=["fp32", "bf16"])
    add("--repeats", type=int, default=3, help="timed updates of each point")
    add("--rounds", type=int, default=2, help="starts of each number of processes")
    add("--threads", type=int, default=None, help="threads of each process")
    add("--oversubscribe", action="store_true", help="more processes than cores")
    # What `rank` gets: this file starts itself for it.
    add("--rank", type=json.loads, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    given = vars(options).pop("rank")
    if given is not None:
        rank(**given)
        return
    options.tag = options.tag or f"{common.device().type}-{options.dtype}"
    rows = []
    for name in options.sweeps:
        if name == "processes":
            rows += sweep_processes(options)
        else:
            rows += sweep(name, options)
    path = common.write(options, rows, "scaling")
    columns = ["sweep", "", "algorithm", "least s (median, most)", "ratio", *PHASES[1:]]
    common.show(columns, [table_row(row) for row in rows], path.name)


if __name__ == "__main__":
    main()
