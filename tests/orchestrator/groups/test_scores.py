"""Answers of a group's processes come back by sample, however the samples were sharded."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlsys.config.schema import ParallelConfig
from rlsys.data.trajectory import Sample
from rlsys.orchestrator.worker_groups import scores_of
from rlsys.trainer.batches import BatchSharder, LogProbs, MicroBatch
from tests.support.trajectories import sample

LENGTHS = (9, 7, 5, 5, 3, 2, 2)


def samples() -> list[Sample]:
    """Sample i holds the tokens 100 i, 100 i + 1, ...; every other one is trained."""
    return [sample([100 * i + t for t in range(n)], [t % 2 == 1 for t in range(n)]) for i, n in enumerate(LENGTHS)]


def answer(batch: MicroBatch, full: bool) -> LogProbs:
    """Made from the tokens that it speaks of."""
    policy = np.where(batch.loss_mask, -batch.tokens, 0).astype(np.float32)
    if not full:
        return LogProbs(policy, None)
    tokens = np.stack([batch.targets, batch.targets + 1], 1).astype(np.int32)
    return LogProbs(policy, 2 * policy, (tokens, -tokens.astype(np.float32)))


@pytest.mark.parametrize(("packed", "full", "count"), [(False, True, 7), (True, False, 7), (True, True, 1)])
def test_scores_come_back_in_the_order_of_the_samples(packed: bool, full: bool, count: int) -> None:
    """One sample leaves a rank with micro-batches that only fill up."""
    asked = samples()[:count]
    sharder = BatchSharder(ParallelConfig(pp=2), processes=4, budget_tokens=16, pad_id=0, packed=packed)
    plan, batches = sharder.shard(asked)
    answers = [[answer(batch, full) for batch in of_rank] for of_rank in batches]
    found = scores_of(plan, batches, answers)
    assert len(found) == len(asked)
    for one, scores in zip(asked, found, strict=True):
        tokens, mask = one.trajectory.tokens, one.trajectory.loss_mask
        assert_array_equal(scores.policy, np.where(mask, -tokens, 0))
        assert scores.values is None
        if not full:
            assert (scores.reference, scores.picks) == (None, None)
            continue
        assert scores.reference is not None
        assert scores.picks is not None
        assert_array_equal(scores.reference, np.where(mask, -2 * tokens, 0))
        assert_array_equal(scores.picks.tokens, np.stack([tokens[mask], tokens[mask] + 1], 1))
        assert_array_equal(scores.picks.logprobs, -scores.picks.tokens)
