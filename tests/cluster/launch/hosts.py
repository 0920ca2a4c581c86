"""Several hosts on one machine: each a set of namespaces with an address of its own, joined by a bridge.

A host has its own network, host name, process numbers, /tmp and /dev/shm; the rest of the file system, and what
is `shared`, is everybody's, as on a cluster with a common disk. Nothing leaves the bridge: it is in a
network namespace too. A host's processes end with its first, which ends when this process closes or dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.paths import PROJECT

NETWORK = "10.211.77"
_INIT = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
"""The first process of a host: it lets orphans go, and ends once nobody holds its input."""
_ALONE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass
class Host:
    """One of the hosts."""

    address: str
    _first: psutil.Process
    _port: str
    """Its end of the cable at the bridge."""

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command there, in the project's folder; its output goes to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._enter(), f"--wd={PROJECT}", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )

    def run(self, *command: str) -> str:
        """What a command there prints. Raises CalledProcessError if it fails."""
        return subprocess.run([*self._enter(), *command], check=True, capture_output=True, text=True, timeout=30).stdout

    def processes(self) -> list[psutil.Process]:
        """All that runs there but the host's first process."""
        namespace = os.readlink(f"/proc/{self._first.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if here and process.pid != self._first.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def power_off(self) -> None:
        """End everything there at once, and its network with it."""
        self._first.kill()
        self._first.wait(10)

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._first.pid), "--net", "--mount", "--uts", "--pid"]


@dataclass
class Hosts:
    """Hosts that reach each other."""

    _all: Sequence[Host]
    _switch: psutil.Process

    def __getitem__(self, index: int) -> Host:
        return self._all[index]

    def cut(self, index: int) -> None:
        """Pull the cable of one host: packets are lost, connections stay as they are."""
        _in(self._switch, f"ip link set {self[index]._port} down")


@contextmanager
def namespaced_hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """`count` hosts named node-0 and so on; `folder` is theirs in common. Skips where namespaces are not allowed."""
    _require_namespaces()
    (folder / "private").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        switch = stack.enter_context(_first_process([]))
        _in(switch, "ip link add bridge type bridge && ip link set bridge up")
        hosts = []
        for number in range(count):
            name, address = f"node-{number}", f"{NETWORK}.{number + 1}"
            first = stack.enter_context(_first_process([name, *_private(folder, name)]))
            _in(
                switch,
                f"ip link add port{number} type veth peer name eth0 netns {first.pid} && "
                f"ip link set port{number} master bridge up",
            )
            _in(first, f"ip addr add {address}/24 dev eth0 && ip link set eth0 up && ip link set lo up")
            hosts.append(Host(address, first, f"port{number}"))
        yield Hosts(hosts, switch)


def _private(folder: Path, name: str) -> list[str]:
    """The host's own /tmp, and what everybody has in it."""
    own = folder / "private" / name
    own.mkdir()
    everybodys = {path.resolve() for path in (folder, PROJECT, Path(sys.prefix), Path(sys.base_prefix))}
    shared = [path for path in everybodys if path.is_relative_to("/tmp") and not everybodys & {*path.parents}]
    for path in shared:
        (own / path.relative_to("/tmp")).mkdir(parents=True, exist_ok=True)
    return [str(own), *map(str, shared)]


@contextmanager
def _first_process(settings: Sequence[str]) -> Iterator[psutil.Process]:
    """A process in namespaces of its own, with everything that it and others start in them."""
    setting_up = "true"
    if settings:
        name, own, *shared = settings
        aside = [f"/run/shared-folder-{number}" for number in range(len(shared))]
        pairs = list(zip(shared, aside, strict=True))
        steps = [f"hostname {name}", "mount -t tmpfs -o size=2g tmpfs /dev/shm"]
        steps += [f"mkdir -p {there} && mount --rbind {path} {there}" for path, there in pairs]
        steps += [f"mount --bind {own} /tmp"]
        steps += [f"mount --move {there} {path}" for path, there in pairs]
        setting_up = " && ".join(steps)
    wrapper = subprocess.Popen(
        [*_ALONE, "sh", "-c", f'{setting_up} && exec {sys.executable} -S -c "{_INIT}"'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert wrapper.stdin is not None
    assert wrapper.stdout is not None
    try:
        assert wrapper.stdout.readline() == b"up\n"
        (first,) = psutil.Process(wrapper.pid).children()
        yield first
    finally:
        wrapper.stdin.close()
        wrapper.stdout.close()
        try:
            wrapper.wait(10)
        except subprocess.TimeoutExpired:
            wrapper.send_signal(signal.SIGKILL)
            wrapper.wait(10)


def _in(process: psutil.Process, script: str) -> None:
    """Run a script in the network of a process."""
    subprocess.run(["nsenter", "-t", str(process.pid), "--net", "sh", "-c", script], check=True)


def _require_namespaces() -> None:
    probe = subprocess.run(
        [*_ALONE, "sh", "-c", "ip link add left type veth peer name right"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip(f"namespaces of network, mounts and processes are not allowed here: {probe.stderr.strip()}")
