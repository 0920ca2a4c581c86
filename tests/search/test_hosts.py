"""Tests of hosts and origins: the names under which a server accepts requests, with and without a token."""

import asyncio
import socket
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from rlsys.search.address import bind, is_inner, is_trusted, own_names
from rlsys.search.server import command
from tests.support.refusals import refused

from .gated import Gated, in_process


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("127.0.0.1:8800", "own"),
        ("[::1]:8800", "own"),
        ("localhost.:8800", "own"),
        (socket.gethostname(), "own"),
        ("gpu7.lab:8800", "own"),
        ("search.default.svc.cluster.local:8000", "inner"),
        ("ip-10-0-0-1.eu-west-1.compute.internal", "inner"),
        ("not-gpu7.lab", "foreign"),
        ("localhost.evil.example", "foreign"),
        ("127.0.0.1.evil.example", "foreign"),
        ("evil.example:127.0.0.1", "foreign"),
        ("[evil.example]", "foreign"),
        ("", "foreign"),
    ],
)
def test_host_names_are_own_internal_or_foreign(header: str, kind: str) -> None:
    trusted, inner = is_trusted(header, own_names("gpu7.lab")), is_inner(header)
    assert kind == ("own" if trusted else "inner" if inner else "foreign")


async def test_a_server_without_a_token_refuses_foreign_hosts_and_origins() -> None:
    async with in_process(Gated(), trusts=partial(is_trusted, names=own_names("127.0.0.1"))) as client:
        for path, headers, status in (
            ("/retrieve", {}, 200),
            ("/retrieve", {"Host": "127.0.0.1:8000"}, 200),
            ("/retrieve", {"Host": "evil.example"}, 403),
            ("/retrieve", {"Host": "search"}, 403),
            # A browser sends such an Origin for a page of another site, with or without a content type.
            ("/retrieve", {"Origin": "https://evil.example"}, 403),
            ("/retrieve", {"Origin": "https://evil.example", "Content-Type": "text/plain"}, 403),
            ("/retrieve", {"Origin": "null"}, 403),
            ("/retrieve", {"Origin": ""}, 403),
            ("/retrieve", {"Origin": "http://localhost"}, 200),
            *((path, {"Host": "evil.example"}, 403) for path in ("/health", "/metrics", "/docs", "/none")),
        ):
            body = b'{"queries": ["a"]}'
            answer = await client.post(path, content=body, headers={"Host": "localhost"} | headers)
            assert answer.status_code == status, (path, headers)
        probe = client.build_request("GET", "/health")
        del probe.headers["Host"]  # some probes send no Host, browsers always do
        assert (await client.send(probe)).status_code == 200


async def test_a_server_with_a_token_accepts_any_host() -> None:
    async with in_process(Gated(), token="s3cret", trusts=lambda _: False) as client:
        client.headers.update({"Host": "search.example", "Origin": "https://page.example"})
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"Authorization": "Bearer s3cret"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "allowed", "statuses"),
    [
        ("127.0.0.1", [], {"localhost": 200, "search": 403, "search.example": 403}),
        ("0.0.0.0", [], {"localhost": 200, "search": 200, "a.default.svc": 200, "search.example": 403}),
        ("127.0.0.1", ["Search.Example"], {"search.example:80": 200, "evil.example": 403}),
        ("0.0.0.0", ["search.example"], {"search.example": 200, "gpu7": 200, "evil.example": 403}),
    ],
)
async def test_a_public_bind_accepts_internal_names_and_warns_without_a_token(
    host: str, allowed: list[str], statuses: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[ASGIApp] = []
    warnings: list[tuple[Any, ...]] = []

    def served(config: Any, _: command.Parts) -> None:
        apps.append(config.app)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_Server", served)
    monkeypatch.setattr(command._log, "warning", lambda *told: warnings.append(told))
    # Outside the main thread, the command sets no signal handlers.
    options: dict[str, Any] = {"name": "x", "host": host, "port": 0, "allowed_hosts": allowed}
    await asyncio.to_thread(command.serve_parts, lambda: command.Parts(Gated()), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(apps[0]), base_url="http://test") as client:
        for name, status in statuses.items():
            assert (await client.get("/openapi.json", headers={"Host": name})).status_code == status, name
    assert len(warnings) == (host == "0.0.0.0")


def test_a_taken_port_and_a_wrong_port_are_refused() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with refused("in_use", f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with refused("out_of_range", "127.0.0.1:70000"):
        bind("127.0.0.1", 70_000)


async def test_server_of_asyncio_sends_small_packets_at_once() -> None:
    """Else a response of two writes waits for the client's delayed acknowledgement."""
    accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket"))

    with bind("127.0.0.1", 0) as sock:
        async with await asyncio.start_server(note, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert (await accepted).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
