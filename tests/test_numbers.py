"""Numbers gone wrong stop a run before they reach the weights; policies far apart give none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import random_rows, save_classifier, save_model

import ppo_rlhf
import rloo_rlhf

FAR = torch.tensor([[200.0, -200.0, 90.0, -90.0, 0.0], [-1e4, 1e4, 41.0, -41.0, 1e-3]])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["ppo", "rloo", "rloo of tokens"])
def test_loss_and_gradient_are_finite_where_policies_are_far_apart(name: str, sign: float) -> None:
    zeros, mask = torch.zeros_like(FAR), torch.ones_like(FAR, dtype=torch.bool)
    logprobs, advantages = (sign * FAR).requires_grad_(), torch.tensor([[3.0], [-3.0]])
    if name == "ppo":
        old = (zeros, zeros, zeros, advantages.expand(2, 5), torch.ones_like(FAR), mask)
        loss, pairs = ppo_rlhf.ppo_loss(logprobs, *old, 0.2, 0.2, 0.1)
    else:
        inputs = (x.unsqueeze(0) for x in (logprobs, zeros, advantages.squeeze(1), mask))
        loss, pairs = rloo_rlhf.rloo_loss(*inputs, 0.2, name == "rloo of tokens")
    loss.backward()
    assert all(x.isfinite().all() for x in (loss, logprobs.grad, *(total for total, _ in pairs.values())))
    assert logprobs.grad[:, -1].abs().min() > 0 or name == "rloo"  # near tokens still learn


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four updates of a script's main in this process, which must stop; the metrics that it left."""
    texts = [" ".join(f"w{token}" for token in row) for row in random_rows([5] * 20, 1)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "queries.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    save_model(tmp_path / "model", "gpt2"), save_classifier(tmp_path / "judge", "gpt2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    settings = {"base_model": "model", "reward_model": "judge", "query_dataset": "data", "output_dir": "out"}
    settings |= dict.fromkeys(("start_text", "end_text", "truncate_token")) | {"checkpoint_every": 1, "lr": 1e-3}
    settings |= {"response_length": 5, "eval_queries": 2, "total_episodes": 32, "batch_size": 8}

    def start(script: Any, match: str, **changes: Any) -> list[dict[str, float]]:
        with pytest.raises(FloatingPointError, match=match):
            script.main("tiny", script.Args(**settings | changes))
        assert not (tmp_path / "out" / "policy").exists()
        for file in tmp_path.glob("out/checkpoints/*/*.safetensors"):
            assert all(x.isfinite().all() for x in load_file(file).values())
        rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        assert all(math.isfinite(x) for row in rows for x in row.values())
        return rows

    return start


def shift(monkeypatch: pytest.MonkeyPatch, script: Any, name: str, *by: float) -> None:
    """Add the first number to what the first rollout, that of the evaluation, has under this name, and so on."""
    rollout, left = script.rollout, [*by]
    monkeypatch.setattr(script, "rollout", lambda *args: (x := rollout(*args)) | {name: x[name] + left.pop(0)})


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_far_from_the_reference_metrics_are_finite_and_max_kl_stops_the_run(
    script: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift(monkeypatch, script, "ref_logprobs", 0.0, 0.0, 200.0, -200.0)
    rows = run(script, match="the KL is .*--max_kl 200")
    assert [round(row["objective/kl"], -3) for row in rows] == [0, -1000, 1000]


@pytest.mark.parametrize("script", [ppo_rlhf, rloo_rlhf])
def test_a_score_that_is_no_number_stops_the_run(script: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, factors = script.score, [1, 1, 1, math.nan]
    monkeypatch.setattr(script, "score", lambda *args: scores(*args) * factors.pop(0))
    assert len(run(script, match="the gradient is not finite")) == 2
    assert [path.name for path in sorted(Path("out/checkpoints").iterdir())] == ["0000001", "0000002"]


@pytest.mark.parametrize("names", [("logprobs", "ref_logprobs"), ("ref_logprobs",)])
def test_a_first_ratio_off_one_and_a_first_kl_off_zero_stop(names: Any, run: Any, monkeypatch: Any) -> None:
    for name in names:
        shift(monkeypatch, ppo_rlhf, name, 0.0, 0.002)
    assert not run(ppo_rlhf, match="first ratio off 1")
