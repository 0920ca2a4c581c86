"""How far the log-probs of rollouts are from those that were trained with, and why. Pure.

A difference is log pi_old(token) - log mu(token) in nats: what the trainer recomputed at the start of a step, less what
the engine said when it drew the token. Every trained token has exactly one cause, the first of these that holds:

1. `unsampled`: an end-of-sequence token that was added; nothing drew it.
2. `retokenised`: the text that was drawn is cut into other tokens in training; no log-prob is of this one.
3. `changed_prefix`: the token is as drawn, but tokens before it are cut otherwise. The two log-probs are then of the
   same token after the same text in other tokens; compared, but apart from the rest.
4. `version_lag`: same tokens, drawn by an older policy. The difference holds that policy's distance and the numerics.
5. `numerics`: same tokens, same policy. What is left are the arithmetics of engine and trainer.

Of 2 and 3 a matching of the turn's drawn with its trained ids decides (`rlsys.report.matching`); what such a
turn comes to as a whole, text against the same text, is in `turns_changed`. The sampler is no class of tokens: see
`rlsys.report.sampler` for what it adds to all of them, and what of that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from heapq import nlargest
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.files import json_safe
from rlsys.observe.kept import Kept, KeptTurn
from rlsys.report.audit.spread import QUANTILES, Spread, Tally, joined, tally
from rlsys.report.matching import matched_pairs
from rlsys.report.sampler import SamplerDrift, joined_sampler, sampler_drift

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HISTOGRAM_EDGES = tuple(float(10.0**half) for half in np.arange(-7.0, 1.5, 0.5))
"""Of |difference| in nats, half a decade apart, 1e-7 to 10."""
WORST = 20
CONTEXT_CHARACTERS = 60
"""Of the response, shown before a token."""


class Cause(StrEnum):
    """Why the two log-probs of a token may differ; see the module."""

    UNSAMPLED = "unsampled"
    RETOKENISED = "retokenised"
    CHANGED_PREFIX = "changed_prefix"
    VERSION_LAG = "version_lag"
    NUMERICS = "numerics"


@dataclass(frozen=True, slots=True)
class CauseDrift:
    """The tokens of one cause."""

    cause: Cause
    tokens: int
    share: float
    """Of all trained tokens."""
    differences: Spread
    """Of those that have two log-probs."""
    histogram: tuple[int, ...]
    """Counts of |difference|: below the first of `HISTOGRAM_EDGES`, between each two, from the last on."""


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
    """Versions between drawing and training."""
    text: str
    before: str
    """What of the response stands before it."""
    rollout: float
    """Log-prob by the engine."""
    recomputed: float
    difference: float


@dataclass(frozen=True, slots=True)
class StepDrift:
    """One step: by cause the trained tokens, and mean |difference| where there are two log-probs."""

    step: int
    tokens: Mapping[str, int]
    mean_abs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Drift over all kept trajectories."""

    trajectories: int
    tokens: int
    """Trained."""
    causes: tuple[CauseDrift, ...]
    """Every `Cause`, in the order in which they are decided; their tokens add up to `tokens`."""
    by_lag: Mapping[int, Spread]
    """Versions between drawing and training -> differences of tokens that are as drawn after the same tokens."""
    beyond_numerics: float | None
    """What is left of the root mean square of `version_lag` when that of `numerics` is taken off, as independent errors
    add up in squares; None unless there are both."""
    turns_same: Spread
    """Sums over turns whose tokens are all as drawn: recomputed less drawn."""
    turns_changed: Spread
    """The same sums where re-tokenisation changed something: of all recomputed tokens less all drawn ones, the same
    text, but that a last token that ends behind the turn's text counts whole among the drawn ones."""
    turns_apart: int
    """Turns without a sum: a token that lies across their edge is not trained, a limit cut them, or what was drawn is not
    known."""
    sampler: SamplerDrift
    steps: tuple[StepDrift, ...]
    worst: tuple[WorstToken, ...]

    def of(self, cause: Cause) -> CauseDrift:
        """The row of `cause`."""
        return next(one for one in self.causes if one.cause is cause)


@dataclass(frozen=True, slots=True)
class CauseTally:
    """The tokens of one cause, added up; as in `CauseDrift`."""

    tokens: int
    differences: Tally
    histogram: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DriftTally:
    """The trajectories of one step, added up: what a report needs of them. Fields are as in `DriftReport`."""

    step: int
    trajectories: int
    causes: Mapping[Cause, CauseTally]
    by_lag: Mapping[int, Tally]
    turns_same: Tally
    turns_changed: Tally
    turns_apart: int
    sampler: SamplerDrift
    worst: tuple[WorstToken, ...]


def drift_report(kept: Iterable[Kept], sampling: Mapping[str, Any]) -> DriftReport:
    """The drift of `kept`, which were drawn as `sampling` says (`rollout.sampling` of the run's config).

    Those of a step come together, and no more than one step's tokens are held: a reader may hand over a whole run.
    """
    of_steps = groupby(kept, key=lambda one: one.step)
    return report_of([tally_step(step, those, sampling) for step, those in of_steps], sampling)


def tally_step(step: int, kept: Iterable[Kept], sampling: Mapping[str, Any]) -> DriftTally:
    """What the drift of `kept`, the trajectories of `step`, adds to a report."""
    found: list[_Trained] = []
    worst: list[WorstToken] = []
    for one in kept:
        trained = _trained_of(one)
        least = abs(worst[-1].difference) if len(worst) == WORST else -1.0
        if worse := _worse_than(least, one, trained):
            worst = _worst([*worst, *worse])
        found.append(trained)
    everything = _joined(found)
    as_drawn = np.isin(everything.cause, (_CODE[Cause.VERSION_LAG], _CODE[Cause.NUMERICS]))
    lags, differences = everything.lag[as_drawn], everything.difference[as_drawn]
    sums = [one for each in found for one in each.turn_sums]
    return DriftTally(
        step=step,
        trajectories=len(found),
        causes={cause: _cause_tally(everything, cause) for cause in Cause},
        by_lag={int(lag): tally(differences[lags == lag]) for lag in np.unique(lags)},
        turns_same=tally([one.total for one in sums if not one.changed and one.total is not None]),
        turns_changed=tally([one.total for one in sums if one.changed and one.total is not None]),
        turns_apart=sum(one.total is None for one in sums),
        sampler=sampler_drift(everything.rollout[as_drawn], sampling),
        worst=tuple(worst),
    )


def report_of(steps: Sequence[DriftTally], sampling: Mapping[str, Any]) -> DriftReport:
    """The report over `steps`, which were drawn as `sampling` says. The quantiles are as exact as `spread.ERROR` says."""
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
    """`report` in plain JSON types, with the `histogram_edges` and `quantiles` that its lists are of."""
    known = json_safe(asdict(report))
    return {**known, "histogram_edges": list(HISTOGRAM_EDGES), "quantiles": list(QUANTILES)}


_CODE = {cause: number for number, cause in enumerate(Cause)}


@dataclass(frozen=True, slots=True)
class _TurnSum:
    changed: bool
    total: float | None


@dataclass(frozen=True, slots=True)
class _Trained:
    """The trained tokens of one trajectory, or of several; arrays are [tokens]."""

    cause: Ints
    lag: Ints
    rollout: Floats
    """The engine's log-prob of the token, NaN without one."""
    difference: Floats
    """NaN where there is nothing to compare."""
    turn_sums: tuple[_TurnSum, ...] = ()


def _trained_of(one: Kept) -> _Trained:
    places = np.flatnonzero(one.loss_mask)
    drawn = one.rollout_logprobs.astype(np.float64)
    cause = np.full(len(one.token_ids), _CODE[Cause.NUMERICS])
    cause[one.versions < one.policy_version] = _CODE[Cause.VERSION_LAG]
    sums = []
    for number, turn in enumerate(one.turns):
        own = places[(one.turn_of_token[places] == number) & (one.versions[places] >= 0)]
        lost = ~np.isfinite(one.rollout_logprobs[own])
        if lost.any():
            matched, matched_drawn = _matched(turn, one.token_ids[own])
            cause[own[lost & matched]] = _CODE[Cause.CHANGED_PREFIX]
            cause[own[lost & ~matched]] = _CODE[Cause.RETOKENISED]
            drawn[own[lost]] = matched_drawn[lost]
        if turn.text:
            sums.append(_turn_sum(one, turn, own, changed=bool(lost.any())))
    cause[one.versions < 0] = _CODE[Cause.UNSAMPLED]
    return _Trained(
        cause=cause[places],
        lag=np.where(one.versions[places] < 0, 0, one.policy_version - one.versions[places]),
        rollout=drawn[places],
        difference=one.old_logprobs.astype(np.float64)[places] - drawn[places],
        turn_sums=tuple(sums),
    )


def _matched(turn: KeptTurn, trained: NDArray[np.int32]) -> tuple[NDArray[np.bool_], Floats]:
    """Which of the turn's trained ids [n] are drawn ones, and the log-probs of those; NaN elsewhere."""
    matched, logprobs = np.zeros(len(trained), np.bool_), np.full(len(trained), np.nan)
    for drawn, here in matched_pairs(turn.sampled_ids.tolist(), trained.tolist()):
        matched[here] = True
        logprobs[here] = turn.sampled_logprobs[drawn]
    return matched, logprobs


def _turn_sum(one: Kept, turn: KeptTurn, own: Ints, *, changed: bool) -> _TurnSum:
    """Of a turn whose trained tokens are at `own`; without a total where they do not make up its text."""
    text = "".join(one.pieces[place - one.prompt_length] for place in own)
    if not text.startswith(turn.text) or not len(turn.sampled_logprobs):
        return _TurnSum(changed, None)
    drawn = turn.sampled_logprobs if changed else one.rollout_logprobs[own]
    recomputed = one.old_logprobs[own].astype(np.float64)
    return _TurnSum(changed, float(recomputed.sum() - drawn.astype(np.float64).sum()))


def _joined(found: list[_Trained]) -> _Trained:
    """The tokens of all."""

    def of_all(name: str, kind: type[np.float64] | type[np.int64]) -> NDArray[Any]:
        return np.concatenate([np.empty(0, kind), *(getattr(one, name) for one in found)])

    return _Trained(
        cause=of_all("cause", np.int64),
        lag=of_all("lag", np.int64),
        rollout=of_all("rollout", np.float64),
        difference=of_all("difference", np.float64),
    )


def _cause_tally(trained: _Trained, cause: Cause) -> CauseTally:
    own = trained.cause == _CODE[cause]
    differences = trained.difference[own]
    magnitudes = np.abs(differences[np.isfinite(differences)])
    bins = np.digitize(magnitudes, HISTOGRAM_EDGES)
    return CauseTally(int(own.sum()), tally(differences), np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1))


def _cause_drift(cause: Cause, parts: Sequence[CauseTally], of: int) -> CauseDrift:
    tokens = sum(one.tokens for one in parts)
    histogram = sum((one.histogram for one in parts), start=np.zeros(len(HISTOGRAM_EDGES) + 1, np.int64))
    return CauseDrift(
        cause=cause,
        tokens=tokens,
        share=tokens / of if of else 0.0,
        differences=joined([one.differences for one in parts]).spread(),
        histogram=tuple(histogram.tolist()),
    )


def _beyond(causes: Iterable[CauseDrift]) -> float | None:
    rms = {one.cause: one.differences.rms for one in causes}
    lagging, numerics = rms[Cause.VERSION_LAG], rms[Cause.NUMERICS]
    if lagging is None or numerics is None:
        return None
    return float(np.sqrt(max(0.0, lagging**2 - numerics**2)))


def _step_drift(one: DriftTally) -> StepDrift:
    known = {cause: found.differences for cause, found in one.causes.items() if found.differences.count}
    return StepDrift(
        step=one.step,
        tokens={cause.value: found.tokens for cause, found in one.causes.items()},
        mean_abs={cause.value: found.total_abs / found.count for cause, found in known.items()},
    )


def _worst(tokens: Iterable[WorstToken]) -> list[WorstToken]:
    return nlargest(WORST, tokens, key=lambda token: abs(token.difference))


def _worse_than(least: float, one: Kept, trained: _Trained) -> list[WorstToken]:
    """The tokens of one trajectory with the largest |difference|, if above `least`."""
    magnitudes = np.where(np.isfinite(trained.difference), np.abs(trained.difference), -1.0)
    places = np.flatnonzero(one.loss_mask)
    found = np.argsort(-magnitudes, kind="stable")[:WORST]
    return [_shown(one, trained, int(index), int(places[index])) for index in found if magnitudes[index] > least]


def _shown(one: Kept, trained: _Trained, index: int, place: int) -> WorstToken:
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
