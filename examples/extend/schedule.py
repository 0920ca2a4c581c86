"""A schedule of one's own: rollouts pause while training is behind, and the newest groups are trained first.

Copy this file into a folder of PYTHONPATH, and name the class:

    rlsys train -c searchr1_tiny_cpu trainer.schedule=schedule.NewestFirst trainer.schedule.most_ready=8

The bounds `max_staleness` and `max_wait`, and `on_update`, are settings with fixed names, all optional: the scheduler
reads and enforces them. Without `max_staleness` a schedule is on-policy. The class only chooses within the bounds.
"""

from typing import Annotated

from annotated_types import Ge

from rlsys.orchestrator.pipeline.schedule_policy import ReadyGroup, ScheduleView


class NewestFirst:
    """Trains the group with the newest tokens first. Groups that are overtaken until they are too old are dropped.

    Right if stale groups harm learning more than their loss costs: a dropped group's rollout is wasted.
    """

    def __init__(
        self,
        *,
        max_staleness: Annotated[int, Ge(0)] = 2,  # noqa: ARG002, read and enforced by the scheduler
        most_ready: Annotated[int, Ge(1)] = 64,
    ) -> None:
        self._most_ready = most_ready

    def may_admit(self, view: ScheduleView) -> bool:
        """Begin no further group while `most_ready` groups wait to be trained."""
        return view.ready < self._most_ready

    def priority(self, group: ReadyGroup) -> float:
        """The lowest rank is trained first."""
        return -group.oldest
