"""Whether the search server's memory stays where it is under load: ten minutes of clients, good and bad.

    python -m bench.search_soak          # --minutes 10

The server of `bench.search`, with its cache on, is asked unique queries by 64 clients, loads of `LOAD_S` seconds on
end, while another client sends what is wrong (JSON that is none, wrong types, too long a query) and hangs up in the
middle of requests. The first fifth of the time fills the cache and the allocator's pools and does not count; from
then on the resident memory is fitted by a line. Its rise an hour over the memory at the start is `growth_per_hour`,
and `rose_mb` is the last reading less the first counted one. Every answer is checked, also that no answer is a 500.
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
"""Share of the time that does not count."""
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
    """Threads that watch a server's memory, send it what is wrong, and hang up on it, until `stop`."""

    def __init__(self, url: str, pid: int) -> None:
        self.memory: list[tuple[float, float]] = []
        """(seconds, MB)."""
        self.statuses: Counter[int] = Counter()
        """Of the answers to bad requests."""
        self._url, self._pid, self._began = url, pid, time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._watch, self._send_bad, self._hang_up)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End and wait."""
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
    """Run the load and say what happened."""
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
    """Measure, print, and write the result."""
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
