"""Writes a run's checkpoints, one at a time, while training continues.

    begin -> every group has copied its state -> files are written -> publish, then prune older checkpoints
    returns here                                 in the background    by `settle` (polls) or `finish` (blocks)

With `checkpoint.background=false`, `begin` also calls `finish`. A failed write raises RunError once. That checkpoint is
never published; its files are deleted once all groups have stopped writing, and earlier checkpoints stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlsys.errors import RunError, UserError, disk_error
from rlsys.weights.checkpoint.store import CheckpointStore, RetentionPolicy

logger = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.5
"""Interval of `settle`'s polling."""


class CheckpointedGroup(Protocol):
    """Saves one part of a checkpoint, such as the actor or the reference policy."""

    async def begin_save(self, folder: Path) -> None:
        """Copy the state and start writing it to the new folder `folder`."""

    async def saving(self) -> bool:
        """Return True while files are being written."""

    async def finish_save(self) -> None:
        """Block until the files are written. Raises RunError if that failed."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingSave:
    """A checkpoint that is being written."""

    step: int
    parts: Sequence[CheckpointedGroup]


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(
        self,
        store: CheckpointStore,
        keep: RetentionPolicy,
        score_of: Callable[[int], float | None],
        onload: Callable[[str], Awaitable[None]],
        background: bool,
        newest: Path | None = None,
    ) -> None:
        """`newest` is the checkpoint from which a resumed run started.

        `score_of` returns the score of a step's checkpoint, and `onload` brings a worker group onto its devices.
        """
        self._store, self._keep, self._score_of = store, keep, score_of
        self._onload, self._background = onload, background
        self.newest = newest
        """Last published checkpoint."""
        self.awaited: set[int] = set()
        """Steps still being evaluated, or whose evaluation was cut off before a resume; pruning keeps their checkpoints,
        because one of them may be the best."""
        self._pending: _PendingSave | None = None
        self._finishing = asyncio.Lock()

    async def begin(
        self, step: int, write_data: Callable[[Path], None], parts: Mapping[str, tuple[str, CheckpointedGroup]]
    ) -> None:
        """Begin the checkpoint of `step`, once the previous one is published.

        `write_data` writes the driver's part. `parts` maps folder names to (group name, part).
        """
        await self.finish()
        started: list[CheckpointedGroup] = []
        try:
            with _one_sentence(self._store.path(step)):
                folder = await _to_end(self._store.begin, step)
                await _to_end(write_data, folder)
            for name, (group, part) in parts.items():
                await self._onload(group)
                started.append(part)
                await part.begin_save(folder / name)
        except (RunError, UserError):
            await self._give_up(started)
            raise
        self._pending = _PendingSave(step, started)
        if not self._background:
            await self.finish()

    async def settle(self) -> None:
        """Poll until the current checkpoint is written, then publish it; the groups keep working."""
        mine = self._pending
        while mine and self._pending is mine:
            if not any([await part.saving() for part in mine.parts]):
                await self._finish(mine)
                return
            await asyncio.sleep(POLL_S)

    async def finish(self) -> None:
        """Block until the current checkpoint is written, and publish it."""
        await self._finish(self._pending)

    async def _finish(self, pending: _PendingSave | None) -> None:
        async with self._finishing:
            if pending is None or self._pending is not pending:
                return
            try:
                for part in pending.parts:
                    await part.finish_save()
                with _one_sentence(self._store.path(pending.step)):
                    self.newest = await _to_end(self._store.publish, pending.step)
            except (RunError, UserError):
                await self._give_up(pending.parts)
                raise
            finally:
                # Also after a failure: a second `finish_save` may not raise again.
                self._pending = None
            try:
                await _to_end(self._store.prune, self._keep, self._score_of, frozenset(self.awaited))
            except OSError as problem:
                logger.warning("Older checkpoints could not be deleted (%s) and remain on disk.", problem)

    async def _give_up(self, parts: Sequence[CheckpointedGroup]) -> None:
        """Delete the files of a failed checkpoint to free disk space. Best effort."""
        for part in parts:
            # Parts may still be writing. The first error is already being raised; ignore later ones.
            with suppress(RunError, UserError):
                await part.finish_save()
        with suppress(OSError):
            await _to_end(self._store.recover)


async def _to_end(function: Callable[..., T], *args: Any) -> T:
    """Call `function` in a thread, and wait for its end also if cancelled: a run that goes back cleans up the same folder."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):  # It may be cancelled again.
                await asyncio.wait({work})
        raise


@contextmanager
def _one_sentence(checkpoint: Path) -> Iterator[None]:
    """Turn an OSError of the body into a RunError that names the checkpoint."""
    try:
        yield
    except OSError as problem:
        raise disk_error(problem, checkpoint) from problem
