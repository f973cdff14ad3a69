"""Adam as TensorFlow 1.x computes it, the optimizer behind OpenAI's lm-human-preferences.

PyTorch implements Algorithm 1 of Kingma & Ba (2015, arXiv:1412.6980), TensorFlow the reordering in
the paragraph before its section 2.1. With m, v the moving averages and t the step, counted from 1:

    PyTorch      p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    TensorFlow   p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

Multiplied out, they differ in epsilon alone: TensorFlow's is PyTorch's with
eps / sqrt(1 - beta2^t), 32 times larger at the first step for beta2 = 0.999. With eps = 1e-5 and
the small gradients of a language model, this makes the first updates much smaller: Huang et al.
2024 ("The N Implementation Details of RLHF with PPO") measured an approxkl of 3.7e-4 with
TensorFlow's Adam, and of 2.4e-3 with PyTorch's, on the same rollouts.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamTF(torch.optim.Adam):
    """TensorFlow-style Adam with the kernels, state and options of `torch.optim.Adam`.

    Args:
        params: parameters, named ones, or groups; a group may set its own lr, betas and eps.
        lr: learning rate, >= 0.
        fused: use PyTorch's fused kernel, which CPUs and GPUs have for floats.
        options: others of torch.optim.Adam. `eps` is TensorFlow's "epsilon hat", added to sqrt(v)
            before any bias correction. `weight_decay` is decoupled, as in AdamW:
            p -= lr * weight_decay * p before the step.

    Raises:
        ValueError: lr, betas, eps or weight_decay out of range (from torch.optim.Adam).
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, fused: bool = True, **options: Any
    ) -> None:
        super().__init__(params, lr, decoupled_weight_decay=True, fused=fused, **options)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> float | None:
        """One update. It replaces each group's epsilon only while it runs, so state_dict holds the
        given eps.

        The count t for epsilon is a plain int per group, so nothing waits for the GPU. PyTorch
        corrects m and v with a count per parameter, and TensorFlow has one count for all. These
        agree if every parameter has a gradient at every step.
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
