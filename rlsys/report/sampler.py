"""What the engine's way of drawing tokens does to the ratio between trained and sampled probability. Pure.

SGLang's sampler divides the logits by the temperature, takes the softmax over the whole vocabulary, filters a copy by
top k and top p to draw from, and reports the log of the unfiltered softmax (`Sampler.forward` in
sglang/srt/layers/sampler.py; SGLANG_RETURN_ORIGINAL_LOGPROB, which this system never sets, would leave the temperature
out). The trainer divides its logits by the same temperature and scores the whole vocabulary too. So

- the temperature is on both sides, and no part of a recorded difference comes from the sampler;
- with top_p < 1 or a top_k, the token was in truth drawn from p / Z, Z the probability of what the filters kept. The
  engine does not report Z, so the true log-ratio is the recorded one + log Z, with log Z only bounded:
  Z <= 1, as it is a share; Z >= p, as the token was kept; Z >= top_p, if top p alone filters, as the kept tokens are the
  smallest set that has at least top_p. It is exact, Z = p, where top_k = 1 or p > top_p: a token with more than top_p is
  the first, and is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.observe.settings import number

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplerDrift:
    """What truncated sampling adds to the recorded log-ratios, in nats; nothing where it is off."""

    temperature: float
    top_p: float
    top_k: int
    """-1 where it is off."""
    truncated: bool
    tokens: int
    """Trained tokens whose log-prob the engine reported."""
    exact: int
    """Of them, those whose log Z is known: all if nothing is truncated."""
    least: float
    """Mean over `tokens` of the lower bounds of log Z, at most 0."""
    most: float
    """Of the upper bounds."""


def sampler_drift(logprobs: Floats, sampling: Mapping[str, Any]) -> SamplerDrift:
    """The part of the sampler. `logprobs` [tokens] are the engine's, `sampling` is `rollout.sampling` of the config."""
    top_p, top_k = number(sampling, "top_p", 1.0), int(number(sampling, "top_k", -1))
    top_p = top_p if top_p > 0 else 1.0  # A figure that was cut short; nothing can be drawn so.
    low, high = log_kept_mass(logprobs, top_p, top_k)
    return SamplerDrift(
        temperature=number(sampling, "temperature", 1.0),
        top_p=top_p,
        top_k=top_k,
        truncated=_is_on(top_p, top_k),
        tokens=len(logprobs),
        exact=int((low == high).sum()),
        least=float(low.mean()) if len(low) else 0.0,
        most=float(high.mean()) if len(high) else 0.0,
    )


def joined_sampler(parts: Sequence[SamplerDrift], sampling: Mapping[str, Any]) -> SamplerDrift:
    """Of the tokens of all `parts`, which were drawn as `sampling` says."""
    none = sampler_drift(np.empty(0), sampling)
    tokens = sum(one.tokens for one in parts)
    if not tokens:
        return none
    return replace(
        none,
        tokens=tokens,
        exact=sum(one.exact for one in parts),
        least=sum(one.least * one.tokens for one in parts) / tokens,
        most=sum(one.most * one.tokens for one in parts) / tokens,
    )


def log_kept_mass(logprobs: Floats, top_p: float, top_k: int) -> tuple[Floats, Floats]:
    """Bounds of log Z, each [tokens], from the drawn tokens' log-probs [tokens] before the filters."""
    nothing = np.zeros(len(logprobs))
    if not _is_on(top_p, top_k):
        return nothing, nothing
    own = np.minimum(np.asarray(logprobs, np.float64), 0.0)
    least = own if top_k > 0 else np.maximum(own, np.log(top_p))
    return least, np.where((top_k == 1) | (own > np.log(top_p)), own, 0.0)


def _is_on(top_p: float, top_k: int) -> bool:
    return top_p < 1.0 or top_k > 0
