"""Measures the memory growth of the search server in ten minutes of valid and invalid requests.

    python -m bench.search_soak          # --minutes 10

64 clients send unique queries to the server of `bench.search`, with its cache on, in consecutive loads of `LOAD_S`
seconds. Meanwhile other clients send invalid requests (broken JSON, wrong types, overlong queries) and disconnect in
the middle of requests. The first fifth of the time fills the cache and the allocator's pools and does not count. A line
is fitted to the resident memory in the remaining time. `growth_per_hour` is the slope of this line per hour, divided by
the first counted reading; `rose_mb` is the last reading minus the first counted reading. Every answer is checked;
failures and the status codes of invalid requests are reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
from rich.console import Console

from bench.load import run_load
from bench.search import START_TIMEOUT_S, ensure_index, memory_of, unique_queries
from rlsys.search.server_process import SearchServer

RESULT = Path("outputs/bench/search_soak.json")
LOAD_S = 20.0
SAMPLE_S = 1.0
FILLING = 0.2
"""Share of the time, at the start, that does not count."""
CACHE_ENTRIES = 4096
FASTEST_QPS = 1200
BAD_BODIES = (
    b"{",
    b'{"queries": "one"}',
    b'{"queries": []}',
    b'{"queries": ["a"], "topk": "many"}',
    b'{"queries": ["a"], "unknown": 1}',
    json.dumps({"queries": ["x" * (1 << 20)]}).encode(),
)


class Bystander:
    """Threads that sample a server's memory, send invalid requests, and disconnect during requests, until `stop`."""

    def __init__(self, url: str, pid: int) -> None:
        self.memory: list[tuple[float, float]] = []
        """Samples: (seconds since the start, MB)."""
        self.statuses: Counter[int] = Counter()
        """Status code -> number of invalid requests answered with it."""
        self._url, self._pid, self._began = url, pid, time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._watch, self._send_bad, self._hang_up)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            memory_mb = memory_of(self._pid)
            self.memory.append((time.monotonic() - self._began, memory_mb))

    def _send_bad(self) -> None:
        with httpx.Client(trust_env=False, timeout=60) as client:
            for body in itertools.cycle(BAD_BODIES):
                if self._stop.wait(0.1):
                    return
                self.statuses[client.post(f"{self._url}/retrieve", content=body).status_code] += 1

    def _hang_up(self) -> None:
        with httpx.Client(trust_env=False, timeout=0.003) as client:
            for number in itertools.count():
                if self._stop.wait(0.2):
                    return
                try:
                    client.post(f"{self._url}/retrieve", json={"queries": [f"unheard question {number}"]})
                except httpx.TransportError:
                    continue


def soak(index: Path, folder: Path, seconds: float) -> dict[str, object]:
    """Run the load for `seconds`. Returns the metrics."""
    queries = itertools.cycle(unique_queries())
    count, failures = 0, Counter[str]()
    options = ("--cache-entries", str(CACHE_ENTRIES))
    with SearchServer(index, folder / "server.log", threads=1, options=options) as server:
        server.wait_healthy(START_TIMEOUT_S)
        bystander = Bystander(server.url, server.pid)
        began = time.monotonic()
        try:
            while time.monotonic() < began + seconds:
                path = folder / "load.txt"
                path.write_text(
                    "".join(f"{next(queries)}\n" for _ in range(int(FASTEST_QPS * LOAD_S))), encoding="utf-8"
                )
                load = run_load(server.url, path, clients=64, warm_up_s=0.0, seconds=LOAD_S)
                count += load.queries
                failures.update(load.failures)
        finally:
            bystander.stop()
    times, memory = np.array(bystander.memory).T
    counted = times > FILLING * times[-1]
    slope = float(np.polyfit(times[counted], memory[counted], 1)[0])
    first, last = float(memory[counted][0]), float(memory[-1])
    return {
        "seconds": float(times[-1]),
        "queries": count,
        "failures": dict(failures),
        "bad_requests": {str(status): number for status, number in sorted(bystander.statuses.items())},
        "memory_mb_start": first,
        "memory_mb_end": last,
        "rose_mb": last - first,
        "growth_per_hour": 3600 * slope / first,
        "memory_mb": [round(value, 1) for value in memory.tolist()],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the metrics and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.search_soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args(arguments)
    index = ensure_index()
    with TemporaryDirectory() as folder:
        found = soak(index, Path(folder), 60 * given.minutes)
    Console().print({key: value for key, value in found.items() if key != "memory_mb"})
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RESULT}")


if __name__ == "__main__":
    main()
