"""A fake web, and clocks that need no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from rlsys.search.web import web_search
from tests.search.web.fake_web import FakeWeb
from tests.support.ports import free_port
from tests.support.serving import serving


@pytest.fixture(scope="session")
def served() -> Iterator[FakeWeb]:
    fake = FakeWeb()
    with serving(fake.app(), free_port()) as url:
        fake.base = url
        yield fake


@pytest.fixture
def web(served: FakeWeb) -> FakeWeb:
    served.forget()
    return served


@pytest.fixture(autouse=True)
def _patient_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to read a page."""
    monkeypatch.setattr(web_search, "_JOB_TIMEOUT_S", 300.0)


@dataclass
class Clock:
    """Time that passes only when somebody sleeps."""

    time_s: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()
