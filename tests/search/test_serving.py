"""What a run refuses before it starts anything dear, and what it does without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.schema import CassetteConfig, SearchConfig
from rlsys.errors import RunError
from rlsys.search.serving import serving


async def test_a_search_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = SearchConfig(url="http://127.0.0.1:9", timeout_s=2, retries=0)
    with serving(config, None, tmp_path) as search:
        assert not search.started
        with pytest.raises(RunError, match=r"search\.url=http://127\.0\.0\.1:9 does not answer"):
            await search.require()


async def test_a_played_cassette_needs_no_server(tmp_path: Path) -> None:
    config = SearchConfig(index="nowhere", cassette=CassetteConfig(path="calls.jsonl"))
    with serving(config, None, tmp_path) as search:
        assert not search.started
        search.wait_healthy()
        await search.require()
        assert search.search == config


async def test_a_run_shows_its_own_server_the_token_that_both_inherit(
    index_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSYS_SEARCH_TOKEN", "inherited")
    with serving(SearchConfig(index=str(index_dir)), 1, tmp_path) as search:
        search.wait_healthy()
        await search.require()
