"""Records an episode: token in, token out. The recorder knows no protocol.

It calls the engine for each turn, and keeps token ids, log-probs, weight versions, loss mask and timings; `tokens`
explains the record. An agent (`episode.EpisodeRunner`) only says what a turn did and what the policy reads next.

Invariants:
- A trajectory never has more than `max_total_tokens` tokens.
- An episode can be interrupted at any time and resumed elsewhere from its last whole turn: see `PartialEpisode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from time import perf_counter, time_ns
from typing import Literal, NamedTuple, Protocol

import numpy as np

from rlsys.config.schema import SamplingConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Routes, Trajectory, Turn
from rlsys.errors import UserError
from rlsys.rollout.agent.tokens import (
    Codec,
    Context,
    PartialEpisode,
    SampledTurn,
    joined,
    known_routes,
    open_context,
)
from rlsys.rollout.tools.calls import ToolResult

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
    routes_from: int | None = None
    """First token of the input whose experts shall be returned, set by the episode for every turn; None for none."""


def training_sampling(rollouts: SamplingConfig) -> TurnSampling:
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
    routes: Routes | None = None
    """Routes of the tokens from `TurnSampling.routes_from` on, input included, without the last sampled one, which the
    model has not read. None if they were not asked for, or the engine was aborted."""


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


class EpisodeOver(BaseException):
    """Ends an episode at a limit, or because the engine aborted it. Like a cancellation, it is no error to be handled."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.value)
        self.finish = finish


@dataclass(frozen=True, slots=True)
class Parsed:
    text: str
    """Text of the turn up to its cut."""
    action: Action
    content: str
    """The query, the tool's input or the answer, stripped; empty for an invalid turn."""
    tool: str = ""
    """Name of the tool; empty unless `action` is `Action.TOOL`."""


Parse = Callable[[str, Generation], Parsed]
"""Text of a generation without special tokens, and the generation -> what the turn did."""


class FurtherCall(NamedTuple):
    """A call after the first one in the same generation. It is recorded as a turn without tokens of its own."""

    call: Parsed
    observation: str
    result: ToolResult


_NO_CALL = ToolResult("")


class Recorder:
    """Records the turns of one episode."""

    def __init__(
        self,
        question: Question,
        sample: int,
        generator: Generator,
        codec: Codec,
        task: TaskConfig,
        sampling: TurnSampling,
        progress: PartialEpisode | None = None,
    ) -> None:
        """`progress` is from the same question, task, agent and tokenizer; the episode resumes after the turns in it."""
        self.codec = codec
        self.task = task
        self.room = 0
        """Number of tokens that the episode has left for an observation."""
        self.cut_off = False
        """True if the last generation ended at its token limit."""
        self.turns: list[Turn] = []
        """The turns so far. Of a resumed episode, these are the turns before its interruption."""
        self._question, self._sample = question, sample
        self._generator, self._sampling = generator, sampling
        self._context: Context | None = None
        self._sampled: list[SampledTurn] = []
        """Engine call of each of `turns`."""
        self._whole = 0
        """Number of `turns` that have their observation."""
        self._progress = progress
        if progress is None:
            return
        if (progress.question_uid, progress.sample) != (question.uid, sample):
            raise ValueError(
                f"Sample {sample} of question {question.uid} cannot resume from sample "
                f"{progress.sample} of question {progress.question_uid}."
            )
        self.turns += progress.turns
        self._whole = len(progress.turns)

    def begin(self, prompt: str) -> None:
        """Begin the context with `prompt`, chat template included. Without this call, it begins with the question's prompt.

        Raises UserError for a prompt that is too long.
        """
        if self._context is not None:
            raise ValueError("the context has begun")
        self._context = open_context(self.task.token_mode, self.codec, prompt)
        length = len(self._context.input_ids())
        if length > self.task.max_prompt_tokens:
            raise UserError(
                f"Question {self._question.uid} has {length} tokens, more than task.max_prompt_tokens="
                f"{self.task.max_prompt_tokens}: raise the limit or drop the question.",
                code="out_of_range",
                key="task.max_prompt_tokens",
            )
        if self._progress is not None:
            self._restore(self._context, self._progress)

    @property
    def generations(self) -> int:
        """Number of generations so far; fewer than turns if a generation made several calls."""
        return sum(not _is_further(turn) for turn in self.turns)

    @property
    def ended_by(self) -> str:
        """Text of the special token that ended the last generation; empty if it ended otherwise."""
        ids = self._sampled[-1].output_ids if self._sampled else ()
        return self.codec.special_text(ids[-1]) if ids else ""

    async def generate(self, parse: Parse, stop: Sequence[str] = ()) -> Turn:
        """Generate and record a turn, which also ends at each text of `stop`.

        Raises EpisodeOver at the token limit and if the engine aborts.
        """
        context, number = self._begun(), self.generations
        inputs = context.input_ids()
        # Keeps room for an appended EOS.
        self.room = self.task.max_total_tokens - len(inputs) - int(self.task.train_eos)
        if self.room <= 0:
            raise EpisodeOver(Finish.TOKEN_LIMIT)
        budget = min(self.task.max_turn_tokens, self.room)
        stops = tuple(dict.fromkeys((*self._sampling.stop, *stop)))
        sampling = replace(self._sampling, stop=stops, max_new_tokens=budget)
        if sampling.routes_from is not None:
            sampling = replace(sampling, routes_from=known_routes(self._sampled, inputs))
        began_ns, started = time_ns(), perf_counter()
        generation = await self._generator.generate(
            inputs,
            sampling,
            rid=f"{self._question.uid}#{self._sample}.{number}",
        )
        parsed = parse(self.codec.decode(generation.token_ids), generation)
        turn = replace(
            _turn_of(parsed),
            generated_tokens=len(generation.token_ids),
            prompt_tokens=len(inputs),
            cached_tokens=generation.cached_tokens,
            generate_s=perf_counter() - started,
            began_ns=began_ns,
        )
        sampled = sampled_turn(inputs, generation, sampling)
        self.turns.append(turn)
        self._add(context, turn.text, sampled)
        if generation.finish == "abort":
            raise EpisodeOver(Finish.ABORTED)
        self.cut_off = generation.finish == "length"
        self.room -= len(generation.token_ids)
        return turn

    def observe(self, text: str, result: ToolResult = _NO_CALL, further: Sequence[FurtherCall] = ()) -> None:
        """Append `text` as the observation of the last turn; `result` is that of its call.

        The observations of `further` calls of the same generation follow, tokenised together. Raises EpisodeOver if they
        do not fit into `room` tokens.
        """
        if self._whole == len(self.turns):
            raise ValueError("there is no turn that lacks its observation")
        whole = "".join((text, *(each.observation for each in further)))
        if (length := len(self.codec.encode(whole))) > self.room:
            raise EpisodeOver(Finish.TOKEN_LIMIT)
        context = self._begun()
        context.add_observation(whole)
        last = replace(self.turns[-1], observation=text, tool_s=result.seconds, tool_error=result.error)
        self.turns[-1] = last
        for call, observation, (_, error, seconds) in further:
            began_ns = last.began_ns + round((last.generate_s + last.tool_s) * 1e9)
            turn = replace(_turn_of(call), began_ns=began_ns, observation=observation)
            last = replace(turn, tool_s=seconds, tool_error=error)
            self.turns.append(last)
            self._add(context, "", _NOTHING)
        self.room -= length
        self._whole = len(self.turns)

    def progress(self) -> PartialEpisode | None:
        """Return the whole turns so far; None without any."""
        if self._context is None or not self._whole:
            return self._progress
        sampled = self._sampled[: self._whole]
        return PartialEpisode(
            question_uid=self._question.uid,
            sample=self._sample,
            turns=tuple(self.turns[: self._whole]),
            token_ids=joined((turn.output_ids for turn in sampled), np.int32),
            logprobs=joined((turn.logprobs for turn in sampled), np.float32),
            versions=joined((turn.versions for turn in sampled), np.int32),
            ended_itself=np.array([turn.ended_itself for turn in sampled], np.bool_),
            routes=_joined_routes(sampled),
        )

    def trajectory(self, finish: Finish) -> Trajectory:
        """Return the trajectory so far, ended by `finish`."""
        eos = self.task.train_eos and finish is Finish.ANSWER
        record = self._begun().close(eos, self.task.max_total_tokens)
        return record.trajectory(self._question, self._sample, self.turns, self._sampled, finish)

    def _begun(self) -> Context:
        if self._context is None:
            self.begin(self.codec.prompt(self._question.prompt))
        assert self._context is not None
        return self._context

    def _restore(self, context: Context, progress: PartialEpisode) -> None:
        """Append the turns of `progress` to a context that has the prompt alone."""
        ends = accumulate((turn.generated_tokens for turn in progress.turns), initial=0)
        sampled = (progress.token_ids, progress.logprobs, progress.versions)
        routes = progress.routes
        waiting = ""
        for turn, (start, end), ended in zip(
            progress.turns, pairwise(ends), progress.ended_itself.tolist(), strict=True
        ):
            if _is_further(turn):
                self._add(context, "", _NOTHING)
            else:
                context.add_observation(waiting)
                waiting = ""
                ids, logprobs, versions = (array[start:end].tolist() for array in sampled)
                whole = SampledTurn(context.input_ids(), ids, logprobs, versions, ended)
                if routes is not None:
                    first = known_routes(self._sampled, whole.input_ids)
                    rows = len(whole.ids) - 1 - first
                    whole, routes = replace(whole, routes=routes[:rows], routes_from=first), routes[rows:]
                self._add(context, turn.text, whole)
            waiting += turn.observation
        context.add_observation(waiting)

    def _add(self, context: Context, text: str, sampled: SampledTurn) -> None:
        context.add_turn(sampled, text)
        self._sampled.append(sampled)


_NOTHING = SampledTurn((), (), (), (), ended_itself=True)
"""Engine call of a further call."""


def sampled_turn(input_ids: Sequence[int], generation: Generation, sampling: TurnSampling) -> SampledTurn:
    """Return the engine call that `generation` answers."""
    return SampledTurn(
        input_ids,
        generation.token_ids,
        generation.logprobs,
        generation.versions,
        ended_itself=generation.finish == "stop",
        routes=generation.routes,
        routes_from=sampling.routes_from or 0,
    )


def _joined_routes(turns: Sequence[SampledTurn]) -> Routes | None:
    """Return the routes of all turns, joined; None if a turn with tokens has none."""
    found = [turn.routes for turn in turns if turn.input_ids]
    known = [routes for routes in found if routes is not None]
    return np.concatenate(known) if known and len(known) == len(found) else None


def _turn_of(parsed: Parsed) -> Turn:
    """Return the turn of `parsed` before anything is known about its generation."""
    return Turn(
        text=parsed.text,
        action=parsed.action,
        content=parsed.content,
        observation="",
        generated_tokens=0,
        prompt_tokens=0,
        cached_tokens=0,
        generate_s=0.0,
        tool_s=0.0,
        tool=parsed.tool,
    )


def _is_further(turn: Turn) -> bool:
    return not turn.prompt_tokens and not turn.generated_tokens
