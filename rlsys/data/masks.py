"""Which tokens of a trajectory count, for the policy and for the critic. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import CompatConfig
from rlsys.data.trajectory import Trajectory

Mask = NDArray[np.bool_]
MaskOf = Callable[[Trajectory], Mask]
"""A trajectory -> [seq]"""


def trained_tokens(trajectory: Trajectory) -> Mask:
    """[seq] True where the policy generated the token."""
    return trajectory.loss_mask


def response_tokens(trajectory: Trajectory) -> Mask:
    """[seq] True after the prompt, observations included."""
    return np.arange(len(trajectory.tokens)) >= trajectory.prompt_length


def value_mask(compat: CompatConfig) -> MaskOf:
    """Where the critic learns, and over what advantages are estimated and whitened."""
    return response_tokens if compat.observations_in_values else trained_tokens
