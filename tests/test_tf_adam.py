"""AdamTF against arrays recorded from TensorFlow, against its formula in float64, and as an optimizer of PyTorch."""

import copy
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
from golden_tools import load_golden
from torch import Tensor, nn

from tf_adam import AdamTF

BETAS = (0.9, 0.999)


def gradients(steps: int, shape: tuple[int, ...] = (6,), seed: int = 0) -> np.ndarray:
    """Gradients of magnitudes 1e-7 to 10, around and far from every epsilon in use."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((steps, *shape)) * 10.0 ** rng.uniform(-7, 1, (1, *shape))).astype(np.float32)


def run(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: np.ndarray) -> np.ndarray:
    """The parameter after every step with the given gradients."""
    trajectory = []
    for gradient in steps:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        trajectory.append(parameter.detach().numpy().copy())
    return np.stack(trajectory)


def tensorflow_loop(
    start: np.ndarray, steps: np.ndarray, lr: float, betas: tuple[float, float], eps: float
) -> np.ndarray:
    """TensorFlow 1.15: x -= lr_t * m / (sqrt(v) + eps) with lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)."""
    x, m, v, trajectory = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape), []
    for t, gradient in enumerate(steps.astype(np.float64), 1):
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        x = x - lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) * m / (np.sqrt(v) + eps)
        trajectory.append(x)
    return np.stack(trajectory)


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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-5), ((0.9, 0.999), 1e-8), ((0.5, 0.95), 1e-3)])
def test_trajectory_equals_a_plain_loop_of_the_formula(fused: bool, betas: tuple[float, float], eps: float) -> None:
    start, steps = np.zeros(6, np.float32), gradients(40)
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    ours = run(AdamTF([parameter], lr=1e-3, betas=betas, eps=eps, fused=fused), parameter, steps)
    theirs = tensorflow_loop(start, steps, 1e-3, betas, eps)
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-9)


def test_fused_kernel_and_plain_loop_agree_and_fused_is_the_default() -> None:
    start, steps = np.zeros(6, np.float32), gradients(40)
    parameters = [nn.Parameter(torch.from_numpy(start.copy())) for _ in range(3)]
    choices = zip(parameters, (True, False, None), strict=True)
    optimizers = [AdamTF([p], lr=1e-3, eps=1e-5, fused=fused) for p, fused in choices]
    fused, plain, default = (run(optimizer, p, steps) for optimizer, p in zip(optimizers, parameters, strict=True))
    assert np.allclose(fused, plain, rtol=1e-5, atol=1e-9)
    assert np.array_equal(fused, default)
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [True, False, True]


def test_groups_keep_their_own_lr_betas_and_eps() -> None:
    settings = [
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-5},
        {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-2},
        {"lr": 3e-3, "betas": (0.0, 0.99), "eps": 1e-8},
    ]
    start, steps = np.zeros(6, np.float32), [gradients(20, seed=seed) for seed in range(3)]
    parameters = [nn.Parameter(torch.from_numpy(start.copy())) for _ in settings]
    optimizer = AdamTF([{"params": [p], **group} for p, group in zip(parameters, settings, strict=True)])
    for t in range(20):
        for parameter, gradient in zip(parameters, steps, strict=True):
            parameter.grad = torch.from_numpy(gradient[t].copy())
        optimizer.step()
    for parameter, gradient, group in zip(parameters, steps, settings, strict=True):
        theirs = tensorflow_loop(start, gradient, **group)[-1]
        assert np.allclose(parameter.detach().numpy(), theirs, rtol=1e-5, atol=1e-9)


def test_group_added_later_starts_from_its_own_first_step() -> None:
    first, second = (nn.Parameter(torch.zeros(6)) for _ in range(2))
    optimizer, steps = AdamTF([first], lr=1e-3, eps=1e-5), gradients(10)
    run(optimizer, first, gradients(30, seed=1))
    optimizer.add_param_group({"params": [second]})
    first.grad = None
    ours = run(optimizer, second, steps)
    theirs = tensorflow_loop(np.zeros(6, np.float32), steps, 1e-3, BETAS, 1e-5)
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-9)


def test_eps_in_the_groups_is_the_given_one_after_every_step_and_after_an_error() -> None:
    parameters = [nn.Parameter(torch.zeros(6)) for _ in range(2)]
    optimizer = AdamTF([{"params": parameters[:1]}, {"params": parameters[1:], "eps": 1e-3}], eps=1e-5)
    for gradient in gradients(3):
        for parameter in parameters:
            parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        assert [group["eps"] for group in optimizer.param_groups] == [1e-5, 1e-3]
        assert [group["eps"] for group in optimizer.state_dict()["param_groups"]] == [1e-5, 1e-3]

    def failing() -> float:
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        optimizer.step(failing)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-5, 1e-3]


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamTF([parameter], lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert torch.allclose(parameter, torch.full((3,), 1 - 1e-3))


def test_state_dict_goes_on_to_the_bit() -> None:
    start, steps = np.zeros(6, np.float32), gradients(30)
    whole = nn.Parameter(torch.from_numpy(start.copy()))
    expected = run(AdamTF([whole], lr=1e-3, eps=1e-5), whole, steps)
    first = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = AdamTF([first], lr=1e-3, eps=1e-5)
    run(optimizer, first, steps[:7])
    second = nn.Parameter(first.detach().clone())
    resumed = AdamTF([second], lr=1.0, eps=1.0)  # all settings come from the state
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert np.array_equal(run(resumed, second, steps[7:]), expected[7:])


def test_deepcopy_goes_on_as_tensorflow_and_alone() -> None:
    start, steps = np.zeros(6, np.float32), gradients(30)
    original = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = AdamTF([original], lr=1e-3, eps=1e-5)
    run(optimizer, original, steps[:5])
    before, twin = original.detach().clone(), copy.deepcopy(optimizer)
    assert type(twin) is AdamTF
    parameter = twin.param_groups[0]["params"][0]
    ours = run(twin, parameter, steps[5:])
    theirs = tensorflow_loop(start, steps, 1e-3, BETAS, 1e-5)[5:]
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-9)
    assert torch.equal(original, before)
    assert np.array_equal(run(optimizer, original, steps[5:]), ours)


@pytest.mark.parametrize("magnitude", [1e-6, 1e-5, 1e-4, 1e-2])
def test_first_step_is_smaller_than_pytorchs_by_the_documented_factor(magnitude: float) -> None:
    # With m = (1 - beta1) g and v = (1 - beta2) g^2 after one step:
    #   PyTorch     lr * g / (|g| + eps)
    #   TensorFlow  lr * sqrt(1 - beta2) / (1 - beta1) * (1 - beta1) g / (sqrt(1 - beta2) |g| + eps)
    #             = lr * g / (|g| + eps / sqrt(1 - beta2)),   1 / sqrt(1 - 0.999) = 31.62
    # so that at |g| = eps = 1e-5 their quotient is (1 + 1) / (1 + 31.62) = 0.0613.
    moves = []
    for adam in (AdamTF, torch.optim.Adam):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.full((1,), magnitude, dtype=torch.float64)
        adam([parameter], lr=1e-3, eps=1e-5).step()
        moves.append(parameter.item())
    assert moves[0] / moves[1] == pytest.approx((magnitude + 1e-5) / (magnitude + 1e-5 * 31.6227766), rel=1e-6)
    assert moves[1] == pytest.approx(-1e-3 * magnitude / (magnitude + 1e-5), rel=1e-9)
    if magnitude == 1e-5:
        assert moves[0] / moves[1] == pytest.approx(0.0613, abs=5e-5)


def test_steps_inside_accelerate_equal_steps_outside() -> None:
    data = torch.randn(4, 8, 5)
    model = nn.Linear(5, 2)
    alone, start = copy.deepcopy(model), copy.deepcopy(list(model.parameters()))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, AdamTF(model.parameters(), lr=1e-3, eps=1e-5))
    bare = AdamTF(alone.parameters(), lr=1e-3, eps=1e-5)
    for update, batch in enumerate(data):
        optimizer.param_groups[0]["lr"] = bare.param_groups[0]["lr"] = 1e-3 * (1 - update / 4)
        for half in batch.split(4):
            with accelerator.accumulate(prepared):
                accelerator.backward((prepared(half) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()
        (alone(batch) ** 2).mean().backward()
        bare.step()
        bare.zero_grad()
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours, expected, rtol=0, atol=1e-6)
    assert optimizer.param_groups[0]["t"] == 4  # a step per two micro-batches
    assert optimizer.param_groups[0]["eps"] == 1e-5
    for ours, before in zip(model.parameters(), start, strict=True):
        assert ((ours - before).abs() > 1e-4).all()


def test_parameters_without_gradient_stay() -> None:
    moved, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = AdamTF([moved, unused], lr=1e-3)
    moved.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3)) and (moved < 0).all()


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1.0), ("eps", -1.0), ("betas", (1.0, 0.999)), ("betas", (0.9, 1.0))]
)
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError):
        AdamTF([nn.Parameter(torch.zeros(1))], **{name: value})
