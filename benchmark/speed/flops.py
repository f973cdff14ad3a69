"""Counts the floating-point operations of an update of the default run, PPO's and RLOO's.

    python benchmark/speed/flops.py --reward_model runs/NAME/reward_model   # writes flops.json

PyTorch counts those of matrix products alone, which are nearly all. Runs of two and of six updates
are counted. A quarter of their difference is what one update needs.
"""

import contextlib
import io
import runpy
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.utils.flop_counter import FlopCounterMode

from benchmark import common

SCRIPTS = {"PPO": "ppo_rlhf.py", "RLOO": "rloo_rlhf.py"}


def count(script: str, num_updates: int, reward_model: str) -> int:
    """Operations of a whole run with so many updates."""
    counter = FlopCounterMode(display=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        counter,
    ):
        flags = f"--total_episodes {128 * num_updates} --output_dir {folder}/run"
        sys.argv = [script, *flags.split(), "--reward_model", reward_model]
        runpy.run_path(str(common.ROOT / script), run_name="__main__")
    return counter.get_total_flops()


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    parser.add_argument("--reward_model", required=True, help="a folder")
    parser.add_argument("--tag", default="flops", help="name of the record")
    args = parser.parse_args()
    rows = []
    for algorithm, script in SCRIPTS.items():
        few, more = (count(script, number, args.reward_model) for number in (2, 6))
        rows.append({"algorithm": algorithm, "gigaflops": (more - few) / 4 / 1e9})
    args.reward_model = Path(args.reward_model).name
    common.write(args, rows)
    common.show_rows(rows)


if __name__ == "__main__":
    main()
