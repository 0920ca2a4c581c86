"""Compares a predicted text with the accepted answers: exact match, containment, F1. Pure.

All measures first apply SQuAD normalisation, as in Search-R1. Only the answer of the last turn counts. It is parsed
from generated text, so neither the prompt's example answer nor the tags quoted in an invalid-action message can score.
An exact match scores 1 under every measure. An accepted answer that normalises to nothing ("the", "...") is contained
in no text.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from rlsys.data.question import Question
from rlsys.data.trajectory import Sample, Trajectory

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lowercase `text`, delete ASCII punctuation, replace articles by a space, and collapse white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """True if the normalised prediction equals one of the normalised answers."""
    return normalize(prediction) in map(normalize, answers)


def score(trajectory: Trajectory, question: Question) -> float:
    """Return 1.0 if the final answer matches exactly, else 0.0, also without an answer."""
    answer = trajectory.answer
    return float(answer is not None and exact_match(answer, question.answers))


def passes(sample: Sample, question: Question, pass_reward: float | None) -> bool:
    """True if an episode passes: its reward is at least `pass_reward`, or without one, its answer matches exactly."""
    return bool(score(sample.trajectory, question)) if pass_reward is None else sample.reward >= pass_reward


def contains(text: str, answers: Iterable[str]) -> bool:
    """True if the normalised text contains one of the normalised answers as a substring."""
    normalized = normalize(text)
    return any(answer and answer in normalized for answer in map(normalize, answers))


def sub_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True if an answer is contained in the prediction or equals it (cover exact match)."""
    return contains(prediction, answers) or exact_match(prediction, answers)


def f1(prediction: str, answers: Iterable[str]) -> float:
    """Return the best SQuAD bag-of-words F1 (arXiv 1606.05250) over `answers`; 0 without answers."""
    words = normalize(prediction).split()
    return max((_f1(words, normalize(answer).split()) for answer in answers), default=0.0)


def _f1(predicted: Sequence[str], accepted: Sequence[str]) -> float:
    """Return 2 PR / (P + R) = 2 shared / (predicted + accepted); 1 for two empty bags."""
    if not predicted and not accepted:
        return 1.0
    shared = (Counter(predicted) & Counter(accepted)).total()
    return 2 * shared / (len(predicted) + len(accepted))
