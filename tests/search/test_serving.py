"""Tests of a run's search server: when a run starts one, and the error that says that it is dead."""

from pathlib import Path

import pytest

from rlsys.config.schema import CassetteConfig, SearchConfig
from rlsys.errors import RunError
from rlsys.orchestrator.search_server import serving
from rlsys.search.address import TOKEN_VARIABLE

from .gated_server import GatedServer


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
