"""What episodes wait for is counted while they do, however that ends, and is what all of them wait for."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rlsys.config.schema import TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.rollout.agent.episode import EngineActivity, EpisodeTools, Generation, TurnSampling, common_wait, run_episode
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.retrieval import SearchResult
from tests.rollout.agent.bpe import build_tokenizer
from tests.rollout.agent.found import result_of

CODEC = Codec(build_tokenizer(words=True))
SAID = ["<search>who</search>", "<calculator> 6 * 7 </calculator>", "<answer> 42 </answer>"]


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ([], ""),
        ([EngineActivity(False, {})], ""),
        ([EngineActivity(False, {"search": 2})], "search"),
        ([EngineActivity(False, {"search": 0})], ""),
        ([EngineActivity(False, {"search": 2}), EngineActivity(False, {})], "search"),
        ([EngineActivity(False, {"search": 2}), EngineActivity(True, {})], ""),
        ([EngineActivity(True, {"search": 2})], ""),
        ([EngineActivity(False, {"search": 2}), EngineActivity(False, {"clock": 1, "search": 1})], "clock and search"),
    ],
)
def test_all_wait_where_none_generates(found: list[EngineActivity], cause: str) -> None:
    assert common_wait(found) == cause


class Looking:
    """An engine, a search and a clock that look at what episodes wait for while they are asked."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs
        task = TaskConfig(train_path="", eval_path="", max_turns=4, tools=["rlsys.rollout.tools.calculator.Calculator"])
        self.tools = EpisodeTools(self, self, CODEC, task)
        self.seen: list[Counter[str]] = []

    def look(self) -> None:
        self.seen.append(+self.tools.awaited)

    async def generate(self, _inputs: list[int], _sampling: TurnSampling, rid: str) -> Generation:
        self.look()
        ids = CODEC.encode(SAID[int(rid.rpartition(".")[2])])
        return Generation(ids, [-0.5] * len(ids), "stop", 0, [0] * len(ids))

    async def search(self, query: str) -> SearchResult:
        self.look()
        if self.hangs:
            await asyncio.Event().wait()
        return result_of(query)


def run(looking: Looking, timeout_s: float | None) -> Finish:
    question = Question(uid="q", prompt="Who?", answers=("a",))
    return asyncio.run(run_episode(question, 0, looking.tools, TurnSampling(0.0), timeout_s=timeout_s)).finish


def test_an_episode_counts_for_as_long_as_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = Looking()
    calculator = looking.tools.custom["calculator"]
    call = calculator.call

    async def seen(text: str) -> str:
        looking.look()
        return await call(text)

    monkeypatch.setattr(calculator, "call", seen)
    assert run(looking, None) is Finish.ANSWER
    nothing: Counter[str] = Counter()
    assert looking.seen == [nothing, Counter(search=1), nothing, Counter(calculator=1), nothing]
    assert not +looking.tools.awaited


def test_who_is_given_up_waits_no_more() -> None:
    looking = Looking(hangs=True)
    assert run(looking, 0.05) is Finish.ABORTED
    assert looking.seen[-1] == Counter(search=1)
    assert not +looking.tools.awaited
