"""Answers questions with a policy, each by one episode of the kind that it was trained in, event by event.

The episode is `rlsys.rollout.agent.episode.Episode`, unchanged; its generator and search are wrapped, so that they
report what they do. Questions know nothing of each other, and may be asked at the same time. Whoever stops listening
ends the episode, and the engine frees its request.

Order of the events of a question: `Asked`; then of each turn `TextPiece` as it is generated, one `Acted`, after a
search one `Found`, and `Observed` with what the policy reads next; at last one `EpisodeEnded`. A question that cannot
be answered to its end has `Failed` in place of what is missing. The texts of `TextPiece` and `Observed`, one after the
other, are the response as the policy and its training see it, and the beginning of a turn that ran out of time. Nothing
in them is escaped.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rich.console import Console
from transformers.utils import logging

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.evaluation.evaluation_inputs import EngineName, Model, as_hf
from rlsys.apps.evaluation.execution import UnusedSearch, open_codec, open_generator
from rlsys.config.schema import Device, RunConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.errors import Code, RunError, UserError, code_of
from rlsys.orchestrator.search_server import serving, silent
from rlsys.rollout.agent import episode
from rlsys.rollout.agent.episode import (
    Episode,
    EpisodeTools,
    Generation,
    SearchTool,
    Streaming,
    TurnSampling,
    evaluation_sampling,
)
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.tools.interface import Tool, open_tools
from rlsys.rollout.tools.search_tool import open_tool
from rlsys.search.retrieval import SearchResult

TIME_LIMIT = "time_limit"
"""Finish of an episode that ran out of time."""


class Kind(StrEnum):
    """Kinds of generated text, told apart by the tags around them."""

    text = "text"
    thought = "thought"
    search = "search"
    answer = "answer"
    tool = "tool"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question has been taken; `prompt` is that of the policy, before the chat template of the tokenizer."""

    question: str
    prompt: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The policy has written more: `text`, tags included, in turn `turn`, from 0."""

    turn: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Acted:
    """A turn is over."""

    turn: int
    action: str
    """search, tool, answer or invalid."""
    tool: str
    """The name of the tool; empty for everything else."""
    content: str
    """The query, the text for the tool, the answer, or an empty string."""
    tokens: int
    """Sampled in this turn."""
    seconds: float


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A passage that was found."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """A search has come back."""

    turn: int
    query: str
    passages: tuple[FoundPassage, ...]
    """Best first, whole; the policy may be given less of them, see `Observed`."""
    error: str
    """Why the search failed; empty when it worked."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment has appended `text` to the turn, verbatim."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """There will be no more."""

    answer: str | None
    """None where the policy has not given one."""
    finish: str
    """answer, turn_limit, token_limit, time_limit or, by the engine, aborted."""
    searches: int
    tool_calls: int
    tokens: int
    """Sampled in all turns."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The question is not answered, for a reason that is not the policy's."""

    reason: str
    code: Code | None = None
    key: str = ""
    """Key of a user's mistake, as in `UserError`."""

    @classmethod
    def of(cls, problem: UserError | RunError) -> Failed:
        """Make the event of an error that was raised."""
        return cls(str(problem), code_of(problem), problem.key if isinstance(problem, UserError) else "")


Event = Asked | TextPiece | Acted | Found | Observed | EpisodeEnded | Failed


def as_dict(event: Event) -> dict[str, Any]:
    """JSON values, with the kind of the event, such as `text`, under `event`."""
    names: dict[type, str] = {TextPiece: "text", EpisodeEnded: "ended"}
    return {"event": names.get(type(event), type(event).__name__.lower()), **asdict(event)}


class Segments:
    """Tells the text of one turn apart by its tags while it streams. Pure.

    Invariants: the pieces, one after the other, are the text; what kind a character is of does not depend on how the
    text was cut into parts. A tag counts to what it opens or closes. An end that may become a tag is held back.
    """

    def __init__(self, tags: Mapping[str, Kind]) -> None:
        """`tags` says of each word between angle brackets what it marks."""
        self._tags = tags
        self._marker = re.compile(rf"<(/?)({'|'.join(map(re.escape, tags))})>")
        self._markers = [f"<{slash}{word}>" for word in tags for slash in ("", "/")]
        self._held = ""
        self._kind = Kind.text

    def feed(self, more: str) -> Iterator[tuple[Kind, str]]:
        """The pieces that `more` completes."""
        self._held += more
        while (marker := self._marker.search(self._held)) is not None:
            kind = self._tags[marker[2]]
            yield from self._take(marker.start(), self._kind)
            yield from self._take(len(marker[0]), kind)
            self._kind = Kind.text if marker[1] else kind
        start = self._held.rfind("<")
        tail = self._held[start:] if start >= 0 else ""
        may_become_tag = any(marker.startswith(tail) for marker in self._markers)
        yield from self._take(len(self._held) - len(tail) * may_become_tag, self._kind)

    def end(self) -> Iterator[tuple[Kind, str]]:
        """The text that was held back."""
        yield from self._take(len(self._held), self._kind)

    def _take(self, length: int, kind: Kind) -> Iterator[tuple[Kind, str]]:
        piece, self._held = self._held[:length], self._held[length:]
        if piece:
            yield kind, piece


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

        async def require() -> None:
            assert server is not None
            with silent("rlsys.search"):
                await server.require("--search-url")

        if server is not None and not server.started:
            report("asks the search server")
            await require()
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
                await require()
            search = await stack.enter_async_context(open_tool(server.search))
        temperature = config.eval.temperature
        sampling = evaluation_sampling(config.rollout.sampling, temperature, as_rollouts=False)
        timeout_s = config.rollout.episode_timeout_s
        conversation = Conversation(generator, search, codec, config.task, sampling, settings.prompt, timeout_s)
        url = (server.search.url or "") if server is not None else ""
        yield Opened(conversation, engine, str(model.folder), url, config.task.max_turns, temperature)


@asynccontextmanager
async def opened_in_terminal(model: Model, settings: ChatSettings, engine: EngineName) -> AsyncIterator[Opened]:
    """As `opened`; a terminal shows what takes its time."""
    logging.disable_progress_bar()
    async with AsyncExitStack() as stack:
        with Console(stderr=True).status("begins") as status:
            chat = await stack.enter_async_context(opened(model, settings, engine, status.update))
        yield chat


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
        """`prompt` makes prompts of questions; an episode ends after `timeout_s`. Raises UserError for bad tools."""
        self._tools = (generator, search, codec, task, open_tools(task))
        self._codec, self._task = codec, task
        self._sampling, self._prompt, self._timeout_s = sampling, prompt, timeout_s
        self._numbers = itertools.count(1)

    async def ask(self, text: str, temperature: float | None = None) -> AsyncGenerator[Event, None]:
        """Answer `text`, at another temperature where one is given.

        Close the iterator to stop in the middle (`contextlib.aclosing`). A question that is empty or too long is
        `Failed`; raises RunError where the engine has died.
        """
        try:
            question = self._question(text)
        except UserError as problem:
            yield Failed.of(problem)
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
                await asyncio.wait(
                    [asyncio.gather(playing, return_exceptions=True)], timeout=2 * episode.CANCEL_GRACE_S
                )

    def _question(self, text: str) -> Question:
        """Raises UserError for one that cannot be asked."""
        if not text.strip():
            raise UserError("The question is empty: write one.", code="empty", key="question")
        # A terminal may hand over what is no text in any encoding.
        clean = text.encode("utf-8", "replace").decode("utf-8").strip()
        prompt = self._prompt(clean)
        tokens = len(self._codec.encode(self._codec.prompt(prompt)))
        if tokens > self._task.max_prompt_tokens:
            raise UserError(
                f"The question has {tokens} tokens with its prompt, and task.max_prompt_tokens={self._task.max_prompt_tokens}: "
                "ask a shorter one.",
                code="out_of_range",
                key="task.max_prompt_tokens",
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
        self._generator, self._search, self._codec, self._report = generator, search, codec, report
        self._tools = EpisodeTools(self, None if search is None else self, codec, task, own_tools)
        searches = {} if search is None else {task.tags.search: Kind.search}
        self._kinds = {"think": Kind.thought, **searches, task.tags.answer: Kind.answer}
        self._kinds |= {tool.tag: Kind.tool for tool in own_tools}
        self._episode = Episode(question, 0, self._tools, sampling)
        self._turn = -1
        self._observed = 0
        """Turns of which the observation has been reported."""

    async def run(self, timeout_s: float | None) -> EpisodeEnded:
        """Play to the end or for `timeout_s` seconds."""
        started = perf_counter()
        finish = await episode.within(self._episode.run(), timeout_s=timeout_s)
        # A limit may end the episode right after one.
        self._report_observation()
        played = self._episode.trajectory(finish or Finish.ABORTED)
        reason = TIME_LIMIT if finish is None else played.finish.value
        tokens, seconds = sum(turn.generated_tokens for turn in played.turns), perf_counter() - started
        return EpisodeEnded(played.answer, reason, played.searches, played.tool_calls, tokens, seconds)

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
            # A decoder writes U+FFFD for bytes that are not a whole character yet.
            report(self._tools.rules.cut(self._codec.decode(token_ids)).rstrip("\ufffd"))

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
        # By the corpus's convention, the title is in the first line, mostly in quotes.
        parts = (passage.contents.partition("\n") for passage in result.passages)
        passages = tuple(FoundPassage(title.strip().strip('"'), text) for title, _, text in parts)
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
