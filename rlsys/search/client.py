"""The episodes' side of the search tool: one client of one search server, or of several that serve the same.

Contract: `search` never raises for a search that failed, it returns a result with a reason, so that one bad
request costs one observation and not a run. Every search gets exactly one result: retrieval changes nothing
in the server, so a request may be sent again, elsewhere or twice at once, and the first answer is taken.
Searches that are asked within a few milliseconds travel as one request. Cancelling one caller does not
disturb the others.

What is a server's fault (no answer in time, 408, 429, 5xx, nonsense) is tried again: at once at every healthy
replica that the request has not failed at, then up to `retries` times, each after a pause that grows, is
jittered and is no shorter than a Retry-After (of 30 s at most). A server that gave nonsense is not asked the
same again, and what is the request's own fault (400, 401, 403, 413, 422) is not tried again at all. So one
request is over after `(replicas + retries) * (timeout_s + hedge_after_s) + retries * 6` seconds at most, or
`retries * 45` in place of the last term where the servers ask for time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any, Self

from rlsys.errors import UserError
from rlsys.search.address import is_url
from rlsys.search.batcher import Batcher, BatcherClosed, QueueFull
from rlsys.search.prober import Prober
from rlsys.search.replicas import HedgeBudget, Replica, Replicas, Trail, Verdict
from rlsys.search.result import BLANK, Failure, Passage, SearchResult, as_sent
from rlsys.search.wire import (
    Fault,
    HttpWire,
    NoReplyError,
    Reply,
    Wire,
    lost,
    passages_of,
    request_body,
)

_MAX_PENDING = 1 << 20
_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 4.0
_MOST_ASKED_S = 30.0
"""Bounds of the pause between two tries, and of the Retry-After that it heeds; jitter adds up to a half."""
_HEDGED_EVERY = 20
"""Requests for each that may be sent twice: a cluster that is slow as a whole gets 5 % more of them."""
_HEDGES_SAVED = 10
_CLOSED = SearchResult(error="the search client is closed", failure=Failure.closed)

Found = list[tuple[Passage, ...]]
"""The passages of each query of a request."""


@dataclass(slots=True)
class ClientCounts:
    """What a client has done since its start."""

    searches: int = 0
    """Asked and over, not cancelled ones."""
    requests: int = 0
    """Sent, each with one search or more."""
    retries: int = 0
    """Tries after the first."""
    failovers: int = 0
    """Retries that went to another replica than the try before."""
    hedges: int = 0
    """Second requests that were sent because the first one took long."""
    hedges_won: int = 0
    """Those that answered first."""
    failures: Counter[Failure] = field(default_factory=Counter)
    """Searches that failed."""


@dataclass(slots=True)
class _Request:
    """Searches that travel together, and what became of their tries."""

    body: bytes
    queries: int
    trail: Trail = field(default_factory=Trail)
    fault: Fault | None = None
    """Of the last try that failed."""
    pauses: int = 0


class SearchClient:
    """A client for one event loop; `close` it at the end.

    Args:
        urls: of the server, e.g. http://127.0.0.1:8000, or of several replicas, to be asked in turns. Before
            its first search a client of several asks all for their health, see `health`.
        topk: passages a query.
        timeout_s: of one try.
        retries: further tries, after pauses, of a request that no healthy replica answered.
        max_concurrent: requests in flight, second ones not counted.
        coalesce_ms: how long a search waits for others to share its request.
        max_coalesced: most searches of one request; 1 sends each on its own.
        hedge_after_s: a request without an answer for so long is sent to another replica too, and the first
            answer counts. At most every twentieth request is. None sends none twice.
        token: bearer token of the servers.
        wire: in place of HTTP.
        lots: of jitter and ties.

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
        wire: Wire | None = None,
        lots: Random | None = None,
    ) -> None:
        self.urls = _addresses([urls] if isinstance(urls, str) else urls)
        if hedge_after_s is not None and not (len(self.urls) > 1 and 0 < hedge_after_s < timeout_s):
            raise UserError(
                f"hedge_after_s={hedge_after_s:g} is of no use with {len(self.urls)} search url(s) and "
                f"timeout_s={timeout_s:g}: give two urls or more and a time below timeout_s, or leave it null"
            )
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            raise UserError("the search token is empty or not plain ASCII text: give it as the server has it")
        self.counts = ClientCounts()
        self._topk = topk
        self._timeout_s = timeout_s
        self._retries = retries
        self._hedge_after_s = hedge_after_s
        self._hedges = HedgeBudget(_HEDGED_EVERY, _HEDGES_SAVED)
        self._lots = lots or Random()
        self._replicas = Replicas(self.urls, self._lots)
        self._wire = wire or HttpWire(token)
        self._prober = Prober(self._replicas, self._wire)
        self._batcher: Batcher[str, SearchResult] = Batcher(
            self._search_many,
            max_batch=max_coalesced,
            max_wait_s=coalesce_ms / 1000,
            max_running=max_concurrent,
            max_pending=_MAX_PENDING,
        )

    async def search(self, query: str) -> SearchResult:
        """Ask one query; a blank one is an error that is not sent."""
        query = as_sent(query)
        result = await self._submit(query) if query else BLANK
        self.counts.searches += 1
        if result.failure is not None:
            self.counts.failures[result.failure] += 1
        return result

    async def health(self) -> dict[str, Any]:
        """What the first server that answers says of itself.

        Raises RunError when none answers or is well, UserError when two serve different things.
        """
        return await self._prober.health(self._timeout_s)

    async def close(self) -> None:
        """End what is in flight, as an error result, the probes and the connections. May be called again."""
        await self._batcher.close()
        await self._prober.close()
        await self._wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _submit(self, query: str) -> SearchResult:
        try:
            (future,) = self._batcher.submit([query])
            return await future
        except BatcherClosed:
            return _CLOSED
        except QueueFull:
            return SearchResult(error=f"{_MAX_PENDING} searches wait already", failure=Failure.unavailable)

    async def _search_many(self, queries: list[str]) -> list[SearchResult]:
        """One result a query. What may be one query's fault is found by halving, so the others get theirs."""
        await self._prober.looked()
        request = _Request(request_body(queries, self._topk), len(queries))
        try:
            return [SearchResult(passages=found) for found in await self._ask(request)]
        except Fault as fault:
            if fault.divisible and len(queries) > 1:
                half = len(queries) // 2
                return [*await self._search_many(queries[:half]), *await self._search_many(queries[half:])]
            failed = SearchResult(error=self._sentence(request, fault), failure=fault.failure)
            return [failed] * len(queries)

    async def _ask(self, request: _Request) -> Found:
        """What is found, in as many tries as it takes and is allowed. Raises Fault."""
        while (replica := await self._next(request)) is not None:
            try:
                return await self._try(replica, request)
            except Fault as fault:
                if fault.final:
                    raise
                request.fault = fault
        raise request.fault or Fault(
            "each serves something else than at the start: start anew", Failure.unavailable, Verdict.abandoned
        )

    async def _next(self, request: _Request) -> Replica | None:
        """Where the request goes next, maybe after a pause; None where it is given up."""
        trail = request.trail
        if request.fault is not None and self._replicas.fresh(trail) is None:
            if request.pauses == self._retries or self._replicas.pick(trail) is None:
                return None
            growing_s = min(_FIRST_PAUSE_S * 2 ** min(request.pauses, 16), _LAST_PAUSE_S)
            asked_s = min(request.fault.retry_after_s, _MOST_ASKED_S)
            request.pauses += 1
            await asyncio.sleep(max(growing_s, asked_s) * self._lots.uniform(1.0, 1.5))
        replica = self._replicas.pick(trail)
        if request.fault is not None and replica is not None:
            self.counts.retries += 1
            self.counts.failovers += replica is not trail.failed[-1]
        return replica

    async def _try(self, replica: Replica, request: _Request) -> Found:
        """One exchange, or two where the first one takes long. Raises Fault."""
        if self._hedge_after_s is None:
            return await self._post(replica, request)
        self._hedges.earn()
        first = asyncio.create_task(self._post(replica, request))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=self._hedge_after_s)
            other = None if first.done() else self._replicas.fresh(request.trail, [replica])
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

    async def _post(self, replica: Replica, request: _Request) -> Found:
        """One exchange. Raises Fault, and notes it in the request's trail and of `replica`."""
        self.counts.requests += 1
        self._replicas.start(replica)
        verdict = Verdict.abandoned
        try:
            reply = await self._exchange(replica.url, request.body)
            found = passages_of(reply, request.queries, self._topk)
            verdict = Verdict.answered
        except Fault as fault:
            verdict = fault.verdict
            request.trail.failed.append(replica)
            if fault.failure is Failure.broken:
                request.trail.broken.append(replica)
            raise
        finally:
            self._replicas.end(replica, verdict)
            self._prober.watch(replica)
        return found

    async def _exchange(self, url: str, body: bytes) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._wire.post(f"{url}/retrieve", body)
        except TimeoutError:
            raise lost(f"no answer within {self._timeout_s:g} s") from None
        except NoReplyError as error:
            raise lost(str(error)) from error

    def _sentence(self, request: _Request, fault: Fault) -> str:
        """What the caller reads."""
        match fault.failure:
            case Failure.unavailable:
                return f"no answer from {', '.join(self.urls)} after {len(request.trail.failed)} tries: {fault}"
            case Failure.rejected:
                return str(fault)
            case _:
                return f"{request.trail.failed[-1].url}: {fault}"


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
        raise UserError("there is no search url: give one like http://127.0.0.1:8000")
    for url in urls:
        if not is_url(url):
            raise UserError(f"search url {url!r} is not an address: write it like http://127.0.0.1:8000")
    addresses = tuple(url.rstrip("/") for url in urls)
    twice = [url for url, times in Counter(addresses).items() if times > 1]
    if twice:
        raise UserError(f"search url {twice[0]!r} is given twice: name every replica once")
    return addresses
