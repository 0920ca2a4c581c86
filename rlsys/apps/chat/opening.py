"""A conversation with a model, from its folder: search and engine started, checked, and certainly ended.

The search server is asked before the first question; one that fails later costs a search, not the conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rlsys.apps.chat.conversation import Conversation
from rlsys.apps.chat.settings import Settings
from rlsys.apps.evaluation.engines import NoSearch, open_codec, open_generator
from rlsys.apps.evaluation.how import EngineName
from rlsys.apps.evaluation.model import Model, as_hf
from rlsys.config.schema import Device, RunConfig
from rlsys.orchestrator.search_server import Serving, serving, silent
from rlsys.rollout.agent.episode import SearchTool
from rlsys.rollout.requests import of_answers
from rlsys.rollout.search_tool import open_tool


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation and what it is with."""

    conversation: Conversation
    engine: EngineName
    model: str
    search: str
    """The server's address; empty where there are no searches."""
    max_turns: int
    temperature: float


def default_engine(config: RunConfig) -> EngineName:
    """SGLang on a GPU; on a CPU transformers, which is there in seconds."""
    return EngineName.sglang if config.cluster.device is Device.gpu else EngineName.transformers


@asynccontextmanager
async def opened(
    model: Model, settings: Settings, engine: EngineName, say: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Opened]:
    """Start what is needed. `say` is told what goes on.

    Raises UserError for a model or settings that cannot be used, RunError where search or engine do not answer.
    """
    config = settings.config
    async with AsyncExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="rlsys-chat-")))
        searches = config.search.enabled and config.task.max_turns > 0
        server = stack.enter_context(serving(config.search, config.cluster.threads, work)) if searches else None
        if server is not None and not server.started:
            say("asks the search server")
            await _require(server)
        say("opens the model")
        folder = stack.enter_context(as_hf(model, work))
        config = replace(config, model=replace(config.model, path=str(folder)))
        codec = open_codec(folder, str(model.folder))
        say(f"starts {engine}")
        generator = await stack.enter_async_context(open_generator(config, engine))
        search: SearchTool | None = NoSearch() if config.search.enabled else None
        if server is not None:
            if server.started:  # While the model was opened.
                say("starts the search server")
                await asyncio.to_thread(server.wait_healthy)
                await _require(server)
            search = await stack.enter_async_context(open_tool(server.search))
        yield Opened(
            Conversation(
                generator,
                search,
                codec,
                config.task,
                of_answers(config.rollout.sampling, config.eval.temperature, as_rollouts=False),
                settings.prompt,
                config.rollout.episode_timeout_s,
            ),
            engine,
            str(model.folder),
            (server.search.url or "") if server is not None else "",
            config.task.max_turns,
            config.eval.temperature,
        )


async def _require(server: Serving) -> None:
    """Raise RunError, with what to do, unless the search server answers."""
    with silent("rlsys.search"):
        await server.require("--search-url")
