"""Writes questions about places, in several phrasings, and their Search-R1 rows.

A one-hop question asks for an attribute of a place. A two-hop question asks for an attribute of a city's country, so
that the country must be found first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.searchr1.tiny.geography import City, Place

COUNTRY_RELATIONS = ("capital", "currency", "continent", "language", "neighbour")
CITY_RELATIONS = ("country", "timezone")

ONE_HOP_PHRASINGS: Mapping[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {x}?",
        "Which city is the capital of {x}?",
        "Can you name the capital of {x}?",
        "{x} has which capital?",
    ),
    "currency": (
        "What is the currency of {x}?",
        "Which currency is used in {x}?",
        "Can you name the currency of {x}?",
        "{x} uses which currency?",
    ),
    "continent": (
        "On which continent is {x}?",
        "What is the continent of {x}?",
        "Can you name the continent of {x}?",
        "{x} is on which continent?",
    ),
    "language": (
        "What is a language of {x}?",
        "Which language is spoken in {x}?",
        "Can you name a language of {x}?",
        "{x} has which language?",
    ),
    "country": (
        "In which country is {x}?",
        "What is the country of {x}?",
        "Can you name the country where {x} is?",
        "{x} is in which country?",
    ),
    "timezone": (
        "What is the time zone of {x}?",
        "In which time zone is {x}?",
        "Can you name the time zone of {x}?",
        "{x} has which time zone?",
    ),
    "neighbour": (
        "What is a neighbour of {x}?",
        "Which country borders {x}?",
        "Can you name a neighbour of {x}?",
        "{x} has which neighbour?",
    ),
}

TWO_HOP_PHRASINGS: Mapping[str, tuple[str, ...]] = {
    relation: (
        f"What is {article} {relation} of the country where {{x}} is?",
        f"Which {relation} has the country of {{x}}?",
        f"Can you name {article} {relation} of the country in which {{x}} lies?",
        f"{{x}} is in a country with which {relation}?",
    )
    for relation, article in (
        ("capital", "the"),
        ("currency", "the"),
        ("continent", "the"),
        ("language", "a"),
        ("neighbour", "a"),
    )
}


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A question, with its starting place and its relation, which scripted policies read."""

    text: str
    hops: int
    entity: str
    relation: str
    country: str
    """Country that decides the split; with two hops, also the place of the second search."""
    answers: tuple[str, ...]
    """All accepted answers, in the order of the passage."""

    @property
    def prompt(self) -> str:
        """Prompt of the policy."""
        return f"Question: {self.text}\n"

    def row(self, split: str, index: int) -> dict[str, Any]:
        """Return the question as a row in Search-R1's format."""
        return {
            "data_source": "tiny_world",
            "prompt": [{"role": "user", "content": self.prompt}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": list(self.answers)}},
            "extra_info": {
                "split": split,
                "index": index,
                "hops": self.hops,
                "question": self.text,
                "entity": self.entity,
                "relation": self.relation,
                "country": self.country,
            },
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> WorldQuestion:
        """Return the question in `row`, a row in Search-R1's format: the inverse of the method `row`."""
        extra = row["extra_info"]
        return cls(
            text=extra["question"],
            hops=extra["hops"],
            entity=extra["entity"],
            relation=extra["relation"],
            country=extra["country"],
            answers=tuple(row["reward_model"]["ground_truth"]["target"]),
        )


def one_hop(place: Place, relation: str, phrasing: int) -> WorldQuestion:
    """Ask for an attribute of `place`."""
    country = place.country if isinstance(place, City) else place.name
    text = _phrase(ONE_HOP_PHRASINGS[relation], phrasing, place.name)
    return WorldQuestion(text, 1, place.name, relation, country, place.values(relation))


def two_hop(city: City, relation: str, answers: tuple[str, ...], phrasing: int) -> WorldQuestion:
    """Ask for `relation` of the country of `city`; `answers` are that country's values."""
    text = _phrase(TWO_HOP_PHRASINGS[relation], phrasing, city.name)
    return WorldQuestion(text, 2, city.name, relation, city.country, answers)


def _phrase(phrasings: tuple[str, ...], phrasing: int, name: str) -> str:
    return phrasings[phrasing % len(phrasings)].format(x=name)
