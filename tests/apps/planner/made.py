"""Small configs, costs, workloads and requests of simulated runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsys.apps.planner.costs import Costs
from rlsys.apps.planner.engine import Prefix, Request, SimulatedEngine
from rlsys.apps.planner.simulation import Simulated, simulate
from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.work import CallCosts, EngineCosts, SyncCosts
from rlsys.config.schema import (
    AsyncSchedule,
    Device,
    PipelinedSchedule,
    RunConfig,
    SequentialSchedule,
)
from rlsys.weights.flops import Flops

FLOPS = Flops(1.0)
FREE = EngineCosts(
    step_s=0.0,
    weights_s=0.0,
    experts_s=0.0,
    expert_share=0.0,
    token_s=0.0,
    request_s=0.0,
    cache_s=0.0,
    prefill_s=0.0,
    pair_s=0.0,
    cache_tokens=1e9,
    max_running=1000,
)
EQUAL = Workload(prompt=10, turn=100, spread=0.0, calls=0, calls_vary=0, tool_s=0.0, tool_spread=0.0, tools_per_s=0.0)
"""Every episode has 10 prompt tokens and one turn of 100 tokens."""


def config_of(
    prompts: int = 4, samples: int = 2, engines: int = 1, staleness: int | None = 0, **changes: Any
) -> RunConfig:
    """Return a config without a model: staleness None is sequential, 0 pipelined, else async."""
    config = RunConfig()
    config.cluster.device = Device.cpu
    config.cluster.placement = {"actor": "0", "inference": "1", "rollout": f"2-{1 + engines}" if engines > 1 else "2"}
    config.algorithm.n_samples = samples
    config.trainer.prompts_per_step = prompts
    config.trainer.schedule = {None: SequentialSchedule(kind="sequential"), 0: PipelinedSchedule(kind="pipelined")}.get(
        staleness, AsyncSchedule(kind="async", max_staleness=staleness or 0)
    )
    for key, value in changes.items():
        holder: Any = config
        *groups, name = key.split("__")
        for group in groups:
            holder = getattr(holder, group)
        setattr(holder, name, value)
    return config


def costs_of(engine: EngineCosts, training: float, inference: float, **changes: Any) -> Costs:
    """Return costs in which training and log-probs of a token take so many seconds, and all else nothing."""
    nothing: Mapping[str, Any] = {"launch_s": 0.0, "token_s": 0.0, "stages": 1, "call_s": 0.0, "passes": 1}
    calls = {
        name: CallCosts(flops=FLOPS, rate=1 / seconds, **nothing)
        for name, seconds in (("actor", training), ("inference", inference))
    }
    costs = Costs(
        engine=engine,
        calls=calls,
        sync=SyncCosts(0.0, 0.0, 0.0, 0.0, 0.0),
        switches={},
        reward_s=0.0,
        step_s=0.0,
        peak=0.0,
        source={},
    )
    return replace(costs, **changes)


def simulated(
    config: RunConfig, costs: Costs, workload: Workload = EQUAL, measured: int = 3, seed: int = 0, whole: bool = False
) -> Simulated:
    """Simulate with token counts as operations."""
    return simulate(config, costs, workload, FLOPS, measured, seed, whole)


def leaving(engine: SimulatedEngine, count: int) -> tuple[Callable[[Request], None], asyncio.Event]:
    """Return a function by which a request leaves `engine`, and an event that `count` calls of it set."""
    done, left = asyncio.Event(), [count]

    def leave(request: Request) -> None:
        engine.leave(request)
        left[0] -= 1
        if not left[0]:
            done.set()

    return leave, done


def ends(costs: EngineCosts, lengths: Sequence[int], prompt: int = 10) -> tuple[list[float], SimulatedEngine]:
    """Return the time at which each request of one turn ends, all submitted at once, and the engine."""
    found = [0.0] * len(lengths)

    async def run() -> SimulatedEngine:
        engine = SimulatedEngine(costs)
        leave, done = leaving(engine, len(lengths))

        def end(number: int, request: Request) -> None:
            found[number] = now()
            leave(request)

        for number, length in enumerate(lengths):
            request = Request(Prefix(prompt, 1), ended=lambda one, number=number: end(number, one), left=length)
            engine.submit(request)
        await done.wait()
        return engine

    return found, run_virtually(run())
