"""Searches the placements of a config on given machines: estimates rank all legal ones, simulation compares the best.

A candidate divides the devices between actor, inference and rollout, or colocates all groups, and chooses TP, PP, CP, EP
and recomputation of the Megatron groups and TP of the engines. Every one passes the checks of `planning.splits` and the
memory plan, and is simulated with each schedule. A critic has the actor's devices. Other settings stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from shlex import quote
from statistics import fmean
from typing import Any

from rlsys.apps.planner.answer import Planner, check
from rlsys.apps.planner.costs import HardwareCosts
from rlsys.apps.planner.estimate import calls_s, generation_s
from rlsys.apps.planner.simulation import measured_steps
from rlsys.cluster.planning.cost import EXPECTED
from rlsys.cluster.planning.placement import CRITIC
from rlsys.cluster.planning.resolve import make_plan
from rlsys.cluster.planning.splits import (
    fits,
    inference_choices,
    joined,
    rollout_choices,
    settings_of,
    training_choices,
)
from rlsys.config.derived import has_critic, megatron_groups
from rlsys.config.schema import AsyncSchedule, Mode, PipelinedSchedule, RunConfig, SequentialSchedule, SyncMode
from rlsys.errors import UserError
from rlsys.trainer.batches import SampleSize

SIMULATED = 4
"""Divisions of the devices that are simulated, with each schedule."""
STALENESS = (1, 2)
"""`max_staleness` of the async schedules that are simulated."""
EPISODES = 6_000
"""Episodes that are simulated of each candidate by default."""
_DRAWN = 32
"""Prompt groups whose lengths the estimates use."""

Choice = tuple[float, RunConfig]
"""Estimated seconds of a stage, and the config with the devices and sizes of its groups."""


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths of the workload's episodes."""

    generated: list[float]
    """Sorted."""
    prompt: float
    """Tokens that an engine prefills for an episode: its prompt, and its observations."""
    size: SampleSize


class PlacementSearch:
    """Search for the config of `planner` on its machines."""

    def __init__(self, planner: Planner, episodes: int = EPISODES) -> None:
        """`episodes` are simulated of each candidate, in whole steps."""
        self._episodes = episodes
        self._planner, self._model = planner, planner.model
        cluster = planner.config.cluster
        self._devices = cluster.nodes * (cluster.devices_per_node or 0)
        self._training: dict[tuple[Mode, int], Choice] = {}
        self.candidates = 0
        """Placements that have been estimated."""
        if self._devices < 1:
            sentence = "cluster.devices_per_node is null, so there is nothing to divide: set it, or give --on."
            raise UserError(sentence, code="missing", key="cluster.devices_per_node")

    def best(self) -> list[dict[str, Any]]:
        """Return the simulated candidates that no other one beats, the fastest first.

        One beats another if it has no lower throughput, no higher staleness and no more memory, and is better in one of
        them. Raises UserError if no placement is legal.
        """
        found = [self._figures(config) for config in self._simulated()]
        if not found:
            sentence = f"no placement of {self._planner.config.name} fits on {self._devices} x {self._planner.device}: "
            sentence += "use more devices or lower actor.micro_batch_tokens."
            raise UserError(sentence, code="conflict", key="cluster.placement")
        beaten = [one for one in found if any(_beats(other, one) for other in found)]
        return sorted((one for one in found if one not in beaten), key=lambda one: -one["tokens_per_s"])

    def _simulated(self) -> Iterator[RunConfig]:
        """Yield the configs to simulate, each of which can run."""
        together, apart = self._colocated(), self._apart()
        for config in [*together, *apart[:SIMULATED]]:
            schedules: list[Any] = [SequentialSchedule(kind="sequential")]
            if config.cluster.mode is Mode.disaggregated:
                ahead = [AsyncSchedule(kind="async", max_staleness=bound) for bound in STALENESS]
                schedules = [PipelinedSchedule(kind="pipelined"), *ahead]
            for schedule in schedules:
                one = replace(config, trainer=replace(config.trainer, schedule=schedule))
                if _runs(one):
                    yield one

    def _apart(self) -> list[RunConfig]:
        """Return the best config of each division of the devices, by its longest stage."""
        base, found = self._based(Mode.disaggregated), list[tuple[float, float, int, RunConfig]]()
        for first in range(2, self._devices):
            rollout = self._shortest(rollout_choices(base, self._model, first, self._devices - first), ("rollout",))
            for actors in range(1, first) if rollout[0] < inf else ():
                training = self._trained(base, actors)
                if training[0] == inf:
                    continue
                inference = self._shortest(inference_choices(base, self._model, actors, first - actors), ("inference",))
                seconds = [choice[0] for choice in (training, inference, rollout)]
                if max(seconds) < inf:
                    whole = joined(training[1], inference[1], rollout[1])
                    found.append((max(seconds), sum(seconds), len(found), whole))
        return [config for *_, config in sorted(found)]

    def _colocated(self) -> list[RunConfig]:
        """Return the best config in which all groups have all devices, if one is legal."""
        base = self._based(Mode.colocated)
        training = self._trained(base, self._devices)
        inference = self._shortest(inference_choices(base, self._model, 0, self._devices), ("inference",))
        rollout = self._shortest(rollout_choices(base, self._model, 0, self._devices), ("rollout",))
        if max(choice[0] for choice in (training, inference, rollout)) == inf:
            return []
        return [joined(training[1], inference[1], rollout[1])]

    def _based(self, mode: Mode) -> RunConfig:
        """Return the config with its groups apart or together, and a weight sync that can serve them."""
        config = self._planner.config
        cluster = replace(config.cluster, mode=mode)
        if cluster.nodes > 1:
            cluster.sync_mode = SyncMode.disk if mode is Mode.colocated else SyncMode.broadcast
        elif mode is Mode.colocated and cluster.sync_mode is SyncMode.broadcast:
            cluster.sync_mode = SyncMode.ipc
        kind: Any = (
            SequentialSchedule(kind="sequential") if mode is Mode.colocated else PipelinedSchedule(kind="pipelined")
        )
        return replace(config, cluster=cluster, trainer=replace(config.trainer, schedule=kind))

    def _trained(self, base: RunConfig, count: int) -> Choice:
        key = (base.cluster.mode, count)
        if key not in self._training:
            groups = ("actor", CRITIC) if has_critic(base.algorithm) else ("actor",)
            self._training[key] = self._shortest(training_choices(base, self._model, count), groups)
        return self._training[key]

    def _shortest(self, choices: Iterable[RunConfig], groups: tuple[str, ...]) -> Choice:
        """Return the choice with the shortest stage among those whose `groups` fit on a device together."""
        timed = sorted(((self._stage_s(one, groups), one) for one in choices), key=lambda pair: pair[0])
        self.candidates += len(timed)
        return next((pair for pair in timed if fits(pair[1], self._model, groups)), (inf, self._planner.config))

    def _stage_s(self, config: RunConfig, groups: tuple[str, ...]) -> float:
        """Return the estimated seconds in which `groups` work on a step."""
        lengths, costs = (
            self._lengths,
            HardwareCosts(config, self._model, self._planner.device, self._planner.reached, EXPECTED),
        )
        episodes = config.trainer.prompts_per_step * config.algorithm.n_samples
        if groups == ("rollout",):
            engines = len(costs.ranks["rollout"]) // config.rollout.engine.tp - (config.eval.engines or 0)
            return generation_s(costs.engine(), lengths.generated, lengths.prompt, episodes / engines)
        seconds = 0.0
        for name, call in costs.calls().items():
            group = CRITIC if name == "values" else name
            if group not in groups:
                continue
            settings = megatron_groups(config)[group]
            parallel = settings.parallel
            copies = len(costs.ranks[group]) // (parallel.tp * parallel.pp * parallel.cp)
            updates = config.trainer.mini_batches if call.apply_s else 1
            seconds += calls_s(call, lengths.size, episodes / copies, settings.micro_batch_tokens, updates)
        return seconds

    @cached_property
    def _lengths(self) -> _Lengths:
        config, workload = self._planner.config, self._planner.workload
        groups = (workload.group(config, 0, number, config.algorithm.n_samples) for number in range(_DRAWN))
        drawn = [one for group in groups for one in group]
        tokens, generated = fmean(one.tokens for one in drawn), fmean(one.generated for one in drawn)
        observed = tokens - generated - drawn[0].prompt
        prompt = drawn[0].prompt / config.algorithm.n_samples + observed
        return _Lengths(sorted(one.generated for one in drawn), prompt, SampleSize(round(tokens), round(generated)))

    def _figures(self, config: RunConfig) -> dict[str, Any]:
        """Simulate `config`; return its figures, and the overrides that make it."""
        found = self._planner.simulated(config, self._planner.workload, measured_steps(config, self._episodes))
        memory = max(group["memory_gib_per_rank"] for group in make_plan(config)["groups"].values())
        return {
            "step_s": found.step_s,
            "tokens_per_s": sum(step.tokens for step in found.steps) / found.seconds,
            "staleness": max(one for step in found.steps for one in step.staleness),
            "memory_gib_per_rank": memory,
            "schedule": config.trainer.schedule.kind,
            "placement": dict(config.cluster.placement),
            "overrides": _overrides(config),
        }


def _runs(config: RunConfig) -> bool:
    try:
        check(config)
    except UserError:
        return False
    return True


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(one["tokens_per_s"], other["tokens_per_s"])]
    pairs += [(-one[key], -other[key]) for key in ("staleness", "memory_gib_per_rank")]
    return all(mine >= its for mine, its in pairs) and any(mine > its for mine, its in pairs)


def _overrides(config: RunConfig) -> list[str]:
    """Return the settings of `config` that a search may change, as arguments of a command line."""
    cluster, schedule = config.cluster, config.trainer.schedule
    settings = {
        **settings_of(config),
        "cluster.nodes": cluster.nodes,
        "cluster.devices_per_node": cluster.devices_per_node,
        "cluster.mode": cluster.mode,
        "cluster.sync_mode": cluster.sync_mode,
        "trainer.schedule": f"{{kind: {schedule.kind}"
        + (f", max_staleness: {schedule.max_staleness}" if isinstance(schedule, AsyncSchedule) else "")
        + "}",
    }
    return [f"{key}={str(value).strip(chr(34))}" for key, value in settings.items()]


def render_search(found: list[dict[str, Any]], candidates: int) -> str:
    """Format the result of a search as lines of text."""
    lines = [f"{candidates:,} placements estimated; those that no other one beats:"]
    for one in found:
        placed = ", ".join(f"{group} {ranks}" for group, ranks in one["placement"].items())
        lines.append(
            f"  {one['step_s']:8.1f} s  {one['tokens_per_s']:10,.0f} tokens/s  staleness {one['staleness']}  "
            f"{one['memory_gib_per_rank']:5.1f} GiB  {one['schedule']}: {placed}"
        )
    pasted = " ".join(map(quote, found[0]["overrides"]))
    return "\n".join([*lines, "", "The fastest, as overrides:", pasted])
