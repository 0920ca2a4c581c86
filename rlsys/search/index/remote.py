"""Retrieval by an Elasticsearch or OpenSearch server: BM25 of `contents`, one request a batch.

The server holds the passages whole, so a host that serves needs neither the corpus nor memory for it: the
index folder is a manifest that says where the index is and what it was loaded from. The text is analysed as
Anserini does for Search-R1 (Lucene's English analyser, stems and all), weighed with the manifest's k1 and b,
and held in one shard, because each shard counts words on its own.

Loading can be repeated: a passage's `_id` is its row, and the index carries the corpus's checksum in its
`_meta`, so a killed load goes on where it was, and an index of other things is never written to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.assemble import assemble
from rlsys.search.index.draft import Draft
from rlsys.search.index.engines import Engine, EngineKind, Patience
from rlsys.search.index.lexical import LexicalOptions
from rlsys.search.index.manifest import read_manifest, typed
from rlsys.search.index.progress import OnProgress
from rlsys.search.retrieval import Hit

PARALLEL = 8
"""Batches that may wait for the server at once."""
_ROW = "rlsys_row"
"""Field of the documents that orders hits of one score; it is no part of the passage."""
_BLOCK_ROWS = 1000
_LOADED_FILE = "loaded"
_WEIGHTS = LexicalOptions()


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """Where an index is and what it was loaded from; no secrets."""

    corpus_sha256: str
    rows: int
    url: str
    index: str
    k1: float
    b: float

    @classmethod
    def read(cls, folder: str | Path) -> tuple[EngineKind, RemoteManifest]:
        """The folder's manifest. Raises UserError when there is none, or none of an index on a server."""
        values = read_manifest(folder)
        del values["format"]
        kind = values.pop("kind")
        if kind not in list(EngineKind):
            kinds = " or ".join(EngineKind)
            raise UserError(f"{folder} is an index of kind {kind!r}, not {kinds}: give one of those")
        return EngineKind(kind), typed(cls, values, folder)

    def meta(self) -> dict[str, Any]:
        """What the index on the server says of itself."""
        return {key: value for key, value in asdict(self).items() if key not in ("url", "index")}

    def body(self) -> dict[str, Any]:
        """Settings and mappings of the index; fields but the text are kept and not searched."""
        return {
            "settings": {
                "number_of_shards": 1,
                "similarity": {"default": {"type": "BM25", "k1": self.k1, "b": self.b}},
            },
            "mappings": {
                "_meta": self.meta(),
                "dynamic": False,
                "properties": {
                    "contents": {"type": "text", "analyzer": "english"},
                    _ROW: {"type": "integer"},
                },
            },
        }


def build_remote(
    corpus: Corpus,
    out: str | Path,
    url: str,
    index: str,
    engine: str = "elasticsearch",
    progress: OnProgress | None = None,
    *,
    k1: float = _WEIGHTS.k1,
    b: float = _WEIGHTS.b,
    patience: Patience | None = None,
) -> bool:
    """Load the corpus into `index` of the server at `url`, and make the folder `out` that serves it.

    False if both are there already. A load that was ended continues with the first block that the server has
    not confirmed. Raises UserError for an index of that name that holds something else, and for what
    `Engine` cannot use; RunError when the server fails.
    """
    if engine not in list(EngineKind):
        raise UserError(f"engine {engine!r} is unknown: give {' or '.join(EngineKind)}")
    weights = LexicalOptions(k1, b)
    manifest = RemoteManifest(corpus.checksum, len(corpus), url, index, weights.k1, weights.b)
    server = Engine(EngineKind(engine), url, os.environ, patience=patience)
    try:
        found = server.meta(index)
        if found is not None and found != manifest.meta():
            raise UserError(
                f"{engine} at {url} has an index {index!r} that does not hold this corpus with these settings: give "
                "another name, or delete it there first"
            )

        def fill(draft: Draft) -> None:
            _load(server, manifest, corpus, draft.home / _LOADED_FILE, progress)

        whole = found is not None and server.count(index) == manifest.rows
        return assemble(Path(out).absolute(), engine, asdict(manifest), fill, resume=True, again=not whole)
    finally:
        server.close()


def _load(server: Engine, manifest: RemoteManifest, corpus: Corpus, loaded: Path, progress: OnProgress | None) -> None:
    """Send the blocks that `loaded` does not count, and count them there."""
    done = int(loaded.read_text()) if loaded.is_file() else 0
    if server.meta(manifest.index) is None:
        server.create(manifest.index, manifest.body())
        done = 0
    if progress is not None:
        progress("load", done, manifest.rows)
    while done < manifest.rows:
        rows = range(done, min(done + _BLOCK_ROWS, manifest.rows))
        passages = zip(rows, corpus.fetch(rows), strict=True)
        server.load(manifest.index, {str(row): {**passage, _ROW: row} for row, passage in passages})
        done = rows.stop
        part = loaded.with_suffix(".part")
        part.write_text(str(done))
        part.replace(loaded)
        if progress is not None:
            progress("load", done, manifest.rows)
    held = server.count(manifest.index)
    if held != manifest.rows:
        loaded.unlink()
        raise RunError(
            f"index {manifest.index!r} at {manifest.url} holds {held} passages after {manifest.rows} were loaded: "
            "something else writes to it; run the command again to load it anew"
        )


class RemoteRetriever:
    """Asks a server; hits of one score are in the order of the rows."""

    def __init__(self, server: Engine, manifest: RemoteManifest) -> None:
        self._server = server
        self._manifest = manifest

    @classmethod
    def open(cls, folder: str | Path, *, patience: Patience | None = None) -> RemoteRetriever:
        """Connect to the server that `build_remote` loaded, with credentials of this environment.

        Raises UserError or RunError when it cannot be reached, refuses, or holds something else by now.
        """
        kind, manifest = RemoteManifest.read(folder)
        server = Engine(kind, manifest.url, os.environ, connections=PARALLEL, patience=patience)
        try:
            _check(server, manifest, folder)
        except BaseException:
            server.close()
            raise
        return cls(server, manifest)

    @property
    def parallel(self) -> int:
        """Several: a batch does nothing here but wait."""
        return PARALLEL

    def prepare(self, queries: Sequence[str]) -> Sequence[str]:
        """The queries themselves; the server splits them into words."""
        return queries

    def find(self, prepared: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, best first. Raises RunError when the server fails."""
        if not prepared:
            return []
        found = self._server.search(self._manifest.index, [_search(query, topk) for query in prepared])
        return [[Hit(float(hit["_score"]), hit["_source"]) for hit in hits] for hits in found]

    def describe(self) -> Mapping[str, Any]:
        """Passages, corpus, where they are and how they are ranked."""
        return {
            "kind": str(self._server.kind),
            "passages": self._manifest.rows,
            "corpus_sha256": self._manifest.corpus_sha256,
            "url": self._manifest.url,
            "index": self._manifest.index,
            "server_version": self._server.version,
            "k1": self._manifest.k1,
            "b": self._manifest.b,
        }

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


def _check(server: Engine, manifest: RemoteManifest, folder: str | Path) -> None:
    """Raise UserError unless the server still holds what the manifest says."""
    meta = server.meta(manifest.index)
    if meta is None:
        raise UserError(f"{server.kind} at {server.url} has no index {manifest.index!r}: load it again")
    if meta != manifest.meta() or server.count(manifest.index) != manifest.rows:
        raise UserError(f"index {manifest.index!r} at {server.url} has changed since {folder} was made: load it again")


def _search(query: str, topk: int) -> dict[str, Any]:
    return {
        "query": {"match": {"contents": query}},
        "size": topk,
        "sort": [{"_score": "desc"}, {_ROW: "asc"}],
        "_source": {"excludes": [_ROW]},
        "track_total_hits": False,
    }
