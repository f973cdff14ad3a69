"""Whole runs of the scripts' `main` equal those of a second implementation (helpers/reference.py):
metrics, samples, results and weights.

Settings are such that nothing cancels or stands still, so that one wrong line in a `main` shows.
"""

import importlib
import json
import random
import shlex
import signal
from dataclasses import dataclass

import fork_tools
import pytest
import reference
import torch
from fork_tools import PPO, REWARD, RLOO
from run_tools import read_lines, to_lines
from safetensors.torch import load_file
from tiny_models import EOS, begin_with, save_classifier, save_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

BOS = 49

# Flags, of which a later one counts. With seed 59 some responses are only an end.
DATA = """--base_model gpt2 --query_dataset data/texts.jsonl --query_length 7
    --long_queries none --query_prefix 'w4 w5' --query_suffix w6 --start_text w2 --end_text w3
    --response_length 9 --temperature 0.8 --seed 9 --adam tf --adam_eps 1e-4 --checkpoint_every 0"""
RL = f"""{DATA} --reward_model gpt2-judge --eval_queries 3 --truncate_token w38
    --truncate_after 3 --penalty_reward_value -0.7 --penalty_mode replace --no-mask_truncated
    --total_episodes 31 --batch_size 12 --micro_batch_size 4 --num_minibatches 2 --num_epochs 2
    --lr 1e-3 --cliprange 0.1 --kl_coef 0.2 --adaptive_kl_target 0.4 --kl_horizon 50.0"""
PPO_A = f"{RL} --cliprange_value 0.02 --vf_coef 0.3 --gamma 0.95 --lam 0.9 --whiten_rewards"
RLOO_A = f"""{RL} --rloo_k 3 --micro_batch_size 9 --batch_size 18 --total_episodes 50
    --lr 4e-4 --adaptive_kl_target 0.2"""
LABELS = f"""{DATA} --label_dataset data/labels.jsonl --num_labels 17 --eval_labels 6
    --normalization_samples 7 --batch_size 5 --micro_batch_size 2 --truncate_token w9
    --truncate_after 2 --lr 2e-3"""
# Changes to these
LLAMA = """--base_model llama --query_dataset tokens.jsonl --start_text none
    --end_text none --long_queries keep_end --adam torch --adam_eps 1e-2"""
ENDS = f"""{LLAMA} --reward_model llama-judge --truncate_token eos --truncate_after 0
    --penalty_mode add --mask_truncated"""
MASKED = "--mask_truncated --adaptive_kl_target none --long_queries drop --seed 1"
STEPS = """--adam_betas 0.7 0.95 --weight_decay 0.5 --max_grad_norm 0.5 --lr_warmup 2
    --lr_schedule constant"""
ONE_STEP = "--micro_batch_size 126 --num_minibatches 1 --num_epochs 1"
# And fewer queries than the table has
NO_END = """--truncate_token none --mask_truncated --seed 7 --no-whiten_rewards --batch_size 4
    --total_episodes 7"""
OF_COLUMN = """--reward_model none --reward_fn reference_tools:of_column
    --truncate_after 0 --penalty_mode add"""
OF_ALL = "--reward_model none --reward_fn reference_tools:of_all --rloo_k 2"
PPO_B = f"""{STEPS} --no-whiten_advantages --critic reward --critic_lr 3e-3
    --critic_warmup 1 --num_epochs 3 --gradient_checkpointing"""
PPO_C = """--critic policy --critic_lr 1e-2 --weight_decay 0.3 --adaptive_kl_target 0.13
    --lr_warmup 1 --seed 63"""
RLOO_B = "--lr 2e-4 --kl_coef 0.5 --gradient_checkpointing"
RLOO_C = "--batch_size 24 --total_episodes 62 --lr_warmup 1 --seed 8"
RLOO_D = f"{OF_COLUMN} --micro_batch_size 126"
TEXTS = """--label_dataset data/preferences --num_labels none --normalization_samples 8
    --batch_size 6 --response_length 6 --long_queries keep_end"""
ENDING_TEXTS = f"{TEXTS} --base_model llama --truncate_token eos"
REWARD_B = f"{LLAMA} --micro_batch_size 128"
REWARD_C = f"{LLAMA} {TEXTS} --long_queries keep_start"
REWARD_D = f"{TEXTS} {STEPS} --base_model gpt2-judge --gradient_checkpointing"


@dataclass
class Run:
    """With `stop` a signal ends the run in that update, and it goes on with `later` rows a pass."""

    script: str
    world: int
    flags: str
    stop: int = 0
    later: int = 2


RUNS = {
    "ppo": Run(PPO, 1, PPO_A),
    "ppo, eos, two processes": Run(PPO, 2, f"{PPO_A} {ENDS} --seed 59"),
    "ppo, words masked": Run(PPO, 1, f"{PPO_A} {MASKED}"),
    "ppo, critic from the reward model": Run(PPO, 1, f"{PPO_A} {PPO_B}"),
    "ppo, critic from the policy, two processes": Run(PPO, 2, f"{PPO_A} {ENDS} {PPO_C}"),
    "ppo, one step": Run(PPO, 1, f"{PPO_A} {ONE_STEP} {NO_END}"),
    "ppo, reward function, resumed": Run(PPO, 1, f"{PPO_A} {OF_COLUMN} --seed 1", stop=2),
    "rloo": Run(RLOO, 1, RLOO_A),
    "rloo, eos, two processes": Run(RLOO, 2, f"{RLOO_A} {ENDS} {RLOO_C}"),
    "rloo, other steps": Run(RLOO, 1, f"{RLOO_A} {STEPS} {RLOO_B}"),
    "rloo, one step": Run(RLOO, 1, f"{RLOO_A} {ONE_STEP} {OF_ALL}"),
    "rloo, reward function, resumed": Run(RLOO, 1, f"{RLOO_A} {RLOO_D}", stop=1, later=3),
    "best of three, resumed": Run(REWARD, 1, f"{LABELS} {REWARD_B}", stop=1),
    "preferences, eos, two processes": Run(REWARD, 2, f"{LABELS} {ENDING_TEXTS}"),
    "preferences": Run(REWARD, 1, f"{LABELS} {REWARD_C}"),
    "preferences, other steps": Run(REWARD, 1, f"{LABELS} {REWARD_D}"),
}
ROUNDING = 1e-4  # of log-probabilities in fp32, of a whole pass and token by token


def save_models(folder):
    """Two architectures, the second with a BOS and a pad that is its eos, and reward models."""
    torch.manual_seed(0)
    changes = {
        "gpt2": {"num_hidden_layers": 3},
        "llama": {"pad_token_id": EOS, "bos_token_id": BOS},
    }
    for name, config in changes.items():
        save_model(folder / name, name, **config)
        config |= {"reward_gain": 1.3, "reward_bias": -0.4}
        save_classifier(folder / f"{name}-judge", name, **config)
    for name in ("gpt2", "gpt2-judge", "llama", "llama-judge"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        tokenizer.bos_token = tokenizer.eos_token  # which stands before no text
        if "llama" in name:
            begin_with(tokenizer, f"w{BOS}")
        tokenizer.save_pretrained(folder / name)

    lm = AutoModelForCausalLM.from_pretrained(folder / "llama")
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "llama-judge")
    for model in (lm, judge):  # padding is made with zeros
        model.model.embed_tokens.weight.data[EOS] = 0.25 * torch.randn(32)
    head = lm.lm_head.weight.data
    head[[EOS, 36]] = head[[36, EOS]]  # so that some responses end
    lm.save_pretrained(folder / "llama")
    judge.save_pretrained(folder / "llama-judge")


def text_of(row):
    """The text that is read as these tokens."""
    return " ".join(f"w{token}" if token != EOS else "<|endoftext|>" for token in row)


def padded(row):
    """A row of tokens as label files have it."""
    return row + [reference.PAD] * (12 - len(row))


def make_tables():
    """Queries, labels and texts, with all that can become of them."""
    rng = random.Random(0)

    def tokens(low, high):
        return [rng.choice([EOS, *range(4, BOS)]) for _ in range(rng.randrange(low, high))]

    texts = []
    for _ in range(14):
        row = [*tokens(0, 4), 2, *tokens(2, 5), 3, *tokens(0, 6)]
        texts.append(text_of(row))
    texts[3] = "w9 w8 w3"  # no start
    texts[5] = "w8 w3 w2"  # nothing after it
    texts[7] = "w9 w2 w8"  # no end
    pairs = []
    for _ in range(32):
        pairs.append({name: text_of(tokens(1, 11)) for name in ("prompt", "chosen", "rejected")})
    pairs[7]["chosen"] = "w4 w5 w6 w7 w8 w9 w10"
    pairs[7]["rejected"] = "w4 w5 w6 w7 w8 w9 w11"  # the same as far as they are read
    pairs[8]["chosen"] = "w4 w9 w5 w9 w6"  # the second w9, and the second eos, are the end
    pairs[9]["rejected"] = "<|endoftext|> w5 w6 <|endoftext|> w7"
    pairs[10]["chosen"] = "w6 <|endoftext|>"  # too early, but a second eos is not added
    labels = []
    for i in range(25):
        label = {"query": padded(tokens(1, 8)), "best": 2 * (i % 3 == 1)}
        labels.append(label | {f"sample{j}": padded(tokens(1, 8)) for j in range(3)})
    labels[4]["sample0"] = labels[4]["sample1"]  # which are not the best
    return {
        "data/texts": [
            {"content": "w8 w2 w9 w3", "query": text, "weight": (i % 5 - 2) / 2}
            for i, text in enumerate(texts)
        ],
        "tokens": [{"query": padded(tokens(2, 11))} for _ in range(14)],
        "data/labels": labels,
        "data/preferences/train": pairs[:20],
        "data/preferences/test": pairs[20:],
    }


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """A folder with models and data under the names that the settings have."""
    folder = tmp_path_factory.mktemp("kit")
    save_models(folder)
    for name, rows in make_tables().items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_lines(*rows))
    return folder


def compare(made, expected, where):
    """Where two results differ: fractions by more than 1e-4, relatively, and 4e-6; all else must be
    equal. A sample's KL is a sum of nine differences of numbers up to 8, so it has 2e-5."""
    if isinstance(expected, dict) and isinstance(made, dict):
        odd = [f"{where}: {key} in one of them" for key in sorted(made.keys() ^ expected.keys())]
        for key in sorted(made.keys() & expected.keys()):
            odd += compare(made[key], expected[key], f"{where} {key}")
        return odd
    if isinstance(expected, list) and isinstance(made, list):
        odd = []
        if len(made) != len(expected):
            odd.append(f"{where}: {len(made)} for {len(expected)}")
        for i, pair in enumerate(zip(made, expected, strict=False)):
            odd += compare(*pair, f"{where}[{i}]")
        return odd
    if isinstance(expected, float):
        is_kl = where.startswith("samples") and where.endswith(("kl", "kl_after"))
        expected = pytest.approx(expected, rel=1e-4, abs=2e-5 if is_kl else 4e-6)
    return [] if made == expected else [f"{where}: {made} for {expected}"]


def compare_weights(folder, expected):
    """Weights that are not moved as in the reference, to 1e-3 of the move or 2e-6."""
    made = {}
    for path in folder.glob("**/*.safetensors"):
        file = path.relative_to(folder).with_suffix("")
        if file.parts[0] != "checkpoints":
            made |= {f"{file}:{name}": x for name, x in load_file(path).items()}
    if made.keys() != expected.weights.keys():
        return [f"weights: {sorted(made.keys() ^ expected.weights.keys())}"]
    odd = []
    for name, x in made.items():
        off = x - expected.weights[name]
        move = expected.weights[name] - expected.start[name]
        share = off.norm() / move.norm()
        if off.abs().max() > 2e-6 and not share <= 1e-3:
            odd.append(f"{name}: off by {off.abs().max():.2g}, {share:.2g} of the move")
    return odd


def launch(run, kit, out):
    begin = [*shlex.split(run.flags), "--output_dir", str(out)]
    if run.stop:
        # The file is opened first when the run's folder is made.
        stop = (fork_tools.strike, "/out/metrics.jsonl", run.stop + 1, signal.SIGTERM)
        status, _, errors = fork_tools.run(run.script, begin, kit, stop, world=run.world)
        assert status == 130, errors
        assert len(read_lines(out / "metrics.jsonl")) == run.stop
        begin += ["--resume", "--micro_batch_size", str(run.later)]
    status, _, errors = fork_tools.run(run.script, begin, kit, world=run.world)
    assert status == 0, errors


def differences(out, metrics, expected):
    """Where metrics, samples, results and weights of a run are not those of its reference."""
    odd = compare(metrics, expected.metrics, "metrics")
    if expected.samples:
        odd += compare(read_lines(out / "samples.jsonl"), expected.samples, "samples")
    if expected.results:
        made = json.loads((out / "results.json").read_text())
        config = json.loads((out / "reward_model" / "config.json").read_text())
        odd += compare(made, expected.results, "results")
        for name in ("gain", "bias"):
            odd += compare(config[f"reward_{name}"], made[name], f"config {name}")
    return odd + compare_weights(out, expected)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_its_reference(name, kit, tmp_path):
    run = RUNS[name]
    out = tmp_path / "out"
    launch(run, kit, out)
    module = importlib.import_module(run.script[:-3])
    _, args = fork_tools.parse(module, shlex.split(run.flags))
    again = reference.train_reward if run.script == REWARD else reference.reinforce
    expected = again(run.script, vars(args), kit, run.world)
    metrics = read_lines(out / "metrics.jsonl")
    for row in metrics:  # what is no result of a computation in exact numbers
        assert row.pop("seconds") > 0
        assert row.pop("peak_memory_gb") == 0  # there is no GPU
        if run.script != REWARD:
            assert row.pop("first_ratio_error") == 0
            assert row.pop("sampling_error") < ROUNDING
    assert not differences(out, metrics, expected)
