"""How far a predicted text agrees with the accepted answers, beyond exact match. Pure.

All compare after `rlsys.data.exact_match.normalize`. Invariant: a text that matches exactly has 1 by each of
them. An accepted answer of which the normalisation leaves nothing ("the", "...") is contained in no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rlsys.data.exact_match import exact_match, normalize


def contains(text: str, answers: Iterable[str]) -> bool:
    """Whether the normalised text has any normalised answer in it, as a run of characters."""
    normalized = normalize(text)
    return any(bool(answer) and answer in normalized for answer in map(normalize, answers))


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
