"""Compares exact search on a CPU by rlsys and by FAISS with its defaults, for several batch sizes.

    python -m bench.exact_search          # one minute

Random unit vectors in an IndexFlatIP, one thread. FAISS chooses between a scan of all vectors for each query and matrix
products; `rlsys.search.index.dense` makes this choice itself. The benchmark asserts that both return the same rows.
Each rate is the median of `REPEATS`.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

os.environ["OMP_NUM_THREADS"] = "1"  # Must be set before the libraries start their threads.

import faiss
import numpy as np
from rich.console import Console
from rich.table import Table

from rlsys.search.index.dense import FaissSettings, Vectors

RESULT = Path("outputs/bench/exact_search.json")
ROWS, DIMENSION = 100_000, 768
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
TOPK = 3
REPEATS = 3


def main() -> None:
    """Measure, print the table and write the result file."""
    random = np.random.default_rng(0)
    stored = random.standard_normal((ROWS, DIMENSION), dtype=np.float32)
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(stored)
    default = faiss.cvar.distance_compute_blas_threshold
    vectors = Vectors(index, FaissSettings())
    table = Table(title=f"{ROWS:,} vectors of {DIMENSION}, one thread: queries per second")
    for column in ("batch", "FAISS default", "rlsys", "ratio"):
        table.add_column(column, justify="right")
    rows = []
    for batch in BATCHES:
        queries = stored[:batch] + np.float32(0.01)

        def plain(queries: np.ndarray = queries) -> np.ndarray:
            faiss.cvar.distance_compute_blas_threshold = default
            return index.search(queries, TOPK)[1]

        def ours(queries: np.ndarray = queries) -> np.ndarray:
            return vectors.search(queries, TOPK)[1]

        assert (plain() == ours()).all()
        rates = [batch / _seconds(search) for search in (plain, ours)]
        rows.append({"batch": batch, "faiss_qps": rates[0], "rlsys_qps": rates[1], "ratio": rates[1] / rates[0]})
        table.add_row(str(batch), *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}")
    Console().print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"faiss": faiss.__version__, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RESULT}")


def _seconds(search: Callable[[], np.ndarray]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = perf_counter()
        search()
        taken.append(perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
