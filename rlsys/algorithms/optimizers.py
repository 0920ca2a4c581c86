"""Makes the optimisers that update whole parameters: SGD, Muon, and `torch.optim.Optimizer`s from outside of the package.

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

from rlsys.config.custom import Custom, OwnComponent, bound, described
from rlsys.config.schema import Dtype, OptimizerConfig
from rlsys.errors import UserError

Groups = Sequence[dict[str, Any]]
"""Parameter groups. Each has `params`, and `wd_mult`, which is 0 for biases and norms and 1 for others."""
TRIAL_S = 60.0
"""Time limit of the trial of an optimiser from outside of the package."""
_STEP = "step"
"""State that is one number, equal for all parameters. Every other state has the shape of its parameter."""

OverMatrices = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""(tensor of a parameter's shape, function of a whole matrix) -> what the function makes of each of the parameter's
matrices, in the parameter's shape."""
ITERATIONS = 5
"""Newton-Schulz iterations."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b and c: an iteration takes each singular value s to a s + b s^3 + c s^5. Those that begin above 0.003 of the root of
the sum of squares end between 0.68 and 1.21 (https://kellerjordan.github.io/posts/muon/)."""
_TINY = 1e-7
"""Lower bound of a norm that divides; a matrix of zeros stays one."""


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return `matrix` [rows, columns] with its singular values near 1, by Newton-Schulz iterations in its own type."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=_TINY)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


class Muon(torch.optim.AdamW):
    """Steps matrices W by Muon (Jordan et al. 2024), and every other parameter by AdamW.

        m <- momentum m + (1 - momentum) g
        O  = orthogonalised(momentum m + (1 - momentum) g)
        W <- W - lr (0.2 sqrt(max(rows, columns)) O + weight_decay W)

    The factor gives O the root mean square of AdamW's updates (Moonlight, arXiv 2502.16982), so `lr` and `weight_decay`
    are the same for both.
    """

    def __init__(self, parameters: Groups, momentum: float, dtype: torch.dtype, **adamw: Any) -> None:
        """Make the optimiser, which orthogonalises in `dtype`; `adamw` are the other arguments of torch's AdamW."""
        super().__init__(list(parameters), **adamw)
        self._momentum, self._dtype = momentum, dtype
        self.matrices: dict[Tensor, OverMatrices] = {
            one: lambda shard, function: function(shard) for one in _parameters(self) if one.dim() == 2
        }
        """Parameters that Muon steps: by default, each that is a matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take a step. Gradients of matrices are used up."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.matrices:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                over = self.matrices[parameter]
                parameter.sub_(over(self._direction(parameter), self._update), alpha=group["lr"])
                parameter.grad = None  # AdamW leaves out parameters without a gradient.
        super().step()

    def _direction(self, parameter: Tensor) -> Tensor:
        """Return what to orthogonalise, after the gradient has entered the running mean."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state |= {_STEP: torch.zeros(()), "momentum_buffer": torch.zeros_like(parameter)}
        state[_STEP] += 1  # Megatron's checkpoints have one count for all parameters.
        mean = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(mean, self._momentum).to(self._dtype)

    @staticmethod
    def _update(matrix: Tensor) -> Tensor:
        return orthogonalised(matrix).float().mul_(0.2 * max(matrix.shape) ** 0.5)


def sgd(parameters: Groups, lr: float, *, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return torch's SGD, which keeps a running sum of gradients if `momentum` is above 0."""
    return torch.optim.SGD(list(parameters), lr, momentum, weight_decay=weight_decay)


def muon(
    parameters: Groups,
    lr: float,
    *,
    momentum: float,
    newton_schulz_dtype: Dtype,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> torch.optim.Optimizer:
    """Return Muon for the parameters that are matrices, until its `matrices` are set, and AdamW for others."""
    adamw = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    return Muon(parameters, momentum, getattr(torch, newton_schulz_dtype.value), **adamw)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"sgd": sgd, "muon": muon}
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
    return OwnComponent(settings).error(what)


def state_bytes(settings: OptimizerConfig) -> float:
    """Return the bytes of state that an optimiser keeps for each parameter.

    Raises UserError for an optimiser from outside that fails, makes a weight that is not finite, keeps a state that a
    checkpoint cannot hold, takes another step after its state was saved and loaded, or more than `TRIAL_S`.
    """
    if isinstance(settings, Custom):
        return float(OwnComponent(settings).run(_tried, settings, timeout_s=TRIAL_S))
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
