"""Defines the algorithm keys of the schema: advantages, losses, KL terms, corrections. Pure data, no behaviour.

The defaults are GRPO (arXiv 2402.03300); each file in `configs/algorithm/` is another algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Unit

from rlsys.config.bounds import AboveOne, Count, NotNegative, Positive, Share, Tokens

AdvantageBaseline = StrEnum("AdvantageBaseline", ["none", "batch", "group", "leave_one_out", "critic"])
"""Value subtracted from a return. `none`: Nothing. `batch`: Mean over the mini-batch's episodes; training waits for the
whole mini-batch. `group`: Mean over the prompt group (GRPO). `leave_one_out`: Mean over the other episodes of the
prompt group (RLOO). `critic`: Learned value with generalised advantage estimation (PPO); adds the critic's worker group
to the run."""


SIBLINGS = (AdvantageBaseline.group, AdvantageBaseline.leave_one_out)
"""Baselines that compare the episodes of one prompt group."""

AdvantageScale = StrEnum("AdvantageScale", ["group", "batch", "whiten", "none"])
"""Divisor of advantages. `group`: Standard deviation of the prompt group's returns (GRPO). `batch`: Standard deviation
of the mini-batch's centred returns; training waits for the whole mini-batch. `whiten`: Advantages are centred and
scaled over all trained tokens of the mini-batch; training waits for the whole mini-batch. `none`: No scaling (Dr.
GRPO)."""

Credit = StrEnum("Credit", ["trajectory", "turn", "token"])
"""Rewards that a token's return includes. `trajectory`: All rewards of the episode. `turn`: Rewards of the token's turn
and of later turns. `token`: Rewards at the token's position and at later positions."""

PolicyLoss = StrEnum("PolicyLoss", ["ppo", "gspo", "cispo", "policy_gradient"])
"""Policy loss. `ppo`: Clipped ratio per token; with a `correction.kind`, decoupled PPO. `gspo`: Clipped ratio per
sequence. `cispo`: Log-prob weighted by the advantage and by the clipped ratio, which gets no gradient.
`policy_gradient`: Log-prob weighted by the advantage, without a ratio."""


Aggregation = StrEnum("Aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"])
"""Aggregation of token losses over a mini-batch. `token-mean`: Mean over tokens. `seq-mean-token-sum`: Sum within each
episode, mean over episodes. `seq-mean-token-mean`: Mean within each episode, mean over episodes. `fixed-length`: Sum
within each episode divided by `loss_length`, mean over episodes."""

KlPlace = StrEnum("KlPlace", ["loss", "reward"])
"""Place of the KL term to the reference policy. `loss`: Added to the loss. `reward`: Subtracted from each token's
reward."""


KlEstimator = StrEnum("KlEstimator", ["k1", "k2", "k3", "k3++", "k4", "k5", "abs", "full_reverse", "full_forward"])
"""KL estimator. `k1` to `k5` and `abs` use the sampled token's log-probs. `full_reverse`, KL(policy || reference), and
`full_forward`, KL(reference || policy), sum over the `kl_topk_tokens` most likely tokens."""


FULL_KL = (KlEstimator["full_reverse"], KlEstimator["full_forward"])
"""Estimators that compare distributions instead of the sampled token's log-probs."""

KlTail = StrEnum("KlTail", ["exact", "upstream"])
"""Estimate of the part of the KL that tokens outside of the top k contribute; it uses the sampled token. `exact`:
Unbiased in value and gradient. `upstream`: The estimate of EMA-PG's published code, whose gradient is biased."""

KlControl = StrEnum("KlControl", ["fixed", "adaptive"])
"""Weight of a KL term in the reward. `fixed`: Always `kl_coef`. `adaptive`: Adjusted after every step so that the KL
approaches `kl_target` (arXiv 1909.08593)."""

CorrectionKind = StrEnum("CorrectionKind", ["none", "truncate", "mask"])
"""Correction of tokens whose sampling policy differs from the policy before the update. `none`: No correction.
`truncate`: Weight by the ratio old policy / sampling policy, capped at `high` (truncated importance sampling). `mask`:
Weight by this ratio if it is within [`low`, `high`], else by 0 (IcePop)."""

CorrectionLevel = StrEnum("CorrectionLevel", ["token", "sequence"])
"""Unit of the correction ratio. `token`: One ratio per token. `sequence`: The product of the ratios of a sequence's
trained tokens."""


OldLogprobs = StrEnum("OldLogprobs", ["recompute", "actor", "engine"])
"""Source of the old log-probs, the denominator of the ratio. `recompute`: A forward pass of the policy in the inference
group; right for every schedule, loss and token mode. `actor`: The forward pass of the training itself, whose ratio is
1: the same gradient without the forward pass of the inference group, if a step has one update of the policy that
sampled it (`trainer.mini_batches=1`, not `async`). `engine`: The engine log-probs; the ratio then includes the
difference between engine and trainer, and needs `task.token_mode=append` and `task.train_eos=false`. `actor` and
`engine` need `algorithm.correction.kind=none`, and no `full_reverse` KL term over a top k."""


@dataclass
class CorrectionConfig:
    """Importance weights exp(old log-prob - engine log-prob) for off-policy tokens (decoupled PPO)."""

    kind: CorrectionKind = CorrectionKind.none
    level: CorrectionLevel = CorrectionLevel.token
    low: NotNegative = 0.5
    """Least ratio that `mask` keeps; at most 1."""
    high: Positive = 2.0
    """Largest ratio; at least 1. `truncate` lowers larger ratios to it, `mask` drops their tokens."""


@dataclass
class CurationConfig:
    """Selection of prompt groups for training."""

    oversample: Annotated[float, Ge(1)] = 1.0
    """Prompt groups started for each prompt group that a step needs. The slowest groups are aborted, and their prompts
    return to the queue. Raise it when a few long episodes delay a step."""
    drop_no_spread: bool = False
    """Replace prompt groups whose episodes all earn the same reward (dynamic sampling, DAPO). Compares only the reward
    terms that grade the answer, or the whole reward if there is no such term."""
    max_replaced: NotNegative = 3.0
    """Maximum number of prompt groups replaced in a step, as a multiple of `trainer.prompts_per_step`; beyond it,
    groups without a spread are trained."""


@dataclass
class AlgorithmConfig:
    """Advantages, loss, KL term and reference policy."""

    n_samples: Annotated[Count, Unit("episodes")] = 5
    """Episodes per prompt group."""
    baseline: AdvantageBaseline = AdvantageBaseline.group
    advantage_scale: AdvantageScale = AdvantageScale.group
    credit: Credit = Credit.trajectory
    gamma: Share = 1.0
    """Discount per turn with `credit=turn`, per trained token with `credit=token` or a critic. `credit=trajectory` does
    not discount."""
    gae_lambda: Share = 1.0
    """GAE lambda, with `baseline=critic` only. 1 uses only returns (no bias, high variance); 0 uses the next reward and
    the critic's value of the next token."""
    policy_loss: PolicyLoss = PolicyLoss.ppo
    aggregation: Aggregation = Aggregation["token-mean"]
    loss_length: Tokens | None = None
    """Divisor of `aggregation=fixed-length`; null is `task.max_total_tokens` minus `task.max_prompt_tokens`."""
    clip_low: NotNegative = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """Dual clip of `policy_loss=ppo`: cap on the ratio of a token with a negative advantage; null turns the cap off."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus in the loss. Raise it when the entropy falls too fast."""
    kl_coef: NotNegative = 0.001
    """Weight of the KL term to the reference policy; 0 removes the term."""
    kl_in: KlPlace = KlPlace.loss
    kl_estimator: KlEstimator = KlEstimator.k3
    kl_topk_tokens: Tokens | None = None
    """Number of most likely tokens in the sums of `full_reverse` and `full_forward`; null sums over the whole
    vocabulary."""
    kl_topk_tail: KlTail = KlTail.exact
    kl_use_tail_sampling: bool = True
    """Let the sampled token stand for all tokens outside of the `kl_topk_tokens`; false ignores them."""
    use_kl_iw: bool = False
    """Weight the sampled part of a KL term in the loss by the ratio of current to old policy. The ratio is 1, to rounding,
    before a step's first update. The name comes from EMA-PG."""
    kl_iw_clip_lower: NotNegative | None = None
    """Lower bound of the `use_kl_iw` weight; null sets none."""
    kl_iw_clip_upper: Positive | None = None
    """Upper bound of the `use_kl_iw` weight; null sets none."""
    kl_control: KlControl = KlControl.fixed
    kl_target: Annotated[Positive, Unit("nats")] = 0.1
    """Target of `kl_control=adaptive` for the KL per token."""
    kl_horizon: Annotated[Count, Unit("episodes")] = 10000
    """Time constant of `kl_control=adaptive`: with a larger horizon the weight changes more slowly. The horizon must
    exceed a fifth of a step's episodes."""
    ref_policy_ema_tau: Share = 1.0
    """Coefficient tau of an update of the reference policy: tau * reference + (1 - tau) * actor. 1 keeps the reference
    frozen."""
    ref_policy_ema_update_period: Annotated[Count, Unit("steps")] = 10
    """Steps between updates of the reference, with `ref_policy_ema_tau` below 1."""
    ref_policy_reset_period: Annotated[Count, Unit("steps")] | None = None
    """Steps after which the reference is replaced by the actor; null never replaces it."""
    eval_ref_policy: bool = False
    """Evaluate the reference policy too, after the last step. Needs a reference that changes during the run."""
    old_logprobs: OldLogprobs = OldLogprobs.recompute
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    curation: CurationConfig = field(default_factory=CurationConfig)
