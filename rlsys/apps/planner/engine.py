"""Simulates a generation engine with continuous batching, from event to event. Pure, on the running loop's clock.

Between two events the batch is constant, so a decode step of B requests with contexts of K tokens in sum takes

    a + c K,    and K grows by B a step: n steps take about n a + c (K n + B n^2 / 2).

The engine therefore jumps to the next event: a request ends its turn, the cache is full, a request arrives. Prefill comes
before decoding, as in SGLang, and holds it up. An event costs O(log B), whatever the lengths.

- Prefix cache: episodes of a group share the room of their prompt, and those of a later prefill its work; decoding reads it
  for each of them. What no running request uses stays until others need the room, the longest unused first: the prompt, and
  the tokens of an episode that waits for a tool, or for admission after it.
- Full cache: the request with most tokens left is retracted, waits first in line, and is prefilled again. Nothing is
  admitted until a request ends.
- Switch of weights: the cache is lost, and requests in flight are prefilled again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import sqrt

from rlsys.apps.planner.cores import SharedCores
from rlsys.cluster.planning.work import EngineCosts

EPSILON = 1e-6
"""Decode steps that count as none: rounding of the clock."""


def _ignore(_: Request) -> None:
    pass


@dataclass(slots=True, eq=False)
class Prefix:
    """Prompt that the episodes of a group share in an engine's cache."""

    tokens: int
    episodes: int
    """Episodes that have not ended."""
    users: int = 0
    """Requests that run or are prefilled."""


@dataclass(slots=True, eq=False)
class Request:
    """Episode on an engine: its context, and what its current turn still generates."""

    prefix: Prefix
    ended: Callable[[Request], None]
    """Called when the turn has ended; submits the next turn, or leaves the engine."""
    own: float = 0.0
    """Tokens of its context after the prompt."""
    resident: bool = False
    """True while the cache holds `own`."""
    new: float = 0.0
    """Tokens of an observation that the next prefill appends."""
    left: float = 0.0
    """Tokens that the turn still generates."""
    target: float = 0.0
    """Decode step of the engine after which the turn ends; only while it runs."""
    version: int = -1
    """Weight version of its first token; -1 before."""
    left_engine: bool = False


class SimulatedEngine:
    """Engine that prefills and decodes requests."""

    def __init__(self, costs: EngineCosts, version: int = 0, cores: SharedCores | None = None) -> None:
        self.costs, self.version = costs, version
        self._cores = cores
        if cores is not None:
            cores.listeners.append(self._slowed)
        self._busy_s = 0.0
        self.retracted = 0
        self._generated, self._filled_tokens = 0.0, 0.0
        """Tokens that were decoded and prefilled, without what is under way."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Request] = deque()
        self._filling: list[Request] = []
        self._fill = (0.0, 1.0)
        """Tokens and seconds of the prefill that is under way."""
        self._running: list[tuple[float, int, Request]] = []
        """Heap by `Request.target`."""
        self._serial = 0
        self._steps = 0.0
        self._cached = 0.0
        """Tokens of running and filling requests and of their prompts."""
        self._read = 0.0
        """Tokens that a decode step reads: the contexts of running requests."""
        self._prefixes: set[Prefix] = set()
        """Prompts in the cache."""
        self._parked: OrderedDict[Request | Prefix, float] = OrderedDict()
        """Unused requests and prompts -> tokens in the cache, the longest unused first; a prompt after its requests."""
        self._parked_tokens = 0.0
        self._full = False
        self._paused = 0
        self._since = 0.0
        self._rate: tuple[float, float] | None = None
        """Seconds of a decode step at `_since`, and its growth; None unless the engine decodes."""
        self._timer: asyncio.Handle | None = None

    @property
    def busy_s(self) -> float:
        """Seconds of work up to now."""
        works = self._filling or self._rate is not None
        return self._busy_s + (self._loop.time() - self._since if works else 0.0)

    @property
    def generated(self) -> float:
        """Tokens decoded up to now."""
        return self._generated + self._steps_passed() * len(self._running)

    @property
    def filled(self) -> float:
        """Tokens prefilled up to now."""
        tokens, seconds = self._fill
        passed = self._loop.time() - self._since if self._filling else 0.0
        return self._filled_tokens + tokens * min(1.0, passed / seconds if seconds else 0.0)

    def submit(self, request: Request) -> None:
        """Begin a turn of `request.left` tokens after `request.new` tokens of an observation."""
        self._waiting.append(request)
        self._soon()

    def leave(self, request: Request) -> None:
        """Free the memory of a request that has ended its episode, or is cancelled."""
        request.left_engine, request.ended = True, _ignore  # Ends the cycle of the request and its owner.
        self._unpark(request)
        prefix = request.prefix
        prefix.episodes -= 1
        if not prefix.episodes:
            self._unpark(prefix)
            self._prefixes.discard(prefix)

    def cancel(self, request: Request) -> None:
        """End a request before its turn has ended."""
        self._settle()
        if request in self._waiting:
            self._waiting.remove(request)
        elif any(one is request for _, _, one in self._running):
            self._running = [entry for entry in self._running if entry[2] is not request]
            heapify(self._running)
            self._stop(request)
            self._free(request)
            self._full = False
        elif request in self._filling:
            filled, busy_s = self.filled, self.busy_s
            self._filling.remove(request)
            request.own += request.new
            self._free(request)
            if not self._filling:  # The prefill ends here.
                self._filled_tokens, self._busy_s = filled, busy_s
        self.leave(request)
        self._soon()

    def pause(self) -> None:
        """Stop at the next moment between two decode steps; a prefill ends first."""
        self._settle()
        self._paused += 1
        self._soon()

    def resume(self, version: int, keeps_cache: bool = False) -> None:
        """Go on with the weights of `version`; without `keeps_cache`, everything in flight is prefilled again."""
        self._settle()
        self.version = version
        self._paused -= 1
        if not keeps_cache:
            self._flush()
        self._soon()

    def _slowed(self) -> None:
        """Go on at another speed; a prefill that is under way keeps its own."""
        if self._rate is not None:
            self._settle()
            self._soon()

    def _flush(self) -> None:
        """Forget the cache."""
        held = [entry[2] for entry in sorted(self._running)]
        for request in held:
            self._stop(request)
            request.prefix.users -= 1
        self._running = []
        for one in [*held, *self._waiting, *self._parked]:
            if isinstance(one, Request):
                one.resident = False
        self._waiting.extendleft(reversed(held))
        self._parked.clear()
        self._parked_tokens = 0.0
        self._full = False
        # A prefill that was under way counts for the new weights.
        self._prefixes = {request.prefix for request in self._filling}
        self._cached = sum(prefix.tokens for prefix in self._prefixes)
        self._cached += sum(request.own + request.new for request in self._filling)

    def _stop(self, request: Request) -> None:
        """Move what a running request has generated in its turn to its context; decoding reads it no more."""
        done = request.left - (request.target - self._steps)
        request.own, request.left = request.own + done, request.left - done
        self._read -= request.prefix.tokens + request.own

    def _free(self, request: Request) -> None:
        """Give up the room of a request that ran or was prefilled, and that of its prompt unless another one uses it."""
        self._cached -= request.own
        prefix = request.prefix
        prefix.users -= 1
        if not prefix.users:
            self._cached -= prefix.tokens
            self._park(prefix, prefix.tokens)

    def _park(self, unused: Request | Prefix, tokens: float) -> None:
        """Keep tokens in the cache while there is room."""
        self._parked[unused] = tokens
        self._parked_tokens += tokens

    def _unpark(self, used: Request | Prefix) -> None:
        self._parked_tokens -= self._parked.pop(used, 0.0)

    def _soon(self) -> None:
        """Decide anew once all events of this moment have been heard."""
        if not self._filling:
            self._set(self._loop.call_soon(self._decide))

    def _set(self, timer: asyncio.Handle) -> None:
        """Replace the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _settle(self) -> None:
        """Count the decode steps up to now."""
        if self._rate is None:
            return
        self._count(self._steps_passed())
        self._busy_s += self._loop.time() - self._since
        self._since, self._rate = self._loop.time(), None

    def _steps_passed(self) -> float:
        """Return the decode steps since `_since`."""
        if self._rate is None:
            return 0.0
        first, growth = self._rate
        passed = self._loop.time() - self._since
        steps = (sqrt(first * first + 2 * growth * passed) - first) / growth if growth else passed / first
        # The clock's rounding must not carry a request past its end.
        return min(steps, self._running[0][0] - self._steps) if self._running else steps

    def _count(self, steps: float) -> None:
        grown = steps * len(self._running)
        self._steps += steps
        self._cached += grown
        self._read += grown
        self._generated += grown

    def _decide(self) -> None:
        """End the turns that are over, then prefill, decode or rest."""
        self._settle()
        self._end_turns()
        if self._paused or self._filling:
            self._mark(bool(self._filling))
            return
        self._evict()
        while self._cached > self.costs.cache_tokens and len(self._running) > 1:
            self._retract()
        self._filling, seconds = self._admit()
        self._mark(bool(self._filling or self._running))
        if self._filling:
            self._since = self._loop.time()
            self._fill = self._fill[0], seconds * self._slowdown
            self._set(self._loop.call_later(self._fill[1], self._filled))
        elif self._running:
            self._decode()

    def _mark(self, works: bool) -> None:
        if self._cores is not None:
            self._cores.mark(self, "rollout", works)

    @property
    def _slowdown(self) -> float:
        return 1.0 if self._cores is None else self._cores.slowdown

    def _decode(self) -> None:
        """Set the timer to the next end of a turn, or to when the cache is full."""
        batch = len(self._running)
        steps = self._running[0][0] - self._steps
        if batch > 1:
            steps = min(steps, max(1.0, (self.costs.cache_tokens - self._cached) / batch))
        first, growth = (seconds * self._slowdown for seconds in self.costs.decode_s(batch, self._read))
        self._rate = first, growth
        self._since = self._loop.time()
        self._set(self._loop.call_later(steps * (first + growth * steps / 2), self._arrive, self._steps + steps))

    def _arrive(self, steps: float) -> None:
        """Decide at decode step number `steps`; the clock's rounding must not leave a part of it."""
        self._count(steps - self._steps)
        self._busy_s += self._loop.time() - self._since
        self._rate = None
        self._decide()

    def _end_turns(self) -> None:
        while self._running and self._running[0][0] - self._steps < EPSILON:
            request = heappop(self._running)[2]
            self._full = False
            request.target = self._steps
            self._stop(request)
            self._park(request, request.own)
            self._free(request)
            request.ended(request)

    def _evict(self) -> None:
        """Forget unused tokens, as far as others need the room."""
        while self._parked and self._cached + self._parked_tokens > self.costs.cache_tokens:
            unused = next(iter(self._parked))
            self._unpark(unused)
            if isinstance(unused, Request):
                unused.resident = False
            else:
                self._prefixes.remove(unused)

    def _retract(self) -> None:
        entry = max(self._running)
        self._running.remove(entry)
        heapify(self._running)
        request = entry[2]
        self._stop(request)
        request.resident = False
        self._free(request)
        self._waiting.appendleft(request)
        self._full = True
        self.retracted += 1

    def _admit(self) -> tuple[list[Request], float]:
        """Return the waiting requests that fit, and the seconds of their prefill."""
        costs, filling, seconds, tokens = self.costs, list[Request](), 0.0, 0.0
        while self._waiting and not (self._full and self._running):
            if len(self._running) + len(filling) >= costs.max_running:
                break
            request = self._waiting[0]
            prefix = request.prefix
            needed = request.own + request.new + (0 if prefix.users else prefix.tokens)
            if (self._running or filling) and self._cached + needed > costs.cache_tokens:
                break
            self._waiting.popleft()
            # Only what an earlier prefill has cached is shared.
            prompt = 0 if prefix in self._prefixes else prefix.tokens
            own = 0.0 if request.resident else request.own
            self._unpark(request)
            self._unpark(prefix)
            prefix.users += 1
            self._cached += needed
            self._evict()
            tokens += prompt + own + request.new
            seconds += costs.fill_s(prompt, 0) + costs.fill_s(own + request.new, prefix.tokens + request.own - own)
            request.resident = True
            filling.append(request)
        self._prefixes.update(request.prefix for request in filling)
        self._fill = tokens, 0.0
        return filling, seconds + (costs.step_s + costs.weights_s if filling else 0.0)

    def _filled(self) -> None:
        self._busy_s += self._loop.time() - self._since
        self._filled_tokens += self._fill[0]
        for request in self._filling:
            request.own, request.new = request.own + request.new, 0.0
            self._read += request.prefix.tokens + request.own
            if request.version < 0:
                request.version = self.version
            self._serial += 1
            request.target = self._steps + request.left
            heappush(self._running, (request.target, self._serial, request))
        self._filling = []
        self._decide()
