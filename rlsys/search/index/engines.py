"""Elasticsearch and OpenSearch behind one face, each through its official client.

The clients agree in nearly all that is used here; what differs is in `_connect`. Credentials come from the
environment and are never written anywhere:

    RLSYS_SEARCH_API_KEY                           an API key (Elasticsearch only)
    RLSYS_SEARCH_USER, RLSYS_SEARCH_PASSWORD       or a user and a password
    RLSYS_SEARCH_CA_CERTS                          the file of a certificate authority of one's own

Certificates are always verified. A failure is a UserError where the user can mend it (address, credentials,
index, version of the client) and a RunError where the server fails.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from rlsys.errors import RunError, UserError

_RETRIED = (429, 502, 503, 504)
_LONGEST_WAIT_S = 60.0
_REQUEST_BYTES = 10 << 20
"""Largest bulk request; servers refuse more than 100 MB."""
_MAX_ANSWER_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 16
_QUOTED_CHARS = 400
"""Characters of a server's reason that a message quotes."""


class EngineKind(StrEnum):
    """The servers that there are clients for; the value is also the `kind` of a manifest."""

    elasticsearch = "elasticsearch"
    opensearch = "opensearch"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server, and how often to ask it again."""

    timeout_s: float = 30.0
    """For one request."""
    retries: int = 5
    """After lost connections, time-outs and answers that say to come later."""
    backoff_s: float = 1.0
    """Wait before the first retry of rejected documents; each later wait is twice as long."""


class Engine:
    """A server that can be asked; safe to use from several threads."""

    def __init__(
        self,
        kind: EngineKind,
        url: str,
        environment: Mapping[str, str],
        *,
        connections: int = 1,
        patience: Patience | None = None,
    ) -> None:
        """Connect, and check that the server answers, lets us in and is of this kind."""
        self.kind = kind
        self.url = _checked_url(url)
        self._patience = patience or Patience()
        self._client, self._library = _connect(kind, url, environment, connections, self._patience)
        with self._explained():
            version = self._client.info()["version"]
            if version.get("distribution", "elasticsearch") != kind:
                raise UserError(f"{url} is not {kind}: it calls itself {version}")
            self.version = str(version["number"])

    def create(self, index: str, body: Mapping[str, Any]) -> None:
        """Make an index of these settings and mappings."""
        with self._explained(index):
            self._client.indices.create(index=index, body=dict(body))

    def meta(self, index: str) -> Mapping[str, Any] | None:
        """The `_meta` of the index's mapping, empty where it has none; None without such an index."""
        with self._explained(index):
            if not self._client.indices.exists(index=index):
                return None
            (described,) = self._client.indices.get_mapping(index=index).values()
            found: Mapping[str, Any] = described["mappings"].get("_meta", {})
            return found

    def load(self, index: str, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Store documents under their ids, in place of what had these ids; rejected ones are sent again."""
        actions = ({"_index": index, "_id": key, "_source": document} for key, document in documents.items())
        with self._explained(index):
            sent = self._library.helpers.streaming_bulk(
                self._client,
                actions,
                chunk_size=len(documents),
                max_chunk_bytes=_REQUEST_BYTES,
                max_retries=self._patience.retries,
                initial_backoff=self._patience.backoff_s,
                max_backoff=_LONGEST_WAIT_S,
                raise_on_error=False,
            )
            refused = [answer["index"] for ok, answer in sent if not ok]
        if refused:
            first = refused[0]
            raise RunError(
                f"{self.kind} at {self.url} refused {len(refused)} of {len(documents)} passages of index "
                f"{index!r}; row {first['_id']} with status {first['status']}: {first['error']}"
            )

    def count(self, index: str) -> int:
        """How many documents a search sees from now on."""
        with self._explained(index):
            self._client.indices.refresh(index=index)
            return int(self._client.count(index=index)["count"])

    def search(self, index: str, searches: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """The hits of each search body, asked in one request."""
        lines: list[Mapping[str, Any]] = [line for search in searches for line in ({}, search)]
        with self._explained(index):
            answers = self._client.msearch(index=index, body=lines)["responses"]
        for answer in answers:
            if "error" in answer:
                raise self._failure(answer["status"], _reason(answer["error"]), index)
        return [answer["hits"]["hits"] for answer in answers]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextmanager
    def _explained(self, index: str = "") -> Iterator[None]:
        """Turn the client's exceptions into sentences."""
        library = self._library
        api_error = getattr(library, "ApiError", library.TransportError)
        try:
            yield
        except getattr(library, "UnsupportedProductError", ()):
            raise UserError(f"{self.url} is not {self.kind}: give the engine that it is") from None
        except (library.TransportError, library.SerializationError, api_error, RecursionError) as error:
            status = getattr(error, "status_code", None)
            raise self._failure(status, _reason(error), index) from None

    def _failure(self, status: object, reason: str, index: str) -> Exception:
        where = f"{self.kind} at {self.url}"
        if not isinstance(status, int):
            return RunError(f"{where} gave no answer ({reason}): check that it runs and that the URL is right")
        if status in (401, 403):
            return UserError(
                f"{where} refused the credentials ({status}, {reason}): set RLSYS_SEARCH_API_KEY, or "
                "RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD, to ones that may use the index"
            )
        if status == 404 and index:
            return UserError(f"{where} has no index {index!r}: load it with `rlsys search index`")
        if "media_type_header" in reason:
            version = self._library.__version__[0]
            return UserError(
                f"{where} does not speak with version {version} of the client: install the client of the "
                f"server's version, such as pip install 'elasticsearch<{version}'"
            )
        return RunError(f"{where} answered {status}: {reason}")


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        complete = None
    if not complete:
        raise UserError(f"{url!r} is not the URL of a server: give http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password:
        raise UserError(
            f"the URL of {parts.hostname} holds credentials: leave them out and set RLSYS_SEARCH_USER and "
            "RLSYS_SEARCH_PASSWORD"
        )
    return url


def _connect(
    kind: EngineKind, url: str, environment: Mapping[str, str], connections: int, patience: Patience
) -> tuple[Any, Any]:
    """A client and the library that it comes from."""
    module, package = {
        EngineKind.elasticsearch: ("elasticsearch", "elasticsearch"),
        EngineKind.opensearch: ("opensearchpy", "opensearch-py"),
    }[kind]
    try:
        library = importlib.import_module(module)
        importlib.import_module(f"{module}.helpers")
    except ImportError:
        raise UserError(f"engine {kind} needs its client: pip install {package}") from None
    common: dict[str, Any] = {
        "max_retries": patience.retries,
        "retry_on_timeout": True,
        "retry_on_status": _RETRIED,
        **_credentials(kind, environment),
    }
    if ca_certs := environment.get("RLSYS_SEARCH_CA_CERTS"):
        common["ca_certs"] = ca_certs
    if kind is EngineKind.elasticsearch:
        node: Any = importlib.import_module("elastic_transport").Urllib3HttpNode

        class BoundedNode(node):
            def __init__(self, *given: Any, **options: Any) -> None:
                super().__init__(*given, **options)
                self.pool: Any = _BoundedPool(self.pool)

        common |= {"node_class": BoundedNode, "connections_per_node": connections}
        client = library.Elasticsearch(url, request_timeout=patience.timeout_s, **common)
    else:
        connection: Any = library.Urllib3HttpConnection

        class BoundedConnection(connection):
            def _create_urllib3_pool(self) -> None:
                super()._create_urllib3_pool()
                self.pool: Any = _BoundedPool(self.pool)

        common |= {"connection_class": BoundedConnection, "pool_maxsize": connections}
        client = library.OpenSearch(url, timeout=patience.timeout_s, **common)
    return client, library


class _BoundedPool:
    """A pool of connections of urllib3 that reads answers under a limit; the clients have none."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def urlopen(self, *given: Any, **options: Any) -> Any:
        """As the pool's own. Raises HTTPError, which the clients take for a lost connection."""
        from urllib3.response import HTTPResponse

        answer = self._pool.urlopen(*given, preload_content=False, decode_content=False, **options)
        try:
            body = _body_of(answer)
        finally:
            answer.close()  # of one that was read to its end the connection is in the pool again
        return HTTPResponse(io.BytesIO(body), headers=answer.headers, status=answer.status)

    def close(self) -> None:
        """End the connections."""
        self._pool.close()


def _body_of(answer: Any) -> bytes:
    """The body of an answer of urllib3, as it was sent."""
    from urllib3.exceptions import HTTPError

    if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPError(f"its answer is refused: its encoding {encoding[:40]!r} is not identity")
    body = bytearray()
    for block in answer.stream(_BLOCK_BYTES, decode_content=False):
        body += block
        if len(body) > _MAX_ANSWER_BYTES:
            raise HTTPError(f"its answer is refused: it is larger than {_MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _credentials(kind: EngineKind, environment: Mapping[str, str]) -> dict[str, Any]:
    key = environment.get("RLSYS_SEARCH_API_KEY")
    user, password = environment.get("RLSYS_SEARCH_USER"), environment.get("RLSYS_SEARCH_PASSWORD")
    if (user is None) != (password is None):
        raise UserError("RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD belong together: set both or neither")
    if key is not None and user is not None:
        raise UserError("RLSYS_SEARCH_API_KEY and RLSYS_SEARCH_USER are both set: set one of them")
    if key is not None and kind is EngineKind.opensearch:
        raise UserError("OpenSearch takes no API key: set RLSYS_SEARCH_USER and RLSYS_SEARCH_PASSWORD")
    if key is not None:
        return {"api_key": key}
    if user is None:
        return {}
    return {"basic_auth" if kind is EngineKind.elasticsearch else "http_auth": (user, password)}


def _reason(error: Any) -> str:
    """What an answer's {"type", "reason"} says, or an exception, which may carry such an answer."""
    body = getattr(error, "body", getattr(error, "info", error))
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    if isinstance(inner, Mapping) and "type" in inner:
        return f"{inner['type']}: {inner.get('reason', '')}"[:_QUOTED_CHARS]
    if inner is not None:
        return str(inner)[:_QUOTED_CHARS]
    causes = getattr(error, "errors", ())
    return "; ".join([str(error)[:_QUOTED_CHARS], *(str(cause)[:_QUOTED_CHARS] for cause in causes[-1:])])
