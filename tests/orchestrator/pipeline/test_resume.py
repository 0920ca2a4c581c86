"""Tests of runs that are killed and resumed, over seeded interleavings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.orchestrator.pipeline.planted import PLANTED_IN_RESUMING
from tests.orchestrator.pipeline.simulation import Parts, Simulation, State, breach_of, simulate_lives
from tests.orchestrator.pipeline.watched import Property
from tests.support.trajectories import same

SEEDS = 250
"""Number of seeds in a block; the default suite runs the first block only."""


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 8))])
def test_every_property_holds_across_kills_and_resumes(block: int) -> None:
    """`simulate_lives(seed)` repeats a run that failed. `python -m bench.interleavings` tries more seeds."""
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        try:
            simulate_lives(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(("broken", "planted"), PLANTED_IN_RESUMING)
def test_planted_bug_is_found(broken: Property, planted: Callable[[], Parts]) -> None:
    parts = planted()
    assert broken in (breach_of(simulate_lives, seed, parts) for seed in range(1000))


def test_resumed_run_has_the_state_that_was_saved(tmp_path: Path) -> None:
    """The state goes through a file; together, the seeds fill every field of it."""
    seen: set[str] = set()

    def through_a_file(state: State) -> State:
        save_values(tmp_path / "state.npz", state)
        loaded = load_values(tmp_path / "state.npz", State)
        assert same(loaded, state)
        return loaded

    for seed in range(50):
        for life in simulate_lives(seed, through=through_a_file)[:-1]:
            assert life.saved is not None
            state = life.saved.state
            loaded = through_a_file(state)
            assert same(Simulation(life.script, Parts(), replace(life.saved, state=loaded)).state(), state)
            found = {
                **{name: getattr(state.pipeline, name) for name in ("losses", "progress", "rewarded", "scored")},
                **{name: getattr(state.pipeline.scheduler, name) for name in ("rolling", "ready", "replaced")},
                "given_back": state.prompts.given_back,
            }
            seen |= {name for name, value in found.items() if value}
    assert seen == {"losses", "progress", "rewarded", "scored", "rolling", "ready", "replaced", "given_back"}


def test_scored_groups_are_taken_in_the_order_of_the_schedule_that_resumes() -> None:
    """A state under another schedule has them in another order."""
    taken = 0
    for seed in range(50):
        for life in simulate_lives(seed)[:-1]:
            assert life.saved is not None
            pipeline = life.saved.state.pipeline
            if len(pipeline.scored) > 1:
                other = replace(pipeline, scored=dict(reversed(pipeline.scored.items())))
                saved = replace(life.saved, state=replace(life.saved.state, pipeline=other))
                (first,) = run_virtually(Simulation(life.script, Parts(), saved).pipeline.take(1))
                assert same(first, next(iter(pipeline.scored.values())))
                taken += 1
    assert taken
