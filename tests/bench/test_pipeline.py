"""Tests of the benchmark of schedules: which rows are measured, in which order, and what is computed from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from bench.pipeline import (
    ASYNC,
    FINISH,
    PIPELINED,
    SCHEDULES,
    SEQUENTIAL,
    Measured,
    chosen,
    in_turn,
    key_figures,
    median_of,
)

RUN = Measured(
    "sequential", 1.0, 3, 10.0, 4.0, 2.0, 3.0, 0.1, 1.0, dict.fromkeys(("rollout", "inference", "actor"), 0.5), 0
)
"""Without waiting, its longest stage takes 4 of 9 s: the ideal is 2.25."""


def test_rows_are_those_asked_for() -> None:
    plan = chosen(["4x", "none"], ["sequential", "async 1"])
    assert plan == {4.0: [SEQUENTIAL, ASYNC[0]], 0.0: [SEQUENTIAL, ASYNC[0]]}
    every = chosen(None, None)
    assert [len(one) for one in every.values()] == [len(SCHEDULES), 4, 4]
    assert chosen(["none"], [FINISH.name]) == {0.0: [FINISH]}
    for wrong in ((["fast"], None), (None, ["async 9"])):
        with pytest.raises(typer.BadParameter):
            chosen(*wrong)


def test_steady_drift_of_the_machine_cancels_in_the_medians() -> None:
    """Each run is 2 s slower than the one before it; all schedules are equally fast."""
    order = in_turn([SEQUENTIAL, PIPELINED, ASYNC[0]], rounds=4)
    runs = [replace(RUN, schedule=one.name, step_s=10.0 + 2 * number) for number, one in enumerate(order)]
    rows = [median_of([run for run in runs if run.schedule == one.name]) for one in (SEQUENTIAL, PIPELINED, ASYNC[0])]
    assert [row.step_s for row in rows] == [21.0] * 3
    assert rows[0].step_s_of_rounds == (10.0, 20.0, 22.0, 32.0)
    figures = key_figures(rows)
    assert (figures["speedup_async1"], figures["speedup_pipelined"]) == (1.0, 1.0)
    assert figures["ideal"] == pytest.approx(9 / 4)
    assert figures["fraction_of_ideal_async1"] == pytest.approx(4 / 9)


def test_figures_compare_rows_of_one_latency_and_only_those_that_were_measured() -> None:
    rows = [replace(RUN, latency=0.0), replace(RUN, schedule="async 1", latency=0.0, step_s=5.0)]
    rows.append(replace(RUN, schedule="async 1", step_s=1.0))
    assert key_figures(rows) == {
        "speedup_async1_without_latency": 2.0,
        "ideal_without_latency": 2.25,
        "fraction_of_ideal_async1_without_latency": pytest.approx(2 / 2.25),
    }
