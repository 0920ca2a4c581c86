"""Ray's folder, and a command that ends with its parent."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rlsys.cluster import local_ray as folders
from rlsys.cluster.local_ray import ray_folder, ray_parent, rays_own
from tests.support.refusals import refused


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


def test_only_this_user_enters_a_folder_and_those_of_the_killed_go_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/dev/shm" if len(str(tmp_path)) > 30 else str(tmp_path))
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


STARTS = """
import subprocess, time
from rlsys.cluster.local_ray import ends_with_parent
subprocess.Popen(ends_with_parent(["sh", "-c", "echo $$; exec sleep 3600"]))
time.sleep(3600)
"""


def test_a_command_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone
