"""Tests of costs that are measured in a run: planted costs come back, and the helpers agree with brute force."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.apps.planner.calibrate import Calibration, between, nonnegative, windows, within
from rlsys.apps.planner.costs import by_formula
from rlsys.apps.planner.estimate import calls_s
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.hardware import REACHED
from rlsys.cluster.planning.work import HardwareCosts
from rlsys.config.compose import as_dict, load_config
from rlsys.config.schema import RunConfig
from rlsys.observe.kept import TrajectoryRecord, write_trajectories
from rlsys.observe.records import TIMELINE, LineLog, timeline_row
from rlsys.observe.run_folder import open_run
from rlsys.observe.spans import Span
from rlsys.trainer.batches import SampleSize
from rlsys.weights.weight_map import read_architecture
from tests.support.made_run import DAY, Maker, Size, made_run
from tests.support.refusals import refused

STEP_S, REQUEST_S, TOKEN_S = 0.02, 0.001, 0.0005
"""Planted costs of an engine: of a decode step, of a request in it, of the prefill of a token."""
CALL_S, FACTOR = 0.25, 3.0
"""Planted costs of a call of the actor: constant, and as a multiple of the formula."""
TIMES = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 20)), min_size=1, max_size=12)


def formulas(config: RunConfig) -> HardwareCosts:
    return HardwareCosts(config, read_architecture(config.model.path), "CPU")


def planted(folder: Path, sizes: Sequence[int] = (2, 4, 8)) -> Path:
    """Write a run of three steps of 20 s; the first one, which is slower, must not count. `sizes` are samples of calls."""
    config = load_config("searchr1_tiny_cpu", ["trainer.schedule.kind=sequential"])
    size = Size(steps=3, groups=4, samples=2)
    run = made_run(folder, Maker(size), **{key: value for key, value in as_dict(config).items() if key != "name"})
    call = replace(formulas(config).calls()["actor"], call_s=0.0, apply_s=0.0)
    trained = 3 * size.thought / (size.prompt + 3 * size.thought + 2 * size.page)
    log = LineLog(run / TIMELINE, position=0)
    for step in range(1, 4):
        at, slower = (DAY + 20 * step) * 10**9, 2.0 if step == 1 else 1.0
        spans = [Span("rollout.group", at, at + 10**10, "rollout", "engine 0")]
        for samples in sizes:
            tokens = 128 * samples
            seconds = CALL_S + FACTOR * calls_s(call, SampleSize(128, round(128 * trained)), samples, 64, 1)
            facts = {"samples": samples, "tokens": tokens}
            began = at + (10 + samples // 2) * 10**9
            spans.append(Span("train.accumulate", began, began + round(slower * seconds * 1e9), "actor", "main", facts))
        spans.append(Span("sync.transfer", at + 15 * 10**9, at + round(15.5e9), "driver", "main"))
        spans.append(Span("sync.switch", at + 16 * 10**9, at + round(16.125e9), "driver", "main"))
        log.append(timeline_row(step, (at, at + 20 * 10**9), spans))
        write_trajectories(run, step, spread_out(Maker(size), step, at, slower))
    log.close()
    rows = [
        {"step": step, "time": DAY, "rollout/episodes": 8, "time/cpu": 17.0, "time/rollout": 10.0, "time/training": 2.0}
        for step in range(1, 4)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def spread_out(maker: Maker, step: int, at: int, slower: float) -> list[TrajectoryRecord]:
    """Return trajectories of 4 groups, one of whose turns run alone and the others in pairs."""
    kept = [maker.kept(step, group, sample) for group in range(4) for sample in range(2)]
    changed = []
    for number, one in enumerate(kept):
        beside = 1 if number < 4 else 2  # The last four run in pairs.
        place = number if beside == 1 else 4 + (number - 4) // 2
        turns = []
        for index, turn in enumerate(one.turns):
            tokens, new = 5 + 3 * index + place, 20 * (index + 1)
            seconds = STEP_S * (tokens + min(beside, tokens)) + REQUEST_S * tokens * beside + TOKEN_S * new * beside
            began = at + (place * 3 + index) * 10**9
            ids = np.arange(tokens, dtype=np.int32)
            turns.append(
                replace(
                    turn,
                    began_ns=began,
                    generate_s=seconds * slower,
                    sampled_ids=ids,
                    sampled_logprobs=np.zeros(tokens, np.float32),
                    prompt_tokens=new + 7,
                    cached_tokens=7,
                )
            )
        changed.append(replace(one, turns=tuple(turns)))
    return changed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("runs") / "planted")


def test_planted_costs_are_measured(run: Path) -> None:
    calibration = Calibration(open_run(run), "CPU", REACHED)
    formula = by_formula(formulas(calibration.config), "")
    costs = calibration.applied(formula)
    assert costs.engine.step_s == pytest.approx(STEP_S, rel=1e-3)
    assert costs.engine.request_s == pytest.approx(REQUEST_S, rel=1e-2)
    assert costs.engine.prefill_s == pytest.approx(TOKEN_S, rel=1e-2)
    assert costs.calls["actor"].call_s == pytest.approx(CALL_S, rel=1e-3)
    assert costs.calls["actor"].rate == pytest.approx(formula.calls["actor"].rate / FACTOR, rel=1e-3)
    assert costs.calls["inference"] == formula.calls["inference"], "no call of this group was recorded"
    assert costs.sync.nbytes * costs.sync.engine_s == pytest.approx(0.5)
    assert costs.sync.activate_s == pytest.approx(0.125)
    assert costs.cores is not None
    assert costs.cores.used["rollout"] == pytest.approx(min(costs.cores.count, (17 - 2) / 10))
    assert {"engine", "calls of actor", "weight sync", "cores"} <= costs.source.keys()


def test_calls_of_like_size_get_no_constant(tmp_path: Path) -> None:
    """What is constant in them counts as growing with the size."""
    calibration = Calibration(open_run(planted(tmp_path / "run", sizes=(7, 8))), "CPU", REACHED)
    formula = by_formula(formulas(calibration.config), "")
    call = calibration.applied(formula).calls["actor"]
    assert call.call_s == 0
    assert call.rate < formula.calls["actor"].rate / FACTOR


def test_costs_of_another_model_grow_as_the_formulas_say(run: Path) -> None:
    calibration = Calibration(open_run(run), "CPU", REACHED)
    formula = by_formula(formulas(calibration.config), "")
    larger = replace(formula, calls={"actor": replace(formula.calls["actor"], rate=formula.calls["actor"].rate / 5)})
    rates = [calibration.applied(one).calls["actor"].rate for one in (formula, larger)]
    assert rates[0] == pytest.approx(5 * rates[1])


def test_episodes_are_drawn_from_the_run(run: Path) -> None:
    calibration = Calibration(open_run(run), "CPU", REACHED)
    workload = calibration.workload(Workload())
    config = calibration.config
    lengths = {tuple(turn.generated for turn in one.turns) for group in workload.episodes for one in group}
    drawn = [one for number in range(30) for one in workload.group(config, 0, number, 8)]
    assert {tuple(turn.generated for turn in one.turns) for one in drawn} <= lengths
    assert workload.tool_s == pytest.approx(0.03)
    assert all(turn.tool_s == pytest.approx(0.03) for one in drawn for turn in one.turns[:-1])
    with refused("unknown"):
        workload.changed(["turn=3"])


def test_limits_cut_recorded_episodes(run: Path) -> None:
    calibration = Calibration(open_run(run), "CPU", REACHED)
    workload = calibration.workload(Workload())
    config = calibration.config
    config.task.max_turn_tokens, config.task.max_total_tokens, config.task.max_turns = 6, 40, 1
    drawn = [one for number in range(30) for one in workload.group(config, 0, number, 8)]
    assert max(turn.generated for one in drawn for turn in one.turns) <= 6
    assert max(len(one.turns) for one in drawn) <= 2


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    run = planted(tmp_path / "empty")
    (run / TIMELINE).unlink()
    with refused("missing", "--calibrate"):
        Calibration(open_run(run), "CPU", REACHED)


@given(TIMES, st.floats(0, 130), st.floats(0.1, 20))
def test_amounts_within_a_window_are_those_of_all_intervals(
    times: list[tuple[float, float]], low: float, width: float
) -> None:
    begin, took = (np.array(column) for column in zip(*times, strict=True))
    amounts = np.arange(1.0, len(times) + 1)
    window = np.array([low]), np.array([low + width])
    overlaps = [max(0.0, min(low + width, start + length) - max(low, start)) / length for start, length in times]
    assert within(begin, took, amounts, *window)[0] == pytest.approx(float(amounts @ overlaps), abs=1e-6)
    expected = sum(amount for amount, start in zip(amounts, begin, strict=True) if low <= start < low + width)
    assert between(begin, amounts, *window)[0] == expected


@given(TIMES)
def test_windows_cover_exactly_what_runs(times: list[tuple[float, float]]) -> None:
    begin, took = (np.array(column) for column in zip(*times, strict=True))
    low, high = windows(begin, took)
    assert all(0 < width <= 1 + 1e-9 for width in high - low)
    points = np.linspace(-1, 130, 400)
    runs = [any(start <= point < start + length for start, length in times) for point in points]
    covered = [any((low <= point) & (point < high)) for point in points]
    assert covered == runs


@given(st.lists(st.floats(0.1, 5), min_size=3, max_size=3))
def test_factors_that_are_not_negative_are_found(factors: list[float]) -> None:
    columns = [*np.random.default_rng(0).uniform(0, 1, (3, 20))]
    values = sum(factor * column for factor, column in zip(factors, columns, strict=True))
    assert nonnegative(columns, values) == pytest.approx(factors)
    assert nonnegative([*columns, np.ones(20)], values - 0.0 * columns[0])[:3] == pytest.approx(factors)
    assert min(nonnegative(columns, -np.ones(20))) == 0.0
