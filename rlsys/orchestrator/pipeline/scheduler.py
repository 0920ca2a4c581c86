"""Schedules prompt groups under a staleness bound. Pure: no clock, no tasks, no Ray.

A prompt group is one attempt at one prompt: its n episodes, from admission to training.

    admit -> rolling -> ready -> taken -> trained     a step takes `groups_per_step` groups, then closes
                |         |        |
                +---------+--------+----> dropped     with a reason; most reasons return the prompt to the source

Versions count closed steps. Step s, counted from 0, trains from version s to version s + 1. `published` is the newest
version that every rolling engine has. The staleness of a group is the actor's version minus the version of the group's
oldest token. A group may be trained in any step from the actor's current version up to its last step: its oldest
token's version + `max_staleness` and, once it is ready, the step in which it became ready + `max_wait`.

A policy (`schedule_policy`) chooses within these bounds: when to admit a group, and which ready group to train first.
The invariants hold for any policy.

Example: two groups per step, `max_staleness=1`, the actor at version 3.

    g0, g1  ready, oldest token 2     have places in step 3, the last step that may train them
    g2      rolling since version 2   no place is left: unschedulable, dropped as surplus, its prompt returned
    g3      ready, oldest token 3     may be trained in step 3 or 4, and has a place in step 4

Invariants, derived in docs/pipeline.md:
- A prompt group is either trained or dropped, exactly once.
- A group is taken only while its staleness is at most `max_staleness`, and at most `max_wait` steps after the step in
  which it became ready.
- At most (min(max_staleness, max_wait) + 1) x groups_per_step + spare prompt groups are outstanding.
- Once unschedulable groups are dropped, every ready group fits into some step.
- Admission stops while nothing is taken, dropped, closed or published: rollouts cannot run ahead without bound.
- A step can always be filled, because a drop makes room for a new prompt group, or the policy's refusal is an error.
- A scheduler that resumes from a state makes the same decisions as the one that saved it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from itertools import islice
from math import ceil

from rlsys.data.question import Question
from rlsys.errors import RunError
from rlsys.orchestrator.pipeline.schedule_policy import EARLIEST_FIRST, CheckedPolicy, ReadyGroup, ScheduleView
from rlsys.weights.checkpoint.state_file import ADDED


class GroupStage(StrEnum):
    rolling = "rolling"
    """Episodes run or are being rewarded."""
    ready = "ready"
    """Rewarded; being scored or waiting to be trained."""
    taken = "taken"
    """Part of the step in progress."""
    trained = "trained"
    dropped = "dropped"


class DropReason(StrEnum):
    """Reason for dropping a prompt group."""

    stale = "stale"
    """Too late: the last step that could train the group is full or closed."""
    surplus = "surplus"
    """Too many: other ready groups fill the steps that could train the group."""
    no_spread = "no_spread"
    """All episodes earned the same reward."""
    lost = "lost"
    """Two engines died while they generated the group, or a live engine did not return it in time."""
    end = "end"
    """The run ended before the group's step was closed."""


GIVEN_BACK = frozenset({DropReason.stale, DropReason.surplus, DropReason.lost, DropReason.end})
"""Reasons that return the prompt to the source: the prompt itself is sound."""


@dataclass(slots=True, eq=False)
class PromptGroup:
    """One attempt at one prompt."""

    number: int
    question: Question
    oldest: int
    """Version of the oldest token; a lower bound until the group is ready."""
    last_step: int
    """Last step that may train the group."""
    stage: GroupStage = GroupStage.rolling
    ready_since: int | None = None
    """Version of the actor when the group became ready; None before."""


@dataclass(frozen=True, slots=True)
class PromptGroupState:
    """Saved form of a prompt group."""

    number: int
    question: Question
    oldest: int
    ready_since: int | None = field(default=None, metadata={ADDED: True})


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Scheduler state between two steps, when every outstanding prompt group is rolling or ready."""

    version: int
    published: int
    admitted: int
    """Number of prompt groups admitted so far, which is also the number of the next group."""
    replaced: int
    """Number of groups dropped as `no_spread` since the last step closed."""
    dropped: Mapping[DropReason, int]
    rolling: tuple[PromptGroupState, ...]
    """Rolling groups, sorted by number."""
    ready: tuple[PromptGroupState, ...]
    """Ready groups by last step; within one last step, in the order in which they became ready."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    number: int
    uid: str
    """Id of the question."""
    outcome: GroupStage | DropReason
    """`GroupStage.trained`, or the reason for the drop."""


class StalenessScheduler:
    """Schedules prompt groups under a staleness bound: admits, places, drops and trains them.

    `oversample` (at least 1) adds ceil(oversample x groups_per_step) - groups_per_step spare groups in flight. A step
    drops and replaces up to `max_replaced` groups without spread; further groups without spread are trained. `steps` is
    the total number of steps: no group is admitted for a later step. `max_wait` is the largest number of steps that may
    close between a group's becoming ready and the step that trains it. None means no limit.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        oversample: float = 1.0,
        max_replaced: int = 0,
        steps: int | None = None,
        max_wait: int | None = None,
        policy: CheckedPolicy = EARLIEST_FIRST,
    ) -> None:
        least = {
            "groups_per_step": 1,
            "max_staleness": 0,
            "oversample": 1,
            "max_replaced": 0,
            "steps": 1,
            "max_wait": 0,
        }
        limits = (1 if steps is None else steps, 0 if max_wait is None else max_wait)
        given = (groups_per_step, max_staleness, oversample, max_replaced, *limits)
        for (name, bound), value in zip(least.items(), given, strict=True):
            if value < bound:
                raise ValueError(f"A scheduler needs {name} >= {bound}, not {value}.")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._max_wait, self._policy = max_wait, policy
        # Exact decimal: 1.1 x 110 groups are 121; the nearest float would give 122.
        self.spare = ceil(Fraction(str(oversample)) * groups_per_step) - groups_per_step
        self.version = 0
        """Weight version of the actor: the number of closed steps."""
        self.published = 0
        self.dropped: Counter[DropReason] = Counter()
        self._max_replaced = max_replaced
        self._steps = steps
        self._replaced = 0
        self._admitted = 0
        self._rolling, self._ready = _StepBuckets(), _StepBuckets()
        self._taken: dict[int, PromptGroup] = {}
        self._ended: list[GroupOutcome] = []

    def state(self) -> SchedulerState:
        """Return the state for `resume` in a scheduler with the same settings. Raises RuntimeError during a step."""
        if self._taken:
            raise RuntimeError(
                f"The state can be saved only between two steps, but step {self.version} has taken "
                f"{len(self._taken)} groups."
            )
        by_number = sorted(self._rolling.prompt_groups(), key=lambda prompt_group: prompt_group.number)
        return SchedulerState(
            version=self.version,
            published=self.published,
            admitted=self._admitted,
            replaced=self._replaced,
            dropped=dict(self.dropped),
            rolling=tuple(_saved(prompt_group) for prompt_group in by_number),
            ready=tuple(_saved(prompt_group) for prompt_group in self._ready.prompt_groups()),
        )

    def resume(self, state: SchedulerState) -> None:
        """Continue from `state`: its prompt groups become outstanding. Call this before admitting any group."""
        self.version, self.published = state.version, state.published
        self._admitted, self._replaced = state.admitted, state.replaced
        self.dropped = Counter(state.dropped)
        for stage, buckets, saved in (
            (GroupStage.rolling, self._rolling, state.rolling),
            (GroupStage.ready, self._ready, state.ready),
        ):
            for one in saved:
                # A run saved by an earlier version of rlsys does not tell since when its groups were ready.
                since = one.ready_since
                if stage is GroupStage.ready and since is None:
                    since = state.version
                last_step = self._last_step(one.oldest, since)
                buckets.add(PromptGroup(one.number, one.question, one.oldest, last_step, stage, since))

    def ended(self) -> list[GroupOutcome]:
        """Return the outcomes of the groups that have ended since the last call, in order, and forget them.

        `state` does not have these outcomes, so call this before `state`.
        """
        ended, self._ended = self._ended, []
        return ended

    @property
    def outstanding(self) -> list[PromptGroup]:
        """Prompt groups neither trained nor dropped, in order of admission."""
        held = [*self._rolling.prompt_groups(), *self._ready.prompt_groups(), *self._taken.values()]
        return sorted(held, key=lambda prompt_group: prompt_group.number)

    @property
    def outstanding_count(self) -> int:
        """Number of prompt groups neither trained nor dropped."""
        return self._rolling.count + self._ready.count + len(self._taken)

    @property
    def groups_missing(self) -> int:
        """Number of groups that the current step still has to take."""
        return self.groups_per_step - len(self._taken)

    def may_admit(self) -> bool:
        """Return True if a prompt group admitted now could still be trained, and the policy admits one.

        Such a group may be trained up to step published + max_staleness, or up to version + max_wait if it became ready
        at once. Ready groups occupy places in those steps. Up to (remaining places + spare) groups may roll.

        Raises UserError if the policy fails, or refuses although nothing is under way that could change its answer.
        """
        places = self._places(self._last_step(self.published, self.version)) - self._ready.count
        if not (places > 0 and self._rolling.count < places + self.spare):
            return False
        rolling, ready, taken = self._rolling.count, self._ready.count, len(self._taken)
        view = ScheduleView(self.version, self.published, self.groups_per_step, rolling, ready, taken)
        admits = self._policy.may_admit(view)
        # A publication, a closed step, or a group that is rolling or ready would change the view.
        if not (admits or rolling or ready) and self.groups_missing and self.published == self.version:
            raise self._policy.problem(
                f"it admits no prompt group although none is under way and step {self.version} lacks "
                f"{self.groups_missing}, so the run would wait for ever: let may_admit return True when nothing rolls "
                "and nothing is ready"
            )
        return admits

    def priority(self, prompt_group: PromptGroup) -> tuple[float, int, int]:
        """Return the place of a ready group in the order of training: the lowest first.

        Raises UserError if the policy fails.
        """
        self._require(prompt_group, GroupStage.ready)
        number, oldest = prompt_group.number, prompt_group.oldest
        assert prompt_group.ready_since is not None
        ready = ReadyGroup(number, prompt_group.question, oldest, prompt_group.ready_since, prompt_group.last_step)
        return self._policy.priority(ready), oldest, number

    def admit(self, question: Question) -> PromptGroup:
        """Admit a prompt group for `question`. Raises RuntimeError unless `may_admit`."""
        if not self.may_admit():
            raise RuntimeError(f"Question {question.uid} cannot be admitted: no step has a place for it.")
        prompt_group = PromptGroup(self._admitted, question, self.published, self._last_step(self.published))
        self._admitted += 1
        self._rolling.add(prompt_group)
        return prompt_group

    def finish_rolling(self, prompt_group: PromptGroup, oldest: int | None, has_spread: bool) -> DropReason | None:
        """Mark a rolling group as ready and return None, or return the reason for which the caller must drop the group.

        `oldest` is the version of the group's oldest token, None if unknown. Raises RunError if a token is older than
        the version published at admission: no engine had such weights any more.
        """
        self._require(prompt_group, GroupStage.rolling)
        oldest = prompt_group.oldest if oldest is None else oldest
        if oldest < prompt_group.oldest:
            raise RunError(
                f"a rollout engine generated tokens of question {prompt_group.question.uid} with version {oldest} of "
                f"the policy, although it had activated version {prompt_group.oldest} before the request."
            )
        if not has_spread and self._replaced < self._max_replaced:
            return DropReason.no_spread
        self._rolling.remove(prompt_group)
        prompt_group.oldest, prompt_group.stage = oldest, GroupStage.ready
        prompt_group.ready_since = self.version
        prompt_group.last_step = self._last_step(prompt_group.oldest, self.version)
        self._ready.add(prompt_group)
        return None

    def unschedulable(self) -> list[tuple[PromptGroup, DropReason]]:
        """Return the prompt groups that no step can train, each with the reason to drop it.

        Places in steps go to ready groups, those with the earliest last step first; groups with one last step get them
        in the order in which they became ready. A ready group without a place is unschedulable. A rolling group is
        unschedulable too if ready groups with the same or an earlier last step take every place that it could have.
        """
        found: list[tuple[PromptGroup, DropReason]] = []
        placed = 0
        for last_step in sorted({*self._rolling.by_last_step, *self._ready.by_last_step}):
            places = max(self._places(last_step), 0)
            reason = DropReason.surplus if places else DropReason.stale
            ready = self._ready.by_last_step.get(last_step, {})
            excess = max(placed + len(ready) - places, 0)
            found += [(prompt_group, reason) for prompt_group in islice(reversed(ready.values()), excess)]
            placed += len(ready) - excess
            if placed == places:
                rolling = self._rolling.by_last_step.get(last_step, {})
                found += [(prompt_group, reason) for prompt_group in rolling.values()]
        return found

    def take(self, prompt_group: PromptGroup) -> None:
        """Add a ready group to the current step. Raises RuntimeError if the step is full or after the group's last."""
        self._require(prompt_group, GroupStage.ready)
        if not self.groups_missing:
            raise RuntimeError(f"Step {self.version} has its {self.groups_per_step} groups already.")
        if self.version > prompt_group.last_step:
            raise RuntimeError(
                f"Step {self.version} would train a group with a token of version {prompt_group.oldest} that is ready since "
                f"step {prompt_group.ready_since}, which exceeds max_staleness={self.max_staleness} or "
                f"max_wait={self._max_wait}."
            )
        self._ready.remove(prompt_group)
        prompt_group.stage = GroupStage.taken
        self._taken[prompt_group.number] = prompt_group

    def drop(self, prompt_group: PromptGroup, reason: DropReason) -> None:
        self._require(prompt_group, GroupStage.rolling, GroupStage.ready, GroupStage.taken)
        if prompt_group.stage is GroupStage.rolling:
            self._rolling.remove(prompt_group)
        elif prompt_group.stage is GroupStage.ready:
            self._ready.remove(prompt_group)
        else:
            del self._taken[prompt_group.number]
        prompt_group.stage = GroupStage.dropped
        self._ended.append(GroupOutcome(prompt_group.number, prompt_group.question.uid, reason))
        self.dropped[reason] += 1
        self._replaced += reason is DropReason.no_spread

    def close_step(self) -> None:
        """Mark the taken groups as trained and advance the version. Raises RuntimeError if the step is not full."""
        if self.groups_missing:
            raise RuntimeError(f"Step {self.version} cannot be closed: it lacks {self.groups_missing} groups.")
        for prompt_group in self._taken.values():
            prompt_group.stage = GroupStage.trained
            self._ended.append(GroupOutcome(prompt_group.number, prompt_group.question.uid, GroupStage.trained))
        self._taken = {}
        self._replaced = 0
        self.version += 1

    def publish(self, version: int) -> None:
        """Record that every rolling engine has `version`.

        Raises RuntimeError unless `version` is newer than the published version and at most the actor's version.
        """
        if not self.published < version <= self.version:
            raise RuntimeError(
                f"Version {version} cannot be published: the published version is {self.published}, the actor's is "
                f"{self.version}."
            )
        self.published = version

    def _last_step(self, oldest: int, ready_since: int | None = None) -> int:
        """Return the last step that may train a group with an oldest token of version `oldest`."""
        last = oldest + self.max_staleness
        return last if ready_since is None or self._max_wait is None else min(last, ready_since + self._max_wait)

    def _places(self, last_step: int) -> int:
        """Return the places left in the steps up to `last_step`; 0 or less if that step is over."""
        end = last_step + 1
        if self._steps is not None:
            end = min(end, self._steps)
        return (end - self.version) * self.groups_per_step - len(self._taken)

    def _require(self, prompt_group: PromptGroup, *stages: GroupStage) -> None:
        if prompt_group.stage not in stages:
            raise RuntimeError(
                f"Prompt group {prompt_group.number} of question {prompt_group.question.uid} is {prompt_group.stage}, not {' or '.join(stages)}."
            )


def _saved(prompt_group: PromptGroup) -> PromptGroupState:
    return PromptGroupState(prompt_group.number, prompt_group.question, prompt_group.oldest, prompt_group.ready_since)


class _StepBuckets:
    """Prompt groups bucketed by their last step, so that a decision visits few steps."""

    def __init__(self) -> None:
        self.by_last_step: dict[int, dict[int, PromptGroup]] = {}
        """Last step -> groups by number, in the order in which they were added; no empty bucket."""
        self.count = 0

    def add(self, prompt_group: PromptGroup) -> None:
        self.by_last_step.setdefault(prompt_group.last_step, {})[prompt_group.number] = prompt_group
        self.count += 1

    def remove(self, prompt_group: PromptGroup) -> None:
        bucket = self.by_last_step[prompt_group.last_step]
        del bucket[prompt_group.number]
        if not bucket:
            del self.by_last_step[prompt_group.last_step]
        self.count -= 1

    def prompt_groups(self) -> list[PromptGroup]:
        return [prompt_group for bucket in self.by_last_step.values() for prompt_group in bucket.values()]
