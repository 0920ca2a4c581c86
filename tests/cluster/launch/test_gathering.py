"""Logs are copied as they grow, each byte once, whatever their names and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.cluster.launch.head import GatheredLogs, LogChunk, NodeAgent
from rlsys.cluster.launch.ray_node import FOLDER_VARIABLE
from rlsys.cluster.local_ray import rays_own
from rlsys.cluster.worker_group import RankSilent
from rlsys.errors import RunError


class Called:
    """Stands for a group of agents; those in `silent` do not answer."""

    def __init__(self, *found: NodeAgent) -> None:
        self.found = found
        self.silent: set[int] = set()

    async def call_rank(self, index: int, method: str, *args: Any, timeout_s: float) -> Any:
        if index in self.silent and timeout_s:
            raise RankSilent("late", index)
        return getattr(self.found[index], method)(*args)


@pytest.fixture(autouse=True)
def ray_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "ray"))
    logs = rays_own(tmp_path / "ray") / "session_latest" / "logs"
    logs.mkdir(parents=True)
    return logs


async def test_logs_grow_move_and_begin_anew(ray_logs: Path, tmp_path: Path) -> None:
    called = Called(NodeAgent())
    gathering = GatheredLogs(called, [3], tmp_path / "first")  # type: ignore[arg-type]
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
    assert not list((tmp_path / "first").glob("*"))
    (ray_logs / "raylet.out").write_bytes(b"new\n")
    await gathering.gather(1)
    assert (there / "raylet.out").read_bytes() == b"one\ntwo\nnew\n"


async def test_the_logs_of_a_resumed_run_lie_beside_those_of_its_earlier_lives(ray_logs: Path, tmp_path: Path) -> None:
    nodes = tmp_path / "run" / "logs" / "nodes"
    for life in range(3):
        (ray_logs / "raylet.out").write_text(f"life {life}")
        gathering = GatheredLogs(Called(NodeAgent()), [0], tmp_path / f"first-{life}")  # type: ignore[arg-type]
        await gathering.gather(1)
        gathering.move_to(nodes)
    assert sorted(file.read_text() for file in nodes.glob("*/0/ray/raylet.out")) == [
        "life 0", "life 1", "life 2",
    ]  # fmt: skip
    assert len(list(nodes.iterdir())) == 3


async def test_long_logs_come_a_little_at_a_time(
    ray_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"{number}.log": bytes([number]) * 1500 * number for number in range(1, 5)}
    for name, content in contents.items():
        (ray_logs / name).write_bytes(content)
    read, biggest = NodeAgent.read, []

    def counted(self: NodeAgent, since: dict[str, int]) -> list[LogChunk]:
        pieces = read(self, since, 1000)
        biggest.append(sum(len(piece.data) for piece in pieces))
        return pieces

    monkeypatch.setattr(NodeAgent, "read", counted)
    monkeypatch.setattr("rlsys.cluster.launch.head.MOST_BYTES", 1000)
    gathering = GatheredLogs(Called(NodeAgent()), [0], tmp_path / "logs")  # type: ignore[arg-type]
    await gathering.gather(1)
    for name, content in contents.items():
        assert (tmp_path / "logs" / "0" / "ray" / name).read_bytes() == content
    assert max(biggest) <= 1000


async def test_workers_logs_come_from_machines_that_do_not_share_the_folder(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
        (folder / "actor-1.log").write_text("said")
    (shared / "nodes").mkdir()
    called = Called(NodeAgent(), NodeAgent())
    called.found[0].follow(str(shared))
    called.found[1].follow(str(own))
    gathering = GatheredLogs(called, [0, 1], shared / "nodes")  # type: ignore[arg-type]
    await gathering.gather(1)
    assert (shared / "nodes" / "1" / "workers" / "actor-1.log").read_text() == "said"
    assert not (shared / "nodes" / "0").exists()


async def test_who_is_silent_is_told_and_keeps_nobody_else_from_being_read(ray_logs: Path, tmp_path: Path) -> None:
    called = Called(NodeAgent(), NodeAgent())
    called.silent = {0}
    (ray_logs / "a.log").write_text("a")
    gathering = GatheredLogs(called, [0, 1], tmp_path / "logs")  # type: ignore[arg-type]
    assert await gathering.gather(1) == [0]
    assert (tmp_path / "logs" / "1" / "ray" / "a.log").read_text() == "a"


def test_the_end_is_told_to_the_machines_launcher(tmp_path: Path) -> None:
    agent = NodeAgent()
    agent.close(3, "it is over")
    assert json.loads((tmp_path / "ray" / "end.json").read_text()) == {"status": 3, "sentence": "it is over"}
    assert not list((tmp_path / "ray").glob("rlsys-node-*"))


def test_the_end_is_told_before_the_search_server_takes_its_time(tmp_path: Path) -> None:
    agent = NodeAgent()
    told = []

    class Server:
        def close(self) -> None:
            told.append((tmp_path / "ray" / "end.json").is_file())

    agent._server = Server()  # type: ignore[assignment]
    agent.close(0, "it is over")
    assert told == [True]


def test_a_machine_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    arguments = [
        "doctor",
        "--for",
        "searchr1_tiny_cpu",
        f"model.path={tmp_path}/nothing",
        "search.index=nowhere",
    ]
    wrong = NodeAgent().examine(arguments, 60)
    assert any(one.startswith("model.path: ") for one in wrong)
    assert not any(one.startswith(("search", "task")) for one in wrong), "the head looks at these"
    with pytest.raises(RunError, match=r"the preflight ended with status 2: .*not_there"):
        NodeAgent().examine(["doctor", "--for", "not_there"], 60)
