"""What a server needs of a way to retrieve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Hit(NamedTuple):
    """One passage found for a query."""

    score: float
    document: Mapping[str, Any]
    """The corpus row: `id`, `contents` and whatever else it holds."""


class Retriever(Protocol):
    """Finds passages in two stages, so that one batch can be prepared while another is being found.

    Its answers never change while it lives, so they may be cached.
    """

    @property
    def parallel(self) -> int:
        """Batches that may be in `find` at once: 1 for what computes, more for what waits for others."""

    def prepare(self, queries: Sequence[str]) -> Any:
        """What `find` needs of the queries: vectors, terms. Called by one thread at a time."""

    def find(self, prepared: Any, topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each prepared query, best first. Called by up to `parallel` threads."""

    def describe(self) -> Mapping[str, Any]:
        """What it is, as JSON values; `passages` and `corpus_sha256` among them where they are known."""

    def close(self) -> None:
        """Give connections and files back; nothing is called after."""
