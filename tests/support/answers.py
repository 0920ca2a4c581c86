"""Hand-made answers to questions."""

from typing import Any

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Turn
from rlsys.orchestrator.evaluation.heldout import Answered, plain_score
from tests.support.trajectories import trajectory


def turn(
    action: Action, content: str, observation: str = "", *, tokens: int = 1, error: str = "", text: str = ""
) -> Turn:
    return Turn(text or content, action, content, observation, tokens, 1, 0, 0.0, 0.0, error)


SEARCH = turn(Action.SEARCH, "Nile", "\n\n<information>...</information>\n\n", tokens=5)


def asked(number: int, *accepted: str, source: str = "nq", text: str = "", **extra: Any) -> Question:
    return Question(f"q:{number}", f"Question: {number}?\n", accepted, source, extra, text)


def answered(question: Question, answer: str | None, sample: int = 0, *before: Turn) -> Answered:
    """Evaluated episode of the turns `before` and an answer of three tokens; there is none if `answer` is None."""
    last = [] if answer is None else [turn(Action.ANSWER, answer, tokens=3)]
    finish = Finish.TURN_LIMIT if answer is None else Finish.ANSWER
    done = trajectory(uid=question.uid, sample=sample, turns=[*before, *last], finish=finish)
    return Answered(question, done, plain_score(done, question))
