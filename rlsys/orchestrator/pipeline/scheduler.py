"""Schedules prompt groups under a staleness bound. Pure: no clock, no tasks, no Ray.

A prompt group is one attempt at one prompt: its n episodes, from admission to training.

    admit -> rolling -> ready -> taken -> trained     a step takes `groups_per_step` groups, then closes
                |         |        |
                +---------+--------+----> dropped     with a reason; most reasons return the prompt to the source

Versions count closed steps. Step s, counted from 0, trains from version s to version s + 1. `published` is the newest
version that every rolling engine has. The staleness of a group is the actor's version minus the version of the group's
oldest token. A group may be trained in any step from the actor's current version up to its oldest token's version +
`max_staleness`.

Example: two groups per step, `max_staleness=1`, the actor at version 3.

    g0, g1  ready, oldest token 2     have places in step 3, the last step that may train them
    g2      rolling since version 2   no place is left: unschedulable, dropped as surplus, its prompt returned
    g3      ready, oldest token 3     may be trained in step 3 or 4, and has a place in step 4

Invariants, derived in docs/pipeline.md:
- A prompt group is either trained or dropped, exactly once.
- A group is taken only while its staleness is at most `max_staleness`.
- At most (max_staleness + 1) x groups_per_step + spare prompt groups are outstanding.
- Once unschedulable groups are dropped, every ready group fits into some step.
- Admission stops while nothing is taken, dropped or published: rollouts cannot run ahead without bound.
- A step can always be filled: a drop makes room for a new prompt group.
- A scheduler that resumes from a state makes the same decisions as the one that saved it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import islice
from math import ceil

from rlsys.data.question import Question
from rlsys.errors import RunError


class GroupStage(StrEnum):
    """Stage of a prompt group."""

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
    """Too old: the last step that could train the group is full or closed."""
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
    stage: GroupStage = GroupStage.rolling


@dataclass(frozen=True, slots=True)
class PromptGroupState:
    """Saved form of a prompt group."""

    number: int
    question: Question
    oldest: int


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
    """Ready groups by oldest version; within one version, in the order in which they became ready."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Outcome of a prompt group."""

    number: int
    uid: str
    """Id of the question."""
    outcome: GroupStage | DropReason
    """`GroupStage.trained`, or the reason for the drop."""


class StalenessScheduler:
    """Schedules prompt groups under a staleness bound: admits, places, drops and trains them.

    `oversample` (at least 1) adds ceil(oversample x groups_per_step) - groups_per_step spare groups in flight. A step
    drops and replaces up to `max_replaced` groups without spread; further groups without spread are trained. `steps` is
    the total number of steps: no group is admitted for a later step. None means no limit.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        oversample: float = 1.0,
        max_replaced: int = 0,
        steps: int | None = None,
    ) -> None:
        least = {"groups_per_step": 1, "max_staleness": 0, "oversample": 1, "max_replaced": 0, "steps": 1}
        given = (groups_per_step, max_staleness, oversample, max_replaced, 1 if steps is None else steps)
        for (name, bound), value in zip(least.items(), given, strict=True):
            if value < bound:
                raise ValueError(f"A scheduler needs {name} >= {bound}, not {value}.")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
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
        self._rolling, self._ready = _VersionBuckets(), _VersionBuckets()
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
                buckets.add(PromptGroup(one.number, one.question, one.oldest, stage))

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
        """Return True if a prompt group admitted now could still be trained.

        Such a group may be trained up to step published + max_staleness. Ready groups occupy places in those steps. Up
        to (remaining places + spare) groups may roll.
        """
        places = self._places(self.published) - self._ready.count
        return places > 0 and self._rolling.count < places + self.spare

    def admit(self, question: Question) -> PromptGroup:
        """Admit a prompt group for `question`. Raises RuntimeError unless `may_admit`."""
        if not self.may_admit():
            raise RuntimeError(f"Question {question.uid} cannot be admitted: no step has a place for it.")
        prompt_group = PromptGroup(self._admitted, question, self.published)
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
        self._ready.add(prompt_group)
        return None

    def unschedulable(self) -> list[tuple[PromptGroup, DropReason]]:
        """Return the prompt groups that no step can train, each with the reason to drop it.

        Places in steps go to ready groups, oldest first; groups of one version get them in the order in which they
        became ready. A ready group without a place is unschedulable. A rolling group is unschedulable too if ready
        groups of the same or an older version take every place that it could have.
        """
        found: list[tuple[PromptGroup, DropReason]] = []
        placed = 0
        for oldest in sorted({*self._rolling.by_oldest, *self._ready.by_oldest}):
            places = max(self._places(oldest), 0)
            reason = DropReason.surplus if places else DropReason.stale
            ready = self._ready.by_oldest.get(oldest, {})
            excess = max(placed + len(ready) - places, 0)
            found += [(prompt_group, reason) for prompt_group in islice(reversed(ready.values()), excess)]
            placed += len(ready) - excess
            if placed == places:
                rolling = self._rolling.by_oldest.get(oldest, {})
                found += [(prompt_group, reason) for prompt_group in rolling.values()]
        return found

    def take(self, prompt_group: PromptGroup) -> None:
        """Add a ready group to the current step. Raises RuntimeError if the step is full or the group is too old."""
        self._require(prompt_group, GroupStage.ready)
        if not self.groups_missing:
            raise RuntimeError(f"Step {self.version} has its {self.groups_per_step} groups already.")
        if self.version - prompt_group.oldest > self.max_staleness:
            raise RuntimeError(
                f"Step {self.version} would train a token of version {prompt_group.oldest}, which exceeds "
                f"max_staleness={self.max_staleness}."
            )
        self._ready.remove(prompt_group)
        prompt_group.stage = GroupStage.taken
        self._taken[prompt_group.number] = prompt_group

    def drop(self, prompt_group: PromptGroup, reason: DropReason) -> None:
        """Drop an outstanding prompt group."""
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

    def _places(self, oldest: int) -> int:
        """Return the places left in the steps that may train a group whose oldest token has version `oldest`.

        The result is 0 or less if the group is too old.
        """
        end = oldest + self.max_staleness + 1
        if self._steps is not None:
            end = min(end, self._steps)
        return (end - self.version) * self.groups_per_step - len(self._taken)

    def _require(self, prompt_group: PromptGroup, *stages: GroupStage) -> None:
        if prompt_group.stage not in stages:
            raise RuntimeError(
                f"Prompt group {prompt_group.number} of question {prompt_group.question.uid} is {prompt_group.stage}, not {' or '.join(stages)}."
            )


def _saved(prompt_group: PromptGroup) -> PromptGroupState:
    return PromptGroupState(prompt_group.number, prompt_group.question, prompt_group.oldest)


class _VersionBuckets:
    """Prompt groups bucketed by the version of their oldest token, so that a decision visits few versions."""

    def __init__(self) -> None:
        self.by_oldest: dict[int, dict[int, PromptGroup]] = {}
        """Version -> groups by number, in the order in which they were added; no empty bucket."""
        self.count = 0

    def add(self, prompt_group: PromptGroup) -> None:
        self.by_oldest.setdefault(prompt_group.oldest, {})[prompt_group.number] = prompt_group
        self.count += 1

    def remove(self, prompt_group: PromptGroup) -> None:
        bucket = self.by_oldest[prompt_group.oldest]
        del bucket[prompt_group.number]
        if not bucket:
            del self.by_oldest[prompt_group.oldest]
        self.count -= 1

    def prompt_groups(self) -> list[PromptGroup]:
        return [prompt_group for bucket in self.by_oldest.values() for prompt_group in bucket.values()]
