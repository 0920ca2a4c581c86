"""Fingerprints of everything that a simulated run can still do: objects, tasks, stacks of coroutines, queued callbacks.

`Fingerprint` walks the graph of objects from its roots, in a fixed order, and numbers the objects as it meets them. Two
states with equal fingerprints behave alike. It follows every reference, also those on the stack of a suspended coroutine
and in C objects of asyncio, except for what `LEFT_OUT` lists: constants of the run, and history that nothing reads.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from enum import Enum
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np

from rlsys.config.schema import ClusterConfig, RunConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Sample, Trajectory
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EngineCalls, EnginePool
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.weight_sync import SyncReport
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.watched import Record

LEFT_OUT: tuple[tuple[type, frozenset[str]], ...] = (
    # What is only counted, and the order of ends, are checked as they are written; `_record` walks the rest. The status
    # lines follow from where the coroutines are.
    (
        Record,
        frozenset(
            {"script", "prompt_groups", "ended", "told", "trained", "dropped", "begun", "_worker_calls", "states"}
            | {"_accumulated", "_scored", "counted"}
        ),
    ),
    (StalenessScheduler, frozenset({"_ended", "record"})),
    (EnginePool, frozenset({"_counts", "_episodes"})),
    (EngineCalls, frozenset({"last_error"})),
    (Supervisor, frozenset({"_unrecovered", "_heartbeats"})),
)
_CONSTANTS = (
    *(Script, RunConfig, ClusterConfig, TaskConfig, Tracer, PurePath),
    *(asyncio.AbstractEventLoop, types.ModuleType, types.CodeType, types.FrameType, type, Context),
)
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})


class Fingerprint:
    """Walks objects and digests what it finds."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []
        """Objects made during the walk, so that no id is used twice."""
        self._found: list[Any] = []
        self._slots: dict[type, tuple[str, ...]] = {}

    def of(self, roots: Iterable[Any], timers: Sequence[asyncio.TimerHandle]) -> bytes:
        """Return the digest of all that the roots refer to, and of the timers, whose order does not count."""
        self._known, self._kept, self._found = {}, [], []
        for root in roots:
            self._walk(root)
        for timer in sorted(timers, key=self._place):
            self._walk(timer)
        return blake2b(repr(self._found).encode(), digest_size=16).digest()

    def _place(self, timer: asyncio.TimerHandle) -> tuple[str, tuple[Any, ...]]:
        """Return where the walk has met what the timer is about."""
        known = [
            argument if type(argument) in _ATOMS else self._known.get(id(argument), -1) for argument in timer._args
        ]
        return repr(timer._callback.__name__), tuple(map(repr, known))

    def _walk(self, one: Any) -> None:
        kind = type(one)
        if kind in _ATOMS:
            self._found.append(one)
            return
        number = self._known.get(id(one))
        if number is not None:
            self._found.append((number,))
            return
        self._known[id(one)] = len(self._known)
        self._kept.append(one)
        walk = _WALKS.get(kind)
        if walk is None:
            walk = _WALKS[kind] = _walk_of(kind)
        walk(self, one)

    def _all(self, found: Iterable[Any], end: str = ")") -> None:
        for one in found:
            self._walk(one)
        self._found.append(end)

    def sequence(self, one: Iterable[Any]) -> None:
        self._found.append("(")
        self._all(one)

    def mapping(self, one: dict[Any, Any]) -> None:
        """The order of numbered groups counts only in an ordered dict, and in the buckets of the scheduler."""
        items: Iterable[tuple[Any, Any]] = one.items()
        if type(one) is dict and len(one) > 1 and hasattr(next(iter(one)), "number"):
            items = sorted(items, key=lambda item: item[0].number)
        self._found.append("{")
        self._all(chain.from_iterable(items), "}")

    def counts(self, one: Counter[Any]) -> None:
        self._found += ["counts", sorted((repr(key), value) for key, value in one.items() if value)]

    def unordered(self, one: Iterable[Any]) -> None:
        """Sets of tasks and futures are walked in the order in which these were created."""
        ordered = sorted(one, key=lambda item: item.number if isinstance(item, asyncio.Future) else repr(item))
        self._found.append("set")
        self._all(ordered)

    def sample(self, one: Sample) -> None:
        scored = one.old_logprobs is not None, one.values is not None, one.weights is not None
        self._found += ["sample", one.reward, scored]
        self._walk(one.trajectory)

    def trajectory(self, one: Trajectory) -> None:
        self._found += ["trajectory", one.question_uid, one.sample, one.response, one.versions.tobytes()]

    def question(self, one: Question) -> None:
        self._found.append(one.uid)

    def report(self, one: SyncReport) -> None:
        """The times of a transfer decide nothing."""
        self._found += ["report", one.version, one.digest]

    def array(self, one: np.ndarray) -> None:
        self._found += [one.shape, one.tobytes()]

    def task(self, one: Any) -> None:
        self._found += ["task", one._state, one._must_cancel, one.cancelling()]
        self._all((one._coro, one._fut_waiter, [callback for callback, _ in one._callbacks or ()]))
        self._outcome(one)

    def future(self, one: Any) -> None:
        self._found += ["future", one._state]
        self._all([callback for callback, _ in one._callbacks or ()])
        self._outcome(one)

    def _outcome(self, one: Any) -> None:
        if one._state == "FINISHED":
            self._walk(one._result)
            self._found.append(repr(one._exception))

    def handle(self, one: asyncio.Handle) -> None:
        self._found += ["handle", one.cancelled()]
        if not one.cancelled():
            self._walk(one._callback)
            self._walk(one._args)

    def function(self, one: types.FunctionType) -> None:
        self._found.append(one.__qualname__)
        self._all([cell.cell_contents for cell in one.__closure__ or ()])

    def bound(self, one: Any) -> None:
        self._found.append(one.__name__)
        self._walk(one.__self__)

    def partial(self, one: functools.partial[Any]) -> None:
        self._all([one.func, *one.args, *one.keywords.values()])

    def coroutine(self, one: Any) -> None:
        """A suspended coroutine is its position, its locals and the values on its stack."""
        frame = one.cr_frame if isinstance(one, types.CoroutineType) else one.gi_frame
        self._found += ["coroutine", one.__qualname__, None if frame is None else frame.f_lasti]
        if frame is not None:
            code = frame.f_code
            # Numbers of this kind are constants or times of the wall clock, on which no choice depends.
            own = [
                found
                for found in gc.get_referents(one)
                if getattr(found, "__code__", None) is not code and type(found) is not float
            ]
            self._all(own)

    def referents(self, one: Any) -> None:
        """Walk an object of C, for example the wakeup of a task."""
        self._found.append(type(one).__name__)
        self._all(gc.get_referents(one))

    def constant(self, one: Any) -> None:
        self._found.append(type(one).__name__)

    def member(self, one: Enum) -> None:
        self._found.append(one.name)

    def error(self, one: BaseException) -> None:
        self._found.append(repr(one))

    def plain(self, one: Any) -> None:
        """Walk an object's slots and attributes."""
        kind = type(one)
        names = self._slots.get(kind)
        if names is None:
            slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
            names = self._slots[kind] = tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
        self._found.append(kind.__name__)
        self._all((getattr(one, name, None) for name in names), ";")
        left_out = _left_out(kind)
        for name, value in getattr(one, "__dict__", {}).items():
            if name not in left_out:
                self._found.append(name)
                self._walk(value)
        self._found.append(";")
        if isinstance(one, Record):
            self._record(one)

    def _record(self, one: Record) -> None:
        """Walk what later checks read of the record's history."""
        self._found.append(sorted(one.ended.items()))
        for number in sorted(one.open):
            self._found.append(number)
            self._walk(one.prompt_groups.get(number))
            self._walk(one.begun.get(number))


@functools.cache
def _left_out(kind: type) -> frozenset[str]:
    return frozenset().union(*(names for base, names in LEFT_OUT if issubclass(kind, base)))


Walk = Callable[[Fingerprint, Any], None]
_WALKS: dict[type, Walk] = {}
_BY_BASE: tuple[tuple[Any, Walk], ...] = (
    (Enum, Fingerprint.member),
    (_CONSTANTS, Fingerprint.constant),
    ((tuple, list), Fingerprint.sequence),
    (Counter, Fingerprint.counts),
    (dict, Fingerprint.mapping),
    ((set, frozenset), Fingerprint.unordered),
    (asyncio.Task, Fingerprint.task),
    (asyncio.Future, Fingerprint.future),
    (asyncio.Handle, Fingerprint.handle),
    (types.FunctionType, Fingerprint.function),
    ((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), Fingerprint.bound),
    (functools.partial, Fingerprint.partial),
    ((types.CoroutineType, types.GeneratorType), Fingerprint.coroutine),
    (Sample, Fingerprint.sample),
    (Trajectory, Fingerprint.trajectory),
    (Question, Fingerprint.question),
    (SyncReport, Fingerprint.report),
    (np.ndarray, Fingerprint.array),
    (BaseException, Fingerprint.error),
)


def _walk_of(kind: type) -> Walk:
    for bases, walk in _BY_BASE:
        if issubclass(kind, bases):
            return walk
    return Fingerprint.plain if kind.__dictoffset__ or hasattr(kind, "__slots__") else Fingerprint.referents
