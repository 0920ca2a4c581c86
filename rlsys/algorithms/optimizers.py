"""Makes the optimisers that update whole parameters: SGD, and `torch.optim.Optimizer`s from outside of the package.

An optimiser gets parameter groups, as in torch.optim, and a learning rate. Before each step its groups get the step's
`lr` and, if `weight_decay` is one of its settings, that value, or 0 for biases and norms.

`state_bytes` tries an optimiser on two small parameters. So one that cannot be stepped, saved or loaded is refused
before a run starts, and the memory plan knows its state without a declaration.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlsys.config.custom import Custom, OwnComponent, bound, described, own_component
from rlsys.config.schema import OptimizerConfig
from rlsys.errors import UserError

Groups = Sequence[dict[str, Any]]
"""Parameter groups. Each has `params`, and `wd_mult`, which is 0 for biases and norms and 1 for others."""
TRIAL_S = 60.0
"""Time limit of the trial of an optimiser from outside of the package."""
_STEP = "step"
"""State that is one number, equal for all parameters. Every other state has the shape of its parameter."""


def sgd(parameters: Groups, lr: float, *, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return torch's SGD, which keeps a running sum of gradients if `momentum` is above 0."""
    return torch.optim.SGD(list(parameters), lr, momentum, weight_decay=weight_decay)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"sgd": sgd}
"""Kind of an optimiser -> function; its keyword arguments are the kind's keys."""


def make_optimizer(settings: OptimizerConfig, groups: Groups) -> torch.optim.Optimizer:
    """Return the optimiser that `settings` choose. Raises UserError unless one from outside takes all of `groups`."""
    make = bound(settings, OPTIMIZERS)
    found: Any = make([dict(group) for group in groups], settings.lr)
    if not isinstance(make, OwnComponent):
        optimizer: torch.optim.Optimizer = found
        return optimizer
    if not isinstance(found, torch.optim.Optimizer):
        raise make.error(f"returned {described(found)} instead of a torch.optim.Optimizer")
    given, taken = ([[id(one) for one in group["params"]] for group in of] for of in (groups, found.param_groups))
    if given != taken or not all({"lr", "wd_mult"} <= group.keys() for group in found.param_groups):
        raise make.error("has other parameter groups than it was given, or one without lr")
    found.step = partial(make.run, found.step)  # type: ignore[method-assign]
    return found


def problem(settings: OptimizerConfig, what: str) -> UserError:
    """Return the error that an optimiser from outside has done `what`; a built-in one does nothing wrong."""
    assert isinstance(settings, Custom)
    return own_component(settings).error(what)


def state_bytes(settings: OptimizerConfig) -> float:
    """Return the bytes of state that an optimiser keeps for each parameter.

    Raises UserError for an optimiser from outside that fails, makes a weight that is not finite, keeps a state that a
    checkpoint cannot hold, takes another step after its state was saved and loaded, or more than `TRIAL_S`.
    """
    if isinstance(settings, Custom):
        return float(own_component(settings).run(_tried, settings, timeout_s=TRIAL_S))
    return _tried(settings)


@torch.random.fork_rng(devices=[])
@torch.no_grad()
def _tried(settings: OptimizerConfig) -> float:
    weights = [torch.linspace(-1.0, 1.0, 24).view(4, 6), torch.linspace(0.5, 1.5, 6)]
    optimizer = _on_copies(settings, weights)
    before = _stepped(optimizer, settings)
    nbytes = sum(_state_of(optimizer, one, settings) for one in _parameters(optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = _on_copies(settings, before)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    after, again = _stepped(optimizer, settings), _stepped(resumed, settings)
    if not all(map(torch.equal, after, again)):
        raise problem(settings, "takes another step after its state was saved and loaded")
    return nbytes / sum(one.numel() for one in weights)


def _on_copies(settings: OptimizerConfig, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return the optimiser of copies of `weights`, of which only matrices decay."""
    parameters = [torch.nn.Parameter(one.clone()) for one in weights]
    return make_optimizer(settings, [{"params": [one], "wd_mult": float(one.dim() > 1)} for one in parameters])


def _stepped(optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> list[Tensor]:
    """Take one step, always with the same random numbers, and return copies of the weights."""
    torch.manual_seed(0)
    for one in _parameters(optimizer):
        one.grad = one.cos()
    optimizer.step()
    for one in _parameters(optimizer):
        if not one.isfinite().all():
            raise problem(settings, f"made a weight of shape {list(one.shape)} infinite or not a number")
    return [one.detach().clone() for one in _parameters(optimizer)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, settings: OptimizerConfig) -> int:
    """Return the bytes of one parameter's state. Raises UserError for a state that a checkpoint cannot hold."""
    nbytes = 0
    for name, value in optimizer.state[parameter].items():
        if name == _STEP:
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            where = f"as the state {name} of a parameter of shape {list(parameter.shape)}"
            raise problem(settings, f"keeps {described(value)} {where}, instead of a tensor of that shape")
        nbytes += value.nbytes
    return nbytes
