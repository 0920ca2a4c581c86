"""Computes the metrics of a step from its trained groups. Pure.

Metrics that do not apply are left out: values without a critic, divergences without a reference policy. Names follow
Search-R1 and veRL, so `critic/score`, `critic/rewards` and `critic/advantages` exist without a critic too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rlsys.algorithms.corrections import CorrectionStats, measure
from rlsys.algorithms.kl import DISTINCT, SAMPLED
from rlsys.algorithms.losses import explained_variance
from rlsys.config.algorithm import CorrectionConfig
from rlsys.config.schema import RunConfig, TaskConfig
from rlsys.data.answers import normalize, passes, score
from rlsys.data.trajectory import Action, Finish, Group, Sample, Trajectory, Turn
from rlsys.observe.metrics import Metric
from rlsys.orchestrator.pipeline.grouping import mean_kl
from rlsys.orchestrator.rewards.reward import count_answer_tags
from rlsys.weights.flops import Flops

REWARD_METRICS = (
    Metric("critic/score/{mean,max,min}", "reward", "rewards of the step's episodes", "S, R `rollout/reward_scores`"),
    Metric("critic/rewards/{mean,max,min}", "reward", "rewards minus the KL term, if `algorithm.kl_in` is reward", "S"),
    Metric("reward/exact_match", "share", "episodes whose answer matches exactly, whatever the reward is"),
    Metric("reward/term/<term>", "reward", "mean of a reward term, without its weight"),
)
ADVANTAGE_METRICS = (
    Metric("critic/advantages/{mean,max,min}", "1", "advantages of trained tokens", "S"),
    Metric("critic/advantages/std", "1", "standard deviation of the advantages of trained tokens"),
    Metric("critic/advantages/zero_share", "share", "trained tokens with advantage 0, which give no learning signal"),
    Metric("critic/returns/{mean,max,min}", "reward", "returns, which the critic learns, over trained tokens", "S"),
    Metric("critic/values/{mean,max,min}", "reward", "the critic's values before the step's updates", "S"),
    Metric(
        "critic/vf_explained_var", "1", "1 - Var(returns - values) / Var(returns); null if returns do not vary", "S"
    ),
    Metric(
        "kl/k1 kl/k2 kl/k3 kl/abs",
        "nats a token",
        "divergence of the policy from the reference, or the teacher in its place, before the step's updates, by each "
        "[estimator](algorithms.md)",
    ),
    Metric(
        "kl/k5",
        "nats a token",
        "divergence of the reference from the policy; a single token can dominate it, because its value has no clamp",
    ),
    Metric(
        "critic/kl",
        "nats a token",
        "the KL subtracted from rewards, averaged over episodes, not tokens; `kl_control=adaptive` adjusts "
        "`critic/kl_coef` by this value",
        "S",
    ),
    Metric("critic/kl_coef", "1", "weight of the KL term in the reward", "S `critic/kl_coeff`"),
    Metric(
        "group/without_spread",
        "share",
        "groups whose answers all [earned the same reward](pipeline.md#the-life-of-a-group)",
    ),
    Metric("group/distinct_answers", "share", "distinct answers among the answers of a group, mean over groups"),
    Metric("group/distinct_responses", "share", "distinct responses among those of a group, compared token by token"),
)
DISTILLATION_METRICS = (
    Metric(
        "distillation/reverse_kl/{mean,max,min}",
        "nats a token",
        "log policy - log teacher of the trained tokens that the policy sampled: its mean is the reverse KL",
    ),
    Metric("distillation/teacher_logprob", "nats a token", "mean log-prob that the teacher gives to sampled tokens"),
    Metric(
        "distillation/preferred_share", "share", "sampled tokens that are more likely under the teacher than the policy"
    ),
)
EPISODE_METRICS = (
    Metric("env/number_of_actions/{mean,max,min}", "count", "turns per episode", "S"),
    Metric(
        "env/number_of_valid_action",
        "count",
        "turns per episode that searched, called a tool or answered, mean",
        "S",
    ),
    Metric("env/ratio_of_valid_action", "share", "valid actions, as a share of the episode's turns", "S"),
    Metric(
        "env/number_of_valid_search",
        "count",
        "searches carried out per episode, mean",
        "S, which also counts a search that came too late to be carried out",
    ),
    Metric(
        "env/finish_ratio",
        "share",
        "episodes that ended with an answer",
        "S, R `rollout/fraction_of_samples_properly_ended`",
    ),
    Metric("answers/many_share", "share", "episodes with more than one opening or more than one closing answer tag"),
    Metric(
        "answers/same_share",
        "share",
        "episodes with the most frequent answer, among answers given to at least two questions",
    ),
    Metric("prompt_length/{mean,max,min}", "tokens", "length of prompts", "S, R `rollout/prompt_length`"),
    Metric(
        "response_length/{mean,max,min}",
        "tokens",
        "length of everything after the prompt, observations included",
        "S, R `rollout/response_length`",
    ),
    Metric("response_length/clip_ratio", "share", "episodes that reached the token limit", "S"),
    Metric("state_tokens/total", "tokens", "trained tokens", "S"),
    Metric("state_tokens/coverage", "share", "trained tokens among response tokens", "S"),
    Metric("state_tokens/coverage_with_prompt", "share", "trained tokens among all tokens"),
    Metric("rollout/episodes", "count", "episodes trained in this step"),
    Metric("rollout/aborted", "count", "trained episodes that were aborted"),
    Metric("rollout/generated_tokens", "tokens", "tokens that the engines generated for these episodes"),
    Metric("rollout/cached_prompt_share", "share", "tokens sent to the engines that were in their prefix caches"),
    Metric("rollout/search_errors", "count", "failed searches"),
    Metric("rollout/search_s_mean", "s", "mean time of a search"),
    Metric(
        "tool/<tool>/calls",
        "count",
        "calls of a tool in `task.tools` per episode, mean; only for tools that were called in the step",
    ),
    Metric("tool/<tool>/errors", "count", "calls of the tool that failed or timed out"),
    Metric("tool/<tool>/s_mean", "s", "mean time of a call of the tool"),
    Metric(
        "gateway/branches/{mean,max,min}",
        "count",
        "[branches](gateway.md#branches) per episode; only with `task.agent=gateway`",
    ),
    Metric("gateway/tokens/<cause>", "tokens", "trained tokens of the branches that began for this cause"),
)
SOURCE_METRICS = (
    Metric("sources/<source>/groups", "groups", "trained prompt groups of a source in `task.sources`"),
    Metric("sources/<source>/reward", "reward", "mean reward of their episodes"),
    Metric("sources/<source>/pass_rate", "share", "episodes of theirs that [passed](how-to/sources.md#curriculum)"),
    Metric("sources/<source>/response_tokens", "tokens", "mean length after the prompt, observations included"),
    Metric("sources/<source>/share", "share", "share of the source in new prompts, under `task.curriculum`"),
)
TOKEN_METRICS = (
    Metric("staleness/lag_<k>", "share", "trained tokens with staleness k"),
    Metric("staleness/max staleness/mean", "versions", "staleness of trained tokens"),
    Metric(
        "staleness/unversioned_tokens",
        "tokens",
        "trained tokens that were not sampled, such as an added end of sequence",
    ),
    Metric("correction/ess", "share", "effective sample size of the correction weights"),
    Metric("correction/clipped_share", "share", "tokens whose weight was truncated, or which were dropped"),
    Metric("correction/cut_mass", "share", "importance mass lost by truncating or dropping"),
    Metric("correction/uncorrected_share", "share", "trained tokens without an engine log-prob"),
    Metric("correction/abs_log_ratio", "nats a token", "mean absolute difference between old and engine log-probs"),
    Metric(
        "correction/kl_k1 correction/kl_k3",
        "nats a token",
        "divergence between the sampling policy and the policy before the update",
    ),
    Metric(
        "logprob/max_diff",
        "nats",
        "largest difference between old and engine log-probs, over tokens sampled by the version being trained; "
        "trajectories with re-tokenised tokens are left out",
    ),
    Metric(
        "tokens/differing",
        "tokens",
        "trained tokens that differ from the sampled ones ([re-tokenisation](token-modes.md))",
    ),
    Metric("tokens/differing_share", "share", "trained tokens that differ from the sampled ones"),
)


def step_metrics(
    groups: Sequence[Group], version: int, correction: CorrectionConfig, task: TaskConfig
) -> dict[str, float]:
    """Return all metrics of a step's groups by name.

    `version` is the weight version that was trained. Requires at least one group; every group must have a sample.
    """
    samples = _samples(groups)
    trajectories = [sample.trajectory for sample in samples]
    return {
        **reward_metrics(groups),
        **advantage_metrics(samples),
        **critic_metrics(samples),
        **divergence_metrics(samples),
        **group_metrics(groups),
        **answer_metrics(groups, task.tags.answer),
        **source_metrics(groups, task),
        **_episode_metrics(trajectories),
        **_tool_metrics(trajectories),
        **_branch_metrics(trajectories),
        **_token_metrics(trajectories),
        "logprob/max_diff": max((_logprob_difference(sample, version) for sample in samples), default=0.0),
        **staleness_metrics(groups, version),
        **correction_metrics(groups, correction),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return statistics of episode rewards, the mean of each reward term, and exact match, even if it is not a term.

    With a KL term in the reward, `critic/kl` is `mean_kl`, `critic/kl_coef` is the coefficient of the term, and
    `critic/rewards` are the rewards less the KL penalty.
    """
    samples = _samples(groups)
    terms = sorted({term for sample in samples for term in sample.parts})
    lowered = [sample for sample in samples if sample.kl_sum is not None]
    left = [sample.reward - sample.kl_coef * (sample.kl_sum or 0.0) for sample in lowered]
    kl = mean_kl(groups)
    return {
        **_extremes("critic/score", [sample.reward for sample in samples]),
        **_extremes("critic/rewards", left),
        **({} if kl is None else {"critic/kl": kl, "critic/kl_coef": fmean(sample.kl_coef for sample in lowered)}),
        "reward/exact_match": fmean(
            score(sample.trajectory, group.question) for group in groups for sample in group.samples
        ),
        **{
            f"reward/term/{term}": fmean(sample.parts[term] for sample in samples if term in sample.parts)
            for term in terms
        },
    }


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of advantages over all trained tokens; empty without trained tokens.

    `zero_share` is the share of tokens without a learning signal.
    """
    (advantages,) = _trained(samples, "advantages")
    if not advantages.size:
        return {}
    return {
        **_extremes("critic/advantages", advantages),
        "critic/advantages/std": float(advantages.std()),
        "critic/advantages/zero_share": float((advantages == 0).mean()),
    }


def critic_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of returns and values over trained tokens, and the explained variance; empty without a critic.

    Values are from before the step's updates.
    """
    values, returns = _trained(samples, "values", "returns")
    if not values.size:
        return {}
    return {
        **_extremes("critic/returns", returns),
        **_extremes("critic/values", values),
        "critic/vf_explained_var": explained_variance(values, returns),
    }


def divergence_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return KL(policy || reference) in nats per trained token by each estimator; empty without a reference policy.

    k5 estimates KL(reference || policy). The policy is the one from before the step's updates (`old_logprobs`).
    Estimators that give equal values appear once: k4 equals k1 here, and k3++ equals k3.
    """
    old, reference = map(torch.from_numpy, _trained(samples, "old_logprobs", "ref_logprobs"))
    return {f"kl/{name}": float(SAMPLED[name](old, reference).mean()) for name in DISTINCT} if len(old) else {}


def distillation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return what the teacher says of the step's sampled tokens, in nats; empty without its log-probs.

    `reverse_kl` is log policy - log teacher of a token, with the policy from before the step's updates.
    """
    old, teacher = _trained(_samples(groups), "old_logprobs", "ref_logprobs", sampled=True)
    if not old.size:
        return {}
    return {
        **_extremes("distillation/reverse_kl", old - teacher),
        "distillation/teacher_logprob": float(teacher.mean()),
        "distillation/preferred_share": float((teacher > old).mean()),
    }


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the diversity within groups: for each measure, a share in [0, 1] per group, averaged over groups.

    Answers are compared after normalisation. Episodes without an answer, and groups without answers, are skipped.
    """
    answered = [answers for group in groups if (answers := _answers(group))]
    responses = [
        [one.tokens[one.prompt_length :].tobytes() for one in (sample.trajectory for sample in group.samples)]
        for group in groups
    ]
    return {
        "group/without_spread": fmean(not group.has_spread for group in groups),
        "group/distinct_responses": fmean(len(set(found)) / len(found) for found in responses),
        **({"group/distinct_answers": fmean(len(set(found)) / len(found) for found in answered)} if answered else {}),
    }


def answer_metrics(groups: Sequence[Group], tag: str) -> dict[str, float]:
    """Return signs of reward hacking, as shares of all episodes.

    `many_share` counts episodes with more than one opening or more than one closing `tag`. `same_share` is the share of
    episodes with the most frequent answer. Only answers given to at least two questions count, because episodes of one
    question may well agree.
    """
    given: Counter[str] = Counter()
    questions: Counter[str] = Counter()
    for answers in map(_answers, groups):
        given.update(answers)
        questions.update(set(answers))
    same = max((count for answer, count in given.items() if questions[answer] > 1), default=0)
    samples = _samples(groups)
    return {
        "answers/many_share": fmean(count_answer_tags(sample.trajectory.turns, tag) > 1 for sample in samples),
        "answers/same_share": same / len(samples),
    }


def source_metrics(groups: Sequence[Group], task: TaskConfig) -> dict[str, float]:
    """Return the metrics of each source's trained groups; only their number, 0, of a source without any."""
    found: dict[str, float] = {}
    for name, source in task.sources.items():
        own = [group for group in groups if group.question.source == name]
        found[f"sources/{name}/groups"] = len(own)
        if not own:
            continue
        samples = [(sample, group.question) for group in own for sample in group.samples]
        trajectories = [sample.trajectory for sample, _ in samples]
        found |= {
            f"sources/{name}/reward": fmean(sample.reward for sample, _ in samples),
            f"sources/{name}/pass_rate": fmean(passes(*one, source.pass_reward) for one in samples),
            f"sources/{name}/response_tokens": fmean(len(one.tokens) - one.prompt_length for one in trajectories),
        }
    return found


def _episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of the actions, searches, endings and generated tokens of episodes."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    searches = [turn for turn in turns if turn.action is Action.SEARCH]
    valid = [sum(turn.action is not Action.INVALID for turn in one.turns) for one in trajectories]
    acted = [(count, len(one.turns)) for count, one in zip(valid, trajectories, strict=True) if one.turns]
    return {
        **_extremes("env/number_of_actions", [len(one.turns) for one in trajectories]),
        "env/number_of_valid_action": fmean(valid),
        "env/ratio_of_valid_action": fmean([count / actions for count, actions in acted] or [0.0]),
        "env/number_of_valid_search": fmean(one.searches for one in trajectories),
        "env/finish_ratio": fmean(one.finish is Finish.ANSWER for one in trajectories),
        "rollout/episodes": len(trajectories),
        "rollout/aborted": sum(one.finish is Finish.ABORTED for one in trajectories),
        "rollout/search_errors": sum(bool(turn.tool_error) for turn in searches),
        "rollout/search_s_mean": fmean([turn.tool_s for turn in searches] or [0.0]),
        "rollout/generated_tokens": sum(turn.generated_tokens for turn in turns),
        "rollout/cached_prompt_share": sum(turn.cached_tokens for turn in turns)
        / max(1, sum(turn.prompt_tokens for turn in turns)),
    }


def _tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return calls per episode, failed calls and mean seconds of each tool that the policy called."""
    called: dict[str, list[Turn]] = defaultdict(list)
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        if turn.action is Action.TOOL and turn.observation:
            called[turn.tool].append(turn)
    metrics: dict[str, float] = {}
    for tool, calls in called.items():
        metrics |= {
            f"tool/{tool}/calls": len(calls) / len(trajectories),
            f"tool/{tool}/errors": sum(bool(turn.tool_error) for turn in calls),
            f"tool/{tool}/s_mean": fmean(turn.tool_s for turn in calls),
        }
    return metrics


def _branch_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return branches per episode, and trained tokens by the cause of their branch; empty without an agent of branches."""
    tokens: Counter[str] = Counter()
    for one in trajectories:
        starts = [branch.start for branch in one.branches]
        for branch, mask in zip(one.branches, np.split(one.loss_mask, starts[1:]), strict=True):
            tokens[branch.cause] += int(mask.sum())
    del tokens[""]
    if not tokens:
        return {}
    return {
        **_extremes("gateway/branches", [len(one.branches) for one in trajectories]),
        **{f"gateway/tokens/{cause}": count for cause, count in tokens.items()},
    }


def _token_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return token lengths, shares of trained tokens, and counts of tokens that re-tokenisation changed."""
    prompts = [one.prompt_length for one in trajectories]
    responses = [len(one.tokens) - one.prompt_length for one in trajectories]
    trained = sum(int(one.loss_mask.sum()) for one in trajectories)
    differing = sum(one.tokens_differing for one in trajectories)
    return {
        **_extremes("prompt_length", prompts),
        **_extremes("response_length", responses),
        "response_length/clip_ratio": fmean(one.finish is Finish.TOKEN_LIMIT for one in trajectories),
        "state_tokens/total": trained,
        "state_tokens/coverage": trained / max(1, sum(responses)),
        "state_tokens/coverage_with_prompt": trained / max(1, sum(prompts) + sum(responses)),
        "tokens/differing": differing,
        "tokens/differing_share": differing / max(1, trained),
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the staleness of trained tokens: the trained `version` minus the version that sampled the token.

    `lag_k` is the share of tokens with staleness k, for each k up to the maximum. Tokens that were not sampled have no
    version; only `unversioned_tokens` counts them. Raises ValueError if a token was sampled by a later version.
    """
    trajectories = [sample.trajectory for sample in _samples(groups)]
    versions = np.concatenate([one.versions[one.loss_mask] for one in trajectories])
    sampled = versions[versions >= 0]
    newest = int(sampled.max(initial=0))
    if newest > version:
        raise ValueError(f"A token of version {newest} cannot be trained on by version {version}: it is later.")
    counts = np.bincount(version - sampled, minlength=1)
    tokens = max(1, len(sampled))
    return {
        **{f"staleness/lag_{lag}": int(count) / tokens for lag, count in enumerate(counts)},
        "staleness/max": len(counts) - 1,
        "staleness/mean": int(counts @ np.arange(len(counts))) / tokens,
        "staleness/unversioned_tokens": len(versions) - len(sampled),
    }


def correction_metrics(groups: Sequence[Group], config: CorrectionConfig) -> dict[str, float]:
    """Return the effect of correction weights on the step's tokens; empty without weights.

    Covers all trained tokens of all samples with weights; `CorrectionStats` defines the metrics.
    """
    stats = [
        measure(old, sample.trajectory.rollout_logprobs, sample.trajectory.loss_mask, weights, config)
        for sample in _samples(groups)
        if (weights := sample.weights) is not None and (old := sample.old_logprobs) is not None
    ]
    if not stats:
        return {}
    total = sum(stats, start=CorrectionStats())
    return {
        "correction/ess": total.effective_share,
        "correction/clipped_share": total.cut_share,
        "correction/cut_mass": total.cut_mass,
        "correction/uncorrected_share": total.unknown_share,
        "correction/abs_log_ratio": total.abs_log_ratio,
        "correction/kl_k1": total.k1,
        "correction/kl_k3": total.k3,
    }


def training_flops(groups: Sequence[Group], cost: Flops, config: RunConfig) -> float:
    """Return the floating-point operations of one training pass on `groups`, without recomputed activations.

    Each product of the forward pass, of which `cost` is the cost, has a gradient for either factor in the backward pass.
    Under adapters the weights are frozen and have none, which leaves two gradients to attention alone.
    """
    every = [part.trajectory for sample in _samples(groups) for part in sample.by_branch()]
    sizes = [(len(one.tokens), int(one.loss_mask.sum())) for one in every]
    second = replace(cost, per_token=0.0, per_target=0.0) if config.model.lora.rank else cost
    return sum(2 * cost.of(*size) + second.of(*size) for size in sizes)


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _answers(group: Group) -> list[str]:
    """Return the normalised answers of the episodes with an answer."""
    return [normalize(answer) for sample in group.samples if (answer := sample.trajectory.answer) is not None]


def _extremes(name: str, values: ArrayLike) -> dict[str, float]:
    """Return `name`/mean, /max and /min of `values`; empty without values."""
    found = np.asarray(values, dtype=np.float64)
    if not found.size:
        return {}
    return {f"{name}/mean": float(found.mean()), f"{name}/max": float(found.max()), f"{name}/min": float(found.min())}


def _trained(samples: Sequence[Sample], *names: str, sampled: bool = False) -> list[NDArray[np.float64]]:
    """Return one float64 array [trained tokens] per attribute in `names`, over the samples that have all of them.

    With `sampled`, trained tokens that the policy did not sample are left out.
    """
    arrays: list[list[NDArray[np.float32]]] = [[np.empty(0, np.float32)] for _ in names]
    for sample in samples:
        found = [getattr(sample, name) for name in names]
        if all(array is not None for array in found):
            trained = sample.trajectory.loss_mask
            mask = trained & (sample.trajectory.versions >= 0) if sampled else trained
            for known, array in zip(arrays, found, strict=True):
                known.append(array[mask])
    return [np.concatenate(known).astype(np.float64) for known in arrays]


def _logprob_difference(sample: Sample, version: int) -> float:
    """Return the largest absolute difference between a sample's old and engine log-probs; 0 if none are comparable.

    Only tokens sampled by `version` are compared: older tokens may have been recomputed with other weights.
    """
    trajectory = sample.trajectory
    if trajectory.tokens_differing or sample.old_logprobs is None:
        return 0.0
    sampled = np.isfinite(trajectory.rollout_logprobs) & (trajectory.versions == version)
    comparable = trajectory.loss_mask & sampled
    if not comparable.any():
        return 0.0
    return float(np.abs(sample.old_logprobs - trajectory.rollout_logprobs)[comparable].max())
