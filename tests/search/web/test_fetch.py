"""Tests of fetching pages: permitted addresses, DNS rebinding, certificates, and pages that misbehave."""

import asyncio
import ipaddress
import ssl
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rlsys.search.web.web_search import (
    Fetched,
    FetchLimits,
    GuardedTransport,
    PageError,
    PageFetcher,
    Policy,
    Resolver,
    UrlRefused,
)
from tests.search.web.conftest import LOOPBACK, local, port_of
from tests.search.web.fake_web import BOMB_BYTES, HTML, FakeWeb, gzipped, redirect_to
from tests.support.serving import serving


def answering(*answers: list[str]) -> Resolver:
    """Return a resolver that gives `answers` in turn, and then repeats the last one."""
    left = list(answers)

    async def resolver(_host: str, _port: int) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolver


PUBLIC = """
8.8.8.8 1.1.1.1 100.63.255.255 100.128.0.1 172.15.0.1 172.32.0.1 223.255.255.255
2606:4700:4700::1111 2001:4860:4860::8888 64:ff9b::808:808 2002:808:808::1 ::ffff:8.8.8.8
"""
NOT_PUBLIC = """
127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1
100.127.255.255 192.0.0.8 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1
255.255.255.255 192.88.99.1 :: ::1 fe80::1 fe80::1%1 2606:4700::1%1 fec0::1 fc00::1 fd00:ec2::254 ff02::1 2001::1
2001:db8::1 3fff::1 100::1 5f00::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
64:ff9b:1::1 2002:7f00:1:: 2002:c0a8:101::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
"""


def test_only_public_addresses_are_permitted() -> None:
    permitted = [text for text in (PUBLIC + NOT_PUBLIC).split() if Policy().permits(ipaddress.ip_address(text))]
    assert permitted == PUBLIC.split()


async def get(url: str, policy: Policy, *answers: list[str]) -> httpx.Response:
    """Send a GET request; names resolve to `answers` in turn or, without `answers`, as on this system."""
    named = {"resolver": answering(*answers)} if answers else {}
    transport = GuardedTransport(policy, max_connections=1, **named)
    async with httpx.AsyncClient(transport=transport, timeout=600) as client:
        return await client.get(url)


async def test_a_name_with_one_private_address_is_refused_without_a_connection(web: FakeWeb) -> None:
    port = port_of(web)
    with pytest.raises(UrlRefused, match=r"name\.test is at 127\.0\.0\.1"):
        await get(f"http://name.test:{port}/page/html", Policy(frozenset({port})), ["93.184.216.34", "127.0.0.1"])
    assert web.fetched == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1.", "127。0。0。1", "[::ffff:127.0.0.1]", "LOCALHOST"])
async def test_loopback_is_refused_under_all_its_names(web: FakeWeb, host: str) -> None:
    port = port_of(web)
    with pytest.raises(UrlRefused, match="is at "):
        await get(f"http://{host}:{port}/page/html", Policy(frozenset({port})))
    assert web.fetched == []


async def test_the_host_header_is_the_name_and_the_second_address_is_tried(web: FakeWeb) -> None:
    url = f"http://name.test:{port_of(web)}/page/html"
    assert (await get(url, local(web), ["127.0.0.3", "127.0.0.1"])).status_code == 200
    assert [headers["host"] for headers in web.headers] == [f"name.test:{port_of(web)}"]


async def test_a_name_is_connected_to_at_the_address_that_was_checked(web: FakeWeb) -> None:
    """127.0.0.2 refuses connections, so the test fails if the name is looked up again before connecting."""
    url, answers = f"http://rebinding.test:{port_of(web)}/page/html", [["127.0.0.1"], ["127.0.0.2"]]
    only = Policy(frozenset({port_of(web)}), frozenset({ipaddress.ip_network("127.0.0.1/32")}))
    transport = GuardedTransport(only, max_connections=1, resolver=answering(*answers))
    async with httpx.AsyncClient(transport=transport, timeout=600) as client:
        assert (await client.get(url)).status_code == 200
        with pytest.raises(UrlRefused, match=r"rebinding\.test is at 127\.0\.0\.2"):
            await client.get(url)


def self_signed(name: str, file: Path) -> Path:
    """Write a new key, and a certificate of it for the host `name`, to `file`. Returns `file`."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(secret + certificate.public_bytes(Encoding.PEM))
    return file


async def test_tls_is_verified_against_the_name_and_not_the_address(tmp_path: Path) -> None:
    certificate = self_signed("good.test", tmp_path / "server.pem")
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=own)
    port = server.sockets[0].getsockname()[1]
    policy = Policy(frozenset({port}), frozenset({LOOPBACK}))
    trusting = ssl.create_default_context(cafile=str(certificate))
    transport = GuardedTransport(policy, max_connections=1, resolver=answering(["127.0.0.1"]), tls=trusting)
    async with server, httpx.AsyncClient(transport=transport, timeout=600) as client:
        assert (await client.get(f"https://good.test:{port}/")).text == "ok"
        for host in ("evil.test", "127.0.0.1"):
            with pytest.raises(httpx.ConnectError, match=r"(?i)mismatch"):
                await client.get(f"https://{host}:{port}/")


async def fetch(web: FakeWeb, path: str, timeout_s: float = 300.0) -> Fetched:
    limits = FetchLimits(timeout_s=300.0, max_bytes=100_000)
    fetcher = PageFetcher(GuardedTransport(local(web, 80), max_connections=4), limits)
    fetcher._limits = replace(limits, timeout_s=timeout_s)  # Limits the page as a whole, not each step of HTTP.
    try:
        return await fetcher.fetch(web.base + path)
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("html", "text/html"), ("xhtml", "application/xhtml+xml"), ("gzip", "text/html"), ("hop/3", "text/html")],
)
async def test_pages_are_fetched_without_cookies(web: FakeWeb, name: str, media_type: str) -> None:
    assert await fetch(web, f"/page/{name}") == Fetched(HTML.encode(), media_type, "utf-8" if "x" not in name else None)
    assert not any("cookie" in headers for headers in web.headers)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/page/large", "larger"),
        ("/page/broken-gzip", "gzip"),
        ("/page/short-gzip", "ends too early"),
        ("/page/pdf", "content type"),
        ("/page/untyped", "content type"),
        ("/page/missing", "404"),
        ("/page/hop/9", "redirects"),
        (redirect_to("http://169.254.169.254/latest/meta-data"), r"169\.254\.169\.254"),
        (redirect_to("file:///etc/passwd"), "'file'"),
        (redirect_to("http://user@127.0.0.1/"), "user name"),
        (redirect_to("http://127.0.0.1:22/"), "port 22"),
    ],
)
async def test_pages_that_are_refused_raise_a_one_line_error(web: FakeWeb, path: str, reason: str) -> None:
    with pytest.raises(PageError, match=reason) as caught:
        await fetch(web, path)
    assert "\n" not in str(caught.value)


async def test_a_page_that_never_ends_is_given_up() -> None:
    web = FakeWeb()  # The common one may see the request only in the next test.
    with serving(web.app()) as web.base, pytest.raises(PageError, match="took longer"):
        await fetch(web, "/page/drip", timeout_s=0.2)


async def test_a_gzip_bomb_takes_little_memory(web: FakeWeb) -> None:
    gzipped(BOMB_BYTES)
    tracemalloc.start()
    with pytest.raises(PageError, match="larger"):
        await fetch(web, "/page/bomb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BOMB_BYTES / 16


async def test_an_invalid_url_is_a_page_error() -> None:
    fetcher = PageFetcher(GuardedTransport(Policy(), max_connections=1), FetchLimits(timeout_s=3000.0))
    for url in ("", "nonsense", "http://[::1", "http://x\ud800/", "http://a..b/"):
        with pytest.raises(PageError):
            await fetcher.fetch(url)
    await fetcher.close()
