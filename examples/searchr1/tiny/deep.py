"""Makes the deep variant of the tiny world: no passage has an answer; each stands in the middle of a page.

Run `python -m examples.searchr1.tiny.deep --out data/deep_world`. A country is one page, a gazetteer with a
line for each city and the facts of the country behind them. Its passage, which is all that a search finds, names the
country and its cities. So a policy must open the page, or find a text in it, to answer.

Invariants: as in the tiny world; no answer occurs in any passage.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.searchr1.tiny.geography import City, Country
from examples.searchr1.tiny.oracle import FACTS
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.questions import WorldQuestion
from examples.searchr1.tiny.world import World, WorldSpec, build_world, write_files

RELATIONS = ("currency", "language", "timezone")
"""Relations whose values are no names of places."""
MIN_CITIES = 12
"""Minimum number of cities on a page; fewer would bring the facts of the country to its beginning."""
_URL = re.compile(r"URL: (\S+?)\)")


@dataclass(frozen=True, slots=True)
class DeepWorld:
    """Pages, their passages, and questions about them."""

    corpus: tuple[dict[str, str], ...]
    """Rows {id, contents, url}, one for each page."""
    pages: tuple[dict[str, str], ...]
    """Rows {url, contents}."""
    train: tuple[WorldQuestion, ...]
    heldout: tuple[WorldQuestion, ...]


def deepen(world: World) -> DeepWorld:
    """Return the deep variant of `world`, with those of its questions that no passage answers."""
    cities = {
        country.name: [city for city in world.cities if city.country == country.name] for country in world.countries
    }
    shown = [country for country in world.countries if len(cities[country.name]) >= MIN_CITIES]
    corpus = tuple(
        {"id": str(row), "contents": _beginning(country, cities[country.name]), "url": _url(country)}
        for row, country in enumerate(shown)
    )
    pages = tuple(
        {"url": _url(country), "contents": f"{_beginning(country, cities[country.name])}\n{_entries(country, cities)}"}
        for country in shown
    )
    known, said = {country.name for country in shown}, "\n".join(row["contents"] for row in corpus)

    def kept(questions: Sequence[WorldQuestion]) -> tuple[WorldQuestion, ...]:
        return tuple(
            each
            for each in questions
            if each.relation in RELATIONS and each.country in known and not any(one in said for one in each.answers)
        )

    return DeepWorld(corpus, pages, kept(world.train), kept(world.heldout))


def _url(country: Country) -> str:
    return f"https://places.example/{country.name.replace(' ', '_')}"


def _beginning(country: Country, cities: Sequence[City]) -> str:
    return f'"{country.name}"\nGazetteer of {country.name}, with {", ".join(city.name for city in cities)}.'


def _entries(country: Country, cities: dict[str, list[City]]) -> str:
    """Return the lines of the cities, and in the midst of the second half of them the facts of the country."""
    lines = [passage(city).partition("\n")[2] for city in cities[country.name]]
    lines.insert(3 * len(lines) // 4, passage(country).partition("\n")[2])
    return "\n".join(lines)


def next_turn(question: WorldQuestion, heard: Sequence[str], *, finds: bool = True) -> str:
    """Return the next turn of a scripted policy, which has read the observations `heard`, by Search-R1's tags.

    It searches for the entity, finds the sentence of the wanted place in the page, or without `finds` opens the page
    window by window, and reads the answer. It takes every fact from what it has read.
    """
    if not heard:
        return f"<search> {question.entity} </search>"
    found = _URL.search(heard[0])
    title = re.search(r'Title: "([^"]+)"', heard[0])
    if found is None or title is None:
        return "<answer> unknown </answer>"
    place = question.entity if question.relation == "timezone" else title[1]
    for text in heard[1:]:
        sentence = re.search(rf"(?<![\w-]){re.escape(place)}(: [^:]*?\.)(?= |$|\n)", text)
        if sentence is not None and (fact := FACTS[question.relation].search(sentence[1])):
            return f"<answer> {fact[1]} </answer>"
    if finds and len(heard) == 1:
        return f"<find> {json.dumps({'url': found[1], 'text': f'{place}: '}, ensure_ascii=False)} </find>"
    window = re.search(r"tokens (\d+) to (\d+) of (\d+)", heard[-1])
    begin, end, total = map(int, window.groups()) if window is not None else (0, 0, 1)
    if finds or end == total:
        return "<answer> unknown </answer>"
    # Windows overlap by half, so that a sentence that is cut in one is whole in the next.
    start = (begin + end + 1) // 2
    return f"<open> {json.dumps({'url': found[1], 'start': start}, ensure_ascii=False)} </open>"


def write_deep_world(spec: WorldSpec, folder: Path) -> dict[str, Any]:
    """Write the deep variant of a world into `folder`: its files, and pages.jsonl. Returns the manifest."""
    deep = deepen(build_world(spec))
    return write_files({"corpus.jsonl": deep.corpus, "pages.jsonl": deep.pages}, deep.train, deep.heldout, spec, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, write the world and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/deep_world"))
    options = parser.parse_args(arguments)
    print(json.dumps(write_deep_world(WorldSpec(), options.out)["counts"], indent=2))


if __name__ == "__main__":
    main()
