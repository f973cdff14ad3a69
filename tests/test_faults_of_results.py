"""Small faults that would change what a run computes, and that whole runs would not show."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from tiny_models import (
    VOCABULARY,
    make_config,
    make_queries,
    make_responses,
    random_rows,
    randomize,
    save_model,
    save_tokenizer,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import ppo_rlhf
import rloo_rlhf
import train_reward
from tf_adam import make_optimizer

POLICY_SCRIPTS = ["ppo_rlhf", "rloo_rlhf"]
SETTINGS = {
    "batch_size": 4,
    "micro_batch_size": 4,
    "response_length": 5,
    "truncate_token": None,
}
LABEL = train_reward.Comparison([5, 6, 7], [[8, 9], [10, 11, 12]], 1)


class Stop(Exception):
    """Raised in the place of a function, to end main where it is called."""


def make_model(auto_class: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    """A random GPT-2 of 50 words."""
    torch.manual_seed(0)
    model = auto_class.from_config(make_config("gpt2", **changes), attn_implementation="eager")
    randomize(model)
    return model.eval()


def make_classifier() -> Any:
    """The same with one label."""
    return make_model(AutoModelForSequenceClassification, num_labels=1)


def make_policy(script: Any, **changes: Any) -> tuple[Any, Any]:
    """Settings of a tiny run of PPO or RLOO, and a random policy."""
    own = {"rloo_k": 2} if script is rloo_rlhf else {}
    args = script.Args(**SETTINGS | own | changes)
    if script is rloo_rlhf:
        return args, script.Actor(make_model(), VOCABULARY, args)
    return args, script.ActorCritic(make_model(), VOCABULARY)


def roll_out(script: Any, args: Any, policy: Any) -> Any:
    """A batch of four responses; with RLOO two to each query."""
    contexts = random_rows([3, 6], 1)
    if script is rloo_rlhf:
        contexts = [contexts[0], contexts[0], contexts[1], contexts[1]]
    else:
        contexts = contexts + random_rows([4, 2], 2)
    u = script.uniforms(1, 1, 4, args.response_length)
    batch = script.rollout(policy, make_queries(contexts), u, None, args)
    script.set_logprobs(batch, policy, policy, torch.arange(4).view(1, 4), args)
    return batch


def update(script: Any, args: Any, policy: Any, batch: Any) -> dict[str, float]:
    """Metrics of an update on that batch."""
    accelerator = Accelerator(cpu=True)
    if script is ppo_rlhf:
        batch.rewards = torch.randn(4, 5)
        take_steps = script.ppo_update
    else:
        batch.advantages = torch.randn(4)
        take_steps = script.rloo_update
    optimizer = make_optimizer(policy, args)
    epochs = torch.arange(4).view(1, 1, 4).repeat(args.num_epochs, 1, 1)
    return script.reduce_means(take_steps(accelerator, policy, optimizer, batch, epochs, args))


def stop(*arguments: Any, **named: Any) -> None:
    """Ends main."""
    raise Stop


@pytest.mark.parametrize("shift", [0.5, -0.5])
@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_errors_of_log_probabilities_are_of_the_worst_token(name: str, shift: float) -> None:
    script = importlib.import_module(name)
    args, policy = make_policy(script, num_epochs=2, lr=0.01)
    batch = roll_out(script, args, policy)
    right = batch.logprobs.clone()
    batch.logprobs[2, 1] += shift
    batch.sampled_logprobs[2, 1] += shift
    batch.sampled_logprobs[0, 3] = right[0, 3] + shift / 2
    metrics = update(script, args, policy, batch)
    assert metrics["first_ratio_error"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["sampling_error"] == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_errors_of_log_probabilities_count_outside_the_mask_too(name: str) -> None:
    script = importlib.import_module(name)
    args, policy = make_policy(script, num_epochs=2, lr=0.01)
    batch = roll_out(script, args, policy)
    batch.loss_mask[2, 4] = False
    batch.logprobs[2, 4] += 1
    batch.sampled_logprobs[2, 4] += 1
    metrics = update(script, args, policy, batch)
    assert metrics["first_ratio_error"] == pytest.approx(1, abs=1e-4)
    assert metrics["sampling_error"] < 1e-3  # both were shifted
    # The second step's policy is another one.
    approximate_kl = "ppo/policy/approxkl" if script is ppo_rlhf else "rloo/approxkl"
    assert metrics[approximate_kl] > 1e-3


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, "train_reward"])
def test_totals_of_metrics_count_beyond_the_integers_of_fp32(name: str) -> None:
    script = importlib.import_module(name)
    Accelerator(cpu=True)
    many = torch.tensor([2.0**24])
    one = torch.ones(1)
    sums = [script.sums_over(one, {"x": many}), script.sums_over(one, {"x": one})]
    assert script.reduce_means(sums)["x"] == pytest.approx((2**24 + 1) / 2, rel=1e-9)
    counts = [
        script.sums_over(many, {"x": 0 * one}),
        script.sums_over(one, {"x": one}),
    ]
    assert script.reduce_means(counts)["x"] == pytest.approx(1 / (2**24 + 1), rel=1e-9)


def test_whitening_adds_its_epsilon_to_the_variance() -> None:
    x = torch.tensor([[-1e-4, 1e-4]])  # variance 1e-8
    whitened = ppo_rlhf.whiten(x, torch.ones(1, 2, dtype=torch.bool), shift_mean=True)
    assert whitened[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_lora_adapters_depend_on_the_seed_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    save_model(tmp_path / "model", "gpt2")
    monkeypatch.setattr(script, "load_queries", lambda *_: make_queries([[1], [2], [3]]))
    monkeypatch.setattr(script, "load_reward", lambda *_: None)
    monkeypatch.setattr(script, "Actor" if script is rloo_rlhf else "ActorCritic", stop)
    load = script.load_policy_and_reference
    loaded = []

    def keep(*arguments: Any) -> Any:
        loaded.append(load(*arguments))
        return loaded[-1]

    monkeypatch.setattr(script, "load_policy_and_reference", keep)
    settings = {
        "base_model": str(tmp_path / "model"),
        "lora_rank": 2,
        "lora_alpha": 6.0,
    }
    settings |= {"output_dir": str(tmp_path / "out"), "eval_queries": 1}
    for i, seed in enumerate([1, 1, 2]):
        torch.manual_seed(100 + i)
        with pytest.raises(Stop):
            script.main("tiny", script.Args(seed=seed, **settings))
    weights = []
    for lm, _ in loaded:
        adapters = {key: x for key, x in lm.state_dict().items() if "lora_A" in key}
        weights.append(torch.cat([x.flatten() for x in adapters.values()]))
    assert torch.equal(weights[0], weights[1])
    assert (weights[0] - weights[2]).abs().mean() > 0.01
    layers = [module for module in loaded[0][0].modules() if hasattr(module, "lora_A")]
    assert {layer.scaling["default"] for layer in layers} == {3.0}  # --lora_alpha / --lora_rank


def types_of_outputs(model: Any, run: Any) -> set[torch.dtype]:
    """The types that the linear layers of the model's trunk give in run()."""
    types = []
    hooks = []
    for module in model.base_model.modules():
        if type(module).__name__ == "Conv1D":
            hook = module.register_forward_hook(lambda _, inputs, output: types.append(output))
            hooks.append(hook)
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return {output.dtype for output in types}


def types_of_weights(model: Any) -> set[torch.dtype]:
    """The types of the weights of these layers."""
    layers = [m for m in model.base_model.modules() if type(m).__name__ == "Conv1D"]
    return {layer.weight.dtype for layer in layers}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_reward_model_is_trained_in_the_given_type(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", "gpt2")
    caught = []

    def catch(*arguments: Any) -> None:
        caught.extend(arguments)
        raise Stop

    queries = make_queries([[1, 2]])
    monkeypatch.setattr(train_reward, "load_queries", lambda *_: queries)
    monkeypatch.setattr(train_reward, "load_labels", lambda *_: ([LABEL], [LABEL]))
    monkeypatch.setattr(train_reward, "reference_rewards", catch)
    args = train_reward.Args(
        base_model=str(tmp_path / "model"),
        output_dir=str(tmp_path / "out"),
        dtype=dtype,
    )
    with pytest.raises(Stop):
        train_reward.main("tiny", args)
    _, reward, ref, *_ = caught
    expected = torch.bfloat16 if dtype == "bf16" else torch.float32
    ids, mask = train_reward.pad_rows([[1, 2], [3, 4, 5]])
    cache = train_reward.DynamicCache(config=ref.lm.config)
    assert types_of_outputs(ref.lm, lambda: ref(ids, mask, cache)) == {expected}
    assert types_of_outputs(reward.lm, lambda: reward(ids, mask, ids, mask)) == {expected}
    assert types_of_weights(ref.lm) == {expected}  # frozen
    assert types_of_weights(reward.lm) == {torch.float32}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_policy_and_reference_run_in_the_given_type(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    save_model(tmp_path / "model", "gpt2")
    made = []
    kind = "Actor" if script is rloo_rlhf else "ActorCritic"
    make = getattr(script, kind)

    def keep(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(script, kind, keep)
    monkeypatch.setattr(script, "evaluate", stop)
    monkeypatch.setattr(script, "load_queries", lambda *_: make_queries([[1], [2], [3]]))
    monkeypatch.setattr(script, "load_reward", lambda *_: None)
    settings = {
        "base_model": str(tmp_path / "model"),
        "output_dir": str(tmp_path / "out"),
    }
    with pytest.raises(Stop):
        script.main("tiny", script.Args(dtype=dtype, eval_queries=1, **settings))
    policy, ref = made
    ids, mask = script.pad_rows([[1, 2, 3]] * 4)
    expected = torch.bfloat16 if dtype == "bf16" else torch.float32
    for model in (policy, ref):
        assert types_of_outputs(model.lm, lambda model=model: model(ids, mask)) == {expected}
    assert types_of_weights(policy.lm) == {torch.float32}
    assert types_of_weights(ref.lm) == {expected}


def make_tokenizer(words: dict[str, int], first: str | None = None, **special: str) -> Any:
    """A tokenizer of these words, which may put one before every text."""
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if first:
        pair = (first, words[first])
        tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[pair])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"bos_token": "<s>"}, [1]),
        ({"cls_token": "<s>"}, [1]),
    ],
)
def test_bos_is_what_stands_before_a_text(special: dict[str, str], expected: list[int]) -> None:
    words = {"?": 0, "<s>": 1, "<other>": 2, "a": 3, "b": 4}
    tokenizer = make_tokenizer(words, "<s>", **special)
    assert ppo_rlhf.bos(tokenizer) == expected
    assert ppo_rlhf.encode("a b", tokenizer) == [3, 4]
    assert ppo_rlhf.encode([1, 3, 4], tokenizer) == ([3, 4] if expected else [1, 3, 4])


def test_an_unknown_word_that_is_called_bos_begins_no_text() -> None:
    """GPT-2's <|endoftext|> is both."""
    for text in ("a", "b"):
        tokenizer = make_tokenizer({"?": 0, text: 1}, bos_token="?")
        for script in (ppo_rlhf, rloo_rlhf, train_reward):
            assert script.bos(tokenizer) == []
            assert script.encode("? b", tokenizer)[0] == 0


def test_eos_is_the_end_of_sequence_also_where_the_vocabulary_has_that_word() -> None:
    tokenizer = make_tokenizer({"?": 0, "eos": 1, "<end>": 2}, eos_token="<end>")
    args = ppo_rlhf.Args(truncate_token="eos")
    assert ppo_rlhf.token_id("truncate_token", tokenizer, args) == 2
    args.truncate_token = "<end>"
    assert ppo_rlhf.token_id("truncate_token", tokenizer, args) == 2


def tables(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    """Every table that ppo_rlhf loads has these rows."""
    splits = {"train": datasets.Dataset.from_list(rows)}
    monkeypatch.setattr(ppo_rlhf, "load_table", lambda flag, args: splits)


COLUMNS = ["query", "prompt", "question", "instruction", "messages", "conversations", "text"]
COLUMNS += ["article", "content"]


@pytest.mark.parametrize("first", range(len(COLUMNS)))
def test_queries_are_the_first_column_that_there_is_of(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    row: dict[str, Any] = {"other": "w40"}
    for i in reversed(range(first, len(COLUMNS))):
        row[COLUMNS[i]] = f"w{i + 1}"
    for name in {"messages", "conversations"} & row.keys():
        row[name] = [{"role": "user", "content": row[name]}]
    tables(monkeypatch, [row])
    args = ppo_rlhf.Args(start_text=None, end_text=None)
    Accelerator(cpu=True)
    (query,) = ppo_rlhf.load_queries("query_dataset", args, tokenizer, 9)
    assert query.input_ids == [first + 1]


@pytest.mark.parametrize(
    ("name", "expected", "rows"),
    [
        ("an/owner:part", ("an/owner", "part"), {"train": 1, "test": 2}),
        ("an/owner", ("an/owner", None), {"train": 1, "test": 2}),
        ("an/owner:part:test", ("an/owner", "part"), {"train": 2}),
        ("an/owner::test", ("an/owner", None), {"train": 2}),
        ("an/owner::train", ("an/owner", None), {"train": 1}),
        ("an/owner::other", ("an/owner", None), None),
    ],
)
def test_config_and_split_of_a_table_on_the_hub_are_passed_on(
    name: str, expected: tuple[str, ...], rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load(*names: str) -> dict[str, Any]:
        calls.append(names)
        table = datasets.Dataset.from_list([{"text": "w1"}, {"text": "w2"}])
        return {"train": table.select([0]), "test": table}

    monkeypatch.setattr(ppo_rlhf.datasets, "load_dataset", load)
    args = ppo_rlhf.Args(query_dataset=name)
    if rows is None:
        says = f"^--query_dataset {name} has .'train', 'test'.: name one"
        with pytest.raises(ppo_rlhf.UserError, match=says):
            ppo_rlhf.load_table("query_dataset", args)
    else:
        splits = ppo_rlhf.load_table("query_dataset", args)
        assert {split: len(table) for split, table in splits.items()} == rows
    assert calls == [expected]


def read(rows: list[dict[str, Any]], folder: Path) -> list[train_reward.Comparison]:
    """The rows as labels."""
    table = datasets.Dataset.from_list(rows)
    tokenizer = save_tokenizer(folder)
    args = train_reward.Args()
    return train_reward.read_labels("label_dataset", table, range(len(rows)), tokenizer, args)


def test_sample10_comes_after_sample9(tmp_path: Path) -> None:
    row: dict[str, Any] = {"query": "w40", "best": 10}
    for i in (10, 1, 0, 9, 2, 8, 3, 7, 4, 6, 5):
        row[f"sample{i}"] = f"w{i + 1}"
    (label,) = read([row], tmp_path)
    assert label.responses == [[i] for i in range(1, 12)]
    assert label.best == 10


@pytest.mark.parametrize("best", [0, 1, -1, 2, None])
def test_best_is_the_number_of_a_sample(best: int | None, tmp_path: Path) -> None:
    rows = [{"query": "w1", "sample0": "w2", "sample1": "w3", "best": best}]
    if best in (0, 1):
        assert read(rows, tmp_path)[0].best == best
    else:
        says = "^--label_dataset tiny/labels, row 0: neither query, sample0, .., best, "
        with pytest.raises(train_reward.UserError, match=says):
            read(rows, tmp_path)


def record_states(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Lists the states that the trunk will give in this script, with their gradients."""
    states = []
    plain = script.read

    def record(*arguments: Any, **named: Any) -> Any:
        output = plain(*arguments, **named)
        given = output.logits if "logits" in output else output.last_hidden_state
        given.retain_grad()
        states.append(given)
        return output

    monkeypatch.setattr(script, "read", record)
    return states


@pytest.mark.parametrize("name", ["rloo_rlhf", "train_reward"])
def test_the_unused_states_of_shared_queries_get_a_gradient_of_zero(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    Accelerator(cpu=True)
    states = record_states(script, monkeypatch)
    if script is rloo_rlhf:
        _, policy = make_policy(script)
        ids, mask = script.pad_rows([[1, 2, 3, 4], [1, 2, 5, 6]])
        policy(ids, mask, last=2)[0].square().sum().backward()
    else:
        reward = script.RewardModel(make_classifier(), script.Args())
        script.label_rewards(reward, [LABEL])[0].square().sum().backward()
    unused, used = states
    assert unused.grad is not None
    assert (unused.grad == 0).all()
    assert (used.grad != 0).any()


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_a_rollout_and_its_scores_have_no_graph(name: str) -> None:
    script = importlib.import_module(name)
    Accelerator(cpu=True)
    args, policy = make_policy(script)
    batch = roll_out(script, args, policy)
    tensors = {key: x for key, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    assert len(tensors) >= 7
    assert not any(x.requires_grad for x in tensors.values())
    model = make_classifier()
    head = script.reward_head(model)
    scores = script.score_by_model(model, head, args, make_queries(batch.contexts), batch)
    assert not scores.requires_grad
    u = torch.rand(4, 2)
    assert not any(x.requires_grad for x in script.sample(policy, batch.contexts, u, 1.0))


def test_rewards_for_normalization_have_no_graph() -> None:
    accelerator = Accelerator(cpu=True)
    args = train_reward.Args(normalization_samples=4, response_length=3)
    reward = train_reward.RewardModel(make_classifier(), args)
    ref = train_reward.Reference(make_model(), VOCABULARY)
    queries = make_queries([[i] for i in range(1, 9)])
    rewards = train_reward.reference_rewards(accelerator, reward, ref, queries, 0, args)
    assert rewards.shape == (4,)
    assert not rewards.requires_grad


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_reward_function_returns_as_many_rewards_as_there_are_responses(
    name: str, count: int
) -> None:
    script = importlib.import_module(name)
    Accelerator(cpu=True)
    queries = make_queries([[1], [2]])
    tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: [str(row) for row in rows])
    batch = make_responses([[3], [4]])

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [0.5, -2.0, 3.0][:count]

    if count == 2:
        scores = script.score_by_function(reward, tokenizer, queries, batch)
        assert scores.tolist() == [0.5, -2.0]
    else:
        with pytest.raises(script.UserError, match="^--reward_fn must return 2 finite floats"):
            script.score_by_function(reward, tokenizer, queries, batch)


def test_a_sampled_response_has_all_its_tokens_also_after_the_end() -> None:
    """The KL, and without --mask_truncated the loss, count the tokens after a truncate token."""
    Accelerator(cpu=True)
    args, policy = make_policy(ppo_rlhf, truncate_after=0)
    batch = roll_out(ppo_rlhf, args, policy)
    assert batch.responses.shape == (4, 5)
    with torch.no_grad():
        for context, response, logprobs in zip(
            batch.contexts, batch.responses.tolist(), batch.logprobs, strict=True
        ):
            logits = policy.lm(torch.tensor([context + response])).logits[0, -6:-1]
            expected = (logits / args.temperature).log_softmax(-1)[torch.arange(5), response]
            assert torch.allclose(logprobs, expected, atol=1e-4)
