"""Table of ends of a request, which every engine must reproduce: stop strings, end tokens, lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.rollout.engine import EngineDriver
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
