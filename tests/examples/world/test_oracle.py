"""The oracle reads what it is given and nothing else, and the world is clean enough for it."""

from __future__ import annotations

import pytest

from examples.searchr1.tiny.oracle import measure_ceiling
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.world import World, WorldSpec, write_world
from rlsys.data.question import Question, read_questions


@pytest.fixture(scope="module")
def heldout(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Question]:
    folder = tmp_path_factory.mktemp("world")
    write_world(world, WorldSpec(), folder)
    return read_questions(folder / "heldout.jsonl")


async def test_with_the_right_passages_every_question_is_answered(world: World, heldout: list[Question]) -> None:
    passages = {place.name: passage(place) for place in world.places}

    async def look_up(query: str) -> list[str]:
        return ['"Elsewhere"\nElsewhere is a city in Nowhere with time zone Never/Never.', passages[query]]

    ceiling = await measure_ceiling(heldout, look_up)
    assert (ceiling.oracle_em, ceiling.recall_at_3) == (1.0, 1.0)


async def test_a_false_passage_makes_a_false_answer(heldout: list[Question]) -> None:
    question = next(q for q in heldout if q.extra["relation"] == "timezone")

    async def lie(query: str) -> list[str]:
        return [f'"{query}"\n{query} is a city in Atlantis with time zone Sea/Floor.']

    assert (await measure_ceiling([question], lie)).oracle_em == 0.0
