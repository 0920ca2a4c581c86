"""What a span is, and what a group waits for while it does nothing. Pure.

Every group is somewhere in the cycle of a step: episodes, their rewards, their scores, training, new weights, episodes
again. A group that has nothing to do waits for what is *nearest before it* in that cycle and goes on at that time:
an actor for log-probs if some are being computed, else for rewards, else for generation, and so forth. Two things stop
everybody and so come first, the transfer of weights and groups that change places on shared devices; two are in
nobody's way as a rule and so come last, evaluations and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from rlsys.observe.spans import ROLLOUT_SPAN, Span
from rlsys.observe.timeline import GENERATE_SPAN, SEARCH_SPAN


class Activity(StrEnum):
    """What somebody does, or waits for."""

    generation = "generation"
    search = "search"
    """An episode of some group searches, and none of any group generates."""
    rollout = "rollout"
    """Episodes are under way and neither generate nor search, or nobody noted which (groups that were given up)."""
    reward = "reward"
    logprob = "logprob"
    values = "values"
    training = "training"
    sync = "sync"
    """New weights, on their way or being put to use."""
    switch = "switch"
    """Groups that share devices leave and take them."""
    checkpoint = "checkpoint"
    evaluation = "evaluation"
    other = "other"
    """Nothing that has a span: the driver's own work."""

    @property
    def words(self) -> str:
        """For people: "waits for ..."."""
        return _WORDS[self]


_WORDS = {
    Activity.generation: "generation",
    Activity.search: "search",
    Activity.rollout: "episodes between turns",
    Activity.reward: "rewards",
    Activity.logprob: "log-probs",
    Activity.values: "values",
    Activity.training: "training",
    Activity.sync: "new weights",
    Activity.switch: "a change of places on the devices",
    Activity.checkpoint: "a checkpoint",
    Activity.evaluation: "an evaluation",
    Activity.other: "what was not traced",
}
_BY_NAME = {
    GENERATE_SPAN: Activity.generation,
    SEARCH_SPAN: Activity.search,
    ROLLOUT_SPAN: Activity.rollout,
    "eval.episode": Activity.evaluation,
}
_BY_STAGE = {
    "reward": Activity.reward,
    "logprob": Activity.logprob,
    "values": Activity.values,
    "train": Activity.training,
    "sync": Activity.sync,
    "switch": Activity.switch,
    "checkpoint": Activity.checkpoint,
}
_CYCLE = (
    (Activity.generation, Activity.search, Activity.rollout),
    (Activity.reward,),
    (Activity.logprob, Activity.values),
    (Activity.training,),
    (Activity.sync,),
)
_PLACE = {"rollout": 0, "inference": 2, "critic": 3, "actor": 3}
GROUPS = ("actor", "critic", "inference", "rollout")
"""Groups whose time is accounted for."""
TRANSFER_SPAN = "sync.transfer"
DIGITS = 6
"""Of seconds in a file."""


def activity_of(span: Span) -> Activity:
    """What was done in `span`."""
    return _BY_NAME.get(span.name) or _BY_STAGE.get(span.stage, Activity.other)


def upstream(group: str) -> tuple[Activity, ...]:
    """What `group`, one of `GROUPS`, waits for in the cycle, the nearest before it first; once around."""
    place = _PLACE[group]
    back = (_CYCLE[(place - steps) % len(_CYCLE)] for steps in range(1, len(_CYCLE) + 1))
    return tuple(activity for layer in back for activity in layer)


def added(parts: Iterable[Mapping[Activity, float]]) -> dict[Activity, float]:
    """Sums by activity, in the order in which each comes first; only what is above 0."""
    sums: dict[Activity, float] = {}
    for part in parts:
        for activity, seconds in part.items():
            if seconds > 0:
                sums[activity] = sums.get(activity, 0.0) + seconds
    return sums


def rounded(seconds: Mapping[Activity, float]) -> dict[str, float]:
    """As a file holds them."""
    return {activity.value: round(spent, DIGITS) for activity, spent in seconds.items()}
