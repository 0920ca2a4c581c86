"""Schedules prompt groups under a staleness bound. Pure: no clock, no tasks, no Ray.

A prompt group is one attempt at one prompt: its n episodes, from admission to training.

    admit -> rolling -> ready -> taken -> trained     a step takes `groups_per_step` groups, then closes
                \\---------\\-------\\---> dropped      with a reason; most reasons return the prompt to the source

Versions count closed steps: step s trains from version s to version s + 1, and `published` is the newest version that
every engine has. The staleness of a group is the actor's version minus the version of the group's oldest token. A group
may be trained in any step up to `max_staleness` after its oldest token's version.

Example: two groups a step, `max_staleness=1`, the actor at version 3.

    g0, g1  ready, oldest token 2   fill step 3, the last step that may train them
    g2      ready, oldest token 2   no step is left: unschedulable, dropped as surplus, its prompt returned
    g3      ready, oldest token 3   may be trained in step 3 or 4, and has a place in step 4

Invariants, derived in docs/pipeline.md:
- A prompt group is either trained or dropped, exactly once.
- A group is taken only while its staleness is at most `max_staleness`.
- At most (max_staleness + 1) x groups_per_step + spare prompt groups are outstanding.
- Once unschedulable groups are dropped, every ready group fits into some step.
- While nothing is taken, dropped or published, admission stops: rollouts cannot run ahead without bound.
- A step can always be filled: a drop makes room for a new prompt group.
- A scheduler restored from a state makes the same decisions as the one that saved it.
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


class Stage(StrEnum):
    """Where a prompt group is."""

    rolling = "rolling"
    """Its episodes run."""
    ready = "ready"
    """Its episodes are done; it is scored or waits to be trained."""
    taken = "taken"
    """Its gradient belongs to the step under way."""
    trained = "trained"
    dropped = "dropped"


class Reason(StrEnum):
    """Why a prompt group was dropped."""

    stale = "stale"
    """Too old: the last step that might have trained it is full or closed."""
    surplus = "surplus"
    """Others came first: ready groups fill the steps that might have trained it."""
    no_spread = "no_spread"
    """All its rewards are equal."""
    lost = "lost"
    """Its engine died twice, or never answered."""
    end = "end"
    """The run ended before its turn, or before its step was closed."""


GIVEN_BACK = frozenset({Reason.stale, Reason.surplus, Reason.lost, Reason.end})
"""Reasons that say nothing about the prompt: it is asked again."""


@dataclass(slots=True, eq=False)
class PromptGroup:
    """One try at one prompt."""

    number: int
    question: Question
    oldest: int
    """No token of the group is of an older version; exact once the group is ready."""
    stage: Stage = Stage.rolling


@dataclass(frozen=True, slots=True)
class PromptGroupState:
    """A prompt group, as it is saved."""

    number: int
    question: Question
    oldest: int


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The scheduler's state between two steps; every prompt group that is open then rolls or is ready."""

    version: int
    published: int
    admitted: int
    """Prompt groups so far, hence the number of the next."""
    replaced: int
    """Groups without spread that were dropped for the step to come."""
    dropped: Mapping[Reason, int]
    rolling: tuple[PromptGroupState, ...]
    """By number."""
    ready: tuple[PromptGroupState, ...]
    """Those of one version in the order in which they became ready, which is the order of their claims."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A prompt group that has ended."""

    number: int
    uid: str
    """The question's."""
    end: Stage | Reason
    """`Stage.trained`, or why it was dropped."""


class StalenessScheduler:
    """Schedules prompt groups under a staleness bound: admits, follows and closes them.

    `oversample` prompt groups are started for each that a step lacks; `max_replaced` groups without spread are
    replaced in a step, further ones are trained (0 replaces none). After `steps` steps nothing is trained, so
    nothing is rolled for later ones; None is without end.
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
        # The decimal that was written, not the float next to it: 1.1 of 110 groups are 121, not 122.
        self.spare = ceil(Fraction(str(oversample)) * groups_per_step) - groups_per_step
        self.version = 0
        """The actor's: how many steps were closed."""
        self.published = 0
        self.dropped: Counter[Reason] = Counter()
        self._max_replaced = max_replaced
        self._steps = steps
        self._replaced = 0
        self._admitted = 0
        self._rolling, self._ready = _VersionBuckets(), _VersionBuckets()
        self._taken: dict[int, PromptGroup] = {}
        self._ended: list[Ended] = []

    def state(self) -> SchedulerState:
        """The state, for another scheduler of the same settings to `resume`. Raises RuntimeError in the middle of a step."""
        if self._taken:
            raise RuntimeError(
                f"The state of step {self.version} was asked for after it had taken {len(self._taken)} groups."
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
        """Go on from `state`; its prompt groups are outstanding. Only for a scheduler that has admitted nothing yet."""
        self.version, self.published = state.version, state.published
        self._admitted, self._replaced = state.admitted, state.replaced
        self.dropped = Counter(state.dropped)
        for stage, buckets, saved in (
            (Stage.rolling, self._rolling, state.rolling),
            (Stage.ready, self._ready, state.ready),
        ):
            for one in saved:
                buckets.add(PromptGroup(one.number, one.question, one.oldest, stage))

    def ended(self) -> list[Ended]:
        """Prompt groups that have ended since this was last asked, in order. The state does not hold them: ask first."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def outstanding(self) -> list[PromptGroup]:
        """Prompt groups that are neither trained nor dropped, in the order of their admission."""
        held = [*self._rolling.prompt_groups(), *self._ready.prompt_groups(), *self._taken.values()]
        return sorted(held, key=lambda prompt_group: prompt_group.number)

    @property
    def outstanding_count(self) -> int:
        """How many prompt groups are neither trained nor dropped."""
        return self._rolling.count + self._ready.count + len(self._taken)

    @property
    def lacking(self) -> int:
        """Groups that the step under way has still to take."""
        return self.groups_per_step - len(self._taken)

    def may_admit(self) -> bool:
        """Whether a prompt group may begin now, so that it could be trained in time.

        Groups of the published version are of use up to step published + max_staleness. Of the places up to
        there, those of ready groups are gone; the rest may be rolled for.
        """
        places = self._places(self.published) - self._ready.count
        return places > 0 and self._rolling.count < places + self.spare

    def admit(self, question: Question) -> PromptGroup:
        """Begin a prompt group. Raises RuntimeError where `may_admit` says no."""
        if not self.may_admit():
            raise RuntimeError(f"Question {question.uid} was admitted although there is no place for it.")
        prompt_group = PromptGroup(self._admitted, question, self.published)
        self._admitted += 1
        self._rolling.add(prompt_group)
        return prompt_group

    def finish_rolling(self, prompt_group: PromptGroup, oldest: int | None, has_spread: bool) -> Reason | None:
        """End the episodes of a prompt group; `oldest` is the version of its oldest token if one is known.

        Returns why it has to be dropped; None if it is now ready. Raises RunError for a token of a version that
        no engine had any more when the prompt group began.
        """
        self._require(prompt_group, Stage.rolling)
        oldest = prompt_group.oldest if oldest is None else oldest
        if oldest < prompt_group.oldest:
            raise RunError(
                f"a rollout engine has answered question {prompt_group.question.uid} with version {oldest} of the policy, "
                f"although it had confirmed version {prompt_group.oldest} before it was asked."
            )
        if not has_spread and self._replaced < self._max_replaced:
            return Reason.no_spread
        self._rolling.remove(prompt_group)
        prompt_group.oldest, prompt_group.stage = oldest, Stage.ready
        self._ready.add(prompt_group)
        return None

    def unschedulable(self) -> list[tuple[PromptGroup, Reason]]:
        """Prompt groups that will not be trained, to be dropped.

        Places go to ready groups, oldest first. A ready group that gets none is unschedulable, the last to become
        ready first; and a rolling prompt group for which those as old or older leave none.
        """
        found: list[tuple[PromptGroup, Reason]] = []
        placed = 0
        for oldest in sorted({*self._rolling.by_oldest, *self._ready.by_oldest}):
            places = max(self._places(oldest), 0)
            reason = Reason.surplus if places else Reason.stale
            ready = self._ready.by_oldest.get(oldest, {})
            excess = max(placed + len(ready) - places, 0)
            found += [(prompt_group, reason) for prompt_group in islice(reversed(ready.values()), excess)]
            placed += len(ready) - excess
            if placed == places:
                rolling = self._rolling.by_oldest.get(oldest, {})
                found += [(prompt_group, reason) for prompt_group in rolling.values()]
        return found

    def take(self, prompt_group: PromptGroup) -> None:
        """Let the step under way train a prompt group.

        Raises RuntimeError if the step has all its groups, or if the group is too old for it.
        """
        self._require(prompt_group, Stage.ready)
        if not self.lacking:
            raise RuntimeError(f"Step {self.version} has its {self.groups_per_step} groups already.")
        if self.version - prompt_group.oldest > self.max_staleness:
            raise RuntimeError(
                f"Step {self.version} would train a token of version {prompt_group.oldest}, older than the "
                f"{self.max_staleness} versions that it may be."
            )
        self._ready.remove(prompt_group)
        prompt_group.stage = Stage.taken
        self._taken[prompt_group.number] = prompt_group

    def drop(self, prompt_group: PromptGroup, reason: Reason) -> None:
        """End a prompt group that is not going to be trained."""
        self._require(prompt_group, Stage.rolling, Stage.ready, Stage.taken)
        if prompt_group.stage is Stage.rolling:
            self._rolling.remove(prompt_group)
        elif prompt_group.stage is Stage.ready:
            self._ready.remove(prompt_group)
        else:
            del self._taken[prompt_group.number]
        prompt_group.stage = Stage.dropped
        self._ended.append(Ended(prompt_group.number, prompt_group.question.uid, reason))
        self.dropped[reason] += 1
        self._replaced += reason is Reason.no_spread

    def close_step(self) -> None:
        """The optimiser has stepped on all that was taken. Raises RuntimeError if groups are lacking."""
        if self.lacking:
            raise RuntimeError(f"Step {self.version} is closed although it lacks {self.lacking} groups.")
        for prompt_group in self._taken.values():
            prompt_group.stage = Stage.trained
            self._ended.append(Ended(prompt_group.number, prompt_group.question.uid, Stage.trained))
        self._taken = {}
        self._replaced = 0
        self.version += 1

    def publish(self, version: int) -> None:
        """Every engine has `version` now. Raises RuntimeError for one that is not newer, or does not exist yet."""
        if not self.published < version <= self.version:
            raise RuntimeError(
                f"Version {version} was published after {self.published}, while the actor has {self.version}."
            )
        self.published = version

    def _places(self, oldest: int) -> int:
        """Places left for a group whose oldest token is of version `oldest`; below 1 for one that is too old."""
        end = oldest + self.max_staleness + 1
        if self._steps is not None:
            end = min(end, self._steps)
        return (end - self.version) * self.groups_per_step - len(self._taken)

    def _require(self, prompt_group: PromptGroup, *stages: Stage) -> None:
        if prompt_group.stage not in stages:
            raise RuntimeError(
                f"Prompt group {prompt_group.number} of question {prompt_group.question.uid} is {prompt_group.stage}, not {' or '.join(stages)}."
            )


def _saved(prompt_group: PromptGroup) -> PromptGroupState:
    return PromptGroupState(prompt_group.number, prompt_group.question, prompt_group.oldest)


class _VersionBuckets:
    """Prompt groups by the version of their oldest token: few versions, so that no decision walks over all of them."""

    def __init__(self) -> None:
        self.by_oldest: dict[int, dict[int, PromptGroup]] = {}
        """In the order in which they were added; no version without one."""
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
