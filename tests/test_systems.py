"""benchmark/systems: published settings of other systems are command lines that the scripts take,
and what a system does beyond the scripts is a patch of one of them."""

import contextlib
import json
import math
import re
import shlex
import subprocess
import sys

import fork_tools
import patched
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO, UPDATES, WORDS, copy, kit, parse, plain
from patched import make
from run_tools import call, read_lines, read_metrics, to_lines
from safetensors.torch import load_file
from tiny_models import full_logits, make_lm, random_rows
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration
from trl_tools import OWN, PPO09, PPO112

from benchmark import ours
from plumbing import data as data_module
from plumbing import models as models_module
from plumbing.launch import UserError

BASES = {name: make.base_of(path.read_text()) for name, path in patched.PATCHES.items()}
pytestmark = pytest.mark.long
NOT_SAID = "not said"
FIXED = "--adaptive_kl_target none"
TORCH = "--adam torch --adam_eps 1e-8"
CLIPS = "--cliprange 0.2 --cliprange_value 0.2"
GAE = "--gamma 1 --lam 0.95"
# A response ends with the EOS, and costs nothing where it does not.
UNTIL_EOS = "--truncate_token eos --truncate_after 0 --mask_truncated --penalty_mode add"
FREE = f"{UNTIL_EOS} --penalty_reward_value 0"
# Recipes that test_trl.py replays, and one of its recordings.
TRL = [("trl_0.9", PPO09, "plain"), ("trl_1.12", PPO112, "base")]
# What the sources of the others say, typed from them again, and of each source its flags.
SOURCES = {
    "deepspeed_chat": {
        "run_1.3b.sh": "--query_length 256 --response_length 256 --lr 9.65e-6 --critic_lr 5e-6"
        " --lr_warmup 99 --lr_schedule linear --num_epochs 1 --num_minibatches 1",
        "ppo_trainer.py": f"--kl_coef 0.1 {FIXED} --score_clip 5 --no-whiten_rewards"
        f" --no-whiten_advantages {CLIPS} {GAE} --vf_coef 1 --temperature 1 {FREE}",
        "rlhf_engine.py": f"{TORCH} --adam_betas 0.9 0.95 --weight_decay 0 --critic reward",
        "ds_utils.py": "--max_grad_norm 1",
        "utils/utils.py": "--ema 0.992",
    },
    "instructgpt": {
        "arXiv:2203.02155v1, appendix C.4": f"--batch_size 512 --num_minibatches {512 // 64}"
        " --num_epochs 1 --total_episodes 256_000 --critic_lr 9e-6 --lr_schedule constant"
        " --lr_warmup 9 --adam torch --adam_betas 0.9 0.95 --cliprange 0.2 --gamma 1"
        f" --temperature 1 --kl_coef 0.02 {FIXED} --ema 0.992 --ptx_coef 27.8 --critic reward",
        NOT_SAID: f"--lr 9e-6 --adam_eps 1e-8 --no-whiten_rewards {FREE}",
    },
    "llama2": {
        'arXiv:2307.09288v2, section 3.2.3 "Iterative Fine-Tuning", p. 15': "--batch_size 512"
        f" --num_minibatches {512 // 64} --num_epochs 1 --total_episodes {400 * 512} --lr 1e-6"
        " --lr_schedule constant --adam torch --adam_betas 0.9 0.95 --adam_eps 1e-5"
        " --weight_decay 0.1 --max_grad_norm 1 --cliprange 0.2"
        f" --kl_coef 0.01 {FIXED} --score_norm whiten",
        NOT_SAID: f"--no-whiten_rewards --critic reward {FREE}",
    },
    "qwen": {
        'arXiv:2309.16609v1, section 3.2.2 "Reinforcement Learning", p. 11': "--critic_warmup 50"
        f" --lr 1e-6 --critic_lr 5e-6 --kl_coef 0.04 {FIXED} --top_p 0.9 --cliprange_value 0.15"
        " --score_norm whiten",
        NOT_SAID: f"--critic reward --lr_schedule constant {TORCH} --num_epochs 1"
        f" --no-whiten_rewards {FREE}",
    },
    "trl_rloo": {
        "examples/scripts/rloo/rloo_tldr.py": ""
        "--base_model cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
        " --reward_model cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
        " --query_dataset hf://datasets/trl-lib/tldr/data/train-00000-of-00001.parquet"
        " --query_length 512 --start_text none --end_text none --response_length 53"
        f" {UNTIL_EOS} --penalty_reward_value -1 --total_episodes 1_000_000"
        f" --batch_size {16 * 4 * 8} --micro_batch_size 16 --num_minibatches 1 --num_epochs 1"
        " --lr 3e-6",
        "RLOOConfig and its TrainingArguments": f"--lr_schedule linear {TORCH} --weight_decay 0"
        f" --adam_betas 0.9 0.999 --max_grad_norm 1 --rloo_k 2 --kl_coef 0.05 {FIXED}"
        " --cliprange 0.2 --temperature 1",
    },
    "trlx": {
        "trlx/data/default_configs.py": "--unfrozen_layers 2 --response_length 40"
        f" --batch_size 128 --num_minibatches {128 // 32} --micro_batch_size 32 --num_epochs 4"
        f" --total_episodes {10_000 // (4 * 128 // 32) * 128} --lr 3e-5 --lr_schedule constant"
        f" {TORCH} --adam_betas 0.9 0.95 --weight_decay 1e-6 --kl_coef 0.001 {FIXED} {CLIPS}"
        f" --vf_coef 1 {GAE} --no-whiten_rewards",
        NOT_SAID: f"--temperature 1 {FREE}",
    },
}
# A tiny run of two updates; its names of files and its sizes come after the system's.
TINY = f"{fork_tools.COMMON} --reward_model judge --eval_queries 2"
TINY += " --batch_size 16 --total_episodes 32 --micro_batch_size 16"
TINY += " --truncate_after 0"
TINY_LABELS = f"{fork_tools.LABELS} --num_labels 8"
OWN_SIZES = {
    "deepspeed_chat": "--lr_warmup 1",  # of two updates
    "instructgpt": "--lr_warmup 1 --ptx_dataset queries.jsonl",
    "qwen": "--critic_warmup 1",
    "rm_ensemble": "--more_reward_models judge",
    "vapo": "--critic_warmup 1",
    "trlx": "--unfrozen_layers 1",  # of two
}
FLAG = re.compile(r"--(?:no-)?(\w+)")


# --- the folder -----------------------------------------------------------------------------------
def commands(name):
    head, _, _ = patched.PATCHES[name].read_text().partition("\n--- ")
    return re.findall("^    ((?:python|patch) .*)$", head, re.M)


@pytest.mark.parametrize("name", BASES)
def test_a_patch_applies_as_it_is_and_ruff_finds_nothing(name, tmp_path):
    """By the command in its head, which names the files as they are called."""
    assert f"\n+++ {name}.py\n" in patched.PATCHES[name].read_text()
    patch = f"patch -o {name}.py {BASES[name]} benchmark/systems/{name}.patch"
    assert patch in commands(name)
    made = tmp_path / f"{name}.py"
    words = f"{patch} --fuzz=0".replace(made.name, str(made), 1)
    done = subprocess.run(words.split(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not re.search("fuzz|offset", done.stdout)
    assert made.read_text() == patched.script(name).read_text()
    assert made.read_text() != (ROOT / BASES[name]).read_text()
    for command in (["check"], ["format", "--check"]):
        config = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
        ruff = [sys.executable, "-m", "ruff", *command, *config, str(made)]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_patches_are_written_again_for_a_script_that_has_changed(tmp_path, monkeypatch):
    edited = patched.script("grpo").read_text()
    file = tmp_path / "grpo.patch"
    old = patched.PATCHES["grpo"].read_text()
    file.write_text(old)
    script = (ROOT / RLOO).read_text()
    (tmp_path / RLOO).write_text(f"# a line\n{script}")
    monkeypatch.setattr(make, "SYSTEMS", tmp_path)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py"])
    make.main()
    assert file.read_text() != old
    again = make.patched("grpo", tmp_path / "grpo.py")
    assert again.read_text() == f"# a line\n{edited}"
    (tmp_path / RLOO).write_text(script)
    make.main()
    assert file.read_text() == old
    # A line beside a change may differ, but not one that is changed itself.
    hunks = old[old.index("@@") :]
    beside, replaced = (re.search(rf"^{sign}( +\w.+)", hunks, re.M).group(1) for sign in " -")
    for line, error in ((beside, None), (replaced, "grpo.patch does not apply")):
        assert script.count(line) == 1
        (tmp_path / RLOO).write_text(script.replace(line, f"{line}  # mine"))
        with pytest.raises(SystemExit, match=error) if error else contextlib.nullcontext():
            make.main()
            assert make.patched("grpo", tmp_path / "grpo.py")


def comments(name):
    """What stands behind the # of every line, by the setting."""
    pattern = rf"^{FLAG.pattern}[^#\n]*(?:# )?(.*)$"
    return dict(re.findall(pattern, patched.ARGS[name].read_text(), re.M))


def settings_of(name, words):
    """All settings that the words amount to, for the patched copy."""
    _, args = parse(patched.module(name), words)
    return vars(args)


def part(settings, names):
    return {name: settings[name] for name in names}


@pytest.mark.parametrize("name", sorted(patched.ARGS.keys() - {name for name, *_ in TRL}))
def test_every_value_is_its_source_s(name):
    """And what a source does not give is said there."""
    args = settings_of(name, patched.flags(name))
    sources = SOURCES[name]
    for source in sources:
        assert source in patched.ARGS[name].read_text()
    typed = " ".join(sources.values())
    given = FLAG.findall(typed)
    assert sorted(given) == sorted(comments(name))
    expected = settings_of(name, typed.split())
    assert part(args, given) == part(expected, given)
    found = {flag for flag, text in comments(name).items() if text.startswith(NOT_SAID)}
    assert found == set(FLAG.findall(sources.get(NOT_SAID, "")))


@pytest.mark.parametrize(("name", "kind", "recording"), TRL)
def test_the_settings_of_trl_are_what_is_replayed(name, kind, recording):
    """The defaults of PPOConfig, as test_trl.py puts them into this project's settings."""
    defaults = kind(OWN, recording)
    defaults.config = defaults.settings
    args = defaults.args() | {"total_episodes": 20_000}  # PPO09's `steps`
    replayed = vars(defaults.script.Args(**args))
    flags = comments(name)
    assert part(settings_of(name, patched.flags(name)), flags) == part(replayed, flags)


@pytest.mark.parametrize("name", BASES)
def test_the_command_of_the_head_runs(name):
    """With sizes of a tiny run behind its flags."""
    flags = commands(name)[-1].removeprefix(f"python {name}.py ")
    from_file = f"$(sed 's/#.*//' benchmark/systems/{name}.args)"
    assert (from_file in flags) == (name in patched.ARGS)
    words = patched.flags(name) if name in patched.ARGS else []
    words += shlex.split(flags.replace(from_file, ""))
    folder = kit().with_name(f"system-{name}")
    tiny = TINY_LABELS if BASES[name] == REWARD else TINY
    sizes = f"{tiny} --output_dir {folder} {OWN_SIZES.get(name, '')}"
    fork_tools.succeed(patched.script(name), words + sizes.split(), kit())
    metrics = read_lines(folder / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(math.isfinite(x) for row in metrics for x in row.values())

    recorded = json.loads((folder / "args.json").read_text())["args"]
    args = json.loads(json.dumps(settings_of(name, words)))  # tuples become lists
    kept = args.keys() - set(FLAG.findall(sizes))
    assert len(kept) > 10
    assert part(recorded, kept) == part(args, kept)


# --- what patches do ------------------------------------------------------------------------------
def metrics_of(path, base, flags, folder):
    """What a short run of this copy logs in a new folder, but for what differs from run to run."""
    folder = copy(kit(), folder)
    fork_tools.succeed(path, [*WORDS[base], *flags.split()], folder)
    return read_metrics(folder / "out")


def plain_metrics(script):
    return read_metrics(plain(script, 1) / "out")


@pytest.mark.parametrize(
    "name", "instructgpt trlx trl_0.9 trl_1.12 qwen llama2 rm_ensemble".split()
)
def test_a_copy_without_its_flags_is_the_script(name, tmp_path):
    found = metrics_of(patched.script(name), PPO, "", tmp_path)
    for mine, row in zip(found, plain_metrics(PPO), strict=True):
        assert part(mine, row) == pytest.approx(row, rel=1e-6)


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_a_penalty_on_length_is_taken_from_the_score(script, tmp_path):
    before = plain_metrics(script)
    path = patched.copy_of(script, "length_penalty", tmp_path)
    assert metrics_of(path, script, "--length_coef 0", tmp_path / "without") == before
    after, *_ = metrics_of(path, script, "--length_coef 0.5", tmp_path / "with")
    penalty = 0.5 * before[0]["objective/length"]
    for name in ("objective/scores", "objective/score_total"):
        expected = before[0][name] - penalty
        assert after[name] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_scores_are_scaled_or_whitened(name):
    # mean 2, biased variance 8 / 3
    script = patched.module(name)
    scores = torch.tensor([0.0, 2.0, 4.0])
    equal = torch.full((3,), -1.0)
    unit = 2 / (8 / 3) ** 0.5
    for norm, expected, of_equal in (
        ({}, [0, 2, 4], -1),
        ({"score_norm": "scale"}, [0, unit, 2 * unit], -1),
        ({"score_norm": "whiten"}, [-unit, 0, unit], 0),
    ):
        args = script.Args(**norm)
        assert script.normalize_scores(scores, args).tolist() == pytest.approx(expected)
        assert script.normalize_scores(equal, args).tolist() == [of_equal] * 3


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_scores_are_whitened_over_all_processes(name, monkeypatch):
    """The other one has 6 and 8. All five have mean 4 and variance 8."""
    script = patched.module(name)
    of_other = iter([2, 6 + 8, 2**2 + 4**2])  # their count, sum and squares
    monkeypatch.setattr(script, "reduce", lambda x, how: x + next(of_other))
    args = script.Args(score_norm="whiten")
    found = script.normalize_scores(torch.tensor([0.0, 2.0, 4.0]), args)
    assert found.tolist() == pytest.approx([-(2**0.5), -(0.5**0.5), 0])


def test_advantages_of_trls_rloo_are_divided_by_the_deviation_of_all(monkeypatch):
    """Those of another process are 3 and -3."""
    script = patched.module("trl_rloo")
    of_other = iter([2, 3**2 + 3**2])
    monkeypatch.setattr(script, "reduce", lambda x, how: x + next(of_other))
    args = script.Args(normalize_advantages=True)
    found = script.rloo_advantages(torch.tensor([[0.0, 1.0]]), args)
    deviation = ((1 + 1 + 9 + 9) / (4 - 1)) ** 0.5
    assert found.flatten().tolist() == pytest.approx([-1 / deviation, 1 / deviation], rel=1e-3)


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_whitened_scores_are_what_is_paid(name, tmp_path):
    before, *_ = plain_metrics(PPO)
    after, *_ = metrics_of(patched.script(name), PPO, "--score_norm whiten", tmp_path)
    assert after["objective/scores"] == pytest.approx(before["objective/scores"], rel=1e-6)
    assert after["objective/scores_scaled"] == pytest.approx(0, abs=1e-6)
    assert after["objective/score_total"] == pytest.approx(0, abs=1e-5)  # the first KL is 0


def test_scores_are_clipped(tmp_path):
    """Those of TRL are in test_trl.py."""
    found = metrics_of(patched.script("deepspeed_chat"), PPO, "--score_clip 1e-3", tmp_path)
    for row in found:
        assert abs(row["objective/scores"]) > 2e-3
        assert abs(row["objective/scores_scaled"]) < 1.001e-3
    scaled = pytest.approx(found[0]["objective/scores_scaled"], abs=1e-7)
    assert found[0]["objective/score_total"] == scaled


def test_top_p_draws_from_the_fewest_tokens_that_hold_so_much():
    """Log-probabilities are those of the whole distribution."""
    qwen = patched.module("qwen")
    contexts = random_rows((5, 3, 7, 4), seed=1)
    temperature = 0.7
    lm = make_lm("gpt2")
    u = qwen.uniforms(3, 1, 4, 6)
    policy = qwen.ActorCritic(lm)
    cache = models_module.Cache(config=lm.config)
    responses, logprobs = qwen.sample(policy, cache, contexts, u, temperature, top_p=0.6)
    rows = [context + row for context, row in zip(contexts, responses.tolist(), strict=True)]
    left_out = 0
    for i, (logits, context) in enumerate(zip(full_logits(lm, rows), contexts, strict=True)):
        logits = logits[len(context) - 1 : -1] / temperature
        probs = logits.softmax(-1).double()
        likeliest, order = probs.sort(-1, descending=True)
        is_in = likeliest.cumsum(-1) - likeliest < 0.6  # the ones before hold less
        nucleus = torch.zeros_like(probs).scatter_(1, order, likeliest * is_in)
        cdf = nucleus.cumsum(-1) / nucleus.sum(-1, keepdim=True)
        drawn = (cdf <= u[i].unsqueeze(1)).sum(-1)
        assert drawn.tolist() == responses[i].tolist()
        expected = probs.log().gather(1, drawn.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs[i].double(), expected, atol=1e-5, rtol=0)
        from_all = (probs.cumsum(-1) <= u[i].unsqueeze(1)).sum(-1)
        left_out += (from_all != drawn).sum()
    assert left_out > 0


def test_k3_of_a_ratio_that_is_far_off_is_finite():
    log_ratio = torch.tensor([[-1000.0]])
    far = patched.module("trl_1.12").kl_penalty(log_ratio, "k3")
    assert far.isfinite().all()
    assert far > 1e17


ONE_MODEL = "--more_reward_models needs a --reward_model, and no --reward_fn"
REFUSED = [
    ("trl_1.12", "--value_after_end", "--value_after_end needs --mask_truncated"),
    ("instructgpt", "--ptx_coef 1", "--ptx_coef and --ptx_dataset need each other"),
    ("instructgpt", "--ptx_dataset queries.jsonl", "--ptx_coef and --ptx_dataset need each other"),
    ("trlx", "--unfrozen_layers 3", "--unfrozen_layers 3: there are 2 layers"),
    (
        "trlx",
        "--unfrozen_layers 1 --lora_rank 2",
        "--unfrozen_layers and --lora_rank: use one of them",
    ),
    ("rm_ensemble", "--more_reward_models judge --reward_model none", ONE_MODEL),
    ("rm_ensemble", "--more_reward_models judge --reward_fn rewards:count", ONE_MODEL),
]


@pytest.mark.parametrize(("name", "flags", "says"), REFUSED)
def test_flags_that_do_not_fit_are_refused(name, flags, says, tmp_path, monkeypatch):
    patched.module(name)
    words = [*WORDS[PPO], *flags.split()]
    with pytest.raises(UserError, match=f"^{says}$"):
        call(f"{name}.py", words, copy(kit(), tmp_path), monkeypatch)


# --- InstructGPT's pretraining loss, averages of weights ------------------------------------------
@pytest.mark.parametrize("micro_batch_size", [4, 1])
def test_texts_add_their_mean_loss_per_token_to_the_gradient(micro_batch_size):
    """That of transformers, however the batch is cut; a text of one token has none."""
    script = patched.module("instructgpt")
    accelerator = Accelerator(cpu=True)
    lm = make_lm("gpt2")
    policy = script.ActorCritic(lm)
    texts = random_rows((7, 1, 4, 5), seed=2)
    contexts = random_rows((3, 5, 2, 4), seed=3)
    responses = random_rows((3, 3, 3, 3), seed=4)
    batch = ours.make_batch(script, contexts, torch.tensor(responses))
    batch.rewards = torch.zeros(4, 3)
    batch.texts = texts
    settings = {"ptx_coef": 2.0, "ptx_dataset": "any", "vf_coef": 0.0}
    settings["micro_batch_size"] = micro_batch_size
    args = script.Args(whiten_rewards=False, whiten_advantages=False, **settings)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    prepared, optimizer = accelerator.prepare(policy, optimizer)
    epochs = torch.arange(4).view(1, 1, 4)
    means = script.ppo_update(accelerator, prepared, optimizer, batch, epochs, args)
    metrics = means.reduce()
    steps = {name: p.detach() - before[name] for name, p in lm.named_parameters()}

    plain_lm = make_lm("gpt2")
    plain_lm.load_state_dict(before, strict=False)
    loss = 0.0
    for text in (texts[0], *texts[2:]):
        ids = torch.tensor([text])
        loss = loss + plain_lm(ids, labels=ids).loss * (len(text) - 1)
    loss = loss / (6 + 3 + 4)
    assert metrics["loss/ptx"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    for name, p in plain_lm.named_parameters():
        torch.testing.assert_close(steps[name], -2.0 * p.grad, atol=1e-6, rtol=1e-4)


def watch(name, function, pick, flags, folder):
    """Runs the copy in this process: what `pick` makes of each call's arguments, after it."""
    script = patched.module(name)
    original = getattr(script, function)
    picked = []

    def noted(*given):
        returned = original(*given)
        picked.append(pick(*given))
        return returned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, function, noted)
        call(f"{name}.py", [*WORDS[PPO], *flags.split()], folder, patch)
    return picked


def test_pretraining_texts_are_whole_and_others_in_every_update(folder):
    rows = [{"text": f"w5 w3 w{i} w4 w6" + (i % 2) * " w7 w8"} for i in range(10, 40)]
    (folder / "queries.jsonl").write_text(to_lines(*rows))
    flags = "--start_text w3 --end_text w4 --ptx_coef 0.1 --ptx_dataset queries.jsonl"
    batches = watch("instructgpt", "ppo_update", lambda *given: given[3].texts, flags, folder)
    texts = [tuple(text) for batch in batches for text in batch]
    assert {len(text) for text in texts} == {5, 6}  # of --query_length 6
    assert len(set(texts)) == len(texts) == 4 * UPDATES


def test_two_processes_learn_from_different_texts_as_one_process_from_all(tmp_path):
    """Texts have unequal lengths, and each token counts alike."""
    folder = copy(kit(), tmp_path)
    rows = [{"text": "w7 " * (2 + i % 5)} for i in range(20)]
    (folder / "texts.jsonl").write_text(to_lines(*rows))
    flags = "--ptx_coef 1 --ptx_dataset texts.jsonl --total_episodes 4 --num_epochs 1"
    flags += " --no-whiten_rewards --no-whiten_advantages --output_dir"
    found = []
    for world in (1, 2):
        words = [*WORDS[PPO], *flags.split(), f"out{world}"]
        fork_tools.succeed(str(patched.script("instructgpt")), words, folder, world=world)
        (row,) = read_lines(folder / f"out{world}/metrics.jsonl")
        found.append([row["loss/ptx"], row["gradient_norm"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("name", ["instructgpt", "deepspeed_chat"])
def test_the_average_of_weights_moves_after_each_update(name, folder):

    def weights_of(_, policy, *__):
        return {key: p.detach().clone() for key, p in policy.lm.named_parameters()}

    seen = watch(name, "ppo_update", weights_of, "--ema 0.75", folder)
    assert len(seen) == UPDATES
    average = load_file(folder / "model/model.safetensors")
    for weights in seen:
        average = {key: 0.75 * average[key] + 0.25 * x for key, x in weights.items()}
    found = load_file(folder / "out/ema/policy/model.safetensors")
    last = load_file(folder / "out/policy/model.safetensors")
    for key in found.keys() - {"lm_head.weight"}:  # tied
        torch.testing.assert_close(found[key], average[key], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(last[key], seen[-1][key], atol=0, rtol=0)
    assert not torch.equal(last["transformer.wte.weight"], found["transformer.wte.weight"])
    for file in (folder / "out/ema").rglob("*"):
        assert (folder / "out" / file.relative_to(folder / "out/ema")).exists(), file


def test_a_resumed_run_goes_on_with_its_average(tmp_path):
    script = patched.script("instructgpt")
    words = [*WORDS[PPO], *"--ema 0.75 --ptx_coef 0.1 --ptx_dataset queries.jsonl".split()]
    folder = copy(kit(), tmp_path / "whole")
    fork_tools.succeed(script, words, folder)
    stopped = copy(folder, tmp_path / "stopped")
    (stopped / "out/checkpoints" / f"{UPDATES:07d}" / "state.json").unlink()
    fork_tools.succeed(script, [*words, "--resume"], stopped)
    for part in ("ema/policy", "policy", "ema/critic"):
        whole = load_file(folder / f"out/{part}/model.safetensors")
        again = load_file(stopped / f"out/{part}/model.safetensors")
        torch.testing.assert_close(again, whole, atol=0, rtol=0)


# --- trlX's frozen layers, and rewards of tokens --------------------------------------------------
def test_frozen_layers_are_shared_with_the_reference(folder):
    flags = "--unfrozen_layers 1 --dtype bf16"  # shared layers are not held in bf16
    models = watch("trlx", "set_logprobs", lambda *given: given[1:3], flags, folder)
    policy, ref = models[-1]
    base = load_file(folder / "model/model.safetensors")
    theirs = dict(ref.lm.named_parameters())
    trained = []
    for name, p in policy.lm.named_parameters():
        is_shared = p.data_ptr() == theirs[name].data_ptr()
        assert is_shared != p.requires_grad, name
        assert torch.equal(p, base[name]) != p.requires_grad, name
        assert torch.equal(theirs[name], base[name]), name
        if p.requires_grad:
            trained.append(name)
    assert len(trained) > 10
    for name in trained:
        assert name.startswith(("transformer.h.1.", "transformer.ln_f.")), name


def test_of_a_model_with_images_the_top_layers_of_text_are_trained():
    """Gemma 3 from 4B on: its first list of layers is the one of the images."""
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    trlx = patched.module("trlx")
    for number in (2, 1):  # all of them, and one
        trlx.freeze_lower_layers(model, model, trlx.Args(unfrozen_layers=number))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) > 10
    for name in trained:
        is_top = name.startswith("model.language_model.layers.1.")
        assert is_top or name.endswith("model.norm.weight")


def of_tokens(completion_ids, **_):
    return [torch.tensor(row, dtype=torch.float32).requires_grad_() / 10 for row in completion_ids]


def test_rewards_of_tokens_are_paid_at_their_tokens(folder):
    flags = "--adaptive_kl_target none --kl_coef 0 --reward_fn test_systems:of_tokens"
    flags += " --critic shared --truncate_token none"
    batches = watch("trlx", "ppo_update", lambda *given: given[3], flags, folder)
    rows = read_lines(folder / "out/metrics.jsonl")
    for batch, row in zip(batches, rows, strict=True):
        expected = batch.responses / 10
        torch.testing.assert_close(batch.rewards, expected, atol=1e-5, rtol=0)
        total = expected.sum(1).mean().item()
        assert row["objective/scores"] == pytest.approx(total)


def test_rewards_of_more_tokens_than_there_are_fail():
    script = patched.module("trlx")
    tokenizer = AutoTokenizer.from_pretrained(kit() / "model")
    queries = [data_module.Query([1], [1], {"prompt": ""})] * 2
    batch = patched.batch("trlx", token_scores=torch.zeros(2, 4))
    batch.responses = torch.tensor([[5, 6, 7, 0], [7, 8, 9, 0]])

    seen = []
    rewards = [[1.0], [1.0, 2.0, 3.0]]

    def of_lists(completion_ids, **_):
        seen.append(completion_ids)
        return rewards

    given = (of_lists, tokenizer, queries, batch)
    for lengths in ([1, 2], [2, 3]):
        batch.lengths = torch.tensor(lengths)
        says = "^--reward_fn must return a list, array or tensor"
        with pytest.raises(UserError, match=says):
            script.score_by_function(*given)
    rewards[0].append(2.0)
    assert script.score_by_function(*given).tolist() == [3, 6]
    assert batch.token_scores.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert seen[-1] == [[5, 6], [7, 8, 9]]
