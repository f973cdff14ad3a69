"""Every implementation detail: what it is, the code that does it, a fault, and the test that sees
that fault.

    python tests/details.py           # write the table in tests/DETAILS.md again, with its links
    python tests/details.py --check   # fail if it is not up to date

Code is found by its syntax, wherever and however it stands in the script, and so is the fault put
in its place: `pytest tests/test_details.py --faults` does that for every row.
"""

import ast
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "DETAILS.md"
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

    def line(self) -> int:
        """Where the code begins. ValueError if it is not in the script once."""
        code = parse(self.code)
        lines = [node.lineno for node in nodes_of(self.script) if is_same(node, code)]
        if len(lines) != 1:
            raise ValueError(f"{self.script} has `{self.code}` in lines {lines}")
        return lines[0]

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
def nodes_of(script: str) -> list[ast.AST]:
    """All nodes of the script's syntax tree."""
    return list(ast.walk(ast.parse((ROOT / script).read_text())))


def is_same(one: ast.AST, other: ast.AST) -> bool:
    """Whether two pieces of code are the same but for comments and layout."""
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)


TWIN = "twin::a_run_equals_its_twin[ppo]"
TWINS = "twin::a_run_equals_its_twin[ppo, eos, two processes]"
TWIN_RLOO = "twin::a_run_equals_its_twin[rloo]"
TWINS_RLOO = "twin::a_run_equals_its_twin[rloo, eos, two processes]"
TWIN_REWARD = "twin::a_run_equals_its_twin[best of three, resumed]"
TWINS_REWARD = "twin::a_run_equals_its_twin[preferences, eos, two processes]"
TWIN_CRITIC = "twin::a_run_equals_its_twin[ppo, critic from the reward model]"
TWINS_CRITIC = "twin::a_run_equals_its_twin[ppo, critic from the policy, two processes]"
TWIN_LAYER = "twin::a_run_equals_its_twin[rloo, upper layer]"
STEPS = "golden::ppo_steps_equal_the_original"
FORWARD = "golden::logprobs_values_and_entropies_equal_the_original"
CACHED = "sampler::cached_sampling_draws_what_full_forward_passes_give"

ORIGINAL = [
    Detail(
        "TensorFlow's Adam: eps outside the bias correction",
        ADAM,
        'group["eps"] /= math.sqrt(1 - beta2 ** group["t"])',
        'group["eps"] /= 1',
        "tf_adam::trajectory_and_moments_equal_tensorflow",
    ),
    Detail(
        "it is the optimizer, with no weight decay and no clipping of gradients",
        ADAM,
        '{"tf": AdamTF, "torch": torch.optim.AdamW}',
        '{"tf": torch.optim.AdamW, "torch": torch.optim.AdamW}',
        TWIN,
    ),
    Detail(
        "the learning rate falls linearly from update to update",
        PPO,
        "set_learning_rates(optimizer, update, update / num_updates, args)",
        "set_learning_rates(optimizer, update, update / (num_updates + 1), args)",
        TWIN,
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
        TWIN,
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
        "np.random.default_rng([seed, 2, update])",
        TWIN,
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
        "batch.responses[rows, :-1]",
        "batch.responses[rows, 1:]",
        FORWARD,
    ),
    Detail(
        "logits are fp32 in bf16 runs too, as only the trunk is autocast",
        PPO,
        'model.base_model.is_autocast = args.dtype == "bf16"',
        "model.base_model.is_autocast = False",
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
        TWIN,
    ),
    Detail(
        "the reward is read at the last real token",
        PPO,
        "hidden_states(model, ids, mask, last=1)",
        "hidden_states(model, ids, mask, last=2)[:, :1]",
        "golden::reward_scores_equal_the_original",
    ),
    Detail(
        "reward = gain * logit + bias",
        PPO,
        'head.bias.data.add_(getattr(model.config, "reward_bias", 0.0))',
        "head.bias.data.add_(0.0)",
        TWIN,
    ),
    Detail(
        "KL is paid for every token, truncated or not",
        PPO,
        "until_end if args.mask_truncated else torch.ones_like(until_end)",
        "until_end",
        TWIN,
    ),
    Detail(
        "the score comes with the last token",
        PPO,
        "mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))",
        "mask & (mask.cumsum(1) == 1)",
        TWIN,
    ),
    Detail(
        "rewards are whitened without shifting their mean",
        PPO,
        "whiten(rewards, value_mask, total, correction, shift_mean=False)",
        "whiten(rewards, value_mask, total, correction, shift_mean=True)",
        STEPS,
    ),
    Detail(
        "whitening: biased variance, eps 1e-8",
        PPO,
        "(x - mean) * torch.rsqrt(variance + 1e-8)",
        "(x - mean) * torch.rsqrt(variance)",
        "ppo_math::whiten_gives_the_table_of_the_n_implementation_details",
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
        "whiten(advantages, batch.mask[rows], total, correction, shift_mean=True)",
        "advantages",
        STEPS,
    ),
    Detail(
        "value head on the policy's trunk, starting at zero",
        PPO,
        "nn.init.zeros_(p)",
        "nn.init.ones_(p)",
        TWIN,
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
        TWIN,
    ),
    Detail(
        "the mean is over all tokens of all ranks, however gradients accumulate",
        PPO,
        "parts / sum_over_ranks(batch.mask[minibatch])",
        "parts / accelerator.num_processes / batch.mask[minibatch].sum()",
        TWINS,
    ),
    Detail(
        "shuffles: RandomState(seed + 100003 rank), a new permutation each epoch",
        PPO,
        "np.random.RandomState(args.seed + 100_003 * rank)",
        "np.random.RandomState(args.seed)",
        TWINS,
    ),
    Detail(
        "the KL coefficient adapts to the KL of all ranks, after the update, by the global batch",
        PPO,
        "kl_coef * (1 + error * args.batch_size / args.kl_horizon)",
        "kl_coef * (1 + error * args.batch_size / 2 / args.kl_horizon)",
        TWINS,
    ),
    Detail(
        "its error is clipped to 0.2",
        PPO,
        "min(max(kl / args.kl_target - 1, -0.2), 0.2)",
        "kl / args.kl_target - 1",
        TWIN,
    ),
    Detail(
        "reward head: normal, of deviation 1 / sqrt(d + 1)",
        REWARD,
        "1 / math.sqrt(model.score.in_features + 1)",
        "0.02",
        TWIN_REWARD,
    ),
    Detail(
        "cross entropy over the N responses, mean over the batch",
        REWARD,
        "loss * len(groups) / len(labels)",
        "loss / len(labels)",
        "golden::reward_training_equals_the_original",
    ),
    Detail(
        "one epoch in rank 0's order, strided over ranks",
        REWARD,
        "order[start : start + args.batch_size][rank::world]",
        "order[start : start + args.batch_size][::world]",
        TWINS_REWARD,
    ),
    Detail(
        "linear decay by labels seen",
        REWARD,
        "start / len(labels)",
        "update / num_updates",
        TWIN_REWARD,
    ),
    Detail(
        "gain and bias are set before and after, from untruncated samples of the reference",
        REWARD,
        "raw.std(correction=0)",
        "raw.std()",
        "golden::reward_normalisation_equals_the_original",
    ),
]

RLOO_ROWS = [
    Detail(
        "the baseline is the mean of the other K - 1 responses to the query",
        RLOO,
        "(rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)",
        "(rewards.sum(1, keepdim=True) - rewards) / rewards.shape[1]",
        "ppo_math::leave_one_out_advantage_of_the_worked_example_whose_rows_are_queries",
    ),
    Detail(
        "the KL of the whole response is in its reward",
        RLOO,
        "token_rewards(final_scores, token_kl, batch.mask, kl_coef).sum(1)",
        "final_scores",
        TWIN_RLOO,
    ),
    Detail(
        "the ratio is that of the whole response, unless --token_level",
        RLOO,
        "not args.token_level",
        "args.token_level",
        TWIN_RLOO,
    ),
    Detail(
        "K responses go on from one cache of their query",
        RLOO,
        "ids[:: self.k, :n]",
        "ids[: len(ids) // self.k, :n]",
        TWIN_RLOO,
    ),
    Detail(
        "`--normalize_advantages`: over the whole batch, deviation + 1e-4 (TRL)",
        RLOO,
        "variance.sqrt() + 0.0001",
        "variance.sqrt() + 1",
        TWINS_RLOO,
    ),
]

OPTIONS = [
    Detail(
        "`--kl_estimator` k1, k2, k3, abs or full: what is paid for (Schulman 2020; TRL's "
        "kl_penalty); logs and coefficient keep k1",
        PPO,
        "(all_logprobs.exp() * log_ratios).sum(-1)",
        "(all_logprobs.exp() * log_ratios).mean(-1)",
        TWIN_CRITIC,
    ),
    Detail(
        "`--score_norm`, over the global batch (trlX: running)",
        RLOO,
        'args.score_norm == "whiten"',
        'args.score_norm != ""',
        TWIN_LAYER,
    ),
    Detail(
        "`--score_clip` after it (DeepSpeed-Chat's clip_reward_value)",
        PPO,
        "scores.clamp(-args.score_clip, args.score_clip)",
        "scores.clamp(max=args.score_clip)",
        TWIN_CRITIC,
    ),
    Detail(
        "`--target_kl`: no more steps on this batch",
        PPO,
        "approxkl > args.target_kl",
        "approxkl < args.target_kl",
        TWINS_CRITIC,
    ),
    Detail(
        "`--no-whiten_advantages` (DeepSpeed-Chat)",
        PPO,
        "args.whiten_advantages",
        "True",
        TWIN_CRITIC,
    ),
    Detail(
        "`--whiten global` (trlX)",
        PPO,
        'sum_over_ranks if args.whiten == "global" else torch.sum',
        "torch.sum",
        TWINS_CRITIC,
    ),
    Detail(
        "`--whiten batch`: once over the batch, before the epochs, by the unbiased variance (TRL)",
        PPO,
        '1 if args.whiten == "batch" else 0',
        "0",
        "trl::a_ppo_0_9_run_equals_the_recording",
    ),
    Detail(
        "`--value_after_end`: the state after the end has a value, and gets the score (TRL 0.12)",
        PPO,
        "pad(batch.mask[:, :-1], (1, 0), value=True)",
        "batch.mask",
        "trl::a_ppo_1_12_run_equals_the_recording",
    ),
    Detail(
        "`--adam_betas`, `--weight_decay` of matrices only, decoupled (Llama 2)",
        ADAM,
        "((matrices, args.weight_decay), (others, 0.0))",
        "((matrices, args.weight_decay), (others, args.weight_decay))",
        TWIN_CRITIC,
    ),
    Detail(
        "`--max_grad_norm` (Llama 2)",
        ADAM,
        "max_norm is not None",
        "False",
        TWIN_CRITIC,
    ),
    Detail(
        "`--lr_schedule`, `--lr_warmup`: the first update has lr / (n + 1) (InstructGPT)",
        ADAM,
        "(update + 1) / (args.lr_warmup + 1)",
        "update / (args.lr_warmup + 1)",
        TWIN_CRITIC,
    ),
    Detail(
        "`--critic policy`, `--critic_lr`: a trunk of its own, all of which is trained, also with "
        "`--lora_rank` (two rates: DeepSpeed-Chat, Qwen)",
        ADAM,
        "factor * args.critic_lr",
        "factor * args.lr",
        TWINS_CRITIC,
    ),
    Detail(
        "`--critic reward`: it starts as the reward model, whose head is the value head "
        "(InstructGPT)",
        PPO,
        'getattr(model.config, "reward_gain", 1.0)',
        "1.0",
        TWIN_CRITIC,
    ),
    Detail(
        "`--critic_warmup`: the policy stands still, to the bit; the KL is 0 meanwhile, so with "
        "a `--kl_target` the coefficient falls (Qwen)",
        ADAM,
        'update < getattr(args, "critic_warmup", 0)',
        "False",
        TWIN_CRITIC,
    ),
    Detail(
        "`--ptx_coef`: pretraining loss per token in the same step (InstructGPT)",
        PPO,
        "loss + args.ptx_coef * ptx_loss * per_target",
        "loss - args.ptx_coef * ptx_loss * per_target",
        TWINS_CRITIC,
    ),
    Detail(
        "`--ema`: averaged weights in ema/ (InstructGPT)",
        PPO,
        "average.lerp_(p.detach(), 1 - args.ema)",
        "average.lerp_(p.detach(), args.ema)",
        TWINS_CRITIC,
    ),
    Detail(
        "`--top_p`: draws from the nucleus (Qwen); ratios, entropy and KL are of the whole "
        "distribution, so that the logged KL is biased upwards",
        RLOO,
        "TopPLogitsWarper(top_p)(None, logits)",
        "TopPLogitsWarper(0.5)(None, logits)",
        TWIN_LAYER,
    ),
    Detail(
        "`--unfrozen_layers`: the lower ones are shared with the reference (trlX's hydra)",
        RLOO,
        "{id(p): p for p in lm.parameters() if not p.requires_grad}",
        "{}",
        "options::frozen_layers_are_shared_with_the_reference_and_a_whole_one_gives_the_same",
    ),
    Detail(
        "`--lora_rank`: the reference is the policy without adapters (TRL with peft)",
        PPO,
        "args.lora_alpha",
        "1",
        "options::the_folder_of_a_lora_run_is_the_trained_policy",
    ),
    Detail(
        "`--eval_every`: eval/score, eval/kl, eval/found_end and eval/length on the way (TRL)",
        RLOO,
        "updates_made % args.eval_every",
        "update % args.eval_every",
        TWIN_LAYER,
    ),
    Detail(
        "rewards of tokens from a function (trlX's dense scores); penalty and scaling act at the "
        "last token",
        PPO,
        "final_scores - token_scores.sum(1)",
        "final_scores",
        "options::rewards_of_tokens_stay_in_place_or_are_summed",
    ),
    Detail(
        "an answer that is only EOS: `--truncate_after 1` pays it the penalty, unless another EOS "
        "follows (DeepSpeed-Chat leaves them out)",
        PPO,
        "ends_before == 0",
        "is_end.cumsum(1) == 0",
        TWINS,
    ),
]

DETAILS = [*ORIGINAL, *RLOO_ROWS, *OPTIONS]


def table(rows: list[Detail]) -> str:
    """Every detail with links to its line and its test."""
    text = "| detail | line | test |\n| --- | --- | --- |\n"
    for detail in rows:
        if f"def {detail.name}(" not in (ROOT / detail.path).read_text():
            raise ValueError(f"{detail.path} has no {detail.name}")
        number = detail.line()
        line = f"[{detail.script}:{number}](../{detail.script}#L{number})"
        test = f"[{detail.name.removeprefix('test_')}](../{detail.path})"
        text += f"| {detail.what} | {line} | {test} |\n"
    return text


def with_tables(page: str) -> str:
    """The page with its tables made again."""
    tables = {"original": ORIGINAL, "rloo": RLOO_ROWS, "options": OPTIONS}
    for name, rows in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, count = re.subn(pattern, lambda m, r=rows: m[1] + table(r) + m[2], page, flags=re.S)
        if count != 1:
            raise ValueError(f"tests/DETAILS.md has {count} places for the table `{name}`")
    return page


def main() -> None:
    page = PAGE.read_text()
    new = with_tables(page)
    if "--check" in sys.argv and page != new:
        raise SystemExit("tests/DETAILS.md: run `python tests/details.py`")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
