"""The providers of web search, each as data: where it is asked, with which keys, in which shape, and how its
answer reads.

Field names are those of the public references of the APIs:
  google   Custom Search JSON API   items[].{title, link, snippet}; closed to new customers, and announced to
                                    end in January 2027
  serpapi  Google by SerpApi        answer_box, organic_results[], related_questions[].{question, snippet, link}
  serper   Google by serper.dev     answerBox, knowledgeGraph, organic[], peopleAlsoAsk[]
  brave    Brave Search API         web.results[].{title, url, description}
  bing     Bing Web Search v7       webPages.value[].{name, url, snippet}; Microsoft retired the public API in
                                    August 2025, so this one is for endpoints that are compatible with it

Nothing here touches the network. An answer that is not of its provider's shape raises MalformedAnswer: what
is broken must not read as "nothing was found".
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Json = Mapping[str, Any]


class Result(NamedTuple):
    """One thing found."""

    title: str
    url: str
    """Empty where the provider answers by itself and names no page."""
    snippet: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One page of results, each kind best first."""

    organic: tuple[Result, ...]
    direct: tuple[Result, ...] = ()
    """What the provider answers itself, above its results."""
    related: tuple[Result, ...] = ()
    """Answers to questions that are near to the query, below its results."""
    more: bool = False
    """Whether the provider has a further page."""


class MalformedAnswer(ValueError):
    """The answer is not of the provider's shape; the text says where."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A secret of the environment, and how it travels."""

    variable: str
    place: Literal["header", "parameter"]
    name: str


@dataclass(frozen=True, slots=True)
class Provider:
    """What there is to know about one API."""

    name: str
    endpoint: str
    method: Literal["GET", "POST"]
    """GET sends the request as URL parameters, POST as JSON."""
    credentials: tuple[Credential, ...]
    page_size: int
    """Most results of one request."""
    max_results: int
    """Most results of one query, over all its pages."""
    request: Callable[[str, int, int], dict[str, str | int]]
    """(query, results a page, page from 0) -> parameters or body."""
    signs: frozenset[str]
    """Top-level keys of an answer; one that has none of them is not an answer."""
    read: Callable[[Json], Answer]

    def parse(self, body: object) -> Answer:
        """The results in a decoded JSON body. Raises MalformedAnswer."""
        if not isinstance(body, dict):
            raise MalformedAnswer(f"the answer is a {type(body).__name__}, not an object")
        if not self.signs & body.keys():
            raise MalformedAnswer(f"the answer has none of {', '.join(sorted(self.signs))}")
        return self.read(body)


def _section(body: Json, key: str) -> Json:
    """The object at `key`; empty where there is none."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedAnswer(f"`{key}` is a {type(value).__name__}, not an object")
    return value


def _entries(body: Json, key: str) -> list[Json]:
    """The list of objects at `key`; empty where there is none."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise MalformedAnswer(f"`{key}` is not a list of objects")
    return value


def _text(value: object) -> str:
    """Running text without entities, line breaks and doubled blanks; empty for what is not text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return " ".join(html.unescape(value).split()) if isinstance(value, str) else ""


def _results(entries: Iterable[Json], title: str, url: str, *snippet: str) -> tuple[Result, ...]:
    """Those of `entries` that say anything, by the keys of their fields; `snippet` parts are joined."""
    found = []
    for entry in entries:
        parts = dict.fromkeys(_text(entry.get(key)) for key in snippet)
        result = Result(_text(entry.get(title)), _text(entry.get(url)), " ".join(filter(None, parts)))
        if result.snippet or (result.title and result.url):
            found.append(result)
    return tuple(found)


def _read_google(body: Json) -> Answer:
    return Answer(
        organic=_results(_entries(body, "items"), "title", "link", "snippet"),
        more=bool(_entries(_section(body, "queries"), "nextPage")),
    )


def _read_serpapi(body: Json) -> Answer:
    # A search that found nothing has an `error` too, and the status Success.
    if "error" in body and _section(body, "search_metadata").get("status") != "Success":
        raise MalformedAnswer(f"the provider says: {_text(body['error'])}")
    organic = _results(_entries(body, "organic_results"), "title", "link", "snippet")
    return Answer(
        organic=organic,
        direct=_results([_section(body, "answer_box")], "title", "link", "answer", "result", "snippet"),
        related=_results(_entries(body, "related_questions"), "question", "link", "snippet"),
        more="next" in _section(body, "serpapi_pagination"),
    )


def _read_serper(body: Json) -> Answer:
    organic = _results(_entries(body, "organic"), "title", "link", "snippet")
    box = _results([_section(body, "answerBox")], "title", "link", "answer", "snippet")
    graph = _results([_section(body, "knowledgeGraph")], "title", "descriptionLink", "description")
    return Answer(
        organic=organic,
        direct=box + graph,
        related=_results(_entries(body, "peopleAlsoAsk"), "question", "link", "snippet"),
        more=bool(organic),
    )


def _read_brave(body: Json) -> Answer:
    return Answer(
        organic=_results(_entries(_section(body, "web"), "results"), "title", "url", "description"),
        more=_section(body, "query").get("more_results_available") is True,
    )


def _read_bing(body: Json) -> Answer:
    organic = _results(_entries(_section(body, "webPages"), "value"), "name", "url", "snippet")
    return Answer(organic=organic, more=bool(organic))


_GOOGLE = Provider(
    name="google",
    endpoint="https://www.googleapis.com/customsearch/v1",
    method="GET",
    credentials=(
        Credential("GOOGLE_API_KEY", "parameter", "key"),
        Credential("GOOGLE_CSE_ID", "parameter", "cx"),
    ),
    page_size=10,
    max_results=100,
    request=lambda query, count, page: {"q": query, "num": count, "start": 1 + page * count},
    signs=frozenset({"kind", "queries", "searchInformation", "items"}),
    read=_read_google,
)

_SERPAPI = Provider(
    name="serpapi",
    endpoint="https://serpapi.com/search.json",
    method="GET",
    credentials=(Credential("SERPAPI_API_KEY", "parameter", "api_key"),),
    page_size=10,
    max_results=100,
    # Google itself answers ten results at a time whatever `num` says.
    request=lambda query, _, page: {"engine": "google", "q": query, "start": page * 10},
    signs=frozenset({"search_metadata", "organic_results", "error"}),
    read=_read_serpapi,
)

_SERPER = Provider(
    name="serper",
    endpoint="https://google.serper.dev/search",
    method="POST",
    credentials=(Credential("SERPER_API_KEY", "header", "X-API-KEY"),),
    page_size=10,
    max_results=100,
    request=lambda query, count, page: {"q": query, "num": count, **({"page": page + 1} if page else {})},
    signs=frozenset({"searchParameters", "organic"}),
    read=_read_serper,
)

_BRAVE = Provider(
    name="brave",
    endpoint="https://api.search.brave.com/res/v1/web/search",
    method="GET",
    credentials=(Credential("BRAVE_API_KEY", "header", "X-Subscription-Token"),),
    page_size=20,
    max_results=200,
    request=lambda query, count, page: {
        "q": query,
        "count": count,
        "offset": page,
        "text_decorations": "false",
        "result_filter": "web",
    },
    signs=frozenset({"type", "query", "web"}),
    read=_read_brave,
)

_BING = Provider(
    name="bing",
    endpoint="https://api.bing.microsoft.com/v7.0/search",
    method="GET",
    credentials=(Credential("BING_API_KEY", "header", "Ocp-Apim-Subscription-Key"),),
    page_size=50,
    max_results=1000,
    request=lambda query, count, page: {
        "q": query,
        "count": count,
        "offset": page * count,
        "responseFilter": "Webpages",
    },
    signs=frozenset({"_type", "queryContext", "webPages"}),
    read=_read_bing,
)

PROVIDERS: Mapping[str, Provider] = {
    provider.name: provider for provider in (_GOOGLE, _SERPAPI, _SERPER, _BRAVE, _BING)
}
"""All providers, by name."""
