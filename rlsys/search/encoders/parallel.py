"""A corpus encoded by several processes at once.

Invariants: at most one chunk is in flight per worker, so memory is bounded whatever the corpus; a worker that
dies ends the work with RunError, never a hang; vectors equal those of one process with one thread, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlsys.errors import UserError
from rlsys.search.encoders.spec import EncoderSpec, Floats
from rlsys.search.encoders.worker import EncoderWorker, Task

if TYPE_CHECKING:
    from rlsys.search.encoders.encoder import Encoder

Chunk = tuple[int, list[str]]
"""Number of a chunk and its passages."""


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
        self._workers: list[EncoderWorker] = []

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        return [spec.device for spec in self._specs]

    def __enter__(self) -> EncoderPool:
        """Load the encoders. Raises UserError as `Encoder.load` does."""
        if len(self._specs) == 1:
            self._encoder = self._specs[0].load()
            return self
        try:
            for spec in self._specs:
                self._workers.append(EncoderWorker(spec, one_thread=True))
            for worker in self._workers:
                worker.take()
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
            worker.terminate()
        for worker in self._workers:
            worker.close()
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
        busy: dict[Any, EncoderWorker] = {}
        for worker in self._workers:
            _give(worker, waiting, busy)
        while busy:
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)
                done: tuple[int, Floats] = worker.take()
                # The worker gets its next chunk before the caller gets this one, so that it need not wait.
                _give(worker, waiting, busy)
                yield done


def _give(worker: EncoderWorker, waiting: Iterator[Chunk], busy: dict[Any, EncoderWorker]) -> None:
    chunk = next(waiting, None)
    if chunk is not None:
        number, texts = chunk
        worker.give(Task(number, texts, queries=False))
        busy[worker.pipe] = worker


def _devices(device: str) -> list[str]:
    if device != "cuda":
        return [device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or [device]
