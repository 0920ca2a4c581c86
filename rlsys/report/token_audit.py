"""Audits how many drawn tokens re-tokenising the text does not give back, where, and what that does to the ratio.

A turn is drawn token by token; its text, within the whole episode's, is tokenised anew (`task.token_mode=retokenize`
trains on that; with `append` this is what would differ). A stretch is a piece of text at whose ends both ways have a
cut, and none in between that both have: one and the same token, or the least that can be compared. The stretches of a
turn follow each other without gap or overlap. The log-ratio of a stretch is

    sum of log pi_old(t) over its re-tokenised tokens  -  sum of log mu(t) over its drawn ones,

which would be 0 if text had one probability however it is cut. It has not: that of other tokens is the probability of a
path that was not taken, mostly a far less likely one. Stretches of one and the same token are the baseline: the
numerics, and an older policy's distance. With `append` there is no bias to be measured: pi_old is of the drawn tokens.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsys.config.schema import TokenMode
from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.observe.kept import Kept, Pieces
from rlsys.observe.run_folder import RunFolder, section
from rlsys.observe.samples import visible
from rlsys.report.drift import QUANTILES, Spread, spread
from rlsys.rollout.agent.tokens import Codec

Floats = NDArray[np.float64]

Span = tuple[int, int]
"""Half-open range, of characters unless it is said otherwise."""
BROKEN_CHARACTER = "\ufffd"
_LONGEST_TAG = 40
"""Characters; looking at the whole text for each stretch would take long."""


class OtherTokeniser(ValueError):
    """The tokeniser is not the one of the run."""


class CutPlace(StrEnum):
    """Where in the text two ways of cutting it part. The first that holds, of the characters beside any cut that only
    one way has; of all characters, where the cuts agree and the tokens do not."""

    TAG = "tag"
    BROKEN = "broken"
    """At drawn bytes that make up no character: the text has U+FFFD for them, which is other bytes."""
    UNICODE = "unicode"
    DIGIT = "digit"
    SPACE = "space"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RetokenisedText:
    """The text of a whole episode, ids and characters of its tokens (both [tokens]), and characters of each turn."""

    text: str
    ids: NDArray[np.int32]
    spans: Sequence[Span]
    """Neither starts nor ends ever fall."""
    turns: Sequence[Span]
    limit: int
    """Tokens that count: those behind it were cut off to keep the run's limit."""

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

    span: Span
    drawn: Span
    """Indices into the turn's drawn tokens."""
    again: Span
    """Indices into the tokens of the whole text."""
    whole: bool
    """The tokens have the text of `span` and no more; not so at an edge of the turn that a token lies across."""
    disputed: tuple[int, ...]
    """Characters before which only one way has a cut."""


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
    """Characters of tokens that follow each other from `start`; an empty piece has the span of what completes it."""
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
    tags = [tag.span() for tag in re.compile(r"</?[A-Za-z_][\w-]*>").finditer(text, *around)]
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


EXAMPLES = 5
"""Shown of each kind of place."""
AROUND = 20
"""Characters shown on each side of an example."""
NEEDED = "tokenizer.json"


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
    """Stretches that differ."""

    def __add__(self, other: Count) -> Count:
        """The tokens of both."""
        return Count(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Example:
    """A way in which tokens differ, where it was met first."""

    place: CutPlace
    count: int
    drawn: tuple[str, ...]
    """Texts of tokens. A character of several is in the last of them."""
    again: tuple[str, ...]
    before: str
    after: str
    step: int
    question_uid: str
    sample: int
    turn: int
    log_ratio: float | None


@dataclass(frozen=True, slots=True)
class Bias:
    """Log-ratios of stretches, in nats."""

    differing: Spread
    after_change: Spread
    """The same token on both sides, but others before it, in its turn or its context."""
    same: Spread
    """The same token after the same tokens: the baseline."""


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """The audit of all kept trajectories of a run in `task.token_mode`, by the number of the turn and the kind of place."""

    mode: str
    trajectories: int
    total: Count
    by_turn: Mapping[int, Count]
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


def audit_run(run: RunFolder, tokenizer: Path | None = None) -> TokenAudit:
    """Audit what `run` has kept, with the tokenizer in folder `tokenizer`, or else its model's. Raises UserError."""
    mode = section(run.config, "task").get("token_mode")
    if not isinstance(mode, str) or mode not in list(TokenMode):
        raise UserError(
            f"{run.path / 'config.yaml'} does not say task.token_mode, without which its tokens cannot be audited; restore it.",
            code="missing",
            key="task.token_mode",
        )
    path = section(run.config, "model").get("path")
    given = f"model.path={path}" if tokenizer is None else f"--tokenizer {tokenizer}"
    key = "model.path" if tokenizer is None else "--tokenizer"
    folder = tokenizer or (Path(path) if isinstance(path, str) else None)
    if folder is None or not (folder / NEEDED).is_file():
        raise UserError(
            f"{given} of {run.path} has no {NEEDED} here, without which no text can be tokenised again; name a folder that "
            f"has it: rlsys audit tokens {run.path} --tokenizer DIR.",
            code="not_found",
            key=key,
        )
    kept = run.trajectories()
    first = next(kept, None)
    if first is None:
        raise UserError(
            f"{run.path} has no trajectories to audit: train with tracking.trajectories above 0, or null for all of them.",
            code="empty",
            key=str(run.path),
        )
    try:
        return audit(chain((first,), kept), _open_codec(folder), TokenMode(mode))
    except OtherTokeniser as problem:
        raise UserError(
            f"{problem}: {given} is not the one of {run.path}; name the folder that it began with: "
            f"rlsys audit tokens {run.path} --tokenizer DIR.",
            code="mismatch",
            key=key,
        ) from problem


def _open_codec(folder: Path) -> Codec:
    """The tokenizer in `folder`. Raises UserError if it has no characters of tokens, or cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # Of a damaged file, whatever the libraries below stumble over.
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        sentence = f"The tokenizer in {folder} cannot be opened ({reason}); give a whole one."
        raise UserError(sentence, code="malformed", key=str(folder)) from problem
    return Codec(tokenizer)


def audit(kept: Iterable[Kept], codec: Codec, mode: TokenMode) -> TokenAudit:
    """Audit `kept` trajectories of a run in `mode`. Raises OtherTokeniser if `codec` does not cut as the run did."""
    tally = _Tally(codec, mode)
    for trajectory in kept:
        tally.add(trajectory)
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
        ways = self._met.most_common()
        shown = [found for place in CutPlace for found in [found for found in ways if found[0][0] is place][:EXAMPLES]]
        return tuple(replace(self._first[way], count=count) for way, count in shown)


def _sizes(turn: _Turn, found: Stretch, tokens: Span, differs: bool) -> Count:
    """The tokens of one stretch."""
    drawn = found.drawn[1] - found.drawn[0]
    start, end = turn.span
    trained = sum(start <= left and right <= end for left, right in turn.text.spans[slice(*tokens)])
    return Count(0, drawn, drawn * differs, trained, trained * differs, int(differs))


_PLACES = ("at a tag", "bytes of no character", "beside non-ASCII", "beside a digit", "beside white space", "elsewhere")
PLACES: dict[str, str] = dict(zip(CutPlace, _PLACES, strict=True))


def render_audit(found: TokenAudit, console: Console) -> None:
    """Print `found`."""
    for sentence in sentences(found):
        console.print(Text(sentence))
    if found.total.stretches:
        turns = {f"turn {number + 1}": count for number, count in found.by_turn.items()}
        places = {PLACES[place]: count for place, count in found.by_place.items()}
        console.print(Text(), _counts("By turn", turns, of_all=True))
        console.print(_counts("By kind of place", places, of_all=False))
        console.print(Text("Most frequent, as it was first", style="italic"))
        for example in found.examples:
            console.print(*_example(example), sep="\n")
    if found.bias is not None:
        console.print(Text(), _bias("Log-ratio of stretches, nats", found.bias))
    if found.bias_same_version is not None and found.bias_same_version != found.bias:
        console.print(Text(), _bias("Of them, drawn by the trained policy itself", found.bias_same_version))


def sentences(found: TokenAudit) -> Iterator[str]:
    """What was found, in words."""
    total, affected = found.total, found.affected
    if found.mode == TokenMode.append:
        yield "task.token_mode=append trains on the drawn tokens: this is what re-tokenising their text would change."
    yield (
        f"{found.trajectories:,} trajectories, {total.turns:,} turns: {total.drawn_differing:,} of {total.drawn:,} drawn "
        f"tokens ({_share(total.drawn_differing, total.drawn)}) are not what re-tokenising their text gives, and "
        f"{total.trained_differing:,} of its {total.trained:,} tokens "
        f"({_share(total.trained_differing, total.trained)}) were not drawn."
    )
    if found.bias is not None:
        yield (
            f"{found.after_change:,} more come after such tokens: {affected['tokens']:.2%} of the trained tokens of text "
            f"have no log-prob to compare, in {affected['turns']:.1%} of turns, {affected['trajectories']:.1%} of trajectories and "
            f"{affected['steps']:.0%} of steps."
        )
    if found.crossing:
        yield f"{found.crossing:,} stretches have a token across the edge of their turn, which is not trained."
    if found.special_lost:
        yield f"{found.special_lost:,} special tokens were drawn that the text does not hold."
    if found.unknown_turns:
        yield f"Of {found.unknown_turns:,} turns it is not known which tokens were drawn: they are left out."
    if found.bias is not None and found.bias.differing.mean is not None and found.bias.same.mean_abs is not None:
        yield (
            f"A stretch that differs has a log-ratio of {found.bias.differing.mean:+.2f} nats on average, where the "
            f"numerics of one and the same token come to {found.bias.same.mean_abs:.1e}."
        )


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.2%}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="italic")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _counts(title: str, rows: Mapping[str, Count], *, of_all: bool) -> Table:
    """`of_all`: the counts hold tokens that do not differ too."""
    table = _table(title, "", "turns", "stretches", "drawn", "other", "trained", "other")
    for name, row in rows.items():
        drawn, trained = (f"{row.drawn:,}", f"{row.trained:,}") if of_all else ("", "")
        others = f"{row.drawn_differing:,}", f"{row.trained_differing:,}"
        table.add_row(name, f"{row.turns:,}", f"{row.stretches:,}", drawn, others[0], trained, others[1])
    return table


def _bias(title: str, bias: Bias) -> Table:
    table = _table(title, "", "stretches", "mean", "mean |.|", "mean exp", "max |.|")
    rows = {"tokens differ": bias.differing, "same, after a change": bias.after_change, "same": bias.same}
    for name, row in rows.items():
        forms = ((row.mean, "+.1e"), (row.mean_abs, ".1e"), (row.exp_mean, ".4g"), (row.largest, ".1e"))
        table.add_row(name, f"{row.count:,}", *("-" if value is None else format(value, form) for value, form in forms))
    return table


def _example(one: Example) -> Iterator[Text]:
    ratio = "" if one.log_ratio is None else f", {one.log_ratio:+.2f} nats"
    yield Text(f"{one.count:,} x {PLACES[one.place]}{ratio}: {_tokens(one.drawn)}  ->  {_tokens(one.again)}")
    yield Text(f"    {_shown(one.before)}[{_shown(''.join(one.again))}]{_shown(one.after)}", style="dim")


def _tokens(pieces: Sequence[str]) -> str:
    """Texts of tokens, a dot for one that is part of a character which a later one completes."""
    return " | ".join(_shown(piece) if piece else "." for piece in pieces)


def _shown(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")
