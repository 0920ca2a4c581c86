"""What a config means for the pipeline."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.kl import KlController
from rlsys.config.algorithm import AdvantageBaseline, AdvantageScale, AlgorithmConfig
from rlsys.config.schema import CompatConfig, CriticConfig, RunConfig, TrainerConfig
from rlsys.data.trajectory import Group, Scores, value_mask
from rlsys.orchestrator.pipeline.grouping import finish
from rlsys.orchestrator.pipeline.training_step import learning, mini_batches, score_batch_size
from tests.orchestrator.pipeline.build import question, rewarded, trajectory


@pytest.mark.parametrize(
    ("baseline", "scale", "waits"),
    [
        (AdvantageBaseline.group, AdvantageScale.group, False),
        (AdvantageBaseline.critic, AdvantageScale.none, False),
        (AdvantageBaseline.batch, AdvantageScale.none, True),
        (AdvantageBaseline.leave_one_out, AdvantageScale.batch, True),
        (AdvantageBaseline.critic, AdvantageScale.whiten, True),
    ],
)
def test_training_waits_for_a_mini_batch_that_advantages_depend_on(
    baseline: AdvantageBaseline, scale: AdvantageScale, waits: bool
) -> None:
    algorithm = AlgorithmConfig(baseline=baseline, advantage_scale=scale)
    cut = mini_batches(RunConfig(algorithm=algorithm, trainer=TrainerConfig(prompts_per_step=6, mini_batches=3)))
    assert cut.sizes == (2, 2, 2)
    assert (cut.whole is not None) == waits


@given(st.integers(1, 2000), st.data())
def test_every_group_is_in_one_mini_batch_and_sizes_differ_by_one_at_most(groups: int, data: Any) -> None:
    count = data.draw(st.integers(1, groups))
    config = RunConfig(trainer=TrainerConfig(prompts_per_step=groups, mini_batches=count))
    sizes = mini_batches(config).sizes
    assert (len(sizes), sum(sizes)) == (count, groups)
    assert {*sizes} <= {groups // count, -(-groups // count)}
    # Of the first so many mini-batches, none runs ahead of its share of the groups, or is a whole one behind it.
    for number, taken in enumerate(accumulate(sizes), start=1):
        assert taken <= Fraction(number * groups, count) < taken + 1
    assert score_batch_size(config).most == max(sizes)


@pytest.mark.parametrize(
    ("groups", "count", "sizes"),
    [(8, 3, (2, 3, 3)), (4, 3, (1, 1, 2)), (5, 5, (1,) * 5), (512, 10, (51, 51, 51, 51, 52) * 2)],
)
def test_the_larger_mini_batches_are_spread_over_the_step(groups: int, count: int, sizes: tuple[int, ...]) -> None:
    config = RunConfig(trainer=TrainerConfig(prompts_per_step=groups, mini_batches=count))
    assert mini_batches(config).sizes == sizes


@pytest.mark.parametrize("quirk", [False, True])
def test_whitening_takes_observations_in_where_compatibility_asks_for_it(quirk: bool) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(
            baseline=AdvantageBaseline.critic, advantage_scale=AdvantageScale.whiten, kl_coef=0.0
        ),
        compat=CompatConfig(observations_in_values=quirk),
    )
    cut = mini_batches(config)
    assert cut.whole is not None
    one = trajectory(range(4), [False, True, False, True], turn_of_token=[-1, 0, -1, 0])
    scores = Scores(np.zeros(4, np.float32), values=np.array([0, 1, 5, 3], np.float32))
    group = finish(
        Group(question(1), (rewarded(one, 1.0).with_scores(scores),)),
        config.algorithm,
        KlController(0.0),
        value_mask(config.compat),
    )
    (found,) = cut.whole([group])[0].samples
    assert (found.advantages[2] != 0) == quirk
    assert found.advantages.sum() == pytest.approx(0, abs=1e-6)


def test_the_critic_warms_up_alone() -> None:
    with_critic = RunConfig(
        algorithm=AlgorithmConfig(baseline=AdvantageBaseline.critic), critic=CriticConfig(warmup_steps=2)
    )
    assert [learning(with_critic, step) for step in (1, 2, 3)] == [
        ("critic",),
        ("critic",),
        ("actor", "critic"),
    ]
    assert learning(RunConfig(critic=CriticConfig(warmup_steps=2)), 1) == ("actor",)
