"""The names, and the pages, by which servers may be asked."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

import httpx
import pytest
import requests
from starlette.types import ASGIApp

from rlsys.search.address import bind, is_inner, is_trusted, own_names
from rlsys.search.server import command
from rlsys.search.server.asgi import create_app
from tests.support.refusals import refused
from tests.support.serving import serving

from .gated import Gated


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("127.0.0.1:8800", "own"),
        ("[::1]:8800", "own"),
        ("LOCALHOST", "own"),
        ("localhost.:8800", "own"),
        (socket.gethostname(), "own"),
        ("gpu7.lab:8800", "own"),
        ("search.default.svc.cluster.local:8000", "inner"),
        ("ip-10-0-0-1.eu-west-1.compute.internal", "inner"),
        ("gpu8.", "inner"),
        ("not-gpu7.lab", "foreign"),
        ("localhost.evil.example", "foreign"),
        ("127.0.0.1.evil.example", "foreign"),
        ("evil.example:127.0.0.1", "foreign"),
        ("[evil.example]", "foreign"),
        ("", "foreign"),
        (".", "foreign"),
    ],
)
def test_names_are_own_or_such_as_the_internet_cannot_hold_or_foreign(header: str, kind: str) -> None:
    trusted, inner = is_trusted(header, own_names("gpu7.lab")), is_inner(header)
    assert kind == ("own" if trusted else "inner" if inner else "foreign")


def asked(url: str, headers: dict[str, str]) -> int:
    return requests.post(f"{url}/retrieve", data=b'{"queries": ["a"]}', headers=headers, timeout=60).status_code


def test_a_server_without_a_token_refuses_other_names_and_pages() -> None:
    local = partial(is_trusted, names=own_names("127.0.0.1"))
    with serving(create_app(Gated(), trusts=local)) as url:
        port = url.rpartition(":")[2]
        for headers, status in (
            ({}, 200),
            ({"Content-Type": "application/json", "Host": f"localhost:{port}"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Host": "search"}, 403),
            # As a page elsewhere has a browser send it, unasked, with or without a type.
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "https://evil.example", "Content-Type": "text/plain"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": ""}, 403),
            ({"Origin": url}, 200),
        ):
            assert asked(url, headers) == status, headers
        for path in ("/health", "/metrics", "/docs", "/none"):
            assert requests.get(url + path, headers={"Host": "evil.example"}, timeout=60).status_code == 403
        # Some probes name no host. Every browser does.
        with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as probe:
            probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert probe.recv(100).startswith(b"HTTP/1.1 200")


def test_the_token_opens_a_server_under_any_name() -> None:
    with serving(create_app(Gated(), token="s3cret", trusts=lambda _: False)) as url:
        headers = {"Host": "search.example", "Origin": "https://page.example"}
        assert [asked(url, headers), asked(url, headers | {"Authorization": "Bearer s3cret"})] == [401, 200]


@pytest.mark.parametrize(
    ("host", "allowed", "statuses"),
    [
        ("127.0.0.1", [], {"localhost": 200, "search": 403, "search.example": 403}),
        ("0.0.0.0", [], {"localhost": 200, "search": 200, "a.default.svc": 200, "search.example": 403}),
        ("127.0.0.1", ["Search.Example"], {"search.example:80": 200, "evil.example": 403}),
        ("0.0.0.0", ["search.example"], {"search.example": 200, "gpu7": 200, "evil.example": 403}),
    ],
)
async def test_a_server_that_others_reach_has_names_of_their_network_and_warns_without_a_token(
    host: str, allowed: list[str], statuses: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[ASGIApp] = []
    warnings: list[tuple[Any, ...]] = []

    def served(config: Any, _: command.Parts) -> None:
        apps.append(config.app)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_Server", served)
    monkeypatch.setattr(command._log, "warning", lambda *told: warnings.append(told))
    # In a thread of its own it sets no handlers of signals.
    options: dict[str, Any] = {"name": "x", "host": host, "port": 0, "allowed_hosts": allowed}
    await asyncio.to_thread(command.serve_parts, lambda: command.Parts(Gated()), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(apps[0]), base_url="http://test") as client:
        for name, status in statuses.items():
            assert (await client.get("/openapi.json", headers={"Host": name})).status_code == status, name
    assert len(warnings) == (host == "0.0.0.0")


def test_a_taken_port_a_wrong_port_and_a_wrong_host_are_refused() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with refused("in_use", place):
            bind("127.0.0.1", taken.getsockname()[1])
    with refused("out_of_range", "127.0.0.1:70000"):
        bind("127.0.0.1", 70_000)
    with refused("not_found", "192.0.2.1:0"):
        bind("192.0.2.1", 0)
