"""Ray's folder, and a command that ends with its parent."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rlsys.cluster import folders
from rlsys.cluster.folders import new_ray_folder, ray_parent
from rlsys.errors import UserError


def test_a_long_folder_for_temporary_files_is_left_for_the_common_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert ray_parent() == Path("/dev/shm")
    long = tmp_path / ("long" * 10)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert ray_parent() == Path("/tmp")
    monkeypatch.setattr(folders, "_COMMON", tmp_path / "not there")
    with pytest.raises(
        UserError, match=r"TMPDIR=.*longlong is too long for Ray's sockets, .* at most \d\d bytes"
    ):
        ray_parent()


def test_the_longest_socket_fits_the_system() -> None:
    folder = new_ray_folder()
    try:
        assert len(folder.name) == len(folders._LONGEST.partition("/")[0])
        with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match="too long"):
            probe.bind("/" + "x" * folders.MOST_BYTES)
        with socket.socket(socket.AF_UNIX) as probe:
            name = str(folder / "s")
            probe.bind(name.ljust(folders.MOST_BYTES, "s"))
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_a_tethered_command_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, time\n"
            "from rlsys.cluster.tether import tethered\n"
            "subprocess.Popen(tethered(['sh', '-c', 'echo $$; exec sleep 300']))\n"
            "time.sleep(300)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone
