"""Writes the stacks of all processes of a run into its folder, and names the call that a process is in.

    outputs/RUN/stacks/20261128-081500/actor-1.txt     threads of the worker, innermost frame first
                                       rollout-0.sglang__scheduler.4711.txt
                                       driver.txt      threads and asyncio tasks of the driver

A process belongs to the run if its stderr is a file in the run's `logs`: workers, SGLang's processes and the search
server, on any machine. Each of them writes its stacks to stderr on `SIGNAL` (`faulthandler.register`), also while it is
blocked in native code or computes in an endless loop; faulthandler leaves out the oldest of more than 100 threads. A
process that cannot, because it is stopped or has registered no handler, gets a file with its state and the kernel function
that it waits in. `dump` never fails or blocks for long.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.cluster.runtime import answer
from rlsys.errors import RunError
from rlsys.files import write_atomically

SIGNAL = signal.SIGUSR1
"""Signal on which the processes of a run write their stacks to stderr."""
STACKS = "stacks"
"""Folder of the stacks within a run folder."""
DRIVER = "driver"
ANSWER_S = 5.0
"""Time limit for one process to write its stacks."""
MACHINE_S = 60.0
"""Time limit for another machine to return the stacks of its processes."""
REUSE_S = 30.0
"""Age up to which stacks are used again: calls of several groups often end at the same time."""
_POLL_S, _STILL = 0.05, 10
"""Interval of reading, and readings without a new line after which a process has written its stacks."""
_OF_STACKS = re.compile(r"(?:Current thread|Thread) 0x|  (?:File \"|\.\.\.$|<no Python frame>|Garbage-collecting)|$")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_SERVED = "rlsys/cluster/worker_group.py"
"""File with the functions that call a worker's methods."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacks of a run's processes at one time."""

    folder: Path
    texts: Mapping[str, str]
    """Name of a process -> content of its file. A worker has the name of its log without ".log"."""


@dataclass(slots=True)
class StackWriter:
    """Writes the stacks of one run. Calls within `REUSE_S` share one result."""

    run_dir: Path
    _last: tuple[float, Stacks] | None = field(default=None, init=False)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def dump(self) -> Stacks:
        """Write the stacks of all processes of the run, and return them."""
        async with self._writing:
            if self._last is None or time.monotonic() - self._last[0] > REUSE_S:
                found = await self._dump()
                self._last = time.monotonic(), found
            return self._last[1]

    def dump_here(self) -> Stacks:
        """Write the stacks of this machine's processes, without the event loop."""
        return write_stacks(self.run_dir, {DRIVER: threads_of_this_process()} | stacks_here(self._logs))

    @property
    def _logs(self) -> str:
        return str((self.run_dir / "logs").resolve())

    async def _dump(self) -> Stacks:
        logs = self._logs
        texts = {DRIVER: f"{threads_of_this_process()}\n{tasks_of(asyncio.get_running_loop())}"}
        here, others = await asyncio.gather(asyncio.to_thread(stacks_here, logs), _stacks_elsewhere(logs))
        return write_stacks(self.run_dir, texts | others | here)


def write_stacks(run_dir: Path, texts: Mapping[str, str]) -> Stacks:
    """Write one file per process into a new folder of the run. On a disk error, the texts are only returned."""
    name = time.strftime("%Y%m%d-%H%M%S")
    folder = next(
        path
        for number in range(1000)
        if not (path := run_dir / STACKS / (f"{name}-{number}" if number else name)).exists()
    )
    with suppress(OSError):
        folder.mkdir(parents=True)
        for process, text in texts.items():
            write_atomically(folder / f"{process}.txt", text)
    return Stacks(folder, texts)


def stacks_here(logs: str) -> dict[str, str]:
    """Return name -> stacks of this machine's processes whose stderr is in the folder `logs`."""
    by_log: dict[Path, list[int]] = {}
    for pid, log in processes_of(os.path.realpath(logs)):
        by_log.setdefault(log, []).append(pid)
    if not by_log:
        return {}
    # Processes that share a log write one after the other.
    with ThreadPoolExecutor(len(by_log), thread_name_prefix="stacks") as threads:
        found = threads.map(
            lambda item: {_name(pid, item[0], item[1]): _text(pid, item[0]) for pid in item[1]}, by_log.items()
        )
        return {name: text for of_log in found for name, text in of_log.items()}


def call_of(text: str) -> str | None:
    """Return the call that a worker is in: "all_reduce, called by accumulate (rlsys/trainer/actor.py:231)".

    `text` is the content of its file. The call is the innermost function of torch.distributed, else the innermost
    function; its caller is the innermost function that belongs to no library. None if the stacks are unknown.
    """
    threads = [block for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", f"\n{text}") if _FRAME.search(block)]
    if not threads:
        return None
    # The main thread is the last one.
    thread = next((block for block in threads if _SERVED in block), threads[-1])
    frames = [match.groupdict() for match in _FRAME.finditer(thread)]
    place = next((at for at, frame in enumerate(frames) if "/torch/distributed/" in frame["file"]), 0)
    caller = next((one for one in frames[place:] if _is_own(one["file"])), None)
    call = frames[place]["function"]
    if caller is None or caller is frames[place]:
        return f"{call} ({_where(frames[place])})"
    return f"{call}, called by {caller['function']} ({_where(caller)})"


def threads_of_this_process() -> str:
    """Return the stacks of all threads of this process, the main thread last.

    In the form of faulthandler, without its limit.
    """
    main, own, stacks = threading.main_thread().ident, threading.get_ident(), current_frames()
    parts = [f"process {os.getpid()} (driver)\n"]
    for ident in sorted(stacks, key=lambda ident: (ident == main, ident)):
        parts.append(f"{'Current thread' if ident == own else 'Thread'} 0x{ident:016x} (most recent call first):")
        for frame, line in traceback.walk_stack(stacks[ident]):
            parts.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}')
        parts.append("")
    return "\n".join(parts)


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread by its identifier.

    No garbage is collected meanwhile: CPython 3.11 holds a lock here that a new thread needs, and a finaliser or a callback
    of the collector lets other threads run, which then wait for each other for ever (github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def tasks_of(loop: asyncio.AbstractEventLoop) -> str:
    """Return name and stack of each task of `loop`, innermost frame first."""
    parts = []
    for task in sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name):
        frames = [f'  File "{file}", line {line} in {function}' for file, line, function in _awaited(task.get_coro())]
        parts.append("\n".join([f"Task {task.get_name()} (most recent call first):", *reversed(frames)]))
    return "\n\n".join(parts) + "\n"


def _awaited(awaitable: Any) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of a coroutine and of each coroutine or generator that it awaits."""
    while awaitable is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaitable, f"{kind}_frame")), None)
        if kind is None:
            return
        frame = getattr(awaitable, f"{kind}_frame")
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


async def _stacks_elsewhere(logs: str) -> dict[str, str]:
    """Return the stacks of the processes on the other machines of the Ray cluster."""
    if not ray.is_initialized():
        return {}
    try:
        own = ray.get_runtime_context().get_node_id()
        nodes = [node for node in await answer(ray.nodes) if node["Alive"] and node["NodeID"] != own]
        task = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
        found = await asyncio.gather(*(_stacks_at(task, node, logs) for node in nodes))
    except (RunError, ray.exceptions.RayError) as problem:
        return {"other-machines": f"The stacks of other machines are unknown: {problem}\n"}
    return {name: text for texts in found for name, text in texts.items()}


async def _stacks_at(task: Any, node: Mapping[str, Any], logs: str) -> dict[str, str]:
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    host = node["NodeManagerHostname"]
    try:
        ref = task.options(scheduling_strategy=there).remote(logs)
        async with asyncio.timeout(MACHINE_S):
            texts: dict[str, str] = await asyncio.wrap_future(ref.future())
    except (TimeoutError, ray.exceptions.RayError) as problem:
        why = str(problem) or f"it did not answer within {MACHINE_S:.0f} s"
        return {f"machine-{_plain(host)}": f"The stacks of the processes on {host} are unknown: {why}\n"}
    return {name: f"on {host}: {text}" for name, text in texts.items()}


def processes_of(logs: str) -> Iterator[tuple[int, Path]]:
    """Yield process id and log of each process of this machine whose stderr is in `logs`."""
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with suppress(OSError):  # The process has ended, or belongs to another user.
            log = os.readlink(f"/proc/{pid}/fd/2")
            if log.startswith(f"{logs}{os.sep}"):
                yield pid, Path(log)


def _name(pid: int, log: Path, sharing: Sequence[int]) -> str:
    """Return the name of a process; the first process of a log has the log's name."""
    facts = _facts(pid)
    if int(facts.get("PPid", "0")) not in sharing:
        return log.stem
    return f"{log.stem}.{_plain(facts.get('Name', 'process'))}.{pid}"


def _text(pid: int, log: Path) -> str:
    """Return a process's state and its stacks, or the reason why these are unknown."""
    facts = _facts(pid)
    if not facts:
        return f"process {pid} ended before its stacks were read.\n"
    lines = [
        f"process {pid} ({facts.get('Name', '?')}), child of {facts.get('PPid', '?')}, state {facts.get('State', '?')}"
    ]
    for name in ("wchan", "stack"):  # Only root may read the kernel's stack.
        with suppress(OSError):
            told = Path(f"/proc/{pid}/{name}").read_text().strip("\0\n")
            if told not in ("", "0"):
                lines.append(f"in the kernel: {told}" if name == "wchan" else f"kernel stack:\n{told}")
    if facts.get("State", "").startswith(("T", "t")):
        why = "it is stopped, so it cannot answer a signal; `kill -CONT` continues it"
    elif facts.get("State", "").startswith("Z"):
        why = "it has ended, and its parent has not noticed"
    elif not int(facts.get("SigCgt", "0"), 16) >> (SIGNAL - 1) & 1:
        why = f"it has no handler for {SIGNAL.name}"
    elif stacks := _answer(pid, log):
        return "\n".join([*lines, "", stacks])
    else:
        why = f"it did not write them within {ANSWER_S:.0f} s of {SIGNAL.name}"
    return "\n".join([*lines, "", f"The Python stack is unknown: {why}.\n"])


def _answer(pid: int, log: Path) -> str:
    """Ask a process for its stacks, and return what it adds to its log; empty if it does not answer."""
    found = ""
    with suppress(OSError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        os.kill(pid, SIGNAL)
        until, text, still = time.monotonic() + ANSWER_S, b"", 0
        while time.monotonic() < until and still < _STILL:
            time.sleep(_POLL_S)
            text, before = text + file.read(), found
            found = _only_stacks(text.decode(errors="replace"))
            still = still + 1 if found and found == before else 0
    return found


def _only_stacks(text: str) -> str:
    """Return the lines of `text` that faulthandler wrote; other threads may have written to the log meanwhile."""
    lines = [line for line in text.splitlines() if _OF_STACKS.match(line)]
    first = next((place for place, line in enumerate(lines) if line.strip()), len(lines))
    return "\n".join([*lines[first:], ""]) if lines[first:] else ""


def _facts(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if the process is gone."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _is_own(file: str) -> bool:
    """Return True for code of rlsys or of the user, which belongs to no library."""
    *above, path = _PACKAGES.split(file)
    library = bool(above) and not path.startswith("rlsys/")
    return not library and "/lib/python3" not in path and not path.startswith("<") and not file.endswith(_SERVED)


def _where(frame: Mapping[str, str]) -> str:
    file = frame["file"]
    own = file.rfind("/rlsys/")
    return f"{file[own + 1 :] if own >= 0 else file}:{frame['line']}"


def _plain(text: str) -> str:
    """Return `text` as a part of a file name."""
    return re.sub(r"[^\w.-]", "_", text)
