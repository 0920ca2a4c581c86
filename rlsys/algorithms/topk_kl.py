"""KL of policy and reference from their distributions: over the whole vocabulary, or its top k and a sample.

Contract: log-probs are finite and at the sampling temperature; those of the reference are constants. Two
directions: reverse, KL(policy || reference), and forward, KL(reference || policy). Of a set of tokens q

    KL = L1 + s L2        L1 = sum of `shares` over q, exact
                          L2 = `tail`: if the sampled token y is not in q, it stands for all that are not

With y drawn from the policy and s = 1, or from another policy mu and s = policy(y) / mu(y), the value is
unbiased for any q that does not depend on y; so is the gradient with the tail `exact`, not with `upstream`.

Source: EMA-PG (arXiv 2602.04417).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlsys.algorithms.kl import LOG_RATIO_LIMIT, importance_weights
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator, KlTail


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that was sampled in each place. All [n]."""

    logprobs: Tensor
    """Of the policy that is updated; gradient flows."""
    old_logprobs: Tensor
    """Of the policy that the update sets out from, which drew the token."""
    ref_logprobs: Tensor
    picked: Tensor
    """bool, whether it is one of the tokens that are summed over."""


@dataclass(frozen=True, slots=True)
class TopKKl:
    """The KL from the tokens that were picked and the one that was sampled."""

    forward_kl: bool
    tail: KlTail | None
    """None leaves out all tokens that were not picked."""
    weighted: bool
    """Whether the tail is weighted by the ratio of the policies that are updated and that sampled."""
    weight_lower: float | None
    weight_upper: float | None

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, sampled: Sampled) -> Tensor:
        """`logprobs` and `ref_logprobs` [n, k] of the picked tokens -> KL [n], in nats."""
        head = shares(logprobs, ref_logprobs, self.forward_kl).sum(dim=-1)
        if self.tail is None:
            return head
        rest = tail(sampled, self.tail, self.forward_kl)
        if self.weighted:
            rest = rest * importance_weights(
                sampled.logprobs, sampled.old_logprobs, self.weight_lower, self.weight_upper
            )
        return head + rest


def top_k_kl(config: AlgorithmConfig) -> TopKKl:
    """What `config` describes, whose `kl_estimator` is full_reverse or full_forward."""
    return TopKKl(
        forward_kl=config.kl_estimator is KlEstimator.full_forward,
        tail=config.kl_topk_tail if config.kl_use_tail_sampling else None,
        weighted=config.use_kl_iw,
        weight_lower=config.kl_iw_clip_lower,
        weight_upper=config.kl_iw_clip_upper,
    )


def shares(logprobs: Tensor, ref_logprobs: Tensor, forward_kl: bool) -> Tensor:
    """What each token adds to the KL; their sum over the vocabulary is the KL. Elementwise.

    reverse: p (log p - log r)        forward: r (log r - log p)
    """
    if forward_kl:
        return ref_logprobs.exp() * (ref_logprobs - logprobs)
    return logprobs.exp() * (logprobs - ref_logprobs)


def logit_gradient(logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor, forward_kl: bool) -> Tensor:
    """Derivative of the KL by the policy's logits at the sampling temperature, [n, tokens].

    reverse: p (log p - log r - KL)        forward: p - r

    `kl` [n] is over the whole vocabulary; the tokens may be any part of it.
    """
    if forward_kl:
        return logprobs.exp() - ref_logprobs.exp()
    return logprobs.exp() * (logprobs - ref_logprobs - kl[:, None])


def join_parts(log_masses: Tensor, ref_log_masses: Tensor, within: Tensor, forward_kl: bool) -> Tensor:
    """The KL from those within each part of a vocabulary that is cut in parts (chain rule of the KL). -> [n]

    All [parts, n]: log of the probability that policy and reference give to a part, and the KL of the
    two once each is normalised within the part. It is the KL of the masses plus the mean of those within.
    """
    masses = (ref_log_masses if forward_kl else log_masses).exp()
    return (shares(log_masses, ref_log_masses, forward_kl) + masses * within).sum(dim=0)


def tail(sampled: Sampled, kind: KlTail, forward_kl: bool) -> Tensor:
    """What the sampled token stands for, 0 where it was picked: [n]. With w = r(y) / p(y), sg for a constant,

                exact                          upstream
    reverse     p / sg(p) * -log w             p / sg(p) * sg(-log w)
    forward     sg(w) log w                    sg(w) log w + log p - sg(log p)

    In the forward direction log w is clamped to +-20, past which its gradient is zero. `upstream` is off by
    the gradient of the probability outside of the picks, which is zero only if nothing is picked: it lacks
    it in the reverse direction, where the head has the other half, and has it too much in the forward one.
    """
    # Filled before any arithmetic, so that a picked token gets a gradient of exactly zero.
    logprobs = sampled.logprobs.masked_fill(sampled.picked, 0.0)
    log_w = sampled.ref_logprobs.masked_fill(sampled.picked, 0.0) - logprobs
    # 1 and 0, with the gradients of p / sg(p) and log p.
    unit = (logprobs - logprobs.detach()).exp().masked_fill(sampled.picked, 0.0)
    upstream = kind is KlTail.upstream
    if not forward_kl:
        return unit * -(log_w.detach() if upstream else log_w)
    log_w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = log_w.detach().exp() * log_w
    return value + (logprobs - logprobs.detach()) if upstream else value
