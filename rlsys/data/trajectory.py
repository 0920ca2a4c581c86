"""One finished episode: its tokens, which of them are trained, and how they came about.

Every per-token array is aligned with `tokens`: entry t speaks of token t as a *target*, that is, of
the prediction made from tokens before t. Entries of the prompt and of observations are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import CompatConfig


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
    """One generation and the environment's answer to it. "saved as" is `rlsys.weights.checkpoint.state_file.KEY`."""

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
    tool_s: float = field(metadata={"saved as": "search_s"})
    """Time that the search, or the call of the tool, took."""
    tool_error: str = field(default="", metadata={"saved as": "search_error"})
    """Why it failed; empty where it worked."""
    began_ns: int = 0
    """When the engine was asked, in ns since the epoch by the clock of its machine; 0 where it is not known. The search
    began `generate_s` later."""
    tool: str = ""
    """The name of the tool that was called, of `Action.TOOL` alone."""

    @property
    def search_s(self) -> float:
        """Former name of `tool_s`, for reward functions that were written for it."""
        return self.tool_s

    @property
    def search_error(self) -> str:
        """Former name of `tool_error`."""
        return self.tool_error


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
    sampled_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[sampled] what the engine returned, turn after turn, `generated_tokens` of each; empty where it is not known."""
    sampled_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
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


Mask = NDArray[np.bool_]
MaskOf = Callable[[Trajectory], Mask]
"""A trajectory -> [seq]"""


def trained_tokens(trajectory: Trajectory) -> Mask:
    """[seq] True where the policy generated the token."""
    return trajectory.loss_mask


def response_tokens(trajectory: Trajectory) -> Mask:
    """[seq] True after the prompt, observations included."""
    return np.arange(len(trajectory.tokens)) >= trajectory.prompt_length


def value_mask(compat: CompatConfig) -> MaskOf:
    """Where the critic learns, and over what advantages are estimated and whitened."""
    return response_tokens if compat.observations_in_values else trained_tokens
