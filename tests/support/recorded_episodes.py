"""Makes reproducible episodes of random tokens for each question and step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory, Turn

Recording = dict[tuple[str, int], list[Trajectory]]
"""(question's uid, weight version that sampled) -> its episodes"""
RIGHT, WRONG = "yes", "no"


@dataclass(frozen=True)
class Shape:
    """Size of a recording."""

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
    return Trajectory(
        question_uid=question.uid,
        sample=number,
        tokens=random.integers(0, shape.vocab, len(trained)).astype(np.int32),
        prompt_length=lengths[0],
        loss_mask=trained,
        rollout_logprobs=np.full(len(trained), np.nan, dtype=np.float32),
        versions=np.where(trained, step, -1).astype(np.int32),
        turn_of_token=turn_of_token.astype(np.int32),
        tokens_differing=0,
        response="",
        turns=(*[_turn(Action.SEARCH, "") for _ in range(turns - 1)], _turn(Action.ANSWER, answer)),
        finish=Finish.ANSWER,
    )


def _turn(action: Action, content: str) -> Turn:
    return Turn(
        text="",
        action=action,
        content=content,
        observation="",
        generated_tokens=0,
        prompt_tokens=0,
        cached_tokens=0,
        generate_s=0.0,
        tool_s=0.0,
    )
