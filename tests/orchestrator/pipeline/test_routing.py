"""The router against a model that keeps no sums: a list of what happened, read anew for every answer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.orchestrator.engine_pool import NoEngineLeft, NoneSetAside, Orphans, Router

KEYS = st.integers(0, 11).map(str)
ENGINES = st.integers(0, 4)


class Routing(RuleBasedStateMachine):
    """Any sequence of calls, each answered by the router and by the model."""

    @initialize(engines=st.integers(1, 5), slots=st.none() | st.integers(1, 6))
    def begin(self, engines: int, slots: int | None) -> None:
        self.router = Router(engines, slots)
        self.engines, self.slots = engines, slots
        self.dead: set[int] = set()
        self.closed: set[int] = set()
        self.aside: set[int] = set()
        self.on: dict[str, tuple[int, int]] = {}
        """Key -> (engine, size), in the order of assignment."""
        self.deaths: dict[str, list[int]] = {}
        """Key -> engines that died under it, since it was last unknown."""
        self.starts: Counter[str] = Counter()
        """Key -> engines that it has been given to, since it was last unknown."""

    def load(self, engine: int) -> int:
        return sum(size for other, size in self.on.values() if other == engine)

    @rule(key=KEYS, size=st.integers(1, 4), aside=st.booleans())
    def assign(self, key: str, size: int, aside: bool) -> None:
        living = [engine for engine in range(self.engines) if engine not in self.dead]
        if key in self.on:
            assert self.router.assign(key, size, aside) == self.on[key][0], "a key keeps its engine"
            return
        if not living or (aside and not self.aside & set(living)):
            with pytest.raises(NoneSetAside if living else NoEngineLeft):
                self.router.assign(key, size, aside)
            return
        pool = set(living) & self.aside if aside else set(living) - self.aside
        takers = sorted((self.load(engine), engine) for engine in pool - self.closed)
        fits = self.slots is None or (takers and (takers[0][0] == 0 or takers[0][0] + size <= self.slots))
        expected = takers[0][1] if takers and fits else None
        assert self.router.assign(key, size, aside) == expected
        if expected is not None:
            self.on[key] = (expected, size)
            self.starts[key] += 1
            assert self.starts[key] <= 2, "a key is tried once, and once more"

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        self.router.release(key)
        for known in (self.on, self.deaths, self.starts):
            known.pop(key, None)  # type: ignore[attr-defined]

    @precondition(lambda self: len(self.dead) < self.engines)
    @rule(engine=ENGINES)
    def die(self, engine: int) -> None:
        if engine >= self.engines:
            return
        ran_there = [key for key, (other, _) in self.on.items() if other == engine]
        for key in ran_there:
            del self.on[key]
            self.deaths.setdefault(key, []).append(engine)
        again = tuple(key for key in ran_there if len(self.deaths[key]) == 1)
        lost = {key: self.deaths[key] for key in ran_there if len(self.deaths[key]) == 2}
        found = self.router.died(engine)
        assert found.again == again
        assert found.lost == {
            key: f"engines {first} and {second} both died under it" for key, (first, second) in lost.items()
        }
        for key in lost:
            del self.deaths[key], self.starts[key]
        self.dead.add(engine)
        assert self.router.died(engine) == Orphans((), {}), "an engine dies once"

    @rule(engine=ENGINES)
    def close(self, engine: int) -> None:
        self.router.close(engine)
        self.closed.add(engine)

    @rule(engine=ENGINES)
    def reopen(self, engine: int) -> None:
        self.router.reopen(engine)
        self.closed.discard(engine)

    @rule(engine=ENGINES)
    def set_aside(self, engine: int) -> None:
        self.router.set_aside(engine)
        self.aside.add(engine)

    @rule(engine=ENGINES)
    def put_back(self, engine: int) -> None:
        self.router.put_back(engine)
        self.aside.discard(engine)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "router"):
            return
        assert self.router.living == tuple(sorted(set(range(self.engines)) - self.dead))
        assert self.router.aside == self.aside & set(self.router.living)
        for engine in range(self.engines):
            assert self.router.load(engine) == self.load(engine)
        assert not {engine for engine, _ in self.on.values()} & self.dead, "no key is on a dead engine"


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=50, stateful_step_count=40)
