"""Properties that a simulated run is held to while it runs, and the record that they are read from.

The record is kept apart from the scheduler's own books: it sees prompt groups come and go, and what workers are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from enum import StrEnum
from functools import cache

from rlsys.data.question import Question
from rlsys.data.trajectory import Group
from rlsys.orchestrator.pipeline.scheduler import PromptGroup, Reason, SchedulerState, Stage, StalenessScheduler
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.script import Script

LEARNERS = ("actor", "critic")
GROUPS = ("rollout", "inference", *LEARNERS)


class Property(StrEnum):
    """A property of every run."""

    deadlock = "something is always under way"
    livelock = "the run ends after boundedly many admissions"
    waiting = "no stage waits while there is work for it"
    unschedulable = "what can no longer be trained is dropped at once"
    once = "every prompt_group is trained once or dropped once, and scored at most once"
    conserved = "every prompt is trained, dropped for good or back in the source"
    staleness = "no trained token is staler than allowed"
    on_policy = "without staleness every token is sampled by the version that is trained"
    step = "every learner trains exactly the step's groups, in every optimiser step its share"
    outstanding = "never more prompt_groups are outstanding than allowed"
    dropped = "nothing of a dropped prompt_group is scored or trained"
    update = "a policy update loses no prompt_group and, if episodes finish first, splits no group"
    sequence = "in sequence, scoring waits for the last reward of the step, training for the last score"
    own = "every sample is trained with scores and weights of its own"
    order = "groups are scored in the order in which they became ready"
    replaced = "no more groups without spread are replaced in a step than allowed"
    resumed = "a resumed run goes on with every prompt_group from what was begun of it, before it begins others"


class Breach(Exception):
    """A property does not hold."""

    def __init__(self, broken: Property, detail: str) -> None:
        super().__init__(f"{broken.name}: not {broken}: {detail}")
        self.broken = broken


class Failure(Exception):
    """A scripted worker's failure."""


class Record:
    """Everything that happened so far."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0
        self.running = 0
        """Calls of `run_group` that have not ended, those that wind down included."""
        self.rewarded_now = 0
        """Groups that are being rewarded, also those whose rewards wind down."""
        self.late_answers = self.mixed_groups = 0
        self.lags: Counter[int] = Counter()
        """Versions between a trained token and the one that samples it -> tokens."""
        self.prompt_groups: dict[int, PromptGroup] = {}
        self.open: set[int] = set()
        self.taken: list[int] = []
        """By the step under way."""
        self.trained: list[Question] = []
        """In steps that were closed."""
        self.dropped: list[tuple[Question, Reason]] = []
        self.begun: dict[int, tuple[EpisodeProgress, ...]] = {}
        """PromptGroup -> what a run that is resumed now has to go on from; all episodes once they are done."""
        self._all_done: set[int] = set()
        self.again: list[int] = []
        """Prompt groups that rolled when the run was saved; those that have been begun again have `gone_on`."""
        self.gone_on: set[int] = set()
        self.unscored: dict[int, None] = {}
        """In the order in which they became ready."""
        self.offered: set[int] = set()
        """Scored, and not taken or dropped yet."""
        self.states: dict[str, str] = {}
        self.resident: Callable[[], Collection[str]] = lambda: GROUPS
        """Groups that are on the devices."""
        self.over = False
        """The pipeline has ended; what goes on elsewhere no longer counts."""
        self.broken: Breach | None = None
        """The first."""
        self.ended: dict[int, str] = {}
        """PromptGroup -> `trained`, or why it was dropped; in this order."""
        self._ready: dict[int, None] = {}
        """Those of them that are open, scored or not."""
        self._replaced = 0
        """In the step under way."""
        self._scored: set[tuple[int, int]] = set()
        self._accumulated: set[tuple[str, int, int]] = set()
        """(learner, prompt group, sample)"""
        self._updates: dict[str, list[set[int]]] = {name: [set()] for name in LEARNERS}
        self._working: set[str] = set()
        self._worker_calls: Counter[str] = Counter()

    def breach(self, broken: Property, detail: str) -> Breach:
        """To be raised. What follows from the first is no breach of its own."""
        self.over = True
        self.broken = self.broken or Breach(broken, detail)
        return self.broken

    def report(self, stage: str, text: str) -> None:
        """Note what a stage does."""
        self.states[stage] = text

    def fail_if_due(self, worker: str) -> None:
        """Raise the failure that the script has for this call."""
        self._worker_calls[worker] += 1
        if self.script.fails == (worker, self._worker_calls[worker]):
            self.over = True
            raise Failure(worker)

    def resumed(self) -> Record:
        """The record of a run that goes on from here."""
        later = deepcopy(self, {id(self.script): self.script})
        later.again = sorted(self.open - self._ready.keys())
        later.begun = {number: self.begun[number] for number in later.again if number in self.begun}
        later.running = later.rewarded_now = 0
        later._all_done = set()
        later.states, later._working, later.resident = {}, set(), lambda: GROUPS
        # What was being scored is scored again.
        later.unscored = {number: None for number in self._ready if number not in self.offered}
        later._scored = {(number, sample) for number, sample in self._scored if number not in later.unscored}
        return later

    def resume(self, prompt_groups: Sequence[PromptGroup]) -> None:
        """The scheduler has these prompt groups again."""
        if {prompt_group.number for prompt_group in prompt_groups} != self.open:
            raise self.breach(Property.resumed, f"{prompt_groups} instead of {self.open}")
        self.prompt_groups.update((prompt_group.number, prompt_group) for prompt_group in prompt_groups)

    def begin_group(self, prompt_group: int, begun: Sequence[EpisodeProgress]) -> None:
        """A ticket's group is asked for, with what was begun of it."""
        if self.again and prompt_group != self.again[0]:
            raise self.breach(Property.resumed, f"ticket {prompt_group} begins before {self.again}")
        if _facts(begun) != _facts(self.begun.get(prompt_group, ())):
            raise self.breach(Property.resumed, f"ticket {prompt_group} goes on from {begun}")
        if self.again:
            self.gone_on.add(self.again.pop(0))
        self.running += 1
        self.begin("rollout")

    def tell(self, begun: Mapping[int, tuple[EpisodeProgress, ...]]) -> None:
        """An engine says what is begun on it. A group may run on there after another engine has answered."""
        self.begun |= {
            prompt_group: found for prompt_group, found in begun.items() if prompt_group not in self._all_done
        }

    def begin(self, stage: str) -> None:
        """A worker begins."""
        if self.script.sequential and not self.over:
            self._check_sequence(stage)
        if stage != "rollout":
            self._working.add(stage)

    def end(self, stage: str) -> None:
        """A worker has ended."""
        if stage == "rollout":
            self.running -= 1
        else:
            self._working.remove(stage)

    def admit(self, prompt_group: PromptGroup) -> None:
        if prompt_group.number in self.prompt_groups:
            raise self.breach(Property.once, f"there are two prompt_groups {prompt_group.number}")
        self.prompt_groups[prompt_group.number] = prompt_group
        self.open.add(prompt_group.number)
        if len(self.open) > self.script.most_outstanding:
            raise self.breach(Property.outstanding, f"{len(self.open)} of {self.script.most_outstanding}")
        if len(self.prompt_groups) > self.most_admitted():
            raise self.breach(Property.livelock, f"{len(self.prompt_groups)} tickets")

    @contextmanager
    def rewarding(self, prompt_group: int, episodes: Sequence[EpisodeProgress]) -> Iterator[None]:
        """All episodes of the prompt group are done; they are being rewarded."""
        self.begun[prompt_group] = tuple(episodes)
        self._all_done.add(prompt_group)
        self.rewarded_now += 1
        try:
            yield
        finally:
            self.rewarded_now -= 1

    def ready(self, prompt_group: PromptGroup) -> None:
        self._ready[prompt_group.number] = self.unscored[prompt_group.number] = None

    def ask(self, prompt_group: int, sample: int) -> None:
        """The scorer is given a sample."""
        if prompt_group in self.ended:
            raise self.breach(Property.dropped, f"ticket {prompt_group} is scored")
        if (prompt_group, sample) in self._scored:
            raise self.breach(Property.once, f"sample {sample} of prompt_group {prompt_group} is scored again")
        if prompt_group in self.unscored and prompt_group != next(iter(self.unscored)):
            raise self.breach(Property.order, f"ticket {prompt_group} is scored before one of {[*self.unscored]}")
        self._scored.add((prompt_group, sample))
        self.unscored.pop(prompt_group, None)

    def offer(self, prompt_group: int) -> None:
        """A group is scored, and may be taken."""
        self.offered.add(prompt_group)

    def take(self, prompt_group: PromptGroup) -> None:
        self.offered.discard(prompt_group.number)
        del self._ready[prompt_group.number]
        self.taken.append(prompt_group.number)

    def drop(self, prompt_group: PromptGroup, reason: Reason) -> None:
        self._end(prompt_group, reason)
        self.dropped.append((prompt_group.question, reason))
        self._replaced += reason is Reason.no_spread
        if self._replaced > self.script.max_replaced:
            raise self.breach(Property.replaced, f"{self._replaced} of {self.script.max_replaced}")
        self.offered.discard(prompt_group.number)
        for numbers in (self.unscored, self._ready):
            numbers.pop(prompt_group.number, None)
        if prompt_group.number in self.again:
            self.again.remove(prompt_group.number)

    def train(self, learner: str, prompt_group: int, sample: int, versions: Sequence[int]) -> None:
        """A learner is given a sample, with the versions of its trained tokens."""
        if not self.over:
            self._check_training(learner, prompt_group, sample, [self.version - version for version in versions])
        if learner == self._learning()[0]:
            self.lags.update(self.version - version for version in versions)
            self.mixed_groups += sample == 0 and len(set(versions)) > 1
        self._accumulated.add((learner, prompt_group, sample))
        self._updates[learner][-1].add(prompt_group)

    def update(self, learner: str) -> None:
        """A learner's optimiser steps."""
        updates = self._updates[learner]
        share, found = self.script.sizes[len(updates) - 1], len(updates[-1])
        if not self.over and found != share:
            raise self.breach(Property.step, f"an optimiser step of the {learner} on {found} groups of {share}")
        updates.append(set())

    def close(self) -> None:
        """The step under way is closed."""
        for learner in self._learning():
            trained = {prompt_group for name, prompt_group, _ in self._accumulated if name == learner}
            complete = len(self.taken) == self.script.groups_per_step and trained >= {*self.taken}
            if not self.over and not complete:
                raise self.breach(
                    Property.step, f"step {self.version} took {self.taken}, the {learner} trained {trained}"
                )
        for number in self.taken:
            self._end(self.prompt_groups[number], "trained")
            self.trained.append(self.prompt_groups[number].question)
        self.taken, self._replaced = [], 0
        self._updates = {name: [set()] for name in LEARNERS}
        self.version += 1

    def returned(self, groups: Sequence[Group]) -> None:
        """A step returns the groups that it trained."""
        uids = Counter(group.question.uid for group in groups)
        trained = Counter(question.uid for question in self.trained[-self.script.groups_per_step :])
        if uids != trained:
            raise self.breach(Property.step, f"{uids} were returned, {trained} trained")

    def most_admitted(self) -> int:
        """Derived in docs/pipeline.md: what may be admitted between two publications, and what was replaced."""
        replaced = sum(reason in (Reason.no_spread, Reason.lost) for _, reason in self.dropped)
        most, spare = self.script.most_outstanding, self.script.spare
        return (self.version + 1) * (most * (2 + spare) + spare) + replaced

    def leave(self, stage: str) -> None:
        """A group leaves the devices."""
        if not self.over and (stage in self._working or (stage == "rollout" and self.running)):
            raise self.breach(Property.sequence, f"{stage} leaves the devices while it works")

    def _end(self, prompt_group: PromptGroup, how: str) -> None:
        if prompt_group.number in self.ended:
            raise self.breach(
                Property.once, f"ticket {prompt_group.number} is {how} after {self.ended[prompt_group.number]}"
            )
        self.ended[prompt_group.number] = how
        self.open.remove(prompt_group.number)

    def _learning(self) -> tuple[str, ...]:
        """In the step under way."""
        return self.script.learning(self.version + 1)

    def _check_training(self, learner: str, prompt_group: int, sample: int, lags: Sequence[int]) -> None:
        if learner not in self._learning():
            raise self.breach(Property.step, f"the {learner} learns in step {self.version}")
        if self.ended.get(prompt_group, "trained") != "trained":
            raise self.breach(
                Property.dropped, f"ticket {prompt_group}, which was dropped as {self.ended[prompt_group]}"
            )
        if (learner, prompt_group, sample) in self._accumulated or prompt_group not in self.taken:
            raise self.breach(
                Property.once, f"sample {sample} of prompt_group {prompt_group} is trained again or was not taken"
            )
        if lags and not 0 <= min(lags) <= max(lags) <= self.script.max_staleness:
            broken = Property.staleness if self.script.max_staleness else Property.on_policy
            raise self.breach(broken, f"tokens of prompt_group {prompt_group} are {lags} versions old")

    def _check_sequence(self, stage: str) -> None:
        needed = {stage, "critic"} if stage == "inference" and self.script.critic else {stage}
        if not needed <= {*self.resident()}:
            raise self.breach(Property.sequence, f"{stage} begins, but {self.resident()} are on the devices")
        others = self._working - ({*LEARNERS} if stage in LEARNERS else {stage})
        if others:
            raise self.breach(Property.sequence, f"{stage} begins while {others} work")
        if stage == "rollout":
            return
        rolled = len(self.taken) + sum(
            self.prompt_groups[n].stage is Stage.ready for n in self.open if n not in self.taken
        )
        if self.running or self.rewarded_now or rolled != self.script.groups_per_step:
            raise self.breach(
                Property.sequence,
                f"{stage} begins while {self.running} groups roll, {self.rewarded_now} are rewarded, {rolled} are ready",
            )
        if stage in LEARNERS and self.unscored:
            raise self.breach(Property.sequence, f"training begins while {self.unscored} are not scored")


def _facts(begun: Sequence[EpisodeProgress]) -> list[tuple[type[EpisodeProgress], int, list[int]]]:
    """Facts that tell begun episodes apart."""
    return [(type(one), one.sample, one.versions.tolist()) for one in begun]


class _Watched(StalenessScheduler):
    """Writes down what is done."""

    record: Record

    def resume(self, state: SchedulerState) -> None:
        super().resume(state)
        self.record.resume(self.outstanding)

    def admit(self, question: Question) -> PromptGroup:
        prompt_group = super().admit(question)
        self.record.admit(prompt_group)
        return prompt_group

    def finish_rolling(self, prompt_group: PromptGroup, oldest: int | None, has_spread: bool) -> Reason | None:
        reason = super().finish_rolling(prompt_group, oldest, has_spread)
        if reason is None:
            self.record.ready(prompt_group)
        return reason

    def take(self, prompt_group: PromptGroup) -> None:
        super().take(prompt_group)
        self.record.take(prompt_group)

    def drop(self, prompt_group: PromptGroup, reason: Reason) -> None:
        super().drop(prompt_group, reason)
        self.record.drop(prompt_group, reason)

    def close_step(self) -> None:
        super().close_step()
        self.record.close()

    def publish(self, version: int) -> None:
        before = self.outstanding
        super().publish(version)
        if self.outstanding != before:
            raise self.record.breach(Property.update, f"{before} were outstanding, then {self.outstanding}")


@cache
def watched(scheduler: type[StalenessScheduler]) -> type[_Watched]:
    """`scheduler`, its calls written down in its `record`."""
    return type(f"Watched{scheduler.__name__}", (_Watched, scheduler), {})
