"""Watches a run's metrics for signs of collapse. Pure.

Contract: a guard raises an alarm once its metric has been out of bounds for `patience` steps in a row, and again in
every further step out of bounds. A step within bounds, or without the metric, resets the count. NaN raises an alarm at
once, because later values of the run are meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan

from rlsys.config.schema import GuardsConfig
from rlsys.observe.metrics import Metric

GUARD_METRICS = (
    Metric("guard/entropy", "0 or 1", "`actor/entropy` is below `guards.entropy_floor`"),
    Metric(
        "guard/kl",
        "0 or 1",
        "`actor/kl` is above `guards.kl_ceiling`; if the loss has no KL term, the metric of the configured estimator "
        "under `kl/`",
    ),
    Metric("guard/ratio", "0 or 1", "`actor/ratio_max` is above `guards.ratio_ceiling`"),
    Metric("guard/correct_change", "0 or 1", "`actor/correct_change` is below `guards.correct_change_floor`"),
    Metric("guard/many_answers", "0 or 1", "`answers/many_share` is above `guards.many_answers_ceiling`"),
    Metric("guard/same_answer", "0 or 1", "`answers/same_share` is above `guards.same_answer_ceiling`"),
)
_SAMPLED_KL = {
    **{name: f"kl/{name}" for name in ("k1", "k2", "k3", "k5", "abs")},
    "k3++": "kl/k3",
    "k4": "kl/k1",
    "full_reverse": "kl/k3",
    "full_forward": "kl/k5",
}
"""KL estimator -> metric of the sampled batch that equals or estimates the same KL; k3 for any other."""
_FLOORS = ("entropy", "correct_change")
"""Guards with a lower bound; all others have an upper bound."""
_REMEDIES = {
    "entropy": "the policy's outputs hardly vary; start again with a higher algorithm.entropy_coef or policy_loss.clip_high, or a "
    "lower actor.optimizer.lr",
    "kl": "the policy has drifted far from its reference; start again with a higher algorithm.kl_coef or a lower "
    "actor.optimizer.lr",
    "ratio": "an update moves single tokens too far; lower actor.optimizer.lr, or set algorithm.correction.kind if "
    "rollouts run ahead of training",
    "correct_change": "updates make correct answers less likely (lazy likelihood displacement), which ends in collapse; start again "
    "with algorithm.llds.coef=0.2 or a lower actor.optimizer.lr",
    "many_answers": "the policy writes several answers in one episode; look at the run's samples and set "
    "reward.max_answer_tags",
    "same_answer": "the policy gives different questions the same answer; look at the run's samples and at the reward "
    "that it earns",
}
"""Guard (`guard/<name>` in metrics.jsonl) -> diagnosis and remedy in its alarm."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric that has been out of bounds for too long."""

    guard: str
    step: int
    figure: str
    value: float
    bound: float
    steps: int
    """Number of consecutive steps out of bounds, including this step."""
    first: bool
    """True if the guard raised no alarm in the previous step."""

    @property
    def key(self) -> str:
        """Configuration key of the bound."""
        return f"guards.{self.guard}_{'floor' if self.guard in _FLOORS else 'ceiling'}"

    def __str__(self) -> str:
        """Return the observation and the remedy in one sentence."""
        if isnan(self.value):
            seen = f"{self.figure} is not a number at step {self.step}, outside {self.key}={self.bound:g}"
        else:
            side = "below" if self.guard in _FLOORS else "above"
            row = "" if self.steps == 1 else f", as in the {self.steps - 1} steps before"
            seen = f"{self.figure} is {self.value:.4g} at step {self.step}, {side} {self.key}={self.bound:g}{row}"
        return f"{seen}: {_REMEDIES[self.guard]}, or set {self.key}=null to disable this guard."


@dataclass(frozen=True, slots=True)
class GuardsState:
    """Checkpointed counts of the guards."""

    steps: Mapping[str, int]
    """Guard -> number of consecutive steps out of bounds."""
    alarmed: tuple[str, ...]
    """Guards that raised an alarm at the last step."""


class Guards:
    """Checks the metrics of each step; between steps, it keeps only the counts in `GuardsState`."""

    def __init__(self, config: GuardsConfig, estimator: str) -> None:
        """`estimator`: kind of the run's KL estimator, which the KL guard watches."""
        self._patience = config.patience
        # Guard -> (candidate metrics, bound); the first candidate that the row has is checked.
        watches = {
            "entropy": (("actor/entropy",), config.entropy_floor),
            "kl": (("actor/kl", _SAMPLED_KL.get(estimator, "kl/k3")), config.kl_ceiling),
            "ratio": (("actor/ratio_max",), config.ratio_ceiling),
            "correct_change": (("actor/correct_change",), config.correct_change_floor),
            "many_answers": (("answers/many_share",), config.many_answers_ceiling),
            "same_answer": (("answers/same_share",), config.same_answer_ceiling),
        }
        self._watches = [(name, figures, bound) for name, (figures, bound) in watches.items() if bound is not None]
        self._steps = dict.fromkeys((name for name, _, _ in self._watches), 0)
        self._alarmed: set[str] = set()

    def state(self) -> GuardsState:
        """Return the counts for a checkpoint."""
        return GuardsState(dict(self._steps), tuple(sorted(self._alarmed)))

    def restore(self, state: GuardsState) -> None:
        """Continue from the checkpointed `state`; a guard that `state` lacks starts at zero."""
        self._steps |= {name: steps for name, steps in state.steps.items() if name in self._steps}
        self._alarmed = {*state.alarmed} & {*self._steps}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._steps)

    def check(self, step: int, row: Mapping[str, float | None]) -> list[Alarm]:
        """Return the alarms of `step` with metrics `row`. Call once per step, in order."""
        alarms = []
        for guard, figures, bound in self._watches:
            figure = next((figure for figure in figures if figure in row), None)
            found = None if figure is None else row[figure]
            value = float("nan") if found is None else found  # metrics.jsonl holds null for NaN.
            passed = isnan(value) or (value < bound if guard in _FLOORS else value > bound)
            self._steps[guard] = steps = self._steps[guard] + 1 if figure is not None and passed else 0
            if figure is not None and steps and (steps >= self._patience or isnan(value)):
                alarms.append(Alarm(guard, step, figure, value, bound, steps, guard not in self._alarmed))
        self._alarmed = {alarm.guard for alarm in alarms}
        return alarms
