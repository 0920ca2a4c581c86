"""Follows a run's folder as it grows: keeps its model until files change, and tells what has changed.

Contract: a model is built only when somebody asks for it, once for all who ask, and no more than a tenth of the time goes
into building: the run has the same machine. What is handed out may thus be a little old; `version` is then that of a
later one only once that can be had.
Everything here reads files and may take its time: call it from threads, `data` from no more than one at a time, as all
others that call it wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.observe.kept import TRAJECTORIES
from rlsys.observe.records import METRICS, SUMMARY, TIMELINE
from rlsys.observe.run_folder import CONFIG, EVALUATIONS, MEASURED, RunFolder, open_run
from rlsys.observe.status import FAILED, read_status
from rlsys.report.life import Phase, RunLife, life_here
from rlsys.report.report_page import compressed
from rlsys.report.run_model import Memory, read_chunk
from rlsys.report.watch.exposition import exposition

REST = 9  # Times as long as a model took to build, it is good for at least
_FILES = (CONFIG, METRICS, TIMELINE, SUMMARY)
_PATTERNS = (f"{EVALUATIONS}/*.json*", f"{TRAJECTORIES}/*.json*", MEASURED)

Stamp = tuple[Phase, tuple[tuple[str, int, int], ...]]
"""How far the run is, and (path, bytes, ns of the last change) of each file that a model is made of."""


@dataclass(frozen=True, slots=True)
class _Built:
    """A model, and what it was made of."""

    stamp: Stamp
    run: RunFolder
    model: dict[str, Any]
    body: bytes  # The model as JSON in gzip
    good_until: float


class LiveRun:
    """The run in `path`; everything may be called from several threads."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UserError if it is no run."""
        self.path = path
        self.name = open_run(path).name
        self._clock = clock
        self._building = threading.Lock()
        self._built: _Built | None = None
        self._memory = Memory()

    def data(self) -> bytes:
        """The model as JSON in gzip. Raises UserError if the folder is gone."""
        return self._current().body

    def chunk(self, number: int) -> bytes | None:
        """Part `number` of what the model only counts, as JSON in gzip; None if the model handed out last has none."""
        built = self._built or self._current()
        found = read_chunk([built.run], built.model, number)
        return None if found is None else compressed(found)

    @property
    def is_built(self) -> bool:
        """Whether some model was handed out."""
        return self._built is not None

    def known(self) -> Stamp:
        """The version of the model that was handed out last; that of the next one if there is none."""
        return self._built.stamp if self._built else self.version()

    def version(self) -> Stamp:
        """Tells what `data` gives now from what it gave, or will give."""
        built = self._built
        return built.stamp if built and self._clock() < built.good_until else self._stamp()

    def status(self) -> dict[str, Any] | None:
        """What the run does, and how it ended, also where it could not say so itself; None if it has not said anything."""
        return _with_end(read_status(self.path), self._life())

    def metrics(self) -> bytes:
        """For Prometheus. Raises UserError if the folder is gone."""
        return exposition(open_run(self.path), self._life(), time.time())

    def _life(self) -> RunLife:
        return life_here(read_status(self.path), (self.path / SUMMARY).is_file())

    def _current(self) -> _Built:
        with self._building:
            if self._built is None or self._built.stamp != self.version():
                self._built = self._build()
            return self._built

    def _build(self) -> _Built:
        begun, stamp, life, run = self._clock(), self._stamp(), self._life(), open_run(self.path)
        run = replace(run, status=_with_end(run.status, life))
        # The audit asks the tokenizer for every text: once, when all are there.
        model = self._memory.build(run, audited=life.phase is not Phase.running)
        body = compressed(model)
        now = self._clock()
        return _Built(stamp, run, model, body, now + REST * (now - begun))

    def _stamp(self) -> Stamp:
        files = [self.path / name for name in _FILES]
        for pattern in _PATTERNS:
            files += sorted(file for file in self.path.glob(pattern) if file.suffix != ".part")
        stamps = []
        for file in files:
            with suppress(OSError):
                stat = file.stat()
                stamps.append((str(file), stat.st_size, stat.st_mtime_ns))
        return self._life().phase, tuple(stamps)


def _with_end(status: dict[str, Any] | None, life: RunLife) -> dict[str, Any] | None:
    """`status` with the end that the run's process could not write."""
    if life.phase is not Phase.gone or status is None:
        return status
    return {**status, "ended": f"{FAILED}its process was killed"}
