"""Settings: defaults of all flags, presets, what goes together, and runs of presets."""

import json
import random
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

import fork_tools
import huggingface_hub.constants
import pytest
import tiny_models as tiny
from conftest import GOLDEN, ROOT
from fork_tools import PPO, REWARD, RLOO, parse
from huggingface_hub import HfFileSystem
from run_tools import call, read_lines, read_metrics, turn
from tiny_models import BOTH, Stop, values
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

import ppo_rlhf
import rloo_rlhf
import train_reward
from plumbing import data as data_module
from plumbing import labels as labels_module
from plumbing import models as models_module
from plumbing.launch import UserError

SCRIPTS = [ppo_rlhf, rloo_rlhf, train_reward]
ALL = """seed=1 output_dir=None resume=False checkpoint_every=25 track=False
base_model='tiny/model' dtype='fp32' gradient_checkpointing=False query_dataset='tiny/queries'
query_length=32 prompt_column=None long_queries=None query_prefix=None query_suffix=None
start_text='.' end_text='.' response_length=24 temperature=0.7 truncate_token='.' truncate_after=16
micro_batch_size=128 lr_schedule='linear' lr_warmup=0 adam='tf' adam_eps=1e-5
adam_betas=(0.9,0.999) weight_decay=0.0 max_grad_norm=None"""
POLICY = """eval_queries=64 reward_model=None reward_fn=None lora_rank=0 lora_alpha=16.0
penalty_reward_value=-1.0 penalty_mode='replace' mask_truncated=False total_episodes=12800
batch_size=128 num_minibatches=1 num_epochs=4 lr=2e-4 kl_coef=0.15 adaptive_kl_target=6.0
kl_horizon=2000.0 max_kl=200.0 cliprange=0.2"""
OWN = {
    ppo_rlhf: f"""{POLICY} cliprange_value=0.2 vf_coef=0.1 gamma=1.0 lam=0.95 whiten_rewards=True
whiten_advantages=True critic='shared' critic_lr=None critic_warmup=0""",
    rloo_rlhf: f"{POLICY} rloo_k=4",
    train_reward: """label_dataset='tiny/labels' num_labels=None eval_labels=512 lr=2e-3
normalization_samples=512 batch_size=8""",
}
# OpenAI's launch.py: a table for each task. The queries of its label files are cut to start and end
# text already.
FILES = "hf://datasets/vwxyzjn/lm-human-preferences"
BOOKS = """query_length=64 response_length=24 temperature=0.7 query_prefix=None query_suffix=None
truncate_token='.' long_queries=None"""
BOOKS_RL = """lr=1e-5 batch_size=512 truncate_after=16 kl_coef=0.15 adaptive_kl_target=6.0
kl_horizon=1e4"""
POSTS = r"""query_length=500 response_length=75 truncate_token='\n' long_queries='keep_start'
query_suffix='\n\nTL;DR:'"""
POSTS_RL = "lr=2e-6 batch_size=32 truncate_after=55 adaptive_kl_target=None kl_horizon=2e3"
TLDR = f"{POSTS} temperature=0.7 query_prefix=None"
NEWS = rf"{POSTS} temperature=0.5 query_prefix='Article:\n\n'"
TASKS = {  # the number in the file's name, the task, PPO and RLOO, the reward model, PPO
    "sentiment": ("5k", BOOKS, BOOKS_RL, "num_labels=4992 batch_size=32 lr=5e-5"),
    "descriptiveness": ("5k", BOOKS, BOOKS_RL, "num_labels=4992 batch_size=32 lr=5e-5"),
    "cnndm": ("60k", NEWS, f"{POSTS_RL} kl_coef=0.01", "num_labels=46000 batch_size=16 lr=2.5e-5"),
    "tldr": ("60k", TLDR, f"{POSTS_RL} kl_coef=0.03", "num_labels=46000 batch_size=16 lr=2.5e-5"),
}
ALL_TASKS = "base_model='gpt2' start_text=None end_text=None adam='tf' adam_eps=1e-5"
ALL_RL = """total_episodes=1000000 num_epochs=4 num_minibatches=1 cliprange=0.2
mask_truncated=False penalty_reward_value=-1.0 penalty_mode='replace'"""
ALL_PPO = "vf_coef=0.1 cliprange_value=0.2 gamma=1.0 lam=0.95"


@pytest.mark.parametrize("module", SCRIPTS)
def test_defaults_of_all_flags_are_the_preset_tiny_and_flags_win(module):
    expected = values(f"{ALL} {OWN[module]}")
    assert {field.name for field in fields(module.Args)} == set(expected)
    assert vars(module.Args()) == expected
    assert list(module.PRESETS) == ["tiny", *TASKS]
    assert parse(module, []) == parse(module, ["tiny"]) == ("tiny", module.Args())
    preset, args = parse(module, ["tldr", "--temperature", "0.9"])
    assert (preset, args.temperature, args.query_length) == ("tldr", 0.9, 500)


@pytest.mark.parametrize("module", SCRIPTS)
def test_words_of_a_command_line(module, capsys):
    """`none` in any form, the largest seed, and -h, which is no preset."""
    given = "--end_text none --start_text=none --truncate_token None --seed 3999999999".split()
    _, args = parse(module, [*given, "--output_dir=a-none"])
    assert args.end_text is args.start_text is args.truncate_token is None
    assert (args.seed, args.output_dir) == (3_999_999_999, "a-none")
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit) as end:
            parse(module, [word])
        assert end.value.code == 0
        printed = capsys.readouterr().out
        assert "A preset may come first" in printed
        assert "--output-dir" not in printed


# --- what goes together ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("module", "settings", "good", "bad"),
    [
        (ppo_rlhf, "num_minibatches=3 batch_size", "12", "9 8"),
        (rloo_rlhf, "rloo_k=4 batch_size", "8", "12"),
        (rloo_rlhf, "rloo_k=4 batch_size=8 micro_batch_size", "12", "2 6"),
        (train_reward, "batch_size=4 normalization_samples", "6 0", "3"),
        (train_reward, "normalization_samples=6 batch_size", "4", "3"),
        # a fifth of the batch is 12.8: the coefficient would be times 1 - 0.2 * 64 / 12.8 = 0
        (rloo_rlhf, "batch_size=64 kl_horizon", "12.9", "12.8"),
        (rloo_rlhf, "batch_size=64 adaptive_kl_target=None kl_horizon", "1.0", ""),
        (ppo_rlhf, "critic_warmup=2 total_episodes", "257", "256"),
    ],
)
def test_sizes_that_go_together(module, settings, good, bad):
    """On two processes: values of the last setting that pass, and values that do not."""
    two = SimpleNamespace(num_processes=2, process_index=0)
    for value in f"{good} {bad}".split():
        with (
            mock.patch.object(module, "make_accelerator", lambda dtype: two),
            mock.patch.object(module, "choose_folder", side_effect=Stop),
            pytest.raises(Stop if value in good.split() else UserError),
        ):
            module.main("tiny", module.Args(**values(f"{settings}={value}")))


@pytest.mark.parametrize("module", SCRIPTS)
def test_a_response_is_long_enough_to_end(module):
    """The first place where it may end, 16, is its 17th token. Without an end any length does."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny/model")
    end = labels_module.end_token_id(module.Args(response_length=17), tokenizer)
    assert tokenizer.decode([end]) == "."
    with pytest.raises(UserError, match="^--truncate_after 16 must be below --response_length 16$"):
        labels_module.end_token_id(module.Args(response_length=16), tokenizer)
    args = module.Args(response_length=16, truncate_token=None)
    assert labels_module.end_token_id(args, tokenizer) is None


@BOTH
@pytest.mark.parametrize("longest", [0, 1, 3])
def test_the_window_holds_every_response(module, longest, tmp_path):
    """Two of the four are held out. With a prefix and a suffix the policy's query is the longer."""
    queries = [data_module.Query([1], [i, i], {}) for i in range(4)]
    queries[longest].for_policy = [longest] * 9
    with (
        mock.patch.object(module, "load_queries", lambda *_: (queries[:1], queries[1:])),
        mock.patch.object(module, "load_reward_model") as load_reward,
        mock.patch.object(module, "load_policy_and_reference", side_effect=Stop) as load_both,
        pytest.raises(Stop),
    ):
        flags = {"reward_model": "any", "output_dir": str(tmp_path / "out")}
        module.main("tiny", module.Args(eval_queries=2, **flags))
    for called in (load_reward, load_both):
        load_model = called.call_args.args[0]
        assert load_model.keywords["longest"] == 9 + 24


@pytest.mark.parametrize(
    ("sizes", "held_out", "query", "longest"),
    [
        ([3, 9], [3], 1, 9),
        ([9, 3], [3], 1, 9),
        ([3], [3, 9], 1, 9),
        ([3], [], 8, 13),
    ],
)
def test_the_window_holds_every_label_and_every_sample(sizes, held_out, query, longest, tmp_path):
    """Of the reference and of the reward model."""

    def labels(sizes):
        return [labels_module.Comparison([1, 2], [[3], (size - 2) * [4]], 0) for size in sizes]

    both = (labels(sizes), labels(held_out))
    queries = [data_module.Query([1], [1] * size, {}) for size in (1, query, 1)]
    args = train_reward.Args(response_length=5, batch_size=1, output_dir=str(tmp_path / "out"))
    with (
        mock.patch.object(train_reward, "load_queries", lambda *_: ([], queries)),
        mock.patch.object(train_reward, "load_labels", lambda *_: both),
        mock.patch.object(train_reward, "load_model") as load,
        pytest.raises(Stop),
    ):
        load.side_effect = (tiny.make_lm("gpt2"), Stop)
        train_reward.main("tiny", args)
    assert [one.args[-2] for one in load.call_args_list] == [longest] * 2


@pytest.mark.parametrize(
    ("is_from_chat", "asked", "num_samples", "fits"),
    [
        (True, "w1", 2, False),
        (False, turn("w1"), 2, False),
        (True, turn("w1"), 2, True),
        (False, "w1", 2, True),
        (True, "w1", 0, True),
    ],
)
def test_labels_and_queries_are_both_chats_or_both_texts(
    is_from_chat, asked, num_samples, fits, tmp_path
):
    """Unless no query is sampled from."""
    labels = [labels_module.Comparison([1], [[2], [3]], 0, is_from_chat)]
    queries = [data_module.Query([1], [1], {}, asked)]
    given = {"normalization_samples": num_samples, "output_dir": str(tmp_path / "out")}
    says = "^--label_dataset and --query_dataset must be of one kind, chats or texts$"
    with (
        mock.patch.object(train_reward, "load_queries", lambda *_: ([], queries)),
        mock.patch.object(train_reward, "load_labels", lambda *_: (labels, [])),
        mock.patch.object(train_reward, "load_model", side_effect=Stop),
        pytest.raises(Stop) if fits else pytest.raises(UserError, match=says),
    ):
        train_reward.main("tiny", train_reward.Args(batch_size=1, **given))


# --- presets --------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS)
def test_values_are_those_of_openais_launch_file(task):
    size, of_task, rl, reward = TASKS[task]
    file = f"{FILES}/{task}/offline_{size}.json"
    shared = values(f"{ALL_TASKS} {of_task}") | {"query_dataset": file}
    rl = values(f"{ALL_RL} {rl}")
    # The original takes 512 samples when asked for 256.
    of_labels = {"label_dataset": file, "normalization_samples": 512}
    whitening = {"whiten_rewards": size == "5k", "whiten_advantages": True}
    for module, expected in (
        (train_reward, values(reward) | of_labels),
        (ppo_rlhf, rl | values(ALL_PPO) | whitening),
        (rloo_rlhf, rl),
    ):
        expected = shared | expected
        preset, args = parse(module, [task])
        assert preset == task
        assert {name: getattr(args, name) for name in expected} == expected

    ppo, rloo = (vars(parse(module, [task])[1]) for module in (ppo_rlhf, rloo_rlhf))
    names = ppo.keys() & rloo.keys()
    assert {name: ppo[name] for name in names} == {name: rloo[name] for name in names}


LABELS = "datasets--vwxyzjn--lm-human-preferences"
PAD = 50_259
ROWS = 12  # of every table
EOS = "<|endoftext|>"
SMALL = values("n_embd=8 n_layer=1 n_head=2 n_positions=1024")


def make_tokenizer():
    """A byte-level tokenizer of GPT-2's size, of bytes and " w256", " w257", ..; EOS is last."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [*(f"\u0120w{i}" for i in range(256, 50_256)), EOS]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_label(rng, length, response):
    """A label as OpenAI's: a padded query of up to `length` tokens, four samples and the best."""
    query = rng.sample(range(256, 50_256), rng.randrange(length // 4, length + 1))
    label = {"query": query + [PAD] * (length - len(query)), "best": rng.randrange(4)}
    for i in range(4):
        label[f"sample{i}"] = rng.sample(range(50_257), response)
    return label


def snapshot(cache, name):
    """The folder of a repository's files in the cache."""
    folder = cache / name / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (cache / name / "refs").mkdir()
    (cache / name / "refs" / "main").write_text("abc")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A hub cache, as HF_HOME sets it, with a stand-in for every file that a preset names. They say
    what the hub would say of names."""
    cache = tmp_path_factory.mktemp("cache")
    folder = snapshot(cache, "models--gpt2")
    AutoModelForCausalLM.from_config(GPT2Config(**SMALL)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rng = random.Random(0)
    tables = snapshot(cache, LABELS)
    for task, (size, *_) in TASKS.items():
        (tables / task).mkdir()
        length, response = (64, 24) if size == "5k" else (500, 75)
        labels = [make_label(rng, length, response) for _ in range(ROWS)]
        (tables / task / f"offline_{size}.json").write_text(json.dumps(labels))

    def glob(_, name, **options):
        is_there = (tables / name.partition("preferences/")[2]).exists()
        return {name: {"type": "file"}} if is_there else {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(HfFileSystem, "glob", glob)
        patch.setattr(HfFileSystem, "_repo_and_revision_exist", lambda *_: (True, None))
        yield


@pytest.mark.parametrize("task", ["sentiment", "cnndm"])
def test_every_command_line_runs_offline(task, cache, tmp_path):
    """No query is left out; a label would leave too few. The others are like these."""
    small = {  # the reward model comes first: the others take it
        REWARD: "--batch_size 4 --num_labels 4 --normalization_samples 2",
        PPO: "--batch_size 2 --total_episodes 2 --eval_queries 1",
        RLOO: "--batch_size 4 --total_episodes 4 --eval_queries 1",
    }
    for script, words in small.items():
        call(script, [task, *words.split()], tmp_path)
        (folder,) = tmp_path.glob(f"runs/{script[:-3]}-{task}-1-*")
        assert len(read_lines(folder / "metrics.jsonl")) == 1
        assert (folder / fork_tools.MODEL[script] / "config.json").exists()
    for like in (task, {"sentiment": "descriptiveness", "cnndm": "tldr"}[task]):
        _, args = parse(ppo_rlhf, [like])
        tokenizer = models_module.load_tokenizer("base_model", args.base_model)
        _, queries = data_module.load_queries(args, tokenizer, 0, 2 * ROWS)
        assert len(queries) == ROWS


# --- whole runs -----------------------------------------------------------------------------------
def test_defaults_give_the_recorded_metrics(tmp_path):
    recorded = json.loads((GOLDEN / "defaults.json").read_text())
    few = f"--reward_model {REWARD}/reward_model --eval_queries 2"
    few += " --batch_size 32 --total_episodes 96"
    flags = {
        REWARD: "--num_labels 24 --normalization_samples 64 --seed 40",
        PPO: f"{few} --seed 38",
        RLOO: f"{few} --seed 15",
    }
    far = (fork_tools.refuse_near_draws, 5e-6)
    for script in flags:
        words = ["--output_dir", script, *flags[script].split()]
        fork_tools.succeed(script, words, tmp_path, far)
        made = read_metrics(tmp_path / script)
        assert len(made) == 3
        for mine, theirs in zip(made, recorded[script], strict=True):
            assert mine.pop("sampling_error", 0) < 1e-4
            if script == RLOO:
                assert mine.pop("loss/total") == mine["loss/policy"]
            # RLOO's ratio has the rounding of 24 log-probabilities, of 5e-7 each.
            assert mine == pytest.approx(theirs, rel=3e-5, abs=1e-5)
