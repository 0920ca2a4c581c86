"""Generated text told apart by its tags while it streams. Pure.

Invariants: the pieces, one after the other, are the text; what kind a character is of does not depend on how the text was
cut into parts. A tag counts to what it opens or closes. The end of what is there is held back as long as it may become a
tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rlsys.apps.chat.events import Kind


class Segments:
    """Of one turn."""

    def __init__(self, tags: Mapping[str, Kind]) -> None:
        """`tags` says of each word between angle brackets what it marks."""
        self._tags = tags
        self._marker = re.compile(rf"<(/?)({'|'.join(map(re.escape, tags))})>")
        self._markers = [f"<{slash}{word}>" for word in tags for slash in ("", "/")]
        self._held = ""
        self._kind = Kind.text

    def feed(self, more: str) -> Iterator[tuple[Kind, str]]:
        """The pieces that `more` completes."""
        self._held += more
        while (marker := self._marker.search(self._held)) is not None:
            kind = self._tags[marker[2]]
            yield from self._take(marker.start(), self._kind)
            yield from self._take(len(marker[0]), kind)
            self._kind = Kind.text if marker[1] else kind
        yield from self._take(len(self._held) - self._open_end(), self._kind)

    def end(self) -> Iterator[tuple[Kind, str]]:
        """What was held back."""
        yield from self._take(len(self._held), self._kind)

    def _take(self, length: int, kind: Kind) -> Iterator[tuple[Kind, str]]:
        piece, self._held = self._held[:length], self._held[length:]
        if piece:
            yield kind, piece

    def _open_end(self) -> int:
        """Characters at the end that may become a tag."""
        start = self._held.rfind("<")
        end = self._held[start:] if start >= 0 else ""
        return len(end) if any(marker.startswith(end) for marker in self._markers) else 0
