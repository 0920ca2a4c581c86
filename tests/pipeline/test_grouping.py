"""Judging a group, scaling a mini-batch and weighing late tokens, worked out by hand."""

from __future__ import annotations

from statistics import fmean, stdev

import numpy as np
import pytest

from rlsys.agent.trajectory import Action, Trajectory, Turn
from rlsys.config.schema import AdvantageScale, CorrectionConfig, CorrectionKind, CorrectionLevel
from rlsys.data.question import Question
from rlsys.pipeline.group import Group, Sample
from rlsys.pipeline.grouping import correct_group, judge, scale_by_batch
from tests.pipeline.build import question, trajectory

ASKED = Question("q:1", "?", ("Yes",))
TRUNCATE = CorrectionConfig(CorrectionKind.truncate, CorrectionLevel.token, high=2.0)


def answering(text: str) -> Trajectory:
    return trajectory(turns=[Turn("a", Action.ANSWER, text, "", 1, 40, 0, 0.1, 0.0)])


def judged(answers: str, scale: AdvantageScale) -> Group:
    """A group of one episode for each letter, y for a right answer."""
    return judge(ASKED, [answering("yes" if letter == "y" else "no") for letter in answers], scale)


def advantages(group: Group) -> list[float]:
    return [sample.advantage for sample in group.samples]


def test_a_group_is_judged_by_its_own_mean_and_spread() -> None:
    group = judged("ynnn", AdvantageScale.group)
    assert group.question is ASKED
    assert [sample.reward for sample in group.samples] == [1, 0, 0, 0]
    # Mean 1/4; sample standard deviation sqrt((9/16 + 3/16) / 3) = 1/2.
    assert advantages(group) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert advantages(judged("nn", AdvantageScale.group)) == [0, 0]


@pytest.mark.parametrize("scale", [AdvantageScale.batch, AdvantageScale.none])
def test_a_group_that_is_not_scaled_by_itself_is_only_centred(scale: AdvantageScale) -> None:
    assert advantages(judged("yn", scale)) == [0.5, -0.5]


def test_a_mini_batch_is_scaled_by_the_spread_of_all_its_groups() -> None:
    answers = ["yn", "ynnn", "yyy", "nyyyn"]
    groups = [judged(one, AdvantageScale.batch) for one in answers]
    scaled = scale_by_batch(groups)
    rewards = [[float(letter == "y") for letter in one] for one in answers]
    every = [reward - fmean(group) for group in rewards for reward in group]
    spread = stdev(every) + 1e-6
    assert [advantage for group in scaled for advantage in advantages(group)] == pytest.approx(
        [value / spread for value in every]
    )
    assert [[sample.reward for sample in group.samples] for group in scaled] == rewards
    assert [len(group.samples) for group in scaled] == [2, 4, 3, 5]
    assert scale_by_batch(scaled) == scaled, "no reward is centred or divided twice"


def test_a_mini_batch_without_spread_within_its_groups_gives_zeros() -> None:
    groups = [judged("yyy", AdvantageScale.batch), judged("nn", AdvantageScale.batch)]
    assert [advantages(group) for group in scale_by_batch(groups)] == [[0, 0, 0], [0, 0]]
    assert scale_by_batch([]) == []


def scored(old: list[float], rollout: list[float]) -> Sample:
    return Sample(
        trajectory(range(len(old)), rollout_logprobs=np.log(rollout).tolist()),
        reward=1.0,
        advantage=0.5,
        old_logprobs=np.log(old).astype(np.float32),
        ref_logprobs=np.zeros(len(old), dtype=np.float32),
    )


def test_every_sample_of_a_group_gets_its_weights_and_keeps_the_rest() -> None:
    nothing = float("nan")
    # The first token is untrained; ratios 1.5 and 3, then 0.5 and none.
    group = Group(
        question(1), (scored([0.9, 0.6, 0.6], [0.1, 0.4, 0.2]), scored([0.9, 0.2, 0.5], [0.1, 0.4, nothing]))
    )
    weighed = correct_group(group, TRUNCATE)
    assert weighed.question is group.question
    for sample, before, expected in zip(
        weighed.samples, group.samples, ([1, 1.5, 2], [1, 0.5, 1]), strict=True
    ):
        assert sample.weights is not None
        np.testing.assert_allclose(sample.weights, expected, rtol=1e-6)
        assert sample.trajectory is before.trajectory
        assert (sample.reward, sample.advantage) == (1.0, 0.5)
        assert sample.old_logprobs is before.old_logprobs
        assert sample.ref_logprobs is before.ref_logprobs


def test_without_a_correction_samples_have_no_weights() -> None:
    group = Group(question(1), (scored([0.9, 0.6], [0.1, 0.4]),))
    weighed = correct_group(group, CorrectionConfig())
    assert weighed.samples[0].weights is None


def test_a_group_that_is_not_scored_cannot_be_corrected() -> None:
    with pytest.raises(ValueError, match=r"Sample 0 of q:1 .* score it first"):
        correct_group(judged("yn", AdvantageScale.group), TRUNCATE)
