"""Generates load on a retrieval server over HTTP: N clients, each with one request in flight.

    python -m bench.load http://127.0.0.1:8000 queries.txt --clients 64 --batch 1 --seconds 10

The load runs in its own process, so it takes nothing from the server but CPU time. The file has one query per
line; clients share the list and send each query at most once. The first `--warm-up` seconds are not counted. The output
is one line of JSON, a `Load`. HTTP goes through aiohttp, whose parser is in C, so that a client costs little compared
with a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np

TOPK = 3
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    clients: int
    batch: int
    queries: int
    """Queries answered in the counted time with the requested number of passages."""
    seconds: float
    qps: float
    """Queries, not requests, per second."""
    p50_ms: float
    """Median latency of a request."""
    p99_ms: float
    failures: dict[str, int]
    """Failed requests by reason."""


@dataclass(slots=True)
class Recorder:
    """Requests answered between `start` and `end`, on the clock of `perf_counter`, and all failures."""

    start: float
    end: float
    latencies_s: list[float] = field(default_factory=list)
    answered: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, began: float, queries: int, failure: str = "") -> None:
        """Count a request that has just ended."""
        now = perf_counter()
        if failure:
            self.failures[failure] = self.failures.get(failure, 0) + 1
        elif self.start <= now <= self.end:
            self.latencies_s.append(now - began)
            self.answered += queries


async def generate(
    url: str, queries: Iterator[str], clients: int, batch: int, warm_up_s: float, seconds: float
) -> Load:
    """Run the load. The load ends early if the queries run out, which counts as a failure."""
    start = perf_counter() + warm_up_s
    recorder = Recorder(start, start + seconds)
    connector = aiohttp.TCPConnector(limit=clients)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(clients):
            tasks.create_task(_client(session, f"{url}/retrieve", queries, batch, recorder))
    latencies = np.array(recorder.latencies_s or [float("nan")])
    return Load(
        clients=clients,
        batch=batch,
        queries=recorder.answered,
        seconds=seconds,
        qps=recorder.answered / seconds,
        p50_ms=1000 * float(np.quantile(latencies, 0.5)),
        p99_ms=1000 * float(np.quantile(latencies, 0.99)),
        failures=recorder.failures,
    )


async def _client(
    session: aiohttp.ClientSession, url: str, queries: Iterator[str], batch: int, recorder: Recorder
) -> None:
    while (began := perf_counter()) < recorder.end:
        asked = list(islice(queries, batch))
        if len(asked) < batch:
            recorder.add(began, 0, "the query file is too short for this load")
            return
        body = {"queries": asked, "topk": TOPK, "return_scores": True}
        try:
            async with session.post(url, json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            recorder.add(began, 0, type(error).__name__)
        else:
            recorder.add(began, batch, _fault(response.status, answer, batch))


def _fault(status: int, answer: Any, batch: int) -> str:
    if status != 200:
        return f"status {status}"
    lines = answer["result"]
    return "" if len(lines) == batch and all(len(line) == TOPK for line in lines) else "wrong shape"


def run_load(url: str, queries: Path, *, clients: int, batch: int = 1, warm_up_s: float = 1.0, seconds: float) -> Load:
    """Run a load in a new process."""
    command = [sys.executable, "-m", "bench.load", url, str(queries), "--clients", str(clients)]
    command += ["--batch", str(batch), "--warm-up", str(warm_up_s), "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return Load(**json.loads(done.stdout))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one load from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="Load a retrieval server.")
    parser.add_argument("url", help="URL of the server, without a path")
    parser.add_argument("queries", type=Path, help="file of queries, one per line")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="queries per request")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds at the start that are not counted")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args(arguments)
    lines = iter(given.queries.read_text(encoding="utf-8").splitlines())
    load = asyncio.run(generate(given.url, lines, given.clients, given.batch, given.warm_up, given.seconds))
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main()
