"""The part of the schema that says how the policy learns. Pure data, no behaviour.

The defaults are GRPO (arXiv 2402.03300); the files in `configs/algorithm/` name the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Unit

from rlsys.config.bounds import AboveOne, Count, NotNegative, Positive, Share, Tokens

AdvantageBaseline = StrEnum("AdvantageBaseline", ["none", "batch", "group", "leave_one_out", "critic"])
"""What a return is compared with. `batch`: The mean of the mini-batch's episodes; training then waits for the
mini-batch. `group`: The mean of the question's episodes (GRPO). `leave_one_out`: The mean of the question's other
episodes (RLOO). `critic`: A learned value, by generalised advantage estimation (PPO); the run then has a critic
group."""


SIBLINGS = (AdvantageBaseline.group, AdvantageBaseline.leave_one_out)
"""Baselines that compare episodes of one question."""

AdvantageScale = StrEnum("AdvantageScale", ["group", "batch", "whiten", "none"])
"""What advantages are divided by. `group`: The standard deviation of the group's returns (GRPO). `batch`: The
standard deviation of the mini-batch's centred returns; training then waits for the mini-batch. `whiten`: Centred and
divided over all trained tokens of the mini-batch; training then waits for it. `none`: Nothing (Dr. GRPO)."""

Credit = StrEnum("Credit", ["trajectory", "turn", "token"])
"""Which part of an episode's rewards a token answers for. `trajectory`: All of them. `turn`: Those of its turn and
later ones. `token`: Those at its place and later ones."""

PolicyLoss = StrEnum("PolicyLoss", ["ppo", "gspo", "cispo", "policy_gradient"])
"""How advantages become a loss. `ppo`: Clipped ratio of each token; decoupled PPO where `correction.kind` is not
none. `gspo`: Clipped ratio of whole sequences. `cispo`: The log-prob, weighted by the clipped ratio as a constant.
`policy_gradient`: The log-prob alone."""


Aggregation = StrEnum("Aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"])
"""How the losses of a mini-batch's trained tokens become one number. `token-mean`: their mean. `seq-mean-token-sum`:
summed within an episode, mean over episodes. `seq-mean-token-mean`: mean within, mean over. `fixed-length`: summed
within an episode and divided by a constant length, mean over episodes."""

KlPlace = StrEnum("KlPlace", ["loss", "reward"])
"""Where the KL term to the reference policy stands. `reward`: Taken off each token's reward."""


KlEstimator = StrEnum("KlEstimator", ["k1", "k2", "k3", "k3++", "k4", "k5", "abs", "full_reverse", "full_forward"])
"""How the divergence is computed. `k1` to `k5` and `abs` need the sampled token's log-probs alone; `full_reverse`,
KL(policy || reference), and `full_forward`, KL(reference || policy), sum over `kl_topk_tokens`."""


FULL_KL = (KlEstimator["full_reverse"], KlEstimator["full_forward"])
"""Estimators that compare distributions, not the sampled token's log-probs alone."""

KlTail = StrEnum("KlTail", ["exact", "upstream"])
"""How the sampled token outside of the top k stands for all that are. `exact`: Unbiased in value and gradient.
`upstream`: As EMA-PG's published code has it, whose gradient is off."""

KlControl = StrEnum("KlControl", ["fixed", "adaptive"])
"""Whether the weight of a KL term in the reward moves. `adaptive`: Towards `kl_target` (arXiv 1909.08593)."""

CorrectionKind = StrEnum("CorrectionKind", ["none", "truncate", "mask"])
"""What is done about tokens whose sampling policy is not the one that is updated. `truncate`: Weight by the ratio of
the two, capped at `high` (truncated importance sampling). `mask`: Weight by the ratio where it lies within [`low`,
`high`], and by 0 elsewhere (IcePop)."""

CorrectionLevel = StrEnum("CorrectionLevel", ["token", "sequence"])
"""What the ratio is taken of. `sequence`: The product over a sequence's trained tokens."""


@dataclass
class CorrectionConfig:
    """Weights of off-policy tokens, from recomputed and sampled log-probs (decoupled PPO)."""

    kind: CorrectionKind = CorrectionKind.none
    level: CorrectionLevel = CorrectionLevel.token
    low: NotNegative = 0.5
    """Least ratio that `mask` keeps."""
    high: Positive = 2.0
    """Largest ratio: `truncate` cuts to it, `mask` drops what is above."""


@dataclass
class CurationConfig:
    """Which groups are trained."""

    oversample: Annotated[float, Ge(1)] = 1.0
    """Groups started for each one that a step needs; the slowest are aborted and their prompts asked again."""
    drop_no_spread: bool = False
    """Replace groups whose answers all earned the same, by the reward's terms of the answer or, without one, by the whole
    reward: they teach nothing of right and wrong (dynamic sampling, DAPO)."""
    max_replaced: NotNegative = 3.0
    """Most groups replaced in a step, in units of `trainer.prompts_per_step`; further ones are trained as they are."""


@dataclass
class AlgorithmConfig:
    """The policy gradient."""

    n_samples: Annotated[Count, Unit("episodes")] = 5
    """Episodes of each question: one group."""
    baseline: AdvantageBaseline = AdvantageBaseline.group
    advantage_scale: AdvantageScale = AdvantageScale.group
    credit: Credit = Credit.trajectory
    gamma: Share = 1.0
    """Discount, a turn where `credit` is turn, else a trained token."""
    gae_lambda: Share = 1.0
    """Of `baseline=critic`: 1 trusts the returns alone, 0 the critic's next value."""
    policy_loss: PolicyLoss = PolicyLoss.ppo
    aggregation: Aggregation = Aggregation["token-mean"]
    loss_length: Tokens | None = None
    """Tokens that `fixed-length` divides by; null takes task.max_total_tokens less task.max_prompt_tokens."""
    clip_low: NotNegative = 0.2
    """How far below 1 a ratio counts."""
    clip_high: NotNegative = 0.2
    """How far above 1 a ratio counts."""
    dual_clip: AboveOne | None = None
    """Bound, in units of the advantage, on the loss of a token that should have been less likely; null is none."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy in the loss; it rewards variety."""
    kl_coef: NotNegative = 0.001
    """Weight of the KL term to the reference policy; 0 leaves the reference out."""
    kl_in: KlPlace = KlPlace.loss
    kl_estimator: KlEstimator = KlEstimator.k3
    kl_topk_tokens: Tokens | None = None
    """Of `full_reverse` and `full_forward`: most likely tokens that are summed over; null is the whole vocabulary."""
    kl_topk_tail: KlTail = KlTail.exact
    kl_use_tail_sampling: bool = True
    """Let the sampled token stand for those outside of the top k; else they are left out."""
    use_kl_iw: bool = False
    """Weight what was sampled by the ratio of the policies that are updated and that sampled. The name is EMA-PG's."""
    kl_iw_clip_lower: NotNegative | None = None
    """Least weight of a KL term's importance sampling; null does not bound it."""
    kl_iw_clip_upper: Positive | None = None
    """Largest; null does not bound it."""
    kl_control: KlControl = KlControl.fixed
    """Of a KL term in the reward."""
    kl_target: Annotated[Positive, Unit("nats")] = 0.1
    """Nats a token that `kl_control=adaptive` steers to."""
    kl_horizon: Annotated[Count, Unit("episodes")] = 10000
    """Episodes over which `kl_control=adaptive` moves the weight."""
    ref_policy_ema_tau: Share = 1.0
    """What the reference keeps of itself at an update, the rest is the policy's; 1 leaves it as it is."""
    ref_policy_ema_update_period: Annotated[Count, Unit("steps")] = 10
    """Steps between updates of the reference with `ref_policy_ema_tau` below 1."""
    ref_policy_reset_period: Annotated[Count, Unit("steps")] | None = None
    """Steps after which the reference becomes the policy; null never."""
    eval_ref_policy: bool = False
    """Ask the held-out questions to the reference too, after the last step."""
    recompute_logprobs: bool = True
    """Take old log-probs from the inference group, not from the engine."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    curation: CurationConfig = field(default_factory=CurationConfig)
