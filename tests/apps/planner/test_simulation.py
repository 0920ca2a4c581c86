"""Tests of simulated runs: the closed form without tails, proven bounds, conservation, Little's law, and determinism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.planner.simulation import Simulated
from rlsys.apps.planner.workload import ToolServer, Workload
from rlsys.cluster.planning.work import EngineCosts, SyncCosts
from rlsys.config.schema import BoundedWaitSchedule, GatewayAgent
from tests.apps.planner.made import EQUAL, FREE, config_of, costs_of, simulated

ENGINE = replace(FREE, step_s=0.01, max_running=64)
"""One decode step takes 0.01 s, whatever its batch: an episode of 100 tokens takes 1.01 s, prefill included."""
TOKENS = 110
"""Tokens of an episode of `EQUAL`."""
ANOMALY = 0.1
"""Share by which an improvement may make a trained token slower: list scheduling has such anomalies (Graham 1969)."""
TAILS = Workload(prompt=10, turn=60, spread=0.8, calls=1, observation=20, tool_s=0.3, tool_spread=0.8, tools_per_s=50)


def one_at_a_time(
    rollout: float, training: float, inference: float, staleness: int | None, whole: bool = False, **changes: Any
) -> Simulated:
    """Simulate groups of 4 a step on an engine that takes one group at a time; each stage's seconds of a step are given."""
    engine = replace(FREE, step_s=rollout / 4 / 101, max_running=2)
    costs = costs_of(engine, *(seconds / (8 * TOKENS) for seconds in (training, inference)))
    config = config_of(staleness=staleness, rollout__max_episodes=2)
    return simulated(config, replace(costs, **changes), measured=6, whole=whole)


@pytest.mark.parametrize(
    ("rollout", "training", "inference", "staleness", "whole", "expected"),
    [
        # With deep buffers, the slowest stage.
        (8, 1, 2, 4, False, 8),
        (1, 8, 2, 4, False, 8),
        (2, 1, 8, 4, False, 8),
        (5, 5, 0.1, 4, False, 5),
        # If all stages are equally long, the push of each step waits for a whole call of the inference group.
        (5, 5, 5, 4, False, 5 + 5 / 4),
        # Four groups of 0.75 s one after the other; then the last group alone is scored and trained.
        (3, 2, 1, 0, False, 3 + 0.25 + 0.5),
        # Whole steps, and sequential stages, add up.
        (3, 2, 1, 0, True, 3 + 2 + 1),
        (3, 2, 1, None, False, 3 + 2 + 1),
    ],
)
def test_step_without_tails_by_hand(
    rollout: float, training: float, inference: float, staleness: int | None, whole: bool, expected: float
) -> None:
    found = one_at_a_time(rollout, training, inference, staleness, whole)
    assert found.step_s == pytest.approx(expected, rel=0.02)


def test_sync_and_start_of_a_step_are_added_where_nothing_hides_them() -> None:
    plain = one_at_a_time(3, 2, 1, staleness=None)
    sync = SyncCosts(nbytes=100.0, gather_s=0.0, engine_s=0.02, inference_s=0.01, activate_s=1.5)
    slower = one_at_a_time(3, 2, 1, staleness=None, sync=sync, step_s=0.25, reward_s=0.125)
    # The push to the engines and the switch; rewards of groups that end one after the other delay only the last.
    assert slower.step_s - plain.step_s == pytest.approx(2.0 + 1.5 + 0.25 + 0.125, rel=0.05)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_staleness_and_groups_in_flight_reach_the_proven_bounds(staleness: int) -> None:
    """With rollouts much faster than training, both bounds of docs/pipeline.md are reached and never exceeded."""
    found = simulated(config_of(prompts=4, staleness=staleness), costs_of(ENGINE, 0.05, 0.0001), measured=4)
    assert max(one for step in found.steps for one in step.staleness) == staleness
    assert found.most_outstanding == (staleness + 1) * 4


def test_bounded_wait_bounds_the_groups_in_flight() -> None:
    schedule = BoundedWaitSchedule(kind="bounded_wait", max_staleness=4, max_wait=1)
    config = config_of(prompts=4, trainer__schedule=schedule)
    found = simulated(config, costs_of(ENGINE, 0.05, 0.0001), measured=4)
    assert found.most_outstanding == (1 + 1) * 4
    assert max(one for step in found.steps for one in step.staleness) <= 1


@given(st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 3), st.sampled_from([1e-5, 1e-3, 1e-2]))
@settings(max_examples=8)
def test_work_is_conserved_and_bounds_hold(seed: int, staleness: int, engines: int, training: float) -> None:
    config = config_of(prompts=6, samples=3, engines=engines, staleness=staleness)
    found = simulated(config, costs_of(ENGINE, training, 1e-4), TAILS, seed=seed)
    assert all(len(step.staleness) == 6 for step in found.steps)
    assert all(0 <= one <= staleness for step in found.steps for one in step.staleness)
    assert found.most_outstanding <= (staleness + 1) * 6
    trained = sum(step.tokens for step in found.steps) * training
    assert found.busy["actor"] * found.seconds == pytest.approx(trained, rel=1e-6)
    assert sum(found.doing["actor"].values()) == pytest.approx(found.seconds)
    assert all(0 <= share <= 1 + 1e-9 for share in found.busy.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_littles_law(seed: int) -> None:
    """Episodes in flight = rate of their ends x their latency, in a steady state of many episodes."""
    config = config_of(prompts=10, samples=4, staleness=1)
    found = simulated(config, costs_of(replace(ENGINE, token_s=0.001), 1e-5, 1e-5), TAILS, measured=20, seed=seed)
    assert found.in_flight == pytest.approx(found.finished / found.seconds * found.latency_s, rel=0.02)


def test_same_seed_same_run_and_another_seed_another_one() -> None:
    config, costs = config_of(prompts=6, staleness=1), costs_of(ENGINE, 1e-3, 1e-4)
    first, again, other = (simulated(config, costs, TAILS, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first.steps != other.steps


IMPROVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "engines": ({"engines": 1}, {"engines": 2}),
    "training": ({"training": 2e-3}, {"training": 1e-3}),
    "inference": ({"inference": 2e-3}, {"inference": 1e-3}),
    "link": ({"sync": 4.0}, {"sync": 1.0}),
    "tools": ({"tool_s": 1.0}, {"tool_s": 0.2}),
    "server": ({"tools_per_s": 5.0}, {"tools_per_s": 50.0}),
    "tail": ({"spread": 1.0}, {"spread": 0.0}),
    "decode": ({"engine": replace(ENGINE, token_s=0.002)}, {"engine": ENGINE}),
}


def improved(seed: int, staleness: int | None, values: dict[str, Any]) -> float:
    """Return the seconds per trained token with the settings `values`.

    A step of async trains what ended first, so with a longer tail its episodes are shorter.
    """
    held = {"engines": 1, "training": 1e-3, "inference": 5e-4, "sync": 1.0, "engine": ENGINE, **values}
    engine: EngineCosts = held["engine"]
    sync = SyncCosts(1.0, 0.0, held["sync"], held["sync"], held["sync"] / 4)
    lengths = {name: held[name] for name in ("tool_s", "tools_per_s", "spread") if name in held}
    config = config_of(prompts=6, samples=3, engines=held["engines"], staleness=staleness)
    costs = costs_of(engine, held["training"], held["inference"], sync=sync)
    found = simulated(config, costs, replace(TAILS, **lengths), measured=6, seed=seed)
    return found.seconds / sum(step.tokens for step in found.steps)


@pytest.mark.parametrize("change", IMPROVED)
@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_more_of_anything_never_hurts(change: str, staleness: int | None) -> None:
    worse, better = (improved(1, staleness, values) for values in IMPROVED[change])
    assert better <= worse * (1 + ANOMALY)


def test_work_per_trajectory_does_not_grow_with_their_number() -> None:
    costs = costs_of(replace(ENGINE, max_running=32), 1e-5, 1e-5)
    few, many = (simulated(config_of(prompts=count, samples=8), costs, TAILS, measured=1) for count in (16, 128))
    assert many.events / 128 < 1.2 * few.events / 16


@pytest.mark.parametrize(("concurrency", "seconds"), [(1, 8 * 1.01), (2, 4 * 1.01), (64, 1.01)])
def test_agents_of_the_gateway_wait_for_a_slot(concurrency: int, seconds: float) -> None:
    """Eight episodes of 1.01 s begin together on one engine."""
    config = config_of(staleness=None, task__agent=GatewayAgent(concurrency=concurrency))
    assert simulated(config, costs_of(ENGINE, 1e-9, 1e-9)).step_s == pytest.approx(seconds, rel=1e-3)


def test_searches_wait_for_a_saturated_server() -> None:
    server = ToolServer(per_s=10)
    answers = [server.answered_at(0.0, 0.25) for _ in range(5)]
    assert answers == pytest.approx([0.25, 0.25, 0.3, 0.4, 0.5])


def test_assumed_lengths_keep_their_mean_whatever_the_tail() -> None:
    config = config_of(task__max_turn_tokens=100_000, task__max_total_tokens=200_000)
    workload = replace(EQUAL, spread=1.0)
    drawn = [one.generated for number in range(400) for one in workload.group(config, 0, number, 8)]
    assert sum(drawn) / len(drawn) == pytest.approx(100, rel=0.06)
    config = config_of(task__max_turn_tokens=50, task__max_prompt_tokens=7)
    assert max(one.generated for one in workload.group(config, 0, 0, 64)) == 50
    assert {one.prompt for one in workload.group(config, 0, 0, 64)} == {7}


def test_groups_on_the_same_devices_take_turns() -> None:
    """Log-probs on the actor's devices: the stages of 2 and 1 s no longer overlap each other."""
    config = config_of(staleness=4, rollout__max_episodes=2)
    config.cluster.placement = {"actor": "0", "inference": "0", "rollout": "1"}
    costs = costs_of(replace(FREE, step_s=0.1 / 101, max_running=2), 2 / (8 * TOKENS), 1 / (8 * TOKENS))
    assert simulated(config, costs, measured=6).step_s == pytest.approx(2 + 1, rel=0.02)
