"""Processes for Megatron workers that outlive a test, and groups of them that look like a WorkerGroup.

There is no Ray: a call blocks until it has been answered, and what it raises in a process fails it here, with that
process's traceback.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlsys.trainer import mesh
from tests.support.ports import free_port
from tests.trainer.harness import forks

ANSWER_S = 120.0


@dataclass(frozen=True)
class Hosted:
    """One process of a group."""

    name: str
    pipe: Connection


class HostedGroup:
    """As much of a WorkerGroup as the groups of the driver use."""

    def __init__(self, name: str, pipes: Sequence[Connection]) -> None:
        self.name = name
        self.ranks = [Hosted(f"{name} rank {number}", pipe) for number, pipe in enumerate(pipes)]

    async def build(self, factory: Callable[..., Any], arguments: Sequence[tuple], timeout_s: float) -> None:
        """See `WorkerGroup`. A process that has a worker leaves its group first."""
        self._ask(self.ranks, _BUILD, [(factory, *args) for args in arguments], timeout_s)

    async def free_address(self, timeout_s: float) -> tuple[str, int]:
        """See `WorkerGroup`."""
        return "127.0.0.1", self._ask(self.ranks[:1], _PORT, [()], timeout_s)[0]

    async def call(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """See `WorkerGroup`."""
        return self._ask(self.ranks, method, [args] * len(self.ranks), timeout_s)

    async def call_each(self, method: str, arguments: Sequence[tuple], timeout_s: float = ANSWER_S) -> list[Any]:
        """See `WorkerGroup`."""
        return self._ask(self.ranks, method, arguments, timeout_s)

    def _ask(self, ranks: Sequence[Hosted], method: str, arguments: Sequence[tuple], timeout_s: float) -> list[Any]:
        for rank, args in zip(ranks, arguments, strict=True):
            rank.pipe.send((method, args))
        answers = []
        for rank in ranks:
            assert rank.pipe.poll(timeout_s), f"{rank.name} does not answer {method}"
            well, answer = rank.pipe.recv()
            assert well, f"{rank.name} failed in {method}: {answer}"
            answers.append(answer)
        return answers


@contextmanager
def hosts(count: int) -> Iterator[list[Connection]]:
    """A pipe to each of `count` processes, which are gone at the end."""
    context = forks()
    pipes = [context.Pipe() for _ in range(count)]
    nursery = context.Process(target=_fork_all, args=(pipes,))
    nursery.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for ours, _ in pipes:
            ours.close()
        nursery.join()


_BUILD, _PORT = "build", "port"


def _fork_all(both_ends: list[tuple[Connection, Connection]]) -> None:
    """Fork a process for each pipe, and wait for them."""
    context, pipes = mp.get_context("fork"), [theirs for _, theirs in both_ends]
    for ours, _ in both_ends:  # A process that holds an end of its own would not see the other side close it.
        ours.close()
    children = [context.Process(target=_serve, args=(pipes, number)) for number in range(len(pipes))]
    for child in children:
        child.start()
    for pipe in pipes:
        pipe.close()
    for child in children:
        child.join()


def _serve(pipes: list[Connection], number: int) -> None:
    """Do what is asked for on one pipe until its other end is closed."""
    for pipe in pipes[:number] + pipes[number + 1 :]:
        pipe.close()
    shell = _Shell()
    while True:
        try:
            method, args = pipes[number].recv()
        except EOFError:
            return
        try:
            answer = shell.do(method, *args)
        except Exception:  # noqa: BLE001 - it is raised on the other side
            pipes[number].send((False, traceback.format_exc()))
        else:
            pipes[number].send((True, answer))


class _Shell:
    """Holds a worker."""

    _worker: Any = None

    def do(self, method: str, *args: Any) -> Any:
        if method == _PORT:
            return free_port()
        if method == _BUILD:
            factory, *rest = args
            mesh.stop()
            self._worker = factory(*rest)
            return None
        return getattr(self._worker, method)(*args)
