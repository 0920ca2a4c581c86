"""Test of the engine pool in seeded runs that mix deaths, silence, cancellations, updates and evaluations."""

from __future__ import annotations

from collections import Counter

from rlsys.apps.planner.virtual_time import run_virtually
from tests.orchestrator.groups.seeded_run import SeededRun


def test_every_group_ends_in_any_interleaving_of_deaths_cancellations_and_updates() -> None:
    outcomes: Counter[str] = Counter()
    evaluations: Counter[str] = Counter()
    split: Counter[bool] = Counter()

    async def one(seed: int) -> None:
        seeded = SeededRun(seed)
        await seeded.run()
        outcomes.update(seeded.outcomes)
        evaluations.update(seeded.evaluations)
        split[seeded.continues] += len(seeded.engines.split)

    for seed in range(60):
        run_virtually(one(seed))
    assert {"whole", "cancelled", "engine_died", "timeout", "end"} <= outcomes.keys()
    assert {"done", "cancelled", "GroupLost", "NoneSetAside", "NoEngineLeft"} <= evaluations.keys()
    assert split[True] > 0 == split[False], "a switch waits for groups unless they continue"
