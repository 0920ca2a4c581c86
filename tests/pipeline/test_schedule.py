"""What a config means for the pipeline."""

from __future__ import annotations

import numpy as np
import pytest

from rlsys.config.algorithm import AdvantageScale, AlgorithmConfig, Baseline
from rlsys.config.schema import CompatConfig, CriticConfig, RunConfig, TrainerConfig
from rlsys.pipeline.group import Group, Scores
from rlsys.pipeline.grouping import finish
from rlsys.pipeline.masks import value_mask
from rlsys.pipeline.schedule import learning, mini_batches
from tests.pipeline.build import question, rewarded, trajectory


@pytest.mark.parametrize(
    ("baseline", "scale", "waits"),
    [
        (Baseline.group, AdvantageScale.group, False),
        (Baseline.critic, AdvantageScale.none, False),
        (Baseline.batch, AdvantageScale.none, True),
        (Baseline.leave_one_out, AdvantageScale.batch, True),
        (Baseline.critic, AdvantageScale.whiten, True),
    ],
)
def test_training_waits_for_a_mini_batch_that_advantages_depend_on(
    baseline: Baseline, scale: AdvantageScale, waits: bool
) -> None:
    algorithm = AlgorithmConfig(baseline=baseline, advantage_scale=scale)
    cut = mini_batches(
        RunConfig(algorithm=algorithm, trainer=TrainerConfig(prompts_per_step=6, mini_batches=3))
    )
    assert (cut.updates, cut.groups_per_update) == (3, 2)
    assert (cut.whole is not None) == waits


@pytest.mark.parametrize("quirk", [False, True])
def test_whitening_takes_observations_in_where_compatibility_asks_for_it(quirk: bool) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(
            baseline=Baseline.critic, advantage_scale=AdvantageScale.whiten, kl_coef=0.0
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
        0.0,
        value_mask(config.compat),
    )
    (found,) = cut.whole([group])[0].samples
    assert (found.advantages[2] != 0) == quirk
    assert found.advantages.sum() == pytest.approx(0, abs=1e-6)


def test_the_critic_warms_up_alone() -> None:
    with_critic = RunConfig(
        algorithm=AlgorithmConfig(baseline=Baseline.critic), critic=CriticConfig(warmup_steps=2)
    )
    assert [learning(with_critic, step) for step in (1, 2, 3)] == [
        ("critic",),
        ("critic",),
        ("actor", "critic"),
    ]
    assert learning(RunConfig(critic=CriticConfig(warmup_steps=2)), 1) == ("actor",)
