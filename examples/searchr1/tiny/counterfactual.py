"""Makes fictional worlds for training: the same questions and passages with other names and facts.

A policy trained on the real facts would memorise them. If France has another capital in every case, the policy can only
learn to copy. Within a case all changes are consistent: a name is the same in question, queries and passages, and a
place states the same facts wherever it appears.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from examples.searchr1.tiny.geography import CONTINENTS, LANGUAGES, MAX_LISTED, City, Country, Place
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.questions import WorldQuestion, one_hop, two_hop
from examples.searchr1.tiny.traces import Script, Step

FAMILIAR_SHARE = 0.3
"""Share of real currencies, languages and continents in fictional worlds; the others have names of places."""
LOOKALIKE_SHARE = 0.15
"""Share of new names that begin like an earlier name of the case; search confuses such names."""
SHUFFLED_SHARE = 0.05
"""Share of cases with shuffled passages, so that the rank does not tell which passage to read."""


@dataclass(frozen=True, slots=True)
class Case:
    """Source of a script: for each search, the place searched for and the places found."""

    relation: str
    path: tuple[Place, ...]
    retrieved: tuple[tuple[Place, ...], ...]

    @property
    def answer(self) -> str:
        """First value that the last place of the path states."""
        return self.path[-1].values(self.relation)[0]

    def question(self, phrasing: int) -> WorldQuestion:
        """Return the question of the case in one of its phrasings."""
        first = self.path[0]
        if len(self.path) == 1:
            return one_hop(first, self.relation, phrasing)
        if not isinstance(first, City):
            raise TypeError(f"a two-hop case starts from a city, not from {first}")
        return two_hop(first, self.relation, self.path[-1].values(self.relation), phrasing)

    def script(self, phrasing: int, guess: str) -> Script:
        """Return the script of the case; `guess` is the answer of a policy that does not search."""
        steps = tuple(
            Step(place.name, tuple(map(passage, places)))
            for place, places in zip(self.path, self.retrieved, strict=True)
        )
        return Script(self.question(phrasing).prompt, self.relation, steps, self.answer, guess)


def real_case(question: WorldQuestion, places: Mapping[str, Place], retrieved: Mapping[str, Sequence[Place]]) -> Case:
    """Return the case of a question with the world's facts; `retrieved` is keyed by the name searched for."""
    names = (question.entity, question.country)[: question.hops]
    return Case(
        question.relation,
        tuple(places[name] for name in names),
        tuple(tuple(retrieved[name]) for name in names),
    )


class Redrawer:
    """Redraws cases with new names from `names`, which must not contain names of held-out places."""

    def __init__(
        self, names: Sequence[str], currencies: Sequence[str], timezones: Sequence[str], rng: random.Random
    ) -> None:
        self._names = names
        self._currencies = currencies
        self._timezones = timezones
        self._rng = rng

    def redraw(self, case: Case) -> Case:
        """Redraw `case` in a fictional world. 30 % of the cases keep the city names; everything else always changes."""
        new_names: dict[str, str] = {}
        new_places: dict[str, Place] = {}
        keep_cities = self._rng.random() < 0.3

        def rename(old: str) -> str:
            if old not in new_names:
                new_names[old] = self._fresh_name(tuple(new_names.values()))
            return new_names[old]

        def remake(old: Place) -> Place:
            if old.name not in new_places:
                if isinstance(old, City):
                    name = old.name if keep_cities else rename(old.name)
                    new_places[old.name] = City(name, rename(old.country), self._rng.choice(self._timezones))
                else:
                    new_places[old.name] = self._country(rename(old.name), tuple(map(rename, old.neighbours)))
            return new_places[old.name]

        path = tuple(map(remake, case.path))
        retrieved = [[remake(place) for place in places] for places in case.retrieved]
        if self._rng.random() < SHUFFLED_SHARE:
            for places in retrieved:
                self._rng.shuffle(places)
        return Case(case.relation, path, tuple(map(tuple, retrieved)))

    def _country(self, name: str, neighbours: tuple[str, ...]) -> Country:
        return Country(
            name=name,
            capital=self._rng.choice(self._names),
            currency=self._value(self._currencies),
            continent=self._value(tuple(CONTINENTS.values())),
            languages=tuple(self._value(tuple(LANGUAGES.values())) for _ in range(self._rng.randint(1, MAX_LISTED))),
            neighbours=neighbours,
        )

    def _value(self, familiar: Sequence[str]) -> str:
        return self._rng.choice(familiar if self._rng.random() < FAMILIAR_SHARE else self._names)

    def _fresh_name(self, earlier: Sequence[str]) -> str:
        name = self._rng.choice(self._names)
        if earlier and self._rng.random() < LOOKALIKE_SHARE:
            model = self._rng.choice(earlier)
            name = model[: max(3, len(model) // 2)] + name[len(name) // 2 :].lstrip(" -").lower()
        return self._rng.choice(self._names) if name in earlier else name
