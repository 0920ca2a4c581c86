"""Fixtures of the web tests: a fake web, and clocks that need no waiting."""

import ipaddress
from collections.abc import Iterator

import httpx
import pytest

from rlsys.search.web import web_search
from rlsys.search.web.web_search import Policy
from tests.search.web.fake_web import FakeWeb
from tests.support.serving import serving

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@pytest.fixture(scope="session")
def served() -> Iterator[FakeWeb]:
    fake = FakeWeb()
    with serving(fake.app()) as fake.base:
        yield fake


@pytest.fixture
def web(served: FakeWeb) -> FakeWeb:
    served.forget()
    return served


@pytest.fixture(autouse=True)
def _patient_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give readers of pages enough time on a busy machine."""
    for limit in ("_JOB_TIMEOUT_S", "_START_TIMEOUT_S"):
        monkeypatch.setattr(web_search, limit, 600.0)


def local(web: FakeWeb, *more_ports: int) -> Policy:
    """Return a policy that permits this machine, at the port of `web` and at `more_ports`."""
    return Policy(frozenset({port_of(web), *more_ports}), frozenset({LOOPBACK}))


def port_of(web: FakeWeb) -> int:
    port = httpx.URL(web.base).port
    assert port is not None
    return port


class Clock:
    """Clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()
