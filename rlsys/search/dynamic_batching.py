"""Dynamic batching for server and client: combines many small calls into few large ones.

Invariants: items start in order of submission; every future that `submit` returns resolves with a result, the error of
its batch, or `BatcherClosed`; an item cancelled before its start is never run and does not count against the queue
limit. A batch is assembled when it starts, so it is as full as possible. Call all methods from the event loop's thread.
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
    """The items exceed the limit of the queue."""


class Batcher(Generic[Item, Result]):
    """Collects items for up to `max_wait_s`, or until `max_batch` are waiting, and runs them together.

    Args:
        run: Runs a batch and returns one result per item, in the same order.
        max_batch: Maximum number of items per batch.
        max_wait_s: Time that the first item of a batch waits for others. It is 0 after two consecutive batches of a
            single item, so that a lone caller does not wait. While all slots are taken, items wait for a free slot.
        max_running: Slots for running batches; a batch may free its slot before it ends, see `pass_on`.
        max_pending: Maximum number of items waiting to start.
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
        """Running batches that still hold their slot."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._singles = 0  # consecutive batches of one item; two in a row are rare under load
        self.batches = 0  # batches started so far

    @property
    def pending(self) -> int:
        """Items waiting to start."""
        return len(self._pending)

    def submit(self, items: Sequence[Item]) -> list[asyncio.Future[Result]]:
        """Return one future per item. Raises QueueFull if not all items fit, BatcherClosed after `close`."""
        if self._closed:
            raise BatcherClosed
        if len(self._pending) + len(items) > self._max_pending:
            self._pending = deque(entry for entry in self._pending if not entry[1].done())  # drops cancelled items
            if len(self._pending) + len(items) > self._max_pending:
                raise QueueFull
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._pending.extend(zip(items, futures, strict=True))
        self._pump(partial_too=False)
        return futures

    def pass_on(self) -> None:
        """Free the slot of the calling batch, so that the next batch starts.

        `run` must itself limit the number of batches that continue after this call.
        """
        task = asyncio.current_task()
        assert task is not None
        self._places.discard(task)
        if not self._closed:
            self._pump(partial_too=True)

    async def close(self) -> None:
        """Cancel running batches and fail waiting items with BatcherClosed. Idempotent."""
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
        """Start full batches, and partial ones if `partial_too`; set a timer for items that remain."""
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
