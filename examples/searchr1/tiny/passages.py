"""How places are written: the passage of the corpus and the observation the policy sees.

Invariant: every attribute of a place stands in its passage verbatim, with a space before it, so that
a policy can copy the same tokens into its own text.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.searchr1.tiny.geography import City, Country, Place


def passage(place: Place) -> str:
    """The `contents` of a corpus row: the title in double quotes, a newline, one sentence."""
    return f'"{place.name}"\n{_sentence(place)}'


def _sentence(place: Place) -> str:
    match place:
        case City(name, country, timezone):
            return f"{name} is a city in {country} with time zone {timezone}."
        case Country(name, capital, currency, continent, languages, neighbours):
            bordered = f", neighbour {' and '.join(neighbours)}" if neighbours else ""
            return (
                f"{name} is a country in {continent} with capital {capital}, "
                f"currency {currency}, language {' and '.join(languages)}{bordered}."
            )


def observation(contents: Sequence[str]) -> str:
    """What a search adds to the context, in the words of Search-R1."""
    documents = []
    for number, content in enumerate(contents, start=1):
        title, _, text = content.partition("\n")
        documents.append(f"Doc {number}(Title: {title}) {text}\n")
    return f"\n\n<information>{''.join(documents).strip()}</information>\n\n"
