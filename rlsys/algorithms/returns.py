"""What comes of an episode's rewards at each trained token: placing them, returns to go, GAE.

Pure numpy in float64. Every array here is over the trained tokens of one episode alone, in order ([trained]), or
over its trained turns. Prompt and observation tokens are none of them: nothing that stands on them can enter, the
token after a turn's last is the next turn's first, and neither gamma nor lambda counts what lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def placed(turn_rewards: Sequence[float], turns: Ints) -> Floats:
    """[turns] rewards -> [trained]: each stands on the last trained token of its turn.

    `turns` [trained] is the turn of each trained token, in order. A turn without trained tokens hands its reward
    to the nearest trained token before it, and if there is none to the first after it; so the sum stays what it
    was, unless no token is trained at all.
    """
    rewards = np.zeros(len(turns))
    if len(turns):
        # The last token of this turn or an earlier one is one before the first of a later turn.
        ends = np.searchsorted(turns, np.arange(len(turn_rewards)), side="right") - 1
        np.add.at(rewards, ends.clip(min=0), np.asarray(turn_rewards, dtype=np.float64))
    return rewards


def to_go(rewards: Floats, discount: float) -> Floats:
    """[n] rewards -> [n] G_t = r_t + discount G_{t+1}, with nothing after the last."""
    backwards = accumulate(reversed(rewards.tolist()), lambda later, now: now + discount * later)
    return np.array(list(backwards), dtype=np.float64)[::-1]


def generalised_advantages(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    """[trained] rewards and values -> [trained] generalised advantage estimates (arXiv 1506.02438).

    A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t. An episode ends with its last trained
    token, after which the value is 0: also one that a limit cut, for nothing more is paid for it.
    """
    following = np.append(values[1:], 0.0)[: len(values)]
    return to_go(rewards + gamma * following - values, gamma * gae_lambda)
