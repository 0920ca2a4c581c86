"""How the losses of a mini-batch's trained tokens become one number.

    loss = sum_t w_t l_t / sum of divisors

A token's weight w depends on its own sequence alone, and a micro-batch adds its own part to the divisor. So
the result does not depend on how a mini-batch is split into micro-batches and ranks, nor on where its
sequences are cut. Whoever cuts a sequence takes its weight from the whole of it and counts its divisor once.

A sequence without a trained token counts nowhere. Pure numpy.

Sources: `token-mean`: DAPO (arXiv 2503.14476), over the mini-batch instead of the group.
`seq-mean-token-mean`: GRPO (arXiv 2402.03300), eq. 3. `seq-mean-token-sum`: the log-prob of the whole
sequence, REINFORCE and RLOO (arXiv 2402.14740). `fixed-length`: Dr. GRPO (arXiv 2503.20783), whose constant
keeps the scale of a mean and favours no length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlsys.config.algorithm import Aggregation

TOKEN_MEAN = Aggregation("token-mean")
SEQUENCE_MEAN = Aggregation("seq-mean-token-mean")
FIXED_LENGTH = Aggregation("fixed-length")


def token_weights(aggregation: Aggregation, trained_lengths: NDArray[np.integer]) -> NDArray[np.float64]:
    """[sequences] weight of each trained token of a sequence; 0 for a sequence that has none.

    `trained_lengths` [sequences] counts the trained tokens of each whole sequence.
    """
    lengths = np.asarray(trained_lengths)
    weights = (lengths > 0).astype(np.float64)
    return weights / np.maximum(lengths, 1) if aggregation is SEQUENCE_MEAN else weights


def divisor(aggregation: Aggregation, trained_lengths: NDArray[np.integer], loss_length: int) -> int:
    """What sequences of these [sequences] trained lengths add to the mini-batch's divisor.

    `loss_length`, in tokens, is the constant of `fixed-length`. Raises ValueError if it is asked for and
    is not positive.
    """
    lengths = np.asarray(trained_lengths)
    sequences = int(np.count_nonzero(lengths))
    if aggregation is TOKEN_MEAN:
        return int(lengths.sum())
    if aggregation is FIXED_LENGTH:
        if loss_length < 1:
            raise ValueError(
                f"algorithm.loss_length is {loss_length}; fixed-length divides by it, set it to 1 or more."
            )
        return sequences * loss_length
    return sequences
