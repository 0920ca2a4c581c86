"""Questions to a policy, each answered by one episode of the kind that it was trained in, told event by event.

The episode is `rlsys.rollout.agent.episode.Episode`, unchanged: prompt, tags, limits, observations and tokens are those of training.
What generates and what searches are wrapped, so that they tell what they do. Questions know nothing of each other, as in
training, and may be asked at the same time.

Invariants: the last event is `Ended` or `Failed`; whoever stops listening ends the episode, and the engine frees its request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter

from rlsys.apps.chat.events import (
    TIME_LIMIT,
    Acted,
    Asked,
    Ended,
    Event,
    Failed,
    Found,
    Hit,
    Kind,
    Observed,
    Text,
)
from rlsys.apps.chat.segments import Segments
from rlsys.config.schema import TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.errors import UserError
from rlsys.rollout.agent.codec import Codec
from rlsys.rollout.agent.episode import (
    CANCEL_GRACE_S,
    Episode,
    EpisodeTools,
    Generation,
    SearchResult,
    SearchTool,
    TurnSampling,
    within,
)
from rlsys.rollout.requests import Streaming
from rlsys.rollout.tools.interface import Tool
from rlsys.rollout.tools.load import open_tools

_THOUGHT_TAG = "think"
_HALF_A_CHARACTER = "\ufffd"
"""What a decoder makes of bytes that are not a whole character yet."""


class Conversation:
    """Ask it."""

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
        self._generator = generator
        self._search = search
        self._codec = codec
        self._task = task
        self._own = open_tools(task)
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
        play = _Play(
            self._generator,
            self._search,
            self._codec,
            self._task,
            self._own,
            sampling,
            question,
            events.put_nowait,
        )
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
    """One episode, and what stands between it and its engine and search."""

    def __init__(
        self,
        generator: Streaming,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        own: Sequence[Tool],
        sampling: TurnSampling,
        question: Question,
        say: Callable[[Event], None],
    ) -> None:
        self._generator = generator
        self._search = search
        self._codec = codec
        self._say = say
        self._tools = EpisodeTools(self, None if search is None else self, codec, task, own)
        searches = {} if search is None else {task.tags.search: Kind.search}
        self._kinds = {_THOUGHT_TAG: Kind.thought, **searches, task.tags.answer: Kind.answer}
        self._kinds |= {tool.tag: Kind.tool for tool in own}
        self._episode = Episode(question, 0, self._tools, sampling)
        self._turn = -1
        self._observed = 0
        """Turns of which the observation has been told."""

    async def run(self, timeout_s: float | None) -> Ended:
        """Play to the end or for `timeout_s` seconds."""
        started = perf_counter()
        finish = await within(self._episode.run(), timeout_s=timeout_s)
        # A limit may end the episode right after one.
        self._tell_observation()
        played = self._episode.trajectory(finish or Finish.ABORTED)
        return Ended(
            answer=played.answer,
            finish=TIME_LIMIT if finish is None else played.finish.value,
            searches=played.searches,
            tool_calls=played.tool_calls,
            tokens=sum(turn.generated_tokens for turn in played.turns),
            seconds=perf_counter() - started,
        )

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """The engine's answer, told while it comes."""
        self._tell_observation()
        self._turn += 1
        segments, spoken, started = Segments(self._kinds), "", perf_counter()

        def tell(token_ids: list[int]) -> None:
            nonlocal spoken
            said = self._tools.rules.cut(self._codec.decode(token_ids)).rstrip(_HALF_A_CHARACTER)
            if len(said) > len(spoken) and said.startswith(spoken):
                self._tell_text(segments.feed(said[len(spoken) :]))
                spoken = said

        generation = await self._generator.generate(input_ids, sampling, rid, tell)
        turn = self._tools.rules.parse(self._codec.decode(generation.token_ids))
        if turn.text.startswith(spoken):
            self._tell_text(segments.feed(turn.text[len(spoken) :]))
            spoken = turn.text
        self._tell_text(segments.end())
        seconds = perf_counter() - started
        self._say(Acted(self._turn, turn.action.value, turn.tool, turn.content, len(generation.token_ids), seconds))
        return generation

    async def search(self, query: str) -> SearchResult:
        """What the search finds, told when it is there."""
        assert self._search is not None
        started = perf_counter()
        result = await self._search.search(query)
        passages = tuple(_as_hit(passage.contents) for passage in result.passages)
        self._say(Found(self._turn, query, passages, result.error, perf_counter() - started))
        return result

    def _tell_text(self, pieces: Iterable[tuple[Kind, str]]) -> None:
        for kind, text in pieces:
            self._say(Text(self._turn, kind, text))

    def _tell_observation(self) -> None:
        """What was appended to the turn before, once the episode has gone on from it."""
        begun = self._episode.begun()
        if begun is not None and len(begun.turns) > self._observed:
            self._observed = len(begun.turns)
            self._say(Observed(self._observed - 1, begun.turns[-1].observation))


def _as_hit(contents: str) -> Hit:
    """By the corpus's convention: the title in the first line, mostly in quotes."""
    title, _, text = contents.partition("\n")
    return Hit(title.strip().strip('"'), text)
