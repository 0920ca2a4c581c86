"""Weights for tokens that another policy sampled than the one that is updated.

Three policies meet in a late token: mu sampled it (`rollout_logprobs`), pi_prox is the policy before this
update, which clipping compares with (`old_logprobs`, recomputed), and pi is being trained. Decoupled PPO
weighs mu out and leaves the trust region around pi_prox:

    maximise  w min(r A, clip(r) A),   w = pi_prox / mu, bounded,   r = pi / pi_prox

As w is not negative it may be multiplied into A, which is what `Sample.weights` is for; the loss does not
change. A KL or entropy term beside it is not weighted. A dropped token still counts in the token mean's
denominator, so that dropping weakens an update instead of raising what is left.

Sources: decoupled PPO: Hilton et al. (arXiv 2110.00641), AReaL (arXiv 2505.24298). Ratios cut at a bound: V-trace in
IMPALA (arXiv 1802.01561); between engine and trainer: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025), truncated importance sampling. Two-sided masking: IcePop, in Ring-1T (arXiv 2510.18855).

Pure numpy. Invariants: weights are finite and not negative; they are exactly 1 where the two policies agree,
where mu is unknown (token level) and where a token is not trained, whatever stands in that token's log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rlsys.config.algorithm import CorrectionConfig, CorrectionKind, CorrectionLevel

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: far outside any bound that is of use, and its square still sums well in float64."""


@dataclass(frozen=True, slots=True)
class CorrectionStats:
    """Sums over the known tokens, trained ones whose mu is known; those of several samples are added."""

    known: int = 0
    unknown: int = 0
    """Trained tokens without a sampled log-prob: no ratio of their own enters the correction."""
    cut: int = 0
    """Known tokens whose weight is not the ratio: truncated, or dropped."""
    ratio_sum: float = 0.0
    """Of the ratios before the cut, a sequence's ratio at the sequence level."""
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    abs_log_ratio_sum: float = 0.0
    """Of |log pi_prox - log mu|, token by token at either level; so are k1 and k3."""
    k1_sum: float = 0.0
    k3_sum: float = 0.0

    def __add__(self, other: CorrectionStats) -> CorrectionStats:
        return CorrectionStats(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def effective_share(self) -> float:
        """Effective sample size (Kish, 1965), (sum w)^2 / sum w^2, as a share of the known tokens.

        In (0, 1], and 1 if all weights are equal; 0 if every known token was dropped, 1 if none is known.
        """
        if not self.known:
            return 1.0
        # Rounding may lift the quotient of equal weights above 1.
        return min(1.0, _share(self.weight_sum**2, self.known * self.weight_square_sum))

    @property
    def cut_share(self) -> float:
        """Cut tokens as a share of the known."""
        return _share(self.cut, self.known)

    @property
    def cut_mass(self) -> float:
        """Share of the importance mass that was cut off: (sum of ratios - sum of weights) / sum of ratios."""
        return _share(self.ratio_sum - self.weight_sum, self.ratio_sum)

    @property
    def unknown_share(self) -> float:
        """Share of the trained tokens that have no ratio."""
        return _share(self.unknown, self.known + self.unknown)

    @property
    def abs_log_ratio(self) -> float:
        """Mean distance of the two policies' log-probs over the known tokens, in nats."""
        return _share(self.abs_log_ratio_sum, self.known)

    @property
    def k1(self) -> float:
        """KL(mu || pi_prox) in nats per known token, estimated by -log ratio: unbiased, may be negative."""
        return _share(self.k1_sum, self.known)

    @property
    def k3(self) -> float:
        """KL(mu || pi_prox) in nats per known token, by ratio - 1 - log ratio: unbiased, never negative; see `kl`."""
        return _share(self.k3_sum, self.known)


def correct(
    old_logprobs: Floats, rollout_logprobs: Floats, mask: Mask, config: CorrectionConfig
) -> tuple[Floats | None, CorrectionStats]:
    """Weights [seq] of one sample's tokens, and their statistics; None and nothing for kind `none`.

    `old_logprobs`, `rollout_logprobs` and `mask`, True where a token is trained, are [seq]. A trained token's
    mu is unknown where `rollout_logprobs` is NaN or infinite. Its weight is 1 at the token level; at the
    sequence level, where a sequence is kept or dropped whole, it takes the weight of the known tokens of its
    sequence, or 1 if there are none. Log-ratios are clamped to +-20, and so is the sum of a sequence's.

    Needs low <= 1 <= high, for 1 is the weight of what needs no correction. Raises ValueError if shapes
    differ or a trained token's `old_logprobs` is not finite.
    """
    if config.kind is CorrectionKind.none:
        return None, CorrectionStats()
    log_ratios, known = _log_ratios(old_logprobs, rollout_logprobs, mask)
    ratios = _ratios(log_ratios, known, mask, config.level)
    if config.kind is CorrectionKind.truncate:
        weights = np.minimum(ratios, np.float32(config.high))
    else:
        weights = np.where((config.low <= ratios) & (ratios <= config.high), ratios, np.float32(0.0))
    return weights, _stats(log_ratios[known], ratios[known], weights[known], mask)


def measure(
    old_logprobs: Floats, rollout_logprobs: Floats, mask: Mask, weights: Floats, level: CorrectionLevel
) -> CorrectionStats:
    """The statistics that `correct` returned with `weights`. All arrays are [seq]; errors as there."""
    log_ratios, known = _log_ratios(old_logprobs, rollout_logprobs, mask)
    ratios = _ratios(log_ratios, known, mask, level)
    return _stats(log_ratios[known], ratios[known], weights[known], mask)


def _log_ratios(old_logprobs: Floats, rollout_logprobs: Floats, mask: Mask) -> tuple[NDArray[np.float64], Mask]:
    """log pi_prox - log mu and where it is known, both [seq]; 0 where it is not."""
    if not old_logprobs.shape == rollout_logprobs.shape == mask.shape:
        raise ValueError(
            f"Log-probs and mask of a sample must be aligned, got {old_logprobs.shape} recomputed, "
            f"{rollout_logprobs.shape} sampled and a mask of {mask.shape}."
        )
    if not np.isfinite(old_logprobs[mask]).all():
        raise ValueError("A trained token's recomputed log-prob is not finite; check the inference group.")
    known = mask & np.isfinite(rollout_logprobs)
    log_ratios = np.zeros(mask.shape, dtype=np.float64)
    # In float64, and only where known: no rounding may part equal policies, no NaN may be touched.
    difference = old_logprobs[known].astype(np.float64) - rollout_logprobs[known]
    log_ratios[known] = difference.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratios, known


def _ratios(log_ratios: NDArray[np.float64], known: Mask, mask: Mask, level: CorrectionLevel) -> Floats:
    """[seq] pi_prox / mu of each token, or of its whole sequence; 1 where there is none."""
    if level is CorrectionLevel.sequence:
        whole = log_ratios[known].sum().clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_ratios = np.where(mask, whole, 0.0)
    return np.exp(log_ratios).astype(np.float32)


def _stats(log_ratios: NDArray[np.float64], ratios: Floats, weights: Floats, mask: Mask) -> CorrectionStats:
    """Statistics of a sample: the first three are [known], `mask` is [seq]."""
    uncut, exact = ratios.astype(np.float64), weights.astype(np.float64)
    return CorrectionStats(
        known=len(weights),
        unknown=int(mask.sum()) - len(weights),
        cut=int((weights != ratios).sum()),
        ratio_sum=float(uncut.sum()),
        weight_sum=float(exact.sum()),
        weight_square_sum=float(np.square(exact).sum()),
        abs_log_ratio_sum=float(np.abs(log_ratios).sum()),
        k1_sum=float(-log_ratios.sum()),
        k3_sum=float((np.expm1(log_ratios) - log_ratios).sum()),
    )


def _share(part: float, whole: float) -> float:
    """part / whole, and 0 of nothing."""
    return part / whole if whole else 0.0
