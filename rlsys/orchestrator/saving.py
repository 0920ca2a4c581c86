"""Writes a run's checkpoints, one at a time, while training goes on.

`begin` returns as soon as every group has a copy of what it saves; the checkpoint is published, and older
ones are pruned, once everything of it is written: by `settle`, which waits for that beside the training, or by
`finish`. A write that fails raises RunError, once; that checkpoint is never published, what was written of it is deleted
once nobody writes to it any more, and those before it stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlsys.errors import RunError, UserError
from rlsys.weights.checkpoint.store import CheckpointStore, Keep

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at whether all is written."""


class Saves(Protocol):
    """A group of processes, or what it keeps, as a part of a checkpoint."""

    async def begin_save(self, folder: Path) -> None:
        """Copy what is to be saved, and begin to write it to the new folder `folder`."""

    async def saving(self) -> bool:
        """Whether it is still being written."""

    async def finish_save(self) -> None:
        """Wait until it is written. Raises RunError if that failed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    parts: Sequence[Saves]


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(
        self,
        store: CheckpointStore,
        keep: Keep,
        score_of: Callable[[int], float | None],
        need: Callable[[str], Awaitable[None]],
        background: bool,
        newest: Path | None = None,
    ) -> None:
        """`score_of` a step says which checkpoint is best; `need` brings a group onto its devices; `newest` is the
        checkpoint that a resumed run goes on from."""
        self._store, self._keep, self._score_of = store, keep, score_of
        self._need, self._background = need, background
        self.newest = newest
        """The checkpoint that was published last."""
        self.awaited: set[int] = set()
        """Steps whose scores are still to come: whether their checkpoints are the best is not known."""
        self._pending: _Pending | None = None
        self._finishing = asyncio.Lock()

    async def begin(
        self, step: int, write_data: Callable[[Path], None], parts: Mapping[str, tuple[str, Saves]]
    ) -> None:
        """Begin the checkpoint of `step`, once the one before is published.

        `write_data` writes the driver's own part; `parts` are by the name of their folder, each with its group's.
        """
        await self.finish()
        begun: list[Saves] = []
        try:
            with _one_sentence(self._store.path(step)):
                folder = await asyncio.to_thread(self._store.begin, step)
                await asyncio.to_thread(write_data, folder)
            for name, (group, part) in parts.items():
                await self._need(group)
                begun.append(part)
                await part.begin_save(folder / name)
        except (RunError, UserError):
            await self._give_up(begun)
            raise
        self._pending = _Pending(step, begun)
        if not self._background:
            await self.finish()

    async def settle(self) -> None:
        """Publish what is being written now as soon as it is, without keeping the groups from their work."""
        mine = self._pending
        while mine and self._pending is mine:
            if not any([await part.saving() for part in mine.parts]):
                await self._finish(mine)
                return
            await asyncio.sleep(LOOK_S)

    async def finish(self) -> None:
        """Wait for what is being written, and publish it."""
        await self._finish(self._pending)

    async def _finish(self, pending: _Pending | None) -> None:
        async with self._finishing:
            if pending is None or self._pending is not pending:
                return
            try:
                for part in pending.parts:
                    await part.finish_save()
                with _one_sentence(self._store.path(pending.step)):
                    self.newest = await asyncio.to_thread(self._store.publish, pending.step)
            except (RunError, UserError):
                await self._give_up(pending.parts)
                raise
            finally:
                # Also where it failed: a part that is asked again may well have nothing more to complain of.
                self._pending = None
            try:
                await asyncio.to_thread(self._store.prune, self._keep, self._score_of, frozenset(self.awaited))
            except OSError as problem:
                logger.warning("Older checkpoints could not be deleted (%s); they stay.", problem)

    async def _give_up(self, parts: Sequence[Saves]) -> None:
        """Delete what was written of a checkpoint that failed, so that a full disk has room again."""
        for part in parts:
            # It may still be writing there. What it complains of now is not the first thing that went wrong.
            with suppress(RunError, UserError):
                await part.finish_save()
        with suppress(OSError):
            await asyncio.to_thread(self._store.recover)


@contextmanager
def _one_sentence(checkpoint: Path) -> Iterator[None]:
    """Say of a disk that is full or gone which checkpoint it has cost."""
    try:
        yield
    except OSError as problem:
        raise RunError(f"{checkpoint} could not be written: {problem.strerror or problem}.") from problem
