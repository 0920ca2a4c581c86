"""Simulates the steps of a run: the shipped training loop, pipeline, scheduler and weight sync with simulated workers.

`rlsys.train.train_from` drives a `SimulatedRun` as it drives a run. Only the workers are simulated (`workers`): each sleeps
as long as its work would take (`costs`), on an event loop with a virtual clock. The first steps fill the pipeline and are
not measured; the end of the run is never reached, so its draining is not measured either.

The same config, costs and seed give the same result.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlsys.apps.planner.cores import SharedCores
from rlsys.apps.planner.costs import Costs
from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.apps.planner.workers import (
    SimulatedGroup,
    SimulatedRollouts,
    SimulatedScorer,
    SimulatedSender,
    rewarded,
    switch_of,
)
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.placement import CRITIC, parse_placement
from rlsys.config.derived import has_critic, max_staleness, megatron_groups, scores_with_policy
from rlsys.config.schema import Mode, Packing, RunConfig, SyncMode
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Trajectory
from rlsys.observe import status
from rlsys.observe.spans import Span, Tracer
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.training_step import learn, learning, make_scheduler, mini_batches, score_batch_size
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import OffloadManager
from rlsys.train import train_from
from rlsys.trainer.batches import BatchSharder
from rlsys.weights.flops import Flops

EPISODES = 16_000
"""Episodes of the measured steps by default: single steps differ, because groups are scored and trained in batches."""
_STEPS = (2, 16)
"""Fewest and most steps that are measured."""
MOST_TURNS = 1_000_000_000
_FOREVER_S = 1e12


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One simulated step."""

    end_s: float
    tokens: int
    """Tokens of its episodes, prompts included."""
    generated: int
    staleness: tuple[int, ...]
    """Staleness of the oldest token of each prompt group."""


@dataclass(slots=True)
class Simulated:
    """Record of the measured steps."""

    steps: list[StepRecord]
    begin_s: float
    """Time at which the first of them began."""
    doing: Mapping[str, Mapping[str, float]]
    """Worker group -> activity, as in the status of a run -> seconds of all measured steps."""
    spans: list[Span]
    """Work of all measured steps."""
    busy: Mapping[str, float]
    """Worker group -> share of its devices' time in which they worked."""
    operations: float
    """Operations that training needed."""
    in_flight: float
    """Mean episodes in flight."""
    latency_s: float
    """Mean seconds of an episode, from its start to its end or abort."""
    finished: int
    """Episodes that ended or were aborted."""
    generated: float
    """Tokens that the engines decoded."""
    filled: float
    """Tokens that the engines prefilled."""
    scored: float
    """Tokens of the samples whose log-probs were computed."""
    retracted: int
    """Requests that a full cache pushed out."""
    dropped: Mapping[str, int]
    """Reason -> prompt groups that were dropped, in all steps."""
    most_outstanding: int
    """Largest number of prompt groups between admission and training."""
    events: int
    """Turns of the event loop, in all steps."""

    @property
    def seconds(self) -> float:
        """Seconds of all measured steps."""
        return self.steps[-1].end_s - self.begin_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / len(self.steps)


class _Enough(Exception):
    """Ends the run when all steps have been simulated."""


@dataclass(slots=True)
class _Clockwork:
    """Seconds that each stage has spent in each activity."""

    loop: asyncio.AbstractEventLoop
    since: dict[str, tuple[str, float]] = field(default_factory=dict)
    spent: defaultdict[str, defaultdict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def report(self, stage: str, text: str) -> None:
        """Count the activity that ends now."""
        now = self.loop.time()
        before, began = self.since.get(stage, ("", now))
        self.spent[stage][before] += now - began
        self.since[stage] = text, now

    def total(self) -> dict[str, dict[str, float]]:
        """Return stage -> activity -> seconds up to now."""
        for stage, (text, _) in list(self.since.items()):
            self.report(stage, text)
        return {stage: dict(texts) for stage, texts in self.spent.items()}


class SimulatedRun:
    """Run whose workers are simulated; offers what `train_from` needs of `rlsys.orchestrator.run.Run`."""

    def __init__(
        self,
        config: RunConfig,
        costs: Costs,
        workload: Workload,
        flops: Flops,
        steps: int,
        seed: int,
        whole: bool,
    ) -> None:
        """`config` has no evaluations and no checkpoints; `steps` are simulated, and then `_Enough` is raised.

        `whole`: see `simulate`.
        """
        self.config, self.costs, self._wanted, self._whole = config, costs, steps, whole
        self.loop = asyncio.get_running_loop()
        clock = partial(_now_ns, self.loop)
        self.tracers = {name: Tracer(name, clock) for name in ("driver", "rollout", *megatron_groups(config))}
        ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
        engines = len(ranks["rollout"]) // config.rollout.engine.tp - (config.eval.engines or 0)
        cores = SharedCores(costs.cores)
        self.rollouts = SimulatedRollouts(config, costs, workload, engines, self.tracers["rollout"], seed, cores)
        turns = {ranks[name]: asyncio.Lock() for name in megatron_groups(config)}
        self.members = {
            name: SimulatedGroup(
                name,
                costs,
                _sharder(config, name, len(ranks[name]), flops),
                self.tracers[name],
                turns[ranks[name]],
                cores,
            )
            for name in megatron_groups(config)
        }
        colocated = config.cluster.mode is Mode.colocated
        switches: dict[str, Any] = {name: switch_of(costs, name) for name in self.members} if colocated else {}
        self.devices = OffloadManager(
            {"rollout": (self.rollouts.offload, self.rollouts.restore), **switches} if colocated else {},
            self.tracers["driver"],
        )
        self.pipeline = self._pipeline(seed)
        self.weights = self._weights()
        self.records: list[StepRecord] = []
        self.groups = SimpleNamespace(
            trained={name: self.members[name] for name in self._trained}, devices=self.devices
        )
        self.log = SimpleNamespace(em_of=lambda _: 0.0)
        self.most_outstanding = 0

    @property
    def on_policy(self) -> bool:
        """True if `max_staleness` is 0."""
        return max_staleness(self.config) == 0

    @property
    def colocated(self) -> bool:
        """True if the groups share devices."""
        return self.config.cluster.mode is Mode.colocated

    @property
    def _trained(self) -> tuple[str, ...]:
        return ("actor", CRITIC) if has_critic(self.config.algorithm) else ("actor",)

    def _pipeline(self, seed: int) -> RolloutPipeline:
        config = self.config
        step = config.trainer.prompts_per_step
        questions = [Question(str(number), "", ()) for number in range(step)]
        scoring = {name: self.members[name] for name in ("inference", CRITIC) if name in self.members}
        return RolloutPipeline(
            make_scheduler(config),
            PromptSource(questions, seed),
            self.rollouts,
            SimulatedScorer(self.costs, scoring),
            Handlers(self._reward, lambda group: group),
            ScoreBatchSize(step, step) if self._whole else score_batch_size(config),
            self.devices,
        )

    async def _reward(self, question: Question, trajectories: Sequence[Trajectory]) -> Group:
        self.most_outstanding = max(self.most_outstanding, self.pipeline.scheduler.outstanding_count)
        await asyncio.sleep(self.costs.reward_s)
        return rewarded(question, trajectories)

    def _weights(self) -> WeightSync:
        config, pipeline = self.config, self.pipeline
        immediate = []
        if "inference" in self.members and scores_with_policy(config.algorithm):
            immediate = [self.members["inference"]]
        # The protocol is the same for every transport; this one opens no socket and no file.
        cluster = replace(config.cluster, sync_mode=SyncMode.tensor, call_timeout_s=_FOREVER_S)
        sender: Any = SimulatedSender(self.costs, config.cluster.sync_bucket_bytes)
        return WeightSync(
            sender,
            [self.rollouts],
            cluster,
            Path("weights"),
            self.tracers["driver"],
            immediate=immediate,
            onload=self.devices.onload if self.colocated else None,
            activated=(lambda _: None) if self.colocated else pipeline.publish,
        )

    async def train_step(self, step: int) -> tuple[list[Group], list[Mapping[str, float]]]:
        """Train on the next prompt groups."""
        learners = {name: self.members[name] for name in learning(self.config, step)}
        cut = mini_batches(self.config)
        if self._whole or cut.whole is not None:  # Wait for the whole mini-batch, but compute no advantages.
            cut = replace(cut, whole=list)
        trained = await learn(self.pipeline, learners, self.devices, cut)
        await asyncio.sleep(self.costs.step_s)
        return trained

    async def log_step(self, step: int, groups: Sequence[Group], updates: Sequence[Mapping[str, float]]) -> list[Any]:  # noqa: ARG002
        """Keep the figures of a step; raise `_Enough` after the last one."""
        trajectories = [sample.trajectory for group in groups for sample in group.samples]
        self.records.append(
            StepRecord(
                end_s=self.loop.time(),
                tokens=sum(group.tokens for group in groups),
                generated=sum(int(one.loss_mask.sum()) for one in trajectories),
                staleness=tuple(step - 1 - (group.oldest_version or 0) for group in groups),
            )
        )
        await self.stepped(step)
        if step == self._wanted:
            raise _Enough
        return []

    async def stepped(self, step: int) -> None:
        """Do nothing; a measurement hooks in here."""


def _now_ns(loop: asyncio.AbstractEventLoop) -> int:
    return round(loop.time() * 1e9)


def _sharder(config: RunConfig, name: str, processes: int, flops: Flops) -> BatchSharder:
    settings = megatron_groups(config)[name]
    packed = settings.packing is Packing.packed
    return BatchSharder(
        settings.parallel, processes, settings.micro_batch_tokens, 0, packed, flops, fp8=config.model.fp8
    )


def measured_steps(config: RunConfig, episodes: int = EPISODES) -> int:
    """Return the number of steps to measure, which have about this many `episodes`."""
    least, most = _STEPS
    return min(most, max(least, round(episodes / config.trainer.prompts_per_step / config.algorithm.n_samples)))


def simulate(
    config: RunConfig,
    costs: Costs,
    workload: Workload,
    flops: Flops,
    measured: int | None = None,
    seed: int = 0,
    whole: bool = False,
) -> Simulated:
    """Simulate a run of `config` up to a steady state, then `measured` steps; return their record.

    `whole`: prompt groups are scored when those of a whole step have been generated, as in systems that hand over steps.
    """
    measured = measured or measured_steps(config)
    warm = max_staleness(config) + 1
    quiet = replace(
        config,
        trainer=replace(config.trainer, steps=1_000_000),
        eval=replace(config.eval, interval=0),
        checkpoint=replace(config.checkpoint, interval=0),
    )
    found: list[Simulated] = []
    run = partial(SimulatedRun, quiet, costs, workload, flops, warm + measured, seed, whole)
    with _without_collector():
        run_virtually(_measure(run, warm, measured, found), MOST_TURNS)
    return found[0]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the collector of reference cycles.

    It visits all objects again and again, so that an event would cost the more, the more episodes are in flight. What a
    simulation drops at every event is part of no cycle.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def _measure(make: Callable[[], SimulatedRun], warm: int, measured: int, found: list[Simulated]) -> None:
    run = make()
    clockwork = _Clockwork(run.loop)
    marks: list[tuple[dict[str, dict[str, float]], dict[str, float], int, float]] = []

    async def stepped(step: int) -> None:
        if step in (warm, warm + measured):
            marks.append(_mark(run, clockwork))
            spans = [span for tracer in run.tracers.values() for span in (*tracer.drain(), *tracer.running())]
        if step == warm + measured:  # Before everything in flight is cancelled, in any order.
            found.append(_result(run, marks, warm, measured, spans))

    run.stepped = stepped  # type: ignore[method-assign]
    with status.reported_to(clockwork.report):
        for name in ("rollout", *run.members):
            await run.devices.built(name)
        try:
            await asyncio.create_task(train_from(run, None))  # type: ignore[arg-type]
        except* _Enough:
            pass


def _mark(run: SimulatedRun, clockwork: _Clockwork) -> tuple[dict[str, dict[str, float]], dict[str, float], int, float]:
    """Return the counts up to now."""
    engines = run.rollouts.engines
    counts = {
        "rollout": sum(engine.busy_s for engine in engines) / len(engines),
        **{name: member.busy_s for name, member in run.members.items()},
        "operations": run.members["actor"].operations,
        "generated": sum(engine.generated for engine in engines),
        "filled": sum(engine.filled for engine in engines),
        "scored": run.members["inference"].scored if "inference" in run.members else 0.0,
        "retracted": sum(engine.retracted for engine in engines),
        "waited_s": run.rollouts.waited_s,
        "in_flight_s": run.rollouts.in_flight_s,
    }
    return clockwork.total(), counts, run.rollouts.finished, run.loop.time()


def _result(run: SimulatedRun, marks: Sequence[Any], warm: int, measured: int, spans: list[Span]) -> Simulated:
    (doing, counts, finished, begin), (doing_after, counts_after, finished_after, end) = marks
    spent = {name: counts_after[name] - counts[name] for name in counts}
    seconds = end - begin
    ended = finished_after - finished
    return Simulated(
        steps=run.records[warm : warm + measured],
        begin_s=begin,
        doing={
            stage: {text: after[text] - doing.get(stage, {}).get(text, 0.0) for text in after}
            for stage, after in doing_after.items()
        },
        spans=spans,
        busy={name: spent[name] / seconds for name in ("rollout", *run.members)},
        operations=spent["operations"],
        in_flight=spent["in_flight_s"] / seconds,
        latency_s=spent["waited_s"] / ended if ended else inf,
        finished=ended,
        generated=spent["generated"],
        filled=spent["filled"],
        scored=spent["scored"],
        retracted=int(spent["retracted"]),
        dropped={str(reason): count for reason, count in run.pipeline.scheduler.dropped.items()},
        most_outstanding=run.most_outstanding,
        events=MOST_TURNS - run.loop.clock.turns_left,  # type: ignore[attr-defined]
    )
