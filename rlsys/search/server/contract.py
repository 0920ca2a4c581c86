"""Defines the HTTP contract: requests, responses, their limits and their OpenAPI description.

    POST /retrieve  {"queries": [str], "topk": int | null, "return_scores": bool, "rerank": bool}
      with scores     {"result": [[{"document": {"id", "contents", ...}, "score": float}]]}
      without         {"result": [[{"id", "contents", ...}]]}
    POST /rerank    {"queries": [str], "documents": [[document]], "rerank_topk": int | null, "return_scores": bool}
      with scores     {"result": [[{"document": document, "score": float}]]}
      without         {"result": [[document]]}
    POST /access    {"urls": [str]} -> {"result": [{"url", "contents", ...} | null]}
    any error       {"detail": one sentence}

Types are strict: `3` and `3.0` are integers in JSON, `"3"` is not; an unknown field is an error. Each limit is one
object that both checks values and gives their JSON schema.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from rlsys.errors import UserError

Document = str | dict[str, Any]
"""Text, an object `{"contents": text, ...}`, or a hit `{"document": {"contents": text, ...}, ...}`."""
SMALL_BODY_BYTES = 16_384  # bodies up to this size are exempt from the memory budget of large bodies
_QUOTED_CHARS = 200  # characters quoted from the name of an unknown field
# With extra="forbid" pydantic would create an error per unknown field; `Contract.parse` stops at the first one.
_CLOSED = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})
_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[^\s"\[\]{}:,]++|[\[{]', re.DOTALL)
"""Matches a JSON value or key, in linear time even for an unterminated string."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of requests (413 or 422 beyond them), of queues (429) and of time (408, 503).

    Raises UserError for values out of range.
    """

    max_topk: int = 100
    max_queries: int = 4096  # queries per request; fits a whole training batch of an upstream client
    max_urls: int = 64  # URLs per request
    max_query_chars: int = 8192  # per query or URL
    max_document_chars: int = 65_536  # per document to rerank
    max_passages: int = 131_072
    """Passages per response, queries times `topk`; they are all held in memory."""
    max_body_bytes: int = 12 * 1024 * 1024
    """Size of a request's body. All bodies in flight together may take twice as much, not counting small bodies
    (`SMALL_BODY_BYTES`)."""
    max_values: int = 262_144
    """JSON values per body, keys included; each takes up to 200 bytes of memory, even if short."""
    max_requests: int = 2048  # requests in flight
    max_pending: int = 16_384  # waiting queries of all clients
    max_batch: int = 128  # queries encoded and searched together
    max_wait_ms: float = 2.0  # time that a query waits for others while the encoder is idle
    body_timeout_s: float = 30.0  # time to receive a body
    request_timeout_s: float = 120.0  # time from the complete body to the response
    cache_entries: int = 16_384
    """Queries whose hits are cached, with up to 8 passages per entry on average; 0 disables the cache."""
    rerank_candidates: int = 50
    """Passages retrieved for a reranked query, or `topk` if that is larger."""
    max_pending_pairs: int = 65_536
    """(query, document) pairs that may wait to be scored; also the maximum number of pairs of one request."""
    max_pair_batch: int = 64  # pairs scored together

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            zero = field.name in ("max_wait_ms", "cache_entries")
            if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                reason = f"{field.name} {value} is out of range: give {'0 or more' if zero else 'more than 0'}."
                raise UserError(reason, code="out_of_range", key=field.name)


_AS_MANY = Field(description="One list for each query.")
_BEST = Field(description="Number of best documents to return per query; null takes the server's default.")
_is_whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Count = Annotated[int, _is_whole]  # a JSON integer; `3.0` counts as one


class RetrieveRequest(BaseModel):
    """Queries to retrieve passages for."""

    model_config = _CLOSED
    shape: ClassVar[str] = '{"queries": [str], "topk": int or null, "return_scores": bool, "rerank": bool}'
    queries: Annotated[list[str], FailFast()]
    topk: Count | None = Field(None, description="Number of passages per query; null takes the server's default.")
    return_scores: bool = False
    rerank: bool = Field(False, description="Return the passages in the reranker's order, with its scores.")


class RerankRequest(BaseModel):
    """Queries, each with its own documents to rank."""

    model_config = _CLOSED
    shape: ClassVar[str] = (
        '{"queries": [str], "documents": [[str or {"contents": str}]], "rerank_topk": int or null, '
        '"return_scores": bool}'
    )
    queries: Annotated[list[str], FailFast()]
    documents: Annotated[list[Annotated[list[Document], FailFast()]], FailFast(), _AS_MANY]
    rerank_topk: Annotated[Count | None, _BEST] = None
    return_scores: bool = False


class AccessRequest(BaseModel):
    """URLs of the pages to return."""

    model_config = _CLOSED
    shape: ClassVar[str] = '{"urls": [str]}'
    urls: Annotated[list[str], FailFast()]


class RankedAnswer(BaseModel):
    """One list per query, best first, with scores if requested."""

    class Scored(BaseModel):
        """A passage or document and its score."""

        document: dict[str, Any] | str
        score: float

    result: list[list[Scored | dict[str, Any] | str]]


class AccessAnswer(BaseModel):
    """One page per URL, null if there is none."""

    result: list[dict[str, Any] | None]


class Health(BaseModel):
    """Server status and index properties; a request without a required token gets only `status`."""

    model_config = ConfigDict(extra="allow")
    status: str


class RequestRefused(Exception):
    """A rejected request, with HTTP status and reason. After 429 and 503 a retry may succeed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


Body = TypeVar("Body", RetrieveRequest, RerankRequest, AccessRequest)


class Contract:
    """Parses and describes requests under a server's limits."""

    class Failure(BaseModel):
        """Error response; `detail` is one sentence."""

        detail: str

    def __init__(self, limits: ServerLimits) -> None:
        # A request larger than the whole queue gets 422, because 429 would invite a retry.
        texts = _Texts(min(limits.max_queries, limits.max_pending), limits.max_query_chars)
        count = _Count(limits.max_topk)
        self._max_values = limits.max_values
        self._bounds: dict[str, _Texts | _Count] = {
            "queries": texts,
            "urls": _Texts(limits.max_urls, limits.max_query_chars),
            "documents": _Documents(texts.most, limits.max_document_chars),
            "topk": count,
            "rerank_topk": count,
        }

    def parse(self, model: type[Body], body: bytes | bytearray) -> Body:
        """Parse a body. Raises RequestRefused: 400 if it is not JSON, 422 if it is not a valid request."""
        # Count values before parsing, which would allocate them all. A short body cannot exceed the limit.
        if len(body) > self._max_values and next(islice(_VALUE.finditer(body), self._max_values, None), None):
            raise RequestRefused(422, f"the body: more than {self._max_values} values are too many; send fewer")
        try:
            asked = model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            if first["type"] == "json_invalid":
                raise RequestRefused(400, f"the body is not JSON: {first['msg']}") from None
            where = ".".join(map(str, first["loc"])) or "the body"
            raise RequestRefused(422, f"{where}: {first['msg']}; send {model.shape}") from None
        if asked.model_extra:
            unknown = next(iter(asked.model_extra))[:_QUOTED_CHARS]
            raise RequestRefused(422, f"{unknown}: Extra inputs are not permitted; send {model.shape}")
        for field, bound in self._bounds.items():
            value = getattr(asked, field, None)
            if value is not None and (problem := bound.problem(value)):
                raise RequestRefused(422, f"{field}{problem}")
        return asked

    def schema(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the JSON schema of a request body."""
        described = model.model_json_schema()
        for field, value in described["properties"].items():
            if field in self._bounds:
                kept = {key: value[key] for key in ("title", "description", "default") if key in value}
                described["properties"][field] = kept | self._bounds[field].schema()
        return described


def text_of(document: Document) -> str | None:
    """Return the text that the reranker scores; None for an object without text."""
    contents = document if isinstance(document, str) else bare(document).get("contents")
    return contents if isinstance(contents, str) else None


def bare(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document, unwrapped if it is a hit."""
    inner = document.get("document")
    return inner if isinstance(inner, dict) else document


@dataclass(frozen=True, slots=True)
class _Texts:
    """Limits of a non-empty list of texts."""

    most: int
    chars: int

    def problem(self, texts: Any) -> str:
        if not texts:
            return ": the list is empty; send at least one"
        if len(texts) > self.most:
            return f": {len(texts)} are too many; send at most {self.most}"
        if max(map(len, texts)) > self.chars:
            row = next(row for row, text in enumerate(texts) if len(text) > self.chars)
            return f".{row}: {len(texts[row])} characters are too many; send at most {self.chars}"
        return ""

    def schema(self) -> dict[str, Any]:
        item = {"type": "string", "maxLength": self.chars}
        return {"type": "array", "items": item, "minItems": 1, "maxItems": self.most}


class _Documents(_Texts):
    """Limits of one list of documents per query."""

    def problem(self, lists: Any) -> str:
        for row, documents in enumerate(lists):
            for column, document in enumerate(documents):
                text = text_of(document)
                if text is None:
                    return f".{row}.{column}: an object needs `contents`, a string"
                if len(text) > self.chars:
                    return f".{row}.{column}: {len(text)} characters are too many; send at most {self.chars}"
        return ""

    def schema(self) -> dict[str, Any]:
        def holding(required: str, **properties: Any) -> dict[str, Any]:
            return {"type": "object", "properties": properties, "required": [required]}

        text = {"type": "string", "maxLength": self.chars}
        plain = holding("contents", contents=text, document={"not": {"type": "object"}})
        hit = holding("document", document=holding("contents", contents=text))
        line = {"type": "array", "items": {"anyOf": [text, plain, hit]}}
        return {"type": "array", "items": line, "minItems": 1, "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class _Count:
    """Limits of a number of passages; null is also valid."""

    most: int

    def problem(self, number: int) -> str:
        return "" if 1 <= number <= self.most else f": {number} is out of range; send 1 to {self.most}"

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": self.most}, {"type": "null"}]}
