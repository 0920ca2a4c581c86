"""Turns untrusted text, such as passages and results of tools, into observations.

Invariants:
- An observation begins and ends with its own tags, whatever its length. No passage, title, result or error can forge a
  tag of the protocol or of a tool, or a special token of the tokenizer.
- A long text does not block the event loop for long: only the beginning is processed, as far as the token limit of an
  observation needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlsys.rollout.agent.tokens import Codec

_CHARS_A_TOKEN = 8
"""Assumed characters per token: more than in most texts, so that tokenising the beginning once usually suffices."""
_LOOK_AHEAD = 1024
"""Maximum number of following characters on which a token depends; no forged tag and no four tokens are as long."""


class Observer:
    """Wraps untrusted text into observations of limited length."""

    def __init__(self, codec: Codec, tags: Sequence[str], opening: str = "", closing: str = "") -> None:
        """`tags` are the names of all tags that a text must not forge; `opening` and `closing` surround each text."""
        self._codec = codec
        self._open, self._close = opening, closing
        words = "|".join(re.escape(tag.strip()) for tag in tags)
        specials = "".join(f"|{re.escape(text)}" for text in codec.special_texts)
        # Possessive quantifiers: otherwise "<" before n spaces takes n * n steps.
        self._forgery = re.compile(rf"<\s*+/?\s*+(?:{words})\s*+>{specials}", re.IGNORECASE)
        self.wrapper_tokens = len(codec.encode(self._open + self._close))
        """Number of tokens of an empty observation: the smallest possible limit."""

    def observe(self, body: str, max_tokens: int) -> str:
        """Return `body` as an observation that has at most `max_tokens` tokens if tokenised on its own.

        Raises ValueError if `max_tokens` is below `wrapper_tokens`.
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
        """Return the first `chars` characters of `text`. A tag that begins in them but ends later is neutralised."""
        start = text.rfind("<", 0, chars)
        tag = self._forgery.match(text, start) if start >= 0 else None
        if tag is None or tag.end() <= chars:
            return text[:chars]
        return f"{text[:start]}{_broken(tag.group())}"[:chars]

    def _neutralise(self, text: str) -> str:
        """Neutralise tags and special tokens until none is left.

        Angle brackets become parentheses; a special token without angle brackets is split by a space.
        """
        while True:
            broken = self._forgery.sub(lambda match: _broken(match.group()), text)
            if broken == text:
                return text
            text = broken

    def _cut(self, body: str, spans: Sequence[tuple[int, int]], max_tokens: int) -> str:
        """Return an observation with the longest prefix of `body` for which it has at most `max_tokens` tokens.

        `spans` are the character ranges of the tokens of `body`.
        """
        keep = min(max_tokens - self.wrapper_tokens, len(spans))
        while keep > 0:
            # The cut may split a character or change the tokens at the tag, so count the result.
            observation = self._wrap(body[: spans[keep - 1][1]].rstrip())
            if len(self._codec.encode(observation)) <= max_tokens:
                return observation
            keep -= 1
        return self._wrap("")

    def _wrap(self, body: str) -> str:
        return f"{self._open}{body}{self._close}"


def _broken(marker: str) -> str:
    """Neutralise `marker`: `</search>` becomes `(/search)`, `[INST]` becomes `[ INST]`."""
    if marker.startswith("<") and marker.endswith(">"):
        return f"({marker[1:-1]})"
    # Split after the first visible character: otherwise a marker with white space at an end matches again for ever.
    first = len(marker) - len(marker.lstrip()) + 1
    return f"{marker[:first]} {marker[first:]}" if marker[first:].strip() else " "
