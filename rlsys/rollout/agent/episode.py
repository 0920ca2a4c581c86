"""Runs episodes: alternates generation with searches or tool calls until the protocol or a limit ends the episode.

Engine, search and custom tools are protocols; this module imports no implementation. It enforces the limits: tokens per
turn, per observation and per episode, and time per episode.

Invariants:
- A trajectory never has more than `max_total_tokens` tokens.
- An episode that times out returns its turns so far as `Finish.ABORTED`, and its running generation is cancelled. The
  `Generator` must then free the request; the episode returns even if the generator does not.
- A failed search or tool call becomes an observation, not an exception.
- An observation begins and ends with its own tags, whatever its length. No passage, title, result or error can forge a
  tag of the protocol or of a tool, or a special token of the tokenizer.
- A long text does not block the event loop for long: only the beginning is processed, as far as the token limit of an
  observation needs.
- An episode can be interrupted at any time and resumed elsewhere from its last whole turn: see `PartialEpisode`.
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
"""Time for a cancelled call to end; afterwards it is abandoned."""
MAX_CHARS = 100_000
"""Maximum length of a tool's result; the rest is cut off before any processing."""
SEARCH = "search"
"""Key of the search in `EpisodeTools.awaited`; the other keys are names of tools."""
_CHARS_A_TOKEN = 8
"""Assumed characters per token: more than in most texts, so that tokenising the beginning once usually suffices."""
_LOOK_AHEAD = 1024
"""Maximum number of following characters on which a token depends; no forged tag and no four tokens are as long."""

OnTokens = Callable[[list[int]], None]
"""Callback that receives all tokens of a turn so far, each time more arrive."""


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """Sampling parameters of one turn. Temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Strings that end the generation; they stay in its text."""
    max_new_tokens: int = 0
    """Set by the episode for every turn."""


def training_sampling(rollouts: SamplingConfig) -> TurnSampling:
    """Return the sampling parameters of rollouts."""
    return TurnSampling(rollouts.temperature, rollouts.top_p, rollouts.top_k, tuple(rollouts.stop))


def evaluation_sampling(rollouts: SamplingConfig, temperature: float, *, as_rollouts: bool) -> TurnSampling:
    """Return the sampling parameters of an evaluation: the given `temperature` over the whole vocabulary.

    `as_rollouts`, set by `compat.sampled_validation`, samples as in training and ignores `temperature`.
    """
    return training_sampling(rollouts) if as_rollouts else TurnSampling(temperature, stop=tuple(rollouts.stop))


@dataclass(frozen=True, slots=True)
class Generation:
    """Engine output of one turn."""

    token_ids: list[int]
    """Sampled ids, including the stop string's tokens or the end-of-sequence token that ended the turn."""
    logprobs: list[float]
    """[len(token_ids)] natural log-probs under the sampling temperature."""
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int
    """Input tokens found in the prefix cache."""
    versions: list[int]
    """[len(token_ids)] weight version that sampled each token."""


class Generator(Protocol):
    """Engine interface of an episode."""

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """Continue `input_ids`; on cancellation, free the request `rid` and re-raise."""


class Streaming(Protocol):
    """A `Generator` that streams tokens."""

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continue `input_ids` as `Generator.generate` does; call `on_tokens` in the event loop as tokens arrive."""


class SearchTool(Protocol):
    """Search interface of an episode."""

    async def search(self, query: str) -> SearchResult:
        """Return the passages for one query. Failures are returned, not raised."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed turn."""

    text: str
    """Text of the turn up to its cut."""
    action: Action
    content: str
    """The query, the tool's input or the answer, stripped; empty for an invalid turn."""
    tool: str = ""
    """Name of the tool; empty unless `action` is `Action.TOOL`."""


class TurnRules:
    """Parses turns by the Search-R1 protocol and decides if a turn ends its episode. Stateless.

    A turn is cut after its first closing tag of the search or of a tool, else after its first closing answer tag. Its
    action is the first complete search, tool or answer element of the text that remains.

        answer             ends the episode;
        search, tool call  gets an observation;
        anything else      gets the task's invalid message, as does an empty tool input and, by default, query.

    After `max_turns` turns, one last generation follows, in which only an answer counts.

    Invariants: `step` never raises, whatever the text. An episode ends after at most `max_turns + 1` steps.
    """

    def __init__(self, task: TaskConfig, tools: Mapping[str, str] = {}, *, searches: bool = True) -> None:
        """`tools` maps the tag of each tool to its name. Without `searches`, the search tag has no effect."""
        tags = task.tags
        self._acts = {**({tags.search: ""} if searches else {}), **tools}
        """Tag -> name of the tool, empty for the search."""
        self._element = re.compile(rf"<({'|'.join(map(re.escape, (*self._acts, tags.answer)))})>(.*?)</\1>", re.DOTALL)
        self._answer_tag = tags.answer
        self._allow_empty_query = task.allow_empty_query
        self._max_turns = task.max_turns

    def cut(self, text: str) -> str:
        """Return `text` up to and including the tag that ends the turn; all of `text` if no tag ends it."""
        for tags in (self._acts, (self._answer_tag,)):
            cuts = [text.partition(f"</{tag}>")[:2] for tag in tags]
            if ended := [head + closer for head, closer in cuts if closer]:
                return min(ended, key=len)
        return text

    def parse(self, text: str) -> Parsed:
        """Cut a turn and parse its action."""
        kept = self.cut(text)
        element = self._element.search(kept)
        if element is None:
            return Parsed(kept, Action.INVALID, "")
        tag, content = element.group(1), element.group(2).strip()
        if tag == self._answer_tag:
            return Parsed(kept, Action.ANSWER, content)
        tool = self._acts[tag]
        if not content and (tool or not self._allow_empty_query):
            return Parsed(kept, Action.INVALID, "")
        return Parsed(kept, Action.TOOL if tool else Action.SEARCH, content, tool)

    def step(self, turns: int, text: str) -> tuple[Parsed, Finish | None]:
        """Parse the generated `text` of a turn that follows `turns` earlier turns.

        Return the parsed turn, and the finish reason if this turn ends the episode.
        """
        turn = self.parse(text)
        if turn.action is Action.ANSWER:
            return turn, Finish.ANSWER
        return turn, Finish.TURN_LIMIT if turns >= self._max_turns else None


def render_search(contents: Iterable[str], error: str) -> str:
    """Return the passages as `Doc {i}(Title: {first line}) {rest}`, one per line, numbered from 1.

    If `error` is not empty, return an error message instead.
    """
    if error:
        return f"Search failed: {error}"
    parts = (content.partition("\n") for content in contents)
    lines = [f"Doc {number}(Title: {title}) {rest}\n" for number, (title, _, rest) in enumerate(parts, start=1)]
    return "".join(lines) or "No results found."


def render_call(tool: str, text: str, error: str) -> str:
    """Return the result `text` of `tool`, or an error message if `error` is not empty."""
    return f"{tool} failed: {error}" if error else text or "No result."


class Observer:
    """Wraps untrusted text into observations of limited length."""

    def __init__(self, tags: TagsConfig, codec: Codec, tools: Sequence[str] = ()) -> None:
        """`tools` are the tools' tags."""
        self._codec = codec
        self._open = f"\n\n<{tags.information}>"
        self._close = f"</{tags.information}>\n\n"
        names = (tags.search, tags.answer, tags.information, *tools)
        words = "|".join(re.escape(word.strip()) for word in names)
        specials = "".join(f"|{re.escape(text)}" for text in codec.special_texts)
        # Possessive quantifiers: otherwise "<" before n spaces takes n * n steps.
        self._forgery = re.compile(rf"<\s*+/?\s*+(?:{words})\s*+>{specials}", re.IGNORECASE)
        self.wrapper_tokens = len(codec.encode(self._open + self._close))
        """Number of tokens of an empty observation: the smallest possible limit."""

    def observe(self, body: str, max_tokens: int) -> str:
        """Return `body` as an observation that has at most `max_tokens` tokens if tokenised on its own.

        Raises ValueError if `max_tokens` is below `wrapper_tokens`.
        """
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
        """Return the first `chars` characters of `text`. A tag that begins in them but ends later is neutralised."""
        start = text.rfind("<", 0, chars)
        tag = self._forgery.match(text, start) if start >= 0 else None
        if tag is None or tag.end() <= chars:
            return text[:chars]
        return f"{text[:start]}{_broken(tag.group())}"[:chars]

    def _neutralise(self, text: str) -> str:
        """Neutralise tags and special tokens until none is left.

        Angle brackets become parentheses; a special token without angle brackets is split by a space.
        """
        while True:
            broken = self._forgery.sub(lambda match: _broken(match.group()), text)
            if broken == text:
                return text
            text = broken

    def _cut(self, body: str, spans: Sequence[tuple[int, int]], max_tokens: int) -> str:
        """Return an observation with the longest prefix of `body` for which it has at most `max_tokens` tokens.

        `spans` are the character ranges of the tokens of `body`.
        """
        keep = min(max_tokens - self.wrapper_tokens, len(spans))
        while keep > 0:
            # The cut may split a character or change the tokens at the tag, so count the result.
            observation = self._wrap(body[: spans[keep - 1][1]].rstrip())
            if len(self._codec.encode(observation)) <= max_tokens:
                return observation
            keep -= 1
        return self._wrap("")

    def _wrap(self, body: str) -> str:
        return f"{self._open}{body}{self._close}"


def _broken(marker: str) -> str:
    """Neutralise `marker`: `</search>` becomes `(/search)`, `[INST]` becomes `[ INST]`."""
    if marker.startswith("<") and marker.endswith(">"):
        return f"({marker[1:-1]})"
    # Split after the first visible character: otherwise a marker with white space at an end matches again for ever.
    first = len(marker) - len(marker.lstrip()) + 1
    return f"{marker[:first]} {marker[first:]}" if marker[first:].strip() else " "


class EpisodeTools:
    """Engine, search, tools and rules that all episodes of one engine share.

    Raises UserError if `task.max_observation_tokens` cannot hold an empty observation, and for unusable tools.
    """

    def __init__(
        self,
        generator: Generator,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        custom: Sequence[Tool] | None = None,
    ) -> None:
        """If `search` is None, the search tag has no effect. `custom` replaces the tools made from `task.tools`."""
        self.generator = generator
        self.search = search
        self.codec = codec
        self.task = task
        self.custom = {tool.name: tool for tool in (open_tools(task) if custom is None else custom)}
        """Custom tools by name."""
        self.awaited: Counter[str] = Counter()
        """Tool name or `SEARCH` -> number of episodes that wait for it now."""
        tags = {tool.tag: name for name, tool in self.custom.items()}
        self.rules = TurnRules(task, tags, searches=search is not None)
        self.observer = Observer(task.tags, codec, tuple(tags))
        self._stops = tuple(f"</{tag}>" for tag in tags)
        if task.max_observation_tokens < self.observer.wrapper_tokens:
            raise UserError(
                f"task.max_observation_tokens={task.max_observation_tokens} is below the "
                f"{self.observer.wrapper_tokens} tokens of the tags alone: raise it.",
                code="out_of_range",
                key="task.max_observation_tokens",
            )

    def stopping(self, sampling: TurnSampling) -> TurnSampling:
        """Return `sampling` that also stops at the closing tag of every tool."""
        return replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self._stops))))


async def run_episode(
    question: Question, sample: int, tools: EpisodeTools, sampling: TurnSampling, timeout_s: float | None = None
) -> Trajectory:
    """Run one episode to its end, or for `timeout_s` seconds. Raises UserError for a prompt that is too long."""
    episode = Episode(question, sample, tools, sampling)
    finish = await within(episode.run(), timeout_s=timeout_s)
    return episode.trajectory(finish or Finish.ABORTED)


class Episode:
    """State of one running episode."""

    def __init__(
        self,
        question: Question,
        sample: int,
        tools: EpisodeTools,
        sampling: TurnSampling,
        progress: PartialEpisode | None = None,
    ) -> None:
        """`progress` is from the same question, task and tokenizer; the episode resumes after the turns in it."""
        self._question = question
        self._sample = sample
        self._tools = tools
        self._sampling = tools.stopping(sampling)
        self._context = open_context(tools.task.token_mode, tools.codec, tools.codec.prompt(question.prompt))
        self._turns: list[Turn] = []
        self._sampled: list[SampledTurn] = []
        """Engine call of each of `_turns`."""
        self._whole = 0
        """Number of `_turns` that have their observation."""
        length = len(self._context.input_ids())
        if length > tools.task.max_prompt_tokens:
            raise UserError(
                f"Question {question.uid} has {length} tokens, more than task.max_prompt_tokens="
                f"{tools.task.max_prompt_tokens}: raise the limit or drop the question.",
                code="out_of_range",
                key="task.max_prompt_tokens",
            )
        if progress is not None:
            self._resume(progress)

    def progress(self) -> PartialEpisode | None:
        """Return the whole turns so far; None without any."""
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
        """Run turns until the episode ends; return the reason."""
        tools, task = self._tools, self._tools.task
        while True:
            inputs, number = self._context.input_ids(), len(self._turns)
            room = task.max_total_tokens - len(inputs) - int(task.train_eos)  # Keeps room for an appended EOS.
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
        """Return the trajectory so far, ended by `finish`."""
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
        """Restore the turns of `progress`."""
        if (progress.question_uid, progress.sample) != (self._question.uid, self._sample):
            raise ValueError(
                f"Sample {self._sample} of question {self._question.uid} cannot resume from sample "
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
        self._context.add_turn(sampled, turn.text)
        self._turns.append(turn)
        self._sampled.append(sampled)

    async def _respond(self, turn: Parsed, room: int) -> bool:
        """Append the observation of `turn`; return False if even the shortest observation does not fit."""
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

    async def _call(self, turn: Parsed) -> ToolResult:
        """Run the search or tool call of `turn`; return the text of its observation and the error."""
        if turn.tool:
            text, error = await call_tool(self._tools.custom[turn.tool], turn.content)
            return ToolResult(render_call(turn.tool, text, error), error)
        assert self._tools.search is not None, "the rules parse no search where there is none"
        result = await self._tools.search.search(turn.content)
        return ToolResult(render_search([passage.contents for passage in result.passages], result.error), result.error)


def _joined(parts: Iterable[Sequence[float]], dtype: type[Number]) -> NDArray[Number]:
    return np.array(list(chain.from_iterable(parts)), dtype)


class EpisodeGroup:
    """Runs the episodes of one prompt group concurrently. Play it once, on one event loop.

    Every episode yields a trajectory. In `play`, a finished episode stays unchanged, an episode with progress resumes,
    and all others begin. An episode that times out, or is not played to its end, is `Finish.ABORTED` and keeps its
    complete turns.

    The result of `progress` may be passed at any moment to another group of the same question. That group then ends as
    this group would have ended.
    """

    def __init__(
        self,
        question: Question,
        samples: Sequence[int],
        tools: EpisodeTools,
        sampling: TurnSampling,
        progress: Sequence[EpisodeProgress] = (),
    ) -> None:
        """`progress` has episodes of some of the `samples`, in any order.

        Raises UserError for a question that is too long, ValueError for `progress` of another group.
        """
        known = {episode.sample: episode for episode in progress}
        if len(known) < len(progress) or not known.keys() <= set(samples):
            raise ValueError(
                f"Progress of samples {[episode.sample for episode in progress]} does not match the samples {list(samples)} of "
                f"question {question.uid}."
            )
        self._episodes: dict[int, Episode | Trajectory] = {}
        """Sample -> running episode, or trajectory of a finished episode; in order of samples."""
        for sample in samples:
            begun = known.get(sample)
            if not isinstance(begun, Trajectory):
                self._episodes[sample] = Episode(question, sample, tools, sampling, begun)
            elif begun.question_uid == question.uid:
                self._episodes[sample] = begun
            else:
                raise ValueError(f"An episode of question {begun.question_uid} was given for question {question.uid}.")

    async def play(self, slots: asyncio.Semaphore, timeout_s: float) -> None:
        """Run each episode to its end, but at most `timeout_s` seconds from when it gets one of the `slots`."""

        async def play(sample: int, episode: Episode) -> None:
            async with slots:
                finish = await within(asyncio.ensure_future(episode.run()), timeout_s=timeout_s)
            self._episodes[sample] = episode.trajectory(finish or Finish.ABORTED)

        waiting = [(sample, each) for sample, each in self._episodes.items() if isinstance(each, Episode)]
        tasks = [asyncio.create_task(play(sample, episode)) for sample, episode in waiting]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After an error or a cancellation, end the other episodes.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def progress(self) -> tuple[EpisodeProgress, ...]:
        """Return the episodes that have finished or completed a turn, in order of samples."""
        known = (each.progress() if isinstance(each, Episode) else each for each in self._episodes.values())
        return tuple(episode for episode in known if episode is not None)

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of all samples, in order; unfinished episodes count as aborted."""
        every = self._episodes.values()
        return [each.trajectory(Finish.ABORTED) if isinstance(each, Episode) else each for each in every]


class EngineDied(RunError):
    """Raised if an engine is dead, even if the process that drives it lives. The message names the engine."""


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """Activity of one engine and its episodes at one moment."""

    busy: bool
    """True if the engine generates, or holds requests back during a weight switch."""
    awaited: Mapping[str, int]
    """Tool name or `SEARCH` -> number of episodes that wait for it."""


def common_wait(activities: Sequence[EngineActivity]) -> str:
    """Return the names of all tools that episodes wait for; empty if an engine is busy or nothing is awaited."""
    if any(activity.busy for activity in activities):
        return ""
    return " and ".join(sorted({name for each in activities for name, waiting in each.awaited.items() if waiting}))


class ToolResult(NamedTuple):
    """Outcome of a tool call."""

    text: str
    error: str = ""
    """Reason of the failure, on one line; empty on success."""


async def call_tool(tool: Tool, text: str) -> ToolResult:
    """Call `tool` with `text` under its timeout. Failures are returned, not raised."""
    late = ToolResult("", f"no answer within {tool.timeout_s:g} s")
    return await within(_attempt(tool, text), timeout_s=tool.timeout_s) or late


async def _attempt(tool: Tool, text: str) -> ToolResult:
    try:
        answer = await tool.call(text)
    except ToolError as error:
        return ToolResult("", _reason(error) or "it gives no reason")
    except asyncio.CancelledError:  # Raised by the tool itself: on a timeout nobody awaits this task.
        return ToolResult("", "it was cancelled")
    # User code: the policy reads its error, and `exit()` in it must not end the worker.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return ToolResult("", f"{type(error).__name__}: {_reason(error)}".rstrip(": "))
    if not isinstance(answer, str):
        return ToolResult("", f"it returned {type(answer).__name__}, not text")
    return ToolResult(_encodable(answer))


def _reason(error: BaseException) -> str:
    """Return an error's message on one line; empty if it has none."""
    try:
        return " ".join(_encodable(str(error)).split())
    except Exception:  # noqa: BLE001 (__str__ is user code too)
        return ""


def _encodable(text: str) -> str:
    """Return `text` cut to `MAX_CHARS`. Lone surrogates are replaced, because no tokenizer accepts them."""
    return text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")


async def within(call: Coroutine[Any, Any, T] | asyncio.Future[T], *, timeout_s: float | None = None) -> T | None:
    """Return the result of `call`, or None after `timeout_s` seconds.

    A call that has not ended by then is cancelled; if it still runs after `CANCEL_GRACE_S`, it is abandoned.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            # The gather retrieves the task's exception, so that asyncio does not warn about it.
            await asyncio.wait([asyncio.gather(task, return_exceptions=True)], timeout=CANCEL_GRACE_S)
