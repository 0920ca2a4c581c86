"""Signs that a run collapses, seen in the rows of its metrics. Pure.

Contract: a bound that has been passed in `patience` steps in a row is an alarm, and stays one in every further step
that passes it; the first step that keeps to it, or does not have the figure, ends the row. A figure that is not a
number has passed its bound at once: nothing that comes after it can be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from rlsys.config.algorithm import KlEstimator
from rlsys.config.schema import GuardsConfig

_SAMPLED_KL = {
    **{KlEstimator[name]: f"kl/{name}" for name in ("k1", "k2", "k3", "k5", "abs")},
    KlEstimator["k3++"]: "kl/k3",
    KlEstimator["k4"]: "kl/k1",
    KlEstimator["full_reverse"]: "kl/k3",
    KlEstimator["full_forward"]: "kl/k5",
}
"""Estimator -> the figure of the sampled batch that has its value, or estimates it."""


@dataclass(frozen=True, slots=True)
class _Watch:
    guard: str
    """Name of the guard; `guard/<name>` in the row."""
    figures: Sequence[str]
    """The first that a row has is watched."""
    bound: float | None
    remedy: str
    is_floor: bool = False


@dataclass(frozen=True, slots=True)
class Alarm:
    """A bound that a run has passed for too long."""

    guard: str
    step: int
    figure: str
    value: float
    bound: float
    is_floor: bool
    steps: int
    """Steps in a row that have passed the bound, this one included."""
    first: bool
    """Whether the alarm was not there in the step before."""
    remedy: str

    @property
    def key(self) -> str:
        """The bound's key in the config."""
        return f"guards.{self.guard}_{'floor' if self.is_floor else 'ceiling'}"

    def __str__(self) -> str:
        """One sentence: what was seen, and what to do."""
        if isnan(self.value):
            seen = f"{self.figure} is not a number at step {self.step}, so that {self.key}={self.bound:g} cannot hold"
        else:
            side = "below" if self.is_floor else "above"
            row = "" if self.steps == 1 else f", as in the {self.steps - 1} before it"
            seen = f"{self.figure} is {self.value:.4g} at step {self.step}, {side} {self.key}={self.bound:g}{row}"
        return f"{seen}: {self.remedy}, or set {self.key}=null to watch it no more."


@dataclass(frozen=True, slots=True)
class GuardsState:
    """Counts of guards after the steps so far, for a resumed run."""

    steps: Mapping[str, int]
    """Guard -> steps in a row that have passed its bound."""
    alarmed: tuple[str, ...]
    """Guards that alarmed at the last step."""


class Guards:
    """Watches a run, step by step; keeps nothing but how long each bound has been passed."""

    def __init__(self, config: GuardsConfig, estimator: KlEstimator) -> None:
        """`estimator` is the run's, whose divergence from the reference policy is watched."""
        self._patience = config.patience
        self._watches = [watch for watch in _watches(config, estimator) if watch.bound is not None]
        self._steps = dict.fromkeys((watch.guard for watch in self._watches), 0)
        self._alarmed: set[str] = set()

    def state(self) -> GuardsState:
        """Counts that a resumed run goes on with."""
        return GuardsState(dict(self._steps), tuple(sorted(self._alarmed)))

    def restore(self, state: GuardsState) -> None:
        """Go on after the steps that `state` speaks of; a guard that it does not know begins anew."""
        self._steps |= {name: steps for name, steps in state.steps.items() if name in self._steps}
        self._alarmed = {*state.alarmed} & {*self._steps}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the guards that watch."""
        return tuple(self._steps)

    def check(self, step: int, row: Mapping[str, float | None]) -> list[Alarm]:
        """The alarms of `step`, whose metrics are `row`. Steps come in order, each once."""
        alarms = [alarm for watch in self._watches if (alarm := self._alarm(watch, step, row)) is not None]
        self._alarmed = {alarm.guard for alarm in alarms}
        return alarms

    def _alarm(self, watch: _Watch, step: int, row: Mapping[str, float | None]) -> Alarm | None:
        guard, bound, is_floor = watch.guard, watch.bound, watch.is_floor
        figure = next((figure for figure in watch.figures if figure in row), None)
        found = None if figure is None else row[figure]
        value = float("nan") if found is None else found  # A file has null for NaN.
        assert bound is not None
        passed = isnan(value) or (value < bound if is_floor else value > bound)
        self._steps[guard] = steps = self._steps[guard] + 1 if figure is not None and passed else 0
        if figure is None or not steps or (steps < self._patience and not isnan(value)):
            return None
        return Alarm(guard, step, figure, value, bound, is_floor, steps, guard not in self._alarmed, watch.remedy)


def _watches(config: GuardsConfig, estimator: KlEstimator) -> list[_Watch]:
    return [
        _Watch(
            "entropy",
            ("actor/entropy",),
            config.entropy_floor,
            "the policy hardly varies what it writes; begin again with a higher "
            "algorithm.entropy_coef or clip_high, or a lower actor.optimizer.lr",
            is_floor=True,
        ),
        _Watch(
            "kl",
            ("actor/kl", _SAMPLED_KL[estimator]),
            config.kl_ceiling,
            "the policy has left its reference; begin again with a higher algorithm.kl_coef or "
            "a lower actor.optimizer.lr",
        ),
        _Watch(
            "ratio",
            ("actor/ratio_max",),
            config.ratio_ceiling,
            "an update moves single tokens too far; lower actor.optimizer.lr, or set algorithm.correction.kind where "
            "rollouts run ahead",
        ),
        _Watch(
            "many_answers",
            ("answers/many_share",),
            config.many_answers_ceiling,
            "the policy writes several answers, hoping for one; look at the run's samples and set "
            "reward.max_answer_tags",
        ),
        _Watch(
            "same_answer",
            ("answers/same_share",),
            config.same_answer_ceiling,
            "the policy gives different questions one and the same answer; look at the run's samples and at what the "
            "reward pays for it",
        ),
    ]
