"""Optimisers from outside of rlsys: one that works, some that do not, and two that fail only after some steps."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Gt


class Descent(torch.optim.Optimizer):
    """Gradient descent; subclasses change how far a weight moves, or what is kept."""

    def __init__(self, parameters: Any, lr: float, *, pull: Annotated[float, Gt(0)] = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.pull, self.steps = pull, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(self.move(weight) * group["lr"] * self.pull)

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        assert weight.grad is not None
        return weight.grad


class Fails(Descent):
    def move(self, weight: torch.Tensor) -> torch.Tensor:
        raise KeyError(f"nothing for {list(weight.shape)}")


class NotANumber(Descent):
    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return super().move(weight) / 0.0


class KeepsRows(Descent):
    def move(self, weight: torch.Tensor) -> torch.Tensor:
        self.state[weight]["rows"] = super().move(weight).sum(-1)
        return super().move(weight)


class KeepsAFunction(Descent):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["move"] = Descent.move


class Forgets(Descent):
    """Counts its steps outside of its state."""

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return super().move(weight) * self.steps


class TakesMatrices(Descent):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([group for group in parameters if group["wd_mult"]], lr)


class HasNoRate(Descent):
    def __init__(self, parameters: Any, lr: float) -> None:  # noqa: ARG002
        torch.optim.Optimizer.__init__(self, parameters, {})


class CannotBegin(Descent):
    def __init__(self, parameters: Any, lr: float) -> None:
        raise ValueError(f"no {len(parameters)} groups at {lr}")


class FailsLater(Descent):
    """Works for as long as it is tried before a run."""

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        moved = super().move(weight).clone()
        if self.steps == 3:
            moved.view(-1)[0] = float("inf")
        return moved


class RaisesLater(Descent):
    def move(self, weight: torch.Tensor) -> torch.Tensor:
        if self.steps == 3:
            raise RuntimeError("three steps are enough")
        return super().move(weight)


def nothing(parameters: Any, lr: float) -> None:
    """Return no optimiser."""


def only_parameters(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


def takes_the_rate(parameters: Any, rate: float, *, lr: float) -> torch.optim.Optimizer:  # noqa: ARG001
    return torch.optim.SGD(parameters, lr)
