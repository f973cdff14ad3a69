"""AdamTF against arrays recorded from TensorFlow, and its groups."""

from pathlib import Path

import numpy as np
import pytest
import torch
from golden_tools import load_golden
from torch import nn

from tf_adam import AdamTF


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


def test_groups_keep_their_own_settings_and_step_count_and_the_eps_that_was_given() -> None:
    """The second group is added after 30 steps of the first; an error within a step leaves eps as it was, too."""
    first, second, third, alone, other = (nn.Parameter(torch.zeros(6)) for _ in range(5))
    settings = {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-2}
    optimizer, *single = AdamTF([first], eps=1e-5), AdamTF([alone], eps=1e-5), AdamTF([other], **settings)
    for i, gradient in enumerate(torch.randn(40, 6) * 10 ** torch.linspace(-7, 1, 6)):
        if i == 30:
            optimizer.add_param_group({"params": [second, third], **settings})
        for p in (first, alone, *([second, other] if i >= 30 else [])):
            p.grad = gradient
        for x in (optimizer, *single[: 1 + (i >= 30)]):
            x.step()
    assert torch.equal(first, alone) and torch.equal(second, other) and optimizer.param_groups[1]["fused"]
    assert torch.equal(third, torch.zeros(6))  # it has no gradient
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for groups in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        assert [group["eps"] for group in groups] == [1e-5, 1e-2]
