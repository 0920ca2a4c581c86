"""Contract of every engine: requests end as in a table, and those in flight continue with the weights of an update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.rollout.engine import EngineDriver
from tests.rollout.bench import EngineBench, endless, greedy, greedy_by_transformers, logprobs_of
from tests.support import tiny

WHOLE = tiny.FIRST.search
"""What the model of `tiny.FIRST` says greedily after its prompt, up to the first closing tag."""


@dataclass(frozen=True)
class End:
    """A greedy request after the prompt of `tiny.FIRST`, and its expected text and reason."""

    stop: tuple[str, ...]
    text: str
    """Shortest text that the request must have; the token that completes it may add characters."""
    finish: str
    cut: Callable[[int], int] = lambda tokens: tokens + 8
    """Tokens of `text` -> `max_new_tokens`."""


ENDS = [
    End(("</search>",), WHOLE, "stop"),
    End(("never said", "</think>"), WHOLE.partition("<search>")[0], "stop"),
    End(("I do", "</think>"), "<think>I do", "stop"),
    End(("</search>",), WHOLE, "stop", lambda tokens: tokens),
    End((), WHOLE, "length", lambda tokens: tokens),
    End(("</search>", "never said"), "<think>I do", "length", lambda tokens: tokens),
]


async def check_end(engine: EngineDriver, words: PreTrainedTokenizerFast, end: End) -> None:
    """Check a row of the table on an engine that holds the model of `tiny.FIRST`."""
    prompt = words(tiny.FIRST.prompt)["input_ids"]
    said = words(tiny.FIRST.text)["input_ids"][len(prompt) :]
    tokens = next(count for count in range(len(said)) if words.decode(said[:count]).startswith(end.text))
    sampling = TurnSampling(0.0, stop=end.stop, max_new_tokens=end.cut(tokens))
    before = engine.progress
    generation = await engine.generate(prompt, sampling, "end")
    assert before is None or engine.progress > before  # type: ignore[operator]
    assert (generation.token_ids, generation.finish) == (said[:tokens], end.finish)
    assert len(generation.logprobs) == len(generation.versions) == tokens


async def check_end_token(engine: EngineDriver, words: PreTrainedTokenizerFast) -> None:
    """Check that an end token ends a request and stays in its tokens."""
    ids = words(tiny.FIRST.text + tiny.EOS)["input_ids"]
    generation = await engine.generate(ids[:-4], TurnSampling(0.0, max_new_tokens=32), "end token")
    assert (generation.token_ids, generation.finish) == (ids[-4:], "stop")


class Progress:
    """Listener that counts the tokens of a request."""

    def __init__(self) -> None:
        self.tokens = 0
        self._more = asyncio.Condition()
        self._tasks: set[asyncio.Task] = set()

    def hear(self, ids: list[int]) -> None:
        self.tokens = len(ids)
        self._tasks.add(asyncio.create_task(self._tell()))

    async def _tell(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def until(self, tokens: int) -> None:
        async with self._more:
            await self._more.wait_for(lambda: self.tokens >= tokens)


async def check_switch(bench: EngineBench, texts: Sequence[str]) -> None:
    """Check that requests in flight keep their tokens and continue with the weights of an update."""
    before, after = endless(bench.first, bench.words), endless(bench.second, bench.words)
    old = await bench.bring(before)
    prompts = [bench.encode(text) for text in texts]
    heard = [Progress() for _ in prompts]
    running = [
        asyncio.create_task(bench.engine.generate(ids, greedy(200), "long", one.hear))
        for ids, one in zip(prompts, heard, strict=True)
    ]
    new, total = await bench.stage(after)
    for one in heard:
        await one.until(10)
    await bench.engine.finish_update(new, total)
    late = await bench.engine.generate(prompts[0], greedy(10), "late")
    for ids, generation in zip(prompts, await asyncio.gather(*running), strict=True):
        tokens, boundary = generation.token_ids, generation.versions.count(old)
        assert 10 <= boundary < len(tokens) == 200
        assert generation.versions == [old] * boundary + [new] * (200 - boundary)
        assert tokens[:boundary] == greedy_by_transformers(before, ids, boundary)
        assert tokens[boundary:] == greedy_by_transformers(after, [*ids, *tokens[:boundary]], 200 - boundary)
        assert_logprobs(before, ids, tokens[:boundary], generation.logprobs[:boundary])
        assert_logprobs(after, [*ids, *tokens[:boundary]], tokens[boundary:], generation.logprobs[boundary:])
    assert late.versions == [new] * 10


def assert_logprobs(
    model: Qwen2ForCausalLM, ids: list[int], said: list[int], got: list[float], hot: float = 1.0
) -> None:
    """Compare log-probs with a float64 forward pass of one sequence.

    The engine may be off by 8 times the error of the same pass in float32, as its sums have another order.
    """
    exact = logprobs_of(model.double(), [*ids, *said], hot)[len(ids) - 1 :].numpy()
    single = logprobs_of(model.float(), [*ids, *said], hot)[len(ids) - 1 :].numpy()
    np.testing.assert_allclose(got, exact, rtol=0, atol=8 * max(np.abs(single - exact).max(), 1e-6))
