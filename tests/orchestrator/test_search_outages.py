"""Tests of a run whose search server stops answering: on a real engine pool, with a simulated server, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now
from rlsys.config.schema import ClusterConfig, SearchConfig
from rlsys.data.trajectory import Finish
from rlsys.errors import RunError
from rlsys.observe import status
from rlsys.observe.faults import FAULTS, FaultLog, Restarts
from rlsys.orchestrator.engine_pool import SEARCH_TRIES, EnginePool
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, LostReason
from rlsys.orchestrator.search_server import LAST_PAUSE_S, WATCH_S, SearchOutages
from rlsys.search.retrieval import SearchFailed
from tests.orchestrator.groups.engines import SAMPLES, TIMEOUT_S, Engines, Worker, episodes, make
from tests.support.jsonl import read_rows
from tests.support.trajectories import question, trajectory
from tests.support.virtual_time import virtually

RETRIES_S = 20.0
"""Time for which a client tries a server that refuses connections."""
EPISODES_S = 50.0


@dataclass
class Server:
    """A search server that dies or hangs at given times; seen by `SearchOutages` as a `Serving`."""

    search: SearchConfig = field(default_factory=SearchConfig)
    started: bool = False
    """True if the run has started it and can restart it."""
    starts_in_s: float = 30.0
    failures: list[tuple[str, float, float]] = field(default_factory=list)
    """("died" or "hung", time of the failure, end if nobody restarts the server)."""
    restarts: list[float] = field(default_factory=list)
    ready: float = 0.0
    """Time from which the last restart answers."""

    def state(self, at: float | None = None) -> str:
        at = now() if at is None else at
        if at < self.ready:
            return "starting"
        current = [
            kind for kind, begin, end in self.failures if max(begin, self.ready) <= at < end and begin >= self.ready
        ]
        return current[0] if current else "up"

    def was_up(self, begun: float) -> bool:
        """Return True if the server has answered at all times since `begun`."""
        steps = int((now() - begun) * 2)
        return all(self.state(begun + step / 2) == "up" for step in range(steps + 1))

    async def require(self, setting: str = "", retries: int | None = None) -> None:  # noqa: ARG002
        if self.state() != "up" and retries is None:
            await asyncio.sleep(RETRIES_S)
        if self.state() != "up":
            raise RunError("the search server does not answer: connection refused.")

    async def is_healthy(self, timeout_s: float) -> bool:
        if self.state() == "died":
            raise RunError("the search server ended with status -9; its log ends with:\nline")
        if self.state() != "up":
            await asyncio.sleep(timeout_s)
        return self.state() == "up"

    async def restart(self) -> None:
        self.restarts.append(now())
        self.ready = now() + self.starts_in_s


class SearchingEngines(Engines):
    """Engines whose episodes search all the time; a search that no server answers ends them."""

    def __init__(self, server: Server, cut: bool = False) -> None:
        """With `cut`, the time of the episodes runs out while they wait for the server."""
        super().__init__(2)
        self.server, self.cut = server, cut
        self.spans: list[tuple[str, float, float]] = []
        """(question, begin, end) of each group that was returned."""
        self.refuses: set[str] = set()
        """Questions whose searches always fail."""

    def _run_group(self, worker: Worker, call: asyncio.Future[Any], _method: str, args: tuple[Any, ...]) -> None:
        asked, samples, key, _ = args
        self._begin(worker, call, asked, samples, key)
        begun = now()

        def end() -> None:
            if asked.uid in self.refuses:
                worker.answer(call, SearchFailed("status 500"))
            elif self.server.was_up(begun):
                self.spans.append((asked.uid, begun, now()))
                worker.answer(call, episodes(asked, samples))
            elif self.cut:
                worker.answer(
                    call, [trajectory(uid=asked.uid, sample=n, finish=Finish.ABORTED) for n in range(samples)]
                )
            else:
                worker.answer(call, SearchFailed("connection refused"))

        asyncio.get_running_loop().call_later(EPISODES_S, end)


@dataclass
class Setting:
    server: Server
    outages: SearchOutages
    pool: EnginePool
    engines: SearchingEngines
    said: list[str]
    shown: list[tuple[str, str]]
    path: Path

    def faults(self) -> list[Any]:
        return read_rows(self.path / FAULTS)


@asynccontextmanager
async def running(server: Server, tmp_path: Path, *, cut: bool = False, **cluster: Any) -> AsyncIterator[Setting]:
    said: list[str] = []
    shown: list[tuple[str, str]] = []
    faults = FaultLog(tmp_path / FAULTS, now, said.append)
    with status.reported_to(lambda stage, text: shown.append((stage, text))):
        outages = SearchOutages(server, Restarts(ClusterConfig(**cluster), now), faults)  # type: ignore[arg-type]
        engines = SearchingEngines(server, cut)
        pool, _ = make(engines)
        pool._outages = outages
        try:
            yield Setting(server, outages, pool, engines, said, shown, tmp_path)
        finally:
            await outages.close()
            faults.close()


async def roll(setting: Setting, count: int) -> list[list[Finish]]:
    found = await asyncio.gather(*(setting.pool.run_group(question(number), number) for number in range(count)))
    return [[episode.finish for episode in group] for group in found]


async def asked_later(setting: Setting, number: int, delay_s: float) -> list[Finish]:
    """Ask for a group after `delay_s` seconds."""
    await asyncio.sleep(delay_s)
    return [episode.finish for episode in await setting.pool.run_group(question(number), number)]


@pytest.mark.parametrize("cut", [False, True])
@virtually
async def test_no_group_keeps_a_search_of_an_outage_and_the_run_says_why_it_pauses(
    tmp_path: Path, cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(failures=[("died", 120.0, 400.0)])
    async with running(server, tmp_path, cut=cut) as run:
        late = asyncio.get_running_loop().create_task(asked_later(run, 12, 250.0))
        found = await roll(run, 12)  # Four at a time, 50 s each: the third wave meets the outage.
        found.append(await late)
        assert found == [[Finish.ANSWER] * SAMPLES] * 13
        assert sorted(uid for uid, *_ in run.engines.spans) == sorted(question(n).uid for n in range(13)), "each once"
        assert all(end < 120.0 or begin >= 400.0 for _, begin, end in run.engines.spans)
        assert not any(150.0 < at < 400.0 for starts in run.engines.starts.values() for _, at in starts)
        began, ended = run.faults()
        assert (began["part"], began["kind"], ended["event"]) == ("search server", "unreachable", "recovered")
        assert 120.0 <= began["time"] <= 120.0 + EPISODES_S + RETRIES_S
        assert 400.0 <= ended["time"] <= 400.0 + LAST_PAUSE_S
        assert len(run.said) == 2, "one line when it begins, and one when it ends"
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [stage for stage, text in run.shown if text.startswith(status.WAIT_PREFIX)] == ["search"]
        assert run.shown[-1] == ("search", "")
        assert run.outages.count == 1


@pytest.mark.parametrize("outage_s", [0.0, 100.0])
@virtually
async def test_an_outage_beyond_its_limit_ends_every_wait_with_one_error(tmp_path: Path, outage_s: float) -> None:
    server = Server(SearchConfig(outage_s=outage_s), failures=[("died", 10.0, 9e9)])
    async with running(server, tmp_path) as run:
        groups = [run.pool.run_group(question(number), number) for number in range(4)]
        ends = await asyncio.gather(*groups, run.outages.check(), return_exceptions=True)
        errors = {str(end) for end in ends if isinstance(end, BaseException)}
        assert all(isinstance(end, RunError) and not isinstance(end, GroupLost) for end in ends[:4])
        assert len(errors) == 1
        assert EPISODES_S + outage_s <= now() <= EPISODES_S + outage_s + 2 * RETRIES_S
        assert [row["event"] for row in run.faults()] == ["began", "given_up"]
        with pytest.raises(RunError):
            await run.outages.available()


@virtually
async def test_episodes_that_are_late_by_themselves_are_returned(tmp_path: Path) -> None:
    async with running(Server(), tmp_path, cut=True) as run:
        run.server.failures = [("hung", 10.0, 20.0)]  # Over when the group returns: only slow, as far as anybody knows.
        assert await roll(run, 1) == [[Finish.ABORTED] * SAMPLES]
        assert run.outages.count == 0


@virtually
async def test_a_group_whose_searches_alone_fail_is_lost(tmp_path: Path) -> None:
    async with running(Server(), tmp_path) as run:
        run.engines.refuses = {question(0).uid}
        with pytest.raises(GroupLost) as lost:
            await roll(run, 1)
        assert lost.value.reason is LostReason.search_failed
        assert len(run.engines.starts[question(0).uid]) == SEARCH_TRIES


@pytest.mark.parametrize(("kind", "notices_s"), [("died", WATCH_S), ("hung", 2 * (30.0 + WATCH_S))])
@virtually
async def test_own_server_is_restarted_when_it_dies_or_hangs(tmp_path: Path, kind: str, notices_s: float) -> None:
    server = Server(started=True, failures=[(kind, 70.0, 9e9)])
    async with running(server, tmp_path) as run:
        watching = asyncio.create_task(run.outages.watch())
        assert await roll(run, 12) == [[Finish.ANSWER] * SAMPLES] * 12
        assert len(server.restarts) == 1
        assert 70.0 <= server.restarts[0] <= 70.0 + notices_s + WATCH_S
        assert [(row.get("kind"), row["event"]) for row in run.faults()] == [(kind, "began"), (None, "recovered")]
        assert all(end < 70.0 or begin >= server.ready for _, begin, end in run.engines.spans)
        watching.cancel()


@virtually
async def test_restarts_are_limited_within_their_window(tmp_path: Path) -> None:
    """The server dies every 100 s: the fourth death within 350 s ends the run, but not within 150 s."""
    for window_s, survives in ((350.0, False), (150.0, True)):
        begin = now()
        deaths = [("died", begin + 100.0 * number, 9e9) for number in range(1, 6)]
        server = Server(started=True, starts_in_s=10.0, failures=deaths)
        async with running(server, tmp_path, restarts=3, restart_window_s=window_s) as run:
            watching = asyncio.create_task(run.outages.watch())
            await asyncio.wait([watching], timeout=600.0)
            assert watching.done() is not survives
            assert len(server.restarts) == (5 if survives else 3)
            if not survives:
                assert isinstance(watching.exception(), RunError)
            watching.cancel()


@virtually
async def test_a_server_that_does_not_come_up_is_restarted_until_the_limit(tmp_path: Path) -> None:
    search = SearchConfig(start_timeout_s=60.0, outage_s=TIMEOUT_S)
    server = Server(search, started=True, starts_in_s=9e9, failures=[("died", 10.0, 9e9)])
    async with running(server, tmp_path, restarts=2) as run:
        with pytest.raises(RunError):
            await run.outages.watch()
        assert len(server.restarts) == 2
        assert 10.0 + 2 * 60.0 <= now() <= 20.0 + 2 * 60.0
        assert run.faults()[-1]["event"] == "given_up"


@virtually
async def test_a_named_server_is_asked_with_growing_pauses(tmp_path: Path) -> None:
    server, asked = Server(failures=[("died", 0.0, 100.0)]), list[float]()
    require = server.require

    async def noted(*words: Any, **settings: Any) -> None:
        asked.append(now())
        await require(*words, **settings)

    server.require = noted  # type: ignore[method-assign]
    outages = SearchOutages(server, Restarts(ClusterConfig()), FaultLog(tmp_path / FAULTS))  # type: ignore[arg-type]
    await outages.check()
    assert [later - before for before, later in pairwise(asked)] == [RETRIES_S + 1, 2, 4, 8, 16, 30, 30]
