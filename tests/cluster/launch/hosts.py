"""Runs `rlsys launch` on two hosts on one machine; each host is a set of namespaces with its own address.

A host has its own network, host name, process numbers, /tmp and /dev/shm; the rest of the file system is shared, as on
a cluster with a common disk. A virtual cable connects the hosts; no packet leaves it. All processes of a host end with
its first process, which ends when this process closes its input or dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.paths import PROJECT
from tests.support.runs import LIMIT_S, PATIENT, word_index

_INIT = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
"""Program of a host's first process: it reaps orphans, and ends when its input is closed."""
_ALONE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_SETTINGS = [
    *PATIENT,
    "eval.interval=0",
    "eval.limit=4",
    "trainer.prompts_per_step=8",
    "trainer.mini_batches=2",
    "tracking.wandb=false",
    "tracking.tensorboard=false",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.sync_mode=broadcast",
    "cluster.placement={actor: '0-1', inference: '2', rollout: '3'}",
]
"""Settings with the actor on the first machine and the other groups on the second."""


@dataclass
class Host:
    address: str
    _first: psutil.Process

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on the host, in the project's folder; its output goes to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._enter(), f"--wd={PROJECT}", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )

    def run(self, *command: str) -> str:
        """Run a command on the host and return its output. Raises CalledProcessError if the command fails."""
        return subprocess.run([*self._enter(), *command], check=True, capture_output=True, text=True).stdout

    def processes(self) -> list[psutil.Process]:
        """Return the processes on the host, except its first one."""
        namespace = os.readlink(f"/proc/{self._first.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace and process != self._first
                found += [process] if here and process.status() != psutil.STATUS_ZOMBIE else []
        return found

    def cut_off(self, other: Host) -> None:
        """Lose all packets between the hosts by sending them to an unknown hardware address. Connections stay open."""
        for here, there in ((self, other), (other, self)):
            nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
            here.run("ip", "neighbour", "replace", there.address, *nowhere)

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._first.pid), "--net", "--mount", "--uts", "--pid"]


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Start hosts named node-0 and node-1 that share `folder`. Skips if namespaces are not allowed."""
    probe = subprocess.run(
        [*_ALONE, "sh", "-c", "ip link add left type veth peer name right"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"namespaces of network, mounts and processes are not allowed here: {probe.stderr.strip()}")
    with _first_process(_set_up("node-0", folder)) as one, _first_process(_set_up("node-1", folder)) as other:
        hosts = [Host("10.211.77.1", one), Host("10.211.77.2", other)]
        _in(one, f"ip link add eth0 type veth peer name eth0 netns {other.pid}")
        for host, first in zip(hosts, (one, other), strict=True):
            _in(first, f"ip addr add {host.address}/24 dev eth0 && ip link set eth0 up && ip link set lo up")
        yield hosts


def _set_up(name: str, folder: Path) -> str:
    """Return a script that gives a host its own name, /dev/shm and /tmp, with the shared folders in /tmp."""
    own = folder / "private" / name
    own.mkdir(parents=True)
    both = {path.resolve() for path in (folder, PROJECT, Path(sys.prefix), Path(sys.base_prefix))}
    shared = [path for path in both if path.is_relative_to("/tmp") and not both & {*path.parents}]
    for path in shared:
        (own / path.relative_to("/tmp")).mkdir(parents=True, exist_ok=True)
    pairs = [(path, f"/run/shared-folder-{number}") for number, path in enumerate(shared)]
    steps = [f"hostname {name}", "mount -t tmpfs -o size=2g tmpfs /dev/shm"]
    steps += [f"mkdir -p {aside} && mount --rbind {path} {aside}" for path, aside in pairs]
    steps += [f"mount --bind {own} /tmp"]
    steps += [f"mount --move {aside} {path}" for path, aside in pairs]
    return " && ".join(steps)


@contextmanager
def _first_process(set_up: str) -> Iterator[psutil.Process]:
    """Start a process in its own namespaces; on leaving, end all processes in them."""
    wrapper = subprocess.Popen(
        [*_ALONE, "sh", "-c", f'{set_up} && exec {sys.executable} -S -c "{_INIT}"'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert wrapper.stdin is not None
    assert wrapper.stdout is not None
    try:
        assert wrapper.stdout.readline() == b"up\n"
        (first,) = psutil.Process(wrapper.pid).children()
        with open(f"/proc/{first.pid}/ns/net"):  # Keeps the cable until both hosts have ended.
            yield first
    finally:
        wrapper.stdin.close()
        wrapper.stdout.close()
        try:
            wrapper.wait(600)
        except subprocess.TimeoutExpired:
            wrapper.send_signal(signal.SIGKILL)
            wrapper.wait()


def _in(process: psutil.Process, script: str) -> None:
    subprocess.run(["nsenter", "-t", str(process.pid), "--net", "sh", "-c", script], check=True)


class Launched:
    """The launcher on one of two hosts; its home folder is `home`, or by default the home folder of this user."""

    def __init__(
        self, hosts: Sequence[Host], rank: int, folder: Path, *arguments: str, home: Path | None = None
    ) -> None:
        self.host = hosts[rank]
        self.log = folder / f"launch-{rank}.log"
        where = ["--rank", str(rank), "--nodes", "2", "--head", hosts[0].address]
        command = [sys.executable, "-m", "rlsys.apps.cli.main", "launch", "--config-name", "searchr1_tiny_cpu", *where]
        self._process = self.host.start(
            [*command, f"output_dir={folder}/outputs", word_index(), *_SETTINGS, *arguments],
            self.log,
            {"HOME": str(home)} if home else None,
        )

    def wait(self) -> int:
        try:
            return self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"still running:\n{self.said()}") from None

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, which is the only child of `nsenter`."""
        (launcher,) = psutil.Process(self._process.pid).children()
        launcher.send_signal(number)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def leaves_nothing(self) -> bool:
        """Wait until the host has no process left; return True if no folder of rlsys is left in its /tmp either."""
        try:
            launches_until(lambda: not self.host.processes())
        except AssertionError:
            raise AssertionError(f"{self.host.processes()} are left:\n{self.said()}") from None
        return "rlsys-" not in self.host.run("ls", "/tmp")


def launches_until(condition: Callable[[], object], *launched: Launched) -> None:
    """Wait until `condition` holds.

    Raises AssertionError with the output of `launched` if one of them ends first, or after `LIMIT_S`.
    """
    until = time.monotonic() + LIMIT_S
    while not condition():
        in_time = time.monotonic() < until and all(one.runs for one in launched)
        assert in_time or condition(), "\n".join(one.said() for one in launched)
        time.sleep(0.2)
