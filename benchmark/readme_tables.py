"""Write the generated parts of README.md: each detail's line and test, and tables of measured results.

python benchmark/readme_tables.py            # rewrite README.md between its markers
python benchmark/readme_tables.py --check    # exit 1 if that would change it (a test does this)
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
WORK = ("shape", "queries", "query_length", "response_length", "batch_size", "dtype")  # of a record of throughput.py
PPO, RLOO, REWARD, ADAM = "ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py", "tf_adam.py"

# (what is done, script, text of the line that does it, test file, test)
DETAILS = [
    ("TensorFlow's Adam: eps outside the bias correction", ADAM, 'group["eps"] /= ', "tf_adam", "trajectory_and_moments_equal_tensorflow"),
    ("one optimizer for the whole run, eps 1e-5, no weight decay, no gradient clipping", PPO, '"tf": AdamTF', "golden", "ppo_steps_equal_the_original"),
    ("learning rate falls linearly, in ceil(episodes / batch) updates", PPO, 'group["lr"] = args.lr *', "end_to_end", "first_update_starts_from_the_reference_and_schedules_follow"),
    ("padding is a mask; token 0 stands under it, no embedding is resized", PPO, "Padding is token 0 under a False mask", "models", "left_padding_changes_no_logprob_entropy_or_value"),
    ("positions count real tokens only (exclusive cumulative sum of the mask)", PPO, "positions = (mask.cumsum(1) - 1)", "ppo_math", "positions_are_the_exclusive_count_of_real_tokens"),
    ("padding changes no log-probability, value or reward", PPO, "def forward_response", "models", "left_padding_changes_no_logprob_entropy_or_value"),
    ("queries: begin after the first `.`, end with the last, by token id", PPO, "def cut_query", "golden", "query_cut_equals_the_original"),
    ("prefix and suffix for the policy, the raw query for the reward model", PPO, "prefix + query + suffix", "golden", "logprobs_values_and_entropies_equal_the_original"),
    ("responses of a fixed length: no top-k, no top-p, no stop at EOS", PPO, "cdf = (logits / temperature)", "sampler", "sequences_have_their_exact_probabilities_with_and_without_padding"),
    ("log-probabilities are divided by the temperature as well; values are not", PPO, "block.div_(temperature)", "golden", "logprobs_values_and_entropies_equal_the_original"),
    ("no dropout, in training neither", PPO, "module.p = 0.0", "models", "dropout_is_off_in_training_mode_although_the_config_has_it"),
    ("logits at response positions only", PPO, ".index_select(0, at)", "golden", "logits_and_reference_logprobs_equal_the_original"),
    ("the score is that of the response truncated at the first `.` from index 16", PPO, "def truncate", "golden", "truncation_equals_the_original"),
    ("without a `.` there, -1 replaces the score", PPO, "def penalize", "golden", "penalty_equals_the_original"),
    ("the reward is read at the last real token", PPO, "Rewards (n,) in fp32 of the texts whose last tokens", "models", "reward_is_gain_times_the_plain_classifiers_logit_plus_bias"),
    ("reward = gain * head + bias, both trained", PPO, "self.gain = nn.Parameter", "golden", "reward_training_equals_the_original"),
    ("KL is paid at every token, truncated or not; the score comes at the last", PPO, "def token_rewards", "ppo_math", "token_rewards_are_the_kl_penalty_plus_the_score_at_the_last_kept_token"),
    ("rewards are whitened without shifting their mean", PPO, "whiten(rewards, mask, shift_mean=False)", "golden", "ppo_steps_equal_the_original"),
    ("whitening: biased variance, eps 1e-8", PPO, "torch.rsqrt(variance + 1e-8)", "ppo_math", "whiten_gives_the_table_of_the_n_implementation_details"),
    ("generalised advantage estimation, bootstrapping 0 at the end", PPO, "def gae", "ppo_math", "gae_ends_at_the_last_kept_token"),
    ("advantages are whitened per minibatch and rank, inside the epochs", PPO, "whiten(advantages, mask), returns", "golden", "ppo_steps_equal_the_original"),
    ("value head on the policy's trunk, starting at zero", PPO, "x * 0 for name", "end_to_end", "first_update_starts_from_the_reference_and_schedules_follow"),
    ("clipped value loss around the old values, factor 0.5", PPO, "values_clipped = old_values", "ppo_math", "loss_gradients_and_metrics_equal_a_plain_loop"),
    ("clipped policy loss", PPO, "policy_loss, policy_loss_clipped = ", "ppo_math", "clipped_tokens_have_exactly_no_gradient"),
    ("the mean is over all tokens, however gradients accumulate", PPO, "accelerator.backward(loss * scale)", "ppo_math", "gradient_accumulation_equals_the_large_batch"),
    ("shuffles: RandomState(seed + 100003 rank), a new permutation each epoch", PPO, "100_003 * rank", "golden", "ppo_steps_equal_the_original"),
    ("the KL coefficient adapts to the global KL, after the update, by the global batch", PPO, "def adapt_kl_coef", "golden", "ppo_steps_equal_the_original"),
    ("statistics are means over minibatches, epochs and ranks; var_explained after that", PPO, 'metrics["ppo/val/var_explained"]', "golden", "ppo_steps_equal_the_original"),
    ("reward head ~ N(0, 1 / sqrt(d + 1))", REWARD, "nn.init.normal_", "golden", "reward_training_equals_the_original"),
    ("cross entropy over the N responses, mean over the batch", REWARD, "nn.functional.cross_entropy", "golden", "reward_training_equals_the_original"),
    ("one epoch in rank 0's order, strided over ranks, linear decay by labels seen", REWARD, "[rank::world]", "golden", "reward_training_equals_the_original"),
    ("gain and bias set before and after, on untruncated samples of the reference", REWARD, "def normalize", "golden", "reward_normalisation_equals_the_original"),
]  # fmt: skip


def details_table() -> str:
    """Every detail with the line that has it and the test that holds it. Fails if either is not there."""
    rows = ["| detail | line | test |", "| --- | --- | --- |"]
    for what, script, text, test_file, test in DETAILS:
        lines = (ROOT / script).read_text().splitlines()
        number = next((i for i, line in enumerate(lines, 1) if text in line), None)
        test_path = f"tests/test_{test_file}.py"
        if number is None or f"def test_{test}(" not in (ROOT / test_path).read_text():
            raise SystemExit(f"{script}: {text!r} or {test_path}: test_{test} is not there")
        rows.append(f"| {what} | [{script}:{number}]({script}#L{number}) | [{test}]({test_path}) |")
    return "\n".join(rows)


def embedded_table() -> str:
    """The embedded default, from results/embedded-tiny.json."""
    rows = json.loads((RESULTS / "embedded-tiny.json").read_text())["rows"]
    table = ["| | seed | VADER, reference | VADER, policy | KL | distinct samples | reward model's accuracy |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        table.append(
            f"| {row['algorithm']} | {row['seed']} | {row['vader_before']:.2f} | {row['vader_after']:.2f} | "
            f"{row['kl']:.1f} | {row['distinct']:.1%} | {row['accuracy']:.2f} |"
        )
    return "\n".join(table)


def ratio_table() -> str:
    """RLOO's first ratios in bf16 by where the old log-probabilities come from, from results/bf16_ratio-*.json."""
    names = {
        "sampler": "the sampler",
        "other rows": "a forward pass over other rows",
        "same rows": "**the same rows (ours)**",
    }
    table = ["| model, response | old log-probabilities from | logits | largest error of the first ratio | clipped |"]
    table.append("| --- | --- | --- | --- | --- |")
    for tag in ("tiny", "gpt2", "gpt2-53"):
        for row in json.loads((RESULTS / f"bf16_ratio-{tag}.json").read_text())["rows"]:
            if (
                row["algorithm"] == "rloo"
                and row["dtype"] == "bf16"
                and (row["head"] == "fp32" or row["source"] == "sampler")
            ):
                head = "fp32" if row["head"] == "fp32" else "bf16"
                table.append(
                    f"| {row['model']}, {row['length']} | {names[row['source']]} | {head} | {row['ratio_max_error']:.2g} "
                    f"| {row['clipped']:.0%} |"
                )
    return "\n".join(table)


def optimum_table() -> str:
    """How near both come to the exact optimum, from results/optimum-enumerated.json."""
    table = ["| | seed | J, reference | J, trained | J*, exact | gap |", "| --- | --- | --- | --- | --- | --- |"]
    for row in json.loads((RESULTS / "optimum-enumerated.json").read_text())["rows"]:
        values = " | ".join(f"{row[name]:.4f}" for name in ("j_ref", "j", "j_star"))
        table.append(f"| {row['algorithm'].upper()} | {row['seed']} | {values} | {row['gap']:.2%} |")
    return "\n".join(table)


def memory_table() -> str:
    """Memory and speed of an update of each algorithm, as ratios to PPO, from results/memory_speed-*.json."""
    names = {
        "ppo": "PPO",
        "ppo-value-model": "PPO, separate value model",
        "rloo-2": "RLOO, K = 2",
        "rloo-4": "RLOO, K = 4",
    }
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted(RESULTS.glob("memory_speed-*.json"), reverse=True):
        record = json.loads(path.read_text())
        shape = f"{record['args']['shape']}, {record['args']['dtype']}, {record['args']['batch_size']}"
        for row in record["rows"]:
            rows.setdefault((shape, row["variant"]), {}).update(row)
    table = ["| shape, dtype, episodes | | peak memory | episodes per second |", "| --- | --- | --- | --- |"]
    for (shape, variant), row in rows.items():
        memory, speed = (f"{row[name]:.2f}" if name in row else "" for name in ("memory_ratio", "speed_ratio"))
        table.append(f"| {shape} | {names[variant]} | {memory} | {speed} |")
    return "\n".join(table)


def estimated_table() -> str:
    """What trained policies of the embedded default reach of an estimated J*, from results/optimum-estimated-*.json."""
    table = [
        "| | beta | J, reference | J, trained | J*, estimated from below | KL |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("ppo", "rloo"):
        row = json.loads((RESULTS / f"optimum-estimated-{name}.json").read_text())["rows"][0]
        table.append(
            f"| {name.upper()} | {row['beta']} | {row['reference_reward']:.2f} | {row['j_policy']:.2f} +- "
            f"{row['j_policy_standard_error']:.2f} | {row['j_star']:.2f} +- {row['standard_error']:.2f} | {row['kl_policy']:.1f} |"
        )
    return "\n".join(table)


def work(args: dict[str, Any]) -> str:
    """A name for what a record of throughput.py has measured."""
    if (args["shape"], args["queries"]) == ("tiny", "tiny"):
        return f"embedded default, {args['dtype']}"
    queries = {"full": f"{args['query_length']}", "book": f"book ({args['query_length']})"}[args["queries"]]
    return f"{args['shape']}, {queries} + {args['response_length']}, {args['batch_size']}, {args['dtype']}"


def throughput_records() -> list[dict[str, Any]]:
    """results/throughput-*.json in which the plain version is as it comes."""
    paths = sorted(RESULTS.glob("throughput-*.json"), key=lambda path: ("trl" in path.name, path.name))
    records = [json.loads(path.read_text()) for path in paths]
    return [record for record in records if record["args"]["plain_matmul"] == "default"]


def speed_table() -> str:
    """Updates against plain PyTorch, as ratios of one run, from results/throughput-*.json."""
    table = ["| tokens, episodes, dtype | algorithm | sample | score | optimise | whole update | episodes per second |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- |")
    for record in throughput_records():
        for algorithm, ratios in record.get("ratios", {}).items():  # a record of memory has none
            ours = next(row for row in record["rows"] if row["contender"] == f"ours-{algorithm}")
            values = " | ".join(f"{ratios[phase]:.1f}" for phase in ("sample", "score", "optimise", "total"))
            speed = f"{ours['episodes_per_second']:.3g}"
            table.append(f"| {work(record['args'])} | {algorithm.upper()} | {values} | {speed} |")
    return "\n".join(table)


def bars() -> dict[tuple[Any, ...], dict[str, float]]:
    """What the records of throughput.py know of each work and algorithm; equal work comes together."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in throughput_records():
        args, rows = record["args"], {row["contender"]: row for row in record["rows"]}
        for algorithm in ("ppo", "rloo"):
            ours = rows.get(f"ours-{algorithm}")
            if not ours:
                continue
            values = found.setdefault((*(args[name] for name in WORK), algorithm), {})
            for other in ("plain", "plain-fp32", "trl"):
                row = rows.get(f"{other}-{algorithm}", {})
                if "seconds" in row:
                    values[f"speed {other}"] = row["seconds"]["total"] / ours["seconds"]["total"]
                if "peak_bytes" in row:
                    values[f"memory {other}"] = ours["peak_bytes"] / row["peak_bytes"]
            if "seconds" in ours:
                values.setdefault("floor", ours["fraction_of_floor"]["total"])
                if algorithm == "rloo" and "ours-ppo" in rows:
                    values["speed ppo"] = rows["ours-ppo"]["seconds"]["total"] / ours["seconds"]["total"]
            if args["dtype"] == "fp32" and "speed plain" in values:
                values["speed plain-fp32"] = values["speed plain"]
    return found


def bars_table() -> str:
    """Ours against plain PyTorch in fp32 and in the same dtype, our PPO, TRL and the floor, and its memory."""
    columns = {
        "speed plain-fp32": "than plain, fp32",
        "speed plain": "plain, same dtype",
        "speed trl": "TRL",
        "speed ppo": "our PPO",
        "floor": "share of the floor",
        "memory plain": "peak memory, of plain",
        "memory trl": "of TRL",
    }
    table = [f"| tokens, episodes, dtype | {' | '.join(columns.values())} |", f"| --- |{' --- |' * len(columns)}"]
    for key, values in bars().items():
        args = dict(zip(WORK, key, strict=False))
        cells = [f"{values[column]:.2f}" if column in values else "-" for column in columns]
        table.append(f"| {work(args)}, {key[-1].upper()} | {' | '.join(cells)} |")
    return "\n".join(table)


def scaling_table() -> str:
    """How the time of an update grows, as ratios to the first point of a sweep, from results/scaling-*.json."""
    table = ["| device, dtype | what grows | | PPO | RLOO |", "| --- | --- | --- | --- | --- |"]
    names = {"batch_size": "episodes", "query_length": "query tokens", "response_length": "response tokens"}
    names |= {"rloo_k": "K", "model": "layers x width", "processes": "processes"}
    for path in sorted(RESULTS.glob("scaling-*.json")):
        record = json.loads(path.read_text())
        what = f"{'GPU' if record['machine']['gpu'] else 'CPU'}, {record['args']['dtype']}"
        for name in dict.fromkeys(row["sweep"] for row in record["rows"]):
            rows = [row for row in record["rows"] if row["sweep"] == name]
            points = ", ".join(dict.fromkeys(str(row["value"]) for row in rows))
            cells = []
            for algorithm in ("ppo", "rloo"):
                ratios = [f"{row['ratio']['total']:.2f}" for row in rows if row["algorithm"] == algorithm]
                cells.append(", ".join(ratios) or "-")
            table.append(f"| {what} | {names[name]} | {points} | {' | '.join(cells)} |")
    return "\n".join(table)


BLOCKS = {
    "estimated": estimated_table,
    "details": details_table,
    "embedded": embedded_table,
    "ratio": ratio_table,
    "optimum": optimum_table,
    "memory": memory_table,
    "speed": speed_table,
    "bars": bars_table,
}
if any(RESULTS.glob("scaling-*.json")):
    BLOCKS["scaling"] = scaling_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    check, path = parser.parse_args().check, ROOT / "README.md"
    old = text = path.read_text()
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if not re.search(pattern, text, re.S):
            raise SystemExit(f"README.md has no markers for {name}")
        block = make()
        text = re.sub(pattern, lambda match, block=block: match[1] + block + "\n" + match[2], text, flags=re.S)
    if check and text != old:
        raise SystemExit("README.md is out of date: python benchmark/readme_tables.py")
    if not check:
        path.write_text(text)
        sys.stdout.write("README.md is up to date\n")


if __name__ == "__main__":
    main()
