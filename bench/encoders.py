"""Compares encoders by texts per second on one core, for several batch sizes and text lengths.

    pip install sentence-transformers    # the baseline, which nothing else needs
    python -m bench.encoders             # three minutes on one free core

The model is the bundled MiniLM (6 layers of 384) on one thread; each call turns strings into float32 vectors of norm 1.
Queries have about 8 tokens, passages about 120. The baseline is sentence-transformers with the same weights. `ratio` is
an engine's rate over the baseline's at the same length and batch size; `error` is the largest difference of a component
from the baseline's vectors. Engines alternate, and the fastest of at least `ROUNDS` calls counts for each, to exclude
other load on the machine.

- rlsys: `Encoder` as the search server uses it, eager PyTorch in float32;
- bfloat16: the same in bfloat16, which is faster only on a CPU with bfloat16 multiplication (AMX, AVX-512 BF16);
- onnxruntime: the model exported by torch.onnx with dynamic batch size and length, in float32, each batch padded to its
  longest text. Skipped unless onnx, onnxscript and onnxruntime are installed.
"""

from __future__ import annotations

import json
import logging
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import BUNDLED, Floats, resolve_folder

RESULT = Path("outputs/bench/encoders.json")
BASELINE = "sentence-transformers"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
WORD_COUNTS = {"query": (4, 8), "passage": (80, 115)}
"""Text length -> fewest and most words."""
ROUNDS, SECONDS, WIDTH = 3, 1.0, 110
_WORDS = """
the river city was founded by king in north war film song play company bridge album railway island which first
people language school museum state director century population station mountain award
"""

Encode = Callable[[list[str]], Floats]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one length and batch size."""

    length: str
    tokens: float
    batch: int
    engine: str
    texts_s: float
    ratio: float
    error: float


def main() -> None:
    """Measure, print the table and write the result file."""
    if find_spec("sentence_transformers") is None:
        sys.exit("The baseline is missing: pip install sentence-transformers")
    torch.set_num_threads(1)
    # The exporter warns about operators of missing packages and about its own deprecations.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=WIDTH)
    with TemporaryDirectory(prefix="rlsys-bench-") as scratch:
        engines = open_engines(Path(scratch), console)
        rows = [row for length in WORD_COUNTS for batch in BATCHES for row in measure(length, batch, engines)]
    console.print(table(rows, list(engines)))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    about = {"cpu": _processor(), "torch": torch.__version__, "rounds": ROUNDS, "seconds": SECONDS}
    RESULT.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    console.print(f"Written to {RESULT}")


def open_engines(scratch: Path, console: Console) -> dict[str, Encode]:
    """Return the engines by name, the baseline first."""
    from sentence_transformers import SentenceTransformer

    folder = resolve_folder(BUNDLED)
    reference = SentenceTransformer(str(folder), device="cpu")
    engines: dict[str, Encode] = {
        BASELINE: lambda texts: reference.encode(texts, batch_size=len(texts), show_progress_bar=False),
        "rlsys": Encoder.load(BUNDLED).encode_passages,
        "bfloat16": Encoder.load(BUNDLED, dtype="bfloat16").encode_passages,
    }
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        console.print(f"onnxruntime is skipped; not installed: {', '.join(missing)}")
    else:
        engines["onnxruntime"] = open_onnx(folder, scratch / "model.onnx")
    return engines


def open_onnx(folder: Path, path: Path) -> Encode:
    """Export the model of `folder` to `path` and open it with one thread."""
    import onnxruntime  # type: ignore[import-untyped]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    sample = dict(tokenizer(["one", "two three"], padding=True, return_tensors="pt"))
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    torch.onnx.export(
        model,
        kwargs=sample,
        f=str(path),
        dynamo=True,
        dynamic_shapes=dict.fromkeys(sample, sizes),
        external_data=False,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    states = session.get_outputs()[0].name

    def encode(texts: list[str]) -> Floats:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
        (found,) = session.run([states], {key: value.astype(np.int64) for key, value in inputs.items()})
        mask = inputs["attention_mask"][:, :, None].astype(np.float32)
        mean = (found * mask).sum(axis=1) / mask.sum(axis=1)
        vectors: Floats = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return vectors

    return encode


def measure(length: str, batch: int, engines: Mapping[str, Encode]) -> list[Row]:
    """Return the rows of all engines, measured alternately on the same texts."""
    texts = make_texts(length, batch)
    vectors = {name: encode(texts) for name, encode in engines.items()}
    fastest = dict.fromkeys(engines, float("inf"))
    started, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - started < SECONDS * len(engines):
        for name, encode in engines.items():
            begun = time.perf_counter()
            encode(texts)
            fastest[name] = min(fastest[name], time.perf_counter() - begun)
        rounds += 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_folder(BUNDLED))
    tokens = sum(map(len, tokenizer(texts)["input_ids"])) / batch
    return [
        Row(
            length=length,
            tokens=tokens,
            batch=batch,
            engine=name,
            texts_s=batch / fastest[name],
            ratio=fastest[BASELINE] / fastest[name],
            error=float(np.abs(vectors[name] - vectors[BASELINE]).max()),
        )
        for name in engines
    ]


def make_texts(length: str, count: int) -> list[str]:
    """Return `count` texts of random words, the same in every run."""
    source = random.Random(f"{length} {count}")
    low, high = WORD_COUNTS[length]
    return [" ".join(source.choices(_WORDS.split(), k=source.randint(low, high))) for _ in range(count)]


def table(rows: Sequence[Row], engines: Sequence[str]) -> Table:
    """Return a table with one line per length and batch size: texts per second and ratio of each engine."""
    shown = Table(title=f"Texts per second on one core, and the ratio to {BASELINE}")
    for column in ("length", "tokens", "batch", *engines):
        shown.add_column(column, justify="left" if column == "length" else "right", no_wrap=True)
    for first in rows[:: len(engines)]:
        of_line = [row for row in rows if (row.length, row.batch) == (first.length, first.batch)]
        cells = [f"{row.texts_s:.0f}  {row.ratio:.2f}" for row in of_line[1:]]
        shown.add_row(first.length, f"{first.tokens:.0f}", str(first.batch), f"{of_line[0].texts_s:.0f}", *cells)
    worst: dict[str, Any] = {name: max(row.error for row in rows if row.engine == name) for name in engines[1:]}
    shown.caption = "largest error: " + ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    return shown


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


if __name__ == "__main__":
    main()
