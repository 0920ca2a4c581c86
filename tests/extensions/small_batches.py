"""Small inputs of policy losses, and scored prompt groups."""

from __future__ import annotations

import math

import numpy as np
import torch

from rlsys.algorithms.losses import LossInputs
from rlsys.data.trajectory import Group, Sample, Scores
from tests.support.trajectories import question, trajectory


def batch(advantages: list[float]) -> tuple[torch.Tensor, LossInputs]:
    """Return log-probs [1, n + 1] and inputs whose last token is untrained."""
    width = len(advantages) + 1
    draw = torch.Generator().manual_seed(0)
    old, ref, now = -torch.rand(3, 1, width, generator=draw)
    mask = torch.tensor([[True] * len(advantages) + [False]])
    inputs = LossInputs(
        old_logprobs=old,
        ref_logprobs=ref,
        advantages=torch.tensor([[*advantages, math.nan]]),
        mask=mask,
        weights=mask.float(),
        sequences=torch.zeros(1, width, dtype=torch.int64),
    )
    return now.requires_grad_(), inputs


def group(*rewards: float) -> Group:
    """Return a scored group of episodes with a prompt token and two trained tokens."""
    one = trajectory(range(3), [False, True, True])
    scores = Scores(np.zeros(3, np.float32), values=np.array([9.0, 0.25, 0.5], np.float32))
    samples = [Sample(one, reward, (reward,), {}, np.zeros(3, np.float32)) for reward in rewards]
    return Group(question(1), tuple(sample.with_scores(scores) for sample in samples))
