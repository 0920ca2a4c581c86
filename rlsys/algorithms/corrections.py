"""Computes correction weights for off-policy tokens, which the policy before the update did not sample.

Three policies are involved in an off-policy token: mu sampled it (`rollout_logprobs`), pi_prox is the policy before the
update (`old_logprobs`, recomputed), and pi is trained. Decoupled PPO corrects for mu by importance weighting and keeps
the trust region around pi_prox:

    maximise  w min(r A, clip(r) A),   w = pi_prox / mu, bounded,   r = pi / pi_prox

Example with the upper bound `high` = 2: mu = 0.1 and pi_prox = 0.3 give a ratio of 3. `truncate` sets w = 2, `mask`
and `reject` set w = 0. A ratio of 1.5 gives w = 1.5, and with `reject` w = 1: rejection keeps tokens or sequences near
mu as they are, and its bounds on the geometric mean suit sequences of any length.

The weight w (`Sample.weights`) is not negative, so A can be multiplied by it and the loss needs no change. KL and
entropy terms are not weighted. A dropped token still counts in the divisor of `token-mean`: dropping weakens the update
and does not scale up the remaining tokens.

Sources: decoupled PPO: Hilton et al. (arXiv 2110.00641), AReaL (arXiv 2505.24298). Ratios cut at a bound: V-trace in
IMPALA (arXiv 1802.01561). Truncated importance sampling between engine and trainer: Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (2025). Two-sided masking: IcePop, in Ring-1T (arXiv 2510.18855). Rejection of sequences, also by the geometric mean: veRL's
rollout correction, which also takes dropped tokens out of the divisor.

Pure numpy. Invariants: weights are finite and not negative. They are exactly 1 where mu and pi_prox agree, where mu is
unknown (token level), and on untrained tokens, whatever the log-probs there are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rlsys.config.algorithm import CorrectionConfig, CorrectionKind, CorrectionLevel

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

LOG_RATIO_LIMIT = 20.0
"""Bound of |log-ratio|. exp(20) is 5e8: far above any useful bound, and its square still sums accurately in float64."""


@dataclass(frozen=True, slots=True)
class CorrectionStats:
    """Sums over the known tokens: trained tokens whose mu is known. Add the sums of several samples with `+`."""

    known: int = 0
    unknown: int = 0
    """Trained tokens without an engine log-prob, hence without a ratio of their own."""
    cut: int = 0
    """Known tokens whose ratio was truncated, or which were dropped."""
    ratio_sum: float = 0.0
    """Sum of the ratios before cutting; above the token level, each token has its sequence's ratio."""
    kept_sum: float = 0.0
    """The same sum after cutting: truncated ratios count as their bound, and those of dropped tokens as 0."""
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    abs_log_ratio_sum: float = 0.0
    """Sum of |log pi_prox - log mu|. This sum, `k1_sum` and `k3_sum` use the ratios of single tokens at every level."""
    k1_sum: float = 0.0
    k3_sum: float = 0.0

    def __add__(self, other: CorrectionStats) -> CorrectionStats:
        return CorrectionStats(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def effective_share(self) -> float:
        """Effective sample size (Kish, 1965), (sum w)^2 / sum w^2, as a share of the known tokens.

        In [0, 1]: 1 if all weights are equal or no token is known, 0 if every known token is dropped.
        """
        if not self.known:
            return 1.0
        # For equal weights the quotient may exceed 1 by rounding.
        return min(1.0, _share(self.weight_sum**2, self.known * self.weight_square_sum))

    @property
    def cut_share(self) -> float:
        """Cut tokens as a share of the known tokens."""
        return _share(self.cut, self.known)

    @property
    def cut_mass(self) -> float:
        """Share of the importance mass lost by cutting: 1 - (sum of kept ratios) / (sum of ratios)."""
        return _share(self.ratio_sum - self.kept_sum, self.ratio_sum)

    @property
    def unknown_share(self) -> float:
        """Unknown tokens as a share of the trained tokens."""
        return _share(self.unknown, self.known + self.unknown)

    @property
    def abs_log_ratio(self) -> float:
        """Mean |log pi_prox - log mu| over the known tokens, in nats."""
        return _share(self.abs_log_ratio_sum, self.known)

    @property
    def k1(self) -> float:
        """KL(mu || pi_prox) in nats per known token, estimated by -log ratio: unbiased, can be negative."""
        return _share(self.k1_sum, self.known)

    @property
    def k3(self) -> float:
        """KL(mu || pi_prox) in nats per known token, estimated by ratio - 1 - log ratio: unbiased, not negative."""
        return _share(self.k3_sum, self.known)


def correct(
    old_logprobs: Floats, rollout_logprobs: Floats, mask: Mask, config: CorrectionConfig
) -> tuple[Floats | None, CorrectionStats]:
    """Return the weights [seq] of one sample's tokens and their statistics; None and empty statistics for kind `none`.

    All arrays are [seq]; `mask` is True for trained tokens. mu is unknown where a trained token's `rollout_logprobs` is
    NaN or infinite. At the token level such a token has weight 1. At the other levels, all trained tokens share one
    weight, computed from the known tokens; the weight is 1 if no token is known. Log-ratios are clamped to +-20, and so
    is their sum over a sequence.

    Requires low <= 1 <= high, so that equal policies give weight 1. Raises ValueError if shapes differ or a trained
    token's `old_logprobs` is not finite.
    """
    if config.kind is CorrectionKind.none:
        return None, CorrectionStats()
    log_ratios, known = _log_ratios(old_logprobs, rollout_logprobs, mask)
    ratios = _ratios(log_ratios, known, mask, config.level)
    if config.kind is CorrectionKind.truncate:
        weights = np.minimum(ratios, np.float32(config.high))
    else:
        kept = ratios if config.kind is CorrectionKind.mask else np.ones_like(ratios)
        weights = np.where((config.low <= ratios) & (ratios <= config.high), kept, np.float32(0.0))
    return weights, _stats(log_ratios[known], ratios[known], weights[known], mask, config.kind)


def measure(
    old_logprobs: Floats, rollout_logprobs: Floats, mask: Mask, weights: Floats, config: CorrectionConfig
) -> CorrectionStats:
    """Recompute the statistics that `correct` returns with `weights`. Arrays are [seq]; raises as `correct` does."""
    log_ratios, known = _log_ratios(old_logprobs, rollout_logprobs, mask)
    ratios = _ratios(log_ratios, known, mask, config.level)
    return _stats(log_ratios[known], ratios[known], weights[known], mask, config.kind)


def _log_ratios(old_logprobs: Floats, rollout_logprobs: Floats, mask: Mask) -> tuple[NDArray[np.float64], Mask]:
    """Return log pi_prox - log mu (0 where mu is unknown) and the mask of known tokens, both [seq]."""
    if not old_logprobs.shape == rollout_logprobs.shape == mask.shape:
        raise ValueError(
            f"Log-probs and mask of a sample must be aligned, got {old_logprobs.shape} recomputed, "
            f"{rollout_logprobs.shape} sampled and a mask of {mask.shape}."
        )
    if not np.isfinite(old_logprobs[mask]).all():
        raise ValueError("A trained token's recomputed log-prob is not finite: check the inference group.")
    known = mask & np.isfinite(rollout_logprobs)
    log_ratios = np.zeros(mask.shape, dtype=np.float64)
    # In float64 and only on known tokens: equal log-probs give exactly 0, and NaN is never read.
    difference = old_logprobs[known].astype(np.float64) - rollout_logprobs[known]
    log_ratios[known] = difference.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratios, known


def _ratios(log_ratios: NDArray[np.float64], known: Mask, mask: Mask, level: CorrectionLevel) -> Floats:
    """Return pi_prox / mu [seq] of each token, or of its whole sequence; 1 where the ratio is undefined."""
    if level is not CorrectionLevel.token:
        whole = log_ratios[known].sum()
        if level is CorrectionLevel.geometric:
            whole /= max(1, known.sum())
        log_ratios = np.where(mask, whole.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    return np.exp(log_ratios).astype(np.float32)


def _stats(
    log_ratios: NDArray[np.float64], ratios: Floats, weights: Floats, mask: Mask, kind: CorrectionKind
) -> CorrectionStats:
    """Return the statistics of one sample. `log_ratios`, `ratios` and `weights` are [known], `mask` is [seq]."""
    uncut, exact = ratios.astype(np.float64), weights.astype(np.float64)
    kept = np.where(weights > 0, uncut, 0.0) if kind is CorrectionKind.reject else exact
    return CorrectionStats(
        known=len(weights),
        unknown=int(mask.sum()) - len(weights),
        cut=int((weights == 0 if kind is CorrectionKind.reject else weights != ratios).sum()),
        ratio_sum=float(uncut.sum()),
        kept_sum=float(kept.sum()),
        weight_sum=float(exact.sum()),
        weight_square_sum=float(np.square(exact).sum()),
        abs_log_ratio_sum=float(np.abs(log_ratios).sum()),
        k1_sum=float(-log_ratios.sum()),
        k3_sum=float((np.expm1(log_ratios) - log_ratios).sum()),
    )


def _share(part: float, whole: float) -> float:
    """part / whole; 0 if `whole` is 0."""
    return part / whole if whole else 0.0
