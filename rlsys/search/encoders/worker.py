"""An encoder in a process of its own, and the pipe to it.

Invariants: whoever waits for a worker that dies gets RunError, never a hang; a worker ends with its owner and with
the parent process, however these end.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.server_process import child_environment

_JOIN_S = 5.0


class Task(NamedTuple):
    """What a worker is to do; it answers (number, vectors)."""

    number: int
    texts: Sequence[str]
    queries: bool
    """Whether the texts are queries, not passages."""


class EncoderWorker:
    """A started process that loads the encoder of `spec`. The first answer to `take` is its `EncoderFacts`.

    `one_thread` bounds torch on a CPU, for one of many workers; otherwise the environment says how many it takes.
    """

    def __init__(self, spec: EncoderSpec, *, one_thread: bool) -> None:
        self.pipe, there = multiprocessing.Pipe()
        command = [sys.executable, "-m", "rlsys.search.encoders.worker", str(there.fileno())]
        # No process of multiprocessing: such a one imports the main module of whoever uses an encoder.
        with _interrupts_blocked():
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], env=child_environment(), stdin=subprocess.DEVNULL
            )
        there.close()
        self.pipe.send((spec, one_thread))

    def give(self, task: Task) -> None:
        """Send a task. Raises RunError if the worker has died."""
        try:
            self.pipe.send(task)
        except OSError:
            raise self._died() from None

    def take(self, timeout_s: float | None = None) -> Any:
        """Wait for the next answer. Raises UserError or RunError that the worker met, RunError if it has died.

        With `timeout_s` a worker that gives no answer for so long is ended, and counts as dead.
        """
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
        self._ended()

    def _ended(self) -> int:
        """Its exit status, once it has ended, if need be by force."""
        try:
            return self._process.wait(_JOIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _died(self) -> RunError:
        return RunError(
            f"encoding worker {self._process.pid} died (exit code {self._ended()}): "
            "if memory was short, take fewer workers or a smaller model"
        )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is started meanwhile never sees SIGINT.

    Ctrl-C reaches the whole process group; the parent decides what becomes of its workers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(pipe: Connection) -> None:
    """The process: a spec in, facts out, then tasks in and vectors out, until the other end of the pipe is closed."""
    import torch
    import transformers

    with suppress(EOFError, OSError):  # the owner is gone
        spec, one_thread = pipe.recv()
        if one_thread and spec.device == "cpu":
            torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        try:
            encoder = spec.load()
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
    work(Connection(int(sys.argv[1])))
