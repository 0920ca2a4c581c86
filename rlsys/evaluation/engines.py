"""Ways to ask a model a question outside of training: SGLang, or plain transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from transformers import AutoTokenizer

from rlsys.agent.codec import Codec
from rlsys.agent.episode import EpisodeTools, TurnSampling, run_episode
from rlsys.agent.trajectory import Trajectory
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.errors import UserError
from rlsys.evaluation.evaluate import Ask
from rlsys.evaluation.transformers_generator import TransformersGenerator
from rlsys.search.tool import open_tool


@asynccontextmanager
async def sglang_engine(config: RunConfig) -> AsyncIterator[Ask]:
    """Ask through one SGLang engine of this process; `search.url` names a running server."""
    from rlsys.groups.rollout import make_worker

    worker = make_worker(config, config.trainer.seed)
    await worker.start()

    async def ask(question: Question) -> Trajectory:
        (trajectory,) = await worker.run_group(question, 1, True)
        assert isinstance(trajectory, Trajectory)
        return trajectory

    try:
        yield ask
    finally:
        await worker.stop()


@asynccontextmanager
async def transformers_engine(config: RunConfig) -> AsyncIterator[Ask]:
    """Ask through a Hugging Face model; `search.url` names a running server.

    Raises UserError for `compat.sampled_validation`: this way is there to compare greedy answers.
    """
    if config.compat.sampled_validation:
        raise UserError(
            "compat.sampled_validation=true draws answers, and --engine transformers is greedy: use sglang."
        )
    path, sampling = config.model.path, TurnSampling(0.0, stop=tuple(config.rollout.sampling.stop))
    model = TransformersGenerator(
        path, config.model.dtype, config.cluster.device, config.rollout.engine.max_running
    )
    async with open_tool(config.search) as search:
        tools = EpisodeTools(model, search, Codec(AutoTokenizer.from_pretrained(path)), config.task)

        async def ask(question: Question) -> Trajectory:
            return await run_episode(question, 0, tools, sampling, config.rollout.episode_timeout_s)

        yield ask


ENGINES = {"sglang": sglang_engine, "transformers": transformers_engine}
