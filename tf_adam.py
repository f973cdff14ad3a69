"""Adam as TensorFlow 1.x computes it, the optimizer behind OpenAI's lm-human-preferences, and what
stands between gradients and weights: parameter groups, learning rates, clipping.

PyTorch implements Algorithm 1 of Kingma & Ba (2015, arXiv:1412.6980), TensorFlow the reordering in
the paragraph before its section 2.1. With m, v the moving averages and t the step, counted from 1:

    PyTorch      p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    TensorFlow   p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

Multiplied out, they differ in epsilon alone: TensorFlow's is PyTorch's with
eps / sqrt(1 - beta2^t), 32 times larger at the first step for beta2 = 0.999. At eps = 1e-5 and the
small gradients of a language model that damps the first updates a lot: Huang et al. 2024 ("The N
Implementation Details of RLHF with PPO") measured an approxkl of 3.7e-4 with TensorFlow's Adam
against 2.4e-3 with PyTorch's on the same rollouts.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

logger = get_logger(__name__)


class AdamTF(torch.optim.Adam):
    """TensorFlow-style Adam with the kernels, state and options of `torch.optim.Adam`.

    Args:
        params: parameters, named ones, or groups; a group may set its own lr, betas and eps.
        lr: learning rate, >= 0.
        betas: decay rates of the two moving averages, each in [0, 1).
        eps: TensorFlow's "epsilon hat", added to sqrt(v) before any bias correction.
        weight_decay: decoupled, as in AdamW: p -= lr * weight_decay * p before the step.
        fused: use PyTorch's fused kernel (None: where all parameters are floats on CPU or CUDA).

    Raises:
        ValueError: lr, betas or eps out of range (from torch.optim.Adam).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=True,
            fused=fused,
        )
        tensors = [p for group in self.param_groups for p in group["params"]]
        if fused is None and all(can_be_fused(p) for p in tensors):
            for options in (self.defaults, *self.param_groups):
                options["fused"] = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update. It replaces each group's epsilon only while it runs, so state_dict holds the
        given eps.

        Epsilon has one step count per group, a plain int, which need not be read from the GPU.
        PyTorch's bias corrections count the steps of each parameter. With a gradient for every
        parameter at every step that is TensorFlow's one beta power for all variables.
        """
        epsilons = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            beta2 = group["betas"][1]
            group["eps"] /= math.sqrt(1 - beta2 ** group["t"])
        try:
            return super().step(closure)
        finally:
            for group, eps in zip(self.param_groups, epsilons, strict=True):
                group["eps"] = eps


def can_be_fused(p: Tensor) -> bool:
    """Whether PyTorch has a fused kernel for it."""
    return p.is_floating_point() and p.device.type in ("cpu", "cuda")


def make_optimizer(
    policy: list[nn.Module], critic: list[nn.Module | None], args: Any
) -> torch.optim.Optimizer:
    """AdamTF or AdamW (args.adam) over the weights of these modules that are trained.

    Up to four parameter groups: the policy's matrices and its other weights, then the same of value
    head and critic (`is_critic`). Only matrices have args.weight_decay. set_learning_rates sets the
    learning rate of each group. In train_reward.py `policy` is the reward model, and nothing is
    `critic`.
    """
    groups = []
    for is_critic, modules in ((False, policy), (True, critic)):
        weights = [p for module in modules if module is not None for p in module.parameters()]
        weights = [p for p in weights if p.requires_grad]
        matrices = [p for p in weights if p.dim() > 1]
        others = [p for p in weights if p.dim() <= 1]
        for params, decay in ((matrices, args.weight_decay), (others, 0.0)):
            if params:
                groups.append({"params": params, "weight_decay": decay, "is_critic": is_critic})
    num_weights = sum(p.numel() for group in groups for p in group["params"])
    if num_weights > 1e8 and args.lr > 1e-4:
        logger.warning(f"--lr {args.lr} suits small models: for {num_weights:.1e} weights try 1e-5")
    optimizer = {"tf": AdamTF, "torch": torch.optim.AdamW}[args.adam]
    return optimizer(groups, lr=args.lr, betas=tuple(args.adam_betas), eps=args.adam_eps)


def set_learning_rates(
    optimizer: torch.optim.Optimizer, update: int, progress: float, args: Any
) -> None:
    """Sets the rates for all optimizer steps of this update (updates count from 0); `progress`, in
    [0, 1), is the share of the run that is over.

    Warm-up (args.lr_warmup updates) and the linear decay to 0 multiply. Value head and critic have
    args.critic_lr, if it is given. In the first args.critic_warmup updates the policy's rate is 0:
    its weights rest, while Adam averages its gradients, and clipping counts them, as always.
    """
    factor = min(1.0, (update + 1) / (args.lr_warmup + 1))
    if args.lr_schedule == "linear":
        factor *= 1 - progress
    for group in optimizer.param_groups:
        group["lr"] = factor * args.lr
        if group["is_critic"] and args.critic_lr is not None:
            group["lr"] = factor * args.critic_lr
        if not group["is_critic"] and update < getattr(args, "critic_warmup", 0):
            group["lr"] = 0.0


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scales the gradients down to max_norm, if it is given. Returns their norm before that."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    if hasattr(norm, "full_tensor"):  # of weights in shards
        norm = norm.full_tensor()
    return norm
