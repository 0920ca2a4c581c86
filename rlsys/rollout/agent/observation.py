"""Observations, the environment's answers to a search or a tool's call: text inside the information tags.

Invariants: an observation always begins and ends with its own tags, however long the text is; no passage, title,
result or error can forge a tag of the protocol or of a tool, or a special token of the tokenizer. The time of the
event loop that an observation takes follows from its limit: of a longer text only the beginning is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlsys.config.schema import TagsConfig
from rlsys.rollout.agent.tokens import Codec

NOTHING_FOUND = "No results found."
NOTHING_SAID = "No result."

_CHARS_A_TOKEN = 8
"""More than most texts have, so that their beginning is tokenised once."""
_LOOK_AHEAD = 1024
"""Characters behind a token which cannot change it: four of the longest tokens that are in use, and any forgery."""


def render_search(contents: Iterable[str], error: str) -> str:
    """Passages as `Doc {i}(Title: {first line}) {rest}`, one a line, numbered from 1; or an `error` that is not empty."""
    if error:
        return f"Search failed: {error}"
    parts = (content.partition("\n") for content in contents)
    lines = [f"Doc {number}(Title: {title}) {rest}\n" for number, (title, _, rest) in enumerate(parts, start=1)]
    return "".join(lines) or NOTHING_FOUND


def render_call(tool: str, text: str, error: str) -> str:
    """The answer `text` of `tool`, or an `error` that is not empty."""
    return f"{tool} failed: {error}" if error else text or NOTHING_SAID


class Observer:
    """Wraps untrusted text into observations of limited length."""

    def __init__(self, tags: TagsConfig, codec: Codec, tools: Sequence[str] = ()) -> None:
        """`tools` are the tags of tools."""
        self._codec = codec
        self._open = f"\n\n<{tags.information}>"
        self._close = f"</{tags.information}>\n\n"
        names = (tags.search, tags.answer, tags.information, *tools)
        words = "|".join(re.escape(word.strip()) for word in names)
        specials = "".join(f"|{re.escape(text)}" for text in codec.special_texts)
        # Possessive: a "<" before n spaces would otherwise take n * n steps.
        self._forgery = re.compile(rf"<\s*+/?\s*+(?:{words})\s*+>{specials}", re.IGNORECASE)
        self.wrapper_tokens = len(codec.encode(self._open + self._close))
        """Tokens of an observation without content: no limit can be below that."""

    def observe(self, body: str, max_tokens: int) -> str:
        """The observation that holds `body`, at most `max_tokens` tokens when tokenised alone.

        Raises `ValueError` below `wrapper_tokens`.
        """
        if max_tokens < self.wrapper_tokens:
            raise ValueError(f"an observation needs {self.wrapper_tokens} tokens, {max_tokens} given")
        chars = _CHARS_A_TOKEN * max_tokens + _LOOK_AHEAD
        while chars < len(body):
            head = self._neutralise(self._beginning(body, chars)).lstrip()
            spans = self._codec.encode_spans(head).spans
            if len(spans) > max_tokens and spans[max_tokens][1] <= len(head) - _LOOK_AHEAD:
                return self._cut(head, spans, max_tokens)
            chars *= 2
        whole = self._neutralise(body).strip()
        observation = self._wrap(whole)
        if len(self._codec.encode(observation)) <= max_tokens:
            return observation
        return self._cut(whole, self._codec.encode_spans(whole).spans, max_tokens)

    def _beginning(self, text: str, chars: int) -> str:
        """The first characters of `text`, with a tag that is only closed behind them broken as in all of it."""
        start = text.rfind("<", 0, chars)
        tag = self._forgery.match(text, start) if start >= 0 else None
        if tag is None or tag.end() <= chars:
            return text[:chars]
        return f"{text[:start]}{_broken(tag.group())}"[:chars]

    def _neutralise(self, text: str) -> str:
        """Break every tag and special token by a space after its first character, until none is left."""
        while True:
            broken = self._forgery.sub(lambda match: _broken(match.group()), text)
            if broken == text:
                return text
            text = broken

    def _cut(self, body: str, spans: Sequence[tuple[int, int]], max_tokens: int) -> str:
        """The longest beginning of `body` that keeps the limit together with the tags. `spans` are its tokens."""
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
    """`marker` so that it is none any more: `</search>` becomes `(/search)`, `[INST]` becomes `[ INST]`."""
    if marker.startswith("<") and marker.endswith(">"):
        return f"({marker[1:-1]})"
    # Behind the first character that shows: a marker that begins or ends with white space would come back for ever.
    first = len(marker) - len(marker.lstrip()) + 1
    return f"{marker[:first]} {marker[first:]}" if marker[first:].strip() else " "
