"""Serves the live page of a run until a signal; whoever reaches the server can read the run, and change nothing.

    GET /   data.json   trajectories/N   events (server-sent)   status.json   metrics (Prometheus)

`events` sends `status` with the run's status.json, at once and whenever that is another, and `change` when data.json has
more to show. A folder that cannot be read (any more) is 404 and one sentence. Loopback by default: nobody is asked for a
password, which is said at the start where others can reach the server.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CONTENT_TYPE_LATEST

from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.report.report_page import live_page
from rlsys.report.watch.live import LiveRun
from rlsys.search.address import HostGate, bind, own_names
from rlsys.search.connections import PAGE_CONNECTIONS, LimitedConfig, LimitedServer

DEFAULT_HOST = "127.0.0.1"
POLL_S = 1.0  # Between two looks for what is new, while somebody listens
_SHUTDOWN_S = 3


def serve_run(path: Path, host: str, port: int, report: Callable[[str], None]) -> None:
    """Serve the run in `path` until SIGINT or SIGTERM; port 0 takes a free one. `report` gets where it is.

    Raises UserError for a folder that is no run and for a port that is taken.
    """
    run = LiveRun(path)
    closing = asyncio.Event()
    with bind(host, port) as sock, suppress(KeyboardInterrupt):
        app = create_app(run, own_names(host), closing)
        # What is asked is nobody's news; what fails is.
        config = LimitedConfig(app, PAGE_CONNECTIONS, log_level=logging.WARNING, timeout_graceful_shutdown=_SHUTDOWN_S)
        address, number = sock.getsockname()[:2]
        reached = ipaddress.ip_address(address)
        try:
            sock.listen(config.backlog)
        except OSError as error:
            raise UserError(f"cannot serve at {address}:{number} ({error}): choose another port") from None
        shown = socket.gethostname() if reached.is_unspecified else f"[{address}]" if ":" in address else address
        report(f"{path} is shown at http://{shown}:{number} until Ctrl-C.")
        if not reached.is_loopback:
            report(
                f"Other machines can reach {address}, and nobody is asked for a password: whoever does can read the run. "
                f"Serve at {DEFAULT_HOST} to keep it here."
            )
        _Server(config, closing).run(sockets=[sock])


def create_app(run: LiveRun, names: frozenset[str], closing: asyncio.Event | None = None) -> FastAPI:
    """The application; it answers by `names` and by addresses. Streams end when `closing` is set."""
    app = FastAPI(title="rlsys watch", openapi_url=None)
    app.add_middleware(HostGate, names=names)
    build = _Shared(run.data)
    closing = closing or asyncio.Event()

    @app.exception_handler(UserError)
    async def gone(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", 404)

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(live_page(run.name))

    @app.get("/data.json")
    async def data(request: Request) -> Response:
        return _packed(await build(), request)

    @app.get("/trajectories/{number}")
    async def chunk(number: int, request: Request) -> Response:
        if not run.is_built:
            await build()
        found = await asyncio.to_thread(run.chunk, number)
        if found is None:
            raise HTTPException(404, f"The run has no part {number}: load the page again.")
        return _packed(found, request)

    @app.get("/status.json")
    async def status() -> Response:
        return Response(_json(await asyncio.to_thread(run.status)), media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(run.metrics), media_type=CONTENT_TYPE_LATEST)

    @app.get("/events", response_class=EventSourceResponse)
    async def events() -> AsyncIterator[ServerSentEvent]:
        async for event in _events(run, closing):
            yield event

    return app


class _Shared:
    """A call in a thread, one for all who ask meanwhile: more of them would leave no thread for anything else."""

    def __init__(self, call: Callable[[], bytes]) -> None:
        self._call = call
        self._going_on: asyncio.Task[bytes] | None = None

    async def __call__(self) -> bytes:
        """What the call returns or raises, which may have begun before this one."""
        if self._going_on is None or self._going_on.done():
            self._going_on = asyncio.create_task(asyncio.to_thread(self._call))
        return await asyncio.shield(self._going_on)


async def _events(run: LiveRun, closing: asyncio.Event) -> AsyncIterator[ServerSentEvent]:
    """What is new, until `closing`."""
    told: dict[str, Any] | None = None
    # Who listens has asked for the data just before.
    known = await asyncio.to_thread(run.known)
    while not closing.is_set():
        status = await asyncio.to_thread(run.status)
        if status is not None and status != told:
            told = status
            yield ServerSentEvent(event="status", raw_data=_json(status))
        version = await asyncio.to_thread(run.version)
        if version != known:
            known = version
            yield ServerSentEvent(event="change", data={})
        with suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), POLL_S)


def _json(value: Any) -> str:
    """`value` in ASCII, as text from a file may hold half of a surrogate pair, which no other coding has."""
    return json.dumps(json_safe(value))


def _packed(body: bytes, request: Request) -> Response:
    """An answer of JSON in gzip, unpacked for who does not say that it takes that."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(body, media_type="application/json", headers={"Content-Encoding": "gzip"})
    return Response(gzip.decompress(body), media_type="application/json")


class _Server(LimitedServer):
    """A server that ends its streams when it begins to shut down: they would last for ever."""

    def __init__(self, config: LimitedConfig, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, once the streams are told."""
        self._closing.set()
        await super().shutdown(sockets)
