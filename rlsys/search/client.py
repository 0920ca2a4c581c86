"""Search client of the episodes, for one search server or several replicas of one index.

Contract: `search` never raises for a failed search; it returns a result with an error, so a bad request costs one
observation, not the run. Every search gets exactly one result. Retrieval is idempotent, so a request may be retried,
moved to another replica or hedged, and the first response counts. Searches submitted within a few milliseconds share a
request. Cancelling one caller does not affect the others.

Server faults (timeout, lost connection, 408, 429, 5xx, invalid response) are retried:

1. at once, on every healthy replica that has not failed this request;
2. then up to `retries` times, each time after a growing, jittered pause that is at least as long as Retry-After
   (capped at 30 s).

A server that gave an invalid response does not get the same request again. Client errors (400, 401, 403, 413, 422) are
never retried. A request takes at most `(replicas + retries) * (timeout_s + hedge_after_s) + retries * 6` seconds, or
`retries * 45` instead of the last term if servers send Retry-After.

A healthy replica becomes suspect when a request to it is lost, or when it rejects `TURNED_AWAY` requests in a row
as busy. It is healthy again after a successful probe or request. The wait before its next probe doubles each time that
the replica becomes suspect or fails a probe, until it answers a search. A replica is foreign while its health describes
a different index than the health of the other replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from rlsys.errors import RunError, UserError
from rlsys.search.address import is_url
from rlsys.search.dynamic_batching import Batcher, BatcherClosed, QueueFull
from rlsys.search.retrieval import Failure, PageResult, SearchResult, differences, listed, served
from rlsys.search.wire import (
    Fault,
    HttpWire,
    NoReplyError,
    ReplicaVerdict,
    Reply,
    as_sent,
    health_of,
    page_of,
    page_request_body,
    passages_of,
    request_body,
)

TURNED_AWAY = 3  # consecutive busy responses that make a replica suspect
FIRST_PROBE_S = 0.1
LAST_PROBE_S = 10.0  # FIRST_PROBE_S and LAST_PROBE_S bound the wait before a probe; jitter adds up to 50 %
_PROBE_TIMEOUT_S = 3.0
_MAX_PENDING = 1 << 20
_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 4.0
_MAX_RETRY_AFTER_S = 30.0
"""Cap of Retry-After. Pauses without it are _FIRST_PAUSE_S to _LAST_PAUSE_S long; jitter adds up to 50 %."""
_HEDGED_EVERY = 20  # requests per hedge, so that hedging adds at most 5 % load to a slow cluster
_HEDGES_SAVED = 10
_log = logging.getLogger(__name__)

Found = Any  # what `SearchRequest.read` returns


class ReplicaState(Enum):
    """State of a replica, as defined in the module docstring."""

    healthy = "healthy"
    suspect = "suspect"
    foreign = "foreign"


@dataclass(slots=True, eq=False)
class Replica:
    """Client-side state of one server."""

    url: str
    state: ReplicaState = ReplicaState.healthy
    in_flight: int = 0
    turned_away: int = 0  # consecutive busy responses
    suspicions: int = 0  # times that the replica became or stayed suspect since its last answered search


@dataclass(slots=True)
class SearchRequest:
    """Searches that share a request, or the access to a page, with the history of its tries."""

    body: bytes = b""
    read: Callable[[Reply], Any] = lambda reply: reply
    """Returns the result of an answer, or raises Fault."""
    path: str = "/retrieve"
    fault: Fault | None = None  # fault of the last failed try
    pauses: int = 0
    failed: list[Replica] = field(default_factory=list)  # replicas of the failed tries, in order
    broken: list[Replica] = field(default_factory=list)
    """Replicas whose response was invalid; never tried again for this request."""


class Replicas:
    """State machine of a client's replicas; it is driven by events and uses neither clock nor network.

    Invariants: a foreign replica is never picked; a suspect replica is picked only if no eligible healthy replica is
    left; among equal replicas, the one with the fewest requests in flight is picked, and ties are broken at random;
    each `start` has one `end`.
    """

    def __init__(self, urls: Iterable[str], lots: Random) -> None:
        self.all = tuple(Replica(url) for url in urls)
        self._lots = lots
        self._reference: dict[str, Any] = {}  # `served` keys of the first healthy replica; all others must match

    def fresh(self, request: SearchRequest, besides: Sequence[Replica] = ()) -> Replica | None:
        """Return a healthy replica that has not failed the request and is not in `besides`, or None."""
        tried = [*request.failed, *besides]
        healthy = (replica for replica in self.all if replica.state is ReplicaState.healthy)
        return self._least_busy(replica for replica in healthy if replica not in tried)

    def pick(self, request: SearchRequest) -> Replica | None:
        """Return the replica for the next try, or None if no try can succeed.

        Fresh replicas come first, then healthy ones, then suspect ones. Within a state, untried replicas come first,
        then the replica whose last failure is the oldest.
        """
        if (replica := self.fresh(request)) is not None:
            return replica
        latest = {replica: row for row, replica in enumerate(request.failed)}
        ranks = {
            replica: (replica.state is ReplicaState.suspect, latest.get(replica, -1))
            for replica in self.all
            if replica.state is not ReplicaState.foreign and replica not in request.broken
        }
        return self._least_busy(replica for replica, rank in ranks.items() if rank == min(ranks.values()))

    def start(self, replica: Replica) -> None:
        """Record that a request to `replica` started."""
        replica.in_flight += 1

    def end(self, replica: Replica, verdict: ReplicaVerdict) -> None:
        """Record the outcome of a request to `replica`."""
        replica.in_flight -= 1
        match verdict:
            case ReplicaVerdict.answered:
                replica.turned_away = replica.suspicions = 0
                if replica.state is ReplicaState.suspect:
                    self._trust(replica)
            case ReplicaVerdict.busy:
                replica.turned_away += 1
                if replica.turned_away >= TURNED_AWAY:
                    self._suspect(replica)
            case ReplicaVerdict.lost:
                self._suspect(replica)

    def probed(self, replica: Replica, health: Mapping[str, Any] | None) -> None:
        """Record a probe. `health` is None if the server is unreachable or unhealthy; an empty `health` is valid."""
        if health is None:
            replica.suspicions += 1
            if replica.state is ReplicaState.healthy:
                replica.state = ReplicaState.suspect
                _log.warning("the search server %s does not answer", replica.url)
            return
        serves = served(health)
        self._reference = self._reference or serves
        others = differences(self._reference, serves)
        if others and replica.state is not ReplicaState.foreign:
            replica.state = ReplicaState.foreign
            here, there = (listed(server, others) for server in (serves, self._reference))
            reason = "the search server %s is no longer used: it serves %s, but the others serve %s"
            _log.error(reason, replica.url, here, there)
        elif not others and replica.state is not ReplicaState.healthy:
            self._trust(replica)
            replica.turned_away = TURNED_AWAY - 1  # a single busy search makes it suspect again

    def probe_after_s(self, replica: Replica) -> float:
        """Return the wait before the next probe of `replica`, jittered so that clients do not probe in step."""
        doublings = min(max(0, replica.suspicions - 1), 16)
        wait_s = LAST_PROBE_S if replica.state is ReplicaState.foreign else FIRST_PROBE_S * 2**doublings
        return min(wait_s, LAST_PROBE_S) * self._lots.uniform(1.0, 1.5)

    def _least_busy(self, replicas: Iterable[Replica]) -> Replica | None:
        return min(replicas, key=lambda replica: (replica.in_flight, self._lots.random()), default=None)

    def _suspect(self, replica: Replica) -> None:
        if replica.state is ReplicaState.healthy:
            replica.state = ReplicaState.suspect
            replica.suspicions += 1
            _log.warning("the search server %s is not used until it answers again", replica.url)

    def _trust(self, replica: Replica) -> None:
        replica.state = ReplicaState.healthy
        _log.info("the search server %s answers again", replica.url)


class HedgeBudget:
    """Budget for hedges: starts with one hedge, gains one per `every` requests, and holds at most `most`."""

    def __init__(self, every: int, most: int) -> None:
        self._every, self._most, self._saved = every, every * most, every

    def earn(self) -> None:
        """Record the first try of a request."""
        self._saved = min(self._saved + 1, self._most)

    def take(self) -> bool:
        """Take one hedge from the budget; False if none is left."""
        if self._saved < self._every:
            return False
        self._saved -= self._every
        return True


class _Prober:
    """Probes /health of all replicas at the start, and of failed replicas until they are healthy.

    A client with a single server sends no probes.
    """

    def __init__(self, replicas: Replicas, wire: HttpWire) -> None:
        self._replicas, self._wire = replicas, wire
        self._first_round: asyncio.Task[None] | None = None
        self._probing: dict[Replica, asyncio.Task[None]] = {}

    async def all_probed(self) -> None:
        """Block until every replica was probed once, so that no foreign replica is searched."""
        if len(self._replicas.all) > 1:
            self._first_round = self._first_round or asyncio.create_task(self._probe_all())
            await asyncio.shield(self._first_round)

    def watch(self, replica: Replica) -> None:
        """Start probing `replica` until it is healthy; no-op if it is healthy or already being probed."""
        if replica.state is ReplicaState.healthy or replica in self._probing or len(self._replicas.all) == 1:
            return
        task = asyncio.create_task(self._probe_until_healthy(replica))
        self._probing[replica] = task
        task.add_done_callback(lambda done: self._ended(replica, done))

    async def close(self) -> None:
        """Cancel all probes."""
        tasks = [*self._probing.values(), *filter(None, [self._first_round])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_all(self) -> None:
        healths = await asyncio.gather(*map(self._probe, self._replicas.all))
        for replica, health in zip(self._replicas.all, healths, strict=True):
            self._replicas.probed(replica, health)
            self.watch(replica)

    async def _probe_until_healthy(self, replica: Replica) -> None:
        while replica.state is not ReplicaState.healthy:
            await asyncio.sleep(self._replicas.probe_after_s(replica))
            self._replicas.probed(replica, await self._probe(replica))

    async def _probe(self, replica: Replica) -> dict[str, Any] | None:
        """Return the health of `replica`, or None if it is unreachable or unhealthy."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return health_of(await self._wire.get(f"{replica.url}/health"))
        except (TimeoutError, NoReplyError):
            return None

    def _ended(self, replica: Replica, task: asyncio.Task[None]) -> None:
        del self._probing[replica]
        if not task.cancelled() and task.exception() is not None:
            _log.error("the probes of %s ended", replica.url, exc_info=task.exception())


@dataclass(slots=True)
class ClientCounts:
    """Counters of a client since its start."""

    searches: int = 0  # completed searches; includes failed searches, excludes cancelled ones
    requests: int = 0  # HTTP requests, each with one or more searches
    retries: int = 0  # tries after the first
    failovers: int = 0  # retries on another replica than the previous try
    hedges: int = 0  # second copies of slow requests
    hedges_won: int = 0  # hedges that were answered first
    failures: Counter[Failure] = field(default_factory=Counter)  # failed searches by kind


class SearchClient(AbstractAsyncContextManager["SearchClient"]):
    """Search client for one event loop; `close` it at the end.

    Args:
        urls: URL of the server, e.g. http://127.0.0.1:8000, or URLs of several replicas, which share the load. All
            replicas are probed before the first search; a single server is not.
        timeout_s: Timeout of one try.
        retries: Number of retries, each after a pause, once every healthy replica has failed the request.
        max_concurrent: Maximum number of searches in flight, and of accesses to pages, hedges not counted.
        coalesce_ms: Time that a search waits for others to share its request.
        max_coalesced: Maximum number of searches per request; with 1, each search is a request of its own.
        hedge_after_s: Time after which an unanswered request is also sent to another replica; the first response
            counts. At most one request in 20 is hedged. None disables hedging.
        wire: Replaces the HTTP connections.
        lots: Random generator for jitter and ties.

    Raises UserError for unusable URLs and settings.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        topk: int = 3,
        timeout_s: float = 30.0,
        retries: int = 3,
        max_concurrent: int = 64,
        coalesce_ms: float = 2.0,
        max_coalesced: int = 64,
        hedge_after_s: float | None = None,
        token: str | None = None,
        wire: HttpWire | None = None,
        lots: Random | None = None,
    ) -> None:
        self.urls = _addresses([urls] if isinstance(urls, str) else urls)
        if hedge_after_s is not None and not (len(self.urls) > 1 and 0 < hedge_after_s < timeout_s):
            problem = f"search.hedge_after_s={hedge_after_s:g} has no effect with {len(self.urls)} search URL(s)"
            remedy = "give two or more URLs and a time between 0 and timeout_s, or null"
            reason = f"{problem} and timeout_s={timeout_s:g}: {remedy}."
            raise UserError(reason, code="conflict", key="search.hedge_after_s")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            reason = "the search token is empty or not plain ASCII text: give it as the server has it."
            raise UserError(reason, code="malformed", key="token")
        self.counts = ClientCounts()
        self._topk, self._timeout_s, self._retries, self._hedge_after_s = topk, timeout_s, retries, hedge_after_s
        self._hedges = HedgeBudget(_HEDGED_EVERY, _HEDGES_SAVED)
        self._lots = lots or Random()
        self._replicas = Replicas(self.urls, self._lots)
        self._wire = wire or HttpWire(token)
        self._prober = _Prober(self._replicas, self._wire)
        limits = {"max_running": max_concurrent, "max_pending": _MAX_PENDING}
        self._accesses = asyncio.Semaphore(max_concurrent)
        self._batcher = Batcher(self._search_many, max_coalesced, coalesce_ms / 1000, **limits)

    async def search(self, query: str) -> SearchResult:
        """Search for one query, which may be empty."""
        try:
            result = await self._batcher.submit([as_sent(query)])[0]
        except BatcherClosed:
            result = SearchResult(error="the search client is closed", failure=Failure.closed)
        except QueueFull:
            result = SearchResult(error=f"{_MAX_PENDING} searches are already waiting", failure=Failure.unavailable)
        self.counts.searches += 1
        if result.failure is not None:
            self.counts.failures[result.failure] += 1
        return result

    async def access(self, url: str) -> PageResult:
        """Return the page of a URL. Raises UserError if the server has no pages at all."""
        await self._prober.all_probed()
        request = SearchRequest(page_request_body(as_sent(url)), page_of, "/access")
        try:
            async with self._accesses:
                return PageResult(await self._ask(request))
        except Fault as fault:
            self.counts.failures[fault.failure] += 1
            return PageResult(error=self._sentence(fault, request), failure=fault.failure)

    async def health(self) -> dict[str, Any]:
        """Return the health of the first healthy server.

        Raises RunError if no server is healthy, and UserError if two servers serve different indexes.
        """
        asked = await asyncio.gather(*map(self._health, self.urls), return_exceptions=True)
        well: dict[str, dict[str, Any]] = {}
        for url, health in zip(self.urls, asked, strict=True):
            if isinstance(health, dict):
                well[url] = health
            elif isinstance(health, RunError):
                _log.warning("%s", health)
            else:
                raise health
        if not well:
            raise RunError("; ".join(map(str, asked)))
        (first_url, first), *others = well.items()
        for url, health in others:
            if keys := differences(served(first), served(health)):
                here, there = (listed(server, keys) for server in (first, health))
                problem = f"the search servers serve different indexes, {first_url} {here} and {url} {there}"
                raise UserError(f"{problem}: give only URLs of replicas of one index.", code="mismatch", key=url)
        return first

    async def close(self) -> None:
        """End searches in flight with an error result, and stop probes and connections. Idempotent."""
        await self._batcher.close()
        await self._prober.close()
        await self._wire.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _health(self, url: str) -> dict[str, Any]:
        try:
            reply = await self._in_time(self._wire.get(f"{url}/health"))
        except NoReplyError as error:
            raise RunError(f"the search server at {url} is not healthy: {error}") from error
        if not (health := health_of(reply)):
            raise RunError(f"the search server at {url} is not healthy: status {reply.status}, or not an object")
        return health

    async def _search_many(self, queries: list[str]) -> list[SearchResult]:
        """Return one result per query. After a divisible fault, halve the batch to isolate the faulty query."""
        await self._prober.all_probed()
        request = SearchRequest(
            request_body(queries, self._topk), lambda reply: passages_of(reply, len(queries), self._topk)
        )
        try:
            return [SearchResult(passages=found) for found in await self._ask(request)]
        except Fault as fault:
            if fault.divisible and len(queries) > 1:
                half = len(queries) // 2
                return [*await self._search_many(queries[:half]), *await self._search_many(queries[half:])]
            return [SearchResult(error=self._sentence(fault, request), failure=fault.failure)] * len(queries)

    def _sentence(self, fault: Fault, request: SearchRequest) -> str:
        """Return the error of a request that has failed."""
        if fault.failure is Failure.unavailable:
            return f"no answer from {', '.join(self.urls)} after {len(request.failed)} tries: {fault}"
        return str(fault) if fault.failure is Failure.rejected else f"{request.failed[-1].url}: {fault}"

    async def _ask(self, request: SearchRequest) -> Found:
        """Try replicas until one answers or the retries are used up. Raises Fault."""
        while (replica := await self._next(request)) is not None:
            try:
                return await self._try(replica, request)
            except Fault as fault:
                if fault.final:
                    raise
                request.fault = fault
        raise request.fault or Fault(
            "every server now serves another index than at the start: restart the run",
            Failure.unavailable,
            ReplicaVerdict.abandoned,
        )

    async def _next(self, request: SearchRequest) -> Replica | None:
        """Return the replica for the next try, after a pause if needed; None to give up."""
        if request.fault is not None and self._replicas.fresh(request) is None:
            if request.pauses == self._retries or self._replicas.pick(request) is None:
                return None
            growing_s = min(_FIRST_PAUSE_S * 2 ** min(request.pauses, 16), _LAST_PAUSE_S)
            asked_s = min(request.fault.retry_after_s, _MAX_RETRY_AFTER_S)
            request.pauses += 1
            await asyncio.sleep(max(growing_s, asked_s) * self._lots.uniform(1.0, 1.5))
        replica = self._replicas.pick(request)
        if request.fault is not None and replica is not None:
            self.counts.retries += 1
            self.counts.failovers += replica is not request.failed[-1]
        return replica

    async def _try(self, replica: Replica, request: SearchRequest) -> Found:
        """Send the request, and hedge it if it is slow. Raises Fault."""
        if self._hedge_after_s is None:
            return await self._post(replica, request)
        self._hedges.earn()
        first = asyncio.create_task(self._post(replica, request))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=self._hedge_after_s)
            other = None if first.done() else self._replicas.fresh(request, [replica])
            if other is not None and self._hedges.take():
                self.counts.hedges += 1
                tasks.append(asyncio.create_task(self._post(other, request)))
            winner = await _first_answered(tasks)
            self.counts.hedges_won += winner is not first and winner.exception() is None
            return winner.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, replica: Replica, request: SearchRequest) -> Found:
        """Send the request to `replica` and record the outcome in the request and the replica. Raises Fault."""
        self.counts.requests += 1
        self._replicas.start(replica)
        verdict = ReplicaVerdict.abandoned
        try:
            reply = await self._in_time(self._wire.post(f"{replica.url}{request.path}", request.body))
            found = request.read(reply)
            verdict = ReplicaVerdict.answered
        except Fault as fault:
            verdict = fault.verdict
            request.failed.append(replica)
            if fault.failure is Failure.broken:
                request.broken.append(replica)
            raise
        finally:
            self._replicas.end(replica, verdict)
            self._prober.watch(replica)
        return found

    async def _in_time(self, asking: Awaitable[Reply]) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asking
        except TimeoutError:
            raise NoReplyError(f"no answer within {self._timeout_s:g} s") from None


async def _first_answered(tasks: Sequence[asyncio.Task[Found]]) -> asyncio.Task[Found]:
    """Return the first task with a result or a final fault, or else the last task to fail."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in filter(done.__contains__, tasks):
            error = task.exception()
            if not isinstance(error, Fault) or error.final:
                return task
        if not pending:
            return done.pop()


def _addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Return `urls` without trailing slashes. Raises UserError for an empty list, invalid URLs and duplicates."""
    if not urls:
        reason = "search.url names no server: give a url like http://127.0.0.1:8000."
        raise UserError(reason, code="missing", key="search.url")
    for url in urls:
        if not is_url(url):
            reason = f"search url {url!r} is not an address: write it like http://127.0.0.1:8000."
            raise UserError(reason, code="malformed", key=url)
    addresses = tuple(url.rstrip("/") for url in urls)
    url, times = Counter(addresses).most_common(1)[0]
    if times > 1:
        raise UserError(f"search url {url!r} is given twice: name every replica once.", code="conflict", key=url)
    return addresses
