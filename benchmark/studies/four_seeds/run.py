"""PPO and RLOO on SmolLM2-135M-Instruct with four seeds, by the protocol in README.md.

    python benchmark/studies/four_seeds/run.py --seeds 11        # about an hour on one core
    python benchmark/studies/four_seeds/run.py --model gemma     # about 80 minutes

A seed has its own split of the openings, labels, reward model and policies. Starting model and
policies then continue the held-out openings from the same uniforms, four times each. Needs the
package afinn, and for the weights a package registry, or --base_model. Finished runs of the same
scripts and flags are used again. Writes seed-<seed>.json, and the metrics.jsonl of each run as
<run>-<seed>.jsonl; of gemma-3-270m with "gemma-" before these names.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from afinn import Afinn
from transformers import AutoTokenizer

import rloo_rlhf
from benchmark import common, ours, real_models
from benchmark.tools import win_rate
from benchmark.tools.vader import sentiment
from plumbing import data as data_module

HELD_OUT = 256  # openings that neither labels nor policies see
SAMPLES = 4  # responses to each of them
ROWS = 128  # of a rollout
SHOWN = 10  # openings of which a record has a response
OPENINGS = Path(__file__).resolve().parent / "openings.txt"
NO_CUT = "--start_text none --end_text none"
TASK = f"{NO_CUT} --query_length 24 --response_length 16 --truncate_after 6 --dtype bf16"
TASK += " --batch_size 64 --eval_queries 16 --checkpoint_every 0"


class Study(NamedTuple):
    """What differs between models."""

    fetch: Callable[[Path], Path]
    prefix: str  # of the names of records
    seeds: tuple[int, ...]
    labels: int  # asked for; without ties
    episodes: int
    policy: str  # flags of the policies' runs, beside TASK
    reward: str  # flags of train_reward.py


STUDIES = {
    "SmolLM2": Study(
        real_models.fetch_smollm2,
        prefix="",
        seeds=(11, 12, 13, 14),
        labels=1_536,
        episodes=1_024,
        policy="--micro_batch_size 32 --lr 3e-5",
        reward="--batch_size 32 --lr 1e-4 --dtype bf16",
    ),
    # Half of the micro-batch: logits of 262,144 tokens fill the memory.
    "gemma": Study(
        real_models.fetch_gemma,
        prefix="gemma-",
        seeds=(11,),
        labels=1_024,
        episodes=512,
        policy="--micro_batch_size 16 --lr 1e-5",
        reward="--batch_size 16 --lr 3e-5 --dtype bf16",
    ),
}


class Responses(NamedTuple):
    """What a model makes of the held-out openings, SAMPLES in turn for each."""

    texts: list[str]
    rewards: np.ndarray  # of the seed's reward model, without the penalty for a missing end
    kl: np.ndarray  # in nats, of all tokens
    likelihood: np.ndarray  # log-probability of a token under the starting model, mean over tokens
    lengths: np.ndarray  # in tokens, up to the end
    found_end: np.ndarray


# --- the parts of a seed --------------------------------------------------------------------------
def split(seed: int, folder: Path) -> tuple[Path, list[str]]:
    """A file of the openings to train on, and the held-out ones."""
    lines = OPENINGS.read_text().splitlines()
    order = np.random.default_rng(seed).permutation(len(lines))
    shuffled = [lines[i] for i in order]
    path = folder / f"openings-{seed}.txt"
    path.write_text("\n".join(shuffled[HELD_OUT:]) + "\n")
    return path, shuffled[:HELD_OUT]


def train(name: str, script: str, flags: str, args: Any) -> Path:
    """Runs a script, unless it has run, and keeps its metrics as NAME.jsonl."""
    run = real_models.folder_of(script, flags, args.folder)
    real_models.run(script, flags, run)
    shutil.copyfile(run / "metrics.jsonl", args.out / f"{name}.jsonl")
    return run


def reward_model(seed: int, base_model: str, openings: Path, study: Study, args: Any) -> str:
    """Trained on VADER's choices of four responses of the starting model."""
    labels = args.folder / f"{study.prefix}labels-{seed}.jsonl"
    if not labels.exists():
        real_models.label(base_model, labels, seed, study.labels, openings)
    flags = f"--base_model {base_model} --query_dataset {openings} --label_dataset {labels}"
    flags += f" {NO_CUT} {study.reward} --seed {seed}"
    run = train(f"{study.prefix}reward-{seed}", "train_reward.py", flags, args)
    return str(run / "reward_model")


# --- evaluation -----------------------------------------------------------------------------------
@torch.no_grad()
def respond(model: str, base_model: str, reward: str, seed: int, openings: list[str]) -> Responses:
    """Four responses to each opening, from uniforms that are the same for all models of a seed. The
    reward is a model's folder, or module:function."""
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    args = rloo_rlhf.Args(
        base_model=base_model,
        response_length=16,
        truncate_after=6,
        micro_batch_size=32,
        dtype="bf16",
    )
    load = ours.loader(tokenizer, 64, args)
    _, lm = rloo_rlhf.load_policy_and_reference(load, args)
    ref = ours.make_actor(rloo_rlhf, lm, args)
    policy = ref
    if model != base_model:
        args.base_model = model
        _, lm = rloo_rlhf.load_policy_and_reference(load, args)
        policy = ours.make_actor(rloo_rlhf, lm, args)
    if Path(reward).exists():
        args.reward_model = reward
    else:
        args.reward_fn = reward
    score = ours.load_score_fn(tokenizer, 64, args)
    end = data_module.token_id("truncate_token", args.truncate_token, tokenizer)
    bos = data_module.bos(tokenizer)
    asked = [ours.query(bos + data_module.encode(text, tokenizer)) for text in openings]
    asked = [query for query in asked for _ in range(SAMPLES)]
    u = rloo_rlhf.uniforms(seed, 10**7, len(asked), args.response_length)
    parts = []
    for i in range(0, len(asked), ROWS):
        queries = asked[i : i + ROWS]
        batch = rloo_rlhf.rollout(policy, queries, u[i : i + ROWS], end, args)
        rows = torch.arange(len(queries))[None]
        rloo_rlhf.set_logprobs(batch, policy, ref, rows, args)
        scores = score(queries, rloo_rlhf.truncated(batch))
        counts = torch.arange(args.response_length) < batch.lengths[:, None]
        likelihood = (batch.ref_logprobs * counts).sum(1) / batch.lengths
        kl = (batch.logprobs - batch.ref_logprobs).sum(1)
        tensors = (scores, kl, likelihood, batch.lengths, batch.found_end)
        parts.append([tokenizer.batch_decode(rloo_rlhf.truncated(batch)), *tensors])
    texts, *tensors = zip(*parts, strict=True)
    arrays = [torch.cat(parts).float().numpy() for parts in tensors]
    return Responses(sum(texts, []), *arrays)


def by_opening(openings: list[str], texts: list[str]) -> win_rate.Texts:
    """The texts of each opening."""
    return {query: texts[SAMPLES * i : SAMPLES * (i + 1)] for i, query in enumerate(openings)}


def duel(openings: list[str], mine: list[str], theirs: list[str]) -> dict[str, Any]:
    """Of the 16 pairs of responses to an opening, how many VADER decides for mine, and how many are
    ties; and the win rate for equal length."""
    texts = (by_opening(openings, mine), by_opening(openings, theirs))
    pairs = win_rate.compare(*texts, sentiment)
    wins = pairs.wins.reshape(len(openings), -1)
    controlled = win_rate.results(pairs)["controlled_rate"]
    return {
        "won": (wins == 1).sum(1).tolist(),
        "tied": (wins == 0.5).sum(1).tolist(),
        "controlled": controlled["rate"],
    }


def summary(found: Responses) -> dict[str, Any]:
    """Means over all responses, and over those that end; the true score of each opening; the texts
    of the first openings."""
    scores = np.array(sentiment([], found.texts))
    has_end = found.found_end.astype(bool)
    other = Afinn()
    return {
        "true_score": scores.mean(),
        "true_scores": scores.reshape(-1, SAMPLES).mean(1).round(4).tolist(),
        "true_score_ended": float(scores[has_end].mean()),
        "true_score_open": float(scores[~has_end].mean()),
        "zero": float((scores == 0).mean()),
        "afinn": float(np.mean([other.score(text) for text in found.texts])),
        "reward": float(found.rewards.mean()),
        "kl": float(found.kl.mean()),
        "likelihood": float(found.likelihood.mean()),
        "length": float(found.lengths.mean()),
        "found_end": float(found.found_end.mean()),
        "distinct": len(set(found.texts)) / len(found.texts),
        "texts": found.texts[: SHOWN * SAMPLES : SAMPLES],
    }


def accuracy(found: Responses) -> dict[str, float]:
    """How often the reward model names VADER's favourite of the four responses to a held-out
    opening, where VADER has one, beside guessing."""
    scores = np.array(sentiment([], found.texts)).reshape(-1, SAMPLES)
    choices = found.rewards.reshape(-1, SAMPLES).argmax(1)
    best = scores == scores.max(1, keepdims=True)
    decided = best.sum(1) < SAMPLES
    hits = best[np.arange(len(choices)), choices]
    return {
        "accuracy": float(hits[decided].mean()),
        "guessing": float(best[decided].mean()),
        "decided": int(decided.sum()),
    }


def measure(seed: int, base_model: str, study: Study, args: Any) -> None:
    """All runs of a seed, and its record."""
    openings, held_out = split(seed, args.folder)
    reward = reward_model(seed, base_model, openings, study, args)
    flags = f"{TASK} {study.policy} --total_episodes {study.episodes}"
    task = f"--base_model {base_model} --query_dataset {openings} --reward_model {reward}"
    task += f" {flags} --seed {seed}"
    judged = (base_model, reward, seed, held_out)
    start = respond(base_model, *judged)
    rows = [{"run": "starting model", "seed": seed} | summary(start)]
    texts = {}
    for name, script in (("PPO", "ppo_rlhf.py"), ("RLOO", "rloo_rlhf.py")):
        run = train(f"{study.prefix}{name}-{seed}", script, task, args)
        found = respond(str(run / "policy"), *judged)
        texts[name] = found.texts
        spent = json.loads(run.with_suffix(".json").read_text())
        row = {"run": name, "seed": seed} | summary(found) | spent
        rows.append(row | {"duel": duel(held_out, found.texts, start.texts)})
    between = duel(held_out, texts["RLOO"], texts["PPO"])
    record = argparse.Namespace(tag=f"{study.prefix}seed-{seed}", out=args.out)
    more = {
        "shown": held_out[:SHOWN],
        "flags": flags,
        "reward_model": accuracy(start),
        "rloo_over_ppo": between,
    }
    common.write(record, rows, **more)


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--model", default="SmolLM2", choices=STUDIES)
    add("--seeds", type=int, nargs="+", default=None, help="(None: those of the record)")
    add("--base_model", default=None, help="a folder or hub id (None: the package on PyPI)")
    add("--folder", type=Path, default="runs/four_seeds", help="where model and runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    args.folder = args.folder.absolute()
    study = STUDIES[args.model]
    base_model = args.base_model or str(study.fetch(args.folder))
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds or study.seeds:
        measure(seed, base_model, study, args)


if __name__ == "__main__":
    main()
