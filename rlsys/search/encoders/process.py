"""Runs encoders in subprocesses: one for a server's queries, several to encode a corpus.

A separate process keeps the model from holding the GIL of the server's event loop. Invariants: a caller waiting for a
worker that dies gets RunError and never hangs; a worker ends with its owner and with the parent process, even after
SIGKILL; a pool has at most one chunk in flight per worker, so memory is bounded for any corpus; the vectors of a pool
are bit-identical to the vectors of one process with one thread.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Floats, QueryEncoder
from rlsys.search.server_process import child_with_pipe

if TYPE_CHECKING:
    from rlsys.search.encoders.encoder import Encoder

Chunk = tuple[int, list[str]]
"""Chunk number and passages."""
_JOIN_S = 5.0
_ANSWER_S = 300.0
"""Timeout of a query batch; allows long queries with a large model on few cores."""
_WARM_UP = (1, 16, 64)
"""Sizes of the warm-up batches; libraries initialise themselves for each new size."""
_log = logging.getLogger("uvicorn.error")


def open_encoder(spec: EncoderSpec, *, own_process: bool = False) -> QueryEncoder:
    """Load the encoder of `spec`, in this process or a subprocess. Raises like `Encoder.load`."""
    return EncoderProcess(spec) if own_process else _load(spec)


def _load(spec: EncoderSpec) -> Encoder:
    from rlsys.search.encoders.encoder import Encoder  # imports torch; needed only by processes that run a model

    return Encoder.load(**asdict(spec))


class EncoderWorker:
    """A subprocess that loads the encoder of `spec` and encodes batches in order.

    With `one_thread`, torch uses one CPU thread. The first `take` returns the `EncoderFacts`.
    """

    def __init__(self, spec: EncoderSpec, *, one_thread: bool) -> None:
        self._process, self.pipe = child_with_pipe("rlsys.search.encoders.process")
        self.pipe.send((spec, one_thread))

    def give(self, number: int, texts: Sequence[str], *, queries: bool) -> None:
        """Send queries or passages; `take` then returns (number, vectors). Raises RunError if the worker has died."""
        try:
            self.pipe.send((number, texts, queries))
        except OSError:
            raise self._died() from None

    def take(self, timeout_s: float | None = None) -> Any:
        """Return the next result. Raises the worker's error, or RunError if it died or exceeded `timeout_s`."""
        try:
            if timeout_s is not None and not self.pipe.poll(timeout_s):
                self._process.kill()
            answer = self.pipe.recv()
        except (EOFError, OSError):  # OSError in the middle of a result
            raise self._died() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def terminate(self) -> None:
        """Send SIGTERM without waiting for the end; `close` waits."""
        self.pipe.close()
        self._process.terminate()

    def close(self) -> None:
        """Stop the worker and wait for its end. Idempotent."""
        self.terminate()
        self._wait()

    def _wait(self) -> int:
        """Wait for the process to end, kill it after `_JOIN_S`, and return its exit status."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_JOIN_S)
        self._process.kill()
        return self._process.wait()

    def _died(self) -> RunError:
        died = f"encoding worker {self._process.pid} died (exit code {self._wait()})"
        return RunError(f"{died}: if memory was short, take fewer workers or a smaller model")


class EncoderProcess:
    """A `QueryEncoder` in a subprocess. If it dies or hangs, a new subprocess retries the batch once."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._worker: EncoderWorker | None = None
        self.facts = self._start()

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """Return vectors [n, dimension], row i for `texts[i]`. Raises RunError if the retry fails too."""
        try:
            return self._encode(texts)
        except RunError as error:
            _log.warning("%s; restarting it", error)
        return self._encode(texts)

    def close(self) -> None:
        """Stop the subprocess. Idempotent."""
        worker, self._worker = self._worker, None  # another thread may start a new worker meanwhile
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
            self._worker.give(0, list(texts), queries=True)
            vectors: Floats = self._worker.take(_ANSWER_S)[1]
        except RunError:
            self.close()
            raise
        return vectors


class EncoderPool:
    """Encodes passage chunks in `workers` single-threaded subprocesses, spread over all GPUs.

    With one worker, the encoder runs in this process, without a subprocess.
    """

    def __init__(self, spec: EncoderSpec, workers: int) -> None:
        if workers < 1:
            raise UserError(f"workers {workers} is out of range: give 1 or more.", code="out_of_range", key="workers")
        devices = _devices(spec.device)
        self.devices = [devices[rank % len(devices)] for rank in range(workers)]
        """Device of each worker."""
        self._spec = spec
        self._encoder: Encoder | None = None
        self._workers: list[EncoderWorker] = []

    def __enter__(self) -> EncoderPool:
        """Load the encoders. Raises UserError like `Encoder.load`."""
        specs = [replace(self._spec, device=device) for device in self.devices]
        if len(specs) == 1:
            self._encoder = _load(specs[0])
            return self
        try:
            for spec in specs:
                self._workers.append(EncoderWorker(spec, one_thread=True))
            for worker in self._workers:
                worker.take()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, even in the middle of a chunk."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._encoder = None

    def map(self, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Floats]]:
        """Yield chunk numbers with vectors in order of completion. Raises RunError when a worker dies or fails.

        Run one `map` at a time and consume it to the end; after an abandoned `map` the pool is unusable.
        """
        if self._encoder is not None:
            for number, texts in chunks:
                yield number, self._encoder.encode_passages(texts)
            return
        waiting = iter(chunks)
        busy: dict[Any, EncoderWorker] = {}

        def occupy(worker: EncoderWorker) -> None:
            if (chunk := next(waiting, None)) is not None:
                worker.give(*chunk, queries=False)
                busy[worker.pipe] = worker

        for worker in self._workers:
            occupy(worker)
        while busy:
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)
                done: tuple[int, Floats] = worker.take()
                # The worker gets its next chunk before the caller gets this one, so it never idles.
                occupy(worker)
                yield done


def _devices(device: str) -> list[str]:
    if device != "cuda":
        return [device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or [device]


def _work(pipe: Connection) -> None:
    """Run a worker until the pipe closes: receive a spec, send facts, then receive texts and send vectors."""
    import torch
    import transformers

    with suppress(EOFError, OSError):  # the owner has exited
        spec, one_thread = pipe.recv()
        if one_thread and spec.device == "cpu":
            torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        try:
            encoder = _load(spec)
            pipe.send(encoder.facts)
            while True:
                number, texts, queries = pipe.recv()
                encode = encoder.encode_queries if queries else encoder.encode_passages
                pipe.send((number, encode(texts)))
        except UserError as error:
            pipe.send(error)
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            pipe.send(RunError(f"an encoding worker on {spec.device} failed: {type(error).__name__}: {error}"))


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
