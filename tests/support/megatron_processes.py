"""Starts Megatron processes over gloo, forked from a process that has imported Megatron.

A call blocks until all processes have answered. If one raises an exception, the test fails with the traceback of that
process, and all processes are killed, because the others may wait for it forever.
"""

import io
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest
import torch

from rlsys.config.schema import Device
from rlsys.trainer import mesh
from rlsys.trainer.mesh import Rendezvous
from tests.support.ports import free_port

PRELOADED = "tests.support.megatron_preloaded"
ANSWER_S = 600.0
COLLECTIVE_S = 120.0
MEETINGS = 8
"""Number of process groups that a function can form in sequence."""
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload([PRELOADED])


@dataclass(frozen=True)
class Host:
    """A process that executes calls."""

    process: BaseProcess
    pipe: Connection

    @property
    def name(self) -> str:
        return self.process.name

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Start `function(Shell, *args)` in the process."""
        self.pipe.send_bytes(pickle.dumps((function, args)))

    def answer(self) -> Any:
        """Result of the last call.

        Raises AssertionError with the call's traceback if it failed, and EOFError if the process has died.
        """
        well, result = torch.load(io.BytesIO(self.pipe.recv_bytes()), weights_only=False)
        assert well, result
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class _Process(ForkServerProcess):
    """Process forked from `_SERVER`, because SGLang's are forked from multiprocessing's own fork server."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:
        with mock.patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
            return popen_forkserver.Popen(process_obj)


class _Forks(ForkServerContext):
    Process = _Process


def forks() -> BaseContext:
    """Context that forks new processes from one that has imported Megatron and has no threads.

    A fork takes milliseconds, the import seconds. A forked process can itself fork others.
    """
    return multiprocessing.get_context("fork") if PRELOADED in sys.modules else _Forks()


def fork(count: int) -> list[Host]:
    context = forks()
    found = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        found.append(Host(process, ours))
    return found


@contextmanager
def fresh(count: int) -> Iterator[list[Host]]:
    """Fork `count` new processes that the caller may kill."""
    hosts = fork(count)
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()


_USED: list[Host] = []


def pool(count: int) -> list[Host]:
    """Fork `count` new processes, which live until the next call of `pool`.

    Processes are not used twice: gloo keeps the threads of process groups that a process has left, and some of them
    spin.
    """
    for host in _USED:
        host.kill()
    _USED[:] = fork(count)
    return list(_USED)


def ask(hosts: Sequence[Host], function: Callable[..., Any], arguments: Sequence[tuple]) -> list[Any]:
    """Call `function(Shell, *arguments[rank])` in each of `hosts`. Returns the results by rank."""
    for host, args in zip(hosts, arguments, strict=True):
        host.begin(function, *args)
    waiting, answers = {host.pipe: rank for rank, host in enumerate(hosts)}, {}
    try:
        while waiting:
            ready = wait(waiting, ANSWER_S)
            assert ready, f"No answer of the ranks {[*waiting.values()]} to {function.__name__} of {arguments[0][:1]}"
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                answers[rank] = hosts[rank].answer()
    except BaseException:
        for host in hosts:
            host.kill()
        raise
    return [answers[rank] for rank in range(len(hosts))]


class Shell:
    """Holds the worker of a process between calls."""

    worker: Any = None


def _serve(pipe: Connection) -> None:
    """Execute calls from `pipe` until its other end is closed."""
    # Without this check, a failed preload would only make every test slow.
    assert PRELOADED in sys.modules
    shell = Shell()
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, function(shell, *args)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - raised on the other side
            answer = False, traceback.format_exc()
        content = io.BytesIO()
        torch.save(answer, content)
        pipe.send_bytes(content.getbuffer())


@dataclass
class Group:
    """One process's view of all processes that run a function."""

    rank: int
    world: int
    ports: list[int]

    def meet(self) -> Rendezvous:
        """Leave the current process group. Returns the rendezvous of the next one."""
        mesh.stop()
        return rendezvous(self.rank, self.world, self.ports.pop(0))


def rendezvous(rank: int, world_size: int, port: int) -> Rendezvous:
    return Rendezvous(rank, world_size, "127.0.0.1", port, Device.cpu, COLLECTIVE_S)


def on_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call `function(Group, *args)` in each of `world` new processes. Returns the results by rank."""
    ports = [free_port() for _ in range(MEETINGS)]
    calls = [(function, Group(rank, world, list(ports)), args) for rank in range(world)]
    with fresh(world) as hosts:
        return ask(hosts, _on_rank, calls)


def _on_rank(_: Shell, function: Callable[..., Any], group: Group, args: tuple) -> Any:
    result = function(group, *args)
    mesh.stop()
    return result


class HostedGroup:
    """Stand-in for a WorkerGroup without Ray, with the methods that the driver's groups use."""

    def __init__(self, name: str, hosts: Sequence[Host]) -> None:
        self.name = name
        self.ranks = hosts
        self.finished = 0

    async def build(self, factory: Callable[..., Any], arguments: Sequence[tuple], timeout_s: float) -> None:  # noqa: ARG002
        ask(self.ranks, _build, [(factory, *args) for args in arguments])

    driver_host = "127.0.0.1"

    async def free_address(self, timeout_s: float) -> tuple[str, int]:  # noqa: ARG002
        return "127.0.0.1", free_port()

    async def call(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        return await self.call_each(method, [args] * len(self.ranks), timeout_s)

    async def call_each(self, method: str, arguments: Sequence[tuple], timeout_s: float = ANSWER_S) -> list[Any]:  # noqa: ARG002
        return ask(self.ranks, _call, [(method, *args) for args in arguments])

    def begin(self, method: str, *args: Any) -> None:
        """Start a call without waiting for its result."""
        for host in self.ranks:
            host.begin(_call, method, *args)


def _build(shell: Shell, factory: Callable[..., Any], *args: Any) -> None:
    shell.worker = factory(*args)


def _call(shell: Shell, method: str, *args: Any) -> Any:
    return getattr(shell.worker, method)(*args)
