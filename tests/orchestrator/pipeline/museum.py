"""Hangs that other systems have published, each planted in rlsys, and the search or simulation that must find it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import Members
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.orchestrator.weight_sync import WeightSync
from tests.orchestrator.groups.seeded_run import SeededRun
from tests.orchestrator.groups.simulated_sync import check_syncs_while_engines_die
from tests.orchestrator.pipeline.exhaustive import Scope, explore
from tests.orchestrator.pipeline.planted import rewritten
from tests.orchestrator.pipeline.simulation import simulate

SEEDS = 200


def search(**scope: Any) -> Callable[[], None]:
    """Return a function that explores a scope and raises what it finds."""
    return lambda: _ends(Scope(**scope))


def _ends(scope: Scope) -> None:
    assert not explore(scope).endless()


def seeds(run: Callable[[int], object]) -> Callable[[], None]:
    """Return a function that runs simulations and raises what they find."""

    def find() -> None:
        for seed in range(SEEDS):
            run(seed)

    return find


def pool(seed: int) -> None:
    """Simulate the engine pool."""

    async def run() -> None:
        await SeededRun(seed).run()

    run_virtually(run())


def sync() -> None:
    """Simulate weight syncs during which engines die."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        check_syncs_while_engines_die(Path(folder), monkeypatch)


@dataclass(frozen=True)
class Exhibit:
    """A hang and its copy in rlsys."""

    issue: str
    hung: str
    """What hung there, in a few words."""
    method: Callable[..., Any]
    old: str
    new: str
    found_by: str
    find: Callable[[], None]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the hang during the body."""
        owner = getattr(sys.modules[self.method.__module__], self.method.__qualname__.partition(".")[0])
        with patch.object(owner, self.method.__name__, rewritten(self.method, self.old, self.new)):
            yield


ON_POLICY = search(sizes=(2,), steps=2)
MUSEUM = (
    Exhibit(
        "SkyRL#1173",
        "a generation task ends without a result; the buffer never fills",
        RolloutPipeline._roll,
        "self._drop(prompt_group, DropReason.lost)",
        "return",
        "simulation",
        seeds(simulate),
    ),
    Exhibit(
        "NeMo-RL#3488",
        "the rollout worker has died; the trainer polls an empty buffer",
        RolloutPipeline._roll,
        "except GroupLost:\n        pass",
        "except Exception:\n        return",
        "simulation",
        seeds(simulate),
    ),
    Exhibit(
        "slime#2399",
        "an error is logged in the worker and never reaches the consumer",
        RolloutPipeline._score,
        "finished = self._handlers.finish(scored)",
        """
            try:
                finished = self._handlers.finish(scored)
            except Exception:
                continue
""",
        "simulation",
        seeds(simulate),
    ),
    Exhibit(
        "torchforge#557",
        "with staleness 0, groups of the version before the sync are evicted as fast as they come",
        StalenessScheduler.may_admit,
        "self._last_step(self.published, self.version)",
        "self._last_step(self.version, self.version)",
        "search",
        ON_POLICY,
    ),
    Exhibit(
        "NeMo-RL#3066",
        "after a resume nobody generates the groups of the next step",
        RolloutPipeline._resume,
        "self._to_resume[prompt_group] =",
        "_ =",
        "search",
        search(sizes=(1,), steps=2, resumes=True, kind="async", max_staleness=1),
    ),
    Exhibit(
        "NeMo-RL#2899",
        "the collector iterates over the prompts once and ends; training goes on waiting",
        RolloutPipeline._roll_all,
        "if self._stopping:",
        "if self._stopping or self.scheduler._admitted == 3:",
        "search",
        ON_POLICY,
    ),
    Exhibit(
        "tinker-cookbook#480",
        "the end of the run wakes no loop that waits",
        RolloutPipeline._drop_and_cancel,
        "self._changed.set()",
        "pass",
        "search",
        ON_POLICY,
    ),
    Exhibit(
        "prime-rl#1372",
        "after a weight sync one group is started at a time, whatever the room",
        RolloutPipeline._roll_all,
        "task.add_done_callback(partial(self._forget_task, prompt_group))",
        "task.add_done_callback(partial(self._forget_task, prompt_group)); await asyncio.wait({task})",
        "search",
        ON_POLICY,
    ),
    Exhibit(
        "AReaL#1396",
        "a limit on concurrency that is scaled down twice is 0",
        RolloutPipeline._may_roll,
        "max(1, self._generator.capacity)",
        "self._generator.capacity // 10",
        "search",
        ON_POLICY,
    ),
    Exhibit(
        "SkyRL#1691",
        "a cancelled group keeps its slot",
        RolloutPipeline._forget_task,
        "del self._rolling[prompt_group], self._resumed_from[prompt_group]",
        "self._resumed_from.pop(prompt_group) if _.cancelled() else self._rolling.pop(prompt_group)",
        "search",
        search(sizes=(2,), steps=2, oversample=1.5, slots=1),
    ),
    Exhibit(
        "slime#2238",
        "completed groups beyond the batch are thrown away, their prompts too",
        RolloutPipeline.take,
        "    self._drop_unschedulable()",
        "    self._scored.clear()\n    self._drop_unschedulable()",
        "search",
        search(sizes=(1, 1, 1), steps=1, most=2),
    ),
    Exhibit(
        "AReaL#1180",
        "engines stay paused after a weight update",
        Members.switched,
        "self._change(one, version=version)",
        "self",
        "search",
        ON_POLICY,
    ),
    Exhibit(
        "prime-rl#2912",
        "the end of an evaluation wakes no rollout",
        EnginePool._on_change,
        "    self._advance()",
        "    pass",
        "simulation of the engine pool",
        seeds(pool),
    ),
    Exhibit(
        "TRL#6797",
        "the receiver of the weights is gone; the sender stays in a collective that has no time-out",
        WeightSync._attempt,
        "self._meetings[-1].end()",
        "pass",
        "simulation of weight syncs",
        sync,
    ),
)
