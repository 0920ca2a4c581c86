"""An episode under way as plain data: what is needed to go on with it elsewhere, and nothing that follows from it.

Kept are the whole turns: what was sampled, and what the environment said to it. Contexts of either token mode
follow from these and the question, so `Episode` builds its own again, by the same calls that built it first.

Invariant: an episode that is taken out between any two turns and put back ends with the trajectory of one that
ran through, given the same further generations and observations. Tokens of a turn that was cut off are not
kept: nobody has acted on them, and they are sampled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from rlsys.data.trajectory import Trajectory, Turn
from rlsys.rollout.agent.tokens import Sample


@dataclass(frozen=True, slots=True)
class PartialEpisode:
    """An episode after its last whole turn; it has at least one."""

    question_uid: str
    sample: int
    turns: tuple[Turn, ...]
    """Each with what the environment said to it."""
    token_ids: NDArray[np.int32]
    """[sampled] as the engine returned them, turn after turn: `generated_tokens` of each."""
    logprobs: NDArray[np.float32]
    """[sampled] natural log-probs under the sampling temperature."""
    versions: NDArray[np.int32]
    """[sampled] policy version that sampled each."""
    ended_itself: NDArray[np.bool_]
    """[turns] see `Sample.ended_itself`."""

    def generations(self) -> Iterator[tuple[Turn, slice, bool]]:
        """Each turn, where its tokens are, and whether it ended itself."""
        ends = accumulate((turn.generated_tokens for turn in self.turns), initial=0)
        for turn, (start, end), ended in zip(self.turns, pairwise(ends), self.ended_itself.tolist(), strict=True):
            yield turn, slice(start, end), ended


Begun = Trajectory | PartialEpisode
"""An episode that has ended or has whole turns; one without any is as good as not begun."""


def partial_episode(
    question_uid: str, sample: int, turns: Sequence[Turn], generations: Sequence[Sample]
) -> PartialEpisode:
    """The first `turns`, at least one, and what was sampled in each."""
    return PartialEpisode(
        question_uid=question_uid,
        sample=sample,
        turns=tuple(turns),
        token_ids=np.concatenate([np.asarray(one.output_ids, np.int32) for one in generations]),
        logprobs=np.concatenate([np.asarray(one.logprobs, np.float32) for one in generations]),
        versions=np.concatenate([np.asarray(one.versions, np.int32) for one in generations]),
        ended_itself=np.array([one.ended_itself for one in generations], np.bool_),
    )
