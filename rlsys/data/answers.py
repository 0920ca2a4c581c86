"""Compares a predicted text with the accepted answers: exact match, containment, F1. Pure.

All compare after the normalisation of SQuAD as Search-R1 applies it. Only the answer of the last turn counts, which the
protocol read from generated text, so the example answer of a prompt and the tags quoted in an invalid-action message can
never score. A text that matches exactly has 1 by each measure. An accepted answer of which the normalisation leaves
nothing ("the", "...") is contained in no text.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, ASCII punctuation deleted, articles replaced by a space, white space collapsed."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """The normalised prediction equals one of the normalised answers."""
    return normalize(prediction) in map(normalize, answers)


def score(trajectory: Trajectory, question: Question) -> float:
    """1.0 for a final answer that matches, 0.0 for another or for none."""
    answer = trajectory.answer
    return float(answer is not None and exact_match(answer, question.answers))


def contains(text: str, answers: Iterable[str]) -> bool:
    """The normalised text has one of the normalised answers in it, as a run of characters."""
    normalized = normalize(text)
    return any(answer and answer in normalized for answer in map(normalize, answers))


def sub_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Cover exact match: an answer is contained in the prediction, or equals it."""
    return contains(prediction, answers) or exact_match(prediction, answers)


def f1(prediction: str, answers: Iterable[str]) -> float:
    """SQuAD's F1 (1606.05250) of bags of words, the best over `answers`; 0 where there are none."""
    words = normalize(prediction).split()
    return max((_f1(words, normalize(answer).split()) for answer in answers), default=0.0)


def _f1(predicted: Sequence[str], accepted: Sequence[str]) -> float:
    """2 PR / (P + R), which is 2 shared / (predicted + accepted); two empty bags agree."""
    if not predicted and not accepted:
        return 1.0
    shared = (Counter(predicted) & Counter(accepted)).total()
    return 2 * shared / (len(predicted) + len(accepted))
