"""Asks questions to a model outside of training, through SGLang or plain transformers, with search and baseline.

Both engines run the episodes that training runs; only what generates a turn differs. With `search.url` a running server is
named; `search.enabled` false and `task.max_turns` 0 search nowhere and need none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TypeVar, cast

from transformers import AutoTokenizer

from rlsys.apps.evaluation.baselines import (
    AS_TRAINED,
    SEARCHING,
    Baseline,
    EngineName,
    How,
    limits_of,
    prompted,
    require_texts,
    with_passages,
)
from rlsys.apps.evaluation.transformers_generator import TransformersGenerator
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.errors import UserError
from rlsys.orchestrator.evaluation.heldout import Answered, Ask, Evaluation, evaluate, heldout_score
from rlsys.orchestrator.search_server import serving
from rlsys.rollout.agent.episode import EpisodeTools, SearchTool, run_episode
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.requests import Streaming, of_answers
from rlsys.rollout.search_tool import open_tool
from rlsys.search.retrieval import SearchResult

T = TypeVar("T")


async def run_evaluation(
    config: RunConfig,
    questions: Sequence[Question],
    how: How = AS_TRAINED,
    report: Callable[[str], None] = lambda _: None,
    note: Callable[[Answered], None] = lambda _: None,
) -> Evaluation:
    """Ask `questions` to the model of a valid `config`, with its search server, or one that is started for it.

    `report` gets the progress, `note` every answer as soon as it is there.

    Raises UserError for settings that the engine cannot have and for a question without the text that `how` needs, RunError
    if no search server answers where one is needed.
    """
    require_texts(how.baseline, questions)
    limited = limits_of(how.baseline, config)
    if how.baseline not in SEARCHING:
        return await _run(limited, questions, how, report, note)
    with serving(config.search, config.cluster.threads, Path(config.output_dir)) as search:
        search.wait_healthy()
        await search.require()
        return await _run(replace(limited, search=search.search), questions, how, report, note)


async def _run(
    config: RunConfig,
    questions: Sequence[Question],
    how: How,
    report: Callable[[str], None],
    note: Callable[[Answered], None],
) -> Evaluation:
    if how.baseline is Baseline.rag:
        report(f"searches for {len(questions)} questions")
        codec = Codec(AutoTokenizer.from_pretrained(config.model.path))
        async with open_tool(config.search) as search:
            questions = await with_passages(questions, search, codec, config)
    else:
        questions = [prompted(how.baseline, question, config.task.tags) for question in questions]
    report(f"starts {how.engine}")
    async with asking(config, how.engine) as ask:
        return await evaluate(
            questions,
            ask,
            config.rollout.max_episodes,
            say=report,
            score=heldout_score(config),
            samples=config.eval.samples,
            temperature=config.eval.temperature,
            note=note,
        )


@asynccontextmanager
async def asking(config: RunConfig, engine: EngineName) -> AsyncIterator[Ask]:
    """Ask the model of `config` through `engine`, which is started here and ended on the way out.

    Raises UserError for settings that the engine cannot have, RunError for one that does not start.
    """
    async with AsyncExitStack() as stack:
        codec = open_codec(config.model.path, f"model.path={config.model.path}")
        generator = await stack.enter_async_context(open_generator(config, engine))
        search: SearchTool | None = UnusedSearch() if config.search.enabled else None
        if config.search.enabled and config.task.max_turns > 0:
            search = await stack.enter_async_context(open_tool(config.search))
        tools = EpisodeTools(generator, search, codec, config.task)

        async def ask(question: Question, sample: int, temperature: float) -> Trajectory:
            sampling = of_answers(config.rollout.sampling, temperature, as_rollouts=config.compat.sampled_validation)
            return await run_episode(question, sample, tools, sampling, config.rollout.episode_timeout_s)

        yield ask


@asynccontextmanager
async def open_generator(config: RunConfig, engine: EngineName) -> AsyncIterator[Streaming]:
    """A generator of the model of `config`: started here, and ended on the way out. Raises as `asking` does."""
    if engine is EngineName.transformers:
        yield await _from_thread(lambda: _transformers(config))
        return
    from rlsys.rollout.engine import Engine

    require_its_weights(Path(config.model.path))
    sglang = Engine(config.model.path, config.rollout.engine, config.cluster.device, config.trainer.seed)
    sglang.require_room(config.task)
    try:
        await sglang.start()
        yield sglang
    finally:
        await sglang.stop()


class UnusedSearch:
    """The tool of episodes that have no turn to search in."""

    async def search(self, query: str) -> SearchResult:
        raise AssertionError(f"an episode without searches has searched for {query!r}")


def open_codec(folder: str | Path, given: str) -> Codec:
    """The codec of the model in `folder`, for sentences `given`. Raises UserError for a tokenizer that cannot be read."""
    try:
        return Codec(AutoTokenizer.from_pretrained(folder))
    except Exception as problem:  # The tokenizers library raises nothing narrower.
        reason = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise UserError(
            f"{given} has no tokenizer that can be read ({reason}): give a whole model folder."
        ) from problem


async def _from_thread(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread that nobody waits for after a cancellation, not even the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, problem: Exception | None) -> None:
        if done.done():
            return
        if problem is None:
            done.set_result(cast("T", value))
        else:
            done.set_exception(problem)

    def run() -> None:
        value, problem = None, None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 (is raised where it is waited for)
            problem = error
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, value, problem)

    Thread(target=run, daemon=True).start()
    return await done


def require_its_weights(folder: Path) -> None:
    """Raise UserError for weights of another model than the folder's config says.

    SGLang makes up what it does not find. A family that rlsys does not know is left to it.
    """
    # Loads Megatron's formats, which plain transformers need not.
    from rlsys.weights.convert.model_folder import architecture_in, check_hf
    from rlsys.weights.hf_io import HfReader
    from rlsys.weights.weight_map import WeightMap

    try:
        architecture = architecture_in(folder)
    except UserError:
        return
    check_hf(HfReader(folder), WeightMap(architecture), folder, values=False)


def _transformers(config: RunConfig) -> Streaming:
    drawn, engine = config.rollout.sampling, config.rollout.engine
    if config.compat.sampled_validation and (drawn.top_p != 1 or drawn.top_k != -1):
        raise UserError(
            f"compat.sampled_validation=true draws with rollout.sampling top_p={drawn.top_p:g} and top_k={drawn.top_k}, and "
            "--engine transformers draws from the whole vocabulary: use sglang."
        )
    model, device = config.model, config.cluster.device
    return TransformersGenerator(model.path, model.dtype, device, engine.max_running, config.trainer.seed)
