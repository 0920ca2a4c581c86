from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search.dynamic_batching import Batcher, BatcherClosed, QueueFull


class Doubler:
    """Runs batches one event-loop turn long and keeps what it saw."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.most_running = 0
        self.gate = asyncio.Event()
        self._running = 0

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        await self.gate.wait()
        self._running -= 1
        return [2 * item for item in items]


def batcher(run: Doubler, **changes: float) -> Batcher[int, int]:
    options = {"max_batch": 4, "max_wait_s": 0.001, "max_running": 1, "max_pending": 1000} | changes
    return Batcher(run, **options)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 6), st.integers(1, 3))
def test_every_item_gets_its_own_result_in_order_and_within_limits(
    sizes: list[int], max_batch: int, max_running: int
) -> None:
    async def scenario() -> None:
        run = Doubler()
        run.gate.set()
        batching = batcher(run, max_batch=max_batch, max_running=max_running)
        futures: list[asyncio.Future[int]] = []
        for size in sizes:
            futures += batching.submit(range(len(futures), len(futures) + size))
            await asyncio.sleep(0)
        assert await asyncio.gather(*futures) == [2 * row for row in range(sum(sizes))]
        assert [item for batch in run.batches for item in batch] == list(range(sum(sizes)))
        assert all(1 <= len(batch) <= max_batch for batch in run.batches)
        assert run.most_running <= max_running
        await batching.close()

    asyncio.run(scenario())


async def test_items_that_come_while_a_batch_runs_go_together() -> None:
    run = Doubler()
    batching = batcher(run, max_batch=8)
    futures = batching.submit([0])
    await asyncio.sleep(0.01)
    for item in (1, 2, 3):
        futures += batching.submit([item])
        await asyncio.sleep(0.005)
    run.gate.set()
    await asyncio.gather(*futures)
    assert run.batches == [[0], [1, 2, 3]]


async def test_a_cancelled_item_never_runs_and_disturbs_nobody() -> None:
    run = Doubler()
    run.gate.set()
    batching = batcher(run)
    first, second, third = batching.submit([1, 2, 3])
    second.cancel()
    assert await asyncio.gather(first, third) == [2, 6]
    assert run.batches == [[1, 3]]


async def test_a_full_queue_takes_all_of_a_submission_or_nothing() -> None:
    batching = batcher(Doubler(), max_pending=3, max_wait_s=60)
    batching.submit([1, 2])
    with pytest.raises(QueueFull):
        batching.submit([3, 4])
    assert batching.pending == 2
    await batching.close()


async def test_a_failed_batch_fails_its_items_alone() -> None:
    async def run(items: list[int]) -> list[int]:
        if 1 in items:
            raise RuntimeError("broken")
        return items if 5 not in items else []

    batching: Batcher[int, int] = Batcher(run, max_batch=2, max_wait_s=0, max_running=1, max_pending=9)
    results = await asyncio.gather(*batching.submit([1, 2, 3, 4, 5]), return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError, RuntimeError, int, int, ValueError]


async def test_close_resolves_what_runs_and_what_waits() -> None:
    batching = batcher(Doubler(), max_batch=1)
    futures = batching.submit([1, 2])
    await asyncio.sleep(0.01)
    await batching.close()
    await batching.close()
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), timeout=1)
    assert [type(result) for result in results] == [BatcherClosed, BatcherClosed]
    with pytest.raises(BatcherClosed):
        batching.submit([3])


async def test_a_batch_that_passes_its_place_on_lets_the_next_one_start() -> None:
    begun: list[list[int]] = []
    may_pass, may_end = asyncio.Event(), asyncio.Event()

    async def run(items: list[int]) -> list[int]:
        begun.append(items)
        await may_pass.wait()
        batching.pass_on()
        await may_end.wait()
        return items

    batching: Batcher[int, int] = Batcher(run, max_batch=1, max_wait_s=0, max_running=1, max_pending=9)
    futures = batching.submit([1, 2, 3])
    await asyncio.sleep(0.01)
    assert begun == [[1]]
    may_pass.set()
    await asyncio.sleep(0.01)
    assert begun == [[1], [2], [3]]
    assert not any(future.done() for future in futures)
    may_end.set()
    assert await asyncio.gather(*futures) == [1, 2, 3]


async def test_cancelled_items_take_no_place_in_a_full_queue() -> None:
    run = Doubler()
    batching = batcher(run, max_batch=1, max_pending=2)
    running = batching.submit([0])
    await asyncio.sleep(0.01)
    gone, stays = batching.submit([1, 2])
    gone.cancel()
    (new,) = batching.submit([3])
    run.gate.set()
    assert await asyncio.gather(*running, stays, new) == [0, 4, 6]
    assert run.batches == [[0], [2], [3]]


async def test_who_was_alone_twice_does_not_wait_for_company() -> None:
    loop, waits = asyncio.get_running_loop(), []

    async def run(items: list[int]) -> list[int]:
        return items

    batcher: Batcher[int, int] = Batcher(run, max_batch=2, max_wait_s=0.3, max_running=1, max_pending=9)
    for items in ([1], [2], [3], [4, 5], [6]):
        began = loop.time()
        assert await asyncio.gather(*batcher.submit(items)) == items
        waits.append(loop.time() - began >= 0.3)
    assert waits == [True, True, False, False, True]
