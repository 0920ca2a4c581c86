"""`rlsys launch` on namespaced hosts, looked at from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console

from examples.searchr1.tiny.demo import prepare_world
from tests.cluster.launch.hosts import Host, Hosts

LIMIT_S = 540
SETTINGS = [
    "eval.interval=0",
    "eval.limit=4",
    "trainer.steps=2",
    "trainer.prompts_per_step=8",
    "trainer.mini_batches=2",
    "tracking.wandb=false",
    "tracking.tensorboard=false",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.sync_mode=broadcast",
    "cluster.placement={actor: '0-1', inference: '2', rollout: '3'}",
    "rollout.engine.kv_cache_tokens=16384",
]
"""The actor on the first machine, the others on the second."""


class Launched:
    """The launcher of one host, while it runs and afterwards."""

    def __init__(
        self, host: Host, rank: int, head: Host, folder: Path, *arguments: str, home: Path | None = None
    ) -> None:
        self.host = host
        self.log = folder / f"launch-{rank}.log"
        where = ["--rank", str(rank), "--nodes", "2", "--head", head.address]
        command = [sys.executable, "-m", "rlsys.apps.cli.main", "launch", "--config-name", "searchr1_tiny_cpu", *where]
        self._process = host.start(
            [*command, f"output_dir={folder}/outputs", *SETTINGS, *arguments],
            self.log,
            {"HOME": str(home)} if home else None,
        )

    def wait(self) -> int:
        """Its exit status."""
        try:
            return self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"still running:\n{self.said()}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the launcher itself, which is below the command that enters the host."""
        (launcher,) = psutil.Process(self._process.pid).children()
        launcher.send_signal(number)

    def said(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")

    def leaves_nothing(self) -> bool:
        """Whether no process and none of its folders are left on its host."""
        wait_until(lambda: not self.host.processes(), 60, self)
        return "rlsys-" not in self.host.run("ls", "/tmp")


def launch(
    hosts: Hosts,
    folder: Path,
    *arguments: str,
    ranks: tuple[int, ...] = (0, 1),
    preflight: bool = False,
    home: Path | None = None,
) -> list[Launched]:
    """Start the launchers of some of two hosts; `home` is everybody's, by default this user's."""
    prepare_world(Console(quiet=True))
    folder.mkdir(exist_ok=True)
    flag = "--preflight" if preflight else "--no-preflight"
    return [Launched(hosts[rank], rank, hosts[0], folder, flag, *arguments, home=home) for rank in ranks]


def run_folder(folder: Path) -> Path:
    """Of the one run below `folder`."""
    (found,) = (folder / "outputs").glob("searchr1_tiny_cpu-*")
    return found


def wait_until(condition: Callable[[], object], limit_s: float, *launched: Launched) -> None:
    """Return once `condition` holds. Raises AssertionError, with what the launchers said, if it does not in time."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "\n".join(one.said() for one in launched)
        time.sleep(0.2)
