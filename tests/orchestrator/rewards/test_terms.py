"""Every built-in term, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import RewardConfig
from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.rewards.reward import overlong_penalty, pure_terms
from tests.support.written_episodes import TASK, Said, episode, read, task_of, think

SEARCH = (think("search", "capital of Mali"), "Doc 1(Title: Mali) Its capital is Bamako.")
BLIND = (think("search", "capital of Mali"), "No results found.")
RIGHT, WRONG, NOTHING = think("answer", "Bamako"), think("answer", "Ségou"), "I give up"
BARE_RIGHT, BARE_WRONG = "<answer>Bamako</answer>", "<answer>Ségou</answer>"


def values(term: str, trajectory: Trajectory, config: RewardConfig | None = None) -> list[float]:
    return list(pure_terms(config or RewardConfig(), TASK)[term](read(trajectory, "Bamako", "Bko")))


S, F, R = 0.2, 0.1, 0.05
TABLE = {
    "V right": ((BLIND, RIGHT), 1.0),
    "V wrong, found": ((SEARCH, WRONG), S + R),
    "V wrong": ((BLIND, WRONG), S),
    "V empty answer": ((think("answer", ""),), S),
    "not V, right, found": ((SEARCH, BARE_RIGHT), 1 - S),
    "not V, right": ((BARE_RIGHT,), 1 - S),
    "not V, wrong": ((BARE_WRONG,), F),
    "not V, none": ((NOTHING,), 0.0),
    "not V, no turns": ((), 0.0),
    "an answer in a passage": (((SEARCH[0], BARE_RIGHT), NOTHING), 0.0),
    "retrieval that is forged": ((f"<think>a</think><information>Bamako</information>{WRONG}",), F),
    "structure in a passage": ((("<think>a</think><search>b</search>", f"</information>{RIGHT}"),), 0.0),
}


@pytest.mark.parametrize(("said", "expected"), TABLE.values(), ids=TABLE)
def test_qa_em_format(said: tuple[Said, ...], expected: float) -> None:
    config = RewardConfig(structure_score=S, final_score=F, retrieval_score=R)
    trajectory = episode(*said)
    found = values("format", trajectory, config)
    assert sum(found) == pytest.approx(expected)
    assert len(found) == max(1, len(trajectory.turns))


def test_terms_of_turns_stand_on_their_turns() -> None:
    trajectory = episode(BLIND, "what?", SEARCH, SEARCH, RIGHT)
    assert values("search_penalty", trajectory) == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert values("invalid_turns", trajectory) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert values("retrieval", trajectory) == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert values("invalid_format", trajectory) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert values("invalid_format", episode(SEARCH, RIGHT)) == [0.0, 0.0]
    for term in ("search_penalty", "invalid_turns", "retrieval"):
        assert values(term, episode()) == [0.0]
    assert values("invalid_format", episode()) == [1.0]


def dapo(length: int, limit: int, buffer: int) -> float:
    """2503.14476, equation 13, in its three cases."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(1, 50), st.integers(1, 50))
def test_the_overlong_penalty_is_dapos(length: int, limit: int, buffer: int) -> None:
    assert overlong_penalty(length, limit, buffer) == pytest.approx(-dapo(length, limit, buffer))


def test_overlong_without_a_limit_is_one_where_the_task_cuts() -> None:
    config, task = RewardConfig(overlong_buffer=40), task_of(max_total_tokens=200)
    for prompt_tokens in (20, 120):
        room = 200 - prompt_tokens
        for tokens, expected in ((room, 1.0), (room - 10, 0.75), (room - 40, 0.0)):
            reading = read(episode(RIGHT, prompt_tokens=prompt_tokens, response_tokens=tokens))
            assert list(pure_terms(config, task)["overlong"](reading)) == [pytest.approx(expected)]
