"""Records which functions of rlsys run for one prompt group and for one weight version, in each process of a run.

Python imports this module automatically if its folder is on PYTHONPATH, where `bench.walks` puts it. A context variable
marks the traced work: tasks inherit it, so other concurrent work is not recorded. Every new function becomes a line of
`RLSYS_WALKS/<process id>` with the walk, its file and its name. A line "to_sglang" lists the functions between the
pipeline and a call: all functions on the stack and, in a task, also those on the stack of the task's creator.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER, PACKAGE = os.environ.get("RLSYS_WALKS"), os.environ.get("RLSYS_PACKAGE", "")
GROUP, VERSION = 0, 1
"""Numbers of the prompt group and weight version traced in the driver. A worker traces calls by their method."""
EPISODE_CALLS = ("run_group", "compute", "accumulate")
VERSION_CALLS = ("apply", "begin_export", "next_handle", "end_export", "begin_update", "load_bucket", "finish_update")
ENDS = ("publish",)
"""Functions that end a walk: the use of a version by rollouts is not traced."""
OUTSIDE = (asyncio.events.__file__, "<frozen importlib._bootstrap>")
"""Files whose frames end the walk up the stack: asyncio's event loop, which runs the task (`_chain` adds the stack that
created the task), and the import machinery."""
SGLANG = "sglang/srt/entrypoints/engine.py"

_walk: ContextVar[str] = ContextVar("walk", default="")
_stack: ContextVar[tuple[str, ...]] = ContextVar("stack", default=())
_base: ContextVar[tuple[int, str, tuple[str, ...]]] = ContextVar("base", default=(0, "", ()))
_written: set[str] = set()
_uids: set[str] = set()


def _write(line: str) -> None:
    if line not in _written:
        _written.add(line)
        with (Path(str(FOLDER)) / str(os.getpid())).open("a") as file:
            file.write(line + "\n")


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_code.co_name}"


def _ours(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of rlsys from `frame` up the stack, outermost first, up to a frame of `OUTSIDE`."""
    found = []
    while frame is not None and frame.f_code.co_filename not in OUTSIDE:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _marked(frame: FrameType) -> str:
    """Return the name of the walk that the call of `frame` starts; empty if it starts none."""
    name, known = frame.f_code.co_name, frame.f_locals
    if name == "_roll" and known["prompt_group"].number == GROUP:
        _uids.add(known["prompt_group"].question.uid)
        return "episode"
    if name == "_score" and any(group.number == GROUP for group, _ in known.get("batch", ())):
        return "episode"
    if name == "accumulate" and any(one.trajectory.question_uid in _uids for one in known.get("samples", ())):
        return "episode"
    if name in ("push", "activate") and known.get("version") == VERSION and "Sync" in type(known["self"]).__name__:
        return "version"
    if name == "call" and "method" in known and "self" in known:
        method = known["method"]
        return "episode" if method in EPISODE_CALLS else "version" if method in VERSION_CALLS else ""
    return ""


def _chain(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """Return the walk of `frame`, and the functions on the stack since the walk began, including the stacks of task
    creators."""
    try:
        task = id(asyncio.current_task())
    except RuntimeError:
        task = 0
    if _base.get()[0] != task:
        _base.set((task, _walk.get(), _stack.get()))
    _, walk, stack = _base.get()
    names = list(stack)
    for one in _ours(frame):
        if one.f_code.co_name in ENDS:
            return "", ()
        if not walk and (walk := _marked(one)):
            names = []
        if not one.f_code.co_name.startswith("<listcomp"):
            names.append(_name(one))
    return walk, tuple(names)


def _profile(frame: FrameType, event: str, _argument: Any) -> None:
    code = frame.f_code
    ours = code.co_filename.startswith(PACKAGE)
    if event == "return" and ours:
        walk, stack = _chain(frame.f_back)
        _walk.set(walk)
        _stack.set(stack)
    if event != "call":
        return
    if ours:
        walk, stack = _chain(frame)
        _walk.set(walk)
        _stack.set(stack)
        if walk:
            for name in stack:
                _write(f"{walk} {name}")
            if code.co_name == "call_rank" and frame.f_locals.get("method") == "run_group":
                _write("to_engine " + " ".join(stack))
    elif code.co_name == "async_generate" and code.co_filename.endswith(SGLANG):
        walk, stack = _chain(frame)
        if walk == "episode":
            _write("to_sglang " + " ".join(stack))


if FOLDER:
    threading.setprofile(_profile)
    sys.setprofile(_profile)
