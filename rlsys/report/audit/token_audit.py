"""Audits how many drawn tokens re-tokenising the text does not give back, where, and what that does to the ratio.

A turn is drawn token by token; its text, within the whole episode's, is tokenised anew (`task.token_mode=retokenize`
trains on that; with `append` this is what would differ). Both cut the same text, so a turn falls into stretches
(`rlsys.report.audit.retokenising`): one and the same token, or tokens that differ. The log-ratio of a stretch is

    sum of log pi_old(t) over its re-tokenised tokens  -  sum of log mu(t) over its drawn ones,

which would be 0 if text had one probability however it is cut. It has not: that of other tokens is the probability of a
path that was not taken, mostly a far less likely one. Stretches of one and the same token are the baseline: the numerics,
and an older policy's distance. Tokens that are the same but come after others that differ stand apart. With `append` there
is no bias, and none to be measured: pi_old is of the drawn tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import TokenMode
from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.observe.kept import Kept, Pieces
from rlsys.observe.run_folder import RunFolder, section
from rlsys.report.audit.retokenising import (
    CutPlace,
    Drawn,
    OtherTokeniser,
    RetokenisedText,
    Span,
    Stretch,
    drawn_of,
    place_of,
    spans_of,
    stretches,
    tokenised,
)
from rlsys.report.spread import QUANTILES, Spread, spread
from rlsys.rollout.agent.tokens import Codec

Floats = NDArray[np.float64]

EXAMPLES = 5  # Shown of each kind of place
AROUND = 20  # Characters shown on each side of an example
NEEDED = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of turns, or of one kind of place."""

    turns: int = 0
    drawn: int = 0  # Tokens that the engine returned and that are text of the turn
    drawn_differing: int = 0  # Of them, those that re-tokenising does not give back
    trained: int = 0  # Tokens of the re-tokenised text that lie wholly within the turn
    trained_differing: int = 0  # Of them, those that were not drawn
    stretches: int = 0  # That differ

    def __add__(self, other: Count) -> Count:
        """The tokens of both."""
        return Count(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Example:
    """A way in which tokens differ, where it was met first."""

    place: CutPlace
    count: int  # How often these drawn tokens became those
    drawn: tuple[str, ...]  # Their texts. A character of several tokens is in the last of them.
    again: tuple[str, ...]
    before: str
    after: str
    step: int
    question_uid: str
    sample: int
    turn: int
    log_ratio: float | None  # Of this one; None where it cannot be compared


@dataclass(frozen=True, slots=True)
class Bias:
    """Log-ratios of stretches, in nats."""

    differing: Spread
    after_change: Spread  # The same token on both sides, but others before it, in its turn or its context
    same: Spread  # The same token after the same tokens: the baseline


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """The audit of all kept trajectories."""

    mode: str  # `task.token_mode`.
    trajectories: int
    total: Count
    by_turn: Mapping[int, Count]  # Number of the turn in its episode, from 0
    by_place: Mapping[str, Count]
    """Kind of place -> what differs there; `turns` are those with at least one such stretch."""
    examples: tuple[Example, ...]  # The most frequent of each kind of place
    special_lost: int
    """Special tokens that were drawn and that text does not hold. They are not counted among the drawn."""
    unknown_turns: int
    """Turns with a text whose drawn tokens were not kept; they are not in any other figure but `turns`."""
    crossing: int  # Differing stretches with a token that lies across an edge of its turn. It is not trained.
    after_change: int
    """Trained tokens that are as drawn, but after others that are not; so they have no log-prob to compare either."""
    affected: Mapping[str, float]
    """Shares that re-tokenising affects: of trained `tokens` (differing, or after a change), and of `turns`,
    `trajectories` and `steps` with at least one stretch that differs."""
    bias: Bias | None  # Over all stretches that can be compared; None with `append`
    bias_same_version: Bias | None  # Over those that the trained policy itself drew


def audit_run(run: RunFolder, tokenizer: Path | None = None) -> TokenAudit:
    """Audit what `run` has kept, with the tokenizer in folder `tokenizer`, or else the one of its model.

    Raises UserError where the run has no trajectories, or the tokenizer is not there or is another one.
    """
    mode = section(run.config, "task").get("token_mode")
    if not isinstance(mode, str) or mode not in list(TokenMode):
        raise UserError(
            f"{run.path / 'config.yaml'} does not say task.token_mode, without which its tokens cannot be audited; restore it."
        )
    path = section(run.config, "model").get("path")
    given = f"model.path={path}" if tokenizer is None else f"--tokenizer {tokenizer}"
    folder = tokenizer or (Path(path) if isinstance(path, str) else None)
    if folder is None or not (folder / NEEDED).is_file():
        raise UserError(
            f"{given} of {run.path} has no {NEEDED} here, without which no text can be tokenised again; name a folder that "
            f"has it: rlsys audit tokens {run.path} --tokenizer DIR."
        )
    kept = run.trajectories()
    first = next(kept, None)
    if first is None:
        raise UserError(
            f"{run.path} has no trajectories to audit: train with tracking.trajectories above 0, or null for all of them."
        )
    try:
        return audit(chain((first,), kept), _open_codec(folder), TokenMode(mode))
    except OtherTokeniser as problem:
        raise UserError(
            f"{problem}: {given} is not the one of {run.path}; name the folder that it began with: "
            f"rlsys audit tokens {run.path} --tokenizer DIR."
        ) from problem


def _open_codec(folder: Path) -> Codec:
    """The tokenizer in `folder`. Raises UserError if it has no characters of tokens, or cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # Of a damaged file, whatever the libraries below stumble over.
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise UserError(f"The tokenizer in {folder} cannot be opened ({reason}); give a whole one.") from problem
    return Codec(tokenizer)


def audit(kept: Iterable[Kept], codec: Codec, mode: TokenMode) -> TokenAudit:
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
    text: RetokenisedText
    drawn: Drawn
    span: Span
    tokens: Span  # Of the re-tokenised text, those that overlap the turn

    @property
    def is_as_drawn(self) -> bool:
        """All of it is, edges included, which is nearly always so and quickly seen."""
        first, last = self.tokens
        return (
            last <= self.text.limit
            and np.array_equal(self.drawn.ids, self.text.ids[first:last])
            and (self.text.spans[first][0], self.text.spans[last - 1][1]) == self.span
        )


@dataclass(slots=True)
class _LogRatios:
    """Gathers the log-ratios of a run in `retokenize` mode, where there are log-probs of the re-tokenised tokens."""

    after_change_tokens: int = 0
    _values: list[tuple[str, bool, Floats]] = field(default_factory=list)
    """Kind of stretch, whether the trained policy itself drew it, and values."""

    def add_same(self, one: Kept, tokens: Span, drawn: Floats) -> None:
        """Of tokens of `one` that are the drawn ones, whose log-probs are `drawn` [tokens]."""
        own = slice(*tokens)
        values = one.old_logprobs[own].astype(np.float64) - drawn
        known = np.isfinite(one.rollout_logprobs[own])
        current = one.versions[own] == one.policy_version
        self.after_change_tokens += int((~known).sum())
        for kind, of_kind in (("same", known), ("after_change", ~known)):
            self._values.append((kind, True, values[of_kind & current]))
            self._values.append((kind, False, values[of_kind & ~current]))

    def add_differing(self, one: Kept, tokens: Span, drawn: Floats) -> float:
        """Of trained `tokens` of `one` that stand for others, whose log-probs are `drawn` [any]; it is returned."""
        own = slice(*tokens)
        value = float(one.old_logprobs[own].astype(np.float64).sum() - drawn.sum())
        self._values.append(("differing", bool((one.versions[own] == one.policy_version).all()), np.array([value])))
        return value

    def bias(self, *, same_version: bool) -> Bias:
        """Of all stretches, or of those that the trained policy itself drew."""
        kinds: dict[str, list[Floats]] = {"differing": [], "after_change": [], "same": []}
        for kind, current, values in self._values:
            if current or not same_version:
                kinds[kind].append(values)
        return Bias(**{kind: spread(np.concatenate(parts) if parts else []) for kind, parts in kinds.items()})


_Way = tuple[CutPlace, tuple[str, ...], tuple[str, ...]]


class _Tally:
    """Sums over trajectories."""

    def __init__(self, codec: Codec, mode: TokenMode) -> None:
        self._codec, self._mode = codec, mode
        self._pieces = Pieces(codec.decode)
        self._trajectories = self._special_lost = self._crossing = self._unknown = 0
        self._by_turn: defaultdict[int, Count] = defaultdict(Count)
        self._by_place: defaultdict[CutPlace, Count] = defaultdict(Count)
        self._met: Counter[_Way] = Counter()
        self._first: dict[_Way, Example] = {}
        self._ratios = _LogRatios()
        self._steps: set[int] = set()
        self._affected: dict[str, set[tuple[Any, ...]]] = {name: set() for name in ("turns", "trajectories", "steps")}

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
            by_place={place.value: self._by_place[place] for place in CutPlace if place in self._by_place},
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

    def _compare_same(self, turn: _Turn, tokens: Span, logprobs: Floats) -> None:
        if self._mode is TokenMode.retokenize:
            self._ratios.add_same(turn.one, tokens, logprobs)

    def _differs(self, turn: _Turn, found: Stretch, tokens: Span, place: CutPlace, drawn: tuple[str, ...]) -> None:
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
        shown: Counter[CutPlace] = Counter()
        found = []
        for way, count in self._met.most_common():
            if shown[way[0]] < EXAMPLES:
                shown[way[0]] += 1
                found.append(replace(self._first[way], count=count))
        return tuple(sorted(found, key=lambda one: tuple(CutPlace).index(one.place)))


def _sizes(turn: _Turn, found: Stretch, tokens: Span, differs: bool) -> Count:
    """The tokens of one stretch."""
    drawn = found.drawn[1] - found.drawn[0]
    start, end = turn.span
    trained = sum(start <= left and right <= end for left, right in turn.text.spans[slice(*tokens)])
    return Count(0, drawn, drawn * differs, trained, trained * differs, int(differs))
