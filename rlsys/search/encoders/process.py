"""An encoder for queries in a process of its own, so that a server's event loop takes no time from it.

In one process the two would share the interpreter's lock, which a model's forward pass takes and gives some
hundred times. A worker that dies, or gives no answer, is replaced once by another, which gets the same texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlsys.errors import RunError
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Floats
from rlsys.search.encoders.worker import EncoderWorker, Task

_ANSWER_S = 300.0
"""The longest that a batch may take: of long queries, with a large model on few cores."""
_WARM_UP = (1, 16, 64)
"""Texts of the first batches: libraries prepare themselves for a size when they first meet it."""
_log = logging.getLogger("uvicorn.error")


class EncoderProcess:
    """A started `spec.QueryEncoder`. Raises what `Encoder.load` raises, and RunError if the process dies."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._worker: EncoderWorker | None = None
        self.facts: EncoderFacts = self._start()

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`. Raises RunError if two processes die of it."""
        try:
            return self._encode(texts)
        except RunError as error:
            _log.warning("%s; it is started again", error)
        return self._encode(texts)

    def close(self) -> None:
        """End the process. May be called again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _start(self) -> EncoderFacts:
        self._worker = EncoderWorker(self._spec, one_thread=False)
        try:
            facts: EncoderFacts = self._worker.take()
            for count in _WARM_UP:
                self._encode(["Is anybody there?"] * count)
        except BaseException:
            self.close()
            raise
        return facts

    def _encode(self, texts: Sequence[str]) -> Floats:
        if self._worker is None:
            self._start()
        assert self._worker is not None
        try:
            self._worker.give(Task(0, list(texts), queries=True))
            _, vectors = self._worker.take(_ANSWER_S)
        except RunError:
            self.close()
            raise
        encoded: Floats = vectors
        return encoded
