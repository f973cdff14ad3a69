"""The methods of 2025 in benchmark/systems: runs of the patched copies equal those of the second
implementation (helpers/reference.py), into which each method is put as its paper has it.

Each copy runs for one update of two minibatches in one process on the simulated device; and for two
epochs of one minibatch in two processes. Runs of two updates are stopped in between and resumed.
"""

import math
import shlex
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import fork_tools
import patched
import pytest
import reference
import torch
from fork_tools import PPO, REWARD, RLOO
from reference import (
    clipped_loss,
    gae,
    make_judge,
    make_row,
    note,
    note_rollout,
    read,
    sample,
    set_advantages,
    set_leave_one_out,
)
from run_tools import read_lines, read_metrics, to_lines
from test_reference import RL, Run, differences, launch
from tiny_models import save_classifier

from plumbing import labels as labels_module
from plumbing.launch import UserError

FLAGS = f"""{RL} --base_model model --reward_model judge1 --query_dataset queries.jsonl
    --start_text none --end_text none --response_length 5 --truncate_token w37 --truncate_after 1
    --mask_truncated --penalty_mode add --eval_queries 1 --total_episodes 12 --micro_batch_size 3
    --num_epochs 1 --adaptive_kl_target none --cliprange 0.05 --seed 7"""
OF_SCRIPT = {
    PPO: """--cliprange_value 0.05 --vf_coef 0.3 --gamma 0.95 --lam 0.8 --no-whiten_rewards
        --no-whiten_advantages""",
    RLOO: "--rloo_k 3",
}
TWO_PROCESSES = "--num_minibatches 1 --num_epochs 2"
TWO_UPDATES = "--total_episodes 24"
FLATTER = 1.3  # a sampler that is not the trained model: its temperature, over the latter's
SAMPLED = "policy, cache, contexts, noise, args.temperature, "
pytestmark = pytest.mark.long


# --- the methods, one response at a time ----------------------------------------------------------
def in_groups(eps, rows, k, kl_coef, _):
    """Shao et al. 2024, section 4.1.2: rewards of mean 0 and deviation 1 in each group."""
    for i, row in enumerate(rows):
        first = i // k * k
        scores = [other.score for other in rows[first : first + k]]
        row.kl_coef = kl_coef
        row.differs = max(scores) > min(scores)
        row.advantages = 0.0
        if row.differs:
            deviation = statistics.stdev(scores) + eps
            row.advantages = (row.score - statistics.mean(scores)) / deviation


def loss_of_grpo(row, log_ratio, every, s, means):
    """Shao et al. 2024, equations 3 and 4; and the ratio of DeepSeek-V3.2 before the KL."""
    loss = clipped_loss(log_ratio, row.advantages, s, means)
    to_ref = -row.log_ratio - log_ratio
    kl = to_ref.exp() - to_ref - 1
    if s.unbiased_kl:
        kl = log_ratio.exp() * kl
    note(means, "loss/kl", row.kl_coef * kl)
    note(means, "loss/total", (loss + row.kl_coef * kl).mean())
    return (loss + row.kl_coef * kl).mean() / len(every)


def minus_mean(rows, k, kl_coef, s):
    """Liu et al. 2025: rewards minus the mean of all k, which is RLOO's advantage but for this."""
    set_leave_one_out(rows, k, kl_coef, s)
    for row in rows:
        row.advantages *= (k - 1) / k


def loss_of_dr_grpo(row, log_ratio, every, s, means):
    """PPO's clipped loss, a sum over the tokens of a response."""
    loss = clipped_loss(log_ratio, row.advantages, s, means).sum()
    note(means, "loss/total", loss)
    return loss / len(every)


def over_the_batch(rows, k, kl_coef, _):
    """Hu et al. 2025: score minus later KL, of mean 0 and variance 1 over all tokens."""
    for row in rows:
        kl_left = [row.log_ratio[t:].sum() for t in range(row.count)]
        row.advantages = row.score - kl_coef * torch.stack(kl_left)
    whitened = reference.whiten([row.advantages for row in rows], True)
    for row, x in zip(rows, whitened, strict=True):
        row.advantages = x


def loss_of_tokens(row, log_ratio, every, s, means):
    """PPO's clipped loss, a mean over tokens."""
    loss = clipped_loss(log_ratio, row.advantages, s, means)
    return loss.sum() / sum(other.count for other in every)


def in_kept_groups(rows, k, kl_coef, s):
    """Yu et al. 2025, section 3.2, without new samples, and overlong filtering of section 3.4."""
    in_groups(0.0, rows, k, kl_coef, s)
    for row in rows:
        row.kept = row.found_end and row.differs
        row.counts = row.kept
    if not any(row.kept for row in rows):
        for row in rows:
            row.counts = True
            row.advantages = 0.0


def loss_of_dapo(row, log_ratio, every, s, means):
    """Yu et al. 2025, equation 8."""
    note(means, "objective/kept", row.kept)
    if not row.counts:
        return 0 * log_ratio.sum()
    counted = [other for other in every if other.counts]
    return loss_of_tokens(row, log_ratio, counted, s, means)


def loss_of_gspo(row, log_ratio, every, s, means):
    """Zheng et al. 2025, equations 5 and 7."""
    return clipped_loss(log_ratio.sum() / row.count, row.advantages, s, means) / len(every)


def decoupled(rows, kl_coef, s):
    """Yue et al. 2025: a lambda for values, and another for the policy, or for each length."""
    for row in rows:
        rewards = reference.token_rewards(row, kl_coef)
        lam = s.lam
        if s.lam_alpha is not None:
            lam = max(0.0, 1 - 1 / (s.lam_alpha * row.count))
        row.advantages = gae(row.values, rewards, s.gamma, lam)
        row.returns = row.values + gae(row.values, rewards, s.gamma, s.lam_critic)


# Yao et al. 2025: another sampler, and weights of tokens or, for RLOO, of responses.
def flatter(s):
    """The sampler's settings."""
    return SimpleNamespace(**vars(s) | {"temperature": FLATTER * s.temperature})


def sample_flatter(lm, contexts, numbers, s):
    return sample(lm, contexts, numbers, flatter(s))


def make_weighted_row(policy, *others):
    row = make_row(policy, *others)
    *_, s = others
    with torch.no_grad():
        row.log_weights = row.logprobs - read(policy, row, flatter(s).temperature).logprobs
    return row


def note_mismatch(rows, kl_coef, means):
    note_rollout(rows, kl_coef, means)
    for row in rows:
        note(means, "objective/mismatch", row.log_weights.abs().mean())


def weigh_tokens(rows, kl_coef, s):
    set_advantages(rows, kl_coef, s)
    for row in rows:
        row.advantages = row.advantages * row.log_weights.exp().clamp(max=s.tis_cap)


def weigh_responses(rows, k, kl_coef, s):
    set_leave_one_out(rows, k, kl_coef, s)
    for row in rows:
        row.advantages *= min(row.log_weights.sum().exp().item(), s.tis_cap)


def make_judges(s):
    """The mean or the minimum of several judges' scores."""
    judges = []
    for name in (s.reward_model, *s.more_reward_models):
        judges.append(make_judge(SimpleNamespace(**vars(s) | {"reward_model": name})))
    join = min if s.ensemble == "minimum" else statistics.mean
    return lambda query, response: join([judge(query, response) for judge in judges])


@dataclass
class Method:
    """`replaced`: functions of the second implementation. `other`: flags on two processes."""

    patch: str
    script: str
    replaced: dict[str, Callable]
    flags: str = ""
    other: str = ""


NORMALIZED = partial(in_groups, 1e-4)
GRPO = {"set_leave_one_out": NORMALIZED, "rloo_loss": loss_of_grpo}
GSPO = {"set_leave_one_out": NORMALIZED, "rloo_loss": loss_of_gspo}
DR_GRPO = {"set_leave_one_out": minus_mean, "rloo_loss": loss_of_dr_grpo}
DAPO = {"set_leave_one_out": in_kept_groups, "rloo_loss": loss_of_dapo}
REINFORCE_PP = {"set_leave_one_out": over_the_batch, "rloo_loss": loss_of_tokens}
VAPO = {"set_advantages": decoupled}
TIS = {
    "sample": sample_flatter,
    "make_row": make_weighted_row,
    "note_rollout": note_mismatch,
    "set_advantages": weigh_tokens,
    "set_leave_one_out": weigh_responses,
}
ENSEMBLE = {"make_judge": make_judges}
GROUPS = f"--rloo_k 3 --adaptive_kl_target 0.01 --kl_horizon 50 {TWO_UPDATES}"
OF_DAPO = """--kl_coef 0 --reward_model none --reward_fn reference_tools:coarse
    --penalty_reward_value 0 --cliprange_high 0.08"""
OF_GSPO = "--kl_coef 0 --cliprange 3e-3 --cliprange_high 4e-3"
OF_VAPO = "--cliprange_high 0.08 --lam_critic 1 --lam_alpha none"
LATER = f"--lam_critic 0.9 --lam_alpha 0.4 --critic reward --critic_warmup 1 {TWO_UPDATES}"
LATER += " --no-mask_truncated"
JUDGES = "--more_reward_models judge2 judge3 --ensemble minimum"
ADAPTED = f"--no-unbiased_kl --adaptive_kl_target 0.01 --kl_horizon 50 --seed 1 {TWO_UPDATES}"
METHODS = {
    "grpo": Method("grpo", RLOO, GRPO, "--unbiased_kl", ADAPTED),
    "dr_grpo": Method("dr_grpo", RLOO, DR_GRPO),
    "reinforce_pp": Method("reinforce_pp", RLOO, REINFORCE_PP, "--rloo_k 1", GROUPS),
    "dapo": Method("dapo", RLOO, DAPO, OF_DAPO, TWO_UPDATES),
    "dapo, no ends": Method("dapo", RLOO, DAPO, OF_DAPO, "--truncate_token w2"),
    "gspo": Method("gspo", RLOO, GSPO, OF_GSPO, "--lr 1e-4"),
    "vapo": Method("vapo", PPO, VAPO, OF_VAPO, LATER),
    "tis of PPO": Method("tis", PPO, TIS, "--tis_cap 1.1"),
    "tis of RLOO": Method("tis", RLOO, TIS, "--tis_cap 1.2"),
    "rm_ensemble of PPO": Method("rm_ensemble", PPO, ENSEMBLE, JUDGES, "--ensemble mean"),
    "rm_ensemble of RLOO": Method("rm_ensemble", RLOO, ENSEMBLE, JUDGES),
}
NOT_ON_DEVICE = {"dapo, no ends", "tis of RLOO", "rm_ensemble of RLOO"}  # in other runs it was
RUNS = [(name, False) for name in METHODS]
RUNS += [(name, True) for name in METHODS if name not in NOT_ON_DEVICE]


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """fork_tools' kit, with reward models that have a gain, and labels with margins."""
    folder = fork_tools.copy(fork_tools.kit(), tmp_path_factory.mktemp("methods"))
    torch.manual_seed(1)
    for i in (1, 2, 3):
        save_classifier(folder / f"judge{i}", "gpt2", reward_gain=0.5 + i / 4, reward_bias=0.3 - i)
    pairs = []
    for i, label in enumerate(read_lines(folder / "labels.jsonl")[:8]):
        pairs.append(label | {"margin": (None, 1, 0.5)[i % 3]})
    triples = [pair | {"sample2": pair["query"]} for pair in pairs]
    (folder / "pairs.jsonl").write_text(to_lines(*pairs))
    (folder / "triples.jsonl").write_text(to_lines(*triples))
    return folder


def copy_of(base, patch, folder):
    """The script with the method's patch. That of `tis` samples at another temperature."""
    script = patched.copy_of(base, patch, folder)
    if patch == "tis":
        flatter = SAMPLED.replace("args", f"{FLATTER} * args")
        fork_tools.change_file(script, (SAMPLED, flatter))
    return script


def run_copy(script, flags, is_on_device, kit, stop=0):
    """The folder of a copy's run on the device, or on two processes, which may be stopped."""
    out = script.with_name("out")
    if is_on_device:
        words = [*shlex.split(flags), "--output_dir", str(out)]
        code, _, errors = fork_tools.run_on_device(str(script), words, kit)
        assert code == 0, errors
    else:
        launch(Run(str(script), 2, flags, stop, later=3), kit, out)
    return out


@pytest.mark.parametrize(("name", "is_on_device"), RUNS)
def test_a_method_is_what_its_paper_says(name, is_on_device, kit, tmp_path, monkeypatch):
    method = METHODS[name]
    flags = f"{FLAGS} {OF_SCRIPT[method.script]} {method.flags}"
    if not is_on_device:
        flags += f" {TWO_PROCESSES} {method.other}"
    stop = 1 if TWO_UPDATES in flags else 0
    script = copy_of(method.script, method.patch, tmp_path)
    _, args = fork_tools.parse(patched.load(script), shlex.split(flags))
    for name_of_function, replacement in method.replaced.items():
        monkeypatch.setattr(reference, name_of_function, replacement)
    world = 1 if is_on_device else 2
    with ThreadPoolExecutor() as pool:
        future = pool.submit(reference.reinforce, method.script, vars(args), kit, world)
        out = run_copy(script, flags, is_on_device, kit, stop)
        expected = future.result()

    made = read_metrics(out)
    for row in made:
        for metric in ("first_ratio_error", "sampling_error"):
            assert math.isfinite(row.pop(metric))
    if name == "grpo":
        for row in expected.metrics:  # the KL is no part of the reward
            del row["objective/non_score_reward"]
            row["objective/score_total"] = row["objective/scores"]
    assert not differences(out, made, expected)


# --- rewards of labels ----------------------------------------------------------------------------
LABELS = """--base_model judge1 --query_dataset queries.jsonl --start_text none --end_text none
    --num_labels 8 --normalization_samples 0 --truncate_token none --batch_size 4
    --micro_batch_size 1 --center_rewards 0.3 --lr_schedule constant --lr 1e-3 --adam tf
    --adam_eps 1e-4 --seed 7 --checkpoint_every 0"""


def margin_loss(rewards, best, row, s, means):
    """Touvron et al. 2023, equation 2, which for more than two responses is a softmax's; and the
    square of the sum of Eisenstein et al. 2023."""
    others = torch.cat([rewards[:best], rewards[best + 1 :]])
    margin = row["margin"] or 0.0
    loss = (others + margin - rewards[best]).exp().sum().log1p()
    centering = s.center_rewards * rewards.sum() ** 2
    note(means, "train/loss", loss)
    note(means, "train/centering", centering)
    return loss + centering


@pytest.mark.parametrize("is_on_device", [True, False], ids=["device", "two processes"])
def test_margins_and_centering_are_what_the_papers_say(is_on_device, kit, tmp_path, monkeypatch):
    """Pairs on the device, labels of three responses on two processes."""
    flags = f"{LABELS} --label_dataset {'pairs' if is_on_device else 'triples'}.jsonl"
    script = copy_of(REWARD, "margin", tmp_path)
    out = run_copy(script, flags, is_on_device, kit)
    _, args = fork_tools.parse(patched.load(script), shlex.split(flags))
    monkeypatch.setattr(reference, "label_loss", margin_loss)
    expected = reference.train_reward(REWARD, vars(args), kit, 1)
    assert not differences(out, read_metrics(out), expected)


# --- what whole runs do not show ------------------------------------------------------------------
PUBLISHED = {
    "dapo": {"cliprange": 0.2, "cliprange_high": 0.28, "dual_clip": None},
    "gspo": {"cliprange": 3e-4, "cliprange_high": 4e-4},
    "reinforce_pp": {"rloo_k": 1},
    "tis": {"tis_cap": 2.0},
    "vapo": {"lam": 0.95, "lam_critic": 1.0, "lam_alpha": None, "cliprange_high": 0.28},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_are_as_published(name):
    args = vars(patched.module(name).Args())
    assert {flag: args[flag] for flag in PUBLISHED[name]} == PUBLISHED[name]


def test_rewards_that_differ_by_rounding_are_equal():
    dapo = patched.module("dapo")
    rewards = torch.tensor([[0.0, 0.0, 1e-6], [0.0, 0.0, 1e-2]])
    _, differs = dapo.group_advantages(rewards)
    assert differs.tolist() == [False] * 3 + [True] * 3


def test_a_dual_clip_limits_the_loss_where_the_advantage_is_negative():
    """Ye et al. 2020, equation 5, with ratios on both sides of all three limits."""
    dapo = patched.module("dapo")
    logprobs = torch.tensor([4.0, 1.1, 0.5]).log().expand(3, 3)
    old = {"logprobs": torch.zeros(3, 3), "advantages": torch.tensor([1.0, -2.0, 0.0])}
    batch = patched.batch("dapo", **old)
    losses, _ = dapo.rloo_loss(logprobs, batch, dapo.Args(dual_clip=3.0))
    expected = torch.tensor([[-1.28, -1.1, -0.5], [6.0, 2.2, 1.6], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(losses, expected)


def test_a_margin_is_a_number(kit):
    script = patched.module("margin")
    row = read_lines(kit / "pairs.jsonl")[0] | {"margin": "large"}
    label = labels_module.Comparison([1], [[2], [3]], 0, row=row)
    with pytest.raises(UserError, match="^margin must be a number: 'large'"):
        script.margin_of(label)
