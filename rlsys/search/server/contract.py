"""The HTTP contract: the requests, the answers, their limits, and how all of it is described in OpenAPI.

    POST /retrieve  {"queries": [str], "topk": int | null, "return_scores": bool, "rerank": bool}
      with scores     {"result": [[{"document": {"id", "contents", ...}, "score": float}]]}
      without         {"result": [[{"id", "contents", ...}]]}
    POST /rerank    {"queries": [str], "documents": [[document]], "rerank_topk": int | null, "return_scores": bool}
      with scores     {"result": [[{"document": document, "score": float}]]}
      without         {"result": [[document]]}
    POST /access    {"urls": [str]} -> {"result": [{"url", "contents", ...} | null]}
    any error       {"detail": one sentence}

Types are strict: `3` and, in JSON, `3.0` are an integer, `"3"` is none; an unknown field is an error. Each limit is one
object that both checks values and describes itself.
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
"""Text, `{"contents": text, ...}`, or a hit, `{"document": {"contents": text, ...}, ...}`."""
SMALL_BODY_BYTES = 16_384  # requests of so much are turned away for their number alone, never for what others hold
_QUOTED_CHARS = 200  # of a field that is not known
# pydantic would make an error for each unknown field of a request: `Contract.parse` refuses the first.
_CLOSED = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})
_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[^\s"\[\]{}:,]++|[\[{]', re.DOTALL)
"""A value of JSON, or a key, in linear time also where a text does not end."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of requests (beyond them 413 or 422), of the queue (429) and of time (408, 503): above 0, else UserError."""

    max_topk: int = 100
    max_queries: int = 4096  # queries of one request: a whole training batch of an upstream client fits
    max_urls: int = 64  # URLs of one request
    max_query_chars: int = 8192  # of a query, or of a URL
    max_document_chars: int = 65_536  # of a document to rerank
    max_passages: int = 131_072
    """Passages of one answer, queries times `topk`: what is held in memory and written at once."""
    max_body_bytes: int = 12 * 1024 * 1024
    """Of a request; all that are in work may have twice as much together, those up to `SMALL_BODY_BYTES` left out."""
    max_values: int = 262_144
    """JSON values of a body, keys too: each takes up to 200 bytes of memory, however short it is written."""
    max_requests: int = 2048  # requests in work at once
    max_pending: int = 16_384  # queries of all clients that may wait
    max_batch: int = 128  # queries encoded and searched together
    max_wait_ms: float = 2.0  # how long a query waits for others while nothing is being encoded
    body_timeout_s: float = 30.0  # until a body has arrived
    request_timeout_s: float = 120.0  # from the arrived body to the answer
    cache_entries: int = 16_384
    """Answers to queries that are kept, of at most eight times as many passages; 0 keeps none."""
    rerank_candidates: int = 50
    """Passages that are retrieved, and then reranked, for a query that asks for it; `topk` if that is more."""
    max_pending_pairs: int = 65_536
    """Pairs of a query and a document that may wait to be scored; one request may hold no more."""
    max_pair_batch: int = 64  # pairs scored together

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            zero = field.name in ("max_wait_ms", "cache_entries")
            if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                reason = f"{field.name} {value} is out of range: give {'0 or more' if zero else 'more than 0'}."
                raise UserError(reason, code="out_of_range", key=field.name)


_AS_MANY = Field(description="As many lists as queries.")
_BEST = Field(description="Best documents of each query; null takes the server's default.")
_is_whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Count = Annotated[int, _is_whole]  # A JSON integer, which may be written with a fraction of zero


class RetrieveRequest(BaseModel):
    """Queries, and how their passages are wanted."""

    model_config = _CLOSED
    shape: ClassVar[str] = '{"queries": [str], "topk": int or null, "return_scores": bool, "rerank": bool}'
    queries: Annotated[list[str], FailFast()]
    topk: Count | None = Field(None, description="Passages of each query; null takes the server's default.")
    return_scores: bool = False
    rerank: bool = Field(False, description="Put the passages in the reranker's order; scores are its own.")


class RerankRequest(BaseModel):
    """Queries, each with documents of its own to be put in order."""

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
    """URLs whose pages are wanted."""

    model_config = _CLOSED
    shape: ClassVar[str] = '{"urls": [str]}'
    urls: Annotated[list[str], FailFast()]


class RankedAnswer(BaseModel):
    """A list for each query, best first: with scores if the request asks for them."""

    class Scored(BaseModel):
        """A passage or document and its score."""

        document: dict[str, Any] | str
        score: float

    result: list[list[Scored | dict[str, Any] | str]]


class AccessAnswer(BaseModel):
    """A page for each URL; null where there is none."""

    result: list[dict[str, Any] | None]


class Health(BaseModel):
    """What is served; only `status` to those without the token of a server that has one."""

    model_config = ConfigDict(extra="allow")
    status: str


class RequestRefused(Exception):
    """There is no answer: an HTTP status and one sentence. After 429 and 503 the same request may succeed later."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


Body = TypeVar("Body", RetrieveRequest, RerankRequest, AccessRequest)


class Contract:
    """The request models under a server's limits."""

    class Failure(BaseModel):
        """Why there is no answer, in one sentence."""

        detail: str

    def __init__(self, limits: ServerLimits) -> None:
        # One that can never fit into the queue must not be told to try again.
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
        """The request in a body. Raises RequestRefused: 400 for what is not JSON, 422 for what is no such request."""
        # All of a body is in memory before any of it is checked. A short one cannot hold so many.
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
        """JSON schema of a request's body."""
        described = model.model_json_schema()
        for field, value in described["properties"].items():
            if field in self._bounds:
                kept = {key: value[key] for key in ("title", "description", "default") if key in value}
                described["properties"][field] = kept | self._bounds[field].schema()
        return described


def text_of(document: Document) -> str | None:
    """The text to rerank by; None for an object that has none."""
    contents = document if isinstance(document, str) else bare(document).get("contents")
    return contents if isinstance(contents, str) else None


def bare(document: dict[str, Any]) -> dict[str, Any]:
    """The document itself, of a hit too."""
    inner = document.get("document")
    return inner if isinstance(inner, dict) else document


@dataclass(frozen=True, slots=True)
class _Texts:
    """A list of texts that is not empty."""

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
    """A list of documents for each query."""

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
    """A number of passages, or null."""

    most: int

    def problem(self, number: int) -> str:
        return "" if 1 <= number <= self.most else f": {number} is out of range; send 1 to {self.most}"

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": self.most}, {"type": "null"}]}
