"""Searches the placements of a config on given machines: bounds rule out most of them, simulation compares the others.

A candidate divides the devices between actor, inference and rollout, or colocates all groups, and chooses TP, PP, CP, EP
and recomputation of the Megatron groups, TP of the engines, and the schedule. Every one passes the checks of
`planning.splits` and the memory plan. A critic has the actor's devices. Other settings stay.

Candidates are simulated in the order of their estimated step, and the simulated ones are compared in throughput,
staleness and memory. Staleness and memory of a candidate are known beforehand, and its throughput has a bound: each token
of a trained episode takes at least so many seconds of training, of log-probs, and of the engines. Stages that overlap are
bounded by the slowest one, others by the sum. A candidate that a simulated one beats even at its bound is not simulated.

So that the bound holds for the measured steps of a run that is ahead of its training, a stage that did less than these
steps needed counts: the throughput is the one that every stage sustains, `sustained`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from shlex import quote
from statistics import fmean
from typing import Any

from rlsys.apps.planner.answer import Planner, check
from rlsys.apps.planner.estimate import calls_s, generation_s, packed
from rlsys.apps.planner.simulation import Simulated, measured_steps
from rlsys.cluster.planning.memory import GIB, group_memory
from rlsys.cluster.planning.placement import CRITIC
from rlsys.cluster.planning.resolve import make_plan
from rlsys.cluster.planning.splits import (
    fits,
    inference_choices,
    joined,
    rollout_choices,
    scoring_groups,
    settings_of,
    training_choices,
)
from rlsys.cluster.planning.work import HardwareCosts
from rlsys.config.derived import concurrent_episodes, has_critic, max_staleness, megatron_groups, scoring_forwards
from rlsys.config.schema import AsyncSchedule, Mode, PipelinedSchedule, RunConfig, SequentialSchedule, SyncMode
from rlsys.errors import UserError
from rlsys.trainer.batches import SampleSize

MOST = 12
"""Candidates that are simulated by default."""
STALENESS = (1, 2)
"""`max_staleness` of the async schedules."""
EPISODES = 6_000
"""Episodes that are simulated of each candidate by default."""
_DRAWN = 32
"""Prompt groups whose lengths the estimates use."""


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths of the workload's episodes."""

    generated: list[float]
    """Sorted."""
    tokens: list[float]
    """All tokens of each, sorted."""
    prompt: float
    """Mean tokens that an engine prefills for an episode: its share of the group's prompt, and its observations."""

    @property
    def size(self) -> SampleSize:
        """Mean tokens, and those that are trained."""
        return SampleSize(round(fmean(self.tokens)), round(fmean(self.generated)))


@dataclass(frozen=True, slots=True)
class Stage:
    """One way to place and to divide the groups of a stage."""

    config: RunConfig
    """The config with the devices and sizes of these groups."""
    step_s: float
    """Estimated seconds of the stage in a step."""
    token_s: float
    """Seconds of the stage for a token of a trained episode, at least."""
    memory_gib: float
    """Memory of the groups' fullest rank."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One stage of each kind, and a schedule."""

    stages: tuple[Stage, Stage, Stage]
    """Training, inference, rollout."""
    schedule: Any

    @property
    def _overlaps(self) -> bool:
        return self.schedule.kind != "sequential"

    @property
    def order(self) -> tuple[float, float]:
        """Estimated seconds of a step, then the sum of its stages."""
        each = [stage.step_s for stage in self.stages]
        return max(each) if self._overlaps else sum(each), sum(each)

    @property
    def bound(self) -> dict[str, float]:
        """Figures of the candidate, with the throughput that it cannot exceed."""
        each = [stage.token_s for stage in self.stages]
        return {
            "tokens_per_s": 1 / (max(each) if self._overlaps else sum(each)),
            "staleness": getattr(self.schedule, "max_staleness", 0),
            "memory_gib_per_rank": max(stage.memory_gib for stage in self.stages),
        }

    @property
    def config(self) -> RunConfig:
        whole = joined(*(stage.config for stage in self.stages))
        return replace(whole, trainer=replace(whole.trainer, schedule=self.schedule))


class PlacementSearch:
    """Search for the config of `planner` on its machines."""

    def __init__(self, planner: Planner, episodes: int = EPISODES, most: int = MOST) -> None:
        """`episodes` are simulated of each candidate, in whole steps; at most `most` candidates are simulated."""
        self._episodes, self._most = episodes, most
        self._planner, self._model = planner, planner.model
        cluster = planner.config.cluster
        self._devices = cluster.nodes * (cluster.devices_per_node or 0)
        self.counts = {"candidates": 0, "ruled out": 0, "refused": 0, "simulated": 0, "not tried": 0}
        """Number of candidates by what became of them."""
        if self._devices < 1:
            sentence = "cluster.devices_per_node is null, so there is nothing to divide: set it, or give --on."
            raise UserError(sentence, code="missing", key="cluster.devices_per_node")

    def best(self, candidates: Sequence[Candidate] | None = None) -> list[dict[str, Any]]:
        """Return the simulated ones of `candidates`, by default of all, that no other one beats, the fastest first.

        One beats another if it has no lower throughput, no higher staleness and no more memory, and is better in one of
        them. Raises UserError if no placement is legal.
        """
        candidates = self.candidates() if candidates is None else candidates
        found: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(self.counts, 0) | {"candidates": len(candidates)}
        for one in sorted(candidates, key=lambda one: one.order):
            bound = one.bound
            if any(_beats(other, bound) for other in found):
                self.counts["ruled out"] += 1
            elif self.counts["simulated"] == self._most:
                self.counts["not tried"] += 1
            elif not runs(one.config):
                self.counts["refused"] += 1
            else:
                self.counts["simulated"] += 1
                found.append(self.figures(one))
        if not found:
            sentence = f"no placement of {self._planner.config.name} fits on {self._devices} x {self._planner.device}: "
            sentence += "use more devices or lower actor.micro_batch_tokens."
            raise UserError(sentence, code="conflict", key="cluster.placement")
        return unbeaten(found)

    def candidates(self) -> list[Candidate]:
        """Return all candidates that fit into the devices' memory."""
        sequential, pipelined = SequentialSchedule(kind="sequential"), PipelinedSchedule(kind="pipelined")
        ahead = [AsyncSchedule(kind="async", max_staleness=bound) for bound in STALENESS]
        found = [Candidate(stages, sequential) for stages in self._colocated()]
        found += [Candidate(*pair) for pair in product(self._apart(), (pipelined, *ahead))]
        return found

    def _apart(self) -> Iterator[tuple[Stage, Stage, Stage]]:
        """Yield the stages of each division of the devices."""
        base, model = self._based(Mode.disaggregated), self._model
        training = {
            actors: self._stages(training_choices(base, model, actors), self._trained)
            for actors in range(1, self._devices)
        }
        scorers = scoring_groups(base)
        for first in range(1 + len(scorers), self._devices):
            rollout = self._stages(rollout_choices(base, model, first, self._devices - first), ("rollout",))
            for actors in range(1, first) if scorers else (first,):
                if not (rollout and training[actors]):
                    continue
                scoring = inference_choices(base, model, actors, first - actors)
                yield from product(training[actors], self._stages(scoring, scorers), rollout)

    def _colocated(self) -> Iterator[tuple[Stage, Stage, Stage]]:
        """Yield the stages in which all groups have all devices."""
        base, model, devices = self._based(Mode.colocated), self._model, self._devices
        training = self._stages(training_choices(base, model, devices), self._trained)
        inference = self._stages(inference_choices(base, model, 0, devices), scoring_groups(base))
        yield from product(training, inference, self._stages(rollout_choices(base, model, 0, devices), ("rollout",)))

    @property
    def _trained(self) -> tuple[str, ...]:
        return ("actor", CRITIC) if has_critic(self._planner.config.algorithm) else ("actor",)

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

    def _stages(self, choices: Iterable[RunConfig], groups: tuple[str, ...]) -> list[Stage]:
        """Return the choices whose `groups` fit on a device together."""
        return [self._stage(one, groups) for one in choices if fits(one, self._model, groups)]

    def _stage(self, config: RunConfig, groups: tuple[str, ...]) -> Stage:
        work = HardwareCosts(config, self._model, self._planner.device, self._planner.reached)
        step_s, token_s = self._engines(work) if groups == ("rollout",) else self._calls(work, groups)
        memory = max((group_memory(config, self._model, group).total for group in groups), default=0.0)
        return Stage(config, step_s, token_s, round(memory / GIB, 4))

    def _engines(self, work: HardwareCosts) -> tuple[float, float]:
        """Return the estimated seconds of rollouts in a step, and the fewest seconds for a token of an episode."""
        config, lengths, engine = work.config, self._lengths, work.engine()
        episodes = config.trainer.prompts_per_step * config.algorithm.n_samples
        engines = len(work.ranks["rollout"]) // config.rollout.engine.tp - (config.eval.engines or 0)
        step_s = generation_s(engine, lengths.generated, lengths.prompt, episodes / engines)
        # The more requests a decode step has, the less each of them takes; reading their cache would add to that.
        batch = min(
            engine.max_running, max(concurrent_episodes(config.task, config.rollout), config.algorithm.n_samples)
        )
        decoded_s = engine.decode_s(batch, 0)[0] / batch
        episode_s = fmean(lengths.generated) * decoded_s + lengths.prompt * engine.prefill_s
        return step_s, episode_s / fmean(lengths.tokens) / engines

    def _calls(self, work: HardwareCosts, groups: tuple[str, ...]) -> tuple[float, float]:
        """Return the estimated seconds of the calls of `groups` in a step, and the fewest seconds for a token."""
        config, lengths = work.config, self._lengths
        episodes = config.trainer.prompts_per_step * config.algorithm.n_samples
        step_s = token_s = 0.0
        for name, call in work.calls().items():
            group = CRITIC if name == "values" else name
            if group not in groups:
                continue
            settings = megatron_groups(config)[group]
            parallel, budget = settings.parallel, settings.micro_batch_tokens
            copies = len(work.ranks[group]) // (parallel.tp * parallel.pp * parallel.cp)
            updates = config.trainer.mini_batches if call.apply_s else 1
            step_s += calls_s(call, lengths.size, episodes / copies, packed(lengths.tokens, budget), updates)
            if name != "values":  # Values may have been computed before the step.
                token_s += call.least_s(max(budget, config.task.max_total_tokens)) / copies
        return step_s, token_s

    @cached_property
    def _lengths(self) -> _Lengths:
        config, workload = self._planner.config, self._planner.workload
        groups = (workload.group(config, 0, number, config.algorithm.n_samples) for number in range(_DRAWN))
        drawn = [one for group in groups for one in group]
        tokens, generated = sorted(one.tokens for one in drawn), sorted(one.generated for one in drawn)
        prompt = drawn[0].prompt
        observed = fmean(tokens) - fmean(generated) - prompt
        return _Lengths(generated, tokens, prompt / config.algorithm.n_samples + observed)

    def figures(self, candidate: Candidate) -> dict[str, Any]:
        """Simulate a candidate; return its figures, and the overrides that make it."""
        config = candidate.config
        found = self._planner.simulated(config, self._planner.workload, measured_steps(config, self._episodes))
        memory = max(group["memory_gib_per_rank"] for group in make_plan(config)["groups"].values())
        return {
            "step_s": found.step_s,
            "tokens_per_s": self._sustained(found),
            "staleness": max_staleness(config),
            "memory_gib_per_rank": memory,
            "schedule": config.trainer.schedule.kind,
            "placement": dict(config.cluster.placement),
            "overrides": _overrides(config),
        }

    def _sustained(self, found: Simulated) -> float:
        """Return the tokens of trained episodes per second that every stage sustains."""
        lengths = self._lengths
        each, generated = fmean(lengths.tokens), fmean(lengths.generated)
        done = [sum(step.tokens for step in found.steps), found.generated / generated * each]
        if lengths.prompt:
            done.append(found.filled / lengths.prompt * each)
        if scoring_forwards(self._planner.config.algorithm):
            done.append(found.scored)
        return min(done) / found.seconds


def unbeaten(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those that no other one beats, the fastest first."""
    kept = [one for one in found if not any(_beats(other, one) for other in found)]
    return sorted(kept, key=lambda one: -one["tokens_per_s"])


def runs(config: RunConfig) -> bool:
    """Return True if `config` passes all checks."""
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


def render_search(found: list[dict[str, Any]], counts: dict[str, int]) -> str:
    """Format the result of a search as lines of text."""
    lines = [", ".join(f"{count:,} {what}" for what, count in counts.items()), "Those that no other one beats:"]
    for one in found:
        placed = ", ".join(f"{group} {ranks}" for group, ranks in one["placement"].items())
        lines.append(
            f"  {one['step_s']:8.1f} s  {one['tokens_per_s']:10,.0f} tokens/s  staleness {one['staleness']}  "
            f"{one['memory_gib_per_rank']:5.1f} GiB  {one['schedule']}: {placed}"
        )
    pasted = " ".join(map(quote, found[0]["overrides"]))
    return "\n".join([*lines, "", "The fastest, as overrides:", pasted])
