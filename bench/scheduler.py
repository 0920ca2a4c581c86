"""Measures the scheduler's own cost: the real scheduler, pipeline and learner's loop with workers that answer at once.

    python -m bench.scheduler          # about two minutes on one core

A run with `max_staleness` 1 keeps two steps of trajectories in flight and trains `STEPS` steps. The metric is processor
seconds per trained trajectory, best of `REPEATS`, with and without Python's garbage collector, which walks over all
live objects and is not the scheduler's work. The baseline is the smallest run. A scheduler whose cost grows as n log n
would cost log(100,000) / log(1,000) = 1.67 times as much per trajectory at the largest size. `held` is the peak memory
of Python in a separate run. All trajectories of a group are one object, so `held` is almost only the scheduler's state.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Group, Sample, Scores, Trajectory
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn
from rlsys.rollout.agent.tokens import EpisodeProgress

RESULT = Path("outputs/bench/scheduler.json")
IN_FLIGHT, GROUP_SIZES = (1_000, 10_000, 100_000), (8, 1)
STEPS, REPEATS, SCORE_BATCH = 4, 2, 64
AIM_MS = 0.2
"""Target for the processor time per trajectory."""
TOKENS = 8
NO_ADVANTAGES = np.zeros(TOKENS, np.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """Measurement of one size."""

    in_flight: int
    """Trajectories in flight."""
    group_size: int
    ms_per_trajectory: float
    ms_without_collector: float
    ratio: float
    """`ms_without_collector` divided by its value at the smallest size."""
    held_mib: float


class Instant:
    """Stands for the rollout group, the inference group, the actor and the devices. The rollout of a prompt group takes
    one turn of the event loop."""

    groups = ("inference",)
    waits_for = ""

    def __init__(self, groups: int, group_size: int) -> None:
        self.capacity = groups
        self.running = self.most_running = 0
        self.version = 0
        self._size = group_size
        self._scores = Scores(np.zeros(TOKENS, np.float32))

    async def run_group(self, _: Question, _group: int, _progress: Sequence[EpisodeProgress] = ()) -> list[Trajectory]:
        """Return the same trajectories for every question."""
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0)
        self.running -= 1
        return [_trajectory(self.version)] * self._size

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        """Return no episodes, because none is ever partial."""
        return {}

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Return zeros for every sample."""
        await asyncio.sleep(0)
        return [self._scores] * len(samples)

    def fills_micro_batches(self, samples: Sequence[Sample]) -> bool:
        """True unless `samples` is empty."""
        return bool(samples)

    async def accumulate(self, _: Sequence[Sample], last: bool) -> None:  # noqa: ARG002
        """Train nothing."""
        await asyncio.sleep(0)

    async def apply(self) -> Mapping[str, float]:
        """Update nothing."""
        return {}

    async def onload(self, *groups: str) -> None:
        """Return at once: the devices are never shared."""


def main() -> None:
    """Measure, print the table and write the result file."""
    rows: list[Row] = []
    for size in GROUP_SIZES:
        base = 0.0
        for count in track(IN_FLIGHT, f"groups of {size}", transient=True):
            per_step = count // size // 2
            with_collector, without = _ms(per_step, size, collect=True), _ms(per_step, size, collect=False)
            base = base or without
            held = _held_mib(per_step, size)
            rows.append(Row(2 * per_step * size, size, with_collector, without, without / base, held))
    Console().print(_table(rows))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    largest = max(row.ratio for row in rows)
    result = {
        "rows": [asdict(row) for row in rows],
        "ratio_of_n_log_n": log(max(IN_FLIGHT)) / log(min(IN_FLIGHT)),
        "largest_ratio": largest,
        "aim_ms_per_trajectory": AIM_MS,
        "steps": STEPS,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def _ms(per_step: int, group_size: int, *, collect: bool) -> float:
    """Return the processor milliseconds per trajectory; `collect` keeps the garbage collector on."""
    if not collect:
        gc.disable()
    try:
        return 1e3 * min(run(per_step, group_size) for _ in range(REPEATS)) / (STEPS * per_step * group_size)
    finally:
        gc.enable()


def run(per_step: int, group_size: int) -> float:
    """Return the processor seconds to train `STEPS` steps of `per_step` groups.

    Raises RuntimeError unless two steps of groups were in flight.
    """
    gc.collect()
    started = time.process_time()
    workers = asyncio.run(_train(per_step, group_size))
    seconds = time.process_time() - started
    if workers.most_running != 2 * per_step:
        raise RuntimeError(f"{workers.most_running} groups were in flight, not {2 * per_step}.")
    return seconds


async def _train(per_step: int, group_size: int) -> Instant:
    """Run the driver's loop; every engine has the new version as soon as a step is closed."""
    workers = Instant(2 * per_step, group_size)
    prompts = PromptSource([Question(f"q:{number}", "?", ("yes",)) for number in range(1000)], seed=0)
    pipeline = RolloutPipeline(
        StalenessScheduler(per_step, max_staleness=1),
        prompts,
        workers,
        workers,
        Handlers(_reward, lambda group: group),
        ScoreBatchSize(1, SCORE_BATCH),
        workers,
    )
    cut = MiniBatches([per_step])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run())
        for step in range(1, STEPS + 1):
            await learn(pipeline, {"actor": workers}, workers, cut)
            workers.version = step
            pipeline.publish(step)
            pipeline.scheduler.ended()
        pipeline.stop()
    return workers


def _held_mib(per_step: int, group_size: int) -> float:
    gc.collect()
    tracemalloc.start()
    run(per_step, group_size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


async def _reward(question: Question, trajectories: Sequence[Trajectory]) -> Group:
    return Group(question, tuple(Sample(one, 0.0, (0.0,), {}, NO_ADVANTAGES) for one in trajectories))


def _trajectory(version: int) -> Trajectory:
    mask = np.arange(TOKENS) > 0
    return Trajectory(
        question_uid="q",
        sample=0,
        tokens=np.zeros(TOKENS, np.int32),
        prompt_length=1,
        loss_mask=mask,
        rollout_logprobs=np.zeros(TOKENS, np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turn_of_token=np.where(mask, 0, -1).astype(np.int32),
        tokens_differing=0,
        response="",
        turns=(),
        finish=Finish.ANSWER,
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"Cost of the scheduler; target: {AIM_MS} ms per trajectory", title_justify="left")
    for name in ("in flight", "group size", "ms/trajectory", "without collector", "ratio", "held, MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.in_flight:,}",
            str(row.group_size),
            f"{row.ms_per_trajectory:.4f}",
            f"{row.ms_without_collector:.4f}",
            f"{row.ratio:.2f}",
            f"{row.held_mib:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
