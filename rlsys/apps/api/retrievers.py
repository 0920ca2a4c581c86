"""The searches of a run: an own index by vectors or by words, the web, or a server that is running already.

A retriever is a description: what it takes is started when a run or an evaluation needs it, and ended with that. Beside
an index of own documents lie `<index>.documents.jsonl` (documents that were given as values) and
`<index>.passages.jsonl`. The same documents give the same bytes, so an index of them is found again and not built
twice.
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

if TYPE_CHECKING:  # Building loads libraries of seconds.
    from rlsys.search.index.make import IndexRecipe

_START_TIMEOUT_S = 180.0
"""For a server that is started here to answer."""
CHUNK_WORDS = 100
"""Words of a passage, as in the Wikipedia of 2018 that Search-R1 searches."""
Documents = str | Path | Sequence[Path] | Sequence[str | Mapping[str, Any]]
"""A file or folder, several, or the documents themselves: texts, or mappings with "text"."""


@runtime_checkable
class SearchBackend(Protocol):
    """Anything that a run can search."""

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """Settings of the run's `search` section, key -> value, which hold while the context lasts.

        Args:
            log_dir: folder for the log of a server that has to be started.

        Raises RunError for a server that does not start.
        """


@dataclass(frozen=True, slots=True)
class _IndexRetriever:
    """An index folder, as `rlsys search index` makes it."""

    KIND: ClassVar[str]
    """Kind of its index, as the manifest names it."""
    index_path: str | Path
    """Folder of the index."""

    def _require(self) -> dict[str, Any]:
        """The manifest of the index. Raises UserError for none, and for one of another kind."""
        manifest = read_manifest(self.index_path)
        if manifest["kind"] != self.KIND:
            raise UserError(
                f"{self.index_path} is an index of kind {manifest['kind']}, and {type(self).__name__} takes {self.KIND}: give "
                "another folder, or the retriever of that kind.",
                code="mismatch",
                key=str(self.index_path),
            )
        return manifest

    def _settings(self, top_k: int) -> dict[str, Any]:
        index: dict[str, Any] = {"search.index": str(self.index_path), "search.url": None, "search.replicas": []}
        return {**index, "search.topk": top_k}


@dataclass(frozen=True, slots=True)
class DenseRetriever(_IndexRetriever):
    """Passages by their vectors (FAISS): those nearest to the query's.

    Args:
        index_path: folder of an index; `from_documents` and `rlsys search index` make one.
        embedding_model: encoder of the queries; None takes what the index was built with. The same encoder in another
            place may be given: "minilm", a Hugging Face folder, or a name in the Hugging Face cache.
        top_k: passages of a search.
        chunk_size: words of a passage. It counts where documents are cut, in `from_documents`; an index that is there is
            taken as it is, and a warning says so.
        device: where the encoder computes: cpu, cuda or cuda:N.
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
                f"chunk_size={self.chunk_size} counts where documents are cut (from_documents); the index at "
                f"{self.index_path} is taken as it is"
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
        """The retriever of own `documents`, which are cut into passages and encoded into the folder `index_path`.

        An index of these very documents that is there already is used; one of others is refused with UserError. A build
        that was broken off continues.

        Args:
            documents: a file or folder (text, Markdown, jsonl, parquet), several as a list of `Path`, or the documents:
                texts, or mappings with "text" and, as far as they have them, "title" and "id".
            index_path: folder of the index.
            embedding_model: "minilm", a Hugging Face folder, or a name in the Hugging Face cache.
            top_k: passages of a search.
            chunk_size: most words of a passage.
            device: where the encoder computes, now and in searches.
        """
        _require_count("top_k", top_k)
        _require_device(device)
        settings = {"encoder": embedding_model, "device": device}
        _index_documents(cls.KIND, documents, Path(index_path), settings, chunk_size)
        return cls(index_path, top_k=top_k, device=device)

    @contextmanager
    def serving(self, log_dir: Path) -> Iterator[Mapping[str, Any]]:
        """See `SearchBackend`. A run serves an index by itself, unless queries are encoded otherwise than it knows."""
        settings = self._settings(self.top_k)
        encoder = None if self.embedding_model == self._require()["encoder"] else self.embedding_model
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
    """Passages by their words (BM25). No model, no GPU.

    Args:
        index_path: folder of an index; `from_documents` and `rlsys search index --kind bm25` make one.
        top_k: passages of a search.
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
        """The retriever of own `documents`, which are cut into passages and indexed in the folder `index_path`.

        An index of these very documents that is there already is used; one of others is refused with UserError.

        Args:
            documents: as for `DenseRetriever.from_documents`.
            index_path: folder of the index.
            top_k: passages of a search.
            chunk_size: most words of a passage.
        """
        _require_count("top_k", top_k)
        _index_documents(cls.KIND, documents, Path(index_path), {}, chunk_size)
        return cls(index_path, top_k)

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """See `SearchBackend`: a run serves its index by itself."""
        del log_dir
        return nullcontext(self._settings(self.top_k))


@dataclass(frozen=True, slots=True)
class HttpRetriever:
    """A search server that runs already: `rlsys search serve`, Search-R1's, or any of their contract (docs/search.md).

    Args:
        url: its address, such as http://127.0.0.1:8000.
        top_k: passages of a search.
        replicas: further servers of the same index; each search goes to one that answers.
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
                f'replicas="{self.replicas}" is one text: give a list of addresses.', code="wrong_type", key="replicas"
            )
        for url in (self.url, *self.replicas):
            if not is_url(url):
                raise UserError(
                    f"url={url} is not an address: write it like http://127.0.0.1:8000.", code="malformed", key=url
                )

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """See `SearchBackend`: nothing is started."""
        del log_dir
        more = {"search.replicas": list(self.replicas), "search.token_env": self.token_env}
        return nullcontext({"search.url": self.url, "search.topk": self.top_k, **more})


@dataclass(frozen=True, slots=True)
class WebSearch:
    """The web, through a provider of web search. Its key comes from the environment (`rlsys search web --help`).

    Args:
        provider: google, serpapi, serper, brave or bing.
        top_k: results of a search.
        fetch_pages: answer with the best passage of a page, not with its snippet.
        endpoint: URL to ask in place of the provider's own, for compatible services.
        requests_per_second: limit of the subscription; None sets none.
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
                f"requests_per_second={rate!r} is no rate: give a number above 0, or None for no limit.",
                code="out_of_range",
                key="requests_per_second",
            )
        Keys.of(PROVIDERS[self.provider], os.environ)

    @contextmanager
    def serving(self, log_dir: Path) -> Iterator[Mapping[str, Any]]:
        """See `SearchBackend`: a server over the provider runs for the time."""
        options = ["--fetch-pages"] if self.fetch_pages else []
        options += ["--endpoint", self.endpoint] if self.endpoint else []
        if self.requests_per_second is not None:
            options += ["--requests-per-second", str(self.requests_per_second)]
        with WebServer(self.provider, log_dir / "search.log", topk=self.top_k, options=options) as server:
            server.wait_healthy(_START_TIMEOUT_S)
            yield {"search.topk": self.top_k, **_at(server.url)}


class WebServer(SearchServer):
    """A handle of `rlsys search web` over `provider`, under the contract of `SearchServer`.

    It answers with `topk` results and writes to `log`; `options` are its further flags.
    """

    def __init__(self, provider: str, log: str | Path, *, topk: int, options: Sequence[str] = ()) -> None:
        words = ["rlsys.apps.cli.main", "search", "web", provider, "--topk", str(topk), *options]
        self._start(words, log, DEFAULT_HOST, 0, child_environment())


@dataclass(frozen=True, slots=True)
class WithoutSearch:
    """Nothing is searched: the policy has its tools alone."""

    def serving(self, log_dir: Path) -> AbstractContextManager[Mapping[str, Any]]:
        """See `SearchBackend`: nothing is started."""
        del log_dir
        return nullcontext({"search.enabled": False})


def _at(url: str) -> dict[str, Any]:
    """Settings of a server that was started here, which takes its token from this environment, if there is one."""
    token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
    return {"search.url": url, "search.token_env": token_env}


def _require_count(name: str, value: int, of: str = "passages") -> None:
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r} is no number of {of}: give 1 or more.", code="out_of_range", key=name)


def _require_device(device: str) -> None:
    if not isinstance(device, str) or re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise UserError(f"device={device!r} names no device: give cpu, cuda or cuda:N.", code="malformed", key="device")


def _index_documents(
    kind: str, documents: Documents, index: Path, settings: Mapping[str, Any], chunk_size: int
) -> None:
    """Build the index folder `index` of `documents`, unless it is there.

    Raises UserError for an index of others, which stays as it is with what lies beside it.
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
        others = "of other documents, or of passages of another size"
        what = others if key == "corpus_sha256" else f"of {key} {there.get(key)}"
        raise UserError(
            f"{index} holds an index {what}: give another index_path, or remove that folder.",
            code="mismatch",
            key=str(index),
        )


def _files(documents: Documents, file: Path) -> list[Path]:
    """The files and folders of the documents; values are written to `file`."""
    if isinstance(documents, str | Path):
        return [Path(documents)]
    if not isinstance(documents, Sequence):
        raise UserError(
            f"documents={documents!r} are no documents: give a file or a folder, or a list of texts or of mappings.",
            code="wrong_type",
            key="documents",
        )
    paths = [document for document in documents if isinstance(document, Path)]
    if paths and len(paths) == len(documents):
        return paths
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, str | Mapping):
            raise UserError(
                f'document {number} is a {type(document).__name__}: give texts, mappings with "text", or paths alone (as '
                "Path).",
                code="wrong_type",
                key=f"document {number}",
            )
    rows = [{"text": document} if isinstance(document, str) else document for document in documents]
    write_atomically(file, "".join(json_line(row, "documents") for row in rows))
    return [file]
