"""Plays episodes through the gateway with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from rlsys.config.schema import BranchCredit, GatewayAgent, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.agent.gateway import Gateway
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling
from rlsys.search.retrieval import SearchResult
from tests.rollout.agent import gateway_agents
from tests.rollout.agent.scripted import task
from tests.support.chat import halt
from tests.support.chat_templates import TEMPLATES
from tests.support.search_results import result_of
from tests.support.waiting import until

CODEC = TEMPLATES[0].codec
ASKED = Question(uid="q", prompt="Search-R1's prompt", answers=("a",), text="Who? 東京")
DRAWN = TurnSampling(temperature=1.0)
END = "<|im_end|>"


@dataclass
class Engine:
    """Engine that says the texts in turn, each up to a stop string and the budget; versions count its calls."""

    said: Sequence[str]
    halts: int = -1
    """Number of the call that never returns."""
    halted: asyncio.Event = field(default_factory=asyncio.Event)
    inputs: list[list[int]] = field(default_factory=list)
    sampled: list[TurnSampling] = field(default_factory=list)
    cancelled: int = 0
    closed: bool = False
    """True while every call waits before its answer."""
    fails: Exception | None = None

    async def generate(
        self,
        input_ids: list[int],
        sampling: TurnSampling,
        rid: str,  # noqa: ARG002
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        number = len(self.inputs)
        self.inputs.append(input_ids)
        self.sampled.append(sampling)
        if self.fails is not None:
            raise self.fails
        await until(lambda: not self.closed)
        text = self.said[number % len(self.said)]
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = CODEC.encode(text[: min(ends)] if ends else text + END)
        kept = ids[: sampling.max_new_tokens]
        for count in range(1, len(kept) + 1):
            await asyncio.sleep(0)
            if on_tokens is not None:
                on_tokens(kept[:count])
        if number == self.halts:
            await halt(self)
        logprobs = [-0.25 * (at + 1) for at in range(len(kept))]
        return Generation(kept, logprobs, "stop" if len(kept) == len(ids) else "length", 0, [number] * len(kept))

    async def search(self, query: str) -> SearchResult:
        return result_of(f"About\n{query}")


def tools_of(
    engine: Engine,
    agent: Callable[..., Any] | GatewayAgent,
    *,
    ignore_sampling: bool = False,
    credit: BranchCredit = BranchCredit.episode,
    **changes: Any,
) -> EpisodeTools:
    """Tools of a task whose agent is a function, or as the settings name it."""
    settings = agent if isinstance(agent, GatewayAgent) else GatewayAgent(entry=f"{gateway_agents.__name__}.plain")
    usual = {"token_mode": TokenMode.append, "train_eos": False, "max_total_tokens": 4000}
    tools = EpisodeTools(engine, engine, CODEC, task(agent=settings, **{**usual, **changes}))
    if not isinstance(agent, GatewayAgent):
        own = GatewayAgent(timeout_s=600.0, ignore_sampling=ignore_sampling, credit=credit)
        tools.agent = Gateway(own, agent)
    return tools


def play(engine: Engine, agent: Callable[..., Any] | GatewayAgent, **changes: Any) -> Trajectory:
    with closing(tools_of(engine, agent, **changes)) as tools:
        return asyncio.run(run_episode(ASKED, 0, tools, DRAWN))


def trained(played: Trajectory) -> str:
    """Text of the trained tokens."""
    return CODEC.decode_all(played.tokens[played.loss_mask].tolist())


class Client:
    """Sends requests of a session by httpx."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.key = api_key
        self._http = httpx.AsyncClient(base_url=base_url, timeout=600, headers={"Authorization": f"Bearer {api_key}"})

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Send a body as JSON, or `content`."""
        return await self._http.post(path, **({"json": body} if body is not None else {}), **more)

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    async def chat(self, text: str = "Who?", headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """Ask one question."""
        body = {"messages": [{"role": "user", "content": text}], **more}
        return await self.post("/chat/completions", body, headers=headers or {})
