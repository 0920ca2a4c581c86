"""How turns are drawn: as training asks for, or as an evaluation does. Pure."""

from __future__ import annotations

from rlsys.config.schema import SamplingConfig
from rlsys.rollout.agent.episode import TurnSampling


def in_training(rollouts: SamplingConfig) -> TurnSampling:
    """Of the turns of rollouts."""
    return TurnSampling(rollouts.temperature, rollouts.top_p, rollouts.top_k, tuple(rollouts.stop))


def of_answers(rollouts: SamplingConfig, temperature: float, *, as_rollouts: bool) -> TurnSampling:
    """Of the turns of an evaluation: at `temperature`, 0 is greedy, from the whole vocabulary.

    `as_rollouts`, which is `compat.sampled_validation`, draws them as in training, whatever temperature is asked for.
    """
    return in_training(rollouts) if as_rollouts else TurnSampling(temperature, stop=tuple(rollouts.stop))
