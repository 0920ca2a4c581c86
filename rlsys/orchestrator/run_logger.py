"""Writes a run's records to its folder: metrics, prompts, timeline, evaluations, trajectories, trace, curves.

Rows are on disk as soon as their step ends, and no span is kept in memory longer. `close` writes the curves and a trace
of the last steps, also after an error. A span that
covers several steps counts towards each step with the part that lies in that step. A resumed run first deletes rows
after its checkpoint, because it repeats those steps. This module does not import Ray, Megatron or SGLang.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from rlsys.algorithms.losses import MAX_SUFFIX, MIN_SUFFIX
from rlsys.config.algorithm import OldLogprobs
from rlsys.config.compose import as_dict
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Group
from rlsys.errors import RunError, UserError
from rlsys.files import json_safe, remove_partial_files, write_atomically
from rlsys.observe.environment import record_launch, tree_cpu_seconds
from rlsys.observe.faults import FAULTS, FaultLog, fault_summary, read_faults
from rlsys.observe.guards import Alarm, Guards, GuardsState
from rlsys.observe.kept import TrajectoryWriter, remove_trajectories_after
from rlsys.observe.metrics import UNITS, Metric, explained
from rlsys.observe.outcome import draw_curves
from rlsys.observe.records import (
    METRICS,
    SUMMARY,
    TIMELINE,
    LineLog,
    TimelineRow,
    read_metrics,
    read_timeline_row,
    timeline_row,
)
from rlsys.observe.run_folder import EVALUATIONS, read_evaluations
from rlsys.observe.samples import write_samples
from rlsys.observe.spans import (
    Interval,
    Span,
    Tracer,
    batch_figures,
    idle_share,
    is_of_episode,
    overlap_seconds,
    stage_seconds,
    utilisation_figures,
    write_chrome_trace,
)
from rlsys.observe.status import Progress
from rlsys.observe.trackers import LoggedRow, OwnMetrics, ResumePoint, open_trackers
from rlsys.orchestrator.evaluation.heldout import Evaluation, answer_line
from rlsys.orchestrator.pipeline.scheduler import GroupOutcome
from rlsys.orchestrator.pipeline.step_metrics import distillation_metrics, step_metrics, training_flops
from rlsys.weights.flops import Flops

_log = logging.getLogger(__name__)

STEP_METRICS = (
    Metric("rollout/tokens_per_s", "tokens/s", "tokens that the engines generated for the step's episodes, per second"),
)
FIRST_UPDATE_METRICS = (
    Metric(
        "actor/first_ratio_dev_max",
        "1",
        "largest distance of a ratio from 1 in the step's first update; serves as a check, because it is [0 to "
        "rounding](concepts.md#ratios-and-why-log-probs-are-recomputed) if all groups were scored by the version that "
        "the step starts from, as in all schedules but `async`: in float32 below 1e-3, in bfloat16 on GPUs about 1e-2 "
        "(an estimate)",
    ),
)
TIME_METRICS = (
    Metric("time/step", "s", "the step, without evaluations and checkpoints", "S `timing_s/step`, R"),
    Metric("time/rollout", "s", "generation of episodes", "S `timing_s/gen`, R"),
    Metric("time/reward", "s", "computation of rewards", "S `timing_s/adv` (with advantages), R"),
    Metric("time/inference", "s", "log-probs of policy and reference", "S `timing_s/ref` (the reference's), R"),
    Metric("time/values", "s", "the critic's values", "S `timing_s/values`"),
    Metric(
        "time/training",
        "s",
        "training of actor and critic",
        "S `timing_s/update_actor`, `timing_s/update_critic`, R",
    ),
    Metric("time/sync_weights", "s", "weight sync: new weights to engines and inference group", "R"),
    Metric("time/checkpoint", "s", "writing of a checkpoint, as far as it overlaps the step"),
    Metric("time/switch", "s", "time in which colocated groups leave and take the devices"),
    Metric("time/overlap", "s", "scoring or training during generation"),
    Metric("time/cpu", "s", "CPU time of the driver and all processes that it started"),
    Metric("idle/<group>", "share", "part of the step in which no worker of the group was busy"),
)
_STAGE_KEYS = {"logprob": "inference", "train": "training", "sync": "sync_weights"}
"""Span stage -> its name under `time/`, where the two differ."""
_RATIO, _FIRST_RATIO = "actor/ratio_dev_max", "actor/first_ratio_dev_max"
_EVERY_STEP = ("rollout", "reward", "logprob", "train", "sync")
"""Stages with a time metric in every row, 0 if idle."""

PROMPTS = "prompts.jsonl"
EVALUATED = re.compile(r"(?:reference_)?step_(\d+)\.jsonl?")
"""Pattern of evaluation file names."""
TRACED_ROWS = 200
"""Number of the last rows of the timeline, one for each step, whose spans are in the trace."""
LOGS = (METRICS, PROMPTS, TIMELINE)
"""Files with one row per line; a resumed run appends to them."""


@dataclass(frozen=True, slots=True)
class History:
    """Extent of a run's records at a checkpoint."""

    step: int
    logs: Mapping[str, int]
    """File name from `LOGS` -> its size in bytes."""
    trackers: Mapping[str, str]
    """Tracker name -> id of the run there."""
    guards: GuardsState
    evaluations: tuple[Mapping[str, Any], ...]
    """Rows of the policy's evaluations, in order of steps."""


def new_run_dir(config: RunConfig) -> Path:
    """Create and return a new run folder, `OUTPUT_DIR/NAME-TIME`."""
    stem = Path(config.output_dir) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for count in range(1000):
        folder = stem if count == 0 else stem.with_name(f"{stem.name}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as problem:
            raise UserError(
                f"output_dir={config.output_dir} cannot hold the run ({problem.strerror}): give another folder.",
                code="denied",
                key="output_dir",
            ) from problem
        return folder
    raise FileExistsError(stem)


class RunLogger:
    """Collects and writes the metrics, spans and samples of one run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        progress: Progress,
        cost: Flops | None = None,
        history: History | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        declared: Sequence[Metric] = (),
        faults: FaultLog | None = None,
    ) -> None:
        """Open the records in `run_dir`; with the `history` of a resumed run, continue them.

        `faults` may outlive this logger; without it, the logger opens one. `cost` counts the model's operations;
        without it, utilisation is not logged. `decode` turns token ids into text, special tokens included; without it,
        trajectories are not saved. `declared` explains the metrics of rows.
        """
        self.config = config
        self.run_dir, self.progress = run_dir, progress
        self._evaluations = {row["step"]: row for row in history.evaluations} if history else {}
        self._reference: Evaluation | None = None
        self.tracers = {name: Tracer(name) for name in ("driver", "rollout", "inference", "actor", "critic")}
        self.actor_peak: float | None = None
        """Peak rate of all actor devices together, in operations per second; None disables `mfu/actor`."""
        self._cost = cost
        self._own_metrics = OwnMetrics(config.tracking.metrics)
        self._declared = (*self._own_metrics.declared, *declared)
        self._named: set[str] = set()
        """Names of the metrics in units.json."""
        # A policy may be as far from its teacher as it was at the start.
        bounds = replace(config.guards, kl_ceiling=None) if config.algorithm.teacher.model else config.guards
        self._guards = Guards(bounds, config.algorithm.kl_estimator.kind)
        self._trajectory_writer = TrajectoryWriter(run_dir, decode) if decode is not None else None
        self.episodes: list[Span] = []
        """Generation and search spans of episodes; for the timeline only, no metric counts them."""
        self._unwritten_spans: list[Span] = []
        """Spans, episodes included, that are not in the timeline yet."""
        self._recent: list[Span] = []
        self._begun_ns, self._begun_cpu_s = 0, 0.0
        known = history.logs if history else {}
        self.faults = faults or FaultLog(run_dir / FAULTS)
        self._owned = () if faults else (self.faults,)
        self._prompts = LineLog(run_dir / PROMPTS, known.get(PROMPTS))
        self._timeline = LineLog(run_dir / TIMELINE, known.get(TIMELINE))
        self._timeline_start = known.get(TIMELINE, 0)
        """Byte offset of the first row that this process writes."""
        self._trace = "trace.json"
        if history is not None:
            self._guards.restore(history.guards)
            self._trace = f"trace_after_step_{history.step}.json"
            _forget_evaluations(run_dir, history.step)
            self._evaluations = _kept_evaluations(run_dir, progress.warn) | self._evaluations
            remove_trajectories_after(run_dir, history.step)
        record_launch(run_dir, history.step if history else 0)
        # A summary from before the resume is outdated; a new summary is written at the end.
        (run_dir / SUMMARY).unlink(missing_ok=True)
        resolved = as_dict(config)
        write_atomically(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
        resumed = _resumed(run_dir, history, self._evaluations) if history else None
        self._trackers = open_trackers(config.tracking, run_dir, resolved, resumed)

    def history(self, step: int) -> History:
        """Return the extent of the records after `step`, the last finished step."""
        positions = (self._trackers.metrics.position, self._prompts.position, self._timeline.position)
        return History(
            step,
            dict(zip(LOGS, positions, strict=True)),
            self._trackers.ids,
            self._guards.state(),
            tuple(self._evaluations[key] for key in sorted(self._evaluations) if key <= step),
        )

    @property
    def last_em(self) -> float | None:
        """Held-out exact match of the last evaluation; None before the first."""
        return self._evaluations[max(self._evaluations)]["em"] if self._evaluations else None

    def em_of(self, step: int) -> float | None:
        """Return the held-out exact match after `step`; None if that step was not evaluated."""
        return self._evaluations[step]["em"] if step in self._evaluations else None

    def prompts(self, step: int, ended: Iterable[GroupOutcome]) -> None:
        """Record the prompt groups `ended` under `step`."""
        for group in ended:
            self._prompts.append({"step": step, "group": group.number, "uid": group.uid, "end": str(group.outcome)})

    def begin_step(self) -> None:
        """Start the clock of the next step. Time between two steps counts towards neither step."""
        self._begun_ns, self._begun_cpu_s = self.tracers["driver"].now(), tree_cpu_seconds()

    def step(
        self, step: int, groups: Sequence[Group], updates: Sequence[Mapping[str, float]], more: Mapping[str, float]
    ) -> list[Alarm]:
        """Log one step: metrics of its groups, optimiser steps (see `update_metrics`) and times, and `more` metrics.

        Return the guards' alarms; a new alarm is also printed.
        """
        window = (self._begun_ns, self.tracers["driver"].now())
        trained = step_metrics(groups, step - 1, self.config.algorithm.correction, self.config.task)
        taught = distillation_metrics(groups) if self.config.algorithm.teacher.model else {}
        row = {
            **trained,
            **taught,
            **more,
            **update_metrics(updates),
            **self._own_metrics.of(groups),
            **self.faults.metrics(),
            **self._time_metrics(groups, window),
            "rollout/tokens_per_s": trained["rollout/generated_tokens"] * 1e9 / (window[1] - window[0]),
        }
        alarms = self._guards.check(step, row)
        ringing = {alarm.guard for alarm in alarms}
        row |= {f"guard/{name}": float(name in ringing) for name in self._guards.names}
        self._explain(row)
        self._trackers.log(step, row)
        self._write_timeline(step, window)
        for alarm in alarms:
            if alarm.first:
                self.progress.warn(str(alarm))
        self.progress.update(step=step, reward=row["critic/score/mean"], tokens_per_s=row["rollout/tokens_per_s"])
        return alarms

    def _explain(self, names: Iterable[str]) -> None:
        """Write units and meanings to units.json when a row has a new name."""
        if not self._named.issuperset(names):
            self._named.update(names)
            write_atomically(self.run_dir / UNITS, json.dumps(explained(self._named, self._declared), indent=1) + "\n")

    async def trajectories(self, step: int, groups: Sequence[Group]) -> None:
        """Start to save trajectories of `step` token by token, once the previous step's trajectories are on disk."""
        if self._trajectory_writer is not None:
            await self._trajectory_writer.begin(step, groups, self.config.tracking.trajectories)

    async def trajectories_written(self) -> None:
        """Block until the trajectories of all steps are on disk."""
        if self._trajectory_writer is not None:
            await self._trajectory_writer.finish()

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation of the policy: answers and metrics in its files, metrics to the trackers."""
        self._evaluations[evaluation.step] = json_safe(evaluation.row())
        self.progress.update(em=evaluation.em)
        self._keep(evaluation, "", "eval")

    def reference_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation of the reference policy, as `evaluation` does for the policy."""
        self._reference = evaluation
        self._keep(evaluation, "reference ", "reference")

    def _keep(self, evaluation: Evaluation, whose: str, prefix: str) -> None:
        metrics = {f"{prefix}/{name}": value for name, value in evaluation.metrics().items()}
        folder = self.run_dir / EVALUATIONS
        folder.mkdir(exist_ok=True)
        stem = f"{whose.replace(' ', '_')}step_{evaluation.step:06d}"
        write_atomically(folder / f"{stem}.jsonl", "".join(map(answer_line, evaluation.answered)))
        write_atomically(folder / f"{stem}.json", json.dumps(json_safe(evaluation.row()), indent=2) + "\n")
        self._trackers.log_evaluation(evaluation.step, metrics)
        by_hop = "".join(f", {hop}-hop {em:.3f}" for hop, em in evaluation.em_by_hop.items())
        self.progress.console.print(
            f"step {evaluation.step}: {whose}held-out EM {evaluation.em:.3f}{by_hop}, "
            f"{evaluation.searches:.2f} searches per question"
        )
        if evaluation.aborted:
            self.progress.warn(
                f"{evaluation.aborted} of these {len(evaluation.answered)} episodes were cut off before their end, such as "
                "at rollout.episode_timeout_s."
            )

    def samples(self, groups: Sequence[Group]) -> None:
        """Write trajectories of the last step as readable text."""
        shown = [
            (group.question, sample.trajectory, sample.reward)
            for samples in zip(*(group.samples for group in groups), strict=False)
            for group, sample in zip(groups, samples, strict=True)
        ]
        write_samples(shown[: self.config.tracking.sample_trajectories], self.run_dir / "samples")

    def summary(self, weight_syncs: int) -> dict[str, Any]:
        """Return the contents of `summary.json`, except for the checkpoint."""
        rows = read_metrics(self.run_dir / METRICS)
        evaluations = [self._evaluations[step] for step in sorted(self._evaluations)]
        # Both evaluations may have been cancelled.
        first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
        recomputed = self.config.algorithm.old_logprobs is not OldLogprobs.engine
        ratios = [row[_FIRST_RATIO] for row in rows if row.get(_FIRST_RATIO) is not None]
        return {
            "em_before": first.get("em"),
            "em_after": last.get("em"),
            "em_before_by_hop": first.get("em_by_hop"),
            "em_after_by_hop": last.get("em_by_hop"),
            **({"em_reference": self._reference.em} if self._reference else {}),
            "searches_before": first.get("searches"),
            "searches_after": last.get("searches"),
            "questions": last.get("questions"),
            "weight_syncs": weight_syncs,
            "overlap_s": sum(row["time/overlap"] for row in rows),
            "logprob_max_diff": max(row["logprob/max_diff"] for row in rows) if recomputed else None,
            "first_ratio_max_dev": max(ratios, default=None),
            "tokens_differing_share": sum(row["tokens/differing"] for row in rows)
            / sum(row["state_tokens/total"] for row in rows),
            "cached_prompt_share": fmean(row["rollout/cached_prompt_share"] for row in rows),
            "faults": fault_summary(read_faults(self.run_dir / FAULTS)),
            "steps": len(rows),
            "seed": self.config.trainer.seed,
            "seconds": {
                "step": sum(row["time/step"] for row in rows),
                **stage_seconds(self._spans(self._written_rows())),
            },
            "evaluations": evaluations,
        }

    def close(self) -> None:
        """Write the trace and the curves, and close the trackers."""
        if self._trajectory_writer is not None:
            self._trajectory_writer.close()
        self._drain()
        try:
            self._write_timeline(None, None)
        except RunError as problem:
            _log.warning("%s", problem)
        for log in (*self._owned, self._prompts, self._timeline, self._trackers):
            log.close()
        try:
            last = deque(self._written_rows(self._timeline_start), maxlen=TRACED_ROWS)
            spans = list(self._spans(last))
            write_chrome_trace(self.run_dir / self._trace, [*spans, *self._fault_spans(spans)])
            rows = read_metrics(self.run_dir / METRICS)
            if rows:
                draw_curves(rows, [self._evaluations[step] for step in sorted(self._evaluations)], self.run_dir)
        except OSError as problem:  # A full disk has already ended the run with an error.
            _log.warning("the trace and the curves could not be written: %s", problem)

    def _drain(self) -> list[Span]:
        """Return the spans that have ended since the last call, and keep them for the timeline."""
        drained = [span for tracer in self.tracers.values() for span in tracer.drain()]
        self._unwritten_spans += drained + self.episodes
        self.episodes.clear()
        return drained

    def _written_rows(self, start: int = 0) -> Iterator[TimelineRow]:
        """Yield the rows of the timeline from the byte `start`, and the spans that are not written yet."""
        with (self.run_dir / TIMELINE).open("rb") as lines:
            lines.seek(start)
            yield from filter(None, map(read_timeline_row, lines))
        if self._unwritten_spans:
            yield TimelineRow(None, None, tuple(self._unwritten_spans))

    def _spans(self, rows: Iterable[TimelineRow]) -> Iterator[Span]:
        """Yield the spans of the workers in `rows`, without those derived from episodes."""
        return (span for row in rows for span in row.spans if not is_of_episode(span))

    def _fault_spans(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Yield the faults that ended after the first of `spans`; one without an end is a point."""
        first_ns = min((span.start_ns for span in spans), default=0)
        for fault in read_faults(self.run_dir / FAULTS):
            began_ns, end_ns = (int(1e9 * at_s) for at_s in (fault.began_s, fault.ended_s or fault.began_s))
            if end_ns >= first_ns:
                args: dict[str, Any] = {"step": fault.step, "detail": fault.detail, "end": fault.ending}
                yield Span(f"{fault.part} {fault.kind}", max(began_ns, first_ns), end_ns, "faults", fault.part, args)

    def _write_timeline(self, step: int | None, window: Interval | None) -> None:
        """Write the spans that have ended since the last row."""
        if window is not None or self._unwritten_spans:
            self._timeline.append(timeline_row(step, window, self._unwritten_spans))
        self._unwritten_spans = []

    def _spans_of(self, window: Interval) -> list[Span]:
        """Return the spans that overlap `window`, unfinished ones included. Calls must pass windows in order."""
        self._recent = [span for span in self._recent if span.end_ns > window[0]] + self._drain()
        running = [span for tracer in self.tracers.values() for span in tracer.running()]
        return self._recent + running

    def _time_metrics(self, groups: Sequence[Group], window: Interval) -> dict[str, float]:
        """Return the time, overlap, idle, utilisation and batch metrics of `window`."""
        spans = self._spans_of(window)
        worked = {stage: spent for stage, spent in stage_seconds(spans, window).items() if spent}
        seconds = {**dict.fromkeys(_EVERY_STEP, 0.0), **worked}
        training = stage_seconds((span for span in spans if span.group == "actor"), window).get("train", 0.0)
        flops = 0.0 if self._cost is None else training_flops(groups, self._cost, self.config)
        return {
            "time/step": (window[1] - window[0]) / 1e9,
            **{f"time/{_STAGE_KEYS.get(stage, stage)}": spent for stage, spent in seconds.items()},
            "time/overlap": overlap_seconds(spans, window),
            "time/cpu": tree_cpu_seconds() - self._begun_cpu_s,
            **{f"idle/{group}": share for group, share in idle_share(spans, window).items()},
            **(utilisation_figures(flops, training, self.actor_peak) if flops else {}),
            **batch_figures(spans, window),
        }


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's optimiser steps: the mean, or the extreme for `_max` and `_min` metrics.

    NaN in one optimiser step gives NaN. A learner that did not learn in this step (the actor during critic warm-up) has
    no metrics.
    """
    joined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        join = np.max if name.endswith(MAX_SUFFIX) else np.min if name.endswith(MIN_SUFFIX) else np.mean
        joined[name] = float(join([update[name] for update in updates if name in update]))
    if updates and (first := updates[0].get(_RATIO)) is not None:
        joined[_FIRST_RATIO] = first
    return joined


def _resumed(run_dir: Path, history: History, evaluations: Mapping[int, Mapping[str, Any]]) -> ResumePoint:
    """Return the point from which trackers continue. Its logged evaluations follow the row of their step."""
    file = run_dir / METRICS
    rows = [row for row in (read_metrics(file) if file.is_file() else []) if row["step"] <= history.step]
    times = {row["step"]: row["time"] for row in rows}
    begun = min(times.values(), default=time.time())
    logged = [
        LoggedRow(row["step"], {key: row[key] for key in row if key not in ("step", "time")}, row["time"])
        for row in rows
    ]
    for row in evaluations.values():
        metrics = {f"eval/{name}": value for name, value in row["figures"].items()}
        logged.append(LoggedRow(row["step"], metrics, times.get(row["step"], begun)))
    logged.sort(key=lambda entry: entry.step)
    return ResumePoint(history.step, history.trackers, history.logs.get(METRICS, 0), logged)


def _forget_evaluations(run_dir: Path, step: int) -> None:
    """Delete partial evaluation files, and the files of steps after `step`, which the resumed run repeats."""
    remove_partial_files(run_dir / EVALUATIONS)
    for path in (run_dir / EVALUATIONS).glob("*"):
        found = EVALUATED.fullmatch(path.name)
        if found and int(found[1]) > step:
            path.unlink()


def _kept_evaluations(run_dir: Path, warn: Callable[[str], None]) -> dict[int, Mapping[str, Any]]:
    """Return step -> row of the policy's evaluations on disk; one may have ended after the checkpoint of a later step."""
    rows = read_evaluations(run_dir, "", warn)
    return {row["step"]: row for row in rows if row.keys() >= {"em", "figures"}}
