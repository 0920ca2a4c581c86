"""Tests of the metrics of a step, with values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlsys.config.algorithm import CorrectionConfig, CorrectionKind
from rlsys.config.schema import SourceConfig, TaskConfig
from rlsys.data.trajectory import Action, Finish, Group, Sample, Trajectory, Turn
from rlsys.orchestrator.pipeline.step_metrics import (
    answer_metrics,
    correction_metrics,
    critic_metrics,
    divergence_metrics,
    group_metrics,
    reward_metrics,
    source_metrics,
    staleness_metrics,
    step_metrics,
)
from tests.support.trajectories import question, rewarded, trajectory

SEARCH = Turn("a", Action.SEARCH, "q", "found", 6, 10, 4, 0.1, 0.5)
FAILED = Turn("b", Action.SEARCH, "q", "failed", 2, 20, 16, 0.1, 1.5, tool_error="timeout")
INVALID = Turn("c", Action.INVALID, "", "no", 3, 30, 10, 0.1, 0.0)
ANSWER = Turn("d", Action.ANSWER, "Yes!", "", 1, 40, 0, 0.1, 0.0)


def sample(one: Trajectory, reward: float, advantage: float = 0.0, **more: Any) -> Sample:
    """Return a sample whose trained tokens have one advantage; untrained ones have 99, which must not count."""
    advantages = np.where(one.loss_mask, np.float32(advantage), np.float32(99.0))
    parts: Mapping[str, float] = more.pop("parts", {})
    return Sample(one, reward, (reward,), parts, advantages, **more)


RIGHT = trajectory(range(10), turns=[SEARCH, FAILED, ANSWER], rollout_logprobs=[np.nan] + [-1.0] * 9)
WRONG = trajectory(range(4), turns=[INVALID], finish=Finish.TURN_LIMIT, tokens_differing=2)
CUT = replace(WRONG, prompt_length=2, loss_mask=np.array([False, False, True, True]), finish=Finish.TOKEN_LIMIT)
OLD = np.array([0.0] + [-1.0] * 8 + [-1.25], dtype=np.float32)
GROUPS = [
    Group(
        question(1),
        (
            sample(RIGHT, 2.0, 0.5, old_logprobs=OLD, parts={"f1": 1.0, "search_penalty": 2.0}),
            # Retokenization has changed the tokens of this sample, so no log-probs are compared.
            sample(WRONG, 0.0, -0.25, old_logprobs=np.full(4, -9.0, dtype=np.float32), parts={"f1": 0.5}),
        ),
    ),
    Group(question(2), (sample(CUT, 0.0), sample(replace(WRONG, finish=Finish.ABORTED), 0.0))),
]


def figures_of(groups: Sequence[Group], version: int = 0) -> dict[str, float]:
    """Return the metrics of a step without a KL in the reward."""
    return step_metrics(groups, version, CorrectionConfig(), TaskConfig())


def test_every_metric_has_the_value_worked_out_by_hand() -> None:
    assert figures_of(GROUPS) == {
        "critic/score/mean": 0.5,
        "critic/score/max": 2.0,
        "critic/score/min": 0.0,
        "reward/exact_match": 0.25,
        "reward/term/f1": 0.75,
        "reward/term/search_penalty": 2.0,
        "critic/advantages/mean": pytest.approx((9 * 0.5 - 3 * 0.25) / 17),
        "critic/advantages/max": 0.5,
        "critic/advantages/min": -0.25,
        "critic/advantages/std": pytest.approx(
            math.sqrt((9 * 0.25 + 3 * 0.0625) / 17 - ((9 * 0.5 - 3 * 0.25) / 17) ** 2)
        ),
        "critic/advantages/zero_share": 5 / 17,
        "group/without_spread": 0.5,
        "group/distinct_answers": 1.0,
        "group/distinct_responses": 1.0,
        "answers/many_share": 0.0,
        "answers/same_share": 0.0,
        "env/number_of_actions/mean": 6 / 4,
        "env/number_of_actions/max": 3,
        "env/number_of_actions/min": 1,
        "env/number_of_valid_action": 3 / 4,
        "env/ratio_of_valid_action": 1 / 4,
        "env/number_of_valid_search": 2 / 4,
        "env/finish_ratio": 1 / 4,
        "rollout/episodes": 4,
        "rollout/generated_tokens": 6 + 2 + 1 + 3 * 3,
        "rollout/search_errors": 1,
        "rollout/search_s_mean": 1.0,
        "rollout/aborted": 1,
        "rollout/cached_prompt_share": pytest.approx((4 + 16 + 0 + 3 * 10) / (10 + 20 + 40 + 3 * 30)),
        "prompt_length/mean": 5 / 4,
        "prompt_length/max": 2,
        "prompt_length/min": 1,
        "response_length/mean": (9 + 3 + 2 + 3) / 4,
        "response_length/max": 9,
        "response_length/min": 2,
        "response_length/clip_ratio": 1 / 4,
        "state_tokens/total": 17,
        "state_tokens/coverage": 1.0,
        "state_tokens/coverage_with_prompt": 17 / 22,
        "tokens/differing": 6,
        "tokens/differing_share": pytest.approx(6 / 17),
        "logprob/max_diff": 0.25,
        "staleness/lag_0": 1.0,
        "staleness/max": 0,
        "staleness/mean": 0.0,
        "staleness/unversioned_tokens": 0,
    }


def test_episode_without_a_turn_has_finite_metrics() -> None:
    empty = trajectory([1], [False], finish=Finish.ABORTED)
    figures = figures_of([Group(question(1), (sample(empty, 0.0),))])
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["env/number_of_actions/max"] == figures["env/ratio_of_valid_action"] == 0
    assert figures["state_tokens/coverage"] == 0
    assert "critic/advantages/mean" not in figures, "no trained token has an advantage"


@pytest.mark.parametrize(
    ("texts", "many"),
    [
        (["<answer>a</answer>"], False),
        (["<answer> or <answer>a</answer>"], True),
        (["a</answer>", "b</answer>"], True),
        (["<reply>a</reply><reply>b</reply>"], False),
    ],
)
def test_answers_are_counted_by_tags_that_the_policy_wrote(texts: Sequence[str], many: bool) -> None:
    page = "<information><answer>x</answer><answer>y</answer></information>"
    turns = [replace(SEARCH, text=text, observation=page) for text in texts]
    groups = [Group(question(1), (sample(trajectory(turns=turns), 0.0),))]
    assert answer_metrics(groups, "answer")["answers/many_share"] == float(many)
    assert answer_metrics(groups, "reply")["answers/many_share"] == float("<reply>" in "".join(texts))


def test_metrics_of_a_source_are_those_of_its_groups() -> None:
    """Worked out by hand: `wiki` passes by exact match, `sums` from a reward of 0.5; nothing of `none` was trained."""
    sources = {"wiki": SourceConfig(), "sums": SourceConfig(pass_reward=0.5), "none": SourceConfig()}
    of_wiki = Group(
        replace(question(1), source="wiki"),
        (sample(trajectory(range(5), turns=[ANSWER]), 0.0), sample(trajectory(range(3)), 1.0)),
    )
    of_sums = [
        Group(replace(question(number), source="sums"), (sample(trajectory(range(2), turns=[ANSWER]), reward),))
        for number, reward in ((2, 0.5), (3, 0.25))
    ]
    assert source_metrics([of_wiki, *of_sums], TaskConfig(sources=sources)) == {
        "sources/wiki/groups": 1,
        "sources/wiki/reward": 0.5,
        "sources/wiki/pass_rate": 0.5,
        "sources/wiki/response_tokens": 3.0,
        "sources/sums/groups": 2,
        "sources/sums/reward": 0.375,
        "sources/sums/pass_rate": 0.5,
        "sources/sums/response_tokens": 1.0,
        "sources/none/groups": 0,
    }


def with_versions(versions: Sequence[int], mask: Sequence[bool] | None = None) -> Sample:
    """Return a sample of tokens with these versions; by default all tokens but the first are trained."""
    one = trajectory(range(len(versions)), mask)
    return sample(replace(one, versions=np.array(versions, dtype=np.int32)), 0.0)


def test_staleness_counts_trained_tokens_alone() -> None:
    groups = [
        # This episode continued through an update, and ends with a token that was not sampled but added.
        Group(question(1), (with_versions([-1, 5, 5, 7, -1]),)),
        # The versions of untrained tokens do not count.
        Group(question(2), (with_versions([-1, 2, 7, 4], [False, False, True, True]),)),
    ]
    assert staleness_metrics(groups, version=7) == {
        "staleness/lag_0": 2 / 5,
        "staleness/lag_1": 0,
        "staleness/lag_2": 2 / 5,
        "staleness/lag_3": 1 / 5,
        "staleness/max": 3,
        "staleness/mean": pytest.approx((0 + 2 + 2 + 0 + 3) / 5),
        "staleness/unversioned_tokens": 1,
    }


def test_log_probs_are_compared_only_for_tokens_of_the_scoring_version() -> None:
    late = replace(RIGHT, versions=np.array([-1] + [3] * 5 + [4] * 4, dtype=np.int32))
    old = np.array([0.0] + [-1.5] * 5 + [-1.0] * 3 + [-1.25], dtype=np.float32)
    groups = [Group(question(1), (sample(late, 1.0, old_logprobs=old),))]
    assert figures_of(groups, version=4)["logprob/max_diff"] == 0.25
    assert figures_of(groups, version=5)["logprob/max_diff"] == 0.0


def with_arrays(mask: Sequence[bool], **arrays: Sequence[float]) -> Sample:
    """Return a sample with these per-token arrays."""
    one = rewarded(trajectory(range(len(mask)), mask), 0.0)
    return replace(one, **{name: np.array(found, dtype=np.float32) for name, found in arrays.items()})


def test_divergences_are_means_over_trained_tokens() -> None:
    nan, twice = float("nan"), math.log(2)
    samples = [
        with_arrays([False, True, True], old_logprobs=[nan, -1, -2], ref_logprobs=[nan, -1 + twice, -2 + twice]),
        with_arrays([False, True, False], old_logprobs=[0, -3, nan], ref_logprobs=[0, -3, nan]),
        with_arrays([False, True], old_logprobs=[0, -3]),
    ]
    metrics = divergence_metrics(samples)
    assert metrics.keys() == {"kl/k1", "kl/k2", "kl/k3", "kl/k5", "kl/abs"}
    assert (metrics["kl/k1"], metrics["kl/abs"]) == pytest.approx((-2 * twice / 3, 2 * twice / 3), rel=1e-6)
    assert divergence_metrics(samples[2:]) == {}, "there is no reference policy"


def test_values_and_returns_are_compared_over_trained_tokens() -> None:
    metrics = critic_metrics([with_arrays([False, True, True, True], values=[70, 3, 2, 1], returns=[-70, 1, 2, 6])])
    for name, expected in (("values", [3, 1, 2]), ("returns", [6, 1, 3])):
        assert [metrics[f"critic/{name}/{kind}"] for kind in ("max", "min", "mean")] == expected
    # The variance of the errors -2, 0, 5 over the variance of the returns.
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - np.var([-2, 0, 5]) / np.var([1, 2, 6]))


def test_answers_are_compared_normalised_within_and_across_questions() -> None:
    def answered(number: int, *answers: str) -> Group:
        turns = [replace(ANSWER, content=answer) for answer in answers]
        return Group(question(number), tuple(sample(trajectory(turns=[turn]), 0.0) for turn in turns))

    groups = [answered(1, "Paris", "paris!", "Rome"), answered(2, "Rome", "x", "x")]
    assert answer_metrics(groups, "answer")["answers/same_share"] == 2 / 6, "Paris and x are of one question alone"
    found = group_metrics(groups)
    assert (found["group/distinct_answers"], found["group/distinct_responses"]) == pytest.approx((2 / 3, 1 / 3))


def test_kl_in_the_reward_is_subtracted_beside_the_score() -> None:
    one = rewarded(trajectory(range(3)), 1.0)
    group = Group(question(1), (replace(one, kl_sum=3.0, kl_coef=0.1), replace(one, kl_sum=-2.0, kl_coef=0.2)))
    found = reward_metrics([group])
    assert found["critic/score/mean"] == 1.0
    assert (found["critic/rewards/min"], found["critic/rewards/max"]) == pytest.approx((1 - 0.1 * 3, 1 + 0.2 * 2))
    assert (found["critic/kl"], found["critic/kl_coef"]) == pytest.approx(((3 / 2 - 2 / 2) / 2, 0.15))


def test_correction_metrics_are_those_of_the_weights() -> None:
    config = CorrectionConfig(CorrectionKind.truncate, high=2.0)
    old, drawn = np.log(np.float32([1, 0.6, 0.6])), np.log(np.float32([1, 0.4, 0.2]))
    one = with_arrays([False, True, True], old_logprobs=old, weights=np.minimum(np.exp(old - drawn), 2))
    one = replace(one, trajectory=replace(one.trajectory, rollout_logprobs=drawn))
    found = correction_metrics([Group(question(1), (one,))], config)
    names = ("ess", "clipped_share", "cut_mass", "uncorrected_share")
    expected = [3.5**2 / (2 * 6.25), 1 / 2, 1 / 4.5, 0.0]
    assert [found[f"correction/{name}"] for name in names] == pytest.approx(expected, rel=1e-5)


def test_tools_are_counted_by_name_apart_from_searches() -> None:
    turns = [replace(one, action=Action.TOOL, tool="sum", tool_s=s) for one, s in ((SEARCH, 0.25), (FAILED, 0.75))]
    group = Group(question(1), (sample(trajectory(turns=[*turns, SEARCH]), 0.0), sample(trajectory(), 0.0)))
    found = figures_of([group])
    assert [found[f"tool/sum/{name}"] for name in ("calls", "errors", "s_mean")] == [2 / 2, 1, 0.5]
    assert found["rollout/search_errors"] == 0
