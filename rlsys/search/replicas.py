"""Which of several servers is asked, as a state machine: no clock, no network, only events and what follows.

A replica is healthy until a request to it is lost, or `TURNED_AWAY` in a row are turned away; then it is
suspect until a probe or a request is answered. Each suspicion since its last answered search doubles the
wait before it is probed. One whose health says that it serves something else than the others is foreign
until its health says otherwise.

Invariants: a foreign replica is never picked; a suspect one only if no healthy one is left that has not
failed the request; of equals, one with the fewest requests in flight is picked, ties by lot; each `start` is
followed by one `end`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

SERVED = (
    *("kind", "passages", "corpus_sha256"),
    *("encoder", "dimension", "faiss_type", "nprobe", "ef_search"),
    *("k1", "b", "stopwords"),
    *("candidates", "rank_constant", "dense", "bm25"),
)
"""Of a server's health, what its answers depend on: of any, by vectors, by words, by both. The rest counts."""
TURNED_AWAY = 3
"""Refusals in a row ("busy") that make a replica suspect."""
FIRST_PROBE_S = 0.1
LAST_PROBE_S = 10.0
"""Bounds of the wait before a probe, without its jitter of half as much more."""
_log = logging.getLogger(__name__)


def served(health: Mapping[str, Any]) -> dict[str, Any]:
    """The `SERVED` part of a server's health, as far as it says."""
    return {key: health[key] for key in SERVED if key in health}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two servers are known to serve different things; what one leaves out is no difference."""
    return [key for key in one if key in other and one[key] != other[key]]


class State(Enum):
    """What is thought of a replica."""

    healthy = "healthy"
    suspect = "suspect"
    foreign = "foreign"


class Verdict(Enum):
    """How a request to a replica ended."""

    answered = "answered"
    """Also by a "no" that is the request's own fault."""
    busy = "busy"
    """Turned away for now."""
    lost = "lost"
    """No answer in time, none at all, or one that makes no sense."""
    abandoned = "abandoned"
    """Cancelled: it says nothing about the replica."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server as the requests to it show it."""

    url: str
    state: State = State.healthy
    in_flight: int = 0
    turned_away: int = 0
    """Refusals in a row."""
    suspicions: int = 0
    """How often it became or stayed suspect since its last answered search."""


@dataclass(slots=True)
class Trail:
    """Where one request has failed so far."""

    failed: list[Replica] = field(default_factory=list)
    """In the order of the failures."""
    broken: list[Replica] = field(default_factory=list)
    """Not to be asked again: another try would give the same nonsense."""

    def since(self, replica: Replica) -> int:
        """A rank of how lately `replica` failed; -1 where it did not."""
        return max((row for row, failed in enumerate(self.failed) if failed is replica), default=-1)


class Replicas:
    """The servers of one client."""

    def __init__(self, urls: Iterable[str], lots: Random) -> None:
        self.all = tuple(Replica(url) for url in urls)
        self._lots = lots
        self._reference: dict[str, Any] = {}
        """What all have to serve: what the first one serves that said so."""

    def fresh(self, trail: Trail, besides: Sequence[Replica] = ()) -> Replica | None:
        """A healthy replica at which the request has not failed and that is not of `besides`; None if none is."""
        return self._least_busy(
            replica
            for replica in self.all
            if replica.state is State.healthy and replica not in trail.failed and replica not in besides
        )

    def pick(self, trail: Trail) -> Replica | None:
        """Where the request goes next; None where another try cannot help.

        Where all are suspect one is asked nevertheless, first one that has not failed the request, then the
        one whose failure is the longest ago.
        """
        replica = self.fresh(trail)
        if replica is not None:
            return replica
        usable = [one for one in self.all if one.state is not State.foreign and one not in trail.broken]
        ranks = [(one.state is State.suspect, trail.since(one)) for one in usable]
        return self._least_busy(one for one, rank in zip(usable, ranks, strict=True) if rank == min(ranks))

    def start(self, replica: Replica) -> None:
        """A request is sent to `replica`."""
        replica.in_flight += 1

    def end(self, replica: Replica, verdict: Verdict) -> None:
        """A request to `replica` is over."""
        replica.in_flight -= 1
        match verdict:
            case Verdict.answered:
                replica.turned_away = replica.suspicions = 0
                if replica.state is State.suspect:
                    self._trust(replica)
            case Verdict.busy:
                replica.turned_away += 1
                if replica.turned_away >= TURNED_AWAY:
                    self._suspect(replica)
            case Verdict.lost:
                self._suspect(replica)

    def probed(self, replica: Replica, health: Mapping[str, Any] | None) -> None:
        """Note a probe: None for no answer, else what the server says of itself (nothing is an answer too)."""
        if health is None:
            replica.suspicions += 1
            if replica.state is State.healthy:
                replica.state = State.suspect
                _log.warning("the search server %s does not answer", replica.url)
            return
        serves = served(health)
        self._reference = self._reference or serves
        others = differences(self._reference, serves)
        if others and replica.state is not State.foreign:
            replica.state = State.foreign
            _log.error(
                "the search server %s is not asked any more: it serves %s, the others serve %s",
                replica.url,
                listed({key: serves[key] for key in others}),
                listed({key: self._reference[key] for key in others}),
            )
        elif not others and replica.state is not State.healthy:
            self._trust(replica)
            replica.turned_away = TURNED_AWAY - 1  # a search must show that the health says true

    def probe_after_s(self, replica: Replica) -> float:
        """How long to wait before `replica` is probed, jittered so that many clients do not come at once."""
        doublings = min(max(0, replica.suspicions - 1), 16)
        wait_s = LAST_PROBE_S if replica.state is State.foreign else FIRST_PROBE_S * 2**doublings
        return min(wait_s, LAST_PROBE_S) * self._lots.uniform(1.0, 1.5)

    def _least_busy(self, replicas: Iterable[Replica]) -> Replica | None:
        return min(replicas, key=lambda one: (one.in_flight, self._lots.random()), default=None)

    def _suspect(self, replica: Replica) -> None:
        if replica.state is State.healthy:
            replica.state = State.suspect
            replica.suspicions += 1
            _log.warning("the search server %s is set aside until it answers again", replica.url)

    def _trust(self, replica: Replica) -> None:
        replica.state = State.healthy
        _log.info("the search server %s answers again", replica.url)


def listed(server: Mapping[str, Any]) -> str:
    """`key=value, ...` of what a server serves."""
    return ", ".join(f"{key}={value}" for key, value in server.items())


class HedgeBudget:
    """How many second requests may be sent: one at the start, and one more for every `every` requests."""

    def __init__(self, every: int, most: int) -> None:
        """At most `most` are saved up."""
        self._every = every
        self._most = every * most
        self._saved = every

    def earn(self) -> None:
        """A first request was sent."""
        self._saved = min(self._saved + 1, self._most)

    def take(self) -> bool:
        """Whether a second request may be sent; it is counted as sent."""
        if self._saved < self._every:
            return False
        self._saved -= self._every
        return True
