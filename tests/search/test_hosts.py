"""By which names, and by which pages, servers may be asked."""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import partial

import pytest
import requests

from rlsys.search.address import is_foreign, is_inner, is_trusted, own_names
from rlsys.search.server.asgi import create_app
from tests.support.ports import free_port

from .conftest import serving
from .gated import Gated
from .test_launch import answers, wait_until


@pytest.mark.parametrize(
    ("header", "trusted"),
    [
        ("127.0.0.1:8800", True),
        ("127.0.0.1", True),
        ("[::1]:8800", True),
        ("[::1]", True),
        ("192.168.1.7:8800", True),
        ("localhost:8800", True),
        ("LOCALHOST", True),
        ("localhost.:8800", True),
        (socket.gethostname(), True),
        ("gpu7.lab:8800", True),
        ("evil.example:8800", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("[evil.example]", False),
        ("", False),
    ],
)
def test_addresses_and_own_names_alone(header: str, trusted: bool) -> None:
    assert is_trusted(header, own_names("gpu7.lab")) == trusted


@pytest.mark.parametrize(
    ("header", "inner"),
    [
        ("search:8000", True),
        ("gpu7.", True),
        ("search.default.svc", True),
        ("search.default.svc.cluster.local:8000", True),
        ("ip-10-0-0-1.eu-west-1.compute.internal", True),
        ("search.dev", False),
        ("local.evil.example", False),
        ("evil.example:8000", False),
        ("", False),
        (".", False),
    ],
)
def test_names_that_the_internet_cannot_hold(header: str, inner: bool) -> None:
    assert is_inner(header) == inner


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        (None, b"a:80", False),
        (b"http://a:80", b"a:80", False),
        (b"https://a", b"a", False),
        (b"http://a", b"a:80", True),
        (b"http://evil.example", b"a", True),
        (b"null", b"a", True),
        (b"", b"a", True),
        (b"http://a", None, True),
    ],
)
def test_pages_of_other_hosts(origin: bytes | None, host: bytes | None, foreign: bool) -> None:
    assert is_foreign(origin, host) == foreign


def asked(url: str, headers: dict[str, str], body: bytes | None = b'{"queries": ["a"]}') -> int:
    return requests.post(f"{url}/retrieve", data=body, headers=headers, timeout=30).status_code


def test_who_may_ask_a_server_without_a_token() -> None:
    local = partial(is_trusted, names=own_names("127.0.0.1"))
    with serving(create_app(Gated(), trusts=local), free_port()) as url:
        own = url.removeprefix("http://")
        for headers, status in (
            ({}, 200),
            ({"Content-Type": "application/json", "Host": f"localhost:{own.rpartition(':')[2]}"}, 200),
            ({"Host": socket.gethostname()}, 200),
            ({"Host": "10.0.0.7:8000"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Host": "search"}, 403),
            # As a page elsewhere has a browser send it, unasked, with or without a type.
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "https://evil.example", "Content-Type": "text/plain"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": url}, 200),
            ({"Origin": url, "Content-Type": "text/plain"}, 415),
        ):
            assert asked(url, headers) == status, headers
        for path in ("/health", "/metrics", "/docs", "/openapi.json", "/none"):
            assert requests.get(url + path, headers={"Host": "evil.example"}, timeout=30).status_code == 403
        # Some probes name no host. Every browser does.
        with socket.create_connection(("127.0.0.1", int(own.rpartition(":")[2])), timeout=30) as probe:
            probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert probe.recv(100).startswith(b"HTTP/1.1 200")


def test_who_shows_the_token_may_come_by_any_name() -> None:
    with serving(create_app(Gated(), token="s3cret", trusts=lambda _: False), free_port()) as url:
        headers = {"Host": "search.example", "Origin": "https://page.example"}
        assert asked(url, headers) == 401
        assert asked(url, headers | {"Authorization": "Bearer s3cret"}) == 200


@pytest.mark.parametrize(
    ("host", "flags", "statuses"),
    [
        ("127.0.0.1", [], {"localhost": 200, "search": 403, "search.example": 403}),
        ("0.0.0.0", [], {"localhost": 200, "search": 200, "a.default.svc": 200, "search.example": 403}),
        ("127.0.0.1", ["Search.Example"], {"search.example:80": 200, "evil.example": 403}),
        ("0.0.0.0", ["search.example"], {"search.example": 200, "gpu7": 200, "evil.example": 403}),
    ],
)
def test_a_server_that_others_reach_has_names_of_their_network(
    host: str, flags: list[str], statuses: dict[str, int]
) -> None:
    script = (
        "import sys; from rlsys.search.server.command import Parts, serve_parts; from tests.search.gated import Gated\n"
        f"serve_parts(lambda: Parts(Gated()), name='x', host={host!r}, port=int(sys.argv[1]), "
        f"allowed_hosts={flags!r})"
    )
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", script, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            assert wait_until(lambda: answers(f"{url}/health"), 60)
            assert {name: asked(url, {"Host": name}) for name in statuses} == statuses
        finally:
            process.kill()
