"""The ledger against a model that deals out places one by one, and against examples worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.errors import RunError
from rlsys.orchestrator.pipeline.ledger import Ended, Ledger, Reason, Stage, Ticket
from tests.pipeline.build import question


def fill(ledger: Ledger) -> list[Ticket]:
    """Admit all that may be admitted."""
    admitted = []
    while ledger.may_admit():
        admitted.append(ledger.admit(question(len(admitted))))
    return admitted


def finish(ledger: Ledger, *tickets: Ticket) -> None:
    for ticket in tickets:
        assert ledger.finish_rolling(ticket, None, has_spread=True) is None


def train(ledger: Ledger, *tickets: Ticket) -> None:
    """A whole step on `tickets`."""
    finish(ledger, *tickets)
    for ticket in tickets:
        ledger.take(ticket)
    ledger.close_step()


def test_on_policy_a_step_is_rolled_with_its_spares_and_no_further() -> None:
    ledger = Ledger(groups_per_step=4, max_staleness=0, oversample=1.5)
    tickets = fill(ledger)
    assert len(tickets) == 6
    finish(ledger, tickets[5])
    assert fill(ledger) == [], "three places are left, five tickets roll for them"
    ledger.drop(tickets[4], Reason.lost)
    assert len(fill(ledger)) == 1, "a lost group is replaced"
    finish(ledger, *tickets[:2])
    assert ledger.doomed() == []
    finish(ledger, tickets[2])
    assert {reason for _, reason in ledger.doomed()} == {Reason.surplus}
    assert [ticket.number for ticket, _ in ledger.doomed()] == [3, 6], "the two slowest of six"


def test_on_policy_nothing_is_rolled_until_the_engines_have_the_new_version() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=0)
    train(ledger, *fill(ledger))
    assert fill(ledger) == []
    ledger.publish(1)
    assert [ticket.oldest for ticket in fill(ledger)] == [1, 1]


def test_with_one_version_of_staleness_one_more_step_is_rolled_ahead() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=1, oversample=1.5)
    first = fill(ledger)
    assert len(first) == 5, "two steps of two, and one to spare"
    train(ledger, *first[:2])
    assert fill(ledger) == [], "the third step needs version 1, which no engine has"
    ledger.publish(1)
    assert len(fill(ledger)) == 2, "steps 1 and 2 have four places, five may roll for them, three do"
    assert ledger.doomed() == []
    train(ledger, *first[2:4])
    assert ledger.doomed() == [(first[4], Reason.stale)], "rolled by version 0, too old for step 2"


def test_with_two_versions_of_staleness_two_more_steps_are_rolled_ahead() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=2, oversample=1.5)
    first = fill(ledger)
    assert len(first) == 7
    train(ledger, *first[:2])
    train(ledger, *first[2:4])
    assert fill(ledger) == [], "versions 1 and 2 are late"
    ledger.publish(2)
    assert len(fill(ledger)) == 4, "steps 2 to 4 have six places, seven may roll, three do"


def test_a_ready_group_whose_last_place_is_taken_by_a_newer_one_is_dropped_at_once() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    first = fill(ledger)
    train(ledger, first[0])
    ledger.publish(1)
    newer = fill(ledger)[0]
    finish(ledger, newer, first[1])
    assert ledger.doomed() == []
    ledger.take(newer)
    assert ledger.doomed() == [(first[1], Reason.stale)]


def test_places_go_to_the_oldest_and_among_equals_to_those_that_were_ready_first() -> None:
    """Steps 1 and 2 have a place each. Two groups of version 1 have them; then one of version 0 is done."""
    ledger = Ledger(groups_per_step=1, max_staleness=1, oversample=2)
    first = fill(ledger)
    train(ledger, first[0])
    ledger.drop(first[2], Reason.lost)
    ledger.publish(1)
    newer = fill(ledger)
    assert [ticket.oldest for ticket in newer] == [1, 1]
    finish(ledger, newer[1], newer[0])
    assert ledger.doomed() == [], "the old one may still come"
    finish(ledger, first[1])
    assert ledger.doomed() == [(newer[0], Reason.surplus)]


def test_claims_are_those_of_who_was_ready_first_also_after_a_resume() -> None:
    """As above: two groups of version 1, of which the second was ready first, have the places that one of version 0 takes."""
    ledger = Ledger(groups_per_step=1, max_staleness=1, oversample=2)
    first = fill(ledger)
    train(ledger, first[0])
    ledger.drop(first[2], Reason.lost)
    ledger.publish(1)
    newer = fill(ledger)
    finish(ledger, newer[1], newer[0])
    resumed = Ledger(groups_per_step=1, max_staleness=1, oversample=2)
    resumed.resume(ledger.state())
    old, *_ = resumed.outstanding
    finish(resumed, old)
    assert [(ticket.number, reason) for ticket, reason in resumed.doomed()] == [(newer[0].number, Reason.surplus)]


def test_a_place_that_an_old_group_cannot_use_goes_to_a_newer_one() -> None:
    """Step 1 is taken by a newer group; step 2 is too late for the old one, not for the one that still rolls."""
    ledger = Ledger(groups_per_step=1, max_staleness=1, oversample=2)
    first = fill(ledger)
    train(ledger, first[0])
    ledger.drop(first[2], Reason.lost)
    ledger.publish(1)
    newer = fill(ledger)
    finish(ledger, first[1], newer[0])
    assert ledger.doomed() == [(newer[1], Reason.surplus)]
    ledger.take(newer[0])
    assert ledger.doomed() == [(first[1], Reason.stale)]


def test_near_the_end_only_what_can_be_trained_is_rolled() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=3, steps=2)
    first = fill(ledger)
    assert len(first) == 4
    train(ledger, *first[:2])
    ledger.publish(1)
    assert fill(ledger) == []
    train(ledger, *first[2:])
    ledger.publish(2)
    assert fill(ledger) == []


def test_groups_without_spread_are_replaced_up_to_a_limit_in_each_step() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0, max_replaced=2)
    for step in range(2):
        for _ in range(2):
            ticket = fill(ledger)[0]
            assert ledger.finish_rolling(ticket, step, has_spread=False) is Reason.no_spread
            ledger.drop(ticket, Reason.no_spread)
        ticket = fill(ledger)[0]
        assert ledger.finish_rolling(ticket, step, has_spread=False) is None
        ledger.take(ticket)
        ledger.close_step()
        ledger.publish(step + 1)
    assert ledger.dropped == {Reason.no_spread: 4}


@pytest.mark.parametrize(
    ("groups", "oversample", "spare"), [(4, 1.0, 0), (4, 1.25, 1), (3, 1.5, 2), (10, 1.1, 1), (110, 1.1, 11)]
)
def test_spares_are_rounded_up_from_what_was_written(groups: int, oversample: float, spare: int) -> None:
    assert Ledger(groups, 0, oversample).spare == spare


@pytest.mark.parametrize("wrong", [(0, 0), (1, -1), (1, 0, 0.9), (1, 0, 1, -1), (1, 0, 1, 0, 0)])
def test_an_impossible_ledger_is_refused(wrong: tuple) -> None:
    with pytest.raises(ValueError, match="A ledger needs"):
        Ledger(*wrong)


def test_what_must_not_be_done_raises() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    with pytest.raises(RuntimeError, match="lacks 1"):
        ledger.close_step()
    with pytest.raises(RuntimeError, match="Version 1 was published"):
        ledger.publish(1)
    ticket = fill(ledger)[0]
    with pytest.raises(RuntimeError, match="no place"):
        ledger.admit(question(1))
    with pytest.raises(RuntimeError, match="is rolling, not ready"):
        ledger.take(ticket)
    train(ledger, ticket)
    with pytest.raises(RuntimeError, match="is trained"):
        ledger.drop(ticket, Reason.end)


def test_a_stale_group_is_not_taken_even_if_nobody_has_dropped_it() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0, oversample=2)
    first, second = fill(ledger)
    finish(ledger, second)
    train(ledger, first)
    with pytest.raises(RuntimeError, match="older than the 0 versions"):
        ledger.take(second)


def test_an_engine_that_still_has_old_weights_ends_the_run() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    train(ledger, fill(ledger)[0])
    ledger.publish(1)
    with pytest.raises(RunError, match="question q:0 with version 0 of the policy"):
        ledger.finish_rolling(fill(ledger)[0], 0, has_spread=True)


@dataclass(eq=False)
class Modelled:
    """A ticket in the model."""

    real: Ticket
    oldest: int
    ready: int | None = None
    """When it became ready."""


class LedgerMachine(RuleBasedStateMachine):
    """Any calls in any order. The model knows steps with places, and deals them out one by one."""

    @initialize(
        groups=st.integers(1, 4),
        staleness=st.integers(0, 3),
        spare=st.integers(0, 4),
        replaced=st.integers(0, 2),
        steps=st.none() | st.integers(1, 5),
    )
    def begin(self, groups: int, staleness: int, spare: int, replaced: int, steps: int | None) -> None:
        self.groups, self.staleness, self.spare, self.most_replaced = groups, staleness, spare, replaced
        self.steps = steps
        self.ledger = self.new_ledger()
        self.ended: list[Ended] = []
        self.version = self.published = self.replaced = self.clock = 0
        self.open: list[Modelled] = []
        self.taken: list[Modelled] = []
        self.dropped: Counter[Reason] = Counter()

    def new_ledger(self) -> Ledger:
        return Ledger(self.groups, self.staleness, 1 + self.spare / self.groups, self.most_replaced, self.steps)

    def free(self) -> Counter[int]:
        """Step -> its free places, far ahead."""
        end = self.version + 20 if self.steps is None else self.steps
        free = Counter(dict.fromkeys(range(self.version, end), self.groups))
        free[self.version] -= len(self.taken)
        return +free

    def last(self, oldest: int) -> int:
        """The last step that may train a group of that age."""
        return oldest + self.staleness

    def doomed(self) -> dict[Ticket, Reason]:
        """Give each ready group the first free place, the oldest first; see for whom none is left."""
        free, found = self.free(), {}
        reasons = {
            one: Reason.surplus if any(step <= self.last(one.oldest) for step in free) else Reason.stale
            for one in self.open
        }
        ages = sorted({one.oldest for one in self.open})
        for age in ages:
            of_age = [one for one in self.open if one.oldest == age]
            ready = sorted((one for one in of_age if one.ready is not None), key=lambda one: one.ready)
            for one in [*ready, *(one for one in of_age if one.ready is None)]:
                step = next((step for step in sorted(+free) if step <= self.last(age)), None)
                if step is None:
                    found[one.real] = reasons[one]
                elif one.ready is not None:
                    free[step] -= 1
        return found

    def free_for_new(self) -> int:
        """Places for groups of the published version, once every ready group has the first free one."""
        free = sorted(self.free().elements())
        return len([step for step in free[len(self.of(ready=True)) :] if step <= self.last(self.published)])

    def of(self, *, ready: bool) -> list[Modelled]:
        return [one for one in self.open if (one.ready is not None) == ready]

    def forget(self, one: Modelled, reason: Reason) -> None:
        self.ledger.drop(one.real, reason)
        self.ended.append(Ended(one.real.number, one.real.question.uid, reason))
        (self.taken if one in self.taken else self.open).remove(one)
        self.dropped[reason] += 1
        self.replaced += reason is Reason.no_spread

    @precondition(lambda self: self.ledger.may_admit())
    @rule(most=st.integers(1, 20))
    def admit(self, most: int) -> None:
        for number in range(most):
            if self.ledger.may_admit():
                self.open.append(Modelled(self.ledger.admit(question(number)), self.published))

    @precondition(lambda self: self.of(ready=False))
    @rule(number=st.integers(0, 99), newer=st.none() | st.integers(0, 2), has_spread=st.booleans())
    def finish(self, number: int, newer: int | None, has_spread: bool) -> None:
        one = self.of(ready=False)[number % len(self.of(ready=False))]
        oldest = one.oldest if newer is None else min(one.oldest + newer, self.version)
        replaced = not has_spread and self.replaced < self.most_replaced
        reason = self.ledger.finish_rolling(one.real, None if newer is None else oldest, has_spread)
        assert reason is (Reason.no_spread if replaced else None)
        if reason is None:
            self.clock += 1
            one.oldest, one.ready = oldest, self.clock
        else:
            self.forget(one, reason)

    @rule()
    def drop_the_doomed(self) -> None:
        doomed = self.ledger.doomed()
        assert dict(doomed) == self.doomed()
        assert len(dict(doomed)) == len(doomed)
        for one in [one for one in self.open if one.real in dict(doomed)]:
            self.forget(one, dict(doomed)[one.real])
        assert self.ledger.doomed() == []

    @precondition(lambda self: self.of(ready=True))
    @rule(number=st.integers(0, 99))
    def take(self, number: int) -> None:
        one = self.of(ready=True)[number % len(self.of(ready=True))]
        if len(self.taken) == self.groups or self.last(one.oldest) < self.version:
            with pytest.raises(RuntimeError):
                self.ledger.take(one.real)
        else:
            self.ledger.take(one.real)
            self.open.remove(one)
            self.taken.append(one)

    @precondition(lambda self: self.open or self.taken)
    @rule(number=st.integers(0, 99), reason=st.sampled_from([Reason.lost, Reason.end]))
    def lose(self, number: int, reason: Reason) -> None:
        held = self.open + self.taken
        self.forget(held[number % len(held)], reason)

    @precondition(lambda self: len(self.taken) == self.groups)
    @rule()
    def close(self) -> None:
        self.ledger.close_step()
        assert {one.real.stage for one in self.taken} == {Stage.trained}
        self.ended += [Ended(one.real.number, one.real.question.uid, Stage.trained) for one in self.taken]
        self.taken, self.replaced = [], 0
        self.version += 1

    @precondition(lambda self: self.published < self.version)
    @rule(late=st.integers(0, 2))
    def publish(self, late: int) -> None:
        self.published = max(self.published + 1, self.version - late)
        self.ledger.publish(self.published)

    @rule()
    def tell_of_the_ends(self) -> None:
        assert self.ledger.ended() == self.ended
        self.ended = []

    @precondition(lambda self: self.taken)
    @rule()
    def refuse_to_save(self) -> None:
        with pytest.raises(RuntimeError, match=f"had taken {len(self.taken)} groups"):
            self.ledger.state()

    @precondition(lambda self: not self.taken)
    @rule()
    def save_and_resume(self) -> None:
        """Another ledger in its place, of the same state, decides the same from here on."""
        self.tell_of_the_ends()
        state = self.ledger.state()
        self.ledger = self.new_ledger()
        self.ledger.resume(state)
        assert self.ledger.state() == state
        tickets = {ticket.number: ticket for ticket in self.ledger.outstanding}
        assert len(tickets) == len(self.open)
        for one in self.open:
            before, one.real = one.real, tickets[one.real.number]
            assert (one.real.question, one.real.oldest, one.real.stage) == (
                before.question,
                one.oldest,
                before.stage,
            )

    @invariant()
    def books_agree(self) -> None:
        held = sorted([one.real for one in self.open + self.taken], key=lambda ticket: ticket.number)
        assert self.ledger.outstanding == held
        assert self.ledger.outstanding_count == len(held)
        assert len(held) <= (self.staleness + 1) * self.groups + self.spare
        assert self.ledger.lacking == self.groups - len(self.taken)
        assert (self.ledger.version, self.ledger.published) == (self.version, self.published)
        assert self.ledger.dropped == self.dropped

    @invariant()
    def admission_agrees_once_the_doomed_are_gone(self) -> None:
        if not self.doomed():
            free = self.free_for_new()
            may_admit = free > 0 and len(self.of(ready=False)) < free + self.spare
            assert self.ledger.may_admit() == may_admit


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
test_any_calls_in_any_order = LedgerMachine.TestCase
