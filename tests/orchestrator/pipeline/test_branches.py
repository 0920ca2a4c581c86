"""Tests of episodes of several branches: every sequence is one branch, and every statistic counts an episode once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rlsys.algorithms.kl import KlController
from rlsys.algorithms.losses import divisor, token_weights
from rlsys.config.algorithm import AdvantageBaseline, AdvantageScale, Aggregation, AlgorithmConfig, ReturnsAdvantage
from rlsys.config.schema import LoraConfig, ModelConfig, ParallelConfig, RunConfig, TaskConfig
from rlsys.data.trajectory import Branch, Group, Sample, TopkLogprobs
from rlsys.orchestrator.pipeline.grouping import finish, over_mini_batch
from rlsys.orchestrator.pipeline.step_metrics import step_metrics, training_flops
from rlsys.trainer.batches import BatchSharder, joined_branches, sequences_of
from rlsys.weights.flops import Flops
from tests.support.trajectories import question, rewarded, sample, trajectory

LOSS_LENGTH = 7


def episode(masks: Sequence[Sequence[bool]], first: int = 0) -> Sample:
    """A sample with one branch for each mask; its tokens count up from `first`."""
    starts = np.cumsum([0, *map(len, masks)])
    tokens = range(first, first + int(starts[-1]))
    made = sample(list(tokens), [each for mask in masks for each in mask])
    branches = tuple(Branch(int(start), "first") for start in starts[:-1])
    return replace(made, trajectory=replace(made.trajectory, branches=branches))


MASKS = st.lists(st.booleans(), min_size=1, max_size=9).map(lambda rest: [False, *rest])
EPISODES = st.lists(st.lists(MASKS, min_size=1, max_size=4), min_size=1, max_size=8)


def test_sequences_are_the_branches_with_everything_of_their_tokens() -> None:
    one = episode([[False, True, True], [False, False, True]], first=10)
    picks = TopkLogprobs(np.arange(3)[:, None].astype(np.int32), np.zeros((3, 1), np.float32))
    one = replace(one, old_logprobs=-np.arange(6, dtype=np.float32), picks=picks)
    left, right = sequences_of([one])
    assert (left.trajectory.tokens.tolist(), right.trajectory.tokens.tolist()) == ([10, 11, 12], [13, 14, 15])
    assert left.old_logprobs is not None
    assert right.old_logprobs is not None
    assert (left.old_logprobs.tolist(), right.old_logprobs.tolist()) == ([0, -1, -2], [-3, -4, -5])
    assert left.picks is not None
    assert right.picks is not None
    assert (left.picks.tokens.tolist(), right.picks.tokens.tolist()) == ([[0], [1]], [[2]])
    assert_array_equal(joined_branches([one], [left.old_logprobs, right.old_logprobs])[0], one.old_logprobs)
    whole = sample([1, 2], [False, True])
    assert sequences_of([whole]) == [whole]


@settings(max_examples=60, deadline=None)
@given(EPISODES, st.integers(1, 40), st.booleans(), st.integers(1, 3))
def test_losses_weigh_episodes_and_not_branches(
    masks: list[list[list[bool]]], budget: int, packed: bool, ranks: int
) -> None:
    samples = [episode(each, 100 * number) for number, each in enumerate(masks)]
    sharder = BatchSharder(ParallelConfig(), ranks, budget, pad_id=0, packed=packed)
    _, batches = sharder.shard(samples)
    every = [batch for of_rank in batches for batch in of_rank]
    trained = [sum(sum(mask) for mask in each) for each in masks]
    episodes = sum(count > 0 for count in trained)
    expected = {
        "token-mean": (sum(trained), sum(trained)),
        "seq-mean-token-mean": (episodes, episodes),
        "seq-mean-token-sum": (sum(trained), episodes),
        "fixed-length": (sum(trained), episodes * LOSS_LENGTH),
    }
    for name, (weight, divided_by) in expected.items():
        kind = Aggregation(name)
        weights = sum(
            float(batch.spread(token_weights(kind, batch.trained_by_episode))[batch.loss_mask].sum()) for batch in every
        )
        assert_allclose(weights, weight)
        assert sum(divisor(kind, batch.counted_episodes, LOSS_LENGTH) for batch in every) == divided_by


OWN = ((None, 0.5, 0.0), (0.25,), (None,))
"""Own reward of each branch of three episodes with the rewards 1, 0 and 0."""


def credited() -> Group:
    """A group whose branches have the rewards `OWN`, and one trained token each."""
    samples = []
    for rewards, total in zip(OWN, (1.0, 0.0, 0.0), strict=True):
        made = episode([[False, True]] * len(rewards))
        branches = tuple(
            replace(branch, reward=own) for branch, own in zip(made.trajectory.branches, rewards, strict=True)
        )
        done = replace(made.trajectory, branches=branches)
        samples.append(replace(made, trajectory=done, reward=total, turn_rewards=(total,)))
    return Group(question(1), tuple(samples))


STD = 3**-0.5
"""Sample standard deviation of 1, 0, 0."""


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        # Each branch's reward, less the mean 1/3 of the episodes' rewards.
        ("group", "none", ((2 / 3, 1 / 6, -1 / 3), (-1 / 12,), (-1 / 3,))),
        ("group", "group", ((2 / 3 / STD, 1 / 6 / STD, -1 / 3 / STD), (-1 / 12 / STD,), (-1 / 3 / STD,))),
        # Less the mean of the other episodes: 0, 1/2 and 1/2.
        ("leave_one_out", "none", ((1.0, 0.5, 0.0), (-0.25,), (-0.5,))),
    ],
)
def test_branch_learns_from_its_own_reward_and_episodes_count_once_in_the_baseline(
    baseline: str, scale: str, expected: tuple[tuple[float, ...], ...]
) -> None:
    advantage = ReturnsAdvantage(baseline=AdvantageBaseline(baseline), scale=AdvantageScale(scale))
    done = finish(credited(), AlgorithmConfig(advantage=advantage), KlController(0.0))
    found = [one.advantages[one.trajectory.loss_mask] for one in done.samples]
    for own, wanted in zip(found, expected, strict=True):
        assert_allclose(own, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("baseline", "scale"), [("group", "batch"), ("batch", "batch"), ("none", "whiten")])
def test_scale_over_the_mini_batch_divides_rewards_of_branches_too(baseline: str, scale: str) -> None:
    other = Group(question(2), (rewarded(trajectory((3, 4)), 3.0), rewarded(trajectory((3, 4)), 2.0)))
    config = AlgorithmConfig(
        advantage=ReturnsAdvantage(baseline=AdvantageBaseline(baseline), scale=AdvantageScale(scale))
    )
    groups = [finish(group, config, KlController(0.0)) for group in (credited(), other)]
    done = over_mini_batch(groups, config)
    episodes = np.array([1.0, 0.0, 0.0, 3.0, 2.0])
    baselines = {
        "group": np.array([1 / 3] * 3 + [2.5] * 2),
        "batch": np.full(5, episodes.mean()),
        "none": np.zeros(5),
    }[baseline]
    branches = np.array([1.0, 0.5, 0.0, 0.25, 0.0, 3.0, 2.0]) - np.repeat(baselines, [3, 1, 1, 1, 1])
    masks = [one.trajectory.loss_mask for group in done for one in group.samples]
    found = np.concatenate(
        [one.advantages[mask] for one, mask in zip((s for g in done for s in g.samples), masks, strict=True)]
    )
    tokens = np.repeat(branches, [1, 1, 1, 1, 1, *(mask.sum() for mask in masks[3:])])
    if scale == "batch":
        expected = tokens / (episodes - baselines).std(ddof=1)
    else:
        expected = (tokens - tokens.mean()) / tokens.std(ddof=1)
    assert_allclose(found, expected, rtol=1e-4)


def test_rewards_of_branches_alone_are_a_spread() -> None:
    group = credited()
    same = replace(group, samples=tuple(replace(one, reward=0.0) for one in group.samples))
    assert same.has_spread
    plain = [replace(one, trajectory=replace(one.trajectory, branches=(Branch(0),)), parts={}) for one in same.samples]
    assert not replace(same, samples=tuple(plain)).has_spread


def test_metrics_count_branches_and_their_tokens_by_cause() -> None:
    one = episode([[False, True], [False, True, True]])
    causes = (Branch(0, "first"), Branch(2, "forked"))
    one = rewarded(replace(one.trajectory, branches=causes), 1.0)
    other = rewarded(replace(trajectory((1, 2)), branches=(Branch(0, "first"),)), 0.0)
    done = [replace(each, old_logprobs=np.zeros(len(each.trajectory.tokens), np.float32)) for each in (one, other)]
    groups = [Group(question(1), tuple(done))]
    found = step_metrics(groups, 0, AlgorithmConfig().correction, TaskConfig())
    assert (found["gateway/branches/mean"], found["gateway/branches/max"]) == (1.5, 2)
    assert (found["gateway/tokens/first"], found["gateway/tokens/forked"]) == (2, 2)
    assert found["rollout/episodes"] == 2
    # 7 tokens and 4 targets; a square of each branch's length: 4 + 9 + 4, and not 25 + 4.
    cost, adapters = Flops(10.0, 5.0, 1.0), RunConfig(model=ModelConfig(lora=LoraConfig(rank=8)))
    assert training_flops(groups, cost, RunConfig()) == 3 * 70 + 3 * 20 + 3 * 17
    assert training_flops(groups, cost, adapters) == 2 * 70 + 2 * 20 + 3 * 17, "frozen weights have no gradients"
    plain = [Group(question(1), (replace(done[0], trajectory=trajectory((1, 2, 3, 4, 5))), done[1]))]
    assert "gateway/branches/mean" not in step_metrics(
        [replace(plain[0], samples=plain[0].samples[:1])], 0, AlgorithmConfig().correction, TaskConfig()
    )
