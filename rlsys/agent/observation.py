"""What the environment says to a search or a tool's call: text inside the information tags.

Invariants: an observation always begins and ends with its own tags, however long the text is; no passage, title,
result or error can forge a tag of the protocol or of a tool, or a special token of the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlsys.agent.codec import Codec
from rlsys.config.schema import TagsConfig

NOTHING_FOUND = "No results found."
NOTHING_SAID = "No result."


def render_passages(contents: Iterable[str]) -> str:
    """Passages as `Doc {i}(Title: {first line}) {rest}`, one a line, numbered from 1."""
    lines = []
    for number, content in enumerate(contents, start=1):
        title, _, rest = content.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {rest}\n")
    return "".join(lines)


def render_error(error: str) -> str:
    """What the policy reads when a search failed."""
    return f"Search failed: {error}"


def render_call(tool: str, said: str, error: str) -> str:
    """What the policy reads when `tool` has `said` something or, for an `error` that is not empty, failed."""
    return f"{tool} failed: {error}" if error else said or NOTHING_SAID


class Observer:
    """Wraps untrusted text into observations of limited length."""

    def __init__(self, tags: TagsConfig, codec: Codec, tools: Sequence[str] = ()) -> None:
        """`tools` are the tags of tools."""
        self._codec = codec
        self._open = f"\n\n<{tags.information}>"
        self._close = f"</{tags.information}>\n\n"
        words = "|".join(re.escape(word) for word in (tags.search, tags.answer, tags.information, *tools))
        specials = "".join(f"|{re.escape(text)}" for text in codec.special_texts)
        self._forgery = re.compile(rf"<\s*/?\s*(?:{words})\s*>{specials}", re.IGNORECASE)
        self.wrapper_tokens = len(codec.encode(self._open + self._close))
        """Tokens of an observation without content: no limit can be below that."""

    def observe(self, contents: Sequence[str], error: str, max_tokens: int) -> str:
        """The observation of a search, at most `max_tokens` tokens when tokenised alone.

        `error` is empty for a search that worked. Raises `ValueError` below `wrapper_tokens`.
        """
        return self.tell(
            render_error(error) if error else render_passages(contents) or NOTHING_FOUND, max_tokens
        )

    def tell(self, body: str, max_tokens: int) -> str:
        """The observation that says `body`, limited as that of a search is."""
        if max_tokens < self.wrapper_tokens:
            raise ValueError(f"an observation needs {self.wrapper_tokens} tokens, {max_tokens} given")
        return self._fit(self._neutralise(body).strip(), max_tokens)

    def _neutralise(self, text: str) -> str:
        """Break every tag and special token by a space after its first character, until none is left."""
        while True:
            broken = self._forgery.sub(lambda match: _broken(match.group()), text)
            if broken == text:
                return text
            text = broken

    def _fit(self, body: str, max_tokens: int) -> str:
        """Cut `body` so that it and the tags keep the limit."""
        observation = self._wrap(body)
        if len(self._codec.encode(observation)) <= max_tokens:
            return observation
        spans = self._codec.encode_spans(body).spans
        keep = min(max_tokens - self.wrapper_tokens, len(spans))
        while keep > 0:
            # A cut may split a character's tokens or merge anew with the tag, so the result is counted.
            observation = self._wrap(body[: spans[keep - 1][1]].rstrip())
            if len(self._codec.encode(observation)) <= max_tokens:
                return observation
            keep -= 1
        return self._wrap("")

    def _wrap(self, body: str) -> str:
        return f"{self._open}{body}{self._close}"


def _broken(marker: str) -> str:
    """`marker` so that it is none any more: `</search>` becomes `(/search)`."""
    if marker.startswith("<") and marker.endswith(">"):
        return f"({marker[1:-1]})"
    return f"{marker[0]} {marker[1:]}" if len(marker) > 1 else " "
