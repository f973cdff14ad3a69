"""What goes wrong in RLHF, how it looks, and what cures it: each symptom provoked on purpose.

    python benchmark/studies/symptoms/run.py    # all rows that the record lacks

A row has three short runs of the default task, which differ in what is named: healthy, ill and
cured. What the scripts refuse or cannot do by a flag is patched into a copy, and their check is
taken out there. A value is the mean over the last quarter of a run's updates. Rows that are in the
record with the same runs are kept; finished runs of the same scripts are used again. Writes
symptoms.json.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common
from benchmark.runs import DROPOUT, UNCHECKED, slug

Changes = tuple[tuple[str, str], ...]
LENGTH = 24  # tokens of a response
SIZES = f"--batch_size 64 --response_length {LENGTH} --checkpoint_every 0"
RATIO = "sampled / mean entropy"
PPO = "ppo_rlhf.py"
REWARD = "train_reward.py"

TEMPERATURE = (
    UNCHECKED,
    ("probs = (logits / temperature)", "probs = logits"),
)
TOP_K = (
    UNCHECKED,
    (
        "        probs = (logits / temperature).softmax(-1)  # (B, V)\n",
        "        probs = (logits / temperature).softmax(-1)  # (B, V)\n"
        "        probs = probs.where(probs >= probs.topk(10).values[:, -1:], 0)\n"
        "        probs = probs / probs.sum(-1, keepdim=True)\n",
    ),
)


class Run(NamedTuple):
    """Flags, changes to a copy of the script, script."""

    flags: str = ""
    changes: Changes = ()
    script: str = PPO


class Symptom(NamedTuple):
    """What is seen, and in which metric; the ill run and its cause; the cure and the cured run.
    Where no run is named, it is the default's."""

    seen: str
    metric: str
    cause: str
    ill: Run
    cure: str
    cured: Run | None = None
    healthy: Run | None = Run()


FEW_LABELS = "--num_labels 128"
NO_KL = "--kl_coef 0 --adaptive_kl_target none --lr_schedule constant"
ALL_LABELS = Run(script=REWARD)
SYMPTOMS = [
    Symptom(
        "the first ratio is not 1",
        "first_ratio_error",
        "dropout is on (a patch; the script stops here)",
        Run(changes=DROPOUT),
        "dropout off, as the scripts have it",
    ),
    Symptom(
        "the KL is negative",
        "objective/kl",
        "the same",
        Run(changes=DROPOUT),
        "the same",
    ),
    Symptom(
        "sampled tokens are too likely",
        RATIO,
        "top-k sampling, k = 10 (a patch; the script stops here)",
        Run(changes=TOP_K),
        "draw from the whole distribution",
    ),
    Symptom(
        "sampled tokens are too unlikely",
        RATIO,
        "the sampler forgets the temperature: 1 in place of 0.7 (a patch; the script stops here)",
        Run(changes=TEMPERATURE),
        "one temperature for sampling and losses",
    ),
    Symptom(
        "the KL explodes",
        "objective/kl",
        "`--lr 6e-3`, 30 times too high",
        Run("--lr 6e-3"),
        "`--lr 2e-4`",
    ),
    Symptom(
        "the values explain less than nothing",
        "val/var_explained",
        "the value head, which starts at 0, has not reached the returns' mean: the default, early",
        Run(),
        "`--critic_lr 1e-2 --cliprange_value 10`",
        Run("--critic_lr 1e-2 --cliprange_value 10"),
        None,
    ),
    Symptom(
        "the entropy collapses",
        "policy/entropy",
        "no KL penalty and a constant --lr 1e-3",
        Run(f"{NO_KL} --lr 1e-3"),
        "`--kl_coef 0.15 --adaptive_kl_target 6`, a decaying --lr",
    ),
    Symptom(
        "the reward model only guesses",
        "test/accuracy",
        "`--num_labels 128`",
        Run(FEW_LABELS, script=REWARD),
        "4,000 labels",
        None,
        ALL_LABELS,
    ),
]


# --- runs -----------------------------------------------------------------------------------------
def copy_of(run: Run, path: Path) -> Path:
    """A copy of the run's script with its changes."""
    text = (common.ROOT / run.script).read_text()
    for old, new in run.changes:
        if text.count(old) != 1:
            raise SystemExit(f"{run.script} has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    path.write_text(text)
    return path


def train(run: Run, args: argparse.Namespace) -> tuple[Path, str]:
    """The folder of the run, which is made if it is not there yet, and the line with which it
    stopped on the way, or ""."""
    flags = f"{run.flags} --seed {args.seed}"
    if run.script == PPO:
        flags = f"{SIZES} --total_episodes {args.episodes} {flags}"
        reward, _ = train(ALL_LABELS, args)
        flags = f"{flags} --reward_model {reward}/reward_model"
    name = hashlib.sha256(repr((run.changes, flags)).encode()).hexdigest()[:6]
    out = Path(args.folder) / common.commit() / slug(f"{run.script[:3]} {run.flags[:40]} {name}")
    log = out.with_name(f"{out.name}.log")
    if not (out / "samples.jsonl").exists() and not log.with_suffix(".stopped").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        script = copy_of(run, out.with_name(f"{out.name}.py"))
        common.copy_shared(out.parent)
        command = [sys.executable, str(script), *flags.split()]
        command += ["--output_dir", str(out), "--resume"]
        paths = {"PYTHONPATH": str(common.ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            streams = {"stdout": file, "stderr": file}
            done = subprocess.run(command, env=os.environ | paths, check=False, **streams)
        is_stopped = done.returncode == 1 and "Traceback" not in log.read_text()
        if is_stopped and (out / "metrics.jsonl").exists():
            log.with_suffix(".stopped").touch()
        elif done.returncode != 0:
            raise SystemExit(f"{script} failed: see {log}")
    if not log.with_suffix(".stopped").exists():
        return out, ""
    script_name = f"{out.name}.py: "
    lines = log.read_text().splitlines()
    return out, next(x.removeprefix(script_name) for x in lines if x.startswith(script_name))


def curve(out: Path, metric: str) -> list[float]:
    """The metric of every update. Those of tests, which have one value, are drawn as in training.
    The entropy of the sampled tokens is compared with the mean of their distributions: 1 if they
    are drawn from these."""
    metrics = common.read_lines(out / "metrics.jsonl")
    if metric == RATIO:
        sampled = [row["objective/entropy"] / LENGTH for row in metrics]
        return [x / row["policy/entropy"] for x, row in zip(sampled, metrics, strict=True)]
    return [row[metric.replace("test/", "train/")] for row in metrics]


def value(out: Path, metric: str) -> float:
    """The mean of the last quarter of the curve, or the one value of a test."""
    if metric.startswith("test/"):
        return json.loads((out / "results.json").read_text())[metric]
    points = curve(out, metric)
    return float(np.mean(points[-max(1, len(points) // 4) :]))


def measure(symptom: Symptom, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the record."""
    began = time.time()
    row = {
        "symptom": symptom.seen,
        "metric": symptom.metric,
        "cause": symptom.cause,
        "cure": symptom.cure,
        "runs": runs_of(symptom, args),
        "commit": common.commit(),
        "stopped": "",
        "values": {},
        "curves": {},
    }
    for name in ("healthy", "ill", "cured"):
        run = getattr(symptom, name)
        if run is None:
            continue
        out, stopped = train(run, args)
        row["curves"][name] = curve(out, symptom.metric)
        row["values"][name] = value(out, symptom.metric)
        if name == "ill":
            row["stopped"] = stopped
    return row | {"seconds": round(time.time() - began, 1)}


def runs_of(symptom: Symptom, args: argparse.Namespace) -> list[Any]:
    """What makes a row: if it changes, the row is measured again."""
    runs = [symptom.healthy, symptom.ill, symptom.cured, args.episodes, args.seed]
    return json.loads(json.dumps(runs))


# --- results --------------------------------------------------------------------------------------
def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default="symptoms", help="name of the record")
    add("--episodes", type=int, default=2_560, help="of each run (the default's own: 12,800)")
    add("--seed", type=int, default=1, help="of all runs")
    add("--folder", default="runs/symptoms", help="where the runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    rows = {}
    record = args.out / f"{args.tag}.json"
    if record.exists():
        rows = {row["symptom"]: row for row in json.loads(record.read_text())["rows"]}
    for symptom in SYMPTOMS:
        if rows.get(symptom.seen, {}).get("runs") == runs_of(symptom, args):
            continue
        rows[symptom.seen] = measure(symptom, args)
        row = rows[symptom.seen]
        kept = [rows[x.seen] for x in SYMPTOMS if x.seen in rows]
        common.write(args, kept)
        print(f"{row['symptom']}: {row['values']} {row['stopped']}", flush=True)


if __name__ == "__main__":
    main()
