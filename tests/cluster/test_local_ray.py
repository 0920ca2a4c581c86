"""Tests of a Ray on this machine: token, folder, addresses, ports, and commands that end with their parent."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist

from rlsys.cluster import local_ray
from rlsys.cluster.local_ray import (
    INTERFACE_VARIABLES,
    MODE,
    address_here,
    descendants,
    interface_settings,
    promised_port,
    ray_folder,
    ray_parent,
    rays_own,
    require_token,
    scratch,
    temporary_files_in,
    token_file,
)
from rlsys.errors import Code
from rlsys.files import LOCK, SHARED_MEMORY, remove_shared_memory, tie_shared_memory
from tests.support.processes import is_gone
from tests.support.refusals import refused

TOKEN = {MODE: "token"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_token_is_made_once_and_only_this_user_can_read_it() -> None:
    before = os.umask(0)
    try:
        assert require_token({}, make=True) == TOKEN
    finally:
        os.umask(before)
    token = token_file().read_text()
    assert len(token) == 64
    assert int(token, 16) >> 192, "random up to the first bytes"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token_file(), token_file().parent)] == [0o600, 0o700]
    token_file().chmod(0o644)
    assert require_token({}, make=True) == require_token({}, make=False) == TOKEN
    assert token_file().read_text() == token
    assert stat.S_IMODE(token_file().stat().st_mode) == 0o600, "unreadable for others again"
    assert [*token_file().parent.iterdir()] == [token_file()]


def test_threads_that_make_a_token_at_once_get_the_same() -> None:
    together = threading.Barrier(8, timeout=600)

    def make(_number: int) -> str:
        together.wait()
        require_token({}, make=True)
        return token_file().read_text()

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(make, range(8)))
    assert made == {token_file().read_text()}


def test_token_of_the_environment_needs_no_file(tmp_path: Path) -> None:
    assert require_token({"RAY_AUTH_TOKEN": "t"}, make=False) == TOKEN
    elsewhere = tmp_path / "elsewhere"
    with refused("not_found", elsewhere):
        require_token({"RAY_AUTH_TOKEN_PATH": str(elsewhere)}, make=True)
    assert not elsewhere.exists(), "a file that the user names is not created"
    elsewhere.write_text("t")
    assert require_token({"RAY_AUTH_TOKEN_PATH": str(elsewhere)}, make=False) == TOKEN
    assert not token_file().exists()


def test_missing_blocked_or_empty_token_file_is_refused() -> None:
    with refused("not_found", token_file()):
        require_token(TOKEN, make=False)
    token_file().parent.write_text("in the way")
    with refused("denied", token_file()):
        require_token({}, make=True)
    token_file().parent.unlink()
    token_file().parent.mkdir()
    token_file().touch()
    with refused("empty", token_file()):
        require_token({}, make=True)


def test_no_token_is_required_if_the_user_disables_it(caplog: pytest.LogCaptureFixture) -> None:
    assert require_token({MODE: "disabled"}, make=True) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not token_file().exists()
    with refused("unknown", MODE):
        require_token({MODE: "none"}, make=True)


def test_long_temporary_folder_is_replaced_by_the_common_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert ray_parent() == Path("/dev/shm")
    long = tmp_path / ("long" * 10)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert ray_parent() == Path("/tmp")
    monkeypatch.setattr(local_ray, "_COMMON", tmp_path / "not there")
    with refused("out_of_range", "TMPDIR"):
        ray_parent()


WAITS = """
import time
from rlsys.cluster.local_ray import ray_folder, rays_own
with ray_folder() as folder:
    rays_own(folder).mkdir(0o777)
    print(folder, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Folder with a path that is short enough for Ray's sockets; other tests' runs do not clean up in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_folder_is_private_and_removed_by_the_next_after_its_process_was_killed(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(short_folder))
    children = [subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    made = [Path(child.stdout.readline().strip()) for child in children if child.stdout]
    try:
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700, 0o700]
        children[0].kill()
        children[0].wait()
        with ray_folder() as mine:
            assert mine.is_dir()
            assert not made[0].exists(), "its process was killed"
            assert rays_own(made[1]).is_dir(), "its process lives"
    finally:
        for child in children:
            child.kill()
            child.communicate()
    with ray_folder():
        assert not made[1].exists()


def test_folder_that_another_process_is_just_making_is_left_to_it(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has made the lock file, and is about to lock it."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    new = short_folder / f"{local_ray._PREFIX}new"
    new.mkdir(mode=0o700)
    (new / LOCK).touch()
    with ray_folder():
        assert (new / LOCK).is_file()


def test_temporary_files_and_shared_memory_of_killed_processes_go_with_the_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    with ray_folder() as folder:
        with temporary_files_in(folder):
            made = subprocess.run(["mktemp"], capture_output=True, text=True, check=True).stdout.strip()
        assert Path(made).parent == scratch(folder)
        prefix = f"test-{secrets.token_hex(4)}-"
        tie_shared_memory(f"{prefix}*", scratch(folder), owner=1)
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix=prefix, delete=False) as memory:
            remove_shared_memory(scratch(folder), owner=2)
            assert Path(memory.name).exists(), "it belongs to another"
        (scratch(folder) / "elsewhere").symlink_to(kept)
    assert not Path(made).exists()
    assert not Path(memory.name).exists()
    assert kept.exists(), "only links to shared memory are followed"


def test_process_of_ray_that_hangs_does_not_block_its_shutdown(tmp_path: Path) -> None:
    raylet = shutil.copy(str(shutil.which("sleep")), tmp_path / "raylet")
    with subprocess.Popen([raylet, "3600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            with local_ray.local_ray(lambda: process.wait(600), patience_s=0.1):
                assert local_ray.ray_processes() == {"raylet": psutil.Process(process.pid)}
            assert process.returncode is not None
        finally:
            process.kill()


STARTS = """
import subprocess, time
from rlsys.cluster.local_ray import ends_with_parent
subprocess.Popen(ends_with_parent(["sh", "-c", "echo $$; exec sleep 3600"]))
time.sleep(3600)
"""


def test_command_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=600)
    assert gone


ADDRESSES = {"127.0.0.1": "lo", "10.0.0.7": "ib0", "192.168.1.5": "eth0"}


def test_interface_is_that_of_the_address_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = INTERFACE_VARIABLES
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert interface_settings("10.0.0.7", ADDRESSES) == {gloo: "ib0", nccl: "=ib0"}
    monkeypatch.setenv(nccl, "ib1")
    assert interface_settings("10.0.0.7", ADDRESSES) == {gloo: "ib0"}
    assert interface_settings("10.9.9.9", ADDRESSES) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_local_names_resolve_to_an_address_for_other_machines(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "own_addresses", lambda: ADDRESSES | {"fd00::1": "eth0"})
    resolve = socket.getaddrinfo
    debian = {socket.gethostname(): "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest: resolve(debian.get(name, name), *rest))
    with monkeypatch.context() as patch:
        patch.setattr(local_ray, "address_towards", lambda _: "192.168.1.5")
        assert address_here(host) == "192.168.1.5", "the address towards other machines"
    monkeypatch.setattr(local_ray, "address_towards", Mock(side_effect=OSError))
    assert address_here(host) == "10.0.0.7", "the first of the interfaces"
    monkeypatch.setattr(local_ray, "own_addresses", lambda: {"127.0.0.1": "lo", "fd00::1": "eth0"})
    with refused("unreachable", "--head"):
        address_here(host)


@pytest.mark.parametrize(("host", "code"), [("10.9.9.9", "mismatch"), ("fd00::1", "unknown")])
def test_address_of_another_machine_is_refused(host: str, code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "own_addresses", lambda: ADDRESSES)
    assert address_here("192.168.1.5") == "192.168.1.5"
    with refused(code, "--head"):
        address_here(host)


def test_promised_port_is_kept_for_its_listener() -> None:
    with promised_port() as promise:
        port = promise.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("here", "1")
        assert dist.TCPStore("127.0.0.1", port, 1).get("here") == b"1"
        with pytest.raises(dist.DistNetworkError, match="already in use"):
            dist.TCPStore("127.0.0.1", port, 1, is_master=True)


def test_processes_that_a_search_server_starts_beside_ray_are_left_to_it() -> None:
    shell = ["sh", "-c", "read line; sleep 3600 & echo $!; read line; kill $!"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        with local_ray.local_ray(lambda: None):
            print(file=server.stdin, flush=True)
            child = psutil.Process(int(server.stdout.readline()))
        assert not is_gone(child)
        server.communicate("\n")


@pytest.mark.parametrize(("name", "counts"), [("/x/wandb/bin/wandb-core", False), ("/x/wandb-core", True)])
def test_service_of_wandb_is_left_to_end_by_itself(name: str, counts: bool) -> None:
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (process.pid in {one.pid for one in descendants()}) is counts
        process.communicate()
