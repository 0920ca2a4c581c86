"""A KL estimator: k2 whose gradient is bounded, so that a token far from the reference does not dominate.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu algorithm.kl_estimator=examples.extend.kl_estimator.bounded_k2
"""

from typing import Annotated

from annotated_types import Gt
from torch import Tensor
from torch.nn.functional import huber_loss


def bounded_k2(logprobs: Tensor, ref_logprobs: Tensor, *, limit: Annotated[float, Gt(0)] = 1.0) -> Tensor:
    """Return (log w)^2 / 2 per token, in nats, continued linearly where |log w| exceeds `limit`."""
    return huber_loss(logprobs, ref_logprobs, reduction="none", delta=limit)
