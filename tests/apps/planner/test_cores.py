"""Tests of workers that share cores: by hand, and the total work that a machine can do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rlsys.apps.planner.cores import Cores, SharedCores
from rlsys.apps.planner.engine import Prefix, Request, SimulatedEngine
from rlsys.apps.planner.virtual_time import now, run_virtually
from tests.apps.planner.made import FREE, config_of, costs_of, simulated

ONE = Cores(1.0, {"rollout": 1.0, "actor": 1.0})


def ends_of_two(cores: Cores | None) -> tuple[float, float]:
    """Return when work of 2 s that begins at once ends, and work of 1 s that begins after 1 s."""

    async def run() -> tuple[float, float]:
        shared, ended = SharedCores(cores), dict[str, float]()

        async def work(name: str, after: float, seconds: float) -> None:
            await asyncio.sleep(after)
            await shared.work(name, "actor", seconds)
            ended[name] = now()

        await asyncio.gather(work("first", 0.0, 2.0), work("second", 1.0, 1.0))
        return ended["first"], ended["second"]

    return run_virtually(run())


@pytest.mark.parametrize(("cores", "ends"), [(None, (2, 2)), (Cores(2, {}), (2, 2)), (ONE, (3, 3))])
def test_workers_share_a_core_equally(cores: Cores | None, ends: tuple[float, float]) -> None:
    assert ends_of_two(cores) == pytest.approx(ends)


def test_an_engine_decodes_slower_beside_other_work() -> None:
    """100 steps of 0.01 s, half of them at half the speed because 0.5 s of other work begin after 0.5 s."""

    async def run() -> float:
        shared, done = SharedCores(ONE), asyncio.Event()
        engine = SimulatedEngine(replace(FREE, token_s=0.01), cores=shared)
        engine.submit(Request(Prefix(0, 1), ended=lambda _: done.set(), left=100))
        await asyncio.sleep(0.5)
        await asyncio.gather(shared.work("other", "actor", 0.5), done.wait())
        return now()

    assert run_virtually(run()) == pytest.approx(1.5)


def test_overlap_gains_nothing_on_one_core() -> None:
    engine = replace(FREE, token_s=0.00125)
    costs = costs_of(engine, 1e-3, 5e-4, cores=Cores(1.0, {}))
    apart, together = (simulated(config_of(staleness=staleness), costs, measured=6).step_s for staleness in (None, 1))
    assert together == pytest.approx(apart, rel=0.15)
    assert simulated(config_of(staleness=1), replace(costs, cores=None), measured=6).step_s < 0.8 * together
