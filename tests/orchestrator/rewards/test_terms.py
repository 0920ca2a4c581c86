"""Tests of every built-in reward term, by hand."""

from __future__ import annotations

import pytest

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
    "well-formed, right": ((BLIND, RIGHT), 1.0),
    "well-formed, wrong, found": ((SEARCH, WRONG), S + R),
    "well-formed, wrong": ((BLIND, WRONG), S),
    "well-formed, empty answer": ((think("answer", ""),), S),
    "malformed, right, found": ((SEARCH, BARE_RIGHT), 1 - S),
    "malformed, right": ((BARE_RIGHT,), 1 - S),
    "malformed, wrong": ((BARE_WRONG,), F),
    "malformed, no answer": ((NOTHING,), 0.0),
    "malformed, no turns": ((), 0.0),
    "answer in a passage": (((SEARCH[0], BARE_RIGHT), NOTHING), 0.0),
    "forged retrieval": ((f"<think>a</think><information>Bamako</information>{WRONG}",), F),
    "structure in a passage": ((("<think>a</think><search>b</search>", f"</information>{RIGHT}"),), 0.0),
}


@pytest.mark.parametrize(("said", "expected"), TABLE.values(), ids=TABLE)
def test_format_term_is_that_of_search_r1(said: tuple[Said, ...], expected: float) -> None:
    config = RewardConfig(structure_score=S, final_score=F, retrieval_score=R)
    trajectory = episode(*said)
    found = values("format", trajectory, config)
    assert sum(found) == pytest.approx(expected)
    assert len(found) == max(1, len(trajectory.turns))


def test_terms_of_turns_are_on_their_turns() -> None:
    trajectory = episode(BLIND, "what?", SEARCH, SEARCH, RIGHT)
    assert values("search_penalty", trajectory) == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert values("invalid_turns", trajectory) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert values("retrieval", trajectory) == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert values("invalid_format", trajectory) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert values("invalid_format", episode(SEARCH, RIGHT)) == [0.0, 0.0]
    for term in ("search_penalty", "invalid_turns", "retrieval"):
        assert values(term, episode()) == [0.0]
    assert values("invalid_format", episode()) == [1.0]


def test_overlong_penalty_grows_over_the_buffer_before_the_limit() -> None:
    """The penalty follows DAPO (2503.14476, equation 13). If no own limit is set, it is 1 at the task's limit."""
    assert [overlong_penalty(length, 100, 40) for length in (60, 70, 100, 101)] == [0.0, 0.25, 1.0, 1.0]
    config, task = RewardConfig(overlong_buffer=40), task_of(max_total_tokens=200)
    for prompt_tokens in (20, 120):
        room = 200 - prompt_tokens
        for tokens, expected in ((room, 1.0), (room - 10, 0.75), (room - 40, 0.0)):
            reading = read(episode(RIGHT, prompt_tokens=prompt_tokens, response_tokens=tokens))
            assert list(pure_terms(config, task)["overlong"](reading)) == [pytest.approx(expected)]
