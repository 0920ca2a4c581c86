"""Conversations with a scripted engine and search, also served as the chat page."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rlsys.apps.chat.conversation import Conversation, Opened
from rlsys.apps.chat.web import create_app
from rlsys.config.schema import TaskConfig
from rlsys.rollout.agent.episode import EpisodeTools
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.address import own_names
from rlsys.search.retrieval import SearchResult
from tests.support.bpe import build_tokenizer
from tests.support.search_results import result_of
from tests.support.serving import serving

PASSAGE = '"Paris"\nParis is the capital of <b>France</b>.'
SEARCHES = "<think>I need it.</think><search> capital of France </search>"
ANSWERS = "<think>It says so.</think><answer> Paris </answer>"


class Halts(Protocol):
    """A generator that halts."""

    halted: asyncio.Event
    cancelled: int
    """Number of halts that were cancelled."""


async def halt(generator: Halts) -> None:
    """Say that `generator` has halted, and wait until it is cancelled."""
    generator.halted.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        generator.cancelled += 1
        raise


class Script:
    """A generator that writes `turns` token by token; after `halt_after` tokens of a turn it waits to be cancelled."""

    def __init__(self, codec: Codec, turns: Sequence[str], halt_after: int | None = None) -> None:
        self.codec = codec
        self._turns = list(turns)
        self._halt_after = halt_after
        self.inputs: list[list[int]] = []
        self.sampled: list[TurnSampling] = []
        self.halted = asyncio.Event()
        self.cancelled = 0

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        del rid
        self.inputs.append(input_ids)
        self.sampled.append(sampling)
        ids = self.codec.encode(self._turns[(len(self.inputs) - 1) % len(self._turns)])
        for count in range(1, len(ids) + 1):
            await asyncio.sleep(0)
            if on_tokens is not None:
                on_tokens(ids[:count])
            if count == self._halt_after:
                await halt(self)
        return Generation(ids, [-0.5] * len(ids), "stop", 0, [0] * len(ids))


class FakeSearch:
    """A search that finds one passage, or fails."""

    def __init__(self, passage: str = PASSAGE, error: str = "") -> None:
        self._result = result_of(error=error) if error else result_of(passage)
        self.queries: list[str] = []

    async def search(self, query: str) -> SearchResult:
        self.queries.append(query)
        return self._result


def codec() -> Codec:
    return Codec(build_tokenizer(words=True))


def task(**changes: object) -> TaskConfig:
    limits = {"max_turns": 2, "max_prompt_tokens": 64, "max_turn_tokens": 512, "max_total_tokens": 4096}
    return TaskConfig(train_path="", eval_path="", **limits | changes)  # type: ignore[arg-type]


def conversation(script: Script, search: FakeSearch | None, tasks: TaskConfig | None = None) -> Conversation:
    return Conversation(
        script,
        EpisodeTools(script, search, script.codec, tasks or task()),
        TurnSampling(0.0, stop=("</search>", "</answer>")),
        lambda text: f"Question: {text}\n",
    )


def opened(script: Script, search: FakeSearch) -> Opened:
    """An opened chat with `script` and `search`."""
    asked = conversation(script, search, task(max_prompt_tokens=512))
    return Opened(asked, "transformers", "folder/<b>model</b>", "http://127.0.0.1:9", 2, 0.0)


@contextmanager
def page_of(script: Script, search: FakeSearch) -> Iterator[str]:
    """Serve the chat page with `script` and `search` on a real socket; yields its URL."""
    with serving(create_app(opened(script, search), own_names("127.0.0.1"))) as url:
        yield url


def write_rows(file: Path, prompts: list[str], questions: list[str]) -> None:
    """Write training rows with `prompts` and their `questions`."""
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"ground_truth": {"target": ["x"]}},
            "extra_info": {"question": question},
        }
        for prompt, question in zip(prompts, questions, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
