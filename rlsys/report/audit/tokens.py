"""How many drawn tokens re-tokenising the text does not give back, where, and what that does to the ratio. Pure.

A turn is drawn token by token; its text, within the whole episode's, is tokenised anew (`task.token_mode=retokenize`
trains on that; with `append` this is what would differ). Both cut the same text, so a turn falls into stretches
(`rlsys.report.audit.stretches`): one and the same token, or tokens that differ. `rlsys.report.audit.ratios` says what the bias on the
ratio is. With `append` there is none, and none to be measured: pi_old is of the drawn tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import TokenMode
from rlsys.files import json_safe
from rlsys.observe.kept import Kept
from rlsys.observe.pieces import Pieces
from rlsys.report.audit.ratios import Bias, LogRatios
from rlsys.report.audit.spread import QUANTILES
from rlsys.report.audit.stretches import Place, Span, Stretch, place_of, spans_of, stretches
from rlsys.report.audit.text import Drawn, Text, Tokeniser, drawn_of, tokenised

EXAMPLES = 5
"""Shown of each kind of place."""
AROUND = 20
"""Characters shown on each side of an example."""


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of turns, or of one kind of place."""

    turns: int = 0
    drawn: int = 0
    """Tokens that the engine returned and that are text of the turn."""
    drawn_differing: int = 0
    """Of them, those that re-tokenising does not give back."""
    trained: int = 0
    """Tokens of the re-tokenised text that lie wholly within the turn."""
    trained_differing: int = 0
    """Of them, those that were not drawn."""
    stretches: int = 0
    """That differ."""

    def __add__(self, other: Count) -> Count:
        """The tokens of both."""
        return Count(
            self.turns + other.turns,
            self.drawn + other.drawn,
            self.drawn_differing + other.drawn_differing,
            self.trained + other.trained,
            self.trained_differing + other.trained_differing,
            self.stretches + other.stretches,
        )


@dataclass(frozen=True, slots=True)
class Example:
    """A way in which tokens differ, where it was met first."""

    place: Place
    count: int
    """How often these drawn tokens became those."""
    drawn: tuple[str, ...]
    """Their texts. A character of several tokens is in the last of them."""
    again: tuple[str, ...]
    before: str
    after: str
    step: int
    question_uid: str
    sample: int
    turn: int
    log_ratio: float | None
    """Of this one; None where it cannot be compared."""


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """The audit of all kept trajectories."""

    mode: str
    """`task.token_mode`."""
    trajectories: int
    total: Count
    by_turn: Mapping[int, Count]
    """Number of the turn in its episode, from 0."""
    by_place: Mapping[str, Count]
    """Kind of place -> what differs there; `turns` are those with at least one such stretch."""
    examples: tuple[Example, ...]
    """The most frequent of each kind of place."""
    special_lost: int
    """Special tokens that were drawn and that text does not hold. They are not counted among the drawn."""
    unknown_turns: int
    """Turns with a text whose drawn tokens were not kept; they are not in any other figure but `turns`."""
    crossing: int
    """Differing stretches with a token that lies across an edge of its turn. It is not trained."""
    after_change: int
    """Trained tokens that are as drawn, but after others that are not; so they have no log-prob to compare either."""
    affected: Mapping[str, float]
    """Shares that re-tokenising affects: of trained `tokens` (differing, or after a change), and of `turns`,
    `trajectories` and `steps` with at least one stretch that differs."""
    bias: Bias | None
    """Over all stretches that can be compared; None with `append`."""
    bias_same_version: Bias | None
    """Over those that the trained policy itself drew."""


def audit(kept: Iterable[Kept], codec: Tokeniser, mode: TokenMode) -> TokenAudit:
    """Audit `kept` trajectories of a run in `mode`, which may come one by one.

    Raises OtherTokeniser if `codec` does not cut their text as the run did.
    """
    tally = _Tally(codec, mode)
    for one in kept:
        tally.add(one)
    return tally.result()


def as_json(report: TokenAudit) -> dict[str, Any]:
    """`report` in plain JSON types, with the `quantiles` that its lists are of."""
    return {**json_safe(asdict(report)), "quantiles": list(QUANTILES)}


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn of one trajectory."""

    one: Kept
    number: int
    text: Text
    drawn: Drawn
    span: Span
    tokens: Span
    """Of the re-tokenised text, those that overlap the turn."""

    @property
    def is_as_drawn(self) -> bool:
        """All of it is, edges included, which is nearly always so and quickly seen."""
        first, last = self.tokens
        return (
            last <= self.text.limit
            and np.array_equal(self.drawn.ids, self.text.ids[first:last])
            and (self.text.spans[first][0], self.text.spans[last - 1][1]) == self.span
        )


_Way = tuple[Place, tuple[str, ...], tuple[str, ...]]


class _Tally:
    """Sums over trajectories."""

    def __init__(self, codec: Tokeniser, mode: TokenMode) -> None:
        self._codec, self._mode = codec, mode
        self._pieces = Pieces(codec.decode)
        self._trajectories = self._special_lost = self._crossing = self._unknown = 0
        self._by_turn: defaultdict[int, Count] = defaultdict(Count)
        self._by_place: defaultdict[Place, Count] = defaultdict(Count)
        self._met: Counter[_Way] = Counter()
        self._first: dict[_Way, Example] = {}
        self._ratios = LogRatios()
        self._steps: set[int] = set()
        self._affected: dict[str, set[tuple[Any, ...]]] = {
            "turns": set(),
            "trajectories": set(),
            "steps": set(),
        }

    def add(self, one: Kept) -> None:
        """Take in one trajectory."""
        text = tokenised(one, self._codec, self._mode)
        self._trajectories += 1
        self._steps.add(one.step)
        for number, span in enumerate(text.turns):
            drawn = drawn_of(one, number, self._mode, self._codec.special_ids)
            self._special_lost += drawn.special_lost
            self._unknown += not len(one.turns[number].sampled_ids) and bool(one.turns[number].text)
            first, last = text.within(span)
            if drawn.ids.size and first < min(last, text.limit):
                self._by_turn[number] += self._count(_Turn(one, number, text, drawn, span, (first, last)))
            else:
                self._by_turn[number] += Count(turns=1)

    def result(self) -> TokenAudit:
        """What was found."""
        total = sum(self._by_turn.values(), start=Count())
        after_change = self._ratios.after_change_tokens
        of = {"turns": total.turns, "trajectories": self._trajectories, "steps": len(self._steps)}
        compared = self._mode is TokenMode.retokenize
        return TokenAudit(
            mode=self._mode.value,
            trajectories=self._trajectories,
            total=total,
            by_turn=dict(sorted(self._by_turn.items())),
            by_place={place.value: self._by_place[place] for place in Place if place in self._by_place},
            examples=self._examples(),
            special_lost=self._special_lost,
            unknown_turns=self._unknown,
            crossing=self._crossing,
            after_change=after_change,
            affected={
                "tokens": (total.trained_differing + after_change) / max(1, total.trained),
                **{name: len(self._affected[name]) / max(1, count) for name, count in of.items()},
            },
            bias=self._ratios.bias(same_version=False) if compared else None,
            bias_same_version=self._ratios.bias(same_version=True) if compared else None,
        )

    def _count(self, turn: _Turn) -> Count:
        drawn, (first, last) = turn.drawn, turn.tokens
        if turn.is_as_drawn:
            self._compare_same(turn, (first, last), drawn.logprobs)
            return Count(turns=1, drawn=len(drawn.ids), trained=last - first)
        pieces = self._pieces(drawn.ids.tolist())
        # What a protocol cut off behind the turn's text is no part of it; a token without a text at its end is.
        spans = [one for one in spans_of(pieces, turn.span[0]) if one[0] < turn.span[1] or one[0] == one[1]]
        count, places = Count(turns=1), set()
        for found in stretches(spans, turn.text.spans[first:last], turn.span):
            tokens = first + found.again[0], first + found.again[1]
            if tokens[1] > turn.text.limit:
                break
            own = slice(*found.drawn)
            differs = not np.array_equal(drawn.ids[own], turn.text.ids[slice(*tokens)])
            size = _sizes(turn, found, tokens, differs)
            count += size
            if differs:
                place = place_of(turn.text.text, found)
                self._by_place[place] += Count(int(place not in places)) + size
                places.add(place)
                self._differs(turn, found, tokens, place, pieces[own])
            else:
                self._compare_same(turn, tokens, drawn.logprobs[own])
        if places:
            where = turn.one.step, turn.one.question_uid, turn.one.sample, turn.number
            for name, depth in (("turns", 4), ("trajectories", 3), ("steps", 1)):
                self._affected[name].add(where[:depth])
        return count

    def _compare_same(self, turn: _Turn, tokens: Span, logprobs: NDArray[np.float64]) -> None:
        if self._mode is TokenMode.retokenize:
            self._ratios.add_same(turn.one, tokens, logprobs)

    def _differs(self, turn: _Turn, found: Stretch, tokens: Span, place: Place, drawn: tuple[str, ...]) -> None:
        """Note a stretch that differs, and its log-ratio where both sides are the text of it and trained."""
        log_ratio = None
        if not found.whole:
            self._crossing += 1
        elif self._mode is TokenMode.retokenize and turn.one.loss_mask[slice(*tokens)].all():
            logprobs = turn.drawn.logprobs[slice(*found.drawn)]
            log_ratio = self._ratios.add_differing(turn.one, tokens, logprobs)
        again = tuple(self._pieces(turn.text.ids[slice(*tokens)].tolist()))
        way = place, drawn, again
        self._met[way] += 1
        if way not in self._first:
            text, (start, end) = turn.text.text, found.span
            self._first[way] = Example(
                place=place,
                count=1,
                drawn=drawn,
                again=again,
                before=text[max(0, start - AROUND) : start],
                after=text[end : end + AROUND],
                step=turn.one.step,
                question_uid=turn.one.question_uid,
                sample=turn.one.sample,
                turn=turn.number,
                log_ratio=log_ratio,
            )

    def _examples(self) -> tuple[Example, ...]:
        shown: Counter[Place] = Counter()
        found = []
        for way, count in self._met.most_common():
            if shown[way[0]] < EXAMPLES:
                shown[way[0]] += 1
                found.append(replace(self._first[way], count=count))
        return tuple(sorted(found, key=lambda one: tuple(Place).index(one.place)))


def _sizes(turn: _Turn, found: Stretch, tokens: Span, differs: bool) -> Count:
    """The tokens of one stretch."""
    drawn = found.drawn[1] - found.drawn[0]
    start, end = turn.span
    trained = sum(start <= left and right <= end for left, right in turn.text.spans[slice(*tokens)])
    return Count(0, drawn, drawn * differs, trained, trained * differs, int(differs))
