"""Measures the drift between engine log-probs and old log-probs, by cause. Pure.

A difference is log pi_old(token) - log mu(token) in nats: old log-prob (recomputed) minus engine log-prob. Every
trained token has exactly one cause, the first of these that applies:

1. `unsampled`: an added end-of-sequence token, which no engine sampled.
2. `retokenised`: re-tokenisation changed the token, so it has no engine log-prob.
3. `changed_prefix`: the token is as sampled, but re-tokenisation changed tokens before it. Such tokens are a separate
   cause, because the two log-probs have different contexts.
4. `version_lag`: the token and the tokens before it are as sampled, but an older weight version sampled the token. The
   difference includes the numerics.
5. `numerics`: the tokens are as sampled, by the same weight version. The difference is due to the different arithmetic
   of engine and trainer.

Causes 2 and 3 are told apart by matching sampled with trained ids of the turn (`matched_pairs`); `turns_changed` has
the sums over turns with such tokens. `SamplerDrift` bounds the contribution of truncated sampling to all tokens.
`Tally` accumulates values without storing them; its quantiles come from a histogram with geometric edges (DDSketch,
Masson et al. 2019).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from heapq import nlargest
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlsys.algorithms.corrections import LOG_RATIO_LIMIT
from rlsys.files import json_safe
from rlsys.observe.kept import TrajectoryRecord, TurnRecord
from rlsys.observe.run_folder import number

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pair = tuple[int, int]
"""Index into the first token list, index into the second."""

HISTOGRAM_EDGES = tuple(float(10.0**half) for half in np.arange(-7.0, 1.5, 0.5))
"""Bin edges of |difference| in nats: 1e-7 to 10, half a decade apart."""
WORST = 20
CONTEXT_CHARACTERS = 60
"""Characters of the response shown before a token."""
SHORT = 64
"""Maximum number of tokens per side that are matched by longest common runs."""
ROUNDS = 8
"""Maximum number of rounds of anchoring on unique tokens; each round is linear in the number of tokens."""


class Cause(StrEnum):
    """Cause of a difference between the two log-probs of a token; see the module's docstring."""

    UNSAMPLED = "unsampled"
    RETOKENISED = "retokenised"
    CHANGED_PREFIX = "changed_prefix"
    VERSION_LAG = "version_lag"
    NUMERICS = "numerics"


@dataclass(frozen=True, slots=True)
class CauseDrift:
    """Tokens of one cause, their share of all trained tokens, and the differences of tokens that have two log-probs."""

    cause: Cause
    tokens: int
    share: float
    differences: Spread
    histogram: tuple[int, ...]
    """Counts of |difference|: below the first of `HISTOGRAM_EDGES`, between consecutive edges, above the last edge."""


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with one of the largest differences."""

    step: int
    question_uid: str
    sample: int
    position: int
    """Index into the trajectory's tokens."""
    turn: int
    cause: Cause
    lag: int
    """Staleness: weight versions between sampling and training."""
    text: str
    before: str
    rollout: float
    """Engine log-prob."""
    recomputed: float
    difference: float


@dataclass(frozen=True, slots=True)
class StepDrift:
    """One step: number of trained tokens by cause, and mean |difference| of the tokens that have two log-probs."""

    step: int
    tokens: Mapping[str, int]
    mean_abs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SamplerDrift:
    """Error of the recorded log-ratios due to truncated sampling, in nats; 0 without truncation."""

    temperature: float
    top_p: float
    top_k: int
    truncated: bool
    tokens: int
    """Trained tokens with an engine log-prob."""
    exact: int
    """Number of these tokens whose log Z is known exactly; without truncation, all of them."""
    least: float
    """Mean over `tokens` of the lower bounds of log Z, at most 0."""
    most: float
    """Mean of the upper bounds."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Drift over the trained `tokens` of all kept trajectories."""

    trajectories: int
    tokens: int
    causes: tuple[CauseDrift, ...]
    """All causes, in the order of `Cause`; their tokens add up to `tokens`."""
    by_lag: Mapping[int, Spread]
    """Staleness -> differences of the tokens with the cause `version_lag` or `numerics`."""
    beyond_numerics: float | None
    """sqrt(rms(`version_lag`)**2 - rms(`numerics`)**2), at least 0: drift due to the older policies without the
    numerics, if the two errors are independent. None unless both causes have differences."""
    turns_same: Spread
    """Summed differences of turns whose tokens are all as sampled: recomputed minus sampled."""
    turns_changed: Spread
    """Summed log-probs of turns that re-tokenisation changed: all recomputed minus all sampled tokens. Both sides are
    the same text, except that a sampled token that crosses the end of the turn's text counts as a whole."""
    turns_apart: int
    """Turns without a sum: a token crosses the turn's edge, a limit truncated the turn, or its sampled tokens are
    unknown."""
    sampler: SamplerDrift
    steps: tuple[StepDrift, ...]
    worst: tuple[WorstToken, ...]


@dataclass(frozen=True, slots=True)
class CauseTally:
    """Accumulated tokens of one cause; fields as in `CauseDrift`."""

    tokens: int
    differences: Tally
    histogram: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DriftTally:
    """Accumulated trajectories of one step; fields as in `DriftReport`."""

    step: int
    trajectories: int
    causes: Mapping[Cause, CauseTally]
    by_lag: Mapping[int, Tally]
    turns_same: Tally
    turns_changed: Tally
    turns_apart: int
    sampler: SamplerDrift
    worst: tuple[WorstToken, ...]


def tally_step(step: int, kept: Iterable[TrajectoryRecord], sampling: Mapping[str, Any]) -> DriftTally:
    """Accumulate the drift of `kept`, the trajectories of `step`."""
    trained: list[_Trained] = []
    worst: list[WorstToken] = []
    for trajectory in kept:
        tokens = _trained_of(trajectory)
        least = abs(worst[-1].difference) if len(worst) == WORST else -1.0
        if worse := _worse_than(least, trajectory, tokens):
            worst = _worst([*worst, *worse])
        trained.append(tokens)

    def concatenated(name: str, kind: type[Any]) -> NDArray[Any]:
        return np.concatenate([np.empty(0, kind), *(getattr(tokens, name) for tokens in trained)])

    cause, lag = concatenated("cause", np.int64), concatenated("lag", np.int64)
    rollout, difference = concatenated("rollout", np.float64), concatenated("difference", np.float64)
    as_sampled = np.isin(cause, (_CODE[Cause.VERSION_LAG], _CODE[Cause.NUMERICS]))
    lags, differences = lag[as_sampled], difference[as_sampled]
    sums = [turn for one in trained for turn in one.turn_sums]
    return DriftTally(
        step=step,
        trajectories=len(trained),
        causes={of: _cause_tally(difference[cause == _CODE[of]]) for of in Cause},
        by_lag={int(lag): tally(differences[lags == lag]) for lag in np.unique(lags)},
        turns_same=tally([total for changed, total in sums if not changed and total is not None]),
        turns_changed=tally([total for changed, total in sums if changed and total is not None]),
        turns_apart=sum(total is None for _, total in sums),
        sampler=sampler_drift(rollout[as_sampled], sampling),
        worst=tuple(worst),
    )


def report_of(steps: Sequence[DriftTally], sampling: Mapping[str, Any]) -> DriftReport:
    """Return the report over `steps`, sampled with the settings `sampling`; quantiles are accurate to `ERROR`."""
    tokens = sum(of_cause.tokens for one in steps for of_cause in one.causes.values())
    causes = tuple(_cause_drift(cause, [one.causes[cause] for one in steps], tokens) for cause in Cause)
    lags = sorted({lag for one in steps for lag in one.by_lag})
    return DriftReport(
        trajectories=sum(one.trajectories for one in steps),
        tokens=tokens,
        causes=causes,
        by_lag={lag: joined([one.by_lag[lag] for one in steps if lag in one.by_lag]).spread() for lag in lags},
        beyond_numerics=_beyond(causes),
        turns_same=joined([one.turns_same for one in steps]).spread(),
        turns_changed=joined([one.turns_changed for one in steps]).spread(),
        turns_apart=sum(one.turns_apart for one in steps),
        sampler=joined_sampler([one.sampler for one in steps], sampling),
        steps=tuple(_step_drift(one) for one in sorted(steps, key=lambda one: one.step)),
        worst=tuple(_worst(token for one in steps for token in one.worst)),
    )


def as_json(report: DriftReport) -> dict[str, Any]:
    """Return `report` in JSON types. The added keys `histogram_edges` and `quantiles` describe the report's lists."""
    known = json_safe(asdict(report))
    return {**known, "histogram_edges": list(HISTOGRAM_EDGES), "quantiles": list(QUANTILES)}


_CODE = {cause: code for code, cause in enumerate(Cause)}


@dataclass(frozen=True, slots=True)
class _Trained:
    """Trained tokens of one trajectory; arrays are [tokens]."""

    cause: Ints
    lag: Ints
    rollout: Floats
    """Engine log-prob; NaN without one."""
    difference: Floats
    """Old minus engine log-prob; NaN without an engine log-prob."""
    turn_sums: list[tuple[bool, float | None]]
    """Per turn: True if re-tokenisation changed it, and summed recomputed minus sampled log-probs (None: unknown)."""


def _trained_of(one: TrajectoryRecord) -> _Trained:
    places = np.flatnonzero(one.loss_mask)
    sampled = one.rollout_logprobs.astype(np.float64)
    cause = np.full(len(one.token_ids), _CODE[Cause.NUMERICS])
    cause[one.versions < one.policy_version] = _CODE[Cause.VERSION_LAG]
    sums = []
    for index, turn in enumerate(one.turns):
        own = places[(one.turn_of_token[places] == index) & (one.versions[places] >= 0)]
        lost = ~np.isfinite(one.rollout_logprobs[own])
        if lost.any():
            matched, matched_sampled = _matched(turn, one.token_ids[own])
            cause[own[lost & matched]] = _CODE[Cause.CHANGED_PREFIX]
            cause[own[lost & ~matched]] = _CODE[Cause.RETOKENISED]
            sampled[own[lost]] = matched_sampled[lost]
        if turn.text:
            sums.append(_turn_sum(one, turn, own, changed=bool(lost.any())))
    cause[one.versions < 0] = _CODE[Cause.UNSAMPLED]
    return _Trained(
        cause=cause[places],
        lag=np.where(one.versions[places] < 0, 0, one.policy_version - one.versions[places]),
        rollout=sampled[places],
        difference=one.old_logprobs.astype(np.float64)[places] - sampled[places],
        turn_sums=sums,
    )


def _matched(turn: TurnRecord, trained: NDArray[np.int32]) -> tuple[NDArray[np.bool_], Floats]:
    """Return a mask [n] of the trained ids of `turn` that match sampled ids, and engine log-probs [n] (else NaN)."""
    matched, logprobs = np.zeros(len(trained), np.bool_), np.full(len(trained), np.nan)
    for sampled, here in matched_pairs(turn.sampled_ids.tolist(), trained.tolist()):
        matched[here], logprobs[here] = True, turn.sampled_logprobs[sampled]
    return matched, logprobs


def _turn_sum(one: TrajectoryRecord, turn: TurnRecord, own: Ints, *, changed: bool) -> tuple[bool, float | None]:
    """Return `changed`, and the turn's sum over the tokens at `own` (None if these tokens are not the turn's text)."""
    text = "".join(one.pieces[place - one.prompt_length] for place in own)
    if not text.startswith(turn.text) or not len(turn.sampled_logprobs):
        return changed, None
    sampled = turn.sampled_logprobs if changed else one.rollout_logprobs[own]
    recomputed = one.old_logprobs[own].astype(np.float64)
    return changed, float(recomputed.sum() - sampled.astype(np.float64).sum())


def _cause_tally(differences: Floats) -> CauseTally:
    bins = np.digitize(np.abs(differences[np.isfinite(differences)]), HISTOGRAM_EDGES)
    return CauseTally(len(differences), tally(differences), np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1))


def _cause_drift(cause: Cause, parts: Sequence[CauseTally], of: int) -> CauseDrift:
    tokens = sum(part.tokens for part in parts)
    histogram = sum((part.histogram for part in parts), start=np.zeros(len(HISTOGRAM_EDGES) + 1, np.int64))
    differences = joined([part.differences for part in parts]).spread()
    return CauseDrift(cause, tokens, tokens / of if of else 0.0, differences, tuple(histogram.tolist()))


def _beyond(causes: Iterable[CauseDrift]) -> float | None:
    rms = {one.cause: one.differences.rms for one in causes}
    lagging, numerics = rms[Cause.VERSION_LAG], rms[Cause.NUMERICS]
    return None if lagging is None or numerics is None else float(np.sqrt(max(0.0, lagging**2 - numerics**2)))


def _step_drift(one: DriftTally) -> StepDrift:
    known = {cause: tally.differences for cause, tally in one.causes.items() if tally.differences.count}
    tokens = {cause.value: tally.tokens for cause, tally in one.causes.items()}
    return StepDrift(one.step, tokens, {cause.value: of.total_abs / of.count for cause, of in known.items()})


def _worst(tokens: Iterable[WorstToken]) -> list[WorstToken]:
    return nlargest(WORST, tokens, key=lambda token: abs(token.difference))


def _worse_than(least: float, one: TrajectoryRecord, trained: _Trained) -> list[WorstToken]:
    """Return the worst tokens of one trajectory: those with the largest |difference|, each above `least`."""
    magnitudes = np.where(np.isfinite(trained.difference), np.abs(trained.difference), -1.0)
    found = np.argsort(-magnitudes, kind="stable")[:WORST]
    return [_shown(one, trained, int(index)) for index in found if magnitudes[index] > least]


def _shown(one: TrajectoryRecord, trained: _Trained, index: int) -> WorstToken:
    place = int(np.flatnonzero(one.loss_mask)[index])
    at = place - one.prompt_length
    return WorstToken(
        step=one.step,
        question_uid=one.question_uid,
        sample=one.sample,
        position=place,
        turn=int(one.turn_of_token[place]),
        cause=tuple(Cause)[trained.cause[index]],
        lag=int(trained.lag[index]),
        text=one.pieces[at],
        before="".join(one.pieces[max(0, at - CONTEXT_CHARACTERS) : at])[-CONTEXT_CHARACTERS:],
        rollout=float(trained.rollout[index]),
        recomputed=float(one.old_logprobs[place]),
        difference=float(trained.difference[index]),
    )


def matched_pairs(first: Sequence[int], second: Sequence[int]) -> Iterator[Pair]:
    """Yield index pairs of equal tokens: an order-preserving, one-to-one alignment, in no particular order.

    Runs in linear time. Matches common prefix and suffix, then tokens unique in both lists ("patience diff"), then
    recurses between these anchors. Remaining short pieces are matched by longest common runs, in cubic time. Remaining
    long pieces without unique tokens stay unmatched, such as the middle of an endless repetition that differs at both
    ends.
    """
    waiting = [(0, len(first), 0, len(second), ROUNDS)]
    while waiting:
        a, a_end, b, b_end, rounds = waiting.pop()
        while a < a_end and b < b_end and first[a] == second[b]:
            yield a, b
            a, b = a + 1, b + 1
        while a < a_end and b < b_end and first[a_end - 1] == second[b_end - 1]:
            a_end, b_end = a_end - 1, b_end - 1
            yield a_end, b_end
        if a == a_end or b == b_end:
            continue
        if max(a_end - a, b_end - b) <= SHORT:
            matcher = SequenceMatcher(None, first[a:a_end], second[b:b_end], autojunk=False)
            for block in matcher.get_matching_blocks():
                yield from ((a + block.a + at, b + block.b + at) for at in range(block.size))
            continue
        anchors = [(a + i, b + j) for i, j in _anchors(first[a:a_end], second[b:b_end])] if rounds else []
        if anchors:
            yield from anchors
            edges = [(a - 1, b - 1), *anchors, (a_end, b_end)]
            waiting += [(i + 1, k, j + 1, m, rounds - 1) for (i, j), (k, m) in pairwise(edges)]


def _anchors(first: Sequence[int], second: Sequence[int]) -> list[Pair]:
    """Return the longest increasing chain of index pairs of tokens that are unique in both lists."""
    places = _once(second)
    pairs = [(at, places[token]) for token, at in _once(first).items() if token in places]
    lowest: list[int] = []  # Entry n: smallest last index in `second` of any chain of n + 1 pairs.
    ends: list[int] = []  # Entry n: last pair of that chain.
    before: list[int] = []  # Entry n: predecessor of pair n in its chain.
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(lowest, place)
        before.append(ends[length - 1] if length else -1)
        lowest[length : length + 1] = [place]
        ends[length : length + 1] = [index]
    chain, at = [], ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def _once(tokens: Sequence[int]) -> dict[int, int]:
    """Return token -> index of the tokens that occur once, in order."""
    counts = Counter(tokens)
    return {token: at for at, token in enumerate(tokens) if counts[token] == 1}


def sampler_drift(logprobs: Floats, sampling: Mapping[str, Any]) -> SamplerDrift:
    """Return the sampler's contribution. `logprobs` [tokens]: engine log-probs. `sampling`: `rollout.sampling`.

    SGLang divides the logits by the temperature, takes the softmax over the whole vocabulary, samples from a copy
    filtered by top_k and top_p, and reports the log of the unfiltered softmax (`Sampler.forward` in
    sglang/srt/layers/sampler.py; SGLANG_RETURN_ORIGINAL_LOGPROB, never set here, would omit the temperature). The
    trainer uses the same temperature and the whole vocabulary. Therefore:

    - The temperature is on both sides, and the sampler contributes nothing to a recorded difference.
    - With top_p < 1 or a top_k, the token was sampled from p / Z, where Z is the probability mass kept by the filters.
      The engine does not report Z. The true log-ratio is the recorded one + log Z, and log Z is only bounded.
    """
    top_p, top_k = number(sampling, "top_p", 1.0), int(number(sampling, "top_k", -1))
    top_p = top_p if top_p > 0 else 1.0  # A truncated number in a damaged file; no sampling works with 0.
    low, high = log_kept_mass(logprobs, top_p, top_k)
    least, most = (float(bound.mean()) if len(bound) else 0.0 for bound in (low, high))
    exact, temperature = int((low == high).sum()), number(sampling, "temperature", 1.0)
    return SamplerDrift(temperature, top_p, top_k, top_p < 1.0 or top_k > 0, len(logprobs), exact, least, most)


def joined_sampler(parts: Sequence[SamplerDrift], sampling: Mapping[str, Any]) -> SamplerDrift:
    """Return the token-weighted combination of `parts`, sampled with the settings `sampling`."""
    none = sampler_drift(np.empty(0), sampling)
    if not (tokens := sum(part.tokens for part in parts)):
        return none
    least, most = (sum(getattr(part, name) * part.tokens for part in parts) / tokens for name in ("least", "most"))
    return replace(none, tokens=tokens, exact=sum(part.exact for part in parts), least=least, most=most)


def log_kept_mass(logprobs: Floats, top_p: float, top_k: int) -> tuple[Floats, Floats]:
    """Return lower and upper bounds of log Z, each [tokens], from the unfiltered log-probs [tokens] of sampled tokens.

    Z <= 1 as a probability; Z >= p, because the token was kept; Z >= top_p if top_p alone filters. Z = p exactly if
    top_k = 1 or p > top_p, because then only this token is kept.
    """
    if top_p >= 1.0 and top_k <= 0:
        nothing = np.zeros(len(logprobs))
        return nothing, nothing
    own = np.minimum(np.asarray(logprobs, np.float64), 0.0)
    least = own if top_k > 0 else np.maximum(own, np.log(top_p))
    return least, np.where((top_k == 1) | (own > np.log(top_p)), own, 0.0)


QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
ERROR = 0.01
"""Relative error of the binned values of a `Tally`; its quantiles are interpolated between these values."""
LEAST = 1e-7
"""Smaller magnitudes count as 0 in quantiles."""
_RATIO = (1 + ERROR) / (1 - ERROR)


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of log-prob differences, in nats. All but `count` are None if `count` is 0."""

    count: int
    mean: float | None = None
    mean_abs: float | None = None
    rms: float | None = None
    exp_mean: float | None = None
    """Mean of exp(difference), the ratio; differences are clamped to +-20."""
    largest: float | None = None
    """Largest |difference|."""
    quantiles: tuple[float, ...] | None = None
    """Values at `QUANTILES`, interpolated linearly."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Accumulated values. `bins` [k] are sorted; `counts` [k] are their sizes."""

    count: int
    total: float
    total_abs: float
    total_square: float
    total_exp: float
    lowest: float
    highest: float
    bins: NDArray[np.int32]
    """Sign times (1 + n) for magnitudes in (LEAST * _RATIO**(n - 1), LEAST * _RATIO**n]; 0 below `LEAST`."""
    counts: NDArray[np.int64]

    def spread(self) -> Spread:
        if not self.count:
            return Spread(0)
        return Spread(
            count=self.count,
            mean=self.total / self.count,
            mean_abs=self.total_abs / self.count,
            rms=math.sqrt(self.total_square / self.count),
            exp_mean=self.total_exp / self.count,
            largest=max(abs(self.lowest), abs(self.highest)),
            quantiles=self._quantiles(),
        )

    def _quantiles(self) -> tuple[float, ...]:
        magnitudes = LEAST * 2 * _RATIO ** (np.abs(self.bins) - 1.0) / (_RATIO + 1)
        values = np.clip(np.sign(self.bins) * magnitudes, self.lowest, self.highest)
        reached = np.cumsum(self.counts)
        ranks = np.array(QUANTILES) * (self.count - 1)
        low, high = (values[np.searchsorted(reached, end(ranks), "right")] for end in (np.floor, np.ceil))
        return tuple((low + (high - low) * (ranks % 1)).tolist())


def spread(values: ArrayLike) -> Spread:
    """Return the spread of the finite `values` [n], with exact quantiles."""
    finite = _finite(values)
    figures = tally(finite).spread()
    return replace(figures, quantiles=tuple(np.quantile(finite, QUANTILES).tolist())) if finite.size else figures


def tally(values: ArrayLike) -> Tally:
    """Return the tally of the finite `values` [n]."""
    finite = _finite(values)
    magnitudes = np.abs(finite)
    places = np.ceil(np.log(np.maximum(magnitudes, LEAST) / LEAST) / math.log(_RATIO)) + 1
    signed = np.where(magnitudes < LEAST, 0, np.sign(finite) * places).astype(np.int32)
    bins, counts = np.unique(signed, return_counts=True)
    return Tally(
        count=finite.size,
        total=float(finite.sum()),
        total_abs=float(magnitudes.sum()),
        total_square=float((finite**2).sum()),
        total_exp=float(np.exp(np.clip(finite, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum()),
        lowest=float(finite.min(initial=math.inf)),
        highest=float(finite.max(initial=-math.inf)),
        bins=bins,
        counts=counts,
    )


def joined(parts: Sequence[Tally]) -> Tally:
    """Return the tally of all values of `parts`."""
    if not parts:
        return tally([])
    bins, places = np.unique(np.concatenate([part.bins for part in parts]), return_inverse=True)
    counts = np.zeros(len(bins), np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    names = ("count", "total", "total_abs", "total_square", "total_exp")
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    lowest, highest = min(part.lowest for part in parts), max(part.highest for part in parts)
    return Tally(**sums, lowest=lowest, highest=highest, bins=bins, counts=counts)


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(values, np.float64)
    return given[np.isfinite(given)]
