"""Answers what a step of a config costs: prediction, bottleneck, and what would help most."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rlsys.apps.planner.calibrate import Calibration
from rlsys.apps.planner.costs import Costs, by_formula
from rlsys.apps.planner.simulation import Simulated, measured_steps, simulate
from rlsys.apps.planner.whole_run import whole_run
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.hardware import DEVICE, SPEEDS, Reached
from rlsys.cluster.planning.placement import memory_problems, parse_placement
from rlsys.cluster.planning.resolve import make_plan, overlap
from rlsys.cluster.planning.work import HardwareCosts
from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.config.derived import has_critic, heldout_files, max_staleness, megatron_groups, train_files
from rlsys.config.schema import AsyncSchedule, Device, Mode, RunConfig
from rlsys.errors import UserError
from rlsys.observe.spans import stage_seconds
from rlsys.orchestrator.validate import validate
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import Architecture, read_architecture

NOT_CHECKED = ("task.train_path", "task.eval_path", "search.", "tracking.", "resume")
"""Keys whose problems do not concern a plan: the files of the data and of the search need not be here."""
STAGES = {"rollout": "rollout", "logprob": "inference", "values": "values", "train": "training", "sync": "weight sync"}
"""Stage of spans -> its name in an answer."""
_WORTH = 0.01
"""Share of a step that a change must save to be shown."""
_HELPS = 6_000
"""Episodes of a simulation that tells what a change would save."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines to plan for, such as 2x8xH100."""

    nodes: int
    devices: int
    """Devices of one machine."""
    device: str

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Read [MACHINES x] DEVICES x KIND. Raises UserError."""
        *counts, device = text.split("x")
        kinds = {name.upper(): name for name in SPEEDS}
        if not 1 <= len(counts) <= 2 or not all(re.fullmatch(r"[1-9]\d{0,5}", count) for count in counts):
            sentence = (
                f"--on {text} is not of the form 8xH100 or 2x8xH100: give machines, devices per machine and kind."
            )
            raise UserError(sentence, code="malformed", key="--on")
        if device.upper() not in kinds:
            sentence = f"--on {text} names the device {device}, which has no data sheet here: use {', '.join(SPEEDS)}."
            raise UserError(sentence, code="unknown", key="--on")
        *nodes, devices = map(int, counts)
        return cls(nodes[0] if nodes else 1, devices, kinds[device.upper()])

    def applied(self, config: RunConfig) -> RunConfig:
        """Return `config` on these machines."""
        speed = SPEEDS[self.device]
        kind = Device.cpu if self.device == "CPU" else Device.gpu
        memory = None if kind is Device.cpu else speed.memory_gib
        cluster = replace(
            config.cluster, device=kind, nodes=self.nodes, devices_per_node=self.devices, device_memory_gib=memory
        )
        return replace(config, cluster=cluster)


class Planner:
    """Predicts the steps of `config` and of its variations on devices named `device`."""

    def __init__(
        self,
        config: RunConfig,
        device: str,
        reached: Reached,
        source: str,
        workload: Workload,
        seed: int = 0,
        calibration: Calibration | None = None,
    ) -> None:
        """`source` tells where `reached` comes from; a `calibration` replaces costs by measured ones."""
        self.config, self.device, self.workload, self.reached = config, device, workload, reached
        self._source, self._seed, self._calibration = source, seed, calibration

    @cached_property
    def model(self) -> Architecture:
        """Sizes of the model."""
        return read_architecture(self.config.model.path, self.config.model.family)

    def costs(self, config: RunConfig) -> Costs:
        costs = by_formula(HardwareCosts(config, self.model, self.device, self.reached), self._source)
        return costs if self._calibration is None else self._calibration.applied(costs)

    def simulated(self, config: RunConfig, workload: Workload, measured: int | None = None) -> Simulated:
        """Simulate steps of `config`."""
        return simulate(config, self.costs(config), workload, flops_of(self.model), measured, self._seed)

    def run(self, measured: int | None = None) -> Simulated:
        """Simulate steps of the config. Raises UserError if it cannot run."""
        check(self.config)
        return self.simulated(self.config, self.workload, measured)

    def answer(self, found: Simulated, price_per_gpu_hour: float | None = None) -> dict[str, Any]:
        """Return what was simulated as plain data. Seconds are of one step unless a key says otherwise."""
        config, costs = self.config, self.costs(self.config)
        plan = make_plan(config)
        steps, devices = len(found.steps), plan["world_size"]
        tokens = sum(step.tokens for step in found.steps)
        staleness = [one for step in found.steps for one in step.staleness]
        hours = whole_run(config, self.model, self.device, costs, self.workload, found.step_s, devices)
        return {
            "name": config.name,
            "devices": devices,
            "device": self.device,
            "schedule": {"kind": config.trainer.schedule.kind, "overlap": overlap(config)},
            "step_s": found.step_s,
            "stages_s": stages(found),
            "actor_s": activities(found, "actor"),
            "idle": {name: 1 - share for name, share in found.busy.items()},
            "tokens_per_s": tokens / found.seconds,
            "tokens_per_s_per_device": tokens / found.seconds / devices,
            "generated_per_s": sum(step.generated for step in found.steps) / found.seconds,
            "mfu": found.operations / found.seconds / costs.peak if costs.peak else None,
            "memory_gib_per_rank": {name: group["memory_gib_per_rank"] for name, group in plan["groups"].items()},
            "staleness": {"mean": fmean(staleness), "max": max(staleness), "bound": max_staleness(config)},
            "episodes": {
                "in_flight": found.in_flight,
                "latency_s": found.latency_s,
                "retracted": found.retracted / steps,
            },
            "dropped": dict(found.dropped),
            "run": {
                "steps": config.trainer.steps,
                "hours": sum(hours.values()),
                "hours_of": hours,
                "cost": None if price_per_gpu_hour is None else sum(hours.values()) * devices * price_per_gpu_hour,
            },
            "bottleneck": bottleneck(found),
            "costs": dict(costs.source),
            "simulated": {"steps": steps, "events": found.events, "seed": self._seed},
        }

    def helps(self, report: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
        """Return changes, each with the seconds of a step that it gives, those that save most first.

        `report` gets the name of each before it is simulated, which takes minutes for a large run.
        """
        measured = measured_steps(self.config, _HELPS)
        base = self.simulated(self.config, self.workload, measured).step_s
        found: list[dict[str, Any]] = []
        for change, config, workload in self._changes():
            report(change)
            seconds = self.simulated(config, workload, measured).step_s
            found.append({"change": change, "step_s": seconds, "saves_s": base - seconds})
        return sorted(found, key=lambda one: one["step_s"])

    def _changes(self) -> Iterator[tuple[str, RunConfig, Workload]]:
        config, workload = self.config, self.workload
        if config.cluster.mode is Mode.disaggregated:
            sizes = {"rollout": config.rollout.engine.tp}
            for name, settings in megatron_groups(config).items():
                if name in config.cluster.placement:
                    sizes[name] = settings.parallel.tp * settings.parallel.pp * settings.parallel.cp
            for name, size in sizes.items():
                what = "one more engine" if name == "rollout" else f"one more data-parallel rank of {name}"
                yield f"{what} (+{size} devices)", _grown(config, name, size), workload
            bound = max_staleness(config) + 1
            schedule = AsyncSchedule(kind="async", max_staleness=bound)
            yield f"async with max_staleness={bound}", _scheduled(config, schedule), workload
        if config.model.recompute:
            model = replace(config.model, recompute=False)
            yield "model.recompute=false, if memory allows", replace(config, model=model), workload
        if workload.calls:
            yield "half the latency of tools", config, replace(workload, tool_s=workload.tool_s / 2)
        if workload.spread:
            yield "turns of equal length", config, replace(workload, spread=0.0)


def check(config: RunConfig) -> None:
    """Raise UserError if `config` cannot run on its machines, whatever the files of its data."""
    files = (*train_files(config.task), *heldout_files(config.task))
    validate(config, ignored=(*NOT_CHECKED, *(file.key for file in files)))
    # `validate` checks memory only if all else is sound, the files of the data included.
    for problem in memory_problems(config, make_plan(config)):
        raise problem


def with_shape(config: RunConfig) -> RunConfig:
    """Return `config` with a model folder that can be read: `model.path`, or the project's file with the model's shape."""
    if Path(config.model.path).exists():
        return config
    return replace(config, model=replace(config.model, path=str(shape_of(config.model.path))))


def shape_of(model_path: str) -> Path:
    """Return the folder with the shape of the model `model_path`. Raises UserError if there is none."""
    shapes = PROJECT_CONFIGS / "model" / "shapes"
    folder = shapes / Path(model_path).name.lower()
    # A base model has the shape of its instruct model.
    for found in (folder, folder.with_name(f"{folder.name}-instruct")):
        if found.is_dir():
            return found
    known = ", ".join(sorted(path.name for path in shapes.iterdir()))
    raise UserError(
        f"model.path={model_path} is not a model folder, and its name is not one of those whose shape is known ({known}): "
        "give a folder that has the model's config.json.",
        code="not_found",
        key="model.path",
    )


def stages(found: Simulated) -> dict[str, float]:
    """Return stage -> seconds of a step in which a worker was in it; stages overlap."""
    seconds = stage_seconds(found.spans, (round(found.begin_s * 1e9), round(found.steps[-1].end_s * 1e9)))
    return {name: seconds[stage] / len(found.steps) for stage, name in STAGES.items() if stage in seconds}


def activities(found: Simulated, group: str) -> dict[str, float]:
    """Return activity -> seconds of a step, the longest first; they sum to the step."""
    spent: defaultdict[str, float] = defaultdict(float)
    for text, seconds in found.doing[group].items():
        spent[_kind_of(text)] += seconds / len(found.steps)
    ranked = sorted(spent.items(), key=lambda pair: -pair[1])
    return {text: seconds for text, seconds in ranked if seconds > 0}


def bottleneck(found: Simulated) -> str:
    """Return a sentence that names the group that bounds a step."""
    ranked = sorted(found.busy.items(), key=lambda pair: -pair[1])
    (first, share), others = ranked[0], ranked[1:]
    rest = ", ".join(f"{name} {busy:.0%}" for name, busy in others)
    waits = {text: spent for text, spent in activities(found, "actor").items() if text.startswith("waits")}
    text, seconds = max(waits.items(), key=lambda pair: pair[1], default=("waits for nothing", 0.0))
    sentence = f"{first} works {share:.0%} of the time, more than any other group ({rest}); "
    return f"{sentence}the actor {text} for {seconds:.1f} of {found.step_s:.1f} s."


def machines_of(config: RunConfig, on: str | None, placed: bool = True) -> tuple[RunConfig, str]:
    """Return `config` on the machines `on`, and the kind of their devices; without `on`, on those that it states.

    Raises UserError if it is `placed` on another number of devices.
    """
    if on is None:
        return config, DEVICE if config.cluster.device is Device.gpu else "CPU"
    machines = Machines.parse(on)
    ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    used, have = len({rank for held in ranks.values() for rank in held}), machines.nodes * machines.devices
    if placed and used != have:
        sentence = (
            f"--on {on} has {have} devices, but cluster.placement uses {used}: set cluster.placement, or --search."
        )
        raise UserError(sentence, code="mismatch", key="cluster.placement")
    return machines.applied(config), machines.device


def _kind_of(text: str) -> str:
    """Return an activity without its numbers."""
    return re.sub(r" (on|of)? ?\d+ groups?| version \d+", "", text) or "hands over and records"


def _grown(config: RunConfig, group: str, size: int) -> RunConfig:
    """Return `config` with `size` more devices for `group`."""
    placement = config.cluster.placement
    ranks = parse_placement(placement, has_critic(config.algorithm))
    first = max(rank for held in ranks.values() for rank in held) + 1
    grown = {
        **placement,
        group: f"{placement[group]},{first}-{first + size - 1}" if size > 1 else f"{placement[group]},{first}",
    }
    return replace(config, cluster=replace(config.cluster, placement=grown))


def _scheduled(config: RunConfig, schedule: AsyncSchedule) -> RunConfig:
    return replace(config, trainer=replace(config.trainer, schedule=schedule))


def render(answer: Mapping[str, Any]) -> str:
    """Format an answer as lines of text."""

    def pairs(values: Mapping[str, float], form: Callable[[float], str]) -> str:
        return ", ".join(f"{name} {form(value)}" for name, value in values.items())

    seconds: Callable[[float], str] = lambda value: f"{value:.1f} s"  # noqa: E731
    run, stale, mfu = answer["run"], answer["staleness"], answer["mfu"]
    cost = "" if run["cost"] is None else f", cost {run['cost']:,.0f}"
    lines = [
        f"{answer['name']}: {answer['devices']} x {answer['device']}, {answer['schedule']['kind']}: "
        f"{answer['schedule']['overlap']}",
        f"  step        {answer['step_s']:.1f} s, predicted; {run['steps']} steps take {run['hours']:.1f} h{cost}",
        f"  hours       {pairs({part: value for part, value in run['hours_of'].items() if value}, '{:.2f}'.format)}",
        f"  stages      {pairs(answer['stages_s'], seconds)}",
        f"  actor       {pairs(answer['actor_s'], seconds)}",
        f"  idle        {pairs(answer['idle'], '{:.0%}'.format)}",
        f"  tokens      {answer['tokens_per_s']:,.0f} /s, {answer['tokens_per_s_per_device']:,.0f} /s per device"
        + ("" if mfu is None else f", MFU {mfu:.0%}"),
        f"  memory      {pairs(answer['memory_gib_per_rank'], '{:.3g} GiB'.format)} per rank",
        f"  staleness   mean {stale['mean']:.2f}, at most {stale['max']} (bound {stale['bound']})",
        f"  bottleneck  {answer['bottleneck']}",
    ]
    lines += [
        f"  helps       {one['change']}: a step takes {one['saves_s']:.1f} s less"
        for one in answer.get("helps", [])
        if one["saves_s"] > _WORTH * answer["step_s"]
    ]
    return "\n".join([*lines, *(f"  {'costs':11} {part}: {source}" for part, source in answer["costs"].items())])
