"""What runs on every machine for the launcher: it looks at the machine, serves searches, reads logs, and says how the run ended.

A plain object in a process of Ray's that takes up no device. It ends with the cluster, and its search server
with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.cluster.folders import rays_own
from rlsys.cluster.launch.ray_node import FOLDER_VARIABLE, Ending, tell_ending
from rlsys.cluster.preflight.finding import State
from rlsys.cluster.worker_group import GATHERED
from rlsys.errors import RunError
from rlsys.search.server_process import SearchServer, child_environment

MOST_BYTES = 4 * 1024**2
"""Of logs in one answer."""
_OWN, _RAY, _WORKERS = "node", "ray", "workers"
_RAYS_DEFAULT = Path("/tmp/ray")
_OF_THE_HEAD = ("search", "task.")
"""How the names of findings begin on what the first machine alone must have, or those that serve searches."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a log."""

    name: str
    """Of the log, relative to all of the machine's."""
    start: int
    """Of the piece in the log, in bytes."""
    data: bytes


class NodeAgent:
    """The launcher's hand on one machine."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rlsys-node-", dir=os.environ.get(FOLDER_VARIABLE)))
        self._server: SearchServer | None = None
        self._logs = {_OWN: self._folder, _RAY: _ray_logs()}

    def examine(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """What `rlsys doctor` with `arguments` finds wrong with this machine, of what it is to have of its own.

        Raises RunError if that ends otherwise than with findings, or takes longer.
        """
        command = [sys.executable, "-m", "rlsys.apps.cli.main", *arguments, "--json"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=child_environment(),
                timeout=timeout_s, check=False,
            )  # fmt: skip
            findings = json.loads(done.stdout)["findings"]
        except subprocess.TimeoutExpired:
            raise RunError(f"the preflight took longer than {timeout_s:.0f} s") from None
        except (ValueError, LookupError):
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise RunError(f"the preflight ended with status {done.returncode}: {''.join(last)}") from None
        return [
            f"{one['what']}: {one['found']}{' -> ' if one['fix'] else ''}{one['fix']}"
            for one in findings
            if one["state"] == State.wrong and not one["what"].startswith(_OF_THE_HEAD)
        ]

    def serve(self, index: str, host: str, port: int, topk: int, device: str, threads: int | None, token: str) -> str:
        """Start a search server that asks for `token`; its address. It may not answer yet.

        Raises UserError if the port is taken.
        """
        log = self._folder / "search.log"
        self._server = SearchServer(
            index, log, topk=topk, host=host, port=port, threads=threads, device=device, token=token
        )
        return self._server.url

    def await_server(self, timeout_s: float) -> None:
        """Return once the search server answers. Raises RunError if it dies or takes longer."""
        assert self._server is not None
        self._server.wait_healthy(timeout_s)

    def follow(self, logs: str) -> None:
        """Read the logs of the run's workers in `logs` too, unless that is the folder that the head has."""
        if not (Path(logs) / GATHERED).is_dir():
            self._logs[_WORKERS] = Path(logs)

    def read(self, since: Mapping[str, int], most_bytes: int = MOST_BYTES) -> list[Piece]:
        """What has been written to the logs beyond the bytes `since` of each; a little at a time, empty in the end."""
        pieces = []
        for name, file in self._files():
            if most_bytes <= 0:
                break
            start = since.get(name, 0)
            try:
                size = file.stat().st_size
                if size == start:
                    continue
                start = 0 if size < start else start  # It was begun anew.
                with file.open("rb") as log:
                    log.seek(start)
                    data = log.read(most_bytes)
            except OSError:
                continue  # Ray renames logs that have grown long.
            if data:
                pieces.append(Piece(name, start, data))
                most_bytes -= len(data)
        return pieces

    def close(self, status: int, sentence: str) -> None:
        """Let this machine's launcher know how the run ended, then end the search server, which takes a while."""
        if folder := os.environ.get(FOLDER_VARIABLE):
            tell_ending(Path(folder), Ending(status, sentence))
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _files(self) -> Sequence[tuple[str, Path]]:
        return [
            (f"{kind}/{file.relative_to(folder)}", file)
            for kind, folder in self._logs.items()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not file.is_symlink()
        ]


def _ray_logs() -> Path:
    """Of this machine's part of Ray."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return (rays_own(Path(folder)) if folder else _RAYS_DEFAULT) / "session_latest" / "logs"
