"""Two processes replay a recorded PPO step of two ranks: each has its rank's file, and both end with the same weights.

The recording is made here in the format of the golden files, in float64 and from transformers and torch alone, with the
tiny models of the original: whitening per rank and minibatch, averaged gradients, TensorFlow's Adam, and one KL
coefficient for both. Such files in the golden folder, whose names differ in the rank's digit, are replayed too.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import golden_files
from golden_tools import HERE, load_golden, named_weights, weights_from_tf
from rank_tools import on_ranks, replay
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ROWS, QUERY, RESPONSE, PAD = 8, 16, 10, 66  # rows of each rank, lengths, the pad token
HPARAMS = {
    "run": {"seed": 3},
    "task": {"policy": {"temperature": 0.7}, "truncate_token": 13, "truncate_after": 4, "penalty_reward_value": -1},
    "rewards": {"kl_coef": 0.15, "adaptive_kl": {"target": 6.0, "horizon": 100}},
    "ppo": {"total_episodes": 48, "batch_size": 2 * ROWS, "nminibatches": 2, "noptepochs": 4, "lr": 3e-4}
    | {"vf_coef": 0.1, "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 0.97, "lam": 0.9, "whiten_rewards": True},
}


def forward(model: Any, head: nn.Linear, queries: Tensor, responses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and values (B, R), one unpadded row at a time."""
    found = []
    for query, response in zip(queries, responses, strict=True):
        ids = torch.cat([query[query != PAD], response])
        out = model(ids[None], output_hidden_states=True)
        logprobs = (out.logits[0, -RESPONSE - 1 : -1] / 0.7).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        values = head(out.hidden_states[-1][0, -RESPONSE - 1 : -1])[:, 0]
        found.append((logprobs.gather(1, response[:, None])[:, 0], entropies, values))
    return tuple(torch.stack(column) for column in zip(*found, strict=True))


def whitened(x: Tensor, shift: bool) -> Tensor:
    scaled = (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt()
    return scaled if shift else scaled + x.mean()


def minibatch_loss(model: Any, head: nn.Linear, rollout: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The original's loss of one minibatch of one rank, and what it is made of."""
    ppo, values, rewards = HPARAMS["ppo"], rollout["values"], whitened(rollout["rewards"], shift=False)
    raw, last = torch.zeros_like(values), torch.zeros(len(values), dtype=torch.float64)
    for t in reversed(range(RESPONSE)):
        after = values[:, t + 1] if t + 1 < RESPONSE else 0.0
        last = rewards[:, t] + ppo["gamma"] * after - values[:, t] + ppo["gamma"] * ppo["lam"] * last
        raw[:, t] = last
    advantages, returns = whitened(raw, shift=True), raw + values
    logprobs, entropies, vpred = forward(model, head, rollout["queries"], rollout["responses"])
    clipped = values + (vpred - values).clamp(-ppo["cliprange_value"], ppo["cliprange_value"])
    value_loss = 0.5 * torch.maximum((vpred - returns) ** 2, (clipped - returns) ** 2).mean()
    ratio = (logprobs - rollout["logprobs"]).exp()
    inside = ratio.clamp(1 - ppo["cliprange"], 1 + ppo["cliprange"])
    loss = torch.maximum(-advantages * ratio, -advantages * inside).mean() + ppo["vf_coef"] * value_loss
    parts = {"rewards_used": rewards, "advantages_raw": raw, "advantages": advantages, "returns": returns}
    return loss, parts | {"vpred": vpred, "new_logprobs": logprobs, "entropies": entropies, "loss": loss}


def tf_name(name: str) -> str:
    """A parameter of GPT2LMHeadModel under the name that it has in TensorFlow."""
    name = name.removeprefix("transformer.").removesuffix(".weight")
    name = re.sub(r"^h\.(\d+)\.", r"h\1/", name)
    leaf = "g" if re.search(r"ln_\w+$", name) else "w" if "c_" in name else ""
    if name.endswith(".bias"):
        name, leaf = name.removesuffix(".bias"), "b"
    return "model/" + name.replace(".", "/") + (f"/{leaf}" if leaf else "")


def in_tf(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Convolutions have a first dimension of 1 there."""
    found = {"model/heads/value/w": tensors["weight"][0], "model/heads/value/b": tensors["bias"][0]}
    for name, x in tensors.items():
        if name not in ("weight", "bias"):
            is_matrix = "/c_" in tf_name(name) and name.endswith("weight")
            found[tf_name(name)] = x[None] if is_matrix else x
    return {name: x.detach().numpy().astype(np.float32) for name, x in found.items()}


def record(folder: Path) -> Path:
    """04x_two_rank0.npz, 04x_two_rank1.npz and what both have in common, 04x_two.json."""
    policy, ref = (
        AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float64, attn_implementation="eager").train()
        for name in ("hf_policy", "hf_ref")
    )
    for model in (policy, ref):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    head, ppo = nn.Linear(32, 1, dtype=torch.float64), HPARAMS["ppo"]
    saved = load_file(HERE / "hf_policy" / "heads.safetensors")
    head.load_state_dict({name.split(".")[1]: x for name, x in saved.items()})
    parameters = dict([*head.named_parameters(), *policy.named_parameters()])
    rng, ranks, arrays = np.random.default_rng(7), [], []
    for rank in range(2):
        queries = torch.from_numpy(rng.integers(0, 64, (ROWS, QUERY)))
        for i, length in enumerate(rng.integers(3, QUERY + 1, ROWS)):
            queries[i, length:] = PAD
        rollout = {"queries": queries, "responses": torch.from_numpy(rng.integers(0, 64, (ROWS, RESPONSE)))}
        with torch.no_grad():
            logprobs, _, values = forward(policy, head, queries, rollout["responses"])
            ref_logprobs = forward(ref, head, queries, rollout["responses"])[0]
        rollout["logprobs"] = logprobs + 0.05 * torch.from_numpy(rng.normal(size=logprobs.shape))
        rollout |= {"values": values, "ref_logprobs": ref_logprobs, "scores": torch.from_numpy(rng.normal(size=ROWS))}
        rollout = {name: x.float() if x.is_floating_point() else x for name, x in rollout.items()}  # as it is stored
        rollout = {name: x.double() if x.is_floating_point() else x for name, x in rollout.items()}
        rollout["rewards"] = -0.15 * (rollout["logprobs"] - rollout["ref_logprobs"])
        rollout["rewards"][:, -1] += rollout["scores"] + rank  # so that ranks differ in mean
        rollout["scores"] += rank
        shuffle = np.random.RandomState(HPARAMS["run"]["seed"] + 100_003 * rank)
        perms = np.stack([shuffle.permutation(ROWS) for _ in range(ppo["noptepochs"])])
        ranks.append((rollout, perms))
        arrays.append({f"s0/rollout/{name}": x.numpy() for name, x in rollout.items()} | {"s0/perms": perms})
    first = second = {name: torch.zeros_like(x) for name, x in parameters.items()}
    size, steps = ROWS // ppo["nminibatches"], 0
    for epoch in range(ppo["noptepochs"]):
        for start in range(0, ROWS, size):
            for rank, (rollout, perms) in enumerate(ranks):
                rows = perms[epoch, start : start + size]
                loss, parts = minibatch_loss(policy, head, {name: x[rows] for name, x in rollout.items()})
                (loss / 2).backward()
                if not steps:
                    made = {f"s0/first_mb/{name}": x.detach().numpy() for name, x in parts.items()}
                    arrays[rank] |= made | {"s0/first_mb/order": rows}
            gradients, steps = {name: x.grad for name, x in parameters.items()}, steps + 1
            if steps == 1:
                common = {f"s0/first_mb/grad/policy/{name}": x for name, x in in_tf(gradients).items()}
            first = {name: 0.9 * first[name] + 0.1 * gradient for name, gradient in gradients.items()}
            second = {name: 0.999 * second[name] + 0.001 * gradient**2 for name, gradient in gradients.items()}
            rate = ppo["lr"] * (1 - 0.999**steps) ** 0.5 / (1 - 0.9**steps)
            for name, x in parameters.items():
                x.data -= rate * first[name] / (second[name].sqrt() + 1e-5)
                x.grad = None
    kl = np.mean([(rollout["logprobs"] - rollout["ref_logprobs"]).sum(1).mean().item() for rollout, _ in ranks])
    after = 0.15 * (1 + float(np.clip(kl / 6.0 - 1, -0.2, 0.2)) * 2 * ROWS / 100)
    common |= {"s0/kl_coef_used": 0.15, "s0/kl_coef_after": after}
    common |= {f"s0/weights_after/policy/{name}": x for name, x in in_tf(parameters).items()}
    for rank in range(2):
        made = {name: np.asarray(x, np.float32 if np.asarray(x).dtype == np.float64 and np.ndim(x) else None)
                for name, x in (arrays[rank] | common).items()}  # fmt: skip
        np.savez(folder / f"04x_two_rank{rank}.npz", **made)
    (folder / "04x_two.json").write_text(json.dumps({"hparams": HPARAMS, "n_updates_total": 3}))
    return folder / "04x_two_rank0.npz"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("golden"))


def pairs(config: pytest.Config) -> list[Path]:
    """First files of recordings of two ranks in the golden folder."""
    firsts = [file for file in golden_files(config, "04*.npz") if re.search(r"(rank|_r)0", file.stem)]
    return [file for file in firsts if len(siblings(file)) == 2]


def siblings(file: Path) -> list[Path]:
    return sorted(file.parent.glob(re.sub(r"(rank|_r)0", r"\1*", file.name)))


def test_two_processes_replay_a_step_of_two_ranks(recorded: Path, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    for file in [recorded, *pairs(pytestconfig)]:
        ranks = on_ranks(2, tmp_path, replay, [str(path) for path in siblings(file)])
        assert len(ranks[0]) == len(ranks[1]) > 0
        for i, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
            assert mine["kl_coef"] == theirs["kl_coef"] == pytest.approx(mine["kl_coef_recorded"], rel=1e-6)
            for name in ("gradients", "weights"):
                assert mine[name].keys() == theirs[name].keys()
                assert all(np.array_equal(x, theirs[name][key]) for key, x in mine[name].items()), name
            arrays, _ = load_golden(file)
            if f"s{i}/first_mb/order" in arrays:
                for key, target in weights_from_tf(arrays, f"s{i}/first_mb/grad/policy/").items():
                    gradient = torch.from_numpy(mine["gradients"][key]).view(target.shape)
                    assert (gradient - target).norm() < 1e-4 * target.norm() + 1e-6, key
            error = moved = 0.0
            for key, target in weights_from_tf(arrays, f"s{i}/weights_after/policy/").items():
                x, before = (torch.from_numpy(mine[name][key]).view(target.shape) for name in ("weights", "before"))
                assert (x - target).abs().max() < 2e-6, key
                error += ((x - target).double() ** 2).sum().item()
                moved += ((target - before).double() ** 2).sum().item()
            assert moved > 0 and (error / moved) ** 0.5 < 1e-4


def test_the_recording_is_replayed_by_one_process_too(recorded: Path) -> None:
    """So it has the format of the golden files, and the test that plays all ranks in turn agrees with it."""
    importlib.import_module("test_golden").test_ppo_steps_equal_the_original(recorded)


def test_every_weight_has_its_name(recorded: Path) -> None:
    arrays, _ = load_golden(recorded)
    names = set(weights_from_tf(arrays, "s0/weights_after/policy/"))
    policy = AutoModelForCausalLM.from_pretrained(HERE / "hf_policy")
    assert names == set(named_weights(policy)) | {"value_head.weight"}
