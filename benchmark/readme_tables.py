"""Writes the tables of benchmark/README.md and of the pages in studies/, from the records in results/.

    python benchmark/readme_tables.py            # writes them between their markers
    python benchmark/readme_tables.py --check    # exit 1 if that would change them (a test does it)

The table of details and its links are made by tests/details.py.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
ALGORITHMS = ("ppo", "rloo")
MANY = 2  # records that a brief page names
# What a record of throughput.py has measured.
WORK = ("shape", "queries", "query_length", "response_length", "batch_size", "dtype")
# The records that make each table: others in results/ are left alone.
SPEED = [
    "throughput-tiny-tiny-fp32",
    "throughput-tiny-tiny-bf16",
    "throughput-gpt2-book-fp32",
    "throughput-gpt2-book-fp32-rloo",
    "throughput-gpt2-book-fp32-trl",
    "throughput-gpt2-book-fp32-trl-rloo",
    "throughput-gpt2-book-bf16",
    "throughput-gpt2-book-bf16-rloo",
    "throughput-gpt2-book-bf16-trl",
    "throughput-gpt2-book-bf16-trl-rloo",
    "throughput-gpt2-book-fp32-memory",
]
RECORDS = {
    "embedded": ["embedded-tiny"],
    "rloo_ppo": ["ablations-full", "ablations-slow", "ablations-long", "ablations-tiny"],
    "matters": ["ablations-full", "ablations-tiny"],
    "ablations": ["ablations-tiny"],
    "rewards": ["embedded-tiny"],
    "overoptimisation": ["overoptimisation-tiny"],
    "penalty": ["overoptimisation-penalty"],
    "collapse": ["overoptimisation-penalty"],
    "gamble": ["overoptimisation-tiny", "overoptimisation-penalty"],
    "frontier": ["overoptimisation-frontier", "overoptimisation-slow"],
    "symptoms": ["symptoms", "overoptimisation-tiny"],
    "adam": ["adam-first-update"],
    "ratio": ["bf16_ratio-tiny", "bf16_ratio-gpt2"],
    "optimum": ["optimum-enumerated"],
    "estimated": ["optimum-estimated-ppo", "optimum-estimated-rloo"],
    "memory": ["memory_speed-tiny-fp32", "memory_speed-gpt2-fp32"],
    "speed": SPEED,
    "bars": SPEED,
    "times": SPEED[:-1],
    "versions": [
        "whole_run-bars-tiny",
        "whole_run-bars-gpt2",
        "whole_run-bars-gpt2-8",
        "whole_run-bars-gpt2-64",
    ],
    "equal_kl": ["ablations-full"],
    "slow": ["ablations-slow"],
    "long": ["ablations-long"],
    "real_model": ["real_model-smollm2", "real_model-smollm2-held"],
    "real_six": ["real_model-smollm2-held", "real_model-smollm2"],
    "real_duels": ["real_model-smollm2", "real_model-smollm2-held"],
    "real_memory": ["real_model-smollm2-memory"],
    "real_samples": ["real_model-smollm2-held"],
    "scaling": ["scaling-cpu-fp32"],
}


def records(name: str) -> list[dict[str, Any]]:
    """The records of a table."""
    return [json.loads((RESULTS / f"{record}.json").read_text()) for record in RECORDS[name]]


def rows_of(name: str, part: str) -> list[dict[str, Any]]:
    """The rows of all records of a table."""
    return [row for record in records(name) for row in record[part]]


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
    return text.replace("|  |", "| |")


def origin(name: str, page: "Page") -> str:
    """Which version of the scripts made the records of a table, and where. A brief page only links
    the records, which say so themselves. Records without a version are of 0.2.0."""
    if page.is_brief and len(RECORDS[name]) > MANY:
        return f"From [{len(RECORDS[name])} records]({page.results})."
    if page.is_brief:
        links = [f"[{stem}]({page.results}/{stem}.json)" for stem in RECORDS[name]]
        return f"From {', '.join(links)}."
    groups: dict[str, list[str]] = {}
    for stem, record in zip(RECORDS[name], records(name), strict=True):
        machine = record["machine"]
        where = machine["gpu"]
        if where is None:
            plural = "s" if machine["threads"] > 1 else ""
            where = f"{machine['cpu']}, {machine['threads']} thread{plural}"
        changed = " with changes" if record["scripts_changed_since"] else ""
        version = f"{record.get('version', '0.2.0')} at {record['commit'][:7]}{changed}"
        link = f"[{stem}]({page.results}/{stem}.json)"
        groups.setdefault(f"{version} ({where})", []).append(link)
    made = [f"{where}: {', '.join(links)}" for where, links in groups.items()]
    return f"Measured: {'; '.join(made)}."


# --- what was learned -----------------------------------------------------------------------------
def embedded_table() -> str:
    """The embedded default: every run."""
    columns = ["", "seed", "VADER, reference", "VADER, policy", "KL", "distinct samples"]
    rows = []
    for row in records("embedded")[0]["rows"]:
        before = f"{row['vader_before']:.2f}"
        after = f"{row['vader_after']:.2f}"
        distinct = f"{row['distinct']:.1%}"
        kl = f"{row['kl']:.1f}"
        accuracy = f"{row['accuracy']:.2f}"
        rows.append([row["algorithm"], row["seed"], before, after, kl, distinct, accuracy])
    return table([*columns, "reward model's accuracy"], rows)


def not_zero(rows: list[dict[str, Any]], kind: str) -> set[str]:
    """The choices whose difference to the default is not 0 by Holm's method (1979), at 5 % over all
    of them. Differences are tested by Student's t, which their intervals come from."""
    tested = []
    for row in rows:
        if row[f"{kind}_interval"]:
            freedom = row["seeds"] - 1
            error = row[f"{kind}_interval"] / stats.t.ppf(0.975, freedom)
            p = 2 * stats.t.sf(abs(row[f"{kind}_difference"]) / error, freedom)
            tested.append((p, row["choice"]))
    found = set()
    for i, (p, choice) in enumerate(sorted(tested)):
        if p > 0.05 / (len(tested) - i):
            break
        found.add(choice)
    return found


def with_interval(row: dict[str, Any], kind: str, digits: int) -> str:
    """A choice's difference to the default, and half of its interval's width."""
    spread = row[f"{kind}_interval"]
    if spread is None:
        return "-"
    return f"{row[f'{kind}_difference']:+.{digits}f} ± {spread:.{digits}f}"


def equal_kl_order(row: dict[str, Any]) -> tuple[bool, bool, float]:
    """PPO's choices by their effect, then RLOO's; last what never gets as far as it is compared."""
    choice = row["choice"]
    effect = row["equal_kl"]
    if effect is None:
        effect = 0.0 if choice in ("default", "RLOO, K 4") else -9.0
    return choice.startswith(("RLOO", "GRPO")), choice != "RLOO, K 4", -effect


def signed(value: float) -> str:
    """With its sign, unless it is rounded to 0."""
    text = f"{value:+.2f}"
    return text if float(text) else "0.00"


def equal_kl_cells(row: dict[str, Any], kind: str = "equal_kl") -> list[str]:
    """The difference in gold at equal KL, with half of its interval's width; and at each level."""
    cell = "-" if row[kind] is None else signed(row[kind])
    if row[f"{kind}_interval"] is not None:
        cell += f" ± {row[f'{kind}_interval']:.2f}"
    levels = ["-" if value is None else signed(value) for value in row[f"{kind}_levels"]]
    return [f"**{cell}**" if row[f"{kind}_holds"] else cell, ", ".join(levels) or "-"]


def failed_cell(row: dict[str, Any]) -> str:
    """How many of the seeds' runs have failed."""
    return f"{round(row['failed'] * row['seeds'])} of {row['seeds']}"


def level_names(row: dict[str, Any]) -> str:
    """Where runs are compared, as a column's title."""
    return f"at {', '.join(f'{level:g}' for level in row['levels'])} nats"


def ablations_table() -> str:
    """Every choice: its scores, and how far they are from the base's."""
    less = "difference"
    found = records("ablations")[0]["table"]
    columns = ["choice", "true score at equal KL: difference", level_names(found[0])]
    columns += ["true score", less, "KL", less, "reward", "distinct", "failed"]
    rows = []
    bold = {kind: not_zero(found, kind) for kind in ("gold", "kl")}
    for row in sorted(found, key=equal_kl_order):
        cells = [named(row["choice"]), *equal_kl_cells(row)]
        for kind, digits in (("gold", 2), ("kl", 1)):
            cells.append(f"{row[kind]:.{digits}f}")
            difference = with_interval(row, kind, digits)
            cells.append(f"**{difference}**" if row["choice"] in bold[kind] else difference)
        cells.append(f"{row['proxy']:.2f}")
        cells.append(f"{row['distinct']:.0%}")
        cells.append(failed_cell(row))
        rows.append(cells)
    return table(columns, rows)


# The choices in the picture of benchmark/README.md, with their names there.
CHOSEN = {
    "ablations-full": {
        "RLOO, K 4": "RLOO, compared with PPO",
        "critic from the reward model": "critic starts as the reward model",
        "1 epoch": "1 epoch (default: 4)",
        "no value function": "no value function",
        "advantages not whitened": "advantages not whitened",
        "lambda 1": "GAE with lambda 1 (default: 0.95)",
        "temperature 1": "temperature 1 (default: 0.7)",
        "KL by k3": "k3 as the KL penalty (default: k1)",
        "GRPO (KL in the loss)": "GRPO, compared with RLOO",
    },
    "ablations-tiny": {
        "critic from the reward model, warmed up": "critic starts as the reward model, warmed up",
        "critic from the policy": "critic starts as the policy",
        "no penalty": "no penalty for unfinished responses",
        "rewards not whitened": "rewards not whitened",
        "whitening by rank, of 4": "whitening per process (4)",
        "reward model not normalised": "reward model not normalised",
        "fixed KL coefficient": "fixed KL coefficient (default: adaptive)",
        "torch's Adam": "PyTorch's Adam (default: TensorFlow's)",
        "no ratio clipping": "no clipping of the ratio",
        "constant learning rate": "constant learning rate (default: decays to 0)",
        "8 minibatches": "8 minibatches (default: 1)",
        "recipe instructgpt": "InstructGPT's settings",
    },
}
# The rows of benchmark/README.md, from the records of full length and of short runs.
MATTERS = {
    "ablations-full": [
        "default",
        "critic from the reward model",
        "no value function",
        "GRPO (KL in the loss)",
    ],
    "ablations-tiny": [
        "default",
        "critic from the reward model, warmed up",
        "8 minibatches",
        "recipe instructgpt",
        "dropout left on",
    ],
}
# What a choice of ablations.py is called in tables and pictures.
RENAMED = {
    "EMA 0.8": "average of the weights (EMA, 0.8)",
    "GRPO (KL in the loss)": "GRPO, against RLOO",
    "KL by abs": "abs(k1) as the KL penalty",
    "KL by k3": "k3 as the KL penalty",
    "KL over the vocabulary": "KL over the vocabulary as the penalty",
    "RLOO, K 4": "RLOO, K 4, against PPO",
    "no penalty": "no penalty for a missing end",
    "penalty added": "penalty for a missing end added",
    "recipe deepspeed_chat": "settings of DeepSpeed-Chat",
    "recipe instructgpt": "settings of InstructGPT",
    "recipe llama2": "settings of Llama 2",
    "recipe qwen": "settings of Qwen",
    "recipe trl_0.9": "settings of TRL 0.9",
    "torch's Adam": "PyTorch's Adam",
    "whitening by rank, of 4": "whitening per process, of 4",
}


def named(choice: str) -> str:
    """The choice's name for readers."""
    return RENAMED.get(choice, choice)


MASKED = ("truncated tokens masked", "recipe qwen", "recipe llama2", "recipe deepspeed_chat")


def matters_table() -> str:
    """The choices that most readers ask for, full runs before short ones."""
    columns = ["change", "episodes", "difference at the same KL"]
    columns += ["true score at the end", "KL at the end", "failed runs"]
    rows = []
    for stem, record in zip(RECORDS["matters"], records("matters"), strict=True):
        of_choice = {row["choice"]: row for row in record["table"]}
        episodes = f"{record['args']['episodes']:,}"
        for name in MATTERS[stem]:
            row = of_choice[name]
            difference = equal_kl_cells(row)[0]
            ends = [f"{row['gold']:.2f}", f"{row['kl']:.1f}", failed_cell(row)]
            name = "default settings" if name == "default" else CHOSEN[stem].get(name, named(name))
            rows.append([name, episodes, difference, *ends])
    return table(columns, rows)


def rloo_ppo_table() -> str:
    """RLOO beside PPO in each study: at the end of each seed's pair of runs, and at equal KL."""
    columns = ["learning rate, episodes", "PPO's final score (KL)", "RLOO's", "pairs RLOO wins"]
    columns += ["RLOO minus PPO at 2, 4, 6 nats", "mean over levels"]
    rows = []
    for record in records("rloo_ppo"):
        args = record["args"]
        of_run = {(row["choice"], row["seed"]): row.get("gold") for row in record["rows"]}
        of_choice = {row["choice"]: row for row in record["table"]}
        pairs = []
        for seed in args["seeds"]:
            pairs.append((of_run["default", seed], of_run["RLOO, K 4", seed]))
        ahead = sum(rloo > ppo for ppo, rloo in pairs)
        rate = args.get("lr") or "2e-4"
        cells = [f"{rate}, {args['episodes']:,}"]
        for name in ("default", "RLOO, K 4"):
            row = of_choice[name]
            cells.append(f"{row['gold']:.2f} ({row['kl']:.1f})")
        cells.append(f"{ahead} of {len(pairs)}")
        mean_cell, level_cell = equal_kl_cells(of_choice["RLOO, K 4"])
        levels = [f"{level:g}" for level in of_choice["RLOO, K 4"]["levels"]]
        if levels != ["2", "4", "6"]:
            level_cell += f" (at {', '.join(levels)})"
        rows.append([*cells, level_cell, mean_cell])
    return table(columns, rows)


def rewards_table() -> str:
    """The reward models of the embedded default, before and after their training."""
    columns = ["seed", "mean and deviation of the new model", "of the trained one"]
    rows = []
    of_seed = {row["seed"]: row["rewards"] for row in records("rewards")[0]["rows"]}
    for seed, row in of_seed.items():
        cells = [seed]
        for when in ("before", "after"):
            cells.append(f"{row[when]['mean']:.2f}, {row[when]['std']:.2f}")
        for name in ("gain", "bias", "test/accuracy", "test/constant"):
            cells.append(f"{row[name]:.2f}")
        rows.append(cells)
    return table([*columns, "gain", "bias", "accuracy", "best constant"], rows)


def overoptimisation_order(row: dict[str, Any]) -> tuple[int, str, bool, float]:
    """By labels, best-of-n after the trained policies."""
    size, _, noise = row["labels"].partition(":")
    return int(size), noise, row["algorithm"] == "best of n", row["kl_coef"] or 0.0


def overoptimisation_table() -> str:
    """Where gold scores are highest and where they end, as means over seeds; and the fits."""
    columns = ["labels", "accuracy", "", "gold at 3.5 nats", "best gold", "at KL"]
    columns += ["gold at the end", "KL", "proxy", "alpha, beta", "explained"]
    record = records("overoptimisation")[0]
    rows = []
    for row in sorted(record["table"], key=overoptimisation_order):
        size, _, noise = row["labels"].partition(":")
        labels = f"{int(size):,}"
        if noise:
            labels += f", {float(noise):.0%} random"
        models = [x["accuracy"] for x in record["reward_models"] if x["labels"] == row["labels"]]
        cells = [labels, f"{mean(models):.2f}", row["algorithm"]]
        if row["kl_coef"]:
            cells[-1] += f", coefficient {row['kl_coef']:g}"
        cells.append("-" if row["gold_near"] is None else f"{row['gold_near']:.2f}")
        cells.append(f"{row['gold_top']:.2f}")
        cells.append(f"{row['kl_top']:.1f}")
        span = f"{row['lowest_end']:.2f} to {row['highest_end']:.2f}"
        cells.append(f"{row['gold_end']:.2f} ({span})")
        cells.append(f"{row['kl_end']:.1f}")
        cells.append(f"{row['proxy_end']:.2f}")
        cells.append(f"{row['alpha']:.3f}, {row['beta']:.3f}")
        cells.append(f"{row['explained']:.2f}")
        rows.append(cells)
    return table(columns, rows)


LAST = 5  # updates whose mean is the end of a run


def labels_name(labels: str) -> str:
    """How many labels a reward model has, and whether half of them are random."""
    size, _, noise = labels.partition(":")
    return f"{int(size):,} half-random" if noise == "0.5" else f"{int(size):,}"


def ends(rows: list[dict[str, Any]], kind: str, digits: int) -> str:
    """Where the runs of the seeds end."""
    return ", ".join(f"{mean(row[kind][-LAST:]):.{digits}f}" for row in rows)


def weak_runs() -> dict[tuple[str, str, float], list[dict[str, Any]]]:
    """Runs against weak reward models, by labels, algorithm and KL coefficient; in each group in
    the order of the seeds."""
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in sorted(records("penalty")[0]["rows"], key=lambda row: row["seed"]):
        found.setdefault((row["labels"], row["algorithm"], row["kl_coef"]), []).append(row)
    return found


BOUNDS = (0.3, 0.45, 1.0)  # of the accuracies of reward models
COLLAPSED = -0.5


def gamble_table() -> str:
    """How runs end, by the accuracy of their reward models, without a KL penalty and with the
    default's."""
    found: dict[tuple[bool, float], list[float]] = {}
    for record in records("gamble"):
        accuracy = {(x["labels"], x["seed"]): x["accuracy"] for x in record["reward_models"]}
        for row in record["rows"]:
            reached = accuracy[row["labels"], row["seed"]]
            bound = next(bound for bound in BOUNDS if reached < bound)
            found.setdefault((row["kl_coef"] > 0, bound), []).append(mean(row["gold"][-LAST:]))
    names = dict(zip(BOUNDS, ("below 0.3", "0.3 to 0.45", "above 0.45"), strict=True))
    rows = []
    for (has_penalty, bound), scores in sorted(found.items()):
        low = sum(score < COLLAPSED for score in scores)
        high = sum(score > -COLLAPSED for score in scores)
        cells = [names[bound], "default" if has_penalty else "none", len(scores)]
        rows.append([*cells, low, len(scores) - low - high, high])
    columns = ["accuracy of the reward model", "KL penalty", "runs"]
    return table([*columns, "end below -0.5", "in between", "end above 0.5"], rows)


def penalty_table() -> str:
    """The same runs with their KL and reward."""
    columns = ["labels", "accuracy, by seed", "", "KL penalty", "true score at the end, by seed"]
    columns += ["reward at the start", "at the end", "KL at the end"]
    record = records("penalty")[0]
    rows = []
    for (labels, algorithm, coef), runs in sorted(weak_runs().items()):
        models = [x for x in record["reward_models"] if x["labels"] == labels]
        models.sort(key=lambda x: x["seed"])
        accuracies = ", ".join(f"{x['accuracy']:.2f}" for x in models)
        cells = [labels_name(labels), accuracies, algorithm, "the default's" if coef else "none"]
        cells.append(ends(runs, "gold", 2))
        cells.append(", ".join(f"{mean(run['proxy'][:LAST]):.1f}" for run in runs))
        rows.append([*cells, ends(runs, "proxy", 1), ends(runs, "kl", 0)])
    return table(columns, rows)


# Labels, algorithm, KL coefficient and seed of the runs whose responses are shown.
SHOWN = (
    ("128", "PPO", 0.0, 3),
    ("4000:0.5", "RLOO", 0.0, 2),
    ("512", "PPO", 0.0, 1),
    ("512", "PPO", 0.15, 1),
)


def collapse_table() -> str:
    """The first response of the last update of runs that collapsed, and of one that did not,
    without a penalty and with it."""
    rows = []
    for labels, algorithm, coef, seed in SHOWN:
        (run,) = [run for run in weak_runs()[labels, algorithm, coef] if run["seed"] == seed]
        first = run["samples"][0]
        text = " ".join(first["response"].split())
        penalty = "penalty" if coef else "no penalty"
        models = records("collapse")[0]["reward_models"]
        (model,) = [x for x in models if x["labels"] == labels and x["seed"] == seed]
        score = f"{mean(run['gold'][-LAST:]):.2f}"
        rows.append([f"{algorithm}, accuracy {model['accuracy']:.2f}, {penalty}", text, score])
    return table(["run", "response", "final true score of the run"], rows)


def frontier_order(row: dict[str, Any]) -> tuple[bool, str, bool, float]:
    """Best-of-n last, then by coefficient, after the runs with a lower rate."""
    is_default = row["rate"] is None
    return row["algorithm"] == "best of n", row["algorithm"], is_default, row["kl_coef"] or 0.0


def frontier_table() -> str:
    """Gold scores at the same KL, of runs with different coefficients of the KL penalty."""
    lines = []
    for record in records("frontier"):
        lines += [row | {"rate": record["args"].get("lr")} for row in record["table"]]
    lines.sort(key=frontier_order)
    levels = [name for name in lines[0] if name.startswith("gold_at_")]
    columns = ["", "coefficient", *[f"gold at {name[8:]}" for name in levels]]
    columns += ["gold at the end", "KL at the end", "above none at that KL"]
    rows = []
    for row in lines:
        rate = f", `--lr {row['rate']}`" if row["rate"] else ""
        cells = [row["algorithm"] + rate]
        cells.append("-" if row["kl_coef"] is None else f"{row['kl_coef']:g}")
        for level in levels:
            cells.append("-" if row[level] is None else f"{row[level]:.2f}")
        cells += [f"{row['gold_end']:.2f}", f"{row['kl_end']:.1f}"]
        gain = row["settled_gain"]
        cells.append("-" if gain is None else f"{gain:+.2f} ± {row['settled_interval']:.2f}")
        rows.append(cells)
    return table(columns, rows)


# How the healthy run of a symptom differs from the ill one. In one row the ill run is the default,
# and the record calls the healthy one cured.
HEALTHY = {
    "the first ratio is not 1": "dropout off, as in the scripts",
    "the KL is negative": "dropout off, as in the scripts",
    "sampled tokens are likelier than the policy's entropy says": "draws from all tokens",
    "sampled tokens are less likely than that": "samples and trains at 0.7",
    "the KL explodes": "`--lr 2e-4`",
    "var_explained is below 0": "`--critic_lr 1e-2 --cliprange_value 10`",
    "the entropy collapses": "`--kl_coef 0.15 --adaptive_kl_target 6`, a decaying `--lr 2e-4`",
    "the reward model is at the best constant answer": "4,000 labels",
}
SEEN = {
    "sampled tokens are likelier than the policy's entropy says": "sampled tokens are too likely",
    "sampled tokens are less likely than that": "sampled tokens are too unlikely",
    "var_explained is below 0": "the values explain less than nothing",
    "the reward model is at the best constant answer": "the reward model only guesses",
}
CAUSES = {
    "the same": "dropout is on (a patch; the script stops here)",
    "the value head, which starts at 0, has not reached the returns' mean: the default, early": (
        "the value head learns too slowly: the default, after a fifth of its episodes"
    ),
    "no KL penalty and a constant --lr 1e-3": "no KL penalty and a constant `--lr 1e-3`",
}


def symptoms_table() -> str:
    """What is seen, where, in a healthy run and in an ill one: means over the last updates. The
    last row is that of policies on two reward models, whose record has both scores."""
    columns = ["what you see", "metric", "healthy", "ill", "cause of the ill run"]
    columns.append("what the healthy run does instead")
    rows = []
    symptoms, overoptimisation = records("symptoms")
    for row in symptoms["rows"]:
        seen = row["symptom"]
        if seen not in HEALTHY:
            continue
        values = row["values"]
        cells = [SEEN.get(seen, seen), f"`{row['metric']}`"]
        cells.append(f"{values.get('healthy', values.get('cured')):.3g}")
        cells.append(f"{values['ill']:.3g}" + (" (stops)" if row["stopped"] else ""))
        rows.append([*cells, CAUSES.get(row["cause"], row["cause"]), HEALTHY[seen]])
    ends = {}
    for row in overoptimisation["rows"]:
        if (row["algorithm"], row["seed"]) == ("PPO", 3) and row["labels"] in ("512", "4000"):
            last = {kind: mean(row[kind][-len(row[kind]) // 4 :]) for kind in ("proxy", "gold")}
            ends[row["labels"]] = f"{last['proxy']:.2f}, {last['gold']:.2f}"
    cells = ["the score rises, the true score falls", "`objective/scores`, true score"]
    cells += [ends["4000"], ends["512"], "a reward model of 512 labels, no KL penalty"]
    rows.append([*cells, "a reward model of 4,000 labels"])
    return table(columns, rows)


def adam_table() -> str:
    """How far each epoch of a first update goes."""
    names = {"original": "TensorFlow's, recorded", "tf": "ours", "torch": "PyTorch's"}
    columns = ["rollouts", "lr", "Adam", "approxkl after 1, 2, 3 steps", "clip fraction"]
    rows = []
    for row in records("adam")[0]["rows"]:
        work = row["work"].replace("embedded default", "default run")
        cells = [work, f"{row['lr']:g}", names[row["adam"]]]
        for kind in ("approxkl", "clipfrac"):
            cells.append(", ".join(f"{x:.3g}" for x in row[kind][1:]))
        rows.append(cells)
    return table(columns, rows)


# --- what is exact --------------------------------------------------------------------------------
def ratio_table() -> str:
    """RLOO's first ratios in bf16, by where the old log-probabilities come from."""
    names = {
        "sampler": "the sampler",
        "other rows": "a forward pass over other rows",
        "same rows": "**the same rows (ours)**",
    }
    columns = ["model, response", "old log-probabilities from", "logits"]
    rows = []
    for record in records("ratio"):
        for row in record["rows"]:
            source = row["source"]
            if row["algorithm"] != "rloo" or row["dtype"] != "bf16":
                continue
            if row["head"] != "fp32" and source != "sampler":
                continue
            head = "fp32" if row["head"] == "fp32" else "bf16"
            error = f"{row['ratio_max_error']:.2g}"
            what = f"{row['model']}, {row['length']}"
            rows.append([what, names[source], head, error, f"{row['clipped']:.0%}"])
    return table([*columns, "largest error of the first ratio", "clipped"], rows)


def optimum_table() -> str:
    """How near both come to the exact optimum, and what they leave of the way to it."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for row in records("optimum")[0]["rows"]:
        found.setdefault(row["seed"], {})[row["algorithm"]] = row
    rows = []
    for seed, of_algorithm in found.items():
        cells = [
            seed,
            f"{of_algorithm['ppo']['j_ref']:.4f}",
            f"{of_algorithm['ppo']['j_star']:.4f}",
        ]
        for algorithm in ALGORITHMS:
            row = of_algorithm[algorithm]
            cells.append(f"{row['j']:.4f} ({row['gap']:.2%})")
        rows.append(cells)
    return table(["seed", "J of the reference", "J* of the optimum", "PPO's J", "RLOO's J"], rows)


def estimated_table() -> str:
    """What trained policies of the embedded default reach of an estimated J*."""
    columns = ["", "beta", "J, reference", "J, trained", "J*, estimated from below", "KL"]
    rows = []
    for algorithm, record in zip(ALGORITHMS, records("estimated"), strict=True):
        row = record["rows"][0]
        reference = f"{row['reference_reward']:.2f}"
        trained = f"{row['j_policy']:.2f} ± {row['j_policy_standard_error']:.2f}"
        best = f"{row['j_star']:.2f} ± {row['standard_error']:.2f}"
        kl = f"{row['kl_policy']:.1f}"
        rows.append([algorithm.upper(), row["beta"], reference, trained, best, kl])
    return table(columns, rows)


# --- time and memory ------------------------------------------------------------------------------
def memory_table() -> str:
    """Memory and speed of an update of each algorithm, as ratios to PPO."""
    names = {
        "ppo": "PPO",
        "ppo-value-model": "PPO, separate value model",
        "rloo-2": "RLOO, K = 2",
        "rloo-4": "RLOO, K = 4",
    }
    found: dict[tuple[str, str], dict[str, float]] = {}
    for record in records("memory"):
        args = record["args"]
        shape = f"{args['shape']}, {args['dtype']}, {args['batch_size']}"
        for row in record["rows"]:
            found.setdefault((shape, row["variant"]), {}).update(row)
    rows = []
    for (shape, variant), row in found.items():
        cells = [shape, names[variant]]
        for name in ("memory_ratio", "speed_ratio"):
            cells.append(f"{row[name]:.2f}" if name in row else "-")
        rows.append(cells)
    return table(["shape, dtype, episodes", "", "peak memory", "episodes per second"], rows)


def work(args: dict[str, Any]) -> str:
    """A name for what a record of throughput.py has measured."""
    if args["shape"] == args["queries"] == "tiny":
        return f"default run, {args['dtype']}"
    length = args["query_length"]
    queries = f"book ({length})" if args["queries"] == "book" else length
    tokens = f"{queries} + {args['response_length']}"
    return f"{args['shape']}, {tokens}, {args['batch_size']}, {args['dtype']}"


def speed_table() -> str:
    """Updates against plain PyTorch, as ratios of one run. A record of memory has none."""
    columns = ["tokens, episodes, dtype", "algorithm", "sample", "score", "optimise"]
    rows = []
    for record in records("speed"):
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm, ratios in record.get("ratios", {}).items():
            ours = of_contender[f"ours-{algorithm}"]
            cells = [work(record["args"]), algorithm.upper()]
            for phase in ("sample", "score", "optimise", "total"):
                cells.append(f"{ratios[phase]:.1f}")
            rows.append([*cells, f"{ours['episodes_per_second']:.3g}"])
    return table([*columns, "whole update", "episodes per second"], rows)


def compared(rows: dict[str, dict[str, Any]], algorithm: str) -> dict[str, float]:
    """What one record says of our update of an algorithm, beside other contenders. TRL's PPO trains
    a value model of its own: so do we beside it, if the record has that."""
    ours = rows[f"ours-{algorithm}"]
    values = {}
    for other in ("plain", "plain-fast", "trl", "trl-fast"):
        row = rows.get(f"{other}-{algorithm}", {})
        mine = rows.get(f"ours-critic-{algorithm}", ours) if "trl" in other else ours
        if "seconds" in row:
            values[f"speed {other}"] = row["seconds"]["total"] / mine["seconds"]["total"]
        if "peak_bytes" in row:
            values[f"memory {other}"] = mine["peak_bytes"] / row["peak_bytes"]
    if "seconds" in ours:
        values["floor"] = ours["fraction_of_floor"]["total"]
        if algorithm == "rloo" and "ours-ppo" in rows:
            seconds = rows["ours-ppo"]["seconds"]["total"]
            values["speed ppo"] = seconds / ours["seconds"]["total"]
    return values


def bars_table() -> str:
    """The share of the floor, then ours against plain PyTorch, TRL and our PPO, and its memory.
    Records of the same work share a row, with the lowest of their floors."""
    titles = {
        "floor": "share of the floor",
        "speed plain": "plain / ours",
        "speed plain-fast": "plain, fast / ours",
        "speed trl": "TRL / ours",
        "speed trl-fast": "TRL, fast / ours",
        "speed ppo": "our PPO / ours",
        "memory plain": "peak memory, share of plain's",
        "memory trl": "share of TRL's",
    }
    found: dict[str, dict[str, float]] = {}
    for record in records("bars"):
        of_contender = {row["contender"]: row for row in record["rows"]}
        for algorithm in ALGORITHMS:
            if f"ours-{algorithm}" in of_contender:
                what = f"{work(record['args'])}, {algorithm.upper()}"
                row = found.setdefault(what, {})
                values = compared(of_contender, algorithm)
                if "floor" in row:
                    values["floor"] = min(row["floor"], values.get("floor", 1.0))
                row.update(values)
    shown = [name for name in titles if any(name in values for values in found.values())]
    rows = []
    for what, values in found.items():
        cells = [f"{values[name]:.2f}" if name in values else "-" for name in shown]
        rows.append([what, *cells])
    return table(["tokens, episodes, dtype", *[titles[name] for name in shown]], rows)


def times_table() -> str:
    """How many times as long as ours the updates of plain PyTorch and of TRL take."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for record in records("times"):
        of_contender = {row["contender"]: row for row in record["rows"]}
        dtype = record["args"]["dtype"]
        for algorithm in ALGORITHMS:
            if f"ours-{algorithm}" not in of_contender:
                continue
            row = found.setdefault((record["args"]["shape"], algorithm), {})
            for name, ratio in compared(of_contender, algorithm).items():
                row[f"{name} {dtype}"] = ratio
    columns = ["model, algorithm"]
    columns += ["plain PyTorch, fp32", "plain PyTorch, bf16", "TRL, fp32", "TRL, bf16"]
    names = ["speed plain fp32", "speed plain bf16", "speed trl fp32", "speed trl bf16"]
    rows = []
    for (shape, algorithm), ratios in found.items():
        cells = [f"{ratios[name]:.2f}" for name in names]
        rows.append([f"{shape}, {algorithm.upper()}", *cells])
    return table(columns, rows)


def versions_table() -> str:
    """Whole runs against those of a former version."""
    names = {
        "tiny": "default run",
        "gpt2-rloo-16": "gpt2, book, 16 rows, fp32, RLOO",
        "gpt2-ppo-16": "gpt2, book, 16 rows, fp32, PPO",
        "gpt2-ppo-64": "gpt2, book, 64 rows in micro-batches of 16, fp32, PPO",
    }
    rows = []
    for record in records("versions"):
        for row in record["rows"]:
            shape, algorithm, *rest = row["work"].split("-")
            name = names.get(row["work"], f"{names['tiny']}, {rest[0]}, {algorithm.upper()}")
            if row.get("own"):
                name += f", with `{row['own']}` here alone"
            seconds = row["seconds"]["ours"]["least"]
            ratios = [row[f"{kind}_ratio"] for kind in ("seconds", "memory")]
            rows.append([name, f"{seconds:.2f}", *[f"{ratio:.2f}" for ratio in ratios]])
    return table(["work", "seconds per update", "of 0.4.0's", "peak memory, of 0.4.0's"], rows)


def equal_kl_table() -> str:
    """Choices at full length: gold at equal KL, less the base's, and how far each went."""
    record = records("equal_kl")[0]
    columns = [
        "choice",
        "true score at equal KL: difference",
        level_names(record["table"][0]),
    ]
    columns += ["true score", "KL", "distinct", "explained by values", "failed"]
    explained: dict[str, list[float]] = {}
    for row in record["rows"]:
        ends = row.get("curve", {}).get("var_explained", [])[-1:]  # none of a run that stopped
        if "--vf_coef 0" in row["flags"]:
            ends = []
        explained.setdefault(row["choice"], []).extend(ends)
    rows = []
    for row in sorted(record["table"], key=equal_kl_order):
        values = [f"{row['gold']:.2f}", f"{row['kl']:.1f}", f"{row['distinct']:.0%}"]
        last = explained[row["choice"]]
        values.append(f"{mean(last):.2f}" if last else "-")
        rows.append([named(row["choice"]), *equal_kl_cells(row), *values, failed_cell(row)])
    return table(columns, rows)


def slow_table(name: str) -> str:
    """Choices at a lower rate: compared with the base there, and with themselves at the default's
    rate."""
    found = records(name)[0]["table"]
    levels = level_names(found[0])
    columns = ["choice", "true score at equal KL: difference from the base", levels]
    columns += ["difference from itself at 2e-4", levels, "true score", "KL", "failed"]
    rows = []
    for row in sorted(found, key=equal_kl_order):
        compared = [*equal_kl_cells(row), *equal_kl_cells(row, "beside")]
        ends = [f"{row['gold']:.2f}", f"{row['kl']:.1f}"]
        rows.append([named(row["choice"]), *compared, *ends, failed_cell(row)])
    return table(columns, rows)


def share(found: dict[str, float]) -> str:
    """A rate of wins in %, and its interval."""
    return f"{found['rate']:.0%} ({found['low']:.0%} to {found['high']:.0%})"


def real_model_table() -> str:
    """A real language model: every run, before and after."""
    columns = ["", "right", "rate", "seed", "episodes", "true score", "score"]
    columns += ["wins", "for equal length", "ties", "KL"]
    rows = []
    for row in rows_of("real_model", "rows"):
        arm = "PPO, VADER" if row["arm"].startswith("rate") else row["arm"]
        if "--dtype fp32" in row["flags"]:
            arm += ", fp32"
        right = f"{row['reward_accuracy']:.0%}" if "reward_accuracy" in row else "-"
        cells = [arm, right, row["lr"], row["seed"], row["episodes"]]
        for kind in ("gold", "score"):
            cells.append(f"{row[f'{kind}_before']:.2f} to {row[f'{kind}_after']:.2f}")
        cells.append(share(row["wins"]["win_rate"]))
        cells.append(share(row["wins"]["controlled_rate"]))
        cells.append(f"{row['wins']['ties']:.0%}")
        cells.append(f"{row['kl_after']:.1f}")
        for kind in ("distinct", "found_end"):
            cells.append(f"{row[f'{kind}_after']:.0%}")
        cells.append(f"{row['length_after']:.1f}")
        rows.append([*cells, f"{row['seconds']:.0f}"])
    return table([*columns, "distinct", "ends", "tokens", "seconds"], rows)


SIX = (  # arm, rate, seed of the runs in benchmark/README.md
    ("PPO, reward model", "3e-5", 3),
    ("RLOO, reward model", "3e-5", 3),
    ("PPO, reward model", "3e-5", 1),
    ("PPO, reward model", "1e-4", 1),
    ("RLOO, reward model", "3e-5", 2),
    ("chat", "1e-4", 1),
)


def real_six_table() -> str:
    """Six runs that show what the others do, too."""
    columns = ["run", "learning rate", "accuracy of the reward model"]
    columns += ["true score", "win rate against the starting model", "KL"]
    of_run = {(row["arm"], row["lr"], row["seed"]): row for row in rows_of("real_six", "rows")}
    rows = []
    for arm, rate, seed in SIX:
        row = of_run[arm, rate, seed]
        name = "RLOO, chat, VADER's own score" if arm == "chat" else f"{arm} {seed}"
        if seed != 3 and "reward model" in arm:
            name += r" \*"  # its labels include the openings of the evaluation
        right = f"{row['reward_accuracy']:.0%}" if "reward_accuracy" in row else "-"
        gold = f"{row['gold_before']:.2f} → {row['gold_after']:.2f}"
        cells = [name, rate, right, gold, share(row["wins"]["win_rate"])]
        rows.append([*cells, f"{row['kl_after']:.1f}"])
    return table(columns, rows)


def real_duels_table() -> str:
    """Wins of one algorithm's policy over another's, on the same openings."""
    columns = ["", "over", "rate", "seed", "wins", "for equal length", "ties"]
    rows = []
    for row in rows_of("real_duels", "duels"):
        cells = [row["arm"], row["other"], row["lr"], row["seed"]]
        cells += [share(row["win_rate"]), share(row["controlled_rate"]), f"{row['ties']:.0%}"]
        rows.append(cells)
    return table(columns, rows)


def real_memory_table() -> str:
    """The most that a run's process had in memory."""
    rows = []
    for row in records("real_memory")[0]["rows"]:
        rows.append([row["arm"], row["episodes"], f"{row['memory'] / 2**30:.1f} GiB"])
    return table(["", "episodes", "peak memory"], rows)


def real_samples_table(count: int | None = None) -> str:
    """The first held-out openings, all or so many, with what the policy of each algorithm's best
    run makes of them."""
    of_arm = {}
    for row in sorted(records("real_samples")[0]["rows"], key=lambda row: row["gold_after"]):
        if row["arm"].endswith("reward model"):
            of_arm[row["arm"]] = {sample["query"]: sample for sample in row["samples"]}
    rows = []
    for query, sample in list(next(iter(of_arm.values())).items())[:count]:
        afters = [samples[query]["response_after"] for samples in of_arm.values()]
        texts = [query, sample["response"], *afters]
        rows.append([" ".join(text.replace("|", "/").split()) for text in texts])
    algorithms = [f"after {arm.partition(',')[0]}" for arm in of_arm]
    return table(["opening", "starting model (PPO's sample)", *algorithms], rows)


def scaling_table() -> str:
    """How the time of an update grows, as ratios to the first point of a sweep."""
    names = {
        "batch_size": "episodes",
        "query_length": "query tokens",
        "response_length": "response tokens",
        "rloo_k": "K",
        "model": "layers x width",
        "processes": "processes",
    }
    rows = []
    for record in records("scaling"):
        device = "GPU" if record["machine"]["gpu"] else "CPU"
        for sweep in dict.fromkeys(row["sweep"] for row in record["rows"]):
            points = [row for row in record["rows"] if row["sweep"] == sweep]
            values = dict.fromkeys(str(row["value"]) for row in points)
            cells = [f"{device}, {record['args']['dtype']}", names[sweep], ", ".join(values)]
            for algorithm in ALGORITHMS:
                mine = [row["ratio"]["total"] for row in points if row["algorithm"] == algorithm]
                cells.append(", ".join(f"{ratio:.2f}" for ratio in mine) or "-")
            rows.append(cells)
    return table(["device, dtype", "what grows", "", "PPO", "RLOO"], rows)


Blocks = dict[str, Callable[[], str]]


class Page(NamedTuple):
    """Where a page finds the records, its tables, and whether it only links their records."""

    results: str
    tables: Blocks
    is_brief: bool = False


def study(**tables: Callable[[], str]) -> Page:
    """A page in studies/."""
    return Page("../results", tables)


README = "benchmark/README.md"
STUDIES = "benchmark/studies"
BLOCKS: dict[str, Page] = {
    README: Page(
        "results",
        {
            "rloo_ppo": rloo_ppo_table,
            "matters": matters_table,
            "real_six": real_six_table,
            "real_samples": functools.partial(real_samples_table, 3),
            "gamble": gamble_table,
            "collapse": collapse_table,
            "times": times_table,
        },
        is_brief=True,
    ),
    f"{STUDIES}/default-run.md": study(embedded=embedded_table, rewards=rewards_table),
    f"{STUDIES}/full-length.md": study(equal_kl=equal_kl_table),
    f"{STUDIES}/short-runs.md": study(ablations=ablations_table),
    f"{STUDIES}/slow-rate.md": study(
        slow=functools.partial(slow_table, "slow"), long=functools.partial(slow_table, "long")
    ),
    f"{STUDIES}/real-model.md": study(
        real_model=real_model_table,
        real_duels=real_duels_table,
        real_samples=real_samples_table,
        real_memory=real_memory_table,
    ),
    f"{STUDIES}/overoptimisation.md": study(
        overoptimisation=overoptimisation_table,
        penalty=penalty_table,
        frontier=frontier_table,
    ),
    f"{STUDIES}/optimum.md": study(optimum=optimum_table, estimated=estimated_table),
    f"{STUDIES}/symptoms.md": study(symptoms=symptoms_table),
    f"{STUDIES}/speed-memory.md": study(
        bars=bars_table, speed=speed_table, memory=memory_table, versions=versions_table
    ),
    f"{STUDIES}/scaling.md": study(scaling=scaling_table),
    f"{STUDIES}/adam.md": study(adam=adam_table),
    f"{STUDIES}/bf16-ratios.md": study(ratio=ratio_table),
}


def write(path: Path, page: Page, check: bool) -> None:
    """Puts the tables between the markers of a file, or only says that they are not there."""
    old = text = path.read_text()
    for name, make in page.tables.items():
        block = f"{make()}\n\n{origin(name, page)}\n"
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        replace = lambda match, block=block: match[1] + block + match[2]  # noqa: E731
        text, count = re.subn(pattern, replace, text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{path} has {count} places for the table {name}")
    if check and text != old:
        raise SystemExit(f"{path} is out of date: python benchmark/readme_tables.py")
    if not check:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help_of_check = "only say whether the tables are up to date"
    parser.add_argument("--check", action="store_true", help=help_of_check)
    check = parser.parse_args().check
    for name, page in BLOCKS.items():
        write(ROOT / name, page, check)
    sys.stdout.write("up to date\n")


if __name__ == "__main__":
    main()
