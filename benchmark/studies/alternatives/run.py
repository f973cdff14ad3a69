"""Fine-tuning, DPO and best of n with the labels of the default task, by protocol.md beside this
file.

    python benchmark/studies/alternatives/run.py        # writes alternatives.json

About an hour on one core. PPO and RLOO, with which it is compared, are runs of ../rates.
"""

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import rloo_rlhf
import train_reward
from benchmark import common, ours, runs
from benchmark.judge import Judge
from plumbing import labels as labels_module


class Setting(NamedTuple):
    """A method, and what is chosen for it; beta is DPO's."""

    method: str
    lr: float
    beta: float = 0.0
    epochs: int = 1


CHOSEN_ON = 20  # a seed
SEEDS = (21, 22, 23)  # of the runs in ../rates
GRID = [Setting("fine-tuning", lr) for lr in (2e-4, 8e-4, 3.2e-3)]
for lr, beta in itertools.product((1e-4, 2e-4, 4e-4), (0.03, 0.1, 0.3)):
    GRID.append(Setting("DPO", lr, beta))
LONGER = 3  # epochs, then tried with the best
NEAR = (5.0, 8.0)  # nats: settings of DPO that ended there are run with all seeds, too
BATCH = 32  # labels of a step
BEST_OF = (1, 4, 16, 64, 128)
DRAW = 10**7  # of the random numbers for best of n; those that Judge takes are smaller


# --- the two methods ------------------------------------------------------------------------------
def dpo_loss(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """DPO's loss (arXiv:2305.18290, equation 7) of log-probabilities (2b, R). Of the two rows of a
    pair the first is that of the best response."""
    log_ratios = (logprobs - ref_logprobs).sum(1).view(-1, 2)  # (b, 2)
    margins = log_ratios[:, 0] - log_ratios[:, 1]
    return -logsigmoid(beta * margins).mean()


def make_batch(labels: list[Any], others: list[int], end: int | None, args: Any) -> Any:
    """For each label its best response, and with --rloo_k 2 the other one of this number, too."""
    contexts = []
    responses = []
    for label, other in zip(labels, others, strict=True):
        best = label.responses[label.best]
        rest = [row for i, row in enumerate(label.responses) if i != label.best]
        chosen = [best, rest[other]][: args.rloo_k]
        contexts += [label.query] * args.rloo_k
        responses += [row[: args.response_length] for row in chosen]
    ids = torch.tensor(responses)
    batch = ours.make_batch(rloo_rlhf, contexts, ids)
    batch.loss_mask, _ = rloo_rlhf.find_end(ids, end, args.truncate_after)
    return batch


def logprobs_of(policy: Any, batch: Any, args: Any) -> Tensor:
    """Of the responses' tokens (B, R), 0 behind their ends."""
    _, new = rloo_rlhf.forward_response(policy, batch, args.temperature)
    return new["logprobs"] * batch.loss_mask


def train(
    setting: Setting, labels: list[Any], lm: Any, ref_lm: Any, end: int | None, args: Any
) -> None:
    """Trains a language model on the labels. `args` have the seed, and how the task samples."""
    is_dpo = setting.method == "DPO"
    args = replace(args, lr=setting.lr, rloo_k=2 if is_dpo else 1)
    policy = ours.make_actor(rloo_rlhf, lm, args)
    ref = ours.make_actor(rloo_rlhf, ref_lm, args)
    optimizer = rloo_rlhf.make_optimizer(policy, args)
    rng = np.random.default_rng([args.seed, 50])
    num_steps = setting.epochs * (len(labels) // BATCH)
    order = []
    for step in range(num_steps):
        if len(order) < BATCH:
            order = rng.permutation(len(labels)).tolist()
        mine = [labels[order.pop()] for _ in range(BATCH)]
        others = rng.integers(0, 3, BATCH).tolist()
        batch = make_batch(mine, others, end, args)
        logprobs = logprobs_of(policy, batch, args)
        if is_dpo:
            with torch.no_grad():
                ref_logprobs = logprobs_of(ref, batch, args)
            loss = dpo_loss(logprobs, ref_logprobs, setting.beta)
        else:
            loss = -logprobs.sum() / batch.loss_mask.sum()  # the cross-entropy of a token
        rloo_rlhf.set_learning_rates(optimizer, step, step / num_steps, args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# --- measurements ---------------------------------------------------------------------------------
def measure(setting: Setting, labels: list[Any], judge: Judge) -> dict[str, Any]:
    """A row of the record."""
    start = time.process_time()
    lm, ref_lm = (ours.load_lm("tiny/model", judge.args) for _ in range(2))
    train(setting, labels, lm, ref_lm, judge.end, judge.args)
    policy = ours.make_actor(rloo_rlhf, lm, judge.args)
    seconds = time.process_time() - start
    row = setting._asdict() | {"seed": judge.seed, "cpu_seconds": seconds}
    for kind, values in judge(policy).items():
        row[kind] = float(np.mean(values))
    common.show_rows([row])
    return row


def best(rows: list[dict[str, Any]]) -> int:
    """The number of the row with the highest true score."""
    return int(np.argmax([row["true_score"] for row in rows]))


def best_of_n(judge: Judge) -> list[dict[str, Any]]:
    """For each n the starting model's best responses by the reward model: true score, and the bound
    of their KL."""
    rewards = []
    scores = []
    for draw in range(max(BEST_OF)):
        batch = judge.responses(judge.ref, DRAW + draw)
        rewards.append(judge.rewards(batch))
        scores.append(judge.true_scores(rloo_rlhf.truncated(batch)))
    rewards = np.array(rewards)  # (n, queries)
    scores = np.array(scores)
    rows = []
    for n in BEST_OF:
        chosen = rewards[:n].argmax(0)
        row = {"method": "best of n", "n": n, "seed": judge.seed}
        row["true_score"] = float(scores[chosen, np.arange(len(chosen))].mean())
        row["kl"] = np.log(n) - (n - 1) / n
        rows.append(row)
    common.show_rows(rows)
    return rows


def main() -> None:
    parser = runs.make_parser(__doc__, __file__, tag="alternatives")
    args = parser.parse_args()
    folder = runs.begin(args)
    tokenizer = common.tokenizer()
    judges = {}
    labels = {}
    for seed in (CHOSEN_ON, *SEEDS):
        task = ("", seed, folder)
        if runs.reward_model(task):
            raise SystemExit(f"train_reward.py failed: see {folder}")
        judges[seed] = Judge(seed, runs.reward_folder(*task) / "reward_model")
        labels[seed], _ = labels_module.load_labels(train_reward.Args(seed=seed), tokenizer)

    tried = []
    rows = []
    for method in ("fine-tuning", "DPO"):
        settings = [setting for setting in GRID if setting.method == method]
        found = [measure(setting, labels[CHOSEN_ON], judges[CHOSEN_ON]) for setting in settings]
        longer = settings[best(found)]._replace(epochs=LONGER)
        settings.append(longer)
        found.append(measure(longer, labels[CHOSEN_ON], judges[CHOSEN_ON]))
        tried += found
        chosen = [settings[best(found)]]
        for setting, row in zip(settings, found, strict=True):
            if method == "DPO" and NEAR[0] <= row["kl"] <= NEAR[1] and setting not in chosen:
                chosen.append(setting)
        for setting, seed in itertools.product(chosen, SEEDS):
            rows.append(measure(setting, labels[seed], judges[seed]))
    for seed in SEEDS:
        rows += best_of_n(judges[seed])
    common.write(args, rows, tried=tried)


if __name__ == "__main__":
    main()
