"""Tests of `rlsys launch` on hosts made of namespaces, with real Ray, gloo and searches between them."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.launch.hosts import Host, Launched, launches_until, two_hosts
from tests.support.jsonl import read_rows
from tests.support.processes import words_of
from tests.support.runs import LIMIT_S, NO_SEARCH, PLAIN_ENGINE

pytestmark = pytest.mark.slow

TAKES_A_PORT = (
    "import socket, time; s = socket.create_server(('', 10001)); print('taken', flush=True); time.sleep(3600)"
)
"""Program that takes the port of Ray's client server, which a launch does not need."""
LOST = r"node 1 \(node-1, 10\.211\.77\.2\) is lost"
INTERRUPTED = "leaves: the run was interrupted"
ENDED = "Ray exited on this machine|the head of the Ray cluster"
KNOCKS = "import httpx, sys; print(httpx.post(sys.argv[1], json={'queries': ['Rome']}).status_code)"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as found:
        yield found


def test_two_machines_train_with_a_search_server_on_one_and_leave_nothing(hosts: list[Host], tmp_path: Path) -> None:
    log = tmp_path / "taken.log"
    taken = hosts[0].start([sys.executable, "-c", TAKES_A_PORT], log)
    launches_until(log.read_text)
    settings = [
        "--preflight",
        "rollout.engine.kv_cache_tokens=16384",
        "trainer.steps=2",
        "cluster.search.nodes=[node-1]",
        "search.index=data/tiny_world/index",  # Its server has an encoder, which must end too.
    ]
    launched = [Launched(hosts, rank, tmp_path, *settings) for rank in (0, 1)]
    assert [one.wait() for one in launched] == [0, 0], launched[0].said()
    for process in psutil.Process(taken.pid).children():
        process.kill()
    taken.wait()
    assert f"serves data/tiny_world/index at {hosts[1].address}:8000" in launched[0].said()
    assert "No problem found for searchr1_tiny_cpu" in launched[0].said()
    assert "leaves: the run has ended" in launched[1].said()
    (folder,) = (tmp_path / "outputs").glob("searchr1_tiny_cpu-*")
    rows = read_rows(folder / "metrics.jsonl")
    assert len(rows) == 2
    assert rows[1]["engine/0/search_requests"] > 0
    assert [row["rollout/search_errors"] for row in rows] == [0, 0]
    assert not (folder / "logs" / "search.log").exists(), "the run started no server itself"
    (logs,) = (folder / "logs" / "nodes").iterdir()
    assert "Application startup complete" in (logs / "1" / "node" / "search.log").read_text()
    for rank in "01":
        assert (logs / rank / "ray" / "raylet.out").stat().st_size > 0
    assert all(one.leaves_nothing() for one in launched)


def test_machine_without_the_token_can_neither_join_nor_look(hosts: list[Host], tmp_path: Path) -> None:
    home, other, more = (tmp_path / name for name in ("home", "other", "more"))
    for folder in (home, other, more):
        folder.mkdir()
    settings = ["--no-preflight", PLAIN_ENGINE, "cluster.search.nodes=[node-0]", "trainer.steps=200"]
    head, worker = (Launched(hosts, rank, tmp_path, *settings, home=home) for rank in (0, 1))
    launches_until(lambda: "the run starts" in head.said(), head, worker)
    look = [sys.executable, "-m", "rlsys.cluster.preflight.machine", f"{hosts[0].address}:6379"]
    for seen_from, mode in ((home, "token"), (other, "disabled")):
        given = {"HOME": str(seen_from), "RAY_AUTH_MODE": mode}
        status = hosts[1].start(look, tmp_path / f"look-{mode}.log", given).wait(LIMIT_S)
        assert (status == 0) == (mode == "token"), (tmp_path / f"look-{mode}.log").read_text()
    assert hosts[1].run(sys.executable, "-c", KNOCKS, f"http://{hosts[0].address}:8000/retrieve").strip() == "401"
    refused = Launched(hosts, 1, more, "--no-preflight", "--wait", "60", home=other)
    assert refused.wait() == 2
    assert str(other / ".ray" / "auth_token") in refused.said()
    until_on_both(tmp_path, head, worker)
    head.signal(signal.SIGINT)
    assert [head.wait(), worker.wait()] == [130, 130]
    assert INTERRUPTED in worker.said()
    assert head.leaves_nothing()
    assert worker.leaves_nothing()


def test_a_run_outlives_its_driver_and_a_machine_that_had_only_engines(hosts: list[Host], tmp_path: Path) -> None:
    placement = "cluster.placement={actor: '0', inference: '1', rollout: '2-3'}"
    saves = ["resume=auto", "checkpoint.interval=1"]
    settings = ["--no-preflight", PLAIN_ENGINE, *NO_SEARCH, "trainer.steps=8"]
    settings += ["cluster.devices_per_node=3", placement, *saves]
    head, worker = (Launched(hosts, rank, tmp_path, *settings) for rank in (0, 1))

    def steps() -> int:
        return sum(file.read_bytes().count(b"\n") for file in tmp_path.glob("outputs/*/metrics.jsonl"))

    def began() -> list[str]:
        rows = [json.loads(line) for file in tmp_path.glob("outputs/*/faults.jsonl") for line in file.open()]
        return [row["part"] for row in rows if row["event"] == "began"]

    launches_until(lambda: list(tmp_path.glob("outputs/*/checkpoints/global_step_*")), head, worker)
    driver_of(hosts[0]).kill()
    launches_until(began, head, worker)
    resumed_at = steps()
    launches_until(lambda: steps() > resumed_at, head, worker)
    worker.signal(signal.SIGINT)
    assert worker.wait() == 130, worker.said()
    assert head.wait() == 0, head.said()
    assert re.search(LOST, head.said()), head.said()
    assert steps() == 8
    assert began() == ["driver", "engine 1"]
    assert len(list(tmp_path.glob("outputs/*"))) == 1
    assert head.leaves_nothing()


def until_on_both(folder: Path, *launched: Launched) -> None:
    """Wait until the run in `folder` has its devices on both machines."""
    for pattern in ("nodes/*/1/ray/raylet.out", "actor-0.log"):
        launches_until(lambda: list(folder.glob(f"outputs/*/logs/{pattern}")), *launched)  # noqa: B023


def driver_of(host: Host) -> psutil.Process:
    """Return the driver of the run on `host`: a child of the process that starts it again."""
    trains = {one.pid: one for one in host.processes() if {"rlsys.apps.cli.main", "train"} <= {*words_of(one)}}
    (driver,) = (one for one in trains.values() if one.ppid() in trains)
    return driver


def kill_gcs(host: Host) -> None:
    (gcs,) = [process for process in host.processes() if process.name() == "gcs_server"]
    gcs.kill()


def terminate_all(*launched: Launched) -> None:
    """Send SIGTERM to all launchers, like Slurm at the end of a job's time."""
    for one in launched:
        one.signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "statuses", "head_says", "worker_says"),
    [
        pytest.param(terminate_all, [130, 130], "", INTERRUPTED, id="all terminated"),
        pytest.param(lambda _, worker: worker.signal(signal.SIGINT), [1, 130], LOST, "", id="worker interrupted"),
        pytest.param(
            lambda head, worker: worker.host.cut_off(head.host), [1, 1], LOST, ":6379 is lost", id="cable pulled"
        ),
        pytest.param(lambda head, _: kill_gcs(head.host), [1, 1], ENDED, "", id="gcs killed"),
        pytest.param(lambda head, _: head.signal(signal.SIGKILL), [-9, 1], "", "", id="launcher killed"),
    ],
)
def test_machines_say_why_a_run_has_ended_and_leave_nothing(
    hosts: list[Host],
    tmp_path: Path,
    end: Callable[[Launched, Launched], None],
    statuses: list[int],
    head_says: str,
    worker_says: str,
) -> None:
    # A launcher that is not killed ends the run's search server itself.
    search = [] if -signal.SIGKILL in statuses else NO_SEARCH
    settings = ["--no-preflight", PLAIN_ENGINE, *search, "trainer.steps=200"]
    launched = [Launched(hosts, rank, tmp_path, *settings) for rank in (0, 1)]
    until_on_both(tmp_path, *launched)
    end(*launched)
    for one, status, said in zip(launched, statuses, (head_says, worker_says), strict=True):
        assert one.wait() == status, one.said()
        assert re.search(said, one.said()), one.said()
        if status == -signal.SIGKILL:
            launches_until(lambda: not hosts[0].processes())  # A killed launcher leaves its folder behind.
        else:
            assert one.leaves_nothing()
