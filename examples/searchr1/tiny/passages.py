"""Writes places as passages of the corpus and as observations that the policy reads.

Invariant: a passage contains every attribute of its place verbatim, after a space, so that a policy can copy the same
tokens into its own text.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.searchr1.tiny.geography import City, Country, Place


def passage(place: Place) -> str:
    """Return the `contents` of a corpus row: the title in double quotes, a newline, one line of facts."""
    return f'"{place.name}"\n{_sentence(place)}'


def facts(place: Place) -> list[tuple[str, tuple[str, ...]]]:
    """Return the facts in the order of the passage: the words before the values, and the values."""
    match place:
        case City(_, country, timezone):
            return [("country", (country,)), ("time zone", (timezone,))]
        case Country(_, capital, currency, continent, languages, neighbours):
            stated = [("continent", (continent,)), ("capital", (capital,)), ("currency", (currency,))]
            return [*stated, ("language", languages), *([("neighbour", neighbours)] if neighbours else [])]


def _sentence(place: Place) -> str:
    stated = ", ".join(f"{words} {' and '.join(values)}" for words, values in facts(place))
    return f"{place.name}: {stated}."


def observation(contents: Sequence[str]) -> str:
    """Return the observation of a search result, in Search-R1's format."""
    documents = []
    for number, content in enumerate(contents, start=1):
        title, _, text = content.partition("\n")
        documents.append(f"Doc {number}(Title: {title}) {text}\n")
    return f"\n\n<information>{''.join(documents).strip()}</information>\n\n"
