"""Keeps the trajectories of a run's steps, one step at a time, in a thread of its own beside the training.

Contract: `begin` returns once the step before is on disk, `finish` once all are: so a checkpoint that is begun after it has
those of all its steps. They are a comfort: a disk that refuses them is warned of once, and no more of them are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rlsys.data.group import Group
from rlsys.observe.kept import keep, write_kept

_log = logging.getLogger(__name__)


class Keeper:
    """Writes `trajectories/` of one run."""

    def __init__(self, run_dir: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` gives the text of tokens, special ones too; it is called from another thread."""
        self._run_dir, self._decode = run_dir, decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._writing: Future[None] | None = None
        self._refused = False

    async def begin(self, step: int, groups: Sequence[Group], most: int | None) -> None:
        """Begin to keep at most `most` of the trained `groups` of `step`, None for all; see `keep`."""
        await self.finish()
        if most != 0 and not self._refused:
            self._writing = self._thread.submit(self._write, step, groups, most)

    async def finish(self) -> None:
        """Wait until what was begun is on disk. Raises ValueError for a sample without log-probs."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wrap_future(writing)

    def close(self) -> None:
        """Wait for what is being written; nothing may be begun afterwards. Idempotent."""
        self._thread.shutdown()

    def _write(self, step: int, groups: Sequence[Group], most: int | None) -> None:
        try:
            write_kept(self._run_dir, step, keep(groups, step, most, self._decode))
        except OSError as problem:
            self._refused = True
            _log.warning(
                "%s could not be written (%s): the run goes on and keeps no more trajectories.",
                problem.filename,
                problem.strerror,
            )
