"""Chooses among the prompt groups that the staleness scheduler allows. Pure.

A schedule has two parts. Its bounds, `max_staleness` and `max_wait`, are settings, which the scheduler enforces. Its
choices are a `SchedulePolicy`: whether to admit a prompt group now, and which ready group is trained first. A policy
cannot break a bound, or train, drop or forget a group: dropping follows from the bounds alone. A policy that dropped
groups could drop what it admits for ever.

The built-in schedules have different bounds and the same choices (`EarliestFirst`). `trainer.schedule.kind=
package.module.attribute` names a policy from outside of the package. Its keyword-only parameters are its settings; the
names `max_staleness`, `max_wait` and `on_update` have the meaning that they have in a built-in schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from rlsys.components import check_callable
from rlsys.config.custom import Custom, OwnComponent
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.errors import UserError

_KEY = "trainer.schedule.kind"


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """State that a policy sees when it may admit a prompt group. Versions count closed steps."""

    version: int
    """Version of the actor; the current step trains from it."""
    published: int
    """Newest version that every rolling engine has; a group that is admitted now starts with it or a newer one."""
    groups_per_step: int
    rolling: int
    """Number of groups in rollout or being rewarded."""
    ready: int
    """Number of rewarded groups that no step has taken."""
    taken: int
    """Number of groups that the current step has taken."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """Rewarded prompt group that waits to be trained."""

    number: int
    """Place in the order of admission, over the whole run."""
    question: Question
    oldest: int
    """Version of its oldest token."""
    ready_since: int
    """Version of the actor when the group became ready."""
    last_step: int
    """Last step that may train the group, by the bounds of the schedule. Step s trains from version s."""


class SchedulePolicy(Protocol):
    """Choices of a schedule. The answers depend on the arguments and settings alone.

    So a run that is resumed makes the same choices, and a refusal stays one until the view changes.
    """

    def may_admit(self, view: ScheduleView) -> bool:
        """Return True to begin another prompt group; asked only when the bounds allow one.

        Asked again after every change. A refusal while nothing rolls, waits or changes ends the run with an error.
        """

    def priority(self, group: ReadyGroup) -> float:
        """Return the rank in the order of training: of the groups with scores, the lowest is trained first.

        Equal ranks go by oldest token, then in order of admission. A group that is overtaken until its last step has
        passed is dropped as stale, and its prompt returned.
        """


class EarliestFirst:
    """Admits what the bounds allow; trains the group first whose last step comes first.

    Without `max_wait` this is the most stale group first.
    """

    def may_admit(self, view: ScheduleView) -> bool:  # noqa: ARG002, a policy that never refuses needs no view
        return True

    def priority(self, group: ReadyGroup) -> float:
        """Return the last step that may train the group."""
        return group.last_step


class CheckedPolicy:
    """Policy whose answers are checked: a wrong one is a UserError that names the policy."""

    def __init__(self, policy: SchedulePolicy, name: str, own: OwnComponent | None = None) -> None:
        """`own` runs the methods of a policy from outside of the package."""
        self._policy, self._name, self._own = policy, name, own

    def may_admit(self, view: ScheduleView) -> bool:
        """Return the policy's answer."""
        answer = self._ask(self._policy.may_admit, view)
        if not isinstance(answer, bool):
            raise self.problem(f"may_admit returned {_shown(answer)}: return True or False")
        return answer

    def priority(self, group: ReadyGroup) -> float:
        """Return the policy's answer."""
        answer = self._ask(self._policy.priority, group)
        try:
            rank = float(answer) if isinstance(answer, Real) else math.nan
        except OverflowError:
            rank = math.nan
        if math.isnan(rank):
            raise self.problem(f"priority returned {_shown(answer)}: return a number")
        return rank

    def problem(self, what: str) -> UserError:
        """Return the error that the policy does `what`."""
        return UserError(f"{_KEY}={self._name}: {what}.", code="user_code", key=_KEY)

    def _ask(self, question: Callable[[Any], Any], about: Any) -> Any:
        return question(about) if self._own is None else self._own.run(question, about)


EARLIEST_FIRST = CheckedPolicy(EarliestFirst(), "rlsys.orchestrator.pipeline.schedule_policy.EarliestFirst")


def make_policy(config: RunConfig) -> CheckedPolicy:
    """Return the policy of `trainer.schedule`. Raises UserError if a component from outside cannot be one."""
    schedule = config.trainer.schedule
    if not isinstance(schedule, Custom):
        return EARLIEST_FIRST
    own = OwnComponent(schedule)
    policy = own()
    for name, argument in (("may_admit", "view"), ("priority", "group")):
        check_callable(getattr(policy, name, None), f"{schedule.kind}.{name}", _KEY, (argument,))
    return CheckedPolicy(policy, schedule.kind, own)


def _shown(answer: Any) -> str:
    """Return the answer and its type, cut short."""
    try:
        text = repr(answer)
    except Exception:  # noqa: BLE001, the answer's own code
        text = "a value"
    return f"{text[:80]} of type {type(answer).__name__}"
