"""Serves the live page of a run until a signal; read-only and without authentication.

    GET /   data.json   trajectories/N   events (server-sent)   status.json   metrics (Prometheus)

`events` sends the event `status` when status.json changes, and the event `change` when data.json has new content. If
the folder cannot be read, responses are 404. The page model is built on request and shared by concurrent requests. At
most a tenth of the time is spent on building, because the run shares the machine, so the data may be slightly out of
date.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import logging
import math
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.observe.faults import FAULTS, Change, Outcome
from rlsys.observe.kept import TRAJECTORIES
from rlsys.observe.records import METRICS, SUMMARY, TIMELINE
from rlsys.observe.run_folder import CONFIG, EVALUATIONS, MEASURED, RunFolder, open_run
from rlsys.observe.status import FAILED, WAIT_PREFIX, read_status
from rlsys.report.report_page import compressed, live_page
from rlsys.report.run_model import ModelCache, Phase, RunLiveness, liveness_here, read_chunk
from rlsys.search.address import HostGate, bind, own_names, url_of
from rlsys.search.connections import PAGE_CONNECTIONS, LimitedConfig, LimitedServer

DEFAULT_HOST = "127.0.0.1"
POLL_S = 1.0
"""Polling interval of an event stream."""
REST = 9
"""Minimum lifetime of a model, as a multiple of its build time."""
Stamp = tuple[Phase, tuple[tuple[str, int, int], ...]]
"""Run phase, and (path, size in bytes, modification time in ns) of each file behind a model."""


def serve_run(path: Path, host: str, port: int, report: Callable[[str], None]) -> None:
    """Serve the run in `path` until SIGINT or SIGTERM; port 0 takes a free one. `report` receives the address."""
    run = LiveRun(path)
    closing = asyncio.Event()
    with bind(host, port) as sock, suppress(KeyboardInterrupt):
        app = create_app(run, own_names(host), closing)
        # Log failures, not requests.
        config = LimitedConfig(app, PAGE_CONNECTIONS, log_level=logging.WARNING, timeout_graceful_shutdown=3)
        address, number = sock.getsockname()[:2]
        reached = ipaddress.ip_address(address)
        try:
            sock.listen(config.backlog)
        except OSError as error:
            sentence = f"Cannot serve at {address}:{number} ({error}): choose another port."
            raise UserError(sentence, code="in_use", key=f"{address}:{number}") from None
        shown = socket.gethostname() if reached.is_unspecified else address
        report(f"{path} is shown at {url_of(shown, number)} until Ctrl-C.")
        if not reached.is_loopback:
            report(
                f"Other machines can reach {address} and read the run without a password. Serve at {DEFAULT_HOST} to allow "
                "this machine only."
            )
        _Server(config, closing).run(sockets=[sock])


def create_app(run: LiveRun, names: frozenset[str], closing: asyncio.Event | None = None) -> FastAPI:
    """Return the application; it accepts `names` and IP addresses as hosts. Streams end when `closing` is set."""
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
            raise HTTPException(404, f"The run has no chunk {number}: reload the page.")
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
    """Runs a call in a thread and shares its result among concurrent callers, which saves threads."""

    def __init__(self, call: Callable[[], bytes]) -> None:
        self._call = call
        self._going_on: asyncio.Task[bytes] | None = None

    async def __call__(self) -> bytes:
        """Return or raise the outcome of the running call, or of a new call if none is running."""
        if self._going_on is None or self._going_on.done():
            self._going_on = asyncio.create_task(asyncio.to_thread(self._call))
        return await asyncio.shield(self._going_on)


async def _events(run: LiveRun, closing: asyncio.Event) -> AsyncIterator[ServerSentEvent]:
    """Yield events until `closing` is set."""
    told: dict[str, Any] | None = None
    # The client has just fetched the data.
    known = await asyncio.to_thread(run.known)
    while not closing.is_set():
        # The version is read first, so that the status is at least as new as the change of which the client then hears.
        version = await asyncio.to_thread(run.version)
        status = await asyncio.to_thread(run.status)
        if status is not None and status != told:
            told = status
            yield ServerSentEvent(event="status", raw_data=_json(status))
        if version != known:
            known = version
            yield ServerSentEvent(event="change", data={})
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await closing.wait()


def _json(value: Any) -> str:
    """Return `value` as ASCII JSON, because text from files may have unpaired surrogates, which UTF-8 cannot encode."""
    return json.dumps(json_safe(value))


def _packed(body: bytes, request: Request) -> Response:
    """Return a response with the gzipped JSON `body`, unpacked for clients that do not accept gzip."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(body, media_type="application/json", headers={"Content-Encoding": "gzip"})
    return Response(gzip.decompress(body), media_type="application/json")


class _Server(LimitedServer):
    """Server that ends its event streams at shutdown; otherwise, open streams would block the shutdown forever."""

    def __init__(self, config: LimitedConfig, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then shut down as uvicorn does."""
        self._closing.set()
        await super().shutdown(sockets)


@dataclass(frozen=True, slots=True)
class _Built:
    """A built model, its gzipped JSON (`body`), and its sources."""

    stamp: Stamp
    run: RunFolder
    model: dict[str, Any]
    body: bytes
    good_until: float


class LiveRun:
    """Run in `path`, with cached models. Thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UserError if `path` is no run."""
        self.path = path
        self.name = open_run(path).name
        self._clock = clock
        self._building = threading.Lock()
        self._built: _Built | None = None
        self._cache = ModelCache()

    def data(self) -> bytes:
        """Return the model as gzipped JSON. Raises UserError if the folder is gone."""
        with self._building:
            if self._built is None or self._built.stamp != self.version():
                self._built = self._build()
            return self._built.body

    def chunk(self, number: int) -> bytes | None:
        """Return chunk `number` of the current model as gzipped JSON; None if it has no such chunk."""
        if self._built is None:
            self.data()
        built = self._built
        assert built is not None
        found = read_chunk([built.run], built.model, number)
        return None if found is None else compressed(found)

    @property
    def is_built(self) -> bool:
        """True once a model has been built."""
        return self._built is not None

    def known(self) -> Stamp:
        """Return the version of the current model, or of the next one if none is built yet."""
        return self._built.stamp if self._built else self.version()

    def version(self) -> Stamp:
        """Return the version of the model that `data` would return now."""
        built = self._built
        return built.stamp if built and self._clock() < built.good_until else self._stamp()

    def status(self) -> dict[str, Any] | None:
        """Return status.json, with the end filled in if the process was killed; None without status.json."""
        return _with_end(read_status(self.path), self._life())

    def metrics(self) -> bytes:
        """Return the run's metrics in Prometheus' text format. Raises UserError if the folder is gone."""
        return exposition(open_run(self.path), self._life(), time.time())

    def _life(self) -> RunLiveness:
        return liveness_here(read_status(self.path), (self.path / SUMMARY).is_file())

    def _build(self) -> _Built:
        begun, stamp, life, run = self._clock(), self._stamp(), self._life(), open_run(self.path)
        run = replace(run, status=_with_end(run.status, life))
        # The audit re-tokenises every text, so it is made only once the run is over.
        model = self._cache.build(run, audited=life.phase is not Phase.running)
        body = compressed(model)
        now = self._clock()
        return _Built(stamp, run, model, body, now + REST * (now - begun))

    def _stamp(self) -> Stamp:
        files = [self.path / name for name in (CONFIG, METRICS, TIMELINE, SUMMARY, FAULTS)]
        for pattern in (f"{EVALUATIONS}/*.json*", f"{TRAJECTORIES}/*.json*", MEASURED):
            files += sorted(file for file in self.path.glob(pattern) if file.suffix != ".part")
        stamps = []
        for file in files:
            with suppress(OSError):
                stat = file.stat()
                stamps.append((str(file), stat.st_size, stat.st_mtime_ns))
        return self._life().phase, tuple(stamps)


def _with_end(status: dict[str, Any] | None, life: RunLiveness) -> dict[str, Any] | None:
    """Return `status`, with `ended` filled in if the process was killed."""
    killed = life.phase is Phase.gone and status is not None
    return {**(status or {}), "ended": f"{FAILED}its process was killed"} if killed else status


_IDLE = "idle/"


def exposition(run: RunFolder, life: RunLiveness, now: float) -> bytes:
    """Return all metrics of `run` at `now` (seconds since the epoch) in Prometheus' text format."""
    row = run.rows[-1] if run.rows else {}
    named = {_writable(name): value for name, value in row.items() if name not in ("step", "time")}
    figures = {name: value for name, value in named.items() if _is_figure(value)}
    families = [
        *_of_run(run, life),
        *_of_faults(run, life, now),
        *_of_groups(run, life, now, figures),
        *_of_step(figures),
    ]

    class Families(Collector):
        def collect(self) -> Iterator[Metric]:
            return iter(families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    return generate_latest(registry)


def _of_run(run: RunFolder, life: RunLiveness) -> Iterator[Metric]:
    labels = {"run": run.name, "name": _writable(str(run.config.get("name", "")))}
    yield InfoMetricFamily("rlsys_run", "The watched run.", labels)
    phases = {phase.value: float(phase is life.phase) for phase in Phase}
    yield _gauge("rlsys_run_phase", "1 for the run's current phase, 0 for the others.", "phase", phases)
    status = run.status or {}
    last = run.evaluations[-1] if run.evaluations else {}
    # A run of an older version has no status.json; its last row has the step.
    step = status.get("step", run.rows[-1]["step"] if run.rows else None)
    for name, value, meaning in (
        ("step", step, "Completed steps."),
        ("steps", status.get("steps"), "Planned steps."),
        ("begun_timestamp_seconds", status.get("begun"), "Start time of the run's current launch."),
        ("status_timestamp_seconds", status.get("at"), "Time of the last status."),
        ("exact_match", last.get("em"), "Exact match on held-out questions in the last evaluation."),
        ("evaluation_step", last.get("step"), "Step of the last evaluation."),
        ("reward", status.get("reward"), "Mean reward of the last step."),
        ("tokens_per_second", status.get("tokens_per_s"), "Generated tokens per second in the last step."),
    ):
        if _is_figure(value):
            yield GaugeMetricFamily(f"rlsys_run_{name}", meaning, value=value)


def _of_faults(run: RunFolder, life: RunLiveness, now: float) -> Iterator[Metric]:
    """Yield the number of faults by outcome, the age of each that is not over, and engines that joined and left."""
    begun = (run.status or {}).get("begun")
    current = [fault for fault in run.faults if _is_figure(begun) and fault.began_s >= begun]
    active = [fault for fault in current if fault.outcome is None and life.phase is Phase.running]
    ended = Counter(str(fault.outcome or "unfinished") for fault in run.faults)
    counts = {outcome: float(ended[outcome]) for outcome in (*Outcome, "unfinished")}
    yield _gauge("rlsys_run_faults", "Faults of the run, by outcome.", "outcome", counts)
    changed = Counter(change.change for change in run.changes)
    changes = {str(change): float(changed[change]) for change in Change}
    yield _gauge("rlsys_run_engine_changes", "Engines that joined and left on purpose.", "change", changes)
    meaning = "Seconds since a fault began that is not over."
    age = GaugeMetricFamily("rlsys_fault_open_seconds", meaning, labels=["part", "kind"])
    oldest = {(_writable(fault.part), _writable(fault.kind)): fault for fault in reversed(active)}
    for labels, fault in oldest.items():
        age.add_metric(labels, max(0.0, now - fault.began_s))
    yield age


def _of_groups(run: RunFolder, life: RunLiveness, now: float, figures: Mapping[str, float]) -> Iterator[Metric]:
    """Yield each group's idle share of the last step and, if the run is active, each group's current activity."""
    meaning = "Seconds that the group has been waiting, by cause."
    waits = GaugeMetricFamily("rlsys_group_wait_seconds", meaning, labels=["group", "cause"])
    at_work = {}
    states = (run.status or {}).get("states")
    for group, state in states.items() if life.phase is Phase.running and isinstance(states, dict) else ():
        if isinstance(state, dict):
            text, since = _writable(str(state.get("text", ""))), state.get("since")
            waiting = text.startswith(WAIT_PREFIX)
            at_work[_writable(group)] = float(not waiting)
            if waiting and _is_figure(since):
                cause = text.removeprefix(WAIT_PREFIX).strip().removeprefix("for ")
                waits.add_metric([_writable(group), cause], max(0.0, now - since))
    idle = {name.removeprefix(_IDLE): value for name, value in figures.items() if name.startswith(_IDLE)}
    yield _gauge("rlsys_group_at_work", "1 if the group works, 0 if it waits.", "group", at_work)
    yield waits
    meaning = "Share of the last step in which no worker of the group worked."
    yield _gauge("rlsys_group_idle_ratio", meaning, "group", idle)


def _of_step(figures: Mapping[str, float]) -> Iterator[Metric]:
    plain: dict[str, float] = {}
    engines: dict[str, UnknownMetricFamily] = {}
    for name, value in figures.items():
        if match := re.fullmatch(r"engine/([^/]+)/(.+)", name):
            # Prometheus metric names spell units out.
            count = match[2] if match[2].endswith("_per_s") else re.sub("_s$", "_seconds", match[2])
            count = "rlsys_engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", count)
            meaning = f"{match[2]} of an engine or its search client in the last step."
            family = engines.setdefault(count, UnknownMetricFamily(count, meaning, labels=["engine"]))
            family.add_metric([match[1]], value)
        elif not name.startswith(_IDLE):
            plain[name] = value
    yield _gauge("rlsys_figure", "Metric of the last step; see docs/metrics.md.", "name", plain)
    yield from engines.values()


def _gauge(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _writable(text: str) -> str:
    """Return `text` with a question mark for each unpaired surrogate, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def _is_figure(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
