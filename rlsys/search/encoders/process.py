"""Encoders in processes of their own: one for a server's queries, several for a corpus.

A server's event loop and a model in one process would share the interpreter's lock. Invariants: whoever waits for a
worker that dies gets RunError, never a hang; a worker ends with its owner and with the parent process, however these end;
a pool has at most one chunk in flight per worker, so memory is bounded whatever the corpus, and its vectors equal those
of one process with one thread, bit by bit.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Floats, QueryEncoder
from rlsys.search.server_process import child_environment

if TYPE_CHECKING:
    from rlsys.search.encoders.encoder import Encoder

Chunk = tuple[int, list[str]]
"""Number of a chunk and its passages."""
_JOIN_S = 5.0
_ANSWER_S = 300.0
"""The longest that a batch of queries may take: of long queries, with a large model on few cores."""
_WARM_UP = (1, 16, 64)
"""Texts of the first batches: libraries prepare themselves for a size when they first meet it."""
_log = logging.getLogger("uvicorn.error")


def open_encoder(spec: EncoderSpec, *, own_process: bool = False) -> QueryEncoder:
    """The encoder of `spec`, in this process or in one of its own. Raises as `Encoder.load` does."""
    return EncoderProcess(spec) if own_process else _load(spec)


def _load(spec: EncoderSpec) -> Encoder:
    from rlsys.search.encoders.encoder import Encoder  # torch, which a process without a model of its own does not need

    return Encoder.load(**asdict(spec))


class EncoderWorker:
    """A started process that loads the encoder of `spec`, with one thread of torch on a CPU if `one_thread`. The first
    answer to `take` is its `EncoderFacts`.
    """

    def __init__(self, spec: EncoderSpec, *, one_thread: bool) -> None:
        self.pipe, there = multiprocessing.Pipe()
        command = [sys.executable, "-m", "rlsys.search.encoders.process", str(there.fileno())]
        # No process of multiprocessing: such a one imports the main module of whoever uses an encoder.
        # SIGINT is kept from it: on Ctrl-C the parent decides what becomes of workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], env=child_environment(), stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        self.pipe.send((spec, one_thread))

    def give(self, number: int, texts: Sequence[str], *, queries: bool) -> None:
        """Send queries, or passages; the answer is (number, vectors). Raises RunError if the worker has died."""
        try:
            self.pipe.send((number, texts, queries))
        except OSError:
            raise self._died() from None

    def take(self, timeout_s: float | None = None) -> Any:
        """The next answer. Raises what the worker met, RunError if it has died or took longer than `timeout_s`."""
        try:
            if timeout_s is not None and not self.pipe.poll(timeout_s):
                self._process.kill()
            answer = self.pipe.recv()
        except (EOFError, OSError):  # the latter in the midst of an answer
            raise self._died() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def terminate(self) -> None:
        """Ask it to end, whatever it is doing; `close` waits for that."""
        self.pipe.close()
        self._process.terminate()

    def close(self) -> None:
        """End it. May be called again."""
        self.terminate()
        self._wait()

    def _wait(self) -> int:
        """The exit status, once it has ended, if need be by force."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_JOIN_S)
        self._process.kill()
        return self._process.wait()

    def _died(self) -> RunError:
        died = f"encoding worker {self._process.pid} died (exit code {self._wait()})"
        return RunError(f"{died}: if memory was short, take fewer workers or a smaller model")


class EncoderProcess:
    """A `QueryEncoder` in a process of its own, replaced once by another with the same texts if it dies or hangs."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._worker: EncoderWorker | None = None
        self.facts = self._start()

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`. Raises RunError if two processes die of it."""
        try:
            return self._encode(texts)
        except RunError as error:
            _log.warning("%s; it is started again", error)
        return self._encode(texts)

    def close(self) -> None:
        """End the process. May be called again."""
        worker, self._worker = self._worker, None  # Another thread may be starting one meanwhile.
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
    """Encodes chunks of passages in `workers` processes of one thread, over all GPUs; with one, in this process."""

    def __init__(self, spec: EncoderSpec, workers: int) -> None:
        if workers < 1:
            raise UserError(f"workers {workers} is out of range: give 1 or more.", code="out_of_range", key="workers")
        devices = _devices(spec.device)
        self.devices = [devices[rank % len(devices)] for rank in range(workers)]
        """The device of each worker."""
        self._spec = spec
        self._encoder: Encoder | None = None
        self._workers: list[EncoderWorker] = []

    def __enter__(self) -> EncoderPool:
        """Load the encoders. Raises UserError as `Encoder.load` does."""
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
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._encoder = None

    def map(self, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Floats]]:
        """The number of each chunk with its vectors, as they are done. Raises RunError when a worker dies or fails.

        One map at a time; the pool is of no further use after one that was not followed to its end.
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
                # The worker gets its next chunk before the caller gets this one, so that it need not wait.
                occupy(worker)
                yield done


def _devices(device: str) -> list[str]:
    if device != "cuda":
        return [device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or [device]


def _work(pipe: Connection) -> None:
    """Run a worker: a spec in, facts out, then texts in and vectors out, until the other end of the pipe is closed."""
    import torch
    import transformers

    with suppress(EOFError, OSError):  # the owner is gone
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
