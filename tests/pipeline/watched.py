"""What is held against a simulated run, while it runs: the properties, and the record that they are read from.

The record is kept apart from the ledger's own books: it sees tickets come and go, and what workers are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from enum import StrEnum
from functools import cache

from rlsys.data.group import Group
from rlsys.data.question import Question
from rlsys.orchestrator.pipeline.ledger import Ledger, LedgerState, Reason, Stage, Ticket
from rlsys.rollout.agent.begun import Begun
from tests.pipeline.script import Script

LEARNERS = ("actor", "critic")
GROUPS = ("rollout", "inference", *LEARNERS)


class Property(StrEnum):
    """What must hold of every run."""

    deadlock = "something is always under way"
    livelock = "the run ends after boundedly many admissions"
    waiting = "no stage waits while there is work for it"
    doomed = "what can no longer be trained is dropped at once"
    once = "every ticket is trained once or dropped once, and scored at most once"
    conserved = "every prompt is trained, dropped for good or back in the source"
    staleness = "no trained token is staler than allowed"
    on_policy = "without staleness every token is sampled by the version that is trained"
    step = "every learner trains exactly the step's groups, in every optimiser step its share"
    outstanding = "never more tickets are outstanding than allowed"
    dropped = "nothing of a dropped ticket is scored or trained"
    update = "a policy update loses no ticket and, if episodes finish first, splits no group"
    sequence = "in sequence, scoring waits for the last reward of the step, training for the last score"
    own = "every sample is trained with scores and weights of its own"
    order = "groups are scored in the order in which they became ready"
    replaced = "no more groups without spread are replaced in a step than allowed"
    resumed = "a resumed run goes on with every ticket from what was begun of it, before it begins others"


class Breach(Exception):
    """A property does not hold."""

    def __init__(self, broken: Property, detail: str) -> None:
        super().__init__(f"{broken.name}: not {broken}: {detail}")
        self.broken = broken


class Failure(Exception):
    """A scripted worker's failure."""


class Record:
    """What happened so far."""

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
        self.tickets: dict[int, Ticket] = {}
        self.open: set[int] = set()
        self.taken: list[int] = []
        """By the step under way."""
        self.trained: list[Question] = []
        """In steps that were closed."""
        self.dropped: list[tuple[Question, Reason]] = []
        self.begun: dict[int, tuple[Begun, ...]] = {}
        """Ticket -> what a run that is resumed now has to go on from; all episodes once they are done."""
        self._all_done: set[int] = set()
        self.again: list[int] = []
        """Tickets that rolled when the run was saved; those that have been begun again have `gone_on`."""
        self.gone_on: set[int] = set()
        self.unscored: dict[int, None] = {}
        """In the order in which they became ready."""
        self.offered: set[int] = set()
        """Scored, and not taken or dropped yet."""
        self.states: dict[str, str] = {}
        self.resident: Callable[[], Collection[str]] = lambda: GROUPS
        """Groups that are on the devices."""
        self.over = False
        """The flow has ended; what goes on elsewhere no longer counts."""
        self.broken: Breach | None = None
        """The first."""
        self.ended: dict[int, str] = {}
        """Ticket -> `trained`, or why it was dropped; in this order."""
        self._ready: dict[int, None] = {}
        """Of them, those that are open, scored or not."""
        self._replaced = 0
        """In the step under way."""
        self._scored: set[tuple[int, int]] = set()
        self._accumulated: set[tuple[str, int, int]] = set()
        """(learner, ticket, sample)"""
        self._updates: dict[str, list[set[int]]] = {name: [set()] for name in LEARNERS}
        self._working: set[str] = set()
        self._worker_calls: Counter[str] = Counter()

    def breach(self, broken: Property, detail: str) -> Breach:
        """To be raised. What follows from the first is no breach of its own."""
        self.over = True
        self.broken = self.broken or Breach(broken, detail)
        return self.broken

    def say(self, group: str) -> Callable[[str], None]:
        """Notes what a stage says of itself."""

        def note(text: str) -> None:
            self.states[group] = text

        return note

    def fail_if_due(self, worker: str) -> None:
        """Raise the failure that the script has for this call."""
        self._worker_calls[worker] += 1
        if self.script.fails == (worker, self._worker_calls[worker]):
            self.over = True
            raise Failure(worker)

    def resumed(self) -> Record:
        """What a run has seen that goes on from here."""
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

    def resume(self, tickets: Sequence[Ticket]) -> None:
        """The ledger has these tickets again."""
        if {ticket.number for ticket in tickets} != self.open:
            raise self.breach(Property.resumed, f"{tickets} instead of {self.open}")
        self.tickets.update((ticket.number, ticket) for ticket in tickets)

    def begin_group(self, ticket: int, begun: Sequence[Begun]) -> None:
        """A ticket's group is asked for, with what was begun of it."""
        if self.again and ticket != self.again[0]:
            raise self.breach(Property.resumed, f"ticket {ticket} begins before {self.again}")
        if _facts(begun) != _facts(self.begun.get(ticket, ())):
            raise self.breach(Property.resumed, f"ticket {ticket} goes on from {begun}")
        if self.again:
            self.gone_on.add(self.again.pop(0))
        self.running += 1
        self.begin("rollout")

    def tell(self, begun: Mapping[int, tuple[Begun, ...]]) -> None:
        """An engine says what is begun on it. A group may run on there after another engine has answered."""
        self.begun |= {ticket: found for ticket, found in begun.items() if ticket not in self._all_done}

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

    def admit(self, ticket: Ticket) -> None:
        if ticket.number in self.tickets:
            raise self.breach(Property.once, f"there are two tickets {ticket.number}")
        self.tickets[ticket.number] = ticket
        self.open.add(ticket.number)
        if len(self.open) > self.script.most_outstanding:
            raise self.breach(Property.outstanding, f"{len(self.open)} of {self.script.most_outstanding}")
        if len(self.tickets) > self.most_admitted():
            raise self.breach(Property.livelock, f"{len(self.tickets)} tickets")

    @contextmanager
    def rewarding(self, ticket: int, episodes: Sequence[Begun]) -> Iterator[None]:
        """All episodes of the ticket are done; they are being rewarded."""
        self.begun[ticket] = tuple(episodes)
        self._all_done.add(ticket)
        self.rewarded_now += 1
        try:
            yield
        finally:
            self.rewarded_now -= 1

    def ready(self, ticket: Ticket) -> None:
        self._ready[ticket.number] = self.unscored[ticket.number] = None

    def ask(self, ticket: int, sample: int) -> None:
        """The scorer is given a sample."""
        if ticket in self.ended:
            raise self.breach(Property.dropped, f"ticket {ticket} is scored")
        if (ticket, sample) in self._scored:
            raise self.breach(Property.once, f"sample {sample} of ticket {ticket} is scored again")
        if ticket in self.unscored and ticket != next(iter(self.unscored)):
            raise self.breach(Property.order, f"ticket {ticket} is scored before one of {[*self.unscored]}")
        self._scored.add((ticket, sample))
        self.unscored.pop(ticket, None)

    def offer(self, ticket: int) -> None:
        """A group is scored, and may be taken."""
        self.offered.add(ticket)

    def take(self, ticket: Ticket) -> None:
        self.offered.discard(ticket.number)
        del self._ready[ticket.number]
        self.taken.append(ticket.number)

    def drop(self, ticket: Ticket, reason: Reason) -> None:
        self._end(ticket, reason)
        self.dropped.append((ticket.question, reason))
        self._replaced += reason is Reason.no_spread
        if self._replaced > self.script.max_replaced:
            raise self.breach(Property.replaced, f"{self._replaced} of {self.script.max_replaced}")
        self.offered.discard(ticket.number)
        for numbers in (self.unscored, self._ready):
            numbers.pop(ticket.number, None)
        if ticket.number in self.again:
            self.again.remove(ticket.number)

    def train(self, learner: str, ticket: int, sample: int, versions: Sequence[int]) -> None:
        """A learner is given a sample, with the versions of its trained tokens."""
        if not self.over:
            self._check_training(learner, ticket, sample, [self.version - version for version in versions])
        if learner == self._learning()[0]:
            self.lags.update(self.version - version for version in versions)
            self.mixed_groups += sample == 0 and len(set(versions)) > 1
        self._accumulated.add((learner, ticket, sample))
        self._updates[learner][-1].add(ticket)

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
            trained = {ticket for name, ticket, _ in self._accumulated if name == learner}
            complete = len(self.taken) == self.script.groups_per_step and trained >= {*self.taken}
            if not self.over and not complete:
                raise self.breach(
                    Property.step, f"step {self.version} took {self.taken}, the {learner} trained {trained}"
                )
        for number in self.taken:
            self._end(self.tickets[number], "trained")
            self.trained.append(self.tickets[number].question)
        self.taken, self._replaced = [], 0
        self._updates = {name: [set()] for name in LEARNERS}
        self.version += 1

    def returned(self, groups: Sequence[Group]) -> None:
        """What a step returns is what it trained."""
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

    def _end(self, ticket: Ticket, how: str) -> None:
        if ticket.number in self.ended:
            raise self.breach(Property.once, f"ticket {ticket.number} is {how} after {self.ended[ticket.number]}")
        self.ended[ticket.number] = how
        self.open.remove(ticket.number)

    def _learning(self) -> tuple[str, ...]:
        """In the step under way."""
        return self.script.learning(self.version + 1)

    def _check_training(self, learner: str, ticket: int, sample: int, lags: Sequence[int]) -> None:
        if learner not in self._learning():
            raise self.breach(Property.step, f"the {learner} learns in step {self.version}")
        if self.ended.get(ticket, "trained") != "trained":
            raise self.breach(Property.dropped, f"ticket {ticket}, which was dropped as {self.ended[ticket]}")
        if (learner, ticket, sample) in self._accumulated or ticket not in self.taken:
            raise self.breach(Property.once, f"sample {sample} of ticket {ticket} is trained again or was not taken")
        if lags and not 0 <= min(lags) <= max(lags) <= self.script.max_staleness:
            broken = Property.staleness if self.script.max_staleness else Property.on_policy
            raise self.breach(broken, f"tokens of ticket {ticket} are {lags} versions old")

    def _check_sequence(self, stage: str) -> None:
        needed = {stage, "critic"} if stage == "inference" and self.script.critic else {stage}
        if not needed <= {*self.resident()}:
            raise self.breach(Property.sequence, f"{stage} begins, but {self.resident()} are on the devices")
        others = self._working - ({*LEARNERS} if stage in LEARNERS else {stage})
        if others:
            raise self.breach(Property.sequence, f"{stage} begins while {others} work")
        if stage == "rollout":
            return
        rolled = len(self.taken) + sum(self.tickets[n].stage is Stage.ready for n in self.open if n not in self.taken)
        if self.running or self.rewarded_now or rolled != self.script.groups_per_step:
            raise self.breach(
                Property.sequence,
                f"{stage} begins while {self.running} groups roll, {self.rewarded_now} are rewarded, {rolled} are ready",
            )
        if stage in LEARNERS and self.unscored:
            raise self.breach(Property.sequence, f"training begins while {self.unscored} are not scored")


def _facts(begun: Sequence[Begun]) -> list[tuple[type[Begun], int, list[int]]]:
    """What tells begun episodes apart."""
    return [(type(one), one.sample, one.versions.tolist()) for one in begun]


class _Watched(Ledger):
    """Writes down what is done."""

    record: Record

    def resume(self, state: LedgerState) -> None:
        super().resume(state)
        self.record.resume(self.outstanding)

    def admit(self, question: Question) -> Ticket:
        ticket = super().admit(question)
        self.record.admit(ticket)
        return ticket

    def finish_rolling(self, ticket: Ticket, oldest: int | None, has_spread: bool) -> Reason | None:
        reason = super().finish_rolling(ticket, oldest, has_spread)
        if reason is None:
            self.record.ready(ticket)
        return reason

    def take(self, ticket: Ticket) -> None:
        super().take(ticket)
        self.record.take(ticket)

    def drop(self, ticket: Ticket, reason: Reason) -> None:
        super().drop(ticket, reason)
        self.record.drop(ticket, reason)

    def close_step(self) -> None:
        super().close_step()
        self.record.close()

    def publish(self, version: int) -> None:
        before = self.outstanding
        super().publish(version)
        if self.outstanding != before:
            raise self.record.breach(Property.update, f"{before} were outstanding, then {self.outstanding}")


@cache
def watched(ledger: type[Ledger]) -> type[_Watched]:
    """`ledger`, its calls written down in its `record`."""
    return type(f"Watched{ledger.__name__}", (_Watched, ledger), {})
