"""The figures of an evaluation, worked out by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.observe import status
from rlsys.orchestrator.evaluation.heldout import Answered, evaluate
from tests.apps.evaluation.answers import SEARCH, turn
from tests.support.trajectories import trajectory

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


async def ask(question: Question, _sample: int, _temperature: float) -> Trajectory:
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
        "figures": {
            "em": 0.5,
            "f1": 0.5,
            "sub_em": 0.5,
            "finished": 0.75,
            "searches": 1.0,
            "tokens": (6 + 11 + 1 + 5) / 4,
            "em_hop_1": 1.0,
            "em_hop_2": 0.5,
        },
    }
    assert [one.em for one in evaluation.answered] == [1.0, 1.0, 0.0, 0.0]


async def test_answers_keep_the_order_of_the_questions_and_the_concurrency() -> None:
    running = most = 0
    said: list[str] = []

    async def slow(question: Question, _sample: int, _temperature: float) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (5 - int(question.uid[-1])))
        running -= 1
        return EPISODES[question.uid]

    with status.reported_to(lambda _stage, text: said.append(text)):
        evaluation = await evaluate(QUESTIONS, slow, concurrency=3)
    assert [one.question.uid for one in evaluation.answered] == ["q:1", "q:2", "q:3", "q:4"]
    assert most == 3
    assert said == [f"evaluates {number}/4 questions" for number in (0, 1, 2, 3, 4)]


async def test_a_failed_question_ends_the_evaluation() -> None:
    async def broken(question: Question, _sample: int, _temperature: float) -> Trajectory:
        raise ConnectionError(question.uid)

    with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
        await evaluate(QUESTIONS, broken, concurrency=2)


async def test_every_question_is_asked_as_often_as_wanted_and_every_answer_noted() -> None:
    calls: list[tuple[str, int, float]] = []
    noted: list[Answered] = []

    async def drawn(question: Question, sample: int, temperature: float) -> Trajectory:
        calls.append((question.uid, sample, temperature))
        return EPISODES[question.uid]

    evaluation = await evaluate(QUESTIONS[:2], drawn, 8, samples=3, temperature=0.5, note=noted.append)
    assert calls == [(uid, sample, 0.5) for uid in ("q:1", "q:2") for sample in range(3)]
    assert len(noted) == len(evaluation.answered) == 6
    assert evaluation.row()["questions"] == 2
    assert [len(answers) for answers in evaluation.by_question.values()] == [3, 3]


async def test_each_of_several_data_sources_has_its_figure() -> None:
    questions = [replace(one, data_source=name) for one, name in zip(QUESTIONS, "bbaa", strict=True)]
    evaluation = await evaluate(questions, ask, concurrency=4)
    figures = evaluation.metrics()
    assert {key: figures[key] for key in figures if "/" in key} == {"em/b": 1.0, "em/a": 0.0}
    assert list(evaluation.by_source) == ["b", "a"]
