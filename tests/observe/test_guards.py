"""Tests of guards: bounds, patience, NaN, and the metrics that they watch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rlsys.config.schema import GuardsConfig
from rlsys.observe.guards import Alarm, Guards

NAN = float("nan")
K3 = "k3"
CONFIG = GuardsConfig(
    patience=3,
    entropy_floor=0.1,
    kl_ceiling=2.0,
    ratio_ceiling=10.0,
    correct_change_floor=-0.5,
    many_answers_ceiling=0.2,
    same_answer_ceiling=0.5,
)
HEALTHY = {
    "actor/entropy": 0.5,
    "actor/kl": 0.1,
    "actor/ratio_max": 1.2,
    "actor/correct_change": 0.1,
    "answers/many_share": 0.0,
    "answers/same_share": 0.1,
}


def watch(rows: Sequence[Mapping[str, float | None]], config: GuardsConfig = CONFIG) -> list[list[Alarm]]:
    """Alarms of each row; row i is the metrics of step i + 1."""
    guards = Guards(config, K3)
    return [guards.check(step, HEALTHY | row) for step, row in enumerate(rows, start=1)]


def steps_alarmed(values: Sequence[float | None], figure: str = "actor/entropy") -> list[int]:
    """Steps that raise an alarm if `figure` takes these values."""
    alarms = watch([{figure: value} for value in values])
    return [step for step, found in enumerate(alarms, start=1) if found]


@pytest.mark.parametrize(
    ("guard", "figure", "kept", "passed"),
    [
        ("entropy", "actor/entropy", 0.1, 0.0999),
        ("kl", "actor/kl", 2.0, 2.001),
        ("ratio", "actor/ratio_max", 10.0, 10.01),
        ("correct_change", "actor/correct_change", -0.5, -0.501),
        ("many_answers", "answers/many_share", 0.2, 0.201),
        ("same_answer", "answers/same_share", 0.5, 0.501),
    ],
)
def test_bound_may_be_met_but_not_exceeded(guard: str, figure: str, kept: float, passed: float) -> None:
    assert steps_alarmed([kept] * 5, figure) == []
    assert steps_alarmed([passed] * 5, figure) == [3, 4, 5]
    (alarm,) = watch([{figure: passed}] * 3)[-1]
    assert (alarm.guard, alarm.figure, alarm.value) == (guard, figure, passed)


def test_alarm_is_new_only_once_until_the_figure_recovers() -> None:
    low, high = {"actor/entropy": 0.0}, {"actor/entropy": 1.0}
    alarms = watch([low, low, high, low, low, low, low, high, low, low, low])
    assert [(alarm.step, alarm.first, alarm.steps) for found in alarms for alarm in found] == [
        (6, True, 3),
        (7, False, 4),
        (11, True, 3),
    ]


def test_nan_alarms_at_once_and_infinity_after_the_patience() -> None:
    assert steps_alarmed([1.0, NAN, 1.0]) == [2]
    assert steps_alarmed([1.0, None, 1.0]) == [2], "files hold null for NaN"
    assert steps_alarmed([float("inf")] * 3, "actor/kl") == [3]
    (alarm,) = watch([{"actor/entropy": NAN}])[0]
    assert alarm.first


def test_missing_figure_resets_the_patience() -> None:
    guards = Guards(CONFIG, K3)
    rows = [{"actor/entropy": 0.0}] * 2 + [{}] + [{"actor/entropy": 0.0}] * 3
    assert [bool(guards.check(step, row)) for step, row in enumerate(rows)] == [False] * 5 + [True]


def test_null_bound_is_not_watched() -> None:
    assert watch([{"actor/entropy": NAN}] * 4, replace(CONFIG, entropy_floor=None)) == [[]] * 4


@pytest.mark.parametrize(("estimator", "figure"), [("k3++", "kl/k3"), ("k4", "kl/k1"), ("full_forward", "kl/k5")])
def test_kl_outside_of_the_loss_is_taken_from_the_samples(estimator: str, figure: str) -> None:
    row = {f"kl/{name}": 0.0 for name in ("k1", "k2", "k3", "k5", "abs")} | {figure: 9.0}
    guards = Guards(replace(CONFIG, patience=1), estimator)
    (alarm,) = guards.check(1, row)
    assert (alarm.guard, alarm.figure) == ("kl", figure)
    assert guards.check(2, row | {"actor/kl": 0.0}) == [], "the KL of the loss takes precedence"
