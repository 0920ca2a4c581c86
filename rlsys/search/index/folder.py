"""An open dense index: a folder that explains itself.

    index.faiss      vectors, inner product, row r = line r + 1 of the corpus
    corpus.jsonl     the corpus it was built from, linked or copied, so that the folder can be moved
    embeddings.npy   the vectors as they were encoded, unless they were not kept
    manifest.json    what the vectors were made with (`manifest.Manifest`)

Invariant: an index is never opened with another corpus or another number of rows than it was built from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.manifest import Manifest
from rlsys.search.index.vectors import DEPTH, Settings, Vectors

INDEX_FILE = "index.faiss"
CORPUS_FILE = "corpus.jsonl"
EMBEDDINGS_FILE = "embeddings.npy"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How the vectors of a dense index are opened and searched."""

    nprobe: int | None = None
    """Lists of an IVF index that a query visits; as the index records it by default."""
    ef_search: int | None = None
    """Breadth of a search in an HNSW index; as the index records it by default."""
    mmap: bool = False
    """Map the vectors in place of reading them: opens at once, and processes of a host share the memory, but
    the first searches wait for the disk."""
    faiss_gpu: bool = False
    """Spread the vectors over all GPUs as float16."""
    depth: int = DEPTH
    """Hits up to which a query's answer is the same however many are asked for."""

    def open(self, path: Path, manifest: Manifest | None = None) -> Vectors:
        """The vectors at `path`; `manifest` has the settings that hold where none are given."""
        return Vectors.open(
            path,
            faiss_type=manifest.faiss_type if manifest else None,
            asked=Settings(self.nprobe, self.ef_search),
            recorded=Settings(manifest.nprobe, manifest.ef_search) if manifest else None,
            depth=self.depth,
            mmap=self.mmap,
            gpu=self.faiss_gpu,
        )


@dataclass(frozen=True, slots=True)
class Index:
    """An open index: its vectors, its passages and what made it."""

    folder: Path
    manifest: Manifest
    corpus: Corpus
    vectors: Vectors

    @classmethod
    def open(cls, folder: str | Path, options: SearchOptions | None = None) -> Index:
        """Open what `build` wrote. Raises UserError when manifest, corpus and vectors do not fit together."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        corpus = Corpus.open(folder / CORPUS_FILE)
        if corpus.checksum != manifest.corpus_sha256:
            raise UserError(
                f"{corpus.path} has changed since {folder} was built: build the index again or restore the file"
            )
        vectors = (options or SearchOptions()).open(folder / INDEX_FILE, manifest)
        found = (vectors.rows, len(corpus), vectors.dimension)
        if found != (manifest.rows, manifest.rows, manifest.dimension):
            raise UserError(
                f"{folder} holds {vectors.rows} vectors of {vectors.dimension} for {len(corpus)} passages, its "
                f"manifest says {manifest.rows} of {manifest.dimension}: build the index again"
            )
        return cls(folder, manifest, corpus, vectors)
