"""Makes small trajectories, samples and questions."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Sample, Trajectory, Turn


def trajectory(
    tokens: Sequence[int] = (1, 2),
    mask: Sequence[bool] | None = None,
    *,
    uid: str = "q:1",
    sample: int = 0,
    turns: Sequence[Turn] = (),
    finish: Finish = Finish.ANSWER,
    tokens_differing: int = 0,
    rollout_logprobs: Sequence[float] | None = None,
    version: int = 0,
    turn_of_token: Sequence[int] | None = None,
) -> Trajectory:
    """Trajectory of `tokens`; by default all tokens but the first are trained, and trained tokens belong to turn 0."""
    trained = list(mask) if mask is not None else [False] + [True] * (len(tokens) - 1)
    logprobs = rollout_logprobs if rollout_logprobs is not None else [float("nan")] * len(tokens)
    return Trajectory(
        question_uid=uid,
        sample=sample,
        tokens=np.array(tokens, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.array(trained, dtype=np.bool_),
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.where(trained, version, -1).astype(np.int32),
        turn_of_token=np.array(np.where(trained, 0, -1) if turn_of_token is None else turn_of_token, dtype=np.int32),
        tokens_differing=tokens_differing,
        response="",
        turns=tuple(turns),
        finish=finish,
    )


def sample(
    tokens: Sequence[int],
    mask: Sequence[bool],
    *,
    advantage: float | Sequence[float] = 1.0,
    old: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
) -> Sample:
    """Sample with the given log-probs, and with one advantage for all tokens or one for each."""
    return Sample(
        trajectory(tokens, mask),
        reward=0.0,
        turn_rewards=(0.0,),
        parts={},
        advantages=np.broadcast_to(np.float32(advantage), len(tokens)),
        old_logprobs=None if old is None else np.array(old, dtype=np.float32),
        ref_logprobs=None if reference is None else np.array(reference, dtype=np.float32),
    )


def rewarded(one: Trajectory, reward: float) -> Sample:
    """Sample with a reward, without log-probs and with zero advantages."""
    return Sample(one, reward, (reward,), {}, np.zeros(len(one.tokens), np.float32))


def question(number: int) -> Question:
    return Question(f"q:{number}", "?", ("yes",))


def same(one: Any, other: Any) -> bool:
    """True if two trees of dataclasses, mappings, tuples and arrays are equal in types, order and every bit."""
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, of.name), getattr(other, of.name)) for of in fields(one))
    if isinstance(one, Mapping):
        return same(tuple(one.items()), tuple(other.items()))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)
