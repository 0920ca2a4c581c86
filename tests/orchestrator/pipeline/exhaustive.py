"""Explores every interleaving of a simulated run: each state once, by stateless search with hashed states.

`ChoiceLoop` keeps all timers of a run, which stand for the completions of engines, rewards, scores, training, weight
sync, saves, crashes and kills. Whenever the loop has finished a turn, any of them may fire next, or the loop may go on
with what is queued. `explore` tries each choice in each state. It repeats a run from its start to reach a state again,
and ends a run that reaches a known state. The result is the whole graph of states, which is then checked for liveness.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from rlsys.apps.planner.virtual_time import HangError, VirtualLoop
from tests.orchestrator.pipeline.fingerprint import Fingerprint
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.simulation import Moment, Parts, Simulation, live

NEVER_S = 100.0
"""Seconds from which on a timer is the limit of a wait. All calls take 1 s."""
END = -1
"""Number of the state in which a run has ended."""


class KnownState(Exception):
    """Raised in a run that has reached a known state."""


@dataclass
class Graph:
    """All states of a run and the edges between them."""

    edges: list[list[int]] = field(default_factory=list)
    """State -> states that may come next; `END` if the run has ended."""
    numbers: dict[bytes, int] = field(default_factory=dict)
    runs: int = 0
    depth: int = 0
    """Largest number of choices in a run."""
    seconds: float = 0.0

    @property
    def edge_count(self) -> int:
        return sum(map(len, self.edges))

    def endless(self) -> list[int]:
        """Return the states that lie on a cycle, or from which a cycle can be reached but no end."""
        incoming: list[list[int]] = [[] for _ in self.edges]
        left = [len(after) for after in self.edges]
        ended: list[int] = []
        for state, after in enumerate(self.edges):
            for one in after:
                if one == END:
                    left[state] -= 1
                else:
                    incoming[one].append(state)
            if not left[state]:
                ended.append(state)
        while ended:
            for before in incoming[ended.pop()]:
                left[before] -= 1
                if not left[before]:
                    ended.append(before)
        return [state for state, count in enumerate(left) if count]


class Search:
    """Choices of one run after the other."""

    def __init__(self, most_states: int = 10**7) -> None:
        self.every_turn, self.most_states = False, most_states
        self.graph = Graph()
        self.to_do: list[tuple[int, tuple[int, ...]]] = [(END, ())]
        """State -> choices of a run that leave it in a new way."""
        self.trace: tuple[int, ...] = ()
        self.made: list[int] = []
        """Choices of the current run."""
        self.over = False
        """True once the current run is not continued: what its tasks still do is no choice."""
        self._state = END
        self._fingerprint = Fingerprint()

    def begin(self, state: int, trace: tuple[int, ...]) -> None:
        """Begin a run that makes the choices of `trace`, the last of which leaves `state`."""
        self._state, self.trace, self.made, self.over = state, trace, [], False

    @property
    def repeats(self) -> bool:
        """True while the run makes choices again that an earlier run has made."""
        return len(self.made) < len(self.trace)

    def choose(self, count: int) -> int:
        """Return a number below `count`: the next one of the trace, or 0; the others are tried later."""
        if self.over:
            return 0
        if self.repeats:
            number = self.trace[len(self.made)]
        else:
            number, made = 0, tuple(self.made)
            self.to_do += [(self._state, (*made, other)) for other in range(count - 1, 0, -1)]
        self.made.append(number)
        return number

    def reach(self, roots: Sequence[Any], timers: Sequence[asyncio.TimerHandle]) -> None:
        """Note the state of the run; raises KnownState if it was reached before."""
        digest = self._fingerprint.of(roots, timers)
        known = self.graph.numbers.get(digest)
        number = len(self.graph.edges) if known is None else known
        if self._state != END:
            self.graph.edges[self._state].append(number)
        if known is not None:
            raise KnownState
        if number >= self.most_states:
            raise RuntimeError(f"There are more than {self.most_states} states.")
        self.graph.numbers[digest] = number
        self.graph.edges.append([])
        self.graph.depth = max(self.graph.depth, len(self.made))
        self._state = number

    def end(self) -> None:
        """Note that the run has ended."""
        if self._state != END:
            self.graph.edges[self._state].append(END)


class _Selector(selectors.SelectSelector):
    def __init__(self, between_turns: Callable[[], None]) -> None:
        super().__init__()
        self._between_turns = between_turns

    def select(self, _: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._between_turns()
        return []


class ChoiceLoop(VirtualLoop):
    """Event loop whose timers fire in any order that a search chooses."""

    def __init__(self, search: Search, simulation: Simulation) -> None:
        super().__init__()
        self._selector.close()
        self._selector = _Selector(self._choose)
        self.search, self.simulation = search, simulation
        self.timers: list[asyncio.TimerHandle] = []
        self.turns_left = 1000
        """Turns in which the tasks of a run that is not continued may end."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.numbers = count()
        self.set_task_factory(_numbered)

    def time(self) -> float:
        return 0.0

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self.numbers), loop=self)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Keep the timer for the search, unless it is due at once, or a limit that no call of a simulation reaches."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when <= 0:
            self.call_soon(timer._run)
        elif when < NEVER_S:
            self.timers.append(timer)
        return timer

    def _choose(self) -> None:
        """Let timers fire until the loop is to go on."""
        if self._stopping:
            return
        while True:
            self.timers = [timer for timer in self.timers if not timer.cancelled()]
            ready = [handle for handle in self._ready if not handle.cancelled()]
            if self.search.over:
                self._fire_all()
                return
            if ready and not self.search.every_turn:
                return
            if not ready and not self.timers:
                raise HangError
            if not self.search.repeats:
                if not ready:
                    self.simulation.check_idle()
                self.search.reach((self.simulation, ready), self.timers)
            next_ones = _different(self.timers)
            chosen = self.search.choose(len(next_ones) + bool(ready))
            if chosen == len(next_ones):
                return
            self.timers.remove(next_ones[chosen])
            self.call_soon(next_ones[chosen]._run)
            if not self.search.every_turn:
                return

    def give_up(self) -> None:
        """Cancel the tasks of a run that is not continued, and run them to their ends."""
        left = [task for task in self.tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            self.search.over = True
            with suppress(HangError):
                self.run_until_complete(asyncio.wait(left))

    def _fire_all(self) -> None:
        self.turns_left -= 1
        for timer in self.timers:
            self.call_soon(timer._run)
        self.timers = []
        if not self._ready or self.turns_left < 0:
            raise HangError


def _different(timers: Sequence[asyncio.TimerHandle]) -> list[asyncio.TimerHandle]:
    """Return the first of each set of timers that do the same."""
    found: list[asyncio.TimerHandle] = []
    for timer in timers:
        if not any(timer._callback == one._callback and timer._args == one._args for one in found):
            found.append(timer)
    return found


class _Future(asyncio.Future[Any]):
    """Future with a place in the order of creation, so that sets of futures have an order that a run repeats."""

    def __init__(self, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(**options)

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    """Task with a place in the order of creation, as in `_Future`."""

    def __init__(self, number: int, *coro: Any, **options: Any) -> None:
        self.number = number
        super().__init__(*coro, **options)

    def __hash__(self) -> int:
        return self.number


def _numbered(loop: ChoiceLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    task = _Task(next(loop.numbers), coro, loop=loop, **options)
    loop.tasks.append(task)
    return task


def _drive(search: Search, simulation: Simulation) -> None:
    """Run the simulation on a loop of its own until it ends; raises KnownState if the search knows what follows."""
    loop = ChoiceLoop(search, simulation)
    try:
        loop.run_until_complete(simulation.drive())
        assert all(task.done() for task in loop.tasks), "tasks were left running"
        for failure in loop.failures:
            raise failure
    finally:
        loop.give_up()
        loop.close()


class Draws(random.Random):
    """Draws the first or the largest: the lengths of episodes are no choice of the search."""

    def choice(self, found: Sequence[Any]) -> Any:
        return found[0]

    def randint(self, _: int, most: int) -> int:
        return most

    def random(self) -> float:
        raise AssertionError("a chance must be a choice of the search")


@dataclass
class Scope(Script):
    """Script whose durations and chances are choices of a search."""

    rng: random.Random = field(default_factory=Draws)
    turns: int = 1
    engines: int = 2
    search: Search = field(default_factory=Search)
    every_turn: bool = False
    """True if answers may come between any two turns of the loop; otherwise they come when all tasks wait."""
    slow_aborts: bool = False
    """True if a cancelled call may end slowly, or still return its result."""
    resumes: bool = False
    """True if the run is saved at any moment between two steps, killed and resumed. All later kills resume the same."""

    def chance(self, share: float) -> bool:
        """Let the search choose whether rewards are equal and how a cancelled call ends."""
        if share in (0.0, 0.1):  # The devices of a disaggregated run are always free.
            return False
        if share == self.flat or self.slow_aborts:
            return bool(self.search.choose(2))
        return share > 0.5

    def duration_s(self, stage: str) -> float:  # noqa: ARG002
        return 1.0

    async def pause(self, stage: str) -> None:
        """Wait for the search, unless a longer call does not add an interleaving of the shipped code.

        All engines close at the same time, and an optimiser step follows at once on the last gradient.
        """
        if stage not in ("close", "apply"):
            await asyncio.sleep(1)

    def run(self) -> None:
        """Run the simulation with the choices of the search, and check the properties."""
        saved = None
        if self.resumes:
            steps = self.search.choose(self.steps + 1)
            moment = Moment(steps, steps == 0 or bool(self.search.choose(2)), killed_after_s=0.0)
            first = Simulation(self, Parts(), None, moment)
            live(first, partial(_drive, self.search))
            saved = first.saved
        last = Simulation(self, Parts(), saved)
        live(last, partial(_drive, self.search))
        last.check_end()


def explore(scope: Scope, search: Search | None = None) -> Graph:
    """Explore every interleaving of a run with `scope` and return the graph of states.

    An error of a run is raised, with the choices that lead to it.
    """
    search = scope.search = search or Search()
    search.every_turn = scope.every_turn
    began = time.process_time()
    while search.to_do:
        search.begin(*search.to_do.pop())
        search.graph.runs += 1
        try:
            scope.run()
            search.end()
        except KnownState:
            pass
        except Exception as error:
            error.add_note(f"choices {search.made}")
            raise
    search.graph.seconds = time.process_time() - began
    return search.graph
