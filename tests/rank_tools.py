"""Processes of one group, forked as in fork_tools, in which the tests call the scripts' functions or whole scripts.

Every process imports this module, so at the top it imports no library.
"""

import os
import pickle
import random
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import ROOT
from fork_tools import FORKS, PPO, REWARD, RLOO

ALGORITHMS = {PPO: ("ppo", "ppo_update"), RLOO: ("rloo", "rloo_update"), REWARD: ("reward", "reward_update")}
ROWS, MINIBATCHES, EPOCHS, K, LENGTH = 4, 2, 2, 3, 6  # contexts per rank and update, ..., response tokens


def work(function: Callable[..., Any], values: Sequence[Any], result: str, env: dict[str, str]) -> None:
    """In the forked process: what `function` returns goes to the file `result`, what it prints next to it."""
    handle = os.open(f"{result}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout = sys.stderr = os.fdopen(os.dup(handle), "w", buffering=1)
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"} | env
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT))
    value = function(*values)
    Path(result).write_bytes(pickle.dumps(value))
    sys.stdout.flush()
    os._exit(0)


def on_ranks(world: int, folder: Path, function: Callable[..., Any], *values: Any, **env: str) -> list[Any]:
    """What `function(*values)`, of a module that can be imported, returns on each of `world` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env |= {"WORLD_SIZE": str(world), "MASTER_PORT": str(free.getsockname()[1])}
    files = [folder / f"{function.__name__}-{random.randrange(10**9)}-rank{rank}" for rank in range(world)]
    processes = []
    for rank, file in enumerate(files):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(FORKS.Process(target=work, args=(function, values, str(file), env | ranks)))
        processes[-1].start()
    for process in processes:
        process.join(120)
    errors = [Path(f"{file}.err").read_text()[-2000:] for file in files]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * world, "\n".join(errors)
    return [pickle.loads(file.read_bytes()) for file in files]


# One update on recorded rollouts


def problem(script: str, ranks: Sequence[int], token_level: bool = False) -> SimpleNamespace:
    """A random model, and rollouts and shuffles of each of these ranks, whose masks are of different lengths."""
    import torch
    from tiny_models import make_actor, make_config, random_rows, randomize
    from transformers import AutoModelForSequenceClassification

    import ppo_rlhf
    import rloo_rlhf
    import train_reward

    actor, split = make_actor("gpt2", attn_pdrop=0.0), (EPOCHS, MINIBATCHES, -1)
    args = SimpleNamespace(micro_batch_size=2, temperature=0.7, whiten_rewards=True, gamma=0.99, lam=0.9, vf_coef=0.1)
    args.cliprange = args.cliprange_value = 0.2
    args.rloo_k, args.token_level = K, token_level
    if script == REWARD:
        config = make_config("gpt2", num_labels=1, pad_token_id=0)
        for key in [key for key in vars(config) if "pdrop" in key]:
            setattr(config, key, 0.0)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
        randomize(model)
        rows = random_rows([3 + i % 5 for i in range(64)], 1), random_rows([1 + i % 7 for i in range(64 * K)], 2)
        labels = [(rows[0][i], rows[1][i * K : i * K + K], i % K) for i in range(16)]
        return SimpleNamespace(model=train_reward.RewardModel(model), args=args, labels=labels)
    model, copies = (actor, 1) if script == PPO else (rloo_rlhf.Actor(actor.lm), K)
    args.micro_batch_size = 2 * copies
    parts, epochs = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 + rank)
        contexts = random_rows([3 + (5 * i + rank) % 6 for i in range(ROWS)], 10 + rank)
        responses = torch.tensor(random_rows([LENGTH] * ROWS * copies, 20 + rank))
        lengths = torch.randint(1, 3 if rank == 0 else LENGTH + 1, (ROWS * copies,), generator=generator)
        kept = torch.arange(LENGTH) < lengths.unsqueeze(1)
        branches = [row[: n - 1] for row, n in zip(responses.tolist(), lengths.tolist(), strict=True)]
        batch = {"trees": ppo_rlhf.grow(contexts, branches), "responses": responses, "kept": kept}
        batch["lengths"] = torch.tensor([sum(map(len, tree)) for tree in batch["trees"]])
        if script == RLOO:
            batch |= {name: batch[name].view(ROWS, K, LENGTH) for name in ("responses", "kept")}
        with torch.no_grad():
            old = ppo_rlhf.forward_response(model, batch, torch.arange(ROWS), 0.7)
        noise = torch.randn(3, *old[0].shape, generator=generator)
        batch["logprobs"] = old[0] + 0.2 * noise[0]
        batch |= {"values": old[2] + 0.2 * noise[1], "rewards": noise[2]} if script == PPO else {}
        if script == RLOO:
            batch["advantages"] = rloo_rlhf.rloo_advantages(noise[1].sum(-1))
        parts.append(batch)
        orders = [torch.randperm(ROWS, generator=generator) for _ in range(EPOCHS)]
        epochs.append(torch.stack(orders).view(split))
    return SimpleNamespace(model=model, args=args, batches=parts, epochs=epochs)


def update(script: str, given: SimpleNamespace, parts: Any, accumulate: int) -> dict[str, Any]:
    """Weights and metrics after the script's update of these parts (a batch and its epochs, or lists of labels)."""
    import importlib

    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    from tf_adam import AdamTF

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    module, records = importlib.import_module(script[:-3]), []
    handlers = [accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, kwargs_handlers=handlers)
    optimizer = AdamTF(given.model.parameters(), lr=1e-3, eps=1e-5)
    model, optimizer = accelerator.prepare(given.model, optimizer)
    function = getattr(module, ALGORITHMS[script][1])
    for part in parts:
        part = part if isinstance(part, tuple) else (part,)
        records += function(accelerator, model, optimizer, *part, given.args)
    weights = {name: x.detach().numpy() for name, x in given.model.named_parameters()}
    return {"weights": weights, "metrics": module.reduce_means(accelerator, records)}


def updates() -> dict[str, dict[str, Any]]:
    """On a rank: every script's update on this rank's rollouts."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    found = {}
    for script, token_level in ((PPO, False), (RLOO, False), (RLOO, True), (REWARD, False)):
        given = problem(script, [rank], token_level)
        if script == REWARD:
            size = len(given.labels) // 2
            parts = [given.labels[start : start + size][rank::world] for start in (0, size)]
            accumulate = -(-size // world // given.args.micro_batch_size)
        else:
            parts, accumulate = [(given.batches[0], given.epochs[0])], ROWS // MINIBATCHES // 2
        found[f"{script}{'-token_level' * token_level}"] = update(script, given, parts, accumulate)
    return found


# Whole runs


def whole(script: str, words: Sequence[str], folders: Sequence[str]) -> dict[str, Any]:
    """On a rank: main() of the script in this rank's folder; its KL coefficients, and the local share of each model."""
    import importlib

    import datasets

    rank, betas, shares = int(os.environ["RANK"]), [], []
    folder = folders[rank % len(folders)]
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = Path(f"{folder}-cache")
    sys.argv = [str(ROOT / script), *words]
    module = importlib.import_module(script[:-3])

    def spy(name: str, note: Callable[[Any, Any], None]) -> None:
        function = getattr(module, name, None)

        def changed(*args: Any) -> Any:
            value = function(*args)
            note(args, value)
            return value

        setattr(module, name, changed)

    def share(args: Any, _: Any) -> None:
        parameters = list(args[2].parameters())
        here = sum(p.to_local().numel() if hasattr(p, "to_local") else getattr(p, "ds_tensor", p).numel()
                   for p in parameters)  # fmt: skip
        shares.append((len(args) > 3, here / sum(getattr(p, "ds_numel", p.numel()) for p in parameters)))

    if hasattr(module, "adapt_kl_coef"):
        spy("adapt_kl_coef", lambda _, value: betas.append(value))
    spy("prepare", share)
    module.main(*module.parse_args(ALGORITHMS[script][0]))
    return {"betas": betas, "shares": shares}


def launched(script: str, words: Sequence[str], folder: str) -> None:
    """On a rank that torchrun's agent has started: the script; what it prints goes next to the folder."""
    file = f"{folder}-rank{os.environ['RANK']}"
    Path(f"{file}.pid").write_text(str(os.getpid()))
    handle = os.open(f"{file}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout = sys.stderr = os.fdopen(os.dup(handle), "w", buffering=1)
    sys.path.insert(0, str(ROOT))
    whole(script, words, [folder])


def early_end() -> dict[str, Any]:
    """On a rank: sampling from a sharded model where the first rank's response ends at once, the others' do not."""
    import torch
    from tiny_models import make_actor

    import ppo_rlhf

    args, rank, calls = ppo_rlhf.Args(checkpoint_every=0), int(os.environ["RANK"]), []
    accelerator = ppo_rlhf.start_accelerator(args, 1)
    policy = ppo_rlhf.prepare(accelerator, args, make_actor("gpt2").requires_grad_(False))
    policy.register_forward_hook(lambda *_: calls.append(1))
    u = torch.rand(4, 1, LENGTH, generator=torch.Generator().manual_seed(1))[rank]
    inputs = (*ppo_rlhf.left_pad([[1, 2, 3]], "cpu"), u, 1.0)
    whole = ppo_rlhf.sample(policy, *inputs, None, 0)
    ends = accelerator.gather(whole)[:, 0]
    many = len(calls)
    cut = ppo_rlhf.sample(policy, *inputs, ends[0].item(), 0)
    return {"whole": whole.tolist(), "cut": cut.tolist(), "calls": [many, len(calls) - many]}


def replay(files: Sequence[str]) -> list[dict[str, Any]]:
    """On a rank: its recorded steps of PPO through ppo_update; gradients of the first minibatch and weights after."""
    import math
    import re

    import numpy as np
    import torch
    from accelerate import Accelerator
    from golden_tools import folder_of, load_actor, load_golden, named_weights, rows_of, script_args

    import ppo_rlhf
    from tf_adam import AdamTF

    rank, world, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    arrays, record = load_golden(Path(files[rank]))
    args = script_args(record["hparams"])
    args.micro_batch_size = args.batch_size // world // args.num_minibatches // 2  # two micro-batches
    actor = load_actor(folder_of(Path(files[rank]), "hf_policy"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    policy, optimizer = accelerator.prepare(actor, AdamTF(actor.parameters(), lr=args.lr, eps=1e-5))
    num_updates, kl_coef = math.ceil(args.total_episodes / args.batch_size), args.kl_coef
    shuffle = np.random.RandomState(args.seed + 100_003 * rank)
    for i, step in enumerate(sorted({key.split("/")[0] for key in arrays if re.match(r"s\d+/rollout", key)})):
        given = {name: torch.from_numpy(arrays[f"{step}/rollout/{name}"])
                 for name in ("logprobs", "values", "ref_logprobs", "scores")}  # fmt: skip
        contexts = rows_of(arrays[f"{step}/rollout/queries"], actor.lm.config.vocab_size)
        responses = torch.from_numpy(arrays[f"{step}/rollout/responses"]).long()
        batch = {"responses": responses, "kept": torch.ones_like(responses, dtype=torch.bool)} | given
        batch["trees"] = ppo_rlhf.grow(contexts, responses[:, :-1].tolist())
        batch["lengths"] = torch.tensor([len(row) for row in contexts])
        log_ratio = batch["logprobs"] - batch["ref_logprobs"]
        batch["rewards"] = ppo_rlhf.token_rewards(batch["scores"], log_ratio, batch["kept"], kl_coef)
        perms = np.stack([shuffle.permutation(len(contexts)) for _ in range(args.num_epochs)])
        assert np.array_equal(perms, arrays[f"{step}/perms"])
        epochs = torch.from_numpy(perms).view(args.num_epochs, args.num_minibatches, -1)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - i / num_updates)
        before, first = {name: x.detach().numpy().copy() for name, x in named_weights(actor).items()}, []
        handle = optimizer.optimizer.register_step_pre_hook(
            lambda *_, first=first: first.append(
                {name: x.grad.numpy().copy() for name, x in named_weights(actor).items()} if not first else None
            )
        )
        ppo_rlhf.ppo_update(accelerator, policy, optimizer, batch, epochs, args)
        handle.remove()
        if args.kl_target is not None:
            kl = accelerator.gather(log_ratio.sum(1)).mean().item()
            kl_coef = ppo_rlhf.adapt_kl_coef(kl_coef, kl, args.kl_target, args.batch_size / args.kl_horizon)
        weights = {name: x.detach().numpy().copy() for name, x in named_weights(actor).items()}
        found.append({"before": before, "weights": weights, "gradients": first[0], "kl_coef": kl_coef})
        found[-1]["kl_coef_recorded"] = float(arrays[f"{step}/kl_coef_after"])
    return found
