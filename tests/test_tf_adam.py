"""AdamTF against arrays recorded from TensorFlow, against its formula in float64, and as an optimizer of PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_tools import load_golden
from torch import Tensor, nn

from tf_adam import AdamTF

BETAS = (0.9, 0.999)


def gradients(steps: int, seed: int = 0) -> np.ndarray:
    """Gradients (steps, 6) of magnitudes 1e-7 to 10, around and far from every epsilon in use."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((steps, 6)) * 10.0 ** rng.uniform(-7, 1, (1, 6))).astype(np.float32)


def run(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: np.ndarray) -> np.ndarray:
    """The parameter after every step with the given gradients."""
    trajectory = []
    for gradient in steps:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        trajectory.append(parameter.detach().numpy().copy())
    return np.stack(trajectory)


def assert_tensorflow(ours: np.ndarray, steps: np.ndarray, lr: float, betas: tuple[float, float], eps: float) -> None:
    """TensorFlow 1.15, from 0: x -= lr_t * m / (sqrt(v) + eps) with lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)."""
    x, m, v = np.zeros((3, 6))
    for t, gradient in enumerate(steps.astype(np.float64), 1):
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        x = x - lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) * m / (np.sqrt(v) + eps)
        assert np.allclose(ours[t - 1], x, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("eps", [1e-5, 1e-8])
@pytest.mark.parametrize("fused", [True, False])
def test_trajectory_and_moments_equal_tensorflow(golden_06: Path, eps: float, fused: bool) -> None:
    arrays, _ = load_golden(golden_06)
    prefix, names = f"eps{eps:.0e}/", [key.removeprefix("init/") for key in arrays if key.startswith("init/")]
    assert len(names) == 5 and arrays["lr"].shape == (50,)
    parameters = {name: nn.Parameter(torch.from_numpy(arrays[f"init/{name}"].copy())) for name in names}
    optimizer = AdamTF(parameters.values(), lr=1.0, eps=eps, fused=fused)
    for t, lr in enumerate(arrays["lr"].tolist()):
        optimizer.param_groups[0]["lr"] = lr
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(np.asarray(arrays[f"grad/{name}"][t])).clone()
        optimizer.step()
        for name, parameter in parameters.items():
            expected = arrays[f"{prefix}traj/{name}"][t]
            assert np.allclose(parameter.detach().numpy(), expected, rtol=2e-6, atol=2e-7), (name, t)
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        scale = np.abs(arrays[f"grad/{name}"]).max()  # gradients of both signs cancel
        assert np.abs(state["exp_avg"].numpy() - arrays[f"{prefix}m/{name}"]).max() < 1e-6 * scale, name
        # 1 - beta2 is 0.99998713e-3 in TensorFlow's fp32, 1.3e-5 less than 1e-3; its beta power offsets it in the moves
        assert np.allclose(state["exp_avg_sq"].numpy(), arrays[f"{prefix}v/{name}"], rtol=2e-5, atol=0), name


@pytest.mark.parametrize("fused", [True, False, None])
@pytest.mark.parametrize(("betas", "eps"), [(BETAS, 1e-5), (BETAS, 1e-8), ((0.5, 0.95), 1e-3)])
def test_trajectory_equals_a_plain_loop_of_the_formula(fused: Any, betas: tuple[float, float], eps: float) -> None:
    parameter, steps = nn.Parameter(torch.zeros(6)), gradients(40)
    optimizer = AdamTF([parameter], lr=1e-3, betas=betas, eps=eps, fused=fused)
    assert_tensorflow(run(optimizer, parameter, steps), steps, 1e-3, betas, eps)
    assert optimizer.param_groups[0]["fused"] is (fused is not False)  # fused by default


def test_groups_keep_their_own_settings_and_step_count_and_the_eps_that_was_given() -> None:
    """The second group is added after 30 steps of the first; an error within a step leaves eps as it was, too."""
    first, second, third = (nn.Parameter(torch.zeros(6)) for _ in range(3))
    optimizer, early, steps = AdamTF([first], lr=1e-3, eps=1e-5), gradients(30, seed=1), gradients(10)
    assert_tensorflow(run(optimizer, first, early), early, 1e-3, BETAS, 1e-5)
    first.grad = None
    optimizer.add_param_group({"params": [second, third], "lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-2})
    assert_tensorflow(run(optimizer, second, steps), steps, 1e-2, (0.5, 0.9), 1e-2)
    assert torch.equal(third, torch.zeros(6))  # it has no gradient
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for groups in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        assert [group["eps"] for group in groups] == [1e-5, 1e-2]


def test_state_dict_goes_on_to_the_bit() -> None:
    whole, parameter, steps = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6)), gradients(30)
    expected = run(AdamTF([whole], lr=1e-3, eps=1e-5), whole, steps)
    optimizer, resumed = AdamTF([parameter], lr=1e-3, eps=1e-5), AdamTF([parameter], lr=1.0, eps=1.0)
    run(optimizer, parameter, steps[:7])
    resumed.load_state_dict(optimizer.state_dict())  # all settings come from the state
    assert np.array_equal(run(resumed, parameter, steps[7:]), expected[7:])
