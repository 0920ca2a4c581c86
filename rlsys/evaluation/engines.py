"""Ways to ask a model a question outside of training: SGLang, or plain transformers.

Both run the episodes that training runs; only what generates a turn differs. With `search.url` a running server is named;
`task.max_turns` 0 searches nowhere and needs none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from transformers import AutoTokenizer

from rlsys.agent.codec import Codec
from rlsys.agent.episode import EpisodeTools, Generator, SearchTool, run_episode
from rlsys.agent.trajectory import Trajectory
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.errors import UserError
from rlsys.evaluation.evaluate import Ask
from rlsys.evaluation.how import EngineName
from rlsys.evaluation.transformers_generator import TransformersGenerator
from rlsys.rollout.sampling import of_answers
from rlsys.search.result import SearchResult
from rlsys.search.tool import open_tool


@asynccontextmanager
async def asking(config: RunConfig, engine: EngineName) -> AsyncIterator[Ask]:
    """Ask the model of `config` through `engine`, which is started here and ended on the way out.

    Raises UserError for settings that the engine cannot have, RunError for one that does not start.
    """
    async with AsyncExitStack() as stack:
        generator: Generator
        if engine is EngineName.sglang:
            generator = await stack.enter_async_context(_sglang(config))
        else:
            generator = _transformers(config)
        search: SearchTool = _NoSearch()
        if config.task.max_turns > 0:
            search = await stack.enter_async_context(open_tool(config.search))
        codec = Codec(AutoTokenizer.from_pretrained(config.model.path))
        tools = EpisodeTools(generator, search, codec, config.task)

        async def ask(question: Question, sample: int, temperature: float) -> Trajectory:
            sampling = of_answers(
                config.rollout.sampling, temperature, as_rollouts=config.compat.sampled_validation
            )
            return await run_episode(question, sample, tools, sampling, config.rollout.episode_timeout_s)

        yield ask


class _NoSearch:
    """The tool of episodes that have no turn to search in."""

    async def search(self, query: str) -> SearchResult:
        raise AssertionError(f"an episode without searches has searched for {query!r}")


@asynccontextmanager
async def _sglang(config: RunConfig) -> AsyncIterator[Generator]:
    from rlsys.rollout.engine import Engine

    engine = Engine(config.model.path, config.rollout.engine, config.cluster.device, config.trainer.seed)
    engine.require_room(config.task)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def _transformers(config: RunConfig) -> Generator:
    drawn = config.rollout.sampling
    if config.compat.sampled_validation and (drawn.top_p != 1 or drawn.top_k != -1):
        raise UserError(
            f"compat.sampled_validation=true draws with rollout.sampling top_p={drawn.top_p:g} and top_k={drawn.top_k}, and "
            "--engine transformers draws from the whole vocabulary: use sglang."
        )
    return TransformersGenerator(
        config.model.path,
        config.model.dtype,
        config.cluster.device,
        config.rollout.engine.max_running,
        config.trainer.seed,
    )
