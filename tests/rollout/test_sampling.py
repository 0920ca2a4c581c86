"""At what temperature, and from which part of the vocabulary, turns are drawn."""

from __future__ import annotations

from rlsys.config.schema import SamplingConfig
from rlsys.rollout.agent.episode import TurnSampling, evaluation_sampling, training_sampling

ROLLOUTS = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, stop=["</a>"])


def test_rollouts_are_drawn_as_the_config_says() -> None:
    assert training_sampling(ROLLOUTS) == TurnSampling(0.7, 0.9, 20, ("</a>",))


def test_answers_have_a_temperature_of_their_own_and_the_whole_vocabulary() -> None:
    assert evaluation_sampling(ROLLOUTS, 0.0, as_rollouts=False) == TurnSampling(0.0, 1.0, -1, ("</a>",))
    assert evaluation_sampling(ROLLOUTS, 0.5, as_rollouts=False).temperature == 0.5


def test_answers_may_be_drawn_as_rollouts() -> None:
    assert evaluation_sampling(ROLLOUTS, 0.0, as_rollouts=True) == training_sampling(ROLLOUTS)
