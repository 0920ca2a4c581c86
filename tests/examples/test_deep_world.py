"""Tests of the deep world: its search alone answers nothing, and scripted policies answer by opening and finding."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.searchr1.tiny.deep import DeepWorld, deepen, next_turn, write_deep_world
from examples.searchr1.tiny.questions import WorldQuestion
from examples.searchr1.tiny.world import WorldSpec, build_world
from rlsys.config.schema import SearchConfig, TaskConfig, TokenMode
from rlsys.data.answers import exact_match
from rlsys.data.question import Question, read_questions
from rlsys.data.trajectory import Trajectory
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.tools.interface import named_tools
from rlsys.rollout.tools.search_tool import RequiredSearch, open_tool
from rlsys.search.corpus import PageStore
from rlsys.search.retrieval import Hit
from rlsys.search.server.asgi import create_app
from tests.rollout.agent.scripted import CODEC, DRAWN
from tests.support.jsonl import read_rows
from tests.support.serving import serving

LIMITS = {"max_turns": 40, "max_total_tokens": 100_000, "max_observation_tokens": 500, "token_mode": TokenMode.append}


@pytest.fixture(scope="module")
def world() -> DeepWorld:
    return deepen(build_world())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    write_deep_world(WorldSpec(), folder)
    return folder


class SharedWords:
    """Retriever that ranks passages by the number of words that they share with a query."""

    parallel = 1

    def __init__(self, rows: Sequence[Mapping[str, str]]) -> None:
        self.rows = [(row, Counter(re.findall(r"\w+", row["contents"].lower()))) for row in rows]

    def prepare(self, queries: Sequence[str]) -> list[list[str]]:
        return [re.findall(r"\w+", query.lower()) for query in queries]

    def find(self, prepared: list[list[str]], topk: int) -> list[list[Hit]]:
        scored = [[Hit(sum(min(1, has[word]) for word in words), row) for row, has in self.rows] for words in prepared]
        return [sorted(hits, key=lambda hit: -hit.score)[:topk] for hits in scored]

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "words"}

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    rows = read_rows(folder / "corpus.jsonl")
    with serving(create_app(SharedWords(rows), pages=PageStore(folder / "pages.jsonl"))) as address:
        yield address


class Scripted:
    """Engine that says the turns of a scripted policy."""

    def __init__(self, question: Question, *, finds: bool) -> None:
        extra = question.extra
        self.question = WorldQuestion(
            question.text, extra["hops"], extra["entity"], extra["relation"], extra["country"], question.answers
        )
        self.next = partial(next_turn, self.question, finds=finds)

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        del sampling, rid
        context = CODEC.decode(input_ids)
        heard = [part.partition("</information>")[0] for part in context.split("<information>")[1:]]
        ids = CODEC.encode(self.next(heard))
        return Generation(ids, [0.0] * len(ids), "stop", 0, [0] * len(ids))


def play(questions: list[Question], url: str, tools: list[str], *, finds: bool = True) -> list[Trajectory]:
    task = TaskConfig(train_path="", eval_path="", tools=named_tools(tools), **LIMITS)  # type: ignore[arg-type]

    async def every() -> list[Trajectory]:
        async with open_tool(SearchConfig(url=url, topk=3)) as client:
            played = []
            for question in questions:
                engine = Scripted(question, finds=finds)
                with closing(EpisodeTools(engine, RequiredSearch(client), CODEC, task)) as opened:
                    played.append(await run_episode(question, 0, opened, DRAWN))
            return played

    return asyncio.run(every())


def right(played: list[Trajectory], questions: list[Question]) -> float:
    hits = [exact_match(one.answer or "", asked.answers) for one, asked in zip(played, questions, strict=True)]
    return sum(hits) / len(hits)


def test_no_passage_has_an_answer_and_each_page_has_its_answers_beyond_a_window(world: DeepWorld) -> None:
    passages = "\n".join(row["contents"] for row in world.corpus)
    pages = {row["url"].rpartition("/")[2].replace("_", " "): row["contents"] for row in world.pages}
    far = 0
    for question in (*world.train, *world.heldout):
        for answer in question.answers:
            assert answer not in passages
            assert answer in pages[question.country]
            far += pages[question.country].index(answer) > 200
    assert far > 0.9 * sum(len(question.answers) for question in (*world.train, *world.heldout))
    assert len(world.heldout) > 100
    assert not {question.country for question in world.train} & {question.country for question in world.heldout}
    assert {question.relation for question in world.heldout} == {"currency", "language", "timezone"}


def test_search_alone_answers_nothing_and_open_or_find_answers(folder: Path, url: str) -> None:
    questions = read_questions(folder / "heldout.jsonl")
    by_relation: Counter[str] = Counter()
    asked = [
        one
        for one in questions
        if by_relation.update([one.extra["relation"]]) or by_relation[one.extra["relation"]] <= 12
    ]
    alone = play(asked, url, [])
    assert right(alone, asked) == 0
    assert {one.searches for one in alone} == {1}
    found, opened = (play(asked, url, ["pages"], finds=finds) for finds in (True, False))
    assert right(found, asked) > 0.9
    assert right(opened, asked) > 0.9
    assert {turn.tool for one in found for turn in one.turns} == {"", "find"}
    assert {turn.tool for one in opened for turn in one.turns} == {"", "open"}
    assert max(one.tool_calls for one in opened) > 1, "an answer stands beyond the first window"
