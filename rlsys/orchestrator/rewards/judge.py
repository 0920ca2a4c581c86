"""The term `judge`: a language model says whether an answer means the same as an accepted one.

Contract: `grade` gives 1.0 or 0.0. No answer, or an empty one, is 0 and an exact match is 1; neither is asked. A
reply that is neither yes nor no is a refusal: 0, counted, and not kept. The same prompt is asked once, also by
episodes that ask at the same time. An endpoint that does not answer ends the run (RunError): a run must not train
on made-up zeros.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

import httpx

from rlsys.config.schema import JudgeConfig
from rlsys.data.answers import exact_match
from rlsys.data.question import Question
from rlsys.orchestrator.rewards.endpoint import ChatEndpoint
from rlsys.orchestrator.rewards.prompt import fill, verdict_of
from rlsys.orchestrator.rewards.reading import Reading
from rlsys.orchestrator.rewards.verdicts import Verdicts, key_of


@dataclass(slots=True)
class _Counts:
    """Since the last figures."""

    asked: int = 0
    cached: int = 0
    refused: int = 0
    yes: int = 0
    seconds: float = 0.0


class Judge:
    """A judge for one event loop; `close` it at the end. `transport` takes the place of the network.

    Raises UserError for a token or a file of verdicts that cannot be used.
    """

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._endpoint = ChatEndpoint(config, transport)
        self._verdicts = Verdicts(config.cache_path)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._counts = _Counts()

    async def __call__(self, reading: Reading) -> list[float]:
        """[slots] the grade, on the last turn."""
        return reading.at_end(await self.grade(reading.question, reading.answer))

    async def grade(self, question: Question, answer: str | None) -> float:
        """1.0 for an answer that means the same as an accepted one. Raises RunError, see the module."""
        if answer is None:
            return 0.0
        if exact_match(answer, question.answers):
            return 1.0
        if not answer:
            return 0.0
        prompt = fill(self._config.prompt, question, answer)
        key = key_of(self._config.model, prompt)
        async with self._asking.setdefault(key, asyncio.Lock()):
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._counts.cached += 1
            else:
                verdict = await self._ask(key, prompt)
        self._counts.yes += bool(verdict)
        return float(bool(verdict))

    def figures(self) -> dict[str, float]:
        """What was asked since the last call: counts, the share of yes among verdicts, seconds of a question.

        The share and the seconds are left out where nothing was judged.
        """
        counts, self._counts = self._counts, _Counts()
        figures = {
            "judge/asked": counts.asked,
            "judge/cached": counts.cached,
            "judge/refused": counts.refused,
        }
        verdicts = counts.asked + counts.cached - counts.refused
        shares = {"judge/yes_share": counts.yes / verdicts} if verdicts else {}
        times = {"judge/seconds": counts.seconds / counts.asked} if counts.asked else {}
        return {**figures, **shares, **times}

    async def close(self) -> None:
        """End the connections and close the file of verdicts."""
        await self._endpoint.close()
        self._verdicts.close()

    async def _ask(self, key: str, prompt: str) -> bool | None:
        clock = asyncio.get_running_loop()
        started = clock.time()
        verdict = verdict_of(await self._endpoint.ask(prompt))
        self._counts.seconds += clock.time() - started
        self._counts.asked += 1
        if verdict is None:
            self._counts.refused += 1
        else:
            self._verdicts.put(key, verdict)
        return verdict
