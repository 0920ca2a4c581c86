"""Trajectories, samples (a trajectory with its training inputs), and prompt groups.

Per-token arrays ([seq]) are aligned with `tokens`: entry t belongs to token t as a *target*, predicted from the tokens
before t. Prompt and observation entries are masked.

A group passes through rollout -> rewards -> scores -> advantages -> training as one immutable value; each stage returns
a new group. A group always holds all episodes of its question, so a baseline over the group needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlsys.algorithms.advantages import CreditUnits
from rlsys.config.schema import CompatConfig
from rlsys.data.question import Question

Floats = NDArray[np.float32]
Routes = NDArray[np.integer[Any]]
"""[tokens, layers, k] the k experts of each layer to which a token was routed as input; see `routes_type`."""
T = TypeVar("T", bound=Any)
ANSWER_TERMS = frozenset({"exact_match", "correct_answer", "sub_em", "f1", "format", "judge"})
"""Reward terms that depend on the answer; `reward.max_answer_tags` applies to them."""


def routes_type(experts: int) -> type[np.integer[Any]]:
    """Return the type of routes to `experts` experts: a byte for each choice, two bytes if there are 256 or more."""
    return np.uint8 if experts < 256 else np.int16


def unrouted(routes: Routes) -> int:
    """Return the value of `routes` where a token's experts are unknown: the largest of its type, which is no expert."""
    return int(np.iinfo(routes.dtype).max)


class Finish(StrEnum):
    """Reason why an episode ended."""

    ANSWER = "answer"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    ABORTED = "aborted"


class Action(StrEnum):
    """Kind of action that the policy took in a turn."""

    SEARCH = "search"
    TOOL = "tool"
    """Call of one of `task.tools`, named by `Turn.tool`."""
    ANSWER = "answer"
    MESSAGE = "message"
    """Message to an agent that calls its tools itself."""
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and the observation that follows it. A further call of the same generation is a turn without tokens.

    Field metadata "saved as" is the field's name in checkpoints (`rlsys.weights.checkpoint.state_file.KEY`).
    """

    text: str
    action: Action
    content: str
    """Search query, tool input or answer; empty for an invalid action."""
    observation: str
    """Text appended to the context, verbatim; empty for an answer."""
    generated_tokens: int
    prompt_tokens: int
    """Length of the engine's input for this turn, in tokens."""
    cached_tokens: int
    """Prompt tokens that hit the engine's prefix cache."""
    generate_s: float
    tool_s: float = field(metadata={"saved as": "search_s"})
    """Duration of the search or tool call."""
    tool_error: str = field(default="", metadata={"saved as": "search_error"})
    """Error of the search or tool call; empty if it succeeded."""
    began_ns: int = 0
    """Start of the generation, in ns since the Unix epoch on the rollout worker's clock; 0 if unknown. The search or
    tool call starts `generate_s` later."""
    tool: str = ""
    """Name of the tool called; `Action.TOOL` only."""

    @property
    def search_s(self) -> float:
        """Former name of `tool_s`, kept for users' reward functions."""
        return self.tool_s

    @property
    def search_error(self) -> str:
        """Former name of `tool_error`, kept for users' reward functions."""
        return self.tool_error


@dataclass(frozen=True, slots=True)
class Branch:
    """One context of an episode: a part of its tokens, which the model reads from the beginning, on its own."""

    start: int
    """Index of the branch's first token; it ends where the next branch starts."""
    cause: str = ""
    """Reason why the branch began (`rlsys.rollout.agent.conversation_tree.Cause`); empty if the agent has one context."""
    reward: float | None = field(default=None, metadata={"added later": True})
    """Reward that the agent has returned for this branch; None for that of the episode."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Record of one finished episode. An agent may have several contexts; their tokens follow one another."""

    question_uid: str
    sample: int
    """Index of this episode among the group's `n_samples`."""
    tokens: NDArray[np.int32]
    """[seq] prompt and response tokens."""
    prompt_length: int
    loss_mask: NDArray[np.bool_]
    """[seq] True for trained tokens: those the policy sampled, and an added end-of-sequence token."""
    rollout_logprobs: NDArray[np.float32]
    """[seq] engine log-probs of the sampled tokens; NaN if re-tokenisation changed the token or tokens before it, or if
    it was not sampled."""
    versions: NDArray[np.int32]
    """[seq] weight version that sampled the token, or the oldest version of its turn if re-tokenisation changed the
    token or tokens before it; -1 if it was not sampled."""
    turn_of_token: NDArray[np.int32]
    """[seq] index into `turns` for trained tokens; -1 elsewhere. An added end-of-sequence token belongs to the last
    turn. A turn may own no token."""
    tokens_differing: int
    """Number of trained tokens that differ from those the engine sampled (re-tokenisation drift)."""
    response: str
    """Text after the prompt, observations included."""
    turns: tuple[Turn, ...]
    finish: Finish
    sampled_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[sampled] token ids that the engine returned: `generated_tokens` ids of each turn, joined; empty if unknown."""
    sampled_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """[sampled] natural log-probs of `sampled_ids` at the sampling temperature."""
    branches: tuple[Branch, ...] = field(default=(Branch(0),), metadata={"added later": True})
    """Branches in the order of `tokens`. A sampled token is trained in one of them, and is context in the others."""

    agent_reward: float | None = field(default=None, metadata={"added later": True})
    """Reward that the agent has returned, which replaces the configured one; None if it has not."""
    routes: Routes | None = field(default=None, metadata={"added later": True})
    """Experts that the engine chose for each token as input, so the last token has none; None without
    `algorithm.router_replay`."""

    @property
    def searches(self) -> int:
        """Number of searches executed."""
        return sum(turn.action is Action.SEARCH and bool(turn.observation) for turn in self.turns)

    @property
    def tool_calls(self) -> int:
        """Number of tool calls executed, searches excluded."""
        return sum(turn.action is Action.TOOL and bool(turn.observation) for turn in self.turns)

    @property
    def answer(self) -> str | None:
        """Text between the answer tags of the last turn; None without an answer."""
        last = self.turns[-1] if self.turns else None
        return last.content if last and last.action is Action.ANSWER else None


Mask = NDArray[np.bool_]
MaskOf = Callable[[Trajectory], Mask]
"""Trajectory -> mask [seq]."""


def trained_tokens(trajectory: Trajectory) -> Mask:
    """Return the loss mask [seq]."""
    return trajectory.loss_mask


def response_tokens(trajectory: Trajectory) -> Mask:
    """Return the mask [seq] of all tokens after the prompt, observations included."""
    return np.arange(len(trajectory.tokens)) >= trajectory.prompt_length


def value_mask(compat: CompatConfig) -> MaskOf:
    """Return the function that selects the tokens used to train the critic and to compute and whiten advantages."""
    return response_tokens if compat.observations_in_values else trained_tokens


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """Top-k tokens at each trained position, for a KL term that sums over them."""

    tokens: NDArray[np.int32]
    """[trained tokens, k] token ids: top k of the policy for reverse KL, or of the reference policy for forward KL."""
    logprobs: Floats
    """[trained tokens, k] log-probs of `tokens` under the reference policy."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one trajectory from the inference group and the critic."""

    policy: Floats | None = None
    """[seq] log-probs under the policy; 0 for untrained tokens. None if the actor computes them while it trains."""
    reference: Floats | None = None
    """[seq] log-probs under the reference policy; None without a reference policy."""
    picks: TopkLogprobs | None = None
    values: Floats | None = None
    """[seq] the critic's value of the context before the token; None without a critic."""
    version: int | None = None
    """Weight version that computed `policy`; None if `policy` is None or holds the engine's log-probs."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with its training inputs: rewards, advantages, log-probs and values."""

    trajectory: Trajectory
    reward: float
    turn_rewards: tuple[float, ...]
    """Reward of each turn; they sum to `reward` up to rounding."""
    parts: Mapping[str, float]
    """Reward term -> its value."""
    advantages: Floats
    """[seq] advantages; zeros until they are computed."""
    old_logprobs: Floats | None = None
    """[seq] log-probs in the denominator of the ratio: under the weights from which the update starts, or under a
    recent version (the proximal policy)."""
    ref_logprobs: Floats | None = None
    """[seq] log-probs under the reference policy."""
    weights: Floats | None = None
    """[seq] correction factor of each token, from its old and engine log-probs; None means 1 for all tokens."""
    picks: TopkLogprobs | None = None
    values: Floats | None = None
    """[seq] the critic's values before the update; None without a critic."""
    returns: Floats | None = None
    """[seq] the critic's regression targets; None without a critic."""
    units: CreditUnits | None = None
    """Input of the advantages that also depend on other groups of the mini-batch; None if they do not."""
    kl_sum: float | None = None
    """KL to the reference policy in nats, summed over trained tokens; `kl_coef` times this sum is the KL penalty in the
    reward. None if the reward has no KL penalty."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward."""
    scored_version: int | None = None
    """Weight version that computed `old_logprobs`; None if they are the engine's, or not known yet."""
    episode_tokens: int | None = None
    """Trained tokens of the whole episode, if this sample is one branch of it; None if it is the whole episode."""
    counts_episode: bool = True
    """False for a branch of an episode that another branch counts in divisors of a loss."""

    def with_scores(self, scores: Scores) -> Sample:
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
        return int(self.trajectory.loss_mask.sum())

    def by_branch(self) -> list[Sample]:
        """Return a sample for each branch, which a model can read as one sequence; this sample if it has one branch."""
        branches = self.trajectory.branches
        if len(branches) == 1:
            return [self]
        starts = [branch.start for branch in branches]
        ends = [*starts[1:], len(self.trajectory.tokens)]
        trained = np.concatenate([[0], np.cumsum(self.trajectory.loss_mask)])
        return [
            replace(
                _cut(self, ("advantages", "old_logprobs", "ref_logprobs", "weights", "values", "returns"), start, end),
                trajectory=_cut(
                    replace(self.trajectory, branches=(replace(branch, start=0),)),
                    ("tokens", "loss_mask", "rollout_logprobs", "versions", "turn_of_token", "routes"),
                    start,
                    end,
                ),
                picks=self.picks and _cut(self.picks, ("tokens", "logprobs"), trained[start], trained[end]),
                episode_tokens=self.trained_tokens,
                counts_episode=number == 0,
            )
            for number, (branch, start, end) in enumerate(zip(branches, starts, ends, strict=True))
        ]


def _cut(record: T, names: Sequence[str], start: int, end: int) -> T:
    """Return `record` with the entries from `start` to `end` of the named arrays, as far as it has them."""
    arrays = {name: array[start:end] for name in names if (array := getattr(record, name)) is not None}
    return replace(record, **arrays)


@dataclass(frozen=True, slots=True)
class Group:
    """Prompt group: all samples of one question."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that sampled a token of the group; None if no token has a version."""
        versions = [known[known >= 0] for known in (sample.trajectory.versions for sample in self.samples)]
        return min((int(known.min()) for known in versions if known.size), default=None)

    @property
    def has_spread(self) -> bool:
        """True if the answers of the group earned different rewards.

        Compares only the reward terms in `ANSWER_TERMS`: a group whose answers are all correct or all incorrect has no
        spread, even if a length penalty differs (DAPO, arXiv 2503.14476, eq. 11). Rewards without such terms are
        compared as a whole. A branch whose reward differs from that of its episode is a spread too.
        """
        if any(each.reward not in (None, one.reward) for one in self.samples for each in one.trajectory.branches):
            return True

        def earned(sample: Sample) -> tuple[float, ...]:
            by_answer = tuple(sample.parts[term] for term in sorted(ANSWER_TERMS & sample.parts.keys()))
            return by_answer or (sample.reward,)

        return len(set(map(earned, self.samples))) > 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples, prompts included."""
        return sum(len(sample.trajectory.tokens) for sample in self.samples)
