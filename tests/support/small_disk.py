"""A disk that is really full: a tmpfs of a few kilobytes, in a user namespace of a child. Needs no root."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size="$2" none "$1" && shift 2 && exec "$@"'


def run_on_small_disk(script: str, folder: Path, size: str) -> None:
    """Run a Python script in a child where the folder that is its first argument is a disk of `size`, such as 64k.

    Its assertions fail the test. Skips the test where such a disk cannot be made.
    """
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    small = ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh", str(folder), size]
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces, or no tmpfs in them")
    child = subprocess.run(
        [*small, sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
