"""Tests of the staleness scheduler against a model that gives out places in steps one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.errors import RunError
from rlsys.orchestrator.pipeline.scheduler import DropReason, GroupOutcome, GroupStage, PromptGroup, StalenessScheduler
from tests.support.trajectories import question


@pytest.mark.parametrize(
    ("groups", "oversample", "spare"), [(4, 1.0, 0), (4, 1.25, 1), (3, 1.5, 2), (10, 1.1, 1), (110, 1.1, 11)]
)
def test_spare_groups_are_rounded_up_from_the_exact_decimal(groups: int, oversample: float, spare: int) -> None:
    assert StalenessScheduler(groups, 0, oversample).spare == spare


@dataclass(eq=False)
class ModelGroup:
    """A prompt group in the model."""

    real: PromptGroup
    oldest: int
    ready: int | None = None
    """Rank in the order in which groups became ready; None while the group is still rolling."""
    since: int | None = None
    """Version of the actor when the group became ready."""


class SchedulerMachine(RuleBasedStateMachine):
    """Random calls in random order. The model knows the free places of each step and gives them out one by one."""

    @initialize(
        groups=st.integers(1, 4),
        staleness=st.integers(0, 3),
        spare=st.integers(0, 4),
        replaced=st.integers(0, 2),
        steps=st.none() | st.integers(1, 5),
        wait=st.none() | st.integers(0, 3),
    )
    def begin(
        self, groups: int, staleness: int, spare: int, replaced: int, steps: int | None, wait: int | None
    ) -> None:
        self.groups, self.staleness, self.spare, self.most_replaced = groups, staleness, spare, replaced
        self.steps, self.wait = steps, wait
        self.scheduler = self.new_scheduler()
        self.ended: list[GroupOutcome] = []
        self.version = self.published = self.replaced = self.clock = 0
        self.open: list[ModelGroup] = []
        self.taken: list[ModelGroup] = []
        self.dropped: Counter[DropReason] = Counter()

    def new_scheduler(self) -> StalenessScheduler:
        return StalenessScheduler(
            self.groups, self.staleness, 1 + self.spare / self.groups, self.most_replaced, self.steps, self.wait
        )

    def free(self) -> Counter[int]:
        """Return the number of free places in each of the next 20 steps."""
        end = self.version + 20 if self.steps is None else self.steps
        free = Counter(dict.fromkeys(range(self.version, end), self.groups))
        free[self.version] -= len(self.taken)
        return +free

    def last(self, oldest: int, since: int | None) -> int:
        """Return the last step that may train a group with this oldest token that is ready since version `since`."""
        steps = [step for step in range(30) if step - oldest <= self.staleness]
        return max(step for step in steps if since is None or self.wait is None or step - since <= self.wait)

    def unschedulable(self) -> dict[PromptGroup, DropReason]:
        """Give each ready group the first free place, in the order of last steps; return the groups that get none."""
        free, found = self.free(), {}
        last = {one: self.last(one.oldest, one.since) for one in self.open}
        reasons = {
            one: DropReason.surplus if any(step <= last[one] for step in free) else DropReason.stale
            for one in self.open
        }
        for end in sorted({*last.values()}):
            of_step = [one for one in self.open if last[one] == end]
            ready = sorted((one for one in of_step if one.ready is not None), key=lambda one: one.ready)
            for one in [*ready, *(one for one in of_step if one.ready is None)]:
                step = next((step for step in sorted(+free) if step <= end), None)
                if step is None:
                    found[one.real] = reasons[one]
                elif one.ready is not None:
                    free[step] -= 1
        return found

    def free_for_new(self) -> int:
        """Return the number of free places that new groups may use once every ready group has a place."""
        free = sorted(self.free().elements())
        last = self.last(self.published, self.version)
        return len([step for step in free[len(self.of(ready=True)) :] if step <= last])

    def of(self, *, ready: bool) -> list[ModelGroup]:
        return [one for one in self.open if (one.ready is not None) == ready]

    def forget(self, one: ModelGroup, reason: DropReason) -> None:
        self.scheduler.drop(one.real, reason)
        self.ended.append(GroupOutcome(one.real.number, one.real.question.uid, reason))
        (self.taken if one in self.taken else self.open).remove(one)
        self.dropped[reason] += 1
        self.replaced += reason is DropReason.no_spread

    @precondition(lambda self: self.scheduler.may_admit())
    @rule(most=st.integers(1, 20))
    def admit(self, most: int) -> None:
        for number in range(most):
            if self.scheduler.may_admit():
                self.open.append(ModelGroup(self.scheduler.admit(question(number)), self.published))

    @precondition(lambda self: self.of(ready=False))
    @rule(number=st.integers(0, 99), newer=st.none() | st.integers(-1, 2), has_spread=st.booleans())
    def finish(self, number: int, newer: int | None, has_spread: bool) -> None:
        one = self.of(ready=False)[number % len(self.of(ready=False))]
        if newer == -1:
            with pytest.raises(RunError, match=one.real.question.uid):
                self.scheduler.finish_rolling(one.real, one.oldest - 1, has_spread)
            return
        oldest = one.oldest if newer is None else min(one.oldest + newer, self.version)
        replaced = not has_spread and self.replaced < self.most_replaced
        reason = self.scheduler.finish_rolling(one.real, None if newer is None else oldest, has_spread)
        assert reason is (DropReason.no_spread if replaced else None)
        if reason is None:
            self.clock += 1
            one.oldest, one.ready, one.since = oldest, self.clock, self.version
        else:
            self.forget(one, reason)

    @rule()
    def drop_unschedulable(self) -> None:
        unschedulable = self.scheduler.unschedulable()
        assert dict(unschedulable) == self.unschedulable()
        assert len(dict(unschedulable)) == len(unschedulable)
        for one in [one for one in self.open if one.real in dict(unschedulable)]:
            self.forget(one, dict(unschedulable)[one.real])
        assert self.scheduler.unschedulable() == []

    @precondition(lambda self: self.of(ready=True))
    @rule(number=st.integers(0, 99))
    def take(self, number: int) -> None:
        one = self.of(ready=True)[number % len(self.of(ready=True))]
        if len(self.taken) == self.groups or self.last(one.oldest, one.since) < self.version:
            with pytest.raises(RuntimeError):
                self.scheduler.take(one.real)
        else:
            self.scheduler.take(one.real)
            self.open.remove(one)
            self.taken.append(one)

    @precondition(lambda self: self.open or self.taken)
    @rule(number=st.integers(0, 99), reason=st.sampled_from([DropReason.lost, DropReason.end]))
    def lose(self, number: int, reason: DropReason) -> None:
        held = self.open + self.taken
        self.forget(held[number % len(held)], reason)

    @rule()
    def close(self) -> None:
        if len(self.taken) < self.groups:
            with pytest.raises(RuntimeError):
                self.scheduler.close_step()
            return
        self.scheduler.close_step()
        assert {one.real.stage for one in self.taken} == {GroupStage.trained}
        self.ended += [GroupOutcome(one.real.number, one.real.question.uid, GroupStage.trained) for one in self.taken]
        self.taken, self.replaced = [], 0
        self.version += 1

    @rule(late=st.integers(0, 2))
    def publish(self, late: int) -> None:
        if self.published == self.version:
            with pytest.raises(RuntimeError):
                self.scheduler.publish(self.version + late)
            return
        self.published = max(self.published + 1, self.version - late)
        self.scheduler.publish(self.published)

    @rule()
    def report_ended(self) -> None:
        assert self.scheduler.ended() == self.ended
        self.ended = []

    @precondition(lambda self: self.taken)
    @rule()
    def refuse_to_save(self) -> None:
        with pytest.raises(RuntimeError):
            self.scheduler.state()

    @precondition(lambda self: not self.taken)
    @rule()
    def save_and_resume(self) -> None:
        """Replace the scheduler by a new one that resumes its state, and must decide like the old one."""
        self.report_ended()
        state = self.scheduler.state()
        self.scheduler = self.new_scheduler()
        self.scheduler.resume(state)
        assert self.scheduler.state() == state
        prompt_groups = {prompt_group.number: prompt_group for prompt_group in self.scheduler.outstanding}
        assert len(prompt_groups) == len(self.open)
        for one in self.open:
            before, one.real = one.real, prompt_groups[one.real.number]
            assert (one.real.question, one.real.oldest, one.real.stage) == (before.question, one.oldest, before.stage)

    @invariant()
    def state_agrees(self) -> None:
        held = sorted([one.real for one in self.open + self.taken], key=lambda prompt_group: prompt_group.number)
        assert self.scheduler.outstanding == held
        assert self.scheduler.outstanding_count == len(held)
        ahead = self.staleness if self.wait is None else min(self.staleness, self.wait)
        assert len(held) <= (ahead + 1) * self.groups + self.spare
        assert self.scheduler.groups_missing == self.groups - len(self.taken)
        assert (self.scheduler.version, self.scheduler.published) == (self.version, self.published)
        assert self.scheduler.dropped == self.dropped

    @invariant()
    def admission_agrees_without_unschedulable_groups(self) -> None:
        if not self.unschedulable():
            free = self.free_for_new()
            may_admit = free > 0 and len(self.of(ready=False)) < free + self.spare
            assert self.scheduler.may_admit() == may_admit


SchedulerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=50)
test_random_calls_agree_with_the_model = SchedulerMachine.TestCase
