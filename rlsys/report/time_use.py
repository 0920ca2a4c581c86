"""Breaks down each step's time: work and waits of every group, and the critical path. Pure.

Work and waits of a group are disjoint and fill the step's window to the nanosecond. A step is a cycle (`_CYCLE`):
episodes, rewards, scores, training, weight sync, episodes again. Each instant of a group is attributed to the first of
these that applies:

1. The group works. Engines work while they generate or evaluate; episodes between turns count as work too.
2. The group's episodes search and none generates: the group waits for search.
3. Weights are transferred or colocated groups switch, which blocks all groups: the group waits for the transfer or
   the switch.
4. The group waits for the running activity that most closely precedes its own in the cycle. An actor waits for
   log-probs if some are being computed, else for rewards, else for generation, and so on.
5. The group waits for a checkpoint or an evaluation, which rarely block a group, or for untraced work.

The cause of a wait is therefore an activity during the wait, which need not be the activity to speed up. The critical
path shows what to speed up: it is the chain of spans up to the step's end, in which each span waited for the previous
span. A group works while any of its lanes works. With several lanes, such as engines, each lane also has a breakdown of
its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from rlsys.observe.records import StepTimeline
from rlsys.observe.spans import (
    GENERATE_SPAN,
    QUESTIONS,
    ROLLOUT_SPAN,
    SEARCH_SPAN,
    TOOL_STAGE,
    Interval,
    Span,
    common_intervals,
    merge_intervals,
    without_intervals,
)


class Activity(StrEnum):
    """Activity of a group, as work or as the cause of a wait."""

    generation = "generation"
    search = "search"
    """Episodes search and none generates."""
    tool = TOOL_STAGE
    """Episodes wait for tools, and none generates or searches."""
    rollout = "rollout"
    """Episodes are in flight but neither generate, search nor call a tool, or their turns were not recorded (dropped groups)."""
    reward = "reward"
    logprob = "logprob"
    values = "values"
    training = "training"
    sync = "sync"
    switch = "switch"
    checkpoint = "checkpoint"
    evaluation = "evaluation"
    other = "other"
    """No span: the driver's own work."""


_WORDS = {activity: activity.value for activity in Activity} | {
    Activity.rollout: "episodes between turns",
    Activity.reward: "rewards",
    Activity.logprob: "log-probs",
    Activity.sync: "weight sync",
    Activity.switch: "a switch of colocated groups",
    Activity.checkpoint: "a checkpoint",
    Activity.evaluation: "an evaluation",
    Activity.other: "untraced work",
}
"""Activity -> label, for "working: ..." and "waiting for ..."."""
_STAGES = (Activity.reward, Activity.logprob, Activity.values, Activity.sync, Activity.switch, Activity.checkpoint)
_DONE_IN: dict[str, Activity] = {activity.value: activity for activity in _STAGES} | {
    GENERATE_SPAN: Activity.generation,
    SEARCH_SPAN: Activity.search,
    TOOL_STAGE: Activity.tool,
    ROLLOUT_SPAN: Activity.rollout,
    "eval.episode": Activity.evaluation,
    "train": Activity.training,
}
"""Name or stage of a span -> its activity."""
_CYCLE = (
    (Activity.generation, Activity.search, Activity.tool, Activity.rollout),
    (Activity.reward,),
    (Activity.logprob, Activity.values),
    (Activity.training,),
    (Activity.sync,),
)
_ORDER = {Activity.rollout: 0, Activity.reward: 1, Activity.logprob: 2, Activity.values: 2, Activity.training: 3}
"""Activity -> position in the order in which a prompt group passes through the activities."""
_PLACE = {"rollout": 0, "inference": 2, "critic": 3, "actor": 3}
GROUPS = ("actor", "critic", "inference", "rollout")
"""Groups with a time breakdown."""
_TRANSFER_SPAN, _SWITCH_SPAN, _SCORES_SPAN = "sync.transfer", "sync.switch", "logprob.compute"
_APPLY_SPAN = "train.apply"
_DERIVED = (Activity.generation, Activity.search, Activity.tool)
"""Activities of the spans derived from episodes."""

_Claim = tuple[bool, Activity, Sequence[Interval]]
"""True for the group's own work; the activity; its intervals."""


@dataclass(frozen=True, slots=True)
class Link:
    """A span on the critical path, cut to the step's window and to the part that the path waited for."""

    name: str
    group: str
    lane: str
    start_s: float
    """Start, relative to the step's start."""
    parts: Mapping[Activity, float]
    """Seconds by activity; the span of a prompt group's episodes has several activities."""
    waited_s: float
    """Gap after the end of the previous link, or after the step's start."""
    questions: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Links in order of time, and the seconds from the last link's end (or the step's start) to the step's end."""

    links: tuple[Link, ...]
    rest_s: float

    @property
    def seconds(self) -> dict[Activity, float]:
        """Seconds of the step by activity on the path; gaps count as `other`."""
        gaps = self.rest_s + sum(link.waited_s for link in self.links)
        return _added([*(link.parts for link in self.links), {Activity.other: gaps}])


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of work and of waits, by activity; only entries above 0."""

    busy: Mapping[Activity, float] = field(default_factory=dict)
    waits: Mapping[Activity, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Total, which is the length of the window."""
        return sum(self.busy.values()) + sum(self.waits.values())


@dataclass(frozen=True, slots=True)
class GroupTime:
    """Time use of a group, and of each lane if it has several."""

    use: TimeUse
    lanes: Mapping[str, TimeUse]


@dataclass(frozen=True, slots=True)
class StepTime:
    step: int
    seconds: float
    groups: Mapping[str, GroupTime]
    path: CriticalPath


@dataclass(frozen=True, slots=True)
class TimeReport:
    """Time breakdown of all steps, with totals by group and along the critical paths."""

    steps: tuple[StepTime, ...]
    groups: Mapping[str, TimeUse]
    path: Mapping[Activity, float]

    def sentences(self) -> list[str]:
        """Return one sentence per group about its waits, and one about the critical path; empty without a step."""
        lines = []
        for group, use in self.groups.items():
            if use.seconds:
                waits = _shares(use.waits, use.seconds)
                waited = f" and waited for {', '.join(waits)}" if waits else ""
                worked = sum(use.busy.values()) / use.seconds
                lines.append(f"The {group} group worked {worked:.0%} of the time{waited}.")
        total = sum(self.path.values())
        if total:
            shares = ", ".join(_shares(self.path, total))
            lines.append(f"The critical path, which sets the length of a step, is mostly {shares}.")
        return lines


def time_report(steps: Iterable[StepTimeline]) -> TimeReport:
    """Return the report over `steps`, in order. A group with a span in any step is listed in all steps."""
    there: set[str] = set()
    accounts: list[StepTime] = []
    for step in steps:
        there.update(span.group for span in step.spans)
        window = step.window
        work = _Work(step.spans, window)
        groups = {group: _group_time(group, work, window) for group in GROUPS}
        accounts.append(StepTime(step.step, (window[1] - window[0]) / 1e9, groups, critical_path(step)))
    uses = {group: [account.groups[group].use for account in accounts] for group in GROUPS if group in there}
    return TimeReport(
        tuple(replace(account, groups={group: account.groups[group] for group in uses}) for account in accounts),
        {group: TimeUse(_added(u.busy for u in of), _added(u.waits for u in of)) for group, of in uses.items()},
        _added(account.path.seconds for account in accounts),
    )


def as_json(report: TimeReport) -> dict[str, Any]:
    """Return the report in JSON types, with a label per activity; seconds rounded to microseconds."""
    steps = [
        {
            "step": account.step,
            "seconds": account.seconds,
            "groups": {
                group: {**asdict(time.use), "lanes": asdict(time)["lanes"]} for group, time in account.groups.items()
            },
            "path": {"seconds": account.path.seconds, **asdict(account.path)},
        }
        for account in report.steps
    ]
    activities = {activity.value: _WORDS[activity] for activity in Activity}
    groups = {group: asdict(use) for group, use in report.groups.items()}
    known = {"activities": activities, "sentences": report.sentences(), "groups": groups, "path": report.path}
    rounded: dict[str, Any] = _rounded({**known, "steps": steps})
    return rounded


def _rounded(value: Any) -> Any:
    """Return `value` in JSON types, floats rounded to 6 digits."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def _added(parts: Iterable[Mapping[Activity, float]]) -> dict[Activity, float]:
    """Sum by activity, in order of first appearance; drops entries that are not above 0."""
    sums: dict[Activity, float] = {}
    for part in parts:
        for activity, seconds in part.items():
            if seconds > 0:
                sums[activity] = sums.get(activity, 0.0) + seconds
    return sums


def _shares(seconds: Mapping[Activity, float], total: float) -> list[str]:
    """Format the three largest shares of `total` of at least 1 %."""
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    return [f"{_WORDS[activity]} ({spent / total:.0%})" for activity, spent in largest if spent >= total / 100]


def _activity_of(span: Span) -> Activity:
    return _DONE_IN.get(span.name) or _DONE_IN.get(span.stage, Activity.other)


def _seconds_of(intervals: Iterable[Interval]) -> float:
    """Return the summed length, in seconds, of `intervals` in ns."""
    return sum(end - start for start, end in intervals) / 1e9


class _Work:
    """Intervals of work within a window, by group, lane and activity; disjoint and in order."""

    def __init__(self, spans: Iterable[Span], window: Interval) -> None:
        parts: dict[tuple[str, str, Activity], list[Interval]] = defaultdict(list)
        transfers: list[Interval] = []
        for span in spans:
            part = max(span.start_ns, window[0]), min(span.end_ns, window[1])
            parts[span.group, span.lane, _activity_of(span)].append(part)
            if span.name == _TRANSFER_SPAN:
                transfers.append(part)
        self._of_lane = {key: merge_intervals(of_lane) for key, of_lane in parts.items()}
        self.transfers = merge_intervals(transfers)
        self.anywhere = {activity: self._of(None, activity) for activity in Activity}
        """Activity -> intervals in which any group worked on it."""

    def lanes(self, group: str) -> list[str]:
        return sorted({lane for owner, lane, _ in self._of_lane if owner == group})

    def own(self, group: str, lane: str | None, activity: Activity) -> list[Interval]:
        return self._of(group, activity) if lane is None else self._of_lane.get((group, lane, activity), [])

    def _of(self, group: str | None, activity: Activity) -> list[Interval]:
        return merge_intervals(
            part
            for (owner, _, other), parts in self._of_lane.items()
            if other is activity and group in (None, owner)
            for part in parts
        )


def _group_time(group: str, work: _Work, window: Interval) -> GroupTime:
    lanes = work.lanes(group) if len(work.lanes(group)) > 1 else []
    of_lanes = {lane: _use(_claims(group, lane, work), window) for lane in lanes}
    return GroupTime(_use(_claims(group, None, work), window), of_lanes)


def _claims(group: str, lane: str | None, work: _Work) -> Iterator[_Claim]:
    """Yield everything that the time of `group`, or of its `lane`, may be attributed to, in order of precedence."""
    training = (Activity.training, Activity.values, Activity.logprob)
    for activity in (*training, Activity.generation, Activity.evaluation, Activity.checkpoint):
        yield True, activity, work.own(group, lane, activity)
    for waiting in (Activity.search, Activity.tool):
        yield False, waiting, work.own(group, lane, waiting)
    yield True, Activity.rollout, work.own(group, lane, Activity.rollout)
    yield False, Activity.sync, work.transfers
    # Activities before the group's own in the cycle, nearest first, once around.
    layers = [_CYCLE[(_PLACE[group] - steps) % len(_CYCLE)] for steps in range(1, len(_CYCLE) + 1)]
    for activity in (Activity.switch, *chain.from_iterable(layers), Activity.checkpoint, Activity.evaluation):
        yield False, activity, work.anywhere[activity]


def _use(claims: Iterable[_Claim], window: Interval) -> TimeUse:
    """Distribute `window` over `claims`: each claim gets the part of its time that earlier claims left."""
    left = merge_intervals([window])
    uses: dict[bool, list[dict[Activity, float]]] = {True: [], False: []}
    for own, activity, intervals in claims:
        uses[own].append({activity: _seconds_of(common_intervals(left, intervals))})
        left = without_intervals(left, intervals)
    return TimeUse(_added(uses[True]), _added([*uses[False], {Activity.other: _seconds_of(left)}]))


def critical_path(step: StepTimeline) -> CriticalPath:
    """Return the critical path of `step`; no links if its window has no span that ends a step.

    The path is walked backwards from the last weight transfer, weight switch or optimiser step of the step. A span's
    predecessor is the one that ended last before it began, among those allowed by `leads_to`. Time between links, such
    as the driver's own work, is `other`. The path covers the window exactly once: shortening a span on it could shorten
    the step.
    """
    window = step.window
    spans = [span for span in step.spans if window[0] < span.end_ns <= window[1] and _activity_of(span) not in _DERIVED]
    spans.sort(key=lambda span: (span.end_ns, span.start_ns))
    derived = [span for span in step.spans if _activity_of(span) in _DERIVED]
    links, end = [], window[0]
    for span, begin in reversed(_chain(spans, step)):
        start = max(begin, window[0])
        parts = _parts(span, (start, span.end_ns), derived)
        begun_s, waited_s = (start - window[0]) / 1e9, (start - end) / 1e9
        links.append(Link(span.name, span.group, span.lane, begun_s, parts, waited_s, _questions(span)))
        end = span.end_ns
    return CriticalPath(tuple(links), (window[1] - end) / 1e9)


def leads_to(before: Span, after: Span, scored_first: bool = False) -> bool:
    """True if `after` may have waited for `before`, which ended earlier.

    `after` may wait for its input, for an earlier call of its group, for weights, for free engine slots, or until a
    colocated group frees the devices. The actor may wait for the critic, and vice versa; with
    `scored_first`, the optimiser steps of both may also wait for scores of any question.
    """
    done, due = _activity_of(before), _activity_of(after)
    if Activity.switch in (done, due) or done is due is Activity.training:
        return True
    match after.name:
        case "rollout.group":
            return before.name in (ROLLOUT_SPAN, "eval.episode", _SWITCH_SPAN)
        case "sync.transfer":
            # A transfer waits for the switch to the previous version, and for the log-probs in flight.
            return before.name in (_APPLY_SPAN, _SCORES_SPAN, _SWITCH_SPAN)
        case "sync.switch":
            return before.name == _TRANSFER_SPAN
        case "train.apply":
            return scored_first and done in (Activity.logprob, Activity.values)
        case "logprob.compute" if before.name == _TRANSFER_SPAN:
            return True
    same_group = before.group == after.group and after.group != "driver"
    return same_group or _feeds(before, after)


def _feeds(before: Span, after: Span) -> bool:
    """True if some episode may have passed from `before` to `after`; a span without questions matches any span."""
    places = _ORDER.get(_activity_of(before)), _ORDER.get(_activity_of(after))
    if places[0] is None or places[1] is None or places[0] >= places[1] or "error" in before.args:
        return False
    known, needed = _questions(before), _questions(after)
    return not known or not needed or not set(known).isdisjoint(needed)


def _chain(spans: Sequence[Span], step: StepTimeline) -> list[tuple[Span, int]]:
    """Return the path's spans from last to first, each with the time (ns) from which the path waits for it.

    `spans` must be sorted by end, and end within the window.
    """
    ends = [span.end_ns for span in spans]
    # A span of zero length ends when it begins; the walk still terminates, because `at` always decreases.
    at = len(spans) - 1
    last = (_APPLY_SPAN, _TRANSFER_SPAN, _SWITCH_SPAN)
    while at >= 0 and not (spans[at].name in last and spans[at].args.get("step") == step.step):
        at -= 1
    scored_first = any(span.name == "values.compute" for span in spans)
    chain: list[tuple[Span, int]] = []
    while at >= 0:
        span = spans[at]
        chain.append((span, span.start_ns))
        if span.start_ns <= step.window[0]:
            break
        at = min(at, bisect_right(ends, span.start_ns)) - 1
        while at >= 0 and not leads_to(spans[at], span, scored_first):
            at -= 1
        if span.name == _TRANSFER_SPAN and at >= 0 and spans[at].name == _SCORES_SPAN:
            held_up, at = _held_up(spans, at)
            chain += held_up
    return chain


def _held_up(spans: Sequence[Span], at: int) -> tuple[list[tuple[Span, int]], int]:
    """Return the log-prob spans up to index `at` that delayed a transfer, and the index where the path continues.

    In an async schedule, a transfer waits for log-probs of groups that a later step trains. The step waits for them
    only from the time the transfer could have begun: the end of its last optimiser step or of the last switch,
    whichever is later. The path continues with that optimiser step or switch, not with another step's episodes. If
    neither was recorded, returns ([], `at`).
    """
    free = next((place for place in range(at, -1, -1) if spans[place].name in (_APPLY_SPAN, _SWITCH_SPAN)), None)
    if free is None:
        return [], at
    found, until = [], spans[at].end_ns
    for span in (spans[place] for place in range(at, free, -1)):
        begin = max(span.start_ns, spans[free].end_ns)
        if span.name == _SCORES_SPAN and begin < span.end_ns <= until:
            found.append((span, begin))
            until = begin
    return found, free


def _parts(span: Span, within: Interval, derived: Iterable[Span]) -> dict[Activity, float]:
    """Return the seconds of `span` in `within` by activity, splitting episodes into generation, search, tools and the rest.

    A weight switch with `on_update=finish` waits for the episodes in flight; only its remainder counts as weight sync.
    """
    own: dict[Activity, list[Interval]] = {activity: [] for activity in _DERIVED}
    if span.name in (ROLLOUT_SPAN, _SWITCH_SPAN):
        for inner in derived:
            its_own = inner.lane == span.lane and inner.args.get("question") == span.args.get("question")
            if its_own or span.name == _SWITCH_SPAN:
                own[_activity_of(inner)].append((inner.start_ns, inner.end_ns))
    left, parts = merge_intervals([within]), dict[Activity, float]()
    for activity, intervals in own.items():
        taken = merge_intervals(intervals)
        parts[activity] = _seconds_of(common_intervals(left, taken))
        left = without_intervals(left, taken)
    parts[_activity_of(span)] = _seconds_of(left)
    return _added([parts])


def _questions(span: Span) -> tuple[str, ...]:
    """Return the uids of the questions that `span` worked on; empty if not recorded."""
    many, one = span.args.get(QUESTIONS), span.args.get("question")
    if isinstance(many, list):
        return tuple(many)
    return (one,) if isinstance(one, str) else ()
