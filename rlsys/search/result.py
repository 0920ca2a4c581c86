"""What a search gives its caller, wherever it comes from: a server, several of them, or a cassette."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """Why a search found nothing."""

    blank = "blank"
    """The query is empty; it was not sent."""
    rejected = "rejected"
    """The server says that the query is wrong, e.g. too long. Asking again changes nothing."""
    denied = "denied"
    """The server wants another token."""
    unavailable = "unavailable"
    """No server answered, in spite of all tries."""
    broken = "broken"
    """What answered does not speak the retrieval contract, or has an error of its own."""
    not_recorded = "not_recorded"
    """The cassette that is played does not hold the query."""
    closed = "closed"
    """The client was closed before the answer came."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage found."""

    id: str
    contents: str
    """`"title"\\ntext` by the corpus's convention."""
    score: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages, best first, or why there are none."""

    passages: tuple[Passage, ...] = ()
    error: str = ""
    """One sentence; empty for a search that worked."""
    failure: Failure | None = None
    """The kind of error. None for a search that worked, and for an error whose kind was not recorded."""


BLANK = SearchResult(error="the query is empty", failure=Failure.blank)
"""What a query of white space alone finds; it is not sent."""


def as_sent(query: str) -> str:
    """`query` without white space around it, and without what UTF-8 cannot say."""
    return query.encode("utf-8", "replace").decode("utf-8").strip()
