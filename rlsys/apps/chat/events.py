"""Events of a question while it is answered, as plain values; every front end shows these and nothing else.

Order of a question: `Asked`; then of each turn `TextPiece` as it is generated, one `Acted`, after a search one `Found`,
and `Observed` with what the policy reads next; at last one `EpisodeEnded`. A question that cannot be answered to its end
has `Failed` in place of what is missing. The texts of `TextPiece` and `Observed`, one after the other, are the response
as the policy and its training see it, and the beginning of a turn that ran out of time. Nothing in them is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

TIME_LIMIT = "time_limit"  # How an episode has ended that ran out of time


class Kind(StrEnum):
    """What a piece of generated text is, by the tags around it."""

    text = "text"
    thought = "thought"
    search = "search"
    answer = "answer"
    tool = "tool"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question has been taken."""

    question: str
    prompt: str  # What the policy is given for it, before the chat template of the tokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The policy has written more."""

    turn: int  # Counted from 0
    kind: Kind
    text: str  # New since the last one, tags included


@dataclass(frozen=True, slots=True)
class Acted:
    """A turn is over."""

    turn: int
    action: str  # search, tool, answer or invalid
    tool: str  # The name of the tool; empty for everything else
    content: str  # The query, the text for the tool, the answer, or an empty string
    tokens: int  # Sampled in this turn
    seconds: float


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A passage that was found."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """A search has come back."""

    turn: int
    query: str
    passages: tuple[FoundPassage, ...]
    """Best first, whole; the policy may be given less of them, see `Observed`."""
    error: str  # Why the search failed; empty when it worked
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment has appended `text` to the turn, verbatim."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """There will be no more."""

    answer: str | None  # None where the policy has not given one
    finish: str  # answer, turn_limit, token_limit, time_limit or, by the engine, aborted
    searches: int
    tool_calls: int
    tokens: int  # Sampled in all turns
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The question is not answered, for a reason that is not the policy's."""

    reason: str


Event = Asked | TextPiece | Acted | Found | Observed | EpisodeEnded | Failed
_NAMES = {TextPiece: "text", EpisodeEnded: "ended"}  # In JSON, of events that are not called as their class


def as_dict(event: Event) -> dict[str, Any]:
    """JSON values, with the kind of the event, such as `text`, under `event`."""
    return {"event": _NAMES.get(type(event), type(event).__name__.lower()), **asdict(event)}


class Segments:
    """Tells the text of one turn apart by its tags while it streams. Pure.

    Invariants: the pieces, one after the other, are the text; what kind a character is of does not depend on how the text
    was cut into parts. A tag counts to what it opens or closes. An end that may become a tag is held back.
    """

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
        """The text that was held back."""
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
