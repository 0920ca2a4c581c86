"""Checks that the algorithm keys fit together, and makes the errors of settings that conflict and of missing tokens.

A setting is an error if it turns on something that cannot work, or that has no effect with the other settings. Settings
of a feature that is off, such as the target of a fixed KL control, are ignored. All functions but `token_of`, which reads
the environment, are pure.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator

from rlsys.config.algorithm import (
    SIBLINGS,
    AdvantageBaseline,
    AdvantageScale,
    Aggregation,
    AlgorithmConfig,
    CorrectionKind,
    CorrectionLevel,
    Credit,
    CustomKl,
    FullKl,
    KlControl,
    KlPlace,
    KlTail,
    OldLogprobs,
    ReturnsAdvantage,
)
from rlsys.config.derived import (
    asks_teacher,
    full_kl,
    has_critic,
    has_reference,
    max_staleness,
    moves_reference,
    truncates_sampling,
)
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError


def conflict(sentence: str) -> UserError:
    """Return the error of settings that do not fit each other, whose `sentence` begins with its key."""
    return UserError(sentence, code="conflict", key=re.split(r"[^\w.]", sentence, maxsplit=1)[0])


def refused(check: Callable[[], object], key: str | None = None) -> Iterator[UserError]:
    """Yield the UserError of `check`; `key` replaces its key."""
    try:
        check()
    except UserError as problem:
        yield UserError(str(problem), code=problem.code, key=key or problem.key)


def token_of(key: str, variable: str | None) -> str | None:
    """Return the server's token in the environment variable that the setting `key` names; None without one.

    Raises UserError if the variable is not set, or its value cannot be sent in a header.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not (token and token.isascii() and token.isprintable()):
        fault = "has characters that are not printable ASCII" if token else "is not set"
        raise UserError(
            f"{key}={variable} names an environment variable that {fault} on {socket.gethostname()}: export the server's "
            f"token there as {variable}, or set {key} to null.",
            code="malformed" if token else "missing",
            key=key,
        )
    return token


_AS_REWARD = ("k1", "k2", "k3", "abs")


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Yield one error message per conflict."""
    algorithm = config.algorithm
    yield from _advantages(algorithm)
    yield from _loss(algorithm)
    yield from _llds(config)
    yield from _estimator(algorithm)
    yield from _kl_weight(config)
    yield from _reference(algorithm)
    yield from _teacher(config)
    yield from _adapters(config)
    yield from _old_logprobs(config)
    warmup, steps = config.critic.warmup_steps, config.trainer.steps
    if has_critic(algorithm) and warmup >= steps:
        yield f"critic.warmup_steps={warmup} leaves no step of trainer.steps={steps} for the policy: lower it."
    sampling = config.rollout.sampling
    if truncates_sampling(sampling) and algorithm.old_logprobs is not OldLogprobs.engine:
        yield (
            f"rollout.sampling.top_p={sampling.top_p} and top_k={sampling.top_k} draw from a truncated distribution, "
            "while log-probs of the trainer cover the whole vocabulary, so the probability mass that was cut off "
            "biases every ratio to the sampler: set top_p=1 and top_k=-1, or rollout.sampling.accept_truncation=true."
        )


def _advantages(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, drops = algorithm.advantage, algorithm.curation.drop_no_spread
    if not isinstance(advantage, ReturnsAdvantage):
        if drops and has_critic(algorithm):
            yield (
                "algorithm.curation.drop_no_spread drops groups of equal rewards, which still carry a signal with a "
                "critic: set it to false."
            )
        return
    baseline, scale, credit = advantage.baseline, advantage.scale, advantage.credit
    siblings = baseline in SIBLINGS
    if algorithm.n_samples == 1 and (siblings or scale is AdvantageScale.group):
        yield (
            f"algorithm.n_samples=1 leaves no other episode for algorithm.advantage.baseline={baseline} and "
            f"scale={scale} to compare with: set it to 2 or more, or choose baseline none or batch, or kind gae."
        )
    if scale is AdvantageScale.group and not siblings:
        yield (
            "algorithm.advantage.scale=group needs baseline=group or leave_one_out, and the baseline is "
            f"{baseline}: choose batch, whiten or none."
        )
    if credit is Credit.token and baseline is not AdvantageBaseline.none:
        yield (
            f"algorithm.advantage.credit=token gives every token a return of its own, for which baseline={baseline} has "
            "no counterpart in other episodes: choose credit turn or trajectory, or baseline none."
        )
    if advantage.gamma != 1.0 and credit is Credit.trajectory:
        yield (
            f"algorithm.advantage.gamma={advantage.gamma:g} discounts nothing with credit=trajectory, where every "
            "token is credited with all rewards: set gamma=1, or credit turn or token."
        )
    if drops and not siblings:
        yield (
            "algorithm.curation.drop_no_spread drops groups of equal rewards, which still carry a signal with "
            f"algorithm.advantage.baseline={baseline}: set it to false."
        )
    elif drops and algorithm.teacher.model is not None:
        yield (
            "algorithm.curation.drop_no_spread drops groups of equal rewards, from which the policy still learns what "
            f"algorithm.teacher.model={algorithm.teacher.model} does: set it to false."
        )


def _loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    fixed = algorithm.aggregation is Aggregation("fixed-length")
    if algorithm.loss_length is not None and not fixed:
        yield (
            f"algorithm.loss_length={algorithm.loss_length} is read with algorithm.aggregation=fixed-length, not "
            f"{algorithm.aggregation}: set it to null."
        )
    correction = algorithm.correction
    corrects = correction.kind is not CorrectionKind.none
    if corrects and algorithm.old_logprobs is not OldLogprobs.recompute:
        yield (
            f"algorithm.correction.kind={correction.kind} compares recomputed with sampled log-probs before training, "
            f"which algorithm.old_logprobs={algorithm.old_logprobs} does not have: set it to recompute, or "
            "correction.kind=none."
        )
    rejects = correction.kind is CorrectionKind.reject
    if corrects and correction.level is CorrectionLevel.geometric and not rejects:
        yield (
            f"algorithm.correction.level=geometric is a mean over the sequence, which is no importance weight, and "
            f"correction.kind={correction.kind} would weight by it: set kind=reject, or level token or sequence."
        )
    low = correction.low if rejects or correction.kind is CorrectionKind.mask else 0.0
    if corrects and not low <= 1 <= correction.high:
        yield (
            f"algorithm.correction.low={correction.low} and high={correction.high} must enclose 1, the ratio of "
            "equal policies: set low to at most 1 and high at least 1."
        )


def _llds(config: RunConfig) -> Iterator[str]:
    coef, updates = config.algorithm.llds.coef, config.trainer.mini_batches
    if coef and updates == 1 and not max_staleness(config):
        yield (
            f"algorithm.llds.coef={coef:g} penalises log-probs that earlier updates of a step have lowered, and "
            f"trainer.mini_batches={updates} leaves none: set trainer.mini_batches to 2 or more, or coef to 0."
        )


def _estimator(algorithm: AlgorithmConfig) -> Iterator[str]:
    estimator = algorithm.kl_estimator
    place = algorithm.kl_in if algorithm.kl_coef else None
    if place is KlPlace.loss and estimator.kind == "k1":
        yield (
            "algorithm.kl_estimator.kind=k1 as a loss has a gradient that is zero on average, so it does not restrain the "
            "policy: choose k2, k3, k3++, k4 or k5, or algorithm.kl_in=reward."
        )
    if place is KlPlace.advantage and estimator.kind != "k1" and not isinstance(estimator, CustomKl):
        yield (
            f"algorithm.kl_estimator.kind={estimator.kind} as an advantage does not move the policy along the KL's "
            "gradient: with algorithm.kl_in=advantage choose k1."
        )
    if place is KlPlace.reward and estimator.kind not in _AS_REWARD and not isinstance(estimator, CustomKl):
        reason = (
            "needs whole distributions, which a reward does not have"
            if isinstance(estimator, FullKl)
            else "differs from the plain estimators by its gradient, and a reward has none"
        )
        yield (
            f"algorithm.kl_estimator.kind={estimator.kind} {reason}: with algorithm.kl_in=reward choose "
            f"{', '.join(_AS_REWARD)}."
        )
    if not isinstance(estimator, FullKl):
        return
    picks = estimator.topk_tokens
    if algorithm.use_kl_iw and (picks is None or not estimator.use_tail_sampling):
        yield (
            "algorithm.use_kl_iw=true weights the sampled part of the KL term, which is empty with kl_estimator.topk_tokens="
            f"{picks} and use_tail_sampling={str(estimator.use_tail_sampling).lower()}: set it to false."
        )
    for key, value, default in (
        ("topk_tail", estimator.topk_tail, KlTail.exact),
        ("use_tail_sampling", estimator.use_tail_sampling, True),
    ):
        if value != default and picks is None:
            yield (
                f"algorithm.kl_estimator.{key}={str(value).lower()} concerns tokens outside of the top k, but "
                f"topk_tokens is null: set it to {str(default).lower()}, or give topk_tokens."
            )


def _kl_weight(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    in_loss, in_reward = algorithm.kl_in is KlPlace.loss, algorithm.kl_in is KlPlace.reward
    if algorithm.kl_control is KlControl.adaptive and (not in_reward or algorithm.kl_coef == 0):
        yield (
            f"algorithm.kl_control=adaptive moves the weight of a KL term in the reward, but kl_in is "
            f"{algorithm.kl_in} and kl_coef {algorithm.kl_coef:g}: set kl_in=reward and kl_coef above 0, or kl_control=fixed."
        )
    episodes = config.trainer.prompts_per_step * algorithm.n_samples
    if algorithm.kl_control is KlControl.adaptive and algorithm.kl_horizon <= episodes / 5:
        yield (
            f"algorithm.kl_horizon={algorithm.kl_horizon} is no more than a fifth of a step's {episodes} episodes, so "
            "one step could turn the weight of the KL term negative: raise it."
        )
    low, high = algorithm.kl_iw_clip_lower, algorithm.kl_iw_clip_upper
    if algorithm.use_kl_iw and (not in_loss or algorithm.kl_coef == 0):
        yield (
            f"algorithm.use_kl_iw weights a KL term in the loss, but kl_in is {algorithm.kl_in} and kl_coef "
            f"{algorithm.kl_coef:g}: set it to false."
        )
    if not algorithm.use_kl_iw and (low is not None or high is not None):
        yield (
            f"algorithm.kl_iw_clip_lower={low} and kl_iw_clip_upper={high} bound a weight that is not used: set "
            "algorithm.use_kl_iw=true, or both to null."
        )
    if (low is not None and low > 1) or (high is not None and high < 1):
        yield (
            f"algorithm.kl_iw_clip_lower={low} and kl_iw_clip_upper={high} must enclose 1, the weight of an "
            "on-policy token: set lower to at most 1 and upper to at least 1."
        )


def _old_logprobs(config: RunConfig) -> Iterator[str]:
    algorithm, source = config.algorithm, config.algorithm.old_logprobs
    if source is OldLogprobs.recompute:
        return
    full = full_kl(algorithm)
    if full is not None and full.kind == "full_reverse" and full.topk_tokens is not None:
        yield (
            f"algorithm.kl_estimator.topk_tokens={full.topk_tokens} with full_reverse needs the policy's most likely "
            f"tokens before training, which algorithm.old_logprobs={source} does not compute: set it to recompute."
        )
    if source is OldLogprobs.engine:
        return
    reasons = {
        f"trainer.mini_batches={config.trainer.mini_batches}": config.trainer.mini_batches > 1,
        f"trainer.schedule.max_staleness={max_staleness(config)}": max_staleness(config) > 0,
        f"algorithm.kl_in={algorithm.kl_in}": algorithm.kl_coef > 0 and algorithm.kl_in is not KlPlace.loss,
        f"critic.warmup_steps={config.critic.warmup_steps}": has_critic(algorithm) and config.critic.warmup_steps > 0,
    }
    needs = {
        "trainer": "with several updates, or older policies, the ratio is not 1",
        "algorithm": "this place of the KL term needs log-probs before training",
        "critic": "the actor computes nothing during the critic's warm-up",
    }
    for setting, contradicts in reasons.items():
        if contradicts:
            yield (
                f"algorithm.old_logprobs=actor contradicts {setting}: {needs[setting.partition('.')[0]]}. "
                "Set algorithm.old_logprobs=recompute."
            )


def _reference(algorithm: AlgorithmConfig) -> Iterator[str]:
    moves = moves_reference(algorithm)
    if algorithm.teacher.model is not None:
        if moves:
            yield (
                f"algorithm.ref_policy_ema_tau={algorithm.ref_policy_ema_tau:g} and ref_policy_reset_period="
                f"{algorithm.ref_policy_reset_period} move the reference policy, whose place algorithm.teacher.model="
                f"{algorithm.teacher.model} takes: set them to 1 and null, or the teacher to null."
            )
        if algorithm.eval_ref_policy:
            yield (
                "algorithm.eval_ref_policy=true evaluates a reference policy, whose place algorithm.teacher.model="
                f"{algorithm.teacher.model} takes: set it to false, and evaluate the teacher with `rlsys eval`."
            )
        return
    if moves and not has_reference(algorithm):
        yield (
            f"algorithm.ref_policy_ema_tau={algorithm.ref_policy_ema_tau:g} and ref_policy_reset_period="
            f"{algorithm.ref_policy_reset_period} move a reference policy that nothing uses with kl_coef=0: give "
            "kl_coef, or set them to 1 and null."
        )
    if algorithm.eval_ref_policy and not moves:
        yield (
            "algorithm.eval_ref_policy=true would repeat the evaluation before the first step, because the "
            "reference never changes: set it to false, or move the reference with ref_policy_ema_tau."
        )


def _teacher(config: RunConfig) -> Iterator[str]:
    algorithm, model = config.algorithm, config.algorithm.teacher.model
    if model is None:
        if algorithm.kl_in is KlPlace.advantage and algorithm.kl_coef:
            yield (
                "algorithm.kl_in=advantage distils a teacher, but algorithm.teacher.model is null: give a folder or an "
                "address, or model.path to hold the policy at its start."
            )
        return
    if algorithm.kl_coef == 0:
        yield f"algorithm.teacher.model={model} is not used with algorithm.kl_coef=0: raise kl_coef, or set it to null."
    if not asks_teacher(algorithm):
        return
    full, temperature = full_kl(algorithm), config.rollout.sampling.temperature
    if full is not None:
        yield (
            f"algorithm.kl_estimator.kind={full.kind} compares distributions, and a server returns log-probs of sampled "
            f"tokens alone: choose another estimator, or a folder as algorithm.teacher.model instead of {model}."
        )
    if temperature != 1:
        yield (
            f"rollout.sampling.temperature={temperature:g} divides the policy's logits, but not those behind "
            f"algorithm.teacher.model={model}: set it to 1, or give the teacher's folder."
        )


def _adapters(config: RunConfig) -> Iterator[str]:
    algorithm, rank = config.algorithm, config.model.lora.rank
    if rank and algorithm.teacher.model is None and has_reference(algorithm) and moves_reference(algorithm):
        yield (
            f"model.lora.rank={rank} makes the frozen model the reference policy, but algorithm.ref_policy_ema_tau="
            f"{algorithm.ref_policy_ema_tau:g} and ref_policy_reset_period={algorithm.ref_policy_reset_period} move the "
            "reference: set them to 1 and null, or model.lora.rank=0."
        )
