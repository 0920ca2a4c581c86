"""Types shared by search servers and clients: hits, retrievers, results, and comparison of two servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from rlsys.errors import RunError

_BY_VECTORS = ("encoder", "dimension", "faiss_type", "nprobe", "ef_search")
_BY_BOTH = ("candidates", "rank_constant", "dense", "bm25")
SERVED = ("kind", "passages", "corpus_sha256", *_BY_VECTORS, "k1", "b", "stopwords", *_BY_BOTH, "settings")
"""Keys of `/health` that search results depend on; the other keys are counters and settings."""


class Hit(NamedTuple):
    """One passage found for a query."""

    score: float
    document: Mapping[str, Any]  # the corpus row: `id`, `contents` and any other fields


class Retriever(Protocol):
    """Finds passages in two stages, so that batches overlap. Results must stay constant, because servers cache them."""

    parallel: int
    """Number of batches that may be in `find` at once: 1 if `find` computes, more if it waits for other servers."""

    def prepare(self, queries: Sequence[str]) -> Any:
        """Compute the input of `find`, such as vectors or terms, from the queries. Called by one thread at a time."""

    def find(self, prepared: Any, topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per prepared query, best first. Called by up to `parallel` threads."""

    def describe(self) -> Mapping[str, Any]:
        """Describe the retriever in JSON values, including `passages` and `corpus_sha256` if known."""

    def close(self) -> None:
        """Close connections and files. No other method is called afterwards."""


class PageSource(Protocol):
    """Returns whole pages by URL. Safe for concurrent calls."""

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """Return the page of each URL (`url`, `contents`, ...), or None. Never blocks the event loop; cancellable."""

    def close(self) -> None:
        """Release all resources. No other method is called afterwards."""


class Failure(StrEnum):
    """Reason for a search without a result."""

    rejected = "rejected"  # the server rejects the query, e.g. as too long; a retry cannot help
    denied = "denied"  # the bearer token is missing or wrong
    unavailable = "unavailable"  # no server answered, after all retries
    broken = "broken"  # the response violates the retrieval contract, or reports an internal error
    not_recorded = "not_recorded"  # the replayed cassette does not hold the query
    closed = "closed"  # the client was closed before the response arrived


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a search result."""

    id: str
    contents: str
    """Title and text in corpus format, `"title"\\ntext`."""
    score: float
    url: str = ""
    """URL of the passage's page, by which `SearchClient.access` finds it; empty if unknown."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages, best first, or the error."""

    passages: tuple[Passage, ...] = ()
    error: str = ""  # one sentence; empty on success
    failure: Failure | None = None
    """Kind of error. None on success, and for a replayed error without a recorded kind."""


@dataclass(frozen=True, slots=True)
class PageResult:
    """A whole page, or the error."""

    contents: str | None = None  # None if there is no such page
    error: str = ""  # one sentence; empty on success
    failure: Failure | None = None


class SearchFailed(RunError):
    """Raised if no search server has answered a search of an episode."""


def served(health: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `SERVED` keys present in a server's health."""
    return {key: health[key] for key in SERVED if key in health}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ. A key missing on one side is not a difference."""
    return [key for key in one if key in other and one[key] != other[key]]


def listed(server: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Format the `keys` of a server's health as `key=value, ...`."""
    return ", ".join(f"{key}={server[key]}" for key in keys)
