"""Evaluates the policy during a run, on all engines, or on a few that are set aside while the others do rollouts.

An answer that is lost, because engines died or were late, is asked for again. If it is lost `ATTEMPTS` times, or if all
engines set aside die, the evaluation is cancelled with a warning and training goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.errors import root_cause
from rlsys.observe import status
from rlsys.orchestrator.engine_pool import EnginePool, NoneSetAside
from rlsys.orchestrator.evaluation.heldout import STAGE, Ask, Evaluation, evaluate, heldout_score
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost
from rlsys.orchestrator.run_logger import RunLogger
from rlsys.orchestrator.search_server import SearchOutages

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts at each answer, each of which the engine pool retries after an engine's death."""


class Evaluator:
    """Runs the held-out questions on the engines and records the answers."""

    def __init__(
        self,
        config: RunConfig,
        log: RunLogger,
        search: SearchOutages,
        engines: EnginePool,
        questions: Sequence[Question],
        count_to: Callable[[int], None],
        awaited: set[int],
    ) -> None:
        """`count_to` makes the worker groups record work under a step. A step is in `awaited` during its evaluation."""
        self._config, self._log, self._search, self._engines = config, log, search, engines
        self._questions, self._count_to, self._awaited = questions, count_to, awaited

    async def evaluate(self, step: int) -> None:
        """Evaluate the weights of `step` on all engines; training waits."""
        found = await self.ask_all(step)
        if found is not None:
            self._log.evaluation(found)

    async def evaluate_aside(self, step: int, background: asyncio.TaskGroup) -> None:
        """Start an evaluation on `eval.engines` engines; return once they are set aside or the evaluation has failed.

        These engines keep the weights of `step` while the others do rollouts. Such evaluations run one at a time.
        """
        set_aside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asking = background.create_task(self._ask_aside(step, set_aside))
        await asyncio.wait({asking, set_aside}, return_when=asyncio.FIRST_COMPLETED)

    async def ask_all(self, step: int) -> Evaluation | None:
        """Run the held-out questions on all engines, which must be on their devices; None if the evaluation failed.

        Blocks until no engine is set aside.
        """
        self._count_to(step)
        try:
            async with self._engines.undivided():
                return await self._ask(step, self._engines.answer, self._engines.answers)
        except* GroupLost as losses:
            _cancelled(step, losses)
        return None

    async def _ask_aside(self, step: int, set_aside: asyncio.Future[None]) -> None:
        if self._config.eval.engines is None:
            raise RuntimeError("An evaluation during training needs eval.engines.")
        self._awaited.add(step)
        try:
            async with self._engines.reserve(self._config.eval.engines) as engines:
                set_aside.set_result(None)
                self._log.evaluation(await self._ask(step, engines.answer, engines.capacity))
        except* (NoneSetAside, GroupLost) as losses:
            _cancelled(step, losses)
        finally:
            self._awaited.remove(step)

    async def _ask(self, step: int, ask: Ask, concurrency: int) -> Evaluation:
        async def retried(question: Question, sample: int, temperature: float) -> Trajectory:
            for _ in range(ATTEMPTS - 1):
                with suppress(GroupLost):
                    return await ask(question, sample, temperature)
            return await ask(question, sample, temperature)

        await self._search.check()
        with status.stage("evaluates", STAGE):
            return await evaluate(
                self._questions,
                retried,
                concurrency,
                step,
                score=heldout_score(self._config),
                samples=self._config.eval.samples,
                temperature=self._config.eval.temperature,
            )


def _cancelled(step: int, losses: BaseException) -> None:
    _log.warning("the evaluation of step %d was cancelled: %s", step, root_cause(losses))
