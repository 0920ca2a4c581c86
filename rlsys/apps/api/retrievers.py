"""Search backends of the Python API: a dense or BM25 index, web search, or a running search server.

A retriever is only a description; a run or evaluation starts the server that it needs and stops it afterwards. An index
built from documents has two files next to it: `<index>.documents.jsonl` (documents given as values) and
`<index>.passages.jsonl`. Their content is deterministic, so an existing index of the same documents is recognised and
not built again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from rlsys.apps.api.arguments import note
from rlsys.apps.data.prepare import json_line
from rlsys.errors import UserError
from rlsys.files import write_atomically
from rlsys.search.address import DEFAULT_HOST, DEFAULT_TOPK, TOKEN_VARIABLE, is_url
from rlsys.search.index.folder import DENSE, MANIFEST_FILE, read_manifest
from rlsys.search.server_process import SearchServer, child_environment

if TYPE_CHECKING:  # This import takes seconds.
    from rlsys.search.index.make import IndexRecipe

_START_TIMEOUT_S = 180.0
"""Timeout for a started server to become healthy."""
CHUNK_WORDS = 100
"""Words per passage, as in the Wikipedia dump of 2018 that Search-R1 searches."""
Documents = str | Path | Sequence[Path] | Sequence[str | Mapping[str, Any]]
"""A file or folder, a list of such `Path`s, or the documents themselves: texts, or mappings with "text"."""


@runtime_checkable
class SearchBackend(Protocol):
    """Interface of everything that a run can search."""

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """Context manager that starts a server if necessary and yields settings of the `search` section, key -> value.

        The settings are valid within the context.

        Args:
            log_dir: folder for the log of a started server.

        Raises RunError for a server that does not start.
        """


@dataclass(frozen=True, slots=True)
class _IndexRetriever:
    """Retriever over an index folder made by `rlsys search index`."""

    KIND: ClassVar[str]
    """Kind of index, as in the manifest."""
    index_path: str | Path
    """Folder of the index."""

    def _require(self) -> dict[str, Any]:
        """Return the manifest of the index. Raises UserError if it is missing or of another kind."""
        manifest = read_manifest(self.index_path)
        if manifest["kind"] != self.KIND:
            raise UserError(
                f"{self.index_path} is an index of kind {manifest['kind']}, but {type(self).__name__} needs {self.KIND}: give "
                "another folder, or use the retriever for that kind.",
                code="mismatch",
                key=str(self.index_path),
            )
        return manifest

    def _settings(self, top_k: int) -> dict[str, Any]:
        index: dict[str, Any] = {"search.index": str(self.index_path), "search.url": None, "search.replicas": []}
        return {**index, "search.topk": top_k}


@dataclass(frozen=True, slots=True)
class DenseRetriever(_IndexRetriever):
    """Dense retrieval with FAISS: returns the passages whose vectors are nearest to the query's.

    Args:
        index_path: folder of an index; `from_documents` and `rlsys search index` make one.
        embedding_model: query encoder: "minilm", a Hugging Face folder, or a name in the Hugging Face cache. None takes
            the encoder that the index was built with; give that encoder only if it is now stored elsewhere.
        top_k: number of passages per search.
        chunk_size: has an effect only in `from_documents`, which splits documents; here it causes a warning.
        device: device of the encoder: cpu, cuda or cuda:N.
    """

    KIND: ClassVar[str] = "dense"
    embedding_model: str | None = None
    top_k: int = DEFAULT_TOPK
    chunk_size: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        _require_count("top_k", self.top_k)
        _require_device(self.device)
        self._require()
        if self.chunk_size is not None:
            note(
                f"chunk_size={self.chunk_size} only has an effect in from_documents; the existing index at "
                f"{self.index_path} is used unchanged"
            )

    @classmethod
    def from_documents(
        cls,
        documents: Documents,
        index_path: str | Path,
        embedding_model: str = "minilm",
        top_k: int = DEFAULT_TOPK,
        chunk_size: int = CHUNK_WORDS,
        device: str = "cpu",
    ) -> Self:
        """Build an index of your `documents` in the folder `index_path`, and return its retriever.

        Splits the documents into passages and encodes them. Reuses an existing index of the same documents and continues an
        interrupted build. Raises UserError if the folder holds an index of other documents.

        Args:
            documents: a file or folder (text, Markdown, jsonl, parquet), a list of such `Path`s, or the documents
                themselves: texts, or mappings with "text" and optionally "title" and "id".
            index_path: folder of the index.
            embedding_model: "minilm", a Hugging Face folder, or a name in the Hugging Face cache.
            top_k: number of passages per search.
            chunk_size: maximum number of words per passage.
            device: device of the encoder, for the build and for searches.
        """
        _require_count("top_k", top_k)
        _require_device(device)
        settings = {"encoder": embedding_model, "device": device}
        _index_documents(cls.KIND, documents, Path(index_path), settings, chunk_size)
        return cls(index_path, top_k=top_k, device=device)

    @contextmanager
    def serving(self, log_dir: Path) -> Iterator[Mapping[str, Any]]:
        """See `SearchBackend`. Starts a server only if `embedding_model` differs from the encoder in the index's
        manifest, or if the device is not the CPU; otherwise the run serves the index."""
        settings = self._settings(self.top_k)
        encoder = None if self.embedding_model == self._require().get("encoder") else self.embedding_model
        device = None if self.device == "cpu" else self.device
        if encoder is None and device is None:
            yield settings
            return
        log = log_dir / "search.log"
        with SearchServer(self.index_path, log, topk=self.top_k, encoder=encoder, device=device) as server:
            server.wait_healthy(_START_TIMEOUT_S)
            yield {**settings, **_at(server.url)}


@dataclass(frozen=True, slots=True)
class BM25Retriever(_IndexRetriever):
    """Keyword search with BM25. Needs no model and no GPU.

    Args:
        index_path: folder of an index; `from_documents` and `rlsys search index --kind bm25` make one.
        top_k: number of passages per search.
    """

    KIND: ClassVar[str] = "bm25"
    top_k: int = DEFAULT_TOPK

    def __post_init__(self) -> None:
        _require_count("top_k", self.top_k)
        self._require()

    @classmethod
    def from_documents(
        cls, documents: Documents, index_path: str | Path, top_k: int = DEFAULT_TOPK, chunk_size: int = CHUNK_WORDS
    ) -> Self:
        """Build an index of your `documents` in the folder `index_path`, and return its retriever.

        Reuses an existing index of the same documents. Raises UserError if the folder holds an index of other documents.

        Args:
            documents: as for `DenseRetriever.from_documents`.
            index_path: folder of the index.
            top_k: number of passages per search.
            chunk_size: maximum number of words per passage.
        """
        _require_count("top_k", top_k)
        _index_documents(cls.KIND, documents, Path(index_path), {}, chunk_size)
        return cls(index_path, top_k)

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """See `SearchBackend`. Starts nothing: the run serves the index."""
        del log_dir
        return nullcontext(self._settings(self.top_k))


@dataclass(frozen=True, slots=True)
class HttpRetriever:
    """A running search server: `rlsys search serve`, Search-R1's server, or any other with the same protocol
    (docs/search.md).

    Args:
        url: address of the server, such as http://127.0.0.1:8000.
        top_k: number of passages per search.
        replicas: addresses of further servers of the same index; each search goes to a server that answers.
        token_env: environment variable with the servers' bearer token.
    """

    url: str
    top_k: int = DEFAULT_TOPK
    replicas: Sequence[str] = ()
    token_env: str | None = None

    def __post_init__(self) -> None:
        _require_count("top_k", self.top_k)
        if isinstance(self.replicas, str):
            raise UserError(
                f'replicas="{self.replicas}" is a string: give a list of addresses.', code="wrong_type", key="replicas"
            )
        for url in (self.url, *self.replicas):
            if not is_url(url):
                raise UserError(
                    f"url={url} is not an address: write it like http://127.0.0.1:8000.", code="malformed", key=url
                )

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """See `SearchBackend`. Starts nothing."""
        del log_dir
        more = {"search.replicas": list(self.replicas), "search.token_env": self.token_env}
        return nullcontext({"search.url": self.url, "search.topk": self.top_k, **more})


@dataclass(frozen=True, slots=True)
class WebSearch:
    """Web search through a provider, whose API key comes from the environment (`rlsys search web --help`).

    Args:
        provider: google, serpapi, serper, brave or bing.
        top_k: number of results per search.
        fetch_pages: True to return the best passage of each page instead of its snippet.
        endpoint: URL to use instead of the provider's own, for compatible services.
        requests_per_second: rate limit of the subscription; None for no limit.
    """

    provider: str = "google"
    top_k: int = DEFAULT_TOPK
    fetch_pages: bool = False
    endpoint: str | None = None
    requests_per_second: float | None = None

    def __post_init__(self) -> None:
        from rlsys.search.web.providers import PROVIDERS, Keys

        _require_count("top_k", self.top_k)
        if self.provider not in PROVIDERS:
            raise UserError(
                f"provider={self.provider} is unknown: give one of {', '.join(PROVIDERS)}.",
                code="unknown",
                key="provider",
            )
        rate = self.requests_per_second
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
            raise UserError(
                f"requests_per_second={rate!r} is not a rate: give a number above 0, or None for no limit.",
                code="out_of_range",
                key="requests_per_second",
            )
        Keys.of(PROVIDERS[self.provider], os.environ)

    @contextmanager
    def serving(self, log_dir: Path) -> Iterator[Mapping[str, Any]]:
        """See `SearchBackend`. Runs a server for the provider within the context."""
        options = ["--fetch-pages"] if self.fetch_pages else []
        options += ["--endpoint", self.endpoint] if self.endpoint else []
        if self.requests_per_second is not None:
            options += ["--requests-per-second", str(self.requests_per_second)]
        with WebServer(self.provider, log_dir / "search.log", topk=self.top_k, options=options) as server:
            server.wait_healthy(_START_TIMEOUT_S)
            yield {"search.topk": self.top_k, **_at(server.url)}


class WebServer(SearchServer):
    """Handle of an `rlsys search web` subprocess for `provider`, with the contract of `SearchServer`.

    The server returns `topk` results and logs to `log`; `options` are further flags.
    """

    def __init__(self, provider: str, log: str | Path, *, topk: int, options: Sequence[str] = ()) -> None:
        words = ["rlsys.apps.cli.main", "search", "web", provider, "--topk", str(topk), *options]
        self._start(words, log, DEFAULT_HOST, 0, child_environment())


@dataclass(frozen=True, slots=True)
class WithoutSearch:
    """No search: the policy has only its tools."""

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """See `SearchBackend`. Starts nothing."""
        del log_dir
        return nullcontext({"search.enabled": False})


def _at(url: str) -> dict[str, Any]:
    """Return the settings for a server started by this process, whose environment holds the token, if any."""
    token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
    return {"search.url": url, "search.token_env": token_env}


def _require_count(name: str, value: int, of: str = "passages") -> None:
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r} is not a number of {of}: give 1 or more.", code="out_of_range", key=name)


def _require_device(device: str) -> None:
    if not isinstance(device, str) or re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise UserError(f"device={device!r} is not a device: give cpu, cuda or cuda:N.", code="malformed", key="device")


def _index_documents(
    kind: str, documents: Documents, index: Path, settings: Mapping[str, Any], chunk_size: int
) -> None:
    """Build an index of `documents` in the folder `index`, unless it exists.

    If `index` holds other documents, raises UserError and changes neither the index nor the files next to it.
    """
    _require_count("chunk_size", chunk_size, "words")
    from rlsys.search.index.make import make_index, recipe
    from rlsys.search.ingest import Chunking, ingest

    made = recipe(kind, settings)
    index.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{index.name}.", dir=index.parent) as folder:
        passages = Path(folder) / f"{index.name}.passages.jsonl"
        ingest(_files(documents, passages.with_name(f"{index.name}.documents.jsonl")), passages, Chunking(chunk_size))
        _refuse_other(index, kind, passages, made)
        for file in Path(folder).iterdir():
            file.replace(index.with_name(file.name))
    make_index(kind, index.with_name(passages.name), index, made, replace=False)


def _refuse_other(index: Path, kind: str, passages: Path, made: IndexRecipe) -> None:
    if not (index / MANIFEST_FILE).is_file():
        return
    from rlsys.search.corpus import Corpus

    there = read_manifest(index)
    asked = {"kind": kind, "corpus_sha256": Corpus.open(passages).checksum}
    asked |= {"encoder": made.encoder.name} if kind == DENSE else {}
    for key in (key for key, value in asked.items() if there.get(key) != value):
        others = "of other documents, or with passages of another size"
        what = others if key == "corpus_sha256" else f"of {key} {there.get(key)}"
        raise UserError(
            f"{index} already holds an index {what}: give another index_path, or remove that folder.",
            code="mismatch",
            key=str(index),
        )


def _files(documents: Documents, file: Path) -> list[Path]:
    """Return the files and folders that hold the documents. Texts and mappings are first written to `file`."""
    if isinstance(documents, str | Path):
        return [Path(documents)]
    if not isinstance(documents, Sequence):
        raise UserError(
            f"documents={documents!r} is not valid: give a file or a folder, or a list of texts or of mappings.",
            code="wrong_type",
            key="documents",
        )
    paths = [document for document in documents if isinstance(document, Path)]
    if paths and len(paths) == len(documents):
        return paths
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, str | Mapping):
            raise UserError(
                f'document {number} is a {type(document).__name__}: give texts, mappings with "text", or only paths (as '
                "Path).",
                code="wrong_type",
                key=f"document {number}",
            )
    rows = [{"text": document} if isinstance(document, str) else document for document in documents]
    write_atomically(file, "".join(json_line(row, "documents") for row in rows))
    return [file]
