"""Text to tokens and back, by one tokenizer, with the character span of every token.

Contract: nothing is added (no BOS, no EOS), nothing is cleaned up; the templated prompt brings its own
special tokens as text. Spans are conservative: where a tokenizer leaves white space out of its offsets
(`trim_offsets`), the gap counts to the token on each side, so that a token is never taken for purely
generated text when it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.errors import UserError


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as tokens."""

    ids: list[int]
    spans: list[tuple[int, int]]
    """Half-open character range of each token in the text."""


class Codec:
    """A Hugging Face fast tokenizer, reduced to what an episode needs.

    Raises `UserError` for a tokenizer without character offsets or without an end-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        name = getattr(tokenizer, "name_or_path", "")
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"The tokenizer of {name!r} gives no character offsets; use a fast tokenizer (tokenizer.json)."
            )
        if tokenizer.eos_token_id is None:
            raise UserError(f"The tokenizer of {name!r} has no end-of-sequence token; set eos_token in its config.")
        self._tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        added = tokenizer.added_tokens_decoder.values()
        self.special_texts: tuple[str, ...] = tuple(
            sorted({str(token) for token in added if token.special and str(token).strip()})
        )
        """Texts that the tokenizer turns into one reserved token wherever they stand."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode_spans(self, text: str) -> Encoded:
        """Token ids of `text` with their character spans."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return Encoded(encoding["input_ids"], _close_gaps(encoding["offset_mapping"], len(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def prompt(self, question: str) -> str:
        """`question` as one user message where the tokenizer has a chat template, else as it stands.

        One that holds a special token of the model has been through a template, and stays as it is too.
        """
        if self._tokenizer.chat_template is None or any(text in question for text in self.special_texts):
            return question
        message = [{"role": "user", "content": question}]
        text: str = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return text


def _close_gaps(offsets: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Widen spans over characters that no token claims.

    Tokens of one multi-byte character share its range, so ends may repeat but never fall.
    """
    spans = []
    for index, (start, end) in enumerate(offsets):
        before = offsets[index - 1][1] if index else 0
        after = offsets[index + 1][0] if index + 1 < len(offsets) else length
        spans.append((min(start, before), max(end, after)))
    return spans
