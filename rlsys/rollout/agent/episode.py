"""Runs episodes: generation and search or a tool's call in turn, until the protocol or a limit ends it.

The engine, the search and the task's custom tools come in as protocols, so this module knows none. It owns the
limits: tokens of a turn, of an observation and of the whole, and the time of the whole.

Invariants:
- A trajectory never holds more than `max_total_tokens` tokens.
- An episode that runs out of time is returned with what it had, `Finish.ABORTED`, and its running generation is
  cancelled (a `Generator` must then free its request; one that does not is left behind, and the episode returns
  all the same).
- A search or a call that fails becomes an observation, not an exception.
- An observation always begins and ends with its own tags, however long the text is; no passage, title, result or
  error can forge a tag of the protocol or of a tool, or a special token of the tokenizer. The time of the event
  loop that an observation takes follows from its limit: of a longer text only the beginning is looked at.
- At any moment an episode can be taken out as of its last whole turn and resumed elsewhere: see `PartialEpisode`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from time import perf_counter, time_ns
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import SamplingConfig, TagsConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory, Turn
from rlsys.errors import RunError, UserError
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress, PartialEpisode, SampledTurn, open_context
from rlsys.rollout.tools.interface import Tool, ToolError, open_tools
from rlsys.search.retrieval import SearchResult

T = TypeVar("T")
Number = TypeVar("Number", bound=np.generic)
CANCEL_GRACE_S = 1.0
"""For a cancelled call to end in order; then it is waited for no more."""
MOST_CHARS = 100_000
"""Of a tool's answer: more is cut before anybody looks at it."""
SEARCH = "search"
"""The search's name among what is awaited; the other names are those of tools."""
_CHARS_A_TOKEN = 8
"""More than most texts have, so that their beginning is tokenised once."""
_LOOK_AHEAD = 1024
"""Characters behind a token which cannot change it: four of the longest tokens that are in use, and any forgery."""

Heard = Callable[[list[int]], None]
"""Gets all tokens of a turn so far, each time that there are more."""


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """The way in which one turn is drawn. Temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Strings that end the generation and stay in it."""
    max_new_tokens: int = 0
    """Set by the episode for every turn."""


def training_sampling(rollouts: SamplingConfig) -> TurnSampling:
    """The sampling of turns of rollouts."""
    return TurnSampling(rollouts.temperature, rollouts.top_p, rollouts.top_k, tuple(rollouts.stop))


def evaluation_sampling(rollouts: SamplingConfig, temperature: float, *, as_rollouts: bool) -> TurnSampling:
    """The sampling of turns of an evaluation: at `temperature`, 0 is greedy, from the whole vocabulary.

    `as_rollouts`, which is `compat.sampled_validation`, draws them as in training, whatever temperature is asked for.
    """
    return training_sampling(rollouts) if as_rollouts else TurnSampling(temperature, stop=tuple(rollouts.stop))


@dataclass(frozen=True, slots=True)
class Generation:
    """The engine's answer for one turn."""

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


class Streaming(Protocol):
    """A `Generator` that can be followed."""

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, heard: Heard | None = None
    ) -> Generation:
        """As `Generator.generate`; `heard` is called in the event loop while the tokens come."""


class SearchTool(Protocol):
    """The search engine as an episode sees it."""

    async def search(self, query: str) -> SearchResult:
        """Hits for one query. Failures are returned, not raised."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn as the protocol reads it."""

    text: str
    """The rest of the turn after the cut."""
    action: Action
    content: str
    """The query, the text for a tool or the answer, stripped; empty for an invalid turn."""
    tool: str = ""
    """The tool's name, of `Action.TOOL` alone."""


class TurnRules:
    """Reads the text of a turn by the Search-R1 protocol, and says whether the episode ends with it. Stateless.

    A turn is cut after its first closing tag of the search or of a tool, else after its first closing answer tag.
    Its action is the first complete element of the search, a tool or the answer in what is left. An answer ends the
    episode, a search or a call asks for an observation, anything else is answered with the task's invalid message.
    After `max_turns` turns there is one last generation, in which only an answer counts. A query, or a text for a
    tool, of white space alone is invalid.

    Invariants: `step` never raises on any text; at most `max_turns + 1` steps until one ends the episode.
    """

    def __init__(self, task: TaskConfig, tools: Mapping[str, str] = {}, *, searches: bool = True) -> None:
        """`tools` are their names by tag; without `searches` the tag of the search means nothing."""
        tags = task.tags
        self._acts = {**({tags.search: ""} if searches else {}), **tools}
        """Tag -> name of the tool, empty for the search."""
        self._element = re.compile(rf"<({'|'.join(map(re.escape, (*self._acts, tags.answer)))})>(.*?)</\1>", re.DOTALL)
        self._answer_tag = tags.answer
        self._max_turns = task.max_turns

    def cut(self, text: str) -> str:
        """`text` up to and including the tag that ends the turn; all of it without one."""
        for tags in (self._acts, (self._answer_tag,)):
            cuts = [text.partition(f"</{tag}>")[:2] for tag in tags]
            if ended := [head + closer for head, closer in cuts if closer]:
                return min(ended, key=len)
        return text

    def parse(self, text: str) -> Parsed:
        """Cut a turn and read its action."""
        kept = self.cut(text)
        element = self._element.search(kept)
        if element is None:
            return Parsed(kept, Action.INVALID, "")
        tag, content = element.group(1), element.group(2).strip()
        if tag == self._answer_tag:
            return Parsed(kept, Action.ANSWER, content)
        if not content:
            return Parsed(kept, Action.INVALID, "")
        tool = self._acts[tag]
        return Parsed(kept, Action.TOOL if tool else Action.SEARCH, content, tool)

    def step(self, turns: int, text: str) -> tuple[Parsed, Finish | None]:
        """Read the generated `text` of a turn after `turns` others, and say how it ends the episode, if it does."""
        turn = self.parse(text)
        if turn.action is Action.ANSWER:
            return turn, Finish.ANSWER
        return turn, Finish.TURN_LIMIT if turns >= self._max_turns else None


def render_search(contents: Iterable[str], error: str) -> str:
    """Passages as `Doc {i}(Title: {first line}) {rest}`, one a line, numbered from 1; or an `error` that is not empty."""
    if error:
        return f"Search failed: {error}"
    parts = (content.partition("\n") for content in contents)
    lines = [f"Doc {number}(Title: {title}) {rest}\n" for number, (title, _, rest) in enumerate(parts, start=1)]
    return "".join(lines) or "No results found."


def render_call(tool: str, text: str, error: str) -> str:
    """The answer `text` of `tool`, or an `error` that is not empty."""
    return f"{tool} failed: {error}" if error else text or "No result."


class Observer:
    """Wraps untrusted text into observations of limited length."""

    def __init__(self, tags: TagsConfig, codec: Codec, tools: Sequence[str] = ()) -> None:
        """`tools` are the tags of tools."""
        self._codec = codec
        self._open = f"\n\n<{tags.information}>"
        self._close = f"</{tags.information}>\n\n"
        names = (tags.search, tags.answer, tags.information, *tools)
        words = "|".join(re.escape(word.strip()) for word in names)
        specials = "".join(f"|{re.escape(text)}" for text in codec.special_texts)
        # Possessive: a "<" before n spaces would otherwise take n * n steps.
        self._forgery = re.compile(rf"<\s*+/?\s*+(?:{words})\s*+>{specials}", re.IGNORECASE)
        self.wrapper_tokens = len(codec.encode(self._open + self._close))
        """Tokens of an observation without content: no limit can be below that."""

    def observe(self, body: str, max_tokens: int) -> str:
        """The observation that holds `body`, at most `max_tokens` tokens when tokenised alone: `wrapper_tokens` or more."""
        if max_tokens < self.wrapper_tokens:
            raise ValueError(f"an observation needs {self.wrapper_tokens} tokens, {max_tokens} given")
        chars = _CHARS_A_TOKEN * max_tokens + _LOOK_AHEAD
        while chars < len(body):
            head = self._neutralise(self._beginning(body, chars)).lstrip()
            spans = self._codec.encode_spans(head).spans
            if len(spans) > max_tokens and spans[max_tokens][1] <= len(head) - _LOOK_AHEAD:
                return self._cut(head, spans, max_tokens)
            chars *= 2
        whole = self._neutralise(body).strip()
        observation = self._wrap(whole)
        if len(self._codec.encode(observation)) <= max_tokens:
            return observation
        return self._cut(whole, self._codec.encode_spans(whole).spans, max_tokens)

    def _beginning(self, text: str, chars: int) -> str:
        """The first characters of `text`, with a tag that is only closed behind them broken as in all of it."""
        start = text.rfind("<", 0, chars)
        tag = self._forgery.match(text, start) if start >= 0 else None
        if tag is None or tag.end() <= chars:
            return text[:chars]
        return f"{text[:start]}{_broken(tag.group())}"[:chars]

    def _neutralise(self, text: str) -> str:
        """Break every tag and special token by a space after its first character, until none is left."""
        while True:
            broken = self._forgery.sub(lambda match: _broken(match.group()), text)
            if broken == text:
                return text
            text = broken

    def _cut(self, body: str, spans: Sequence[tuple[int, int]], max_tokens: int) -> str:
        """The longest beginning of `body` that keeps the limit together with the tags. `spans` are its tokens."""
        keep = min(max_tokens - self.wrapper_tokens, len(spans))
        while keep > 0:
            # A cut may split a character's tokens or merge anew with the tag, so the result is counted.
            observation = self._wrap(body[: spans[keep - 1][1]].rstrip())
            if len(self._codec.encode(observation)) <= max_tokens:
                return observation
            keep -= 1
        return self._wrap("")

    def _wrap(self, body: str) -> str:
        return f"{self._open}{body}{self._close}"


def _broken(marker: str) -> str:
    """`marker` so that it is none any more: `</search>` becomes `(/search)`, `[INST]` becomes `[ INST]`."""
    if marker.startswith("<") and marker.endswith(">"):
        return f"({marker[1:-1]})"
    # Behind the first character that shows: a marker that begins or ends with white space would come back for ever.
    first = len(marker) - len(marker.lstrip()) + 1
    return f"{marker[:first]} {marker[first:]}" if marker[first:].strip() else " "


class EpisodeTools:
    """Engine, search, tools and rules that all episodes of one engine share.

    Raises UserError where not even an empty observation fits into `task.max_observation_tokens`, and for tools of the
    task that cannot be used.
    """

    def __init__(
        self,
        generator: Generator,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        custom: Sequence[Tool] | None = None,
    ) -> None:
        """Without `search` its tag means nothing. `custom` take the place of one of each `task.tools`."""
        self.generator = generator
        self.search = search
        self.codec = codec
        self.task = task
        self.custom = {tool.name: tool for tool in (open_tools(task) if custom is None else custom)}
        """The task's custom tools by name."""
        self.awaited: Counter[str] = Counter()
        """Tool, or `SEARCH` -> episodes that wait for it at this moment."""
        tags = {tool.tag: name for name, tool in self.custom.items()}
        self.rules = TurnRules(task, tags, searches=search is not None)
        self.observer = Observer(task.tags, codec, tuple(tags))
        self._stops = tuple(f"</{tag}>" for tag in tags)
        if task.max_observation_tokens < self.observer.wrapper_tokens:
            raise UserError(
                f"task.max_observation_tokens={task.max_observation_tokens} is below the "
                f"{self.observer.wrapper_tokens} tokens of the tags alone; raise it.",
                code="out_of_range",
                key="task.max_observation_tokens",
            )

    def stopping(self, sampling: TurnSampling) -> TurnSampling:
        """`sampling` that ends a generation at the closing tag of every tool as well."""
        return replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self._stops))))


async def run_episode(
    question: Question, sample: int, tools: EpisodeTools, sampling: TurnSampling, timeout_s: float | None = None
) -> Trajectory:
    """Run one episode to its end or for `timeout_s` seconds. Raises UserError for a prompt that is too long."""
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
        progress: PartialEpisode | None = None,
    ) -> None:
        """`progress` holds the turns taken already, from the same question, task and tokenizer."""
        self._question = question
        self._sample = sample
        self._tools = tools
        self._sampling = tools.stopping(sampling)
        self._context = open_context(tools.task.token_mode, tools.codec, tools.codec.prompt(question.prompt))
        self._turns: list[Turn] = []
        self._sampled: list[SampledTurn] = []
        """Each of `_turns` as the engine returned it."""
        self._whole = 0
        """Number of `_turns` that have been answered by the environment."""
        length = len(self._context.input_ids())
        if length > tools.task.max_prompt_tokens:
            raise UserError(
                f"Question {question.uid} has {length} tokens, more than task.max_prompt_tokens="
                f"{tools.task.max_prompt_tokens}; raise the limit or drop the question.",
                code="out_of_range",
                key="task.max_prompt_tokens",
            )
        if progress is not None:
            self._resume(progress)

    def progress(self) -> PartialEpisode | None:
        """The whole turns so far, if there is one."""
        if not self._whole:
            return None
        sampled = self._sampled[: self._whole]
        return PartialEpisode(
            question_uid=self._question.uid,
            sample=self._sample,
            turns=tuple(self._turns[: self._whole]),
            token_ids=_joined((turn.output_ids for turn in sampled), np.int32),
            logprobs=_joined((turn.logprobs for turn in sampled), np.float32),
            versions=_joined((turn.versions for turn in sampled), np.int32),
            ended_itself=np.array([turn.ended_itself for turn in sampled], np.bool_),
        )

    async def run(self) -> Finish:
        """Take turns until the episode ends."""
        tools, task = self._tools, self._tools.task
        while True:
            inputs, number = self._context.input_ids(), len(self._turns)
            room = task.max_total_tokens - len(inputs) - int(task.train_eos)  # That token is kept free.
            if room <= 0:
                return Finish.TOKEN_LIMIT
            budget = min(task.max_turn_tokens, room)
            began_ns, started = time_ns(), perf_counter()
            generation = await tools.generator.generate(
                inputs,
                replace(self._sampling, max_new_tokens=budget),
                rid=f"{self._question.uid}#{self._sample}.{number}",
            )
            parsed, finish = tools.rules.step(number, tools.codec.decode(generation.token_ids))
            turn = Turn(
                text=parsed.text,
                action=parsed.action,
                content=parsed.content,
                observation="",
                generated_tokens=len(generation.token_ids),
                prompt_tokens=len(inputs),
                cached_tokens=generation.cached_tokens,
                generate_s=perf_counter() - started,
                tool_s=0.0,
                began_ns=began_ns,
                tool=parsed.tool,
            )
            ended_itself = generation.finish == "stop"
            sampled = SampledTurn(inputs, generation.token_ids, generation.logprobs, generation.versions, ended_itself)
            self._add(turn, sampled)
            if generation.finish == "abort":
                return Finish.ABORTED
            if finish is not None:
                return finish
            if generation.finish == "length" and budget == room and parsed.action is Action.INVALID:
                return Finish.TOKEN_LIMIT
            if not await self._respond(parsed, room - len(generation.token_ids)):
                return Finish.TOKEN_LIMIT
            self._whole = len(self._turns)

    def trajectory(self, finish: Finish) -> Trajectory:
        """The episode so far, as ended by `finish`."""
        task = self._tools.task
        record = self._context.close(task.train_eos and finish is Finish.ANSWER, task.max_total_tokens)
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
            sampled_ids=_joined((turn.output_ids for turn in self._sampled), np.int32),
            sampled_logprobs=_joined((turn.logprobs for turn in self._sampled), np.float32),
        )

    def _resume(self, progress: PartialEpisode) -> None:
        """Take the turns of `progress` as they were taken first."""
        if (progress.question_uid, progress.sample) != (self._question.uid, self._sample):
            raise ValueError(
                f"Sample {self._sample} of question {self._question.uid} cannot go on from sample "
                f"{progress.sample} of question {progress.question_uid}."
            )
        ends = accumulate((turn.generated_tokens for turn in progress.turns), initial=0)
        sampled = (progress.token_ids, progress.logprobs, progress.versions)
        for turn, (start, end), ended in zip(
            progress.turns, pairwise(ends), progress.ended_itself.tolist(), strict=True
        ):
            ids, logprobs, versions = (array[start:end].tolist() for array in sampled)
            self._add(turn, SampledTurn(self._context.input_ids(), ids, logprobs, versions, ended))
            self._context.add_observation(turn.observation)
        self._whole = len(self._turns)

    def _add(self, turn: Turn, sampled: SampledTurn) -> None:
        """Append a generation."""
        self._context.add_turn(sampled, turn.text)
        self._turns.append(turn)
        self._sampled.append(sampled)

    async def _respond(self, turn: Parsed, room: int) -> bool:
        """Append the environment's answer to `turn`; False where not even the shortest has room."""
        tools, task = self._tools, self._tools.task
        if turn.action is Action.INVALID:
            observation, seconds, error = task.invalid_message, 0.0, ""
            if len(tools.codec.encode(observation)) > room:
                return False
        else:
            limit = min(task.max_observation_tokens, room)
            if limit < tools.observer.wrapper_tokens:
                return False
            started, awaited = perf_counter(), turn.tool or SEARCH
            tools.awaited[awaited] += 1
            try:
                body, error = await self._call(turn)
            finally:
                tools.awaited[awaited] -= 1
            seconds = perf_counter() - started
            observation = tools.observer.observe(body, limit)
        self._context.add_observation(observation)
        self._turns[-1] = replace(self._turns[-1], observation=observation, tool_s=seconds, tool_error=error)
        return True

    async def _call(self, turn: Parsed) -> Called:
        """Carry out the search or the tool's call of `turn`: the text of the observation, and why it failed."""
        if turn.tool:
            text, error = await call_tool(self._tools.custom[turn.tool], turn.content)
            return Called(render_call(turn.tool, text, error), error)
        assert self._tools.search is not None, "the rules know no search where there is none"
        result = await self._tools.search.search(turn.content)
        return Called(render_search([passage.contents for passage in result.passages], result.error), result.error)


def _joined(parts: Iterable[Sequence[float]], dtype: type[Number]) -> NDArray[Number]:
    return np.array(list(chain.from_iterable(parts)), dtype)


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
        progress: Sequence[EpisodeProgress] = (),
    ) -> None:
        """`progress` is that of some of the `samples`, in any order.

        Raises UserError for a question that is too long, ValueError for `progress` that is not of this group.
        """
        known = {episode.sample: episode for episode in progress}
        if len(known) < len(progress) or not known.keys() <= set(samples):
            raise ValueError(
                f"Samples {[episode.sample for episode in progress]} were begun, of the samples {list(samples)} of "
                f"question {question.uid}."
            )
        self._episodes: dict[int, Episode | Trajectory] = {}
        """By sample, in order; a trajectory is of an episode that has ended."""
        for sample in samples:
            begun = known.get(sample)
            if not isinstance(begun, Trajectory):
                self._episodes[sample] = Episode(question, sample, tools, sampling, begun)
            elif begun.question_uid == question.uid:
                self._episodes[sample] = begun
            else:
                raise ValueError(f"An episode of question {begun.question_uid} is none of {question.uid}.")

    async def play(self, slots: asyncio.Semaphore, timeout_s: float) -> None:
        """Run each episode to its end, or for `timeout_s` seconds from when one of the `slots` is free for it."""

        async def play(sample: int, episode: Episode) -> None:
            async with slots:
                finish = await within(asyncio.ensure_future(episode.run()), timeout_s=timeout_s)
            self._episodes[sample] = episode.trajectory(finish or Finish.ABORTED)

        waiting = [(sample, each) for sample, each in self._episodes.items() if isinstance(each, Episode)]
        tasks = [asyncio.create_task(play(sample, episode)) for sample, episode in waiting]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After an error or a cancellation, no sibling may go on unseen.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def progress(self) -> tuple[EpisodeProgress, ...]:
        """Samples that have ended or have a whole turn, in order."""
        known = (each.progress() if isinstance(each, Episode) else each for each in self._episodes.values())
        return tuple(episode for episode in known if episode is not None)

    def trajectories(self) -> list[Trajectory]:
        """All samples, in order; an episode that has not ended is aborted."""
        every = self._episodes.values()
        return [each.trajectory(Finish.ABORTED) if isinstance(each, Episode) else each for each in every]


class EngineDied(RunError):
    """An engine is gone although the process that drives it may live: one sentence that says which."""


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """A moment of one engine's episodes."""

    busy: bool
    """The engine generates, or holds requests back for a while."""
    awaited: Mapping[str, int]
    """A tool outside the engine, or the search -> episodes that wait for it."""


def common_wait(activities: Sequence[EngineActivity]) -> str:
    """The names of all that episodes wait for; empty where an engine is busy, or nothing is awaited."""
    if any(activity.busy for activity in activities):
        return ""
    return " and ".join(sorted({name for each in activities for name, waiting in each.awaited.items() if waiting}))


class Called(NamedTuple):
    """The outcome of a call."""

    text: str
    error: str = ""
    """Why it failed, on one line; empty where it worked."""


async def call_tool(tool: Tool, text: str) -> Called:
    """Give `text` to `tool` and return its answer within its time-out: failures are returned, not raised."""
    late = Called("", f"no answer within {tool.timeout_s:g} s")
    return await within(_attempt(tool, text), timeout_s=tool.timeout_s) or late


async def _attempt(tool: Tool, text: str) -> Called:
    try:
        answer = await tool.call(text)
    except ToolError as error:
        return Called("", _reason(error) or "it gives no reason")
    except asyncio.CancelledError:  # by the tool itself: once the time is over, nobody listens any more
        return Called("", "it was cancelled")
    # The tool is somebody else's, and the policy gets to read it; `exit()` in it must not end the worker.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Called("", f"{type(error).__name__}: {_reason(error)}".rstrip(": "))
    if not isinstance(answer, str):
        return Called("", f"it returned {type(answer).__name__}, not text")
    return Called(_encodable(answer))


def _reason(error: BaseException) -> str:
    """The words of an error, on one line; empty for one that has none."""
    try:
        return " ".join(_encodable(str(error)).split())
    except Exception:  # noqa: BLE001 (its __str__ is the tool's as well)
        return ""


def _encodable(text: str) -> str:
    """`text` without what no tokenizer takes, lone surrogates, and no longer than is looked at."""
    return text[:MOST_CHARS].encode("utf-8", "replace").decode("utf-8")


async def within(call: Coroutine[Any, Any, T] | asyncio.Future[T], *, timeout_s: float | None = None) -> T | None:
    """Return the result of `call`, or None after `timeout_s` seconds.

    The call is then cancelled. One that ignores this is left behind after `CANCEL_GRACE_S`.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            # The gather takes note of an error, which nobody will ask for any more.
            await asyncio.wait([asyncio.gather(task, return_exceptions=True)], timeout=CANCEL_GRACE_S)
