"""Tests of the client over real sockets: killed and restarted replicas, and wrong URLs."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rlsys.errors import Code
from rlsys.search.client import SearchClient
from rlsys.search.retrieval import SearchResult
from rlsys.search.server.asgi import create_app
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.support.serving import serving
from tests.support.virtual_time import virtually

from .gated import Gated
from .gated_server import GatedServer
from .scripted import ScriptedServer, ScriptedWire, found


def is_right(query: str, result: SearchResult) -> bool:
    """Tell if the passages are the ones that the server's retriever finds."""
    return [passage.id for passage in result.passages] == [f"{query}/{rank}" for rank in range(3)]


@pytest.mark.parametrize(("max_coalesced", "requests"), [(64, 4), (1, 201)])
@virtually
async def test_concurrent_searches_share_requests(max_coalesced: int, requests: int) -> None:
    wire = ScriptedWire(a=ScriptedServer())
    async with SearchClient(wire.urls, wire=wire, max_coalesced=max_coalesced) as client:
        queries = ["", *(f"country {row % 9}" for row in range(200))]
        results = await asyncio.gather(*map(client.search, [" \n", *queries[1:]]))
    assert len(wire.servers["http://a"].asked) == requests
    assert results == list(map(found, queries))


async def test_no_search_is_lost_when_a_server_is_killed_and_restarted(tmp_path: Path) -> None:
    """One client has only the killed server; the other also has a second one."""
    port, queries = free_port(), [str(number) for number in range(400)]
    # With these limits, most searches are not yet sent when the first one is answered.
    settings = {"max_coalesced": 4, "max_concurrent": 8}
    with serving(create_app(Gated())) as other, GatedServer(tmp_path / "first.log", port=port) as first:
        await asyncio.to_thread(first.wait_healthy, 120)
        async with (
            SearchClient(first.url, retries=1000, **settings) as alone,
            SearchClient([first.url, other], **settings) as both,
        ):
            searches = [asyncio.create_task(client.search(query)) for query in queries for client in (alone, both)]
            await searches[0]
            os.kill(first.pid, signal.SIGKILL)
            first.close()
            with GatedServer(tmp_path / "second.log", port=port):
                results = await asyncio.gather(*searches)
    assert all(is_right(query, result) for query, result in zip(queries, results[::2], strict=True))
    assert all(is_right(query, result) for query, result in zip(queries, results[1::2], strict=True))
    assert alone.counts.retries > 0


@pytest.mark.parametrize(
    ("urls", "code", "key"),
    [
        ("localhost:8000", "malformed", "localhost:8000"),
        (["http://a:1", "ftp://b"], "malformed", "ftp://b"),
        ("http://name:word@a", "malformed", "http://name:word@a"),
        *(
            (url, "malformed", url)
            for url in ("http://[::1", "http://", "http://a:0", "http://:word@a", "http://a/?q=1")
        ),
        ([], "missing", "search.url"),
        (["http://a:1", "http://a:1/"], "conflict", "http://a:1"),
    ],
)
def test_wrong_urls_are_refused(urls: str | list[str], code: Code, key: str) -> None:
    with refused(code, key):
        SearchClient(urls)


def test_impossible_hedging_and_malformed_tokens_are_refused() -> None:
    for urls, after_s in ((["http://a"], 1.0), (["http://a", "http://b"], 30.0), (["http://a", "http://b"], 0.0)):
        with refused("conflict", "search.hedge_after_s"):
            SearchClient(urls, hedge_after_s=after_s, timeout_s=30.0)
    for token in ("", " token", "new\nline", "tökén"):
        with refused("malformed", "token"):
            SearchClient("http://127.0.0.1:8000", token=token)
