"""Answers questions with a policy, each by one episode of the kind that it was trained in, event by event.

The episode is `rlsys.rollout.agent.episode.Episode`, unchanged: prompt, tags, limits, observations and tokens are those of
training. The generator and the search are wrapped, so that they report what they do. Questions know nothing of each
other, as in training, and may be asked at the same time.

Invariants: the last event is `EpisodeEnded` or `Failed`; whoever stops listening ends the episode, and the engine frees
its request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.chat.events import (
    TIME_LIMIT,
    Acted,
    Asked,
    EpisodeEnded,
    Event,
    Failed,
    Found,
    FoundPassage,
    Kind,
    Observed,
    Segments,
    TextPiece,
)
from rlsys.apps.evaluation.baselines import EngineName
from rlsys.apps.evaluation.evaluation_inputs import Model, as_hf
from rlsys.apps.evaluation.execution import UnusedSearch, open_codec, open_generator
from rlsys.config.schema import Device, RunConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.errors import UserError
from rlsys.orchestrator.search_server import Serving, serving, silent
from rlsys.rollout.agent.episode import (
    CANCEL_GRACE_S,
    Episode,
    EpisodeTools,
    Generation,
    SearchTool,
    Streaming,
    TurnSampling,
    evaluation_sampling,
    within,
)
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.tools.interface import Tool, open_tools
from rlsys.rollout.tools.search_tool import open_tool
from rlsys.search.retrieval import SearchResult

_THOUGHT_TAG = "think"
_HALF_A_CHARACTER = "\ufffd"  # What a decoder makes of bytes that are not a whole character yet


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation and what it is with."""

    conversation: Conversation
    engine: EngineName
    model: str
    search: str  # The server's address; empty where there are no searches
    max_turns: int
    temperature: float


def default_engine(config: RunConfig) -> EngineName:
    """SGLang on a GPU; on a CPU transformers, which is there in seconds."""
    return EngineName.sglang if config.cluster.device is Device.gpu else EngineName.transformers


@asynccontextmanager
async def opened(
    model: Model, settings: ChatSettings, engine: EngineName, report: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Opened]:
    """Start search and engine for a conversation with `model`, and end them on the way out. `report` gets the progress.

    The search server is asked before the first question; one that fails later costs a search, not the conversation.
    Raises UserError for a model or settings that cannot be used, RunError where search or engine do not answer.
    """
    config = settings.config
    async with AsyncExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="rlsys-chat-")))
        searches = config.search.enabled and config.task.max_turns > 0
        server = stack.enter_context(serving(config.search, config.cluster.threads, work)) if searches else None
        if server is not None and not server.started:
            report("asks the search server")
            await _require(server)
        report("opens the model")
        folder = stack.enter_context(as_hf(model, work))
        config = replace(config, model=replace(config.model, path=str(folder)))
        codec = open_codec(folder, str(model.folder))
        report(f"starts {engine}")
        generator = await stack.enter_async_context(open_generator(config, engine))
        search: SearchTool | None = UnusedSearch() if config.search.enabled else None
        if server is not None:
            if server.started:  # While the model was opened.
                report("starts the search server")
                await asyncio.to_thread(server.wait_healthy)
                await _require(server)
            search = await stack.enter_async_context(open_tool(server.search))
        temperature = config.eval.temperature
        sampling = evaluation_sampling(config.rollout.sampling, temperature, as_rollouts=False)
        timeout_s = config.rollout.episode_timeout_s
        conversation = Conversation(generator, search, codec, config.task, sampling, settings.prompt, timeout_s)
        url = (server.search.url or "") if server is not None else ""
        yield Opened(conversation, engine, str(model.folder), url, config.task.max_turns, temperature)


async def _require(server: Serving) -> None:
    """Raise RunError, with what to do, unless the search server answers."""
    with silent("rlsys.search"):
        await server.require("--search-url")


class Conversation:
    """Answers questions; see `ask`."""

    def __init__(
        self,
        generator: Streaming,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        sampling: TurnSampling,
        prompt: Callable[[str], str],
        timeout_s: float | None = None,
    ) -> None:
        """`prompt` makes of a question what the policy is given; an episode ends after `timeout_s`.

        Raises UserError for tools of `task` that cannot be used.
        """
        tools = open_tools(task)
        self._tools = (generator, search, codec, task, tools)
        self._codec = codec
        self._task = task
        self._sampling = sampling
        self._prompt = prompt
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)

    async def ask(self, text: str, temperature: float | None = None) -> AsyncGenerator[Event, None]:
        """Answer `text`, at another temperature where one is given.

        Close the iterator to stop in the middle (`contextlib.aclosing`). A question that is empty or too long is
        `Failed`; raises RunError where the engine has died.
        """
        try:
            question = self._question(text)
        except UserError as problem:
            yield Failed(str(problem))
            return
        yield Asked(text.strip(), question.prompt)
        sampling = self._sampling if temperature is None else replace(self._sampling, temperature=temperature)
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        play = _Play(*self._tools, sampling, question, events.put_nowait)
        playing = asyncio.create_task(play.run(self._timeout_s))
        playing.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield playing.result()
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait([asyncio.gather(playing, return_exceptions=True)], timeout=2 * CANCEL_GRACE_S)

    def _question(self, text: str) -> Question:
        """Raises UserError for one that cannot be asked."""
        if not text.strip():
            raise UserError("The question is empty: write one.")
        # A terminal may hand over what is no text in any encoding.
        clean = text.encode("utf-8", "replace").decode("utf-8").strip()
        prompt = self._prompt(clean)
        tokens = len(self._codec.encode(self._codec.prompt(prompt)))
        if tokens > self._task.max_prompt_tokens:
            raise UserError(
                f"The question has {tokens} tokens with its prompt, and task.max_prompt_tokens={self._task.max_prompt_tokens}: "
                "ask a shorter one."
            )
        return Question(uid=f"chat:{next(self._numbers)}", prompt=prompt, answers=(), text=clean)


class _Play:
    """One episode; it stands in for the episode's engine and search and reports what they do."""

    def __init__(
        self,
        generator: Streaming,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        own_tools: Sequence[Tool],
        sampling: TurnSampling,
        question: Question,
        report: Callable[[Event], None],
    ) -> None:
        self._generator = generator
        self._search = search
        self._codec = codec
        self._report = report
        self._tools = EpisodeTools(self, None if search is None else self, codec, task, own_tools)
        searches = {} if search is None else {task.tags.search: Kind.search}
        self._kinds = {_THOUGHT_TAG: Kind.thought, **searches, task.tags.answer: Kind.answer}
        self._kinds |= {tool.tag: Kind.tool for tool in own_tools}
        self._episode = Episode(question, 0, self._tools, sampling)
        self._turn = -1
        self._observed = 0
        """Turns of which the observation has been reported."""

    async def run(self, timeout_s: float | None) -> EpisodeEnded:
        """Play to the end or for `timeout_s` seconds."""
        started = perf_counter()
        finish = await within(self._episode.run(), timeout_s=timeout_s)
        # A limit may end the episode right after one.
        self._report_observation()
        played = self._episode.trajectory(finish or Finish.ABORTED)
        return EpisodeEnded(
            answer=played.answer,
            finish=TIME_LIMIT if finish is None else played.finish.value,
            searches=played.searches,
            tool_calls=played.tool_calls,
            tokens=sum(turn.generated_tokens for turn in played.turns),
            seconds=perf_counter() - started,
        )

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """The engine's answer, reported while it comes."""
        self._report_observation()
        self._turn += 1
        segments, reported, started = Segments(self._kinds), "", perf_counter()

        def report(text: str) -> None:
            nonlocal reported
            if text.startswith(reported):
                self._report_text(segments.feed(text[len(reported) :]))
                reported = text

        def heard(token_ids: list[int]) -> None:
            report(self._tools.rules.cut(self._codec.decode(token_ids)).rstrip(_HALF_A_CHARACTER))

        generation = await self._generator.generate(input_ids, sampling, rid, heard)
        turn = self._tools.rules.parse(self._codec.decode(generation.token_ids))
        report(turn.text)
        self._report_text(segments.end())
        seconds = perf_counter() - started
        self._report(Acted(self._turn, turn.action.value, turn.tool, turn.content, len(generation.token_ids), seconds))
        return generation

    async def search(self, query: str) -> SearchResult:
        """The result of a search, reported when it is there."""
        assert self._search is not None
        started = perf_counter()
        result = await self._search.search(query)
        passages = tuple(_titled(passage.contents) for passage in result.passages)
        self._report(Found(self._turn, query, passages, result.error, perf_counter() - started))
        return result

    def _report_text(self, pieces: Iterable[tuple[Kind, str]]) -> None:
        for kind, text in pieces:
            self._report(TextPiece(self._turn, kind, text))

    def _report_observation(self) -> None:
        """Report what was appended to the turn before, once the episode has gone on from it."""
        progress = self._episode.progress()
        if progress is not None and len(progress.turns) > self._observed:
            self._observed = len(progress.turns)
            self._report(Observed(self._observed - 1, progress.turns[-1].observation))


def _titled(contents: str) -> FoundPassage:
    """By the corpus's convention: the title in the first line, mostly in quotes."""
    title, _, text = contents.partition("\n")
    return FoundPassage(title.strip().strip('"'), text)
