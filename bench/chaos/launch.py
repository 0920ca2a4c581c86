"""Runs one launch of `rlsys train`, strikes its processes, and finds what outlives it.

A campaign runs in namespaces of its own (`enter`): the processes, /dev/shm and the file system `OUT` that a launch sees
are the launch's alone, so that whatever remains there was left over by it, and a full disk is full for nobody else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.chaos.faults import HELD_S, SEARCH, STAGES, Fault, Kind
from bench.chaos.findings import Row, still_open
from bench.chaos.proxy import Proxy
from rlsys.observe.faults import FAULTS
from rlsys.observe.status import FINISHED, read_status

HOME = Path("/tmp/rlsys-chaos")
"""Folder of a campaign; short, because Ray puts sockets below TMPDIR."""
OUT, TMP, SHARED = HOME / "out", HOME / "tmp", Path("/dev/shm")
_BALLAST = OUT / "ballast"
_INSIDE = "RLSYS_CHAOS"
POLL_S = 0.2
GRACE_S = 20.0
"""Time for processes to end after the driver has ended."""
_ACTIVITY = re.compile(r" rlsys\.observe\.status: ([^:]+): (.*)$")


def isolated(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in new user, mount and process namespaces, which needs no root.

    `OUT`, `TMP` and /dev/shm are empty file systems there; outside, empty folders.
    """
    for folder in (OUT, TMP):
        folder.mkdir(parents=True, exist_ok=True)
    sizes = {OUT: "1g", TMP: "50%", SHARED: "50%"}
    mounts = " && ".join(f"mount -t tmpfs -o size={size} none {folder}" for folder, size in sizes.items())
    shell = f'{mounts} && "$@"; status=$?; exit $status'  # The shell stays, as process 1, and reaps orphans.
    spaces = ["--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *spaces, "sh", "-c", shell, "sh", *command]


def enter() -> None:
    """Replace this command by the same one in namespaces of its own, which end with it; returns inside of them."""
    if os.getppid() == 1 and _INSIDE in os.environ:
        return
    os.environ[_INSIDE] = str(HOME)
    command = isolated([sys.executable, "-m", "bench.chaos", *sys.argv[1:]])
    os.execvp(command[0], command)


def others(spared: Collection[int] = ()) -> list[psutil.Process]:
    """Return the living processes of this namespace, but for this one, process 1 and `spared` with their descendants.

    Raises RuntimeError outside of the namespaces of a campaign, where the others are strangers.
    """
    if os.getppid() != 1 or _INSIDE not in os.environ:
        raise RuntimeError("The processes of a campaign can be told from others only in its own namespaces.")
    kept = {1, os.getpid(), *spared}
    for pid in spared:
        with suppress(psutil.NoSuchProcess):
            kept |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.pid not in kept and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def described(process: psutil.Process) -> str:
    """Return a process's command, and the ports on which it listens."""
    try:
        listening = [one.laddr.port for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        words = " ".join(process.cmdline())[:120] or process.name()
    except psutil.Error:
        return f"process {process.pid}"
    return words + (f", which listens on {listening}" if listening else "")


class Launch:
    """One process of `rlsys train` and its descendants. Its stderr is read as it is written."""

    def __init__(self, settings: Sequence[str], out: Path, log: Path, spared: Collection[int]) -> None:
        """`out`: folder for the run's folder. `log` gets the driver's stderr. `spared`: processes that are not its own."""
        settings = [*settings, f"output_dir={out}"]
        command = [sys.executable, "-m", "rlsys.apps.cli.main", "train", *settings]
        environment = os.environ | {"RLSYS_LOG": "debug", "TMPDIR": str(TMP), "OMP_NUM_THREADS": "1"}
        self.driver = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self.activities: dict[str, str] = {}
        """Stage -> its latest activity in the log."""
        self.worked_at: float | None = None
        """Time of the first optimiser step, on the monotonic clock."""
        self._out, self._log, self._spared = out, log, spared
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.driver.stderr is not None
        with self._log.open("a") as file:
            for line in self.driver.stderr:
                file.write(line)
                file.flush()
                with self._news:
                    self.lines.append(line)
                    if self.worked_at is None and STAGES["optimiser step"][0] in line:
                        self.worked_at = time.monotonic()
                    if found := _ACTIVITY.search(line):
                        self.activities[found[1]] = found[2]
                    self._news.notify_all()

    def printed(self) -> str:
        """Return stderr of the driver so far; all of it once the driver has ended."""
        if self.code is not None:
            self._reader.join(POLL_S * 10)
        return "".join(self.lines)

    @property
    def code(self) -> int | None:
        """Exit status, None while the driver lives."""
        return self.driver.poll()

    def reaches(self, stage: str, skipped: int, limit_s: float) -> bool | None:
        """Wait until the run enters `stage` after `skipped` more entries; False if it ends first, None after `limit_s`
        without a new line of its log."""
        text, seen = STAGES[stage][0], 0 if stage == "start" else len(self.lines)
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    skipped -= text in line
                    if skipped < 0:
                        return True
                if self.code is not None:
                    return False
                seen, until = len(self.lines), time.monotonic() + limit_s
                while len(self.lines) == seen and self.code is None:
                    if time.monotonic() > until:
                        return None
                    self._news.wait(POLL_S)

    def victims(self, process: str) -> list[psutil.Process]:
        """Return the processes of the launch that are a `process` of `faults.PARTS`."""
        return [one for one in others(self._spared) if _is(process, one)]

    def strike(self, fault: Fault, proxy: Proxy | None, limit_s: float) -> Row | None:
        """Wait `fault.wait_s`, then do it; None if the launch ends before it has such a process."""
        row, dice = Row(fault), fault.random()
        time.sleep(fault.wait_s)
        if fault.kind is Kind.disk:
            _fill()
            self._later(heal)
        elif proxy is not None:
            proxy.mode = fault.kind
            if fault.kind is not Kind.slow:
                self._later(proxy.heal)
        else:
            until = time.monotonic() + limit_s
            while not (found := self.victims(fault.process)):
                if self.code is not None or time.monotonic() > until:
                    return None
                time.sleep(POLL_S)
            victim = dice.choice(sorted(found, key=lambda one: one.pid))
            self._signal(victim, fault)
        row.during = "; ".join(f"{stage}: {text}" for stage, text in self.activities.items() if text)
        return row

    def _signal(self, victim: psutil.Process, fault: Fault) -> None:
        signals = {Kind.kill: signal.SIGKILL, Kind.stop: signal.SIGSTOP, Kind.exit: signal.SIGTERM}
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signals[fault.kind])
        if fault.kind is Kind.stop and fault.process == "driver":
            self._later(lambda: victim.send_signal(signal.SIGCONT))

    def _later(self, action: Callable[[], object]) -> None:
        def act() -> None:
            with suppress(psutil.NoSuchProcess):
                action()

        timer = threading.Timer(HELD_S, act)
        timer.daemon = True
        timer.start()

    def steps(self) -> int:
        """Return the number of steps that the newest run folder has recorded."""
        folder = newest(self._out)
        with suppress(OSError):
            return 0 if folder is None else (folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def open_faults(self) -> int:
        """Return the number of faults that the run has recorded as begun and not as over."""
        folder = newest(self._out)
        try:
            return still_open(map(json.loads, (folder / FAULTS).read_text().splitlines())) if folder else 0
        except OSError:  # Not written yet.
            return 0

    def ending(self) -> str | None:
        """Return how the newest run ended according to its status.json; None if it does not say."""
        folder = newest(self._out)
        found = read_status(folder) if folder else None
        return found["ended"] if found and found.get("ended") not in (None, FINISHED) else None

    def end(self) -> None:
        """Kill every process of the launch that still lives."""
        _kill(others(self._spared))
        self.driver.wait()

    def left_over(self) -> list[str]:
        """Return what is left of an ended launch, and remove it.

        A driver that was killed can remove no file, so its files are left to the next launch.
        """
        return left_over(self._spared, [TMP, SHARED] if (self.code or 0) >= 0 else [])


def left_over(spared: Collection[int], folders: Sequence[Path], grace_s: float = GRACE_S) -> list[str]:
    """Return the processes that still live after `grace_s`, and what is in `folders`; end and remove all of it."""
    until = time.monotonic() + grace_s
    while (remaining := others(spared)) and time.monotonic() < until:
        time.sleep(POLL_S)
    found = [described(process) for process in remaining]
    _kill(remaining)
    for path in (path for folder in folders for path in folder.iterdir()):
        found.append(f"file {path}")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=GRACE_S)


def _is(kind: str, process: psutil.Process) -> bool:
    folder = Path("/proc") / str(process.pid)
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        log = (folder / "fd/1").readlink().name
    except OSError:
        return False
    name = Path(words.partition(" ")[0]).name
    match kind:
        case "driver":
            return "rlsys.apps.cli.main" in words  # Also the process that starts a killed driver again.
        case "engine":
            return log.startswith("rollout-") and words.startswith("ray::")
        case "scheduler" | "detokenizer":
            return words.startswith(f"sglang::{kind}")
        case "inference" | "actor" | "critic":
            return log == f"{kind}-0.log" and words.startswith("ray::")
        case "raylet":
            return name == "raylet"
        case "gcs":
            return name == "gcs_server"
        case _:
            return kind == SEARCH and "rlsys.search.server" in words


def _fill() -> None:
    """Leave no byte free in the file system of `OUT`."""
    with suppress(OSError), _BALLAST.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    with suppress(OSError), _BALLAST.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))


def heal() -> None:
    """End a full disk."""
    _BALLAST.unlink(missing_ok=True)


def newest(out: Path) -> Path | None:
    """Return the newest run folder in `out`; their names end with the time of their start."""
    return max(out.glob("*-*"), default=None)
