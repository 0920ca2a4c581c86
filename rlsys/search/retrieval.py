"""The types of searching: what a retriever finds, what a caller gets, and what two servers of one index agree in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

_BY_VECTORS = ("encoder", "dimension", "faiss_type", "nprobe", "ef_search")
_BY_BOTH = ("candidates", "rank_constant", "dense", "bm25")
SERVED = ("kind", "passages", "corpus_sha256", *_BY_VECTORS, "k1", "b", "stopwords", *_BY_BOTH)
"""Keys of a server's health that its answers depend on. The rest counts."""


class Hit(NamedTuple):
    """One passage that a retriever has found for a query."""

    score: float
    document: Mapping[str, Any]  # the corpus row: `id`, `contents` and whatever else it holds


class Retriever(Protocol):
    """Finds passages in two stages, so that batches overlap. Its answers do not change while it lives: they are cached."""

    parallel: int
    """Batches that may be in `find` at once: 1 for what computes, more for what waits for others."""

    def prepare(self, queries: Sequence[str]) -> Any:
        """Compute what `find` needs of the queries: vectors, terms. Called by one thread at a time."""

    def find(self, prepared: Any, topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each prepared query, best first. Called by up to `parallel` threads."""

    def describe(self) -> Mapping[str, Any]:
        """A description of it in JSON values; `passages` and `corpus_sha256` among them where they are known."""

    def close(self) -> None:
        """Give connections and files back; nothing is called after."""


class PageSource(Protocol):
    """Gives whole pages, to several callers at once."""

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """The page of each URL (`url`, `contents`, ...), None where there is none. Does not block; may be cancelled."""

    def close(self) -> None:
        """Give back what it holds; nothing is called after."""


class Failure(StrEnum):
    """Why a search found nothing."""

    blank = "blank"  # the query is empty; it was not sent
    rejected = "rejected"  # the server says that the query is wrong, e.g. too long. Asking again changes nothing.
    denied = "denied"  # the server wants another token
    unavailable = "unavailable"  # no server answered, in spite of all tries
    broken = "broken"  # what answered does not speak the retrieval contract, or has an error of its own
    not_recorded = "not_recorded"  # the cassette that is played does not hold the query
    closed = "closed"  # the client was closed before the answer came


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a search's result."""

    id: str
    contents: str
    """`"title"\\ntext` by the corpus's convention."""
    score: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages, best first, or why there are none."""

    passages: tuple[Passage, ...] = ()
    error: str = ""  # one sentence; empty for a search that worked
    failure: Failure | None = None
    """The kind of error. None for a search that worked, and for an error whose kind was not recorded."""


BLANK = SearchResult(error="the query is empty", failure=Failure.blank)
"""The result of a query of white space alone; it is not sent."""


def served(health: Mapping[str, Any]) -> dict[str, Any]:
    """The `SERVED` part of a server's health, as far as it says."""
    return {key: health[key] for key in SERVED if key in health}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two servers are known to serve different things; what one leaves out is no difference."""
    return [key for key in one if key in other and one[key] != other[key]]


def listed(server: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`key=value, ...` of what a server serves."""
    return ", ".join(f"{key}={server[key]}" for key in keys)
