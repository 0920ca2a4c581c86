"""Signs that a run collapses, seen in the rows of its metrics. Pure.

Contract: a bound that has been passed in `patience` steps in a row is an alarm, and stays one in every further step
that passes it; the first step that keeps to it, or does not have the figure, ends the row. A figure that is not a
number has passed its bound at once: nothing that comes after it can be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
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
_FLOORS = ("entropy",)
"""Guards whose bounds are floors; those of the others are ceilings."""
_REMEDIES = {
    "entropy": "the policy hardly varies what it writes; begin again with a higher algorithm.entropy_coef or clip_high, or a "
    "lower actor.optimizer.lr",
    "kl": "the policy has left its reference; begin again with a higher algorithm.kl_coef or a lower actor.optimizer.lr",
    "ratio": "an update moves single tokens too far; lower actor.optimizer.lr, or set algorithm.correction.kind where "
    "rollouts run ahead",
    "many_answers": "the policy writes several answers, hoping for one; look at the run's samples and set "
    "reward.max_answer_tags",
    "same_answer": "the policy gives different questions one and the same answer; look at the run's samples and at what the "
    "reward pays for it",
}
"""Guard, `guard/<name>` in a row -> what to do about its alarm."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A bound that a run has passed for too long."""

    guard: str
    step: int
    figure: str
    value: float
    bound: float
    steps: int
    """Steps in a row that have passed the bound, this one included."""
    first: bool
    """Whether the alarm was not there in the step before."""

    @property
    def key(self) -> str:
        """The bound's key in the config."""
        return f"guards.{self.guard}_{'floor' if self.guard in _FLOORS else 'ceiling'}"

    def __str__(self) -> str:
        """One sentence: what was seen, and what to do."""
        if isnan(self.value):
            seen = f"{self.figure} is not a number at step {self.step}, so that {self.key}={self.bound:g} cannot hold"
        else:
            side = "below" if self.guard in _FLOORS else "above"
            row = "" if self.steps == 1 else f", as in the {self.steps - 1} before it"
            seen = f"{self.figure} is {self.value:.4g} at step {self.step}, {side} {self.key}={self.bound:g}{row}"
        return f"{seen}: {_REMEDIES[self.guard]}, or set {self.key}=null to watch it no more."


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
        # Guard -> the figures of which the first that a row has is watched, and their bound.
        watches = {
            "entropy": (("actor/entropy",), config.entropy_floor),
            "kl": (("actor/kl", _SAMPLED_KL[estimator]), config.kl_ceiling),
            "ratio": (("actor/ratio_max",), config.ratio_ceiling),
            "many_answers": (("answers/many_share",), config.many_answers_ceiling),
            "same_answer": (("answers/same_share",), config.same_answer_ceiling),
        }
        self._watches = [(name, figures, bound) for name, (figures, bound) in watches.items() if bound is not None]
        self._steps = dict.fromkeys((name for name, _, _ in self._watches), 0)
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
        alarms = []
        for guard, figures, bound in self._watches:
            figure = next((figure for figure in figures if figure in row), None)
            found = None if figure is None else row[figure]
            value = float("nan") if found is None else found  # A file has null for NaN.
            passed = isnan(value) or (value < bound if guard in _FLOORS else value > bound)
            self._steps[guard] = steps = self._steps[guard] + 1 if figure is not None and passed else 0
            if figure is not None and steps and (steps >= self._patience or isnan(value)):
                alarms.append(Alarm(guard, step, figure, value, bound, steps, guard not in self._alarmed))
        self._alarmed = {alarm.guard for alarm in alarms}
        return alarms
