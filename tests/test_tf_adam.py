"""AdamTF against TensorFlow's arrays; settings of torch, learning rates, sums."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from golden_tools import below, load_golden
from tiny_models import VOCABULARY, make_lm, values
from torch import nn
from transformers import AttentionMaskInterface, DynamicCache

import ppo_rlhf
from plumbing import launch as launch_module
from plumbing import models as models_module
from plumbing.launch import UserError, blame
from ppo_rlhf import Metrics, make_optimizer
from tf_adam import AdamTF


@pytest.mark.parametrize("eps", [1e-5, 1e-8])
@pytest.mark.parametrize("fused", [True, False])
def test_trajectory_and_moments_equal_tensorflow(golden_06, eps, fused):
    arrays, _ = load_golden(golden_06)
    prefix = f"eps{eps:.0e}/"
    parameters = {}
    for name, x in below(arrays, "init/").items():
        parameters[name] = nn.Parameter(torch.from_numpy(x.copy()))
    assert len(parameters) == 5
    assert arrays["lr"].shape == (50,)
    optimizer = AdamTF(parameters.values(), lr=1.0, eps=eps, fused=fused)
    for t, lr in enumerate(arrays["lr"].tolist()):
        optimizer.param_groups[0]["lr"] = lr
        for name, p in parameters.items():
            gradient = arrays[f"grad/{name}"][t]
            p.grad = torch.tensor(gradient)
        optimizer.step()
        for name, p in parameters.items():
            expected = arrays[f"{prefix}traj/{name}"][t]
            ours = p.detach().numpy()
            assert np.allclose(ours, expected, rtol=2e-6, atol=2e-7), f"{name} in step {t}"

    for name, p in parameters.items():
        state = optimizer.state[p]
        m = state["exp_avg"].numpy()
        largest = np.abs(arrays[f"grad/{name}"]).max()  # gradients of both signs cancel
        off = np.abs(m - arrays[f"{prefix}m/{name}"]).max()
        assert off < 1e-6 * largest, name
        # 1 - beta2 is 0.99998713e-3 in TensorFlow's fp32, 1.3e-5 less than 1e-3; its beta power
        # offsets it in the moves.
        v = state["exp_avg_sq"].numpy()
        assert np.allclose(v, arrays[f"{prefix}v/{name}"], rtol=2e-5, atol=0), name


def zeros(count):
    return [nn.Parameter(torch.zeros(6)) for _ in range(count)]


def test_groups_keep_their_own_settings_and_step_count_and_the_eps_that_was_given():
    """The second group comes after 30 steps of the first; an error within a step changes no eps."""
    first, second, idle = zeros(3)
    alone, other = zeros(2)
    settings = {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-2}
    optimizer = AdamTF([first], eps=1e-5, fused=True)
    first_alone = AdamTF([alone], eps=1e-5, fused=True)
    second_alone = AdamTF([other], fused=True, **settings)
    for i, gradient in enumerate(torch.randn(40, 6) * 10 ** torch.linspace(-7, 1, 6)):
        if i == 30:
            optimizer.add_param_group({"params": [second, idle], **settings})
        first.grad = gradient
        alone.grad = gradient
        first_alone.step()
        if i >= 30:
            second.grad = gradient
            other.grad = gradient
            second_alone.step()
        optimizer.step()
    assert torch.equal(first, alone)
    assert torch.equal(second, other)
    assert torch.equal(idle, torch.zeros(6))  # it has no gradient
    assert optimizer.param_groups[1]["fused"]
    assert optimizer.step(lambda: 5.0) == 5.0
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for groups in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        assert [group["eps"] for group in groups] == [1e-5, 1e-2]


def make_parts(*names):
    return nn.ModuleDict({name: nn.Linear(3, 2) for name in names})


def test_groups_are_matrices_and_the_rest_of_each_part():
    model = make_parts("lm", "value_head", "frozen")
    model["frozen"].requires_grad_(False)
    model.gain = nn.Parameter(torch.ones(1))
    args = ppo_rlhf.Args(weight_decay=0.3, adam_betas=(0.8, 0.95), adam_eps=1e-3)
    optimizer = make_optimizer(model, args)
    names = {id(p): name for name, p in model.named_parameters()}
    made = []
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.95)
        assert group["eps"] == 1e-3
        assert group["fused"], "one kernel is for all weights"
        weights = [names[id(p)] for p in group["params"]]
        made.append((weights, group["weight_decay"], group["part"]))
    assert made == [
        (["gain"], 0.0, "gain"),
        (["lm.weight"], 0.3, "lm"),
        (["lm.bias"], 0.0, "lm"),
        (["value_head.weight"], 0.3, "value_head"),
        (["value_head.bias"], 0.0, "value_head"),
    ]
    assert type(optimizer) is AdamTF
    optimizer = make_optimizer(model, ppo_rlhf.Args(adam="torch"))
    assert type(optimizer) is torch.optim.AdamW


# Settings; update, progress, the policy's rate, the critic's
RATES = """
lr_warmup=3; 0 0 2.5e-3 2.5e-3
lr_warmup=3; 2 0.5 3.75e-3 3.75e-3
lr_warmup=3; 3 0.5 5e-3 5e-3
critic_lr=0.0; 1 0.5 5e-3 0
critic_warmup=2; 1 0.5 0 5e-3
critic_warmup=2 critic_lr=1.0; 2 0.5 5e-3 0.5
"""


@pytest.mark.parametrize("case", RATES.strip().splitlines())
def test_learning_rates_follow_the_schedule(case):
    changes, numbers = case.split(";")
    update, progress, lr, critic_lr = map(float, numbers.split())
    args = ppo_rlhf.Args(lr=1e-2, **values(changes))
    optimizer = make_optimizer(make_parts("lm", "critic", "value_head", "new"), args)
    highest = ppo_rlhf.max_lrs(int(update), args)
    ppo_rlhf.set_learning_rates(optimizer, int(update), progress, args, **highest)
    rates = {group["part"]: group["lr"] for group in optimizer.param_groups}
    expected = {"lm": lr, "critic": critic_lr, "value_head": critic_lr}
    assert {name: rates[name] for name in expected} == pytest.approx(expected)
    assert rates["new"] > 0, "a module that a copy adds has --lr"


LAUNCHES = [(kind, kind.value == "FSDP") for kind in DistributedType]
LAUNCHES.append((DistributedType.FSDP, False))


@pytest.mark.parametrize(("kind", "is_fsdp2"), LAUNCHES)
def test_processes_alone_or_in_ddp_or_fsdp2_are_launched(kind, is_fsdp2):
    """MULTI_GPU and others are DDP. FSDP1's weights are flat, and cannot be sampled from."""
    expected = contextlib.nullcontext()
    if not (kind.value == "NO" or kind.value.startswith("MULTI_") or is_fsdp2):
        says = f"^launch: {kind.value} is not supported: use DDP or FSDP2"
        expected = pytest.raises(UserError, match=says)
    with expected:
        launch_module.check_launch(SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2))


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_settings_of_torch_for_each_dtype(dtype):
    """TF32 for the heads of bf16 runs, too. cuDNN's attention is off."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    launch_module.set_up_torch(dtype)
    precision = "highest" if dtype == "fp32" else "high"
    assert torch.get_float32_matmul_precision() == precision
    if torch.__version__ >= (2, 9):  # check_model is on the CPU
        assert torch.backends.mkldnn.matmul.fp32_precision != "tf32"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert AttentionMaskInterface()["sdpa"] is launch_module.full_sdpa_mask


@pytest.mark.parametrize("has_gpu", [True, False])
def test_only_cpus_keep_freed_memory(has_gpu, monkeypatch):
    """With a GPU that would be the memory of models that have moved to it."""
    libc = mock.Mock()
    monkeypatch.setattr(launch_module.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    launch_module.set_up_torch("fp32")
    given = [call.args for call in libc.mallopt.call_args_list]
    expected = [(-4, 0), (-1, -1)]  # in malloc.h M_MMAP_MAX, M_TRIM_THRESHOLD
    if has_gpu:
        expected = []
    assert given == expected


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_settings_of_the_allocator_stay(name, monkeypatch):
    """Whichever name they have. torch prefers the second one."""
    chosen = {name: "max_split_size_mb:128"}
    monkeypatch.setattr(launch_module.os, "environ", dict(chosen))
    launch_module.set_up_torch("fp32")
    assert chosen.items() <= launch_module.os.environ.items()
    assert launch_module.os.environ.keys() & {"PYTORCH_ALLOC_CONF"} <= chosen.keys()


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.9.1+cu128", "PYTORCH_CUDA_ALLOC_CONF"), ("2.10.0", "PYTORCH_ALLOC_CONF")],
)
def test_settings_of_the_allocator_have_the_name_that_torch_knows(version, name, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    monkeypatch.setattr(launch_module.os, "environ", {})
    launch_module.set_up_torch("fp32")
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        expected = "expandable_segments:True" if other == name else None
        assert launch_module.os.environ.get(other) == expected


def test_layers_are_patched():
    """Padding is an embedding like any other, GELU is one kernel, and some models are refused."""
    lm = make_lm("gpt2", attention="sdpa")
    lm.transformer.wte.padding_idx = 3
    models_module.patch_layers(lm, "fp32", VOCABULARY)
    assert [type(block.mlp.act) for block in lm.transformer.h] == [nn.GELU] * 2
    assert {block.mlp.act.approximate for block in lm.transformer.h} == {"tanh"}
    assert lm.transformer.wte.padding_idx is None
    lm.transformer.h = nn.ModuleList()
    with pytest.raises(UserError, match="^--gradient_checkpointing: the model does not support"):
        models_module.recompute_activations(lm)


def test_means_of_metrics_are_over_a_mask_of_their_shape():
    """Or over all elements. A column, or a row, for a mask of more is an error."""
    mask = torch.tensor([[True, True], [True, False]])
    x = torch.tensor([[2.0, 3.0], [4.0, 50.0]]).requires_grad_()
    means = Metrics()
    means.add({"x": x, "y": mask}, mask)
    means.add({"x": x.detach(), "once": torch.tensor(7)})
    assert means.reduce() == pytest.approx({"x": 68 / 7, "y": 1, "once": 7})
    assert not means.sums["x"].requires_grad  # it keeps no graph
    for shape in ((2, 1), (2,), (1, 2), ()):
        with pytest.raises(ValueError, match=r"^x \[.*\] must be \[2, 2\]$"):
            means.add({"x": torch.ones(shape)}, mask)


def test_sums_of_metrics_are_in_fp64():
    """One number stands beside one of 2 ** 24 counts."""
    many = torch.tensor([2.0**24])
    one = torch.ones(1)
    means = Metrics()
    for x in (many, one):
        means.add({"x": x}, one)
    means.add({"y": 0 * one}, many)
    means.add({"y": one}, one)
    means.add({"z": many}, one)
    for _ in range(999):
        means.add({"z": torch.tensor([1 / 3], dtype=torch.float64)})
    found = means.reduce()
    assert found["x"] == pytest.approx((2**24 + 1) / 2, rel=1e-9)
    assert found["y"] == pytest.approx(1 / (2**24 + 1), rel=1e-9)
    assert found["z"] == pytest.approx((2.0**24 + 333) / 1000, rel=1e-12)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no such file"), "--flag: no such file (RLHF_DEBUG=1 shows more)"),
        (KeyError(), "--flag: KeyError() (RLHF_DEBUG=1 shows more)"),
        (UserError("row 3"), "--flag: row 3"),
    ],
)
def test_errors_are_explained_by_what_was_asked_and_why_it_failed(error, says):
    with pytest.raises(UserError) as caught, blame("--flag"):
        raise error
    assert str(caught.value) == says
    assert caught.value.__cause__ is error  # for RLHF_DEBUG
    with pytest.raises(UserError, match="^--flag: the cause"), blame("--flag"):
        raise ValueError("the error") from OSError("the cause")
    with pytest.raises(ZeroDivisionError), blame("--flag", UserError):
        raise ZeroDivisionError


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_under_bf16_a_cache_is_in_bf16_and_gives_the_same_states(name):
    """As one that keeps the keys in fp32, in which rotary embeddings give them."""
    lm = make_lm(name)
    models_module.patch_layers(lm, "bf16", VOCABULARY)
    found = []
    for kind in (models_module.Cache, DynamicCache):
        cache = kind(config=lm.config)
        for ids in torch.arange(1, 9).view(4, 1, 2):  # two tokens at a time
            output = lm.base_model(ids, past_key_values=cache)
        found.append(output.last_hidden_state)
        dtype = torch.float32 if kind is DynamicCache else torch.bfloat16
        for layer in cache.layers:
            assert layer.keys.dtype == dtype
            assert layer.values.dtype == dtype
    ours, theirs = found
    assert (ours - theirs).abs().max() < 1e-4
