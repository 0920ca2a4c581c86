"""Bugs planted on purpose, one for each property that a simulated run must have: the checks see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlsys.data.group import Group, Sample, Scores
from rlsys.data.prompt_source import PromptSource, SourceState
from rlsys.data.question import Question
from rlsys.orchestrator.pipeline.flow import Bites, Flow, FlowState
from rlsys.orchestrator.pipeline.ledger import Ledger, LedgerState, Reason, Stage, Ticket
from rlsys.orchestrator.pipeline.workers import Say, silent
from rlsys.rollout.agent.begun import Begun
from tests.pipeline.simulation import Parts
from tests.pipeline.watched import Property


class LosesGroup(Flow):
    """A group is lost: the last of a bite of several is not scored."""

    async def _score(self, bite: Sequence[tuple[Ticket, Group]]) -> None:
        await super()._score(bite[:1])


class OffByOne(Ledger):
    """Staleness is off by one: a group counts as a version younger than it is."""

    def finish_rolling(self, ticket: Ticket, oldest: int | None, has_spread: bool) -> Reason | None:
        return super().finish_rolling(ticket, None if oldest is None else oldest + 1, has_spread)


class TrainsTwice(Flow):
    """A group is trained twice: the first of an earlier step in the place of another."""

    kept: Group | None = None

    async def take(self, most: int, say: Say = silent) -> list[Group]:
        groups = await super().take(most, say)
        if self.ledger.version:
            assert self.kept is not None
            return [self.kept, *groups[1:]]
        self.kept = self.kept or groups[0]
        return groups


class TellsNobody(Flow):
    """Who waits for a new version is not woken."""

    def publish(self, version: int) -> None:
        self.ledger.publish(version)


class KeepsDoomed(Flow):
    """Takes groups without a look at what has lost its place thereby."""

    async def take(self, most: int, say: Say = silent) -> list[Group]:
        self._sweep, sweep = self._changed.set, self._sweep
        try:
            return await super().take(most, say)
        finally:
            self._sweep = sweep


class Churns(Ledger):
    """Every group that becomes ready ends all that still roll, and room for them is made again."""

    def doomed(self) -> list[tuple[Ticket, Reason]]:
        rolling = [ticket for ticket in self.outstanding if ticket.stage is Stage.rolling]
        return super().doomed() or [(ticket, Reason.surplus) for ticket in rolling[1:]]


class KeepsPrompts(Flow):
    """Prompts of groups that are too old are not given back."""

    def _drop(self, ticket: Ticket, reason: Reason) -> None:
        super()._drop(ticket, reason)
        if reason is Reason.stale:
            self._prompts._given_back.pop()


class RollsTooEarly(Ledger):
    """Admits for a version that no engine has yet, and believes that the group is of that version."""

    def may_admit(self) -> bool:
        published, self.published = self.published, self.version
        try:
            return super().may_admit()
        finally:
            self.published = published

    def admit(self, question: Question) -> Ticket:
        ticket = Ticket(self._admitted, question, self.version)
        self._admitted += 1
        self._rolling.add(ticket)
        return ticket

    def finish_rolling(self, ticket: Ticket, _: int | None, has_spread: bool) -> Reason | None:
        return super().finish_rolling(ticket, None, has_spread)


class TakesTooMany(Flow):
    """A mini-batch takes a group of the next."""

    async def take(self, most: int, say: Say = silent) -> list[Group]:
        return await super().take(min(most + 1, self.ledger.lacking), say)


class Boundless(Ledger):
    """Admits a ticket more than it may."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spare += 1


class Undead(Ledger):
    """A group that was dropped while it rolled is welcome when it comes in all the same."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.undead: set[Ticket] = set()

    def drop(self, ticket: Ticket, reason: Reason) -> None:
        rolled = ticket.stage is Stage.rolling
        super().drop(ticket, reason)
        if rolled and reason is Reason.surplus:
            ticket.stage = Stage.rolling
            self.undead.add(ticket)

    def finish_rolling(self, ticket: Ticket, oldest: int | None, has_spread: bool) -> Reason | None:
        if ticket in self.undead:
            self._rolling.add(ticket)
        return super().finish_rolling(ticket, oldest, has_spread)

    def take(self, ticket: Ticket) -> None:
        if ticket in self.undead:
            self._ready.remove(ticket)
            ticket.oldest = self.version
            self._ready.add(ticket)
        super().take(ticket)

    def doomed(self) -> list[tuple[Ticket, Reason]]:
        return [(ticket, reason) for ticket, reason in super().doomed() if ticket not in self.undead]


class ForgetsAtUpdate(Ledger):
    """A new version makes it forget a group that rolls."""

    def publish(self, version: int) -> None:
        super().publish(version)
        for ticket in self._rolling.tickets()[:1]:
            self._rolling.remove(ticket)


class ScoresTooEarly(Flow):
    """Scores what is there, also where stages must not overlap."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bites = Bites(1, self._bites.most)


class ScoresUnrewarded(Flow):
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


class KeepsRoom(Flow):
    """The engines have no room for another group while one is rewarded."""

    def _may_roll(self) -> bool:
        rewarding, self._rewarding = self._rewarding, set()
        try:
            return super()._may_roll()
        finally:
            self._rewarding = rewarding


class MixesUp(Flow):
    """Scores come back in the wrong order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        scorer = self._scorer

        async def reversed_compute(samples: Sequence[Sample]) -> list[Scores]:
            return (await scorer.compute(samples))[::-1]

        self._scorer = SimpleNamespace(groups=scorer.groups, compute=reversed_compute)


PLANTED: Sequence[tuple[Property, Parts]] = [
    (Property.deadlock, Parts(flow=LosesGroup)),
    (Property.livelock, Parts(ledger=Churns)),
    (Property.waiting, Parts(flow=TellsNobody)),
    (Property.waiting, Parts(flow=KeepsRoom)),
    (Property.doomed, Parts(flow=KeepsDoomed)),
    (Property.once, Parts(flow=TrainsTwice)),
    (Property.conserved, Parts(flow=KeepsPrompts)),
    (Property.staleness, Parts(ledger=OffByOne)),
    (Property.on_policy, Parts(ledger=RollsTooEarly)),
    (Property.step, Parts(flow=TakesTooMany)),
    (Property.outstanding, Parts(ledger=Boundless)),
    (Property.dropped, Parts(ledger=Undead)),
    (Property.update, Parts(ledger=ForgetsAtUpdate)),
    (Property.sequence, Parts(flow=ScoresTooEarly)),
    (Property.sequence, Parts(flow=ScoresUnrewarded)),
    (Property.own, Parts(flow=MixesUp)),
]
"""The property that each must be seen to break."""


class RestartsNumbers(Ledger):
    """Tickets are numbered from nought in each life."""

    def resume(self, state: LedgerState) -> None:
        super().resume(replace(state, admitted=0))


class ForgetsReplaced(Ledger):
    """As many groups as in a whole step may be replaced once more."""

    def resume(self, state: LedgerState) -> None:
        super().resume(replace(state, replaced=0))


class ForgetsTickets(Ledger):
    """Tickets that roll are not in the books any more."""

    def resume(self, state: LedgerState) -> None:
        super().resume(replace(state, rolling=()))


class BeginsNoneAgain(Flow):
    """Tickets that roll are in the books, and nothing is done about them."""

    def _resume(self, state: FlowState) -> None:
        super()._resume(state)
        self._again.clear()


class BeginsLastFirst(Flow):
    """The newest ticket is begun first."""

    def _resume(self, state: FlowState) -> None:
        super()._resume(state)
        for ticket in reversed([*self._again]):
            self._again.move_to_end(ticket)


class BeginsAnew(Flow):
    """What was begun is thrown away."""

    def _resume(self, state: FlowState) -> None:
        super()._resume(replace(state, begun={}))


class BelievesOldNews(Flow):
    """Of groups that are rewarded, saves what the engines had said of them before."""

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        self._rewarding, rewarding = {}, self._rewarding
        try:
            return super().state(begun)
        finally:
            self._rewarding = rewarding


class ForgetsWhatWaits(Flow):
    """Of a ticket that has not been begun again yet, what was begun in the life before last is forgotten."""

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        self._again, again = type(self._again).fromkeys(self._again, ()), self._again
        try:
            return super().state(begun)
        finally:
            self._again = again


class ForgetsWhatIsAsked(Flow):
    """And so it is of one that was handed to the engines, of which none has begun it yet."""

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        self._begun, known = {}, self._begun
        try:
            return super().state(begun)
        finally:
            self._begun = known


class LosesScored(Flow):
    """Groups that might be taken are not saved."""

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        return replace(super().state(begun), scored={})


class LosesRolled(Flow):
    """Groups that wait for their scores are not saved."""

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        return replace(super().state(begun), rolled={})


class LosesBite(Flow):
    """Groups that are being scored are not saved."""

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        self._scoring, scoring = (), self._scoring
        try:
            return super().state(begun)
        finally:
            self._scoring = scoring


class ScoresLastFirst(Flow):
    """Groups that wait for their scores come back in the wrong order."""

    def _resume(self, state: FlowState) -> None:
        super()._resume(replace(state, rolled=dict(reversed(state.rolled.items()))))


class ForgetsLosses(Flow):
    """Questions that have killed engines may kill as many again."""

    def _resume(self, state: FlowState) -> None:
        super()._resume(replace(state, losses={}))


class ForgetsGivenBack(PromptSource):
    """Questions that wait to be asked again are forgotten."""

    def __init__(self, questions: Sequence[Question], seed: int, state: SourceState | None) -> None:
        super().__init__(questions, seed, state and replace(state, given_back=()))


class AsksFromTheStart(PromptSource):
    """The first epoch begins again."""

    def __init__(self, questions: Sequence[Question], seed: int, state: SourceState | None) -> None:
        super().__init__(questions, seed, state and replace(state, position=0))


PLANTED_IN_RESUMING: Sequence[tuple[Property, Parts]] = [
    (Property.once, Parts(ledger=RestartsNumbers)),
    (Property.replaced, Parts(ledger=ForgetsReplaced)),
    (Property.resumed, Parts(ledger=ForgetsTickets)),
    (Property.waiting, Parts(flow=BeginsNoneAgain)),
    (Property.resumed, Parts(flow=BeginsLastFirst)),
    (Property.resumed, Parts(flow=BeginsAnew)),
    (Property.resumed, Parts(flow=BelievesOldNews)),
    (Property.resumed, Parts(flow=ForgetsWhatWaits)),
    (Property.resumed, Parts(flow=ForgetsWhatIsAsked)),
    (Property.deadlock, Parts(flow=LosesScored)),
    (Property.deadlock, Parts(flow=LosesRolled)),
    (Property.deadlock, Parts(flow=LosesBite)),
    (Property.order, Parts(flow=ScoresLastFirst)),
    (Property.conserved, Parts(flow=ForgetsLosses)),
    (Property.conserved, Parts(prompts=ForgetsGivenBack)),
    (Property.conserved, Parts(prompts=AsksFromTheStart)),
]
"""The property that each must be seen to break in a run that is killed and resumed."""
