"""Ways to ask a model a question outside of training: SGLang, or plain transformers.

Both run the episodes that training runs; only what generates a turn differs. With `search.url` a running server is named;
`task.max_turns` 0 searches nowhere and needs none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from transformers import AutoTokenizer

from rlsys.agent.codec import Codec
from rlsys.agent.episode import EpisodeTools, Generator, SearchTool, TurnSampling, run_episode
from rlsys.agent.trajectory import Trajectory
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.errors import UserError
from rlsys.evaluation.evaluate import Ask
from rlsys.evaluation.how import EngineName
from rlsys.evaluation.transformers_generator import TransformersGenerator
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
            sampling = _sampling(config, temperature)
            return await run_episode(question, sample, tools, sampling, config.rollout.episode_timeout_s)

        yield ask


class _NoSearch:
    """The tool of episodes that have no turn to search in."""

    async def search(self, query: str) -> SearchResult:
        raise AssertionError(f"an episode without searches has searched for {query!r}")


def _sampling(config: RunConfig, temperature: float) -> TurnSampling:
    drawn = config.rollout.sampling
    stop = tuple(drawn.stop)
    if config.compat.sampled_validation:
        return TurnSampling(drawn.temperature, drawn.top_p, drawn.top_k, stop)
    return TurnSampling(temperature, stop=stop)


@asynccontextmanager
async def _sglang(config: RunConfig) -> AsyncIterator[Generator]:
    from rlsys.rollout.engine import Engine

    path, task = config.model.path, config.task
    engine = Engine(path, config.rollout.engine, config.cluster.device, config.trainer.seed)
    if task.max_total_tokens > engine.context_tokens:
        raise UserError(
            f"task.max_total_tokens={task.max_total_tokens} is more than the {engine.context_tokens} tokens that the model "
            f"at {path} and rollout.engine.kv_cache_tokens allow; lower it."
        )
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
