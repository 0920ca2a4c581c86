"""Dynamic batching, which server and client share: makes few large calls of many small ones.

Invariants: items start in the order of their submission; every future that `submit` returns is resolved, by a result,
by the batch's error or by `BatcherClosed`; a cancelled item that has not started never runs and takes no place in the
queue. A batch is put together only when it starts, so it is as full as it can be. All methods belong to the event
loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatcherClosed(Exception):
    """The batcher was closed before the item was done."""


class QueueFull(Exception):
    """More items wait than the limit allows."""


class Batcher(Generic[Item, Result]):
    """Collects items for at most `max_wait_s`, or until `max_batch` are there, and runs them together.

    Args:
        run: takes a batch and returns one result an item, in the same order.
        max_batch: most items of one call.
        max_wait_s: how long the first item of a batch waits for others, unless the last two batches had found none: a
            lone caller need not wait. While `max_running` batches run, items wait longer, and the next batch starts as
            soon as one ends.
        max_running: batches that hold a place at once; a batch may give its place up before it ends, see `pass_on`.
        max_pending: items that may wait.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Coroutine[Any, Any, Sequence[Result]]],
        max_batch: int,
        max_wait_s: float,
        *,
        max_running: int,
        max_pending: int,
    ) -> None:
        self._run = run
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._max_running, self._max_pending = max_running, max_pending
        self._pending: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._running: dict[asyncio.Task[Sequence[Result]], list[asyncio.Future[Result]]] = {}
        self._places: set[asyncio.Task[Sequence[Result]]] = set()
        """The running batches that have not passed their place on."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._singles = 0  # batches of one item in a row; under load there are some, but seldom two
        self.batches = 0  # batches started so far

    @property
    def pending(self) -> int:
        """Items that wait."""
        return len(self._pending)

    def submit(self, items: Sequence[Item]) -> list[asyncio.Future[Result]]:
        """One future an item. Raises QueueFull when they do not all fit, BatcherClosed after `close`."""
        if self._closed:
            raise BatcherClosed
        if len(self._pending) + len(items) > self._max_pending:
            self._pending = deque(entry for entry in self._pending if not entry[1].done())  # without cancelled ones
            if len(self._pending) + len(items) > self._max_pending:
                raise QueueFull
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._pending.extend(zip(items, futures, strict=True))
        self._pump(partial_too=False)
        return futures

    def pass_on(self) -> None:
        """Let the next batch start; called within `run`, which has to bound by itself what comes after."""
        task = asyncio.current_task()
        assert task is not None
        self._places.discard(task)
        if not self._closed:
            self._pump(partial_too=True)

    async def close(self) -> None:
        """End what runs and fail what waits with BatcherClosed. May be called again."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._pending:
            _, future = self._pending.popleft()
            if not future.done():
                future.set_exception(BatcherClosed())
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _pump(self, *, partial_too: bool) -> None:
        """Start what may start; see that a batch that is not yet full starts in time."""
        while self._has_slot() and (len(self._pending) >= self._max_batch or partial_too) and self._pending:
            self._start()
        if self._pending and self._timer is None and self._has_slot():
            wait_s = 0.0 if self._singles >= 2 else self._max_wait_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _has_slot(self) -> bool:
        return len(self._places) < self._max_running

    def _on_timer(self) -> None:
        self._timer = None
        self._pump(partial_too=True)

    def _start(self) -> None:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        while self._pending and len(batch) < self._max_batch:
            item, future = self._pending.popleft()
            if not future.done():
                batch.append((item, future))
        if not batch:
            return
        self.batches += 1
        self._singles = self._singles + 1 if len(batch) == 1 else 0
        items, futures = map(list, zip(*batch, strict=True))
        task = asyncio.create_task(self._run(items))
        self._running[task] = futures
        self._places.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Sequence[Result]]) -> None:
        futures = self._running.pop(task)
        held_place = task in self._places
        self._places.discard(task)
        error = BatcherClosed() if task.cancelled() else task.exception()
        results = () if error else task.result()
        if error is None and len(results) != len(futures):
            error = ValueError(f"a batch of {len(futures)} gave {len(results)} results")
        for row, future in enumerate(futures):
            if error is not None and not future.done():
                future.set_exception(error)
            elif not future.done():
                future.set_result(results[row])
        if held_place and not self._closed:
            self._pump(partial_too=True)
