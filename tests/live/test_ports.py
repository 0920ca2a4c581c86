"""Tests that every port that a command opens is in the table of docs/security.md, and as closed as the table says."""

import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from examples.searchr1.tiny.demo import prepare_world
from rlsys.cluster.local_ray import own_addresses
from rlsys.cluster.preflight.machine import Unseen, cluster_at
from tests.support.growing_run import add_step, write_run
from tests.support.paths import PROJECT
from tests.support.ports import free_port
from tests.support.runs import LIMIT_S, SETTINGS

NOT_ALWAYS = {"monitor.py", "ray.util.client"}
"""Processes that need not listen: the first one's port may be taken by another Ray, and the second starts slowly."""
POLICY, INDEX = "examples/searchr1/tiny/policy", "data/tiny_world/index"
SMALL = [
    "-c",
    "searchr1_tiny_cpu",
    *SETTINGS,
    "eval.limit=2",
    "trainer.steps=500",
    "trainer.prompts_per_step=4",
    "tracking.wandb=true",
]


@dataclass(frozen=True)
class Row:
    commands: tuple[str, ...]
    process: str
    address: str
    answers_http: bool


@dataclass(frozen=True)
class Port:
    process: str
    ip: str
    number: int


def table() -> list[Row]:
    lines = (PROJECT / "docs" / "security.md").read_text().partition("| commands |")[2].splitlines()[2:]
    rows = []
    for line in lines:
        if not line:
            break
        commands, process, _, _, address, gets = (cell.strip() for cell in line.strip("|").split("|"))
        names = tuple(re.findall("`(.*?)`", commands))
        rows.append(Row(names, process.strip("`"), address, gets.startswith("HTTP")))
    assert len(rows) > 8
    return rows


def listening(root: psutil.Process) -> set[Port]:
    """TCP and UDP sockets on which a process and its descendants listen."""
    found = set()
    with suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
                for one in process.net_connections(kind="inet"):
                    if one.status == psutil.CONN_LISTEN or (one.type is socket.SOCK_DGRAM and not one.raddr):
                        found.add(Port(words, one.laddr.ip, one.laddr.port))
    return found


def row_of(port: Port, command: str, rows: list[Row]) -> Row:
    named = [row for row in rows if command in row.commands and row.process in port.process]
    assert named, f"{port} is not in the table under `{command}`"
    return max(named, key=lambda row: len(row.process))


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def http_status(port: Port) -> str:
    """First line of the answer to a GET; empty if it is not HTTP."""
    try:
        with socket.create_connection((port.ip.removeprefix("::ffff:"), port.number), timeout=2) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            first = sock.recv(4096).partition(b"\r\n")[0].decode("latin-1")
    except OSError:
        return ""
    return first if first.startswith("HTTP/1") else ""


def require_closed_from_outside(port: Port) -> None:
    """Assert that the port is closed at the addresses by which other machines reach this one."""
    for address in own_addresses():
        if ":" not in address and not is_loopback(address):
            with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
                socket.create_connection((address, port.number), timeout=5).close()


def require_token(gcs: Port, home: Path, other_home: Path) -> None:
    """Assert that a Ray driver connects with the user's token, and fails without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_AUTH_MODE", "token")
        assert cluster_at(f"127.0.0.1:{gcs.number}", 120).nodes
        patch.setenv("HOME", str(other_home))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with pytest.raises(Unseen):
            cluster_at(f"127.0.0.1:{gcs.number}", 20)


@contextmanager
def started(words: list[str], home: Path, log: Path) -> Iterator[psutil.Popen]:
    """Run an rlsys command with `home` as its home folder, and interrupt it at the end."""
    prepare_world(Console(quiet=True))
    home.mkdir()
    own = {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("RAY_AUTH", "RLSYS_", "WANDB"))}
    with log.open("wb") as output:
        process = psutil.Popen(
            [sys.executable, "-m", "rlsys.apps.cli.main", *words],
            cwd=PROJECT,
            env=kept | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(600)
            except psutil.TimeoutExpired:
                process.kill()


def ports_until(process: psutil.Popen, log: Path, over: Callable[[], object]) -> set[Port]:
    """All ports that were open at any time before `over()` became true."""
    seen, until = set[Port](), time.monotonic() + LIMIT_S
    while not over():
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < until, log.read_text(errors="replace")[-3000:]
        seen |= listening(process)
        time.sleep(0.5)
    return seen | listening(process)


def check(command: str, open_ports: set[Port]) -> None:
    assert open_ports
    with ThreadPoolExecutor(16) as knocks:  # Most attempts to connect wait until they time out.
        for _ in knocks.map(lambda port: knock(port, row_of(port, command, table())), open_ports):
            pass


def knock(port: Port, row: Row) -> None:
    assert row.address == "loopback"
    assert is_loopback(port.ip), port
    require_closed_from_outside(port)
    if not row.answers_http:
        assert " 200 " not in http_status(port), port


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "launch"])
def test_run_ports_are_loopback_only_and_require_the_token(command: str, tmp_path: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    words = [command, *SMALL, f"output_dir={tmp_path}/outputs"]
    if command == "launch":
        words += ["--no-preflight", "--head", f"127.0.0.1:{free_port()}"]
        words += ["cluster.search.nodes=['0']", f"cluster.search.port={free_port()}"]
    with started(words, home, log) as process:
        evaluated = "outputs/*/evaluations/step_000000.json"
        seen = ports_until(process, log, lambda: [*tmp_path.glob(evaluated)])
        open_now = listening(process)
        check(command, open_now)
        assert all(is_loopback(port.ip) for port in seen), seen
        (gcs,) = (port for port in open_now if "gcs_server" in port.process)
        require_token(gcs, home, tmp_path)
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    known = [row_of(port, command, table()) for port in seen]
    stale = {row for row in table() if command in row.commands} - {*known}
    assert {row.process for row in stale} <= {row.process for row in known} | NOT_ALWAYS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("search serve", ["search", "serve", INDEX]),
        ("watch", ["watch", "{run}"]),
        ("serve", ["serve", "--engine", "transformers", "--model", POLICY]),
        ("chat", ["chat", "--web", "--model", POLICY, "-c", "searchr1_tiny_cpu", "--index", INDEX]),
    ],
)
def test_server_is_reachable_only_from_its_own_machine(command: str, words: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_step(run, 1)
    log = tmp_path / "log"
    given = [word.replace("{run}", str(run)) for word in words]
    with started([*given, "--port", "0"], tmp_path / "home", log) as process:

        def answering() -> list[Port]:
            name = command.partition(" ")[0]
            return [port for port in listening(process) if f"rlsys.apps.cli.main {name}" in port.process]

        seen = ports_until(process, log, answering)
        check(command, seen)
        (page,) = answering()
        assert http_status(page), "the page must answer"
