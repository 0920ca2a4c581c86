"""The folder of a run and everything written to it.

Contract: what is known is on disk at once (a row a step); `close` writes the trace and the curves also
when the run failed; work that goes on over several steps counts to each with its part. Nothing here knows
Ray, Megatron or SGLang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import OmegaConf

from rlsys.algorithms.losses import MAX_SUFFIX
from rlsys.config.compose import as_dict
from rlsys.config.schema import RunConfig
from rlsys.evaluation.evaluate import Answered, Evaluation
from rlsys.observe.metrics import MetricsLog, read_metrics
from rlsys.observe.plots import draw_curves
from rlsys.observe.processor import tree_cpu_seconds
from rlsys.observe.progress import Progress
from rlsys.observe.samples import Sample as ShownSample
from rlsys.observe.samples import write_samples
from rlsys.observe.spans import (
    Interval,
    Span,
    Tracer,
    idle_share,
    overlap_seconds,
    stage_seconds,
    write_chrome_trace,
)
from rlsys.observe.trackers import open_trackers
from rlsys.pipeline.figures import step_figures
from rlsys.pipeline.group import Group


def new_run_dir(config: RunConfig) -> Path:
    """A folder of its own for a run: `outputs/<name>-<time>`."""
    stem = Path(config.output_dir) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for count in range(1000):
        folder = stem if count == 0 else stem.with_name(f"{stem.name}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(stem)


class RunRecord:
    """Collects the figures, spans and samples of one run."""

    def __init__(self, config: RunConfig, run_dir: Path, progress: Progress) -> None:
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self.evaluations: list[Evaluation] = []
        self.tracers = {name: Tracer(name) for name in ("driver", "rollout", "inference", "actor")}
        self._spans: list[Span] = []
        self._recent: list[Span] = []
        self._begun_ns, self._begun_cpu_s = 0, 0.0
        self._log = MetricsLog(run_dir / "metrics.jsonl")
        resolved = as_dict(config)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(resolved)))
        self._trackers = open_trackers(config.tracking, run_dir, run_dir.name, resolved)

    def say(self, group: str) -> Callable[[str], None]:
        """A function that shows what `group` does."""
        return lambda text: self.progress.update(states={group: text})

    def begin_step(self) -> None:
        """From here on, time counts to the next step; what lies between steps counts to none."""
        self._begun_ns, self._begun_cpu_s = self.tracers["driver"].now(), tree_cpu_seconds()

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        updates: Sequence[Mapping[str, float]],
        more: Mapping[str, float],
    ) -> None:
        """Log one step: figures of its groups and updates (means, maxima kept), its times, and `more`."""
        window = (self._begun_ns, self.tracers["driver"].now())
        spans = self._spans_of(window)
        step_s = (window[1] - window[0]) / 1e9
        times = stage_seconds(spans, window)
        figures = step_figures(groups, step - 1, self.config.algorithm.correction.level)
        row = {
            **figures,
            **more,
            **{f"actor/{name}": _join(name, updates) for name in updates[-1]},
            "actor/first_ratio_dev_max": updates[0]["ratio_dev_max"],
            "time/step_s": step_s,
            "time/rollout_s": times.get("rollout", 0.0),
            "time/logprob_s": times.get("logprob", 0.0),
            "time/train_s": times.get("train", 0.0),
            "time/cpu_s": tree_cpu_seconds() - self._begun_cpu_s,
            "time/sync_s": times.get("sync", 0.0),
            "overlap_s": overlap_seconds(spans, window),
            **{f"idle/{group}": share for group, share in idle_share(spans, window).items()},
            "rollout/tokens_per_s": figures["rollout/generated_tokens"] / step_s,
        }
        self._write(step, row)
        self.progress.update(step=step, reward=row["reward/mean"], tokens_per_s=row["rollout/tokens_per_s"])

    def evaluation(self, evaluation: Evaluation) -> None:
        """Keep an evaluation: every answer in a file of its own, the figures with the trackers."""
        self.evaluations.append(evaluation)
        folder = self.run_dir / "evaluations"
        folder.mkdir(exist_ok=True)
        with (folder / f"step_{evaluation.step:06d}.jsonl").open("w", encoding="utf-8") as lines:
            for one in evaluation.answered:
                lines.write(json.dumps(_answer_row(one), ensure_ascii=False) + "\n")
        (folder / f"step_{evaluation.step:06d}.json").write_text(
            json.dumps(evaluation.row(), indent=2) + "\n"
        )
        figures = {"eval/em": evaluation.em, "eval/searches": evaluation.searches}
        figures |= {f"eval/em_hop_{hop}": em for hop, em in evaluation.em_by_hop.items()}
        for tracker in self._trackers:
            tracker.log(evaluation.step, figures)
        self.progress.update(em=evaluation.em)
        by_hop = "".join(f", {hop}-hop {em:.3f}" for hop, em in evaluation.em_by_hop.items())
        self.progress.console.print(
            f"step {evaluation.step}: held-out EM {evaluation.em:.3f}{by_hop}, "
            f"{evaluation.searches:.2f} searches a question"
        )

    def samples(self, groups: Sequence[Group]) -> None:
        """Write trajectories of the last step as readable text."""
        most = self.config.tracking.sample_trajectories
        pairs = [
            (group.question, sample)
            for sample_row in zip(*(g.samples for g in groups), strict=False)
            for group, sample in zip(groups, sample_row, strict=True)
        ]
        write_samples(
            [ShownSample(question, one.trajectory, one.reward) for question, one in pairs[:most]],
            self.run_dir / "samples",
        )

    def summary(self, weight_syncs: int) -> dict[str, Any]:
        """What the run came to; the parts of `summary.json` that training knows."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        first, last = self.evaluations[0], self.evaluations[-1]
        recomputed = self.config.algorithm.recompute_logprobs
        return {
            "em_before": first.em,
            "em_after": last.em,
            "em_before_by_hop": first.em_by_hop,
            "em_after_by_hop": last.em_by_hop,
            "searches_before": first.searches,
            "searches_after": last.searches,
            "questions": len(last.answered),
            "weight_syncs": weight_syncs,
            "overlap_s": sum(row["overlap_s"] for row in rows),
            "logprob_max_diff": max(row["logprob/max_diff"] for row in rows) if recomputed else None,
            "first_ratio_max_dev": max(row["actor/first_ratio_dev_max"] for row in rows),
            "tokens_differing_share": sum(row["tokens/differing"] for row in rows)
            / sum(row["rollout/trained_tokens"] for row in rows),
            "cached_prompt_share": fmean(row["rollout/cached_prompt_share"] for row in rows),
            "steps": len(rows),
            "seed": self.config.trainer.seed,
            "seconds": {"step": sum(row["time/step_s"] for row in rows), **stage_seconds(self._spans)},
            "evaluations": [evaluation.row() for evaluation in self.evaluations],
        }

    def close(self) -> None:
        """Write the trace and the curves, end the trackers."""
        self._drain()
        write_chrome_trace(self.run_dir / "trace.json", self._spans)
        self._log.close()
        for tracker in self._trackers:
            tracker.close()
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        if rows:
            draw_curves(rows, [evaluation.row() for evaluation in self.evaluations], self.run_dir)

    def _drain(self) -> None:
        for tracer in self.tracers.values():
            self._spans.extend(tracer.drain())

    def _spans_of(self, window: Interval) -> list[Span]:
        """What was done in `window`, what still goes on included. Windows come in order."""
        before = len(self._spans)
        self._drain()
        self._recent = [span for span in self._recent if span.end_ns > window[0]] + self._spans[before:]
        running = [span for tracer in self.tracers.values() for span in tracer.running()]
        return self._recent + running

    def _write(self, step: int, row: Mapping[str, float]) -> None:
        self._log.log(step, row)
        for tracker in self._trackers:
            tracker.log(step, row)


def _join(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    values = [update[name] for update in updates]
    return max(values) if name.endswith(MAX_SUFFIX) else sum(values) / len(values)


def _answer_row(one: Answered) -> dict[str, Any]:
    return {
        "uid": one.question.uid,
        "question": one.question.prompt,
        "golden_answers": list(one.question.answers),
        "answer": one.trajectory.answer,
        "em": one.em,
        "searches": one.trajectory.searches,
        "finish": str(one.trajectory.finish),
        "response": one.trajectory.response,
    }
