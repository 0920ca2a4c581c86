"""Tokenises the text of a kept episode anew, and lays the two ways of cutting it into tokens side by side. Pure.

A stretch is a piece of text at whose ends both ways have a cut, and none in between that both have. Where it is one token,
the same one, on both sides, nothing differs; elsewhere a stretch is the least that can be compared, as its text is the
same in either way.

Invariants: the stretches of a turn follow each other without gap or overlap; every token of either side that has text in
the turn is in exactly one. A character that several tokens make up has no cut within it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import TokenMode
from rlsys.observe.kept import Kept
from rlsys.rollout.agent.tokens import Codec

Span = tuple[int, int]  # Half-open range of characters

BROKEN_CHARACTER = "\ufffd"
_LONGEST_TAG = 40  # Characters; looking at the whole text for each stretch would take long
_TAG = re.compile(r"</?[A-Za-z_][\w-]*>")


class OtherTokeniser(ValueError):
    """The tokeniser is not the one of the run."""


class CutPlace(StrEnum):
    """Where in the text two ways of cutting it part. The first that holds, of the characters beside any cut that only
    one way has; of all characters, where the cuts agree and the tokens do not."""

    TAG = "tag"  # In a tag such as </search>, or at its edge
    BROKEN = "broken"
    """At drawn bytes that make up no character: the text has U+FFFD for them, which is other bytes."""
    UNICODE = "unicode"  # Beside a character that is not ASCII
    DIGIT = "digit"
    SPACE = "space"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RetokenisedText:
    """The text of a whole episode and its tokens."""

    text: str
    ids: NDArray[np.int32]  # [tokens]
    spans: Sequence[Span]  # [tokens] characters of each; neither starts nor ends ever fall
    turns: Sequence[Span]  # Characters of each turn
    limit: int  # Tokens that count: those behind it were cut off to keep the run's limit

    def within(self, turn: Span) -> Span:
        """Indices of the tokens that overlap the characters `turn`."""
        starts, ends = np.array(self.spans, np.int64).reshape(-1, 2).T
        first = int(np.searchsorted(ends, turn[0], side="right"))
        return first, max(first, int(np.searchsorted(starts, turn[1], side="left")))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that the engine drew for a turn, as far as they are text and kept."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    special_lost: int
    """Special tokens that the text does not hold, without an end-of-sequence token that training has."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a turn's text, and the tokens of it in either way."""

    span: Span  # In characters of the whole text
    drawn: Span  # Half-open range of indices into the turn's drawn tokens
    again: Span  # Into the tokens of the whole text
    whole: bool
    """The tokens have the text of `span` and no more; not so at an edge of the turn that a token lies across."""
    disputed: tuple[int, ...]  # Characters before which only one way has a cut


def tokenised(one: Kept, codec: Codec, mode: TokenMode) -> RetokenisedText:
    """The text of `one`, tokenised by `codec`. Raises OtherTokeniser if the run's tokens are not of it."""
    text = codec.prompt(one.prompt)
    prompt_length = len(text)
    turns = []
    for number, turn in enumerate(one.turns):
        said = turn.text if mode is TokenMode.retokenize else codec.decode(_own(one, number))
        turns.append((len(text), len(text) + len(said)))
        text += said + turn.observation
    encoded = codec.encode_spans(text)
    ids = np.array(encoded.ids, np.int32)
    if mode is TokenMode.retokenize:
        as_trained, limit = ids, len(one.token_ids)
    else:
        as_trained, limit = np.array(codec.encode_spans(text[:prompt_length]).ids, np.int32), len(ids)
    shared = min(len(as_trained), len(one.token_ids))
    if not np.array_equal(as_trained[:shared], one.token_ids[:shared]):
        raise OtherTokeniser(
            f"Step {one.step}, question {one.question_uid}, sample {one.sample} has other tokens than this tokeniser makes "
            "of its text"
        )
    return RetokenisedText(text, ids, encoded.spans, turns, limit)


def drawn_of(one: Kept, number: int, mode: TokenMode, special_ids: frozenset[int]) -> Drawn:
    """The tokens that were drawn for turn `number` of `one`."""
    turn = one.turns[number]
    kept = len(turn.sampled_ids) if mode is TokenMode.retokenize else len(_own(one, number))
    ids, logprobs = turn.sampled_ids[:kept], turn.sampled_logprobs[:kept].astype(np.float64)
    special = np.isin(ids, list(special_ids))
    last_is_own = one.turn_of_token[-1] == number and one.versions[-1] >= 0
    ended = bool(last_is_own and len(ids) and special[-1] and one.token_ids[-1] == ids[-1])
    return Drawn(ids[~special], logprobs[~special], int(special.sum()) - ended)


def _own(one: Kept, number: int) -> list[int]:
    """The trained tokens that turn `number` drew."""
    ids: list[int] = one.token_ids[(one.turn_of_token == number) & (one.versions >= 0)].tolist()
    return ids


def spans_of(pieces: Sequence[str], start: int) -> list[Span]:
    """Where the texts of tokens lie that follow each other from character `start` on.

    An empty piece is part of a character that a later token completes: it has the span of that one.
    """
    ends = list(accumulate((len(piece) for piece in pieces), initial=start))
    spans = list(pairwise(ends))
    for index in reversed(range(len(spans) - 1)):
        if not pieces[index]:
            spans[index] = spans[index + 1]
    return spans


def stretches(drawn: Sequence[Span], again: Sequence[Span], turn: Span) -> list[Stretch]:
    """The stretches of the text at `turn`, which `drawn` tokens cover from its start, from left to right.

    `again` are the tokens that overlap it, at least one; either may go beyond it. An empty turn has no stretch.
    """
    start, end = turn
    if start == end:
        return []
    ours, theirs = _cuts(drawn, turn), _cuts(again, turn)
    common = sorted({*(ours.keys() & theirs.keys()), start, end})
    indices = {start: (0, 0), end: (len(drawn), len(again))}
    found = []
    for left, right in pairwise(common):
        (drawn_from, again_from), (drawn_to, again_to) = (
            indices[at] if at in indices else (ours[at], theirs[at]) for at in (left, right)
        )
        covered = [side[n:m] for side, n, m in ((drawn, drawn_from, drawn_to), (again, again_from, again_to))]
        found.append(
            Stretch(
                span=(left, right),
                drawn=(drawn_from, drawn_to),
                again=(again_from, again_to),
                whole=all(side and side[0][0] == left and side[-1][1] == right for side in covered),
                disputed=tuple(sorted(at for at in ours.keys() ^ theirs.keys() if left <= at <= right)),
            )
        )
    return found


def place_of(text: str, stretch: Stretch) -> CutPlace:
    """The kind of place that `stretch` of `text` is."""
    start, end = stretch.span
    near = "".join(text[max(0, at - 1) : at + 1] for at in stretch.disputed) or text[start:end]
    around = max(0, start - _LONGEST_TAG), end + _LONGEST_TAG
    tags = [tag.span() for tag in _TAG.finditer(text, *around)]
    at_tag = any(left <= at <= right for at in stretch.disputed or range(start, end) for left, right in tags)
    kinds = {
        CutPlace.TAG: at_tag,
        CutPlace.BROKEN: BROKEN_CHARACTER in text[start:end],
        CutPlace.UNICODE: not near.isascii(),
        CutPlace.DIGIT: any(letter.isdigit() for letter in near),
        CutPlace.SPACE: any(letter.isspace() for letter in near),
    }
    return next((kind for kind, holds in kinds.items() if holds), CutPlace.OTHER)


def _cuts(spans: Sequence[Span], turn: Span) -> dict[int, int]:
    """Character of each cut in `turn`, its ends included -> how many tokens lie before it."""
    start, end = turn
    cuts: dict[int, int] = {}
    if spans and spans[0][0] == start:
        cuts[start] = 0
    for index, (left, right) in enumerate(pairwise(spans), 1):
        if left[1] <= right[0] and start < right[0] < end:
            cuts.setdefault(right[0], index)
    if spans and spans[-1][1] == end:
        cuts[end] = len(spans)
    return cuts
