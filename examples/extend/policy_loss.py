"""A policy loss: simple policy optimisation (arXiv 2401.16025), a parabola around ratio 1 instead of a clip.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu algorithm.policy_loss=examples.extend.policy_loss.parabola
"""

from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from rlsys.algorithms.losses import LossInputs


def parabola(logprobs: Tensor, inputs: LossInputs, *, width: Annotated[float, Gt(0)] = 0.2) -> Tensor:
    """Return the loss of each token [rows, width]; it is lowest at ratio 1 + width, or 1 - width where A < 0."""
    ratio = (logprobs - inputs.old_logprobs).exp()
    advantages = inputs.advantages
    return advantages.abs() * (ratio - 1).square() / (2 * width) - ratio * advantages
