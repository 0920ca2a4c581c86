"""Tests of the tiny world: its splits and passages, its oracle, and the checksums of its policy."""

import hashlib
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import examples.searchr1.tiny as tiny
from examples.searchr1.tiny.oracle import measure_ceiling
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.tokenizer import TAGS
from examples.searchr1.tiny.world import World, WorldSpec, build_world, write_world
from rlsys.data.question import Question, read_questions
from tests.support.tiny_models import POLICY


@pytest.fixture(scope="module")
def world() -> World:
    return build_world()


@pytest.fixture(scope="module")
def written(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the world's files."""
    folder = tmp_path_factory.mktemp("world")
    write_world(world, WorldSpec(), folder)
    return folder


@pytest.fixture(scope="module")
def heldout(written: Path) -> list[Question]:
    return read_questions(written / "heldout.jsonl")


def test_the_files_by_number_of_hops_have_every_question_once(written: Path) -> None:
    for split in ("train", "heldout"):
        parts = [(written / f"{split}_{name}.jsonl").read_text().splitlines() for name in ("one_hop", "two_hops")]
        assert sorted(parts[0] + parts[1]) == sorted((written / f"{split}.jsonl").read_text().splitlines())
        assert ['"hops": 1' in row for row in parts[0]] == [True] * len(parts[0])
        assert ['"hops": 2' in row for row in parts[1]] == [True] * len(parts[1])


@pytest.mark.parametrize("key", ["country", "entity"])
def test_no_country_or_entity_is_in_both_splits(world: World, key: str) -> None:
    train, held = ({getattr(question, key) for question in split} for split in (world.train, world.heldout))
    assert len(train) > 1 < len(held)
    assert not train & held


def test_every_answer_is_in_the_passage_it_is_read_from(world: World) -> None:
    passages = {place.name: passage(place) for place in world.places}
    for question in (*world.train, *world.heldout):
        source = question.country if question.hops == 2 else question.entity
        for answer in question.answers:
            assert f" {answer}" in passages[source]
        if question.hops == 2:
            assert f" country {question.country}," in passages[question.entity]


async def test_the_oracle_answers_from_the_passages_it_is_given(world: World, heldout: list[Question]) -> None:
    passages = {place.name: passage(place) for place in world.places}

    async def look_up(query: str) -> list[str]:
        return ['"Elsewhere"\nElsewhere is a city in Nowhere with time zone Never/Never.', passages[query]]

    async def mislead(query: str) -> list[str]:
        return [f'"{query}"\n{query} is a city in Atlantis with time zone Sea/Floor.']

    ceiling = await measure_ceiling(heldout, look_up)
    assert (ceiling.oracle_em, ceiling.recall_at_3) == (1.0, 1.0)
    question = next(question for question in heldout if question.extra["relation"] == "timezone")
    assert (await measure_ceiling([question], mislead)).oracle_em == 0.0


def test_checksums_of_the_policy_match_the_readme() -> None:
    readme = (Path(tiny.__file__).parent / "README.md").read_text()
    stated = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", readme, re.MULTILINE)}
    assert stated == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in POLICY.iterdir()}


def test_the_tokenizer_round_trips_the_corpus_and_has_a_token_for_each_tag(world: World) -> None:
    words = AutoTokenizer.from_pretrained(POLICY)
    texts = [row["contents"] for row in world.corpus()] + [question.prompt for question in world.heldout]
    assert words.batch_decode(words(texts)["input_ids"]) == texts
    for tag in TAGS:
        (token,) = words(tag)["input_ids"]
        assert words.decode([token], skip_special_tokens=True) == tag
