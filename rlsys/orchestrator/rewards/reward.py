"""Computes the reward of an episode: the weighted sum of the configured terms, per turn and in total.

Example with `reward.terms={exact_match: 1, search_penalty: -0.1}`; three turns, two searches and a correct answer:

    term              turn 0   turn 1   turn 2   parts
    exact_match          0        0        1       1
    search_penalty       1        1        0       2
    turn_rewards      -0.1     -0.1      1.0     reward 0.8

Invariants:
- Every term returns one finite unweighted value per turn, at least one. A value for the whole episode goes to the last
  turn.
- `turn_rewards` add up to `reward`, up to rounding.
- `reward` is computed from the terms' totals, so episodes with equal totals have bitwise equal rewards, whatever their
  turns are. This equality is how groups without spread are recognised.

Terms read the text of the policy (`Turn.text`) separately from that of the environment (`Turn.observation`). An
`<information>` tag that the policy writes is therefore no retrieval (it breaks the structure). An answer tag in the
prompt, in a passage or in the invalid-action message is no answer. Only with `compat.answer_over_prompt` is the answer
extracted as in Search-R1.

A user-defined term is a function `package.module.function` of (question, trajectory). It returns a number for the
episode, or one number per turn. Plain functions run in threads and async functions on a separate event loop, so they
never block the driver. An error, or a call longer than `reward.custom_timeout_s`, raises UserError naming the term. A
function that never returns does not keep the process alive. Formulas and sources are in docs/rewards.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsys.components import OverdueError, one_line
from rlsys.config.custom import REQUIRED, OwnComponent, custom_variant
from rlsys.config.derived import reward_of, source_key, task_of
from rlsys.config.problems import conflict, refused, token_of
from rlsys.config.schema import (
    JUDGE_PLACEHOLDERS,
    CompatConfig,
    CustomReward,
    JudgeConfig,
    RewardConfig,
    TagsConfig,
    TaskConfig,
)
from rlsys.data.answers import contains, exact_match, f1, sub_exact_match
from rlsys.data.question import Question
from rlsys.data.trajectory import ANSWER_TERMS, Action, Group, Sample, Trajectory, Turn
from rlsys.errors import UserError, in_one
from rlsys.observe.spans import Tracer
from rlsys.rollout.tools.interface import tool_tags
from rlsys.search.address import is_url
from rlsys.search.web.loop import LoopThread

if TYPE_CHECKING:
    import httpx

    from rlsys.orchestrator.rewards.judge import Judge

_THINK = "think"
"""Tag of reasoning. It is not in `task.tags`, but it is part of the expected structure."""
JUDGE = "judge"
"""Built-in term that calls a language model; all others are pure."""
ALIASES = {"correct_answer": "exact_match"}
"""Alias of a term -> its name."""
PENALTIES = frozenset({"search_penalty", "invalid_format", "invalid_turns", "overlong"})
"""Terms that measure unwanted behaviour and need a negative weight."""
_MAX_THREADS = 8
"""Maximum number of user-defined plain functions running at a time, also in large steps: each one that computes takes
Python's global lock from the driver's event loop."""
_QUOTED_CHARS = 100


@dataclass(frozen=True, slots=True)
class Scored:
    reward: float
    turn_rewards: tuple[float, ...]
    """[turns], at least one: part of the reward earned on each turn."""
    parts: Mapping[str, float]
    """Term -> its unweighted total over the episode."""


@dataclass(frozen=True, slots=True)
class ParsedEpisode:
    """Episode with the facts that terms need."""

    question: Question
    trajectory: Trajectory
    answer: str | None
    well_formed: bool
    """True for think -> (search or tool call -> information -> think)* -> answer, with only white space between."""
    found_in: int | None
    """First turn whose search returned an accepted answer; None if there is none."""
    answer_tags: int
    """Number of answers that the policy wrote (`count_answer_tags`)."""

    @property
    def slots(self) -> int:
        """Number of per-turn rewards: one per turn, but 1 for an episode without turns."""
        return max(1, len(self.trajectory.turns))

    def at_end(self, value: float) -> list[float]:
        """Return `value` on the last turn and 0 elsewhere: [slots]."""
        return [0.0] * (self.slots - 1) + [value]

    def each_turn(self, value_of: Callable[[Turn], bool]) -> list[float]:
        """Return 1 for each turn for which `value_of` is true, and 0 elsewhere: [slots]."""
        return [float(value_of(turn)) for turn in self.trajectory.turns] or [0.0]


PureTerm = Callable[[ParsedEpisode], Sequence[float]]


class EpisodeParser:
    """Extracts answer and structure from episodes. Stateless; `read` accepts any text."""

    def __init__(self, tags: TagsConfig, compat: CompatConfig, tools: Mapping[str, str]) -> None:
        """`tools` maps the task's tool names to their tags."""
        self._tags = tags
        self._tools = tools
        self._over_prompt = compat.answer_over_prompt
        words = (_THINK, tags.search, tags.information, tags.answer, *tools.values())
        self._tag = re.compile(f"(</?(?:{'|'.join(map(re.escape, words))})>)")
        answer = re.escape(tags.answer)
        self._answer = re.compile(f"<{answer}>(.*?)</{answer}>", re.DOTALL)

    def read(self, question: Question, trajectory: Trajectory) -> ParsedEpisode:
        """Return the facts of `trajectory` that terms need."""
        turns = trajectory.turns
        found = (number for number, turn in enumerate(turns) if self._retrieved(turn, question.answers))
        return ParsedEpisode(
            question,
            trajectory,
            answer=self._last_match(question, trajectory) if self._over_prompt else trajectory.answer,
            well_formed=bool(turns)
            and all(bool(act := self._carried_out(turn)) and self._thinks_and(act, turn.text) for turn in turns[:-1])
            and self._thinks_and(self._tags.answer, turns[-1].text),
            found_in=next(found, None),
            answer_tags=count_answer_tags(turns, self._tags.answer),
        )

    def _last_match(self, question: Question, trajectory: Trajectory) -> str | None:
        """Return the answer as Search-R1 extracts it: the last match in prompt and response.

        A single match counts as the example in the prompt and gives None.
        """
        found = self._answer.findall(question.prompt + trajectory.response)
        return str(found[-1]).strip() if len(found) > 1 else None

    def _carried_out(self, turn: Turn) -> str:
        """Return the tag of the search or tool call that the environment answered in `turn`; empty without one."""
        if turn.action is Action.TOOL and turn.observation:
            return self._tools[turn.tool]
        return self._tags.search if _searched(turn) else ""

    def _thinks_and(self, act: str, text: str) -> bool:
        """Return True if `text` is one think element and one `act` element, with no other tag or text."""
        pieces = self._tag.split(text)
        tags, outside = pieces[1::2], pieces[::4]
        return tags == [f"<{_THINK}>", f"</{_THINK}>", f"<{act}>", f"</{act}>"] and not "".join(outside).strip()

    def _retrieved(self, turn: Turn, answers: Sequence[str]) -> bool:
        """Return True if a search returned an accepted answer. The enclosing tags do not count as text."""
        if not _searched(turn) or turn.tool_error:
            return False
        opening, closing = f"<{self._tags.information}>", f"</{self._tags.information}>"
        return contains(turn.observation.strip().removeprefix(opening).removesuffix(closing), answers)


def count_answer_tags(turns: Sequence[Turn], tag: str) -> int:
    """Return the number of opening or of closing tags in the policy's own text, whichever number is larger."""
    return max(sum(turn.text.count(mark) for turn in turns) for mark in (f"<{tag}>", f"</{tag}>"))


def pure_terms(config: RewardConfig, task: TaskConfig) -> Mapping[str, PureTerm]:
    """Return name -> built-in term, without the judge."""
    return {
        "exact_match": _of_answer(exact_match),
        "correct_answer": _of_answer(exact_match),
        "sub_em": _of_answer(sub_exact_match),
        "f1": _of_answer(f1),
        "format": lambda episode: episode.at_end(_format_score(episode, config)),
        "retrieval": lambda episode: [float(slot == episode.found_in) for slot in range(episode.slots)],
        "search_penalty": lambda episode: episode.each_turn(_searched),
        "invalid_format": lambda episode: episode.at_end(float(not episode.well_formed)),
        "invalid_turns": lambda episode: episode.each_turn(lambda turn: turn.action is Action.INVALID),
        "overlong": lambda episode: episode.at_end(_overlong(episode, config, task)),
    }


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """Return the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13) with the opposite sign: from 0 to 1."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _of_answer(measure: Callable[[str, Sequence[str]], float]) -> PureTerm:
    """Return a term that compares the answer with the accepted ones; 0 without an answer."""

    def term(episode: ParsedEpisode) -> list[float]:
        answer = episode.answer
        return episode.at_end(0.0 if answer is None else float(measure(answer, episode.question.answers)))

    return term


def _judge(config: JudgeConfig, transport: httpx.AsyncBaseTransport | None) -> Judge:
    from rlsys.orchestrator.rewards.judge import Judge  # imports HTTP clients, which config checks do not need

    return Judge(config, transport)


def _judged_by(judge: Judge) -> Callable[[ParsedEpisode], Awaitable[Sequence[float]]]:
    """Return the term that calls `judge`."""

    async def term(episode: ParsedEpisode) -> list[float]:
        return episode.at_end(await judge.grade(episode.question, episode.answer))

    return term


def _format_score(episode: ParsedEpisode, config: RewardConfig) -> float:
    """Return Search-R1's score qa_em_format, with the scores for structure, final answer and retrieval of `config`."""
    if episode.answer is not None and exact_match(episode.answer, episode.question.answers):
        return 1.0 if episode.well_formed else 1.0 - config.structure_score
    if episode.well_formed:
        return config.structure_score + config.retrieval_score * (episode.found_in is not None)
    return config.final_score if episode.answer is not None else 0.0


def _overlong(episode: ParsedEpisode, config: RewardConfig, task: TaskConfig) -> float:
    prompt, limit = episode.trajectory.prompt_length, config.overlong_limit
    limit = task.max_total_tokens - prompt if limit is None else limit
    return overlong_penalty(len(episode.trajectory.tokens) - prompt, limit, config.overlong_buffer)


def _searched(turn: Turn) -> bool:
    """Return True if the turn executed a search; `Trajectory.searches` counts the same turns."""
    return turn.action is Action.SEARCH and bool(turn.observation)


class _SourceRewards:
    """Parser and terms for the questions of one source."""

    def __init__(
        self,
        config: RewardConfig,
        task: TaskConfig,
        compat: CompatConfig,
        judge: Judge | None,
        calls: TimedCalls | None,
    ) -> None:
        self.parser = EpisodeParser(task.tags, compat, tool_tags(task.tools))
        self.weights = weights_of(config)
        known: dict[str, Callable[[ParsedEpisode], Sequence[float] | Awaitable[Sequence[float]]]] = {
            **pure_terms(config, task),
            **({JUDGE: _judged_by(judge)} if judge else {}),
            **({name: CustomTerm(name, config, calls) for name in self.weights if "." in name} if calls else {}),
        }
        self.terms = {name: known[name] for name in self.weights}


class Rewards:
    """Rewards episodes on one event loop, each by the terms of its source; call `close` at the end.

    `transport` replaces the judge's network in tests. Raises UserError with one line per config problem, and
    with the code and key of the first problem.
    """

    def __init__(
        self,
        config: RewardConfig,
        task: TaskConfig,
        compat: CompatConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        problems = [*check_terms(config, task), *check_source_terms(config, task)]
        if problems:
            raise in_one(problems)
        self._config = config
        self.finished = 0
        """Terms of episodes that have been computed so far."""
        by_source = {"": config} | {name: reward_of(config, source) for name, source in task.sources.items()}
        used = {name for each in by_source.values() for name in weights_of(each)}
        self._judge = _judge(config.judge, transport) if JUDGE in used else None
        self._calls = TimedCalls(config.custom_timeout_s) if any("." in name for name in used) else None
        self._by_source = {
            name: _SourceRewards(each, task_of(task, name), compat, self._judge, self._calls)
            for name, each in by_source.items()
        }

    async def score(self, question: Question, trajectory: Trajectory) -> Scored:
        """Return the reward of one episode of `question`; a reward that its agent has returned replaces the terms.

        Raises RunError if the judge does not respond, and UserError if a user-defined term fails.
        """
        of_source = self._by_source[question.source]
        episode = of_source.parser.read(question, trajectory)
        if (given := trajectory.agent_reward) is not None:
            return Scored(given, tuple(episode.at_end(given)), {"agent": given})
        values = {}
        for name, term in of_source.terms.items():
            found = term(episode)
            values[name] = self._bounded(name, episode, await found if isinstance(found, Awaitable) else found)
            self.finished += 1
        parts = {name: math.fsum(of_turns) for name, of_turns in values.items()}
        return Scored(
            reward=math.fsum(of_source.weights[name] * part for name, part in parts.items()),
            turn_rewards=tuple(
                math.fsum(of_source.weights[name] * of_turns[slot] for name, of_turns in values.items())
                for slot in range(episode.slots)
            ),
            parts=parts,
        )

    def metrics(self) -> dict[str, float]:
        """Return `Judge.metrics` since the last call; empty without a judge."""
        return self._judge.metrics() if self._judge else {}

    async def close(self) -> None:
        """Close connections and files, without waiting for user-defined functions that still run."""
        if self._calls:
            self._calls.close()
        if self._judge:
            await self._judge.close()

    def _bounded(self, name: str, episode: ParsedEpisode, values: Sequence[float]) -> Sequence[float]:
        """Return `values`, capped at `many_answers_score` for an answer term of an episode with too many answers."""
        most = self._config.max_answer_tags
        if most is None or name not in ANSWER_TERMS or episode.answer_tags <= most:
            return values
        return [*values[:-1], min(values[-1], self._config.many_answers_score)]


class TimedCalls:
    """Calls user-defined functions from one event loop, each with time-out `timeout_s`. Call `close` at the end."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_MAX_THREADS)
        self._loop = LoopThread("reward-loop")

    async def result_of(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `function` or raise its exception.

        Raises OverdueError on a time-out. The time-out starts when a thread is free.
        """
        plain = not inspect.iscoroutinefunction(function)
        async with self._slots if plain else contextlib.nullcontext():
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    result = function(*arguments) if not plain else await in_daemon_thread(function, *arguments)
                    return await self._loop.result_of(_wait(result)) if inspect.isawaitable(result) else result
            except TimeoutError:
                if limit.expired():
                    raise OverdueError from None
                raise

    def close(self) -> None:
        """Stop the event loop without waiting for running functions."""
        self._loop.abandon()


class CustomTerm:
    """User-defined term `name`."""

    def __init__(self, name: str, config: RewardConfig, calls: TimedCalls) -> None:
        self._own = load_term(name, config)
        self._calls = calls

    async def __call__(self, episode: ParsedEpisode) -> Sequence[float]:
        """Return the function's values [slots].

        Raises UserError if the function fails, times out, or returns neither a finite number nor one per turn.
        """
        where = f"for sample {episode.trajectory.sample} of {episode.question.uid}"
        try:
            result = await self._calls.result_of(self._own.call, episode.question, episode.trajectory)
        except OverdueError:
            late = f"had not returned after reward.custom_timeout_s={self._calls.timeout_s:g} s"
            raise self._own.error(f"{late} {where}", "correct it, or raise that limit") from None
        except Exception as error:
            raise self._own.error(f"failed {where} ({one_line(error)})") from error
        try:
            values = np.asarray(result, dtype=np.float64)
        except (ArithmeticError, RuntimeError, TypeError, ValueError):  # Too large, or a tensor with a gradient.
            values = np.full(1, np.nan)
        wanted, turns = "", len(episode.trajectory.turns)
        if isinstance(result, str | bytes) or values.ndim > 1 or not np.isfinite(values).all():
            wanted = "return a finite number, or one per turn"
        elif values.ndim == 1 and len(values) not in (turns, episode.slots):
            wanted = f"return one number, or one for each of the {turns} turns"
        if wanted:
            raise self._own.error(f"returned {repr(result)[:_QUOTED_CHARS]} {where}", wanted)
        return episode.at_end(float(values)) if values.ndim == 0 else values.tolist() or [0.0]


async def _wait(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # It would end the event loop, and then the driver.
        raise RuntimeError(one_line(error)) from error


async def in_daemon_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a daemon thread, which cannot keep the process alive; return its result or raise its error."""
    outcome: Future[tuple[Any, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()  # Else a cancelled caller cancels `outcome`, and set_result raises.

    def work() -> None:
        try:
            outcome.set_result((function(*arguments), None))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (raised in the caller)
            outcome.set_result((None, error))

    threading.Thread(target=work, name="reward", daemon=True).start()
    result, error = await asyncio.wrap_future(outcome)
    if error is not None:  # A coroutine cannot raise StopIteration, and SystemExit would end the driver.
        ends = isinstance(error, StopIteration | SystemExit)
        raise RuntimeError(one_line(error)) if ends else error
    return result


def weights_of(config: RewardConfig) -> Mapping[str, float]:
    """Return term -> non-zero weight; exact match with weight 1 if the config names no term."""
    if not config.terms:
        return {"exact_match": 1.0}
    weights = {name: term.weight if isinstance(term, CustomReward) else term for name, term in config.terms.items()}
    return {name: weight for name, weight in weights.items() if weight != 0}


def check_weights(config: RewardConfig, task: TaskConfig) -> Iterator[UserError]:
    """Yield one UserError for each set of terms without any weight, from which nothing is learned without a teacher."""
    own = {name: source for name, source in task.sources.items() if source.reward is not None}
    given = {"reward.terms": config} | {source_key(name, "reward"): reward_of(config, own[name]) for name in own}
    for at, one in given.items():
        if not weights_of(one):
            sentence = (
                f"{at} gives every term the weight 0, so nothing can be learned: give one term another weight, or a teacher "
                "(algorithm=opd)."
            )
            yield UserError(sentence, code="empty", key=at)


def check_source_terms(config: RewardConfig, task: TaskConfig) -> Iterator[UserError]:
    """Yield one UserError per problem of the terms that sources have instead of those of `config`."""
    for name, source in task.sources.items():
        if source.reward is not None:
            yield from check_terms(reward_of(config, source), task_of(task, name), source_key(name, "reward"))
        elif source.max_total_tokens is not None and "overlong" in weights_of(config):
            yield from _overlong_problems(config, task_of(task, name))


def check_terms(config: RewardConfig, task: TaskConfig, at: str = "reward.terms") -> Iterator[UserError]:
    """Yield one UserError per problem of `config`, whose terms are the value of the key `at`."""
    weights = weights_of(config)
    for name, weight in weights.items():
        key = f"{at}.{name}"
        if not math.isfinite(weight):
            yield UserError(f"{key}={weight} must be finite.", code="out_of_range", key=key)
        elif name in PENALTIES and weight > 0:
            sentence = f"{key}={weight:g} rewards what the term penalises: give it a weight below 0."
            yield UserError(sentence, code="out_of_range", key=key)
    for alias, name in ALIASES.items():
        if alias in weights and name in weights:
            sentence = f"{at}.{alias} and {at}.{name} are the same term: remove one of them."
            yield UserError(sentence, code="conflict", key=f"{at}.{alias}")
    known = (*pure_terms(config, task), JUDGE)
    for name in weights:
        if "." in name:
            yield from refused(partial(load_term, name, config))
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}, and package.module.function."
            )
            yield UserError(f"{at}.{name} is not a term: {hint}", code="unknown", key=f"{at}.{name}")
    if JUDGE in weights:
        yield from _judge_problems(config.judge)
    if "overlong" in weights:
        yield from _overlong_problems(config, task)


def load_term(name: str, config: RewardConfig) -> OwnComponent:
    """Import the user-defined function `name` and return it with its parameters bound.

    Raises UserError if it is missing, does not take two arguments, or lacks a parameter.
    """
    given = config.terms[name]
    term = given if isinstance(given, CustomReward) else custom_variant(CustomReward, name)(name)
    if missing := [one.name for one in fields(term) if getattr(term, one.name) == REQUIRED]:
        key = f"reward.terms.{name}"
        sentence = (
            f"{key} needs a value for {missing[0]}: write {{weight: {weights_of(config)[name]:g}, {missing[0]}: ...}}."
        )
        raise UserError(sentence, code="missing", key=key)
    return OwnComponent(term)


def _judge_problems(judge: JudgeConfig) -> Iterator[UserError]:
    if judge.url is None or not is_url(judge.url):
        yield UserError(
            f"reward.judge.url={'null' if judge.url is None else judge.url} is not an address, which the term judge "
            "needs: write it like http://127.0.0.1:9000/v1.",
            code="missing" if judge.url is None else "malformed",
            key="reward.judge.url",
        )
    if not judge.model.strip():
        sentence = "reward.judge.model is empty: give the model's name at the endpoint."
        yield UserError(sentence, code="missing", key="reward.judge.model")
    yield from refused(partial(token_of, "reward.judge.token_env", judge.token_env))
    missing = [placeholder for placeholder in JUDGE_PLACEHOLDERS if placeholder not in judge.prompt]
    if missing:
        sentence = f"reward.judge.prompt lacks {', '.join(missing)}: add every missing placeholder."
        yield UserError(sentence, code="missing", key="reward.judge.prompt")
    if judge.cache_path is not None:
        file = Path(judge.cache_path)
        if file.is_dir() or not file.parent.is_dir():
            sentence = f"reward.judge.cache_path={file} cannot be a file: give one in a folder that exists."
            yield UserError(sentence, code="not_found", key="reward.judge.cache_path")


def _overlong_problems(config: RewardConfig, task: TaskConfig) -> Iterator[UserError]:
    given = config.overlong_limit
    limit = task.max_total_tokens - task.max_prompt_tokens if given is None else given
    if config.overlong_buffer > limit:
        meant = "task.max_total_tokens less task.max_prompt_tokens" if given is None else "reward.overlong_limit"
        yield conflict(
            f"reward.overlong_buffer={config.overlong_buffer} is larger than {meant}, which is {limit}, so even an "
            f"empty response would be too long: lower it to at most {limit}."
        )


async def reward_group(
    question: Question,
    trajectories: Sequence[Trajectory],
    score: Callable[[Question, Trajectory], Coroutine[Any, Any, Scored]],
    tracer: Tracer,
) -> Group:
    """Reward all episodes of `question` concurrently. The first error, or a cancellation, cancels the others."""
    with tracer.span("reward.score", question=question.uid):
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(score(question, trajectory)) for trajectory in trajectories]
    samples = []
    for trajectory, task in zip(trajectories, asked, strict=True):
        scored, advantages = task.result(), np.zeros(len(trajectory.tokens), dtype=np.float32)
        samples.append(Sample(trajectory, scored.reward, scored.turn_rewards, scored.parts, advantages))
    return Group(question, tuple(samples))
