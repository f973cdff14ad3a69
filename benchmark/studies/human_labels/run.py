"""A reward model of SmolLM2-135M-Instruct from human preferences, by the protocol in README.md.

    python benchmark/studies/human_labels/run.py                            # the data from the hub
    python benchmark/studies/human_labels/run.py --data harmless.jsonl.gz --seeds 1 2 3

About half an hour a seed on one core. Needs the weights as films does. The labels contain
offensive texts by design, so no text of them goes into the records. Writes seed-<seed>.json with a
number for each held-out pair, and the metrics.jsonl of the run as reward-<seed>.jsonl.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_reward
from benchmark import common, real_models

SEEDS = (1, 2, 3)
NUM_LABELS = 1_800
FLAGS = "--start_text none --end_text none --truncate_token none --long_queries keep_end"
FLAGS += " --query_length 64 --response_length 64 --normalization_samples 0"
FLAGS += " --batch_size 32 --micro_batch_size 8 --lr 1e-4 --dtype bf16 --checkpoint_every 0"
WHOLE = 100_000  # more tokens than any answer has


# --- data -----------------------------------------------------------------------------------------
def load_pairs(data: str | None) -> datasets.Dataset:
    """The test split of harmless-base, from a file or from the hub."""
    if data is None:
        return datasets.load_dataset("Anthropic/hh-rlhf", data_dir="harmless-base", split="test")
    return datasets.load_dataset("json", data_files=data, split="train")


def split(pairs: datasets.Dataset, seed: int, folder: Path) -> Path:
    """A data set of NUM_LABELS pairs to train on, and all others as its split `test`."""
    order = np.random.default_rng(seed).permutation(len(pairs))
    out = folder / f"pairs-{seed}"
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", order[:NUM_LABELS]), ("test", order[NUM_LABELS:])):
        pairs.select(rows).to_json(out / f"{name}.jsonl")
    return out


# --- what needs no reward model -------------------------------------------------------------------
@torch.no_grad()
def likelihoods(lm: Any, label: train_reward.Comparison) -> list[tuple[float, float]]:
    """Log-probability of each answer under the starting model, and its mean over tokens."""
    found = []
    for response in label.responses:
        ids = torch.tensor([label.query + response])
        logits = lm(ids).logits[0, len(label.query) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(label.query) :, None])
        found.append((chosen.sum().item(), chosen.mean().item()))
    return found


def margin(values: list[Any], best: int) -> Any:
    """The value of the answer that people chose minus that of the other."""
    return values[best] - values[1 - best]


def measure(base_model: str, pairs: Path, run: Path) -> list[dict[str, Any]]:
    """A row of margins for each held-out pair, chosen minus rejected."""
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    lm = AutoModelForCausalLM.from_pretrained(base_model).eval()
    args = train_reward.Args(**json.loads((run / "args.json").read_text())["args"])
    _, held_out = train_reward.load_labels(args, tokenizer)
    whole = replace(args, response_length=WHOLE)
    _, uncut = train_reward.load_labels(whole, tokenizer)
    samples = common.read_lines(run / "samples.jsonl")
    rows = []
    for label, uncut_label, sample in zip(held_out, uncut, samples, strict=True):
        assert tokenizer.batch_decode(label.responses) == sample["responses"]
        sums, means = zip(*likelihoods(lm, label), strict=True)
        lengths = [len(response) for response in uncut_label.responses]
        rows.append(
            {
                "reward": margin(sample["rewards"], label.best),
                "length": margin(lengths, label.best),
                "likelihood": margin(sums, label.best),
                "token_likelihood": margin(means, label.best),
                "is_cut": int(max(lengths) > args.response_length),
            }
        )
    return rows


# --- results --------------------------------------------------------------------------------------
def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--data", default=None, help="a file of chosen and rejected (None: harmless-base, hub)")
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--base_model", default=None, help="a folder or hub id (None: the package on PyPI)")
    add("--folder", type=Path, default="runs/human_labels", help="where model and runs go")
    args = parser.parse_args()
    pairs = load_pairs(args.data and str(Path(args.data).absolute()))
    os.chdir(common.ROOT)
    folder = args.folder.absolute()
    base_model = args.base_model or str(real_models.fetch_smollm2(folder))
    for seed in args.seeds:
        data = split(pairs, seed, folder)
        flags = f"--base_model {base_model} --label_dataset {data} {FLAGS} --seed {seed}"
        run = real_models.folder_of("train_reward.py", flags, folder)
        real_models.run("train_reward.py", flags, run)
        shutil.copyfile(run / "metrics.jsonl", args.out / f"reward-{seed}.jsonl")
        rows = measure(base_model, data, run)
        columns = {}
        for name in rows[0]:
            columns[name] = [round(row[name], 4) for row in rows]
        spent = json.loads(run.with_suffix(".json").read_text())
        record = argparse.Namespace(tag=f"seed-{seed}", out=args.out)
        common.write(record, [{"seed": seed} | spent], flags=FLAGS, margins=columns)
        right = float(np.mean(np.array(columns["reward"]) > 0))
        sys.stdout.write(f"seed {seed}: {right:.3f} of {len(rows)} held-out pairs\n")


if __name__ == "__main__":
    main()
