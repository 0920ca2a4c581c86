"""The figures of an evaluation, worked out by hand."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.agent.trajectory import Action, Finish, Trajectory, Turn
from rlsys.data.question import Question
from rlsys.evaluation.evaluate import Evaluation, agreement, evaluate
from tests.pipeline.build import trajectory


def turn(action: Action, content: str, observation: str = "") -> Turn:
    return Turn(content, action, content, observation, 1, 1, 0, 0.0, 0.0)


SEARCH = turn(Action.SEARCH, "Nile", "\n\n<information>...</information>\n\n")
QUESTIONS = [
    Question("q:1", "?", ("The Nile", "Nil"), extra={"hops": 1}),
    Question("q:2", "?", ("Paris",), extra={"hops": 2}),
    Question("q:3", "?", ("Lyon",), extra={"hops": 2}),
    Question("q:4", "?", ("42",)),
]
EPISODES = {
    "q:1": trajectory(uid="q:1", turns=[SEARCH, turn(Action.ANSWER, "the nile.")]),
    "q:2": trajectory(uid="q:2", turns=[SEARCH, SEARCH, turn(Action.ANSWER, "Paris")]),
    "q:3": trajectory(uid="q:3", turns=[turn(Action.ANSWER, "Paris")]),
    "q:4": trajectory(uid="q:4", turns=[SEARCH], finish=Finish.TURN_LIMIT),
}


async def ask(question: Question) -> Trajectory:
    return EPISODES[question.uid]


async def test_figures_by_hand() -> None:
    evaluation = await evaluate(QUESTIONS, ask, concurrency=2, step=7)
    assert evaluation.row() == {
        "step": 7,
        "questions": 4,
        "em": 0.5,
        "em_by_hop": {"1": 1.0, "2": 0.5},
        "searches": 1.0,
        "finished": 0.75,
    }
    assert [one.em for one in evaluation.answered] == [1.0, 1.0, 0.0, 0.0]
    assert evaluation.answers() == {"q:1": "the nile.", "q:2": "Paris", "q:3": "Paris", "q:4": None}


async def test_answers_keep_the_order_of_the_questions_and_the_concurrency() -> None:
    running = most = 0
    said: list[str] = []

    async def slow(question: Question) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (5 - int(question.uid[-1])))
        running -= 1
        return EPISODES[question.uid]

    evaluation = await evaluate(QUESTIONS, slow, concurrency=3, say=said.append)
    assert [one.question.uid for one in evaluation.answered] == ["q:1", "q:2", "q:3", "q:4"]
    assert most == 3
    assert said == [f"evaluates {number}/4 questions" for number in (1, 2, 3, 4)]


async def test_agreement_is_to_the_letter() -> None:
    one = await evaluate(QUESTIONS, ask, concurrency=1)
    other = Evaluation(
        0,
        tuple(
            type(answered)(answered.question, trajectory(turns=[turn(Action.ANSWER, text)]), 0.0)
            for answered, text in zip(one.answered, ["The Nile", "Paris", "Paris", "42"], strict=True)
        ),
    )
    assert agreement(one, one) == 1.0
    assert agreement(one, other) == 0.5


async def test_a_failed_question_ends_the_evaluation() -> None:
    async def broken(question: Question) -> Trajectory:
        raise ConnectionError(question.uid)

    with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
        await evaluate(QUESTIONS, broken, concurrency=2)
