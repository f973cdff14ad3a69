"""One answer for every layout: processes share a batch, and the update is that of one process that accumulates."""

import math
import multiprocessing
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import forward, make_actor, make_batch, make_config, random_rows
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import ppo_rlhf
import rloo_rlhf
import train_reward

LENGTH, NAMES = 6, ("ppo", "rloo", "rloo of tokens", "reward")
ARGS = {"temperature": 0.7, "whiten_rewards": True, "gamma": 0.99, "lam": 0.9, "vf_coef": 0.1, "cliprange": 0.2}
ARGS |= {"cliprange_value": 0.2}


def make_model(name: str) -> Any:
    actor = make_actor("gpt2")
    if name == "reward":
        config = make_config("gpt2", num_labels=1, pad_token_id=0)
        lm = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
        return train_reward.RewardModel(lm)
    return actor if name == "ppo" else rloo_rlhf.Actor(actor.lm)


def make_rollout(name: str, rank: int, model: Any) -> dict[str, Any]:
    """Four queries; in PPO eight on the first rank, which then has twice the tokens.

    There the same values, rewards and lengths come again and again: whitening, which is per rank, is then the same for
    the rows of one rank and of both.
    """
    (n, k), generator = (((8, 4)[rank], 1) if name == "ppo" else (4, 3)), torch.Generator().manual_seed(rank)
    shape = (n, LENGTH) if k == 1 else (n, k, LENGTH)
    contexts = random_rows([3 + (5 * i + rank) % 6 for i in range(n)], 10 + rank)
    responses = torch.tensor(random_rows([LENGTH] * n * k, 20 + rank)).view(shape)
    kept = (torch.arange(LENGTH) < torch.tensor([2, LENGTH]).repeat(n * k // 2).unsqueeze(1)).view(shape)
    batch = make_batch(contexts, responses, kept)
    batch["logprobs"] = forward(model, batch)[0] + 0.1 * torch.randn(shape, generator=generator)
    batch["advantages"] = rloo_rlhf.rloo_advantages(torch.randn(n, k, generator=generator))
    pattern = torch.randn(2, 2, LENGTH, generator=torch.Generator().manual_seed(5))
    batch["values"], batch["rewards"] = pattern.repeat(1, n // 2, 1)
    return batch


def update(name: str, ranks: list[int], model: Any, size: int = 0) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights and metrics after the script's update of the rows of these ranks, in micro-batches of `size` (half)."""
    accelerator, args = Accelerator(cpu=True), SimpleNamespace(**ARGS, token_level=name == "rloo of tokens")
    policy, optimizer = accelerator.prepare(model, ppo_rlhf.AdamTF(model.parameters(), lr=3e-4, eps=1e-5))
    if name == "reward":
        rows = random_rows([1 + i % 7 for i in range(48)], 2)
        labels = [(rows[4 * i], rows[4 * i + 1 : 4 * i + 4], i % 3) for i in range(12)][ranks[0] :: 3 - len(ranks)]
        script, given, count = train_reward.reward_update, [labels], len(labels)
    else:
        batches = [make_rollout(name, rank, model) for rank in ranks]
        batch = {key: torch.cat([x[key] for x in batches]) for key in batches[0] if key != "trees"}
        batch["trees"] = [tree for x in batches for tree in x["trees"]]
        halves = [torch.arange(len(x["trees"])).view(2, -1) for x in batches]  # minibatches
        epochs = torch.cat([half + i * len(batches[0]["trees"]) for i, half in enumerate(halves)], 1).repeat(2, 1, 1)
        script = ppo_rlhf.ppo_update if name == "ppo" else rloo_rlhf.rloo_update
        given, count = [batch, epochs], epochs.shape[2]
    size = size or count // 2
    args.micro_batch_size = size * (3 if "rloo" in name else 1)
    accelerator.gradient_accumulation_steps = math.ceil(count / size)
    records = script(accelerator, policy, optimizer, *given, args)
    return {key: x.detach() for key, x in model.named_parameters()}, ppo_rlhf.reduce_means(accelerator, records)


def assert_same(name: str, made: Any, expected: Any) -> None:
    """Weights to 2e-6 and 1e-4 of their move; metrics, but for that of the first micro-batch, which is another one."""
    error = moved = 0.0
    for key, start in make_model(name).named_parameters():
        assert (made[0][key] - expected[0][key]).abs().max() < 2e-6, key
        error += ((made[0][key] - expected[0][key]) ** 2).sum().item()
        moved += ((expected[0][key] - start) ** 2).sum().item()
    assert moved > 1e-6 and (error / moved) ** 0.5 < 1e-4
    for key in set(expected[1]) - {"first_ratio_error"}:
        assert made[1][key] == pytest.approx(expected[1][key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_accumulation_equals_the_large_batch(name: str, size: int) -> None:
    """Minibatches of 6 rows, 4 queries or 12 labels, with masks of two lengths; the last part may be smaller."""
    assert_same(name, update(name, [0, 1], make_model(name), size), update(name, [0, 1], make_model(name), 12))


def work(rank: int, port: int, file: str) -> None:
    """One of two processes: every script's update of this rank's rows."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    torch.save({name: update(name, [rank], make_model(name)) for name in NAMES}, file)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the processes of both ranks made."""
    context, folder = multiprocessing.get_context("forkserver"), tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [str(folder / str(rank)) for rank in range(2)]
    processes = [context.Process(target=work, args=(rank, port, file)) for rank, file in enumerate(files)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(file) for file in files]


@pytest.mark.parametrize("name", NAMES)
def test_an_update_on_two_processes_is_that_of_one_with_accumulation(name: str, two_ranks: list[Any]) -> None:
    first, second = (rank[name] for rank in two_ranks)
    assert all(torch.equal(x, second[0][key]) for key, x in first[0].items()) and first[1] == second[1]
    assert_same(name, first, update(name, [0, 1], make_model(name)))
