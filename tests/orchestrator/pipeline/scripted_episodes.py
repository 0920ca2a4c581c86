"""Episodes of scripted engines: each has a token for each version that sampled it, and marks of its own."""

from __future__ import annotations

from functools import cache

import numpy as np

from rlsys.data.trajectory import Finish, Floats, Sample, Trajectory
from rlsys.rollout.agent.tokens import PartialEpisode


def ticket_of(sample: Sample) -> int:
    """The prompt group that the sample comes from."""
    return int(sample.trajectory.response)


def mark(sample: Sample) -> Floats:
    """Log-probs that belong to this sample alone."""
    return np.full(len(sample.trajectory.tokens), -(10 * ticket_of(sample) + sample.trajectory.sample), np.float32)


def ones(sample: Sample) -> Floats:
    return np.ones(len(sample.trajectory.tokens), np.float32)


def partial_episode(uid: str, sample: int, versions: tuple[int, ...]) -> PartialEpisode:
    """An episode with a token for each of `versions`."""
    sampled = np.array(versions, np.int32)
    return PartialEpisode(
        question_uid=uid,
        sample=sample,
        turns=(),
        token_ids=sampled,
        logprobs=np.full(len(sampled), np.nan, np.float32),
        versions=sampled,
        ended_itself=np.ones(len(sampled), np.bool_),
    )


def whole_episode(uid: str, prompt_group: int, sample: int, versions: tuple[int, ...]) -> Trajectory:
    tokens, mask, with_prompt, turn_of_token, nothing = _arrays(versions)
    return Trajectory(
        question_uid=uid,
        sample=sample,
        tokens=tokens,
        prompt_length=1,
        loss_mask=mask,
        rollout_logprobs=nothing,
        versions=with_prompt,
        turn_of_token=turn_of_token,
        tokens_differing=0,
        response=str(prompt_group),
        turns=(),
        finish=Finish.ANSWER if versions else Finish.ABORTED,
    )


@cache
def _arrays(versions: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Tokens, mask, versions, turns and log-probs of one prompt token and a token for each of `versions`."""
    length = len(versions) + 1
    mask = np.arange(length) > 0
    return (
        np.ones(length, np.int32),
        mask,
        np.array([-1, *versions], np.int32),
        np.arange(-1, length - 1, dtype=np.int32),
        np.full(length, np.nan, np.float32),
    )
