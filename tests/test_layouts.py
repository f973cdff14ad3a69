"""One answer for every layout: processes share a batch, and the update is that of one process that accumulates."""

import functools
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_tools
import pytest
import torch
from fork_tools import PPO, REWARD, RLOO, WORDS
from rank_tools import EPOCHS, MINIBATCHES, ROWS, launched, on_ranks, problem, update, updates, whole
from run_tools import read_lines
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import ppo_rlhf
from tf_adam import AdamTF

WORLDS = (2, 4, 8)
NAMES = (PPO, RLOO, f"{RLOO}-token_level", REWARD)


@pytest.fixture(scope="module")
def on_several(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights and metrics of every rank after every script's update."""
    return functools.cache(lambda world: on_ranks(world, tmp_path_factory.mktemp("ranks"), updates))


def ppo_by_hand(world: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """All ranks' rollouts in one process, whitened rank by rank; the loss is a mean over all tokens that count."""
    given = problem(PPO, range(world))
    args, model, losses = given.args, given.model, []
    optimizer = AdamTF(model.parameters(), lr=1e-3, eps=1e-5)
    for i, j in [(i, j) for i in range(EPOCHS) for j in range(MINIBATCHES)]:
        picked = [(batch, epochs[i, j]) for batch, epochs in zip(given.batches, given.epochs, strict=True)]
        total = sum(batch["kept"][rows].sum() for batch, rows in picked)
        for batch, rows in picked:
            old_logprobs, old_values, rewards, mask = (
                batch[name][rows] for name in ("logprobs", "values", "rewards", "kept")
            )
            rewards = ppo_rlhf.whiten(rewards, mask, shift_mean=False)
            advantages, returns = ppo_rlhf.gae(old_values, rewards, mask, args.gamma, args.lam)
            old = (old_logprobs, old_values, ppo_rlhf.whiten(advantages, mask), returns, mask)
            logprobs, _, values = ppo_rlhf.forward_response(model, batch, rows, args.temperature)
            clips = (args.cliprange, args.cliprange_value, args.vf_coef)
            loss, _ = ppo_rlhf.ppo_loss(logprobs, values, *old, *clips)
            (loss / total).backward()
            losses.append((loss.item(), mask.sum().item()))
        optimizer.step()
        optimizer.zero_grad()
    sums = [sum(column) for column in zip(*losses, strict=True)]
    return dict(model.named_parameters()), {"ppo/loss/total": sums[0] / sums[1]}


def one_process(name: str, world: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The script's own update of all ranks' rows, in as many micro-batches as all ranks have together."""
    script, token_level = name.removesuffix("-token_level"), name != RLOO
    given = problem(script, range(world), token_level)
    if script == REWARD:
        size = len(given.labels) // 2
        parts, accumulate = [given.labels[:size], given.labels[size:]], size // given.args.micro_batch_size
    else:
        join = {"trees": lambda lists: [tree for trees in lists for tree in trees]}
        batch = {key: join.get(key, torch.cat)([b[key] for b in given.batches]) for key in given.batches[0]}
        epochs = torch.cat([epochs + rank * ROWS for rank, epochs in enumerate(given.epochs)], 2)
        parts, accumulate = [(batch, epochs)], world * ROWS // MINIBATCHES // 2
    done = update(script, given, parts, accumulate)
    return {key: torch.from_numpy(x) for key, x in done["weights"].items()}, done["metrics"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_that_of_one_process_with_accumulation(name: str, world: int, on_several: Any) -> None:
    ranks = [rank[name] for rank in on_several(world)]
    weights, metrics = ppo_by_hand(world) if name == PPO else one_process(name, world)
    start = dict(problem(name.removesuffix("-token_level"), []).model.named_parameters())
    error = moved = 0.0
    for key, x in ranks[0]["weights"].items():
        assert all((other["weights"][key] == x).all() for other in ranks), key
        error += ((torch.from_numpy(x) - weights[key]) ** 2).sum().item()
        moved += ((torch.from_numpy(x) - start[key]) ** 2).sum().item()
        assert (torch.from_numpy(x) - weights[key]).abs().max() < 2e-6, key
    assert moved > 1e-6 and (error / moved) ** 0.5 < 1e-4
    assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)
    for key, value in metrics.items():
        if key != "first_ratio_error":  # of the first micro-batch, which is another one
            assert ranks[0]["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork_tools.fill(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def runs(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whole runs: what main() did on each rank, every one in a folder of its own, and these folders."""

    def run(script: str, world: int, *words: str) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("runs")
        folders = [str(shutil.copytree(kit, folder / f"rank{rank}")) for rank in range(world)]
        ranks = on_ranks(world, folder, whole, script, [*WORDS[script], *words], folders)
        return SimpleNamespace(ranks=ranks, folders=list(map(Path, folders)), out=Path(folders[0]) / "out")

    return functools.cache(run)


STILL = ("--lr", "0", "--batch_size", "8", "--total_episodes", "24", "--kl_target", "0.5", "--kl_horizon", "40")
MOVING = (*STILL[2:], "--lr", "3e-2")
MASKED = ("--truncate_token", "w7", "--truncate_after", "1", "--mask_truncated", "--rloo_k", "2")


def test_ppo_on_one_process_and_on_two_samples_and_scores_the_same(runs: Any) -> None:
    """At learning rate 0 whitening per rank, the one thing that a layout changes, has no effect on the next rollout."""
    one, two = (runs(PPO, world, *STILL) for world in (1, 2))
    rows, others = (read_lines(made.out / "metrics.jsonl") for made in (one, two))
    assert len(rows) == len(others) == 3
    for row, other in zip(rows, others, strict=True):
        for name in [name for name in row if name.startswith("objective/")]:
            assert row[name] == pytest.approx(other[name], abs=1e-5), name
    assert (one.out / "samples.jsonl").read_text() == (two.out / "samples.jsonl").read_text()


@pytest.mark.parametrize("script", [PPO, RLOO])
def test_the_kl_coefficient_is_equal_on_all_ranks_at_every_update(script: str, runs: Any) -> None:
    made = runs(script, 2, *MOVING, *(MASKED if script == RLOO else ()))
    betas = [rank["betas"] for rank in made.ranks]
    assert betas[0] == betas[1] and len(set(betas[0])) == 3
    rows = read_lines(made.out / "metrics.jsonl")
    assert [row["objective/kl_coef"] for row in rows[1:]] == betas[0][:-1]


def test_the_first_rank_alone_writes(kit: Path, runs: Any) -> None:
    given = sorted(path.relative_to(kit) for path in kit.rglob("*"))
    for script, words in ((PPO, MOVING), (RLOO, (*MOVING, *MASKED))):
        made = runs(script, 2, *words)
        first, second = (sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in made.folders)
        assert second == given
        assert set(given) < set(first) and (made.out / "policy/model.safetensors").exists()
        assert len(read_lines(made.out / "metrics.jsonl")) == 3


def test_a_rank_that_raises_ends_the_job_with_its_message(kit: Path, tmp_path: Path) -> None:
    """At the second update, in its reward function, under torchrun's agent (its command imports all libraries anew)."""
    folder = Path(shutil.copytree(kit, tmp_path / "folder"))
    (folder / "taste.py").write_text(
        "import os\n"
        "calls = []\n"
        "def taste(queries, responses):\n"
        "    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) == 3:\n"
        "        raise ValueError('no taste today')\n"
        "    return [0.0] * len(responses)\n"
    )
    config = LaunchConfig(1, 1, 2, run_id="raise", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    config.start_method, begin = "forkserver", time.monotonic()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(ChildFailedError):
        elastic_launch(config, launched)(PPO, [*WORDS[PPO], "--reward_fn", "taste:taste"], str(folder))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert time.monotonic() - begin < 60
    errors = [Path(f"{folder}-rank{rank}.err").read_text() for rank in (0, 1)]
    assert "rank 1: --reward_fn taste:taste: gave no rewards: no taste today" in errors[1]
    assert len(read_lines(folder / "out/metrics.jsonl")) == 1
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
