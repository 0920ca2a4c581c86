"""Defines the algorithm keys of the schema: advantages, losses, KL terms, corrections. Pure data, no behaviour.

The defaults are GRPO (arXiv 2402.03300); each file in `configs/algorithm/` is another algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Ge, Unit

from rlsys.config.bounds import AboveOne, Count, NotNegative, Positive, Seconds, Share, Tokens, Whole
from rlsys.config.custom import TimedCustom

AdvantageBaseline = StrEnum("AdvantageBaseline", ["none", "batch", "group", "leave_one_out"])
"""Value subtracted from a return. `none`: Nothing. `batch`: Mean over the mini-batch's episodes; training waits for the
whole mini-batch. `group`: Mean over the prompt group (GRPO). `leave_one_out`: Mean over the other episodes of the
prompt group (RLOO)."""


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

Aggregation = StrEnum("Aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"])
"""Aggregation of token losses over a mini-batch. `token-mean`: Mean over tokens. `seq-mean-token-sum`: Sum within each
episode, mean over episodes. `seq-mean-token-mean`: Mean within each episode, mean over episodes. `fixed-length`: Sum
within each episode divided by `loss_length`, mean over episodes."""

KlPlace = StrEnum("KlPlace", ["loss", "reward", "advantage"])
"""Place of the KL term to the reference policy. `loss`: Added to the loss. `reward`: Subtracted from each token's
reward. `advantage`: Subtracted from each token's advantage, after all baselines and scales."""


KlTail = StrEnum("KlTail", ["exact", "upstream"])
"""Estimate of the part of the KL that tokens outside of the top k contribute; it uses the sampled token. `exact`:
Unbiased in value and gradient. `upstream`: The estimate of EMA-PG's published code, whose gradient is biased."""

KlControl = StrEnum("KlControl", ["fixed", "adaptive"])
"""Weight of a KL term in the reward. `fixed`: Always `kl_coef`. `adaptive`: Adjusted after every step so that the KL
approaches `kl_target` (arXiv 1909.08593)."""

CorrectionKind = StrEnum("CorrectionKind", ["none", "truncate", "mask", "reject"])
"""Correction of tokens whose sampling policy differs from the policy before the update. `none`: No correction.
`truncate`: Weight by the ratio old policy / sampling policy, capped at `high` (truncated importance sampling). `mask`:
Weight by this ratio if it is within [`low`, `high`], else by 0 (IcePop). `reject`: Weight by 1 if the ratio is within
these bounds, else by 0 (rejection sampling)."""

CorrectionLevel = StrEnum("CorrectionLevel", ["token", "sequence", "geometric"])
"""Unit of the correction ratio. `token`: One ratio per token. `sequence`: The product of the ratios of a sequence's
trained tokens. `geometric`: The geometric mean of these ratios, which does not grow with the length."""


LldsGate = StrEnum("LldsGate", ["turn", "trajectory", "token"])
"""Tokens whose log-probs must have fallen in total before any of them is penalised. `turn`: Those of a turn, that is of
consecutive trained tokens. `trajectory`: Those of the episode, or of its branch. `token`: The token alone."""

TeacherApi = StrEnum("TeacherApi", ["sglang", "openai"])
"""API of a teacher's server. `sglang`: SGLang's `/generate` with log-probs of the input. `openai`: `/completions` of an
OpenAI-compatible server, such as vLLM's, with `echo` and `logprobs`; the address ends in /v1."""

OldLogprobs = StrEnum("OldLogprobs", ["recompute", "actor", "engine"])
"""Source of the old log-probs, the denominator of the ratio. `recompute`: A forward pass of the policy in the inference
group; right for every schedule, loss and token mode. `actor`: The forward pass of the training itself, whose ratio is
1: the same gradient without the forward pass of the inference group, if a step has one update of the policy that
sampled it (`trainer.mini_batches=1`, not `async`). `engine`: The engine log-probs; the ratio then includes the
difference between engine and trainer, and needs `task.token_mode=append` and `task.train_eos=false`. `actor` and
`engine` need `algorithm.correction.kind=none`, and no `full_reverse` KL term over a top k."""


RouterReplay = StrEnum("RouterReplay", ["none", "r3"])
"""Routing of tokens to experts while the policy scores and trains. `none`: The trainer's own choice. `r3`: The engine's
choice (rollout routing replay); needs a mixture of experts, and an engine that returns the experts of each token."""


@dataclass
class CorrectionConfig:
    """Importance weights exp(old log-prob - engine log-prob) for off-policy tokens (decoupled PPO)."""

    kind: CorrectionKind = CorrectionKind.none
    level: CorrectionLevel = CorrectionLevel.token
    low: NotNegative = 0.5
    """Least ratio that `mask` and `reject` keep; at most 1."""
    high: Positive = 2.0
    """Largest ratio; at least 1. `truncate` lowers larger ratios to it; `mask` and `reject` drop their tokens."""


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
class ReturnsAdvantage:
    """Returns minus a baseline, divided by a scale: GRPO, RLOO, REINFORCE++ and their relatives."""

    kind: Literal["returns"] = "returns"
    baseline: AdvantageBaseline = AdvantageBaseline.group
    scale: AdvantageScale = AdvantageScale.group
    credit: Credit = Credit.trajectory
    gamma: Share = 1.0
    """Discount per turn with `credit=turn`, per trained token with `credit=token`; `credit=trajectory` does not
    discount."""


@dataclass
class GaeAdvantage:
    """Generalised advantage estimation with a learned value per token (PPO); adds the critic's worker group to the
    run."""

    kind: Literal["gae"] = "gae"
    gamma: Share = 1.0
    """Discount per trained token."""
    gae_lambda: Share = 1.0
    """GAE lambda. 1 uses only returns (no bias, high variance); 0 uses the next reward and the critic's value of the
    next token."""
    whiten: bool = True
    """Centre and scale advantages over all trained tokens of the mini-batch; training waits for the whole
    mini-batch."""


@dataclass
class LldsConfig:
    """Penalty on log-probs that updates have lowered, in episodes with an advantage of at least 0 (LLDS). It acts
    from a step's second update on, or if rollouts run ahead of training."""

    coef: NotNegative = 0.0
    """Weight of the penalty in the loss; 0 removes the penalty. The published runs have 0.2 and 0.3."""
    gate: LldsGate = LldsGate.turn


CRITIC, MINI_BATCH = "critic", "mini_batch"
"""Needs that an advantage estimator from outside of the package may declare."""


class CustomAdvantage(TimedCustom):
    """An advantage estimator of your own; see docs/extending.md."""

    key = "algorithm.advantage.kind"
    arguments = ("episodes",)
    facts = (CRITIC, MINI_BATCH)


@dataclass
class PpoLoss:
    """Clipped ratio per token; with a `correction.kind`, decoupled PPO."""

    kind: Literal["ppo"] = "ppo"
    clip_low: NotNegative = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """Cap on the ratio of a token with a negative advantage; null turns the cap off."""


@dataclass
class GspoLoss:
    """Clipped ratio per sequence."""

    kind: Literal["gspo"] = "gspo"
    clip_low: NotNegative = 3e-4
    """Lower clip range: the sequence's ratio is clipped at 1 - clip_low."""
    clip_high: NotNegative = 4e-4
    """Upper clip range: the sequence's ratio is clipped at 1 + clip_high."""


@dataclass
class CispoLoss:
    """Log-prob weighted by the advantage and by the clipped ratio, which gets no gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: NotNegative = 1.0
    """Lower clip range: the ratio is clipped at 1 - clip_low; 1 does not clip it."""
    clip_high: NotNegative = 4.0
    """Upper clip range: the ratio is clipped at 1 + clip_high."""


@dataclass
class PolicyGradientLoss:
    """Log-prob weighted by the advantage, without a ratio."""

    kind: Literal["policy_gradient"] = "policy_gradient"


@dataclass
class SapoLoss:
    """Ratio per token through a soft gate, whose gradient fades away from 1 instead of being cut off."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Temperature of the gate for tokens with a positive advantage: with a larger one the gradient fades faster."""
    tau_negative: Positive = 1.05
    """Temperature of the gate for the other tokens."""


class CustomLoss(TimedCustom):
    """A policy loss of your own; see docs/extending.md."""

    key = "algorithm.policy_loss.kind"
    arguments = ("logprobs", "inputs")


@dataclass
class SampledKl:
    """Compares the log-probs of the sampled token. docs/algorithms.md has the formulas."""

    kind: Literal["k1", "k2", "k3", "k3++", "k4", "k5", "abs"] = "k3"


@dataclass
class FullKl:
    """Compares distributions: `full_reverse` is KL(policy || reference), `full_forward` is KL(reference || policy)."""

    kind: Literal["full_reverse", "full_forward"] = "full_reverse"
    topk_tokens: Tokens | None = None
    """Number of most likely tokens in the sum; null sums over the whole vocabulary."""
    topk_tail: KlTail = KlTail.exact
    use_tail_sampling: bool = True
    """Let the sampled token stand for all tokens outside of the `topk_tokens`; false ignores them."""


class CustomKl(TimedCustom):
    """A KL estimator of your own; see docs/extending.md."""

    key = "algorithm.kl_estimator.kind"
    arguments = ("logprobs", "ref_logprobs")


@dataclass
class TeacherConfig:
    """Teacher of on-policy distillation. It takes the place of the reference policy: the KL term compares the policy
    with it."""

    model: str | None = None
    """Folder of a Hugging Face checkpoint, which the groups load that would hold the reference, or address of a server,
    such as http://127.0.0.1:30000; null is no teacher. Its tokenizer must be the policy's."""
    family: str | None = None
    """Model family of a folder; see `model.family`."""
    pp_layers: Annotated[list[int] | None, Unit("layers")] = None
    """Layers of a folder's model in each pipeline stage, in order; null splits evenly. The other parallel sizes are
    those of the group that loads it."""
    api: TeacherApi = TeacherApi.sglang
    served_model: str = ""
    """Name of the model in requests; required by `api=openai`."""
    token_env: str | None = None
    """Environment variable with the server's API key, on the driver's machine; null sends none."""
    timeout_s: Seconds = 120.0
    """Time limit of one HTTP request, which has one sequence."""
    retries: Annotated[Whole, Unit("tries")] = 3
    """Retries of a failed request, with growing pauses. If all fail, the run ends."""
    max_concurrent: Annotated[Count, Unit("requests")] = 64
    """Maximum number of requests in flight, which the server batches."""


@dataclass
class AlgorithmConfig:
    """Advantages, loss, KL term and reference policy."""

    n_samples: Annotated[Count, Unit("episodes")] = 5
    """Episodes per prompt group."""
    advantage: ReturnsAdvantage | GaeAdvantage | CustomAdvantage = field(default_factory=ReturnsAdvantage)
    """Estimator of the advantages."""
    policy_loss: PpoLoss | GspoLoss | CispoLoss | PolicyGradientLoss | SapoLoss | CustomLoss = field(
        default_factory=PpoLoss
    )
    """Policy loss."""
    aggregation: Aggregation = Aggregation["token-mean"]
    loss_length: Tokens | None = None
    """Divisor of `aggregation=fixed-length`; null is `task.max_total_tokens` minus `task.max_prompt_tokens`."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus in the loss. Raise it when the entropy falls too fast."""
    llds: LldsConfig = field(default_factory=LldsConfig)
    kl_coef: NotNegative = 0.001
    """Weight of the KL term to the reference policy; 0 removes the term."""
    kl_in: KlPlace = KlPlace.loss
    kl_estimator: SampledKl | FullKl | CustomKl = field(default_factory=SampledKl)
    """Estimator of the KL to the reference policy."""
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
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    eval_ref_policy: bool = False
    """Evaluate the reference policy too, after the last step. Needs a reference that changes during the run."""
    old_logprobs: OldLogprobs = OldLogprobs.recompute
    router_replay: RouterReplay = RouterReplay.none
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    curation: CurationConfig = field(default_factory=CurationConfig)
