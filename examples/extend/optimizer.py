"""An optimiser: Lion (arXiv 2302.06675), which steps by the sign of a running mean of the gradients.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu actor.optimizer=examples.extend.optimizer.Lion actor.optimizer.lr=3e-5
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt

Decay = Annotated[float, Ge(0), Lt(1)]


class Lion(torch.optim.Optimizer):
    """Keeps one number per weight, half as many as Adam. Its steps are larger: divide Adam's `lr` by 3 to 10."""

    def __init__(
        self,
        parameters: Sequence[dict[str, Any]],
        lr: float,
        *,
        beta1: Decay = 0.9,
        beta2: Decay = 0.99,
        weight_decay: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Move each weight by `lr`, towards the sign; decay it by `lr * weight_decay`."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                mean, gradient = state["mean"], weight.grad
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(mean.lerp(gradient, 1 - group["beta1"]).sign_(), alpha=group["lr"])
                mean.lerp_(gradient, 1 - group["beta2"])
