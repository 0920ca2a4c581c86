"""The frequencies of rotary positions, with the scaling of Llama 3.1 and later."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from rlsys.weights.families import Architecture


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Radians that a position turns each pair of a head's numbers by, [head_dim / 2] float32 on the CPU.

    Without scaling f_i = theta^(-2 i / head_dim) (Su et al., RoFormer, arXiv:2104.09864, section 3.2.2). With it, as in
    `apply_scaling` of Meta's Llama 3.1 (github.com/meta-llama/llama-models, models/llama3): with n_i =
    original_max_positions f_i / (2 pi) turns within the original context,

        s_i = clamp((n_i - low) / (high - low), 0, 1),   f'_i = (1 - s_i) f_i / factor + s_i f_i

    so fast pairs stay, slow ones are slowed down by `factor`, and those in between are interpolated.
    """
    powers = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**powers
    scaling = architecture.rope
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions / (2 * pi / frequencies)
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    # Not clamped: at the ends the two terms would not add up to the last bit.
    slow = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, slow)
