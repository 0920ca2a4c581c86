"""Tracks which engines a run has and which of them may take work: immutable snapshots, events, and the router. Pure.

    join --> starting --> joining --> serving <--> suspect
             process      weights        |            |
                                         +------------+--> removed (died or hung), or starting again
                                         +------------+--> leaving --> removed, once its groups have ended

A member is one life of an engine: an engine that is started again is another member with the same number. An event
about a member that has been removed changes nothing, so a late answer of a dead process cannot harm its successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from rlsys.errors import RunError


class NoEngineLeft(RunError):
    """Every engine is dead, and none will be started again; the run cannot continue."""


class NoneSetAside(RunError):
    """All engines set aside are dead while others live; requests for engines set aside fail."""


class Standing(StrEnum):
    """State of a member."""

    starting = "starting"
    """Its process and its model are being started."""
    joining = "joining"
    """It receives its first weights, alone."""
    serving = "serving"
    suspect = "suspect"
    """It makes no progress: it gets no new work until it does."""
    leaving = "leaving"
    """It gets no new groups, and leaves when those that it has have ended."""


@dataclass(frozen=True, slots=True)
class Member:
    """One life of an engine."""

    engine: int
    """Rank in the rollout group; names the devices."""
    life: int
    """Unique within a run's process."""
    standing: Standing
    version: int | None = None
    """Weight version in use; None before the first update."""
    aside: bool = False
    """True if it serves an evaluation while the others roll out."""

    @property
    def lives(self) -> bool:
        """True if it has been admitted: it receives every new version."""
        return self.standing in (Standing.serving, Standing.suspect, Standing.leaving)


@dataclass(frozen=True)  # Without slots, so that each list is made once per snapshot: every prompt group asks for some.
class Members:
    """All members at one moment. Each event returns the next snapshot.

    Invariant: a member takes rollouts only if it serves, is not set aside, and has `version` or a newer one.
    """

    of_engine: Mapping[int, Member] = field(default_factory=dict)
    version: int | None = None
    """Oldest weight version with which a rollout may begin; None before the first update."""
    born: int = 0
    """Number of members so far."""

    @classmethod
    def first(cls, engines: int) -> Members:
        """Return the members of a new run, which have no weights of the actor yet."""
        return cls({one: Member(one, one, Standing.serving) for one in range(engines)}, born=engines)

    def anew(self) -> Members:
        """Return the members of a run that goes back: those that live have no version, the others start again."""
        found, lives = Members(born=self.born), [one.engine for one in self.living]
        for engine in sorted(self.of_engine):
            found = found.join(engine)
            if engine in lives:
                found = found._change(found.of_engine[engine], standing=Standing.serving)
        return found

    @cached_property
    def living(self) -> tuple[Member, ...]:
        """Admitted members, in order."""
        return tuple(one for one in self.up if one.lives)

    @cached_property
    def up(self) -> tuple[Member, ...]:
        """Members whose processes answer calls, in order."""
        return tuple(one for _, one in sorted(self.of_engine.items()) if one.standing is not Standing.starting)

    @cached_property
    def aside(self) -> frozenset[int]:
        """Engines that are set aside."""
        return frozenset(one.engine for one in self.living if one.aside)

    @cached_property
    def rolling(self) -> tuple[Member, ...]:
        """Members for rollouts, including those that still switch to `version`."""
        return tuple(one for one in self.living if one.standing is Standing.serving and not one.aside)

    @cached_property
    def leaving(self) -> tuple[Member, ...]:
        """Members that leave when their groups have ended."""
        return tuple(one for one in self.living if one.standing is Standing.leaving)

    @cached_property
    def takers(self) -> Mapping[bool, tuple[Member, ...]]:
        """`aside` -> members that `takes` such work, in order."""
        return {aside: tuple(one for one in self.living if self.takes(one, aside)) for aside in (False, True)}

    def takes(self, one: Member, aside: bool) -> bool:
        """Return True if `one` may take rollouts, or with `aside` answers of an evaluation on engines set aside.

        An evaluation ends on the engines on which it has begun, also on one that leaves.
        """
        if one.aside is not aside:
            return False
        if aside:
            return one.standing in (Standing.serving, Standing.leaving)
        return one.standing is Standing.serving and not self.is_behind(one)

    def is_behind(self, one: Member) -> bool:
        """Return True if `one` has an older version than `version`."""
        return self.version is not None and (one.version is None or one.version < self.version)

    def holds(self, one: Member) -> bool:
        """Return True if this life of the engine has not been removed."""
        held = self.of_engine.get(one.engine)
        return held is not None and held.life == one.life

    def join(self, engine: int) -> Members:
        """Add a new life of `engine`, which has no member now."""
        if engine in self.of_engine:
            raise ValueError(f"Engine {engine} is a member already.")
        new = Member(engine, self.born, Standing.starting)
        return replace(self, of_engine={**self.of_engine, engine: new}, born=self.born + 1)

    def started(self, one: Member) -> Members:
        """Record that the process of a new member can receive weights."""
        return self._change(one, standing=Standing.joining)

    def admit(self, one: Member, version: int | None) -> Members:
        """Admit a new member, which holds `version` and has verified it."""
        return self._change(one, standing=Standing.serving, version=version)

    def suspect(self, one: Member) -> Members:
        """Give a serving member no new work."""
        return self._move(one, Standing.serving, Standing.suspect)

    def trust(self, one: Member) -> Members:
        """Undo `suspect`."""
        return self._move(one, Standing.suspect, Standing.serving)

    def leave(self, one: Member) -> Members:
        """Give an admitted member no new groups, so that it can be removed."""
        held = self.of_engine.get(one.engine)
        return self._change(one, standing=Standing.leaving) if held is not None and held.lives else self

    def stay(self, one: Member) -> Members:
        """Undo `leave`."""
        return self._move(one, Standing.leaving, Standing.serving)

    def remains_without(self, one: Member) -> bool:
        """Return True if another member serves, so that `one` may leave."""
        return any(other.engine != one.engine and other.standing is Standing.serving for other in self.living)

    def remove(self, one: Member, returns: bool = False) -> Members:
        """Remove a member that has died, hung or left; with `returns`, its engine joins again in the same event."""
        if not self.holds(one):
            return self
        left = {engine: other for engine, other in self.of_engine.items() if engine != one.engine}
        without = replace(self, of_engine=left)
        return without.join(one.engine) if returns else without

    def raise_to(self, version: int) -> Members:
        """Let no rollout begin with a version older than `version`."""
        return replace(self, version=version)

    def switched(self, one: Member, version: int) -> Members:
        """Record that a member uses `version`."""
        return self._change(one, version=version)

    def set_aside(self, some: Iterable[Member], aside: bool = True) -> Members:
        """Set members aside for an evaluation, or put them back."""
        after = self
        for one in some:
            after = after._change(one, aside=aside)
        return after

    def _move(self, one: Member, source: Standing, target: Standing) -> Members:
        held = self.of_engine.get(one.engine)
        return self._change(one, standing=target) if held is not None and held.standing is source else self

    def _change(self, one: Member, **changes: Any) -> Members:
        if not self.holds(one):
            return self
        changed = replace(self.of_engine[one.engine], **changes)
        return replace(self, of_engine={**self.of_engine, one.engine: changed})


@dataclass(frozen=True, slots=True)
class Orphans:
    """Keys that were assigned to members that have been removed."""

    retry: tuple[str, ...]
    """Keys to assign again, in their order of assignment."""
    lost: Mapping[str, str]
    """Key whose engine died for the second time -> reason, for the error message."""


@dataclass(frozen=True, slots=True)
class _Assignment:
    life: int
    engine: int
    size: int


class Router:
    """Assigns keys to members with room for `slots` episodes each.

    Without `slots` there is no limit. A key stands for one group and its size is the group's number of episodes. A
    member's load is the sum of the sizes of its keys. Members set aside take only keys meant for them.

    Example with 2 engines and 8 slots:

        assign("a", 5) -> 0     both are empty: lowest number
        assign("b", 5) -> 1     smallest load
        assign("c", 5) -> None  neither has room: retry after `release`
        update(without 1)       retry=("b",); if the next engine of "b" dies too, "b" is lost

    Invariants:
    - A key is on at most one member, which has not been removed.
    - A key goes to the member with the smallest load among those that may take it; ties go to the lowest number.
    - A load exceeds `slots` only if a single key is larger than `slots`.
    - A key is retried after the death of its first engine, and lost after the death of its second engine. The removal
      of a member that was leaving is no death.
    """

    def __init__(self, members: Members, slots: int | None = None) -> None:
        if slots is not None and slots < 1:
            raise ValueError(f"A router needs at least one slot for each engine, not {slots}.")
        self.members = members
        self._slots = slots
        self._loads: dict[int, int] = {}
        """Life -> load; absent for 0."""
        self._assignments: dict[str, _Assignment] = {}
        self._died_under: dict[str, int] = {}
        """Keys that have lost one engine -> the engine that died."""

    def load(self, one: Member) -> int:
        """Return the number of episodes assigned to `one`."""
        return self._loads.get(one.life, 0)

    def keys(self, one: Member) -> int:
        """Return the number of keys assigned to `one`."""
        return sum(held.life == one.life for held in self._assignments.values())

    def assign(self, key: str, size: int = 1, aside: bool = False) -> Member | None:
        """Assign `key` to a member until `release` or the member's removal, and return the member.

        A repeated call returns the same member. With `aside`, only members set aside may take the key, otherwise only
        the others. Returns None if no member may take the key now: retry after `release` and `update`. Raises
        NoEngineLeft if there is no member, and NoneSetAside if `aside` is True and no member is set aside.
        """
        if key in self._assignments:
            return self.members.of_engine[self._assignments[key].engine]
        if not self.members.of_engine:
            raise NoEngineLeft("every rollout engine has died.")
        if aside and not self.members.aside:
            raise NoneSetAside("every rollout engine that was reserved for evaluation has died.")
        one = min(self.members.takers[aside], key=self.load, default=None)
        if one is None or not self._has_room(one, size):
            return None
        self._assignments[key] = _Assignment(one.life, one.engine, size)
        self._loads[one.life] = self.load(one) + size
        return one

    def release(self, key: str) -> None:
        """Forget `key` after its group has ended. No-op for an unknown key."""
        self._died_under.pop(key, None)
        held = self._assignments.pop(key, None)
        if held is not None:
            self._loads[held.life] -= held.size

    def update(self, members: Members) -> Orphans:
        """Continue with the snapshot `members`; unassign the keys of members that were removed, and return them."""
        left = {one.life for one in self.members.of_engine.values() if one.standing is Standing.leaving}
        lives = {one.life for one in members.of_engine.values()}
        gone = {one.life for one in self.members.of_engine.values()} - lives
        self.members = members
        for life in gone:
            self._loads.pop(life, None)
        retry: list[str] = []
        lost: dict[str, str] = {}
        # Each switch of an engine makes a snapshot too: look at all keys only after a removal.
        orphaned = [(key, held) for key, held in self._assignments.items() if held.life in gone] if gone else []
        for key, held in orphaned:
            del self._assignments[key]
            if held.life in left:
                retry.append(key)
            elif key in self._died_under:
                first = self._died_under.pop(key)
                lost[key] = f"engines {first} and {held.engine} both died while generating it"
            else:
                self._died_under[key] = held.engine
                retry.append(key)
        return Orphans(tuple(retry), lost)

    def _has_room(self, one: Member, size: int) -> bool:
        load = self.load(one)
        return self._slots is None or load == 0 or load + size <= self._slots
