"""Moves prompt groups from prompt to training batch: rollout, reward, scoring, hand-over.

The scheduler decides, this module acts: it starts and cancels episodes, has finished groups rewarded and scored, returns
prompts of dropped groups to the source, and hands scored groups to the learners.

    prompt source -> roll out -> reward -> score -> take     the driver trains, closes the step, publishes the version
                     engines     CPU       Megatron

`run` works until `stop`; meanwhile the driver calls `take` for scored groups (oldest first), closes steps and publishes
weight versions. Run it in the task group of the caller of `take`: an error in any stage ends `run` with that error.
Between two steps `state` holds everything in flight, and another pipeline can resume from it.

Invariants:
- A group is rewarded, scored and handed over at most once.
- `run` returns only after the episodes and rewards of every cancelled group have ended.
- A group that is being rewarded holds no engine slot.
- A group that becomes unschedulable is dropped at once.
- After `run`, every prompt is trained, dropped for good, or back in the source.
- A pipeline that resumed from a state and has not run yet returns that same state.

Depends on asyncio alone, so tests run it under a virtual clock and any interleaving.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple, Protocol

from rlsys.data.question import Question, SourceState
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.errors import RunError
from rlsys.observe import status
from rlsys.orchestrator.pipeline.scheduler import (
    GIVEN_BACK,
    PromptGroup,
    Reason,
    SchedulerState,
    Stage,
    StalenessScheduler,
)
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.weights.checkpoint.state_file import KEY

MOST_LOSSES = 3
"""A question whose group was lost so often is not asked again before the next epoch, and then once: it may be
what kills the engines."""
SCORES = {"inference": "log-probs", "critic": "values"}
"""Group that scores -> what it computes."""


class Loss(StrEnum):
    """Why a group was given up."""

    engine_died = "engine_died"
    """Twice."""
    timeout = "timeout"
    """Its engine lives, but has not returned it."""


class GroupLost(RunError):
    """A group will not be finished, while the run can go on: it is dropped and its prompt asked again."""

    def __init__(self, uid: str, reason: Loss, detail: str) -> None:
        super().__init__(f"the group of question {uid} is lost ({reason}): {detail}.")
        self.uid = uid
        self.reason = reason


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


@dataclass(frozen=True, slots=True)
class Handlers:
    """What is done to a group on its way."""

    reward: Callable[[Question, Sequence[Trajectory]], Awaitable[Group]]
    """Once its episodes are done. It may take long, and is cancelled where the group is dropped meanwhile."""
    finish: Callable[[Group], Group]
    """Advantages, and weights of off-policy tokens, once it is scored. A pure function."""


@dataclass(frozen=True, slots=True)
class ScoreBatchSize:
    """How many groups the scorer takes at a time."""

    least: float
    """It waits for so many, or until all rollouts are rewarded and none may begin; infinity is the latter."""
    most: int


@dataclass(frozen=True, slots=True)
class PipelineState:
    """All that is under way between two steps. The rest is by number of prompt group."""

    scheduler: SchedulerState = field(metadata={KEY: "ledger"})
    losses: Mapping[str, int]
    """Question -> how often its group was lost."""
    begun: Mapping[int, tuple[EpisodeProgress, ...]]
    """What there is of groups that roll; all episodes of those that are being rewarded."""
    rolled: Mapping[int, Group]
    """Rewarded, in the order in which they are to be scored."""
    scored: Mapping[int, Group]
    """To be taken."""


class _Scored(NamedTuple):
    """A group that may be taken, in the order of taking. One that was dropped meanwhile is passed over."""

    oldest: int
    number: int
    prompt_group: PromptGroup
    group: Group


class RolloutPipeline:
    """The way of a group from its prompt to the actor."""

    def __init__(
        self,
        scheduler: StalenessScheduler,
        prompts: Prompts,
        generator: GroupGenerator,
        scorer: SampleScorer,
        handlers: Handlers,
        score_batch_size: ScoreBatchSize,
        devices: Devices,
        state: PipelineState | None = None,
    ) -> None:
        """With a `state`, whose prompt groups the scheduler then has, goes on from it."""
        self.scheduler = scheduler
        self.prompts, self._generator, self._scorer = prompts, generator, scorer
        self._handlers, self._batch_size, self._devices = handlers, score_batch_size, devices
        self._scoring_stages = {
            SCORES[group]: "critic.values" if group == "critic" else group for group in scorer.groups
        }
        """What is computed -> the stage that reports it."""
        self._rolling: dict[PromptGroup, asyncio.Task[None]] = {}
        """Until the task has ended, which is later than the prompt group if it was cancelled."""
        self._rewarding: dict[PromptGroup, Sequence[Trajectory]] = {}
        """Of them, those whose episodes are done."""
        self._begun: dict[PromptGroup, Sequence[EpisodeProgress]] = {}
        """What each of them went on from."""
        self._again: OrderedDict[PromptGroup, Sequence[EpisodeProgress]] = OrderedDict()
        """Rolling prompt groups of a resumed state that have no task yet, and what they will go on from."""
        # Not a dict: that finds its first key ever more slowly, the more were removed before it.
        self._rolled: OrderedDict[PromptGroup, Group] = OrderedDict()
        self._scoring: Sequence[tuple[PromptGroup, Group]] = ()
        self._scored: list[_Scored] = []
        self._losses: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._stopping = False
        if state is not None:
            self._resume(state)

    def state(self, begun: Mapping[int, Sequence[EpisodeProgress]]) -> PipelineState:
        """What is under way now; `begun` is what the generator said of it a moment ago.

        In between, prompt groups may have come, gone on or gone: what they have become by now counts, and `begun` for those
        alone whose episodes still run. Raises RuntimeError in the middle of a step.
        """
        scheduler = self.scheduler.state()
        rolling = [prompt_group for prompt_group in self.scheduler.outstanding if prompt_group.stage is Stage.rolling]
        known = {
            prompt_group.number: tuple(
                self._rewarding.get(prompt_group)
                or begun.get(prompt_group.number)
                or self._begun.get(prompt_group)
                or self._again.get(prompt_group, ())
            )
            for prompt_group in rolling
        }
        waiting = [*self._scoring, *self._rolled.items()]
        return PipelineState(
            scheduler=scheduler,
            losses=dict(self._losses),
            begun={number: episodes for number, episodes in known.items() if episodes},
            rolled={prompt_group.number: group for prompt_group, group in waiting if prompt_group.stage is Stage.ready},
            scored={one.number: one.group for one in sorted(self._scored) if one.prompt_group.stage is Stage.ready},
        )

    async def run(self) -> None:
        """Roll and score until `stop`. However it ends, outstanding prompt groups are dropped, their prompts given back."""
        self._sweep()  # A run that resumes may have been given fewer steps.
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._roll_all(tasks))
                tasks.create_task(self._score_all())
        finally:
            self._end((prompt_group, Reason.end) for prompt_group in self.scheduler.outstanding)
            status.show("waits for the end of the run", "rollout", *self._scoring_stages.values())

    async def take(self, most: int, *stages: str) -> list[Group]:
        """Wait for a scored group, then take what is there, oldest first, at most `most`, which is at least 1.

        `stages` report what they wait for. Raises RuntimeError after `stop`.
        """
        groups: list[Group] = []
        while not groups:
            await self._until(
                lambda: self._stopping or bool(self._scored),
                lambda: status.show(f"waits for {self._behind()}", *stages),
            )
            if self._stopping:
                raise RuntimeError("A group was waited for after the pipeline was stopped.")
            while self._scored and len(groups) < most:
                first = heappop(self._scored)
                if first.prompt_group.stage is Stage.ready:
                    self.scheduler.take(first.prompt_group)
                    groups.append(first.group)
        self._sweep()
        return groups

    def close_step(self) -> None:
        """The optimiser has stepped. This dooms nothing: who had no place but in that step went when it was full."""
        self.scheduler.close_step()
        self._show_rollouts()

    def publish(self, version: int) -> None:
        """Every engine has `version`: more may be rolled. A version that is published already changes nothing."""
        if version > self.scheduler.published:
            self.scheduler.publish(version)
        self._changed.set()

    def show_rollouts(self) -> None:
        """Tell again what rollouts do, as long as there are some: what they wait for changes without the pipeline."""
        if self._rolling and not self._stopping:
            self._show_rollouts()

    def stop(self) -> None:
        """End `run`. A step under way is not closed any more: its prompts are given back too."""
        self._stopping = True
        self._end((prompt_group, Reason.end) for prompt_group in self.scheduler.outstanding)

    def _resume(self, state: PipelineState) -> None:
        self.scheduler.resume(state.scheduler)
        prompt_groups = {prompt_group.number: prompt_group for prompt_group in self.scheduler.outstanding}
        self._losses.update(state.losses)
        for prompt_group in prompt_groups.values():
            if prompt_group.stage is Stage.rolling:
                self._again[prompt_group] = state.begun.get(prompt_group.number, ())
        self._rolled.update((prompt_groups[number], group) for number, group in state.rolled.items())
        self._scored = [
            _Scored(prompt_groups[number].oldest, number, prompt_groups[number], group)
            for number, group in state.scored.items()
        ]

    async def _roll_all(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._until(lambda: self._stopping or self._may_roll(), self._show_rollouts)
            if self._stopping:
                return
            await self._devices.need("rollout")
            if self._may_roll():
                if self._again:
                    prompt_group, begun = self._again.popitem(last=False)
                else:
                    prompt_group, begun = self.scheduler.admit(self.prompts.next()), ()
                self._begun[prompt_group] = begun
                self._rolling[prompt_group] = task = tasks.create_task(self._roll(prompt_group, begun))
                # Not the task's own activity: one that is cancelled before its first turn does nothing at all.
                task.add_done_callback(partial(self._ended, prompt_group))

    async def _roll(self, prompt_group: PromptGroup, begun: Sequence[EpisodeProgress]) -> None:
        group = None
        try:
            trajectories = await self._generator.run_group(prompt_group.question, prompt_group.number, begun)
            self._rewarding[prompt_group] = trajectories
            self._changed.set()
            if prompt_group.stage is Stage.rolling:
                group = await self._handlers.reward(prompt_group.question, trajectories)
        except GroupLost:
            pass
        if prompt_group.stage is not Stage.rolling:
            return
        if group is None:
            self._drop(prompt_group, Reason.lost)
        elif reason := self.scheduler.finish_rolling(prompt_group, group.oldest_version, group.has_spread):
            self._drop(prompt_group, reason)
        else:
            self._rolled[prompt_group] = group
        self._sweep()

    def _ended(self, prompt_group: PromptGroup, _: asyncio.Task[None]) -> None:
        del self._rolling[prompt_group], self._begun[prompt_group]
        self._rewarding.pop(prompt_group, None)
        self._changed.set()

    async def _score_all(self) -> None:
        while True:
            status.show("waits for rollouts", *self._scoring_stages.values())
            await self._until(lambda: self._stopping or self._worth_scoring())
            if self._stopping:
                return
            await self._devices.need(*self._scorer.groups)
            batch = [self._rolled.popitem(last=False) for _ in range(min(len(self._rolled), self._batch_size.most))]
            if batch:
                self._scoring = batch
                await self._score(batch)
                self._scoring = ()

    async def _score(self, batch: Sequence[tuple[PromptGroup, Group]]) -> None:
        for scores, stage in self._scoring_stages.items():
            status.show(f"computes {scores} of {status.count(len(batch), 'group')}", stage)
        asked = [sample for _, group in batch for sample in group.samples]
        found = await self._scorer.compute(asked)
        samples = iter([one.with_scores(scores) for one, scores in zip(asked, found, strict=True)])
        for prompt_group, group in batch:
            scored = replace(group, samples=tuple(islice(samples, len(group.samples))))
            if prompt_group.stage is Stage.ready:
                finished = self._handlers.finish(scored)
                heappush(self._scored, _Scored(prompt_group.oldest, prompt_group.number, prompt_group, finished))
        self._changed.set()

    def _may_roll(self) -> bool:
        # With no engine left one group is asked for all the same: the error that this raises ends the run.
        room = max(1, self._generator.capacity) - (len(self._rolling) - len(self._rewarding))
        return not self._stopping and room > 0 and (bool(self._again) or self.scheduler.may_admit())

    def _worth_scoring(self) -> bool:
        if len(self._rolled) >= self._batch_size.least:
            return True
        rolling = self._rolling or self._again
        return bool(self._rolled) and not rolling and not self.scheduler.may_admit()

    def _show_rollouts(self) -> None:
        generating = len(self._rolling) - len(self._rewarding)
        if generating:
            cause = self._generator.waits_for
            status.show(f"waits for {cause}" if cause else f"generates {status.count(generating, 'group')}", "rollout")
        elif self._rewarding:
            status.show("waits for rewards", "rollout")
        else:
            trained = self.scheduler.version > self.scheduler.published
            status.show("waits for weight sync" if trained else "waits for training", "rollout")

    def _behind(self) -> str:
        """What the next group that can be taken is still at."""
        if self._scoring:
            return " and ".join(self._scoring_stages) or "scores"
        return "rewards" if self._rolling and len(self._rolling) == len(self._rewarding) else "rollouts"

    def _sweep(self) -> None:
        """Drop what can no longer be trained."""
        self._end(self.scheduler.unschedulable())

    def _end(self, found: Iterable[tuple[PromptGroup, Reason]]) -> None:
        """Drop prompt groups, and end their episodes if they still run."""
        for prompt_group, reason in found:
            self._drop(prompt_group, reason)
            if prompt_group in self._rolling:
                self._rolling[prompt_group].cancel()
        self._changed.set()

    def _drop(self, prompt_group: PromptGroup, reason: Reason) -> None:
        self.scheduler.drop(prompt_group, reason)
        self._rolled.pop(prompt_group, None)
        self._again.pop(prompt_group, None)
        if reason is Reason.lost:
            self._losses[prompt_group.question.uid] += 1
            if self._losses[prompt_group.question.uid] >= MOST_LOSSES:
                return
        if reason in GIVEN_BACK:
            self.prompts.give_back(prompt_group.question)

    async def _until(self, holds: Callable[[], bool], show: Callable[[], None] = lambda: None) -> None:
        """Wait until `holds`, which changes with `_changed` alone. Any number may wait: each is woken each time.

        `show` is called whenever it has still to wait.
        """
        while not holds():
            show()
            self._changed.clear()
            await self._changed.wait()
