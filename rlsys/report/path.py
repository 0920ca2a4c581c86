"""The critical path of a step: the chain of spans, each of which waited for the one before, that ends with the step. Pure.

It is walked from the end. The step ends with the last of its weights' transfer, its switch or its optimiser steps; what
a span waited for is, of all that `leads_to` says it may have waited for, what ended last before it began. Time that no
span of the chain covers, such as the driver's own, is `other`. So the path covers the window exactly once: had a span on
it been shorter, with the rest as it was, the step could have been.

Spans say which questions they worked on, so that log-probs wait for their own episodes and not for any; of recordings
that do not say it, any may have been.

Log-probs that hold a transfer up are of groups that a later step trains on, where a schedule runs ahead: the step waits
for them only from when the transfer could have begun, which is the later of its optimiser steps' and the last switch's end.
From there the path goes on with that one, not with the episodes of another step.

A switch with `on_update=finish` lasts until the episodes in flight have ended: what they do meanwhile is what it waits for,
and only the rest of it is new weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.observe.spans import (
    QUESTIONS,
    ROLLOUT_SPAN,
    Interval,
    Span,
    common_intervals,
    merge_intervals,
    without_intervals,
)
from rlsys.observe.timeline import GENERATE_SPAN, SEARCH_SPAN, StepTimeline
from rlsys.report.activity import DIGITS, TRANSFER_SPAN, Activity, activity_of, added, rounded

_SWITCH_SPAN = "sync.switch"
LAST_SPANS = ("train.apply", TRANSFER_SPAN, _SWITCH_SPAN)
"""What a step may end with."""
_ORDER = {
    Activity.rollout: 0,
    Activity.reward: 1,
    Activity.logprob: 2,
    Activity.values: 2,
    Activity.training: 3,
}
"""A group of episodes passes through these one after the other."""
_DERIVED = (GENERATE_SPAN, SEARCH_SPAN)
SCORES_SPAN = "logprob.compute"
_FREES_TRANSFER = ("train.apply", _SWITCH_SPAN)


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
    """Between the end of the link before, or the step's begin, and this one's."""
    questions: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Links in order of time."""

    links: tuple[Link, ...]
    rest_s: float
    """From the end of the last link to that of the step; without a link the whole step."""

    @property
    def seconds(self) -> dict[Activity, float]:
        """The step's length by what decided it."""
        gaps = self.rest_s + sum(link.waited_s for link in self.links)
        return added([*(link.parts for link in self.links), {Activity.other: gaps}])

    def as_json(self) -> dict[str, Any]:
        """As JSON holds it, to the microsecond."""
        return {
            "seconds": rounded(self.seconds),
            "rest_s": round(self.rest_s, DIGITS),
            "links": [
                {
                    "name": link.name,
                    "group": link.group,
                    "lane": link.lane,
                    "start_s": round(link.start_s, DIGITS),
                    "waited_s": round(link.waited_s, DIGITS),
                    "parts": rounded(link.parts),
                    "questions": list(link.questions),
                }
                for link in self.links
            ],
        }


def critical_path(step: StepTimeline) -> CriticalPath:
    """The path of `step`; without links if nothing that a step ends with was recorded in its window."""
    window = step.window
    spans = sorted(
        (span for span in step.spans if window[0] < span.end_ns <= window[1] and span.name not in _DERIVED),
        key=lambda span: (span.end_ns, span.start_ns),
    )
    chain = _chain(spans, step)
    if not chain:
        return CriticalPath((), (window[1] - window[0]) / 1e9)
    derived = [span for span in step.spans if span.name in _DERIVED]
    links, end = [], window[0]
    for span, begin in reversed(chain):
        start = max(begin, window[0])
        links.append(
            Link(
                span.name,
                span.group,
                span.lane,
                (start - window[0]) / 1e9,
                _parts(span, (start, span.end_ns), derived),
                (start - end) / 1e9,
                _questions(span),
            )
        )
        end = span.end_ns
    return CriticalPath(tuple(links), (window[1] - end) / 1e9)


def leads_to(before: Span, after: Span, scored_first: bool = False) -> bool:
    """Whether `after` may have waited for `before`, which ended earlier.

    It may for its own input, for its group (calls of one follow each other), for weights, for room in the engines, and
    on shared devices for whoever was there. Learners wait for each other; with `scored_first` their optimiser steps may
    also wait for scores, of whatever question.
    """
    done, due = activity_of(before), activity_of(after)
    if Activity.switch in (done, due) or done is due is Activity.training:
        return True
    match after.name:
        case "rollout.group":
            return before.name in (ROLLOUT_SPAN, "eval.episode", _SWITCH_SPAN)
        case "sync.transfer":
            # What is being computed with the version before is finished first, and its switch too.
            return before.name in ("train.apply", "logprob.compute", _SWITCH_SPAN)
        case "sync.switch":
            return before.name == TRANSFER_SPAN
        case "train.apply":
            return scored_first and done in (Activity.logprob, Activity.values)
        case "logprob.compute" if before.name == TRANSFER_SPAN:
            return True
    same_group = before.group == after.group and after.group != "driver"
    return same_group or _feeds(before, after)


def seconds_of(intervals: Iterable[Interval]) -> float:
    """Length of all `intervals` together, which are in ns."""
    return sum(end - start for start, end in intervals) / 1e9


def _feeds(before: Span, after: Span) -> bool:
    """Whether some episode may have come from `before` to `after`."""
    places = _ORDER.get(activity_of(before)), _ORDER.get(activity_of(after))
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
    while at >= 0 and not (spans[at].name in LAST_SPANS and spans[at].args.get("step") == step.step):
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
        if span.name == TRANSFER_SPAN and at >= 0 and spans[at].name == SCORES_SPAN:
            held_up, at = _held_up(spans, at)
            chain += held_up
    return chain


def _held_up(spans: Sequence[Span], at: int) -> tuple[list[tuple[Span, int]], int]:
    """Log-probs, of which the last is at `at`, that a transfer waited for though it could have begun.

    Also where the path goes on: with what let it begin; with `at`, and nothing held up, where that was not recorded.
    """
    free = next((place for place in range(at, -1, -1) if spans[place].name in _FREES_TRANSFER), None)
    if free is None:
        return [], at
    found, until = [], spans[at].end_ns
    for span in (spans[place] for place in range(at, free, -1)):
        begin = max(span.start_ns, spans[free].end_ns)
        if span.name == SCORES_SPAN and begin < span.end_ns <= until:
            found.append((span, begin))
            until = begin
    return found, free


def _parts(span: Span, within: Interval, derived: Iterable[Span]) -> dict[Activity, float]:
    """Seconds of `span` in `within`; of episodes, and of a switch that waits for them, by what these did."""
    own: dict[Activity, list[Interval]] = {Activity.generation: [], Activity.search: []}
    if span.name in (ROLLOUT_SPAN, _SWITCH_SPAN):
        for one in derived:
            its_own = one.lane == span.lane and one.args.get("question") == span.args.get("question")
            if its_own or span.name == _SWITCH_SPAN:
                own[activity_of(one)].append((one.start_ns, one.end_ns))
    left, parts = merge_intervals([within]), dict[Activity, float]()
    for activity, intervals in own.items():
        taken = merge_intervals(intervals)
        parts[activity] = seconds_of(common_intervals(left, taken))
        left = without_intervals(left, taken)
    parts[activity_of(span)] = seconds_of(left)
    return added([parts])


def _questions(span: Span) -> tuple[str, ...]:
    """That `span` says it worked on; none if it does not say."""
    many, one = span.args.get(QUESTIONS), span.args.get("question")
    if isinstance(many, list):
        return tuple(many)
    return (one,) if isinstance(one, str) else ()
