"""Tests of schedule policies: what they are asked, how failures end, and that no kind of schedule goes untested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from rlsys.config.schema import TrainerConfig, variants
from rlsys.orchestrator.pipeline.schedule_policy import CheckedPolicy, EarliestFirst, ReadyGroup, ScheduleView
from rlsys.orchestrator.pipeline.scheduler import PromptGroup, StalenessScheduler
from tests.orchestrator.pipeline.script import ANY_POLICY, OF_SCHEDULE, SEEDS, Script
from tests.support.refusals import refused
from tests.support.trajectories import question

KEY = "trainer.schedule.kind"


def test_simulations_have_every_kind_of_schedule() -> None:
    """A new kind must be tried by the simulated runs too."""
    known = {*variants(get_type_hints(TrainerConfig)["schedule"])}
    assert {kind for kinds in OF_SCHEDULE.values() for kind in kinds} == known | {ANY_POLICY}
    scripts = [Script.seeded(seed) for seed in range(SEEDS)]
    for kind in (*known, ANY_POLICY):
        assert sum(script.kind == kind for script in scripts) > SEEDS / 10
    assert any(script.max_wait is not None and script.max_wait < script.max_staleness for script in scripts)


class Held(EarliestFirst):
    """Refuses as long as `closed`; logs what it is asked."""

    def __init__(self) -> None:
        self.closed, self.asked = False, list[Any]()

    def may_admit(self, view: ScheduleView) -> bool:
        self.asked.append(view)
        return not self.closed

    def priority(self, group: ReadyGroup) -> float:
        self.asked.append(group)
        return -group.number


def ready(scheduler: StalenessScheduler, number: int, oldest: int | None = None) -> PromptGroup:
    group = scheduler.admit(question(number))
    assert scheduler.finish_rolling(group, oldest, has_spread=True) is None
    return group


def test_policy_is_asked_about_the_state_that_the_bounds_allow() -> None:
    policy = Held()
    scheduler = StalenessScheduler(2, max_staleness=1, max_wait=1, policy=CheckedPolicy(policy, "held"))
    first, second = ready(scheduler, 1), ready(scheduler, 2)
    scheduler.take(first)
    assert scheduler.may_admit()
    assert policy.asked[-1] == ScheduleView(0, 0, groups_per_step=2, rolling=0, ready=1, taken=1)
    assert scheduler.priority(second) == (-1.0, 0, 1)
    assert policy.asked[-1] == ReadyGroup(1, question(2), oldest=0, ready_since=0, last_step=1)
    policy.closed = True
    assert not scheduler.may_admit()
    with pytest.raises(RuntimeError):
        scheduler.admit(question(3))
    policy.closed = False
    for number in (3, 4):
        ready(scheduler, number)
    asked = len(policy.asked)
    assert not scheduler.may_admit(), "every place is used"
    assert len(policy.asked) == asked, "the bounds come first"


def test_refusal_is_a_stall_only_if_nothing_can_change_it() -> None:
    policy = Held()
    scheduler = StalenessScheduler(1, max_staleness=1, policy=CheckedPolicy(policy, "my.Held"))
    first = ready(scheduler, 1)
    policy.closed = True
    assert not scheduler.may_admit(), "a group is ready"
    scheduler.take(first)
    assert not scheduler.may_admit(), "the step will be closed"
    scheduler.close_step()
    assert not scheduler.may_admit(), "the version will be published"
    scheduler.publish(1)
    with refused("user_code", KEY) as caught:
        scheduler.may_admit()
    assert "my.Held" in str(caught.value)


def test_wait_goes_on_after_a_resume() -> None:
    """One of three ready groups is trained; the others have waited a step when the run is saved."""

    def scheduler() -> StalenessScheduler:
        return StalenessScheduler(1, max_staleness=4, max_wait=2)

    before, after = scheduler(), scheduler()
    groups = [ready(before, number) for number in range(3)]
    before.take(groups[0])
    before.close_step()
    after.resume(before.state())
    assert after.state() == before.state()
    assert [(group.ready_since, group.last_step) for group in after.outstanding] == [(0, 2), (0, 2)]
    old = replace(before.state(), ready=tuple(replace(one, ready_since=None) for one in before.state().ready))
    again = scheduler()
    again.resume(old)
    assert {group.last_step for group in again.outstanding} == {3}, "a state without waits: they begin at the resume"


class Numpyish:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("answer", [None, 1, "yes", Numpyish()])
def test_answer_that_is_not_a_truth_value_is_refused(answer: object) -> None:
    with refused("user_code", KEY):
        checked(may_admit=lambda _: answer).may_admit(VIEW)


@pytest.mark.parametrize(
    "answer",
    [None, "1", float("nan"), (1, 2), 1j, 10**400],
    ids=["none", "text", "nan", "pair", "complex", "too large"],
)
def test_answer_that_is_not_a_number_is_refused(answer: object) -> None:
    with refused("user_code", KEY):
        checked(priority=lambda _: answer).priority(GROUP)


VIEW = ScheduleView(0, 0, 1, 0, 0, 0)
GROUP = ReadyGroup(0, question(1), 0, 0, 0)


def checked(**methods: Callable[[Any], Any]) -> CheckedPolicy:
    return CheckedPolicy(type("Mine", (), {name: staticmethod(one) for name, one in methods.items()})(), "mine")
