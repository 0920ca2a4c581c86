"""Runs episodes: an agent plays each, a recorder keeps its tokens, and its tools are closed however it ends.

Engine, search and tools are protocols; this module imports no implementation. An episode that times out returns its
turns so far as `Finish.ABORTED`, and its running generation is cancelled. The `Generator` must then free the request;
the episode returns even if the generator does not.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from rlsys.components import one_line
from rlsys.config.custom import OwnComponent
from rlsys.config.derived import task_of
from rlsys.config.schema import (
    CustomAgent,
    GatewayAgent,
    ReActAgent,
    SearchR1Agent,
    SourceConfig,
    TaskConfig,
    TokenMode,
)
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError, UserError
from rlsys.rollout.agent.chat_recorder import ChatRecorder
from rlsys.rollout.agent.gateway import Gateway, gateway_of
from rlsys.rollout.agent.react import ChatFormat, react
from rlsys.rollout.agent.recorder import EpisodeOver, Generator, Recorder, TurnSampling
from rlsys.rollout.agent.search_r1 import information_observer, search_r1
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress, PartialEpisode, begun_episode
from rlsys.rollout.tools.calls import SearchTool, Toolbox, within
from rlsys.rollout.tools.interface import EpisodeFacts, OpenTool, Shared, Tool, abandon, has_state, open_tools
from rlsys.search.web.loop import LoopThread

_log = logging.getLogger(__name__)


class EpisodeRunner(Protocol):
    """An agent: plays an episode by its protocol. `task.agent` chooses one; keyword-only parameters are its settings.

    It alternates `recorder.generate`, `tools.call` and `recorder.observe` until the policy has answered or a limit is
    reached, and returns the reason. It may be cancelled at any `await`. Only the recorder makes the trajectory.
    """

    async def __call__(self, question: Question, tools: Toolbox, recorder: Recorder) -> Finish:
        """Play one episode to its end."""


def agent_of(task: TaskConfig) -> EpisodeRunner | Gateway:
    """Return the agent of a task with its settings bound. Raises UserError if it cannot play the task."""
    agent = task.agent
    if isinstance(agent, GatewayAgent):
        return gateway_of(task, agent)
    if isinstance(agent, CustomAgent):
        own = OwnComponent(agent)
        if not inspect.iscoroutinefunction(agent.component):
            raise own.error("is no async function", "define it with `async def`")
        return cast("EpisodeRunner", own)
    if isinstance(agent, SearchR1Agent):
        return partial(search_r1, invalid_message=agent.invalid_message, allow_empty_query=agent.allow_empty_query)
    if task.token_mode is not TokenMode.append:
        raise UserError(
            f"task.agent.kind=react contradicts task.token_mode={task.token_mode}: text has lost the special tokens of the "
            "chat template; use task.token_mode=append.",
            code="conflict",
            key="task.agent.kind",
        )
    return partial(react, system=agent.system)


class EpisodeTools:
    """Engine, search, tools and agent that all episodes of one engine share; `of` has those of a question's source.

    Raises UserError for an agent that cannot play the task, and for unusable tools.
    """

    def __init__(
        self,
        generator: Generator,
        search: SearchTool | None,
        codec: Codec,
        task: TaskConfig,
        custom: Sequence[Tool] | None = None,
    ) -> None:
        """If `search` is None, the policy cannot search. `custom` replaces the tools made from `task.tools`."""
        self.generator = generator
        self.search = search
        self.codec = codec
        self.task = task
        self.agent = agent_of(task)
        self.awaited: Counter[str] = Counter()
        """Tool name or `SEARCH` -> number of episodes that wait for it now."""
        self.custom: dict[str, Tool] = {}
        """Custom tools by name."""
        self.threads: dict[str, LoopThread | None] = {}
        """Tool name -> thread that runs the tool's code; None for the event loop of the episodes."""
        self.begun_anew = 0
        """Total of episodes that had begun elsewhere, could not be resumed, and began anew here."""
        self._warned = False
        self._of_source: dict[str, EpisodeTools] = {}
        try:
            self._open([OpenTool(tool, LoopThread(tool.name)) for tool in custom] if custom is not None else None)
            self._require_format()
            for name, source in task.sources.items():
                self._open_source(name, source)
        except BaseException:
            self.close()
            raise

    @property
    def resumes(self) -> bool:
        """True if an interrupted episode can go on elsewhere. An agent or tool with a state of its own begins anew."""
        has_own = isinstance(self.task.agent, CustomAgent | GatewayAgent)
        return not has_own and not any(map(has_state, self.custom.values()))

    def of(self, question: Question) -> EpisodeTools:
        """Return the tools of the episodes of a question: those of its source, if it has one."""
        return self._of_source.get(question.source, self)

    def _open_source(self, name: str, source: SourceConfig) -> None:
        """Add the tools of a source. Engine, agent and, unless the source has its own, tools are those of the task."""
        self._of_source[name] = own = copy(self)
        own.task, own._of_source = task_of(self.task, name), {}
        own.search = None if source.search is False else self.search
        if source.tools is not None:
            own.custom, own.threads = {}, {}
            own._open(None)
        own._require_format()

    def _open(self, given: Sequence[OpenTool] | None) -> None:
        """Take the tools `given`, or open those of the task."""
        room = self._observation_tokens()
        shared = Shared(self.search, lambda text: self.codec.encode_spans(text).spans, room)
        for each in open_tools(self.task, shared) if given is None else given:
            self.custom[each.tool.name], self.threads[each.tool.name] = each

    def _require_format(self) -> None:
        """Raise UserError if the model's chat template cannot present the tools."""
        if isinstance(self.task.agent, ReActAgent):
            ChatFormat(self.codec, self.custom, searches=self.search is not None)

    def _observation_tokens(self) -> int:
        """Return the tokens of an observation without its tags. Raises UserError if the tags alone are too long."""
        task, agent = self.task, self.task.agent
        shortest = 0
        if isinstance(agent, SearchR1Agent):
            shortest = information_observer(task.tags, self.codec).wrapper_tokens
        elif isinstance(agent, ReActAgent):
            shortest = ChatFormat(self.codec, {}, searches=self.search is not None).tokens(1)
        if task.max_observation_tokens < shortest:
            raise UserError(
                f"task.max_observation_tokens={task.max_observation_tokens} is below the {shortest} tokens of the tags "
                "alone: raise it.",
                code="out_of_range",
                key="task.max_observation_tokens",
            )
        return task.max_observation_tokens - shortest

    def metrics(self) -> dict[str, float]:
        """Return totals since the start: episodes begun anew; of the gateway, agents that failed and requests without an
        answer."""
        counts = self.agent.counts if isinstance(self.agent, Gateway) else {}
        resumes = all(tools.resumes for tools in (self, *self._of_source.values()))
        begun_anew = {} if resumes else {"episodes_begun_anew": self.begun_anew}
        return {**begun_anew, **{f"gateway_{name}": count for name, count in counts.items()}}

    def warn_of_beginning_anew(self) -> None:
        """Log once that running episodes cannot be resumed."""
        if not self._warned:
            self._warned = True
            sentence = "task.agent.kind=%s: its running episodes cannot be kept, so a resumed run begins them anew"
            _log.warning(sentence, self.task.agent.kind)

    def close(self) -> None:
        """Stop the gateway and the threads of the tools without waiting for code that still runs; idempotent.

        The server of a tool is ended, which takes seconds if it does not end by itself.
        """
        if isinstance(self.agent, Gateway):
            self.agent.close()
        threads = [*self.threads.values()]
        for tools in self._of_source.values():
            threads += tools.threads.values()
        self.threads, self._of_source = {}, {}
        abandon(threads)


async def run_episode(
    question: Question, sample: int, tools: EpisodeTools, sampling: TurnSampling, timeout_s: float | None = None
) -> Trajectory:
    """Run one episode to its end, or for `timeout_s` seconds. Raises UserError for a prompt that is too long."""
    episode = Episode(question, sample, tools, sampling)
    finish = await episode.run(timeout_s)
    return episode.trajectory(finish or Finish.ABORTED)


class Episode:
    def __init__(
        self,
        question: Question,
        sample: int,
        tools: EpisodeTools,
        sampling: TurnSampling,
        progress: PartialEpisode | None = None,
    ) -> None:
        """`progress` is from the same question, task and tokenizer; the episode resumes after the turns in it."""
        everywhere, tools = tools, tools.of(question)
        if progress is not None and not tools.resumes:
            everywhere.begun_anew += 1
            progress = None
        self._question, self._sample, self._tools = question, sample, tools
        facts = EpisodeFacts(question, sample)
        self._box = Toolbox(tools.custom, tools.threads, tools.search, facts, tools.awaited)
        given = question, sample, tools.generator, tools.codec, tools.task, sampling
        plays_chats = isinstance(tools.agent, Gateway)
        self.recorder = ChatRecorder(*given) if plays_chats else Recorder(*given, progress)

    def progress(self) -> PartialEpisode | None:
        """Return the whole turns so far, none if the episode cannot be resumed; None if it has not begun."""
        if self._tools.resumes and isinstance(self.recorder, Recorder):
            return self.recorder.progress()
        if not self.recorder.generations:
            return None
        self._tools.warn_of_beginning_anew()
        return begun_episode(self._question.uid, self._sample)

    def trajectory(self, finish: Finish) -> Trajectory:
        """Return the trajectory so far, ended by `finish`."""
        return self.recorder.trajectory(finish)

    async def run(self, timeout_s: float | None = None) -> Finish | None:
        """Run turns until the episode ends, and close its tools; return the reason, None after `timeout_s` seconds.

        Raises SearchFailed if a search has raised it.
        """
        finish = None
        try:
            finish = await within(asyncio.ensure_future(self._play()), timeout_s=timeout_s)
        except Exception:
            if self._box.failed_search is None:
                raise
        finally:
            await self._box.close()
        if self._box.failed_search is not None:
            raise self._box.failed_search
        return finish

    async def _play(self) -> Finish:
        agent: Any = self._tools.agent
        try:
            finish: Finish = await agent(self._question, self._box, self.recorder)
        except EpisodeOver as over:
            return over.finish
        except (UserError, RunError):
            raise
        except (Exception, SystemExit) as error:  # SystemExit would end the event loop.
            if not isinstance(agent, OwnComponent):
                raise
            raise agent.error(f"failed ({one_line(error)})") from error
        if isinstance(agent, OwnComponent) and not isinstance(finish, Finish):
            raise agent.error(f"returned {finish!r:.80}", "return a rlsys.data.trajectory.Finish")
        return finish


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

        Raises ValueError for `progress` of another group.
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
        """Run each episode to its end, but at most `timeout_s` seconds from when it gets one of the `slots`.

        Raises UserError for a question that is too long and for a faulty agent.
        """

        async def play(sample: int, episode: Episode) -> None:
            async with slots:
                finish = await episode.run(timeout_s)
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
    progress: float | None = None
    """Number that has changed if the engine's processes have done anything; None if the engine cannot tell."""


def common_wait(activities: Sequence[EngineActivity]) -> str:
    """Return the names of all tools that episodes wait for; empty if an engine is busy or nothing is awaited."""
    if any(activity.busy for activity in activities):
        return ""
    return " and ".join(sorted({name for each in activities for name, waiting in each.awaited.items() if waiting}))
