"""Tests of a run's search server: when a run starts one, which errors say that it does not answer, and its restart."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rlsys.config.schema import CassetteConfig, ClusterConfig, SearchConfig
from rlsys.errors import RunError
from rlsys.observe.faults import FAULTS, FaultLog, Restarts
from rlsys.orchestrator.search_server import SearchOutages, serving
from rlsys.rollout.tools.search_tool import RequiredSearch, open_client
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.retrieval import SearchFailed
from tests.support.jsonl import read_rows

from .gated_server import GatedServer

DEAD = "http://127.0.0.1:9"


async def test_a_replayed_cassette_needs_no_server(tmp_path: Path) -> None:
    config = SearchConfig(index="nowhere", cassette=CassetteConfig(path="calls.jsonl"))
    with serving(config, None, tmp_path) as search:
        assert not search.started
        search.wait_healthy()
        await search.require()
        assert search.search == config


async def test_a_run_sends_its_own_server_the_inherited_token_and_names_its_log_if_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "inherited")
    monkeypatch.setattr("rlsys.orchestrator.search_server.SearchServer", lambda _, log, **__: GatedServer(log))
    with serving(SearchConfig(index="made", retries=0), 1, tmp_path) as search:
        assert search.started
        search.wait_healthy()
        await search.require()
    with pytest.raises(RunError) as dead:
        await search.require()
    assert str(tmp_path / "search.log") in str(dead.value)


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_run_restarts_its_own_server_and_no_search_fails(
    sign: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches in flight, with their connections to the dead server, get answers of the next one at the same address."""
    started: list[GatedServer] = []

    def start(_: str, log: Path, **__: object) -> GatedServer:
        started.append(GatedServer(log))
        return started[-1]

    monkeypatch.setattr("rlsys.orchestrator.search_server.SearchServer", start)
    said: list[str] = []
    killed = sign is signal.SIGKILL
    config = SearchConfig(index="made", timeout_s=60.0 if killed else 1.0, retries=1000)
    with serving(config, 1, tmp_path) as search:
        search.wait_healthy()
        outages = SearchOutages(search, Restarts(ClusterConfig()), FaultLog(tmp_path / FAULTS, say=said.append))
        async with open_client(search.search, topk=3) as client:
            tool, url, pid = RequiredSearch(client), search.search.url, started[0].pid
            await asyncio.gather(*(tool.search(f"before {number}") for number in range(40)))
            os.kill(pid, sign)
            watching = asyncio.create_task(outages.watch())
            found = await asyncio.gather(*(tool.search(f"after {number}") for number in range(40)))
            assert [result.passages[0].id for result in found] == [f"after {number}/0" for number in range(40)]
            await outages.available()
            watching.cancel()
        assert (started[0].url, len(started)) == (url, 1)
        assert started[0].pid != pid
    rows = read_rows(tmp_path / FAULTS)
    assert [(row["event"], row.get("kind")) for row in rows] == [
        ("began", "died" if killed else "hung"),
        ("recovered", None),
    ]
    assert len(said) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_episodes_do_not_read_that_no_server_answers() -> None:
    async with open_client(SearchConfig(url=DEAD, retries=0), topk=3) as client:
        with pytest.raises(SearchFailed):
            await RequiredSearch(client).search("Mali")
