"""Scripted policy, the oracle: it takes the right path and reads the answer from the retrieved passages.

Its score is the ceiling of any policy with this protocol: it fails only if the retriever fails. It reads a question's
entity, relation and hops from `extra`, and takes every fact from the passages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlsys.data.answers import exact_match
from rlsys.data.question import Question

Retrieve = Callable[[str], Awaitable[list[str]]]
"""Query -> `contents` of the passages found, best first."""

FACTS = {
    relation: re.compile(rf"[:,] {words} (.+?)(?: and |,|\.$)")
    for relation, words in (
        ("country", "country"),
        ("timezone", "time zone"),
        ("continent", "continent"),
        ("capital", "capital"),
        ("currency", "currency"),
        ("language", "language"),
        ("neighbour", "neighbour"),
    )
}
"""Relation -> pattern of its statement in a passage."""

CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class OracleEpisode:
    """Result of one question: `found[i]` is True if search i found the wanted passage."""

    answer: str | None
    found: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Shares in [0, 1]: exact matches over questions, and searches that found the wanted passage."""

    oracle_em: float
    recall_at_3: float


async def answer(question: Question, retrieve: Retrieve) -> OracleEpisode:
    """Follow the correct searches; if a search misses its passage, the episode ends without an answer."""
    place, relation = str(question.extra["entity"]), str(question.extra["relation"])
    wanted = ["country", relation] if question.extra["hops"] == 2 else [relation]
    found = []
    for step in wanted:
        fact = read_fact(await retrieve(place), place, step)
        found.append(fact is not None)
        if fact is None:
            return OracleEpisode(None, tuple(found))
        place = fact
    return OracleEpisode(place, tuple(found))


def read_fact(contents: Sequence[str], place: str, relation: str) -> str | None:
    """Return the value of `relation` in the passage about `place`; None if no passage states it."""
    for content in contents:
        title, _, text = content.partition("\n")
        match = FACTS[relation].search(text)
        if title.strip('"') == place and match:
            return match.group(1)
    return None


async def measure_ceiling(questions: Sequence[Question], retrieve: Retrieve) -> Ceiling:
    """Run the oracle over the questions, `CONCURRENCY` at a time. `recall_at_3` is over the searches made."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def walk(question: Question) -> OracleEpisode:
        async with gate:
            return await answer(question, retrieve)

    episodes = await asyncio.gather(*map(walk, questions))
    found = [hit for episode in episodes for hit in episode.found]
    exact = [
        episode.answer is not None and exact_match(episode.answer, question.answers)
        for episode, question in zip(episodes, questions, strict=True)
    ]
    return Ceiling(sum(exact) / len(questions), sum(found) / len(found))
