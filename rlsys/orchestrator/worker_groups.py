"""Starts the worker processes of all groups, and ends them.

Contract: `started_groups` gives empty processes, `build_groups` makes the workers in them: side by side where
every group has devices of its own; one after the other, each leaving the devices before the next comes, where
they share them. On the way out every process is ended, whatever the reason.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlsys.cluster.bundles import plan_bundles
from rlsys.cluster.planning.placement import CRITIC, parse_placement
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.derived import has_critic, on_update
from rlsys.config.schema import Device, Mode, RunConfig
from rlsys.observe import status
from rlsys.orchestrator.megatron_groups import launch_megatron
from rlsys.orchestrator.offloading import OffloadManager

STOP_TIMEOUT_S = 30.0


@asynccontextmanager
async def started_groups(config: RunConfig, log_dir: Path) -> AsyncIterator[dict[str, WorkerGroup]]:
    """The processes of all groups, empty."""
    several = config.cluster.nodes > 1
    plan = plan_bundles(holdings(config), config.cluster.devices_per_node if several else None)
    with ray_runtime(config.cluster, plan.sizes, plan.machines) as bundles:
        groups: dict[str, WorkerGroup] = {}
        try:
            for name, slots in plan.slots.items():
                concurrency = config.rollout.max_episodes + 16 if name == "rollout" else 0
                groups[name] = WorkerGroup.launch(
                    name,
                    bundles,
                    slots,
                    config.cluster,
                    log_dir,
                    concurrency=concurrency,
                    variables=_search_token(config),
                )
            yield groups
        finally:
            for group in groups.values():
                group.kill()


def _search_token(config: RunConfig) -> dict[str, str]:
    """The variable with the search servers' token, which other machines may not have in their environment."""
    name = config.search.token_env
    return {name: os.environ[name]} if name and name in os.environ else {}


async def build_groups(
    config: RunConfig,
    groups: Mapping[str, WorkerGroup],
    devices: OffloadManager,
    done: int = 0,
) -> None:
    """Make the workers of all groups. With `done` steps behind it, a run draws otherwise than at its beginning."""

    async def build(name: str) -> None:
        status.show("starts", name)
        await _build(name, groups[name], config, done)
        await devices.built(name)
        status.show("waits for the other groups to start", name)

    if config.cluster.mode is Mode.collocated:
        for name in groups:
            await build(name)
    else:
        async with asyncio.TaskGroup() as builds:
            for name in groups:
                builds.create_task(build(name))
    for name in groups:
        status.show("waits for weight sync" if name == "rollout" else "waits for rollouts", name)


def _rollout_worker(config: RunConfig, seed: int) -> Any:
    """Build one engine's worker, in its own process; `search.url` names a running server."""
    from rlsys.rollout.engine import RolloutWorker  # loads SGLang, which the driver has no use for

    cluster = config.cluster
    return RolloutWorker(
        model_path=config.model.path,
        rollout=config.rollout,
        task=config.task,
        search=config.search,
        device=cluster.device,
        seed=seed,
        on_update=on_update(config),
        memory_saver=cluster.mode is Mode.collocated and cluster.device is Device.gpu,
        sampled_answers=config.compat.sampled_validation,
    )


async def _build(name: str, group: WorkerGroup, config: RunConfig, done: int) -> None:
    if name == "rollout":
        first = config.trainer.seed + done * len(group.ranks)
        arguments = [(config, first + rank) for rank in range(len(group.ranks))]
        await group.build(_rollout_worker, arguments, config.rollout.engine.start_timeout_s)
    else:
        await launch_megatron(group, name, config)


def holdings(config: RunConfig) -> dict[str, list[tuple[int, ...]]]:
    """The device ranks of each worker process of the groups that the run has, in the order they are built.

    An engine holds `tp` ranks, a Megatron process one.
    """
    with_critic = has_critic(config.algorithm)
    placed = parse_placement(config.cluster.placement, with_critic)
    ranks = {name: sorted(held) for name, held in placed.items()}
    tp = config.rollout.engine.tp
    held: dict[str, list[tuple[int, ...]]] = {
        "rollout": [tuple(ranks["rollout"][i : i + tp]) for i in range(0, len(ranks["rollout"]), tp)]
    }
    trained = ("actor", CRITIC) if with_critic else ("actor",)
    for name in ("inference", *trained) if config.algorithm.recompute_logprobs else trained:
        held[name] = [(rank,) for rank in ranks[name]]
    return held
