"""Starts `rlsys watch` in a new process."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def watching(run: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server that watches `run`; yields its address and process."""
    command = [sys.executable, "-m", "rlsys.apps.cli.main", "watch", str(run), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        line = process.stderr.readline()
        address = re.search(r"http://\S+", line)
        try:
            assert address, line + process.stderr.read()
            yield address[0], process
        finally:
            process.kill()
