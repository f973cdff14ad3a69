"""Write the generated parts of README.md (each detail's line and test, the size of the diff) and of benchmark/README.md.

python benchmark/readme_tables.py            # rewrite both between their markers
python benchmark/readme_tables.py --check    # exit 1 if that would change them (a test does this)

DETAILS is also what `pytest tests/test_readme.py --faults` works with: it puts every row's fault into its line, in a
copy of the project, and then the row's test has to fail.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
WORK = ("shape", "queries", "query_length", "response_length", "batch_size", "dtype")  # of a record of throughput.py
PPO, RLOO, REWARD, ADAM = "ppo_rlhf.py", "rloo_rlhf.py", "train_reward.py", "tf_adam.py"
TWIN, TWINS = "twin::a_run_equals_its_twin[ppo]", "twin::a_run_equals_its_twin[ppo, eos, two processes]"
TWIN_RLOO, TWIN_REWARD = "twin::a_run_equals_its_twin[rloo]", "twin::a_run_equals_its_twin[best of three]"
TWIN_CRITIC = "twin::a_run_equals_its_twin[ppo, critic from the reward model]"
TWINS_CRITIC = "twin::a_run_equals_its_twin[ppo, critic from the policy, two processes]"
TWIN_LAYER = "twin::a_run_equals_its_twin[rloo, upper layer]"
TWINS_REWARD = "twin::a_run_equals_its_twin[preferences, eos, two processes]"
STEPS = "golden::ppo_steps_equal_the_original"


class Detail(NamedTuple):
    """What is done; the script; a text that stands in one of its lines, which does it; a fault to put there; the test."""

    what: str
    script: str
    text: str
    fault: str
    test: str

    @property
    def path(self) -> str:
        """The test's file."""
        return f"tests/test_{self.test.partition('::')[0]}.py"

    @property
    def name(self) -> str:
        """The test's name, without its parameter."""
        return "test_" + self.test.partition("::")[2].partition("[")[0]

    @property
    def node(self) -> str:
        """The test as pytest has it."""
        return f"{self.path}::test_{self.test.partition('::')[2]}"


# fmt: off
DETAILS = [Detail(*row) for row in (
    ("TensorFlow's Adam: eps outside the bias correction", ADAM, 'group["eps"] /= (1 - group["betas"][1] ** group["t"]) ** 0.5', 'group["eps"] /= 1', "tf_adam::trajectory_and_moments_equal_tensorflow"),
    ("it is the optimizer, with no weight decay and no clipping of gradients", ADAM, '"tf": AdamTF, "torch"', '"tf": torch.optim.AdamW, "torch"', TWIN),
    ("the learning rate falls linearly from update to update", PPO, "decay = 1 - update / num_updates", "decay = 1 - update / (num_updates + 1)", TWIN),
    ("queries begin after the first `.` and end with the last, by token id", PPO, "tokens = tokens[tokens.index(start) + 1 :]", "tokens = tokens[tokens.index(start) :]", "golden::query_cut_equals_the_original"),
    ("prefix and suffix are for the policy, the raw query for the reward model", PPO, '{"input_ids": begin + query,', '{"input_ids": begin + query + suffix,', TWIN),
    ("padding is a mask, token 0 stands under it, positions count real tokens, no embedding is resized", PPO, "[[False] * (width - len(x))", "[[True] * (width - len(x))", "sampler::cached_sampling_draws_what_full_forward_passes_give"),
    ("responses of a fixed length: no top-k, no top-p, no stop at EOS", PPO, "probs = (logits / temperature).softmax(-1)", "probs = logits.softmax(-1)", "sampler::cached_sampling_draws_what_full_forward_passes_give"),
    ("sampling is a function of (seed, update, row)", PPO, "default_rng([seed, 1, update])", "default_rng([seed, 2, update])", TWIN),
    ("log-probabilities are divided by the temperature as well; values are not", PPO, "logits.div_(temperature).log_softmax(-1)", "logits.log_softmax(-1)", "golden::logprobs_values_and_entropies_equal_the_original"),
    ("a token is predicted by the state before it, the first by the query's last", PPO, "at[:, :, 0] = last[:, :1]", "at[:, :, 0] = last[:, 1:]", "golden::logprobs_values_and_entropies_equal_the_original"),
    ("logits are fp32 in bf16 runs too, as only the trunk is autocast", PPO, 'model.base_model.autocast = args.dtype == "bf16"', "model.base_model.autocast = False", "models::under_bf16_the_trunk_is_autocast_and_the_heads_are_fp32"),
    ("old log-probabilities come from the very passes of the update: the first ratio is 1", PPO, "for group in micro_batches(minibatch, trees, args.micro_batch_size)]", "for group in micro_batches(minibatch, trees, 1)]", "sampler::first_ratio_is_exactly_one"),
    ("the score is that of the response truncated at the first `.` from index 16", PPO, "& (index >= after)", "& (index > after)", "golden::truncation_and_penalty_equal_the_original"),
    ("without a `.` there, -1 replaces the score", PPO, 'scores = torch.where(batch["found"], raw.sum(1), endless)', "scores = raw.sum(1)", TWIN),
    ("the reward is read at the last real token", PPO, "reward.score(hidden_at(reward, last[:, 1:].flatten(), *inputs))", "reward.score(hidden_at(reward, first[:, 1:].flatten(), *inputs))", "golden::reward_scores_equal_the_original"),
    ("reward = gain * logit + bias", PPO, "= gain * logits.view(len(rows), k).cpu() + bias", "= gain * (logits.view(len(rows), k).cpu() + bias)", TWIN),
    ("KL is paid for every token, truncated or not", PPO, "stays if args.mask_truncated else torch.ones_like(stays), responses", "stays, responses", TWIN),
    ("the score comes with the last token", PPO, "(mask.flip(1).cumsum(1).flip(1) == 1)", "(mask.cumsum(1) == 1)", TWIN),
    ("rewards are whitened without shifting their mean", PPO, "whiten(rewards, mask, shift_mean=False, total=total)", "whiten(rewards, mask, total=total)", STEPS),
    ("whitening: biased variance, eps 1e-8", PPO, "(x - mean) * torch.rsqrt(variance + 1e-8)", "(x - mean) * torch.rsqrt(variance)", "ppo_math::whiten_gives_the_table_of_the_n_implementation_details"),
    ("generalised advantage estimation, with 0 after the end", PPO, "advantage = next_value = torch.zeros_like(values[:, 0])", "advantage = next_value = values[:, -1]", "ppo_math::gae_discounts_future_errors_by_gamma_times_lambda"),
    ("advantages are whitened per minibatch and rank, inside the epochs", PPO, "whiten(advantages, mask, total=total) if args.whiten_advantages", "advantages if args.whiten_advantages", STEPS),
    ("value head on the policy's trunk, starting at zero", PPO, "self.value_head.weight.data.zero_(), ", "", TWIN),
    ("clipped value loss around the old values, factor 0.5", PPO, "0.5 * torch.maximum(value_loss, value_loss_clipped)", "0.5 * value_loss", STEPS),
    ("clipped policy loss", PPO, "torch.maximum(policy_loss, policy_loss_clipped)", "policy_loss", TWIN),
    ("the mean is over all tokens of all ranks, however gradients accumulate", PPO, "* accelerator.num_processes / accelerator.reduce(mask.sum())", "/ mask.sum()", TWINS),
    ("shuffles: RandomState(seed + 100003 rank), a new permutation each epoch", PPO, "np.random.RandomState(args.seed + 100_003 * rank)", "np.random.RandomState(args.seed)", TWINS),
    ("the KL coefficient adapts to the KL of all ranks, after the update, by the global batch", PPO, "* (args.batch_size / args.kl_horizon)", "* (episodes / args.kl_horizon)", TWINS),
    ("its error is clipped to 0.2", PPO, "min(max(kl / args.kl_target - 1, -0.2), 0.2)", "(kl / args.kl_target - 1)", TWIN),
    ("RLOO: the baseline is the mean of the other K - 1 responses to the query", RLOO, "/ (rewards.shape[1] - 1)", "/ rewards.shape[1]", "ppo_math::leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries"),
    ("RLOO: the KL of the whole response is in its reward", RLOO, "scaled.view(n, -1) - kl_coef * penalty.sum(2)", "scaled.view(n, -1)", TWIN_RLOO),
    ("RLOO: the ratio is that of the whole response, unless --token_level", RLOO, "    if not token_level:", "    if token_level:", TWIN_RLOO),
    ("RLOO: K responses share their query's cells and do not see each other", RLOO, "sees = (branch == 0).unsqueeze(1) | (branch.unsqueeze(1) == branch.unsqueeze(2))", "sees = branch.unsqueeze(1) <= branch.unsqueeze(2)", TWIN_RLOO),
    ("reward head ~ N(0, 1 / sqrt(d + 1))", REWARD, "std=1 / math.sqrt(model.score.in_features + 1)", "std=0.02", TWIN_REWARD),
    ("cross entropy over the N responses, mean over the batch", REWARD, "loss * accelerator.gradient_accumulation_steps / len(labels)", "loss / len(labels)", "golden::reward_training_equals_the_original"),
    ("gain and bias are trained as well", REWARD, "self.gain, self.bias = (nn.Parameter(torch.tensor([x], device=lm.device)) for x in (1.0, 0.0))", "self.gain, self.bias = (nn.Parameter(torch.tensor([x], device=lm.device), False) for x in (1.0, 0.0))", "golden::reward_training_equals_the_original"),
    ("one epoch in rank 0's order, strided over ranks", REWARD, "[rank::world]", "[::world]", TWINS_REWARD),
    ("linear decay by labels seen", REWARD, "decay = 1 - start / len(labels)", "decay = 1 - update / num_updates", TWIN_REWARD),
    ("gain and bias are set before and after, from untruncated samples of the reference", REWARD, "raw.std(correction=0)", "raw.std()", "golden::reward_normalisation_equals_the_original"),
    ("`--kl_estimator` k1, k2, k3, abs or full: what is paid for (Schulman 2020; TRL's kl_penalty); logs and coefficient keep k1", PPO, "(p.exp() * (p - q)).sum(-1)", "(p.exp() * (p - q)).mean(-1)", TWIN_CRITIC),
    ("`--score_norm`, over the global batch (TRL's use_score_scaling, use_score_norm)", RLOO, '(scores - mean * (args.score_norm == "whiten"))', "(scores - mean)", TWIN_LAYER),
    ("`--score_clip` after it (DeepSpeed-Chat's clip_reward_value)", PPO, ".clamp(-score_clip, score_clip)", ".clamp(max=score_clip)", TWIN_CRITIC),
    ("`--target_kl`: no more steps on this batch (TRL's early_stopping)", PPO, "        if args.target_kl and reduce_means", "        if not args.target_kl and reduce_means", TWINS_CRITIC),
    ("`--no-whiten_advantages` (DeepSpeed-Chat)", PPO, "if args.whiten_advantages else advantages", "if args.whiten_advantages else whiten(advantages, mask)", TWIN_CRITIC),
    ("`--whiten global` (trlX)", PPO, 'torch.sum if args.whiten == "rank"', "torch.sum if True", TWINS_CRITIC),
    ("`--adam_betas`, `--weight_decay` of matrices only, decoupled (Llama 2)", ADAM, "args.weight_decay * is_matrix", "args.weight_decay", TWIN_CRITIC),
    ("`--max_grad_norm` (Llama 2)", PPO, "args.max_grad_norm or math.inf", "math.inf", TWIN_CRITIC),
    ("`--lr_schedule`, `--lr_warmup`: the first update has lr / (n + 1) (InstructGPT)", PPO, "min(1, (update + 1) / (args.lr_warmup + 1))", "min(1, update / (args.lr_warmup + 1))", TWIN_CRITIC),
    ("`--critic policy`, `--critic_lr`: a trunk of its own (DeepSpeed-Chat, Qwen)", ADAM, '"initial_lr": rates[is_critic]', '"initial_lr": rates[False]', TWINS_CRITIC),
    ("`--critic reward`: it starts as the reward model, whose head is the value head (InstructGPT)", PPO, 'alpha=getattr(config, "reward_gain", 1.0)', "alpha=1.0", TWIN_CRITIC),
    ("`--critic_warmup`: the policy stands still, to the bit (Qwen)", PPO, 'group["is_critic"] or update >= args.critic_warmup', "True", TWIN_CRITIC),
    ("`--ptx_coef`: pretraining loss per token in the same step (InstructGPT)", PPO, "loss + weight * ptx", "loss - weight * ptx", TWINS_CRITIC),
    ("`--ema`: averaged weights in policy_ema/ (InstructGPT)", PPO, "mean.lerp_(p.detach(), 1 - args.ema)", "mean.lerp_(p.detach(), args.ema)", TWINS_CRITIC),
    ("`--top_p`: draws from the nucleus (Qwen); ratios, entropy and KL are of the whole distribution, so the logged KL is biased upwards", RLOO, "(high.cumsum(1) - high < top_p).sum(1, keepdim=True) - 1", "(high.cumsum(1) < top_p).sum(1, keepdim=True) - 1", TWIN_LAYER),
    ("`--unfrozen_layers`: the lower ones are shared with the reference (trlX's hydra)", RLOO, "{id(p): p for p in lm.parameters() if not p.requires_grad}", "{}", "options::frozen_layers_are_shared_with_the_reference_and_a_whole_one_gives_the_same"),
    ("`--lora_rank`: the reference is the policy without adapters (TRL with peft)", PPO, '"lora_alpha": args.lora_alpha', '"lora_alpha": 1', "options::lora_starts_at_the_reference_and_its_folder_is_the_trained_policy"),
    ("`--eval_every`: eval/score and eval/kl on the way (TRL)", RLOO, "if args.eval_every and (update + 1) % args.eval_every == 0:", "if args.eval_every and update % args.eval_every == 0:", TWIN_LAYER),
    ("rewards of tokens from a function (trlX's dense scores); the penalty and the scaling act at the last", PPO, "scaled - raw[:, :-1].sum(1)", "scaled", "options::rewards_of_tokens_stay_in_place_or_are_summed"),
    ("an answer that is only EOS: `--truncate_after 1` pays it the penalty (DeepSpeed-Chat leaves them out)", PPO, "hit.cumsum(1) - hit.long() == 0, hit", "hit.cumsum(1) == 0, hit", TWINS),
)]
# fmt: on
# The records that make the tables: others in results/ are left alone
RECORDS = {
    "embedded": ["embedded-tiny"],
    "ratio": ["bf16_ratio-tiny", "bf16_ratio-gpt2"],
    "optimum": ["optimum-enumerated"],
    "estimated": ["optimum-estimated-ppo", "optimum-estimated-rloo"],
    "memory": ["memory_speed-tiny-fp32", "memory_speed-gpt2-fp32"],
    "speed": [
        "throughput-tiny-tiny-fp32",
        "throughput-tiny-tiny-bf16",
        "throughput-gpt2-book-fp32",
        "throughput-gpt2-book-bf16",
        "throughput-gpt2-book-fp32-memory",
    ],
    "scaling": ["scaling-cpu-fp32"],
    "adam": ["adam-first-update"],
    "ablations": ["ablations-tiny"],
    "overoptimisation": ["overoptimisation-tiny"],
}
RECORDS |= {"bars": RECORDS["speed"], "rewards": RECORDS["ablations"]}


def records(table: str) -> list[dict[str, Any]]:
    """The records of a table."""
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in RECORDS[table]]


def origin(table: str) -> str:
    """Which version of the scripts made the records of a table, and where; records without a version are of 0.2.0."""
    groups: dict[str, list[str]] = {}
    for name, record in zip(RECORDS[table], records(table), strict=True):
        machine = record["machine"]
        where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
        changed = " with changes" if record["scripts_changed_since"] else ""
        version = f"{record.get('version', '0.2.0')} at {record['commit'][:7]}{changed}"
        groups.setdefault(f"{version} ({where})", []).append(f"[{name}](results/{name}.json)")
    return "Measured: " + "; ".join(f"{where}: {', '.join(links)}" for where, links in groups.items()) + "."


def details_table() -> str:
    """Every detail with the line that has it and the test that holds it. Fails if either is not there, or twice."""
    rows = ["| detail | line | test |", "| --- | --- | --- |"]
    for detail in DETAILS:
        lines = (ROOT / detail.script).read_text().splitlines()
        numbers = [i for i, line in enumerate(lines, 1) if detail.text in line]
        if len(numbers) != 1:
            raise SystemExit(f"{detail.script}: {detail.text!r} is in lines {numbers}")
        if f"def {detail.name}(" not in (ROOT / detail.path).read_text():
            raise SystemExit(f"{detail.path}: {detail.name} is not there")
        where, number = detail.script, numbers[0]
        test = detail.name.removeprefix("test_")
        rows.append(f"| {detail.what} | [{where}:{number}]({where}#L{number}) | [{test}]({detail.path}) |")
    return "\n".join(rows)


def embedded_table() -> str:
    """The embedded default, from results/embedded-tiny.json."""
    (record,) = records("embedded")
    table = ["| | seed | VADER, reference | VADER, policy | KL | distinct samples | reward model's accuracy |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in record["rows"]:
        table.append(
            f"| {row['algorithm']} | {row['seed']} | {row['vader_before']:.2f} | {row['vader_after']:.2f} | "
            f"{row['kl']:.1f} | {row['distinct']:.1%} | {row['accuracy']:.2f} |"
        )
    return "\n".join(table)


def ablations_table() -> str:
    """Every choice, PPO's by their effect and then RLOO's, from results/ablations-tiny.json."""
    (record,) = records("ablations")
    table = ["| choice | gold | less the default's | KL | less the default's | proxy | distinct | failed |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = sorted(
        record["table"],
        key=lambda row: ("RLOO" in row["choice"], row["choice"] != "RLOO, K 4", -row["gold_difference"]),
    )
    for row in rows:
        cells = [row["choice"]]
        for kind, digits in (("gold", 2), ("kl", 1)):
            x, spread = row[f"{kind}_difference"], row[f"{kind}_interval"]
            cell = f"{x:+.{digits}f} ± {spread:.{digits}f}" if spread is not None else "-"
            cells += [f"{row[kind]:.{digits}f}", f"**{cell}**" if spread is not None and abs(x) > spread else cell]
        table.append(f"| {' | '.join(cells)} | {row['proxy']:.2f} | {row['distinct']:.0%} | {row['failed']:.0%} |")
    return "\n".join(table)


def rewards_table() -> str:
    """The reward models of the ablations, before and after their training."""
    table = [
        "| seed | mean and deviation of the new model | of the trained one | gain | bias | accuracy | best constant |"
    ]
    table.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in records("rewards")[0]["rewards"]:
        spread = " | ".join(f"{row[x]['mean']:.2f}, {row[x]['std']:.2f}" for x in ("before", "after"))
        rest = " | ".join(f"{row[x]:.2f}" for x in ("gain", "bias", "test/accuracy", "test/constant"))
        table.append(f"| {row['seed']} | {spread} | {rest} |")
    return "\n".join(table)


def overoptimisation_table() -> str:
    """Where gold scores are highest and where they end, from results/overoptimisation-tiny.json; means over seeds."""
    (record,) = records("overoptimisation")
    table = ["| labels | | coefficient | best gold | at KL | proxy there | gold at the end | KL | proxy |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in record["table"]:
        groups.setdefault((row["labels"], row["algorithm"], row["kl_coef"]), []).append(row)
    for (labels, name, coef), rows in sorted(groups.items(), key=lambda x: (x[0][0] or 10**9, "of" in x[0][1])):
        kinds = ("gold_top", "kl_top", "proxy_top", "gold_end", "kl_end", "proxy_end")
        means = {kind: sum(row[kind] for row in rows) / len(rows) for kind in kinds}
        cells = " | ".join(f"{x:.{1 if kind[:2] == 'kl' else 2}f}" for kind, x in means.items())
        table.append(f"| {labels or 'all'} | {name} | {'-' if coef is None else coef} | {cells} |")
    return "\n".join(table)


def adam_table() -> str:
    """How far each epoch of a first update goes, from results/adam-first-update.json."""
    names = {"original": "TensorFlow's, recorded", "tf": "ours", "torch": "PyTorch's"}
    table = [
        "| rollouts | lr | Adam | approxkl after 1, 2, 3 steps | clip fraction |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in records("adam")[0]["rows"]:
        kl, clip = (", ".join(f"{x:.3g}" for x in row[kind][1:]) for kind in ("approxkl", "clipfrac"))
        table.append(f"| {row['work']} | {row['lr']:g} | {names[row['adam']]} | {kl} | {clip} |")
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
    for record in records("ratio"):
        for row in record["rows"]:
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
    for row in records("optimum")[0]["rows"]:
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
    for record in records("memory"):
        shape = f"{record['args']['shape']}, {record['args']['dtype']}, {record['args']['batch_size']}"
        for row in record["rows"]:
            rows.setdefault((shape, row["variant"]), {}).update(row)
    table = ["| shape, dtype, episodes | | peak memory | episodes per second |", "| --- | --- | --- | --- |"]
    for (shape, variant), row in rows.items():
        memory, speed = (f"{row[name]:.2f}" if name in row else "-" for name in ("memory_ratio", "speed_ratio"))
        table.append(f"| {shape} | {names[variant]} | {memory} | {speed} |")
    return "\n".join(table)


def estimated_table() -> str:
    """What trained policies of the embedded default reach of an estimated J*, from results/optimum-estimated-*.json."""
    table = [
        "| | beta | J, reference | J, trained | J*, estimated from below | KL |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, record in zip(("ppo", "rloo"), records("estimated"), strict=True):
        row = record["rows"][0]
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


def speed_table() -> str:
    """Updates against plain PyTorch, as ratios of one run, from results/throughput-*.json."""
    table = ["| tokens, episodes, dtype | algorithm | sample | score | optimise | whole update | episodes per second |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- |")
    for record in records("speed"):
        for algorithm, ratios in record.get("ratios", {}).items():  # a record of memory has none
            ours = next(row for row in record["rows"] if row["contender"] == f"ours-{algorithm}")
            values = " | ".join(f"{ratios[phase]:.1f}" for phase in ("sample", "score", "optimise", "total"))
            speed = f"{ours['episodes_per_second']:.3g}"
            table.append(f"| {work(record['args'])} | {algorithm.upper()} | {values} | {speed} |")
    return "\n".join(table)


def bars() -> dict[tuple[Any, ...], dict[str, float]]:
    """What the records of throughput.py know of each work and algorithm; equal work comes together."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in records("speed"):
        args, rows = record["args"], {row["contender"]: row for row in record["rows"]}
        for algorithm in ("ppo", "rloo"):
            ours = rows.get(f"ours-{algorithm}")
            if not ours:
                continue
            values = found.setdefault((*(args[name] for name in WORK), algorithm), {})
            for other in ("plain", "plain-fast", "trl", "trl-fast"):
                row = rows.get(f"{other}-{algorithm}", {})
                if "seconds" in row:
                    values[f"speed {other}"] = row["seconds"]["total"] / ours["seconds"]["total"]
                if "peak_bytes" in row:
                    values[f"memory {other}"] = ours["peak_bytes"] / row["peak_bytes"]
            if "seconds" in ours:
                values.setdefault("floor", ours["fraction_of_floor"]["total"])
                if algorithm == "rloo" and "ours-ppo" in rows:
                    values["speed ppo"] = rows["ours-ppo"]["seconds"]["total"] / ours["seconds"]["total"]
    return found


def bars_table() -> str:
    """The share of the floor, then ours against plain PyTorch, TRL and our PPO, and its memory."""
    columns = {
        "floor": "share of the floor",
        "speed plain": "than plain",
        "speed plain-fast": "plain, fast",
        "speed trl": "TRL",
        "speed trl-fast": "TRL, fast",
        "speed ppo": "our PPO",
        "memory plain": "peak memory, of plain",
        "memory trl": "of TRL",
    }
    columns = {name: title for name, title in columns.items() if any(name in values for values in bars().values())}
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
    for record in records("scaling"):
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
    "README.md": {"details": details_table},
    "benchmark/README.md": {
        "embedded": embedded_table,
        "ablations": ablations_table,
        "overoptimisation": overoptimisation_table,
        "adam": adam_table,
        "rewards": rewards_table,
        "ratio": ratio_table,
        "optimum": optimum_table,
        "estimated": estimated_table,
        "memory": memory_table,
        "speed": speed_table,
        "bars": bars_table,
        "scaling": scaling_table,
    },
}


def changed_lines() -> int:
    """Lines that differ between the scripts of PPO and RLOO, as `diff` has it."""
    done = subprocess.run(["diff", PPO, RLOO], cwd=ROOT, capture_output=True, text=True, check=False)
    return sum(line[:1] in ("<", ">") for line in done.stdout.splitlines())


def write(path: Path, blocks: dict[str, Any], check: bool) -> None:
    """Put the tables between the markers of a file, or only say that they are not there."""
    old = text = path.read_text()
    for name, make in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if not re.search(pattern, text, re.S):
            raise SystemExit(f"{path} has no markers for {name}")
        block = make() + (f"\n\n{origin(name)}" if name in RECORDS else "")
        text = re.sub(pattern, lambda match, block=block: match[1] + block + "\n" + match[2], text, flags=re.S)
    text = re.sub(r"\d+(?= changed lines)", str(changed_lines()), text)
    if check and text != old:
        raise SystemExit(f"{path} is out of date: python benchmark/readme_tables.py")
    if not check:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    check = parser.parse_args().check
    for name, blocks in BLOCKS.items():
        write(ROOT / name, blocks, check)
    sys.stdout.write("up to date\n")


if __name__ == "__main__":
    main()
