"""Tests of the client's tries, pauses, fail-over, hedges and probes, under a virtual clock."""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.errors import RunError
from rlsys.search.client import SearchClient
from rlsys.search.retrieval import Failure, SearchResult
from tests.support.refusals import refused
from tests.support.virtual_time import virtually

from .scripted import SERVES, ScriptedServer, ScriptedWire, found


def over(wire: ScriptedWire, **settings: Any) -> SearchClient:
    """Return a client that sends each search in a request of its own, unless `settings` say otherwise."""
    fixed = {"coalesce_ms": 0.0, "max_coalesced": 1, "lots": Random(7)}
    return SearchClient(wire.urls, wire=wire, **(fixed | settings))


async def ask(client: SearchClient, count: int) -> list[SearchResult]:
    return await asyncio.gather(*(client.search(f"q{row}") for row in range(count)))


def all_found(results: list[SearchResult]) -> bool:
    return results == [found(f"q{row}") for row in range(len(results))]


# ---- tries and pauses


@virtually
async def test_pauses_between_retries_grow_with_jitter_up_to_a_limit() -> None:
    server = ScriptedServer(status=503)
    async with over(ScriptedWire(a=server), retries=7) as client:
        assert (await client.search("Mali")).failure is Failure.unavailable
    pauses = [late - early for early, late in zip(server.asked, server.asked[1:], strict=False)]
    least = [0.25, 0.5, 1, 2, 4, 4, 4]
    assert all(low <= pause <= 1.5 * low for low, pause in zip(least, pauses, strict=True))
    assert len({pause / low for low, pause in zip(least, pauses, strict=True)}) == 7
    assert server.probed == [], "a single server is not probed"


@pytest.mark.parametrize(("asked_s", "least_s"), [(0.1, 0.25), (5.0, 5.0), (1e9, 30.0)])
@virtually
async def test_retry_after_is_respected_up_to_a_limit(asked_s: float, least_s: float) -> None:
    server = ScriptedServer(status=429, retry_after_s=asked_s)
    async with over(ScriptedWire(a=server)) as client:
        search = asyncio.create_task(client.search("Mali"))
        await asyncio.sleep(0.2)
        server.status = 200
        assert await search == found("Mali")
    first, second = server.asked
    assert least_s <= second - first <= 1.5 * least_s


@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.5, 8.6])
@virtually
async def test_close_fails_all_searches_and_closes_the_wire(at_s: float) -> None:
    """`at_s` is during the first probe, the first try, a hedge, or a pause."""
    wire = ScriptedWire(a=ScriptedServer(takes_s=7.0, status=503), b=ScriptedServer(takes_s=7.5, status=503))
    client = over(wire, hedge_after_s=1.0)
    searches = asyncio.gather(*(client.search(f"q{row}") for row in range(5)))
    await asyncio.sleep(at_s)
    await client.close()
    await client.close()
    assert {result.failure for result in await searches} == {Failure.closed}
    assert (now(), wire.closed) == (at_s, True)


def test_dead_or_silent_servers_give_a_typed_failure_in_bounded_time() -> None:
    """The bound is (replicas + retries) * timeout_s + retries * 6."""

    async def work(**servers: ScriptedServer) -> float:
        async with over(ScriptedWire(**servers), retries=3, timeout_s=10.0) as client:
            results = await ask(client, 20)
        assert {result.failure for result in results} == {Failure.unavailable}
        assert client.counts.failures == {Failure.unavailable: 20}
        return now()

    assert run_virtually(work(a=ScriptedServer(down=True), b=ScriptedServer(down=True))) <= 3 * 6
    assert run_virtually(work(a=ScriptedServer(takes_s=1e6), b=ScriptedServer(takes_s=1e6))) <= 5 * 10 + 3 * 6


@pytest.mark.parametrize(("status", "failure"), [(422, Failure.rejected), (500, Failure.broken)])
@virtually
async def test_bad_queries_are_isolated_by_halving_and_the_others_are_answered(status: int, failure: Failure) -> None:
    server = ScriptedServer(refuses={"q5": status, "q40": status})
    async with over(ScriptedWire(a=server), max_coalesced=64) as client:
        for row, result in enumerate(await ask(client, 64)):
            assert result.failure is failure if row in (5, 40) else result == found(f"q{row}")
    # The whole request, then both halves of each part that has a bad query: 1 + 2 * (1 + 5 * 2).
    assert len(server.asked) == 23


# ---- several replicas


@pytest.mark.parametrize(
    ("bad", "failure", "tries"),
    [(ScriptedServer(body=b"<html>"), Failure.broken, 3), (ScriptedServer(status=401), Failure.denied, 1)],
    ids=["nonsense", "wrong token"],
)
@virtually
async def test_invalid_answers_are_tried_on_all_replicas_and_a_wrong_token_on_one(
    bad: ScriptedServer, failure: Failure, tries: int
) -> None:
    servers = {name: replace(bad, asked=[]) for name in "abc"}
    async with over(ScriptedWire(**servers)) as client:
        assert (await client.search("Mali")).failure is failure
    assert sum(len(server.asked) for server in servers.values()) == tries
    assert all(server.asked in ([], [0.0]) for server in servers.values()), "without a pause"


@virtually
async def test_a_replica_of_another_index_is_never_asked(caplog: pytest.LogCaptureFixture) -> None:
    foreign = ScriptedServer(serves=SERVES | {"encoder": "f", "queries": 3})
    silent = ScriptedServer(serves=None)
    wire = ScriptedWire(a=ScriptedServer(serves=SERVES | {"queries": 9}), b=foreign, c=silent)
    async with over(wire) as client:
        assert all_found(await ask(client, 40))
        assert silent.asked, "a server without /health is trusted"
        wire.servers["http://a"].down = silent.down = True
        assert {result.failure for result in await ask(client, 3)} == {Failure.unavailable}
        assert foreign.asked == []
        foreign.serves = SERVES
        await asyncio.sleep(20)
        assert all_found(await ask(client, 3))
    assert "http://b" in caplog.text
    assert "encoder=f" in caplog.text


@virtually
async def test_a_lost_replica_is_probed_ever_less_and_used_again() -> None:
    server = ScriptedServer()
    async with over(ScriptedWire(a=server, b=ScriptedServer(takes_s=0.01))) as client:
        assert all_found(await ask(client, 50))
        server.down = True
        assert all_found(await ask(client, 50))
        await asyncio.sleep(100)
        waits = [late - early for early, late in zip(server.probed, server.probed[1:], strict=False)]
        assert 10 < len(waits) < 30
        assert waits[1] < 1 < 10 <= min(waits[-3:])
        server.down, searched = False, len(server.asked)
        await asyncio.sleep(15)
        probes = len(server.probed)
        assert all_found(await ask(client, 50))
        assert len(server.asked) > searched + 10
        await asyncio.sleep(60)
        assert len(server.probed) == probes, "a healthy replica is not probed"


def test_health_is_refused_if_replicas_serve_different_indexes() -> None:
    async def health(*serve: dict[str, Any] | None) -> dict[str, Any]:
        servers = {f"s{row}": ScriptedServer(serves=one, down=one == {}) for row, one in enumerate(serve)}
        return await over(ScriptedWire(**servers)).health()

    assert run_virtually(health({}, SERVES, None, SERVES | {"kind": "dense"})) == SERVES
    with refused("mismatch", "http://s2"):
        run_virtually(health(SERVES, SERVES, SERVES | {"passages": 8}))
    with pytest.raises(RunError, match=r"http://s0.*http://s1"):
        run_virtually(health({}, None))


# ---- hedges


@pytest.mark.parametrize("other_fails", [False, True])
@virtually
async def test_a_slow_request_is_sent_twice_and_the_first_answer_counts(other_fails: bool) -> None:
    servers = [ScriptedServer(takes_s=20.0), ScriptedServer(takes_s=20.0)]
    async with over(ScriptedWire(a=servers[0], b=servers[1]), hedge_after_s=2.0) as client:
        search = asyncio.create_task(client.search("Mali"))
        await asyncio.sleep(1.0)
        first, second = sorted(servers, key=lambda server: not server.asked)
        second.takes_s, second.status = 0.5, 503 if other_fails else 200
        assert await search == found("Mali")
        assert (now(), first.cancelled, client.counts.hedges_won) == ((20.0, 0, 0) if other_fails else (2.5, 1, 1))
        assert (first.asked, second.asked) == ([0.0], [2.0])
        assert (client.counts.hedges, client.counts.retries) == (1, 0)


@virtually
async def test_a_slow_cluster_gets_few_hedges() -> None:
    wire = ScriptedWire(a=ScriptedServer(takes_s=5.0), b=ScriptedServer(takes_s=5.0))
    async with over(wire, hedge_after_s=1.0, max_concurrent=1000) as client:
        assert all_found(await ask(client, 400))
        assert client.counts.hedges == 10, "no more than 10 are saved"
        assert all_found(await ask(client, 40))
        assert client.counts.hedges == 12, "one for 20 requests"


# ---- everything at once

TROUBLE = st.sampled_from(
    [
        {"down": True},
        {"status": 503},
        {"status": 500},
        {"status": 429, "retry_after_s": 2.0},
        {"body": b"{"},
        {"takes_s": 1e6},
        {},
        {},
    ]
)
WELL = {"down": False, "status": 200, "retry_after_s": 0.0, "body": None, "takes_s": 0.1}
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 30), TROUBLE), max_size=12)


@settings(max_examples=40)
@given(events=EVENTS, seed=st.integers(0, 2**32), good=st.booleans(), hedged=st.booleans())
def test_every_search_gets_its_own_answer(events: list[Any], seed: int, good: bool, hedged: bool) -> None:
    """If `good`, one of three servers never fails; then no search fails, even without retries."""
    lots, servers = Random(seed), [ScriptedServer(takes_s=0.1) for _ in range(3)]
    patience = {"timeout_s": 5.0, "retries": 0 if good else 2, "hedge_after_s": 1.0 if hedged else None}

    async def happen(server: ScriptedServer, at_s: float, trouble: dict[str, Any]) -> None:
        await asyncio.sleep(at_s)
        for name, value in (WELL | trouble).items():
            setattr(server, name, value)

    async def later(client: SearchClient, row: int) -> SearchResult:
        await asyncio.sleep(lots.uniform(0, 30))
        return await client.search(f"q{row}")

    async def work() -> None:
        wire = ScriptedWire(a=servers[0], b=servers[1], c=servers[2])
        async with over(wire, lots=lots, max_coalesced=4, coalesce_ms=50.0, **patience) as client:
            trouble = [happen(servers[row], at, what) for row, at, what in events if not (good and row == 0)]
            searches = asyncio.gather(*(later(client, row) for row in range(60)))
            results, _ = await asyncio.gather(searches, asyncio.gather(*trouble))
        for row, result in enumerate(results):
            failed = result.failure in (Failure.unavailable, Failure.broken) and result.error
            assert result == found(f"q{row}") or (failed and not good)
        assert client.counts.searches == 60
        assert client.counts.failures.total() == sum(result.failure is not None for result in results)
        assert client.counts.requests == sum(len(server.asked) for server in servers)

    run_virtually(work())
