"""What a search server takes on before it says no."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlsys.errors import UserError

SMALL_BODY_BYTES = 16_384
"""Requests of so much are turned away for their number alone, never for what others hold."""
_MAY_BE_ZERO = ("max_wait_ms", "cache_entries")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of requests (beyond them 413 or 422), of the queue (429) and of time (408, 503).

    Raises UserError for a number that bounds nothing.
    """

    max_topk: int = 100
    max_queries: int = 4096
    """Queries of one request: a whole training batch of an upstream client fits."""
    max_urls: int = 64
    """URLs of one request."""
    max_query_chars: int = 8192
    """Of a query, or of a URL."""
    max_document_chars: int = 65_536
    """Of a document to rerank."""
    max_passages: int = 131_072
    """Passages of one answer, queries times `topk`: what is held in memory and written at once."""
    max_body_bytes: int = 12 * 1024 * 1024
    """Of a request; all that are in work may have twice as much together, those up to `SMALL_BODY_BYTES` left out."""
    max_values: int = 262_144
    """JSON values of a body, keys too: each takes up to 200 bytes of memory, however short it is written."""
    max_requests: int = 2048
    """Requests in work at once."""
    max_pending: int = 16_384
    """Queries of all clients that may wait."""
    max_batch: int = 128
    """Queries encoded and searched together."""
    max_wait_ms: float = 2.0
    """How long a query waits for others while nothing is being encoded."""
    body_timeout_s: float = 30.0
    """Until a body has arrived."""
    request_timeout_s: float = 120.0
    """From the arrived body to the answer."""
    cache_entries: int = 16_384
    """Answers to queries that are kept, of at most eight times as many passages; 0 keeps none."""
    rerank_candidates: int = 50
    """Passages that are retrieved, and then reranked, for a query that asks for it; `topk` if that is more."""
    max_pending_pairs: int = 65_536
    """Pairs of a query and a document that may wait to be scored; one request may hold no more."""
    max_pair_batch: int = 64
    """Pairs scored together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            zero = field.name in _MAY_BE_ZERO
            if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                raise UserError(f"{field.name} {value} is out of range: give {'0 or more' if zero else 'more than 0'}")
