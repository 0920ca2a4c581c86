"""Tests of the MCP tools of the search server, by the official SDK's client over HTTP and stdio."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx2
import pytest
import requests
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import ServerLimits
from tests.support.paths import PROJECT
from tests.support.serving import serving

from .gated import Gated, Pages

PAGE = "https://a.example/"
LIMITS = ServerLimits(max_query_chars=60, max_topk=9, max_body_bytes=5000)


class LongPages(Pages):
    known: ClassVar = {PAGE: {"url": PAGE, "contents": " ".join(f"w{row}" for row in range(1000))}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(Gated(), 2, LIMITS, pages=LongPages(), with_mcp=True)) as address:
        yield address


async def said(client: Client, tool: str, **arguments: Any) -> tuple[str, bool]:
    result = await client.call_tool(tool, arguments)
    return "\n".join(block.text for block in result.content if block.type == "text"), result.is_error


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_search_open_and_find_are_tools(url: str, mode: str) -> None:
    async with Client(f"{url}/mcp", mode=mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "open", "find"]
        found, wrong = await said(client, "search", query="Mali")
        assert (found, wrong) == ("Mali\nURL: https://a/0\n\n\nMali\nURL: https://a/1\n", False)
        assert (await said(client, "search", query="Mali", topk=5))[0].count("URL") == 5
        window = await said(client, "open", url=PAGE, start=100, most=32)
        assert window == (f"words 100 to 126 of 1000:\n{' '.join(f'w{row}' for row in range(100, 126))}", False)
        assert (await said(client, "find", url=PAGE, text="W500"))[0].startswith("words 500: ...")
        assert (await said(client, "find", url=PAGE, text="nothing"))[0].startswith("nothing is not in the page")


@pytest.mark.parametrize(
    ("tool", "arguments", "why"),
    [
        ("search", {"query": "x" * 61}, "61 characters"),
        ("search", {"query": "x", "topk": 10}, "out of range"),
        ("search", {"query": "poison"}, "failed"),
        ("search", {"query": 3}, "string"),
        ("open", {"url": "https://gone.example/"}, "there is no page"),
        ("open", {"url": PAGE, "start": 1000}, "below 1000"),
        ("open", {"url": PAGE, "start": -1}, "greater than or equal"),
        ("find", {"url": PAGE, "text": " "}, "text"),
    ],
)
async def test_wrong_call_is_an_error_with_the_reason(url: str, tool: str, arguments: dict[str, Any], why: str) -> None:
    async with Client(f"{url}/mcp") as client:
        told, wrong = await said(client, tool, **arguments)
    assert wrong
    assert why in told


def test_route_has_the_limits_of_the_others(url: str) -> None:
    head = {"Accept": "application/json, text/event-stream"}
    for body, status in ((b"{", 400), (b"x" * 6000, 413)):
        headers = head | {"Content-Type": "application/json"}
        assert requests.post(f"{url}/mcp", data=body, headers=headers, timeout=600).status_code == status
    assert (
        requests.post(f"{url}/mcp", data=b"a=1", headers=head | {"Content-Type": "a/b"}, timeout=600).status_code == 415
    )
    assert requests.get(f"{url}/mcp", headers=head, timeout=600).status_code == 405
    foreign = head | {"Origin": "https://evil.example"}
    assert requests.post(f"{url}/mcp", json={}, headers=foreign, timeout=600).status_code == 403
    assert 'path="/mcp"' in requests.get(f"{url}/metrics", timeout=600).text


async def test_token_is_required_and_without_pages_only_search_is_offered() -> None:
    with serving(create_app(Gated(), 2, token="s3cret", with_mcp=True)) as address:
        assert requests.post(f"{address}/mcp", json={}, timeout=600).status_code == 401
        async with (
            httpx2.AsyncClient(headers={"Authorization": "Bearer s3cret"}) as http,
            Client(streamable_http_client(f"{address}/mcp", http_client=http)) as client,
        ):
            assert [tool.name for tool in (await client.list_tools()).tools] == ["search"]
            assert (await said(client, "search", query="Mali"))[0].count("Mali") == 2


async def test_command_serves_stdio() -> None:
    command = StdioServerParameters(
        cwd=PROJECT, command=sys.executable, args=["-m", "tests.search.gated_server", "at-once", "--mcp-stdio"]
    )
    async with Client(command) as client:
        assert (await said(client, "search", query="Mali"))[0].startswith("Mali\nURL: https://a/0")
