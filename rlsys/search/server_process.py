"""Runs a search server as a child process.

Invariants: the parent binds the port and passes the socket on, so no other process can take the port in between; the
child ends when the parent ends, even by SIGKILL; `close` is idempotent and allowed at any time. `restart` keeps the
address, unless another process has taken the port since the child died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

import rlsys
from rlsys.errors import RunError
from rlsys.search.address import DEFAULT_HOST, DEFAULT_TOPK, TOKEN_VARIABLE, bind, url_of

_POLL_S = 0.1
_HEALTH_S = 2.0
_TERMINATE_S = 10.0
_LOG_LINES = 15


class SearchServer(AbstractContextManager["SearchServer"]):
    """Handle of a `python -m rlsys.search.server` process, which runs from construction to `close`.

    Args:
        log: File that the server's output is appended to.
        topk: Default for requests without `topk`.
        threads: Threads of the encoder and the index (OMP_NUM_THREADS).
        encoder: Encoder of the queries, if it differs from the encoder recorded in the index.
        kind: Kind of an index that is from outside of rlsys: its code is run.
        pages: File of the pages that the server opens.
        token: Bearer token; None inherits the token of this process's environment, if any.
        options: Further command-line arguments.
    """

    def __init__(
        self,
        index: str | Path,
        log: str | Path,
        *,
        topk: int = DEFAULT_TOPK,
        host: str = DEFAULT_HOST,
        port: int = 0,
        threads: int | None = None,
        encoder: str | None = None,
        device: str | None = None,
        kind: str | None = None,
        pages: str | None = None,
        token: str | None = None,
        options: Sequence[str] = (),
    ) -> None:
        words = ["rlsys.search.server", str(index), "--topk", str(topk), "--host", host]
        words += ["--device", device] if device else []
        words += ["--encoder", encoder] if encoder else []
        words += ["--kind", kind] if kind else []
        words += ["--pages", pages] if pages else []
        words += ["--threads", str(threads)] if threads is not None else []
        # Some libraries read the number of threads when the process starts, others get the flag.
        environment = child_environment(threads) | ({TOKEN_VARIABLE: token} if token else {})
        self._start([*words, *options], log, host, port, environment)

    def _start(self, words: Sequence[str], log: str | Path, host: str, port: int, environment: dict[str, str]) -> None:
        """Start `python -m *words`, with the listening socket and the parent's process id as further arguments."""
        self.log = Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._words, self._host, self._environment = words, host, environment
        # One client for all checks, because each new one loads certificates, which takes 30 ms of CPU. It keeps no
        # connection, so every check shows that the server still accepts one, and there is nothing to close.
        self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._launch(port)

    def _launch(self, port: int) -> None:
        with bind(self._host, port) as sock, self.log.open("ab") as output:
            # The connections of a listening socket inherit SO_REUSEADDR. Without it, those of a dead server would block
            # the port for a minute. It is set late, because a port that the system selects must not be shared before.
            sock.listen()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port = int(sock.getsockname()[1])
            self.url = url_of(self._host, self._port)
            told = ["--listener-fd", str(sock.fileno()), "--parent-pid", str(os.getpid())]
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            command = [sys.executable, "-m", *self._words, *told]
            kept: dict[str, Any] = {"env": self._environment, "pass_fds": [sock.fileno()], "process_group": 0}
            self._process = subprocess.Popen(command, **streams, **kept)
            self._reaped = False
            """True once `restart` has killed the process: then its id may belong to another one."""

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group."""
        return self._process.pid

    def wait_healthy(self, timeout_s: float) -> None:
        """Block until the server is healthy. Raises RunError with the end of its log if it exits or times out."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.is_healthy(_HEALTH_S):
                return
            time.sleep(_POLL_S)
        raise RunError(f"the search server did not answer within {timeout_s:g} s; {self._log_tail()}")

    def is_healthy(self, timeout_s: float) -> bool:
        """Return True if the server answers /health. Raises RunError with the end of its log if it has exited."""
        if (status := self._process.poll()) is not None:
            raise RunError(f"the search server ended with status {status}; {self._log_tail()}")
        with (
            suppress(httpx.TransportError),
            self._http.stream("GET", f"{self.url}/health", timeout=timeout_s) as answer,  # leaves the body unread
        ):
            return answer.status_code == httpx.codes.OK
        return False

    def restart(self) -> None:
        """Kill the process, if it lives, and start another one at the same address with the same arguments.

        It may be starting up on return. Raises UserError if another process has taken the port.
        """
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reaped = True
        self._launch(self._port)

    def close(self) -> None:
        """Stop the server and wait for its end: SIGTERM, then SIGKILL to its process group."""
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return f"its log {self.log} ends with:\n" + "\n".join(lines) if lines else f"its log {self.log} is empty"


def child_with_pipe(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start `python -m module`, whose argument is the file descriptor of its end of a pipe; return child and own end.

    It is no multiprocessing process, because that would import the caller's main module. SIGINT is blocked in the child:
    on Ctrl-C, the parent ends it.
    """
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-m", module, str(there.fileno())]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        child = subprocess.Popen(command, pass_fds=[there.fileno()], env=child_environment(), stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
    return child, here


def child_environment(threads: int | None = None) -> dict[str, str]:
    """Return an environment in which a child process imports this copy of rlsys, installed or not."""
    root = str(Path(rlsys.__path__[0]).parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment
