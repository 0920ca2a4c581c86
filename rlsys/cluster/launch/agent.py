"""The launcher's hand on every machine, and the logs of all machines, brought together while they are written.

A `NodeAgent` is a plain object in a process of Ray's that takes up no device: it looks at the machine, serves searches,
reads logs, and says how the run ended. It ends with the cluster, and its search server with it. `GatheredLogs` copies
what agents read into one folder of the launch, `<folder>/<rank>/...`: a log is copied as it grows, so that of a machine
that is lost all is there but its last seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.cluster.folders import rays_own
from rlsys.cluster.launch.ray_node import FOLDER_VARIABLE, Ending, tell_ending
from rlsys.cluster.preflight.findings import FindingState
from rlsys.cluster.worker_group import GATHERED, RankDied, RankSilent, WorkerGroup
from rlsys.errors import RunError
from rlsys.search.server_process import SearchServer, child_environment

MOST_BYTES = 4 * 1024**2  # Of logs in one answer.
_RAYS_DEFAULT = Path("/tmp/ray")
_OF_THE_HEAD = ("search", "task.")
"""How the names of findings begin on what the first machine alone must have, or those that serve searches."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Some bytes of a log."""

    name: str  # Of the log, relative to all of the machine's.
    start: int  # Of the bytes in the log.
    data: bytes


class NodeAgent:
    """The launcher's hand on one machine."""

    def __init__(self) -> None:
        ray_node = os.environ.get(FOLDER_VARIABLE)
        self._folder = Path(tempfile.mkdtemp(prefix="rlsys-node-", dir=ray_node))
        self._server: SearchServer | None = None
        rays = rays_own(Path(ray_node)) if ray_node else _RAYS_DEFAULT
        self._logs = {"node": self._folder, "ray": rays / "session_latest" / "logs"}

    def examine(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """List what `rlsys doctor` with `arguments` finds wrong with this machine, of what it is to have of its own.

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
            f"{finding['what']}: {finding['found']}{' -> ' if finding['fix'] else ''}{finding['fix']}"
            for finding in findings
            if finding["state"] == FindingState.wrong and not finding["what"].startswith(_OF_THE_HEAD)
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
            self._logs["workers"] = Path(logs)

    def read(self, since: Mapping[str, int], most_bytes: int = MOST_BYTES) -> list[LogChunk]:
        """Read what logs have beyond the bytes `since` of each; a little at a time, empty in the end."""
        chunks = []
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
                chunks.append(LogChunk(name, start, data))
                most_bytes -= len(data)
        return chunks

    def close(self, status: int, sentence: str) -> None:
        """Let this machine's launcher know how the run ended, then end the search server, which takes a while."""
        if folder := os.environ.get(FOLDER_VARIABLE):
            tell_ending(Path(folder), Ending(status, sentence))
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for kind, folder in self._logs.items():
            for file in sorted(folder.rglob("*")):
                if file.is_file() and not file.is_symlink():
                    yield f"{kind}/{file.relative_to(folder)}", file


class GatheredLogs:
    """Copies of what agents have of logs."""

    def __init__(self, agents: WorkerGroup, ranks: Sequence[int], folder: Path) -> None:
        """`ranks` are the machines' of `agents`."""
        self._agents = agents
        self._ranks = tuple(ranks)
        self._folder = folder
        self._read: list[dict[str, int]] = [{} for _ in ranks]

    def move_to(self, parent: Path) -> None:
        """Keep everything in a new folder of `parent` from now on: a run that is resumed has many launches there."""
        folder = _new_folder(parent)
        for part in self._folder.glob("*"):
            shutil.move(part, folder / part.name)
        self._folder = folder

    async def gather(self, timeout_s: float) -> list[int]:
        """Copy what is new, until nothing is. Positions of the agents that did not answer in time."""
        answered = await asyncio.gather(*(self._gather_from(agent, timeout_s) for agent in range(len(self._ranks))))
        return [agent for agent, did in enumerate(answered) if not did]

    async def _gather_from(self, agent: int, timeout_s: float) -> bool:
        """Whether the agent answered."""
        more = True
        while more:
            try:
                chunks = await self._agents.call_rank(agent, "read", self._read[agent], timeout_s=timeout_s)
            except (RankSilent, RankDied):
                return False
            except RunError:
                return True  # Its machine is there.
            for chunk in chunks:
                file = self._folder / str(self._ranks[agent]) / chunk.name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab") as log:
                    log.write(chunk.data)
                self._read[agent][chunk.name] = chunk.start + len(chunk.data)
            # A log that is written all the time would otherwise keep us here.
            more = sum(len(chunk.data) for chunk in chunks) >= MOST_BYTES
        return True


def _new_folder(parent: Path) -> Path:
    """Named by the time."""
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        folder = parent / (now if number == 1 else f"{now}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("the numbers have no end")
