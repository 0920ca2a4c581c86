"""Which engine generates which group, and what becomes of the groups of an engine that dies. Pure.

A key stands for one group; its size is how many episodes it has, and an engine's load is the sum of the
sizes of its keys. A group stays with one engine, which holds the prefix that its episodes share. Some engines
may be set aside: they take the keys that are meant for them, and no others.

Invariants:
- A key is on one engine at most, which lives.
- An engine is given a key only if no other that takes such keys has a smaller load (ties: lowest number),
  and only up to `slots` episodes, unless the one key is larger than that by itself.
- A key outlives one engine and no more: the second death that it sees ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlsys.errors import RunError


class Loss(StrEnum):
    """Why a group was given up."""

    engine_died = "engine_died"
    """Twice."""
    timeout = "timeout"
    """Its engine lives, but has not returned it."""


class GroupLost(RunError):
    """A group will not be finished, while the run can go on: it is dropped and its prompt asked again."""

    def __init__(self, uid: str, reason: Loss, detail: str) -> None:
        super().__init__(f"the group of question {uid} is lost ({reason}): {detail}.")
        self.uid = uid
        self.reason = reason


class NoEngineLeft(RunError):
    """Every engine is dead, so nothing can be generated any more."""


class NoneSetAside(RunError):
    """Of the engines that were set aside none lives, while others do: what was to be asked of them cannot be."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """The keys of an engine that died."""

    again: tuple[str, ...]
    """To be assigned once more, in the order in which they were assigned."""
    lost: Mapping[str, str]
    """Those that had lost an engine before, and why they are given up."""


@dataclass(frozen=True, slots=True)
class _Held:
    engine: int
    size: int


class Router:
    """Deals keys to `engines` engines, each with room for `slots` episodes; no limit by default."""

    def __init__(self, engines: int, slots: int | None = None) -> None:
        if engines < 1 or (slots is not None and slots < 1):
            raise ValueError(f"A router needs at least one engine and one slot, not {engines} and {slots}.")
        self._slots = slots
        self._loads = dict.fromkeys(range(engines), 0)
        """Of the living engines alone."""
        self._closed: set[int] = set()
        self._aside: set[int] = set()
        self._held: dict[str, _Held] = {}
        self._died_under: dict[str, int] = {}
        """Keys that have lost an engine -> that engine."""

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that have not died, in order."""
        return tuple(self._loads)

    @property
    def aside(self) -> frozenset[int]:
        """Those of the `living` that are set aside."""
        return frozenset(self._aside & self._loads.keys())

    def load(self, engine: int) -> int:
        """Episodes under way on `engine`; 0 for a dead one."""
        return self._loads.get(engine, 0)

    def assign(self, key: str, size: int = 1, aside: bool = False) -> int | None:
        """The engine of `key`, which keeps it until it is released or its engine dies.

        It is one of those set `aside`, or one of the others. None if all of these are closed or full, or if all
        are set aside and another is meant: ask again after a `release`, `died`, `reopen` or `put_back`.
        Raises NoEngineLeft if none lives, NoneSetAside if none that is set aside does and one is meant.
        """
        if key in self._held:
            return self._held[key].engine
        if not self._loads:
            raise NoEngineLeft("every rollout engine has died.")
        if aside and not self.aside:
            raise NoneSetAside("every rollout engine that was set aside has died.")
        takers = (one for one in self._loads if one not in self._closed and (one in self._aside) is aside)
        engine = min(takers, key=self.load, default=None)
        if engine is None or not self._has_room(engine, size):
            return None
        self._held[key] = _Held(engine, size)
        self._loads[engine] += size
        return engine

    def release(self, key: str) -> None:
        """Forget `key`: it has ended, in whatever way. Harmless for a key that is not known."""
        self._died_under.pop(key, None)
        held = self._held.pop(key, None)
        if held is not None:
            self._loads[held.engine] -= held.size

    def close(self, engine: int) -> None:
        """Give `engine` no new key until `reopen`; those that it has go on."""
        self._closed.add(engine)

    def reopen(self, engine: int) -> None:
        """Let `engine` have keys again, if it lives."""
        self._closed.discard(engine)

    def set_aside(self, engine: int) -> None:
        """Give `engine` only keys that are meant for engines set aside, until `put_back`; those that it has go on."""
        self._aside.add(engine)

    def put_back(self, engine: int) -> None:
        """End `set_aside`."""
        self._aside.discard(engine)

    def died(self, engine: int) -> Orphans:
        """Strike `engine` off; its keys are on no engine any more. Nobody's for an engine that was dead."""
        if self._loads.pop(engine, None) is None:
            return Orphans((), {})
        again: list[str] = []
        lost: dict[str, str] = {}
        for key in [key for key, held in self._held.items() if held.engine == engine]:
            del self._held[key]
            if key in self._died_under:
                first = self._died_under.pop(key)
                lost[key] = f"engines {first} and {engine} both died under it"
            else:
                self._died_under[key] = engine
                again.append(key)
        return Orphans(tuple(again), lost)

    def _has_room(self, engine: int, size: int) -> bool:
        load = self._loads[engine]
        return self._slots is None or load == 0 or load + size <= self._slots
