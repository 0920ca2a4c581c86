"""Draws the lengths of episodes and the latencies of tools. Pure: a prompt group's draw depends on the seed and its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from rlsys.cluster.planning.work import EXPECTED
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError

TURNS = 3
"""Turns of an episode that `EXPECTED` assumes: two searches and an answer."""


class TurnDraw(NamedTuple):
    """One turn: what is generated, and what its tool returns."""

    generated: float
    observation: float
    tool_s: float
    """Seconds of the tool call that follows; the last turn has none."""


class EpisodeDraw(NamedTuple):
    """Lengths of one episode."""

    prompt: int
    turns: Sequence[TurnDraw]

    @property
    def generated(self) -> float:
        """Tokens that the engine generates."""
        return sum(turn.generated for turn in self.turns)

    @property
    def tokens(self) -> float:
        return self.prompt + sum(turn.generated + turn.observation for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """Assumed episodes: log-normal turns, a Poisson number of tool calls, log-normal latencies of tools; and what
    interrupts a run.

    `Workload().changed({"turn": "400"})` replaces single assumptions.
    """

    prompt: float = EXPECTED.prompt
    """Tokens of a prompt."""
    turn: float = EXPECTED.generated / TURNS
    """Mean tokens of a turn, before the limits."""
    spread: float = 0.6
    """Standard deviation of the logarithm of a turn's tokens; 0 makes all turns equal."""
    calls: float = TURNS - 1.0
    """Mean tool calls of an episode."""
    calls_vary: float = 1.0
    """1 for a Poisson number of calls, 0 for the same number in every episode."""
    observation: float = EXPECTED.observations / (TURNS - 1)
    """Tokens that a tool call returns."""
    tool_s: float = 0.1
    """Mean seconds of a tool call on an idle server; `bench.search` measured 64 clients at 649 queries/s."""
    tool_spread: float = 0.5
    """Standard deviation of the logarithm of these seconds."""
    tools_per_s: float = 649.0
    """Tool calls that the server answers in a second; 0 for no limit."""
    eval_questions: float = 500.0
    """Questions of an evaluation, where `eval.limit` is null."""
    disk_gb_s: float = 2.0
    """10^9 bytes per second that one machine writes to the disk of checkpoints."""
    failures: float = 0.0
    """Failures that end the processes of a run, per 1,000 device hours."""
    restart_s: float = 300.0
    """Seconds from a failure until the run trains again from its last checkpoint."""
    episodes: tuple[tuple[EpisodeDraw, ...], ...] = ()
    """Recorded prompt groups, from which lengths and turns are drawn instead; latencies are multiples of `tool_s`."""

    def changed(self, given: Sequence[str]) -> Workload:
        """Return the workload with the settings KEY=VALUE. Raises UserError for an unknown key or a bad value."""
        keys = {one.name for one in fields(self)} - {"episodes"}
        if self.episodes:
            keys -= {"prompt", "turn", "spread", "calls", "calls_vary", "observation", "tool_spread"}
        values: dict[str, Any] = {}
        for setting in given:
            key, _, value = setting.partition("=")
            if key not in keys:
                sentence = f"--assume {setting} names no assumption: use one of {', '.join(sorted(keys))}."
                raise UserError(sentence, code="unknown", key="--assume")
            try:
                values[key] = float(value)
            except ValueError:
                values[key] = -1.0
            if not 0 <= values[key] < float("inf"):
                sentence = f"--assume {setting} needs a number of at least 0, such as {key}={getattr(self, key):g}."
                raise UserError(sentence, code="out_of_range", key="--assume")
        return replace(self, **values)

    def group(self, config: RunConfig, seed: int, number: int, samples: int) -> list[EpisodeDraw]:
        """Return the episodes of prompt group `number`, within the limits of `config.task`."""
        rng = np.random.default_rng((seed, number))
        task = config.task
        most = task.max_turns if config.search.enabled or task.tools else 0
        if self.episodes:
            group = self.episodes[rng.integers(len(self.episodes))]
            return [self._recorded(config, group[place], most) for place in rng.integers(len(group), size=samples)]
        calls = np.full(samples, round(self.calls)) if not self.calls_vary else rng.poisson(self.calls, samples)
        calls = np.minimum(calls, most)
        lengths = self.turn * np.exp(self.spread * rng.standard_normal((samples, most + 1)) - self.spread**2 / 2)
        lengths = np.clip(np.rint(lengths), 1, task.max_turn_tokens)
        waits = self.tool_s * np.exp(
            self.tool_spread * rng.standard_normal((samples, most + 1)) - self.tool_spread**2 / 2
        )
        prompt = min(int(self.prompt), task.max_prompt_tokens)
        observation = min(self.observation, task.max_observation_tokens)
        return [
            EpisodeDraw(prompt, _within(task.max_total_tokens - prompt, of, observation, seconds, last))
            for of, seconds, last in zip(lengths.tolist(), waits.tolist(), calls.tolist(), strict=True)
        ]

    def _recorded(self, config: RunConfig, episode: EpisodeDraw, most: int) -> EpisodeDraw:
        """Return a recorded episode within the limits of `config.task`."""
        task, turns = config.task, list[TurnDraw]()
        room = float(task.max_total_tokens - episode.prompt)
        for turn in episode.turns[: most + 1]:
            generated = min(turn.generated, float(task.max_turn_tokens), max(1.0, room))
            observation = min(turn.observation, float(task.max_observation_tokens))
            room -= generated + observation
            turns.append(TurnDraw(generated, observation, turn.tool_s * self.tool_s))
            if room < 1:
                break
        turns[-1] = TurnDraw(turns[-1].generated, 0.0, 0.0)
        return EpisodeDraw(episode.prompt, turns)


def _within(
    room: float, lengths: Sequence[float], observation: float, waits: Sequence[float], calls: int
) -> list[TurnDraw]:
    """Return the turns of one episode with at most `room` tokens after its prompt."""
    turns: list[TurnDraw] = []
    for index in range(calls + 1):
        room -= lengths[index]
        if index == calls or room <= observation + 1:
            turns.append(TurnDraw(max(1.0, lengths[index] + min(room, 0.0)), 0.0, 0.0))
            break
        room -= observation
        turns.append(TurnDraw(lengths[index], observation, waits[index]))
    return turns


class ToolServer:
    """Answers tool calls in their order of arrival, at most `per_s` in a second."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s if per_s else 0.0
        self._free_at = 0.0

    def answered_at(self, now: float, seconds: float) -> float:
        """Return the time at which a call that arrives now is answered; it takes `seconds` on an idle server."""
        self._free_at = max(now, self._free_at) + self._interval_s
        return max(self._free_at, now + seconds)
