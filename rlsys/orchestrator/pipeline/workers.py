"""The groups of workers, as the pipeline sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rlsys.data.question import Question, SourceState
from rlsys.data.trajectory import Sample, Scores, Trajectory
from rlsys.rollout.agent.tokens import EpisodeProgress


class GroupGenerator(Protocol):
    """The rollout group."""

    @property
    def capacity(self) -> int:
        """Groups that may be generated at a time; fewer when engines die, and with the last `run_group` raises."""

    @property
    def waits_for(self) -> str:
        """What all that is under way waits for, as far as is known; empty where some of it is generated."""

    async def run_group(
        self, question: Question, prompt_group: int, begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """All episodes of one question, those of them that were `begun` earlier from where they were.

        Raises GroupLost if they cannot be had; frees all on cancellation.
        """

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        """By prompt group: what is begun of each group that is being generated, for a later `run_group` to go on from."""


class SampleScorer(Protocol):
    """The inference group, and the critic where there is one."""

    @property
    def groups(self) -> Sequence[str]:
        """Names of those that have to be on the devices."""

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Log-probs and values in the order of `samples`."""


class Prompts(Protocol):
    """The prompt source."""

    def next(self) -> Question:
        """The next question."""

    def give_back(self, question: Question) -> None:
        """Ask it again."""

    def state(self) -> SourceState:
        """What a resumed run needs to go on with the same prompts."""


class Devices(Protocol):
    """Who may use the devices, where groups share them."""

    async def need(self, *groups: str) -> None:
        """Make room for `groups` and bring them in; returns at once if they are in."""
