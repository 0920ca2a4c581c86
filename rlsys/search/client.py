"""The episodes' side of the search tool: one client of one search server, or of several that serve the same.

Contract: `search` never raises for a search that failed, it returns a result with a reason, so that one bad request
costs one observation and not a run. Every search gets exactly one result: retrieval changes nothing in the server, so a
request may be sent again, elsewhere or twice at once, and the first answer is taken. Searches that are asked within a
few milliseconds travel as one request. Cancelling one caller does not disturb the others.

A server's fault (no answer in time, 408, 429, 5xx, nonsense) is tried again: at once at every healthy replica that the
request has not failed at, then up to `retries` times, each after a pause that grows, is jittered and is no shorter than
a Retry-After (of 30 s at most). A server that gave nonsense is not asked the same again, and the request's own fault
(400, 401, 403, 413, 422) is not tried again at all. So one request is over after `(replicas + retries) * (timeout_s +
hedge_after_s) + retries * 6` seconds at most, or `retries * 45` in place of the last term where the servers ask for time.

A replica is healthy until a request to it is lost, or `TURNED_AWAY` in a row are turned away; then it is suspect until
a probe or a request is answered. Each suspicion since its last answered search doubles the wait before it is probed.
One whose health says that it serves something else than the others is foreign until its health says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from rlsys.errors import RunError, UserError
from rlsys.search.address import is_url
from rlsys.search.dynamic_batching import Batcher, BatcherClosed, QueueFull
from rlsys.search.retrieval import BLANK, Failure, Passage, SearchResult, differences, listed, served
from rlsys.search.wire import (
    Fault,
    HttpWire,
    NoReplyError,
    ReplicaVerdict,
    Reply,
    as_sent,
    health_of,
    passages_of,
    request_body,
)

TURNED_AWAY = 3  # refusals in a row ("busy") that make a replica suspect
FIRST_PROBE_S = 0.1
LAST_PROBE_S = 10.0  # bounds of the wait before a probe, without its jitter of half as much more
_PROBE_TIMEOUT_S = 3.0
_MAX_PENDING = 1 << 20
_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 4.0
_MOST_ASKED_S = 30.0
"""Bounds of the pause between two tries, and of the Retry-After that it heeds; jitter adds up to a half."""
_HEDGED_EVERY = 20  # requests for each that may be sent twice: a cluster that is slow as a whole gets 5 % more of them
_HEDGES_SAVED = 10
_log = logging.getLogger(__name__)

Found = list[tuple[Passage, ...]]  # the passages of each query of a request


class ReplicaState(Enum):
    """The state that its answers have put a replica in."""

    healthy = "healthy"
    suspect = "suspect"
    foreign = "foreign"


@dataclass(slots=True, eq=False)
class Replica:
    """One server as the requests to it show it."""

    url: str
    state: ReplicaState = ReplicaState.healthy
    in_flight: int = 0
    turned_away: int = 0  # refusals in a row
    suspicions: int = 0  # how often it became or stayed suspect since its last answered search


@dataclass(slots=True)
class SearchRequest:
    """Searches that travel together, and what became of their tries."""

    body: bytes = b""
    queries: int = 0
    fault: Fault | None = None  # of the last try that failed
    pauses: int = 0
    failed: list[Replica] = field(default_factory=list)  # in the order of the failures
    broken: list[Replica] = field(default_factory=list)
    """Not to be asked again: another try would give the same nonsense."""


class Replicas:
    """The servers of one client, as a state machine: no clock, no network, only events and what follows.

    Invariants: a foreign replica is never picked; a suspect one only if no healthy one is left that has not failed the
    request; of equals, one with the fewest requests in flight is picked, ties by lot; each `start` is followed by one
    `end`.
    """

    def __init__(self, urls: Iterable[str], lots: Random) -> None:
        self.all = tuple(Replica(url) for url in urls)
        self._lots = lots
        self._reference: dict[str, Any] = {}  # what all have to serve: what the first one serves that said so

    def fresh(self, request: SearchRequest, besides: Sequence[Replica] = ()) -> Replica | None:
        """A healthy replica at which the request has not failed and that is not of `besides`; None if none is."""
        tried = [*request.failed, *besides]
        healthy = (replica for replica in self.all if replica.state is ReplicaState.healthy)
        return self._least_busy(replica for replica in healthy if replica not in tried)

    def pick(self, request: SearchRequest) -> Replica | None:
        """The replica to ask next, None where another try cannot help: a fresh one, else of the healthy ones, else of
        the suspect ones, first one that has not failed the request, then the one whose failure is the longest ago.
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
        """Note that a request is sent to `replica`."""
        replica.in_flight += 1

    def end(self, replica: Replica, verdict: ReplicaVerdict) -> None:
        """Note how a request to `replica` has ended."""
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
        """Note a probe: None for no answer, else what the server says of itself (nothing is an answer too)."""
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
            reason = "the search server %s is not asked any more: it serves %s, the others serve %s"
            _log.error(reason, replica.url, here, there)
        elif not others and replica.state is not ReplicaState.healthy:
            self._trust(replica)
            replica.turned_away = TURNED_AWAY - 1  # a search must show that the health says true

    def probe_after_s(self, replica: Replica) -> float:
        """The wait before `replica` is probed, jittered so that many clients do not come at once."""
        doublings = min(max(0, replica.suspicions - 1), 16)
        wait_s = LAST_PROBE_S if replica.state is ReplicaState.foreign else FIRST_PROBE_S * 2**doublings
        return min(wait_s, LAST_PROBE_S) * self._lots.uniform(1.0, 1.5)

    def _least_busy(self, replicas: Iterable[Replica]) -> Replica | None:
        return min(replicas, key=lambda replica: (replica.in_flight, self._lots.random()), default=None)

    def _suspect(self, replica: Replica) -> None:
        if replica.state is ReplicaState.healthy:
            replica.state = ReplicaState.suspect
            replica.suspicions += 1
            _log.warning("the search server %s is set aside until it answers again", replica.url)

    def _trust(self, replica: Replica) -> None:
        replica.state = ReplicaState.healthy
        _log.info("the search server %s answers again", replica.url)


class HedgeBudget:
    """A budget of second requests: one at the start, one more for `every` requests; at most `most` are saved up."""

    def __init__(self, every: int, most: int) -> None:
        self._every, self._most, self._saved = every, every * most, every

    def earn(self) -> None:
        """Note that a first request was sent."""
        self._saved = min(self._saved + 1, self._most)

    def take(self) -> bool:
        """True where a second request may be sent; it is counted as sent."""
        if self._saved < self._every:
            return False
        self._saved -= self._every
        return True


class _Prober:
    """Asks replicas for their health: all at the start, those that failed until they are well; a single server never."""

    def __init__(self, replicas: Replicas, wire: HttpWire) -> None:
        self._replicas, self._wire = replicas, wire
        self._first_round: asyncio.Task[None] | None = None
        self._probing: dict[Replica, asyncio.Task[None]] = {}

    async def all_probed(self) -> None:
        """Wait until each replica was probed once, so that none is searched that serves something else."""
        if len(self._replicas.all) > 1:
            self._first_round = self._first_round or asyncio.create_task(self._probe_all())
            await asyncio.shield(self._first_round)

    def watch(self, replica: Replica) -> None:
        """See that `replica` is probed until it is healthy, if it is not."""
        if replica.state is ReplicaState.healthy or replica in self._probing or len(self._replicas.all) == 1:
            return
        task = asyncio.create_task(self._probe_until_healthy(replica))
        self._probing[replica] = task
        task.add_done_callback(lambda done: self._ended(replica, done))

    async def close(self) -> None:
        """End all probes."""
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
        """The health of `replica`; None where it does not answer or is not well."""
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
    """Counts of what a client has done since its start."""

    searches: int = 0  # asked and over, not cancelled ones
    requests: int = 0  # sent, each with one search or more
    retries: int = 0  # tries after the first
    failovers: int = 0  # retries that went to another replica than the try before
    hedges: int = 0  # second requests that were sent because the first one took long
    hedges_won: int = 0  # those that answered first
    failures: Counter[Failure] = field(default_factory=Counter)  # searches that failed


class SearchClient(AbstractAsyncContextManager["SearchClient"]):
    """A client for one event loop; `close` it at the end.

    Args:
        urls: of the server, e.g. http://127.0.0.1:8000, or of several replicas, to be asked in turns. Before its first
            search a client of several asks all for their health, see `health`.
        timeout_s: of one try.
        retries: further tries, after pauses, of a request that no healthy replica answered.
        max_concurrent: requests in flight, second ones not counted.
        coalesce_ms: how long a search waits for others to share its request.
        max_coalesced: most searches of one request; 1 sends each on its own.
        hedge_after_s: a request without an answer for so long is sent to another replica too, and the first answer
            counts. At most every twentieth request is. None sends none twice.
        wire, lots: in place of HTTP, and of chance in jitter and ties.

    Raises UserError for urls and settings that cannot be used.
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
            problem = f"search.hedge_after_s={hedge_after_s:g} is of no use with {len(self.urls)} search url(s)"
            remedy = "give two urls or more and a time between 0 and timeout_s, or leave it null"
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
        self._batcher = Batcher(self._search_many, max_coalesced, coalesce_ms / 1000, **limits)

    async def search(self, query: str) -> SearchResult:
        """Ask one query; a blank one is an error that is not sent."""
        result = BLANK
        if query := as_sent(query):
            try:
                result = await self._batcher.submit([query])[0]
            except BatcherClosed:
                result = SearchResult(error="the search client is closed", failure=Failure.closed)
            except QueueFull:
                result = SearchResult(error=f"{_MAX_PENDING} searches wait already", failure=Failure.unavailable)
        self.counts.searches += 1
        if result.failure is not None:
            self.counts.failures[result.failure] += 1
        return result

    async def health(self) -> dict[str, Any]:
        """The health of the first server that answers. Raises RunError when none is well, UserError when two differ."""
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
                problem = f"the search servers serve different things, {first_url} {here} and {url} {there}"
                raise UserError(f"{problem}: give only urls of replicas of one index.", code="mismatch", key=url)
        return first

    async def close(self) -> None:
        """End what is in flight, as an error result, the probes and the connections. May be called again."""
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
        """One result a query. What may be one query's fault is found by halving, so the others get theirs."""
        await self._prober.all_probed()
        request = SearchRequest(request_body(queries, self._topk), len(queries))
        try:
            return [SearchResult(passages=found) for found in await self._ask(request)]
        except Fault as fault:
            if fault.divisible and len(queries) > 1:
                half = len(queries) // 2
                return [*await self._search_many(queries[:half]), *await self._search_many(queries[half:])]
            sentence = str(fault)
            if fault.failure is Failure.unavailable:
                sentence = f"no answer from {', '.join(self.urls)} after {len(request.failed)} tries: {fault}"
            elif fault.failure is not Failure.rejected:
                sentence = f"{request.failed[-1].url}: {fault}"
            return [SearchResult(error=sentence, failure=fault.failure)] * len(queries)

    async def _ask(self, request: SearchRequest) -> Found:
        """Ask in as many tries as it takes and is allowed. Raises Fault."""
        while (replica := await self._next(request)) is not None:
            try:
                return await self._try(replica, request)
            except Fault as fault:
                if fault.final:
                    raise
                request.fault = fault
        raise request.fault or Fault(
            "each serves something else than at the start: start anew", Failure.unavailable, ReplicaVerdict.abandoned
        )

    async def _next(self, request: SearchRequest) -> Replica | None:
        """The replica to ask next, maybe after a pause; None where the request is given up."""
        if request.fault is not None and self._replicas.fresh(request) is None:
            if request.pauses == self._retries or self._replicas.pick(request) is None:
                return None
            growing_s = min(_FIRST_PAUSE_S * 2 ** min(request.pauses, 16), _LAST_PAUSE_S)
            asked_s = min(request.fault.retry_after_s, _MOST_ASKED_S)
            request.pauses += 1
            await asyncio.sleep(max(growing_s, asked_s) * self._lots.uniform(1.0, 1.5))
        replica = self._replicas.pick(request)
        if request.fault is not None and replica is not None:
            self.counts.retries += 1
            self.counts.failovers += replica is not request.failed[-1]
        return replica

    async def _try(self, replica: Replica, request: SearchRequest) -> Found:
        """One exchange, or two where the first one takes long. Raises Fault."""
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
        """One exchange. Raises Fault, and notes it in the request and of `replica`."""
        self.counts.requests += 1
        self._replicas.start(replica)
        verdict = ReplicaVerdict.abandoned
        try:
            reply = await self._in_time(self._wire.post(f"{replica.url}/retrieve", request.body))
            found = passages_of(reply, request.queries, self._topk)
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
    """The first task with an answer, or with a fault that settles the matter; without one, the last to fail."""
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
    """`urls` as they are used. Raises UserError for what is no address, for none, and for one given twice."""
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
