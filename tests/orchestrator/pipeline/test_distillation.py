"""Tests of on-policy distillation on scored groups: advantages by hand, and what a teacher leaves as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rlsys.algorithms.kl import KlController
from rlsys.config.algorithm import (
    AdvantageBaseline,
    AdvantageScale,
    AlgorithmConfig,
    Credit,
    GaeAdvantage,
    KlPlace,
    ReturnsAdvantage,
    SampledKl,
    TeacherConfig,
)
from rlsys.data.trajectory import Floats, Group, Scores
from rlsys.orchestrator.pipeline.grouping import finish, over_mini_batch
from rlsys.orchestrator.pipeline.step_metrics import distillation_metrics
from tests.support.trajectories import question, rewarded, trajectory

UNSCALED = ReturnsAdvantage(scale=AdvantageScale.none)
OPD = AlgorithmConfig(
    advantage=UNSCALED,
    kl_coef=0.25,
    kl_in=KlPlace.advantage,
    kl_estimator=SampledKl("k1"),
    teacher=TeacherConfig("/models/teacher"),
)
PLAIN = replace(OPD, kl_coef=0.0)
POLICY, TEACHER = [-7.0, -1.0, -2.0, -9.0, -0.5], [-9.0, -3.0, -1.0, -7.0, -0.25]
"""Log-probs of five tokens; the first and the fourth are not trained."""
MASK = [False, True, True, False, True]


def row(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float32)


def group(teacher: list[float] = TEACHER, *, added_end: bool = False) -> Group:
    """A group of two episodes with the rewards 1 and 0; with `added_end`, their last token was not sampled."""
    one = trajectory(range(5), MASK)
    if added_end:
        one = replace(one, versions=np.array([-1, 0, 0, -1, -1], dtype=np.int32))
    scores = Scores(row(POLICY), row(teacher), values=row([0.0, 0.5, 0.25, 0.0, 0.125]))
    return Group(question(1), tuple(rewarded(one, reward).with_scores(scores) for reward in (1.0, 0.0)))


def advantages(config: AlgorithmConfig, given: Group) -> list[Floats]:
    return [sample.advantages for sample in finish(given, config, KlController(config.kl_coef)).samples]


def test_advantage_is_lowered_by_the_log_ratio_to_the_teacher_at_sampled_tokens() -> None:
    """log policy - log teacher is 2, -1 and -0.25, a quarter of which is subtracted from 1/2 and from -1/2."""
    first, second = advantages(OPD, group())
    assert_array_equal(first, row([0, 0.5 - 0.5, 0.5 + 0.25, 0, 0.5 + 0.0625]))
    assert_array_equal(second, row([0, -0.5 - 0.5, -0.5 + 0.25, 0, -0.5 + 0.0625]))
    first, second = advantages(OPD, group(added_end=True))
    assert_array_equal(first, row([0, 0, 0.75, 0, 0.5]))
    assert_array_equal(second, row([0, -1, -0.25, 0, -0.5]))


@pytest.mark.parametrize(
    "advantage",
    [
        ReturnsAdvantage(scale=AdvantageScale.whiten),
        ReturnsAdvantage(scale=AdvantageScale.batch),
        ReturnsAdvantage(credit=Credit.token, baseline=AdvantageBaseline.none, scale=AdvantageScale.whiten),
        GaeAdvantage(),
    ],
    ids=["whiten", "batch", "token", "gae"],
)
def test_no_baseline_or_scale_changes_the_teachers_part(advantage: ReturnsAdvantage | GaeAdvantage) -> None:
    """Nor do the targets of a critic have it: they are returns of the reward."""
    config, plain = (replace(one, advantage=advantage) for one in (OPD, PLAIN))
    coefficient = KlController(0.0)
    with_it, without = (over_mini_batch([finish(group(), one, coefficient)], one)[0] for one in (config, plain))
    part = 0.25 * (row(POLICY) - row(TEACHER)) * np.array(MASK)
    for taught, alone in zip(with_it.samples, without.samples, strict=True):
        assert_allclose(taught.advantages, alone.advantages - part, rtol=1e-6, atol=1e-6)
        assert (taught.returns is None) == (alone.returns is None)
        if taught.returns is not None and alone.returns is not None:
            assert_array_equal(taught.returns, alone.returns)


def test_teacher_that_is_the_policy_changes_no_bit() -> None:
    for taught, alone in zip(advantages(OPD, group(POLICY)), advantages(PLAIN, group(POLICY)), strict=True):
        assert_array_equal(taught, alone)
    figures = distillation_metrics([group(POLICY)])
    assert figures["distillation/reverse_kl/max"] == figures["distillation/reverse_kl/min"] == 0.0


def test_reward_that_is_nowhere_leaves_the_teacher_alone_to_learn_from() -> None:
    given = group()
    silent = replace(given, samples=tuple(replace(one, reward=0.0, turn_rewards=(0.0,)) for one in given.samples))
    for found in advantages(replace(OPD, advantage=ReturnsAdvantage(), kl_coef=1.0), silent):
        assert_array_equal(found, row([0, -2, 1, 0, 0.25]))


def test_metrics_are_over_sampled_tokens() -> None:
    """Not over the trained end of sequence that the second group's episodes were given."""
    figures = distillation_metrics([group(), group(added_end=True)])
    assert figures == pytest.approx(
        {
            "distillation/reverse_kl/mean": (2 - 1 - 0.25 + 2 - 1) / 5,
            "distillation/reverse_kl/max": 2.0,
            "distillation/reverse_kl/min": -1.0,
            "distillation/teacher_logprob": (-3 - 1 - 0.25 - 3 - 1) / 5,
            "distillation/preferred_share": 3 / 5,
        }
    )
