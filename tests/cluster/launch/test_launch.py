"""`rlsys launch` on hosts made of namespaces: real Ray, real gloo and real searches between them."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.launch.hosts import Hosts, namespaced_hosts
from tests.cluster.launch.launched import Launched, launch, run_folder, wait_until

TAKES_A_PORT = """
import socket, sys, time
with socket.create_server(("", int(sys.argv[1]))):
    print("taken", flush=True)
    time.sleep(600)
"""
LOGS = "outputs/*/logs/nodes/*/1/ray/raylet.out"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with namespaced_hosts(2, tmp_path) as found:
        yield found


def under_way(hosts: Hosts, folder: Path, *settings: str) -> list[Launched]:
    """Launchers of a run of which logs come in."""
    launched = launch(hosts, folder, *settings)
    wait_until(lambda: list(folder.glob(LOGS)), 600, *launched)
    return launched


@pytest.mark.slow
def test_two_machines_train_search_on_a_named_one_and_leave_nothing(hosts: Hosts, tmp_path: Path) -> None:
    launched = launch(hosts, tmp_path, "cluster.search.nodes=[node-1]", preflight=True)
    assert [one.wait() for one in launched] == [0, 0], launched[0].said()
    assert f"serves data/tiny_world/index at {hosts[1].address}:8000" in launched[0].said()
    assert "searchr1_tiny_cpu can run" in launched[0].said()
    assert "leaves: the run has ended" in launched[1].said()
    folder = run_folder(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert rows[1]["engine/0/search_requests"] > 0
    assert [row["rollout/search_errors"] for row in rows] == [0, 0]
    assert not (folder / "logs" / "search.log").exists(), "the run started none itself"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    (logs,) = (folder / "logs" / "nodes").iterdir()
    assert "Application startup complete" in (logs / "1" / "node" / "search.log").read_text()
    assert not (logs / "0" / "node").exists(), "the first machine serves nothing"
    for rank in "01":
        assert (logs / rank / "ray" / "raylet.out").stat().st_size > 0
    assert all(one.leaves_nothing() for one in launched)


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named(hosts: Hosts, tmp_path: Path) -> None:
    # Where Ray's own client server, which nobody needs, would listen.
    taken = hosts[0].start([sys.executable, "-c", TAKES_A_PORT, "10001"], tmp_path / "taken.log")
    wait_until(lambda: (tmp_path / "taken.log").read_text(), 60)
    (head,) = launch(hosts, tmp_path, "--wait", "120", ranks=(0,))
    assert head.wait() == 1
    for process in psutil.Process(taken.pid).children():
        process.kill()
    taken.wait(60)
    assert re.search(rf"node 1 .*{hosts[0].address}:6379.*1 of 2", head.said())
    assert head.leaves_nothing()
    assert not (tmp_path / "outputs").exists()


KNOCKS = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1] + "/retrieve", b'{"queries": ["Rome"]}', {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=20).status)
except urllib.error.HTTPError as refused:
    print(refused.code)
"""


@pytest.mark.slow
def test_a_machine_without_the_token_runs_nothing_and_finds_nothing(hosts: Hosts, tmp_path: Path) -> None:
    homes = [tmp_path / "home", tmp_path / "strange"]
    for home in homes:
        home.mkdir()
    settings = ["cluster.search.nodes=[node-0]", "trainer.steps=200"]
    head, worker = launch(hosts, tmp_path, *settings, home=homes[0])
    wait_until(lambda: "the run starts" in head.said(), 600, head, worker)
    look = [sys.executable, "-m", "rlsys.cluster.preflight.machine", f"{hosts[0].address}:6379"]
    for home, mode, status in ((homes[0], "token", 0), (homes[1], "disabled", 1)):
        given = {"HOME": str(home), "RAY_AUTH_MODE": mode}
        looked = hosts[1].start(look, tmp_path / f"look-{mode}.log", given)
        assert (looked.wait(120) == 0) == (status == 0), (tmp_path / f"look-{mode}.log").read_text()
    url = f"http://{hosts[0].address}:8000"
    assert hosts[1].run(sys.executable, "-c", KNOCKS, url).strip() == "401"
    strangers = launch(hosts, tmp_path / "more", "--wait", "60", ranks=(1,), home=homes[1])
    assert strangers[0].wait() == 2
    assert str(homes[1] / ".ray" / "auth_token") in strangers[0].said()
    head.signal(signal.SIGINT)
    assert [head.wait(), worker.wait()] == [130, 130]
    assert head.leaves_nothing()


def test_without_a_head_a_machine_gives_up(hosts: Hosts, tmp_path: Path) -> None:
    (worker,) = launch(hosts, tmp_path, "--wait", "2", ranks=(1,))
    assert worker.wait() == 1
    assert re.search(rf"node 1 .*{hosts[0].address}:6379", worker.said())
    assert worker.leaves_nothing()


@pytest.mark.slow
def test_a_machine_that_loses_power_ends_the_run_and_is_named(hosts: Hosts, tmp_path: Path) -> None:
    head, _ = under_way(hosts, tmp_path)
    hosts[1].power_off()
    assert head.wait() == 1
    assert f"node 1 (node-1, {hosts[1].address}) is lost" in head.said()
    assert head.leaves_nothing()


@pytest.mark.slow
def test_a_machine_whose_cable_is_pulled_is_named_and_ends_by_itself(hosts: Hosts, tmp_path: Path) -> None:
    head, worker = launch(hosts, tmp_path, "trainer.steps=200")
    wait_until(lambda: list(tmp_path.glob("outputs/*/metrics.jsonl")), 600, head, worker)
    hosts.cut(1)
    assert [head.wait(), worker.wait()] == [1, 1]
    assert f"node 1 (node-1, {hosts[1].address}) is lost" in head.said()
    assert f"{hosts[0].address}:6379 is lost" in worker.said()
    assert list(tmp_path.glob(LOGS))
    assert head.leaves_nothing()
    assert worker.leaves_nothing()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_head_ends_every_machine(hosts: Hosts, tmp_path: Path, number: int) -> None:
    head, worker = under_way(hosts, tmp_path)
    head.signal(number)
    assert [head.wait(), worker.wait()] == [130, 130]
    assert "leaves: the run was interrupted" in worker.said()
    assert head.leaves_nothing()
    assert worker.leaves_nothing()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(hosts: Hosts, tmp_path: Path) -> None:
    head, worker = under_way(hosts, tmp_path)
    head.signal(signal.SIGKILL)
    assert worker.wait() == 1
    wait_until(lambda: not hosts[0].processes(), 90, head)
    assert worker.leaves_nothing()
