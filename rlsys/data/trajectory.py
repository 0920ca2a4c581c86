"""One finished episode, what the update needs of it, and the group of a question's episodes.

Every per-token array is aligned with `tokens`: entry t speaks of token t as a *target*, that is, of
the prediction made from tokens before t. Entries of the prompt and of observations are masked.

A group walks rollout -> rewards -> scores -> advantages -> training as one value; each stage returns a new one.
Every episode of a group stays in it, so that what it is compared with is there as soon as the group is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rlsys.algorithms.advantages import Units
from rlsys.config.schema import CompatConfig
from rlsys.data.question import Question

Floats = NDArray[np.float32]
ANSWER_TERMS = frozenset({"exact_match", "correct_answer", "sub_em", "f1", "format", "judge"})
"""Terms of the reward that the answer earns; `reward.max_answer_tags` bounds them."""


class Finish(StrEnum):
    """The reason for which an episode ended."""

    ANSWER = "answer"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    ABORTED = "aborted"


class Action(StrEnum):
    """The policy's act in a turn."""

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
        """The text between the answer tags of the last turn, or None without an answer."""
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
    """The tokens on which the critic learns, and over which advantages are estimated and whitened."""
    return response_tokens if compat.observations_in_values else trained_tokens


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """The most likely tokens in the place of each trained token, for a KL term that sums over them."""

    tokens: NDArray[np.int32]
    """[trained tokens, k] the largest of one policy; which one, the KL term's direction says."""
    logprobs: Floats
    """[trained tokens, k] what the reference policy gives them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One trajectory's scores from the scoring groups."""

    policy: Floats
    """[seq] log-probs under the policy; 0 where nothing is trained."""
    reference: Floats | None = None
    """[seq] log-probs under the reference policy; None without one."""
    picks: TopkLogprobs | None = None
    values: Floats | None = None
    """[seq] what the critic expects before the token is known; None without a critic."""
    version: int | None = None
    """Version of the policy; None where the log-probs are the sampler's own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with what the update needs of it."""

    trajectory: Trajectory
    reward: float
    turn_rewards: tuple[float, ...]
    """The reward, turn by turn."""
    parts: Mapping[str, float]
    """Term of the reward -> what it came to."""
    advantages: Floats
    """[seq]; zeros until they are worked out."""
    old_logprobs: Floats | None = None
    """[seq] under the policy that the update sets out from, or a recent one (the proximal policy)."""
    ref_logprobs: Floats | None = None
    """[seq] under the reference policy."""
    weights: Floats | None = None
    """[seq] factor of each token's advantage, correcting for an older sampler; None is 1 for all."""
    picks: TopkLogprobs | None = None
    values: Floats | None = None
    """[seq] the critic's, before the update; None without a critic."""
    returns: Floats | None = None
    """[seq] what the critic is trained on; None without one."""
    units: Units | None = None
    """The group's part of the advantages, where they depend on the mini-batch too; None elsewhere."""
    kl_sum: float | None = None
    """KL to the reference policy that was taken off the rewards, without its weight and summed over trained tokens,
    in nats; None where it is no part of the reward."""
    kl_coef: float = 0.0
    """The weight with which it was taken off."""
    scored_version: int | None = None
    """Version of the policy that `old_logprobs` are under, where they were recomputed."""

    def with_scores(self, scores: Scores) -> Sample:
        """The same sample after the scoring stage."""
        return replace(
            self,
            old_logprobs=scores.policy,
            ref_logprobs=scores.reference,
            picks=scores.picks,
            values=scores.values,
            scored_version=scores.version,
        )

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return int(self.trajectory.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one question."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled a trained token; None if no such token is known."""
        versions = [known[known >= 0] for known in (sample.trajectory.versions for sample in self.samples)]
        return min((int(known.min()) for known in versions if known.size), default=None)

    @property
    def has_spread(self) -> bool:
        """Some answers earned more than others, so that the group tells right from wrong.

        Compares the reward's terms of the answer: all right, or all wrong, is no spread, whatever a penalty of length
        makes of it (DAPO, arXiv 2503.14476, eq. 11). A reward without one is compared as a whole.
        """

        def earned(sample: Sample) -> tuple[float, ...]:
            by_answer = tuple(sample.parts[term] for term in sorted(ANSWER_TERMS & sample.parts.keys()))
            return by_answer or (sample.reward,)

        return len(set(map(earned, self.samples))) > 1

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(len(sample.trajectory.tokens) for sample in self.samples)
