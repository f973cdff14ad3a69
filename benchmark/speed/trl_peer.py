"""TRL's trainers as contenders of throughput.py: PPO of its last release that has it, RLOO of the
current one.

The two releases cannot be in one environment. Each is installed by itself, without dependencies,
into a folder of its own, and runs in a worker process with that folder first on sys.path. A worker
does its set-up, then waits for a line on stdin; for each it does one update and answers with its
seconds and its peak memory. While it waits it costs nothing, so that contenders can take turns
across processes. Its first update, which throughput.py does not count, warms up.

Equal: model, reward model and reference (shape, weights), lengths of all queries, number of
episodes, response length (all tokens are sampled, none ends a response; in the shape of a chat
token 0 ends one), temperature, epochs,
minibatches, rows per micro-batch, K, precision (fp32, or bf16 by autocast over fp32 weights), no
dropout, no gradient checkpointing, no clipping of gradients. Nothing is saved, reported or
evaluated. After each update the worker asserts the lengths of queries and responses, the tokens
that the reward model read, the rows that went through training passes, and the number of optimizer
steps.

Different, as TRL has no other way:
- PPO has a value model of its own, a second trunk; the scripts' value head sits on the policy. It
  is trained and scored as well. Beside it stands `ours-critic-ppo`, which has one too.
- Old log-probabilities of PPO are those of the logits that `generate` returns, kept for all steps.
- Queries are padded to the longest of the batch, not to the full length. Rewards are those of whole
  responses.
- RLOO decodes responses to text and tokenizes it again for its reward model. A token is a word
  here: lengths stay.
- PPO has logits at all positions; so has RLOO on a CPU, in chunks, but on a GPU with Triton at
  response positions.
- Optimizer: PyTorch's fused AdamW. RLOO shuffles once per batch, not once per epoch.
- PPO collects Python's garbage twice per update, 0.2 to 0.3 s each time here: much of the time of a
  small update.
- bf16: PPO samples and computes values of the rollout in fp32 (autocast wraps its training passes
  only); reference and reward model are loaded in bf16. Its bf16 flag has no effect in this version
  of transformers, the environment variable of `accelerate launch --mixed_precision bf16` has.
- `optimise` is everything after the first training pass begins, its metrics and clean-up included.

What is set around it, for equal work: PPO's data loader is a list with its one collated batch, and
its number of accumulated micro-batches is that of a minibatch. (TRL takes that of the whole batch,
so that it would step once per epoch however many minibatches there are, and a loader that ends
makes accelerate step after every micro-batch.)
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from benchmark import common

RELEASES = {"ppo": "1.12.0", "rloo": "1.16.0"}
MODULES = {"ppo": "trl.experimental.ppo", "rloo": "trl.trainer.rloo_trainer"}
FOLDER = Path(__file__).resolve().parent / ".trl"
GIVEN = (
    "batch_size",
    "micro_batch_size",
    "response_length",
    "num_epochs",
    "num_minibatches",
    "dtype",
    "temperature",
    "kl_coef",
    "lr",
    "adam_eps",
    "cliprange",
    "mask_truncated",
)


# --- seen from outside ----------------------------------------------------------------------------
def install(algorithm: str, folder: Path) -> Path:
    """The folder that has this algorithm's release of TRL; downloaded, about 1 MB, if it is not
    there yet. SystemExit if it cannot be."""
    release = RELEASES[algorithm]
    target = folder / release
    if has_trl(target):
        return target
    sys.stderr.write(f"installing trl {release}, without dependencies, into {target}\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(target), f"trl=={release}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if not has_trl(target):
        why = (done.stderr.splitlines() or ["without a reason"])[-1]
        raise SystemExit(f"trl {release} is not in {target} (--trl_dir), and pip fails: {why}")
    return target


def has_trl(folder: Path) -> bool:
    """Whether a release of TRL is installed there."""
    return (folder / "trl").exists()


class Peer(common.Worker):
    """A worker process, seen from outside: `ask({})` is one update."""

    def __init__(
        self,
        algorithm: str,
        folder: str,
        contexts: list[list[int]],
        args: Any,
        trl_dir: Path,
    ) -> None:
        environment = {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if torch.cuda.device_count() > 1:  # the Trainer would take them all
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        if args.dtype == "bf16" and algorithm == "ppo":
            environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
        command = [__file__, algorithm, str(install(algorithm, trl_dir))]
        super().__init__(f"trl-{algorithm}", command, environment)
        given = {name: getattr(args, name) for name in GIVEN}
        given |= {"folder": folder, "contexts": contexts}
        if algorithm == "rloo":
            given["rloo_k"] = args.rloo_k
        self.ask(given)


# --- the worker -----------------------------------------------------------------------------------
def seconds() -> float:
    """A clock that waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Turns(TrainerCallback):
    """Waits for a turn before each update, and tells what the update took and that it did the work
    that was asked."""

    def __init__(
        self, given: dict[str, Any], questions: TextIO, answers: TextIO, baseline: int
    ) -> None:
        self.given = given
        self.questions = questions
        self.answers = answers
        self.baseline = baseline
        self.steps_per_update = given["num_epochs"] * given["num_minibatches"]
        self.running = False
        self.device = common.device()

    def watch(self, trainer: Any, policy: Any, reward: Any) -> None:
        """Look at generation, at what goes through training passes and the reward model, and at
        optimizer steps."""
        generate = policy.generate

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            start = seconds()
            output = generate(*args, **kwargs)
            self.begun = self.begun or start
            self.sample += seconds() - start
            tokens = getattr(output, "sequences", output)
            num_new = tokens.shape[1] - kwargs["input_ids"].shape[1]
            is_end = tokens[:, -num_new:] == 0
            self.kept += int((is_end.cumsum(1) == 0).sum() + is_end.any(1).sum())
            self.query_lengths += kwargs["attention_mask"].sum(1).tolist()
            self.response_lengths.add(num_new)
            return output

        def training_pass(module: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self.optimise = self.optimise or seconds()
                self.rows.append(len(kwargs["input_ids"]))

        def reward_pass(module: Any, args: Any, kwargs: Any) -> None:
            self.read.append(kwargs["attention_mask"].sum())

        def step(*args: Any) -> None:
            self.steps += 1

        policy.generate = timed_generate
        trainer.model.register_forward_pre_hook(training_pass, with_kwargs=True)
        reward.base_model.register_forward_pre_hook(reward_pass, with_kwargs=True)
        register_optimizer_step_post_hook(step)

    def turn(self) -> None:
        """The end of an update, if one is running, and the beginning of the next when it is asked
        for."""
        answer = {}
        if self.running:
            end = seconds()
            self.check()
            phases = {
                "sample": self.sample,
                "score": self.optimise - self.begun - self.sample,
                "optimise": end - self.optimise,
                "other": self.begun - self.start,
                "total": end - self.start,
            }
            answer = {"seconds": phases, "memory": common.used(self.device, self.baseline)}
            if self.given["mask_truncated"]:
                answer["scored"] = self.kept
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()
        if not self.questions.readline():
            raise SystemExit
        self.running = True
        self.query_lengths = []
        self.response_lengths = set()
        self.rows = []
        self.read = []
        self.steps = 0
        self.kept = 0
        self.sample = 0.0
        self.begun = None
        self.optimise = None
        self.start = seconds()

    def check(self) -> None:
        """Stop unless the update was the one that was asked for."""
        given = self.given
        copies = given.get("rloo_k", 1)
        queries = sorted(len(context) for context in given["contexts"] for _ in range(copies))
        length = given["response_length"]
        num_trained = given["num_epochs"] * len(queries)
        num_scored = sum(queries) + length * len(queries)
        facts = {
            "query lengths": (sorted(self.query_lengths), queries),
            "response lengths": (self.response_lengths, {length}),
            "tokens of rewards": (sum(map(int, self.read)), num_scored),
            "rows of training passes": (sum(self.rows), num_trained),
            "rows of a micro-batch": (set(self.rows), {rows_per_pass(given)}),
            "optimizer steps": (self.steps, self.steps_per_update),
        }
        if given["mask_truncated"]:
            del facts["response lengths"], facts["tokens of rewards"]
        for name, (is_, wanted) in facts.items():
            if is_ != wanted:
                raise SystemExit(f"{name}: {is_}, not {wanted}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """PPO tells of the beginning of training and of the ends of updates only."""
        if "rloo_k" not in self.given:
            self.turn()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """RLOO's updates are made of several steps; responses are sampled in the first."""
        if state.global_step % self.steps_per_update == 0:
            self.turn()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """PPO's step is a whole update."""
        if "rloo_k" not in self.given:
            self.turn()


def rows_per_pass(given: dict[str, Any]) -> int:
    """Rows of a micro-batch. TRL needs all of them equal."""
    minibatch = given["batch_size"] // given["num_minibatches"]
    rows = min(given["micro_batch_size"], minibatch)
    if minibatch % rows:
        raise SystemExit(f"trl: micro-batches of {rows} do not divide a minibatch of {minibatch}")
    return rows


def word_tokenizer(vocabulary: int, pad: str, eos: str) -> PreTrainedTokenizerFast:
    """Token i is the word `ti`. Padding on the left."""
    words = {f"t{i}": i for i in range(vocabulary)}
    words.setdefault(pad, vocabulary)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, padding_side="left"
    )


def common_settings(given: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Arguments that both trainers take."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": rows_per_pass(given),
        "temperature": given["temperature"],
        "learning_rate": given["lr"],
        "adam_epsilon": given["adam_eps"],
        "lr_scheduler_type": "constant",
        "bf16": given["dtype"] == "bf16",
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": common.device().type == "cpu",
    }


def load(
    auto_class: Any, given: dict[str, Any], dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Any:
    """A model with the weights that the other contenders have."""
    torch.manual_seed(1)
    return auto_class.from_pretrained(given["folder"], dtype=dtype, **kwargs)


def make_ppo(given: dict[str, Any], output_dir: str, turns: Turns) -> Any:
    """A PPOTrainer. Its padding is a token that no model has and that it never feeds to one. Where
    responses end, they do so at token 0; then it does feed its padding to models, so that is their
    last token, and queries have the one before it instead."""
    trl = importlib.import_module(MODULES["ppo"])
    rows = rows_per_pass(given)
    minibatch = given["batch_size"] // given["num_minibatches"]
    frozen = torch.bfloat16 if given["dtype"] == "bf16" else torch.float32
    policy = load(AutoModelForCausalLM, given)
    value = load(AutoModelForSequenceClassification, given, num_labels=1)
    reward = load(AutoModelForSequenceClassification, given, frozen, num_labels=1)
    ends = {}
    if given["mask_truncated"]:
        ends = {"stop_token": "eos", "missing_eos_penalty": 1.0}
    args = trl.PPOConfig(
        **common_settings(given, output_dir),
        total_episodes=1_000_000 * given["batch_size"],
        gradient_accumulation_steps=given["batch_size"] // rows,
        num_ppo_epochs=given["num_epochs"],
        num_mini_batches=given["num_minibatches"],
        local_rollout_forward_batch_size=rows,
        response_length=given["response_length"],
        num_sample_generations=0,
        whiten_rewards=minibatch >= 8,  # fewer it refuses
        kl_coef=given["kl_coef"],
        cliprange=given["cliprange"],
        **ends,
    )
    size = policy.config.vocab_size
    pad, end = "[PAD]", "[PAD]"
    contexts = given["contexts"]
    if given["mask_truncated"]:
        pad, end = f"t{size - 1}", "t0"
        contexts = [[min(token, size - 2) for token in context] for context in contexts]
    trainer = trl.PPOTrainer(
        args=args,
        processing_class=word_tokenizer(size, pad, end),
        model=policy,
        ref_model=load(AutoModelForCausalLM, given, frozen),
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": contexts}),
        callbacks=[turns],
    )
    trainer.dataloader = list(trainer.dataloader)
    trainer.accelerator.gradient_accumulation_steps = minibatch // rows
    turns.watch(trainer, policy, reward)
    return trainer


def make_rloo(given: dict[str, Any], output_dir: str, turns: Turns) -> Any:
    """An RLOOTrainer. Its padding and end of text is token 0, which no query has, and which
    `generate` may sample only where responses end."""
    trl = importlib.import_module("trl")
    policy = load(AutoModelForCausalLM, given)
    reward = load(AutoModelForSequenceClassification, given, num_labels=1)
    tokenizer = word_tokenizer(policy.config.vocab_size, "t0", "t0")
    least = 0 if given["mask_truncated"] else given["response_length"]
    passes = given["batch_size"] // given["num_minibatches"] // rows_per_pass(given)
    args = trl.RLOOConfig(
        **common_settings(given, output_dir),
        max_steps=1_000_000,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes * given["num_minibatches"],
        num_iterations=given["num_epochs"],
        num_generations=given["rloo_k"],
        max_completion_length=given["response_length"],
        generation_kwargs={"min_new_tokens": least},
        shuffle_dataset=False,
        disable_dropout=True,
        logging_steps=turns.steps_per_update,
        beta=given["kl_coef"],
        epsilon=given["cliprange"],
    )
    texts = ["".join(f"t{token} " for token in context) for context in given["contexts"]]
    trainer = trl.RLOOTrainer(
        model=policy,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
        callbacks=[turns],
    )
    turns.watch(trainer, policy, reward)
    return trainer


def main() -> None:
    text = "A worker of throughput.py: one JSON line in, one update, one out."
    parser = common.make_parser(text, __file__)
    parser.add_argument("algorithm", choices=RELEASES)
    parser.add_argument("folder", help="where that algorithm's release of TRL is")
    words = parser.parse_args()
    if not has_trl(Path(words.folder)):
        raise SystemExit(f"there is no trl in {words.folder}: throughput.py installs it")
    sys.path.insert(0, words.folder)
    importlib.import_module(MODULES[words.algorithm])
    make = {"ppo": make_ppo, "rloo": make_rloo}[words.algorithm]
    baseline = common.baseline(common.device())
    with common.private_stdout() as answers, tempfile.TemporaryDirectory() as output_dir:
        given = json.loads(sys.stdin.readline())
        turns = Turns(given, sys.stdin, answers, baseline)
        trainer = make(given, output_dir, turns)
        wanted = "no" if given["dtype"] == "fp32" else given["dtype"]
        precision = trainer.accelerator.mixed_precision
        if precision != wanted:
            raise SystemExit(f"trl runs in mixed precision {precision}, not {wanted}")
        trainer.train()


if __name__ == "__main__":
    main()
