"""Answers questions with a policy, one episode per question, as a stream of events.

The episode is the same as in training (`rlsys.rollout.agent.episode.Episode`); wrappers around its generator and search
report the events. Questions are independent and may run concurrently. Closing the event stream ends the episode, and
the engine drops its request.

Events of a question, in order: `QuestionAccepted`; per turn `TextPiece`s, one `TurnEnded`, after a search one
`SearchFinished`, and one `ObservationAdded`; finally `EpisodeEnded`. If the question cannot be completed, `Failed`
replaces the rest. The texts of `TextPiece` and `ObservationAdded`, concatenated, are the response as the policy sees
it, plus the start of a turn that timed out. The texts are not escaped.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rich.console import Console
from transformers.utils import logging

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.evaluation.evaluation_inputs import Model, as_hf
from rlsys.apps.evaluation.execution import UnusedSearch, open_codec, open_generator
from rlsys.config.schema import Device, RunConfig, SearchR1Agent
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.errors import Code, RunError, UserError, code_of
from rlsys.orchestrator.search_server import serving, silent
from rlsys.rollout.agent.episode import Episode, EpisodeTools
from rlsys.rollout.agent.recorder import Generation, Recorder, Streaming, TurnSampling, evaluation_sampling
from rlsys.rollout.agent.search_r1 import TurnRules
from rlsys.rollout.tools.calls import CANCEL_GRACE_S, SearchTool
from rlsys.rollout.tools.search_tool import open_tool
from rlsys.search.retrieval import SearchResult

TIME_LIMIT = "time_limit"
"""Finish of an episode that timed out."""


class Kind(StrEnum):
    """Kinds of generated text, distinguished by tags."""

    text = "text"
    thought = "thought"
    search = "search"
    answer = "answer"
    tool = "tool"


@dataclass(frozen=True, slots=True)
class QuestionAccepted:
    """The question was accepted; `prompt` is its prompt before the tokenizer's chat template."""

    question: str
    prompt: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The policy generated `text`, tags included, in turn `turn`, counted from 0."""

    turn: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class TurnEnded:
    turn: int
    action: str
    """search, tool, answer or invalid."""
    tool: str
    """Name of the called tool; empty for other actions."""
    content: str
    """Query, tool input or answer; empty for an invalid action."""
    tokens: int
    """Tokens sampled in this turn."""
    seconds: float


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A passage of a search result."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class SearchFinished:
    turn: int
    query: str
    passages: tuple[FoundPassage, ...]
    """Whole passages, best first; the policy may receive less of them, see `ObservationAdded`."""
    error: str
    """Reason of a failed search; empty on success."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ObservationAdded:
    """The observation `text` was appended to the turn, verbatim."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The episode ended; the last event of an answered question."""

    answer: str | None
    """Final answer; None if the policy gave none."""
    finish: str
    """answer, turn_limit, token_limit, time_limit, or aborted (by the engine)."""
    searches: int
    tool_calls: int
    tokens: int
    """Tokens sampled in all turns."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The question failed for a reason outside the policy; the last event."""

    reason: str
    code: Code | None = None
    key: str = ""
    """Key of the mistake, as in `UserError`."""

    @classmethod
    def of(cls, problem: UserError | RunError) -> Failed:
        """Return the event for an exception."""
        return cls(str(problem), code_of(problem), problem.key if isinstance(problem, UserError) else "")


Event = QuestionAccepted | TextPiece | TurnEnded | SearchFinished | ObservationAdded | EpisodeEnded | Failed
_EVENT_NAMES: Mapping[type, str] = {
    QuestionAccepted: "asked",
    TextPiece: "text",
    TurnEnded: "acted",
    SearchFinished: "found",
    ObservationAdded: "observed",
    EpisodeEnded: "ended",
    Failed: "failed",
}
"""Event -> its name in JSON."""


def as_dict(event: Event) -> dict[str, Any]:
    """Return the event in JSON types, with its kind, such as "text", under `event`."""
    return {"event": _EVENT_NAMES[type(event)], **asdict(event)}


class Segments:
    """Splits the streamed text of one turn into pieces by tag. Pure.

    Invariants: the concatenated pieces are the text, and the kind of a character does not depend on how the stream was cut.
    A tag belongs to the span that it opens or closes. A trailing fragment that may become a tag is held back.
    """

    def __init__(self, tags: Mapping[str, Kind]) -> None:
        """`tags`: tag name, without angle brackets -> kind of the text that it marks."""
        self._tags = tags
        self._marker = re.compile(rf"<(/?)({'|'.join(map(re.escape, tags))})>")
        self._markers = [f"<{slash}{word}>" for word in tags for slash in ("", "/")]
        self._held = ""
        self._kind = Kind.text

    def feed(self, more: str) -> Iterator[tuple[Kind, str]]:
        """Append `more` and yield the pieces that it completes."""
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
        """Yield the text that was held back."""
        yield from self._take(len(self._held), self._kind)

    def _take(self, length: int, kind: Kind) -> Iterator[tuple[Kind, str]]:
        piece, self._held = self._held[:length], self._held[length:]
        if piece:
            yield kind, piece


@dataclass(frozen=True, slots=True)
class Opened:
    """A running conversation and its settings."""

    conversation: Conversation
    engine: str
    model: str
    search: str
    """Address of the search server; empty without searches."""
    max_turns: int
    temperature: float


def default_engine(config: RunConfig) -> str:
    """Return SGLang on a GPU, and transformers on a CPU, where it starts faster."""
    return "sglang" if config.cluster.device is Device.gpu else "transformers"


@asynccontextmanager
async def opened(
    model: Model, settings: ChatSettings, engine: str, report: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Opened]:
    """Start search and engine for a conversation with `model`, and stop them on exit. `report` receives the progress.

    Checks the search server before the first question. If the server fails later, a search fails, but the conversation
    continues.
    Raises UserError for an unusable model or settings, RunError if search or engine do not respond.
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
            report("checking the search server")
            await require()
        report("loading the model")
        folder = stack.enter_context(as_hf(model, work, config.model.family))
        config = replace(config, model=replace(config.model, path=str(folder)))
        codec = open_codec(folder, str(model.folder))
        report(f"starting {engine}")
        generator = await stack.enter_async_context(open_generator(config, engine))
        search: SearchTool | None = UnusedSearch() if config.search.enabled else None
        if server is not None:
            if server.started:  # The server has been starting while the model was loaded.
                report("starting the search server")
                await asyncio.to_thread(server.wait_healthy)
                await require()
            search = await stack.enter_async_context(open_tool(server.search))
        temperature = config.eval.temperature
        sampling = evaluation_sampling(config.rollout.sampling, temperature, as_rollouts=False)
        timeout_s = config.rollout.episode_timeout_s
        tools = EpisodeTools(generator, search, codec, config.task)
        stack.callback(tools.close)
        conversation = Conversation(generator, tools, sampling, settings.prompt, timeout_s)
        url = (server.search.url or "") if server is not None else ""
        yield Opened(conversation, engine, str(model.folder), url, config.task.max_turns, temperature)


@asynccontextmanager
async def opened_in_terminal(model: Model, settings: ChatSettings, engine: str) -> AsyncIterator[Opened]:
    """Like `opened`, with the progress shown in the terminal."""
    logging.disable_progress_bar()
    async with AsyncExitStack() as stack:
        with Console(stderr=True).status("starting") as status:
            chat = await stack.enter_async_context(opened(model, settings, engine, status.update))
        yield chat


class Conversation:
    """Answers questions; see `ask`."""

    def __init__(
        self,
        generator: Streaming,
        tools: EpisodeTools,
        sampling: TurnSampling,
        prompt: Callable[[str], str],
        timeout_s: float | None = None,
    ) -> None:
        """`prompt` maps a question to its prompt; `timeout_s` limits an episode."""
        self._generator, self._tools = generator, tools
        self._sampling, self._prompt, self._timeout_s = sampling, prompt, timeout_s
        self._numbers = itertools.count(1)

    async def ask(self, text: str, temperature: float | None = None) -> AsyncGenerator[Event, None]:
        """Yield the events of the question `text`. Without a `temperature`, the default applies.

        Close the iterator to stop early (`contextlib.aclosing`). An empty or too long question yields `Failed`. Raises
        RunError if the engine has died.
        """
        try:
            question = self._question(text)
        except UserError as problem:
            yield Failed.of(problem)
            return
        yield QuestionAccepted(text.strip(), question.prompt)
        sampling = self._sampling if temperature is None else replace(self._sampling, temperature=temperature)
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        play = _Play(self._generator, self._tools, sampling, question, events.put_nowait)
        playing = asyncio.create_task(play.run(self._timeout_s))
        playing.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield playing.result()
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait([asyncio.gather(playing, return_exceptions=True)], timeout=3 * CANCEL_GRACE_S)

    def _question(self, text: str) -> Question:
        """Return the question with its prompt. Raises UserError if it is empty or too long."""
        if not text.strip():
            raise UserError("The question is empty: write one.", code="empty", key="question")
        # Terminal input may contain unpaired surrogates.
        clean = text.encode("utf-8", "replace").decode("utf-8").strip()
        prompt = self._prompt(clean)
        codec, most = self._tools.codec, self._tools.task.max_prompt_tokens
        tokens = len(codec.encode(codec.prompt(prompt)))
        if tokens > most:
            raise UserError(
                f"The question has {tokens} tokens with its prompt, more than task.max_prompt_tokens={most}: ask a "
                "shorter one.",
                code="out_of_range",
                key="task.max_prompt_tokens",
            )
        return Question(uid=f"chat:{next(self._numbers)}", prompt=prompt, answers=(), text=clean)


class _Play:
    """One episode; wraps its engine and search to report their events."""

    def __init__(
        self,
        generator: Streaming,
        tools: EpisodeTools,
        sampling: TurnSampling,
        question: Question,
        report: Callable[[Event], None],
    ) -> None:
        self._generator, self._search, self._codec, self._report = generator, tools.search, tools.codec, report
        task, agent = tools.task, tools.task.agent
        assert isinstance(agent, SearchR1Agent), "`chat_settings` refuses other agents"
        tags = {tool.tag: tool.name for tool in tools.custom.values()}
        searching, empty = tools.search is not None, agent.allow_empty_query
        self._rules = TurnRules(task, tags, searches=searching, allow_empty_query=empty)
        searches = {task.tags.search: Kind.search} if searching else {}
        self._kinds = {"think": Kind.thought, **searches, task.tags.answer: Kind.answer}
        self._kinds |= dict.fromkeys(tags, Kind.tool)
        reported = copy(tools)
        reported.generator, reported.search = self, self if searching else None
        self._episode = Episode(question, 0, reported, sampling)
        self._turn = -1
        self._observed = 0
        """Number of turns whose observation has been reported."""

    async def run(self, timeout_s: float | None) -> EpisodeEnded:
        """Run the episode to its end, or for `timeout_s` seconds."""
        started = perf_counter()
        finish = await self._episode.run(timeout_s)
        # A limit may have ended the episode right after an observation.
        self._report_observation()
        played = self._episode.trajectory(finish or Finish.ABORTED)
        reason = TIME_LIMIT if finish is None else played.finish.value
        tokens, seconds = sum(turn.generated_tokens for turn in played.turns), perf_counter() - started
        return EpisodeEnded(played.answer, reason, played.searches, played.tool_calls, tokens, seconds)

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """Generate a turn with the engine and report the text as it streams."""
        self._report_observation()
        self._turn += 1
        segments, reported, started = Segments(self._kinds), "", perf_counter()

        def report(text: str) -> None:
            nonlocal reported
            if text.startswith(reported):
                self._report_text(segments.feed(text[len(reported) :]))
                reported = text

        def on_tokens(token_ids: list[int]) -> None:
            # The decoder writes U+FFFD for an incomplete character.
            report(self._rules.cut(self._codec.decode(token_ids)).rstrip("\ufffd"))

        generation = await self._generator.generate(input_ids, sampling, rid, on_tokens)
        turn = self._rules.parse(self._codec.decode(generation.token_ids))
        report(turn.text)
        self._report_text(segments.end())
        seconds = perf_counter() - started
        self._report(
            TurnEnded(self._turn, turn.action.value, turn.tool, turn.content, len(generation.token_ids), seconds)
        )
        return generation

    async def search(self, query: str) -> SearchResult:
        assert self._search is not None
        started = perf_counter()
        result = await self._search.search(query)
        # By convention of the corpus, the first line is the title, mostly in quotes.
        parts = (passage.contents.partition("\n") for passage in result.passages)
        passages = tuple(FoundPassage(title.strip().strip('"'), text) for title, _, text in parts)
        self._report(SearchFinished(self._turn, query, passages, result.error, perf_counter() - started))
        return result

    def _report_text(self, pieces: Iterable[tuple[Kind, str]]) -> None:
        for kind, text in pieces:
            self._report(TextPiece(self._turn, kind, text))

    def _report_observation(self) -> None:
        """Report the observation of the previous turn, once the episode has appended it."""
        recorder = self._episode.recorder
        assert isinstance(recorder, Recorder), "`chat_settings` refuses other agents"
        turns = recorder.turns
        if len(turns) > self._observed and turns[-1].observation:
            self._observed = len(turns)
            self._report(ObservationAdded(self._observed - 1, turns[-1].observation))
