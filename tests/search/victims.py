"""The servers of rlsys as processes under attack: `python -m tests.search.victims search PORT` is one of them.

`attacked` runs one, and its `Victim` measures what an attack costs it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import httpx
import psutil

from rlsys.search.address import bind
from tests.support.ports import free_port

MOST_BYTES = 100_000_000
"""Bytes that an attack sends, unless the server hangs up."""
FULL = "WITH_RERANKER_AND_PAGES"
"""Environment variable of a search server that has them."""
FILES = "MOST_OPEN_FILES"
"""Environment variable of a server that may open no more."""
_END_S = 120


@dataclass(frozen=True)
class Cost:
    """Resources that an attack took from a server."""

    memory_mb: float
    """Growth of its memory at its worst moment."""
    cpu_s: float
    worst_health_cpu_s: float
    """CPU time that it spent while one GET waited: its event loop stood still for no more than that."""
    answer: bytes


class Victim:
    """A server in a process of its own, at `url`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, health: str) -> None:
        self._process = psutil.Process(process.pid)
        self.port = int(url.rpartition(":")[2])
        self._health = url + health
        # Each time a new connection, as somebody has who comes during the attack.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(trust_env=False, timeout=_END_S, limits=fresh)
        while True:
            assert process.poll() is None
            with suppress(httpx.TransportError):
                if self._client.get(self._health).status_code == 200:
                    return
            sleep(0.02)

    def cpu_s(self) -> float:
        """CPU time so far."""
        times = self._process.cpu_times()
        return times.user + times.system

    def health(self) -> float:
        """CPU time that the process spends until it answers a GET."""
        began = self.cpu_s()
        assert self._client.get(self._health).status_code == 200
        return self.cpu_s() - began

    def suffer(self, attack: Callable[[], Iterator[bytes]], connections: int = 1) -> Cost:
        """The cost of an attack, which is sent over and over again in so many connections at once."""
        self.health()
        proc = Path(f"/proc/{self._process.pid}")
        (proc / "clear_refs").write_text("5")  # Its peak of memory is now what it has.
        memory, cpu_s = _peak_mb(proc), self.cpu_s()
        answers: list[bytes] = []
        over = threading.Event()

        def strike() -> None:
            try:
                answers.extend(_send(self.port, attack, connections))
            finally:
                over.set()

        thread = threading.Thread(target=strike)
        thread.start()
        waits = [self.health()]
        while not over.wait(0.02):
            waits.append(self.health())
        thread.join()
        waits.append(self.health())
        return Cost(_peak_mb(proc) - memory, self.cpu_s() - cpu_s, max(waits), b"".join(answers)[:2000])


def _peak_mb(proc: Path) -> float:
    (line,) = (line for line in (proc / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def _send(port: int, attack: Callable[[], Iterator[bytes]], connections: int) -> Iterator[bytes]:
    """The answer to an attack in each of so many connections, which together send `MOST_BYTES`."""
    share = MOST_BYTES // connections
    opened = [socket.create_connection(("127.0.0.1", port), timeout=_END_S) for _ in range(connections)]
    try:
        for sock in opened:
            sent = 0
            with suppress(OSError):
                for piece in attack():
                    sock.sendall(piece)
                    sent += len(piece)
                    if sent >= share:
                        # The server waits for more: it is told that none comes.
                        sock.shutdown(socket.SHUT_WR)
                        break
        for sock in opened:
            with suppress(OSError):
                yield sock.recv(1000)
    finally:
        for sock in opened:
            sock.close()


@contextmanager
def attacked(kind: str, health: str, **environment: str) -> Iterator[Victim]:
    """A victim of a kind that this module runs."""
    port = free_port()
    command = [sys.executable, "-m", "tests.search.victims", kind, str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | environment) as process:
        try:
            yield Victim(process, f"http://127.0.0.1:{port}", health)
        finally:
            process.kill()


def run_search(port: int) -> None:
    """A search server, with a reranker, pages and a token where the environment says so."""
    from rlsys.search.server.command import Parts, read_token, serve_parts
    from tests.search.gated import Gated, Lengths, Pages

    serve_parts(
        lambda: Parts(Gated(), Lengths(), Pages()) if FULL in os.environ else Parts(Gated()),
        name="victim",
        port=port,
        token=read_token(None),
    )


def run_chat(port: int) -> None:
    """The page to ask from, over a scripted conversation."""
    from rlsys.apps.chat.web import serve
    from tests.apps.chat.pages import opened
    from tests.apps.chat.scripted import ANSWERS, Script, Shelf, codec

    with bind("127.0.0.1", port) as sock:
        asyncio.run(serve(opened(Script(codec(), (ANSWERS,)), Shelf()), sock, "127.0.0.1"))


def run_watch(port: int) -> None:
    """The live page of a run that has just begun."""
    import tempfile

    from rlsys.report.watch import serve_run
    from tests.support.growing_run import write_run

    with tempfile.TemporaryDirectory() as folder:
        serve_run(write_run(Path(folder) / "run"), "127.0.0.1", port, lambda _: None)


RUN: Mapping[str, Callable[[int], None]] = {
    "search": run_search,
    "chat": run_chat,
    "watch": run_watch,
}

if __name__ == "__main__":
    if FILES in os.environ:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ[FILES]),) * 2)
    RUN[sys.argv[1]](int(sys.argv[2]))
