"""Scripted engine and search for tests of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsys.config.schema import TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Routes
from rlsys.rollout.agent.episode import Episode, EpisodeTools
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.agent.tokens import Codec, PartialEpisode
from rlsys.rollout.tools.interface import named_tools
from rlsys.search.retrieval import SearchResult
from tests.support.bpe import build_tokenizer
from tests.support.search_results import result_of

CODEC = Codec(build_tokenizer(words=True))
QUESTION = Question(uid="q", prompt="Who? 東京\n", answers=("a",))
DRAWN = TurnSampling(temperature=1.0, stop=("</search>", "</answer>"))
CALCULATOR, SCRIPTED = "rlsys.rollout.tools.calculator.Calculator", "tests.rollout.tools.own_tools.Scripted"


@dataclass
class Script:
    """Engine that says one text or token list per turn, cut at the first stop and to the budget; searches return
    `found`.

    The turn is read from the name of the request, so that episodes may call in any order. Log-probs depend on every
    input token.
    """

    said: Sequence[str | list[int]]
    found: SearchResult = field(default_factory=lambda: result_of("T\nParis 🚀"))
    codec: Codec = CODEC
    halt: tuple[int, str] = (-1, "")
    """(turn, "say" for the generation or "find" for the search) of the call that never returns."""
    calls: list[tuple[str, list[int], int]] = field(default_factory=list)
    """(name of the request, input, budget) of each generation."""
    stops: set[tuple[str, ...]] = field(default_factory=set)
    queries: list[str] = field(default_factory=list)
    halted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        turn = int(rid.rpartition(".")[2])
        await self._pass(turn, "say")
        self.calls.append((rid, input_ids, sampling.max_new_tokens))
        self.stops.add(sampling.stop)
        ids = self.said[turn]
        if isinstance(ids, str):
            ends = [ids.find(stop) + len(stop) for stop in sampling.stop if stop in ids]
            ids = self.codec.encode(ids[: min(ends, default=len(ids))])
        kept = ids[: sampling.max_new_tokens]
        base = hash((tuple(input_ids), sampling.max_new_tokens))
        logprobs = [-((base + 37 * place) % 1009) / 97 for place in range(len(kept))]
        versions = [turn + place // 3 for place in range(len(kept))]
        return Generation(kept, logprobs, "stop" if len(kept) == len(ids) else "length", len(input_ids) // 2, versions)

    async def search(self, query: str) -> SearchResult:
        await self._pass(int(self.calls[-1][0].rpartition(".")[2]), "find")
        self.queries.append(query)
        return self.found

    async def _pass(self, turn: int, what: str) -> None:
        if (turn, what) == self.halt:
            self.halted.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def routes_of(ids: Sequence[int], first: int = 0) -> Routes:
    """Routes of the tokens from `first` on but the last: each depends on its token and all tokens before it."""
    mixed = (np.array(ids[:-1], np.int64) + 1) * np.arange(1, len(ids)) * 0x5E3779B97F4A7C15  # Overflows wrap around.
    seen = (mixed ^ mixed >> 29).cumsum()[first:, None] >> np.arange(0, 48, 8)
    return (seen % 255).astype(np.uint8).reshape(-1, 2, 3)


def task(**changes: Any) -> TaskConfig:
    """Task of the tests; `tools` are dotted names."""
    tools = named_tools(changes.pop("tools", []))
    return TaskConfig(train_path="", eval_path="", tools=tools, **{"max_turns": 3, **changes})


def tools_of(script: Script, config: TaskConfig) -> EpisodeTools:
    return EpisodeTools(script, script, script.codec, config)


async def interrupted(
    script: Script, tools: EpisodeTools, begun: PartialEpisode | None = None, asked: Question = QUESTION
) -> PartialEpisode | None:
    """Run an episode until `script` halts; return the episode's progress."""
    script.halted.clear()
    cut_off = Episode(asked, 3, tools, DRAWN, begun)
    running = asyncio.ensure_future(cut_off.run())
    await asyncio.wait_for(script.halted.wait(), 600)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return cut_off.progress()
