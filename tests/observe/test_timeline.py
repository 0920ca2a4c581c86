"""When episodes generated and searched, second by second, and how a timeline is read."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlsys.data.trajectory import Action, Trajectory, Turn
from rlsys.observe.records import TimelineRow, steps_of
from rlsys.observe.spans import Span, episode_spans
from tests.orchestrator.pipeline.build import trajectory

S = 1_000_000_000


def episode(*turns: tuple[int, int, int]) -> Trajectory:
    """Turns are (begun, seconds of generation, seconds of search)."""
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
def test_every_second_is_counted_once(episodes: list[list[tuple[int, int, int]]], start: int, length: int) -> None:
    """Second by second: somebody generates, or nobody does and somebody searches, within the group's time."""
    whole = (start * S, (start + length) * S)
    found = episode_spans(whole, "engine 3", {"question": "q"}, [episode(*turns) for turns in episodes])
    within = set(range(start, start + length))
    turns = [turn for one in episodes for turn in one if turn[0]]  # EpisodeProgress at 0: it is not known when.
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


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=5),
)
@settings(max_examples=50)
def test_a_step_has_the_spans_that_touch_it(spans: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    found = [Span(str(i), start, start + length, "actor", "0") for i, (start, length) in enumerate(spans)]
    rows, at = [], 0
    for number, (pause, length) in enumerate(steps, 1):
        window = (at + pause, at + pause + length)
        rows.append(TimelineRow(number, window, tuple(found[number - 1 :: len(steps)])))
        at = window[1]
    all_told = [span for row in rows for span in row.spans]
    assert [(step.step, {span.name for span in step.spans}) for step in steps_of(rows)] == [
        (row.step, {one.name for one in all_told if one.start_ns < row.window[1] and one.end_ns > row.window[0]})
        for row in rows
        if row.window
    ]
