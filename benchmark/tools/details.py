"""Every implementation detail: what it is, the code that does it, a fault, and the test that sees
that fault. Also the tour of ppo_rlhf.py in README.md.

    python benchmark/tools/details.py    # write the tables of docs/details.md and README.md

Code is found by its syntax, wherever and however it stands in the script, and so is the fault put
in its place: `pytest tests/test_details.py --faults` does that for every row.
"""

import ast
import functools
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PPO = "ppo_rlhf.py"
RLOO = "rloo_rlhf.py"
REWARD = "train_reward.py"
ADAM = "tf_adam.py"
MODELS = "plumbing/models.py"
DATA = "plumbing/data.py"


@dataclass
class Detail:
    """One row. `test` is `file::name[setting]`, without the `test_` of both names."""

    what: str
    script: str
    code: str  # an expression or a statement that stands in the script once
    fault: str  # what is put in its place; empty: nothing
    test: str

    @property
    def path(self) -> str:
        """The test's file."""
        return f"tests/test_{self.test.partition('::')[0]}.py"

    @property
    def name(self) -> str:
        """The test's name, without its setting."""
        return "test_" + self.test.partition("::")[2].partition("[")[0]

    @property
    def node(self) -> str:
        """The test as pytest has it."""
        return f"{self.path}::test_{self.test.partition('::')[2]}"

    def place(self) -> str:
        """The function or class that has the code. ValueError if it is not in the script once."""
        code = parse(self.code)
        places = [place for node, place in nodes_of(self.script) if is_same(node, code)]
        if len(places) != 1:
            raise ValueError(f"{self.script} has `{self.code}` in {places}")
        return places[0]

    def against(self) -> str:
        """What the test compares with."""
        file = self.test.partition("::")[0]
        return AGAINST.get(self.test, AGAINST.get(file, "a property"))

    def broken(self) -> str:
        """The script's source with the fault."""
        tree = ast.parse((ROOT / self.script).read_text())
        return ast.unparse(Fault(self).visit(tree))


class Fault(ast.NodeTransformer):
    """Puts a detail's fault in the place of its code."""

    def __init__(self, detail: Detail) -> None:
        self.code = parse(detail.code)
        self.fault = parse(detail.fault) if detail.fault else ast.Pass()

    def visit(self, node: ast.AST) -> ast.AST:
        if is_same(node, self.code):
            return self.fault
        return self.generic_visit(node)


def parse(code: str) -> ast.AST:
    """The expression or statement that the code is."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


@functools.cache
def nodes_of(script: str) -> list[tuple[ast.AST, str]]:
    """All nodes of the script's syntax tree, with the names of the definitions around each."""
    found = []

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        found.append((node, ".".join(names)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = (*names, node.name)
        for child in ast.iter_child_nodes(node):
            walk(child, names)

    walk(ast.parse((ROOT / script).read_text()), ())
    return found


def is_same(one: ast.AST, other: ast.AST) -> bool:
    """Whether two pieces of code are the same but for comments and layout."""
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)


RUN = "reference::a_run_equals_its_reference"
PPO_RUN = f"{RUN}[ppo]"
PPO_RUNS = f"{RUN}[ppo, eos, two processes]"
RLOO_RUN = f"{RUN}[rloo]"
REWARD_RUN = f"{RUN}[best of three, resumed]"
REWARD_RUNS = f"{RUN}[preferences, eos, two processes]"
CRITIC_RUN = f"{RUN}[ppo, critic from the reward model]"
CRITIC_RUNS = f"{RUN}[ppo, critic from the policy, two processes]"
STEPS = "golden::ppo_steps_equal_the_original"
FORWARD = "golden::logprobs_values_and_entropies_equal_the_original"
CACHED = "rollout::cached_sampling_draws_what_full_forward_passes_give"
WHITEN = "algorithm::whiten_gives_the_table_of_the_n_implementation_details"
ADAM_STEPS = "tf_adam::trajectory_and_moments_equal_tensorflow"
# What tests compare with, by file or by test.
AGAINST = {
    "golden": "**recording of OpenAI's code**",
    ADAM_STEPS: "**recording of TensorFlow**",
    WHITEN: "**table in Huang et al.**",
    "reference": "our second implementation",
    "algorithm": "a worked example",
}

OPTIMIZER = [
    Detail(
        "The optimizer is Adam as TensorFlow computes it, with eps outside the bias correction.",
        ADAM,
        'group["eps"] /= math.sqrt(1 - beta2 ** group["t"])',
        'group["eps"] /= 1',
        ADAM_STEPS,
    ),
    Detail(
        "TensorFlow's Adam is the default, without weight decay and without clipping of gradients.",
        PPO,
        '{"tf": AdamTF, "torch": torch.optim.AdamW}',
        '{"tf": torch.optim.AdamW, "torch": torch.optim.AdamW}',
        PPO_RUN,
    ),
    Detail(
        "The learning rate falls linearly, by the same amount after each update.",
        PPO,
        "set_learning_rates(optimizer, update, update / num_updates, args, "
        "**max_rates(update, args))",
        "set_learning_rates(optimizer, update, update / (num_updates + 1), args, "
        "**max_rates(update, args))",
        PPO_RUN,
    ),
]
QUERIES = [
    Detail(
        "A query begins after the first `.` of its text and ends with the last one. Tokens are "
        "compared, not characters.",
        DATA,
        "tokens.index(start) + 1",
        "tokens.index(start)",
        "golden::query_cut_equals_the_original",
    ),
    Detail(
        "`--query_prefix` and `--query_suffix` are for the policy. The reward model reads the "
        "query without them.",
        DATA,
        "Query(begin + query, context, row, prompt)",
        "Query(begin + query + suffix, context, row, prompt)",
        PPO_RUN,
    ),
    Detail(
        "Padding is marked by a mask alone: the ids under it are 0, so the model needs no padding "
        "token.",
        MODELS,
        "(ids.clamp(min=0), ids >= 0)",
        "(ids.clamp(min=0), ids >= -1)",
        CACHED,
    ),
    Detail(
        "Positions count real tokens, and not padding.",
        MODELS,
        "(mask.cumsum(1) - 1).clamp(min=0)",
        "(torch.ones_like(mask).cumsum(1) - 1).clamp(min=0)",
        CACHED,
    ),
]
SAMPLING = [
    Detail(
        "By default all responses have the same length. Sampling has no top-k and no top-p, and "
        "does not stop at an EOS.",
        PPO,
        "(logits / temperature)",
        "logits",
        CACHED,
    ),
    Detail(
        "The random numbers of sampling follow from the seed, the update and the row. This is not "
        "so in the original.",
        PPO,
        "np.random.default_rng([seed, STREAM_SAMPLES, draw, *attempt])",
        "np.random.default_rng([seed, STREAM_ROWS, draw, *attempt])",
        PPO_RUN,
    ),
    Detail(
        "Logits are divided by the temperature for sampling and for log-probabilities. Values are "
        "not divided.",
        PPO,
        'predicted.pop("logits").div_(temperature)',
        'predicted.pop("logits")',
        FORWARD,
    ),
    Detail(
        "A token is predicted by the state of the token before it, and a response's first token by "
        "the state of the query's last.",
        PPO,
        "batch.responses[:, :-1]",
        "batch.responses[:, 1:]",
        FORWARD,
    ),
    Detail(
        "Logits are computed in fp32, also in bf16 runs, because only the trunk is under autocast.",
        MODELS,
        'dtype == "bf16"',
        "False",
        "models::under_bf16_the_trained_are_fp32_with_autocast_and_the_frozen_are_bf16",
    ),
    Detail(
        "Old log-probabilities come from passes over the update's own micro-batches, so the first "
        "ratio is 1. The original takes them from its sampler.",
        PPO,
        'predicted["ref_logprobs"] = of_ref["logprobs"]',
        'predicted |= {"ref_logprobs": of_ref["logprobs"], "logprobs": micro.sampled_logprobs}',
        "checks::first_ratio_is_exactly_one",
    ),
    Detail(
        "Every run checks that first ratios are 1, that the KL begins at 0, and that sampling and "
        "training agree. The original has no such check.",
        PPO,
        "math.inf if update > 0 else ratio_limit * args.response_length",
        "args.max_kl",
        "checks::first_passes_that_differ_stop_a_run",
    ),
]
SCORES = [
    Detail(
        "The score is that of the response up to its first `.` at index 16 or later.",
        PPO,
        "is_end[:, :after] = False",
        "is_end[:, : after + 1] = False",
        "golden::truncation_and_penalty_equal_the_original",
    ),
    Detail(
        "A response without a `.` from index 16 on gets a score of -1 instead.",
        PPO,
        "torch.where(found_end, scores, kept + args.penalty_reward_value)",
        "scores",
        PPO_RUN,
    ),
    Detail(
        "The reward is read at the last token that is not padding.",
        PPO,
        "states[:, -1]",
        "states[:, -2]",
        "golden::reward_scores_equal_the_original",
    ),
    Detail(
        "The reward is gain * logit + bias.",
        PPO,
        'getattr(classifier.config, "reward_bias", 0.0)',
        "0.0",
        PPO_RUN,
    ),
    Detail(
        "The KL penalty counts for every token, also for those after the end of the response.",
        PPO,
        "until_end if args.mask_truncated else torch.ones_like(until_end)",
        "until_end",
        PPO_RUN,
    ),
    Detail(
        "The score is added to the reward of the last sampled token.",
        PPO,
        "mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))",
        "mask & (mask.cumsum(1) == 1)",
        PPO_RUN,
    ),
]
UPDATES = [
    Detail(
        "Rewards are scaled to a variance of 1, and keep their mean.",
        PPO,
        "whiten(rewards, mask, shift_mean=False)",
        "whiten(rewards, mask, shift_mean=True)",
        STEPS,
    ),
    Detail(
        "Whitening uses the biased variance, and adds 1e-8 to it.",
        PPO,
        "(x - mean) * torch.rsqrt(variance + 1e-8)",
        "(x - mean) * torch.rsqrt(variance)",
        WHITEN,
    ),
    Detail(
        "In generalised advantage estimation the value after the last token is 0.",
        PPO,
        "advantage = next_value = 0.0",
        "advantage = next_value = values[:, -1]",
        "algorithm::gae_discounts_future_errors_by_gamma_times_lambda",
    ),
    Detail(
        "Advantages are whitened within each minibatch of each process, and again in each epoch.",
        PPO,
        "whiten(batch.advantages, mask, shift_mean=True)",
        "batch.advantages",
        STEPS,
    ),
    Detail(
        "The value head reads the policy's trunk, and its weights start at 0.",
        PPO,
        "nn.init.zeros_(p)",
        "nn.init.ones_(p)",
        PPO_RUN,
    ),
    Detail(
        "The value loss is half the larger of two squared errors, of the value and of the value "
        "clipped around the old one.",
        PPO,
        "0.5 * torch.maximum(value_loss, value_loss_clipped)",
        "0.5 * value_loss",
        STEPS,
    ),
    Detail(
        "The policy loss is the larger of two, with the ratio as it is and with the clipped ratio.",
        PPO,
        "torch.maximum(policy_loss, policy_loss_clipped)",
        "policy_loss",
        PPO_RUN,
    ),
    Detail(
        "The loss is a mean over the tokens of all processes, however many micro-batches there "
        "are.",
        PPO,
        'accelerator.num_processes / reduce(mini.loss_weights.sum(), "sum")',
        "1 / mini.loss_mask.sum()",
        PPO_RUNS,
    ),
    Detail(
        "Process i shuffles with default_rng([seed, 4, i, update]), and draws a new permutation "
        "for each epoch. The original has one RandomState(seed + 100003 * i) for the whole run.",
        PPO,
        "np.random.default_rng([args.seed, STREAM_ROWS, rank, update])",
        "np.random.default_rng([args.seed, STREAM_ROWS, 0, update])",
        PPO_RUNS,
    ),
    Detail(
        "After each update the KL coefficient is adapted to the mean KL of all processes, in "
        "proportion to the whole batch size.",
        PPO,
        "error * args.batch_size / args.kl_horizon",
        "error * args.batch_size / 2 / args.kl_horizon",
        PPO_RUNS,
    ),
    Detail(
        "The relative error of the KL is clipped to 0.2 before it changes the coefficient.",
        PPO,
        "min(max(kl / args.adaptive_kl_target - 1, -0.2), 0.2)",
        "kl / args.adaptive_kl_target - 1",
        PPO_RUN,
    ),
]
REWARD_MODEL = [
    Detail(
        "The reward head's first weights are normal, with a standard deviation of 1 / sqrt(d + 1) "
        "for d hidden units.",
        REWARD,
        "1 / math.sqrt(model.score.in_features + 1)",
        "0.02",
        REWARD_RUN,
    ),
    Detail(
        "The reward model's loss is the cross entropy over the N responses to a query, as a mean "
        "over the batch.",
        REWARD,
        "losses.sum() / len(labels)",
        "losses.mean()",
        "golden::reward_training_equals_the_original",
    ),
    Detail(
        "Labels are read once, in one order for all processes. Of n processes each takes every "
        "n-th label of a batch.",
        REWARD,
        "order[start : start + args.batch_size][rank::world]",
        "order[start : start + args.batch_size][::world]",
        REWARD_RUNS,
    ),
    Detail(
        "The reward model's learning rate falls linearly with the number of labels seen.",
        REWARD,
        "start / len(labels)",
        "update / num_updates",
        REWARD_RUN,
    ),
    Detail(
        "Gain and bias are set before and after the training, from samples of the reference that "
        "are not truncated unless a special token ends responses.",
        REWARD,
        "rewards.std(correction=0)",
        "rewards.std()",
        "golden::reward_normalisation_equals_the_original",
    ),
]

RLOO_ROWS = [
    Detail(
        "The baseline is the mean reward of the other K - 1 responses to the query.",
        RLOO,
        "(rewards.unsqueeze(2) - rewards.unsqueeze(1)).sum(2) / (rewards.shape[1] - 1)",
        "(rewards.unsqueeze(2) - rewards.unsqueeze(1)).sum(2) / rewards.shape[1]",
        "algorithm::leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries",
    ),
    Detail(
        "The KL of the whole response is part of its reward.",
        RLOO,
        "batch.scores - kl_coef * kl.sum(1)",
        "batch.scores",
        RLOO_RUN,
    ),
    Detail(
        "The ratio is that of the whole response, and not of a token.",
        RLOO,
        "old.sum_tokens(logprobs - old.logprobs)",
        "((logprobs - old.logprobs) * old.loss_mask).mean(1)",
        RLOO_RUN,
    ),
    Detail(
        "A query is read once, into a cache from which its K responses continue.",
        RLOO,
        "ids[:: self.k, :n]",
        "ids[: len(ids) // self.k, :n]",
        RLOO_RUN,
    ),
]

OPTIONS = [
    Detail(
        "`--no_whiten_advantages` leaves advantages as they are (DeepSpeed-Chat).",
        PPO,
        "args.whiten_advantages",
        "True",
        CRITIC_RUN,
    ),
    Detail(
        "`--adam_betas` sets Adam's decay rates. `--weight_decay` acts on matrices only, and apart "
        "from the gradient (Llama 2).",
        PPO,
        "args.weight_decay if is_matrix else 0.0",
        "args.weight_decay",
        CRITIC_RUN,
    ),
    Detail(
        "`--max_grad_norm` scales larger gradients down to this norm (Llama 2).",
        PPO,
        "max_norm or math.inf",
        "False",
        CRITIC_RUN,
    ),
    Detail(
        "`--lr_schedule` can keep the rate constant. With `--lr_warmup` n the first update has lr "
        "/ (n + 1) (InstructGPT).",
        PPO,
        "(update + 1) / (args.lr_warmup + 1)",
        "update / (args.lr_warmup + 1)",
        CRITIC_RUN,
    ),
    Detail(
        "`--critic policy` gives the value head a trunk of its own, and trains all of it, also "
        "with `--lora_rank`. `--critic_lr` is its learning rate (DeepSpeed-Chat and Qwen have two "
        "rates).",
        PPO,
        "args.lr if args.critic_lr is None else args.critic_lr",
        "args.lr",
        CRITIC_RUNS,
    ),
    Detail(
        "`--critic reward` starts the critic's trunk as the reward model's, and the value head as "
        "the reward head (InstructGPT).",
        PPO,
        "reward_head(critic)",
        "self.value_head",
        CRITIC_RUN,
    ),
    Detail(
        "`--critic_warmup` leaves the policy as it is, to the bit, in the first updates. The KL is "
        "0 meanwhile, and its coefficient stays as it is (Qwen).",
        PPO,
        "0.0 if update < args.critic_warmup else args.lr",
        "args.lr",
        CRITIC_RUN,
    ),
    Detail(
        "`--lora_rank` trains adapters, and the reference is the policy without them (TRL with "
        "peft).",
        PPO,
        "args.lora_alpha",
        "1",
        "models::lora_adapters_depend_on_the_seed_alone",
    ),
    Detail(
        "`--truncate_after 1` gives the penalty to a response that is only an EOS, unless another "
        "EOS follows (DeepSpeed-Chat leaves such responses out).",
        PPO,
        "is_end.cumsum(1) == is_end",
        "is_end.cumsum(1) == 0",
        PPO_RUNS,
    ),
]

TABLES = {  # by their names in docs/details.md
    "optimizer": OPTIMIZER,
    "queries": QUERIES,
    "sampling": SAMPLING,
    "scores": SCORES,
    "updates": UPDATES,
    "reward_model": REWARD_MODEL,
    "rloo": RLOO_ROWS,
    "options": OPTIONS,
}
DETAILS = [detail for rows in TABLES.values() for detail in rows]


# The tour of ppo_rlhf.py: where a part begins, up to the next one, and what is there.
TOUR = [
    ('"""PPO from', "`Args` with all settings, the presets, and `Batch`: for reference"),
    ("def main(", "**`main`: start here.** Set-up, then the loop in numbered steps"),
    (
        "# --- the algorithm",
        "**The algorithm:** `gae`, `ppo_loss`, `ppo_update`, the KL coefficient; metrics, checks",
    ),
    (
        "# --- rollout and scoring",
        "`sample` and `rollout`; scores; log-probabilities; `ActorCritic` with its value head",
    ),
    (
        "# --- models",
        "Loading of models, and the entry point. What is not about RLHF is in [plumbing](plumbing)",
    ),
]


def table(rows: list[Detail]) -> str:
    """Every detail with its function, its test, and what the test compares with."""
    text = "| detail | function | compared with | test |\n| --- | --- | --- | --- |\n"
    for detail in rows:
        if f"def {detail.name}(" not in (ROOT / detail.path).read_text():
            raise ValueError(f"{detail.path} has no {detail.name}")
        code = f"[{detail.place()}](../{detail.script})"
        name, _, setting = detail.test.partition("::")[2].partition("[")
        label = f"{name}: {setting[:-1]}" if setting else name
        test = f"[{label}](../{detail.path})"
        text += f"| {detail.what} | {code} | {detail.against()} | {test} |\n"
    return text


def summary() -> str:
    """How many rows are compared with what: others' code or numbers first."""
    against = Counter(detail.against() for detail in DETAILS).most_common()
    others = {name.strip("*"): count for name, count in against if name.startswith("**")}
    own = dict(against)["our second implementation"]
    rest = len(DETAILS) - sum(others.values()) - own
    parts = ", ".join(f"{count} with a {name}" for name, count in others.items())
    text = (
        f"Of the {len(DETAILS)} rows below, {sum(others.values())} are compared with others' code "
        f"or numbers ({parts}), {own} with our second implementation, and {rest} with a worked "
        "example or a property."
    )
    return textwrap.fill(text, 120) + "\n"


def tour() -> str:
    """The parts of ppo_rlhf.py with their lines."""
    lines = (ROOT / PPO).read_text().splitlines()
    starts = []
    for begin, _ in TOUR:
        (number,) = [i for i, line in enumerate(lines, 1) if line.startswith(begin)]
        starts.append(number)
    ends = [start - 1 for start in starts[1:]] + [len(lines)]
    text = "| lines | contents |\n| --- | --- |\n"
    for start, end, (_, what) in zip(starts, ends, TOUR, strict=True):
        text += f"| [{start}-{end}]({PPO}#L{start}-L{end}) | {what} |\n"
    return text


def pages() -> dict[Path, dict[str, str]]:
    """The tables of each page."""
    details = {name: table(rows) for name, rows in TABLES.items()} | {"summary": summary()}
    return {ROOT / "docs" / "details.md": details, ROOT / "README.md": {"tour": tour()}}


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with its tables made again."""
    for name, text in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, count = re.subn(pattern, lambda m, x=text: m[1] + x + m[2], page, flags=re.S)
        if count != 1:
            raise ValueError(f"there are {count} places for the table `{name}`")
    return page


def main() -> None:
    for path, tables in pages().items():
        path.write_text(with_tables(path.read_text(), tables))


if __name__ == "__main__":
    main()
