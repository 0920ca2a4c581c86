"""Bugs planted on purpose, one for each property that a simulated run must have: the checks see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlsys.data.question import PromptSource, Question, SourceState
from rlsys.data.trajectory import Group, Sample, Scores
from rlsys.orchestrator.pipeline.rollout_pipeline import PipelineState, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import PromptGroup, Reason, SchedulerState, Stage, StalenessScheduler
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.simulation import Parts
from tests.orchestrator.pipeline.watched import Property


class LosesGroup(RolloutPipeline):
    """A group is lost: the last of a bite of several is not scored."""

    async def _score(self, bite: Sequence[tuple[PromptGroup, Group]]) -> None:
        await super()._score(bite[:1])


class OffByOne(StalenessScheduler):
    """Staleness is off by one: a group counts as a version younger than it is."""

    def finish_rolling(self, prompt_group: PromptGroup, oldest: int | None, has_spread: bool) -> Reason | None:
        return super().finish_rolling(prompt_group, None if oldest is None else oldest + 1, has_spread)


class TrainsTwice(RolloutPipeline):
    """A group is trained twice: the first of an earlier step in the place of another."""

    kept: Group | None = None

    async def take(self, most: int, *stages: str) -> list[Group]:
        groups = await super().take(most, *stages)
        if self.scheduler.version:
            assert self.kept is not None
            return [self.kept, *groups[1:]]
        self.kept = self.kept or groups[0]
        return groups


class TellsNobody(RolloutPipeline):
    """A new version wakes nobody who waits for it."""

    def publish(self, version: int) -> None:
        self.scheduler.publish(version)


class KeepsDoomed(RolloutPipeline):
    """Takes groups without a look at what has lost its place thereby."""

    async def take(self, most: int, *stages: str) -> list[Group]:
        self._sweep, sweep = self._changed.set, self._sweep
        try:
            return await super().take(most, *stages)
        finally:
            self._sweep = sweep


class Churns(StalenessScheduler):
    """Every group that becomes ready ends all that still roll, and room for them is made again."""

    def unschedulable(self) -> list[tuple[PromptGroup, Reason]]:
        rolling = [prompt_group for prompt_group in self.outstanding if prompt_group.stage is Stage.rolling]
        return super().unschedulable() or [(prompt_group, Reason.surplus) for prompt_group in rolling[1:]]


class KeepsPrompts(RolloutPipeline):
    """Prompts of groups that are too old are not given back."""

    def _drop(self, prompt_group: PromptGroup, reason: Reason) -> None:
        super()._drop(prompt_group, reason)
        if reason is Reason.stale:
            self.prompts._given_back.pop()


class RollsTooEarly(StalenessScheduler):
    """Admits for a version that no engine has yet, and believes that the group is of that version."""

    def may_admit(self) -> bool:
        published, self.published = self.published, self.version
        try:
            return super().may_admit()
        finally:
            self.published = published

    def admit(self, question: Question) -> PromptGroup:
        prompt_group = PromptGroup(self._admitted, question, self.version)
        self._admitted += 1
        self._rolling.add(prompt_group)
        return prompt_group

    def finish_rolling(self, prompt_group: PromptGroup, _: int | None, has_spread: bool) -> Reason | None:
        return super().finish_rolling(prompt_group, None, has_spread)


class TakesTooMany(RolloutPipeline):
    """A mini-batch takes a group of the next."""

    async def take(self, most: int, *stages: str) -> list[Group]:
        return await super().take(min(most + 1, self.scheduler.lacking), *stages)


class Boundless(StalenessScheduler):
    """Admits a prompt group more than it may."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spare += 1


class Undead(StalenessScheduler):
    """A group that was dropped while it rolled is welcome when it comes in all the same."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.undead: set[PromptGroup] = set()

    def drop(self, prompt_group: PromptGroup, reason: Reason) -> None:
        rolled = prompt_group.stage is Stage.rolling
        super().drop(prompt_group, reason)
        if rolled and reason is Reason.surplus:
            prompt_group.stage = Stage.rolling
            self.undead.add(prompt_group)

    def finish_rolling(self, prompt_group: PromptGroup, oldest: int | None, has_spread: bool) -> Reason | None:
        if prompt_group in self.undead:
            self._rolling.add(prompt_group)
        return super().finish_rolling(prompt_group, oldest, has_spread)

    def take(self, prompt_group: PromptGroup) -> None:
        if prompt_group in self.undead:
            self._ready.remove(prompt_group)
            prompt_group.oldest = self.version
            self._ready.add(prompt_group)
        super().take(prompt_group)

    def unschedulable(self) -> list[tuple[PromptGroup, Reason]]:
        return [
            (prompt_group, reason)
            for prompt_group, reason in super().unschedulable()
            if prompt_group not in self.undead
        ]


class ForgetsAtUpdate(StalenessScheduler):
    """A new version makes it forget a group that rolls."""

    def publish(self, version: int) -> None:
        super().publish(version)
        for prompt_group in self._rolling.prompt_groups()[:1]:
            self._rolling.remove(prompt_group)


class ScoresTooEarly(RolloutPipeline):
    """Scores what is there, also where stages must not overlap."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._batch_size = ScoreBatchSize(1, self._batch_size.most)


class ScoresUnrewarded(RolloutPipeline):
    """Takes the rollouts for ended as soon as the episodes are, while the last are still rewarded."""

    def _worth_scoring(self) -> bool:
        rolling, self._rolling = (
            self._rolling,
            {t: r for t, r in self._rolling.items() if t not in self._rewarding},
        )
        try:
            return super()._worth_scoring()
        finally:
            self._rolling = rolling


class KeepsRoom(RolloutPipeline):
    """The engines have no room for another group while one is rewarded."""

    def _may_roll(self) -> bool:
        rewarding, self._rewarding = self._rewarding, set()
        try:
            return super()._may_roll()
        finally:
            self._rewarding = rewarding


class MixesUp(RolloutPipeline):
    """Scores come back in the wrong order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        scorer = self._scorer

        async def reversed_compute(samples: Sequence[Sample]) -> list[Scores]:
            return (await scorer.compute(samples))[::-1]

        self._scorer = SimpleNamespace(groups=scorer.groups, compute=reversed_compute)


PLANTED: Sequence[tuple[Property, Parts]] = [
    (Property.deadlock, Parts(pipeline=LosesGroup)),
    (Property.livelock, Parts(scheduler=Churns)),
    (Property.waiting, Parts(pipeline=TellsNobody)),
    (Property.waiting, Parts(pipeline=KeepsRoom)),
    (Property.unschedulable, Parts(pipeline=KeepsDoomed)),
    (Property.once, Parts(pipeline=TrainsTwice)),
    (Property.conserved, Parts(pipeline=KeepsPrompts)),
    (Property.staleness, Parts(scheduler=OffByOne)),
    (Property.on_policy, Parts(scheduler=RollsTooEarly)),
    (Property.step, Parts(pipeline=TakesTooMany)),
    (Property.outstanding, Parts(scheduler=Boundless)),
    (Property.dropped, Parts(scheduler=Undead)),
    (Property.update, Parts(scheduler=ForgetsAtUpdate)),
    (Property.sequence, Parts(pipeline=ScoresTooEarly)),
    (Property.sequence, Parts(pipeline=ScoresUnrewarded)),
    (Property.own, Parts(pipeline=MixesUp)),
]
"""The property that each must be seen to break."""


def scheduler_resumes(change: Callable[[SchedulerState], SchedulerState]) -> Parts:
    """A scheduler that takes another state for the one that was saved."""

    class Resumes(StalenessScheduler):
        def resume(self, state: SchedulerState) -> None:
            super().resume(change(state))

    return Parts(scheduler=Resumes)


def pipeline_resumes(change: Callable[[PipelineState], PipelineState]) -> Parts:
    """A pipeline that takes another state for the one that was saved."""

    class Resumes(RolloutPipeline):
        def _resume(self, state: PipelineState) -> None:
            super()._resume(change(state))

    return Parts(pipeline=Resumes)


def prompts_resume(change: Callable[[SourceState], SourceState]) -> Parts:
    """A prompt source that takes another state for the one that was saved."""

    class Resumes(PromptSource):
        def __init__(self, questions: Sequence[Question], seed: int, state: SourceState | None) -> None:
            super().__init__(questions, seed, state and change(state))

    return Parts(prompts=Resumes)


def forgets_in_state(name: str) -> Parts:
    """A pipeline that saves its state as if nothing were in the attribute `name`, whose keys stay."""

    class Forgets(RolloutPipeline):
        def state(self, begun: Mapping[int, Sequence[EpisodeProgress]]) -> PipelineState:
            known = getattr(self, name)
            setattr(self, name, () if isinstance(known, tuple | list) else type(known).fromkeys(known, ()))
            try:
                return super().state(begun)
            finally:
                setattr(self, name, known)

    return Parts(pipeline=Forgets)


class BeginsNoneAgain(RolloutPipeline):
    """Prompt groups that roll are in the books, and nothing is done about them."""

    def _resume(self, state: PipelineState) -> None:
        super()._resume(state)
        self._again.clear()


class BeginsLastFirst(RolloutPipeline):
    """The newest prompt group is begun first."""

    def _resume(self, state: PipelineState) -> None:
        super()._resume(state)
        for prompt_group in reversed([*self._again]):
            self._again.move_to_end(prompt_group)


PLANTED_IN_RESUMING: Mapping[str, tuple[Property, Parts]] = {
    "prompt groups are numbered from nought": (
        Property.once,
        scheduler_resumes(lambda state: replace(state, admitted=0)),
    ),
    "as many groups as in a whole step are replaced once more": (
        Property.replaced,
        scheduler_resumes(lambda state: replace(state, replaced=0)),
    ),
    "prompt groups that roll are not in the books": (
        Property.resumed,
        scheduler_resumes(lambda state: replace(state, rolling=())),
    ),
    "prompt groups that roll are not begun": (Property.waiting, Parts(pipeline=BeginsNoneAgain)),
    "the newest prompt group is begun first": (Property.resumed, Parts(pipeline=BeginsLastFirst)),
    "begun episodes are thrown away": (Property.resumed, pipeline_resumes(lambda state: replace(state, begun={}))),
    "of groups that are rewarded, older news of the engines is saved": (
        Property.resumed,
        forgets_in_state("_rewarding"),
    ),
    "what waits to be begun again forgets its episodes": (Property.resumed, forgets_in_state("_again")),
    "what was handed to engines that have not begun it forgets its episodes": (
        Property.resumed,
        forgets_in_state("_begun"),
    ),
    "scored groups are not resumed": (Property.deadlock, pipeline_resumes(lambda state: replace(state, scored={}))),
    "groups that wait for scores are not resumed": (
        Property.deadlock,
        pipeline_resumes(lambda state: replace(state, rolled={})),
    ),
    "groups that are being scored are not saved": (Property.deadlock, forgets_in_state("_scoring")),
    "groups are scored in reverse": (
        Property.order,
        pipeline_resumes(lambda state: replace(state, rolled=dict(reversed(state.rolled.items())))),
    ),
    "losses of questions are forgotten": (
        Property.conserved,
        pipeline_resumes(lambda state: replace(state, losses={})),
    ),
    "questions that were given back are forgotten": (
        Property.conserved,
        prompts_resume(lambda state: replace(state, given_back=())),
    ),
    "the first epoch begins again": (Property.conserved, prompts_resume(lambda state: replace(state, position=0))),
}
"""The property that each must be seen to break in a run that is killed and resumed."""
