"""Makes reproducible episodes of random tokens for each question and step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Trajectory, Turn
from tests.support.trajectories import trajectory

Recording = dict[tuple[str, int], list[Trajectory]]
"""(question's uid, weight version that sampled) -> its episodes"""
RIGHT, WRONG = "yes", "no"


@dataclass(frozen=True)
class Shape:
    steps: int
    samples: int
    vocab: int


def record(questions: Sequence[Question], shape: Shape, seed: int) -> Recording:
    """Episodes of every question at every step; a third of the answers are right."""
    random = np.random.default_rng(seed)
    return {
        (question.uid, step): [_episode(question, number, step, shape, random) for number in range(shape.samples)]
        for step in range(shape.steps)
        for question in questions
    }


def _episode(question: Question, number: int, step: int, shape: Shape, random: np.random.Generator) -> Trajectory:
    """Episode of one to three turns with observations between them."""
    turns = int(random.integers(1, 4))
    lengths = [int(random.integers(3, 9))]
    for _ in range(turns):
        lengths += [int(random.integers(2, 12)), int(random.integers(2, 9))]
    lengths.pop()
    turn_of_token = np.repeat([place // 2 if place % 2 else -1 for place in range(len(lengths))], lengths)
    trained = turn_of_token >= 0
    answer = RIGHT if random.random() < 1 / 3 else WRONG
    made = trajectory(
        random.integers(0, shape.vocab, len(trained)).tolist(),
        trained.tolist(),
        uid=question.uid,
        sample=number,
        turns=[*[_turn(Action.SEARCH, "") for _ in range(turns - 1)], _turn(Action.ANSWER, answer)],
        version=step,
        turn_of_token=turn_of_token.tolist(),
    )
    return replace(made, prompt_length=lengths[0])


def _turn(action: Action, content: str) -> Turn:
    return Turn("", action, content, "", 0, 0, 0, 0.0, 0.0)
