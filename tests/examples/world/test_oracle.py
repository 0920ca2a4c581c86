"""The oracle reads what it is given and nothing else, and the world is clean enough for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.searchr1.tiny.oracle import measure_ceiling
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.retrieval import DirectRetriever
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


async def test_what_search_does_not_find_is_not_answered(world: World, heldout: list[Question]) -> None:
    passages = {place.name: passage(place) for place in world.places}

    async def look_up(query: str) -> list[str]:
        return [] if query in {country.name for country in world.countries} else [passages[query]]

    ceiling = await measure_ceiling(heldout, look_up)
    of_cities = [q for q in heldout if q.extra["relation"] in ("country", "timezone")]
    two_hop = [q for q in heldout if q.extra["hops"] == 2]
    assert ceiling.oracle_em == len(of_cities) / len(heldout)
    assert ceiling.recall_at_3 == (len(of_cities) + len(two_hop)) / (len(heldout) + len(two_hop))


async def test_a_false_passage_makes_a_false_answer(heldout: list[Question]) -> None:
    question = next(q for q in heldout if q.extra["relation"] == "timezone")

    async def lie(query: str) -> list[str]:
        return [f'"{query}"\n{query} is a city in Atlantis with time zone Sea/Floor.']

    assert (await measure_ceiling([question], lie)).oracle_em == 0.0


@pytest.mark.slow
async def test_dense_search_finds_the_passages_among_many(
    world: World, heldout: list[Question], tmp_path: Path
) -> None:
    """A part of the corpus, for speed; the whole corpus's figures are in the example's README."""
    rng = random.Random(3)
    asked = rng.sample(heldout, 40)
    needed = {q.extra["entity"] for q in asked} | {q.extra["country"] for q in asked}
    places = [place for place in world.places if place.name in needed]
    places += rng.sample([place for place in world.places if place.name not in needed], 300)
    retriever = DirectRetriever([passage(place) for place in places], tmp_path)
    ceiling = await measure_ceiling(asked, retriever)
    assert ceiling.oracle_em >= 0.95
    assert ceiling.recall_at_3 >= 0.95
