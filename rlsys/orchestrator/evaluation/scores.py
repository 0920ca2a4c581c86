"""What an answer is worth: exact match, F1 and cover exact match. Pure.

All three compare after SQuAD's normalisation (`rlsys.data.answers.normalize`) and take the best accepted answer.
Invariant: each is within [0, 1], an exact match has 1 by all of them, and no answer has 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.data.answers import exact_match, f1, normalize, sub_exact_match

_CLOSED = frozenset({"yes", "no", "noanswer"})


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one answer."""

    em: float
    """1 where it equals an accepted answer."""
    f1: float
    sub_em: float
    """1 where it contains an accepted answer."""


NOTHING = Scores(0.0, 0.0, 0.0)
"""Of no answer."""


def scores_of(answer: str | None, accepted: Sequence[str]) -> Scores:
    """The scores of `answer`, None for none, against the `accepted` ones."""
    if answer is None:
        return NOTHING
    return Scores(
        em=float(exact_match(answer, accepted)),
        f1=token_f1(answer, accepted),
        sub_em=float(sub_exact_match(answer, accepted)),
    )


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """F1 of words as HotpotQA's script has it, and FlashRAG after it: SQuAD's (1606.05250), but an answer of yes or no
    shares nothing with any other, so that "no" earns nothing from "no one"."""
    said = normalize(answer)
    comparable = [gold for gold in accepted if said == (norm := normalize(gold)) or not {said, norm} & _CLOSED]
    return f1(answer, comparable)
