"""Accounts for the time of every step: of each group, what it did and what it waited for, and the critical path. Pure.

What a group did and waited for is disjoint and fills the step's window to the nanosecond. Every group is somewhere in
the cycle of a step: episodes, rewards, scores, training, new weights, episodes again. At every instant the first of
these holds:

1. The group works. Engines work while they generate or answer an evaluation; episodes between their turns count too.
2. Its episodes search and none generates: engines wait for search, though a group of rollouts is under way.
3. Weights are transferred, or groups change places on shared devices, which stops everybody: it waits for that.
4. It waits for what goes on nearest before it in the cycle (`_CYCLE`): an actor for log-probs if some are being
   computed, else for rewards, else for generation, and so forth.
5. It waits for a checkpoint or for an evaluation, which are in nobody's way as a rule, or for what was not traced.

So a cause says what went on meanwhile, not what would have to be faster: that is the critical path's to say, the chain
of spans, each of which waited for the one before, that ends with the step. A group works while any of its lanes does;
with several, such as engines, each lane has an account of its own as well, in which the other lanes are somebody else.
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
    Interval,
    Span,
    common_intervals,
    merge_intervals,
    without_intervals,
)


class Activity(StrEnum):
    """What somebody does, or waits for."""

    generation = "generation"
    search = "search"
    """An episode of some group searches, and none of any group generates."""
    rollout = "rollout"
    """Episodes are under way and neither generate nor search, or nobody noted which (groups that were given up)."""
    reward = "reward"
    logprob = "logprob"
    values = "values"
    training = "training"
    sync = "sync"
    switch = "switch"
    checkpoint = "checkpoint"
    evaluation = "evaluation"
    other = "other"
    """Nothing that has a span: the driver's own work."""


_WORDS = {activity: activity.value for activity in Activity} | {
    Activity.rollout: "episodes between turns",
    Activity.reward: "rewards",
    Activity.logprob: "log-probs",
    Activity.sync: "new weights",
    Activity.switch: "a change of places on the devices",
    Activity.checkpoint: "a checkpoint",
    Activity.evaluation: "an evaluation",
    Activity.other: "what was not traced",
}
"""For people: "waits for ..."."""
_STAGES = (Activity.reward, Activity.logprob, Activity.values, Activity.sync, Activity.switch, Activity.checkpoint)
_DONE_IN: dict[str, Activity] = {activity.value: activity for activity in _STAGES} | {
    GENERATE_SPAN: Activity.generation,
    SEARCH_SPAN: Activity.search,
    ROLLOUT_SPAN: Activity.rollout,
    "eval.episode": Activity.evaluation,
    "train": Activity.training,
}
"""Name of a span, or its stage -> what is done in it."""
_CYCLE = (
    (Activity.generation, Activity.search, Activity.rollout),
    (Activity.reward,),
    (Activity.logprob, Activity.values),
    (Activity.training,),
    (Activity.sync,),
)
_ORDER = {Activity.rollout: 0, Activity.reward: 1, Activity.logprob: 2, Activity.values: 2, Activity.training: 3}
"""A group of episodes passes through these one after the other."""
_PLACE = {"rollout": 0, "inference": 2, "critic": 3, "actor": 3}
GROUPS = ("actor", "critic", "inference", "rollout")
"""Groups whose time is accounted for."""
_TRANSFER_SPAN, _SWITCH_SPAN, _SCORES_SPAN = "sync.transfer", "sync.switch", "logprob.compute"
_APPLY_SPAN = "train.apply"
_DERIVED = (GENERATE_SPAN, SEARCH_SPAN)

_Claim = tuple[bool, Activity, Sequence[Interval]]
"""Whether it is the group's own work, what it is, and when it went on."""


@dataclass(frozen=True, slots=True)
class Link:
    """A span on the path, cut to the window and to the part that the path waited for."""

    name: str
    group: str
    lane: str
    start_s: float
    """Since the step began."""
    parts: Mapping[Activity, float]
    """Its seconds, by what was done in them; more than one for episodes."""
    waited_s: float
    """From the end of the link before, or the step's begin."""
    questions: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Links in order of time, and seconds from the end of the last one, or the begin of the step, to its end."""

    links: tuple[Link, ...]
    rest_s: float

    @property
    def seconds(self) -> dict[Activity, float]:
        """The step's length by what decided it."""
        gaps = self.rest_s + sum(link.waited_s for link in self.links)
        return _added([*(link.parts for link in self.links), {Activity.other: gaps}])


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of somebody's time, by what they did or waited for; only what is above 0."""

    busy: Mapping[Activity, float] = field(default_factory=dict)
    waits: Mapping[Activity, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All of it: the window's length."""
        return sum(self.busy.values()) + sum(self.waits.values())


@dataclass(frozen=True, slots=True)
class GroupTime:
    """A group's time, and that of each lane, where there are several."""

    use: TimeUse
    lanes: Mapping[str, TimeUse]


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time."""

    step: int
    seconds: float
    groups: Mapping[str, GroupTime]
    path: CriticalPath


@dataclass(frozen=True, slots=True)
class TimeReport:
    """All steps, and over all of them the groups' time and the seconds of the critical paths."""

    steps: tuple[StepTime, ...]
    groups: Mapping[str, TimeUse]
    path: Mapping[Activity, float]

    def sentences(self) -> list[str]:
        """Where the run waits and what decides the length of its steps, in plain words; none without a step."""
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
            lines.append(f"A step takes as long as its critical path, of which most is {shares}.")
        return lines


def time_report(steps: Iterable[StepTimeline]) -> TimeReport:
    """The report over `steps`, in their order, which are gone through once. A group that worked in one is in all."""
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
    """The report as JSON holds it, with what each activity is called; seconds to the microsecond."""
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
    """`value` as JSON holds it, seconds to the microsecond."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def _added(parts: Iterable[Mapping[Activity, float]]) -> dict[Activity, float]:
    """Sums by activity, in the order in which each comes first; only what is above 0."""
    sums: dict[Activity, float] = {}
    for part in parts:
        for activity, seconds in part.items():
            if seconds > 0:
                sums[activity] = sums.get(activity, 0.0) + seconds
    return sums


def _shares(seconds: Mapping[Activity, float], total: float) -> list[str]:
    """The largest shares of `total`, of at least a hundredth."""
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    return [f"{_WORDS[activity]} ({spent / total:.0%})" for activity, spent in largest if spent >= total / 100]


def _activity_of(span: Span) -> Activity:
    return _DONE_IN.get(span.name) or _DONE_IN.get(span.stage, Activity.other)


def _seconds_of(intervals: Iterable[Interval]) -> float:
    """Length of all `intervals` together, which are in ns."""
    return sum(end - start for start, end in intervals) / 1e9


class _Work:
    """Who did what in a window: intervals that are disjoint and in order."""

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
        """When anybody did so."""

    def lanes(self, group: str) -> list[str]:
        """Of `group`, in their order."""
        return sorted({lane for owner, lane, _ in self._of_lane if owner == group})

    def own(self, group: str, lane: str | None, activity: Activity) -> list[Interval]:
        """When `group`, or this lane of it, did so."""
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
    """All that may have kept `group`, or this lane of it, in order of precedence."""
    training = (Activity.training, Activity.values, Activity.logprob)
    for activity in (*training, Activity.generation, Activity.evaluation, Activity.checkpoint):
        yield True, activity, work.own(group, lane, activity)
    yield False, Activity.search, work.own(group, lane, Activity.search)
    yield True, Activity.rollout, work.own(group, lane, Activity.rollout)
    yield False, Activity.sync, work.transfers
    # What is before the group in the cycle, the nearest first; once around.
    layers = [_CYCLE[(_PLACE[group] - steps) % len(_CYCLE)] for steps in range(1, len(_CYCLE) + 1)]
    for activity in (Activity.switch, *chain.from_iterable(layers), Activity.checkpoint, Activity.evaluation):
        yield False, activity, work.anywhere[activity]


def _use(claims: Iterable[_Claim], window: Interval) -> TimeUse:
    """Hand `window` out: every claim gets what those before it have left."""
    left = merge_intervals([window])
    uses: dict[bool, list[dict[Activity, float]]] = {True: [], False: []}
    for own, activity, intervals in claims:
        uses[own].append({activity: _seconds_of(common_intervals(left, intervals))})
        left = without_intervals(left, intervals)
    return TimeUse(_added(uses[True]), _added([*uses[False], {Activity.other: _seconds_of(left)}]))


def critical_path(step: StepTimeline) -> CriticalPath:
    """The path of `step`; without links if nothing that a step ends with was recorded in its window.

    It is walked from the end. The step ends with the last of its weights' transfer, its switch or its optimiser steps;
    what a span waited for is, of all that `leads_to` says it may have waited for, what ended last before it began. Time
    that no span of the chain covers, such as the driver's own, is `other`. So the path covers the window exactly once:
    had a span on it been shorter, with the rest as it was, the step could have been.
    """
    window = step.window
    spans = [span for span in step.spans if window[0] < span.end_ns <= window[1] and span.name not in _DERIVED]
    spans.sort(key=lambda span: (span.end_ns, span.start_ns))
    derived = [span for span in step.spans if span.name in _DERIVED]
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

    It may for its own input, for its group (calls of one follow each other), for weights, for room in the engines, and
    on shared devices for whoever was there. Learners wait for each other; with `scored_first` their optimiser steps may
    also wait for scores, of whatever question.
    """
    done, due = _activity_of(before), _activity_of(after)
    if Activity.switch in (done, due) or done is due is Activity.training:
        return True
    match after.name:
        case "rollout.group":
            return before.name in (ROLLOUT_SPAN, "eval.episode", _SWITCH_SPAN)
        case "sync.transfer":
            # What is being computed with the version before is finished first, and its switch too.
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
    """True if some episode may have come from `before` to `after`; of spans without questions, any may have."""
    places = _ORDER.get(_activity_of(before)), _ORDER.get(_activity_of(after))
    if places[0] is None or places[1] is None or places[0] >= places[1] or "error" in before.args:
        return False
    known, needed = _questions(before), _questions(after)
    return not known or not needed or not set(known).isdisjoint(needed)


def _chain(spans: Sequence[Span], step: StepTimeline) -> list[tuple[Span, int]]:
    """From the step's last span back to its begin, each with when the path begins to wait for it, ns.

    `spans` are by their ends, none of which is after the window's.
    """
    ends = [span.end_ns for span in spans]
    # A span of no length ends when it begins: going down the list, the walk ends all the same.
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
    """Log-probs, of which the last is at `at`, that a transfer waited for though it could have begun; and where the
    path goes on.

    These are of groups that a later step trains on, where a schedule runs ahead: the step waits for them only from when
    the transfer could have begun, at the later of its optimiser steps' and the last switch's end. The path goes on with
    that one, not with the episodes of another step; with `at`, and nothing held up, where it was not recorded.
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
    """Seconds of `span` in `within`; of episodes, and of a switch that waits for them, by what these did.

    A switch with `on_update=finish` lasts until the episodes in flight have ended; only the rest of it is new weights.
    """
    own: dict[Activity, list[Interval]] = {Activity.generation: [], Activity.search: []}
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
    """That `span` says it worked on; none if it does not say."""
    many, one = span.args.get(QUESTIONS), span.args.get("question")
    if isinstance(many, list):
        return tuple(many)
    return (one,) if isinstance(one, str) else ()
