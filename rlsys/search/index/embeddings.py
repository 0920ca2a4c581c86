"""The encoded passages of a corpus as a .npy file that is written chunk by chunk and outlives a kill.

Invariants: a chunk is marked as done only after its vectors have reached the disk, so what is marked is right
after any end of the process or of the machine; a chunk is the same rows in every run, so a resumed file equals
one written at a stretch. Nothing holds more than a block of it in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.spec import Floats
from rlsys.search.index.draft import new_array

DTYPES = ("float32", "float16")
CHUNK_ROWS = 1024
BLOCK_BYTES = 1 << 26


class Embeddings:
    """A complete or growing file of `rows` vectors; see `create` and `open`."""

    def __init__(self, path: Path, rows: int, dimension: int, dtype: np.dtype, offset: int) -> None:
        self.path = path
        self.rows = rows
        self.dimension = dimension
        self.dtype = dtype
        self.offset = offset
        """Bytes before the first vector."""

    @classmethod
    def create(cls, path: Path, rows: int, dimension: int, dtype: str) -> Embeddings:
        """A file of the final size whose vectors are still to be written."""
        new_array(path, (rows, dimension), np.dtype(dtype)).flush()
        return cls.open(path, rows, dimension, dtype)

    @classmethod
    def open(cls, path: Path, rows: int, dimension: int, dtype: str) -> Embeddings:
        """Open the file. Raises UserError if it is not one of [rows, dimension] in `dtype`."""
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): remove it and build again") from None
        if (mapped.shape, mapped.dtype) != ((rows, dimension), np.dtype(dtype)):
            raise UserError(
                f"{path} holds {list(mapped.shape)} of {mapped.dtype}, not {[rows, dimension]} of {dtype}: remove "
                "it and build again"
            )
        return cls(path, rows, dimension, mapped.dtype, int(mapped.offset))

    def blocks(self) -> Iterator[Floats]:
        """All vectors in order, as [some, dimension] float32 of at most BLOCK_BYTES."""
        step = max(1, BLOCK_BYTES // (4 * self.dimension))
        # Read, not mapped: pages of a mapped file count as the process's memory.
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for first in range(0, self.rows, step):
                count = min(step, self.rows - first)
                flat = np.fromfile(file, self.dtype, count * self.dimension)
                yield flat.reshape(count, self.dimension).astype(np.float32, copy=False)

    def sample(self, count: int, seed: int) -> Floats:
        """[min(count, rows), dimension] float32, drawn without repetition, in the order of the rows."""
        if count >= self.rows:
            return np.concatenate(list(self.blocks()))
        chosen = np.sort(np.random.default_rng(seed).choice(self.rows, count, replace=False, shuffle=False))
        sample = np.empty((count, self.dimension), dtype=np.float32)
        first = 0
        for block in self.blocks():
            low, high = np.searchsorted(chosen, (first, first + len(block)))
            sample[low:high] = block[chosen[low:high] - first]
            first += len(block)
        return sample


class ChunkWriter:
    """Fills `embeddings`, and notes in `flags`, one byte a chunk, what is done."""

    def __init__(self, embeddings: Embeddings, flags: Path) -> None:
        self._embeddings = embeddings
        chunks = -(-embeddings.rows // CHUNK_ROWS)
        if not flags.exists():
            flags.write_bytes(bytes(chunks))
        self._done = np.frombuffer(flags.read_bytes().ljust(chunks, b"\0")[:chunks], dtype=np.uint8).astype(bool)
        self._vectors = embeddings.path.open("r+b")
        self._flags = flags.open("r+b")

    def close(self) -> None:
        """Close both files."""
        self._vectors.close()
        self._flags.close()

    def missing(self) -> list[int]:
        """Numbers of the chunks that are still to be written, in order."""
        return [int(chunk) for chunk in np.flatnonzero(~self._done)]

    def rows_of(self, chunk: int) -> range:
        """The rows of a chunk."""
        return range(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, self._embeddings.rows))

    def done_rows(self) -> int:
        """Rows whose vectors are there."""
        return sum(len(self.rows_of(int(chunk))) for chunk in np.flatnonzero(self._done))

    def put(self, chunk: int, vectors: Floats) -> None:
        """Write the vectors of a chunk, [its rows, dimension]. Raises RunError for what is not a number."""
        with np.errstate(over="ignore"):  # told apart below, with the line
            stored: NDArray[np.floating] = vectors.astype(self._embeddings.dtype)
        rows = self.rows_of(chunk)
        if stored.shape != (len(rows), self._embeddings.dimension):
            raise ValueError(f"chunk {chunk} needs {len(rows)} vectors, got {list(stored.shape)}")
        if not np.isfinite(stored).all():
            bad = rows[int(np.flatnonzero(~np.isfinite(stored).all(axis=1))[0])]
            raise RunError(
                f"the vector of line {bad + 1} of the corpus is not finite in {stored.dtype}: encode in float32, "
                "or store float32"
            )
        self._vectors.seek(self._embeddings.offset + rows.start * stored[0].nbytes)
        self._vectors.write(stored.tobytes())
        _to_disk(self._vectors)
        self._flags.seek(chunk)
        self._flags.write(b"\1")
        _to_disk(self._flags)
        self._done[chunk] = True


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fdatasync(file.fileno())
