"""Runs the repository's shell scripts like a user: from any directory, with settings in the environment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


def environment(**settings: str | Path) -> dict[str, str]:
    """Current environment with `settings`; without PYTHONPATH, which would let Python find the project, and without the
    variables that the published scripts read."""
    dropped = ("PYTHONPATH", "DATA_DIR", "BASE_MODEL", "EXPERIMENT_NAME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    fixed = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return kept | fixed | {k: str(v) for k, v in settings.items()}


def run_script(
    script: Path, *arguments: str | Path, cwd: Path, shell: str = "sh", **settings: str | Path
) -> subprocess.CompletedProcess[str]:
    command = [shell, str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(**settings), capture_output=True, text=True, check=False)


@contextmanager
def served(script: Path, *arguments: str | Path, cwd: Path, **settings: str | Path) -> Iterator[str]:
    """Run the server that `script` starts; yields its URL once it answers, and asserts that SIGTERM ends it with 0."""
    command, log = ["sh", str(script), *map(str, arguments)], cwd / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment(**settings), stdout=output, stderr=output)
    try:
        yield _address(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                with httpx.Client(trust_env=False, timeout=600) as client:
                    if client.get(f"{word}/health").status_code == 200:
                        return word
        time.sleep(0.1)
    raise AssertionError(log.read_text())
