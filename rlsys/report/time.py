"""Where the time of every step went: of each group, what it did, and what it waited for while it did nothing. Pure.

Invariant: what a group did and waited for is disjoint and fills the step's window to the nanosecond. At every instant
the first of these holds:

1. The group works. Engines work while they generate or answer an evaluation; episodes between their turns count too.
2. Its episodes search and none generates: engines wait for search, though a group of rollouts is under way.
3. Weights are transferred, or groups change places on shared devices: it waits for that.
4. It waits for what goes on nearest before it in the cycle of a step (`activity.upstream`).
5. It waits for a checkpoint, for an evaluation, or for what was not traced.

So a cause says what went on meanwhile, not what would have to be faster: that is the critical path's to say (`path.py`).
A group works while any of its lanes does; with several, such as engines, each lane has an account of its own as well, in
which the other lanes are somebody else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.observe.spans import (
    Interval,
    Span,
    common_intervals,
    merge_intervals,
    without_intervals,
)
from rlsys.observe.timeline import StepTimeline
from rlsys.report.activity import (
    DIGITS,
    GROUPS,
    TRANSFER_SPAN,
    Activity,
    activity_of,
    added,
    rounded,
    upstream,
)
from rlsys.report.path import CriticalPath, critical_path, seconds_of

WORK = (
    Activity.training,
    Activity.values,
    Activity.logprob,
    Activity.generation,
    Activity.evaluation,
    Activity.checkpoint,
)
"""What a group may do, the first of which counts where it does several."""
NAMED_CAUSES = 3
"""In a sentence."""

_Claim = tuple[bool, Activity, Sequence[Interval]]
"""Whether it is the group's own work, what it is, and when it went on."""


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of somebody's time, by what he did or waited for; only what is above 0."""

    busy: Mapping[Activity, float] = field(default_factory=dict)
    waits: Mapping[Activity, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All of it: the window's length."""
        return sum(self.busy.values()) + sum(self.waits.values())

    def __add__(self, other: TimeUse) -> TimeUse:
        """Both, one after the other."""
        return TimeUse(added([self.busy, other.busy]), added([self.waits, other.waits]))


@dataclass(frozen=True, slots=True)
class GroupTime:
    """A group's time."""

    use: TimeUse
    lanes: Mapping[str, TimeUse]
    """Of each lane, where there are several."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time."""

    step: int
    seconds: float
    groups: Mapping[str, GroupTime]
    path: CriticalPath


@dataclass(frozen=True, slots=True)
class TimeReport:
    """All steps, and their sum."""

    steps: tuple[StepTime, ...]
    groups: Mapping[str, TimeUse]
    """Over all steps."""
    path: Mapping[Activity, float]
    """Seconds of all critical paths."""

    def sentences(self) -> list[str]:
        """Where the run waits and what decides the length of its steps, in plain words; none without a step."""
        found = [_sentence(group, use) for group, use in self.groups.items() if use.seconds]
        total = sum(self.path.values())
        if total:
            shares = ", ".join(_shares(self.path, total))
            found.append(f"A step takes as long as its critical path, of which most is {shares}.")
        return found


def time_report(steps: Iterable[StepTimeline]) -> TimeReport:
    """The report over `steps`, in their order, which are gone through once. A group that worked in one is in all."""
    there: set[str] = set()
    accounts: list[StepTime] = []
    for step in steps:
        there.update(span.group for span in step.spans)
        accounts.append(step_time(step))
    groups = [group for group in GROUPS if group in there]
    return TimeReport(
        tuple(replace(one, groups={group: one.groups[group] for group in groups}) for one in accounts),
        {group: sum((one.groups[group].use for one in accounts), start=TimeUse()) for group in groups},
        added(account.path.seconds for account in accounts),
    )


def step_time(step: StepTimeline) -> StepTime:
    """The account of one step, of all of `GROUPS`, whether they are part of the run or not."""
    window = step.window
    work = _Work(step.spans, window)
    return StepTime(
        step.step,
        (window[1] - window[0]) / 1e9,
        {group: _group_time(group, work, window) for group in GROUPS},
        critical_path(step),
    )


def as_json(report: TimeReport) -> dict[str, Any]:
    """The report as JSON holds it, with what each activity is called; seconds to the microsecond."""
    return {
        "activities": {activity.value: activity.words for activity in Activity},
        "sentences": report.sentences(),
        "groups": {group: _use_as_json(use) for group, use in report.groups.items()},
        "path": rounded(report.path),
        "steps": [
            {
                "step": one.step,
                "seconds": round(one.seconds, DIGITS),
                "groups": {
                    group: {
                        **_use_as_json(time.use),
                        "lanes": {lane: _use_as_json(use) for lane, use in time.lanes.items()},
                    }
                    for group, time in one.groups.items()
                },
                "path": one.path.as_json(),
            }
            for one in report.steps
        ],
    }


class _Work:
    """Who did what in a window: intervals that are disjoint and in order."""

    def __init__(self, spans: Iterable[Span], window: Interval) -> None:
        found: dict[tuple[str, str, Activity], list[Interval]] = defaultdict(list)
        transfers: list[Interval] = []
        for span in spans:
            part = max(span.start_ns, window[0]), min(span.end_ns, window[1])
            found[span.group, span.lane, activity_of(span)].append(part)
            if span.name == TRANSFER_SPAN:
                transfers.append(part)
        self._of_lane = {key: merge_intervals(parts) for key, parts in found.items()}
        self.transfers = merge_intervals(transfers)
        self._anywhere: dict[Activity, list[Interval]] = {
            activity: merge_intervals(
                part for (_, _, other), parts in self._of_lane.items() if other is activity for part in parts
            )
            for activity in Activity
        }

    def anywhere(self, activity: Activity) -> list[Interval]:
        """When anybody did so."""
        return self._anywhere[activity]

    def lanes(self, group: str) -> list[str]:
        """Of `group`, in their order."""
        return sorted({lane for owner, lane, _ in self._of_lane if owner == group})

    def own(self, group: str, lane: str | None, activity: Activity) -> list[Interval]:
        """When `group`, or this lane of it, did so."""
        if lane is not None:
            return self._of_lane.get((group, lane, activity), [])
        return merge_intervals(
            part
            for (owner, _, other), parts in self._of_lane.items()
            if owner == group and other is activity
            for part in parts
        )


def _group_time(group: str, work: _Work, window: Interval) -> GroupTime:
    lanes = work.lanes(group)
    return GroupTime(
        _use(_claims(group, None, work), window),
        {lane: _use(_claims(group, lane, work), window) for lane in lanes} if len(lanes) > 1 else {},
    )


def _claims(group: str, lane: str | None, work: _Work) -> Iterator[_Claim]:
    """All that may have kept `group`, or this lane of it, in order of precedence."""
    for activity in WORK:
        yield True, activity, work.own(group, lane, activity)
    yield False, Activity.search, work.own(group, lane, Activity.search)
    yield True, Activity.rollout, work.own(group, lane, Activity.rollout)
    yield False, Activity.sync, work.transfers
    for activity in (Activity.switch, *upstream(group), Activity.checkpoint, Activity.evaluation):
        yield False, activity, work.anywhere(activity)


def _use(claims: Iterable[_Claim], window: Interval) -> TimeUse:
    """Hand `window` out: every claim gets what those before it have left."""
    left = merge_intervals([window])
    uses: dict[bool, list[dict[Activity, float]]] = {True: [], False: []}
    for own, activity, intervals in claims:
        uses[own].append({activity: seconds_of(common_intervals(left, intervals))})
        left = without_intervals(left, intervals)
    return TimeUse(added(uses[True]), added([*uses[False], {Activity.other: seconds_of(left)}]))


def _sentence(group: str, use: TimeUse) -> str:
    """The group's time in words, the longest waits first."""
    worked = sum(use.busy.values()) / use.seconds
    waits = _shares(use.waits, use.seconds)
    waited = f" and waited for {', '.join(waits)}" if waits else ""
    return f"The {group} group worked {worked:.0%} of the time{waited}."


def _shares(seconds: Mapping[Activity, float], total: float) -> list[str]:
    """The largest shares of `total`, of at least a hundredth."""
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:NAMED_CAUSES]
    return [f"{activity.words} ({spent / total:.0%})" for activity, spent in largest if spent >= total / 100]


def _use_as_json(use: TimeUse) -> dict[str, dict[str, float]]:
    return {"busy": rounded(use.busy), "waits": rounded(use.waits)}
