"""The search server of a run: refused before anything dear starts, and not needed where a cassette is played."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pytest

from rlsys.config.schema import CassetteConfig, SearchConfig
from rlsys.errors import RunError
from rlsys.orchestrator.search_server import Serving, require_named, serving
from rlsys.search.address import TOKEN_VARIABLE
from tests.support.serving import serving as serving_app

from .gated_server import GatedServer
from .scripted import LoggedRow

DEAD = "http://127.0.0.1:9"


async def test_a_played_cassette_needs_no_server(tmp_path: Path) -> None:
    config = SearchConfig(index="nowhere", cassette=CassetteConfig(path="calls.jsonl"))
    with serving(config, None, tmp_path) as search:
        assert not search.started
        search.wait_healthy()
        await search.require()
        assert search.search == config


async def test_a_run_shows_its_own_server_the_token_that_both_inherit_and_names_its_log_when_it_is_dead(
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


@pytest.mark.parametrize(
    ("status", "token_env", "remedy"),
    [
        (503, None, "rlsys search serve"),
        (401, None, TOKEN_VARIABLE),
        (403, "OWN", "OWN"),
        (404, None, "--flag"),
    ],
)
async def test_the_remedy_is_for_the_servers_answer(
    status: int, token_env: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "wrong")
    with serving_app(LoggedRow(status=status)) as url, pytest.raises(RunError) as refused:
        await Serving(SearchConfig(url=url, retries=0, token_env=token_env), None).require("--flag")
    (sentence,) = str(refused.value).splitlines()
    assert url in sentence
    assert remedy in sentence


async def test_before_a_run_a_named_server_is_given_two_tries() -> None:
    """Also where a loop runs, as here."""
    require_named(SearchConfig(index="nowhere"))
    for retries, tries in ((8, 2), (0, 1)):
        with pytest.raises(RunError) as refused:
            require_named(SearchConfig(url=DEAD, retries=retries))
        assert DEAD in str(refused.value)
        assert f"after {tries} tries" in str(refused.value)


@pytest.mark.timeout(300)
def test_a_server_that_is_silent_can_be_left_by_an_interrupt() -> None:
    """Its answer would be waited for longer than this test may take."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def interrupt() -> None:
            with silent.accept()[0] as asked:
                asked.recv(1)
                signal.pthread_kill(main, signal.SIGINT)
                left.wait()

        left = threading.Event()
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                require_named(SearchConfig(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=3600))
        finally:
            left.set()
            thread.join()
            signal.signal(signal.SIGINT, before)
