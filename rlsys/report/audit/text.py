"""The text of a kept episode, tokenised anew, and the drawn tokens of each of its turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import TokenMode
from rlsys.observe.kept import Kept
from rlsys.report.audit.stretches import Span
from rlsys.rollout.agent.codec import Encoded


class Tokeniser(Protocol):
    """What the audit asks of a `Codec`."""

    special_ids: frozenset[int]

    def prompt(self, question: str) -> str:
        """The prompt as it was given to the policy."""

    def encode_spans(self, text: str) -> Encoded:
        """Tokens of a text, with their characters."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""


class OtherTokeniser(ValueError):
    """The tokeniser is not the one of the run."""


@dataclass(frozen=True, slots=True)
class Text:
    """A whole episode."""

    text: str
    ids: NDArray[np.int32]
    """[tokens]"""
    spans: Sequence[Span]
    """[tokens] characters of each; neither starts nor ends ever fall."""
    turns: Sequence[Span]
    """Characters of each turn."""
    limit: int
    """Tokens that count: those behind it were cut off to keep the run's limit."""

    def within(self, turn: Span) -> Span:
        """Indices of the tokens that overlap the characters `turn`."""
        starts, ends = np.array(self.spans, np.int64).reshape(-1, 2).T
        first = int(np.searchsorted(ends, turn[0], side="right"))
        return first, max(first, int(np.searchsorted(starts, turn[1], side="left")))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the engine drew for a turn, as far as it is text and kept."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    special_lost: int
    """Special tokens that the text does not hold, without an end-of-sequence token that training has."""


def tokenised(one: Kept, codec: Tokeniser, mode: TokenMode) -> Text:
    """The text of `one`, tokenised by `codec`. Raises OtherTokeniser if the run's tokens are not of it."""
    text = codec.prompt(one.prompt)
    prompt_length = len(text)
    turns = []
    for number, turn in enumerate(one.turns):
        said = turn.text if mode is TokenMode.retokenize else codec.decode(_own(one, number))
        turns.append((len(text), len(text) + len(said)))
        text += said + turn.observation
    encoded = codec.encode_spans(text)
    ids = np.array(encoded.ids, np.int32)
    if mode is TokenMode.retokenize:
        as_trained, limit = ids, len(one.token_ids)
    else:
        as_trained, limit = np.array(codec.encode_spans(text[:prompt_length]).ids, np.int32), len(ids)
    shared = min(len(as_trained), len(one.token_ids))
    if not np.array_equal(as_trained[:shared], one.token_ids[:shared]):
        raise OtherTokeniser(
            f"Step {one.step}, question {one.question_uid}, sample {one.sample} has other tokens than this tokeniser makes "
            "of its text"
        )
    return Text(text, ids, encoded.spans, turns, limit)


def drawn_of(one: Kept, number: int, mode: TokenMode, special_ids: frozenset[int]) -> Drawn:
    """What was drawn for turn `number` of `one`."""
    turn = one.turns[number]
    kept = len(turn.sampled_ids) if mode is TokenMode.retokenize else len(_own(one, number))
    ids, logprobs = turn.sampled_ids[:kept], turn.sampled_logprobs[:kept].astype(np.float64)
    special = np.isin(ids, list(special_ids))
    last_is_own = one.turn_of_token[-1] == number and one.versions[-1] >= 0
    ended = bool(last_is_own and len(ids) and special[-1] and one.token_ids[-1] == ids[-1])
    return Drawn(ids[~special], logprobs[~special], int(special.sum()) - ended)


def _own(one: Kept, number: int) -> list[int]:
    """The trained tokens that turn `number` drew."""
    ids: list[int] = one.token_ids[(one.turn_of_token == number) & (one.versions >= 0)].tolist()
    return ids
