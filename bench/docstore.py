"""Compares the time to read passages from a corpus on disk with `datasets`, which Search-R1's server uses.

    python -m bench.docstore       # 21 million passages like wiki-18: 15 minutes, 30 GB of disk
    python -m bench.docstore --passages 2100000 --dir /data

The same synthetic passages are written as jsonl, for `Corpus`, and as the Arrow file that `datasets` makes of it
(string columns, record batches of 1000 rows). Sizes are 1 %, 10 % and 100 % of `--passages`. One fetch reads 384 random
rows: one request of 128 queries with 3 passages each. The rows are read in three ways:

- rlsys: `Corpus.fetch(rows)`;
- row by row: `[dataset[int(row)] for row in rows]`, as Search-R1's server reads; the baseline;
- batched: `dataset[rows]`, the fastest way of `datasets`.

Each sample has its own process and, per repeat, its own rows; the table shows the median of `REPEATS`.

- first open: reads the whole corpus from the disk. Writing the Arrow file is not timed.
- open: a later open, with none of the files in the page cache.
- cold: the first fetch, with the pages that opening read dropped again. `read MB` is what was read from the disk. The
  run stops if that is less than the passages themselves, because the fetch was not cold.
- warm: the same fetch again, median of `WARM`.
- resident: growth of the process by opening and fetching, mapped pages included.

The cost of a page also depends on the disk's read-ahead, which the table shows: without a hint about the wanted pages,
the system reads that much around each page.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULT = Path("outputs/bench/docstore.json")
PASSAGES, SHARES = 21_000_000, (100, 10, 1)
QUERIES, TOPK = 128, 3
BATCH_ROWS = 1000
REPEATS, WARM = 5, 20
BASELINE = "row by row"
WAYS = ("rlsys", BASELINE, "batched")
BYTES_A_PASSAGE = 1450
"""Disk use of a passage: both files and the sidecar, rounded up."""
KEPT_FREE = 20 << 30
"""Bytes of disk that are left free."""

Fetch = Callable[[Sequence[int]], list[str]]
"""Row numbers -> the contents of these rows."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of one process."""

    open_s: float
    cold_ms: float
    read_mb: float
    warm_ms: float
    resident_mb: float
    digest: str
    """SHA-256 of the passages; equal for all ways."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of reading at one size. A ratio is the baseline's time divided by the time of this way."""

    passages: int
    way: str
    first_open_s: float | None
    open_s: float
    open_ratio: float
    cold_ms: float
    cold_ratio: float
    read_mb: float
    warm_ms: float
    warm_ratio: float
    resident_mb: float


@dataclass(frozen=True, slots=True)
class Files:
    """One corpus in both formats."""

    jsonl: Path
    arrow: Path

    def forget(self) -> None:
        """Drop all files of the folder from this process's maps and from the page cache.

        Pages mapped by another process stay.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(tuple(map(str, self.jsonl.parent.iterdir()))):
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
        for path in self.jsonl.parent.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bodies() -> list[str]:
    """Return texts of made-up words, 630 characters on average."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 10))) for _ in range(5000)]
    return [" ".join(draw.choices(words, k=draw.randint(70, 110))) + " – café." for _ in range(997)]


def write(folder: Path, passages: int) -> Files:
    """Write `passages` rows in both formats; texts repeat with other titles."""
    import pyarrow as pa

    files = Files(folder / "corpus.jsonl", folder / "corpus.arrow")
    texts = bodies()
    schema = pa.schema([("id", pa.string()), ("contents", pa.string())])
    with (
        files.jsonl.open("w", encoding="utf-8") as jsonl,
        pa.OSFile(str(files.arrow), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as arrow,
    ):
        for first in range(0, passages, BATCH_ROWS):
            rows = range(first, min(first + BATCH_ROWS, passages))
            chosen = [(row, row // 3, texts[row * 31 % len(texts)]) for row in rows]
            jsonl.write(
                "".join(
                    f'{{"id":"{row}","contents":"\\"Article {title}\\"\\n{text}"}}\n' for row, title, text in chosen
                )
            )
            contents = pa.array([f'"Article {title}"\n{text}' for _, title, text in chosen])
            arrow.write_batch(pa.record_batch([pa.array(list(map(str, rows))), contents], schema=schema))
    return files


def open_way(way: str, files: Files) -> tuple[float, Fetch]:
    """Open the corpus. Returns the seconds, without imports, and a function that fetches rows."""
    if way == "rlsys":
        from rlsys.search.corpus import Corpus

        started = perf_counter()
        corpus = Corpus.open(files.jsonl)
        return perf_counter() - started, lambda rows: [row["contents"] for row in corpus.fetch(rows)]
    from datasets import Dataset

    started = perf_counter()
    dataset = Dataset.from_file(str(files.arrow))
    seconds = perf_counter() - started
    if way == BASELINE:
        return seconds, lambda rows: [dataset[int(row)]["contents"] for row in rows]
    return seconds, lambda rows: list(dataset[list(rows)]["contents"])


def timed(fetch: Fetch, rows: Sequence[int]) -> tuple[float, list[str]]:
    """Return the seconds of one fetch, and the fetched contents."""
    started = perf_counter()
    contents = fetch(rows)
    return perf_counter() - started, contents


def sample(way: str, files: Files, rows: Sequence[int]) -> Sample:
    """Open, drop all pages, fetch, and fetch again. A corpus of one row is read first, to load all code."""
    with TemporaryDirectory() as folder:
        open_way(way, write(Path(folder), 1))[1]([0])
    process = psutil.Process()
    resident = process.memory_info().rss
    open_s, fetch = open_way(way, files)
    files.forget()
    read = process.io_counters().read_bytes
    cold_s, contents = timed(fetch, rows)
    read = process.io_counters().read_bytes - read
    warm_s = statistics.median(timed(fetch, rows)[0] for _ in range(WARM))
    resident = process.memory_info().rss - resident
    if read < sum(map(len, set(contents))):
        raise SystemExit(f"{files.jsonl.parent} is not read from a disk: pass --dir with a folder on a disk")
    digest = hashlib.sha256("\0".join(contents).encode()).hexdigest()
    return Sample(open_s, cold_s * 1e3, read / 1e6, warm_s * 1e3, resident / 1e6, digest)


def first_open(files: Files) -> float:
    """Return the seconds of the first open, which reads the whole corpus."""
    return open_way("rlsys", files)[0]


def in_fresh_process(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `call(*args)` in a new process, which then ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def measure(folder: Path, passages: int) -> Iterator[Row]:
    """Measure all ways at one size, and yield the row of each."""
    files = write(folder, passages)
    files.forget()
    first_open_s = in_fresh_process(first_open, files)
    taken: dict[str, list[Sample]] = {way: [] for way in WAYS}
    for repeat in range(REPEATS):
        rows = random.Random(repeat).choices(range(passages), k=QUERIES * TOPK)
        for way in WAYS:
            files.forget()
            taken[way].append(in_fresh_process(sample, way, files, rows))
        if len({samples[-1].digest for samples in taken.values()}) != 1:
            raise SystemExit("the ways returned different passages for the same rows: the measurement is invalid")

    def median(way: str, name: str) -> float:
        return statistics.median(getattr(one, name) for one in taken[way])

    for way in WAYS:
        yield Row(
            passages=passages,
            way=way,
            first_open_s=first_open_s if way == "rlsys" else None,
            open_s=median(way, "open_s"),
            open_ratio=median(BASELINE, "open_s") / median(way, "open_s"),
            cold_ms=median(way, "cold_ms"),
            cold_ratio=median(BASELINE, "cold_ms") / median(way, "cold_ms"),
            read_mb=median(way, "read_mb"),
            warm_ms=median(way, "warm_ms"),
            warm_ratio=median(BASELINE, "warm_ms") / median(way, "warm_ms"),
            resident_mb=median(way, "resident_mb"),
        )


def table(rows: Sequence[Row], read_ahead_kb: int) -> Table:
    """Return a table of all rows, grouped by size."""
    title = f"{QUERIES} x {TOPK} random passages; read-ahead of the disk {read_ahead_kb} KB"
    shown = Table(title=title, title_justify="left")
    for name in ("passages", "way"):
        shown.add_column(name)
    for name in (
        "first open s",
        "open s",
        "ratio",
        "cold ms",
        "ratio",
        "read MB",
        "warm ms",
        "ratio",
        "resident MB",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        first = "" if row.first_open_s is None else f"{row.first_open_s:.1f}"
        shown.add_row(
            f"{row.passages:,}",
            row.way,
            first,
            f"{row.open_s:.3f}",
            f"{row.open_ratio:.1f}",
            f"{row.cold_ms:.1f}",
            f"{row.cold_ratio:.0f}",
            f"{row.read_mb:.1f}",
            f"{row.warm_ms:.2f}",
            f"{row.warm_ratio:.1f}",
            f"{row.resident_mb:.0f}",
            end_section=row.way == WAYS[-1],
        )
    return shown


def read_ahead_kb(folder: Path) -> int:
    """Return the read-ahead in KB of the disk that holds `folder`."""
    device = folder.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    if not setting.is_file():
        raise SystemExit(f"{folder} is not on a local disk: pass --dir with a folder on one")
    return int(setting.read_text())


def main() -> None:
    """Write the corpora, measure, print, write the result file and delete the corpora."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=PASSAGES, help="passages of the largest corpus")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; default: the temporary folder")
    args = parser.parse_args()
    if args.dir is not None and not args.dir.is_dir():
        raise SystemExit(f"--dir {args.dir} is not a folder: create it first")
    console = Console(width=130)
    with TemporaryDirectory(dir=args.dir, prefix="docstore-") as folder:
        room = (shutil.disk_usage(folder).free - KEPT_FREE) // BYTES_A_PASSAGE
        if room < SHARES[0]:
            raise SystemExit(
                f"{folder} has no room: {KEPT_FREE >> 30} GiB are kept free; pass --dir with a larger disk"
            )
        passages = min(args.passages, room)
        if passages < args.passages:
            console.print(f"{folder} has room for {room:,} passages with {KEPT_FREE >> 30} GiB kept free")
        ahead = read_ahead_kb(Path(folder))
        rows: list[Row] = []
        for share in SHARES:
            with TemporaryDirectory(dir=folder) as own:
                rows += measure(Path(own), passages // share)
            console.print(table(rows[-len(WAYS) :], ahead))
    console.print(table(rows, ahead))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"read_ahead_kb": ahead, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
