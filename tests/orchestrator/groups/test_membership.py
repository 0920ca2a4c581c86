"""Tests of the members and the router against a simple model, and of the budget of restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.orchestrator.membership import Member, Members, NoEngineLeft, NoneSetAside, Router, Standing

ADMITTED = ("serving", "suspect", "leaving")
KEYS = [f"k{number}" for number in range(12)]


@dataclass
class Life:
    """The model of one life of an engine: plain mutable state."""

    engine: int
    standing: str = "serving"
    version: int = -1
    aside: bool = False
    keys: dict[str, int] = field(default_factory=dict)


class MembersAndRouter(RuleBasedStateMachine):
    """Applies events to snapshots, and to a list of lives with plain flags."""

    @initialize(engines=st.integers(1, 4), slots=st.one_of(st.none(), st.integers(1, 6)))
    def begin(self, engines: int, slots: int | None) -> None:
        self.members, self.slots = Members.first(engines), slots
        self.router = Router(self.members, slots)
        self.lives = [Life(engine) for engine in range(engines)]
        self.version = -1
        self.former: list[Member] = []
        self.died_under: dict[str, int] = {}
        self.retry: set[str] = set()
        self.engines = engines

    def life(self, engine: int) -> Life | None:
        return next((one for one in self.lives if one.engine == engine), None)

    def step(self, members: Members) -> None:
        self.former += self.members.of_engine.values()
        self.members = members
        orphans = self.router.update(members)
        assert set(orphans.retry) == self.retry
        self.retry = set()

    def pick(self, data: Any, *standings: str) -> tuple[Member, Life]:
        chosen = data.draw(st.sampled_from([one for one in self.lives if one.standing in standings]))
        return self.members.of_engine[chosen.engine], chosen

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), returns=st.booleans())
    def die(self, data: Any, returns: bool) -> None:
        member, life = self.pick(data, "starting", "joining", *ADMITTED)
        self.lives.remove(life)
        if returns:
            self.lives.append(Life(life.engine, "starting"))
        for key in life.keys:
            if life.standing == "leaving":
                self.retry.add(key)
            elif key in self.died_under:
                del self.died_under[key]
            else:
                self.died_under[key] = life.engine
                self.retry.add(key)
        self.step(self.members.remove(member, returns))

    @rule(data=st.data())
    def join(self, data: Any) -> None:
        free = [engine for engine in range(self.engines) if self.life(engine) is None]
        if not free:
            with pytest.raises(ValueError, match="member"):
                self.members.join(data.draw(st.integers(0, self.engines - 1)))
            return
        engine = data.draw(st.sampled_from(free))
        self.lives.append(Life(engine, "starting"))
        self.step(self.members.join(engine))

    @precondition(lambda self: any(one.standing == "starting" for one in self.lives))
    @rule(data=st.data())
    def start(self, data: Any) -> None:
        member, life = self.pick(data, "starting")
        life.standing = "joining"
        self.step(self.members.started(member))

    @precondition(lambda self: any(one.standing == "joining" for one in self.lives))
    @rule(data=st.data(), late=st.integers(0, 2))
    def admit(self, data: Any, late: int) -> None:
        member, life = self.pick(data, "joining")
        life.standing, life.version = "serving", max(-1, self.version - late)
        self.step(self.members.admit(member, life.version if life.version >= 0 else None))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        member, life = self.pick(data, "starting", "joining", *ADMITTED)
        others = [one for one in self.lives if one is not life and one.standing == "serving"]
        assert self.members.remains_without(member) is bool(others)
        if life.standing in ADMITTED:
            life.standing = "leaving"
        self.step(self.members.leave(member))

    @precondition(lambda self: any(one.standing in ADMITTED for one in self.lives))
    @rule(data=st.data())
    def stay(self, data: Any) -> None:
        member, life = self.pick(data, *ADMITTED)
        if life.standing == "leaving":
            life.standing = "serving"
        self.step(self.members.stay(member))

    @precondition(lambda self: any(one.standing in ADMITTED for one in self.lives))
    @rule(data=st.data(), suspect=st.booleans())
    def judge(self, data: Any, suspect: bool) -> None:
        member, life = self.pick(data, *ADMITTED)
        if life.standing != "leaving":
            life.standing = "suspect" if suspect else "serving"
        self.step(self.members.suspect(member) if suspect else self.members.trust(member))

    @rule()
    def raise_version(self) -> None:
        self.version += 1
        self.step(self.members.raise_to(self.version))

    @precondition(lambda self: any(one.standing in ADMITTED for one in self.lives))
    @rule(data=st.data())
    def switch(self, data: Any) -> None:
        member, life = self.pick(data, *ADMITTED)
        if self.version >= 0:
            life.version = self.version
            self.step(self.members.switched(member, self.version))

    @precondition(lambda self: any(one.standing == "serving" for one in self.lives))
    @rule(data=st.data(), aside=st.booleans())
    def set_aside(self, data: Any, aside: bool) -> None:
        member, life = self.pick(data, "serving")
        life.aside = aside
        self.step(self.members.set_aside([member], aside))

    @precondition(lambda self: self.former)
    @rule(data=st.data(), event=st.sampled_from(["started", "suspect", "trust", "remove", "leave", "stay"]))
    def late_event(self, data: Any, event: str) -> None:
        """An event about a member that is gone changes nothing."""
        gone = [
            one for one in self.former if not any(one.life == held.life for held in self.members.of_engine.values())
        ]
        if gone:
            member = data.draw(st.sampled_from(gone))
            assert getattr(self.members, event)(member) is self.members
            assert self.members.switched(member, 99) is self.members
            assert self.members.admit(member, 99) is self.members

    @rule(key=st.sampled_from(KEYS), size=st.integers(1, 4), aside=st.booleans())
    def assign(self, key: str, size: int, aside: bool) -> None:
        held = next((one for one in self.lives if key in one.keys), None)
        if held is not None:
            found = self.router.assign(key, size, aside)
            assert found is not None
            assert found.engine == held.engine
            return
        if not self.lives:
            with pytest.raises(NoEngineLeft):
                self.router.assign(key, size, aside)
            return
        up = [one for one in self.lives if one.standing in ADMITTED]
        if aside and not any(one.aside for one in up):
            with pytest.raises(NoneSetAside):
                self.router.assign(key, size, aside)
            return
        takers = ("serving", "leaving") if aside else ("serving",)
        current = [one for one in self.lives if one.standing in takers and one.aside is aside]
        fit = [one for one in current if aside or one.version >= self.version]
        best = min(fit, key=lambda one: (sum(one.keys.values()), one.engine), default=None)
        load = sum(best.keys.values()) if best else 0
        if best is not None and self.slots is not None and load and load + size > self.slots:
            best = None
        found = self.router.assign(key, size, aside)
        assert (found and found.engine) == (best and best.engine)
        if best is not None:
            best.keys[key] = size

    @rule(key=st.sampled_from(KEYS))
    def release(self, key: str) -> None:
        self.router.release(key)
        self.died_under.pop(key, None)
        for one in self.lives:
            one.keys.pop(key, None)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "members"):
            return
        held = {
            engine: (one.standing.value, -1 if one.version is None else one.version, one.aside)
            for engine, one in self.members.of_engine.items()
        }
        assert held == {one.engine: (one.standing, one.version, one.aside) for one in self.lives}
        for one in self.lives:
            assert self.router.load(self.members.of_engine[one.engine]) == sum(one.keys.values())
        born = [one.life for one in self.members.of_engine.values()]
        assert len(set(born)) == len(born)
        assert all(life < self.members.born for life in born)


TestMembersAndRouter = MembersAndRouter.TestCase
TestMembersAndRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_lists_of_members_are_made_once_for_each_snapshot() -> None:
    members = Members.first(4)
    members = members.set_aside([members.of_engine[3]])
    members = members.leave(members.of_engine[2])
    for name in ("up", "living", "rolling", "leaving", "aside"):
        assert getattr(members, name) is getattr(members, name)
    later = members.stay(members.of_engine[2])
    assert [len(one.rolling) for one in (members, later)] == [2, 3]
    assert [len(one.leaving) for one in (members, later)] == [1, 0]


def test_router_looks_at_all_keys_only_when_a_member_was_removed() -> None:
    class Looks(dict[str, Any]):
        made = 0

        def items(self) -> Any:
            self.made += 1
            return super().items()

    members = Members.first(2)
    router = Router(members)
    router._assignments = looks = Looks()
    router.assign("a")
    for one in members.living:
        members = members.switched(one, 1)
        assert router.update(members).retry == ()
    assert looks.made == 0
    assert router.update(members.remove(members.of_engine[0], returns=True)).retry == ("a",)
    assert looks.made == 1


def test_members_of_a_run_that_goes_back_have_no_version_and_start_again_unless_they_live() -> None:
    """Engine 0 lives at version 4, engine 1 is being started again, engine 2 was given up."""
    members = Members.first(3).raise_to(4)
    members = members.switched(members.of_engine[0], 4).remove(members.of_engine[1], returns=True)
    members = members.remove(members.of_engine[2])
    after = members.anew()
    assert [(one.engine, one.standing, one.version) for one in after.of_engine.values()] == [
        (0, Standing.serving, None),
        (1, Standing.starting, None),
    ]
    assert after.version is None
    assert not {one.life for one in after.of_engine.values()} & {one.life for one in members.of_engine.values()}
