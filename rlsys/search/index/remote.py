"""Retrieval from an Elasticsearch or OpenSearch server: BM25 over `contents`, one request per batch.

The server stores the whole passages; the index folder is only a manifest with the server's URL and index name. Text is
analysed as Anserini does for Search-R1 (Lucene's English analyser, with stemming). The index has one shard, because
each shard has its own word statistics. Loading is idempotent: a passage's `_id` is its row, and the index's `_meta` has
the corpus checksum. So a killed load resumes, and nothing is written to an index with other content.

Credentials come from the environment and are never stored; certificates are always verified:

    RLSYS_SEARCH_API_KEY                           API key (Elasticsearch only)
    RLSYS_SEARCH_USER, RLSYS_SEARCH_PASSWORD       or user and password
    RLSYS_SEARCH_CA_CERTS                          file with a private certificate authority.

Raises UserError for failures that the user can fix, RunError for failures of the server.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlsys.errors import RunError, UserError
from rlsys.files import write_atomically
from rlsys.search.corpus import Corpus
from rlsys.search.index.folder import (
    REMOTE,
    IndexDraft,
    OnProgress,
    assemble,
    read_manifest,
    read_values,
    silent,
    typed,
)
from rlsys.search.index.lexical import LexicalOptions
from rlsys.search.retrieval import Hit

PARALLEL = 8
"""Maximum number of batches that wait for the server at the same time."""
_ROW = "rlsys_row"
"""Document field that breaks ties; excluded from the returned passages."""
_BLOCK_ROWS = 1000
_LOADED_FILE = "loaded"
_WEIGHTS = LexicalOptions()
_RETRIED = (429, 502, 503, 504)
_LONGEST_WAIT_S = 60.0
_REQUEST_BYTES = 10 << 20
"""Largest bulk request; servers reject more than 100 MB."""
_MAX_ANSWER_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 16
_QUOTED_CHARS = 400
"""Limit for the server's reason quoted in a message."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retries of requests to the server."""

    timeout_s: float = 30.0
    """Timeout of one request."""
    retries: int = 5
    """Retries after lost connections, timeouts and statuses 429, 502, 503 and 504."""
    backoff_s: float = 1.0
    """Wait before the first retry of rejected documents; doubles with each retry."""


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """URL, name and inputs of an index on a server; holds no secrets."""

    corpus_sha256: str
    rows: int
    url: str
    index: str
    k1: float
    b: float

    @classmethod
    def read(cls, folder: str | Path) -> RemoteManifest:
        """Read the folder's manifest. Raises UserError if it is missing or not of a remote index."""
        return typed(cls, read_values(folder, REMOTE, f"{' or '.join(REMOTE)}: give such an index"), folder)

    def meta(self) -> dict[str, Any]:
        """Return the `_meta` of the index on the server."""
        return {key: value for key, value in asdict(self).items() if key not in ("url", "index")}


class EngineClient:
    """Client of an Elasticsearch or OpenSearch server; thread-safe."""

    def __init__(self, kind: str, url: str, connections: int = 1, patience: Patience | None = None) -> None:
        """Connect, and check that the server responds, accepts the credentials and is of `kind`, one of `REMOTE`."""
        _require_url(url)
        self.kind = kind
        self.url = url
        self._patience = patience or Patience()
        self._client, self._library = _connect(kind, url, connections, self._patience)
        with self._explained():
            version = self._client.info()["version"]
            if version.get("distribution", "elasticsearch") != kind:
                raise UserError(
                    f"{url} is not {kind} but {version}: give the matching engine.", code="mismatch", key=url
                )
            self.version = str(version["number"])

    def create(self, manifest: RemoteManifest) -> None:
        """Create the manifest's index; fields other than `contents` are stored but not indexed."""
        text = {"contents": {"type": "text", "analyzer": "english"}, _ROW: {"type": "integer"}}
        similarity = {"default": {"type": "BM25", "k1": manifest.k1, "b": manifest.b}}
        mappings = {"_meta": manifest.meta(), "dynamic": False, "properties": text}
        body = {"settings": {"number_of_shards": 1, "similarity": similarity}, "mappings": mappings}
        with self._explained(manifest.index):
            self._client.indices.create(index=manifest.index, body=body)

    def meta(self, index: str) -> Mapping[str, Any] | None:
        """Return the `_meta` of the index's mapping, empty if unset; None if the index does not exist."""
        with self._explained(index):
            if not self._client.indices.exists(index=index):
                return None
            (described,) = self._client.indices.get_mapping(index=index).values()
            meta: Mapping[str, Any] = described["mappings"].get("_meta", {})
            return meta

    def load(self, index: str, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Store documents by id, replacing existing ones, with retries of rejected documents. Raises RunError."""
        actions = ({"_index": index, "_id": key, "_source": document} for key, document in documents.items())
        with self._explained(index):
            retries, first_s = self._patience.retries, self._patience.backoff_s
            waits = {"max_retries": retries, "initial_backoff": first_s, "max_backoff": _LONGEST_WAIT_S}
            sizes = {"chunk_size": len(documents), "max_chunk_bytes": _REQUEST_BYTES}
            bulk = self._library.helpers.streaming_bulk
            sent = bulk(self._client, actions, raise_on_error=False, **waits, **sizes)
            refused = [answer["index"] for ok, answer in sent if not ok]
        for first in refused:
            raise RunError(
                f"{self.kind} at {self.url} refused {len(refused)} of {len(documents)} passages of index "
                f"{index!r}; row {first['_id']} with status {first['status']}: {first['error']}"
            )

    def count(self, index: str) -> int:
        """Refresh the index and return its number of documents."""
        with self._explained(index):
            self._client.indices.refresh(index=index)
            return int(self._client.count(index=index)["count"])

    def search(self, index: str, searches: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """Send all search bodies in one request and return the hits of each."""
        lines: list[Mapping[str, Any]] = [line for search in searches for line in ({}, search)]
        with self._explained(index):
            answers = self._client.msearch(index=index, body=lines)["responses"]
        for answer in answers:
            if "error" in answer:
                raise self._failure(answer["status"], _reason(answer["error"]), index)
        return [answer["hits"]["hits"] for answer in answers]

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _explained(self, index: str = "") -> Iterator[None]:
        """Convert exceptions of the client library to UserError or RunError."""
        library = self._library
        api_error = getattr(library, "ApiError", library.TransportError)
        try:
            yield
        except getattr(library, "UnsupportedProductError", ()):
            raise UserError(
                f"{self.url} is not {self.kind}: give the matching engine.", code="mismatch", key=self.url
            ) from None
        except (library.TransportError, library.SerializationError, api_error, RecursionError) as error:
            raise self._failure(getattr(error, "status_code", None), _reason(error), index) from None

    def _failure(self, status: object, reason: str, index: str) -> Exception:
        where = f"{self.kind} at {self.url}"
        if not isinstance(status, int):
            return RunError(f"{where} gave no answer ({reason}): check that it runs and that the URL is right")
        if status in (401, 403):
            remedy = "set RLSYS_SEARCH_API_KEY, or RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD, to credentials"
            return UserError(
                f"{where} refused the credentials ({status}, {reason}): {remedy} with access to the index.",
                code="denied",
                key=self.url,
            )
        if status == 404 and index:
            return UserError(
                f"{where} has no index {index!r}: load it with `rlsys search index`.", code="not_found", key=index
            )
        if "media_type_header" in reason:
            version = self._library.__version__[0]
            remedy = f"install the client of the server's version, such as pip install 'elasticsearch<{version}'"
            return UserError(
                f"{where} does not support version {version} of the client: {remedy}.", code="mismatch", key=self.url
            )
        return RunError(f"{where} answered {status}: {reason}")


def _require_url(url: str) -> None:
    """Raise UserError for an invalid server URL or a URL with credentials; the message never repeats credentials."""
    if "@" in url:
        server = url.rpartition("@")[2]
        instead = "leave them out and set RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD"
        raise UserError(f"the URL of {server} holds credentials: {instead}.", code="unsupported", key=server)
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        complete = None
    if not complete:
        problem = f"{url!r} is not the URL of a server"
        raise UserError(f"{problem}: give http://HOST:PORT or https://HOST:PORT.", code="malformed", key=url)


def _connect(kind: str, url: str, connections: int, patience: Patience) -> tuple[Any, Any]:
    """Return a client and its library module."""
    packages = {"elasticsearch": ("elasticsearch", "elasticsearch"), "opensearch": ("opensearchpy", "opensearch-py")}
    module, package = packages[kind]
    try:
        library = importlib.import_module(module)
        importlib.import_module(f"{module}.helpers")
    except ImportError:
        raise UserError(
            f"engine {kind} needs its client: pip install {package}.", code="not_installed", key=package
        ) from None
    common: dict[str, Any] = {"max_retries": patience.retries, "retry_on_timeout": True, "retry_on_status": _RETRIED}
    common |= _credentials(kind)
    if ca_certs := os.environ.get("RLSYS_SEARCH_CA_CERTS"):
        common["ca_certs"] = ca_certs
    if kind == "elasticsearch":
        node: Any = importlib.import_module("elastic_transport").Urllib3HttpNode

        class BoundedNode(node):
            def __init__(self, *given: Any, **options: Any) -> None:
                super().__init__(*given, **options)
                self.pool: Any = _BoundedPool(self.pool)

        common |= {"node_class": BoundedNode, "connections_per_node": connections}
        return library.Elasticsearch(url, request_timeout=patience.timeout_s, **common), library
    connection: Any = library.Urllib3HttpConnection

    class BoundedConnection(connection):
        def _create_urllib3_pool(self) -> None:
            super()._create_urllib3_pool()
            self.pool: Any = _BoundedPool(self.pool)

    common |= {"connection_class": BoundedConnection, "pool_maxsize": connections}
    return library.OpenSearch(url, timeout=patience.timeout_s, **common), library


class _BoundedPool:
    """A urllib3 connection pool that limits the response size, which the client libraries do not limit."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.close = pool.close

    def urlopen(self, *given: Any, **options: Any) -> Any:
        """Send a request. Raises HTTPError for a response beyond the limit; clients retry it like a lost connection."""
        from urllib3.exceptions import HTTPError
        from urllib3.response import HTTPResponse

        answer = self._pool.urlopen(*given, preload_content=False, decode_content=False, **options)
        body = bytearray()
        try:
            if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise HTTPError(f"its answer is refused: its encoding {encoding[:40]!r} is not identity")
            for block in answer.stream(_BLOCK_BYTES, decode_content=False):
                body += block
                if len(body) > _MAX_ANSWER_BYTES:
                    raise HTTPError(f"its answer is refused: it is larger than {_MAX_ANSWER_BYTES} bytes")
        finally:
            answer.close()  # a fully read response has already returned its connection to the pool
        return HTTPResponse(io.BytesIO(body), headers=answer.headers, status=answer.status)


def _credentials(kind: str) -> dict[str, Any]:
    key, user, password = (os.environ.get(f"RLSYS_SEARCH_{name}") for name in ("API_KEY", "USER", "PASSWORD"))
    if (user is None) != (password is None):
        raise UserError(
            "RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD belong together: set both or neither.",
            code="missing",
            key="RLSYS_SEARCH_USER" if user is None else "RLSYS_SEARCH_PASSWORD",
        )
    if key is not None:
        if user is not None:
            raise UserError(
                "RLSYS_SEARCH_API_KEY and RLSYS_SEARCH_USER are both set: set one of them.",
                code="conflict",
                key="RLSYS_SEARCH_API_KEY",
            )
        if kind == "opensearch":
            raise UserError(
                "OpenSearch takes no API key: set RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD.",
                code="unsupported",
                key="RLSYS_SEARCH_API_KEY",
            )
        return {"api_key": key}
    return {} if user is None else {"basic_auth" if kind == "elasticsearch" else "http_auth": (user, password)}


def _reason(error: Any) -> str:
    """Return the text of a server error: a {"type", "reason"} object, or an exception that may hold such an object."""
    body = getattr(error, "body", getattr(error, "info", error))
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    if isinstance(inner, Mapping) and "type" in inner:
        inner = f"{inner['type']}: {inner.get('reason', '')}"
    if inner is not None:
        return str(inner)[:_QUOTED_CHARS]
    causes = getattr(error, "errors", ())
    return "; ".join([str(error)[:_QUOTED_CHARS], *(str(cause)[:_QUOTED_CHARS] for cause in causes[-1:])])


def build_remote(
    corpus: Corpus,
    out: str | Path,
    url: str,
    index: str,
    engine: str = "elasticsearch",
    progress: OnProgress = silent,
    *,
    k1: float = _WEIGHTS.k1,
    b: float = _WEIGHTS.b,
    patience: Patience | None = None,
) -> bool:
    """Load the corpus into `index` on the server at `url` and create the folder `out`; False if both exist already.

    An interrupted load resumes with the first unconfirmed block. Raises UserError if `index` holds other content or
    `EngineClient` rejects the server, and RunError if the server fails.
    """
    if engine not in REMOTE:
        raise UserError(f"engine {engine!r} is unknown: give {' or '.join(REMOTE)}.", code="unknown", key="engine")
    weights = LexicalOptions(k1, b)
    manifest = RemoteManifest(corpus.checksum, len(corpus), url, index, weights.k1, weights.b)
    client = EngineClient(engine, url, patience=patience)
    try:
        meta = client.meta(index)
        if meta is not None and meta != manifest.meta():
            problem = f"{engine} at {url} has an index {index!r} with another corpus or other settings"
            raise UserError(f"{problem}: give another name, or delete it there first.", code="exists", key=index)

        def fill(draft: IndexDraft) -> None:
            _load(client, manifest, corpus, draft.home / _LOADED_FILE, progress)

        whole = meta is not None and client.count(index) == manifest.rows
        return assemble(Path(out).absolute(), engine, asdict(manifest), fill, resume=True, again=not whole)
    finally:
        client.close()


def _load(client: EngineClient, manifest: RemoteManifest, corpus: Corpus, loaded: Path, progress: OnProgress) -> None:
    """Send the remaining blocks; the file `loaded` holds the number of rows that the server has confirmed."""
    done = int(loaded.read_text()) if loaded.is_file() else 0
    if client.meta(manifest.index) is None:
        client.create(manifest)
        done = 0
    progress("load", done, manifest.rows)
    while done < manifest.rows:
        rows = range(done, min(done + _BLOCK_ROWS, manifest.rows))
        passages = zip(rows, corpus.fetch(rows), strict=True)
        client.load(manifest.index, {str(row): {**passage, _ROW: row} for row, passage in passages})
        done = rows.stop
        write_atomically(loaded, str(done))
        progress("load", done, manifest.rows)
    held = client.count(manifest.index)
    if held != manifest.rows:
        loaded.unlink()
        problem = f"index {manifest.index!r} at {manifest.url} holds {held} passages after {manifest.rows} were loaded"
        raise RunError(f"{problem}: another program writes to it; run the command again to load it again")


class RemoteRetriever:
    """Searches on the server; ties are in row order."""

    parallel = PARALLEL
    """Several, because a batch only waits for the server."""

    def __init__(self, client: EngineClient, manifest: RemoteManifest) -> None:
        self._client, self._manifest = client, manifest

    @classmethod
    def open(cls, folder: str | Path, *, patience: Patience | None = None) -> RemoteRetriever:
        """Connect to the server loaded by `build_remote`. Raises UserError if the index has changed since."""
        manifest = RemoteManifest.read(folder)
        kind, url, index = read_manifest(folder)["kind"], manifest.url, manifest.index
        client = EngineClient(kind, url, PARALLEL, patience)
        with ExitStack() as on_failure:
            on_failure.callback(client.close)
            meta = client.meta(index)
            if meta is None:
                raise UserError(f"{kind} at {url} has no index {index!r}: load it again.", code="not_found", key=index)
            if meta != manifest.meta() or client.count(index) != manifest.rows:
                raise UserError(
                    f"index {index!r} at {url} has changed since {folder} was made: load it again.",
                    code="mismatch",
                    key=index,
                )
            on_failure.pop_all()
        return cls(client, manifest)

    def prepare(self, queries: Sequence[str]) -> Sequence[str]:
        """Return the queries unchanged; the server analyses them."""
        return queries

    def find(self, prepared: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query, best first. Raises RunError if the server fails."""
        if not prepared:
            return []
        order = {"size": topk, "sort": [{"_score": "desc"}, {_ROW: "asc"}]}
        options = {**order, "_source": {"excludes": [_ROW]}, "track_total_hits": False}
        searches = [{"query": {"match": {"contents": query}}, **options} for query in prepared]
        answers = self._client.search(self._manifest.index, searches)
        return [[Hit(float(hit["_score"]), hit["_source"]) for hit in hits] for hits in answers]

    def describe(self) -> Mapping[str, Any]:
        """Return passages, corpus, server, index and BM25 parameters."""
        made = asdict(self._manifest)
        known = {"kind": self._client.kind, "passages": made.pop("rows"), "server_version": self._client.version}
        return known | made

    def close(self) -> None:
        self._client.close()
