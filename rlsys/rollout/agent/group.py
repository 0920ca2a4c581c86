"""The episodes of one question, side by side.

Contract: belongs to one event loop. Every episode comes back: one that has ended before stays as it is, one that
has begun goes on, others begin; one that runs out of time, or is not played to its end, is `Finish.ABORTED` and
holds the turns that were complete. What `begun` returns at any moment can be given to another group of the
same question, which then ends as this one would have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.rollout.agent.begun import Begun
from rlsys.rollout.agent.episode import Episode, EpisodeTools, TurnSampling
from rlsys.rollout.agent.within import within


class EpisodeGroup:
    """Play it once."""

    def __init__(
        self,
        question: Question,
        samples: Sequence[int],
        tools: EpisodeTools,
        sampling: TurnSampling,
        begun: Sequence[Begun] = (),
    ) -> None:
        """`begun` is what there is already of some of the `samples`, in any order.

        Raises UserError for a question that is too long, ValueError for `begun` that is not of this group.
        """
        known = {one.sample: one for one in begun}
        if len(known) < len(begun) or not known.keys() <= set(samples):
            raise ValueError(
                f"Samples {[one.sample for one in begun]} were begun, of the samples {list(samples)} of "
                f"question {question.uid}."
            )
        self._episodes: dict[int, Episode] = {}
        """Those that have to be played."""
        self._ended: dict[int, Trajectory] = {}
        self._samples = tuple(samples)
        for sample in samples:
            one = known.get(sample)
            if not isinstance(one, Trajectory):
                self._episodes[sample] = Episode(question, sample, tools, sampling, one)
            elif one.question_uid == question.uid:
                self._ended[sample] = one
            else:
                raise ValueError(f"An episode of question {one.question_uid} is none of {question.uid}.")

    async def play(self, slots: asyncio.Semaphore, timeout_s: float) -> None:
        """Run each episode to its end, or for `timeout_s` seconds from when one of the `slots` is free for it."""

        async def play(sample: int, episode: Episode) -> None:
            async with slots:
                finish = await within(episode.run(), timeout_s=timeout_s)
            self._ended[sample] = episode.trajectory(finish or Finish.ABORTED)

        tasks = [asyncio.create_task(play(sample, episode)) for sample, episode in self._episodes.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After an error or a cancellation, no sibling may go on unseen.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def begun(self) -> tuple[Begun, ...]:
        """Of each sample that has ended or has a whole turn, what there is; in the order of the samples."""
        found = (self._ended.get(sample) or self._episodes[sample].begun() for sample in self._samples)
        return tuple(one for one in found if one is not None)

    def trajectories(self) -> list[Trajectory]:
        """Of every sample, in order; an episode that has not ended is aborted."""
        return [
            self._ended.get(sample) or self._episodes[sample].trajectory(Finish.ABORTED) for sample in self._samples
        ]
