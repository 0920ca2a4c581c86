"""A corpus encoded by several processes at once.

Invariants: at most one chunk is in flight per worker, so memory is bounded whatever the corpus; a worker that
dies ends the work with RunError, never a hang; vectors equal those of one process with one thread, bit by bit.
Workers end with the pool, and with the parent process however it ends.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import transformers

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.encoder import Encoder, Floats

_JOIN_S = 5.0

Chunk = tuple[int, list[str]]
"""Number of a chunk and its passages."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """All that `Encoder.load` takes, to load one encoder in many processes."""

    name: str
    family: str = "auto"
    max_tokens: int = 256
    device: str = "cpu"
    dtype: str | None = None
    pooling: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    normalize: bool | None = None

    def load(self) -> Encoder:
        """See `Encoder.load`."""
        return Encoder.load(
            self.name,
            self.family,
            max_tokens=self.max_tokens,
            device=self.device,
            dtype=self.dtype,
            pooling=self.pooling,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            normalize=self.normalize,
        )


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection


class EncoderPool:
    """Encodes chunks of passages in `workers` processes; with one, in this process. A context manager.

    A worker runs one thread on a CPU. `devices` are dealt out to the workers in turn; without them, device
    `cuda` means every GPU and any other device is that of all workers.
    """

    def __init__(self, spec: EncoderSpec, workers: int = 1, devices: Sequence[str] = ()) -> None:
        if workers < 1:
            raise UserError(f"workers {workers} is out of range: give 1 or more")
        devices = devices or _devices(spec.device)
        self._specs = [replace(spec, device=devices[rank % len(devices)]) for rank in range(workers)]
        self._encoder: Encoder | None = None
        self._workers: list[_Worker] = []

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        return [spec.device for spec in self._specs]

    def __enter__(self) -> EncoderPool:
        """Load the encoders. Raises UserError as `Encoder.load` does."""
        if len(self._specs) == 1:
            self._encoder = self._specs[0].load()
            return self
        context = multiprocessing.get_context("spawn")
        try:
            for spec in self._specs:
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(spec, there), daemon=True)
                process.start()
                there.close()
                self._workers.append(_Worker(process, here))
            for worker in self._workers:
                _take(worker)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_JOIN_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        self._encoder = None

    def map(self, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Floats]]:
        """The number of each chunk with its vectors [passages, dimension], in the order in which they are done.

        Raises RunError when a worker dies or fails. One map at a time, and the pool is of no further use after
        a map that was not followed to its end.
        """
        if self._encoder is not None:
            for number, texts in chunks:
                yield number, self._encoder.encode_passages(texts)
            return
        waiting = iter(chunks)
        busy: dict[Any, _Worker] = {}
        for worker in self._workers:
            _give(worker, waiting, busy)
        while busy:
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)
                done: tuple[int, Floats] = _take(worker)
                # The worker gets its next chunk before the caller gets this one, so that it need not wait.
                _give(worker, waiting, busy)
                yield done


def _give(worker: _Worker, waiting: Iterator[Chunk], busy: dict[Any, _Worker]) -> None:
    chunk = next(waiting, None)
    if chunk is None:
        return
    try:
        worker.pipe.send(chunk)
    except (BrokenPipeError, ConnectionResetError):
        raise _died(worker) from None
    busy[worker.pipe] = worker


def _take(worker: _Worker) -> Any:
    """What the worker sent next; raises what it sent if that is an error."""
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _died(worker) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _died(worker: _Worker) -> RunError:
    worker.process.join(_JOIN_S)
    return RunError(
        f"encoding worker {worker.process.pid} died (exit code {worker.process.exitcode}): "
        "if memory was short, take fewer workers"
    )


def _devices(device: str) -> list[str]:
    count = torch.cuda.device_count() if device == "cuda" else 0
    return [f"cuda:{index}" for index in range(count)] or [device]


def _work(spec: EncoderSpec, pipe: Connection) -> None:
    """A worker process: chunks in, vectors out, until the parent's end of the pipe is closed."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers.utils.logging.disable_progress_bar()
    if spec.device == "cpu":
        torch.set_num_threads(1)
    try:
        encoder = spec.load()
        pipe.send(None)
        while True:
            number, texts = pipe.recv()
            pipe.send((number, encoder.encode_passages(texts)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        pipe.send(error)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        pipe.send(RunError(f"an encoding worker on {spec.device} failed: {type(error).__name__}: {error}"))
