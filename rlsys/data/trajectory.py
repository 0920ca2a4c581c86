"""What one episode leaves behind: tokens, what of them is trained, and how they came about.

Every per-token array is aligned with `tokens`: entry t speaks of token t as a *target*, that is, of
the prediction made from tokens before t. Entries of the prompt and of observations are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    TOOL = "tool"
    """One of `task.tools`; `Turn.tool` says which."""
    ANSWER = "answer"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and what the environment said to it."""

    text: str
    action: Action
    content: str
    """The query, what a tool was given, the answer, or an empty string."""
    observation: str
    """What was appended to the context, verbatim; empty for an answer."""
    generated_tokens: int
    prompt_tokens: int
    """Tokens handed to the engine for this turn."""
    cached_tokens: int
    """How many of them the engine found in its prefix cache."""
    generate_s: float
    search_s: float
    """Time that the search, or the call of the tool, took."""
    search_error: str = ""
    """Why it failed; empty where it worked."""
    began_ns: int = 0
    """When the engine was asked, in ns since the epoch by the clock of its machine; 0 where it is not known. The search
    began `generate_s` later."""
    tool: str = ""
    """The name of the tool that was called, of `Action.TOOL` alone."""


def _nothing(kind: type[np.int32] | type[np.float32]) -> Callable[[], NDArray[Any]]:
    return lambda: np.empty(0, kind)


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
    sampled_ids: NDArray[np.int32] = field(default_factory=_nothing(np.int32))
    """[sampled] what the engine returned, turn after turn, `generated_tokens` of each; empty where it is not known."""
    sampled_logprobs: NDArray[np.float32] = field(default_factory=_nothing(np.float32))
    """[sampled] their natural log-probs under the sampling temperature."""

    @property
    def searches(self) -> int:
        """Searches carried out."""
        return sum(turn.action is Action.SEARCH and bool(turn.observation) for turn in self.turns)

    @property
    def tool_calls(self) -> int:
        """Calls of tools carried out; searches are none."""
        return sum(turn.action is Action.TOOL and bool(turn.observation) for turn in self.turns)

    @property
    def answer(self) -> str | None:
        """What stood between the answer tags of the last turn, or None without an answer."""
        last = self.turns[-1] if self.turns else None
        return last.content if last and last.action is Action.ANSWER else None
