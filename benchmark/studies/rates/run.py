"""Five learning rates for PPO and RLOO on the default task, with all else as it is.

    python benchmark/studies/rates/run.py        # writes rates.json: 30 runs, a few minutes each

protocol.md beside this file was written before the first run. Runs are made and judged as in
benchmark/runs.py. Those that are in the record, or finished in --folder, are used again: each row
names the commit of its scripts.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common, runs

RATES = ["2e-4", "5e-5", "8e-4", "1e-4", "4e-4"]  # the default's first, then from the outside
LAST = 10  # updates whose mean is the end of a run
METRICS = {
    "clipfrac": "policy/clipfrac",
    "entropy": "policy/entropy",
    "seconds": "seconds",
}


def of_updates(out: Path) -> dict[str, Any]:
    """Means over all updates of a run, and over its last ones."""
    metrics = common.read_lines(out / "metrics.jsonl")
    found = {}
    for name, key in METRICS.items():
        values = [row[key] for row in metrics]
        found[name] = float(np.mean(values))
        found[f"{name}_at_end"] = float(np.mean(values[-LAST:]))
    found["updates"] = len(metrics)
    return found


def main() -> None:
    parser = runs.make_parser(__doc__, __file__, tag="rates", episodes=12_800)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[21, 22, 23])
    add("--rates", nargs="+", default=RATES)
    add("--batch_size", type=int, default=128, help="of each update")
    args = parser.parse_args()
    folder = runs.begin(args)
    record = args.out / f"{args.tag}.json"
    rows = json.loads(record.read_text())["rows"] if record.exists() else []
    known = {(row["choice"], row["seed"], row["lr"]) for row in rows}
    for rate in args.rates:
        sizes = ["--total_episodes", str(args.episodes)]
        sizes += ["--batch_size", str(args.batch_size), "--lr", rate]
        tasks = []
        for seed in args.seeds:
            for name in runs.NAMES:
                if (name, seed, float(rate)) not in known:
                    tasks.append((name, seed, folder, sizes))
        for task, row in zip(tasks, runs.run_all(tasks, args.jobs), strict=True):
            out = runs.run_folder(*task)
            row = {"algorithm": runs.NAMES[task[0]], "lr": float(rate)} | row
            rows.append(row | of_updates(out))
            common.write(args, rows)  # after each run: what is finished is kept
    short = ("algorithm", "lr", "seed", "failed", "true_score", "kl", "clipfrac", "entropy")
    common.show_rows([{name: row.get(name) for name in short} for row in rows])


if __name__ == "__main__":
    main()
