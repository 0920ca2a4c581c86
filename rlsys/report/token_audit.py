"""Audits re-tokenisation: which sampled tokens it changes, in which positions, and its effect on the ratio.

The engine samples a turn token by token. Re-tokenisation tokenises the turn's text again, as part of the episode's
text. `task.token_mode=retokenize` trains on the result; with `append` the audit shows what would change.

A stretch is the shortest piece of text with a token boundary of both tokenisations at each end: one identical token, or
the smallest comparable piece. The stretches of a turn cover it without gap or overlap. The log-ratio of a stretch is

    sum of log pi_old(t) over its re-tokenised tokens  -  sum of log mu(t) over its sampled tokens.

It would be 0 if the probability of a text did not depend on its tokenisation. But the re-tokenised tokens were not
sampled, and are mostly far less likely. Stretches of identical tokens are the baseline: their log-ratio contains only
numerics and version lag. With `append` there is no bias to measure, because pi_old is computed for the sampled tokens.
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

from rlsys.config.schema import SearchR1Agent, TokenMode
from rlsys.errors import UserError, first_line
from rlsys.files import json_safe
from rlsys.observe.kept import Pieces, TrajectoryRecord
from rlsys.observe.run_folder import RunFolder, section
from rlsys.observe.samples import visible
from rlsys.report.drift import QUANTILES, Spread, spread
from rlsys.rollout.agent.tokens import Codec

Floats = NDArray[np.float64]

Span = tuple[int, int]
"""Half-open range, of characters unless stated otherwise."""
BROKEN_CHARACTER = "\ufffd"
_LONGEST_TAG = 40
"""Maximum length of a tag, in characters; limits the text searched for tags around each stretch."""


class OtherTokeniser(ValueError):
    """Raised if the tokeniser is not the run's."""


class CutPlace(StrEnum):
    """Kind of position in which two tokenisations differ: the first kind that applies.

    The kind depends on the characters beside each token boundary that only one tokenisation has. If the boundaries
    agree and only the tokens differ, it depends on all characters of the stretch.
    """

    TAG = "tag"
    BROKEN = "broken"
    """Sampled bytes that are invalid UTF-8; the text has U+FFFD instead, whose bytes differ."""
    UNICODE = "unicode"
    DIGIT = "digit"
    SPACE = "space"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RetokenisedText:
    """Text of a whole episode, ids and character spans of its tokens (both [tokens]), and the span of each turn."""

    text: str
    ids: NDArray[np.int32]
    spans: Sequence[Span]
    """Character spans; starts and ends never decrease."""
    turns: Sequence[Span]
    limit: int
    """Number of tokens that count; later ones were truncated by the run's token limit."""

    def within(self, turn: Span) -> Span:
        """Return the index range of the tokens that overlap the character span `turn`."""
        starts, ends = np.array(self.spans, np.int64).reshape(-1, 2).T
        first = int(np.searchsorted(ends, turn[0], side="right"))
        return first, max(first, int(np.searchsorted(starts, turn[1], side="left")))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of a turn, without special tokens; with `append`, only the trained tokens."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    special_lost: int
    """Sampled special tokens missing from the text; a trained end-of-sequence token does not count."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a turn's text, and its tokens in both tokenisations."""

    span: Span
    sampled: Span
    """Index range into the turn's sampled tokens."""
    retokenised: Span
    """Index range into the re-tokenised tokens given to `stretches`."""
    whole: bool
    """True if both sides have exactly the text of `span`; False if a token crosses the edge of the turn."""
    disputed: tuple[int, ...]
    """Character offsets of token boundaries that only one tokenisation has."""


def tokenised(one: TrajectoryRecord, codec: Codec, mode: TokenMode) -> RetokenisedText:
    """Re-tokenise the text of `one` with `codec`. Raises OtherTokeniser if the run's tokeniser was a different one."""
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
            f"Step {one.step}, question {one.question_uid}, sample {one.sample} has tokens that differ from this "
            "tokenizer's for the same text"
        )
    return RetokenisedText(text, ids, encoded.spans, turns, limit)


def sampled_tokens(one: TrajectoryRecord, number: int, mode: TokenMode, special_ids: frozenset[int]) -> SampledTokens:
    turn = one.turns[number]
    kept = len(turn.sampled_ids) if mode is TokenMode.retokenize else len(_own(one, number))
    ids, logprobs = turn.sampled_ids[:kept], turn.sampled_logprobs[:kept].astype(np.float64)
    special = np.isin(ids, list(special_ids))
    last_is_own = one.turn_of_token[-1] == number and one.versions[-1] >= 0
    ended = bool(last_is_own and len(ids) and special[-1] and one.token_ids[-1] == ids[-1])
    return SampledTokens(ids[~special], logprobs[~special], int(special.sum()) - ended)


def _own(one: TrajectoryRecord, number: int) -> list[int]:
    """Return the trained tokens that were sampled in turn `number`."""
    ids: list[int] = one.token_ids[(one.turn_of_token == number) & (one.versions >= 0)].tolist()
    return ids


def spans_of(pieces: Sequence[str], start: int) -> list[Span]:
    """Return the character spans of consecutive pieces from `start`; an empty piece gets the span of the next one."""
    ends = list(accumulate((len(piece) for piece in pieces), initial=start))
    spans = list(pairwise(ends))
    for index in reversed(range(len(spans) - 1)):
        if not pieces[index]:
            spans[index] = spans[index + 1]
    return spans


def stretches(sampled: Sequence[Span], retokenised: Sequence[Span], turn: Span) -> list[Stretch]:
    """Return the stretches of the character span `turn`, from left to right; none for an empty turn.

    `sampled`: spans of the sampled tokens, from the turn's start. `retokenised`: spans of the re-tokenised tokens that
    overlap the turn, at least one. Both may reach beyond the turn.
    """
    start, end = turn
    if start == end:
        return []
    ours, theirs = _cuts(sampled, turn), _cuts(retokenised, turn)
    common = sorted({*(ours.keys() & theirs.keys()), start, end})
    indices = {start: (0, 0), end: (len(sampled), len(retokenised))}
    found = []
    for left, right in pairwise(common):
        (sampled_from, retokenised_from), (sampled_to, retokenised_to) = (
            indices[at] if at in indices else (ours[at], theirs[at]) for at in (left, right)
        )
        covered = [
            side[n:m]
            for side, n, m in ((sampled, sampled_from, sampled_to), (retokenised, retokenised_from, retokenised_to))
        ]
        found.append(
            Stretch(
                span=(left, right),
                sampled=(sampled_from, sampled_to),
                retokenised=(retokenised_from, retokenised_to),
                whole=all(side and side[0][0] == left and side[-1][1] == right for side in covered),
                disputed=tuple(sorted(at for at in ours.keys() ^ theirs.keys() if left <= at <= right)),
            )
        )
    return found


def place_of(text: str, stretch: Stretch) -> CutPlace:
    """Return the kind of position that `stretch` has in `text`."""
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
    """Return the character offset of each token boundary in `turn`, ends included -> number of tokens before it."""
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
"""Number of examples shown per `CutPlace`."""
AROUND = 20
"""Characters shown on each side of an example."""
NEEDED = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Count:
    """Token counts over turns, or over one `CutPlace`."""

    turns: int = 0
    sampled: int = 0
    """Sampled tokens within the turn's text."""
    sampled_differing: int = 0
    """Sampled tokens that re-tokenisation changes."""
    trained: int = 0
    """Re-tokenised tokens that lie wholly within the turn."""
    trained_differing: int = 0
    """Re-tokenised tokens that were not sampled."""
    stretches: int = 0
    """Differing stretches."""

    def __add__(self, other: Count) -> Count:
        """Return the sum of both counts."""
        return Count(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Example:
    """A difference between sampled and re-tokenised tokens, with its first occurrence."""

    place: CutPlace
    count: int
    sampled: tuple[str, ...]
    """Text of each token. A character that spans several tokens belongs to the last of them."""
    retokenised: tuple[str, ...]
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
    """Identical tokens after differing ones, in the turn or its context."""
    same: Spread
    """Identical tokens after identical ones: the baseline."""


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """Token audit of all kept trajectories of a run; `mode` is its `task.token_mode`."""

    mode: str
    trajectories: int
    total: Count
    by_turn: Mapping[int, Count]
    by_place: Mapping[str, Count]
    """`CutPlace` -> counts over its differing stretches; `turns` counts the turns with at least one such stretch."""
    examples: tuple[Example, ...]
    """Most frequent differences of each `CutPlace`."""
    special_lost: int
    """Sampled special tokens missing from the text; not counted in `sampled`."""
    unknown_turns: int
    """Turns with text whose sampled tokens were not kept; counted only in `turns`."""
    crossing: int
    """Differing stretches with a token across the edge of the turn; such a token is not trained."""
    after_change: int
    """Trained tokens that are as sampled but follow differing tokens; like these, they have no comparable log-prob."""
    affected: Mapping[str, float]
    """Share of the trained `tokens` that differ or follow a change; shares of the `turns`, `trajectories` and `steps`
    that have at least one differing stretch."""
    bias: Bias | None
    """Log-ratios of all comparable stretches; None with `append`."""
    bias_same_version: Bias | None
    """Log-ratios of the stretches sampled by the version that scored them; None with `append`."""


def audit_run(run: RunFolder, tokenizer: Path | None = None) -> TokenAudit:
    """Audit the kept trajectories of `run` with the tokenizer in folder `tokenizer` (default: the folder of its model).

    Raises UserError if the token mode, the tokenizer or the trajectories are missing, for a wrong tokenizer, and for a run
    of another agent than Search-R1's.
    """
    mode = section(run.config, "task").get("token_mode")
    if not isinstance(mode, str) or mode not in list(TokenMode):
        raise UserError(
            f"{run.path / 'config.yaml'} lacks task.token_mode, which the token audit needs; restore it.",
            code="missing",
            key="task.token_mode",
        )
    agent = section(run.config, "task").get("agent", {})
    if isinstance(agent, dict) and agent.get("kind", SearchR1Agent.kind) != SearchR1Agent.kind:
        raise UserError(
            f"{run.path} has task.agent.kind={agent['kind']}, whose contexts are not the text of an episode: the token audit "
            "reads runs of search_r1.",
            code="unsupported",
            key="task.agent.kind",
        )
    path = section(run.config, "model").get("path")
    given = f"model.path={path}" if tokenizer is None else f"--tokenizer {tokenizer}"
    key = "model.path" if tokenizer is None else "--tokenizer"
    folder = tokenizer or (Path(path) if isinstance(path, str) else None)
    if folder is None or not (folder / NEEDED).is_file():
        raise UserError(
            f"{given} of {run.path} has no {NEEDED} on this machine, which re-tokenisation needs; give a folder that has it: "
            f"rlsys audit tokens {run.path} --tokenizer DIR.",
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
            f"{problem}: {given} is not the tokenizer of {run.path}; give the folder of the model that the run started from: "
            f"rlsys audit tokens {run.path} --tokenizer DIR.",
            code="mismatch",
            key=key,
        ) from problem


def _open_codec(folder: Path) -> Codec:
    """Open the tokenizer in `folder`. Raises UserError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # A damaged file may raise anything in the libraries.
        sentence = f"The tokenizer in {folder} cannot be opened ({first_line(problem)}); give an undamaged one."
        raise UserError(sentence, code="malformed", key=str(folder)) from problem
    return Codec(tokenizer)


def audit(kept: Iterable[TrajectoryRecord], codec: Codec, mode: TokenMode) -> TokenAudit:
    """Audit `kept` trajectories of a run in `mode`. Raises OtherTokeniser if `codec` is not the run's tokeniser."""
    tally = _Tally(codec, mode)
    for trajectory in kept:
        tally.add(trajectory)
    return tally.result()


def as_json(report: TokenAudit) -> dict[str, Any]:
    """Return `report` in JSON types. The added key `quantiles` holds the probabilities of its quantiles."""
    return {**json_safe(asdict(report)), "quantiles": list(QUANTILES)}


@dataclass(frozen=True, slots=True)
class _Turn:
    one: TrajectoryRecord
    number: int
    text: RetokenisedText
    sampled: SampledTokens
    span: Span
    tokens: Span
    """Index range of the re-tokenised tokens that overlap the turn."""

    @property
    def is_as_sampled(self) -> bool:
        """True if all tokens are as sampled, edges included; a fast path for nearly all turns."""
        first, last = self.tokens
        return (
            last <= self.text.limit
            and np.array_equal(self.sampled.ids, self.text.ids[first:last])
            and (self.text.spans[first][0], self.text.spans[last - 1][1]) == self.span
        )


@dataclass(slots=True)
class _LogRatios:
    """Collects log-ratios in `retokenize` mode, in which re-tokenised tokens have old log-probs."""

    after_change_tokens: int = 0
    _values: list[tuple[str, bool, Floats]] = field(default_factory=list)
    """Kind of stretch, True if sampled by the version that scored it, and values."""

    def add_same(self, one: TrajectoryRecord, tokens: Span, sampled: Floats) -> None:
        """Add identical `tokens` of `one`, with engine log-probs `sampled` [tokens]."""
        own = slice(*tokens)
        values = one.old_logprobs[own].astype(np.float64) - sampled
        known = np.isfinite(one.rollout_logprobs[own])
        current = one.versions[own] == one.policy_version
        self.after_change_tokens += int((~known).sum())
        for kind, of_kind in (("same", known), ("after_change", ~known)):
            self._values.append((kind, True, values[of_kind & current]))
            self._values.append((kind, False, values[of_kind & ~current]))

    def add_differing(self, one: TrajectoryRecord, tokens: Span, sampled: Floats) -> float:
        """Add `tokens` of `one` that replace sampled tokens with log-probs `sampled` [n]; return the log-ratio."""
        own = slice(*tokens)
        value = float(one.old_logprobs[own].astype(np.float64).sum() - sampled.sum())
        self._values.append(("differing", bool((one.versions[own] == one.policy_version).all()), np.array([value])))
        return value

    def bias(self, *, same_version: bool) -> Bias:
        """Return the bias over all stretches, or over those sampled by the version that scored them."""
        kinds: dict[str, list[Floats]] = {"differing": [], "after_change": [], "same": []}
        for kind, current, values in self._values:
            if current or not same_version:
                kinds[kind].append(values)
        return Bias(**{kind: spread(np.concatenate(parts) if parts else []) for kind, parts in kinds.items()})


_Way = tuple[CutPlace, tuple[str, ...], tuple[str, ...]]


class _Tally:
    """Accumulates the audit over trajectories."""

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

    def add(self, one: TrajectoryRecord) -> None:
        text = tokenised(one, self._codec, self._mode)
        self._trajectories += 1
        self._steps.add(one.step)
        for number, span in enumerate(text.turns):
            sampled = sampled_tokens(one, number, self._mode, self._codec.special_ids)
            self._special_lost += sampled.special_lost
            self._unknown += not len(one.turns[number].sampled_ids) and bool(one.turns[number].text)
            first, last = text.within(span)
            if sampled.ids.size and first < min(last, text.limit):
                self._by_turn[number] += self._count(_Turn(one, number, text, sampled, span, (first, last)))
            else:
                self._by_turn[number] += Count(turns=1)

    def result(self) -> TokenAudit:
        """Return the audit of the added trajectories."""
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
        sampled, (first, last) = turn.sampled, turn.tokens
        if turn.is_as_sampled:
            self._compare_same(turn, (first, last), sampled.logprobs)
            return Count(turns=1, sampled=len(sampled.ids), trained=last - first)
        pieces = self._pieces(sampled.ids.tolist())
        # Text that the protocol cut off after the turn does not count; a token without text at the turn's end counts.
        spans = [one for one in spans_of(pieces, turn.span[0]) if one[0] < turn.span[1] or one[0] == one[1]]
        count, places = Count(turns=1), set()
        for found in stretches(spans, turn.text.spans[first:last], turn.span):
            tokens = first + found.retokenised[0], first + found.retokenised[1]
            if tokens[1] > turn.text.limit:
                break
            own = slice(*found.sampled)
            differs = not np.array_equal(sampled.ids[own], turn.text.ids[slice(*tokens)])
            size = _sizes(turn, found, tokens, differs)
            count += size
            if differs:
                place = place_of(turn.text.text, found)
                self._by_place[place] += Count(int(place not in places)) + size
                places.add(place)
                self._differs(turn, found, tokens, place, pieces[own])
            else:
                self._compare_same(turn, tokens, sampled.logprobs[own])
        if places:
            where = turn.one.step, turn.one.question_uid, turn.one.sample, turn.number
            for name, depth in (("turns", 4), ("trajectories", 3), ("steps", 1)):
                self._affected[name].add(where[:depth])
        return count

    def _compare_same(self, turn: _Turn, tokens: Span, logprobs: Floats) -> None:
        if self._mode is TokenMode.retokenize:
            self._ratios.add_same(turn.one, tokens, logprobs)

    def _differs(self, turn: _Turn, found: Stretch, tokens: Span, place: CutPlace, sampled: tuple[str, ...]) -> None:
        """Record a differing stretch, and its log-ratio if both sides are whole and trained."""
        log_ratio = None
        if not found.whole:
            self._crossing += 1
        elif self._mode is TokenMode.retokenize and turn.one.loss_mask[slice(*tokens)].all():
            logprobs = turn.sampled.logprobs[slice(*found.sampled)]
            log_ratio = self._ratios.add_differing(turn.one, tokens, logprobs)
        retokenised = tuple(self._pieces(turn.text.ids[slice(*tokens)].tolist()))
        way = place, sampled, retokenised
        self._met[way] += 1
        if way not in self._first:
            text, (start, end) = turn.text.text, found.span
            self._first[way] = Example(
                place=place,
                count=1,
                sampled=sampled,
                retokenised=retokenised,
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
    sampled = found.sampled[1] - found.sampled[0]
    start, end = turn.span
    trained = sum(start <= left and right <= end for left, right in turn.text.spans[slice(*tokens)])
    return Count(0, sampled, sampled * differs, trained, trained * differs, int(differs))


_PLACES = ("at a tag", "invalid UTF-8", "beside non-ASCII", "beside a digit", "beside white space", "elsewhere")
PLACES: dict[str, str] = dict(zip(CutPlace, _PLACES, strict=True))


def render_audit(found: TokenAudit, console: Console) -> None:
    """Print the audit `found` as sentences and tables."""
    for sentence in sentences(found):
        console.print(Text(sentence))
    if found.total.stretches:
        turns = {f"turn {number + 1}": count for number, count in found.by_turn.items()}
        places = {PLACES[place]: count for place, count in found.by_place.items()}
        console.print(Text(), _counts("By turn", turns, of_all=True))
        console.print(_counts("By kind of place", places, of_all=False))
        console.print(Text("Most frequent differences, each at its first occurrence", style="italic"))
        for example in found.examples:
            console.print(*_example(example), sep="\n")
    if found.bias is not None:
        console.print(Text(), _bias("Log-ratio of stretches, nats", found.bias))
    if found.bias_same_version is not None and found.bias_same_version != found.bias:
        console.print(Text(), _bias("Sampled by the version that scored them", found.bias_same_version))


def sentences(found: TokenAudit) -> Iterator[str]:
    total, affected = found.total, found.affected
    if found.mode == TokenMode.append:
        yield "task.token_mode=append trains on the sampled tokens: this is what re-tokenisation would change."
    yield (
        f"{found.trajectories:,} trajectories, {total.turns:,} turns: re-tokenisation changes "
        f"{total.sampled_differing:,} of {total.sampled:,} sampled tokens ({_share(total.sampled_differing, total.sampled)}); of "
        f"{total.trained:,} re-tokenised tokens, {total.trained_differing:,} "
        f"({_share(total.trained_differing, total.trained)}) were not sampled."
    )
    if found.bias is not None:
        yield (
            f"{found.after_change:,} further tokens follow such tokens: {affected['tokens']:.2%} of trained tokens "
            f"have no comparable log-prob, in {affected['turns']:.1%} of turns, {affected['trajectories']:.1%} of trajectories and "
            f"{affected['steps']:.0%} of steps."
        )
    if found.crossing:
        yield f"{found.crossing:,} stretches have a token across the edge of their turn; such tokens are not trained."
    if found.special_lost:
        yield f"{found.special_lost:,} sampled special tokens are missing from the text."
    if found.unknown_turns:
        yield f"{found.unknown_turns:,} turns are left out: their sampled tokens are unknown."
    if found.bias is not None and found.bias.differing.mean is not None and found.bias.same.mean_abs is not None:
        yield (
            f"A differing stretch has a log-ratio of {found.bias.differing.mean:+.2f} nats on average; for identical "
            f"tokens the mean absolute log-ratio is {found.bias.same.mean_abs:.1e}."
        )


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.2%}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="italic")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _counts(title: str, rows: Mapping[str, Count], *, of_all: bool) -> Table:
    """Return the table of `rows`. Unless `of_all`, the counts are only of tokens that differ, and totals stay blank."""
    table = _table(title, "", "turns", "stretches", "sampled", "differ", "re-tokenised", "differ")
    for name, row in rows.items():
        sampled, trained = (f"{row.sampled:,}", f"{row.trained:,}") if of_all else ("", "")
        others = f"{row.sampled_differing:,}", f"{row.trained_differing:,}"
        table.add_row(name, f"{row.turns:,}", f"{row.stretches:,}", sampled, others[0], trained, others[1])
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
    yield Text(f"{one.count:,} x {PLACES[one.place]}{ratio}: {_tokens(one.sampled)}  ->  {_tokens(one.retokenised)}")
    yield Text(f"    {_shown(one.before)}[{_shown(''.join(one.retokenised))}]{_shown(one.after)}", style="dim")


def _tokens(pieces: Sequence[str]) -> str:
    """Join the texts of tokens; a dot stands for a token whose character a later token completes."""
    return " | ".join(_shown(piece) if piece else "." for piece in pieces)


def _shown(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")
