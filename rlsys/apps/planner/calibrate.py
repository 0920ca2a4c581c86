"""Measures the costs of a run from its folder: timeline, metrics and kept trajectories.

Every measured cost is kept as a multiple of what the formulas say of that run, or as seconds if the formulas have no such
part. So the measurements carry over to other schedules, placements and models. The first step is left out if there are
others: devices warm up in it.

A generation engine is measured by its turns. In a window of at most a second in which n tokens are decoded in batches of B,
and P tokens of A requests are prefilled, the engine works for a (n / B + min(A, n / B)) + b n + c P seconds; a, b and c are
fitted by least squares. A turn's tokens are spread evenly over its seconds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.apps.planner.cores import Cores
from rlsys.apps.planner.costs import Costs, by_formula
from rlsys.apps.planner.estimate import calls_s
from rlsys.apps.planner.workload import EpisodeDraw, TurnDraw, Workload
from rlsys.cluster.planning.hardware import Reached
from rlsys.cluster.planning.work import CallCosts, EngineCosts, HardwareCosts
from rlsys.config.compose import recorded, typed
from rlsys.config.derived import megatron_groups
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import UserError
from rlsys.observe.kept import TrajectoryRecord
from rlsys.observe.run_folder import RunFolder
from rlsys.observe.spans import Span, merge_intervals
from rlsys.trainer.batches import SampleSize
from rlsys.weights.weight_map import read_architecture

Floats = NDArray[np.float64]
SPANS = {
    "actor": ("actor", "train.accumulate"),
    "inference": ("inference", "logprob.compute"),
    "critic": ("critic", "train.accumulate"),
    "values": ("critic", "values.compute"),
}
"""Call of `Costs.calls` -> worker group and name of its spans."""
SPREAD = 2.0
"""Ratio of the largest call to the smallest from which a constant is fitted."""


class Calibration:
    """Costs of the run in a folder. Raises UserError if the folder lacks what they are measured from."""

    def __init__(self, run: RunFolder, device: str, reached: Reached) -> None:
        self.run, self.config = run, typed(recorded(run.config), RunConfig)
        model = read_architecture(self.config.model.path, self.config.model.family)
        hardware = HardwareCosts(self.config, model, device, reached)
        self._own, self._ranks = by_formula(hardware, ""), hardware.ranks
        steps = run.timeline()
        self._steps = steps[1:] if len(steps) > 1 else steps
        self._kept = [one for one in run.trajectories() if one.step in {step.step for step in self._steps}]
        if not self._steps or not self._kept:
            missing = "timeline.jsonl" if not self._steps else "trajectories/"
            sentence = (
                f"{run.path} cannot calibrate a plan: it has no step in {missing}; give the folder of a finished run."
            )
            raise UserError(sentence, code="missing", key="--calibrate")

    def applied(self, costs: Costs) -> Costs:
        """Return `costs`, which are those of formulas, with measured ones in their place."""
        source = dict(costs.source)
        engine = self._engine(costs.engine, source)
        calls = {name: self._call(name, call, source) for name, call in costs.calls.items()}
        return replace(
            costs,
            engine=engine,
            calls=calls,
            sync=self._sync(costs, source),
            switches=self._switches(costs, source),
            reward_s=self._mean("reward.score"),
            step_s=self._between_s,
            cores=self._cores(source),
            source=source | {"rewards, start of a step": f"measured in {self.run.name}"},
        )

    def workload(self, assumed: Workload) -> Workload:
        """Return the lengths, turns and tool latencies of the run's episodes."""
        waits = [turn.search_s for one in self._kept for turn in one.turns if turn.search_s]
        mean = fmean(waits or [0.0])
        groups: defaultdict[tuple[int, str], list[EpisodeDraw]] = defaultdict(list)
        for one in self._kept:
            groups[one.step, one.question_uid].append(drawn(one, mean))
        return replace(assumed, episodes=tuple(map(tuple, groups.values())), tool_s=mean, tools_per_s=0.0)

    @cached_property
    def _spans(self) -> Mapping[str, list[Span]]:
        """Name -> spans that begin in the measured steps."""
        begin, end = self._steps[0].window[0], self._steps[-1].window[1]
        found = {(one.name, one.start_ns, one.group, one.lane): one for step in self._steps for one in step.spans}
        names: defaultdict[str, list[Span]] = defaultdict(list)
        for one in found.values():
            if begin <= one.start_ns < end:
                names[one.name].append(one)
        return names

    def _mean(self, name: str, group: str | None = None) -> float:
        """Return the mean seconds of the spans `name`; 0 without any."""
        return fmean([_seconds(one) for one in self._spans.get(name, ()) if group in (None, one.group)] or [0.0])

    @property
    def _between_s(self) -> float:
        """Seconds of a step without any span."""
        rest = []
        for step in self._steps:
            begin, end = step.window
            inside = ((max(one.start_ns, begin), min(one.end_ns, end)) for one in step.spans)
            rest.append(end - begin - sum(stop - start for start, stop in merge_intervals(inside)))
        return max(0.0, fmean(rest)) / 1e9

    def _call(self, name: str, costs: CallCosts, source: dict[str, str]) -> CallCosts:
        group, span = SPANS[name]
        own = self._own.calls.get(name)
        spans = [one for one in self._spans.get(span, ()) if one.group == group and _counts(one, "samples", "tokens")]
        if own is None or not spans:
            return costs
        settings = megatron_groups(self.config)[group]
        copies = len(self._ranks[group]) // (settings.parallel.tp * settings.parallel.pp * settings.parallel.cp)
        bare = replace(own, call_s=0.0, apply_s=0.0)
        trained = fmean(one.loss_mask.mean() for one in self._kept)
        formula = []
        for one in spans:
            tokens, samples = int(one.args["tokens"]), int(one.args["samples"])  # type: ignore[arg-type]
            size = SampleSize(max(1, tokens // samples), round(tokens / samples * trained))
            held = max(1, settings.micro_batch_tokens // size.tokens)
            formula.append(calls_s(bare, size, samples / copies, held, 1))
        seconds, columns = np.array([_seconds(one) for one in spans]), [np.array(formula)]
        # Calls of like size do not tell a constant from what grows with the size.
        if max(formula) >= SPREAD * min(formula):
            columns.insert(0, np.ones(len(spans)))
        *fixed, factor = nonnegative(columns, seconds)
        source[f"calls of {name}"] = f"{len(spans)} calls of {self.run.name}"
        applied = self._mean("train.apply", group) / own.apply_s if own.apply_s else 1.0
        return replace(
            costs,
            rate=costs.rate / factor if factor else float("inf"),
            token_s=costs.token_s * factor,
            launch_s=costs.launch_s * factor,
            call_s=sum(fixed),
            apply_s=costs.apply_s * applied,
        )

    def _engine(self, costs: EngineCosts, source: dict[str, str]) -> EngineCosts:
        step_s, request_s, token_s = self._turns
        own = self._own.engine
        source["engine"] = f"{sum(len(one.turns) for one in self._kept):,} turns of {self.run.name}"
        return replace(
            costs,
            step_s=step_s * (costs.step_s + costs.weights_s) / (own.step_s + own.weights_s),
            weights_s=0.0,
            experts_s=0.0,
            token_s=0.0,
            request_s=request_s * (costs.token_s + costs.request_s) / (own.token_s + own.request_s),
            cache_s=0.0,
            prefill_s=token_s * costs.prefill_s / own.prefill_s,
            pair_s=0.0,
        )

    @cached_property
    def _turns(self) -> Sequence[float]:
        """Seconds of a decode step, of a request in it, and of the prefill of a token."""
        turns = [turn for one in self._kept for turn in one.turns if turn.began_ns and len(turn.sampled_ids)]
        if not turns:
            sentence = f"the trajectories of {self.run.path} have no turn of an engine, so it cannot calibrate a plan."
            raise UserError(sentence, code="missing", key="--calibrate")
        begin = np.array([turn.began_ns for turn in turns]) / 1e9
        begin -= begin.min()
        took = np.array([turn.generate_s for turn in turns])
        tokens = np.array([float(len(turn.sampled_ids)) for turn in turns])
        new = np.array([float(max(1, turn.prompt_tokens - turn.cached_tokens)) for turn in turns])
        engine = self.config.rollout.engine
        share = self._kept_share * (len(self._ranks["rollout"]) // engine.tp)
        low, high = windows(begin, took)
        batch = np.clip(within(begin, took, took, low, high) / (high - low) / share, 1.0, engine.max_running)
        decoded = within(begin, took, tokens, low, high) / share
        arrived, filled = (between(begin, amounts, low, high) / share for amounts in (np.ones(len(turns)), new))
        steps = decoded / batch
        return nonnegative([steps + np.minimum(arrived, steps), decoded, filled], high - low)

    @property
    def _kept_share(self) -> float:
        """Share of the episodes that were kept."""
        steps = {step.step for step in self._steps}
        trained = sum(float(row.get("rollout/episodes") or 0.0) for row in self.run.rows if row["step"] in steps)
        return min(1.0, len(self._kept) / trained) if trained else 1.0

    def _sync(self, costs: Costs, source: dict[str, str]) -> Any:
        transfer, switch = self._mean("sync.transfer"), self._mean("sync.switch")
        if not transfer:
            return costs.sync
        source["weight sync"] = f"{len(self._spans['sync.transfer'])} syncs of {self.run.name}"
        own = self._own.sync
        return replace(
            costs.sync,
            gather_s=0.0,
            engine_s=transfer / own.nbytes,
            inference_s=0.0,
            activate_s=switch * costs.sync.nbytes / own.nbytes,
        )

    def _switches(self, costs: Costs, source: dict[str, str]) -> Mapping[str, tuple[float, float]]:
        found = dict(costs.switches)
        for group in found:
            lanes = [
                [_seconds(one) for one in self._spans.get(name, ()) if one.lane == group]
                for name in ("switch.release", "switch.acquire")
            ]
            if all(lanes):
                found[group] = fmean(lanes[0]), fmean(lanes[1])
                source[f"switches of {group}"] = f"measured in {self.run.name}"
        return found

    def _cores(self, source: dict[str, str]) -> Cores | None:
        """Return the cores of a run without GPUs; costs measured in a run with overlap contain their sharing already."""
        sequential = self.config.trainer.schedule.kind == "sequential"
        if self.config.cluster.device is not Device.cpu or not sequential:
            return None
        rows = self.run.rows[1:] or self.run.rows
        cpu, rollout, *calls = (
            sum(float(row.get(f"time/{name}") or 0.0) for row in rows)
            for name in ("cpu", "rollout", "inference", "training", "values")
        )
        count = float(os.cpu_count() or 1)
        used = dict.fromkeys((*megatron_groups(self.config), "rollout"), 1.0)
        if rollout:
            used["rollout"] = min(count, max(0.5, (cpu - sum(calls)) / rollout))
        source["cores"] = f"{count:g} of this machine; rollout keeps {used['rollout']:.2f} busy in {self.run.name}"
        return Cores(count, used)


def drawn(kept: TrajectoryRecord, tool_s: float) -> EpisodeDraw:
    """Return the lengths of a kept trajectory, and the latencies of its tools as multiples of `tool_s`."""
    turns = []
    for turn, after in zip(kept.turns, [*kept.turns[1:], None], strict=True):
        said = len(turn.sampled_ids)
        seen = 0 if after is None else max(0, after.prompt_tokens - turn.prompt_tokens - said)
        turns.append(TurnDraw(float(max(1, said)), float(seen), turn.search_s / tool_s if tool_s else 0.0))
    return EpisodeDraw(kept.prompt_length, turns or [TurnDraw(1.0, 0.0, 0.0)])


def windows(begin: Floats, took: Floats) -> tuple[Floats, Floats]:
    """Return starts and ends of windows of at most a second that cover the time in which any interval runs."""
    edges: list[tuple[float, float]] = []
    order = np.argsort(begin)
    for start, end in zip(begin[order].tolist(), (begin + took)[order].tolist(), strict=True):
        if edges and start <= edges[-1][1]:
            edges[-1] = edges[-1][0], max(edges[-1][1], end)
        else:
            edges.append((start, end))
    cuts = [np.linspace(start, end, max(2, ceil(end - start) + 1)) for start, end in edges]
    return np.concatenate([cut[:-1] for cut in cuts]), np.concatenate([cut[1:] for cut in cuts])


def within(begin: Floats, took: Floats, amounts: Floats, low: Floats, high: Floats) -> Floats:
    """Return what falls between `low` and `high` of `amounts` that are spread evenly over intervals."""
    rates = amounts / took

    def before(at: Floats, starts: Floats) -> Floats:
        order = np.argsort(starts)
        number = np.searchsorted(starts[order], at, side="right")
        rate, moment = (np.concatenate([[0.0], np.cumsum(one[order])]) for one in (rates, rates * starts))
        return rate[number] * at - moment[number]

    return before(high, begin) - before(high, begin + took) - before(low, begin) + before(low, begin + took)


def between(begin: Floats, amounts: Floats, low: Floats, high: Floats) -> Floats:
    """Return the amounts of the intervals that begin from `low` on and before `high`."""
    order = np.argsort(begin)
    sums = np.concatenate([[0.0], np.cumsum(amounts[order])])
    return sums[np.searchsorted(begin[order], high)] - sums[np.searchsorted(begin[order], low)]


def nonnegative(columns: Sequence[Floats], values: Floats) -> list[float]:
    """Return the least-squares factors of `columns`, none of them negative: the most negative one becomes 0, again and again."""
    used, factors = [*range(len(columns))], [0.0] * len(columns)
    while used:
        found = np.linalg.lstsq(np.stack([columns[index] for index in used], axis=1), values, rcond=None)[0]
        if found.min() >= 0:
            for index, factor in zip(used, found.tolist(), strict=True):
                factors[index] = factor
            break
        used.pop(int(found.argmin()))
    return factors


def _seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e9


def _counts(span: Span, *names: str) -> bool:
    return all(isinstance(span.args.get(name), int) and span.args[name] for name in names)
