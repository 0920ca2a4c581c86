"""Draws the training traces of the tiny policy, phase by phase.

Only questions of the train split are used, and no name of a held-out place is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from examples.searchr1.tiny.batches import Trace
from examples.searchr1.tiny.counterfactual import Case, Redrawer, real_case
from examples.searchr1.tiny.geography import City, Place, plain_city_names
from examples.searchr1.tiny.passages import passage
from examples.searchr1.tiny.questions import CITY_RELATIONS, COUNTRY_RELATIONS, WorldQuestion
from examples.searchr1.tiny.retrieval import DirectRetriever
from examples.searchr1.tiny.traces import (
    Behaviour,
    Script,
    write_drill,
    write_opening,
    write_repetition,
    write_trace,
)
from examples.searchr1.tiny.world import World

PHRASING_RANGE = 1 << 16
REPETITIONS = 3
DRILL_PLACES = 3
DRILL_ITEMS = 8


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the kinds of traces. An episode that neither guesses nor stops early takes the right path.

    `stop` is a share of the two-hop episodes that do not guess; `real` is the share of traces with real facts, the
    others are fictional.
    """

    repetition: float = 0.0
    opening: float = 0.0
    drill: float = 0.0
    real: float = 0.1
    guess_one_hop: float = 0.0
    guess_two_hop: float = 0.0
    stop: float = 0.0


def heldout_names(world: World) -> set[str]:
    """Return the names of held-out countries, their cities and their capitals."""
    countries = {question.country for question in world.heldout}
    cities = {city.name for city in world.cities if city.country in countries}
    capitals = {country.capital for country in world.countries if country.name in countries}
    return countries | cities | capitals


def free_names(world: World) -> list[str]:
    """Return the real place names that no held-out question uses."""
    taken = heldout_names(world)
    return [name for name in plain_city_names() if name not in taken]


class Curriculum:
    """Draws traces from the train split and writes the script of any question."""

    def __init__(self, world: World, retriever: DirectRetriever, seed: int) -> None:
        self._rng = random.Random(seed)
        self._questions = world.train
        self._places: Mapping[str, Place] = {place.name: place for place in world.places}
        rows = retriever.rows(list(self._places))
        self._retrieved = {
            name: [world.places[row] for row in found] for name, found in zip(self._places, rows, strict=True)
        }
        train_countries = {question.country for question in world.train}
        known = [country for country in world.countries if country.name in train_countries]
        self._guesses: dict[str, list[str]] = {
            relation: [value for country in known for value in country.values(relation)]
            for relation in COUNTRY_RELATIONS
        }
        self._guesses["country"] = [country.name for country in known]
        self._guesses["timezone"] = [c.timezone for c in world.cities if c.country in train_countries]
        currencies = sorted({country.currency for country in known})
        timezones = sorted({city.timezone for city in world.cities})
        self._names = free_names(world)
        self._redrawer = Redrawer(self._names, currencies, timezones, self._rng)

    def script(self, question: WorldQuestion) -> Script:
        """Return the script of the question, with real facts and the question's own phrasing."""
        case = self._case(question)
        script = case.script(0, self._rng.choice(self._guesses[question.relation]))
        return replace(script, prompt=question.prompt)

    def draw(self, mixture: Mixture) -> Trace:
        """Draw a random trace."""
        if self._rng.random() < mixture.repetition:
            names = self._rng.choices(self._names, k=self._rng.randint(3, 8))
            return Trace(write_repetition(names, REPETITIONS), 0)
        question = self._rng.choice(self._questions)
        case = self._case(question)
        if self._rng.random() >= mixture.real:
            case = self._redrawer.redraw(case)
        if self._rng.random() < mixture.drill:
            return Trace(self._drill(case), 0)
        script = case.script(self._rng.randrange(PHRASING_RANGE), self._rng.choice(self._guesses[question.relation]))
        if self._rng.random() < mixture.opening:
            return Trace(write_opening(script), len(script.prompt))
        return Trace(write_trace(script, self._behaviour(mixture, question.hops)), len(script.prompt))

    def _case(self, question: WorldQuestion) -> Case:
        return real_case(question, self._places, self._retrieved)

    def _behaviour(self, mixture: Mixture, hops: int) -> Behaviour:
        guess = mixture.guess_one_hop if hops == 1 else mixture.guess_two_hop
        if self._rng.random() < guess:
            return Behaviour.GUESS
        if hops == 2 and self._rng.random() < mixture.stop:
            return Behaviour.STOP
        return Behaviour.RIGHT

    def _drill(self, case: Case) -> str:
        places = list(dict.fromkeys(place for found in case.retrieved for place in found))
        self._rng.shuffle(places)
        places = places[:DRILL_PLACES]
        items = []
        for _ in range(DRILL_ITEMS):
            place = self._rng.choice(places)
            relation = self._rng.choice(CITY_RELATIONS if isinstance(place, City) else COUNTRY_RELATIONS)
            if stated := place.values(relation):
                items.append((place.name, relation, stated[0]))
        return write_drill([passage(place) for place in places], items)
