"""Tests of the first machine of a launch: missing and lost machines, and logs that are copied while they grow."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlsys.cluster.launch import head
from rlsys.cluster.launch.head import ClusterNodes, GatheredLogs, NodeAgent
from rlsys.cluster.launch.ray_node import FOLDER_VARIABLE
from rlsys.cluster.launch.role import Role
from rlsys.cluster.local_ray import rays_own
from rlsys.cluster.preflight.examine import as_data, ok, wrong
from rlsys.cluster.runtime import Machine
from rlsys.cluster.worker_group import RankSilent, WorkerGroup
from rlsys.config.schema import ClusterConfig
from rlsys.errors import RunError
from rlsys.observe.faults import Restarts
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.index.make import make_index
from tests.search.gated_server import GatedServer
from tests.support.composed import composed
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.support.runs import LIMIT_S, PATIENT
from tests.support.waiting import wait_until

RESTARTS = Restarts(ClusterConfig())

ROLE = Role(0, 3, "a", 6379, ("a", "b", "c"))


def machine(rank: int, host: str) -> Machine:
    return Machine(rank, True, host, f"10.0.0.{rank}", f"{rank + 1:056x}", f"node-{rank}", {})


async def test_missing_machines_are_named_and_duplicate_ranks_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def assembled(*there: Machine) -> Coroutine[Any, Any, list[Machine]]:
        """Assemble a run of three machines, of which only `there` have joined, without waiting for the others."""
        monkeypatch.setattr(head, "machines", lambda: list(there))
        return head._assemble(ROLE, "a:6379", 60.0, 0.0, None, print)

    a, b, c = (machine(rank, host) for rank, host in enumerate("abc"))
    assert await assembled(a, b, c) == [a, b, c]
    with pytest.raises(RunError, match=r"node 1 \(b\) and node 2 \(c\)"):
        await assembled(a)
    with refused("conflict", "--rank"):
        await assembled(a, b, machine(1, "c"))


async def test_ray_that_was_started_here_is_asked_again_until_it_lets_the_launcher_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, exited = RunError("not yet"), RunError("Ray exited")
    monkeypatch.setattr(head, "MACHINES_POLL_S", 0)

    async def join(node: Any, until: float = float("inf")) -> Mock:
        entered = Mock(side_effect=[late, late, None])

        @contextmanager
        def joined(_: str) -> Iterator[None]:
            entered()
            yield

        monkeypatch.setattr(head, "joined", joined)
        with ExitStack() as stack:
            await head._join(stack, "a:6379", until, node)
        return entered

    assert (await join(Mock())).call_count == 3
    for node, until, message in (
        (None, float("inf"), "not yet"),
        (Mock(), 0.0, "a:6379 in time: raise --wait"),
        (Mock(require_alive=Mock(side_effect=exited)), float("inf"), "Ray exited"),
    ):
        with pytest.raises(RunError, match=message):
            await join(node, until)


async def test_taken_port_of_the_head_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, refused("in_use", "--head"):
        await head.run_head(None, Role(0, 1, "127.0.0.1", taken.getsockname()[1]), print)  # type: ignore[arg-type]


def called(*agents: NodeAgent, silent: int = -1) -> Mock:
    """Return a mock of a worker group of agents; the agent with the index `silent` does not answer."""

    async def call_rank(index: int, method: str, *args: Any, timeout_s: float) -> Any:
        if index == silent and timeout_s:
            raise RankSilent("late", index)
        return getattr(agents[index], method)(*args)

    return Mock(spec=WorkerGroup, call_rank=call_rank)


@pytest.fixture(autouse=True)
def ray_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "ray"))
    logs = rays_own(tmp_path / "ray") / "session_latest" / "logs"
    logs.mkdir(parents=True)
    return logs


async def test_logs_are_copied_once_as_they_grow_move_and_restart(ray_logs: Path, tmp_path: Path) -> None:
    gathering = GatheredLogs(called(NodeAgent()), [3], tmp_path / "first")
    (ray_logs / "raylet.out").write_bytes(b"one\n")
    (ray_logs / "events").mkdir()
    (ray_logs / "events" / "e.log").write_bytes(b"\xff\x00")
    (ray_logs / "empty.err").touch()
    assert await gathering.gather(1) == []
    gathering.move_to(tmp_path / "run" / "logs" / "nodes")
    with (ray_logs / "raylet.out").open("ab") as log:
        log.write(b"two\n")
    await gathering.gather(1)
    await gathering.gather(1)
    (there,) = (tmp_path / "run" / "logs" / "nodes").glob("*/3/ray")
    assert (there / "raylet.out").read_bytes() == b"one\ntwo\n"
    assert (there / "events" / "e.log").read_bytes() == b"\xff\x00"
    assert not (there / "empty.err").exists()
    assert not list((tmp_path / "first").glob("*/*"))
    (ray_logs / "raylet.out").write_bytes(b"new\n")
    await gathering.gather(1)
    assert (there / "raylet.out").read_bytes() == b"one\ntwo\nnew\n"
    # A resumed run keeps the logs of its earlier launches beside its own.
    resumed = GatheredLogs(called(NodeAgent()), [3], tmp_path / "second")
    await resumed.gather(1)
    resumed.move_to(tmp_path / "run" / "logs" / "nodes")
    assert len(list((tmp_path / "run" / "logs" / "nodes").glob("*/3/ray/raylet.out"))) == 2


async def test_logs_of_a_second_run_do_not_continue_those_of_the_first(ray_logs: Path, tmp_path: Path) -> None:
    """If a driver is killed before a checkpoint, the next one begins another run."""
    agent = NodeAgent()
    gathering = GatheredLogs(called(agent), [0], tmp_path / "temporary")
    (ray_logs / "raylet.out").write_text("ray")
    for run, said in (("one", "from the first"), ("two", "2nd")):
        own, gathered = tmp_path / "worker" / run, tmp_path / run / "logs"
        own.mkdir(parents=True)
        gathering.move_to(gathered)
        agent.follow(str(own))
        (own / "actor-0.log").write_text(said)
        await gathering.gather(1)
        assert [file.read_text() for file in gathered.glob("*/0/workers/actor-0.log")] == [said]
    assert len(list(tmp_path.glob("one/logs/*/0/workers/actor-0.log"))) == 1
    assert [file.read_text() for file in tmp_path.glob("*/logs/*/0/ray/raylet.out")] == ["ray"]


class Child:
    """Child process of the launcher that runs until `over` is set."""

    def __init__(self, status: int) -> None:
        self._status, self.over = status, asyncio.Event()

    async def wait(self) -> int:
        await self.over.wait()
        return self._status


@pytest.mark.parametrize("status", [0, 1])
async def test_a_machine_that_is_lost_while_a_run_goes_on_is_named_and_ends_the_launch_only_with_the_run(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, said, child = [machine(rank, host) for rank, host in enumerate("ab")], list[str](), Child(status)

    def notify(text: str) -> None:
        said.append(text)
        if "lost" in text:
            child.over.set()

    @asynccontextmanager
    async def command(_: object) -> AsyncIterator[Child]:
        yield child

    monkeypatch.setattr(head, "rlsys_command", command)
    monkeypatch.setattr(head, "lost", lambda known: known[1:])
    nodes = ClusterNodes.__new__(ClusterNodes)
    nodes.task, nodes.machines, nodes.node, nodes.notify = Mock(arguments=lambda *_: []), there, None, notify
    nodes.agents = called(NodeAgent(), NodeAgent(), silent=1)
    nodes.logs = GatheredLogs(nodes.agents, [0, 1], tmp_path / "logs")
    if status:
        with pytest.raises(RunError, match=r"node 1 \(b, 10\.0\.0\.1\) is lost"):
            await head._train(nodes, [])
    else:
        assert await head._train(nodes, []) == 0
    assert ["node 1 (b, 10.0.0.1)" in text for text in said] == [False, True], "once"


async def test_logs_of_workers_are_copied_from_machines_with_another_folder(ray_logs: Path, tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
        (folder / "actor-1.log").write_text("said")
    (shared / "nodes").mkdir()
    (ray_logs / "a.log").write_text("a")
    agents = [NodeAgent(), NodeAgent(), NodeAgent()]
    for agent, folder in zip(agents, (shared, own, own), strict=True):
        agent.follow(str(folder))
    gathering = GatheredLogs(called(*agents, silent=2), [0, 1, 2], shared / "nodes")
    assert await gathering.gather(1) == [2]
    found = {str(file.relative_to(shared / "nodes")) for file in (shared / "nodes").rglob("*") if file.is_file()}
    assert found == {"0/ray/a.log", "1/ray/a.log", "1/workers/actor-1.log"}


def test_end_is_written_before_the_search_server_is_closed(tmp_path: Path) -> None:
    agent, told = NodeAgent(), []
    agent._server = Mock()
    agent._server.close.side_effect = lambda: told.append((tmp_path / "ray" / "end.json").read_text())
    agent.close(3, "it is over")
    assert [json.loads(text) for text in told] == [{"status": 3, "sentence": "it is over"}]
    assert not list((tmp_path / "ray").glob("rlsys-node-*"))


async def test_a_launch_serves_an_index_without_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server refuses a device, so the launch gives none unless `cluster.search.device` does."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    index, agent = tmp_path / "index", NodeAgent()
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "Mali\\nThe capital of Mali is Bamako."}\n')
    make_index("bm25", tmp_path / "corpus.jsonl", index)
    config = composed(f"search.index={index}", f"cluster.search.port={free_port()}", *PATIENT)

    async def call(_: int, method: str, *arguments: Any, **_limits: Any) -> Any:
        return getattr(agent, method)(*arguments)

    nodes: Any = Mock(task=Mock(config=config), machines=[Mock(address="127.0.0.1")], call=call)
    try:
        url, *_ = await head._searching(nodes, [0])
        assert url == f"search.url='http://127.0.0.1:{config.cluster.search.port}'"
    finally:
        agent.close(0, "")


@pytest.mark.parametrize(("given", "threads"), [(None, len(os.sched_getaffinity(0))), (3, 3)])
def test_a_search_server_uses_all_cores_although_ray_limits_its_parent(
    monkeypatch: pytest.MonkeyPatch, given: int | None, threads: int
) -> None:
    server = Mock()
    monkeypatch.setattr(head, "SearchServer", server)
    agent = NodeAgent()
    agent.serve("index", {"threads": given, "port": 8000}, 1, 1, RESTARTS)
    agent.close(0, "")
    assert server.call_args.kwargs == {"threads": threads, "port": 8000}


def test_a_search_server_that_dies_is_started_again_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SearchServer", lambda _index, log, **_: GatedServer(log, port=free_port()))
    agent = NodeAgent()
    url = agent.serve("index", {"threads": 1}, LIMIT_S, LIMIT_S, RESTARTS)
    try:
        server = agent._server
        assert server is not None
        first = server.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.pid != first)
        server.wait_healthy(LIMIT_S)
        assert server.url == url
    finally:
        agent.close(0, "")
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_machine_reports_its_findings_except_search_and_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [wrong(what, "it is not there", "get it") for what in ("model.path", "search server", "task.eval_path")]
    doctor = tmp_path / "doctor"
    doctor.write_text(f"#!/bin/sh\necho '{json.dumps(as_data('a_run', [ok('config', 'good'), *findings]))}'\nexit 2\n")
    doctor.chmod(0o755)
    monkeypatch.setattr(head.sys, "executable", str(doctor))
    assert NodeAgent().examine([], 600) == ["model.path: it is not there -> get it"]
    monkeypatch.setattr(head.sys, "executable", "false")
    with pytest.raises(RunError, match="status 1"):
        NodeAgent().examine([], 600)
