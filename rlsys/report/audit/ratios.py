"""Log-ratios of stretches: what re-tokenising does to the ratio, beside its baseline. Pure.

The log-ratio of a stretch is

    sum of log pi_old(t) over its re-tokenised tokens  -  sum of log mu(t) over its drawn ones,

which would be 0 if text had one probability however it is cut. It has not: that of other tokens is the probability of a
path that was not taken, mostly a far less likely one. Stretches of one and the same token are the baseline: the numerics,
and an older policy's distance. Tokens that are the same but come after others that differ stand apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlsys.observe.kept import Kept
from rlsys.report.audit.spread import Spread, spread
from rlsys.report.audit.stretches import Span

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bias:
    """Log-ratios of stretches, in nats."""

    differing: Spread
    after_change: Spread
    """The same token on both sides, but others before it, in its turn or its context."""
    same: Spread
    """The same token after the same tokens: the baseline."""


@dataclass(slots=True)
class LogRatios:
    """Gathers the log-ratios of a run in `retokenize` mode, where there are log-probs of the re-tokenised tokens."""

    after_change_tokens: int = 0
    _values: list[tuple[str, bool, Floats]] = field(default_factory=list)

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
        current = bool((one.versions[own] == one.policy_version).all())
        self._values.append(("differing", current, np.array([value])))
        return value

    def bias(self, *, same_version: bool) -> Bias:
        """Of all stretches, or of those that the trained policy itself drew."""

        def of(kind: str) -> Spread:
            found = [values for name, current, values in self._values if name == kind and (current or not same_version)]
            return spread(np.concatenate(found) if found else [])

        return Bias(differing=of("differing"), after_change=of("after_change"), same=of("same"))
