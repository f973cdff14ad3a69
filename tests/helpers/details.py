"""Every implementation detail: what it is, the code that does it, a fault, and the test that sees
that fault. Also the tour of ppo_rlhf.py in README.md.

    python tests/helpers/details.py           # write the tables of docs/details.md and README.md
    python tests/helpers/details.py --check   # fail if they are not up to date

Code is found by its syntax, wherever and however it stands in the script, and so is the fault put
in its place: `pytest tests/test_details.py --faults` does that for every row.
"""

import ast
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PPO = "ppo_rlhf.py"
RLOO = "rloo_rlhf.py"
REWARD = "train_reward.py"
ADAM = "tf_adam.py"


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
RLOO_STEPS = f"{RUN}[rloo, other steps]"
REWARD_RUN = f"{RUN}[best of three, resumed]"
REWARD_RUNS = f"{RUN}[preferences, eos, two processes]"
CRITIC_RUN = f"{RUN}[ppo, critic from the reward model]"
CRITIC_RUNS = f"{RUN}[ppo, critic from the policy, two processes]"
STEPS = "golden::ppo_steps_equal_the_original"
FORWARD = "golden::logprobs_values_and_entropies_equal_the_original"
CACHED = "sampler::cached_sampling_draws_what_full_forward_passes_give"
WHITEN = "ppo_math::whiten_gives_the_table_of_the_n_implementation_details"
ADAM_STEPS = "tf_adam::trajectory_and_moments_equal_tensorflow"
# What tests compare with, by file or by test.
AGAINST = {
    "golden": "**recording of OpenAI's code**",
    ADAM_STEPS: "**recording of TensorFlow**",
    WHITEN: "**table in Huang et al.**",
    "reference": "our second implementation",
    "ppo_math": "a worked example",
}

ORIGINAL = [
    Detail(
        "TensorFlow's Adam: eps outside the bias correction",
        ADAM,
        'group["eps"] /= math.sqrt(1 - beta2 ** group["t"])',
        'group["eps"] /= 1',
        ADAM_STEPS,
    ),
    Detail(
        "it is the optimizer, with no weight decay and no clipping of gradients",
        ADAM,
        '{"tf": AdamTF, "torch": torch.optim.AdamW}',
        '{"tf": torch.optim.AdamW, "torch": torch.optim.AdamW}',
        PPO_RUN,
    ),
    Detail(
        "the learning rate falls linearly from update to update",
        PPO,
        "set_learning_rates(optimizer, update, update / num_updates, args)",
        "set_learning_rates(optimizer, update, update / (num_updates + 1), args)",
        PPO_RUN,
    ),
    Detail(
        "queries begin after the first `.` and end with the last, by token id",
        PPO,
        "tokens.index(start) + 1",
        "tokens.index(start)",
        "golden::query_cut_equals_the_original",
    ),
    Detail(
        "prefix and suffix are for the policy, the raw query for the reward model",
        PPO,
        "Query(begin + query, begin + prefix + query + suffix, row)",
        "Query(begin + query + suffix, begin + prefix + query + suffix, row)",
        PPO_RUN,
    ),
    Detail(
        "padding is a mask, token 0 stands under it, no embedding is resized",
        PPO,
        "(ids.clamp(min=0), ids >= 0)",
        "(ids.clamp(min=0), ids >= -1)",
        CACHED,
    ),
    Detail(
        "positions count real tokens",
        PPO,
        "(mask.cumsum(1) - 1).clamp(min=0)",
        "(torch.ones_like(mask).cumsum(1) - 1).clamp(min=0)",
        CACHED,
    ),
    Detail(
        "responses of a fixed length: no top-k, no top-p, no stop at EOS",
        PPO,
        "logits[:, -1] / temperature",
        "logits[:, -1]",
        CACHED,
    ),
    Detail(
        "sampling is a function of (seed, update, row)",
        PPO,
        "np.random.default_rng([seed, 1, draw])",
        "np.random.default_rng([seed, 2, draw])",
        PPO_RUN,
    ),
    Detail(
        "log-probabilities are divided by the temperature as well; values are not",
        PPO,
        "logits.div_(temperature).log_softmax(-1)",
        "logits.log_softmax(-1)",
        FORWARD,
    ),
    Detail(
        "a token is predicted by the state before it, the first by the query's last",
        PPO,
        "batch.responses[:, :-1]",
        "batch.responses[:, 1:]",
        FORWARD,
    ),
    Detail(
        "logits are fp32 in bf16 runs too, as only the trunk is autocast",
        PPO,
        'dtype == "bf16"',
        "False",
        "models::under_bf16_the_trained_are_fp32_with_autocast_and_the_frozen_are_bf16",
    ),
    Detail(
        "old log-probabilities come from the very passes of the update (the original's from its "
        "sampler): the first ratio is 1",
        PPO,
        "micro_batches(minibatch, contexts, args.micro_batch_size)",
        "micro_batches(minibatch, contexts, 1)",
        "sampler::first_ratio_is_exactly_one",
    ),
    Detail(
        "first ratios of 1, a KL of 0 and sampled log-probabilities are checked in every run "
        "(not in the original)",
        PPO,
        "args.max_kl if update > 0 else ratio_tolerance",
        "args.max_kl",
        "ppo_math::first_passes_that_differ_and_a_far_policy_stop_a_run",
    ),
    Detail(
        "the score is that of the response truncated at the first `.` from index 16",
        PPO,
        "(responses == token) & (index >= after)",
        "(responses == token) & (index > after)",
        "golden::truncation_and_penalty_equal_the_original",
    ),
    Detail(
        "without a `.` there, -1 replaces the score",
        PPO,
        "torch.where(found_end, scores, kept + args.penalty_reward_value)",
        "scores",
        PPO_RUN,
    ),
    Detail(
        "the reward is read at the last real token",
        PPO,
        "hidden_states(model, ids, mask, 1, args.dtype)",
        "hidden_states(model, ids, mask, 2, args.dtype)[:, :1]",
        "golden::reward_scores_equal_the_original",
    ),
    Detail(
        "reward = gain * logit + bias",
        PPO,
        'nn.init.constant_(head.bias, getattr(model.config, "reward_bias", 0.0))',
        "nn.init.constant_(head.bias, 0.0)",
        PPO_RUN,
    ),
    Detail(
        "KL is paid for every token, truncated or not",
        PPO,
        "until_end if args.mask_truncated else torch.ones_like(until_end)",
        "until_end",
        PPO_RUN,
    ),
    Detail(
        "the score comes with the last token",
        PPO,
        "mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))",
        "mask & (mask.cumsum(1) == 1)",
        PPO_RUN,
    ),
    Detail(
        "rewards are whitened without shifting their mean",
        PPO,
        "whiten(rewards, batch.mask, shift_mean=False)",
        "whiten(rewards, batch.mask, shift_mean=True)",
        STEPS,
    ),
    Detail(
        "whitening: biased variance, eps 1e-8",
        PPO,
        "(x - mean) * torch.rsqrt(variance + 1e-8)",
        "(x - mean) * torch.rsqrt(variance)",
        WHITEN,
    ),
    Detail(
        "generalised advantage estimation, with 0 after the end",
        PPO,
        "advantage = next_value = torch.zeros_like(values[:, 0])",
        "advantage = next_value = values[:, -1]",
        "ppo_math::gae_discounts_future_errors_by_gamma_times_lambda",
    ),
    Detail(
        "advantages are whitened per minibatch and rank, inside the epochs",
        PPO,
        "whiten(batch.advantages, batch.mask, shift_mean=True)",
        "batch.advantages",
        STEPS,
    ),
    Detail(
        "value head on the policy's trunk, starting at zero",
        PPO,
        'getattr(model.config, "reward_gain", 1.0) if hasattr(model, "score") else 0.0',
        'getattr(model.config, "reward_gain", 1.0) if hasattr(model, "score") else 1.0',
        PPO_RUN,
    ),
    Detail(
        "clipped value loss around the old values, factor 0.5",
        PPO,
        "0.5 * torch.maximum(value_loss, value_loss_clipped)",
        "0.5 * value_loss",
        STEPS,
    ),
    Detail(
        "clipped policy loss",
        PPO,
        "torch.maximum(policy_loss, policy_loss_clipped)",
        "policy_loss",
        PPO_RUN,
    ),
    Detail(
        "the mean is over all tokens of all ranks, however gradients accumulate",
        PPO,
        "accelerator.num_processes / sum_over_ranks(mini.mask)",
        "1 / mini.mask.sum()",
        PPO_RUNS,
    ),
    Detail(
        "shuffles: RandomState(seed + 100003 rank), a new permutation each epoch",
        PPO,
        "np.random.RandomState(args.seed + 100_003 * rank)",
        "np.random.RandomState(args.seed)",
        PPO_RUNS,
    ),
    Detail(
        "the KL coefficient adapts to the KL of all ranks, after the update, by the global batch",
        PPO,
        "kl_coef * (1 + error * args.batch_size / args.kl_horizon)",
        "kl_coef * (1 + error * args.batch_size / 2 / args.kl_horizon)",
        PPO_RUNS,
    ),
    Detail(
        "its error is clipped to 0.2",
        PPO,
        "min(max(kl / args.adaptive_kl_target - 1, -0.2), 0.2)",
        "kl / args.adaptive_kl_target - 1",
        PPO_RUN,
    ),
    Detail(
        "reward head: normal, of deviation 1 / sqrt(d + 1)",
        REWARD,
        "1 / math.sqrt(model.score.in_features + 1)",
        "0.02",
        REWARD_RUN,
    ),
    Detail(
        "cross entropy over the N responses, mean over the batch",
        REWARD,
        "losses.sum() / len(labels)",
        "losses.mean()",
        "golden::reward_training_equals_the_original",
    ),
    Detail(
        "one epoch in rank 0's order, strided over ranks",
        REWARD,
        "order[start : start + args.batch_size][rank::world]",
        "order[start : start + args.batch_size][::world]",
        REWARD_RUNS,
    ),
    Detail(
        "linear decay by labels seen",
        REWARD,
        "start / len(labels)",
        "update / num_updates",
        REWARD_RUN,
    ),
    Detail(
        "gain and bias are set before and after, from untruncated samples of the reference",
        REWARD,
        "logits.std(correction=0)",
        "logits.std()",
        "golden::reward_normalisation_equals_the_original",
    ),
]

RLOO_ROWS = [
    Detail(
        "the baseline is the mean of the other K - 1 responses to the query",
        RLOO,
        "(rewards.unsqueeze(2) - rewards.unsqueeze(1)).sum(2) / (rewards.shape[1] - 1)",
        "(rewards.unsqueeze(2) - rewards.unsqueeze(1)).sum(2) / rewards.shape[1]",
        "ppo_math::leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries",
    ),
    Detail(
        "the KL of the whole response is in its reward",
        RLOO,
        "scores - kl_coef * log_ratio.sum(1)",
        "scores",
        RLOO_RUN,
    ),
    Detail(
        "the ratio is that of the whole response",
        RLOO,
        "((logprobs - old_logprobs) * mask).sum(1)",
        "((logprobs - old_logprobs) * mask).mean(1)",
        RLOO_RUN,
    ),
    Detail(
        "K responses go on from one cache of their query",
        RLOO,
        "ids[:: self.k, :n]",
        "ids[: len(ids) // self.k, :n]",
        RLOO_RUN,
    ),
]

OPTIONS = [
    Detail(
        "`--no-whiten_advantages` (DeepSpeed-Chat)",
        PPO,
        "args.whiten_advantages",
        "True",
        CRITIC_RUN,
    ),
    Detail(
        "`--adam_betas`, `--weight_decay` of matrices only, decoupled (Llama 2)",
        ADAM,
        "((matrices, args.weight_decay), (others, 0.0))",
        "((matrices, args.weight_decay), (others, args.weight_decay))",
        CRITIC_RUN,
    ),
    Detail(
        "`--max_grad_norm` (Llama 2)",
        ADAM,
        "max_norm is not None",
        "False",
        CRITIC_RUN,
    ),
    Detail(
        "`--lr_schedule`, `--lr_warmup`: the first update has lr / (n + 1) (InstructGPT)",
        ADAM,
        "(update + 1) / (args.lr_warmup + 1)",
        "update / (args.lr_warmup + 1)",
        CRITIC_RUN,
    ),
    Detail(
        "`--critic policy`, `--critic_lr`: a trunk of its own, all of which is trained, also with "
        "`--lora_rank` (two rates: DeepSpeed-Chat, Qwen)",
        ADAM,
        "factor * args.critic_lr",
        "factor * args.lr",
        CRITIC_RUNS,
    ),
    Detail(
        "`--critic reward`: it starts as the reward model, whose head is the value head "
        "(InstructGPT)",
        PPO,
        'getattr(model.config, "reward_gain", 1.0)',
        "1.0",
        CRITIC_RUN,
    ),
    Detail(
        "`--critic_warmup`: the policy stands still, to the bit; the KL is 0 meanwhile, so with "
        "a `--adaptive_kl_target` the coefficient falls (Qwen)",
        ADAM,
        'update < getattr(args, "critic_warmup", 0)',
        "False",
        CRITIC_RUN,
    ),
    Detail(
        "`--lora_rank`: the reference is the policy without adapters (TRL with peft)",
        PPO,
        "args.lora_alpha",
        "1",
        "options::the_folder_of_a_lora_run_is_the_trained_policy",
    ),
    Detail(
        "`--eval_every`: score, KL and share of ends on held-out queries (TRL)",
        RLOO,
        "(update + 1) % args.eval_every",
        "update % args.eval_every",
        RLOO_STEPS,
    ),
    Detail(
        "an answer that is only EOS: `--truncate_after 1` pays it the penalty, unless another EOS "
        "follows (DeepSpeed-Chat leaves them out)",
        PPO,
        "ends_before == 0",
        "is_end.cumsum(1) == 0",
        PPO_RUNS,
    ),
]

DETAILS = [*ORIGINAL, *RLOO_ROWS, *OPTIONS]


# The tour of ppo_rlhf.py: where a part begins, up to the next one, and what is there.
TOUR = [
    ("class Args:", "`Args`: all settings. `Batch`: all that belongs to a response, with shapes"),
    ("def main(", "**`main`**: set-up, then the loop in numbered steps. Begin here"),
    (
        "# --- the algorithm",
        "**the algorithm**: rewards, `gae`, `ppo_loss`, `ppo_update`, KL coefficient",
    ),
    ("# --- rollout and scoring", "`sample`, `rollout`, reward models and functions, `evaluate`"),
    ("# --- forward passes", "`hidden_states`, `ActorCritic`, log-probabilities, entropies"),
    (
        "# --- models",
        "loading models, LoRA, queries from files, the run's folder: you can skip these",
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


def tour() -> str:
    """The parts of ppo_rlhf.py with their lines."""
    lines = (ROOT / PPO).read_text().splitlines()
    starts = []
    for begin, _ in TOUR:
        (number,) = [i for i, line in enumerate(lines, 1) if line.startswith(begin)]
        starts.append(number)
    ends = [start - 1 for start in starts[1:]] + [len(lines)]
    text = "| lines | what is there |\n| --- | --- |\n"
    for start, end, (_, what) in zip(starts, ends, TOUR, strict=True):
        text += f"| [{start}-{end}]({PPO}#L{start}-L{end}) | {what} |\n"
    return text


def pages() -> dict[Path, dict[str, str]]:
    """The tables of each page."""
    details = {"original": table(ORIGINAL), "rloo": table(RLOO_ROWS), "options": table(OPTIONS)}
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
        page = path.read_text()
        new = with_tables(page, tables)
        if "--check" in sys.argv and page != new:
            raise SystemExit(f"{path}: run `python tests/helpers/details.py`")
        path.write_text(new)


if __name__ == "__main__":
    main()
