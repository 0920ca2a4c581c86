"""What a run refuses before it starts anything dear, and what it does without a server."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rlsys.config.schema import CassetteConfig, SearchConfig
from rlsys.errors import RunError
from rlsys.orchestrator.search_server import Serving, require_named, serving
from rlsys.search.server_process import SearchServer

DEAD = "http://127.0.0.1:9"


@contextmanager
def saying(status: int) -> Iterator[str]:
    """The address of a server that says `status` to every query."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silence."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


async def test_a_search_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = SearchConfig(url=DEAD, timeout_s=2, retries=0)
    with serving(config, None, tmp_path) as search:
        assert not search.started
        with pytest.raises(RunError) as refused:
            await search.require()
    (sentence,) = str(refused.value).splitlines()
    assert sentence.startswith(f"the search server at search.url={DEAD} does not answer: no answer from ")
    assert sentence.endswith("; start it with `rlsys search serve`, or name another with search.url.")


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


@pytest.mark.parametrize(
    ("status", "token_env", "remedy"),
    [
        (503, None, "start it with `rlsys search serve`, or name another with --flag."),
        (401, None, "export the server's token as RLSYS_SEARCH_TOKEN, and give search.token_env that name."),
        (403, "OWN", "export the server's token as OWN, and give search.token_env that name."),
        (422, None, "name another with --flag."),
        (404, None, "name another with --flag."),
    ],
)
async def test_the_remedy_is_for_what_the_server_says(
    status: int, token_env: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "wrong")
    with saying(status) as url, pytest.raises(RunError) as refused:
        await Serving(SearchConfig(url=url, retries=0, token_env=token_env), None).require("--flag")
    assert f"status {status}" in str(refused.value)
    assert str(refused.value).endswith(f"; {remedy}")


async def test_the_log_of_a_runs_own_server_that_has_died_is_named(tmp_path: Path) -> None:
    with SearchServer(tmp_path / "nowhere", tmp_path / "search.log", threads=1) as server:
        pass
    with pytest.raises(RunError, match=rf"; its log {tmp_path}/search\.log may say why\.$"):
        await Serving(SearchConfig(retries=0), server).require()


async def test_before_a_run_a_named_server_is_given_two_tries() -> None:
    """Also where a loop runs, as here."""
    require_named(SearchConfig(index="nowhere"))
    with pytest.raises(RunError, match=r"does not answer: .* after 2 tries: .*; start it with"):
        require_named(SearchConfig(url=DEAD, retries=8))
    with pytest.raises(RunError, match=r"after 1 tries"):
        require_named(SearchConfig(url=DEAD, retries=0))


def test_a_server_that_is_silent_can_be_left_by_an_interrupt() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        main, begun = threading.get_ident(), time.monotonic()
        interrupt = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        interrupt.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                require_named(SearchConfig(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=50))
        finally:
            interrupt.join()
            signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 25
