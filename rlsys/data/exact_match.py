"""Exact match of the final answer, after the normalisation of SQuAD as Search-R1 applies it.

Only the answer of the last turn counts, which the protocol read from generated text. The prompt's
example answer and the tags quoted in an invalid-action message can therefore never score.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, ASCII punctuation deleted, articles replaced by a space, white space collapsed."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the normalised prediction equals any normalised answer."""
    normalized = normalize(prediction)
    return any(normalized == normalize(answer) for answer in answers)


def score(trajectory: Trajectory, question: Question) -> float:
    """1.0 for a final answer that matches, 0.0 for another or for none."""
    answer = trajectory.answer
    return float(answer is not None and exact_match(answer, question.answers))
