"""Tests of an inference group whose processes are lost and started again, in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now
from rlsys.cluster.worker_group import RankDied, RankLost
from rlsys.data.trajectory import Scores
from rlsys.observe.spans import Tracer
from rlsys.orchestrator import worker_groups
from rlsys.orchestrator.worker_groups import InferenceGroup
from tests.support.virtual_time import virtually

LOST = RankDied("inference rank 0 died.", 0, "inference rank 0")
START_S, CALL_S = 20.0, 1.0


class Inference(InferenceGroup):
    """An inference group of one process, whose weights are a number. `pushed` is the version that the actor has kept."""

    def __init__(self) -> None:
        sharder = SimpleNamespace(shard=lambda _: ([], []), load=lambda _: {})
        workers = SimpleNamespace(ranks=["first"], call=self._call)
        super().__init__(workers, sharder, Tracer("inference"))  # type: ignore[arg-type]
        self.recover = self._start
        self.pushed, self.weights, self.dead, self.starts = 3, 3, False, 0
        self.sending = asyncio.Lock()
        self.fails: RankLost | None = None

    async def _call(self, method: str, *args: Any) -> list[Any]:
        await asyncio.sleep(CALL_S)
        if self.dead:
            raise LOST
        if method == "finish_update":
            self.weights = args[0]
        return [self.weights]

    async def computed(self, _: Any) -> Any:
        return await self._call("compute")

    async def _start(self, lost: RankLost, updated: bool) -> None:
        """Start the process with the weights of the run's start; then send it the pushed version, as the weight sync does."""
        assert lost is LOST
        await asyncio.sleep(START_S)
        if self.fails:
            raise self.fails
        self.dead, self.weights, self.starts = False, 0, self.starts + 1
        self.started(loaded=False)
        if updated:
            async with self.sending:
                await self.update(self.pushed)

    async def update(self, version: int) -> None:
        await self.begin_update(version)
        await self.finish_update(version, "")

    async def push(self, version: int) -> None:
        async with self.sending:
            await self.update(version)
            self.pushed = version


@pytest.fixture(autouse=True)
def _scores_are_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_groups, "scores_of", lambda _p, _b, answers, _s: [Scores(policy=answers[0])])


async def weights_with(group: Inference) -> list[Any]:
    """Return the weights with which a call computes, and their version."""
    (found,) = await group.compute([])
    return [found.policy, found.version]


@virtually
async def test_calls_wait_for_the_successor_and_its_weights() -> None:
    group = Inference()
    await group.push(4)
    group.dead = True
    found = await asyncio.gather(*(weights_with(group) for _ in range(3)))
    assert found == [[4, 4]] * 3
    assert group.starts == 1


@pytest.mark.parametrize("after_s", [0.5, 1.5, 19.0, 21.5, 22.5])
@virtually
async def test_a_push_meanwhile_waits_and_both_end(after_s: float) -> None:
    """At each stage of the restart: no call computes with the weights of the start, and none waits for ever."""
    group = Inference()
    await group.push(4)
    group.dead = True

    async def later() -> None:
        await asyncio.sleep(after_s)
        await group.push(5)

    *found, _ = await asyncio.gather(weights_with(group), weights_with(group), later())
    assert all(weights == version and version in (4, 5) for weights, version in found)
    assert (group.weights, group.starts) == (5, 1)
    assert await weights_with(group) == [5, 5]


@virtually
async def test_a_push_that_finds_the_loss_sends_its_own_version() -> None:
    group = Inference()
    group.dead = True
    await group.push(4)
    assert await weights_with(group) == [4, 4]
    assert group.starts == 1


@virtually
async def test_a_loss_that_cannot_be_repaired_is_raised_to_each_caller() -> None:
    group = Inference()
    group.dead, group.fails = True, LOST
    with pytest.raises(RankDied):
        await group.compute([])
    assert now() == CALL_S + START_S
    group = Inference()
    group.dead, group.recover = True, None
    for call in (group.compute([]), group.begin_update(4)):
        with pytest.raises(RankDied):
            await asyncio.wait_for(call, 100)
        group.started(loaded=True)
