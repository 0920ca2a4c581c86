"""What happens while a question is answered, as plain values; every front end shows these and nothing else.

Order of a question: `Asked`; then of each turn `Text` as it is generated, one `Acted`, after a search one `Found`, and
`Observed` with what the policy reads next; at last one `Ended`. A question that cannot be answered to its end has
`Failed` in place of what is missing. The texts of `Text` and `Observed`, one after the other, are the response as the
policy and its training see it, and the beginning of a turn that ran out of time. Nothing in them is escaped: whoever shows them does that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

TIME_LIMIT = "time_limit"
"""How an episode has ended that ran out of time."""


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
    prompt: str
    """What the policy is given for it, before the chat template of the tokenizer."""


@dataclass(frozen=True, slots=True)
class Text:
    """The policy has written more."""

    turn: int
    """Counted from 0."""
    kind: Kind
    text: str
    """New since the last one, tags included."""


@dataclass(frozen=True, slots=True)
class Acted:
    """A turn is over."""

    turn: int
    action: str
    """search, tool, answer or invalid."""
    tool: str
    """The name of the tool; empty for everything else."""
    content: str
    """The query, the text for the tool, the answer, or an empty string."""
    tokens: int
    """Sampled in this turn."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """A search has come back."""

    turn: int
    query: str
    passages: tuple[Hit, ...]
    """Best first, whole; the policy may be given less of them, see `Observed`."""
    error: str
    """Why the search failed; empty when it worked."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What the environment has appended to the turn, verbatim."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """There will be no more."""

    answer: str | None
    """None where the policy has not given one."""
    finish: str
    """answer, turn_limit, token_limit, time_limit or, by the engine, aborted."""
    searches: int
    tool_calls: int
    tokens: int
    """Sampled in all turns."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The question is not answered, for a reason that is not the policy's."""

    reason: str


Event = Asked | Text | Acted | Found | Observed | Ended | Failed


def as_dict(event: Event) -> dict[str, Any]:
    """JSON values, with the kind of the event, such as `text`, under `event`."""
    return {"event": type(event).__name__.lower(), **asdict(event)}
