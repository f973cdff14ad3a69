"""Adam as TensorFlow 1.x computes it, the optimizer behind OpenAI's lm-human-preferences.

PyTorch implements Algorithm 1 of Kingma & Ba (2015, arXiv:1412.6980), TensorFlow the reordering in the paragraph
before its section 2.1. With m, v the moving averages and t the step, both from 1:

    PyTorch      p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    TensorFlow   p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

Multiplied out, they differ in epsilon alone: TensorFlow's is PyTorch's with eps / sqrt(1 - beta2^t), 32 times larger
at the first step for beta2 = 0.999. At eps = 1e-5 and the small gradients of a language model that damps the first
updates a lot: Huang et al. 2024 ("The N Implementation Details of RLHF with PPO") measured an approxkl of 3.7e-4 with
TensorFlow's Adam against 2.4e-3 with PyTorch's on the same rollouts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamTF(torch.optim.Adam):
    """TensorFlow-style Adam with the speed (fused or foreach kernels), state and options of `torch.optim.Adam`.

    Args:
        params: parameters or parameter groups; a group may set its own lr, betas and eps.
        lr: learning rate, >= 0.
        betas: decay rates of the two moving averages, each in [0, 1); beta2 = 0 would have no variance to average.
        eps: TensorFlow's "epsilon hat", added to sqrt(v) before any bias correction.
        weight_decay: decoupled, as in AdamW: p -= lr * weight_decay * p before the step.
        fused: use PyTorch's fused kernel (None: where every parameter is a floating-point tensor on CPU or CUDA).

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
        params = list(params)
        if fused is None:
            tensors = [p for group in params for p in (group["params"] if isinstance(group, dict) else [group])]
            fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in tensors)
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": True}
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=fused, **decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update. The epsilon of each group is replaced for its duration: what state_dict holds is the given eps.

        The step count stands in the group as a plain int, as TensorFlow has one beta power for all variables, so that
        no device is asked for it.
        """
        epsilons = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            group["eps"] /= (1 - group["betas"][1] ** group["t"]) ** 0.5
        try:
            return super().step(closure)
        finally:
            for group, eps in zip(self.param_groups, epsilons, strict=True):
                group["eps"] = eps


def make_optimizer(model: torch.nn.Module, args: Any) -> torch.optim.Optimizer:
    """The optimizer of a script: AdamTF or AdamW (args.adam), over the parameters of `model` that are trained.

    Groups, the policy's first: matrices with args.weight_decay, all else without; apart from these the same of a value
    head and a critic, with args.critic_lr if there is one. A group has its learning rate as `initial_lr`, for
    schedules, and `is_critic`.
    """
    if len(args.adam_betas) != 2:
        raise ValueError(f"--adam_betas {args.adam_betas}: two numbers would do")
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault((name.startswith(("critic.", "value_head.")), p.dim() > 1), []).append(p)
    rates = {False: args.lr, True: getattr(args, "critic_lr", None)}
    rates = {is_critic: args.lr if lr is None else lr for is_critic, lr in rates.items()}
    rows = [
        {"params": params, "is_critic": is_critic, "weight_decay": args.weight_decay * is_matrix}
        | {"lr": rates[is_critic], "initial_lr": rates[is_critic]}
        for (is_critic, is_matrix), params in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    optimizer = {"tf": AdamTF, "torch": torch.optim.AdamW}[args.adam]
    return optimizer(rows, lr=args.lr, betas=tuple(args.adam_betas), eps=args.adam_eps)
