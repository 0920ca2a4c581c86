"""Tests of the batcher: order, limits, cancellation, failure and close, under a virtual clock."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.search.dynamic_batching import Batcher, BatcherClosed, QueueFull
from tests.support.virtual_time import virtually


class Doubler:
    """Batch function that doubles its items in `takes_s` seconds and records its batches."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.batches: list[list[int]] = []
        self.most_running = 0
        self._takes_s, self._running = takes_s, 0

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        await asyncio.sleep(self._takes_s)
        self._running -= 1
        return [2 * item for item in items]


def batcher(run: Callable[[list[int]], Coroutine[Any, Any, list[int]]], **changes: float) -> Batcher[int, int]:
    options = {"max_batch": 4, "max_wait_s": 0.001, "max_running": 1, "max_pending": 1000} | changes
    return Batcher(run, **options)  # type: ignore[arg-type]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 6), st.integers(1, 3), st.floats(0, 1))
def test_every_item_gets_its_own_result_in_order_and_within_limits(
    sizes: list[int], max_batch: int, max_running: int, takes_s: float
) -> None:
    run = Doubler(takes_s)

    async def work() -> None:
        batching = batcher(run, max_batch=max_batch, max_running=max_running)
        futures: list[asyncio.Future[int]] = []
        for size in sizes:
            futures += batching.submit(range(len(futures), len(futures) + size))
            await asyncio.sleep(0.4)
        assert await asyncio.gather(*futures) == [2 * row for row in range(sum(sizes))]
        await batching.close()

    run_virtually(work())
    assert [item for batch in run.batches for item in batch] == list(range(sum(sizes)))
    assert all(1 <= len(batch) <= max_batch for batch in run.batches)
    assert run.most_running <= max_running


@virtually
async def test_cancelled_items_never_run_and_free_their_place_in_the_queue() -> None:
    run = Doubler(takes_s=10)
    batching = batcher(run, max_batch=1, max_pending=2)
    running = batching.submit([0])
    await asyncio.sleep(1)
    gone, stays = batching.submit([1, 2])
    gone.cancel()
    (new,) = batching.submit([3])
    assert await asyncio.gather(*running, stays, new) == [0, 4, 6]
    assert run.batches == [[0], [2], [3]]


@virtually
async def test_an_item_cancelled_in_a_running_batch_leaves_the_others_their_results() -> None:
    gone, *others = batcher(Doubler(takes_s=10)).submit([1, 2, 3])
    await asyncio.sleep(1)
    gone.cancel()
    async with asyncio.timeout(100):
        assert await asyncio.gather(*others) == [4, 6]


@virtually
async def test_a_submission_that_does_not_fit_the_queue_is_rejected_whole() -> None:
    batching = batcher(Doubler(), max_pending=3)
    taken = batching.submit([1, 2])
    with pytest.raises(QueueFull):
        batching.submit([3, 4])
    assert batching.pending == 2
    assert await asyncio.gather(*taken) == [2, 4]


@virtually
async def test_a_failed_batch_fails_its_items_alone() -> None:
    async def run(items: list[int]) -> list[int]:
        if 1 in items:
            raise RuntimeError("broken")
        return items if 5 not in items else []

    results = await asyncio.gather(*batcher(run, max_batch=2).submit([1, 2, 3, 4, 5]), return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError, RuntimeError, int, int, ValueError]


@virtually
async def test_close_fails_running_and_waiting_items() -> None:
    batching = batcher(Doubler(takes_s=1e6), max_batch=1)
    futures = batching.submit([1, 2])
    await asyncio.sleep(1)
    await batching.close()
    await batching.close()
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert [type(result) for result in results] == [BatcherClosed, BatcherClosed]
    with pytest.raises(BatcherClosed):
        batching.submit([3])
    assert now() == 1


@virtually
async def test_an_item_does_not_wait_after_two_batches_of_one() -> None:
    batching, waits = batcher(Doubler(), max_batch=2, max_wait_s=0.25), []
    for items in ([1], [2], [3], [4, 5], [6]):
        began = now()
        await asyncio.gather(*batching.submit(items))
        waits.append(now() - began)
    assert waits == [0.25, 0.25, 0, 0, 0.25]
