"""Properties that are checked while a simulated run runs, and the record that they are checked against.

The record does not depend on the scheduler's own state: it logs prompt groups and the calls of the workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from enum import StrEnum
from functools import cache

from rlsys.data.question import Question
from rlsys.orchestrator.pipeline.scheduler import (
    DropReason,
    GroupOutcome,
    GroupStage,
    PromptGroup,
    SchedulerState,
    StalenessScheduler,
)
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.script import Script

LEARNERS = ("actor", "critic")
GROUPS = ("rollout", "inference", *LEARNERS)


class Property(StrEnum):
    """A property that must hold in every run."""

    deadlock = "something is always under way"
    livelock = "the run ends after boundedly many admissions"
    waiting = "no stage waits while there is work for it"
    unschedulable = "what can no longer be trained is dropped at once"
    once = "every prompt group is trained once or dropped once, and scored at most once"
    conserved = "every prompt is trained, dropped for good or back in the source"
    staleness = (
        "no trained token is staler than allowed; without staleness every token is of the version that is trained"
    )
    step = "every learner trains exactly the step's groups, in every optimiser step its share"
    outstanding = "never more prompt groups are outstanding, or generated at a time, than allowed"
    dropped = "nothing of a dropped prompt group is scored or trained"
    update = "a policy update loses no prompt group and, if episodes finish first, splits no group"
    sequence = "in sequence, scoring waits for the last reward of the step, training for the last score"
    own = "every sample is trained with scores and weights of its own"
    order = "groups are scored in the order in which they became ready, and trained in the order of the policy"
    waited = "no group is trained more steps after it became ready than allowed"
    replaced = "no more groups without spread are replaced in a step than allowed"
    pushed = "an engine uses only whole weights that were pushed as its version"
    counted = "the curriculum counts every rewarded group once"
    resumed = "a resumed run goes on with every prompt group from what was begun of it, before it begins others"


class Breach(Exception):
    """Raised if a property does not hold."""

    def __init__(self, broken: Property, detail: str = "") -> None:
        super().__init__(f"{broken.name}: not {broken}: {detail}")
        self.broken = broken


class Failure(Exception):
    """Failure of a worker that the script asks for."""


class Record:
    """Log of a run, which checks properties at every entry."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = self.running = self.rewarded_now = 0
        """Number of steps closed; numbers of groups being generated and being rewarded; cancelled groups count until they have ended."""
        self.prompt_groups: dict[int, PromptGroup] = {}
        self.open: set[int] = set()
        self.taken: list[int] = []
        """Groups that the current step has taken."""
        self.trained: list[Question] = []
        """Questions trained in closed steps."""
        self.dropped: list[tuple[Question, DropReason]] = []
        self.begun: dict[int, tuple[EpisodeProgress, ...]] = {}
        """Prompt group -> episodes that it must continue from after a resume; all its episodes once they are done."""
        self._all_done: set[int] = set()
        self.again: list[int] = []
        """Prompt groups that were rolling when the run was saved and have not been begun again yet."""
        self.gone_on: set[int] = set()
        """Prompt groups that were rolling when the run was saved and have been begun again."""
        self.unscored: dict[int, None] = {}
        """Ready groups that have not been scored, in the order in which they became ready."""
        self.offered: set[int] = set()
        """Groups that have been scored, and neither taken nor dropped."""
        self.states: dict[str, str] = {}
        """Stage -> its last status line."""
        self.resident: Callable[[], Collection[str]] = lambda: GROUPS
        """Worker groups that are on the devices."""
        self.over = self.failed = False
        """True once the pipeline has ended, and after a worker's failure; later actions of workers do not count."""
        self.broken: Breach | None = None
        """First breach; later ones follow from it."""
        self.counted: set[int] = set()
        """Prompt groups whose rewards were known while they were rolling."""
        self.ended: dict[int, str] = {}
        """Prompt group -> `trained` or the reason of its drop, in the order of the ends."""
        self.told: list[GroupOutcome] = []
        """Ends of groups that the schedulers of earlier lives reported."""
        self._ready: dict[int, int] = {}
        """Ready prompt group, scored or not -> number of steps closed when it became ready."""
        self._replaced = 0
        """Number of groups replaced in the current step."""
        self._scored: set[tuple[int, int]] = set()
        self._accumulated: set[tuple[str, int, int]] = set()
        """(learner, prompt group, sample) of all samples given to learners."""
        self._updates: dict[str, list[set[int]]] = {name: [set()] for name in LEARNERS}
        self._working: set[str] = set()
        self._worker_calls: Counter[str] = Counter()

    def hold(self, named: Property, holds: object, detail: object = "") -> None:
        """Raise Breach unless `holds` is true; later breaches of a run raise the first one again."""
        if not holds:
            self.over = True
            self.broken = self.broken or Breach(named, str(detail))
            raise self.broken

    def fail_if_due(self, worker: str) -> None:
        """Raise Failure if the script says that this call fails."""
        self._worker_calls[worker] += 1
        if self.script.fails == (worker, self._worker_calls[worker]):
            self.over = self.failed = True
            raise Failure(worker)

    def resumed(self) -> Record:
        """Return the record of a run that resumes from this moment."""
        later = deepcopy(self, {id(self.script): self.script})
        later.again = sorted(self.open - self._ready.keys())
        later.begun = {number: self.begun[number] for number in later.again if number in self.begun}
        later.running = later.rewarded_now = 0
        later._all_done = set()
        later.states, later._working, later.resident = {}, set(), lambda: GROUPS
        # Groups whose scores were being computed are scored again.
        later.unscored = {number: None for number in self._ready if number not in self.offered}
        later._scored = {(number, sample) for number, sample in self._scored if number not in later.unscored}
        return later

    def resume(self, prompt_groups: Sequence[PromptGroup]) -> None:
        """Log that the scheduler has resumed `prompt_groups`."""
        self.hold(Property.resumed, {one.number for one in prompt_groups} == self.open)
        self.prompt_groups.update((one.number, one) for one in prompt_groups)

    def begin_group(self, number: int, begun: Sequence[EpisodeProgress]) -> None:
        """Log a call that runs the episodes of a prompt group, continuing those in `begun`."""
        self.hold(Property.resumed, not self.again or number == self.again[0], f"{number} before {self.again}")
        self.hold(Property.resumed, _facts(begun) == _facts(self.begun.get(number, ())), f"{number} from {begun}")
        if self.again:
            self.gone_on.add(self.again.pop(0))
        self.running += 1
        self.hold(Property.outstanding, self.running <= self.script.room * self.script.engines)
        self.begin("rollout")

    def tell(self, begun: Mapping[int, tuple[EpisodeProgress, ...]]) -> None:
        """Log the progress that an engine reports. An engine may still run a group that another engine has finished."""
        self.begun |= {number: found for number, found in begun.items() if number not in self._all_done}

    def begin(self, stage: str) -> None:
        """Log that the worker of a stage begins a call."""
        if self.script.sequential and not self.over:
            self._check_sequence(stage)
        if stage != "rollout":
            self._working.add(stage)

    def end(self, stage: str) -> None:
        """Log that the worker of a stage has ended a call."""
        if stage == "rollout":
            self.running -= 1
        else:
            self._working.remove(stage)

    def admit(self, prompt_group: PromptGroup) -> None:
        self.hold(Property.once, prompt_group.number not in self.prompt_groups, prompt_group)
        self.prompt_groups[prompt_group.number] = prompt_group
        self.open.add(prompt_group.number)
        self.hold(Property.outstanding, len(self.open) <= self.script.most_outstanding, self.open)
        self.hold(Property.livelock, len(self.prompt_groups) <= self._most_admitted())

    @contextmanager
    def rewarding(self, number: int, episodes: Sequence[EpisodeProgress]) -> Iterator[None]:
        """Log that the episodes of a prompt group, which are all done, are being rewarded."""
        self.begun[number] = tuple(episodes)
        self._all_done.add(number)
        self.rewarded_now += 1
        try:
            yield
        finally:
            self.rewarded_now -= 1

    def ready(self, prompt_group: PromptGroup) -> None:
        self._ready[prompt_group.number] = self.version
        self.unscored[prompt_group.number] = None

    def ask(self, number: int, sample: int) -> None:
        """Log a sample that the scorer is given."""
        self.hold(Property.dropped, number not in self.ended, number)
        self.hold(Property.once, (number, sample) not in self._scored, (number, sample))
        first = next(iter(self.unscored)) if number in self.unscored else number
        self.hold(Property.order, number == first, f"{number} before {first}")
        self._scored.add((number, sample))
        self.unscored.pop(number, None)

    def take(self, prompt_group: PromptGroup) -> None:
        rank = self._rank(prompt_group.number)
        self.hold(Property.order, all(rank <= self._rank(number) for number in self.offered), prompt_group)
        self.offered.discard(prompt_group.number)
        waited, most = self.version - self._ready.pop(prompt_group.number), self.script.max_wait
        self.hold(Property.waited, most is None or waited <= most, f"{prompt_group} waited {waited}")
        self.taken.append(prompt_group.number)

    def drop(self, prompt_group: PromptGroup, reason: DropReason) -> None:
        self._end(prompt_group, reason)
        self.dropped.append((prompt_group.question, reason))
        self._replaced += reason is DropReason.no_spread
        self.hold(Property.replaced, self._replaced <= self.script.max_replaced)
        self.offered.discard(prompt_group.number)
        self.unscored.pop(prompt_group.number, None)
        self._ready.pop(prompt_group.number, None)
        if prompt_group.number in self.again:
            self.again.remove(prompt_group.number)

    def train(self, learner: str, number: int, sample: int, versions: Sequence[int]) -> None:
        """Log a sample that a learner is given, with the versions of its trained tokens."""
        if not self.over:
            self.hold(Property.step, learner in self.script.learning(self.version + 1), learner)
            self.hold(Property.dropped, self.ended.get(number, "trained") == "trained", number)
            again = (learner, number, sample) in self._accumulated
            self.hold(Property.once, number in self.taken and not again, (learner, number, sample))
            lags = {self.version - version for version in versions}
            self.hold(Property.staleness, lags <= {*range(self.script.max_staleness + 1)}, lags)
        self._accumulated.add((learner, number, sample))
        self._updates[learner][-1].add(number)

    def update(self, learner: str) -> None:
        """Log an optimiser step."""
        updates = self._updates[learner]
        self.hold(Property.step, self.over or len(updates[-1]) == self.script.sizes[len(updates) - 1], updates)
        updates.append(set())

    def updated(self, learner: str) -> int:
        """Return the number of optimiser steps in the current step."""
        return len(self._updates[learner]) - 1

    def close(self) -> None:
        """Log that the current step is closed."""
        self.hold(Property.step, self.over or len(self.taken) == self.script.groups_per_step)
        for learner in self.script.learning(self.version + 1):
            trained = {number for name, number, _ in self._accumulated if name == learner}
            self.hold(Property.step, self.over or trained >= {*self.taken}, f"{learner} trained {trained}")
        for number in self.taken:
            self._end(self.prompt_groups[number], "trained")
            self.trained.append(self.prompt_groups[number].question)
        self.taken, self._replaced = [], 0
        self._updates = {name: [set()] for name in LEARNERS}
        self.version += 1

    def leave(self, stage: str) -> None:
        """Log that a worker group leaves the devices."""
        works = stage in self._working or (stage == "rollout" and self.running)
        self.hold(Property.sequence, self.over or not works, f"{stage} leaves the devices while it works")

    def _end(self, prompt_group: PromptGroup, how: str) -> None:
        self.hold(Property.once, prompt_group.number not in self.ended, f"{prompt_group} is {how}")
        self.ended[prompt_group.number] = how
        self.open.remove(prompt_group.number)

    def _rank(self, number: int) -> tuple[int, ...]:
        return self.script.order(number, self.prompt_groups[number].oldest, self._ready[number])

    def _most_admitted(self) -> int:
        """Return the largest number of admissions; docs/pipeline.md derives it."""
        replaced = sum(reason in (DropReason.no_spread, DropReason.lost) for _, reason in self.dropped)
        most, spare = self.script.most_outstanding, self.script.spare
        # Versions begin when they are published and, with `max_wait`, also when a step is closed.
        periods = self.version + 1 if self.script.max_wait is None else 2 * self.version + 1
        return periods * (most * (2 + spare) + spare) + replaced

    def _check_sequence(self, stage: str) -> None:
        needed = {stage, "critic"} if stage == "inference" and self.script.critic else {stage}
        self.hold(Property.sequence, needed <= {*self.resident()}, f"{stage} begins off the devices")
        others = self._working - ({*LEARNERS} if stage in LEARNERS else {stage})
        self.hold(Property.sequence, not others, f"{stage} begins while {others} work")
        if stage == "rollout":
            return
        ready = {number for number in self.open if self.prompt_groups[number].stage is GroupStage.ready} | {*self.taken}
        self.hold(Property.sequence, not self.running and not self.rewarded_now, f"{stage} begins beside rollouts")
        self.hold(Property.sequence, len(ready) == self.script.groups_per_step, f"{stage} begins with {ready}")
        self.hold(Property.sequence, stage not in LEARNERS or not self.unscored, f"{self.unscored} are not scored")


def _facts(begun: Sequence[EpisodeProgress]) -> list[tuple[type[EpisodeProgress], int, list[int]]]:
    """Return facts that suffice to compare partial episodes."""
    return [(type(one), one.sample, one.versions.tolist()) for one in begun]


class _Watched(StalenessScheduler):
    """Scheduler that logs its calls."""

    record: Record

    def resume(self, state: SchedulerState) -> None:
        super().resume(state)
        self.record.resume(self.outstanding)

    def admit(self, question: Question) -> PromptGroup:
        prompt_group = super().admit(question)
        self.record.admit(prompt_group)
        return prompt_group

    def finish_rolling(self, prompt_group: PromptGroup, oldest: int | None, has_spread: bool) -> DropReason | None:
        reason = super().finish_rolling(prompt_group, oldest, has_spread)
        self.record.counted.add(prompt_group.number)
        if reason is None:
            self.record.ready(prompt_group)
        return reason

    def take(self, prompt_group: PromptGroup) -> None:
        super().take(prompt_group)
        self.record.take(prompt_group)

    def drop(self, prompt_group: PromptGroup, reason: DropReason) -> None:
        super().drop(prompt_group, reason)
        self.record.drop(prompt_group, reason)

    def close_step(self) -> None:
        super().close_step()
        self.record.close()

    def publish(self, version: int) -> None:
        before = self.outstanding
        super().publish(version)
        self.record.hold(Property.update, self.outstanding == before, f"{before}, then {self.outstanding}")


@cache
def watched(scheduler: type[StalenessScheduler]) -> type[_Watched]:
    """Return a subclass of `scheduler` that logs its calls in `record`."""
    return type(f"Watched{scheduler.__name__}", (_Watched, scheduler), {})
