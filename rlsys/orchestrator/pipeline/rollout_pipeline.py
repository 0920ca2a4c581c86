"""Moves prompt groups from prompt to training batch: rollout, reward, scoring, hand-over.

The scheduler decides and this module acts. It starts and cancels episodes, and calls the reward and the scorer on
finished groups. It returns prompts of dropped groups to the source and hands scored groups to the learners.

    prompt source -> roll out -> reward -> score -> take     the driver trains, closes the step, publishes the version
                     engines     CPU       Megatron

`run` works until `stop`; meanwhile the driver calls `take` for scored groups, closes steps and publishes weight
versions. Run it in the task group that also calls `take`: an error in any stage ends `run` with that error.
Between two steps `state` holds everything in flight, and another pipeline can resume from it.

Invariants:
- A group is rewarded, scored and handed over at most once.
- `run` returns only after the episodes and rewards of every cancelled group have ended.
- A group that is being rewarded holds no engine slot.
- A group that becomes unschedulable is dropped at once.
- After `run`, every prompt is trained, dropped for good, or back in the source.
- A pipeline that resumed from a state and has not run yet returns that same state.

Depends only on asyncio: tests run it under a virtual clock and in any interleaving.
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

from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.errors import RunError
from rlsys.observe import status
from rlsys.orchestrator.pipeline.scheduler import (
    GIVEN_BACK,
    DropReason,
    GroupStage,
    PromptGroup,
    SchedulerState,
    StalenessScheduler,
)
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.weights.checkpoint.state_file import KEY

MAX_LOSSES = 3
"""Lost groups after which a prompt is no longer returned to the source: the prompt may be killing the engines.

Each later epoch tries the prompt once more; if that group is lost too, the epoch does not use the prompt again."""
SCORES = {"inference": "log-probs", "critic": "values"}
"""Worker group that scores -> name of its scores in status lines."""


class LostReason(StrEnum):
    """Reason for giving up a group."""

    engine_died = "engine_died"
    """Two engines died while they generated the group."""
    timeout = "timeout"
    """A live engine did not return the group in time."""
    search_failed = "search_failed"
    """Two of the group's tries ended with a search without an answer, although the search server answers others."""


class GroupLost(RunError):
    """Raised if a group fails but the run can continue: the pipeline drops the group and usually retries its prompt."""

    def __init__(self, uid: str, reason: LostReason, detail: str) -> None:
        super().__init__(f"the prompt group of question {uid} is lost ({reason}): {detail}.")
        self.reason = reason


class GroupGenerator(Protocol):
    """Generates the episodes of prompt groups; implemented by the engine pool."""

    @property
    def capacity(self) -> int:
        """Number of groups that can be generated at a time. It shrinks when engines die; at 0, `run_group` raises.

        When it grows, `RolloutPipeline.wake` must be called."""

    @property
    def waits_for(self) -> str:
        """For the status line: the tools that all episodes in flight wait for.

        Empty if any episode is generating, or if unknown.
        """

    async def run_group(
        self, question: Question, prompt_group: int, progress: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """Return all episodes of `question`, resuming the partial episodes in `progress`.

        Raises GroupLost if the group fails. Cancellation ends the episodes and frees their slots.
        """

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        """Return prompt group number -> progress of its unfinished generation, to pass to a later `run_group`."""


class SampleScorer(Protocol):
    """Computes log-probs, and also values if a critic is trained."""

    @property
    def groups(self) -> Sequence[str]:
        """Worker groups that must be on the devices for `compute`."""

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Return log-probs and values in the order of `samples`."""


class Devices(Protocol):
    """Moves colocated groups on and off the devices that they share."""

    async def onload(self, *groups: str) -> None:
        """Bring `groups` onto the devices, after other groups have left; no-op for groups that are already there."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """Callbacks that process a prompt group."""

    reward: Callable[[Question, Sequence[Trajectory]], Awaitable[Group]]
    """Rewards finished episodes. May be slow; cancelled if the group is dropped meanwhile."""
    finish: Callable[[Group], Group]
    """Adds advantages and correction weights to a scored group. Pure."""


@dataclass(frozen=True, slots=True)
class ScoreBatchSize:
    """Bounds on the number of groups that the scorer takes at a time."""

    min_groups: float
    """The scorer waits until this many groups are rewarded, or until no group is rolling and none may be admitted.

    Infinity means that only the second condition counts."""
    max_groups: int


@dataclass(frozen=True, slots=True)
class PipelineState:
    """State of the pipeline between two steps. Integer keys are prompt group numbers."""

    scheduler: SchedulerState = field(metadata={KEY: "ledger"})
    losses: Mapping[str, int]
    """Question id -> number of times that its group was lost."""
    progress: Mapping[int, tuple[EpisodeProgress, ...]] = field(metadata={KEY: "begun"})
    """Partial episodes of rolling groups; complete episodes of groups being rewarded."""
    rewarded: Mapping[int, Group] = field(metadata={KEY: "rolled"})
    """Rewarded groups, in scoring order."""
    scored: Mapping[int, Group]
    """Scored groups, in the order in which they are taken."""


class _Scored(NamedTuple):
    """Scored group; sorts in the order in which groups are taken. `take` skips a group that was dropped meanwhile."""

    priority: tuple[float, int, int]
    """Unique: it ends with the group's number."""
    prompt_group: PromptGroup
    group: Group


class RolloutPipeline:
    """Moves prompt groups from the prompt source to the learners."""

    def __init__(
        self,
        scheduler: StalenessScheduler,
        prompts: PromptSource,
        generator: GroupGenerator,
        scorer: SampleScorer,
        handlers: Handlers,
        score_batch_size: ScoreBatchSize,
        devices: Devices,
        state: PipelineState | None = None,
    ) -> None:
        """Continue from `state` if given; `scheduler`, which must be new, resumes from it too."""
        self.scheduler = scheduler
        self.prompts, self._generator, self._scorer = prompts, generator, scorer
        self._handlers, self._batch_size, self._devices = handlers, score_batch_size, devices
        self._scoring_stages = {
            SCORES[group]: "critic.values" if group == "critic" else group for group in scorer.groups
        }
        """Name of the scores -> status stage that reports them."""
        self._rolling: dict[PromptGroup, asyncio.Task[None]] = {}
        """Rollout tasks that have not ended. A cancelled task may end after its group has left the stage `rolling`."""
        self._rewarding: dict[PromptGroup, Sequence[Trajectory]] = {}
        """Groups in `_rolling` with all episodes done -> their trajectories."""
        self._resumed_from: dict[PromptGroup, Sequence[EpisodeProgress]] = {}
        """Partial episodes from which each task resumed."""
        self._to_resume: OrderedDict[PromptGroup, Sequence[EpisodeProgress]] = OrderedDict()
        """Rolling groups of a resumed state without a task yet -> partial episodes to resume."""
        # Not a dict: finding the first key of a dict slows down with the number of keys removed before it.
        self._rewarded: OrderedDict[PromptGroup, Group] = OrderedDict()
        self._scoring: Sequence[tuple[PromptGroup, Group]] = ()
        self._scored: list[_Scored] = []
        self._losses: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._stopping = False
        if state is not None:
            self._resume(state)

    def state(self, progress: Mapping[int, Sequence[EpisodeProgress]]) -> PipelineState:
        """Return the current state; `progress` is a recent result of the generator's `in_flight`.

        Groups may have been admitted, rewarded or dropped since that call. Their current stage counts; `progress` is
        used only for groups whose episodes still run. Raises RuntimeError during a step.
        """
        scheduler = self.scheduler.state()
        rolling = [
            prompt_group for prompt_group in self.scheduler.outstanding if prompt_group.stage is GroupStage.rolling
        ]
        known = {
            prompt_group.number: tuple(
                self._rewarding.get(prompt_group)
                or progress.get(prompt_group.number)
                or self._resumed_from.get(prompt_group)
                or self._to_resume.get(prompt_group, ())
            )
            for prompt_group in rolling
        }
        waiting = [*self._scoring, *self._rewarded.items()]
        return PipelineState(
            scheduler=scheduler,
            losses=dict(self._losses),
            progress={number: episodes for number, episodes in known.items() if episodes},
            rewarded={
                prompt_group.number: group for prompt_group, group in waiting if prompt_group.stage is GroupStage.ready
            },
            scored={
                one.prompt_group.number: one.group
                for one in sorted(self._scored)
                if one.prompt_group.stage is GroupStage.ready
            },
        )

    async def run(self) -> None:
        """Generate and score until `stop`. On any exit, drop outstanding groups and return their prompts."""
        self._drop_unschedulable()  # A resumed run may have a lower `trainer.steps`.
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._roll_all(tasks))
                tasks.create_task(self._score_all())
        finally:
            self._drop_and_cancel((prompt_group, DropReason.end) for prompt_group in self.scheduler.outstanding)
            status.show("waits for the end of the run", "rollout", *self._scoring_stages.values())

    async def take(self, most: int, *stages: str) -> list[Group]:
        """Block until a group is scored, then return up to `most` scored groups; `most` is at least 1.

        They come in the order of the scheduler's `priority`. The status `stages` show the cause of the wait. Raises RuntimeError after `stop`.
        """
        groups: list[Group] = []
        while not groups:
            await self._wait_until(
                lambda: self._stopping or bool(self._scored),
                lambda: status.show(f"waits for {self._awaited_stage()}", *stages),
            )
            if self._stopping:
                raise RuntimeError("No group can be taken: the pipeline has been stopped.")
            while self._scored and len(groups) < most:
                first = heappop(self._scored)
                if first.prompt_group.stage is GroupStage.ready:
                    self.scheduler.take(first.prompt_group)
                    groups.append(first.group)
        self._drop_unschedulable()
        return groups

    def close_step(self) -> None:
        """Close the step after its last optimiser step.

        No group becomes unschedulable here: `take` already dropped the groups whose only place was in this step.
        """
        self.scheduler.close_step()
        self.prompts.end_step()
        self._show_rollouts()
        self._changed.set()  # With `max_wait`, a closed step makes room for other groups.

    def publish(self, version: int) -> None:
        """Record that every rolling engine has `version`, and admit groups for it. Idempotent."""
        if version > self.scheduler.published:
            self.scheduler.publish(version)
        self._changed.set()

    def wake(self) -> None:
        """Admit groups for which the generator has room again; call it when the generator's `capacity` grows."""
        self._changed.set()

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers that change whenever a prompt group reaches another stage, and whenever the version does."""
        scheduler = self.scheduler
        counts = (len(self._rolling), len(self._rewarding), len(self._rewarded), len(self._scoring), len(self._scored))
        ended = sum(scheduler.dropped.values())
        return (scheduler.version, scheduler.published, scheduler.outstanding_count, ended, *counts)

    def show_rollouts(self) -> None:
        """Refresh the rollout status while groups roll: the generator's `waits_for` changes without an event here."""
        if self._rolling and not self._stopping:
            self._show_rollouts()

    def stop(self) -> None:
        """End `run`. A step in progress is never closed; its prompts return to the source too."""
        self._stopping = True
        self._drop_and_cancel((prompt_group, DropReason.end) for prompt_group in self.scheduler.outstanding)

    def _resume(self, state: PipelineState) -> None:
        self.scheduler.resume(state.scheduler)
        prompt_groups = {prompt_group.number: prompt_group for prompt_group in self.scheduler.outstanding}
        self._losses.update(state.losses)
        for prompt_group in prompt_groups.values():
            if prompt_group.stage is GroupStage.rolling:
                self._to_resume[prompt_group] = state.progress.get(prompt_group.number, ())
        self._rewarded.update((prompt_groups[number], group) for number, group in state.rewarded.items())
        # Under another schedule than that of the state, the priorities have another order.
        self._scored = sorted(
            _Scored(self.scheduler.priority(prompt_groups[number]), prompt_groups[number], group)
            for number, group in state.scored.items()
        )

    async def _roll_all(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._wait_until(lambda: self._stopping or self._may_roll(), self._show_rollouts)
            if self._stopping:
                return
            await self._devices.onload("rollout")
            if self._may_roll():
                if self._to_resume:
                    prompt_group, progress = self._to_resume.popitem(last=False)
                else:
                    prompt_group, progress = self.scheduler.admit(self.prompts.next()), ()
                self._resumed_from[prompt_group] = progress
                self._rolling[prompt_group] = task = tasks.create_task(self._roll(prompt_group, progress))
                # A callback, not a `finally` in `_roll`: a task cancelled before it starts never runs its body.
                task.add_done_callback(partial(self._forget_task, prompt_group))

    async def _roll(self, prompt_group: PromptGroup, progress: Sequence[EpisodeProgress]) -> None:
        group = None
        try:
            trajectories = await self._generator.run_group(prompt_group.question, prompt_group.number, progress)
            self._rewarding[prompt_group] = trajectories
            self._changed.set()
            if prompt_group.stage is GroupStage.rolling:
                group = await self._handlers.reward(prompt_group.question, trajectories)
        except GroupLost:
            pass
        if prompt_group.stage is not GroupStage.rolling:
            return
        if group is None:
            self._drop(prompt_group, DropReason.lost)
        else:
            self.prompts.observe(prompt_group.number, group)
            if reason := self.scheduler.finish_rolling(prompt_group, group.oldest_version, group.has_spread):
                self._drop(prompt_group, reason)
            else:
                self._rewarded[prompt_group] = group
        self._drop_unschedulable()

    def _forget_task(self, prompt_group: PromptGroup, _: asyncio.Task[None]) -> None:
        del self._rolling[prompt_group], self._resumed_from[prompt_group]
        self._rewarding.pop(prompt_group, None)
        self._changed.set()

    async def _score_all(self) -> None:
        while True:
            status.show("waits for rollouts", *self._scoring_stages.values())
            await self._wait_until(lambda: self._stopping or self._may_score())
            if self._stopping:
                return
            await self._devices.onload(*self._scorer.groups)
            batch = [
                self._rewarded.popitem(last=False) for _ in range(min(len(self._rewarded), self._batch_size.max_groups))
            ]
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
            if prompt_group.stage is GroupStage.ready:
                finished = self._handlers.finish(scored)
                heappush(self._scored, _Scored(self.scheduler.priority(prompt_group), prompt_group, finished))
        self._changed.set()

    def _may_roll(self) -> bool:
        # With no engine left, still start one group: `run_group` then raises the error that ends the run.
        room = max(1, self._generator.capacity) - (len(self._rolling) - len(self._rewarding))
        return not self._stopping and room > 0 and (bool(self._to_resume) or self.scheduler.may_admit())

    def _may_score(self) -> bool:
        if len(self._rewarded) >= self._batch_size.min_groups:
            return True
        rolling = self._rolling or self._to_resume
        return bool(self._rewarded) and not rolling and not self.scheduler.may_admit()

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

    def _awaited_stage(self) -> str:
        """Return the stage for which `take` waits."""
        if self._scoring:
            return " and ".join(self._scoring_stages) or "scores"
        return "rewards" if self._rolling and len(self._rolling) == len(self._rewarding) else "rollouts"

    def _drop_unschedulable(self) -> None:
        """Drop the groups that no step can train, and cancel their episodes."""
        self._drop_and_cancel(self.scheduler.unschedulable())

    def _drop_and_cancel(self, found: Iterable[tuple[PromptGroup, DropReason]]) -> None:
        """Drop prompt groups and cancel their running episodes."""
        for prompt_group, reason in found:
            self._drop(prompt_group, reason)
            if prompt_group in self._rolling:
                self._rolling[prompt_group].cancel()
        self._changed.set()

    def _drop(self, prompt_group: PromptGroup, reason: DropReason) -> None:
        self.scheduler.drop(prompt_group, reason)
        self._rewarded.pop(prompt_group, None)
        self._to_resume.pop(prompt_group, None)
        if reason is DropReason.lost:
            self._losses[prompt_group.question.uid] += 1
            if self._losses[prompt_group.question.uid] >= MAX_LOSSES:
                return
        if reason in GIVEN_BACK:
            self.prompts.give_back(prompt_group.question)

    async def _wait_until(self, holds: Callable[[], bool], show: Callable[[], None] = lambda: None) -> None:
        """Block until `holds()`, calling `show` before each wait.

        `holds` may become true only when `_changed` is set, which wakes all waiters.
        """
        while not holds():
            show()
            self._changed.clear()
            await self._changed.wait()
