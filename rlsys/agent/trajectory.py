"""What one episode leaves behind: tokens, what of them is trained, and how they came about.

Every per-token array is aligned with `tokens`: entry t speaks of token t as a *target*, that is, of
the prediction made from tokens before t. Entries of the prompt and of observations are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Finish(StrEnum):
    """Why an episode ended."""

    ANSWER = "answer"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    ABORTED = "aborted"


class Action(StrEnum):
    """What the policy did in a turn."""

    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and what the environment said to it."""

    text: str
    action: Action
    content: str
    """The query, the answer, or an empty string."""
    observation: str
    """What was appended to the context, verbatim; empty for an answer."""
    generated_tokens: int
    prompt_tokens: int
    """Tokens handed to the engine for this turn."""
    cached_tokens: int
    """How many of them the engine found in its prefix cache."""
    generate_s: float
    search_s: float
    search_error: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode of one question."""

    question_uid: str
    sample: int
    """Which of the group's `n_samples` this is."""
    tokens: NDArray[np.int32]
    """[seq] prompt and response."""
    prompt_length: int
    loss_mask: NDArray[np.bool_]
    """[seq] True where the policy generated the token and it is trained."""
    rollout_logprobs: NDArray[np.float32]
    """[seq] the engine's log-probs of the sampled tokens; NaN where there is none to compare."""
    versions: NDArray[np.int32]
    """[seq] policy version that sampled the token; -1 where nothing was sampled."""
    turn_of_token: NDArray[np.int32]
    """[seq] index into `turns` of the one that a trained token belongs to; -1 where nothing is trained. An added
    end-of-sequence token belongs to the last turn; a turn may have no token at all."""
    tokens_differing: int
    """Trained tokens that are not what the engine sampled (re-tokenisation drift)."""
    response: str
    """Everything after the prompt as text, observations included."""
    turns: tuple[Turn, ...]
    finish: Finish

    @property
    def searches(self) -> int:
        """Searches carried out."""
        return sum(turn.action is Action.SEARCH and bool(turn.observation) for turn in self.turns)

    @property
    def answer(self) -> str | None:
        """What stood between the answer tags of the last turn, or None without an answer."""
        last = self.turns[-1] if self.turns else None
        return last.content if last and last.action is Action.ANSWER else None
