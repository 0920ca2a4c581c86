"""Tests of time accounts and critical paths: by hand, by counting nanoseconds, and on schedules with a known path."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.observe.records import StepTimeline
from rlsys.observe.spans import Arg, Span
from rlsys.report.time_use import GROUPS, Activity, critical_path, leads_to, time_report

S = 1_000_000_000
NAMES = {
    "rollout": ("rollout.group", "generate.turns", "search.queries", "tool.calculator", "eval.episode"),
    "inference": ("logprob.compute", "checkpoint.finish"),
    "actor": ("train.accumulate", "train.apply", "checkpoint.stage"),
    "critic": ("values.compute", "train.accumulate"),
    "driver": ("reward.score", "sync.transfer", "sync.switch", "switch.acquire", "something.else"),
}
WINDOW = (20, 60)


def span(name: str, group: str, start: float, end: float, lane: str = "main", **args: Arg) -> Span:
    return Span(name, round(start * S), round(end * S), group, lane, args)


def step(*spans: Span, seconds: float, number: int = 1) -> StepTimeline:
    return StepTimeline(number, (0, round(seconds * S)), spans)


def test_scoring_for_a_later_step_is_on_the_path_if_it_delayed_the_weights() -> None:
    """This step of an `async` schedule trains question a; b and c are scored for the next step."""
    training = [
        span("logprob.compute", "inference", 0, 1, questions=["a"]),
        span("train.accumulate", "actor", 1, 3, step=1, questions=["a"]),
        span("train.apply", "actor", 3, 4, step=1),
    ]
    ahead = [
        span("rollout.group", "rollout", 0, 1.5, question="b"),
        span("logprob.compute", "inference", 1.5, 4.5, questions=["b"]),
        span("logprob.compute", "inference", 4.5, 6, questions=["c"]),
        span("sync.transfer", "driver", 6.5, 7, step=1),
    ]
    found = critical_path(step(*training, *ahead, seconds=7))
    assert [(link.name, link.questions, link.start_s, link.seconds) for link in found.links] == [
        ("logprob.compute", ("a",), 0, 1),
        ("train.accumulate", ("a",), 1, 2),
        ("train.apply", (), 3, 1),
        # Only 4 to 4.5 is on the path, since the transfer waited for the training until 4.
        ("logprob.compute", ("b",), 4, 0.5),
        ("logprob.compute", ("c",), 4.5, 1.5),
        ("sync.transfer", (), 6.5, 0.5),
    ]
    # The previous switch ends at 5, after the training, so the step waits for that switch.
    last_switch = span("sync.switch", "driver", -1, 5, step=0)
    found = critical_path(step(*training, last_switch, *ahead, seconds=7))
    assert found.seconds == {"sync": 5.5, "logprob": 1.0, "other": 0.5}


def test_switch_that_waits_for_episodes_counts_as_their_activity() -> None:
    """The switch of `on_update=finish` waits for an episode that generates at 6-8 and searches at 8-9."""
    spans = [
        span("rollout.group", "rollout", 0, 2, "engine 0", question="a"),
        span("generate.turns", "rollout", 0, 1, "engine 0", question="a"),
        span("search.queries", "rollout", 1, 2, "engine 0", question="a"),
        span("logprob.compute", "inference", 2, 3, questions=["a"]),
        span("train.accumulate", "actor", 3, 3.5, step=1, questions=["a"]),
        span("train.apply", "actor", 3.5, 4, step=1),
        span("sync.transfer", "driver", 4, 6, step=1),
        span("generate.turns", "rollout", 5, 8, "engine 0", question="z"),
        span("search.queries", "rollout", 8, 9, "engine 0", question="z"),
        span("sync.switch", "driver", 6, 10, step=1),
    ]
    found = critical_path(step(*spans, seconds=10))
    assert found.seconds == {"generation": 3.0, "search": 2.0, "logprob": 1.0, "training": 1.0, "sync": 3.0}


def test_optimiser_step_waits_for_the_last_score_if_there_is_a_critic() -> None:
    spans = [
        span("logprob.compute", "inference", 0, 1, questions=["a"]),
        span("train.accumulate", "actor", 1, 2, questions=["a"]),
        span("logprob.compute", "inference", 1, 4, questions=["b"]),
        span("train.apply", "actor", 4, 5, step=1),
    ]
    with_critic = [*spans, span("values.compute", "critic", 1, 3, questions=["b"])]
    assert critical_path(step(*with_critic, seconds=5)).seconds == {"logprob": 4.0, "training": 1.0}
    assert critical_path(step(*spans, seconds=5)).seconds == {"logprob": 1.0, "training": 2.0, "other": 2.0}


def test_failed_episodes_lead_to_nothing_and_device_switches_are_counted() -> None:
    failed = span("rollout.group", "rollout", 0, 2, question="a", error="CancelledError")
    again = span("rollout.group", "rollout", 2, 3, question="a")
    assert leads_to(failed, again)
    assert not leads_to(failed, span("reward.score", "driver", 3, 4, question="a"))
    spans = [
        span("logprob.compute", "inference", 0, 1, questions=["a"]),
        span("switch.release", "driver", 1, 3, "inference"),
        span("switch.acquire", "driver", 3, 4, "actor"),
        span("train.accumulate", "actor", 4, 5, questions=["a"]),
        span("train.apply", "actor", 5, 6, step=1),
    ]
    assert critical_path(step(*spans, seconds=6)).seconds == {"switch": 3.0, "logprob": 1.0, "training": 2.0}


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Spans of a few ns each, around `WINDOW`."""
    found = []
    for _ in range(draw(st.integers(0, 25))):
        group = draw(st.sampled_from([*NAMES]))
        name = draw(st.sampled_from(NAMES[group]))
        start = draw(st.integers(0, 79))
        end = draw(st.integers(start, 80))
        lane = draw(st.sampled_from(["0", "1"])) if group == "rollout" else "main"
        args: dict[str, Arg] = {"step": draw(st.integers(1, 2))}
        if draw(st.booleans()):
            args["questions"] = draw(st.lists(st.sampled_from("abc"), max_size=2))
        found.append(Span(name, start, end, group, lane, args))
    return found


def by_nanoseconds(found: Sequence[Span], group: str, lane: str | None) -> Counter[tuple[bool, str]]:
    """Nanoseconds of a group or lane by (is working, activity), counted one by one by the documented rules."""
    special = {
        "generate.turns": "generation",
        "search.queries": "search",
        "tool.calculator": "tool",
        "rollout.group": "rollout",
        "eval.episode": "evaluation",
    }
    nearest = {
        "actor": "logprob values reward generation search tool rollout sync training",
        "critic": "logprob values reward generation search tool rollout sync training",
        "inference": "reward generation search tool rollout sync training logprob values",
        "rollout": "sync training logprob values reward generation search tool rollout",
    }
    counts: Counter[tuple[bool, str]] = Counter()
    for instant in range(*WINDOW):
        on = [one for one in found if one.start_ns <= instant < one.end_ns]
        kinds = {id(one): special.get(one.name) or one.stage.replace("train", "training") for one in on}
        mine = {kinds[id(one)] for one in on if one.group == group and lane in (None, one.lane)}
        anybody = set(kinds.values())
        work = [
            kind for kind in ("training", "values", "logprob", "generation", "evaluation", "checkpoint") if kind in mine
        ]
        waits = [
            *(["sync"] if any(one.name == "sync.transfer" for one in on) else []),
            *(kind for kind in ("switch", *nearest[group].split(), "checkpoint", "evaluation") if kind in anybody),
            "other",
        ]
        if work:
            counts[True, work[0]] += 1
        elif "search" in mine:
            counts[False, "search"] += 1
        elif "tool" in mine:
            counts[False, "tool"] += 1
        elif "rollout" in mine:
            counts[True, "rollout"] += 1
        else:
            counts[False, waits[0]] += 1
    return counts


def in_nanoseconds(busy: Mapping[Activity, float], waits: Mapping[Activity, float]) -> dict:
    return {
        (own, activity.value): round(seconds * S)
        for own, found in ((True, busy), (False, waits))
        for activity, seconds in found.items()
    }


@given(spans())
@settings(max_examples=40)
def test_every_nanosecond_of_each_group_is_counted_once(found: list[Span]) -> None:
    (account,) = time_report([StepTimeline(1, WINDOW, tuple(found))]).steps
    assert set(account.groups) == {one.group for one in found} & set(GROUPS)
    for group, time in account.groups.items():
        assert in_nanoseconds(time.use.busy, time.use.waits) == by_nanoseconds(found, group, None)
        for lane, use in time.lanes.items():
            assert in_nanoseconds(use.busy, use.waits) == by_nanoseconds(found, group, lane)


@given(spans())
@settings(max_examples=40)
def test_critical_path_covers_the_window_once_in_order(found: list[Span]) -> None:
    path = critical_path(StepTimeline(1, WINDOW, tuple(found)))
    assert sum(path.seconds.values()) * S == pytest.approx(WINDOW[1] - WINDOW[0])
    at = 0.0
    for link in path.links:
        assert link.waited_s >= 0
        assert link.start_s == pytest.approx(at + link.waited_s)
        at = link.start_s + link.seconds
    assert at + path.rest_s == pytest.approx((WINDOW[1] - WINDOW[0]) / S)


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=40)
def test_critical_path_without_slack_is_the_longest_chain(
    durations: list[tuple[int, ...]], slots: int, transfer: int
) -> None:
    """Each span begins when the last span that it needs ends, so the path has no gap and no chain is longer."""
    found: list[Span] = []
    needs: list[list[int]] = []

    def add(name: str, group: str, length: int, after: list[int], **args: Arg) -> int:
        start = max((found[one].end_ns for one in after), default=0)
        found.append(Span(name, start, start + length * S, group, "main", {"step": 1, **args}))
        needs.append(after)
        return len(found) - 1

    rolled, scored, trained = list[int](), list[int](), list[int]()
    for number, (roll, reward, score, train) in enumerate(durations):
        uid = f"q{number}"
        before = rolled[-slots:][:1] if number >= slots else []  # The engine has `slots` slots.
        rolled.append(add("rollout.group", "rollout", roll, before, question=uid))
        rewarded = add("reward.score", "driver", reward, [rolled[-1]], question=uid)
        scored.append(add("logprob.compute", "inference", score, [rewarded, *scored[-1:]], questions=[uid]))
        trained.append(add("train.accumulate", "actor", train, [scored[-1], *trained[-1:]], questions=[uid]))
    stepped = add("train.apply", "actor", 1, trained[-1:])
    last = add("sync.transfer", "driver", transfer, [stepped])
    path = critical_path(StepTimeline(1, (0, found[last].end_ns), tuple(found)))
    assert path.rest_s == 0
    assert all(link.waited_s == 0 for link in path.links)
    lengths: list[int] = []
    for one, after in zip(found, needs, strict=True):
        lengths.append(one.end_ns - one.start_ns + max((lengths[before] for before in after), default=0))
    assert round(sum(link.seconds for link in path.links) * S) == lengths[last]
