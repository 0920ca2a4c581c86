"""One episode: generation and search or a tool's call in turn, until the protocol or a limit ends it.

The engine, the search tool and the task's own tools come in as protocols, so this module knows none. It owns the
limits: tokens of a turn, of an observation and of the whole, and the time of the whole.

Invariants: a trajectory never holds more than `max_total_tokens` tokens; an episode that runs out of
time is returned with what it had, `Finish.ABORTED`, and its running generation is cancelled (a
`Generator` must then free its request; one that does not is left behind, and the episode returns all the
same); a search or a call that fails becomes an observation, not an exception. At any moment an episode can be taken
out as of its last whole turn and go on later, elsewhere: see `begun.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter, time_ns
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from rlsys.config.schema import TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory, Turn
from rlsys.errors import UserError
from rlsys.rollout.agent.codec import Codec
from rlsys.rollout.agent.observation import Observer, render_call
from rlsys.rollout.agent.protocol import Call, End, Parsed, Say, State
from rlsys.rollout.agent.protocol import Protocol as Rules
from rlsys.rollout.agent.tokens import EpisodeProgress, PartialEpisode, Sample, open_context, partial_episode
from rlsys.rollout.tools.interface import Tool, ToolError
from rlsys.rollout.tools.load import open_tools

T = TypeVar("T")
CANCEL_GRACE_S = 1.0
"""For a cancelled call to end in order; then it is waited for no more."""
MOST_CHARS = 100_000
"""Of what a tool says: more is cut before anybody looks at it."""
SEARCH = "search"
"""As a name of what is awaited; the others are the names of tools."""


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """How one turn is drawn. Temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Strings that end the generation and stay in it."""
    max_new_tokens: int = 0
    """Set by the episode for every turn."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine returned for one turn."""

    token_ids: list[int]
    """As sampled, with the tokens of a stop string or the end-of-sequence token that ended it."""
    logprobs: list[float]
    """[len(token_ids)] natural log-probs under the sampling temperature."""
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int
    """Input tokens found in the prefix cache."""
    versions: list[int]
    """[len(token_ids)] policy version that sampled each."""


class Generator(Protocol):
    """An engine as an episode sees it."""

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """Continue `input_ids`; on cancellation, free the request `rid` and re-raise."""


class Passage(Protocol):
    """A search hit."""

    @property
    def contents(self) -> str:
        """Title in the first line, text in the rest."""


class SearchResult(Protocol):
    """What a search returned: passages, or an error."""

    @property
    def passages(self) -> Sequence[Passage]:
        """Hits, best first."""

    @property
    def error(self) -> str:
        """Why the search failed; empty when it worked."""


class SearchTool(Protocol):
    """The search engine as an episode sees it."""

    async def search(self, query: str) -> SearchResult:
        """Hits for one query. Failures are returned, not raised."""


class EpisodeTools:
    """What all episodes of one engine share.

    Raises UserError where not even an empty observation fits into `task.max_observation_tokens`, and for tools of the
    task that cannot be used.
    """

    def __init__(
        self,
        generator: Generator,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        own: Sequence[Tool] | None = None,
    ) -> None:
        """Without `search` there is none, and its tag means nothing. `own` take the place of one of each `task.tools`."""
        self.generator = generator
        self.search = search
        self.codec = codec
        self.task = task
        self.own = {tool.name: tool for tool in (open_tools(task) if own is None else own)}
        """The task's own tools by name."""
        self.awaited: Counter[str] = Counter()
        """What episodes wait for outside the engine, by its name: how many do at this moment."""
        tags = {tool.tag: name for name, tool in self.own.items()}
        self.rules = Rules(task, tags, searches=search is not None)
        self.observer = Observer(task.tags, codec, tuple(tags))
        self._stops = tuple(f"</{tag}>" for tag in tags)
        if task.max_observation_tokens < self.observer.wrapper_tokens:
            raise UserError(
                f"task.max_observation_tokens={task.max_observation_tokens} is below the "
                f"{self.observer.wrapper_tokens} tokens of the tags alone; raise it."
            )

    @contextmanager
    def awaiting(self, name: str) -> Iterator[None]:
        """Count one episode more as waiting for `name` during the body."""
        self.awaited[name] += 1
        try:
            yield
        finally:
            self.awaited[name] -= 1

    def stopping(self, sampling: TurnSampling) -> TurnSampling:
        """`sampling` that ends a generation at the closing tag of every tool as well."""
        added = tuple(stop for stop in self._stops if stop not in sampling.stop)
        return replace(sampling, stop=(*sampling.stop, *added))


async def run_episode(
    question: Question,
    sample: int,
    tools: EpisodeTools,
    sampling: TurnSampling,
    timeout_s: float | None = None,
) -> Trajectory:
    """Run one episode to its end or for `timeout_s` seconds.

    Raises `UserError` for a prompt above `task.max_prompt_tokens`.
    """
    episode = Episode(question, sample, tools, sampling)
    finish = await within(episode.run(), timeout_s=timeout_s)
    return episode.trajectory(finish or Finish.ABORTED)


class Episode:
    """The state of one running episode."""

    def __init__(
        self,
        question: Question,
        sample: int,
        tools: EpisodeTools,
        sampling: TurnSampling,
        begun: PartialEpisode | None = None,
    ) -> None:
        """`begun` is what there is of it already, from the same question, task and tokenizer."""
        self._question = question
        self._sample = sample
        self._tools = tools
        self._sampling = tools.stopping(sampling)
        self._context = open_context(tools.task.token_mode, tools.codec, tools.codec.prompt(question.prompt))
        self._turns: list[Turn] = []
        self._generations: list[Sample] = []
        """Of `_turns`, as sampled."""
        self._whole = 0
        """How many of `_turns` have been answered by the environment."""
        length = len(self._context.input_ids())
        if length > tools.task.max_prompt_tokens:
            raise UserError(
                f"Question {question.uid} has {length} tokens, more than task.max_prompt_tokens="
                f"{tools.task.max_prompt_tokens}; raise the limit or drop the question."
            )
        if begun is not None:
            self._go_on_from(begun)

    def begun(self) -> PartialEpisode | None:
        """The whole turns so far, if there is one."""
        whole = self._whole
        if not whole:
            return None
        return partial_episode(self._question.uid, self._sample, self._turns[:whole], self._generations[:whole])

    async def run(self) -> Finish:
        """Take turns until the episode ends."""
        task = self._tools.task
        state = State(self._whole)
        while True:
            inputs = self._context.input_ids()
            room = self._room(len(inputs))
            if room <= 0:
                return Finish.TOKEN_LIMIT
            budget = min(task.max_turn_tokens, room)
            began_ns, started = time_ns(), perf_counter()
            generation = await self._tools.generator.generate(
                inputs,
                replace(self._sampling, max_new_tokens=budget),
                rid=f"{self._question.uid}#{self._sample}.{state.turns}",
            )
            state, effect = self._tools.rules.step(state, self._tools.codec.decode(generation.token_ids))
            parsed = effect.turn
            turn = _as_turn(parsed, generation, len(inputs), began_ns, perf_counter() - started)
            self._add(turn, _as_sample(inputs, generation))
            if generation.finish == "abort":
                return Finish.ABORTED
            if isinstance(effect, End):
                return effect.finish
            if generation.finish == "length" and budget == room and parsed.action is Action.INVALID:
                return Finish.TOKEN_LIMIT
            room -= len(generation.token_ids)
            if isinstance(effect, Say):
                fits = self._say(effect.message, room)
            elif isinstance(effect, Call):
                fits = await self._call(parsed, room)
            else:
                fits = await self._search(parsed.content, room)
            if not fits:
                return Finish.TOKEN_LIMIT
            self._whole = len(self._turns)

    def trajectory(self, finish: Finish) -> Trajectory:
        """What the episode has so far, as ended by `finish`."""
        task = self._tools.task
        end_with_eos = task.train_eos and finish is Finish.ANSWER
        record = self._context.close(end_with_eos, task.max_total_tokens)
        return Trajectory(
            question_uid=self._question.uid,
            sample=self._sample,
            tokens=record.tokens,
            prompt_length=record.prompt_length,
            loss_mask=record.loss_mask,
            rollout_logprobs=record.rollout_logprobs,
            versions=record.versions,
            turn_of_token=record.turn_of_token,
            tokens_differing=record.tokens_differing,
            response=record.response,
            turns=tuple(self._turns),
            finish=Finish.TOKEN_LIMIT if record.truncated else finish,
            sampled_ids=np.array([one for own in self._generations for one in own.output_ids], np.int32),
            sampled_logprobs=np.array([one for own in self._generations for one in own.logprobs], np.float32),
        )

    def _go_on_from(self, begun: PartialEpisode) -> None:
        """Take the turns of `begun` as they were taken first."""
        if (begun.question_uid, begun.sample) != (self._question.uid, self._sample):
            raise ValueError(
                f"Sample {self._sample} of question {self._question.uid} cannot go on from sample "
                f"{begun.sample} of question {begun.question_uid}."
            )
        for turn, own, ended_itself in begun.generations():
            sample = Sample(
                input_ids=self._context.input_ids(),
                output_ids=begun.token_ids[own].tolist(),
                logprobs=begun.logprobs[own].tolist(),
                versions=begun.versions[own].tolist(),
                ended_itself=ended_itself,
            )
            self._add(turn, sample)
            self._context.add_observation(turn.observation)
        self._whole = len(self._turns)

    def _add(self, turn: Turn, sample: Sample) -> None:
        """Append a generation."""
        self._context.add_turn(sample, turn.text)
        self._turns.append(turn)
        self._generations.append(sample)

    def _room(self, context_tokens: int) -> int:
        """Tokens that may still be added, one kept for the end-of-sequence token."""
        task = self._tools.task
        return task.max_total_tokens - context_tokens - int(task.train_eos)

    def _say(self, message: str, room: int) -> bool:
        """Append a fixed message; False where it has no room."""
        if len(self._tools.codec.encode(message)) > room:
            return False
        self._append(message)
        return True

    async def _search(self, query: str, room: int) -> bool:
        """Search and append the observation; False where not even an empty one has room."""
        limit = self._observation_limit(room)
        if not limit:
            return False
        assert self._tools.search is not None, "the rules know no search where there is none"
        started = perf_counter()
        with self._tools.awaiting(SEARCH):
            result = await self._tools.search.search(query)
        search_s = perf_counter() - started
        contents = [passage.contents for passage in result.passages]
        observation = self._tools.observer.observe(contents, result.error, limit)
        self._append(observation, search_s, result.error)
        return True

    async def _call(self, turn: Parsed, room: int) -> bool:
        """Call a tool and append the observation; False where not even an empty one has room."""
        limit = self._observation_limit(room)
        if not limit:
            return False
        started = perf_counter()
        with self._tools.awaiting(turn.tool):
            called = await call_tool(self._tools.own[turn.tool], turn.content)
        call_s = perf_counter() - started
        body = render_call(turn.tool, called.text, called.error)
        self._append(self._tools.observer.tell(body, limit), call_s, called.error)
        return True

    def _observation_limit(self, room: int) -> int:
        """Most tokens of an observation; 0 where not even an empty one has `room`."""
        limit = min(self._tools.task.max_observation_tokens, room)
        return limit if limit >= self._tools.observer.wrapper_tokens else 0

    def _append(self, observation: str, search_s: float = 0.0, search_error: str = "") -> None:
        """Append an observation to the context and to the last turn."""
        self._context.add_observation(observation)
        self._turns[-1] = replace(
            self._turns[-1], observation=observation, search_s=search_s, search_error=search_error
        )


def _as_sample(inputs: list[int], generation: Generation) -> Sample:
    return Sample(
        input_ids=inputs,
        output_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        ended_itself=generation.finish == "stop",
    )


def _as_turn(parsed: Parsed, generation: Generation, prompt_tokens: int, began_ns: int, generate_s: float) -> Turn:
    return Turn(
        text=parsed.text,
        action=parsed.action,
        content=parsed.content,
        observation="",
        generated_tokens=len(generation.token_ids),
        prompt_tokens=prompt_tokens,
        cached_tokens=generation.cached_tokens,
        generate_s=generate_s,
        search_s=0.0,
        began_ns=began_ns,
        tool=parsed.tool,
    )


class EpisodeGroup:
    """The episodes of one question, side by side. Play it once, on one event loop.

    Every episode comes back: one that has ended before stays as it is, one with progress resumes, others begin; one that runs
    out of time, or is not played to its end, is `Finish.ABORTED` and holds the turns that were complete. What `progress`
    returns at any moment can be given to another group of the same question, which then ends as this one would have.
    """

    def __init__(
        self,
        question: Question,
        samples: Sequence[int],
        tools: EpisodeTools,
        sampling: TurnSampling,
        begun: Sequence[EpisodeProgress] = (),
    ) -> None:
        """`begun` is what there is already of some of the `samples`, in any order.

        Raises UserError for a question that is too long, ValueError for `begun` that is not of this group.
        """
        known = {one.sample: one for one in begun}
        if len(known) < len(begun) or not known.keys() <= set(samples):
            raise ValueError(
                f"Samples {[one.sample for one in begun]} were begun, of the samples {list(samples)} of "
                f"question {question.uid}."
            )
        self._episodes: dict[int, Episode] = {}
        """Those that have to be played."""
        self._ended: dict[int, Trajectory] = {}
        self._samples = tuple(samples)
        for sample in samples:
            one = known.get(sample)
            if not isinstance(one, Trajectory):
                self._episodes[sample] = Episode(question, sample, tools, sampling, one)
            elif one.question_uid == question.uid:
                self._ended[sample] = one
            else:
                raise ValueError(f"An episode of question {one.question_uid} is none of {question.uid}.")

    async def play(self, slots: asyncio.Semaphore, timeout_s: float) -> None:
        """Run each episode to its end, or for `timeout_s` seconds from when one of the `slots` is free for it."""

        async def play(sample: int, episode: Episode) -> None:
            async with slots:
                finish = await within(asyncio.ensure_future(episode.run()), timeout_s=timeout_s)
            self._ended[sample] = episode.trajectory(finish or Finish.ABORTED)

        tasks = [asyncio.create_task(play(sample, episode)) for sample, episode in self._episodes.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After an error or a cancellation, no sibling may go on unseen.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def begun(self) -> tuple[EpisodeProgress, ...]:
        """Of each sample that has ended or has a whole turn, what there is; in the order of the samples."""
        found = (self._ended.get(sample) or self._episodes[sample].begun() for sample in self._samples)
        return tuple(one for one in found if one is not None)

    def trajectories(self) -> list[Trajectory]:
        """Of every sample, in order; an episode that has not ended is aborted."""
        return [
            self._ended.get(sample) or self._episodes[sample].trajectory(Finish.ABORTED) for sample in self._samples
        ]


@dataclass(frozen=True, slots=True)
class Activity:
    """A moment of one engine's episodes."""

    busy: bool
    """The engine generates, or holds requests back for a while."""
    awaited: Mapping[str, int]
    """What is outside the engine, by name -> episodes that wait for it."""


def common_wait(found: Iterable[Activity]) -> str:
    """What all that goes on waits for, in words; empty where an engine is busy, or nothing is awaited."""
    awaited: set[str] = set()
    for activity in found:
        if activity.busy:
            return ""
        awaited.update(name for name, episodes in activity.awaited.items() if episodes)
    return " and ".join(sorted(awaited))


@dataclass(frozen=True, slots=True)
class Called:
    """What came of a call."""

    text: str
    error: str = ""
    """Why it failed, on one line; empty where it worked."""


async def call_tool(tool: Tool, text: str) -> Called:
    """What `tool` says to `text`, within its time-out: failures are returned, not raised."""
    called = await within(_attempt(tool, text), timeout_s=tool.timeout_s)
    return called or Called("", f"no answer within {tool.timeout_s:g} s")


async def _attempt(tool: Tool, text: str) -> Called:
    try:
        said = await tool.call(text)
    except ToolError as error:
        return Called("", _reason(error) or "it gives no reason")
    except asyncio.CancelledError:  # by the tool itself: once the time is over, nobody listens any more
        return Called("", "it was cancelled")
    # The tool is somebody else's, and the policy gets to read it; `exit()` in it must not end the worker.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Called("", f"{type(error).__name__}: {_reason(error)}".rstrip(": "))
    if not isinstance(said, str):
        return Called("", f"it returned {type(said).__name__}, not text")
    return Called(_encodable(said))


def _reason(error: BaseException) -> str:
    """What an error says, on one line; empty for one that cannot say it."""
    try:
        return " ".join(_encodable(str(error)).split())
    except Exception:  # noqa: BLE001 (its __str__ is the tool's as well)
        return ""


def _encodable(text: str) -> str:
    """`text` without what no tokenizer takes, lone surrogates, and no longer than is looked at."""
    return text[:MOST_CHARS].encode("utf-8", "replace").decode("utf-8")


async def within(
    call: Coroutine[Any, Any, T] | asyncio.Task[T],
    *,
    timeout_s: float | None = None,
    stop: asyncio.Future[None] | None = None,
) -> T | None:
    """What `call` returns, or None after `timeout_s` seconds or once `stop` is done.

    The call is then cancelled. One that ignores this is left behind after `CANCEL_GRACE_S`.
    """
    task = asyncio.ensure_future(call)
    try:
        waits: list[asyncio.Future[Any]] = [task] if stop is None else [task, stop]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            # The gather takes note of an error, which nobody will ask for any more.
            await asyncio.wait([asyncio.gather(task, return_exceptions=True)], timeout=CANCEL_GRACE_S)
