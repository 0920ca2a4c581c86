"""Tests of spans and of figures derived from them, by hand or by brute force."""

from itertools import count, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlsys.data.trajectory import Action, Trajectory, Turn
from rlsys.observe.spans import (
    Span,
    Tracer,
    batch_figures,
    common_intervals,
    episode_spans,
    merge_intervals,
    without_intervals,
)
from tests.support.trajectories import trajectory

S = 1_000_000_000


def span(name: str, start: float, end: float, group: str, step: int = 1, lane: str = "main") -> Span:
    return Span(name, int(start * S), int(end * S), group, lane, {"step": step})


RAW = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


@given(RAW, RAW)
@settings(max_examples=50)
def test_interval_operations_equal_those_on_sets_of_points(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    points = [{point for start, end in one for point in range(start, end)} for one in (first, second)]
    merged = [merge_intervals(one) for one in (first, second)]
    for found, expected in (
        (merged[0], points[0]),
        (common_intervals(*merged), points[0] & points[1]),
        (without_intervals(*merged), points[0] - points[1]),
    ):
        assert {point for start, end in found for point in range(start, end)} == expected
        assert found == sorted(found)
        assert sum(end - start for start, end in found) == len(expected), "intervals must be disjoint and not reversed"


def test_tracer_records_nesting_errors_and_late_args_and_hands_out_once() -> None:
    ticks = count(100, 10)
    tracer = Tracer("actor", clock=lambda: next(ticks))
    with tracer.span("train.step", step=7) as args:
        with pytest.raises(KeyError), tracer.span("train.apply", lane="rank 1", step=7):
            raise KeyError("x")
        args["tokens"] = 12
        (running,) = tracer.running()
        assert (running.start_ns, running.end_ns) == (100, 130), "a running span must count up to now"
    assert tracer.running() == []
    assert tracer.drain() == [
        Span("train.apply", 110, 120, "actor", "rank 1", {"step": 7, "error": "KeyError"}),
        Span("train.step", 100, 140, "actor", "main", {"step": 7, "tokens": 12}),
    ]
    assert tracer.drain() == []


def call(group: str, end_ns: int, tokens: int, room: int, budget: int) -> Span:
    args = {"tokens": tokens, "room": room, "budget": budget}
    return Span("train.accumulate", 0, end_ns, group, "main", args)


def test_batch_fill_covers_all_calls_that_ended_in_the_window() -> None:
    spans = [
        call("actor", 10, 999, 999, 999),  # ended when the window began, so it belongs to the step before
        call("actor", 11, 30, 40, 100),
        call("actor", 20, 50, 60, 100),
        call("actor", 21, 999, 999, 999),
        call("inference", 15, 120, 120, 100),  # one sample, larger than the budget
        Span("train.apply", 11, 12, "critic", "main", {}),
    ]
    assert batch_figures(spans, (10, 20)) == pytest.approx(
        {
            "batch/fill/actor": 0.4,
            "batch/padding/actor": 0.2,
            "batch/fill/inference": 1.2,
            "batch/padding/inference": 0.0,
        }
    )


def episode(*turns: tuple[int, int, int]) -> Trajectory:
    """An episode whose turns are given as (begin, seconds of generation, seconds of search)."""
    return trajectory(
        turns=[
            Turn("", Action.SEARCH, "", "", 1, 1, 0, float(generate), float(search), "", begun * S)
            for begun, generate, search in turns
        ]
    )


def seconds(spans: list[Span], name: str) -> set[int]:
    return {second for span in spans if span.name == name for second in range(span.start_ns // S, span.end_ns // S)}


TURNS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(0, 6)), max_size=4)


@example([[(10, 2, 5)], [(11, 3, 0)]], 10, 10)
@given(st.lists(TURNS, max_size=4), st.integers(0, 15), st.integers(1, 20))
@settings(max_examples=50)
def test_episode_spans_count_every_second_once(
    episodes: list[list[tuple[int, int, int]]], start: int, length: int
) -> None:
    """A second counts as generation if any episode of the group generates, else as search if any of them searches."""
    whole = (start * S, (start + length) * S)
    found = episode_spans(whole, "engine 3", {"question": "q"}, [episode(*turns) for turns in episodes])
    within = set(range(start, start + length))
    turns = [turn for one in episodes for turn in one if turn[0]]  # A turn that begins at 0 has no known time.
    generating = {at for begun, generate, _ in turns for at in range(begun, begun + generate)} & within
    searching = {
        at
        for begun, generate, search in turns
        for at in range(begun + generate, begun + generate + search)
        if at in within - generating
    }
    assert seconds(found, "generate.turns") == generating
    assert seconds(found, "search.queries") == searching
    assert {(span.group, span.lane, span.args["question"]) for span in found} <= {("rollout", "engine 3", "q")}
    ordered = sorted((span.start_ns, span.end_ns) for span in found)
    assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_spans_of_tools_carry_their_names_and_are_no_searches() -> None:
    called = [(1, 1, 4, "calculator"), (1, 1, 2, ""), (1, 5, 3, "dictionary")]
    turns = [
        Turn("", Action.TOOL, "", "", 1, 1, 0, float(generate), float(call), "", begun * S, tool)
        for begun, generate, call, tool in called
    ]
    one, two = trajectory(turns=turns[:2]), trajectory(turns=turns[2:])
    found = episode_spans((0, 9 * S), "", {}, [one])
    assert (seconds(found, "search.queries"), seconds(found, "tool.calculator")) == ({2, 3}, {4, 5})
    found = episode_spans((0, 9 * S), "", {}, [two])
    assert (seconds(found, "search.queries"), seconds(found, "tool.dictionary")) == (set(), {6, 7, 8})
