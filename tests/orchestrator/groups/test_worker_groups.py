"""Tests of worker groups: which exist, the order of their scores, and how they share devices."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.config.algorithm import AlgorithmConfig, GaeAdvantage, OldLogprobs
from rlsys.config.schema import ClusterConfig, ParallelConfig, RolloutConfig, RunConfig, SglangConfig
from rlsys.data.trajectory import Branch, Sample, Scores
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.worker_groups import OffloadManager, Scorer, Switch, holdings, scores_of
from rlsys.trainer.batches import BatchSharder, LogProbs, MicroBatch
from tests.support.trajectories import sample

PLACEMENT = {"actor": "0-1", "inference": "2", "rollout": "3-6"}
PPO = AlgorithmConfig(advantage=GaeAdvantage())


def _run(algorithm: AlgorithmConfig, **placed: str) -> RunConfig:
    return RunConfig(
        algorithm=algorithm,
        cluster=ClusterConfig(placement={**PLACEMENT, **placed}),
        rollout=RolloutConfig(engine=SglangConfig(tp=2)),
    )


def test_critic_is_a_group_if_the_baseline_is_a_critic() -> None:
    without = holdings(_run(AlgorithmConfig()))
    assert without == {"rollout": [(3, 4), (5, 6)], "inference": [(2,)], "actor": [(0,), (1,)]}
    assert holdings(_run(PPO, critic="7,8")) == {**without, "critic": [(7,), (8,)]}
    assert holdings(_run(PPO)) == {**without, "critic": [(0,), (1,)]}
    for source in (OldLogprobs.engine, OldLogprobs.actor):
        assert list(holdings(_run(replace(PPO, old_logprobs=source, kl_coef=0)))) == ["rollout", "actor", "critic"]
        assert holdings(_run(replace(PPO, old_logprobs=source))) == {**without, "critic": [(0,), (1,)]}


LENGTHS = (9, 7, 5, 5, 3, 2, 2)


def samples() -> list[Sample]:
    """Return samples; sample i has the tokens 100 i, 100 i + 1, ..., of which every second one is trained.

    Sample 1 has two branches.
    """
    every = [sample([100 * i + t for t in range(n)], [t % 2 == 1 for t in range(n)]) for i, n in enumerate(LENGTHS)]
    every[1] = replace(every[1], trajectory=replace(every[1].trajectory, branches=(Branch(0), Branch(4))))
    return every


def answer(batch: MicroBatch, full: bool) -> LogProbs:
    """Return log-probs that follow from the tokens, and with `full` a reference's log-probs and picked tokens."""
    policy = np.where(batch.loss_mask, -batch.tokens, 0).astype(np.float32)
    if not full:
        return LogProbs(policy, None)
    tokens = np.stack([batch.targets, batch.targets + 1], 1).astype(np.int32)
    return LogProbs(policy, 2 * policy, (tokens, -tokens.astype(np.float32)))


@pytest.mark.parametrize(("packed", "full", "count"), [(False, True, 7), (True, False, 7), (True, True, 1)])
def test_scores_are_in_the_order_of_the_samples(packed: bool, full: bool, count: int) -> None:
    """A single sample leaves one of two ranks with empty micro-batches only."""
    asked = samples()[:count]
    sharder = BatchSharder(ParallelConfig(pp=2), processes=4, budget_tokens=16, pad_id=0, packed=packed)
    plan, batches = sharder.shard(asked)
    answers = [[answer(batch, full) for batch in of_rank] for of_rank in batches]
    found = scores_of(plan, batches, answers, asked)
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


NAMES = ("actor", "inference", "rollout")


class SwitchError(Exception):
    """Raised when a resident fails to enter or leave the device."""


@dataclass
class Device:
    """A device that logs when residents enter and leave it; a resident's move may fail."""

    rng: random.Random
    on_it: set[str] = field(default_factory=set)
    usable: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    most: int = 0

    def resident(self, name: str) -> tuple[Switch, Switch]:
        async def leave() -> None:
            self.log.append(f"-{name}")
            self.usable.discard(name)
            await self._pass(name)
            self.on_it.discard(name)

        async def enter() -> None:
            self.log.append(f"+{name}")
            self.on_it.add(name)
            self.most = max(self.most, len(self.on_it))
            await self._pass(name)
            self.usable.add(name)

        return leave, enter

    async def _pass(self, name: str) -> None:
        await asyncio.sleep(self.rng.choice([0.0, 1.0, 2.0]))
        if self.rng.random() < 0.15:
            raise SwitchError(name)


def test_residents_release_memory_before_others_take_it_in_random_runs() -> None:
    for seed in range(100):
        run_virtually(_random_needs(random.Random(seed)))


async def _random_needs(rng: random.Random) -> None:
    device = Device(rng)
    manager = OffloadManager({name: device.resident(name) for name in NAMES}, Tracer("driver"))
    for name in NAMES:
        device.on_it.add(name)
        while True:
            try:
                await manager.built(name)
                break
            except SwitchError:
                assert device.on_it == {name}
    for _ in range(12):
        names = rng.sample(NAMES, rng.randint(0, 3))
        before, device.most = set(device.on_it), 0
        seen = len(device.log)
        try:
            async with asyncio.timeout(rng.choice([1.5, 4.5, 100.0])):
                await manager.onload(*names)
        except (SwitchError, TimeoutError):
            pass
        else:
            assert device.on_it == device.usable == set(names)
        assert device.on_it <= manager.holding, "the manager knows who holds memory"
        assert manager.ready <= device.usable
        moves = device.log[seen:]
        entries = [move for move in moves if move.startswith("+")]
        assert moves == [move for move in moves if move.startswith("-")] + entries, "releases come first"
        assert all(move[1:] in names for move in entries)
        assert {move[1:] for move in moves if move.startswith("-")} <= before - set(names)
        assert device.most <= len(names)


async def test_scores_have_the_engines_log_probs_and_the_critics_values() -> None:
    """A token that was not sampled has NaN as the engine's log-prob."""
    nan = float("nan")
    first = sample([5, 6, 7], [False, True, True])
    asked = [replace(first, trajectory=replace(first.trajectory, rollout_logprobs=np.float32([nan, -1, -2])))]
    inference: Any = SimpleNamespace(compute=AsyncMock(return_value=[Scores(policy=np.float32([9, 9, 9]), version=5)]))
    critic: Any = SimpleNamespace(compute=AsyncMock(return_value=[np.float32([1, 2, 3])]))
    scorer = Scorer(inference, critic, OldLogprobs.engine)
    assert scorer.groups == ("inference", "critic")
    (scores,) = await scorer.compute(asked)
    assert_array_equal(scores.policy, [0, -1, -2])
    assert_array_equal(scores.values, [1, 2, 3])
    assert scores.version is None
