"""The rollout group from the driver's side: engines, and who gets the next question.

All episodes of a question go to one engine, so that they share its prefix cache; a new question goes
to the engine with the fewest under way.
"""

from __future__ import annotations

from typing import Any

from rlsys.agent.trajectory import Trajectory
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.observe.spans import Tracer


def make_worker(config: RunConfig, seed: int) -> Any:
    """Build one engine's worker, in its own process; `search.url` names a running server."""
    from rlsys.rollout.worker import RolloutWorker  # loads SGLang, which the driver has no use for

    return RolloutWorker(
        model_path=config.model.path,
        rollout=config.rollout,
        task=config.task,
        search=config.search,
        device=config.cluster.device,
        seed=seed,
    )


class RolloutGroup:
    """All engines as one generator."""

    def __init__(self, workers: WorkerGroup, config: RunConfig, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        self._samples = config.algorithm.n_samples
        self._episodes = config.rollout.max_episodes
        self._tracer = tracer
        self._running = [0] * len(workers.ranks)

    @property
    def capacity(self) -> int:
        """Groups that all engines may generate at a time."""
        return max(1, self._episodes // self._samples) * len(self._running)

    async def run_group(self, question: Question) -> list[Trajectory]:
        """`n_samples` sampled episodes of `question`."""
        return await self._run(question, self._samples, greedy=False)

    async def answer(self, question: Question) -> Trajectory:
        """One greedy episode of `question`."""
        return (await self._run(question, 1, greedy=True))[0]

    async def metrics(self) -> dict[str, float]:
        """The engines' own counts since their start, as flat keys by engine."""
        answers = await self.workers.call("metrics")
        return {
            f"engine/{engine}/{name}": value
            for engine, metrics in enumerate(answers)
            for name, value in metrics.items()
        }

    async def _run(self, question: Question, samples: int, greedy: bool) -> list[Trajectory]:
        engine = min(range(len(self._running)), key=self._running.__getitem__)
        self._running[engine] += 1
        name = "eval.episode" if greedy else "rollout.group"
        try:
            with self._tracer.span(name, lane=f"engine {engine}", step=self.step, question=question.uid):
                trajectories: list[Trajectory] = await self.workers.call_rank(
                    engine, "run_group", question, samples, greedy
                )
            return trajectories
        finally:
            self._running[engine] -= 1
